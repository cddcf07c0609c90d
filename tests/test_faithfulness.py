"""Faithfulness: perturbations that do what they say, reactions that equal full runs, measures
worked out by hand."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import tokens_of

from oa_utils import faithfulness as ff
from oa_utils import lenses, stats

SMALL = {"directions": 12, "contexts": 8, "resampled": 24, "resamples": 20, "reference": True}


@pytest.fixture(scope="module")
def vectors():
    rng = torch.Generator().manual_seed(0)
    a = torch.randn(7, 16, generator=rng)
    v = F.normalize(torch.randn(5, 16, generator=rng), dim=-1)
    centre = torch.randn(16, generator=rng)
    return a, v, centre


def last_token_moved(layer, by):
    """An edit that moves the last of 8 tokens' stream at a layer."""

    def edit(site, i, value):
        if (site, i) == ("resid", layer):
            return value + F.pad(by[:, None], (0, 0, 7, 0))
        return value

    return edit


# ---- directions and perturbations


def test_projection_is_per_row_idempotent_and_leaves_the_complement(vectors):
    a, v, centre = vectors
    once = ff.project(a, v, centre)
    assert torch.einsum("bmd,md->bm", once - centre, v).abs().max() < 1e-5
    for j in range(len(v)):
        twice = ff.project(once[:, j], v[j : j + 1], centre)[:, 0]
        torch.testing.assert_close(twice, once[:, j], rtol=0, atol=1e-5)
        off = torch.randn(16) @ (torch.eye(16) - torch.outer(v[j], v[j]))
        torch.testing.assert_close((once[:, j] - a) @ off, torch.zeros(7), rtol=0, atol=1e-5)
    # a row does not depend on the others
    torch.testing.assert_close(ff.project(a[2:3], v, centre)[0], once[2])


def test_the_references_shift_moves_all_rows_alike(vectors):
    a, v, centre = vectors
    moved = ff.shift(a, v, centre) - a[:, None]
    torch.testing.assert_close(moved, moved[:1].expand_as(moved), rtol=0, atol=1e-5)
    one = a[:1]  # of one row: the same
    torch.testing.assert_close(ff.shift(one, v, centre), ff.project(one, v, centre))


def test_resample_of_everything_swaps_and_of_nothing_keeps(vectors):
    a, v, _ = vectors
    other = a.roll(1, 0)
    everything = ff.resample(a, other, torch.randn(16, 16))[:, 0]
    torch.testing.assert_close(everything, other, rtol=0, atol=1e-4)
    torch.testing.assert_close(ff.resample(a, other, torch.zeros(0, 16))[:, 0], a)
    part = ff.resample(a, other, v)[:, 0]
    inside = (part - other) @ v.T  # the other's part
    outside = (part - a) @ torch.linalg.svd(v).Vh[5:].T  # its own
    torch.testing.assert_close(inside, torch.zeros(7, 5), rtol=0, atol=1e-5)
    torch.testing.assert_close(outside, torch.zeros(7, 11), rtol=0, atol=1e-5)


def test_basis_solves_the_singular_value_problem():
    rng = torch.Generator().manual_seed(1)
    W = torch.randn(16, 16, generator=rng)
    x = torch.randn(200, 16, generator=rng) @ torch.randn(16, 16, generator=rng)
    cov = torch.cov(x.T)
    half = ff.root(cov)
    svd = torch.linalg.svd(W @ half)
    torch.testing.assert_close(half @ half, cov, rtol=1e-3, atol=1e-3)
    directions = ff.basis(W, half)
    lengths = (svd.Vh @ half).norm(dim=-1)
    got = (directions * lengths[:, None]) @ W.T  # W Σ^½ v_k = s_k u_k
    torch.testing.assert_close(got, (svd.U * svd.S).T, rtol=1e-3, atol=1e-2)
    ball = F.normalize(torch.randn(5000, 16, generator=rng), dim=-1) @ half  # Mahalanobis norm 1
    longest = (directions[0] * lengths[0] @ W.T).norm()
    assert longest >= (ball @ W.T).norm(dim=-1).max() - 1e-3
    assert not torch.allclose(ff.reference_basis(W, half).abs(), directions.abs(), atol=0.1)


# ---- reactions


def test_continuing_the_last_token_equals_the_whole_model(model):
    tokens = tokens_of(model, 5, 8)
    for layer in range(model.n_layers):
        resid, past = ff.before(model, tokens, layer)
        noise = torch.randn(5, 3, model.d_model)
        ends = ff.after(model, resid[:, None] + noise, layer, past)
        for j in range(3):
            edit = last_token_moved(layer, noise[:, j])
            whole = model.run(model.embed(tokens), edit=edit)[:, -1]
            torch.testing.assert_close(ends[:, j], whole, rtol=0, atol=1e-4)


def test_kl_from_changes_is_kl_and_exact_when_small():
    rng = torch.Generator().manual_seed(0)
    logp = torch.randn(4, 1, 50, generator=rng).double().log_softmax(-1)
    for size in (1.0, 1e-4):
        noise = torch.randn(4, 3, 50, dtype=torch.float64, generator=rng)
        moved = (logp + size * noise).log_softmax(-1)
        exact = stats.kl(logp.expand(4, 3, 50), moved)
        got = ff.kl(logp.float(), (moved - logp).float())
        torch.testing.assert_close(got.double(), exact, rtol=1e-2, atol=1e-13)
    far = ff.kl(torch.tensor([[[0.0, -200.0]]]), torch.tensor([[[-200.0, 200.0]]]))
    assert far.item() == pytest.approx(199, rel=1e-3)


def test_aitchison_similarity():
    rng = torch.Generator().manual_seed(0)
    logp = torch.randn(3, 1, 40, generator=rng).log_softmax(-1)
    x, y = torch.randn(2, 3, 2, 40, generator=rng)
    one = torch.ones(3, 2)
    torch.testing.assert_close(ff.similarity(logp, x, x), one)
    torch.testing.assert_close(ff.similarity(logp, x, -x), -one)
    torch.testing.assert_close(ff.similarity(logp, x, 3 * x + 5), one)
    torch.testing.assert_close(ff.similarity(logp, 1e-12 * x, 1e-12 * x), one)
    assert (ff.similarity(logp, x, y).abs() <= 1).all()
    p = logp.exp()[0, 0].double()
    a, b = (z[0, 0].double() - (p * z[0, 0]).sum() for z in (x, y))
    by_hand = (p * a * b).sum() / math.sqrt((p * a * a).sum() * (p * b * b).sum())
    assert ff.similarity(logp, x, y)[0, 0].item() == pytest.approx(by_hand.item(), abs=1e-5)


class Oracle(lenses.LogitLens):
    """Goes on as the model does."""

    def log_probs(self, x, layer):
        return self.model.log_probs(ff.after(self.model, x, layer, self.past))


def test_a_lens_that_is_the_model_is_fully_faithful(model):
    oracle = Oracle(model)
    probe = ff.Probe(model, tokens_of(model, 6), 1, {"oracle": oracle})
    oracle.past = probe.past
    v = F.normalize(torch.randn(9, model.d_model), dim=-1)
    reactions = probe.react(ff.steer(probe.resid, v, torch.ones(6, 9)))
    (numbers,) = ff.rows_of(reactions, ["oracle"], ff.FaithSettings(**SMALL))
    assert [numbers[key] for key in ff.MEASURES] == pytest.approx([1, 1, 1], abs=1e-4)
    assert numbers["kl"] == pytest.approx(numbers["kl_lens"])


def test_reactions_equal_whole_runs_and_vanish_without_steering(model):
    tokens = tokens_of(model, 6, 8)
    data = lenses.read(model, tokens)
    lens = lenses.train(model, data, "mean")
    probe = ff.Probe(model, tokens, 1, {"mean": lens})
    v = F.normalize(torch.randn(5, model.d_model), dim=-1)
    size = torch.randn(6, 5)
    reactions = probe.react(ff.steer(probe.resid, v, size))
    step = size[:, 2, None] * v[2]
    whole = model(tokens, torch.full((6,), 7), last_token_moved(1, step))
    expected = stats.kl(model.log_probs(data.resid[-1]), whole)
    torch.testing.assert_close(reactions["model"][:, 2], expected, rtol=1e-3, atol=1e-5)
    expected = stats.kl(lens.log_probs(data.resid[1], 1), lens.log_probs(data.resid[1] + step, 1))
    torch.testing.assert_close(reactions["mean"][:, 2], expected, rtol=1e-3, atol=1e-5)
    none = probe.react(ff.steer(probe.resid, v, 0 * size))
    assert none["model"].max() < 1e-9 and none["mean"].max() < 1e-9


def test_passes_do_not_change_reactions(model, monkeypatch):
    probe = ff.Probe(model, tokens_of(model, 6), 1, {})
    moved = probe.resid[:, None] + torch.randn(6, 5, model.d_model)
    whole = probe.react(moved)["model"]
    for rows in (4, 10):
        monkeypatch.setattr(ff, "PASS", rows)
        torch.testing.assert_close(probe.react(moved)["model"], whole, rtol=1e-3, atol=1e-6)


def test_calibrated_strength_gives_the_target(model):
    probe = ff.Probe(model, tokens_of(model, 8), 1, {})
    v = F.normalize(torch.randn(20, model.d_model), dim=-1)
    draws = torch.randn(8, 20)
    for target in (0.2, 0.02):
        strength = ff.calibrate(probe, v, draws, target)
        got = probe.react(ff.steer(probe.resid, v, strength * draws))["model"].mean()
        assert got.item() == pytest.approx(target, rel=0.05)


# ---- measures and the table


def test_measures_by_hand():
    x = np.exp(np.array([0.0, 1.0, 2.0, 4.0]))
    similar = np.array([1.0, 0.0, 0.5, 0.5])
    assert ff.measures(x, 5 * x**2, similar) == pytest.approx([1, 1, 0.5])
    assert ff.measures(x, 1 / x, x)[:2] == pytest.approx([-1, -1])
    y = np.exp(np.array([1.0, 0.0, 3.0, 2.0]))
    both = ff.measures(np.stack([x, y]), np.stack([y, y]), np.stack([x, x]))
    assert both[0, 0] == pytest.approx(stats.loglog(x, y))
    assert both[1, 0] == pytest.approx(stats.spearman(x, y))
    assert both[0, 1] == pytest.approx(1)


def test_resampled_means_start_with_the_sample_and_spread_as_they_should():
    rng = np.random.default_rng(0)
    values = rng.normal(size=(40, 1)) + rng.normal(size=60)  # contexts and versions differ
    settings = ff.FaithSettings(resamples=400)
    drawn = ff.resampled(values, settings)
    assert drawn.shape == (401, 60) and np.allclose(drawn[0], values.mean(0))
    assert drawn[1:].mean(1).std() == pytest.approx(np.sqrt(1 / 40 + 1 / 60), rel=0.3)
    single = ff.resampled(values[:, :1], settings)
    assert single.shape == (401, 40) and np.allclose(single[0], values[:, 0])
    assert single[1:].mean(1).std() == pytest.approx(1 / np.sqrt(40), rel=0.3)


def test_a_step_has_one_length_for_all_contexts_unless_it_is_named_otherwise(model, monkeypatch):
    steps = {}
    honest = ff.Probe.react

    def watched(self, moved, lenses=True):
        if lenses and moved.shape[1] > 1:
            steps[len(steps)] = (moved - self.resid[:, None]).norm(dim=-1)
        return honest(self, moved, lenses)

    monkeypatch.setattr(ff.Probe, "react", watched)
    few = {**SMALL, "reference": False, "seed": 5}
    ff.faithfulness(model, **arguments(model), layers=[1], **few)
    once, anew, _ = list(steps.values())[:3]  # steer_random, steer_random_each, project_random
    torch.testing.assert_close(once, once[:1].expand_as(once), rtol=1e-3, atol=1e-5)
    assert (anew.std(0) > 0.1 * anew.mean(0)).all()


def arguments(model):
    tokens = tokens_of(model, 48)
    data = lenses.read(model, tokens)
    few = {"steps": 20, "batch": 16, "look_every": 10}
    tuned = lenses.train(model, data, "tuned", **few)
    oca = lenses.train(model, data, "oca", **few)
    linear = lenses.train(model, data, "linear", of=oca, **few)
    return {
        "lenses": {"tuned": tuned, "oca": oca},
        "maps": {"tuned": tuned, "oca": linear},
        "data": data,
        "train": tokens,
        "test": tokens_of(model, 48, seed=1),
    }


def test_table_has_every_perturbation_in_every_basis_and_comes_back(model, monkeypatch):
    table = ff.faithfulness(model, **arguments(model), layers=[0, 2], **SMALL)
    cells = table.groupby(["layer", "perturbation", "basis", "lens"]).size()
    assert (cells == 1).all()
    steered = {"steer_random", "steer_basis", "steer_random_each", "steer_basis_each"}
    others = {"project_random", "project_basis", "resample_basis"}
    reference = {"shift_basis", "project_columns", "shift_columns"}
    assert set(table.perturbation) == steered | others | reference
    assert len(cells) == 2 * 2 * (3 + 2 * 4 + 2 * 3)  # layers, lenses: random, bases, reference
    first, second = (table[table.lens == name].reset_index() for name in ("tuned", "oca"))
    for key in ff.MEASURES:
        assert table[key].between(-1 - 1e-9, 1 + 1e-9).all()
        assert (table[f"{key}_low"] <= table[f"{key}_high"]).all()
        assert np.allclose(second[f"{key}_lead"], second[key] - first[key])
        assert (first[f"{key}_lead_se"] == 0).all() and (second[f"{key}_lead_se"] > 0).all()
    steered = table[table.perturbation.str.startswith("steer")]
    assert (steered.kl / 0.2).between(0.3, 3).all() and steered.strength.gt(0).all()
    assert table[table.perturbation == "resample_basis"].n.eq(24).all()
    monkeypatch.setattr(ff, "layer_rows", lambda *args: pytest.fail("computed again"))
    again = ff.faithfulness(model, **arguments(model), layers=[0, 2], **SMALL)
    assert again.equals(table)


def test_bad_input_is_named(model):
    whole = arguments(model)
    for change, words in (
        ({"maps": {"oca": whole["lenses"]["oca"]}}, "'oca' has none"),
        ({"layers": [3]}, "has 0 … 2"),
        (
            {"data": lenses.read(model, whole["train"][:20])},
            "needs more contexts than that, not 20",
        ),
        ({"test": whole["test"][:10]}, "does not fit 48 train and 10 test"),
        ({"contexts": 1}, "contexts must be at least 2"),
    ):
        with pytest.raises(ValueError, match=words):
            ff.faithfulness(model, **{**whole, **SMALL, **change})
