"""Importance of components, one at a time: the gap that each ablation of each component opens
(paper §2, appendix E).

The clean stream is computed once up to the component's layer; there only what the component changes
is computed again; the layers above run on copies of the prompts, many components side by side, and
the last one at last positions only. Optimal constants train through the same passes: first one for
all positions, then, from there, those of a family with more rows. One layer under one ablation is a
run, so killed work goes on from there.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

import pandas as pd
import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from oa_utils import closed_form, machine, stats, store
from oa_utils.fills import (
    ABLATIONS,
    FAMILIES,
    Ablation,
    ComponentFill,
    SiteFill,
    TaskValues,
    find_ablation,
)
from oa_utils.metrics import check_metric, distance
from oa_utils.models import Model, column
from oa_utils.sites import BlockValues, Site, Subspace, all_components, find
from oa_utils.store import Numbers, Snapshots, Tensors, at_least, frozen, with_settings
from oa_utils.tasks import PARTS, Task
from oa_utils.training import collect, fit

VERSION = 2
CLOSED = "closed_form"  # the start that is best to second order
STARTS = ("mean", "zero", "cf_mean", CLOSED)
DEFAULT = ("zero", "mean", "resample", "optimal")
GROUP = 32  # components of one layer that train side by side and are stored together
TIMED_PROMPTS = 16  # in the passes from which the cost is told

Group = tuple[Site, ...]  # components of one layer


class Job(NamedTuple):
    """What is stored together: components of one layer under one ablation."""

    group: Group
    ablation: Ablation
    family: str  # of constants; "" where the ablation has none


@dataclass(frozen=True)
class ComponentSettings:
    steps: int = 300  # at most so many steps of Adam for a constant
    lr: float = 0.1  # Adam's first step, in units of the component's spread (RMS over coordinates)
    batch: int = 32  # train prompts in a step; 0 takes all
    look_every: int = 20  # steps between two looks at the train part, where the best is kept
    tol: float = 0.01  # no gain: less than this share of the gap, and less than its standard error
    # training starts from the best of these: constants of ablations, or `closed_form`, the best to
    # second order of KL
    starts: Sequence[str] = ("mean", "zero")
    draws: int = 4  # derangements of resample, or draws of noise, averaged for each prompt
    noise: float = 3.0  # standard deviation of noise, in units of each coordinate's spread
    seed: int = 0

    def __post_init__(self):
        object.__setattr__(self, "starts", frozen(self.starts))
        at_least(1, look_every=self.look_every, draws=self.draws, starts=len(self.starts))
        at_least(0, steps=self.steps, lr=self.lr, batch=self.batch, tol=self.tol, noise=self.noise)
        if unknown := [start for start in self.starts if start not in STARTS]:
            raise ValueError(f"start {unknown[0]!r}: starts are of {', '.join(STARTS)}")

    @property
    def start_rules(self) -> list[Ablation]:
        """The ablations that training starts from."""
        return [ABLATIONS[start] for start in self.starts if start != CLOSED]


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

    def __init__(
        self, model: Model, task: Task, metric: str, settings: ComponentSettings, part: str = "test"
    ):
        check_metric(metric, task)
        task.check(model)
        self.model = model
        self.task = task
        self.metric = metric
        # The label has an optimum of its own; the logit difference has none (it could grow without
        # end), so there the optimal constants are those of the KL.
        self.trained_metric = "label" if metric == "label" else "kl"
        if CLOSED in settings.starts and self.trained_metric == "label":
            raise ValueError(
                f"the start {CLOSED!r} is the constant that loses least KL: with metric='label' "
                "leave it out of starts="
            )
        self.settings = settings
        self.part = part  # where gaps are measured
        self.values = TaskValues(model, task)
        self.full = cache(lambda part: self.values.part(part).log_probs(model))  # [n vocab]

    @property
    def closed_version(self) -> dict[str, int]:
        """What the closed form adds to the name of a run that uses it."""
        return {CLOSED: closed_form.VERSION} if CLOSED in self.settings.starts else {}

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
        bytes_each = model.graph_bytes(length, layer) + 16 * model.d_vocab
        return machine.micro_batch(pass_rows, bytes_each)

    # ---- optimal constants

    def train(self, group: Group, family: str, snapshots: Snapshots) -> tuple[Numbers, Tensors]:
        """Optimal constants of a group by name, with how each was found: from the best of the
        starts, and of the trained shared ones where the family has more rows."""
        names = [site.name for site in group]
        means = self.values.means(group, family=family)
        tables = {
            str(r): self.values.constants(r, family, group) for r in self.settings.start_rules
        }
        if CLOSED in self.settings.starts:
            seed = self.settings.seed
            tables[CLOSED] = closed_form.constants(self.values, group, family, means, seed)
        if family != "shared":
            tables["shared"] = self.constants(group, "shared").tensors
        rows = [means[name].rows(family) for name in names]
        candidates = [
            [table[name].to(like).expand_as(like) for name, like in zip(names, rows, strict=True)]
            for table in tables.values()
        ]

        def losses(constants, which, rows):
            table = {names[i]: constants[i] for i in which}
            fill = self.values.constant_fill(table, family, "train")
            sites = [group[i] for i in which]
            return self.losses("train", sites, fill, self.trained_metric, rows)

        n = len(self.values.part("train"))
        scales = [means[name].scale for name in names]
        fitted = fit(candidates, scales, losses, n, self.settings, snapshots)
        starts = list(tables)
        numbers = {
            name: {"start": starts[start], "curve": curve}
            for name, start, curve in zip(names, fitted.starts, fitted.curves, strict=True)
        }
        return numbers, dict(zip(names, fitted.constants, strict=True))

    def constants(self, group: Group, family: str, compute: Callable | None = None) -> store.Result:
        """The run that trains the constants of a group."""
        return store.run(
            "component_constants",
            self.settings,
            compute or (lambda snapshots: self.train(group, family, snapshots)),
            model=self.model,
            task=self.task,
            inputs={
                "components": [site.name for site in group],
                "family": family,
                "metric": self.trained_metric,
            }
            | self.closed_version,
            version=VERSION,
            key=f"{family}_{self.trained_metric}_layer={group[0].layer}",
        )

    # ---- gaps

    def fills(self, job: Job) -> list[ComponentFill]:
        """What an ablation puts in the components' place: one fill for each draw."""
        if job.ablation.trained:
            table = self.constants(job.group, job.family).tensors
            return [self.values.constant_fill(table, job.family, self.part)]
        n = self.settings.draws
        draws = range(self.settings.seed * n, (self.settings.seed + 1) * n)
        return self.values.component_fills(
            job.ablation, job.family, self.part, job.group, draws, self.settings.noise
        )

    def measure(self, job: Job) -> tuple[Numbers, Tensors]:
        """A row for each component of a job, and the values of each prompt."""
        n = len(self.values.part(self.part))
        fills = self.fills(job)  # may train
        with torch.no_grad():
            draws = [
                collect(
                    partial(self.losses, self.part, job.group, fill, self.metric), len(job.group), n
                )
                for fill in fills
            ]
        values = torch.stack(draws).mean(0)
        for site, value in zip(job.group, values, strict=True):
            if not value.isfinite().all():
                raise RuntimeError(f"the gap of {site.name} under {job.ablation} is not finite")
        rows = []
        for site, value in zip(job.group, values, strict=True):
            gap, se = stats.mean_se(value)
            place = {"component": site.name, "layer": site.layer, "kind": site.kind}
            way = {"ablation": str(job.ablation), "family": job.family}
            rows.append({**place, **way, "gap": gap, "se": se, "n": n})
        return {"rows": rows}, {"values": values}

    def gaps(self, job: Job, compute: Callable | None = None) -> store.Result:
        """The run that measures a job."""
        words = [job.ablation, job.family, self.metric, self.part, f"layer={job.group[0].layer}"]
        return store.run(
            "single_components",
            self.settings,
            compute or (lambda _: self.measure(job)),
            model=self.model,
            task=self.task,
            inputs={
                "components": [site.name for site in job.group],
                "ablation": str(job.ablation),
                "family": job.family,
                "part": self.part,
                "metric": self.metric,
            }
            | (self.closed_version if job.ablation.trained else {}),
            version=VERSION,
            key="_".join(word for word in words if word),
        )

    # ---- cost

    def tell_cost(self, jobs: Sequence[Job]) -> None:
        """What the jobs that are not stored will take, from timed passes through the lowest and the
        highest layer that they need."""
        jobs = [job for job in jobs if not store.is_stored(self.gaps, job)]
        if not jobs:
            return
        groups = [job.group for job in jobs]
        ends = {group[0].layer: group for group in (groups[0], groups[-1])}
        trains = any(job.ablation.trained for job in jobs)
        timed = {layer: self._seconds(group, trains) for layer, group in ends.items()}
        s = self.settings
        n = len(self.values.part(self.part))
        n_train = len(self.values.part("train"))
        trainings: dict[tuple[Group, str], int] = {}  # how many looks at starts each needs
        total = 0.0
        for job in jobs:
            copies = n * len(job.group) * (s.draws if job.ablation.random else 1)
            total += copies * _at(timed, job.group[0].layer)[0]
            if job.ablation.trained:
                needs = ["shared"] if job.family == "shared" else ["shared", job.family]
                trainings |= {(job.group, family): len(s.starts) for family in needs}
        for (group, family), starts in trainings.items():
            if store.is_stored(self.constants, group, family):
                continue
            forward, step = _at(timed, group[0].layer)
            looks = n_train * (starts + (family != "shared") + s.steps / s.look_every)
            total += len(group) * (looks * forward + s.steps * (s.batch or n_train) * step)
            if CLOSED in s.starts:  # a forward for all of the group, and a backward for each score
                passes = forward + closed_form.SCORES * (step - forward)
                total += min(n_train, closed_form.MOST) * passes
        n_sites = len({site.name for group in groups for site in group})
        machine.announce(
            f"{n_sites} components: about {machine.duration(total)} for what is not stored yet, if "
            "no constant stops early; what is done is kept"
        )

    def _seconds(self, group: Group, trains: bool) -> tuple[float, float]:
        """Of one prompt with one component of a group ablated: forward, and with gradients where
        something is trained."""
        rows = torch.arange(min(TIMED_PROMPTS, len(self.values.part("train"))))
        table = {
            name: constant.clone().requires_grad_()
            for name, constant in self.values.constants(ABLATIONS["zero"], "", group).items()
        }
        fill = self.values.constant_fill(table, "", "train")

        def once(backward: bool) -> float:
            began = time.perf_counter()
            with torch.set_grad_enabled(backward):
                for _, _, value in self.losses("train", group, fill, self.trained_metric, rows):
                    if backward:
                        value.sum().backward()
            return (time.perf_counter() - began) / (len(rows) * len(group))

        once(False)  # clean streams are computed once
        return min(once(False), once(False)), min(once(True), once(True)) if trains else 0.0


def _at(timed: dict[int, tuple[float, float]], layer: int) -> tuple[float, float]:
    """Seconds at a layer, on the line between those of two layers."""
    low, high = min(timed), max(timed)
    share = (layer - low) / max(1, high - low)
    forward, step = (
        (1 - share) * one + share * other
        for one, other in zip(timed[low], timed[high], strict=True)
    )
    return forward, step


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


def _sites(
    model: Model, components: Sequence[str | Subspace] | str | Subspace | None
) -> list[Site]:
    names = all_components(model) if components is None else _listed(components)
    sites = [find(name, model) for name in names]
    if not sites or len({site.name for site in sites}) < len(sites):
        raise ValueError(
            "no components, or one of them twice; all_components(model) names every head and MLP"
        )
    return sites


@with_settings
def component_gaps(
    model: Model,
    task: Task,
    components: Sequence[str | Subspace] | str | Subspace | None = None,
    ablations: Sequence[str] | str = DEFAULT,
    families: Sequence[str] | str = ("position",),
    metric: str = "kl",
    part: str = "test",
    each: bool = False,
    *,
    settings: ComponentSettings,
) -> pd.DataFrame:
    """The gap that each ablation of each component opens: columns component layer kind ablation
    family gap se n, and with `each` the gaps of all prompts of the part as tensors.

    No components: every head and MLP. Constants come from the train part, whatever the part that is
    measured. `families` (see `PositionMeans.rows`) are of mean, cf_mean and optimal. Other settings
    as in `ComponentSettings`.
    """
    sites = _sites(model, components)
    rules = [find_ablation(name) for name in _listed(ablations)]
    families = tuple(_listed(families))
    _choose("ablation", rules, rules)
    _choose("family", families, FAMILIES)
    _choose("part", [part], PARTS)
    trained = any(rule.trained for rule in rules)
    starts = settings.start_rules if trained else []
    for needed in (part, "train"):
        getattr(task, needed)  # raises where a part is empty
    for rule in [*rules, *starts]:
        rule.check(task, parts=(part,))
    experiment = Experiment(model, task, metric, settings, part)
    jobs = [
        Job(group, rule, family)
        for group in groups_of(sites)
        for rule in rules
        for family in (families if rule.families else [""])
    ]
    machine.or_none(lambda: experiment.tell_cost(jobs))
    rows: dict[tuple[str, str, str], dict] = {}
    for job in machine.progress(jobs, desc=f"{len(sites)} components"):
        result = experiment.gaps(job)
        for row, values in zip(result.numbers["rows"], result.tensors["values"], strict=True):
            key = (row["component"], row["ablation"], row["family"])
            rows[key] = row | ({"each": values} if each else {})
    order = [(s.name, str(rule), f) for s in sites for rule in rules for f in ("", *families)]
    return pd.DataFrame([rows[key] for key in order if key in rows])


@with_settings
def optimal_constants(
    model: Model,
    task: Task,
    components: Sequence[str | Subspace] | str | Subspace | None = None,
    family: str = "position",
    metric: str = "kl",
    *,
    settings: ComponentSettings,
) -> dict[str, tuple[Float[Tensor, "P dim"], dict]]:
    """The constants that `component_gaps` trains, by component, and how each was found: {start,
    curve, family}.

    Position i takes row min(i, P−1), and i counts from the last token backwards in the family
    `from_end`; the curve is a list of (step, gap on the train part).
    """
    sites = _sites(model, components)
    _choose("family", [family], FAMILIES)
    for rule in settings.start_rules:
        rule.check(task)
    experiment = Experiment(model, task, metric, settings)
    answers = {}
    for group in machine.progress(groups_of(sites), desc=f"{len(sites)} constants"):
        result = experiment.constants(group, family)
        for name, constant in result.tensors.items():
            answers[name] = (constant, result.numbers[name] | {"family": family})
    return {site.name: answers[site.name] for site in sites}
