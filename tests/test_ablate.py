"""Hooks on the bridge against the edge-masked model and against single components."""

from copy import deepcopy

import pytest
import torch
from conftest import random_gpt2, tokens_of

from oa_utils.ablate import ablate
from oa_utils.circuits import Circuit
from oa_utils.fills import Constants
from oa_utils.graph import LEVELS, Graph
from oa_utils.masked import MaskedModel
from oa_utils.models import wrap
from oa_utils.sites import Subspace, find

LENGTH = 7


def random_constants(model, rows, seed=0, level="edge"):
    torch.manual_seed(seed)
    lead = () if rows == 0 else (rows,)
    heads = (model.n_heads, model.d_head) if level == "edge" else (1, model.d_model)
    return Constants(
        torch.randn(*lead, model.d_model),
        torch.randn(*lead, model.n_layers, *heads),
        torch.randn(*lead, model.n_layers, model.d_model),
    )


def random_circuit(model, share=0.4, level="edge"):
    graph = Graph.of(model, level)
    torch.manual_seed(1)
    return Circuit(graph, torch.rand(len(graph)) < share, "random")


def log_probs(model, tokens):
    return model.bridge(tokens, return_type="logits").log_softmax(-1)


def go_on(model, tokens, cache=None):
    """Log-probabilities of tokens behind those of a cache, and the cache with them in it."""
    logits, cache = model.bridge(
        tokens, return_type="logits_and_cache", past_key_values=cache, use_cache=True
    )
    return logits.log_softmax(-1), cache


@pytest.mark.parametrize("rows", [0, 1, 4, LENGTH])
def test_a_circuit_with_constants_is_that_of_the_masked_model(model, rows):
    circuit = random_circuit(model)
    constants = random_constants(model, rows)
    tokens = tokens_of(model, 3, LENGTH)
    masked = MaskedModel(model)
    with ablate(model, circuit, constants):
        hooked = log_probs(model, tokens)
    for position in (1, 3, LENGTH - 1):
        last = torch.full((3,), position)
        wanted = masked(tokens, last, circuit.mask.float(), constants)
        assert torch.allclose(hooked[:, position], wanted, atol=1e-4)


def test_a_circuit_with_activations_is_that_of_the_masked_model(model):
    circuit = random_circuit(model)
    tokens = tokens_of(model, 3, LENGTH)
    masked = MaskedModel(model)
    fill = masked.activations(tokens_of(model, 3, LENGTH, seed=5))
    with ablate(model, circuit, fill):
        hooked = log_probs(model, tokens)
    last = torch.full((3,), LENGTH - 1)
    assert torch.allclose(
        hooked[:, -1], masked(tokens, last, circuit.mask.float(), fill), atol=1e-4
    )
    with ablate(model, circuit, fill), pytest.raises(ValueError, match="cannot fill"):
        log_probs(model, tokens_of(model, 3, LENGTH + 1))


def test_generated_text_is_that_of_step_by_step_masked_predictions_with_and_without_cache(model):
    circuit = random_circuit(model, 0.7)
    constants = random_constants(model, 3)
    tokens = tokens_of(model, 1, 4)
    masked = MaskedModel(model)
    wanted = tokens
    for _ in range(5):
        last = torch.tensor([wanted.shape[1] - 1])
        best = masked(wanted, last, circuit.mask.float(), constants).argmax(-1)
        wanted = torch.cat((wanted, best[:, None]), 1)
    options = {"max_new_tokens": 5, "do_sample": False, "stop_at_eos": False, "verbose": False}
    for cache in (True, False):
        with ablate(model, circuit, constants):
            made = model.bridge.generate(
                tokens, use_past_kv_cache=cache, return_type="tokens", **options
            )
        assert made.tolist() == wanted.tolist()


@pytest.mark.parametrize("level", LEVELS)
def test_every_cache_goes_on_from_its_own_tokens(model, level):
    circuit = random_circuit(model, 0.9, level)
    one = tokens_of(model, 2, LENGTH)
    other = tokens_of(model, 2, LENGTH, seed=5)
    with ablate(model, circuit, random_constants(model, 3, level=level)):
        whole = log_probs(model, one)
        start, cache = go_on(model, one[:, :3])
        go_on(model, other[:, :3])
        log_probs(model, other)
        copied = deepcopy(cache)
        middle, cache = go_on(model, one[:, 3:5], cache)
        end, cache = go_on(model, one[:, 5:], cache)
        torch.testing.assert_close(torch.cat((start, middle, end), 1), whole, atol=1e-4, rtol=0)
        again, _ = go_on(model, one[:, 3:], copied)
        torch.testing.assert_close(again, whole[:, 3:], atol=1e-4, rtol=0)
        cache.crop(-2)
        again, _ = go_on(model, one[:, 5:], cache)
        torch.testing.assert_close(again, whole[:, 5:], atol=1e-4, rtol=0)


@pytest.mark.parametrize("level", LEVELS)
def test_a_cache_that_began_elsewhere_is_refused(model, level):
    circuit = random_circuit(model, 0.9, level)
    constants = random_constants(model, 3, level=level)
    tokens = tokens_of(model, 2, LENGTH)
    _, before = go_on(model, tokens[:, :3])
    unseen = "holds 3 tokens, but the circuit has run on 0 of"
    with ablate(model, circuit, constants):
        with pytest.raises(ValueError, match=unseen):
            go_on(model, tokens[:, 3:], before)
        whole = log_probs(model, tokens)
        _, cache = go_on(model, tokens[:, :3])
    with ablate(model, circuit, constants):
        with pytest.raises(ValueError, match=unseen):
            go_on(model, tokens[:, 3:], cache)
        start, cache = go_on(model, tokens[:, :3])
        torch.testing.assert_close(start, whole[:, :3], atol=1e-4, rtol=0)
        for layer in cache.layers[: model.n_layers]:  # as after a forward that was broken off
            layer.update(layer.keys[:, :, :2], layer.values[:, :, :2])
        with pytest.raises(ValueError, match="holds 5 tokens, but the circuit has run on 3 of"):
            go_on(model, tokens[:, 3:], cache)


@pytest.mark.parametrize("level", LEVELS)
def test_beams_are_the_same_with_and_without_a_cache(model, level):
    circuit = random_circuit(model, 0.9, level)
    options = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 6, "do_sample": False}
    options |= {"eos_token_id": None, "output_scores": True, "return_dict_in_generate": True}
    tokens = tokens_of(model, 2, 4)
    options["attention_mask"] = torch.ones_like(tokens)
    with ablate(model, circuit, random_constants(model, 3, level=level)):
        hf = model.bridge.original_model
        plain, cached = [
            hf.generate(tokens, use_cache=use_cache, **options) for use_cache in (False, True)
        ]
    assert cached.sequences.tolist() == plain.sequences.tolist()
    torch.testing.assert_close(cached.sequences_scores, plain.sequences_scores)
    beams = torch.arange(3).repeat(2)
    assert (cached.beam_indices[:, :6] % 3 != beams[:, None]).any(), "no beam took another's place"


def test_the_model_is_itself_again_afterwards_also_after_an_error(model):
    tokens = tokens_of(model, 2, LENGTH)
    before = log_probs(model, tokens)
    with (
        pytest.raises(ZeroDivisionError),
        ablate(model, random_circuit(model), random_constants(model, 1)),
    ):
        assert not torch.allclose(log_probs(model, tokens), before, atol=1e-2)
        raise ZeroDivisionError
    assert torch.equal(log_probs(model, tokens), before)


@pytest.mark.parametrize("component", ["a1.h2", "a1", "m1", "m1.n5", "tok", "embed"])
@pytest.mark.parametrize("rows", [1, 3, LENGTH])
def test_a_component_is_replaced_as_in_component_gaps(model, component, rows):
    site = find(component, model)
    torch.manual_seed(2)
    constant = torch.randn(rows, site.dim)
    tokens = tokens_of(model, 3, LENGTH)
    with ablate(model, {component: constant}):
        hooked = log_probs(model, tokens)[:, -1]
    assert torch.allclose(hooked, replaced(model, component, constant, tokens), atol=1e-4)


def test_a_subspace_of_a_component_is_replaced(model):
    torch.manual_seed(3)
    part = Subspace("a1.h2", torch.randn(2, model.d_head))
    constant = torch.randn(1, model.d_head)
    tokens = tokens_of(model, 3, LENGTH)
    with ablate(model, {part: constant}):
        hooked = log_probs(model, tokens)[:, -1]
    assert torch.allclose(hooked, replaced(model, part, constant, tokens), atol=1e-4)


def replaced(model, component, constant, tokens):
    """Log-probabilities by the layer-by-layer view."""
    from oa_utils.sites import CleanPrompts

    site = find(component, model)
    last = torch.full((len(tokens),), LENGTH - 1)
    prompts = CleanPrompts(model, tokens, last)
    block = prompts.block(site.layer, torch.arange(len(tokens)))
    at = torch.arange(LENGTH).clamp(max=len(constant) - 1)
    stream = block.replaced(site, constant[at][None])
    layer = model.layers[site.layer]
    if site.stage == "before":
        return model.finish(stream, site.layer, last)
    if site.stage == "between":
        stream = stream + layer.mlp(stream)
    return model.finish(stream, site.layer + 1, last)


def test_bad_calls_say_what_is_wrong(gpt2):
    with (
        pytest.raises(TypeError, match="a circuit needs a fill"),
        ablate(gpt2, random_circuit(gpt2)),
    ):
        pass
    with (
        pytest.raises(ValueError, match=r"constants of a0.h0 have shape \[P, 8\]"),
        ablate(gpt2, {"a0.h0": torch.zeros(1, 3)}),
    ):
        pass


def test_the_name_of_a_subspace_is_refused_and_the_subspace_itself_is_not(gpt2):
    part = Subspace("a1.h2", torch.eye(gpt2.d_head)[:2])
    name = find(part, gpt2).name
    rows = torch.zeros(1, gpt2.d_head)
    with ablate(gpt2, {part: (rows, {"family": "shared"})}):
        pass
    with (
        pytest.raises(ValueError, match=r"give the subspace itself .*oa.Subspace\('a1.h2', basis"),
        ablate(gpt2, {name: (rows, {"family": "shared"})}),
    ):
        pass


@pytest.mark.parametrize("level", LEVELS)
def test_in_half_precision_values_are_added_up_in_float32(level):
    """So a circuit of all edges is the model, however large the constants that it never uses."""
    model = wrap(random_gpt2().to(torch.bfloat16), name="half")
    graph = Graph.of(model, level)
    whole = Circuit(graph, torch.ones(len(graph)) > 0, "whole")
    large = Constants(*(1000 * part for part in random_constants(model, 1, level=level)))
    tokens = tokens_of(model, 2, LENGTH)
    with ablate(model, whole, large):
        hooked = log_probs(model, tokens)
    assert torch.allclose(hooked, log_probs(model, tokens), atol=0.2)


def test_prompts_padded_on_the_left_are_refused_and_on_the_right_are_not(model):
    tokens = tokens_of(model, 2, LENGTH)
    whole = torch.ones_like(tokens)
    right = whole.clone()
    right[0, -2:] = 0
    cases = [{"m1": torch.zeros(1, model.d_model)}, random_circuit(model)]
    for what in cases:
        with ablate(model, what, random_constants(model, 1)):
            for mask in (whole, right, right.bool()):
                model.bridge(tokens, attention_mask=mask)
            for mask in (right.flip(1), right.flip(1).bool()):
                with pytest.raises(ValueError, match="padded on the left"):
                    model.bridge(tokens, attention_mask=mask)


def test_a_list_of_texts_of_several_lengths_is_refused(tiny):
    texts = ["One day Henry met Anna at the park", "Then Scott"]
    options = {"max_new_tokens": 2, "do_sample": False, "verbose": False}
    with ablate(tiny, {"m1": torch.zeros(1, tiny.d_model)}):
        assert tiny.bridge.generate(texts[0], **options)
        with pytest.raises(ValueError, match="padded on the left"):
            tiny.bridge.generate(texts, **options)


def test_constants_that_count_from_the_last_token_are_refused(gpt2):
    rows = torch.zeros(3, gpt2.d_model)
    for family in ("position", "by_position", "shared"):
        with ablate(gpt2, {"m1": (rows, {"family": family})}):
            pass
    with (
        pytest.raises(ValueError, match="of family 'from_end'"),
        ablate(gpt2, {"m1": (rows, {"family": "from_end"})}),
    ):
        pass


def test_a_circuit_refuses_text_longer_than_the_model_takes(gpt2, monkeypatch):
    monkeypatch.setattr(gpt2, "n_ctx", LENGTH)
    options = {"do_sample": False, "stop_at_eos": False, "verbose": False}
    with ablate(gpt2, random_circuit(gpt2), random_constants(gpt2, 1)):
        log_probs(gpt2, tokens_of(gpt2, 2, LENGTH))
        with pytest.raises(ValueError, match=f"takes at most {LENGTH}"):
            log_probs(gpt2, tokens_of(gpt2, 2, LENGTH + 1))
        with pytest.raises(ValueError, match=f"takes at most {LENGTH}"):
            gpt2.bridge.generate(tokens_of(gpt2, 1, LENGTH), max_new_tokens=2, **options)
