"""Circuits: what they are made of, their files, and those that people found by hand."""

import json
import math
import re
from dataclasses import replace

import matplotlib
import matplotlib.pyplot as plt
import pytest
import torch
from test_graph import GPT2, SMALL, kinds

from oa_utils import plots, store
from oa_utils.circuits import HOW, Circuit, manual_circuit
from oa_utils.graph import Edge, Graph
from oa_utils.models import Model

matplotlib.use("Agg")


class ModelLike(Model):
    """As much of a model as a circuit asks for."""

    fingerprint = "f1"
    parallel = False

    def __init__(self, graph: Graph, name="toy", fingerprint="f1", d_model=8):
        self.n_layers = graph.n_layers
        self.n_heads = graph.n_heads
        self.parallel = graph.parallel
        self.name = name
        self.fingerprint = fingerprint
        self.d_model = d_model


@pytest.fixture
def circuit() -> Circuit:
    edges = ["embed->a0.h1<k>", "a0.h1->m1", "embed->m1", "m1->out"]
    return Circuit(
        SMALL,
        SMALL.mask(edges),
        "ugs",
        "optimal",
        settings={"lam": 1e-3, "steps": 3},
        seed=7,
        history={"gap": [0.5, math.inf]},
        gap=0.25,
        model="toy",
        fingerprint="f1",
    )


# ---- what they are


def test_a_circuit_has_no_dangling_edges_and_owns_its_mask(circuit):
    mask = circuit.mask.float()[None]
    mask[0, SMALL.index(Edge("embed", "a2.h0", "q"))] = 1
    other = Circuit(SMALL, mask, "by hand")
    mask[:] = 0
    assert other.edges == circuit.edges
    assert other.n_edges == 4
    assert other.vertices == ["embed", "a0.h1", "m1", "out"]
    assert other.heads == ["a0.h1"]
    assert repr(other) == f"Circuit(by hand: 4 of {len(SMALL)} edges, 1 heads)"


def test_a_mask_that_is_not_yet_a_decision_makes_no_circuit(circuit):
    with pytest.raises(ValueError, match="threshold"):
        Circuit(SMALL, circuit.mask * 0.7, "ugs")
    with pytest.raises(ValueError, match="one mask"):
        Circuit(SMALL, torch.ones(2, len(SMALL)), "ugs")


def test_a_circuit_of_ones_own_is_made_of_names(circuit):
    model = ModelLike(SMALL)
    names = [str(edge) for edge in circuit.edges]
    mine = Circuit.from_edges(model, names)
    assert mine.edges == circuit.edges
    assert (mine.method, mine.model, mine.fingerprint) == ("manual", "toy", "f1")
    assert Circuit.from_edges(model, circuit.edges).edges == circuit.edges
    with pytest.raises(ValueError, match="no vertex 'a7.h0'"):
        Circuit.from_edges(model, ["a7.h0->out"])


def test_jaccard_counts_common_edges(circuit):
    path = Circuit(SMALL, SMALL.mask([Edge("embed", "m1"), Edge("m1", "out")]), "by hand")
    empty = Circuit(SMALL, torch.zeros(len(SMALL)), "by hand")
    assert circuit.jaccard(circuit) == 1
    assert circuit.jaccard(path) == 0.5
    assert circuit.jaccard(empty) == 0
    assert empty.jaccard(empty) == 1
    assert empty.vertices == []
    assert empty.n_edges == 0
    with pytest.raises(ValueError, match="different graphs"):
        circuit.jaccard(manual_circuit("ioi", GPT2))


# ---- files


def test_a_saved_circuit_comes_back_whole(circuit, tmp_path):
    path = tmp_path / "new" / "c.json"
    circuit.save(path)
    again = Circuit.load(path, model=ModelLike(SMALL))
    assert torch.equal(again.mask, circuit.mask)
    assert again.graph == circuit.graph
    for name in HOW:
        assert getattr(again, name) == getattr(circuit, name), name
    assert [file.name for file in path.parent.iterdir()] == ["c.json"]
    circuit.with_gap(0.125).save(path)
    assert Circuit.load(path).gap == 0.125


def test_a_save_that_fails_leaves_the_old_file(circuit, tmp_path):
    path = tmp_path / "c.json"
    circuit.save(path)
    before = path.read_bytes()
    with pytest.raises(TypeError):
        replace(circuit, settings={"model": object()}).save(path)
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


def test_a_circuit_of_another_model_is_refused(circuit, tmp_path):
    path = tmp_path / "c.json"
    circuit.save(path)
    with pytest.raises(ValueError, match="n_layers=3.*n_layers=2"):
        Circuit.load(path, model=ModelLike(Graph(2, 2)))
    with pytest.raises(ValueError, match="found in toy .*f1.*not in twin .*f2"):
        Circuit.load(path, model=ModelLike(SMALL, "twin", "f2"))
    replace(circuit, fingerprint=None).save(path)
    assert Circuit.load(path, model=ModelLike(SMALL, "twin", "f2")).n_edges == 4


@pytest.mark.parametrize(
    "edit",
    [
        lambda text: text.replace('"a0.h1->m1", ', ""),
        lambda text: text.replace('"gap": 0.25', '"gap": 0.01'),
        lambda text: text.replace('"f1"', '"f2"'),
        lambda text: re.sub('"sha256": "[0-9a-f]*"', '"sha256": ""', text),
        lambda text: text[: len(text) // 2],
        lambda text: "[" * 10_000,
        lambda text: '{"cfg": {}, "nodes": {}, "edges": {}}',
        lambda text: "",
    ],
    ids=["edge", "gap", "fingerprint", "seal", "half", "deep", "foreign", "empty"],
)
def test_a_file_that_was_edited_is_refused(circuit, tmp_path, edit):
    path = tmp_path / "c.json"
    circuit.save(path)
    text = path.read_text()
    assert edit(text) != text
    path.write_text(edit(text))
    with pytest.raises(store.BadFile, match="c.json"):
        Circuit.load(path)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"experiment": "sweeps"}, "from_mib"),
        ({"n_edges": 5}, "says 5 edges, but names 4"),
        ({"edges": ["embed->m1", "embed->m1", "m1->out", "m1->out"]}, "of which 2 do not dangle"),
        ({"edges": ["embed->m1", "m1->out", "embed->m2", "embed->m0"]}, "2 do not dangle"),
        ({"edges": ["embed->m9"]}, "no vertex 'm9'"),
        ({"edges": None}, "lacks what a circuit has"),
        ({"graph": {"layers": 3}}, "lacks what a circuit has"),
    ],
)
def test_a_sealed_file_whose_parts_do_not_fit_is_refused(circuit, tmp_path, change, message):
    path = tmp_path / "c.json"
    circuit.save(path)
    record = store.read_record(path)
    store.write_record(path, record | change)
    with pytest.raises(ValueError, match=message):
        Circuit.load(path)


# ---- files of EAP-IG and MIB

INSIDE = {"input->a0.h1<v>": -3.0, "a0.h1->m0": 2.0, "m0->logits": 1.5}
OUTSIDE = {
    "input->a0.h0<q>": 0.1,
    "input->a0.h0<k>": 0.0,
    "input->a0.h0<v>": 0.0,
    "input->a0.h1<q>": 0.0,
    "input->a0.h1<k>": 0.0,
    "input->m0": 0.2,
    "a0.h0->m0": 0.0,
    "input->logits": 0.3,
    "a0.h0->logits": 0.0,
    "a0.h1->logits": 0.0,
}
MIB = {
    "cfg": {"n_layers": 1, "n_heads": 2, "parallel_attn_mlp": False, "d_model": 8},
    "nodes": {
        "input": {"in_graph": True},
        "a0.h0": {"in_graph": False},
        "a0.h1": {"in_graph": True},
        "m0": {"in_graph": True},
        "logits": {"in_graph": True},
    },
    "edges": {name: {"score": score, "in_graph": True} for name, score in INSIDE.items()}
    | {name: {"score": score, "in_graph": False} for name, score in OUTSIDE.items()},
}


@pytest.fixture
def mib(tmp_path):
    path = tmp_path / "mib.json"
    path.write_text(json.dumps(MIB))
    return path


def test_a_file_of_eap_ig_is_read(mib):
    circuit = Circuit.from_mib(mib, model=ModelLike(Graph(1, 2)))
    assert circuit.edges == [Edge("embed", "a0.h1", "v"), Edge("a0.h1", "m0"), Edge("m0", "out")]
    larger = Circuit.from_mib(mib, n_edges=4)
    assert set(larger.edges) == {*circuit.edges, Edge("embed", "out")}
    with pytest.raises(ValueError, match="n_edges is from 0 to 13"):
        Circuit.from_mib(mib, n_edges=14)


def test_to_mib_writes_the_file_that_eap_ig_would(mib, tmp_path):
    model = ModelLike(Graph(1, 2))
    circuit = Circuit.from_mib(mib)
    names = [
        str(edge).replace("embed", "input").replace("out", "logits") for edge in circuit.graph.edges
    ]
    scores = torch.tensor([MIB["edges"][name]["score"] for name in names], dtype=torch.float64)
    circuit.to_mib(tmp_path / "ours.json", model, scores)
    assert json.loads((tmp_path / "ours.json").read_text()) == MIB
    circuit.to_mib(tmp_path / "plain.json", model)
    edges = json.loads((tmp_path / "plain.json").read_text())["edges"]
    assert all(info["score"] == info["in_graph"] for info in edges.values())


@pytest.mark.parametrize(
    "old, new, message",
    [
        ('"parallel_attn_mlp": false', '"parallel_attn_mlp": true', "parallel"),
        (
            '"m0": {"in_graph": true}',
            '"m0": {"in_graph": true, "neurons": [true, false]}',
            "single neurons",
        ),
        ('"d_model": 8', '"d_model": 16', "width 16"),
        ('"n_layers": 1', '"n_layers": 2', "n_layers=2"),
        ('"in_graph": true', '"in_graph": false', "give n_edges"),
        ('"in_graph": false', '"in_graph": "no"', "true or false, not 'no'"),
        ('"score": 2.0', '"score": NaN', "valid JSON .*NaN"),
        ('"score": 2.0', '"score": "2"', "'2', not a finite number"),
        ('"a0.h1->m0"', '"a0.h7->m0"', "no vertex 'a0.h7'"),
        ('"cfg"', '"config"', "needs cfg, nodes and edges"),
    ],
)
def test_a_file_of_eap_ig_that_means_something_else_is_refused(mib, old, new, message):
    text = mib.read_text()
    assert old in text
    mib.write_text(text.replace(old, new))
    with pytest.raises(ValueError, match=message):
        Circuit.from_mib(mib, model=ModelLike(Graph(1, 2)))


def test_dot_text_names_every_edge_once(circuit):
    text = circuit.to_dot()
    assert text.startswith("digraph")
    assert text.count("{") == text.count("}")
    lines = [line.split(" [")[0].strip() for line in text.splitlines() if " -> " in line]
    assert sorted(lines) == sorted(f'"{edge.src}" -> "{edge.dst}"' for edge in circuit.edges)


def test_dot_text_and_picture_have_one_colour_for_each_kind_of_edge(circuit):
    text = circuit.to_dot()
    in_text = {
        edge.slot: re.search(rf'"{edge.src}" -> "{edge.dst}" \[color="(\S+)"', text)[1]
        for edge in circuit.edges
    }
    ax = plots.draw(circuit)
    in_picture = {line.get_label(): line.get_color() for line in ax.get_lines()}
    plt.close(ax.figure)
    assert in_text.keys() == {"k", ""}
    assert in_text == {slot: in_picture[slot or "into MLP or out"] for slot in in_text}
    assert len(set(in_picture.values())) == len(in_picture) == 4


# ---- manual circuits


def published_heads(text: str) -> list[str]:
    return ["a" + head.replace(".", ".h") for head in text.split()]


def test_manual_ioi_has_the_published_edges():
    circuit = manual_circuit("ioi", GPT2)
    assert circuit.n_edges == 963
    assert circuit.method == "manual"
    assert circuit.heads == published_heads(
        "0.1 0.10 2.2 3.0 4.11 5.5 5.8 5.9 6.9 7.3 7.9 8.6 8.10 9.0 9.6 9.7 9.9 "
        "10.0 10.1 10.2 10.6 10.7 10.10 11.2 11.9 11.10"
    )
    edges = set(circuit.edges)
    to_movers = Edge("a8.h6", "a9.h9", "q")
    to_inhibition = Edge("a5.h5", "a8.h6", "v")
    assert {to_movers, to_inhibition} <= edges
    assert not {to_movers._replace(slot="v"), to_inhibition._replace(slot="q")} & edges
    mlps = [vertex for vertex in circuit.vertices if vertex[0] == "m"]
    assert mlps == [f"m{layer}" for layer in range(12)]
    assert kinds(circuit.edges) == {
        ("mlp", "head"): 567,
        ("embed", "head"): 45,
        ("head", "head"): 124,
        ("head", "mlp"): 123,
        ("head", "out"): 13,
        ("mlp", "mlp"): 66,
        ("embed", "mlp"): 12,
        ("mlp", "out"): 12,
        ("embed", "out"): 1,
    }


def test_manual_greater_than_has_the_published_edges():
    circuit = manual_circuit("greater_than", GPT2)
    assert circuit.n_edges == 235
    assert circuit.heads == published_heads("0.1 0.3 0.5 5.5 6.1 6.9 7.10 8.11 9.1")
    assert Edge("a0.h1", "m0") in circuit.edges
    assert Edge("a0.h3", "m0") not in circuit.edges
    assert kinds(circuit.edges) == {
        ("embed", "head"): 9,
        ("embed", "mlp"): 4,
        ("head", "head"): 54,
        ("head", "mlp"): 27,
        ("head", "out"): 6,
        ("mlp", "head"): 89,
        ("mlp", "mlp"): 42,
        ("mlp", "out"): 4,
    }


@pytest.mark.parametrize("name", ["ioi", "greater_than"])
def test_nothing_in_a_manual_circuit_dangles(name, monkeypatch):
    pruned = manual_circuit(name, GPT2)
    monkeypatch.setattr(Graph, "prune_dangling", lambda self, mask: mask)
    assert torch.equal(manual_circuit(name, GPT2).mask, pruned.mask)


def test_for_other_models_and_other_tasks_no_manual_circuit_is_known():
    assert manual_circuit("ioi", Graph(30, 9)) is None
    assert manual_circuit("greater_than", SMALL) is None
    for name in ("own", "greater", "io", "*", ""):
        assert manual_circuit(name, GPT2) is None, name


# ---- picture


def test_picture_shows_each_vertex_and_each_edge():
    circuit = manual_circuit("greater_than", GPT2)
    ax = plots.draw(circuit)
    lines = [c for c in ax.collections if isinstance(c, matplotlib.collections.LineCollection)]
    assert sum(len(collection.get_segments()) for collection in lines) == 235
    assert [text.get_text() for text in ax.texts] == circuit.vertices
    plt.close(ax.figure)


def test_picture_of_an_empty_circuit_is_an_empty_grid():
    _, ax = plt.subplots()
    assert plots.draw(Circuit(SMALL, torch.zeros(len(SMALL)), "by hand"), ax=ax) is ax
    assert not ax.texts
    plt.close(ax.figure)
