"""Causal faithfulness: does a lens react to a change of the stream as the model does (paper §5)?

The last token's stream at a layer is perturbed; the model goes on from there, with the keys and
values of the other tokens as they were, and each lens reads the same perturbed stream. Two
measures: over directions, how the size of the model's and the lens's reaction correlate (as
logarithms, as in the authors' numbers; the paper's formula has none), and, over contexts, how
similar the two reactions are as changes of log-probabilities (appendix H).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import scipy.optimize
import scipy.stats
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from oa_utils import machine, store
from oa_utils.lenses import Lens, Readings, TunedLens, fingerprints
from oa_utils.models import KeysValues, Model, exact, recording

VERSION = 2
# as steering, with a length drawn anew for each context: then a direction has no size of its own
EACH = ("steer_random_each", "steer_basis_each")
MEASURES = ("magnitude", "magnitude_rank", "direction")
PASS = 256  # rows of logits in one pass

Reactions = dict[str, Float[Tensor, "contexts versions"]]


@dataclass(frozen=True)
class FaithSettings:
    directions: int = 128  # random ones; of a basis at most as many, drawn uniformly
    contexts: int = 24  # the same for all directions
    resampled: int = 256  # contexts of the resample perturbation
    share: float = 0.13  # of the basis, its leading part, that is resampled
    target: float = 0.2  # E[KL] of the model under steering, in nats
    reference: bool = False  # also what the reference code did
    resamples: int = 500  # of the bootstrap
    seed: int = 0

    def __post_init__(self):
        store.at_least(2, directions=self.directions, contexts=self.contexts)
        store.at_least(2, resampled=self.resampled)  # two of everything, to compare them
        store.at_least(1, resamples=self.resamples)


# ---- directions and perturbations


def root(cov: Float[Tensor, "d d"]) -> Float[Tensor, "d d"]:
    """The symmetric square root of a covariance."""
    values, vectors = torch.linalg.eigh(exact(cov))
    return (vectors * values.clamp(min=0).sqrt() @ vectors.T).to(cov)


def basis(W: Float[Tensor, "d d"], half: Float[Tensor, "d d"]) -> Float[Tensor, "d d"]:
    """Causal basis of a linear lens, one direction a row, most important first.

    With `half` = Σ^½: Σ^½ · the right singular vectors of W Σ^½.
    """
    return F.normalize(torch.linalg.svd(W @ half).Vh @ half, dim=-1)


def reference_basis(W: Float[Tensor, "d d"], half: Float[Tensor, "d d"]) -> Float[Tensor, "d d"]:
    """What the reference code stored in its place: the columns of Vᴴ, not mapped by Σ^½."""
    return torch.linalg.svd(W @ half).Vh.T.contiguous()


def steer(
    a: Float[Tensor, "b d"], v: Float[Tensor, "m d"], size: Float[Tensor, "b m"]
) -> Float[Tensor, "b m d"]:
    """Each row moved along each direction."""
    return a[:, None] + size[..., None] * v


def project(
    a: Float[Tensor, "b d"], v: Float[Tensor, "m d"], centre: Float[Tensor, " d"]
) -> Float[Tensor, "b m d"]:
    """Each row without its part along each unit direction, seen from the centre."""
    return steer(a, v, -(a - centre) @ v.T)


def shift(
    a: Float[Tensor, "b d"], v: Float[Tensor, "m d"], centre: Float[Tensor, " d"]
) -> Float[Tensor, "b m d"]:
    """The reference code's projection: all rows move by the sum of their coefficients."""
    total = ((a - centre) @ v.T).sum(0, keepdim=True)
    return steer(a, v, -total.expand(len(a), -1))


def resample(
    a: Float[Tensor, "b d"], other: Float[Tensor, "b d"], v: Float[Tensor, "k d"]
) -> Float[Tensor, "b 1 d"]:
    """Each row with another row's part in the span of directions, which need not be orthogonal."""
    q = torch.linalg.qr(v.T).Q
    return (a + (other - a) @ q @ q.T)[:, None]


# ---- how the model and its lenses react


@torch.no_grad()
def before(
    model: Model, tokens: Int[Tensor, "b pos"], layer: int
) -> tuple[Float[Tensor, "b d"], list[KeysValues]]:
    """The last token's stream that enters a layer, and the other tokens' keys and values from
    there on, block by block."""
    resid = model.run(model.embed(tokens), stop=layer)
    kept, keep = recording("k", "v", pick=lambda value: value[:, :, :-1])
    model.run(resid, layer, edit=keep)
    return resid[:, -1], list(zip(kept["k"].values(), kept["v"].values(), strict=True))


@torch.no_grad()
def after(
    model: Model, x: Float[Tensor, "b m d"], layer: int, past: list[KeysValues]
) -> Float[Tensor, "b m d"]:
    """Where m versions of each context's last token end: they see the other tokens and themselves,
    not each other."""
    m = x.shape[1]
    position = past[0][0].shape[2]
    positions = torch.full((1, m), position, device=x.device)
    places = position + torch.arange(m, device=x.device)[None]
    visible = torch.cat([torch.ones(m, position), torch.eye(m)], 1).bool().to(x.device)
    for i, (keys, values) in enumerate(past, start=layer):
        room = (F.pad(keys, (0, 0, 0, m)), F.pad(values, (0, 0, 0, m)))  # a place for each version
        x = model.block(i, x, positions=positions, past=room, places=places, visible=visible)
    return x


def kl(
    logp: Float[Tensor, "b 1 vocab"], change: Float[Tensor, "b m vocab"]
) -> Float[Tensor, "b m"]:
    """KL(before ‖ after) from the change of log-probabilities, as Σ p (e^c − 1 − c): small ones
    stay exact in float32."""
    change = change.clamp(max=80)
    return (logp.exp() * (change.expm1() - change)).sum(-1)


def similarity(
    logp: Float[Tensor, "b 1 vocab"], x: Float[Tensor, "b m vocab"], y: Float[Tensor, "b m vocab"]
) -> Float[Tensor, "b m"]:
    """Aitchison similarity of two changes of log-probabilities: their cosine under p, both centred
    under p."""
    p = logp.exp()
    x = x - (p * x).sum(-1, keepdim=True)
    y = y - (p * y).sum(-1, keepdim=True)
    least = torch.finfo(x.dtype).tiny
    px = p * x
    length_x = (px * x).sum(-1).clamp(min=least).sqrt()
    length_y = (p * y * y).sum(-1).clamp(min=least).sqrt()
    return (px * y).sum(-1) / (length_x * length_y)


class Probe:
    """One layer of a model on some contexts, and the lenses that read it."""

    def __init__(
        self, model: Model, tokens: Int[Tensor, "b pos"], layer: int, lenses: dict[str, Lens]
    ):
        self.model = model
        self.layer = layer
        self.lenses = lenses
        self.resid, self.past = before(model, tokens, layer)

    @torch.no_grad()
    def react(self, moved: Float[Tensor, "b m d"], lenses: bool = True) -> Reactions:
        """How m perturbed versions of each context's stream are received: KL of the `model`, of
        each lens by its name, and each lens's similarity to the model as `name.similarity`."""
        m = moved.shape[1]
        names = list(self.lenses) if lenses else []
        keys = ["model", *names, *(f"{name}.similarity" for name in names)]
        reactions = {key: torch.empty(len(moved), m) for key in keys}
        width = min(m, PASS)
        size = max(1, PASS // width)
        for i in range(0, len(moved), size):
            rows = slice(i, i + size)
            past = [(k[rows], v[rows]) for k, v in self.past]
            unmoved = self.resid[rows, None]
            full = self.model.log_probs(after(self.model, unmoved, self.layer, past))
            plain = {name: self.lenses[name].log_probs(unmoved, self.layer) for name in names}
            for j in range(0, m, width):
                cell = (rows, slice(j, j + width))
                end = after(self.model, moved[cell], self.layer, past)
                change = self.model.log_probs(end) - full
                reactions["model"][cell] = kl(full, change).cpu()
                for name in names:
                    lens_change = self.lenses[name].log_probs(moved[cell], self.layer) - plain[name]
                    alike = similarity(full, change, lens_change)
                    reactions[name][cell] = kl(plain[name], lens_change).cpu()
                    reactions[f"{name}.similarity"][cell] = alike.cpu()
        return reactions


def calibrate(
    probe: Probe, v: Float[Tensor, "m d"], draws: Float[Tensor, "b m"], target: float
) -> float:
    """The strength c at which steering by c · draw · direction moves the model by `target` on
    average, within 1 %."""

    def excess(log_c: float) -> float:
        moved = steer(probe.resid, v, float(np.exp(log_c)) * draws)
        ratio = probe.react(moved, lenses=False)["model"].mean().item() / target
        return 0.0 if abs(ratio - 1) < 0.01 else float(np.log(max(ratio, 1e-12)))

    low = high = float(probe.resid.std(0).norm().log())  # as far as contexts differ
    while excess(high) < 0:
        high += 1
    while excess(low) > 0:
        low -= 1
    if low == high:
        return float(np.exp(low))
    return float(np.exp(scipy.optimize.brentq(excess, low, high, xtol=1e-4)))


# ---- measures


def _pearson(
    x: Float[np.ndarray, "*any n"], y: Float[np.ndarray, "*any n"]
) -> Float[np.ndarray, "*any"] | float:
    x = x - x.mean(-1, keepdims=True)
    y = y - y.mean(-1, keepdims=True)
    return (x * y).sum(-1) / np.sqrt((x * x).sum(-1) * (y * y).sum(-1)).clip(1e-300)


def measures(
    full: Float[np.ndarray, "*any n"],
    lens: Float[np.ndarray, "*any n"],
    similar: Float[np.ndarray, "*any n"],
) -> Float[np.ndarray, "3 *any"]:
    """Over the last axis: Pearson correlation of logs (the authors' magnitude correlation; the
    paper's has no logarithm), rank correlation (the same with and without), mean similarity."""
    log_full = np.log(np.maximum(full, 1e-30))
    log_lens = np.log(np.maximum(lens, 1e-30))
    ranks = [scipy.stats.rankdata(x, axis=-1) for x in (log_full, log_lens)]
    return np.stack([_pearson(log_full, log_lens), _pearson(*ranks), similar.mean(-1)])


def resampled(
    values: Float[np.ndarray, "contexts versions"], settings: FaithSettings
) -> Float[np.ndarray, "draws n"]:
    """Means over contexts of each version (of a single version each context): first as they are,
    then with contexts and versions drawn anew, the same ones for all values of a shape."""
    b, m = values.shape
    rng = np.random.default_rng(settings.seed)
    n = m if m > 1 else b
    order = np.vstack([np.arange(n), rng.integers(n, size=(settings.resamples, n))])
    if m == 1:
        return values[:, 0][order]
    counts = np.vstack([np.ones(b), rng.multinomial(b, np.full(b, 1 / b), settings.resamples)])
    return np.take_along_axis(counts @ values / b, order, 1)


def rows_of(
    reactions: Reactions, names: Sequence[str], settings: FaithSettings
) -> list[dict[str, float | str]]:
    """Measures of each lens with 95 % bands over versions and contexts, and by how much they exceed
    those of the first lens."""
    each = {key: resampled(value.double().numpy(), settings) for key, value in reactions.items()}
    rows = []
    for name in names:
        drawn = measures(each["model"], each[name], each[f"{name}.similarity"])
        first = drawn if not rows else first
        lead = drawn - first
        size = {"kl": each["model"][0].mean(), "kl_lens": each[name][0].mean()}
        numbers = {"lens": name, **size, "n": each["model"].shape[1]}
        for i, measure in enumerate(MEASURES):
            low, high = np.quantile(drawn[i, 1:], [0.025, 0.975])
            numbers |= {
                measure: drawn[i, 0],
                f"{measure}_se": drawn[i, 1:].std(),
                f"{measure}_low": low,
                f"{measure}_high": high,
                f"{measure}_lead": lead[i, 0],
                f"{measure}_lead_se": lead[i, 1:].std(),
            }
        rows.append(numbers)
    return rows


# ---- the experiment


def layer_rows(
    model: Model,
    lenses: dict[str, Lens],
    maps: dict[str, Float[Tensor, "d d"]],
    data: Readings,
    train: Int[Tensor, "n pos"],
    test: Int[Tensor, "m pos"],
    settings: FaithSettings,
    layer: int,
) -> list[dict]:
    """Every perturbation at one layer: a row for each basis and each lens."""
    streams = data.resid[layer]
    rng = machine.generator(settings.seed * 1009 + layer)
    centre = streams.mean(0)
    half = root(torch.cov(streams.T))
    rows = []

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng).to(half)

    def note(
        perturbation: str, basis: str, reactions: Reactions, strength: float | None = None
    ) -> None:
        place = {"layer": layer, "perturbation": perturbation, "basis": basis, "strength": strength}
        rows.extend({**place, **row} for row in rows_of(reactions, list(lenses), settings))

    some = torch.randperm(model.d_model, generator=rng)[: settings.directions].to(streams.device)
    leading = max(1, round(settings.share * model.d_model))
    probe = Probe(model, test[: settings.contexts], layer, lenses)
    calibration = Probe(model, train[: settings.contexts], layer, lenses)
    swapping = Probe(model, test[: settings.resampled], layer, lenses)
    partners = swapping.resid.roll(1, 0)
    random = F.normalize(normal(settings.directions, model.d_model) @ half, dim=-1)
    bases = {"random": random} | {name: basis(W, half) for name, W in maps.items()}
    for name, directions in bases.items():
        kind = "random" if name == "random" else "basis"
        v = directions if name == "random" else directions[some]
        size = normal(len(v)).expand(settings.contexts, -1)  # Z′, one number for each direction
        strength = calibrate(calibration, v, size, settings.target)
        steered = steer(probe.resid, v, strength * size)
        note(f"steer_{kind}", name, probe.react(steered), strength)
        own_sizes = strength * normal(settings.contexts, len(v))
        anew = steer(probe.resid, v, own_sizes)
        note(f"steer_{kind}_each", name, probe.react(anew), strength)
        note(f"project_{kind}", name, probe.react(project(probe.resid, v, centre)))
        if name != "random":
            swapped = resample(swapping.resid, partners, directions[:leading])
            note("resample_basis", name, swapping.react(swapped))
    if settings.reference:
        for name, W in maps.items():
            v = bases[name][some]
            columns = reference_basis(W, half)[some]
            note("shift_basis", name, probe.react(shift(probe.resid, v, centre)))
            note("project_columns", name, probe.react(project(probe.resid, columns, centre)))
            note("shift_columns", name, probe.react(shift(probe.resid, columns, centre)))
    return rows


@store.with_settings
def faithfulness(
    model: Model,
    lenses: dict[str, Lens],
    maps: dict[str, Lens],
    data: Readings,
    train: Int[Tensor, "n pos"],
    test: Int[Tensor, "m pos"],
    layers: Sequence[int] | None = None,
    *,
    settings: FaithSettings,
) -> pd.DataFrame:
    """A row for each layer, perturbation, basis and lens; every lens is probed in every basis, and
    each layer is a run.

    `lenses` are those that are probed, `maps` the linear lenses whose bases are used (for OCA the
    one that copies it), `data` the readings of train contexts, for mean and covariance. Strengths
    are calibrated on `train`, all else is measured on `test`.
    """
    layers = range(model.n_layers) if layers is None else layers
    for name, lens in maps.items():
        if not isinstance(lens, TunedLens):
            raise ValueError(
                f"a causal basis comes from a linear map: {name!r} has none "
                "(use kind tuned or linear)"
            )
    if not layers or not 0 <= min(layers) <= max(layers) < model.n_layers:
        raise ValueError(f"layers {list(layers)}: '{model.name}' has 0 … {model.n_layers - 1}")
    if len(data) <= model.d_model:
        raise ValueError(
            f"a covariance of {model.d_model} coordinates needs more contexts than that, "
            f"not {len(data)}"
        )
    most = max(settings.contexts, settings.resampled)
    if most > len(test) or settings.contexts > len(train):
        raise ValueError(
            f"{settings} does not fit {len(train)} train and {len(test)} test contexts"
        )
    inputs = {
        "lenses": fingerprints(lenses),
        "maps": fingerprints(maps),
        "order": [list(lenses), list(maps)],  # leads are over the first lens
        "data": data.fingerprint,
        "contexts": store.fingerprint(train[: settings.contexts], test[:most]),
    }

    def layer_table(layer: int) -> pd.DataFrame:
        matrices = {name: lens.tensors["W"][layer] for name, lens in maps.items()}

        def compute(_: store.Snapshots) -> store.Numbers:
            rows = layer_rows(model, lenses, matrices, data, train, test, settings, layer)
            return {"rows": rows}

        return store.run(
            "faithfulness",
            settings,
            compute,
            model=model,
            inputs={**inputs, "layer": layer},
            version=VERSION,
            key=f"layer{layer:02}",
        ).frame()

    layers = machine.progress(layers, desc="faithfulness, layer by layer")
    return pd.concat([layer_table(layer) for layer in layers], ignore_index=True)
