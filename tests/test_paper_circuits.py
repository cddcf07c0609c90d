"""What is read off fronts and random circuits: the authors' numbers, claims that can fail, and what
is published."""

import json
import os
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest
from conftest import random_gpt2

from oa_utils import store, tasks
from oa_utils.circuits import Circuit, manual_circuit
from oa_utils.fills import ABLATIONS, edge_constants
from oa_utils.graph import Edge, Graph
from oa_utils.masked import MaskedModel
from oa_utils.models import Model, wrap
from oa_utils.paper import circuits as study
from oa_utils.paper import claims, random
from oa_utils.search import against_random, sweep, ugs
from oa_utils.tasks import Task

GAP = {"steps": 2, "batch": 8, "look_every": 1, "draws": 1}
PACE = {"steps": 2, "prompts": 2, "masks": 2}
OPTIONS = {"ugs": PACE, "hcgs": PACE}


@pytest.fixture(scope="module")
def masked(tokenizer) -> MaskedModel:
    """A random model that reads the bundled model's language."""
    hf = random_gpt2(tokenizer=tokenizer, n_layer=2, n_head=2)
    return MaskedModel(wrap(hf, tokenizer, name="random-front"))


@pytest.fixture(scope="module")
def ioi(masked) -> Task:
    return tasks.ioi(masked.model, 12)


@pytest.fixture(scope="module")
def greater_than(masked) -> Task:
    return tasks.greater_than(masked.model, 12)


@pytest.fixture(scope="module")
def other(ioi) -> Task:
    """A task that the paper does not have, without counterfactuals."""
    return replace(ioi, name="own", counterfactual=None, cf_prompts=())


def fronts(levels: dict[tuple[str, str], float], seed: int = 0, spread=0.02) -> pd.DataFrame:
    """Made-up fronts, Δ = level × 10 / size, of prompts that differ."""
    rows = []
    noise = np.linspace(-spread, spread, 20)
    for i, ((method, ablation), level) in enumerate(levels.items()):
        for n in (10, 20, 40):
            front = {"method": method, "ablation": ablation, "seed": seed, "n_edges": n}
            gap = level * 10 / n
            each = (gap * (1 + np.roll(noise, i))).tolist()
            rows.append({**front, "gap": gap, "se": 0.001 * level, "each": each})
    return pd.DataFrame(rows)


# ---- the authors' numbers


@pytest.mark.parametrize("way, below", study.LOWER.items())
def test_the_authors_fronts_give_the_papers_comparison_of_ablations(ioi, way, below):
    paper = study.paper_front(ioi)
    optimal, front = (study.at_size(paper, "ugs", name, 1000) for name in ("optimal", way))
    assert 1 - optimal / front == pytest.approx(below, abs=0.02)


@pytest.mark.parametrize("name", ["ioi", "greater_than"])
def test_the_authors_fronts_give_the_papers_words_on_manual_circuits(name, request):
    task = request.getfixturevalue(name)
    paper = study.paper_front(task)
    manual = paper[paper.method == "manual"]
    assert set(manual.ablation) == set(study.WAYS)
    for row in manual.itertuples():
        below = 1 - study.at_size(paper, "ugs", row.ablation, row.n_edges) / row.gap
        assert (below < 0.5) == (row.ablation == "optimal")
        if row.ablation == "optimal":
            assert below == pytest.approx(study.MANUAL_GAP[study.short_name(task)], abs=0.03)


def test_a_task_that_the_paper_does_not_have_has_no_front_there(other):
    assert study.paper_front(other).empty
    assert study.short_name(other) == "own"
    assert study.ways(other) == ["optimal", "mean", "resample"]


# ---- fronts compared


def test_ratio_compares_fronts_at_equal_size():
    ugs = ("ugs", "mean")
    acdc = ("acdc", "mean")
    table = fronts({ugs: 1.0, acdc: 4.0})
    assert study.ratio(table, ugs, acdc) == pytest.approx(0.25)
    assert study.ratio(table, ugs, ugs) == pytest.approx(1)
    assert np.isnan(study.ratio(table, ugs, ("eap", "mean")))
    larger = table.n_edges.where(table.method == "ugs", table.n_edges * 10)
    assert np.isnan(study.ratio(table.assign(n_edges=larger), ugs, acdc))
    found = study.compare(table, ugs, acdc)
    assert found.low < 0.25 < found.high
    assert found.high - found.low < 0.02
    assert found.seeds == 1
    assert study.compare(table.assign(n_edges=larger), ugs, acdc).low is None


def test_empty_circuits_say_nothing_about_a_ratio():
    """Both fronts begin with no edges, where they are the same; from the first edge on one is four
    times lower."""
    ugs, acdc = ("ugs", "mean"), ("acdc", "mean")
    table = fronts({ugs: 1.0, acdc: 4.0})
    gaps = {side: [100.0] * len(table["each"].iloc[0]) for side in (ugs, acdc)}
    empty = table.drop_duplicates(["method", "ablation"]).assign(n_edges=0, gap=100.0)
    empty["each"] = [gaps[ugs]] * len(empty)
    both = pd.concat([empty, table], ignore_index=True)
    found = study.compare(both, ugs, acdc)
    least = min(table.n_edges)
    assert found.value < 0.5, f"of sizes from 1 to {least} some lie on the way to the empty circuit"
    assert study.common_range([np.array([0, 10, 20])] * 2, 3).tolist()[0] == 1
    assert study.common_range([np.array([1e-4, 1e-2])] * 2, 3, least=1e-9)[0] == 1e-4


def test_prompts_that_both_sides_share_are_drawn_together():
    """A prompt that is hard under both moves both gaps, not their ratio."""
    sides = (("ugs", "mean"), ("acdc", "mean"))
    table = fronts(dict.fromkeys(sides, 1.0), spread=0.9)
    apart = study.compare(table, *sides)
    table["each"] = [table["each"].iloc[0]] * len(table)
    together = study.compare(table, *sides)
    assert together.high - together.low == pytest.approx(0, abs=1e-9)
    assert apart.high - apart.low > 0.05


def test_seeds_widen_the_interval_and_are_counted():
    ugs, acdc = ("ugs", "mean"), ("acdc", "mean")
    levels = {ugs: 1.0, acdc: 4.0}
    one = study.compare(fronts(levels), ugs, acdc)
    several = [fronts({ugs: level, acdc: 4.0}, seed) for seed, level in enumerate((0.5, 1, 2))]
    three = study.compare(pd.concat(several), ugs, acdc)
    assert three.value == pytest.approx(0.25)
    assert (one.seeds, three.seeds) == (1, 3)
    assert three.high - three.low > 5 * (one.high - one.low)


def test_intervals_cover_the_ratio_where_seeds_differ():
    """Two searches that are the same, with three seeds each that differ by a third."""
    rng = np.random.default_rng(0)
    sides = (("ugs", "mean"), ("hcgs", "mean"))
    covered = 0
    for _ in range(100):
        by_seed = []
        for seed in range(3):
            levels = dict(zip(sides, np.exp(0.3 * rng.normal(size=2)), strict=True))
            by_seed.append(fronts(levels, seed))
        found = study.compare(pd.concat(by_seed), *sides, draws=20)
        covered += found.low < 1 < found.high
    assert covered >= 92


def test_a_seed_that_collapsed_leaves_a_comparison_undecided():
    ugs, hcgs = ("ugs", "mean"), ("hcgs", "mean")
    good = [fronts({ugs: 1.0, hcgs: 2.0 + 0.1 * seed}, seed) for seed in range(3)]
    assert study.compare(pd.concat(good), ugs, hcgs).high < 1
    good[2] = fronts({ugs: 1.0, hcgs: 100.0}, 2)
    found = study.compare(pd.concat(good), ugs, hcgs)
    assert found.low < 1 < found.high


@pytest.mark.parametrize(
    "last, words", [(10, "10 edges only: too narrow to decide"), (40, "10 to 40 edges")]
)
def test_fronts_that_meet_in_a_sliver_decide_nothing(ioi, last, words):
    table = fronts({("ugs", "mean"): 1.0, ("acdc", "mean"): 4.0})
    [claim] = study.claims(table[(table.method == "acdc") | (table.n_edges <= last)], ioi)
    assert claim.measured == pytest.approx(0.25)
    assert claim.holds is (None if last == 10 else True)
    assert words in claim.note


def test_a_search_over_whole_vertices_is_said(ioi):
    table = fronts({("ugs", "mean"): 1.0, ("acdc", "mean"): 4.0})
    [edges] = study.claims(table.assign(level="edge"), ioi)
    assert "vertices" not in edges.note
    level = np.where(table.method == "acdc", "vertex", "edge")
    [vertices] = study.claims(table.assign(level=level), ioi)
    assert "ACDC over whole vertices" in vertices.note


def test_size_over_size_at_equal_gap():
    """Δ = level × 10 / size: half the level needs half the edges."""
    ugs, acdc = ("ugs", "mean"), ("acdc", "mean")
    table = fronts({ugs: 1.0, acdc: 2.0})
    assert study.compare(table, ugs, acdc, "gap").value == pytest.approx(0.5, rel=0.01)
    empty = table.iloc[[0]].assign(n_edges=0, gap=0.3)
    empty["each"] = [[0.3] * 20]
    both = pd.concat([empty, table], ignore_index=True)
    assert study.compare(both, ugs, acdc, "gap").value == pytest.approx(0.5, rel=0.01)
    only_empty = pd.concat([empty, table[table.method == "acdc"]], ignore_index=True)
    assert np.isnan(study.compare(only_empty, ugs, acdc, "gap").value)


def test_the_authors_ratio_of_oa_to_cf_rises_with_size(ioi):
    sides = (("ugs", "optimal"), ("ugs", "counterfactual"))
    curve = study.ratio_curve(study.paper_front(ioi), *sides, study.GPT2_EDGES)
    assert curve.ratio.iloc[0] < 0.3
    assert curve.ratio.iloc[-1] > 1
    assert curve.low.isna().all()


def test_claims_on_fronts_hold_and_fail_as_the_numbers_say(ioi):
    levels = {("ugs", way): 2.0 for way in study.WAYS}
    levels |= {("acdc", way): 1.0 for way in study.WAYS}
    bad = {claim.id: claim.holds for claim in study.claims(fronts(levels), ioi)}
    levels |= {("acdc", way): 3.0 for way in study.WAYS}
    levels |= {("ugs", "optimal"): 1.0}
    good = {claim.id: claim.holds for claim in study.claims(fronts(levels), ioi)}
    assert set(good) == set(bad)
    assert len(good) == 8
    assert all(good.values())
    assert not any(bad.values())


def test_claims_of_any_task_carry_its_name(other):
    [claim] = study.claims(fronts({("ugs", "mean"): 1.0, ("acdc", "mean"): 4.0}), other)
    assert claim.id == "circuits_own.front.mean.acdc"
    assert claim.holds
    assert claim.paper_value is None
    assert claim.remark == "not in the paper; 10 to 40 edges; one seed"


def test_fronts_without_a_common_size_decide_nothing(ioi):
    table = fronts({("ugs", "mean"): 1.0, ("acdc", "mean"): 4.0})
    apart = table.n_edges.where(table.method == "ugs", table.n_edges * 10)
    [claim] = study.claims(table.assign(n_edges=apart), ioi)
    assert claim.holds is None
    assert "no common size" in claim.note


def test_claims_on_manual_circuits_hold_and_fail_as_the_numbers_say(ioi):
    paper = study.paper_front(ioi)
    gpt2 = paper[paper.method == "manual"].assign(source="gpt2", se=0.001)
    table = paper.assign(seed=0)
    listed = study.manual_claims(table, ioi, gpt2)
    assert len(listed) == 4
    assert all(claim.holds for claim in listed)
    factor = np.where(gpt2.ablation == "optimal", 4, 0.1)
    worse = gpt2.assign(gap=gpt2.gap * factor)
    assert not any(claim.holds for claim in study.manual_claims(table, ioi, worse))


def test_where_the_manual_circuit_does_not_fit_the_authors_numbers_stand_undecided(
    masked, ioi, other
):
    table = sweep(masked, ioi, ["ugs"], study.WAYS, {"lam": [0.1]}, [0], OPTIONS, GAP)
    assert list(table.ablation) == list(study.WAYS)
    manual = study.manual_gaps(masked, ioi, GAP)
    assert set(manual.ablation) == set(study.WAYS)
    assert (manual.source == study.AUTHORS).all()
    listed = study.claims(table, ioi, manual)
    undecided = [claim for claim in listed if ".manual." in claim.id]
    assert len(undecided) == 4
    assert all(claim.holds is None for claim in undecided)
    assert study.manual_gaps(masked, other, GAP) is None


def test_the_manual_circuit_is_measured_where_the_graph_is_gpt2_smalls(tokenizer):
    hf = random_gpt2(tokenizer=tokenizer, n_layer=12, n_head=12, n_embd=24)
    small = MaskedModel(wrap(hf, tokenizer, name="small"))
    assert small.graph == Graph(12, 12)
    task = tasks.ioi(small.model, 4)
    manual = study.manual_gaps(small, task, GAP)
    assert (manual.n_edges == 963).all()
    assert (manual.gap > 0).all()
    assert (manual.source == "small").all()
    assert manual.ablation.tolist() == list(study.WAYS)
    assert manual_circuit("own", small.graph) is None


# ---- variants, estimators, spoofing

PLAN = study.Study(
    n=24,
    lam=(0.1,),
    lam_oa=(0.1,),
    lam_few={},
    shares=(),
    shares_oa=(),
    options=OPTIONS,
    gap_options=GAP,
)


def test_a_study_leaves_out_searches_under_mean_and_resample_alone(masked, ioi):
    methods = ("ugs", "hcgs")
    whole = replace(PLAN, methods=methods).grid(masked.graph, ioi)
    assert set(whole) == {(method, way) for method in methods for way in study.WAYS}
    less = replace(PLAN, methods=methods, not_few=("hcgs",)).grid(masked.graph, ioi)
    assert set(whole) - set(less) == {("hcgs", "mean"), ("hcgs", "resample")}


def test_prices_under_mean_and_resample_are_those_given_for_the_search_or_the_ablation(
    masked, ioi, other
):
    few = {"mean": (0.3, 0.2), ("acdc", "mean"): (0.5,)}
    methods = ("ugs", "hcgs", "acdc")
    plan = replace(PLAN, lam=(0.1, 0.01), lam_oa=(0.04,), lam_few=few, methods=methods, most_hcgs=1)
    grid = plan.grid(masked.graph, ioi)
    assert [grid["ugs", way] for way in study.WAYS] == [
        (0.1, 0.01),
        (0.04,),
        (0.3, 0.2),
        (0.1, 0.01),
    ]
    assert [grid["acdc", way] for way in study.WAYS] == [
        (0.1, 0.01),
        (0.1, 0.01),
        (0.5,),
        (0.1, 0.01),
    ]
    assert grid["hcgs", "counterfactual"] == (0.1,)
    assert grid["hcgs", "mean"] == (0.3, 0.2)
    assert ("acdc", "optimal") not in plan.grid(masked.graph, other)


def sized(n_parameters: int) -> Model:
    """A model of which only the size is known."""
    return Mock(spec=Model, budget="default", n_parameters=n_parameters)


@pytest.mark.parametrize(
    "name, searches, pruned_under",
    [
        ("ioi", ("eap", "eap_ig", "eap_ig_masks"), "counterfactual"),
        ("greater_than", ("eap", "eap_ig_masks"), "resample"),
    ],
)
def test_a_large_models_sweep_is_the_one_that_stored_runs_are_named_by(
    ioi, name, searches, pruned_under
):
    graph = Graph(12, 12)
    plan = study.study(sized(10**9), name)
    prices = (3e-3, 1e-3, 3e-4)
    sizes = [65, 162, 325, 650, 1300]
    some = [162, 650]
    expected = {("ugs", way): prices for way in study.WAYS}
    expected |= {(search, way): sizes for search in searches for way in study.WAYS}
    expected |= {(search, "optimal"): some for search in searches}
    expected["edge_pruning", pruned_under] = some
    if name == "ioi":
        for way in ("counterfactual", "optimal"):
            expected |= {("hcgs", way): prices[:2], ("acdc", way): prices}
    assert plan.grid(graph, replace(ioi, name=name)) == expected
    assert set(map(tuple, plan.seeds_from(0).values())) == {(0,)}


def test_what_a_search_spends_is_said_in_words():
    plan = replace(PLAN, options={"ugs": {"steps": 5, "masks": 1}, "eap_ig": {"points": 7}})
    assert plan.spending("ugs", "optimal") == "5 steps × 1 mask"
    assert plan.spending("eap_ig", "mean") == "7 points"
    assert plan.spending("eap", "mean") == ""


def test_a_study_refuses_what_it_does_not_have(masked, ioi):
    with pytest.raises(ValueError, match="variant 'CF: other'.*CF: random start"):
        replace(PLAN, variants=("CF: other",))
    less = replace(PLAN, methods=("ugs", "hcgs"), not_few=("hcgs",))
    with pytest.raises(ValueError, match="no hcgs under mean"):
        study.budget_check(masked, ioi, less, "mean", ["hcgs"])


def test_variants_change_one_thing_each(masked, ioi, tmp_path):
    table = study.variants(masked, ioi, PLAN)
    assert list(table.index) == list(study.VARIANTS)
    assert table.cost.to_numpy() == pytest.approx(table.gap + 0.1 * table.n_edges)
    for way in ("optimal", "counterfactual"):
        for method in ("ugs", "hcgs"):
            changes = [c for m, a, c in study.VARIANTS.values() if (m, a) == (method, way)]
            paths = tmp_path.rglob(f"search_{method}/{way}*.json")
            searched = [store.read_record(path)["settings"] for path in paths]
            assert len(searched) == len(changes)
            for change in changes:
                changed = store.plain({**PACE, "lam": 0.1, "seed": 0, **change})
                assert any(changed.items() <= settings.items() for settings in searched), change


def test_variants_of_a_task_without_counterfactuals_are_those_of_oa(masked, other):
    table = study.variants(masked, other, PLAN)
    assert list(table.index) == [name for name in study.VARIANTS if name.startswith("OA")]
    fewer = replace(PLAN, variants=study.MAIN_VARIANTS)
    assert list(study.variants(masked, other, fewer).index) == list(study.MAIN_VARIANTS[:2])
    assert study.option_claims(table, other) == []


def test_claims_on_options_hold_and_fail(ioi):
    cost = {"CF: as in the sweep": 1.0, "CF: random start": 2.0, "CF: variance window": 0.5}
    tried = pd.DataFrame(
        {"asked": 0.01, "n_edges": 10, "each": [[x - 0.1, x + 0.1] * 5 for x in cost.values()]},
        index=list(cost),
    )
    listed = study.option_claims(tried, ioi)
    assert [claim.id for claim in listed] == [
        "circuits_ioi.option.random_start",
        "circuits_ioi.option.variance_window",
    ]
    assert [claim.holds for claim in listed] == [True, False]


def test_claims_on_estimators_hold_and_fail(ioi):
    errors = {"ugs": [1.0, 3.0], "hcgs": [0.5, 1.5], "importance": [8.0, 8.0]}
    rows = [(name, i, x) for name, values in errors.items() for i, x in enumerate(values)]
    slopes = pd.DataFrame(rows, columns=["estimator", "edge", "rms"])
    importance, hard_concrete = study.estimator_claims(slopes, ioi)
    assert (importance.measured, importance.holds) == (0.25, True)
    assert (hard_concrete.measured, hard_concrete.holds) == (2.0, False)
    assert importance.seeds == 1
    assert study.estimator_claims(slopes[slopes.edge == 0], ioi) == []
    assert study.estimator_claims(slopes[:0], ioi) == []


def test_spoofing_compares_tasks(masked, ioi, greater_than):
    options = {"ugs": {**PACE, "noise": 1.0}}
    plan = study.Study(12, (0.1,), (0.1,), {}, (0.2,), (0.2,), options, GAP)
    table = study.spoofing(masked, {ioi: plan, greater_than: plan})
    assert list(table.index) == ["ioi", "gt"]
    assert table.paper["ioi"] > 2 * table.paper["gt"], "the paper, on the authors' numbers"
    ends = {"low": [0.9, 0.9], "high": [1.1, 1.1], "seeds": 3}
    [good] = study.spoofing_claims(table.assign(ratio=[3.0, 1.0], **ends))
    [bad] = study.spoofing_claims(table.assign(ratio=[1.0, 3.0], **ends))
    assert good.holds
    assert not bad.holds
    assert bad.holds is not None
    assert study.spoofing_claims(table.loc[["ioi"]]) == []
    assert good.note == f"Greater-Than: {table.compared['gt']}; IOI: {table.compared['ioi']}"
    [narrow] = study.spoofing_claims(table.assign(ratio=[3.0, 1.0], low=None, high=None))
    assert narrow.holds is None


def test_circuits_are_measured_under_other_rules(masked, ioi):
    both = ["counterfactual", "optimal"]
    found = sweep(masked, ioi, ["ugs"], both, {"lam": [0.1]}, [0], OPTIONS, GAP)
    table = study.other_rules(masked, ioi, found, GAP)
    assert table["found under"].tolist() == ["CF", "OA"]
    assert table["Δ under OA"].notna().all()
    own = table.iloc[1]
    assert own["Δ under OA"] == pytest.approx(own["Δ, its own rule"])


def test_constants_by_position_are_searched_and_measured(masked, ioi):
    options = {**OPTIONS["ugs"], "steps": 2}
    table = study.by_family(masked, ioi, 0.1, options, GAP)
    assert table["searched with"].tolist() == ["shared", "shared", "position", "position"]
    assert table["measured with"].tolist() == ["shared", "position", "shared", "position"]
    assert table["Δ"].notna().all()
    means = edge_constants(masked, ioi, ABLATIONS["mean"])
    circuit = ugs(masked, ioi, "optimal", lam=0.1, constants=means, **options)
    assert circuit.constants.embed.shape == means.embed.shape
    assert (circuit.constants.embed != means.embed).any(), "they train along"
    with pytest.raises(ValueError, match="counterfactual.*trains none"):
        ugs(masked, ioi, "counterfactual", lam=0.1, constants=means, **options)


def test_budgets_are_checked_on_the_validation_part(masked, tmp_path):
    task = tasks.ioi(masked.model, 40)
    options = {"eap_ig_masks": {"points": 2}}
    plan = study.Study(40, (0.1,), (0.1,), {}, (0.2, 0.5, 0.9), (0.5,), options, GAP)
    table = study.budget_check(masked, task, plan, "counterfactual", ["eap_ig_masks"])
    assert len(table) == 3
    assert table.moved.notna().all()
    points = [store.read_record(path) for path in tmp_path.rglob("search_eap/*.json")]
    assert {record["settings"]["points"] for record in points} == {2, 4}
    gaps = [store.read_record(path) for path in tmp_path.rglob("circuit_gaps/*.json")]
    assert {record["numbers"]["n"] for record in gaps} == {len(task.validation)}


def test_a_search_is_timed_in_a_store_of_its_own(masked, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "scripts")
    task = tasks.ioi(masked.model, 40)
    options = {"eap_ig_masks": {"points": 2}}
    plan = study.Study(40, (0.1,), (0.1,), {}, (0.2, 0.5), (0.5,), options, GAP)
    before = os.environ.get("OA_STORE")
    timed = import_module("budgets").seconds_of_one
    assert timed(masked, task, plan, "counterfactual", "eap_ig_masks") > 0
    assert os.environ.get("OA_STORE") == before
    assert not list(tmp_path.rglob("search_eap/*.json"))


def test_searches_that_miss_the_rule_for_budgets_are_named():
    rows = [
        ("ugs", "counterfactual", -0.1, 0.2),
        ("ugs", "counterfactual", 0.0, 0.0),
        ("hcgs", "optimal", -0.3, 0.1),
        ("hcgs", "optimal", -0.1, 0.2),
    ]
    budgets = pd.DataFrame(rows, columns=["method", "ablation", "moved", "error"])
    searches = study.settled(budgets)
    assert searches["within one error"].tolist() == [2, 1]
    meets, misses, lower, copied = study.settled_words(searches)
    assert meets.endswith("at all sizes: UGS under CF")
    assert misses.endswith("is not met: HCGS under OA (1 of 2 sizes)")
    assert lower.endswith("twice the budget: HCGS under OA")
    assert copied.startswith("HCGS under OA: copied")
    timed = study.settled(budgets.assign(seconds=2.0))
    assert timed["seconds"].tolist() == [2.0, 2.0]
    assert len(study.settled_words(timed)) == 3


def test_fronts_are_put_into_words():
    sides = (("ugs", "mean"), ("acdc", "mean"))
    table = fronts(dict(zip(sides, (1.0, 4.0), strict=True)))
    words = study.ratio_words(table, *sides, "UGS over ACDC")
    assert words.startswith("UGS over ACDC: 0.25 [0.2")
    assert study.ratio_words(table, sides[0], ("eap", "mean"), "x") == "x: no common size"
    narrow = table[(table.method == "acdc") | (table.n_edges == 10)]
    assert "no interval (10 edges only" in study.ratio_words(narrow, *sides, "x")
    assert (
        study.lowest(table) == "lowest Δ in the middle of the sizes: mean, 20 edges: UGS (0.5 nats)"
    )
    assert "no front has that size" in study.lowest(table[:0])


def test_the_busiest_vertex_of_a_circuit_is_named(masked):
    edges = [("embed", "m0"), ("m0", "m1"), ("m0", "out"), ("m1", "out")]
    circuit = Circuit.from_edges(masked.model, [Edge(*edge, "") for edge in edges])
    words = "4 edges between 4 vertices; most of them, 3, begin or end at m0"
    assert study.busiest(circuit) == words
    assert study.busiest(Circuit.from_edges(masked.model, [])) == "the circuit is empty"


# ---- random circuits


def against(gap: float, after: float, random_after: float, spread: float) -> pd.DataFrame:
    """A made-up table of circuits of three seeds and many random ones under each ablation, with
    what one step of training leaves of their Δ."""
    rows = []
    for way in study.WAYS:
        width = spread if way == "optimal" else 1.0
        shared = {"ablation": way, "n_edges": 50, "se": 0.01}
        for factor in (0.98, 1.0, 1.02):
            curve = ((0, 1.0), (1, factor * after))
            rows.append({**shared, "kind": "found", "gap": factor * gap, "curve": curve})
        for x in np.linspace(-1, 1, 20):
            curve = ((0, 1.0), (1, random_after + 0.01 * x))
            drawn = {"kind": "random", "gap": 10 + width * x, "curve": curve}
            rows.append({**shared, **drawn})
    return pd.DataFrame(rows)


FAST = 0.2
SLOW = 0.9


def test_claims_about_random_circuits_hold_and_fail(ioi):
    good = random.claims(against(1.0, FAST, SLOW, 0.1), ioi)
    bad = random.claims(against(9.9, SLOW, FAST, 3.0), ioi)
    assert len(good) == len(bad) == 8
    assert all(claim.holds for claim in good)
    assert all(claim.holds is False for claim in bad)
    measured = {claim.id: claim.measured for claim in good}
    assert measured["random_ioi.ratio.mean"] == pytest.approx(0.1)
    paper = {claim.id: claim.paper_value for claim in good}
    assert paper["random_ioi.ratio.optimal"] == pytest.approx(0.065, abs=0.001)


def test_train_gaps_stand_beside_test_gaps_where_constants_were_trained(ioi):
    table = against(1.0, FAST, SLOW, 0.1)
    is_trained = table.ablation == "optimal"
    table["curve"] = table.curve.where(is_trained, None).map(lambda curve: curve or ())
    rows = random.summary(table, ioi)
    assert rows["found, train"]["optimal"] == pytest.approx(FAST)
    assert rows["found, train"].isna().sum() == 3


def test_spreads_of_random_circuits_that_all_do_the_same_are_not_compared(ioi):
    alike = against(1.0, FAST, SLOW, 0.01)
    near_ten = alike.kind == "random"
    alike.loc[near_ten, "gap"] = 10 + 0.1 * (alike.gap[near_ten] - 10)
    verdicts = {claim.id: claim.holds for claim in random.claims(alike, ioi)}
    assert verdicts["random_ioi.std.mean"] is None
    [claim] = [c for c in random.claims(against(1.0, FAST, SLOW, 0.1), ioi) if ".std.m" in c.id]
    assert claim.note == "random circuits of 50 to 50 edges under OA, of 50 to 50 under mean"


def test_the_interval_of_a_ratio_of_spreads_holds_for_heavy_tails():
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(200):
        one, other = 10 + rng.standard_t(4, (2, 20))
        _, low, high = random.std_ratio(one, other)
        covered += low < 1 < high
    assert covered > 175  # of the F distribution: 160


def test_prompts_count_beside_seeds(ioi):
    table = against(1.0, FAST, SLOW, 0.1)
    sure = random.ratio_interval(table, "optimal")
    unsure = random.ratio_interval(table.assign(se=0.5), "optimal")
    assert unsure[1] - unsure[0] > 5 * (sure[1] - sure[0])


def test_empty_circuits_are_left_out_of_random_ones(masked, ioi):
    whole = list(range(len(masked.graph)))
    rows = {"ablation": ["mean", "optimal"], "n_edges": [0, len(whole)], "edges": [[], whole]}
    found = pd.DataFrame(rows).assign(method="ugs", seed=0)
    table = against_random(masked, ioi, found, n=2, gap_options=GAP)
    assert set(table.ablation) == {"optimal"}
    assert list(random.summary(table, ioi).index) == ["optimal"]
    none = against_random(masked, ioi, found[:1], n=2, gap_options=GAP)
    assert none.empty
    assert random.summary(none, ioi).empty
    assert random.claims(none, ioi) == []


def test_a_z_score_is_given_where_random_circuits_differ(ioi):
    rows = random.summary(against(1.0, FAST, SLOW, 0.01), ioi)
    assert np.isnan(rows.z["optimal"])
    assert rows.z["mean"] == pytest.approx(-9 / np.linspace(-1, 1, 20).std())
    # the paper's z, from its rounded numbers
    assert rows["paper z"]["optimal"] == pytest.approx(-100.57, rel=0.06)


def test_random_circuits_of_any_task_are_summed_up_and_claimed_where_the_paper_has_it(
    masked, ioi, other
):
    some_edges = {"ugs": {**PACE, "noise": 1.0}}
    for task, in_paper in ((ioi, True), (other, False)):
        ways = study.ways(task)
        circuits = sweep(masked, task, ["ugs"], ways, {"lam": [0.1]}, [0], some_edges, GAP)
        assert circuits.n_edges.between(5, 40).all()
        table = against_random(masked, task, circuits, n=3, tolerance=0.5, gap_options=GAP)
        rows = random.summary(table, task)
        assert list(rows.index) == ways
        assert rows.n.tolist() == [3] * len(ways)
        assert ("paper z" in rows) == in_paper
        ratio = rows["found"] / rows["random"]
        assert rows.ratio.to_numpy() == pytest.approx(ratio.to_numpy())
        assert bool(random.claims(table, task)) == in_paper


def test_every_claim_has_a_reason_of_its_own():
    """What may be behind it if it does not hold."""
    chapters = {"circuits_": study.WHYS, "random_": random.WHYS}
    known = [claim for claim in claims.published("tiny") if claim.id.startswith(tuple(chapters))]
    assert len(known) > 60
    for claim in known:
        whys = chapters[claim.id.partition("_")[0] + "_"]
        why = claims.reason(claim.id, whys)
        assert why not in ("", whys.get("circuits_")), claim.id
    for why in [*study.WHYS.values(), *random.WHYS.values()]:
        assert not why.endswith(".")
        assert not any(letter.isdigit() for letter in why)


# ---- what is published


def records(experiment: str) -> list:
    """Published files of tasks that the paper has: (model, path)."""
    listed = []
    for path in sorted(store.published().glob(f"*/{experiment}/*.json")):
        if json.loads(path.read_text()).get("task") in study.TASKS:
            listed.append(pytest.param(path.parts[-3], path, id=f"{path.parts[-3]}-{path.stem}"))
    return listed


def with_all_methods(experiment: str = "sweeps") -> list:
    """Tables of whole fronts; those of seeds, or of one λ, carry no claim of their own."""
    whole = []
    for parameter in records(experiment):
        _, path = parameter.values
        rows = json.loads(path.read_text())["numbers"]["rows"]
        if len({(row["method"], row["ablation"]) for row in rows}) >= 5:
            whole.append(parameter)
    return whole


def table_and_task(path, masked) -> tuple[pd.DataFrame, Task]:
    record = store.read_record(path)
    task = replace(tasks.ioi(masked.model, 4), name=record["task"])
    return pd.DataFrame(record["numbers"]["rows"]), task


def assert_published(again: list, model_name: str) -> None:
    stored = {claim.id: claim for claim in claims.published(model_name)}
    for claim in again:
        assert stored[claim.id].holds == claim.holds, claim.id
        if claim.measured is None:
            assert stored[claim.id].measured is None, claim.id
        else:
            assert stored[claim.id].measured == pytest.approx(claim.measured, rel=1e-6), claim.id


@pytest.mark.parametrize("model_name, path", with_all_methods())
def test_published_claims_about_fronts_follow_from_the_published_table(model_name, path, masked):
    again = study.claims(*table_and_task(path, masked))
    assert len(again) >= 15
    assert_published(again, model_name)


@pytest.mark.parametrize("model_name, path", records("random_circuits"))
def test_published_claims_about_random_circuits_follow_from_the_published_table(
    model_name, path, masked
):
    again = random.claims(*table_and_task(path, masked))
    assert len(again) == 8
    assert_published(again, model_name)


def test_the_bundled_models_fronts_and_random_circuits_are_published():
    for listed in (with_all_methods(), records("random_circuits")):
        paths = [parameter.values[1] for parameter in listed if parameter.values[0] == "tiny"]
        known = {store.read_record(path)["task"] for path in paths}
        assert known == set(study.TASKS)


def test_labels_of_another_task_are_not_joined_on(monkeypatch):
    """A model's published gaps may be of several tasks."""
    from oa_utils.paper import components

    kinds = [("ioi", "kl", 0.09), ("ioi", "label", -0.2), ("own", "kl", 0.03), ("cf", "label", 5.0)]
    rows = [
        {"task": task, "metric": metric, "gap": gap, "se": 0.01, "component": "a0.h0"}
        for task, metric, gap in kinds
    ]
    table = pd.DataFrame(rows).assign(part="test", ablation="mean", family="position")
    monkeypatch.setattr(store, "results", lambda *_: table)
    [row] = components.published_label("other", "ioi").itertuples(index=False)
    assert (row.KL, row.label) == (0.09, -0.2)
    assert components.published_label("other", "nothing").empty
