"""The loop that trains a distribution over masks: what UGS, HCGS and Edge Pruning have in common.

A step draws a few prompts and several masks for each, prunes dangling edges mask by mask, runs the
masked model, and moves the distribution down the gradient of KL(full ‖ masked) + price. What
differs between algorithms is the `Sampler`.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import torch
from einops import repeat
from jaxtyping import Float, Int
from torch import Tensor

from oa_utils import machine, stats
from oa_utils.circuits import Circuit
from oa_utils.fills import Constants, edge_constants, edge_fill, find_ablation
from oa_utils.graph import Graph
from oa_utils.masked import MaskedModel
from oa_utils.search.shared import (
    Training,
    add_gradients,
    batch_of,
    check_price,
    check_search,
    check_start,
    kept_edges,
    largest_rate,
    scaled_rate,
    stored_circuit,
    suited,
    whole,
)
from oa_utils.store import Snapshots, at_least
from oa_utils.tasks import Task

PRUNING = ("sample", "batch", "none")
BINS = 20  # of the histograms of θ in a history
REPORTS = 30  # entries of a history
MOST_RATE = 0.04  # of constants


@dataclass(frozen=True)
class LoopSettings:
    """Settings of the searches that train; the algorithms add their own."""

    ablation: str = "optimal"
    lam: float = 1e-3  # price of one edge (level `vertex`: of one vertex) in nats
    steps: int = 300
    seed: int = 0
    level: str = "edge"  # `vertex`: the out-edges of a vertex share one α
    prompts: int = 5  # different prompts in a step
    masks: int = 12  # masks drawn for each prompt
    lr: float | None = None  # Adam on the logits; None: by λ, ablation and steps, see `ugs`
    lr_constants: float | None = None  # Adam on the constants of `optimal`; None: by steps
    gamma: float = 0.5  # weight of the price of vertices against that of edges
    clip: float = 5.0  # L2 norm of the logits' gradient
    tau: float = 0.5  # an edge is kept in the end where its probability is above
    pruning: str = "sample"  # mask by mask; `batch`: where edges dangle in all masks; `none`
    everywhere: bool = False  # constants get gradient along every edge, not only where α = 0

    def __post_init__(self):
        check_price(self.lam, self.level)
        whole(1, steps=self.steps, prompts=self.prompts, masks=self.masks)
        at_least(0, lr=self.lr or 0, lr_constants=self.lr_constants or 0, gamma=self.gamma)
        at_least(1e-9, clip=self.clip)
        if self.pruning not in PRUNING:
            raise ValueError(f"pruning is one of {', '.join(PRUNING)}, not {self.pruning!r}")

    @property
    def rate_of_constants(self) -> float:
        """The authors' 0.002 for 6,000 steps; shorter runs take as much larger a rate."""
        if self.lr_constants is not None:
            return self.lr_constants
        return scaled_rate(0.002, 6000, self.steps, MOST_RATE)

    def suited(self, n_layers: int) -> LoopSettings:
        """With a rate of constants that a model of so many layers can take, where none is given."""
        return suited(self, "lr_constants", self.rate_of_constants, largest_rate(n_layers))


def price(
    graph: Graph, theta: Float[Tensor, " n_edges"], lam: float, gamma: float
) -> Float[Tensor, ""]:
    """λ Σθ + γλ Σ_A ½|E_A| tanh(2ε_A/|E_A|), with ε_A the sum of θ over the |E_A| edges at A, for
    every vertex A."""
    ends = theta.new_zeros(graph.n_vertices)
    ends = ends.index_add(0, graph.src, theta).index_add(0, graph.dst, theta)
    half = graph.degree.to(theta) / 2
    return lam * (theta.sum() + gamma * (half * torch.tanh(ends / half)).sum())


class Sampler:
    """A distribution over masks with one entry for each unit: an edge, or a vertex whose out-edges
    share it.

    An algorithm adds `parameters` by name, `groups()` of them for AdamW, `draw(n, rng)` -> [n unit]
    with the gradients it wants, and `keep()` -> [unit], how likely each is in the circuit. All of
    it lives on the CPU, the model need not.
    """

    optimiser: torch.optim.Optimizer  # set by the loop
    parameters: dict[str, Tensor]

    def __init__(self, graph: Graph, settings: Any):
        self.graph = graph
        self.settings = settings
        self.by_edge = settings.level == "edge"
        self.units = len(graph) if self.by_edge else graph.n_vertices - 1

    def groups(self) -> list[dict[str, Any]]:
        raise NotImplementedError

    def draw(self, n: int, rng: torch.Generator) -> Float[Tensor, "n unit"]:
        raise NotImplementedError

    def keep(self) -> Float[Tensor, " unit"]:
        raise NotImplementedError

    def edges(self, units: Tensor) -> Tensor:
        """What holds for units [… unit], for their edges [… n_edges]."""
        return units if self.by_edge else units[..., self.graph.src]

    def priced(self, theta: Float[Tensor, " unit"]) -> Float[Tensor, ""]:
        if self.by_edge:
            return price(self.graph, theta, self.settings.lam, self.settings.gamma)
        return self.settings.lam * theta.sum()

    def penalty(self, alpha: Float[Tensor, "n unit"], step: int) -> Float[Tensor, ""]:
        return self.priced(self.keep())

    def pace(self, step: int) -> float:
        """Factor on the learning rates."""
        return 1.0

    def cut(self) -> Tensor:
        """The circuit in the end, as a mask of edges."""
        return self.edges(self.keep() > self.settings.tau)


class Trainer(Training):
    """One training run of a sampler."""

    def __init__(
        self,
        masked: MaskedModel,
        task: Task,
        settings: LoopSettings,
        sampler: Sampler,
        snapshots: Snapshots,
        constants: Constants | None = None,
    ):
        super().__init__(masked, task, settings, snapshots)
        self.sampler = sampler
        self.rng = machine.generator(settings.seed + 1)
        self.history: dict[str, list] = {"step": [], "loss": [], "size": [], "histogram": []}
        self.losses: list[float] = []  # since the last report
        self.parameters = dict(sampler.parameters)
        groups = [group | {"start": group["lr"]} for group in sampler.groups()]
        ablation = find_ablation(settings.ablation)
        self.constants: Constants | None = None
        if ablation.trained:
            start = edge_constants(masked, task, ablation) if constants is None else constants
            self.constants = Constants(*(part.clone().requires_grad_() for part in start))
            for name, part in self.constants._asdict().items():
                self.parameters[f"constants.{name}"] = part
            groups.append({"params": list(self.constants), "lr": settings.rate_of_constants})
        else:
            self.fill = edge_fill(masked, task, ablation, "train", settings.seed)
        self.optimiser = torch.optim.AdamW(groups, weight_decay=0.0)
        sampler.optimiser = self.optimiser

    # ---- going on after a stop

    def state(self) -> dict[str, Any]:
        kept = {"history": self.history, "losses": self.losses, "rng": self.rng.get_state()}
        return super().state() | kept

    def resume(self) -> dict[str, Any] | None:
        state = super().resume()
        if state is not None:
            self.history = state["history"]
            self.losses = state["losses"]
            self.rng.set_state(state["rng"])
        return state

    # ---- one step

    def backward(self, rows: Int[Tensor, " b"], leaf: Float[Tensor, "n_or_1 n_edges"]) -> float:
        """The mean KL of every mask on its prompt, in micro-batches, with its gradients."""
        fill = self.constants if self.constants is not None else self.fill(rows, self.rng)
        which = repeat(torch.arange(len(rows)), "b -> (b mask)", mask=self.settings.masks)
        tokens, last = batch_of(self.part, rows)

        def loss(span: slice) -> Float[Tensor, ""]:
            at = which[span]
            logp = self.masked(
                tokens[at],
                last[at],
                leaf[span] if len(leaf) > 1 else leaf,
                fill.rows(at),
                skip_dead=True,
                constants_everywhere=self.settings.everywhere,
            )
            return stats.kl(self.full[rows[at]], logp).sum() / len(which)

        inputs = [leaf, *(self.constants or ())]
        return add_gradients(self.masked, len(which), tokens.shape[1], loss, inputs)

    def pruned(self, edges: Float[Tensor, "n n_edges"]) -> Float[Tensor, "n n_edges"]:
        """Masks without dangling edges; the filter carries no gradient."""
        how = self.settings.pruning
        if how == "none":
            return edges
        judged = edges.detach() if how == "sample" else edges.detach().amax(0)
        return edges * (self.sampler.graph.prune_dangling(judged) > 0)

    def advance(self) -> float:
        """One step; returns its mean KL."""
        sampler = self.sampler
        rng_before = self.rng.get_state()
        rows = torch.randperm(len(self.part), generator=self.rng)[: self.settings.prompts]
        alpha = sampler.draw(len(rows) * self.settings.masks, self.rng)
        masks = self.pruned(sampler.edges(alpha))
        leaf = masks.detach().requires_grad_()
        self.optimiser.zero_grad()
        loss = self.backward(rows, leaf)
        torch.autograd.backward([masks, sampler.penalty(alpha, self.step)], [leaf.grad, None])
        self._refuse_non_finite(loss, rng_before)
        torch.nn.utils.clip_grad_norm_(list(sampler.parameters.values()), self.settings.clip)
        for group in self.optimiser.param_groups:
            if "start" in group:
                group["lr"] = group["start"] * sampler.pace(self.step)
        self.optimiser.step()
        return loss

    def _refuse_non_finite(self, loss: float, rng_before: Tensor) -> None:
        gradients = [value.grad for value in self.parameters.values() if value.grad is not None]
        if math.isfinite(loss) and all(bool(g.isfinite().all()) for g in gradients):
            return
        self.snapshots.save(self.state() | {"rng": rng_before})
        raise RuntimeError(
            f"loss or gradient is not finite at step {self.step} (loss {loss:.3g}); the last good "
            f"state, before this step, is kept in {self.snapshots.path}. A smaller learning rate "
            "(lr=, lr_constants=) usually helps"
        )

    # ---- all steps

    @torch.no_grad()
    def report(self) -> None:
        theta = self.sampler.edges(self.sampler.keep())
        self.history["step"].append(self.step)
        self.history["loss"].append(sum(self.losses) / len(self.losses))
        self.history["size"].append(theta.sum().item())
        self.history["histogram"].append(torch.histc(theta, BINS, 0, 1).int().tolist())
        self.losses = []

    def run(self, name: str) -> tuple[dict, dict[str, Tensor]]:
        self.resume()
        steps = self.settings.steps
        began = self.step
        bar = machine.progress(total=steps, desc=name)
        bar.update(began)
        while self.step < steps:
            start = time.perf_counter()
            self.losses.append(self.advance())
            self.step += 1
            bar.update()
            if self.step == began + 2:  # the first one warms up
                cost = machine.estimate(time.perf_counter() - start, steps - self.step)
                machine.announce(f"{name}: {cost}")
            if self.step * REPORTS // steps > (self.step - 1) * REPORTS // steps:
                self.report()
                size = f"{self.history['size'][-1]:.0f}"
                bar.set_postfix(KL=f"{self.history['loss'][-1]:.3g}", edges=size)
            self.snapshots.save_when_due(self.state)
        bar.close()
        tensors = {} if self.constants is None else dict(self.constants.clone()._asdict())
        tensors["theta"] = self.sampler.edges(self.sampler.keep()).detach()
        numbers = kept_edges(self.masked.graph, self.sampler.cut())
        return numbers | {"history": self.history}, tensors


def train_circuit(
    method: str,
    masked: MaskedModel,
    task: Task,
    settings: Any,
    sampler: type[Sampler],
    version: int,
    aim: str,
    constants: Constants | None = None,
) -> Circuit:
    """The circuit that training this sampler finds; its history holds loss, expected size and
    histograms of θ, and θ."""
    check_search(masked, task, settings.ablation)
    check_start(constants, settings.ablation)
    if find_ablation(settings.ablation).trained:
        settings = settings.suited(masked.graph.n_layers)

    def compute(snapshots: Snapshots) -> tuple[dict, dict[str, Tensor]]:
        distribution = sampler(masked.graph, settings)
        trainer = Trainer(masked, task, settings, distribution, snapshots, constants)
        return trainer.run(f"{method} {settings.ablation}")

    words = f"{aim}_steps={settings.steps}"
    return stored_circuit(method, masked, task, settings, compute, version, words, constants)
