"""Circuits: sets of edges with how they were found, their files, and the ones that people found by
hand."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, SupportsFloat

import torch
from jaxtyping import Float
from torch import Tensor

from oa_utils import store
from oa_utils.fills import Constants
from oa_utils.graph import Edge, Graph
from oa_utils.models import Model

HOW = ("method", "ablation", "settings", "seed", "gap", "model", "fingerprint", "history")
TO_MIB = {"embed": "input", "out": "logits"}  # EAP-IG and MIB use these names; all others are ours
FROM_MIB = {theirs: ours for ours, theirs in TO_MIB.items()}
LARGEST = 512  # layers, or heads of a layer, that a file may name
COLOURS = {"q": "#07438a", "k": "#ee5c20", "v": "#008559", "": "#6f6f6f"}  # of edges, by slot


@dataclass(frozen=True, eq=False, repr=False)
class Circuit:
    """A set of edges and how it was found. Dangling edges are dropped, so every size is without
    them."""

    graph: Graph
    mask: Tensor  # bool [n_edges]; any 0/1 tensor [n_edges] or [1, n_edges] is taken
    method: str  # ugs, acdc, ..., manual
    ablation: str | None = None
    settings: dict = field(default_factory=dict)
    seed: int | None = None
    history: dict = field(default_factory=dict)  # a few numbers for each reported step
    gap: float | None = None  # nats, under `ablation`
    model: str | None = None  # name; with the fingerprint it says whose circuit this is
    fingerprint: str | None = None
    constants: Constants | None = None  # that a search under OA trained along; not in its file

    def __post_init__(self):
        mask = self.mask.detach().cpu()
        if mask.numel() != len(self.graph):
            raise ValueError(
                f"a circuit of {self.graph} takes one mask of {len(self.graph)}, "
                f"got {list(mask.shape)}"
            )
        if not ((mask == 0) | (mask == 1)).all():
            raise ValueError(
                "the mask of a circuit is 0 or 1; put a threshold on it first, for example "
                "mask > 0.5"
            )
        pruned = self.graph.prune_dangling(mask.reshape(-1).bool())
        object.__setattr__(self, "mask", pruned)

    def __repr__(self) -> str:
        how = self.method + (f" under {self.ablation}" if self.ablation else "")
        size = f"{self.n_edges} of {len(self.graph)} edges, {len(self.heads)} heads"
        return f"Circuit({how}: {size})"

    @classmethod
    def from_edges(
        cls,
        model: Model,
        edges: Iterable[Edge | str],
        method: str = "manual",
        level: str = "edge",
    ) -> Circuit:
        """A circuit of one's own, from edges or their names: `["embed->m0", "a0.h1->a3.h2<q>"]`,
        at level "layer" `["embed->a0", "a0->m1"]`."""
        graph = Graph.of(model, level)
        mask = graph.mask(edges)
        return cls(graph, mask, method, model=model.name, fingerprint=model.fingerprint)

    @property
    def edges(self) -> list[Edge]:
        return self.graph.edges_of(self.mask)

    @property
    def n_edges(self) -> int:
        return int(self.mask.sum())

    @property
    def vertices(self) -> list[str]:
        """The vertices its edges touch, in the order of `graph.vertices`."""
        ends = torch.cat([self.graph.src[self.mask], self.graph.dst[self.mask]]).unique()
        return [self.graph.vertices[i] for i in ends.tolist()]

    @property
    def heads(self) -> list[str]:
        return [vertex for vertex in self.vertices if self.graph.is_head(vertex)]

    def jaccard(self, other: Circuit) -> float:
        """Edges in both over edges in either; two empty circuits are equal."""
        if self.graph != other.graph:
            raise ValueError(
                f"circuits of different graphs have no common edges: {self.graph} and {other.graph}"
            )
        union = int((self.mask | other.mask).sum())
        return int((self.mask & other.mask).sum()) / union if union else 1.0

    def with_gap(self, gap: SupportsFloat) -> Circuit:
        """The same circuit with its gap, so that a saved file tells it."""
        return replace(self, gap=float(gap))

    def check(self, model: Model) -> None:
        """Raises if this circuit was found in another model; one without fingerprint fits every
        model of its shape."""
        graph = Graph.of(model, self.graph.level)
        if self.graph != graph:
            raise ValueError(f"this circuit belongs to {self.graph}, the model is {graph}")
        if self.fingerprint is not None and self.fingerprint != model.fingerprint:
            raise ValueError(
                f"this circuit was found in {self.model} (fingerprint {self.fingerprint}), "
                f"not in {model.name} (fingerprint {model.fingerprint})"
            )

    # ---- files

    def save(self, path: str | Path) -> None:
        """Readable JSON, sealed by a hash: how it was found, then the names of its edges."""
        record = {
            "experiment": "circuit",
            "graph": self.graph.shape,
            **{name: getattr(self, name) for name in HOW},
            "n_edges": self.n_edges,
            "edges": [str(edge) for edge in self.edges],
        }
        store.write_record(Path(path), record)

    @classmethod
    def load(cls, path: str | Path, model: Model | None = None) -> Circuit:
        """A saved circuit; with `model`, only one that was found in this model."""
        record = store.read_record(Path(path))
        if record.get("experiment") != "circuit":
            raise ValueError(
                f"{path} was not written by Circuit.save; files of EAP-IG and MIB: Circuit.from_mib"
            )
        circuit = _from_record(record, path, model)
        if model is not None:
            circuit.check(model)
        return circuit

    def to_mib(
        self, path: str | Path, model: Model, scores: Float[Tensor, " n_edges"] | None = None
    ) -> None:
        """The JSON that EAP-IG's `Graph.from_json` reads; without `scores` an edge scores 1 or
        0."""
        self.check(model)
        if self.graph.level != "edge":
            raise ValueError(
                "files of EAP-IG and MIB are of heads; this circuit is of whole layers"
            )
        if scores is None:
            scores = self.mask.float()
        inside = {*self.vertices, "out"}  # there, logits are always in
        nodes = {TO_MIB.get(v, v): {"in_graph": v in inside} for v in self.graph.vertices}
        rows = zip(self.graph.edges, scores.tolist(), self.mask.tolist(), strict=True)
        edges = {
            str(_renamed(edge, TO_MIB)): {"score": score, "in_graph": kept}
            for edge, score, kept in rows
        }
        shape = {name: getattr(model, name) for name in ("n_layers", "n_heads", "d_model")}
        cfg = {**shape, "parallel_attn_mlp": self.graph.parallel}
        record = {"cfg": cfg, "nodes": nodes, "edges": edges}
        store.write_bytes(Path(path), json.dumps(record, allow_nan=False).encode())

    @classmethod
    def from_mib(
        cls,
        path: str | Path,
        model: Model | None = None,
        n_edges: int | None = None,
        method: str = "mib",
    ) -> Circuit:
        """A circuit from a file of EAP-IG or MIB: the edges marked there, or the `n_edges` of
        largest |score|."""
        record = store.read_json(Path(path))
        _check_mib(record, path, model)
        shape = {name: record["cfg"].get(name) for name in ("n_layers", "n_heads")}
        shape["parallel"] = record["cfg"].get("parallel_attn_mlp", False)
        graph = _graph(shape, len(record["edges"]), path, model)
        edges = record["edges"]
        names = [name for name, info in edges.items() if info["in_graph"]]
        if n_edges is not None:
            if type(n_edges) is not int or not 0 <= n_edges <= len(graph):
                raise ValueError(f"n_edges is from 0 to {len(graph)}, got {n_edges!r}")
            if any(info.get("score") is None for info in edges.values()):
                raise ValueError(f"{path} has edges without a score, so it names no largest ones")
            names = sorted(edges, key=lambda name: -abs(edges[name]["score"]))[:n_edges]
        elif not names:
            raise ValueError(f"{path} scores edges and selects none: give n_edges")
        mask = graph.mask(_renamed(Edge.parse(name), FROM_MIB) for name in names)
        settings = {"file": Path(path).name, "n_edges": n_edges}
        circuit = cls(graph, mask, method, settings=settings)
        if model is not None:
            circuit.check(model)
        return circuit

    def to_dot(self) -> str:
        """Graphviz text: layers from bottom to top, colours as in `plots.draw`."""
        style = '  node [shape=box, style=rounded, fontname="Helvetica"];'
        lines = ["digraph circuit {", "  rankdir=BT;", style]
        for layer in range(self.graph.n_layers):
            heads = [vertex for vertex in self.heads if vertex.startswith(f"a{layer}.")]
            if heads:
                lines.append("  {rank=same; " + " ".join(f'"{v}";' for v in heads) + "}")
        for src, dst, slot in self.edges:
            lines.append(f'  "{src}" -> "{dst}" [color="{COLOURS[slot]}", tooltip="{slot}"];')
        return "\n".join([*lines, "}", ""])


def _from_record(record: dict[str, Any], path: str | Path, model: Model | None) -> Circuit:
    """The circuit that a file tells of, if its parts fit each other."""
    try:
        names = record["edges"]
        graph = _graph(record["graph"], len(names), path, model)
        if record["gap"] is not None and not math.isfinite(record["gap"]):
            raise store.BadFile(f"{path} has a gap of {record['gap']}")
        how = {name: record[name] for name in HOW if name in record}
        circuit = Circuit(graph, graph.mask(names), **{"method": "manual"} | how)
        if circuit.n_edges != record["n_edges"] or len(set(names)) != record["n_edges"]:
            raise store.BadFile(
                f"{path} says {record['n_edges']} edges, but names {len(names)}, of which "
                f"{circuit.n_edges} do not dangle"
            )
    except (KeyError, TypeError, AttributeError) as error:
        raise store.BadFile(f"{path} lacks what a circuit has ({error})") from error
    return circuit


def _graph(shape: dict[str, Any], n_named: int, path: str | Path, model: Model | None) -> Graph:
    """The graph that a file names, refused before anything of its size is made if it is not the
    model's, or is no model's at all."""
    sizes = [shape["n_layers"], shape["n_heads"]]
    if not all(type(n) is int and 0 < n <= LARGEST for n in sizes):
        raise store.BadFile(f"{path} is of {shape}, which is no model's graph")
    try:
        graph = Graph(**shape)
    except (TypeError, ValueError) as error:
        raise store.BadFile(f"{path} is of {shape}, which is no model's graph") from error
    if model is not None and graph != Graph.of(model, graph.level):
        raise ValueError(f"{path} belongs to {graph}, the model is {Graph.of(model, graph.level)}")
    if n_named > len(graph):
        raise store.BadFile(f"{path} names {n_named} edges, {graph} has {len(graph)}")
    return graph


def _check_mib(record: Any, path: str | Path, model: Model | None) -> None:
    """Refuses what is not a circuit of EAP-IG or MIB, or not one of ours."""
    if not isinstance(record, dict) or not {"cfg", "nodes", "edges"} <= set(record):
        raise ValueError(f"{path} is not a circuit of EAP-IG or MIB: it needs cfg, nodes and edges")
    parts = [record[name] for name in ("cfg", "nodes", "edges")]
    if all(isinstance(part, dict) for part in parts):
        parts = record["edges"].values()
    if not all(isinstance(part, dict) for part in parts):
        raise ValueError(f"{path} is not a circuit of EAP-IG or MIB: its parts are no objects")
    for node in record["nodes"].values():
        if isinstance(node, dict) and not all(node.get("neurons", [])):
            raise ValueError(
                f"{path} selects single neurons; here a circuit is made of whole edges"
            )
    for name, info in record["edges"].items():
        if not isinstance(info.get("in_graph"), bool):
            raise ValueError(
                f"{path}: in_graph of {name} is true or false, not {info.get('in_graph')!r}"
            )
        score = info.get("score")
        if score is not None and (type(score) not in (int, float) or not math.isfinite(score)):
            raise ValueError(f"{path}: the score of {name} is {score!r}, not a finite number")
    if model is not None and record["cfg"].get("d_model", model.d_model) != model.d_model:
        width = record["cfg"]["d_model"]
        raise ValueError(f"{path} is of a model of width {width}, this one has {model.d_model}")


def _renamed(edge: Edge, names: dict[str, str]) -> Edge:
    return Edge(names.get(edge.src, edge.src), names.get(edge.dst, edge.dst), edge.slot)


def manual_circuit(task_name: str, graph: Graph) -> Circuit | None:
    """The circuit that people found by hand for a task in a model of this shape, or None where none
    is known."""
    for path in sorted((store.data_folder() / "circuits").glob("*.json")):
        record = json.loads(path.read_text())
        if record["task"] == task_name and Graph(**record["graph"]) == graph:
            return Circuit(graph, graph.mask(record["edges"]), "manual")
    return None
