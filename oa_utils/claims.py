"""What the paper says, beside what was measured here: written down by notebooks, published, and open to recomputing."""

import argparse
import difflib
import importlib
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import pandas as pd

from oa_utils import files, runs

# First part of a claim's id -> function(model_name, id) -> float that measures it again.
RECOMPUTE: dict[str, str] = {
    "single": "oa_utils.importance:claim",
    "tracing": "oa_utils.tracing_claims:claim",
    "circuits_ioi": "oa_utils.circuit_claims:claim",
    "circuits_gt": "oa_utils.circuit_claims:claim",
    "random_ioi": "oa_utils.null_circuits:claim",
    "random_gt": "oa_utils.null_circuits:claim",
    "elicitation": "oa_utils.elicitation_claims:claim",
    "lens": "oa_utils.latent:claim",
    "faithfulness": "oa_utils.latent:claim",
}
MARKS = {True: "✓", False: "✗", None: "–"}


@dataclass(frozen=True)
class Claim:
    id: str  # such as `single.median_ratio.mean`
    paper: str  # what the paper says, in words
    paper_value: float | None = None  # and its number
    measured: float | None = None  # ours, with its interval
    low: float | None = None
    high: float | None = None
    holds: bool | None = None  # None: cannot be decided here
    model: str = ""
    source: str = ""  # name of the result file it came from
    note: str = ""


class Table(pd.DataFrame):
    """A table that a notebook shows without cutting its sentences off."""

    def _repr_html_(self) -> str:
        with pd.option_context("display.max_colwidth", None):
            return self.to_html(index=False)


def record(claims: Sequence[Claim], model: Any, experiment: str) -> Path:
    """Stores an experiment's claims for a model in place of those recorded before, to be published with its results."""
    name = getattr(model, "name", model)
    claims = [claim if claim.model else replace(claim, model=name) for claim in claims]
    ids = [claim.id for claim in claims]
    if twice := sorted({id for id in ids if ids.count(id) > 1}):
        raise ValueError(f"claims recorded twice: {', '.join(twice)}")
    if strangers := [claim.id for claim in claims if claim.model != name]:
        raise ValueError(f"claims of another model than {name}: {', '.join(strangers)}")
    path = runs.store() / runs.slug(name) / "claims" / f"{runs.slug(experiment)}.json"
    rows = [asdict(claim) for claim in claims]
    about = {"experiment": "claims", "key": experiment, "model": name, "version": 1, "settings": {}}
    runs.write_json(path, {**about, "numbers": {"rows": rows}})
    return path


def published(model: str | None = None) -> list[Claim]:
    paths = sorted(runs.published().glob(f"{runs.slug(model) if model else '*'}/claims/*.json"))
    return [Claim(**row) for path in paths for row in runs.read_json(path)["numbers"]["rows"]]


def table(model: str | None = None) -> pd.DataFrame:
    """Published claims, one a row, of one model or of all."""
    return pd.DataFrame([asdict(claim) for claim in published(model)], columns=[field.name for field in fields(Claim)])


def number(value: float | None) -> str:
    return "–" if value is None or math.isnan(value) else f"{value:.3g}"


def show(claims: Iterable[Claim], model: bool = False) -> Table:
    """Claims as the last table of a notebook; `model` adds a column that says whose they are."""
    rows = []
    for claim in claims:
        interval = "" if claim.low is None else f" [{number(claim.low)}, {number(claim.high)}]"
        said = "" if claim.paper_value is None else f" ({number(claim.paper_value)})"
        rows.append(
            {
                "claim": claim.id,
                **({"model": claim.model} if model else {}),
                "the paper": claim.paper + said,
                "here [low, high]": number(claim.measured) + interval,
                "holds": MARKS[None if claim.holds is None else bool(claim.holds)],
                "note": claim.note,
            }
        )
    frame = Table(rows, columns=None if rows else ["claim", "the paper", "here [low, high]", "holds", "note"])
    return frame if frame["note"].any() else frame.drop(columns="note")


def recomputer(id: str) -> Callable[[str, str], float]:
    """The function that measures this claim again."""
    prefix = id.split(".")[0]
    if prefix not in RECOMPUTE:
        raise LookupError(f"no function recomputes claims {prefix}.*; there are: {', '.join(RECOMPUTE) or 'none'}")
    module, function = RECOMPUTE[prefix].split(":")
    return getattr(importlib.import_module(module), function)


def anew(id: str, model: str) -> float:
    """A claim's number, with nothing taken from the store."""
    with files.empty_store():
        return float(recomputer(id)(model, id))


def recompute(id: str, model: str) -> tuple[Claim, float]:
    """The published claim, and its number measured anew."""
    known = {claim.id: claim for claim in published(model)}
    if id not in known:
        near = difflib.get_close_matches(id, known, n=5, cutoff=0.3)
        raise LookupError(f"no published claim {id!r} for {model}; nearest: {', '.join(near) or 'none'}")
    return known[id], anew(id, model)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m oa_utils.claims", description=__doc__)
    parser.add_argument("id", nargs="?", help="recompute this claim; without it, print all")
    parser.add_argument("--model", help="of this model (default: all for the table, tiny to recompute)")
    chosen = parser.parse_args(arguments)
    if not chosen.id:
        claims = published(chosen.model)
        print(show(claims, model=True).to_string(index=False) if claims else "no claims are published yet")
        return
    try:
        claim, again = recompute(chosen.id, chosen.model or os.environ.get("OA_MODEL") or "tiny")
    except LookupError as error:
        parser.error(error.args[0])
    difference = math.nan if claim.measured is None else again - claim.measured
    print(f"{claim.id} ({claim.model}): {claim.paper}")
    print(f"stored      {claim.measured}\nrecomputed  {again}\ndifference  {difference:.3g}")


if __name__ == "__main__":
    main()
