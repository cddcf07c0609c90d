"""The committed data: facts for causal tracing and labelled texts for elicitation."""

import csv
import json
import re
from collections import Counter

import pytest

from oa_utils.store import data_folder

DATA = data_folder()
LABELS = {
    "entities": (
        "Company School Artist Athlete Politician Transportation Building Nature Village Animal "
        "Plant Album Film Book"
    ).split(),
    "questions": ["Description", "Entity", "Abbreviation", "Person", "Number", "Location"],
    "unnatural": ["plant", "sport", "animal"],
    "antonyms": ["Yes", "No"],
    "sentiment": ["Positive", "Negative"],
}
PER_CLASS = {"entities": 45, "questions": 50, "unnatural": 40, "antonyms": 150, "sentiment": 120}

# typed here by hand, not read from the file
SPOT_CHECKS = """
country_capital|Kazakhstan|Astana
country_capital|Australia|Canberra
country_capital|Burundi|Gitega
country_capital|Brazil|Brasilia
country_capital|Canada|Ottawa
capital_country|Ankara|Turkey
capital_country|Hanoi|Vietnam
city_country|São Paulo|Brazil
city_country|Kraków|Poland
city_country|Casablanca|Morocco
country_currency|Croatia|euro
country_currency|Japan|yen
country_currency|Poland|zloty
country_currency|South Africa|rand
country_language|Brazil|Portuguese
country_language|Austria|German
country_language|Iran|Persian
country_continent|Peru|South America
country_continent|Chad|Africa
landmark_city|Eiffel Tower|Paris
landmark_city|Brandenburg Gate|Berlin
place_city|Big Ben|London
landmark_country|Machu Picchu|Peru
landmark_country|Angkor Wat|Cambodia
mountain_country|Mount Kilimanjaro|Tanzania
river_continent|Danube|Europe
us_city_state|Detroit|Michigan
state_capital|Texas|Austin
state_capital|California|Sacramento
product_company|Photoshop|Adobe
car_maker|Mustang|Ford
company_founder|IKEA|Ingvar Kamprad
company_country|Nokia|Finland
book_author|Dracula|Bram Stoker
book_author|War and Peace|Leo Tolstoy
painting_artist|The Scream|Edvard Munch
composition_composer|The Four Seasons|Antonio Vivaldi
film_director|Jaws|Steven Spielberg
character_creator|James Bond|Ian Fleming
element_symbol|gold|Au
element_symbol|potassium|K
animal_class|bat|mammal
animal_class|penguin|bird
young_animal|kangaroo|joey
athlete_sport|Pelé|soccer
food_country|paella|Spain
artist_nationality|Beyoncé|American
artist_nationality|Frédéric Chopin|Polish
scientist_field|Leonhard Euler|mathematics
musician_instrument|Yo-Yo Ma|cello
deity_mythology|Thor|Norse mythology
leader_country|Kwame Nkrumah|Ghana
invention_inventor|World Wide Web|Tim Berners-Lee
""".strip().splitlines()


def read(path: str) -> list[dict]:
    with open(DATA / path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def has_word(word: str, text: str) -> bool:
    return re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) is not None


@pytest.fixture(scope="module")
def facts() -> list[dict]:
    return read("facts.csv")


@pytest.fixture(scope="module")
def templates() -> dict[str, list[str]]:
    return json.loads((DATA / "fact_templates.json").read_text(encoding="utf-8"))


def test_facts_are_many_and_span_many_relations(facts):
    count = Counter(row["relation"] for row in facts)
    assert len(facts) >= 1200 and len(count) >= 16
    assert min(count.values()) >= 20
    assert all(set(row) == {"relation", "subject", "answer"} for row in facts)


def test_facts_are_distinct_trimmed_and_have_no_alternatives(facts):
    keys = [(row["relation"], row["subject"].casefold()) for row in facts]
    assert len(keys) == len(set(keys))
    for row in facts:
        assert all(value and value == value.strip() for value in row.values()), row
        assert not any(mark in row["subject"] + row["answer"] for mark in "?;|/{}\t\n"), row


def test_subject_does_not_give_the_answer_away(facts):
    for row in facts:
        assert not has_word(row["answer"].split()[0], row["subject"]), row


def test_first_word_of_an_answer_says_something(facts):
    for row in facts:
        assert row["answer"].split()[0].lower() not in {"the", "a", "an"}, row


def test_some_subjects_have_several_words_and_some_are_not_ascii(facts):
    assert sum(not row["subject"].isascii() for row in facts) >= 20
    words = Counter(len(row["subject"].split()) for row in facts)
    assert words[1] >= 300 and words[2] >= 300 and sum(n for k, n in words.items() if k >= 3) >= 100


def test_each_relation_has_templates_with_the_subject_first_and_not_first(facts, templates):
    assert set(templates) == {row["relation"] for row in facts}
    for relation, prompts in templates.items():
        assert len(prompts) >= 3 and len(prompts) == len(set(prompts)), relation
        for prompt in prompts:
            assert prompt.count("{subject}") == 1 and prompt.count("{") == 1, prompt
            assert prompt == prompt.strip() and not prompt.endswith("{subject}"), prompt
        assert any(prompt.startswith("{subject}") for prompt in prompts), relation
        assert any(not prompt.startswith("{subject}") for prompt in prompts), relation


def test_a_filled_prompt_holds_its_subject_once_and_not_its_answer(facts, templates):
    for row in facts:
        for template in templates[row["relation"]]:
            prompt = template.format(subject=row["subject"])
            assert prompt.count(row["subject"]) == 1, prompt
            assert len(row["answer"]) < 3 or not has_word(row["answer"].split()[0], template), (
                prompt
            )


@pytest.mark.parametrize("check", SPOT_CHECKS)
def test_known_fact(facts, check):
    relation, subject, answer = check.split("|")
    answers = [
        row["answer"] for row in facts if row["relation"] == relation and row["subject"] == subject
    ]
    assert answers == [answer]


def test_capitals_agree_in_both_directions(facts):
    """Only equal spellings are compared: Reykjavik has its accent as a subject only."""
    forward = {
        row["answer"]: row["subject"] for row in facts if row["relation"] == "country_capital"
    }
    back = {row["subject"]: row["answer"] for row in facts if row["relation"] == "capital_country"}
    both = set(forward) & set(back)
    assert len(both) >= 80
    assert {city: forward[city] for city in both} == {city: back[city] for city in both}


def test_currencies_are_those_of_today(facts):
    money = {
        row["subject"]: row["answer"] for row in facts if row["relation"] == "country_currency"
    }
    for country in [
        "Croatia",
        "Lithuania",
        "Latvia",
        "Estonia",
        "Slovakia",
        "Slovenia",
        "Malta",
        "Cyprus",
    ]:
        assert money[country] == "euro", country


@pytest.mark.parametrize("name", LABELS)
def test_labelled_set_is_balanced_without_repeats_and_large_enough(name):
    rows = read(f"labelled/{name}.csv")
    assert all(set(row) == {"text", "label"} for row in rows)
    count = Counter(row["label"] for row in rows)
    assert set(count) == set(LABELS[name])
    assert set(count.values()) == {max(count.values())} and max(count.values()) >= PER_CLASS[name]
    texts = [row["text"].casefold() for row in rows]
    assert len(texts) == len(set(texts))
    assert all(text and text == text.strip() for text in texts)


@pytest.mark.parametrize("name", LABELS)
def test_no_label_of_the_set_stands_in_a_text(name):
    for row in read(f"labelled/{name}.csv"):
        for label in LABELS[name]:
            assert not has_word(label, row["text"]) and not has_word(label + "s", row["text"]), row


def test_entities_are_short_sentences():
    for row in read("labelled/entities.csv"):
        assert 5 <= len(row["text"].split()) <= 14 and row["text"].endswith("."), row


def test_questions_end_with_a_question_mark():
    assert all(row["text"].endswith("?") for row in read("labelled/questions.csv"))


def test_unnatural_labels_are_swapped_as_documented():
    label = {row["text"]: row["label"] for row in read("labelled/unnatural.csv")}
    assert {label[word] for word in ["dog", "tiger", "eagle"]} == {"plant"}
    assert {label[word] for word in ["carrot", "onion", "kale"]} == {"sport"}
    assert {label[word] for word in ["tennis", "judo", "soccer"]} == {"animal"}


def test_antonym_pairs_are_two_words_in_one_order_only():
    pairs = [row["text"].split(" and ") for row in read("labelled/antonyms.csv")]
    assert all(len(pair) == 2 and pair[0] != pair[1] for pair in pairs)
    assert len({frozenset(pair) for pair in pairs}) == len(pairs)


@pytest.mark.parametrize(
    "path",
    [
        "facts.csv",
        "fact_templates.json",
        "labelled/sources.json",
        *(f"labelled/{name}.csv" for name in LABELS),
    ],
)
def test_file_is_utf8_without_bom_and_has_unix_line_ends(path):
    raw = (DATA / path).read_bytes()
    raw.decode("utf-8")
    assert not raw.startswith(b"\xef\xbb\xbf") and b"\r" not in raw and raw.endswith(b"\n")


def test_every_labelled_set_has_a_source_that_is_whole():
    sources = json.loads((DATA / "labelled/sources.json").read_text("utf-8"))
    assert {entry["file"] for entry in sources["own"].values()} == set(LABELS)
    assert len(sources["hub"]) == 14  # and `unnatural`, the paper's fifteenth
    for group, entries in sources.items():
        for name, entry in entries.items():
            if group in ("language", "topics", "hub"):
                assert len(set(entry["words"].values())) >= 2, name
            if group in ("own", "reviews", "snippets", "topics"):
                assert "{text}" in entry["template"], name
                assert entry["template"].endswith(" {label}"), name
            if group == "hub":
                assert re.search(r"{\w+}", entry["text"]), name


def test_readme_states_the_size_of_every_file():
    readme = (DATA / "README.md").read_text(encoding="utf-8")
    examples = sorted(path.relative_to(DATA).as_posix() for path in DATA.glob("examples/*.csv"))
    assert len(examples) == 4
    for path in ["facts.csv", *(f"labelled/{name}.csv" for name in LABELS), *examples]:
        row = next(line for line in readme.splitlines() if line.startswith(f"| `{path}`"))
        assert f"{len(read(path)):,}" in row, path
    sources = json.loads((DATA / "labelled/sources.json").read_text("utf-8"))
    row = next(line for line in readme.splitlines() if line.startswith("| `labelled/sources.json`"))
    assert f"{sum(map(len, sources.values()))} sets" in row
