"""Gaps, sweeps and random circuits."""

# ruff: noqa: F811  (fixtures of test_search)

import math
from dataclasses import replace

import joblib
import pytest
import torch
from test_search import PLANTED, dense, make_task, planted, store, task  # noqa: F401

from oa_utils import runs, stats, tasks
from oa_utils.circuits import Circuit
from oa_utils.masked import MaskedModel
from oa_utils.search import common, evaluate, filling, gap, random_circuits, sweep


def circuit_of(masked, mask=None, method="own") -> Circuit:
    graph = masked.graph
    mask = torch.ones(len(graph), dtype=torch.bool) if mask is None else mask
    return Circuit(graph, mask, method, model=masked.model.name, fingerprint=masked.model.fingerprint)


def half(masked, seed=0) -> Circuit:
    return circuit_of(masked, torch.rand(len(masked.graph), generator=runs.generator(seed)) < 0.6)


QUICK = {"steps": 40, "batch": 8, "check": 10}


@pytest.mark.parametrize("ablation", common.ABLATIONS)
def test_full_circuit_has_no_gap(planted, task, ablation):
    assert float(gap(planted, task, circuit_of(planted), ablation, steps=1)) == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("ablation", ["counterfactual", "mean", "zero", "cf_mean"])
def test_gap_is_the_mean_kl_over_test_prompts(dense, ablation):
    task, circuit = make_task(dense.model, 32), half(dense)
    g = gap(dense, task, circuit, ablation)
    fill, part = filling.fill_for(dense, task, ablation, "test")(torch.arange(16)), task.test
    each = stats.kl(part.log_probs(dense.model), dense(part.tokens, part.last, circuit.mask.float()[None], fill))
    torch.testing.assert_close(g.each, each, rtol=1e-4, atol=1e-5)
    assert (g.mean, g.se) == pytest.approx(stats.mean_se(each), rel=1e-4) and g.n == 16 and float(g) == g.mean
    assert g.constants is None and "nats" in repr(g)


def test_resample_averages_derangements(dense):
    task, circuit = make_task(dense.model, 16), half(dense)
    one = [gap(dense, task, circuit, "resample", draws=1, seed=seed).each for seed in (0, 1, 2)]
    torch.testing.assert_close(gap(dense, task, circuit, "resample", draws=3).each, torch.stack(one).mean(0))


def test_optimal_constants_beat_the_means_on_train_prompts(dense):
    task, circuit = make_task(dense.model, 64), half(dense)
    g = gap(dense, task, circuit, "optimal", **QUICK)
    steps, values = zip(*g.curve, strict=True)
    assert list(steps) == [0, 10, 20, 30, 40] and min(values) < 0.8 * values[0]
    start, part = filling.constants_for(dense, task, "optimal"), task.train
    fills, full = [lambda rows, c=c: c for c in (start, g.constants)], part.log_probs(dense.model)
    measured = [evaluate.measure(dense, part, circuit.mask, fill, full).mean().item() for fill in fills]
    assert measured == pytest.approx([values[0], min(values)], rel=1e-4)
    assert float(g) != pytest.approx(min(values), rel=1e-6)  # it was measured on other prompts


def test_empty_circuit_under_optimal_trains_what_enters_out(planted, task):
    g = gap(planted, task, circuit_of(planted, torch.zeros(len(planted.graph))), "optimal", **QUICK)
    assert g.curve[-1][1] < g.curve[0][1] and math.isfinite(g.mean)


def test_planted_circuit_has_a_small_gap_and_random_ones_of_its_size_a_large_one(planted, task):
    right = gap(planted, task, circuit_of(planted, planted.graph.mask(PLANTED)))
    others = [float(gap(planted, task, c)) for c in random_circuits(planted, len(PLANTED), 5, tolerance=0.2)]
    assert float(right) < 0.01 and min(others) > 10 * float(right)


def test_stored_gap_is_loaded_for_the_same_edges_only(dense, monkeypatch):
    task = make_task(dense.model, 16)
    first = gap(dense, task, half(dense))
    monkeypatch.setattr(evaluate, "measure", None)
    assert gap(dense, task, replace(half(dense), method="other")).mean == first.mean
    with pytest.raises(TypeError):
        gap(dense, task, half(dense, seed=1))


def test_gap_refuses_other_models_and_unknown_ablations(dense, planted, task):
    with pytest.raises(ValueError, match="found in dense"):
        gap(planted, task, replace(circuit_of(planted), model="dense", fingerprint="0"))
    with pytest.raises(ValueError, match="unknown ablation 'noise'"):
        gap(planted, task, circuit_of(planted), "noise")
    with pytest.raises(TypeError, match="stepps"):
        gap(planted, task, circuit_of(planted), "optimal", stepps=3)


# ---- sweeps


def test_sweep_has_a_row_for_each_combination_and_goes_on_where_it_stopped(planted, task, monkeypatch):
    grid = {"lam": [0.01, 1.0], ("acdc", "optimal"): [0.02], "n_edges": [5]}
    options = {"ugs": {"steps": 5}}
    args = (planted, task, ["ugs", "acdc", "eap"], ["counterfactual", "optimal"], grid)
    table = sweep(*args, seeds=[0, 1], options=options, steps=2)
    assert len(table) == 2 * (2 + 2 + 2 + 1 + 1 + 1)
    assert set(table.searched[(table.ablation == "optimal") & (table.method != "ugs")]) == {"counterfactual"}
    eaps = table[(table.method == "eap") & (table.ablation == "counterfactual")]
    assert (eaps.n_edges == 5).all() and (eaps.gap < 0.01).all()
    monkeypatch.setattr(evaluate, "measure", None)  # nothing is left to compute
    assert sweep(*args, seeds=[0, 1], options=options, steps=2).equals(table)


def test_sweep_refuses_before_it_computes(planted, task, monkeypatch):
    monkeypatch.setattr(runs, "run", None)
    for methods, ablations, grid, words in (
        (["magic"], ["mean"], {"lam": [1]}, "unknown method 'magic'"),
        (["ugs"], ["noise"], {"lam": [1]}, "unknown ablation"),
        (["eap"], ["mean"], {"lam": [1]}, "no values for eap"),
    ):
        with pytest.raises(ValueError, match=words):
            sweep(planted, task, methods, ablations, grid)


def test_workers_load_the_model_by_name(tiny, monkeypatch):
    monkeypatch.setenv("OA_JOBS", "1")
    masked, task = MaskedModel(tiny), tasks.ioi(tiny, 12)
    table = sweep(masked, task, ["eap"], ["counterfactual", "mean"], {"n_edges": [40, 300]})
    assert list(table.n_edges <= table.asked) == [True] * 4 and table.gap.notna().all()


# ---- random circuits


def test_random_circuits_have_the_size_and_no_dangling_edges(dense):
    found = random_circuits(dense, 40, n=12, tolerance=0.1, seed=1)
    assert len(found) == 12 and all(36 <= c.n_edges <= 44 for c in found)
    assert all((dense.graph.prune_dangling(c.mask) == c.mask).all() for c in found)
    assert len({tuple(c.mask.tolist()) for c in found}) == 12
    again = random_circuits(dense, 40, n=12, tolerance=0.1, seed=1)
    assert all((a.mask == b.mask).all() for a, b in zip(found, again, strict=True))


def test_random_circuits_give_up_after_so_many_draws(dense, monkeypatch):
    monkeypatch.setattr(evaluate, "DRAWS", 100)
    with pytest.warns(UserWarning, match="of 100 random circuits"):
        assert len(random_circuits(dense, 40, n=90, tolerance=0.0)) < 90
    with pytest.raises(ValueError, match="size must be from 1"):
        random_circuits(dense, 10**6)


def test_sweep_runs_under_dask(tiny):
    distributed, masked, task = pytest.importorskip("distributed"), MaskedModel(tiny), tasks.ioi(tiny, 8)
    with (
        distributed.LocalCluster(n_workers=1, threads_per_worker=1, processes=False, dashboard_address=None) as cluster,
        distributed.Client(cluster),
        joblib.parallel_config(backend="dask"),
    ):
        there = sweep(masked, task, ["eap"], ["counterfactual"], {"n_edges": [40, 300]})
    assert there.equals(sweep(masked, task, ["eap"], ["counterfactual"], {"n_edges": [40, 300]}))
