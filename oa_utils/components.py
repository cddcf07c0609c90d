"""Importance of components, one at a time: the gap that each ablation of each component opens
(paper §2, appendix E).

The clean stream is computed once up to the component's layer; there only what the component changes
is computed again; the layers above run on copies of the prompts, many components side by side, and
the last one at last positions only. Optimal constants train through the same passes. One layer
under one ablation is a run, so killed work goes on from there.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from timeit import timeit

import pandas as pd
import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from oa_utils import machine, stats, store
from oa_utils.fills import (
    ABLATIONS,
    FAMILIES,
    Ablation,
    ComponentFill,
    SiteFill,
    TaskValues,
    constant_fill,
    find_ablation,
)
from oa_utils.metrics import check_metric, distance
from oa_utils.models import Model, column
from oa_utils.sites import BlockValues, Site, Subspace, all_components, find
from oa_utils.store import Snapshots, at_least, frozen, with_settings
from oa_utils.tasks import Task
from oa_utils.training import collect, fit

VERSION = 1
PARTS = ("train", "test")
STARTS = ("mean", "zero", "cf_mean")
DEFAULT = ("zero", "mean", "resample", "optimal")
GROUP = 32  # components of one layer that train side by side and are stored together

Group = tuple[Site, ...]  # components of one layer
Key = tuple[str, str, str]  # component, ablation, family ("" where the ablation has none)


@dataclass(frozen=True)
class ComponentSettings:
    steps: int = 300  # at most so many steps of Adam for a constant
    lr: float = 0.1  # Adam's first step, in units of the component's spread (RMS over coordinates)
    batch: int = 32  # train prompts in a step; 0 takes all
    look_every: int = 20  # steps between two looks at the train part, where the best is kept
    tol: float = 0.01  # no gain: less than this share of the gap, and less than its standard error
    starts: Sequence[str] = ("mean", "zero")  # training starts from the best of these
    draws: int = 4  # derangements of resample, or draws of noise, averaged for each prompt
    noise: float = 3.0  # standard deviation of noise, in units of each coordinate's spread
    seed: int = 0

    def __post_init__(self):
        object.__setattr__(self, "starts", frozen(self.starts))
        at_least(1, look_every=self.look_every, draws=self.draws, starts=len(self.starts))
        at_least(0, steps=self.steps, lr=self.lr, batch=self.batch, tol=self.tol, noise=self.noise)
        if unknown := [start for start in self.starts if start not in STARTS]:
            raise ValueError(f"start {unknown[0]!r}: starts are of {', '.join(STARTS)}")


def ablated(
    model: Model,
    block: BlockValues,
    sites: Sequence[Site],
    fill: SiteFill,
    last: Int[Tensor, " b"],
) -> Float[Tensor, "site b vocab"]:
    """Log-probabilities with one component of this block replaced in each copy of the prompts.

    Components whose change enters between attention and MLP come first: their copies run the MLP.
    """
    streams = [block.replaced(site, fill(site, block.value(site))) for site in sites]
    start = block.layer + (sites[0].stage != "before")
    if start == model.n_layers:  # nothing is left but the end: last positions are enough
        streams = [column(stream, last) for stream in streams]
    copies = rearrange(streams, "site b pos d -> (site b) pos d")
    between = len(last) * sum(site.stage == "between" for site in sites)
    if between:
        entered = copies[:between]
        copies = torch.cat([entered + block.block.mlp(entered), copies[between:]])
    if start == model.n_layers:
        logp = model.log_probs(copies[:, 0])
    else:
        logp = model.finish(copies, start, last.repeat(len(sites)))
    return rearrange(logp, "(site b) vocab -> site b vocab", site=len(sites))


class Experiment:
    """One task on one model under one metric: losses of components, and the runs that answer a
    question."""

    def __init__(self, model: Model, task: Task, metric: str, settings: ComponentSettings):
        check_metric(metric, task)
        task.check(model)
        self.model = model
        self.task = task
        self.metric = metric
        self.settings = settings
        self.values = TaskValues(model, task)
        self.full = cache(lambda part: self.values.part(part).log_probs(model))  # [n vocab]
        self.stored_constants = cache(self._stored_constants)
        self.announce = cache(lambda: None)  # before the first thing that is not stored

    def losses(
        self,
        part: str,
        sites: Sequence[Site],
        fill: ComponentFill,
        metric: str,
        rows: Int[Tensor, " k"] | None = None,
    ) -> Iterator[tuple[slice, Int[Tensor, " b"], Float[Tensor, "site b"]]]:
        """(sites, rows, how far the ablated model is from the full one), pass by pass, as much at
        once as is good."""
        prompts = self.values.prompts(part)
        task = self.values.part(part)
        layer = sites[0].layer
        copies = self._copies(prompts.pass_rows, prompts.tokens.shape[1], layer)
        side = min(len(sites), copies)  # components side by side
        for chunk in prompts.chunks(copies // side, rows):
            with torch.no_grad():
                block = prompts.block(layer, chunk)
                full = self.full(part)[chunk]
                fill_here = fill(layer, chunk)
                for site in sites:  # what all copies share is computed once, without gradients
                    getattr(block, site.stage)
            for i in range(0, len(sites), side):
                some = sites[i : i + side]
                logp = ablated(self.model, block, some, fill_here, prompts.last[chunk])
                value = distance(metric, full, logp, task.right[chunk], task.wrong[chunk])
                yield slice(i, i + len(some)), chunk, value

    def _copies(self, pass_rows: int, length: int, layer: int) -> int:
        """Copies of prompts in one pass; with gradients, no more than fit into memory."""
        if not torch.is_grad_enabled():
            return pass_rows
        model = self.model
        kept = length * (model.n_layers - layer) * (14 * model.d_model + 4 * model.d_mlp)
        return machine.micro_batch(pass_rows, 4 * (kept + 4 * model.d_vocab))

    # ---- optimal constants

    def starts(self, family: str, families: Sequence[str]) -> list[str]:
        """Where constants start; those of positions also from the shared ones, if these are asked
        for too."""
        both = family == "position" and "shared" in families
        return [*self.settings.starts, *(["shared"] if both else [])]

    def train(
        self, group: Group, family: str, metric: str, starts: list[str], snapshots: Snapshots
    ) -> tuple[dict, dict[str, Tensor]]:
        """Optimal constants of a group by name, with how each was found."""
        names = [site.name for site in group]
        means = self.values.means(group)
        like = {name: means[name].rows(family) for name in names}
        candidates = []
        for start in starts:
            table = self._start(start, family, group, metric)
            candidates.append([table[name].expand_as(like[name]) for name in names])
        scales = [means[name].scale for name in names]

        def losses(constants, which, rows):
            fill = constant_fill({names[i]: constants[i] for i in which})
            return self.losses("train", [group[i] for i in which], fill, metric, rows)

        n = len(self.values.part("train"))
        fitted = fit(candidates, scales, losses, n, self.settings, snapshots)
        numbers = {
            name: {"start": starts[start], "curve": curve}
            for name, start, curve in zip(names, fitted.starts, fitted.curves, strict=True)
        }
        return numbers, dict(zip(names, fitted.constants, strict=True))

    def _start(self, start: str, family: str, group: Group, metric: str) -> dict[str, Tensor]:
        if start == "shared":
            return self.stored_constants(group, "shared", ("shared",)).tensors
        return self.values.constants(ABLATIONS[start], family, group)

    def _stored_constants(self, group: Group, family: str, families: tuple[str, ...]):
        """The run that trains the constants of a group.

        The label metric has an optimum of its own; the logit difference has none (it could grow
        without end), so there the optimal constants are those of the KL.
        """
        metric = "label" if self.metric == "label" else "kl"
        starts = self.starts(family, families)
        return store.run(
            "component_constants",
            self.settings,
            lambda snapshots: self.train(group, family, metric, starts, snapshots),
            model=self.model,
            task=self.task,
            inputs={
                "components": [site.name for site in group],
                "family": family,
                "metric": metric,
                "all_starts": starts,
            },
            version=VERSION,
            key=f"{family}_{metric}_layer={group[0].layer}",
        )

    # ---- gaps

    def fills(
        self,
        group: Group,
        ablation: Ablation,
        family: str,
        part: str,
        families: tuple[str, ...],
    ) -> list[ComponentFill]:
        """What an ablation puts in the components' place: one fill for each draw."""
        if ablation.trained:
            return [constant_fill(self.stored_constants(group, family, families).tensors)]
        first = self.settings.seed
        draws = range(first, first + self.settings.draws)
        return self.values.component_fills(
            ablation, family, part, group, draws, self.settings.noise
        )

    def gaps(
        self,
        group: Group,
        ablation: Ablation,
        family: str,
        part: str,
        families: tuple[str, ...],
    ) -> store.Result:
        """The run that measures a group on a part: a row for each component, values of each
        prompt."""

        def compute(_: Snapshots):
            self.announce()
            n = len(self.values.part(part))
            fills = self.fills(group, ablation, family, part, families)  # may train
            with torch.no_grad():
                draws = [
                    collect(self.losses(part, group, fill, self.metric), len(group), n)
                    for fill in fills
                ]
            values = torch.stack(draws).mean(0)
            rows = []
            for site, value in zip(group, values, strict=True):
                gap, se = stats.mean_se(value)
                place = {"component": site.name, "layer": site.layer, "kind": site.kind}
                way = {"ablation": str(ablation), "family": family}
                rows.append({**place, **way, "gap": gap, "se": se, "n": n})
            return {"rows": rows}, {"values": values}

        inputs = {
            "components": [site.name for site in group],
            "ablation": str(ablation),
            "family": family,
            "part": part,
            "metric": self.metric,
        }
        if ablation.trained:
            inputs["all_starts"] = self.starts(family, families)
        words = [ablation, family, self.metric, part, f"layer={group[0].layer}"]
        return store.run(
            "single_components",
            self.settings,
            compute,
            model=self.model,
            task=self.task,
            inputs=inputs,
            version=VERSION,
            key="_".join(word for word in words if word),
        )

    def tell_cost(
        self,
        sites: Sequence[Site],
        ablations: Sequence[Ablation],
        families: Sequence[str],
        part: str,
    ) -> None:
        """What all of it costs at most, from one clean forward."""
        n = len(self.values.part(part))
        n_train = len(self.values.part("train"))
        s = self.settings
        second = timeit(lambda: self.full(part), number=1) / n
        prompts = 0.0
        for ablation in ablations:
            several = s.draws if ablation.random else len(families) if ablation.families else 1
            prompts += several * n
            if ablation.trained:
                step = 2 * (s.batch or n_train) + n_train / s.look_every
                prompts += several * s.steps * step
        depth = sum(1 - site.layer / self.model.n_layers for site in sites)
        cost = machine.estimate(second, int(prompts * depth), "prompts")
        machine.announce(f"{len(sites)} components: at most {cost}; what is done is kept")


def groups_of(sites: Sequence[Site]) -> list[Group]:
    """Components of one layer, at most GROUP together, layers upwards; what changes the model's
    input is apart."""
    layers: dict[tuple[int, bool], list[Site]] = {}
    order = ("before", "between", "behind")
    for site in sorted(sites, key=lambda site: order.index(site.stage)):
        layers.setdefault((site.layer, site.stage != "before"), []).append(site)
    return [
        tuple(some[i : i + GROUP])
        for _, some in sorted(layers.items(), key=lambda item: item[0])
        for i in range(0, len(some), GROUP)
    ]


def _listed(value: object) -> list:
    return [value] if isinstance(value, str | Subspace) else list(value)


def _choose(label: str, given: Sequence[str], there: Sequence[str]) -> None:
    if not given:
        raise ValueError(f"no {label}: choose of {', '.join(there)}")
    if unknown := [x for x in given if x not in there]:
        raise ValueError(f"{label} {unknown[0]!r}: it is one of {', '.join(there)}")


def _sites(model: Model, components: Sequence[str | Subspace] | None) -> list[Site]:
    names = all_components(model) if components is None else _listed(components)
    sites = [find(name, model) for name in names]
    if not sites or len({site.name for site in sites}) < len(sites):
        raise ValueError(
            "no components, or one of them twice; all_components(model) names every head and MLP"
        )
    return sites


def _measure(
    model: Model,
    task: Task,
    components: Sequence[str | Subspace] | str | Subspace | None,
    ablations: Sequence[str] | str,
    families: Sequence[str] | str,
    metric: str,
    part: str,
    settings: ComponentSettings,
) -> dict[Key, tuple[dict, Float[Tensor, " n"]]]:
    """Row of the table and values of every prompt, by component, ablation and family, in the order
    asked for."""
    sites = _sites(model, components)
    rules = [find_ablation(name) for name in _listed(ablations)]
    families = tuple(_listed(families))
    _choose("ablation", rules, rules)
    _choose("family", families, FAMILIES)
    _choose("part", [part], PARTS)
    trained = any(rule.trained for rule in rules)
    starts = [find_ablation(start) for start in settings.starts] if trained else []
    for rule in [*rules, *starts]:
        rule.check(task)
    experiment = Experiment(model, task, metric, settings)
    experiment.announce = cache(lambda: experiment.tell_cost(sites, rules, families, part))
    upwards = [family for family in reversed(FAMILIES) if family in families]  # shared ones first
    jobs = [
        (group, rule, family)
        for group in groups_of(sites)
        for rule in rules
        for family in (upwards if rule.families else [""])
    ]
    answers: dict[Key, tuple[dict, Tensor]] = {}
    for group, rule, family in machine.progress(jobs, desc=f"{len(sites)} components"):
        result = experiment.gaps(group, rule, family, part, families)
        rows = result.numbers["rows"]
        for site, row, values in zip(group, rows, result.tensors["values"], strict=True):
            answers[site.name, str(rule), family] = (row, values)
    order = [(s.name, str(rule), f) for s in sites for rule in rules for f in ("", *families)]
    return {key: answers[key] for key in order if key in answers}


@with_settings
def component_values(
    model: Model,
    task: Task,
    components: Sequence[str | Subspace] | str | Subspace | None = None,
    ablations: Sequence[str] | str = DEFAULT,
    families: Sequence[str] | str = ("position",),
    metric: str = "kl",
    part: str = "test",
    *,
    settings: ComponentSettings,
) -> dict[Key, Float[Tensor, " n"]]:
    """The gap of each prompt of a part, by (component, ablation, family); family is "" where an
    ablation has none.

    No components: every head and MLP. Constants come from the train part; with both families, those
    of `position` start from the shared ones too. Other settings as in `ComponentSettings`.
    """
    answers = _measure(model, task, components, ablations, families, metric, part, settings)
    return {key: values for key, (_, values) in answers.items()}


@with_settings
def component_gaps(
    model: Model,
    task: Task,
    components: Sequence[str | Subspace] | str | Subspace | None = None,
    ablations: Sequence[str] | str = DEFAULT,
    families: Sequence[str] | str = ("position",),
    metric: str = "kl",
    part: str = "test",
    *,
    settings: ComponentSettings,
) -> pd.DataFrame:
    """`component_values` as mean and standard error: columns component layer kind ablation family
    gap se n."""
    answers = _measure(model, task, components, ablations, families, metric, part, settings)
    return pd.DataFrame([row for row, _ in answers.values()])


@with_settings
def optimal_constants(
    model: Model,
    task: Task,
    components: Sequence[str | Subspace] | str | Subspace | None = None,
    family: str = "position",
    metric: str = "kl",
    families: Sequence[str] | str | None = None,
    *,
    settings: ComponentSettings,
) -> dict[str, tuple[Float[Tensor, "P dim"], dict]]:
    """The constants that `component_gaps` trains, by component, and how each was found: {start,
    curve}.

    Position i takes row min(i, P−1); the curve is a list of (step, gap on the train part).
    `families`: those that were asked for together, if more than this one.
    """
    sites = _sites(model, components)
    _choose("family", [family], FAMILIES)
    for start in settings.starts:
        find_ablation(start).check(task)
    experiment = Experiment(model, task, metric, settings)
    together = tuple(_listed(family if families is None else families))
    answers = {}
    for group in machine.progress(groups_of(sites), desc=f"{len(sites)} constants"):
        result = experiment.stored_constants(group, family, together)
        for name, constant in result.tensors.items():
            answers[name] = (constant, result.numbers[name])
    return {site.name: answers[site.name] for site in sites}
