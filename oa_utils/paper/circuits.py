"""Paper §3 and appendix F: the authors' fronts, the manual circuits, and the claims on fronts
measured here.

Everything takes any task; where the paper has numbers for a task of that name, they are joined on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from oa_utils import models, plots, stats, store
from oa_utils.circuits import manual_circuit
from oa_utils.graph import Graph
from oa_utils.machine import choose
from oa_utils.masked import MaskedModel
from oa_utils.models import Model
from oa_utils.paper.claims import Claim
from oa_utils.search import gap, sweep
from oa_utils.search.evaluate import Wanted, find_and_measure
from oa_utils.tasks import Task

WAYS = ("counterfactual", "optimal", "mean", "resample")
BASELINES = ("hcgs", "acdc", "eap", "eap_ig")
TASKS = {"ioi": "ioi", "greater_than": "gt"}  # our tasks' names: the anchors' and the claims'
# the settings of Edge Pruning's own evaluation, as in the paper
EDGE_PRUNING = {"ioi": "counterfactual", "greater_than": "resample"}
LOWER = {
    "counterfactual": 0.32,
    "mean": 0.62,
    "resample": 0.88,
}  # OA on IOI at 1,000 edges, by so much
MANUAL_GAP = {"ioi": 0.29, "gt": 0.42}  # the best circuit's Δ_opt below that of the manual one
AUTHORS = "authors' log, GPT-2-small"
COLUMNS = {"edges": "n_edges", "delta_kl": "gap"}
NAMES = {
    "cf": "counterfactual",
    "oa": "optimal",
    "UGS": "ugs",
    "HCGS_final": "hcgs",
    "ACDC": "acdc",
    "EAP": "eap",
    "EdgePruning": "edge_pruning",
}
# what can be changed in a search, one thing at a time: method, ablation, settings, needs CF
VARIANTS = {
    "OA: as in the paper": ("ugs", "optimal", {}),
    "OA: constants along all edges": ("ugs", "optimal", {"everywhere": True}),
    "OA: pruning by batch": ("ugs", "optimal", {"pruning": "batch"}),
    "CF: as in the paper": ("ugs", "counterfactual", {}),
    "CF: random start": ("ugs", "counterfactual", {"noise": 1.0}),
    "CF: variance window": ("ugs", "counterfactual", {"variance": (0.5, 2.0)}),
    "HCGS, CF: right stretch": ("hcgs", "counterfactual", {}),
    "HCGS, CF: released stretch": ("hcgs", "counterfactual", {"released": True}),
}
Options = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Study:
    """What a comparison of searches spends on a task; change fields with `dataclasses.replace`."""

    n: int  # prompts, half of them to search and half to measure
    lam: tuple[float, ...]  # prices of an edge for UGS, HCGS and ACDC, large first
    lam_few: tuple[float, ...]  # the same for ablations that are there for comparison
    shares: tuple[float, ...]  # of all edges: sizes for EAP, EAP-IG and Edge Pruning
    options: Options  # settings of each search
    gap_options: Mapping[str, Any]  # and of the constants of OA, trained after the search
    acdc: bool = True  # ACDC runs the model for every edge: too much for a larger one

    @property
    def middle(self) -> float:
        """The price at which searches are looked at closely."""
        return self.lam[min(1, len(self.lam) - 1)]

    def sizes(self, graph: Graph) -> list[int]:
        return [round(share * len(graph)) for share in self.shares]

    def grid(self, graph: Graph, task: Task) -> dict[tuple[str, str], Sequence[float]]:
        """Prices or sizes for every search under every ablation that the task allows."""
        has_cf = task.counterfactual is not None
        answers = all((ids >= 0).any(-1).all() for ids in (task.right, task.wrong))
        grid: dict[tuple[str, str], Sequence[float]] = {}
        for way in ways(task):
            few = way in ("mean", "resample")
            for method in ("ugs", "hcgs"):
                grid[method, way] = self.lam_few if few else self.lam
            if way == "optimal" and not has_cf:  # the others search under CF and are measured here
                continue
            if self.acdc:
                grid["acdc", way] = self.lam[-2:] if few else self.lam  # smaller at the same λ
            if answers:
                grid["eap", way] = self.sizes(graph)
            grid["eap_ig", way] = self.sizes(graph)
        grid["edge_pruning", EDGE_PRUNING.get(task.name, "mean")] = self.sizes(graph)
        return grid

    def table(self) -> pd.DataFrame:
        """What each search spends, for the notebook."""
        rows = {name: dict(given) for name, given in self.options.items()}
        rows["gap under OA"] = dict(self.gap_options)
        columns = ["steps", "prompts", "masks", "batch"]
        return pd.DataFrame(rows).T.reindex(columns=columns).fillna("")


def study(model: Model, task_name: str) -> Study:
    """The budget of notebooks 02 to 04."""
    is_gt = task_name == "greater_than"
    small = (0.02, 0.006, 0.002, 0.0005) if is_gt else (0.03, 0.01, 0.003, 0.001)
    large = (3e-3, 1e-3, 3e-4, 1e-4)
    paper = (2e-2, 1e-2, 5e-3, 2e-3, 1e-3, 5e-4, 2e-4, 1e-4, 5e-5, 2e-5)
    lam = choose(model, test=(0.02,), small=small, default=large, paper=paper)
    few = lam[1::2] if is_gt else lam[:3:2]
    steps = choose(model, test=3, small=300 if is_gt else 225, default=300, paper=6000)
    pace = choose(
        model,
        test={"prompts": 4, "masks": 3},
        small={"prompts": 4, "masks": 3},
        default={"prompts": 4, "masks": 3},
        paper={"prompts": 5, "masks": 12},
    )
    pruning = {
        "prompts": 8 if is_gt else 6,
        "lr_multipliers": choose(model, test=0.2, small=0.2, default=0.8, paper=0.8),
    }
    after = 80 if is_gt else 70
    fitting = {"steps": after, "batch": 8, "look_every": after, "draws": 2}
    return Study(
        n=choose(model, test=24, small=256, default=128, paper=10_000),
        lam=lam,
        lam_few=choose(model, test=lam, small=few, default=few, paper=lam),
        shares=choose(
            model,
            test=(0.05,),
            small=(0.03, 0.05, 0.08, 0.12),
            default=(0.03, 0.05, 0.08, 0.12),
            paper=(0.01, 0.03, 0.05, 0.08, 0.12),
        ),
        options={
            "ugs": {"steps": steps, **pace},
            "hcgs": {"steps": steps, **pace},
            "edge_pruning": {"steps": steps, **pruning},
            "acdc": {"prompts": choose(model, test=2, small=6, default=6, paper=32)},
            "eap_ig": {"path": "masks"},
        },
        gap_options=choose(
            model,
            test={"steps": 2, "batch": 8, "look_every": 2},
            small=fitting,
            default=fitting,
            paper={"steps": 10_000, "batch": 75, "lr": 0.01},
        ),
        acdc=choose(model, test=False, small=True, default=False, paper=True),
    )


def ways(task: Task) -> list[str]:
    """The paper's ablations that a task has the prompts for."""
    return [way for way in WAYS if way != "counterfactual" or task.counterfactual is not None]


def short_name(task: Task) -> str:
    """The word that stands for a task in claims and figures."""
    return TASKS.get(task.name, task.name)


def paper_front(task: Task) -> pd.DataFrame:
    """GPT-2-small's circuits from the authors' logs and figures, with the columns of `sweep`; no
    row for other tasks."""
    table = pd.read_csv(store.data_folder() / "anchors" / "pareto.csv")
    table = table.rename(columns=COLUMNS).replace(NAMES)
    mine = (table.task == TASKS.get(task.name)) & (table.method != "HCGS_early")
    return table[mine].assign(se=0.0)


def manual_gaps(
    masked: MaskedModel, task: Task, gap_options: Mapping[str, Any]
) -> pd.DataFrame | None:
    """The manual circuit under every ablation: measured where the model is of its shape, else
    the authors' numbers; None where nobody found one."""
    circuit = manual_circuit(task.name, masked.graph)
    if circuit is None:
        rows = paper_front(task).query("method == 'manual'")
        columns = ["ablation", "n_edges", "gap", "se"]
        return rows[columns].assign(source=AUTHORS) if len(rows) else None
    rows = []
    for way in ways(task):
        delta = gap(masked, task, circuit, way, **gap_options)
        size = {"ablation": way, "n_edges": circuit.n_edges}
        rows.append({**size, "gap": delta.mean, "se": delta.se})
    return pd.DataFrame(rows).assign(source=masked.model.name)


def variants(
    masked: MaskedModel,
    task: Task,
    lam: float,
    options: Options,
    gap_options: Mapping[str, Any],
    seed: int = 0,
) -> pd.DataFrame:
    """A row for each of `VARIANTS` that the task allows, found and measured like the circuits of
    a front; `cost` is Δ + λ edges."""
    wanted = {
        name: (Wanted(method, ablation, lam, seed), {**options.get(method, {}), **change})
        for name, (method, ablation, change) in VARIANTS.items()
        if ablation in ways(task)
    }
    one = partial(_variant, task=task, gap_options=gap_options)
    rows = models.each(one, masked.model, wanted.values(), desc="variants")
    table = pd.DataFrame(rows, index=pd.Index(wanted, name="variant"))
    return table.assign(cost=table.gap + lam * table.n_edges)


def _variant(
    model: Model,
    item: tuple[Wanted, Mapping[str, Any]],
    task: Task,
    gap_options: Mapping[str, Any],
) -> dict[str, Any]:
    wanted, options = item
    return find_and_measure(model, wanted, task, {wanted.method: options}, gap_options)


# ---- fronts compared


def front_of(table: pd.DataFrame, method: str, ablation: str) -> pd.DataFrame:
    return table[(table.method == method) & (table.ablation == ablation)]


def at_size(table: pd.DataFrame, method: str, ablation: str, size: float) -> float:
    """Δ of a front at a size, log Δ linear between circuits; NaN outside of it."""
    part = front_of(table, method, ablation)
    return stats.interpolate(part.n_edges, part.gap, size)


def ratio(table: pd.DataFrame, one: tuple[str, str], other: tuple[str, str]) -> float:
    """Δ of one (method, ablation) over that of the other at equal size: geometric mean over the
    sizes both span."""
    first, second = (front_of(table, *which)[["n_edges", "gap"]] for which in (one, other))
    return stats.front_ratio(first.to_numpy(), second.to_numpy())


def interval(
    table: pd.DataFrame,
    one: tuple[str, str],
    other: tuple[str, str],
    n: int = 200,
    seed: int = 0,
) -> tuple[float | None, float | None]:
    """95 % of what the ratio of two fronts could be if each gap varied by its standard error
    over prompts."""
    rng = np.random.default_rng(seed)
    fronts = [
        front_of(table, *which)[["n_edges", "gap", "se"]].to_numpy() for which in (one, other)
    ]
    ratios = []
    for _ in range(n):
        drawn = [
            np.stack([front[:, 0], np.abs(rng.normal(front[:, 1], front[:, 2]))], 1)
            for front in fronts
        ]
        ratios.append(stats.front_ratio(*drawn))
    finite = [x for x in ratios if np.isfinite(x)]
    if not finite:
        return None, None
    low, high = np.quantile(finite, [0.025, 0.975])
    return float(low), float(high)


# ---- claims


def claims(table: pd.DataFrame, task: Task, manual: pd.DataFrame | None = None) -> list[Claim]:
    """Every claim of §3 that this table has the fronts for; one seed of each."""
    table = table[table.seed == table.seed.min()]
    paper = paper_front(task)
    listed = []
    for ablation in WAYS:
        for other in BASELINES:
            said = ratio(paper, ("ugs", ablation), (other, ablation))
            text = (
                f"UGS has lower Δ than {plots.LABELS[other]} at equal size, under "
                f"{plots.LABELS[ablation]} (ratio)"
            )
            known = (
                "paper: ratio of the authors' fronts" if np.isfinite(said) else "not in the paper"
            )
            id = f"front.{ablation}.{other}"
            sides = (("ugs", ablation), (other, ablation))
            listed.append(_ratio_claim(table, task, id, text, *sides, said, known))
    for other in ("counterfactual", "mean", "resample"):
        said = ratio(paper, ("ugs", "optimal"), ("ugs", other))
        note = "paper: authors' fronts"
        if task.name == "ioi":
            note += f"; {LOWER[other]:.0%} lower at 1,000 edges"
        text = (
            f"circuits have lower Δ under OA than under {plots.LABELS[other]} at equal size "
            "(UGS; ratio)"
        )
        sides = (("ugs", "optimal"), ("ugs", other))
        listed.append(_ratio_claim(table, task, f"ablation.{other}", text, *sides, said, note))
    listed.append(_edge_pruning_claim(table, task, paper))
    if manual is not None:
        listed += manual_claims(table, task, manual)
    return [claim for claim in listed if claim is not None]


def _number(x: float) -> float | None:
    return float(x) if np.isfinite(x) else None


def _ratio_claim(
    table: pd.DataFrame,
    task: Task,
    id: str,
    text: str,
    one: tuple[str, str],
    other: tuple[str, str],
    said: float,
    note: str = "",
) -> Claim | None:
    """That one front is below another; None where the table lacks one of them."""
    fronts = set(zip(table.method, table.ablation, strict=True))
    if one not in fronts or other not in fronts:
        return None
    value = ratio(table, one, other)
    low, high = interval(table, one, other)
    decided = bool(np.isfinite(value))
    return Claim(
        f"circuits_{short_name(task)}.{id}",
        text,
        _number(said),
        _number(value),
        low,
        high,
        bool(value < 1) if decided else None,
        source="sweeps",
        note=note if decided else "the two fronts span no common size",
    )


def _edge_pruning_claim(table: pd.DataFrame, task: Task, paper: pd.DataFrame) -> Claim | None:
    way = EDGE_PRUNING.get(task.name, "mean")
    sides = (("hcgs", way), ("edge_pruning", way))
    text = f"Edge Pruning does not outperform HCGS, under {plots.LABELS[way]} (ratio HCGS / EP)"
    return _ratio_claim(table, task, "edge_pruning", text, *sides, ratio(paper, *sides))


def manual_claims(table: pd.DataFrame, task: Task, manual: pd.DataFrame) -> list[Claim]:
    """How far the best circuit of the manual one's size is below it: little under OA, much under
    the others."""
    measured = bool((manual.source != AUTHORS).all())
    fronts = table if measured else paper_front(task)
    listed = []
    for row in manual.itertuples():
        under_oa = row.ablation == "optimal"
        label = plots.LABELS[row.ablation]
        text = f"the best of its size is far below the manual circuit under {label} (> half)"
        if under_oa:
            text = "under OA the manual circuit is about optimal for its size (best < half below)"
        below = 1 - at_size(fronts, "ugs", row.ablation, row.n_edges) / row.gap
        listed.append(
            Claim(
                f"circuits_{short_name(task)}.manual.{row.ablation}",
                text,
                MANUAL_GAP.get(short_name(task)) if under_oa else None,
                below if measured else None,
                holds=bool((below < 0.5) == under_oa) if measured else None,
                source="sweeps",
                note="" if measured else f"needs GPT-2-small: the authors' logs give {below:.2f}",
            )
        )
    return listed


def estimator_claims(slopes: pd.DataFrame, task: Task) -> list[Claim]:
    """On the table of `estimator_errors`."""
    rms = slopes.groupby("estimator").rms.mean()
    names = {"importance": "importance sampling", "hcgs": "HardConcrete"}
    listed = []
    for name, words in names.items():
        value = float(rms["ugs"] / rms[name])
        text = f"UGS estimates marginal gaps better than {words} (ratio of rms errors)"
        id = f"circuits_{short_name(task)}.estimator.{name}"
        listed.append(Claim(id, text, None, value, holds=value < 1, source="estimators"))
    return listed


def option_claims(tried: pd.DataFrame, task: Task) -> list[Claim]:
    """On the table of `variants`."""
    said = {
        "random start": "a random start is worse",
        "variance window": "the variance factor does not improve the results",
    }
    listed = []
    for name, words in said.items():
        if f"CF: {name}" not in tried.index:
            continue
        value = float(tried.cost[f"CF: {name}"] / tried.cost["CF: as in the paper"])
        text = f"{words} (ratio of Δ + λ edges, UGS under CF, one seed)"
        id = f"circuits_{short_name(task)}.option.{name.replace(' ', '_')}"
        listed.append(Claim(id, text, None, value, holds=value >= 1, source="sweeps"))
    return listed


# ---- spoofing by resample ablation


def spoofing(
    masked: MaskedModel,
    tasks: Iterable[Task],
    lam: float,
    options: Options,
    gap_options: Mapping[str, Any],
) -> pd.DataFrame:
    """Δ of UGS circuits under resample over that under CF, at one λ, for each task; beside
    GPT-2-small's at equal sizes."""
    rows = []
    for task in tasks:
        both = ["counterfactual", "resample"]
        table = sweep(
            masked, task, ["ugs"], both, {"lam": [lam]}, [0], options, gap_options
        ).set_index("ablation")
        row: dict[str, Any] = {"task": short_name(task)}
        for column in ("gap", "n_edges"):
            row |= {f"{column} {way}": table.at[way, column] for way in both}
        row["ratio"] = table.gap["resample"] / table.gap["counterfactual"]
        row["paper"] = ratio(paper_front(task), ("ugs", "resample"), ("ugs", "counterfactual"))
        rows.append(row)
    return pd.DataFrame(rows).set_index("task")


def spoofing_claims(table: pd.DataFrame) -> list[Claim]:
    """On the table of `spoofing`, for Greater-Than and IOI."""
    if not {"gt", "ioi"} <= set(table.index):
        return []
    said = float(table.paper["gt"] / table.paper["ioi"])
    value = float(table.ratio["gt"] / table.ratio["ioi"])
    text = (
        "resample is mild on Greater-Than and harsh on IOI (Δ resample / Δ CF, Greater-Than over "
        "IOI)"
    )
    return [Claim("circuits_gt.resample", text, said, value, holds=value < 1, source="sweeps")]
