"""The bundled model does what the experiments need, on combinations that it never saw."""

import importlib.util
import json
import random

import pytest

from oa_utils import language, tasks
from oa_utils.models import load_model
from oa_utils.store import repository

BARS = {
    "ioi_top1": 0.97,
    "greater_than_difference": 0.8,
    "facts_top1": 0.95,
    "lists_permuted": 0.8,
    "lists_true": 0.9,
}


@pytest.fixture(scope="module")
def make_tiny():
    """The script that trained the model."""
    path = repository() / "scripts" / "make_tiny.py"
    spec = importlib.util.spec_from_file_location("make_tiny", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def stored(make_tiny):
    return json.loads((make_tiny.FOLDER / "scores.json").read_text())


# The model


def test_scores_on_untrained_combinations_pass_the_bars(make_tiny, stored, tiny):
    hf = tiny.bridge.original_model
    measured = make_tiny.scores(hf, tiny.tokenizer, n=200, seed=5)
    assert set(measured) == set(stored) == set(BARS)
    for name, bar in BARS.items():
        assert measured[name] >= bar, measured
        assert abs(stored[name] - measured[name]) < 0.06, (stored, measured)


def test_the_readme_and_the_card_show_the_stored_scores(make_tiny, stored):
    rows = [f"| {make_tiny.MEANING[name]} | {value:.3f} |" for name, value in stored.items()]
    for page in (repository() / "README.md", make_tiny.FOLDER / "README.md"):
        for row in rows:
            assert row in page.read_text("utf-8"), page


def test_the_card_is_what_the_script_writes(make_tiny, stored):
    text = (make_tiny.FOLDER / "README.md").read_text("utf-8")
    assert text == make_tiny.card(stored, steps=3000, seed=0)


def test_the_tasks_work_on_the_bundled_model(tiny):
    assert tasks.ioi(tiny, 200).accuracy(tiny) >= 0.97
    assert tasks.greater_than(tiny, 200).score(tiny) >= 0.8


def test_the_bundled_folder_is_small_and_belongs_to_the_language(make_tiny, tiny):
    assert sum(file.stat().st_size for file in make_tiny.FOLDER.iterdir()) <= 8_000_000
    vocabulary = json.loads((make_tiny.FOLDER / "tokenizer.json").read_text())["model"]["vocab"]
    assert vocabulary == {word: i for i, word in enumerate(language.vocabulary())}
    assert language.spoken_by(tiny)


def test_training_runs_and_writes_a_loadable_folder(make_tiny, tmp_path, monkeypatch):
    few = make_tiny.scores
    monkeypatch.setattr(make_tiny, "scores", lambda model, tokenizer, n: few(model, tokenizer, 5))
    scores = make_tiny.train(tmp_path, steps=3, batch=4)
    assert set(scores) == set(BARS)
    model = load_model(tmp_path)
    assert model.d_vocab == len(language.vocabulary())
    assert language.spoken_by(model)


# The language


def test_the_language_is_as_large_as_promised():
    facts = language.facts()
    assert len({(fact["relation"], fact["subject"]) for fact in facts}) == len(facts) >= 400
    assert len({fact["relation"] for fact in facts}) >= 6
    assert {len(fact["subject"].split()) for fact in facts} == {1, 2, 3, 4}
    assert all(len(templates) >= 3 for templates in language.LANGUAGE["templates"].values())


def test_the_world_is_the_same_at_each_call():
    assert language.facts() == language.facts()


def test_every_document_is_in_the_vocabulary(tokenizer):
    rng = random.Random(0)
    world = language.facts()
    for _ in range(500):
        text = language.document(rng, world)
        assert tokenizer.unk_token_id not in tokenizer(text).input_ids, text


def test_held_out_combinations_are_never_in_training_documents():
    rng = random.Random(0)
    world = language.facts()
    for new in (True, False):
        for _ in range(50):
            _, io, subject = language.ioi_prompt(rng, new)
            assert language.held_out("ioi", *sorted((io, subject))) == new
            items, _ = language.labelled_list(rng, 10, new, shift=0)
            assert language.held_out("list", *sorted(items)) == new
            fact = rng.choice(world)
            prompt = language.fact_prompt(rng, fact, new)
            texts = language.LANGUAGE["templates"][fact["relation"]]
            filled = {text.format(subject=fact["subject"]): text for text in texts}
            if prompt is not None:
                assert language.held_out("fact", fact["subject"], filled[prompt]) == new


def test_labels_are_shifted_along_the_whole_list():
    items, labels = language.labelled_list(random.Random(0), 10, new=False, shift=1)
    for item, label in zip(items, labels, strict=True):
        [true] = [name for name, words in language.LANGUAGE["items"].items() if item in words]
        assert label == language.LABELS[(language.LABELS.index(true) + 1) % 4] != true


def test_contexts_repeat_with_their_seed(tokenizer):
    one, same, other = (language.contexts(5, 30, seed) for seed in (0, 0, 1))
    assert one.tolist() == same.tolist() != other.tolist()
    assert one.shape == (5, 30)
    assert (one[:, 0] == tokenizer.bos_token_id).all()
