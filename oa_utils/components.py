"""Importance of components, one at a time: the gap that each ablation of each component opens (paper section 2, appendix E).

An ablation in layer l leaves the layers below as they are, so the clean stream is computed once up to l; inside l only what
the component changes is computed again, the layers above run on copies of the prompts, many components side by side, and
the last layer runs at last positions only. Optimal constants train in the same pass, a group of components of one layer at
a time. Each group is a run of its own, so that work that was killed goes on with the next group.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from oa_utils import ablation as ab
from oa_utils import runs, stats
from oa_utils.ablation import ABLATIONS, FAMILIES, WITH_FAMILY, Block, Fill, Site, Stream, Subspace
from oa_utils.models import Model
from oa_utils.tasks import Task

VERSION = 1
METRICS = ("kl", "label", "logit_diff")
PARTS = ("train", "test")
NOISE = 1e-7  # nats: a smaller gain is rounding
GROUP = 32  # components of one layer that train side by side, and are stored together
Component = str | Subspace
Values = dict[tuple[str, str, str], Float[Tensor, " n"]]  # by (component, ablation, family)


@dataclass(frozen=True)
class ComponentSettings:
    steps: int = 300  # at most so many steps of Adam for a constant
    lr: float = 0.05  # Adam's step, in units of the component's spread (RMS over its coordinates)
    batch: int = 32  # train prompts in a step; 0 takes all
    check: int = 25  # steps between two looks at the whole train part, where the best constant so far is kept
    tol: float = 0.01  # training ends when a check gains less than this share of the gap, and less than one standard error
    starts: tuple[str, ...] = ("mean", "zero")  # training starts from the best of these (cf_mean can be added)
    draws: int = 4  # derangements of resample, or draws of noise, averaged for each prompt
    noise: float = 3.0  # standard deviation of noise, in units of each coordinate's spread
    seed: int = 0


@dataclass(frozen=True)
class Job:
    """What one stored run computes; only those settings that can change its numbers are in it."""

    components: tuple[str, ...]
    ablation: str
    family: str
    part: str
    metric: str
    seed: int
    options: dict[str, Any]


@dataclass(frozen=True)
class Trained:
    """Optimal constants [P or 1, dim] by component, and how the gap on the train part fell: (step, gap) at every check."""

    constants: dict[str, Float[Tensor, "P dim"]]
    curves: dict[str, list[tuple[int, float]]]
    starts: dict[str, str]


def finish(model: Model, stream: Float[Tensor, "batch pos d"], start: int, last: Int[Tensor, " batch"]) -> Tensor:
    """Log-probabilities [batch vocab] at last positions of a stream at the input of block `start`."""
    end, rows = model.n_layers - 1, torch.arange(len(stream), device=stream.device)
    if start > end:  # only last positions were computed
        return model.log_probs(stream[:, 0])
    stream, block = model.run(stream, start, end), model.layers[-1]
    x, positions = block.ln1(stream), torch.arange(stream.shape[1], device=stream.device)
    q = model.rotate(block.heads(x[rows, last][:, None], "q"), model.rotation(last[:, None]))
    k = model.rotate(block.heads(x, "k"), model.rotation(positions[None]))
    seen = (positions <= last[:, None])[:, None, None]  # [batch head query key]
    z = F.scaled_dot_product_attention(q, k, block.heads(x, "v"), seen, enable_gqa=k.shape[1] != q.shape[1])
    out = stream[rows, last] + model.attn_out(end, z.transpose(1, 2))[:, 0]
    return model.log_probs(out + block.mlp_out(block.mlp_hidden(block.ln2(out))))


def ablated(model: Model, block: Block, sites: Sequence[Site], fill: Callable, last: Int[Tensor, " b"]) -> Tensor:
    """Log-probabilities [site b vocab] with one component of this block replaced in each copy of the prompts."""
    order = sorted(range(len(sites)), key=lambda i: sites[i].stage)  # mid, post, pre
    copies = {"mid": [], "post": [], "pre": []}
    for i in order:
        copies[sites[i].stage].append(block.replaced(sites[i], fill(sites[i], block.value(sites[i]))))
    final, streams, logp = block.layer == model.n_layers - 1, [], []
    for stage in ("mid", "post"):
        if copies[stage]:
            x = torch.stack(copies[stage])  # [site b pos d]
            x = (x[:, torch.arange(len(last)), last][:, :, None] if final else x).flatten(0, 1)
            streams.append(x + block.own.mlp_out(block.own.mlp_hidden(block.own.ln2(x))) if stage == "mid" else x)
    if streams:
        x = torch.cat(streams)
        logp.append(finish(model, x, block.layer + 1, last.repeat(len(x) // len(last))))
    if copies["pre"]:
        logp.append(finish(model, torch.cat(copies["pre"]), block.layer, last.repeat(len(copies["pre"]))))
    back = torch.tensor(order).argsort()
    return torch.cat(logp).unflatten(0, (len(sites), len(last)))[back]


class Bench:
    """A model and a task's parts: their streams, the full model's predictions, and how far an ablated one is from them."""

    def __init__(self, model: Model, task: Task, settings: ComponentSettings):
        self.model, self.settings = model, settings
        self.tasks = {"train": task.train, "test": task.test}
        self.streams: dict[tuple, Stream] = {}
        self.ends: dict[str, Tensor] = {}
        self.announced = False

    def stream(self, part: str, what: str = "own", draw: int = 0) -> Stream:
        """The prompts themselves, their counterfactuals (`cf`), or the partners of one derangement (`resample`)."""
        if (part, what, draw) not in self.streams:
            task = self.tasks[part]
            tokens = {"own": lambda: task.tokens, "cf": task.need_counterfactual,
                      "resample": lambda: task.resampled(task.partners(self.settings.seed + draw))}[what]()  # fmt: skip
            self.streams[part, what, draw] = Stream(self.model, tokens, task.last)
        return self.streams[part, what, draw]

    @torch.no_grad()
    def full(self, part: str, rows: Int[Tensor, " b"]) -> Float[Tensor, "b vocab"]:
        """The full model's log-probabilities; kept where all of them fit into 1 GB, else only what they are made from."""
        if part not in self.ends:
            stream, ends = self.stream(part), []
            for chunk in torch.arange(len(stream)).split(64):
                x = self.model.run(self.model.embed(stream.tokens[chunk]))
                ends.append(x[torch.arange(len(chunk)), stream.last[chunk]])
            self.ends[part] = torch.cat(ends)
            if len(stream) * self.model.d_vocab < 2.5e8:
                self.ends[part] = torch.cat([self.model.log_probs(x) for x in self.ends[part].split(64)])
        kept = self.ends[part][rows]
        return kept if kept.shape[1] == self.model.d_vocab else self.model.log_probs(kept)

    def passes(self, part: str, sites: Sequence[Site], fill: Fill, metric: str, rows: Tensor | None = None
               ) -> Iterator[tuple[slice, Tensor, Tensor]]:  # fmt: skip
        """(sites, rows, values [site row]) of one pass after the other, each as large as memory and caches allow."""
        stream, layer, model = self.stream(part), sites[0].layer, self.model
        length = int(stream.last.max()) + 1
        copies = max(1, ab.pass_tokens(model) // length)
        if torch.is_grad_enabled():  # what one copy keeps for the backward pass
            width = 14 * model.d_model + 4 * model.d_mlp
            copies = runs.micro_batch(copies, length * (model.n_layers - layer) * width * 4 + 4 * model.d_vocab * 4)
        side = min(len(sites), copies)
        for chunk in stream.chunks(max(1, copies // side), rows):
            with torch.no_grad():
                block, full, last = stream.block(layer, chunk), self.full(part, chunk), stream.last[chunk]
                for site in sites:
                    block.value(site), getattr(block, site.stage)
                fill_at = fill(layer, chunk)
            for i in range(0, len(sites), side):
                which = slice(i, min(i + side, len(sites)))
                logp = ablated(model, block, sites[which], fill_at, last)
                yield which, chunk, self.score(metric, part, chunk, full, logp)

    def score(self, metric: str, part: str, rows: Tensor, full: Tensor, logp: Tensor) -> Float[Tensor, "site b"]:
        """How far the ablated prediction is from the full one; `label` and `logit_diff` can be negative."""
        if metric == "kl":
            return stats.kl(full, logp)
        task, at = self.tasks[part], rows.cpu()
        if metric == "label":
            return log_mass(full, task.right[at]) - log_mass(logp, task.right[at])
        return sum(sign * (log_mass(full, ids[at]) - log_mass(logp, ids[at])) for sign, ids in ((1, task.right), (-1, task.wrong)))

    @torch.no_grad()
    def measure(self, part: str, sites: Sequence[Site], fill: Fill, metric: str) -> Float[Tensor, "site n"]:
        values = torch.empty(len(sites), len(self.tasks[part]), device=self.model.device)
        for which, rows, value in self.passes(part, sites, fill, metric):
            values[which, rows] = value.float()
        return values

    def means(self, sites: Sequence[Site], ablation: str = "mean") -> dict[str, ab.Means]:
        return ab.stream_means(self.stream("train", "cf" if ablation == "cf_mean" else "own"), sites)

    def table(self, ablation: str, family: str, sites: Sequence[Site]) -> dict[str, Float[Tensor, "P dim"]]:
        """Constants that need no training, from the train part."""
        if ablation == "zero":
            return {site.name: ab.zero(site, self.model) for site in sites}
        return {name: found.rows(family) for name, found in self.means(sites, ablation).items()}

    def fills(self, job: Job, sites: Sequence[Site]) -> list[Fill]:
        """What an untrained ablation puts in the components' place: one fill for each draw."""
        draws = range(self.settings.draws)
        if job.ablation == "resample":
            return [ab.activations(self.stream(job.part, "resample", draw)) for draw in draws]
        if job.ablation == "counterfactual":
            return [ab.activations(self.stream(job.part, "cf"))]
        if job.ablation == "noise":
            std, shape = {n: m.std for n, m in self.means(sites).items()}, tuple(self.tasks[job.part].tokens.shape)
            return [ab.noise(std, self.settings.noise, shape, self.settings.seed + draw) for draw in draws]
        return [ab.constants(self.table(job.ablation, job.family, sites))]


@dataclass(frozen=True)
class Fit:
    constants: list[Tensor]
    each: Float[Tensor, "constant n"]  # loss on every train prompt
    curves: list[list[tuple[int, float]]]
    start: list[int]  # which candidate each one started from


Passes = Callable[[Sequence[Tensor], Sequence[int], Tensor | None], Iterator[tuple[slice, Tensor, Tensor]]]


def fit(
    candidates: Sequence[Sequence[Tensor]], scales: Sequence[float], passes: Passes, n: int, settings: ComponentSettings
) -> Fit:
    """Constants with the least mean loss over n train prompts, many side by side and each on its own.

    `candidates` holds sets of starts; each constant takes its best. `passes(constants, which, rows)` yields the losses of
    the constants `which` on prompts `rows` (None: all) as (slice of which, rows, [constant row]). What is returned is the
    best that any look at the whole train part saw, so it is never worse than any candidate.
    """

    @torch.no_grad()
    def look(constants: Sequence[Tensor], which: Sequence[int]) -> Float[Tensor, "constant n"]:
        values = torch.empty(len(which), n)
        for part, rows, value in passes(constants, which, None):
            values[part, rows.cpu()] = value.float().cpu()
        return values

    active = list(range(len(scales)))
    tried = torch.stack([look(constants, active) for constants in candidates])  # [candidate constant n]
    start = tried.mean(-1).argmin(0).tolist()
    best = [candidates[start[i]][i].detach().clone() for i in active]
    each = torch.stack([tried[start[i], i] for i in active])
    curves = [[(0, each[i].mean().item())] for i in active]
    live = [constant.clone().requires_grad_() for constant in best]
    groups = [{"params": [x], "lr": settings.lr * scale} for x, scale in zip(live, scales, strict=True)]
    optimiser = torch.optim.Adam(groups, eps=1e-12)
    batches = _batches(n, settings.batch, settings.seed)
    for step in range(1, settings.steps + 1):
        rows = next(batches)
        optimiser.zero_grad()
        for _, _, value in passes(live, active, rows):
            (value.sum() / len(rows)).backward()
        optimiser.step()
        if step % settings.check and step < settings.steps:
            continue
        going = []
        for i, values in zip(active, look(live, active), strict=True):
            curves[i].append((step, values.mean().item()))
            gain, error = stats.mean_se(each[i] - values)
            if gain > max(error, 0) or gain > settings.tol * each[i].mean():
                going.append(i)
            if gain > NOISE:
                best[i], each[i] = live[i].detach().clone(), values
        if not (active := going):
            break
    return Fit(best, each, curves, start)


def _batches(n: int, size: int, seed: int) -> Iterator[Int[Tensor, " b"]]:
    """Rows of one step after the other; every prompt comes once before any comes again."""
    rng, size, pool = runs.generator(seed), size if 0 < size < n else n, torch.empty(0, dtype=torch.int64)
    while True:
        if len(pool) < size:
            pool = torch.cat([pool, torch.randperm(n, generator=rng)])
        yield pool[:size]
        pool = pool[size:]


def train(bench: Bench, sites: Sequence[Site], family: str, objective: str, shared: dict[str, Tensor] | None) -> tuple:
    """Optimal constants of one group; `shared` ones, where given, are one more start of the position family."""
    found, settings = bench.means(sites), bench.settings
    like = [found[site.name].rows(family) for site in sites]
    tables = [bench.table(start, family, sites) for start in settings.starts] + ([shared] if shared else [])
    candidates = [[t[s.name].expand_as(x) for s, x in zip(sites, like, strict=True)] for t in tables]
    scales = [max(found[site.name].std.square().mean().sqrt().item(), 1e-6) for site in sites]

    def passes(constants, which, rows):
        table = {sites[i].name: constants[i] for i in which}
        return bench.passes("train", [sites[i] for i in which], ab.constants(table), objective, rows)

    done = fit(candidates, scales, passes, len(bench.tasks["train"]), settings)
    starts = [*settings.starts, "shared"]
    numbers = {"curves": dict(zip([s.name for s in sites], done.curves, strict=True))}
    numbers["rows"] = [
        {"component": s.name, "family": family, "start": starts[done.start[i]], "steps": done.curves[i][-1][0],
         "gap": done.each[i].mean().item()} for i, s in enumerate(sites)
    ]  # fmt: skip
    return numbers, {site.name: constant for site, constant in zip(sites, done.constants, strict=True)}


def log_mass(logp: Float[Tensor, "*site b vocab"], ids: Int[Tensor, "b k"]) -> Float[Tensor, "*site b"]:
    """Logarithm of the probability of each row's ids together; −1 pads."""
    ids = ids.to(logp.device)
    picked = logp.gather(-1, ids.clamp(min=0).expand(*logp.shape[:-1], -1))
    return picked.masked_fill(ids < 0, -torch.inf).logsumexp(-1)


class Work:
    """One request, checked: its sites in groups, and the runs that answer it."""

    def __init__(self, model, task, components, ablations, families, metric, parts, settings, store):
        self.model, self.task, self.metric, self.store = model, task, metric, store
        self.settings = settings or ComponentSettings()
        components = ab.all_components(model) if components is None else components
        components = [components] if isinstance(components, str | Subspace) else list(components)
        self.ablations, self.families, parts = (
            [x] if isinstance(x, str) else list(x) for x in (ablations, families, parts)
        )
        for label, given, known in (("ablation", self.ablations, ABLATIONS), ("family", self.families, FAMILIES),
                                    ("metric", [metric], METRICS), ("part", parts, PARTS),
                                    ("start", self.settings.starts, ("mean", "zero", "cf_mean"))):  # fmt: skip
            if not given or (unknown := [x for x in given if x not in known]):
                raise ValueError(f"{label}: {', '.join(map(str, unknown)) if given else 'none given'}; there are {known}")
        if not components:
            raise ValueError("no components given; all_components(model) names every head and MLP")
        if not len(task):
            raise ValueError(f"task '{task.name}' has no prompts")
        self.sites = [ab.parse(component, model) for component in components]
        if len({site.name for site in self.sites}) < len(self.sites):
            raise ValueError("a component is given twice")
        self.bench = Bench(model, task, self.settings)
        asked = {*self.ablations, *(self.settings.starts if "optimal" in self.ablations else ())}
        if asked & {"counterfactual", "cf_mean"}:
            task.need_counterfactual()
        for part in parts if "resample" in asked else ():
            self.bench.tasks[part].partners()
        for label, ids in {"label": {"right": task.right}, "logit_diff": {"right": task.right, "wrong": task.wrong}}.get(
            metric, {}
        ).items():
            if not (ids >= 0).any(-1).all():
                raise ValueError(f"metric '{metric}' needs {label} answers for every prompt of task '{task.name}'")

    def groups(self) -> list[list[Site]]:
        """Components of one layer, at most GROUP together; `tok` stands alone, it changes its layer's input."""
        groups: dict[tuple, list[Site]] = {}
        for site in self.sites:
            groups.setdefault((site.layer, site.stage != "pre"), []).append(site)
        ordered = [groups[key] for key in sorted(groups)]
        return [group[i : i + GROUP] for group in ordered for i in range(0, len(group), GROUP)]

    def run(self, experiment: str, job: Job, layer: int, compute: Callable[[], tuple]) -> tuple[dict, dict[str, Tensor]]:
        def announced(_=None):
            self.announce()
            return compute()

        if not self.store:
            return announced()
        key = "_".join(filter(None, [job.ablation, job.family, job.metric, job.part, f"layer={layer}"]))
        done = runs.run(experiment, job, announced, model=self.model, task=self.task, version=VERSION, key=key)
        return done.numbers, done.tensors

    def announce(self) -> None:
        """What is about to start, and what it costs at most, from the time of one forward pass."""
        if self.bench.announced:
            return
        self.bench.announced, s, n = True, self.settings, {k: len(v) for k, v in self.bench.tasks.items()}
        began = time.perf_counter()
        self.bench.full("test", torch.arange(1))
        second = (time.perf_counter() - began) / n["test"]
        draws = sum(s.draws if a in ("resample", "noise") else len(self.families) if a in WITH_FAMILY else 1 for a in self.ablations)
        step = 2 * (s.batch or n["train"]) + n["train"] / s.check
        each = draws * n["test"] + ("optimal" in self.ablations) * len(self.families) * s.steps * step
        copies = sum(each * (1 - site.layer / self.model.n_layers) for site in self.sites)
        runs.announce(f"{len(self.sites)} components, {', '.join(self.ablations)}: at most {runs.estimate(second, int(copies))}")

    def job(self, group: Sequence[Site], ablation: str, family: str, part: str, metric: str) -> Job:
        s, options = self.settings, {}
        if ablation in ("resample", "noise"):
            options = {"draws": s.draws} | ({"noise": s.noise} if ablation == "noise" else {})
        if ablation == "optimal":
            starts = [*s.starts, "shared"] if self.both(family) else list(s.starts)
            options = {"steps": s.steps, "lr": s.lr, "batch": s.batch, "check": s.check, "tol": s.tol, "starts": starts}
        return Job(tuple(site.name for site in group), ablation, family, part, metric, s.seed, options)

    def both(self, family: str) -> bool:
        return family == "position" and "shared" in self.families

    def trained(self, group: Sequence[Site], family: str) -> tuple[dict, dict[str, Tensor]]:
        """Constants of a group and how they were found. The label metric has its own optimum; the logit difference has
        none (it could grow without end), so there the constants are those of the KL."""
        objective = "label" if self.metric == "label" else "kl"
        shared = self.trained(group, "shared")[1] if self.both(family) else None
        job = self.job(group, "optimal", family, "train", objective)
        compute = lambda: train(self.bench, group, family, objective, shared)  # noqa: E731
        return self.run("component_constants", job, group[0].layer, compute)

    def values(self, group: Sequence[Site], ablation: str, family: str, part: str) -> Float[Tensor, "site n"]:
        job = self.job(group, ablation, family, part, self.metric)

        def compute():
            fills = self.bench.fills(job, group) if ablation != "optimal" else [ab.constants(self.trained(group, family)[1])]
            values = torch.stack([self.bench.measure(part, group, fill, self.metric) for fill in fills]).mean(0).cpu()
            return {"rows": [_row(s, ablation, family, v) for s, v in zip(group, values, strict=True)]}, {"values": values}

        return self.run("single_components", job, group[0].layer, compute)[1]["values"]


def _row(site: Site, ablation: str, family: str, values: Float[Tensor, " n"]) -> dict:
    gap, se = stats.mean_se(values)
    about = {"component": site.name, "layer": site.layer, "kind": site.kind, "ablation": ablation, "family": family}
    return {**about, "gap": gap, "se": se, "n": len(values)}
