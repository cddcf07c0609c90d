"""Causal tracing: how much of a fact's recall comes back when the subject is removed and one component is restored.

The subject's token embeddings are corrupted, by noise (GNT) or by a trained constant (OAT, paper §4 and appendix G); then
what attention or MLP layers of a window wrote in the clean run is put back at some positions. All layers run side by side
as copies of the prompts. A copy computes only what it can change: the columns from the subject on; where copies share a
corruption, the layers from the first restored one on, and there the last column alone when only that one is restored.
"""

import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product

import pandas as pd
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from oa_utils import runs, stats
from oa_utils.components import collect, fit
from oa_utils.models import Edit, Model, load_model
from oa_utils.tasks import Task
from oa_utils.texts import contexts

VERSION = 1
CHOICES = {"kind": ("mlp", "attn"), "position": ("last", "last_subject", "subject"), "method": ("gnt", "oat")}
TRAINING = ("steps", "lr", "batch", "check", "tol", "seed")
PASS = 512  # columns of all copies in one pass on a CPU: small, so that prompts in it are of one length
NOISE = 1e-6  # a smaller loss of probability is rounding: nothing was corrupted
Past = list[tuple[Tensor, Tensor]]  # keys and values of each layer, [b head pos d_head]
Clean = tuple[Past, list[Tensor], Tensor, Tensor]  # past, restored sites [b col d] by layer, p and id of the top token


@dataclass(frozen=True)
class TraceSettings:
    draws: int = 5  # of noise, averaged for each prompt
    noise: float = 3.0  # its standard deviation, in units of each coordinate's spread
    steps: int = 150  # at most so many steps of Adam for the constants of a setting
    lr: float = 0.03  # Adam's first step, in units of the spread of subject embeddings (RMS over coordinates)
    batch: int = 16  # train facts in a step; 0 takes all
    check: int = 25  # steps between two looks at the whole train part, where the best constants so far are kept
    tol: float = 0.01  # a look that gains less than this share, and less than its standard error, cuts the step
    same_constant: bool = False  # the unpatched copy takes each layer's own constant
    seed: int = 0


@dataclass(frozen=True)
class Job(TraceSettings):
    """What a stored run depends on besides model and facts; settings that do not touch it stay at their defaults."""

    kind: str = ""
    position: str = "last"
    window: int = 0
    method: str = "oat"
    layers: tuple[int, ...] = ()
    sigma: str = ""


def walk(model: Model, x: Float[Tensor, "copies*b col d"], at: Int[Tensor, "b col"], past: Past, edit: Edit | None = None,
         record: Past | None = None) -> Float[Tensor, "copies*b d"]:  # fmt: skip
    """The last column's stream at the model's end, from the embeddings of the columns `at`; the other columns' keys and
    values are those of `past`. An edit of `resid` may add copies; `record` takes the keys and values of all columns."""
    edit = edit or (lambda site, layer, value: value)
    seen, rotation = torch.arange(past[0][0].shape[2], device=x.device) <= at[..., None], model.rotation(at)
    for i, block in enumerate(model.layers):
        x = edit("resid", i, x)
        m, normed = len(x) // len(at), block.ln1(x)
        turn = rotation and tuple(part.repeat(m, 1, 1) for part in rotation)
        q, k = (model.rotate(block.heads(normed, slot), turn) for slot in "qk")
        place, new = at.repeat(m, 1)[:, None, :, None], (k, block.heads(normed, "v"))
        k, v = (p.repeat(m, 1, 1, 1).scatter(2, place.expand_as(n), n) for p, n in zip(past[i], new, strict=True))
        if record is not None:
            record.append((k, v))
        if i == model.n_layers - 1:
            q, x = q[:, :, -1:], x[:, -1:]
        visible = seen[:, -q.shape[2] :].repeat(m, 1, 1)[:, None]  # [copies*b 1 col pos]
        z = F.scaled_dot_product_attention(q, k, v, visible, enable_gqa=k.shape[1] != q.shape[1])
        x = x + edit("attn", i, model.attn_out(i, z.transpose(1, 2)))
        x = x + edit("mlp", i, block.mlp_out(block.mlp_hidden(block.ln2(x))))
    return x[:, 0]


class Prompts:
    """Facts with subject spans, and what the clean model computes on them: once, where memory allows."""

    def __init__(self, model: Model, task: Task, kind: str):
        self.model, self.kind, self.n = model, kind, len(task)
        self.tokens, self.last, self.subject = (x.to(model.device) for x in (task.tokens, task.last, task.subject))
        self.span = (self.last - self.subject[:, 0] + 1).cpu()  # columns that the subject reaches
        cells = model.n_layers * (model.d_model + 2 * model.n_heads * model.d_head) + 8 * model.d_mlp
        fits = runs.micro_batch(self.n, 4 * cells * self.tokens.shape[1] + 12 * model.d_vocab) == self.n
        self.kept, rows, began = None, torch.arange(self.n if fits else min(8, self.n)), time.perf_counter()
        found = self.clean(rows)
        self.seconds = (time.perf_counter() - began) / len(rows)  # of one prompt's clean run
        self.kept = found if fits else None

    def columns(self, rows: Int[Tensor, " b"], width: int) -> tuple[Int[Tensor, "b col"], dict[str, Bool[Tensor, "b col"]]]:
        """Positions of the last `width` columns of each prompt (a short one repeats its BOS), and which are which."""
        last, first, end = (x[rows, None] for x in (self.last, *self.subject.T))
        at = (last + torch.arange(1 - width, 1, device=last.device)).clamp(min=0)
        return at, {"subject": (at >= first) & (at < end), "last_subject": at == end - 1, "last": at == last}

    def subjects(self) -> Float[Tensor, "m d"]:
        """Embeddings of all subject tokens."""
        at, which = self.columns(torch.arange(self.n), int(self.span.max()))
        return self.model.embed_tokens(self.tokens.gather(1, at)[which["subject"]])

    @torch.no_grad()
    def clean(self, rows: Int[Tensor, " b"]) -> Clean:
        model, width, sites, past = self.model, int(self.last[rows].max()) + 1, [], []
        if self.kept:
            past, sites, p, target = self.kept
            return [(k[rows, :, :width], v[rows, :, :width]) for k, v in past], [x[rows] for x in sites], p[rows], target[rows]
        (at, _), heads = self.columns(rows, width), model.layers[0].heads(model.embed(self.tokens[:1, :1]), "k").shape[1]
        none = torch.zeros(len(rows), heads, width, model.d_head, dtype=model.dtype, device=model.device)
        keep = lambda site, layer, value: sites.append(value) or value if site == self.kind else value  # noqa: E731
        x = model.embed(self.tokens[rows]).take_along_dim(at[..., None], 1)
        x = walk(model, x, at, [(none, none)] * model.n_layers, keep, past)
        return past, sites, *model.log_probs(x).exp().max(-1)

    def noise(self, rows: Int[Tensor, " b"], draws: Sequence[int], std: Float[Tensor, " d"], seed: int) -> Tensor:
        """What noise adds to the subject's columns, [1 b col d]; it depends on the row, the draw and the seed alone."""
        out = torch.zeros(len(rows), int(self.span[rows].max()), self.model.d_model)
        for i, (row, draw) in enumerate(zip(rows.tolist(), draws, strict=True)):
            (first, end), rng = self.subject[row].tolist(), runs.generator(zlib.crc32(f"{row} {draw} {seed}".encode()))
            start = out.shape[1] - int(self.span[row])
            out[i, start : start + end - first] = torch.randn(end - first, self.model.d_model, generator=rng)
        return (out.to(std) * std)[None]

    def constant(self, rows: Int[Tensor, " b"], constants: Sequence[Float[Tensor, " d"]]) -> Tensor:
        """What to add to the subject's columns so that each copy has its constant there, [copy b col d]."""
        at, _ = self.columns(rows, int(self.span[rows].max()))
        return torch.stack(list(constants))[:, None, None] - self.model.embed_tokens(self.tokens[rows].gather(1, at))

    def probabilities(
        self, rows: Int[Tensor, " b"], change: Float[Tensor, "copy b col d"], windows: Sequence[range],
        where: str | Bool[Tensor, "copy b col"],
    ) -> Float[Tensor, "1+copy b"]:  # fmt: skip
        """The clean run's top token: its probability there, then in copies with the subject changed and windows restored.

        One change for all copies: each leaves the first one, which restores nothing, where its window begins (in order).
        """
        model, b, (past, sites, p_clean, target) = self.model, len(rows), self.clean(rows)
        (at, which), shared = self.columns(rows, change.shape[2]), len(change) < len(windows)
        x = model.embed(self.tokens[rows]).take_along_dim(at[..., None], 1) + change * which["subject"][..., None]
        x, named = x.flatten(0, 1), where if isinstance(where, str) else None
        where = which[named][None] if named else where
        if shared and named == "last":  # all other columns are those of the first copy
            walk(model, x, at, past, record=(corrupted := []))
            x, at, where, past = x[:, -1:], at[:, -1:], where[..., -1:], corrupted

        def edit(site: str, layer: int, value: Tensor) -> Tensor:
            if site == "resid" and shared and (joining := sum(window.start == layer for window in windows[1:])):
                value = torch.cat([value, value[:b].repeat(joining, 1, 1)])
            m, c, on = len(value) // b, value.shape[1], [layer in window for window in windows]
            if site != self.kind or not any(on):
                return value
            here = torch.tensor(on[:m], device=value.device)[:, None, None] & where[:m, :, -c:]
            return torch.where(here[..., None], sites[layer][:, -c:], value.unflatten(0, (m, b))).flatten(0, 1)

        logp = model.log_probs(walk(model, x, at, past, edit)).unflatten(0, (-1, b))
        return torch.cat([p_clean[None], logp.gather(-1, target.expand(len(logp), -1)[..., None])[..., 0].exp()])

    def passes(self, change: Callable[[Tensor], Tensor], windows: Sequence[range], where: str, rows: Tensor | None = None):
        """(copies, rows, p), of all prompts or some, as many at once as a pass takes; short subjects' reaches first."""
        rows, model = torch.arange(self.n) if rows is None else rows, self.model
        limit = PASS if model.device.type == "cpu" else 64 * PASS
        if torch.is_grad_enabled():  # bytes that a column keeps for the backward pass
            limit = runs.micro_batch(limit, 4 * model.n_layers * (14 * model.d_model + 4 * model.d_mlp))
        size = max(1, limit // (len(windows) * int(self.span[rows].max())))
        for chunk in rows[self.span[rows].argsort(stable=True)].split(size):
            yield slice(0, 1 + len(windows)), chunk, self.probabilities(chunk, change(chunk), windows, where)

    @torch.no_grad()
    def measure(self, change: Callable[[Tensor], Tensor], windows: Sequence[range], where: str) -> Float[Tensor, "1+copy n"]:
        return collect(self.passes(change, windows, where), 1 + len(windows), self.n)

    def train(self, windows: Sequence[range], where: str, starts: Sequence[Tensor], s: TraceSettings):
        """A constant for each window with the least E max(0, p_clean − p_patched), as `fit` returns them."""

        def losses(constants, which, rows):
            change, some = lambda chunk: self.constant(chunk, [constants[i] for i in which]), [windows[i] for i in which]
            for _, chunk, p in self.passes(change, some, where, rows):
                yield slice(0, len(which)), chunk, (p[0] - p[1:]).relu()

        scale = max(self.subjects().std(0).square().mean().sqrt().item(), 1e-6)
        prompts = int(len(windows) * s.steps * (2 * (s.batch or self.n) + self.n / s.check))
        runs.announce(f"{len(windows)} constants: at most {runs.estimate(self.seconds, prompts)}")
        return fit([[start] * len(windows) for start in starts], [scale] * len(windows), losses, self.n, s)


def window_of(layer: int, window: int, n_layers: int) -> range:
    return range(max(0, layer - window // 2), min(n_layers - 1, layer + window // 2) + 1)


def spread(model: Model, tokens: Int[Tensor, "n pos"] | None = None) -> Float[Tensor, " d"]:
    """σ of each coordinate of token embeddings, BOS (which also pads) left out: the noise's unit; by default of contexts."""
    tokens = contexts(model, 256, min(64, model.n_ctx)) if tokens is None else tokens
    return model.embed_tokens(tokens[tokens != model.bos].to(model.device)).std(0)


def aie(w: Float[Tensor, " n"], z: Float[Tensor, " n"]) -> dict[str, float]:
    """Average indirect effect max(0, 1 − E[W] / E[Z]) and its standard error; 0 where the corruption costs nothing."""
    ratio, se = stats.ratio_se(w, z) if z.mean() > NOISE else (1.0, float("nan"))
    return {"aie": max(0.0, 1 - ratio), "se": se}


def unpatched(model: Model, facts: Task, job: Job) -> Float[Tensor, " d"]:
    """The constant that loses least when nothing is restored: the same in every setting, so trained once."""

    def compute(_):
        train = Prompts(model, facts.train, "")
        [best], [curve], _ = train.train([range(0)], "last", [train.subjects().mean(0)], job)
        return {"loss": min(curve, key=lambda look: look[1])[1], "curve": curve}, {"constant": best}

    own, about = Job(**{name: getattr(job, name) for name in TRAINING}), {"model": model, "task": facts, "version": VERSION}
    return runs.run("tracing_constant", own, compute, key="unpatched", **about).tensors["constant"].to(model.device)


def setting(model: Model, facts: Task, job: Job, sigma: Float[Tensor, " d"] | None) -> tuple[dict, dict[str, Tensor]]:
    """One setting: a row for each layer, and every test fact's W and Z [layer n]; OAT: its constants and their curves."""
    test, windows = Prompts(model, facts.test, job.kind), [window_of(i, job.window, model.n_layers) for i in job.layers]
    about, tensors, none = {}, {}, range(0)
    if job.method == "gnt":
        std = job.noise * sigma.to(model.device, model.dtype)
        noise = [lambda rows, i=i: test.noise(rows, [i] * len(rows), std, job.seed) for i in range(job.draws)]
        p = torch.stack([test.measure(draw, [none, *windows], job.position) for draw in noise])  # [draw copy n]
    else:
        train, base = Prompts(model, facts.train, job.kind), unpatched(model, facts, job)
        best, curves, starts = train.train(windows, job.position, [train.subjects().mean(0), base], job)
        p = test.measure(lambda rows: test.constant(rows, [base, *best]), [none, *windows], job.position)[None]
        if job.same_constant:
            same = test.measure(lambda rows: test.constant(rows, best), [none] * len(best), "last")[None, 1:]
        about = {"curves": curves, "starts": [("mean", "unpatched")[i] for i in starts]}
        tensors = {"constants": torch.stack(best), "unpatched": base}
    clean, corrupted, patched = p[:, :1], same if job.same_constant else p[:, 1:2], p[:, 2:]
    w, z = (clean - patched).clamp(min=0).mean(0), (clean - corrupted).mean(0).expand(len(windows), -1)
    names = {name: getattr(job, name) for name in ("kind", "position", "window", "method")}
    rows = [{**names, "layer": layer, **aie(w[i], z[i]), "p_clean": clean.mean(), "p_corrupt": (clean[0, 0] - z[i]).mean(),
             "p_patched": patched[:, i].mean(), "n": test.n} for i, layer in enumerate(job.layers)]  # fmt: skip
    return {"rows": rows, **about}, {"w": w, "z": z, **tensors}


def check(model: Model, facts: Task, asked: dict[str, list], layers: Sequence[int]) -> None:
    for name, there in CHOICES.items():
        if unknown := [x for x in asked.get(name, []) if x not in there]:
            raise ValueError(f"{name} {unknown[0]!r}: it is one of {', '.join(there)}")
    if bad := [w for w in asked["window"] if w % 2 != 1 or not 1 <= w <= model.n_layers]:
        raise ValueError(f"window {bad[0]}: it is odd and at most {model.n_layers}, the number of layers of '{model.name}'")
    if not layers or not 0 <= min(layers) <= max(layers) < model.n_layers:
        raise ValueError(f"layers {list(layers)}: '{model.name}' has 0 … {model.n_layers - 1}")
    if not len(facts) or facts.subject is None:
        lacks = "no subject spans" if len(facts) else "no facts: the model knew none of them"
        raise ValueError(f"task '{facts.name}' has {lacks}; oa.facts(model) makes a task that can be traced")
    first, end = facts.subject.T
    if bad := ((first < 1) | (first >= end) | (end > facts.last + 1)).nonzero().flatten().tolist():
        raise ValueError(f"fact {bad[0]}: its subject, tokens {facts.subject[bad[0]].tolist()}, does not lie in its prompt")


loaded = cache(load_model)


def _elsewhere(values: tuple, name: str, facts: Task, **about) -> None:
    """One setting, left in the store by a process that has its own copy of the model."""
    trace_runs(loaded(name), facts, *values, **about)


def trace_runs(model: Model, facts: Task, kind="mlp", position="last", window=5, method="oat", layers=None, sigma=None,
               settings: TraceSettings | None = None, parallel: bool = False) -> list[runs.Result]:  # fmt: skip
    """As `trace`, with all that is stored: `.numbers` (rows, curves, starts), `.tensors` (w, z, constants, unpatched)."""
    asked, s, done = {"kind": kind, "position": position, "window": window, "method": method}, settings or TraceSettings(), []
    asked = {name: [x] if isinstance(x, str | int) else list(x) for name, x in asked.items()}
    layers = tuple(range(model.n_layers) if layers is None else sorted(set(layers)))
    check(model, facts, asked, layers)
    sigma = spread(model) if sigma is None and "gnt" in asked["method"] else sigma
    if parallel:
        about = {"layers": layers, "sigma": sigma, "settings": s}
        runs.parallel(partial(_elsewhere, name=model.name, facts=facts, **about), product(*asked.values()), desc="tracing")
    for values in runs.progress(list(product(*asked.values())), desc="tracing"):
        job, own = Job(**dict(zip(asked, values, strict=True)), layers=layers), [*TRAINING, "same_constant"]
        if job.method == "gnt":
            job, own = replace(job, sigma=runs.sha256(sigma.float().cpu().numpy().tobytes())[:16]), ["draws", "noise", "seed"]
        job = replace(job, **{name: getattr(s, name) for name in own})
        about = {"model": model, "task": facts, "version": VERSION, "key": "{}_{}_w{}_{}".format(*values)}
        done.append(runs.run("causal_tracing", job, lambda _, job=job: setting(model, facts, job, sigma), **about))
    return done


def trace(*args, **kwargs) -> pd.DataFrame:
    """AIE of each layer on the test facts: columns kind position window method layer aie se p_clean p_corrupt p_patched n.

    `trace(model, facts, kind, position, window, method, layers, sigma, settings)`: kind to method may be lists; `window`
    counts the layers restored around each one; `sigma` [d] is the noise's unit (see `spread`). Every setting is a run;
    `parallel` computes settings side by side in processes that load the model by its name.
    """
    return pd.concat([result.frame() for result in trace_runs(*args, **kwargs)], ignore_index=True)
