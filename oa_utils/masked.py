"""The edge-masked model: every reader gets its own sum of what the writers before it wrote, kept or ablated.

Input of a reader = Σ_j fill_j + Σ_j α_j (value_j − fill_j) + output biases, at positions ≥ 1; position 0 is clean, so it
is computed once for a first token and never again. One buffer holds value − fill of every writer, each layer's readers
are one batched matrix product with it, and in backward one second buffer collects all gradients of the writers.

Two identities keep it fast. A LayerNorm ignores the mean of its input, so all writers are centred once and LayerNorm
becomes RMSNorm; and a norm's scale commutes with the projection after it, so normalised inputs are never written out.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from oa_utils.fills import Activations, Constants, Fill
from oa_utils.graph import Graph
from oa_utils.models import Model


class MaskedModel:
    """A model with a mask on every edge of its graph; `masked(tokens, last, mask, fill)` are log-probabilities."""

    def __init__(self, model: Model):
        self.model, self.graph = model, Graph.of(model)
        norm = model.layers[0].ln1
        self.centred = isinstance(norm, torch.nn.LayerNorm)
        self.eps = norm.eps if self.centred else norm.variance_epsilon
        self.W_in, self.b_in = zip(*(self._fold(layer) for layer in model.layers), strict=True)  # layer: [3 h, d, d_head]
        self.W_O = self.centre(torch.stack([layer.W_O for layer in model.layers])).contiguous()
        self.b_O = self.centre(torch.stack([layer.b_O for layer in model.layers]))
        self._first: dict[int, Tensor] = {}
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
    ) -> Float[Tensor, "batch d_vocab"]:
        """Log-probabilities at each prompt's last position, with gradients to the mask and to constants.

        Constants get gradient only along edges with α = 0 (`constants_everywhere`: along every edge, as its value says).
        With `skip_dead`, vertices from which no edge of any mask leads to `out` are not computed; log-probabilities and
        the gradients of constants and of every α > 0 stay the same, those of α = 0 may be lost.
        """
        tokens, last, mask = self._checked(tokens, last, mask)
        model, graph, (batch, length) = self.model, self.graph, tokens.shape
        attn, mlp, out = graph.blocks(mask)
        live = self._live(mask) if skip_dead else torch.ones(graph.n_vertices - 1, dtype=torch.bool, device=mask.device)
        fills, bos = fill._at(self, batch, length), self._bos(int(tokens[0, 0]))
        ends = graph.writers_before(graph.n_layers - 1)
        shape = (1 + int(live[:ends].sum()), batch, length - 1, model.d_model)
        stream = wide = Stream(fills, live, shape, self.eps, constants_everywhere)
        stream.write(0, (self.centre(model.embed(tokens)[:, 1:]) - fills.embed)[None])
        for i, layer in enumerate(model.layers):
            before = graph.writers_before(i)
            m = before + graph.n_heads  # the index of the layer's MLP
            heads, has_mlp = live[before:m].nonzero()[:, 0], int(live[m])
            rest = mlp[i][:, None, :before].narrow(1, 0, has_mlp)  # the MLP's edges from before the layer, read along
            if i < graph.n_layers - 1:
                (q, k, v), x = self._read_heads(stream, i, "qkv", heads, attn[i], rest, skip_dead)
            else:  # nobody asks for the last layer's queries and outputs but at last positions
                stream = wide.at(last - 1, 1 + int(live.sum()))
                (q,), x = self._read_heads(stream, i, "q", heads, attn[i], rest, skip_dead)
                (k, v), _ = self._read_heads(wide, i, "kv", heads, attn[i], rest[:, :0], skip_dead)
            if len(heads):
                z = self._attend(q, k, v, pick(bos[i], 1, heads), None if stream is wide else last)
                stream.write(before, z - pick(stream.fill.z[i], 0, heads), pick(self.W_O[i], 0, heads))
            stream.base = stream.base + stream.fill.attn[i]
            if has_mlp:
                x = x[0] + stream.fill.attn[i] + stream.read(mlp[i][:, None, before:], first=before)[1][0]
                written = self.centre(layer.mlp_out(layer.mlp_hidden(layer.ln2(x))))
                stream.write(m, (written - stream.fill.mlps[i])[None])
            stream.base = stream.base + stream.fill.mlps[i]
        return model.log_probs(stream.read(out[:, None])[1][0, :, 0])

    def _read_heads(self, stream: Stream, i: int, slots: str, heads: Int[Tensor, " h"], mask: Tensor, rest: Tensor, skip: bool):
        """Queries, keys or values [slot h batch pos d_head] of the live heads, and the input of what reads along."""
        readers = torch.cat([heads + "qkv".index(slot) * self.graph.n_heads for slot in slots])
        mask = pick(mask.flatten(1, 2), 1, readers)
        weight, bias = pick(self.W_in[i], 0, readers), pick(self.b_in[i], 0, readers)
        busy = (mask.detach() != 0).any(0).any(-1)
        if not skip or busy.all():
            y, x = stream.read(torch.cat((mask, rest), 1), weight)
            return (y + bias).unflatten(0, (len(slots), len(heads))), x
        y, x = stream.read(torch.cat((mask[:, busy], rest), 1), weight[busy])
        shared = self._project(stream.carried(mask.shape[-1]), weight[~busy])  # all edges ablated: one input for all these
        order = torch.cat((busy.nonzero(), (~busy).nonzero()))[:, 0].argsort()
        y = torch.cat((y, shared.expand(-1, *y.shape[1:])))[order]
        return (y + bias).unflatten(0, (len(slots), len(heads))), x

    def _attend(self, q, k, v, bos: Float[Tensor, "2 h d_head"], last: Tensor | None) -> Float[Tensor, "h batch pos d_head"]:
        """Every head's z at positions 1.. (at `last` if given), over these and the clean position 0."""
        batch, n = k.shape[1:3]
        at = torch.arange(1, n + 1, device=k.device)
        asked = at[None] if last is None else last[:, None]
        q, k = (self.model.rotate(x.transpose(0, 1), self.model.rotation(p)).transpose(0, 1) for x, p in ((q, asked), (k, at[None])))
        k, v = (torch.cat((x0[:, None, None].expand(-1, batch, -1, -1), x), 2) for x0, x in zip(bos, (k, v), strict=True))
        seen = torch.arange(n + 1, device=k.device) <= asked[..., None]  # [batch or 1, pos, n + 1]
        seen = seen[None] if last is not None else seen
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)

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
    def _live(self, mask: Tensor) -> Bool[Tensor, " writer"]:
        """Writers from which edges of some mask in the batch lead on to `out`."""
        attn, mlp, out = self.graph.blocks((mask != 0).any(0))
        live = out.clone()
        for i in reversed(range(self.graph.n_layers)):
            before = self.graph.writers_before(i)
            m = before + self.graph.n_heads
            live[:m] |= mlp[i] & live[m]
            live[:before] |= attn[i][:, live[before:m]].any(0).any(0)
        return live

    def _checked(self, tokens: Tensor, last: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        model, n_edges = self.model, self.graph.n_edges
        mask = mask[None] if mask.ndim == 1 else mask
        if tokens.ndim != 2 or last.shape != tokens.shape[:1]:
            raise ValueError(f"tokens are [batch, pos] and last [batch], got {list(tokens.shape)} and {list(last.shape)}")
        if mask.ndim != 2 or mask.shape[1] != n_edges or mask.shape[0] not in (1, len(tokens)):
            raise ValueError(
                f"a mask for {len(tokens)} prompts of '{model.name}' has shape [{len(tokens)} or 1, {n_edges}], got {list(mask.shape)}"
            )
        if tokens.shape[1] > model.n_ctx:
            raise ValueError(f"prompts of {tokens.shape[1]} tokens, but '{model.name}' takes at most {model.n_ctx}")
        if not 1 <= int(last.min()) <= int(last.max()) < tokens.shape[1]:
            raise ValueError(f"last must be from 1 (position 0 is never ablated) to {tokens.shape[1] - 1}, got {last.tolist()}")
        if (tokens[:, 0] != tokens[0, 0]).any():
            raise ValueError("prompts of one batch start with the same token (BOS), which stays clean; these do not")
        return tokens.to(model.device), last.to(model.device), mask.to(model.device, model.dtype)


def pick(x: Tensor, dim: int, index: Int[Tensor, " n"]) -> Tensor:
    """x at these indices, which are in order, so that all of them means x itself."""
    return x if len(index) == x.shape[dim] else x.index_select(dim, index)


class Stream:
    """value − fill of every live writer so far, in one buffer; row 0 holds what the edges carry when all are ablated.

    Writes and reads are autograd functions that share the buffer and its gradient. `token`, an empty tensor handed from
    write to write and into every read, tells autograd their order: a write's backward comes after all reads of it.
    """

    def __init__(self, fill: Fill, live: Bool[Tensor, " writer"], shape: tuple[int, ...], eps: float, everywhere: bool):
        self.fill, self.base, self.live, self.eps, self.everywhere = fill, fill.embed, live, eps, everywhere
        self.row = (1 + live.cumsum(0) - live.long()).tolist()  # of each vertex
        self.values = fill.embed.new_empty(shape)
        self.grads = self.fill_grads = self.position = None
        self.token = self.values.new_empty(0)
        if fill.each is not None and fill.each.requires_grad and torch.is_grad_enabled():
            self.fill_grads = torch.zeros_like(fill.each)
            self.token = _Open.apply(fill.each, self)

    def write(self, vertex: int, x: Float[Tensor, "n batch pos _"], weight: Tensor | None = None) -> None:
        """Puts value − fill of the vertices from `vertex` on into their rows, through `weight` if given."""
        if self.live[vertex : vertex + 1].any() or weight is not None:
            self.token = _Write.apply(self.token, x, weight, self, self.row[vertex])

    def read(self, mask: Float[Tensor, "b reader writer"], weight: Tensor | None = None, first: int = 0):
        """What the first readers see, normed and projected by `weight` [reader batch pos d_head]; what the others see."""
        return _Read.apply(self.token, mask, weight, self, first)

    def carried(self, n: int) -> Float[Tensor, "b p d"]:
        """The base with the gradient of the first n writers' constants: the input of a reader without live edges."""
        if self.fill_grads is None:
            return self.base
        total = self.fill.each[:n].sum(0)  # [p, d]
        total = total if self.position is None or len(total) == 1 else total[self.position][:, None]
        return self.base + (total - total.detach())

    def at(self, position: Int[Tensor, " batch"], rows: int) -> Stream:
        """A stream that goes on at one position of each example."""
        batch, d = self.values.shape[1], self.values.shape[-1]
        new = Stream(self.fill.at(position)._replace(each=None), self.live, (rows, batch, 1, d), self.eps, self.everywhere)
        new.fill = new.fill._replace(each=self.fill.each)
        new.base = self.base if self.base.shape[1] == 1 else self.base.expand(batch, -1, -1)[torch.arange(batch), position][:, None]
        new.position, new.fill_grads = position, self.fill_grads
        new.token = _At.apply(self.token, self, new)
        return new

    def gradient(self) -> Float[Tensor, "row batch pos d"]:
        if self.grads is None:
            self.grads = torch.zeros_like(self.values)
        return self.grads

    def add_fill_gradient(self, mask: Float[Tensor, "b reader writer"], grad: Float[Tensor, "reader batch pos d"], first: int):
        """To every constant what arrives along its ablated edges, live or not."""
        weight = 1 - mask if self.everywhere else (mask == 0).to(mask.dtype)
        to = self.fill_grads[first : first + mask.shape[-1]]  # [writer, 1 or pos, d]
        if to.shape[1] > 1 and self.position is not None:
            each = weight.expand(grad.shape[1], -1, -1).permute(2, 0, 1)[..., None, :] @ grad[:, :, 0].transpose(0, 1)
            to.index_add_(1, self.position, each[:, :, 0])
            return
        grad = (grad.sum(2) if to.shape[1] == 1 else grad.flatten(2))  # [reader, batch, d or pos d]
        if len(mask) == 1:
            grad, weight = grad.sum(1, keepdim=True), weight
        to.flatten(1).addmm_(weight.permute(2, 1, 0).flatten(1), grad.flatten(0, 1))


class _Open(torch.autograd.Function):
    """The start of a stream, where the gradients of all constants come out."""

    @staticmethod
    def forward(ctx, each, stream):
        ctx.stream = stream
        return each.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx, _):
        return ctx.stream.fill_grads, None


class _Write(torch.autograd.Function):
    @staticmethod
    def forward(ctx, token, x, weight, stream, row):
        ctx.weight, ctx.stream, ctx.row = weight, stream, row
        rows = stream.values[row : row + len(x)]
        if weight is None:
            rows.copy_(x)
        else:
            torch.bmm(x.flatten(1, 2), weight, out=rows.flatten(1, 2))
        ctx.n = len(x)
        return token.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx, token):
        grad = ctx.stream.gradient()[ctx.row : ctx.row + ctx.n]
        if ctx.weight is not None:
            grad = torch.bmm(grad.flatten(1, 2), ctx.weight.mT).unflatten(1, grad.shape[1:3])
        return token, grad, None, None, None


class _At(torch.autograd.Function):
    @staticmethod
    def forward(ctx, token, wide, narrow):
        ctx.streams = wide, narrow
        batch = torch.arange(wide.values.shape[1], device=token.device)
        narrow.values[: len(wide.values), :, 0] = wide.values[:, batch, narrow.position]
        return token.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx, token):
        wide, narrow = ctx.streams
        batch = torch.arange(wide.values.shape[1], device=token.device)
        wide.gradient()[:, batch, narrow.position] += narrow.gradient()[: len(wide.values), :, 0]
        return token, None, None


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx, token, mask, weight, stream, first):
        columns = stream.live[first : first + mask.shape[-1]].nonzero()[:, 0]
        kept = pick(mask, -1, columns)
        start, n = stream.row[first], 0 if weight is None else len(weight)
        rows = stream.values[start : start + len(columns)]
        if first == 0:
            stream.values[0] = stream.base
            rows = stream.values[: start + len(columns)]
            mixing = torch.cat((torch.ones_like(mask[..., :1]), kept), -1)
        else:
            mixing = kept
        _, batch, pos, d = rows.shape
        X = rows.new_empty(mask.shape[1], batch, pos, d)
        if len(mask) == batch:
            torch.bmm(mixing, rows.flatten(2).transpose(0, 1), out=X.flatten(2).transpose(0, 1))
        else:
            torch.mm(mixing[0], rows.flatten(1), out=X.flatten(1))
        ctx.stream, ctx.first, ctx.columns, ctx.weight, ctx.X = stream, first, columns, weight, X
        ctx.save_for_backward(mask)
        if n == 0:
            return X.new_empty(0), X.clone()
        heads = X[:n].flatten(1, 2)
        ctx.scale = (torch.linalg.vector_norm(heads, dim=-1, keepdim=True).square() / d + stream.eps).rsqrt()
        ctx.y = torch.bmm(heads, weight).mul_(ctx.scale)
        return ctx.y.unflatten(1, (batch, pos)).clone(), X[n:].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y, grad_x):
        (mask,), stream, X = ctx.saved_tensors, ctx.stream, ctx.X
        n = 0 if ctx.weight is None else len(ctx.weight)
        if n:
            heads, grad_y = X[:n].flatten(1, 2), grad_y.flatten(1, 2)
            along = (grad_y * ctx.y).sum(-1, keepdim=True) * ctx.scale.square() / X.shape[-1]
            heads.mul_(-along).baddbmm_(grad_y * ctx.scale, ctx.weight.mT)
        X[n:] = grad_x  # from here on X holds the gradient of the readers' inputs
        kept, start = pick(mask, -1, ctx.columns), stream.row[ctx.first]
        span = slice(start, start + len(ctx.columns))
        values, grads = stream.values[span], stream.gradient()[span]
        shared = len(mask) != X.shape[1]
        grad_mask = None
        if ctx.needs_input_grad[1]:
            if shared:
                grad_mask = (X.flatten(1) @ values.flatten(1).T)[None]
            else:
                grad_mask = torch.bmm(X.flatten(2).transpose(0, 1), values.flatten(2).permute(1, 2, 0))
            if len(ctx.columns) < mask.shape[-1]:
                grad_mask = torch.zeros_like(mask).index_copy_(-1, ctx.columns, grad_mask)
        if shared:
            grads.flatten(1).addmm_(kept[0].T, X.flatten(1))
        else:
            grads.flatten(2).transpose(0, 1).baddbmm_(kept.mT, X.flatten(2).transpose(0, 1))
        if stream.fill_grads is not None:
            stream.add_fill_gradient(mask, X, ctx.first)
        return stream.token.new_zeros(0), grad_mask, None, None, None
