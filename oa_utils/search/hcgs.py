"""HardConcrete gradient sampling (Louizos et al. 2018, on edges): α is a stretched and clamped
concrete variable."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from oa_utils.circuits import Circuit
from oa_utils.graph import Graph
from oa_utils.masked import MaskedModel
from oa_utils.search.loop import LoopSettings, Sampler, train_circuit
from oa_utils.search.shared import Method
from oa_utils.search.ugs import authors_rate, learning_rate
from oa_utils.store import with_settings
from oa_utils.tasks import Task

VERSION = 2
STRETCH = (-0.1, 1.1)  # the interval that s in (0, 1) is stretched to before clamping
RELEASED = (-0.12, 1.08)  # what 1.2 (s − 0.1) comes to
LEAST_TEMPERATURE = 0.1
SLOWER = {"counterfactual": 3.0, "resample": 1.5}


@dataclass(frozen=True)
class HCGSSettings(LoopSettings):
    start: float = 0.0  # log α of every edge
    temperature: float = 2 / 3  # where every temperature starts; they are trained
    lr_temperature: float | None = None  # None: the authors' rate, not raised for shorter runs
    released: bool = False  # the authors' stretch, to which the penalty does not belong


def uniform(n: int, units: int, rng: torch.Generator) -> Float[Tensor, "n unit"]:
    return torch.rand(n, units, generator=rng).clamp(1e-6, 1 - 1e-6)


def hard_concrete(
    log_alpha: Float[Tensor, " unit"],
    beta: Float[Tensor, " unit"] | float,
    u: Float[Tensor, "n unit"],
    stretch: tuple[float, float] = STRETCH,
) -> Float[Tensor, "n unit"]:
    """α drawn by u; log_alpha moves it, beta is the temperature."""
    low, high = stretch
    s = ((u.logit() + log_alpha) / beta).sigmoid()
    return (s * (high - low) + low).clamp(0, 1)


def nonzero(log_alpha: Tensor, beta: Tensor | float) -> Tensor:
    """P(α > 0), what an edge is charged for."""
    return (log_alpha - beta * math.log(-STRETCH[0] / STRETCH[1])).sigmoid()


class HardConcrete(Sampler):
    def __init__(self, graph: Graph, settings: HCGSSettings):
        super().__init__(graph, settings)
        starts = {"log_alpha": settings.start, "temperature": settings.temperature}
        self.parameters = {
            name: torch.full((self.units,), float(start)).requires_grad_()
            for name, start in starts.items()
        }

    def groups(self) -> list[dict[str, Any]]:
        log_alpha, temperature = self.parameters.values()
        slow = self.settings.lr_temperature
        if slow is None:
            slow = authors_rate(self.settings, SLOWER)
        return [
            {"params": [log_alpha], "lr": learning_rate(self.settings, SLOWER)},
            {"params": [temperature], "lr": slow},
        ]

    def draw(self, n: int, rng: torch.Generator) -> Float[Tensor, "n unit"]:
        log_alpha, temperature = self.parameters.values()
        temperature.data.clamp_(min=LEAST_TEMPERATURE)
        stretch = RELEASED if self.settings.released else STRETCH
        return hard_concrete(log_alpha, temperature, uniform(n, self.units, rng), stretch)

    def keep(self) -> Float[Tensor, " unit"]:
        return self.parameters["log_alpha"].sigmoid()

    def penalty(self, alpha: Float[Tensor, "n unit"], step: int) -> Float[Tensor, ""]:
        return self.priced(nonzero(*self.parameters.values()))


@with_settings
def hcgs(masked: MaskedModel, task: Task, *, settings: HCGSSettings) -> Circuit:
    """The circuit of HardConcrete gradient sampling; settings as in `HCGSSettings`."""
    aim = f"lam={settings.lam:g}"
    return train_circuit("hcgs", masked, task, settings, HardConcrete, VERSION, aim)


METHODS = {"hcgs": Method(hcgs, "lam", trains=True, version=VERSION)}
