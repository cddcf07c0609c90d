"""The buffer of the edge-masked model: what every writer wrote, mixed for every reader.

The plain form of a read is one einsum, and the tests hold the fast one to it:

input[reader] = Σ_writer mask[reader, writer] · (value − fill)[writer] + base

where `base` is what all edges carry when ablated. Here `value − fill` of all writers stands in one
buffer, so that the inputs of all readers of a layer are one batched product with it, and in
backward a second buffer collects the writers' gradients. Nothing is stacked, copied or kept per
reader. What it buys: `benchmarks/masked.py --step`, and the same with `--plain-buffer`.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

ROW_GAP = 528  # floats between rows: rows a multiple of 4 KB apart would fight for cache lines
COPIES = 6  # of the writers' rows, at most: values, gradients, inputs of three readers a head, gaps
MOST_KEPT = 1e9  # bytes of memory that wait for the next forward


class FillAtPositions(NamedTuple):
    """A fill at positions 1.. as the engine uses it: centred if the model's norms are; axes b and p
    may be 1."""

    embed: Float[Tensor, "b p d"]
    z: Float[Tensor, "layer head b p d_head"]
    attn: Float[Tensor, "layer b p d"]
    mlps: Float[Tensor, "layer b p d"]
    written: Float[Tensor, "writer p d"] | None  # constants as they enter the stream, with gradient

    def at(self, position: Int[Tensor, " batch"]) -> FillAtPositions:
        """The fill at one position of each example."""
        return FillAtPositions(*(at_position(part, position) for part in self[:4]), self.written)


def at_position(x: Tensor, position: Int[Tensor, " batch"]) -> Tensor:
    """x [… b p d] at one position of each example [… b 1 d]; what is the same at all positions
    stays as it is."""
    if x.shape[-2] == 1:
        return x
    rows = torch.arange(len(position), device=position.device)
    examples = x.expand(*x.shape[:-3], len(position), -1, -1)
    return examples[..., rows, position, :][..., None, :]


# what waits for the next forward of a masked model: a block of memory, and how many floats of it
# were used; nothing waits while a forward or its graph is alive
Waiting = list[tuple[Tensor, int]]


class Scratch:
    """The memory of one forward and its backward, which the next one uses again.

    A system hands out memory page by page, which on a CPU takes longer than to fill it, and a step
    needs half a gigabyte (devices keep theirs by themselves). A block is as large as a forward is
    expected to need: what is never touched costs nothing. What does not fit is allocated beside it,
    and the next block is as large as all of it. Buffers and the graph of a forward hold its
    scratch, so the memory waits again only when nothing can see it.
    """

    def __init__(self, like: Tensor, expected: int, waiting: Waiting):
        self.waiting = waiting
        self.used = 0  # floats
        self.most = 0  # that were used at once
        self.on_cpu = like.device.type == "cpu"
        self.block = like.new_empty(0)
        if self.on_cpu:
            block, wanted = waiting.pop() if waiting else (self.block, 0)
            wanted = max(wanted, expected)
            self.block = block if wanted <= len(block) else like.new_empty(wanted)

    def rows(self, n: int, *shape: int) -> Float[Tensor, "n ..."]:
        """n rows [n batch pos d] to be filled, with a gap after each."""
        width = prod(shape)
        start = self.used
        self.used += n * (width + ROW_GAP)
        self.most = max(self.most, self.used)
        if self.used <= len(self.block):
            flat = self.block[start : self.used]
        else:
            flat = self.block.new_empty(self.used - start)
        return flat.unflatten(0, (n, width + ROW_GAP))[:, :width].unflatten(1, shape)

    def __del__(self):
        if self.on_cpu and self.most * self.block.itemsize <= MOST_KEPT:
            self.waiting[:] = [(self.block, self.most)]


class WriterBuffer:
    """value − fill of every live writer so far; row 0 holds what the edges carry when all are
    ablated.

    Writes and reads are autograd functions that share the buffer and one more for its gradient.
    `token`, an empty tensor handed from write to write and into every read, tells autograd their
    order: a write's backward comes after those of all its readers. The buffers are used up by it:
    one backward for one forward.
    """

    def __init__(
        self,
        fill: FillAtPositions,
        live: Bool[Tensor, " writer"],
        shape: tuple[int, int, int],
        eps: float,
        everywhere: bool,
        scratch: Scratch,
    ):
        self.fill = fill
        self.base = fill.embed
        self.live = live
        self.eps = eps
        self.everywhere = everywhere  # constants get gradient along every edge
        self.row_of = [1, *(1 + live.cumsum(0)).tolist()]  # of each writer, and behind the last
        self.scratch = scratch
        self.values = self.scratch.rows(*shape, fill.embed.shape[-1])
        self.grads: Tensor | None = None
        self.fill_grads: Tensor | None = None
        self.position: Int[Tensor, " batch"] | None = None
        self.token = self.values.new_empty(0)

    def open(self) -> WriterBuffer:
        """The start of the chain of tokens, so the end of backward."""
        written = self.fill.written
        if written is not None and written.requires_grad and torch.is_grad_enabled():
            self.fill_grads = torch.zeros_like(written)
            self.token = _Open.apply(written, self)
        else:
            self.token = _Open.apply(self.token.requires_grad_(torch.is_grad_enabled()), self)
        return self

    def at(self, position: Int[Tensor, " batch"]) -> WriterBuffer:
        """A buffer that goes on, with all its writers, at one position of each example."""
        shape = (1 + int(self.live.sum()), len(position), 1)
        fill = self.fill.at(position)
        narrow = WriterBuffer(fill, self.live, shape, self.eps, self.everywhere, self.scratch)
        narrow.base = at_position(self.base, position)
        narrow.position = position
        narrow.fill_grads = self.fill_grads
        narrow.token = _At.apply(self.token, self, narrow)
        return narrow

    def write(
        self, vertex: int, x: Float[Tensor, "n batch pos _"], weight: Tensor | None = None
    ) -> None:
        """Puts value − fill of n live writers, the first one `vertex`, into their rows; through
        `weight` if given."""
        self.token = _Write.apply(self.token, x, weight, self, self.row_of[vertex])

    def read(
        self, mask: Float[Tensor, "b reader writer"], first: int = 0
    ) -> Float[Tensor, "reader batch pos d"]:
        """The readers' inputs; if `first` is not 0, only what the writers from there on add to
        them."""
        no_weight = self.values.new_empty(0, self.values.shape[-1], 0)
        return _Read.apply(self.token, mask, no_weight, self, first)[1]

    def project(
        self, mask: Float[Tensor, "b reader writer"], weight: Float[Tensor, "n d d_head"]
    ) -> tuple[Float[Tensor, "n batch pos d_head"], Float[Tensor, "rest batch pos d"]]:
        """The first n readers' inputs, normed and projected; the inputs of the other readers as
        they are."""
        return _Read.apply(self.token, mask, weight, self, 0)

    def ablated(self, n: int) -> Float[Tensor, "b p d"]:
        """The input of a reader of n writers all of whose edges are ablated, with the gradient of
        their constants."""
        if self.fill_grads is None:
            return self.base
        total = self.fill.written[None, :n].sum(1)
        if self.position is not None:
            total = at_position(total, self.position)
        return self.base + (total - total.detach())

    def gradient(self) -> Float[Tensor, "row batch pos d"]:
        if self.grads is None:
            self.grads = self.scratch.rows(*self.values.shape).zero_()
        return self.grads

    def add_fill_gradient(
        self,
        mask: Float[Tensor, "b reader writer"],
        grad: Float[Tensor, "reader batch pos d"],
        first: int,
    ) -> None:
        """To every constant, also of dead writers, what arrives along its ablated edges."""
        weight = 1 - mask if self.everywhere else (mask == 0).to(mask.dtype)
        to = self.fill_grads[first : first + mask.shape[-1]]  # [writer, 1 or pos, d]
        if to.shape[1] > 1 and self.position is not None:
            weight = weight.expand(grad.shape[1], -1, -1)
            to.index_add_(1, self.position, torch.einsum("brw,rbd->wbd", weight, grad[:, :, 0]))
            return
        grad = grad.sum(2) if to.shape[1] == 1 else grad.flatten(2)  # [reader, batch, d or pos d]
        if len(mask) == 1:
            grad = grad.sum(1, keepdim=True)
        by_edge = rearrange(weight, "b reader writer -> writer (reader b)")
        to.flatten(1).addmm_(by_edge, grad.flatten(0, 1))


class _Open(torch.autograd.Function):
    """Where the gradients of all constants come out in the end, and the buffers go."""

    @staticmethod
    def forward(ctx, written, buffer):
        ctx.buffer = buffer
        return written.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx, token):
        ctx.buffer.values = None
        ctx.buffer.grads = None
        return (token if ctx.buffer.fill_grads is None else ctx.buffer.fill_grads), None


class _At(torch.autograd.Function):
    """The rows of a buffer at one position of each example."""

    @staticmethod
    def forward(ctx, token, wide, narrow):
        ctx.wide = wide
        ctx.narrow = narrow
        narrow.values[: len(wide.values)] = at_position(wide.values, narrow.position)
        return token.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx, token):
        n, batch = ctx.wide.values.shape[:2]
        position = ctx.narrow.position
        rows = torch.arange(batch, device=position.device)
        ctx.wide.gradient()[:, rows, position] += ctx.narrow.gradient()[:n, :, 0]
        return token, None, None


class _Write(torch.autograd.Function):
    """Rows of the buffer, through a weight if there is one."""

    @staticmethod
    def forward(ctx, token, x, weight, buffer, row):
        ctx.weight = weight
        ctx.buffer = buffer
        ctx.rows = slice(row, row + len(x))
        rows = buffer.values[ctx.rows]
        if weight is None:
            rows.copy_(x)
        else:
            torch.bmm(x.flatten(1, 2), weight, out=rows.flatten(1, 2))
        return token.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx, token):
        grad = ctx.buffer.gradient()[ctx.rows]
        if ctx.weight is not None:
            grad = torch.bmm(grad.flatten(1, 2), ctx.weight.mT).unflatten(1, grad.shape[1:3])
        return token, grad, None, None, None


class _Read(torch.autograd.Function):
    """Mixes the writers for each reader; norm and projection of the first ones save nothing but the
    mixed input."""

    @staticmethod
    def forward(ctx, token, mask, weight, buffer, first):
        ctx.weight = weight
        ctx.buffer = buffer
        ctx.first = first
        last = first + mask.shape[-1]
        ctx.rows = slice(buffer.row_of[first], buffer.row_of[last])
        ctx.live = slice(None)
        if ctx.rows.stop - ctx.rows.start < mask.shape[-1]:
            ctx.live = buffer.live[first:last].nonzero()[:, 0]
        values = buffer.values[ctx.rows]
        kept = mask[..., ctx.live]
        if first == 0:  # the base is one more writer, whose edges are all kept
            buffer.values[0] = buffer.base
            values = buffer.values[: ctx.rows.stop]
            kept = torch.cat((torch.ones_like(mask[..., :1]), kept), -1)
        used = buffer.scratch.used
        x = buffer.scratch.rows(mask.shape[1], *values.shape[1:])
        if len(mask) == 1:
            torch.mm(kept[0], values.flatten(1), out=x.flatten(1))
        else:
            torch.bmm(kept, values.flatten(2).transpose(0, 1), out=x.flatten(2).transpose(0, 1))
        ctx.x = x
        n = len(weight)
        y = x.new_empty(0, *x.shape[1:3], weight.shape[-1])
        if n:
            inputs = x[:n].flatten(1, 2)
            norm = torch.linalg.vector_norm(inputs, dim=-1, keepdim=True)
            ctx.scale = norm.square_().div_(x.shape[-1]).add_(buffer.eps).rsqrt_()
            y = torch.bmm(inputs, weight).mul_(ctx.scale).unflatten(1, x.shape[1:3])
        ctx.save_for_backward(mask, y)
        others = x[n:].clone()
        if not any(ctx.needs_input_grad):  # nothing looks at x again
            buffer.scratch.used = used
        return y, others

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y, grad_x):
        if ctx.x is None:
            raise RuntimeError(
                "one backward for one masked forward: it uses up the buffers, so run the forward "
                "again"
            )
        mask, y = ctx.saved_tensors
        buffer = ctx.buffer
        x = ctx.x
        n = len(ctx.weight)
        if n:
            inputs = x[:n].flatten(1, 2)
            grad_y = grad_y.flatten(1, 2) * ctx.scale
            along = (grad_y * y.flatten(1, 2)).sum(-1, keepdim=True)
            along = along.mul_(ctx.scale).div_(-x.shape[-1])
            inputs.mul_(along).baddbmm_(grad_y, ctx.weight.mT)
        x[n:] = grad_x  # x now holds the gradient of the readers' inputs
        values = buffer.values[ctx.rows]
        grads = buffer.gradient()[ctx.rows]
        by_example = x.flatten(2).transpose(0, 1)
        kept = mask[..., ctx.live]
        grad_mask = None
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
        if buffer.fill_grads is not None:
            buffer.add_fill_gradient(mask, x, ctx.first)
        ctx.x = None
        return x.new_zeros(0), grad_mask, None, None, None
