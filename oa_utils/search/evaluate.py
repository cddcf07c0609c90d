"""How good a circuit is: its gap under any ablation, sweeps over methods, ablations and sizes, and
random circuits."""

from __future__ import annotations

import math
import pkgutil
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from oa_utils import machine, metrics, models, stats, store
from oa_utils.circuits import Circuit
from oa_utils.fills import ABLATIONS, Constants, EdgeFill, edge_constants, edge_fill, find_ablation
from oa_utils.masked import MaskedModel
from oa_utils.models import Model
from oa_utils.search.shared import (
    EVALUATION_BATCH,
    Method,
    add_gradients,
    batch_of,
    check_search,
    edge_mask,
    in_parts,
    scaled_rate,
    whole,
)
from oa_utils.store import Snapshots, at_least, frozen, with_settings
from oa_utils.tasks import Task

VERSION = 3
MOST_DRAWS = 2000  # random circuits tried at most
DIGITS = 4  # of the gaps of single prompts in a sweep
FAMILIES = ("shared", "position")  # of the constants of a circuit


def collected_methods() -> dict[str, Method]:
    """The searches that the files of this folder declare as their METHODS."""
    methods: dict[str, Method] = {}
    for file in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if file.name != Path(__file__).stem:
            module = import_module(f"oa_utils.search.{file.name}")
            methods |= getattr(module, "METHODS", {})
    return methods


METHODS = collected_methods()


# ---- the gap of one circuit


@dataclass(frozen=True)
class GapSettings:
    steps: int = 400  # of Adam, for the constants of `optimal`
    lr: float | None = None  # falls to a tenth; None: as in the paper, more for fewer steps
    batch: int = 8  # train prompts in a step
    look_every: int | Sequence[int] = 100  # steps between two looks, or the steps of all looks
    look_prompts: int = 256  # train prompts looked at; the best constants seen there are kept
    draws: int = 4  # derangements of `resample`, averaged for each prompt
    metric: str = "kl"  # or `label`, `logit_diff`: what the answers lose
    family: str = "shared"  # one constant for all positions; `position`: one for each
    seed: int = 0

    def __post_init__(self):
        object.__setattr__(self, "look_every", frozen(self.look_every))
        whole(0, steps=self.steps)
        whole(1, batch=self.batch, draws=self.draws, look_prompts=self.look_prompts)
        at_least(0, lr=self.lr or 0)
        looks = self.look_every if isinstance(self.look_every, tuple) else (self.look_every,)
        for step in looks:
            whole(1, look_every=step)
        if self.metric not in metrics.METRICS:
            raise ValueError(f"metric is one of {', '.join(metrics.METRICS)}, not {self.metric!r}")
        if self.family not in FAMILIES:
            raise ValueError(f"family is one of {', '.join(FAMILIES)}, not {self.family!r}")

    @property
    def rate(self) -> float:
        """The paper trains 10,000 steps at 0.002."""
        return self.lr if self.lr is not None else scaled_rate(0.002, 10_000, self.steps, 0.05)

    @property
    def looks(self) -> set[int]:
        """The steps at which the train part is looked at, besides the start."""
        if isinstance(self.look_every, int):
            return {*range(self.look_every, self.steps, self.look_every), self.steps}
        return {*self.look_every, self.steps}


@dataclass(frozen=True, eq=False)
class Gap:
    """Δ over test prompts, in nats; `circuit.with_gap(gap).save(path)` keeps it with the edges."""

    mean: float
    se: float
    n: int
    each: Float[Tensor, " n"]
    constants: Constants | None = None  # those that `optimal` trained
    curve: Sequence[Sequence[float]] = ()  # (step, gap of train prompts) while they trained
    train: float | None = None  # the gap of train prompts with the constants that were kept

    def __float__(self) -> float:
        return self.mean

    def __repr__(self) -> str:
        train = "" if self.train is None else f", {self.train:.4g} on train prompts"
        return f"Gap({self.mean:.4g} ± {self.se:.2g} nats, n = {self.n}{train})"


@torch.no_grad()
def measure(
    masked: MaskedModel,
    part: Task,
    mask: Tensor,
    fill: EdgeFill,
    full: Float[Tensor, "n vocab"],
    metric: str = "kl",
) -> Float[Tensor, " n"]:
    """KL(full ‖ masked) of each prompt under one mask, taken as it is; or another metric."""

    def distance(span: slice) -> Float[Tensor, " b"]:
        rows = torch.arange(len(part))[span]
        logp = masked(*batch_of(part, rows), mask.float()[None], fill(rows), skip_dead=True)
        prompts = part[rows]
        return metrics.distance(metric, full[span], logp, prompts.right, prompts.wrong).cpu()

    n, length = part.tokens.shape
    return torch.cat(list(in_parts(masked, n, length, distance, EVALUATION_BATCH)))


def shuffled(n: int, batch: int, step: int, seed: int) -> Int[Tensor, " b"]:
    """The rows of a step: all of n are used before one comes again, in an order by pass."""
    steps = max(1, n // batch)
    order = torch.randperm(n, generator=machine.generator(seed + 1009 * (step // steps)))
    return order[step % steps * batch :][:batch]


class ConstantsTrainer:
    """Constants for one circuit: the best that any look at train prompts saw, the start first."""

    def __init__(
        self,
        masked: MaskedModel,
        task: Task,
        mask: Tensor,
        ablation: str,
        settings: GapSettings,
        snapshots: Snapshots,
        start: Constants | None = None,
    ):
        self.masked = masked
        self.mask = mask
        self.settings = settings
        self.snapshots = snapshots
        self.part = task.train
        self.full = self.part.log_probs(masked.model)
        self.seen = min(settings.look_prompts, len(self.part))
        if start is None:
            by_position = settings.family == "position"
            rule = ABLATIONS["mean"] if by_position else find_ablation(ablation)
            start = edge_constants(masked, task, rule)
        self.constants = Constants(*(x.clone().requires_grad_() for x in start))
        # Adam's usual long memory would let the steep start slow all later steps
        self.optimiser = torch.optim.Adam(self.constants, lr=settings.rate, betas=(0.5, 0.9))
        self.best = self.constants.clone()
        self.curve: list[list[float]] = []  # [step, gap]
        self.step = 0

    @property
    def least(self) -> float:
        """The gap of the best constants."""
        return min((value for _, value in self.curve), default=math.inf)

    def state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "curve": self.curve,
            "best": list(self.best),
            "constants": [value.detach() for value in self.constants],
            "optimiser": self.optimiser.state_dict(),
        }

    def resume(self) -> None:
        state = self.snapshots.load()
        if state is None:
            return
        self.step = state["step"]
        self.curve = state["curve"]
        self.best = Constants(*state["best"])
        for value, saved in zip(self.constants, state["constants"], strict=True):
            value.data.copy_(saved)
        self.optimiser.load_state_dict(state["optimiser"])

    def look(self) -> float:
        """The gap of the first train prompts; returns the seconds that it took."""
        began = time.perf_counter()
        part = self.part[: self.seen]
        each = measure(
            self.masked, part, self.mask, lambda rows: self.constants, self.full[: self.seen]
        )
        now = each.mean().item()
        if now <= self.least:
            self.best = self.constants.clone()
        self.curve.append([self.step, now])
        return time.perf_counter() - began

    def advance(self) -> None:
        settings = self.settings
        rows = shuffled(len(self.part), settings.batch, self.step, settings.seed)
        falling = 1 - 0.9 * self.step / settings.steps
        self.optimiser.param_groups[0]["lr"] = settings.rate * falling
        self.optimiser.zero_grad()

        def loss(span: slice) -> Float[Tensor, ""]:
            some = rows[span]
            tokens = batch_of(self.part, some)
            logp = self.masked(*tokens, self.mask.float()[None], self.constants, skip_dead=True)
            return stats.kl(self.full[some], logp).sum() / len(rows)

        length = self.part.tokens.shape[1]
        add_gradients(self.masked, len(rows), length, loss, self.constants)
        self.optimiser.step()
        self.step += 1

    def run(self) -> None:
        self.resume()
        settings = self.settings
        look_seconds = self.look() if not self.curve else 0.0
        began = self.step
        bar = machine.progress(total=settings.steps, desc="constants of a circuit")
        bar.update(began)
        while self.step < settings.steps:
            start = time.perf_counter()
            self.advance()
            bar.update()
            if self.step == began + 3:  # the first ones warm up
                self.announce(time.perf_counter() - start, look_seconds)
            if self.step in settings.looks:
                look_seconds = self.look()
                bar.set_postfix(KL=f"{self.curve[-1][1]:.3g}")
            self.snapshots.save_when_due(self.state)
        bar.close()

    def announce(self, step_seconds: float, look_seconds: float) -> None:
        """What is left to do, where it takes more than some seconds."""
        steps = self.settings.steps - self.step
        looks = sum(step > self.step for step in self.settings.looks)
        each = step_seconds + look_seconds * looks / max(1, steps)
        if each * steps > 10:
            machine.announce(f"constants of a circuit: {machine.estimate(each, steps)}")


@with_settings
def gap(
    masked: MaskedModel,
    task: Task,
    circuit: Circuit,
    ablation: str = "counterfactual",
    start: Constants | None = None,
    *,
    settings: GapSettings,
) -> Gap:
    """Δ of a circuit on the test part; settings as in `GapSettings`, the same protocol for every
    method.

    Under `optimal`, constants (one for each vertex) are trained afresh on the train part to the
    least KL, starting from the means, or from `start` (`circuit.constants` are those that a search
    under OA trained along: a head start that other circuits do not have).
    `circuit.with_gap(gap(...)).save(path)` keeps what was measured.
    """
    check_search(masked, task, ablation)
    metrics.check_metric(settings.metric, task)
    rule = find_ablation(ablation)
    if start is not None and not rule.trained:
        raise ValueError(f"constants to start from are for 'optimal': {ablation!r} trains none")
    model = masked.model
    circuit.check(model)
    if circuit.graph != masked.graph:
        raise ValueError(
            f"this circuit is of {circuit.graph}, the masked model of {masked.graph}; make "
            f"MaskedModel(model, level={circuit.graph.level!r})"
        )

    def compute(snapshots: Snapshots) -> tuple[dict, dict[str, Tensor]]:
        numbers = {"method": circuit.method, "n_edges": circuit.n_edges, "curve": []}
        tensors = {}
        if rule.trained:
            trainer = ConstantsTrainer(
                masked, task, circuit.mask, ablation, settings, snapshots, start
            )
            trainer.run()
            fills = [lambda rows: trainer.best]
            tensors = dict(trainer.best._asdict())
            numbers |= {"curve": trainer.curve, "train": trainer.least}
        else:
            seeds = range(settings.seed, settings.seed + (settings.draws if rule.random else 1))
            fills = [edge_fill(masked, task, rule, "test", seed) for seed in seeds]
        test = task.test
        full = test.log_probs(model)
        draws = [measure(masked, test, circuit.mask, fill, full, settings.metric) for fill in fills]
        each = torch.stack(draws).mean(0)
        if not each.isfinite().all():
            raise RuntimeError(f"the gap of {circuit} under {ablation} is not finite")
        mean, se = stats.mean_se(each)
        return numbers | {"gap": mean, "se": se, "n": len(each)}, {"each": each, **tensors}

    result = store.run(
        "circuit_gaps",
        settings,
        compute,
        model=model,
        task=task,
        inputs={"circuit": store.fingerprint(circuit.mask), "ablation": str(ablation)}
        | masked.run_inputs
        | ({} if start is None else {"start": store.fingerprint(list(start))}),
        version=VERSION,
        key=f"{circuit.method}_{circuit.n_edges}-edges_{ablation}",
    )
    numbers = result.numbers
    constants = None
    if rule.trained:
        constants = Constants(*(result.tensors[name] for name in Constants._fields))
    return Gap(
        numbers["gap"],
        numbers["se"],
        numbers["n"],
        result.tensors["each"],
        constants,
        numbers["curve"],
        numbers.get("train"),
    )


# ---- sweeps


class Wanted(NamedTuple):
    """One circuit of a sweep."""

    method: str
    ablation: str
    value: float  # λ, or n_edges
    seed: int

    @property
    def searched(self) -> str:
        """The ablation that it is searched under: methods that train no constants search under CF
        instead of OA."""
        trained = find_ablation(self.ablation).trained
        return "counterfactual" if trained and not METHODS[self.method].trains else self.ablation

    def arguments(self, options: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        aim = METHODS[self.method].aim
        is_size = aim == "n_edges" and self.value == int(self.value)
        value = int(self.value) if is_size else self.value
        given = {"ablation": self.searched, "seed": self.seed, aim: value}
        return given | dict(options.get(self.method, {}))


@cache
def _masked(model: Model, level: str) -> MaskedModel:
    """A worker's masked model, made once."""
    return MaskedModel(model, level)


def find_and_measure(
    model: Model,
    wanted: Wanted,
    task: Task,
    options: Mapping[str, Mapping[str, Any]],
    gap_options: Mapping[str, Any],
    level: str = "edge",
) -> dict[str, Any]:
    """One circuit, found and measured: a row of a sweep."""
    masked = _masked(model, level)
    circuit = METHODS[wanted.method].search(masked, task, **wanted.arguments(options))
    delta = gap(masked, task, circuit, wanted.ablation, **gap_options)
    return {
        "task": task.name,
        "method": wanted.method,
        "ablation": str(wanted.ablation),
        "searched": str(wanted.searched),
        "seed": wanted.seed,
        "asked": wanted.value,
        "n_edges": circuit.n_edges,
        "n_heads": len(circuit.heads),
        "gap": delta.mean,
        "se": delta.se,
        "n": delta.n,
        "train": delta.train,
        "edges": circuit.mask.nonzero()[:, 0].tolist(),
        "each": [float(f"{x:.{DIGITS}g}") for x in delta.each.tolist()],
    }


def _wanted(
    methods: Iterable[str],
    ablations: Iterable[str],
    grid: Mapping[Any, Sequence[float]],
    seeds: Iterable[int] | Mapping[Any, Sequence[int]],
) -> list[Wanted]:
    """The circuits of a sweep, in order."""
    seeds_of = seeds if isinstance(seeds, Mapping) else {None: list(seeds)}
    circuits = []
    for method, ablation in product(methods, list(ablations)):
        if method not in METHODS:
            raise ValueError(f"unknown method {method!r}: there are {', '.join(METHODS)}")
        aim = METHODS[method].aim
        keys = [key for key in ((method, ablation), method, aim) if key in grid]
        if not keys and any(isinstance(key, tuple) and key[0] == method for key in grid):
            continue  # this method is asked for under other ablations only
        if not keys:
            raise ValueError(
                f"grid has no values for {method}: give them under {(method, ablation)}, "
                f"{method!r} or {aim!r}"
            )
        own_seeds = seeds_of.get((method, ablation), seeds_of[None])
        circuits += [Wanted(method, ablation, v, s) for v in grid[keys[0]] for s in own_seeds]
    return circuits


def _check_sweep(
    masked: MaskedModel,
    task: Task,
    circuits: list[Wanted],
    options: Mapping[str, Mapping[str, Any]],
    gap_options: Mapping[str, Any],
) -> None:
    """Everything that could be wrong is found before the first circuit."""
    if unknown := [name for name in options if name not in METHODS]:
        raise ValueError(f"options for {unknown[0]!r}: methods are {', '.join(METHODS)}")
    metrics.check_metric(GapSettings(**gap_options).metric, task)
    for wanted in circuits:
        method = METHODS[wanted.method]
        check_search(masked, task, wanted.ablation)
        check_search(masked, task, wanted.searched, fixed="" if method.trains else wanted.method)
        arguments = wanted.arguments(options)
        store.check_call(method.search, masked, task, **arguments)
        if method.check is not None:
            method.check(masked, task, **arguments)


def sweep(
    masked: MaskedModel,
    task: Task,
    methods: Iterable[str],
    ablations: Iterable[str],
    grid: Mapping[Any, Sequence[float]],
    seeds: Iterable[int] | Mapping[Any, Sequence[int]] = (0,),
    options: Mapping[str, Mapping[str, Any]] | None = None,
    gap_options: Mapping[str, Any] | None = None,
    metric: str = "kl",
) -> pd.DataFrame:
    """A row for each method, ablation, value and seed: the circuit found, and its gap under the
    same ablation: KL, or by how much answers fall (`metric` as in `gap`), with its standard error,
    the gap of train prompts where constants were trained (`train`), and that of each test prompt
    (`each`).

    `grid` gives the values of λ, or of n_edges for eap, eap_ig and edge_pruning, by (method,
    ablation), by method, or by `"lam"` and `"n_edges"`; a method that stands there with some
    ablations runs under these only. `seeds` are for all, or by (method, ablation) with those of
    the others under None. `options` are settings by method, `gap_options` those of `gap`.
    What is stored is not computed again, so a sweep that was killed goes on. Under `optimal`, ACDC
    and EAP take the circuit found under `counterfactual` (column `searched`).
    `sweep_circuit(masked, row)` makes a row's circuit.
    """
    options = options or {}
    gap_options = {**(gap_options or {}), "metric": metric}
    circuits = _wanted(methods, ablations, grid, seeds)
    _check_sweep(masked, task, circuits, options, gap_options)

    def compute(_: Snapshots) -> dict:
        one = partial(
            find_and_measure,
            task=task,
            options=options,
            gap_options=gap_options,
            level=masked.graph.level,
        )
        return {"rows": models.each(one, masked.model, circuits, desc="circuits")}

    used = {wanted.method for wanted in circuits}
    result = store.run(
        "sweeps",
        None,
        compute,
        model=masked.model,
        task=task,
        inputs={
            "circuits": [list(wanted) for wanted in circuits],
            "options": {name: dict(given) for name, given in options.items() if name in used},
            "gap_options": dict(gap_options),
        }
        | masked.run_inputs,
        version=VERSION,
        key=f"{task.name}_n={len(task)}_{len(circuits)}-circuits",
    )
    return result.frame()


def sweep_circuit(masked: MaskedModel, row: Any) -> Circuit:
    """The circuit of one row of a sweep."""
    return Circuit(
        masked.graph,
        edge_mask(masked.graph, list(row.edges)),
        row.method,
        row.ablation,
        {"asked": row.asked},
        int(row.seed),
        gap=row.gap,
        model=masked.model.name,
        fingerprint=masked.model.fingerprint,
    )


# ---- random circuits


def random_circuits(
    masked: MaskedModel, size: int, n: int = 20, tolerance: float = 0.1, seed: int = 0
) -> list[Circuit]:
    """Circuits of edges drawn independently with one probability, whose pruned size is within
    `tolerance` of `size`."""
    graph = masked.graph
    if not 1 <= size <= len(graph) or n < 1 or not tolerance >= 0:
        raise ValueError(
            f"size must be from 1 to {len(graph)}, n from 1 on, tolerance from 0 on: "
            f"got {size}, {n}, {tolerance}"
        )
    rng = machine.generator(seed)
    low = 0.0
    high = 1.0
    u = torch.rand(64, len(graph), generator=rng)
    for _ in range(20):  # the same draws for every p, so the size grows with p
        p = (low + high) / 2
        if graph.prune_dangling(u < p).sum(1).float().mean() > size:
            high = p
        else:
            low = p
    masks: list[Tensor] = []
    drawn = 0
    while len(masks) < n and drawn < MOST_DRAWS:
        some = min(50, MOST_DRAWS - drawn)
        pruned = graph.prune_dangling(torch.rand(some, len(graph), generator=rng) < high)
        drawn += some
        masks += list(pruned[(pruned.sum(1) - size).abs() <= tolerance * size])
    if len(masks) < n:
        warnings.warn(
            f"only {len(masks)} of {drawn} random circuits had a size within {tolerance:.0%} "
            f"of {size}",
            stacklevel=2,
        )
    return [
        Circuit(
            graph,
            mask,
            "random",
            settings={"tolerance": tolerance, "p": high, "drawn": drawn, "i": i},
            seed=seed,
            model=masked.model.name,
            fingerprint=masked.model.fingerprint,
        )
        for i, mask in enumerate(masks[:n])
    ]


def _gap_of_one(
    model: Model,
    item: tuple[str, str, list[int], str],
    task: Task,
    gap_options: Mapping[str, Any],
    level: str = "edge",
) -> dict[str, Any]:
    ablation, kind, edges, method = item
    masked = _masked(model, level)
    circuit = Circuit(masked.graph, edge_mask(masked.graph, edges), method)
    delta = gap(masked, task, circuit, ablation, **gap_options)
    return {
        "task": task.name,
        "ablation": str(ablation),
        "kind": kind,
        "n_edges": circuit.n_edges,
        "gap": delta.mean,
        "se": delta.se,
        "curve": delta.curve,
    }


def against_random(
    masked: MaskedModel,
    task: Task,
    table: pd.DataFrame,
    n: int = 20,
    tolerance: float = 0.1,
    seed: int = 0,
    gap_options: Mapping[str, Any] | None = None,
) -> pd.DataFrame:
    """Each circuit of a sweep's table (`kind` found) beside n random ones of its size, all measured
    by the same protocol under the circuit's ablation, with the `curve` of their constants."""
    gap_options = gap_options or {}
    GapSettings(**gap_options)
    for ablation in table.ablation.unique():
        check_search(masked, task, ablation)

    def compute(_: Snapshots) -> dict:
        items = []
        for row in table.itertuples():
            items.append((row.ablation, "found", list(row.edges), row.method))
            own_seed = seed + 1000 * int(row.seed)
            for circuit in random_circuits(masked, row.n_edges, n, tolerance, own_seed):
                edges = circuit.mask.nonzero()[:, 0].tolist()
                items.append((row.ablation, "random", edges, "random"))
        level = masked.graph.level
        one = partial(_gap_of_one, task=task, gap_options=gap_options, level=level)
        return {"rows": models.each(one, masked.model, items, desc="random circuits")}

    result = store.run(
        "random_circuits",
        None,
        compute,
        model=masked.model,
        task=task,
        inputs={
            "circuits": store.fingerprint([list(edges) for edges in table.edges]),
            "ablations": table.ablation.tolist(),
            "n": n,
            "tolerance": tolerance,
            "seed": seed,
            "gap_options": dict(gap_options),
        }
        | masked.run_inputs,
        version=VERSION,
        key=f"{task.name}_n={n}",
    )
    return result.frame()
