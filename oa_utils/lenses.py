"""Lenses: what a token's stream at a layer already says about the prediction (paper §5, app. H).

Layer ℓ is the stream that enters block ℓ; layer n_layers is the model's end. The logit lens
unembeds the stream as it is, the tuned lens after a linear map. The mean, resample and OCA lenses
send it through the later blocks with attention replaced by what knows nothing of the context: only
norms and MLPs run, on the read token alone. OCA (optimal constant attention) trains these
constants, own ones for each starting layer; `linear` is a linear map trained to do what OCA does.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from einops import einsum, rearrange
from jaxtyping import Float, Int
from torch import Tensor

from oa_utils import machine, stats, store
from oa_utils.models import Model, recording

VERSION = 1
STARTS = ("identity", "random")
POOL = 256  # readings whose attention outputs the resample lens draws from
ROWS = 256  # readings whose losses are computed at once


# ---- what the model computes at the tokens that are read


@dataclass(frozen=True, eq=False)
class Readings:
    """What the model computes at some tokens of contexts: what lenses learn from and read."""

    resid: Float[Tensor, "layer n d"]  # the stream that enters each block; last, the model's end
    mean: Float[Tensor, "block d"]  # of attention outputs, b_O included
    spread: Float[Tensor, " block"]  # their standard deviation, root mean square over coordinates
    pool: Float[Tensor, "block pool d"]  # attention outputs of the first readings

    def __len__(self) -> int:
        return self.resid.shape[1]

    @cached_property
    def fingerprint(self) -> str:
        return store.fingerprint(self.resid, self.mean, self.spread, self.pool)

    def part(self, rows: slice) -> "Readings":
        """Some of the streams; attention statistics stay those of all."""
        return replace(self, resid=self.resid[:, rows])


@torch.no_grad()
def at_places(
    model: Model, tokens: Int[Tensor, "b pos"], places: Int[Tensor, "b k"]
) -> tuple[Float[Tensor, "layer b k d"], Float[Tensor, "block b k d"]]:
    """Streams and attention outputs at k places of each context, in one forward."""
    places = places.to(model.device)
    row = torch.arange(len(tokens), device=model.device)[:, None]
    kept, keep = recording("resid", "attn", pick=lambda value: value[row, places])
    end = model.run(model.embed(tokens), edit=keep)[row, places]
    return torch.stack([*kept["resid"].values(), end]), torch.stack([*kept["attn"].values()])


def passes(
    model: Model, tokens: Int[Tensor, "n pos"], places: Int[Tensor, "n k"], start: int = 0
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Contexts from the start-th on, pass by pass: which ones, and what `at_places` finds in them.

    Nothing behind the last place of a pass is run, so contexts of like length belong side by side.
    """
    size = machine.rows_in_a_pass(model, tokens.shape[1])
    first_rows = range(start, len(tokens), size)
    for first in machine.progress(first_rows, desc=f"reading {len(tokens):,} contexts"):
        rows = slice(first, first + size)
        length = int(places[rows].max()) + 1
        yield rows, *at_places(model, tokens[rows, :length], places[rows])


def read(model: Model, tokens: Tensor, places: Int[Tensor, "n *k"] | None = None) -> Readings:
    """Readings of contexts [n pos] (padded on the right): of their last tokens, or of `places`.

    Several places of a context are readings of their own; the first ones of all contexts are first.
    """
    if tokens.ndim != 2 or tokens.is_floating_point() or not len(tokens):
        raise ValueError(
            "contexts are token ids [n, length], as oa.contexts gives, "
            f"not {tokens.dtype} {list(tokens.shape)}"
        )
    if places is None:
        places = torch.full((len(tokens),), tokens.shape[1] - 1)
    places = places.reshape(len(tokens), -1)
    n = places.numel()
    numbers = rearrange(torch.arange(n), "(k context) -> k context", k=places.shape[1])
    resid = torch.empty(model.n_layers + 1, n, model.d_model, device=model.device)
    pool = torch.empty(model.n_layers, min(POOL, n), model.d_model, device=model.device)
    total = torch.zeros(model.n_layers, model.d_model, dtype=torch.float64)
    squares = torch.zeros_like(total)
    for rows, streams, outputs in passes(model, tokens, places):
        number = numbers[:, rows].flatten()  # which readings these are
        outputs = rearrange(outputs, "block b k d -> block (k b) d").float()
        resid[:, number] = rearrange(streams, "layer b k d -> layer (k b) d")
        pooled = number < pool.shape[1]
        pool[:, number[pooled]] = outputs[:, pooled]
        total += outputs.sum(1).cpu().double()
        squares += outputs.cpu().double().square().sum(1)
    mean = total / n
    spread = (squares / n - mean.square()).mean(-1).clamp(min=1e-12).sqrt()
    return Readings(resid, mean.float().to(model.device), spread.float().to(model.device), pool)


# ---- the kinds of lenses


@dataclass(eq=False)
class Lens:
    """Log-probabilities from a token's stream at any layer of one model.

    A kind says with `ends` where it takes the stream; the model's own unembedding does the rest.
    """

    model: Model
    tensors: dict[str, Tensor] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)  # of a trained one: settings, curve …
    kind: ClassVar[str]

    def ends(
        self, resid: Float[Tensor, "lens b d"], layers: Sequence[int]
    ) -> Float[Tensor, "lens b d"]:
        """The streams that are unembedded, of several layers (in order) at once."""
        raise NotImplementedError

    def log_probs(self, resid: Float[Tensor, "*any d"], layer: int) -> Float[Tensor, "*any vocab"]:
        model = self.model
        if not 0 <= layer <= model.n_layers:
            raise ValueError(
                f"'{model.name}' has layers 0 … {model.n_layers} (its end), not {layer}"
            )
        if resid.shape[-1] != model.d_model:
            raise ValueError(
                f"a stream of '{model.name}' has {model.d_model} coordinates, not {resid.shape[-1]}"
            )
        if layer < model.n_layers:
            resid = self.ends(resid.reshape(1, -1, model.d_model), [layer]).reshape(resid.shape)
        return model.log_probs(resid)

    @torch.no_grad()
    def losses(self, data: Readings) -> Float[Tensor, "layer n"]:
        """KL(model ‖ lens) of each reading at each layer; at the model's end there is none."""
        layers = range(self.model.n_layers)
        parts = [
            match(self.model, self.ends(part[:-1], layers), part[-1:])
            for part in data.resid.split(ROWS, dim=1)
        ]
        return F.pad(torch.cat(parts, 1), (0, 0, 0, 1)).cpu()

    @property
    def n_parameters(self) -> int:
        return sum(value.numel() for value in self.tensors.values())

    @property
    def fingerprint(self) -> str:
        names = sorted(self.tensors)
        return store.fingerprint(self.kind, names, *(self.tensors[name] for name in names))

    def save(self, path: str | Path) -> None:
        """One sealed file: whose lens it is, how it was trained, and its tensors."""
        head = {
            "kind": self.kind,
            "model": self.model.name,
            "fingerprint": self.model.fingerprint,
            "training": self.training,
        }
        store.write_sealed(Path(path), head, self.tensors)


class LogitLens(Lens):
    """The stream as it is."""

    kind = "logit"

    def ends(
        self, resid: Float[Tensor, "lens b d"], layers: Sequence[int]
    ) -> Float[Tensor, "lens b d"]:
        return resid


class TunedLens(Lens):
    """W · stream + b, with own W [block d d] and b [block d] for each layer."""

    kind = "tuned"

    def ends(
        self, resid: Float[Tensor, "lens b d"], layers: Sequence[int]
    ) -> Float[Tensor, "lens b d"]:
        W = self.tensors["W"][list(layers)]
        b = self.tensors["b"][list(layers)]
        return torch.baddbmm(b[:, None], resid, W.mT)


class LinearCopy(TunedLens):
    """A linear map that was trained to say what an OCA lens says."""

    kind = "linear"


class AttentionLens(Lens):
    """The stream goes on through later norms and MLPs; something stands for later attention."""

    def attention(self, layer: int, n: int) -> Float[Tensor, "later #n d"]:
        """What block `layer` and each later one get in place of attention outputs, for n rows."""
        raise NotImplementedError

    def ends(
        self, resid: Float[Tensor, "lens b d"], layers: Sequence[int]
    ) -> Float[Tensor, "lens b d"]:
        outputs = [self.attention(layer, resid.shape[1]) for layer in layers]
        x = resid[:0]
        for block in range(layers[0], self.model.n_layers):
            started = sum(layer <= block for layer in layers)
            x = torch.cat([x, resid[len(x) : started]])  # those that start here join the others
            x = x + torch.stack([outputs[i][block - layers[i]] for i in range(started)])
            x = x + self.model.layers[block].mlp(x)
        return x


class MeanLens(AttentionLens):
    """Attention replaced by its mean: constants [block d]."""

    kind = "mean"

    def attention(self, layer: int, n: int) -> Float[Tensor, "later 1 d"]:
        return self.tensors["constants"][layer:, None]


class ResampleLens(AttentionLens):
    """Attention replaced by that of other contexts: constants [block pool d]."""

    kind = "resample"

    def attention(self, layer: int, n: int) -> Float[Tensor, "later n d"]:
        """One context for all blocks of a row; where the rows are the pool, the next one."""
        pool = self.tensors["constants"]
        other = (torch.arange(n, device=pool.device) + 1) % pool.shape[1]
        return pool[layer:, other]

    @property
    def n_parameters(self) -> int:
        return 0  # it has contexts, nothing that was fitted


class OCALens(AttentionLens):
    """Attention replaced by trained constants [start block d], own ones for each start."""

    kind = "oca"

    def attention(self, layer: int, n: int) -> Float[Tensor, "later 1 d"]:
        return self.tensors["constants"][layer, layer:, None]

    @property
    def n_parameters(self) -> int:
        n = self.model.n_layers
        return n * (n + 1) // 2 * self.model.d_model


KINDS: dict[str, type[Lens]] = {
    lens.kind: lens for lens in (LogitLens, TunedLens, MeanLens, ResampleLens, OCALens, LinearCopy)
}


def load(path: str | Path, model: Model) -> Lens:
    """A lens that `save` wrote, refused on any model but its own."""
    head, tensors = store.read_sealed(Path(path))
    if head.get("kind") not in KINDS:
        raise store.BadFile(f"{path} is not a lens that oa_utils saved")
    if head["fingerprint"] != model.fingerprint:
        raise ValueError(
            f"the lens {path} belongs to '{head['model']}' ({head['fingerprint']}), "
            f"not to '{model.name}' ({model.fingerprint})"
        )
    if not all(value.isfinite().all() for value in tensors.values()):
        raise store.BadFile(f"{path} holds numbers that are not finite")
    moved = {name: value.to(model.device) for name, value in tensors.items()}
    return KINDS[head["kind"]](model, moved, head["training"])


# ---- training


@dataclass(frozen=True)
class LensSettings:
    steps: int = 1000  # of Adam at most, with a step size that falls to nothing over them
    batch: int = 64  # readings in a step
    lr: float = 0.0  # the first step size; 0 takes the kind's own
    look_every: int = 50  # steps between two looks at validation; each layer keeps its best state
    patience: int = 5  # looks without gain after which a layer stops
    start: str = "identity"  # of linear maps; the reference code's is `random`: N(0, 1) entries
    seed: int = 0

    def __post_init__(self):
        store.at_least(0, steps=self.steps, lr=self.lr)
        store.at_least(1, batch=self.batch, look_every=self.look_every, patience=self.patience)
        if self.start not in STARTS:
            raise ValueError(f"start {self.start!r} is not one of the starts {', '.join(STARTS)}")


def match(
    model: Model,
    ends: Float[Tensor, "lens b d"],
    target: Float[Tensor, "#lens b d"],
    weight: float = 0.0,
) -> Float[Tensor, "lens b"]:
    """KL(target ‖ lens), one layer's logits at a time, as those of all layers would be too many.

    With a weight, the gradient of weight · sum goes back through `ends`.
    """
    losses = []
    gradients = []
    for i, end in enumerate(ends):
        if i < len(target):  # one target for each layer, or one for all
            full = model.log_probs(target[i].detach())
        leaf = end.detach().requires_grad_(weight > 0)
        loss = stats.kl(full, model.log_probs(leaf))
        if weight:
            (weight * loss.sum()).backward()
            gradients.append(leaf.grad)
        losses.append(loss.detach())
    if weight:
        ends.backward(torch.stack(gradients))
    return torch.stack(losses)


class Trainer:
    """A lens in training: raw parameters of unit scale, and the lens that they stand for.

    It learns to say what the model says or, with `of`, what that lens says.
    """

    lr: ClassVar[float]  # Adam's first step, inputs and outputs being of unit spread

    def __init__(self, model: Model, data: Readings, of: Lens | None, raw: dict[str, Tensor]):
        self.model = model
        self.data = data
        self.of = of
        self.raw = {name: value.to(model.device).requires_grad_() for name, value in raw.items()}
        mlp_passes = model.n_layers * (model.n_layers + 1) // 2
        floats = mlp_passes * (6 * model.d_model + 4 * model.d_mlp) + 6 * model.d_vocab
        self.bytes = 4 * floats  # that one reading takes in a step

    def lens(self, raw: dict[str, Tensor]) -> Lens:
        raise NotImplementedError

    def losses(
        self, resid: Float[Tensor, "layer b d"], layers: Sequence[int], train: bool = False
    ) -> Float[Tensor, "lens b"]:
        """Of some layers; with `train`, each one's mean gives gradient to its raw parameters."""
        layers = list(layers)
        weight = 1 / resid.shape[1] if train else 0.0
        parts = []
        for part in resid.split(machine.micro_batch(resid.shape[1], self.bytes), dim=1):
            with torch.no_grad():
                target = part[-1:] if self.of is None else self.of.ends(part[layers], layers)
            with torch.set_grad_enabled(train):
                ends = self.lens(self.raw).ends(part[layers], layers)
                parts.append(match(self.model, ends, target, weight))
        return torch.cat(parts, 1)


class OCATrainer(Trainer):
    """Starts from mean attention; raw constants count in standard deviations of attention."""

    lr = 0.1

    def __init__(
        self, model: Model, data: Readings, settings: LensSettings, of: Lens | None = None
    ):
        n = model.n_layers
        super().__init__(model, data, of, {"constants": torch.zeros(n, n, model.d_model)})

    def lens(self, raw: dict[str, Tensor]) -> OCALens:
        constants = self.data.mean + self.data.spread[:, None] * raw["constants"]
        return OCALens(self.model, {"constants": constants})


class LinearTrainer(Trainer):
    """Starts from the identity; raw maps take the standardised stream to outputs of unit spread."""

    lr = 1e-3

    def __init__(
        self, model: Model, data: Readings, settings: LensSettings, of: Lens | None = None
    ):
        streams = data.resid[:-1]
        self.centre = streams.mean(1)  # [block d]
        self.scale = streams.std(1).clamp(min=1e-6)  # [block d]
        self.out = data.resid[-1].std(0).square().mean().sqrt()
        self.eye = torch.eye(model.d_model, device=model.device)
        super().__init__(model, data, of, self._first(settings))

    def _first(self, settings: LensSettings) -> dict[str, Tensor]:
        """Raw parameters of the identity, or of maps whose entries are standard normal."""
        n, d = self.centre.shape
        if settings.start == "identity":
            return {"W": torch.zeros(n, d, d), "b": torch.zeros(n, d)}
        W = torch.randn(n, d, d, generator=machine.generator(settings.seed)).to(self.eye)
        b = torch.randn(n, d, generator=machine.generator(settings.seed)).to(self.eye)
        change = W - self.eye
        moved = einsum(change, self.centre, "block out d, block d -> block out")
        return {"W": change * self.scale[:, None] / self.out, "b": (b + moved) / self.out}

    def lens(self, raw: dict[str, Tensor]) -> TunedLens:
        change = self.out * raw["W"] / self.scale[:, None]
        moved = einsum(change, self.centre, "block out d, block d -> block out")
        kind = TunedLens if self.of is None else LinearCopy
        return kind(self.model, {"W": self.eye + change, "b": self.out * raw["b"] - moved})


TRAINERS: dict[str, type[Trainer]] = {
    "oca": OCATrainer,
    "tuned": LinearTrainer,
    "linear": LinearTrainer,
}


@dataclass
class _State:
    """Where a training is: with the optimiser's state everything that a snapshot needs."""

    step: int
    raw: dict[str, Tensor]
    kept: dict[str, Tensor]  # raw parameters of each layer's best state so far
    best: list[float]  # its validation loss
    idle: list[int]  # looks since then
    curve: list[list]  # [step, best] at each look


def _start(trainer: Trainer, held: Readings) -> _State:
    n_layers = trainer.model.n_layers
    kept = {name: value.detach().clone() for name, value in trainer.raw.items()}
    best = trainer.losses(held.resid, range(n_layers)).mean(1).tolist()
    return _State(0, trainer.raw, kept, best, [0] * n_layers, [[0, best[:]]])


def _look(state: _State, active: list[int], losses: list[float]) -> None:
    """Keeps the layers that are better on validation than ever before."""
    for i, loss in zip(active, losses, strict=True):
        state.idle[i] += 1
        if loss < state.best[i]:
            state.best[i] = loss
            state.idle[i] = 0
            for name, value in state.kept.items():
                value[i] = state.raw[name].data[i]
    state.curve.append([state.step, state.best[:]])


def train_layers(
    trainer: Trainer, held: Readings, settings: LensSettings, snapshots: store.Snapshots
) -> tuple[store.Numbers, store.Tensors]:
    """Every layer on its own, side by side: numbers, and the lens of each layer's best state.

    `held` are the readings of validation contexts, on which states are compared.
    """
    n = len(trainer.data)
    batch = min(settings.batch, n)
    lr = settings.lr or trainer.lr
    saved = snapshots.load()
    if saved:
        state = _State(**saved["state"])
        state.kept = {name: value.to(held.resid.device) for name, value in state.kept.items()}
        for name, value in trainer.raw.items():
            value.data.copy_(state.raw[name])
        state.raw = trainer.raw
    else:
        state = _start(trainer, held)
    optimiser = torch.optim.Adam(state.raw.values(), lr=lr, eps=1e-12)
    if saved:
        optimiser.load_state_dict(saved["optimiser"])
    bar = machine.progress(total=settings.steps, desc="training a lens, all layers")
    bar.update(state.step)
    while state.step < settings.steps and min(state.idle) < settings.patience:
        active = [i for i, looks in enumerate(state.idle) if looks < settings.patience]
        optimiser.param_groups[0]["lr"] = lr * (1 - state.step / settings.steps)
        optimiser.zero_grad()
        epoch, place = divmod(state.step, n // batch)
        order = torch.randperm(n, generator=machine.generator(settings.seed * 100_003 + epoch))
        rows = order[place * batch : (place + 1) * batch]
        trainer.losses(trainer.data.resid[:, rows], active, train=True)
        optimiser.step()
        state.step += 1
        bar.update()
        if state.step % settings.look_every and state.step < settings.steps:
            continue
        _look(state, active, trainer.losses(held.resid, active).mean(1).tolist())
        bar.set_postfix(loss=f"{sum(state.best) / len(state.best):.4f}", layers=len(active))
        snapshots.save_when_due(lambda: {"state": vars(state), "optimiser": optimiser.state_dict()})
    bar.close()
    lens = trainer.lens(state.kept)
    _, start = state.curve[0]
    rows = [{"layer": i, "start": start[i], "loss": state.best[i]} for i in range(len(state.best))]
    numbers = {
        "rows": rows,
        "curve": state.curve,
        "steps": state.step,
        "parameters": lens.n_parameters,
    }
    return numbers, lens.tensors


@store.with_settings
def train(
    model: Model,
    contexts: Tensor | Readings,
    kind: str = "oca",
    validation: Tensor | Readings | None = None,
    of: Lens | None = None,
    *,
    settings: LensSettings,
) -> Lens:
    """A lens of one of KINDS; `of` is the OCA lens that a `linear` one copies.

    Several lenses of the same contexts share their `read(model, contexts)`, which may be given in
    their place. Without `validation` an eighth of the contexts is held out for it. A lens that was
    trained before is loaded from the store.
    """
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r} is not known: kinds are {', '.join(KINDS)}")
    if not isinstance(of, OCALens if kind == "linear" else type(None)):
        raise ValueError(
            "a linear lens, and no other, copies an OCA lens: "
            "train(model, contexts, 'linear', of=oca)"
        )
    data = contexts if isinstance(contexts, Readings) else read(model, contexts)
    if kind == "logit":
        return LogitLens(model)
    if kind == "mean":
        return MeanLens(model, {"constants": data.mean})
    if kind == "resample":
        return ResampleLens(model, {"constants": data.pool})
    if validation is None:
        if len(data) < 2:
            raise ValueError(
                "one context is too few: one is for training and one for validation at least"
            )
        n_train = len(data) - max(1, len(data) // 8)
        held = data.part(slice(n_train, None))
        data = data.part(slice(n_train))
    else:
        held = validation if isinstance(validation, Readings) else read(model, validation)

    def compute(snapshots: store.Snapshots) -> tuple[store.Numbers, store.Tensors]:
        trainer = TRAINERS[kind](model, data, settings, of)
        return train_layers(trainer, held, settings, snapshots)

    inputs = {
        "kind": kind,
        "train": data.fingerprint,
        "validation": held.fingerprint,
        "of": of.fingerprint if of else None,
    }
    key = f"tuned_{settings.start}" if kind == "tuned" else kind
    result = store.run(
        "lenses", settings, compute, model=model, inputs=inputs, version=VERSION, key=key
    )
    tensors = {name: value.to(model.device) for name, value in result.tensors.items()}
    return KINDS[kind](model, tensors, {**result.numbers, "settings": asdict(settings)})
