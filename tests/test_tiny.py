"""The bundled model does what the experiments need, on combinations that it was never trained on."""

import json
import random

import pytest

from oa_utils import tasks, tiny

BARS = {"ioi_top1": 0.97, "greater_than_difference": 0.8, "facts_top1": 0.95, "lists_permuted": 0.8, "lists_true": 0.9}


def test_scores_on_untrained_combinations_pass_the_bars():
    from oa_utils.models import load_model

    model = load_model("tiny")
    measured = tiny.scores(model.bridge.original_model, model.tokenizer, n=200, seed=5)
    assert all(measured[name] >= bar for name, bar in BARS.items()), measured
    stored = json.loads((tiny.FOLDER / "scores.json").read_text())
    assert all(abs(stored[name] - measured[name]) < 0.06 for name in BARS), (stored, measured)


def test_the_readme_and_the_card_show_the_stored_scores():
    stored = json.loads((tiny.FOLDER / "scores.json").read_text())
    rows = [f"| {tiny.MEANING[name]} | {value:.3f} |" for name, value in stored.items()]
    for page in (tiny.DATA.parent / "README.md", tiny.FOLDER / "README.md"):
        assert all(row in page.read_text() for row in rows), page


def test_the_tasks_work_on_the_bundled_model(tiny):
    assert tasks.ioi(tiny, 200).accuracy(tiny) >= 0.97
    assert tasks.greater_than(tiny, 200).score(tiny) >= 0.8


def test_the_bundled_folder_is_small_and_belongs_to_the_language():
    assert sum(f.stat().st_size for f in tiny.FOLDER.iterdir()) <= 8_000_000
    kept = json.loads((tiny.FOLDER / "tokenizer.json").read_text())["model"]["vocab"]
    assert kept == {word: i for i, word in enumerate(tiny.vocabulary())}


def test_the_language_is_as_large_as_promised():
    facts = tiny.facts()
    assert len({(f["relation"], f["subject"]) for f in facts}) == len(facts) >= 400
    assert len({f["relation"] for f in facts}) >= 6
    assert {len(f["subject"].split()) for f in facts} == {1, 2, 3, 4}
    assert all(len(t) >= 3 for t in tiny.LANGUAGE["templates"].values())


def test_every_document_is_in_the_vocabulary(tokenizer):
    rng, world = random.Random(0), tiny.facts()
    for _ in range(500):
        assert tokenizer.unk_token_id not in tokenizer(tiny.document(rng, world)).input_ids


def test_held_out_combinations_are_never_in_training_documents():
    rng = random.Random(0)
    for new in (True, False):
        for _ in range(50):
            _, io, s = tiny.ioi_prompt(rng, new)
            assert tiny.held_out("ioi", *sorted((io, s))) == new


def test_labels_are_shifted_along_the_whole_list():
    items, labels = tiny.labelled_list(random.Random(0), 10, new=False, shift=1)
    for item, label in zip(items, labels, strict=True):
        true = next(name for name, words in tiny.LANGUAGE["items"].items() if item in words)
        assert label == tiny.LABELS[(tiny.LABELS.index(true) + 1) % 4] != true


def test_contexts_repeat_with_their_seed():
    one, same, other = (tiny.contexts(5, 30, seed) for seed in (0, 0, 1))
    assert one.tolist() == same.tolist() != other.tolist() and one.shape == (5, 30)


@pytest.mark.real
def test_training_runs_and_writes_a_loadable_folder(tmp_path):
    tiny.train(tmp_path, steps=3, batch=4)
    from oa_utils.models import load_model

    assert load_model(tmp_path).d_vocab == len(tiny.vocabulary())
