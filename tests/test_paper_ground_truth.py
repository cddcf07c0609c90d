"""The study of known circuits: its tables, and claims that follow from them by their rules."""

import pandas as pd

from oa_utils.known import known
from oa_utils.masked import MaskedModel
from oa_utils.paper import ground_truth
from oa_utils.paper.ground_truth import SEARCHES, WAYS, Hidden, Spending
from oa_utils.search.sweeps import METHODS


def tables(f1: float = 1.0, decoys: float = 0.0) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Three seeds of three programs; UGS under OA has this F1 and takes this share of the decoy."""
    found = []
    gaps = []
    for program in ("copy", "twins", "decoy"):
        for seed in range(3):
            about = Hidden(program, seed)._asdict()
            for way in WAYS:
                here = way == "optimal"
                delta = {"optimal": 0.01, "counterfactual": 0.5}.get(way, 0.02 + 0.001 * seed)
                if program == "decoy" and way in ("zero", "mean"):
                    delta = 2.0
                gaps.append(about | {"ablation": way, "gap": delta})
                for method in ("ugs", "eap"):
                    row = {"method": method, "ablation": way, "f1": f1 if here else 1.0}
                    row["decoys"] = float("nan")
                    if program == "decoy":
                        row["decoys"] = decoys if here else float(way == "mean")
                    found.append(about | row)
    return pd.DataFrame(found), pd.DataFrame(gaps)


def test_claims_follow_from_the_tables():
    verdicts = {claim.id: claim.holds for claim in ground_truth.claims(*tables())}
    assert len(verdicts) == 9
    assert all(verdicts.values())


def test_claims_can_fail():
    claims = {claim.id: claim.holds for claim in ground_truth.claims(*tables(0.5, 1.0))}
    failed = {id for id, holds in claims.items() if holds is False}
    assert failed == {
        "known.ugs.optimal",
        "known.ugs.optimal_counterfactual",
        "known.ugs_eap",
        "known.decoy.ugs.optimal",
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
