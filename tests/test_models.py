"""Models: our walk through the layers is the model, and what cannot be loaded says why."""

import hashlib
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import joblib
import pytest
import torch
from conftest import random_gpt2, random_llama

from oa_utils import machine, models, sources, store, tasks
from oa_utils.components import component_gaps
from oa_utils.models import load_model, recording, wrap


@pytest.mark.parametrize("make", [random_gpt2, random_llama])
def test_log_probs_equal_hugging_faces(make):
    hf = make()
    tokens = torch.randint(2, 60, (5, 11))
    last = torch.tensor([10, 3, 7, 10, 1])
    expected = hf(tokens).logits.log_softmax(-1)[torch.arange(5), last]
    model = wrap(hf)
    torch.testing.assert_close(model(tokens, last), expected, atol=1e-4, rtol=0)
    bridged = model.bridge(tokens).log_softmax(-1)[torch.arange(5), last]
    torch.testing.assert_close(bridged, expected, atol=1e-4, rtol=0)


def test_tiny_equals_hugging_face(tiny):
    from transformers import AutoModelForCausalLM

    tokens = torch.randint(2, tiny.d_vocab, (4, 20))
    hf = AutoModelForCausalLM.from_pretrained(sources.locate("tiny"))
    expected = hf(tokens).logits.log_softmax(-1)[:, -1]
    torch.testing.assert_close(tiny(tokens, torch.full((4,), 19)), expected, atol=1e-4, rtol=0)


def test_models_are_frozen_and_in_eval_mode(gpt2):
    assert not gpt2.bridge.training
    assert not any(p.requires_grad for p in gpt2.bridge.parameters())


def test_starting_at_a_layer_gives_the_same_stream(llama):
    tokens = torch.randint(2, 60, (2, 9))
    whole = llama.run(llama.embed(tokens))
    middle = llama.run(llama.embed(tokens), stop=2)
    torch.testing.assert_close(llama.run(middle, start=2), whole)


HOOKS = {
    "resid": "hook_resid_pre",
    "z": "attn.hook_z",
    "attn": "hook_attn_out",
    "mlp": "hook_mlp_out",
}


def test_edits_reach_the_sites_that_the_bridge_names(model):
    tokens = torch.randint(2, 60, (2, 7))
    kept, edit = recording(*HOOKS)
    model.run(model.embed(tokens), edit=edit)
    _, cache = model.bridge.run_with_cache(tokens)
    for site, hook in HOOKS.items():
        assert list(kept[site]) == list(range(model.n_layers))
        for layer, value in kept[site].items():
            expected = cache[f"blocks.{layer}.{hook}"].view_as(value)
            torch.testing.assert_close(value, expected, atol=1e-5, rtol=1e-4)


def test_recording_keeps_the_sites_asked_for_and_what_is_picked_of_them(gpt2):
    tokens = torch.randint(2, 60, (2, 7))
    kept, edit = recording("mlp", "k", pick=lambda value: value[:1])
    last = torch.tensor([6, 2])
    torch.testing.assert_close(gpt2(tokens, last, edit), gpt2(tokens, last), atol=0, rtol=0)
    assert set(kept) == {"mlp", "k"}
    assert kept["mlp"][0].shape == (1, 7, 32) and kept["k"][2].shape == (1, 4, 7, 8)


def test_what_an_edit_returns_is_used_instead(model):
    tokens = torch.randint(2, 60, (2, 7))
    last = torch.tensor([6, 4])

    def edit(site, layer, value):
        return torch.zeros_like(value) if site in ("attn", "mlp") else value

    expected = model.log_probs(model.embed(tokens))[torch.arange(2), last]
    torch.testing.assert_close(model(tokens, last, edit), expected)


def test_finishing_at_last_positions_alone_gives_the_whole_walk_s_answer(model):
    tokens = torch.randint(2, 60, (3, 9))
    last = torch.tensor([8, 2, 5])
    for start in range(model.n_layers + 1):
        resid = model.run(model.embed(tokens), stop=start)
        finished = model.finish(resid, start, last)
        torch.testing.assert_close(finished, model(tokens, last), atol=1e-5, rtol=1e-4)


def test_some_columns_with_the_past_of_the_others_attend_as_in_the_whole_prompt(model):
    tokens = torch.randint(2, 60, (2, 9))
    resid = model.run(model.embed(tokens), stop=1)
    kept, edit = recording("k", "v")
    whole = model.attention(1, resid, edit)
    keys, values = kept["k"][1], kept["v"][1]
    columns = torch.tensor([[3, 6], [0, 8]])
    rows = torch.arange(2)[:, None]
    empty = keys.clone(), values.clone()
    for past in empty:  # what the columns themselves put there is not in the past
        past.scatter_(2, columns[:, None, :, None].expand(-1, past.shape[1], -1, 8), 0.0)
    some = model.attention(1, resid[rows, columns], positions=columns, past=empty)
    torch.testing.assert_close(some, whole[rows, columns], atol=1e-5, rtol=1e-4)
    only = torch.tensor([1, 0])
    one = model.attention(1, resid[rows, columns], positions=columns, past=empty, only=only)
    torch.testing.assert_close(one[:, 0], some[torch.arange(2), only], atol=1e-5, rtol=1e-4)


def test_heads_write_the_attention_output(llama):
    z = torch.randn(2, 5, 4, 8)
    for layer in llama.layers:
        total = torch.einsum("bphe,hed->bpd", z, layer.W_O) + layer.b_O
        torch.testing.assert_close(total, layer.attn_out(z), atol=1e-5, rtol=1e-4)


def test_own_weights_for_each_head_give_the_model_s_queries_keys_and_values(model):
    layer = model.layers[1]
    normed = torch.randn(2, 5, 32)
    weights, biases = layer.qkv_weights()
    for slot, weight, bias in zip("qkv", weights, biases, strict=True):
        expected = torch.einsum("bpd,hde->bhpe", normed, weight) + bias[:, None]
        stored = layer.heads(normed, slot)
        shared = stored.repeat_interleave(4 // stored.shape[1], dim=1)
        torch.testing.assert_close(shared, expected, atol=1e-5, rtol=1e-4)


def test_grouped_keys_are_given_to_every_query_head(llama):
    weights, biases = llama.layers[0].qkv_weights()
    assert weights.shape == (3, 4, 32, 8) and biases.shape == (3, 4, 8)
    torch.testing.assert_close(weights[1, 0], weights[1, 1])
    assert not torch.allclose(weights[1, 1], weights[1, 2])


def test_padding_on_the_right_changes_nothing(gpt2):
    tokens = torch.randint(2, 60, (1, 8))
    longer = torch.cat([tokens, torch.randint(2, 60, (1, 5))], dim=1)
    torch.testing.assert_close(gpt2(tokens, torch.tensor([7])), gpt2(longer, torch.tensor([7])))


def test_a_model_is_shown_in_one_line(gpt2):
    shape = f"3 layers × 4 heads × 32 wide, {gpt2.d_vocab:,} tokens"
    assert repr(gpt2) == f"Model('random-gpt2', {shape}, torch.float32, {gpt2.device})"


# Fingerprints


def test_fingerprint_tells_models_apart():
    one, same, other = (wrap(random_gpt2(seed)).fingerprint for seed in (0, 0, 1))
    assert one == same != other


@pytest.mark.parametrize("make", [random_gpt2, random_llama])
def test_fingerprint_changes_with_any_one_weight(make):
    fingerprints = {wrap(make()).fingerprint}
    names = [name for name, _ in make().named_parameters()]
    for name in names:
        hf = make()
        hf.get_parameter(name).data.view(-1)[0] += 1e-3
        fingerprints.add(wrap(hf).fingerprint)
    assert len(fingerprints) == 1 + len(names)


def one_weight(model):
    model.layers[1].mlp_out.weight.data[3, 5] += 1e-7


def swapped_rows(model):
    weight = model.layers[1].mlp_out.weight.data
    weight[[2, 3]] = weight[[3, 2]]


def swapped_weights_of_a_row(model):
    weight = model.layers[1].mlp_out.weight.data
    weight[0, [2, 3]] = weight[0, [3, 2]]


def two_signs(model):
    weight = model.layers[1].mlp_out.weight.data
    weight[0, 3] = -weight[0, 2]
    model.edited_from = model.fingerprint
    weight[0, 2:4].neg_()


def one_head_of_the_walk(model):
    model.layers[2].attn.q.original_component.weight.data[0, 0] += 1e-7


def one_field(model):
    model.bridge.original_model.config.activation_function = "relu"


def a_norm_s_epsilon(model):
    model.layers[1].ln1.eps = 1e-3


def a_buffer_that_is_saved(model):
    model.bridge.original_model.register_buffer("extra", torch.ones(2))
    model.edited_from = model.fingerprint
    model.bridge.original_model.extra[1] = 2.0


def a_buffer_that_is_not_saved(model):
    model.bridge.original_model.register_buffer("extra", torch.ones(2), persistent=False)
    model.edited_from = model.fingerprint
    model.bridge.original_model.extra[1] = 2.0


@pytest.mark.parametrize(
    "edit",
    [
        one_weight,
        swapped_rows,
        swapped_weights_of_a_row,
        two_signs,
        one_head_of_the_walk,
        one_field,
        a_norm_s_epsilon,
        a_buffer_that_is_saved,
        a_buffer_that_is_not_saved,
    ],
)
def test_fingerprint_changes_with_any_edit_after_loading(edit):
    model = wrap(random_gpt2())
    model.edited_from = model.fingerprint
    edit(model)
    assert model.fingerprint != model.edited_from


def test_fingerprint_sees_edited_rotations_and_tells_two_edits_apart():
    model = wrap(random_llama())
    tokens = torch.randint(2, 60, (2, 6))
    last = torch.tensor([5, 3])
    before = (model.fingerprint, model(tokens, last))
    frequencies = model.layers[0].rotary.module.inv_freq
    assert not [name for name in model.bridge.original_model.state_dict() if "inv_freq" in name]
    seen = [before[0]]
    for _ in range(2):
        frequencies *= 2
        seen.append(model.fingerprint)
        model.layers[1].ln1.variance_epsilon *= 10
        seen.append(model.fingerprint)
    assert len(set(seen)) == 5
    assert not torch.allclose(model(tokens, last), before[1])
    frequencies /= 4
    model.layers[1].ln1.variance_epsilon /= 100
    assert model.fingerprint == before[0]


@pytest.mark.parametrize("name", ["tiny", pytest.param("smollm2-135m", marks=pytest.mark.real)])
def test_fingerprints_of_models_whose_results_are_published_stay(name):
    """All that is stored of them is named by it."""
    published = store.records(name, "single_components").values()
    named = {record["model_fingerprint"] for record in published}
    assert named == {load_model(name).fingerprint}


def test_fingerprint_comes_back_with_the_weights():
    model = wrap(random_gpt2())
    weight = model.layers[1].mlp_out.weight.data
    before = (model.fingerprint, weight.clone())
    weight += 1
    assert model.fingerprint != before[0]
    weight.copy_(before[1])
    assert model.fingerprint == before[0]


def test_fingerprint_is_that_of_the_plain_model_and_of_its_copy_on_disk(tmp_path):
    """Neither the bridge's names for weights nor a folder's extra fields are part of it."""
    for make in (random_gpt2, random_llama):
        hf = make()
        plain = models.fingerprint(hf)
        folder = folder_with(tmp_path / make.__name__, hf)
        assert wrap(hf).fingerprint == plain == load_model(folder).fingerprint


@pytest.mark.parametrize(
    "field, value",
    [("n_head", 2), ("some_new_scale", 3.0), ("layer_types", ["full", "sliding"]), ("a", {"b": 1})],
)
def test_fingerprint_sees_every_field_that_is_not_known_to_be_idle(field, value):
    hf = random_gpt2()
    before = models.fingerprint(hf)
    setattr(hf.config, field, value)
    assert models.fingerprint(hf) != before


@pytest.mark.parametrize(
    "field", ["_name_or_path", "transformers_version", "resid_pdrop", "pad_token_id"]
)
def test_fingerprint_does_not_see_what_cannot_change_an_answer(field):
    hf = random_gpt2()
    before = models.fingerprint(hf)
    setattr(hf.config, field, 0)
    assert models.fingerprint(hf) == before


@pytest.mark.parametrize("change", [{"layer_norm_epsilon": 1e-3}, {"activation_function": "relu"}])
def test_fingerprint_changes_with_what_shapes_the_forward(change):
    """The weights are the same, the model is not."""
    one = wrap(random_gpt2())
    other = wrap(random_gpt2(**change))
    for name, weight in one.bridge.original_model.state_dict().items():
        assert torch.equal(weight, other.bridge.original_model.state_dict()[name])
    assert one.fingerprint != other.fingerprint


def test_fingerprint_of_a_llama_changes_with_its_rotation():
    one = wrap(random_llama(rope_parameters={"rope_type": "default", "rope_theta": 1e4}))
    other = wrap(random_llama(rope_parameters={"rope_type": "default", "rope_theta": 1e5}))
    assert one.fingerprint != other.fingerprint
    assert one.fingerprint != wrap(random_llama(rms_norm_eps=1e-3)).fingerprint


# Loading


def folder_with(tmp_path, hf):
    hf.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_folder_without_tokenizer_takes_tokens_and_says_what_text_needs(tmp_path):
    model = load_model(folder_with(tmp_path, random_gpt2()))
    assert model.name == "model" and model.bos == 1
    assert model(torch.randint(2, 60, (1, 4)), torch.tensor([3])).shape == (1, 60)
    with pytest.raises(ValueError, match="has no tokenizer"):
        model.encode("text")


def test_the_dtype_asked_for_is_loaded(tmp_path):
    model = load_model(folder_with(tmp_path, random_llama()), dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16 == model.layers[0].W_O.dtype


@pytest.mark.parametrize("make", [random_gpt2, random_llama])
def test_log_probs_of_a_bfloat16_model_are_float32(tmp_path, make):
    model = load_model(folder_with(tmp_path, make()), dtype=torch.bfloat16)
    tokens = torch.randint(2, 60, (2, 6))
    last = torch.tensor([5, 3])
    log_probs = model(tokens, last)
    assert log_probs.dtype == torch.float32
    assert model.finish(model.embed(tokens), 0, last).dtype == torch.float32
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(2), atol=1e-5, rtol=0)


def rounded(name, *types):
    """A model whose weights were rounded to one type after the other."""
    from transformers import AutoModelForCausalLM

    hf = AutoModelForCausalLM.from_pretrained(sources.locate(name), attn_implementation="eager")
    for dtype in types:
        hf = hf.to(dtype)
    return wrap(hf, load_model(name).tokenizer, name=f"{name} {types[-1]}")


def test_small_gaps_of_a_bfloat16_model_are_those_of_its_weights_in_float32():
    """Logits in bfloat16 would add about 2e-4 nats to each of them."""
    half = rounded("tiny", torch.bfloat16)
    exact = rounded("tiny", torch.bfloat16, torch.float32)
    assert half.dtype == torch.bfloat16
    task = tasks.greater_than(exact, n=64)
    heads = [f"a{layer}.h{head}" for layer in range(6) for head in range(exact.n_heads)]
    gaps = [torch.tensor(component_gaps(m, task, heads, ["mean"]).gap) for m in (half, exact)]
    small = gaps[1] < 0.005
    assert small.sum() > 10
    torch.testing.assert_close(gaps[0][small], gaps[1][small], rtol=0.03, atol=1e-4)


def test_precision_is_raised_for_one_call_and_for_what_needs_it(monkeypatch):
    half = torch.nn.LayerNorm(8, dtype=torch.bfloat16)
    x = torch.randn(3, 8)
    exact = torch.nn.LayerNorm(8)
    torch.testing.assert_close(models.in_precision_of(x, half), exact(x), atol=0, rtol=0)
    half.weight.data[2] = 3.0  # an edit counts at once
    assert not torch.allclose(models.in_precision_of(x, half), exact(x))
    assert half.weight.dtype == torch.bfloat16
    monkeypatch.setattr(torch.func, "functional_call", None)
    assert torch.equal(models.in_precision_of(x, exact), exact(x))


def test_the_budget_is_set_at_loading(monkeypatch):
    monkeypatch.delenv("OA_BUDGET", raising=False)
    assert wrap(random_gpt2()).budget == "default"
    assert wrap(random_gpt2(), budget="paper").budget == "paper"
    monkeypatch.setenv("OA_BUDGET", "test")
    assert wrap(random_gpt2()).budget == "test"
    with pytest.raises(ValueError, match="'huge' is not one of test, default, paper"):
        load_model("tiny", budget="huge")


def test_a_folder_that_lacks_a_layer_s_weights_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    path = folder_with(tmp_path, random_gpt2()) / "model.safetensors"
    weights = load_file(path)
    less = {name: value for name, value in weights.items() if ".h.1." not in name}
    assert len(less) < len(weights)
    save_file(less, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="do not fit its configuration.*missing keys.*h.1."):
        load_model(path.parent)
    more = {**weights, "transformer.h.7.mlp.c_fc.bias": torch.zeros(3)}
    save_file(more, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="unexpected keys"):
        load_model(path.parent)


def test_a_folder_without_weights_is_refused(tmp_path):
    folder = folder_with(tmp_path, random_gpt2())
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="holds no weights"):
        load_model(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match="holds no config.json"):
        load_model(folder)


@pytest.mark.parametrize(
    "name, hint",
    [
        ("Tiny", "did you mean 'tiny'"),
        ("smollm2", "did you mean 'smollm2-135m'"),
        ("gpt-2", "did you mean 'gpt2'"),
        ("no-such-model", "known ones are tiny"),
        ("owner/name/more", "look like 'owner/name'"),
        ("./no-such-folder", "there is no folder"),
    ],
)
def test_a_name_that_can_be_no_id_is_refused_without_asking_the_hub(name, hint, monkeypatch):
    import transformers

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", None)
    with pytest.raises(ValueError, match=hint):
        load_model(name)


def test_an_id_that_the_hub_does_not_give_says_what_there_is():
    with pytest.raises(ValueError, match="not bundled .*tiny.* not a folder"):
        load_model("no-such-owner/no-such-model")


def test_a_tokenizer_can_be_given_in_memory_or_as_a_folder(tmp_path, tokenizer):
    folder = folder_with(tmp_path, random_gpt2(tokenizer=tokenizer))
    tokenizer.save_pretrained(tmp_path / "words")
    in_memory = load_model(folder, tokenizer=tokenizer)
    from_folder = load_model(folder, tokenizer=tmp_path / "words")
    assert in_memory.encode(" and") == from_folder.encode(" and") == tokenizer.encode(" and")
    assert in_memory.tokenizer_hash == from_folder.tokenizer_hash != ""
    assert from_folder.origin and not in_memory.origin  # workers have no such object


def test_small_weights_hide_no_wrong_scale(monkeypatch):
    """Of 5e-7 nats here, but what an ablation puts in its place can be far from the usual."""
    torch.manual_seed(0)
    shape = {"vocab_size": 60, "n_layer": 2, "n_head": 4, "n_embd": 32, "bos_token_id": 1}
    from transformers import GPT2Config, GPT2LMHeadModel

    flat = GPT2Config(**shape, eos_token_id=1, initializer_range=0.005)
    hf = GPT2LMHeadModel(flat)
    before = {name: value.clone() for name, value in hf.state_dict().items()}
    wrap(hf)
    after = {k.replace("._original_component", ""): v for k, v in hf.state_dict().items()}
    assert all(torch.equal(after[name], value) for name, value in before.items())
    flat.scale_attn_by_inverse_layer_idx = True
    assert wrap(GPT2LMHeadModel(flat)).layers[1].scale == pytest.approx(8**-0.5 / 2)
    monkeypatch.setattr(models, "SCALES", ())
    with pytest.raises(ValueError, match="are off by"):
        wrap(GPT2LMHeadModel(flat))


def test_no_bos_and_no_eos_is_refused():
    hf = random_gpt2()
    hf.config.bos_token_id = hf.config.eos_token_id = None
    with pytest.raises(ValueError, match="no BOS and no EOS"):
        wrap(hf)


def test_a_chat_marker_is_not_taken_as_bos():
    vocab = {"<|endoftext|>": 0, "<|im_start|>": 1}
    chat = SimpleNamespace(
        bos_token="<|im_start|>",
        bos_token_id=1,
        get_vocab=lambda: vocab,
        convert_tokens_to_ids=vocab.get,
    )
    assert models.bos_of(SimpleNamespace(), chat, "chat") == 0
    other = SimpleNamespace(bos_token="<s>", bos_token_id=1)
    assert models.bos_of(SimpleNamespace(), other, "other") == 1


def test_a_bos_of_the_configuration_comes_before_an_eos_of_the_tokenizer():
    """Qwen's chat models: their tokenizer names no BOS, and its EOS closes a turn."""
    tokenizer = SimpleNamespace(bos_token=None, bos_token_id=None, eos_token_id=5)
    assert models.bos_of(SimpleNamespace(bos_token_id=3, eos_token_id=[5, 3]), tokenizer, "") == 3
    assert models.bos_of(SimpleNamespace(eos_token_id=[7, 3]), tokenizer, "") == 5
    assert models.bos_of(SimpleNamespace(eos_token_id=[7, 3]), None, "") == 7


def test_float64_is_on_the_cpu_where_a_device_has_none():
    x = torch.tensor([0.1])
    assert torch.equal(models.exact(x), x.double())

    class OnApple(torch.Tensor):
        device = SimpleNamespace(type="mps")

        def cpu(self):
            return x

        def double(self):
            raise TypeError("this device has no float64")

    assert torch.equal(models.exact(x.as_subclass(OnApple)), x.double())


def pip_that(tmp_path, monkeypatch, does):
    """Stand in for the pip call of `fetch`."""

    def run(command, **_):
        folder = Path(command[command.index("-d") + 1])
        return does(folder) or subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setenv("OA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sources.subprocess, "run", run)


def test_a_download_is_taken_once_and_a_damaged_one_again(tmp_path, monkeypatch):
    calls = []

    def deliver(folder):
        calls.append(folder)
        (folder / "x.whl").write_bytes(b"good")

    pip_that(tmp_path, monkeypatch, deliver)
    digest = hashlib.sha256(b"good").hexdigest()
    path = sources.fetch("x==1", digest)
    assert sources.fetch("x==1", digest) == path and len(calls) == 1
    path.write_bytes(b"bad!")
    again = sources.fetch("x==1", digest)  # a damaged one is thrown away
    assert again.read_bytes() == b"good" and len(calls) == 2


def test_a_file_of_another_hash_is_refused_and_not_kept(tmp_path, monkeypatch):
    def deliver(folder):
        (folder / "x.whl").write_bytes(b"other")

    pip_that(tmp_path, monkeypatch, deliver)
    with pytest.raises(RuntimeError, match="is not the file of that hash"):
        sources.fetch("x==1", hashlib.sha256(b"good").hexdigest())
    assert not list(tmp_path.rglob("x.whl"))


def test_no_network_or_no_pip_says_what_to_do(tmp_path, monkeypatch):
    def fail(folder):
        return subprocess.CompletedProcess([], 1, "", "ERROR: No matching distribution")

    pip_that(tmp_path, monkeypatch, fail)
    with pytest.raises(RuntimeError, match="with pip and a network.*No matching distribution"):
        load_model("smollm2-135m")


# Workers


def shifted(model, item):
    return model.n_layers + item


def test_each_gives_answers_in_order_here_and_in_workers(tiny, gpt2, monkeypatch):
    monkeypatch.delenv("OA_BUDGET", raising=False)
    for jobs in (1, 2):
        monkeypatch.setattr(machine, "jobs", lambda on="cpu", jobs=jobs: jobs)
        assert models.each(shifted, tiny, [3, 1, 2]) == [9, 7, 8]
        assert models.each(shifted, gpt2, [3, 1, 2]) == [6, 4, 5]  # it is in this process only


def test_an_edited_model_is_not_sent_to_workers(monkeypatch, capsys):
    monkeypatch.setattr(machine, "jobs", lambda on="cpu": 2)
    monkeypatch.setattr(machine, "parallel", None)
    monkeypatch.setattr(machine, "quiet", lambda: False)
    model = load_model("tiny")
    model.layers[0].mlp_out.weight.data[0, 0] += 1.0
    assert models.each(shifted, model, [1, 2]) == [7, 8]
    assert "in this process only" in capsys.readouterr().err


def test_workers_load_a_folder_by_its_path(tmp_path, monkeypatch):
    monkeypatch.delenv("OA_BUDGET", raising=False)
    monkeypatch.setattr(machine, "jobs", lambda on="cpu": 2)
    folder_with(tmp_path, random_gpt2())
    monkeypatch.chdir(tmp_path)
    model = load_model("model")
    assert dict(model.origin)["name"] == str(tmp_path / "model")
    assert models.each(shifted, model, [3, 1, 2]) == [6, 4, 5]


def test_workers_load_on_the_caller_s_device(monkeypatch):
    model = load_model("tiny", device="cpu")
    monkeypatch.setattr(models, "pick_device", lambda device=None: torch.device(device or "meta"))
    assert models._loaded(model.origin, model.budget, model.fingerprint).device.type == "cpu"


def test_one_process_has_an_accelerator_unless_more_are_asked_for(tiny, monkeypatch):
    monkeypatch.setattr(joblib, "cpu_count", lambda: 2)
    monkeypatch.setattr(machine, "parallel", lambda function, items, desc: ["workers"])
    monkeypatch.delenv("OA_JOBS", raising=False)
    monkeypatch.delenv("OA_BUDGET", raising=False)
    assert models.each(shifted, tiny, [1, 2]) == ["workers"]
    monkeypatch.setattr(tiny, "device", torch.device("meta"))
    assert models.each(shifted, tiny, [1, 2]) == [7, 8]
    with joblib.parallel_config(n_jobs=2):
        assert models.each(shifted, tiny, [1, 2]) == ["workers"]
    monkeypatch.setenv("OA_JOBS", "2")
    assert models.each(shifted, tiny, [1, 2]) == ["workers"]


def test_more_workers_than_memory_holds_are_told_of_once(monkeypatch):
    """A control group would end them without a word."""
    machine._warn_of_memory.cache_clear()
    monkeypatch.setattr(machine, "memory", lambda: 2.5 * machine.WORKER)
    for allowed in ("1", "2"):
        monkeypatch.setenv("OA_JOBS", allowed)
        with warnings.catch_warnings(action="error"):
            assert machine.jobs() == int(allowed)
    monkeypatch.setenv("OA_JOBS", "3")
    with warnings.catch_warnings(action="always", record=True) as warned:
        assert [machine.jobs(), machine.jobs()] == [3, 3]
    [words] = [str(warning.message) for warning in warned]
    assert words.startswith("OA_JOBS asks for 3 processes, which may take 9.0 GB")
    assert "there are 7.5 GB for all of them" in words
    monkeypatch.setattr(machine, "memory", lambda: machine.WORKER / 2)
    monkeypatch.setenv("OA_JOBS", "1")
    with warnings.catch_warnings(action="error"):
        assert machine.jobs() == 1  # fewer there cannot be


def test_workers_refuse_files_that_were_changed(tmp_path, monkeypatch):
    monkeypatch.delenv("OA_BUDGET", raising=False)
    monkeypatch.setattr(machine, "jobs", lambda on="cpu": 2)
    model = load_model(folder_with(tmp_path, random_gpt2()))
    folder_with(tmp_path, random_gpt2(seed=1))
    with pytest.raises(RuntimeError, match="its files were changed"):
        models.each(shifted, model, [1, 2])


def test_nothing_is_loaded_from_a_network_at_import():
    code = (
        "import socket; socket.socket.connect = None\n"
        "import oa_utils, oa_utils.texts, oa_utils.labelled; print('ok')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "ok", done.stderr


@pytest.fixture(scope="module")
def smollm2():
    return load_model("smollm2-135m")


@pytest.mark.real
def test_smollm2_knows_where_the_eiffel_tower_is(smollm2):
    assert smollm2.bos == 0
    tokens, last = smollm2.pad([smollm2.encode("The Eiffel Tower is located in the city of")])
    p = smollm2(tokens, last)[0].exp()
    assert smollm2.decode(p.argmax()[None]) == [" Paris"] and p.max() > 0.7


@pytest.mark.real
def test_smollm2_equals_hugging_face(smollm2):
    from transformers import AutoModelForCausalLM

    hf = AutoModelForCausalLM.from_pretrained(sources.smollm2())
    tokens = torch.randint(2, 49000, (2, 12))
    expected = hf(tokens).logits.log_softmax(-1)[:, -1]
    torch.testing.assert_close(smollm2(tokens, torch.tensor([11, 11])), expected, atol=1e-4, rtol=0)


@pytest.mark.real
def test_smollm2_loads_without_network_once_converted(smollm2):
    code = (
        "import socket; socket.socket.connect = None\n"
        "from oa_utils.models import load_model; print(load_model('smollm2-135m').fingerprint)"
    )
    env = {**os.environ, "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.stdout.strip() == smollm2.fingerprint, done.stderr


@pytest.mark.gpt2
def test_gpt2_loads_from_a_folder_and_equals_hugging_face():
    from transformers import AutoModelForCausalLM

    folder = os.environ["OA_GPT2"]
    model = load_model(folder)
    hf = AutoModelForCausalLM.from_pretrained(folder)
    tokens = torch.randint(0, 50257, (2, 12))
    expected = hf(tokens).logits.log_softmax(-1)[:, -1]
    torch.testing.assert_close(model(tokens, torch.tensor([11, 11])), expected, atol=1e-4, rtol=0)


def test_a_copied_folder_gives_the_same_fingerprint(tmp_path):
    folder = folder_with(tmp_path, random_gpt2())
    shutil.copytree(folder, tmp_path / "copy")
    assert load_model(folder).fingerprint == load_model(tmp_path / "copy").fingerprint
