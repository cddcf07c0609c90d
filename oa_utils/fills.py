"""What replaces a value: one entry for each ablation, with its form for single components and its
form for edges.

An `Ablation` is a name with a rule. A rule gives constants (made from the train prompts), or other
prompts whose values are used, or noise on top of the value; both forms follow from it.
`component_fills` is what stands in for the components of one layer, one after the other;
`edge_fill` is what flows along all ablated edges of a circuit at once.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from oa_utils import machine
from oa_utils.models import Model, exact
from oa_utils.sites import CleanPrompts, Site, attention_site, find
from oa_utils.tasks import Task

if TYPE_CHECKING:
    from oa_utils.masked import MaskedModel

# of constants: one for each position that all prompts have, one for all positions, one for each
# position that some prompt has, one for each position counted from the last token
FAMILIES = ("position", "shared", "by_position", "from_end")
# the shared mean leaves out earlier positions where prompts are long enough (the paper says j > 9,
# its code takes j ≥ 9)
FIRST_SHARED = 9
KEPT_BYTES = 5e8  # of activations that a search keeps and does not compute anew in every step


# ---- values that fill edges


class Constants(NamedTuple):
    """One value for each writer; with a leading axis P on each, position i uses row min(i, P-1)."""

    embed: Float[Tensor, "*P d"]
    # z before W_O, value bias included; of whole layers [… layer 1 d], what they write
    heads: Float[Tensor, "*P layer head d_head"]
    mlps: Float[Tensor, "*P layer d"]

    def rows(self, index: Tensor | slice) -> Constants:
        """The fill of these examples: constants are the same for all."""
        return self

    def clone(self) -> Constants:
        return Constants(*(part.detach().clone() for part in self))


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
        # index_select is ten times as fast as part[index]
        return Activations(*(part.index_select(0, index.to(part.device)) for part in self))

    def cut(self, length: int) -> Activations:
        return Activations(*(part[:, :length] for part in self))


# ---- means over prompts


@dataclass(frozen=True, eq=False)
class PositionMeans:
    """A component's mean at each position that some prompt has, how many prompts have it, and its
    spread; positions count from BOS, or from the last token backwards."""

    count: Int[Tensor, " pos"]
    mean: Float[Tensor, "pos dim"]
    std: Float[Tensor, " dim"]  # over prompts and positions, BOS left out

    @property
    def common_end(self) -> int:
        """The last position that every prompt has."""
        return int((self.count == self.count[0]).sum()) - 1

    @property
    def scale(self) -> float:
        """The spread as one number: root mean square over coordinates."""
        return max(self.std.square().mean().sqrt().item(), 1e-6)

    def pooled(self, start: int) -> Float[Tensor, "1 dim"]:
        """The mean of all values at this position and behind it: each position counts by its
        prompts."""
        weight = self.count[start:, None] / self.count[start:].sum()
        return (self.mean[start:] * weight).sum(0, keepdim=True)

    def rows(self, family: str) -> Float[Tensor, "P dim"]:
        """Constants, of which position i takes row min(i, P−1).

        `position` and `from_end`: own means up to the last position that every prompt has, where
        one row is pooled from all that is there or behind, so that no row tells a prompt by its
        length. `by_position`: own means wherever some prompt is. `shared`: one row, of positions
        from 9 on (as the paper's code; its text says behind 9), or from 1 where some prompt ends
        by then.
        """
        end = self.common_end
        if family == "shared":
            return self.pooled(FIRST_SHARED if end > FIRST_SHARED else 1)
        if family == "by_position":
            return self.mean
        if family == "position" and self.count[-1] < self.count[0]:
            warnings.warn(
                f"prompts of different lengths: constants of family 'position' are one for each "
                f"position up to {end - 1} and one for all from {end} on, where the shortest "
                "prompt ends; 'by_position' has one for each, 'from_end' counts from the end",
                stacklevel=2,
            )
        return torch.cat([self.mean[:end], self.pooled(end)])


@torch.no_grad()
def layer_means(
    prompts: CleanPrompts, sites: Sequence[Site], from_end: bool = False
) -> dict[str, PositionMeans]:
    """Means of components of one layer, added up over the positions that are part of a prompt."""
    longest = int(prompts.last.max()) + 1 - from_end  # BOS has no place when counting from the end
    device = prompts.last.device
    count = torch.zeros(longest, dtype=torch.int64, device=device)
    sums = {site.name: exact(torch.zeros(2, longest, site.dim, device=device)) for site in sites}

    def of_some(rows: Int[Tensor, " b"]) -> tuple[Tensor, dict[str, Tensor]]:
        """How many prompts have each place, and the sums of values and squares there."""
        block = prompts.block(sites[0].layer, rows)
        length = block.before.shape[1] - from_end
        last = prompts.last[rows, None]
        places = torch.arange(length, device=device).expand(len(rows), -1)
        if from_end:
            places = last - places
        inside = (places <= last) & (places >= from_end)
        found = {}
        for site in sites:
            value = block.value(site).take_along_dim(places.clamp(min=0)[..., None], 1)
            value = exact(value * inside[..., None])
            found[site.name] = torch.stack([value.sum(0), value.square().sum(0)])
        return inside.sum(0), found

    for inside, found in prompts.in_passes(of_some):
        count[: len(inside)] += inside
        for name, values in found.items():
            sums[name][:, : len(inside)] += values
    means = {}
    first = 0 if from_end else 1
    n = int(count[first:].sum())
    for name, (total, squares) in sums.items():
        variance = squares[first:].sum(0) / n - (total[first:].sum(0) / n).square()
        std = variance.clamp(min=0).sqrt().float().to(device)
        mean = (total / count[:, None].to(total.device)).float().to(device)
        means[name] = PositionMeans(count, mean, std)
    return means


# ---- ablations

MeansOf = Callable[[str], PositionMeans]  # of a site, over train `prompts` or `counterfactuals`
ConstantRule = Callable[[Site, Model, MeansOf, str], Float[Tensor, "P dim"]]
Draw = int | torch.Generator  # a derangement of the whole part by its seed, or partners drawn anew
PromptRule = Callable[[Task, Int[Tensor, " b"], Draw], Int[Tensor, "b pos"]]


class Ablation(str):
    """The name of an ablation, with the rule that makes its fills. Wherever a name goes, one of
    these can go.

    One of: `constants(site, model, means, family)` gives rows [P, dim] for a component, from
    `means("prompts").rows(family)` and the like; `prompts(task, rows, draw)` gives other prompts,
    laid under those of these rows; `noise` adds noise (it has no form for edges). The name goes
    into every result: a changed rule wants another name.
    """

    constants: ConstantRule | None
    prompts: PromptRule | None
    noise: bool
    total: bool  # the fill knows nothing of the prompt
    families: bool  # its constants can be one for each position, or one for all
    trained: bool  # the constants are only where training starts
    random: bool  # several draws are averaged
    counterfactuals: bool  # it needs a task that has them

    def __new__(
        cls,
        name: str,
        *,
        constants: ConstantRule | None = None,
        prompts: PromptRule | None = None,
        noise: bool = False,
        total: bool = True,
        families: bool = False,
        trained: bool = False,
        random: bool = False,
        counterfactuals: bool = False,
    ) -> Ablation:
        self = super().__new__(cls, name)
        self.constants = constants
        self.prompts = prompts
        self.noise = noise
        self.total = total
        self.families = families
        self.trained = trained
        self.random = random
        self.counterfactuals = counterfactuals
        return self

    def check(
        self, task: Task, edges: bool = False, parts: Sequence[str] = ("train", "test")
    ) -> None:
        """Refuses a task that lacks what the rule needs in the parts where it is used, and edges
        where there is no form for them."""
        if edges and self.noise:
            forms = [name for name, ablation in ABLATIONS.items() if not ablation.noise]
            raise ValueError(f"'{self}' has no form for edges: there are {', '.join(forms)}")
        if self.counterfactuals:
            task.need_counterfactual()
        if self.prompts and self.random:
            for part in parts:
                getattr(task, part).partners()


def _zero(site: Site, model: Model, means: MeansOf, family: str) -> Float[Tensor, "1 dim"]:
    """What is left of a head that read nothing is its value bias (the paper's numbers fold it into
    b_O), and of a whole attention layer what it writes of these."""
    block = model.layers[site.layer]
    if site.value == "z":
        bias = rearrange(block.b_V, "head e -> 1 (head e)")
        return bias[:, site.part].float()
    if site.value == "attn":
        return block.attn_out(block.b_V[None, None])[0].float()
    return torch.zeros(1, site.dim, device=model.device)


def _mean(site: Site, model: Model, means: MeansOf, family: str) -> Float[Tensor, "P dim"]:
    return means("prompts").rows(family)


def _cf_mean(site: Site, model: Model, means: MeansOf, family: str) -> Float[Tensor, "P dim"]:
    return means("counterfactuals").rows(family)


def _counterfactual(part: Task, rows: Int[Tensor, " b"], draw: Draw) -> Int[Tensor, "b pos"]:
    return part.need_counterfactual()[rows]


def _resample(part: Task, rows: Int[Tensor, " b"], draw: Draw) -> Int[Tensor, "b pos"]:
    """Another prompt for each, never itself, laid under it."""
    if isinstance(draw, int):
        partners = part.partners(draw)[rows]
    else:
        partners = (rows + torch.randint(1, len(part), rows.shape, generator=draw)) % len(part)
    both = part[torch.cat([rows, partners])]
    swapped = torch.arange(len(both)).roll(len(rows))
    return both.resampled(swapped)[: len(rows)]


ABLATIONS = {
    ablation: ablation
    for ablation in (
        Ablation("zero", constants=_zero),
        Ablation("mean", constants=_mean, families=True),
        Ablation("resample", prompts=_resample, random=True),
        Ablation("counterfactual", prompts=_counterfactual, counterfactuals=True, total=False),
        Ablation("cf_mean", constants=_cf_mean, families=True, counterfactuals=True),
        Ablation("optimal", constants=_mean, families=True, trained=True),
        Ablation("noise", noise=True, random=True, total=False),
    )
}


def find_ablation(name: str) -> Ablation:
    """The ablation of that name; an `Ablation` of one's own is itself."""
    if isinstance(name, Ablation):
        return name
    if name not in ABLATIONS:
        raise ValueError(f"there is no ablation {name!r}: there are {', '.join(ABLATIONS)}")
    return ABLATIONS[name]


# ---- the form for components

SiteFill = Callable[[Site, Tensor], Tensor]  # of a site and its value: [1 or batch, pos, dim]
ComponentFill = Callable[[int, Int[Tensor, " b"]], SiteFill]  # of a layer and rows of prompts


class TaskValues:
    """The prompts of a task on a model, with what is computed on them once: clean streams and
    means."""

    def __init__(self, model: Model, task: Task):
        self.model = model
        self.task = task
        self.part = cache(partial(getattr, task))  # of the task, by name
        self.prompts = cache(self._prompts)

    def _prompts(self, part: str, rule: Ablation | None = None, draw: int = 0) -> CleanPrompts:
        """A part's prompts, or those that an ablation lays under them."""
        task = self.part(part)
        tokens = task.tokens
        if rule is not None:
            tokens = rule.prompts(task, torch.arange(len(task)), draw)
        return CleanPrompts(self.model, tokens, task.last)

    def means(
        self, sites: Sequence[Site], source: str = "prompts", family: str = "position"
    ) -> dict[str, PositionMeans]:
        """Means over the train part, of components of one layer, in a family's order."""
        rule = None if source == "prompts" else ABLATIONS["counterfactual"]
        return layer_means(self.prompts("train", rule), sites, family == "from_end")

    def constants(
        self, ablation: Ablation, family: str, sites: Sequence[Site]
    ) -> dict[str, Float[Tensor, "P dim"]]:
        """An ablation's constants for components of one layer, by name (of trained ones: the
        start)."""
        measured = cache(lambda source: self.means(sites, source, family))
        return {
            site.name: ablation.constants(
                site, self.model, lambda source, site=site: measured(source)[site.name], family
            )
            for site in sites
        }

    def component_fills(
        self,
        ablation: Ablation,
        family: str,
        part: str,
        sites: Sequence[Site],
        draws: Sequence[int] = (0,),
        noise: float = 3.0,
    ) -> list[ComponentFill]:
        """What an ablation puts in the place of components of one layer: one fill for each draw."""
        if not ablation.random:
            draws = draws[:1]
        if ablation.noise:
            std = {name: means.std for name, means in self.means(sites).items()}
            shape = self.part(part).tokens.shape
            return [noise_fill(std, noise, (shape[0], shape[1]), seed) for seed in draws]
        if ablation.prompts:
            return [activation_fill(self.prompts(part, ablation, draw)) for draw in draws]
        return [self.constant_fill(self.constants(ablation, family, sites), family, part)]

    def rows_at(
        self, family: str, part: str, rows: Int[Tensor, " b"], length: int, n_rows: int
    ) -> Int[Tensor, "#b pos"]:
        """Which of a family's rows each position of these prompts takes: position i takes row
        min(i, P−1), and i counts from the last token where the family does."""
        places = torch.arange(length)[None]
        if family == "from_end":
            places = self.part(part).last[rows, None] - places
        return places.clamp(0, n_rows - 1)

    def constant_fill(
        self, table: dict[str, Float[Tensor, "P dim"]], family: str, part: str
    ) -> ComponentFill:
        """Constants of a family in the prompts of a part."""

        def at(layer: int, rows: Tensor) -> SiteFill:
            def fill(site: Site, value: Tensor) -> Tensor:
                constants = table[site.name].to(value.device)
                places = self.rows_at(family, part, rows, value.shape[1], len(constants))
                return constants[places.to(value.device)]

            return fill

        return at


def activation_fill(prompts: CleanPrompts) -> ComponentFill:
    """The component's values on other prompts, each laid under the prompt of the same row."""

    def at(layer: int, rows: Tensor) -> SiteFill:
        block = prompts.block(layer, rows)
        return lambda site, value: block.value(site)

    return at


def noise_fill(
    std: dict[str, Float[Tensor, " dim"]], scale: float, shape: tuple[int, int], seed: int
) -> ComponentFill:
    """Gaussian noise on top of the value, `scale` times its spread; drawn by component, so grouping
    changes nothing."""

    def at(layer: int, rows: Tensor) -> SiteFill:
        def fill(site: Site, value: Tensor) -> Tensor:
            rng = machine.generator(zlib.crc32(f"{site.name} {seed}".encode()))
            draw = torch.randn(*shape, site.dim, generator=rng)
            draw = draw[rows, : value.shape[1]].to(value)
            return value + scale * std[site.name].to(value) * draw

        return fill

    return at


# ---- the form for edges

# Of rows of a part; with a generator, random ablations draw anew.
EdgeFill = Callable[..., Constants | Activations]


def edge_constants(masked: MaskedModel, task: Task, ablation: Ablation) -> Constants:
    """An ablation's constants for every vertex, from the train part (of trained ones: the
    start)."""
    key = ("constants", task.fingerprint, str(ablation))
    if key not in masked.kept:
        masked.kept[key] = _edge_constants(masked, task, ablation)
    return masked.kept[key]


def _edge_constants(masked: MaskedModel, task: Task, ablation: Ablation) -> Constants:
    model = masked.model
    values = TaskValues(model, task)
    whole_layers = masked.graph.level == "layer"
    family = "shared" if ablation.trained else "position"
    rows = {}
    for layer in range(model.n_layers):
        names = [f"m{layer}"] + (["embed"] if layer == 0 else [])
        attention = attention_site(layer, model, written=whole_layers)
        sites = [attention, *(find(name, model) for name in names)]
        rows |= values.constants(ablation, family, sites)
    z = torch.stack([rows[f"a{i}"] for i in range(model.n_layers)], 1)
    mlps = torch.stack([rows[f"m{i}"] for i in range(model.n_layers)], 1)
    heads = rearrange(z, "P layer (head e) -> P layer head e", e=masked.value_width)
    constants = Constants(rows["embed"], heads, mlps)
    if ablation.trained:  # one for all positions
        return Constants(*(part[0] for part in constants))
    return constants


def edge_fill(
    masked: MaskedModel, task: Task, ablation: Ablation, part: str = "train", seed: int = 0
) -> EdgeFill:
    """A function that gives the fill of rows of a part; constants always come from the train
    part."""
    if ablation.prompts is None:
        constants = edge_constants(masked, task, ablation)
        return lambda rows, rng=None: constants
    prompts = getattr(task, part)

    def fill(rows: Int[Tensor, " b"], rng: torch.Generator | None = None) -> Activations:
        draw = rng if ablation.random and rng is not None else seed
        tokens = ablation.prompts(prompts, rows, draw)
        return masked.activations(tokens[:, : int(prompts.last[rows].max()) + 1])

    size = masked.activation_bytes(prompts.tokens.shape[1]) * len(prompts)
    if ablation.random or size > KEPT_BYTES:
        return fill
    key = (str(ablation), task.fingerprint, part)
    if key not in masked.kept:
        tokens = ablation.prompts(prompts, torch.arange(len(prompts)), seed)
        masked.kept[key] = masked.activations(tokens)
    every = masked.kept[key]
    return lambda rows, rng=None: every.rows(rows).cut(int(prompts.last[rows].max()) + 1)
