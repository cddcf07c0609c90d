"""Paper, appendix F.12: does OA invent circuits? The circuit that was found against random ones
of its size."""

from __future__ import annotations

import numpy as np
import pandas as pd
import scipy.stats

from oa_utils import plots, stats
from oa_utils.paper.circuits import WAYS, short_name
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


def summary(table: pd.DataFrame, task: Task) -> pd.DataFrame:
    """Random circuits, the circuits found (mean over seeds) and their ratio, beside the paper's
    where it has this task; on a table of `against_random`.

    The z-score is NaN where random circuits all do the same: it would be a number over next to
    nothing.
    """
    paper = PAPER.get(short_name(task), {})
    ablations = list(table.ablation.unique())
    order = [way for way in WAYS if way in ablations]
    order += [way for way in ablations if way not in WAYS]
    rows = []
    for ablation in order:
        drawn = _gaps(table, ablation, "random")
        found = _gaps(table, ablation, "found")
        low, high = ratio_interval(table, ablation)
        row = {
            "ablation": ablation,
            "edges": table[(table.ablation == ablation) & (table.kind == "found")].n_edges.mean(),
            "random": drawn.mean(),
            "std": drawn.std(),
            "found": found.mean(),
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
        rows.append(row)
    return pd.DataFrame(rows).set_index("ablation")


def _gaps(table: pd.DataFrame, ablation: str, kind: str) -> np.ndarray:
    return table[(table.ablation == ablation) & (table.kind == kind)].gap.to_numpy(float)


def z_score(found: np.ndarray, drawn: np.ndarray) -> float:
    std = drawn.std()
    if std < FEWEST * drawn.mean():
        return np.nan
    return float((found.mean() - drawn.mean()) / std)


def t_interval(values: np.ndarray) -> tuple[float, float] | tuple[None, None]:
    """95 % of a mean over a few values; one value has none."""
    if len(values) < 2:
        return None, None
    mean, se = stats.mean_se(values)
    if se == 0:
        return mean, mean
    low, high = scipy.stats.t.interval(0.95, len(values) - 1, mean, se)
    return float(low), float(high)


def ratio_interval(table: pd.DataFrame, ablation: str) -> tuple[float | None, float | None]:
    """Of Δ found over Δ random, from logarithms: over seeds of the search where there are several,
    else over test prompts, and over random circuits."""
    part = table[(table.ablation == ablation) & (table.kind == "found")]
    drawn = _gaps(table, ablation, "random")
    if len(drawn) < 2:
        return None, None
    logs = np.log(part.gap.to_numpy(float))
    freedom = len(logs) - 1
    error = scipy.stats.sem(logs) if freedom else float((part.se / part.gap).iloc[0])
    error = np.hypot(error, drawn.std(ddof=1) / len(drawn) ** 0.5 / drawn.mean())
    width = (scipy.stats.t.ppf(0.975, freedom) if freedom else 1.96) * error
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
    listed = []
    for ablation, row in rows.iterrows():
        text = (
            "the circuit found is far below random ones of its size under "
            f"{plots.LABELS[ablation]} (ratio of Δ below a half)"
        )
        ends = (row.low, row.high)
        claim = (text, row["paper ratio"], row.ratio, *ends, "< 0.5", int(row.seeds))
        listed.append(_claim(task, f"ratio.{ablation}", *claim))
    drawn = {way: _gaps(table, way, "random") for way in rows.index}
    for other in ("mean", "resample"):
        if other not in drawn or "optimal" not in drawn:
            continue
        pair = (drawn["optimal"], drawn[other])
        said = rows["paper std"]["optimal"] / rows["paper std"][other]
        text = (
            f"Δ of random circuits varies less under OA than under {plots.LABELS[other]} "
            "(ratio of standard deviations below 1)"
        )
        value, low, high = std_ratio(*pair)
        listed.append(_claim(task, f"std.{other}", text, said, value, low, high, "< 1"))
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
            ends = t_interval(gone)
            claim = (text, None, gone.mean(), *ends, rule, seeds)
            listed.append(_claim(task, f"drop.{kind}", *claim))
    return listed


def std_ratio(one: np.ndarray, other: np.ndarray) -> tuple[float, float | None, float | None]:
    """Of two standard deviations, with the interval that holds for normal samples."""
    value = float(one.std() / other.std())
    if min(len(one), len(other)) < 3:
        return value, None, None
    low, high = scipy.stats.f.ppf([0.025, 0.975], len(one) - 1, len(other) - 1)
    return value, float(value / high**0.5), float(value / low**0.5)


def _claim(
    task: Task,
    id: str,
    text: str,
    said: float | None,
    value: float,
    low: float | None,
    high: float | None,
    rule: str,
    seeds: int = 0,
) -> Claim:
    name = f"random_{short_name(task)}.{id}"
    source = "random_circuits"
    return Claim(name, text, said, value, low, high, rule, seeds=seeds, source=source)
