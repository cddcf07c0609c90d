"""Edge attribution patching (Syed et al. 2023) and its integrated form EAP-IG (Hanna et al. 2024).

An edge carries fill + α (value − fill), so (value − fill) · ∂metric/∂input is the gradient by α: with every α at 1 one
backward pass scores all edges, and that is EAP. KL(full ‖ masked) has no slope there, where it is zero and smallest, so the
metric is the answer's logit difference; along a path of masks, from all ablated to all kept, KL does have slopes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from oa_utils import runs
from oa_utils.circuits import Circuit
from oa_utils.components import score
from oa_utils.fills import Constants
from oa_utils.graph import Graph
from oa_utils.masked import MaskedModel
from oa_utils.search.common import as_circuit, batch, check, chunks
from oa_utils.search.filling import fill_for
from oa_utils.tasks import Task

VERSION = 1
PATHS = {"inputs": "logit_diff", "masks": "kl"}  # and the metric on each


@dataclass(frozen=True)
class EAPSettings:
    ablation: str = "counterfactual"
    path: str = "inputs"  # from ablated to clean embeddings, as published; `masks`: from every α at 0 to 1
    points: int = 1  # on the path; one on that of inputs, the clean end, is plain EAP
    seed: int = 0


class Scores:
    def __init__(self, masked: MaskedModel, task: Task, settings: EAPSettings):
        self.masked, self.part, self.settings, self.n = masked, task.train, settings, len(masked.graph)
        self.fill = fill_for(masked, task, settings.ablation, "train", settings.seed)
        self.full = self.part.log_probs(masked.model)

    def gradient(self, rows: Tensor, mask: Tensor, fill) -> Float[Tensor, " n_edges"]:
        """Sum over prompts of the metric's gradient by every α."""
        mask, part = mask[None].requires_grad_(), self.part[rows]
        logp = self.masked(*batch(self.part, rows), mask, fill)
        lost = score(PATHS[self.settings.path], self.full[rows], logp, part.right, part.wrong)
        return -torch.autograd.grad(lost.sum(), mask)[0][0].cpu()

    def masks(self, rows: Tensor, fill) -> Float[Tensor, " n_edges"]:
        """Summed over midpoints of the path, so that the mean adds up over edges to what the whole path changes."""
        at = [(k + 0.5) / self.settings.points for k in range(self.settings.points)]
        return sum(self.gradient(rows, torch.full((self.n,), a), fill) for a in at)

    def inputs(self, rows: Tensor, fill) -> Float[Tensor, " n_edges"]:
        """(clean − fill) · ∂metric/∂input, summed over inputs between the ablated and the clean ones.

        Ablating embed's edges in part gives such an input. Kept edges do not feel their fill, so it can be chosen: the
        gradient by α is (value − fill) · slope, and less (value − clean) · slope it is what is asked for.
        """
        tokens, points, total = batch(self.part, rows)[0], self.settings.points, torch.zeros(self.n)
        embed = fill.embed
        if isinstance(fill, Constants):
            embed = embed[torch.arange(tokens.shape[1]).clamp(max=len(embed) - 1)].expand(len(rows), -1, -1)
        clean, from_embed = self.masked.activations(tokens)._replace(embed=embed), self.masked.graph.src == 0
        for k in range(1, points + 1):
            mask = torch.where(from_embed, k / points, 1.0)
            total += self.gradient(rows, mask, fill)
            if k < points:  # at the clean end values are clean
                total -= self.gradient(rows, mask, clean) * ~from_embed
        return total

    def all(self) -> Float[Tensor, " n_edges"]:
        (n, length), path = self.part.tokens.shape, getattr(self, self.settings.path)
        spans = list(chunks(self.masked, n, length, size=64))
        rows = [torch.arange(n)[span] for span in runs.progress(spans, desc=f"EAP {self.settings.ablation}")]
        return sum(path(r, self.fill(r)) for r in rows) / n / self.settings.points


def check_eap(task: Task, settings: EAPSettings) -> None:
    """Refuse, before any work, what EAP cannot score."""
    check(task, settings.ablation, fixed="EAP")
    if settings.path not in PATHS or settings.points < 1:
        raise ValueError(f"path is one of {', '.join(PATHS)} and has at least one point, got {settings}")
    if settings.path == "inputs" and not all((ids >= 0).any(-1).all() for ids in (task.right, task.wrong)):
        raise ValueError(
            f"EAP takes the slope of log P(right) − log P(wrong), but task '{task.name}' does not name both for every prompt; "
            "give Task.from_text(..., wrong=[...]), or use eap_ig(path='masks'), which needs no answers"
        )


def eap_scores(masked: MaskedModel, task: Task, settings: EAPSettings) -> Float[Tensor, " n_edges"]:
    """How much the metric falls, to first order, when an edge is ablated, in the mean over train prompts."""
    check_eap(task, settings)

    def compute(_):
        scores = Scores(masked, task, settings).all()
        if not scores.isfinite().all():
            raise RuntimeError("scores of EAP are not finite")
        return {"largest": scores.abs().max().item()}, {"scores": scores}

    return runs.run("search_eap", settings, compute, model=masked.model, task=task, version=VERSION).tensors["scores"]


def top_edges(graph: Graph, scores: Float[Tensor, " n_edges"], n_edges: int) -> Bool[Tensor, " n_edges"]:
    """The edges of highest score, as many as leave at most `n_edges` without dangling ones.

    More edges never make another one dangle, so the pruned size grows with the number taken and bisection finds it.
    """
    rank = scores.argsort(descending=True, stable=True).argsort()
    low, high = n_edges, len(graph)  # so many taken fit; more than that may not
    while low < high:
        middle = (low + high + 1) // 2
        fits = int(graph.prune_dangling(rank < middle).sum()) <= n_edges
        low, high = (middle, high) if fits else (low, middle - 1)
    return graph.prune_dangling(rank < low)


def _top(method: str, masked: MaskedModel, task: Task, n_edges: int, settings: EAPSettings) -> Circuit:
    check_eap(task, settings)
    check(task, settings.ablation, n_edges=n_edges, graph=masked.graph)
    scores = eap_scores(masked, task, settings)  # stored: other sizes are free
    mask = top_edges(masked.graph, scores.abs(), n_edges)
    return as_circuit(masked, mask, method, settings, {"scores": scores.tolist(), "n_edges": n_edges})


def eap(masked, task, ablation="counterfactual", n_edges=100, seed=0) -> Circuit:
    """The edges of largest |difference × slope| of the logit difference, at most `n_edges` without dangling ones."""
    return _top("eap", masked, task, n_edges, EAPSettings(ablation, "inputs", 1, seed))


def eap_ig(masked, task, ablation="counterfactual", n_edges=100, seed=0, path="inputs", points=5) -> Circuit:
    """The same with slopes averaged along a path: of inputs (logit difference, as published) or of masks (KL)."""
    return _top("eap_ig", masked, task, n_edges, EAPSettings(ablation, path, points, seed))
