"""Gaps of single components: equal to plain hooks, exact where the paper is exact, resumable, and
clear about bad input."""

import inspect
import math
import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import random_gpt2, random_llama

from oa_utils import components, machine, models, stats, tasks
from oa_utils.components import component_gaps, optimal_constants
from oa_utils.fills import ABLATIONS, TaskValues, layer_means
from oa_utils.metrics import distance
from oa_utils.sites import CleanPrompts, Subspace, find

FAMILIES = ["position", "shared"]
pytestmark = pytest.mark.filterwarnings("ignore:prompts of different lengths")

QUICK = {"steps": 30, "batch": 0, "look_every": 10}
EVERY = ["a1.h2", "m1", "a1", "m1.n17", "tok", "a0.h1", "m0", "a2.h3", "m2", "a2", "m2.n7"]
SOME = ["a1.h2", "m1", "a1", "m1.n17", "tok", "m2"]
HOOKS = {"z": "attn.hook_z", "mlp": "hook_mlp_out", "hidden": "mlp.hook_post"}


@pytest.fixture(scope="module")
def gpt2(tokenizer):
    """A random model with weights so large that every ablation matters."""
    hf = random_gpt2(tokenizer=tokenizer, initializer_range=0.25)
    return models.wrap(hf, tokenizer, name="strong-gpt2")


@pytest.fixture(scope="module")
def llama(tokenizer):
    hf = random_llama(tokenizer=tokenizer, initializer_range=0.25)
    return models.wrap(hf, tokenizer, name="strong-llama")


@pytest.fixture(scope="module")
def task(gpt2):
    return tasks.ioi(gpt2, 16, seed=1)


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    for name in ("FRESH", "OA_BUDGET"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def empty_store(tmp_path, monkeypatch):
    """A function that goes on with an empty store."""
    count = iter(range(99))
    return lambda: monkeypatch.setenv("OA_STORE", str(tmp_path / f"store{next(count)}"))


def component_values(*asked, **settings):
    """The gap of each prompt, by (component, ablation, family)."""
    table = component_gaps(*asked, **settings, each=True)
    return {(row.component, row.ablation, row.family): row.each for row in table.itertuples()}


def means_of(model, task, site):
    prompts = CleanPrompts(model, task.train.tokens, task.train.last)
    return layer_means(prompts, [site])[site.name]


def by_hooks(model, task, name, rows):
    """KL of every prompt with plain hooks on the bridge; rows [P, dim] replace the value from
    position 1 on."""
    site = find(name, model)
    at = torch.arange(task.tokens.shape[1]).clamp(max=len(rows) - 1)

    def hook(value, hook):
        flat = value.flatten(2).clone()
        flat[:, 1:, site.part] = rows[at][1:].to(flat)
        return flat.view_as(value)

    where = "hook_embed" if name == "tok" else f"blocks.{site.layer}.{HOOKS[site.value]}"
    each = torch.arange(len(task))
    with torch.no_grad():
        full = model.bridge(task.tokens)
        ablated = model.bridge.run_with_hooks(task.tokens, fwd_hooks=[(where, hook)])
    full, ablated = (logits[each, task.last].log_softmax(-1) for logits in (full, ablated))
    return stats.kl(full, ablated)


# ---- the same numbers as the plain way


@pytest.mark.parametrize("name", EVERY)
def test_zero_and_mean_are_what_plain_hooks_give(model, task, name):
    site = find(name, model)
    mean = means_of(model, task, site)
    zero = TaskValues(model, task).constants(ABLATIONS["zero"], "", [site])[name]
    values = component_values(model, task, [name], ["zero", "mean"], families=FAMILIES)
    constants = {("zero", ""): zero}
    constants |= {("mean", family): mean.rows(family) for family in FAMILIES}
    for (ablation, family), rows in constants.items():
        want = by_hooks(model, task.test, name, rows)
        assert want.mean() > 1e-4, "the ablation must matter"
        assert torch.allclose(values[name, ablation, family], want, atol=1e-5, rtol=1e-4)


def test_all_components_at_once_are_each_by_itself_in_passes_of_any_size(
    model, task, monkeypatch, empty_store
):
    ablations = ["mean", "resample", "counterfactual", "cf_mean", "noise"]
    at_once = component_values(model, task, SOME, ablations, draws=2)
    monkeypatch.setattr(machine, "PASS_TOKENS", 100)
    monkeypatch.setattr(components, "GROUP", 1)
    empty_store()
    by_itself = component_values(model, task, SOME, ablations, draws=2)
    families = {name: "position" if "mean" in name else "" for name in ablations}
    assert list(at_once) == [(name, a, families[a]) for name in SOME for a in ablations]
    for key, values in by_itself.items():
        assert torch.allclose(values, at_once[key], atol=2e-5, rtol=1e-3), key


def test_a_head_of_a_grouped_query_model_is_a_query_head(llama, task):
    heads = [f"a1.h{head}" for head in range(4)]
    assert component_gaps(llama, task, heads, ["mean"]).gap.nunique() == 4


def test_activations_are_those_of_the_other_prompts(gpt2, task):
    part = task.test
    values = component_values(gpt2, task, ["m1", "a1.h2"], ["counterfactual", "resample"])
    prompts_of = {
        "counterfactual": [part.counterfactual],
        "resample": [part.resampled(part.partners(seed)) for seed in range(4)],
    }
    full = part.log_probs(gpt2)
    for name in ("m1", "a1.h2"):
        site = find(name, gpt2)
        for ablation, others in prompts_of.items():
            each = []
            for tokens in others:
                kept, record = models.recording(site.value)
                gpt2(tokens, part.last, record)
                other = kept[site.value][site.layer].flatten(2)

                def edit(where, layer, value, other=other, site=site):
                    if (where, layer) != (site.value, site.layer):
                        return value
                    flat = value.flatten(2).clone()
                    flat[:, 1:, site.part] = other[:, 1:, site.part]
                    return flat.view_as(value)

                each.append(stats.kl(full, gpt2(part.tokens, part.last, edit)))
            want = torch.stack(each).mean(0)
            assert torch.allclose(values[name, ablation, ""], want, atol=1e-5, rtol=1e-3)


def test_what_stands_behind_the_last_token_and_who_else_is_in_the_batch_change_nothing(model, task):
    ablations = ["zero", "mean", "counterfactual", "cf_mean"]
    before = component_values(model, task, SOME, ablations)
    behind = torch.arange(task.tokens.shape[1]) > task.last[:, None]
    other = replace(task, tokens=torch.where(behind, 7, task.tokens))
    more = torch.full((len(task), 5), 9)
    wider = replace(
        other,
        tokens=torch.cat([other.tokens, more], 1),
        counterfactual=torch.cat([task.counterfactual, more], 1),
    )
    for changed in (other, wider):
        assert changed.fingerprint != task.fingerprint
        for key, values in component_values(model, changed, SOME, ablations).items():
            assert torch.allclose(values, before[key], atol=2e-5, rtol=1e-3), key
    train = (task.part == 0).nonzero().flatten()
    one_test = (task.part == 2).nonzero().flatten()[:1]
    fewer = task[torch.cat([train, one_test])]
    for key, values in component_values(model, fewer, SOME, ablations).items():
        assert torch.allclose(values, before[key][:1], atol=2e-5, rtol=1e-3), key


# ---- what must be zero, and what must not be negative


def test_a_counterfactual_or_a_partner_that_is_the_prompt_itself_costs_nothing(
    model, task, monkeypatch
):
    same = replace(task, counterfactual=task.tokens)
    monkeypatch.setattr(tasks.Task, "partners", lambda self, seed=0: torch.arange(len(self)))
    values = component_values(model, same, EVERY, ["counterfactual", "resample"])
    assert len(values) == 2 * len(EVERY)
    assert max(each.abs().max() for each in values.values()) < 1e-5


def one_of_each_part(task):
    return task[[int((task.part == part).nonzero()[0]) for part in (0, 2)]]


def test_the_mean_of_one_prompt_costs_that_prompt_nothing(model, task):
    values = component_values(model, one_of_each_part(task), EVERY, ["mean"], part="train")
    assert len(values) == len(EVERY)
    for each in values.values():
        assert len(each) == 1
        assert each.abs().max() < 1e-5


def test_gaps_are_not_negative_and_the_direction_is_from_the_full_model(model, task):
    values = component_values(model, task, EVERY, ["zero", "mean", "resample", "noise"])
    for each in values.values():
        assert each.min() > -1e-6
        assert each.mean() > 1e-5
    full = torch.tensor([[1.0, 0.0]]).log()
    ablated = torch.tensor([[[0.5, 0.5]]]).log()
    none = torch.full((1, 1), -1)
    assert distance("kl", full, ablated, none, none).item() == pytest.approx(math.log(2))


def test_label_and_logit_difference_are_what_the_right_answer_loses(gpt2, task):
    part = task.test
    rows = means_of(gpt2, task, find("m1", gpt2)).rows("position")
    at = torch.arange(part.tokens.shape[1]).clamp(max=len(rows) - 1)

    def edit(site, layer, value):
        if (site, layer) != ("mlp", 1):
            return value
        return torch.cat([value[:, :1], rows[at][1:].expand_as(value[:, 1:])], 1)

    key = ("m1", "mean", "position")
    full = part.log_probs(gpt2)
    with torch.no_grad():
        ablated = gpt2(part.tokens, part.last, edit)
    lost = full - ablated
    right, wrong = (lost.gather(1, ids).squeeze(1) for ids in (part.right, part.wrong))
    for metric, want in (("label", right), ("logit_diff", right - wrong)):
        values = component_values(gpt2, task, ["m1"], ["mean"], metric=metric)[key]
        assert torch.allclose(values, want, atol=1e-4)
    none = torch.full_like(task.right, -1)
    many = replace(task, right=torch.cat([task.right, task.wrong, none], 1))
    values = component_values(gpt2, many, ["m1"], ["mean"], metric="label")[key]
    both = torch.cat([part.right, part.wrong], 1)
    masses = [logp.exp().gather(1, both).sum(1).log() for logp in (full, ablated)]
    assert torch.allclose(values, masses[0] - masses[1], atol=1e-4)


# ---- optimal ablation


def test_on_the_train_part_no_constant_of_the_family_beats_the_optimal_one(model, task):
    plane = Subspace("m1", torch.randn(2, 32, generator=machine.generator(0)))
    some = ["a1.h2", "a2.h3", "m1", "m2", "a1", "m1.n17", "tok", plane]
    values = component_values(
        model,
        task,
        some,
        ["zero", "mean", "cf_mean", "optimal", "resample"],
        FAMILIES,
        part="train",
        starts=["mean", "zero", "cf_mean"],
        draws=2,
        **{**QUICK, "steps": 20},
    )
    gap = {key: each.mean().item() for key, each in values.items()}
    names = list(dict.fromkeys(name for name, _, _ in gap))
    assert len(names) == len(some)
    for name in names:
        for family in FAMILIES:
            means = [gap[name, way, family] for way in ("mean", "cf_mean")]
            assert gap[name, "optimal", family] <= min(gap[name, "zero", ""], *means) + 1e-6
        assert gap[name, "optimal", "position"] <= gap[name, "optimal", "shared"] + 1e-6
        worse = values[name, "resample", ""] - values[name, "optimal", "position"]
        assert worse.mean() > -2 * stats.mean_se(worse)[1]
    strong = [name for name in names if gap[name, "mean", "position"] > 0.01]
    ratios = [gap[name, "optimal", "position"] / gap[name, "mean", "position"] for name in strong]
    assert len(strong) > 4
    assert sum(ratio < 0.95 for ratio in ratios) > len(strong) / 2, "training gains something"


def test_constants_and_curves_can_be_had_and_are_those_that_were_measured(gpt2, task):
    names = ["m1", "a1.h2"]
    trained = optimal_constants(gpt2, task, names, "position", **QUICK)
    rows = int(task.train.last.min()) + 1
    shapes = {name: tuple(constant.shape) for name, (constant, _) in trained.items()}
    assert shapes == {"m1": (rows, 32), "a1.h2": (rows, 8)}
    values = component_values(gpt2, task, names, ["optimal"], part="train", **QUICK)
    for name, (constant, history) in trained.items():
        steps, gaps = zip(*history["curve"], strict=True)
        assert steps[:2] == (0, 10)
        assert history["start"] in ("mean", "zero", "shared")
        measured = values[name, "optimal", "position"].mean().item()
        assert measured == pytest.approx(min(gaps), abs=1e-6)
        hooked = by_hooks(gpt2, task.train, name, constant).mean().item()
        assert hooked == pytest.approx(min(gaps), abs=1e-5)
    shared = optimal_constants(gpt2, task, names, "shared", **QUICK)
    assert shared["m1"][0].shape == (1, 32)


def test_constants_of_positions_start_from_the_trained_shared_ones(gpt2, task, monkeypatch):
    """They begin where those ended, or from better; and the table takes what was trained before."""
    quick = {**QUICK, "steps": 40, "lr": 0.3}
    names = ["m1", "a1.h2", "m2", "a2.h3"]
    shared = optimal_constants(gpt2, task, names, "shared", **quick)
    trained = optimal_constants(gpt2, task, names, "position", **quick)
    assert "shared" in {how["start"] for _, how in trained.values()}
    for name, (_, how) in trained.items():
        assert how["start"] in ("mean", "zero", "shared")
        assert how["curve"][0][1] <= min(gap for _, gap in shared[name][1]["curve"]) + 1e-6
    monkeypatch.setattr(components.Experiment, "train", lambda *given: pytest.fail("trained again"))
    component_gaps(gpt2, task, names, ["optimal"], FAMILIES, **quick)


def test_the_label_metric_trains_on_labels_and_the_logit_difference_on_kl(gpt2, task):
    constants = {}
    for metric in ("kl", "label", "logit_diff"):
        constants[metric] = optimal_constants(gpt2, task, ["m1"], metric=metric, **QUICK)["m1"][0]
    assert torch.equal(constants["kl"], constants["logit_diff"])
    assert not torch.allclose(constants["kl"], constants["label"])
    ablations = ["zero", "mean", "optimal"]
    table = component_gaps(gpt2, task, ["m1"], ablations, metric="label", part="train", **QUICK)
    gaps = table.set_index("ablation").gap
    assert gaps["optimal"] <= min(gaps["mean"], gaps["zero"]) + 1e-6


# ---- tables, storing, going on


def test_the_table_has_the_agreed_columns_and_one_row_for_each_ablation(gpt2, task, empty_store):
    ablations = ["zero", "mean", "resample", "cf_mean", "counterfactual", "optimal"]
    table = component_gaps(gpt2, task, ["a2.h1"], ablations, **QUICK)
    columns = ["component", "layer", "kind", "ablation", "family", "gap", "se", "n"]
    assert list(table) == columns
    assert table.ablation.tolist() == ablations
    assert (table.n == len(task.test)).all()
    assert table.family.tolist() == ["", "position", "", "position", "", "position"]
    assert set(zip(table.component, table.layer, table.kind, strict=True)) == {("a2.h1", 2, "head")}
    empty_store()
    values = component_values(gpt2, task, "a2.h1", "mean")["a2.h1", "mean", "position"]
    row = table[table.ablation == "mean"].iloc[0]
    assert (row.gap, row.se) == pytest.approx(stats.mean_se(values), rel=1e-4)
    both = component_gaps(gpt2, task, ["a2.h1"], ablations, FAMILIES, **QUICK)
    assert len(both) == 9


def test_the_signature_shows_every_setting():
    for function in (component_gaps, optimal_constants):
        parameters = inspect.signature(function).parameters
        assert {"model", "task", "components", "steps", "lr", "look_every", "seed"} <= {*parameters}
        assert "settings" not in parameters
        assert not any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters.values())
        assert parameters["steps"].default == 300


def test_what_was_killed_goes_on_with_the_next_layer_and_ends_with_the_same_numbers(
    gpt2, task, monkeypatch, empty_store
):
    asked = (gpt2, task, ["m0", "m1", "m2", "a0.h1"], ["mean", "optimal"])
    quick = {**QUICK, "steps": 10}
    want = component_values(*asked, **quick)
    empty_store()
    train = components.Experiment.train
    started = []

    def killed_at_the_fourth(self, group, family, snapshots):
        started.append((group[0].layer, family))
        if len(started) == 4:
            raise KeyboardInterrupt
        return train(self, group, family, snapshots)

    monkeypatch.setattr(components.Experiment, "train", killed_at_the_fourth)
    with pytest.raises(KeyboardInterrupt):
        component_values(*asked, **quick)
    resumed = component_values(*asked, **quick)
    first = [(0, "position"), (0, "shared"), (1, "position"), (1, "shared")]
    assert started == [*first, *first[2:], (2, "position"), (2, "shared")]
    assert all(torch.equal(resumed[key], want[key]) for key in want)
    monkeypatch.setattr(components.Experiment, "losses", lambda *given: pytest.fail("again"))
    again = component_values(*asked, **quick)
    assert all(torch.equal(again[key], want[key]) for key in want)


def test_other_settings_make_another_run(gpt2, task, monkeypatch):
    component_gaps(gpt2, task, ["m1"], ["mean", "resample"])
    monkeypatch.setattr(components.Experiment, "losses", lambda *given: pytest.fail("again"))
    component_gaps(gpt2, task, ["m1"], ["mean", "resample"])
    component_gaps(gpt2, task, ["m1"], ["resample"])
    with pytest.raises(pytest.fail.Exception):
        component_gaps(gpt2, task, ["m1"], ["resample"], draws=2)


def test_the_same_seed_gives_the_same_numbers_and_another_one_others(gpt2, task, empty_store):
    def values(seed):
        empty_store()
        quick = {**QUICK, "batch": 4, "steps": 10, "seed": seed}
        return component_values(gpt2, task, ["m1"], ["resample", "noise", "optimal"], **quick)

    first = values(0)
    again = values(0)
    other = values(1)
    assert len(first) == 3
    for key in first:
        assert torch.equal(first[key], again[key])
        assert not torch.equal(first[key], other[key])


def test_the_cost_is_announced_once_before_anything_long(gpt2, task, monkeypatch):
    announced = []
    monkeypatch.setattr(machine, "announce", announced.append)
    component_gaps(gpt2, task, ["m1", "m2"], ["mean", "optimal"], **QUICK)
    [line] = announced
    assert "2 components: about" in line
    component_gaps(gpt2, task, ["m1", "m2"], ["mean", "optimal"], **QUICK)
    assert len(announced) == 1, "what is stored costs nothing"


def test_the_cost_counts_every_pass_that_is_not_stored(gpt2, task, monkeypatch):
    """With a second for a forward and ten for a step the cost is counted by hand."""
    told = []
    monkeypatch.setattr(components.Experiment, "_seconds", lambda self, group, trains: (1.0, 10.0))
    monkeypatch.setattr(machine, "duration", lambda seconds: told.append(seconds) or "")
    n, n_train = len(task.test), len(task.train)
    settings = {"steps": 20, "look_every": 10, "batch": 4, "draws": 3}
    training = n_train * (2 + 2) + 20 * 4 * 10
    asked = (gpt2, task, ["m1", "m2"])
    component_gaps(*asked, ["resample", "optimal"], "shared", **settings)
    assert told.pop() == 2 * (3 * n + n + training)
    component_gaps(*asked, ["resample", "optimal"], FAMILIES, **settings)
    assert told.pop() == 2 * (n + training + n_train), "constants of positions look at one more"
    component_gaps(*asked, ["optimal"], FAMILIES, part="train", **settings)
    assert told.pop() == 2 * 2 * n_train, "the constants are stored"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gives_the_gaps_of_single_precision(task, tokenizer, dtype):
    def rounded(kept_as):
        hf = random_gpt2(tokenizer=tokenizer, initializer_range=0.25)
        return models.wrap(hf.to(dtype).to(kept_as), tokenizer, name=f"kept-as-{kept_as}")

    half = rounded(dtype)
    full = rounded(torch.float32)
    assert half.dtype == dtype
    names = ["a1", "m1", "m2", "a0.h1"]
    ablations = ["zero", "mean", "resample", "optimal"]
    want = component_gaps(full, task, names, ablations, **QUICK)
    table = component_gaps(half, task, names, ablations, **QUICK, each=True)
    assert table.gap.tolist() == pytest.approx(want.gap.tolist(), rel=0.02)
    assert min(each.min() for each in table.each) > -1e-4
    constants = optimal_constants(half, task, names, **QUICK)
    assert all(constant.dtype == torch.float32 for constant, _ in constants.values())


# ---- bad input


@pytest.mark.parametrize(
    "change, message",
    [
        ({"components": ["a9.h0"]}, "no component 'a9.h0'.*a0.h0"),
        ({"components": []}, "no components"),
        ({"components": ["m1", "m1"]}, "twice"),
        ({"ablations": ["meen"]}, "no ablation 'meen'.*zero, mean"),
        ({"ablations": []}, "no ablation"),
        ({"families": ["token"]}, "family 'token'.*position, shared"),
        ({"families": []}, "no family.*position, shared"),
        ({"metric": "accuracy"}, "metric 'accuracy'.*kl, label"),
        ({"part": "all"}, "part 'all'.*train, validation, test"),
        ({"starts": ["nowhere"]}, "start 'nowhere'.*mean, zero, cf_mean"),
        ({"starts": []}, "starts must be at least 1"),
        ({"draws": 0}, "draws must be at least 1"),
        ({"look_every": 0}, "look_every must be at least 1"),
        ({"steps": -1}, "steps must be at least 0"),
        ({"lr": -0.1}, "lr must be at least 0"),
        ({"batch": -1}, "batch must be at least 0"),
        ({"noise": -1.0}, "noise must be at least 0"),
        ({"ablations": ["counterfactual"], "bare": True}, "no counterfactual"),
        ({"ablations": ["cf_mean"], "bare": True}, "no counterfactual"),
        ({"ablations": ["optimal"], "starts": ["cf_mean"], "bare": True}, "no counterfactual"),
        ({"metric": "logit_diff", "unanswered": True}, "logit_diff.*answers"),
        ({"rows": slice(0, 0)}, "no (test )?prompts"),
        ({"rows": [0, 1, 2], "all_train": True}, "no test prompts"),
    ],
)
def test_bad_input_is_refused_before_any_compute(gpt2, task, monkeypatch, change, message):
    monkeypatch.setattr(models.Model, "run", lambda *given, **more: pytest.fail("computed"))
    change = {"components": ["m1"], "ablations": ["mean"], **change}
    asked = task[change.pop("rows")] if "rows" in change else task
    if change.pop("all_train", False):
        asked = replace(asked, part=torch.zeros_like(asked.part))
    if change.pop("bare", False):
        asked = replace(asked, counterfactual=None)
    if change.pop("unanswered", False):
        asked = replace(asked, wrong=torch.full_like(asked.wrong, -1))
    with pytest.raises(ValueError, match=message):
        component_gaps(gpt2, asked, **change)


def test_a_misspelt_setting_is_named(gpt2, task):
    with pytest.raises(TypeError, match="stepps"):
        component_gaps(gpt2, task, ["m1"], ["mean"], stepps=3)


def test_one_prompt_cannot_be_resampled(gpt2, task):
    with pytest.raises(ValueError, match="at least 2"):
        component_gaps(gpt2, one_of_each_part(task), ["m1"], ["resample"])


def test_seeds_share_no_draw(gpt2, task):
    def values(**settings):
        return component_values(gpt2, task, ["m1"], ["resample", "noise"], **settings)

    alone = [values(draws=1, seed=seed) for seed in (2, 3)]
    second = values(draws=2, seed=1)
    for key, both in second.items():
        torch.testing.assert_close(both, torch.stack([one[key] for one in alone]).mean(0))


def test_the_part_that_is_measured_is_the_one_that_is_resampled(gpt2, task, monkeypatch):
    """A single prompt is no matter in another part, and in this one it is found before any
    training."""
    part = torch.zeros_like(task.part)
    one_test = replace(task, part=part.index_fill(0, torch.tensor([1]), 2))
    assert component_gaps(gpt2, one_test, ["m1"], ["resample"], part="train").gap.gt(0).all()
    part[:4] = torch.tensor([1, 2, 2, 2])
    one_validation = replace(task, part=part)
    monkeypatch.setattr(components, "fit", lambda *given: pytest.fail("trained"))
    with pytest.raises(ValueError, match="at least 2"):
        component_gaps(gpt2, one_validation, ["m1"], ["optimal", "resample"], part="validation")


def test_a_gap_that_is_no_number_is_refused(gpt2, task, monkeypatch):
    monkeypatch.setattr(components, "distance", lambda *given: given[2][..., 0] * torch.nan)
    with pytest.raises(RuntimeError, match="gap of m1 under mean is not finite"):
        component_gaps(gpt2, task, ["m1"], ["mean"])


def test_constants_know_their_family(gpt2, task):
    for family in ("shared", "from_end"):
        [(_, how)] = optimal_constants(gpt2, task, ["m1"], family, **QUICK).values()
        assert how["family"] == family


# ---- the paper's own numbers


@pytest.fixture(scope="module")
def real():
    if not os.environ.get("OA_GPT2"):
        pytest.skip("OA_GPT2 names no folder with GPT-2's weights")
    return models.load_model(os.environ["OA_GPT2"])


@pytest.mark.gpt2
def test_gpt2_on_ioi_gives_the_papers_means(real):
    task = tasks.ioi(real, 512)
    table = component_gaps(real, task, None, ["zero", "mean", "counterfactual"])
    gap = table.pivot_table(index="component", columns="ablation", values="gap")
    assert gap["zero"].mean() == pytest.approx(0.0584, rel=0.1)
    assert gap["mean"].mean() == pytest.approx(0.0405, rel=0.1)
    for name, ablation, value in (
        ("m0", "mean", 4.12),
        ("a10.h7", "mean", 0.235),
        ("a11.h10", "mean", 0.238),
        ("m0", "counterfactual", 3.23),
        ("a10.h7", "counterfactual", 0.18),
    ):
        assert gap.loc[name, ablation] == pytest.approx(value, rel=0.1)
    rank = stats.spearman(np.array(gap["mean"]), np.array(gap["counterfactual"]))
    assert rank == pytest.approx(0.825, abs=0.05)


@pytest.mark.gpt2
def test_zero_of_gpt2s_heads_keeps_the_value_bias_and_dropping_it_gives_other_numbers(real):
    task = tasks.ioi(real, 64)
    for name in ("a10.h7", "a0.h1"):
        site = find(name, real)
        folded = component_values(real, task, [name], ["zero"])[name, "zero", ""]
        bias = real.layers[site.layer].b_V.flatten()[None, site.part]
        assert torch.allclose(folded, by_hooks(real, task.test, name, bias), atol=1e-4)
        bare = by_hooks(real, task.test, name, torch.zeros(1, 64))
        assert not torch.allclose(folded, bare, atol=1e-4)
