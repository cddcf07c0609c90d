"""The study of known circuits: its tables, and claims that follow from them by their rules."""

import numpy as np
import pandas as pd
import pytest

from oa_utils.known import known
from oa_utils.masked import MaskedModel
from oa_utils.paper import ground_truth
from oa_utils.paper.ground_truth import SEARCHES, WAYS, Hidden, Spending
from oa_utils.search.sweeps import METHODS


def tables(f1: float = 1.0, decoys: float = 0.0) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Three seeds of three programs; UGS under OA has this F1, a little more or less by seed if it
    is below 1, and takes this share of the decoy."""
    found = []
    gaps = []
    for program in ("copy", "twins", "decoy"):
        for seed in range(3):
            about = Hidden(program, seed)._asdict()
            for way in WAYS:
                here = way == "optimal"
                delta = {"optimal": 0.01, "counterfactual": 0.5}.get(way, 0.02)
                if program == "decoy" and way in ("zero", "mean"):
                    delta = 2.0
                delta *= 1 + 0.01 * (seed if here else -seed)
                gaps.append(about | {"ablation": way, "gap": delta})
                for method in ("ugs", "eap"):
                    own = f1 + 0.005 * (seed - 1) * (f1 < 1)
                    row = {"method": method, "ablation": way, "f1": own if here else 1.0}
                    row["decoys"] = float("nan")
                    if program == "decoy":
                        row["decoys"] = decoys if here else float(way == "mean")
                    found.append(about | row)
    return pd.DataFrame(found), pd.DataFrame(gaps)


def test_claims_follow_from_the_tables():
    verdicts = {claim.id: claim.holds for claim in ground_truth.claims(*tables(0.98))}
    undecided = {id for id, holds in verdicts.items() if holds is None}
    assert len(verdicts) == 9
    assert undecided == {"known.decoy.ugs.mean", "known.decoy.ugs.optimal"}, "three models only"
    assert False not in verdicts.values()


def test_values_that_agree_over_seeds_have_no_interval_of_zero_width():
    listed = {claim.id: claim for claim in ground_truth.claims(*tables())}
    exact = listed["known.ugs.optimal"]
    assert (exact.measured, exact.high) == (1, 1)
    assert exact.low == pytest.approx(0.025 ** (1 / 3)), "Clopper and Pearson, 3 of 3 models"
    assert listed["known.ugs_eap"].low is None, "differences that are all 0"
    assert not any(claim.low == claim.high for claim in listed.values() if claim.low is not None)


def test_gaps_that_are_rounding_errors_are_not_divided():
    found, gaps = tables()
    gaps["gap"] = np.where(gaps.ablation == "optimal", 1e-9 * (gaps.seed + 1), -1e-12)
    [lowest] = [c for c in ground_truth.claims(found, gaps) if c.id == "known.gap.lowest"]
    assert lowest.measured == pytest.approx(1)
    assert lowest.holds is None


def test_claims_can_fail():
    claims = {claim.id: claim.holds for claim in ground_truth.claims(*tables(0.5, 1.0))}
    failed = {id for id, holds in claims.items() if holds is False}
    assert failed == {
        "known.ugs.optimal",
        "known.ugs.optimal_counterfactual",
        "known.ugs_eap",
    }


def test_one_seed_decides_nothing():
    found, gaps = tables()
    one = ground_truth.claims(found[found.seed == 0], gaps[gaps.seed == 0])
    assert [claim.holds for claim in one] == [None] * len(one)


def test_the_finding_counts():
    found, gaps = tables(0.5, 1.0)
    text = ground_truth.finding(found, gaps)
    assert "F1 = 0.50" in text
    assert "3 of 3 programs" in text
    assert "100% under OA" in text


def test_every_search_is_scored_under_every_ablation_that_it_can_search_under():
    spending = Spending(n=24, steps=2, pruning_steps=2, after=2)
    models = [Hidden("decoy", seed=3, n_layers=2, n_heads=2)]
    found, gaps = ground_truth.study(models, spending, "test")
    assert gaps.ablation.tolist() == list(WAYS)
    pairs = set(zip(found.method, found.ablation, strict=True))
    trained = {(method, "optimal") for method in SEARCHES if METHODS[method].trains}
    assert pairs == {(m, way) for m in SEARCHES for way in WAYS[:-1]} | trained
    assert found[["precision", "recall", "f1"]].stack().between(0, 1).all()
    assert found.auroc.isna().equals(found.method == "acdc")
    shares = ground_truth.exact(found)
    assert shares.loc["ugs", "mean"] == float(
        found[(found.method == "ugs") & (found.ablation == "mean")].f1.iloc[0] == 1
    )


def test_sizes_are_told_only_to_searches_that_ask():
    written = known("copy", 2, 2, n=24, seed=1)
    assert len(MaskedModel(written.model).graph) == len(written.circuits[0].graph)
    for method in SEARCHES:
        options = Spending().options(method, written.n_edges)
        assert ("n_edges" in options) == (METHODS[method].aim == "n_edges")
        assert ("lam" in options) == (METHODS[method].aim == "lam")
