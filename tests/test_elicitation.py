"""Elicitation: prompts that say what they should, a calibrated accuracy with known values, and the model as baseline."""

from dataclasses import replace
from itertools import product

import numpy as np
import pandas as pd
import pytest
import torch

from oa_utils import claims as book
from oa_utils import elicitation as el
from oa_utils import elicitation_claims as ec
from oa_utils import lenses, runs
from oa_utils.labelled import LabelledSet, labelled_sets

SMALL = el.ElicitSettings(n=16, shots=(0, 2, 3), texts=8, text_length=16, positions=4, steps=2)


@pytest.fixture
def things(gpt2):
    return labelled_sets(gpt2)["things"]


def text_of(model, row):
    return " ".join(model.decode(row))


# Calibrated accuracy


@pytest.mark.parametrize("n_classes", [2, 3, 7])
def test_random_scores_are_right_once_in_L(n_classes):
    rng = np.random.default_rng(0)
    labels = rng.permutation(np.arange(40 * n_classes) % n_classes)
    scores = rng.normal(size=(200, len(labels), n_classes)) + 5 * np.arange(n_classes)  # a taste for some labels is no matter
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
    labels, scores, order = rng.integers(4, size=50), rng.normal(size=(3, 50, 4)), np.array([2, 0, 3, 1])
    assert np.array_equal(el.correct(scores, labels), el.correct(scores[..., order], order.argsort()[labels]))


def test_equal_scores_count_one_in_L():
    labels = np.arange(12) % 3
    assert np.allclose(el.correct(np.zeros((2, 12, 3)), labels), 1 / 3)


def test_the_layer_is_chosen_on_one_half_and_measured_on_the_other():
    labels = np.arange(400) % 2
    oracle, noise = np.eye(2)[labels], np.random.default_rng(0).normal(size=(50, 20, 400, 2))
    noise[:, -1] = 0  # nothing to find, and the model ties: one half
    found = pd.DataFrame([el.measure(scores, labels) for scores in noise])
    assert found.maximum.min() > 0 and abs(found.boost.mean()) < 4 * found.boost.sem() < found.maximum.mean()
    first, second = oracle.copy(), oracle.copy()
    first[200:], second[:200] = 0, 0  # each layer knows one half of the contexts
    found = el.measure(np.stack([first, second, np.zeros_like(first)]), labels)
    assert found["boost"] == 0 and found["fair"] == 0.5 and found["maximum"] > 0
    found = el.measure(np.stack([first * 0, oracle, first * 0]), labels)
    assert (found["layer"], found["boost"], found["maximum"]) == (1, 0.5, 0.5)


# Prompts


def test_contexts_are_rounded_up_to_whole_rounds_of_labels(gpt2, things):
    kept = [i for i, label in enumerate(things.labels) if label < 3]
    three = replace(things, texts=tuple(things.texts[i] for i in kept), labels=tuple(things.labels[i] for i in kept),
                    classes=things.classes[:3])  # fmt: skip
    assert len(el.prompts(gpt2, three, replace(SMALL, n=20)).labels) == 24
    six = replace(things, labels=tuple(i % 6 for i in range(len(things.texts))), classes=(*things.classes, "Anna", "Mark"))
    assert len(el.prompts(gpt2, six, replace(SMALL, n=20)).labels) == 48  # twice as many: 40


def test_labels_are_balanced_at_every_place_of_each_half():
    labels = el.balanced(32, 5, 4, np.random.default_rng(0))
    for half in (labels[:16], labels[16:]):
        assert all((np.bincount(column) == 4).all() for column in half.T)
    assert len(np.unique(labels.T, axis=0)) == 5


def test_false_demonstrations_differ_in_their_labels_alone_and_in_each_of_them(model):
    for s in labelled_sets(model).values():
        made, L = el.prompts(model, s, replace(SMALL, n=40)), len(s.classes)
        ids = {token: i for i, token in enumerate(s.label_ids(model))}
        assert ((made.shift % L) != 0).all() and set(made.shift) == set(range(1, L))
        for i in range(40):
            true, false, places = made.rows[i], made.rows[40 + i], made.at[i].tolist()
            assert len(true) == len(false) and places == made.at[40 + i].tolist()
            differ = [j for j, pair in enumerate(zip(true, false, strict=True)) if pair[0] != pair[1]]
            assert len(differ) == SMALL.shots[-1] and all(true[j] in ids for j in differ)
            assert all((ids[true[j]] + made.shift[i]) % L == ids[false[j]] for j in differ)


def test_a_context_has_k_demonstrations_and_a_query_that_is_read_before_its_label(model):
    for s in labelled_sets(model).values():
        made, ids = el.prompts(model, s, SMALL), s.label_ids(model)
        for i, row in enumerate(made.rows[:16]):
            parts = text_of(model, row).split(" ; ")
            assert len(parts) == 1 + SMALL.shots[-1] and parts[-1] == f"{s.texts[made.chosen[i][-1]]} :"
            with_bos = [model.bos, *row]
            assert [model.decode([with_bos[j]])[0] for j in made.at[i]] == [":"] * len(SMALL.shots)
            assert made.at[i, -1] == len(with_bos) - 1  # the query's own label is not in the prompt
            said = [with_bos[j + 1] for j in made.at[i][:-1].tolist()]
            assert said == [ids[label] for label in made.labels[i][:-1]]
            if not s.control:
                assert [s.labels[j] for j in made.chosen[i][[*SMALL.shots]]] == made.labels[i].tolist()
            assert len(set(made.chosen[i])) == len(made.chosen[i])
        assert all((np.bincount(half) == 8 // len(ids)).all() for half in (made.labels[:8, -1], made.labels[8:, -1]))


def test_a_controls_words_are_dealt_anew_in_each_context(gpt2):
    s = labelled_sets(gpt2)["fruit_clothing_ab"]
    made = el.prompts(gpt2, s, replace(SMALL, n=60))
    own = np.array(s.labels)[made.chosen[:, -1]] == made.labels[:, -1]
    assert 15 < own.sum() < 45


def test_the_same_seed_gives_the_same_contexts(gpt2, things):
    a, b, c = (el.prompts(gpt2, things, replace(SMALL, seed=seed)).rows for seed in (0, 0, 1))
    assert a == b != c


def test_long_texts_are_cut_to_the_models_context(gpt2):
    texts = tuple(f"dog {'cat ' * 40}{word}" for word in ["axe", "belt", "boat", "bone", "book", "bear", "back", "bark"])
    s = LabelledSet("long", texts, (0, 1) * 4, ("animal", "tool"), "{text} : {label}", " ; ")
    made = el.prompts(gpt2, s, SMALL)
    assert 56 <= 1 + max(map(len, made.rows)) <= gpt2.n_ctx
    assert max(len(row) for row in el.prompts(gpt2, s, replace(SMALL, length=30)).rows) < 30
    with pytest.raises(ValueError, match="'long' does not fit into 2 tokens"):
        el.prompts(gpt2, s, replace(SMALL, length=9))


def test_what_cannot_be_elicited_is_refused(gpt2, things):
    with pytest.raises(ValueError, match="at least two classes"):
        LabelledSet("one", ("dog", "cat"), (0, 0), ("animal",))
    with pytest.raises(ValueError, match="10 demonstrations and a query need 11 texts of each class of 'few'.*tool 1"):
        few = LabelledSet("few", ("dog", "cat", "axe"), (0, 0, 1), ("animal", "tool"), things.template, things.separator)
        el.prompts(gpt2, few, el.ElicitSettings())
    with pytest.raises(ValueError, match="more than 4 tokens.*tool tool"):
        el.prompts(gpt2, replace(things, classes=("animal", "fruit", "tool " * 5, "clothing")), SMALL)
    with pytest.raises(ValueError, match="begin with the same token"):
        el.prompts(gpt2, replace(things, classes=("animal", "tool fruit", "tool", "clothing")), SMALL)
    with pytest.raises(ValueError, match="shots grow"):
        el.prompts(gpt2, things, replace(SMALL, shots=(3, 1)))
    with pytest.raises(ValueError, match="1 to 15 positions"):
        el.text_streams(gpt2, torch.ones(2, 16, dtype=torch.int64), 16)


# Reading


def test_reads_are_the_streams_of_each_prompt_alone(model, things):
    made = el.prompts(model, things, SMALL)
    seen = []
    for batch, resid, attn in el.reads(model, made.rows, made.at):
        seen += batch
        for b, i in enumerate(batch[:3]):
            alone = lenses.streams(model, torch.tensor([[model.bos, *made.rows[i]]]))
            torch.testing.assert_close(resid[:, b, -1], alone.resid[:, 0], rtol=0, atol=1e-4)
            torch.testing.assert_close(attn[:, b, -1], alone.pool[:, 0], rtol=0, atol=1e-4)
    assert sorted(seen) == list(range(32))


def test_text_streams_hold_the_chosen_tokens(model):
    tokens = torch.randint(2, model.d_vocab, (6, 9), generator=torch.Generator().manual_seed(0))
    tokens[:, 0] = model.bos
    data = el.text_streams(model, tokens, 8)  # all of them
    each = [lenses.streams(model, tokens[:1, : i + 1]).resid[:, 0] for i in range(1, 9)]
    got = el.text_streams(model, tokens[:1], 8).resid  # in another order
    torch.testing.assert_close(got.sum(1), torch.stack(each, 1).sum(1), rtol=0, atol=1e-3)
    torch.testing.assert_close(data.mean, data.pool.mean(1), rtol=0, atol=1e-5)
    assert len(data) == 48


def test_scores_are_the_lenss_probabilities_of_the_labels_and_last_the_models_own(model, things):
    made, ids = el.prompts(model, things, SMALL), things.label_ids(model)
    lens = el.train_lenses(model, SMALL)
    scores = el.score(model, things, lens, SMALL).tensors["scores"]
    assert scores.shape == (3, model.n_layers + 1, 2, 16, 3, 4)
    tokens, last = model.pad(made.rows)
    own = model(tokens, last)[:, ids].log_softmax(-1).unflatten(0, (2, 16))
    for k, each in enumerate(lens.values()):
        torch.testing.assert_close(scores[k, -1, :, :, -1], own, rtol=0, atol=1e-4)
        data = lenses.streams(model, tokens, last)
        for layer in range(model.n_layers):
            want = each.log_probs(data.resid[layer], layer)[:, ids].log_softmax(-1).unflatten(0, (2, 16))
            torch.testing.assert_close(scores[k, layer, :, :, -1], want, rtol=0, atol=1e-3)
    torch.testing.assert_close(scores[:, :, 0, :, 0], scores[:, :, 1, :, 0], rtol=0, atol=1e-4)  # no demonstration yet


def test_a_killed_set_goes_on_with_the_same_numbers(gpt2, things, monkeypatch, tmp_path):
    lens = el.train_lenses(gpt2, SMALL)
    monkeypatch.setattr(runs, "PASS_TOKENS", 40)
    whole = el.score(gpt2, things, lens, SMALL)
    monkeypatch.setenv("OA_STORE", str(tmp_path / "again"))
    monkeypatch.setattr(runs.Snapshots, "due", lambda self: True)
    calls, honest = [], el.label_scores

    def dies(*args):
        calls.append(1)
        if len(calls) == 10:
            raise KeyboardInterrupt
        return honest(*args)

    monkeypatch.setattr(el, "label_scores", dies)
    with pytest.raises(KeyboardInterrupt):
        el.score(gpt2, things, lens, SMALL)
    again = el.score(gpt2, things, lens, SMALL)
    made = el.prompts(gpt2, things, SMALL)
    batches = len(list(el.reads(gpt2, made.rows, made.at)))
    assert len(calls) == 10 + 3 * (batches - 3) and again.numbers == whole.numbers


def test_the_bundled_model_knows_the_label_before_it_follows_false_demonstrations(tiny):
    settings = el.ElicitSettings(n=40, shots=(0, 10), texts=32, text_length=48, positions=8, steps=20)
    lens = el.train_lenses(tiny, settings, ("oca", "logit"))
    table = el.elicit(tiny, {"things": labelled_sets(tiny)["things"]}, lens, settings)
    table = table.set_index(["kind", "demonstrations", "demos"])
    assert table.accuracy["oca", "true", 10][-1] > 0.9 and table.accuracy["oca", "false", 10][-1] < 0.3
    assert table.boost["oca", "false", 10] > 0.2


# Claims


def table_of(**boost):
    rows = []
    for (name, values), d in product(boost.items(), el.DEMONSTRATIONS):
        about = {"set": name, "demonstrations": d, "demos": 10, "control": name == "ab", "classes": 2}
        for kind, value in zip(el.KINDS, values, strict=True):
            found = {"maximum": value, "boost": value, "boost_se": 0.01, "fair": 0.5 + value, "fair_se": 0.01}
            rows.append({**about, "kind": kind, **found})
    return pd.DataFrame(rows)


def test_the_papers_numbers_give_the_papers_counts():
    paper = ec.anchors()
    assert [ec.wins(ec.by_set(paper, d, "maximum"))[:2] for d in el.DEMONSTRATIONS] == [(12, 15), (11, 15)]
    assert ec.by_set(paper, "true", "maximum").loc["dbpedia"].round(3).to_dict() == {"oca": 0.18, "tuned": 0.029}


def test_claims_say_what_the_table_says():
    made = {c.id: c for c in ec.claims(table_of(a=(0.3, 0.1, 0), b=(0.1, 0.2, 0), c=(0.2, 0.2, 0), ab=(0.0, 0.1, 0)))}
    assert made["elicitation.wins.true"].measured == pytest.approx(1 / 3) and not made["elicitation.wins.true"].holds
    assert made["elicitation.wins.true"].paper_value == 0.8 and "1 of 2" in made["elicitation.wins.true"].note
    assert made["elicitation.boost.false"].measured == pytest.approx(0.2) and made["elicitation.boost.false"].holds
    assert made["elicitation.control.true"].holds and made["elicitation.control.false"].holds
    assert not made["elicitation.false_more"].holds and "elicitation.categories.true" not in made
    sure = table_of(a=(0, 0, 0)).assign(fair=1.0)
    assert {c.holds for c in ec.claims(sure) if c.id != "elicitation.false_more"} == {None}
    below = table_of(a=(0.3, 0.1, 0), ab=(0.2, 0.1, 0)).assign(fair=0.5)  # a model below chance, a lens at chance
    assert {c.id: c.holds for c in ec.claims(below)}["elicitation.control.true"]
    worse = {c.id: c for c in ec.claims(table_of(a=(0.3, 0.1, 0), ab=(0.2, 0.1, 0)))}
    assert not worse["elicitation.control.true"].holds and not worse["elicitation.control.false"].holds


def test_a_published_claim_is_measured_again(gpt2, monkeypatch, tmp_path):
    sets = {name: s for name, s in labelled_sets(gpt2).items() if name != "animal_tool"}
    table = el.elicit(gpt2, sets, el.train_lenses(gpt2, SMALL), SMALL)
    monkeypatch.setattr(runs, "published", lambda: tmp_path)
    monkeypatch.setattr(ec, "load_model", lambda name: gpt2)
    for found in ec.claims(table, n=10)[:2]:
        assert book.anew(found.id, "random-gpt2") == pytest.approx(found.measured, abs=1e-9)
    assert book.recomputer("elicitation.wins.true") is ec.claim
