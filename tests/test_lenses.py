"""Lenses: what they must equal exactly, what training may change, and which files they refuse."""

import inspect

import pytest
import torch
from conftest import tokens_of
from safetensors.torch import save_file

from oa_utils import lenses, stats, store
from oa_utils.models import load_model
from oa_utils.texts import contexts

FEW = {"steps": 30, "batch": 16, "look_every": 10}
NONE = {"steps": 0}


@pytest.fixture(scope="module")
def tiny_data(tiny):
    return {
        part: lenses.read(tiny, contexts(tiny, n, 25, part=part))
        for part, n in (("train", 512), ("validation", 128))
    }


def all_kinds(model, data, settings=FEW):
    trained = {
        kind: lenses.train(model, data, kind, **settings)
        for kind in lenses.KINDS
        if kind != "linear"
    }
    return trained | {"linear": lenses.train(model, data, "linear", of=trained["oca"], **settings)}


# ---- reading


def test_readings_are_the_last_token_of_each_layer(model):
    tokens = tokens_of(model)
    last = torch.arange(40) % 5 + 4
    data = lenses.read(model, tokens, last)
    one = lenses.read(model, tokens[3:4, : last[3] + 1])  # padding on the right changes nothing
    torch.testing.assert_close(data.resid[:, 3], one.resid[:, 0], rtol=0, atol=1e-4)
    torch.testing.assert_close(
        model.log_probs(data.resid[-1]), model(tokens, last), rtol=0, atol=1e-4
    )
    # 40 contexts: the pool holds all
    torch.testing.assert_close(data.mean, data.pool.mean(1), rtol=0, atol=1e-5)
    spread = data.pool.std(1, correction=0)
    torch.testing.assert_close(data.spread, spread, rtol=1e-3, atol=1e-5)


def test_several_places_of_a_context_are_readings_of_their_own(model, monkeypatch):
    tokens = tokens_of(model, 6)
    places = torch.tensor([[3, 8, 5]]).expand(6, -1)
    monkeypatch.setattr("oa_utils.machine.PASS_TOKENS", 20)  # two contexts in a pass
    monkeypatch.setattr(lenses, "POOL", 10)
    data = lenses.read(model, tokens, places)
    assert len(data) == 18 and data.pool.shape[1] == 10
    for k, place in enumerate((3, 8, 5)):
        alone = lenses.read(model, tokens[:, : place + 1])
        part = data.resid[:, 6 * k : 6 * (k + 1)]
        torch.testing.assert_close(part, alone.resid, rtol=0, atol=1e-4)
        pooled = data.pool[:, 6 * k : 6 * (k + 1)]
        want = alone.pool[:, : pooled.shape[1]]
        torch.testing.assert_close(pooled, want, rtol=0, atol=1e-4)


def test_several_readings_of_a_context_are_its_last_token_and_others(model):
    tokens = tokens_of(model, 6)
    data = lenses.read_several(model, tokens, 3)
    assert len(data) == 18
    last = lenses.read(model, tokens)
    torch.testing.assert_close(data.resid[:, :6], last.resid, rtol=0, atol=1e-4)
    length = tokens.shape[1]
    everything = lenses.read_several(model, tokens[:1], length - 1).resid
    each = [lenses.read(model, tokens[:1, : i + 1]).resid[:, 0] for i in range(1, length)]
    torch.testing.assert_close(everything.sum(1), torch.stack(each, 1).sum(1), rtol=0, atol=1e-3)


def test_readings_are_named_by_what_is_in_them(gpt2):
    tokens = tokens_of(gpt2)
    data = lenses.read(gpt2, tokens)
    assert data.fingerprint == lenses.read(gpt2, tokens).fingerprint
    assert data.fingerprint != lenses.read(gpt2, tokens.flip(0)).fingerprint
    assert data.fingerprint != data.part(slice(20)).fingerprint
    assert data.part(slice(20)).fingerprint != data.part(slice(20, None)).fingerprint


# ---- what a lens says


def test_every_lens_is_the_model_at_its_end(model):
    data = lenses.read(model, tokens_of(model))
    end = model.log_probs(data.resid[-1])
    for lens in all_kinds(model, data).values():
        assert torch.equal(lens.log_probs(data.resid[-1], model.n_layers), end)
        losses = lens.losses(data)
        assert losses.shape == (model.n_layers + 1, 40)
        assert (losses[-1] == 0).all() and (losses[:-1].mean(1) > 0).all()


def test_losses_are_kl_from_the_model_to_log_probs(model):
    data = lenses.read(model, tokens_of(model))
    end = model.log_probs(data.resid[-1])
    for lens in all_kinds(model, data).values():
        each = [stats.kl(end, lens.log_probs(data.resid[i], i)) for i in range(model.n_layers)]
        torch.testing.assert_close(lens.losses(data)[:-1], torch.stack(each), rtol=1e-3, atol=1e-4)


def test_true_attention_outputs_reproduce_the_model(model):
    data = lenses.read(model, tokens_of(model, 1))  # the mean over one context is its own attention
    end = model.log_probs(data.resid[-1])
    for kind in ("mean", "resample"):
        lens = lenses.train(model, data, kind)
        for layer in range(model.n_layers):
            got = lens.log_probs(data.resid[layer], layer)
            torch.testing.assert_close(got, end, rtol=0, atol=1e-4)


def test_each_start_uses_only_its_own_constants(model):
    data = lenses.read(model, tokens_of(model))
    lens = lenses.train(model, data, "oca", **FEW)
    before = lens.losses(data)
    constants = lens.tensors["constants"]
    constants[1, 1:] += torch.randn(32)
    changed = (lens.losses(data) - before).abs().amax(1) > 1e-6
    assert changed.tolist() == [i == 1 for i in range(model.n_layers + 1)]
    used = torch.ones(3, 3).triu()[..., None] > 0
    constants.copy_(torch.where(used, constants, torch.nan))
    assert lens.losses(data).isfinite().all()  # blocks before the start are never read


def test_layers_together_equal_layers_alone(model):
    data = lenses.read(model, tokens_of(model, 8))
    for lens in all_kinds(model, data).values():
        together = lens.ends(data.resid[:-1], range(model.n_layers))
        for i in range(model.n_layers):
            alone = lens.ends(data.resid[i : i + 1], [i])[0]
            torch.testing.assert_close(together[i], alone, rtol=1e-4, atol=1e-4)


def test_no_attention_is_evaluated(model, monkeypatch):
    data = lenses.read(model, tokens_of(model))
    monkeypatch.setattr(
        type(model), "attention", lambda *args, **options: pytest.fail("attention was evaluated")
    )
    lenses.train(model, data, "oca", **FEW).losses(data)
    with pytest.raises(pytest.fail.Exception, match="attention was evaluated"):
        lenses.read(model, tokens_of(model))  # as it must be here


def test_parameters_are_counted(model):
    data = lenses.read(model, tokens_of(model))
    counts = {kind: lens.n_parameters for kind, lens in all_kinds(model, data).items()}
    assert counts == {
        "logit": 0,
        "tuned": 3 * 33 * 32,
        "mean": 96,
        "resample": 0,
        "oca": 6 * 32,
        "linear": 3 * 33 * 32,
    }


# ---- training


def test_settings_are_keywords_of_train():
    assert {"steps", "look_every", "batch"} <= set(inspect.signature(lenses.train).parameters)


def test_oca_before_training_is_the_mean_lens_and_tuned_the_logit_lens(model):
    data = lenses.read(model, tokens_of(model))
    for trained, plain in (("oca", "mean"), ("tuned", "logit")):
        start = lenses.train(model, data, trained, data, start="identity", **NONE)
        same = lenses.train(model, data, plain, data)
        torch.testing.assert_close(start.losses(data), same.losses(data), rtol=1e-4, atol=1e-5)
        noted = [row["start"] for row in start.training["rows"]]
        assert noted == pytest.approx(same.losses(data)[:-1].mean(1).tolist(), abs=1e-4)


def test_each_layer_starts_from_the_best_of_its_starts(model):
    data = lenses.read(model, tokens_of(model, 64))
    trainer = lenses.LinearTrainer(model, data)
    layers = range(model.n_layers)
    starts = trainer.starts(lenses.LensSettings())
    assert list(starts) == ["identity", "shift", "ridge"]
    each = {name: trainer.losses(raw, data.resid, layers).mean(1) for name, raw in starts.items()}
    lens = lenses.train(model, data, "tuned", data, **NONE)
    best = torch.stack(list(each.values())).min(0).values
    torch.testing.assert_close(lens.losses(data)[:-1].mean(1), best, rtol=1e-3, atol=1e-4)
    for i, row in enumerate(lens.training["rows"]):
        assert row["start"] == pytest.approx(float(each[row["from"]][i]), abs=1e-5)


def test_ridge_is_the_regression_onto_the_end(model):
    data = lenses.read(model, tokens_of(model, 400))
    trainer = lenses.LinearTrainer(model, data)
    lens = trainer.lens(trainer.starts(lenses.LensSettings())["ridge"])
    x = data.resid[1].double()
    centred = x - x.mean(0)
    scaled = centred / centred.std(0)
    y = data.resid[-1].double()
    normal = scaled.T @ scaled / len(x) + lenses.RIDGE * torch.eye(model.d_model)
    slope = torch.linalg.solve(normal, scaled.T @ (y - y.mean(0)) / len(x))
    expected = scaled @ slope + y.mean(0)
    got = lens.ends(data.resid[1:2], [1])[0].double()
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


def test_a_linear_copy_starts_by_regression_onto_ocas_ends(model):
    data = lenses.read(model, tokens_of(model, 400))
    oca = lenses.train(model, data, "oca", data, **FEW)
    trainer = lenses.LinearTrainer(model, data, oca)
    lens = trainer.lens(trainer.starts(lenses.LensSettings())["ridge"])
    layers = list(range(model.n_layers))
    ends = oca.ends(data.resid[:-1], layers)
    error = (lens.ends(data.resid[:-1], layers) - ends).square().mean((1, 2))
    assert (error < 0.5 * (ends - ends.mean(1, keepdim=True)).square().mean((1, 2))).all()


def test_the_rate_rises_then_falls_to_nothing():
    settings = lenses.LensSettings(steps=100)
    rates = [settings.rate(step) for step in range(100)]
    assert rates[0] == pytest.approx(0.2) and max(rates) == rates[4] and 0 < rates[-1] < 0.011


def test_random_start_is_standard_normal(model):
    data = lenses.read(model, tokens_of(model))
    lens = lenses.train(model, data, "tuned", steps=0, start="random")
    for value in lens.tensors.values():
        assert abs(float(value.mean())) < 0.3
        assert float(value.std()) == pytest.approx(1, abs=0.2)


def test_training_never_ends_above_its_start(model):
    data = lenses.read(model, tokens_of(model, 64))
    for kind, plain in (("oca", "mean"), ("tuned", "logit")):
        trained = lenses.train(model, data, kind, data, start="identity", **FEW)
        trained = trained.losses(data).mean(1)
        start = lenses.train(model, data, plain).losses(data).mean(1)
        assert (trained <= start + 1e-5).all()
        assert trained[:-1].sum() < 0.98 * start[:-1].sum()


def test_linear_copies_oca_and_not_the_model(model):
    data = lenses.read(model, tokens_of(model, 64))
    oca = lenses.train(model, data, "oca", data, **NONE)
    settings = {**FEW, "steps": 200, "lr": 0.01}
    linear = lenses.train(model, data, "linear", data, of=oca, **settings)
    for layer in range(model.n_layers):
        target = oca.log_probs(data.resid[layer], layer)
        before = stats.kl(target, model.log_probs(data.resid[layer])).mean()
        after = stats.kl(target, linear.log_probs(data.resid[layer], layer)).mean()
        assert after < 0.7 * before
        assert linear.training["rows"][layer]["loss"] == pytest.approx(float(after), abs=1e-3)


def test_gradient_of_a_step_is_that_of_the_mean_kl(model):
    data = lenses.read(model, tokens_of(model, 6))
    full = model.log_probs(data.resid[-1])
    for kind in ("oca", "tuned"):
        trainer = lenses.TRAINERS[kind](model, data)
        trainer.mlp_passes = 10**9  # one context at a time
        start = trainer.starts(lenses.LensSettings(start="identity"))
        raw = {name: value.requires_grad_() for name, value in next(iter(start.values())).items()}
        trainer.losses(raw, data.resid, range(3), train=True)
        got = {name: value.grad.clone() for name, value in raw.items()}
        lens = trainer.lens(raw)
        total = sum(stats.kl(full, lens.log_probs(data.resid[i], i)).mean() for i in range(3))
        gradients = torch.autograd.grad(total, list(raw.values()))
        for name, gradient in zip(raw, gradients, strict=True):
            torch.testing.assert_close(got[name], gradient, rtol=1e-3, atol=1e-5)


def test_a_killed_training_goes_on_to_the_same_lens(model, tmp_path, monkeypatch):
    data = lenses.read(model, tokens_of(model, 64))
    honest = lenses.Trainer.losses
    for kind in ("oca", "tuned"):
        whole = lenses.train(model, data, kind, **FEW)
        steps = []

        def dies(self, raw, resid, layers, train=False, steps=steps):
            steps.append(train)
            if sum(steps) == 17:
                raise KeyboardInterrupt
            return honest(self, raw, resid, layers, train)

        with monkeypatch.context() as patched:
            patched.setattr(store.Snapshots, "due", lambda self: True)
            patched.setenv("OA_STORE", str(tmp_path / kind))
            patched.setattr(lenses.Trainer, "losses", dies)
            with pytest.raises(KeyboardInterrupt):
                lenses.train(model, data, kind, **FEW)
            again = lenses.train(model, data, kind, **FEW)
        assert steps.count(True) == 17 + 14  # from step 16 on
        assert again.fingerprint == whole.fingerprint and again.training == whole.training


def test_a_trained_lens_comes_from_the_store_and_other_contexts_give_another(gpt2, monkeypatch):
    data = lenses.read(gpt2, tokens_of(gpt2))
    first = lenses.train(gpt2, data, "oca", **FEW)
    monkeypatch.setattr(lenses, "train_layers", lambda *args: pytest.fail("trained again"))
    again = lenses.train(gpt2, lenses.read(gpt2, tokens_of(gpt2)), "oca", **FEW)
    assert again.fingerprint == first.fingerprint and again.training == first.training
    with pytest.raises(pytest.fail.Exception, match="trained again"):
        lenses.train(gpt2, tokens_of(gpt2, seed=1), "oca", **FEW)


def test_a_layer_without_gain_goes_on_from_its_best_with_smaller_steps(model):
    """At a rate that throws the last layer off, it still ends below its start."""
    data = lenses.read(model, tokens_of(model, 32))
    settings = {"steps": 200, "batch": 32, "look_every": 5, "lr": 100.0, "start": "identity"}
    lens = lenses.train(model, data, "tuned", data, **settings)
    assert lens.training["steps"] == 200
    rows = lens.training["rows"]
    kept = lens.losses(data)[:-1].mean(1).tolist()
    assert kept == pytest.approx([row["loss"] for row in rows], rel=1e-3)
    _, early = lens.training["curve"][2]
    assert early[-1] == rows[-1]["start"]  # nothing was gained while steps were large
    assert rows[-1]["loss"] < rows[-1]["start"]
    step, best = lens.training["curve"][-1]
    assert step == lens.training["steps"] and best == [row["loss"] for row in rows]


def test_on_tiny_oca_beats_the_mean_and_losses_fall_with_depth(tiny, tiny_data):
    data = tiny_data["train"]
    held = tiny_data["validation"]
    mean = lenses.train(tiny, data, "mean")
    oca = lenses.train(tiny, data, "oca", held, steps=60, look_every=20)
    resample = lenses.train(tiny, data, "resample").losses(held).mean(1)
    mean_loss = mean.losses(held).mean(1)
    oca_loss = oca.losses(held).mean(1)
    assert (oca_loss <= mean_loss).all() and (mean_loss <= resample).all()
    assert (oca_loss.diff() < 0).all()
    assert oca.losses(data).mean() <= mean.losses(data).mean()


def test_lenses_of_a_half_precision_model_are_computed_in_float32(tiny, tiny_data):
    half = load_model("tiny", dtype=torch.float16)
    data = lenses.read(half, contexts(half, 64, 25, part="validation"))
    assert data.resid.dtype == torch.float32
    whole = lenses.read(tiny, contexts(tiny, 64, 25, part="validation"))
    for kind in ("oca", "tuned"):
        lens = lenses.train(half, data, kind, data, **FEW)
        assert all(value.dtype == torch.float32 for value in lens.tensors.values())
        same = lenses.KINDS[kind](tiny, lens.tensors)
        losses = lens.losses(data)
        assert losses.dtype == torch.float32 and losses.min() > -1e-6
        got = losses.mean(1)
        torch.testing.assert_close(got, same.losses(whole).mean(1), rtol=0.03, atol=1e-3)


# ---- files and errors


def test_saved_lenses_come_back_and_belong_to_one_model(model, gpt2, llama, tmp_path):
    data = lenses.read(model, tokens_of(model))
    other = llama if model is gpt2 else gpt2
    for kind, lens in all_kinds(model, data).items():
        path = tmp_path / f"{kind}.safetensors"
        lens.save(path)
        again = lenses.load(path, model)
        assert type(again) is type(lens) and again.fingerprint == lens.fingerprint
        assert torch.equal(again.losses(data), lens.losses(data))
        assert again.training == lens.training
        with pytest.raises(ValueError, match=f"belongs to '{model.name}'.*not to '{other.name}'"):
            lenses.load(path, other)
    save_file({"x": torch.zeros(1)}, tmp_path / "foreign.safetensors")
    (tmp_path / "text").write_text("no lens")
    constants = torch.zeros(3, 3, 32)
    head = {
        "kind": "oca",
        "model": model.name,
        "fingerprint": model.fingerprint,
        "training": {},
    }
    wrong = {
        "shape": ({"constants": constants[:2]}, "oca lens holds"),
        "name": ({"W": constants}, "oca lens holds"),
        "nan": ({"constants": constants / 0}, "not finite"),
        "whole": ({"constants": constants.long()}, "not finite"),
    }
    for name, (tensors, words) in wrong.items():
        store.write_sealed(tmp_path / name, head, tensors)
        with pytest.raises(store.BadFile, match=words):
            lenses.load(tmp_path / name, model)
    store.write_sealed(tmp_path / "headless", {"kind": "oca"}, {"constants": constants})
    with pytest.raises(store.BadFile, match="is not a lens"):
        lenses.load(tmp_path / "headless", model)
    for name in ("foreign.safetensors", "text"):
        with pytest.raises(ValueError, match="is not a file that oa_utils wrote"):
            lenses.load(tmp_path / name, model)


def test_bad_input_is_named(model):
    data = lenses.read(model, tokens_of(model))
    lens = lenses.train(model, data, "logit")
    for call, words in (
        (lambda: lens.log_probs(data.resid[0], 4), r"layers 0 … 3 \(its end\), not 4"),
        (lambda: lens.log_probs(torch.zeros(2, 5), 0), "has 32 coordinates, not 5"),
        (lambda: lenses.train(model, data, "tunde"), "kinds are logit, tuned"),
        (lambda: lenses.train(model, data, "tuned", start="zero"), "starts best, identity, random"),
        (lambda: lenses.train(model, data, "tuned", look_every=0), "look_every must be at least 1"),
        (lambda: lenses.train(model, data, "linear"), "copies an OCA lens"),
        (lambda: lenses.train(model, data, "tuned", of=lens), "copies an OCA lens"),
        (lambda: lenses.train(model, torch.zeros(3)), "contexts are token ids"),
        (lambda: lenses.train(model, tokens_of(model, 1)), "one context is too few"),
        (lambda: lenses.read_several(model, tokens_of(model), 99), "positions to read"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
