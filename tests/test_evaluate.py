"""Gaps of circuits, sweeps, random circuits, and estimators of slopes."""

import json
import math
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from threading import Lock

import joblib
import pandas as pd
import pytest
import torch
from conftest import random_gpt2
from toys import PLANTED, VOCAB, make_task

from oa_utils import machine, models, stats, store, tasks
from oa_utils.circuits import Circuit
from oa_utils.fills import ABLATIONS, Ablation, edge_constants, edge_fill
from oa_utils.graph import Edge
from oa_utils.masked import MaskedModel
from oa_utils.search import (
    against_random,
    eap,
    eap_ig,
    gap,
    gaps,
    loop,
    random_circuits,
    sweep,
    sweep_circuit,
    sweeps,
    ugs,
)
from oa_utils.search.estimators import EstimatorSettings, Slopes, estimator_errors
from oa_utils.search.shared import masked_of
from oa_utils.search.ugs import UGSSettings
from oa_utils.store import Snapshots

QUICK = {"steps": 40, "batch": 8, "look_every": 10}
FOR_EDGES = [name for name, rule in ABLATIONS.items() if not rule.noise]


def circuit_of(masked, mask=None, method="own") -> Circuit:
    if mask is None:
        mask = torch.ones(len(masked.graph), dtype=torch.bool)
    model = masked.model
    return Circuit(masked.graph, mask, method, model=model.name, fingerprint=model.fingerprint)


def half(masked, seed=0) -> Circuit:
    draw = torch.rand(len(masked.graph), generator=machine.generator(seed))
    return circuit_of(masked, draw < 0.6)


# ---- the gap of one circuit


@pytest.mark.parametrize("ablation", FOR_EDGES)
def test_full_circuit_has_no_gap(planted, task, ablation):
    delta = gap(planted, task, circuit_of(planted), ablation, steps=1)
    assert float(delta) == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("ablation", ["counterfactual", "mean", "zero", "cf_mean"])
def test_gap_is_the_mean_kl_over_test_prompts(dense, ablation):
    task = make_task(dense.model, 32)
    part = task.test
    circuit = half(dense)
    delta = gap(dense, task, circuit, ablation)
    fill = edge_fill(dense, task, ABLATIONS[ablation], "test")(torch.arange(16))
    logp = dense(part.tokens, part.last, circuit.mask.float()[None], fill)
    each = stats.kl(part.log_probs(dense.model), logp)
    torch.testing.assert_close(delta.each, each, rtol=1e-4, atol=1e-5)
    assert (delta.mean, delta.se) == pytest.approx(stats.mean_se(each), rel=1e-4)
    assert delta.n == 16
    assert float(delta) == delta.mean
    assert delta.constants is None
    assert "nats" in repr(delta)


def test_resample_averages_derangements(dense):
    task = make_task(dense.model, 16)
    circuit = half(dense)
    one = [gap(dense, task, circuit, "resample", draws=1, seed=seed).each for seed in (0, 1, 2)]
    three = gap(dense, task, circuit, "resample", draws=3).each
    torch.testing.assert_close(three, torch.stack(one).mean(0))


def test_seeds_share_no_draw_of_resample(dense):
    task = make_task(dense.model, 16)
    circuit = half(dense)
    one = [gap(dense, task, circuit, "resample", draws=1, seed=seed).each for seed in (2, 3)]
    second = gap(dense, task, circuit, "resample", draws=2, seed=1).each
    torch.testing.assert_close(second, torch.stack(one).mean(0))


def test_optimal_constants_beat_the_means_on_train_prompts(dense):
    task = make_task(dense.model, 64)
    circuit = half(dense)
    delta = gap(dense, task, circuit, "optimal", **QUICK)
    steps, values = zip(*delta.curve, strict=True)
    assert list(steps) == [0, 10, 20, 30, 40]
    assert min(values) < 0.8 * values[0]
    part = task.train
    full = part.log_probs(dense.model)
    start = edge_constants(dense, task, ABLATIONS["optimal"])
    measured = []
    for constants in (start, delta.constants):
        each = gaps.measure(dense, part, circuit.mask, lambda rows, c=constants: c, full)
        measured.append(each.mean().item())
    assert measured == pytest.approx([values[0], min(values)], rel=1e-4)
    assert float(delta) != pytest.approx(min(values), rel=1e-6), "measured on other prompts"


def test_empty_circuit_under_optimal_trains_what_enters_out(planted, task):
    empty = circuit_of(planted, torch.zeros(len(planted.graph)))
    delta = gap(planted, task, empty, "optimal", **QUICK)
    assert delta.curve[-1][1] < delta.curve[0][1]
    assert math.isfinite(delta.mean)


def test_planted_circuit_has_a_small_gap_and_random_ones_of_its_size_a_large_one(planted, task):
    right = float(gap(planted, task, circuit_of(planted, planted.graph.mask(PLANTED))))
    others = random_circuits(planted, len(PLANTED), 5, tolerance=0.2)
    gaps = [float(gap(planted, task, circuit)) for circuit in others]
    assert len(gaps) == 5
    assert right < 0.01
    assert min(gaps) > 10 * right


def test_stored_gap_is_loaded_for_the_same_edges_only(dense, monkeypatch):
    task = make_task(dense.model, 16)
    first = gap(dense, task, half(dense))
    monkeypatch.setattr(gaps, "measure", lambda *given: pytest.fail("measured again"))
    assert gap(dense, task, replace(half(dense), method="own")).mean == first.mean
    with pytest.raises(pytest.fail.Exception):
        gap(dense, task, half(dense, seed=1))
    with pytest.raises(pytest.fail.Exception):
        gap(dense, task, half(dense), "mean")


@pytest.mark.parametrize("killed_at, batch", [(2, 4), (6, 4), (10, 1)])
def test_killed_and_resumed_gap_is_bit_by_bit_the_same(
    dense, tmp_path, monkeypatch, killed_at, batch
):
    task = make_task(dense.model, 16)
    circuit = half(dense)
    quick = {"steps": 10, "batch": batch, "look_every": 1, "lr": 0.07, "seed": 2}
    whole = gap(dense, task, circuit, "optimal", **quick)
    best_step, _ = min(whole.curve, key=lambda point: point[1])
    assert (0 < best_step < killed_at) == (batch == 1), "the best stands before the stop or behind"
    monkeypatch.setenv("OA_STORE", str(tmp_path / "killed"))
    monkeypatch.setattr(Snapshots, "due", lambda self: True)
    step = torch.optim.Adam.step
    steps = []

    def killed(self, *given):
        steps.append(1)
        if len(steps) == killed_at:
            raise KeyboardInterrupt
        return step(self, *given)

    monkeypatch.setattr(torch.optim.Adam, "step", killed)
    with pytest.raises(KeyboardInterrupt):
        gap(dense, task, circuit, "optimal", **quick)
    again = gap(dense, task, circuit, "optimal", **quick)
    assert len(steps) == 10 + 1, "no step but the killed one was computed twice"
    assert again.curve == whole.curve
    assert torch.equal(again.each, whole.each)
    for one, other in zip(again.constants, whole.constants, strict=True):
        assert torch.equal(one, other)


def test_gap_refuses_other_models_and_unknown_ablations(planted, task):
    stranger = replace(circuit_of(planted), model="dense", fingerprint="0")
    with pytest.raises(ValueError, match="found in dense"):
        gap(planted, task, stranger)
    with pytest.raises(ValueError, match="'noise' has no form for edges"):
        gap(planted, task, circuit_of(planted), "noise")
    with pytest.raises(ValueError, match="no ablation 'men'"):
        gap(planted, task, circuit_of(planted), "men")
    with pytest.raises(TypeError, match="stepps"):
        gap(planted, task, circuit_of(planted), "optimal", stepps=3)
    with pytest.raises(ValueError, match="batch must be a whole number, at least 1"):
        gap(planted, task, circuit_of(planted), "optimal", batch=0)


@pytest.mark.parametrize("level", ["edge", "layer"])
def test_a_masked_model_of_weights_that_were_edited_is_refused(level):
    model = models.wrap(random_gpt2(vocab=VOCAB, n_layer=2, n_positions=16), name="edited")
    task = make_task(model, 8)
    masked = MaskedModel(model, level)
    circuit = Circuit(masked.graph, torch.zeros(len(masked.graph)), "empty")
    before = gap(masked, task, circuit, "zero").mean
    assert masked_of(model, level) is masked_of(model, level)
    cached = masked_of(model, level)
    model.bridge.original_model.transformer.h[1].attn.c_proj.weight.data *= 2
    with pytest.raises(ValueError, match="make a new MaskedModel"):
        gap(masked, task, circuit, "zero")
    with pytest.raises(ValueError, match="make a new MaskedModel"):
        eap(masked, task, n_edges=2)
    assert masked_of(model, level) is not cached
    assert gap(masked_of(model, level), task, circuit, "zero").mean != before


def test_train_gap_stands_beside_test_gap_and_is_that_of_the_kept_constants(dense):
    task = make_task(dense.model, 64)
    circuit = half(dense)
    delta = gap(dense, task, circuit, "optimal", **QUICK, look_prompts=20)
    part = task.train[:20]
    full = part.log_probs(dense.model)
    each = gaps.measure(dense, part, circuit.mask, lambda rows: delta.constants, full)
    assert delta.train == pytest.approx(each.mean().item(), rel=1e-5)
    assert delta.train == min(value for _, value in delta.curve)
    assert gap(dense, task, circuit).train is None
    assert circuit.with_gap(delta).gap == delta.mean


def test_looks_can_be_named_by_their_steps(dense):
    task = make_task(dense.model, 16)
    delta = gap(dense, task, half(dense), "optimal", steps=9, look_every=[1, 2, 5])
    assert [step for step, _ in delta.curve] == [0, 1, 2, 5, 9]


def test_every_train_prompt_is_used_before_one_comes_again():
    rows = torch.cat([gaps.shuffled(10, 3, step, 0) for step in range(3)])
    assert len(rows.unique()) == 9
    again = torch.cat([gaps.shuffled(10, 3, step, 0) for step in range(3, 6)])
    assert len(again.unique()) == 9
    assert not torch.equal(rows, again)
    assert len(gaps.shuffled(4, 8, 1, 0)) == 4


def trainer_of(dense, snapshots, **options) -> gaps.ConstantsTrainer:
    task = make_task(dense.model, 16)
    settings = gaps.GapSettings(**options)
    mask = half(dense).mask
    return gaps.ConstantsTrainer(dense, task, mask, "optimal", settings, snapshots)


def test_the_rate_of_constants_falls_to_a_tenth(dense, tmp_path):
    trainer = trainer_of(dense, Snapshots(tmp_path / "x", "x"), steps=4, batch=2)
    rates = []
    for _ in range(4):
        trainer.advance()
        rates.append(trainer.optimiser.param_groups[0]["lr"] / trainer.settings.rate)
    assert rates == pytest.approx([1, 0.775, 0.55, 0.325])


def test_what_is_left_of_a_long_training_is_told(dense, tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(machine, "announce", told.append)
    trainer = trainer_of(dense, Snapshots(tmp_path / "x", "x"), steps=40, look_every=10)
    trainer.step = 10
    trainer.announce(step_seconds=1.0, look_seconds=2.0)  # 30 steps and 3 looks are left
    assert "about 36 s" in told[0]
    trainer.announce(step_seconds=0.01, look_seconds=0.1)
    assert len(told) == 1, "what takes no time is not worth a word"


def test_constants_of_the_search_are_a_start_of_their_own(dense):
    task = make_task(dense.model)
    circuit = ugs(dense, task, "optimal", lam=1e-2, steps=3, prompts=4, masks=2)
    assert ugs(dense, task, lam=1e-2, steps=1, ablation="counterfactual").constants is None
    untrained = {"steps": 0, "look_prompts": len(task.train)}
    fresh = gap(dense, task, circuit, "optimal", **untrained)
    warm = gap(dense, task, circuit, "optimal", start=circuit.constants, **untrained)
    assert all(map(torch.equal, warm.constants, circuit.constants))
    assert float(warm) != float(fresh)
    assert float(gap(dense, task, circuit, "optimal", **untrained)) == float(fresh)
    with pytest.raises(ValueError, match="'counterfactual' trains none"):
        gap(dense, task, circuit, "counterfactual", start=circuit.constants)


def test_a_resumed_training_keeps_its_best_constants(dense, tmp_path):
    snapshots = Snapshots(tmp_path / "x", "x")
    first = trainer_of(dense, snapshots, steps=4, batch=2)
    first.look()
    first.advance()
    first.best = first.best._replace(embed=first.best.embed + 1)  # neither the start nor the last
    snapshots.save(first.state())
    again = trainer_of(dense, Snapshots(tmp_path / "x", "x"), steps=4, batch=2)
    again.resume()
    assert all(torch.equal(a, b) for a, b in zip(again.best, first.best, strict=True))
    assert not torch.equal(again.constants.embed, again.best.embed)


def test_rate_of_constants_follows_the_number_of_steps():
    rates = [gaps.GapSettings(steps=steps).rate for steps in (100, 1000, 10_000, 20_000)]
    assert rates == pytest.approx([0.05, 0.02, 0.002, 0.002])
    assert gaps.GapSettings(steps=100, lr=0.3).rate == 0.3


def test_constants_of_deep_models_take_shorter_steps_unless_a_rate_is_given():
    shallow = gaps.GapSettings(steps=300)
    assert shallow.suited(6) is shallow
    assert shallow.suited(30).lr == pytest.approx(0.0125)
    assert gaps.GapSettings(steps=10_000).suited(30).lr is None
    assert gaps.GapSettings(steps=300, lr=0.3).suited(30).lr == 0.3
    search = UGSSettings("optimal", steps=150)
    assert search.suited(6) is search
    assert search.suited(30).lr_constants == pytest.approx(0.0125)
    assert UGSSettings("optimal", steps=150, lr_constants=0.3).suited(30).lr_constants == 0.3


def test_a_search_under_optimal_ablation_says_the_rate_it_took(dense, monkeypatch):
    monkeypatch.setattr(loop, "largest_rate", lambda n_layers: 1e-3)
    task = make_task(dense.model, 16)
    brief = {"steps": 2, "prompts": 2, "masks": 2}
    assert ugs(dense, task, "optimal", **brief).settings["lr_constants"] == 1e-3
    assert ugs(dense, task, "mean", **brief).settings["lr_constants"] is None


def test_gap_takes_no_larger_rate_than_the_model_can(dense, monkeypatch):
    task = make_task(dense.model, 16)
    brief = {"steps": 4, "batch": 2, "look_every": 4}
    usual = gap(dense, task, half(dense), "optimal", **brief)
    slow = gap(dense, task, half(dense), "optimal", lr=1e-3, **brief)
    monkeypatch.setattr(gaps, "largest_rate", lambda n_layers: 1e-3)
    bounded = gap(dense, task, half(dense), "optimal", **brief)
    assert torch.equal(bounded.constants.heads, slow.constants.heads)
    assert not torch.equal(usual.constants.heads, slow.constants.heads)


@pytest.mark.parametrize("metric", ["label", "logit_diff"])
def test_gap_by_answers_is_what_they_lose(dense, metric):
    task = make_task(dense.model, 32)
    circuit = half(dense)
    delta = gap(dense, task, circuit, "mean", metric=metric)
    part = task.test
    fill = edge_fill(dense, task, ABLATIONS["mean"], "test")(torch.arange(len(part)))
    lost = []
    for mask in (torch.ones(1, len(dense.graph)), circuit.mask.float()[None]):
        logp = dense(part.tokens, part.last, mask, fill)
        score = logp.gather(1, part.right)[:, 0]
        if metric == "logit_diff":
            score = score - logp.gather(1, part.wrong)[:, 0]
        lost.append(score)
    torch.testing.assert_close(delta.each, lost[0] - lost[1], rtol=1e-3, atol=1e-4)
    table = sweep(dense, task, ["eap"], ["mean"], {"n_edges": [30]}, metric=metric)
    one = gap(dense, task, sweep_circuit(dense, table.iloc[0]), "mean", metric=metric)
    assert table.gap[0] == one.mean
    assert table["each"][0] == pytest.approx(one.each.tolist(), rel=1e-3)
    unanswered = replace(task, right=torch.full_like(task.right, -1))
    with pytest.raises(ValueError, match="needs right answers"):
        gap(dense, unanswered, circuit, "mean", metric=metric)


def test_constants_by_position_start_from_the_means_by_position(dense):
    task = make_task(dense.model, 32)
    delta = gap(dense, task, half(dense), "optimal", steps=0, family="position")
    means = gap(dense, task, half(dense), "mean")
    assert delta.mean == pytest.approx(means.mean, rel=1e-5)


@pytest.mark.parametrize("given", [{"steps": 2.5}, {"batch": True}, {"look_every": [0]}])
def test_settings_that_are_no_whole_numbers_are_refused(given):
    with pytest.raises((ValueError, TypeError)):
        gaps.GapSettings(**given)


# ---- sweeps


def test_seeds_of_a_sweep_can_differ_between_searches(planted, task):
    seeds = {None: [0], ("acdc", "mean"): [0, 1]}
    grid = {"lam": [0.01], "n_edges": [5]}
    table = sweep(planted, task, ["acdc", "eap"], ["mean"], grid, seeds)
    assert table.groupby("method").seed.agg(list).to_dict() == {"acdc": [0, 1], "eap": [0]}


def test_every_search_of_the_folder_is_known():
    known = {"ugs", "hcgs", "acdc", "eap", "eap_ig", "eap_ig_masks", "edge_pruning"}
    assert known <= set(sweeps.METHODS)
    for file in ("ugs", "hcgs", "acdc", "eap", "edge_pruning"):
        module = import_module(f"oa_utils.search.{file}")
        assert {method.version for method in module.METHODS.values()} == {module.VERSION}


def test_sweep_has_a_row_for_each_combination_and_goes_on_where_it_stopped(
    planted, task, tmp_path, monkeypatch
):
    grid = {"lam": [0.01, 1.0], ("acdc", "optimal"): [0.02], "n_edges": [5]}
    asked = (planted, task, ["ugs", "acdc", "eap"], ["counterfactual", "optimal"], grid)
    options = {"ugs": {"steps": 3, "prompts": 2}, "acdc": {"prompts": 4}}
    more = {"seeds": [0, 1], "options": options, "gap_options": {"steps": 2, "batch": 8}}
    table = sweep(*asked, **more)
    assert len(table) == 2 * (2 + 2 + 2 + 1 + 1 + 1)
    fixed = table[(table.ablation == "optimal") & (table.method != "ugs")]
    assert set(fixed.searched) == {"counterfactual"}
    eaps = table[(table.method == "eap") & (table.ablation == "counterfactual")]
    assert (eaps.n_edges == 5).all()
    assert (eaps.gap < 0.01).all()
    assert (table.task == "toy").all()
    monkeypatch.setattr(gaps, "measure", lambda *given: pytest.fail("measured again"))
    assert sweep(*asked, **more).equals(table)
    for path in tmp_path.rglob("sweeps/*.json"):
        path.unlink()  # the table is gone, but not its circuits and their gaps
    assert sweep(*asked, **more).equals(table)


def test_a_row_of_a_sweep_makes_its_circuit(planted, task):
    table = sweep(planted, task, ["eap"], ["counterfactual", "mean"], {"eap": [5, 9]})
    for _, row in table.iterrows():
        circuit = sweep_circuit(planted, row)
        assert circuit.n_edges == row.n_edges
        assert len(circuit.heads) == row.n_heads
        assert (circuit.method, circuit.ablation, circuit.seed) == ("eap", row.ablation, 0)
        assert circuit.gap == row.gap == gap(planted, task, circuit, row.ablation).mean
        circuit.check(planted.model)


def test_a_sweep_takes_a_task_without_counterfactuals(planted, task):
    plain = replace(task, counterfactual=None)
    table = sweep(planted, plain, ["acdc", "eap"], ["mean"], {"lam": [0.01], "n_edges": [9]})
    assert table.method.tolist() == ["acdc", "eap"]
    assert sweep_circuit(planted, table.iloc[0]).edges == PLANTED
    assert 0 < table.n_edges[1] <= 9


BAD_SWEEPS = {
    "unknown method 'magic'": {"methods": ["magic"]},
    "'noise' has no form for edges": {"ablations": ["noise"]},
    "no ablation 'men'": {"ablations": ["men"]},
    "grid has no values for eap": {"methods": ["eap"]},
    "price of one edge .*-0.1": {"grid": {"lam": [0.1, -0.1]}},
    "options for 'ucs'": {"options": {"ucs": {"steps": 3}}},
    "options of ugs set its seed: .* `seeds`": {"options": {"ugs": {"seed": 3}}},
    "options of eap set its ablation: .* `searched`": {"options": {"eap": {"ablation": "mean"}}},
    "options of ugs set its lam: .* `grid`": {"options": {("ugs", "optimal"): {"lam": 0.1}}},
    "options of eap_ig set its n_edges: .* `grid`": {"options": {"eap_ig": {"n_edges": 5}}},
    "searched for 'epa'": {"searched": {"epa": "mean"}},
    "searched for ugs: it trains constants": {"searched": {"ugs": "mean"}},
    "there is no ablation 'mena'": {"searched": {"eap": "mena"}},
    "acdc cannot search under 'optimal'": {
        "methods": ["acdc"],
        "ablations": ["optimal"],
        "searched": {"acdc": "optimal"},
    },
    "no ablation 'opt'": {"options": {("ugs", "opt"): {"steps": 3}}},
    "unexpected keyword argument 'stepps'": {"options": {"ugs": {"stepps": 3}}},
    "steps must be a whole number, at least 1": {"options": {"ugs": {"steps": 0}}},
    "at most 2": {"options": {"ugs": {"window": 3.0}}},
    "unexpected keyword argument 'stepz'": {"gap_options": {"stepz": 3}},
    "draws must be a whole number, at least 1": {"gap_options": {"draws": 0}},
    "no counterfactual prompts": {"ablations": ["mean", "counterfactual"], "bare": True},
    "no counterfactual prompt": {"methods": ["acdc"], "ablations": ["optimal"], "bare": True},
    r"searched=\{'acdc': 'mean'\}": {"methods": ["acdc"], "ablations": ["optimal"], "bare": True},
}


@pytest.mark.parametrize("words", BAD_SWEEPS)
def test_sweep_refuses_before_the_first_circuit(planted, task, monkeypatch, words):
    monkeypatch.setattr(store, "run", lambda *given, **more: pytest.fail("computed"))
    change = dict(BAD_SWEEPS[words])
    if change.pop("bare", False):
        task = replace(task, counterfactual=None)
    asked = {"methods": ["ugs"], "ablations": ["mean"], "grid": {"lam": [0.1]}} | change
    with pytest.raises((ValueError, TypeError), match=words):
        sweep(planted, task, **asked)


@pytest.mark.parametrize(
    "methods, grid, options, words",
    [
        (["edge_pruning"], {"n_edges": [5, 10**6]}, {}, "n_edges must be .* from 0 to"),
        (["eap"], {"n_edges": [5, -1]}, {}, "n_edges must be .* from 0 to"),
        (["eap"], {"n_edges": [20.5]}, {}, "n_edges must be a whole number .* 20.5"),
        (["eap_ig"], {"n_edges": [5]}, {"eap_ig": {"path": "none"}}, "path is one of"),
        (["eap_ig"], {"n_edges": [5]}, {"eap_ig": {"pionts": 3}}, "pionts"),
    ],
)
def test_sweep_refuses_sizes_and_paths_before_the_first_circuit(
    planted, task, monkeypatch, methods, grid, options, words
):
    monkeypatch.setattr(store, "run", lambda *given, **more: pytest.fail("computed"))
    with pytest.raises((ValueError, TypeError), match=words):
        sweep(planted, task, methods, ["mean"], grid, options=options)


def test_sweep_refuses_a_task_without_answers_for_eap_before_the_first_circuit(
    planted, task, monkeypatch
):
    unanswered = replace(task, wrong=torch.full_like(task.wrong, -1))
    methods = ["acdc", "eap"]
    grid = {"lam": [0.1], "n_edges": [5]}
    with monkeypatch.context() as patch:
        patch.setattr(store, "run", lambda *given, **more: pytest.fail("computed"))
        with pytest.raises(ValueError, match="right.*wrong.*masks"):
            sweep(planted, unanswered, methods, ["mean"], grid)
    along_masks = {"eap_ig": {"path": "masks"}}
    table = sweep(planted, unanswered, ["eap_ig"], ["mean"], {"n_edges": [5]}, options=along_masks)
    assert len(table) == 1


def test_what_else_is_in_the_options_makes_no_new_sweep(planted, task, monkeypatch):
    asked = (planted, task, ["eap"], ["mean"], {"n_edges": [5]})
    table = sweep(*asked)
    monkeypatch.setattr(models, "each", lambda *given, **more: pytest.fail("searched again"))
    assert sweep(*asked, options={"ugs": {"steps": 3}}).equals(table)
    with pytest.raises(pytest.fail.Exception):
        sweep(*asked, gap_options={"draws": 2})


def test_options_may_differ_by_ablation_and_name_the_sweep(planted, task, tmp_path):
    asked = (planted, task, ["ugs"], ["counterfactual", "optimal"], {"lam": [0.01]})
    gap_options = {"steps": 1, "batch": 8}

    usual = {"steps": 3, "prompts": 2}
    sweep(*asked, options={"ugs": usual, ("ugs", "optimal"): {"steps": 6}}, gap_options=gap_options)
    runs = [
        json.loads(path.read_text())["settings"] for path in tmp_path.rglob("search_ugs/*.json")
    ]
    assert {run["ablation"]: (run["steps"], run["prompts"]) for run in runs} == {
        "counterfactual": (3, 2),
        "optimal": (6, 2),
    }
    names = set()
    for own in ({}, {("ugs", "optimal"): {"steps": 4}}, {("ugs", "optimal"): {"steps": 5}}):
        names.add(name_of(tmp_path, *asked, options={"ugs": usual, **own}, gap_options=gap_options))
    other = {"ugs": {"steps": 2, "prompts": 2}, ("ugs", "optimal"): {"steps": 5}}
    names.add(name_of(tmp_path, *asked, options=other, gap_options=gap_options))
    assert len(names) == 4


def test_what_stands_in_for_optimal_in_a_search_can_be_chosen(planted, task, tmp_path):
    plain = replace(task, counterfactual=None)
    ways = ["optimal", "mean"]
    asked = (plain, ["eap", "acdc"], ways, {"n_edges": [9], "lam": [0.01]})
    more = {"gap_options": {"steps": 2, "batch": 8}, "searched": {"eap": "mean", "acdc": "zero"}}
    table = sweep(planted, *asked, **more).set_index(["method", "ablation"])
    assert table.searched.to_dict() == {
        ("eap", "optimal"): "mean",
        ("eap", "mean"): "mean",
        ("acdc", "optimal"): "zero",
        ("acdc", "mean"): "mean",
    }
    found = eap(planted, plain, "mean", n_edges=9)
    assert table.edges["eap", "optimal"] == found.mask.nonzero()[:, 0].tolist()
    delta = gap(planted, plain, found, "optimal", **more["gap_options"])
    assert table.gap["eap", "optimal"] == delta.mean


def test_what_is_searched_names_a_sweep_only_where_it_is_not_the_usual(planted, task, tmp_path):
    gap_options = {"steps": 1, "batch": 8}
    asked = (planted, task, ["eap", "ugs"], ["optimal"], {"n_edges": [5], "lam": [0.01]})
    more = {"gap_options": gap_options, "options": {"ugs": {"steps": 2, "prompts": 2}}}
    usual = name_of(tmp_path, *asked, **more)
    same = ({}, {"eap": "counterfactual"}, {"acdc": "mean"})
    assert {name_of(tmp_path, *asked, **more, searched=one) for one in same} == {usual}
    others = [name_of(tmp_path, *asked, **more, searched={"eap": one}) for one in ("mean", "zero")]
    assert len({usual, *others}) == 3
    fixed = (planted, task, ["eap"], ["mean"], {"n_edges": [5]})
    assert name_of(tmp_path, *fixed) == name_of(tmp_path, *fixed, searched={"eap": "zero"})


def test_circuits_of_a_sweep_are_named_by_method_ablation_value_and_seed(
    planted, task, monkeypatch
):
    """As long as nothing else is asked for: long runs are stored under these names."""
    inputs = {}

    def run(*given, **more):
        inputs.update(more["inputs"])
        raise store.NotStored

    monkeypatch.setattr(store, "run", run)
    asked = (planted, task, ["eap", "ugs"], ["optimal", "mean"], {"n_edges": [5], "lam": [0.1]})
    with pytest.raises(store.NotStored):
        sweep(*asked, seeds=[0, 3])
    pairs = [("eap", 5), ("ugs", 0.1)]
    assert inputs["circuits"] == [
        [method, ablation, value, seed]
        for method, value in pairs
        for ablation in ("optimal", "mean")
        for seed in (0, 3)
    ]
    assert set(inputs) == {"circuits", "versions", "settings", "gap"}


def name_of(folder, *asked, **more) -> str:
    """Under which a sweep is stored."""
    before = set(folder.rglob("sweeps/*.json"))
    sweep(*asked, **more)
    [path] = set(folder.rglob("sweeps/*.json")) - before
    path.unlink()
    return path.name


def test_a_sweep_is_named_by_versions_and_all_settings(planted, task, tmp_path, monkeypatch):
    asked = (tmp_path, planted, task, ["acdc", "eap"], ["mean"], {"lam": [0.01], "n_edges": [5]})
    name = name_of(*asked)
    assert name_of(*asked, options={"acdc": {"prompts": 32}}, gap_options={"draws": 4}) == name
    names = [name]
    for method in ("acdc", "eap"):
        later = sweeps.METHODS[method]._replace(version=99)
        with monkeypatch.context() as patch:
            patch.setitem(sweeps.METHODS, method, later)
            names.append(name_of(*asked))
    with monkeypatch.context() as patch:
        default = sweeps.METHODS["eap"]._replace(search=partial(eap_ig, points=3))
        patch.setitem(sweeps.METHODS, "eap", default)
        names.append(name_of(*asked))
    with monkeypatch.context() as patch:
        patch.setattr(sweeps, "GapSettings", partial(gaps.GapSettings, draws=5))
        names.append(name_of(*asked))
    assert len(set(names)) == 5


def test_a_sweeps_metric_is_taken_from_the_settings_of_its_gaps(planted, task):
    asked = (planted, task, ["eap"], ["mean"], {"n_edges": [5]})
    by_label = sweep(*asked, metric="label").gap.item()
    assert sweep(*asked, gap_options={"metric": "label"}).gap.item() == by_label
    assert sweep(*asked).gap.item() != by_label
    with pytest.raises(ValueError, match="metric='kl' and gap_options.*'label' differ"):
        sweep(*asked, gap_options={"metric": "label"}, metric="kl")


def test_workers_give_the_same_rows_as_one_process(tiny, tmp_path, monkeypatch):
    """Also under an ablation of one's own, which travels to them as it is."""
    masked = MaskedModel(tiny)
    task = tasks.ioi(tiny, 12)

    def neighbour(part, rows, draw):
        partners = (torch.arange(len(part)) - 1) % len(part)
        return part.resampled(partners)[rows]

    mine = Ablation("neighbour", prompts=neighbour, total=False)
    tables = []
    for jobs in (1, 2):
        monkeypatch.setenv("OA_JOBS", str(jobs))
        monkeypatch.setenv("OA_STORE", str(tmp_path / str(jobs)))
        tables.append(sweep(masked, task, ["eap"], [mine], {"n_edges": [40, 300]}))
    pd.testing.assert_frame_equal(*tables)
    assert (tables[0].n_edges <= tables[0].asked).all()
    assert tables[0].gap.notna().all()


def test_sweep_runs_under_dask(tiny, tmp_path, monkeypatch):
    """Its workers load the model by name; they are threads of this process, since starting others
    would take longer than all the rest."""
    distributed = pytest.importorskip("distributed")
    masked = MaskedModel(tiny)
    task = tasks.ioi(tiny, 8)
    asked = (masked, task, ["eap"], ["counterfactual"], {"n_edges": [40, 300]})
    load = cache(models._loaded.__wrapped__)
    one_at_a_time = Lock()
    loaded = []

    def noted(*named):
        with one_at_a_time:
            loaded.append((dict(named[0])["name"], distributed.get_worker().name))
            return load(*named)

    monkeypatch.setattr(models, "_loaded", noted)
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=False, dashboard_address=None
        ) as cluster,
        distributed.Client(cluster),
        joblib.parallel_config(backend="dask", n_jobs=2),
    ):
        there = sweep(*asked)
    assert [name for name, _ in loaded] == ["tiny", "tiny"]
    monkeypatch.setenv("OA_STORE", str(tmp_path / "other"))
    monkeypatch.setenv("OA_JOBS", "1")
    assert there.equals(sweep(*asked))
    assert len(loaded) == 2, "a single process has its own"


# ---- random circuits


def test_random_circuits_have_the_size_and_no_dangling_edges(dense):
    circuits = random_circuits(dense, 40, n=12, tolerance=0.1, seed=1)
    assert len(circuits) == 12
    assert all(36 <= circuit.n_edges <= 44 for circuit in circuits)
    for circuit in circuits:
        assert (dense.graph.prune_dangling(circuit.mask) == circuit.mask).all()
    assert len({tuple(circuit.mask.tolist()) for circuit in circuits}) == 12
    again = random_circuits(dense, 40, n=12, tolerance=0.1, seed=1)
    assert all((a.mask == b.mask).all() for a, b in zip(circuits, again, strict=True))


def test_random_circuits_give_up_after_so_many_draws(dense, monkeypatch):
    monkeypatch.setattr(import_module("oa_utils.search.random_circuits"), "MOST_DRAWS", 100)
    with pytest.warns(UserWarning, match="of 100 random circuits"):
        assert len(random_circuits(dense, 40, n=90, tolerance=0.0)) < 90
    with pytest.raises(ValueError, match="size must be from 1"):
        random_circuits(dense, 10**6)


def test_random_circuits_are_measured_like_the_one_that_was_found(dense, monkeypatch):
    task = make_task(dense.model, 16)
    ways = ["counterfactual", "optimal", "mean"]
    quick = {"steps": 2, "batch": 8, "look_every": 1, "draws": 1}
    circuits = sweep(dense, task, ["eap"], ways, {"n_edges": [40]}, gap_options=quick)
    table = against_random(dense, task, circuits, n=3, tolerance=0.5, gap_options=quick)
    counts = table.groupby(["ablation", "kind"]).size().unstack()
    assert counts.loc[ways, ["found", "random"]].to_numpy().tolist() == [[1, 3]] * 3
    measured = table[table.kind == "found"].set_index("ablation").gap
    assert measured[ways].tolist() == circuits.set_index("ablation").gap[ways].tolist()
    assert all(len(curve) == 3 for curve in table[table.ablation == "optimal"].curve)
    assert (table[table.kind == "random"].n_edges.between(20, 60)).all()
    found = table[table.kind == "found"].set_index("ablation").each
    assert found[ways].tolist() == circuits.set_index("ablation").each[ways].tolist()
    for row in table.itertuples():
        assert len(row.each) == len(task.test)
        assert sum(row.each) / len(row.each) == pytest.approx(row.gap, rel=1e-3)
    monkeypatch.setattr(models, "each", lambda *given, **more: pytest.fail("measured again"))
    again = against_random(dense, task, circuits, n=3, tolerance=0.5, gap_options=quick)
    pd.testing.assert_frame_equal(table, again)


def test_against_random_refuses_before_it_computes(dense, monkeypatch):
    task = make_task(dense.model, 16)
    table = sweep(dense, task, ["eap"], ["counterfactual"], {"n_edges": [40]})
    monkeypatch.setattr(store, "run", lambda *given, **more: pytest.fail("computed"))
    with pytest.raises(TypeError, match="stepz"):
        against_random(dense, task, table, gap_options={"stepz": 1})
    with pytest.raises(ValueError, match="no counterfactual"):
        against_random(dense, replace(task, counterfactual=None), table)


# ---- estimators


def test_with_one_undecided_edge_ugs_and_importance_sampling_are_unbiased(dense):
    edge = dense.graph.index(Edge("m0", "out"))
    theta = torch.ones(len(dense.graph))
    theta[edge] = 0.6
    theta = theta.clamp(1e-6, 1 - 1e-6)
    few = {"masks": 64, "estimates": 40, "draws": 64}
    table = estimator_errors(dense, make_task(dense.model, 32), theta, [edge], **few)
    table = table.set_index("estimator")
    assert table.true.nunique() == 1
    true = table.true.iloc[0]
    assert abs(true) > 3 * table.se.iloc[0]
    for how in ("ugs", "importance"):
        error = (table["std"][how] ** 2 / 40 + table.se[how] ** 2) ** 0.5
        assert abs(table["mean"][how] - true) < 4 * error < 0.5 * abs(true), how
    bias = table["mean"] - table.true
    assert table.rms.to_numpy() == pytest.approx((table["std"] ** 2 * 39 / 40 + bias**2) ** 0.5)


def test_the_true_slope_is_the_mean_change_that_the_edge_makes(dense):
    task = make_task(dense.model, 16)
    n = len(dense.graph)
    edge = dense.graph.index(Edge("m0", "out"))
    slopes = Slopes(dense, task, torch.ones(n), EstimatorSettings(draws=32))
    rows = torch.arange(8)
    true, se = slopes.true([3, edge])
    mask = torch.ones(8, n)
    mask[:, edge] = 0
    # with every other edge kept, the gap with the edge is zero
    lost = slopes.kl(rows, mask, slopes.fill(rows))
    assert -true[1].item() == pytest.approx(lost.mean().item(), abs=4 * se[1].item())
    assert true[1] < -4 * se[1]


def test_estimators_of_another_theta_are_another_run(dense, monkeypatch):
    task = make_task(dense.model, 16)
    theta = torch.full((len(dense.graph),), 0.9)
    few = {"masks": 4, "estimates": 2, "draws": 4}
    table = estimator_errors(dense, task, theta, [3, 5], **few)
    assert len(table) == 3 * 2
    monkeypatch.setattr(Slopes, "true", lambda *given: pytest.fail("computed again"))
    pd.testing.assert_frame_equal(estimator_errors(dense, task, theta, [3, 5], **few), table)
    with pytest.raises(pytest.fail.Exception):
        estimator_errors(dense, task, theta + 0.01, [3, 5], **few)
    assert estimator_errors(dense, task, theta, [], **few).columns.equals(table.columns)
    with pytest.raises(ValueError, match="estimates must be at least 2"):
        estimator_errors(dense, task, theta, [3, 5], estimates=1)
