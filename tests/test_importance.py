"""The statistics of section 2 on the authors' own numbers, and claims that can fail."""

import numpy as np
import pandas as pd
import pytest

from oa_utils import importance
from oa_utils.models import DATA

ANCHORS = pd.read_csv(DATA / "anchors" / "single_component_ioi.csv", index_col="component")


def anchors() -> pd.DataFrame:
    """The authors' gaps; their log has the position-agnostic OA and no CF mean, so the mean stands in for it."""
    table = ANCHORS.rename(columns={"cf": "counterfactual", "oa_position_agnostic": "optimal"}).assign(cf_mean=ANCHORS["mean"])
    return table[list(importance.WAYS)]


def value(found: pd.DataFrame, statistic: str, ablation: str) -> float:
    return found[(found.statistic == statistic) & (found.ablation == ablation)].value.item()


def test_the_authors_numbers_give_the_papers_table():
    found = importance.compare(anchors(), n=10)
    for ablation in ("zero", "mean", "resample"):
        assert value(found, "rank", ablation) == pytest.approx(importance.PAPER["rank"][ablation], abs=2e-3)
        assert value(found, "loglog_trimmed", ablation) == pytest.approx(importance.PAPER["loglog"][ablation], abs=2e-3)
        assert value(found, "mean_gap", ablation) == pytest.approx(importance.PAPER["mean_gap"][ablation], rel=0.02)
    assert value(found, "rank", "optimal") == pytest.approx(0.837, abs=2e-3)  # position-agnostic, as the spec has it


def test_an_ablation_equal_to_cf_agrees_fully():
    table = anchors().assign(optimal=lambda t: t.counterfactual / 2)
    found = importance.compare(table, n=10)
    assert value(found, "rank", "optimal") == pytest.approx(1) and value(found, "loglog", "optimal") == pytest.approx(1)
    assert value(found, "median_ratio", "counterfactual") == pytest.approx(0.5)


def test_claims_hold_and_fail_as_the_numbers_say():
    good = anchors().assign(optimal=lambda t: 0.1 * np.minimum(t.counterfactual, t[list(importance.TOTAL)].min(axis=1)))
    assert all(c.holds for c in importance.claims(good, good, n=20) if not c.id.endswith("lead"))
    bad = anchors().assign(optimal=lambda t: t["zero"].sample(frac=1, random_state=0).to_numpy() * 2)
    held = {c.id: c.holds for c in importance.claims(bad, bad, n=20)}
    assert not any(held[f"single.{id}"] for id in ("rank.lead", "loglog.lead", "mean_gap.optimal", "proposition1"))


def test_wide_keeps_one_family():
    rows = [("a0.h0", "zero", "", 1.0), ("a0.h0", "optimal", "position", 2.0), ("a0.h0", "optimal", "shared", 3.0)]
    gaps = pd.DataFrame(rows, columns=["component", "ablation", "family", "gap"])
    assert importance.wide(gaps, "shared").loc["a0.h0", "optimal"] == 3.0
    assert list(importance.wide(gaps)) == ["zero", "optimal"]


PUBLISHED = sorted(path.parts[-3] for path in (DATA / "results").glob("*/claims/single_components.json"))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_claims_follow_from_the_published_results(name):
    from oa_utils import claims

    parts = [importance.wide(importance.published(name, part)) for part in ("test", "train")]
    again = {c.id: c for c in importance.claims(*parts, n=10)}
    stored = {c.id: c for c in claims.published(name) if c.id.startswith("single.")}
    assert set(again) == set(stored)
    for id, claim in stored.items():
        assert (claim.measured, claim.holds) == (pytest.approx(again[id].measured, rel=1e-6), again[id].holds), id


def test_proposition_1_holds_on_the_bundled_model():
    assert "tiny" in PUBLISHED
    train = importance.wide(importance.published("tiny", "train"))
    assert len(train) == 30 and (train.optimal <= train[list(importance.TOTAL)].min(axis=1) + 1e-6).all()
