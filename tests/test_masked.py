"""The edge-masked model against a slow one made of hooks, its buffer against plain einsums, and the
identities it has to keep."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from conftest import random_gpt2, random_llama
from einops import einsum
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from oa_utils.buffer import FillAtPositions, WriterBuffer
from oa_utils.fills import Activations, Constants
from oa_utils.graph import SLOTS, Edge
from oa_utils.masked import MaskedModel
from oa_utils.models import Model, recording, wrap

FAMILIES = ["gpt2", "llama", "grouped"]
LAYERS = 3
HEADS = 4
D = 32
VOCAB = 61
T = 9
BATCH = 5


def random_model(family: str) -> Model:
    """A small random model with weights large enough that every path matters."""
    if family == "gpt2":
        hf = random_gpt2(vocab=VOCAB, n_positions=16, bos_token_id=0, eos_token_id=0)
    else:
        kv_heads = 2 if family == "grouped" else HEADS
        context = {"max_position_embeddings": 16, "bos_token_id": 0}
        hf = random_llama(vocab=VOCAB, kv_heads=kv_heads, **context)
    return wrap(hf, name=family)


def ungrouped(model: Model) -> Model:
    """The same model with its shared keys and values repeated, one for each query head."""
    original = model.bridge.original_model
    config = LlamaConfig(**{**original.config.to_dict(), "num_key_value_heads": HEADS})
    hf = LlamaForCausalLM(config)
    state = {}
    for key, value in original.state_dict().items():
        if "k_proj" in key or "v_proj" in key:
            heads = value.unflatten(0, (2, -1)).repeat_interleave(HEADS // 2, dim=0)
            value = heads.flatten(0, 1)
        state[key.replace("._original_component", "")] = value
    hf.load_state_dict({key: state[key] for key in hf.state_dict()})
    return wrap(hf, name="ungrouped")


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Models this small gain nothing from threads, and lose much on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def models() -> dict[str, MaskedModel]:
    return {family: MaskedModel(random_model(family)) for family in FAMILIES}


@pytest.fixture(scope="module")
def references(models) -> dict[str, Model]:
    """The models that hooks work on: one input for each head's k and v needs heads of their own."""
    plain = {family: models[family].model for family in ("gpt2", "llama")}
    return plain | {"grouped": ungrouped(models["grouped"].model)}


@pytest.fixture(params=FAMILIES)
def masked(request, models) -> MaskedModel:
    return models[request.param]


def prompts(n: int = BATCH, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Prompts of different lengths; what follows the last token is noise."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, VOCAB, (n, T), generator=generator)
    tokens[:, 0] = 0
    last = torch.randint(1, T, (n,), generator=generator)
    last[0] = T - 1
    return tokens, last


def random_mask(masked: MaskedModel, n: int = BATCH, seed: int = 2) -> Tensor:
    """A third of the edges ablated, a third kept, a third in between."""
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.rand(n, masked.graph.n_edges, generator=generator) - 1).clamp(0, 1)


def constants(rows: int | None = None, seed: int = 3) -> Constants:
    generator = torch.Generator().manual_seed(seed)
    lead = () if rows is None else (rows,)
    shapes = ((D,), (LAYERS, HEADS, D // HEADS), (LAYERS, D))
    return Constants(*(0.5 * torch.randn(*lead, *shape, generator=generator) for shape in shapes))


def fills(masked: MaskedModel) -> dict[str, Constants | Activations]:
    other_tokens, _ = prompts(seed=7)
    return {
        "shared": constants(),
        "position": constants(T),
        "pooled": constants(4),
        "activations": masked.activations(other_tokens),
    }


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [tensor.clone().requires_grad_() for tensor in tensors]


def some_loss(logp: Tensor) -> Tensor:
    """Not symmetric in anything, so that no gradient cancels."""
    return (logp * torch.linspace(-1, 1, logp.numel()).view_as(logp).sin()).sum() / len(logp)


def value_and_gradients(run, mask: Tensor, fill: Constants) -> tuple[Tensor, list[Tensor]]:
    mask, *parts = leaves(mask, *fill)
    logp = run(mask, Constants(*parts))
    some_loss(logp).backward()
    return logp.detach(), [leaf.grad for leaf in (mask, *parts)]


def assert_close(one, other, tolerance: float = 1e-5):
    torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


# ---- the buffer: reads are one einsum


class Plain:
    """The plain form of a buffer of writers, by einsums on stacks: what autograd does by itself."""

    def __init__(self, fill: FillAtPositions, live: Tensor, everywhere: bool):
        self.base = fill.embed
        self.written = fill.written
        self.live = live
        self.everywhere = everywhere
        self.values: dict[int, Tensor] = {}  # of live writers [b p d]

    def write(self, vertex: int, x: Tensor, weight: Tensor | None = None):
        if weight is not None:
            x = einsum(x, weight, "n b p e, n e d -> n b p d")
        writers = [i for i in range(vertex, len(self.live)) if self.live[i]]
        for writer, value in zip(writers, x, strict=False):
            self.values[writer] = value

    def read(self, mask: Tensor, first: int = 0) -> Tensor:
        mask = mask.expand(BATCH, -1, -1)
        n = mask.shape[-1]
        none = torch.zeros_like(self.values[0])
        values = [self.values.get(writer, none) for writer in range(first, first + n)]
        x = einsum(mask, torch.stack(values), "b reader writer, writer b p d -> reader b p d")
        # constants get gradient along ablated edges and change no value
        passes = 1 - mask.detach() if self.everywhere else (mask == 0).to(mask.dtype)
        written = self.written[first : first + n]
        slopes = written - written.detach()
        x = x + einsum(passes, slopes, "b reader writer, writer p d -> reader b p d")
        return x + self.base if first == 0 else x


def read_everything(make, inputs: SimpleNamespace) -> list[Tensor]:
    """Reads of all kinds, with a writer between them that depends on an earlier read."""
    fill = FillAtPositions(
        inputs.base,
        torch.zeros(1, 1, 1, 1, 2),
        torch.zeros(1, 1, 1, 6),
        torch.zeros(1, 1, 1, 6),
        inputs.written,
    )
    buffer = make(fill)
    buffer.write(0, inputs.embed[None])
    live_heads = inputs.live[1:3]
    buffer.write(1, inputs.heads[live_heads], inputs.weight[live_heads])
    early = buffer.read(inputs.early)
    late = buffer.read(inputs.late, first=1)
    buffer.write(3, (early.prod(0) + late[0]).tanh()[None])
    buffer.base = buffer.base + inputs.more
    whole = buffer.read(inputs.whole)
    return [early, late, whole, *inputs.finish(buffer)]


@pytest.mark.parametrize("dead", [None, 1, 2])
@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("rows", [1, 4], ids=["shared", "position"])
@pytest.mark.parametrize("masks", [1, BATCH])
def test_reads_of_the_buffer_are_one_einsum_in_values_and_gradients(masks, rows, everywhere, dead):
    """Four writers: embed, two heads (one of them may be dead) and an MLP that reads before."""
    generator = torch.Generator().manual_seed(4)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def mask(readers: int, writers: int) -> Tensor:
        drawn = 3 * torch.rand(masks, readers, writers, generator=generator) - 1
        return drawn.clamp(0, 1)

    live = torch.ones(4, dtype=torch.bool)
    if dead is not None:
        live[dead] = False
    given = {
        "embed": random(BATCH, 4, 6),
        "heads": random(2, BATCH, 4, 3),
        "written": random(4, rows, 6),
        "early": mask(2, 3),
        "late": mask(1, 2),
        "whole": mask(2, 4),
        "at_last": mask(2, 4),
        "projected": mask(3, 4),
    }
    weight = random(2, 3, 6)
    base = random(1, rows, 6)
    more = random(1, rows, 6)
    project = random(2, 6, 3)
    last = torch.tensor([3, 0, 2, 1, 3])
    eps = 1e-5

    def fast_end(inputs: SimpleNamespace, buffer: WriterBuffer) -> list[Tensor]:
        narrow = buffer.at(last)
        normed, plain = narrow.project(inputs.projected, project)
        return [narrow.read(inputs.at_last), normed, plain]

    def plain_end(inputs: SimpleNamespace, buffer: Plain) -> list[Tensor]:
        each = torch.arange(BATCH)
        at_last = buffer.read(inputs.at_last)[:, each, last][:, :, None]
        mixed = buffer.read(inputs.projected)[:, each, last][:, :, None]
        scale = (mixed[:2].square().mean(-1, keepdim=True) + eps).rsqrt()
        normed = einsum(mixed[:2] * scale, project, "n b p d, n d e -> n b p e")
        return [at_last, normed, mixed[2:]]

    def fast_buffer(fill: FillAtPositions) -> WriterBuffer:
        shape = (1 + int(live.sum()), BATCH, 4)
        return WriterBuffer(fill, live, shape, eps, everywhere).open()

    def plain_buffer(fill: FillAtPositions) -> Plain:
        return Plain(fill, live, everywhere)

    results = []
    for make, end in ((fast_buffer, fast_end), (plain_buffer, plain_end)):
        parts = dict(zip(given, leaves(*given.values()), strict=True))
        inputs = SimpleNamespace(**parts, weight=weight, base=base, more=more, live=live)
        inputs.finish = lambda buffer, end=end, inputs=inputs: end(inputs, buffer)
        reads = read_everything(make, inputs)
        sum(some_loss(read) for read in reads).backward()
        gradients = {name: part.grad for name, part in parts.items()}
        results.append(([read.detach() for read in reads], gradients))
    (fast, fast_gradients), (plain, plain_gradients) = results
    for one, other in zip(fast, plain, strict=True):
        assert other.abs().max() > 0.1
        assert_close(one, other)
    for name, gradient in plain_gradients.items():
        assert gradient.abs().max() > 1e-3, name
        assert_close(fast_gradients[name], gradient)


