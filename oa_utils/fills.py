"""Fills, the values that flow along ablated edges; and the stream, where what is written stands beside them."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from oa_utils.masked import MaskedModel


class Constants(NamedTuple):
    """One value for each writer; with a leading axis P on each, position i uses row min(i, P-1)."""

    embed: Float[Tensor, "*P d"]
    heads: Float[Tensor, "*P layer head d_head"]  # z before W_O, value bias included
    mlps: Float[Tensor, "*P layer d"]

    def rows(self, index: Tensor | slice) -> Constants:
        """The fill of these examples: constants are the same for all."""
        return self

    def _at(self, masked: MaskedModel, batch: int, length: int) -> Fill:
        model = masked.model
        layers, heads, d, d_head = model.n_layers, model.n_heads, model.d_model, model.d_head
        lead = self.embed.shape[:-1]
        got = tuple(tuple(part.shape) for part in self)
        if len(lead) > 1 or 0 in lead or got != ((*lead, d), (*lead, layers, heads, d_head), (*lead, layers, d)):
            raise ValueError(
                f"Constants(embed, heads, mlps) of '{model.name}' have shapes [{d}], [{layers}, {heads}, {d_head}], "
                f"[{layers}, {d}], or these with one leading axis of positions on each; got {', '.join(map(str, got))}"
            )
        parts = [part.to(model.device, model.dtype) for part in self]
        embed, z, mlps = parts if lead else [part[None] for part in parts]
        if len(embed) > 1:  # row 0 is for position 0, which is never ablated, unless it is the only row
            at = torch.arange(1, length, device=embed.device).clamp(max=len(embed) - 1)
            embed, z, mlps = embed[at], z[at], mlps[at]
        embed, mlps = masked.centre(embed)[None], masked.centre(mlps).transpose(0, 1)[:, None]  # [1 p d], [layer 1 p d]
        heads = torch.einsum("plhe,lhed->lhpd", z, masked.W_O)
        each = torch.cat((embed, torch.cat((heads, mlps), dim=1).flatten(0, 1)))
        attn = heads.sum(1, keepdim=True) + masked.b_O[:, None, None]
        z = z.permute(1, 2, 0, 3)[:, :, None]
        return Fill(embed.detach(), z.detach(), attn.detach(), mlps.detach(), each)


class Activations(NamedTuple):
    """What every vertex wrote on other prompts, at every position."""

    embed: Float[Tensor, "batch pos d"]
    heads: Float[Tensor, "batch pos layer head d_head"]
    attn: Float[Tensor, "batch pos layer d"]  # the heads of a layer summed, with b_O
    mlps: Float[Tensor, "batch pos layer d"]

    def rows(self, index: Int[Tensor, " n"] | slice) -> Activations:
        """The fill of these examples, for micro-batches or for several masks on one prompt."""
        if isinstance(index, slice):
            return Activations(*(part[index] for part in self))
        return Activations(*(part.index_select(0, index.to(part.device)) for part in self))  # ten times as fast as part[index]

    def cut(self, length: int) -> Activations:
        return Activations(*(part[:, :length] for part in self))

    def _at(self, masked: MaskedModel, batch: int, length: int) -> Fill:
        model = masked.model
        wanted = [batch, length, model.n_layers, model.n_heads, model.d_head]
        if list(self.heads.shape) != wanted:
            raise ValueError(
                f"activations that fill {batch} prompts of {length} tokens have heads of shape {wanted}, got "
                f"{list(self.heads.shape)}; fill.rows(index) selects or repeats prompts"
            )
        embed, heads, attn, mlps = (part[:, 1:].detach() for part in self)
        attn, mlps = (masked.centre(part).permute(2, 0, 1, 3) for part in (attn, mlps))
        return Fill(masked.centre(embed), heads.permute(2, 3, 0, 1, 4), attn, mlps, None)


class Fill(NamedTuple):
    """A fill at positions 1.. as the engine uses it: centred if the model's norms are; axes b and p may have size 1."""

    embed: Float[Tensor, "b p d"]
    z: Float[Tensor, "layer head b p d_head"]
    attn: Float[Tensor, "layer b p d"]
    mlps: Float[Tensor, "layer b p d"]
    each: Float[Tensor, "writer p d"] | None  # constants as they enter the stream: what carries their gradient

    def at(self, position: Int[Tensor, " batch"]) -> Fill:
        """The fill at one position of each example."""
        return Fill(*(at_position(part, position) for part in self[:4]), self.each)


def at_position(x: Float[Tensor, "*any b p d"], position: Int[Tensor, " batch"]) -> Float[Tensor, "*any b 1 d"]:
    """x at one position of each example; what is the same at all positions stays as it is."""
    if x.shape[-2] == 1:
        return x
    rows = torch.arange(len(position), device=position.device)
    return x.expand(*x.shape[:-3], len(position), -1, -1)[..., rows, position, :][..., None, :]


def pick(x: Tensor, dim: int, index: Int[Tensor, " n"]) -> Tensor:
    """x at these indices, which are in order, so that all of them means x itself."""
    return x if len(index) == x.shape[dim] else x.index_select(dim, index)


def rows_of(like: Tensor, n: int, *shape: int) -> Float[Tensor, "n batch pos d"]:
    """n rows to be filled, with a gap after each: rows a multiple of 4 KB apart would fight for cache lines."""
    size = prod(shape)
    return like.new_empty(n, size + 528)[:, :size].unflatten(1, shape)


class Stream:
    """value − fill of every live writer so far, in one buffer; row 0 holds what the edges carry when all are ablated.

    Writes and reads are autograd functions that share the buffer and one more for its gradient. `token`, an empty
    tensor handed from write to write and into every read, tells autograd their order: a write's backward comes after
    those of all its readers. The buffers are used up by it: one backward for one forward.
    """

    def __init__(self, fill: Fill, live: Bool[Tensor, " writer"], shape: tuple[int, int, int], eps: float, everywhere):
        self.fill, self.base, self.live, self.eps, self.everywhere = fill, fill.embed, live, eps, everywhere
        self.row = [1, *(1 + live.cumsum(0)).tolist()]  # of each writer, and behind the last
        self.values = rows_of(fill.embed, *shape, fill.embed.shape[-1])
        self.grads = self.fill_grads = self.position = None
        self.token = self.values.new_empty(0)

    def open(self) -> Stream:
        """The start of the chain of tokens, so the end of backward."""
        each = self.fill.each
        if each is not None and each.requires_grad and torch.is_grad_enabled():
            self.fill_grads = torch.zeros_like(each)
        else:
            each = self.token.requires_grad_(torch.is_grad_enabled())
        self.token = _Open.apply(each, self)
        return self

    def at(self, position: Int[Tensor, " batch"]) -> Stream:
        """A stream that goes on, with all its writers, at one position of each example."""
        shape = 1 + int(self.live.sum()), len(position), 1
        new = Stream(self.fill.at(position), self.live, shape, self.eps, self.everywhere)
        new.base, new.position, new.fill_grads = at_position(self.base, position), position, self.fill_grads
        new.token = _At.apply(self.token, self, new)
        return new

    def write(self, vertex: int, x: Float[Tensor, "n batch pos _"], weight: Tensor | None = None) -> None:
        """Puts value − fill of n live writers, the first one `vertex`, into their rows; through `weight` if given."""
        self.token = _Write.apply(self.token, x, weight, self, self.row[vertex])

    def read(self, mask: Float[Tensor, "b reader writer"], first: int = 0) -> Float[Tensor, "reader batch pos d"]:
        """The readers' inputs; if `first` is not 0, only what the writers from there on add to them."""
        return _Read.apply(self.token, mask, self.values.new_empty(0, self.values.shape[-1], 0), self, first)[1]

    def project(self, mask: Float[Tensor, "b reader writer"], weight: Float[Tensor, "n d d_head"]):
        """The first n readers' inputs, normed and projected [n batch pos d_head]; the inputs of the other readers."""
        return _Read.apply(self.token, mask, weight, self, 0)

    def ablated(self, n: int) -> Float[Tensor, "b p d"]:
        """The input of a reader of n writers all of whose edges are ablated, with the gradient of their constants."""
        if self.fill_grads is None:
            return self.base
        total = self.fill.each[None, :n].sum(1)
        total = total if self.position is None else at_position(total, self.position)
        return self.base + (total - total.detach())

    def gradient(self) -> Float[Tensor, "row batch pos d"]:
        if self.grads is None:
            self.grads = rows_of(self.values, *self.values.shape).zero_()
        return self.grads

    def add_fill_gradient(self, mask: Float[Tensor, "b r writer"], grad: Float[Tensor, "r batch pos d"], first: int):
        """To every constant, also of dead writers, what arrives along its ablated edges."""
        weight = 1 - mask if self.everywhere else (mask == 0).to(mask.dtype)
        to = self.fill_grads[first : first + mask.shape[-1]]  # [writer, 1 or pos, d]
        if to.shape[1] > 1 and self.position is not None:
            weight = weight.expand(grad.shape[1], -1, -1)
            to.index_add_(1, self.position, torch.einsum("brw,rbd->wbd", weight, grad[:, :, 0]))
            return
        grad = grad.sum(2) if to.shape[1] == 1 else grad.flatten(2)  # [reader, batch, d or pos d]
        grad = grad if len(mask) > 1 else grad.sum(1, keepdim=True)
        to.flatten(1).addmm_(weight.permute(2, 1, 0).flatten(1), grad.flatten(0, 1))


class _Open(torch.autograd.Function):
    """Where the gradients of all constants come out in the end, and the buffers go."""

    @staticmethod
    def forward(ctx, each, stream):
        ctx.stream = stream
        return each.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx, token):
        ctx.stream.values = ctx.stream.grads = None
        return token if ctx.stream.fill_grads is None else ctx.stream.fill_grads, None


class _At(torch.autograd.Function):
    @staticmethod
    def forward(ctx, token, wide, narrow):
        ctx.wide, ctx.narrow = wide, narrow
        narrow.values[: len(wide.values)] = at_position(wide.values, narrow.position)
        return token.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx, token):
        n, batch, position = *ctx.wide.values.shape[:2], ctx.narrow.position
        ctx.wide.gradient()[:, torch.arange(batch, device=position.device), position] += ctx.narrow.gradient()[:n, :, 0]
        return token, None, None


class _Write(torch.autograd.Function):
    @staticmethod
    def forward(ctx, token, x, weight, stream, row):
        ctx.weight, ctx.stream, ctx.rows = weight, stream, slice(row, row + len(x))
        rows = stream.values[ctx.rows]
        if weight is None:
            rows.copy_(x)
        else:
            torch.bmm(x.flatten(1, 2), weight, out=rows.flatten(1, 2))
        return token.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx, token):
        grad = ctx.stream.gradient()[ctx.rows]
        if ctx.weight is not None:
            grad = torch.bmm(grad.flatten(1, 2), ctx.weight.mT).unflatten(1, grad.shape[1:3])
        return token, grad, None, None, None


class _Read(torch.autograd.Function):
    """Mixes the writers for each reader; norm and projection of the first ones save nothing but the mixed input."""

    @staticmethod
    def forward(ctx, token, mask, weight, stream, first):
        last = first + mask.shape[-1]
        ctx.rows = slice(stream.row[first], stream.row[last])
        ctx.live = slice(None)
        if ctx.rows.stop - ctx.rows.start < mask.shape[-1]:
            ctx.live = stream.live[first:last].nonzero()[:, 0]
        ctx.weight, ctx.stream, ctx.first, n = weight, stream, first, len(weight)
        values, kept = stream.values[ctx.rows], mask[..., ctx.live]
        if first == 0:  # the base is one more writer, whose edges are all kept
            stream.values[0] = stream.base
            values, kept = stream.values[: ctx.rows.stop], torch.cat((torch.ones_like(mask[..., :1]), kept), -1)
        x = rows_of(values, mask.shape[1], *values.shape[1:])
        if len(mask) == 1:
            torch.mm(kept[0], values.flatten(1), out=x.flatten(1))
        else:
            torch.bmm(kept, values.flatten(2).transpose(0, 1), out=x.flatten(2).transpose(0, 1))
        ctx.x, y = x, x.new_empty(0, *x.shape[1:3], weight.shape[-1])
        if n:
            inputs = x[:n].flatten(1, 2)
            norm = torch.linalg.vector_norm(inputs, dim=-1, keepdim=True)
            ctx.scale = norm.square_().div_(x.shape[-1]).add_(stream.eps).rsqrt_()
            y = torch.bmm(inputs, weight).mul_(ctx.scale).unflatten(1, x.shape[1:3])
        ctx.save_for_backward(mask, y)
        return y, x[n:].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y, grad_x):
        if ctx.x is None:
            raise RuntimeError("one backward for one masked forward: it uses up the buffers, so run the forward again")
        (mask, y), stream, x, n = ctx.saved_tensors, ctx.stream, ctx.x, len(ctx.weight)
        if n:
            inputs, grad_y = x[:n].flatten(1, 2), grad_y.flatten(1, 2) * ctx.scale
            along = (grad_y * y.flatten(1, 2)).sum(-1, keepdim=True).mul_(ctx.scale).div_(-x.shape[-1])
            inputs.mul_(along).baddbmm_(grad_y, ctx.weight.mT)
        x[n:] = grad_x  # x now holds the gradient of the readers' inputs
        values, grads, grad_mask = stream.values[ctx.rows], stream.gradient()[ctx.rows], None
        by_example, kept = x.flatten(2).transpose(0, 1), mask[..., ctx.live]
        if ctx.needs_input_grad[1]:
            if len(mask) == 1:
                grad_mask = (x.flatten(1) @ values.flatten(1).T)[None]
            else:
                grad_mask = torch.bmm(by_example, values.flatten(2).permute(1, 2, 0))
            if len(values) < mask.shape[-1]:
                grad_mask = torch.zeros_like(mask).index_copy_(-1, ctx.live, grad_mask)
        if len(mask) == 1:
            grads.flatten(1).addmm_(kept[0].T, x.flatten(1))
        else:
            grads.flatten(2).transpose(0, 1).baddbmm_(kept.mT, by_example)
        if stream.fill_grads is not None:
            stream.add_fill_gradient(mask, x, ctx.first)
        ctx.x = None
        return x.new_zeros(0), grad_mask, None, None, None
