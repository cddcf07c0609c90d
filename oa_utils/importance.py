"""Which ablation can be trusted: the statistics and the claims of paper §2 on a table of component gaps."""

from collections.abc import Callable

import numpy as np
import pandas as pd

from oa_utils import runs, stats, tasks
from oa_utils.ablation import FAMILIES
from oa_utils.claims import Claim
from oa_utils.components import ComponentSettings, component_gaps
from oa_utils.models import load_model

TOTAL = ("zero", "mean", "resample", "cf_mean")  # the total ablations that OA is set against
WAYS = (*TOTAL, "optimal", "counterfactual")
PAPER = {  # GPT-2-small on IOI, all 156 heads and MLPs
    "rank": dict(zip(WAYS, (0.590, 0.825, 0.828, 0.833, 0.907, 1.0), strict=True)),
    "loglog": dict(zip(WAYS, (0.626, 0.831, 0.826, 0.847, 0.908, 1.0), strict=True)),
    "mean_gap": dict(zip(WAYS, (0.0584, 0.0405, 0.0559, 0.0412, 0.0035, 0.0296), strict=True)),
    "median_ratio": dict(zip(WAYS, (0.111, 0.330, 0.177, 0.317, 1.0, 0.889), strict=True)),
}
STATISTICS: dict[str, Callable] = {  # of the gaps of an ablation, of CF, of OA
    "rank": lambda x, cf, opt: stats.spearman(x, cf),
    "loglog": lambda x, cf, opt: stats.loglog(x, cf),
    "loglog_trimmed": lambda x, cf, opt: stats.loglog(x, cf, trim=0.02),
    "mean_gap": lambda x, cf, opt: float(np.mean(x)),
    "median_gap": lambda x, cf, opt: float(np.median(x)),
    "median_ratio": lambda x, cf, opt: stats.median_ratio(opt, x),
    "clamped_mean_ratio": lambda x, cf, opt: stats.clamped_mean_ratio(opt, x),
}


def wide(gaps: pd.DataFrame, family: str = "position") -> pd.DataFrame:
    """Gaps with a row for each component and a column for each ablation, constants of one family only."""
    kept = gaps[gaps.family.isin(["", family])]
    order = [a for a in WAYS if a in set(kept.ablation)]
    return kept.pivot(index="component", columns="ablation", values="gap").loc[kept.component.unique(), order]


def compare(table: pd.DataFrame, n: int = 1000, seed: int = 0) -> pd.DataFrame:
    """Every statistic of every ablation (columns statistic ablation value low high paper), intervals over components."""
    rows = []
    for name, statistic in STATISTICS.items():
        for ablation in table:
            triple = [table[a].to_numpy() for a in (ablation, "counterfactual", "optimal")]
            low, high = _interval(statistic, *triple, n=n, seed=seed)
            here = {"value": statistic(*triple), "low": low, "high": high, "paper": PAPER.get(name, {}).get(ablation)}
            rows.append({"statistic": name, "ablation": ablation, **here})
    return pd.DataFrame(rows)


def _interval(statistic: Callable, *arrays: np.ndarray, n: int, seed: int) -> tuple[float, float]:
    with np.errstate(all="ignore"):
        return stats.bootstrap(statistic, *arrays, n=n, seed=seed)


def lead(table: pd.DataFrame, name: str) -> Callable:
    """By how much OA agrees better with CF than the best other total ablation does."""
    others = [i for i, a in enumerate(table) if a in TOTAL]
    cf, opt = (list(table).index(a) for a in ("counterfactual", "optimal"))
    agree = STATISTICS[name]

    def difference(rows: np.ndarray) -> float:
        return agree(rows[:, opt], rows[:, cf], None) - max(agree(rows[:, i], rows[:, cf], None) for i in others)

    return difference


def claims(test: pd.DataFrame, train: pd.DataFrame, source: str = "", n: int = 1000) -> list[Claim]:
    """The paper's claims about single components, on tables made by `wide`."""
    found = compare(test, n)
    cell = lambda name, a: found[(found.statistic == name) & (found.ablation == a)].iloc[0]  # noqa: E731
    made: list[Claim] = []

    def add(id: str, text: str, holds: bool, paper: float, value: float, low=None, high=None, note: str = ""):
        made.append(Claim(f"single.{id}", text, paper, value, low, high, bool(holds), source=source, note=note))

    for name, word in (("rank", "rank"), ("loglog", "log-log")):
        best = lead(test, name)
        low, high = _interval(best, test.to_numpy(), n=n, seed=0)
        here = best(test.to_numpy())
        text = f"of all total ablations, OA has the highest {word} correlation with CF; its lead over the next"
        paper = PAPER[name]["optimal"] - max(PAPER[name][a] for a in TOTAL)
        note = "its interval has 0 in it" if low <= 0 <= high else ""
        add(f"{name}.lead", text, here > 0, paper, here, low, high, note)
    for a in TOTAL:
        row = cell("median_ratio", a)
        text = f"Δ_opt is only a part (read: under half) of Δ_{a} for the median component"
        add(f"median_ratio.{a}", text, row.value < 0.5, row.paper, row.value, row.low, row.high)
    row, least = cell("mean_gap", "optimal"), found[found.statistic == "mean_gap"].set_index("ablation").value.idxmin()
    text = "mean Δ over components is least for OA"
    add("mean_gap.optimal", text, least == "optimal", row.paper, row.value, row.low, row.high)
    share = float(np.mean([train.optimal <= train[a] + 1e-6 for a in TOTAL]))
    text = "Proposition 1: Δ_opt ≤ Δ of every total ablation, for every component (train part; share of pairs)"
    add("proposition1", text, share == 1, 1.0, share)
    return made


def published(model_name: str, part: str = "test", metric: str = "kl") -> pd.DataFrame:
    """Published gaps of every component, one row for each ablation and family."""
    rows = runs.results(model_name, "single_components")
    rows = rows[(rows.part == part) & (rows.metric == metric)]
    rows = rows.iloc[rows.components.map(len).argsort(kind="stable")]  # where a component was run twice: with its layer
    return rows.drop_duplicates(["component", "ablation", "family"], keep="last")


def claim(model_name: str, id: str) -> float:
    """Measure a claim of §2 anew, with the settings that the published result was made with."""
    rows, model = published(model_name), load_model(model_name)
    trained = rows[rows.ablation == "optimal"].iloc[0]
    starts = tuple(x for x in trained.options["starts"] if x != "shared")
    task = tasks.ioi(model, 2 * int(trained.n), seed=int(trained.seed))
    settings = ComponentSettings(**{**trained.options, "starts": starts}, seed=int(trained.seed))
    families = [f for f in FAMILIES if f in set(rows[rows.ablation == "optimal"].family)]
    ask = {"families": families, "settings": settings, "store": False}
    parts = [component_gaps(model, task, None, WAYS, part=part, **ask) for part in ("test", "train")]
    return {c.id: c.measured for c in claims(*map(wide, parts), n=10)}[id]
