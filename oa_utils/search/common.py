"""What the searches share: the price of a circuit, and the loop that trains a distribution over masks.

A step draws a few prompts and several masks for each, prunes dangling edges mask by mask, runs the masked model, and moves
the distribution down the gradient of KL(full ‖ masked) + price. What differs between algorithms is the `Sampler`.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from oa_utils import ablation as ab
from oa_utils import runs, stats
from oa_utils.circuits import Circuit
from oa_utils.fills import Constants
from oa_utils.graph import Graph
from oa_utils.masked import MaskedModel
from oa_utils.search.filling import fill_for
from oa_utils.tasks import Task

ABLATIONS = tuple(a for a in ab.ABLATIONS if a != "noise")  # noise has no edge form
LEVELS, PRUNING = ("edge", "vertex"), ("sample", "batch", "none")
BINS, REPORTS = 20, 30  # of the histograms in a history, and of its entries


def check(task: Task, ablation: str, lam=0.0, level="edge", n_edges=0, graph: Graph | None = None, fixed: str = "") -> None:
    """Refuses what cannot be searched, before anything is computed; a `fixed` method trains no constants along."""
    if ablation not in ABLATIONS:
        raise ValueError(f"unknown ablation {ablation!r}: for edges there are {', '.join(ABLATIONS)}")
    if fixed and ablation == "optimal":
        raise ValueError(
            f"{fixed} cannot search under 'optimal': the best constants depend on the circuit, and it would have to train "
            "them anew for every candidate. Search under 'counterfactual' (or 'mean') and evaluate the circuit with "
            "gap(..., ablation='optimal'), as the paper does; or use ugs or hcgs, which train constants along"
        )
    if not lam >= 0:
        raise ValueError(f"lam is the price of one edge in nats and must be a number from 0 on, got {lam}")
    if level not in LEVELS:
        raise ValueError(f"level is one of {', '.join(LEVELS)}, not {level!r}")
    if graph is not None and not 0 <= n_edges <= len(graph):
        raise ValueError(f"n_edges must be from 0 to {len(graph)}, the edges of this model, got {n_edges}")
    if ablation in ("counterfactual", "cf_mean"):
        task.need_counterfactual()
    if ablation == "resample":
        task.train.partners()


def batch(part: Task, rows: Int[Tensor, " b"]) -> tuple[Int[Tensor, "b pos"], Int[Tensor, " b"]]:
    """Tokens of these prompts, cut behind the longest, and their last positions."""
    last = part.last[rows]
    return part.tokens[rows, : int(last.max()) + 1], last


def chunks(masked: MaskedModel, n: int, length: int, size: int = 10**9) -> Iterator[slice]:
    """Slices of n examples that fit into memory."""
    size = min(size, runs.micro_batch(n, masked.chunk_size(length)))
    return (slice(i, min(i + size, n)) for i in range(0, n, size))


def price(graph: Graph, theta: Float[Tensor, " n_edges"], lam: float, gamma: float) -> Float[Tensor, ""]:
    """λ Σθ + γλ Σ_A ½|E_A| tanh(2ε_A/|E_A|), with ε_A the sum of θ over the |E_A| edges at A, for every vertex A."""
    ends = theta.new_zeros(graph.n_vertices).index_add(0, graph.src, theta).index_add(0, graph.dst, theta)
    half = graph.degree.to(theta) / 2
    return lam * (theta.sum() + gamma * (half * torch.tanh(ends / half)).sum())


def as_circuit(masked: MaskedModel, mask: Tensor, method: str, settings: Any, history: dict) -> Circuit:
    about, model = asdict(settings), masked.model
    ablation, seed = about.pop("ablation"), about.pop("seed")
    return Circuit(masked.graph, mask, method, ablation, about, seed, history, None, model.name, model.fingerprint)


def stored(method: str, masked: MaskedModel, task: Task, settings: Any, compute: Callable, version: int, aim: str) -> Circuit:
    """The circuit that `compute` found, now or earlier: `edges` and `history` of its numbers, final θ of its tensors."""
    key = f"{settings.ablation}_{settings.level}_{aim}_seed={settings.seed}"
    done = runs.run(f"search_{method}", settings, compute, model=masked.model, task=task, version=version, key=key)
    mask = torch.zeros(len(masked.graph), dtype=torch.bool)
    mask[done.numbers["edges"]] = True
    theta = {k: v.tolist() for k, v in done.tensors.items() if k == "theta"}
    return as_circuit(masked, mask, method, settings, done.numbers["history"] | theta | {"seconds": done.seconds})


def edges_of(graph: Graph, mask: Tensor) -> dict:
    kept = graph.prune_dangling(mask).nonzero()[:, 0].tolist()
    return {"n_edges": len(kept), "edges": kept}


@dataclass(frozen=True)
class Training:
    """Settings of the searches that train; the algorithms add their own."""

    ablation: str = "optimal"
    lam: float = 1e-3  # price of one edge (level `vertex`: of one vertex) in nats
    steps: int = 300
    seed: int = 0
    level: str = "edge"  # `vertex`: the out-edges of a vertex share one α
    prompts: int = 5  # different prompts in a step
    masks: int = 12  # masks drawn for each prompt
    lr: float | None = None  # Adam on the logits; None: by λ, ablation and steps, see `ugs.learning_rate`
    lr_constants: float = 2e-3  # Adam on the constants of `optimal`
    gamma: float = 0.5  # weight of the price of vertices against that of edges
    clip: float = 5.0  # L2 norm of the logits' gradient
    tau: float = 0.5  # an edge is kept in the end where its probability is above
    pruning: str = "sample"  # dangling edges go mask by mask; `batch`: where they dangle in all masks; `none`
    everywhere: bool = False  # constants get gradient along every edge, not only where α = 0


class Sampler:
    """A distribution over masks with one entry for each unit: an edge, or a vertex whose out-edges share it.

    An algorithm adds `parameters` by name, `groups()` of them for AdamW, `draw(n, rng)` -> [n unit] with the gradients it
    wants, and `keep()` -> [unit], how likely each is in the circuit. All of it lives on the CPU, the model need not.
    """

    optimiser: torch.optim.Optimizer  # set by the loop
    parameters: dict[str, Tensor]

    def __init__(self, graph: Graph, settings: Training):
        self.graph, self.settings = graph, settings
        self.units = len(graph) if settings.level == "edge" else graph.n_vertices - 1

    def edges(self, units: Float[Tensor, "*n unit"]) -> Float[Tensor, "*n n_edges"]:
        return units if self.settings.level == "edge" else units[..., self.graph.src]

    def priced(self, theta: Float[Tensor, " unit"]) -> Float[Tensor, ""]:
        s = self.settings
        return price(self.graph, theta, s.lam, s.gamma) if s.level == "edge" else s.lam * theta.sum()

    def penalty(self, alpha: Float[Tensor, "n unit"], step: int) -> Float[Tensor, ""]:
        return self.priced(self.keep())

    def pace(self, step: int) -> float:
        """Factor on the learning rates."""
        return 1.0

    def cut(self) -> Bool[Tensor, " n_edges"]:
        return self.edges(self.keep() > self.settings.tau)


class Trainer:
    """One training run, which can stop and go on at any step."""

    def __init__(self, masked: MaskedModel, task: Task, settings: Training, sampler: Sampler, snapshots: runs.Snapshots):
        self.masked, self.settings, self.sampler, self.snapshots = masked, settings, sampler, snapshots
        self.part, self.rng, self.step = task.train, runs.generator(settings.seed + 1), 0
        self.full = self.part.log_probs(masked.model)
        groups = [group | {"start": group["lr"]} for group in sampler.groups()]
        self.parameters = dict(sampler.parameters)
        self.fill = fill_for(masked, task, settings.ablation, "train", settings.seed)
        if settings.ablation == "optimal":
            constants = Constants(*(part.clone().requires_grad_() for part in self.fill(None)))
            self.fill = lambda rows, rng=None: constants
            self.parameters |= {f"constants.{name}": part for name, part in constants._asdict().items()}
            groups.append({"params": list(constants), "lr": settings.lr_constants})
        self.optimiser = sampler.optimiser = torch.optim.AdamW(groups, weight_decay=0.0)
        self.history: dict[str, list] = {"step": [], "loss": [], "size": [], "histogram": []}
        self.losses: list[float] = []

    def save(self, rng: Tensor) -> None:
        tensors = {"rng": rng}
        for name, value in self.parameters.items():
            tensors |= {f"{name}/{key}": item for key, item in self.optimiser.state.get(value, {}).items()} | {name: value}
        self.snapshots.save({"step": self.step, "history": self.history, "losses": self.losses}, tensors)

    def load(self) -> None:
        if (state := self.snapshots.load()) is None:
            return
        numbers, tensors = state
        self.step, self.history, self.losses = numbers["step"], numbers["history"], numbers["losses"]
        self.rng.set_state(tensors["rng"])
        for name, value in self.parameters.items():
            value.data.copy_(tensors[name])
            own = {key.split("/")[1]: item for key, item in tensors.items() if key.startswith(f"{name}/")}
            if own:
                self.optimiser.state[value] = {k: v if k == "step" else v.to(value) for k, v in own.items()}

    def backward(self, rows: Int[Tensor, " b"], leaf: Float[Tensor, "n_or_1 n_edges"]) -> float:
        """The mean KL of every mask on its prompt, in micro-batches, with its gradients."""
        fill, which, total = self.fill(rows, self.rng), torch.arange(len(rows)).repeat_interleave(self.settings.masks), 0.0
        tokens, last = batch(self.part, rows)
        for span in chunks(self.masked, len(which), tokens.shape[1]):
            at, mask = which[span], leaf[span] if len(leaf) > 1 else leaf
            options = {"skip_dead": True, "constants_everywhere": self.settings.everywhere}
            logp = self.masked(tokens[at], last[at], mask, fill.rows(at), **options)
            loss = stats.kl(self.full[rows[at]], logp).sum() / len(which)
            loss.backward()
            total += loss.item()
        return total

    def advance(self) -> float:
        """One step; returns its mean KL."""
        sampler, before = self.sampler, self.rng.get_state()
        rows = torch.randperm(len(self.part), generator=self.rng)[: self.settings.prompts]
        alpha, how = sampler.draw(len(rows) * self.settings.masks, self.rng), self.settings.pruning
        pruned = edges = sampler.edges(alpha)
        if how != "none":  # the filter carries no gradient
            pruned = edges * (sampler.graph.prune_dangling(edges.detach() if how == "sample" else edges.detach().amax(0)) > 0)
        leaf = pruned.detach().requires_grad_()
        self.optimiser.zero_grad()
        loss = self.backward(rows, leaf)
        torch.autograd.backward([pruned, sampler.penalty(alpha, self.step)], [leaf.grad, None])
        gradients = [value.grad for value in self.parameters.values() if value.grad is not None]
        if not math.isfinite(loss) or not all(bool(g.isfinite().all()) for g in gradients):
            self.save(before)
            raise RuntimeError(
                f"loss or gradient is not finite at step {self.step} (loss {loss:.3g}); the last good state, before this "
                f"step, is kept in {self.snapshots.path}. A smaller learning rate (lr=, lr_constants=) usually helps"
            )
        torch.nn.utils.clip_grad_norm_(list(sampler.parameters.values()), self.settings.clip)
        for group in self.optimiser.param_groups:
            group["lr"] = group["start"] * sampler.pace(self.step) if "start" in group else group["lr"]
        self.optimiser.step()
        return loss

    @torch.no_grad()
    def report(self) -> None:
        theta, loss = self.sampler.edges(self.sampler.keep()), sum(self.losses) / len(self.losses)
        now = self.step, loss, theta.sum().item(), torch.histc(theta, BINS, 0, 1).int().tolist()
        for entries, value in zip(self.history.values(), now, strict=True):
            entries.append(value)
        self.losses = []

    def run(self, name: str) -> tuple[dict, dict[str, Tensor]]:
        self.load()
        steps, began = self.settings.steps, self.step
        bar = runs.progress(total=steps, desc=name)
        bar.update(began)
        while self.step < steps:
            start = time.perf_counter()
            self.losses.append(self.advance())
            self.step += 1
            bar.update()
            if self.step == began + 2:  # the first one warms up
                runs.announce(f"{name}: {runs.estimate(time.perf_counter() - start, steps - began)}")
            if self.step * REPORTS // steps > (self.step - 1) * REPORTS // steps:
                self.report()
                bar.set_postfix(KL=f"{self.history['loss'][-1]:.3g}", edges=f"{self.history['size'][-1]:.0f}")
            if self.snapshots.due():
                self.save(self.rng.get_state())
        bar.close()
        tensors = {k: v.detach() for k, v in self.parameters.items() if k.startswith("constants.")}
        tensors["theta"] = self.sampler.edges(self.sampler.keep()).detach()
        return edges_of(self.masked.graph, self.sampler.cut()) | {"history": self.history}, tensors


def train(method: str, masked: MaskedModel, task: Task, settings: Training, sampler: type[Sampler], version: int) -> Circuit:
    """The circuit that training this sampler finds; its history holds loss, expected size and histograms of θ, and θ."""
    check(task, settings.ablation, settings.lam, settings.level)
    if settings.pruning not in PRUNING or min(settings.steps, settings.prompts, settings.masks) < 1:
        raise ValueError(f"pruning is one of {', '.join(PRUNING)}; steps, prompts and masks are at least 1: {settings}")

    def compute(snapshots: runs.Snapshots):
        return Trainer(masked, task, settings, sampler(masked.graph, settings), snapshots).run(f"{method} {settings.ablation}")

    aim = f"n_edges={settings.n_edges}" if hasattr(settings, "n_edges") else f"lam={settings.lam:g}"
    return stored(method, masked, task, settings, compute, version, f"{aim}_steps={settings.steps}")
