"""The graph, pruning of dangling edges, circuits and their files."""

import json
import math
import tracemalloc
from collections import Counter
from types import SimpleNamespace

import matplotlib
import networkx as nx
import pytest
import torch

from oa_utils.circuits import Circuit, draw, manual_greater_than, manual_ioi
from oa_utils.graph import Edge, Graph

matplotlib.use("Agg")
SMALL, GPT2 = Graph(3, 2), Graph(12, 12)


def kind(vertex: str) -> str:
    return {"a": "head", "m": "mlp"}.get(vertex[0], vertex) if vertex not in ("embed", "out") else vertex


def kinds(edges) -> Counter:
    return Counter((kind(e.src), kind(e.dst)) for e in edges)


def sparse_masks(graph: Graph, batch: int, density: float, seed: int = 0) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    kept = torch.rand(batch, len(graph), generator=rng) < density
    return kept * (0.01 + 0.99 * torch.rand(batch, len(graph), generator=rng))


def reachable(graph: Graph, mask: torch.Tensor) -> torch.Tensor:
    """Brute force: keep an edge when embed reaches its source and its target reaches out."""
    live = [edge for edge, alpha in zip(graph.edges, mask.tolist(), strict=True) if alpha > 0]
    net = nx.DiGraph([(e.src, e.dst) for e in live])
    net.add_nodes_from(["embed", "out"])
    down, up = nx.descendants(net, "embed") | {"embed"}, nx.ancestors(net, "out") | {"out"}
    return graph.mask(e for e in live if e.src in down and e.dst in up)


def model_like(graph: Graph, name="toy", fingerprint="f1", d_model=8) -> SimpleNamespace:
    shape = {"n_layers": graph.n_layers, "n_heads": graph.n_heads, "d_model": d_model}
    return SimpleNamespace(**shape, name=name, fingerprint=fingerprint)


# ---- the graph


@pytest.mark.parametrize(
    "layers, heads, edges", [(12, 12, 32491), (24, 16, 231877), (36, 20, 810703), (48, 25, 2235025), (30, 9, 123211)]
)
def test_edge_counts_are_those_of_the_paper(layers, heads, edges):
    n, h = layers, heads
    formula = 3 * h * h * n * (n - 1) // 2 + 2 * h * n * (n + 1) + n * (n + 1) // 2 + n * (h + 1) + 1
    assert len(Graph(layers, heads)) == edges == formula


def test_edges_of_gpt2_small_fall_into_the_four_groups_of_the_paper():
    count = kinds(GPT2.edges)
    assert count["head", "head"] == 28512
    assert count["embed", "head"] + count["mlp", "head"] == 2808
    assert count["head", "mlp"] + count["head", "out"] == 1080
    assert sum(count.values()) - 28512 - 2808 - 1080 == 91


def test_degree_of_a_head_is_412_plus_twice_its_layer():
    assert len(GPT2.vertices) == GPT2.n_vertices == 158
    degree = dict(zip(GPT2.vertices, GPT2.degree.tolist(), strict=True))
    assert all(degree[f"a{i}.h{j}"] == 412 + 2 * i for i in range(12) for j in range(12))
    assert degree["out"] == 157 and degree["embed"] == 12 * 37 + 1
    assert int(GPT2.degree.sum()) == 2 * len(GPT2)


def test_edges_only_go_to_later_vertices():
    assert (SMALL.src < SMALL.dst).all()
    assert Edge("a1.h0", "m1") in SMALL.edges and Edge("embed", "out") in SMALL.edges
    assert Edge("m1", "a1.h0", "q") not in SMALL.edges and Edge("a1.h0", "a1.h1", "q") not in SMALL.edges


@pytest.mark.parametrize("graph", [Graph(1, 1), SMALL, Graph(2, 5)])
def test_position_iteration_index_and_tensors_name_the_same_edge(graph):
    edges = list(graph.edges)
    assert len(set(edges)) == len(edges) == len(graph) == len(graph.edges)
    for i, edge in enumerate(edges):
        assert graph.edges[i] == edge and graph.index(edge) == i and Edge.parse(str(edge)) == edge
        assert (graph.vertices[graph.src[i]], graph.vertices[graph.dst[i]]) == (edge.src, edge.dst)
    assert graph.edges[-1] == edges[-1] and graph.edges[1:4] == edges[1:4]
    with pytest.raises(IndexError):
        graph.edges[len(graph)]


def test_in_edges_of_a_reader_are_one_slice_and_all_slices_tile_the_mask():
    at = 0
    for (dst, slot), span in SMALL.reader_slices.items():
        assert span.start == at
        assert {(e.dst, e.slot) for e in SMALL.edges[span]} == {(dst, slot)}
        assert [e.src for e in SMALL.edges[span]] == list(SMALL.vertices[: span.stop - span.start])
        at = span.stop
    assert at == len(SMALL)


def test_blocks_are_views_that_hold_each_edge_at_its_reader_and_writer():
    numbers = torch.arange(2 * len(SMALL)).reshape(2, -1)
    blocks = SMALL.blocks(numbers)
    for i, edge in enumerate(SMALL.edges):
        w = SMALL.vertices.index(edge.src)
        if edge.dst == "out":
            found = blocks.out[1, w]
        elif edge.slot == "":
            found = blocks.mlp[int(edge.dst[1:])][1, w]
        else:
            layer, head = map(int, edge.dst[1:].split(".h"))
            found = blocks.attn[layer][1, "qkv".index(edge.slot), head, w]
        assert found == len(SMALL) + i
    storage = numbers.untyped_storage().data_ptr()
    assert all(b.untyped_storage().data_ptr() == storage for b in (*blocks.attn, *blocks.mlp, blocks.out))
    assert blocks.attn[2].shape == (2, 3, 2, 7) and blocks.mlp[2].shape == (2, 9) and blocks.out.shape == (2, 10)


def test_gradients_pass_from_the_blocks_to_the_whole_mask():
    mask = torch.rand(2, len(SMALL), requires_grad=True)
    blocks = SMALL.blocks(mask)
    sum((b**2).sum() for b in (*blocks.attn, *blocks.mlp, blocks.out)).backward()
    torch.testing.assert_close(mask.grad, 2 * mask.detach())


def test_graphs_of_one_shape_are_one_key_and_travel_as_two_numbers():
    other = Graph.of(model_like(SMALL))
    _ = SMALL.src, other.dst
    assert other == SMALL and {SMALL: 1}[other] == 1 and Graph(2, 3) != SMALL
    rebuild, numbers = SMALL.__reduce__()  # what a worker is sent
    assert rebuild(*numbers) == SMALL and numbers == (SMALL.n_layers, SMALL.n_heads)
    with pytest.raises(AttributeError):
        other.n_heads = 3
    with pytest.raises(ValueError, match="at least one layer"):
        Graph(0, 4)


def test_edges_of_the_largest_model_are_made_on_demand():
    tracemalloc.start()
    graph = Graph(48, 25)
    assert graph.edges[-1] == Edge("m47", "out") and graph.index(Edge("a0.h3", "a47.h24", "v")) < len(graph)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4e6  # all 2.2 million as objects would be some 200 MB


@pytest.mark.parametrize(
    "edge, message",
    [
        (("a3.h0", "out"), "no vertex 'a3.h0'"),
        (("a0.h0", "logits"), "no vertex 'logits'"),
        (("m1", "a1.h0", "q"), "a1.h0 has read its input before m1 writes"),
        (("out", "m0"), "m0 has read its input before out writes"),
        (("m1", "embed"), "nothing is read by embed"),
        (("embed", "a1.h0"), "slot 'q', 'k' or 'v'"),
        (("embed", "m1", "q"), "an edge into m1 has no slot"),
    ],
)
def test_an_edge_that_does_not_exist_is_refused_with_the_reason(edge, message):
    with pytest.raises(ValueError, match=message):
        SMALL.index(Edge(*edge))


@pytest.mark.parametrize("name", ["a0.h1", "->m1", "m0->", "m0->a1.h0<q"])
def test_a_text_that_names_no_edge_is_refused(name):
    with pytest.raises(ValueError, match="not the name of an edge"):
        Edge.parse(name)


def test_edges_to_mask_and_back_is_the_identity_and_changes_no_input():
    mask = sparse_masks(SMALL, 1, 0.3)[0] > 0
    before, edges = mask.clone(), SMALL.edges_of(mask)
    asked = list(edges)
    assert torch.equal(SMALL.mask(edges), mask) and torch.equal(SMALL.mask(edges), mask)
    assert edges == asked and torch.equal(mask, before)
    assert SMALL.edges_of(mask[None].float()) == edges
    assert SMALL.edges_of(SMALL.mask([])) == [] and SMALL.edges_of(SMALL.mask(SMALL.edges)) == list(SMALL.edges)


@pytest.mark.parametrize("use", ["edges_of", "prune_dangling", "blocks"])
def test_a_mask_of_the_wrong_length_is_refused(use):
    with pytest.raises(ValueError, match=f"{len(SMALL)} edges"):
        getattr(SMALL, use)(torch.ones(2, len(SMALL) + 1))
    with pytest.raises(ValueError, match="one mask"):
        SMALL.edges_of(torch.ones(2, len(SMALL)))


# ---- dangling edges


@pytest.mark.parametrize("density", [0.02, 0.05, 0.1, 0.3, 0.8])
@pytest.mark.parametrize("graph", [Graph(1, 1), SMALL, Graph(4, 4)])
def test_pruning_equals_brute_force_reachability(graph, density):
    masks = sparse_masks(graph, 20, density)
    pruned = graph.prune_dangling(masks)
    for mask, got in zip(masks, pruned, strict=True):
        assert torch.equal(got > 0, reachable(graph, mask))


def test_pruning_a_batch_equals_pruning_each_mask_and_twice_equals_once():
    masks = sparse_masks(GPT2, 8, 0.02)
    pruned = GPT2.prune_dangling(masks)
    assert 0 < (pruned > 0).sum() < (masks > 0).sum()
    assert torch.equal(pruned, torch.stack([GPT2.prune_dangling(mask) for mask in masks]))
    assert torch.equal(pruned.reshape(2, 4, -1), GPT2.prune_dangling(masks.reshape(2, 4, -1)))
    assert torch.equal(GPT2.prune_dangling(pruned), pruned)


def test_an_mlp_reached_in_one_mask_is_not_thereby_reached_in_another():
    reached = SMALL.mask([Edge("embed", "m0"), Edge("m0", "out")])
    unreached = SMALL.mask([Edge("m0", "out")])
    assert SMALL.prune_dangling(torch.stack([reached, unreached])).sum(-1).tolist() == [2, 0]


def test_a_head_is_reached_by_any_of_q_k_v():
    for slot in "qkv":
        path = SMALL.mask([Edge("embed", "a0.h1", slot), Edge("a0.h1", "a2.h0", slot), Edge("a2.h0", "out")])
        assert torch.equal(SMALL.prune_dangling(path), path)


def test_dangling_chains_go_from_both_ends():
    path = [Edge("embed", "a0.h0", "v"), Edge("a0.h0", "out")]
    no_way_in = [Edge("a0.h1", "m0"), Edge("m0", "a1.h0", "q"), Edge("a1.h0", "out")]
    no_way_out = [Edge("embed", "m1"), Edge("m1", "a2.h0", "k"), Edge("a0.h0", "a2.h1", "v")]
    assert SMALL.edges_of(SMALL.prune_dangling(SMALL.mask(path + no_way_in + no_way_out))) == path


def test_kept_edges_keep_value_and_gradient_and_dropped_ones_have_none():
    masks = sparse_masks(SMALL, 6, 0.15, seed=3).requires_grad_()
    before = masks.detach().clone()
    pruned = SMALL.prune_dangling(masks)
    (3 * pruned).sum().backward()
    kept = torch.stack([reachable(SMALL, mask) for mask in before])
    assert 0 < kept.sum() < (before > 0).sum()
    assert torch.equal(pruned.detach(), before * kept) and torch.equal(masks.detach(), before)
    assert torch.equal(masks.grad[before > 0], 3.0 * kept[before > 0])


def test_full_mask_stays_full_and_empty_stays_empty():
    for dtype in (torch.bool, torch.float32, torch.float64):
        full = torch.ones(2, len(SMALL), dtype=dtype)
        assert torch.equal(SMALL.prune_dangling(full), full)
        assert torch.equal(SMALL.prune_dangling(full * 0), full * 0)
    assert SMALL.prune_dangling(torch.ones(0, len(SMALL))).shape == (0, len(SMALL))


# ---- circuits


@pytest.fixture
def circuit() -> Circuit:
    edges = [Edge("embed", "a0.h1", "k"), Edge("a0.h1", "m1"), Edge("embed", "m1"), Edge("m1", "out")]
    settings = {"lam": 1e-3, "steps": 3}
    return Circuit(SMALL, SMALL.mask(edges), "ugs", "optimal", settings, 7, {"gap": [0.5, math.inf]}, 0.25, "toy", "f1")


def test_a_circuit_has_no_dangling_edges_and_owns_its_mask(circuit):
    mask = circuit.mask.float()[None]
    mask[0, SMALL.index(Edge("embed", "a2.h0", "q"))] = 1
    other = Circuit(SMALL, mask, "by hand")
    mask[:] = 0
    assert other.edges == circuit.edges and other.n_edges == 4
    assert other.vertices == ["embed", "a0.h1", "m1", "out"] and other.heads == ["a0.h1"]


def test_a_mask_that_is_not_yet_a_decision_makes_no_circuit(circuit):
    with pytest.raises(ValueError, match="threshold"):
        Circuit(SMALL, circuit.mask * 0.7, "ugs")
    with pytest.raises(ValueError, match="one mask"):
        Circuit(SMALL, torch.ones(2, len(SMALL)), "ugs")


def test_a_saved_circuit_comes_back_whole(circuit, tmp_path):
    circuit.save(tmp_path / "new" / "c.json")
    again = Circuit.load(tmp_path / "new" / "c.json", model=model_like(SMALL))
    assert torch.equal(again.mask, circuit.mask) and again.graph == circuit.graph
    for name in ("method", "ablation", "settings", "seed", "history", "gap", "model", "fingerprint"):
        assert getattr(again, name) == getattr(circuit, name)
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["c.json"]


def test_a_save_that_fails_leaves_the_old_file(circuit, tmp_path):
    circuit.save(path := tmp_path / "c.json")
    before = path.read_bytes()
    with pytest.raises(TypeError):
        Circuit(SMALL, circuit.mask, "ugs", settings={"model": object()}).save(path)
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1


def test_a_circuit_of_another_model_is_refused(circuit, tmp_path):
    circuit.save(path := tmp_path / "c.json")
    with pytest.raises(ValueError, match="n_layers=3.*n_layers=2"):
        Circuit.load(path, model=model_like(Graph(2, 2)))
    with pytest.raises(ValueError, match="found in toy .*f1.*not in twin .*f2"):
        Circuit.load(path, model=model_like(SMALL, "twin", "f2"))
    (tmp_path / "else.json").write_text('{"cfg": {}, "nodes": {}, "edges": {}}')
    with pytest.raises(ValueError, match="from_mib"):
        Circuit.load(tmp_path / "else.json")


def test_jaccard_counts_common_edges(circuit):
    path = Circuit(SMALL, SMALL.mask([Edge("embed", "m1"), Edge("m1", "out")]), "by hand")
    empty = Circuit(SMALL, torch.zeros(len(SMALL)), "by hand")
    assert circuit.jaccard(circuit) == 1 and circuit.jaccard(path) == 0.5 and circuit.jaccard(empty) == 0
    assert empty.jaccard(empty) == 1 and empty.vertices == [] and empty.n_edges == 0
    with pytest.raises(ValueError, match="different graphs"):
        circuit.jaccard(manual_ioi(GPT2))


MIB = """{"cfg": {"n_layers": 1, "n_heads": 2, "parallel_attn_mlp": false, "d_model": 8},
 "nodes": {"input": {"in_graph": true}, "a0.h0": {"in_graph": false}, "a0.h1": {"in_graph": true},
           "m0": {"in_graph": true}, "logits": {"in_graph": true}},
 "edges": {"input->a0.h0<q>": {"score": 0.1, "in_graph": false}, "input->a0.h0<k>": {"score": 0.0, "in_graph": false},
           "input->a0.h0<v>": {"score": 0.0, "in_graph": false}, "input->a0.h1<q>": {"score": 0.0, "in_graph": false},
           "input->a0.h1<k>": {"score": 0.0, "in_graph": false}, "input->a0.h1<v>": {"score": -3.0, "in_graph": true},
           "input->m0": {"score": 0.2, "in_graph": false}, "a0.h0->m0": {"score": 0.0, "in_graph": false},
           "a0.h1->m0": {"score": 2.0, "in_graph": true}, "input->logits": {"score": 0.3, "in_graph": false},
           "a0.h0->logits": {"score": 0.0, "in_graph": false}, "a0.h1->logits": {"score": 0.0, "in_graph": false},
           "m0->logits": {"score": 1.5, "in_graph": true}}}"""


def test_a_file_of_eap_ig_is_read(tmp_path):
    (path := tmp_path / "mib.json").write_text(MIB)
    circuit = Circuit.from_mib(path, model=model_like(Graph(1, 2)))
    assert circuit.edges == [Edge("embed", "a0.h1", "v"), Edge("a0.h1", "m0"), Edge("m0", "out")]
    assert {str(e) for e in Circuit.from_mib(path, n_edges=4).edges} == {*map(str, circuit.edges), "embed->out"}


def test_to_mib_writes_the_file_that_eap_ig_would(tmp_path):
    (theirs := tmp_path / "theirs.json").write_text(MIB)
    expected, model = json.loads(MIB), model_like(Graph(1, 2))
    circuit = Circuit.from_mib(theirs)
    names = [str(e).replace("embed", "input").replace("out", "logits") for e in circuit.graph.edges]
    scores = torch.tensor([expected["edges"][name]["score"] for name in names], dtype=torch.float64)
    circuit.to_mib(tmp_path / "ours.json", model, scores)
    assert json.loads((tmp_path / "ours.json").read_text()) == expected
    circuit.to_mib(tmp_path / "plain.json", model)
    edges = json.loads((tmp_path / "plain.json").read_text())["edges"]
    assert all(info["score"] == info["in_graph"] for info in edges.values())


@pytest.mark.parametrize(
    "old, new, message",
    [
        ('"parallel_attn_mlp": false', '"parallel_attn_mlp": true', "parallel"),
        ('"m0": {"in_graph": true}', '"m0": {"in_graph": true, "neurons": [true, false]}', "single neurons"),
        ('"d_model": 8', '"d_model": 16', "width 16"),
        ('"n_layers": 1', '"n_layers": 2', "n_layers=2"),
        ('"in_graph": true', '"in_graph": false', "give n_edges"),
        ('"a0.h1->m0"', '"a0.h7->m0"', "no vertex 'a0.h7'"),
        ('"cfg"', '"config"', "needs cfg, nodes and edges"),
    ],
)
def test_a_file_of_eap_ig_that_means_something_else_is_refused(old, new, message, tmp_path):
    (path := tmp_path / "mib.json").write_text(MIB.replace(old, new))
    with pytest.raises(ValueError, match=message):
        Circuit.from_mib(path, model=model_like(Graph(1, 2)))


def test_dot_text_names_every_edge_once(circuit):
    text = circuit.to_dot()
    assert text.startswith("digraph") and text.count("{") == text.count("}")
    assert sorted(line.split(" [")[0].strip() for line in text.splitlines() if " -> " in line) == sorted(
        f'"{e.src}" -> "{e.dst}"' for e in circuit.edges
    )


# ---- manual circuits


def test_manual_ioi_has_the_published_edges(monkeypatch):
    circuit = manual_ioi(GPT2)
    published = "0.1 0.10 2.2 3.0 4.11 5.5 5.8 5.9 6.9 7.3 7.9 8.6 8.10 9.0 9.6 9.7 9.9"
    published += " 10.0 10.1 10.2 10.6 10.7 10.10 11.2 11.9 11.10"
    assert circuit.n_edges == 963 and len(circuit.heads) == 26
    assert circuit.heads == ["a" + head.replace(".", ".h") for head in published.split()]
    to_movers, to_inhibition = Edge("a8.h6", "a9.h9", "q"), Edge("a5.h5", "a8.h6", "v")
    assert {to_movers, to_inhibition} <= set(circuit.edges)
    assert not {to_movers._replace(slot="v"), to_inhibition._replace(slot="q")} & set(circuit.edges)
    assert [v for v in circuit.vertices if v[0] == "m"] == [f"m{i}" for i in range(12)]
    assert kinds(circuit.edges) == {
        ("mlp", "head"): 567, ("embed", "head"): 45, ("head", "head"): 124, ("head", "mlp"): 123, ("head", "out"): 13,
        ("mlp", "mlp"): 66, ("embed", "mlp"): 12, ("mlp", "out"): 12, ("embed", "out"): 1,
    }  # fmt: skip
    monkeypatch.setattr(Graph, "prune_dangling", lambda _, mask: mask)
    assert manual_ioi(GPT2).n_edges == 963  # nothing in it dangles


def test_manual_greater_than_has_the_published_edges(monkeypatch):
    circuit = manual_greater_than(GPT2)
    published = "0.1 0.3 0.5 5.5 6.1 6.9 7.10 8.11 9.1"
    assert circuit.n_edges == 235
    assert circuit.heads == ["a" + head.replace(".", ".h") for head in published.split()]
    assert Edge("a0.h1", "m0") in circuit.edges and Edge("a0.h3", "m0") not in circuit.edges
    assert kinds(circuit.edges) == {
        ("embed", "head"): 9, ("embed", "mlp"): 4, ("head", "head"): 54, ("head", "mlp"): 27, ("head", "out"): 6,
        ("mlp", "head"): 89, ("mlp", "mlp"): 42, ("mlp", "out"): 4,
    }  # fmt: skip
    monkeypatch.setattr(Graph, "prune_dangling", lambda _, mask: mask)
    assert manual_greater_than(GPT2).n_edges == 235


@pytest.mark.parametrize("manual", [manual_ioi, manual_greater_than])
def test_manual_circuits_are_refused_for_other_models(manual):
    with pytest.raises(ValueError, match="GPT-2-small"):
        manual(Graph(30, 9))


# ---- picture


@pytest.mark.parametrize("max_edges, drawn", [(500, 235), (60, 60)])
def test_picture_shows_each_vertex_and_at_most_max_edges(max_edges, drawn):
    circuit = manual_greater_than(GPT2)
    ax = draw(circuit, max_edges=max_edges)
    lines = [c for c in ax.collections if isinstance(c, matplotlib.collections.LineCollection)]
    assert sum(len(c.get_segments()) for c in lines) == drawn
    assert [t.get_text() for t in ax.texts] == circuit.vertices
    assert ax.get_title(loc="left") == ("" if drawn == 235 else "60 of 235 edges drawn")
    matplotlib.pyplot.close(ax.figure)


def test_picture_of_an_empty_circuit_is_an_empty_grid():
    _, ax = matplotlib.pyplot.subplots()
    assert draw(Circuit(SMALL, torch.zeros(len(SMALL)), "by hand"), ax=ax) is ax and not ax.texts
    matplotlib.pyplot.close(ax.figure)
