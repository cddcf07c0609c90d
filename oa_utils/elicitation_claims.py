"""What the paper says of elicitation (§5, appendix H.4), on a table of `elicitation.elicit`."""

from dataclasses import fields

import numpy as np
import pandas as pd

from oa_utils import runs, stats
from oa_utils.claims import Claim
from oa_utils.elicitation import DEMONSTRATIONS, ElicitSettings, elicit, train_lenses
from oa_utils.labelled import labelled_sets
from oa_utils.models import DATA, load_model

CATEGORIES = ("dbpedia", "entities", "things")  # the sets that ask what kind of thing something is


def by_set(table: pd.DataFrame, demonstrations: str, column: str = "boost", control: bool = False) -> pd.DataFrame:
    """A row for each set, a column for each lens, after all demonstrations; the controls alone, or all sets but them."""
    kept = table[(table.demonstrations == demonstrations) & (table.control == control) & (table.demos == table.demos.max())]
    return kept.pivot(index="set", columns="kind", values=column)


def anchors() -> pd.DataFrame:
    """The paper's boosts (GPT-2-XL, 15 sets) in the form of `elicit`'s table."""
    paper = pd.read_csv(DATA / "anchors" / "elicitation.csv")
    parts = [(d, kind) for d in DEMONSTRATIONS for kind in ("oca", "tuned")]
    made = [pd.DataFrame({"set": paper.dataset, "kind": kind, "demonstrations": d, "demos": 10, "control": False,
                          "maximum": paper[f"{d}_{kind}_peak"] - paper[f"{d}_baseline"]}) for d, kind in parts]  # fmt: skip
    return pd.concat(made, ignore_index=True)


def wins(table: pd.DataFrame) -> tuple[int, int, float]:
    """Sets on which the OCA lens has the larger boost, sets on which the two differ, and the sign test's p."""
    ahead = (table.oca - table.tuned).round(9)
    won, differ = int((ahead > 0).sum()), int((ahead != 0).sum())
    return won, differ, stats.sign_test(won, differ) if differ else 1.0


def interval(mean: float, errors: pd.Series) -> tuple[float, float]:
    """95 % around a mean over sets, each set with its own standard error over contexts."""
    half = 1.96 * float(np.sqrt(errors.pow(2).sum())) / len(errors)
    return mean - half, mean + half


def claims(table: pd.DataFrame, n: int = 1000) -> list[Claim]:
    """The paper's claims; wins are of its own boost, means of the boost whose layer was chosen on other contexts."""
    paper, made = anchors(), []

    def add(id: str, text: str, holds: bool, said: float | None, value: float, between=(None, None), note: str = ""):
        (low, high), holds, note = between, None if full else bool(holds), note + full
        made.append(Claim(f"elicitation.{id}", text, said, float(value), low, high, holds, "", "elicitation", note))

    for d in DEMONSTRATIONS:
        said, most, fair = by_set(paper, d, "maximum"), by_set(table, d, "maximum"), by_set(table, d)
        room = (by_set(table, d, "fair") - fair).oca.min() < 1 - 1e-9
        full = "" if room else "; the model is always right: no room for a boost"
        (won, differ, p), (again, of, fair_p) = wins(most), wins(fair)
        text = f"{d} demonstrations: the OCA lens has a larger boost than the tuned lens on most sets (share)"
        note = f"{won} of {differ} that differ, p = {p:.2g}; layer chosen on the other half: {again} of {of}, p = {fair_p:.2g}"
        add(f"wins.{d}", text, won > len(most) / 2, wins(said)[0] / len(said), won / len(most), note=note)

        here, note = fair.oca.mean(), f"with the paper's maximum {most.oca.mean():.3f}"
        text = f"{d} demonstrations: some layer of the OCA lens is more accurate than the model; mean boost"
        add(f"boost.{d}", text, here > 0, said.oca.mean(), here, interval(here, by_set(table, d, "boost_se").oca), note)

        lead, few = (fair.oca - fair.tuned).to_numpy(), len(fair) < 5
        between, note = ((None, None), "too few sets for an interval") if few else (stats.bootstrap(np.mean, lead, n=n), "")
        text = f"{d} demonstrations: by how much the OCA lens's mean boost exceeds the tuned lens's"
        add(f"lead.{d}", text, lead.mean() > 0, (said.oca - said.tuned).mean(), lead.mean(), between, note)

        for name in [name for name in CATEGORIES if name in fair.index][:1]:
            row, its = fair.loc[name], said.loc["dbpedia"]
            text = f"{d} demonstrations: the OCA lens raises the boost over the tuned lens's on DBPedia (here: {name})"
            note = f"OCA {row.oca:.3f}, tuned {row.tuned:.3f}"
            add(f"categories.{d}", text, row.oca > row.tuned, its.oca - its.tuned, row.oca - row.tuned, note=note)
    full = ""
    more = [by_set(t, "false", c).oca - by_set(t, "true", c).oca for t, c in ((paper, "maximum"), (table, "boost"))]
    text = "the boost is larger with false than with true demonstrations; mean difference"
    add("false_more", text, more[1].mean() > 0, more[0].mean(), more[1].mean())

    for d in DEMONSTRATIONS if table.control.any() else ():
        row = table[table.control & (table.kind == "oca") & (table.demonstrations == d)].nlargest(1, "demos").iloc[0]
        over = row.fair - row.boost >= 1 / row.classes  # a model below chance is beaten by chance: that is no knowledge
        value, error = (row.boost, row.boost_se) if over else (row.fair - 1 / row.classes, row.fair_se)
        low, high = interval(value, pd.Series([error]))
        text = f"labels that mean nothing, {d} demonstrations: no layer is above both the model and chance"
        add(f"control.{d}", text, low <= 0, None, value, (low, high), f"against {'the model' if over else 'chance'}")
    return made


def claim(model_name: str, id: str) -> float:
    """Measure a claim anew, lenses included, with the settings that the published result was made with."""
    table, model = runs.results(model_name, "elicitation"), load_model(model_name)
    used = {f.name: table.iloc[0][f.name] for f in fields(ElicitSettings)}
    settings = ElicitSettings(**{name: tuple(v) if isinstance(v, list) else int(v) for name, v in used.items()})
    names = set(table.set)
    sets = {name: s for name, s in labelled_sets(model, hub="sst2" in names).items() if name in names}
    again = elicit(model, sets, train_lenses(model, settings), settings)
    return {c.id: c.measured for c in claims(again, n=10)}[id]
