"""How good a circuit is: its gap under any ablation, sweeps over methods, ablations and sizes, and
random circuits."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import Any, NamedTuple

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from oa_utils import machine, models, stats, store
from oa_utils.circuits import Circuit
from oa_utils.fills import Constants, EdgeFill, edge_constants, edge_fill, find_ablation
from oa_utils.masked import MaskedModel
from oa_utils.models import Model
from oa_utils.search.acdc import acdc
from oa_utils.search.eap import EAPSettings, check_eap, eap, eap_ig
from oa_utils.search.edge_pruning import edge_pruning
from oa_utils.search.hcgs import hcgs
from oa_utils.search.shared import (
    EVALUATION_BATCH,
    batch_of,
    check_search,
    check_size,
    edge_mask,
    spans,
)
from oa_utils.search.ugs import ugs
from oa_utils.store import Snapshots, at_least, with_settings
from oa_utils.tasks import Task

VERSION = 2
MOST_DRAWS = 2000  # random circuits tried at most


class Method(NamedTuple):
    search: Callable[..., Circuit]
    aim: str  # what says how large a circuit becomes: lam or n_edges
    trains: bool  # constants train along; the others' circuits found under CF are measured under OA


METHODS = {
    "ugs": Method(ugs, "lam", True),
    "hcgs": Method(hcgs, "lam", True),
    "acdc": Method(acdc, "lam", False),
    "eap": Method(eap, "n_edges", False),
    "eap_ig": Method(eap_ig, "n_edges", False),
    "edge_pruning": Method(edge_pruning, "n_edges", True),
}


# ---- the gap of one circuit


@dataclass(frozen=True)
class GapSettings:
    steps: int = 200  # of Adam, for the constants of `optimal`
    lr: float = 0.03  # falls to a tenth in the course of them
    batch: int = 32  # train prompts in a step
    look_every: int = 20  # steps between two looks at the train part, where the best are kept
    draws: int = 4  # derangements of `resample`, averaged for each prompt
    seed: int = 0

    def __post_init__(self):
        at_least(1, batch=self.batch, look_every=self.look_every, draws=self.draws)
        at_least(0, steps=self.steps, lr=self.lr)


@dataclass(frozen=True, eq=False)
class Gap:
    """Δ over test prompts, in nats."""

    mean: float
    se: float
    n: int
    each: Float[Tensor, " n"]
    constants: Constants | None = None  # those that `optimal` trained
    curve: Sequence[Sequence[float]] = ()  # (step, gap of the train part) while they trained

    def __float__(self) -> float:
        return self.mean

    def __repr__(self) -> str:
        return f"Gap({self.mean:.4g} ± {self.se:.2g} nats, n = {self.n})"


@torch.no_grad()
def measure(
    masked: MaskedModel,
    part: Task,
    mask: Tensor,
    fill: EdgeFill,
    full: Float[Tensor, "n vocab"],
) -> Float[Tensor, " n"]:
    """KL(full ‖ masked) of each prompt under one mask, taken as it is."""
    gaps = []
    for span in spans(masked, len(part), part.tokens.shape[1], EVALUATION_BATCH):
        rows = torch.arange(len(part))[span]
        logp = masked(*batch_of(part, rows), mask.float()[None], fill(rows), skip_dead=True)
        gaps.append(stats.kl(full[span], logp).cpu())
    return torch.cat(gaps)


def train_circuit_constants(
    masked: MaskedModel,
    task: Task,
    mask: Tensor,
    ablation: str,
    settings: GapSettings,
    snapshots: Snapshots,
) -> tuple[Constants, list[list[float]]]:
    """The best constants for one circuit that any look at the train part saw, the start first, and
    the gap at each look."""
    part = task.train
    full = part.log_probs(masked.model)
    rng = machine.generator(settings.seed)
    start = edge_constants(masked, task, find_ablation(ablation))
    constants = Constants(*(x.clone().requires_grad_() for x in start))
    # Adam's usual long memory would let the steep start slow all later steps
    optimiser = torch.optim.Adam(constants, lr=settings.lr, betas=(0.5, 0.9))
    best = constants.clone()
    curve: list[list[float]] = []  # [step, gap]
    step = 0
    state = snapshots.load()
    if state is not None:
        step = state["step"]
        curve = state["curve"]
        best = Constants(*state["best"])
        for value, saved in zip(constants, state["constants"], strict=True):
            value.data.copy_(saved)
        optimiser.load_state_dict(state["optimiser"])
        rng.set_state(state["rng"])

    def look() -> None:
        nonlocal best
        now = measure(masked, part, mask, lambda rows: constants, full).mean().item()
        if now <= min((value for _, value in curve), default=now):
            best = constants.clone()
        curve.append([step, now])

    if not curve:
        look()
    bar = machine.progress(total=settings.steps, desc="constants of a circuit")
    bar.update(step)
    while step < settings.steps:
        rows = torch.randperm(len(part), generator=rng)[: settings.batch]
        optimiser.param_groups[0]["lr"] = settings.lr * (1 - 0.9 * step / settings.steps)
        optimiser.zero_grad()
        for span in spans(masked, len(rows), part.tokens.shape[1]):
            some = rows[span]
            logp = masked(*batch_of(part, some), mask.float()[None], constants, skip_dead=True)
            (stats.kl(full[some], logp).sum() / len(rows)).backward()
        optimiser.step()
        step += 1
        bar.update()
        if step % settings.look_every == 0 or step == settings.steps:
            look()
            bar.set_postfix(KL=f"{curve[-1][1]:.3g}")
        if snapshots.due():
            snapshots.save(
                {
                    "step": step,
                    "curve": curve,
                    "best": list(best),
                    "constants": [value.detach() for value in constants],
                    "optimiser": optimiser.state_dict(),
                    "rng": rng.get_state(),
                }
            )
    bar.close()
    return best, curve


@with_settings
def gap(
    masked: MaskedModel,
    task: Task,
    circuit: Circuit,
    ablation: str = "counterfactual",
    *,
    settings: GapSettings,
) -> Gap:
    """Δ of a circuit on the test part; settings as in `GapSettings`, the same protocol for every
    method.

    Under `optimal`, constants (one for each vertex) are trained afresh on the train part, starting
    from the means.
    """
    check_search(masked, task, ablation)
    rule = find_ablation(ablation)
    model = masked.model
    circuit.check(model)

    def compute(snapshots: Snapshots) -> tuple[dict, dict[str, Tensor]]:
        curve = []
        tensors = {}
        if rule.trained:
            constants, curve = train_circuit_constants(
                masked, task, circuit.mask, ablation, settings, snapshots
            )
            fills = [lambda rows: constants]
            tensors = dict(constants._asdict())
        else:
            seeds = range(settings.seed, settings.seed + (settings.draws if rule.random else 1))
            fills = [edge_fill(masked, task, rule, "test", seed) for seed in seeds]
        test = task.test
        full = test.log_probs(model)
        draws = [measure(masked, test, circuit.mask, fill, full) for fill in fills]
        each = torch.stack(draws).mean(0)
        if not each.isfinite().all():
            raise RuntimeError(f"the gap of {circuit} under {ablation} is not finite")
        mean, se = stats.mean_se(each)
        numbers = {
            "method": circuit.method,
            "n_edges": circuit.n_edges,
            "gap": mean,
            "se": se,
            "n": len(each),
            "curve": curve,
        }
        return numbers, {"each": each, **tensors}

    result = store.run(
        "circuit_gaps",
        settings,
        compute,
        model=model,
        task=task,
        inputs={"circuit": store.fingerprint(circuit.mask), "ablation": str(ablation)},
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
        value = int(self.value) if aim == "n_edges" else self.value
        given = {"ablation": self.searched, "seed": self.seed, aim: value}
        return given | dict(options.get(self.method, {}))


@cache
def _masked(model: Model) -> MaskedModel:
    """A worker's masked model, made once."""
    return MaskedModel(model)


def find_and_measure(
    model: Model,
    wanted: Wanted,
    task: Task,
    options: Mapping[str, Mapping[str, Any]],
    gap_options: Mapping[str, Any],
) -> dict[str, Any]:
    """One circuit, found and measured: a row of a sweep."""
    masked = _masked(model)
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
        "edges": circuit.mask.nonzero()[:, 0].tolist(),
    }


def _wanted(
    methods: Iterable[str],
    ablations: Iterable[str],
    grid: Mapping[Any, Sequence[float]],
    seeds: Sequence[int],
) -> list[Wanted]:
    """The circuits of a sweep, in order."""
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
        circuits += [Wanted(method, ablation, v, s) for v in grid[keys[0]] for s in seeds]
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
    GapSettings(**gap_options)
    for wanted in circuits:
        method = METHODS[wanted.method]
        check_search(masked, task, wanted.ablation)
        check_search(masked, task, wanted.searched, fixed="" if method.trains else wanted.method)
        arguments = wanted.arguments(options)
        store.check_call(method.search, masked, task, **arguments)
        if method.aim == "n_edges":
            check_size(arguments.pop("n_edges"), masked.graph)
        if method.search in (eap, eap_ig):
            check_eap(masked, task, EAPSettings(**arguments))


def sweep(
    masked: MaskedModel,
    task: Task,
    methods: Iterable[str],
    ablations: Iterable[str],
    grid: Mapping[Any, Sequence[float]],
    seeds: Iterable[int] = (0,),
    options: Mapping[str, Mapping[str, Any]] | None = None,
    gap_options: Mapping[str, Any] | None = None,
) -> pd.DataFrame:
    """A row for each method, ablation, value and seed: the circuit found, and its gap under the
    same ablation.

    `grid` gives the values of λ, or of n_edges for eap, eap_ig and edge_pruning, by (method,
    ablation), by method, or by `"lam"` and `"n_edges"`; a method that stands there with some
    ablations runs under these only. `options` are settings by method, `gap_options` those of `gap`.
    What is stored is not computed again, so a sweep that was killed goes on. Under `optimal`, ACDC
    and EAP take the circuit found under `counterfactual` (column `searched`).
    `sweep_circuit(masked, row)` makes a row's circuit.
    """
    options = options or {}
    gap_options = gap_options or {}
    circuits = _wanted(methods, ablations, grid, list(seeds))
    _check_sweep(masked, task, circuits, options, gap_options)

    def compute(_: Snapshots) -> dict:
        one = partial(find_and_measure, task=task, options=options, gap_options=gap_options)
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
        },
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
) -> dict[str, Any]:
    ablation, kind, edges, method = item
    masked = _masked(model)
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
            for circuit in random_circuits(masked, row.n_edges, n, tolerance, seed):
                edges = circuit.mask.nonzero()[:, 0].tolist()
                items.append((row.ablation, "random", edges, "random"))
        one = partial(_gap_of_one, task=task, gap_options=gap_options)
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
        },
        version=VERSION,
        key=f"{task.name}_n={n}",
    )
    return result.frame()
