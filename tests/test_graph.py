"""The graph of edges, its order and its views, and pruning of dangling edges."""

import tracemalloc
from collections import Counter
from types import SimpleNamespace

import networkx as nx
import pytest
import torch

from oa_utils.graph import Edge, Graph

SMALL = Graph(3, 2)
GPT2 = Graph(12, 12)
OTHERS = [
    Graph(3, 2, parallel=True),
    Graph(3, 2, level="layer"),
    Graph(3, 2, parallel=True, level="layer"),
]


def kind(vertex: str) -> str:
    if vertex in ("embed", "out"):
        return vertex
    return {"a": "head", "m": "mlp"}[vertex[0]]


def kinds(edges) -> Counter:
    return Counter((kind(edge.src), kind(edge.dst)) for edge in edges)


def sparse_masks(graph: Graph, batch: int, density: float, seed: int = 0) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    kept = torch.rand(batch, len(graph), generator=rng) < density
    return kept * (0.01 + 0.99 * torch.rand(batch, len(graph), generator=rng))


def reachable(graph: Graph, mask: torch.Tensor) -> torch.Tensor:
    """Brute force: keep an edge when embed reaches its source and its target reaches out."""
    live = [edge for edge, alpha in zip(graph.edges, mask.tolist(), strict=True) if alpha > 0]
    net = nx.DiGraph([(edge.src, edge.dst) for edge in live])
    net.add_nodes_from(["embed", "out"])
    down = nx.descendants(net, "embed") | {"embed"}
    up = nx.ancestors(net, "out") | {"out"}
    return graph.mask(edge for edge in live if edge.src in down and edge.dst in up)


# ---- the graph


@pytest.mark.parametrize(
    "n, h, edges",
    [
        (12, 12, 32491),
        (24, 16, 231877),
        (36, 20, 810703),
        (48, 25, 2235025),
        (30, 9, 123211),
    ],
)
def test_edge_counts_are_those_of_the_paper(n, h, edges):
    between_heads = 3 * h * h * n * (n - 1) // 2
    with_one_head = 2 * h * n * (n + 1)
    without = n * (n + 1) // 2 + n * (h + 1) + 1
    assert len(Graph(n, h)) == edges == between_heads + with_one_head + without


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
    assert degree["out"] == 157
    assert degree["embed"] == 12 * 37 + 1
    assert int(GPT2.degree.sum()) == 2 * len(GPT2)


def test_edges_only_go_to_later_vertices():
    assert (SMALL.src < SMALL.dst).all()
    assert Edge("a1.h0", "m1") in SMALL.edges
    assert Edge("embed", "out") in SMALL.edges
    assert Edge("m1", "a1.h0", "q") not in SMALL.edges
    assert Edge("a1.h0", "a1.h1", "q") not in SMALL.edges


@pytest.mark.parametrize("graph", [Graph(1, 1), SMALL, Graph(2, 5), *OTHERS])
def test_position_iteration_index_and_tensors_name_the_same_edge(graph):
    edges = list(graph.edges)
    assert len(set(edges)) == len(edges) == len(graph) == len(graph.edges)
    for i, edge in enumerate(edges):
        assert graph.edges[i] == edge
        assert graph.index(edge) == i
        assert graph.index(str(edge)) == i
        assert Edge.parse(str(edge)) == edge
        ends = (graph.vertices[graph.src[i]], graph.vertices[graph.dst[i]])
        assert ends == (edge.src, edge.dst)
    assert graph.edges[-1] == edges[-1]
    assert graph.edges[1:4] == edges[1:4]
    with pytest.raises(IndexError):
        graph.edges[len(graph)]


@pytest.mark.parametrize("graph", [SMALL, *OTHERS])
def test_in_edges_of_a_reader_are_one_slice_and_all_slices_tile_the_mask(graph):
    at = 0
    for (dst, slot), span in graph.reader_slices.items():
        assert span.start == at
        assert {(edge.dst, edge.slot) for edge in graph.edges[span]} == {(dst, slot)}
        writers = graph.vertices[: span.stop - span.start]
        assert [edge.src for edge in graph.edges[span]] == list(writers)
        at = span.stop
    assert at == len(graph)


def test_a_parallel_graph_lacks_the_edges_from_a_layer_s_heads_to_its_own_mlp():
    beside = [edge for edge in SMALL.edges if edge.dst == f"m{edge.src[1]}" and ".h" in edge.src]
    parallel = Graph(3, 2, parallel=True)
    assert len(beside) == 6
    assert list(parallel.edges) == [edge for edge in SMALL.edges if edge not in beside]
    assert parallel != SMALL and parallel.shape == SMALL.shape | {"parallel": True}
    with pytest.raises(ValueError, match="attention and MLP of a layer are parallel"):
        parallel.index("a1.h0->m1")


def test_a_graph_of_whole_layers_has_an_edge_from_every_vertex_to_every_later_one():
    graph = Graph(3, 2, level="layer")
    assert graph.vertices == ("embed", "a0", "m0", "a1", "m1", "a2", "m2", "out")
    assert {(edge.src, edge.dst) for edge in graph.edges} == {
        (src, dst) for i, src in enumerate(graph.vertices) for dst in graph.vertices[i + 1 :]
    }
    assert not any(map(graph.is_head, graph.vertices))
    with pytest.raises(ValueError, match="an edge into a1 has no slot"):
        graph.index("embed->a1<q>")
    with pytest.raises(ValueError, match="level is one of edge, layer"):
        Graph(3, 2, level="vertex")


def test_blocks_are_views_that_hold_each_edge_at_its_reader_and_writer():
    numbers = torch.arange(2 * len(SMALL)).reshape(2, -1)
    blocks = SMALL.blocks(numbers)
    for i, edge in enumerate(SMALL.edges):
        writer = SMALL.vertices.index(edge.src)
        if edge.dst == "out":
            number = blocks.out[1, writer]
        elif edge.slot == "":
            number = blocks.mlp[int(edge.dst[1:])][1, writer]
        else:
            layer, head = map(int, edge.dst[1:].split(".h"))
            number = blocks.attn[layer][1, "qkv".index(edge.slot), head, writer]
        assert number == len(SMALL) + i
    storage = numbers.untyped_storage().data_ptr()
    for block in (*blocks.attn, *blocks.mlp, blocks.out):
        assert block.untyped_storage().data_ptr() == storage
    assert blocks.attn[2].shape == (2, 3, 2, 7)
    assert blocks.mlp[2].shape == (2, 9)
    assert blocks.out.shape == (2, 10)


def test_gradients_pass_from_the_blocks_to_the_whole_mask():
    mask = torch.rand(2, len(SMALL), requires_grad=True)
    blocks = SMALL.blocks(mask)
    total = sum((block**2).sum() for block in (*blocks.attn, *blocks.mlp, blocks.out))
    total.backward()
    torch.testing.assert_close(mask.grad, 2 * mask.detach())


def test_graphs_of_one_shape_are_one_key_and_travel_as_their_shape():
    other = Graph.of(SimpleNamespace(n_layers=3, n_heads=2, parallel=False))
    assert len(SMALL.src) == len(other.dst)  # both have cached something
    assert other == SMALL
    assert {SMALL: 1}[other] == 1
    assert Graph(2, 3) != SMALL
    rebuild, numbers = SMALL.__reduce__()  # what a worker is sent
    assert rebuild(*numbers) == SMALL
    assert numbers == (SMALL.n_layers, SMALL.n_heads, False, "edge")
    assert str(SMALL) == "Graph(n_layers=3, n_heads=2)"
    with pytest.raises(AttributeError):
        other.n_heads = 3
    with pytest.raises(ValueError, match="at least one layer"):
        Graph(0, 4)


def test_edges_of_the_largest_model_are_made_on_demand():
    tracemalloc.start()
    graph = Graph(48, 25)
    assert graph.edges[-1] == Edge("m47", "out")
    assert graph.index(Edge("a0.h3", "a47.h24", "v")) < len(graph)
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
    assert Edge(*edge) not in SMALL.edges


@pytest.mark.parametrize("name", ["a0.h1", "->m1", "m0->", "m0->a1.h0<q"])
def test_a_text_that_names_no_edge_is_refused(name):
    with pytest.raises(ValueError, match="not the name of an edge"):
        Edge.parse(name)


def test_edges_to_mask_and_back_is_the_identity_and_changes_no_input():
    mask = sparse_masks(SMALL, 1, 0.3)[0] > 0
    before = mask.clone()
    edges = SMALL.edges_of(mask)
    asked = list(edges)
    assert torch.equal(SMALL.mask(edges), mask)
    assert torch.equal(SMALL.mask(str(edge) for edge in edges), mask)
    assert edges == asked
    assert torch.equal(mask, before)
    assert SMALL.edges_of(mask[None].float()) == edges
    assert SMALL.edges_of(SMALL.mask([])) == []
    assert SMALL.edges_of(SMALL.mask(SMALL.edges)) == list(SMALL.edges)


@pytest.mark.parametrize("use", ["edges_of", "prune_dangling", "blocks"])
def test_a_mask_of_the_wrong_length_is_refused(use):
    with pytest.raises(ValueError, match=f"{len(SMALL)} edges"):
        getattr(SMALL, use)(torch.ones(2, len(SMALL) + 1))


def test_edges_of_several_masks_are_refused():
    with pytest.raises(ValueError, match="one mask"):
        SMALL.edges_of(torch.ones(2, len(SMALL)))


# ---- dangling edges


@pytest.mark.parametrize("density", [0.02, 0.05, 0.1, 0.3, 0.8])
@pytest.mark.parametrize("graph", [Graph(1, 1), SMALL, Graph(4, 4), *OTHERS])
def test_pruning_equals_brute_force_reachability(graph, density):
    masks = sparse_masks(graph, 20, density)
    pruned = graph.prune_dangling(masks)
    for mask, kept in zip(masks, pruned, strict=True):
        assert torch.equal(kept > 0, reachable(graph, mask))


def test_pruning_a_batch_equals_pruning_each_mask_and_twice_equals_once():
    masks = sparse_masks(GPT2, 8, 0.02)
    pruned = GPT2.prune_dangling(masks)
    assert 0 < (pruned > 0).sum() < (masks > 0).sum()
    assert torch.equal(pruned, torch.stack([GPT2.prune_dangling(mask) for mask in masks]))
    in_two_rows = GPT2.prune_dangling(masks.reshape(2, 4, -1))
    assert torch.equal(pruned.reshape(2, 4, -1), in_two_rows)
    assert torch.equal(GPT2.prune_dangling(pruned), pruned)


def test_an_mlp_reached_in_one_mask_is_not_thereby_reached_in_another():
    reached = SMALL.mask([Edge("embed", "m0"), Edge("m0", "out")])
    unreached = SMALL.mask([Edge("m0", "out")])
    both = torch.stack([reached, unreached])
    assert SMALL.prune_dangling(both).sum(-1).tolist() == [2, 0]


@pytest.mark.parametrize("slot", ["q", "k", "v"])
def test_a_head_is_reached_by_any_of_q_k_v(slot):
    edges = [Edge("embed", "a0.h1", slot), Edge("a0.h1", "a2.h0", slot), Edge("a2.h0", "out")]
    path = SMALL.mask(edges)
    assert torch.equal(SMALL.prune_dangling(path), path)


def test_dangling_chains_go_from_both_ends():
    path = [Edge("embed", "a0.h0", "v"), Edge("a0.h0", "out")]
    no_way_in = [Edge("a0.h1", "m0"), Edge("m0", "a1.h0", "q"), Edge("a1.h0", "out")]
    no_way_out = [Edge("embed", "m1"), Edge("m1", "a2.h0", "k"), Edge("a0.h0", "a2.h1", "v")]
    mask = SMALL.mask(path + no_way_in + no_way_out)
    assert SMALL.edges_of(SMALL.prune_dangling(mask)) == path


def test_kept_edges_keep_value_and_gradient_and_dropped_ones_have_none():
    masks = sparse_masks(SMALL, 6, 0.15, seed=3).requires_grad_()
    before = masks.detach().clone()
    pruned = SMALL.prune_dangling(masks)
    (3 * pruned).sum().backward()
    kept = torch.stack([reachable(SMALL, mask) for mask in before])
    assert 0 < kept.sum() < (before > 0).sum()
    assert torch.equal(pruned.detach(), before * kept)
    assert torch.equal(masks.detach(), before)
    assert torch.equal(masks.grad[before > 0], 3.0 * kept[before > 0])


def test_full_mask_stays_full_and_empty_stays_empty():
    for dtype in (torch.bool, torch.float32, torch.float64):
        full = torch.ones(2, len(SMALL), dtype=dtype)
        assert torch.equal(SMALL.prune_dangling(full), full)
        assert torch.equal(SMALL.prune_dangling(full * 0), full * 0)
    assert SMALL.prune_dangling(torch.ones(0, len(SMALL))).shape == (0, len(SMALL))


def test_edges_are_given_by_name_too():
    graph = Graph(2, 2)
    by_name = graph.mask(["embed->m0", "a0.h1->a1.h0<q>"])
    assert graph.edges_of(by_name) == [Edge("embed", "m0", ""), Edge("a0.h1", "a1.h0", "q")]
