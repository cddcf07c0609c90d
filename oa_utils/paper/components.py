"""Paper §2: which ablation can be trusted. Statistics and claims on a table of component gaps."""

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
import scipy.stats
from numpy import ndarray

from oa_utils import plots, stats, store
from oa_utils.paper.claims import Claim

TOTAL = ("zero", "mean", "resample", "cf_mean")  # the total ablations that OA is set against
WAYS = (*TOTAL, "optimal", "counterfactual")
PAPER = {  # GPT-2-small on IOI, all 156 heads and MLPs
    "rank": dict(zip(WAYS, (0.590, 0.825, 0.828, 0.833, 0.907, 1.0), strict=True)),
    "loglog": dict(zip(WAYS, (0.626, 0.831, 0.826, 0.847, 0.908, 1.0), strict=True)),
    "mean_gap": dict(zip(WAYS, (0.0584, 0.0405, 0.0559, 0.0412, 0.0035, 0.0296), strict=True)),
    "median_ratio": dict(zip(WAYS, (0.111, 0.330, 0.177, 0.317, 1.0, 0.889), strict=True)),
}
LIVE = 1e-3  # nats: a component whose Δ_CF is surely above this does something on the task
FEWEST = 8  # components that a correlation or a median is claimed of
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


def compare(
    table: pd.DataFrame, n: int = 1000, seed: int = 0, only: Sequence[str] = tuple(STATISTICS)
) -> pd.DataFrame:
    """Every statistic of every ablation (columns statistic ablation value low high paper), with
    intervals over components; those that need CF only where the task has it."""
    has_cf = "counterfactual" in table
    reference = table["counterfactual" if has_cf else "optimal"].to_numpy()
    rows = []
    for name in only:
        statistic = STATISTICS[name]
        if not has_cf and name in ("rank", "loglog", "loglog_trimmed"):
            continue
        for ablation in table:
            arrays = (table[ablation].to_numpy(), reference, table["optimal"].to_numpy())
            low, high = stats.bootstrap(statistic, *arrays, n=n, seed=seed)
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


def by_prompt(gaps: pd.DataFrame, family: str = "position") -> dict[tuple[str, str], ndarray]:
    """The gap of each prompt by (component, ablation), of a table with `each`."""
    kept = gaps[gaps.family.isin(["", family])]
    return {(row.component, row.ablation): stats.array(row.each) for row in kept.itertuples()}


def live(gaps: pd.DataFrame) -> list[str]:
    """Components that do something on the task: the 95 % interval of their Δ_CF (of Δ_opt, where
    there is no CF) lies above LIVE."""
    ways = set(gaps.ablation)
    reference = gaps[gaps.ablation == ("counterfactual" if "counterfactual" in ways else "optimal")]
    return reference.component[reference.gap - 1.96 * reference.se > LIVE].unique().tolist()


def against_optimal(gaps: pd.DataFrame, family: str = "position") -> pd.DataFrame:
    """Δ − Δ_opt of every component and total ablation, paired over prompts: its mean, error and
    distance from 0 in errors."""
    values = by_prompt(gaps, family)
    rows = []
    for (component, ablation), each in values.items():
        if ablation in TOTAL:
            difference, se = stats.mean_se(each - values[component, "optimal"])
            z = difference / max(se, 1e-12)
            row = {"component": component, "against": ablation, "difference": difference}
            rows.append({**row, "se": se, "z": z})
    return pd.DataFrame(rows)


def worse(paired: pd.DataFrame) -> pd.DataFrame:
    """The pairs in which OA is worse beyond a 95 % interval that allows for their number."""
    return paired[paired.z < -scipy.stats.norm.ppf(1 - 0.025 / max(1, len(paired)))]


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


# ---- claims

_CLOSE = (
    "ablations that ignore the prompt rank components much alike, so a lead is small beside its "
    "interval, and constants that do not carry over to test prompts make OA's lead smaller"
)
# what may be behind a claim that does not hold or is undecided, by the beginning of its id
WHYS: dict[str, str] = {
    "quickstart.proposition1": "a constant trained for few steps may be far from the best one, and "
    "one trained on few prompts may not carry over (notebook 00 prints its gap on both parts)",
    "single.rank": _CLOSE,
    "single.loglog": "the logarithm gives components that do next to nothing as much weight as the "
    "others",
    "single.loglog.lead.live": _CLOSE,
    "single.median_ratio": "constants trained for few steps bound Δ_opt from above, and those "
    "trained on few prompts overfit: then the ratio is lower on train prompts (notebook 01 prints "
    "both)",
    "single.mean_gap": "the mean is made by a few components with large gaps, whose constants may "
    "be far from the best ones",
    "single.proposition1": "constants trained on few prompts may fit these and not carry over to "
    "others",
    "single.closed_form": "where a component changes much, KL is not quadratic in what is put in "
    "its place",
}


def claims(gaps: pd.DataFrame, n: int = 1000) -> list[Claim]:
    """The paper's claims about single components, on a table of `component_gaps(…, each=True)` of
    the test part; those on CF only where there is one."""
    table = wide(gaps)
    listed = over_components(table, "", "all components", n)
    some = table.loc[live(gaps)]
    if len(some) >= FEWEST:
        listed += over_components(some, ".live", f"components with Δ_CF above {LIVE:g} nats", n)
    return [*listed, mean_gap(gaps), proposition_1(gaps)]


def over_components(table: pd.DataFrame, suffix: str, which: str, n: int) -> list[Claim]:
    """Claims on correlations and medians, with intervals by a bootstrap over components."""
    listed = []
    if "counterfactual" in table:
        listed = [_lead_claim(table, name, suffix, which, n) for name in ("rank", "loglog")]
    ratios = compare(table, n, only=["median_ratio"]).set_index("ablation")
    for ablation in [ablation for ablation in TOTAL if ablation in table]:
        row = ratios.loc[ablation]
        listed.append(
            Claim(
                f"single.median_ratio.{ablation}{suffix}",
                f"Δ_opt is only a part, under half, of Δ_{ablation} for the median component "
                f"({which})",
                row.paper,
                row.value,
                row.low,
                row.high,
                rule="< 0.5",
                seeds=1,
                source="single_components",
            )
        )
    return listed


def _lead_claim(table: pd.DataFrame, name: str, suffix: str, which: str, n: int) -> Claim:
    """OA's lead in agreement with CF over the next total ablation."""
    difference = lead(table, name)
    low, high = stats.bootstrap(difference, table.to_numpy(), n=n)
    word = {"rank": "rank", "loglog": "log-log"}[name]
    return Claim(
        f"single.{name}.lead{suffix}",
        f"of all total ablations, OA has the highest {word} correlation with CF: its lead over the "
        f"next is above 0 ({which})",
        PAPER[name]["optimal"] - max(PAPER[name][ablation] for ablation in TOTAL),
        difference(table.to_numpy()),
        low,
        high,
        rule="> 0",
        seeds=1,
        source="single_components",
    )


def mean_gap(gaps: pd.DataFrame) -> Claim:
    """Paired over prompts: OA's mean gap less that of the next best total ablation."""
    means = {}  # [prompt], over components
    for ablation in ("optimal", *TOTAL):
        each = [value for (_, way), value in by_prompt(gaps).items() if way == ablation]
        if each:
            means[ablation] = np.mean(each, axis=0)
    best = min((way for way in means if way != "optimal"), key=lambda way: means[way].mean())
    middle, low, high = stats.mean_interval(means["optimal"] - means[best])
    return Claim(
        "single.mean_gap.optimal",
        "of all total ablations, OA has the least mean Δ over components: less that of the next "
        "best it is below 0 (paired over prompts)",
        PAPER["mean_gap"]["optimal"] - min(PAPER["mean_gap"][way] for way in TOTAL),
        middle,
        low,
        high,
        rule="< 0",
        seeds=1,
        source="single_components",
        note=f"the next best is {best}",
    )


def proposition_1(gaps: pd.DataFrame) -> Claim:
    """A count of surely worse pairs: constants that do not carry over to held-out prompts show."""
    paired = against_optimal(gaps)
    failed = worse(paired)
    note = f"of {len(paired)} pairs"
    if len(failed):
        note += f", by {-failed.difference.min():.1g} nats at most"
    return Claim(
        "single.proposition1",
        "Proposition 1: Δ_opt ≤ Δ of every total ablation; pairs of component and ablation in "
        "which OA is worse beyond a 95 % interval on held-out prompts (paired over prompts, "
        "corrected for the number of pairs)",
        0,
        len(failed),
        rule="<= 0",
        exact=True,
        seeds=1,
        source="single_components",
        note=note,
    )


def closed_form(gaps: pd.DataFrame, closed: pd.DataFrame, n: int = 500) -> Claim:
    """Ours: what training gains over the better of mean and closed form, on the table of the same
    components with no step of training."""
    trained = wide(gaps).optimal
    untrained = wide(closed).optimal.loc[trained.index]
    low, high = stats.bootstrap(stats.median_ratio, untrained, trained, n=n)
    return Claim(
        "single.closed_form",
        "the better of the mean and the constant in closed form, without a step of training, is "
        "almost as good as a trained one (Δ over Δ_opt for the median component below 1.1)",
        None,
        stats.median_ratio(untrained, trained),
        low,
        high,
        rule="< 1.1",
        seeds=1,
        source="single_components",
        note="not in the paper",
    )


# ---- in words


def beside_label(kl: pd.DataFrame, label: pd.DataFrame) -> pd.DataFrame:
    """KL and label gap of every component under mean ablation (appendix C.4), and whether the label
    surely gains: by more than two standard errors."""
    kl = kl[(kl.ablation == "mean") & (kl.family == "position")].set_index("component").gap
    label = label[label.ablation == "mean"].set_index("component")
    table = pd.DataFrame({"KL": kl, "label": label.gap, "se": label.se}).dropna(subset="label")
    return table.assign(**{"helps, surely": table.label + 2 * table.se < 0})


def published_label(model_name: str, task_name: str) -> pd.DataFrame:
    """The same of another model on a task of this name, as far as it is published."""
    try:
        rows = store.results(model_name, "single_components")
    except FileNotFoundError:
        columns = ["task", "part", "metric", "ablation", "family"]
        rows = pd.DataFrame({column: [] for column in columns})
    rows = rows[(rows.task == task_name) & (rows.part == "test") & (rows.ablation == "mean")]
    rows = rows.reindex(columns=[*rows.columns.union(["component", "gap", "se"])])
    rows = rows.drop_duplicates(["component", "metric", "family"], keep="last")
    return beside_label(rows[rows.metric == "kl"], rows[rows.metric == "label"])


def finding(gaps: pd.DataFrame, model_name: str, task_name: str) -> str:
    """What was found, in one sentence."""
    table = wide(gaps)
    some = table.loc[live(gaps)]
    kind = "live components"
    if some.empty:
        some = table
        kind = "components, none of them live,"
    left = stats.median_ratio(some.optimal, some["mean"])
    words = (
        f"{model_name} on {task_name}: for the median of {len(some)} {kind} OA leaves {left:.0%} "
        "of the gap of mean ablation"
    )
    if "counterfactual" not in table:
        return f"{words}; the rest is what the mean puts in."
    rank = {way: stats.spearman(table[way], table.counterfactual) for way in (*TOTAL, "optimal")}
    best = max(TOTAL, key=rank.get)
    return (
        f"{words}, and its rank correlation with CF over all components is {rank['optimal']:.2f} "
        f"({plots.LABELS[best]}, the best of the others: {rank[best]:.2f})."
    )
