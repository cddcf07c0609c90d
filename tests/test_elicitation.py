"""Elicitation: prompts that say what they should, a calibrated accuracy with known values, and the
model as baseline."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from einops import rearrange

from oa_utils import elicitation as el
from oa_utils import lenses, machine, store
from oa_utils.labelled import LabelledSet, labelled_sets

PROMPTS = {"n": 16, "shots": (0, 2, 3)}
TEXTS = {"texts": 8, "text_length": 16, "positions": 4, "steps": 2}


@pytest.fixture
def things(gpt2):
    return labelled_sets(gpt2)["things"]


def make(model, labelled, **changes):
    return el.make_prompts(model, labelled, **{**PROMPTS, **changes})


def text_of(model, row):
    return " ".join(model.decode(row))


# ---- calibrated accuracy


@pytest.mark.parametrize("n_classes", [2, 3, 7])
def test_random_scores_are_right_once_in_L(n_classes):
    rng = np.random.default_rng(0)
    labels = rng.permutation(np.arange(40 * n_classes) % n_classes)
    taste = 5 * np.arange(n_classes)  # for some labels: it is no matter
    scores = rng.normal(size=(200, len(labels), n_classes)) + taste
    right = el.correct(scores, labels).mean(-1)
    assert abs(right.mean() - 1 / n_classes) < 5 * right.std() / np.sqrt(200)


@pytest.mark.parametrize("n_classes", [2, 3, 14])
def test_an_oracle_is_always_right_and_its_opposite_never(n_classes):
    labels = np.random.default_rng(0).permutation(np.arange(20 * n_classes) % n_classes)
    scores = np.eye(n_classes)[labels]
    assert (el.correct(scores, labels) == 1).all()
    assert (el.correct(np.roll(scores, 1, -1), labels) == 0).all()


def test_accuracy_does_not_know_the_labels_names():
    rng = np.random.default_rng(0)
    labels = rng.integers(4, size=50)
    scores = rng.normal(size=(3, 50, 4))
    order = np.array([2, 0, 3, 1])
    renamed = el.correct(scores[..., order], order.argsort()[labels])
    assert np.array_equal(el.correct(scores, labels), renamed)


def test_equal_scores_count_one_in_L():
    labels = np.arange(12) % 3
    assert np.allclose(el.correct(np.zeros((2, 12, 3)), labels), 1 / 3)


def test_the_layer_is_chosen_on_one_half_and_measured_on_the_other():
    labels = np.arange(400) % 2
    oracle = np.eye(2)[labels]
    nothing = np.zeros_like(oracle)
    noise = np.random.default_rng(0).normal(size=(50, 20, 400, 2))
    noise[:, -1] = 0  # nothing to find, and the model ties: one half
    table = pd.DataFrame([el.measure(scores, labels) for scores in noise])
    assert table.maximum.min() > 0
    assert abs(table.boost.mean()) < 4 * table.boost.sem() < table.maximum.mean()
    first = oracle.copy()
    second = oracle.copy()
    first[200:] = 0  # each layer knows one half of the contexts
    second[:200] = 0
    row = el.measure(np.stack([first, second, nothing]), labels)
    assert row["boost"] == 0 and row["fair"] == 0.5 and row["maximum"] > 0
    row = el.measure(np.stack([nothing, oracle, nothing]), labels)
    assert (row["layer"], row["boost"], row["maximum"]) == (1, 0.5, 0.5)


# ---- prompts


def test_contexts_are_rounded_up_to_whole_rounds_of_labels(gpt2, things):
    kept = [i for i, label in enumerate(things.labels) if label < 3]
    three = replace(
        things,
        texts=tuple(things.texts[i] for i in kept),
        labels=tuple(things.labels[i] for i in kept),
        classes=things.classes[:3],
    )
    assert len(make(gpt2, three, n=20).labels) == 24
    six = replace(
        things,
        labels=tuple(i % 6 for i in range(len(things.texts))),
        classes=(*things.classes, "Anna", "Mark"),
    )
    assert len(make(gpt2, six, n=20).labels) == 48  # twice as many: 40


def test_labels_are_balanced_at_every_place_of_each_half():
    labels = el.balanced(32, 5, 4, np.random.default_rng(0))
    for half in (labels[:16], labels[16:]):
        assert all((np.bincount(column) == 4).all() for column in half.T)
    assert len(np.unique(labels.T, axis=0)) == 5


def test_false_demonstrations_differ_in_their_labels_alone_and_in_each_of_them(model):
    for labelled in labelled_sets(model).values():
        prompts = make(model, labelled, n=10 if labelled.control else 40)
        n_classes = len(labelled.classes)
        label_of = {token: i for i, token in enumerate(labelled.label_ids(model))}
        assert set(prompts.shift) == set(range(1, n_classes))
        for i in range(40):
            true = prompts.rows[i]
            false = prompts.rows[40 + i]
            assert len(true) == len(false)
            assert torch.equal(prompts.places[i], prompts.places[40 + i])
            differ = [j for j in range(len(true)) if true[j] != false[j]]
            assert len(differ) == PROMPTS["shots"][-1]
            for j in differ:
                shifted = (label_of[true[j]] + prompts.shift[i]) % n_classes
                assert shifted == label_of[false[j]]


def test_a_context_has_k_demonstrations_and_a_query_that_is_read_before_its_label(model):
    shots = list(PROMPTS["shots"])
    for labelled in labelled_sets(model).values():
        prompts = make(model, labelled)
        ids = labelled.label_ids(model)
        n = len(prompts.labels)
        for i, row in enumerate(prompts.rows[:n]):
            chosen = prompts.chosen[i]
            parts = text_of(model, row).split(" ; ")
            assert len(parts) == 1 + shots[-1]
            assert parts[-1] == f"{labelled.texts[chosen[-1]]} :"
            with_bos = [model.bos, *row]
            places = prompts.places[i].tolist()
            assert [model.decode([with_bos[j]])[0] for j in places] == [":"] * len(shots)
            assert places[-1] == len(with_bos) - 1  # the query's own label is not in the prompt
            shown = [with_bos[j + 1] for j in places[:-1]]
            assert shown == [ids[label] for label in prompts.labels[i][:-1]]
            if not labelled.control:
                assert [labelled.labels[j] for j in chosen[shots]] == prompts.labels[i].tolist()
            assert len(set(chosen)) == len(chosen)
        for half in np.split(prompts.labels[:, -1], 2):
            assert (np.bincount(half) == n // 2 // len(ids)).all()


def test_a_controls_words_are_dealt_anew_in_each_context(gpt2):
    labelled = labelled_sets(gpt2)["fruit_clothing_ab"]
    prompts = make(gpt2, labelled, n=16)
    asked = prompts.labels[:, -1]
    assert len(asked) == 64  # four times as many
    fits = np.array(labelled.labels)[prompts.chosen[:, -1]] == asked
    for half in (slice(32), slice(32, None)):
        for label in range(2):  # each word stands for each class equally often
            assert fits[half][asked[half] == label].mean() == 0.5


def test_the_same_seed_gives_the_same_contexts(gpt2, things):
    a, b, c = (make(gpt2, things, seed=seed).rows for seed in (0, 0, 1))
    assert a == b != c


def test_long_texts_are_cut_to_the_models_context(gpt2):
    words = ["axe", "belt", "boat", "bone", "book", "bear", "back", "bark"]
    texts = tuple(f"dog {'cat ' * 40}{word}" for word in words)
    long = LabelledSet("long", texts, (0, 1) * 4, ("animal", "tool"), "{text} : {label}", " ; ")
    assert 56 <= 1 + max(map(len, make(gpt2, long).rows)) <= gpt2.n_ctx
    assert max(map(len, make(gpt2, long, length=30).rows)) < 30
    with pytest.raises(ValueError, match="'long' does not fit into 2 tokens"):
        make(gpt2, long, length=9)


def test_what_cannot_be_elicited_is_refused(gpt2, things):
    with pytest.raises(ValueError, match="at least two classes"):
        LabelledSet("one", ("dog", "cat"), (0, 0), ("animal",))
    few = replace(
        things,
        name="few",
        texts=("dog", "cat", "axe"),
        labels=(0, 0, 1),
        classes=("animal", "tool"),
    )
    words = "10 demonstrations and a query need 11 texts of each class of 'few'.*tool 1"
    with pytest.raises(ValueError, match=words):
        el.make_prompts(gpt2, few)
    with pytest.raises(ValueError, match="more than 4 tokens.*tool tool"):
        make(gpt2, replace(things, classes=("animal", "fruit", "tool " * 5, "clothing")))
    with pytest.raises(ValueError, match="begin with the same token"):
        make(gpt2, replace(things, classes=("animal", "tool fruit", "tool", "clothing")))
    for shots in ((3, 1), (), (-1, 2)):
        with pytest.raises(ValueError, match="shots grow"):
            make(gpt2, things, shots=shots)


# ---- reading


def test_passes_read_each_prompt_as_if_it_were_alone(model, things):
    prompts = make(model, things)
    tokens, _ = model.pad(prompts.rows)
    seen = []
    for rows, streams, outputs in lenses.passes(model, tokens, prompts.places):
        batch = list(range(len(tokens)))[rows]
        seen += batch
        for b, i in enumerate(batch[:3]):
            alone = lenses.read(model, torch.tensor([[model.bos, *prompts.rows[i]]]))
            torch.testing.assert_close(streams[:, b, -1], alone.resid[:, 0], rtol=0, atol=1e-4)
            torch.testing.assert_close(outputs[:, b, -1], alone.pool[:, 0], rtol=0, atol=1e-4)
    assert seen == list(range(32))


def test_scores_are_the_lenss_probabilities_of_the_labels_and_last_the_models_own(model, things):
    prompts = make(model, things)
    ids = things.label_ids(model)
    readers = el.train_lenses(model, **TEXTS)
    scores = el.score(model, things, readers, **PROMPTS).tensors["scores"]
    assert scores.shape == (3, model.n_layers + 1, 2, 16, 3, 4)
    tokens, last = model.pad(prompts.rows)
    data = lenses.read(model, tokens, last)

    def among_labels(logp):
        return rearrange(logp[:, ids].log_softmax(-1), "(demos n) label -> demos n label", n=16)

    model_scores = among_labels(model(tokens, last))
    for kind, lens in enumerate(readers.values()):
        after_all = scores[kind, ..., -1, :]
        torch.testing.assert_close(after_all[-1], model_scores, rtol=0, atol=1e-4)
        for layer in range(model.n_layers):
            expected = among_labels(lens.log_probs(data.resid[layer], layer))
            torch.testing.assert_close(after_all[layer], expected, rtol=0, atol=1e-3)
    no_demonstration = scores[..., 0, :]
    true, false = no_demonstration.unbind(2)
    torch.testing.assert_close(true, false, rtol=0, atol=1e-4)


def test_a_killed_set_goes_on_with_the_same_numbers(gpt2, things, monkeypatch, tmp_path):
    readers = el.train_lenses(gpt2, **TEXTS)
    monkeypatch.setattr(machine, "PASS_TOKENS", 40)
    honest = el.label_scores
    calls = []

    def counted(*args):
        calls.append(1)
        if len(calls) == dies_at:
            raise KeyboardInterrupt
        return honest(*args)

    monkeypatch.setattr(el, "label_scores", counted)
    dies_at = None
    whole = el.score(gpt2, things, readers, **PROMPTS)
    all_calls = len(calls)
    assert all_calls > 12 and all_calls % 3 == 0  # three lenses in every pass
    monkeypatch.setenv("OA_STORE", str(tmp_path / "again"))
    monkeypatch.setattr(store.Snapshots, "due", lambda self: True)
    calls.clear()
    dies_at = 10  # in the fourth pass
    with pytest.raises(KeyboardInterrupt):
        el.score(gpt2, things, readers, **PROMPTS)
    again = el.score(gpt2, things, readers, **PROMPTS)
    assert len(calls) == 10 + all_calls - 9 and again.numbers == whole.numbers


def test_the_bundled_model_knows_the_label_before_it_follows_false_demonstrations(tiny):
    readers = el.train_lenses(
        tiny, ("oca", "logit"), texts=32, text_length=48, positions=8, steps=20
    )
    sets = {"things": labelled_sets(tiny)["things"]}
    table = el.elicit(tiny, sets, readers, n=40, shots=(0, 10))
    table = table.set_index(["kind", "demonstrations", "demos"])
    assert table.accuracy["oca", "true", 10][-1] > 0.9
    assert table.accuracy["oca", "false", 10][-1] < 0.3
    assert table.boost["oca", "false", 10] > 0.2
