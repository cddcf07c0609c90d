"""Why UGS (paper, appendix F.5): three estimators of ∂f/∂θ, one for every edge at once, against the
true marginal gap.

f(θ) is the mean KL over prompts and over circuits with edges drawn by θ. Its slope by θ of one edge
is the mean gap with the edge less that without it, which can be had exactly, edge by edge, but
costs two runs for each edge and draw.
"""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from oa_utils import machine, stats, store
from oa_utils.fills import Activations, Constants, edge_fill, find_ablation
from oa_utils.masked import MaskedModel
from oa_utils.search.hcgs import hard_concrete, uniform
from oa_utils.search.shared import EVALUATION_BATCH, batch_of, check_search, in_parts
from oa_utils.search.ugs import draw, normalise, window
from oa_utils.store import at_least, with_settings
from oa_utils.tasks import Task

VERSION = 1
ESTIMATORS = ("ugs", "hcgs", "importance")
TEMPERATURE = 2 / 3  # of HardConcrete
COLUMNS = ["edge", "true", "se", "mean", "std", "rms", "estimator", "theta"]


@dataclass(frozen=True)
class EstimatorSettings:
    ablation: str = "counterfactual"
    masks: int = 60  # in one estimate
    estimates: int = 40  # of each estimator
    draws: int = 400  # of the other edges, for the true slope
    seed: int = 0

    def __post_init__(self):
        at_least(1, masks=self.masks)
        at_least(2, estimates=self.estimates, draws=self.draws)


class Slopes:
    """KL of prompts under masks, each mask on a prompt of its own, taken as they are (nothing is
    pruned)."""

    def __init__(
        self,
        masked: MaskedModel,
        task: Task,
        theta: Float[Tensor, " n_edges"],
        settings: EstimatorSettings,
    ):
        self.masked = masked
        self.settings = settings
        self.theta = theta
        self.part = task.train
        self.full = self.part.log_probs(masked.model)
        ablation = find_ablation(settings.ablation)
        self.fill = edge_fill(masked, task, ablation, "train", settings.seed)

    def kl(
        self,
        rows: Int[Tensor, " n"],
        mask: Float[Tensor, "n n_edges"],
        fill: Constants | Activations,
    ) -> Float[Tensor, " n"]:
        return stats.kl(self.full[rows], self.masked(*batch_of(self.part, rows), mask, fill))

    def rows(self, n: int, rng: torch.Generator) -> Int[Tensor, " n"]:
        return torch.randint(len(self.part), (n,), generator=rng)

    @torch.no_grad()
    def true(self, edges: list[int]) -> tuple[Float[Tensor, " k"], Float[Tensor, " k"]]:
        """Mean gap with an edge less that without it, with its standard error; the same draws for
        every edge."""
        n = self.settings.draws
        rng = machine.generator(self.settings.seed)
        rows = self.rows(n, rng)
        others = torch.rand(n, len(self.theta), generator=rng) < self.theta

        def changes(span: slice) -> Float[Tensor, "n k"]:
            fill = self.fill(rows[span])
            by_edge = []
            for edge in edges:
                mask = others[span].float()
                mask[:, edge] = 1.0
                kept = self.kl(rows[span], mask, fill)
                mask[:, edge] = 0.0
                by_edge.append(kept - self.kl(rows[span], mask, fill))
            return torch.stack(by_edge, 1)

        length = self.part.tokens.shape[1]
        parts = in_parts(self.masked, n, length, changes, EVALUATION_BATCH, "marginal gaps")
        change = torch.cat(list(parts))
        return change.mean(0), change.std(0) / len(change) ** 0.5

    @torch.no_grad()
    def losses(
        self, alpha: Float[Tensor, "n n_edges"], rows: Int[Tensor, " n"]
    ) -> Float[Tensor, " n"]:
        """KL of every mask."""

        def loss(span: slice) -> Float[Tensor, " n"]:
            return self.kl(rows[span], alpha[span], self.fill(rows[span]))

        return torch.cat(list(in_parts(self.masked, len(rows), self.part.tokens.shape[1], loss)))

    def gradient(
        self, alpha: Float[Tensor, "n n_edges"], rows: Int[Tensor, " n"]
    ) -> Float[Tensor, "n n_edges"]:
        """∂KL/∂α of every mask."""

        def slope(span: slice) -> Float[Tensor, "n n_edges"]:
            leaf = alpha[span].detach().requires_grad_()
            loss = self.kl(rows[span], leaf, self.fill(rows[span])).sum()
            return torch.autograd.grad(loss, leaf)[0]

        return torch.cat(list(in_parts(self.masked, len(rows), self.part.tokens.shape[1], slope)))

    def estimate(self, how: str, rng: torch.Generator) -> Float[Tensor, " n_edges"]:
        """One estimate of all slopes from `masks` runs."""
        n = self.settings.masks
        theta = self.theta.clone().requires_grad_()
        rows = self.rows(n, rng)
        u = uniform(n, len(theta), rng)
        if how == "importance":
            kept = (u < theta.detach()).float()
            loss = self.losses(kept, rows)
            return ((kept / theta - (1 - kept) / (1 - theta)) * loss[:, None]).mean(0).detach()
        if how == "ugs":
            alpha = normalise(draw(theta, u, window(theta)))
        else:  # P(α > ½) = θ
            alpha = hard_concrete(theta.logit(), TEMPERATURE, u)
        alpha.backward(self.gradient(alpha, rows) / n)
        return theta.grad


@with_settings
def estimator_errors(
    masked: MaskedModel,
    task: Task,
    theta: Float[Tensor, " n_edges"],
    edges: list[int],
    *,
    settings: EstimatorSettings,
) -> pd.DataFrame:
    """A row for each estimator and each of some edges: its `true` slope at θ (± `se`), the
    estimator's `mean`, its `std` and `rms` error."""
    check_search(masked, task, settings.ablation, fixed="an estimator")
    if not edges:
        return pd.DataFrame(columns=COLUMNS)

    def compute(_: store.Snapshots) -> dict:
        slopes = Slopes(masked, task, theta, settings)
        true, se = slopes.true(edges)
        rows = []
        for how in ESTIMATORS:
            rng = machine.generator(settings.seed + 1)
            bar = machine.progress(range(settings.estimates), desc=how)
            estimates = torch.stack([slopes.estimate(how, rng)[edges] for _ in bar])
            rms = (estimates - true).square().mean(0).sqrt()
            table = pd.DataFrame(
                {
                    "edge": edges,
                    "true": true.tolist(),
                    "se": se.tolist(),
                    "mean": estimates.mean(0).tolist(),
                    "std": estimates.std(0).tolist(),
                    "rms": rms.tolist(),
                    "estimator": how,
                    "theta": theta[edges].tolist(),
                }
            )
            rows += table.to_dict("records")
        return {"rows": rows}

    result = store.run(
        "estimators",
        settings,
        compute,
        model=masked.model,
        task=task,
        inputs={"edges": edges, "theta": store.fingerprint(theta)} | masked.run_inputs,
        version=VERSION,
        key=f"{task.name}_{settings.ablation}",
    )
    return result.frame()
