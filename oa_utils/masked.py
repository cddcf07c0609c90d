"""The edge-masked model: every reader gets its own sum of what the writers before it wrote, kept or ablated.

Input of a reader = Σ_j fill_j + Σ_j α_j (value_j − fill_j) + output biases, at positions ≥ 1; position 0 is clean, so
it is computed once for a first token and never again. One buffer holds value − fill of every writer, the inputs of all
readers of a layer are one batched product with it, and in backward a second buffer collects the writers' gradients.

Two identities keep it fast. A LayerNorm ignores the mean of its input, so all writers are centred once and LayerNorm
becomes RMSNorm; and a norm's scale commutes with the projection after it, so normalised inputs are never written out.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from oa_utils.fills import Activations, Constants, Stream, pick
from oa_utils.graph import Graph
from oa_utils.models import Model


class MaskedModel:
    """A model with a mask on every edge of its graph; `masked(tokens, last, mask, fill)` are log-probabilities."""

    def __init__(self, model: Model):
        self.model, self.graph = model, Graph.of(model)
        norm = model.layers[0].ln1
        self.centred = isinstance(norm, torch.nn.LayerNorm)
        self.eps = norm.eps if self.centred else norm.variance_epsilon
        self.W_in, self.b_in = zip(*(self._fold(layer) for layer in model.layers), strict=True)
        self.W_O = self.centre(torch.stack([layer.W_O for layer in model.layers])).contiguous()
        self.b_O = self.centre(torch.stack([layer.b_O for layer in model.layers]))
        self._first: dict[int, Tensor] = {}
        self.kept: dict[tuple, Constants | Activations] = {}  # fills that a search needs again and again
        self._check_norms()

    def centre(self, x: Tensor) -> Tensor:
        """Without its mean over the last axis, if the model's norms ignore that mean."""
        return x - x.mean(-1, keepdim=True) if self.centred else x

    def _fold(self, layer) -> tuple[Float[Tensor, "readers d d_head"], Float[Tensor, "readers 1 1 d_head"]]:
        """Projections of a layer's heads with the norm before them folded in, all but its scale."""
        weight, bias = (part.flatten(0, 1) for part in layer.qkv_weights())
        if getattr(layer.ln1, "bias", None) is not None:
            bias = bias + torch.einsum("d,rde->re", layer.ln1.bias, weight)
        weight = weight * layer.ln1.weight[:, None]
        return self.centre(weight.mT).mT.contiguous(), bias[:, None, None]

    def _check_norms(self) -> None:
        """The folded norm must be the model's own: other kinds of norm are refused, not approximated."""
        model = self.model
        x = torch.linspace(-1, 2, model.d_model, device=model.device, dtype=model.dtype).sin()[None, None]
        for layer, weight, bias in zip(model.layers, self.W_in, self.b_in, strict=True):
            raw, raw_bias = (part.flatten(0, 1) for part in layer.qkv_weights())
            want = layer.ln1(x) @ raw + raw_bias[:, None]
            got = self._project(self.centre(x), weight) + bias
            if not torch.allclose(got[:, 0], want, rtol=1e-3, atol=1e-3):
                raise ValueError(f"'{model.name}' has norms ({type(layer.ln1).__name__}) that MaskedModel cannot fold")

    def _project(self, x: Float[Tensor, "b p d"], weight: Tensor) -> Float[Tensor, "readers b p d_head"]:
        """Norm and projections of an input that many readers share."""
        x = x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return torch.einsum("bpd,rde->rbpe", x, weight)

    @torch.no_grad()
    def activations(self, tokens: Int[Tensor, "batch pos"]) -> Activations:
        """What every vertex writes on these prompts: the fill of counterfactual and resample ablation."""
        seen: dict[str, list[Tensor]] = {"z": [], "attn": [], "mlp": []}

        def keep(site: str, layer: int, value: Tensor) -> Tensor:
            if site in seen:
                seen[site].append(value)
            return value

        embed = self.model.embed(tokens.to(self.model.device))
        self.model.run(embed, edit=keep)
        return Activations(embed, *(torch.stack(seen[site], dim=2) for site in ("z", "attn", "mlp")))

    def activation_bytes(self, length: int) -> int:
        """What `activations` of one prompt take."""
        model = self.model
        floats = model.d_model + model.n_layers * (model.n_heads * model.d_head + 2 * model.d_model)
        return length * model.dtype.itemsize * floats

    def chunk_size(self, length: int) -> int:
        """About how many bytes one prompt of `length` tokens takes, forward and backward: for `runs.micro_batch`."""
        model = self.model
        writers, readers = self.graph.n_vertices, 3 * model.n_heads + 1
        floats = 2 * writers * model.d_model + (model.n_layers + 1) * readers * model.d_model
        floats += model.n_layers * (8 * model.d_mlp + 16 * model.d_model)
        return model.dtype.itemsize * (length * floats + 6 * model.d_vocab + 3 * self.graph.n_edges)

    def __call__(
        self,
        tokens: Int[Tensor, "batch pos"],
        last: Int[Tensor, " batch"],
        mask: Float[Tensor, "batch_or_1 n_edges"],
        fill: Constants | Activations,
        skip_dead: bool = False,
        constants_everywhere: bool = False,
        start: int = 0,
        clean: Activations | None = None,
    ) -> Float[Tensor, "batch d_vocab"]:
        """Log-probabilities at each prompt's last position, with gradients to the mask and to constants.

        Constants get gradient only along edges with α = 0 (`constants_everywhere`: along all, weighted by 1 − α).
        With `skip_dead`, vertices from which no edge of any mask leads to `out` are not computed; log-probabilities and
        the gradients of constants and of every α > 0 stay the same, those of α = 0 may be lost.
        Where all edges into live vertices below layer `start` are kept, these need not run: they wrote what `clean`
        holds, the `activations` of the same tokens.
        """
        tokens, last, mask = self._checked(tokens, last, mask)
        model, graph, (batch, length) = self.model, self.graph, tokens.shape
        if not isinstance(fill, Constants | Activations):
            raise TypeError(f"a fill is Constants or Activations, got {type(fill).__name__}")
        if start and (clean is None or len(clean.embed) != batch or not 0 < start <= graph.n_layers):
            raise ValueError(f"start is a layer from 0 to {graph.n_layers}, and from 1 on needs clean, with {batch} prompts")
        known, fill = clean and clean._at(self, batch, length), fill._at(self, batch, length)
        bos, (attn, mlp, out) = self._bos(int(tokens[0, 0])), graph.blocks(mask)
        live, busy = self._live(mask) if skip_dead else (mask.new_ones(graph.n_vertices - 1, dtype=torch.bool), None)
        positions, at_last = self._positions(length, last)
        shape = 1 + int(live[: graph.writers_before(graph.n_layers - 1)].sum()), batch, length - 1
        stream = wide = Stream(fill, live, shape, self.eps, constants_everywhere).open()
        if live[0]:
            stream.write(0, (self.centre(model.embed(tokens)[:, 1:]) - fill.embed)[None])
        for i, layer in enumerate(model.layers):
            before = graph.writers_before(i)
            m = before + graph.n_heads  # the index of the layer's MLP
            heads, has_mlp = live[before:m].nonzero()[:, 0], bool(live[m])
            early = mlp[i][:, None, :before][:, : int(has_mlp)]  # the MLP's edges from earlier layers are mixed along
            if i < start:
                stream, x = wide if i < graph.n_layers - 1 else wide.at(last - 1), None
                known = known if stream is wide else known.at(last - 1)
            elif i < graph.n_layers - 1:
                (q, k, v), x = self._heads(stream, i, "qkv", heads, attn[i], early, busy)
            else:  # queries and outputs of the last layer are of use at last positions only
                (k, v), _ = self._heads(wide, i, "kv", heads, attn[i], early[:, :0], busy)
                stream, positions = wide.at(last - 1), at_last
                (q,), x = self._heads(stream, i, "q", heads, attn[i], early, busy)
            if len(heads):
                z = pick(known.z[i], 0, heads) if i < start else self._attend(q, k, v, pick(bos[i], 1, heads), positions)
                stream.write(before, z - pick(stream.fill.z[i], 0, heads), pick(self.W_O[i], 0, heads))
            stream.base = stream.base + stream.fill.attn[i]
            if has_mlp and i < start:
                stream.write(m, (known.mlps[i] - stream.fill.mlps[i])[None])
            elif has_mlp:
                x = x[0] + stream.fill.attn[i] + stream.read(mlp[i][:, None, before:], first=before)[0]
                written = self.centre(layer.mlp_out(layer.mlp_hidden(layer.ln2(x))))
                stream.write(m, (written - stream.fill.mlps[i])[None])
            stream.base = stream.base + stream.fill.mlps[i]
        x = stream.read(out[:, None])[0, :, 0]
        wide.token = stream.token = None  # or graph and stream would hold each other in memory
        return model.log_probs(x)

    def _heads(self, stream: Stream, i: int, slots: str, heads: Tensor, mask: Tensor, also: Tensor, busy: list | None):
        """What these heads make of their inputs [slot h batch pos d_head], and the input of the readers in `also`."""
        readers = torch.cat([heads + "qkv".index(slot) * self.graph.n_heads for slot in slots])
        mask = pick(mask.flatten(1, 2), 1, readers)
        weight, bias = pick(self.W_in[i], 0, readers), pick(self.b_in[i], 0, readers)
        on = None if busy is None else pick(busy[i], 0, readers)
        if on is None or on.all():
            y, x = stream.project(torch.cat((mask, also), 1), weight)
        else:  # readers without a live edge in any mask share one input
            y, x = stream.project(torch.cat((mask[:, on], also), 1), weight[on])
            same = self._project(stream.ablated(mask.shape[-1]), weight[~on]).expand(-1, *y.shape[1:])
            y = torch.cat((y, same))[torch.cat((on.nonzero(), (~on).nonzero()))[:, 0].argsort()]
        return (y + bias).unflatten(0, (len(slots), len(heads))), x

    def _positions(self, length: int, last: Tensor) -> list[tuple]:
        """For queries at positions 1.. and for those at `last`: −∞ where they must not look, rotations of q and of k."""
        keys = torch.arange(length, device=last.device)[None]
        turn = self.model.rotation(keys[:, 1:])
        found = []
        for asked in (keys[:, 1:], last[:, None]):  # [1 or batch, pos]
            hidden = self.W_O.new_zeros(*asked.shape, length).masked_fill_(keys[:, None] > asked[..., None], -torch.inf)
            found.append((hidden, self.model.rotation(asked), turn))
        return found

    def _attend(self, q, k, v, bos: Float[Tensor, "2 h d_head"], positions: tuple) -> Float[Tensor, "h batch pos d_head"]:
        """Every head's z at positions 1.., or at one position of each example, over them and the clean position 0."""
        hidden, *turns = positions
        q, k = (self._rotate(x, turn) for x, turn in zip((q, k), turns, strict=True))
        first = bos[:, :, None, None].expand(-1, -1, k.shape[1], -1, -1)
        k, v = torch.cat((first[0], k), 2), torch.cat((first[1], v), 2)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=hidden)

    def _rotate(self, x: Float[Tensor, "h batch pos d_head"], turn: tuple[Tensor, Tensor] | None) -> Tensor:
        return x if turn is None else self.model.rotate(x.transpose(0, 1), turn).transpose(0, 1)

    @torch.no_grad()
    def _bos(self, token: int) -> Float[Tensor, "layer 2 head d_head"]:
        """Keys and values of the clean position 0, which sees itself only."""
        if token not in self._first:
            found, turn = [], self.model.rotation(torch.zeros(1, 1, dtype=torch.int64, device=self.model.device))

            def keep(site: str, i: int, value: Tensor) -> Tensor:
                if site == "resid":
                    layer = self.model.layers[i]
                    x = layer.ln1(value)
                    both = self.model.rotate(layer.heads(x, "k"), turn), layer.heads(x, "v")
                    found.append(torch.stack([layer.per_head(part[0, :, 0]) for part in both]))
                return value

            self.model.run(self.model.embed(torch.tensor([[token]], device=self.model.device)), edit=keep)
            self._first[token] = torch.stack(found)
        return self._first[token]

    @torch.no_grad()
    def _live(self, mask: Tensor) -> tuple[Bool[Tensor, " writer"], list[Bool[Tensor, " reader"]]]:
        """Writers from which edges of some mask in the batch lead on to `out`; heads' inputs that some edge enters."""
        attn, mlp, out = self.graph.blocks((mask != 0).any(0))
        live = out.clone()
        for i in reversed(range(self.graph.n_layers)):
            before = self.graph.writers_before(i)
            m = before + self.graph.n_heads
            live[:m] |= mlp[i] & live[m]
            live[:before] |= attn[i][:, live[before:m]].any(0).any(0)
        return live, [block.any(-1).flatten() for block in attn]

    def _checked(self, tokens: Tensor, last: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        model, n_edges = self.model, self.graph.n_edges
        mask = mask[None] if mask.ndim == 1 else mask
        if tokens.ndim != 2 or last.shape != tokens.shape[:1]:
            raise ValueError(f"tokens [batch, pos] and last [batch] have shapes {[*tokens.shape]} and {[*last.shape]}")
        if mask.ndim != 2 or mask.shape[1] != n_edges or mask.shape[0] not in (1, len(tokens)):
            raise ValueError(
                f"a mask for {len(tokens)} prompts of '{model.name}' has shape [{len(tokens)} or 1, {n_edges}], "
                f"got {list(mask.shape)}"
            )
        if tokens.shape[1] > model.n_ctx:
            raise ValueError(f"prompts of {tokens.shape[1]} tokens, but '{model.name}' takes at most {model.n_ctx}")
        if not 1 <= int(last.min()) <= int(last.max()) < tokens.shape[1]:
            span = f"from 1 (position 0 is never ablated) to {tokens.shape[1] - 1}"
            raise ValueError(f"last must be {span}, got {last.tolist()}")
        if (tokens[:, 0] != tokens[0, 0]).any():
            raise ValueError("prompts of one batch start with the same token (BOS), which stays clean; these do not")
        return tokens.to(model.device), last.to(model.device), mask.to(model.device, model.dtype)
