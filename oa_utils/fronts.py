"""Pareto fronts of circuits (paper §3, appendix F): a stored sweep, its pictures and its numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from oa_utils import plots, runs, stats, tasks
from oa_utils.circuits import Circuit, manual_greater_than, manual_ioi
from oa_utils.graph import Graph
from oa_utils.masked import MaskedModel
from oa_utils.models import DATA, Model
from oa_utils.search import gap, sweep
from oa_utils.search.evaluate import find, load_as

VERSION = 2
TASKS = {"ioi": tasks.ioi, "gt": tasks.greater_than}
MANUAL = {"ioi": manual_ioi, "gt": manual_greater_than}
WAYS = ("counterfactual", "optimal", "mean", "resample")
EDGE_PRUNING = {"ioi": "counterfactual", "gt": "resample"}  # the settings of its own evaluation, as in the paper
NAMES = {"cf": "counterfactual", "oa": "optimal", "UGS": "ugs", "HCGS_final": "hcgs", "ACDC": "acdc", "EAP": "eap",
         "EdgePruning": "edge_pruning", "edges": "n_edges", "delta_kl": "gap"}  # fmt: skip


CHANGES = {  # what `variants` can change in a search, one thing at a time
    "OA: as in the paper": ("ugs", "optimal", {}),
    "OA: constants along all edges": ("ugs", "optimal", {"everywhere": True}),
    "OA: pruning by batch": ("ugs", "optimal", {"pruning": "batch"}),
    "CF: as in the paper": ("ugs", "counterfactual", {}),
    "CF: random start": ("ugs", "counterfactual", {"noise": 1.0}),
    "CF: variance window": ("ugs", "counterfactual", {"variance": (0.5, 2.0)}),
    "HCGS, CF: right stretch": ("hcgs", "counterfactual", {}),
    "HCGS, CF: released stretch": ("hcgs", "counterfactual", {"released": True}),
}


@dataclass(frozen=True)
class FrontSettings:
    """Everything a front depends on besides the model."""

    task: str  # ioi or gt
    n: int  # prompts, half of them to search and half to measure
    grid: tuple[tuple[str, str, tuple[float, ...]], ...]  # method, ablation, values of λ or of n_edges
    options: tuple[tuple[str, dict], ...] = ()  # settings of a method
    gap: tuple[tuple[str, float], ...] = ()  # settings of `gap`
    seeds: tuple[int, ...] = (0,)
    seed: int = 0  # of the prompts


def front_task(model: Model, settings: FrontSettings) -> tasks.Task:
    return TASKS[settings.task](model, settings.n, seed=settings.seed)


def fronts(masked: MaskedModel, settings: FrontSettings) -> pd.DataFrame:
    """`sweep` over the grid as one stored table, a row for each circuit with its edges."""
    task = front_task(masked.model, settings)
    grid = {(method, ablation): values for method, ablation, values in settings.grid}
    methods, ablations = (list(dict.fromkeys(key[i] for key in grid)) for i in (0, 1))
    grid = {(m, a): grid.get((m, a), ()) for m in methods for a in ablations}

    def compute(_):
        found = sweep(masked, task, methods, ablations, grid, settings.seeds, dict(settings.options), **dict(settings.gap))
        return {"rows": found.to_dict("records")}

    key = f"{settings.task}_n={settings.n}_{len(settings.grid)}-fronts_{len(settings.seeds)}-seeds"
    done = runs.run("fronts", settings, compute, model=masked.model, task=task, version=VERSION, key=key)
    return done.frame()


def variants(masked: MaskedModel, settings: FrontSettings, lam: float, names: Iterable[str] = tuple(CHANGES)) -> pd.DataFrame:
    """A row for each of `CHANGES`, found and measured like the circuits of a front; `cost` is Δ + λ edges."""
    one, name, names = dict(settings.options), load_as(masked.model), list(names)
    items = [((m, a, lam, settings.seeds[0]), {m: {**one.get(m, {}), **change}}) for m, a, change in map(CHANGES.get, names)]
    task, post = front_task(masked.model, settings), dict(settings.gap)
    jobs = partial(_variant, masked=None if name else masked, name=name, task=task, gap_settings=post)
    rows = runs.parallel(jobs, items, desc="variants") if name else [jobs(item) for item in runs.progress(items)]
    found = pd.DataFrame(rows).assign(variant=names).set_index("variant")
    return found.assign(cost=found.gap + lam * found.n_edges)


def _variant(item: tuple, **about) -> dict:
    return find(item[0], options=item[1], **about)


def circuit_of(masked: MaskedModel, row: pd.Series) -> Circuit:
    """The circuit of one row of a front."""
    mask = torch.zeros(len(masked.graph), dtype=torch.bool)
    mask[row.edges] = True
    own = masked.model.name, masked.model.fingerprint
    return Circuit(masked.graph, mask, row.method, row.ablation, {"asked": row.asked}, row.seed, {}, row.gap, *own)


@cache
def paper_front(task: str) -> pd.DataFrame:
    """GPT-2-small's circuits from the authors' logs and figures, with the columns of `fronts`."""
    table = pd.read_csv(DATA / "anchors" / "pareto.csv").rename(columns=NAMES).replace(NAMES)
    return table[(table.task == task) & (table.method != "HCGS_early")].assign(se=0.0)


def manual_gaps(masked: MaskedModel, settings: FrontSettings) -> pd.DataFrame:
    """The manual circuit under every ablation: measured where the graph is GPT-2-small's, else the authors' numbers."""
    paper = paper_front(settings.task).query("method == 'manual'")[["ablation", "n_edges", "gap", "se"]]
    if masked.graph != Graph(12, 12):
        return paper.assign(source="authors' log, GPT-2-small")
    task, circuit = front_task(masked.model, settings), MANUAL[settings.task](masked.graph)
    gaps = {a: gap(masked, task, circuit, a, **dict(settings.gap)) for a in WAYS}
    rows = [{"ablation": a, "n_edges": circuit.n_edges, "gap": g.mean, "se": g.se} for a, g in gaps.items()]
    return pd.DataFrame(rows).assign(source=masked.model.name)


# ---- pictures


def plot_front(ax: Axes, table: pd.DataFrame, by: str = "method", label: bool = True) -> None:
    """Every circuit as a point with two standard errors, and the front of each method (or ablation) as a line."""
    for name, part in table.groupby(by, sort=False):
        look = plots.style(name)
        line = part.iloc[stats.pareto(part.n_edges, part.gap)]
        ax.plot(line.n_edges, line.gap, color=look["color"], ls=look["linestyle"], lw=1.4)
        looks = {"color": look["color"], "marker": look["marker"], "label": look["label"] if label else None}
        ax.errorbar(part.n_edges, part.gap, 2 * part.se, ls="", mec="#333333", mew=0.4, elinewidth=0.8, capsize=2, **looks)
    ax.set(xscale="log", yscale="log", xlabel="edges", ylabel="Δ (nats)")
    wide = table.n_edges.max() > 50 * max(1, table.n_edges.min())
    ax.xaxis.set_major_locator(LogLocator(subs=(1,) if wide else (1, 2, 5)))
    ax.xaxis.set_major_formatter(StrMethodFormatter("{x:.0f}"))
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.yaxis.set_minor_formatter(NullFormatter())


def legend(fig: Figure) -> None:
    """One for all panels, each name once, at the right."""
    found = {label: handle for ax in fig.axes for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    fig.legend(found.values(), found, loc="outside right upper", fontsize=8)


# ---- numbers


def at_size(table: pd.DataFrame, method: str, ablation: str, size: float | np.ndarray) -> float | np.ndarray:
    """Δ of a front at a size, log Δ linear between circuits; NaN outside of it."""
    part = table[(table.method == method) & (table.ablation == ablation)]
    return stats.interpolate(part.n_edges, part.gap, size)


def ratio(table: pd.DataFrame, one: tuple[str, str], other: tuple[str, str]) -> float:
    """Δ of one (method, ablation) over that of the other at equal size: geometric mean over the sizes both fronts span."""
    parts = [table[(table.method == m) & (table.ablation == a)] for m, a in (one, other)]
    return ratio_of(*(part[["n_edges", "gap"]].to_numpy() for part in parts))


def ratio_of(one: np.ndarray, other: np.ndarray) -> float:
    """The same of arrays [circuit, (size, Δ)]; NaN where no size lies on both fronts."""
    if min(len(one), len(other)) == 0:
        return np.nan
    low, high = max(one[:, 0].min(), other[:, 0].min()), min(one[:, 0].max(), other[:, 0].max())
    sizes = np.geomspace(max(low, 1), max(high, 1), 20)
    with np.errstate(all="ignore"):
        logs = np.log(stats.interpolate(*one.T, sizes)) - np.log(stats.interpolate(*other.T, sizes))
    return float(np.exp(np.nanmean(logs))) if low <= high and np.isfinite(logs).any() else np.nan
