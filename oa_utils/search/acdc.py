"""ACDC (Conmy et al. 2023): from the output backwards, drop every edge whose loss raises KL by less than λ.

The order is exactly greedy: whether an edge stays is decided with all earlier decisions made. Since most edges go, several
are tried at once on the guess that all of them go; the first one that stays ends the guess, and nothing behind it counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from oa_utils import runs, stats
from oa_utils.circuits import Circuit
from oa_utils.masked import MaskedModel
from oa_utils.search.common import batch, check, chunks, edges_of, stored
from oa_utils.search.filling import fill_for
from oa_utils.tasks import Task

VERSION = 1
AHEAD = 64  # units looked at together, those that dangle included


@dataclass(frozen=True)
class ACDCSettings:
    ablation: str = "counterfactual"
    lam: float = 1e-3  # an edge (level `vertex`: a vertex) stays if KL rises by at least this without it
    seed: int = 0
    level: str = "edge"
    prompts: int = 32  # of the train part, the same for all decisions
    guess: int = 16  # at most so many runs at once


class Sweep:
    def __init__(self, masked: MaskedModel, task: Task, settings: ACDCSettings):
        self.masked, self.settings, self.graph = masked, settings, masked.graph
        rows = torch.randperm(len(task.train), generator=runs.generator(settings.seed))[: settings.prompts]
        self.tokens, self.last = batch(task.train, rows)
        self.full = task.train[rows].log_probs(masked.model)
        self.fill = fill_for(masked, task, settings.ablation, "train", settings.seed)(rows)
        self.clean = masked.activations(self.tokens)

    def units(self) -> list[Tensor]:
        """Edges that go together, in reverse topological order."""
        if self.settings.level == "edge":
            return list(torch.arange(len(self.graph)).flip(0)[:, None])
        return [(self.graph.src == v).nonzero()[:, 0] for v in reversed(range(self.graph.n_vertices - 1))]

    @torch.no_grad()
    def gaps(self, masks: Bool[Tensor, "k n_edges"], start: int = 0) -> list[float]:
        """Mean KL under each mask, as it is; below layer `start` no edge is gone, or only one at a dead vertex."""
        n, found = len(self.last), []
        which, each = torch.arange(n).repeat(len(masks)), masks.float().repeat_interleave(n if len(masks) > 1 else 1, 0)
        for span in chunks(self.masked, len(which), self.tokens.shape[1]):
            at, mask = which[span], each[span] if len(each) > 1 else each
            known = {"start": start, "clean": self.clean.rows(at)} if start else {}
            logp = self.masked(self.tokens[at], self.last[at], mask, self.fill.rows(at), skip_dead=True, **known)
            found.append(stats.kl(self.full[at], logp))
        return torch.cat(found).unflatten(0, (len(masks), n)).mean(1).tolist() if found else []

    def chain(self, mask: Bool[Tensor, " n_edges"], units: list[Tensor], current: float, k: int):
        """Masks without the first 0, 1, 2, ... units, and the gap of each as a circuit (dangling edges dropped).

        A unit that dangles already changes nothing and costs nothing; at most k others are run.
        """
        masks = mask.repeat(len(units) + 1, 1)
        for i, unit in enumerate(units):
            masks[i + 1 :, unit] = False
        circuits = self.graph.prune_dangling(masks)
        changed = (circuits[1:] != circuits[:-1]).any(1)
        changed = changed[changed.cumsum(0) <= k]
        lowest = int(self.graph.dst[(~masks[len(changed)]).nonzero()[0, 0]])  # edges are in the order of their readers
        start = (lowest - 1) // (self.graph.n_heads + 1)  # its layer
        new, gaps = iter(self.gaps(circuits[1 : len(changed) + 1][changed], start)), [current]
        for is_new in changed.tolist():
            gaps.append(next(new) if is_new else gaps[-1])
        return masks, gaps

    def run(self, snapshots: runs.Snapshots) -> dict:
        """One greedy decision after the other, up to k tried at once."""
        units, at, k, mask = self.units(), 0, 1, torch.ones(len(self.graph), dtype=torch.bool)
        history = {"step": [0], "loss": [0.0], "size": [len(self.graph)]}
        if state := snapshots.load():
            at, history, mask = state[0]["at"], state[0]["history"], state[1]["mask"]
        bar = runs.progress(total=len(units), desc=f"acdc {self.settings.ablation}")
        while at < len(units):
            masks, gaps = self.chain(mask, units[at : at + AHEAD], history["loss"][-1], k)
            gone = 0
            while gone < len(gaps) - 1 and gaps[gone + 1] - gaps[gone] < self.settings.lam:
                gone += 1
            all_gone = gone == len(gaps) - 1
            mask, at = masks[gone].clone(), at + gone + (not all_gone)
            k = min(2 * k, self.settings.guess) if all_gone else max(1, k // 2)
            for entries, value in zip(history.values(), (at, gaps[gone], int(mask.sum())), strict=True):
                entries.append(value)
            bar.update(at - bar.n)
            bar.set_postfix(KL=f"{gaps[gone]:.3g}", edges=history["size"][-1])
            if snapshots.due():
                snapshots.save({"at": at, "history": history}, {"mask": mask})
        bar.close()
        return edges_of(self.graph, mask) | {"history": history}


def acdc(masked, task, ablation="counterfactual", lam=1e-3, seed=0, level="edge", **settings) -> Circuit:
    """The circuit of ACDC; other settings as in `ACDCSettings`."""
    check(task, ablation, lam, level, fixed="ACDC")
    own = ACDCSettings(ablation, lam, seed, level, **settings)
    return stored("acdc", masked, task, own, lambda s: Sweep(masked, task, own).run(s), VERSION, f"lam={lam:g}")
