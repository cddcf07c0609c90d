"""The edge-masked model against a slow one made of hooks, its buffer against plain einsums, and the
identities it has to keep."""

import gc
import inspect
import weakref
from types import SimpleNamespace

import pytest
import torch
from conftest import random_gpt2, random_llama
from einops import einsum
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from oa_utils.buffer import FillAtPositions, Scratch, WriterBuffer
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

EPS = 1e-5
WIDTH = 6  # of the stream in these tests, of four positions


class Plain:
    """The plain form of a buffer of writers: einsums on stacks, and the gradients that autograd
    finds by itself."""

    def __init__(self, fill: FillAtPositions, live: Tensor, everywhere: bool):
        self.base = fill.embed
        self.written = fill.written
        self.live = live
        self.everywhere = everywhere
        self.values = [torch.zeros(BATCH, 4, WIDTH) for _ in live]
        self.pick = slice(None)  # positions that are read

    def write(self, vertex: int, x: Tensor, weight: Tensor | None = None) -> None:
        if weight is not None:
            x = einsum(x, weight, "n b p e, n e d -> n b p d")
        writers = [i for i in range(vertex, len(self.live)) if self.live[i]]
        for writer, value in zip(writers, x, strict=False):
            self.values[writer] = value

    def at(self, position: Tensor) -> "Plain":
        self.pick = (torch.arange(BATCH)[:, None], position[:, None])
        return self

    def read(self, mask: Tensor, first: int = 0) -> Tensor:
        mask = mask.expand(BATCH, -1, -1)
        writers = slice(first, first + mask.shape[-1])
        values = torch.stack(self.values[writers])
        x = einsum(mask, values, "b reader writer, writer b p d -> reader b p d")
        # constants get gradient along ablated edges and change no value
        weight = 1 - mask.detach() if self.everywhere else (mask == 0).to(mask.dtype)
        slope = self.written[writers] - self.written[writers].detach()
        x = x + einsum(weight, slope, "b reader writer, writer p d -> reader b p d")
        if first == 0:
            x = x + self.base
        return x if self.pick == slice(None) else x[:, *self.pick]

    def project(self, mask: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        x = self.read(mask)
        n = len(weight)
        normed = x[:n] * (x[:n].square().mean(-1, keepdim=True) + EPS).rsqrt()
        return einsum(normed, weight, "n b p d, n d e -> n b p e"), x[n:]


def every_kind_of_read(buffer: WriterBuffer | Plain, given: SimpleNamespace) -> list[Tensor]:
    """Four writers: embed, two heads (one of them may be dead), and one that has read before."""
    heads = buffer.live[1:3]
    buffer.write(0, given.embed[None])
    buffer.write(1, given.heads[heads], given.W_O[heads])
    early = buffer.read(given.early)
    late = buffer.read(given.late, first=1)
    buffer.write(3, (early[:1] + late[:1]).tanh())
    buffer.base = buffer.base + given.more
    whole = buffer.read(given.whole)
    narrow = buffer.at(torch.tensor([3, 0, 2, 1, 3]))
    projected, rest = narrow.project(given.projected, given.W_in)
    return [early, late, whole, projected, rest, narrow.read(given.at_last)]


@pytest.mark.parametrize("dead", [None, 1, 2])
@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("rows", [1, 4], ids=["shared", "position"])
@pytest.mark.parametrize("masks", [1, BATCH])
def test_reads_of_the_buffer_are_einsums_in_values_and_gradients(masks, rows, everywhere, dead):
    generator = torch.Generator().manual_seed(4)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def mask(readers: int, writers: int) -> Tensor:
        drawn = torch.rand(masks, readers, writers, generator=generator)
        return (3 * drawn - 1).clamp(0, 1)

    live = torch.ones(4, dtype=torch.bool)
    if dead is not None:
        live[dead] = False
    weights = {
        "W_O": random(2, 3, WIDTH),
        "W_in": random(2, WIDTH, 3),
        "more": random(1, rows, WIDTH),
    }
    trained = {
        "written": random(4, rows, WIDTH),
        "embed": random(BATCH, 4, WIDTH),
        "heads": random(2, BATCH, 4, 3),
        "early": mask(2, 3),
        "late": mask(4, 2),
        "whole": mask(2, 4),
        "projected": mask(3, 4),
        "at_last": mask(2, 4),
    }
    base = random(1, rows, WIDTH)
    nothing = torch.zeros(1, 1, 1, WIDTH)

    def run(fast: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
        parts = dict(zip(trained, leaves(*trained.values()), strict=True))
        fill = FillAtPositions(base, nothing[None], nothing, nothing, parts["written"])
        if fast:
            shape = (1 + int(live.sum()), BATCH, 4)
            scratch = Scratch(fill.embed, 0, [])
            buffer = WriterBuffer(fill, live, shape, EPS, everywhere, scratch).open()
        else:
            buffer = Plain(fill, live, everywhere)
        reads = every_kind_of_read(buffer, SimpleNamespace(**parts, **weights))
        sum(some_loss(read) for read in reads).backward()
        return reads, {name: part.grad for name, part in parts.items()}

    reads, gradients = run(fast=True)
    wanted, wanted_gradients = run(fast=False)
    for one, other in zip(reads, wanted, strict=True):
        assert other.abs().max() > 0.1
        assert_close(one, other)
    for name, gradient in wanted_gradients.items():
        assert gradient.abs().max() > 1e-3, name
        assert_close(gradients[name], gradient)


# ---- the oracle: hooks on the bridge, one sum over edges at every input


def oracle(
    model: Model,
    graph,
    tokens: Tensor,
    last: Tensor,
    mask: Tensor,
    fill: Constants | Activations,
    everywhere: bool = False,
) -> Tensor:
    """The same log-probabilities by naive per-edge sums in the hooks of the bridge."""
    bridge = split_inputs(model)
    attn, mlp, out = graph.blocks(mask.expand(len(tokens), -1))
    W_O = torch.stack([layer.W_O for layer in model.layers])
    if isinstance(fill, Constants):
        parts = fill if fill.embed.ndim == 2 else [part[None] for part in fill]
        at = torch.arange(tokens.shape[1]).clamp(max=len(parts[0]) - 1)
        embed, heads, mlps = (part[at][None] for part in parts)
    else:
        embed, heads, mlps = fill.embed, fill.heads, fill.mlps
    by_head = torch.einsum("bplhe,lhed->bplhd", heads, W_O)
    by_layer = torch.cat((by_head, mlps[..., None, :]), dim=3).flatten(2, 3)
    ablated = torch.cat((embed[:, :, None], by_layer), dim=2).expand(len(tokens), -1, -1, -1)
    seen: list[Tensor] = []  # what each writer wrote [batch, pos, d]

    def mix(alpha: Tensor, biases: int) -> Tensor:
        """[batch, writer] -> [batch, pos, d], one term for each edge."""
        n = alpha.shape[-1]
        alpha = alpha[:, None, :, None]
        value = torch.stack(seen[:n], dim=2)
        a = ablated[:, :, :n]
        passes = 1 - alpha.detach() if everywhere else (alpha == 0).to(alpha.dtype)
        carried = alpha * value + (1 - alpha) * a.detach() + passes * (a - a.detach())
        return carried.sum(2) + sum((layer.b_O for layer in model.layers[:biases]), torch.zeros(D))

    def clean_first(new: Tensor, old: Tensor) -> Tensor:
        return torch.cat((old[:, :1], new[:, 1:]), dim=1)

    def keep(x, hook):
        seen.append(x)

    def keep_heads(x, hook):
        seen.extend(x.unbind(2))

    def into_heads(layer, slot):
        def hook(x, hook):
            mixed = [mix(attn[layer][:, slot, head], layer) for head in range(HEADS)]
            return clean_first(torch.stack(mixed, dim=2), x)

        return hook

    def into_mlp(layer):
        return lambda x, hook: clean_first(mix(mlp[layer], layer + 1), x)

    hooks = [("blocks.0.hook_resid_pre", keep)]
    for i in range(LAYERS):
        name = f"blocks.{i}"
        for number, slot in enumerate(SLOTS):
            hooks.append((f"{name}.attn.hook_{slot}_input", into_heads(i, number)))
        hooks.append((f"{name}.attn.hook_result", keep_heads))
        hooks.append((f"{name}.hook_mlp_in", into_mlp(i)))
        hooks.append((f"{name}.hook_mlp_out", keep))
    end = f"blocks.{LAYERS - 1}.hook_resid_post"
    hooks.append((end, lambda x, hook: clean_first(mix(out, LAYERS), x)))
    return hooked(bridge, tokens, last, hooks)


def split_inputs(model: Model):
    """The model's bridge, with an input of its own for each q, k, v of a head and for each MLP."""
    bridge = model.bridge
    bridge.set_use_split_qkv_input(True)
    bridge.set_use_attn_result(True)
    bridge.set_use_hook_mlp_in(True)
    return bridge


def hooked(bridge, tokens: Tensor, last: Tensor, hooks: list) -> Tensor:
    logits = bridge.run_with_hooks(tokens, fwd_hooks=hooks, return_type="logits")
    return logits[torch.arange(len(tokens)), last].log_softmax(-1)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["shared", "position", "pooled"])
@pytest.mark.parametrize("everywhere", [False, True])
def test_equals_the_hook_based_oracle_in_values_and_gradients(
    models, references, family, name, everywhere
):
    masked = models[family]
    reference = references[family]
    tokens, last = prompts()
    mask = random_mask(masked)
    fill = fills(masked)[name]

    def fast(mask, fill):
        return masked(tokens, last, mask, fill, constants_everywhere=everywhere)

    def slow(mask, fill):
        return oracle(reference, masked.graph, tokens, last, mask, fill, everywhere)

    value, gradients = value_and_gradients(fast, mask, fill)
    wanted, wanted_gradients = value_and_gradients(slow, mask, fill)
    assert_close(value, wanted)
    for one, other in zip(gradients, wanted_gradients, strict=True):
        assert other.abs().max() > 1e-3
        assert_close(one, other)


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_the_hook_based_oracle_with_activations_of_other_prompts(models, references, family):
    masked = models[family]
    tokens, last = prompts()
    [mask] = leaves(random_mask(masked))
    fill = fills(masked)["activations"]
    fast = masked(tokens, last, mask, fill)
    slow = oracle(references[family], masked.graph, tokens, last, mask, fill)
    assert_close(fast, slow)
    assert_close(*(torch.autograd.grad(some_loss(logp), mask)[0] for logp in (fast, slow)))


# ---- identities


def edges_from(graph, vertex: str) -> Tensor:
    return graph.src == graph.vertex_index(vertex)


@pytest.mark.parametrize("skip_dead", [False, True])
def test_all_edges_kept_reproduces_the_model(masked, skip_dead):
    tokens, last = prompts()
    want = masked.model(tokens, last)
    for fill in fills(masked).values():
        for shape, dtype in ((BATCH, torch.float32), (1, torch.bool)):
            mask = torch.ones(shape, len(masked.graph), dtype=dtype)
            assert_close(masked(tokens, last, mask, fill, skip_dead=skip_dead), want)


@pytest.mark.parametrize("name", ["shared", "position", "pooled", "activations"])
@pytest.mark.parametrize("vertex", ["embed", "a0.h1", "a1.h3", "a2.h0", "m0", "m1", "m2"])
def test_ablating_all_out_edges_of_a_vertex_ablates_the_vertex(masked, name, vertex):
    tokens, last = prompts()
    fill = fills(masked)[name]
    graph = masked.graph
    model = masked.model
    kind = vertex[0]
    layer = 0 if vertex == "embed" else int(vertex[1])
    site = {"e": "resid", "a": "z", "m": "mlp"}[kind]

    def replacement() -> Tensor:
        """What the vertex is said to have written [1 or batch, T, width]."""
        part = {"e": fill.embed, "a": fill.heads, "m": fill.mlps}[kind]
        if name == "shared":
            part = part[None]
        if name != "activations":
            at = torch.arange(T).clamp(max=len(part) - 1)
            part = part[at][None]
        if kind == "a":
            return part[:, :, layer, int(vertex.split("h")[1])]
        return part[:, :, layer] if kind == "m" else part

    def edit(where: str, i: int, value: Tensor) -> Tensor:
        if (where, i) != (site, layer):
            return value
        value = value.clone()
        old = value[:, :, int(vertex.split("h")[1])] if kind == "a" else value
        old[:, 1:] = replacement()[:, 1:]
        return value

    mask = torch.ones(1, len(graph)).masked_fill(edges_from(graph, vertex), 0)
    want = model(tokens, last, edit=edit)
    assert (want - model(tokens, last)).abs().max() > 1e-2
    for skip_dead in (False, True):
        assert_close(masked(tokens, last, mask, fill, skip_dead=skip_dead), want)


@pytest.mark.parametrize("skip_dead", [False, True])
def test_empty_circuit_ignores_the_prompt_but_not_what_stays_clean(masked, skip_dead):
    tokens, last = prompts()
    other_tokens, _ = prompts(seed=9)
    nothing = torch.zeros(1, len(masked.graph))
    fill = constants()
    one = masked(tokens, last, nothing, fill, skip_dead=skip_dead)
    other = masked(other_tokens, last, nothing, fill, skip_dead=skip_dead)
    assert torch.equal(one, other)
    assert_close(one, one[:1].expand_as(one))
    no_embed = torch.ones(1, len(masked.graph)).masked_fill(edges_from(masked.graph, "embed"), 0)
    another_first = tokens.clone()
    another_first[:, 0] = 5  # the heads see it
    moved = masked(tokens, last, no_embed, fill) - masked(another_first, last, no_embed, fill)
    assert moved.abs().max() > 1e-3


def test_edges_into_a_vertex_change_nothing_before_it(masked):
    """Topology: with only the paths through earlier vertices open to `out`, later readers' edges do
    not matter."""
    tokens, last = prompts()
    fill = constants()
    graph = masked.graph
    mask = random_mask(masked)
    later = graph.dst >= graph.vertex_index("a1.h0")
    to_out = graph.dst == graph.n_vertices - 1
    mask[:, to_out & (graph.src >= graph.vertex_index("a1.h0"))] = 0
    changed = torch.where(later & ~to_out, torch.rand_like(mask), mask)
    assert not torch.equal(mask, changed)
    assert torch.equal(masked(tokens, last, mask, fill), masked(tokens, last, changed, fill))


def test_topology_of_edges(models):
    edges = models["gpt2"].graph.edges
    assert Edge("a1.h0", "m1") in edges
    assert Edge("embed", "out") in edges
    assert Edge("m1", "a1.h0", "q") not in edges
    assert Edge("a1.h0", "a1.h1", "k") not in edges


@pytest.mark.parametrize("family", FAMILIES)
def test_one_ablated_edge_swaps_the_input_of_its_reader_alone(models, references, family):
    """One edge into one slot equals a hook on that slot's input of that head; q, k, v differ."""
    masked = models[family]
    tokens, last = prompts()
    fill = constants()
    model = references[family]
    kept, record = recording("mlp")
    model(tokens, last, edit=record)
    change = fill.mlps[0] - kept["mlp"][0]

    def swap(x, hook):
        x = x.clone()
        x[:, 1:, 2] += change[:, 1:]
        return x

    results = []
    for slot in SLOTS:
        mask = torch.ones(1, len(masked.graph))
        mask[0, masked.graph.index(Edge("m0", "a1.h2", slot))] = 0
        results.append(masked(tokens, last, mask, fill))
        hooks = [(f"blocks.1.attn.hook_{slot}_input", swap)]
        assert_close(results[-1], hooked(split_inputs(model), tokens, last, hooks))
    for i in range(3):
        assert (results[i] - masked.model(tokens, last)).abs().max() > 1e-4
        assert (results[i] - results[i - 1]).abs().max() > 1e-4


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_same_alpha_on_q_k_v_ablates_the_source_for_the_whole_head(models, family):
    """Against a head computed by hand from its one edited input."""
    masked = models[family]
    model = masked.model
    graph = masked.graph
    tokens, last = prompts()
    fill = constants()
    mask = torch.ones(1, len(graph))
    mask[0, [graph.index(Edge("m0", "a1.h2", slot)) for slot in SLOTS]] = 0.3
    kept, record = recording("resid", "mlp")

    def edit(site: str, i: int, value: Tensor) -> Tensor:
        record(site, i, value)
        if (site, i) == ("z", 1):
            x = kept["resid"][1] + 0.7 * (fill.mlps[0] - kept["mlp"][0])
            x[:, 0] = kept["resid"][1][:, 0]
            value = value.clone()
            value[:, :, 2] = model.attention(1, x)[:, :, 2]
        return value

    assert_close(masked(tokens, last, mask, fill), model(tokens, last, edit=edit))


def test_position_0_is_the_clean_one(masked):
    tokens, _ = prompts()
    model = masked.model
    kept, record = recording("v")
    model.run(model.embed(tokens), edit=record)
    for i, layer in enumerate(model.layers):
        clean = layer.per_head(kept["v"][i][0, :, 0])
        assert_close(masked._bos(0)[i, 1], clean, 1e-6)
    last = torch.ones(BATCH, dtype=torch.int64)
    mask = random_mask(masked, 1)
    alone = masked(tokens[:, :2], last, mask, constants())
    longer = masked(tokens, last, mask, constants())
    assert_close(alone, longer, 1e-6)


def test_own_activations_as_fill_change_nothing(masked):
    tokens, last = prompts()
    fill = masked.activations(tokens)
    assert_close(masked(tokens, last, random_mask(masked), fill), masked.model(tokens, last))


@pytest.mark.parametrize("skip_dead", [False, True])
def test_everything_ablated_by_activations_is_the_model_on_the_other_prompts(masked, skip_dead):
    tokens, last = prompts()
    others, _ = prompts(seed=7)
    nothing = torch.zeros(BATCH, len(masked.graph))
    fill = masked.activations(others)
    ablated = masked(tokens, last, nothing, fill, skip_dead=skip_dead)
    assert_close(ablated, masked.model(others, last))


@pytest.mark.parametrize("name", ["shared", "position", "pooled", "activations"])
def test_dangling_edges_matter_under_constants_and_not_under_activations(masked, name):
    tokens, last = prompts()
    few = random_mask(masked) * (random_mask(masked, seed=9) > 0.8)
    pruned = masked.graph.prune_dangling(few)
    assert (few != pruned).any()
    fill = fills(masked)[name]
    whole, without = (masked(tokens, last, mask, fill) for mask in (few, pruned))
    assert torch.allclose(whole, without, atol=1e-4) == (name == "activations")


def test_padding_and_the_rest_of_the_batch_change_nothing(masked):
    tokens, last = prompts()
    mask = random_mask(masked)
    fill = constants(4)
    together = masked(tokens, last, mask, fill)
    for i in range(BATCH):
        one = slice(i, i + 1)
        alone = masked(tokens[one, : int(last[i]) + 1], last[one], mask[one], fill)
        assert_close(alone[0], together[i])


# ---- gradients of constants


def test_constants_get_no_gradient_where_no_edge_is_fully_ablated(masked):
    tokens, last = prompts()
    mask = random_mask(masked).clamp(min=0.2)
    _, (to_mask, *to_constants) = value_and_gradients(
        lambda mask, fill: masked(tokens, last, mask, fill), mask, constants()
    )
    assert to_mask.abs().max() > 0
    assert all(not grad.any() for grad in to_constants)


@pytest.mark.parametrize("vertex", ["a0.h1", "a2.h3", "m1", "embed"])
@pytest.mark.parametrize("rows", [None, 4, T])
def test_gradient_of_a_constant_is_right_where_all_its_edges_are_ablated(masked, vertex, rows):
    """Finite differences in float64 would need another model: here a secant of the float32 one
    along the gradient."""
    tokens, last = prompts()
    fill = constants(rows)
    mask = random_mask(masked).clamp(min=0.2).masked_fill(edges_from(masked.graph, vertex), 0)
    _, (_, *grads) = value_and_gradients(
        lambda mask, fill: masked(tokens, last, mask, fill), mask, fill
    )
    index = {"e": 0, "a": 1, "m": 2}[vertex[0]]
    if vertex == "embed":
        mine = (...,)
    elif vertex[0] == "m":
        mine = (..., int(vertex[1]), slice(None))
    else:
        mine = (..., int(vertex[1]), int(vertex[-1]), slice(None))
    for i, grad in enumerate(grads):
        others = grad.clone()
        if i == index:
            others[mine] = 0
        assert not others.any()
    length = grads[index].norm()
    direction = [grad / length for grad in grads]

    def loss(size: float) -> float:
        moved = [part + size * step for part, step in zip(fill, direction, strict=True)]
        return some_loss(masked(tokens, last, mask, Constants(*moved))).item()

    slope = (loss(0.02) - loss(-0.02)) / 0.04
    assert slope == pytest.approx(length.item(), rel=2e-2)


def test_the_rule_for_constants_changes_no_value(masked):
    tokens, last = prompts()
    mask = random_mask(masked)
    fill = constants()
    plain = masked(tokens, last, mask, fill)
    ruled = masked(tokens, last, mask, Constants(*leaves(*fill)))
    free = masked(tokens, last, mask, Constants(*leaves(*fill)), constants_everywhere=True)
    assert torch.equal(plain, ruled)
    assert torch.equal(plain, free)


# ---- batches


@pytest.mark.parametrize("name", ["shared", "position", "pooled", "activations"])
def test_one_mask_for_all_examples_is_that_mask_repeated(masked, name):
    tokens, last = prompts()
    fill = fills(masked)[name]
    runs = []
    for n in (1, BATCH):
        mask, *parts = leaves(random_mask(masked, 1), *fill)
        logp = masked(tokens, last, mask.expand(n, -1), type(fill)(*parts))
        some_loss(logp).backward()
        gradients = [] if name == "activations" else [part.grad for part in parts]
        runs.append([logp, mask.grad, *gradients])
    for one, other in zip(*runs, strict=True):
        assert_close(one, other)


@pytest.mark.parametrize("name", ["shared", "activations"])
def test_micro_batches_give_the_same_numbers(masked, name):
    """Four prompts under three masks each, as UGS has them."""
    rows = torch.arange(4).repeat_interleave(3)
    tokens, last = prompts(4)
    fill = fills(masked)[name].rows(slice(4))
    results = []
    for size in (12, 5):
        mask, *parts = leaves(random_mask(masked, 12), *fill)
        logps = []
        for chunk in torch.arange(12).split(size):
            at = rows[chunk]
            logp = masked(tokens[at], last[at], mask[chunk], type(fill)(*parts).rows(at))
            (logp[:, 3] * torch.arange(1, 13)[chunk]).sum().backward()
            logps.append(logp.detach())
        gradients = [part.grad for part in parts] if name == "shared" else []
        results.append([torch.cat(logps), mask.grad, *gradients])
    for one, other in zip(*results, strict=True):
        assert_close(one, other)


def test_masks_that_need_no_gradient_cost_none_and_give_the_same_constants(masked):
    tokens, last = prompts()
    mask = random_mask(masked)
    fill = constants()
    _, (_, *want) = value_and_gradients(
        lambda mask, fill: masked(tokens, last, mask, fill), mask, fill
    )
    parts = leaves(*fill)
    some_loss(masked(tokens, last, mask, Constants(*parts))).backward()
    for part, grad in zip(parts, want, strict=True):
        assert_close(part.grad, grad, 1e-6)
    with torch.no_grad():
        assert not masked(tokens, last, mask, Constants(*parts)).requires_grad


def test_two_forwards_before_their_backwards_do_not_disturb_each_other(masked):
    tokens, last = prompts()
    fill = constants()
    masks = [random_mask(masked, seed=seed) for seed in (4, 5)]
    apart = []
    for mask in masks:
        _, gradients = value_and_gradients(
            lambda mask, fill: masked(tokens, last, mask, fill), mask, fill
        )
        apart.append(gradients[0])
    together = leaves(*masks)
    losses = [some_loss(masked(tokens, last, mask, fill)) for mask in together]
    sum(losses).backward()
    for mask, want in zip(together, apart, strict=True):
        assert_close(mask.grad, want, 1e-6)


def test_a_second_backward_is_refused(models):
    tokens, last = prompts()
    [mask] = leaves(random_mask(models["gpt2"]))
    loss = some_loss(models["gpt2"](tokens, last, mask, constants()))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward"):
        loss.backward()


@pytest.mark.parametrize("backward", [True, False])
def test_nothing_stays_in_memory(models, monkeypatch, backward):
    """Without the help of the garbage collector, which comes too late for buffers of gigabytes."""
    buffers = []
    init = WriterBuffer.__init__

    def watched(self, *given):
        buffers.append(weakref.ref(self))
        init(self, *given)

    monkeypatch.setattr(WriterBuffer, "__init__", watched)
    tokens, last = prompts()
    mask, *parts = leaves(random_mask(models["gpt2"]), *constants())
    gc.disable()
    try:
        loss = some_loss(models["gpt2"](tokens, last, mask, Constants(*parts)))
        if backward:
            loss.backward()
            assert buffers[0]().values is None
        del loss
        assert len(buffers) == 2
        assert all(buffer() is None for buffer in buffers)
    finally:
        gc.enable()


# ---- skipping what is dead


@pytest.mark.parametrize("density", [0.0, 0.02, 0.1, 0.5])
@pytest.mark.parametrize("pruned", [True, False])
@pytest.mark.parametrize("name", ["shared", "position", "activations"])
def test_skipping_dead_vertices_changes_no_value_and_no_gradient_in_use(
    masked, density, pruned, name
):
    tokens, last = prompts()
    graph = masked.graph
    fill = fills(masked)[name]
    generator = torch.Generator().manual_seed(int(100 * density))
    # one circuit, a little different in every example
    circuit = torch.rand(1, len(graph), generator=generator) < density
    alpha = 3 * torch.rand(BATCH, len(graph), generator=generator) - 0.5
    mask = circuit * alpha.clamp(0, 1)
    if pruned:
        mask = graph.prune_dangling(mask)
    runs = []
    for skip_dead in (False, True):
        leaf, *parts = leaves(mask, *fill)
        logp = masked(tokens, last, leaf, type(fill)(*parts), skip_dead=skip_dead)
        if logp.requires_grad:
            some_loss(logp).backward()
        gradients = [] if name == "activations" else [part.grad for part in parts]
        runs.append([logp, torch.where(mask > 0, leaf.grad, 0), *gradients])
    for slow, fast in zip(*runs, strict=True):
        assert_close(fast, slow)


def test_dead_vertices_are_not_computed(models, monkeypatch):
    masked = models["gpt2"]
    tokens, last = prompts()
    path = [Edge("embed", "a0.h1", "v"), Edge("a0.h1", "m1"), Edge("m1", "out")]
    mask = masked.graph.mask(path)[None].float()
    called = []

    def watched(layer, inner):
        def mlp_hidden(x):
            called.append(layer)
            return inner(x)

        return mlp_hidden

    for i, layer in enumerate(masked.model.layers):
        monkeypatch.setitem(layer.__dict__, "mlp_hidden", watched(i, layer.mlp_hidden))
    want = masked(tokens, last, mask, constants())
    assert called == [0, 1, 2]
    assert_close(masked(tokens, last, mask, constants(), skip_dead=True), want)
    assert called == [0, 1, 2, 1]


@pytest.mark.parametrize("start", [1, 2, 3])
@pytest.mark.parametrize("name", ["position", "activations"])
@pytest.mark.parametrize("skip_dead", [False, True])
def test_layers_whose_edges_are_all_kept_need_not_run(masked, monkeypatch, start, name, skip_dead):
    tokens, last = prompts()
    mask = random_mask(masked)
    fill = fills(masked)[name]
    below = (masked.graph.dst - 1) // (HEADS + 1) < start
    mask[:, below] = 1.0
    want = masked(tokens, last, mask, fill)
    clean = masked.activations(tokens)
    layers_run = []
    attend = MaskedModel._attend

    def watched(*given):
        layers_run.append(1)
        return attend(*given)

    monkeypatch.setattr(MaskedModel, "_attend", watched)
    fast = masked(tokens, last, mask, fill, skip_dead=skip_dead, start=start, clean=clean)
    assert_close(fast, want)
    assert len(layers_run) == LAYERS - start
    with pytest.raises(ValueError, match="start is a layer from 0 to 3"):
        masked(tokens, last, mask, fill, start=start)


# ---- bad input


def test_wrong_inputs_are_named(models):
    masked = models["gpt2"]
    tokens, last = prompts()
    mask = torch.ones(1, len(masked.graph))
    fill = constants()
    with pytest.raises(ValueError, match=str(len(masked.graph))):
        masked(tokens, last, mask[:, :-1], fill)
    with pytest.raises(ValueError, match="5 or 1"):
        masked(tokens, last, mask.expand(3, -1), fill)
    with pytest.raises(ValueError, match="at most 16"):
        masked(torch.zeros(1, 17, dtype=torch.int64), torch.tensor([3]), mask, fill)
    with pytest.raises(ValueError, match="last must be"):
        masked(tokens, last * 0, mask, fill)
    with pytest.raises(ValueError, match="same token"):
        masked(tokens + torch.arange(BATCH)[:, None], last, mask, fill)
    with pytest.raises(ValueError, match=r"\[3, 4, 8\]"):
        masked(tokens, last, mask, fill._replace(heads=fill.heads[:2]))
    with pytest.raises(ValueError, match="positions on each"):
        masked(tokens, last, mask, fill._replace(embed=fill.embed[None]))
    with pytest.raises(ValueError, match=r"fill\.rows"):
        masked(tokens, last, mask, masked.activations(tokens[:2]))
    as_users_call_it = inspect.unwrap(MaskedModel._fill)  # nobody checks types there
    with pytest.raises(TypeError, match="a fill is Constants or Activations, got Tensor"):
        as_users_call_it(masked, fill.embed, *tokens.shape)


def test_norms_that_cannot_be_folded_are_refused(models, monkeypatch):
    model = models["gpt2"].model
    norm = model.layers[1].ln1
    monkeypatch.setitem(model.layers[1].__dict__, "ln1", Twice(norm))
    with pytest.raises(ValueError, match=r"norms \(Twice\) that MaskedModel cannot fold"):
        MaskedModel(model)


class Twice(torch.nn.LayerNorm):
    """A norm that does more than a norm."""

    def __init__(self, norm: torch.nn.LayerNorm):
        super().__init__(norm.normalized_shape, norm.eps)
        self.weight = norm.weight
        self.bias = norm.bias

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


def test_the_memory_of_an_example_grows_with_its_length(models):
    masked = models["gpt2"]
    short = masked.example_bytes(5)
    assert 0 < short < masked.example_bytes(10) < 3 * short
