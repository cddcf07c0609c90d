"""Lenses: what a token's stream at a layer already says about the prediction (paper §5, app. H).

Layer ℓ is the stream that enters block ℓ; layer n_layers is the model's end. The logit lens
unembeds the stream as it is, the tuned lens after a linear map. The mean, resample and OCA lenses
send it through the later blocks with attention replaced by what knows nothing of the context: only
norms and MLPs run, on the read token alone. OCA (optimal constant attention) trains these
constants, own ones for each starting layer; `linear` is a linear map trained to do what OCA does.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
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
from oa_utils.models import Model, exact, recording

VERSION = 3
# of linear maps: the layer's best on validation of identity, identity with the mean's shift, and
# ridge; its authors' start; the reference code's, N(0, 1) entries
STARTS = ("best", "identity", "random")
POOL = 256  # readings whose attention outputs the resample lens draws from
ROWS = 256  # readings whose losses are computed at once
FIT_ROWS = 8192  # readings that scales and ridge are computed from, at most
RIDGE = 1e-3  # of correlations of unit diagonal: what ridge adds, and whitening stops at
WARM_UP = 0.05  # share of the steps over which the step size rises
IDLE = 2  # looks without gain, after which a layer's steps are cut
CUT = 1 / 3


# ---- what the model computes at the tokens that are read


@dataclass(frozen=True, eq=False)
class Readings:
    """What the model computes at some tokens of contexts: what lenses learn from and read."""

    resid: Float[Tensor, "layer n d"]  # the stream that enters each block; last, the model's end
    mean: Float[Tensor, "block d"]  # of attention outputs, b_O included
    spread: Float[Tensor, "block d"]  # their standard deviation, coordinate by coordinate
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

    def look(span: slice) -> tuple[slice, Tensor, Tensor]:
        rows = slice(start + span.start, start + span.stop)
        length = int(places[rows].max()) + 1
        return rows, *at_places(model, tokens[rows, :length], places[rows])

    size = machine.rows_in_a_pass(model, tokens.shape[1])
    with machine.progress(total=len(tokens), desc="reading contexts") as bar:
        bar.update(start)
        for rows, streams, outputs in machine.in_spans(len(tokens) - start, size, look):
            yield rows, streams, outputs
            bar.update(rows.stop - rows.start)


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
        resid[:, number] = rearrange(streams, "layer b k d -> layer (k b) d").float()
        pooled = number < pool.shape[1]
        pool[:, number[pooled]] = outputs[:, pooled]
        total += outputs.sum(1).cpu().double()
        squares += outputs.cpu().double().square().sum(1)
    mean = total / n
    spread = (squares / n - mean.square()).clamp(min=1e-12).sqrt()
    return Readings(resid, mean.float().to(model.device), spread.float().to(model.device), pool)


def read_several(
    model: Model, tokens: Int[Tensor, "n length"], positions: int, seed: int = 0
) -> Readings:
    """Readings of the last token of each context and of others drawn at random, BOS left out: many
    rows from one forward."""
    n, length = tokens.shape
    if not 0 < positions < length:
        raise ValueError(
            f"a context of {length} tokens has 1 to {length - 1} positions to read (BOS left out), "
            f"not {positions}"
        )
    rng = machine.generator(seed)
    others = torch.stack([torch.randperm(length - 2, generator=rng) + 1 for _ in range(n)])
    last = torch.full((n, 1), length - 1)
    return read(model, tokens, torch.cat([last, others], 1)[:, :positions])


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

    @staticmethod
    def shapes(model: Model) -> dict[str, list[int | None]]:
        """Of the tensors that a lens of this kind has; None: any number."""
        return {}

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
            rows = resid.float().reshape(1, -1, model.d_model)
            resid = self.ends(rows, [layer]).reshape(resid.shape)
        return model.log_probs(resid)

    @torch.no_grad()
    def losses(self, data: Readings) -> Float[Tensor, "layer n"]:
        """KL(model ‖ lens) of each reading at each layer; at the model's end there is none."""
        layers = range(self.model.n_layers)

        def of_some(span: slice) -> Float[Tensor, "lens b"]:
            part = data.resid[:, span]
            return match(self.model, self.ends(part[:-1], layers), part[-1:])[0]

        parts = list(machine.in_spans(len(data), ROWS, of_some))
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

    @staticmethod
    def shapes(model: Model) -> dict[str, list[int | None]]:
        return {
            "W": [model.n_layers, model.d_model, model.d_model],
            "b": [model.n_layers, model.d_model],
        }

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
            between = x + torch.stack([outputs[i][block - layers[i]] for i in range(started)])
            block_modules = self.model.layers[block]
            read = block_modules.read_by_mlp(x, between)
            x = between + block_modules.mlp(read.to(self.model.dtype)).float()
        return x


class MeanLens(AttentionLens):
    """Attention replaced by its mean: constants [block d]."""

    kind = "mean"

    @staticmethod
    def shapes(model: Model) -> dict[str, list[int | None]]:
        return {"constants": [model.n_layers, model.d_model]}

    def attention(self, layer: int, n: int) -> Float[Tensor, "later 1 d"]:
        return self.tensors["constants"][layer:, None]


class ResampleLens(AttentionLens):
    """Attention replaced by that of other contexts: constants [block pool d]."""

    kind = "resample"

    @staticmethod
    def shapes(model: Model) -> dict[str, list[int | None]]:
        return {"constants": [model.n_layers, None, model.d_model]}

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

    @staticmethod
    def shapes(model: Model) -> dict[str, list[int | None]]:
        return {"constants": [model.n_layers, model.n_layers, model.d_model]}

    def attention(self, layer: int, n: int) -> Float[Tensor, "later 1 d"]:
        return self.tensors["constants"][layer, layer:, None]

    @property
    def n_parameters(self) -> int:
        n = self.model.n_layers
        return n * (n + 1) // 2 * self.model.d_model


KINDS: dict[str, type[Lens]] = {
    lens.kind: lens for lens in (LogitLens, TunedLens, MeanLens, ResampleLens, OCALens, LinearCopy)
}


def fingerprints(lenses: Mapping[str, Lens]) -> dict[str, str]:
    """What a result that rests on lenses is named by."""
    return {name: lens.fingerprint for name, lens in lenses.items()}


def load(path: str | Path, model: Model) -> Lens:
    """A lens that `save` wrote, refused on any model but its own."""
    head, tensors = store.read_sealed(Path(path))
    kind = KINDS.get(head.get("kind"))
    if kind is None or not {"model", "fingerprint", "training"} <= set(head):
        raise store.BadFile(f"{path} is not a lens that oa_utils saved")
    if head["fingerprint"] != model.fingerprint:
        raise ValueError(
            f"the lens {path} belongs to '{head['model']}' ({head['fingerprint']}), "
            f"not to '{model.name}' ({model.fingerprint})"
        )
    expected = kind.shapes(model)
    shapes = {name: list(value.shape) for name, value in tensors.items()}
    fit = expected.keys() == shapes.keys() and all(
        len(shape) == len(shapes[name])
        and all(size in (None, got) for size, got in zip(shape, shapes[name], strict=True))
        for name, shape in expected.items()
    )
    if not fit:
        raise store.BadFile(f"{path}: a {kind.kind} lens holds {expected}, not {shapes}")
    if not all(value.is_floating_point() and value.isfinite().all() for value in tensors.values()):
        raise store.BadFile(f"{path} holds numbers that are not finite")
    moved = {name: value.float().to(model.device) for name, value in tensors.items()}
    return kind(model, moved, head["training"])


# ---- training


@dataclass(frozen=True)
class LensSettings:
    steps: int = 1000  # of Adam at most; the step size rises over 5 % of them, then falls to 0
    batch: int = 256  # readings in a step
    lr: float = 0.0  # the largest step size; 0 takes the kind's own
    # steps between two looks at validation; each layer keeps its best state, and after two looks
    # without gain goes back to it with a third of its step size
    look_every: int = 50
    start: str = "best"  # of linear maps, see STARTS
    seed: int = 0

    def __post_init__(self):
        store.at_least(0, steps=self.steps, lr=self.lr)
        store.at_least(1, batch=self.batch, look_every=self.look_every)
        if self.start not in STARTS:
            raise ValueError(f"start {self.start!r} is not one of the starts {', '.join(STARTS)}")

    def rate(self, step: int) -> float:
        """The share of the largest step size that a step has."""
        rise = WARM_UP * self.steps
        return min(1.0, (step + 1) / max(1.0, rise)) * (1 - step / self.steps)


def match(
    model: Model,
    ends: Float[Tensor, "lens b d"],
    target: Float[Tensor, "#lens b d"],
    weight: float = 0.0,
) -> tuple[Float[Tensor, "lens b"], Float[Tensor, "lens b d"] | None]:
    """KL(target ‖ lens), one layer's logits at a time, as those of all layers would be too many;
    with a weight, also the gradient of weight · sum for `ends`."""
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
    return torch.stack(losses), torch.stack(gradients) if weight else None


class Trainer:
    """A lens in training: raw parameters of unit scale, and the lens that they stand for.

    It learns to say what the model says or, with `of`, what that lens says.
    """

    mlp_passes: int  # that one reading takes in a step

    def __init__(self, model: Model, data: Readings, of: Lens | None = None):
        self.model = model
        self.data = data
        self.of = of

    def lr(self, settings: LensSettings) -> float:
        """Adam's largest step, raw parameters being of unit scale."""
        raise NotImplementedError

    def starts(self, settings: LensSettings) -> dict[str, dict[str, Tensor]]:
        """Raw parameters to start from, by name; each layer takes what is best on validation."""
        raise NotImplementedError

    def lens(self, raw: dict[str, Tensor]) -> Lens:
        raise NotImplementedError

    def target(
        self, resid: Float[Tensor, "layer b d"], layers: Sequence[int]
    ) -> Float[Tensor, "lens b d"]:
        """The streams that are to be predicted: one for all layers, or one for each."""
        with torch.no_grad():
            return resid[-1:] if self.of is None else self.of.ends(resid[layers], layers)

    def losses(
        self,
        raw: dict[str, Tensor],
        resid: Float[Tensor, "layer b d"],
        layers: Sequence[int],
        train: bool = False,
    ) -> Float[Tensor, "lens b"]:
        """Of some layers; with `train`, each one's mean gives gradient to its raw parameters."""
        model = self.model
        layers = list(layers)
        weight = 1 / resid.shape[1] if train else 0.0
        streams = self.mlp_passes * (6 * model.d_model + 4 * model.d_mlp)
        floats = streams + 6 * (model.d_vocab + model.n_layers * model.d_model)
        n = resid.shape[1]
        parameters = list(raw.values())
        unmoved = [None] * len(parameters)

        def of_some(span: slice) -> tuple[Float[Tensor, "lens b"], Sequence[Tensor | None]]:
            part = resid[:, span]
            with torch.set_grad_enabled(train):
                ends = self.lens(raw).ends(part[layers], layers)
                loss, slope = match(model, ends, self.target(part, layers), weight)
            return loss, torch.autograd.grad(ends, parameters, slope) if train else unmoved

        parts = []
        for loss, slopes in machine.in_spans(n, machine.micro_batch(n, 4 * floats), of_some):
            parts.append(loss)
            machine.accumulate(parameters, slopes)
        return torch.cat(parts, 1)


class OCATrainer(Trainer):
    """Starts from mean attention; raw constants count in standard deviations of attention."""

    def __init__(self, model: Model, data: Readings, of: Lens | None = None):
        super().__init__(model, data, of)
        self.mlp_passes = model.n_layers * (model.n_layers + 1) // 2

    def lr(self, settings: LensSettings) -> float:
        """The constants of all later blocks step together: the more of them, the shorter."""
        return min(0.3, 1.8 / self.model.n_layers)

    def starts(self, settings: LensSettings) -> dict[str, dict[str, Tensor]]:
        n = self.model.n_layers
        return {"mean": {"constants": torch.zeros_like(self.data.mean).repeat(n, 1, 1)}}

    def lens(self, raw: dict[str, Tensor]) -> OCALens:
        constants = self.data.mean + self.data.spread * raw["constants"]
        return OCALens(self.model, {"constants": constants})


class LinearTrainer(Trainer):
    """Raw maps take whitened streams to ends of unit spread by coordinate, so that one step size
    suits all of them."""

    mlp_passes = 0

    def __init__(self, model: Model, data: Readings, of: Lens | None = None):
        super().__init__(model, data, of)
        rows = data.resid[:, :: math.ceil(len(data) / FIT_ROWS)]
        layers = list(range(model.n_layers))
        parts = [self.target(part, layers) for part in rows.split(ROWS, dim=1)]
        ends = torch.cat(parts, 1)
        self.centre = rows[:-1].mean(1)  # [block d]
        self.goal = ends.mean(1)  # [block d], or [1 d]
        self.out = ends.std(1).clamp(min=1e-6)
        fits = [
            self._fit(rows[i], (ends - self.goal[:, None])[min(i, len(ends) - 1)]) for i in layers
        ]
        self.white, self.back, self.ridge = map(torch.stack, zip(*fits, strict=True))

    def lr(self, settings: LensSettings) -> float:
        """An end moves by so much if all entries of its row step together; a random start has far
        to go."""
        return (13 if settings.start == "random" else 0.4) / self.model.d_model

    @staticmethod
    def _fit(
        x: Float[Tensor, "n d"], y: Float[Tensor, "n d"]
    ) -> tuple[Float[Tensor, "d d"], Float[Tensor, "d d"], Float[Tensor, "d d"]]:
        """The map that whitens x, its inverse, and the ridge map from whitened x to y."""
        x = exact(x - x.mean(0))
        scale = x.std(0).clamp(min=1e-6)
        values, vectors = torch.linalg.eigh((x / scale).T @ (x / scale) / len(x))
        spread = (values.clamp(min=0) + RIDGE).sqrt()
        white = (vectors / spread).T / scale
        ridge = exact(y).T @ (x @ white.T) / len(x)
        back = scale[:, None] * vectors * spread
        return white.to(y), back.to(y), ridge.to(y)

    def starts(self, settings: LensSettings) -> dict[str, dict[str, Tensor]]:
        n, d = self.centre.shape
        eye = torch.eye(d).to(self.centre).expand(n, d, d)
        none = torch.zeros_like(self.centre)
        if settings.start == "random":
            rng = machine.generator(settings.seed)
            W = torch.randn(n, d, d, generator=rng).to(eye)
            b = torch.randn(n, d, generator=rng).to(eye)
            return {"random": self._raw(W, b)}
        identity = {"identity": self._raw(eye, none)}
        if settings.start == "identity":
            return identity
        shift = self._raw(eye, self.goal - self.centre)
        ridge = {"W": self.ridge / self.out[..., None], "b": none}
        return identity | {"shift": shift, "ridge": ridge}

    def _raw(self, W: Float[Tensor, "block d d"], b: Float[Tensor, "block d"]) -> dict[str, Tensor]:
        """The raw parameters of a map."""
        moved = b + einsum(W, self.centre, "block out d, block d -> block out")
        return {"W": W @ self.back / self.out[..., None], "b": (moved - self.goal) / self.out}

    def lens(self, raw: dict[str, Tensor]) -> TunedLens:
        W = self.out[..., None] * raw["W"] @ self.white
        moved = einsum(W, self.centre, "block out d, block d -> block out")
        kind = TunedLens if self.of is None else LinearCopy
        return kind(self.model, {"W": W, "b": self.goal + self.out * raw["b"] - moved})


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
    idle: list[int]  # looks since then, or since its steps were cut
    cuts: list[int]
    curve: list[list]  # [step, best] at each look
    begun: list[str]  # the name of each layer's start


def _start(trainer: Trainer, held: Readings, settings: LensSettings) -> _State:
    """Every layer at the best of its starts."""
    n_layers = trainer.model.n_layers
    starts = trainer.starts(settings)
    tried = [trainer.losses(raw, held.resid, range(n_layers)).mean(1) for raw in starts.values()]
    best, choice = torch.stack(tried).nan_to_num(torch.inf).min(0)
    names = [list(starts)[i] for i in choice.tolist()]
    first = next(iter(starts.values()))
    raw = {
        key: torch.stack([starts[name][key][i] for i, name in enumerate(names)]) for key in first
    }
    kept = {key: value.clone() for key, value in raw.items()}
    losses = best.tolist()
    none = [0] * n_layers
    return _State(0, raw, kept, losses, none, none[:], [[0, losses[:]]], names)


def _look(state: _State, losses: list[float], optimiser: torch.optim.Optimizer) -> None:
    """Keeps the layers that are better on validation than ever before; those that gain nothing go
    back to their best state, slower."""
    for i, loss in enumerate(losses):
        state.idle[i] += 1
        if loss < state.best[i]:
            state.best[i] = loss
            state.idle[i] = 0
            for name, value in state.kept.items():
                value[i] = state.raw[name].data[i]
        elif state.idle[i] == IDLE:
            state.idle[i] = 0
            state.cuts[i] += 1
            for name, value in state.raw.items():
                value.data[i] = state.kept[name][i]
            for parameter in optimiser.param_groups[i]["params"]:
                optimiser.state[parameter]["exp_avg"].zero_()
    state.curve.append([state.step, state.best[:]])


def train_layers(
    trainer: Trainer, held: Readings, settings: LensSettings, snapshots: store.Snapshots
) -> tuple[store.Numbers, store.Tensors]:
    """Every layer on its own, side by side: numbers, and the lens of each layer's best state.

    `held` are the readings of validation contexts, on which starts and states are compared.
    """
    n = len(trainer.data)
    batch = min(settings.batch, n)
    saved = snapshots.load()
    state = _State(**saved["state"]) if saved else _start(trainer, held, settings)
    device = held.resid.device
    state.kept = {name: value.to(device) for name, value in state.kept.items()}
    state.raw = {name: value.to(device).requires_grad_() for name, value in state.raw.items()}
    raw = list(state.raw.values())
    n_layers = trainer.model.n_layers
    groups = [{"params": [value.data[i] for value in raw]} for i in range(n_layers)]
    optimiser = torch.optim.Adam(groups, eps=1e-12)  # one group for each layer, views of `raw`
    if saved:
        optimiser.load_state_dict(saved["optimiser"])
    bar = machine.progress(total=settings.steps, desc="training a lens, all layers")
    bar.update(state.step)
    largest = settings.lr or trainer.lr(settings)
    while state.step < settings.steps:
        for value in raw:
            value.grad = None
        epoch, place = divmod(state.step, n // batch)
        order = torch.randperm(n, generator=machine.generator(settings.seed * 100_003 + epoch))
        rows = order[place * batch : (place + 1) * batch]
        trainer.losses(state.raw, trainer.data.resid[:, rows], range(n_layers), train=True)
        for i, group in enumerate(optimiser.param_groups):
            group["lr"] = largest * settings.rate(state.step) * CUT ** state.cuts[i]
            for own, value in zip(group["params"], raw, strict=True):
                own.grad = value.grad[i]
        optimiser.step()
        state.step += 1
        bar.update()
        if state.step % settings.look_every == 0 or state.step == settings.steps:
            losses = trainer.losses(state.raw, held.resid, range(n_layers)).mean(1).tolist()
            _look(state, losses, optimiser)
            bar.set_postfix(loss=f"{sum(state.best) / len(state.best):.4f}")
        snapshots.save_when_due(lambda: {"state": vars(state), "optimiser": optimiser.state_dict()})
    bar.close()
    lens = trainer.lens(state.kept)
    _, start = state.curve[0]
    rows = [
        {"layer": i, "from": name, "start": start[i], "loss": state.best[i]}
        for i, name in enumerate(state.begun)
    ]
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
        return train_layers(TRAINERS[kind](model, data, of), held, settings, snapshots)

    inputs = {
        "kind": kind,
        "train": data.fingerprint,
        "validation": held.fingerprint,
        "of": of.fingerprint if of else None,
    }
    key = f"{kind}_{settings.start}" if kind == "tuned" else kind
    result = store.run(
        "lenses", settings, compute, model=model, inputs=inputs, version=VERSION, key=key
    )
    tensors = {name: value.to(model.device) for name, value in result.tensors.items()}
    return KINDS[kind](model, tensors, {**result.numbers, "settings": asdict(settings)})
