"""The elicitation chapter: the paper's own counts, and claims that follow from a table by hand."""

from itertools import product

import pandas as pd
import pytest

from oa_utils.elicitation import DEMONSTRATIONS, KINDS
from oa_utils.paper import elicitation as study
from oa_utils.paper.claims import reason


def table_of(**boosts):
    """A table of `elicit` in which the sets have these boosts (of each lens) by either measure."""
    rows = []
    for (name, values), demos in product(boosts.items(), DEMONSTRATIONS):
        for kind, value in zip(KINDS, values, strict=True):
            rows.append(
                {
                    "set": name,
                    "demonstrations": demos,
                    "demos": 10,
                    "control": name == "ab",
                    "classes": 2,
                    "kind": kind,
                    "maximum": value,
                    "boost": value,
                    "boost_se": 0.01,
                    "fair": 0.5 + value,
                    "fair_se": 0.01,
                }
            )
    return pd.DataFrame(rows)


def claims_of(table):
    claims = study.elicitation_claims(table)
    return {claim.id.removeprefix("elicitation."): claim for claim in claims}


def test_the_papers_numbers_give_the_papers_counts():
    paper = study.anchors()
    counts = [study.wins(study.by_set(paper, demos, "maximum"))[:2] for demos in DEMONSTRATIONS]
    assert counts == [(12, 15), (11, 15)]
    dbpedia = study.by_set(paper, "true", "maximum").loc["dbpedia"]
    assert dbpedia.round(3).to_dict() == {"oca": 0.18, "tuned": 0.029}


def test_claims_say_what_the_table_says():
    claims = claims_of(table_of(a=(0.3, 0.1, 0), b=(0.1, 0.2, 0), c=(0.2, 0.2, 0), ab=(0, 0.1, 0)))
    wins = claims["wins.true"]
    assert wins.measured == pytest.approx(1 / 2) and wins.holds is None  # two sets decide nothing
    assert wins.paper_value == 0.8 and "1 of 2" in wins.note
    boost = claims["boost.false"]
    assert boost.measured == pytest.approx(0.2) and boost.holds and boost.low < 0.2 < boost.high
    assert claims["control.oca.true"].holds and claims["control.logit.false"].holds
    assert claims["control.tuned.true"].holds is None  # as large as the margin
    assert claims["false_more"].holds is None
    assert "categories.true" not in claims
    assert all(reason(f"elicitation.{id}", study.WHYS) for id in claims)
    lead = claims["lead.true"]
    assert lead.measured == pytest.approx(0.1 / 3) and lead.holds and "few sets" in lead.note
    assert lead.high - lead.measured == pytest.approx(1.96 * 0.01 * (6**0.5) / 3)


def test_five_sets_give_an_interval_and_things_stand_for_dbpedia():
    boosts = {name: (0.3, 0.1, 0) for name in ("a", "b", "c", "d", "things")}
    claims = claims_of(table_of(**boosts))
    lead = claims["lead.false"]
    assert lead.holds and lead.low == pytest.approx(0.2) and "over sets" in lead.note
    assert claims["wins.false"].holds is None and claims["wins.false"].measured == 1
    assert claims["categories.true"].measured == pytest.approx(0.2)
    assert all(reason(f"elicitation.{id}", study.WHYS) for id in claims)
    assert not any("control" in id for id in claims)
    many = {f"set{i}": (0.3, 0.1, 0) for i in range(6)}
    assert claims_of(table_of(**many))["wins.true"].holds
    assert claims_of(table_of(**{name: (0.1, 0.3, 0) for name in many}))["lead.true"].holds is False


def test_a_model_that_is_always_right_leaves_nothing_to_decide():
    claims = claims_of(table_of(a=(0, 0, 0)).assign(fair=1.0))
    assert {claim.holds for id, claim in claims.items() if id != "false_more"} == {None}
    assert "no room for a boost" in claims["boost.true"].note


def test_a_control_is_held_against_the_model_or_against_chance():
    boosts = {"a": (0.3, 0.1, 0), "ab": (0.25, 0.1, 0)}
    below = claims_of(table_of(**boosts).assign(fair=0.5))  # a model below chance, a lens at it
    assert below["control.oca.true"].holds
    assert below["control.oca.true"].note == "against chance"
    worse = claims_of(table_of(**boosts))
    assert worse["control.oca.true"].holds is False and worse["control.oca.false"].holds is False
    assert worse["control.oca.true"].note == "against the model"
