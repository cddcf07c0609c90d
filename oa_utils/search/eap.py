"""Edge attribution patching (Syed et al. 2023) and its integrated form EAP-IG (Hanna et al. 2024).

An edge carries fill + α (value − fill), so (value − fill) · ∂metric/∂input is the gradient by α:
with every α at 1 one backward pass scores all edges, and that is EAP. KL(full ‖ masked) has no
slope there, where it is zero and smallest, so the metric is the answer's logit difference; along a
path of masks, from all ablated to all kept, KL does have slopes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from oa_utils import metrics, store
from oa_utils.circuits import Circuit
from oa_utils.fills import Activations, Constants, edge_fill, find_ablation
from oa_utils.graph import Graph
from oa_utils.masked import MaskedModel
from oa_utils.search.shared import (
    EVALUATION_BATCH,
    Method,
    as_circuit,
    batch_of,
    check_search,
    check_size,
    in_parts,
    whole,
)
from oa_utils.tasks import Task

VERSION = 1
PATHS = {"inputs": "logit_diff", "masks": "kl"}  # and the metric on each
Fill = Constants | Activations


@dataclass(frozen=True)
class EAPSettings:
    ablation: str = "counterfactual"
    path: str = "inputs"  # from ablated to clean embeddings, as published; `masks`: α from 0 to 1
    points: int = 1  # on the path; one on that of inputs, the clean end, is plain EAP
    seed: int = 0

    def __post_init__(self):
        whole(1, points=self.points)
        if self.path not in PATHS:
            raise ValueError(f"path is one of {', '.join(PATHS)}, not {self.path!r}")


@dataclass(frozen=True)
class EAPIGSettings(EAPSettings):
    points: int = 5


class Scores:
    """Gradients of the metric by every α, summed over the train prompts."""

    def __init__(self, masked: MaskedModel, task: Task, settings: EAPSettings):
        self.masked = masked
        self.settings = settings
        self.part = task.train
        self.full = self.part.log_probs(masked.model)
        ablation = find_ablation(settings.ablation)
        self.fill = edge_fill(masked, task, ablation, "train", settings.seed)
        self.n_edges = len(masked.graph)

    def gradient(
        self, rows: Int[Tensor, " b"], mask: Float[Tensor, " n_edges"], fill: Fill
    ) -> Float[Tensor, " n_edges"]:
        """Sum over prompts of the metric's gradient by every α."""
        mask = mask[None].requires_grad_()
        logp = self.masked(*batch_of(self.part, rows), mask, fill)
        metric = PATHS[self.settings.path]
        part = self.part[rows]
        lost = metrics.distance(metric, self.full[rows], logp, part.right, part.wrong)
        return -torch.autograd.grad(lost.sum(), mask)[0][0].cpu()

    def along_masks(self, rows: Int[Tensor, " b"], fill: Fill) -> Float[Tensor, " n_edges"]:
        """Summed over midpoints of the path, so that the mean adds up over edges to what the whole
        path changes."""
        points = self.settings.points
        shares = [(k + 0.5) / points for k in range(points)]
        return sum(self.gradient(rows, torch.full((self.n_edges,), a), fill) for a in shares)

    def along_inputs(self, rows: Int[Tensor, " b"], fill: Fill) -> Float[Tensor, " n_edges"]:
        """(clean − fill) · ∂metric/∂input, summed over inputs between the ablated and the clean
        ones.

        Ablating embed's edges in part gives such an input. Kept edges do not feel their fill, so it
        can be chosen: the gradient by α is (value − fill) · slope, and less (value − clean) · slope
        it is what is asked for.
        """
        from_embed = self.masked.graph.src == 0
        points = self.settings.points
        clean = self.clean_fill(rows, fill) if points > 1 else None
        total = torch.zeros(self.n_edges)
        for k in range(1, points + 1):
            mask = torch.where(from_embed, k / points, 1.0)
            total += self.gradient(rows, mask, fill)
            if k < points:  # at the clean end values are clean
                total -= self.gradient(rows, mask, clean) * ~from_embed
        return total

    def clean_fill(self, rows: Int[Tensor, " b"], fill: Fill) -> Fill:
        """Clean values for all vertices but embed, which keeps its fill."""
        tokens, _ = batch_of(self.part, rows)
        embed = fill.embed
        if isinstance(fill, Constants):
            positions = torch.arange(tokens.shape[1]).clamp(max=len(embed) - 1)
            embed = embed[positions].expand(len(rows), -1, -1)
        return self.masked.activations(tokens)._replace(embed=embed)

    def mean(self) -> Float[Tensor, " n_edges"]:
        """Of all train prompts and all points of the path."""
        n, length = self.part.tokens.shape
        along = self.along_inputs if self.settings.path == "inputs" else self.along_masks

        def summed(span: slice) -> Float[Tensor, " n_edges"]:
            rows = torch.arange(n)[span]
            return along(rows, self.fill(rows))

        name = f"EAP {self.settings.ablation}"
        total = torch.zeros(self.n_edges)
        for part in in_parts(self.masked, n, length, summed, EVALUATION_BATCH, name):
            total += part
        return total / n / self.settings.points


def check_eap(masked: MaskedModel, task: Task, settings: EAPSettings) -> None:
    """Refuse, before any work, what EAP cannot score."""
    check_search(masked, task, settings.ablation, fixed="EAP")
    named = [(ids >= 0).any(-1).all() for ids in (task.right, task.wrong)]
    if settings.path == "inputs" and not all(named):
        raise ValueError(
            f"EAP takes the slope of log P(right) − log P(wrong), but task '{task.name}' does not "
            "name both for every prompt; give Task.from_text(..., wrong=[...]), or use "
            "eap_ig(path='masks'), which needs no answers"
        )


def eap_scores(masked: MaskedModel, task: Task, settings: EAPSettings) -> Float[Tensor, " n_edges"]:
    """How much the metric falls, to first order, when an edge is ablated, in the mean over train
    prompts."""
    check_eap(masked, task, settings)

    def compute(_: store.Snapshots) -> tuple[dict, dict[str, Tensor]]:
        scores = Scores(masked, task, settings).mean()
        if not scores.isfinite().all():
            raise RuntimeError("scores of EAP are not finite")
        return {"largest": scores.abs().max().item()}, {"scores": scores}

    result = store.run(
        "search_eap",
        settings,
        compute,
        model=masked.model,
        task=task,
        inputs=masked.run_inputs,
        version=VERSION,
    )
    return result.tensors["scores"]


def top_edges(
    graph: Graph, scores: Float[Tensor, " n_edges"], n_edges: int
) -> Bool[Tensor, " n_edges"]:
    """The edges of highest score, as many as leave at most `n_edges` without dangling ones.

    More edges never make another one dangle, so the pruned size grows with the number taken and
    bisection finds it.
    """
    rank = scores.argsort(descending=True, stable=True).argsort()
    low = n_edges  # so many taken fit
    high = len(graph)  # more than that may not
    while low < high:
        middle = (low + high + 1) // 2
        if int(graph.prune_dangling(rank < middle).sum()) <= n_edges:
            low = middle
        else:
            high = middle - 1
    return graph.prune_dangling(rank < low)


def _top(
    method: str, masked: MaskedModel, task: Task, n_edges: int, settings: EAPSettings
) -> Circuit:
    check_eap(masked, task, settings)
    check_size(n_edges, masked.graph)
    scores = eap_scores(masked, task, settings)  # stored: other sizes are free
    mask = top_edges(masked.graph, scores.abs(), n_edges)
    history = {"scores": scores.tolist(), "n_edges": n_edges}
    return as_circuit(masked, mask, method, settings, history)


def eap(
    masked: MaskedModel,
    task: Task,
    ablation: str = "counterfactual",
    n_edges: int = 100,
    seed: int = 0,
) -> Circuit:
    """The edges of largest |difference × slope| of the logit difference, at most `n_edges` without
    dangling ones."""
    return _top("eap", masked, task, n_edges, EAPSettings(ablation, seed=seed))


@store.with_settings
def eap_ig(
    masked: MaskedModel, task: Task, *, n_edges: int = 100, settings: EAPIGSettings
) -> Circuit:
    """The same with slopes averaged along a path: of inputs (logit difference, as published) or of
    masks (KL); settings as in `EAPIGSettings`."""
    as_stored = EAPSettings(**asdict(settings))  # names of runs say how they differ from plain EAP
    return _top("eap_ig", masked, task, n_edges, as_stored)


def _check(masked: MaskedModel, task: Task, n_edges: float, **arguments: Any) -> None:
    check_size(n_edges, masked.graph)
    check_eap(masked, task, EAPSettings(**arguments))


METHODS = {
    "eap": Method(eap, "n_edges", trains=False, check=_check, version=VERSION),
    "eap_ig": Method(eap_ig, "n_edges", trains=False, check=_check, version=VERSION),
    "eap_ig_masks": Method(
        partial(eap_ig, path="masks"),
        "n_edges",
        trains=False,
        check=partial(_check, path="masks"),
        version=VERSION,
    ),
}
