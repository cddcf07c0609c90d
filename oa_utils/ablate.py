"""Use what was found: a model that runs with only a circuit kept, or with components replaced.

`with oa.ablate(model, circuit, constants): model.bridge.generate(...)`. Hooks stand on the bridge,
so its own forward, its `generate` and whoever hooks it see the ablated values: `hook_z` and the
MLPs' `hook_out` hold what components write in the circuit, and the last stream is what `out` reads.
Position 0 is never ablated. Constants go on: position i takes row min(i, P−1), also where text is
generated. Prompts padded on the left (a list of texts of several lengths) are refused.

A circuit has keys and values of its own. They stay in the model's cache, beside its own layers, so
generating with beams and caches that are cut or copied work. A cache goes on in the block in which
it began: one from elsewhere is refused.

In float32 a circuit's log-probabilities are those of `MaskedModel` to 1e-4. In half precision both
add up in float32, but attention is in half here, so they agree as far as its rounding lets them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import torch
import torch.nn.functional as F
from einops import einsum, rearrange
from jaxtyping import Float, Int
from torch import Tensor

from oa_utils.circuits import Circuit
from oa_utils.fills import Activations, Constants
from oa_utils.models import KeysValues, Model, recording, rotate
from oa_utils.sites import Site, Subspace, find

Hook = Callable[..., Tensor | None]
Rows = Float[Tensor, "P dim"]


class Columns:
    """Where the columns of a forward stand: those behind a cache of keys and values come later."""

    def __init__(self) -> None:
        self.first = 0
        self.cache: Any = None  # that the forward was given
        self.padded_left = False

    def note(self, module: Any, args: tuple, kwargs: dict) -> None:
        """Before each forward of the model: how much of the prompt it has seen already."""
        self.cache = kwargs.get("past_key_values")
        self.first = 0 if self.cache is None else int(self.cache.get_seq_length())
        mask = kwargs.get("attention_mask")
        two = mask is not None and mask.ndim == 2
        self.padded_left = two and bool((mask[:, 1:] > mask[:, :-1]).any())

    def positions(self, value: Float[Tensor, "batch pos *rest"]) -> Int[Tensor, " pos"]:
        if self.padded_left:  # said here: a bridge that is stopped earlier keeps its batch in mind
            raise ValueError(
                "prompts padded on the left: their positions are not their columns, so what is "
                "ablated where cannot be told; run prompts of one length, or one at a time"
            )
        return torch.arange(self.first, self.first + value.shape[1], device=value.device)


def fill_rows(rows: Tensor, positions: Int[Tensor, " pos"]) -> Tensor:
    """Constants at these positions: row min(i, P−1)."""
    return rows[positions.clamp(max=len(rows) - 1)]


# ---- single components


def component_hook(site: Site, rows: Rows, columns: Columns) -> Hook:
    """Replaces a component's value from position 1 on."""

    def replace(value: Tensor, hook: Any = None) -> Tensor:
        flat = value.flatten(2)
        positions = columns.positions(flat)
        fill = fill_rows(rows.to(flat), positions)
        change = fill - flat[..., site.part]
        if site.basis is not None:
            basis = site.basis.to(change)
            change = change @ basis @ basis.T
        change = change * (positions > 0)[:, None]
        replaced = flat.clone()
        replaced[..., site.part] += change
        return replaced.reshape(value.shape)

    return replace


def hook_name(site: Site, model: Model) -> str:
    """The bridge's hook that holds a component's value."""
    block = model.layers[site.layer]
    names = {
        "tok": "embed.hook_out",
        "embed": "blocks.0.hook_in",
        "z": f"blocks.{site.layer}.attn.hook_z",
        "attn": f"blocks.{site.layer}.{'attn' if block.ln1_post is None else 'ln1_post'}.hook_out",
        "hidden": f"blocks.{site.layer}.mlp.out.hook_in",
        "mlp": mlp_hook(model, site.layer),
    }
    return names[site.value]


def mlp_hook(model: Model, layer: int) -> str:
    """The bridge's hook that holds what an MLP writes."""
    written_by = "mlp" if model.layers[layer].ln2_post is None else "ln2_post"
    return f"blocks.{layer}.{written_by}.hook_out"


# ---- circuits


def cache_layer(run: str, keys: Tensor, values: Tensor) -> Any:
    """Keys and values of a run's layer, as a layer of Hugging Face's cache: what reorders, cuts or
    copies the cache does so to them too."""
    from transformers.cache_utils import DynamicLayer

    layer = DynamicLayer()
    layer.lazy_initialization(keys, values)
    layer.keys = keys
    layer.values = values
    layer.run = run
    return layer


class CircuitRun:
    """A forward in which every reader gets its own sum of what was written, kept or ablated: the
    plain form of `MaskedModel`, at all positions, as hooks. Sums are in float32 at least."""

    def __init__(
        self, model: Model, circuit: Circuit, fill: Constants | Activations, columns: Columns
    ):
        self.model = model
        self.columns = columns
        self.fill = fill
        self.graph = circuit.graph
        self.dtype: torch.dtype = torch.promote_types(model.dtype, torch.float32)
        mask = circuit.mask.to(model.device, self.dtype)
        attn, mlp, out = circuit.graph.blocks(mask)
        self.kept = {"out": out}  # the edges of readers: all heads of a layer, an MLP, or the end
        for layer in range(model.n_layers):
            self.kept |= {f"a{layer}": attn[layer], f"m{layer}": mlp[layer]}
        self.name = uuid4().hex  # by which its layers are known in a cache
        self.past: dict[int, KeysValues] = {}  # of earlier columns, by layer

    def hooks(self) -> list[tuple[str, Hook]]:
        listed: list[tuple[str, Hook]] = [("blocks.0.hook_in", self.begin)]
        for layer in range(self.model.n_layers):
            listed.append((f"blocks.{layer}.attn.hook_z", self.attention_of(layer)))
            listed.append((mlp_hook(self.model, layer), self.mlp_of(layer)))
        last = self.model.n_layers - 1
        return [*listed, (f"blocks.{last}.hook_out", self.end)]

    def begin(self, value: Float[Tensor, "batch pos d"], hook: Any = None) -> None:
        """A forward starts: the first writer is the embedding."""
        self.positions = self.columns.positions(value)
        self.past = self.past_of(self.columns.cache)
        length = int(self.positions[-1]) + 1
        if length > self.model.n_ctx:
            raise ValueError(
                f"{length} tokens, but '{self.model.name}' takes at most {self.model.n_ctx}"
            )
        value = value.to(self.dtype)
        self.values = [value]
        self.fills = [self.filled("embed", value)]
        self.biases = torch.zeros_like(value[:1, :1])

    def layers_in(self, cache: Any) -> list[Any]:
        """The layers of a cache that are this run's."""
        layers = getattr(cache, "layers", [])
        return [layer for layer in layers if getattr(layer, "run", "") == self.name]

    def past_of(self, cache: Any) -> dict[int, KeysValues]:
        """What this run kept of the columns in a cache."""
        if self.columns.first == 0:
            return {}
        layers = self.layers_in(cache)
        seen = layers[0].get_seq_length() if layers else 0
        if seen != self.columns.first:
            raise ValueError(
                f"the cache holds {self.columns.first} tokens, but the circuit has run on {seen} "
                "of them, and its keys and values are not the model's: begin inside the `with` "
                "block, with the first token, and go on there with the cache that this gives"
            )
        return {i: (layer.keys, layer.values) for i, layer in enumerate(layers)}

    def keep_past(self, module: Any, args: tuple, output: Any) -> None:
        """After each forward of the model: its cache holds the circuit's keys and values too."""
        cache = getattr(output, "past_key_values", None)
        if not hasattr(cache, "layers"):
            return
        old = self.layers_in(cache)
        others = [layer for layer in cache.layers if layer not in old]
        own = [cache_layer(self.name, *kept) for kept in self.past.values()]
        cache.layers = others + own

    def filled(self, part: str, value: Tensor, layer: int | None = None) -> Tensor:
        """What stands in for a writer at these positions, [batch or 1, pos, ...]."""
        rows = getattr(self.fill, part)
        if isinstance(self.fill, Activations):
            if len(rows) != len(value) or rows.shape[1] <= int(self.positions.max()):
                raise ValueError(
                    f"activations of {len(rows)} prompts of {rows.shape[1]} tokens cannot fill "
                    f"{len(value)} prompts of {int(self.positions.max()) + 1}; constants can"
                )
            rows = rows[:, self.positions]
            return (rows if layer is None else rows[:, :, layer]).to(value)
        single = self.fill.embed.ndim == 1
        rows = rows[None] if single else rows
        rows = rows if layer is None else rows[:, layer]
        return fill_rows(rows.to(value), self.positions)[None]

    def read(self, reader: str) -> Float[Tensor, "batch pos *slots d"]:
        """What readers get; at position 0 all that was written."""
        alpha = self.kept[reader]
        n = alpha.shape[-1]  # the writers before the reader
        values = torch.stack(self.values[:n], dim=-2)  # [batch pos writer d]
        fills = torch.stack([fill.expand_as(values[..., 0, :]) for fill in self.fills[:n]], dim=-2)
        mixed = fills.sum(-2)
        slots = alpha.reshape(-1, alpha.shape[-1])
        kept = einsum(slots, values - fills, "slot w, b pos w d -> b pos slot d")
        whole = values.sum(-2)[:, :, None]
        first = (self.positions == 0)[:, None, None]
        x = torch.where(first, whole, mixed[:, :, None] + kept) + self.biases[:, :, None]
        return x.unflatten(2, alpha.shape[:-1]) if alpha.ndim > 1 else x[:, :, 0]

    def write(self, value: Tensor, fill: Tensor) -> None:
        self.values.append(value)
        self.fills.append(fill)

    def attention_of(self, layer: int) -> Hook:
        return self.whole_of(layer) if self.graph.level == "layer" else self.heads_of(layer)

    def heads_of(self, layer: int) -> Hook:
        block = self.model.layers[layer]
        weights, bias = block.qkv_weights()

        def heads(value: Float[Tensor, "batch pos head d_head"], hook: Any = None) -> Tensor:
            x = self.read(f"a{layer}").to(self.model.dtype)
            normed = block.ln1(x)  # [batch pos 3 head d]
            qkv = einsum(normed, weights, "b pos s h d, s h d e -> s b h pos e")
            q, k, v = qkv + rearrange(bias, "s h e -> s 1 h 1 e")
            rotation = block.rotary(self.positions[None])
            q = rotate(block.norm_slot(q, "q"), rotation)
            k = rotate(block.norm_slot(k, "k"), rotation)
            if layer in self.past:
                k = torch.cat((self.past[layer][0], k), 2)
                v = torch.cat((self.past[layer][1], v), 2)
            self.past[layer] = (k, v)
            places = torch.arange(k.shape[2], device=k.device)
            z = block.attend(q, k, v, places <= self.positions[:, None])
            z = rearrange(z, "b h pos e -> b pos h e").reshape(value.shape)
            per_head = z.reshape(*z.shape[:2], self.model.n_heads, self.model.d_head)
            per_head = per_head.to(self.dtype)
            fill = self.filled("heads", per_head, layer)
            for head, W_O in enumerate(block.W_O.to(self.dtype)):
                self.write(per_head[:, :, head] @ W_O, fill[:, :, head] @ W_O)
            if not block.parallel:
                self.biases = self.biases + block.b_O
            return z

        return heads

    def whole_of(self, layer: int) -> Hook:
        """A whole attention layer, of which the bridge sees the heads."""
        block = self.model.layers[layer]

        def attention(value: Float[Tensor, "batch pos head d_head"], hook: Any = None) -> Tensor:
            x = self.read(f"a{layer}")[:, :, 0, 0].to(self.model.dtype)
            kept, keep = recording("k", "v")
            positions = self.positions[None]
            past = None
            if layer in self.past:
                room = (0, 0, 0, len(self.positions))
                past = tuple(F.pad(earlier, room) for earlier in self.past[layer])
            z = self.model.attention(layer, x, keep, positions=positions, past=past)
            self.past[layer] = (kept["k"][layer], kept["v"][layer])
            written = block.attn_out(z).to(self.dtype)
            part = "attn" if isinstance(self.fill, Activations) else "heads"
            fill = self.filled(part, written, layer)
            self.write(written, fill if part == "attn" else fill[:, :, 0])
            return z.reshape(value.shape)

        return attention

    def mlp_of(self, layer: int) -> Hook:
        def mlp(value: Float[Tensor, "batch pos d"], hook: Any = None) -> Tensor:
            block = self.model.layers[layer]
            written = block.mlp(self.read(f"m{layer}").to(self.model.dtype))
            exact = written.to(self.dtype)
            self.write(exact, self.filled("mlps", exact, layer))
            if block.parallel and self.graph.level == "edge":
                self.biases = self.biases + block.b_O
            return written

        return mlp

    def end(self, value: Float[Tensor, "batch pos d"], hook: Any = None) -> Tensor:
        """What `out` reads takes the place of the last stream."""
        return self.read("out").to(value.dtype)


# ---- the door


def site_of(component: str | Subspace, model: Model) -> Site:
    """Where a component is replaced; the name of a subspace does not tell."""
    if isinstance(component, str) and ":" in component:
        whole = component.split(":")[0]
        raise ValueError(
            f"{component!r} is the name of a subspace, which does not tell its basis: give the "
            f"subspace itself as the key, {{oa.Subspace({whole!r}, basis): rows}}"
        )
    return find(component, model)


@contextmanager
def ablate(
    model: Model,
    what: Circuit | Mapping[str | Subspace, Any],
    fill: Constants | Activations | None = None,
) -> Iterator[Model]:
    """Inside, `model.bridge` runs with only a circuit kept, its other edges filled (`fill`: for
    example `oa.gap(…, "optimal").constants`, or `masked.activations(tokens)`); or with components
    replaced by constants (`what`: {component: rows}, for example of `oa.optimal_constants`; the
    key of a subspace is the `oa.Subspace` itself, not the name that it has there)."""
    columns = Columns()
    run = None
    if isinstance(what, Circuit):
        what.check(model)
        if not isinstance(fill, Constants | Activations):
            raise TypeError(
                "a circuit needs a fill for the edges that it does not have: oa.Constants or "
                f"masked.activations(tokens), not {type(fill).__name__}"
            )
        run = CircuitRun(model, what, fill, columns)
        hooks = run.hooks()
    else:
        hooks = []
        for component, rows in what.items():
            site = site_of(component, model)
            if isinstance(rows, tuple):  # of optimal_constants
                rows, how = rows
                if how.get("family") == "from_end":
                    raise ValueError(
                        f"constants of {site.name} are of family 'from_end', which counts from the "
                        "last token, and text that is generated has no last token yet; train those "
                        "of family 'position', 'by_position' or 'shared'"
                    )
            if rows.ndim != 2 or rows.shape[1] != site.dim:
                raise ValueError(
                    f"constants of {site.name} have shape [P, {site.dim}], not {list(rows.shape)}"
                )
            hooks.append((hook_name(site, model), component_hook(site, rows, columns)))
    hf = model.bridge.original_model
    handles = [hf.register_forward_pre_hook(columns.note, with_kwargs=True)]
    if run is not None:
        handles.append(hf.register_forward_hook(run.keep_past))
    try:
        with torch.no_grad(), model.bridge.hooks(fwd_hooks=hooks):
            yield model
    finally:
        for handle in handles:
            handle.remove()
