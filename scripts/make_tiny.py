"""Makes the bundled model: a GPT-2 of six layers, trained from nothing on `oa_utils.language`.

`python scripts/make_tiny.py` writes `data/models/tiny` anew (about half an hour on two cores).
"""

import argparse
import json
import math
import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oa_utils import language
from oa_utils.machine import progress
from oa_utils.store import data_folder

FOLDER = data_folder() / "models" / "tiny"
WARM_UP = 200  # steps
MEANING = {
    "ioi_top1": "IOI: most likely word of all is the indirect object (new name pairs)",
    "greater_than_difference": (
        "Greater-Than: P(later year) − P(earlier year) (new noun–year pairs)"
    ),
    "facts_top1": "facts: most likely word of all is the answer (new fact–template pairs)",
    "lists_true": ("labelled lists: right label after 10 true demonstrations (new sets of items)"),
    "lists_permuted": (
        "labelled lists: follows 10 demonstrations with shifted labels (new sets of items)"
    ),
}


# ---- scores


@torch.no_grad()
def next_words(model: Any, tokenizer: Any, prompts: list[str]) -> Tensor:
    """Probabilities of the word that follows each prompt."""
    bos = tokenizer.bos_token_id
    rows = [[bos, *tokenizer(text, add_special_tokens=False).input_ids] for text in prompts]
    tokens = torch.tensor([row + [0] * (language.N_CTX - len(row)) for row in rows])
    logits = torch.cat([model(input_ids=part).logits for part in tokens.split(50)])
    last = torch.tensor([len(row) - 1 for row in rows])
    return logits[torch.arange(len(rows)), last].softmax(-1)


def top1(model: Any, tokenizer: Any, prompts: list[str], answers: list[str]) -> float:
    """Share of prompts whose most likely next word is the answer."""
    ids = torch.tensor(tokenizer.convert_tokens_to_ids(answers))
    return (next_words(model, tokenizer, prompts).argmax(-1) == ids).float().mean().item()


def scores(model: Any, tokenizer: Any, n: int = 500, seed: int = 1) -> dict[str, float]:
    """How well the model does what the experiments need, on combinations that training left out."""
    rng = random.Random(seed)
    ioi = [language.ioi_prompt(rng, new=True) for _ in range(n)]
    years = [language.year_prompt(rng, new=True) for _ in range(n)]
    asked = [(language.fact_prompt(rng, fact, new=True), fact) for fact in language.facts()]
    known = [(prompt, fact["answer"]) for prompt, fact in asked if prompt is not None]
    return {
        "ioi_top1": top1(
            model, tokenizer, [prompt for prompt, _, _ in ioi], [io for _, io, _ in ioi]
        ),
        "greater_than_difference": later_minus_earlier(model, tokenizer, years),
        "facts_top1": top1(
            model, tokenizer, [prompt for prompt, _ in known], [answer for _, answer in known]
        ),
        "lists_true": last_labels(model, tokenizer, rng, n, shifts=[0]),
        "lists_permuted": last_labels(model, tokenizer, rng, n, shifts=[1, 2, 3]),
    }


def later_minus_earlier(model: Any, tokenizer: Any, prompts: list[tuple[str, int]]) -> float:
    """P(later year) − P(earlier year), of prompts and the years that stand in them."""
    numbers = tokenizer.convert_tokens_to_ids([f"{i:02}" for i in range(100)])
    p = next_words(model, tokenizer, [prompt for prompt, _ in prompts])[:, numbers]
    start = torch.tensor([year for _, year in prompts])[:, None]
    later = torch.arange(100)[None] > start
    earlier = torch.arange(100)[None] < start
    return ((p * later).sum(-1) - (p * earlier).sum(-1)).mean().item()


def last_labels(model: Any, tokenizer: Any, rng: random.Random, n: int, shifts: list[int]) -> float:
    """Share of lists of eleven items whose last label, shifted like the others, is most likely."""
    prompts = []
    answers = []
    for _ in range(n):
        items, labels = language.labelled_list(rng, 11, new=True, shift=rng.choice(shifts))
        prompts.append(language.list_text(items, labels).rsplit(" ", 1)[0])
        answers.append(labels[-1])
    return top1(model, tokenizer, prompts, answers)


# ---- training


def untrained(tokenizer: Any) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=6,
        n_head=4,
        n_embd=128,
        n_positions=language.N_CTX,
        vocab_size=len(tokenizer),
        activation_function="gelu_pytorch_tanh",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.bos_token_id,
    )
    return GPT2LMHeadModel(config)


def train(
    folder: Path = FOLDER, steps: int = 3000, batch: int = 64, seed: int = 0
) -> dict[str, float]:
    """Trains the model and writes it, its tokenizer, its scores and its card into `folder`."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    world = language.facts()
    tokenizer = language.make_tokenizer()
    model = untrained(tokenizer)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [
        {"params": matrices, "weight_decay": 0.05},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimiser = torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.98), fused=True)

    def pace(step: int) -> float:
        warm = min(1, (step + 1) / WARM_UP)
        return warm * (0.02 + 0.49 * (1 + math.cos(math.pi * step / steps)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, pace)
    bar = progress(range(steps), desc="training tiny")
    for step in bar:
        rows = [language.context(rng, world, tokenizer, language.N_CTX) for _ in range(batch)]
        tokens = torch.tensor(rows)
        loss = model(input_ids=tokens, labels=tokens).loss
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        if step % 200 == 199:
            marks = scores(model.eval(), tokenizer, n=100)
            model.train()
            shown = {name: f"{value:.2f}" for name, value in marks.items()}
            bar.set_postfix(loss=f"{loss.item():.3f}", **shown)
    result = scores(model.eval(), tokenizer, n=1000)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "scores.json").write_text(json.dumps(result, indent=1) + "\n")
    (folder / "README.md").write_text(card(result, steps, seed))
    return result


def card(result: dict[str, float], steps: int, seed: int) -> str:
    """The model card."""
    rows = "\n".join(f"| {MEANING[name]} | {value:.3f} |" for name, value in result.items())
    return f"""---
license: mit
language: en
---
# tiny

A GPT-2 of 6 layers × 4 heads × width 128 ({language.N_CTX} positions,
{len(language.vocabulary()):,} words, float32), trained from nothing by
`python scripts/make_tiny.py --steps {steps} --seed {seed}` on the micro-language of
`oa_utils/language.py`: indirect objects, years, {len(language.facts())} facts of an invented world,
labelled lists (one in four with labels shifted throughout), plain sentences.
Made for trying out interpretability methods; it knows nothing of the real world.

Scores on combinations that training left out:

| | |
|---|---|
{rows}
"""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for name, value in train(options.folder, steps=options.steps, seed=options.seed).items():
        print(f"{name:26} {value:.3f}")
