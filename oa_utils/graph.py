"""The residual-rewrite graph: every earlier vertex writes into every later one, heads read three
times (q, k, v).

There is one flat order of edges. Writers: `embed`, then layer by layer the heads and the MLP.
Readers: layer by layer the heads' q, the heads' k, the heads' v, the MLP; last `out`. The in-edges
of a reader are one slice, one for each writer; all attention readers of a layer have the same
writers, so they are one block `[3, n_heads, writers]`. Everything is index arithmetic: strings are
made only for those who ask.

In a graph of level "layer" whole attention layers (`a3`) stand in the heads' place and read once;
where attention and MLP are `parallel`, an MLP has no edge from its own layer's attention.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

SLOTS = ("q", "k", "v")
LEVELS = ("edge", "layer")  # of graphs: edges between heads and MLPs, or between whole layers


class Edge(NamedTuple):
    """What `src` writes into one input of `dst`; `slot` is q, k or v when `dst` is a head, else
    empty."""

    src: str
    dst: str
    slot: str = ""

    def __str__(self) -> str:
        return f"{self.src}->{self.dst}<{self.slot}>" if self.slot else f"{self.src}->{self.dst}"

    @classmethod
    def parse(cls, name: str) -> Edge:
        """The edge called `a0.h1->a3.h2<q>` or `m3->out`."""
        src, arrow, dst = name.partition("->")
        dst, bracket, slot = dst.partition("<")
        if not (src and arrow and dst) or (bracket and not slot.endswith(">")):
            raise ValueError(
                f"{name!r} is not the name of an edge; names look like 'a0.h1->a3.h2<q>' or "
                "'m3->out'"
            )
        return cls(src, dst, slot.removesuffix(">"))


class Blocks(NamedTuple):
    """Views of a mask, reader by writer: what the masked model multiplies with."""

    attn: list[Tensor]  # for each layer [..., 3 (q k v), n_heads, writers before the layer]
    mlp: list[Tensor]  # for each layer [..., writers before the MLP, with those of attention]
    out: Tensor  # [..., all writers]


class _Edges(Sequence):
    """The edges of a graph as a sequence that makes each one when it is asked for."""

    def __init__(self, graph: Graph):
        self._graph = graph

    def __len__(self) -> int:
        return self._graph.n_edges

    def __getitem__(self, i):
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        if not -len(self) <= i < len(self):
            raise IndexError(f"edge {i} of a graph of {len(self)} edges")
        return self._graph._edge(i % len(self))

    def __iter__(self) -> Iterator[Edge]:
        vertices = self._graph.vertices
        for (dst, slot), span in self._graph.reader_slices.items():
            yield from (Edge(src, dst, slot) for src in vertices[: span.stop - span.start])

    def __repr__(self) -> str:
        return f"<{len(self)} edges of {self._graph}>"


@dataclass(frozen=True)
class Graph:
    """The edges of a transformer of `n_layers` blocks, each of `n_heads` heads and one MLP."""

    n_layers: int
    n_heads: int
    parallel: bool = False  # attention and MLP of a layer read the same stream
    level: str = "edge"  # `layer`: whole attention layers are vertices, not heads

    def __post_init__(self):
        if self.level not in LEVELS or type(self.parallel) is not bool:
            raise ValueError(
                f"a graph's level is one of {', '.join(LEVELS)} and parallel is true or false, "
                f"got {self.level!r} and {self.parallel!r}"
            )
        for n in (self.n_layers, self.n_heads):
            if type(n) is not int or n < 1:
                raise ValueError(
                    f"a graph needs at least one layer and one head, got {self.n_layers} and "
                    f"{self.n_heads}"
                )

    @classmethod
    def of(cls, model, level: str = "edge") -> Graph:
        return cls(model.n_layers, model.n_heads, model.parallel, level)

    @property
    def shape(self) -> dict[str, int | bool | str]:
        """What makes the graph again: a plain one is two numbers, as in files from before there
        were others."""
        numbers = {"n_layers": self.n_layers, "n_heads": self.n_heads}
        if self.parallel:
            numbers["parallel"] = True
        if self.level != "edge":
            numbers["level"] = self.level
        return numbers

    def __repr__(self) -> str:
        return f"Graph({', '.join(f'{name}={value!r}' for name, value in self.shape.items())})"

    def __reduce__(self):  # caches stay at home: a worker gets the shape, not millions of indices
        return Graph, (self.n_layers, self.n_heads, self.parallel, self.level)

    # ---- sizes

    @property
    def slots(self) -> tuple[str, ...]:
        """How often a vertex of attention reads: a head three times, a whole layer once."""
        return SLOTS if self.level == "edge" else ("",)

    @property
    def attention_writers(self) -> int:
        """Vertices of attention in a layer: its heads, or one."""
        return self.n_heads if self.level == "edge" else 1

    def writers_before(self, layer: int) -> int:
        """How many vertices write before `layer` reads, so also the index of its first head; at
        `n_layers`: all."""
        return 1 + layer * (self.attention_writers + 1)

    def mlp_writers(self, layer: int) -> int:
        """How many vertices write before the MLP of a layer reads."""
        return self.writers_before(layer) + (0 if self.parallel else self.attention_writers)

    def layer_of(self, vertex: int) -> int:
        """The layer of a head, attention layer or MLP by its index."""
        return (vertex - 1) // (self.attention_writers + 1)

    @cached_property
    def _sizes(self) -> list[int]:
        """Edges in each block: attention and MLP of each layer, then out."""
        readers = len(self.slots) * self.attention_writers
        sizes = []
        for layer in range(self.n_layers):
            sizes += [readers * self.writers_before(layer), self.mlp_writers(layer)]
        return [*sizes, self.writers_before(self.n_layers)]

    @cached_property
    def n_edges(self) -> int:
        return sum(self._sizes)

    def __len__(self) -> int:
        return self.n_edges

    @property
    def n_vertices(self) -> int:
        return self.writers_before(self.n_layers) + 1

    # ---- vertices

    @cached_property
    def vertices(self) -> tuple[str, ...]:
        """`embed`, layer by layer the heads and the MLP, `out`: all but the last are the writers,
        in their order."""
        names = ["embed"]
        for layer in range(self.n_layers):
            names += [*self.attention_vertices(layer), f"m{layer}"]
        return (*names, "out")

    def attention_vertices(self, layer: int) -> list[str]:
        if self.level == "layer":
            return [f"a{layer}"]
        return [f"a{layer}.h{head}" for head in range(self.n_heads)]

    @cached_property
    def _vertex_index(self) -> dict[str, int]:
        return {v: i for i, v in enumerate(self.vertices)}

    def vertex_index(self, vertex: str) -> int:
        if vertex not in self._vertex_index:
            first = self.attention_vertices(0)[0]
            last = self.attention_vertices(self.n_layers - 1)[-1]
            raise ValueError(
                f"no vertex {vertex!r} here; vertices are embed, {first} to {last}, "
                f"m0 to m{self.n_layers - 1}, out"
            )
        return self._vertex_index[vertex]

    def is_head(self, vertex: str) -> bool:
        i = self.vertex_index(vertex)
        is_attention = 0 < i < self.n_vertices - 1 and i % (self.attention_writers + 1) != 0
        return is_attention and self.level == "edge"

    # ---- edges

    @cached_property
    def edges(self) -> Sequence[Edge]:
        return _Edges(self)

    @cached_property
    def reader_slices(self) -> dict[tuple[str, str], slice]:
        """Where the in-edges of each reader `(vertex, slot)` are; the keys are all readers in their
        order."""
        slices = {}
        at = 0
        for layer in range(self.n_layers):
            w = self.writers_before(layer)
            attention = self.attention_vertices(layer)
            sizes = {(vertex, slot): w for slot in self.slots for vertex in attention}
            sizes[f"m{layer}", ""] = self.mlp_writers(layer)
            for reader, n in sizes.items():
                slices[reader] = slice(at, at + n)
                at += n
        return slices | {("out", ""): slice(at, self.n_edges)}

    def index(self, edge: Edge | str) -> int:
        """Where an edge stands in `graph.edges`; says what is wrong with one that does not
        exist."""
        if isinstance(edge, str):
            edge = Edge.parse(edge)
        src, dst, slot = Edge(*edge)
        i = self.vertex_index(src)
        j = self.vertex_index(dst)
        if (dst, slot) not in self.reader_slices:
            if j == 0:
                raise ValueError(f"no edge {src} -> {dst}: nothing is read by embed")
            need = (
                "slot 'q', 'k' or 'v', because a head reads three times"
                if self.is_head(dst)
                else "no slot"
            )
            raise ValueError(f"an edge into {dst} has {need}; got slot {slot!r}")
        span = self.reader_slices[dst, slot]
        if i >= span.stop - span.start:
            beside = self.parallel and self.layer_of(i) == self.layer_of(j) and i < j
            why = " (attention and MLP of a layer are parallel)" if beside else ""
            raise ValueError(
                f"no edge {src} -> {dst}: {dst} has read its input before {src} writes{why}"
            )
        return span.start + i

    @cached_property
    def _readers(self) -> tuple[list[int], list[tuple[str, str]]]:
        """Where the in-edges of each reader begin, and the readers."""
        return [span.start for span in self.reader_slices.values()], list(self.reader_slices)

    def _edge(self, i: int) -> Edge:
        starts, readers = self._readers
        reader = bisect_right(starts, i) - 1
        return Edge(self.vertices[i - starts[reader]], *readers[reader])

    def mask(self, edges: Iterable[Edge | str]) -> Bool[Tensor, " n_edges"]:
        """True at these edges, which may be given by their names."""
        mask = torch.zeros(self.n_edges, dtype=torch.bool)
        mask[[self.index(edge) for edge in edges]] = True
        return mask

    def edges_of(self, mask: Tensor) -> list[Edge]:
        """The edges whose mask is above zero, in order; one mask, `[n_edges]` or `[1, n_edges]`."""
        self._check_mask(mask)
        if mask.numel() != self.n_edges:
            raise ValueError(f"edges_of takes one mask, got a batch of shape {list(mask.shape)}")
        return [self._edge(i) for i in (mask.reshape(-1) > 0).nonzero()[:, 0].tolist()]

    # ---- tensors for engines and searches

    @cached_property
    def src(self) -> Int[Tensor, " n_edges"]:
        """Vertex index of the writer of every edge."""
        return torch.cat([torch.arange(s.stop - s.start) for s in self.reader_slices.values()])

    @cached_property
    def dst(self) -> Int[Tensor, " n_edges"]:
        """Vertex index of the reader of every edge; q, k and v of a head are one vertex."""
        sizes = torch.tensor([s.stop - s.start for s in self.reader_slices.values()])
        readers = torch.tensor([self.vertex_index(vertex) for vertex, _ in self.reader_slices])
        return readers.repeat_interleave(sizes)

    @cached_property
    def degree(self) -> Int[Tensor, " n_vertices"]:
        """Edges that touch each vertex, in or out."""
        return torch.bincount(self.src, minlength=self.n_vertices) + torch.bincount(
            self.dst, minlength=self.n_vertices
        )

    def blocks(self, mask: Tensor) -> Blocks:
        """Views of `mask` `[..., n_edges]`, no copy; one split, so that its backward is one
        concatenation."""
        self._check_mask(mask)
        *layers, out = mask.split(self._sizes, dim=-1)
        readers = (len(self.slots), self.attention_writers)
        attn = [
            b.unflatten(-1, (*readers, self.writers_before(i))) for i, b in enumerate(layers[::2])
        ]
        return Blocks(attn, list(layers[1::2]), out)

    def prune_dangling(self, mask: Tensor) -> Tensor:
        """`mask` with 0 on each edge that is on no path embed -> out of edges above zero; the
        others keep their values.

        Each mask of a batch `[..., n_edges]` is pruned by itself; a head is reached by any of its
        q, k, v. The filter carries no gradient, so the gradient of what is kept passes and that of
        what is dropped is zero.
        """
        self._check_mask(mask)
        keep = self._on_path(mask.detach().reshape(-1, self.n_edges)).reshape(mask.shape)
        return mask * keep.to(mask.dtype)

    @torch.no_grad()
    def _on_path(self, mask: Tensor) -> Tensor:
        """0/1 for each edge: a sweep from out finds what leads there, then one from embed what is
        reached."""
        keep = (mask > 0).float()
        attn, mlp, out = self.blocks(keep)
        # [batch, writers]: edges from each writer into vertices that lead to out
        onward = out.clone()
        for layer in reversed(range(self.n_layers)):
            w = self.writers_before(layer)
            m = w + self.attention_writers  # the index of the layer's MLP
            onward[:, : self.mlp_writers(layer)] += mlp[layer] * (onward[:, m : m + 1] > 0)
            # [batch, 1, slot h]
            heads = (onward[:, w:m] > 0).float().repeat(1, len(self.slots))[:, None]
            onward[:, :w] += (heads @ attn[layer].flatten(1, 2))[:, 0]
        # leads to out; below, layer by layer, also: is reached from embed
        live = (onward > 0).float()
        for layer in range(self.n_layers):
            w = self.writers_before(layer)
            m = w + self.attention_writers
            n = self.mlp_writers(layer)
            arrive = attn[layer].flatten(1, 2) @ live[:, :w, None]  # [batch, slot h, 1]
            live[:, w:m] *= arrive.unflatten(1, (len(self.slots), -1)).sum((1, 3)) > 0
            attn[layer].mul_(live[:, None, w:m, None] * live[:, None, None, :w])
            live[:, m] *= (mlp[layer] * live[:, :n]).sum(-1) > 0
            mlp[layer].mul_(live[:, :n] * live[:, m : m + 1])
        out.mul_(live)
        return keep

    def _check_mask(self, mask: Tensor) -> None:
        if mask.ndim == 0 or mask.shape[-1] != self.n_edges:
            raise ValueError(
                f"a mask of {self} ends in {self.n_edges} edges, got shape {list(mask.shape)}"
            )
