"""Importance of components, one at a time: the gap that each ablation of each component opens (paper §2, appendix E).

The clean stream is computed once up to the component's layer; there only what the component changes is computed again;
the layers above run on copies of the prompts, many components side by side, and the last one at last positions only.
Optimal constants train through the same passes. One layer under one ablation is a run, so killed work goes on from there.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from timeit import timeit
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from oa_utils import ablation as ab
from oa_utils import runs, stats
from oa_utils.ablation import ABLATIONS, FAMILIES, WITH_FAMILY, Fill, Site, Stream, Subspace
from oa_utils.models import Model
from oa_utils.tasks import Task

VERSION = 1
METRICS, PARTS, STARTS = ("kl", "label", "logit_diff"), ("train", "test"), ("mean", "zero", "cf_mean", "shared")
MATTERS = {"resample": ["draws"], "noise": ["draws", "noise"], "optimal": "steps lr batch check tol starts".split()}
COLUMNS = ("component", "layer", "kind", "ablation", "family", "gap", "se", "n")
DEFAULT = ("zero", "mean", "resample", "optimal")
GROUP = 32  # components of one layer that train side by side and are stored together
NOISE = 1e-7  # nats: a smaller gain is rounding
CUTS = 2  # so many times a constant that gains nothing goes on from its best with a third of the step, then it is done


@dataclass(frozen=True)
class ComponentSettings:
    steps: int = 300  # at most so many steps of Adam for a constant
    lr: float = 0.1  # Adam's first step, in units of the component's spread (RMS over its coordinates)
    batch: int = 32  # train prompts in a step; 0 takes all
    check: int = 20  # steps between two looks at the whole train part, where the best constant so far is kept
    tol: float = 0.01  # no gain: less than this share of the gap since the last look, and less than its standard error
    starts: tuple[str, ...] = ("mean", "zero")  # training starts from the best of these (cf_mean can be added)
    draws: int = 4  # derangements of resample, or draws of noise, averaged for each prompt
    noise: float = 3.0  # standard deviation of noise, in units of each coordinate's spread
    seed: int = 0


@dataclass(frozen=True)
class Job:
    """What one stored run computes; of the settings only those that can change its numbers are in it."""

    components: tuple[str, ...]
    ablation: str
    family: str
    part: str
    metric: str
    seed: int
    options: dict[str, Any]


def fit(candidates: Sequence[Sequence[Tensor]], scales: Sequence[float], passes: Callable, n: int,
        settings: ComponentSettings) -> tuple[list[Tensor], list[list[tuple[int, float]]], list[int]]:  # fmt: skip
    """Constants with the least mean loss over n train prompts, many side by side, each on its own; curves; starts.
    Each starts from the best of its candidates. `passes(constants, which, rows)` yields the losses of constants `which`
    on prompts `rows` (None: all) as (slice of which, rows, [constant row]). The best that any look at the whole train
    part saw is kept, so no candidate is better."""
    look = torch.no_grad()(lambda constants, which: collect(passes(constants, which, None), len(which), n))
    active, rng = list(range(len(scales))), runs.generator(settings.seed)
    tried = torch.stack([look(constants, active) for constants in candidates])  # [candidate constant n]
    start = tried.mean(-1).argmin(0).tolist()
    each = torch.stack([tried[start[i], i] for i in active])
    best = [candidates[start[i]][i].detach().clone() for i in active]
    live = [constant.clone().requires_grad_() for constant in best]
    curves, cuts = [[(0, values.mean().item())] for values in each], [0] * len(best)
    groups = [{"params": [x], "lr": settings.lr * scale} for x, scale in zip(live, scales, strict=True)]
    optimiser = torch.optim.Adam(groups, eps=1e-12)
    for step in range(1, settings.steps + 1):
        rows = torch.randperm(n, generator=rng)[: settings.batch or n]
        optimiser.zero_grad()
        for _, _, value in passes(live, active, rows):
            (value.sum() / len(rows)).backward()
        optimiser.step()
        if step % settings.check and step < settings.steps:
            continue
        for i, values in zip(active, look(live, active), strict=True):
            curves[i].append((step, values.mean().item()))
            gain, error = stats.mean_se(each[i] - values)
            idle = gain < settings.tol * each[i].mean() and not gain > error
            if gain > NOISE:
                best[i], each[i] = live[i].detach().clone(), values
            if idle:
                cuts[i] += 1
                optimiser.param_groups[i]["lr"] /= 3
                live[i].data.copy_(best[i])
        if not (active := [i for i in active if cuts[i] <= CUTS]):
            break
    return best, curves, start


def collect(passes: Iterator[tuple[slice, Tensor, Tensor]], sites: int, n: int) -> Float[Tensor, "site n"]:
    values = torch.empty(sites, n)
    for which, rows, value in passes:
        values[which, rows] = value.float().cpu()
    return values


def score(metric: str, full: Float[Tensor, "b vocab"], logp: Float[Tensor, "site b vocab"], right: Int[Tensor, "b k"],
          wrong: Int[Tensor, "b j"]) -> Float[Tensor, "site b"]:  # fmt: skip
    """How far the ablated prediction is from the full one: KL, or what the right answers lose (to the wrong ones)."""
    if metric == "kl":
        return stats.kl(full, logp)

    def log_mass(logp, ids):  # of the probability of each row's ids together; −1 pads
        picked = logp.gather(-1, ids.to(logp.device).clamp(min=0).expand(*logp.shape[:-1], -1))
        return picked.masked_fill(ids.to(logp.device) < 0, -torch.inf).logsumexp(-1)

    lost = log_mass(full, right) - log_mass(logp, right)
    return lost if metric == "label" else lost - log_mass(full, wrong) + log_mass(logp, wrong)


class Bench:
    """One request, checked: the streams of a task's parts, and the runs that answer it."""

    def __init__(self, model, task, components, ablations, families, metric, part, settings, store):
        self.model, self.task, self.metric, self.part, self.store = model, task, metric, part, store
        self.settings = settings or ComponentSettings()
        components = ab.all_components(model) if components is None else components
        components, self.ablations, self.families = (
            [x] if isinstance(x, str | Subspace) else list(x) for x in (components, ablations, families)
        )
        known = {"ablation": (self.ablations, ABLATIONS), "family": (self.families, FAMILIES), "part": ([part], PARTS),
                 "metric": ([metric], METRICS), "start": (self.settings.starts, STARTS)}  # fmt: skip
        for label, (given, there) in known.items():
            if unknown := [x for x in given if x not in there] or ["none"] * (not given):
                raise ValueError(f"{label} {', '.join(map(str, unknown))}: it is one of {', '.join(there)}")
        self.sites = [ab.parse(component, model) for component in components]
        if not self.sites or len({site.name for site in self.sites}) < len(self.sites):
            raise ValueError("no components, or one of them twice; all_components(model) names every head and MLP")
        self.tasks = {"train": task.train, "test": task.test}
        self.full = cache(lambda part: self.tasks[part].log_probs(model))  # [n vocab]
        self.stream, self.run = cache(self._stream), cache(self._run)
        asked = {*self.ablations, *(self.settings.starts if "optimal" in self.ablations else ())}
        if asked & {"counterfactual", "cf_mean"}:
            task.need_counterfactual()
        if "resample" in asked:
            self.tasks[part].partners()
        needed = {"label": [task.right], "logit_diff": [task.right, task.wrong]}.get(metric, [])
        if not all((ids >= 0).any(-1).all() for ids in needed):
            raise ValueError(f"metric '{metric}' needs answers that task '{task.name}' does not name for every prompt")

    def groups(self) -> list[tuple[Site, ...]]:
        """Components of one layer, at most GROUP together, layers upwards; `tok` is on its own: it changes an input."""
        layers = {(site.layer, site.stage != "pre"): [] for site in self.sites}
        for site in sorted(self.sites, key=lambda site: site.stage):  # mid before post
            layers[site.layer, site.stage != "pre"].append(site)
        return [tuple(x[i : i + GROUP]) for _, x in sorted(layers.items()) for i in range(0, len(x), GROUP)]

    def _stream(self, part: str, what: str | int = "own") -> Stream:
        """A part's prompts, their counterfactuals (`cf`), or their partners in the derangement of a seed."""
        task = self.tasks[part]
        tokens = {"own": lambda: task.tokens, "cf": task.need_counterfactual}
        return Stream(self.model, tokens.get(what, lambda: task.resampled(task.partners(what)))(), task.last)

    def passes(self, part: str, sites: Sequence[Site], fill: Fill, metric: str, rows: Int[Tensor, " k"] | None = None
               ) -> Iterator[tuple[slice, Int[Tensor, " b"], Float[Tensor, "site b"]]]:  # fmt: skip
        """(sites, rows, how far the ablated model is from the full one), pass by pass, as much at once as is good."""
        stream, layer, model, task = self.stream(part), sites[0].layer, self.model, self.tasks[part]
        copies = stream.chunk
        if torch.is_grad_enabled():  # one copy keeps so many bytes for the backward pass
            each = stream.tokens.shape[1] * (model.n_layers - layer) * (14 * model.d_model + 4 * model.d_mlp)
            copies = runs.micro_batch(copies, 4 * (each + 4 * model.d_vocab))
        side = min(len(sites), copies)
        for chunk in stream.chunks(copies // side, rows):
            with torch.no_grad():
                block, full, last = stream.block(layer, chunk), self.full(part)[chunk], stream.last[chunk]
                fill_at, _ = fill(layer, chunk), [getattr(block, site.stage) for site in sites]
            for i in range(0, len(sites), side):
                some = sites[i : i + side]
                logp = ab.ablated(model, block, some, fill_at, last)
                yield slice(i, i + len(some)), chunk, score(metric, full, logp, task.right[chunk], task.wrong[chunk])

    def table(self, ablation: str, family: str, sites: Sequence[Site]) -> dict[str, Float[Tensor, "P dim"]]:
        """Constants of a group, from the train part; trained ones are a run of their own."""
        if ablation == "optimal":
            return self.run(sites, "optimal", family, "constants")[1]
        if ablation == "zero":
            return {site.name: ab.zero(site, self.model) for site in sites}
        found = ab.stream_means(self.stream("train", "cf" if ablation == "cf_mean" else "own"), sites)
        return {name: means.rows(family) for name, means in found.items()}

    def fills(self, ablation: str, family: str, part: str, sites: Sequence[Site]) -> list[Fill]:
        """What an ablation puts in the components' place: one fill for each draw."""
        seeds = range(self.settings.seed, self.settings.seed + self.settings.draws)
        if ablation in ("resample", "counterfactual"):
            return [ab.activations(self.stream(part, x)) for x in (seeds if ablation == "resample" else ["cf"])]
        if ablation == "noise":
            std = {name: means.std for name, means in ab.stream_means(self.stream("train"), sites).items()}
            return [ab.noise(std, self.settings.noise, self.tasks[part].tokens.shape, seed) for seed in seeds]
        return [ab.constants(self.table(ablation, family, sites))]

    def train(self, sites: Sequence[Site], family: str, metric: str, starts: Sequence[str]) -> tuple[dict, dict]:
        """Optimal constants of a group, by name, and how they were found."""
        found, names = ab.stream_means(self.stream("train"), sites), [site.name for site in sites]
        like = [found[name].rows(family) for name in names]
        tables = [self.table(*(("optimal", "shared") if s == "shared" else (s, family)), sites) for s in starts]
        candidates = [[table[n].expand_as(x) for n, x in zip(names, like, strict=True)] for table in tables]
        scales = [max(found[name].std.square().mean().sqrt().item(), 1e-6) for name in names]

        def passes(constants, which, rows):
            fill = ab.constants({names[i]: constants[i] for i in which})
            return self.passes("train", [sites[i] for i in which], fill, metric, rows)

        best, curves, start = fit(candidates, scales, passes, len(self.tasks["train"]), self.settings)
        about = [{"start": starts[i], "curve": curve} for i, curve in zip(start, curves, strict=True)]
        return dict(zip(names, about, strict=True)), dict(zip(names, best, strict=True))

    def _run(self, sites: tuple[Site, ...], ablation: str, family: str, part: str) -> tuple[dict, dict[str, Tensor]]:
        """Numbers and tensors of one run: a group's `constants`, or its values on a part."""
        starts = [x for x in self.settings.starts if x != "shared"]
        starts += ["shared"] * (family == "position" and "shared" in (*self.settings.starts, *self.families))
        options = {x: starts if x == "starts" else getattr(self.settings, x) for x in MATTERS.get(ablation, ())}
        metric = "kl" if part == "constants" and self.metric != "label" else self.metric
        job = Job(tuple(site.name for site in sites), ablation, family, part, metric, self.settings.seed, options)

        def compute(_=None):
            self.announce()
            if part == "constants":
                return self.train(sites, family, metric, starts)
            passes = [self.passes(part, sites, f, metric) for f in self.fills(ablation, family, part, sites)]
            with torch.no_grad():
                values = torch.stack([collect(p, len(sites), len(self.tasks[part])) for p in passes]).mean(0)
            about = [(x.name, x.layer, x.kind, ablation, family) for x in sites]
            rows = [(*x, *stats.mean_se(each), len(each)) for x, each in zip(about, values, strict=True)]
            return {"rows": [dict(zip(COLUMNS, row, strict=True)) for row in rows]}, {"values": values}

        if not self.store:
            return compute()
        experiment = "component_constants" if part == "constants" else "single_components"
        key = "_".join(filter(None, [ablation, family, metric, part, f"layer={sites[0].layer}"]))
        done = runs.run(experiment, job, compute, model=self.model, task=self.task, version=VERSION, key=key)
        return done.numbers, done.tensors

    def announce(self) -> None:
        """Once, before the first thing that is not stored: what all of it costs at most, from one clean forward."""
        if self.full.cache_info().currsize:
            return
        s, n, train = self.settings, len(self.tasks[self.part]), len(self.tasks["train"])
        second = timeit(lambda: self.full(self.part), number=1) / n
        draws = {"resample": s.draws, "noise": s.draws, **dict.fromkeys(WITH_FAMILY, len(self.families))}
        step = (2 * (s.batch or train) + train / s.check) * len(self.families) * ("optimal" in self.ablations)
        each = sum(draws.get(ablation, 1) for ablation in self.ablations) * n + s.steps * step
        copies = int(sum(each * (1 - site.layer / self.model.n_layers) for site in self.sites))
        runs.announce(f"{len(self.sites)} components: at most {runs.estimate(second, copies)}; what is done is kept")

    def answer(self) -> dict[tuple[str, str, str], tuple[dict, Float[Tensor, " n"]]]:
        """Row of the table and values of every prompt, by (component, ablation, family) in the order asked for."""
        found, families = {}, [family for family in FAMILIES[::-1] if family in self.families]
        jobs = [(g, a, f) for g in self.groups() for a in self.ablations for f in (families if a in WITH_FAMILY else [""])]
        for group, ablation, family in runs.progress(jobs, desc=f"{len(self.sites)} components"):
            numbers, tensors = self.run(group, ablation, family, self.part)
            rows = zip(group, numbers["rows"], tensors["values"], strict=True)
            found |= {(site.name, ablation, family): (row, values) for site, row, values in rows}
        order = [(s.name, a, f) for s in self.sites for a in self.ablations for f in ("", *self.families)]
        return {key: found[key] for key in order if key in found}


def component_values(
    model: Model, task: Task, components: Sequence[str | Subspace] | None = None, ablations: Sequence[str] = DEFAULT,
    families: Sequence[str] = ("position",), metric: str = "kl", part: str = "test",
    settings: ComponentSettings | None = None, store: bool = True,
) -> dict[tuple[str, str, str], Float[Tensor, " n"]]:  # fmt: skip
    """The gap of each prompt of a part, by (component, ablation, family); family is "" where an ablation has none.

    No components: every head and MLP. Constants come from the train part; with both families, those of `position` start
    from the shared ones too. The label metric has an optimum of its own; the logit difference has none (it could grow
    without end), so there the optimal constants are those of the KL."""
    bench = Bench(model, task, components, ablations, families, metric, part, settings, store)
    return {key: values for key, (_, values) in bench.answer().items()}


def component_gaps(model, task, components=None, ablations=DEFAULT, families=("position",), metric="kl", part="test",
                   settings=None, store=True) -> pd.DataFrame:  # fmt: skip
    """`component_values` as mean and standard error: columns component layer kind ablation family gap se n."""
    bench = Bench(model, task, components, ablations, families, metric, part, settings, store)
    return pd.DataFrame([row for row, _ in bench.answer().values()])


def train_constants(model, task, components=None, family="position", metric="kl", settings=None, store=True):
    """Optimal constants by component, [P, dim] or [1, dim], and how each was found: {start, curve of (step, gap)}.
    What `component_gaps` trained is loaded; if it had both families, put "shared" among the settings' starts."""
    bench, constants, found = Bench(model, task, components, "optimal", family, metric, "train", settings, store), {}, {}
    for group in runs.progress(bench.groups(), desc=f"{len(bench.sites)} constants"):
        numbers, tensors = bench.run(group, "optimal", family, "constants")
        constants, found = constants | tensors, found | numbers
    return constants, found


def optimal_constants(model, task, components=None, family="position", **options) -> dict[str, Float[Tensor, "P dim"]]:
    """The constants alone: position i takes row min(i, P−1)."""
    return train_constants(model, task, components, family, **options)[0]
