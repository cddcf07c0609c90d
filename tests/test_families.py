"""Every model family, as a random model from the list in `scripts/families.py`: the walk is the
model, and what experiments rest on holds on all of them."""

import copy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import families_script, tokens_of
from toys import task_of

import oa_utils as oa
from oa_utils import closed_form, machine, models, stats
from oa_utils.faithfulness import after, before
from oa_utils.fills import Constants, TaskValues
from oa_utils.lenses import KINDS, MeanLens, read
from oa_utils.models import recording, wrap
from oa_utils.sites import CleanPrompts, find
from oa_utils.tasks import Task

script = families_script()
FAMILIES = {family.name: family for family in script.FAMILIES}
POST_NORM = ["OLMo-2", "Gemma-2", "Gemma-3"]
LENGTH = 9
LAST = torch.tensor([8, 5, 8, 3])


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def model(family):
    return wrap(family.make(), name=family.name)


@pytest.fixture(scope="module", params=["edge", "layer"])
def masked(request, model):
    if request.param == "edge" and not model.adds_up:
        pytest.skip("heads do not add up to what the layer writes")
    return oa.MaskedModel(model, request.param)


def close(x, y, atol=2e-5):
    torch.testing.assert_close(x, y, atol=atol, rtol=1e-4)


def random_constants(masked, rows=None, seed=0):
    """Constants for every vertex, with an axis of positions if rows are given."""
    model = masked.model
    graph = masked.graph
    rng = torch.Generator().manual_seed(seed)
    lead = () if rows is None else (rows,)
    heads = (model.n_layers, graph.attention_writers, masked.value_width)
    shapes = [(model.d_model,), heads, (model.n_layers, model.d_model)]
    return Constants(*(0.5 * torch.randn(*lead, *shape, generator=rng) for shape in shapes))


def random_mask(masked, n=4, seed=0):
    """A third of the edges ablated, a third kept, a third in between."""
    rng = torch.Generator().manual_seed(seed)
    return (3 * torch.rand(n, len(masked.graph), generator=rng) - 1).clamp(0, 1)


def toy_task(model, n=24, length=6, seed=0):
    """Random prompts with counterfactuals and subjects."""
    tokens, counterfactual = (tokens_of(model, n, length, s) for s in (seed, seed + 1))
    facts = {"subject": torch.tensor([[1, 3]]).repeat(n, 1), "relation": ("r",) * n}
    return task_of(model, tokens, counterfactual, **facts)


# ---- the walk


def test_the_walk_and_the_bridge_are_the_model(family):
    hf = family.make(seed=1)
    tokens = torch.randint(2, 60, (4, LENGTH))
    expected = hf(tokens).logits.log_softmax(-1)
    model = wrap(hf)
    close(model.log_probs(model.run(model.embed(tokens))), expected)
    close(model.finish(model.embed(tokens), 0, LAST), expected[range(4), LAST])
    close(model.bridge(tokens).log_softmax(-1), expected)


def test_some_columns_over_the_keys_and_values_of_the_others_are_the_model(model):
    tokens = tokens_of(model, 3, LENGTH)
    end = model.run(model.embed(tokens))[:, -1:]
    for layer in range(model.n_layers):
        x, past = before(model, tokens, layer)
        close(after(model, x[:, None], layer, past), end)


def test_the_fingerprint_is_that_of_the_plain_model(family):
    hf = family.make()
    assert models.fingerprint(copy.deepcopy(hf)) == wrap(hf).fingerprint


@pytest.mark.parametrize("name", ["SCALES", "SCORE_CAPS", "LOGIT_CAPS"])
def test_a_scale_or_cap_that_is_not_read_is_found_out_at_loading(monkeypatch, name):
    hf = FAMILIES["Gemma-2"].make()
    for parameter in hf.parameters():  # as small as weights are when training starts
        parameter.data *= 0.1
    plain = copy.deepcopy(hf)
    wrap(plain)
    monkeypatch.setattr(models, name, ())
    with pytest.raises(ValueError, match="are off by"):
        wrap(hf)


def refused(config, **options):
    family = script.Family("refused", "", config, options)
    with pytest.raises(ValueError, match="support") as error:
        wrap(family.make(), name="refused")
    return str(error.value)


@pytest.mark.parametrize(
    "config, options",
    [
        ("PhiConfig", {"qk_layernorm": True}),
        ("OPTConfig", {"ffn_dim": 48, "word_embed_proj_dim": 32, "do_layer_norm_before": False}),
        ("BloomConfig", {"n_head": 4}),
        ("MixtralConfig", {"num_local_experts": 2, "num_key_value_heads": 2}),
        ("GPTNeoConfig", {"attention_types": [[["local"], 3]]}),
    ],
)
def test_what_is_not_rebuilt_exactly_is_refused(config, options):
    refused(config, **options)


@pytest.mark.parametrize("name", ["Mistral", "Gemma-2", "Gemma-3"])
def test_prompts_longer_than_a_sliding_window_are_refused(name):
    model = wrap(FAMILIES[name].make(sliding_window=8), name=name)
    assert model.n_ctx == 8
    fits, too_long = (toy_task(model, length=length) for length in (8, 8))
    too_long = Task(
        **{
            **vars(too_long),
            "tokens": tokens_of(model, 24, 9),
            "counterfactual": tokens_of(model, 24, 9),
            "last": torch.full((24,), 8),
        }
    )
    assert oa.component_gaps(model, fits, "m1", "mean").gap.iloc[0] > 0
    masked = oa.MaskedModel(model, "layer")
    zeros = torch.zeros(1, len(masked.graph))
    calls = [
        lambda: oa.component_gaps(model, too_long, "m1", "mean"),
        lambda: oa.trace(model, too_long, "mlp", window=1, method="gnt", sigma=torch.ones(32)),
        lambda: masked(too_long.tokens, too_long.last, zeros, random_constants(masked)),
        lambda: read(model, too_long.tokens),
        lambda: model.pad([[2] * 8]),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="at most 8"):
            call()


# ---- components


COMPONENTS = ["a1.h2", "a1", "m1", "m1.n5", "tok", "embed"]


@pytest.mark.parametrize("component", COMPONENTS)
def test_a_component_filled_with_its_own_value_leaves_the_model_as_it_is(model, component):
    tokens = tokens_of(model, 3, LENGTH)
    last = torch.tensor([8, 5, 8])
    site = find(component, model)
    block = CleanPrompts(model, tokens, last).block(site.layer, torch.arange(3))
    close(block.replaced(site, block.value(site)), getattr(block, site.stage))


@pytest.mark.parametrize("component", COMPONENTS)
def test_a_component_is_replaced_as_by_hooks_on_the_bridge(model, component):
    """The bridge runs Hugging Face's own forward, so this is the gap's exact definition."""
    from oa_utils.components import ablated

    tokens = tokens_of(model, 3, LENGTH)
    last = torch.full((3,), LENGTH - 1)
    site = find(component, model)
    constant = torch.randn(4, site.dim, generator=torch.Generator().manual_seed(2))
    with oa.ablate(model, {component: constant}):
        expected = model.bridge(tokens).log_softmax(-1)[:, -1]
    block = CleanPrompts(model, tokens, last).block(site.layer, torch.arange(3))
    rows = constant[torch.arange(LENGTH).clamp(max=3)][None]
    close(ablated(model, block, [site], lambda site, value: rows, last)[0], expected)


def test_gaps_of_components(model):
    table = oa.component_gaps(
        model, toy_task(model), COMPONENTS[:4], ["zero", "mean", "optimal"], steps=3, look_every=3
    )
    wide = table.pivot(index="component", columns="ablation", values="gap")
    assert (wide > 0).all(axis=None) and wide.loc["a1.h2", "mean"] < wide.loc["a1", "mean"]


@pytest.mark.parametrize("rows", ["position", "shared", "by_position", "from_end"])
def test_the_closed_form_stands_on_the_slopes_of_the_prediction(double, rows):
    """Prompt by prompt and token by token, for every kind of component, by finite differences."""
    task = toy_task(double, 12, LENGTH)
    task = replace(task, last=torch.arange(12) % 5 + LENGTH - 5)
    values = TaskValues(double, task)
    prompts = values.prompts("train")
    every = torch.arange(len(prompts))
    draws = torch.rand(len(every), generator=machine.generator(1))
    tokens, weights = closed_form.weights_of(values.part("train").log_probs(double), 4, draws)
    rng = machine.generator(2)
    plane = oa.Subspace("m1", torch.randn(3, double.d_model, generator=rng))
    for group in ([*COMPONENTS[:4], plane], COMPONENTS[4:]):
        sites = [find(component, double) for component in group]
        means = values.means(sites, family=rows)
        starts = {name: mean.rows(rows) for name, mean in means.items()}
        regressions = closed_form.regressions(values, sites, starts, rows, every, scores=4)
        block = prompts.block(sites[0].layer, every)
        for site in sites:
            start = starts[site.name]
            move = torch.randn(start.shape, generator=rng)
            share = 0.3
            at = values.rows_at(rows, "train", every, LENGTH, len(start))
            change = share * (start[at] - block.value(site)) + move[at]

            def weighted(step, block=block, site=site, change=change):
                def fill(_, value):
                    return value + step * change

                with torch.no_grad():
                    logp = closed_form.together(double, block, [site], fill, prompts.last)
                return weights * logp.gather(1, tokens)

            step = 1e-4  # a larger one crosses the bends of a ReLU, a smaller one drowns in norms
            want = (weighted(step) - weighted(-step)) / (2 * step)
            regression = regressions[site.name]
            got = (regression.rows * move).sum((2, 3)) + share * regression.offset
            assert want.norm() > 1e-3
            assert (got - want).norm() < 0.03 * want.norm(), site.name


# ---- circuits


def test_all_edges_kept_is_the_model(masked):
    tokens = tokens_of(masked.model, 4, LENGTH)
    ones = torch.ones(1, len(masked.graph))
    for skip_dead in (False, True):
        logp = masked(tokens, LAST, ones, random_constants(masked), skip_dead=skip_dead)
        close(logp, masked.model(tokens, LAST))


def test_a_fill_that_is_the_value_gives_no_gap(masked):
    tokens = tokens_of(masked.model, 4, LENGTH)
    full = masked.model(tokens, LAST)
    clean = masked.activations(tokens)
    for mask in (torch.zeros(1, len(masked.graph)), random_mask(masked)):
        logp = masked(tokens, LAST, mask, clean)
        close(stats.kl(full, logp), torch.zeros(4), atol=1e-6)


def test_a_total_ablation_ignores_the_prompt(masked):
    tokens = tokens_of(masked.model, 4, LENGTH)
    zeros = torch.zeros(1, len(masked.graph))
    logp = masked(tokens, torch.full((4,), 7), zeros, random_constants(masked, 5))
    close(logp, logp[:1].expand_as(logp))


def test_dangling_edges_change_nothing(masked):
    tokens = tokens_of(masked.model, 4, LENGTH)
    rng = torch.Generator().manual_seed(3)
    drawn = (torch.rand(4, len(masked.graph), generator=rng) < 0.3).float()
    pruned = masked.graph.prune_dangling(drawn)
    assert 0 < pruned.sum() < drawn.sum()
    # what no kept edge enters writes what it writes on the other prompts, so that is its fill
    fill = masked.activations(tokens.roll(1, 0))
    expected = masked(tokens, LAST, drawn, fill)
    close(masked(tokens, LAST, pruned, fill), expected)
    close(masked(tokens, LAST, pruned, fill, skip_dead=True), expected)


def test_the_masked_model_is_the_plain_form_on_hooks(masked):
    model = masked.model
    tokens = tokens_of(model, 4, LENGTH)
    last = torch.full((4,), LENGTH - 1)
    rng = torch.Generator().manual_seed(4)
    mask = torch.rand(len(masked.graph), generator=rng) < 0.6
    circuit = oa.Circuit(masked.graph, mask, "random")
    for fill in (random_constants(masked, 5), masked.activations(tokens.roll(1, 0))):
        logp = masked(tokens, last, circuit.mask.float(), fill)
        with oa.ablate(model, circuit, fill):
            hooked = model.bridge(tokens).log_softmax(-1)[:, -1]
        close(logp, hooked)


def test_layers_whose_edges_are_all_kept_need_not_run(masked):
    tokens = tokens_of(masked.model, 4, LENGTH)
    graph = masked.graph
    mask = random_mask(masked)
    mask[:, torch.tensor([graph.layer_of(int(v)) < 2 for v in graph.dst])] = 1.0
    constants = random_constants(masked, 5)
    clean = masked.activations(tokens)
    known = masked(tokens, LAST, mask, constants, start=2, clean=clean)
    close(known, masked(tokens, LAST, mask, constants))


@pytest.fixture(scope="module", params=FAMILIES)
def double(request):
    return wrap(FAMILIES[request.param].make().double(), name=request.param)


@pytest.mark.parametrize("level", ["edge", "layer"])
def test_gradients_are_those_of_finite_differences(double, level):
    if level == "edge" and not double.adds_up:
        pytest.skip("heads do not add up to what the layer writes")
    masked = oa.MaskedModel(double, level)
    tokens = tokens_of(double, 4, LENGTH)
    rng = torch.Generator().manual_seed(5)
    start = [random_mask(masked).double() * 0.8 + 0.1, *random_constants(masked, 3)]
    start = [value.double() for value in start]
    direction = [torch.randn(value.shape, generator=rng).double() for value in start]
    weights = torch.randn(4, double.d_vocab, generator=rng)

    def value(step):
        moved = [x + step * d for x, d in zip(start, direction, strict=True)]
        for x in moved:
            x.requires_grad_()
        logp = masked(tokens, LAST, moved[0], Constants(*moved[1:]), constants_everywhere=True)
        return (logp * weights).sum(), moved

    total, inputs = value(0.0)
    gradients = torch.autograd.grad(total, inputs)
    slope = sum((g * d).sum() for g, d in zip(gradients, direction, strict=True))
    step = 1e-4  # norms that round to float32 would drown a smaller one
    difference = (value(step)[0] - value(-step)[0]) / (2 * step)
    assert slope.item() == pytest.approx(difference.item(), rel=0.01, abs=0.05)


@pytest.mark.parametrize("name", POST_NORM)
def test_norms_after_layers_refuse_the_edge_level_and_offer_whole_layers(name):
    model = wrap(FAMILIES[name].make(), name=name)
    sentence = (
        "heads no longer add up to what the layer writes, so the edge level has no exact form.*"
        'level="layer"'
    )
    with pytest.raises(ValueError, match=sentence):
        oa.MaskedModel(model)
    assert len(oa.MaskedModel(model, level="layer").graph) == 28


SEARCHES = {
    "ugs": {"lam": 0.1, "steps": 3},
    "hcgs": {"lam": 0.1, "steps": 3},
    "acdc": {"lam": 0.05},
    "eap": {"n_edges": 6},
    "eap_ig": {"n_edges": 6},
    "edge_pruning": {"n_edges": 6, "steps": 3},
}


@pytest.mark.parametrize("name", ["Gemma-2", "GPT-NeoX"])
@pytest.mark.parametrize("method", SEARCHES)
def test_searches_over_whole_layers_find_circuits_that_are_kept_and_measured(
    name, method, tmp_path
):
    model = wrap(FAMILIES[name].make(), name=name)
    task = toy_task(model)
    masked = oa.MaskedModel(model, level="layer")
    ablation = "optimal" if method in ("ugs", "hcgs") else "counterfactual"
    circuit = getattr(oa, method)(masked, task, ablation=ablation, **SEARCHES[method])
    circuit.save(tmp_path / "c.json")
    again = oa.Circuit.load(tmp_path / "c.json", model)
    assert again.graph == masked.graph and again.edges == circuit.edges
    gap = oa.gap(masked, task, again, "mean")
    assert gap.mean > -1e-6 and gap.n == len(task.test)
    every = oa.Circuit(masked.graph, torch.ones(len(masked.graph)), "all")
    assert oa.gap(masked, task, every, "mean").mean == pytest.approx(0, abs=1e-5)
    with pytest.raises(ValueError, match="whole layers"):
        circuit.to_mib(tmp_path / "mib.json", model)


def test_runs_of_whole_layers_and_of_edges_do_not_take_each_other_s_place(tmp_path):
    model = wrap(FAMILIES["Llama"].make(), name="llama")
    task = toy_task(model)
    found = {
        level: oa.ugs(oa.MaskedModel(model, level), task, lam=0.01, steps=2)
        for level in ("edge", "layer")
    }
    for level, circuit in found.items():
        assert circuit.graph.level == level
        vertex = oa.ugs(oa.MaskedModel(model, level), task, lam=0.01, steps=2, level="vertex")
        assert vertex.graph == circuit.graph
    with pytest.raises(ValueError, match="level='layer'"):
        oa.gap(oa.MaskedModel(model), task, found["layer"], "mean")
    with pytest.raises(ValueError, match='whole layers .* level="layer"'):
        oa.ugs(oa.MaskedModel(model), task, level="layer")
    table = oa.sweep(
        oa.MaskedModel(model, "layer"), task, ["acdc"], ["counterfactual"], {"lam": [1e-4]}
    )
    assert 0 < table.n_edges[0] <= 28


def test_a_circuit_of_a_parallel_model_goes_through_files_of_mib(tmp_path):
    model = wrap(FAMILIES["GPT-NeoX"].make(), name="pythia")
    edges = ["embed->a0.h1<v>", "embed->m0", "a0.h1->m1", "m0->m1", "m1->out"]
    circuit = oa.Circuit.from_edges(model, edges)
    circuit.to_mib(tmp_path / "c.json", model)
    assert '"parallel_attn_mlp": true' in (tmp_path / "c.json").read_text()
    again = oa.Circuit.from_mib(tmp_path / "c.json", model)
    assert again.edges == circuit.edges and again.graph.parallel
    with pytest.raises(ValueError, match="parallel"):
        oa.Circuit.from_edges(model, ["a0.h1->m0"])


# ---- tracing


@pytest.mark.parametrize("kind", ["mlp", "attn"])
def test_tracing_with_nothing_corrupted_finds_nothing(model, kind):
    task = toy_task(model)
    nothing = torch.zeros(model.d_model)
    table = oa.trace(model, task, kind, "last", 1, "gnt", sigma=nothing, draws=1)
    assert (table.aie == 0).all()
    close(torch.tensor(table.p_patched.tolist()), torch.tensor(table.p_clean.tolist()))


@pytest.mark.parametrize("kind", ["mlp", "attn"])
def test_tracing_that_restores_all_that_a_layer_writes_is_a_run_with_its_clean_values(model, kind):
    """Corrupt, restore and read by hand, over the whole prompt."""
    from oa_utils.tracing import Prompts

    task = toy_task(model)
    rows = torch.arange(4)
    prompts = Prompts(model, task, kind)
    columns = prompts.columns(rows)
    noise = torch.randn(1, 4, columns.positions.shape[1], model.d_model)
    got = prompts.probabilities(rows, noise, [range(1, 2)], columns.last[None])
    tokens = task.tokens[rows]
    kept, keep = recording(kind)
    model.run(model.embed(tokens), edit=keep)
    embedded = model.embed(tokens)
    embedded[:, 1:] += noise[0] * columns.subject[..., None]

    def restore(site, layer, value):
        if (site, layer) != (kind, 1):
            return value
        return torch.cat([value[:, :-1], kept[kind][1][:, -1:]], 1)

    logp = model.log_probs(model.run(embedded, edit=restore)[:, -1])
    close(got[1], logp.gather(1, prompts.clean(rows).answer[:, None])[:, 0].exp())


# ---- lenses


def test_every_lens_at_the_last_layer_is_the_model(model):
    tokens = tokens_of(model, 5, LENGTH)
    data = read(model, tokens)
    expected = model(tokens, torch.full((5,), LENGTH - 1))
    for kind, lens in KINDS.items():
        shapes = lens.shapes(model).items()
        tensors = {name: torch.randn([n or 3 for n in shape]) for name, shape in shapes}
        made = lens(model, tensors)
        close(made.log_probs(data.resid[-1], model.n_layers), expected)
        assert made.losses(data)[-1].abs().max() == 0, kind


def test_a_lens_that_is_given_the_true_attention_is_the_model(model):
    tokens = tokens_of(model, 1, LENGTH)
    data = read(model, tokens)
    lens = MeanLens(model, {"constants": data.mean})
    expected = model(tokens, torch.tensor([LENGTH - 1]))
    for layer in range(model.n_layers):
        close(lens.log_probs(data.resid[layer], layer), expected)


def test_oca_lenses_train(model):
    lens = oa.lenses.train(model, tokens_of(model, 40, LENGTH), "oca", steps=2)
    assert lens.losses(read(model, tokens_of(model, 4, LENGTH, 1))).isfinite().all()


# ---- what is edited, and what is only used


def test_using_a_model_is_no_edit(model):
    before = model.fingerprint
    assert before == model.as_loaded
    model.bridge(tokens_of(model, 4, LENGTH))
    model.bridge.run_with_cache(tokens_of(model, 2, LENGTH))
    oa.component_gaps(model, toy_task(model, n=8), ["a1", "m1"], ["mean"])
    assert model.fingerprint == before


# ---- half precision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["GPT-2", "GPT-NeoX", "Qwen3", "Gemma-2"])
def test_gaps_of_a_model_in_half_precision_are_within_two_percent(name, dtype):
    """Of the same weights, rounded, in float32: gaps of components and of a circuit."""
    hf = FAMILIES[name].make().to(dtype)
    exact = wrap(copy.deepcopy(hf).float(), name="exact")
    half = wrap(hf, name="half")
    task = toy_task(exact, n=32)
    level = "edge" if exact.adds_up else "layer"
    gaps = {}
    for model in (exact, half):
        table = oa.component_gaps(model, task, ["a1", "m1"], ["mean", "optimal"], steps=5)
        constants = oa.optimal_constants(model, task, ["m1"], steps=5)["m1"][0]
        assert constants.dtype == torch.float32
        masked = oa.MaskedModel(model, level)
        mask = torch.rand(len(masked.graph), generator=torch.Generator().manual_seed(0)) < 0.5
        circuit = oa.Circuit(masked.graph, mask, "random")
        of_circuit = oa.gap(masked, task, circuit, "optimal", steps=5, look_every=5)
        assert of_circuit.constants.embed.dtype == torch.float32
        gaps[model.name] = torch.tensor([*table.gap, of_circuit.mean])
    torch.testing.assert_close(gaps["half"], gaps["exact"], rtol=0.02, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tables_of_rotations_may_be_more_precise_than_the_model(tmp_path, dtype):
    """GPT-J loads its table in float32, whatever its weights are."""
    FAMILIES["GPT-J"].make().save_pretrained(tmp_path)
    model = oa.load_model(tmp_path, dtype=dtype)
    assert model.layers[0].attn.original_component.embed_positions.dtype == torch.float32
    assert oa.component_gaps(model, toy_task(model), ["a1.h2", "m1"], "mean").gap.gt(0).all()


@pytest.mark.parametrize("name", ["Qwen2", "Phi"])
def test_a_value_bias_that_was_edited_is_read_anew_also_where_heads_share_it(name):
    model = wrap(FAMILIES[name].make(), name=name)
    layer = model.layers[1]
    before = layer.b_V.clone()
    for parameter in model.bridge.original_model.parameters():
        parameter.data *= 2
    torch.testing.assert_close(layer.b_V, 2 * before)


# ---- notebooks on another family


def test_a_random_pythia_with_a_tokenizer_of_committed_texts_has_the_paper_s_task(tmp_path):
    """`make notebooks MODEL=folder BUDGET=test` was run on it: 00, 01, 02, 04, 06 and 07."""
    call = [sys.executable, Path(script.__file__).with_name("random_pythia.py"), tmp_path / "py"]
    subprocess.run(call, check=True, capture_output=True)
    model = oa.load_model(tmp_path / "py")
    task = oa.tasks.ioi(model, n=48)
    gaps = oa.component_gaps(model, task, ["a1.h0", "m1"], "mean").gap
    assert model.parallel and (gaps > 0).all()


# ---- what is supported, and the README


def test_supports_says_what_can_be_done_and_why_not(model, tmp_path):
    answer = oa.supports(model)
    assert answer.components and answer.layers and answer.tracing and answer.lenses
    assert answer.edges == answer.vertices == (model.name not in POST_NORM)
    assert bool(answer.why) == (model.name in POST_NORM)
    model.bridge.original_model.config.save_pretrained(tmp_path)
    assert oa.supports(tmp_path)[:-1] == answer[:-1]  # no weights are there


def test_supports_of_what_does_not_load():
    answer = oa.supports("no-such-owner/no-such-model")
    assert not any(answer[:-1]) and "no-such-model" in answer.why


def test_the_tables_of_families_and_costs_are_current():
    call = [sys.executable, script.__file__, "--check"]
    done = subprocess.run(call, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
