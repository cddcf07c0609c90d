"""Tasks: prompts, their answers and counterfactuals as tokens, split in a train and a test part that share no prompt."""

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from oa_utils.models import DATA, Model

TEXTS = json.loads((DATA / "tasks.json").read_text())
ALIGNMENTS = ("start", "end", "right")


@dataclass(frozen=True, eq=False)
class Task:
    """n prompts for one model. Everything of length n is indexed together by `task[rows]`."""

    name: str
    tokens: Int[Tensor, "n pos"]  # BOS first, padded on the right
    last: Int[Tensor, " n"]  # index of the last prompt token
    right: Int[Tensor, "n k"]  # ids of right answers, padded with -1
    wrong: Int[Tensor, "n j"]  # ids of wrong answers, padded with -1
    in_train: Bool[Tensor, " n"]
    prompts: tuple[str, ...]  # the texts, for tables
    counterfactual: Int[Tensor, "n pos"] | None = None
    cf_prompts: tuple[str, ...] = ()
    subject: Int[Tensor, "n 2"] | None = None  # facts only: the subject's first token and last token + 1
    relation: tuple[str, ...] = ()  # facts only

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, rows: slice | Sequence[int] | Tensor) -> "Task":
        index = torch.arange(len(self))[rows if isinstance(rows, slice) else torch.as_tensor(rows)]
        part = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Tensor):
                part[f.name] = value[index]
            elif isinstance(value, tuple) and value:
                part[f.name] = tuple(value[i] for i in index)
        return replace(self, **part)

    @property
    def answers(self) -> Int[Tensor, " n"]:
        return self.right[:, 0]

    @property
    def train(self) -> "Task":
        return self._half(self.in_train, "train")

    @property
    def test(self) -> "Task":
        return self._half(~self.in_train, "test")

    def _half(self, rows: Tensor, which: str) -> "Task":
        if not rows.any():
            raise ValueError(f"task '{self.name}' has no {which} prompts (n = {len(self)}); make it with a larger n")
        return self[rows]

    @property
    def fingerprint(self) -> str:
        """A hash of everything that a number can depend on."""
        digest = hashlib.sha256(self.name.encode())
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Tensor):
                digest.update(f"{f.name}{tuple(value.shape)}".encode() + value.cpu().numpy().tobytes())
        return digest.hexdigest()[:16]

    def need_counterfactual(self) -> Int[Tensor, "n pos"]:
        if self.counterfactual is None:
            raise ValueError(
                f"task '{self.name}' has no counterfactual prompts, so 'counterfactual' and 'cf_mean' cannot be used; "
                "pass counterfactuals=[...] to Task.from_text, or choose another ablation"
            )
        return self.counterfactual

    def partners(self, seed: int = 0) -> Int[Tensor, " n"]:
        """Another prompt for each prompt: one random cycle through all of them, so none meets itself."""
        if len(self) < 2:
            raise ValueError(f"resampling needs at least 2 prompts, task '{self.name}' has {len(self)}")
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))
        partner = torch.empty_like(order)
        partner[order] = order.roll(-1)
        return partner

    def resampled(self, partners: Int[Tensor, " n"], align: str = "start") -> Int[Tensor, "n pos"]:
        """The partners' tokens laid under the prompts.

        A longer partner gives its first tokens (`end`: BOS and its last ones); a shorter one is padded with BOS on the
        left (`right`: on the right), and run as it is.
        """
        if align not in ALIGNMENTS:
            raise ValueError(f"align is one of {', '.join(ALIGNMENTS)}, not '{align}'")
        bos = self.tokens[0, 0]
        out = torch.full_like(self.tokens, bos)
        for i, j in enumerate(partners.tolist()):
            want, row = int(self.last[i]) + 1, self.tokens[j, : int(self.last[j]) + 1]
            if len(row) > want:
                row = torch.cat([row[:1], row[len(row) - want + 1 :]]) if align == "end" else row[:want]
            start = 0 if align == "right" else want - len(row)
            out[i, start : start + len(row)] = row
        return out

    def log_probs(self, model: Model, batch: int = 64) -> Float[Tensor, "n vocab"]:
        """The full model's log-probabilities at each prompt's last position."""
        with torch.no_grad():
            parts = [model(self.tokens[i : i + batch], self.last[i : i + batch]) for i in range(0, len(self), batch)]
        return torch.cat(parts)

    def accuracy(self, model: Model) -> float:
        """Share of prompts whose most likely next token, over the whole vocabulary, is right."""
        top = self.log_probs(model).argmax(-1).cpu()
        return (top[:, None] == self.right).any(-1).float().mean().item()

    def score(self, model: Model) -> float:
        """Mean over prompts of P(any right answer) − P(any wrong answer)."""
        p = self.log_probs(model).exp().cpu()
        return (mass(p, self.right) - mass(p, self.wrong)).mean().item()

    def table(self, model: Model, n: int = 5) -> pd.DataFrame:
        """A few prompts as text, for notebooks."""
        rows = []
        for i in range(min(n, len(self))):
            right, wrong = (model.decode(ids[i][ids[i] >= 0][:4]) for ids in (self.right, self.wrong))
            row = {"prompt": self.prompts[i], "right": " ".join(right), "wrong": " ".join(wrong)}
            rows.append(row | ({"counterfactual": self.cf_prompts[i]} if self.cf_prompts else {}))
        return pd.DataFrame(rows)

    @classmethod
    def from_text(cls, model: Model, prompts: Sequence[str], answers: Sequence[str | Sequence[str]],
                  counterfactuals: Sequence[str] | None = None, wrong: Sequence[str | Sequence[str]] | None = None,
                  name: str = "own", seed: int = 0) -> "Task":  # fmt: skip
        """A task from texts. An answer goes right behind its prompt (start it with a space where one belongs) and must be
        one token; a list gives several right answers. Half of the distinct prompts, by seed, become the train part."""
        lists = {"answers": answers, "counterfactuals": counterfactuals, "wrong": wrong}
        if not prompts:
            raise ValueError("a task needs at least one prompt")
        for label, values in lists.items():
            if values is not None and len(values) != len(prompts):
                raise ValueError(f"{len(prompts)} prompts but {len(values)} {label}: there must be one for each prompt")
        if repeated := {p for p in prompts if prompts.count(p) > 1} if len(set(prompts)) < len(prompts) else None:
            raise ValueError(f"prompts must be distinct (train and test share none), repeated: {sorted(repeated)[:3]}")
        tokens, last = model.pad([model.encode(p) for p in prompts])
        cf_tokens = None
        if counterfactuals is not None:
            cf_tokens, cf_last = model.pad([model.encode(p) for p in counterfactuals])
            if differ := (cf_last != last).nonzero().flatten().tolist():
                i = differ[0]
                raise ValueError(
                    f"counterfactual {i} has {cf_last[i]} tokens, its prompt {last[i]}; they must be equally long:\n"
                    f"  {prompts[i]!r}\n  {counterfactuals[i]!r}"
                )
        order = list(range(len(prompts)))
        random.Random(seed).shuffle(order)
        in_train = torch.zeros(len(prompts), dtype=torch.bool)
        in_train[order[: (len(prompts) + 1) // 2]] = True
        right_ids = _answer_ids(model, prompts, answers)
        wrong_ids = _answer_ids(model, prompts, wrong) if wrong else torch.full((len(prompts), 1), -1)
        return cls(name, tokens, last, right_ids, wrong_ids, in_train, tuple(prompts), cf_tokens, tuple(counterfactuals or ()))


def mass(p: Float[Tensor, "n vocab"], ids: Int[Tensor, "n k"]) -> Float[Tensor, " n"]:
    """Probability of each row's ids together; −1 pads."""
    return (p.gather(-1, ids.clamp(min=0)) * (ids >= 0)).sum(-1)


def pad_ids(rows: Sequence[Sequence[int]]) -> Int[Tensor, "n k"]:
    width = max(1, max(map(len, rows)))
    return torch.tensor([[*row, *[-1] * (width - len(row))] for row in rows])


def _answer_ids(model: Model, prompts: Sequence[str], answers: Sequence[str | Sequence[str]]) -> Int[Tensor, "n k"]:
    rows = []
    for prompt, given in zip(prompts, answers, strict=True):
        row = []
        for answer in [given] if isinstance(given, str) else given:
            ids = model.encode(answer)
            if len(ids) != 1:
                raise ValueError(
                    f"the answer {answer!r} to {prompt!r} is {len(ids)} tokens for '{model.name}' "
                    f"({model.decode(ids)}); answers must be one token (often it needs a leading space)"
                )
            row.append(ids[0])
        rows.append(row)
    return pad_ids(rows)


def _check(n: int, possible: int, name: str) -> None:
    if n < 2:
        raise ValueError(f"{name} needs n >= 2 prompts (a train and a test part), got {n}")
    if n > possible:
        raise ValueError(f"{name} has only {possible:,} distinct prompts for this model, {n:,} were asked for")


def ioi(model: Model, n: int = 256, seed: int = 0) -> Task:
    """Indirect object identification: `When Mary and John went to the store, John gave a drink to` → ` Mary`.

    Both orders of the names; the counterfactual puts three other names, all distinct, in the three places.
    """
    part = TEXTS["ioi"]
    names = [name for name in part["names"] if len(model.encode(f" {name}")) == 1]
    if len(names) < 5:
        raise ValueError(f"only {len(names)} of {len(part['names'])} names are single tokens for '{model.name}'; IOI needs 5")
    _check(n, len(part["templates"]) * len(names) * (len(names) - 1), "ioi")
    rng, rows = random.Random(seed), {}
    while len(rows) < n:
        io, s, *others = rng.sample(names, 5)
        template, swap = rng.choice(part["templates"]), rng.random() < 0.5
        what = {"place": rng.choice(part["places"]), "object": rng.choice(part["objects"])}
        first, cf_first = ((s, io), (others[1], others[0])) if swap else ((io, s), (others[0], others[1]))
        prompt = template.format(*first, S=s, **what)
        rows.setdefault(prompt, (io, s, template.format(*cf_first, S=others[2], **what)))
    io, s, counterfactuals = zip(*rows.values(), strict=True)
    answers, wrong = [f" {x}" for x in io], [f" {x}" for x in s]
    return Task.from_text(model, list(rows), answers, counterfactuals, wrong, name="ioi", seed=seed)


def greater_than(model: Model, n: int = 256, seed: int = 0) -> Task:
    """Greater-Than: `The war lasted from the year 1732 to the year 17` → any later year of the century.

    Tokenizers that read a year as two tokens (GPT-2, tiny): right are the two-digit tokens above 32, wrong those below.
    Where every digit is a token (SmolLM2), the next token is the tens digit: right are the digits above 3, wrong those
    below, 3 itself is neither. The counterfactual year ends in 01.
    """
    part = TEXTS["greater_than"]
    pairs = [model.encode(f"{y:02}") for y in range(100)]
    digits = [model.encode(str(d)) for d in range(10)]
    nouns = [noun for noun in part["nouns"] if len(model.encode(f" {noun}")) == 1]
    if all(len(ids) == 1 for ids in pairs):
        ids = [i for [i] in pairs]
        years = [year for century in range(10, 19) for year in _two_token_years(model, century, ids)]
        answer = {y: ([i for j, i in enumerate(ids) if j > y], [i for j, i in enumerate(ids) if j < y]) for y in range(100)}
    elif all(len(d) == 1 for d in digits):
        ids = [i for [i] in digits]
        years = [century * 100 + y for century in range(10, 19) for y in range(10, 90)]
        answer = {y: (ids[y // 10 + 1 :], ids[: y // 10]) for y in range(100)}
    else:
        raise ValueError(f"the tokenizer of '{model.name}' reads numbers neither as pairs nor as single digits")
    _check(n, len(nouns) * len(years), "greater_than")
    rng, rows = random.Random(seed), {}
    while len(rows) < n:
        noun, year = rng.choice(nouns), rng.choice(years)
        prompt, cf = (
            part["template"].format(noun=noun, start=start, century=year // 100) for start in (year, year // 100 * 100 + 1)
        )
        rows.setdefault(prompt, (cf, *answer[year % 100]))
    counterfactuals, right, wrong = zip(*rows.values(), strict=True)
    blank = [model.decode(r[:1])[0] for r in right]
    task = Task.from_text(model, list(rows), blank, counterfactuals, name="greater_than", seed=seed)
    return replace(task, right=pad_ids(right), wrong=pad_ids(wrong))


def _two_token_years(model: Model, century: int, ids: list[int]) -> list[int]:
    """Years 02 to 98 of a century that are its token and a two-digit token, as the counterfactual year 01 must be."""
    head = model.encode(f" {century}")
    fits = [len(head) == 1 and model.encode(f" {century}{y:02}") == [*head, ids[y]] for y in range(100)]
    return [century * 100 + y for y in range(2, 99) if fits[1] and fits[y]]
