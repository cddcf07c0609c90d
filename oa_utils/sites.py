"""Components by name, where their values sit in a block, and the stream with one of them replaced.

A component's value is read raw, nothing folded: a head's z stands before W_O with its value bias in
it, a neuron is the MLP's hidden unit after the activation, `tok` is the token embedding without
positions. Replacing a value changes the stream by (fill − value) · write, or, where a norm stands
between, to what is written of the value with the fill in it. Position 0 (BOS) is the same for every
prompt and is never replaced; neither is b_O, but for whole attention layers whose value is what
they write.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from oa_utils import machine, store
from oa_utils.machine import Value
from oa_utils.models import Model

NAMES = {"head": "a{}.h{}", "mlp": "m{}", "attn": "a{}", "neuron": "m{}.n{}", "tok": "tok"}
STAGES = {
    "tok": "before",
    "embed": "before",
    "z": "between",
    "attn": "between",
    "hidden": "behind",
    "mlp": "behind",
}
KEPT_COPIES = 4  # a clean stream is kept where so many of it would fit into memory


@dataclass(frozen=True, eq=False)
class Subspace:
    """A component's projection onto the span of `basis`; what is orthogonal to it stays."""

    component: str
    basis: Float[Tensor, "k dim"]


@dataclass(frozen=True, eq=False)
class Site:
    """Where a component's value is: a slice of what block `layer` computes, heads laid side by
    side."""

    name: str
    kind: str  # head, mlp, attn, neuron, tok, embed, subspace
    value: str  # tok, embed, z, attn, hidden or mlp: the field of BlockValues
    layer: int
    part: slice
    basis: Float[Tensor, "dim k"] | None = None  # orthonormal columns
    parallel: bool = False  # the layer's MLP does not read what its attention writes

    @property
    def dim(self) -> int:
        return self.part.stop - self.part.start

    @property
    def stage(self) -> str:
        """The stream that a change of the value is added to: before, between or behind attention
        and MLP."""
        stage = STAGES[self.value]
        return "behind" if self.parallel and stage == "between" else stage


def find(component: str | Subspace, model: Model) -> Site:
    """The site of a component, or an error that says what there is."""
    if isinstance(component, Subspace):
        return _subspace(component, find(component.component, model))
    name = str(component)
    shape = r"tok|embed|a(0|[1-9]\d*)(\.h(0|[1-9]\d*))?|m(0|[1-9]\d*)(\.n(0|[1-9]\d*))?"
    numbers = [int(number) for number in re.findall(r"\d+", name)]
    layer = numbers[0] if numbers else 0
    unit = numbers[1] if len(numbers) > 1 else 0
    units = model.n_heads if name.startswith("a") else model.d_mlp
    if not re.fullmatch(shape, name) or layer >= model.n_layers or unit >= units:
        layers, heads = model.n_layers - 1, model.n_heads - 1
        raise ValueError(
            f"there is no component {component!r}: '{model.name}' has heads a0.h0 … "
            f"a{layers}.h{heads}, attention layers a0 … a{layers}, MLPs m0 … m{layers}, neurons "
            f"like m0.n{model.d_mlp - 1}, tok and embed"
        )
    if ".h" in name:
        head = slice(unit * model.d_head, (unit + 1) * model.d_head)
        return Site(name, "head", "z", layer, head, parallel=model.parallel)
    if ".n" in name:
        return Site(name, "neuron", "hidden", layer, slice(unit, unit + 1))
    if name.startswith("a"):
        return attention_site(layer, model, written=not model.adds_up)
    if name.startswith("m"):
        return Site(name, "mlp", "mlp", layer, slice(0, model.d_model))
    return Site(name, name, name, 0, slice(0, model.d_model))


def attention_site(layer: int, model: Model, written: bool) -> Site:
    """A whole attention layer: all its heads' z, or what it writes, which is no sum of theirs where
    a norm follows."""
    value = "attn" if written else "z"
    width = model.d_model if written else model.n_heads * model.d_head
    return Site(f"a{layer}", "attn", value, layer, slice(0, width), parallel=model.parallel)


def _subspace(subspace: Subspace, site: Site) -> Site:
    basis = torch.as_tensor(subspace.basis).detach().to("cpu", torch.float32)
    if basis.ndim != 2 or not 1 <= len(basis) <= basis.shape[1] == site.dim:
        raise ValueError(
            f"a basis of a subspace of {site.name} has shape [k, {site.dim}], "
            f"not {list(basis.shape)}"
        )
    q, r = torch.linalg.qr(basis.T)  # [dim k]
    if not r.diagonal().abs().min() > 1e-5 * basis.norm(dim=1).max():
        raise ValueError(
            f"the basis of a subspace of {site.name} is not linearly independent (or not finite)"
        )
    name = f"{site.name}:{len(basis)}d-{store.fingerprint(basis)[:8]}"
    return replace(site, name=name, kind="subspace", basis=q)


def all_components(model: Model, kinds: Sequence[str] = ("head", "mlp")) -> list[str]:
    """Names of every component of these kinds: kind by kind in the order given, layer by layer."""
    if unknown := [kind for kind in kinds if kind not in NAMES]:
        raise ValueError(f"unknown kind {', '.join(unknown)}; there are {', '.join(NAMES)}")
    units = {"head": model.n_heads, "neuron": model.d_mlp}
    names = [
        NAMES[kind].format(layer, unit)
        for kind in kinds
        for layer in range(model.n_layers)
        for unit in range(units.get(kind, 1))
    ]
    return list(dict.fromkeys(names))  # tok once


class BlockValues:
    """What one block computes on a clean stream, each value [batch pos width] when it is first
    asked for."""

    def __init__(
        self,
        model: Model,
        layer: int,
        tokens: Int[Tensor, "batch pos"],
        before: Float[Tensor, "batch pos d"],
    ):
        self.model = model
        self.layer = layer
        self.block = model.layers[layer]
        self.tokens = tokens
        self.before = before  # the stream that enters the block

    @cached_property
    def tok(self) -> Float[Tensor, "batch pos d"]:
        return self.model.embed_tokens(self.tokens)

    @property
    def embed(self) -> Float[Tensor, "batch pos d"]:
        return self.before

    @cached_property
    def z(self) -> Float[Tensor, "batch pos heads"]:
        z = self.model.attention(self.layer, self.before)
        return rearrange(z, "b pos head e -> b pos (head e)")

    def attention_of(self, z: Float[Tensor, "batch pos heads"]) -> Float[Tensor, "batch pos d"]:
        """What attention writes, of the heads' z."""
        heads = rearrange(z, "b pos (head e) -> b pos head e", e=self.model.d_head)
        return self.block.attn_out(heads)

    @cached_property
    def attn(self) -> Float[Tensor, "batch pos d"]:
        return self.attention_of(self.z)

    @cached_property
    def between(self) -> Float[Tensor, "batch pos d"]:
        return self.before + self.attn

    @property
    def read_by_mlp(self) -> Float[Tensor, "batch pos d"]:
        if self.block.parallel:
            return self.before
        return self.between

    @cached_property
    def hidden(self) -> Float[Tensor, "batch pos d_mlp"]:
        return self.block.mlp_hidden(self.block.ln2(self.read_by_mlp))

    @cached_property
    def mlp(self) -> Float[Tensor, "batch pos d"]:
        return self.block.mlp_written(self.hidden)

    @cached_property
    def behind(self) -> Float[Tensor, "batch pos d"]:
        return self.between + self.mlp

    def value(self, site: Site) -> Float[Tensor, "batch pos dim"]:
        return getattr(self, site.value)[..., site.part]

    def write(self, site: Site) -> Float[Tensor, "dim d"] | None:
        """How a change of the value enters the stream; None where it is added as it is."""
        if site.value == "z":
            return rearrange(self.block.W_O, "head e d -> (head e) d")[site.part]
        if site.value == "hidden":
            off = self.before.new_zeros(1, self.model.d_mlp)
            on = off.clone()
            on[:, site.part] = 1
            return self.block.mlp_out(on) - self.block.mlp_out(off)
        return None

    def replaced(
        self, site: Site, fill: Float[Tensor, "#batch pos dim"]
    ) -> Float[Tensor, "batch pos d"]:
        """The stream at the site's stage, with this component's value replaced from position 1
        on."""
        change = fill.to(self.before.dtype) - self.value(site)
        if site.basis is not None:
            basis = site.basis.to(change)
            change = change @ basis @ basis.T
        if site.value in ("z", "hidden") and not self.block.adds_up:
            change = self.written_change(site, change)
        else:
            write = self.write(site)
            if write is not None:
                change = change @ write
        return getattr(self, site.stage) + F.pad(change[:, 1:], (0, 0, 1, 0))

    def written_change(
        self, site: Site, change: Float[Tensor, "batch pos dim"]
    ) -> Float[Tensor, "batch pos d"]:
        """What a change of heads or neurons does to what their layer writes behind its norm."""
        value = getattr(self, site.value)
        right = value.shape[-1] - site.part.stop
        changed = value + F.pad(change, (site.part.start, right))
        if site.value == "z":
            return self.attention_of(changed) - self.attn
        return self.block.mlp_written(changed) - self.mlp


class CleanPrompts:
    """Prompts on their way through the model: the clean stream that enters a layer is computed once
    and kept.

    Layers are best asked for upwards. `pass_rows` prompts make up a pass. Where memory is short
    nothing is kept.
    """

    def __init__(self, model: Model, tokens: Int[Tensor, "n pos"], last: Int[Tensor, " n"]):
        if not len(tokens) or int(last.min()) < 1:
            raise ValueError("there must be prompts, and each needs at least one token after BOS")
        self.model = model
        self.tokens = tokens.to(model.device)
        self.last = last.to(model.device)
        self.pass_rows = machine.rows_in_a_pass(model, tokens.shape[1])
        copies = KEPT_COPIES * len(tokens)
        row_bytes = tokens.shape[1] * model.d_model * model.dtype.itemsize
        self._keep = machine.micro_batch(copies, row_bytes) == copies
        self._layer = 0
        self._entering: Tensor | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def chunks(
        self, size: int, rows: Int[Tensor, " k"] | None = None
    ) -> Iterator[Int[Tensor, " b"]]:
        """Rows by length, so that each chunk can be cut behind its longest prompt."""
        rows = torch.arange(len(self)) if rows is None else rows
        order = self.last[rows].argsort(stable=True).cpu()
        return iter(rows[order].split(size))

    def in_passes(self, compute: Callable[[Int[Tensor, " b"]], Value]) -> Iterator[Value]:
        """compute(rows) of all prompts, a pass at a time, or half of one where memory is refused:
        it hands back what it found and adds to nothing."""
        [order] = self.chunks(len(self))
        return machine.in_spans(len(self), self.pass_rows, lambda span: compute(order[span]))

    @torch.no_grad()
    def entering(self, layer: int, rows: Int[Tensor, " b"]) -> Float[Tensor, "b pos d"]:
        """The stream at the input of a layer, cut behind the longest of these prompts."""
        length = int(self.last[rows].max()) + 1
        if not self._keep:
            return self.model.run(self.model.embed(self.tokens[rows, :length]), 0, layer)
        if self._entering is None or layer < self._layer:
            self._layer = 0
            self._entering = self.model.embed(self.tokens)
        if layer > self._layer:

            def on(span: slice) -> Tensor:
                return self.model.run(self._entering[span], self._layer, layer)

            parts = list(machine.in_spans(len(self), self.pass_rows, on))
            self._entering = torch.cat(parts)
            self._layer = layer
        return self._entering[rows, :length]

    def block(self, layer: int, rows: Int[Tensor, " b"]) -> BlockValues:
        before = self.entering(layer, rows)
        return BlockValues(self.model, layer, self.tokens[rows, : before.shape[1]], before)
