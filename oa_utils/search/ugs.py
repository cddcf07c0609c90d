"""Uniform gradient sampling (paper §3.1, appendices F.5 to F.8).

Every edge has a probability θ = σ(θ̃). In most masks it is kept or ablated by that probability; in
a share w(θ) of them its α is uniform on (0, 1), and there the gradient by α estimates the marginal
gap, since ∫ ∂L/∂α dα = L(1) − L(0).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from oa_utils import machine
from oa_utils.circuits import Circuit
from oa_utils.fills import Constants, find_ablation
from oa_utils.graph import Graph
from oa_utils.masked import MaskedModel
from oa_utils.search.loop import LoopSettings, Sampler, train_circuit
from oa_utils.search.shared import Method, scaled_rate
from oa_utils.store import frozen, with_settings
from oa_utils.tasks import Task

VERSION = 2
SLOWER = {"counterfactual": 5.0, "resample": 2.0}  # ablations with steep gradients
BETAS = (0.9, 0.995)  # of Adam on the logits


@dataclass(frozen=True)
class UGSSettings(LoopSettings):
    window: float = 1.0  # c in w = c θ(1−θ), at most 2
    variance: Sequence[float] | None = None  # times each edge's relative spread, so bounded
    start: float = 1.0  # θ̃ of every edge
    noise: float = 0.0  # standard deviation of a random start

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "variance", frozen(self.variance))
        if not 0 < self.window <= 2:
            raise ValueError(
                f"the window's factor must be above 0 and at most 2, got {self.window}"
            )


def authors_rate(settings: LoopSettings, slower: dict[str, float]) -> float:
    """The authors' rate: larger for a small price, smaller for ablations with steep gradients."""
    base = 0.15 if settings.lam <= 1e-4 else 0.1 if settings.lam <= 5e-4 else 0.05
    return base / slower.get(settings.ablation, 1.0)


def learning_rate(settings: LoopSettings, slower: dict[str, float]) -> float:
    """Runs shorter than the authors' (6,000 steps where constants train along, else 3,000) take as
    much larger a rate, up to 0.3."""
    if settings.lr is not None:
        return settings.lr
    their_steps = 6000 if find_ablation(settings.ablation).trained else 3000
    return scaled_rate(authors_rate(settings, slower), their_steps, settings.steps, 0.3)


def window(theta: Float[Tensor, " unit"], factor: float | Tensor = 1.0) -> Float[Tensor, " unit"]:
    """How often each α is drawn from (0, 1): c θ(1−θ), never more than twice the smaller of θ and
    1−θ."""
    theta = theta.detach()
    widest = 2 * torch.minimum(theta, 1 - theta)
    return torch.minimum(factor * theta * (1 - theta), widest).clamp(min=1e-12)


def inside(alpha: Tensor) -> Tensor:
    """1 where α is strictly between 0 and 1."""
    return ((alpha > 0) & (alpha < 1)).to(alpha.dtype)


def draw(
    theta: Float[Tensor, " unit"], u: Float[Tensor, "n unit"], w: Float[Tensor, " unit"]
) -> Float[Tensor, "n unit"]:
    """α = clamp(½ + (θ − u)/w): uniform with probability w, else 1 or 0, with mean θ; dα/dθ is 1 in
    the window, else 0."""
    alpha = (0.5 + (theta.detach() - u) / w).clamp(0, 1)
    return alpha + inside(alpha) * (theta - theta.detach())


def normalise(alpha: Float[Tensor, "n unit"]) -> Float[Tensor, "n unit"]:
    """The same α with gradients times n/N_k: a mean over n examples becomes one over the N_k in the
    window of edge k."""
    scale = len(alpha) / inside(alpha.detach()).sum(0).clamp(min=1)
    return alpha.detach() + scale * (alpha - alpha.detach())


class Uniform(Sampler):
    def __init__(self, graph: Graph, settings: UGSSettings):
        super().__init__(graph, settings)
        noise = torch.randn(self.units, generator=machine.generator(settings.seed))
        self.parameters = {"logits": (settings.start + settings.noise * noise).requires_grad_()}

    def groups(self) -> list[dict[str, Any]]:
        rate = learning_rate(self.settings, SLOWER)
        return [{"params": [self.parameters["logits"]], "lr": rate, "betas": BETAS}]

    def keep(self) -> Float[Tensor, " unit"]:
        return self.parameters["logits"].sigmoid()

    def draw(self, n: int, rng: torch.Generator) -> Float[Tensor, "n unit"]:
        theta = self.keep()
        w = window(theta, self.settings.window * self.spread())
        u = torch.rand(n, self.units, generator=rng)
        return normalise(draw(theta, u, w))

    def spread(self) -> Tensor | float:
        """Of each gradient by Adam's second moment, relative to their mean (cut at the 99 %
        quantile)."""
        state = self.optimiser.state.get(self.parameters["logits"])
        if self.settings.variance is None or not state:
            return 1.0
        std = (state["exp_avg_sq"] / (1 - BETAS[1] ** float(state["step"]))).sqrt()
        mean = std.clamp(max=std.quantile(0.99)).mean().clamp(min=1e-12)
        return (std / mean).clamp(*self.settings.variance)


@with_settings
def ugs(
    masked: MaskedModel,
    task: Task,
    *,
    constants: Constants | None = None,
    settings: UGSSettings,
) -> Circuit:
    """The circuit of uniform gradient sampling; settings as in `UGSSettings`.

    Under `optimal` the constants that train along start from the means, or from `constants`; where
    these have an axis of positions, every position has its own.
    """
    aim = f"lam={settings.lam:g}"
    return train_circuit("ugs", masked, task, settings, Uniform, VERSION, aim, constants)


METHODS = {"ugs": Method(ugs, "lam", trains=True, version=VERSION)}
