"""Faithfulness: perturbations that do what they say, reactions that equal full runs, measures worked out by hand."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import tokens_of

from oa_utils import faithfulness as ff
from oa_utils import lenses, stats

SMALL = ff.FaithSettings(directions=12, contexts=8, resampled=24, resamples=20, published=True)


@pytest.fixture(scope="module")
def vectors():
    rng = torch.Generator().manual_seed(0)
    a, v, centre = (torch.randn(*shape, generator=rng) for shape in ((7, 16), (5, 16), (16,)))
    return a, F.normalize(v, dim=-1), centre


def test_projection_is_per_row_idempotent_and_leaves_the_complement(vectors):
    a, v, centre = vectors
    once = ff.project(a, v, centre)
    assert torch.einsum("bmd,md->bm", once - centre, v).abs().max() < 1e-5
    for j in range(len(v)):
        torch.testing.assert_close(ff.project(once[:, j], v[j : j + 1], centre)[:, 0], once[:, j], rtol=0, atol=1e-5)
        off = torch.randn(16) @ (torch.eye(16) - torch.outer(v[j], v[j]))
        torch.testing.assert_close((once[:, j] - a) @ off, torch.zeros(7), rtol=0, atol=1e-5)
    torch.testing.assert_close(ff.project(a[2:3], v, centre)[0], once[2])  # a row does not depend on the others


def test_published_shift_moves_all_rows_alike(vectors):
    a, v, centre = vectors
    moved = ff.shift(a, v, centre) - a[:, None]
    torch.testing.assert_close(moved, moved[:1].expand_as(moved), rtol=0, atol=1e-5)
    torch.testing.assert_close(ff.shift(a[:1], v, centre), ff.project(a[:1], v, centre))  # one row: the same


def test_resample_of_everything_swaps_and_of_nothing_keeps(vectors):
    a, v, _ = vectors
    other = a.roll(1, 0)
    torch.testing.assert_close(ff.resample(a, other, torch.randn(16, 16))[:, 0], other, rtol=0, atol=1e-4)
    torch.testing.assert_close(ff.resample(a, other, torch.zeros(0, 16))[:, 0], a)
    part = ff.resample(a, other, v)[:, 0]
    torch.testing.assert_close((part - other) @ v.T, torch.zeros(7, 5), rtol=0, atol=1e-5)  # in the span: the other's
    null = torch.linalg.svd(v).Vh[5:]
    torch.testing.assert_close((part - a) @ null.T, torch.zeros(7, 11), rtol=0, atol=1e-5)  # outside: its own


def test_basis_solves_the_singular_value_problem(vectors):
    rng = torch.Generator().manual_seed(1)
    W, x = torch.randn(16, 16, generator=rng), torch.randn(200, 16, generator=rng) @ torch.randn(16, 16, generator=rng)
    cov = torch.cov(x.T)
    half, scale = ff.root(cov), torch.linalg.svd(W @ ff.root(cov))
    torch.testing.assert_close(half @ half, cov, rtol=1e-3, atol=1e-3)
    directions = ff.basis(W, half)
    lengths = (scale.Vh @ half).norm(dim=-1)
    got = (directions * lengths[:, None]) @ W.T  # W Σ^½ v_k = s_k u_k
    torch.testing.assert_close(got, (scale.U * scale.S).T, rtol=1e-3, atol=1e-2)
    ball = F.normalize(torch.randn(5000, 16, generator=rng), dim=-1) @ half  # Mahalanobis norm 1
    assert (directions[0] * lengths[0] @ W.T).norm() >= (ball @ W.T).norm(dim=-1).max() - 1e-3
    assert not torch.allclose(ff.published_basis(W, half).abs(), directions.abs(), atol=0.1)


def test_continuing_the_last_token_equals_the_whole_model(model):
    tokens = tokens_of(model, 5, 8)
    for layer in range(model.n_layers):
        resid, past = ff.before(model, tokens, layer)
        noise = torch.randn(5, 3, model.d_model)
        ends = ff.after(model, resid[:, None] + noise, layer, past)
        for j in range(3):

            def edit(site, i, value, j=j, layer=layer, noise=noise):
                return value if (site, i) != ("resid", layer) else value + F.pad(noise[:, j, None], (0, 0, 7, 0))

            whole = model.run(model.embed(tokens), edit=edit)[:, -1]
            torch.testing.assert_close(ends[:, j], whole, rtol=0, atol=1e-4)


def test_kl_from_changes_is_kl_and_exact_when_small():
    logp = torch.randn(4, 1, 50, generator=torch.Generator().manual_seed(0)).double().log_softmax(-1)
    for size in (1.0, 1e-4):
        moved = (logp + size * torch.randn(4, 3, 50, dtype=torch.float64)).log_softmax(-1)
        exact = stats.kl(logp.expand(4, 3, 50), moved)
        got = ff.kl(logp.float(), (moved - logp).float())
        torch.testing.assert_close(got.double(), exact, rtol=1e-2, atol=1e-13)
    far = torch.tensor([[[0.0, -200.0]]]), torch.tensor([[[-200.0, 200.0]]])
    assert ff.kl(*far).item() == pytest.approx(199, rel=1e-3)


def test_aitchison_similarity():
    rng = torch.Generator().manual_seed(0)
    logp, x, y = torch.randn(3, 1, 40, generator=rng).log_softmax(-1), *torch.randn(2, 3, 2, 40, generator=rng)
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


def test_measures_by_hand():
    x = np.exp(np.array([0.0, 1.0, 2.0, 4.0]))
    assert ff.measures(x, 5 * x**2, np.array([1.0, 0.0, 0.5, 0.5])) == pytest.approx([1, 1, 0.5])
    assert ff.measures(x, 1 / x, x)[:2] == pytest.approx([-1, -1])
    y = np.exp(np.array([1.0, 0.0, 3.0, 2.0]))
    both = ff.measures(np.stack([x, y]), np.stack([y, y]), np.stack([x, x]))
    assert both[0, 0] == pytest.approx(stats.loglog(x, y)) and both[1, 0] == pytest.approx(stats.spearman(x, y))
    assert both[0, 1] == pytest.approx(1)


def test_a_lens_that_is_the_model_is_fully_faithful(model):
    class Oracle(lenses.Lens):
        """Goes on as the model does."""

        def log_probs(self, x, layer):
            kept = [(k[self.rows], v[self.rows]) for k, v in self.past]
            return self.model.log_probs(ff.after(self.model, x, layer, kept))

    oracle = Oracle(model, "logit", {})
    probe = ff.Probe(model, tokens_of(model, 6), 1, {"oracle": oracle})
    oracle.past, v = probe.past, F.normalize(torch.randn(9, model.d_model), dim=-1)

    def move(i, j):
        oracle.rows = i
        return ff.steer(probe.resid[i], v[j], torch.ones(6, 9)[i, j])

    oracle.rows = slice(0, 6)
    found = probe.react(move, 9)
    here = ff.row(found, "oracle", SMALL)
    assert [here[key] for key in ff.MEASURES] == pytest.approx([1, 1, 1], abs=1e-4)
    assert here["kl"] == pytest.approx(here["kl_lens"])


def test_reactions_equal_whole_runs_and_vanish_without_steering(model):
    tokens = tokens_of(model, 6, 8)
    data = lenses.streams(model, tokens)
    lens = lenses.train(model, data, "mean")
    probe, v = ff.Probe(model, tokens, 1, {"mean": lens}), F.normalize(torch.randn(5, model.d_model), dim=-1)
    size = torch.randn(6, 5)
    found = probe.react(lambda i, j: ff.steer(probe.resid[i], v[j], size[i, j]), 5)

    def edit(site, i, value):
        return value if (site, i) != ("resid", 1) else value + F.pad((size[:, 2, None] * v[2])[:, None], (0, 0, 7, 0))

    whole = model(tokens, torch.full((6,), 7), edit)
    torch.testing.assert_close(found["model"][:, 2], stats.kl(model.log_probs(data.resid[-1]), whole), rtol=1e-3, atol=1e-5)
    plain, moved = lens.log_probs(data.resid[1], 1), lens.log_probs(data.resid[1] + size[:, 2, None] * v[2], 1)
    torch.testing.assert_close(found["mean"][:, 2], stats.kl(plain, moved), rtol=1e-3, atol=1e-5)
    none = probe.react(lambda i, j: ff.steer(probe.resid[i], v[j], 0 * size[i, j]), 5)
    assert none["model"].max() < 1e-9 and none["mean"].max() < 1e-9


def test_passes_do_not_change_reactions(model, monkeypatch):
    probe = ff.Probe(model, tokens_of(model, 6), 1, {})
    x = probe.resid[:, None] + torch.randn(6, 5, model.d_model)
    whole = probe.react(lambda i, j: x[i, j], 5)["model"]
    monkeypatch.setattr(ff, "PASS", 4)
    torch.testing.assert_close(probe.react(lambda i, j: x[i, j], 5)["model"], whole, rtol=1e-3, atol=1e-6)


def test_calibrated_strength_gives_the_target(model):
    probe = ff.Probe(model, tokens_of(model, 8), 1, {})
    v, draws = F.normalize(torch.randn(20, model.d_model), dim=-1), torch.randn(8, 20)
    for target in (0.2, 0.02):
        c = ff.calibrate(probe, v, draws, target)
        got = probe.react(lambda i, j, c=c: ff.steer(probe.resid[i], v[j], c * draws[i, j]), 20)["model"].mean()
        assert got.item() == pytest.approx(target, rel=0.05)


def made(model, seed=0):
    tokens = tokens_of(model, 48)
    data = lenses.streams(model, tokens)
    few = lenses.LensSettings(steps=20, batch=16, check=10, seed=seed)
    tuned, oca = (lenses.train(model, data, kind, settings=few) for kind in ("tuned", "oca"))
    linear = lenses.train(model, data, "linear", settings=few, of=oca)
    return {"tuned": tuned, "oca": oca}, {"tuned": tuned, "oca": linear}, data, tokens, tokens_of(model, 48, seed=1)


def test_table_has_every_perturbation_in_every_basis_and_comes_back(model):
    table = ff.faithfulness(model, *made(model), layers=[0, 2], settings=SMALL)
    cells = table.groupby(["layer", "perturbation", "basis", "lens"]).size()
    assert (cells == 1).all() and set(table.perturbation) == {*ff.PERTURBATIONS, *ff.PUBLISHED}
    assert len(cells) == 2 * 2 * (2 + 2 * 3 + 2 * 3)  # layers, lenses: random, bases, published
    for key in ff.MEASURES:
        assert table[key].between(-1 - 1e-9, 1 + 1e-9).all() and (table[f"{key}_low"] <= table[f"{key}_high"]).all()
    steered = table[table.perturbation.str.startswith("steer")]
    assert (steered.kl / 0.2).between(0.3, 3).all() and steered.strength.gt(0).all()
    assert table[table.perturbation == "resample_basis"].n.eq(24).all()
    again = ff.faithfulness(model, *made(model), layers=[0, 2], settings=SMALL)
    assert again.equals(table)


def test_bad_input_is_named(model):
    lens, maps, data, train, test = made(model)
    for change, words in (
        ({"maps": {"oca": lens["oca"]}}, "'oca' has none"),
        ({"layers": [3]}, "has 0 … 2"),
        ({"data": lenses.streams(model, train[:20])}, "needs more contexts than that, not 20"),
        ({"test": test[:10]}, "does not fit 48 train and 10 test"),
    ):
        whole = {"lenses": lens, "maps": maps, "data": data, "train": train, "test": test, "settings": SMALL, **change}
        with pytest.raises(ValueError, match=words):
            ff.faithfulness(model, **whole)
