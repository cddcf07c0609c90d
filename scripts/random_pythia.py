"""Makes a small random Pythia with a tokenizer of its own, to try the notebooks on another family:
`python scripts/random_pythia.py folder`, then `make notebooks MODEL=folder BUDGET=test`.

The tokenizer is trained on the committed texts, those of the tasks often enough that every name is
one token.
"""

import csv
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedTokenizerFast, set_seed

DATA = Path(__file__).resolve().parent.parent / "data"
VOCAB = 4000
REPEATS = 20  # of the words of tasks
END = "<|endoftext|>"


def strings(thing: Any) -> Iterator[str]:
    """All texts in a JSON object."""
    if isinstance(thing, str):
        yield thing
    elif isinstance(thing, dict | list):
        for part in thing.values() if isinstance(thing, dict) else thing:
            yield from strings(part)


def texts() -> Iterator[str]:
    """The committed texts, with a space before each, as words have it in prompts."""
    for name in ("tasks.json", "fact_templates.json"):
        words = [f" {text}" for text in strings(json.loads((DATA / name).read_text("utf-8")))]
        yield from words * REPEATS
    for path in [DATA / "facts.csv", *sorted((DATA / "labelled").glob("*.csv"))]:
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.reader(file):
                yield from (f" {cell}" for cell in row)


def make_tokenizer() -> PreTrainedTokenizerFast:
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator(texts(), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token=END, eos_token=END)


def main(folder: Path) -> None:
    tokenizer = make_tokenizer()
    set_seed(0)
    config = GPTNeoXConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=256,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=0,
    )
    GPTNeoXForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
