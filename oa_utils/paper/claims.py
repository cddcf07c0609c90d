"""What the paper says, beside what was measured here: recorded by notebooks and published.

A claim holds, does not hold or is undecided by its rule and its interval alone. The rule stands in
the code before the run that it judges.

`python -m oa_utils.paper.claims` lists all claims; with an id it runs that claim's notebook again,
in an empty store, and compares.
"""

import argparse
import difflib
import json
import math
import os
import re
import shutil
import tempfile
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from oa_utils import machine, plots, stats, store
from oa_utils.tasks import Task

# Who records what: the name under which claims are stored, and the notebook that measures them.
NOTEBOOKS = {
    "single_components": "01_single_components",
    "circuits_ioi": "02_circuits_ioi",
    "circuits_gt": "03_circuits_greater_than",
    "random_circuits": "04_random_circuits",
    "causal_tracing": "05_causal_tracing",
    "latent_prediction": "06_latent_prediction",
    "lens_faithfulness": "07_lens_faithfulness",
    "elicitation": "08_elicitation",
    "beyond_constants": "09_beyond_constants",
    "ground_truth": "10_ground_truth_circuits",
    "own_task": "11_your_own_task",
}
Number = float | np.number | None
MARKS = {True: "✓", False: "✗", None: "?"}
LEGEND = "✓ holds, ✗ does not hold, ? undecided, empty: not measured here"
VERDICTS = {True: "holds", False: "does not hold", None: "undecided"}
RULE = re.compile(r"(?P<side><=|>=|<|>) (?P<bound>\S+)|in \[(?P<from>\S+), (?P<to>\S+)\]")
WRONG_BY_CHANCE = 0.025  # share of verdicts by 95 % intervals, at most (truth at the bound)


def satisfies(value: float, rule: str) -> bool:
    """Whether a number is as a rule wants it: `< 1`, `> 0.5`, `<= 0`, `>= 1` or `in [-1, 1]`."""
    parsed = RULE.fullmatch(rule)
    if parsed is None:
        raise ValueError(f"rule {rule!r}: rules are such as '< 1', '>= 0.5' or 'in [-0.1, 0.1]'")
    if parsed["from"]:
        return float(parsed["from"]) <= value <= float(parsed["to"])
    bound = float(parsed["bound"])
    strict = value < bound if parsed["side"][0] == "<" else value > bound
    return strict or (parsed["side"][1:] == "=" and value == bound)


def verdict(rule: str, low: float | None, high: float | None) -> bool | None:
    """True where the whole interval is as the rule wants it, False where nothing of it is, None
    (undecided) between, and where there is no rule or no interval."""
    if not rule or low is None or high is None or math.isnan(low) or math.isnan(high):
        return None
    ends = [satisfies(end, rule) for end in (low, high)]
    inside = satisfies(_nearest(rule, low, high), rule)
    return True if all(ends) else None if inside else False


def _nearest(rule: str, low: float, high: float) -> float:
    """The number of an interval that is most likely to be as the rule wants it."""
    parsed = RULE.fullmatch(rule)
    if parsed["from"]:
        return min(max(low, float(parsed["from"])), high)
    return low if parsed["side"][0] == "<" else high


@dataclass(frozen=True)
class Claim:
    id: str  # such as `single.median_ratio.mean`
    paper: str  # the statement: the paper's, or ours where it has no such number
    paper_value: Number = None  # the paper's number
    measured: Number = None  # ours, with its 95 % interval
    low: Number = None
    high: Number = None
    rule: str = ""  # what the interval must be for the claim to hold, see `satisfies`
    exact: bool = False  # nothing in the number is random: it is its own interval
    seeds: int = 0  # that a number rests on whose training is random; 0: nothing random in it
    model: str = ""
    source: str = ""  # name of the result file it came from
    note: str = ""
    holds: bool | None = field(init=False, default=None)  # None: undecided

    def __post_init__(self):
        """Numbers of numpy become Python's own, so that a stored claim equals its source."""
        for name in ("paper_value", "measured", "low", "high"):
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else float(value))
        if self.rule:
            satisfies(0.0, self.rule)  # refuses a rule that cannot be read
        ends = (self.measured, self.measured) if self.exact else (self.low, self.high)
        object.__setattr__(self, "holds", verdict(self.rule, *ends))

    @property
    def mark(self) -> str:
        return "" if self.measured is None else MARKS[self.holds]

    @property
    def remark(self) -> str:
        """The note, and how little the number rests on."""
        return "; ".join(filter(None, [self.note, "one seed" if self.seeds == 1 else ""]))

    @property
    def interval(self) -> str:
        """The measured number with its interval, as text."""
        if self.low is None:
            return number(self.measured)
        return f"{number(self.measured)} [{number(self.low)}, {number(self.high)}]"

    @property
    def cell(self) -> str:
        """Verdict and number, for a table."""
        return f"{self.mark} {self.interval}".strip()

    @property
    def condition(self) -> str:
        """The rule as people write it."""

        def written(found: re.Match) -> str:
            value = float(found[0])
            return f"{value:g}".replace("-", "−") if value.is_integer() else number(value)

        words = self.rule.replace("<=", "≤").replace(">=", "≥")
        return re.sub(r"-?[\d.]+(e-?\d+)?", written, words)


class Table(pd.DataFrame):
    """A table that a notebook shows without cutting its sentences off."""

    @property
    def _constructor(self) -> type:
        return Table  # so that parts of a table are tables too

    def _repr_html_(self) -> str:
        with pd.option_context("display.max_colwidth", None):
            return self.to_html(index=False)


def number(value: float | None) -> str:
    """Three digits; nothing where there is no number."""
    return "" if value is None or math.isnan(value) else f"{value:.3g}".replace("-", "−")


def show(claims: Iterable[Claim], model: Any = None) -> Table:
    """Claims as the last table of a notebook; notes are shown if some claim has one, and what is
    published for other models than this one stands beside."""
    claims = list(claims)
    elsewhere: dict[str, dict[str, Claim]] = {}
    for claim in published() if model is not None else []:
        if claim.model != column(model):
            elsewhere.setdefault(claim.model, {})[claim.id] = claim
    rows = []
    for claim in claims:
        value = "" if claim.paper_value is None else f" ({number(claim.paper_value)})"
        row = {
            "claim": claim.id,
            "statement (paper)": claim.paper + value,
            "holds if": claim.condition,
            "here [low, high]": claim.cell,
        }
        for name, others in elsewhere.items():
            other = others.get(claim.id)
            row[f"published: {name}"] = other.cell if other else ""
        rows.append(row | {"note": claim.remark})
    table = Table(rows, columns=list(rows[0]) if rows else ["claim"])
    empty = [name for name in table.columns if not table[name].astype(bool).any()]
    return table.drop(columns=empty)


def reason(id: str, whys: Mapping[str, str]) -> str:
    """What may be behind a claim that does not hold: of the longest beginning of its id that is
    there."""
    fitting = [prefix for prefix in whys if id.startswith(prefix)]
    return whys[max(fitting, key=len)] if fitting else ""


def discuss(claims: Iterable[Claim], whys: Mapping[str, str]) -> str:
    """Claims that do not hold or are undecided, as Markdown, each with what may be behind it (by
    the beginning of its id). Nothing here tests these reasons, and the text says so."""
    lines = []
    for claim in claims:
        if claim.holds is True or claim.measured is None:
            continue
        why = reason(claim.id, whys)
        if math.isnan(claim.measured):
            why = "there is no effect here that it could be read from"
        word = "does not hold" if claim.holds is False else "is undecided"
        value = f" ({claim.interval})" if claim.interval else ""
        lines.append(f"- `{claim.id}` {word}{value}" + (f": {why}." if why else "."))
    if not lines:
        return "Every claim that was measured holds."
    return "\n".join(["What may be behind it (not tested here):", "", *lines])


def ratio_claim(
    id: str,
    paper: str,
    above: Sequence[stats.Sample],
    below: Sequence[stats.Sample],
    rule: str,
    seed: int = 0,
    **more: Any,
) -> Claim:
    """Mean of one list of samples over that of another, all of the same prompts; the interval is
    over prompts, drawn for all of them together."""
    top, bottom = (np.stack([stats.array(x) for x in side], 1) for side in (above, below))

    def ratio(top: np.ndarray, bottom: np.ndarray) -> float:
        return float(top.mean() / bottom.mean())

    low, high = stats.bootstrap(ratio, top, bottom, seed=seed)
    return Claim(id, paper, None, ratio(top, bottom), low, high, rule, **more)


# ---- stored and published


def column(model: Any) -> str:
    """Whose claims they are: the model's, or the model's at the paper's budget."""
    return f"{model.name}.paper" if model.budget == "paper" else model.name


def variant(model: Any, seed: int, *tasks: Task) -> str:
    """Words for a run that is not the one that is committed: other tasks than the paper's, another
    seed or budget. Empty for the one that is."""
    words = [task.name for task in tasks if not task.of_paper]
    words += [f"seed={seed}"] * (seed != 0) + ["paper"] * (model.budget == "paper")
    return store.slug("_".join(words)) if words else ""


def record(claims: Sequence[Claim], model: Any, experiment: str, variant: str = "") -> Path | None:
    """Stores an experiment's claims, in place of those recorded before, to be published later.

    Claims of a `variant` of the run are not the paper's and are not stored; those of the paper's
    budget have a column of their own.
    """
    if variant not in ("", "paper"):
        place = plots.folder(model.budget) / store.slug(model.name) / "own" / variant
        machine.announce(
            f"these claims are shown, not recorded: they are not the paper's ({variant}); figures "
            f"are in {place}"
        )
        return None
    named = [replace(claim, model=column(model)) for claim in claims]
    ids = [claim.id for claim in named]
    twice = sorted({id for id in ids if ids.count(id) > 1})
    if twice:
        raise ValueError(f"claims recorded twice: {', '.join(twice)}")
    path = _path(store.folder(model.budget), column(model), experiment)
    content = {
        "experiment": "claims",
        "key": experiment,
        "model": model.name,
        "version": 1,
        "settings": {},
        "numbers": {"rows": [asdict(claim) for claim in named]},
    }
    store.write_record(path, content, model.budget)
    store.note_use(path)
    return path


def _path(folder: Path, model_name: str, experiment: str) -> Path:
    return folder / store.slug(model_name) / "claims" / f"{store.slug(experiment)}.json"


def _claims_of(path: Path) -> list[Claim]:
    given = {field.name for field in fields(Claim) if field.init}
    rows = store.read_record(path)["numbers"]["rows"]
    return [Claim(**{name: row[name] for name in given & set(row)}) for row in rows]


def chapters(model_name: str | None = None) -> dict[tuple[str, str], list[Claim]]:
    """Published claims by the notebook's order: (experiment, model) -> claims."""
    place = store.slug(model_name) if model_name else "*"
    paths = store.published().glob(f"{place}/claims/*.json")
    order = list(NOTEBOOKS)

    def position(path: Path) -> tuple:
        return order.index(path.stem) if path.stem in order else len(order), path.stem, path

    return {
        (path.stem, path.parent.parent.name): _claims_of(path)
        for path in sorted(paths, key=position)
    }


def published(model_name: str | None = None) -> list[Claim]:
    """Published claims of one model, or of all."""
    return [claim for claims in chapters(model_name).values() for claim in claims]


# ---- measured anew


def recompute(id: str, model: str) -> tuple[Claim, Claim]:
    """A published claim, and the same claim from its notebook, run anew in an empty store."""
    from oa_utils.paper import notebooks  # needs nbclient, which only those who run notebooks have

    where = model.removesuffix(".paper")
    name = notebooks.name_of(where) + model[len(where) :]
    experiment, stored = _find(id, name)
    path = _path(store.published(), name, experiment)
    budget = store.read_record(path)["budget"]
    notebook = notebook_of(experiment)
    machine.announce(f"running {notebook.name} anew, in an empty store: {minutes(notebook)}")
    with tempfile.TemporaryDirectory(prefix="oa-claim-") as folder:
        environment = {"OA_STORE": folder, "OA_FIGURES": folder}
        notebooks.execute(notebook, where, budget, environment)
        again = {claim.id: claim for claim in _claims_of(_path(Path(folder), name, experiment))}
    if id not in again:
        raise LookupError(f"{NOTEBOOKS[experiment]} no longer records the claim {id}")
    return stored, again[id]


def _find(id: str, model_name: str) -> tuple[str, Claim]:
    """The experiment that a published claim belongs to, and the claim."""
    known = {
        claim.id: (experiment, claim)
        for (experiment, _), claims in chapters(model_name).items()
        for claim in claims
    }
    if id not in known:
        having = [
            model for (_, model), claims in chapters().items() if id in {c.id for c in claims}
        ]
        if having:
            others = ", ".join(having)
            raise LookupError(
                f"claim {id!r} is of {others}, not of {model_name}: say MODEL={having[0]}"
            )
        near = ", ".join(difflib.get_close_matches(id, known, n=5, cutoff=0.3)) or "none"
        raise LookupError(f"no published claim {id!r} for {model_name}; nearest: {near}")
    return known[id]


def notebook_of(experiment: str) -> Path:
    """The notebook that records an experiment's claims."""
    root = store.repository()
    if root is None:
        raise LookupError("claims are recomputed by notebooks, which are in the repository only")
    if experiment not in NOTEBOOKS:
        raise LookupError(f"no notebook records {experiment}; known: {', '.join(NOTEBOOKS)}")
    return root / "notebooks" / f"{NOTEBOOKS[experiment]}.ipynb"


def minutes(notebook: Path) -> str:
    """What a notebook says of its cost, in its first cell."""
    first = json.loads(notebook.read_text("utf-8"))["cells"][0]
    line = re.search(r"\*\*Minutes[^\n]*", "".join(first["source"]))
    return line[0].replace("*", "") if line else "its first cell does not say how long it takes"


# ---- in the README

ByModel = dict[str, Claim]  # one claim, by model


def _together(ids: Collection[str] | None = None) -> dict[str, dict[str, ByModel]]:
    """Published claims, all or some: by experiment and id."""
    table: dict[str, dict[str, ByModel]] = {}
    for (experiment, model), listed in chapters().items():
        for claim in listed:
            if ids is None or claim.id in ids:
                table.setdefault(experiment, {}).setdefault(claim.id, {})[model] = claim
    missing = set(ids or ()) - {id for by_id in table.values() for id in by_id}
    if missing:
        raise LookupError(f"no such claims are published: {', '.join(sorted(missing))}")
    return table


def _models(table: dict[str, dict[str, ByModel]]) -> list[str]:
    """Those that some claim was measured on, the bundled one last."""
    models = {
        model for by_id in table.values() for by_model in by_id.values() for model in by_model
    }
    return sorted(models, key=lambda model: (model == "tiny", model))


def markdown(whys: Mapping[str, str]) -> str:
    """All published claims as one table, by chapter, with a column for each model; where one does
    not hold, what may be behind it."""
    table = _together()
    models = _models(table)
    lines = [
        f"| claim | statement | holds if | paper | {' | '.join(models)} | remark |",
        "|---|---|---|---|" + "---|" * (len(models) + 1),
    ]
    for experiment, by_id in table.items():
        lines.append(f"| {_chapter(experiment)} |" + " |" * (len(models) + 4))
        for id, by_model in by_id.items():
            any_model = next(iter(by_model.values()))
            cells = [f"`{id}`", any_model.paper, any_model.condition, number(any_model.paper_value)]
            cells += _numbers(by_model, models)
            fails = any(claim.holds is False for claim in by_model.values())
            why = reason(id, whys) if fails else ""
            lines.append(_row([*cells, "; ".join(filter(None, [_remark(by_model), why]))]))
    everything = [
        claim for by_id in table.values() for each in by_id.values() for claim in each.values()
    ]
    return "\n".join([*lines, "", LEGEND + ".", "", _by_chance(everything)]) + "\n"


def headlines(statements: Mapping[str, str]) -> str:
    """Some published claims in plain words, by id, with the paper's number behind them, and how
    many of all claims hold for each model."""
    table = _together(statements)
    models = _models(table)
    lines = [
        f"| claim (the paper's number, GPT-2) | {' | '.join(models)} |",
        "|---|" + "---|" * len(models),
    ]
    listed = {id: by_model for by_id in table.values() for id, by_model in by_id.items()}
    for id, statement in statements.items():
        value = number(next(iter(listed[id].values())).paper_value)
        words = f"{statement} ({value})" if value else statement
        lines.append(_row([words, *_numbers(listed[id], models)]))
    whole = _together()
    counts = [f"{model}: {_count(published(model))}" for model in _models(whole)]
    return "\n".join([*lines, "", f"{LEGEND}. Of all claims: {'; '.join(counts)}."]) + "\n"


def _chapter(experiment: str) -> str:
    """The notebook that measures an experiment's claims, as a link."""
    stem = NOTEBOOKS.get(experiment)
    return f"**[{stem}](notebooks/{stem}.ipynb)**" if stem else f"**{experiment}**"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _numbers(by_model: ByModel, models: Sequence[str]) -> list[str]:
    return [by_model[model].cell if model in by_model else "" for model in models]


def _remark(by_model: ByModel) -> str:
    """What is to be said of a claim's numbers: whose it is, where models differ."""
    remarks = {model: claim.remark for model, claim in sorted(by_model.items())}
    if len(set(remarks.values())) > 1:
        remarks = {model: f"{model}: {text}" for model, text in remarks.items() if text}
    return "; ".join(dict.fromkeys(remarks.values()))


def _by_chance(claims: Sequence[Claim]) -> str:
    decided = [claim for claim in claims if claim.holds is not None and not claim.exact]
    return (
        f"{len(decided)} verdicts come from 95 % intervals: if every truth lay just at its bound, "
        f"{WRONG_BY_CHANCE * len(decided):.1f} of them would be wrong by chance; fewer, if not."
    )


# ---- in a terminal


def report(model_name: str | None, width: int) -> str:
    """All published claims by chapter, as text of at most so many columns."""
    groups = chapters(model_name)
    if not groups:
        return f"no claims are published for {model_name or 'any model'}"
    lines = []
    for (experiment, model), claims in groups.items():
        lines += ["", f"{experiment} · {model} · {_count(claims)}"]
        for claim in claims:
            lines += _entry(claim, width)
    everything = [claim for claims in groups.values() for claim in claims]
    lines += ["", f"{len(everything)} claims: {_count(everything)}"]
    lines += textwrap.wrap(LEGEND, width)
    lines += textwrap.wrap(_by_chance(everything), width)
    lines += textwrap.wrap("`make claim ID=… MODEL=…` measures one of them anew", width)
    return "\n".join(lines[1:])


def _count(claims: Sequence[Claim]) -> str:
    marks = [claim.mark for claim in claims]
    words = [f"{marks.count(mark)} {mark}" for mark in MARKS.values()]
    if unmeasured := marks.count(""):
        words.append(f"{unmeasured} not measured")
    return ", ".join(words)


def _entry(claim: Claim, width: int) -> list[str]:
    """One claim: its mark, id and number, and below the paper's sentence and our note."""
    sentence = claim.paper
    if claim.paper_value is not None:
        sentence += f" (paper: {number(claim.paper_value)})"
    lines = textwrap.wrap(
        f"{claim.mark or '·'} {claim.id}  {claim.interval}", width, subsequent_indent="    "
    )
    if claim.rule:
        sentence += f"; holds if {claim.condition}"
    for text in (sentence, claim.remark):
        lines += textwrap.wrap(text, width, initial_indent="    ", subsequent_indent="    ")
    return lines


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m oa_utils.paper.claims", description=__doc__)
    parser.add_argument("id", nargs="?", help="recompute this claim; without it, list all")
    parser.add_argument("--model", help="of this model (default: all, or tiny to recompute)")
    options = parser.parse_args(arguments)
    if not options.id:
        print(report(options.model, shutil.get_terminal_size().columns))
        return
    model = options.model or os.environ.get("OA_MODEL") or "tiny"
    try:
        stored, again = recompute(options.id, model)
    except LookupError as error:
        parser.error(error.args[0])
    values = [math.nan if claim.measured is None else claim.measured for claim in (stored, again)]
    print(f"{stored.id} ({stored.model}): {stored.paper}; holds if {stored.condition or 'no rule'}")
    print(f"paper       {number(stored.paper_value)}")
    for word, value, claim in zip(("stored", "recomputed"), values, (stored, again), strict=True):
        print(f"{word:<11} {value}  {claim.interval} {claim.mark} {VERDICTS[claim.holds]}")
    print(f"difference  {values[1] - values[0]:.3g}")


if __name__ == "__main__":
    main()
