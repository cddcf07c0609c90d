"""Tasks: right answers, fair counterfactuals, parts that share nothing, and clear errors."""

import base64
import tarfile
from dataclasses import replace

import pandas as pd
import pytest
import torch

from oa_utils import sources, tasks, texts
from oa_utils.tasks import Task

BOTH = [tasks.ioi, tasks.greater_than]


@pytest.mark.parametrize("make", BOTH)
def test_same_seed_same_task_and_other_seed_other_task(gpt2, make):
    one, same, other = make(gpt2, 30, seed=3), make(gpt2, 30, seed=3), make(gpt2, 30, seed=4)
    assert one.fingerprint == same.fingerprint != other.fingerprint


def test_prompts_of_the_bundled_model_are_those_of_the_published_results(tiny):
    """Stored results are named by these fingerprints, which other prompts or orders change."""
    assert tasks.ioi(tiny, 256).fingerprint == "3db57ac42d933a3f"
    assert tasks.greater_than(tiny, 256).fingerprint == "44bf16726af5b237"
    assert texts.facts(tiny).fingerprint == "84ce52d3180f655f"


@pytest.mark.parametrize("change", ["tokens", "last", "right", "counterfactual", "part", "name"])
def test_everything_that_numbers_depend_on_is_in_the_fingerprint(gpt2, change):
    task = tasks.ioi(gpt2, 10)
    value = getattr(task, change)
    if change == "name":
        other = "other"
    else:
        other = value.clone()
        other.view(-1)[3] += 1
    assert replace(task, **{change: other}).fingerprint != task.fingerprint


def rows_of(task):
    return {tuple(row) for row in task.tokens.tolist()}


@pytest.mark.parametrize("make", BOTH)
def test_train_and_test_share_no_prompt(gpt2, make):
    task = make(gpt2, 200)
    assert len(rows_of(task)) == 200
    parts = [task.train, task.validation, task.test]
    assert [len(part) for part in parts] == [100, 20, 80]
    assert set.union(*map(rows_of, parts)) == rows_of(task)


def test_what_settings_are_chosen_on_has_no_test_prompt(gpt2):
    task = tasks.ioi(gpt2, 200)
    chosen = task.for_choosing()
    assert torch.equal(chosen.train.tokens, task.train.tokens)
    assert torch.equal(chosen.test.tokens, task.validation.tokens)
    assert not rows_of(chosen) & rows_of(task.test)


def test_what_has_a_row_for_each_prompt_is_indexed_together(gpt2):
    task = tasks.ioi(gpt2, 12)
    for rows in (slice(2, 9, 3), [2, 5, 8], torch.tensor([2, 5, 8]), torch.arange(12) % 3 == 2):
        part = task[rows]
        kept = [2, 5, 8, 11][: len(part)]
        assert part.prompts == tuple(task.prompts[i] for i in kept)
        assert part.cf_prompts == tuple(task.cf_prompts[i] for i in kept)
        for name in ("tokens", "last", "right", "wrong", "part", "counterfactual"):
            assert torch.equal(getattr(part, name), getattr(task, name)[kept])


def test_a_task_is_shown_in_one_line(gpt2):
    task = tasks.ioi(gpt2, 12)
    lengths = (task.last + 1).tolist()
    span = f"{min(lengths)} to {max(lengths)} tokens"
    assert repr(task) == f"Task('ioi', 12 prompts of {span}, with counterfactuals)"
    plain = Task.from_text(gpt2, ["Mary went to the"], ["store"])
    assert repr(plain) == "Task('own', 1 prompts of 5 to 5 tokens, without counterfactuals)"


@pytest.mark.parametrize("make", BOTH)
def test_prompts_start_with_bos_and_end_at_last(gpt2, make):
    task = make(gpt2, 40)
    assert (task.tokens[:, 0] == gpt2.bos).all()
    for row, last, text in zip(task.tokens, task.last, task.prompts, strict=True):
        assert row[1 : last + 1].tolist() == gpt2.encode(text)
        assert (row[last + 1 :] == gpt2.bos).all()


@pytest.mark.parametrize("make", BOTH)
def test_counterfactuals_are_as_long_and_differ(gpt2, make):
    task = make(gpt2, 60)
    assert task.counterfactual.shape == task.tokens.shape
    for row, last, text in zip(task.counterfactual, task.last, task.cf_prompts, strict=True):
        assert row[1 : last + 1].tolist() == gpt2.encode(text)
    assert (task.counterfactual != task.tokens).any(-1).all()


def test_ioi_counterfactual_has_three_new_distinct_names(gpt2):
    task = tasks.ioi(gpt2, 200)
    names = set(tasks.TEXTS["ioi"]["names"])
    for prompt, cf in zip(task.prompts, task.cf_prompts, strict=True):
        before, after = (
            [word for word in text.replace(",", " ").replace(".", " ").split() if word in names]
            for text in (prompt, cf)
        )
        assert len(before) == 3 and len(set(before)) == 2
        assert len(set(after)) == 3 and not set(before) & set(after)


def test_ioi_has_templates_of_several_lengths_in_both_orders(gpt2):
    assert len(tasks.TEXTS["ioi"]["templates"]) >= 15
    assert len(tasks.TEXTS["ioi"]["names"]) >= 100
    task = tasks.ioi(gpt2, 300)
    assert len(set(task.last.tolist())) >= 4
    first = [min(p.find(f"{a} "), 10**6) < p.find(b) for p, a, b in _texts(task, gpt2)]
    assert 0.35 < sum(first) / len(first) < 0.65


def _texts(task, model):
    for i, prompt in enumerate(task.prompts):
        yield prompt, model.decode(task.right[i, :1])[0], model.decode(task.wrong[i, :1])[0]


def test_ioi_answer_is_the_name_that_is_not_repeated(gpt2):
    for prompt, right, wrong in _texts(tasks.ioi(gpt2, 100), gpt2):
        words = prompt.replace(",", " ").replace(".", " ").split()
        assert words.count(right) == 1 and words.count(wrong) == 2


def numbers(model, ids):
    return sorted(map(int, model.decode(ids[ids >= 0])))


def test_greater_than_answers_are_the_later_years(gpt2):
    task = tasks.greater_than(gpt2, 100)
    assert task.last.unique().numel() == 1
    assert len(tasks.TEXTS["greater_than"]["nouns"]) >= 100
    for i, prompt in enumerate(task.prompts):
        year = int(prompt.split("year ")[1].split()[0]) % 100
        right, wrong = (numbers(gpt2, ids[i]) for ids in (task.right, task.wrong))
        assert right == list(range(year + 1, 100)) and wrong == list(range(year))
        assert task.cf_prompts[i].split("year ")[1].split()[0].endswith("01")


def test_scores_of_a_known_distribution_by_hand():
    p = torch.tensor([[0.5, 0.2, 0.3], [0.1, 0.6, 0.3]])
    ids = torch.tensor([[0, 2], [1, -1]])
    torch.testing.assert_close(tasks.mass(p, ids), torch.tensor([0.8, 0.6]))


def test_accuracy_and_score_do_not_depend_on_batching(gpt2, monkeypatch):
    task = tasks.ioi(gpt2, 30)
    monkeypatch.setattr(tasks, "BATCH", 7)
    alone = torch.cat([task[[i]].log_probs(gpt2) for i in range(30)])
    torch.testing.assert_close(alone, task.log_probs(gpt2), atol=1e-5, rtol=1e-5)


def test_partners_are_a_derangement_and_one_prompt_has_none(gpt2):
    task = tasks.ioi(gpt2, 20)
    for seed in range(20):
        partner = task.partners(seed)
        assert sorted(partner.tolist()) == list(range(20)) and (partner != torch.arange(20)).all()
    assert task[[0, 1]].partners(0).tolist() == [1, 0]
    with pytest.raises(ValueError, match="at least 2 prompts"):
        task[[0]].partners(0)


def test_partners_are_laid_under_the_prompts_as_the_paper_does(gpt2):
    prompts = ["Mary went to the store", "Mary saw the king in the school"]
    task = Task.from_text(gpt2, prompts, ["park", "park"])
    short, long = (task.tokens[i, : int(task.last[i]) + 1].tolist() for i in (0, 1))
    swap = torch.tensor([1, 0])
    pad = [gpt2.bos] * (len(long) - len(short))
    assert task.resampled(swap).tolist() == [long[: len(short)] + pad, pad + short]


def test_own_tasks_name_what_is_wrong(gpt2):
    prompts, answers = ["Mary went to the", "John went to the"], ["store", "park"]
    assert Task.from_text(gpt2, prompts, answers).counterfactual is None
    assert Task.from_text(gpt2, prompts, [["store", "park"], "park"]).right.tolist()[1][1] == -1
    with pytest.raises(ValueError, match="2 prompts but 1 answers"):
        Task.from_text(gpt2, prompts, ["store"])
    with pytest.raises(ValueError, match="is 2 tokens for 'random-gpt2'"):
        Task.from_text(gpt2, prompts, ["store", "old park"])
    with pytest.raises(ValueError, match="they must be equally long"):
        Task.from_text(gpt2, prompts, answers, counterfactuals=["Tom went to the", "Tom went"])
    with pytest.raises(ValueError, match="must be distinct"):
        Task.from_text(gpt2, prompts[:1] * 2, answers)
    with pytest.raises(ValueError, match="takes at most 64"):
        Task.from_text(gpt2, ["the " * 80, "the"], answers)
    with pytest.raises(ValueError, match="no counterfactual prompts"):
        Task.from_text(gpt2, prompts, answers).need_counterfactual()
    with pytest.raises(ValueError, match="at least one prompt"):
        Task.from_text(gpt2, [], [])


def test_asking_for_too_few_or_too_many_prompts_is_refused(gpt2):
    with pytest.raises(ValueError, match="n >= 2"):
        tasks.ioi(gpt2, 1)
    with pytest.raises(ValueError, match="distinct prompts"):
        tasks.greater_than(gpt2, 10**6)


def test_tables_show_texts(gpt2):
    table = tasks.ioi(gpt2, 10).table(gpt2, 4)
    assert list(table) == ["prompt", "right", "wrong", "counterfactual"] and len(table) == 4


@pytest.mark.real
def test_smollm2_has_names_enough_and_reads_years_by_digit():
    from oa_utils.models import load_model

    model = load_model("smollm2-135m")
    assert sum(len(model.encode(f" {n}")) == 1 for n in tasks.TEXTS["ioi"]["names"]) >= 80
    task = tasks.greater_than(model, 60)
    for i, prompt in enumerate(task.prompts):
        tens = int(prompt.split("year ")[1].split()[0]) % 100 // 10
        right, wrong = (numbers(model, ids[i]) for ids in (task.right, task.wrong))
        assert right == list(range(tens + 1, 10)) and wrong == list(range(tens))
    assert tasks.ioi(model, 60).score(model) > 0.2 and task.score(model) > 0.2


WHISPER = (
    "openai-whisper==20250625",
    "37a91a3921809d9f44748ffc73c0a55c9f366c85a3ef5c2ae0cc09540432eb96",
)


@pytest.mark.real
def test_gpt2s_tokenizer_has_the_names_and_the_years():
    with tarfile.open(sources.fetch(*WHISPER, source=True)) as archive:
        [name] = [n for n in archive.getnames() if n.endswith("/gpt2.tiktoken")]
        lines = archive.extractfile(name).read().splitlines()
    tokens = {base64.b64decode(line.split()[0]) for line in lines}
    assert sum(f" {n}".encode() in tokens for n in tasks.TEXTS["ioi"]["names"]) >= 80
    assert sum(f" {n}".encode() in tokens for n in tasks.TEXTS["greater_than"]["nouns"]) >= 100
    assert all(f"{y:02}".encode() in tokens for y in range(100))


# ---- the doors for tasks of one's own


def test_a_csv_file_is_a_task(gpt2, tmp_path):
    path = tmp_path / "places.csv"
    path.write_text("prompt,answer,wrong\nMary went to the,store|park,Tom\nTom went to the,park,\n")
    task = Task.from_csv(gpt2, path)
    same = Task.from_text(
        gpt2,
        ["Mary went to the", "Tom went to the"],
        [["store", "park"], "park"],
        wrong=["Tom", []],
        name="places",
    )
    assert task.fingerprint == same.fingerprint
    assert task.prompts == same.prompts
    assert not task.of_paper


def test_a_csv_file_with_other_columns_says_which_there_must_be(gpt2, tmp_path):
    path = tmp_path / "places.csv"
    path.write_text("prompt,target\nMary went to the,store\n")
    with pytest.raises(ValueError, match="columns prompt, target; a task has prompt and answer"):
        Task.from_csv(gpt2, path)


def test_columns_of_a_table_are_as_good_as_lists(gpt2):
    table = pd.DataFrame(
        {"prompt": ["Mary went to the", "Tom went to the"], "answer": ["store", "park"]}
    )
    task = Task.from_text(gpt2, table.prompt, table.answer)
    assert task.fingerprint == Task.from_text(gpt2, *map(list, table.T.values)).fingerprint


def test_tokens_are_a_task_too(gpt2):
    prompts = ["Mary went to the", "Tom went to the"]
    rows = [gpt2.encode(prompt) for prompt in prompts]
    answers = [gpt2.encode("store"), gpt2.encode("park")]
    task = Task.from_tokens(gpt2, rows, answers)
    assert task.fingerprint == Task.from_text(gpt2, prompts, ["store", "park"]).fingerprint
    with pytest.raises(ValueError, match="begin without BOS"):
        Task.from_tokens(gpt2, [[gpt2.bos, *rows[0]], rows[1]], answers)
    with pytest.raises(ValueError, match="has token ids from"):
        Task.from_tokens(gpt2, [[gpt2.d_vocab], rows[1]], answers)
    with pytest.raises(ValueError, match="2 prompts but 1 answers"):
        Task.from_tokens(gpt2, rows, answers[:1])
