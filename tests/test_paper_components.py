"""The statistics of section 2 on the authors' own numbers, claims that can fail, and what is
published."""

import numpy as np
import pandas as pd
import pytest
import torch

from oa_utils import stats, store, tasks
from oa_utils.components import component_gaps
from oa_utils.paper import claims
from oa_utils.paper import components as study

pytestmark = pytest.mark.filterwarnings("ignore:prompts of different lengths")

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


def long(table: pd.DataFrame, n: int = 40) -> pd.DataFrame:
    """A table as `component_gaps` gives it, with a value for each of n prompts: some prompts
    are harder than others, for every component and ablation alike."""
    rng = np.random.default_rng(0)
    hard = rng.uniform(0.5, 1.5, n)
    rows = []
    for (component, ablation), gap in table.stack().items():
        each = gap * hard / hard.mean() + 0.05 * abs(gap) * rng.normal(size=n)
        each = torch.tensor(each - each.mean() + gap)
        family = "position" if ablation in ("mean", "cf_mean", "optimal") else ""
        se = stats.mean_se(each)[1]
        rows.append((component, ablation, family, gap, se, each))
    columns = ["component", "ablation", "family", "gap", "se", "each"]
    return pd.DataFrame(rows, columns=columns)


def test_claims_hold_and_fail_as_the_numbers_say():
    def far_below(table):
        others = table[list(study.TOTAL)].min(axis=1)
        return 0.1 * np.minimum(table.counterfactual, others)

    good = study.claims(long(anchors().assign(optimal=far_below)), n=20)
    listed = [claim for claim in good if ".lead" not in claim.id]
    assert len(listed) == 2 * 4 + 2
    assert all(claim.holds is True for claim in listed)

    def shuffled(table):
        return table["zero"].sample(frac=1, random_state=0).to_numpy() * 2

    bad = long(anchors().assign(optimal=shuffled))
    holds = {claim.id: claim.holds for claim in study.claims(bad, n=20)}
    for name in ("rank.lead", "loglog.lead", "mean_gap.optimal", "proposition1"):
        assert holds[f"single.{name}"] is False


def test_what_the_interval_does_not_decide_is_undecided():
    """OA as good as CF's own mean, up to noise: neither better nor worse."""
    rng = np.random.default_rng(1)
    even = anchors().assign(optimal=lambda t: t.cf_mean * (1 + 0.001 * rng.normal(size=len(t))))
    holds = {claim.id: claim.holds for claim in study.claims(long(even), n=40)}
    assert holds["single.rank.lead"] is None


def test_live_components_are_those_that_cf_surely_moves():
    table = long(anchors())
    names = study.live(table)
    gaps = anchors().counterfactual
    assert 10 < len(names) < len(gaps)
    assert gaps[names].min() > study.LIVE
    sure = table[(table.ablation == "counterfactual") & (table.gap > 2 * study.LIVE)]
    assert set(sure.component) <= set(names)


def test_pairs_are_judged_over_prompts_with_their_number_in_mind():
    rows = []
    rng = np.random.default_rng(0)
    for i in range(200):  # no difference: with 2 standard errors ten of these would be worse
        hard = rng.uniform(0, 1, 30)
        for ablation, family in (("zero", ""), ("optimal", "position")):
            rows.append((f"a{i}.h0", ablation, family, torch.tensor(hard + rng.normal(0, 0.1, 30))))
    table = pd.DataFrame(rows, columns=["component", "ablation", "family", "each"])
    paired = study.against_optimal(table)
    assert (paired.z < -2).sum() > 1
    assert len(study.worse(paired)) == 0
    assert paired.se.mean() == pytest.approx(np.sqrt(2) * 0.1 / np.sqrt(30), rel=0.1), "paired"
    table.at[1, "each"] = table.each[1] + 1
    assert study.worse(study.against_optimal(table)).component.tolist() == ["a0.h0"]


def test_the_closed_form_is_set_against_training():
    table = long(anchors())
    near = study.closed_form(table, long(anchors() * 1.05), n=20)
    far = study.closed_form(table, long(anchors() * 1.5), n=20)
    assert near.measured == pytest.approx(1.05)
    assert far.measured == pytest.approx(1.5)
    assert (near.holds, far.holds) == (True, False)


def test_without_counterfactuals_there_are_no_claims_on_them():
    """Any task: what needs CF is left out, the rest is there."""
    plain = anchors().drop(columns=["counterfactual", "cf_mean"])
    ids = [claim.id for claim in study.claims(long(plain), n=10)]
    ratios = [f"single.median_ratio.{way}" for way in ("zero", "mean", "resample")]
    live = [f"{id}.live" for id in ratios]
    assert ids == [*ratios, *live, "single.mean_gap.optimal", "single.proposition1"]
    statistics = set(study.compare(plain, n=10).statistic)
    assert statistics == {"mean_gap", "median_gap", "median_ratio", "clamped_mean_ratio"}


def test_every_claim_has_a_reason_why_it_may_fail():
    gaps = long(anchors())
    listed = [*study.claims(gaps, n=10), study.closed_form(gaps, gaps, n=10)]
    ids = [claim.id for claim in listed]
    assert any(id.endswith(".live") for id in ids)
    ids.append("quickstart.proposition1")
    for id in ids:
        assert claims.reason(id, study.WHYS), id
    for prefix, why in study.WHYS.items():
        assert any(id.startswith(prefix) for id in ids), prefix
        assert why[0].islower()
        assert not why.endswith(".")


def test_statements_hold_no_results():
    """A README's row has one statement for all models."""
    gaps = long(anchors())
    few = long(anchors()[:100].assign(zero=lambda table: table["zero"] / 100))
    both = [{claim.id: claim for claim in study.claims(table, n=10)} for table in (gaps, few)]
    for id in ("single.mean_gap.optimal", "single.proposition1"):
        one, other = (listed[id] for listed in both)
        assert one.paper == other.paper
        assert one.note != other.note


def test_the_finding_says_where_no_component_is_live():
    gaps = long(anchors())
    assert f"{len(study.live(gaps))} live components" in study.finding(gaps, "m", "t")
    dead = long(anchors() * 1e-6)
    assert "156 components, none of them live," in study.finding(dead, "m", "t")


def test_the_finding_names_the_best_of_the_others_as_figures_do():
    gaps = long(anchors().assign(cf_mean=lambda table: 2 * table.counterfactual))
    assert "(CF mean, the best of the others: 1.00)" in study.finding(gaps, "m", "t")


# ---- what is published


def published(model_name: str, part: str, task: str = "ioi", trained: bool = True) -> pd.DataFrame:
    """Published gaps of every component, one row for each ablation and family; constants with steps
    of training or without."""
    rows = store.results(model_name, "single_components")
    rows = rows[(rows.task == task) & (rows.part == part) & (rows.metric == "kl")]
    rows = rows[(rows.steps > 0) == trained]
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
    """Up to what needs the values of each prompt, which are not published."""
    rows = published(name, "test")
    table = study.wide(rows)
    listed = study.over_components(table, "", "", n=10)
    listed += study.over_components(table.loc[study.live(rows)], ".live", "", n=10)
    again = {claim.id: claim.measured for claim in listed}
    means = table.mean()
    others = means[[way for way in study.TOTAL if way in means]]
    again["single.mean_gap.optimal"] = means.optimal - others.min()
    closed = published(name, "test", trained=False)
    if len(closed):
        again["single.closed_form"] = study.closed_form(rows, closed, n=10).measured
    stored = {c.id: c.measured for c in claims.published(name) if c.id.startswith("single.")}
    assert stored.pop("single.proposition1") >= 0
    assert set(again) == set(stored)
    for id, measured in stored.items():
        assert measured == pytest.approx(again[id], rel=1e-5), id


def test_proposition_1_holds_on_the_bundled_model():
    train = study.wide(published("tiny", "train"))
    assert len(train) == 30
    assert (train.optimal <= train[["zero", "mean", "cf_mean"]].min(axis=1) + 1e-6).all()
