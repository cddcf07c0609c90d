"""Writes the README's table of model families, from a random model of each, and what circuits
cost, by formula: `python scripts/families.py`.

`FAMILIES` is also what the tests of families run on: a new family is one entry. `--check` changes
nothing and fails where a table is not current.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from readme import write_parts

import oa_utils as oa

README = Path(__file__).resolve().parent.parent / "README.md"
SMALL = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "pad_token_id": None,
}
GROUPED = {"num_key_value_heads": 2}
LOCAL_AND_GLOBAL = ["sliding_attention", "full_attention", "sliding_attention"]


class Family(NamedTuple):
    name: str
    models: str  # of this shape, for the table
    config: str  # the class of transformers
    options: dict[str, Any] = {}  # beside SMALL

    def make(self, seed: int = 0, **options: Any) -> Any:
        """A random model whose weights are large enough that every component matters."""
        torch.manual_seed(seed)
        config = getattr(transformers, self.config)(**SMALL | self.options | options)
        hf = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        for parameter in hf.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
        return hf.eval()


FAMILIES = [
    Family("GPT-2", "GPT-2 small to XL, DistilGPT-2", "GPT2Config"),
    Family("Llama", "Llama 2 to 3.2, SmolLM2, TinyLlama", "LlamaConfig", GROUPED),
    Family("Mistral", "Mistral 7B", "MistralConfig", GROUPED | {"sliding_window": 32}),
    Family("Qwen2", "Qwen2, Qwen2.5", "Qwen2Config", GROUPED),
    Family("Qwen3", "Qwen3", "Qwen3Config", GROUPED | {"head_dim": 16}),
    Family("GPT-NeoX", "Pythia, GPT-NeoX-20B", "GPTNeoXConfig"),
    Family(
        "GPT-NeoX, sequential",
        "RedPajama-INCITE",
        "GPTNeoXConfig",
        {"use_parallel_residual": False},
    ),
    Family("GPT-J", "GPT-J-6B", "GPTJConfig", {"rotary_dim": 4}),
    Family("Phi", "Phi-1, Phi-1.5, Phi-2", "PhiConfig", GROUPED),
    Family(
        "Phi-3",
        "Phi-3, Phi-4",
        "Phi3Config",
        GROUPED | {"original_max_position_embeddings": 64},
    ),
    Family("OPT", "OPT-125m, 1.3b to 66b", "OPTConfig", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    Family("OLMo-2", "OLMo-2", "Olmo2Config", GROUPED),
    Family(
        "Gemma-2",
        "Gemma-2",
        "Gemma2Config",
        GROUPED | {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 32},
    ),
    Family(
        "Gemma-3",
        "Gemma-3 270m and 1b",
        "Gemma3TextConfig",
        GROUPED
        | {
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 32,
            "layer_types": LOCAL_AND_GLOBAL,
        },
    ),
]


def families() -> str:
    """The table of what each family can do."""
    return ""


PARTS: dict[str, Callable[[], str]] = {"families": families}


if __name__ == "__main__":
    write_parts(PARTS, "--check" in sys.argv[1:])
