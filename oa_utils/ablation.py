"""What replaces a component: how components are named, where their values sit, and the fills that each ablation makes.

A component's value is read raw, nothing folded: a head's z stands before W_O with its value bias in it, a neuron is
the MLP's hidden unit after the activation, `tok` is the token embedding without positions. Replacing it changes the
stream by (fill − value) · write. Position 0 (BOS) is the same for every prompt and is never replaced; neither is b_O.
"""

import hashlib
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from oa_utils import runs
from oa_utils.models import Model

ABLATIONS = ("zero", "mean", "resample", "counterfactual", "cf_mean", "optimal", "noise")
PARTIAL = ("counterfactual", "noise")  # the fill depends on the prompt
TOTAL = tuple(a for a in ABLATIONS if a not in PARTIAL)  # it knows nothing of the prompt
FAMILIES = ("position", "shared")  # of constants: one for each position, or one for all
WITH_FAMILY = ("mean", "cf_mean", "optimal")
KINDS = {"head": "a{}.h{}", "mlp": "m{}", "attn": "a{}", "neuron": "m{}.n{}", "tok": "tok"}
STAGE = {"tok": "pre", "z": "mid", "hidden": "post", "mlp": "post"}  # the stream that a change at a site is added to
LATE = 9  # the shared mean leaves out earlier positions, as in the paper, where prompts are long enough


@dataclass(frozen=True, eq=False)
class Subspace:
    """A component's projection onto the span of `basis`; what is orthogonal to it stays."""

    component: str
    basis: Float[Tensor, "k dim"]


@dataclass(frozen=True, eq=False)
class Site:
    """Where a component's value is: a slice of what block `layer` computes at `site`, heads laid side by side."""

    name: str
    kind: str
    site: str  # z, mlp, hidden or tok
    layer: int
    part: slice
    basis: Float[Tensor, "dim k"] | None = None  # orthonormal columns

    dim = property(lambda self: self.part.stop - self.part.start)
    stage = property(lambda self: STAGE[self.site])


def parse(component: str | Subspace, model: Model) -> Site:
    """The site of a component, or an error that says what there is."""
    if isinstance(component, Subspace):
        return _subspace(component, parse(component.component, model))
    text, layers, heads, width = str(component), model.n_layers, model.n_heads, model.d_head
    found = re.fullmatch(r"tok|a(0|[1-9]\d*)(\.h(0|[1-9]\d*))?|m(0|[1-9]\d*)(\.n(0|[1-9]\d*))?", text)
    layer, unit = ([int(number) for number in re.findall(r"\d+", text)] + [0, 0])[:2]
    if not found or layer >= layers or unit >= (heads if text[0] == "a" else model.d_mlp):
        raise ValueError(
            f"there is no component {component!r}: '{model.name}' has heads a0.h0 … a{layers - 1}.h{heads - 1}, attention "
            f"layers a0 … a{layers - 1}, MLPs m0 … m{layers - 1}, neurons like m0.n{model.d_mlp - 1}, and tok"
        )
    if ".h" in text:
        return Site(text, "head", "z", layer, slice(unit * width, (unit + 1) * width))
    if ".n" in text:
        return Site(text, "neuron", "hidden", layer, slice(unit, unit + 1))
    if text[0] == "a":
        return Site(text, "attn", "z", layer, slice(0, heads * width))
    return Site(text, *(("tok", "tok") if text == "tok" else ("mlp", "mlp")), layer, slice(0, model.d_model))


def _subspace(subspace: Subspace, site: Site) -> Site:
    basis = torch.as_tensor(subspace.basis).detach().to("cpu", torch.float32)
    if basis.ndim != 2 or not 1 <= len(basis) <= basis.shape[1] == site.dim:
        raise ValueError(f"a basis of a subspace of {site.name} has shape [k, {site.dim}], not {list(basis.shape)}")
    q, r = torch.linalg.qr(basis.T)  # [dim k]
    if not r.diagonal().abs().min() > 1e-5 * basis.norm(dim=1).max():
        raise ValueError(f"the basis of a subspace of {site.name} is not linearly independent (or not finite)")
    digest = hashlib.sha256(basis.contiguous().numpy().tobytes()).hexdigest()[:8]
    return replace(site, name=f"{site.name}:{len(basis)}d-{digest}", kind="subspace", basis=q)


def all_components(model: Model, kinds: Sequence[str] = ("head", "mlp")) -> list[str]:
    """Names of every component of these kinds: kind by kind in the order given, layer by layer within one."""
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise ValueError(f"unknown kind {', '.join(unknown)}; there are {', '.join(KINDS)}")
    units = {"head": model.n_heads, "neuron": model.d_mlp}
    every = [KINDS[k].format(l, i) for k in kinds for l in range(model.n_layers) for i in range(units.get(k, 1))]
    return list(dict.fromkeys(every))  # tok once


class Block:
    """What one block computes on a clean stream, each value [batch pos width] when it is first asked for."""

    def __init__(self, model: Model, layer: int, tokens: Int[Tensor, "batch pos"], pre: Float[Tensor, "batch pos d"]):
        self.model, self.layer, self.tokens, self.pre, self.own = model, layer, tokens, pre, model.layers[layer]

    tok = cached_property(lambda self: self.model.embed_tokens(self.tokens))
    z = cached_property(lambda self: self.model.attention(self.layer, self.own.ln1(self.pre)).flatten(-2))
    attn = cached_property(lambda self: self.model.attn_out(self.layer, self.z.unflatten(-1, (-1, self.model.d_head))))
    mid = cached_property(lambda self: self.pre + self.attn)
    hidden = cached_property(lambda self: self.own.mlp_hidden(self.own.ln2(self.mid)))
    mlp = cached_property(lambda self: self.own.mlp_out(self.hidden))
    post = cached_property(lambda self: self.mid + self.mlp)

    def value(self, site: Site) -> Float[Tensor, "batch pos dim"]:
        return getattr(self, site.site)[..., site.part]

    def write(self, site: Site) -> Float[Tensor, "dim d"] | None:
        """How a change of the value enters the stream; None where it is added as it is."""
        if site.site == "z":
            return self.own.W_O.flatten(0, 1)[site.part]
        if site.site == "hidden":
            off = self.pre.new_zeros(1, self.model.d_mlp)
            on = off.clone()
            on[:, site.part] = 1
            return self.own.mlp_out(on) - self.own.mlp_out(off)
        return None

    def replaced(self, site: Site, fill: Float[Tensor, "#batch pos dim"]) -> Float[Tensor, "batch pos d"]:
        """The stream at the site's stage, with this component's value replaced from position 1 on."""
        change = fill.to(self.pre.dtype) - self.value(site)
        if site.basis is not None:
            basis = site.basis.to(change)
            change = change @ basis @ basis.T
        if (write := self.write(site)) is not None:
            change = change @ write
        return getattr(self, site.stage) + F.pad(change[:, 1:], (0, 0, 1, 0))


class Stream:
    """Prompts on their way through the model: the clean stream that enters a layer is computed once and kept.

    Layers are best asked for upwards. `chunk` prompts make up a pass. Where memory is short nothing is kept.
    """

    def __init__(self, model: Model, tokens: Int[Tensor, "n pos"], last: Int[Tensor, " n"]):
        if not len(tokens) or int(last.min()) < 1:
            raise ValueError("there must be prompts, and each needs at least one token after BOS")
        self.model, self.tokens, self.last = model, tokens.to(model.device), last.to(model.device)
        self.layer, self.kept, many = 0, None, 16 * len(tokens)
        self.keep = runs.micro_batch(many, tokens.shape[1] * model.d_model * model.dtype.itemsize) == many
        self.chunk = runs.in_a_pass(model, tokens.shape[1])

    def chunks(self, size: int, rows: Int[Tensor, " k"] | None = None) -> Iterator[Int[Tensor, " b"]]:
        """Rows by length, so that each chunk can be cut behind its longest prompt."""
        rows = torch.arange(len(self.tokens)) if rows is None else rows
        return iter(rows[self.last[rows].argsort(stable=True).cpu()].split(size))

    @torch.no_grad()
    def enter(self, layer: int, rows: Int[Tensor, " b"]) -> Float[Tensor, "b pos d"]:
        """The stream at the input of a layer, cut behind the longest of these prompts."""
        length = int(self.last[rows].max()) + 1
        if not self.keep:
            return self.model.run(self.model.embed(self.tokens[rows, :length]), 0, layer)
        if self.kept is None or layer < self.layer:
            self.layer, self.kept = 0, self.model.embed(self.tokens)
        if layer > self.layer:
            self.kept = torch.cat([self.model.run(part, self.layer, layer) for part in self.kept.split(self.chunk)])
            self.layer = layer
        return self.kept[rows, :length]

    def block(self, layer: int, rows: Int[Tensor, " b"]) -> Block:
        pre = self.enter(layer, rows)
        return Block(self.model, layer, self.tokens[rows, : pre.shape[1]], pre)


def finish(model: Model, stream: Float[Tensor, "batch pos d"], start: int, last: Int[Tensor, " batch"]) -> Tensor:
    """Log-probabilities [batch vocab] at last positions, from the input of block `start` on."""
    end, rows = model.n_layers - 1, torch.arange(len(stream), device=stream.device)
    if start > end:  # here the stream is its last positions alone
        return model.log_probs(stream[:, 0])
    stream, block = model.run(stream, start, end), model.layers[end]
    x, positions = block.ln1(stream), torch.arange(stream.shape[1], device=stream.device)
    q = model.rotate(block.heads(x[rows, last][:, None], "q"), model.rotation(last[:, None]))
    k = model.rotate(block.heads(x, "k"), model.rotation(positions[None]))
    seen = (positions <= last[:, None])[:, None, None]  # [batch head query key]
    z = F.scaled_dot_product_attention(q, k, block.heads(x, "v"), seen, enable_gqa=k.shape[1] != q.shape[1])
    out = stream[rows, last] + model.attn_out(end, z.transpose(1, 2))[:, 0]
    return model.log_probs(out + block.mlp_out(block.mlp_hidden(block.ln2(out))))


def ablated(
    model: Model, block: Block, sites: Sequence[Site], fill: Callable[[Site, Tensor], Tensor], last: Int[Tensor, " b"]
) -> Float[Tensor, "site b vocab"]:
    """Log-probabilities with one component of this block replaced in each copy of the prompts (stages in order)."""
    x = torch.stack([block.replaced(site, fill(site, block.value(site))) for site in sites])
    start, mid = block.layer + (sites[0].stage != "pre"), len(last) * sum(site.stage == "mid" for site in sites)
    if start == model.n_layers:
        x = x[:, torch.arange(len(last)), last][:, :, None]
    x, own = x.flatten(0, 1), block.own
    if mid:
        x = torch.cat([x[:mid] + own.mlp_out(own.mlp_hidden(own.ln2(x[:mid]))), x[mid:]])
    return finish(model, x, start, last.repeat(len(sites))).unflatten(0, (len(sites), -1))


@dataclass(frozen=True, eq=False)
class Means:
    """A component's mean at each position that some prompt has, how many prompts have it, and the value's spread."""

    count: Int[Tensor, " pos"]
    mean: Float[Tensor, "pos dim"]
    std: Float[Tensor, " dim"]  # over prompts and positions from 1 on

    m = property(lambda self: int((self.count == self.count[0]).sum()) - 1)  # the last position that every prompt has

    def pooled(self, start: int) -> Float[Tensor, "1 dim"]:
        """The mean of all values at this position and behind it: each position counts by its prompts."""
        weight = self.count[start:, None] / self.count[start:].sum()
        return (self.mean[start:] * weight).sum(0, keepdim=True)

    def rows(self, family: str) -> Float[Tensor, "P dim"]:
        """Constants, of which position i takes row min(i, P−1). `position`: own means up to m−1, then one of all that
        is at m or behind it, so that no row tells a prompt by its length. `shared`: one row, of positions from 9 on (as
        in the paper; from 1 where some prompt ends by then)."""
        if family == "shared":
            return self.pooled(LATE if self.m > LATE else 1)
        return torch.cat([self.mean[: self.m], self.pooled(self.m)])


@torch.no_grad()
def stream_means(stream: Stream, sites: Sequence[Site]) -> dict[str, Means]:
    """Means of components of one layer, added up chunk by chunk over the positions that are part of a prompt."""
    longest, device = int(stream.last.max()) + 1, stream.last.device
    count = torch.zeros(longest, dtype=torch.int64, device=device)
    sums = {site.name: torch.zeros(2, longest, site.dim, dtype=torch.float64, device=device) for site in sites}
    for rows in stream.chunks(stream.chunk):
        block = stream.block(sites[0].layer, rows)
        length = block.pre.shape[1]
        inside = torch.arange(length, device=device) <= stream.last[rows, None]
        count[:length] += inside.sum(0)
        for site in sites:
            value = block.value(site).double() * inside[..., None]
            sums[site.name][:, :length] += torch.stack([value.sum(0), value.square().sum(0)])
    means, n = {}, count[1:].sum()
    for name, (total, squares) in sums.items():
        variance = squares[1:].sum(0) / n - (total[1:].sum(0) / n).square()
        means[name] = Means(count, (total / count[:, None]).float(), variance.clamp(min=0).sqrt().float())
    return means


def means(
    model: Model, tokens: Int[Tensor, "n pos"], last: Int[Tensor, " n"], sites: Sequence[Site]
) -> dict[str, Means]:
    """Means of any components over prompts, by component name."""
    stream, found = Stream(model, tokens, last), {}
    for layer in sorted({site.layer for site in sites}):
        found |= stream_means(stream, [site for site in sites if site.layer == layer])
    return found


# A fill says, for a layer and rows of prompts, what each site gets in place of its value: [1 or batch, pos, dim].
Fill = Callable[[int, Int[Tensor, " b"]], Callable[[Site, Tensor], Tensor]]


def zero(site: Site, model: Model) -> Float[Tensor, "1 dim"]:
    """Nothing read: what is left of a head is its value bias (the paper's numbers fold it into b_O), else zeros."""
    if site.site == "z":
        return model.layers[site.layer].b_V.flatten()[None, site.part].float()
    return torch.zeros(1, site.dim, device=model.device)


def constants(table: dict[str, Float[Tensor, "P dim"]]) -> Fill:
    """The same rows for every prompt: position i takes row min(i, P−1)."""

    def fill(site: Site, value: Tensor) -> Tensor:
        rows = table[site.name].to(value.device)
        return rows[torch.arange(value.shape[1], device=rows.device).clamp(max=len(rows) - 1)][None]

    return lambda layer, rows: fill


def activations(stream: Stream) -> Fill:
    """The component's values on other prompts, each laid under the prompt of the same row."""

    def at(layer: int, rows: Tensor) -> Callable[[Site, Tensor], Tensor]:
        block = stream.block(layer, rows)
        return lambda site, value: block.value(site)

    return at


def noise(std: dict[str, Float[Tensor, " dim"]], scale: float, shape: tuple[int, int], seed: int) -> Fill:
    """Gaussian noise on top of the value, `scale` times its spread; drawn by component, so grouping changes nothing."""

    def at(layer: int, rows: Tensor) -> Callable[[Site, Tensor], Tensor]:
        def fill(site: Site, value: Tensor) -> Tensor:
            rng = runs.generator(zlib.crc32(f"{site.name} {seed}".encode()))
            draw = torch.randn(*shape, site.dim, generator=rng)[rows, : value.shape[1]].to(value)
            return value + scale * std[site.name].to(value) * draw

        return fill

    return at
