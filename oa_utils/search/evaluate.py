"""How good a circuit is: its gap under any ablation, sweeps over methods, ablations and sizes, and random circuits."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import product
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from oa_utils import runs, stats
from oa_utils.circuits import Circuit
from oa_utils.fills import Constants
from oa_utils.masked import MaskedModel
from oa_utils.models import Model, load_model
from oa_utils.search.acdc import acdc
from oa_utils.search.common import batch, check, chunks
from oa_utils.search.eap import eap, eap_ig
from oa_utils.search.edge_pruning import edge_pruning
from oa_utils.search.filling import Fills, constants_for, fill_for
from oa_utils.search.hcgs import hcgs
from oa_utils.search.ugs import ugs
from oa_utils.tasks import Task

VERSION = 2
METHODS = {"ugs": ugs, "hcgs": hcgs, "acdc": acdc, "eap": eap, "eap_ig": eap_ig, "edge_pruning": edge_pruning}
BY_SIZE = ("eap", "eap_ig", "edge_pruning")  # take n_edges; the others take lam
NOT_OPTIMAL = ("acdc", "eap", "eap_ig")  # their circuits found under `counterfactual` are measured under `optimal`
DRAWS = 2000  # random circuits tried at most


@dataclass(frozen=True)
class GapSettings:
    steps: int = 200  # of Adam, for the constants of `optimal`
    lr: float = 0.03  # falls to a tenth in the course of them
    batch: int = 32  # train prompts in a step
    check: int = 20  # steps between two looks at the whole train part, where the best constants are kept
    draws: int = 4  # derangements of `resample`, averaged for each prompt
    seed: int = 0


@dataclass(frozen=True)
class _Job:
    circuit: str
    ablation: str
    options: dict[str, Any]  # those settings that the ablation uses


@dataclass(frozen=True, eq=False)
class Gap:
    """Δ over test prompts, in nats."""

    mean: float
    se: float
    n: int
    each: Float[Tensor, " n"]
    constants: Constants | None = None  # those that `optimal` trained
    curve: Sequence[Sequence[float]] = ()  # (step, gap of the train part) while they trained

    def __float__(self) -> float:
        return self.mean

    def __repr__(self) -> str:
        return f"Gap({self.mean:.4g} ± {self.se:.2g} nats, n = {self.n})"


@torch.no_grad()
def measure(masked: MaskedModel, part: Task, mask: Tensor, fill: Fills, full: Float[Tensor, "n vocab"]) -> Float[Tensor, " n"]:
    """KL(full ‖ masked) of each prompt under one mask, taken as it is."""
    found = []
    for span in chunks(masked, len(part), part.tokens.shape[1], size=64):
        rows = torch.arange(len(part))[span]
        logp = masked(*batch(part, rows), mask.float()[None], fill(rows), skip_dead=True)
        found.append(stats.kl(full[span], logp).cpu())
    return torch.cat(found)


def train_constants(masked: MaskedModel, task: Task, mask: Tensor, settings: GapSettings) -> tuple[Constants, list]:
    """The best constants for one circuit that any look at the train part saw, the means first, and the gap at each look."""
    part, rng, s = task.train, runs.generator(settings.seed), settings
    full, best, curve = part.log_probs(masked.model), None, []
    constants = Constants(*(x.clone().requires_grad_() for x in constants_for(masked, task, "optimal")))
    optimiser = torch.optim.Adam(constants, lr=s.lr, betas=(0.5, 0.9))  # or the steep start would slow all later steps
    for step in range(s.steps + 1):
        if step % s.check == 0 or step == s.steps:
            curve.append((step, measure(masked, part, mask, lambda rows: constants, full).mean().item()))
            if best is None or curve[-1][1] <= min(value for _, value in curve):
                best = Constants(*(x.detach().clone() for x in constants))
        if step == s.steps:
            return best, curve
        rows = torch.randperm(len(part), generator=rng)[: s.batch]
        optimiser.param_groups[0]["lr"] = s.lr * (1 - 0.9 * step / max(1, s.steps))
        optimiser.zero_grad()
        for span in chunks(masked, len(rows), part.tokens.shape[1]):
            logp = masked(*batch(part, rows[span]), mask.float()[None], constants, skip_dead=True)
            (stats.kl(full[rows[span]], logp).sum() / len(rows)).backward()
        optimiser.step()


def gap(masked: MaskedModel, task: Task, circuit: Circuit, ablation: str = "counterfactual", **settings) -> Gap:
    """Δ of a circuit on the test part; settings as in `GapSettings`, the same protocol for every method.

    Under `optimal`, constants (one for each vertex) are trained afresh on the train part, starting from the means.
    """
    own, model = GapSettings(**settings), masked.model
    circuit.check(model)
    check(task, ablation)

    def compute(_):
        test, constants, curve = task.test, None, []
        if ablation == "optimal":
            constants, curve = train_constants(masked, task, circuit.mask, own)
            fills = [lambda rows: constants]
        else:
            seeds = range(own.seed, own.seed + (own.draws if ablation == "resample" else 1))
            fills = [fill_for(masked, task, ablation, "test", seed) for seed in seeds]
        full = test.log_probs(model)
        each = torch.stack([measure(masked, test, circuit.mask, fill, full) for fill in fills]).mean(0)
        if not each.isfinite().all():
            raise RuntimeError(f"the gap of {circuit} under {ablation} is not finite")
        mean, se = stats.mean_se(each)
        numbers = {"method": circuit.method, "n_edges": circuit.n_edges, "gap": mean, "se": se, "n": len(each), "curve": curve}
        return numbers, {"each": each, **(constants._asdict() if constants else {})}

    uses = {"optimal": ("steps", "lr", "batch", "check", "seed"), "resample": ("draws", "seed")}.get(ablation, ())
    name = runs.sha256(circuit.mask.nonzero()[:, 0].tolist())[:16]
    job = _Job(name, ablation, {k: v for k, v in asdict(own).items() if k in uses})
    key = f"{ablation}_{circuit.n_edges}"
    done = runs.run("circuit_gaps", job, compute, model=model, task=task, version=VERSION, key=key)
    numbers, parts = done.numbers, [done.tensors[k] for k in Constants._fields if k in done.tensors]
    about = numbers["gap"], numbers["se"], numbers["n"], done.tensors["each"]
    return Gap(*about, Constants(*parts) if parts else None, numbers["curve"])


# ---- sweeps


@cache
def masked_of(name: str) -> MaskedModel:
    return MaskedModel(load_model(name))


def load_as(model: Model) -> str:
    """The name by which a worker loads this very model, or nothing."""
    try:
        return model.name if masked_of(model.name).model.fingerprint == model.fingerprint else ""
    except ValueError:
        return ""


def find(item: tuple, masked: MaskedModel | None, name: str, task: Task, options: Mapping, gap_settings: Mapping) -> dict:
    """One circuit, found and measured: `item` is method, ablation, λ or n_edges, and seed."""
    (method, ablation, value, seed), masked = item, masked or masked_of(name)
    under = "counterfactual" if ablation == "optimal" and method in NOT_OPTIMAL else ablation
    aim = {"n_edges": int(value)} if method in BY_SIZE else {"lam": value}
    circuit = METHODS[method](masked, task, under, seed=seed, **aim, **options.get(method, {}))
    g = gap(masked, task, circuit, ablation, **gap_settings)
    row = {"method": method, "ablation": ablation, "searched": under, "seed": seed, "asked": value}
    row |= {"n_edges": circuit.n_edges, "n_heads": len(circuit.heads), "gap": g.mean, "se": g.se, "n": g.n}
    return row | {"edges": circuit.mask.nonzero()[:, 0].tolist()}


def sweep(
    masked: MaskedModel, task: Task, methods: Iterable[str], ablations: Iterable[str], grid: Mapping[Any, Sequence[float]],
    seeds: Iterable[int] = (0,), options: Mapping[str, Mapping] | None = None, **gap_settings,
) -> pd.DataFrame:  # fmt: skip
    """A row for each method, ablation, value and seed: the circuit found, and its gap under the same ablation.

    `grid` gives the values of λ, or of n_edges for eap, eap_ig and edge_pruning, by (method, ablation), by method, or by
    `"lam"` and `"n_edges"`; `options` are settings by method. What is stored is not computed again, so a sweep that was
    killed goes on. Under `optimal`, ACDC and EAP take the circuit found under `counterfactual` (column `searched`).
    """
    items, seeds = [], list(seeds)
    for method, ablation in product(methods, list(ablations)):
        if method not in METHODS:
            raise ValueError(f"unknown method {method!r}: there are {', '.join(METHODS)}")
        check(task, ablation)
        kind = "n_edges" if method in BY_SIZE else "lam"
        values = next((grid[key] for key in ((method, ablation), method, kind) if key in grid), None)
        if values is None:
            raise ValueError(f"grid has no values for {method}: give them under {(method, ablation)}, {method!r} or {kind!r}")
        items += product([method], [ablation], values, seeds)
    one = partial(find, name=masked.model.name, task=task, options=options or {}, gap_settings=gap_settings)
    if load_as(masked.model):
        return pd.DataFrame(runs.parallel(partial(one, masked=None), items, desc="circuits"))
    return pd.DataFrame([one(item, masked) for item in runs.progress(items, desc="circuits")])  # it lives here only


# ---- random circuits


def random_circuits(masked: MaskedModel, size: int, n: int = 20, tolerance: float = 0.1, seed: int = 0) -> list[Circuit]:
    """Circuits of edges drawn independently with one probability, whose pruned size is within `tolerance` of `size`."""
    graph, rng = masked.graph, runs.generator(seed)
    if not 1 <= size <= len(graph) or n < 1 or not tolerance >= 0:
        raise ValueError(f"size must be from 1 to {len(graph)}, n from 1 on, tolerance from 0 on: got {size}, {n}, {tolerance}")
    low, high, u = 0.0, 1.0, torch.rand(64, len(graph), generator=rng)
    for _ in range(20):  # the same draws for every p, so the size grows with p
        p = (low + high) / 2
        low, high = (low, p) if graph.prune_dangling(u < p).sum(1).float().mean() > size else (p, high)
    found, drawn = [], 0
    while len(found) < n and drawn < DRAWS:
        masks = graph.prune_dangling(torch.rand(min(50, DRAWS - drawn), len(graph), generator=rng) < high)
        drawn += len(masks)
        found += list(masks[(masks.sum(1) - size).abs() <= tolerance * size])
    if len(found) < n:
        warnings.warn(f"only {len(found)} of {drawn} random circuits had a size within {tolerance:.0%} of {size}", stacklevel=2)
    about, own = {"tolerance": tolerance, "p": high, "drawn": drawn}, (masked.model.name, masked.model.fingerprint)
    return [Circuit(graph, mask, "random", None, about | {"i": i}, seed, {}, None, *own) for i, mask in enumerate(found[:n])]
