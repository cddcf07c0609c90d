"""Searches: what their samplers promise, that they find a planted circuit, that they stop, resume
and refuse as they should."""

import inspect
import math
from dataclasses import fields, replace
from importlib import import_module

import pytest
import scipy.stats
import torch
from toys import PLANTED, make_task

from oa_utils import machine, stats, store
from oa_utils.fills import ABLATIONS, edge_constants, edge_fill
from oa_utils.graph import Edge, Graph
from oa_utils.search import acdc, eap, eap_ig, edge_pruning, gap, hcgs, shared, sweep, ugs
from oa_utils.search.eap import EAPSettings, Scores, eap_scores, top_edges
from oa_utils.search.gaps import measure
from oa_utils.search.loop import Trainer, price
from oa_utils.store import Snapshots

acdc_file = import_module("oa_utils.search.acdc")
hcgs_file = import_module("oa_utils.search.hcgs")
ugs_file = import_module("oa_utils.search.ugs")
Backwards = acdc_file.Backwards
draw = ugs_file.draw
normalise = ugs_file.normalise
window = ugs_file.window


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.rand(*shape, generator=machine.generator(seed))


# ---- uniform gradient sampling


@pytest.mark.parametrize("logit", [-2.0, 0.3, 1.0])
@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_alpha_is_uniform_with_probability_w_else_one_or_zero_with_mean_theta(logit, factor):
    n = 40_000
    theta = torch.tensor([logit]).sigmoid()
    w = window(theta, factor)
    alpha = draw(theta, random(n, 1, seed=0), w)[:, 0]
    middle = alpha[(alpha > 0) & (alpha < 1)]
    seen = [int((alpha == 0).sum()), len(middle), int((alpha == 1).sum())]
    expected = [n * float(p) for p in (1 - theta - w / 2, w, theta - w / 2)]
    # with c = 2 one of the ends may be empty
    pairs = [(s, e) for s, e in zip(seen, expected, strict=True) if e > 1e-3 * n]
    observed = [s for s, _ in pairs]
    scale = sum(observed) / sum(e for _, e in pairs)
    assert scipy.stats.chisquare(observed, [e * scale for _, e in pairs]).pvalue > 1e-3
    assert scipy.stats.kstest(middle.numpy(), "uniform").pvalue > 1e-3
    assert abs(alpha.mean() - theta) < 5 * alpha.std() / math.sqrt(n)


def test_slope_of_alpha_is_one_in_the_window_and_zero_outside():
    logits = torch.linspace(-3, 3, 50, requires_grad=True)
    theta = logits.sigmoid()
    alpha = draw(theta, random(1, 50, seed=1), window(theta, 2.0))
    by_theta, by_logits = torch.autograd.grad(alpha.sum(), (theta, logits))
    inside = ((alpha > 0) & (alpha < 1))[0].float()
    assert 5 < inside.sum() < 45
    torch.testing.assert_close(by_theta, inside)
    torch.testing.assert_close(by_logits, inside * (theta * (1 - theta)).detach())


@pytest.mark.parametrize(
    "loss",
    [
        lambda a: a**2,
        lambda a: (5 * a).sin(),
        lambda a: -(a * 3).exp(),
        lambda a: (a - 0.4) ** 4,
    ],
)
def test_one_edge_is_estimated_without_bias(loss):
    """The average gradient is L(1) − L(0), whatever happens between."""
    theta = torch.tensor([0.7], requires_grad=True)
    alpha = normalise(draw(theta, random(200_000, 1, seed=2), window(theta)))
    [estimate] = torch.autograd.grad(loss(alpha).mean(), theta)
    a = alpha.detach().requires_grad_()
    [slope] = torch.autograd.grad(loss(a).sum(), a)
    slope = slope[(a > 0) & (a < 1)]
    exact = loss(torch.ones(1)) - loss(torch.zeros(1))
    assert abs(estimate - exact) < 5 * slope.std() / math.sqrt(len(slope))
    assert estimate == pytest.approx(slope.mean().item(), rel=1e-4, abs=1e-5)


def test_gradient_is_a_mean_over_the_copies_in_the_window():
    theta = torch.tensor([0.7, 0.5, 0.9], requires_grad=True)
    u = torch.tensor([[0.7, 0.9, 0.1], [0.65, 0.5, 0.2], [0.1, 0.1, 0.3], [0.72, 0.9, 0.0]])
    weight = torch.randn(4, 3, generator=machine.generator(3))

    def gradient(u, weight):
        alpha = normalise(draw(theta, u, window(theta)))
        return torch.autograd.grad((alpha * weight).sum(1).mean(), theta)[0]

    # 3, 1 and 0 copies of the three edges are in the window
    expected = torch.stack([weight[[0, 1, 3], 0].mean(), weight[1, 1], torch.tensor(0.0)])
    torch.testing.assert_close(gradient(u, weight), expected)
    torch.testing.assert_close(gradient(u.repeat(3, 1), weight.repeat(3, 1)), expected)


def test_products_of_edges_are_estimated_without_bias():
    theta = torch.tensor([0.8, 0.4, 0.6], requires_grad=True)
    alpha = normalise(draw(theta, random(400_000, 3, seed=4), window(theta)))
    [estimate] = torch.autograd.grad(alpha.prod(1).mean(), theta)
    exact = theta.prod() / theta
    torch.testing.assert_close(estimate, exact.detach(), atol=0.01, rtol=0)


def test_bias_of_a_curved_loss_vanishes_with_the_window():
    """L = ((α₁ + α₂)/2)⁴: uniform draws of the other edge bias the estimate, less so the fewer they
    are."""
    theta = torch.tensor([0.5, 0.5], requires_grad=True)
    exact = 0.5 * ((1.0 - 0.5**4) + (0.5**4 - 0.0))
    bias = {}
    for factor in (2.0, 0.2):
        u = random(1_000_000, 2, seed=5)
        alpha = normalise(draw(theta, u, window(theta, factor)))
        [estimate] = torch.autograd.grad((alpha.mean(1) ** 4).mean(), theta)
        bias[factor] = abs(estimate.mean().item() - exact)
    assert bias[2.0] > 0.01
    assert bias[0.2] < 0.35 * bias[2.0]


def test_price_has_the_gradient_of_its_two_ends():
    graph = Graph(2, 3)
    lam = 2e-3
    gamma = 0.5
    theta = random(len(graph), seed=6).double().requires_grad_()
    [slope] = torch.autograd.grad(price(graph, theta, lam, gamma), theta)
    ends = torch.zeros(graph.n_vertices).double()
    for edge, value in zip(graph.edges, theta.tolist(), strict=True):
        ends[graph.vertex_index(edge.src)] += value
        ends[graph.vertex_index(edge.dst)] += value
    sech = 1 / torch.cosh(2 * ends / graph.degree) ** 2
    torch.testing.assert_close(slope, lam + gamma * lam * (sech[graph.src] + sech[graph.dst]))
    assert (slope <= (1 + 2 * gamma) * lam).all()
    torch.testing.assert_close(price(graph, theta, lam, 0.0), lam * theta.sum())
    ones = torch.ones(len(graph)).double().requires_grad_()
    [full] = torch.autograd.grad(price(graph, ones, lam, gamma), ones)
    share = (full - lam) / (2 * gamma * lam)
    torch.testing.assert_close(share, torch.full_like(full, 1 / math.cosh(2) ** 2))


def test_variance_window_widens_where_gradients_vary(planted):
    sampler = ugs_file.Uniform(planted.graph, ugs_file.UGSSettings(variance=(0.5, 2.0)))
    sampler.optimiser = torch.optim.AdamW(sampler.groups())
    assert sampler.spread() == 1.0
    sampler.parameters["logits"].grad = torch.linspace(0, 1, sampler.units)
    sampler.optimiser.step()
    spread = sampler.spread()
    assert spread[0] == 0.5
    assert 1.5 < spread[-1] <= 2.0
    assert (spread.diff() >= 0).all()


# ---- HardConcrete


@pytest.mark.parametrize("log_alpha, beta", [(0.0, 2 / 3), (1.5, 0.4), (-1.0, 1.0)])
def test_hard_concrete_has_its_closed_forms(log_alpha, beta):
    n = 200_000
    low, high = hcgs_file.STRETCH
    u = hcgs_file.uniform(n, 1, machine.generator(7))
    alpha = hcgs_file.hard_concrete(torch.tensor([log_alpha]), beta, u)

    def above(x: float) -> float:
        """P(s > x) before stretching."""
        return 1 / (1 + math.exp(beta * math.log(x / (1 - x)) - log_alpha))

    zero = 1 - above(-low / (high - low))
    one = above((1 - low) / (high - low))
    for value, exact in ((0, zero), (1, one)):
        share = (alpha == value).float().mean()
        assert abs(share - exact) < 5 * math.sqrt(exact * (1 - exact) / n)
    chance = hcgs_file.nonzero(torch.tensor(log_alpha), beta).item()
    assert chance == pytest.approx(1 - zero, rel=1e-5)


def test_cold_hard_concrete_is_bernoulli():
    u = hcgs_file.uniform(50_000, 1, machine.generator(8))
    alpha = hcgs_file.hard_concrete(torch.tensor([0.8]), 1e-3, u)
    assert ((alpha == 0) | (alpha == 1)).float().mean() > 0.99
    assert alpha.mean().item() == pytest.approx(1 / (1 + math.exp(-0.8)), abs=0.01)


def test_the_released_stretch_draws_fewer_ones_and_more_zeros(planted):
    draws = []
    for released in (False, True):
        settings = hcgs_file.HCGSSettings(released=released)
        sampler = hcgs_file.HardConcrete(planted.graph, settings)
        draws.append(sampler.draw(200, machine.generator(0)))
    right, wrong = draws
    assert (wrong == 0).sum() > (right == 0).sum()
    assert (wrong == 1).sum() < (right == 1).sum()


# ---- the loop

KINDS = {
    ugs_file.Uniform: ugs_file.UGSSettings,
    hcgs_file.HardConcrete: hcgs_file.HCGSSettings,
}


def trainer(masked, task, tmp_path, kind=ugs_file.Uniform, **settings) -> Trainer:
    settings = KINDS[kind](**settings)
    sampler = kind(masked.graph, settings)
    return Trainer(masked, task, settings, sampler, Snapshots(tmp_path / "state", "x"))


def test_step_moves_logits_by_gradient_of_kl_and_price(dense, tmp_path):
    """The loop's gradient equals a slow one: per example, only inside windows, over N_k counted
    before pruning."""
    task = make_task(dense.model, 16)
    settings = {"lam": 0.01, "prompts": 3, "masks": 4, "clip": 1e9, "start": 0.0}
    run = trainer(dense, task, tmp_path, ablation="counterfactual", **settings)
    rng = machine.generator(1)
    rows = torch.randperm(8, generator=rng)[:3].repeat_interleave(4)
    theta = run.sampler.keep().detach()
    u = torch.rand(12, len(dense.graph), generator=rng)
    alpha = draw(theta, u, window(theta))
    inside = ((alpha > 0) & (alpha < 1)).float()
    pruned = dense.graph.prune_dangling(alpha)
    assert ((pruned == 0) & (inside > 0)).any(), "or the order of counting and pruning is untested"
    expected = torch.zeros_like(theta)
    for i, row in enumerate(rows):
        mask = pruned[i : i + 1].clone().requires_grad_()
        part = task.train[row[None]]
        logp = dense(part.tokens, part.last, mask, dense.activations(part.counterfactual))
        loss = stats.kl(part.log_probs(dense.model), logp).sum()
        [slope] = torch.autograd.grad(loss, mask)
        expected += slope[0] * inside[i] * (pruned[i] > 0)
    expected = expected / inside.sum(0).clamp(min=1)
    theta.requires_grad_()
    [cost] = torch.autograd.grad(price(dense.graph, theta, 0.01, 0.5), theta)
    run.advance()
    by_logit = theta.detach() * (1 - theta.detach())
    gradient = run.sampler.parameters["logits"].grad
    torch.testing.assert_close(gradient, (expected + cost) * by_logit, rtol=1e-3, atol=1e-6)


def test_micro_batches_change_nothing(dense, tmp_path, monkeypatch):
    task = make_task(dense.model, 16)
    parameters = []
    for size in (60, 7):
        monkeypatch.setattr(machine, "micro_batch", lambda n, _, size=size: min(n, size))
        run = trainer(dense, task, tmp_path, ablation="optimal", prompts=5)
        run.advance()
        values = [value.detach().flatten() for value in run.parameters.values()]
        parameters.append(torch.cat(values))
    torch.testing.assert_close(*parameters, rtol=1e-4, atol=1e-5)


def constants_move(masked, task, tmp_path, **settings) -> bool:
    run = trainer(masked, task, tmp_path, **settings)
    before = [part.detach().clone() for part in run.constants]
    run.advance()
    return any(bool((now != then).any()) for now, then in zip(run.constants, before, strict=True))


def test_constants_of_kept_vertices_stay(dense, tmp_path):
    """With every α above zero no constant moves; where some are zero, some do."""
    task = make_task(dense.model, 16)
    assert not constants_move(dense, task, tmp_path, start=20.0)
    assert constants_move(dense, task, tmp_path, start=0.0)


def test_along_every_edge_constants_move_where_no_edge_is_gone(dense, tmp_path):
    """At this start α is 1 or, rarely, between: never 0."""
    task = make_task(dense.model, 16)
    start = {"start": 6.0, "window": 2.0}
    assert not constants_move(dense, task, tmp_path, **start)
    assert constants_move(dense, task, tmp_path, **start, everywhere=True)


def test_dangling_edges_are_pruned_mask_by_mask_or_by_batch_or_not_at_all(dense, tmp_path):
    task = make_task(dense.model, 16)
    graph = dense.graph
    masks = random(6, len(graph), seed=0) * (random(6, len(graph), seed=1) < 0.12)
    pruned = {}
    for how in ("sample", "batch", "none"):
        run = trainer(dense, task, tmp_path, pruning=how)
        pruned[how] = run.pruned(masks)
    assert torch.equal(pruned["none"], masks)
    assert torch.equal(pruned["sample"], graph.prune_dangling(masks))
    in_some = graph.prune_dangling(masks.amax(0)) > 0
    assert torch.equal(pruned["batch"], masks * in_some)
    sizes = [int((pruned[how] > 0).sum()) for how in ("sample", "batch", "none")]
    assert sizes[0] < sizes[1] < sizes[2]


# ---- going on after a stop


def killed_at(n: int, function, counter: list):
    """The function, stopped at its n-th call, once."""

    def call(*given):
        counter.append(1)
        if len(counter) == n:
            raise KeyboardInterrupt
        return function(*given)

    return call


@pytest.fixture
def resumed(tmp_path, monkeypatch):
    """resumed(compute, owner, method, n): what `compute` gives after a stop at the n-th call of a
    method, in an empty store, with a snapshot after every step; and how often it was called."""

    def run(compute, owner, method: str, n: int):
        calls = []
        with monkeypatch.context() as patch:
            patch.setenv("OA_STORE", str(tmp_path / "killed"))
            patch.setattr(Snapshots, "due", lambda self: True)
            patch.setattr(owner, method, killed_at(n, getattr(owner, method), calls))
            with pytest.raises(KeyboardInterrupt):
                compute()
            assert list((tmp_path / "killed").rglob("*.snapshot"))
            answer = compute()
            assert not list((tmp_path / "killed").rglob("*.snapshot"))
        return answer, len(calls)

    return run


def without_seconds(circuit) -> dict:
    return {name: value for name, value in circuit.history.items() if name != "seconds"}


@pytest.mark.parametrize("search", [ugs, hcgs, edge_pruning])
def test_killed_and_resumed_search_is_bit_by_bit_the_same(planted, task, resumed, search):
    aim = {"n_edges": 9} if search is edge_pruning else {"lam": 0.02}

    def compute():
        return search(planted, task, "optimal", **aim, steps=12, lr=0.3)

    whole = compute()
    again, steps = resumed(compute, Trainer, "advance", 7)
    assert steps == 12 + 1
    assert len(whole.history["step"]) == 12
    assert without_seconds(again) == without_seconds(whole)
    assert (again.mask == whole.mask).all()


@pytest.mark.parametrize("n", [3, 6, 12])
def test_killed_and_resumed_acdc_is_bit_by_bit_the_same(dense, resumed, n):
    task = make_task(dense.model, 16)
    lam = price_of(dense, task)

    def compute():
        return acdc(dense, task, lam=lam, prompts=8)

    whole = compute()
    again, steps = resumed(compute, Backwards, "chain", n)
    assert steps == len(whole.history["step"])  # its first entry is the start, one call was killed
    assert without_seconds(again) == without_seconds(whole)
    assert (again.mask == whole.mask).all()


def test_not_a_number_stops_and_keeps_the_last_good_state(planted, task, tmp_path, monkeypatch):
    kl = stats.kl
    calls = []

    def broken(*given):
        calls.append(1)
        return kl(*given) * (math.nan if len(calls) == 5 else 1.0)

    monkeypatch.setattr(stats, "kl", broken)
    with pytest.raises(RuntimeError, match="not finite at step 4.*snapshot"):
        ugs(planted, task, "counterfactual", steps=10)
    [path] = tmp_path.rglob("*.snapshot")
    assert not list(tmp_path.rglob("*.json"))
    again = ugs(planted, task, "counterfactual", steps=10)
    assert len(calls) == 5 + 6
    assert not path.exists()
    assert len(again.history["loss"]) == 10


def test_same_seed_same_circuit_and_stored_run_is_loaded(planted, task, tmp_path, monkeypatch):
    def theta(seed):
        return ugs(planted, task, "counterfactual", steps=5, seed=seed).history["theta"]

    one = theta(3)
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "run", lambda *given: pytest.fail("trained again"))
        assert theta(3) == one
    monkeypatch.setenv("OA_STORE", str(tmp_path / "other"))
    assert theta(3) == one
    assert theta(4) != one


# ---- what they find


@pytest.mark.parametrize("ablation", ["counterfactual", "optimal", "mean"])
@pytest.mark.parametrize("search", [ugs, hcgs])
def test_gradient_sampling_finds_the_planted_circuit(planted, task, search, ablation):
    quick = {"lam": 0.01, "steps": 70, "lr": 0.35, "prompts": 6, "masks": 6}
    circuit = search(planted, task, ablation, **quick)
    assert circuit.edges == PLANTED
    assert (circuit.method, circuit.ablation) == (search.__name__, ablation)
    assert circuit.settings["lam"] == 0.01
    assert circuit.history["size"][-1] < 12
    assert sum(circuit.history["histogram"][-1]) == len(planted.graph)


@pytest.mark.parametrize("ablation", ["counterfactual", "mean", "resample", "zero"])
def test_acdc_finds_the_planted_circuit(planted, task, ablation):
    assert acdc(planted, task, ablation, lam=0.01).edges == PLANTED


@pytest.mark.parametrize("search, options", [(eap, {}), (eap_ig, {}), (eap_ig, {"path": "masks"})])
def test_attribution_finds_the_planted_circuit(planted, task, search, options):
    assert search(planted, task, "counterfactual", n_edges=5, **options).edges == PLANTED


def test_edge_pruning_finds_the_planted_circuit(planted, task):
    quick = {"lr": 0.5, "lr_multipliers": 0.02, "prompts": 16, "steps": 150}
    assert edge_pruning(planted, task, "counterfactual", n_edges=5, **quick).edges == PLANTED


@pytest.mark.parametrize("search", [ugs, hcgs, acdc])
def test_vertex_level_finds_the_planted_vertices(planted, task, search):
    quick = {"steps": 70, "lr": 0.35, "prompts": 6, "masks": 6} if search is not acdc else {}
    circuit = search(planted, task, "counterfactual", lam=0.02, level="vertex", **quick)
    inside = ["embed", "a0.h0", "m1", "out"]
    assert circuit.vertices == inside
    between = [edge for edge in planted.graph.edges if {edge.src, edge.dst} <= set(inside)]
    assert circuit.edges == between


@pytest.mark.parametrize("search", [ugs, hcgs])
def test_larger_price_gives_fewer_edges(dense, search):
    task = make_task(dense.model, 32)
    quick = {"steps": 30, "lr": 0.5, "prompts": 4, "masks": 4}
    prices = (0.0, price_of(dense, task), 100.0)
    sizes = [search(dense, task, "counterfactual", lam=lam, **quick).n_edges for lam in prices]
    assert sizes[0] > 0.75 * len(dense.graph)
    assert sizes[0] > sizes[1] + 10 > 10
    assert sizes[-1] == 0


@pytest.mark.parametrize(
    "search, change",
    [
        (ugs, {"pruning": "batch"}),
        (ugs, {"pruning": "none"}),
        (ugs, {"everywhere": True}),
        (ugs, {"window": 2.0}),
        (ugs, {"noise": 0.1}),
        (ugs, {"variance": [0.5, 2.0]}),
        (hcgs, {"released": True}),
        (hcgs, {"temperature": 0.3}),
    ],
)
def test_other_rules_train_other_circuits(planted, task, search, change):
    """A setting that nothing reads would leave θ as it was."""
    quick = {"steps": 6, "start": 0.0}
    plain = search(planted, task, **quick)
    changed = search(planted, task, **{**quick, **change})
    thetas = [torch.tensor(circuit.history["theta"]) for circuit in (plain, changed)]
    assert thetas[1].isfinite().all()
    assert not torch.equal(*thetas)
    [name] = change
    assert changed.settings[name] == store.frozen(change[name])


# ---- ACDC


def price_of(masked, task, share=60.0) -> float:
    """A price at which some edges are worth it: a small share of the gap of the empty circuit."""
    fill = edge_fill(masked, task, ABLATIONS["counterfactual"])
    part = task.train
    none = torch.zeros(len(masked.graph))
    empty = measure(masked, part, none, fill, part.log_probs(masked.model))
    return empty.mean().item() / share


def walk(masked, task, lam, **settings) -> Backwards:
    return Backwards(masked, task, acdc_file.ACDCSettings(lam=lam, prompts=8, **settings))


def greedy(masked, task, lam, ablation):
    """The definition: one edge after the other, from the last to the first."""
    gaps = walk(masked, task, lam, ablation=ablation).gaps
    mask = torch.ones(len(masked.graph), dtype=torch.bool)
    current = 0.0
    for i in reversed(range(len(masked.graph))):
        without = mask.clone()
        without[i] = False
        [value] = gaps(masked.graph.prune_dangling(without)[None])
        if value - current < lam:
            mask = without
            current = value
    return masked.graph.prune_dangling(mask)


@pytest.mark.parametrize("ablation", ["counterfactual", "mean"])
def test_guessing_ahead_is_exactly_greedy(dense, ablation):
    task = make_task(dense.model, 16)
    lam = price_of(dense, task)
    expected = greedy(dense, task, lam, ablation)
    assert 5 < expected.sum() < 90
    for guess in (1, 16):
        circuit = acdc(dense, task, ablation, lam=lam, prompts=8, guess=guess)
        assert (circuit.mask == expected).all()


def test_acdc_at_its_ends_keeps_all_or_nothing(dense, tmp_path):
    task = make_task(dense.model, 16)
    at_no_price = walk(dense, task, 0.0)
    object.__setattr__(at_no_price.settings, "lam", -math.inf)  # below what may be asked for
    numbers, _ = at_no_price.run(Snapshots(tmp_path / "none", "x"))
    assert numbers["n_edges"] == len(dense.graph)
    assert acdc(dense, task, lam=math.inf, prompts=8).n_edges == 0


def test_acdc_goes_in_reverse_topological_order(dense):
    graph = dense.graph
    order = [int(unit) for unit in walk(dense, make_task(dense.model, 16), 0.1).units()]
    assert sorted(order) == list(range(len(graph)))
    ends = []
    for i in order:
        reader = graph.edges[i].dst
        if graph.is_head(reader):  # heads of a layer read side by side: as its first one
            layer = int(reader[1:].split(".")[0])
            ends.append(graph.writers_before(layer))
        else:
            ends.append(graph.vertex_index(reader))
    assert ends == sorted(ends, reverse=True)


# ---- attribution


def difference(masked, task, mask, fill) -> float:
    logp = masked(task.tokens, task.last, mask[None].double(), fill)
    return (logp.gather(1, task.right) - logp.gather(1, task.wrong)).mean().item()


def test_eap_is_the_slope_of_the_logit_difference(dense):
    """Finite differences; several edges together change it by the sum of their scores."""
    task = make_task(dense.model, 16)
    scores = eap_scores(dense, task, EAPSettings("mean"))
    fill = edge_constants(dense, task, ABLATIONS["mean"])
    h = 0.02
    for which in ([0], [7], [60], list(range(20, 26)), [3, 30, 80]):
        ends = []
        for step in (h, -h):
            mask = torch.ones(len(dense.graph))
            mask[which] += step
            ends.append(difference(dense, task.train, mask, fill))
        slope = (ends[0] - ends[1]) / (2 * h)
        assert slope == pytest.approx(scores[which].sum().item(), rel=0.03, abs=2e-4)


def test_path_of_masks_at_one_point_is_the_slope_halfway(dense):
    task = make_task(dense.model, 16)
    settings = EAPSettings("mean", "masks")
    scores = Scores(dense, task, settings)
    rows = torch.arange(8)
    middle = torch.full((len(dense.graph),), 0.5)
    half = scores.gradient(rows, middle, scores.fill(rows)) / 8
    torch.testing.assert_close(eap_scores(dense, task, settings), half)


@pytest.mark.parametrize("ablation", ["counterfactual", "mean"])
def test_path_of_inputs_averages_slopes_at_mixed_embeddings(dense, ablation):
    """By hand: the score of an edge into out, whose slope is that of the stream at the end."""
    task = make_task(dense.model, 8)
    part = task.train
    model = dense.model
    values = dense.activations(part.tokens)
    fill = edge_fill(dense, task, ABLATIONS[ablation])(torch.arange(4))
    clean = values.embed
    if ablation == "counterfactual":
        wrote = values.mlps[:, -1, 1] - fill.mlps[:, -1, 1]
        corrupt = fill.embed.clone()
    else:
        wrote = values.mlps[:, -1, 1] - fill.mlps[-1, 1]
        corrupt = fill.embed[None].expand_as(clean).clone()
    corrupt[:, 0] = clean[:, 0]
    total = 0
    for k in (1, 2):
        end = model.run(corrupt + k / 2 * (clean - corrupt))[:, -1].detach().requires_grad_()
        logp = model.log_probs(end)
        lead = logp.gather(1, part.right) - logp.gather(1, part.wrong)
        [slope] = torch.autograd.grad(lead.sum(), end)
        total += (wrote * slope).sum().item() / 2 / len(part)
    scores = eap_scores(dense, task, EAPSettings(ablation, "inputs", 2))
    score = scores[dense.graph.index(Edge("m1", "out"))].item()
    assert score == pytest.approx(total, rel=1e-3, abs=1e-5)


def test_scores_along_masks_add_up_to_the_gap_of_the_empty_circuit(dense):
    task = make_task(dense.model, 16)
    scores = eap_scores(dense, task, EAPSettings("counterfactual", "masks", 60))
    assert scores.sum().item() == pytest.approx(price_of(dense, task, 1), rel=0.02)


def test_slope_of_kl_is_zero_at_the_full_model(dense):
    task = make_task(dense.model, 16)
    scores = Scores(dense, task, EAPSettings("counterfactual", "masks"))
    rows = torch.arange(8)
    ones = torch.ones(len(dense.graph))
    assert scores.gradient(rows, ones, scores.fill(rows)).abs().max() < 1e-4


def test_every_size_comes_from_one_set_of_scores(dense, monkeypatch):
    task = make_task(dense.model, 16)
    large = eap(dense, task, n_edges=60)
    monkeypatch.setattr(Scores, "mean", lambda self: pytest.fail("scored again"))
    small = eap(dense, task, n_edges=20)
    assert 10 < small.n_edges <= 20 < large.n_edges <= 60
    assert not (small.mask & ~large.mask).any()
    assert len(small.history["scores"]) == len(dense.graph)


def test_top_edges_takes_as_many_as_fit():
    graph = Graph(2, 2)
    scores = random(len(graph), seed=9)
    order = scores.argsort(descending=True)
    taken = [torch.zeros(len(graph)).index_fill(0, order[:k], 1) for k in range(len(graph) + 1)]
    sizes = [int(graph.prune_dangling(mask).sum()) for mask in taken]
    for n in (0, 1, 5, 17, 40, len(graph)):
        largest = max(size for size in sizes if size <= n)
        assert int(top_edges(graph, scores, n).sum()) == largest


# ---- signatures and refusals


@pytest.mark.parametrize(
    "function, settings",
    [
        (ugs, ugs_file.UGSSettings),
        (hcgs, hcgs_file.HCGSSettings),
        (acdc, acdc_file.ACDCSettings),
        (edge_pruning, import_module("oa_utils.search.edge_pruning").EdgePruningSettings),
        (gap, import_module("oa_utils.search.gaps").GapSettings),
    ],
)
def test_signatures_show_every_setting(function, settings):
    parameters = inspect.signature(function).parameters
    assert list(parameters)[:2] == ["masked", "task"]
    for field in fields(settings):
        assert parameters[field.name].default == field.default, field.name
    assert "settings" not in parameters
    assert not any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters.values())


def test_signatures_name_what_users_write():
    shown = inspect.signature(ugs).parameters
    assert {"ablation", "lam", "steps", "seed", "level", "window", "variance"} <= set(shown)
    shown = inspect.signature(eap_ig).parameters
    assert {"ablation", "n_edges", "seed", "path", "points"} <= set(shown)
    for function in (eap, eap_ig, sweep):
        parameters = inspect.signature(function).parameters.values()
        assert not any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda m, t: ugs(m, t, "noise"), "'noise' has no form for edges.*counterfactual"),
        (lambda m, t: ugs(m, t, "meen"), "no ablation 'meen'.*counterfactual"),
        (lambda m, t: ugs(m, t, lam=-1e-3), "price.*-0.001"),
        (lambda m, t: hcgs(m, t, lam=math.nan), "price.*nan"),
        (lambda m, t: acdc(m, t, lam=math.nan), "price.*nan"),
        (lambda m, t: acdc(m, t, "optimal"), "ACDC cannot search under 'optimal'.*ugs"),
        (lambda m, t: eap(m, t, "optimal"), "EAP cannot search under 'optimal'.*gap"),
        (lambda m, t: eap_ig(m, t, "optimal"), "EAP cannot search under 'optimal'.*gap"),
        (lambda m, t: eap(m, t, n_edges=-1), "n_edges must be a whole number from 0 to"),
        (lambda m, t: edge_pruning(m, t, n_edges=10**6), "n_edges must be .* from 0 to"),
        (lambda m, t: ugs(m, t, level="head"), "level is one of edge, vertex"),
        (lambda m, t: ugs(m, t, window=3.0), "at most 2"),
        (lambda m, t: ugs(m, t, pruning="maybe"), "pruning is one of"),
        (lambda m, t: ugs(m, t, steps=0), "steps must be a whole number, at least 1"),
        (lambda m, t: acdc(m, t, prompts=0), "prompts must be a whole number, at least 1"),
        (lambda m, t: ugs(m, replace(t, counterfactual=None), "cf_mean"), "no counterfactual"),
        (lambda m, t: eap(m, replace(t, counterfactual=None)), "no counterfactual"),
        (lambda m, t: eap(m, replace(t, wrong=-torch.ones_like(t.wrong))), "right.*wrong.*masks"),
        (lambda m, t: eap_ig(m, t, path="none"), "path is one of inputs, masks"),
        (lambda m, t: eap_ig(m, t, points=0), "points must be a whole number, at least 1"),
    ],
)
def test_bad_requests_are_refused_before_any_work(planted, task, monkeypatch, call, words):
    monkeypatch.setattr(store, "run", lambda *given, **more: pytest.fail("computed"))
    with pytest.raises(ValueError, match=words):
        call(planted, task)


def test_a_misspelt_setting_and_a_bare_model_are_named(planted, task):
    with pytest.raises(TypeError, match="stepps"):
        ugs(planted, task, stepps=3)
    with pytest.raises(TypeError, match="masked"):
        ugs(planted.model, task)


def test_a_price_in_quotes_is_refused_with_a_sentence():
    """Where nobody checks types, as for users."""
    check_price = inspect.unwrap(shared.check_price)
    with pytest.raises(ValueError, match="must be a number from 0 on, got '0.01'"):
        check_price("0.01", "edge")


def test_a_model_in_the_place_of_a_masked_model_is_refused_with_a_sentence(planted, task):
    check_search = inspect.unwrap(shared.check_search)
    with pytest.raises(TypeError, match=r"takes a masked model, oa.MaskedModel\(model\)"):
        check_search(planted.model, task, "mean")


@pytest.mark.parametrize(
    ("given", "words"), [({"level": "vertex"}, "searches edges"), ({"warmup": 1.0}, "below 1")]
)
def test_edge_pruning_refuses_before_any_work(planted, task, given, words):
    with pytest.raises(ValueError, match=words):
        edge_pruning(planted, task, n_edges=5, steps=2, **given)
