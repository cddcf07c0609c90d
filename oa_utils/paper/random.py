"""Paper, appendix F.12: does OA invent circuits? The circuit that was found against random ones
of its size."""

from __future__ import annotations

import numpy as np
import pandas as pd

from oa_utils import plots
from oa_utils.paper.circuits import WAYS, short_name
from oa_utils.paper.claims import Claim
from oa_utils.tasks import Task

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
    """Mean and standard deviation of random circuits, the circuit found, and its z-score, beside
    the paper's where it has this task; on a table of `against_random`."""
    paper = PAPER.get(short_name(task), {})
    ablations = list(table.ablation.unique())
    order = [way for way in WAYS if way in ablations]
    order += [way for way in ablations if way not in WAYS]
    rows = []
    for ablation in order:
        part = table[table.ablation == ablation]
        drawn = part[part.kind == "random"].gap
        circuit = part[part.kind == "found"].iloc[0]
        std = drawn.std(ddof=0)
        row = {
            "ablation": ablation,
            "edges": circuit.n_edges,
            "random": drawn.mean(),
            "std": std,
            "found": circuit.gap,
            "z": (circuit.gap - drawn.mean()) / std,
            "n": len(drawn),
        }
        if ablation in paper:
            mean, paper_std, ugs = paper[ablation]
            row |= {"paper random": mean, "paper std": paper_std, "paper found": ugs}
            row["paper z"] = (ugs - mean) / paper_std
        rows.append(row)
    return pd.DataFrame(rows).set_index("ablation")


def first_drop(table: pd.DataFrame, kind: str) -> float:
    """Share of Δ_opt on the train part that the first look at trained constants finds gone, mean
    over circuits."""
    curves = table[(table.ablation == "optimal") & (table.kind == kind)].curve
    return float(np.mean([1 - curve[1][1] / curve[0][1] for curve in curves]))


def claims(table: pd.DataFrame, task: Task) -> list[Claim]:
    """The paper's statements about its table of random circuits, as far as it has the task."""
    if short_name(task) not in PAPER:
        return []
    rows = summary(table, task)
    listed = []

    def add(id: str, text: str, holds: bool | np.bool_, paper: float | None, value: float) -> None:
        name = f"random_{short_name(task)}.{id}"
        claim = Claim(name, text, paper, float(value), holds=bool(holds), source="random_circuits")
        listed.append(claim)

    for ablation, row in rows.iterrows():
        text = (
            f"the circuit found is far below random ones of its size under "
            f"{plots.LABELS[ablation]} (z-score; read: < −3)"
        )
        add(f"z.{ablation}", text, row.z < -3, row["paper z"], row.z)
    others = rows.drop("optimal")
    add(
        "z.lead",
        "the z-score is most significant under OA (OA less the next)",
        rows.z["optimal"] < others.z.min(),
        rows["paper z"]["optimal"] - others["paper z"].min(),
        rows.z["optimal"] - others.z.min(),
    )
    total = rows.loc[[way for way in ("mean", "resample") if way in rows.index]]
    add(
        "std",
        "Δ of random circuits varies less under OA than under mean and resample (OA over the "
        "lesser)",
        rows["std"]["optimal"] < total["std"].min(),
        rows["paper std"]["optimal"] / total["paper std"].min(),
        rows["std"]["optimal"] / total["std"].min(),
    )
    words = {
        "found": "most of the found circuit's Δ_opt goes",
        "random": "less than half of random ones' goes",
    }
    for kind, text in words.items():
        drop = first_drop(table, kind)
        holds = (drop > 0.5) == (kind == "found")
        add(f"drop.{kind}", f"{text} in the first steps of training", holds, None, drop)
    return listed
