"""Names of components, means, fills, and the forward that starts at the component."""

from functools import cache

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from oa_utils import ablation as ab
from oa_utils import models, runs, tasks, tiny


@cache
def random_model(family: str) -> models.Model:
    """Three layers of four heads with weights so large that ablations matter; the llama shares keys between heads."""
    tokenizer = tiny.make_tokenizer()
    size, ids = len(tokenizer), {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.bos_token_id}
    torch.manual_seed(0)
    if family == "gpt2":
        shape = {"n_layer": 3, "n_head": 4, "n_embd": 32, "n_positions": 64}
        hf = GPT2LMHeadModel(GPT2Config(**shape, **ids, vocab_size=size, initializer_range=0.25))
    else:
        shape = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
        config = LlamaConfig(**shape, **ids, intermediate_size=64, vocab_size=size, initializer_range=0.25)
        hf = LlamaForCausalLM(config)
    for name, weight in hf.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(weight, std=0.3)
    return models.wrap(hf, tokenizer, family, device="cpu")


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def model(request):
    return random_model(request.param)


@pytest.fixture(scope="module")
def task(model):
    return tasks.ioi(model, 24, seed=1)


KINDS = ["a1.h2", "a0", "m1", "m2.n17", "tok"]


# ---- names


def test_components_come_heads_first_layer_by_layer():
    model = random_model("gpt2")
    names = ab.all_components(model)
    assert names[:5] == ["a0.h0", "a0.h1", "a0.h2", "a0.h3", "a1.h0"] and names[-3:] == ["m0", "m1", "m2"]
    assert len(names) == 15 and ab.all_components(model, ["tok", "attn"]) == ["tok", "a0", "a1", "a2"]
    assert len(ab.all_components(model, ["neuron"])) == 3 * 128
    with pytest.raises(ValueError, match="unknown kind nose.*head"):
        ab.all_components(model, ["nose"])


@pytest.mark.parametrize(
    "name", ["a3.h0", "a0.h4", "m3", "m0.n128", "a0.n1", "m0.h1", "embed", "", "a0.h", "a-1", "a00", "a0.h0 ", None, 3]
)
def test_a_component_that_does_not_exist_is_refused_with_what_there_is(name):
    with pytest.raises(ValueError, match="a0.h0 … a2.h3.*m0 … m2.*m0.n127"):
        ab.parse(name, random_model("gpt2"))


def test_total_and_partial_ablations_are_told_apart():
    assert set(ab.TOTAL) | set(ab.PARTIAL) == set(ab.ABLATIONS) and not set(ab.TOTAL) & set(ab.PARTIAL)


def test_a_bad_basis_is_refused(model):
    for basis in (torch.ones(2, 7), torch.ones(8), torch.ones(2, 8), torch.zeros(1, 8), torch.full((1, 8), torch.nan)):
        with pytest.raises(ValueError, match="subspace of a1.h2"):
            ab.parse(ab.Subspace("a1.h2", basis), model)


# ---- the forward


@pytest.mark.parametrize("start", [0, 1, 2])
def test_finishing_from_any_layer_gives_the_models_own_log_probs(model, task, start):
    with torch.no_grad():
        stream = model.run(model.embed(task.tokens), 0, start)
        got = ab.finish(model, stream, start, task.last)
        assert torch.allclose(got, model(task.tokens, task.last), atol=2e-5)


@pytest.mark.parametrize("keep", [True, False])
def test_streams_are_the_models_own_upwards_and_downwards_and_cut_behind_the_longest(model, task, keep):
    stream, rows = ab.Stream(model, task.tokens, task.last), torch.tensor([3, 1, 7])
    stream.keep = keep
    for layer in (0, 1, 2, 1):
        got = stream.enter(layer, rows)
        length = int(task.last[rows].max()) + 1
        assert got.shape[1] == length
        with torch.no_grad():
            assert torch.allclose(got, model.run(model.embed(task.tokens[rows]), 0, layer)[:, :length], atol=1e-4)


@pytest.mark.parametrize("name", KINDS)
def test_position_0_is_bit_identical_and_every_other_position_is_replaced(model, task, name):
    site, rows = ab.parse(name, model), torch.arange(4)
    block = ab.Stream(model, task.tokens, task.last).block(site.layer, rows)
    before = getattr(block, site.stage)
    after = block.replaced(site, block.value(site) + 1)
    assert torch.equal(after[:, 0], before[:, 0]) and (after[:, 1:] != before[:, 1:]).any(-1).all()
    assert torch.equal(block.replaced(site, block.value(site)), before)


def test_a_subspace_replaces_the_span_and_nothing_else(model, task):
    basis = torch.randn(3, 32) * torch.tensor([[100.0], [1.0], [0.01]])
    site, whole = ab.parse(ab.Subspace("m1", basis), model), ab.parse("m1", model)
    assert torch.allclose(site.basis.T @ site.basis, torch.eye(3), atol=1e-5) and site.kind == "subspace"
    block = ab.Stream(model, task.tokens, task.last).block(1, torch.arange(4))
    fill = torch.randn(1, 1, 32)
    change = (block.replaced(site, fill) - block.post)[:, 1:]
    q = torch.linalg.svd(basis, full_matrices=True).Vh  # rows 3… are orthogonal to the span
    assert (change @ q[3:].T).abs().max() < 1e-4 * change.abs().max() + 1e-5
    want = (fill - block.value(whole))[:, 1:] @ q[:3].T
    assert torch.allclose(change @ q[:3].T, want, atol=1e-4)


def test_a_basis_of_everything_is_the_component_itself(model, task):
    site, whole = ab.parse(ab.Subspace("a1.h2", torch.randn(8, 8)), model), ab.parse("a1.h2", model)
    block, fill = ab.Stream(model, task.tokens, task.last).block(1, torch.arange(4)), torch.randn(1, 1, 8)
    assert torch.allclose(block.replaced(site, fill), block.replaced(whole, fill), atol=1e-4)


# ---- means


@pytest.mark.parametrize("tokens_in_a_pass", [30, 4096])
def test_streaming_means_are_the_plain_means(model, task, monkeypatch, tokens_in_a_pass):
    monkeypatch.setattr(runs, "PASS_TOKENS", tokens_in_a_pass)
    sites = [ab.parse(name, model) for name in ["m2.n17", *KINDS]][1:]
    found = ab.means(model, task.tokens, task.last, sites)
    m = int(task.last.min())
    assert len(task.last.unique()) > 2, "prompts of several lengths"
    for site in sites:
        value = ab.Stream(model, task.tokens, task.last).block(site.layer, torch.arange(len(task))).value(site)
        got = found[site.name]
        inside = torch.arange(value.shape[1]) <= task.last[:, None]
        assert torch.equal(got.count, inside.sum(0)) and (got.count.diff() <= 0).all() and got.m == m
        for position in range(value.shape[1]):
            assert torch.allclose(got.mean[position], value[inside[:, position], position].mean(0), atol=1e-4)
        tail = value[:, m:][inside[:, m:]].mean(0)  # every value counts the same: weighted by counts
        rows = got.rows("position")
        assert rows.shape == (m + 1, site.dim) and torch.allclose(rows[m], tail, atol=1e-4)
        assert torch.allclose(rows[:m], value[:, :m].mean(0), atol=1e-4)
        assert torch.allclose(got.rows("shared")[0], value[:, 9:][inside[:, 9:]].mean(0), atol=1e-4)
        assert torch.allclose(got.std, value[:, 1:][inside[:, 1:]].std(0, correction=0), atol=1e-3, rtol=1e-3)


def test_short_prompts_share_the_mean_over_everything_behind_bos():
    means = ab.Means(torch.tensor([4, 4, 4, 1]), torch.tensor([[9.0], [1.0], [2.0], [5.0]]), torch.ones(1))
    assert means.m == 2
    assert means.rows("shared").item() == pytest.approx((4 * 1 + 4 * 2 + 5) / 9)
    assert means.rows("position").flatten().tolist() == pytest.approx([9, 1, (4 * 2 + 5) / 5])


def test_prompts_without_a_token_after_bos_are_refused(model, task):
    for tokens, last in ((task.tokens[:0], task.last[:0]), (task.tokens[:2], torch.tensor([3, 0]))):
        with pytest.raises(ValueError, match="at least one token after BOS"):
            ab.Stream(model, tokens, last)


# ---- fills


def test_the_zero_of_a_head_is_its_value_bias():
    model = random_model("gpt2")
    bias = model.layers[1].b_V
    assert bias.abs().min() > 0
    assert torch.equal(ab.zero(ab.parse("a1.h2", model), model), bias[2][None])
    assert torch.equal(ab.zero(ab.parse("a1", model), model), bias.flatten()[None])
    for name in ("m1", "m1.n3", "tok"):
        assert not ab.zero(ab.parse(name, model), model).any()


def test_constants_give_position_i_row_i_and_the_last_row_to_all_behind():
    site = ab.Site("m0", "mlp", "mlp", 0, slice(0, 2))
    rows = torch.arange(6.0).view(3, 2)
    got = ab.constants({"m0": rows})(0, torch.arange(4))(site, torch.zeros(4, 5, 2))
    assert torch.equal(got[0], rows[[0, 1, 2, 2, 2]])


def test_noise_has_the_asked_spread_and_does_not_depend_on_the_batch(model, task):
    site, n = ab.parse("m1", model), 400
    std = {"m1": torch.linspace(0.5, 2, 32)}
    value = torch.randn(n, 12, 32)
    draw = ab.noise(std, 3.0, (n, 12), seed=5)(1, torch.arange(n))(site, value) - value
    assert torch.allclose(draw.flatten(0, 1).std(0), 3 * std["m1"], rtol=0.06)
    some = ab.noise(std, 3.0, (n, 12), seed=5)(1, torch.tensor([7, 2]))(site, value[[7, 2], :9]) - value[[7, 2], :9]
    assert torch.allclose(some, draw[[7, 2], :9], atol=1e-5)
    assert not torch.allclose(ab.noise(std, 3.0, (n, 12), seed=6)(1, torch.arange(n))(site, value) - value, draw)


def test_partners_are_derangements_and_one_prompt_has_none(task):
    seen = set()
    for seed in range(20):
        partners = task.partners(seed)
        assert (partners != torch.arange(len(task))).all() and len(partners.unique()) == len(task)
        seen.add(tuple(partners.tolist()))
    assert len(seen) == 20 and task[:2].partners(3).tolist() == [1, 0]
    with pytest.raises(ValueError, match="at least 2"):
        task[:1].partners()


def test_a_shorter_partner_ends_where_the_prompt_ends_and_a_longer_one_gives_its_beginning(model, task):
    order = task.last.argsort()
    short, long = int(order[0]), int(order[-1])
    partners = torch.arange(len(task))
    partners[short], partners[long] = long, short
    got, a, b = task.resampled(partners), int(task.last[short]), int(task.last[long])
    assert a < b
    assert torch.equal(got[short, : a + 1], task.tokens[long, : a + 1])
    assert torch.equal(got[long, b - a : b + 1], task.tokens[short, : a + 1])
    assert (got[long, : b - a + 1] == model.bos).all()
