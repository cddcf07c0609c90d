"""Uniform gradient sampling (paper §3.1, appendices F.5 to F.8).

Every edge has a probability θ = σ(θ̃). In most masks it is kept or ablated by that probability; in a share w(θ) of them
its α is uniform on (0, 1), and there the gradient by α estimates the marginal gap, since ∫ ∂L/∂α dα = L(1) − L(0).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from oa_utils import runs
from oa_utils.circuits import Circuit
from oa_utils.search.common import Sampler, Training, train

VERSION = 1
SLOWER = {"counterfactual": 5.0, "resample": 2.0}


@dataclass(frozen=True)
class UGSSettings(Training):
    window: float = 1.0  # c in w = c θ(1−θ), at most 2
    variance: tuple[float, float] | None = None  # times each edge's relative gradient spread too, within these bounds
    start: float = 1.0  # θ̃ of every edge
    noise: float = 0.0  # standard deviation of a random start


def learning_rate(settings: Training, slower: dict[str, float]) -> float:
    """The authors' rate: larger for a small price, smaller for ablations with steep gradients.

    Runs shorter than theirs (6,000 steps for `optimal`, 3,000 for the others) take as much larger a rate, up to 0.3.
    """
    if settings.lr is not None:
        return settings.lr
    base = 0.15 if settings.lam <= 1e-4 else 0.1 if settings.lam <= 5e-4 else 0.05
    theirs = base / slower.get(settings.ablation, 1.0)
    return max(theirs, min(0.3, theirs * (6000 if settings.ablation == "optimal" else 3000) / settings.steps))


def window(theta: Float[Tensor, " unit"], factor: float | Tensor = 1.0) -> Float[Tensor, " unit"]:
    """How often each α is drawn from (0, 1): c θ(1−θ), never more than twice the smaller of θ and 1−θ."""
    theta = theta.detach()
    return torch.minimum(factor * theta * (1 - theta), 2 * torch.minimum(theta, 1 - theta)).clamp(min=1e-12)


def inside(alpha: Tensor) -> Tensor:
    return ((alpha > 0) & (alpha < 1)).to(alpha.dtype)


def draw(theta: Float[Tensor, " unit"], u: Float[Tensor, "n unit"], w: Float[Tensor, " unit"]) -> Float[Tensor, "n unit"]:
    """α = clamp(½ + (θ − u)/w): uniform with probability w, else 1 or 0, with mean θ; dα/dθ is 1 in the window, else 0."""
    alpha = (0.5 + (theta.detach() - u) / w).clamp(0, 1)
    return alpha + inside(alpha) * (theta - theta.detach())


def normalise(alpha: Float[Tensor, "n unit"]) -> Float[Tensor, "n unit"]:
    """The same α with gradients times n/N_k: a mean over n examples becomes one over the N_k in the window of edge k."""
    scale = len(alpha) / inside(alpha.detach()).sum(0).clamp(min=1)
    return alpha.detach() + scale * (alpha - alpha.detach())


class Uniform(Sampler):
    def __init__(self, graph, settings: UGSSettings):
        super().__init__(graph, settings)
        noise = torch.randn(self.units, generator=runs.generator(settings.seed))
        self.parameters = {"logits": (settings.start + settings.noise * noise).requires_grad_()}

    def groups(self):
        return [{"params": [self.parameters["logits"]], "lr": learning_rate(self.settings, SLOWER), "betas": (0.9, 0.995)}]

    def keep(self):
        return self.parameters["logits"].sigmoid()

    def draw(self, n, rng):
        theta = self.keep()
        w = window(theta, self.settings.window * self.spread())
        return normalise(draw(theta, torch.rand(n, self.units, generator=rng), w))

    def spread(self) -> Tensor | float:
        """Of each gradient by Adam's second moment, relative to their mean (cut at the 99 % quantile)."""
        state = self.optimiser.state.get(self.parameters["logits"])
        if self.settings.variance is None or not state:
            return 1.0
        std = (state["exp_avg_sq"] / (1 - 0.995 ** float(state["step"]))).sqrt()
        return (std / std.clamp(max=std.quantile(0.99)).mean().clamp(min=1e-12)).clamp(*self.settings.variance)


def ugs(masked, task, ablation="optimal", lam=1e-3, steps=300, seed=0, level="edge", **settings) -> Circuit:
    """The circuit of uniform gradient sampling; other settings as in `UGSSettings`."""
    if not 0 < settings.get("window", 1.0) <= 2:
        raise ValueError(f"the window's factor must be above 0 and at most 2, got {settings['window']}")
    return train("ugs", masked, task, UGSSettings(ablation, lam, steps, seed, level, **settings), Uniform, VERSION)
