"""Writes the README's table of model families, from a random model of each, and what circuits
cost, by formula: `python scripts/families.py`.

`FAMILIES` is also what the tests of families run on: a new family is one entry. `--check` changes
nothing and fails where a table is not current.
"""

import json
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers
from readme import ROOT, write_parts

import oa_utils as oa
from oa_utils.masked import example_floats

COLUMNS = ("components", "edges", "vertices", "tracing", "lenses")
TOKENS = 20  # of a prompt in the table of costs
EXAMPLES = 12  # masks of a step, each on a prompt
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
    Family("Gemma", "Gemma 2b and 7b", "GemmaConfig", GROUPED | {"head_dim": 16}),
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


def table(header: list[str], rows: list[list[str]]) -> str:
    """Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def families() -> str:
    """What each family can do, asked of a random model of it."""
    rows = []
    for family in FAMILIES:
        answer = oa.supports(oa.models.wrap(family.make(), name=family.name))
        instead = "whole layers" if answer.layers else "–"
        marks = {name: "✓" if able else "–" for name, able in answer._asdict().items()}
        marks |= {name: instead for name in ("edges", "vertices") if not getattr(answer, name)}
        rows.append([family.name, family.models, *(marks[column] for column in COLUMNS)])
    return table(["family", "models", *COLUMNS], rows)


# ---- what circuits cost


def benchmarked() -> str:
    """A UGS step of GPT-2-small's shape, from the last `make bench`."""
    rows = json.loads((ROOT / "benchmarks" / "masked.json").read_text("utf-8"))["rows"]
    step = next(row for row in rows if row["what"] == "UGS step")
    return f"{step['ours']:.2g} s on one core, {step['net_gb']:.2g} GB"


class Shape(NamedTuple):
    name: str
    n_layers: int
    n_heads: int
    d_model: int
    d_mlp: int
    d_vocab: int
    d_head: int = 64
    gated: bool = False
    parallel: bool = False
    measured: str = ""  # a step of EXAMPLES, where it was run


SHAPES = [
    Shape("GPT-2-small", 12, 12, 768, 3072, 50257, measured=benchmarked()),
    Shape("GPT-2-medium", 24, 16, 1024, 4096, 50257),
    Shape("GPT-2-large", 36, 20, 1280, 5120, 50257),
    Shape("GPT-2-XL", 48, 25, 1600, 6400, 50257),
    Shape("Pythia-410m", 24, 16, 1024, 4096, 50304, parallel=True),
    Shape(
        "SmolLM2-135M", 30, 9, 576, 1536, 49152, gated=True, measured="2.8 s on two cores, 2.5 GB"
    ),
    Shape("Llama-3.2-1B", 16, 32, 2048, 8192, 128256, gated=True),
    Shape("Llama-3.1-8B", 32, 32, 4096, 14336, 128256, d_head=128, gated=True),
]


def step_flops(shape: Shape, graph: oa.Graph) -> float:
    """Of a UGS step, two for each multiply-add: a mixed edge costs its width forward and twice that
    backward (to the writer and to α), what frozen weights multiply as much backward as forward."""
    d, d_head = shape.d_model, shape.d_head
    mixing = graph.n_edges * d
    heads = 4 * shape.n_layers * shape.n_heads * d * d_head
    scores = 2 * shape.n_layers * shape.n_heads * TOKENS * d_head
    mlps = (3 if shape.gated else 2) * shape.n_layers * d * shape.d_mlp
    unembedding = d * shape.d_vocab  # at the last token alone
    by_token = 3 * mixing + 2 * (heads + scores + mlps)
    return 2 * EXAMPLES * (TOKENS * by_token + 2 * unembedding)


def costs() -> str:
    """Edges, memory and arithmetic of a UGS step, by formula, beside what was measured."""
    rows = []
    for shape in SHAPES:
        graph = oa.Graph.of(shape)
        size = f"{shape.n_layers} × {shape.n_heads} × {shape.d_model:,}"
        example = 4 * example_floats(shape, graph, TOKENS) / 1e6
        flops = step_flops(shape, graph) / 1e12
        row = [shape.name, size, f"{len(graph):,}", f"{example:,.0f} MB", f"{flops:.2g} TFLOP"]
        rows.append([*row, shape.measured])
    header = ["model", "layers × heads × width", "edges", "one example", "a step", "measured"]
    return table(header, rows)


PARTS: dict[str, Callable[[], str]] = {"families": families, "costs": costs}


if __name__ == "__main__":
    write_parts(PARTS, "--check" in sys.argv[1:])
