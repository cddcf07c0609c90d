"""The lens chapters: their tables, where a lens falls below a threshold, and claims that follow
from numbers made by hand."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from oa_utils import lenses, store
from oa_utils.paper import lenses as study
from oa_utils.paper.claims import reason

SIZES = {"train": 160, "validation": 32, "test": 32, "length": 12, "positions": 2}
SMALL = study.Study(**SIZES, others=(6,), steps=6, batch=16, oca_batch=16, seeds=2)


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
    data = trained.readings["test"]
    again = torch.stack([seed["oca"].losses(data) for seed in trained.seeds])
    assert torch.equal(result.tensors["oca"], again) and not torch.equal(again[0], again[1])
    assert rows.loss.to_numpy() == pytest.approx(again.mean((0, 2)).tolist(), abs=1e-6)
    assert len(result.tensors["linear"]) == 1  # of the first seed only
    ratios = study.over_tuned(result, n=10).set_index(["lens", "layer"])
    assert np.allclose(ratios.loc["tuned", ["ratio", "low", "high"]], 1)
    assert (ratios.low <= ratios.ratio).all() and (ratios.ratio <= ratios.high).all()
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
        {"lens": "oca", "multiply_adds_by_seed": [5e9, 5.01e9]},
        {"lens": "tuned", "multiply_adds_by_seed": [4e9, 4e9]},
    ]
    tensors = {
        name: torch.tensor(value)[None, :, None].expand(2, -1, 8) for name, value in losses.items()
    }
    result = store.Result({"rows": rows}, tensors, 0.0, Path("x.json"))
    claims = {claim.id: claim for claim in study.lens_claims(result, n=5)}
    measured = {
        id.removeprefix("lens."): (round(claim.measured, 2), claim.holds)
        for id, claim in claims.items()
    }
    assert measured == {
        "oca_over_tuned": (0.58, True),
        "oca_over_tuned_random": (1.35, False),
        "oca_below_tuned": (0.8, True),
        "oca_over_mean": (0.3, True),
        "oca_over_resample": (0.25, True),
        "oca_below_001": (0.5, True),
        "tuned_never_001": (1.0, True),
        "training_cost": (1.25, True),
    }
    assert claims["lens.oca_over_tuned"].paper_value < 1
    assert all(claim.source == "x.json" for claim in claims.values())
    assert all(reason(id, study.WHYS) for id in claims)


@pytest.mark.parametrize(
    ("by_seed", "said"),
    [
        ([5e9], "one seed gives no interval"),
        ([5e9, 5e9], "several seeds that agree give no interval"),
        ([5e9, 6e9], ""),
    ],
)
def test_where_no_interval_decides_the_cost_the_note_says_why(by_seed, said):
    rows = [
        {"lens": "oca", "multiply_adds_by_seed": by_seed},
        {"lens": "tuned", "multiply_adds_by_seed": [4e9] * len(by_seed)},
    ]
    names = ("oca", "tuned", "tuned_random", "mean", "resample")
    tensors = {name: torch.ones(len(by_seed), 3, 8) for name in names}
    result = store.Result({"rows": rows}, tensors, 0.0, Path("x.json"))
    claims = {claim.id: claim for claim in study.lens_claims(result, n=5)}
    assert bool(claims["lens.training_cost"].note) == bool(said)
    assert claims["lens.training_cost"].note.startswith(said)
    assert claims["lens.training_cost"].holds is None


def test_an_interval_covers_contexts_and_seeds():
    rng = np.random.default_rng(0)
    contexts = rng.normal(size=(1, 400, 1))
    same = 5 + np.repeat(contexts, 3, axis=0)
    value, low, high = study.with_interval(lambda x: float(x[0]), [same], 200)
    assert (high - low) / 2 == pytest.approx(1.96 / 20, rel=0.2)  # seeds that agree add nothing
    apart = same + np.array([-1.0, 0.0, 1.0])[:, None, None]
    value, low, high = study.with_interval(lambda x: float(x[0]), [apart], 200)
    assert (high - low) / 2 == pytest.approx(4.303 / np.sqrt(3), rel=0.05)


def faithful_row(perturbation, basis, lens, layer):
    """OCA ahead by 0.1 in its own basis, but for one direction; NaN where bases are mixed."""
    value = np.nan
    if basis in ("random", lens):
        value = 0.6 if lens == "oca" else 0.5
    behind = (perturbation, basis, lens, layer) == ("project_basis", "oca", "oca", 0)
    numbers = {"magnitude": value, "direction": 0.1 if behind else value}
    place = {"perturbation": perturbation, "basis": basis, "lens": lens, "layer": layer}
    for measure in ("magnitude", "direction"):
        numbers |= {f"{measure}_se": 0.01, f"{measure}_lead_se": 0.06}
    return {**place, **numbers}


def test_faithfulness_claims_compare_lenses_in_their_own_bases():
    rows = [
        faithful_row(perturbation, basis, lens, layer)
        for perturbation in study.PERTURBATIONS
        for basis in (("random",) if "random" in perturbation else ("tuned", "oca"))
        for lens in ("tuned", "oca")
        for layer in range(4)
    ]
    claims = {claim.id: claim for claim in study.faithful_claims(pd.DataFrame(rows), 4)}
    assert len(claims) == 10
    failed = [claim for claim in claims.values() if claim.holds is False]
    assert [claim.id for claim in failed] == ["faithfulness.project_basis.direction"]
    assert all(reason(id, study.WHYS) for id in claims)
    assert failed[0].measured == pytest.approx(-0.4) and "3 of 4 layers" in failed[0].note
    # in random directions the paired error counts, in two bases both errors do
    assert claims["faithfulness.steer_random.direction"].holds is None
    assert claims["faithfulness.steer_basis.direction"].holds
    z = 2.498  # of 5 % over four layers, both sides
    assert claims["faithfulness.steer_basis.direction"].low == pytest.approx(
        0.1 - z * 0.01 * np.sqrt(2), abs=1e-3
    )


def test_the_chapters_table_is_that_of_faithfulness(tiny):
    few = study.Study(**SIZES, others=(), steps=2, batch=16, oca_batch=16, seeds=1)
    trained = study.train(tiny, few, ("tuned", "oca", "linear"))
    table = study.faithful(
        tiny, trained, [1], directions=4, contexts=4, resampled=8, resamples=5, reference=False
    )
    each = {"steer_random_each", "steer_basis_each"}
    assert set(table.perturbation) == {*study.PERTURBATIONS} | each
    assert set(table.layer) == {1}
    assert len(study.faithful_claims(table, 6)) == 10
