"""Edge Pruning (Bhaskar et al. 2024): HardConcrete masks, drawn towards a number of edges by a
Lagrangian.

As published: one mask for all prompts of a step, log α from 10, fixed temperature, AdamW with its
default decay and a rate of 0.8 that rises and falls linearly, a target that grows over the first
five sixths of the steps, and two multipliers that are raised as long as the target is missed. Left
out are their second masks on whole vertices, a detour to the same edges.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from oa_utils import machine
from oa_utils.circuits import Circuit
from oa_utils.graph import Graph
from oa_utils.masked import MaskedModel
from oa_utils.search.eap import top_edges
from oa_utils.search.hcgs import hard_concrete, uniform
from oa_utils.search.loop import LoopSettings, Sampler, train_circuit
from oa_utils.search.shared import Method, check_size
from oa_utils.store import at_least, with_settings
from oa_utils.tasks import Task

VERSION = 2
DECAY = 0.01  # AdamW's default


@dataclass(frozen=True)
class EdgePruningSettings(LoopSettings):
    ablation: str = "counterfactual"
    lam: float = 0.0  # the multipliers take its place
    prompts: int = 32
    masks: int = 1
    lr: float = 0.8
    lr_multipliers: float = 0.8  # less for a few dozen edges: each feels multiplier / n_edges
    clip: float = 1.0
    n_edges: int = 100
    temperature: float = 2 / 3
    ramp: float = 5 / 6  # share of the steps in which the target grows
    warmup: float = 1 / 15  # share of the steps in which the learning rate rises

    def __post_init__(self):
        super().__post_init__()
        at_least(0, ramp=self.ramp, warmup=self.warmup)
        if not self.warmup < 1:
            raise ValueError(f"warmup is a share of the steps below 1, got {self.warmup}")
        if self.level != "edge":
            raise ValueError(
                "Edge Pruning aims at a number of edges, so it searches edges; "
                f"level={self.level!r} is for ugs, hcgs and acdc"
            )


class Lagrangian(Sampler):
    def __init__(self, graph: Graph, settings: EdgePruningSettings):
        super().__init__(graph, settings)
        noise = torch.randn(self.units, generator=machine.generator(settings.seed))
        self.parameters = {
            "log_alpha": (10 + 0.01 * noise).requires_grad_(),
            "multipliers": torch.zeros(2, requires_grad=True),
        }

    def groups(self) -> list[dict[str, Any]]:
        log_alpha, multipliers = self.parameters.values()
        lowered = {"params": [log_alpha], "lr": self.settings.lr}
        raised = {"params": [multipliers], "lr": self.settings.lr_multipliers, "maximize": True}
        return [group | {"weight_decay": DECAY} for group in (lowered, raised)]

    def draw(self, n: int, rng: torch.Generator) -> Float[Tensor, "1 unit"]:
        log_alpha = self.parameters["log_alpha"]
        return hard_concrete(log_alpha, self.settings.temperature, uniform(1, self.units, rng))

    def keep(self) -> Float[Tensor, " unit"]:
        return self.parameters["log_alpha"].sigmoid()

    def penalty(self, alpha: Float[Tensor, "n unit"], step: int) -> Float[Tensor, ""]:
        settings = self.settings
        grown = min(1.0, step / max(1.0, settings.ramp * settings.steps))
        target = (1 - settings.n_edges / self.units) * grown
        miss = 1 - alpha.mean() - target  # sparsity too much
        return self.parameters["multipliers"] @ torch.stack([miss, miss.square()])

    def pace(self, step: int) -> float:
        steps = self.settings.steps
        rise = self.settings.warmup * steps
        return min((step + 1) / max(1.0, rise), (steps - step) / (steps - rise))

    def cut(self) -> Tensor:
        log_alpha = self.parameters["log_alpha"].detach()
        return top_edges(self.graph, log_alpha, self.settings.n_edges)


@with_settings
def edge_pruning(masked: MaskedModel, task: Task, *, settings: EdgePruningSettings) -> Circuit:
    """The circuit of Edge Pruning with at most `n_edges`; settings as in `EdgePruningSettings`."""
    check_size(settings.n_edges, masked.graph)
    aim = f"n_edges={settings.n_edges}"
    return train_circuit("edge_pruning", masked, task, settings, Lagrangian, VERSION, aim)


def _check(masked: MaskedModel, task: Task, n_edges: float, **arguments: Any) -> None:
    check_size(n_edges, masked.graph)


METHODS = {
    "edge_pruning": Method(edge_pruning, "n_edges", trains=True, check=_check, version=VERSION)
}
