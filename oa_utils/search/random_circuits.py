"""Random circuits of a given size, and found circuits beside them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from oa_utils import machine, models, store
from oa_utils.circuits import Circuit
from oa_utils.masked import MaskedModel
from oa_utils.models import Model
from oa_utils.search import gaps, sweeps
from oa_utils.search.gaps import GapSettings, gap
from oa_utils.search.shared import check_search, edge_mask, masked_of
from oa_utils.store import Snapshots
from oa_utils.tasks import Task

VERSION = gaps.VERSION + 1  # with the gaps of single prompts since
MOST_DRAWS = 2000  # random circuits tried at most
# of `against_random`
COLUMNS = ["task", "ablation", "kind", "n_edges", "gap", "se", "curve", "each"]


def random_circuits(
    masked: MaskedModel, size: int, n: int = 20, tolerance: float = 0.1, seed: int = 0
) -> list[Circuit]:
    """Circuits of edges drawn independently with one probability, whose pruned size is within
    `tolerance` of `size`."""
    graph = masked.graph
    if not 1 <= size <= len(graph) or n < 1 or not tolerance >= 0:
        raise ValueError(
            f"size must be from 1 to {len(graph)}, n from 1 on, tolerance from 0 on: "
            f"got {size}, {n}, {tolerance}"
        )
    rng = machine.generator(seed)
    low = 0.0
    high = 1.0
    u = torch.rand(64, len(graph), generator=rng)
    for _ in range(20):  # the same draws for every p, so the size grows with p
        p = (low + high) / 2
        if graph.prune_dangling(u < p).sum(1).float().mean() > size:
            high = p
        else:
            low = p
    masks: list[Tensor] = []
    drawn = 0
    while len(masks) < n and drawn < MOST_DRAWS:
        some = min(50, MOST_DRAWS - drawn)
        pruned = graph.prune_dangling(torch.rand(some, len(graph), generator=rng) < high)
        drawn += some
        masks += list(pruned[(pruned.sum(1) - size).abs() <= tolerance * size])
    if len(masks) < n:
        warnings.warn(
            f"only {len(masks)} of {drawn} random circuits had a size within {tolerance:.0%} "
            f"of {size}",
            stacklevel=2,
        )
    return [
        Circuit(
            graph,
            mask,
            "random",
            settings={"tolerance": tolerance, "p": high, "drawn": drawn, "i": i},
            seed=seed,
            model=masked.model.name,
            fingerprint=masked.model.fingerprint,
        )
        for i, mask in enumerate(masks[:n])
    ]


def _gap_of_one(
    model: Model,
    item: tuple[str, str, list[int], str],
    task: Task,
    gap_options: Mapping[str, Any],
    level: str = "edge",
) -> dict[str, Any]:
    ablation, kind, edges, method = item
    masked = masked_of(model, level)
    circuit = Circuit(masked.graph, edge_mask(masked.graph, edges), method)
    delta = gap(masked, task, circuit, ablation, **gap_options)
    return {
        "task": task.name,
        "ablation": str(ablation),
        "kind": kind,
        "n_edges": circuit.n_edges,
        "gap": delta.mean,
        "se": delta.se,
        "curve": delta.curve,
        "each": sweeps.gaps_of_prompts(delta),
    }


def against_random(
    masked: MaskedModel,
    task: Task,
    table: pd.DataFrame,
    n: int = 20,
    tolerance: float = 0.1,
    seed: int = 0,
    gap_options: Mapping[str, Any] | None = None,
) -> pd.DataFrame:
    """Each circuit of a sweep's table (`kind` found) beside n random ones of its size, all measured
    by the same protocol under the circuit's ablation, with the `curve` of their constants and the
    gap of each test prompt (`each`). Empty circuits, which have no random ones, are left out."""
    gap_options = gap_options or {}
    settings = GapSettings(**gap_options)
    table = table[table.n_edges > 0]
    for ablation in table.ablation.unique():
        check_search(masked, task, ablation)

    def compute(_: Snapshots) -> dict:
        items = []
        for row in table.itertuples():
            items.append((row.ablation, "found", list(row.edges), row.method))
            own_seed = seed + 1000 * int(row.seed)
            for circuit in random_circuits(masked, row.n_edges, n, tolerance, own_seed):
                edges = circuit.mask.nonzero()[:, 0].tolist()
                items.append((row.ablation, "random", edges, "random"))
        level = masked.graph.level
        one = partial(_gap_of_one, task=task, gap_options=gap_options, level=level)
        return {"rows": models.each(one, masked.model, items, desc="random circuits")}

    result = store.run(
        "random_circuits",
        None,
        compute,
        model=masked.model,
        task=task,
        inputs={
            "circuits": store.fingerprint([list(edges) for edges in table.edges]),
            "ablations": table.ablation.tolist(),
            "seeds": table.seed.tolist(),
            "n": n,
            "tolerance": tolerance,
            "seed": seed,
            "gap": asdict(settings),
        }
        | masked.run_inputs,
        version=VERSION,
        key=f"{task.name}_n={n}",
    )
    return result.frame().reindex(columns=COLUMNS)
