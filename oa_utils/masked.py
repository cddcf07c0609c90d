"""The edge-masked model: every reader gets its own sum of what the writers before it wrote, kept or
ablated.

Input of a reader = Σ_j fill_j + Σ_j α_j (value_j − fill_j) + output biases of attention, at
positions ≥ 1; position 0 is clean, so it is computed once for a first token and never again.
`buffer.py` holds value − fill of every writer and mixes it.

Two identities keep it fast. A LayerNorm ignores the mean of its input, so all writers are centred
once and LayerNorm becomes RMSNorm; and a norm's scale commutes with the projection after it, so
normalised inputs are never written out. Models in half precision are computed in float32 here, but
for their MLPs.

`MaskedLayers`, which is `MaskedModel(model, level="layer")`, has whole attention layers in the
heads' place; their output biases are part of what they write, so they are ablated with it. It calls
the model's own blocks, so it is exact for every family; in half precision these stay in half, and
only what they wrote is added up in float32.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import einsum, rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from oa_utils.buffer import COPIES, FillAtPositions, Scratch, Waiting, WriterBuffer
from oa_utils.fills import Activations, Constants
from oa_utils.graph import LEVELS, Graph
from oa_utils.models import Layer, Model, Rotation, recording, rotate

FirstKeyValue = tuple[
    Float[Tensor, "1 kv_head 1 d_head"], Float[Tensor, "1 kv_head 1 d_head"]
]  # of a layer, at position 0


class Queries(NamedTuple):
    """Where queries stand: what they must not see, how they and the keys are turned in each
    layer."""

    hidden: Float[Tensor, "b query key"]  # −∞ where a query must not look
    rotation: list[Rotation | None]
    key_rotation: list[Rotation | None]


def select(x: Tensor, dim: int, index: Int[Tensor, " n"]) -> Tensor:
    """x at these indices, which are in order, so that all of them means x itself."""
    return x if len(index) == x.shape[dim] else x.index_select(dim, index)


def example_floats(shape: Any, graph: Graph, length: int) -> int:
    """About how many numbers one prompt of `length` tokens takes, forward and backward, in a model
    of this shape (n_layers, n_heads, d_model, d_mlp, d_vocab)."""
    writers = graph.n_vertices
    readers = 3 * shape.n_heads + 1
    floats = 2 * writers * shape.d_model + (shape.n_layers + 1) * readers * shape.d_model
    floats += shape.n_layers * (8 * shape.d_mlp + 16 * shape.d_model)
    return length * floats + 6 * shape.d_vocab + 3 * graph.n_edges


class MaskedModel:
    """A model with a mask on every edge of its graph; `masked(tokens, last, mask, fill)` are
    log-probabilities. At `level="layer"` the graph has whole attention layers and MLPs."""

    def __new__(cls, model: Model, level: str = "edge") -> MaskedModel:
        return super().__new__(MaskedLayers if level == "layer" else MaskedModel)

    def __init__(self, model: Model, level: str = "edge"):
        if not isinstance(model, Model):
            raise TypeError(
                f"MaskedModel takes a model of oa.load_model, not {type(model).__name__}"
            )
        if level not in LEVELS:
            raise ValueError(f"level is one of {', '.join(LEVELS)}, not {level!r}")
        self.model = model
        self.fingerprint = model.fingerprint  # of the weights that are kept here
        self.graph = Graph.of(model, level)
        # constants and gradients in half precision would be rounding
        self.dtype: torch.dtype = torch.promote_types(model.dtype, torch.float32)
        self.kept: dict[tuple, Any] = {}  # fills that a search needs again and again
        self._clean_first: dict[int, Any] = {}
        self._waiting: Waiting = []
        self._read_weights()

    def __repr__(self) -> str:
        return f"MaskedModel({self.model.name!r}, {len(self.graph):,} edges)"

    @property
    def run_inputs(self) -> dict[str, str]:
        """What names stored runs of this masked model beside model and settings."""
        return {} if self.graph.level == "edge" else {"graph": self.graph.level}

    def check_current(self) -> None:
        """Refuses a model that was edited since its weights were read."""
        if self.fingerprint != self.model.fingerprint:
            raise ValueError(
                f"the weights of '{self.model.name}' were edited since this masked model read "
                "them; make a new MaskedModel(model)"
            )

    # ---- weights

    def _read_weights(self) -> None:
        model = self.model
        if not model.adds_up:
            raise ValueError(
                f"'{model.name}' has norms after attention and after the MLP: heads no longer add "
                "up to what the layer writes, so the edge level has no exact form. A search over "
                'whole attention layers and MLPs is exact: MaskedModel(model, level="layer")'
            )
        for layer in model.layers:
            if any(len(norm.weight) != model.d_head for norm in layer.norms.values()):
                raise ValueError(
                    f"'{model.name}' norms queries and keys of all heads together, so heads have "
                    'no inputs of their own; MaskedModel(model, level="layer") is exact'
                )
        norm = model.layers[0].ln1
        self.centred = isinstance(norm, torch.nn.LayerNorm)
        if any(getattr(layer.ln1, "weight", None) is None for layer in model.layers):
            raise self._cannot_fold(norm)
        self.eps: float = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
        folded = [self._fold(layer) for layer in model.layers]
        self.W_in = [weight for weight, _ in folded]
        self.b_in = [bias for _, bias in folded]
        W_O = torch.stack([layer.W_O for layer in model.layers]).to(self.dtype)
        b_O = torch.stack([layer.b_O for layer in model.layers]).to(self.dtype)
        self.W_O = self.centre(W_O).contiguous()
        self.b_O = self.centre(b_O)
        self._check_norms()

    def centre(self, x: Tensor) -> Tensor:
        """Without its mean over the last axis, if the model's norms ignore that mean."""
        return x - x.mean(-1, keepdim=True) if self.centred else x

    def _fold(
        self, layer: Layer
    ) -> tuple[Float[Tensor, "readers d d_head"], Float[Tensor, "readers 1 1 d_head"]]:
        """Projections of a layer's heads with the norm before them folded in, all but its scale."""
        weight, bias = (part.flatten(0, 1).to(self.dtype) for part in layer.qkv_weights())
        if getattr(layer.ln1, "bias", None) is not None:
            bias = bias + einsum(layer.ln1.bias.to(self.dtype), weight, "d, reader d e -> reader e")
        weight = weight * self._norm_weight(layer.ln1)[:, None].to(self.dtype)
        return self.centre(weight.mT).mT.contiguous(), bias[:, None, None]

    def _norm_weight(self, norm: Any) -> Float[Tensor, " d"]:
        """What a norm multiplies with: its weight, or one more (Gemma)."""
        if self.centred:
            return norm.weight
        of_ones = norm(torch.ones_like(norm.weight))
        is_more = (of_ones - norm.weight).abs().max() > 0.5
        return 1 + norm.weight if is_more else norm.weight

    def _cannot_fold(self, norm: Any) -> ValueError:
        kind = type(norm).__name__
        return ValueError(f"'{self.model.name}' has norms ({kind}) that MaskedModel cannot fold")

    def _check_norms(self) -> None:
        """The folded norm must be the model's own: other kinds of norm are refused, not
        approximated."""
        model = self.model
        x = torch.linspace(-1, 2, model.d_model, device=model.device, dtype=model.dtype).sin()
        x = x[None, None]
        tolerance = max(1e-3, 8 * torch.finfo(model.dtype).eps)
        for layer, weight, bias in zip(model.layers, self.W_in, self.b_in, strict=True):
            raw_weight, raw_bias = (part.flatten(0, 1) for part in layer.qkv_weights())
            raw_weight, raw_bias = (part.to(self.dtype) for part in (raw_weight, raw_bias))
            wanted = layer.ln1(x).to(self.dtype) @ raw_weight + raw_bias[:, None]
            folded = self._project(self.centre(x.to(self.dtype)), weight) + bias
            if not torch.allclose(folded[:, 0], wanted, rtol=tolerance, atol=tolerance):
                raise self._cannot_fold(layer.ln1)

    def _project(
        self, x: Float[Tensor, "b p d"], weight: Float[Tensor, "readers d d_head"]
    ) -> Float[Tensor, "readers b p d_head"]:
        """Norm and projections of an input that many readers share."""
        x = x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return einsum(x, weight, "b p d, reader d e -> reader b p e")

    # ---- sizes

    def activation_bytes(self, length: int) -> int:
        """What `activations` of one prompt take."""
        model = self.model
        floats = model.d_model + model.n_layers * (model.n_heads * model.d_head + 2 * model.d_model)
        return length * model.dtype.itemsize * floats

    def example_bytes(self, length: int) -> int:
        """About how many bytes one prompt of `length` tokens takes, forward and backward."""
        return self.dtype.itemsize * example_floats(self.model, self.graph, length)

    # ---- fills

    @torch.no_grad()
    def activations(self, tokens: Int[Tensor, "batch pos"]) -> Activations:
        """What every vertex writes on these prompts: the fill of counterfactual and resample
        ablation."""
        embed = self.model.embed(tokens)
        kept, record = recording("z", "attn", "mlp")
        self.model.run(embed, edit=record)
        by_layer = [torch.stack(list(kept[site].values()), dim=2) for site in ("z", "attn", "mlp")]
        return Activations(embed, *by_layer)

    def _fill(self, fill: Constants | Activations, batch: int, length: int) -> FillAtPositions:
        if isinstance(fill, Constants):
            return self._fill_constants(fill, length)
        if isinstance(fill, Activations):
            return self._fill_activations(fill, batch, length)
        raise TypeError(f"a fill is Constants or Activations, got {type(fill).__name__}")

    @property
    def value_width(self) -> int:
        """Of a value of attention: a head's z."""
        return self.model.d_head

    def _rows_behind_first(
        self, fill: Constants, length: int
    ) -> tuple[
        Float[Tensor, "p d"], Float[Tensor, "p layer head width"], Float[Tensor, "p layer d"]
    ]:
        """Constants at positions 1.., or one row for all of them."""
        model = self.model
        layers = model.n_layers
        heads = self.graph.attention_writers
        width = self.value_width
        d = model.d_model
        lead = tuple(fill.embed.shape[:-1])
        wanted = ((*lead, d), (*lead, layers, heads, width), (*lead, layers, d))
        shapes = tuple(tuple(part.shape) for part in fill)
        if len(lead) > 1 or 0 in lead or shapes != wanted:
            raise ValueError(
                f"Constants(embed, heads, mlps) of '{model.name}' have shapes [{d}], "
                f"[{layers}, {heads}, {width}], [{layers}, {d}], or these with one leading "
                f"axis of positions on each; got {', '.join(map(str, shapes))}"
            )
        parts = [part.to(model.device, self.dtype) for part in fill]
        embed, z, mlps = parts if lead else [part[None] for part in parts]
        if len(embed) > 1:  # row 0 is for position 0, which is never ablated, unless it is alone
            at = torch.arange(1, length, device=embed.device).clamp(max=len(embed) - 1)
            embed, z, mlps = (part[at] for part in (embed, z, mlps))
        return embed, z, mlps

    def _fill_constants(self, fill: Constants, length: int) -> FillAtPositions:
        embed, z, mlps = self._rows_behind_first(fill, length)
        embed = self.centre(embed)[None]
        mlps = rearrange(self.centre(mlps), "p layer d -> layer 1 p d")
        by_head = torch.einsum("plhe,lhed->lhpd", z, self.W_O)
        of_layers = rearrange(torch.cat((by_head, mlps), dim=1), "layer v p d -> (layer v) p d")
        written = torch.cat((embed, of_layers))
        attn = by_head.sum(1, keepdim=True) + self.b_O[:, None, None]
        z = rearrange(z, "p layer head e -> layer head 1 p e")
        return FillAtPositions(embed.detach(), z.detach(), attn.detach(), mlps.detach(), written)

    def _fill_activations(self, fill: Activations, batch: int, length: int) -> FillAtPositions:
        model = self.model
        wanted = [batch, length, model.n_layers, model.n_heads, model.d_head]
        if list(fill.heads.shape) != wanted:
            raise ValueError(
                f"activations that fill {batch} prompts of {length} tokens have heads of shape "
                f"{wanted}, got {list(fill.heads.shape)}; fill.rows(index) selects or repeats "
                "prompts"
            )
        embed, heads, attn, mlps = (part[:, 1:].detach().to(self.dtype) for part in fill)
        attn = rearrange(self.centre(attn), "b p layer d -> layer b p d")
        mlps = rearrange(self.centre(mlps), "b p layer d -> layer b p d")
        z = rearrange(heads, "b p layer head e -> layer head b p e")
        return FillAtPositions(self.centre(embed), z, attn, mlps, None)

    # ---- the masked forward

    def __call__(
        self,
        tokens: Int[Tensor, "batch pos"],
        last: Int[Tensor, " batch"],
        mask: Tensor,
        fill: Constants | Activations,
        skip_dead: bool = False,
        constants_everywhere: bool = False,
        start: int = 0,
        clean: Activations | None = None,
    ) -> Float[Tensor, "batch d_vocab"]:
        """Log-probabilities at each prompt's last position, with gradients to the mask [batch or 1,
        n_edges] and to constants.

        Constants get gradient only along edges with α = 0 (`constants_everywhere`: along all,
        weighted by 1 − α). With `skip_dead`, vertices from which no edge of any mask leads to `out`
        are not computed; log-probabilities and the gradients of constants and of every α > 0 stay
        the same, those of α = 0 may be lost. Where all edges into live vertices below layer `start`
        are kept, these need not run: they wrote what `clean` holds, the `activations` of the same
        tokens.
        """
        tokens, last, mask = self._checked(tokens, last, mask)
        batch, length = tokens.shape
        graph = self.graph
        if start and (
            clean is None or len(clean.embed) != batch or not 0 < start <= graph.n_layers
        ):
            raise ValueError(
                f"start is a layer from 0 to {graph.n_layers}, and from 1 on needs clean, with "
                f"{batch} prompts"
            )
        wrote = clean and self._fill(clean, batch, length)
        values = self._fill(fill, batch, length)
        if skip_dead:
            live, busy = self._live(mask)
        else:
            live = mask.new_ones(graph.n_vertices - 1, dtype=torch.bool)
            busy = None
        rows = 1 + int(live[: graph.writers_before(graph.n_layers - 1)].sum())
        shape = (rows, batch, length - 1)
        copies = COPIES if torch.is_grad_enabled() else 2
        floats = copies * prod(shape) * self.model.d_model
        scratch = Scratch(values.embed, floats, self._waiting)
        wide = WriterBuffer(values, live, shape, self.eps, constants_everywhere, scratch).open()
        if live[0]:
            embed = self.centre(self.model.embed(tokens)[:, 1:].to(self.dtype))
            wide.write(0, (embed - values.embed)[None])
        bos = self._bos(int(tokens[0, 0]))
        everywhere, at_last = self._queries(length, last)
        buffer = wide
        attn, mlp, out = graph.blocks(mask)
        for i in range(graph.n_layers):
            is_end = i == graph.n_layers - 1  # there, only last positions are of use
            if i < start:
                if is_end:
                    buffer = wide.at(last - 1)
                    wrote = wrote.at(last - 1)
                self._copy_layer(buffer, i, wrote)
            else:
                buffer = self._run_layer(
                    wide, i, attn[i], mlp[i], busy, bos[i], last - 1, everywhere, at_last
                )
        x = buffer.read(out[:, None])[0, :, 0]
        wide.token = buffer.token = None  # or graph and buffer would hold each other in memory
        return self.model.log_probs(x)

    def _live_of(self, buffer: WriterBuffer, i: int) -> tuple[Int[Tensor, " heads"], bool]:
        """The live heads of a layer, and whether its MLP lives."""
        before = self.graph.writers_before(i)
        mlp = before + self.graph.attention_writers
        return buffer.live[before:mlp].nonzero()[:, 0], bool(buffer.live[mlp])

    def _copy_layer(self, buffer: WriterBuffer, i: int, wrote: FillAtPositions) -> None:
        """A layer whose live vertices wrote what is known."""
        heads, has_mlp = self._live_of(buffer, i)
        fill = buffer.fill
        before = self.graph.writers_before(i)
        if len(heads):
            z = select(wrote.z[i], 0, heads) - select(fill.z[i], 0, heads)
            buffer.write(before, z, select(self.W_O[i], 0, heads))
        buffer.base = buffer.base + fill.attn[i]
        if has_mlp:
            buffer.write(before + self.graph.n_heads, (wrote.mlps[i] - fill.mlps[i])[None])
        buffer.base = buffer.base + fill.mlps[i]

    def _run_layer(
        self,
        wide: WriterBuffer,
        i: int,
        attn: Float[Tensor, "b 3 head writer"],
        mlp: Float[Tensor, "b mlp_writer"],
        busy: list[Bool[Tensor, " reader"]] | None,
        bos: Float[Tensor, "2 head d_head"],
        last: Int[Tensor, " batch"],
        everywhere: Queries,
        at_last: Queries,
    ) -> WriterBuffer:
        """A layer's heads and MLP read, compute and write; the last layer does so at last positions
        alone."""
        before = self.graph.writers_before(i)
        heads, has_mlp = self._live_of(wide, i)
        # the MLP's edges from earlier layers are mixed along with those of the heads
        early = mlp[:, None, :before][:, : int(has_mlp)]
        if i < self.graph.n_layers - 1:
            buffer = wide
            queries = everywhere
            (q, k, v), x = self._heads(wide, i, "qkv", heads, attn, early, busy)
        else:
            (k, v), _ = self._heads(wide, i, "kv", heads, attn, early[:, :0], busy)
            buffer = wide.at(last)
            queries = at_last
            (q,), x = self._heads(buffer, i, "q", heads, attn, early, busy)
        fill = buffer.fill
        if len(heads):
            z = self._attend(i, q, k, v, select(bos, 1, heads), queries)
            change = z - select(fill.z[i], 0, heads)
            buffer.write(before, change, select(self.W_O[i], 0, heads))
        buffer.base = buffer.base + fill.attn[i]
        if has_mlp:
            x = x[0]
            if not self.graph.parallel:
                late = buffer.read(mlp[:, None, before:], first=before)[0]
                x = x + fill.attn[i] + late
            written = self.centre(self._mlp(i, x))
            buffer.write(before + self.graph.n_heads, (written - fill.mlps[i])[None])
        buffer.base = buffer.base + fill.mlps[i]
        return buffer

    def _mlp(self, i: int, x: Float[Tensor, "batch pos d"]) -> Float[Tensor, "batch pos d"]:
        return self.model.layers[i].mlp(x.to(self.model.dtype)).to(self.dtype)

    def _heads(
        self,
        buffer: WriterBuffer,
        i: int,
        slots: str,
        heads: Int[Tensor, " heads"],
        mask: Float[Tensor, "b 3 head writer"],
        also: Float[Tensor, "b other writer"],
        busy: list[Bool[Tensor, " reader"]] | None,
    ) -> tuple[Float[Tensor, "slot heads batch pos d_head"], Float[Tensor, "other batch pos d"]]:
        """What these heads make of their inputs, and the inputs of the readers in `also`."""
        readers = torch.cat([heads + "qkv".index(slot) * self.graph.n_heads for slot in slots])
        kept = select(mask.flatten(1, 2), 1, readers)
        weight = select(self.W_in[i], 0, readers)
        bias = select(self.b_in[i], 0, readers)
        on = None if busy is None else select(busy[i], 0, readers)
        if on is None or on.all():
            y, x = buffer.project(torch.cat((kept, also), 1), weight)
        else:  # readers without a live edge in any mask share one input
            y, x = buffer.project(torch.cat((kept[:, on], also), 1), weight[on])
            shared = self._project(buffer.ablated(kept.shape[-1]), weight[~on])
            order = torch.cat((on.nonzero(), (~on).nonzero()))[:, 0].argsort()
            y = torch.cat((y, shared.expand(-1, *y.shape[1:])))[order]
        return rearrange(y + bias, "(slot h) b p e -> slot h b p e", slot=len(slots)), x

    def _queries(self, length: int, last: Int[Tensor, " batch"]) -> list[Queries]:
        """Queries at positions 1.., and queries at `last`."""
        keys = torch.arange(length, device=last.device)[None]
        key_rotation = self._rotations(keys[:, 1:])
        places = []
        for position in (keys[:, 1:], last[:, None]):  # [1 or batch, query]
            hidden = torch.zeros(*position.shape, length, dtype=self.dtype, device=last.device)
            hidden.masked_fill_(keys[:, None] > position[..., None], -torch.inf)
            places.append(Queries(hidden, self._rotations(position), key_rotation))
        return places

    def _rotations(self, positions: Int[Tensor, "b pos"]) -> list[Rotation | None]:
        """How every layer turns queries or keys at these positions, computed once for all that
        turn alike."""
        layers = self.model.layers
        turned = {rotary: rotary(positions) for rotary in {layer.rotary for layer in layers}}
        return [turned[layer.rotary] for layer in layers]

    def _attend(
        self,
        i: int,
        q: Float[Tensor, "h batch query d_head"],
        k: Float[Tensor, "h batch pos d_head"],
        v: Float[Tensor, "h batch pos d_head"],
        bos: Float[Tensor, "2 h d_head"],
        queries: Queries,
    ) -> Float[Tensor, "h batch query d_head"]:
        """Every head's z, over positions 1.. and the clean position 0."""
        layer = self.model.layers[i]
        q = _rotate(layer.norm_slot(q, "q"), queries.rotation[i])
        k = _rotate(layer.norm_slot(k, "k"), queries.key_rotation[i])
        first = bos[:, :, None, None].expand(-1, -1, k.shape[1], -1, -1)
        k = torch.cat((first[0], k), 2)
        v = torch.cat((first[1], v), 2)
        return layer.attend(q, k, v, queries.hidden)

    @torch.no_grad()
    def _bos(self, token: int) -> Float[Tensor, "layer 2 head d_head"]:
        """Keys and values of the clean position 0, which sees itself only."""
        if token not in self._clean_first:
            kept, record = recording("k", "v")
            first = torch.tensor([[token]], device=self.model.device)
            self.model.run(self.model.embed(first), edit=record)
            per_head = [
                torch.stack([layer.per_head(kept[slot][i][0, :, 0]) for slot in "kv"])
                for i, layer in enumerate(self.model.layers)
            ]
            self._clean_first[token] = torch.stack(per_head).to(self.dtype)
        return self._clean_first[token]

    @torch.no_grad()
    def _live(
        self, mask: Float[Tensor, "b n_edges"]
    ) -> tuple[Bool[Tensor, " writer"], list[Bool[Tensor, " reader"]]]:
        """Writers from which edges of some mask in the batch lead on to `out`; heads' inputs that
        some edge enters."""
        attn, mlp, out = self.graph.blocks((mask != 0).any(0))
        live = out.clone()
        for i in reversed(range(self.graph.n_layers)):
            before = self.graph.writers_before(i)
            m = before + self.graph.attention_writers
            live[: len(mlp[i])] |= mlp[i] & live[m]
            live[:before] |= attn[i][:, live[before:m]].any(0).any(0)
        return live, [block.any(-1).flatten() for block in attn]

    def _checked(
        self, tokens: Tensor, last: Tensor, mask: Tensor
    ) -> tuple[Int[Tensor, "batch pos"], Int[Tensor, " batch"], Float[Tensor, "b n_edges"]]:
        model = self.model
        n_edges = self.graph.n_edges
        mask = mask[None] if mask.ndim == 1 else mask
        if tokens.ndim != 2 or last.shape != tokens.shape[:1]:
            shapes = f"{[*tokens.shape]} and {[*last.shape]}"
            raise ValueError(f"tokens [batch, pos] and last [batch] have shapes {shapes}")
        if mask.ndim != 2 or mask.shape[1] != n_edges or mask.shape[0] not in (1, len(tokens)):
            raise ValueError(
                f"a mask for {len(tokens)} prompts of '{model.name}' has shape "
                f"[{len(tokens)} or 1, {n_edges}], got {list(mask.shape)}"
            )
        if tokens.shape[1] > model.n_ctx:
            raise ValueError(
                f"prompts of {tokens.shape[1]} tokens, but '{model.name}' takes at most "
                f"{model.n_ctx}"
            )
        if not 1 <= int(last.min()) <= int(last.max()) < tokens.shape[1]:
            span = f"from 1 (position 0 is never ablated) to {tokens.shape[1] - 1}"
            raise ValueError(f"last must be {span}, got {last.tolist()}")
        if (tokens[:, 0] != tokens[0, 0]).any():
            raise ValueError(
                "prompts of one batch start with the same token (BOS), which stays clean; these "
                "do not"
            )
        return tokens.to(model.device), last.to(model.device), mask.to(model.device, self.dtype)


class MaskedLayers(MaskedModel):
    """A masked model of whole attention layers and MLPs: an attention layer reads once, and its
    value is what it writes into the stream, so `Constants.heads` are [n_layers, 1, d_model]."""

    def _read_weights(self) -> None:
        """None are needed: blocks are called as they are, and nothing is folded."""
        self.centred = False
        self.eps = 0.0

    @property
    def value_width(self) -> int:
        """Of a value of attention: what a layer writes."""
        return self.model.d_model

    def example_bytes(self, length: int) -> int:
        model = self.model
        attention = 4 * model.n_heads * model.d_head + model.n_heads * length
        by_layer = 8 * model.d_mlp + 20 * model.d_model + 2 * attention
        floats = 4 * self.graph.n_vertices * model.d_model + model.n_layers * by_layer
        per_prompt = 6 * model.d_vocab + 3 * self.graph.n_edges
        return self.dtype.itemsize * (length * floats + per_prompt)

    def _fill_constants(self, fill: Constants, length: int) -> FillAtPositions:
        embed, attn, mlps = self._rows_behind_first(fill, length)
        attn = rearrange(attn, "p layer 1 d -> layer 1 p d")
        mlps = rearrange(mlps, "p layer d -> layer 1 p d")
        of_layers = rearrange([attn, mlps], "v layer 1 p d -> (layer v) p d")
        written = torch.cat((embed[None], of_layers))
        z = attn[:, None]
        parts = (part.detach() for part in (embed[None], z, attn, mlps))
        return FillAtPositions(*parts, written)

    def _copy_layer(self, buffer: WriterBuffer, i: int, wrote: FillAtPositions) -> None:
        heads, has_mlp = self._live_of(buffer, i)
        fill = buffer.fill
        before = self.graph.writers_before(i)
        if len(heads):
            buffer.write(before, (wrote.attn[i] - fill.attn[i])[None])
        if has_mlp:
            buffer.write(before + 1, (wrote.mlps[i] - fill.mlps[i])[None])
        buffer.base = buffer.base + fill.attn[i] + fill.mlps[i]

    def _run_layer(
        self,
        wide: WriterBuffer,
        i: int,
        attn: Float[Tensor, "b 1 1 writer"],
        mlp: Float[Tensor, "b mlp_writer"],
        busy: list[Bool[Tensor, " reader"]] | None,
        bos: FirstKeyValue,
        last: Int[Tensor, " batch"],
        everywhere: Queries,
        at_last: Queries,
    ) -> WriterBuffer:
        """A layer's attention and MLP read, compute and write; the last layer does so at last
        positions alone."""
        before = self.graph.writers_before(i)
        heads, has_mlp = self._live_of(wide, i)
        x = wide.read(attn[:, 0])[0] if len(heads) else None
        only = None
        buffer = wide
        if i == self.graph.n_layers - 1:
            only = last
            buffer = wide.at(last)
        fill = buffer.fill
        reads_first = self.graph.parallel and has_mlp
        read = buffer.read(mlp[:, None])[0] if reads_first else None
        if x is not None:
            written = self._attention(i, x, bos, only)
            buffer.write(before, (written - fill.attn[i])[None])
        buffer.base = buffer.base + fill.attn[i]
        if has_mlp:
            read = buffer.read(mlp[:, None])[0] if read is None else read
            buffer.write(before + 1, (self._mlp(i, read) - fill.mlps[i])[None])
        buffer.base = buffer.base + fill.mlps[i]
        return buffer

    def _attention(
        self,
        i: int,
        x: Float[Tensor, "batch pos d"],
        bos: FirstKeyValue,
        only: Int[Tensor, " batch"] | None,
    ) -> Float[Tensor, "batch query d"]:
        """What attention writes at positions 1.., or at one of them, over these and the clean
        position 0."""
        positions = torch.arange(1, 1 + x.shape[1], device=x.device)[None]
        past = tuple(
            F.pad(first, (0, 0, 0, x.shape[1])).expand(len(x), -1, -1, -1) for first in bos
        )
        x = x.to(self.model.dtype)
        z = self.model.attention(i, x, positions=positions, past=past, only=only)
        return self.model.layers[i].attn_out(z).to(self.dtype)

    @torch.no_grad()
    def _bos(self, token: int) -> list[FirstKeyValue]:
        """Keys and values of the clean position 0, as the model stores them."""
        if token not in self._clean_first:
            kept, record = recording("k", "v")
            first = torch.tensor([[token]], device=self.model.device)
            self.model.run(self.model.embed(first), edit=record)
            pairs = zip(kept["k"].values(), kept["v"].values(), strict=True)
            self._clean_first[token] = list(pairs)
        return self._clean_first[token]


def _rotate(
    x: Float[Tensor, "h batch pos d_head"], rotation: Rotation | None
) -> Float[Tensor, "h batch pos d_head"]:
    return x if rotation is None else rotate(x.transpose(0, 1), rotation).transpose(0, 1)
