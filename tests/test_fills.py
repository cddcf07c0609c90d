"""What replaces a value: means, the entries of the ablations, and one's own through the same
door."""

import pytest
import torch

from oa_utils import fills, machine, stats, tasks
from oa_utils.circuits import Circuit
from oa_utils.components import component_gaps
from oa_utils.fills import (
    ABLATIONS,
    Ablation,
    PositionMeans,
    TaskValues,
    edge_fill,
    find_ablation,
    layer_means,
    noise_fill,
)
from oa_utils.masked import MaskedModel
from oa_utils.search import gap, sweep
from oa_utils.sites import CleanPrompts, Site, find

pytestmark = pytest.mark.filterwarnings("ignore:prompts of different lengths")

KINDS = ["a1.h2", "a0", "m1", "m2.n17", "tok", "embed"]
TOTAL = {"zero", "mean", "resample", "cf_mean", "optimal"}


@pytest.fixture
def task(model):
    return tasks.ioi(model, 24, seed=1)


def component_values(*asked, **settings):
    """The gap of each prompt, by (component, ablation, family)."""
    table = component_gaps(*asked, **settings, each=True)
    return {(row.component, row.ablation, row.family): row.each for row in table.itertuples()}


# ---- means


@pytest.mark.parametrize("tokens_in_a_pass", [30, 4096])
def test_streaming_means_are_the_plain_means(model, task, monkeypatch, tokens_in_a_pass):
    monkeypatch.setattr(machine, "PASS_TOKENS", tokens_in_a_pass)
    prompts = CleanPrompts(model, task.tokens, task.last)
    shortest = int(task.last.min())
    assert len(task.last.unique()) > 2, "prompts of several lengths"
    for name in KINDS:
        site = find(name, model)
        means = layer_means(prompts, [site])[name]
        value = prompts.block(site.layer, torch.arange(len(task))).value(site)
        inside = torch.arange(value.shape[1]) <= task.last[:, None]
        assert torch.equal(means.count, inside.sum(0))
        assert (means.count.diff() <= 0).all()
        assert means.common_end == shortest
        for position in range(value.shape[1]):
            want = value[inside[:, position], position].mean(0)
            assert torch.allclose(means.mean[position], want, atol=1e-4)
        behind = value[:, shortest:][inside[:, shortest:]]  # every value counts the same
        rows = means.rows("position")
        assert rows.shape == (shortest + 1, site.dim)
        assert torch.allclose(rows[shortest], behind.mean(0), atol=1e-4)
        assert torch.allclose(rows[:shortest], value[:, :shortest].mean(0), atol=1e-4)
        late = value[:, 9:][inside[:, 9:]]
        assert torch.allclose(means.rows("shared")[0], late.mean(0), atol=1e-4)
        spread = value[:, 1:][inside[:, 1:]].std(0, correction=0)
        assert torch.allclose(means.std, spread, atol=1e-3, rtol=1e-3)


def test_means_are_added_up_where_there_is_float64(model, task, monkeypatch):
    """Nothing becomes float64 but by `exact`, which knows the devices that have none."""
    prompts = CleanPrompts(model, task.tokens, task.last)
    site = find("m1", model)
    want = layer_means(prompts, [site])["m1"]
    monkeypatch.setattr(fills, "exact", lambda x: x.to(torch.float64))
    monkeypatch.setattr(torch.Tensor, "double", lambda x: pytest.fail("on its own device"))
    means = layer_means(prompts, [site])["m1"]
    assert torch.equal(means.mean, want.mean) and torch.equal(means.std, want.std)


def test_components_of_one_layer_are_measured_together_as_apart(model, task):
    prompts = CleanPrompts(model, task.tokens, task.last)
    sites = [find(name, model) for name in ("a1.h2", "m1", "m1.n3")]
    together = layer_means(prompts, sites)
    for site in sites:
        apart = layer_means(prompts, [site])[site.name]
        assert torch.equal(together[site.name].mean, apart.mean)
        assert torch.equal(together[site.name].std, apart.std)


def test_short_prompts_share_the_mean_over_everything_behind_bos():
    count = torch.tensor([4, 4, 4, 1])
    mean = torch.tensor([[9.0], [1.0], [2.0], [5.0]])
    means = PositionMeans(count, mean, torch.ones(1))
    assert means.common_end == 2
    assert means.rows("shared").item() == pytest.approx((4 * 1 + 4 * 2 + 5) / 9)
    assert means.rows("position").flatten().tolist() == pytest.approx([9, 1, (4 * 2 + 5) / 5])


# ---- the entries


def test_total_ablations_know_nothing_of_the_prompt_and_partial_ones_do():
    """Total are those whose fill, or the prompt it comes from, is drawn without a look at it."""
    assert {str(ablation) for ablation in ABLATIONS.values() if ablation.total} == TOTAL
    partial = set(ABLATIONS) - TOTAL
    assert partial == {"counterfactual", "noise"}


def test_every_ablation_has_one_rule():
    for name, ablation in ABLATIONS.items():
        rules = [ablation.constants is not None, ablation.prompts is not None, ablation.noise]
        assert sum(rules) == 1, name
        assert find_ablation(name) is ablation
        assert ablation == name


def test_a_name_that_there_is_not_is_refused_and_a_rule_of_ones_own_is_taken():
    with pytest.raises(ValueError, match="no ablation 'meen'.*zero, mean"):
        find_ablation("meen")
    mine = Ablation("meen", prompts=lambda task, rows, draw: task.tokens[rows])
    assert find_ablation(mine) is mine


def test_the_zero_of_a_head_is_its_value_bias(gpt2):
    values = TaskValues(gpt2, tasks.ioi(gpt2, 8))
    bias = gpt2.layers[1].b_V
    assert bias.abs().min() > 0
    names = ["a1.h2", "a1", "m1", "m1.n3"]
    sites = [find(name, gpt2) for name in names]
    zero = values.constants(ABLATIONS["zero"], "position", sites)
    assert torch.equal(zero["a1.h2"], bias[2][None])
    assert torch.equal(zero["a1"], bias.flatten()[None])
    assert not zero["m1"].any()
    assert not zero["m1.n3"].any()
    zero = values.constants(ABLATIONS["zero"], "position", [find("tok", gpt2)])
    assert not zero["tok"].any()


def test_constants_give_position_i_row_i_and_the_last_row_to_all_behind(gpt2):
    site = Site("m0", "mlp", "mlp", 0, slice(0, 2))
    rows = torch.arange(6.0).view(3, 2)
    values = TaskValues(gpt2, tasks.ioi(gpt2, 8))
    fill = values.constant_fill({"m0": rows}, "position", "train")(0, torch.arange(4))
    assert torch.equal(fill(site, torch.zeros(4, 5, 2))[0], rows[[0, 1, 2, 2, 2]])


# ---- prompts of different lengths


def of_two_lengths(model):
    """Prompts of four and six tokens behind BOS; everything but the last word is one word."""
    word, *endings = [word for word in model.tokenizer.get_vocab() if word.isalpha()][:17]
    prompts = [" ".join([word] * (3 + 2 * (i % 2)) + [ending]) for i, ending in enumerate(endings)]
    task = tasks.Task.from_text(model, prompts, [f" {endings[0]}"] * len(prompts))
    assert task.train.last.unique().tolist() == task.test.last.unique().tolist() == [4, 6]
    return task


def test_pooled_positions_are_warned_of_and_other_families_are_not_pooled(gpt2):
    task = of_two_lengths(gpt2)
    train = task.train
    site = find("m0", gpt2)
    prompts = CleanPrompts(gpt2, train.tokens, train.last)
    value = prompts.block(0, torch.arange(len(train))).value(site)
    long = train.last == 6
    means = layer_means(prompts, [site])["m0"]
    with pytest.warns(UserWarning, match="up to 3 and one for all from 4 on"):
        assert len(means.rows("position")) == 5
    by_position = means.rows("by_position")
    assert len(by_position) == 7
    torch.testing.assert_close(by_position[4], value[:, 4].mean(0), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(by_position[6], value[long, 6].mean(0), atol=1e-5, rtol=1e-4)
    from_end = layer_means(prompts, [site], from_end=True)["m0"].rows("from_end")
    assert len(from_end) == 4, "the shortest prompt has four tokens behind BOS"
    ends = torch.where(long[:, None], value[:, 6], value[:, 4])
    torch.testing.assert_close(from_end[0], ends.mean(0), atol=1e-5, rtol=1e-4)
    firsts = [value[i, 1 : last - 2] for i, last in enumerate(train.last)]
    torch.testing.assert_close(from_end[3], torch.cat(firsts).mean(0), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", ["by_position", "from_end"])
def test_families_put_their_rows_where_they_count_from(gpt2, family):
    """m0 replaced by hand; and trained constants are no worse than where they started."""
    task = of_two_lengths(gpt2)
    values = TaskValues(gpt2, task)
    rows = values.constants(ABLATIONS["mean"], family, [find("m0", gpt2)])["m0"]
    test = task.test

    def edit(site, layer, value):
        if (site, layer) != ("mlp", 0):
            return value
        places = torch.arange(value.shape[1]).expand(len(test), -1)
        if family == "from_end":
            places = test.last[:, None] - places
        filled = rows[places.clamp(0, len(rows) - 1)]
        return torch.cat([value[:, :1], filled[:, 1:]], 1)

    with torch.no_grad():
        want = stats.kl(test.log_probs(gpt2), gpt2(test.tokens, test.last, edit))
    each = component_values(gpt2, task, ["m0"], ["mean"], family)["m0", "mean", family]
    assert want.mean() > 1e-4
    torch.testing.assert_close(each, want, atol=1e-5, rtol=1e-3)
    both = component_gaps(
        gpt2, task, ["m0"], ["mean", "optimal"], family, part="train", steps=6, look_every=3
    ).set_index("ablation")
    assert both.gap["optimal"] <= both.gap["mean"] + 1e-6


def test_prompts_of_one_length_are_not_warned_of(gpt2, recwarn):
    means = PositionMeans(torch.tensor([4, 4, 4]), torch.rand(3, 2), torch.ones(2))
    assert torch.equal(means.rows("position"), means.rows("by_position"))
    assert not len(recwarn)


def test_noise_has_the_asked_spread_and_does_not_depend_on_the_batch(model):
    site = find("m1", model)
    n = 400
    std = {"m1": torch.linspace(0.5, 2, 32)}
    value = torch.randn(n, 12, 32)
    everyone = torch.arange(n)
    draw = noise_fill(std, 3.0, (n, 12), seed=5)(1, everyone)(site, value) - value
    assert torch.allclose(draw.flatten(0, 1).std(0), 3 * std["m1"], rtol=0.06)
    two = torch.tensor([7, 2])
    some = value[two, :9]
    again = noise_fill(std, 3.0, (n, 12), seed=5)(1, two)(site, some) - some
    assert torch.allclose(again, draw[two, :9], atol=1e-5)
    other = noise_fill(std, 3.0, (n, 12), seed=6)(1, everyone)(site, value) - value
    assert not torch.allclose(other, draw)


# ---- other prompts


def test_partners_are_derangements_and_one_prompt_has_none(task):
    seen = set()
    for seed in range(20):
        partners = task.partners(seed)
        assert (partners != torch.arange(len(task))).all()
        assert len(partners.unique()) == len(task)
        seen.add(tuple(partners.tolist()))
    assert len(seen) == 20
    assert task[:2].partners(3).tolist() == [1, 0]
    with pytest.raises(ValueError, match="at least 2"):
        task[:1].partners()


def test_a_shorter_partner_ends_where_the_prompt_ends_and_a_longer_one_gives_its_beginning(
    model, task
):
    order = task.last.argsort()
    short = int(order[0])
    long = int(order[-1])
    partners = torch.arange(len(task))
    partners[short] = long
    partners[long] = short
    laid = task.resampled(partners)
    a = int(task.last[short])
    b = int(task.last[long])
    assert a < b
    assert torch.equal(laid[short, : a + 1], task.tokens[long, : a + 1])
    assert torch.equal(laid[long, b - a : b + 1], task.tokens[short, : a + 1])
    assert (laid[long, : b - a + 1] == model.bos).all()


def test_some_rows_are_resampled_as_in_the_whole_part(task):
    """The derangement of a seed is that of the part; with a generator it is drawn anew."""
    rows = torch.tensor([5, 0, 3])
    rule = ABLATIONS["resample"].prompts
    whole = task.resampled(task.partners(4))
    assert torch.equal(rule(task, rows, 4), whole[rows])
    rng = machine.generator(0)
    draws = [rule(task, rows, rng) for _ in range(6)]
    assert len({tuple(tokens.flatten().tolist()) for tokens in draws}) > 1


# ---- the form for edges


def test_edges_are_filled_as_their_ablation_says(gpt2):
    masked = MaskedModel(gpt2)
    task = tasks.ioi(gpt2, 16, seed=1)
    test = task.test
    rows = torch.tensor([3, 1])
    fills = {
        name: edge_fill(masked, task, rule, "test")
        for name, rule in ABLATIONS.items()
        if not rule.noise
    }
    train = masked.activations(task.train.tokens)
    mean = fills["mean"](rows)
    close = {"atol": 1e-5, "rtol": 1e-4}
    torch.testing.assert_close(mean.mlps[2], train.mlps[:, 2].mean(0), **close)
    torch.testing.assert_close(mean.embed[1], train.embed[:, 1].mean(0), **close)
    other = masked.activations(task.train.counterfactual)
    cf_mean = fills["cf_mean"](rows)
    torch.testing.assert_close(cf_mean.heads[3], other.heads[:, 3].mean(0), **close)
    zero = fills["zero"](rows)
    assert torch.equal(zero.heads[0, 1], gpt2.layers[1].b_V)
    assert not zero.mlps.any()
    shared = fills["optimal"](rows)  # where training starts: the mean of all late positions
    late = torch.arange(train.embed.shape[1]) <= task.train.last[:, None]
    late[:, :9] = False
    torch.testing.assert_close(shared.heads, train.heads[late].mean(0), **close)
    torch.testing.assert_close(shared.embed, train.embed[late].mean(0), **close)
    length = int(test.last[rows].max()) + 1
    for name, tokens in (
        ("counterfactual", test.counterfactual),
        ("resample", test.resampled(test.partners(0))),
    ):
        want = masked.activations(tokens[rows, :length])
        torch.testing.assert_close(fills[name](rows).heads, want.heads, **close)


def test_random_fills_are_drawn_anew_with_a_generator_and_never_the_prompt_itself(gpt2):
    masked = MaskedModel(gpt2)
    task = tasks.ioi(gpt2, 16, seed=1)
    rows = torch.tensor([3, 1])
    fill = edge_fill(masked, task, ABLATIONS["resample"], "test")
    drawn = torch.stack([fill(rows, machine.generator(seed)).embed for seed in range(8)])
    assert len(drawn.unique(dim=0)) > 4
    length = drawn.shape[2]
    prompt = masked.activations(task.test.tokens[rows, :length]).embed
    assert (drawn != prompt).any(-1).any(-1).all()


def test_activations_that_are_kept_are_those_that_are_computed(gpt2, monkeypatch):
    task = tasks.ioi(gpt2, 16, seed=1)
    rows = torch.tensor([3, 1])
    rule = ABLATIONS["counterfactual"]
    kept = edge_fill(MaskedModel(gpt2), task, rule, "test")(rows)
    monkeypatch.setattr("oa_utils.fills.KEPT_BYTES", 0)
    masked = MaskedModel(gpt2)
    computed = edge_fill(masked, task, rule, "test")(rows)
    assert not masked.kept
    for one, other in zip(kept, computed, strict=True):
        torch.testing.assert_close(one, other)


# ---- both forms of one entry


def without(masked, vertex):
    """The circuit of all edges but those that a vertex writes along."""
    mask = masked.graph.src != masked.graph.vertex_index(vertex)
    return Circuit(masked.graph, mask, "own")


@pytest.mark.parametrize("name", ["zero", "mean", "cf_mean", "counterfactual", "resample"])
def test_a_vertex_without_out_edges_is_the_component_ablated(model, name):
    task = tasks.ioi(model, 16, seed=1)
    masked = MaskedModel(model)
    family = "position" if find_ablation(name).families else ""
    by_component = component_values(model, task, ["a1.h2", "m1"], [name], draws=2)
    for vertex in ("a1.h2", "m1"):
        by_edges = gap(masked, task, without(masked, vertex), name, draws=2)
        each = by_component[vertex, name, family]
        assert each.mean() > 1e-4
        torch.testing.assert_close(by_edges.each, each, atol=1e-5, rtol=1e-3)


def by_edit(model, task, value_of):
    """KL of each prompt with m1 replaced from position 1 on, by the model's own edits."""

    def edit(site, layer, value):
        if (site, layer) != ("mlp", 1):
            return value
        return torch.cat([value[:, :1], value_of(value)[:, 1:]], 1)

    with torch.no_grad():
        return stats.kl(task.log_probs(model), model(task.tokens, task.last, edit))


def test_constants_of_ones_own_go_through_the_one_door(model):
    """The values on the first train prompt stand in everywhere; nothing is registered."""
    task = tasks.ioi(model, 16, seed=1)
    masked = MaskedModel(model)
    first = task.train[:1]
    before = dict(ABLATIONS)

    def on_the_first_prompt(site, model, means, family):
        prompts = CleanPrompts(model, first.tokens, first.last)
        return prompts.block(site.layer, torch.tensor([0])).value(site)[0]

    mine = Ablation("first prompt", constants=on_the_first_prompt)

    table = component_gaps(model, task, ["m1", "a1.h2"], [mine, "zero"])
    assert table.ablation.tolist() == ["first prompt", "zero"] * 2
    values = component_values(model, task, ["m1"], [mine])["m1", "first prompt", ""]
    rows = on_the_first_prompt(find("m1", model), model, None, "")
    at = torch.arange(task.tokens.shape[1]).clamp(max=len(rows) - 1)
    want = by_edit(model, task.test, lambda value: rows[at].expand_as(value))
    torch.testing.assert_close(values, want, atol=1e-5, rtol=1e-3)

    delta = gap(masked, task, without(masked, "m1"), mine)
    torch.testing.assert_close(delta.each, values, atol=1e-5, rtol=1e-3)

    options = {"ugs": {"steps": 2, "prompts": 2, "masks": 2}, "acdc": {"prompts": 2}}
    circuits = sweep(masked, task, ["ugs", "acdc"], [mine], {"lam": [0.1]}, options=options)
    assert circuits.ablation.tolist() == circuits.searched.tolist() == ["first prompt"] * 2
    assert circuits.gap.notna().all()
    assert ABLATIONS == before


def test_prompts_of_ones_own_go_through_the_one_door(model):
    """Each prompt's neighbour is laid under it."""
    task = tasks.ioi(model, 16, seed=1)
    masked = MaskedModel(model)

    def neighbour(part, rows, draw):
        partners = (torch.arange(len(part)) - 1) % len(part)
        return part.resampled(partners)[rows]

    mine = Ablation("neighbour", prompts=neighbour, total=False)
    values = component_values(model, task, ["m1"], [mine])["m1", "neighbour", ""]
    test = task.test
    other = masked.activations(neighbour(test, torch.arange(len(test)), 0)).mlps[:, :, 1]
    want = by_edit(model, test, lambda value: other)
    torch.testing.assert_close(values, want, atol=1e-5, rtol=1e-3)
    delta = gap(masked, task, without(masked, "m1"), mine)
    torch.testing.assert_close(delta.each, values, atol=1e-5, rtol=1e-3)
    circuits = sweep(masked, task, ["eap"], [mine, "counterfactual"], {"n_edges": [60]})
    assert circuits.ablation.tolist() == ["neighbour", "counterfactual"]
    assert circuits.gap.nunique() == 2


def test_an_ablation_that_lacks_what_it_needs_is_refused(gpt2):
    prompts = [f"{name} went to" for name in ("Mary", "John", "Scott", "Donald")]
    plain = tasks.Task.from_text(gpt2, prompts, [" the"] * 4)
    mine = Ablation("other text", prompts=lambda part, rows, draw: rows, counterfactuals=True)
    with pytest.raises(ValueError, match="no counterfactual"):
        component_gaps(gpt2, plain, ["m1"], [mine])
    with pytest.raises(ValueError, match="'noise' has no form for edges.*zero, mean"):
        ABLATIONS["noise"].check(plain, edges=True)
    with pytest.raises(ValueError, match="at least 2"):
        ABLATIONS["resample"].check(plain[[0, 1]])
