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
from jaxtyping import Bool, Float
from numpy import ndarray

from oa_utils import stats, store
from oa_utils.paper.claims import Claim
from oa_utils.tasks import Task
from oa_utils.tracing import KINDS, METHODS, POSITIONS, ROUNDING

SETTING = ["kind", "position", "window", "method"]
CLEAN = 0.306  # mean probability of the answer on the test facts of GPT-2-XL
CORRUPTED = {"gnt": 0.123, "oat": 0.087}
CORRUPTION = {"gnt": "noise", "oat": "the optimal constant"}
DEPTH = 48  # layers of GPT-2-XL; ROME's early site is taken at the same relative depth
EARLY = (10, 20)  # ROME's "early site"
QUIET = (16, 24)  # where the paper finds OAT's attention quiet: of its own curves only
FLANK = (0.2, 0.5)  # elsewhere: below GNT's highest AIE, layers with so much of it (as 16–24 have)

Curve = Float[ndarray, " layer"]
# AIE of all facts, of one half of them and of the other, by kind, position, rank of the window and
# method; of curves without facts three times the same
Curves = dict[tuple[str, str, int, str], Float[ndarray, "3 layer"]]


class Places(NamedTuple):
    """Which layers and settings a statement is about: decided before the statistics are looked
    at."""

    early: Bool[ndarray, " layer"]
    quiet: Bool[ndarray, " layer"]
    loud: frozenset[tuple[str, str, int]]  # settings in which both methods have any effect


# ---- statistics


def concentration(values: Sequence[float] | pd.Series | ndarray) -> tuple[float, float]:
    """Share of all AIE that the top ⌈10 %⌉ of layers have, and the entropy of AIE over layers (1:
    spread evenly); both are unknown where there is no AIE."""
    descending = np.sort(stats.array(values))[::-1]
    share = descending / (descending.sum() or np.nan)
    top = share[: math.ceil(len(share) / 10)].sum()
    entropy = scipy.stats.entropy(share) / math.log(max(len(share), 2))
    return float(top), float(entropy)


def above_noise(rows: pd.DataFrame) -> bool:
    """Whether some layer's AIE is above noise at 95 %, corrected for the number of layers; curves
    without errors are believed."""
    errors = scipy.stats.norm.isf(0.025 / len(rows))
    return bool((rows.aie > (errors * rows.se if "se" in rows else 0)).any())


def loud_settings(table: pd.DataFrame) -> list[tuple[str, str, int]]:
    """Settings (kind, position, window) in which both methods are above noise."""
    index = ["kind", "position", "window"]
    return [
        setting
        for setting, rows in table.groupby(index)
        if all(above_noise(part) for _, part in rows.groupby("method"))
        and rows.method.nunique() == len(METHODS)
    ]


def concentrations(table: pd.DataFrame) -> pd.DataFrame:
    """Share and entropy of every setting that is above noise with both methods, a column each."""
    rows = []
    for setting in loud_settings(table):
        for method in METHODS:
            rows.append((*setting, method, *concentration(pick(table, *setting, method).aie)))
    frame = pd.DataFrame(rows, columns=[*SETTING, "share", "entropy"])
    index = ["kind", "position", "window"]
    return frame.pivot(index=index, columns="method", values=["share", "entropy"])


def between(values: Curve, ends: tuple[float, float]) -> Bool[ndarray, " layer"]:
    return (values >= ends[0]) & (values <= ends[1])


def quiet_layers(train: pd.DataFrame) -> Bool[ndarray, " layer"]:
    """Layers below GNT's highest AIE that have a fifth to half of it, and more than two standard
    errors, on train facts: `train` are GNT's rows of attention at the last token."""
    rows = train.sort_values("layer")
    share = rows.aie.to_numpy() / max(rows.aie.max(), ROUNDING)
    below = np.arange(len(rows)) < share.argmax()
    sure = (rows.aie > 2 * rows.se).to_numpy()
    return below & sure & between(share, FLANK)


def highest(aie: Float[ndarray, "3 layer"]) -> float:
    """The highest AIE: of the layer that one half of the facts chooses, measured on the other half,
    both ways. The highest of many noisy numbers would be too high."""
    _, one, other = aie
    return float(one[other.argmax()] + other[one.argmax()]) / 2


def peak(curves: Curves, places: Places, kind: str, position: str, rank: int) -> float:
    """OAT's highest AIE."""
    return highest(curves[kind, position, rank, "oat"])


def lead(curves: Curves, places: Places, kind: str, position: str, rank: int) -> float:
    """By how much OAT's highest AIE is above GNT's; unknown where neither has any."""
    oat = highest(curves[kind, position, rank, "oat"])
    gnt = highest(curves[kind, position, rank, "gnt"])
    return oat - gnt if max(oat, gnt) > 0 else math.nan


def quiet(curves: Curves, places: Places) -> float:
    """OAT's mean AIE less GNT's, of attention at quiet layers."""
    if not places.quiet.any():
        return math.nan
    oat, gnt = (curves["attn", "last", 1, method][0] for method in ("oat", "gnt"))
    return oat[places.quiet].mean() - gnt[places.quiet].mean()


def focus(curves: Curves, places: Places, measure: int) -> float:
    """OAT's concentration less GNT's (share: 0, entropy: 1), mean over settings above noise."""
    differences = []
    for setting in sorted(places.loud):
        both = (curves[*setting, method][0] for method in ("oat", "gnt"))
        oat, gnt = (concentration(curve)[measure] for curve in both)
        differences.append(oat - gnt)
    known = [difference for difference in differences if not math.isnan(difference)]
    return float(np.mean(known)) if known else math.nan


def early(curves: Curves, places: Places, method: str) -> float:
    """Highest AIE of the early site's MLPs: at the last subject token, as a share of that at all
    subject tokens."""
    last = highest(curves["mlp", "last_subject", 1, method][:, places.early])
    every = highest(curves["mlp", "subject", 1, method][:, places.early])
    return last / every if every else math.nan


# ---- what the paper says


class Statement(NamedTuple):
    text: str
    statistic: Callable[[Curves, Places], float]
    rule: str  # of the statistic's interval over test facts
    needs: tuple[tuple, tuple, tuple] = (KINDS, POSITIONS, (0, 1, 2))  # kinds, positions, ranks


STATEMENTS = {
    "peak.attn.last": Statement(
        "a window of attention layers at the last token: OAT's highest AIE less GNT's is positive",
        partial(lead, kind="attn", position="last", rank=1),
        "> 0",
        needs=(("attn",), ("last",), (1,)),
    ),
    "peak.attn.subject": Statement(
        "a wide window of attention layers at the subject: OAT's highest AIE less GNT's is "
        "positive",
        partial(lead, kind="attn", position="subject", rank=2),
        "> 0",
        needs=(("attn",), ("subject",), (2,)),
    ),
    "single.attn.last": Statement(
        "one attention layer alone, at the last token, has an AIE above 8 % with OAT",
        partial(peak, kind="attn", position="last", rank=0),
        "> 0.08",
        needs=(("attn",), ("last",), (0,)),
    ),
    "single.lead": Statement(
        "one attention layer alone, at the last token: OAT's highest AIE less GNT's is positive",
        partial(lead, kind="attn", position="last", rank=0),
        "> 0",
        needs=(("attn",), ("last",), (0,)),
    ),
    "quiet.attn.last": Statement(
        "windows of attention layers below GNT's peak, where its AIE on train facts is a fifth to "
        "half of the highest (in the paper layers 16–24), last token: OAT's mean AIE less GNT's is "
        "negative",
        quiet,
        "< 0",
        needs=(("attn",), ("last",), (1,)),
    ),
    "share": Statement(
        "OAT localises better: share of all AIE in the top 10 % of layers, less GNT's, mean over "
        "settings above noise, is positive",
        partial(focus, measure=0),
        "> 0",
    ),
    "entropy": Statement(
        "OAT localises better: entropy of AIE over layers, less GNT's, mean over settings above "
        "noise, is negative",
        partial(focus, measure=1),
        "< 0",
    ),
    "last_subject.gnt": Statement(
        "MLPs of the early site with GNT: the last subject token alone has over half of the AIE "
        "of all subject tokens",
        partial(early, method="gnt"),
        "> 0.5",
        needs=(("mlp",), ("last_subject", "subject"), (1,)),
    ),
    "last_subject.oat": Statement(
        "the same with OAT: less than half",
        partial(early, method="oat"),
        "< 0.5",
        needs=(("mlp",), ("last_subject", "subject"), (1,)),
    ),
}
_FEW = "few settings may lie above noise, and few layers be there to tell apart"
WHYS: dict[str, str] = {  # beginning of a claim's id: what may be behind its not holding
    "tracing.peak": "the two corruptions may give these layers much the same effect",
    "tracing.single": "one layer alone may do next to nothing where several share the work",
    "tracing.quiet": "the layers that noise leaves with a small effect may be few, and a window "
    "around one of them may reach into a loud one",
    "tracing.share": _FEW,
    "tracing.entropy": _FEW,
    "tracing.last_subject": "it may depend on how many tokens the subjects have, and on how much "
    "of a name its last token gives away",
    "tracing.removed.gnt": "noise may leave the subject readable, and the rest of the prompt may "
    "give the answer away",
    "tracing.removed.oat": "the constant is trained to lose little, and the rest of the prompt "
    "may give the answer away",
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


def by_setting(
    table: pd.DataFrame, windows: Sequence[int]
) -> dict[tuple[str, str, int, str], pd.DataFrame]:
    """The rows of each setting, layer by layer; windows are ranked, so that those of a shallow
    model stand for the paper's 1, 5 and 9."""
    return {
        (kind, position, windows.index(window), method): rows
        for (kind, position, window, method), rows in table.sort_values("layer").groupby(SETTING)
    }


def curves(table: pd.DataFrame, windows: Sequence[int]) -> Curves:
    """AIE over layers of a table without facts."""
    rows = by_setting(table, windows).items()
    return {setting: np.tile(part.aie.to_numpy(), (3, 1)) for setting, part in rows}


class Facts(NamedTuple):
    """What is missing of each fact's answer: w [layer fact] and z [layer fact] of each setting."""

    w: dict[tuple[str, str, int, str], Float[ndarray, "layer fact"]]
    z: dict[tuple[str, str, int, str], Float[ndarray, "layer fact"]]

    @property
    def n(self) -> int:
        return next(iter(self.w.values())).shape[1]

    def curves(self, times: Float[ndarray, " fact"]) -> Curves:
        """AIE over layers with each fact counted so many times."""
        odd = np.arange(self.n) % 2
        parts = np.stack([times, times * odd, times * (1 - odd)], axis=1)  # [fact 3]
        return {
            setting: (1 - (w @ parts) / (self.z[setting] @ parts).clip(ROUNDING)).clip(0).T
            for setting, w in self.w.items()
        }

    def drawn(self, rng: np.random.Generator) -> Float[ndarray, " fact"]:
        """How often each fact is drawn, from its own half."""
        times = np.zeros(self.n)
        for half in (slice(0, None, 2), slice(1, None, 2)):
            n = len(times[half])
            times[half] = rng.multinomial(n, np.full(n, 1 / n))
        return times


def facts_of(table: pd.DataFrame, windows: Sequence[int]) -> Facts:
    """Of a table of `trace(..., each=True)`."""
    settings = by_setting(table, windows).items()
    return Facts(
        w={setting: np.stack(rows.w.map(stats.array)) for setting, rows in settings},
        z={setting: np.stack(rows.z.map(stats.array)) for setting, rows in settings},
    )


def places_of(
    table: pd.DataFrame, n_layers: int, windows: Sequence[int], quiet: Bool[ndarray, " layer"]
) -> Places:
    loud = [
        (kind, position, windows.index(window)) for kind, position, window in loud_settings(table)
    ]
    return Places(between(depths(table, n_layers), EARLY), quiet, frozenset(loud))


def statistics(aie: Curves, places: Places) -> dict[str, float]:
    """The statistic of every statement whose curves are there."""
    known_ranks = {key[2] for key in aie}
    values = {}
    for name, statement in STATEMENTS.items():
        kinds, positions, ranks = statement.needs
        needed = list(product(kinds, positions, known_ranks & set(ranks), METHODS))
        if needed and all(key in aie for key in needed):
            values[name] = float(statement.statistic(aie, places))
    return values


def paper_statistics() -> dict[str, float]:
    """Of the authors' curves, at the layers that the paper names."""
    paper = anchors()
    windows = windows_of(paper)
    quiet = between(depths(paper, DEPTH), QUIET)
    return statistics(curves(paper, windows), places_of(paper, DEPTH, windows, quiet))


def intervals(facts: Facts, places: Places, n: int) -> dict[str, tuple[float, float]]:
    """95 % intervals over test facts, drawn together in all settings."""
    rng = np.random.default_rng(0)
    drawn = [statistics(facts.curves(facts.drawn(rng)), places) for _ in range(n)]
    low_high = pd.DataFrame(drawn).quantile([0.025, 0.975])
    return {name: tuple(low_high[name]) for name in low_high}


def removed(table: pd.DataFrame) -> list[Claim]:
    """The share of the answer's probability that each corruption takes away."""
    listed = []
    for method, rows in table.groupby("method"):
        row = rows.iloc[0]  # the corrupted copy is the same in every setting
        share = 1 - row.p_corrupt / row.p_clean
        reach = math.nan
        if "clean" in rows:
            reach = 1.96 * stats.ratio_se(row.z, row.clean)[1]
        claim = Claim(
            id=f"tracing.removed.{method}",
            paper=f"{CORRUPTION[method]} in the subject's place takes most of the answer's "
            "probability away: over half",
            paper_value=1 - CORRUPTED[method] / CLEAN,
            measured=share,
            low=share - reach,
            high=share + reach,
            rule="> 0.5",
            seeds=int(method == "oat"),
            source="causal_tracing",
        )
        listed.append(claim)
    return listed


def claims(table: pd.DataFrame, train: pd.DataFrame, n_layers: int, n: int = 200) -> list[Claim]:
    """The paper's claims on a table of `trace` of test facts, beside the same statistics of the
    authors' curves.

    Intervals, of n draws of facts, where the table has what is missing of each (`each=True`). GNT's
    rows of `train` facts choose the quiet layers.
    """
    windows = windows_of(table)
    chooses = pick(train, "attn", "last", windows[1], "gnt") if len(windows) > 1 else train[:0]
    n_here = table.layer.nunique()
    quiet = quiet_layers(chooses) if len(chooses) == n_here else np.zeros(n_here, dtype=bool)
    places = places_of(table, n_layers, windows, quiet)
    bounds = {}
    aie = curves(table, windows)
    if "w" in table:
        facts = facts_of(table, windows)
        aie = facts.curves(np.ones(facts.n))
        bounds = intervals(facts, places, n)
    paper_values = paper_statistics()
    listed = []
    for name, value in statistics(aie, places).items():
        low, high = bounds.get(name, (None, None)) if not math.isnan(value) else (None, None)
        claim = Claim(
            id=f"tracing.{name}",
            paper=STATEMENTS[name].text,
            paper_value=paper_values[name],
            measured=value,
            low=low,
            high=high,
            rule=STATEMENTS[name].rule,
            seeds=0 if name == "last_subject.gnt" else 1,
            source="causal_tracing",
        )
        listed.append(claim)
    return [*listed, *removed(table)]


def some(facts: Task, n: int) -> Task:
    """At most n train and n test facts, evenly over the relations."""
    chosen = []
    for part in facts.part.unique():
        rows = (facts.part == part).nonzero()[:, 0]
        even = torch.linspace(0, len(rows) - 1, min(n, len(rows))).long()
        chosen.append(rows[even])
    return facts[torch.cat(chosen).sort().values]


def published(model_name: str, part: str = "test") -> pd.DataFrame:
    """Published AIEs of the main settings: those of the facts that most settings have, each copy
    with its own constant, measured on a part."""
    table = store.results(model_name, "causal_tracing")
    records = store.records(model_name, "causal_tracing")
    facts = table.file.map({name: record["task_fingerprint"] for name, record in records.items()})
    main = (facts == facts.mode()[0]) & ~table.same_constant & (table.part == part)
    return table[main].reset_index(drop=True)


# ---- in words


def finding(table: pd.DataFrame, model_name: str) -> str:
    """What was found, in one sentence."""
    window = windows_of(table)[min(1, len(windows_of(table)) - 1)]
    tops = {}
    for method in METHODS:
        rows = pick(table, "attn", "last", window, method)
        tops[method] = rows.loc[rows.aie.idxmax()]
    return (
        f"{model_name}: restoring {window} attention layers at the last token brings back at most "
        f"{tops['oat'].aie:.0%} of the answer with OAT (around layer {tops['oat'].layer}) and "
        f"{tops['gnt'].aie:.0%} with GNT (around layer {tops['gnt'].layer})."
    )
