"""Paper §3 and appendix F: the authors' fronts, the manual circuits, and the claims on fronts
measured here.

Everything takes any task; where the paper has numbers for a task of that name, they are joined on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor

from oa_utils import models, plots, stats, store
from oa_utils.circuits import Circuit, manual_circuit
from oa_utils.fills import ABLATIONS, edge_constants
from oa_utils.graph import Graph
from oa_utils.machine import choose
from oa_utils.masked import MaskedModel
from oa_utils.models import Model
from oa_utils.paper.claims import Claim
from oa_utils.search import gap, sweep, sweep_circuit, ugs
from oa_utils.search.sweeps import METHODS, Options, Wanted, find_and_measure, options_of
from oa_utils.search.ugs import SLOWER, UGSSettings, learning_rate
from oa_utils.tasks import Task

WAYS = ("counterfactual", "optimal", "mean", "resample")
BASELINES = ("hcgs", "acdc", "eap", "eap_ig", "eap_ig_masks")
GPT2_EDGES = 32_491  # of GPT-2-small, the paper's model
FEWER_EDGES = 0.48  # UGS's size over that of ACDC's circuit of the same Δ, IOI under CF
TASKS = {"ioi": "ioi", "greater_than": "gt"}  # our tasks' names: the anchors' and the claims'
TITLES = {"ioi": "IOI", "greater_than": "Greater-Than"}  # and those of figures
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
# what can be changed in a search, one thing at a time: method, ablation, settings
VARIANTS = {
    "OA: as in the sweep": ("ugs", "optimal", {}),
    "OA: constants along all edges": ("ugs", "optimal", {"everywhere": True}),
    "OA: pruning by batch": ("ugs", "optimal", {"pruning": "batch"}),
    "CF: as in the sweep": ("ugs", "counterfactual", {}),
    "CF: random start": ("ugs", "counterfactual", {"noise": 1.0}),
    "CF: variance window": ("ugs", "counterfactual", {"variance": (0.5, 2.0)}),
    "CF: window half as wide": ("ugs", "counterfactual", {"window": 0.5}),
    "CF: window twice as wide": ("ugs", "counterfactual", {"window": 2.0}),
    "CF: no price of vertices": ("ugs", "counterfactual", {"gamma": 0.0}),
    "HCGS, CF: right stretch": ("hcgs", "counterfactual", {}),
    "HCGS, CF: released stretch": ("hcgs", "counterfactual", {"released": True}),
}
MAIN_VARIANTS = (  # those that claims and a figure of notebook 02 rest on
    "OA: as in the sweep",
    "OA: constants along all edges",
    "CF: as in the sweep",
    "CF: random start",
    "CF: variance window",
)
UNITS = ("steps", "prompts", "masks", "points")  # in which searches spend
NARROW = 1.25  # fronts that meet over less than this factor decide nothing


@dataclass(frozen=True)
class Study:
    """What a comparison of searches spends on a task; change fields with `dataclasses.replace`."""

    n: int  # prompts: half to search, a tenth to choose settings, the others to measure
    lam: tuple[float, ...]  # prices of an edge for UGS, HCGS and ACDC, large first
    lam_oa: tuple[float, ...]  # the same under OA, where circuits of a price are smaller
    # under mean and resample, which are there for comparison, by ablation, or by (search, ablation)
    # where one differs; `lam` where nothing is given
    lam_few: Mapping[Any, tuple[float, ...]]
    shares: tuple[float, ...]  # of all edges: sizes for EAP, EAP-IG and Edge Pruning
    shares_oa: tuple[float, ...]  # the same under OA, where constants are trained for each circuit
    options: Options  # settings of each search, or of (search, ablation) where they differ there
    gap_options: Mapping[str, Any]  # and of the constants of OA, trained after the search
    seeds: int = 1  # under CF and OA, of
    seeded: tuple[str, ...] = ("ugs", "hcgs")  # these searches
    most_hcgs: int = 3  # prices for HCGS, under CF and OA
    methods: tuple[str, ...] = ("ugs", "hcgs", "acdc", "eap", "eap_ig", "eap_ig_masks")
    not_few: tuple[str, ...] = ()  # of these, left out under mean and resample
    variants: tuple[str, ...] = tuple(VARIANTS)  # of the searches, tried one at a time

    def __post_init__(self):
        if unknown := [name for name in self.variants if name not in VARIANTS]:
            raise ValueError(f"variant {unknown[0]!r}: there are {', '.join(VARIANTS)}")

    @property
    def middle(self) -> float:
        """The price at which searches are looked at closely."""
        return self.lam[min(1, len(self.lam) - 1)]

    def sizes(self, graph: Graph, way: str = "") -> list[int]:
        shares = self.shares_oa if way == "optimal" else self.shares
        return [round(share * len(graph)) for share in shares]

    def prices(self, method: str, way: str) -> tuple[float, ...]:
        """Of an edge, for a search under this ablation."""
        if way == "optimal":  # searches that train no constants take their circuits from CF
            return self.lam_oa if METHODS[method].trains else self.lam
        return self.lam_few.get((method, way), self.lam_few.get(way, self.lam))

    def grid(self, graph: Graph, task: Task) -> dict[tuple[str, str], Sequence[float]]:
        """Prices or sizes for every search under every ablation that the task allows."""
        answers = all((ids >= 0).any(-1).all() for ids in (task.right, task.wrong))
        grid: dict[tuple[str, str], Sequence[float]] = {}
        for way in ways(task):
            few = way in ("mean", "resample")
            searched_under_cf = way == "optimal" and task.counterfactual is None
            for method in self.methods:
                if few and method in self.not_few:
                    continue
                if not METHODS[method].trains and searched_under_cf:
                    continue
                if method in ("eap", "eap_ig") and not answers:
                    continue
                if METHODS[method].aim == "lam":
                    prices = self.prices(method, way)
                    is_cut = method == "hcgs" and not few
                    grid[method, way] = prices[: self.most_hcgs] if is_cut else prices
                else:
                    grid[method, way] = self.sizes(graph, way)
        pruning = EDGE_PRUNING.get(task.name, "mean")
        if "edge_pruning" in self.options:
            grid["edge_pruning", pruning] = self.sizes(graph, "optimal")
        return grid

    def seeds_from(self, seed: int) -> dict[tuple[str, str] | None, list[int]]:
        """Seeds of every search: several where training is random and the paper compares."""
        several = [seed + i for i in range(self.seeds)]
        pairs = [(method, way) for method in self.seeded for way in ("counterfactual", "optimal")]
        return {None: [seed], **{pair: several for pair in pairs}}

    def fronts(self, masked: MaskedModel, task: Task, seed: int = 0) -> pd.DataFrame:
        """The sweep of all searches under all ablations, with several seeds where the study has
        them."""
        grid = self.grid(masked.graph, task)
        methods = list(dict.fromkeys(method for method, _ in grid))
        seeds = self.seeds_from(seed)
        return sweep(masked, task, methods, ways(task), grid, seeds, self.options, self.gap_options)

    def options_of(self, method: str, ablation: str) -> dict[str, Any]:
        return options_of(self.options, method, ablation)

    def spending(self, method: str, ablation: str) -> str:
        """What one search spends, in words: steps × prompts × masks, or what it has of them."""
        given = self.options_of(method, ablation)
        counts = {name: given[name] for name in UNITS if name in given}
        words = (f"{n} {name if n > 1 else name[:-1]}" for name, n in counts.items())
        return " × ".join(words)

    def table(self) -> pd.DataFrame:
        """What each search spends, for the notebook."""
        rows = {}
        for key, given in self.options.items():
            if isinstance(key, tuple):
                given = {**self.options.get(key[0], {}), **given}
                key = f"{key[0]} under {plots.LABELS[key[1]]}"
            rows[key] = dict(given)
        rows["gap under OA"] = dict(self.gap_options)
        columns = [*UNITS, "start", "level", "batch"]
        return pd.DataFrame(rows).T.reindex(columns=columns).fillna("")


def study(model: Model, task_name: str) -> Study:
    """The budget of notebooks 02 to 04."""
    is_gt = task_name == "greater_than"
    small = (0.02, 0.006, 0.002, 0.0007) if is_gt else (0.03, 0.01, 0.003, 0.001)
    large = (3e-3, 1e-3, 3e-4)
    paper = (2e-2, 1e-2, 5e-3, 2e-3, 1e-3, 5e-4, 2e-4, 1e-4, 5e-5, 2e-5)
    lam = choose(model, test=(0.02,), small=small, default=large, paper=paper)
    steps = choose(model, test=3, small=400 if is_gt else 600, default=150, paper=6000)
    pace = choose(
        model,
        test={"prompts": 4, "masks": 3},
        small={"prompts": 12, "masks": 1},
        default={"prompts": 12, "masks": 1},
        paper={"prompts": 5, "masks": 12},
    )
    # logits of all edges: the authors' starts ablate a quarter or half of them at once, which
    # leaves a large model nothing to learn from in so few steps; here a twentieth
    authors = {"ugs": 1.0, "hcgs": 0.0}
    start = choose(
        model, test=authors, small=authors, default={"ugs": 3.0, "hcgs": 3.0}, paper=authors
    )
    # constants that train along need more steps (twice as many, as the authors), and some short
    # searches that start with many edges ablated never come back
    longer = {"steps": 2 * steps, "start": 3.0}
    under_oa = choose(model, test={}, small=longer, default={}, paper={})
    pruning = {
        "steps": choose(model, test=3, small=600, default=150, paper=3000),
        "prompts": choose(model, test=4, small=12, default=12, paper=32),
        "lr_multipliers": choose(model, test=0.2, small=0.2, default=0.8, paper=0.8),
    }
    every = ("ugs", "hcgs", "acdc", "eap", "eap_ig", "eap_ig_masks")
    fast = tuple(method for method in every if method != "acdc")
    everything = tuple(VARIANTS)
    only_ugs = ("ugs", "eap", "eap_ig_masks")
    # a run of ACDC at the level of edges runs a large model for every one of its edges
    level = choose(model, test="edge", small="edge", default="vertex", paper="edge")
    last_two = {("acdc", way): lam[-2:] for way in ("mean", "resample")}
    few = last_two | dict.fromkeys(("mean", "resample"), lam[1:3])
    return Study(
        n=choose(model, test=24, small=2048, default=2048, paper=10_000),
        lam=lam,
        lam_oa=choose(
            model, test=lam, small=(*small[1:], small[-1] / 3), default=large, paper=paper
        ),
        lam_few=choose(model, test=last_two, small=few, default=last_two, paper=last_two),
        shares=choose(
            model,
            test=(0.05,),
            small=(0.03, 0.06, 0.12),
            default=(0.002, 0.005, 0.01, 0.02, 0.04),
            paper=(0.01, 0.03, 0.05, 0.08, 0.12),
        ),
        shares_oa=choose(
            model, test=(0.05,), small=(0.03, 0.06, 0.12), default=(0.005, 0.02), paper=(0.01, 0.05)
        ),
        options={
            "ugs": {"steps": steps, **pace, "start": start["ugs"]},
            "hcgs": {"steps": steps, **pace, "start": start["hcgs"]},
            "acdc": {"prompts": choose(model, test=2, small=128, default=32, paper=128)}
            | ({"level": level} if level != "edge" else {}),
            "edge_pruning": pruning,
            "eap_ig": {"points": choose(model, test=5, small=10, default=10, paper=20)},
            "eap_ig_masks": {"points": 5},
        }
        | ({("ugs", "optimal"): under_oa, ("hcgs", "optimal"): under_oa} if under_oa else {}),
        gap_options=choose(
            model,
            test={"steps": 2, "batch": 8, "look_every": 2},
            small={"steps": steps, "batch": 8, "look_every": 200, "draws": 2},
            default={"steps": 400, "batch": 8, "look_every": 100, "draws": 1, "look_prompts": 64},
            paper={"steps": 10_000, "batch": 75, "look_every": 1000},
        ),
        seeds=choose(model, test=1, small=3, default=1, paper=3),
        seeded=("ugs",) if is_gt else ("ugs", "hcgs"),
        most_hcgs=choose(model, test=1, small=3, default=2, paper=10),
        methods=choose(
            model,
            test=fast,
            small=every,
            default=only_ugs if is_gt else every,
            paper=every,
        ),
        not_few=choose(model, test=(), small=(), default=("hcgs", "acdc"), paper=()),
        variants=choose(
            model, test=everything, small=everything, default=MAIN_VARIANTS, paper=everything
        ),
    )


def ways(task: Task) -> list[str]:
    """The paper's ablations that a task has the prompts for."""
    return [way for way in WAYS if way != "counterfactual" or task.counterfactual is not None]


def short_name(task: Task) -> str:
    """The word that stands for a task in claims and in names of figures."""
    return TASKS.get(task.name, task.name)


def title(task: Task) -> str:
    """What a figure calls a task."""
    return TITLES.get(task.name, task.name)


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


def variants(masked: MaskedModel, task: Task, plan: Study, seed: int = 0) -> pd.DataFrame:
    """A row for each of the plan's variants that the task allows, at its middle price, found and
    measured like the circuits of a front; `cost` is Δ + λ edges."""
    lam = plan.middle
    wanted = {
        name: (Wanted(method, ablation, lam, seed), plan.options_of(method, ablation) | change)
        for name, (method, ablation, change) in VARIANTS.items()
        if name in plan.variants and ablation in ways(task)
    }
    one = partial(_variant, task=task, gap_options=plan.gap_options)
    rows = models.each(one, masked.model, wanted.values(), desc="variants")
    table = pd.DataFrame(rows, index=pd.Index(wanted, name="variant"))
    vertices = [len(sweep_circuit(masked, row).vertices) for row in table.itertuples()]
    return table.assign(n_vertices=vertices, cost=table.gap + lam * table.n_edges)


def _variant(
    model: Model,
    item: tuple[Wanted, Mapping[str, Any]],
    task: Task,
    gap_options: Mapping[str, Any],
) -> dict[str, Any]:
    wanted, options = item
    return find_and_measure(model, wanted, task, {wanted.method: options}, gap_options)


def early_theta(
    masked: MaskedModel, task: Task, way: str, lam: float, options: Mapping[str, Any], seed: int
) -> Float[Tensor, " n_edges"]:
    """θ of UGS after a sixth of its steps, at the rate of the whole run: many edges are undecided
    there."""
    whole = UGSSettings(way, lam, **options)
    early = {"steps": max(1, whole.steps // 6), "lr": learning_rate(whole, SLOWER)}
    circuit = ugs(masked, task, way, lam=lam, seed=seed, **{**options, **early})
    return torch.tensor(circuit.history["theta"])


def other_rules(
    masked: MaskedModel, task: Task, table: pd.DataFrame, gap_options: Mapping[str, Any]
) -> pd.DataFrame:
    """Circuits of a sweep measured with constants that carry nothing of the prompt (OA)."""
    rows = []
    for row in table.itertuples():
        delta = gap(masked, task, sweep_circuit(masked, row), "optimal", **gap_options)
        rule = plots.LABELS[row.ablation]
        line = {"found under": rule, "n_edges": row.n_edges, "Δ, its own rule": row.gap}
        rows.append(line | {"Δ under OA": delta.mean, "se": delta.se})
    return pd.DataFrame(rows)


def by_family(
    masked: MaskedModel,
    task: Task,
    lam: float,
    options: Mapping[str, Any],
    gap_options: Mapping[str, Any],
    seed: int = 0,
) -> pd.DataFrame:
    """Appendix F.2: UGS under OA with one constant for all positions of a vertex, or with one for
    each, in the search and in the measuring."""
    starts = {"shared": None, "position": edge_constants(masked, task, ABLATIONS["mean"])}
    rows = []
    for searched, start in starts.items():
        circuit = ugs(masked, task, "optimal", lam=lam, seed=seed, constants=start, **options)
        for family in starts:
            delta = gap(masked, task, circuit, "optimal", **gap_options, family=family)
            row = {"searched with": searched, "n_edges": circuit.n_edges, "measured with": family}
            rows.append(row | {"Δ": delta.mean, "se": delta.se, "Δ, train": delta.train})
    return pd.DataFrame(rows)


# ---- fronts compared


class Front(NamedTuple):
    """Circuits of one method under one ablation with one seed."""

    sizes: Float[ndarray, " circuits"]
    gaps: Float[ndarray, "circuits prompts"]


class Ratio(NamedTuple):
    """Of two fronts, with its 95 % interval over prompts and seeds."""

    value: float
    low: float | None
    high: float | None
    seeds: int  # of the side that has fewer
    error: float | None = None  # standard error of its logarithm
    start: float | None = None  # of the sizes (or Δ) that all fronts span
    end: float | None = None

    @property
    def is_narrow(self) -> bool:
        return self.start is not None and self.end < NARROW * self.start


def front_of(table: pd.DataFrame, method: str, ablation: str) -> pd.DataFrame:
    return table[(table.method == method) & (table.ablation == ablation)]


def fronts_of(table: pd.DataFrame, method: str, ablation: str) -> list[Front]:
    """A front for each seed; where gaps of single prompts are not known (the authors' logs), one
    column of means."""
    part = front_of(table, method, ablation)
    by_seed = [rows for _, rows in part.groupby("seed")] if "seed" in part else [part]
    fronts = []
    for rows in by_seed:
        if len(rows):
            each = rows["each"] if "each" in rows else rows.gap.map(lambda value: [value])
            fronts.append(Front(rows.n_edges.to_numpy(float), np.array(each.tolist(), float)))
    return fronts


def at_size(table: pd.DataFrame, method: str, ablation: str, size: float) -> float:
    """Δ of a front at a size, log Δ linear between circuits; NaN outside of it."""
    part = front_of(table, method, ablation)
    return stats.interpolate(part.n_edges, part.gap, size)


def _logs(
    fronts: Sequence[tuple[ndarray, ndarray]], at: Float[ndarray, " points"]
) -> Float[ndarray, "seeds points"]:
    """The logarithm of y at x, from (x, y) of each seed's front; behind its last point a front
    stays as low as it got, as far as circuits were tried."""
    logs = []
    for x, y in fronts:
        values = stats.interpolate(x, y, at)
        behind = np.isnan(values) & (at <= x.max()) & (at >= x.min())
        lowest = np.maximum(y.min(), np.finfo(float).tiny)
        logs.append(np.log(np.where(behind, lowest, values)))
    return np.array(logs)


def common_range(
    fronts: Sequence[ndarray], points: int, least: float = 1.0
) -> Float[ndarray, " points"] | None:
    """Values from `least` on that all fronts span, evenly in logarithm; None where there are none.
    (Sizes begin with one edge: empty circuits are all alike.)"""
    low = max(max(x.min(), least) for x in fronts)
    high = min(x.max() for x in fronts)
    return np.geomspace(low, high, points) if low <= high else None


def compare(
    table: pd.DataFrame,
    one: tuple[str, str],
    other: tuple[str, str],
    equal: str = "size",
    at: Sequence[float] | None = None,
    draws: int = 1000,
    seed: int = 0,
) -> Ratio:
    """Δ of one (method, ablation) over that of the other at equal size, or size over size at equal
    Δ: the geometric mean over the range that all fronts span (or at given values).

    The interval is of the logarithm, by hypot(1.96 × its error over prompts, t × its error over
    seeds). The first is a bootstrap over prompts, the same for both sides, with all seeds in; the
    second comes from the logarithm of each seed's front, with Student's t at Welch's degrees of
    freedom. A side with one seed adds nothing to it: its error over seeds is not known. There is no
    interval where the range is narrower than a factor NARROW.
    """
    sides = [fronts_of(table, *which) for which in (one, other)]
    if equal == "gap":  # an empty circuit has no size to divide by
        sides = [[_without_empty(front) for front in side] for side in sides]
    seeds = min(map(len, sides))
    unknown = Ratio(np.nan, None, None, seeds)
    if not seeds or not all(len(front.sizes) for side in sides for front in side):
        return unknown
    n = max(front.gaps.shape[1] for side in sides for front in side)
    even = np.full(n, 1 / n)
    points = _points(sides, even, equal)
    span = _span(points, equal) if at is None else None
    by_seed = _by_seed(points, span if at is None else np.asarray(at, float))
    value = _log_ratio(by_seed)
    if not np.isfinite(value):
        return unknown
    result = Ratio(float(np.exp(value)), None, None, seeds)
    if span is not None:
        result = result._replace(start=float(span[0]), end=float(span[-1]))
    if n == 1 or not draws:  # of means alone there is nothing to draw
        return result
    rng = np.random.default_rng(seed)
    drawn = []
    for weights in rng.multinomial(n, even, size=draws) / n:
        again = _points(sides, weights, equal)
        grid = _span(again, equal) if at is None else np.asarray(at, float)
        drawn.append(_log_ratio(_by_seed(again, grid)))
    finite = np.isfinite(drawn)
    if finite.sum() < draws / 2:
        return result
    over_prompts = np.std(np.array(drawn)[finite])
    over_seeds, t = stats.welch(*by_seed)
    result = result._replace(error=float(np.hypot(over_prompts, over_seeds)))
    if result.is_narrow:
        return result
    width = np.hypot(1.96 * over_prompts, t * over_seeds)
    return result._replace(low=float(np.exp(value - width)), high=float(np.exp(value + width)))


def _without_empty(front: Front) -> Front:
    kept = front.sizes > 0
    return Front(front.sizes[kept], front.gaps[kept])


def _points(
    sides: Sequence[Sequence[Front]], weights: Float[ndarray, " prompts"], equal: str
) -> list[list[tuple[ndarray, ndarray]]]:
    """(x, y) of every front: (size, Δ), or the other way round where Δ is to be equal."""
    listed = []
    for side in sides:
        fronts = []
        for front in side:
            gaps = front.gaps @ weights if front.gaps.shape[1] > 1 else front.gaps[:, 0]
            fronts.append((front.sizes, gaps) if equal == "size" else (gaps, front.sizes))
        listed.append(fronts)
    return listed


def _span(
    points: list[list[tuple[ndarray, ndarray]]], equal: str
) -> Float[ndarray, " points"] | None:
    fronts = [x for side in points for x, _ in side]
    return common_range(fronts, 20, least=1.0 if equal == "size" else 1e-9)


def _by_seed(
    points: list[list[tuple[ndarray, ndarray]]], at: Float[ndarray, " points"] | None
) -> list[Float[ndarray, " seeds"]]:
    """Mean logarithm of each seed's front over the values that all fronts have, for each side."""
    if at is None:
        return [np.full(len(side), np.nan) for side in points]
    logs = [_logs(side, at) for side in points]
    known = ~np.isnan(np.concatenate(logs)).any(0)
    if not known.any():
        return [np.full(len(side), np.nan) for side in points]
    return [side[:, known].mean(1) for side in logs]


def _log_ratio(by_seed: list[Float[ndarray, " _"]]) -> float:
    first, second = by_seed
    return float(first.mean() - second.mean())


def ratio(table: pd.DataFrame, one: tuple[str, str], other: tuple[str, str]) -> float:
    return compare(table, one, other, draws=0).value


def ratio_curve(
    table: pd.DataFrame, one: tuple[str, str], other: tuple[str, str], n_edges: int, points: int = 8
) -> pd.DataFrame:
    """The ratio of two fronts by size, as a share of all edges, with intervals."""
    sides = [fronts_of(table, *which) for which in (one, other)]
    if not all(sides):
        return pd.DataFrame(columns=["share", "ratio", "low", "high"])
    sizes = common_range([front.sizes for side in sides for front in side], points)
    rows = []
    for size in [] if sizes is None else sizes:
        result = compare(table, one, other, at=[size], draws=100)
        row = {"share": size / n_edges, "ratio": result.value}
        rows.append(row | {"low": result.low, "high": result.high})
    return pd.DataFrame(rows, columns=["share", "ratio", "low", "high"]).astype(float)


# ---- fronts in words


def ratio_words(
    table: pd.DataFrame, one: tuple[str, str], other: tuple[str, str], words: str
) -> str:
    """The ratio of two fronts as a sentence, with its interval."""
    found = compare(table, one, other)
    if found.start is None:
        return f"{words}: no common size"
    if found.low is None:
        return f"{words}: {found.value:.2f}, no interval ({span_words(found)})"
    return f"{words}: {found.value:.2f} [{found.low:.2f}, {found.high:.2f}]"


def lowest(table: pd.DataFrame) -> str:
    """The search with the lowest Δ under each ablation, at the size in the middle of all circuits
    there, as a sentence; Δ is the geometric mean over seeds."""
    words = []
    for ablation, part in table[table.n_edges > 0].groupby("ablation", sort=False):
        size = float(part.n_edges.median())
        gaps = {method: _at(part, method, ablation, size) for method in part.method.unique()}
        known = pd.Series(gaps, dtype=float).dropna()
        if len(known):
            best = plots.LABELS.get(known.idxmin(), known.idxmin())
            where = f"{plots.LABELS.get(ablation, ablation)}, {size:.0f} edges"
            words.append(f"{where}: {best} ({known.min():.2g} nats)")
    return f"lowest Δ in the middle of the sizes: {'; '.join(words) or 'no front has that size'}"


def _at(table: pd.DataFrame, method: str, ablation: str, size: float) -> float:
    """Δ of a front at a size, the geometric mean over seeds; NaN where one of them ends before."""
    fronts = [(front.sizes, front.gaps.mean(1)) for front in fronts_of(table, method, ablation)]
    return float(np.exp(_logs(fronts, np.array([size])).mean()))


def busiest(circuit: Circuit) -> str:
    """How large a circuit is, and the vertex with the most edges, as a sentence."""
    ends = [vertex for edge in circuit.edges for vertex in (edge.src, edge.dst)]
    if not ends:
        return "the circuit is empty"
    counts = pd.Series(ends).value_counts()
    sizes = f"{circuit.n_edges} edges between {len(circuit.vertices)} vertices"
    return f"{sizes}; most of them, {counts.max()}, begin or end at {counts.idxmax()}"


# ---- are budgets large enough?


def doubled(options: Mapping[str, Any]) -> dict[str, Any]:
    """The same settings with twice the steps times prompts: steps where there are any (θ and
    constants move slower then), else prompts, else points of a path."""
    for name in ("steps", "prompts", "points"):
        if name in options:
            return {**options, name: 2 * options[name]}
    return dict(options)


def budget_check(
    masked: MaskedModel, task: Task, study: Study, way: str, methods: Iterable[str], seed: int = 0
) -> pd.DataFrame:
    """For each search, Δ at three sizes with its budget and with twice as much, on the validation
    part, which no reported number uses; `moved` is the difference of log Δ and `error` its
    standard error over prompts and over three seeds."""
    chosen = task.for_choosing()
    grid = study.grid(masked.graph, chosen)
    rows = []
    for method in methods:
        if (method, way) not in grid:
            raise ValueError(f"the study has no {method} under {way} on '{masked.model.name}'")
        values = grid[method, way][:3]
        fronts = []
        usual = study.options_of(method, way)
        for options in (usual, doubled(usual)):
            given = {method: options}
            asked = {method: values}
            seeds = [seed + i for i in range(3 if METHODS[method].trains else 1)]
            table = sweep(masked, chosen, [method], [way], asked, seeds, given, study.gap_options)
            fronts.append(table.assign(method=f"{method} {len(fronts)}"))
        both = pd.concat(fronts, ignore_index=True)
        sides = ((f"{method} 1", way), (f"{method} 0", way))
        sizes = [front.sizes for side in sides for front in fronts_of(both, *side)]
        common = common_range(sizes, 3)
        for size in [] if common is None else common:
            change = compare(both, *sides, at=[size])
            row = {"method": method, "ablation": way, "edges": size}
            rows.append(row | {"moved": np.log(change.value), "error": change.error})
    return pd.DataFrame(rows, columns=["method", "ablation", "edges", "moved", "error"])


def settled(budgets: pd.DataFrame) -> pd.DataFrame:
    """A row for each search of `benchmarks/budgets.csv`: at how many of its sizes twice the budget
    moves log Δ by at most one standard error, whether it lowers Δ at all of them, and the seconds
    of one search where they are known."""
    rows = {}
    for pair, part in budgets.groupby(["method", "ablation"], sort=False):
        within = part.moved.abs() <= part.error
        rows[pair] = {
            "sizes": len(part),
            "within one error": int(within.sum()),
            "always lower": bool((part.moved < 0).all()),
            "seconds": part["seconds"].mean() if "seconds" in part else np.nan,
        }
    names = ["method", "ablation"]
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis(names)


def settled_words(searches: pd.DataFrame) -> list[str]:
    """Sentences on the table of `settled`: which searches meet the rule, which do not, which of
    these are starved, and which rows were not made by `scripts/budgets.py`."""
    names = [
        f"{plots.LABELS.get(method, method)} under {plots.LABELS.get(way, way)}"
        for method, way in searches.index
    ]
    named = searches.set_axis(names)
    meets = named["within one error"] == named["sizes"]
    missed = [
        f"{name} ({row['sizes'] - row['within one error']} of {row['sizes']} sizes)"
        for name, row in named[~meets].iterrows()
    ]
    lower = named.index[named["always lower"]]
    under_oa = searches.index.get_level_values("ablation") == "optimal"
    copied = named.index[under_oa & named.seconds.isna()]
    rule = "twice the budget moves log Δ by less than one standard error"
    sentences = [
        f"{rule} at all sizes: {'; '.join(named.index[meets]) or 'no search'}",
        f"by more at some sizes, so that the rule is not met: {'; '.join(missed) or 'no search'}",
        f"lower Δ at all sizes with twice the budget: {'; '.join(lower) or 'no search'}",
    ]
    if len(copied):
        origin = "copied, rounded, from a run at other prices; there are no seconds for them"
        sentences.append(f"{'; '.join(copied)}: {origin}")
    return sentences


# ---- claims

# what may be behind a claim of one of the paper's tasks that does not hold or is undecided
REASONS = {
    "front": "both searches may be close to the best circuits that there are, and fronts that "
    "cross have a ratio near one that hides who leads where",
    "front.counterfactual.acdc": "ACDC tries every edge (or vertex) one by one, which may find as "
    "good a circuit as a search over all of them at once where there are not too many",
    "front.optimal": "the circuits of the other search were found under CF, and constants trained "
    "for them afterwards may make up for it",
    "front.optimal.hcgs": "HCGS trains constants along as UGS does, and a single seed of either "
    "search that went astray widens the interval",
    "front.mean": "one seed and a few prices under this ablation; both searches may be close to "
    "the best circuits that there are, or their fronts may have few sizes in common",
    "front.resample": "one seed and a few prices under this ablation; both searches may be close "
    "to the best circuits that there are, or their fronts may have few sizes in common",
    "ablation": "constants may have had too few steps, or fit their train prompts better than "
    "others, and a mean over sizes hides a lead of OA that small circuits alone have",
    "ablation.mean": "one seed and a few prices under mean, so that the fronts may have few sizes "
    "in common; and constants may have had too few steps to leave the means far behind",
    "ablation.resample": "one seed and a few prices under resample, so that the fronts may have "
    "few sizes in common; and prompts that are alike make resample mild",
    "edges": "both searches may be close to the best circuits that there are, or their fronts may "
    "cross",
    "edge_pruning": "HCGS is asked by price and Edge Pruning by size, so that their fronts may "
    "have few sizes in common; and one of the two may have too small a budget",
    "manual": "people chose the manual circuit by what its heads do, not for its Δ, and a search "
    "of few steps may be far from the best circuit of that size",
    "estimator": "the edges are those that one search was undecided about; an estimator may be "
    "biased and still have the smaller error with so few runs, because it varies less",
    "option": "one seed and one price: an option may help at other sizes, or by luck",
}
WHYS = {
    "circuits_": "fronts of one seed or of few circuits, whose lead may come and go with size",
    **{f"circuits_{name}.{id}": why for name in TASKS.values() for id, why in REASONS.items()},
    "circuits_gt.resample": "CF changes two digits only, so that Δ under CF, by which Δ under "
    "resample is divided, is small here too; and there is one seed",
}


def claims(table: pd.DataFrame, task: Task, manual: pd.DataFrame | None = None) -> list[Claim]:
    """Every claim of §3 that this table has the fronts for."""
    paper = paper_front(task)
    listed = []
    for ablation in WAYS:
        for other in BASELINES:
            text = (
                f"UGS has lower Δ than {plots.LABELS[other]} at equal size, under "
                f"{plots.LABELS[ablation]} (ratio below 1)"
            )
            sides = (("ugs", ablation), (other, ablation))
            theirs = ratio(paper, *sides)
            notes = [] if np.isfinite(theirs) else ["not in the paper"]
            if ablation == "optimal" and not METHODS[other].trains:
                notes.append("against circuits found under CF")
            id = f"front.{ablation}.{other}"
            listed.append(_ratio_claim(table, task, id, text, *sides, theirs, "; ".join(notes)))
    for other in ("counterfactual", "mean", "resample"):
        sides = (("ugs", "optimal"), ("ugs", other))
        note = ""
        if task.name == "ioi":
            note = f"in the paper's text the ratio is {1 - LOWER[other]:.2f} at 1,000 edges, the "
            note += "number beside is over all sizes"
        text = (
            f"circuits have lower Δ under OA than under {plots.LABELS[other]} at equal size "
            "(UGS; ratio below 1)"
        )
        theirs = ratio(paper, *sides)
        listed.append(_ratio_claim(table, task, f"ablation.{other}", text, *sides, theirs, note))
    sides = (("ugs", "counterfactual"), ("acdc", "counterfactual"))
    text = "UGS needs fewer edges than ACDC for equal Δ under CF (ratio of sizes below 1)"
    theirs = FEWER_EDGES if task.name == "ioi" else np.nan
    listed.append(_ratio_claim(table, task, "edges", text, *sides, theirs, equal="gap"))
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
    theirs: float,
    note: str = "",
    rule: str = "< 1",
    equal: str = "size",
) -> Claim | None:
    """That one front is below another; None where the table lacks one of them."""
    fronts = set(zip(table.method, table.ablation, strict=True))
    if one not in fronts or other not in fronts:
        return None
    result = compare(table, one, other, equal)
    notes = [note, *_whole_vertices(table, one, other), span_words(result, equal)]
    if not np.isfinite(result.value):
        notes = [span_words(result, equal)]
    return Claim(
        f"circuits_{short_name(task)}.{id}",
        text,
        _number(theirs),
        _number(result.value),
        result.low,
        result.high,
        rule,
        seeds=result.seeds,
        source="sweeps",
        note="; ".join(filter(None, notes)),
    )


def span_words(found: Ratio, equal: str = "size") -> str:
    """Over which sizes (or Δ) fronts were compared."""
    if found.start is None:
        return f"the two fronts span no common {'size' if equal == 'size' else 'Δ'}"
    start, end = (f"{x:.0f}" if equal == "size" else f"{x:.2g}" for x in (found.start, found.end))
    unit = "edges" if equal == "size" else "nats"
    words = f"{start} {unit} only" if start == end else f"{start} to {end} {unit}"
    return f"{words}: too narrow to decide" if found.is_narrow else words


def _whole_vertices(table: pd.DataFrame, *sides: tuple[str, str]) -> list[str]:
    """Which of the two searches decided over whole vertices instead of edges."""
    methods = []
    for method, ablation in sides:
        level = front_of(table, method, ablation).get("level")
        if level is not None and (level == "vertex").any():
            methods.append(f"{plots.LABELS[method]} over whole vertices")
    return list(dict.fromkeys(methods))


def _edge_pruning_claim(table: pd.DataFrame, task: Task, paper: pd.DataFrame) -> Claim | None:
    way = EDGE_PRUNING.get(task.name, "mean")
    sides = (("hcgs", way), ("edge_pruning", way))
    text = (
        f"Edge Pruning does not outperform HCGS, under {plots.LABELS[way]} (ratio HCGS / EP at "
        "most 1.1)"
    )
    theirs = ratio(paper, *sides)
    return _ratio_claim(table, task, "edge_pruning", text, *sides, theirs, rule="< 1.1")


def manual_claims(table: pd.DataFrame, task: Task, manual: pd.DataFrame) -> list[Claim]:
    """How far the best circuit of the manual one's size is below it: less than half under OA, more
    under the others."""
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
        error = 2 * row.se / row.gap * (1 - below)
        listed.append(
            Claim(
                f"circuits_{short_name(task)}.manual.{row.ablation}",
                text,
                MANUAL_GAP.get(short_name(task)) if under_oa else None,
                _number(below) if measured else None,
                _number(below - error) if measured else None,
                _number(below + error) if measured else None,
                "< 0.5" if under_oa else "> 0.5",
                seeds=1,
                source="sweeps",
                note="" if measured else f"needs GPT-2-small: the authors' logs give {below:.2f}",
            )
        )
    return listed


def estimator_claims(slopes: pd.DataFrame, task: Task) -> list[Claim]:
    """On the table of `estimator_errors`: mean rms error over edges, intervals over edges, of which
    there must be two."""
    if slopes.edge.nunique() < 2:
        return []
    by_edge = slopes.pivot(index="edge", columns="estimator", values="rms")
    names = {"importance": "importance sampling", "hcgs": "HardConcrete"}
    listed = []
    for name, words in names.items():
        pair = (by_edge["ugs"].to_numpy(), by_edge[name].to_numpy())
        low, high = stats.bootstrap(lambda a, b: float(a.mean() / b.mean()), *pair)
        text = f"UGS estimates marginal gaps better than {words} (ratio of rms errors below 1)"
        id = f"circuits_{short_name(task)}.estimator.{name}"
        value = float(pair[0].mean() / pair[1].mean())
        more = {"seeds": 1, "source": "estimators"}  # θ comes from one search
        listed.append(Claim(id, text, None, value, low, high, "< 1", **more))
    return listed


def option_claims(tried: pd.DataFrame, task: Task) -> list[Claim]:
    """On the table of `variants`; intervals over prompts, paired."""
    rules = {
        "random start": ("a random start is worse (cost ratio above 1)", "> 1"),
        "variance window": ("the variance factor gains less than 5 % (cost ratio)", "> 0.95"),
    }
    listed = []
    for name, (words, rule) in rules.items():
        if not {"CF: as in the sweep", f"CF: {name}"} <= set(tried.index):
            continue
        usual, changed = tried.loc["CF: as in the sweep"], tried.loc[f"CF: {name}"]
        prices = [row.asked * row.n_edges for row in (changed, usual)]

        def cost(a: ndarray, b: ndarray, prices: list[float] = prices) -> float:
            return float((a.mean() + prices[0]) / (b.mean() + prices[1]))

        gaps = [np.array(row["each"]) for row in (changed, usual)]
        low, high = stats.bootstrap(cost, *gaps)
        text = f"{words}: Δ + λ edges, UGS under CF"
        id = f"circuits_{short_name(task)}.option.{name.replace(' ', '_')}"
        value = cost(*gaps)
        listed.append(Claim(id, text, None, value, low, high, rule, seeds=1, source="sweeps"))
    return listed


# ---- spoofing by resample ablation


def spoofing(masked: MaskedModel, studies: Mapping[Task, Study], seed: int = 0) -> pd.DataFrame:
    """Δ of UGS circuits under resample over that under CF at equal size, for each task that has
    counterfactuals, beside GPT-2-small's."""
    sides = (("ugs", "resample"), ("ugs", "counterfactual"))
    rows = []
    for task, plan in studies.items():
        if task.counterfactual is None:
            continue
        grid = plan.grid(masked.graph, task)
        grid = {side: grid[side] for side in sides}
        both = [way for _, way in sides]
        table = sweep(masked, task, ["ugs"], both, grid, [seed], plan.options, plan.gap_options)
        result = compare(table, *sides)
        row = {"task": short_name(task), "ratio": result.value, "low": result.low}
        row |= {"high": result.high, "seeds": result.seeds, "compared": span_words(result)}
        rows.append(row | {"paper": ratio(paper_front(task), *sides)})
    columns = ["task", "ratio", "low", "high", "seeds", "compared", "paper"]
    return pd.DataFrame(rows, columns=columns).set_index("task")


def spoofing_claims(table: pd.DataFrame) -> list[Claim]:
    """On the table of `spoofing`, for Greater-Than and IOI, whose errors are independent; undecided
    where one of the two is compared at no common sizes, or at too few."""
    if not {"gt", "ioi"} <= set(table.index):
        return []
    theirs = float(table.paper["gt"] / table.paper["ioi"])
    value = float(table.ratio["gt"] / table.ratio["ioi"])
    logs = [np.log(table.loc[name, ["low", "high"]].astype(float)) for name in ("gt", "ioi")]
    width = float(np.hypot(*[(ends["high"] - ends["low"]) / 2 for ends in logs]))
    text = (
        "resample is mild on Greater-Than and harsh on IOI (Δ resample / Δ CF at equal size, "
        "Greater-Than over IOI, below 1)"
    )
    known = np.isfinite(value) and np.isfinite(width)
    return [
        Claim(
            "circuits_gt.resample",
            text,
            theirs,
            _number(value),
            value * np.exp(-width) if known else None,
            value * np.exp(width) if known else None,
            "< 1",
            seeds=int(table.seeds.min()),
            source="sweeps",
            note=f"Greater-Than: {table.compared['gt']}; IOI: {table.compared['ioi']}",
        )
    ]
