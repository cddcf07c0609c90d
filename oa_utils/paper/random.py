"""Paper, appendix F.13: does OA invent circuits? The circuit that was found against random ones
of its size."""

from __future__ import annotations

import numpy as np
import pandas as pd
import scipy.stats

from oa_utils import plots, stats
from oa_utils.paper.circuits import TASKS, WAYS, short_name
from oa_utils.paper.claims import Claim
from oa_utils.tasks import Task

FEWEST = 0.01  # of their mean: random circuits that differ less from each other have no z-score
PAPER = {  # GPT-2-small: mean Δ of random circuits, its standard deviation, Δ of UGS
    "ioi": {
        "mean": (4.529, 0.200, 0.264),
        "resample": (6.527, 0.085, 1.779),
        "optimal": (2.723, 0.024, 0.176),
        "counterfactual": (4.264, 0.049, 0.191),
    },
    "gt": {
        "mean": (1.010, 0.020, 0.033),
        "resample": (2.109, 0.039, 0.056),
        "optimal": (0.900, 0.011, 0.029),
        "counterfactual": (1.785, 0.027, 0.021),
    },
}
# what may be behind a claim of one of the paper's tasks that does not hold or is undecided
REASONS = {
    "ratio": "the circuit found was searched in few steps or is small, and few random ones stand "
    "beside it",
    "ratio.optimal": "constants make much good where many vertices are ablated whole, in random "
    "circuits as in those found, and few random ones stand beside the circuits found",
    "std": "few random circuits, of another size under the other ablation; and what constants have "
    "reached after so many steps differs from one random circuit to the next",
    "drop": "one step of Adam moves every coordinate by its rate, which is larger here than in the "
    "paper, where training is longer: the first step may even lose, and the curves show how soon "
    "it is made good",
    "drop.random": "the larger a circuit's Δ is at the means, the more of it a single step can "
    "win, whatever its edges are",
}
WHYS = {f"random_{name}.{id}": why for name in TASKS.values() for id, why in REASONS.items()}


def summary(table: pd.DataFrame, task: Task) -> pd.DataFrame:
    """Random circuits, the circuits found (mean over seeds) and their ratio, beside the paper's
    where it has this task; on a table of `against_random`, for the ablations that it has random
    circuits of. Δ is that of test prompts; `found, train` that of train prompts, where constants
    were trained on them.

    The z-score is NaN where random circuits all do the same: it would be a number over next to
    nothing.
    """
    paper = PAPER.get(short_name(task), {})
    ablations = list(table[table.kind == "random"].ablation.unique())
    order = [way for way in WAYS if way in ablations]
    order += [way for way in ablations if way not in WAYS]
    rows = {}
    for ablation in order:
        drawn = _gaps(table, ablation, "random")
        found = _gaps(table, ablation, "found")
        low, high = ratio_interval(table, ablation)
        row = {
            "edges": table[(table.ablation == ablation) & (table.kind == "found")].n_edges.mean(),
            "random": drawn.mean(),
            "std": drawn.std(),
            "found": found.mean(),
            "found, train": _train_gaps(table, ablation).mean(),
            "seeds": len(found),
            "ratio": found.mean() / drawn.mean(),
            "low": low,
            "high": high,
            "z": z_score(found, drawn),
            "n": len(drawn),
        }
        if ablation in paper:
            mean, std, ugs = paper[ablation]
            row |= {"paper random": mean, "paper std": std, "paper found": ugs}
            row |= {"paper ratio": ugs / mean, "paper z": (ugs - mean) / std}
        rows[ablation] = row
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("ablation")


def _gaps(table: pd.DataFrame, ablation: str, kind: str) -> np.ndarray:
    return table[(table.ablation == ablation) & (table.kind == kind)].gap.to_numpy(float)


def _train_gaps(table: pd.DataFrame, ablation: str) -> pd.Series:
    """Δ of circuits found on train prompts, with the constants that were kept; none where no
    constants were trained."""
    curves = table[(table.ablation == ablation) & (table.kind == "found")].curve
    least = [min(gap for _, gap in curve) for curve in curves if len(curve)]
    return pd.Series(least, dtype=float)


def z_score(found: np.ndarray, drawn: np.ndarray) -> float:
    std = drawn.std()
    if std <= FEWEST * abs(drawn.mean()):
        return np.nan
    return float((found.mean() - drawn.mean()) / std)


def ratio_interval(table: pd.DataFrame, ablation: str) -> tuple[float | None, float | None]:
    """Of Δ found over Δ random, from logarithms: over test prompts (of the circuits found, which
    all have the same), over random circuits, and over seeds of the search where there are
    several."""
    part = table[(table.ablation == ablation) & (table.kind == "found")]
    drawn = _gaps(table, ablation, "random")
    if len(drawn) < 2:
        return None, None
    over_prompts = 1.96 * float((part.se / part.gap).mean())
    over_drawn = scipy.stats.sem(drawn) / drawn.mean() * scipy.stats.t.ppf(0.975, len(drawn) - 1)
    width = np.hypot(over_prompts, over_drawn)
    if len(part) > 1:
        over_seeds = scipy.stats.sem(np.log(part.gap.to_numpy(float)))
        width = np.hypot(width, over_seeds * scipy.stats.t.ppf(0.975, len(part) - 1))
    centre = np.log(part.gap.mean() / drawn.mean())
    return float(np.exp(centre - width)), float(np.exp(centre + width))


def drops(table: pd.DataFrame, kind: str, step: int) -> np.ndarray:
    """Share of Δ_opt on the train part that is gone after so many steps of training, for each
    circuit."""
    curves = table[(table.ablation == "optimal") & (table.kind == kind)].curve
    return np.array([1 - dict(map(tuple, curve))[step] / curve[0][1] for curve in curves])


def first_step(table: pd.DataFrame) -> int:
    """The first step at which the training of constants was looked at."""
    return int(table[table.ablation == "optimal"].curve.iloc[0][1][0])


def claims(table: pd.DataFrame, task: Task) -> list[Claim]:
    """The paper's statements about its table of random circuits, as far as it has the task."""
    if short_name(task) not in PAPER:
        return []
    rows = summary(table, task)
    drawn = {way: _gaps(table, way, "random") for way in rows.index}
    sizes = {way: _sizes(table, way) for way in rows.index}
    listed = []
    for ablation, row in rows.iterrows():
        text = (
            "the circuit found is far below random ones of its size under "
            f"{plots.LABELS[ablation]} (ratio of Δ below a half)"
        )
        ends = (row.low, row.high)
        claim = (text, row["paper ratio"], row.ratio, *ends, "< 0.5", int(row.seeds))
        listed.append(_claim(task, f"ratio.{ablation}", *claim))
    for other in ("mean", "resample"):
        if other not in drawn or "optimal" not in drawn:
            continue
        theirs = rows["paper std"]["optimal"] / rows["paper std"][other]
        text = (
            f"Δ of random circuits varies less under OA than under {plots.LABELS[other]} "
            "(ratio of standard deviations below 1)"
        )
        found = std_ratio(drawn["optimal"], drawn[other])
        note = f"random circuits of {sizes['optimal']} edges under OA, of {sizes[other]} under "
        note += plots.LABELS[other]
        listed.append(_claim(task, f"std.{other}", text, theirs, *found, "< 1", note=note))
    if "optimal" in drawn:
        step = first_step(table)
        words = {
            "found": ("most of the found circuit's Δ_opt goes", "> 0.5"),
            "random": ("less than half of random ones' goes", "< 0.5"),
        }
        for kind, (start, rule) in words.items():
            gone = drops(table, kind, step)
            text = f"{start} in the first batch of training (step {step}; share)"
            seeds = len(gone) if kind == "found" else 0
            claim = (text, None, *stats.mean_interval(gone), rule, seeds)
            listed.append(_claim(task, f"drop.{kind}", *claim))
    return listed


def _sizes(table: pd.DataFrame, ablation: str) -> str:
    sizes = table[(table.ablation == ablation) & (table.kind == "random")].n_edges
    return f"{sizes.min()} to {sizes.max()}"


def std_ratio(one: np.ndarray, other: np.ndarray) -> tuple[float, float | None, float | None]:
    """Of two standard deviations, with Miller's interval, which holds for samples that are not
    normal: Student's t over what each value adds to the logarithm, by leaving it out. There is none
    where both deviate by less than FEWEST of their mean, or where four values are not at hand."""
    value = float(one.std(ddof=1) / other.std(ddof=1))
    alike = all(x.std() < FEWEST * x.mean() for x in (one, other))
    if alike or min(len(one), len(other)) < 4:
        return value, None, None
    parts = [_parts_of_log_std(x) for x in (one, other)]
    if not all(np.isfinite(x).all() for x in parts):
        return value, None, None
    error, t = stats.welch(*parts)
    return value, float(value * np.exp(-t * error)), float(value * np.exp(t * error))


def _parts_of_log_std(values: np.ndarray) -> np.ndarray:
    """The jackknife's pseudo-values of log std: their mean estimates it, their spread its error."""
    n = len(values)
    without = [np.delete(values, i).std(ddof=1) for i in range(n)]
    with np.errstate(divide="ignore"):
        return n * np.log(values.std(ddof=1)) - (n - 1) * np.log(without)


def _claim(
    task: Task,
    id: str,
    text: str,
    theirs: float | None,
    value: float,
    low: float | None,
    high: float | None,
    rule: str,
    seeds: int = 0,
    note: str = "",
) -> Claim:
    name = f"random_{short_name(task)}.{id}"
    more = {"seeds": seeds, "source": "random_circuits", "note": note}
    return Claim(name, text, theirs, value, low, high, rule, **more)
