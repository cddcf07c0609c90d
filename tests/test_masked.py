"""The edge-masked model against a slow one made of hooks, and the identities it has to keep."""

import gc
import weakref

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from oa_utils.fills import Activations, Constants, Stream
from oa_utils.graph import SLOTS, Edge
from oa_utils.masked import MaskedModel
from oa_utils.models import Model, wrap

FAMILIES = ["gpt2", "llama", "grouped"]
LAYERS, HEADS, D, VOCAB, T, BATCH = 3, 4, 32, 61, 9, 5


def random_model(family: str, seed: int = 0) -> Model:
    """A small random model with weights large enough that every path matters."""
    torch.manual_seed(seed)
    ids = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 0}
    if family == "gpt2":
        hf = GPT2LMHeadModel(GPT2Config(n_layer=LAYERS, n_head=HEADS, n_embd=D, n_positions=16, **ids))
    else:
        groups = {"num_attention_heads": HEADS, "num_key_value_heads": 2 if family == "grouped" else HEADS}
        size = {"hidden_size": D, "intermediate_size": 48, "num_hidden_layers": LAYERS, "max_position_embeddings": 16}
        hf = LlamaForCausalLM(LlamaConfig(**size, **groups, **ids))
    for weight in hf.parameters():
        weight.data += 0.1 * torch.randn_like(weight)
    return wrap(hf, name=family)


def ungrouped(model: Model) -> Model:
    """The same model with its shared keys and values repeated, one for each query head."""
    config = LlamaConfig(**{**model.bridge.original_model.config.to_dict(), "num_key_value_heads": HEADS})
    hf = LlamaForCausalLM(config)
    state = {k.replace("._original_component", ""): v for k, v in model.bridge.original_model.state_dict().items()}
    for key, value in state.items():
        if "k_proj" in key or "v_proj" in key:
            state[key] = value.unflatten(0, (2, -1)).repeat_interleave(HEADS // 2, dim=0).flatten(0, 1)
    hf.load_state_dict({k: state[k] for k in hf.state_dict()})
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


@pytest.fixture(params=FAMILIES)
def masked(request, models) -> MaskedModel:
    return models[request.param]


def prompts(n: int = BATCH, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Prompts of different lengths; what follows the last token is noise."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, VOCAB, (n, T), generator=generator)
    tokens[:, 0] = 0
    return tokens, torch.randint(1, T, (n,), generator=generator).index_fill(0, torch.tensor([0]), T - 1)


def random_mask(masked: MaskedModel, n: int = BATCH, seed: int = 2) -> Tensor:
    """A third of the edges ablated, a third kept, a third in between."""
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.rand(n, masked.graph.n_edges, generator=generator) - 1).clamp(0, 1)


def constants(rows: int | None = None, seed: int = 3) -> Constants:
    generator, lead = torch.Generator().manual_seed(seed), () if rows is None else (rows,)
    shapes = (D,), (LAYERS, HEADS, D // HEADS), (LAYERS, D)
    return Constants(*(0.5 * torch.randn(*lead, *shape, generator=generator) for shape in shapes))


def fills(masked: MaskedModel) -> dict[str, Constants | Activations]:
    others = masked.activations(prompts(seed=7)[0])
    return {"shared": constants(), "position": constants(T), "pooled": constants(4), "activations": others}


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


def assert_close(got, want, tolerance: float = 1e-5):
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


# ---- the oracle: hooks on the bridge, one sum over edges at every input


def oracle(model: Model, graph, tokens: Tensor, last: Tensor, mask: Tensor, fill, everywhere=False) -> Tensor:
    """The same log-probabilities by naive per-edge sums in the hooks of the bridge."""
    bridge, mask = model.bridge, mask.expand(len(tokens), -1)
    for flag in (bridge.set_use_split_qkv_input, bridge.set_use_attn_result, bridge.set_use_hook_mlp_in):
        flag(True)
    attn, mlp, out = graph.blocks(mask)
    W_O = torch.stack([layer.W_O for layer in model.layers])
    if isinstance(fill, Constants):
        parts = fill if fill.embed.ndim == 2 else [part[None] for part in fill]
        at = torch.arange(tokens.shape[1]).clamp(max=len(parts[0]) - 1)
        embed, heads, mlps = (part[at][None] for part in parts)
    else:
        embed, heads, mlps = fill.embed, fill.heads, fill.mlps
    written = torch.cat((torch.einsum("bplhe,lhed->bplhd", heads, W_O), mlps[..., None, :]), dim=3)
    ablated = torch.cat((embed[:, :, None], written.flatten(2, 3)), dim=2).expand(len(tokens), -1, -1, -1)
    seen: list[Tensor] = []  # what each writer wrote [batch, pos, d]

    def mix(alpha: Tensor, biases: int) -> Tensor:
        """[batch, writer] -> [batch, pos, d], one term for each edge."""
        alpha, n = alpha[:, None, :, None], alpha.shape[-1]
        value, a = torch.stack(seen[:n], dim=2), ablated[:, :, :n]
        passes = 1 - alpha.detach() if everywhere else (alpha == 0).to(alpha.dtype)
        carried = alpha * value + (1 - alpha) * a.detach() + passes * (a - a.detach())
        return carried.sum(2) + sum((layer.b_O for layer in model.layers[:biases]), torch.zeros(D))

    def clean_first(new: Tensor, old: Tensor) -> Tensor:
        return torch.cat((old[:, :1], new[:, 1:]), dim=1)

    def embed_hook(x, hook):
        seen.append(x)

    def head_hook(i, slot):
        return lambda x, hook: clean_first(torch.stack([mix(attn[i][:, slot, h], i) for h in range(HEADS)], dim=2), x)

    def result_hook(x, hook):
        seen.extend(x.unbind(2))

    hooks = [("blocks.0.hook_resid_pre", embed_hook)]
    for i in range(LAYERS):
        name = f"blocks.{i}"
        hooks += [(f"{name}.attn.hook_{slot}_input", head_hook(i, s)) for s, slot in enumerate(SLOTS)]
        hooks += [(f"{name}.attn.hook_result", result_hook)]
        hooks += [(f"{name}.hook_mlp_in", lambda x, hook, i=i: clean_first(mix(mlp[i], i + 1), x))]
        hooks += [(f"{name}.hook_mlp_out", embed_hook)]
    hooks += [(f"blocks.{LAYERS - 1}.hook_resid_post", lambda x, hook: clean_first(mix(out, LAYERS), x))]
    logits = bridge.run_with_hooks(tokens, fwd_hooks=hooks, return_type="logits")
    return logits[torch.arange(len(tokens)), last].log_softmax(-1)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["shared", "position", "pooled"])
@pytest.mark.parametrize("everywhere", [False, True])
def test_equals_the_hook_based_oracle_in_values_and_gradients(models, family, name, everywhere):
    masked = models[family]
    reference = ungrouped(masked.model) if family == "grouped" else masked.model
    tokens, last = prompts()
    mask, fill = random_mask(masked), fills(masked)[name]
    fast = value_and_gradients(lambda m, f: masked(tokens, last, m, f, constants_everywhere=everywhere), mask, fill)
    slow = value_and_gradients(lambda m, f: oracle(reference, masked.graph, tokens, last, m, f, everywhere), mask, fill)
    assert_close(fast[0], slow[0])
    for got, want in zip(fast[1], slow[1], strict=True):
        assert want.abs().max() > 1e-3
        assert_close(got, want)


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_the_hook_based_oracle_with_activations_of_other_prompts(models, family):
    masked = models[family]
    reference = ungrouped(masked.model) if family == "grouped" else masked.model
    (tokens, last), (mask,) = prompts(), leaves(random_mask(masked))
    fill = fills(masked)["activations"]
    got, want = masked(tokens, last, mask, fill), oracle(reference, masked.graph, tokens, last, mask, fill)
    assert_close(got, want)
    assert_close(*(torch.autograd.grad(some_loss(logp), mask)[0] for logp in (got, want)))


# ---- identities


def edges_from(graph, vertex: str) -> Tensor:
    return graph.src == graph.vertex_index(vertex)


@pytest.mark.parametrize("skip_dead", [False, True])
def test_all_edges_kept_reproduces_the_model(masked, skip_dead):
    tokens, last = prompts()
    for fill in fills(masked).values():
        for mask in (torch.ones(BATCH, len(masked.graph)), torch.ones(1, len(masked.graph), dtype=torch.bool)):
            assert_close(masked(tokens, last, mask, fill, skip_dead=skip_dead), masked.model(tokens, last))


@pytest.mark.parametrize("name", ["shared", "position", "pooled", "activations"])
@pytest.mark.parametrize("vertex", ["embed", "a0.h1", "a1.h3", "a2.h0", "m0", "m1", "m2"])
def test_ablating_all_out_edges_of_a_vertex_ablates_the_vertex(masked, name, vertex):
    (tokens, last), fill, graph = prompts(), fills(masked)[name], masked.graph
    model, kind, layer = masked.model, vertex[0], int(vertex[1]) if vertex[1].isdigit() else 0
    at = torch.arange(T) if name == "activations" else torch.arange(T).clamp(max=fill.embed[..., 0].numel() - 1)

    def replacement(part: Tensor, *index) -> Tensor:
        if name == "activations":
            return part[(slice(None), slice(None), *index)]
        return (part if part.ndim > {"e": 1, "a": 3, "m": 2}[kind] else part[None])[(at, *index)]

    def edit(site: str, i: int, value: Tensor) -> Tensor:
        value = value.clone()
        if kind == "e" and site == "resid" and i == 0:
            value[:, 1:] = replacement(fill.embed).expand_as(value)[:, 1:]
        if kind == "a" and site == "z" and i == layer:
            head = int(vertex.split("h")[1])
            value[:, 1:, head] = replacement(fill.heads, layer, head).expand_as(value[:, :, head])[:, 1:]
        if kind == "m" and site == "mlp" and i == layer:
            value[:, 1:] = replacement(fill.mlps, layer).expand_as(value)[:, 1:]
        return value

    mask = torch.ones(1, len(graph)).masked_fill(edges_from(graph, vertex), 0)
    want = model(tokens, last, edit=edit)
    assert (want - model(tokens, last)).abs().max() > 1e-2
    for skip_dead in (False, True):
        assert_close(masked(tokens, last, mask, fill, skip_dead=skip_dead), want)


@pytest.mark.parametrize("skip_dead", [False, True])
def test_empty_circuit_ignores_the_prompt_but_not_what_stays_clean(masked, skip_dead):
    (tokens, last), (others, _) = prompts(), prompts(seed=9)
    nothing, fill = torch.zeros(1, len(masked.graph)), constants()
    one, other = (masked(x, last, nothing, fill, skip_dead=skip_dead) for x in (tokens, others))
    assert torch.equal(one, other)
    assert_close(one, one[:1].expand_as(one))
    first = torch.ones(1, len(masked.graph)).masked_fill(edges_from(masked.graph, "embed"), 0)
    another = torch.where(torch.arange(T) == 0, torch.tensor(5), tokens)  # another first token is seen by the heads
    assert (masked(tokens, last, first, fill) - masked(another, last, first, fill)).abs().max() > 1e-3


def test_edges_into_a_vertex_change_nothing_before_it(masked):
    """Topology: with only the paths through earlier vertices open to `out`, later readers' edges do not matter."""
    (tokens, last), fill, graph = prompts(), constants(), masked.graph
    mask = random_mask(masked)
    later = graph.dst >= graph.vertex_index("a1.h0")
    to_out = graph.dst == graph.n_vertices - 1
    mask[:, to_out & (graph.src >= graph.vertex_index("a1.h0"))] = 0
    changed = torch.where(later & ~to_out, torch.rand_like(mask), mask)
    assert torch.equal(masked(tokens, last, mask, fill), masked(tokens, last, changed, fill))


def test_topology_of_edges(models):
    edges = models["gpt2"].graph.edges
    assert Edge("a1.h0", "m1") in edges and Edge("embed", "out") in edges
    assert Edge("m1", "a1.h0", "q") not in edges and Edge("a1.h0", "a1.h1", "k") not in edges


def test_an_edge_moves_its_reader_alone(masked):
    """One ablated edge into one slot equals swapping that slot's input in the hook-based model, and q, k, v differ."""
    (tokens, last), fill, graph = prompts(), constants(), masked.graph
    ones, seen = torch.ones(1, len(graph)), []
    for slot in SLOTS:
        mask = ones.clone()
        mask[0, graph.index(Edge("m0", "a1.h2", slot))] = 0
        seen.append(masked(tokens, last, mask, fill))
    for i in range(3):
        assert (seen[i] - masked.model(tokens, last)).abs().max() > 1e-4
        assert (seen[i] - seen[i - 1]).abs().max() > 1e-4


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_same_alpha_on_q_k_v_ablates_the_source_for_the_whole_head(models, family):
    """Against a head computed by hand from its one edited input."""
    masked = models[family]
    model, graph, (tokens, last), fill = masked.model, masked.graph, prompts(), constants()
    mask = torch.ones(1, len(graph))
    mask[0, [graph.index(Edge("m0", "a1.h2", slot)) for slot in SLOTS]] = 0.3
    stream, wrote = {}, {}

    def edit(site: str, i: int, value: Tensor) -> Tensor:
        stream.update({i: value} if site == "resid" else {})
        wrote.update({i: value} if site == "mlp" else {})
        if site == "z" and i == 1:
            x = stream[1] + 0.7 * (fill.mlps[0] - wrote[0])
            x[:, 0] = stream[1][:, 0]
            value = value.clone()
            value[:, :, 2] = model.attention(1, model.layers[1].ln1(x))[:, :, 2]
        return value

    assert_close(masked(tokens, last, mask, fill), model(tokens, last, edit=edit))


def test_position_0_is_the_clean_one_bit_by_bit(masked):
    tokens, _ = prompts()
    model = masked.model
    clean = {}
    model.run(model.embed(tokens), edit=lambda s, i, v: clean.setdefault((s, i), v))
    for i, layer in enumerate(model.layers):
        x = layer.ln1(clean["resid", i])
        v = layer.per_head(layer.heads(x, "v")[0, :, 0])
        assert_close(masked._bos(0)[i, 1], v, 1e-6)
    last = torch.ones(BATCH, dtype=torch.int64)
    mask = random_mask(masked, 1)
    alone = masked(tokens[:, :2], last, mask, constants())
    longer = masked(tokens, last, mask, constants())
    assert_close(alone, longer, 1e-6)


def test_own_activations_as_fill_change_nothing(masked):
    (tokens, last), mask = prompts(), random_mask(masked)
    assert_close(masked(tokens, last, mask, masked.activations(tokens)), masked.model(tokens, last))


def test_everything_ablated_by_activations_is_the_model_on_the_other_prompts(masked):
    (tokens, last), (others, _) = prompts(), prompts(seed=7)
    nothing = torch.zeros(BATCH, len(masked.graph))
    for skip_dead in (False, True):
        got = masked(tokens, last, nothing, masked.activations(others), skip_dead=skip_dead)
        assert_close(got, masked.model(others, last))


def test_dangling_edges_matter_under_constants_and_not_under_activations(masked):
    (tokens, last), few = prompts(), random_mask(masked) * (random_mask(masked, seed=9) > 0.8)
    pruned = masked.graph.prune_dangling(few)
    assert (few != pruned).any()
    for name, fill in fills(masked).items():
        got, want = (masked(tokens, last, mask, fill) for mask in (few, pruned))
        assert torch.allclose(got, want, atol=1e-4) == (name == "activations"), name


def test_padding_and_the_rest_of_the_batch_change_nothing(masked):
    (tokens, last), mask, fill = prompts(), random_mask(masked), constants(4)
    together = masked(tokens, last, mask, fill)
    for i in range(BATCH):
        cut = slice(0, int(last[i]) + 1)
        assert_close(masked(tokens[i : i + 1, cut], last[i : i + 1], mask[i : i + 1], fill)[0], together[i])


# ---- gradients of constants


def test_constants_get_no_gradient_where_no_edge_is_fully_ablated(masked):
    (tokens, last), mask = prompts(), random_mask(masked).clamp(min=0.2)
    _, (to_mask, *to_constants) = value_and_gradients(lambda m, f: masked(tokens, last, m, f), mask, constants())
    assert to_mask.abs().max() > 0 and all(not grad.any() for grad in to_constants)


@pytest.mark.parametrize("vertex", ["a0.h1", "a2.h3", "m1", "embed"])
@pytest.mark.parametrize("rows", [None, 4, T])
def test_gradient_of_a_constant_is_right_where_all_its_edges_are_ablated(masked, vertex, rows):
    """Finite differences in float64 would need another model: here a secant of the float32 one along the gradient."""
    (tokens, last), graph, fill = prompts(), masked.graph, constants(rows)
    mask = random_mask(masked).clamp(min=0.2).masked_fill(edges_from(graph, vertex), 0)
    _, (_, *grads) = value_and_gradients(lambda m, f: masked(tokens, last, m, f), mask, fill)
    index = {"e": 0, "a": 1, "m": 2}[vertex[0]]
    for i, grad in enumerate(grads):
        others = grad.clone()
        if i == index and i == 1:
            others[..., int(vertex[1]), int(vertex[-1]), :] = 0
        elif i == index:
            others[(..., int(vertex[1]), slice(None)) if i else ...] = 0
        assert not others.any()
    step = [grad / grads[index].norm() for grad in grads]

    def loss(size: float) -> float:
        moved = Constants(*(part + size * direction for part, direction in zip(fill, step, strict=True)))
        return some_loss(masked(tokens, last, mask, moved)).item()

    slope = (loss(0.02) - loss(-0.02)) / 0.04
    assert slope == pytest.approx(grads[index].norm().item(), rel=2e-2)


def test_the_rule_for_constants_changes_no_value(masked):
    (tokens, last), mask, fill = prompts(), random_mask(masked), constants()
    plain, ruled, free = (
        masked(tokens, last, mask, fill),
        masked(tokens, last, mask, Constants(*leaves(*fill))),
        masked(tokens, last, mask, Constants(*leaves(*fill)), constants_everywhere=True),
    )
    assert torch.equal(plain, ruled) and torch.equal(plain, free)


# ---- batches


def test_one_mask_for_all_examples_is_that_mask_repeated(masked):
    (tokens, last), mask = prompts(), random_mask(masked, 1)
    for name, fill in fills(masked).items():
        runs = []
        for expanded in (False, True):
            m, *parts = leaves(mask, *fill)
            logp = masked(tokens, last, m.expand(BATCH, -1) if expanded else m, type(fill)(*parts))
            some_loss(logp).backward()
            runs.append([logp, m.grad] + ([p.grad for p in parts] if name != "activations" else []))
        for one, other in zip(*runs, strict=True):
            assert_close(one, other)


@pytest.mark.parametrize("name", ["shared", "activations"])
def test_micro_batches_give_the_same_numbers(masked, name):
    """Four prompts under three masks each, as UGS has them."""
    rows = torch.arange(4).repeat_interleave(3)
    (tokens, last), mask, fill = prompts(4), random_mask(masked, 12), fills(masked)[name].rows(slice(4))
    results = []
    for size in (12, 5):
        m, *parts = leaves(mask, *fill)
        total = []
        for chunk in torch.arange(12).split(size):
            own = type(fill)(*parts).rows(rows[chunk])
            logp = masked(tokens[rows[chunk]], last[rows[chunk]], m[chunk], own)
            (logp[:, 3] * torch.arange(1, 13)[chunk]).sum().backward()
            total.append(logp.detach())
        results.append([torch.cat(total), m.grad] + ([p.grad for p in parts] if name == "shared" else []))
    for one, other in zip(*results, strict=True):
        assert_close(one, other)


def test_masks_that_need_no_gradient_cost_none_and_give_the_same_constants(masked):
    (tokens, last), mask, fill = prompts(), random_mask(masked), constants()
    _, (_, *want) = value_and_gradients(lambda m, f: masked(tokens, last, m, f), mask, fill)
    parts = leaves(*fill)
    some_loss(masked(tokens, last, mask, Constants(*parts))).backward()
    for part, grad in zip(parts, want, strict=True):
        assert_close(part.grad, grad, 1e-6)
    with torch.no_grad():
        assert not masked(tokens, last, mask, Constants(*parts)).requires_grad


def test_two_forwards_before_their_backwards_do_not_disturb_each_other(masked):
    (tokens, last), fill = prompts(), constants()
    masks = [random_mask(masked, seed=s) for s in (4, 5)]
    apart = [value_and_gradients(lambda m, f: masked(tokens, last, m, f), mask, fill)[1][0] for mask in masks]
    leaf = leaves(*masks)
    losses = [some_loss(masked(tokens, last, mask, fill)) for mask in leaf]
    sum(losses).backward()
    for mask, want in zip(leaf, apart, strict=True):
        assert_close(mask.grad, want, 1e-6)


def test_a_second_backward_is_refused(models):
    (tokens, last), (mask,) = prompts(), leaves(random_mask(models["gpt2"]))
    loss = some_loss(models["gpt2"](tokens, last, mask, constants()))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward"):
        loss.backward()


@pytest.mark.parametrize("backward", [True, False])
def test_nothing_stays_in_memory(models, monkeypatch, backward):
    """Without the help of the garbage collector, which comes too late for buffers of gigabytes."""
    made, init = [], Stream.__init__
    monkeypatch.setattr(Stream, "__init__", lambda self, *given: made.append(weakref.ref(self)) or init(self, *given))
    (tokens, last), (mask, *parts) = prompts(), leaves(random_mask(models["gpt2"]), *constants())
    gc.disable()
    try:
        loss = some_loss(models["gpt2"](tokens, last, mask, Constants(*parts)))
        if backward:
            loss.backward()
            assert made[0]().values is None
        del loss
        assert len(made) == 2 and all(stream() is None for stream in made)
    finally:
        gc.enable()


# ---- skipping what is dead


@pytest.mark.parametrize("density", [0.0, 0.01, 0.03, 0.1, 0.3, 0.9])
@pytest.mark.parametrize("pruned", [True, False])
@pytest.mark.parametrize("name", ["shared", "position", "activations"])
def test_skipping_dead_vertices_changes_no_value_and_no_gradient_in_use(masked, density, pruned, name):
    (tokens, last), graph, fill = prompts(), masked.graph, fills(masked)[name]
    draw = torch.Generator().manual_seed(int(100 * density))
    shared = torch.rand(1, len(graph), generator=draw) < density  # one circuit, a little different in every example
    mask = shared * (3 * torch.rand(BATCH, len(graph), generator=draw) - 0.5).clamp(0, 1)
    mask = graph.prune_dangling(mask) if pruned else mask
    runs = []
    for skip_dead in (False, True):
        m, *parts = leaves(mask, *fill)
        logp = masked(tokens, last, m, type(fill)(*parts), skip_dead=skip_dead)
        if logp.requires_grad:
            some_loss(logp).backward()
        grads = [p.grad for p in parts] if name != "activations" else []
        runs.append([logp, torch.where(mask > 0, m.grad, 0), *grads])
    for slow, fast in zip(*runs, strict=True):
        assert_close(fast, slow)


def test_dead_vertices_are_not_computed(models, monkeypatch):
    masked, (tokens, last) = models["gpt2"], prompts()
    graph = masked.graph
    path = [Edge("embed", "a0.h1", "v"), Edge("a0.h1", "m1"), Edge("m1", "out")]
    mask = graph.mask(path)[None].float()
    called = []
    for i, layer in enumerate(masked.model.layers):
        inner = layer.mlp_hidden
        monkeypatch.setitem(layer.__dict__, "mlp_hidden", lambda x, i=i, inner=inner: called.append(i) or inner(x))
    want = masked(tokens, last, mask, constants())
    assert called == [0, 1, 2]
    assert_close(masked(tokens, last, mask, constants(), skip_dead=True), want)
    assert called == [0, 1, 2, 1]


# ---- bad input


@pytest.mark.parametrize("start", [1, 2, 3])
@pytest.mark.parametrize("name", ["position", "activations"])
@pytest.mark.parametrize("skip_dead", [False, True])
def test_layers_whose_edges_are_all_kept_need_not_run(masked, monkeypatch, start, name, skip_dead):
    (tokens, last), mask, fill = prompts(), random_mask(masked), fills(masked)[name]
    below = (masked.graph.dst - 1) // (HEADS + 1) < start
    mask[:, below] = 1.0
    want = masked(tokens, last, mask, fill)
    clean, seen, attend = masked.activations(tokens), [], MaskedModel._attend
    monkeypatch.setattr(MaskedModel, "_attend", lambda *a: seen.append(1) or attend(*a))
    got = masked(tokens, last, mask, fill, skip_dead=skip_dead, start=start, clean=clean)
    assert_close(got, want)
    assert len(seen) == LAYERS - start
    with pytest.raises(ValueError, match="start is a layer from 0 to 3"):
        masked(tokens, last, mask, fill, start=start)


def test_wrong_inputs_are_named(models):
    masked, (tokens, last) = models["gpt2"], prompts()
    mask, fill = torch.ones(1, len(masked.graph)), constants()
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
    with pytest.raises(TypeError, match="Constants"):
        masked(tokens, last, mask, fill.embed)


def test_the_memory_of_an_example_grows_with_its_length(models):
    masked = models["gpt2"]
    assert 0 < masked.chunk_size(5) < masked.chunk_size(10) < 3 * masked.chunk_size(5)
