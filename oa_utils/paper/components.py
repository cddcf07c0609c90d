"""Paper §2: which ablation can be trusted. Statistics and claims on a table of component gaps."""

from collections.abc import Callable

import numpy as np
import pandas as pd

from oa_utils import stats
from oa_utils.paper.claims import Claim

TOTAL = ("zero", "mean", "resample", "cf_mean")  # the total ablations that OA is set against
WAYS = (*TOTAL, "optimal", "counterfactual")
PAPER = {  # GPT-2-small on IOI, all 156 heads and MLPs
    "rank": dict(zip(WAYS, (0.590, 0.825, 0.828, 0.833, 0.907, 1.0), strict=True)),
    "loglog": dict(zip(WAYS, (0.626, 0.831, 0.826, 0.847, 0.908, 1.0), strict=True)),
    "mean_gap": dict(zip(WAYS, (0.0584, 0.0405, 0.0559, 0.0412, 0.0035, 0.0296), strict=True)),
    "median_ratio": dict(zip(WAYS, (0.111, 0.330, 0.177, 0.317, 1.0, 0.889), strict=True)),
}
# of the gaps of an ablation, of CF, of OA
STATISTICS: dict[str, Callable[[np.ndarray, np.ndarray, np.ndarray], float]] = {
    "rank": lambda gaps, cf, opt: stats.spearman(gaps, cf),
    "loglog": lambda gaps, cf, opt: stats.loglog(gaps, cf),
    "loglog_trimmed": lambda gaps, cf, opt: stats.loglog(gaps, cf, trim=0.02),
    "mean_gap": lambda gaps, cf, opt: float(np.mean(gaps)),
    "median_gap": lambda gaps, cf, opt: float(np.median(gaps)),
    "median_ratio": lambda gaps, cf, opt: stats.median_ratio(opt, gaps),
    "clamped_mean_ratio": lambda gaps, cf, opt: stats.clamped_mean_ratio(opt, gaps),
}


def wide(gaps: pd.DataFrame, family: str = "position") -> pd.DataFrame:
    """Gaps with a row for each component and a column for each ablation, constants of one family
    only."""
    kept = gaps[gaps.family.isin(["", family])]
    order = [ablation for ablation in WAYS if ablation in set(kept.ablation)]
    table = kept.pivot(index="component", columns="ablation", values="gap")
    return table.loc[kept.component.unique(), order]


def compare(table: pd.DataFrame, n: int = 1000, seed: int = 0) -> pd.DataFrame:
    """Every statistic of every ablation (columns statistic ablation value low high paper), with
    intervals over components; those that need CF only where the task has it."""
    has_cf = "counterfactual" in table
    reference = table["counterfactual" if has_cf else "optimal"].to_numpy()
    rows = []
    for name, statistic in STATISTICS.items():
        if not has_cf and name in ("rank", "loglog", "loglog_trimmed"):
            continue
        for ablation in table:
            arrays = (table[ablation].to_numpy(), reference, table["optimal"].to_numpy())
            low, high = _interval(statistic, *arrays, n=n, seed=seed)
            rows.append(
                {
                    "statistic": name,
                    "ablation": ablation,
                    "value": statistic(*arrays),
                    "low": low,
                    "high": high,
                    "paper": PAPER.get(name, {}).get(ablation),
                }
            )
    return pd.DataFrame(rows)


def _interval(
    statistic: Callable, *arrays: np.ndarray, n: int, seed: int = 0
) -> tuple[float, float]:
    with np.errstate(all="ignore"):
        return stats.bootstrap(statistic, *arrays, n=n, seed=seed)


def lead(table: pd.DataFrame, name: str) -> Callable[[np.ndarray], float]:
    """By how much OA agrees better with CF than the best other total ablation does, of rows of
    the table."""
    others = [i for i, ablation in enumerate(table) if ablation in TOTAL]
    cf = list(table).index("counterfactual")
    opt = list(table).index("optimal")
    agree = STATISTICS[name]

    def difference(rows: np.ndarray) -> float:
        best = max(agree(rows[:, i], rows[:, cf], None) for i in others)
        return agree(rows[:, opt], rows[:, cf], None) - best

    return difference


def claims(test: pd.DataFrame, train: pd.DataFrame, n: int = 1000) -> list[Claim]:
    """The paper's claims about single components, on tables made by `wide`; those on CF only
    where there is one."""
    table = compare(test, n).set_index(["statistic", "ablation"])
    others = [ablation for ablation in TOTAL if ablation in test]
    if "counterfactual" in test:
        listed = [_lead_claim(test, name, n) for name in ("rank", "loglog")]
    else:
        listed = []
    for ablation in others:
        row = table.loc["median_ratio", ablation]
        listed.append(
            Claim(
                f"single.median_ratio.{ablation}",
                f"Δ_opt is only a part (read: under half) of Δ_{ablation} for the median component",
                row.paper,
                row.value,
                row.low,
                row.high,
                bool(row.value < 0.5),
                source="single_components",
            )
        )
    row = table.loc["mean_gap", "optimal"]
    least = table.loc["mean_gap"].value.idxmin()
    listed.append(
        Claim(
            "single.mean_gap.optimal",
            "mean Δ over components is least for OA",
            row.paper,
            row.value,
            row.low,
            row.high,
            least == "optimal",
            source="single_components",
        )
    )
    share = float(np.mean([train.optimal <= train[ablation] + 1e-6 for ablation in others]))
    listed.append(
        Claim(
            "single.proposition1",
            "Proposition 1: Δ_opt ≤ Δ of every total ablation, for every component (train part; "
            "share of pairs)",
            1.0,
            share,
            holds=share == 1,
            source="single_components",
        )
    )
    return listed


def _lead_claim(test: pd.DataFrame, name: str, n: int) -> Claim:
    """OA's lead in agreement with CF over the next total ablation."""
    difference = lead(test, name)
    value = difference(test.to_numpy())
    low, high = _interval(difference, test.to_numpy(), n=n)
    word = {"rank": "rank", "loglog": "log-log"}[name]
    return Claim(
        f"single.{name}.lead",
        f"of all total ablations, OA has the highest {word} correlation with CF; its lead over the "
        "next",
        PAPER[name]["optimal"] - max(PAPER[name][ablation] for ablation in TOTAL),
        value,
        low,
        high,
        value > 0,
        source="single_components",
        note="its interval has 0 in it" if low <= 0 <= high else "",
    )
