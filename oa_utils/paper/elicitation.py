"""The elicitation chapter, notebook 08: what §5 and appendix H.4 say, on a table of `elicit`."""

from collections.abc import Sequence
from itertools import product

import numpy as np
import pandas as pd
import scipy.stats

from oa_utils import stats, store
from oa_utils.elicitation import DEMONSTRATIONS
from oa_utils.paper.claims import Claim

CATEGORIES = ("dbpedia", "entities", "things")  # sets that ask what kind of thing something is
FEWEST = 5  # sets that an interval over sets needs
MARGIN = 0.1  # of accuracy: what counts as nothing in a control
NO_ROOM = "the model is always right: no room for a boost"
SAME = "the chosen layer scores a label alike in every context, which is exactly chance"
WHYS: dict[str, str] = {  # beginning of a claim's id: what may be behind its not holding
    "elicitation.wins": "sets may be too few to decide, and one on which the model or both lenses "
    "are always right cannot be won",
    "elicitation.boost": "a model that is always right, or hardly misled, leaves no room for a "
    "boost",
    "elicitation.lead": "a tuned lens that starts well may read a class as early as OCA does, and "
    "where the model is always right nothing can differ",
    "elicitation.categories": "the label of a thing may be linear in its embedding, which favours "
    "a linear map, and where the model is always right nothing can differ",
    "elicitation.false_more": "a model that false demonstrations hardly mislead has no more to "
    "gain from an early layer than with true ones",
    "elicitation.control": "the interval may be wider than the margin, or a layer follow the "
    "demonstrations before the model does",
}


def by_set(
    table: pd.DataFrame, demonstrations: str, column: str = "boost", control: bool = False
) -> pd.DataFrame:
    """A row for each set, a column for each lens, after all demonstrations; the controls alone, or
    all sets but them."""
    after_all = table[table.demos == table.demos.max()]
    kept = after_all[(after_all.demonstrations == demonstrations) & (after_all.control == control)]
    return kept.pivot(index="set", columns="kind", values=column)


def anchors() -> pd.DataFrame:
    """The paper's boosts (GPT-2-XL, 15 sets) in the form of `elicit`'s table."""
    paper = pd.read_csv(store.data_folder() / "anchors" / "elicitation.csv")
    tables = [
        pd.DataFrame(
            {
                "set": paper.dataset,
                "kind": kind,
                "demonstrations": demos,
                "demos": 10,
                "control": False,
                "maximum": paper[f"{demos}_{kind}_peak"] - paper[f"{demos}_baseline"],
            }
        )
        for demos, kind in product(DEMONSTRATIONS, ("oca", "tuned"))
    ]
    return pd.concat(tables, ignore_index=True)


def wins(boosts: pd.DataFrame) -> tuple[int, int, float]:
    """Sets on which the OCA lens has the larger boost, sets on which the two differ, and the sign
    test's p."""
    lead = (boosts.oca - boosts.tuned).round(9)
    won = int((lead > 0).sum())
    differ = int((lead != 0).sum())
    return won, differ, float(scipy.stats.binomtest(won, differ).pvalue) if differ else 1.0


def interval(mean: float, *errors: pd.Series) -> tuple[float, float]:
    """95 % around a mean over sets as they are, from each set's standard errors over contexts (of
    several terms: independent ones)."""
    total = sum(float(error.pow(2).sum()) for error in errors)
    half = 1.96 * np.sqrt(total) / len(errors[0])
    return mean - half, mean + half


def over_sets(
    values: pd.Series, errors: Sequence[pd.Series], n: int
) -> tuple[tuple[float | None, float | None], str]:
    """95 % around a mean over sets: as drawn from more sets where there are enough, else of these
    sets; with a word on which of the two."""
    if len(values) >= FEWEST:
        return stats.bootstrap(np.mean, values.to_numpy(), n=n), "bootstrap over sets"
    return interval(values.mean(), *errors), "few sets: over contexts of these sets"


def elicitation_claims(table: pd.DataFrame, n: int = 1000) -> list[Claim]:
    """The paper's claims; wins are of its own boost, means of the boost whose layer was chosen on
    other contexts. n resamples of an interval."""
    paper = anchors()
    more = by_set(table, "false").oca - by_set(table, "true").oca
    errors = [by_set(table, demos, "boost_se").oca for demos in DEMONSTRATIONS]
    between, how = over_sets(more, errors, n)
    paper_more = by_set(paper, "false", "maximum").oca - by_set(paper, "true", "maximum").oca
    return [
        *(claim for demos in DEMONSTRATIONS for claim in _boost_claims(table, paper, demos, n)),
        Claim(
            "elicitation.false_more",
            "the boost is larger with false than with true demonstrations (mean difference above "
            "0)",
            paper_more.mean(),
            more.mean(),
            *between,
            rule="> 0",
            seeds=1,
            source="elicitation",
            note=how,
        ),
        *_control_claims(table),
    ]


def _boost_claims(table: pd.DataFrame, paper: pd.DataFrame, demos: str, n: int) -> list[Claim]:
    """Whose boost is larger with one kind of demonstrations, and by how much. Where the model is
    always right there is no room for a boost, and nothing is decided."""
    paper_boosts = by_set(paper, demos, "maximum")
    most = by_set(table, demos, "maximum")
    fair = by_set(table, demos)
    error = by_set(table, demos, "boost_se")
    model_accuracy = (by_set(table, demos, "fair") - fair).oca
    room = model_accuracy.min() < 1 - 1e-9

    def claim(
        id: str,
        text: str,
        paper_value: float,
        value: float,
        between: tuple[float | None, float | None],
        rule: str,
        note: str,
    ) -> Claim:
        low, high = between if room else (None, None)
        return Claim(
            f"elicitation.{id}.{demos}",
            f"{demos} demonstrations: {text}",
            paper_value,
            value,
            low,
            high,
            rule=rule,
            seeds=1,
            source="elicitation",
            note=note if room else f"{note}; {NO_ROOM}",
        )

    won, differ, p = wins(most)
    fair_won, fair_differ, fair_p = wins(fair)
    share = won / differ if differ else 0.5
    exact = scipy.stats.binomtest(won, differ).proportion_ci() if differ else (None, None)
    lead = fair.oca - fair.tuned
    boost_between, how = over_sets(fair.oca, [error.oca], n)
    lead_between, _ = over_sets(lead, [error.oca, error.tuned], n)
    claims = [
        claim(
            "wins",
            "the OCA lens has a larger boost than the tuned lens on most sets that differ (share "
            "above 0.5, exact interval over sets)",
            wins(paper_boosts)[0] / wins(paper_boosts)[1],
            share,
            tuple(exact),
            "> 0.5",
            f"{won} of {differ} that differ, sign test p = {p:.2g}; layer chosen on the other "
            f"half: {fair_won} of {fair_differ}, p = {fair_p:.2g}",
        ),
        claim(
            "boost",
            "some layer of the OCA lens is more accurate than the model (mean boost above 0)",
            paper_boosts.oca.mean(),
            fair.oca.mean(),
            boost_between,
            "> 0",
            f"{how}; with the paper's maximum {most.oca.mean():.3f}",
        ),
        claim(
            "lead",
            "the OCA lens's mean boost exceeds the tuned lens's (difference above 0)",
            (paper_boosts.oca - paper_boosts.tuned).mean(),
            lead.mean(),
            lead_between,
            "> 0",
            how,
        ),
    ]
    for name in [name for name in CATEGORIES if name in fair.index][:1]:
        dbpedia = paper_boosts.loc["dbpedia"]
        row = fair.loc[name]
        ahead = row.oca - row.tuned
        claims.append(
            claim(
                "categories",
                f"the OCA lens's boost exceeds the tuned lens's on DBPedia (here: {name}; "
                "difference above 0)",
                dbpedia.oca - dbpedia.tuned,
                ahead,
                interval(ahead, error.oca.loc[[name]], error.tuned.loc[[name]]),
                "> 0",
                f"OCA {row.oca:.3f}, tuned {row.tuned:.3f}",
            )
        )
    return claims


def controls(table: pd.DataFrame) -> pd.DataFrame:
    """Of each lens on the controls: its accuracy at the layer chosen on the other half, and by how
    much this exceeds the model or, where the model is below chance, chance (a model below chance is
    beaten by chance, which is no knowledge); `constant` where it cannot tell contexts apart."""
    rows = table[table.control & (table.demos == table.demos.max())].copy()
    rows["chance"] = 1 / rows.classes
    rows["model"] = rows.fair - rows.boost
    knows = rows.model >= rows.chance
    rows["against"] = np.where(knows, "the model", "chance")
    rows["excess"] = rows.boost.where(knows, rows.fair - rows.chance)
    rows["se"] = rows.boost_se.where(knows, rows.fair_se)
    rows["constant"] = (rows.fair_se == 0) & np.isclose(rows.fair, rows.chance)
    return rows


def _control_claims(table: pd.DataFrame) -> list[Claim]:
    """A test of equivalence: nothing must be shown to be nothing, not only not shown."""
    return [
        Claim(
            f"elicitation.control.{row.kind}.{row.demonstrations}",
            f"labels that mean nothing, {row.demonstrations} demonstrations: the {row.kind} lens's "
            f"accuracy is within {MARGIN} of that of the model or of chance, whichever is more",
            None,
            row.excess,
            *interval(row.excess, pd.Series([row.se])),
            rule=f"in [-{MARGIN}, {MARGIN}]",
            seeds=1,
            source="elicitation",
            note=f"against {row.against}" + (f"; {SAME}" if row.constant else ""),
        )
        for row in controls(table).itertuples()
    ]
