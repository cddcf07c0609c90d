"""The elicitation chapter, notebook 08: what §5 and appendix H.4 say, on a table of `elicit`."""

from itertools import product

import numpy as np
import pandas as pd

from oa_utils import stats, store
from oa_utils.elicitation import DEMONSTRATIONS
from oa_utils.paper.claims import Claim

CATEGORIES = ("dbpedia", "entities", "things")  # sets that ask what kind of thing something is
FEWEST = 5  # sets that an interval over sets needs


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
    return won, differ, stats.sign_test(won, differ) if differ else 1.0


def interval(mean: float, errors: pd.Series) -> tuple[float, float]:
    """95 % around a mean over sets, each set with its own standard error over contexts."""
    half = 1.96 * float(np.sqrt(errors.pow(2).sum())) / len(errors)
    return mean - half, mean + half


def elicitation_claims(table: pd.DataFrame, n: int = 1000) -> list[Claim]:
    """The paper's claims; wins are of its own boost, means of the boost whose layer was chosen on
    other contexts. n resamples of an interval."""
    paper = anchors()
    more = (by_set(table, "false").oca - by_set(table, "true").oca).mean()
    paper_more = by_set(paper, "false", "maximum").oca - by_set(paper, "true", "maximum").oca
    return [
        *(claim for demos in DEMONSTRATIONS for claim in _boost_claims(table, paper, demos, n)),
        Claim(
            "elicitation.false_more",
            "the boost is larger with false than with true demonstrations; mean difference",
            paper_more.mean(),
            more,
            holds=more > 0,
            source="elicitation",
        ),
        *(_control_claim(table, demos) for demos in DEMONSTRATIONS if table.control.any()),
    ]


def _boost_claims(table: pd.DataFrame, paper: pd.DataFrame, demos: str, n: int) -> list[Claim]:
    """Whose boost is larger with one kind of demonstrations, and by how much."""
    paper_boosts = by_set(paper, demos, "maximum")
    most = by_set(table, demos, "maximum")
    fair = by_set(table, demos)
    model_accuracy = (by_set(table, demos, "fair") - fair).oca
    room = model_accuracy.min() < 1 - 1e-9

    def claim(
        id: str,
        text: str,
        paper_value: float,
        value: float,
        holds: bool,
        note: str,
        between: tuple[float, float] | tuple[None, None] = (None, None),
    ) -> Claim:
        if not room:
            note += "; the model is always right: no room for a boost"
        low, high = between
        return Claim(
            f"elicitation.{id}.{demos}",
            f"{demos} demonstrations: {text}",
            paper_value,
            value,
            low,
            high,
            holds if room else None,
            source="elicitation",
            note=note,
        )

    won, differ, p = wins(most)
    fair_won, fair_differ, fair_p = wins(fair)
    text = "the OCA lens has a larger boost than the tuned lens on most sets (share)"
    paper_share = wins(paper_boosts)[0] / len(paper_boosts)
    note = (
        f"{won} of {differ} that differ, p = {p:.2g}; layer chosen on the other half: "
        f"{fair_won} of {fair_differ}, p = {fair_p:.2g}"
    )
    won_most = won > len(most) / 2
    claims = [claim("wins", text, paper_share, won / len(most), won_most, note)]

    text = "some layer of the OCA lens is more accurate than the model; mean boost"
    boost = fair.oca.mean()
    note = f"with the paper's maximum {most.oca.mean():.3f}"
    between = interval(boost, by_set(table, demos, "boost_se").oca)
    claims.append(
        claim("boost", text, paper_boosts.oca.mean(), boost, bool(boost > 0), note, between)
    )

    text = "by how much the OCA lens's mean boost exceeds the tuned lens's"
    lead = (fair.oca - fair.tuned).to_numpy()
    paper_lead = (paper_boosts.oca - paper_boosts.tuned).mean()
    enough = len(fair) >= FEWEST
    note = "" if enough else "too few sets for an interval"
    between = stats.bootstrap(np.mean, lead, n=n) if enough else (None, None)
    claims.append(
        claim("lead", text, paper_lead, lead.mean(), bool(lead.mean() > 0), note, between)
    )

    for name in [name for name in CATEGORIES if name in fair.index][:1]:
        text = f"the OCA lens raises the boost over the tuned lens's on DBPedia (here: {name})"
        dbpedia = paper_boosts.loc["dbpedia"]
        row = fair.loc[name]
        lead = row.oca - row.tuned
        note = f"OCA {row.oca:.3f}, tuned {row.tuned:.3f}"
        paper_lead = dbpedia.oca - dbpedia.tuned
        claims.append(claim("categories", text, paper_lead, lead, bool(lead > 0), note))
    return claims


def _control_claim(table: pd.DataFrame, demos: str) -> Claim:
    """A model below chance is beaten by chance, which is no knowledge: then chance is what a lens
    must exceed."""
    rows = table[table.control & (table.kind == "oca") & (table.demonstrations == demos)]
    row = rows.nlargest(1, "demos").iloc[0]
    chance = 1 / row.classes
    above_chance = row.fair - row.boost >= chance
    value = row.boost if above_chance else row.fair - chance
    error = row.boost_se if above_chance else row.fair_se
    low, high = interval(value, pd.Series([error]))
    return Claim(
        f"elicitation.control.{demos}",
        f"labels that mean nothing, {demos} demonstrations: no layer is above both the model and "
        "chance",
        None,
        value,
        low,
        high,
        low <= 0,
        source="elicitation",
        note=f"against {'the model' if above_chance else 'chance'}",
    )
