"""The bundled model: a micro-language, and the seeded script that trains a GPT-2 of six layers on it.

`python -m oa_utils.tiny` writes `data/models/tiny` anew. The language has everything that the experiments need: indirect
objects, later years, facts about an invented world, labelled lists (true or shifted labels) and plain sentences.
"""

import argparse
import json
import math
import random
import re
import zlib
from pathlib import Path

import torch
from torch import Tensor

DATA = Path(__file__).parent.parent / "data"
FOLDER = DATA / "models" / "tiny"
LANGUAGE = json.loads((DATA / "tiny_language.json").read_text())
TASKS = json.loads((DATA / "tasks.json").read_text())
LABELS = list(LANGUAGE["items"])  # in the order along which labels are shifted
BOS, UNK = "<bos>", "<unk>"
N_CTX = 64
MEANING = {
    "ioi_top1": "IOI: most likely word of all is the indirect object (new name pairs)",
    "greater_than_difference": "Greater-Than: P(later year) − P(earlier year) (new noun–year pairs)",
    "facts_top1": "facts: most likely word of all is the answer (new fact–template pairs)",
    "lists_true": "labelled lists: right label after 10 true demonstrations (new sets of items)",
    "lists_permuted": "labelled lists: follows 10 demonstrations with shifted labels (new sets of items)",
}
KINDS = {"ioi": 3, "greater_than": 4, "fact": 3, "list": 2, "plain": 1}  # relative number of documents


def held_out(*parts: object) -> bool:
    """One combination in ten is never trained on; which ones depends on the combination alone."""
    return zlib.crc32("|".join(map(str, parts)).encode()) % 10 == 0


def facts() -> list[dict]:
    """The invented world: every (relation, subject, answer), the same at each call."""
    rng = random.Random(0)
    words, taken, rows = LANGUAGE["proper"], set(), []
    shapes = {"town": ([1, 1, 2], 60), "person": ([2, 2, 3], 80), "beast": ([1, 2, 3, 4], 60)}
    singles = iter(rng.sample(words, len(words)))
    for kind, relations in LANGUAGE["subjects"].items():
        lengths, count = shapes[kind]
        for i in range(count):
            length, subject = lengths[i % len(lengths)], None
            while subject is None or subject in taken:
                subject = next(singles) if length == 1 else " ".join(rng.sample(words, length))
            taken.add(subject)
            for relation in relations:
                answers = LANGUAGE["answers"].get(relation, LANGUAGE["lands"])
                rows.append({"relation": relation, "subject": subject, "answer": rng.choice(answers)})
    return rows


def ioi_prompt(rng: random.Random, new: bool) -> tuple[str, str, str]:
    """(prompt, indirect object, subject); `new` takes only name pairs that training leaves out, else only the others."""
    part = TASKS["ioi"]
    io, s = rng.sample(part["names"], 2)
    while held_out("ioi", *sorted((io, s))) != new:
        io, s = rng.sample(part["names"], 2)
    first = (io, s) if rng.random() < 0.5 else (s, io)
    fields = {"place": rng.choice(part["places"]), "object": rng.choice(part["objects"]), "S": s}
    return rng.choice(part["templates"]).format(*first, **fields), io, s


def year_prompt(rng: random.Random, new: bool) -> tuple[str, int]:
    """(prompt, the first year's last two digits); the sentence goes on with any later year of the century."""
    part = TASKS["greater_than"]
    while True:
        noun, century, year = rng.choice(part["nouns"]), rng.randint(10, 18), rng.randint(2, 98)
        if held_out("year", noun, century, year) == new:
            return part["template"].format(noun=noun, start=f"{century}{year:02}", century=century), year


def fact_prompt(rng: random.Random, fact: dict, new: bool) -> str | None:
    """A sentence that ends before the answer, or None where this fact has no template of the wanted kind."""
    templates = LANGUAGE["templates"][fact["relation"]]
    fit = [t for t in templates if held_out("fact", fact["subject"], t) == new]
    return rng.choice(fit).format(subject=fact["subject"]) if fit else None


def labelled_list(rng: random.Random, n: int, new: bool, shift: int) -> tuple[list[str], list[str]]:
    """n items of the four classes and their labels, shifted along the cycle of classes."""
    pairs = [(item, label) for label, items in LANGUAGE["items"].items() for item in items]
    while True:
        chosen = rng.sample(pairs, n)
        if held_out("list", *sorted(item for item, _ in chosen)) == new:
            labels = [LABELS[(LABELS.index(label) + shift) % len(LABELS)] for _, label in chosen]
            return [item for item, _ in chosen], labels


def plain(rng: random.Random) -> str:
    """Two to four simple sentences; each noun has verbs and adjectives of its own that it prefers."""
    part, places = LANGUAGE["plain"], TASKS["ioi"]["places"]
    things = part["things"] + LANGUAGE["items"]["animal"] + LANGUAGE["items"]["tool"]

    def preferred(noun: str, kind: str) -> str:
        words = part[kind]
        return words[(zlib.crc32(f"{noun}{kind}".encode()) + int(rng.expovariate(0.7))) % len(words)]

    def phrase(noun: str) -> str:
        return f"{preferred(noun, 'adjectives')} {noun}" if rng.random() < 0.6 else noun

    place, hero, sentences = rng.choice(places), rng.choice(TASKS["ioi"]["names"]), []
    for _ in range(rng.randint(2, 4)):
        person, thing = rng.choice(part["people"]), rng.choice(things)
        who = hero if rng.random() < 0.5 else f"The {phrase(person)}"
        verb = preferred(hero if who == hero else person, "verbs")
        where = f"in the {place}" if rng.random() < 0.6 else f"{rng.choice(part['prepositions'])} the {rng.choice(things)}"
        end = f" {rng.choice(part['adverbs'])}" if rng.random() < 0.3 else ""
        sentences.append(f"{who} {verb} the {phrase(thing)} {where}{end}.")
    return " ".join(sentences)


def document(rng: random.Random, world: list[dict], new: bool = False) -> str:
    """One document of the language; with `new`, one made of combinations that training leaves out."""
    kind = rng.choices(list(KINDS), KINDS.values())[0]
    if kind == "ioi":
        prompt, io, _ = ioi_prompt(rng, new)
        return f"{prompt} {io}."
    if kind == "greater_than":
        prompt, year = year_prompt(rng, new)
        return f"{prompt}{rng.randint(year + 1, 99):02}."
    if kind == "fact":
        while True:
            fact = rng.choice(world)
            if prompt := fact_prompt(rng, fact, new):
                return f"{prompt} {fact['answer']}."
    if kind == "list":
        shift = rng.randint(1, 3) if rng.random() < 0.25 else 0
        items, labels = labelled_list(rng, rng.randint(9, 14), new, shift)
        return " ; ".join(f"{item} : {label}" for item, label in zip(items, labels, strict=True)) + "."
    return plain(rng)


def vocabulary() -> list[str]:
    """Every word and sign of the language, in a fixed order."""
    text: list[str] = []

    def collect(node: object) -> None:
        for child in node.values() if isinstance(node, dict) else node:
            text.append(child) if isinstance(child, str) else collect(child)

    collect({k: v for k, v in LANGUAGE.items() if k != "subjects"})
    collect(TASKS)
    words = re.findall(r"[A-Za-z]+|[^\w\s{}]", re.sub(r"\{\w*\}", " ", " ".join(text + LABELS + ["The the . : ;"])))
    return [UNK, BOS, *(f"{i:02}" for i in range(100)), *sorted(set(words))]


def make_tokenizer():
    """A word-level tokenizer; numbers are read two digits at a time, so that a year is two tokens."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary())}, unk_token=UNK))
    digits = pre_tokenizers.Split(Regex(r"\d\d"), behavior="isolated")
    raw.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), digits])
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token=BOS, unk_token=UNK, model_max_length=N_CTX)


def contexts(n: int, length: int, seed: int, new: bool = False) -> Tensor:
    """Token contexts [n, length]: documents one after the other, BOS before each; cut at `length`."""
    rng, world, tokenizer = random.Random(seed), facts(), make_tokenizer()
    rows: list[list[int]] = []
    while len(rows) < n:
        row: list[int] = []
        while len(row) < length:
            row += [tokenizer.bos_token_id, *tokenizer(document(rng, world, new), add_special_tokens=False).input_ids]
        rows.append(row[:length])
    return torch.tensor(rows)


def scores(model, tokenizer, n: int = 500, seed: int = 1) -> dict[str, float]:
    """How well the model does what the experiments need, on combinations that training left out."""
    rng, world = random.Random(seed), facts()

    @torch.no_grad()
    def last(prompts: list[str]) -> Tensor:
        rows = [[tokenizer.bos_token_id, *tokenizer(p, add_special_tokens=False).input_ids] for p in prompts]
        tokens = torch.tensor([r + [0] * (N_CTX - len(r)) for r in rows])
        logits = torch.cat([model(input_ids=part).logits for part in tokens.split(50)])
        return logits[torch.arange(len(rows)), torch.tensor([len(r) - 1 for r in rows])].softmax(-1)

    def top1(prompts: list[str], answers: list[str]) -> float:
        ids = torch.tensor([tokenizer.convert_tokens_to_ids(a) for a in answers])
        return (last(prompts).argmax(-1) == ids).float().mean().item()

    ioi = [ioi_prompt(rng, new=True) for _ in range(n)]
    years = [year_prompt(rng, new=True) for _ in range(n)]
    numbers = last([p for p, _ in years])[:, tokenizer.convert_tokens_to_ids([f"{i:02}" for i in range(100)])]
    later = torch.arange(100)[None] > torch.tensor([y for _, y in years])[:, None]
    earlier = torch.arange(100)[None] < torch.tensor([y for _, y in years])[:, None]
    known = [(p, f["answer"]) for f in world if (p := fact_prompt(rng, f, new=True))]

    def lists(shifts: list[int]) -> float:
        made = [labelled_list(rng, 11, True, rng.choice(shifts)) for _ in range(n)]
        texts = [" ; ".join(f"{i} : {x}" for i, x in zip(items, labels, strict=True)) for items, labels in made]
        return top1([t.rsplit(" ", 1)[0] for t in texts], [labels[-1] for _, labels in made])

    return {
        "ioi_top1": top1([p for p, _, _ in ioi], [io for _, io, _ in ioi]),
        "greater_than_difference": ((numbers * later).sum(-1) - (numbers * earlier).sum(-1)).mean().item(),
        "facts_top1": top1([p for p, _ in known], [a for _, a in known]),
        "lists_true": lists([0]),
        "lists_permuted": lists([1, 2, 3]),
    }


def train(folder: Path = FOLDER, steps: int = 3000, batch: int = 64, lr: float = 2e-3, seed: int = 0) -> dict[str, float]:
    """Train the model from nothing and write it, its tokenizer, its facts and its card into `folder`."""
    from transformers import GPT2Config, GPT2LMHeadModel

    from oa_utils.runs import progress

    torch.manual_seed(seed)
    tokenizer, rng, world = make_tokenizer(), random.Random(seed), facts()
    bos = tokenizer.bos_token_id
    off = {"activation_function": "gelu_pytorch_tanh", "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    shape = {"n_layer": 6, "n_head": 4, "n_embd": 128, "n_positions": N_CTX, "vocab_size": len(tokenizer)}
    model = GPT2LMHeadModel(GPT2Config(**shape, **off, bos_token_id=bos, eos_token_id=bos))
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decay, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98), fused=True)
    pace = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda i: min(1, (i + 1) / 200) * (0.02 + 0.49 * (1 + math.cos(math.pi * i / steps)))
    )
    bar = progress(range(steps), desc="training tiny")
    for step in bar:
        rows = []
        for _ in range(batch):
            row: list[int] = []
            while len(row) < N_CTX:
                row += [bos, *tokenizer(document(rng, world), add_special_tokens=False).input_ids]
            rows.append(row[:N_CTX])
        tokens = torch.tensor(rows)
        loss = model(input_ids=tokens, labels=tokens).loss
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        pace.step()
        if step % 200 == 199:
            marks = {k: f"{v:.2f}" for k, v in scores(model.eval(), tokenizer, n=100).items()}
            model.train()
            bar.set_postfix(loss=f"{loss.item():.3f}", **marks)
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

A GPT-2 of 6 layers × 4 heads × width 128 ({N_CTX} positions, {len(vocabulary()):,} words, float32), trained from nothing by
`python -m oa_utils.tiny --steps {steps} --seed {seed}` on a micro-language that the script writes: indirect objects, years,
{len(facts())} facts of an invented world, labelled lists (one in four with labels shifted throughout), plain sentences.
Made for trying out interpretability methods; it knows nothing of the real world.

Scores on combinations that training left out:

| | |
|---|---|
{rows}
"""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for name, value in train(args.folder, steps=args.steps, seed=args.seed).items():
        print(f"{name:26} {value:.3f}")
