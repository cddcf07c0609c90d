"""Sweeps: circuits of many methods, ablations, sizes and seeds, found and measured."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from oa_utils import metrics, models, store
from oa_utils.circuits import Circuit
from oa_utils.fills import find_ablation
from oa_utils.masked import MaskedModel
from oa_utils.models import Model
from oa_utils.search.gaps import VERSION, Gap, GapSettings, gap
from oa_utils.search.shared import Method, check_search, edge_mask, masked_of
from oa_utils.store import Snapshots
from oa_utils.tasks import Task

DIGITS = 4  # of the gaps of single prompts in a sweep
USUAL = "counterfactual"  # what methods that train no constants search under instead of OA


def collected_methods() -> dict[str, Method]:
    """The searches that the files of this folder declare as their METHODS."""
    methods: dict[str, Method] = {}
    for file in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if file.name != Path(__file__).stem:
            module = import_module(f"oa_utils.search.{file.name}")
            methods |= getattr(module, "METHODS", {})
    return methods


METHODS = collected_methods()
Options = Mapping[Any, Mapping[str, Any]]  # settings by method, or by (method, ablation)


def options_of(options: Options, method: str, ablation: Any) -> dict[str, Any]:
    """What a method is to be run with under an ablation: settings given for the two together come
    before those for the method."""
    return {**options.get(method, {}), **options.get((method, ablation), {})}


class Wanted(NamedTuple):
    """One circuit of a sweep."""

    method: str
    ablation: str
    value: float  # λ, or n_edges
    seed: int
    instead: str = USUAL  # of a trained ablation, in searches that train no constants

    @property
    def searched(self) -> str:
        """The ablation that it is searched under."""
        trained = find_ablation(self.ablation).trained
        return self.instead if trained and not METHODS[self.method].trains else self.ablation

    @property
    def named(self) -> list[Any]:
        """What names it in a stored sweep; what it is searched under, only where that is not the
        usual."""
        whole = [self.method, self.ablation, self.value, self.seed]
        return whole if self.searched in (self.ablation, USUAL) else [*whole, self.searched]

    def arguments(self, options: Options) -> dict[str, Any]:
        aim = METHODS[self.method].aim
        is_size = aim == "n_edges" and self.value == int(self.value)
        value = int(self.value) if is_size else self.value
        given = {"ablation": self.searched, "seed": self.seed, aim: value}
        return given | options_of(options, self.method, self.ablation)


def find_and_measure(
    model: Model,
    wanted: Wanted,
    task: Task,
    options: Options,
    gap_options: Mapping[str, Any],
    level: str = "edge",
) -> dict[str, Any]:
    """One circuit, found and measured: a row of a sweep."""
    masked = masked_of(model, level)
    circuit = METHODS[wanted.method].search(masked, task, **wanted.arguments(options))
    delta = gap(masked, task, circuit, wanted.ablation, **gap_options)
    return {
        "task": task.name,
        "method": wanted.method,
        "ablation": str(wanted.ablation),
        "searched": str(wanted.searched),
        "seed": wanted.seed,
        "level": circuit.settings.get("level", "edge"),
        "asked": wanted.value,
        "n_edges": circuit.n_edges,
        "n_heads": len(circuit.heads),
        "gap": delta.mean,
        "se": delta.se,
        "n": delta.n,
        "train": delta.train,
        "edges": circuit.mask.nonzero()[:, 0].tolist(),
        "each": gaps_of_prompts(delta),
    }


def gaps_of_prompts(delta: Gap) -> list[float]:
    """Those of single test prompts, as they stand in a table."""
    return [float(f"{x:.{DIGITS}g}") for x in delta.each.tolist()]


def _wanted(
    methods: Iterable[str],
    ablations: Iterable[str],
    grid: Mapping[Any, Sequence[float]],
    seeds: Iterable[int] | Mapping[Any, Sequence[int]],
    searched: Mapping[str, str],
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
        instead = searched.get(method, USUAL)
        circuits += [
            Wanted(method, ablation, value, seed, instead)
            for value in grid[keys[0]]
            for seed in own_seeds
        ]
    return circuits


def _check_options(options: Options) -> None:
    """Refuses settings of unknown methods, and those by which a sweep names its circuits."""
    for key, given in options.items():
        name, *ablation = key if isinstance(key, tuple) else (key,)
        if name not in METHODS:
            raise ValueError(f"options for {name!r}: methods are {', '.join(METHODS)}")
        for one in ablation:
            find_ablation(one)
        places = {
            "seed": "`seeds`",
            "ablation": "`ablations`, or what is searched in place of OA in `searched`",
            METHODS[name].aim: "`grid`",
        }
        for setting, place in places.items():
            if setting in given:
                raise ValueError(
                    f"options of {name} set its {setting}: rows of a sweep are named by it, so "
                    f"give it in {place}"
                )


def _check_searched(searched: Mapping[str, str]) -> None:
    for name, ablation in searched.items():
        if name not in METHODS:
            raise ValueError(f"searched for {name!r}: methods are {', '.join(METHODS)}")
        if METHODS[name].trains:
            raise ValueError(
                f"searched for {name}: it trains constants along, so it is always searched under "
                "the ablation of the sweep"
            )
        find_ablation(ablation)


def _check_sweep(
    masked: MaskedModel,
    task: Task,
    circuits: list[Wanted],
    options: Options,
    gap_options: Mapping[str, Any],
) -> None:
    """Everything that could be wrong with them is found before the first circuit."""
    metrics.check_metric(GapSettings(**gap_options).metric, task)
    for wanted in circuits:
        method = METHODS[wanted.method]
        check_search(masked, task, wanted.ablation)
        if find_ablation(wanted.searched).counterfactuals and task.counterfactual is None:
            raise ValueError(
                f"{wanted.method} trains no constants, so under '{wanted.ablation}' it takes the "
                f"circuit found under '{wanted.searched}', and task '{task.name}' has no "
                "counterfactual prompts: say what else to search under, for example "
                f"searched={{'{wanted.method}': 'mean'}}"
            )
        check_search(masked, task, wanted.searched, fixed="" if method.trains else wanted.method)
        arguments = wanted.arguments(options)
        store.check_call(method.search, masked, task, **arguments)
        if method.check is not None:
            method.check(masked, task, **arguments)


def _settings(masked: MaskedModel, task: Task, wanted: Wanted, options: Options) -> dict[str, Any]:
    """All settings of a method in a sweep, defaults included, but for what `Wanted` names."""
    method = METHODS[wanted.method]
    arguments = wanted.arguments(options)
    if hasattr(method.search, "check"):
        settings = dict(method.search.check(masked, task, **arguments))
        settings |= asdict(settings.pop("settings"))
    else:
        call = inspect.signature(method.search).bind(masked, task, **arguments)
        call.apply_defaults()
        settings = call.arguments
    named = ("masked", "task", "ablation", "seed", method.aim)
    return {name: value for name, value in settings.items() if name not in named}


def sweep(
    masked: MaskedModel,
    task: Task,
    methods: Iterable[str],
    ablations: Iterable[str],
    grid: Mapping[Any, Sequence[float]],
    seeds: Iterable[int] | Mapping[Any, Sequence[int]] = (0,),
    options: Options | None = None,
    gap_options: Mapping[str, Any] | None = None,
    metric: str | None = None,
    searched: Mapping[str, str] | None = None,
) -> pd.DataFrame:
    """A row for each method, ablation, value and seed: the circuit found, and its gap under the
    same ablation: KL, or by how much answers fall (`metric` as in `gap`, here or in `gap_options`),
    with its standard error, the gap of train prompts where constants were trained (`train`), and
    that of each test prompt (`each`).

    `grid` gives the values of λ, or of n_edges for eap, eap_ig and edge_pruning, by (method,
    ablation), by method, or by `"lam"` and `"n_edges"`; a method that stands there with some
    ablations runs under these only. `seeds` are for all, or by (method, ablation) with those of
    the others under None. `options` are settings by method, or by (method, ablation) what differs
    there, but for what rows are named by; `gap_options` are those of `gap`.
    ACDC and EAP train no constants: under `optimal` they take the circuit found under
    `counterfactual`, or under the ablation that `searched` has for the method, for example
    {"eap_ig": "mean"} where a task has no counterfactuals (column `searched`).
    What is stored is not computed again, so a sweep that was killed goes on.
    `sweep_circuit(masked, row)` makes a row's circuit.
    """
    options = options or {}
    searched = searched or {}
    gap_options = dict(gap_options or {})
    if metric is not None and gap_options.setdefault("metric", metric) != metric:
        raise ValueError(
            f"metric={metric!r} and gap_options['metric']={gap_options['metric']!r} differ: give "
            "one of them"
        )
    _check_options(options)
    _check_searched(searched)
    circuits = _wanted(methods, ablations, grid, seeds, searched)
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

    one_of_each = {_with_own(options, wanted): wanted for wanted in reversed(circuits)}
    result = store.run(
        "sweeps",
        None,
        compute,
        model=masked.model,
        task=task,
        inputs={
            "circuits": [wanted.named for wanted in circuits],
            "versions": {w.method: METHODS[w.method].version for w in circuits},
            "settings": {
                name: _settings(masked, task, wanted, options)
                for name, wanted in one_of_each.items()
            },
            "gap": asdict(GapSettings(**gap_options)),
        }
        | masked.run_inputs,
        version=VERSION,
        key=f"{task.name}_n={len(task)}_{len(circuits)}-circuits",
    )
    return result.frame()


def _with_own(options: Options, wanted: Wanted) -> str:
    """The name under which a circuit's settings are found: its method, and its ablation where that
    has settings of its own."""
    if (wanted.method, wanted.ablation) in options:
        return f"{wanted.method} {wanted.ablation}"
    return wanted.method


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
