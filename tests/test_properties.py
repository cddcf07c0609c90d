"""What holds for every graph, mask, draw and record, tried on many that nobody chose."""

import tempfile
from dataclasses import make_dataclass
from pathlib import Path
from types import SimpleNamespace

import networkx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from toys import LENGTH, dense_model, make_task

import oa_utils as oa
from oa_utils import machine, models, store
from oa_utils.circuits import Circuit
from oa_utils.graph import Edge, Graph
from oa_utils.search.hcgs import hard_concrete, nonzero
from oa_utils.search.ugs import (
    SLOWER,
    UGSSettings,
    Uniform,
    draw,
    inside,
    normalise,
    window,
)

graphs = st.builds(Graph, st.integers(1, 4), st.integers(1, 4))
seeds = st.integers(0, 2**32 - 1)
shares = st.floats(0, 1)
open_shares = st.floats(0.001, 0.999)
quick = settings(deadline=None, max_examples=30)


def random_mask(graph: Graph, seed: int, share: float, *lead: int) -> torch.Tensor:
    """0 and 1, the latter with probability `share`."""
    return (torch.rand(*lead, len(graph), generator=machine.generator(seed)) < share).float()


# ---- graph


@given(graphs)
@quick
def test_every_edge_has_one_place_and_one_name(graph):
    names = [str(edge) for edge in graph.edges]
    assert len(set(names)) == len(names) == len(graph) == len(graph.src) == len(graph.dst)
    for i in {0, len(graph) // 2, len(graph) - 1}:
        edge = graph.edges[i]
        assert Edge.parse(names[i]) == edge and graph.index(edge) == i
        assert graph.vertices[graph.src[i]] == edge.src
        assert graph.vertices[graph.dst[i]] == edge.dst


@given(graphs)
@quick
def test_edges_go_forward_and_every_reader_hears_all_that_wrote_before(graph):
    layer_of = [-1] + [i for i in range(graph.n_layers) for _ in range(graph.n_heads + 1)]
    assert (graph.src < graph.dst).all()
    for (dst, slot), span in graph.reader_slices.items():
        j = graph.vertex_index(dst)
        if dst == "out":
            heard = range(j)
        elif slot:  # a head hears none of its own layer
            heard = [i for i in range(j) if layer_of[i] < layer_of[j]]
        else:
            heard = range(j)
        assert graph.src[span].tolist() == list(heard)


@given(graphs, seeds, shares)
@quick
def test_names_of_a_mask_give_the_mask(graph, seed, share):
    mask = random_mask(graph, seed, share).bool()
    assert torch.equal(graph.mask(map(str, graph.edges_of(mask))), mask)
    joined = torch.cat(
        [b.flatten() for pair in zip(*graph.blocks(mask)[:2], strict=True) for b in pair]
        + [graph.blocks(mask).out]
    )
    assert torch.equal(joined, mask)


# ---- pruning


@given(graphs, seeds, shares)
@quick
def test_pruning_keeps_just_what_is_on_a_path_from_embed_to_out(graph, seed, share):
    mask = random_mask(graph, seed, share)
    kept = graph.edges_of(mask)
    ways = networkx.DiGraph([(edge.src, edge.dst) for edge in kept])
    ways.add_nodes_from(("embed", "out"))
    reached = networkx.descendants(ways, "embed") | {"embed"}
    leading = networkx.ancestors(ways, "out") | {"out"}
    wanted = [edge for edge in kept if edge.src in reached and edge.dst in leading]
    assert graph.edges_of(graph.prune_dangling(mask)) == wanted


@given(graphs, seeds, shares)
@quick
def test_pruning_goes_by_sample_keeps_values_and_finds_nothing_twice(graph, seed, share):
    mask = random_mask(graph, seed, share, 3) * torch.rand(3, len(graph)).clamp(min=0.1)
    pruned = graph.prune_dangling(mask)
    assert torch.equal(pruned, torch.stack([graph.prune_dangling(row) for row in mask]))
    assert torch.equal(pruned, graph.prune_dangling(pruned))
    assert ((pruned == mask) | (pruned == 0)).all()
    assert (graph.prune_dangling(mask[0] * (mask[1] > 0)) <= pruned[0]).all()  # it is monotone


@given(seeds, open_shares)
@settings(deadline=None, max_examples=15)
def test_dead_and_unreached_vertices_change_nothing_under_a_counterfactual(seed, share):
    masked = dense_model()
    task = make_task(masked.model, n=2)
    mask = random_mask(masked.graph, seed, share, 2)
    fill = masked.activations(task.counterfactual)
    logp = masked(task.tokens, task.last, mask, fill)
    reached = masked.graph.prune_dangling(mask)
    skipped = masked(task.tokens, task.last, mask, fill, skip_dead=True)
    torch.testing.assert_close(skipped, logp, atol=1e-5, rtol=1e-5)
    # a vertex that nothing reaches writes what the counterfactual puts in its place
    pruned = masked(task.tokens, task.last, reached, fill)
    torch.testing.assert_close(pruned, logp, atol=1e-5, rtol=1e-5)


# ---- masks


@given(seeds)
@settings(deadline=None, max_examples=15)
def test_all_edges_kept_is_the_model_and_none_is_the_fill(seed):
    masked = dense_model()
    model = masked.model
    tokens = torch.randint(2, model.d_vocab, (3, LENGTH), generator=machine.generator(seed))
    tokens[:, 0] = model.bos
    last = torch.tensor([LENGTH - 1, 2, 3])
    other = masked.activations(tokens.flip(0))
    whole = masked(tokens, last, torch.ones(1, len(masked.graph)), other)
    torch.testing.assert_close(whole, model(tokens, last), atol=2e-5, rtol=1e-4)
    none = masked(tokens, last, torch.zeros(1, len(masked.graph)), other)
    torch.testing.assert_close(none, model(tokens.flip(0), last), atol=2e-5, rtol=1e-4)


@given(seeds, open_shares)
@settings(deadline=None, max_examples=15)
def test_a_batch_of_masks_is_each_mask_by_itself(seed, share):
    masked = dense_model()
    task = make_task(masked.model, n=3, seed=1)
    mask = random_mask(masked.graph, seed, share, 3)
    fill = masked.activations(task.counterfactual)
    together = masked(task.tokens, task.last, mask, fill)
    for i in range(3):
        row = torch.tensor([i])
        alone = masked(task.tokens[row], task.last[row], mask[row], fill.rows(row))
        torch.testing.assert_close(alone[0], together[i], atol=2e-5, rtol=1e-4)


# ---- samplers


@given(st.lists(open_shares, min_size=1, max_size=5), st.floats(0.05, 8))
@quick
def test_uniform_draws_have_their_mean_and_their_window(thetas, factor):
    theta = torch.tensor(thetas, dtype=torch.float64, requires_grad=True)
    w = window(theta, factor)
    u = ((torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000)[:, None].expand(-1, len(theta))
    alpha = draw(theta, u, w)
    torch.testing.assert_close(alpha.mean(0), theta, atol=1e-3, rtol=0)
    torch.testing.assert_close(inside(alpha).mean(0), w, atol=1e-3, rtol=0)
    assert ((alpha >= 0) & (alpha <= 1)).all()
    normal = normalise(alpha)
    [slope] = torch.autograd.grad(normal.mean(0).sum(), theta)
    in_window = inside(alpha).sum(0) > 0
    torch.testing.assert_close(slope, in_window.double())
    torch.testing.assert_close(normal, alpha)


def test_ugs_takes_the_authors_rates_and_memory():
    def group(**options):
        return Uniform(Graph(2, 2), UGSSettings(steps=6000, **options)).groups()[0]

    rates = [group(ablation=name, lam=1e-3)["lr"] for name in ("optimal", *SLOWER)]
    assert rates == [0.05, *(0.05 / slower for slower in SLOWER.values())]
    assert len(set(rates)) > 1
    assert group()["betas"] == (0.9, 0.995)


def test_a_small_clip_holds_the_logits_back():
    """Below Adam's ε, a smaller gradient is a smaller step."""
    masked = dense_model()
    task = make_task(masked.model, n=8)
    options = {"ablation": "counterfactual", "lam": 1e-2, "steps": 3, "prompts": 1, "masks": 2}
    free, held = (
        oa.ugs(masked, task, **options, lr=0.1, clip=clip).history["size"][-1]
        for clip in (5.0, 1e-9)
    )
    start = len(masked.graph) * torch.tensor(1.0).sigmoid().item()
    assert abs(held - start) < 0.1 * abs(free - start)


def test_a_gap_keeps_the_best_constants_not_the_last(tmp_path):
    """At a wild rate later looks are worse: what is kept is what the best look saw."""
    masked = dense_model()
    task = make_task(masked.model, n=16)
    circuit = Circuit(masked.graph, torch.arange(len(masked.graph)) % 2, "half")
    options = {"look_every": 1, "lr": 10.0}
    start = oa.gap(masked, task, circuit, "optimal", steps=1, look_every=1, lr=0.0)
    wild = oa.gap(masked, task, circuit, "optimal", steps=4, **options)
    assert wild.mean == start.mean


@given(st.floats(-5, 5), st.floats(0.1, 2))
@quick
def test_hard_concrete_draws_are_zero_as_often_as_they_are_charged_for(log_alpha, beta):
    u = ((torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000)[:, None]
    draws = hard_concrete(torch.tensor([log_alpha], dtype=torch.float64), beta, u)
    charged = nonzero(torch.tensor(log_alpha, dtype=torch.float64), beta)
    assert abs((draws > 0).double().mean() - charged) < 1e-3
    assert ((draws >= 0) & (draws <= 1)).all()
    assert (draws.diff(dim=0) >= 0).all()  # in the order of u


def test_acdc_without_a_guess_is_refused_where_it_would_never_end(monkeypatch):
    monkeypatch.setattr(store, "run", lambda *_, **__: pytest.fail("computed"))
    masked = dense_model()
    with pytest.raises(ValueError, match="guess must be a whole number, at least 1, got 0"):
        oa.acdc(masked, make_task(masked.model, n=8), lam=1e-2, guess=0)


# ---- store

MODEL = SimpleNamespace(name="none", fingerprint="f", budget="default")
texts = st.text(max_size=8)
scalars = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats() | texts
numbers = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3)
)
tensors = st.dictionaries(
    st.from_regex("[a-z]{1,5}", fullmatch=True),
    arrays.arrays("float32", arrays.array_shapes(max_dims=3, max_side=4)).map(torch.from_numpy),
    max_size=3,
)


def same(one, other) -> bool:
    """Equal, where not-a-number equals itself and shapes count."""
    if isinstance(one, torch.Tensor):
        bits = one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)
        return one.shape == other.shape and torch.equal(*bits)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other or (one != one and other != other)


@given(st.dictionaries(texts, numbers, max_size=4), tensors)
@quick
def test_whatever_is_stored_comes_back(found, parts):
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "x.json"
        record = {"identity": "i", "settings": {}, "inputs": {}, "seconds": 1.0}
        computed = store._keep(path, record, found, parts, "default")
        loaded = store.load(path, "i", "default")
        assert same(loaded.numbers, found) and same(computed.numbers, found)
        assert same(loaded.tensors, parts) and same(computed.tensors, parts)


@given(numbers, tensors)
@quick
def test_whatever_state_is_saved_comes_back(state, parts):
    with tempfile.TemporaryDirectory() as place:
        snapshots = store.Snapshots(Path(place) / "x.snapshot", "id")
        snapshots.save({"state": state, "parts": parts, "nested": [[parts, 1]]})
        loaded = snapshots.load()
        assert same(loaded["state"], state) and same(loaded["parts"], parts)
        assert same(loaded["nested"], [[parts, 1]])


@given(st.dictionaries(texts, scalars, max_size=3), st.dictionaries(texts, scalars, max_size=3))
@quick
def test_different_inputs_have_different_names(one, other):
    assert (store.sha256(one) == store.sha256(other)) == (
        store.canonical(one) == store.canonical(other)
    )
    if same(one, other):
        assert one == other or store.sha256(one) == store.sha256(other)
    else:
        assert store.sha256(one) != store.sha256(other)


@given(st.text(max_size=200))
@quick
def test_no_text_leads_out_of_the_store(text):
    name = store.slug(text)
    assert 0 < len(name) <= 80 and "/" not in name and "\\" not in name
    assert name not in (".", "..") and not name.startswith(".")


@given(graphs, seeds, shares)
@quick
def test_a_circuit_comes_back_from_its_file(graph, seed, share):
    circuit = Circuit(graph, random_mask(graph, seed, share), "random", gap=0.25, seed=seed)
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "circuit.json"
        circuit.save(path)
        loaded = Circuit.load(path)
    assert torch.equal(loaded.mask, circuit.mask) and loaded.graph == graph
    assert (loaded.gap, loaded.seed, loaded.method) == (0.25, seed, "random")


@given(st.dictionaries(st.sampled_from("abcde"), scalars, min_size=1), seeds)
@quick
def test_a_fields_order_is_no_part_of_a_name(fields, seed):
    order = torch.randperm(len(fields), generator=machine.generator(seed)).tolist()
    pairs = list(fields.items())
    shuffled = dict(pairs[i] for i in order)
    assert store.sha256(fields) == store.sha256(shuffled)
    assert models._forward_fields(fields) == models._forward_fields(shuffled)
    kind = make_dataclass("Settings", list(fields), frozen=True)
    assert isinstance(store._key(kind(**fields)), str)
