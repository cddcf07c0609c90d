"""The buffer of the edge-masked model in its plain form: every writer kept as it is, every read
one einsum, gradients by autograd. Slow, but short enough to be checked by reading;
`benchmarks/masked.py --step --plain-buffer` says what the fast one buys, and the tests hold the two
to each other."""

import torch
from einops import einsum
from torch import Tensor

from oa_utils.buffer import FillAtPositions, WriterBuffer, at_position


class PlainBuffer(WriterBuffer):
    """The same methods as `oa_utils.buffer.WriterBuffer`."""

    def __init__(
        self, fill: FillAtPositions, live: Tensor, shape, eps: float, everywhere: bool, _=None
    ):
        self.fill = fill
        self.base = fill.embed
        self.live = live
        self.shape = shape
        self.eps = eps
        self.everywhere = everywhere
        self.position = None
        self.token = None
        self.rows: dict[int, Tensor] = {}  # value − fill [batch pos d] by writer

    def open(self) -> "PlainBuffer":
        return self

    def at(self, position: Tensor) -> "PlainBuffer":
        narrow = PlainBuffer(
            self.fill.at(position), self.live, self.shape, self.eps, self.everywhere
        )
        narrow.base = at_position(self.base, position)
        narrow.position = position
        narrow.rows = {writer: at_position(row, position) for writer, row in self.rows.items()}
        return narrow

    def write(self, vertex: int, x: Tensor, weight: Tensor | None = None) -> None:
        if weight is not None:
            x = einsum(x, weight, "n b p e, n e d -> n b p d")
        living = [writer for writer in range(vertex, len(self.live)) if self.live[writer]]
        self.rows |= dict(zip(living, x, strict=False))

    def constants(self, mask: Tensor, first: int) -> Tensor | float:
        """Zero, with the gradient of constants along the edges that are ablated."""
        written = self.fill.written
        if written is None or not written.requires_grad:
            return 0.0
        if self.position is not None:
            written = at_position(written[:, None], self.position)  # [writer b p d]
        else:
            written = written[:, None]
        passes = 1 - mask.detach() if self.everywhere else (mask == 0).to(mask.dtype)
        some = written[first : first + mask.shape[-1]]
        batch = max(len(mask), some.shape[1])
        some = some.expand(-1, batch, -1, -1)
        passes = passes.expand(batch, -1, -1)
        return einsum(passes, some - some.detach(), "b r w, w b p d -> r b p d")

    def read(self, mask: Tensor, first: int = 0) -> Tensor:
        writers = [w for w in range(first, first + mask.shape[-1]) if w in self.rows]
        here = [writer - first for writer in writers]
        values = torch.stack([self.rows[writer] for writer in writers])
        alpha = mask[..., here].expand(values.shape[1], -1, -1)
        x = einsum(alpha, values, "b r w, w b p d -> r b p d") + self.constants(mask, first)
        return x if first else x + self.base

    def project(self, mask: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        x = self.read(mask)
        inputs = x[: len(weight)]
        normed = inputs * (inputs.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return einsum(normed, weight, "r b p d, r d e -> r b p e"), x[len(weight) :]

    def ablated(self, n: int) -> Tensor:
        written = self.fill.written
        if written is None or not written.requires_grad:
            return self.base
        total = written[None, :n].sum(1)
        if self.position is not None:
            total = at_position(total, self.position)
        return self.base + (total - total.detach())
