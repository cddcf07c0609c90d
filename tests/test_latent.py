"""The lens study: its tables, where a lens falls below a threshold, and claims that follow from numbers made by hand."""

import numpy as np
import pandas as pd
import pytest
import torch

from oa_utils import claims, latent, runs

SMALL = latent.Study(train=160, validation=32, test=32, length=12, others=(6,), steps=6, batch=16)


def test_below_is_the_first_layer_that_stays_below():
    assert latent.below([3, 0.05, 0.2, 0.05, 0.0], 0.1) == 3
    assert latent.below([0.01, 0.01, 0.0], 0.1) == 0
    assert latent.below([3, 2, 1, 0.0], 0.1) == 3


def test_close_is_the_time_to_within_one_percent():
    curve = [(0, 1.0, [4.0, 2.0]), (5, 2.0, [2.02, 1.0]), (10, 9.0, [2.0, 1.0])]
    assert latent.close(curve) == 2.0
    assert latent.close(curve, share=0.001) == 9.0


def test_the_study_measures_every_lens_at_every_layer_and_length(tiny):
    made = latent.train(tiny, SMALL)
    result = latent.losses(tiny, SMALL, made)
    table = result.frame()
    assert (table.groupby(["lens", "layer", "length"]).size() == 1).all()
    assert len(table) == len(latent.KINDS) * (tiny.n_layers + 1) * 2
    own = table[(table.length == 12) & (table.lens == "oca")].sort_values("layer").loss.to_numpy()
    assert own == pytest.approx(made.lenses["oca"].losses(made.streams["test"]).mean(1).tolist(), abs=1e-6)
    made_of = {c.id: c for c in latent.lens_claims(result, n=10)}
    assert made_of["lens.oca_below_tuned"].low <= made_of["lens.oca_below_tuned"].high
    assert all(c.id.split(".")[0] in claims.RECOMPUTE for c in made_of.values())


def test_lens_claims_by_hand(tmp_path):
    losses = {"oca": [0.4, 0.005, 0.0], "tuned": [0.5, 0.2, 0.0], "tuned_random": [0.2, 0.1, 0.0], "mean": [0.9, 0.45, 0.0],
              "resample": [1.0, 0.62, 0.0]}  # fmt: skip
    rows = [{"lens": name, "parameters": n, "seconds_close": t} for name, n, t in (("oca", 3, 5.0), ("tuned", 60, 4.0))]
    tensors = {name: torch.tensor(value)[:, None].expand(-1, 8) for name, value in losses.items()}
    made = {c.id: c for c in latent.lens_claims(runs.Result({"rows": rows}, tensors, {}, 0.0, tmp_path / "x.json"), n=5)}
    here = {id.removeprefix("lens."): (round(c.measured, 4), c.holds) for id, c in made.items()}
    assert here == {
        "oca_over_tuned": (0.5786, True), "oca_over_tuned_random": (1.35, False), "oca_below_tuned": (1.0, True),
        "oca_over_mean": (0.3, True), "oca_over_resample": (0.25, True), "oca_below_001": (0.5, True),
        "tuned_never_001": (1.0, True), "parameters": (0.05, True), "seconds": (1.25, True),
    }  # fmt: skip
    assert made["lens.oca_over_tuned"].paper_value < 1


def test_faithfulness_claims_compare_lenses_in_their_own_bases():
    rows = []
    for perturbation in latent.PERTURBATIONS:
        for basis in ("random",) if "random" in perturbation else ("tuned", "oca"):
            for lens in ("tuned", "oca"):
                for layer in range(4):
                    own = basis in ("random", lens)
                    value = 0.5 + 0.1 * (lens == "oca") if own else np.nan
                    low = layer == 0 and lens == "oca" and perturbation == "project_basis"
                    rows.append({"perturbation": perturbation, "basis": basis, "lens": lens, "layer": layer, "magnitude": value,
                                 "direction": 0.1 if low and own else value})  # fmt: skip
    made = {c.id: c for c in latent.faithful_claims(pd.DataFrame(rows))}
    assert len(made) == 10 and all(c.paper_value == 1 for c in made.values())
    assert [c.id for c in made.values() if not c.holds] == ["faithfulness.project_basis.direction"]
    assert made["faithfulness.project_basis.direction"].measured == 0.75
