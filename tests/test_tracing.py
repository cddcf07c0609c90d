"""Tracing against a plain recomputation of every copy with `Model.run`, and the identities it has to keep."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import random_gpt2, random_llama

from oa_utils import runs, stats, tracing
from oa_utils.models import wrap
from oa_utils.prompt_map import trace_prompt
from oa_utils.tasks import Task
from oa_utils.tracing import Prompts, TraceSettings, spread, trace, trace_runs, window_of

VOCAB, WIDTH, N = 60, 10, 14
QUICK = TraceSettings(draws=2, steps=12, batch=4, check=4)


def make(family):
    """Four layers that all matter, and predictions that are far from even."""
    hf = random_gpt2(vocab=VOCAB, n_layer=4) if family == "gpt2" else random_llama(vocab=VOCAB, num_hidden_layers=4)
    for name, weight in hf.named_parameters():
        weight.data *= 2 if (".h." in name or ".layers." in name) and weight.ndim == 2 else 1
    hf.lm_head.weight = torch.nn.Parameter(0.7 * torch.randn(VOCAB, 32, generator=runs.generator(5)))
    return wrap(hf, name=f"tracing-{family}", device="cpu")


@pytest.fixture(scope="module")
def models():
    return {family: make(family) for family in ("gpt2", "llama")}


@pytest.fixture(params=["gpt2", "llama"])
def model(request, models):
    return models[request.param]


@pytest.fixture(autouse=True)
def own_store(tmp_path, monkeypatch):
    monkeypatch.setenv("OA_STORE", str(tmp_path))


SIGMA = torch.linspace(0.05, 0.2, 32)


def hand_made(n=N, seed=1):
    """Prompts of several lengths; subjects at the start, in the middle and at the very end, of one to three tokens."""
    rng = torch.Generator().manual_seed(seed)
    tokens, last = torch.randint(2, VOCAB, (n, WIDTH), generator=rng), torch.randint(4, WIDTH, (n,), generator=rng)
    tokens[:, 0] = 1
    first = 1 + torch.arange(n) % 3
    subject = torch.stack([first, first + 1 + torch.arange(n) % 3], 1)
    subject[0] = torch.tensor([1, last[0] + 1])
    subject[1] = torch.stack([last[1], last[1] + 1])
    subject[:, 1] = torch.minimum(subject[:, 1], last + 1)
    blank = torch.full((n, 1), -1)
    return Task("hand", tokens, last, blank, blank, torch.arange(n) % 2 == 0, ("",) * n, subject=subject, relation=("r",) * n)


@pytest.fixture(scope="module")
def task():
    return hand_made()


def spans(task):
    at, (first, end) = torch.arange(WIDTH), task.subject.T[..., None]
    return {"subject": (at >= first) & (at < end), "last_subject": at == end - 1, "last": at == task.last[:, None]}


def clean_run(model, task):
    sites = {}

    def keep(site, layer, value):
        sites[site, layer] = value
        return value

    return model(task.tokens, task.last, keep).exp().max(-1), sites


def plainly(model, task, tok, kinds=(), layers=(), where=None):
    """p of the clean run's top token, from token embeddings, with clean values put back: everything computed anew."""
    (_, target), sites = clean_run(model, task)

    def edit(site, layer, value):
        return torch.where(where[..., None], sites[site, layer], value) if site in kinds and layer in layers else value

    out = model.run(model.add_positions(tok), edit=edit)[torch.arange(len(task)), task.last]
    return model.log_probs(out).exp().gather(1, target[:, None])[:, 0]


def noisy(model, task, draw, std, seed=0):
    """Corrupted token embeddings, drawn prompt by prompt."""
    tok, prompts = model.embed_tokens(task.tokens), Prompts(model, task, "mlp")
    for row, (first, end) in enumerate(task.subject.tolist()):
        tok[row, first:end] += prompts.noise(torch.tensor([row]), [draw], std, seed)[0, 0, : end - first]
    return tok


def constant(model, task, value):
    return torch.where(spans(task)["subject"][..., None], value, model.embed_tokens(task.tokens))


@pytest.mark.parametrize("keep", [True, False], ids=["clean kept", "clean anew"])
def test_noise_tracing_equals_the_plain_recomputation(model, task, monkeypatch, keep):
    if not keep:
        monkeypatch.setattr(runs, "micro_batch", lambda n, *_: max(1, n // 3))
    monkeypatch.setattr(tracing, "PASS", 150)
    std, windows = torch.linspace(0.1, 0.4, model.d_model), [range(0), *(window_of(i, 3, 4) for i in range(4))]
    tok = noisy(model, task, 3, std)
    for kind in ("mlp", "attn"):
        prompts = Prompts(model, task, kind)
        assert (prompts.kept is not None) == keep
        for position, where in spans(task).items():
            clean, *p = prompts.measure(lambda r, own=prompts: own.noise(r, [3] * len(r), std, 0), windows, position)
            torch.testing.assert_close(clean, clean_run(model, task)[0][0], atol=1e-5, rtol=0)
            expected = [plainly(model, task, tok, [kind], window, where) for window in windows]
            p = torch.stack(p)
            torch.testing.assert_close(p, torch.stack(expected), atol=1e-5, rtol=0)
            assert (p[0] - clean).abs().max() > 0.01 < (p - p[0]).abs().max()


def test_constants_and_their_gradients_equal_the_plain_recomputation(model, task):
    values = [(0.3 * torch.randn(model.d_model, generator=runs.generator(i))).requires_grad_() for i in range(5)]
    windows, rows = [range(0), *(window_of(i, 3, 4) for i in range(4))], torch.arange(N)
    for kind in ("mlp", "attn"):
        prompts = Prompts(model, task, kind)
        for position, where in spans(task).items():
            p = prompts.probabilities(rows, prompts.constant(rows, values), windows, position)[1:]
            pairs = zip(windows, values, strict=True)
            plain = torch.stack([plainly(model, task, constant(model, task, v), [kind], w, where) for w, v in pairs])
            torch.testing.assert_close(p, plain, atol=1e-5, rtol=0)
            weight = torch.rand(p.shape, generator=runs.generator(9))
            grads = [torch.autograd.grad((weight * x).sum(), values) for x in (p, plain)]
            torch.testing.assert_close(*grads, atol=1e-5, rtol=1e-4)


def test_a_prompt_does_not_depend_on_its_batch(model, task):
    alone = Prompts(model, replace(task[[5]], tokens=task.tokens[[5], : int(task.last[5]) + 1]), "mlp")
    together, windows, std = Prompts(model, task, "mlp"), [range(0), range(1, 2)], torch.ones(model.d_model)
    one = alone.probabilities(torch.tensor([0]), together.noise(torch.tensor([5]), [0], std, 0), windows, "subject")
    all_ = together.measure(lambda rows: together.noise(rows, [0] * len(rows), std, 0), windows, "subject")
    torch.testing.assert_close(one[:, 0], all_[:, 5], atol=1e-5, rtol=0)


def test_every_layer_has_its_value_and_its_window(model, task):
    assert [list(window_of(i, 5, 6)) for i in (0, 3, 5)] == [[0, 1, 2], [1, 2, 3, 4, 5], [3, 4, 5]]
    assert [list(window_of(i, 1, 6)) for i in range(6)] == [[i] for i in range(6)]
    table = trace(model, task, ["mlp", "attn"], "subject", [1, 3], "gnt", sigma=SIGMA, settings=QUICK)
    assert len(table) == 2 * 2 * 4 and list(table.layer.unique()) == [0, 1, 2, 3] and (table.n == len(task.test)).all()
    assert list(trace(model, task, window=1, method="gnt", layers=[3, 1], sigma=SIGMA, settings=QUICK).layer) == [1, 3]


def test_the_corrupted_copy_is_never_patched(model, task):
    """Its probability is the same in every setting, and that of no restoration at all."""
    everything = {"kind": ["mlp", "attn"], "position": ["last", "subject"], "window": [1], "sigma": SIGMA}
    for method in ("gnt", "oat"):
        table = trace(model, task, **everything, method=method, settings=QUICK)
        assert np.ptp(table.p_corrupt) < 1e-6
    none, test = trace_runs(model, task, window=1, settings=QUICK)[0].tensors["unpatched"], task.test
    assert table.p_corrupt[0] == pytest.approx(plainly(model, test, constant(model, test, none)).mean().item(), abs=1e-5)


def test_restoring_everything_restores_the_prediction_and_nothing_restores_nothing(model, task):
    (clean, _), _ = clean_run(model, task)
    tok, everywhere = noisy(model, task, 0, torch.ones(model.d_model)), torch.ones(N, WIDTH, dtype=torch.bool)
    corrupted = plainly(model, task, tok)
    assert (clean - corrupted).abs().max() > 0.01
    restored = plainly(model, task, model.embed_tokens(task.tokens), ["attn", "mlp"], range(4), everywhere)
    torch.testing.assert_close(restored, clean)
    prompts = Prompts(model, task, "resid")  # the stream that enters the last layer, at every column
    where = torch.ones(2, N, int(prompts.span.max()), dtype=torch.bool)
    for layer in range(4):
        rows = torch.arange(N)
        change = prompts.noise(rows, [0] * N, torch.ones(model.d_model), 0)
        p = prompts.probabilities(rows, change, [range(0), range(layer, layer + 1)], where)
        torch.testing.assert_close(p[1:], torch.stack([corrupted, clean]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("position", ["last", "subject"])
def test_no_corruption_means_no_effect(model, task, position):
    table = trace(model, task, "mlp", position, 1, "gnt", sigma=torch.zeros(model.d_model), settings=QUICK)
    assert (table.aie == 0).all() and table.se.isna().all()
    assert np.allclose(table.p_corrupt, table.p_clean, atol=1e-6)


def test_noise_has_three_sigma_on_the_subject_alone(models, task):
    model, sigma = models["gpt2"], torch.linspace(0.5, 2, 32)
    prompts, rows = Prompts(model, task, "mlp"), torch.arange(N)
    subject = prompts.columns(rows, int(prompts.span.max()))[1]["subject"]
    draws = torch.stack([prompts.noise(rows, [i] * N, 3 * sigma, 0)[0] for i in range(200)])
    assert (draws[:, ~subject] == 0).all()
    torch.testing.assert_close(draws[:, subject].flatten(0, 1).std(0), 3 * sigma, rtol=0.05, atol=0)
    assert not torch.equal(draws[0], draws[1]) and torch.equal(draws[0], prompts.noise(rows, [0] * N, 3 * sigma, 0)[0])
    few = torch.tensor([7, 2])
    width = int(prompts.span[few].max())
    torch.testing.assert_close(prompts.noise(few, [0, 0], 3 * sigma, 0)[0], draws[0, few, -width:])


def test_spread_is_over_the_prompts_tokens_without_bos_and_padding(models, task):
    tokens = [t for row, last in zip(task.tokens, task.last, strict=True) for t in row[1 : last + 1].tolist()]
    padded = task.tokens.where(torch.arange(WIDTH) <= task.last[:, None], models["gpt2"].bos)
    torch.testing.assert_close(spread(models["gpt2"], padded), models["gpt2"].embed_tokens(torch.tensor(tokens)).std(0))


def test_a_text_with_its_subject_makes_a_map(gpt2):
    """By default the noise has the spread of the model's own contexts."""
    text = gpt2.tokenizer.decode([5, 6, 7, 8, 9])
    word = gpt2.decode([7])[0].strip()
    table = trace_prompt(gpt2, text, word, settings=TraceSettings(draws=1))
    tokens, last = gpt2.pad([gpt2.encode(text)])
    assert list(table.index) == gpt2.decode(tokens[0]) and table.attrs["p_clean"] > 0
    assert np.ptp(table.iloc[:3].to_numpy()) < 1e-6 < np.ptp(table.iloc[3:].to_numpy())  # what is before the subject
    with pytest.raises(ValueError, match="not in its prompt"):
        trace_prompt(gpt2, text, "nowhere")


def test_the_position_part_of_the_subject_stays(models):
    """Two models that differ in positions alone must differ when the subject's tokens are replaced by a constant."""
    model, task = models["gpt2"], hand_made()
    tok = constant(model, task, torch.zeros(model.d_model))
    prompts, rows = Prompts(model, task, "mlp"), torch.arange(N)
    p = prompts.probabilities(rows, prompts.constant(rows, [torch.zeros(model.d_model)]), [range(0)], "last")
    torch.testing.assert_close(p[1], plainly(model, task, tok), atol=1e-5, rtol=0)


def test_aie_is_clipped_per_prompt_and_one_only_when_all_is_recovered():
    w, z = torch.tensor([0.0, 0.0, 0.1]), torch.tensor([0.2, 0.3, 0.1])
    assert tracing.aie(w, z)["aie"] == pytest.approx(1 - 0.1 / 0.6)
    assert tracing.aie(0 * w, z) == {"aie": 1.0, "se": 0.0}
    assert tracing.aie(z + 1, z)["aie"] == 0 == tracing.aie(w, -z)["aie"]
    assert math.isnan(tracing.aie(w, -z)["se"])


def test_aie_follows_from_what_is_stored(model, task):
    std = 3 * SIGMA
    [result] = trace_runs(model, task, "attn", "last_subject", 3, "gnt", sigma=SIGMA, settings=QUICK)
    test, where = task.test, spans(task.test)["last_subject"]
    (clean, _), _ = clean_run(model, test)
    toks = [noisy(model, test, draw, std) for draw in range(2)]
    z = torch.stack([clean - plainly(model, test, tok) for tok in toks]).mean(0)
    for i, row in enumerate(result.numbers["rows"]):
        each = [(clean - plainly(model, test, tok, ["attn"], window_of(i, 3, 4), where)).clamp(min=0) for tok in toks]
        w = torch.stack(each).mean(0)
        torch.testing.assert_close(result.tensors["w"][i], w, atol=1e-5, rtol=0)
        torch.testing.assert_close(result.tensors["z"][i], z, atol=1e-5, rtol=0)
        assert row["aie"] == pytest.approx(max(0, 1 - (w.mean() / z.mean()).item()), abs=1e-4) and 0 <= row["aie"] <= 1
        assert row["p_clean"] == pytest.approx(clean.mean().item(), abs=1e-5)


def test_standard_error_equals_the_bootstrap():
    rng = np.random.default_rng(0)
    z = rng.uniform(0.1, 0.9, 400)
    w = np.clip(z * rng.uniform(0.2, 1, 400) + rng.normal(0, 0.05, 400), 0, None)
    draws = [rng.integers(0, 400, 400) for _ in range(4000)]
    bootstrap = np.std([1 - w[i].mean() / z[i].mean() for i in draws])
    assert tracing.aie(torch.tensor(w), torch.tensor(z))["se"] == pytest.approx(bootstrap, rel=0.05)
    low, high = stats.bootstrap(lambda w, z: 1 - w.mean() / z.mean(), w, z, n=2000)
    assert tracing.aie(torch.tensor(w), torch.tensor(z))["se"] == pytest.approx((high - low) / 3.92, rel=0.1)


def test_mlp_0_of_a_model_that_reads_the_embedding_through_it_alone_recovers_all(task):
    """Everything but MLP 0 sees the subject only through what MLP 0 writes there: windows with layer 0 give AIE 1."""
    hf = random_gpt2(vocab=VOCAB, n_layer=4)
    hf.transformer.wte.weight.data *= 1e-4  # the stream is what MLP 0 makes of the (normalised) embedding
    hf.lm_head.weight = torch.nn.Parameter(torch.randn(VOCAB, 32))
    hf.transformer.wpe.weight.data.zero_()
    hf.transformer.h[0].attn.c_proj.weight.data.zero_()
    hf.transformer.h[0].attn.c_proj.bias.data.zero_()
    hf.transformer.h[0].ln_2.eps = 1e-12
    model = wrap(hf, name="through-mlp-0", device="cpu")
    for window in (1, 3):
        values = trace(model, task, "mlp", "subject", window, "gnt", sigma=1e-4 * SIGMA, settings=QUICK).aie
        inside = [0 in window_of(i, window, 4) for i in range(4)]
        assert (values[inside] > 0.99).all() and (values[np.invert(inside)] < 0.9).all()


def test_trained_constants_lose_no_more_than_the_mean_embedding(model, task):
    [result] = trace_runs(model, task, "mlp", "last", 1, "oat", settings=QUICK)
    train = task.train
    (clean, _), _ = clean_run(model, train)
    mean = model.embed_tokens(train.tokens[spans(train)["subject"]]).mean(0)
    trained = [*result.tensors["constants"], result.tensors["unpatched"]]
    for layers, best in zip([*([i] for i in range(4)), []], trained, strict=True):
        p = [plainly(model, train, constant(model, train, c), ["mlp"], layers, spans(train)["last"]) for c in (mean, best)]
        before, after = (clean - torch.stack(p)).clamp(min=0).mean(1)
        assert after < before + 1e-6
        if layers:
            assert result.numbers["curves"][layers[0]][0][1] <= before + 1e-6
            assert after == pytest.approx(min(loss for _, loss in result.numbers["curves"][layers[0]]), abs=1e-5)
    assert (after < before - 1e-3).item(), "training the unpatched copy's constant gains something"


def test_training_in_micro_batches_gives_the_same_constants(models, task, monkeypatch):
    def constants(store, limit):
        monkeypatch.setenv("OA_STORE", str(runs.store() / store))
        monkeypatch.setattr(tracing, "PASS", limit)
        return trace_runs(models["llama"], task, "attn", "subject", 3, "oat", settings=QUICK)[0].tensors["constants"]

    torch.testing.assert_close(constants("a", 10**6), constants("b", 60), atol=1e-4, rtol=0)


def test_same_constant_takes_each_layers_own_in_the_denominator(models, task):
    model, test = models["gpt2"], task.test
    own, same = (trace_runs(model, task, window=1, settings=replace(QUICK, same_constant=x))[0] for x in (False, True))
    torch.testing.assert_close(own.tensors["constants"], same.tensors["constants"])
    torch.testing.assert_close(own.tensors["w"], same.tensors["w"])
    assert own.tensors["z"].std(0).max() < 1e-6
    (clean, _), _ = clean_run(model, test)
    for z, value in zip(same.tensors["z"], same.tensors["constants"], strict=True):
        torch.testing.assert_close(z, clean - plainly(model, test, constant(model, test, value)), atol=1e-5, rtol=0)


def test_a_finished_setting_is_loaded_and_settings_that_do_not_touch_it_are_ignored(models, task, monkeypatch):
    first = trace(models["gpt2"], task, window=1, method="gnt", sigma=SIGMA, settings=QUICK)
    monkeypatch.setattr(tracing, "setting", lambda *_: pytest.fail("computed again"))
    assert first.equals(trace(models["gpt2"], task, window=1, method="gnt", sigma=SIGMA, settings=replace(QUICK, steps=99)))
    with pytest.raises(pytest.fail.Exception):
        trace(models["gpt2"], task, window=1, method="gnt", sigma=SIGMA, settings=replace(QUICK, seed=1))


def test_a_killed_run_goes_on_with_the_settings_that_are_missing(models, task, monkeypatch):
    ask = {"window": [1, 3], "method": ["gnt", "oat"], "sigma": SIGMA, "settings": QUICK}
    real, done = tracing.setting, []

    def dies(model, facts, job, sigma):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append((job.window, job.method))
        return real(model, facts, job, sigma)

    monkeypatch.setattr(tracing, "setting", dies)
    with pytest.raises(KeyboardInterrupt):
        trace(models["gpt2"], task, **ask)
    killed, rest = list(done), []
    monkeypatch.setattr(tracing, "setting", lambda *args: rest.append((args[2].window, args[2].method)) or real(*args))
    table = trace(models["gpt2"], task, **ask)
    assert killed + rest == [(1, "gnt"), (1, "oat"), (3, "gnt"), (3, "oat")]
    monkeypatch.setenv("OA_STORE", str(runs.store() / "anew"))
    assert table.equals(trace(models["gpt2"], task, **ask))


def test_settings_side_by_side_give_the_same_numbers(models, task, monkeypatch):
    """Other processes, stood in for by calls, leave their results in the store; nothing is left to compute here."""
    ask = {"window": [1, 3], "method": ["gnt", "oat"], "sigma": SIGMA, "settings": QUICK}
    alone = trace(models["gpt2"], task, **ask)
    monkeypatch.setenv("OA_STORE", str(runs.store() / "side by side"))
    monkeypatch.setattr(tracing, "loaded", {models["gpt2"].name: models["gpt2"]}.__getitem__)
    real, done = tracing.setting, []
    monkeypatch.setattr(tracing, "setting", lambda *args: done.append(args[2]) or real(*args))
    monkeypatch.setattr(runs, "parallel", lambda fn, items, desc: [fn(item) for item in reversed(list(items))])
    assert alone.equals(trace(models["gpt2"], task, **ask, parallel=True))
    assert [(job.window, job.method) for job in done] == [(3, "oat"), (3, "gnt"), (1, "oat"), (1, "gnt")]


@pytest.mark.parametrize("kind", ["resid", "mlp", "attn"])
def test_the_map_of_a_prompt_restores_one_token_in_one_layer(model, task, kind):
    one, std = task[[4]], 3 * SIGMA
    settings = TraceSettings(draws=2)
    table = trace_prompt(model, one, kind=kind, sigma=SIGMA, settings=settings)
    (clean, target), _ = clean_run(model, one)
    assert table.shape == (int(one.last[0]) + 1, 4) and list(table.columns) == [0, 1, 2, 3]
    assert table.attrs["p_clean"] == pytest.approx(clean.item(), abs=1e-5) and table.attrs["answer"] == f"#{target.item()}"
    toks = [noisy(model, one, draw, std) for draw in range(2)]
    for token in range(len(table)):
        for layer in range(4):
            where = (torch.arange(WIDTH) == token)[None]
            p = torch.stack([plainly(model, one, tok, [kind], [layer], where) for tok in toks]).mean().item()
            assert table.iloc[token, layer] == pytest.approx(p, abs=1e-5)
    value = torch.zeros(model.d_model)
    fixed = trace_prompt(model, one, kind=kind, constant=value)
    assert fixed.attrs["p_corrupt"] == pytest.approx(plainly(model, one, constant(model, one, value)).item(), abs=1e-5)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ({"kind": "resid"}, "kind 'resid': it is one of mlp, attn"),
        ({"position": "first"}, "position 'first': it is one of last, last_subject, subject"),
        ({"method": ["gnt", "zero"]}, "method 'zero'"),
        ({"window": 2}, "window 2: it is odd and at most 4"),
        ({"window": 5}, "window 5: it is odd and at most 4"),
        ({"layers": [4]}, "has 0 … 3"),
    ],
)  # fmt: skip
def test_wrong_requests_say_what_there_is(models, task, what, message):
    with pytest.raises(ValueError, match=message):
        trace(models["gpt2"], task, **({"window": 1} | what))


def test_facts_that_cannot_be_traced_say_why(models, task):
    model, bad = models["gpt2"], task.subject.clone()
    with pytest.raises(ValueError, match="no facts"):
        trace(model, task[:0], window=1)
    with pytest.raises(ValueError, match="no subject spans"):
        trace(model, replace(task, subject=None), window=1)
    bad[3, 1] = task.last[3] + 2
    with pytest.raises(ValueError, match="fact 3: its subject"):
        trace(model, replace(task, subject=bad), window=1)
    with pytest.raises(ValueError, match="no test prompts"):
        trace(model, replace(task, in_train=torch.ones(N, dtype=torch.bool)), window=1)
    with pytest.raises(ValueError, match="one fact at a time"):
        trace_prompt(model, task)
    with pytest.raises(ValueError, match="no subject spans"):
        trace_prompt(model, replace(task[[0]], subject=None))
