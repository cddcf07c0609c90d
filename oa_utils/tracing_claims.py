"""Paper §4 in numbers: statistics of curves of AIE over layers, of the authors' and of ours, and the claims they decide."""

import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
import pandas as pd
import scipy.stats
import torch
from jaxtyping import Float
from numpy import ndarray

from oa_utils import runs, stats, texts
from oa_utils.claims import Claim
from oa_utils.models import DATA, load_model
from oa_utils.tasks import Task
from oa_utils.tracing import NOISE, TRAINING, TraceSettings, trace

SETTING = ["kind", "position", "window", "method"]
PAPER = {"clean": 0.306, "gnt": 0.123, "oat": 0.087}  # mean probabilities on the test facts of GPT-2-XL, which has
LAYERS, QUIET, EARLY = 48, (16, 24), (10, 20)  # 48 layers: those that the paper finds quiet, and ROME's "early site"
Curve = Float[ndarray, " layer"]
Curves = dict[tuple[str, str, int, str], Curve]  # kind, position, rank of the window, method


def concentration(values: Sequence[float]) -> tuple[float, float]:
    """Share of all AIE that the top ⌈10 %⌉ of layers have, and the entropy of AIE over layers (1: spread evenly)."""
    values = np.sort(stats.array(values))[::-1]
    share = values / (values.sum() or np.nan)  # without any AIE both are unknown
    return float(share[: math.ceil(len(share) / 10)].sum()), float(scipy.stats.entropy(share) / math.log(max(len(share), 2)))


def lead(c: Curves, *setting) -> float:
    """By how much OAT's highest AIE is above GNT's."""
    return c[*setting, "oat"].max() - c[*setting, "gnt"].max()


def quiet(c: Curves, depth: Curve) -> float:
    there = (depth >= QUIET[0]) & (depth <= QUIET[1])
    return c["attn", "last", 1, "oat"][there].mean() - c["attn", "last", 1, "gnt"][there].mean()


def focus(c: Curves, which: int) -> float:
    """OAT's concentration less GNT's, mean over settings."""
    both = ([concentration(c[*key, method])[which] for method in ("oat", "gnt")] for key in sorted({key[:3] for key in c}))
    return float(np.nanmean([oat - gnt for oat, gnt in both]))


def early(c: Curves, depth: Curve, method: str) -> float:
    """Highest AIE of the early site's MLPs: at the last subject token, as a share of that at all subject tokens."""
    there = (depth >= EARLY[0]) & (depth <= EARLY[1])
    last, every = (c["mlp", position, 1, method][there].max() for position in ("last_subject", "subject"))
    return last / every if every else math.nan


class Statement(NamedTuple):
    text: str
    statistic: Callable[[Curves, Curve], float]  # of the curves and of the layers' depth in a model of 48
    holds: Callable[[float], bool]
    kinds: Sequence[str] = ("attn", "mlp")  # the settings it looks at
    positions: Sequence[str] = ("last", "last_subject", "subject")
    ranks: Sequence[int] = (0, 1, 2)


STATEMENTS = {
    "peak.attn.last": Statement("a window of attention layers at the last token: OAT's highest AIE less GNT's is positive",
        lambda c, _: lead(c, "attn", "last", 1), lambda x: x > 0, ["attn"], ["last"], [1]),
    "peak.attn.subject": Statement("a wide window of attention layers at the subject: OAT's highest AIE less GNT's is positive",
        lambda c, _: lead(c, "attn", "subject", 2), lambda x: x > 0, ["attn"], ["subject"], [2]),
    "single.attn.last": Statement("one attention layer alone, at the last token, has an AIE above 8 % with OAT",
        lambda c, _: c["attn", "last", 0, "oat"].max(), lambda x: x > 0.08, ["attn"], ["last"], [0]),
    "single.lead": Statement("one attention layer alone, at the last token: OAT's highest AIE less GNT's is positive",
        lambda c, _: lead(c, "attn", "last", 0), lambda x: x > 0, ["attn"], ["last"], [0]),
    "quiet.attn.last": Statement("windows of attention layers a third to half of the way up, last token: OAT's mean AIE less "
        "GNT's is negative", quiet, lambda x: x < 0, ["attn"], ["last"], [1]),
    "share": Statement("OAT localises better: share of all AIE in the top 10 % of layers, less GNT's, mean over settings",
        lambda c, _: focus(c, 0), lambda x: x > 0),
    "entropy": Statement("OAT localises better: entropy of AIE over layers, less GNT's, mean over settings",
        lambda c, _: focus(c, 1), lambda x: x < 0),
    "last_subject.gnt": Statement("MLPs of the early site with GNT: the last subject token alone has over half of the AIE of "
        "all subject tokens", lambda c, d: early(c, d, "gnt"), lambda x: x > 0.5, ["mlp"], ["last_subject", "subject"], [1]),
    "last_subject.oat": Statement("the same with OAT: less than half",
        lambda c, d: early(c, d, "oat"), lambda x: x < 0.5, ["mlp"], ["last_subject", "subject"], [1]),
}  # fmt: skip


def anchors() -> pd.DataFrame:
    """The authors' curves as `trace` has them, at the layers that they are of: one above the plotted one."""
    table = pd.read_csv(DATA / "anchors" / "causal_tracing_aie.csv")
    table = table.rename(columns={"token": "position", "node": "kind", "true_layer": "layer"})
    names = {"position": table.position.replace("all_subject", "subject"), "method": table.method.str.lower()}
    return table.assign(**names, aie=table.aie_unclipped.clip(lower=0))


def curves(table: pd.DataFrame, windows: Sequence[int]) -> Curves:
    """AIE over layers; windows are ranked, so that those of a shallow model stand for the paper's 1, 5 and 9."""
    groups = table.sort_values("layer").groupby(SETTING)
    return {(kind, position, windows.index(w), method): rows.aie.to_numpy() for (kind, position, w, method), rows in groups}


def statistics(c: Curves, depth: Curve) -> dict[str, float]:
    """The statistic of every statement whose curves are there."""
    found, ranks = {}, {key[2] for key in c}
    for id, s in STATEMENTS.items():
        needed = list(product(s.kinds, s.positions, ranks & set(s.ranks), ("gnt", "oat")))
        if needed and all(key in c for key in needed):
            found[id] = float(s.statistic(c, depth))
    return found


def removed(table: pd.DataFrame) -> dict[str, float]:
    """The share of the answer's probability that each corruption takes away."""
    p = table.groupby("method")[["p_clean", "p_corrupt"]].mean()
    return {f"removed.{method}": float(1 - row.p_corrupt / row.p_clean) for method, row in p.iterrows()}


def intervals(results: Sequence[runs.Result], windows: Sequence[int], depth: Curve, n: int) -> dict[str, tuple[float, float]]:
    """95 % intervals over test facts, drawn together in all settings."""
    rows = [result.numbers["rows"][0] for result in results]
    keys = [(row["kind"], row["position"], windows.index(row["window"]), row["method"]) for row in rows]
    w, z = (np.stack([stats.array(result.tensors[name]) for result in results]) for name in "wz")  # [setting layer fact]
    times = np.random.default_rng(0).multinomial(w.shape[2], np.full(w.shape[2], 1 / w.shape[2]), n).T  # [fact draw]
    w, z = w @ times, (z @ times).clip(NOISE * len(times))
    drawn = [statistics(dict(zip(keys, aie, strict=True)), depth) for aie in np.moveaxis((1 - w / z).clip(0), 2, 0)]
    low_high = pd.DataFrame(drawn).quantile([0.025, 0.975])
    return {name: tuple(low_high[name]) for name in low_high}


def claims(table: pd.DataFrame, n_layers: int, results: Sequence[runs.Result] = (), n: int = 200) -> list[Claim]:
    """The paper's claims on a table of `trace`, beside the same statistics of the authors' curves; intervals come from
    `results`, as `trace_runs` returns them."""
    paper, windows, depth = anchors(), sorted(table.window.unique().tolist()), np.sort(table.layer.unique()) * LAYERS / n_layers
    said = statistics(curves(paper, sorted(paper.window.unique().tolist())), np.sort(paper.layer.unique()))
    here, between = statistics(curves(table, windows), depth), intervals(results, windows, depth, n) if results else {}
    made = []
    for id, value in here.items():
        low, high = between.get(id, (None, None))
        holds = None if math.isnan(value) else bool(STATEMENTS[id].holds(value))
        made.append(Claim(f"tracing.{id}", STATEMENTS[id].text, said[id], value, low, high, holds, source="causal_tracing"))
    for id, value in removed(table).items():
        said, word = 1 - PAPER[id[-3:]] / PAPER["clean"], {"gnt": "noise", "oat": "the optimal constant"}[id[-3:]]
        text = f"{word} in the subject's place takes most of the answer's probability away"
        made.append(Claim(f"tracing.{id}", text, said, value, holds=value > 0.5, source="causal_tracing"))
    return made


def some(task: Task, n: int) -> Task:
    """At most n train and n test facts, evenly over the relations."""
    parts = [part.nonzero()[:, 0] for part in (task.in_train, ~task.in_train)]
    rows = torch.cat([part[torch.linspace(0, len(part) - 1, min(n, len(part))).long()] for part in parts])
    return task[rows.sort().values]


def published(model_name: str) -> pd.DataFrame:
    """Published AIEs of the main settings: those of the facts that most settings have, each copy with its own constant."""
    table, folder = runs.results(model_name, "causal_tracing"), runs.published() / runs.slug(model_name) / "causal_tracing"
    task = table.file.map({name: runs.read_json(folder / name)["task_fingerprint"] for name in table.file.unique()})
    return table.assign(task=task)[(task == task.mode()[0]) & ~table.same_constant].reset_index(drop=True)


def claim(model_name: str, id: str) -> float:
    """Measure a claim of §4 anew, with the settings that the published result was made with."""
    rows, model, id = published(model_name), load_model(model_name), id.removeprefix("tracing.")
    known, windows = texts.facts(model), sorted(rows.window.unique().tolist())
    task = next(t for t in (known, some(known, int(rows.n[0]))) if t.fingerprint == rows.task[0])
    own = {"gnt": ["draws", "noise"], "oat": TRAINING}
    settings = TraceSettings(**{name: rows[rows.method == m].iloc[0][name] for m, names in own.items() for name in names})
    s = STATEMENTS.get(id) or Statement("", None, None, ["attn"], ["last"], [0])
    ask = {"kind": s.kinds, "position": s.positions, "window": [windows[i] for i in s.ranks if i < len(windows)]}
    ask |= {"method": ["gnt", "oat"], "layers": rows.layer.unique().tolist(), "settings": settings, "parallel": True}
    table = trace(model, task, **ask)
    depth = np.sort(table.layer.unique()) * LAYERS / model.n_layers
    return (statistics(curves(table, windows), depth) | removed(table))[id]
