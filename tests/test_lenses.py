"""Lenses: what they must equal exactly, what training may change, and which files they refuse."""

from dataclasses import replace

import pytest
import torch
from conftest import tokens_of
from safetensors.torch import save_file

from oa_utils import lenses, runs, stats
from oa_utils.texts import contexts

FEW = lenses.LensSettings(steps=30, batch=16, check=10)


@pytest.fixture(scope="module")
def tiny_data(tiny):
    return [lenses.streams(tiny, contexts(tiny, n, 25, part=part)) for n, part in ((512, "train"), (128, "validation"))]


def all_kinds(model, data, settings=FEW):
    made = {kind: lenses.train(model, data, kind, settings=settings) for kind in lenses.KINDS[:-1]}
    return made | {"linear": lenses.train(model, data, "linear", settings=settings, of=made["oca"])}


def test_streams_are_the_last_token_of_each_layer(model):
    tokens, last = tokens_of(model), torch.arange(40) % 5 + 4
    data = lenses.streams(model, tokens, last)
    one = lenses.streams(model, tokens[3:4, : last[3] + 1])  # padding on the right changes nothing
    torch.testing.assert_close(data.resid[:, 3], one.resid[:, 0], rtol=0, atol=1e-4)
    torch.testing.assert_close(model.log_probs(data.resid[-1]), model(tokens, last), rtol=0, atol=1e-4)
    torch.testing.assert_close(data.mean, data.pool.mean(1), rtol=0, atol=1e-5)  # 40 contexts: the pool holds all
    torch.testing.assert_close(data.spread, data.pool.var(1, correction=0).mean(-1).sqrt())


def test_every_lens_is_the_model_at_its_end(model):
    data = lenses.streams(model, tokens_of(model))
    for lens in all_kinds(model, data).values():
        assert torch.equal(lens.log_probs(data.resid[-1], model.n_layers), model.log_probs(data.resid[-1]))
        assert (losses := lens.losses(data)).shape == (model.n_layers + 1, 40)
        assert (losses[-1] == 0).all() and (losses[:-1].mean(1) > 0).all()


def test_losses_are_kl_from_the_model_to_log_probs(model):
    data = lenses.streams(model, tokens_of(model))
    for lens in all_kinds(model, data).values():
        each = [stats.kl(model.log_probs(data.resid[-1]), lens.log_probs(data.resid[i], i)) for i in range(model.n_layers)]
        torch.testing.assert_close(lens.losses(data)[:-1], torch.stack(each), rtol=1e-3, atol=1e-4)


def test_true_attention_outputs_reproduce_the_model(model):
    data = lenses.streams(model, tokens_of(model, 1))  # the mean over one context is its own attention
    for kind in ("mean", "resample"):
        lens = lenses.train(model, data, kind)
        for layer in range(model.n_layers):
            got = lens.log_probs(data.resid[layer], layer)
            torch.testing.assert_close(got, model.log_probs(data.resid[-1]), rtol=0, atol=1e-4)


def test_oca_before_training_is_the_mean_lens_and_tuned_the_logit_lens(model):
    data = lenses.streams(model, tokens_of(model))
    none = lenses.LensSettings(steps=0)
    for trained, plain in (("oca", "mean"), ("tuned", "logit")):
        start, same = (lenses.train(model, data, kind, data, none) for kind in (trained, plain))
        torch.testing.assert_close(start.losses(data), same.losses(data), rtol=1e-4, atol=1e-5)
        assert [row["start"] for row in start.about["rows"]] == pytest.approx(same.losses(data)[:-1].mean(1).tolist(), abs=1e-4)


def test_random_start_is_standard_normal(model):
    data = lenses.streams(model, tokens_of(model))
    lens = lenses.train(model, data, "tuned", settings=lenses.LensSettings(steps=0, start="random"))
    for value in lens.tensors.values():
        assert abs(float(value.mean())) < 0.3 and float(value.std()) == pytest.approx(1, abs=0.2)


def test_training_never_ends_above_its_start(model):
    data = lenses.streams(model, tokens_of(model, 64))
    for kind, plain in (("oca", "mean"), ("tuned", "logit")):
        trained = lenses.train(model, data, kind, data, FEW).losses(data).mean(1)
        assert (trained <= lenses.train(model, data, plain).losses(data).mean(1) + 1e-5).all()
        assert trained[:-1].sum() < 0.98 * lenses.train(model, data, plain).losses(data).mean(1)[:-1].sum()


def test_linear_copies_oca_and_not_the_model(model):
    data = lenses.streams(model, tokens_of(model, 64))
    oca = lenses.train(model, data, "oca", data, lenses.LensSettings(steps=0))
    linear = lenses.train(model, data, "linear", data, replace(FEW, steps=200, lr=0.01), of=oca)
    for layer in range(model.n_layers):
        target = oca.log_probs(data.resid[layer], layer)
        before = stats.kl(target, model.log_probs(data.resid[layer])).mean()
        after = stats.kl(target, linear.log_probs(data.resid[layer], layer)).mean()
        assert after < 0.7 * before
        assert linear.about["rows"][layer]["loss"] == pytest.approx(float(after), abs=1e-3)


def test_each_start_uses_only_its_own_constants(model):
    data = lenses.streams(model, tokens_of(model))
    lens = lenses.train(model, data, "oca", settings=FEW)
    before = lens.losses(data)
    lens.tensors["constants"][1, 1:] += torch.randn(32)
    changed = (lens.losses(data) - before).abs().amax(1) > 1e-6
    assert changed.tolist() == [i == 1 for i in range(model.n_layers + 1)]
    lens.tensors["constants"].copy_(torch.where(torch.ones(3, 3).triu()[..., None] > 0, lens.tensors["constants"], torch.nan))
    assert lens.losses(data).isfinite().all()  # blocks before the start are never read


def test_layers_together_equal_layers_alone(model):
    data = lenses.streams(model, tokens_of(model, 8))
    for lens in all_kinds(model, data).values():
        together = lens.ends(data.resid[:-1], range(model.n_layers))
        for i in range(model.n_layers):
            torch.testing.assert_close(together[i], lens.ends(data.resid[i : i + 1], [i])[0], rtol=1e-4, atol=1e-4)


def test_gradient_of_a_step_is_that_of_the_mean_kl(model):
    data = lenses.streams(model, tokens_of(model, 6))
    for kind in ("oca", "tuned"):
        trainer = lenses.Trainer(model, data, FEW, kind)
        trainer.bytes = 1e18  # one context at a time
        trainer.losses(data.resid, range(3), True)
        got = {name: value.grad.clone() for name, value in trainer.raw.items()}
        lens, full = trainer.lens(trainer.raw), model.log_probs(data.resid[-1])
        total = sum(stats.kl(full, lens.log_probs(data.resid[i], i)).mean() for i in range(3))
        for name, grad in zip(trainer.raw, torch.autograd.grad(total, list(trainer.raw.values())), strict=True):
            torch.testing.assert_close(got[name], grad, rtol=1e-3, atol=1e-5)


def test_no_attention_is_evaluated(model, monkeypatch):
    data = lenses.streams(model, tokens_of(model))
    monkeypatch.setattr(type(model), "attention", lambda *args: pytest.fail("attention was evaluated"))
    lenses.train(model, data, "oca", settings=FEW).losses(data)


def test_a_killed_training_goes_on_to_the_same_lens(model, tmp_path, monkeypatch):
    data = lenses.streams(model, tokens_of(model, 64))
    for kind in ("oca", "tuned"):
        whole = lenses.train(model, data, kind, settings=FEW)
        monkeypatch.setattr(runs.Snapshots, "due", lambda self: True)
        monkeypatch.setenv("OA_STORE", str(tmp_path / kind))
        real, calls = lenses.Trainer.losses, []

        def dies(self, resid, layers, train, real=real, calls=calls):
            calls.append(train)
            if sum(calls) == 17:
                raise KeyboardInterrupt
            return real(self, resid, layers, train)

        monkeypatch.setattr(lenses.Trainer, "losses", dies)
        with pytest.raises(KeyboardInterrupt):
            lenses.train(model, data, kind, settings=FEW)
        again = lenses.train(model, data, kind, settings=FEW)
        assert calls.count(True) == 17 + 20  # from step 10 on
        for name, value in whole.tensors.items():
            torch.testing.assert_close(again.tensors[name], value, rtol=1e-4, atol=1e-5)
        monkeypatch.undo()


def test_a_layer_without_gain_stops_and_keeps_its_best(model):
    data = lenses.streams(model, tokens_of(model, 16))
    other = lenses.streams(model, tokens_of(model, 16, seed=1))
    lens = lenses.train(model, data, "tuned", other, lenses.LensSettings(steps=500, batch=4, check=5, patience=2, lr=1.0))
    assert lens.about["steps"] < 500
    kept = lens.losses(other)[:-1].mean(1).tolist()
    assert kept == pytest.approx([row["loss"] for row in lens.about["rows"]], rel=1e-3)
    assert all(row["loss"] <= row["start"] for row in lens.about["rows"])


def test_saved_lenses_come_back_and_belong_to_one_model(model, gpt2, llama, tmp_path):
    data, other = lenses.streams(model, tokens_of(model)), llama if model is gpt2 else gpt2
    for kind, lens in all_kinds(model, data).items():
        lens.save(path := tmp_path / f"{kind}.safetensors")
        again = lenses.load(path, model)
        assert torch.equal(again.losses(data), lens.losses(data)) and again.about.keys() == lens.about.keys()
        with pytest.raises(ValueError, match=f"belongs to '{model.name}'.*not to '{other.name}'"):
            lenses.load(path, other)
    save_file({"x": torch.zeros(1)}, tmp_path / "foreign.safetensors")
    (tmp_path / "text").write_text("no lens")
    for name in ("foreign.safetensors", "text"):
        with pytest.raises(ValueError, match="is not a lens"):
            lenses.load(tmp_path / name, model)


def test_parameters_are_counted(model):
    counts = {kind: lens.n_parameters for kind, lens in all_kinds(model, lenses.streams(model, tokens_of(model))).items()}
    assert counts == {"logit": 0, "tuned": 3 * 33 * 32, "mean": 96, "resample": 0, "oca": 6 * 32, "linear": 3 * 33 * 32}


def test_bad_input_is_named(model):
    data = lenses.streams(model, tokens_of(model))
    lens = lenses.train(model, data, "logit")
    for call, words in (
        (lambda: lens.log_probs(data.resid[0], 4), r"layers 0 … 3 \(its end\), not 4"),
        (lambda: lens.log_probs(torch.zeros(2, 5), 0), "has 32 coordinates, not 5"),
        (lambda: lenses.train(model, data, "tunde"), "kinds are logit, tuned"),
        (lambda: lenses.train(model, data, "tuned", settings=lenses.LensSettings(start="zero")), "starts identity, random"),
        (lambda: lenses.train(model, data, "linear"), "copies an OCA lens"),
        (lambda: lenses.train(model, data, "tuned", of=lens), "copies an OCA lens"),
        (lambda: lenses.train(model, torch.zeros(3)), "contexts are token ids"),
        (lambda: lenses.train(model, tokens_of(model, 1)), "one context is too few"),
    ):
        with pytest.raises(ValueError, match=words):
            call()


def test_on_tiny_oca_beats_the_mean_and_losses_fall_with_depth(tiny, tiny_data):
    data, held = tiny_data
    oca = lenses.train(tiny, data, "oca", held, lenses.LensSettings(steps=60, check=20))
    each = {kind: lenses.train(tiny, data, kind).losses(held).mean(1) for kind in ("mean", "resample")}
    each["oca"] = oca.losses(held).mean(1)
    assert (each["oca"] <= each["mean"]).all() and (each["mean"] <= each["resample"]).all()
    assert (each["oca"].diff() < 0).all()
    assert oca.losses(data).mean() <= lenses.train(tiny, data, "mean").losses(data).mean()
