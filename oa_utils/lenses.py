"""Lenses: what the last token's stream at a layer already says about the model's prediction (paper §5, appendix H).

Layer ℓ is the stream that enters block ℓ; layer n_layers is the model's end. The logit lens unembeds the stream as it is,
the tuned lens after a linear map. The mean, resample and OCA lenses send it through the later blocks with attention
replaced by what knows nothing of the context: only norms and MLPs run, on the last token alone. OCA (optimal constant
attention) trains these constants, own ones for each starting layer; `linear` is a linear map trained to do what OCA does.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import safetensors.torch as st
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from torch import Tensor

from oa_utils import runs, stats
from oa_utils.files import write_bytes
from oa_utils.models import Model

VERSION = 1
KINDS = ("logit", "tuned", "mean", "resample", "oca", "linear")
LR = {"tuned": 1e-3, "linear": 1e-3, "oca": 0.1}  # Adam's first step, inputs and outputs being of unit spread
POOL = 256  # contexts whose attention outputs the resample lens draws from


@dataclass(frozen=True)
class LensSettings:
    steps: int = 1000  # of Adam at most, with a step size that falls to nothing over them
    batch: int = 64  # contexts in a step
    lr: float = 0.0  # the first step size; 0 takes the kind's own
    check: int = 50  # steps between two looks at validation, where each layer's best state so far is kept
    patience: int = 5  # looks without gain after which a layer stops
    start: str = "identity"  # of linear maps; the reference code's is `random`: N(0, 1) in every entry
    seed: int = 0


@dataclass(frozen=True)
class Job(LensSettings):
    kind: str = ""
    data: tuple[str, str, str] = ()  # fingerprints of the train and the validation contexts, and of the lens copied


@dataclass(frozen=True, eq=False)
class Streams:
    """What the model computes at the last token of each context."""

    resid: Float[Tensor, "layers+1 n d"]  # the stream that enters each block, and the model's end
    mean: Float[Tensor, "layers d"]  # of attention outputs, b_O included
    spread: Float[Tensor, " layers"]  # their standard deviation, as root mean square over coordinates
    pool: Float[Tensor, "layers pool d"]  # attention outputs of the first contexts
    fingerprint: str = ""

    def __len__(self) -> int:
        return self.resid.shape[1]


@torch.no_grad()
def streams(model: Model, tokens: Int[Tensor, "n pos"], last: Int[Tensor, " n"] | None = None) -> Streams:
    """One pass over the contexts; `last` is the index of each one's last token where they are padded on the right."""
    if tokens.ndim != 2 or tokens.is_floating_point() or not len(tokens):
        raise ValueError(f"contexts are token ids [n, length], as oa.contexts gives, not {tokens.dtype} {list(tokens.shape)}")
    last = torch.full((len(tokens),), tokens.shape[1] - 1) if last is None else last
    resid = torch.empty(model.n_layers + 1, len(tokens), model.d_model, device=model.device)
    pool = torch.empty(model.n_layers, min(POOL, len(tokens)), model.d_model, device=model.device)
    total, squares = torch.zeros(2, model.n_layers, model.d_model, dtype=torch.float64)
    size = runs.in_a_pass(model, tokens.shape[1])
    for i in runs.progress(range(0, len(tokens), size), desc=f"streams of {len(tokens):,} contexts"):
        batch = tokens[i : i + size].to(model.device)
        at = torch.arange(len(batch), device=model.device), last[i : i + size].to(model.device)

        def keep(site: str, layer: int, value: Tensor, i=i, at=at) -> Tensor:
            if site == "resid":
                resid[layer, i : i + size] = value[at]
            if site == "attn":
                rows = value[at].float()
                total[layer] += rows.sum(0).double().cpu()
                squares[layer] += rows.double().square().sum(0).cpu()
                if i < pool.shape[1]:
                    pool[layer, i : i + size] = rows[: pool.shape[1] - i]
            return value

        resid[-1, i : i + size] = model.run(model.embed(batch), edit=keep)[at]
    mean = total / len(tokens)
    spread = (squares / len(tokens) - mean.square()).mean(-1).clamp(min=1e-12).sqrt()
    name = runs.sha256([model.fingerprint, tokens.tolist(), last.tolist()])[:16]
    return Streams(resid, mean.float().to(model.device), spread.float().to(model.device), pool, name)


def carry(model: Model, resid: Float[Tensor, "lens b d"], starts: Sequence[int],
          attn: Sequence[Float[Tensor, "later #b d"]]) -> Float[Tensor, "lens b d"]:  # fmt: skip
    """Where streams that start at layers `starts` (in order) end, with attn[i][j] for the j-th attention after start i."""
    x = resid[:0]
    for k in range(starts[0], model.n_layers):
        block, started = model.layers[k], sum(start <= k for start in starts)
        x = torch.cat([x, resid[len(x) : started]]) + torch.stack([attn[i][k - starts[i]] for i in range(started)])
        x = x + block.mlp_out(block.mlp_hidden(block.ln2(x)))
    return x


@dataclass(eq=False)
class Lens:
    """Log-probabilities from the last token's stream at any layer of one model."""

    model: Model
    kind: str
    tensors: dict[str, Tensor]  # tuned, linear: W [layers d d], b [layers d]; the others: constants, see `attn`
    about: dict[str, Any] = field(default_factory=dict)  # settings, seconds, curve and the like

    def attn(self, layer: int, n: int) -> Float[Tensor, "later #n d"]:
        """What stands for the attention of block `layer` and later ones, for n rows."""
        constants = self.tensors["constants"]
        if self.kind == "resample":  # [block pool d]; one context for all blocks of a row, on the pool itself the next one
            return constants[layer:, (torch.arange(n, device=constants.device) + 1) % constants.shape[1]]
        return (constants[layer, layer:] if self.kind == "oca" else constants[layer:])[:, None]  # [start block d], [block d]

    def ends(self, resid: Float[Tensor, "lens b d"], layers: Sequence[int]) -> Float[Tensor, "lens b d"]:
        """The stream that is unembedded, of several layers (in order) at once."""
        if self.kind == "logit":
            return resid
        if "W" in self.tensors:
            W, b = (self.tensors[name][list(layers)] for name in "Wb")
            return torch.baddbmm(b[:, None], resid, W.mT)
        return carry(self.model, resid, layers, [self.attn(layer, resid.shape[1]) for layer in layers])

    def log_probs(self, resid: Float[Tensor, "*any d"], layer: int) -> Float[Tensor, "*any vocab"]:
        if not 0 <= layer <= self.model.n_layers:
            raise ValueError(f"'{self.model.name}' has layers 0 … {self.model.n_layers} (its end), not {layer}")
        if resid.shape[-1] != self.model.d_model:
            raise ValueError(f"a stream of '{self.model.name}' has {self.model.d_model} coordinates, not {resid.shape[-1]}")
        if layer < self.model.n_layers:
            resid = self.ends(resid.reshape(1, -1, resid.shape[-1]), [layer]).reshape(resid.shape)
        return self.model.log_probs(resid)

    @torch.no_grad()
    def losses(self, data: Streams) -> Float[Tensor, "layers+1 n"]:
        """KL(model ‖ lens) of each context at each layer; at the model's end there is none."""
        layers, parts = range(self.model.n_layers), data.resid.split(256, 1)
        return F.pad(torch.cat([match(self.model, self.ends(x[:-1], layers), x[-1:]) for x in parts], 1), (0, 0, 0, 1)).cpu()

    @property
    def n_parameters(self) -> int:
        """How many numbers it has; of OCA's square of constants only blocks from the start on count."""
        n = self.model.n_layers
        counted = {"oca": n * (n + 1) // 2 * self.model.d_model, "resample": 0}  # resample has contexts, no parameters
        return counted.get(self.kind, sum(value.numel() for value in self.tensors.values()))

    def save(self, path: str | Path) -> None:
        about = {"kind": self.kind, "model": self.model.name, "fingerprint": self.model.fingerprint}
        own = {name: value.detach().cpu().contiguous() for name, value in self.tensors.items()}
        write_bytes(Path(path), st.save(own, {**about, "about": json.dumps(self.about)}))


def load(path: str | Path, model: Model) -> Lens:
    """A lens that `save` wrote, refused on any model but its own."""
    try:
        with safe_open(path, framework="pt") as file:
            head = file.metadata() or {}
            tensors = {name: file.get_tensor(name).to(model.device) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is not a lens: {error}") from error
    if head.get("kind") not in KINDS:
        raise ValueError(f"{path} is not a lens that oa_utils saved")
    if head["fingerprint"] != model.fingerprint:
        owner = f"'{head['model']}' ({head['fingerprint']})"
        raise ValueError(f"the lens {path} belongs to {owner}, not to '{model.name}' ({model.fingerprint})")
    return Lens(model, head["kind"], tensors, json.loads(head["about"]))


def match(model: Model, ends: Float[Tensor, "lens b d"], target: Float[Tensor, "#lens b d"], share: float = 0.0) -> Tensor:
    """KL(target ‖ lens) [lens b], one layer's logits at a time; with a share, share · sum goes back into `ends`."""
    leaves, losses = [end.detach().requires_grad_(share > 0) for end in ends], []
    for i, leaf in enumerate(leaves):
        if i < len(target):
            full = model.log_probs(target[i].detach())
        loss = stats.kl(full, model.log_probs(leaf))
        if share:
            (share * loss.sum()).backward()
        losses.append(loss.detach())
    if share:
        ends.backward(torch.stack([leaf.grad for leaf in leaves]))
    return torch.stack(losses)


class Trainer:
    """The trained kinds: raw parameters of unit scale, zero at the start, and the lens that they stand for."""

    def __init__(self, model: Model, data: Streams, s: LensSettings, kind: str, of: Lens | None = None):
        self.model, self.data, self.kind, self.of, n, d = model, data, kind, of, model.n_layers, model.d_model
        self.bytes = 4 * (n * (n + 1) // 2 * (6 * d + 4 * model.d_mlp) + 6 * model.d_vocab)  # that a context's step takes
        self.centre, self.scale = data.resid[:-1].mean(1), data.resid[:-1].std(1).clamp(min=1e-6)  # [layers d]
        self.out, self.eye = data.resid[-1].std(0).square().mean().sqrt(), torch.eye(d, device=model.device)
        shapes = {"constants": (n, n, d)} if kind == "oca" else {"W": (n, d, d), "b": (n, d)}
        self.raw = {name: torch.zeros(shape, device=model.device) for name, shape in shapes.items()}
        if kind != "oca" and s.start == "random":
            W, b = (torch.randn(shape, generator=runs.generator(s.seed)).to(self.eye) for shape in shapes.values())
            self.raw["W"] = (W - self.eye) * self.scale[:, None] / self.out
            self.raw["b"] = (b + torch.einsum("lij,lj->li", W - self.eye, self.centre)) / self.out
        for value in self.raw.values():
            value.requires_grad_()

    def lens(self, raw: dict[str, Tensor]) -> Lens:
        """Where raw is zero: constants are the mean, maps the identity."""
        if self.kind == "oca":
            return Lens(self.model, "oca", {"constants": self.data.mean + self.data.spread[:, None] * raw["constants"]})
        change = self.out * raw["W"] / self.scale[:, None]
        b = self.out * raw["b"] - torch.einsum("lij,lj->li", change, self.centre)
        return Lens(self.model, self.kind, {"W": self.eye + change, "b": b})

    def losses(self, resid: Float[Tensor, "layers+1 b d"], layers: Sequence[int], train: bool) -> Float[Tensor, "lens b"]:
        """Of these layers on some contexts; with `train`, the gradient of each layer's mean goes into its parameters."""
        out, layers = [], list(layers)
        for part in resid.split(runs.micro_batch(resid.shape[1], self.bytes), 1):
            with torch.no_grad():
                target = part[-1:] if self.of is None else self.of.ends(part[layers], layers)
            with torch.set_grad_enabled(train):
                out.append(match(self.model, self.lens(self.raw).ends(part[layers], layers), target, train / resid.shape[1]))
        return torch.cat(out, 1)


def fit(trainer: Trainer, held: Streams, s: LensSettings, snapshots: runs.Snapshots) -> tuple[dict, dict[str, Tensor]]:
    """Every layer on its own, side by side: numbers, and the tensors of the lens whose layers were best on validation."""
    raw, n, lr, size = trainer.raw, trainer.model.n_layers, s.lr or LR[trainer.kind], min(s.batch, len(trainer.data))
    optimiser = torch.optim.Adam(raw.values(), lr=lr, eps=1e-12)
    for value in raw.values():  # made here so that a snapshot can fill it
        optimiser.state[value] = {"step": torch.zeros(()), **{k: torch.zeros_like(value) for k in ("exp_avg", "exp_avg_sq")}}
    kept = {name: value.detach().clone() for name, value in raw.items()}  # each layer's best state so far
    state = {f"{name}.{k}": v for name, value in raw.items() for k, v in optimiser.state[value].items()}
    state |= {f"{name}.raw": value.data for name, value in raw.items()} | {f"{name}.kept": v for name, v in kept.items()}
    if saved := snapshots.load():
        step, best, idle, curve = saved[0]["state"]
        for name, value in state.items():
            value.copy_(saved[1][name])
    else:
        step, best, idle = 0, trainer.losses(held.resid, range(n), False).mean(1).tolist(), [0] * n
        curve = [(0, snapshots.seconds(), best[:])]
    bar = runs.progress(total=s.steps, desc=f"{trainer.kind} lens, {n} layers")
    bar.update(step)
    while step < s.steps and (active := [i for i in range(n) if idle[i] < s.patience]):
        optimiser.param_groups[0]["lr"] = lr * (1 - step / s.steps)
        optimiser.zero_grad()
        epoch, place = divmod(step, len(trainer.data) // size)
        order = torch.randperm(len(trainer.data), generator=runs.generator(s.seed * 100_003 + epoch))
        trainer.losses(trainer.data.resid[:, order[place * size : (place + 1) * size]], active, True)
        optimiser.step()
        step += 1
        bar.update()
        if step % s.check and step < s.steps:
            continue
        for i, loss in zip(active, trainer.losses(held.resid, active, False).mean(1).tolist(), strict=True):
            idle[i] += 1
            if loss < best[i]:
                best[i], idle[i] = loss, 0
                for name, value in kept.items():
                    value[i] = raw[name].data[i]
        curve.append((step, snapshots.seconds(), best[:]))
        bar.set_postfix(loss=f"{sum(best) / n:.4f}", layers=len(active))
        if snapshots.due():
            snapshots.save({"state": (step, best, idle, curve)}, state)
    bar.close()
    lens, rows = trainer.lens(kept), [{"layer": i, "start": curve[0][2][i], "loss": best[i]} for i in range(n)]
    return {"rows": rows, "curve": curve, "steps": step, "parameters": lens.n_parameters}, lens.tensors


def train(model: Model, contexts: Int[Tensor, "n pos"] | Streams, kind: str = "oca",
          validation: Int[Tensor, "m pos"] | Streams | None = None, settings: LensSettings | None = None,
          of: Lens | None = None) -> Lens:  # fmt: skip
    """A lens of one of KINDS; `of` is the OCA lens that a `linear` one copies.

    Several lenses of the same contexts share their `streams(model, contexts)`, which may be given in their place. Without
    `validation` an eighth of the contexts is held out for it. A lens that was trained before is loaded from the store.
    """
    s = settings or LensSettings()
    if kind not in KINDS or s.start not in ("identity", "random"):
        raise ValueError(f"kind {kind!r}, start {s.start!r}: kinds are {', '.join(KINDS)}, starts identity, random")
    if (of and of.kind) != ("oca" if kind == "linear" else None):
        raise ValueError("a linear lens, and no other, copies an OCA lens: train(model, contexts, 'linear', of=oca)")
    data = contexts if isinstance(contexts, Streams) else streams(model, contexts)
    if kind in ("logit", "mean", "resample"):
        return Lens(model, kind, {} if kind == "logit" else {"constants": data.mean if kind == "mean" else data.pool})
    if validation is None and len(data) < 2:
        raise ValueError("one context is too few: one is for training and one for validation at least")
    if validation is None:
        n, name = len(data) - max(1, len(data) // 8), data.fingerprint
        held = replace(data, resid=data.resid[:, n:], fingerprint=f"{name} after {n}")
        data = replace(data, resid=data.resid[:, :n], fingerprint=f"{name} up to {n}")
    else:
        held = validation if isinstance(validation, Streams) else streams(model, validation)
    source = "" if of is None else runs.sha256(of.tensors["constants"].cpu().numpy().tobytes())[:16]
    job = Job(**asdict(s), kind=kind, data=(data.fingerprint, held.fingerprint, source))
    compute = lambda snapshots: fit(Trainer(model, data, s, kind, of), held, s, snapshots)  # noqa: E731
    found = runs.run("lenses", job, compute, model=model, version=VERSION, key=f"{kind}_{s.start}" if kind == "tuned" else kind)
    tensors = {name: value.to(model.device) for name, value in found.tensors.items()}
    return Lens(model, kind, tensors, {**found.numbers, "seconds": found.seconds, "settings": asdict(s)})
