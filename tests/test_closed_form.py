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


def test_the_squares_of_all_tokens_are_the_kl_of_a_small_change(model, task):
    """Prompt by prompt, where every token is a score."""
    values = TaskValues(model, task)
    [site] = sites = [find("a1.h2", model)]
    means = values.means(sites)
    starts = {site.name: means[site.name].rows("position")}
    prompts = values.prompts("train")
    rows = torch.arange(len(prompts))
    found = closed_form.regressions(values, sites, starts, "position", rows, model.d_vocab)
    block = prompts.block(site.layer, rows)
    full = values.part("train").log_probs(model)
    constant_fill = values.constant_fill(starts, "position", "train")(site.layer, rows)
    share = 0.05  # of the way from the value to its mean

    def fill(site, value):
        return value + share * (constant_fill(site, value) - value)

    with torch.no_grad():
        logp = closed_form.together(model, block, sites, fill, prompts.last)
    want = stats.kl(full.double(), logp.double())
    got = (share * found[site.name].offset).square().sum(1) / 2
    assert want.mean() > 1e-8
    strong = want > want.median()
    assert torch.allclose(got[strong].double(), want[strong], rtol=0.1)


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
    [got, none] = closed_form.ridge(rows, target, [0.3, 1e9])
    assert torch.allclose(got, want, atol=1e-4)
    assert none.abs().max() < 1e-6


@pytest.mark.parametrize("family", ["position", "shared"])
def test_a_planted_constant_is_found(family):
    """Rows that say exactly how far it is."""
    generator = machine.generator(0)
    n_rows = 1 if family == "shared" else 5
    rows = torch.randn(400, 4, n_rows, 3, generator=generator)
    spread = torch.tensor([0.5, 1.0, 2.0])
    planted = torch.randn(n_rows, 3, generator=generator) * spread
    offset = -(rows * planted).sum((2, 3))
    found = closed_form.solve(closed_form.Regression(rows, offset), spread)
    assert torch.allclose(found, planted, atol=0.05)
    offset[3, 1] = torch.nan
    assert (closed_form.solve(closed_form.Regression(rows, offset), spread) == 0).all()


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
    closed = {"family": "shared", "steps": 0, "starts": ["mean", "closed_form"]}
    trained = optimal_constants(model, task, SOME, **closed)
    assert "closed_form" in {how["start"] for _, how in trained.values()}


def test_parts_of_any_size_give_the_same_constants(model, task, monkeypatch):
    sites = [find(name, model) for name in SOME]

    def constants(sites):
        values = TaskValues(model, task)
        return closed_form.constants(values, sites, "position", values.means(sites))

    whole = constants(sites)
    assert torch.equal(constants(sites[:1])["a1.h2"], whole["a1.h2"])
    monkeypatch.setattr(machine, "micro_batch", lambda n, *_: min(n, 7))
    monkeypatch.setattr(closed_form, "side_by_side", lambda sites, *_: [(site,) for site in sites])
    for name, constant in constants(sites).items():
        assert torch.allclose(constant, whole[name], atol=1e-3, rtol=1e-3)


def test_components_are_taken_side_by_side_as_far_as_they_fit(model, monkeypatch):
    sites = [find(name, model) for name in ("a1.h0", "a1.h1", "m1", "a1.h2")]  # 8, 8, 32, 8 wide
    monkeypatch.setattr(closed_form, "MOST_BYTES", 4 * 10 * 3 * 2 * 20)
    parts = closed_form.side_by_side(sites, n_rows=2, n=10, scores=3)
    assert [[site.name for site in part] for part in parts] == [
        ["a1.h0", "a1.h1"],
        ["m1"],
        ["a1.h2"],
    ]


def test_few_prompts_are_drawn_at_random_where_not_all_fit(model, monkeypatch):
    assert closed_form.some_prompts(model, 100, 5, 8).tolist() == list(range(100))
    monkeypatch.setattr(closed_form, "MOST", 40)
    some = closed_form.some_prompts(model, 100, 5, 8).tolist()
    assert len(set(some)) == 40 and some == sorted(some) and some[-1] > 60
    monkeypatch.setattr(closed_form, "MOST_BYTES", 7 * 4 * 8 * 5 * model.d_model)
    assert len(closed_form.some_prompts(model, 100, 5, 8)) == 7


def test_another_version_names_other_runs_of_constants_only(model, task, monkeypatch):
    ask = {"steps": 0, "starts": ["mean", "closed_form"], "families": "shared"}
    ways = ["mean", "optimal"]
    component_gaps(model, task, "a1.h2", ways, **ask)
    called = []
    whole = closed_form.constants
    monkeypatch.setattr(closed_form, "constants", lambda *given: called.append(1) or whole(*given))
    component_gaps(model, task, "a1.h2", ways, **ask)
    assert not called
    monkeypatch.setattr(closed_form, "VERSION", 99)
    component_gaps(model, task, "a1.h2", "mean", **ask)
    assert not called
    component_gaps(model, task, "a1.h2", ways, **ask)
    assert called


def test_the_label_metric_refuses_it(model, task):
    with pytest.raises(ValueError, match="loses least KL.*label"):
        component_gaps(model, task, "a1.h2", "optimal", metric="label", starts=["closed_form"])
