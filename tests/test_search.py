"""Searches: what their samplers promise, that they find a planted circuit, that they stop, resume and refuse as they should."""

import math
from dataclasses import replace
from importlib import import_module

import pytest
import scipy.stats
import torch
from conftest import random_gpt2

from oa_utils import runs, stats
from oa_utils.graph import Edge, Graph
from oa_utils.masked import MaskedModel
from oa_utils.models import wrap
from oa_utils.search import acdc, common, eap, eap_ig, edge_pruning, evaluate, filling, hcgs, ugs
from oa_utils.search.eap import EAPSettings, Scores, eap_scores, top_edges
from oa_utils.tasks import Task

ugs_file, hcgs_file, acdc_file = (import_module(f"oa_utils.search.{name}") for name in ("ugs", "hcgs", "acdc"))
VOCAB, T = 20, 6
PLANTED = [Edge("embed", "a0.h0", "v"), Edge("embed", "m1"), Edge("a0.h0", "m1"), Edge("embed", "out"), Edge("m1", "out")]


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("OA_STORE", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="session")
def planted() -> MaskedModel:
    """Two layers of two heads of which only a0.h0 (uniform attention) and m1 write, and out does not read a0.h0."""
    d, hf = 32, random_gpt2(seed=3, vocab=VOCAB, n_layer=2, n_head=2, n_embd=32, n_positions=16, tie_word_embeddings=False)
    blocks, generator = hf.transformer.h, torch.Generator().manual_seed(0)
    rand = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    tokens, heads, mlp = (torch.zeros(d), torch.zeros(d), torch.zeros(d))
    tokens[:12], heads[12:22], mlp[22:] = 1, 1, 1  # parts of the stream that each of the three writes into
    with torch.no_grad():
        hf.transformer.wte.weight.copy_(rand(VOCAB, d) * tokens * 2)
        hf.transformer.wpe.weight.zero_()
        for block in blocks:
            for weight in block.parameters():
                weight.zero_()
            block.ln_1.weight.fill_(1), block.ln_2.weight.fill_(1)
        hf.transformer.ln_f.weight.fill_(1), hf.transformer.ln_f.bias.zero_()
        blocks[0].attn.c_attn.weight[:, 2 * d : 2 * d + d // 2] = rand(d, d // 2) * tokens[:, None]  # values of a0.h0
        blocks[0].attn.c_proj.weight[: d // 2] = 0.1 * rand(d // 2, d) * heads
        blocks[1].mlp.c_fc.weight.copy_(rand(d, 4 * d) * (10 * heads + 0.5 * tokens)[:, None])
        blocks[1].mlp.c_proj.weight.copy_(0.04 * rand(4 * d, d) * mlp)
        hf.lm_head.weight.copy_(rand(VOCAB, d) * (tokens + mlp) * 0.7)
    return MaskedModel(wrap(hf, name="planted"))


def make_task(model, n: int = 64, seed: int = 0, vocab: int = VOCAB) -> Task:
    generator = torch.Generator().manual_seed(seed)
    tokens, cf = torch.randint(2, vocab, (2, n, T), generator=generator)
    tokens[:, 0] = cf[:, 0] = model.bos
    last = torch.full((n,), T - 1)
    top = model(tokens, last).topk(2).indices
    return Task("toy", tokens, last, top[:, :1], top[:, 1:], torch.arange(n) % 2 == 0, tuple(map(str, range(n))), cf)


@pytest.fixture(scope="session")
def task(planted) -> Task:
    return make_task(planted.model)


@pytest.fixture(scope="session")
def dense() -> MaskedModel:
    """A random model in which every edge matters."""
    return MaskedModel(wrap(random_gpt2(vocab=VOCAB, n_layer=2, n_positions=16), name="dense"))


# ---- uniform gradient sampling


@pytest.mark.parametrize("logit", [-2.0, 0.3, 1.0])
@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_alpha_is_uniform_with_probability_w_else_one_or_zero_with_mean_theta(logit, factor):
    n, theta = 40_000, torch.tensor([logit]).sigmoid()
    w = ugs_file.window(theta, factor)
    alpha = ugs_file.draw(theta, torch.rand(n, 1, generator=runs.generator(0)), w)[:, 0]
    middle = alpha[(alpha > 0) & (alpha < 1)]
    seen = [int((alpha == 0).sum()), len(middle), int((alpha == 1).sum())]
    expected = [n * float(p) for p in (1 - theta - w / 2, w, theta - w / 2)]
    pairs = [(s, e) for s, e in zip(seen, expected, strict=True) if e > 1e-3 * n]  # with c = 2 one of the ends may be empty
    total = sum(s for s, _ in pairs) / sum(e for _, e in pairs)
    assert scipy.stats.chisquare([s for s, _ in pairs], [e * total for _, e in pairs]).pvalue > 1e-3
    assert scipy.stats.kstest(middle.numpy(), "uniform").pvalue > 1e-3
    assert abs(alpha.mean() - theta) < 5 * alpha.std() / math.sqrt(n)


def test_slope_of_alpha_is_one_in_the_window_and_zero_outside():
    logits = torch.linspace(-3, 3, 50, requires_grad=True)
    theta = logits.sigmoid()
    alpha = ugs_file.draw(theta, torch.rand(1, 50, generator=runs.generator(1)), ugs_file.window(theta, 2.0))
    by_theta, by_logits = torch.autograd.grad(alpha.sum(), (theta, logits))
    inside = ((alpha > 0) & (alpha < 1))[0].float()
    assert 5 < inside.sum() < 45
    torch.testing.assert_close(by_theta, inside)
    torch.testing.assert_close(by_logits, inside * (theta * (1 - theta)).detach())


@pytest.mark.parametrize("loss", [lambda a: a**2, lambda a: (5 * a).sin(), lambda a: -(a * 3).exp(), lambda a: (a - 0.4) ** 4])
def test_one_edge_is_estimated_without_bias(loss):
    """The average gradient is L(1) − L(0), whatever happens between."""
    n, theta = 200_000, torch.tensor([0.7], requires_grad=True)
    alpha = ugs_file.normalise(ugs_file.draw(theta, torch.rand(n, 1, generator=runs.generator(2)), ugs_file.window(theta)))
    [got] = torch.autograd.grad(loss(alpha).mean(), theta)
    a = alpha.detach().requires_grad_()
    [slope] = torch.autograd.grad(loss(a).sum(), a)
    slope = slope[(a > 0) & (a < 1)]
    exact = loss(torch.ones(1)) - loss(torch.zeros(1))
    assert abs(got - exact) < 5 * slope.std() / math.sqrt(len(slope))
    assert got == pytest.approx(slope.mean().item(), rel=1e-4, abs=1e-5)


def test_gradient_is_a_mean_over_the_copies_in_the_window():
    theta = torch.tensor([0.7, 0.5, 0.9], requires_grad=True)
    u = torch.tensor([[0.7, 0.9, 0.1], [0.65, 0.5, 0.2], [0.1, 0.1, 0.3], [0.72, 0.9, 0.0]])  # 3, 1 and 0 in the window
    weight = torch.randn(4, 3, generator=runs.generator(3))

    def gradient(u, weight):
        alpha = ugs_file.normalise(ugs_file.draw(theta, u, ugs_file.window(theta)))
        return torch.autograd.grad((alpha * weight).sum(1).mean(), theta)[0]

    expected = torch.stack([weight[[0, 1, 3], 0].mean(), weight[1, 1], torch.tensor(0.0)])
    torch.testing.assert_close(gradient(u, weight), expected)
    torch.testing.assert_close(gradient(u.repeat(3, 1), weight.repeat(3, 1)), expected)


def test_products_of_edges_are_estimated_without_bias():
    n, theta = 400_000, torch.tensor([0.8, 0.4, 0.6], requires_grad=True)
    alpha = ugs_file.normalise(ugs_file.draw(theta, torch.rand(n, 3, generator=runs.generator(4)), ugs_file.window(theta)))
    [got] = torch.autograd.grad(alpha.prod(1).mean(), theta)
    exact = theta.prod() / theta
    torch.testing.assert_close(got, exact.detach(), atol=0.01, rtol=0)


def test_bias_of_a_curved_loss_vanishes_with_the_window():
    """L = ((α₁ + α₂)/2)⁴: uniform draws of the other edge bias the estimate, less so the fewer they are."""
    n, theta, bias = 1_000_000, torch.tensor([0.5, 0.5], requires_grad=True), {}
    exact = 0.5 * ((1.0 - 0.5**4) + (0.5**4 - 0.0))
    for factor in (2.0, 0.2):
        u = torch.rand(n, 2, generator=runs.generator(5))
        alpha = ugs_file.normalise(ugs_file.draw(theta, u, ugs_file.window(theta, factor)))
        [got] = torch.autograd.grad((alpha.mean(1) ** 4).mean(), theta)
        bias[factor] = abs(got.mean().item() - exact)
    assert bias[0.2] < 0.35 * bias[2.0] and bias[2.0] > 0.01


def test_price_has_the_gradient_of_its_two_ends():
    graph, lam, gamma = Graph(2, 3), 2e-3, 0.5
    theta = torch.rand(len(graph), generator=runs.generator(6)).double().requires_grad_()
    [got] = torch.autograd.grad(common.price(graph, theta, lam, gamma), theta)
    ends = torch.zeros(graph.n_vertices).double()
    for edge, value in zip(graph.edges, theta.tolist(), strict=True):
        ends[graph.vertex_index(edge.src)] += value
        ends[graph.vertex_index(edge.dst)] += value
    sech = 1 / torch.cosh(2 * ends / graph.degree) ** 2
    torch.testing.assert_close(got, lam + gamma * lam * (sech[graph.src] + sech[graph.dst]))
    assert (got <= (1 + 2 * gamma) * lam).all()
    torch.testing.assert_close(common.price(graph, theta, lam, 0.0), lam * theta.sum())
    ones = torch.ones(len(graph)).double().requires_grad_()
    [full] = torch.autograd.grad(common.price(graph, ones, lam, gamma), ones)
    torch.testing.assert_close((full - lam) / (2 * gamma * lam), torch.full_like(full, 1 / math.cosh(2) ** 2))


def test_variance_window_widens_where_gradients_vary(planted):
    sampler = ugs_file.Uniform(planted.graph, ugs_file.UGSSettings(variance=(0.5, 2.0)))
    sampler.optimiser = torch.optim.AdamW(sampler.groups())
    assert sampler.spread() == 1.0
    sampler.parameters["logits"].grad = torch.linspace(0, 1, sampler.units)
    sampler.optimiser.step()
    spread = sampler.spread()
    assert spread[0] == 0.5 and 1.5 < spread[-1] <= 2.0 and (spread.diff() >= 0).all()


# ---- HardConcrete


@pytest.mark.parametrize("log_alpha, beta", [(0.0, 2 / 3), (1.5, 0.4), (-1.0, 1.0)])
def test_hard_concrete_has_its_closed_forms(log_alpha, beta):
    n, low, high = 200_000, -0.1, 1.1
    u = hcgs_file.uniform(n, 1, runs.generator(7))
    alpha = hcgs_file.hard_concrete(torch.tensor([log_alpha]), beta, u)
    above = lambda x: 1 / (1 + math.exp(beta * math.log(x / (1 - x)) - log_alpha))  # noqa: E731  P(s > x)
    zero, one = 1 - above(-low / (high - low)), above((1 - low) / (high - low))
    for share, exact in (((alpha == 0).float().mean(), zero), ((alpha == 1).float().mean(), one)):
        assert abs(share - exact) < 5 * math.sqrt(exact * (1 - exact) / n)
    assert hcgs_file.nonzero(torch.tensor(log_alpha), beta).item() == pytest.approx(1 - zero, rel=1e-5)


def test_cold_hard_concrete_is_bernoulli():
    alpha = hcgs_file.hard_concrete(torch.tensor([0.8]), 1e-3, hcgs_file.uniform(50_000, 1, runs.generator(8)))
    assert ((alpha == 0) | (alpha == 1)).float().mean() > 0.99
    assert alpha.mean().item() == pytest.approx(1 / (1 + math.exp(-0.8)), abs=0.01)


# ---- the loop


def trainer(masked, task, tmp_path, kind=ugs_file.Uniform, **settings) -> common.Trainer:
    own = {ugs_file.Uniform: ugs_file.UGSSettings, hcgs_file.HardConcrete: hcgs_file.HCGSSettings}[kind](**settings)
    return common.Trainer(masked, task, own, kind(masked.graph, own), runs.Snapshots(tmp_path / "state", "x"))


def test_step_moves_logits_by_gradient_of_kl_and_price(dense, tmp_path):
    """The loop's gradient equals a slow one: per example, only inside windows, over N_k counted before pruning."""
    task = make_task(dense.model, 16)
    run = trainer(dense, task, tmp_path, ablation="counterfactual", lam=0.01, prompts=3, masks=4, clip=1e9, start=0.0)
    rng, sampler = runs.generator(1), run.sampler
    rows = torch.randperm(8, generator=rng)[:3].repeat_interleave(4)
    theta = sampler.keep().detach()
    alpha = ugs_file.draw(theta, torch.rand(12, len(dense.graph), generator=rng), ugs_file.window(theta))
    inside = ((alpha > 0) & (alpha < 1)).float()
    pruned = dense.graph.prune_dangling(alpha)
    assert ((pruned == 0) & (inside > 0)).any()  # otherwise the order of counting and pruning is not tested
    expected = torch.zeros_like(theta)
    for i, row in enumerate(rows):
        mask, part = pruned[i : i + 1].clone().requires_grad_(), task.train[row[None]]
        logp = dense(part.tokens, part.last, mask, dense.activations(part.counterfactual))
        [slope] = torch.autograd.grad(stats.kl(part.log_probs(dense.model), logp).sum(), mask)
        expected += slope[0] * inside[i] * (pruned[i] > 0)
    expected = expected / inside.sum(0).clamp(min=1)
    theta.requires_grad_()
    [cost] = torch.autograd.grad(common.price(dense.graph, theta, 0.01, 0.5), theta)
    run.advance()
    slope = theta.detach() * (1 - theta.detach())
    torch.testing.assert_close(sampler.parameters["logits"].grad, (expected + cost) * slope, rtol=1e-3, atol=1e-6)


def test_micro_batches_change_nothing(dense, tmp_path, monkeypatch):
    task, found = make_task(dense.model, 16), []
    for size in (60, 7):
        monkeypatch.setattr(runs, "micro_batch", lambda n, _, size=size: min(n, size))
        run = trainer(dense, task, tmp_path, ablation="optimal", prompts=5)
        run.advance()
        found.append(torch.cat([value.detach().flatten() for value in run.parameters.values()]))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_constants_of_kept_vertices_stay(dense, tmp_path):
    """With every α above zero no constant moves; where some are zero, some do."""
    task = make_task(dense.model, 16)
    for start, moves in ((20.0, False), (0.0, True)):
        run = trainer(dense, task, tmp_path, start=start)
        before = run.parameters["constants.heads"].detach().clone()
        run.advance()
        assert bool((run.parameters["constants.heads"] != before).any()) == moves


def test_killed_and_resumed_search_finds_the_same(planted, task, store, monkeypatch):
    whole = ugs(planted, task, "optimal", lam=0.02, steps=24, lr=0.2)
    monkeypatch.setenv("OA_STORE", str(store / "other"))
    monkeypatch.setattr(runs.Snapshots, "due", lambda self, every_seconds=20: True)
    advance = common.Trainer.advance

    def killed(self):
        if self.step == 13:
            raise KeyboardInterrupt
        return advance(self)

    monkeypatch.setattr(common.Trainer, "advance", killed)
    with pytest.raises(KeyboardInterrupt):
        ugs(planted, task, "optimal", lam=0.02, steps=24, lr=0.2)
    monkeypatch.setattr(common.Trainer, "advance", advance)
    again = ugs(planted, task, "optimal", lam=0.02, steps=24, lr=0.2)
    assert again.history["theta"] == whole.history["theta"] and again.history["loss"] == whole.history["loss"]
    assert (again.mask == whole.mask).all() and len(whole.history["step"]) == 24


def test_not_a_number_stops_and_keeps_the_last_good_state(planted, task, store, monkeypatch):
    kl, calls = stats.kl, []

    def broken(*args):
        calls.append(1)
        return kl(*args) * (float("nan") if len(calls) == 5 else 1.0)

    monkeypatch.setattr(stats, "kl", broken)
    with pytest.raises(RuntimeError, match="not finite at step 4.*snapshot"):
        ugs(planted, task, "counterfactual", steps=10)
    [path] = store.rglob("*.snapshot")
    assert not list(store.rglob("*.json"))
    again = ugs(planted, task, "counterfactual", steps=10)
    assert len(calls) == 5 + 6 and not path.exists() and len(again.history["loss"]) == 10


def test_same_seed_same_circuit_and_stored_run_is_loaded(planted, task, store, monkeypatch):
    one = ugs(planted, task, "counterfactual", steps=5, seed=3)
    monkeypatch.setattr(common.Trainer, "run", None)
    assert ugs(planted, task, "counterfactual", steps=5, seed=3).history["theta"] == one.history["theta"]
    monkeypatch.undo()
    monkeypatch.setenv("OA_STORE", str(store / "b"))
    assert ugs(planted, task, "counterfactual", steps=5, seed=3).history["theta"] == one.history["theta"]
    assert ugs(planted, task, "counterfactual", steps=5, seed=4).history["theta"] != one.history["theta"]


# ---- what they find


@pytest.mark.parametrize("ablation", ["counterfactual", "optimal", "mean"])
@pytest.mark.parametrize("search", [ugs, hcgs])
def test_gradient_sampling_finds_the_planted_circuit(planted, task, search, ablation):
    circuit = search(planted, task, ablation, lam=0.01, steps=120, lr=0.2, prompts=6, masks=6)
    assert circuit.edges == PLANTED
    assert circuit.method == search.__name__ and circuit.ablation == ablation and circuit.settings["lam"] == 0.01
    assert circuit.history["size"][-1] < 12 and sum(circuit.history["histogram"][-1]) == len(planted.graph)


@pytest.mark.parametrize("ablation", ["counterfactual", "mean", "resample", "zero"])
def test_acdc_finds_the_planted_circuit(planted, task, ablation):
    assert acdc(planted, task, ablation, lam=0.01).edges == PLANTED


@pytest.mark.parametrize("search", [eap, eap_ig, lambda *a, **k: eap_ig(*a, path="masks", **k)])
def test_attribution_finds_the_planted_circuit(planted, task, search):
    assert search(planted, task, "counterfactual", n_edges=5).edges == PLANTED


def test_edge_pruning_finds_the_planted_circuit(planted, task):
    own = {"lr": 0.5, "lr_multipliers": 0.02, "prompts": 16, "steps": 150}
    assert edge_pruning(planted, task, "counterfactual", n_edges=5, **own).edges == PLANTED


@pytest.mark.parametrize("search", [ugs, hcgs, acdc])
def test_vertex_level_finds_the_planted_vertices(planted, task, search):
    more = {} if search is acdc else {"steps": 120, "lr": 0.2, "prompts": 6, "masks": 6}
    circuit = search(planted, task, "counterfactual", lam=0.02, level="vertex", **more)
    assert circuit.vertices == ["embed", "a0.h0", "m1", "out"]
    inside = {"embed", "a0.h0", "m1", "out"}
    assert circuit.edges == [e for e in planted.graph.edges if {e.src, e.dst} <= inside]


@pytest.mark.parametrize("search", [ugs, hcgs])
def test_larger_price_gives_fewer_edges(dense, search):
    task = make_task(dense.model, 32)
    own = {"steps": 50, "lr": 0.3, "prompts": 4, "masks": 4}
    sizes = [search(dense, task, "counterfactual", lam=lam, **own).n_edges for lam in (0.0, price_of(dense, task), 100.0)]
    assert sizes[0] > 0.75 * len(dense.graph) and sizes[-1] == 0
    assert sizes[0] > sizes[1] + 10 > 10


# ---- ACDC


def price_of(masked, task, share=60.0) -> float:
    """A price at which some edges are worth it: a small share of the gap of the empty circuit."""
    fill, part = filling.fill_for(masked, task, "counterfactual"), task.train
    empty = evaluate.measure(masked, part, torch.zeros(len(masked.graph)), fill, part.log_probs(masked.model))
    return empty.mean().item() / share


def sweep_of(masked, task, lam, **settings):
    return acdc_file.Sweep(masked, task, acdc_file.ACDCSettings(lam=lam, prompts=8, **settings))


def greedy(masked, task, lam, ablation="counterfactual"):
    """The definition: one edge after the other, from the last to the first."""
    s = sweep_of(masked, task, lam, ablation=ablation)
    mask, current = torch.ones(len(masked.graph), dtype=torch.bool), 0.0
    for i in reversed(range(len(masked.graph))):
        without = mask.clone()
        without[i] = False
        [value] = s.gaps(masked.graph.prune_dangling(without)[None])
        if value - current < lam:
            mask, current = without, value
    return masked.graph.prune_dangling(mask)


@pytest.mark.parametrize("ablation", ["counterfactual", "mean"])
def test_guessing_ahead_is_exactly_greedy(dense, ablation):
    task = make_task(dense.model, 16)
    lam = price_of(dense, task)
    expected = greedy(dense, task, lam, ablation)
    assert 5 < expected.sum() < 90
    for guess in (1, 5, 16):
        circuit = acdc(dense, task, ablation, lam=lam, prompts=8, guess=guess)
        assert (circuit.mask == expected).all()


def test_acdc_at_its_ends_keeps_all_or_nothing(dense):
    task = make_task(dense.model, 16)
    none = runs.Snapshots(runs.store() / "none", "x")
    assert sweep_of(dense, task, -math.inf).run(none)["n_edges"] == len(dense.graph)
    assert acdc(dense, task, lam=math.inf, prompts=8).n_edges == 0


def test_acdc_goes_in_reverse_topological_order(dense):
    order = [int(i) for i in sweep_of(dense, make_task(dense.model, 16), 0.1).units()]
    index, graph = {v: i for i, v in enumerate(dense.graph.vertices)}, dense.graph
    readers = [graph.edges[i].dst for i in order]  # heads of a layer read side by side: they count as its first one
    ends = [graph.writers_before(int(v[1:].split(".")[0])) if graph.is_head(v) else index[v] for v in readers]
    assert len(set(order)) == len(dense.graph) and ends == sorted(ends, reverse=True)


def test_killed_acdc_goes_on(dense, store, monkeypatch):
    task = make_task(dense.model, 16)
    lam = price_of(dense, task)
    whole = acdc(dense, task, lam=lam, prompts=8)
    monkeypatch.setenv("OA_STORE", str(store / "other"))
    monkeypatch.setattr(runs.Snapshots, "due", lambda self, every_seconds=20: True)
    chain, calls = acdc_file.Sweep.chain, []

    def killed(self, *args):
        calls.append(1)
        if len(calls) == 9:
            raise KeyboardInterrupt
        return chain(self, *args)

    monkeypatch.setattr(acdc_file.Sweep, "chain", killed)
    with pytest.raises(KeyboardInterrupt):
        acdc(dense, task, lam=lam, prompts=8)
    assert (acdc(dense, task, lam=lam, prompts=8).mask == whole.mask).all()


# ---- attribution


def difference(masked, task, mask, fill):
    logp = masked(task.tokens, task.last, mask[None].double(), fill)
    return (logp.gather(1, task.right) - logp.gather(1, task.wrong)).mean().item()


def test_eap_is_the_slope_of_the_logit_difference(dense):
    """Finite differences; several edges together change it by the sum of their scores."""
    task = make_task(dense.model, 16)
    scores, fill = eap_scores(dense, task, EAPSettings("mean")), filling.constants_for(dense, task, "mean")
    ones, h = torch.ones(len(dense.graph)), 0.02
    for which in ([0], [7], [60], list(range(20, 26)), [3, 30, 80]):
        up, down = ones.clone(), ones.clone()
        up[which], down[which] = 1 + h, 1 - h
        slope = (difference(dense, task.train, up, fill) - difference(dense, task.train, down, fill)) / (2 * h)
        assert slope == pytest.approx(scores[which].sum().item(), rel=0.03, abs=2e-4)


def test_path_of_masks_at_one_point_is_the_slope_halfway(dense):
    task = make_task(dense.model, 16)
    scores = Scores(dense, task, EAPSettings("mean", "masks"))
    half = scores.gradient(torch.arange(8), torch.full((len(dense.graph),), 0.5), scores.fill(None)) / 8
    torch.testing.assert_close(eap_scores(dense, task, EAPSettings("mean", "masks")), half)


@pytest.mark.parametrize("ablation", ["counterfactual", "mean"])
def test_path_of_inputs_averages_slopes_at_mixed_embeddings(dense, ablation):
    """By hand: the score of an edge into out, whose slope is that of the stream at the end."""
    task = make_task(dense.model, 8)
    part, model = task.train, dense.model
    values, fill = dense.activations(part.tokens), filling.fill_for(dense, task, ablation)(torch.arange(4))
    wrote = values.mlps[:, -1, 1] - (fill.mlps[:, -1, 1] if ablation == "counterfactual" else fill.mlps[-1, 1])
    clean = values.embed
    corrupt = (fill.embed if ablation == "counterfactual" else fill.embed[None].expand_as(clean)).clone()
    corrupt[:, 0] = clean[:, 0]
    total = 0
    for k in (1, 2):
        end = model.run(corrupt + k / 2 * (clean - corrupt))[:, -1].detach().requires_grad_()
        logp = model.log_probs(end)
        [slope] = torch.autograd.grad((logp.gather(1, part.right) - logp.gather(1, part.wrong)).sum(), end)
        total += (wrote * slope).sum().item() / 2 / len(part)
    scores = eap_scores(dense, task, EAPSettings(ablation, "inputs", 2))
    assert scores[dense.graph.index(Edge("m1", "out"))].item() == pytest.approx(total, rel=1e-3, abs=1e-5)


def test_scores_along_masks_add_up_to_the_gap_of_the_empty_circuit(dense):
    task = make_task(dense.model, 16)
    scores = eap_scores(dense, task, EAPSettings("counterfactual", "masks", 60))
    assert scores.sum().item() == pytest.approx(price_of(dense, task, 1), rel=0.02)


def test_slope_of_kl_is_zero_at_the_full_model(dense):
    task = make_task(dense.model, 16)
    scores = Scores(dense, task, EAPSettings("counterfactual", "masks"))
    rows = torch.arange(8)
    assert scores.gradient(rows, torch.ones(len(dense.graph)), scores.fill(rows)).abs().max() < 1e-4


def test_every_size_comes_from_one_set_of_scores(dense, monkeypatch):
    task = make_task(dense.model, 16)
    large = eap(dense, task, n_edges=60)
    monkeypatch.setattr(Scores, "all", None)
    small = eap(dense, task, n_edges=20)
    assert 10 < small.n_edges <= 20 < large.n_edges <= 60 and not (small.mask & ~large.mask).any()
    assert len(small.history["scores"]) == len(dense.graph)


def test_top_edges_takes_as_many_as_fit():
    graph = Graph(2, 2)
    scores = torch.rand(len(graph), generator=runs.generator(9))
    order = scores.argsort(descending=True)
    taken = [torch.zeros(len(graph)).index_fill(0, order[:k], 1) for k in range(len(graph) + 1)]
    sizes = [int(graph.prune_dangling(mask).sum()) for mask in taken]
    for n in (0, 1, 5, 17, 40, len(graph)):
        assert int(top_edges(graph, scores, n).sum()) == max(s for s in sizes if s <= n)


# ---- fills


def test_fills_are_those_of_their_ablation(dense):
    task, rows = make_task(dense.model, 16), torch.tensor([3, 1])
    part, fills = task.test, {a: filling.fill_for(dense, task, a, "test") for a in common.ABLATIONS}
    seen = dense.activations(task.train.tokens)
    torch.testing.assert_close(fills["mean"](rows).mlps[2], seen.mlps[:, 2].mean(0), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(fills["mean"](rows).embed[1], seen.embed[:, 1].mean(0), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(fills["optimal"](rows).heads, seen.heads[:, 1:].mean((0, 1)), atol=1e-5, rtol=1e-4)
    other = dense.activations(task.train.counterfactual)
    torch.testing.assert_close(fills["cf_mean"](rows).heads[3], other.heads[:, 3].mean(0), atol=1e-5, rtol=1e-4)
    assert torch.equal(fills["counterfactual"](rows).heads, dense.activations(part.counterfactual[rows]).heads)
    assert torch.equal(fills["resample"](rows).heads, dense.activations(part.resampled(part.partners(0))[rows]).heads)
    assert torch.equal(fills["zero"](rows).heads[0, 1], dense.model.layers[1].b_V) and not fills["zero"](rows).mlps.any()
    drawn = torch.stack([fills["resample"](rows, runs.generator(seed)).embed for seed in range(8)])  # [8 2 pos d]
    assert len(drawn.unique(dim=0)) > 4 and (drawn != dense.activations(part.tokens[rows]).embed).any(-1).any(-1).all()


# ---- refusals


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda m, t: ugs(m, t, "noise"), "unknown ablation 'noise'.*counterfactual"),
        (lambda m, t: ugs(m, t, lam=-1e-3), "price.*-0.001"),
        (lambda m, t: hcgs(m, t, lam=math.nan), "price.*nan"),
        (lambda m, t: acdc(m, t, lam=math.nan), "price.*nan"),
        (lambda m, t: acdc(m, t, "optimal"), "ACDC cannot search under 'optimal'.*ugs"),
        (lambda m, t: eap(m, t, "optimal"), "EAP cannot search under 'optimal'.*gap"),
        (lambda m, t: eap_ig(m, t, "optimal"), "EAP cannot search under 'optimal'.*gap"),
        (lambda m, t: eap(m, t, n_edges=-1), "n_edges must be from 0 to"),
        (lambda m, t: edge_pruning(m, t, n_edges=10**6), "n_edges must be from 0 to"),
        (lambda m, t: ugs(m, t, level="head"), "level is one of edge, vertex"),
        (lambda m, t: ugs(m, t, window=3.0), "at most 2"),
        (lambda m, t: ugs(m, t, pruning="maybe"), "pruning is one of"),
        (lambda m, t: ugs(m, replace(t, counterfactual=None), "counterfactual"), "no counterfactual"),
        (lambda m, t: eap(m, replace(t, wrong=-torch.ones_like(t.wrong))), "right.*wrong.*masks"),
        (lambda m, t: eap_ig(m, t, path="none"), "path"),
    ],
)
def test_bad_requests_are_refused_before_any_work(planted, task, monkeypatch, call, words):
    monkeypatch.setattr(runs, "run", None)
    with pytest.raises(ValueError, match=words):
        call(planted, task)


@pytest.mark.parametrize("pruning, everywhere", [("batch", True), ("none", False)])
def test_other_rules_run_too(planted, task, pruning, everywhere):
    rules = {"steps": 4, "pruning": pruning, "everywhere": everywhere}
    assert ugs(planted, task, window=2.0, noise=0.1, variance=(0.5, 2.0), **rules).n_edges
    assert hcgs(planted, task, released=True, **rules).history["loss"]
