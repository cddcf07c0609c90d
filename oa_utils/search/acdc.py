"""ACDC (Conmy et al. 2023): from the output backwards, drop every edge whose loss raises KL by less
than λ.

The order is exactly greedy: whether an edge stays is decided with all earlier decisions made. Since
most edges go, several are tried at once on the guess that all of them go; the first one that stays
ends the guess, and nothing behind it counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from einops import repeat
from jaxtyping import Bool, Float
from torch import Tensor

from oa_utils import machine, stats
from oa_utils.circuits import Circuit
from oa_utils.fills import edge_fill, find_ablation
from oa_utils.masked import MaskedModel
from oa_utils.search.shared import (
    Method,
    batch_of,
    check_price,
    check_search,
    in_parts,
    kept_edges,
    stored_circuit,
    whole,
)
from oa_utils.store import Snapshots, with_settings
from oa_utils.tasks import Task

VERSION = 1
AHEAD = 64  # units looked at together, those that dangle included


@dataclass(frozen=True)
class ACDCSettings:
    ablation: str = "counterfactual"
    lam: float = 1e-3  # an edge (level `vertex`: a vertex) stays if KL rises by at least this
    seed: int = 0
    level: str = "edge"
    prompts: int = 32  # of the train part, the same for all decisions
    guess: int = 16  # at most so many runs at once

    def __post_init__(self):
        check_price(self.lam, self.level)
        whole(1, prompts=self.prompts, guess=self.guess)


class Backwards:
    """The greedy walk from the output backwards, one decision after the other."""

    def __init__(self, masked: MaskedModel, task: Task, settings: ACDCSettings):
        self.masked = masked
        self.settings = settings
        self.graph = masked.graph
        order = torch.randperm(len(task.train), generator=machine.generator(settings.seed))
        rows = order[: settings.prompts]
        self.tokens, self.last = batch_of(task.train, rows)
        self.full = task.train[rows].log_probs(masked.model)
        ablation = find_ablation(settings.ablation)
        self.fill = edge_fill(masked, task, ablation, "train", settings.seed)(rows)
        self.clean = masked.activations(self.tokens)

    def units(self) -> list[Tensor]:
        """Edges that go together, in reverse topological order."""
        if self.settings.level == "edge":
            return list(torch.arange(len(self.graph)).flip(0)[:, None])
        writers = reversed(range(self.graph.n_vertices - 1))
        return [(self.graph.src == writer).nonzero()[:, 0] for writer in writers]

    @torch.no_grad()
    def gaps(self, masks: Bool[Tensor, "k n_edges"], start: int = 0) -> list[float]:
        """Mean KL under each mask, as it is; below layer `start` no edge is gone, or only one at a
        dead vertex."""
        if not len(masks):
            return []
        n = len(self.last)
        which = repeat(torch.arange(n), "n -> (k n)", k=len(masks))
        each = masks.float()
        if len(masks) > 1:
            each = repeat(each, "k edge -> (k n) edge", n=n)

        def gaps(span: slice) -> Float[Tensor, " b"]:
            at = which[span]
            logp = self.masked(
                self.tokens[at],
                self.last[at],
                each[span] if len(each) > 1 else each,
                self.fill.rows(at),
                skip_dead=True,
                start=start,
                clean=self.clean.rows(at) if start else None,
            )
            return stats.kl(self.full[at], logp)

        parts = in_parts(self.masked, len(which), self.tokens.shape[1], gaps)
        return torch.cat(list(parts)).unflatten(0, (len(masks), n)).mean(1).tolist()

    def chain(
        self, mask: Bool[Tensor, " n_edges"], units: list[Tensor], current: float, k: int
    ) -> tuple[Bool[Tensor, "chain n_edges"], list[float]]:
        """Masks without the first 0, 1, 2, ... units, and the gap of each as a circuit (dangling
        edges dropped).

        A unit that dangles already changes nothing and costs nothing; at most k others are run.
        """
        masks = mask.repeat(len(units) + 1, 1)
        for i, unit in enumerate(units):
            masks[i + 1 :, unit] = False
        circuits = self.graph.prune_dangling(masks)
        changed = (circuits[1:] != circuits[:-1]).any(1)
        changed = changed[changed.cumsum(0) <= k]
        gone = (~masks[len(changed)]).nonzero()[0, 0]  # edges are in the order of their readers
        start = self.graph.layer_of(int(self.graph.dst[gone]))  # the lowest layer
        measured = iter(self.gaps(circuits[1 : len(changed) + 1][changed], start))
        gaps = [current]
        for is_new in changed.tolist():
            gaps.append(next(measured) if is_new else gaps[-1])
        return masks, gaps

    def run(self, snapshots: Snapshots) -> tuple[dict, dict[str, Tensor]]:
        """One greedy decision after the other, up to k tried at once."""
        units = self.units()
        at = 0
        k = 1
        mask = torch.ones(len(self.graph), dtype=torch.bool)
        history = {"step": [0], "loss": [0.0], "size": [len(self.graph)]}
        state = snapshots.load()
        if state is not None:
            at, k, mask, history = (state[name] for name in ("at", "k", "mask", "history"))
        bar = machine.progress(total=len(units), desc=f"acdc {self.settings.ablation}")
        while at < len(units):
            masks, gaps = self.chain(mask, units[at : at + AHEAD], history["loss"][-1], k)
            gone = 0
            while gone < len(gaps) - 1 and gaps[gone + 1] - gaps[gone] < self.settings.lam:
                gone += 1
            mask = masks[gone].clone()
            if gone == len(gaps) - 1:  # the guess was right: all of them go
                at += gone
                k = min(2 * k, self.settings.guess)
            else:
                at += gone + 1
                k = max(1, k // 2)
            history["step"].append(at)
            history["loss"].append(gaps[gone])
            history["size"].append(int(mask.sum()))
            bar.update(at - bar.n)
            bar.set_postfix(KL=f"{gaps[gone]:.3g}", edges=history["size"][-1])
            if snapshots.due():
                snapshots.save({"at": at, "k": k, "mask": mask, "history": history})
        bar.close()
        return kept_edges(self.graph, mask) | {"history": history}, {}


@with_settings
def acdc(masked: MaskedModel, task: Task, *, settings: ACDCSettings) -> Circuit:
    """The circuit of ACDC; settings as in `ACDCSettings`."""
    check_search(masked, task, settings.ablation, fixed="ACDC")

    def compute(snapshots: Snapshots) -> tuple[dict, dict[str, Tensor]]:
        return Backwards(masked, task, settings).run(snapshots)

    aim = f"lam={settings.lam:g}"
    return stored_circuit("acdc", masked, task, settings, compute, VERSION, aim)


METHODS = {"acdc": Method(acdc, "lam", trains=False, version=VERSION)}
