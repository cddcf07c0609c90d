"""Small models for the tests: random ones from configs, and the bundled one.

Nothing here touches a network. Every call of a function of `oa_utils` is checked against its
annotations, shapes included.
"""

import os
from collections import Counter

import jaxtyping
import pytest
import torch
from beartype import BeartypeConf, beartype

check_types = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int is a float
jaxtyping.install_import_hook("oa_utils", "conftest.check_types")  # before oa_utils is imported

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OA_QUIET", "1")
LEFT_OUT: Counter[str] = Counter()
WHY = {
    "real": "need SmolLM2 (make test-real)",
    "gpt2": "need GPT-2's weights (make test-gpt2 GPT2=folder)",
}


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
    config = {
        "vocab_size": len(tokenizer) if tokenizer else vocab,
        "n_layer": 3,
        "n_head": 4,
        "n_embd": 32,
        "n_positions": 64,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 1,
    }
    return enlarge(GPT2LMHeadModel(GPT2Config(**config | shape)))


def random_llama(seed=0, vocab=60, tokenizer=None, kv_heads=2, **shape):
    """A random Llama with grouped-query attention."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = {
        "vocab_size": len(tokenizer) if tokenizer else vocab,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": kv_heads,
        "hidden_size": 32,
        "intermediate_size": 48,
        "bos_token_id": 1,
    }
    return enlarge(LlamaForCausalLM(LlamaConfig(**config | shape)))


def enlarge(model):
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model.eval()


@pytest.fixture(scope="session")
def tokenizer():
    from oa_utils.language import make_tokenizer

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
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(2, model.d_vocab, (n, length), generator=generator)
    tokens[:, 0] = model.bos
    return tokens


@pytest.fixture(scope="session")
def tiny():
    from oa_utils.models import load_model

    return load_model("tiny")


def script_of(name):
    """A file of `scripts`, which is no package."""
    import importlib.util
    import sys
    from pathlib import Path

    folder = Path(__file__).resolve().parent.parent / "scripts"
    sys.path.insert(0, str(folder))  # some import their neighbours
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    sys.path.remove(str(folder))
    return script


def families_script():
    """`scripts/families.py`, which has the list of model families."""
    return script_of("families")


@pytest.fixture
def planted():
    """A masked model in which only a few edges matter."""
    from toys import planted_model

    return planted_model()


@pytest.fixture
def dense():
    """A masked model in which every edge matters."""
    from toys import dense_model

    return dense_model()


@pytest.fixture
def task(planted):
    """Prompts for both; files with other models have their own."""
    from toys import make_task

    return make_task(planted.model)
