"""Gaps of single components: equal to plain hooks, exact where the paper is exact, resumable, and clear about bad input."""

import math
import os
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from oa_utils import ablation as ab
from oa_utils import components as co
from oa_utils import models, runs, stats, tasks, tiny
from oa_utils.components import ComponentSettings, component_gaps, component_values

QUICK = ComponentSettings(steps=30, batch=0, check=10)
EVERY = ["a1.h2", "m1", "a1", "m1.n17", "tok", "a0.h1", "m0", "a2.h3", "m2", "a2", "m2.n19"]


@cache
def random_model(family: str) -> models.Model:
    tokenizer = tiny.make_tokenizer()
    size, ids = len(tokenizer), {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.bos_token_id}
    torch.manual_seed(0)
    if family == "gpt2":
        shape = {"n_layer": 3, "n_head": 4, "n_embd": 32, "n_positions": 64}
        hf = GPT2LMHeadModel(GPT2Config(**shape, **ids, vocab_size=size, initializer_range=0.25))
    else:
        shape = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
        config = LlamaConfig(**shape, **ids, intermediate_size=64, vocab_size=size, initializer_range=0.25)
        hf = LlamaForCausalLM(config)
    for name, weight in hf.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(weight, std=0.3)
    return models.wrap(hf, tokenizer, family, device="cpu")


@pytest.fixture(scope="module")
def gpt2():
    return random_model("gpt2")


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def model(request, gpt2):
    return gpt2 if request.param == "gpt2" else random_model("llama")


@pytest.fixture(scope="module")
def task(gpt2):
    return tasks.ioi(gpt2, 24, seed=1)


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    for name in ("FRESH", "OA_BUDGET"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OA_STORE", str(tmp_path))
    return tmp_path


def by_hooks(model, task, name, rows):
    """KL of every prompt with plain hooks on the bridge; rows [P, dim] replace the value from position 1 on."""
    site = ab.parse(name, model)
    point = {"z": "attn.hook_z", "mlp": "hook_mlp_out", "hidden": "mlp.hook_post", "tok": ""}[site.site]
    at = torch.arange(task.tokens.shape[1]).clamp(max=len(rows) - 1)

    def hook(value, hook):
        flat = value.flatten(2).clone()
        flat[:, 1:, site.part] = rows[at][1:].to(flat)
        return flat.view_as(value)

    where = f"blocks.{site.layer}.{point}" if point else "hook_embed"
    with torch.no_grad():
        each = torch.arange(len(task))
        full = model.bridge(task.tokens)[each, task.last].log_softmax(-1)
        logp = model.bridge.run_with_hooks(task.tokens, fwd_hooks=[(where, hook)])[each, task.last].log_softmax(-1)
    return stats.kl(full, logp)


# ---- the same numbers as the plain way


@pytest.mark.parametrize("name", EVERY)
def test_zero_and_mean_are_what_plain_hooks_give(model, task, name):
    site = ab.parse(name, model)
    mean = ab.means(model, task.train.tokens, task.train.last, [site])[name]
    got = component_values(model, task, [name], ["zero", "mean"], families=ab.FAMILIES, store=False)
    want = {("zero", ""): ab.zero(site, model)} | {("mean", f): mean.rows(f) for f in ab.FAMILIES}
    for (ablation, family), rows in want.items():
        values = by_hooks(model, task.test, name, rows)
        assert values.mean() > 1e-4, "the ablation must matter"
        assert torch.allclose(got[name, ablation, family], values, atol=1e-5, rtol=1e-4)


def test_all_components_at_once_split_anyhow_are_each_on_its_own(model, task, monkeypatch):
    ablations = ["mean", "resample", "counterfactual", "cf_mean", "noise"]
    at_once = component_values(model, task, EVERY, ablations, store=False)
    monkeypatch.setattr(runs, "PASS_TOKENS", 50)
    monkeypatch.setattr(co, "GROUP", 2)
    for name in EVERY:
        for key, values in component_values(model, task, [name], ablations, store=False).items():
            assert torch.allclose(values, at_once[key], atol=2e-5, rtol=1e-3), key
    assert list(at_once) == [(n, a, "position" if "mean" in a else "") for n in EVERY for a in ablations]


def test_a_head_of_a_grouped_query_model_is_a_query_head(task):
    model = random_model("llama")
    gaps = component_gaps(model, task, [f"a1.h{h}" for h in range(4)], ["mean"], store=False).gap
    assert gaps.nunique() == 4


def test_activations_are_those_of_the_other_prompts(gpt2, task):
    part = task.test
    got = component_values(gpt2, task, ["m1", "a1.h2"], ["counterfactual", "resample"], store=False)
    runs_of = {"counterfactual": [part.counterfactual]}
    runs_of["resample"] = [part.resampled(part.partners(seed)) for seed in range(4)]
    full = part.log_probs(gpt2)
    for name in ("m1", "a1.h2"):
        site = ab.parse(name, gpt2)
        for ablation, others in runs_of.items():
            each = []
            for tokens in others:
                seen = {}
                gpt2(tokens, part.last, lambda s, i, v, seen=seen: seen.setdefault((s, i), v))

                def edit(s, i, value, seen=seen, site=site):
                    if (s, i) != (site.site, site.layer):
                        return value
                    flat = value.flatten(2).clone()
                    flat[:, 1:, site.part] = seen[s, i].flatten(2)[:, 1:, site.part]
                    return flat.view_as(value)

                each.append(stats.kl(full, gpt2(part.tokens, part.last, edit)))
            assert torch.allclose(got[name, ablation, ""], torch.stack(each).mean(0), atol=1e-5, rtol=1e-3)


def test_what_stands_behind_the_last_token_and_who_else_is_in_the_batch_change_nothing(model, task):
    ablations = ["zero", "mean", "counterfactual", "cf_mean"]
    before = component_values(model, task, EVERY, ablations, store=False)
    behind = torch.arange(task.tokens.shape[1]) > task.last[:, None]
    other = replace(task, tokens=torch.where(behind, 7, task.tokens))
    wider = replace(other, tokens=torch.cat([other.tokens, torch.full((len(task), 5), 9)], 1), counterfactual=torch.cat(
        [task.counterfactual, torch.full((len(task), 5), 9)], 1))  # fmt: skip
    for changed in (other, wider):
        for key, values in component_values(model, changed, EVERY, ablations, store=False).items():
            assert torch.allclose(values, before[key], atol=2e-5, rtol=1e-3), key
    rows = torch.cat([task.in_train.nonzero().flatten(), (~task.in_train).nonzero().flatten()[:1]])
    for key, values in component_values(model, task[rows], EVERY, ablations, store=False).items():
        assert torch.allclose(values, before[key][:1], atol=2e-5, rtol=1e-3), key


# ---- what must be zero, and what must not be negative


def test_a_counterfactual_or_a_partner_that_is_the_prompt_itself_costs_nothing(model, task, monkeypatch):
    same = replace(task, counterfactual=task.tokens)
    monkeypatch.setattr(tasks.Task, "partners", lambda self, seed=0: torch.arange(len(self)))
    for values in component_values(model, same, EVERY, ["counterfactual", "resample"], store=False).values():
        assert values.abs().max() < 1e-5


def test_the_mean_of_one_prompt_costs_that_prompt_nothing(model, task):
    one = task[[int(task.in_train.nonzero()[0]), int((~task.in_train).nonzero()[0])]]
    for values in component_values(model, one, EVERY, ["mean"], part="train", store=False).values():
        assert len(values) == 1 and values.abs().max() < 1e-5


def test_gaps_are_not_negative_and_the_direction_is_from_the_full_model(model, task):
    for values in component_values(model, task, EVERY, ["zero", "mean", "resample", "noise"], store=False).values():
        assert values.min() > -1e-6 and values.mean() > 1e-5
    full, ablated = torch.tensor([[1.0, 0.0]]).log(), torch.tensor([[[0.5, 0.5]]]).log()
    assert co.score("kl", full, ablated, None, None).item() == pytest.approx(math.log(2))


def test_label_and_logit_difference_are_what_the_right_answer_loses(gpt2, task):
    part, name = task.test, "m1"
    rows = ab.means(gpt2, task.train.tokens, task.train.last, [ab.parse(name, gpt2)])[name].rows("position")
    at = torch.arange(part.tokens.shape[1]).clamp(max=len(rows) - 1)
    edit = lambda s, i, v: torch.cat([v[:, :1], rows[at][1:].expand_as(v[:, 1:])], 1) if (s, i) == ("mlp", 1) else v  # noqa: E731
    with torch.no_grad():
        lost = part.log_probs(gpt2) - gpt2(part.tokens, part.last, edit)
    right, wrong = (lost.gather(1, ids).squeeze(1) for ids in (part.right, part.wrong))
    for metric, want in (("label", right), ("logit_diff", right - wrong)):
        got = component_values(gpt2, task, [name], ["mean"], metric=metric, store=False)[name, "mean", "position"]
        assert torch.allclose(got, want, atol=1e-4)
    many = replace(task, right=torch.cat([task.right, task.wrong, torch.full_like(task.right, -1)], 1))
    got = component_values(gpt2, many, [name], ["mean"], metric="label", store=False)[name, "mean", "position"]
    p = part.log_probs(gpt2).exp()
    q = (part.log_probs(gpt2) - lost).exp()
    both = torch.cat([part.right, part.wrong], 1)
    assert torch.allclose(got, p.gather(1, both).sum(1).log() - q.gather(1, both).sum(1).log(), atol=1e-4)


# ---- optimal ablation


def test_on_the_train_part_no_constant_of_the_family_beats_the_optimal_one(model, task):
    some = ["a0.h1", "a1.h2", "a2.h3", "m0", "m1", "m2", "a1", "m1.n17", "tok", ab.Subspace("m1", torch.randn(2, 32))]
    ablations = ["zero", "mean", "cf_mean", "optimal", "resample"]
    settings = replace(QUICK, starts=("mean", "zero", "cf_mean"))
    got = component_values(model, task, some, ablations, ab.FAMILIES, part="train", settings=settings, store=False)
    gap = {key: values.mean().item() for key, values in got.items()}
    names = list(dict.fromkeys(name for name, _, _ in gap))
    for name in names:
        for family in ab.FAMILIES:
            best = gap[name, "optimal", family]
            rivals = [gap[name, "zero", ""], gap[name, "mean", family], gap[name, "cf_mean", family]]
            assert best <= min(rivals) + 1e-6
        assert gap[name, "optimal", "position"] <= gap[name, "optimal", "shared"] + 1e-6
        values = got[name, "resample", ""] - got[name, "optimal", "position"]
        assert values.mean() > -2 * stats.mean_se(values)[1]
    strong = [name for name in names if gap[name, "mean", "position"] > 0.01]
    better = [name for name in strong if gap[name, "optimal", "position"] < 0.95 * gap[name, "mean", "position"]]
    assert len(strong) > 4 and len(better) > len(strong) / 2, "training gains something"


def test_constants_and_curves_can_be_had_and_are_those_that_were_measured(gpt2, task):
    names = ["m1", "a1.h2"]
    constants, found = co.train_constants(gpt2, task, names, "position", settings=QUICK)
    P = int(task.train.last.min()) + 1
    assert {name: tuple(x.shape) for name, x in constants.items()} == {"m1": (P, 32), "a1.h2": (P, 8)}
    values = component_values(gpt2, task, names, ["optimal"], part="train", settings=QUICK)
    for name in names:
        curve = found[name]["curve"]
        assert [step for step, _ in curve][:2] == [0, 10] and found[name]["start"] in ("mean", "zero")
        least = min(gap for _, gap in curve)
        assert values[name, "optimal", "position"].mean().item() == pytest.approx(least, abs=1e-6)
        assert torch.allclose(by_hooks(gpt2, task.train, name, constants[name]).mean(), torch.tensor(least), atol=1e-5)
    shared = co.optimal_constants(gpt2, task, names, "shared", settings=QUICK)
    assert shared["m1"].shape == (1, 32)


def test_the_label_metric_trains_on_labels_and_the_logit_difference_on_kl(gpt2, task):
    part = {"part": "train", "settings": QUICK, "store": False}
    kl, label = (
        co.optimal_constants(gpt2, task, ["m1"], metric=m, settings=QUICK, store=False)["m1"] for m in ("kl", "label")
    )
    diff = co.optimal_constants(gpt2, task, ["m1"], metric="logit_diff", settings=QUICK, store=False)["m1"]
    assert torch.equal(kl, diff) and not torch.allclose(kl, label)
    gaps = component_gaps(gpt2, task, ["m1"], ["zero", "mean", "optimal"], metric="label", **part).set_index("ablation").gap
    assert gaps["optimal"] <= min(gaps["mean"], gaps["zero"]) + 1e-6


def toy(noise=0.0):
    """Squared loss of a model that is linear in its component, with weights drawn apart from the component's values."""
    rng = torch.Generator().manual_seed(0)
    values = torch.randn(400, 3, generator=rng) + torch.tensor([1.0, -2.0, 0.5])
    matrices = torch.randn(400, 5, 3, generator=rng)

    def passes(constants, which, rows):
        rows = torch.arange(400) if rows is None else rows
        for place, i in enumerate(which):
            moved = constants[i][0] - values[rows]
            out = torch.einsum("nij,nj->ni", matrices[rows], moved) if i == 0 else moved
            yield slice(place, place + 1), rows, out.square().sum(-1)[None]

    return values, passes


def test_for_a_linear_model_with_squared_loss_the_mean_is_optimal():
    values, passes = toy()
    start = [torch.zeros(1, 3), torch.full((1, 3), 4.0)]
    best, curves, _ = co.fit([start], [1.0, 1.0], passes, 400, ComponentSettings(steps=400, batch=0, lr=0.1, tol=1e-5))
    assert torch.allclose(best[1][0], values.mean(0), atol=2e-3), "exactly where the weights are the same for all"
    assert torch.allclose(best[0][0], values.mean(0), atol=0.15), "up to the sample where they are drawn apart"
    assert curves[0][0][1] > curves[0][-1][1]


def test_no_step_size_makes_a_constant_worse_than_its_best_start():
    values, passes = toy()
    starts = [[torch.zeros(1, 3)] * 2, [values.mean(0)[None]] * 2, [torch.full((1, 3), 9.0)] * 2]
    for lr in (1e-4, 0.1, 1e4):
        best, _, start = co.fit(starts, [1.0, 1.0], passes, 400, ComponentSettings(steps=40, check=5, lr=lr, batch=16))
        assert start == [1, 1]
        for i, constant in enumerate(best):
            after, before = (next(passes([c, c], [i], None))[2].mean() for c in (constant, values.mean(0)[None]))
            assert after <= before


def test_training_stops_when_nothing_is_gained():
    values, passes = toy()
    settings = ComponentSettings(steps=5000, check=20, batch=0)
    _, curves, _ = co.fit([[torch.zeros(1, 3)] * 2], [1.0, 1.0], passes, 400, settings)
    assert all(curve[-1][0] < 1000 for curve in curves)


# ---- tables, storing, going on


def test_the_table_has_the_agreed_columns_and_one_row_for_each_ablation(gpt2, task):
    ablations = ["zero", "mean", "resample", "cf_mean", "counterfactual", "optimal"]
    table = component_gaps(gpt2, task, ["a2.h1"], ablations, settings=QUICK)
    assert list(table) == ["component", "layer", "kind", "ablation", "family", "gap", "se", "n"]
    assert table.ablation.tolist() == ablations and (table.n == len(task.test)).all()
    assert table.family.tolist() == ["", "position", "", "position", "", "position"]
    assert set(zip(table.component, table.layer, table.kind, strict=True)) == {("a2.h1", 2, "head")}
    values = component_values(gpt2, task, "a2.h1", "mean", store=False)["a2.h1", "mean", "position"]
    row = table[table.ablation == "mean"].iloc[0]
    assert (row.gap, row.se) == pytest.approx(stats.mean_se(values), rel=1e-4)
    both = component_gaps(gpt2, task, ["a2.h1"], ablations, ab.FAMILIES, settings=QUICK)
    assert len(both) == 9


def test_what_was_killed_goes_on_with_the_next_layer_and_ends_with_the_same_numbers(gpt2, task, place, monkeypatch):
    names, ablations = ["m0", "m1", "m2", "a0.h1"], ["mean", "optimal"]
    want = component_values(gpt2, task, names, ablations, settings=QUICK, store=False)
    plain, started = co.Bench.train, []

    def train(self, sites, *args):
        started.append(sites[0].layer)
        if len(started) == 2:
            raise KeyboardInterrupt
        return plain(self, sites, *args)

    monkeypatch.setattr(co.Bench, "train", train)
    with pytest.raises(KeyboardInterrupt):
        component_values(gpt2, task, names, ablations, settings=QUICK)
    got = component_values(gpt2, task, names, ablations, settings=QUICK)
    assert started == [0, 1, 1, 2]
    assert all(torch.equal(got[key], want[key]) for key in want)
    monkeypatch.setattr(co.Bench, "passes", lambda *args: pytest.fail("computed again"))
    again = component_values(gpt2, task, names, ablations, settings=QUICK)
    assert all(torch.equal(again[key], want[key]) for key in want)


def test_settings_that_cannot_change_a_number_do_not_make_a_new_run(gpt2, task, place, monkeypatch):
    component_gaps(gpt2, task, ["m1"], ["mean", "resample"])
    monkeypatch.setattr(co.Bench, "passes", lambda *args: pytest.fail("computed again"))
    component_gaps(gpt2, task, ["m1"], ["mean", "resample"], settings=ComponentSettings(lr=9, steps=1))
    with pytest.raises(pytest.fail.Exception):
        component_gaps(gpt2, task, ["m1"], ["resample"], settings=ComponentSettings(draws=2))


def test_without_a_store_nothing_is_written(gpt2, task, place):
    component_gaps(gpt2, task, ["m1"], ["mean", "optimal"], ab.FAMILIES, settings=QUICK, store=False)
    assert not list(place.rglob("*.json"))


def test_the_same_seed_gives_the_same_numbers_and_another_one_others(gpt2, task):
    def values(seed):
        settings = replace(QUICK, seed=seed, batch=4, steps=10)
        return component_values(gpt2, task, ["m1"], ["resample", "noise", "optimal"], settings=settings, store=False)

    first, again, other = values(0), values(0), values(1)
    assert all(torch.equal(first[key], again[key]) and not torch.equal(first[key], other[key]) for key in first)


def test_the_cost_is_announced_once_before_anything_long(gpt2, task, monkeypatch):
    said = []
    monkeypatch.setattr(runs, "announce", said.append)
    component_gaps(gpt2, task, ["m1", "m2"], ["mean", "optimal"], settings=QUICK)
    assert len(said) == 1 and "2 components" in said[0] and "at most" in said[0]
    component_gaps(gpt2, task, ["m1", "m2"], ["mean", "optimal"], settings=QUICK)
    assert len(said) == 1, "what is stored costs nothing"


# ---- bad input


@pytest.mark.parametrize(
    "change, message",
    [
        ({"components": ["a9.h0"]}, "no component 'a9.h0'.*a0.h0"),
        ({"components": []}, "no components"),
        ({"components": ["m1", "m1"]}, "twice"),
        ({"ablations": ["meen"]}, "ablation meen.*zero, mean"),
        ({"ablations": []}, "ablation none"),
        ({"families": ["token"]}, "family token.*position, shared"),
        ({"families": []}, "family none"),
        ({"metric": "accuracy"}, "metric accuracy.*kl, label"),
        ({"part": "all"}, "part all.*train, test"),
        ({"settings": ComponentSettings(starts=("nowhere",))}, "start nowhere"),
        ({"ablations": ["counterfactual"], "bare": True}, "no counterfactual"),
        ({"ablations": ["cf_mean"], "bare": True}, "no counterfactual"),
        ({"ablations": ["optimal"], "bare": True, "settings": ComponentSettings(starts=("cf_mean",))}, "no counterfactual"),
        ({"metric": "logit_diff", "unanswered": True}, "logit_diff.*answers"),
        ({"rows": slice(0, 0)}, "no (train )?prompts"),
        ({"rows": [0, 1, 2], "all_train": True}, "no test prompts"),
    ],
)
def test_bad_input_is_refused_before_any_compute(gpt2, task, monkeypatch, change, message):
    monkeypatch.setattr(models.Model, "run", lambda *args, **kwargs: pytest.fail("computed"))
    change = {"components": ["m1"], "ablations": ["mean"], **change}
    asked = task[change.pop("rows")] if "rows" in change else task
    if change.pop("all_train", False):
        asked = replace(asked, in_train=torch.ones(len(asked), dtype=torch.bool))
    if change.pop("bare", False):
        asked = replace(asked, counterfactual=None)
    if change.pop("unanswered", False):
        asked = replace(asked, wrong=torch.full_like(asked.wrong, -1))
    with pytest.raises(ValueError, match=message):
        component_gaps(gpt2, asked, **change)


def test_one_prompt_cannot_be_resampled(gpt2, task):
    two = task[[int(task.in_train.nonzero()[0]), int((~task.in_train).nonzero()[0])]]
    with pytest.raises(ValueError, match="at least 2"):
        component_gaps(gpt2, two, ["m1"], ["resample"])


# ---- the paper's own numbers


@pytest.fixture(scope="module")
def real():
    if not os.environ.get("OA_GPT2"):
        pytest.skip("OA_GPT2 names no folder with GPT-2's weights")
    return models.load_model(os.environ["OA_GPT2"])


@pytest.mark.gpt2
def test_gpt2_on_ioi_gives_the_papers_means(real):
    task = tasks.ioi(real, 512)
    table = component_gaps(real, task, None, ["zero", "mean", "counterfactual"], store=False)
    gap = table.pivot_table(index="component", columns="ablation", values="gap")
    assert gap["zero"].mean() == pytest.approx(0.0584, rel=0.1)
    assert gap["mean"].mean() == pytest.approx(0.0405, rel=0.1)
    for name, ablation, value in (("m0", "mean", 4.12), ("a10.h7", "mean", 0.235), ("a11.h10", "mean", 0.238),
                                  ("m0", "counterfactual", 3.23), ("a10.h7", "counterfactual", 0.18)):  # fmt: skip
        assert gap.loc[name, ablation] == pytest.approx(value, rel=0.1)
    assert stats.spearman(np.array(gap["mean"]), np.array(gap["counterfactual"])) == pytest.approx(0.825, abs=0.05)


@pytest.mark.gpt2
def test_zero_of_gpt2s_heads_keeps_the_value_bias_and_dropping_it_gives_other_numbers(real):
    task = tasks.ioi(real, 64)
    for name in ("a10.h7", "a0.h1"):
        site = ab.parse(name, real)
        folded = component_values(real, task, [name], ["zero"], store=False)[name, "zero", ""]
        kept = by_hooks(real, task.test, name, real.layers[site.layer].b_V.flatten()[None, site.part])
        assert torch.allclose(folded, kept, atol=1e-4)
        assert not torch.allclose(folded, by_hooks(real, task.test, name, torch.zeros(1, 64)), atol=1e-4)
