"""Constants in closed form: KL to second order, the regression that they solve, and what they are
worth beside trained ones."""

import pytest
import torch
from conftest import random_gpt2, random_llama
from toys import VOCAB, make_task

from oa_utils import closed_form, machine, models, stats
from oa_utils.components import component_gaps, optimal_constants
from oa_utils.fills import TaskValues
from oa_utils.sites import find

SOME = ["a1.h2", "m1", "a1.h0", "m1.n17"]


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def model(request):
    """A random model of few words in which single components change something, but not much."""
    make = {"gpt2": random_gpt2, "llama": random_llama}[request.param]
    return models.wrap(make(vocab=VOCAB, initializer_range=0.15), name="mild")


@pytest.fixture(scope="module")
def task(model):
    return make_task(model, 400)


def starts_of(values, sites, family):
    means = values.means(sites, family=family)
    return {name: each.rows(family) for name, each in means.items()}


def test_the_squares_of_all_tokens_are_the_kl_of_a_small_change(model, task):
    """Score by score and prompt by prompt, where every token is a score."""
    values = TaskValues(model, task)
    [site] = sites = [find("a1.h2", model)]
    starts = starts_of(values, sites, "position")
    found = closed_form.slopes(values, sites, starts, "position", model.d_vocab)[site.name]
    prompts = values.prompts("train")
    rows = torch.arange(len(prompts))
    block = prompts.block(site.layer, rows)
    full = values.part("train").log_probs(model)
    constant_fill = values.constant_fill(starts, "position", "train")(site.layer, rows)
    share = 0.05  # of the way from the value to its mean

    def fill(site, value):
        return value + share * (constant_fill(site, value) - value)

    with torch.no_grad():
        logp = closed_form.together(model, block, sites, fill, prompts.last)
    want = stats.kl(full.double(), logp.double())
    got = (share * found.offset).square().sum(1) / 2
    assert want.mean() > 1e-8
    assert got.sum() == pytest.approx(want.sum().item(), rel=0.05)


def test_few_scores_add_up_to_all_of_them_on_average():
    logp = torch.randn(1, 30, generator=machine.generator(0)).mul(2).log_softmax(-1)
    change = torch.randn(30, generator=machine.generator(1))
    want = (logp.exp() * change.square()).sum()
    draws = torch.linspace(0, 1, 4001)[:-1] + 1 / 8000
    tokens, weights = closed_form.weights_of(logp.expand(4000, -1), 6, draws)
    assert tokens.shape == (4000, 6)
    assert (tokens.sort(1).values.diff(dim=1) > 0).all(), "no token twice"
    got = (weights * change[tokens]).square().sum(1).mean()
    assert got.item() == pytest.approx(want.item(), rel=0.01)


@pytest.mark.parametrize("n, width", [(40, 7), (7, 40)])
def test_the_ridge_is_the_textbooks(n, width):
    rows = torch.randn(n, width, generator=machine.generator(0))
    target = torch.randn(n, generator=machine.generator(1))
    added = 0.3 * rows.square().sum(1).mean()
    want = torch.linalg.solve(rows.T @ rows + added * torch.eye(width), rows.T @ target)
    assert torch.allclose(closed_form.ridge(rows, target, 0.3), want, atol=1e-4)


@pytest.mark.parametrize("family", ["position", "shared"])
def test_a_planted_constant_is_found(family):
    """Rows that say exactly how far it is."""
    generator = machine.generator(0)
    n_rows = 1 if family == "shared" else 5
    rows = torch.randn(400, 4, n_rows, 3, generator=generator)
    spread = torch.tensor([0.5, 1.0, 2.0])
    planted = torch.randn(n_rows, 3, generator=generator) * spread
    offset = -(rows * planted).sum((2, 3))
    found = closed_form.solve(closed_form.Slopes(rows, offset), spread)
    assert torch.allclose(found, planted, atol=0.05)


@pytest.mark.parametrize("family", ["position", "shared"])
def test_where_little_changes_it_gains_what_training_gains(family, monkeypatch):
    """On held-out prompts, with heads that write a fifth of what they would."""
    hf = random_gpt2(vocab=VOCAB, initializer_range=0.15)
    hf.transformer.h[1].attn.c_proj.weight.data *= 0.2
    model = models.wrap(hf, name="quiet")
    task = make_task(model, 400)
    heads = [f"a1.h{i}" for i in range(4)]
    monkeypatch.setattr(closed_form, "SCORES", VOCAB)
    closed = {"steps": 0, "starts": ["mean", "closed_form"]}
    table = component_gaps(model, task, heads, ["mean", "optimal"], family, **closed)
    gaps = table.groupby("ablation").gap.sum()
    long = {"steps": 80, "batch": 0, "look_every": 40, "lr": 0.1, "starts": ["mean"]}
    possible = (
        gaps["mean"] - component_gaps(model, task, heads, "optimal", family, **long).gap.sum()
    )
    assert possible > 0.02 * gaps["mean"], "there is something to gain"
    assert gaps["mean"] - gaps["optimal"] > 0.8 * possible


def test_the_history_says_where_a_constant_came_from(model, task):
    trained = optimal_constants(model, task, SOME, steps=0, starts=["mean", "closed_form"])
    starts = {how["start"] for _, how in trained.values()}
    assert starts <= {"mean", "closed_form", "shared"}
    assert starts & {"closed_form", "shared"}


def test_parts_of_any_size_give_the_same_constants(model, task, monkeypatch):
    sites = [find(name, model) for name in SOME]
    whole = closed_form.constants(TaskValues(model, task), sites, "position")
    monkeypatch.setattr(machine, "micro_batch", lambda n, *_: min(n, 7))
    parts = closed_form.constants(TaskValues(model, task), sites, "position")
    alone = closed_form.constants(TaskValues(model, task), sites[:1], "position")
    for name, constant in whole.items():
        assert torch.allclose(parts[name], constant, atol=1e-3, rtol=1e-3)
    assert torch.allclose(alone["a1.h2"], whole["a1.h2"], atol=1e-3, rtol=1e-3)


def test_what_changes_the_models_input_has_a_closed_form_too(model, task):
    table = component_gaps(
        model,
        task,
        ["tok", "m0"],
        ["mean", "optimal"],
        "shared",
        steps=0,
        part="train",
        starts=["mean", "closed_form"],
    )
    gaps = table.pivot(index="component", columns="ablation", values="gap")
    assert (gaps["optimal"] <= gaps["mean"] + 1e-6).all()
