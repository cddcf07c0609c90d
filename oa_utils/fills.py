"""Fills: the values that flow along ablated edges, and how the masked model sees them position by position."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

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
        wanted = ((*lead, d), (*lead, layers, heads, d_head), (*lead, layers, d))
        got = tuple(tuple(part.shape) for part in self)
        if len(lead) > 1 or 0 in lead or got != wanted:
            want = f"[{d}], [{layers}, {heads}, {d_head}], [{layers}, {d}]"
            raise ValueError(
                f"Constants(embed, heads, mlps) of '{model.name}' have shapes {want}, or those with one leading axis of "
                f"positions on each; got {', '.join(str(list(shape)) for shape in got)}"
            )
        parts = [part.to(model.device, model.dtype) for part in self]
        embed, z, mlps = parts if lead else [part[None] for part in parts]
        if len(embed) > 1:  # position 0 is never ablated, so row 0 is for nobody unless it is the only one
            at = torch.arange(1, length, device=embed.device).clamp(max=len(embed) - 1)
            embed, z, mlps = embed[at], z[at], mlps[at]
        written = torch.einsum("plhe,lhed->lhpd", z, masked.W_O)
        writers = torch.cat((written, masked.centre(mlps).transpose(0, 1)[:, None]), dim=1).flatten(0, 1)
        each = torch.cat((masked.centre(embed)[None], writers))
        with torch.no_grad():
            attn = written.sum(1) + masked.b_O[:, None]
        z = z.detach().permute(1, 2, 0, 3)[:, :, None]
        return Fill(each[0, None].detach(), z, attn[:, None], masked.centre(mlps.detach()).transpose(0, 1)[:, None], each)


class Activations(NamedTuple):
    """What every vertex wrote on other prompts, at every position."""

    embed: Float[Tensor, "batch pos d"]
    heads: Float[Tensor, "batch pos layer head d_head"]
    attn: Float[Tensor, "batch pos layer d"]  # the heads of a layer summed, with b_O
    mlps: Float[Tensor, "batch pos layer d"]

    def rows(self, index: Int[Tensor, " n"] | slice) -> Activations:
        """The fill of these examples, for micro-batches or for several masks on one prompt."""
        return Activations(*(part[index] for part in self))

    def _at(self, masked: MaskedModel, batch: int, length: int) -> Fill:
        model = masked.model
        wanted = (batch, length, model.n_layers, model.n_heads, model.d_head)
        if tuple(self.heads.shape) != wanted:
            raise ValueError(
                f"activations that fill {batch} prompts of {length} tokens have heads of shape {list(wanted)}, got "
                f"{list(self.heads.shape)}; use fill.rows(index) to repeat or select prompts"
            )
        embed, heads, attn, mlps = (part[:, 1:].detach() for part in self)
        attn, mlps = (masked.centre(part).permute(2, 0, 1, 3) for part in (attn, mlps))
        return Fill(masked.centre(embed), heads.permute(2, 3, 0, 1, 4), attn, mlps, None)


class Fill(NamedTuple):
    """A fill at positions 1.. as the engine uses it: centred where the model's norms do so, axes of size 1 broadcast."""

    embed: Float[Tensor, "b p d"]
    z: Float[Tensor, "layer head b p d_head"]
    attn: Float[Tensor, "layer b p d"]
    mlps: Float[Tensor, "layer b p d"]
    each: Float[Tensor, "writer p d"] | None  # constants in the stream's space: what carries their gradient

    def at(self, position: Int[Tensor, " batch"]) -> Fill:
        """The fill at one position of each example (counted from position 1)."""
        if self.embed.shape[-2] == 1:
            return self
        rows = torch.arange(len(position), device=position.device)

        def one(part: Tensor) -> Tensor:
            return part.expand(*part.shape[:-3], len(position), -1, -1)[..., rows, position, :][..., None, :]

        return Fill(one(self.embed), one(self.z), one(self.attn), one(self.mlps), self.each)
