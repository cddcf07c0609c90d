"""Does OA invent circuits (paper, appendix F.12)? The circuit that was found against random ones of its size."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import pandas as pd

from oa_utils import plots, runs, tasks
from oa_utils.claims import Claim
from oa_utils.fronts import WAYS, FrontSettings, circuit_of, front_task, fronts
from oa_utils.masked import MaskedModel
from oa_utils.models import load_model
from oa_utils.search import gap, random_circuits
from oa_utils.search.evaluate import load_as, masked_of

VERSION = 2
PAPER = {  # mean Δ of random circuits, its standard deviation, Δ of UGS; GPT-2-small
    "ioi": {"mean": (4.529, 0.200, 0.264), "resample": (6.527, 0.085, 1.779), "optimal": (2.723, 0.024, 0.176),
            "counterfactual": (4.264, 0.049, 0.191)},
    "gt": {"mean": (1.010, 0.020, 0.033), "resample": (2.109, 0.039, 0.056), "optimal": (0.900, 0.011, 0.029),
           "counterfactual": (1.785, 0.027, 0.021)},
}  # fmt: skip


@dataclass(frozen=True)
class NullSettings:
    front: FrontSettings  # one circuit for each ablation
    n: int = 20  # random circuits for each
    tolerance: float = 0.1  # their size is that of the circuit, give or take this share


def null_gaps(masked: MaskedModel, settings: NullSettings) -> pd.DataFrame:
    """A row for each circuit found (`kind` found) and each random one, measured by the same protocol, with its `curve`."""
    model, task = masked.model, front_task(masked.model, settings.front)

    def compute(_):
        items = []
        for _, row in fronts(masked, settings.front).iterrows():
            own = circuit_of(masked, row)
            others = random_circuits(masked, own.n_edges, settings.n, settings.tolerance, settings.front.seed)
            items += [(row.ablation, kind, c) for kind, cs in (("found", [own]), ("random", others)) for c in cs]
        name = load_as(model)
        one = partial(_measure, masked=None if name else masked, name=name, task=task, post=dict(settings.front.gap))
        return {"rows": runs.parallel(one, items, desc="random circuits") if name else [one(item) for item in items]}

    key = f"{settings.front.task}_n={settings.n}"
    return runs.run("null_circuits", settings, compute, model=model, task=task, version=VERSION, key=key).frame()


def _measure(item: tuple, masked: MaskedModel | None, name: str, task: tasks.Task, post: dict) -> dict:
    ablation, kind, circuit = item
    g = gap(masked or masked_of(name), task, circuit, ablation, **post)
    return {"ablation": ablation, "kind": kind, "n_edges": circuit.n_edges, "gap": g.mean, "se": g.se, "curve": g.curve}


def summary(table: pd.DataFrame, task: str) -> pd.DataFrame:
    """Mean and standard deviation of random circuits, the circuit found, and its z-score, beside the paper's."""
    rows = []
    for ablation in [a for a in WAYS if a in set(table.ablation)]:
        part = table[table.ablation == ablation]
        drawn, own = part[part.kind == "random"].gap, part[part.kind == "found"].iloc[0]
        mean, std, found = PAPER[task][ablation]
        row = {"ablation": ablation, "edges": own.n_edges, "random": drawn.mean(), "std": drawn.std(ddof=0), "found": own.gap}
        row |= {"z": (own.gap - drawn.mean()) / drawn.std(ddof=0), "n": len(drawn)}
        rows.append(row | {"paper random": mean, "paper std": std, "paper found": found, "paper z": (found - mean) / std})
    return pd.DataFrame(rows).set_index("ablation")


def first_drop(table: pd.DataFrame, kind: str) -> float:
    """Share of Δ_opt on the train part that the first look at trained constants finds gone, in the mean over circuits."""
    curves = table[(table.ablation == "optimal") & (table.kind == kind)].curve
    return float(np.mean([1 - curve[1][1] / curve[0][1] for curve in curves]))


def claims(table: pd.DataFrame, task: str) -> list[Claim]:
    """The paper's statements about its table of random circuits."""
    found, made = summary(table, task), []

    def add(id: str, text: str, holds: bool, paper: float | None, here: float) -> None:
        made.append(Claim(f"random_{task}.{id}", text, paper, float(here), holds=bool(holds)))

    for a, row in found.iterrows():
        text = f"the circuit found is far below random ones of its size under {plots.LABELS[a]} (z-score; read: < −3)"
        add(f"z.{a}", text, row.z < -3, row["paper z"], row.z)
    others = found.drop("optimal")
    add("z.lead", "the z-score is most significant under OA (OA less the next)", found.z["optimal"] < others.z.min(),
        found["paper z"]["optimal"] - others["paper z"].min(), found.z["optimal"] - others.z.min())  # fmt: skip
    total = found.loc[["mean", "resample"]]
    add("std", "Δ of random circuits varies less under OA than under mean and resample (OA over the lesser)",
        found["std"]["optimal"] < total["std"].min(), found["paper std"]["optimal"] / total["paper std"].min(),
        found["std"]["optimal"] / total["std"].min())  # fmt: skip
    for kind, text in (("found", "most of the found circuit's Δ_opt goes"), ("random", "less than half of random ones' goes")):
        drop = first_drop(table, kind)
        add(f"drop.{kind}", f"{text} in the first steps of training", (drop > 0.5) == (kind == "found"), None, drop)
    return made


def claim(model_name: str, id: str) -> float:
    """Measure a claim about random circuits anew, with the settings of the published table."""
    task = id.split(".")[0].removeprefix("random_")
    folder = runs.published() / runs.slug(model_name) / "null_circuits"
    records = [runs.read_json(path) for path in sorted(folder.glob(f"{task}_*.json"))]
    if not records:
        raise LookupError(f"no published random circuits of {model_name} for task {task}")
    given = records[-1]["settings"]
    settings = NullSettings(**{**given, "front": FrontSettings(**given["front"])})
    table = null_gaps(MaskedModel(load_model(model_name)), settings)
    return {c.id: c.measured for c in claims(table, task)}[id]
