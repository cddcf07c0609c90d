"""Causal tracing: what brings a fact back when its subject is lost and some layers are restored.

Three steps, for all layers side by side as copies of the prompts (`Prompts.probabilities`):

- *corrupt*: the subject's token embeddings are lost, by noise (GNT) or to a trained constant (OAT,
  paper §4 and appendix G);
- *restore*: what attention or MLP layers of a window wrote in the clean run is put back;
- *read*: the probability of the clean run's answer.

A copy computes only what it can change: the columns from the subject on, over the clean run's keys
and values. Where copies share one corruption, each begins at its first restored layer, and runs the
last column alone if only that one is restored. `trace` is of many facts,
`trace_prompt` of one.
"""

import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import NamedTuple

import pandas as pd
import torch
from einops import rearrange, repeat
from jaxtyping import Bool, Float, Int
from torch import Tensor

from oa_utils import machine, models, stats, store
from oa_utils.models import Edit, KeysValues, Model, recording, unchanged
from oa_utils.store import Numbers, Snapshots, Tensors
from oa_utils.tasks import PARTS, Task
from oa_utils.texts import contexts, subject_span
from oa_utils.training import Fitted, Pass, collect, fit

VERSION = 3
KINDS = ("mlp", "attn")
POSITIONS = ("last", "last_subject", "subject")
METHODS = ("gnt", "oat")
PASS_COLUMNS = (
    512  # of all copies in one pass on a CPU: few, so that prompts in it are of one length
)
TIMED_PROMPTS = 8  # in the passes from which the cost is told
ROUNDING = 1e-6  # a smaller loss of probability is rounding: nothing was corrupted
NOTHING = range(0)  # the window of a copy that restores nothing


@dataclass(frozen=True)
class TraceSettings:
    steps: int = 150  # of Adam at most, for the constants of a setting
    lr: float = 0.03  # Adam's first step, in units of the subject embeddings' spread
    batch: int = 16  # train facts in a step; 0 takes all
    look_every: int = 25  # steps between two looks at all train facts; the best constants are kept
    tol: float = 0.01  # a look that gains less, as a share, and less than its error, cuts the step
    draws: int = 5  # of noise, averaged for each prompt
    noise: float = 3.0  # its standard deviation, in units of each coordinate's spread
    same_constant: bool = False  # the unpatched copy takes each layer's own constant
    seed: int = 0

    def __post_init__(self):
        store.at_least(0, steps=self.steps, lr=self.lr, batch=self.batch, noise=self.noise)
        store.at_least(1, look_every=self.look_every, draws=self.draws)

    def used_by(self, method: str) -> "TraceSettings":
        """What a method does not use stays at its default, so that it does not name its runs."""
        if method == "gnt":
            return TraceSettings(draws=self.draws, noise=self.noise, seed=self.seed)
        return replace(self, draws=TraceSettings.draws, noise=TraceSettings.noise)


class Setting(NamedTuple):
    """What is restored where, and how the subject is corrupted: with model and facts, a run."""

    kind: str  # mlp or attn: whose output is restored
    position: str  # last, last_subject or subject: at which tokens
    window: int  # in how many layers around each one
    method: str  # gnt or oat
    layers: tuple[int, ...]

    def windows(self, n_layers: int) -> list[range]:
        return [window_of(layer, self.window, n_layers) for layer in self.layers]


def window_of(layer: int, window: int, n_layers: int) -> range:
    """So many layers around one, cut off at the model's ends."""
    return range(max(0, layer - window // 2), min(n_layers - 1, layer + window // 2) + 1)


# ---- the clean run


class Clean(NamedTuple):
    """What the clean model computes on some prompts."""

    past: list[KeysValues]  # of every position, by layer
    written: list[Tensor]  # what can be restored, by layer [b col d], aligned at the prompts' ends
    p: Float[Tensor, " b"]  # of the most likely token
    answer: Int[Tensor, " b"]  # its id

    def rows(self, index: Int[Tensor, " b"], length: int) -> "Clean":
        """The same of some prompts, which have at most so many tokens."""
        past = [(k[index, :, :length], v[index, :, :length]) for k, v in self.past]
        written = [value[index] for value in self.written]
        return Clean(past, written, self.p[index], self.answer[index])


class Columns(NamedTuple):
    """The last columns of some prompts, aligned at the prompts' ends, and which are which."""

    positions: Int[Tensor, "b col"]  # in the prompt; a prompt that is too short repeats its BOS
    subject: Bool[Tensor, "b col"]
    last_subject: Bool[Tensor, "b col"]
    last: Bool[Tensor, "b col"]


def keys_and_values(kept: Mapping[str, Mapping[int, Tensor]]) -> list[KeysValues]:
    """What `recording("k", "v")` kept, as the past of another run."""
    return list(zip(kept["k"].values(), kept["v"].values(), strict=True))


def walk(
    model: Model,
    stream: Float[Tensor, "row col d"],
    positions: Int[Tensor, "b col"],
    past: list[KeysValues],
    edit: Edit = unchanged,
    leaving: Mapping[int, int] | None = None,
) -> Float[Tensor, "rows d"]:
    """The last column behind the last block, from some columns' embeddings; rows are (copy b).

    The other columns' keys and values are those of `past`, the same for all copies. Where a layer
    begins, `leaving[layer]` more copies leave the first one.
    """
    n = len(positions)
    for layer, (k, v) in enumerate(past):
        if leaving and leaving[layer]:
            new = repeat(stream[:n], "b col d -> (copy b) col d", copy=leaving[layer])
            stream = torch.cat([stream, new])
        copies = len(stream) // n
        only = None
        if layer == model.n_layers - 1:
            only = torch.full((len(stream),), stream.shape[1] - 1, device=stream.device)
        stream = model.block(
            layer,
            stream,
            edit,
            only,
            positions=repeat(positions, "b col -> (copy b) col", copy=copies),
            past=(
                repeat(k, "b head place e -> (copy b) head place e", copy=copies),
                repeat(v, "b head place e -> (copy b) head place e", copy=copies),
            ),
        )
    return stream[:, 0]


# ---- corrupt, restore, read

# What to add to the embeddings of the subject's columns, given the rows of some prompts.
Change = Callable[[Int[Tensor, " b"]], Float[Tensor, "copy b col d"]]


class Prompts:
    """Facts with subject spans, and what the clean model computes on them."""

    def __init__(self, model: Model, task: Task, kind: str):
        self.model = model
        self.kind = kind  # the site that can be restored: resid, attn or mlp
        self.n = len(task)
        self.tokens = task.tokens.to(model.device)
        self.last = task.last.to(model.device)
        self.subject = task.subject.to(model.device)
        # columns that a subject can change
        self.reach = (self.last - self.subject[:, 0] + 1).cpu()
        per_token = model.n_layers * (model.d_model + 2 * model.n_heads * model.d_head)
        bytes_each = 4 * (per_token + 8 * model.d_mlp) * self.tokens.shape[1] + 12 * model.d_vocab
        fits = machine.micro_batch(self.n, bytes_each) == self.n
        self.kept: Clean | None = None
        if fits:
            self.kept = machine.or_none(lambda: self.clean(torch.arange(self.n)))

    def width(self, rows: Int[Tensor, " b"]) -> int:
        """Columns that the subjects of these prompts can change, at most."""
        return int(self.reach[rows].max())

    def columns(self, rows: Int[Tensor, " b"]) -> Columns:
        last = self.last[rows, None]
        first, end = rearrange(self.subject[rows], "b edge -> edge b 1")
        from_the_end = torch.arange(1 - self.width(rows), 1, device=last.device)
        positions = (last + from_the_end).clamp(min=0)
        subject = (positions >= first) & (positions < end)
        return Columns(positions, subject, positions == end - 1, positions == last)

    def subjects(self) -> Float[Tensor, "m d"]:
        """Embeddings of all subject tokens."""
        columns = self.columns(torch.arange(self.n))
        tokens = self.tokens.gather(1, columns.positions)[columns.subject]
        return self.model.embed_tokens(tokens).float()

    @torch.no_grad()
    def clean(self, rows: Int[Tensor, " b"]) -> Clean:
        """The clean run of these prompts: computed once where all of them fit into memory."""
        length = int(self.last[rows].max()) + 1
        if self.kept:
            return self.kept.rows(rows, length)
        kept, keep = recording("k", "v", self.kind)
        embedded = self.model.embed(self.tokens[rows, :length])
        logp = self.model.finish(embedded, 0, self.last[rows], keep)
        at = self.columns(rows).positions[..., None]
        # what the last block writes is there for the last column only: aligned as it is
        written = [
            value if value.shape[1] == 1 else value.take_along_dim(at, 1)
            for value in kept[self.kind].values()
        ]
        p, answer = logp.exp().max(-1)
        return Clean(keys_and_values(kept), written, p, answer)

    # two ways to lose a subject

    def noise(
        self, rows: Int[Tensor, " b"], draws: Sequence[int], std: Float[Tensor, " d"], seed: int
    ) -> Float[Tensor, "1 b col d"]:
        """Noise on the subject, one draw a row: it depends on row, draw and seed alone."""
        width = self.width(rows)
        added = torch.zeros(len(rows), width, self.model.d_model)
        for i, (row, draw) in enumerate(zip(rows.tolist(), draws, strict=True)):
            first, end = self.subject[row].tolist()
            rng = machine.generator(zlib.crc32(f"{row} {draw} {seed}".encode()))
            start = width - int(self.reach[row])
            drawn = torch.randn(end - first, self.model.d_model, generator=rng)
            added[i, start : start + end - first] = drawn
        return (added.to(std.device) * std.float())[None]

    def constant(
        self, rows: Int[Tensor, " b"], constants: Sequence[Float[Tensor, " d"]]
    ) -> Float[Tensor, "copy b col d"]:
        """What turns every subject token into a constant, one for each copy."""
        tokens = self.tokens[rows].gather(1, self.columns(rows).positions)
        return torch.stack(list(constants))[:, None, None] - self.model.embed_tokens(tokens).float()

    # the three steps

    def corrupt(
        self, rows: Int[Tensor, " b"], columns: Columns, change: Float[Tensor, "copy b col d"]
    ) -> Float[Tensor, "row col d"]:
        """What enters the first block in each copy: clean embeddings, but for the subject's."""
        at = columns.positions[..., None]
        clean = self.model.embed(self.tokens[rows]).take_along_dim(at, 1)
        corrupted = clean + change * columns.subject[..., None]  # in float32, as constants are
        return rearrange(corrupted.to(clean.dtype), "copy b col d -> (copy b) col d")

    def restore(
        self,
        corrupted: Float[Tensor, "row col d"],
        clean: Clean,
        positions: Int[Tensor, "b col"],
        windows: Sequence[range],
        where: Bool[Tensor, "_ #b col"],
    ) -> Float[Tensor, "rows d"]:
        """The last column behind the last block, in a copy for each window: its clean values are
        put back `where`.

        If all copies share a corruption, each leaves the first one, which restores nothing, where
        its window begins (windows are in order); and if only last columns are restored, the other
        columns run once.
        """
        n = len(positions)
        past = clean.past
        leaving = None
        if len(corrupted) < n * len(windows):
            leaving = Counter(window.start for window in windows[1:])
            if not where[..., :-1].any():
                kept, keep = recording("k", "v")
                walk(self.model, corrupted, positions, past, keep)
                past = keys_and_values(kept)
                corrupted = corrupted[:, -1:]
                positions = positions[:, -1:]
                where = where[..., -1:]

        def put_back(site: str, layer: int, value: Tensor) -> Tensor:
            in_window = [layer in window for window in windows]
            if site != self.kind or not any(in_window):
                return value
            value = rearrange(value, "(copy b) col d -> copy b col d", b=n)
            copies, _, width, _ = value.shape
            restored = torch.tensor(in_window[:copies], device=value.device)[:, None, None]
            chosen = restored & where[:copies, :, -width:]
            value = torch.where(chosen[..., None], clean.written[layer][:, -width:], value)
            return rearrange(value, "copy b col d -> (copy b) col d")

        return walk(self.model, corrupted, positions, past, put_back, leaving)

    def read(
        self, stream: Float[Tensor, "row d"], answer: Int[Tensor, " b"]
    ) -> Float[Tensor, "copy b"]:
        """The answer's probability in each copy."""
        logp = self.model.log_probs(stream)
        logp = rearrange(logp, "(copy b) vocab -> copy b vocab", b=len(answer))
        at = repeat(answer, "b -> copy b 1", copy=len(logp))
        return logp.gather(-1, at)[..., 0].exp()

    def probabilities(
        self,
        rows: Int[Tensor, " b"],
        change: Float[Tensor, "_ b col d"],
        windows: Sequence[range],
        where: Bool[Tensor, "_ #b col"],
    ) -> Float[Tensor, "copies b"]:
        """The clean answer's probability: first in the clean run, then in a copy for each window.

        `change` is one for all copies or one each; `where` says which columns are restored, alike.
        """
        clean = self.clean(rows)
        columns = self.columns(rows)
        corrupted = self.corrupt(rows, columns, change)
        restored = self.restore(corrupted, clean, columns.positions, windows, where)
        return torch.cat([clean.p[None], self.read(restored, clean.answer)])

    # all prompts

    def passes(
        self, change: Change, windows: Sequence[range], position: str, rows: Tensor | None = None
    ) -> Iterator[Pass]:
        """`probabilities` of all prompts or some, as many at once as a pass takes, short ones
        first."""
        rows = torch.arange(self.n) if rows is None else rows
        model = self.model
        columns = PASS_COLUMNS if model.device.type == "cpu" else 64 * PASS_COLUMNS
        if torch.is_grad_enabled():  # a column keeps so many bytes for the backward pass
            columns = machine.micro_batch(columns, model.graph_bytes(1))
        size = max(1, columns // (len(windows) * self.width(rows)))
        in_order = rows[self.reach[rows].argsort(stable=True)]
        for chunk in in_order.split(size):
            where = getattr(self.columns(chunk), position)[None]
            p = self.probabilities(chunk, change(chunk), windows, where)
            yield slice(0, len(p)), chunk, p

    @torch.no_grad()
    def measure(
        self, change: Change, windows: Sequence[range], position: str
    ) -> Float[Tensor, "copies n"]:
        """`probabilities` of all prompts, in their order."""
        passes = partial(self.passes, change, windows, position)
        return collect(passes, 1 + len(windows), self.n)

    def train(
        self,
        windows: Sequence[range],
        position: str,
        starts: Sequence[Float[Tensor, " d"]],
        settings: TraceSettings,
        snapshots: Snapshots,
    ) -> Fitted:
        """A constant for each window with the least E max(0, p_clean − p_restored)."""

        def losses(constants: Sequence[Tensor], which: Sequence[int], rows: Tensor | None):
            change = partial(self.constant, constants=[constants[i] for i in which])
            active_windows = [windows[i] for i in which]
            for _, chunk, p in self.passes(change, active_windows, position, rows):
                yield slice(0, len(which)), chunk, (p[0] - p[1:]).relu()

        scale = max(self.subjects().std(0).square().mean().sqrt().item(), 1e-6)
        candidates = [[start] * len(windows) for start in starts]
        return fit(candidates, [scale] * len(windows), losses, self.n, settings, snapshots)


# ---- one setting


def spread(model: Model, tokens: Int[Tensor, "n pos"] | None = None) -> Float[Tensor, " d"]:
    """σ of each coordinate of token embeddings, the noise's unit: of contexts or of given tokens,
    without BOS, which also pads."""
    if tokens is None:
        tokens = contexts(model, 256, min(64, model.n_ctx))
    return model.embed_tokens(tokens[tokens != model.bos].to(model.device)).float().std(0)


def aie(w: Float[Tensor, " n"], z: Float[Tensor, " n"]) -> dict[str, float]:
    """Average indirect effect max(0, 1 − E[W] / E[Z]) with its standard error; 0 where the
    corruption costs nothing."""
    if not z.mean() > ROUNDING:
        return {"aie": 0.0, "se": float("nan")}
    ratio, se = stats.ratio_se(w, z)
    return {"aie": max(0.0, 1 - ratio), "se": se}


def effects(
    setting: Setting,
    clean: Float[Tensor, "draw n"],
    corrupted: Float[Tensor, "draw _ n"],
    patched: Float[Tensor, "draw layer n"],
) -> tuple[list[Numbers], Tensors]:
    """A row for each layer, and every fact's W and Z [layer n], from the answer's probabilities.

    W is what is still missing with the layer's window restored (a gain counts as nothing missing),
    Z what is missing with nothing restored, both averaged over draws.
    """
    w = (clean[:, None] - patched).clamp(min=0).mean(0)
    z = (clean[:, None] - corrupted).mean(0).expand_as(w)
    names = setting._asdict()
    layers = names.pop("layers")
    rows = [
        {
            **names,
            "layer": layer,
            **aie(w[i], z[i]),
            "p_clean": clean.mean(),
            "p_corrupt": (clean[0] - z[i]).mean(),
            "p_patched": patched[:, i].mean(),
            "n": clean.shape[1],
        }
        for i, layer in enumerate(layers)
    ]
    return rows, {"w": w, "z": z, "clean": clean[0]}


def trace_with_noise(
    model: Model,
    facts: Task,
    setting: Setting,
    settings: TraceSettings,
    sigma: Float[Tensor, " d"],
    part: str,
) -> tuple[Numbers, Tensors]:
    """GNT: nothing is trained, and all layers share a draw."""
    test = Prompts(model, getattr(facts, part), setting.kind)
    windows = setting.windows(model.n_layers)
    std = settings.noise * sigma.to(model.device)

    def one_draw(draw: int) -> Float[Tensor, "copies n"]:
        def change(rows: Tensor) -> Tensor:
            return test.noise(rows, [draw] * len(rows), std, settings.seed)

        return test.measure(change, [NOTHING, *windows], setting.position)

    p = torch.stack([one_draw(draw) for draw in range(settings.draws)])  # [draw copy n]
    rows, tensors = effects(setting, p[:, 0], p[:, 1:2], p[:, 2:])
    return {"rows": rows}, tensors


def trace_with_constants(
    model: Model,
    facts: Task,
    setting: Setting,
    settings: TraceSettings,
    part: str,
    snapshots: Snapshots,
) -> tuple[Numbers, Tensors]:
    """OAT: each layer's copy has its own constant, trained on the train facts, and so has the
    unpatched one: all from the same starts and for as many steps, or a layer without effect would
    seem to have one."""
    test = Prompts(model, getattr(facts, part), setting.kind)
    train = Prompts(model, facts.train, setting.kind)
    windows = setting.windows(model.n_layers)
    base = unpatched_constant(model, facts, **vars(settings))
    first = first_constant(model, facts, settings)
    starts = {"mean": train.subjects().mean(0), "unpatched": first}
    fitted = train.train(windows, setting.position, list(starts.values()), settings, snapshots)
    change = partial(test.constant, constants=[base, *fitted.constants])
    p = test.measure(change, [NOTHING, *windows], setting.position)[None]  # [1 copy n]
    corrupted = p[:, 1:2]
    if settings.same_constant:
        change = partial(test.constant, constants=fitted.constants)
        corrupted = test.measure(change, [NOTHING] * len(windows), setting.position)[None, 1:]
    rows, tensors = effects(setting, p[:, 0], corrupted, p[:, 2:])
    names = list(starts)
    numbers = {"curves": fitted.curves, "starts": [names[i] for i in fitted.starts]}
    trained = {"constants": torch.stack(fitted.constants), "unpatched": base}
    return {"rows": rows, **numbers}, {**tensors, **trained}


@store.with_settings
def unpatched_constant(
    model: Model, facts: Task, *, settings: TraceSettings
) -> Float[Tensor, " d"]:
    """The constant that loses least when nothing is restored: the same in every setting, so trained
    once."""
    return _unpatched(model, facts, settings, [first_constant(model, facts, settings)])


def first_constant(model: Model, facts: Task, settings: TraceSettings) -> Float[Tensor, " d"]:
    """Where all copies may start: what training from the mean gives where nothing is restored."""
    return _unpatched(model, facts, settings, [])


def _unpatched(
    model: Model, facts: Task, settings: TraceSettings, starts: list[Float[Tensor, " d"]]
) -> Float[Tensor, " d"]:
    """A constant trained with nothing restored, from the mean of the subjects or other starts."""

    def compute(snapshots: Snapshots) -> tuple[Numbers, Tensors]:
        train = Prompts(model, facts.train, "mlp")  # nothing is restored: any kind does
        mean = train.subjects().mean(0)
        fitted = train.train([NOTHING], "last", [mean, *starts], settings, snapshots)
        [curve] = fitted.curves
        loss = min(loss for _, loss in curve)
        return {"loss": loss, "curve": curve}, {"constant": fitted.constants[0]}

    result = store.run(
        "tracing_constant",
        replace(settings.used_by("oat"), same_constant=False),
        compute,
        model=model,
        task=facts,
        inputs={"starts": store.fingerprint(starts)} if starts else {},
        version=VERSION,
        key="unpatched" if starts else "first",
    )
    return result.tensors["constant"].to(model.device)


def run_setting(
    model: Model,
    setting: Setting,
    facts: Task,
    settings: TraceSettings,
    sigma: Float[Tensor, " d"] | None,
    part: str = "test",
    compute: Callable | None = None,
) -> store.Result:
    """One setting as a stored run: `.numbers` (rows, curves, starts) and `.tensors` (w, z [layer
    n], clean [n], constants, unpatched)."""
    inputs = {**setting._asdict(), "part": part}
    if setting.method == "gnt":
        inputs["sigma"] = store.fingerprint(sigma)
    used = settings.used_by(setting.method)

    def trace_it(snapshots: Snapshots) -> tuple[Numbers, Tensors]:
        if setting.method == "gnt":
            return trace_with_noise(model, facts, setting, used, sigma, part)
        return trace_with_constants(model, facts, setting, used, part, snapshots)

    key = f"{setting.kind}_{setting.position}_w{setting.window}_{setting.method}_{part}"
    return store.run(
        "causal_tracing",
        used,
        compute or trace_it,
        model=model,
        task=facts,
        inputs=inputs,
        version=VERSION,
        key=key,
    )


def tell_cost(
    model: Model, facts: Task, settings: TraceSettings, missing: Sequence[Setting], part: str
) -> None:
    """What settings that are not stored will take, from a few prompts through one of each kind,
    position and method."""
    timed: dict[tuple, float] = {}  # seconds of one prompt in one copy
    total = 0.0
    for setting in missing:
        trained = setting.method == "oat"
        kind = (setting.kind, setting.position, trained)
        if kind not in timed:
            some = facts.train if trained else getattr(facts, part)
            timed[kind] = _seconds(model, some, setting, backward=trained)
        copies = len(setting.layers)
        if trained:
            looks = len(facts.train) * (2 + settings.steps / settings.look_every)
            batches = settings.steps * (settings.batch or len(facts.train))
            prompts = batches + (looks + len(getattr(facts, part))) / 2  # no way back: about half
        else:
            prompts = settings.draws * len(getattr(facts, part))
        total += prompts * copies * timed[kind]
    machine.announce(
        f"{len(missing)} settings of tracing: about {machine.duration(total / machine.jobs())} if "
        "no constant stops early; what is done is kept"
    )


def _seconds(model: Model, facts: Task, setting: Setting, backward: bool) -> float:
    """Of one prompt in one copy, with its own constant and gradients or without either."""
    prompts = Prompts(model, facts[:TIMED_PROMPTS], setting.kind)
    windows = setting.windows(model.n_layers)
    mean = prompts.subjects().mean(0)
    constants = [mean.clone().requires_grad_(backward) for _ in windows]
    change = partial(prompts.constant, constants=constants if backward else constants[:1])

    def once() -> float:
        began = time.perf_counter()
        with torch.set_grad_enabled(backward):
            for _, _, p in prompts.passes(change, windows, setting.position):
                if backward:
                    p.sum().backward()
        return (time.perf_counter() - began) / (prompts.n * len(windows))

    return min(once(), once())


# ---- what users call


@store.with_settings
def trace(
    model: Model,
    facts: Task,
    kind: str | Sequence[str] = "mlp",
    position: str | Sequence[str] = "last",
    window: int | Sequence[int] = 5,
    method: str | Sequence[str] = "oat",
    layers: Sequence[int] | None = None,
    sigma: Float[Tensor, " d"] | None = None,
    part: str = "test",
    each: bool = False,
    *,
    settings: TraceSettings,
) -> pd.DataFrame:
    """AIE of each layer on a part of the facts, which are any task with subject spans.

    `kind` (mlp, attn), `position` (last, last_subject, subject), `window` (layers restored around
    each one) and `method` (gnt, oat) may be lists; every setting is a stored run, and they run side
    by side, in workers that load the model. `sigma` is the noise's unit (see `spread`). Columns:
    kind position window method layer aie se p_clean p_corrupt p_patched n; with `each` also what is
    missing of every fact with the layer restored (w), without (z), and its clean probability.
    """
    kinds = _one_of("kind", kind, KINDS)
    positions = _one_of("position", position, POSITIONS)
    methods = _one_of("method", method, METHODS)
    _one_of("part", part, PARTS)
    windows = [window] if isinstance(window, int) else list(window)
    layers = tuple(sorted(set(range(model.n_layers) if layers is None else layers)))
    _check_layers(model, windows, layers)
    _check_subjects(model, facts)
    for needed in (part, "train") if "oat" in methods else (part,):
        getattr(facts, needed)  # raises where a part is empty
    if sigma is None and "gnt" in methods:
        sigma = spread(model)
    asked = [Setting(*choice, layers) for choice in product(kinds, positions, windows, methods)]
    options = {"facts": facts, "settings": settings, "sigma": sigma, "part": part}
    ask = partial(run_setting, model, **options)
    missing = [setting for setting in asked if not store.is_stored(ask, setting)]
    if missing:
        machine.or_none(lambda: tell_cost(model, facts, settings, missing, part))
    tables = []
    for result in models.each(partial(run_setting, **options), model, asked, "tracing"):
        table = result.frame()
        if each:
            table["w"] = list(result.tensors["w"])
            table["z"] = list(result.tensors["z"])
            table["clean"] = [result.tensors["clean"]] * len(table)
        tables.append(table)
    return pd.concat(tables, ignore_index=True)


@torch.no_grad()
def trace_prompt(
    model: Model,
    prompt: str | Task,
    subject: str = "",
    kind: str = "resid",
    window: int = 1,
    layers: Sequence[int] | None = None,
    sigma: Float[Tensor, " d"] | None = None,
    constant: Float[Tensor, " d"] | None = None,
    draws: int = 5,
    noise: float = 3.0,
    seed: int = 0,
) -> pd.DataFrame:
    """The map that users of ROME know: the answer's probability when one token is restored at one
    layer, with a row for each token and a column for each layer.

    The prompt is a text with its subject, or a task of one fact. `resid` restores the stream that
    enters a layer, `attn` and `mlp` what a window of layers writes. The subject is corrupted by
    noise, or by a `constant` in its place. `.attrs` holds answer, p_clean and p_corrupt.
    """
    layers = list(range(model.n_layers) if layers is None else layers)
    store.at_least(1, draws=draws)
    _one_of("kind", kind, ("resid", *KINDS))
    _check_layers(model, [window], layers)
    task = _one_prompt(model, prompt, subject) if isinstance(prompt, str) else prompt
    _check_subjects(model, task)
    if len(task) > 1:
        raise ValueError(f"one fact at a time, as facts[[0]]: the task has {len(task)}")
    prompts = Prompts(model, task, kind)
    rows = torch.zeros(draws if constant is None else 1, dtype=torch.int64)
    if constant is None:
        sigma = spread(model) if sigma is None else sigma
        std = noise * sigma.to(model.device)
        change = prompts.noise(rows, range(draws), std, seed)
    else:
        change = prompts.constant(rows, [constant.to(model.device)])
    width = change.shape[2]
    # copy 0 restores nothing, copy i column i − 1
    where = torch.eye(1 + width, dtype=torch.bool, device=model.device)[:, None, 1:]

    def at_layer(layer: int) -> Float[Tensor, " copies"]:
        windows = [NOTHING] + [window_of(layer, window, model.n_layers)] * width
        return prompts.probabilities(rows, change, windows, where).mean(1)

    p = torch.stack([at_layer(layer) for layer in layers], dim=1).cpu()  # [copy layer]
    p_clean = p[0]
    p_corrupt = p[1]
    p_restored = p[2:]
    before = repeat(p_corrupt, "layer -> token layer", token=int(task.subject[0, 0]))
    tokens = model.decode(task.tokens[0, : task.last[0] + 1])
    table = pd.DataFrame(
        torch.cat([before, p_restored]).numpy(),
        index=pd.Index(tokens, name="token"),
        columns=pd.Index(layers, name="layer"),
    )
    table.attrs["answer"] = model.decode(prompts.clean(rows[:1]).answer)[0]
    table.attrs["p_clean"] = p_clean[0].item()
    table.attrs["p_corrupt"] = p_corrupt[0].item()
    return table


def _one_prompt(model: Model, text: str, subject: str) -> Task:
    """A task of one fact whose answer is whatever the model says."""
    tokens, last = model.pad([model.encode(text)])
    no_answer = torch.full((1, 1), -1)
    return Task(
        name="prompt",
        tokens=tokens,
        last=last,
        right=no_answer,
        wrong=no_answer,
        part=torch.full((1,), PARTS.index("test")),
        prompts=(text,),
        subject=torch.tensor([subject_span(model, text, subject)]),
    )


def _one_of(name: str, given: str | Sequence[str], choices: Sequence[str]) -> list[str]:
    """What was asked for, as a list, if all of it is there."""
    given = [given] if isinstance(given, str) else list(given)
    for value in given or ["none"]:
        if value not in choices:
            raise ValueError(f"{name} {value!r}: it is one of {', '.join(choices)}")
    return given


def _check_layers(model: Model, windows: Sequence[int], layers: Sequence[int]) -> None:
    if not windows:
        raise ValueError("no window: how many layers are to be restored around each one?")
    for window in windows:
        if window % 2 != 1 or not 1 <= window <= model.n_layers:
            raise ValueError(
                f"window {window}: it is odd and at most {model.n_layers}, "
                f"the number of layers of '{model.name}'"
            )
    if not layers or not 0 <= min(layers) <= max(layers) < model.n_layers:
        raise ValueError(f"layers {list(layers)}: '{model.name}' has 0 … {model.n_layers - 1}")


def _check_subjects(model: Model, facts: Task) -> None:
    """Refuses a task that cannot be traced."""
    if not len(facts) or facts.subject is None:
        lacks = "no subject spans" if len(facts) else "no facts: the model knew none of them"
        raise ValueError(
            f"task '{facts.name}' has {lacks}; oa.facts(model) makes a task that can be traced"
        )
    facts.check(model)
    for i, (first, end) in enumerate(facts.subject.tolist()):
        if not 1 <= first < end <= facts.last[i] + 1:
            raise ValueError(
                f"fact {i}: its subject, tokens {[first, end]}, does not lie in its prompt"
            )
