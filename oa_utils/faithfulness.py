"""Causal faithfulness: does a lens react to a change of the stream as the model does (paper §5, appendix H)?

The last token's stream at a layer is perturbed; the model goes on from there, with the keys and values of the other tokens
as they were, and each lens reads the same perturbed stream. Two measures: over directions, how the size of the model's and
the lens's reaction correlate, and, over contexts, how similar the two reactions are as changes of log-probabilities.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import pandas as pd
import scipy.optimize
import scipy.stats
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from oa_utils import runs
from oa_utils.lenses import Lens, Streams
from oa_utils.models import Model

VERSION = 1
PERTURBATIONS = ("steer_random", "steer_basis", "project_random", "project_basis", "resample_basis")
PUBLISHED = ("shift_basis", "project_columns", "shift_columns")  # what the reference code did, part by part
MEASURES = ("magnitude", "magnitude_rank", "direction")
PASS = 256  # rows of logits in one pass
Past = list[tuple[Tensor, Tensor]]  # keys and values [context head pos d_head] of the tokens before the last, by block


@dataclass(frozen=True)
class FaithSettings:
    directions: int = 128  # random ones; of a basis at most as many, drawn uniformly
    contexts: int = 24  # for each direction
    resampled: int = 256  # contexts of the resample perturbation
    share: float = 0.13  # of the basis, its leading part, that is resampled
    target: float = 0.2  # E[KL] of the model under steering, in nats
    published: bool = False  # also what the reference code did
    resamples: int = 500  # of the bootstrap
    seed: int = 0


@dataclass(frozen=True)
class Job(FaithSettings):
    layer: int = 0
    data: tuple[str, ...] = ()  # fingerprints of lenses and contexts


def root(cov: Float[Tensor, "d d"]) -> Float[Tensor, "d d"]:
    """The symmetric square root of a covariance."""
    values, vectors = torch.linalg.eigh(cov.double())
    return (vectors * values.clamp(min=0).sqrt() @ vectors.T).to(cov)


def basis(W: Float[Tensor, "d d"], half: Float[Tensor, "d d"]) -> Float[Tensor, "d d"]:
    """Causal basis of a linear lens, one direction a row, most important first: Σ^½ · right singular vectors of W · Σ^½."""
    return F.normalize(torch.linalg.svd(W @ half).Vh @ half, dim=-1)


def published_basis(W: Float[Tensor, "d d"], half: Float[Tensor, "d d"]) -> Float[Tensor, "d d"]:
    """What the reference code stored in its place: the columns of Vᴴ, not mapped by Σ^½."""
    return torch.linalg.svd(W @ half).Vh.T.contiguous()


def steer(a: Float[Tensor, "b d"], v: Float[Tensor, "m d"], size: Float[Tensor, "b m"]) -> Float[Tensor, "b m d"]:
    return a[:, None] + size[..., None] * v


def project(a: Float[Tensor, "b d"], v: Float[Tensor, "m d"], centre: Float[Tensor, " d"]) -> Float[Tensor, "b m d"]:
    """Each row without its part along each unit direction, seen from the centre."""
    return steer(a, v, -(a - centre) @ v.T)


def shift(a: Float[Tensor, "b d"], v: Float[Tensor, "m d"], centre: Float[Tensor, " d"]) -> Float[Tensor, "b m d"]:
    """The reference code's projection: all rows move by the sum of their coefficients."""
    return steer(a, v, -((a - centre) @ v.T).sum(0, keepdim=True).expand(len(a), -1))


def resample(a: Float[Tensor, "b d"], other: Float[Tensor, "b d"], v: Float[Tensor, "k d"]) -> Float[Tensor, "b 1 d"]:
    """Each row with another row's part in the span of directions, which need not be orthogonal."""
    q = torch.linalg.qr(v.T).Q
    return (a + (other - a) @ q @ q.T)[:, None]


@torch.no_grad()
def before(model: Model, tokens: Int[Tensor, "b pos"], layer: int) -> tuple[Float[Tensor, "b d"], Past]:
    """The last token's stream that enters a layer, and what the other tokens give to it from there on."""
    past, entering, rotation = [], [], model.rotation(torch.arange(tokens.shape[1] - 1, device=model.device)[None])

    def keep(site: str, i: int, value: Tensor) -> Tensor:
        if site == "resid" and i >= layer:
            entering.append(value[:, -1])
            block, normed = model.layers[i], model.layers[i].ln1(value[:, :-1])
            past.append((model.rotate(block.heads(normed, "k"), rotation), block.heads(normed, "v")))
        return value

    model.run(model.embed(tokens.to(model.device)), edit=keep)
    return entering[0], past


@torch.no_grad()
def after(model: Model, x: Float[Tensor, "b m d"], layer: int, past: Past) -> Float[Tensor, "b m d"]:
    """Where m versions of each context's last token end: they see the other tokens and themselves, not each other."""
    m, position = x.shape[1], past[0][0].shape[2]
    seen = torch.cat([torch.ones(m, position), torch.eye(m)], 1).bool().to(x.device)
    rotation = model.rotation(torch.full((1, m), position, device=x.device))
    for i, (keys, values) in enumerate(past, start=layer):
        block, normed = model.layers[i], model.layers[i].ln1(x)
        q, k = (model.rotate(block.heads(normed, slot), rotation) for slot in "qk")
        k, v = torch.cat([keys, k], 2), torch.cat([values, block.heads(normed, "v")], 2)
        z = F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=k.shape[1] != q.shape[1])
        x = x + model.attn_out(i, z.transpose(1, 2))
        x = x + block.mlp_out(block.mlp_hidden(block.ln2(x)))
    return x


def kl(logp: Float[Tensor, "b 1 vocab"], change: Float[Tensor, "b m vocab"]) -> Float[Tensor, "b m"]:
    """KL(before ‖ after) from the change of log-probabilities, as Σ p (e^c − 1 − c): small ones stay exact in float32."""
    change = change.clamp(max=80)
    return (logp.exp() * (change.expm1() - change)).sum(-1)


def similarity(logp: Float[Tensor, "b 1 vocab"], x: Float[Tensor, "b m vocab"], y: Float[Tensor, "b m vocab"]) -> Tensor:
    """Aitchison similarity [b m] of two changes of log-probabilities: their cosine under p, both centred under p."""
    p = logp.exp()
    x, y = x - (p * x).sum(-1, keepdim=True), y - (p * y).sum(-1, keepdim=True)
    px, least = p * x, torch.finfo(x.dtype).tiny
    return (px * y).sum(-1) / ((px * x).sum(-1).clamp(min=least).sqrt() * (p * y * y).sum(-1).clamp(min=least).sqrt())


class Probe:
    """One layer of a model on some contexts, and the lenses that read it."""

    def __init__(self, model: Model, tokens: Int[Tensor, "b pos"], layer: int, lenses: dict[str, Lens]):
        self.model, self.layer, self.lenses = model, layer, lenses
        self.resid, self.past = before(model, tokens, layer)

    @torch.no_grad()
    def react(self, move: Callable[[slice, slice], Tensor], m: int, lenses: bool = True) -> dict[str, Float[Tensor, "b m"]]:
        """KL of the model and of each lens, and each lens's similarity, for every context and every one of m versions.

        `move(contexts, versions)` gives the perturbed streams [b m d] of some of them.
        """
        names = list(self.lenses) if lenses else []
        out = {key: torch.empty(len(self.resid), m) for key in ["model", *names, *(f"{name}.similarity" for name in names)]}
        width = min(m, PASS)
        for i in range(0, len(self.resid), size := max(1, PASS // width)):
            rows = slice(i, i + size)
            past, a = [(k[rows], v[rows]) for k, v in self.past], self.resid[rows, None]
            full = self.model.log_probs(after(self.model, a, self.layer, past))  # [b 1 vocab]
            plain = {name: self.lenses[name].log_probs(a, self.layer) for name in names}
            for j in range(0, m, width):
                cell, x = (rows, slice(j, j + width)), move(rows, slice(j, j + width))
                change = self.model.log_probs(after(self.model, x, self.layer, past)) - full
                out["model"][cell] = kl(full, change).cpu()
                for name in names:
                    own = self.lenses[name].log_probs(x, self.layer) - plain[name]
                    out[name][cell] = kl(plain[name], own).cpu()
                    out[f"{name}.similarity"][cell] = similarity(full, change, own).cpu()
        return out


def calibrate(probe: Probe, v: Float[Tensor, "m d"], draws: Float[Tensor, "b m"], target: float) -> float:
    """The strength c at which steering by c · draw · direction moves the model by `target` on average, within 1 %."""

    def excess(log_c: float) -> float:
        move = lambda i, j: steer(probe.resid[i], v[j], np.exp(log_c) * draws[i, j])  # noqa: E731
        ratio = probe.react(move, len(v), lenses=False)["model"].mean().item() / target
        return 0.0 if abs(ratio - 1) < 0.01 else float(np.log(max(ratio, 1e-12)))

    low = high = float(probe.resid.std(0).norm().log())  # as far as contexts differ
    while excess(high) < 0:
        high += 1
    while excess(low) > 0:
        low -= 1
    return float(np.exp(low if low == high else scipy.optimize.brentq(excess, low, high, xtol=1e-4)))


def measures(full: Float[np.ndarray, "*any n"], lens: Float[np.ndarray, "*any n"], similar: Float[np.ndarray, "*any n"]):
    """Pearson correlation of logs, rank correlation, mean similarity, over the last axis."""

    def pearson(x, y):
        x, y = x - x.mean(-1, keepdims=True), y - y.mean(-1, keepdims=True)
        return (x * y).sum(-1) / np.sqrt((x * x).sum(-1) * (y * y).sum(-1)).clip(1e-300)

    logs = [np.log(np.maximum(x, 1e-30)) for x in (full, lens)]
    return np.stack([pearson(*logs), pearson(*(scipy.stats.rankdata(x, axis=-1) for x in logs)), similar.mean(-1)])


def row(found: dict[str, Tensor], name: str, s: FaithSettings) -> dict[str, float]:
    """Measures of one lens with 95 % bands: over directions (means over contexts), or over contexts if there is one."""
    over = 0 if found["model"].shape[1] > 1 else 1
    each = [found[key].double().mean(over).numpy() for key in ("model", name, f"{name}.similarity")]
    draws = np.random.default_rng(s.seed).integers(len(each[0]), size=(s.resamples, len(each[0])))
    bands = np.quantile(measures(*(x[draws] for x in each)), [0.025, 0.975], axis=1)
    here = {"kl": each[0].mean(), "kl_lens": each[1].mean(), "n": len(each[0])}
    for i, (key, value) in enumerate(zip(MEASURES, measures(*each), strict=True)):
        here |= {key: value, f"{key}_low": bands[0, i], f"{key}_high": bands[1, i]}
    return here


def layer_rows(model: Model, lenses: dict[str, Lens], maps: dict[str, Tensor], data: Streams, train: Tensor, test: Tensor,
               s: FaithSettings, layer: int) -> list[dict]:  # fmt: skip
    """Every perturbation at one layer: a row for each basis and each lens."""
    stream, rng = data.resid[layer], runs.generator(s.seed * 1009 + layer)
    centre, half = stream.mean(0), root(torch.cov(stream.T))
    normal = lambda *shape: torch.randn(*shape, generator=rng).to(half)  # noqa: E731
    some = torch.randperm(model.d_model, generator=rng)[: s.directions].to(stream.device)
    leading = max(1, round(s.share * model.d_model))
    there, cal = (Probe(model, part[: s.contexts], layer, lenses) for part in (test, train))
    many, rows = Probe(model, test[: s.resampled], layer, lenses), []
    partner = many.resid.roll(1, 0)
    whole = {"random": F.normalize(normal(s.directions, model.d_model) @ half, dim=-1)}
    whole |= {name: basis(W, half) for name, W in maps.items()}

    def note(perturbation: str, name: str, found: dict[str, Tensor], strength: float | None = None):
        about = {"layer": layer, "perturbation": perturbation, "basis": name, "strength": strength}
        rows.extend({**about, "lens": lens, **row(found, lens, s)} for lens in lenses)

    for name, every in whole.items():
        v, kind = (every, "random") if name == "random" else (every[some], "basis")
        here, draws = normal(len(there.resid), len(v)), normal(len(cal.resid), len(v))
        c = calibrate(cal, v, draws, s.target)
        note(f"steer_{kind}", name, there.react(lambda i, j, v=v, h=c * here: steer(there.resid[i], v[j], h[i, j]), len(v)), c)
        note(f"project_{kind}", name, there.react(lambda i, j, v=v: project(there.resid[i], v[j], centre), len(v)))
        if name != "random":
            lead = every[:leading]
            note("resample_basis", name, many.react(lambda i, j, v=lead: resample(many.resid[i], partner[i], v), 1))
    for name, W in maps.items() if s.published else ():
        columns = published_basis(W, half)[some]
        for perturbation, how, v in zip(PUBLISHED, (shift, project, shift), (whole[name][some], columns, columns), strict=True):
            x = how(there.resid, v, centre)
            note(perturbation, name, there.react(lambda i, j, x=x: x[i, j], len(some)))
    return rows


def faithfulness(model: Model, lenses: dict[str, Lens], maps: dict[str, Lens], data: Streams, train: Int[Tensor, "n pos"],
                 test: Int[Tensor, "m pos"], layers: Sequence[int] | None = None,
                 settings: FaithSettings | None = None) -> pd.DataFrame:  # fmt: skip
    """A row for each layer, perturbation, basis and lens; every lens is probed in every basis, each layer is a run.

    `lenses` are those that are probed, `maps` the linear lenses whose bases are used (for OCA the one that copies it),
    `data` the streams of train contexts, for mean and covariance. Strengths are calibrated on `train`, all else is `test`.
    """
    s, layers = settings or FaithSettings(), range(model.n_layers) if layers is None else layers
    if strangers := [name for name, lens in maps.items() if "W" not in lens.tensors]:
        raise ValueError(f"a causal basis comes from a linear map: {strangers[0]!r} has none (use kind tuned or linear)")
    if not layers or not 0 <= min(layers) <= max(layers) < model.n_layers:
        raise ValueError(f"layers {list(layers)}: '{model.name}' has 0 … {model.n_layers - 1}")
    if len(data) <= model.d_model:
        raise ValueError(f"a covariance of {model.d_model} coordinates needs more contexts than that, not {len(data)}")
    if max(s.contexts, s.resampled) > len(test) or s.contexts > len(train) or min(s.directions, s.contexts, s.resampled) < 2:
        raise ValueError(f"{s} does not fit {len(train)} train and {len(test)} test contexts; two of everything is the least")
    tensors = [x for lens in (*lenses.values(), *maps.values()) for x in lens.tensors.values()]
    prints = [runs.sha256(x.cpu().numpy().tobytes())[:16] for x in tensors]
    names, seen = (*lenses, *maps), runs.sha256([train[: s.contexts].tolist(), test[: s.resampled].tolist()])[:16]
    frames = []
    for layer in runs.progress(layers, desc="faithfulness, layer by layer"):
        job = Job(**asdict(s), layer=layer, data=(*names, *prints, data.fingerprint, seen))
        W = {name: lens.tensors["W"][layer] for name, lens in maps.items()}
        compute = lambda _, layer=layer, W=W: {"rows": layer_rows(model, lenses, W, data, train, test, s, layer)}  # noqa: E731
        frames.append(runs.run("faithfulness", job, compute, model=model, version=VERSION, key=f"layer{layer:02}").frame())
    return pd.concat(frames, ignore_index=True)
