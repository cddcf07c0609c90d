"""Why UGS (paper, appendix F.5): three estimators of ∂f/∂θ, one for every edge at once, against the true marginal gap.

f(θ) is the mean KL over prompts and over circuits with edges drawn by θ. Its slope by θ of one edge is the mean gap with
the edge less that without it, which can be had exactly, edge by edge, but costs two runs for each edge and draw.
"""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from oa_utils import runs, stats
from oa_utils.fills import Activations, Constants
from oa_utils.masked import MaskedModel
from oa_utils.search.common import batch, chunks
from oa_utils.search.filling import fill_for
from oa_utils.search.hcgs import hard_concrete, uniform
from oa_utils.search.ugs import draw, normalise, window
from oa_utils.tasks import Task

VERSION = 1
ESTIMATORS = ("ugs", "hcgs", "importance")


@dataclass(frozen=True)
class EstimatorSettings:
    edges: tuple[int, ...]  # those whose true slope is measured
    theta: tuple[float, ...]  # of every edge
    ablation: str = "counterfactual"
    masks: int = 60  # in one estimate
    estimates: int = 40  # of each estimator
    draws: int = 400  # of the other edges, for the true slope
    seed: int = 0


class Slopes:
    """KL of prompts under masks, each mask on a prompt of its own, taken as they are (nothing is pruned)."""

    def __init__(self, masked: MaskedModel, task: Task, settings: EstimatorSettings):
        self.masked, self.settings, self.part = masked, settings, task.train
        self.full, self.theta = self.part.log_probs(masked.model), torch.tensor(settings.theta)
        self.fill = fill_for(masked, task, settings.ablation, "train", settings.seed)

    def kl(self, rows: Int[Tensor, " n"], mask: Float[Tensor, "n n_edges"], fill: Constants | Activations) -> Tensor:
        return stats.kl(self.full[rows], self.masked(*batch(self.part, rows), mask, fill))

    def rows(self, n: int, rng: torch.Generator) -> Int[Tensor, " n"]:
        return torch.randint(len(self.part), (n,), generator=rng)

    @torch.no_grad()
    def true(self) -> tuple[Float[Tensor, " k"], Float[Tensor, " k"]]:
        """Mean gap with an edge less that without it, with its standard error; the same draws for every edge."""
        s, rng = self.settings, runs.generator(self.settings.seed)
        rows, others, found = self.rows(s.draws, rng), torch.rand(s.draws, len(self.theta), generator=rng) < self.theta, []
        spans = list(chunks(self.masked, s.draws, self.part.tokens.shape[1], size=64))
        for span in runs.progress(spans, desc="marginal gaps"):
            fill, change = self.fill(rows[span]), []
            for edge in s.edges:
                both = others[span].float().repeat(2, 1, 1)
                both[0, :, edge], both[1, :, edge] = 1.0, 0.0
                kept, gone = (self.kl(rows[span], mask, fill) for mask in both)
                change.append(kept - gone)
            found.append(torch.stack(change, 1))
        found = torch.cat(found)
        return found.mean(0), found.std(0) / len(found) ** 0.5

    def gradient(self, alpha: Float[Tensor, "n n_edges"], rows: Tensor) -> Float[Tensor, "n n_edges"]:
        """∂KL/∂α of every mask."""
        parts = []
        for span in chunks(self.masked, len(rows), self.part.tokens.shape[1]):
            leaf = alpha[span].detach().requires_grad_()
            self.kl(rows[span], leaf, self.fill(rows[span])).sum().backward()
            parts.append(leaf.grad)
        return torch.cat(parts)

    def estimate(self, how: str, rng: torch.Generator) -> Float[Tensor, " n_edges"]:
        """One estimate of all slopes from `masks` runs."""
        n, theta = self.settings.masks, self.theta.clone().requires_grad_()
        rows, u = self.rows(n, rng), uniform(n, len(theta), rng)
        if how == "importance":
            kept = (u < theta.detach()).float()
            with torch.no_grad():
                loss = self.kl(rows, kept, self.fill(rows))
            return ((kept / theta - (1 - kept) / (1 - theta)) * loss[:, None]).mean(0).detach()
        if how == "ugs":
            alpha = normalise(draw(theta, u, window(theta)))
        else:  # P(α > ½) = θ
            alpha = hard_concrete(theta.logit(), 2 / 3, u)
        alpha.backward(self.gradient(alpha, rows) / n)
        return theta.grad


def estimator_errors(masked: MaskedModel, task: Task, settings: EstimatorSettings) -> pd.DataFrame:
    """A row for each estimator and edge: its `true` slope (± `se`), the estimator's `mean`, its `std` and `rms` error."""

    def compute(_):
        s, slopes, rows = settings, Slopes(masked, task, settings), []
        true, se = slopes.true()
        for how in ESTIMATORS:
            rng = runs.generator(s.seed + 1)
            bar = runs.progress(range(s.estimates), desc=how)
            found = torch.stack([slopes.estimate(how, rng)[list(s.edges)] for _ in bar])
            mean, std, rms = found.mean(0), found.std(0), (found - true).square().mean(0).sqrt()
            columns = {"edge": torch.tensor(s.edges), "true": true, "se": se, "mean": mean, "std": std, "rms": rms}
            table = pd.DataFrame({k: v.tolist() for k, v in columns.items()})
            rows += table.assign(estimator=how, theta=[s.theta[e] for e in s.edges]).to_dict("records")
        return {"rows": rows}

    about = {"model": masked.model, "task": task, "version": VERSION, "key": settings.ablation}
    return runs.run("estimators", settings, compute, **about).frame()
