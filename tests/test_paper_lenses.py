"""The lens chapters: their tables, where a lens falls below a threshold, and claims that follow
from numbers made by hand."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from oa_utils import lenses, store
from oa_utils.paper import lenses as study

SMALL = study.Study(train=160, validation=32, test=32, length=12, others=(6,), steps=6, batch=16)


def test_below_is_the_first_layer_that_stays_below():
    assert study.below([3, 0.05, 0.2, 0.05, 0.0], 0.1) == 3
    assert study.below([0.01, 0.01, 0.0], 0.1) == 0
    assert study.below([3, 2, 1, 0.0], 0.1) == 3


def test_close_is_the_first_look_within_one_percent():
    curve = [[0, [4.0, 2.0]], [5, [2.02, 1.0]], [10, [2.0, 1.0]]]
    assert study.steps_close(curve) == 5
    assert study.steps_close(curve, share=0.001) == 10


def test_a_step_costs_what_its_matrices_cost(gpt2, llama):
    read = 3 * 32 * gpt2.d_vocab  # every layer is unembedded
    assert study.step_cost(gpt2, "tuned") == read + 3 * 32 * 32
    assert study.step_cost(gpt2, "oca") == read + 6 * 2 * 32 * 128  # the later MLPs of each start
    assert study.step_cost(llama, "oca") == read + 6 * 3 * 32 * 48  # gated: three matrices


def test_both_notebooks_choose_the_same_study_by_the_models_budget(tiny, monkeypatch):
    monkeypatch.setattr(tiny, "budget", "default")
    assert study.default(tiny) == study.Study()
    monkeypatch.setattr(tiny, "budget", "paper")
    assert study.default(tiny, seed=1).train == 100_000 and study.default(tiny, seed=1).seed == 1
    monkeypatch.setattr(tiny, "budget", "test")
    assert study.default(tiny).train > tiny.d_model  # or there would be no covariance


def test_the_study_measures_every_lens_at_every_layer_and_length(tiny):
    trained = study.train(tiny, SMALL)
    result = study.losses(tiny, SMALL, trained)
    table = result.frame()
    assert (table.groupby(["lens", "layer", "length"]).size() == 1).all()
    assert len(table) == len(study.KINDS) * (tiny.n_layers + 1) * 2
    rows = table[(table.length == 12) & (table.lens == "oca")].sort_values("layer")
    expected = trained.lenses["oca"].losses(trained.readings["test"]).mean(1).tolist()
    assert rows.loss.to_numpy() == pytest.approx(expected, abs=1e-6)
    assert set(table[table.lens == "tuned"].steps) == {6}
    claims = {claim.id: claim for claim in study.lens_claims(result, n=10)}
    assert claims["lens.oca_below_tuned"].low <= claims["lens.oca_below_tuned"].high
    assert set(claims) == {f"lens.{id}" for id in study.LENS_CLAIMS}


def test_the_second_notebook_finds_the_lenses_of_the_first(tiny, monkeypatch):
    first = study.train(tiny, SMALL)
    monkeypatch.setattr(lenses, "train_layers", lambda *args: pytest.fail("trained again"))
    second = study.train(tiny, SMALL, ("tuned", "oca", "linear"))
    for name, lens in second.lenses.items():
        assert lens.fingerprint == first.lenses[name].fingerprint


def test_lens_claims_by_hand():
    losses = {
        "oca": [0.4, 0.005, 0.0],
        "tuned": [0.5, 0.2, 0.0],
        "tuned_random": [0.2, 0.1, 0.0],
        "mean": [0.9, 0.45, 0.0],
        "resample": [1.0, 0.62, 0.0],
    }
    rows = [
        {"lens": "oca", "parameters": 3, "multiply_adds": 5e9},
        {"lens": "tuned", "parameters": 60, "multiply_adds": 4e9},
    ]
    tensors = {name: torch.tensor(value)[:, None].expand(-1, 8) for name, value in losses.items()}
    result = store.Result({"rows": rows}, tensors, {}, {}, 0.0, Path("x.json"))
    claims = {claim.id: claim for claim in study.lens_claims(result, n=5)}
    measured = {
        id.removeprefix("lens."): (round(claim.measured, 4), claim.holds)
        for id, claim in claims.items()
    }
    assert measured == {
        "oca_over_tuned": (0.5786, True),
        "oca_over_tuned_random": (1.35, False),
        "oca_below_tuned": (1.0, True),
        "oca_over_mean": (0.3, True),
        "oca_over_resample": (0.25, True),
        "oca_below_001": (0.5, True),
        "tuned_never_001": (1.0, True),
        "parameters": (0.05, True),
        "training_cost": (1.25, True),
    }
    assert claims["lens.oca_over_tuned"].paper_value < 1
    assert all(claim.source == "x.json" for claim in claims.values())


def faithful_row(perturbation, basis, lens, layer):
    """OCA ahead by 0.1 in its own basis, but for one direction; NaN where bases are mixed."""
    value = np.nan
    if basis in ("random", lens):
        value = 0.6 if lens == "oca" else 0.5
    behind = (perturbation, basis, lens, layer) == ("project_basis", "oca", "oca", 0)
    return {
        "perturbation": perturbation,
        "basis": basis,
        "lens": lens,
        "layer": layer,
        "magnitude": value,
        "direction": 0.1 if behind else value,
    }


def test_faithfulness_claims_compare_lenses_in_their_own_bases():
    rows = [
        faithful_row(perturbation, basis, lens, layer)
        for perturbation in study.PERTURBATIONS
        for basis in (("random",) if "random" in perturbation else ("tuned", "oca"))
        for lens in ("tuned", "oca")
        for layer in range(4)
    ]
    claims = {claim.id: claim for claim in study.faithful_claims(pd.DataFrame(rows))}
    assert len(claims) == 10
    assert all(claim.paper_value == 1 for claim in claims.values())
    failed = [claim for claim in claims.values() if not claim.holds]
    assert [claim.id for claim in failed] == ["faithfulness.project_basis.direction"]
    assert failed[0].measured == 0.75


def test_the_chapters_table_is_that_of_faithfulness(tiny):
    few = study.Study(train=160, validation=32, test=32, length=12, others=(), steps=2, batch=16)
    trained = study.train(tiny, few, ("tuned", "oca", "linear"))
    table = study.faithful(
        tiny, trained, [1], directions=4, contexts=4, resampled=8, resamples=5, reference=False
    )
    assert set(table.perturbation) == set(study.PERTURBATIONS) and set(table.layer) == {1}
    assert len(study.faithful_claims(table)) == 10
