"""Edge Pruning (Bhaskar et al. 2024): HardConcrete masks, drawn towards a number of edges by a Lagrangian.

As published: one mask for all prompts of a step, log α from 10, fixed temperature, AdamW with its default decay and a rate
of 0.8 that rises and falls linearly, a target that grows over the first five sixths of the steps, and two multipliers that
are raised as long as the target is missed. Left out are their second masks on whole vertices, a detour to the same edges.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from oa_utils import runs
from oa_utils.circuits import Circuit
from oa_utils.search.common import Sampler, Training, check, train
from oa_utils.search.eap import top_edges
from oa_utils.search.hcgs import hard_concrete, uniform

VERSION = 1


@dataclass(frozen=True)
class EdgePruningSettings(Training):
    lam: float = 0.0  # the multipliers take its place
    prompts: int = 32
    masks: int = 1
    lr: float = 0.8
    lr_multipliers: float = 0.8  # for graphs of a few dozen edges less: each edge feels multiplier / n_edges of the graph
    clip: float = 1.0
    n_edges: int = 100
    temperature: float = 2 / 3
    ramp: float = 5 / 6  # share of the steps in which the target grows
    warmup: float = 1 / 15  # share of the steps in which the learning rate rises


class Lagrangian(Sampler):
    def __init__(self, graph, settings: EdgePruningSettings):
        super().__init__(graph, settings)
        start = 10 + 0.01 * torch.randn(self.units, generator=runs.generator(settings.seed))
        self.parameters = {"log_alpha": start.requires_grad_(), "multipliers": torch.zeros(2, requires_grad=True)}

    def groups(self):
        (log_alpha, multipliers), s = self.parameters.values(), self.settings
        raised = {"params": [multipliers], "lr": s.lr_multipliers, "maximize": True, "weight_decay": 0.01}
        return [{"params": [log_alpha], "lr": s.lr, "weight_decay": 0.01}, raised]

    def draw(self, n, rng):
        return hard_concrete(self.parameters["log_alpha"], self.settings.temperature, uniform(1, self.units, rng))

    def keep(self):
        return self.parameters["log_alpha"].sigmoid()

    def penalty(self, alpha, step):
        s = self.settings
        target = (1 - s.n_edges / self.units) * min(1.0, step / max(1.0, s.ramp * s.steps))
        miss = 1 - alpha.mean() - target  # sparsity too much
        return self.parameters["multipliers"] @ torch.stack([miss, miss.square()])

    def pace(self, step):
        rise, steps = self.settings.warmup * self.settings.steps, self.settings.steps
        return min((step + 1) / max(1.0, rise), (steps - step) / (steps - rise))

    def cut(self):
        return top_edges(self.graph, self.parameters["log_alpha"].detach(), self.settings.n_edges)


def edge_pruning(masked, task, ablation="counterfactual", n_edges=100, steps=300, seed=0, **settings) -> Circuit:
    """The circuit of Edge Pruning with at most `n_edges`; other settings as in `EdgePruningSettings`."""
    check(task, ablation, n_edges=n_edges, graph=masked.graph)
    own = EdgePruningSettings(ablation, steps=steps, seed=seed, n_edges=n_edges, **settings)
    return train("edge_pruning", masked, task, own, Lagrangian, VERSION)
