"""Tracing against a plain recomputation of every copy with `Model.run`, and identities it keeps."""

import inspect
import math
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from conftest import random_gpt2, random_llama
from joblib.externals.loky.backend import reduction  # how workers are sent things

from oa_utils import machine, models, stats, store, tracing
from oa_utils.models import recording, wrap
from oa_utils.tasks import Task
from oa_utils.tracing import (
    NOTHING,
    Prompts,
    TraceSettings,
    first_constant,
    spread,
    trace,
    trace_prompt,
    unpatched_constant,
    window_of,
)

VOCAB = 60
WIDTH = 10
N = 14
SIGMA = torch.linspace(0.05, 0.2, 32)
QUICK = {"draws": 2, "steps": 12, "batch": 4, "look_every": 4}


def make_hf(family):
    """Four layers that all matter, and predictions that are far from even."""
    if family == "gpt2":
        hf = random_gpt2(vocab=VOCAB, n_layer=4)
    else:
        hf = random_llama(vocab=VOCAB, num_hidden_layers=4)
    for name, weight in hf.named_parameters():
        in_a_block = ".h." in name or ".layers." in name
        weight.data *= 2 if in_a_block and weight.ndim == 2 else 1
    unembedding = 0.7 * torch.randn(VOCAB, 32, generator=machine.generator(5))
    hf.lm_head.weight = torch.nn.Parameter(unembedding)
    return hf


def make(family):
    return wrap(make_hf(family), name=f"tracing-{family}", device="cpu")


@pytest.fixture(scope="module")
def two_models():
    return {family: make(family) for family in ("gpt2", "llama")}


@pytest.fixture(params=["gpt2", "llama"])
def model(request, two_models):
    return two_models[request.param]


@pytest.fixture
def small(two_models):
    """One model, for what does not depend on the family."""
    return two_models["gpt2"]


def hand_made(n=N, seed=1):
    """Prompts of several lengths; subjects at the start, in the middle and at the very end, of one
    to three tokens."""
    rng = machine.generator(seed)
    tokens = torch.randint(2, VOCAB, (n, WIDTH), generator=rng)
    last = torch.randint(4, WIDTH, (n,), generator=rng)
    tokens[:, 0] = 1
    first = 1 + torch.arange(n) % 3
    subject = torch.stack([first, first + 1 + torch.arange(n) % 3], 1)
    subject[0] = torch.tensor([1, last[0] + 1])
    subject[1] = torch.stack([last[1], last[1] + 1])
    subject[:, 1] = torch.minimum(subject[:, 1], last + 1)
    blank = torch.full((n, 1), -1)
    return Task(
        name="hand",
        tokens=tokens,
        last=last,
        right=blank,
        wrong=blank,
        part=torch.arange(n) % 2 * 2,
        prompts=("",) * n,
        subject=subject,
        relation=("r",) * n,
    )


@pytest.fixture(scope="module")
def task():
    return hand_made()


def one_setting(
    model, facts, kind="mlp", position="last", window=1, method="oat", sigma=None, **settings
):
    """One setting with all that is stored."""
    setting = tracing.Setting(kind, position, window, method, tuple(range(model.n_layers)))
    return tracing.run_setting(model, setting, facts, TraceSettings(**settings), sigma)


# ---- the plain form: every copy whole, from its token embeddings


def spans(task):
    at = torch.arange(WIDTH)
    first, end = task.subject.T[..., None]
    return {
        "subject": (at >= first) & (at < end),
        "last_subject": at == end - 1,
        "last": at == task.last[:, None],
    }


def clean_run(model, task):
    """Probability and id of the most likely token, and what was written on the way."""
    kept, keep = recording("resid", "attn", "mlp")
    p, answer = model(task.tokens, task.last, keep).exp().max(-1)
    return p, answer, kept


def plainly(model, task, tok, kind="", layers=(), where=None):
    """p of the clean run's answer, from token embeddings, with clean values put back."""
    _, answer, kept = clean_run(model, task)

    def edit(site, layer, value):
        if site != kind or layer not in layers:
            return value
        return torch.where(where[..., None], kept[site][layer], value)

    out = model.run(model.add_positions(tok), edit=edit)[torch.arange(len(task)), task.last]
    return model.log_probs(out).exp().gather(1, answer[:, None])[:, 0]


def noisy(model, task, draw, std, seed=0):
    """Corrupted token embeddings, drawn prompt by prompt."""
    tok = model.embed_tokens(task.tokens)
    prompts = Prompts(model, task, "mlp")
    for row, (first, end) in enumerate(task.subject.tolist()):
        drawn = prompts.noise(torch.tensor([row]), [draw], std, seed)
        tok[row, first:end] += drawn[0, 0, : end - first]
    return tok


def constant(model, task, value):
    return torch.where(spans(task)["subject"][..., None], value, model.embed_tokens(task.tokens))


def masks(prompts, position):
    """Where a position is, for all prompts and all copies."""
    return getattr(prompts.columns(torch.arange(prompts.n)), position)[None]


# ---- corrupt, restore, read


@pytest.mark.parametrize("keep", [True, False], ids=["clean kept", "clean anew"])
def test_noise_tracing_equals_the_plain_recomputation(model, task, monkeypatch, keep):
    if not keep:
        monkeypatch.setattr(machine, "micro_batch", lambda n, *_: max(1, n // 3))
    monkeypatch.setattr(tracing, "PASS_COLUMNS", 150)
    std = torch.linspace(0.1, 0.4, model.d_model)
    windows = [NOTHING, *(window_of(i, 3, 4) for i in range(4))]
    tok = noisy(model, task, 3, std)
    for kind in ("mlp", "attn"):
        prompts = Prompts(model, task, kind)
        assert (prompts.kept is not None) == keep

        def change(rows, prompts=prompts):
            return prompts.noise(rows, [3] * len(rows), std, 0)

        for position, where in spans(task).items():
            clean, *copies = prompts.measure(change, windows, position)
            torch.testing.assert_close(clean, clean_run(model, task)[0], atol=1e-5, rtol=0)
            p = torch.stack(copies)
            plain = [plainly(model, task, tok, kind, window, where) for window in windows]
            torch.testing.assert_close(p, torch.stack(plain), atol=1e-5, rtol=0)
            assert (p[0] - clean).abs().max() > 0.01
            assert (p - p[0]).abs().max() > 0.01


def test_constants_and_their_gradients_equal_the_plain_recomputation(model, task):
    values = [
        (0.3 * torch.randn(model.d_model, generator=machine.generator(i))).requires_grad_()
        for i in range(5)
    ]
    windows = [NOTHING, *(window_of(i, 3, 4) for i in range(4))]
    rows = torch.arange(N)
    for kind in ("mlp", "attn"):
        prompts = Prompts(model, task, kind)
        for position, where in spans(task).items():
            change = prompts.constant(rows, values)
            p = prompts.probabilities(rows, change, windows, masks(prompts, position))[1:]
            plain = torch.stack(
                [
                    plainly(model, task, constant(model, task, value), kind, window, where)
                    for window, value in zip(windows, values, strict=True)
                ]
            )
            torch.testing.assert_close(p, plain, atol=1e-5, rtol=0)
            weight = torch.rand(p.shape, generator=machine.generator(9))
            grads = [torch.autograd.grad((weight * x).sum(), values) for x in (p, plain)]
            torch.testing.assert_close(*grads, atol=1e-5, rtol=1e-4)


def test_a_prompt_does_not_depend_on_its_batch(model, task):
    tokens = task.tokens[[5], : int(task.last[5]) + 1]
    alone = Prompts(model, replace(task[[5]], tokens=tokens), "mlp")
    together = Prompts(model, task, "mlp")
    windows = [NOTHING, range(1, 2)]
    std = torch.ones(model.d_model)
    change = together.noise(torch.tensor([5]), [0], std, 0)
    one = alone.probabilities(torch.tensor([0]), change, windows, masks(alone, "subject"))

    def noise(rows):
        return together.noise(rows, [0] * len(rows), std, 0)

    everyone = together.measure(noise, windows, "subject")
    torch.testing.assert_close(one[:, 0], everyone[:, 5], atol=1e-5, rtol=0)


@pytest.mark.parametrize("position", ["last", "subject"])
def test_copies_that_share_a_corruption_run_no_more_than_they_change(
    small, task, position, monkeypatch
):
    """They leave the first copy where their window begins; at the last token, one column each."""
    prompts = Prompts(small, task, "mlp")
    windows = [NOTHING, *(window_of(i, 1, 4) for i in range(4))]
    rows = torch.arange(N)
    change = prompts.noise(rows, [0] * N, torch.ones(32), 0)
    real = models.Model.block
    seen = []

    def block(self, layer, stream, *args, **kwargs):
        seen.append((layer, len(stream) // N, stream.shape[1]))
        return real(self, layer, stream, *args, **kwargs)

    monkeypatch.setattr(models.Model, "block", block)
    prompts.probabilities(rows, change, windows, masks(prompts, position))
    width = prompts.width(rows)
    if position == "last":
        assert seen == [(i, 1, width) for i in range(4)] + [(i, i + 2, 1) for i in range(4)]
    else:
        assert seen == [(i, i + 2, width) for i in range(4)]


def test_restoring_everything_restores_the_prediction_and_nothing_restores_nothing(model, task):
    clean, _, _ = clean_run(model, task)
    tok = noisy(model, task, 0, torch.ones(model.d_model))
    corrupted = plainly(model, task, tok)
    assert (clean - corrupted).abs().max() > 0.01
    prompts = Prompts(model, task, "resid")
    rows = torch.arange(N)
    change = prompts.noise(rows, [0] * N, torch.ones(model.d_model), 0)
    everywhere = torch.ones(2, N, prompts.width(rows), dtype=torch.bool)
    for layer in range(4):
        windows = [NOTHING, range(layer, layer + 1)]
        p = prompts.probabilities(rows, change, windows, everywhere)
        torch.testing.assert_close(p[1:], torch.stack([corrupted, clean]), atol=1e-5, rtol=0)


def test_the_position_part_of_the_subject_stays(small, task):
    """A constant takes the place of the subject's tokens, not of their positions."""
    zeros = torch.zeros(small.d_model)
    prompts = Prompts(small, task, "mlp")
    rows = torch.arange(N)
    change = prompts.constant(rows, [zeros])
    p = prompts.probabilities(rows, change, [NOTHING], masks(prompts, "last"))
    expected = plainly(small, task, constant(small, task, zeros))
    torch.testing.assert_close(p[1], expected, atol=1e-5, rtol=0)
    positions = small.add_positions(torch.zeros(1, WIDTH, small.d_model))[0]
    assert positions.std(0).max() > 0.01  # there is something that could be lost


def test_noise_has_three_sigma_on_the_subject_alone(small, task):
    sigma = torch.linspace(0.5, 2, 32)
    prompts = Prompts(small, task, "mlp")
    rows = torch.arange(N)
    subject = prompts.columns(rows).subject
    draws = torch.stack([prompts.noise(rows, [i] * N, 3 * sigma, 0)[0] for i in range(200)])
    assert (draws[:, ~subject] == 0).all()
    spread_of_draws = draws[:, subject].flatten(0, 1).std(0)
    torch.testing.assert_close(spread_of_draws, 3 * sigma, rtol=0.05, atol=0)
    assert not torch.equal(draws[0], draws[1])
    assert torch.equal(draws[0], prompts.noise(rows, [0] * N, 3 * sigma, 0)[0])
    few = torch.tensor([7, 2])
    again = prompts.noise(few, [0, 0], 3 * sigma, 0)[0]
    torch.testing.assert_close(again, draws[0, few, -prompts.width(few) :])


# ---- effects


def test_every_layer_has_its_value_and_its_window(model, task):
    windows = [list(window_of(i, 5, 6)) for i in (0, 3, 5)]
    assert windows == [[0, 1, 2], [1, 2, 3, 4, 5], [3, 4, 5]]
    assert [list(window_of(i, 1, 6)) for i in range(6)] == [[i] for i in range(6)]
    table = trace(model, task, ["mlp", "attn"], "subject", [1, 3], "gnt", sigma=SIGMA, **QUICK)
    assert len(table) == 2 * 2 * 4
    assert list(table.layer.unique()) == [0, 1, 2, 3]
    assert (table.n == len(task.test)).all()
    some = trace(model, task, window=1, method="gnt", layers=[3, 1], sigma=SIGMA, **QUICK)
    assert list(some.layer) == [1, 3]


def test_the_corrupted_copy_is_never_patched(model, task):
    """Its probability is the same in every setting, and that of no restoration at all."""
    everything = {"kind": ["mlp", "attn"], "position": ["last", "subject"], "window": [1]}
    for method in ("gnt", "oat"):
        table = trace(model, task, **everything, sigma=SIGMA, method=method, **QUICK)
        assert np.ptp(table.p_corrupt) < 1e-6
    base = one_setting(model, task, window=1, **QUICK).tensors["unpatched"]
    expected = plainly(model, task.test, constant(model, task.test, base)).mean().item()
    assert table.p_corrupt[0] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("position", ["last", "subject"])
def test_no_corruption_means_no_effect(model, task, position):
    none = torch.zeros(model.d_model)
    table = trace(model, task, "mlp", position, 1, "gnt", sigma=none, **QUICK)
    assert (table.aie == 0).all()
    assert table.se.isna().all()
    assert np.allclose(table.p_corrupt, table.p_clean, atol=1e-6)


def test_spread_is_over_the_prompts_tokens_without_bos_and_padding(small, task):
    rows = zip(task.tokens, task.last, strict=True)
    tokens = torch.cat([row[1 : last + 1] for row, last in rows])
    padded = task.tokens.where(torch.arange(WIDTH) <= task.last[:, None], small.bos)
    torch.testing.assert_close(spread(small, padded), small.embed_tokens(tokens).std(0))


def test_aie_is_clipped_per_prompt_and_one_only_when_all_is_recovered():
    w = torch.tensor([0.0, 0.0, 0.1])
    z = torch.tensor([0.2, 0.3, 0.1])
    assert tracing.aie(w, z)["aie"] == pytest.approx(1 - 0.1 / 0.6)
    assert tracing.aie(0 * w, z) == {"aie": 1.0, "se": 0.0}
    assert tracing.aie(z + 1, z)["aie"] == 0
    assert tracing.aie(w, -z)["aie"] == 0
    assert math.isnan(tracing.aie(w, -z)["se"])


def test_aie_follows_from_what_is_stored(model, task):
    result = one_setting(model, task, "attn", "last_subject", 3, "gnt", sigma=SIGMA, **QUICK)
    test = task.test
    where = spans(test)["last_subject"]
    clean, _, _ = clean_run(model, test)
    toks = [noisy(model, test, draw, 3 * SIGMA) for draw in range(2)]
    z = torch.stack([clean - plainly(model, test, tok) for tok in toks]).mean(0)
    for i, row in enumerate(result.numbers["rows"]):
        window = window_of(i, 3, 4)
        patched = torch.stack([plainly(model, test, tok, "attn", window, where) for tok in toks])
        w = (clean - patched).clamp(min=0).mean(0)
        torch.testing.assert_close(result.tensors["w"][i], w, atol=1e-5, rtol=0)
        torch.testing.assert_close(result.tensors["z"][i], z, atol=1e-5, rtol=0)
        aie = max(0, 1 - (w.mean() / z.mean()).item())
        assert row["aie"] == pytest.approx(aie, abs=1e-4)
        assert 0 <= row["aie"] <= 1
        assert row["p_clean"] == pytest.approx(clean.mean().item(), abs=1e-5)
        assert row["p_corrupt"] == pytest.approx((clean - z).mean().item(), abs=1e-5)
        assert row["p_patched"] == pytest.approx(patched.mean().item(), abs=1e-5)


def test_standard_error_equals_the_bootstrap():
    rng = np.random.default_rng(0)
    z = rng.uniform(0.1, 0.9, 400)
    w = np.clip(z * rng.uniform(0.2, 1, 400) + rng.normal(0, 0.05, 400), 0, None)
    se = tracing.aie(torch.tensor(w), torch.tensor(z))["se"]
    draws = [rng.integers(0, 400, 400) for _ in range(4000)]
    bootstrap = np.std([1 - w[i].mean() / z[i].mean() for i in draws])
    assert se == pytest.approx(bootstrap, rel=0.05)
    low, high = stats.bootstrap(lambda w, z: 1 - w.mean() / z.mean(), w, z, n=2000)
    assert se == pytest.approx((high - low) / 3.92, rel=0.1)


def test_mlp_0_of_a_model_that_reads_the_embedding_through_it_alone_recovers_all(task):
    """Everything but MLP 0 sees the subject only through what MLP 0 writes there: windows with
    layer 0 give AIE 1."""
    hf = random_gpt2(vocab=VOCAB, n_layer=4)
    hf.transformer.wte.weight.data *= 1e-4  # the stream is what MLP 0 makes of the embedding
    hf.lm_head.weight = torch.nn.Parameter(torch.randn(VOCAB, 32))
    hf.transformer.wpe.weight.data.zero_()
    hf.transformer.h[0].attn.c_proj.weight.data.zero_()
    hf.transformer.h[0].attn.c_proj.bias.data.zero_()
    hf.transformer.h[0].ln_2.eps = 1e-12
    model = wrap(hf, name="through-mlp-0", device="cpu")
    for window in (1, 3):
        sigma = 1e-4 * SIGMA
        values = trace(model, task, "mlp", "subject", window, "gnt", sigma=sigma, **QUICK).aie
        inside = np.array([0 in window_of(i, window, 4) for i in range(4)])
        assert (values[inside] > 0.99).all()
        assert (values[~inside] < 0.9).all()


# ---- constants


def test_trained_constants_lose_no_more_than_the_mean_embedding(model, task):
    result = one_setting(model, task, "mlp", "last", 1, "oat", **QUICK)
    train = task.train
    clean, _, _ = clean_run(model, train)
    where = spans(train)["last"]
    mean = model.embed_tokens(train.tokens[spans(train)["subject"]]).mean(0)

    def loss(value, layers):
        p = plainly(model, train, constant(model, train, value), "mlp", layers, where)
        return (clean - p).clamp(min=0).mean().item()

    for i, best in enumerate(result.tensors["constants"]):
        curve = [loss for _, loss in result.numbers["curves"][i]]
        assert loss(best, [i]) < loss(mean, [i]) + 1e-6
        assert curve[0] <= loss(mean, [i]) + 1e-6
        assert loss(best, [i]) == pytest.approx(min(curve), abs=1e-5)
    base = result.tensors["unpatched"]
    assert loss(base, []) < loss(mean, []) - 1e-3, "training it gains something"


def test_training_in_micro_batches_gives_the_same_constants(two_models, task, monkeypatch):
    def constants(place, limit):
        monkeypatch.setenv("OA_STORE", str(store.folder() / place))
        monkeypatch.setattr(tracing, "PASS_COLUMNS", limit)
        result = one_setting(two_models["llama"], task, "attn", "subject", 3, "oat", **QUICK)
        return result.tensors["constants"]

    torch.testing.assert_close(constants("a", 10**6), constants("b", 60), atol=1e-4, rtol=0)


def test_every_constant_starts_from_the_better_of_the_mean_and_the_unpatched_one(model, task):
    """The unpatched one was trained for no restoration, which is close to restoring little."""
    settings = {**QUICK, "steps": 60, "lr": 0.1}
    first = first_constant(model, task, tracing.TraceSettings(**settings))
    train = task.train
    mean = model.embed_tokens(train.tokens[spans(train)["subject"]]).mean(0)
    clean, _, _ = clean_run(model, train)
    where = spans(train)["last"]

    def loss(value, layer):
        p = plainly(model, train, constant(model, train, value), "attn", [layer], where)
        return (clean - p).clamp(min=0).mean().item()

    result = one_setting(model, task, "attn", **settings)
    begun = [curve[0][1] for curve in result.numbers["curves"]]
    for layer, (began, start) in enumerate(zip(begun, result.numbers["starts"], strict=True)):
        losses = {"mean": loss(mean, layer), "unpatched": loss(first, layer)}
        assert began == pytest.approx(min(losses.values()), abs=1e-5)
        assert losses[start] == pytest.approx(min(losses.values()), abs=1e-5)
    assert "unpatched" in result.numbers["starts"]


def test_the_constant_of_the_denominator_is_trained_as_those_of_the_layers(model, task, tmp_path):
    """All copies side by side, the unpatched one among them, give what is stored apart."""
    settings = tracing.TraceSettings(**QUICK)
    result = one_setting(model, task, "attn", **QUICK)
    train = tracing.Prompts(model, task.train, "attn")
    starts = [train.subjects().mean(0), first_constant(model, task, settings)]
    windows = [tracing.NOTHING, *(range(i, i + 1) for i in range(model.n_layers))]
    snapshots = store.Snapshots(tmp_path / "state", "x")
    together = train.train(windows, "last", starts, settings, snapshots).constants
    stored = [result.tensors["unpatched"], *result.tensors["constants"]]
    for one, other in zip(together, stored, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gives_the_effects_of_single_precision(task, dtype):
    def rounded(kept_as):
        hf = make_hf("gpt2").to(dtype).to(kept_as)
        return wrap(hf, name=f"kept-as-{kept_as}", device="cpu")

    half = rounded(dtype)
    full = rounded(torch.float32)
    assert half.dtype == dtype
    for method in ("gnt", "oat"):
        tables = [
            trace(model, task, "mlp", "subject", 3, method, sigma=SIGMA, **QUICK)
            for model in (half, full)
        ]
        for column in ("p_clean", "p_corrupt", "p_patched"):
            one, other = (table[column].tolist() for table in tables)
            # 3 %: constants are trained through layers in half precision, to other places
            assert one == pytest.approx(other, rel=0.03, abs=2e-3), (method, column)
    assert one_setting(half, task, **QUICK).tensors["constants"].dtype == torch.float32


def test_the_train_facts_can_be_traced_too_and_each_fact_is_there_on_request(small, task):
    table = trace(
        small, task, window=1, method="gnt", sigma=SIGMA, part="train", each=True, **QUICK
    )
    only = trace(
        small,
        replace(task[task.part == 0], part=torch.full((7,), 2)),
        window=1,
        method="gnt",
        sigma=SIGMA,
        **QUICK,
    )
    assert (table.n == len(task.train)).all()
    np.testing.assert_allclose(table.aie, only.aie, atol=1e-5)
    for row in table.itertuples():
        assert len(row.w) == len(row.z) == len(row.clean) == row.n
        assert row.aie == pytest.approx(tracing.aie(row.w, row.z)["aie"], abs=1e-6)
        assert row.p_clean == pytest.approx(row.clean.mean().item(), abs=1e-6)


def test_same_constant_takes_each_layers_own_in_the_denominator(small, task):
    test = task.test
    own = one_setting(small, task, window=1, **QUICK)
    same = one_setting(small, task, window=1, same_constant=True, **QUICK)
    torch.testing.assert_close(own.tensors["constants"], same.tensors["constants"])
    torch.testing.assert_close(own.tensors["w"], same.tensors["w"])
    assert own.tensors["z"].std(0).max() < 1e-6
    clean, _, _ = clean_run(small, test)
    for z, value in zip(same.tensors["z"], same.tensors["constants"], strict=True):
        expected = clean - plainly(small, test, constant(small, test, value))
        torch.testing.assert_close(z, expected, atol=1e-5, rtol=0)
    folder = store.folder() / "tracing-gpt2" / "tracing_constant"
    # the unpatched copy's constant is trained once, in two stages
    assert len(list(folder.glob("*.json"))) == 2


# ---- runs


def test_every_setting_is_in_the_signature_and_nonsense_is_refused(small, task):
    names = {field.name for field in fields(TraceSettings)}
    for function in (trace, unpatched_constant):
        parameters = inspect.signature(function).parameters
        assert names < set(parameters)
        assert not any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters.values())
    with pytest.raises(ValueError, match="look_every must be at least 1"):
        trace(small, task, window=1, look_every=0)
    with pytest.raises(ValueError, match="draws must be at least 1"):
        trace(small, task, window=1, draws=0)
    for name in ("lr", "batch", "steps", "noise"):
        with pytest.raises(ValueError, match=f"{name} must be at least 0"):
            trace(small, task, window=1, **{name: -1})
    with pytest.raises(TypeError, match="sttps"):
        trace(small, task, window=1, sttps=3)


def refuse(*_):
    pytest.fail("computed again")


def test_a_finished_setting_is_loaded_and_what_does_not_touch_it_is_ignored(
    small, task, monkeypatch
):
    noise = {"window": 1, "method": "gnt", "sigma": SIGMA}
    first = trace(small, task, **noise, **QUICK)
    trained = trace(small, task, window=1, **QUICK)
    monkeypatch.setattr(tracing, "trace_with_noise", refuse)
    monkeypatch.setattr(tracing, "trace_with_constants", refuse)
    assert first.equals(trace(small, task, **noise, **QUICK | {"steps": 99}))
    assert trained.equals(trace(small, task, window=1, **QUICK | {"draws": 99}))
    for other in ({"seed": 1}, {"sigma": 2 * SIGMA}, {"layers": [1]}, {"position": "subject"}):
        with pytest.raises(pytest.fail.Exception):
            trace(small, task, **noise | QUICK | other)
    with pytest.raises(pytest.fail.Exception):
        trace(small, task[torch.arange(N).flip(0)], **noise, **QUICK)


ASKED = {"window": [1, 3], "method": ["gnt", "oat"], "sigma": SIGMA, **QUICK}
ORDER = [(1, "gnt"), (1, "oat"), (3, "gnt"), (3, "oat")]


def watched(monkeypatch, stop=None):
    """The settings that are computed from here on; at most `stop`, then the process is killed."""
    computed = []
    for name in ("trace_with_noise", "trace_with_constants"):
        real = getattr(tracing, name)

        def compute(model, facts, setting, *rest, real=real):
            if len(computed) == stop:
                raise KeyboardInterrupt
            computed.append((setting.window, setting.method))
            return real(model, facts, setting, *rest)

        monkeypatch.setattr(tracing, name, compute)
    return computed


def test_a_killed_run_goes_on_with_the_settings_that_are_missing(small, task, monkeypatch):
    with monkeypatch.context() as patch:
        before = watched(patch, stop=2)
        with pytest.raises(KeyboardInterrupt):
            trace(small, task, **ASKED)
    after = watched(monkeypatch)
    table = trace(small, task, **ASKED)
    assert before == ORDER[:2]
    assert after == ORDER[2:]
    monkeypatch.setenv("OA_STORE", str(store.folder() / "anew"))
    assert table.equals(trace(small, task, **ASKED))


def test_killed_training_goes_on_from_its_snapshot_with_the_same_numbers(small, task, monkeypatch):
    whole = one_setting(small, task, window=1, **QUICK)
    monkeypatch.setenv("OA_STORE", str(store.folder() / "killed"))
    unpatched_constant(small, task, **QUICK)
    real = Prompts.passes
    steps = []

    def dies(self, change, windows, position, rows=None):
        if torch.is_grad_enabled():
            steps.append(rows)
        if len(steps) == 8:
            raise KeyboardInterrupt
        return real(self, change, windows, position, rows)

    monkeypatch.setattr(store.Snapshots, "due", lambda self: True)
    with monkeypatch.context() as patch:
        patch.setattr(Prompts, "passes", dies)
        with pytest.raises(KeyboardInterrupt):
            one_setting(small, task, **QUICK)
    again = one_setting(small, task, window=1, **QUICK)
    assert again.numbers == whole.numbers
    for name, value in whole.tensors.items():
        assert torch.equal(again.tensors[name], value), name


def test_the_cost_is_told_once_for_what_is_not_stored(small, task, monkeypatch):
    told = []
    monkeypatch.setattr(machine, "announce", told.append)
    trace(small, task, **ASKED)
    assert len(told) == 1
    assert told[0].startswith("4 settings of tracing: about ")
    trace(small, task, **ASKED)
    assert len(told) == 1, "what is stored costs nothing"
    trace(small, task, **ASKED | {"window": [1, 3], "position": ["last", "subject"]})
    assert told[1].startswith("4 settings")


def test_settings_side_by_side_give_the_same_numbers(small, task, monkeypatch):
    """What goes to a worker can be sent there, and the order of work does not matter."""
    alone = trace(small, task, **ASKED)
    monkeypatch.setenv("OA_STORE", str(store.folder() / "side by side"))

    def backwards(function, model, items, desc=""):
        sent = reduction.loads(reduction.dumps((function, items)))
        results = [sent[0](model, item) for item in reversed(sent[1])]
        return reduction.loads(reduction.dumps(results))[::-1]

    monkeypatch.setattr(models, "each", backwards)
    computed = watched(monkeypatch)
    assert alone.equals(trace(small, task, **ASKED))
    assert computed == ORDER[::-1]


# ---- one prompt


@pytest.mark.parametrize("kind", ["resid", "mlp", "attn"])
def test_the_map_of_a_prompt_restores_one_token_in_one_layer(model, task, kind):
    one = task[[4]]
    table = trace_prompt(model, one, kind=kind, sigma=SIGMA, draws=2)
    clean, answer, _ = clean_run(model, one)
    assert table.shape == (int(one.last[0]) + 1, 4)
    assert list(table.columns) == [0, 1, 2, 3]
    assert table.attrs["p_clean"] == pytest.approx(clean.item(), abs=1e-5)
    assert table.attrs["answer"] == f"#{answer.item()}"
    toks = [noisy(model, one, draw, 3 * SIGMA) for draw in range(2)]
    for token in range(len(table)):
        where = (torch.arange(WIDTH) == token)[None]
        for layer in range(4):
            p = [plainly(model, one, tok, kind, [layer], where) for tok in toks]
            expected = torch.stack(p).mean().item()
            assert table.iloc[token, layer] == pytest.approx(expected, abs=1e-5)
    value = torch.zeros(model.d_model)
    fixed = trace_prompt(model, one, kind=kind, constant=value)
    expected = plainly(model, one, constant(model, one, value)).item()
    assert fixed.attrs["p_corrupt"] == pytest.approx(expected, abs=1e-5)


def test_a_text_with_its_subject_makes_a_map(gpt2):
    """By default the noise has the spread of the model's own contexts."""
    text = gpt2.tokenizer.decode([5, 6, 7, 8, 9])
    word = gpt2.decode([7])[0].strip()
    table = trace_prompt(gpt2, text, word, draws=1)
    tokens, _ = gpt2.pad([gpt2.encode(text)])
    assert list(table.index) == gpt2.decode(tokens[0])
    assert table.attrs["p_clean"] > 0
    assert (
        np.ptp(table.iloc[:3].to_numpy()) < 1e-6
    )  # before the subject there is nothing to restore
    assert np.ptp(table.iloc[3:].to_numpy()) > 1e-6
    with pytest.raises(ValueError, match="not in its prompt"):
        trace_prompt(gpt2, text, "nowhere")


# ---- what cannot be traced


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ({"kind": "resid"}, "kind 'resid': it is one of mlp, attn"),
        ({"kind": []}, "kind 'none': it is one of mlp, attn"),
        ({"position": "first"}, "position 'first': it is one of last, last_subject, subject"),
        ({"method": ["gnt", "zero"]}, "method 'zero'"),
        ({"window": 2}, "window 2: it is odd and at most 4"),
        ({"window": 5}, "window 5: it is odd and at most 4"),
        ({"window": []}, "no window"),
        ({"layers": [4]}, "has 0 … 3"),
        ({"layers": []}, "has 0 … 3"),
        ({"part": "all"}, "part 'all': it is one of train, validation, test"),
    ],
)
def test_wrong_requests_say_what_there_is(small, task, what, message):
    with pytest.raises(ValueError, match=message):
        trace(small, task, **({"window": 1} | what))


def test_facts_that_cannot_be_traced_say_why(small, task):
    with pytest.raises(ValueError, match="no facts"):
        trace(small, task[:0], window=1)
    with pytest.raises(ValueError, match="no subject spans"):
        trace(small, replace(task, subject=None), window=1)
    outside = task.subject.clone()
    outside[3, 1] = task.last[3] + 2
    with pytest.raises(ValueError, match="fact 3: its subject"):
        trace(small, replace(task, subject=outside), window=1)
    with pytest.raises(ValueError, match="no test prompts"):
        trace(small, replace(task, part=torch.zeros_like(task.part)), window=1)
    with pytest.raises(ValueError, match="one fact at a time"):
        trace_prompt(small, task)
    with pytest.raises(ValueError, match="no subject spans"):
        trace_prompt(small, replace(task[[0]], subject=None))
    with pytest.raises(ValueError, match="kind 'head': it is one of resid, mlp, attn"):
        trace_prompt(small, task[[0]], kind="head")
