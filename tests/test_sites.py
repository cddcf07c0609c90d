"""Names of components, where their values sit, and the stream with one of them replaced."""

import pytest
import torch

from oa_utils import tasks
from oa_utils.sites import CleanPrompts, Subspace, all_components, find

KINDS = ["a1.h2", "a0", "m1", "m2.n17", "tok", "embed"]


@pytest.fixture
def task(model):
    return tasks.ioi(model, 24, seed=1)


@pytest.fixture
def prompts(model, task):
    return CleanPrompts(model, task.tokens, task.last)


# ---- names


def test_components_come_heads_first_layer_by_layer(gpt2):
    names = all_components(gpt2)
    assert names[:5] == ["a0.h0", "a0.h1", "a0.h2", "a0.h3", "a1.h0"]
    assert names[-3:] == ["m0", "m1", "m2"]
    assert len(names) == 15
    assert all_components(gpt2, ["tok", "attn"]) == ["tok", "a0", "a1", "a2"]
    assert len(all_components(gpt2, ["neuron"])) == 3 * 128
    with pytest.raises(ValueError, match="unknown kind nose.*head"):
        all_components(gpt2, ["nose"])


def test_every_name_is_found_where_it_says(gpt2):
    head = find("a1.h2", gpt2)
    assert (head.kind, head.layer, head.dim, head.stage) == ("head", 1, 8, "between")
    assert head.part == slice(16, 24)
    layer = find("a2", gpt2)
    assert (layer.kind, layer.layer, layer.dim, layer.stage) == ("attn", 2, 32, "between")
    neuron = find("m2.n17", gpt2)
    assert (neuron.kind, neuron.layer, neuron.dim, neuron.stage) == ("neuron", 2, 1, "behind")
    mlp = find("m0", gpt2)
    assert (mlp.kind, mlp.layer, mlp.dim, mlp.stage) == ("mlp", 0, 32, "behind")
    for name in ("tok", "embed"):
        site = find(name, gpt2)
        assert (site.kind, site.layer, site.dim, site.stage) == (name, 0, 32, "before")


@pytest.mark.parametrize(
    "name",
    [
        "a3.h0",
        "a0.h4",
        "m3",
        "m0.n128",
        "a0.n1",
        "m0.h1",
        "out",
        "",
        "a0.h",
        "a-1",
        "a00",
        "a0.h0 ",
    ],
)
def test_a_component_that_does_not_exist_is_refused_with_what_there_is(gpt2, name):
    with pytest.raises(ValueError, match="a0.h0 … a2.h3.*m0 … m2.*m0.n127"):
        find(name, gpt2)


@pytest.mark.parametrize(
    "basis",
    [
        torch.ones(2, 7),
        torch.ones(9, 8),
        torch.ones(2, 8),
        torch.zeros(1, 8),
        torch.full((1, 8), torch.nan),
    ],
    ids=["narrow", "too many", "dependent", "zero", "nan"],
)
def test_a_bad_basis_is_refused(model, basis):
    with pytest.raises(ValueError, match="subspace of a1.h2"):
        find(Subspace("a1.h2", basis), model)


# ---- clean streams


@pytest.mark.parametrize("start", [0, 1, 2, 3])
def test_finishing_from_any_layer_gives_the_models_own_log_probs(model, task, start):
    with torch.no_grad():
        stream = model.run(model.embed(task.tokens), 0, start)
        got = model.finish(stream, start, task.last)
        assert torch.allclose(got, model(task.tokens, task.last), atol=2e-5)


@pytest.mark.parametrize("keep", [True, False])
def test_streams_are_the_models_own_upwards_and_downwards_and_cut_behind_the_longest(
    model, task, prompts, keep
):
    rows = torch.tensor([3, 1, 7])
    prompts._keep = keep
    length = int(task.last[rows].max()) + 1
    for layer in (0, 1, 2, 1):
        got = prompts.entering(layer, rows)
        assert got.shape[1] == length
        with torch.no_grad():
            want = model.run(model.embed(task.tokens[rows]), 0, layer)
        assert torch.allclose(got, want[:, :length], atol=1e-4)


def test_chunks_hold_every_row_once_the_short_prompts_first(task, prompts):
    chunks = list(prompts.chunks(5))
    rows = torch.cat(chunks)
    assert sorted(rows.tolist()) == list(range(len(task)))
    assert (task.last[rows].diff() >= 0).all()
    assert max(map(len, chunks)) == 5
    some = torch.tensor([7, 2, 11])
    assert sorted(torch.cat(list(prompts.chunks(2, some))).tolist()) == [2, 7, 11]


def test_prompts_without_a_token_after_bos_are_refused(model, task):
    none = (task.tokens[:0], task.last[:0])
    bare = (task.tokens[:2], torch.tensor([3, 0]))
    for tokens, last in (none, bare):
        with pytest.raises(ValueError, match="at least one token after BOS"):
            CleanPrompts(model, tokens, last)


# ---- the stream with a component replaced


@pytest.mark.parametrize("name", KINDS)
def test_position_0_is_bit_identical_and_every_other_position_is_replaced(model, prompts, name):
    site = find(name, model)
    block = prompts.block(site.layer, torch.arange(4))
    before = getattr(block, site.stage)
    after = block.replaced(site, block.value(site) + 1)
    assert torch.equal(after[:, 0], before[:, 0])
    assert (after[:, 1:] != before[:, 1:]).any(-1).all()
    assert torch.equal(block.replaced(site, block.value(site)), before)


def test_a_block_computes_what_the_model_computes(model, task, prompts):
    rows = torch.arange(4)
    block = prompts.block(1, rows)
    length = block.before.shape[1]
    with torch.no_grad():
        behind = model.run(model.embed(task.tokens[rows, :length]), 0, 2)
    assert torch.allclose(block.behind, behind, atol=1e-4)


def test_a_subspace_replaces_the_span_and_nothing_else(model, prompts):
    basis = torch.randn(3, 32) * torch.tensor([[100.0], [1.0], [0.01]])
    site = find(Subspace("m1", basis), model)
    whole = find("m1", model)
    assert torch.allclose(site.basis.T @ site.basis, torch.eye(3), atol=1e-5)
    assert site.kind == "subspace"
    block = prompts.block(1, torch.arange(4))
    fill = torch.randn(1, block.before.shape[1], 32)
    change = (block.replaced(site, fill) - block.behind)[:, 1:]
    q = torch.linalg.svd(basis, full_matrices=True).Vh  # rows 3… are orthogonal to the span
    assert (change @ q[3:].T).abs().max() < 1e-4 * change.abs().max() + 1e-5
    want = (fill - block.value(whole))[:, 1:] @ q[:3].T
    assert torch.allclose(change @ q[:3].T, want, atol=1e-4)


def test_a_basis_of_everything_is_the_component_itself(model, prompts):
    site = find(Subspace("a1.h2", torch.randn(8, 8)), model)
    whole = find("a1.h2", model)
    block = prompts.block(1, torch.arange(4))
    fill = torch.randn(1, block.before.shape[1], 8)
    assert torch.allclose(block.replaced(site, fill), block.replaced(whole, fill), atol=1e-4)
