"""Tasks: prompts, their answers and counterfactuals as tokens, in three parts that share no prompt.

Searches and constants are trained on the train part, settings are chosen on the validation part,
and every reported number is measured on the test part.
"""

import hashlib
import json
import random
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from pathlib import Path

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from oa_utils import machine
from oa_utils.models import Model
from oa_utils.store import data_folder

TEXTS = json.loads((data_folder() / "tasks.json").read_text("utf-8"))
BATCH = 64  # prompts that run at once
PARTS = ("train", "validation", "test")
COLUMNS = ("prompt", "answer", "counterfactual", "wrong")  # of a task's CSV file
CENTURIES = range(10, 19)  # of Greater-Than: the years 1000 to 1899


@dataclass(frozen=True, eq=False, repr=False)
class Task:
    """n prompts for one model. Everything of length n is indexed together by `task[rows]`."""

    name: str
    tokens: Int[Tensor, "n pos"]  # BOS first, padded on the right
    last: Int[Tensor, " n"]  # index of the last prompt token
    right: Int[Tensor, "n k"]  # ids of right answers, padded with -1
    wrong: Int[Tensor, "n j"]  # ids of wrong answers, padded with -1
    part: Int[Tensor, " n"]  # which of PARTS each prompt is in
    prompts: tuple[str, ...]  # the texts, for tables
    counterfactual: Int[Tensor, "n pos"] | None = None
    cf_prompts: tuple[str, ...] = ()
    subject: Int[Tensor, "n 2"] | None = None  # facts only: the subject's first token, last + 1
    relation: tuple[str, ...] = ()  # facts only
    of_paper: bool = False  # one of the paper's tasks, as this project makes it
    tokenizer: str = ""  # hash of the vocabulary that the ids are of; empty: not known

    def __repr__(self) -> str:
        lengths = sorted({int(last) + 1 for last in self.last})
        tokens = "no" if not lengths else f"{lengths[0]} to {lengths[-1]}"
        counterfactuals = "without" if self.counterfactual is None else "with"
        return (
            f"Task('{self.name}', {len(self):,} prompts of {tokens} tokens, "
            f"{counterfactuals} counterfactuals)"
        )

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, rows: slice | Sequence[int] | Tensor) -> "Task":
        index = torch.arange(len(self))[rows if isinstance(rows, slice) else torch.as_tensor(rows)]
        part = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                part[field.name] = value[index]
            elif isinstance(value, tuple) and value:
                part[field.name] = tuple(value[i] for i in index)
        return replace(self, **part)

    def check(self, model: Model) -> None:
        """Raises where the prompts are another tokenizer's, or no prompts of this model at all."""
        if self.tokenizer and model.tokenizer_hash and self.tokenizer != model.tokenizer_hash:
            raise ValueError(
                f"task '{self.name}' was made with the tokenizer of another model than "
                f"'{model.name}': its ids mean other words here; make it anew with this model"
            )
        if not len(self):
            raise ValueError(f"task '{self.name}' has no prompts")
        largest = max(int(ids.max()) for ids in (self.tokens, self.right, self.wrong))
        if largest >= model.d_vocab or int(self.tokens.min()) < 0:
            raise ValueError(
                f"task '{self.name}' has token ids from {int(self.tokens.min())} to {largest}; "
                f"'{model.name}' has 0 to {model.d_vocab - 1}"
            )
        if not 1 <= int(self.last.min()) <= int(self.last.max()) < self.tokens.shape[1]:
            raise ValueError(
                f"last of task '{self.name}' is the index of each prompt's last token, from 1 to "
                f"{self.tokens.shape[1] - 1}, got {int(self.last.min())} to {int(self.last.max())}"
            )

    # ---- parts

    @property
    def answers(self) -> Int[Tensor, " n"]:
        return self.right[:, 0]

    @property
    def train(self) -> "Task":
        return self._part("train")

    @property
    def validation(self) -> "Task":
        return self._part("validation")

    @property
    def test(self) -> "Task":
        return self._part("test")

    def _part(self, name: str) -> "Task":
        rows = self.part == PARTS.index(name)
        if not rows.any():
            raise ValueError(
                f"task '{self.name}' has no {name} prompts (n = {len(self)}); "
                "make it with a larger n"
            )
        return self[rows]

    def for_choosing(self) -> "Task":
        """What settings are chosen on: the validation part stands in the place of the test part,
        which is left out."""
        chosen = self[self.part != PARTS.index("test")]
        part = torch.where(chosen.part == PARTS.index("validation"), PARTS.index("test"), 0)
        return replace(chosen, part=part)

    @property
    def fingerprint(self) -> str:
        """A hash of everything that a number can depend on."""
        digest = hashlib.sha256(self.name.encode())
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                digest.update(f"{field.name}{tuple(value.shape)}".encode())
                digest.update(value.cpu().numpy().tobytes())
        return digest.hexdigest()[:16]

    # ---- other prompts in the place of each prompt

    def need_counterfactual(self) -> Int[Tensor, "n pos"]:
        if self.counterfactual is None:
            raise ValueError(
                f"task '{self.name}' has no counterfactual prompts, so 'counterfactual' and "
                "'cf_mean' cannot be used; pass counterfactuals=[...] to Task.from_text, or "
                "choose another ablation"
            )
        return self.counterfactual

    def partners(self, seed: int = 0) -> Int[Tensor, " n"]:
        """Another prompt for each: one random cycle through all of them, so none meets itself."""
        if len(self) < 2:
            raise ValueError(
                f"resampling needs at least 2 prompts, task '{self.name}' has {len(self)}"
            )
        order = torch.randperm(len(self), generator=machine.generator(seed))
        partner = torch.empty_like(order)
        partner[order] = order.roll(-1)
        return partner

    def resampled(self, partners: Int[Tensor, " n"]) -> Int[Tensor, "n pos"]:
        """The partners' tokens laid under the prompts.

        A longer partner gives its first tokens; a shorter one is padded with BOS on the left, and
        run as it is.
        """
        bos = self.tokens[0, 0]
        laid = torch.full_like(self.tokens, bos)
        for i, j in enumerate(partners.tolist()):
            end = int(self.last[i]) + 1
            row = self.tokens[j, : int(self.last[j]) + 1][:end]
            laid[i, end - len(row) : end] = row
        return laid

    # ---- what a model does with it

    def log_probs(self, model: Model) -> Float[Tensor, "n vocab"]:
        """The full model's log-probabilities at each prompt's last position."""

        def of_some(span: slice) -> Float[Tensor, "b vocab"]:
            return model(self.tokens[span], self.last[span])

        with torch.no_grad():
            return torch.cat(list(machine.in_spans(len(self), BATCH, of_some)))

    def accuracy(self, model: Model) -> float:
        """Share of prompts whose most likely next token, over the whole vocabulary, is right."""
        top = self.log_probs(model).argmax(-1).cpu()
        return (top[:, None] == self.right).any(-1).float().mean().item()

    def score(self, model: Model) -> float:
        """Mean over prompts of P(any right answer) − P(any wrong answer)."""
        p = self.log_probs(model).exp().cpu()
        return (mass(p, self.right) - mass(p, self.wrong)).mean().item()

    def table(self, model: Model, n: int = 5) -> pd.DataFrame:
        """A few prompts as text, with up to four of their answers, for notebooks."""
        rows = []
        for i in range(min(n, len(self))):
            row = {"prompt": self.prompts[i]}
            for column, ids in (("right", self.right[i]), ("wrong", self.wrong[i])):
                row[column] = " ".join(model.decode(ids[ids >= 0][:4]))
            if self.cf_prompts:
                row["counterfactual"] = self.cf_prompts[i]
            rows.append(row)
        return pd.DataFrame(rows)

    # ---- from texts and from tokens

    @classmethod
    def from_text(
        cls,
        model: Model,
        prompts: Iterable[str],
        answers: Iterable[str | Sequence[str]],
        counterfactuals: Iterable[str] | None = None,
        wrong: Iterable[str | Sequence[str]] | None = None,
        name: str = "own",
        seed: int = 0,
    ) -> "Task":
        """A task from texts: lists, or columns of a table.

        An answer goes right behind its prompt (start it with a space where one belongs) and must be
        one token; a list gives several right answers. Parts are drawn by seed, see `split`.
        """
        prompts = list(prompts)
        answers = list(answers)
        counterfactuals = None if counterfactuals is None else list(counterfactuals)
        wrong = [[] for _ in prompts] if wrong is None else list(wrong)
        _check_lists(prompts, answers=answers, counterfactuals=counterfactuals, wrong=wrong)
        right_ids = _answer_ids(model, prompts, answers)
        wrong_ids = _answer_ids(model, prompts, wrong)
        return _from_ids(model, prompts, right_ids, wrong_ids, counterfactuals, name, seed)

    @classmethod
    def from_csv(cls, model: Model, path: str | Path, name: str = "", seed: int = 0) -> "Task":
        """A task from a CSV file with the columns `prompt` and `answer`, and perhaps
        `counterfactual` and `wrong`; several answers to a prompt are separated by |. It is called
        by the file's name."""
        table = pd.read_csv(path, dtype=str, keep_default_na=False)
        unknown = sorted(set(table.columns) - set(COLUMNS))
        if unknown or not {"prompt", "answer"} <= set(table.columns):
            raise ValueError(
                f"{path} has the columns {', '.join(map(str, table.columns))}; a task has prompt "
                "and answer, and perhaps counterfactual and wrong"
            )

        def several(column: str) -> list[list[str]] | None:
            if column not in table:
                return None
            return [[word for word in cell.split("|") if word] for cell in table[column]]

        return cls.from_text(
            model,
            table.prompt,
            several("answer"),
            table.get("counterfactual"),
            several("wrong"),
            name or Path(path).stem,
            seed,
        )

    @classmethod
    def from_tokens(
        cls,
        model: Model,
        prompts: Iterable[Sequence[int]],
        answers: Iterable[Sequence[int]],
        counterfactuals: Iterable[Sequence[int]] | None = None,
        wrong: Iterable[Sequence[int]] | None = None,
        name: str = "own",
        seed: int = 0,
        texts: Sequence[str] = (),
        cf_texts: Sequence[str] = (),
    ) -> "Task":
        """A task from rows of token ids, without BOS (it is put first); `texts` are for tables."""
        rows = [tuple(row) for row in prompts]
        right = list(answers)
        cf_rows = None if counterfactuals is None else [tuple(row) for row in counterfactuals]
        wrong = [[] for _ in rows] if wrong is None else list(wrong)
        _check_lists(rows, answers=right, counterfactuals=cf_rows, wrong=wrong)
        if any(row[:1] == (model.bos,) for row in rows):
            raise ValueError(f"prompts begin without BOS (id {model.bos}): it is put first here")
        texts = tuple(texts or ("".join(model.decode(row)) for row in rows))
        tokens, last = model.pad(rows)
        cf_tokens = None
        if cf_rows is not None:
            cf_texts = tuple(cf_texts or ("".join(model.decode(row)) for row in cf_rows))
            cf_tokens, cf_last = model.pad(cf_rows)
            for i in (cf_last != last).nonzero().flatten().tolist():
                raise ValueError(
                    f"counterfactual {i} has {cf_last[i]} tokens, its prompt {last[i]}; they must "
                    f"be equally long:\n  {texts[i]!r}\n  {cf_texts[i]!r}"
                )
        task = cls(
            name,
            tokens,
            last,
            right=_padded(right),
            wrong=_padded(wrong),
            part=split(len(rows), seed),
            prompts=texts,
            counterfactual=cf_tokens,
            cf_prompts=tuple(cf_texts),
            tokenizer=model.tokenizer_hash,
        )
        task.check(model)
        return task


def mass(p: Float[Tensor, "n vocab"], ids: Int[Tensor, "n k"]) -> Float[Tensor, " n"]:
    """Probability of each row's ids together; −1 pads."""
    return (p.gather(-1, ids.clamp(min=0)) * (ids >= 0)).sum(-1)


def _check_lists(prompts: Sequence, **lists: Sequence | None) -> None:
    """Refuses prompts that are no task, and lists beside them that do not fit."""
    if not prompts:
        raise ValueError("a task needs at least one prompt")
    for label, values in lists.items():
        if values is not None and len(values) != len(prompts):
            raise ValueError(
                f"{len(prompts)} prompts but {len(values)} {label}: "
                "there must be one for each prompt"
            )
    repeated = sorted(prompt for prompt, count in Counter(prompts).items() if count > 1)
    if repeated:
        raise ValueError(
            f"prompts must be distinct (train and test share none), repeated: {repeated[:3]}"
        )


def _answer_ids(
    model: Model, prompts: Sequence[str], answers: Sequence[str | Sequence[str]]
) -> list[list[int]]:
    rows = []
    for prompt, given in zip(prompts, answers, strict=True):
        row = []
        for answer in [given] if isinstance(given, str) else given:
            ids = model.encode(answer)
            if len(ids) != 1:
                raise ValueError(
                    f"the answer {answer!r} to {prompt!r} is {len(ids)} tokens for '{model.name}' "
                    f"({model.decode(ids)}); answers must be one token (often it needs a leading "
                    "space)"
                )
            if unknown := model.unknown_words(answer):
                raise ValueError(
                    f"the answer {answer!r} to {prompt!r}: '{model.name}' has no token for "
                    f"{unknown[0]!r}"
                )
            row.append(ids[0])
        rows.append(row)
    return rows


def _warn_of_unknown(model: Model, prompts: Sequence[str]) -> None:
    """Prompts may hold unknown words, but whoever reads the numbers should know."""
    words = dict.fromkeys(word for prompt in prompts for word in model.unknown_words(prompt))
    if words:
        some = ", ".join(list(words)[:8])
        warnings.warn(
            f"'{model.name}' has no token for {len(words)} words of these prompts ({some}): it "
            "reads them all as the same unknown word",
            stacklevel=4,
        )


def _from_ids(
    model: Model,
    prompts: Sequence[str],
    right: Sequence[Sequence[int]],
    wrong: Sequence[Sequence[int]],
    counterfactuals: Sequence[str] | None,
    name: str,
    seed: int,
) -> Task:
    """A task of texts whose answers are token ids already."""
    _warn_of_unknown(model, prompts)
    cf_ids = None if counterfactuals is None else [model.encode(text) for text in counterfactuals]
    return Task.from_tokens(
        model,
        [model.encode(prompt) for prompt in prompts],
        right,
        cf_ids,
        wrong,
        name,
        seed,
        texts=prompts,
        cf_texts=counterfactuals or (),
    )


def split(n: int, seed: int = 0) -> Int[Tensor, " n"]:
    """The part of each of n prompts: half train, of the rest a fifth validation, the others
    test."""
    order = list(range(n))
    random.Random(seed).shuffle(order)
    n_train = (n + 1) // 2
    n_validation = (n - n_train) // 5
    part = torch.full((n,), PARTS.index("test"))
    part[order[:n_train]] = PARTS.index("train")
    part[order[n_train : n_train + n_validation]] = PARTS.index("validation")
    return part


def _padded(rows: Sequence[Sequence[int]]) -> Int[Tensor, "n k"]:
    """Rows of ids as one tensor, padded with −1 (at least one column)."""
    width = max(1, max(map(len, rows)))
    return torch.tensor([[*row, *[-1] * (width - len(row))] for row in rows])


# ---- the paper's tasks


def ioi(model: Model, n: int = 256, seed: int = 0) -> Task:
    """Indirect object identification.

    `When Mary and John went to the store, John gave a drink to` → ` Mary`. Both orders of the
    names; the counterfactual puts three other names, all distinct, in the three places.
    """
    part = TEXTS["ioi"]
    names = [name for name in part["names"] if len(model.encode(f" {name}")) == 1]
    if len(names) < 5:
        raise ValueError(
            f"only {len(names)} of {len(part['names'])} names are single tokens for "
            f"'{model.name}'; IOI needs 5"
        )
    _check_size(n, len(part["templates"]) * len(names) * (len(names) - 1), "ioi")
    rng = random.Random(seed)
    rows: dict[str, tuple[str, str, str]] = {}  # prompt: indirect object, subject, counterfactual
    while len(rows) < n:
        io, subject, *others = rng.sample(names, 5)
        template = rng.choice(part["templates"])
        first_names = [io, subject]
        cf_names = [others[0], others[1]]
        if rng.random() < 0.5:
            first_names.reverse()
            cf_names.reverse()
        words = {"place": rng.choice(part["places"]), "object": rng.choice(part["objects"])}
        prompt = template.format(*first_names, S=subject, **words)
        counterfactual = template.format(*cf_names, S=others[2], **words)
        rows.setdefault(prompt, (io, subject, counterfactual))
    task = Task.from_text(
        model,
        prompts=list(rows),
        answers=[f" {io}" for io, _, _ in rows.values()],
        counterfactuals=[counterfactual for _, _, counterfactual in rows.values()],
        wrong=[f" {subject}" for _, subject, _ in rows.values()],
        name="ioi",
        seed=seed,
    )
    return replace(task, of_paper=True)


def greater_than(model: Model, n: int = 256, seed: int = 0) -> Task:
    """Greater-Than.

    `The war lasted from the year 1732 to the year 17` → any later year of the century. Tokenizers
    that read a year as two tokens (GPT-2, tiny): right are the two-digit tokens above 32, wrong
    those below. Where every digit is a token (SmolLM2), the next token is the tens digit: right are
    the digits above 3, wrong those below, 3 itself is neither. The counterfactual year ends in 01.
    """
    part = TEXTS["greater_than"]
    nouns = [noun for noun in part["nouns"] if len(model.encode(f" {noun}")) == 1]
    years, ids = _years(model)
    same_token = 100 // len(ids)  # years of a century that begin with the same token: 1, or 10
    _check_size(n, len(nouns) * len(years), "greater_than")
    rng = random.Random(seed)
    rows: dict[str, tuple[str, int]] = {}  # prompt: counterfactual, number that is to be exceeded
    while len(rows) < n:
        noun = rng.choice(nouns)
        year = rng.choice(years)
        century = year // 100
        prompt, counterfactual = (
            part["template"].format(noun=noun, start=start, century=century)
            for start in (year, century * 100 + 1)
        )
        rows[prompt] = (counterfactual, year % 100 // same_token)
    task = _from_ids(
        model,
        prompts=list(rows),
        right=[ids[number + 1 :] for _, number in rows.values()],
        wrong=[ids[:number] for _, number in rows.values()],
        counterfactuals=[counterfactual for counterfactual, _ in rows.values()],
        name="greater_than",
        seed=seed,
    )
    return replace(task, of_paper=True)


def _years(model: Model) -> tuple[list[int], list[int]]:
    """Years to begin with, and the tokens that can follow the century, in their numbers' order."""
    pairs = [model.encode(f"{number:02}") for number in range(100)]
    if all(len(ids) == 1 for ids in pairs):
        ids = [token for [token] in pairs]
        years = [_two_token_years(model, century, ids) for century in CENTURIES]
        return list(chain.from_iterable(years)), ids
    single = [model.encode(str(digit)) for digit in range(10)]
    if all(len(ids) == 1 for ids in single):
        ids = [token for [token] in single]
        return [century * 100 + y for century in CENTURIES for y in range(10, 90)], ids
    raise ValueError(
        f"the tokenizer of '{model.name}' reads numbers neither as pairs nor as single digits"
    )


def _two_token_years(model: Model, century: int, ids: list[int]) -> list[int]:
    """Years 02 to 98 of a century that are its token and a two-digit token, as the counterfactual
    year 01 must be."""
    century_ids = model.encode(f" {century}")
    if len(century_ids) != 1:
        return []
    fits = [model.encode(f" {century}{y:02}") == [*century_ids, ids[y]] for y in range(100)]
    return [century * 100 + y for y in range(2, 99) if fits[1] and fits[y]]


def _check_size(n: int, possible: int, name: str) -> None:
    if n < 2:
        raise ValueError(f"{name} needs n >= 2 prompts (a train and a test part), got {n}")
    if n > possible:
        raise ValueError(
            f"{name} has only {possible:,} distinct prompts for this model, {n:,} were asked for"
        )
