"""The statistics of section 2 on the authors' own numbers, claims that can fail, and what is
published."""

import numpy as np
import pandas as pd
import pytest

from oa_utils import store, tasks
from oa_utils.components import component_gaps
from oa_utils.paper import claims
from oa_utils.paper import components as study

ANCHORS = pd.read_csv(
    store.data_folder() / "anchors" / "single_component_ioi.csv", index_col="component"
)


def anchors() -> pd.DataFrame:
    """The authors' gaps; their log has the position-agnostic OA and no CF mean, so the mean stands
    in for it."""
    names = {"cf": "counterfactual", "oa_position_agnostic": "optimal"}
    table = ANCHORS.rename(columns=names).assign(cf_mean=ANCHORS["mean"])
    return table[list(study.WAYS)]


def value(table: pd.DataFrame, statistic: str, ablation: str) -> float:
    return table[(table.statistic == statistic) & (table.ablation == ablation)].value.item()


# ---- statistics


def test_the_authors_numbers_give_the_papers_table():
    table = study.compare(anchors(), n=10)
    for ablation in ("zero", "mean", "resample"):
        rank = value(table, "rank", ablation)
        assert rank == pytest.approx(study.PAPER["rank"][ablation], abs=2e-3)
        loglog = value(table, "loglog_trimmed", ablation)
        assert loglog == pytest.approx(study.PAPER["loglog"][ablation], abs=2e-3)
        mean = value(table, "mean_gap", ablation)
        assert mean == pytest.approx(study.PAPER["mean_gap"][ablation], rel=0.02)
    position_agnostic = value(table, "rank", "optimal")
    assert position_agnostic == pytest.approx(0.837, abs=2e-3)


def test_an_ablation_equal_to_cf_agrees_fully():
    gaps = anchors().assign(optimal=lambda table: table.counterfactual / 2)
    table = study.compare(gaps, n=10)
    assert value(table, "rank", "optimal") == pytest.approx(1)
    assert value(table, "loglog", "optimal") == pytest.approx(1)
    assert value(table, "median_ratio", "counterfactual") == pytest.approx(0.5)


def test_intervals_hold_their_values():
    table = study.compare(anchors(), n=40)
    assert (table.low <= table.value).all()
    assert (table.value <= table.high).all()
    assert list(table) == ["statistic", "ablation", "value", "low", "high", "paper"]


def test_wide_keeps_one_family():
    rows = [
        ("a0.h0", "zero", "", 1.0),
        ("a0.h0", "optimal", "position", 2.0),
        ("a0.h0", "optimal", "shared", 3.0),
    ]
    gaps = pd.DataFrame(rows, columns=["component", "ablation", "family", "gap"])
    assert study.wide(gaps, "shared").loc["a0.h0", "optimal"] == 3.0
    assert list(study.wide(gaps)) == ["zero", "optimal"]


# ---- claims


def test_claims_hold_and_fail_as_the_numbers_say():
    def far_below(table):
        others = table[list(study.TOTAL)].min(axis=1)
        return 0.1 * np.minimum(table.counterfactual, others)

    good = anchors().assign(optimal=far_below)
    listed = [c for c in study.claims(good, good, n=20) if not c.id.endswith("lead")]
    assert len(listed) == 4 + 2
    assert all(claim.holds for claim in listed)

    def shuffled(table):
        return table["zero"].sample(frac=1, random_state=0).to_numpy() * 2

    bad = anchors().assign(optimal=shuffled)
    holds = {claim.id: claim.holds for claim in study.claims(bad, bad, n=20)}
    for name in ("rank.lead", "loglog.lead", "mean_gap.optimal", "proposition1"):
        assert not holds[f"single.{name}"]


def test_without_counterfactuals_there_are_no_claims_on_them():
    """Any task: what needs CF is left out, the rest is there."""
    plain = anchors().drop(columns=["counterfactual", "cf_mean"])
    ids = [claim.id for claim in study.claims(plain, plain, n=10)]
    assert ids == [
        "single.median_ratio.zero",
        "single.median_ratio.mean",
        "single.median_ratio.resample",
        "single.mean_gap.optimal",
        "single.proposition1",
    ]
    statistics = set(study.compare(plain, n=10).statistic)
    assert statistics == {"mean_gap", "median_gap", "median_ratio", "clamped_mean_ratio"}


# ---- what is published


def published(model_name: str, part: str, task: str = "ioi") -> pd.DataFrame:
    """Published gaps of every component, one row for each ablation and family."""
    rows = store.results(model_name, "single_components")
    rows = rows[(rows.task == task) & (rows.part == part) & (rows.metric == "kl")]
    by_size = rows.components.map(len).argsort(kind="stable")
    # where a component was run twice: with its layer
    return rows.iloc[by_size].drop_duplicates(["component", "ablation", "family"], keep="last")


def test_published_rows_are_the_table_that_was_measured(gpt2, monkeypatch):
    monkeypatch.setattr(store, "published", lambda: store.folder())
    task = tasks.ioi(gpt2, 12)
    names = ["a1.h0", "a1.h1", "m1", "m2"]
    quick = {"steps": 2, "look_every": 1, "draws": 1}
    families = ["position", "shared"]
    for part in ("train", "test"):
        table = component_gaps(gpt2, task, names, study.WAYS, families, part=part, **quick)
        component_gaps(gpt2, task, names[:1], ["mean"], part=part, **quick, lr=0.2)
        for family in families:
            again = study.wide(published(gpt2.name, part), family)
            want = study.wide(table, family)
            pd.testing.assert_frame_equal(again.loc[names], want, check_index_type=False)


PUBLISHED = sorted(
    path.parts[-3] for path in store.published().glob("*/claims/single_components.json")
)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_claims_follow_from_the_published_results(name):
    parts = [study.wide(published(name, part)) for part in ("test", "train")]
    again = {claim.id: claim for claim in study.claims(*parts, n=10)}
    stored = {c.id: c for c in claims.published(name) if c.id.startswith("single.")}
    assert set(again) == set(stored)
    for id, claim in stored.items():
        assert claim.measured == pytest.approx(again[id].measured, rel=1e-6), id
        assert claim.holds == again[id].holds, id


def test_proposition_1_holds_on_the_bundled_model():
    train = study.wide(published("tiny", "train"))
    assert len(train) == 30
    assert (train.optimal <= train[list(study.TOTAL)].min(axis=1) + 1e-6).all()
