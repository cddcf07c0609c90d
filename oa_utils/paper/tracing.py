"""Paper §4 in numbers: statistics of AIE over layers, of the authors' curves and of ours, and the
claims that they decide."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import NamedTuple

import numpy as np
import pandas as pd
import scipy.stats
import torch
from jaxtyping import Float
from numpy import ndarray

from oa_utils import stats, store
from oa_utils.paper.claims import Claim
from oa_utils.tasks import Task
from oa_utils.tracing import KINDS, METHODS, POSITIONS, ROUNDING

SETTING = ["kind", "position", "window", "method"]
CLEAN = 0.306  # mean probability of the answer on the test facts of GPT-2-XL
CORRUPTED = {"gnt": 0.123, "oat": 0.087}
CORRUPTION = {"gnt": "noise", "oat": "the optimal constant"}
DEPTH = 48  # layers of GPT-2-XL; those that the paper names are taken at the same relative depth
QUIET = (16, 24)  # where it finds OAT's attention quiet
EARLY = (10, 20)  # ROME's "early site"

Curve = Float[ndarray, " layer"]
Curves = dict[tuple[str, str, int, str], Curve]  # by kind, position, rank of the window, method


# ---- statistics


def concentration(values: Sequence[float] | pd.Series | ndarray) -> tuple[float, float]:
    """Share of all AIE that the top ⌈10 %⌉ of layers have, and the entropy of AIE over layers (1:
    spread evenly); both are unknown where there is no AIE."""
    descending = np.sort(stats.array(values))[::-1]
    share = descending / (descending.sum() or np.nan)
    top = share[: math.ceil(len(share) / 10)].sum()
    entropy = scipy.stats.entropy(share) / math.log(max(len(share), 2))
    return float(top), float(entropy)


def concentrations(table: pd.DataFrame) -> pd.DataFrame:
    """Share and entropy of every setting in a table of `trace`, with a column for each method."""
    rows = [(*key, *concentration(rows.aie)) for key, rows in table.groupby(SETTING)]
    frame = pd.DataFrame(rows, columns=[*SETTING, "share", "entropy"])
    index = ["kind", "position", "window"]
    return frame.pivot(index=index, columns="method", values=["share", "entropy"])


def between(depth: Curve, layers: tuple[int, int]) -> ndarray:
    return (depth >= layers[0]) & (depth <= layers[1])


def peak(curves: Curves, depth: Curve, kind: str, position: str, rank: int) -> float:
    """OAT's highest AIE."""
    return curves[kind, position, rank, "oat"].max()


def lead(curves: Curves, depth: Curve, kind: str, position: str, rank: int) -> float:
    """By how much OAT's highest AIE is above GNT's."""
    return curves[kind, position, rank, "oat"].max() - curves[kind, position, rank, "gnt"].max()


def quiet(curves: Curves, depth: Curve) -> float:
    """OAT's mean AIE less GNT's, of attention a third to half of the way up."""
    layers = between(depth, QUIET)
    oat = curves["attn", "last", 1, "oat"][layers].mean()
    return oat - curves["attn", "last", 1, "gnt"][layers].mean()


def focus(curves: Curves, depth: Curve, measure: int) -> float:
    """OAT's concentration less GNT's (share: 0, entropy: 1), mean over settings."""
    differences = []
    for setting in sorted({key[:3] for key in curves}):
        oat, gnt = (concentration(curves[*setting, method])[measure] for method in ("oat", "gnt"))
        differences.append(oat - gnt)
    return float(np.nanmean(differences))


def early(curves: Curves, depth: Curve, method: str) -> float:
    """Highest AIE of the early site's MLPs: at the last subject token, as a share of that at all
    subject tokens."""
    layers = between(depth, EARLY)
    last = curves["mlp", "last_subject", 1, method][layers].max()
    every = curves["mlp", "subject", 1, method][layers].max()
    return last / every if every else math.nan


# ---- what the paper says


class Statement(NamedTuple):
    text: str
    statistic: Callable[[Curves, Curve], float]  # of curves and of the layers' depths in GPT-2-XL
    above: float | None = None  # it holds if the statistic is above this
    below: float | None = None  # or below this
    needs: tuple[tuple, tuple, tuple] = (KINDS, POSITIONS, (0, 1, 2))  # kinds, positions, ranks

    def holds(self, value: float) -> bool | None:
        """None: the statistic is unknown."""
        if math.isnan(value):
            return None
        return bool(value > self.above if self.below is None else value < self.below)


STATEMENTS = {
    "peak.attn.last": Statement(
        "a window of attention layers at the last token: OAT's highest AIE less GNT's is positive",
        partial(lead, kind="attn", position="last", rank=1),
        above=0,
        needs=(("attn",), ("last",), (1,)),
    ),
    "peak.attn.subject": Statement(
        "a wide window of attention layers at the subject: OAT's highest AIE less GNT's is "
        "positive",
        partial(lead, kind="attn", position="subject", rank=2),
        above=0,
        needs=(("attn",), ("subject",), (2,)),
    ),
    "single.attn.last": Statement(
        "one attention layer alone, at the last token, has an AIE above 8 % with OAT",
        partial(peak, kind="attn", position="last", rank=0),
        above=0.08,
        needs=(("attn",), ("last",), (0,)),
    ),
    "single.lead": Statement(
        "one attention layer alone, at the last token: OAT's highest AIE less GNT's is positive",
        partial(lead, kind="attn", position="last", rank=0),
        above=0,
        needs=(("attn",), ("last",), (0,)),
    ),
    "quiet.attn.last": Statement(
        "windows of attention layers a third to half of the way up, last token: "
        "OAT's mean AIE less GNT's is negative",
        quiet,
        below=0,
        needs=(("attn",), ("last",), (1,)),
    ),
    "share": Statement(
        "OAT localises better: share of all AIE in the top 10 % of layers, less GNT's, "
        "mean over settings",
        partial(focus, measure=0),
        above=0,
    ),
    "entropy": Statement(
        "OAT localises better: entropy of AIE over layers, less GNT's, mean over settings",
        partial(focus, measure=1),
        below=0,
    ),
    "last_subject.gnt": Statement(
        "MLPs of the early site with GNT: the last subject token alone has over half of the AIE "
        "of all subject tokens",
        partial(early, method="gnt"),
        above=0.5,
        needs=(("mlp",), ("last_subject", "subject"), (1,)),
    ),
    "last_subject.oat": Statement(
        "the same with OAT: less than half",
        partial(early, method="oat"),
        below=0.5,
        needs=(("mlp",), ("last_subject", "subject"), (1,)),
    ),
}


def anchors() -> pd.DataFrame:
    """The authors' curves as `trace` has them, at the layers that they are of: one above those
    plotted."""
    table = pd.read_csv(store.data_folder() / "anchors" / "causal_tracing_aie.csv")
    names = {"token": "position", "node": "kind", "true_layer": "layer"}
    table = table.rename(columns=names)
    return table.assign(
        position=table.position.replace("all_subject", "subject"),
        method=table.method.str.lower(),
        aie=table.aie_unclipped.clip(lower=0),
    )


# ---- from tables to claims


def pick(table: pd.DataFrame, *setting: str | int) -> pd.DataFrame:
    """Rows of a setting: kind, position, window and, where it is given, method."""
    return table[(table[SETTING[: len(setting)]] == list(setting)).all(axis=1)]


def windows_of(table: pd.DataFrame) -> list[int]:
    return sorted(table.window.unique().tolist())


def depths(table: pd.DataFrame, n_layers: int) -> Curve:
    """The layers of a table, as layers of GPT-2-XL at the same relative depth."""
    return np.sort(table.layer.unique()) * DEPTH / n_layers


def curves(table: pd.DataFrame, windows: Sequence[int]) -> Curves:
    """AIE over layers; windows are ranked, so that those of a shallow model stand for the paper's
    1, 5 and 9."""
    return {
        (kind, position, windows.index(window), method): rows.aie.to_numpy()
        for (kind, position, window, method), rows in table.sort_values("layer").groupby(SETTING)
    }


def statistics(aie: Curves, depth: Curve) -> dict[str, float]:
    """The statistic of every statement whose curves are there."""
    known_ranks = {key[2] for key in aie}
    values = {}
    for name, statement in STATEMENTS.items():
        kinds, positions, ranks = statement.needs
        needed = list(product(kinds, positions, known_ranks & set(ranks), METHODS))
        if needed and all(key in aie for key in needed):
            values[name] = float(statement.statistic(aie, depth))
    return values


def removed(table: pd.DataFrame) -> dict[str, float]:
    """The share of the answer's probability that each corruption takes away."""
    p = table.groupby("method")[["p_clean", "p_corrupt"]].mean()
    return (1 - p.p_corrupt / p.p_clean).to_dict()


def intervals(
    results: Sequence[store.Result], windows: Sequence[int], depth: Curve, n: int
) -> dict[str, tuple[float, float]]:
    """95 % intervals over test facts, drawn together in all settings."""
    keys = []
    for result in results:
        row = result.numbers["rows"][0]
        keys.append((row["kind"], row["position"], windows.index(row["window"]), row["method"]))
    w = np.stack([stats.array(result.tensors["w"]) for result in results])  # [setting layer fact]
    z = np.stack([stats.array(result.tensors["z"]) for result in results])
    n_facts = w.shape[2]
    even = np.full(n_facts, 1 / n_facts)
    times = np.random.default_rng(0).multinomial(n_facts, even, n).T  # [fact draw]
    lost = (z @ times).clip(ROUNDING * n_facts)
    aie = (1 - (w @ times) / lost).clip(0)  # [setting layer draw]
    drawn = [statistics(dict(zip(keys, aie[..., draw], strict=True)), depth) for draw in range(n)]
    low_high = pd.DataFrame(drawn).quantile([0.025, 0.975])
    return {name: tuple(low_high[name]) for name in low_high}


def claims(
    table: pd.DataFrame, n_layers: int, results: Sequence[store.Result] = (), n: int = 200
) -> list[Claim]:
    """The paper's claims on a table of `trace`, beside the same statistics of the authors' curves.

    Intervals, of n draws, come from `results` as `trace_runs` returns them.
    """
    paper = anchors()
    paper_values = statistics(curves(paper, windows_of(paper)), depths(paper, DEPTH))
    windows = windows_of(table)
    depth = depths(table, n_layers)
    bounds = intervals(results, windows, depth, n) if results else {}
    decided = []
    for name, value in statistics(curves(table, windows), depth).items():
        statement = STATEMENTS[name]
        low, high = bounds.get(name, (None, None))
        claim = Claim(
            id=f"tracing.{name}",
            paper=statement.text,
            paper_value=paper_values[name],
            measured=value,
            low=low,
            high=high,
            holds=statement.holds(value),
            source="causal_tracing",
        )
        decided.append(claim)
    for method, share in removed(table).items():
        claim = Claim(
            id=f"tracing.removed.{method}",
            paper=f"{CORRUPTION[method]} in the subject's place takes most of the answer's "
            "probability away",
            paper_value=1 - CORRUPTED[method] / CLEAN,
            measured=share,
            holds=share > 0.5,
            source="causal_tracing",
        )
        decided.append(claim)
    return decided


def some(facts: Task, n: int) -> Task:
    """At most n train and n test facts, evenly over the relations."""
    chosen = []
    for part in facts.part.unique():
        rows = (facts.part == part).nonzero()[:, 0]
        even = torch.linspace(0, len(rows) - 1, min(n, len(rows))).long()
        chosen.append(rows[even])
    return facts[torch.cat(chosen).sort().values]


def published(model_name: str) -> pd.DataFrame:
    """Published AIEs of the main settings: those of the facts that most settings have, each copy
    with its own constant."""
    table = store.results(model_name, "causal_tracing")
    records = store.records(model_name, "causal_tracing")
    facts = table.file.map({name: record["task_fingerprint"] for name, record in records.items()})
    main = (facts == facts.mode()[0]) & ~table.same_constant
    return table[main].reset_index(drop=True)
