"""The micro-language of the bundled model: its world, its documents, its words.

It has everything that the experiments need: indirect objects, later years, facts about an invented
world, labelled lists (with true or shifted labels) and plain sentences. `scripts/make_tiny.py`
trains the bundled model on it.
"""

import json
import random
import re
import zlib
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from oa_utils.models import Model
from oa_utils.store import data_folder
from oa_utils.tasks import TEXTS

LANGUAGE = json.loads((data_folder() / "tiny_language.json").read_text("utf-8"))
LABELS = list(LANGUAGE["items"])  # in the order along which labels are shifted
BOS = "<bos>"
UNKNOWN = "<unk>"
N_CTX = 64
KINDS = {"ioi": 3, "greater_than": 4, "fact": 3, "list": 2, "plain": 1}  # relative frequencies
SUBJECTS = {  # of each kind of subject: lengths in words, taken in turn, and how many there are
    "town": ([1, 1, 2], 60),
    "person": ([2, 2, 3], 80),
    "beast": ([1, 2, 3, 4], 60),
}


# ---- documents


def held_out(*parts: object) -> bool:
    """One combination in ten is never trained on; which ones depends on the combination alone."""
    return zlib.crc32("|".join(map(str, parts)).encode()) % 10 == 0


def facts() -> list[dict[str, str]]:
    """The invented world: every (relation, subject, answer), the same at each call."""
    rng = random.Random(0)
    words = LANGUAGE["proper"]
    single_words = iter(rng.sample(words, len(words)))
    subjects: set[str] = set()
    rows = []
    for kind, relations in LANGUAGE["subjects"].items():
        lengths, count = SUBJECTS[kind]
        for i in range(count):
            length = lengths[i % len(lengths)]
            subject = None
            while subject is None or subject in subjects:
                if length == 1:
                    subject = next(single_words)
                else:
                    subject = " ".join(rng.sample(words, length))
            subjects.add(subject)
            for relation in relations:
                answers = LANGUAGE["answers"].get(relation, LANGUAGE["lands"])
                answer = rng.choice(answers)
                rows.append({"relation": relation, "subject": subject, "answer": answer})
    return rows


def ioi_prompt(rng: random.Random, new: bool) -> tuple[str, str, str]:
    """(prompt, indirect object, subject); `new` takes only pairs of names that training leaves out,
    else only the others."""
    part = TEXTS["ioi"]
    io, subject = rng.sample(part["names"], 2)
    while held_out("ioi", *sorted((io, subject))) != new:
        io, subject = rng.sample(part["names"], 2)
    first_names = (io, subject) if rng.random() < 0.5 else (subject, io)
    place = rng.choice(part["places"])
    thing = rng.choice(part["objects"])
    template = rng.choice(part["templates"])
    return template.format(*first_names, place=place, object=thing, S=subject), io, subject


def year_prompt(rng: random.Random, new: bool) -> tuple[str, int]:
    """(prompt, the first year's last two digits); the sentence goes on with any later year of the
    century."""
    part = TEXTS["greater_than"]
    while True:
        noun = rng.choice(part["nouns"])
        century = rng.randint(10, 18)
        year = rng.randint(2, 98)
        if held_out("year", noun, century, year) == new:
            start = f"{century}{year:02}"
            return part["template"].format(noun=noun, start=start, century=century), year


def fact_prompt(rng: random.Random, fact: dict[str, str], new: bool) -> str | None:
    """A sentence that ends before the answer, or None where no template is of the wanted kind."""
    templates = LANGUAGE["templates"][fact["relation"]]
    wanted = [text for text in templates if held_out("fact", fact["subject"], text) == new]
    return rng.choice(wanted).format(subject=fact["subject"]) if wanted else None


def labelled_list(rng: random.Random, n: int, new: bool, shift: int) -> tuple[list[str], list[str]]:
    """n items of the four classes and their labels, shifted along the cycle of classes."""
    pairs = [(item, label) for label, items in LANGUAGE["items"].items() for item in items]
    while True:
        chosen = rng.sample(pairs, n)
        items = [item for item, _ in chosen]
        if held_out("list", *sorted(items)) == new:
            places = [(LABELS.index(label) + shift) % len(LABELS) for _, label in chosen]
            return items, [LABELS[place] for place in places]


def list_text(items: list[str], labels: list[str]) -> str:
    return " ; ".join(f"{item} : {label}" for item, label in zip(items, labels, strict=True))


def plain_text(rng: random.Random) -> str:
    """Two to four simple sentences about one place and one hero."""
    place = rng.choice(TEXTS["ioi"]["places"])
    hero = rng.choice(TEXTS["ioi"]["names"])
    return " ".join(_sentence(rng, place, hero) for _ in range(rng.randint(2, 4)))


def _sentence(rng: random.Random, place: str, hero: str) -> str:
    part = LANGUAGE["plain"]
    things = part["things"] + LANGUAGE["items"]["animal"] + LANGUAGE["items"]["tool"]
    person = rng.choice(part["people"])
    thing = rng.choice(things)
    by_hero = rng.random() < 0.5
    who = hero if by_hero else f"The {_phrase(rng, person)}"
    verb = _preferred(rng, hero if by_hero else person, "verbs")
    if rng.random() < 0.6:
        where = f"in the {place}"
    else:
        where = f"{rng.choice(part['prepositions'])} the {rng.choice(things)}"
    how = f" {rng.choice(part['adverbs'])}" if rng.random() < 0.3 else ""
    return f"{who} {verb} the {_phrase(rng, thing)} {where}{how}."


def _preferred(rng: random.Random, noun: str, kind: str) -> str:
    """A word for a noun; each noun has verbs and adjectives of its own that it prefers."""
    words = LANGUAGE["plain"][kind]
    first_choice = zlib.crc32(f"{noun}{kind}".encode())
    return words[(first_choice + int(rng.expovariate(0.7))) % len(words)]


def _phrase(rng: random.Random, noun: str) -> str:
    return f"{_preferred(rng, noun, 'adjectives')} {noun}" if rng.random() < 0.6 else noun


def document(rng: random.Random, world: list[dict[str, str]]) -> str:
    """One document to train on: none of the combinations that are held out."""
    kind = rng.choices(list(KINDS), KINDS.values())[0]
    if kind == "ioi":
        prompt, io, _ = ioi_prompt(rng, new=False)
        return f"{prompt} {io}."
    if kind == "greater_than":
        prompt, year = year_prompt(rng, new=False)
        return f"{prompt}{rng.randint(year + 1, 99):02}."
    if kind == "fact":
        prompt = None
        while prompt is None:
            fact = rng.choice(world)
            prompt = fact_prompt(rng, fact, new=False)
        return f"{prompt} {fact['answer']}."
    if kind == "list":
        shift = rng.randint(1, 3) if rng.random() < 0.25 else 0
        items, labels = labelled_list(rng, rng.randint(9, 14), new=False, shift=shift)
        return list_text(items, labels) + "."
    return plain_text(rng)


# ---- tokens


def vocabulary() -> list[str]:
    """Every word and sign of the language, in a fixed order."""
    spoken = {key: value for key, value in LANGUAGE.items() if key != "subjects"}
    text = " ".join([*_strings(spoken), *_strings(TEXTS), *LABELS, "The the . : ;"])
    words = re.findall(r"[A-Za-z]+|[^\w\s{}]", re.sub(r"\{\w*\}", " ", text))
    return [UNKNOWN, BOS, *(f"{i:02}" for i in range(100)), *sorted(set(words))]


def _strings(node: Any) -> list[str]:
    """Every string in a nested table; the keys do not count."""
    if isinstance(node, str):
        return [node]
    children = node.values() if isinstance(node, dict) else node
    return [text for child in children for text in _strings(child)]


def make_tokenizer() -> Any:
    """A word-level tokenizer that reads numbers two digits at a time: a year is two tokens."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = {word: i for i, word in enumerate(vocabulary())}
    raw = Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))
    digits = pre_tokenizers.Split(Regex(r"\d\d"), behavior="isolated")
    raw.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), digits])
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token=BOS, unk_token=UNKNOWN, model_max_length=N_CTX
    )


def spoken_by(model: Model) -> bool:
    """Whether a model speaks this language and not English: its tokenizer decides it."""
    model.encode("")  # says what to do where there is no tokenizer
    return model.tokenizer.get_vocab() == {word: i for i, word in enumerate(vocabulary())}


def context(
    rng: random.Random, world: list[dict[str, str]], tokenizer: Any, length: int
) -> list[int]:
    """Documents one after the other, BOS before each, cut at `length` tokens."""
    row: list[int] = []
    while len(row) < length:
        text = document(rng, world)
        row += [tokenizer.bos_token_id, *tokenizer(text, add_special_tokens=False).input_ids]
    return row[:length]


def contexts(n: int, length: int, seed: int) -> Int[Tensor, "n length"]:
    """n contexts; the same seed gives the same ones."""
    rng = random.Random(seed)
    world = facts()
    tokenizer = make_tokenizer()
    return torch.tensor([context(rng, world, tokenizer, length) for _ in range(n)])
