"""The paper's claims about circuits (§3, appendix F), on fronts that were measured here."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd

from oa_utils import plots, runs
from oa_utils.claims import Claim
from oa_utils.fronts import (
    EDGE_PRUNING,
    WAYS,
    FrontSettings,
    at_size,
    front_task,
    fronts,
    manual_gaps,
    paper_front,
    ratio,
    ratio_of,
    variants,
)
from oa_utils.masked import MaskedModel
from oa_utils.models import load_model
from oa_utils.search.estimators import EstimatorSettings, estimator_errors

BASELINES = ("hcgs", "acdc", "eap", "eap_ig")
PAPER = {"ioi": {"counterfactual": 0.32, "mean": 0.62, "resample": 0.88}, "gt": {}}  # OA lower by so much, 1,000 edges
MANUAL_GAP = {"ioi": 0.29, "gt": 0.42}  # the best circuit's Δ_opt below that of the manual one


def interval(table: pd.DataFrame, one: tuple[str, str], other: tuple[str, str], n: int = 200, seed: int = 0) -> tuple:
    """95 % of what the ratio of two fronts could be if each gap varied by its standard error over prompts."""
    rng, columns = np.random.default_rng(seed), ["n_edges", "gap", "se"]
    fronts_of = [table[(table.method == m) & (table.ablation == a)][columns].to_numpy() for m, a in (one, other)]
    drawn = [ratio_of(*(np.stack([f[:, 0], np.abs(rng.normal(f[:, 1], f[:, 2]))], 1) for f in fronts_of)) for _ in range(n)]
    drawn = [x for x in drawn if np.isfinite(x)]
    return tuple(float(x) for x in np.quantile(drawn, [0.025, 0.975])) if drawn else (None, None)


def claims(table: pd.DataFrame, task: str, manual: pd.DataFrame | None = None) -> list[Claim]:
    """Every claim of §3 that this table has the fronts for; one seed of each."""
    table, paper, made = table[table.seed == table.seed.min()], paper_front(task), []
    there = set(zip(table.method, table.ablation, strict=True))

    def add(id: str, text: str, limit: float, of: tuple, than: tuple, said: float | None, note: str = "") -> None:
        if of not in there or than not in there:
            return
        value, (low, high) = ratio(table, of, than), interval(table, of, than)
        holds = bool(value < limit) if np.isfinite(value) else None
        note = note if np.isfinite(value) else "the two fronts span no common size"
        made.append(Claim(f"circuits_{task}.{id}", text, said, _number(value), low, high, holds, note=note))

    for ablation in WAYS:
        for other in BASELINES:
            said = ratio(paper, ("ugs", ablation), (other, ablation))
            text = f"UGS has lower Δ than {plots.LABELS[other]} at equal size, under {plots.LABELS[ablation]} (ratio)"
            note = "paper: ratio of the authors' fronts" if np.isfinite(said) else "not in the paper"
            add(f"front.{ablation}.{other}", text, 1, ("ugs", ablation), (other, ablation), _number(said), note)
    for other in ("counterfactual", "mean", "resample"):
        said = ratio(paper, ("ugs", "optimal"), ("ugs", other))
        more = f"; {PAPER[task][other]:.0%} lower at 1,000 edges" if other in PAPER[task] else ""
        text = f"circuits have lower Δ under OA than under {plots.LABELS[other]} at equal size (UGS; ratio)"
        add(f"ablation.{other}", text, 1, ("ugs", "optimal"), ("ugs", other), said, f"paper: authors' fronts{more}")
    own = EDGE_PRUNING[task]
    said, text = ratio(paper, ("hcgs", own), ("edge_pruning", own)), "Edge Pruning does not outperform HCGS"
    add("edge_pruning", f"{text}, under {plots.LABELS[own]} (ratio HCGS / EP)", 1, ("hcgs", own), ("edge_pruning", own), said)
    return made + (manual_claims(table, task, manual) if manual is not None else [])


def _number(x: float) -> float | None:
    return x if np.isfinite(x) else None


def manual_claims(table: pd.DataFrame, task: str, manual: pd.DataFrame) -> list[Claim]:
    """How far the best circuit of the manual one's size is below it: little under OA, much under the others."""
    ours, made = (manual.source != "authors' log, GPT-2-small").all(), []
    fronts_of = table if ours else paper_front(task)
    for row in manual.itertuples():
        best = at_size(fronts_of, "ugs", row.ablation, row.n_edges)
        said, text = None, f"the best of its size is far below the manual circuit under {plots.LABELS[row.ablation]} (> half)"
        if row.ablation == "optimal":
            said, text = MANUAL_GAP[task], "under OA the manual circuit is about optimal for its size (best < half below)"
        value = 1 - best / row.gap
        holds = bool((value < 0.5) == (row.ablation == "optimal")) if ours else None
        note = "" if ours else f"needs GPT-2-small: the authors' logs give {value:.2f}"
        id, value = f"circuits_{task}.manual.{row.ablation}", value if ours else None
        made.append(Claim(id, text, said, value, holds=holds, note=note))
    return made


def middle(settings: FrontSettings) -> float:
    """The λ at which searches are looked at closely: the second of UGS under CF."""
    values = next(v for m, a, v in settings.grid if (m, a) == ("ugs", "counterfactual"))
    return values[min(1, len(values) - 1)]


def estimator_claims(slopes: pd.DataFrame) -> list[Claim]:
    rms, names = slopes.groupby("estimator").rms.mean(), {"importance": "importance sampling", "hcgs": "HardConcrete"}
    text = "UGS estimates marginal gaps better than {} (ratio of rms errors)"
    values = {k: float(rms["ugs"] / rms[k]) for k in names}
    return [Claim(f"circuits_ioi.estimator.{k}", text.format(names[k]), None, v, holds=v < 1) for k, v in values.items()]


def option_claims(tried: pd.DataFrame) -> list[Claim]:
    said = {"random start": "a random start is worse", "variance window": "the variance factor does not improve the results"}
    cost, text = tried.cost / tried.cost["CF: as in the paper"], " (ratio of Δ + λ edges, UGS under CF, one seed)"
    ids = {f"circuits_ioi.option.{k.replace(' ', '_')}": (v + text, float(cost[f"CF: {k}"])) for k, v in said.items()}
    return [Claim(id, words, None, value, holds=value >= 1) for id, (words, value) in ids.items()]


def spoofing(masked: MaskedModel, settings: FrontSettings) -> pd.DataFrame:
    """Δ of UGS circuits under resample over that under CF, at one λ, for both tasks; beside GPT-2-small's at equal sizes."""
    rows, grid = [], tuple(("ugs", a, (middle(settings),)) for a in ("counterfactual", "resample"))
    for name in ("ioi", "gt"):
        both = fronts(masked, replace(settings, task=name, grid=grid, seeds=settings.seeds[:1])).set_index("ablation")
        row = {"task": name} | {f"{column} {a}": both.at[a, column] for column in ("gap", "n_edges") for a in both.index}
        there = ratio(paper_front(name), ("ugs", "resample"), ("ugs", "counterfactual"))
        rows.append(row | {"ratio": both.gap["resample"] / both.gap["counterfactual"], "paper": there})
    return pd.DataFrame(rows).set_index("task")


def spoofing_claims(table: pd.DataFrame) -> list[Claim]:
    said, value = (float(table[column]["gt"] / table[column]["ioi"]) for column in ("paper", "ratio"))
    text = "resample is mild on Greater-Than and harsh on IOI (Δ resample / Δ CF, Greater-Than over IOI)"
    return [Claim("circuits_gt.resample", text, said, value, holds=value < 1)]


def _estimators(masked: MaskedModel, settings: FrontSettings) -> list[Claim]:
    folder = runs.published() / runs.slug(masked.model.name) / "estimators"
    given = runs.read_json(sorted(folder.glob("*.json"))[-1])["settings"]
    return estimator_claims(estimator_errors(masked, front_task(masked.model, settings), EstimatorSettings(**given)))


def _options(masked: MaskedModel, settings: FrontSettings) -> list[Claim]:
    names = ("CF: as in the paper", "CF: random start", "CF: variance window")
    return option_claims(variants(masked, settings, middle(settings), names))


OTHERS = {  # claims that do not stand on the fronts themselves
    "estimator": _estimators,
    "option": _options,
    "resample": lambda masked, settings: spoofing_claims(spoofing(masked, settings)),
}


def claim(model_name: str, id: str) -> float:
    """Measure a claim about fronts with the settings of the published table."""
    task, words = id.split(".")[0].removeprefix("circuits_"), set(id.split(".")[1:])
    published = runs.published() / runs.slug(model_name) / "fronts"
    records = [runs.read_json(path) for path in sorted(published.glob(f"{task}_*.json"))]
    if not records:
        raise LookupError(f"no published fronts of {model_name} for task {task}")
    settings = FrontSettings(**max((r["settings"] for r in records), key=lambda s: len(s["grid"])))
    kind, masked = id.split(".")[1], MaskedModel(load_model(model_name))
    if kind in OTHERS:
        return {c.id: c.measured for c in OTHERS[kind](masked, settings)}[id]
    methods = {"front": {"ugs", *words}, "ablation": {"ugs"}, "edge_pruning": {"hcgs", "edge_pruning"}}.get(kind, {"ugs"})
    ways = {"front": words, "ablation": {"optimal", *words}, "edge_pruning": {EDGE_PRUNING[task]}}.get(kind, set(WAYS))
    grid = tuple((m, a, tuple(v)) for m, a, v in settings.grid if m in methods and a in ways)
    settings = replace(settings, grid=grid, seeds=settings.seeds[:1])
    found = claims(fronts(masked, settings), task, manual_gaps(masked, settings) if kind == "manual" else None)
    return {c.id: c.measured for c in found}[id]
