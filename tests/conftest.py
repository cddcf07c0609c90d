"""Small models for the tests: random ones from configs, and the bundled one. Nothing here touches a network."""

import os
from collections import Counter

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OA_QUIET", "1")
LEFT_OUT: Counter[str] = Counter()
WHY = {"real": "need SmolLM2 (make test-real)", "gpt2": "need GPT-2's weights (make test-gpt2 GPT2=folder)"}


def pytest_deselected(items):
    for item in items:
        for mark in WHY:
            LEFT_OUT[mark] += item.get_closest_marker(mark) is not None


def pytest_terminal_summary(terminalreporter):
    for mark, n in LEFT_OUT.items():
        if n:
            terminalreporter.write_line(f"left out: {n} tests that {WHY[mark]}")


def random_gpt2(seed=0, vocab=60, tokenizer=None, **shape):
    """A random GPT-2 whose weights are large enough that every component matters."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    shape = {"n_layer": 3, "n_head": 4, "n_embd": 32, "n_positions": 64} | shape
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 1}
    return enlarge(GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer) if tokenizer else vocab, **shape, **off)))


def random_llama(seed=0, vocab=60, tokenizer=None, kv_heads=2, **shape):
    """A random Llama with grouped-query attention."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    shape = {"num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 48} | shape
    size = len(tokenizer) if tokenizer else vocab
    return enlarge(LlamaForCausalLM(LlamaConfig(vocab_size=size, num_key_value_heads=kv_heads, bos_token_id=1, **shape)))


def enlarge(model):
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model.eval()


@pytest.fixture(scope="session")
def tokenizer():
    from oa_utils.tiny import make_tokenizer

    return make_tokenizer()


@pytest.fixture(scope="session")
def gpt2(tokenizer):
    from oa_utils.models import wrap

    return wrap(random_gpt2(tokenizer=tokenizer), tokenizer, name="random-gpt2")


@pytest.fixture(scope="session")
def llama(tokenizer):
    from oa_utils.models import wrap

    return wrap(random_llama(tokenizer=tokenizer), tokenizer, name="random-llama")


@pytest.fixture(params=["gpt2", "llama"])
def model(request):
    """Either random model."""
    return request.getfixturevalue(request.param)


@pytest.fixture(autouse=True)
def own_store(tmp_path, monkeypatch):
    """No test finds what another one stored."""
    monkeypatch.setenv("OA_STORE", str(tmp_path))


def tokens_of(model, n=40, length=9, seed=0):
    """Random contexts behind BOS."""
    tokens = torch.randint(2, model.d_vocab, (n, length), generator=torch.Generator().manual_seed(seed))
    tokens[:, 0] = model.bos
    return tokens


@pytest.fixture(scope="session")
def tiny():
    from oa_utils.models import load_model

    return load_model("tiny")
