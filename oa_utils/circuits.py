"""Circuits: sets of edges with how they were found, their files, the two manual ones, and their picture."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from oa_utils.graph import SLOTS, Edge, Graph
from oa_utils.runs import plain, unplain, write_bytes

FORMAT = "optimal-ablation circuit 1"
FOUND = ("method", "ablation", "settings", "seed", "gap", "model", "fingerprint", "history")
TO_MIB = {"embed": "input", "out": "logits"}  # EAP-IG and MIB use these names; all others are ours
FROM_MIB = {theirs: ours for ours, theirs in TO_MIB.items()}
COLOURS = {"q": "#07438a", "k": "#ee5c20", "v": "#008559", "": "#6f6f6f"}  # blue, red, green of plots.py


@dataclass(frozen=True, eq=False, repr=False)
class Circuit:
    """A set of edges and how it was found. Dangling edges are dropped here, so every size is a size without them."""

    graph: Graph
    mask: Bool[Tensor, " n_edges"]  # any 0/1 tensor [n_edges] or [1, n_edges] is taken
    method: str  # ugs, acdc, ..., manual
    ablation: str | None = None
    settings: dict = field(default_factory=dict)
    seed: int | None = None
    history: dict = field(default_factory=dict)  # a few numbers for each reported step
    gap: float | None = None  # nats, under `ablation`
    model: str | None = None  # name; with the fingerprint it says whose circuit this is
    fingerprint: str | None = None

    def __post_init__(self):
        mask = self.mask.detach().cpu()
        if mask.numel() != len(self.graph):
            raise ValueError(f"a circuit of {self.graph} takes one mask of {len(self.graph)}, got {list(mask.shape)}")
        if not ((mask == 0) | (mask == 1)).all():
            raise ValueError("the mask of a circuit is 0 or 1; put a threshold on it first, for example mask > 0.5")
        object.__setattr__(self, "mask", self.graph.prune_dangling(mask.reshape(-1).bool()))

    def __repr__(self) -> str:
        how = self.method + (f" under {self.ablation}" if self.ablation else "")
        return f"Circuit({how}: {self.n_edges} of {len(self.graph)} edges, {len(self.heads)} heads)"

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
        return [v for v in self.vertices if self.graph.is_head(v)]

    def jaccard(self, other: Circuit) -> float:
        """Edges in both over edges in either; two empty circuits are equal."""
        if self.graph != other.graph:
            raise ValueError(f"circuits of different graphs have no common edges: {self.graph} and {other.graph}")
        union = int((self.mask | other.mask).sum())
        return int((self.mask & other.mask).sum()) / union if union else 1.0

    def check(self, model) -> None:
        """Raises if this circuit was found in another model; one without fingerprint fits every model of its shape."""
        if self.graph != Graph.of(model):
            raise ValueError(f"this circuit belongs to {self.graph}, the model is {Graph.of(model)}")
        if self.fingerprint is not None and self.fingerprint != model.fingerprint:
            raise ValueError(
                f"this circuit was found in {self.model} (fingerprint {self.fingerprint}), "
                f"not in {model.name} (fingerprint {model.fingerprint})"
            )

    # ---- files

    def save(self, path: str | Path) -> None:
        """Readable JSON: how it was found, then the names of its edges."""
        shape = {"n_layers": self.graph.n_layers, "n_heads": self.graph.n_heads}
        found = {name: getattr(self, name) for name in FOUND}
        edges = [str(edge) for edge in self.edges]
        record = {"format": FORMAT, "graph": shape, **found, "n_edges": len(edges), "edges": edges}
        write_bytes(Path(path), json.dumps(plain(record), indent=1).encode())

    @classmethod
    def load(cls, path: str | Path, model=None) -> Circuit:
        """A saved circuit; with `model`, only one that was found in this model."""
        data = unplain(json.loads(Path(path).read_bytes()))
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ValueError(f"{path} was not written by Circuit.save; files of EAP-IG and MIB: Circuit.from_mib")
        graph = Graph(**data["graph"])
        circuit = cls(graph, graph.mask(map(Edge.parse, data["edges"])), **{name: data[name] for name in FOUND})
        if model is not None:
            circuit.check(model)
        return circuit

    def to_mib(self, path: str | Path, model, scores: Tensor | None = None) -> None:
        """The JSON that EAP-IG's `Graph.from_json` reads; without `scores` `[n_edges]` an edge scores 1 or 0."""
        self.check(model)
        scores = self.mask.float() if scores is None else scores.detach().reshape(len(self.graph))
        cfg = {name: getattr(model, name) for name in ("n_layers", "n_heads", "d_model")}
        inside = {*self.vertices, "out"}  # there, logits are always in
        rows = zip(self.graph.edges, scores.tolist(), self.mask.tolist(), strict=True)
        record = {
            "cfg": {**cfg, "parallel_attn_mlp": False},
            "nodes": {TO_MIB.get(v, v): {"in_graph": v in inside} for v in self.graph.vertices},
            "edges": {str(_renamed(edge, TO_MIB)): {"score": score, "in_graph": kept} for edge, score, kept in rows},
        }
        write_bytes(Path(path), json.dumps(record).encode())

    @classmethod
    def from_mib(cls, path: str | Path, model=None, n_edges: int | None = None, method: str = "mib") -> Circuit:
        """A circuit from a file of EAP-IG or MIB: the edges marked there, or the `n_edges` of largest |score|."""
        data = json.loads(Path(path).read_bytes())
        if not isinstance(data, dict) or not {"cfg", "nodes", "edges"} <= set(data):
            raise ValueError(f"{path} is not a circuit of EAP-IG or MIB: it needs cfg, nodes and edges")
        cfg = data["cfg"]
        if cfg.get("parallel_attn_mlp"):
            raise ValueError(f"{path}: attention and MLP in parallel give another graph than ours")
        if not all(all(node.get("neurons", [])) for node in data["nodes"].values() if isinstance(node, dict)):
            raise ValueError(f"{path} selects single neurons; here a circuit is made of whole edges")
        if model is not None and cfg.get("d_model", model.d_model) != model.d_model:
            raise ValueError(f"{path} is of a model of width {cfg['d_model']}, this one has {model.d_model}")
        names = [name for name, info in data["edges"].items() if info["in_graph"]]
        if n_edges is not None:
            names = sorted(data["edges"], key=lambda name: -abs(data["edges"][name]["score"]))[:n_edges]
        elif not names:
            raise ValueError(f"{path} scores edges and selects none: give n_edges")
        graph = Graph(cfg["n_layers"], cfg["n_heads"])
        mask = graph.mask(_renamed(Edge.parse(name), FROM_MIB) for name in names)
        circuit = cls(graph, mask, method, settings={"file": Path(path).name, "n_edges": n_edges})
        if model is not None:
            circuit.check(model)
        return circuit

    def to_dot(self) -> str:
        """Graphviz text: layers from bottom to top, colours as in `draw`."""
        lines = ["digraph circuit {", "  rankdir=BT;", '  node [shape=box, style=rounded, fontname="Helvetica"];']
        for layer in range(self.graph.n_layers):
            if heads := [v for v in self.heads if v.startswith(f"a{layer}.")]:
                lines.append("  {rank=same; " + " ".join(f'"{v}";' for v in heads) + "}")
        lines += [f'  "{src}" -> "{dst}" [color="{COLOURS[s]}", tooltip="{s}"];' for src, dst, s in self.edges]
        return "\n".join([*lines, "}", ""])


def _renamed(edge: Edge, names: dict[str, str]) -> Edge:
    return Edge(names.get(edge.src, edge.src), names.get(edge.dst, edge.dst), edge.slot)


# ---- circuits found by hand in GPT-2-small


def manual_ioi(graph: Graph) -> Circuit:
    """Indirect object identification (Wang et al. 2022): 963 edges, with the MLPs around its 26 heads."""
    _gpt2_small(graph, "IOI")
    previous, duplicate = ["a2.h2", "a4.h11"], ["a0.h1", "a0.h10", "a3.h0"]
    induction, inhibition = ["a5.h5", "a5.h8", "a5.h9", "a6.h9"], ["a7.h3", "a7.h9", "a8.h6", "a8.h10"]
    movers = ["a9.h9", "a10.h0", "a9.h6"] + ["a10.h7", "a11.h10"]  # name movers, negative name movers
    movers += ["a10.h10", "a10.h6", "a10.h2", "a10.h1", "a11.h2", "a9.h7", "a9.h0", "a11.h9"]  # backups
    heads, mlps = previous + duplicate + induction + inhibition + movers, [f"m{i}" for i in range(12)]
    edges = _wires(graph, mlps, heads, "qkv") + _wires(graph, ["embed"], previous + duplicate, "qkv")
    edges += _wires(graph, ["embed"], inhibition, "q") + _wires(graph, ["embed"], movers, "kv")
    edges += _wires(graph, previous, induction, "kv") + _wires(graph, induction + duplicate, inhibition, "kv")
    edges += _wires(graph, inhibition, movers, "q") + _wires(graph, ["embed", *heads, *mlps], mlps)
    return Circuit(graph, graph.mask(edges + _wires(graph, ["embed", *movers, *mlps], ["out"])), "manual")


def manual_greater_than(graph: Graph) -> Circuit:
    """Greater-Than (Hanna et al. 2023): 235 edges."""
    _gpt2_small(graph, "Greater-Than")
    first, middle = ["a0.h1", "a0.h3", "a0.h5"], ["a5.h5", "a6.h1", "a6.h9", "a7.h10", "a8.h11", "a9.h1"]
    mlps = [f"m{i}" for i in range(12)]
    early, late = mlps[:4], mlps[8:]
    edges = _wires(graph, ["embed"], first, "qkv") + _wires(graph, ["embed", "a0.h1"], early)
    edges += _wires(graph, first + early, middle, "qkv") + _wires(graph, mlps, middle, "q")
    edges += _wires(graph, mlps[:9], mlps[:9]) + _wires(graph, middle + late, late)
    return Circuit(graph, graph.mask(edges + _wires(graph, middle + late, ["out"])), "manual")


def _gpt2_small(graph: Graph, task: str) -> None:
    if graph != Graph(12, 12):
        raise ValueError(f"the manual {task} circuit is one of GPT-2-small, Graph(12, 12), not of {graph}")


def _wires(graph: Graph, sources: list[str], targets: list[str], slots: str = "") -> list[Edge]:
    """Every edge from one of these to one of those that the graph has."""
    pairs = [Edge(src, dst, slot) for src in sources for dst in targets for slot in slots or [""]]
    return [edge for edge in pairs if edge in graph.edges]


# ---- picture


def draw(circuit: Circuit, ax=None, max_edges: int = 500):
    """Layer by head, MLPs in a column at the right; all edges go up, and q, k, v enter a head from left to right.

    Of a larger circuit `max_edges` are drawn, those that touch no MLP first, and a note says so.
    """
    import matplotlib.pyplot as plt
    from matplotlib.collections import LineCollection

    n_layers, n_heads = circuit.graph.n_layers, circuit.graph.n_heads
    if ax is None:
        _, ax = plt.subplots(figsize=(0.5 * n_heads + 2, 0.5 * n_layers + 1.5), layout="constrained")
    place = {"embed": ((n_heads - 1) / 2, -1.2), "out": ((n_heads - 1) / 2, n_layers + 0.5)}
    place |= {f"a{i}.h{j}": (j, i) for i in range(n_layers) for j in range(n_heads)}
    place |= {f"m{i}": (n_heads + 0.4, i + 0.45) for i in range(n_layers)}
    edges = sorted(circuit.edges, key=lambda e: ((e.src[0] == "m") + (e.dst[0] == "m"), e.dst != "out"))[:max_edges]
    n = max(len(edges), 1)
    width, alpha = np.clip(5 * n**-0.36, 0.5, 1.8), np.clip(2.6 * n**-0.29, 0.3, 0.9)
    for slot in ("", *SLOTS):
        curves = [_curve(place[src], place[dst], slot) for src, dst, s in edges if s == slot]
        ax.add_collection(LineCollection(curves, colors=COLOURS[slot], lw=width, alpha=alpha, zorder=1))
        ax.plot([], [], color=COLOURS[slot], label=slot or "into MLP or out")
    grid = np.array([xy for v, xy in place.items() if v[0] in "am"])
    ax.scatter(*grid.T, s=4, color="0.85", zorder=0)
    box = {"boxstyle": "round,pad=0.18", "fc": "white", "ec": "0.3", "lw": 0.6}
    for v in circuit.vertices:
        ax.text(*place[v], v, ha="center", va="center", fontsize=7, bbox=box, zorder=2)
    ax.set(xlim=(-0.8, n_heads + 1.4), ylim=(-1.6, n_layers + 1), xlabel="head", ylabel="layer", yticks=range(n_layers))
    ax.set_xticks([*range(n_heads), n_heads + 0.4], [*map(str, range(n_heads)), "MLP"])
    ax.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=4, fontsize=7, frameon=False)
    if circuit.n_edges > len(edges):
        ax.set_title(f"{len(edges)} of {circuit.n_edges} edges drawn", loc="left", fontsize=8)
    ax.grid(False)
    return ax


def _curve(start, end, slot: str, points: int = 40) -> np.ndarray:
    """A line that leaves upward and arrives from below; in one column it bows out to pass the vertices between."""
    (x0, y0), (x3, y3) = start, end
    bow = min(0.25 + 0.12 * (y3 - y0), 1.1) if x0 == x3 and y3 - y0 > 1 else 0.0
    port = {"q": -0.22, "v": 0.22}.get(slot, 0.0)
    x0, x3 = x0 + port / 2, x3 + port
    y0, y3 = y0 + 0.15, y3 - 0.15
    reach = 0.4 * (y3 - y0)
    control = np.array([(x0, y0), (x0 + bow, y0 + reach), (x3 + bow, y3 - reach), (x3, y3)])
    t = np.linspace(0, 1, points)[:, None]
    return np.hstack([(1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t**2 * (1 - t), t**3]) @ control
