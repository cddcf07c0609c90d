"""Fronts of circuits, what is read off them, and claims that can fail; on the authors' numbers, a random model, and tiny."""

# ruff: noqa: F811  (fixtures of test_search)

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import random_gpt2
from test_search import dense, make_task, store  # noqa: F401

from oa_utils import circuit_claims, claims, fronts, null_circuits, roles, runs, tasks
from oa_utils.graph import Edge, Graph
from oa_utils.masked import MaskedModel
from oa_utils.models import DATA, wrap
from oa_utils.search.estimators import EstimatorSettings, Slopes, estimator_errors

QUICK = (("steps", 2), ("batch", 8), ("check", 1), ("draws", 1))
GRID = tuple(("ugs", a, (0.1,)) for a in fronts.WAYS)
SETTINGS = fronts.FrontSettings("ioi", 12, GRID, (("ugs", {"steps": 2, "prompts": 2, "masks": 2}),), QUICK)


@pytest.fixture(scope="module")
def masked(tokenizer) -> MaskedModel:
    """A random model that reads the bundled model's language."""
    return MaskedModel(wrap(random_gpt2(tokenizer=tokenizer, n_layer=2, n_head=2), tokenizer, name="random-front"))


@pytest.mark.parametrize("other, said", circuit_claims.PAPER["ioi"].items())
def test_the_authors_fronts_give_the_papers_comparison_of_ablations(other, said):
    paper = fronts.paper_front("ioi")
    here = 1 - fronts.at_size(paper, "ugs", "optimal", 1000) / fronts.at_size(paper, "ugs", other, 1000)
    assert here == pytest.approx(said, abs=0.02)


@pytest.mark.parametrize("task", ["ioi", "gt"])
def test_the_authors_fronts_give_the_papers_words_on_manual_circuits(task):
    paper = fronts.paper_front(task)
    for row in paper[paper.method == "manual"].itertuples():
        below = 1 - fronts.at_size(paper, "ugs", row.ablation, row.n_edges) / row.gap
        assert (below < 0.5) == (row.ablation == "optimal")
        if row.ablation == "optimal":
            assert below == pytest.approx(circuit_claims.MANUAL_GAP[task], abs=0.03)


def made(gaps: dict[tuple[str, str], float]) -> pd.DataFrame:
    """Fronts Δ = level × 10 / size."""
    rows = [
        {"method": m, "ablation": a, "seed": 0, "n_edges": n, "gap": level * 10 / n, "se": 0.001 * level}
        for (m, a), level in gaps.items()
        for n in (10, 20, 40)
    ]
    return pd.DataFrame(rows)


def test_ratio_compares_fronts_at_equal_size():
    table = made({("ugs", "mean"): 1.0, ("acdc", "mean"): 4.0})
    assert fronts.ratio(table, ("ugs", "mean"), ("acdc", "mean")) == pytest.approx(0.25)
    assert fronts.ratio(table, ("ugs", "mean"), ("ugs", "mean")) == pytest.approx(1)
    assert np.isnan(fronts.ratio(table, ("ugs", "mean"), ("eap", "mean")))
    apart = table.assign(n_edges=table.n_edges.where(table.method == "ugs", table.n_edges * 10))
    assert np.isnan(fronts.ratio(apart, ("ugs", "mean"), ("acdc", "mean")))
    low, high = circuit_claims.interval(table, ("ugs", "mean"), ("acdc", "mean"))
    assert low < 0.25 < high and high - low < 0.02


def test_claims_hold_and_fail_as_the_numbers_say():
    levels = {("ugs", a): 2.0 for a in fronts.WAYS} | {("acdc", a): 1.0 for a in fronts.WAYS}
    bad = {c.id: c.holds for c in circuit_claims.claims(made(levels), "ioi")}
    levels |= {("acdc", a): 3.0 for a in fronts.WAYS} | {("ugs", "optimal"): 1.0}
    good = {c.id: c.holds for c in circuit_claims.claims(made(levels), "ioi")}
    assert set(good) == set(bad) and all(good.values()) and not any(bad.values()) and len(good) == 7
    gpt2 = fronts.paper_front("ioi").query("method == 'manual'").assign(source="gpt2")
    table = fronts.paper_front("ioi").assign(seed=0)
    assert all(c.holds for c in circuit_claims.manual_claims(table, "ioi", gpt2))
    worse = gpt2.assign(gap=gpt2.gap * np.where(gpt2.ablation == "optimal", 4, 0.1))
    assert not any(c.holds for c in circuit_claims.manual_claims(table, "ioi", worse))


def test_a_front_is_one_stored_table_of_circuits(masked):
    table = fronts.fronts(masked, SETTINGS)
    assert list(table.ablation) == list(fronts.WAYS) and (table.method == "ugs").all()
    again = fronts.fronts(masked, SETTINGS)
    pd.testing.assert_frame_equal(table, again)
    circuit = fronts.circuit_of(masked, table.iloc[1])
    assert circuit.n_edges == table.n_edges[1] and circuit.ablation == "optimal"
    manual = fronts.manual_gaps(masked, SETTINGS)
    assert set(manual.ablation) == set(fronts.WAYS) and (manual.source == "authors' log, GPT-2-small").all()
    assert all(c.holds is None for c in circuit_claims.manual_claims(table, "ioi", manual))


def test_the_manual_circuit_is_measured_where_the_graph_is_gpt2_smalls(tokenizer):
    small = MaskedModel(wrap(random_gpt2(tokenizer=tokenizer, n_layer=12, n_head=12, n_embd=24), tokenizer, name="small"))
    assert small.graph == Graph(12, 12)
    manual = fronts.manual_gaps(small, replace(SETTINGS, n=4))
    assert (manual.n_edges == 963).all() and (manual.gap > 0).all() and (manual.source == "small").all()


def test_variants_change_one_thing_each(masked):
    found = fronts.variants(masked, replace(SETTINGS, options=SETTINGS.options + (("hcgs", {"steps": 2}),)), 0.1)
    assert list(found.index) == list(fronts.CHANGES)
    assert found.cost.to_numpy() == pytest.approx(found.gap + 0.1 * found.n_edges)
    cost = pd.DataFrame({"cost": {"CF: as in the paper": 1.0, "CF: random start": 2.0, "CF: variance window": 0.5}})
    assert [c.holds for c in circuit_claims.option_claims(cost)] == [True, False]


def test_spoofing_compares_both_tasks(masked):
    table = circuit_claims.spoofing(masked, SETTINGS)
    assert list(table.index) == ["ioi", "gt"] and table.ratio["ioi"] == pytest.approx(
        table["gap resample"]["ioi"] / table["gap counterfactual"]["ioi"]
    )
    assert table.paper["ioi"] > 2 * table.paper["gt"]  # the paper's own statement on the authors' numbers
    assert circuit_claims.spoofing_claims(table.assign(ratio=[3.0, 1.0]))[0].holds
    assert not circuit_claims.spoofing_claims(table.assign(ratio=[1.0, 3.0]))[0].holds


# ---- random circuits


def test_random_circuits_are_measured_like_the_one_found(masked):
    settings = null_circuits.NullSettings(SETTINGS, n=3, tolerance=0.5)
    table = null_circuits.null_gaps(masked, settings)
    assert table.groupby(["ablation", "kind"]).size().unstack().loc[list(fronts.WAYS)].to_numpy().tolist() == [[1, 3]] * 4
    own = fronts.fronts(masked, SETTINGS).set_index("ablation").gap
    assert table[table.kind == "found"].set_index("ablation").gap[own.index].to_numpy() == pytest.approx(own.to_numpy())
    assert all(len(curve) == 3 for curve in table[table.ablation == "optimal"].curve)


def nulls(found: float, curve: tuple, random_curve: tuple, spread: float) -> pd.DataFrame:
    rows = []
    for a in fronts.WAYS:
        own = spread if a == "optimal" else 1.0
        rows.append({"ablation": a, "kind": "found", "n_edges": 50, "gap": found, "se": 0, "curve": curve})
        other = {"ablation": a, "kind": "random", "n_edges": 50, "se": 0, "curve": random_curve}
        rows += [{**other, "gap": 10 + own * x} for x in (-1, 1)]
    return pd.DataFrame(rows)


def test_claims_about_random_circuits_hold_and_fail():
    fast, slow = ((0, 1.0), (10, 0.2)), ((0, 1.0), (10, 0.9))
    good = null_circuits.claims(nulls(1.0, fast, slow, 0.1), "ioi")
    bad = null_circuits.claims(nulls(9.9, slow, fast, 3.0), "ioi")
    assert len(good) == 8 and all(c.holds for c in good) and not any(c.holds for c in bad)
    assert {c.id: c.measured for c in good}["random_ioi.z.mean"] == pytest.approx(-9)
    paper = {c.id: c.paper_value for c in good}
    assert paper["random_ioi.z.optimal"] == pytest.approx(-100.57, rel=0.06)  # the paper's z, from its rounded numbers


# ---- estimators


def test_with_one_undecided_edge_ugs_and_importance_sampling_are_unbiased(dense):
    edge, n = dense.graph.index(Edge("m0", "out")), len(dense.graph)
    theta = torch.ones(n)
    theta[edge] = 0.6
    theta = theta.clamp(1e-6, 1 - 1e-6)
    settings = EstimatorSettings((edge,), tuple(theta.tolist()), masks=64, estimates=40, draws=64)
    found = estimator_errors(dense, make_task(dense.model, 32), settings).set_index("estimator")
    assert found.true.nunique() == 1 and abs(found.true.iloc[0]) > 3 * found.se.iloc[0]
    for how in ("ugs", "importance"):
        error = (found["std"][how] ** 2 / 40 + found.se[how] ** 2) ** 0.5
        assert abs(found["mean"][how] - found.true[how]) < 4 * error < 0.5 * abs(found.true[how]), how


def test_the_true_slope_is_the_mean_change_that_the_edge_makes(dense):
    task, n = make_task(dense.model, 16), len(dense.graph)
    edge = dense.graph.index(Edge("m0", "out"))
    slopes, rows = Slopes(dense, task, EstimatorSettings((3, edge), (1.0,) * n, draws=32)), torch.arange(8)
    true, se = slopes.true()
    mask = torch.ones(8, n)
    mask[:, edge] = 0
    lost = slopes.kl(rows, mask, slopes.fill(rows))  # with every other edge kept, the gap with the edge is zero
    assert -true[1].item() == pytest.approx(lost.mean().item(), abs=4 * se[1].item()) and true[1] < -4 * se[1]


# ---- heads


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_patterns_are_the_attention_that_the_model_uses(family, request):
    model = request.getfixturevalue(family)
    tokens = torch.randint(2, 50, (3, 9), generator=runs.generator(0))
    pattern, x = roles.patterns(model, tokens)[0], model.layers[0].ln1(model.embed(tokens))
    v = model.layers[0].heads(x, "v")
    z = pattern @ v.repeat_interleave(pattern.shape[1] // v.shape[1], 1)
    torch.testing.assert_close(z.transpose(1, 2), model.attention(0, x), rtol=1e-4, atol=1e-5)


def test_roles_name_what_a_head_of_the_bundled_model_looks_at(tiny):
    task = tasks.ioi(tiny, 32)
    looks = roles.head_roles(tiny, task, [f"a{i}.h{j}" for i in range(tiny.n_layers) for j in range(tiny.n_heads)])
    assert ((looks >= 0) & (looks <= 1)).to_numpy().all()
    assert looks["last → answer"].max() > 0.4 and looks["last → repeat"].max() > 0.8
    assert roles.head_roles(tiny, tasks.greater_than(tiny, 16), ["a0.h0"])["last → repeat"].isna().all()


# ---- what is published


@pytest.mark.parametrize("path", sorted((DATA / "results").glob("*/fronts/*.json")), ids=lambda p: p.parts[-3] + p.stem[:8])
def test_published_claims_about_fronts_follow_from_the_published_table(path):
    record, name = runs.read_json(path), path.parts[-3]
    if len(record["settings"]["grid"]) < 5:
        return  # the table of seeds, or of one λ, carries no claim of its own
    task = record["settings"]["task"]
    stored = {c.id: c for c in claims.published(name)}
    again = [c for c in circuit_claims.claims(pd.DataFrame(record["numbers"]["rows"]), task)]
    assert len(again) >= 15
    for claim in again:
        assert claim.id in stored and stored[claim.id].holds == claim.holds
        assert stored[claim.id].measured == (claim.measured and pytest.approx(claim.measured, rel=1e-6))


@pytest.mark.parametrize("path", sorted((DATA / "results").glob("*/null_circuits/*.json")), ids=lambda p: p.stem[:4])
def test_published_claims_about_random_circuits_follow_from_the_published_table(path):
    record, name = runs.read_json(path), path.parts[-3]
    stored = {c.id: c for c in claims.published(name)}
    for claim in null_circuits.claims(pd.DataFrame(record["numbers"]["rows"]), record["settings"]["front"]["task"]):
        assert stored[claim.id].measured == pytest.approx(claim.measured, rel=1e-6) and stored[claim.id].holds == claim.holds
