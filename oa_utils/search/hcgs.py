"""HardConcrete gradient sampling (Louizos et al. 2018, on edges): α is a stretched and clamped concrete variable."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from oa_utils.circuits import Circuit
from oa_utils.search.common import Sampler, Training, train
from oa_utils.search.ugs import learning_rate

VERSION = 1
STRETCH = -0.1, 1.1  # the interval that s in (0, 1) is stretched to before clamping
SLOWER = {"counterfactual": 3.0, "resample": 1.5}


@dataclass(frozen=True)
class HCGSSettings(Training):
    start: float = 0.0  # log α of every edge
    temperature: float = 2 / 3  # where every temperature starts; they are trained, and kept from 0.1 on
    released: bool = False  # stretch as in the authors' code, 1.2 (s − 0.1), to which the penalty does not belong


def uniform(n: int, units: int, rng: torch.Generator) -> Float[Tensor, "n unit"]:
    return torch.rand(n, units, generator=rng).clamp(1e-6, 1 - 1e-6)


def hard_concrete(log_alpha: Tensor, beta: Tensor | float, u: Float[Tensor, "n unit"], stretch=STRETCH) -> Tensor:
    low, high = stretch
    return (((u.logit() + log_alpha) / beta).sigmoid() * (high - low) + low).clamp(0, 1)


def nonzero(log_alpha: Tensor, beta: Tensor | float) -> Tensor:
    """P(α > 0), what an edge is charged for."""
    return (log_alpha - beta * math.log(-STRETCH[0] / STRETCH[1])).sigmoid()


class HardConcrete(Sampler):
    def __init__(self, graph, settings: HCGSSettings):
        super().__init__(graph, settings)
        values = {"log_alpha": settings.start, "temperature": settings.temperature}
        self.parameters = {name: torch.full((self.units,), float(v)).requires_grad_() for name, v in values.items()}

    def groups(self):
        return [{"params": list(self.parameters.values()), "lr": learning_rate(self.settings, SLOWER)}]

    def draw(self, n, rng):
        self.parameters["temperature"].data.clamp_(min=0.1)
        stretch = (-0.12, 1.08) if self.settings.released else STRETCH
        return hard_concrete(*self.parameters.values(), uniform(n, self.units, rng), stretch)

    def keep(self):
        return self.parameters["log_alpha"].sigmoid()

    def penalty(self, alpha, step):
        return self.priced(nonzero(*self.parameters.values()))


def hcgs(masked, task, ablation="optimal", lam=1e-3, steps=300, seed=0, level="edge", **settings) -> Circuit:
    """The circuit of HardConcrete gradient sampling; other settings as in `HCGSSettings`."""
    return train("hcgs", masked, task, HCGSSettings(ablation, lam, steps, seed, level, **settings), HardConcrete, VERSION)
