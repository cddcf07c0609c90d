"""How good a ranking of edges is, as the benchmark MIB measures it: faithfulness of the circuits of
the best-ranked edges, and two areas under that curve."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from oa_utils import machine
from oa_utils.circuits import Circuit
from oa_utils.masked import MaskedModel
from oa_utils.search import gap
from oa_utils.search.gaps import Gap
from oa_utils.tasks import Task

SHARES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)  # of all edges, as in MIB


class Areas(NamedTuple):
    cpr: float  # area under the faithfulness curve: more is better
    cmd: float  # area between the curve and 1: less is better


def faithfulness_curve(
    masked: MaskedModel,
    task: Task,
    scores: Float[Tensor, " n_edges"],
    ablation: str = "counterfactual",
    metric: str = "logit_diff",
    shares: Sequence[float] = SHARES,
    **gap_options: Any,
) -> pd.DataFrame:
    """Faithfulness of the circuit of the best-ranked edges, for each share of all edges: 1 is the
    whole model, 0 a model with all edges ablated. Dangling edges are dropped (`n_edges`). Refused
    where the whole model does the task no better than the ablated one, beyond two standard errors:
    then there is nothing to keep."""
    scores = torch.as_tensor(scores)
    if scores.shape != (len(masked.graph),) or not scores.isfinite().all():
        raise ValueError(
            f"scores are {len(masked.graph)} finite numbers, one for each edge, got shape "
            f"{list(scores.shape)}"
        )
    if sorted(shares) != list(shares) or not 0 < shares[0] <= shares[-1] <= 1:
        raise ValueError(f"shares grow from above 0 to at most 1, got {shares}")
    order = scores.argsort(descending=True, stable=True)

    def lost(n: int) -> tuple[int, Gap]:
        mask = torch.zeros(len(scores), dtype=torch.bool)
        mask[order[:n]] = True
        circuit = Circuit(masked.graph, mask, "ranked")
        return circuit.n_edges, gap(masked, task, circuit, ablation, metric=metric, **gap_options)

    _, everything = lost(0)
    if not everything.mean > 2 * everything.se:
        raise ValueError(
            f"without any edge, under '{ablation}', '{masked.model.name}' loses "
            f"{everything.mean:.2g} ± {everything.se:.2g} of {metric} on task '{task.name}', no "
            "more than two standard errors: the model does not do the task, or another ablation is "
            "needed, and faithfulness would divide by nothing"
        )
    rows = []
    for share in machine.progress(shares, desc=f"faithfulness under {ablation}"):
        n_edges, some = lost(int(share * len(scores)))
        rows.append(
            {"share": share, "n_edges": n_edges, "faithfulness": 1 - some.mean / everything.mean}
        )
    return pd.DataFrame(rows)


def areas(curve: pd.DataFrame) -> Areas:
    """CPR and CMD of a faithfulness curve, by the trapezoid rule over shares, as in MIB."""
    faithful = curve.faithfulness.to_numpy()
    share = curve.share.to_numpy()
    cpr = np.trapezoid(faithful, share)
    cmd = np.trapezoid(np.abs(1 - faithful), share)
    return Areas(float(cpr), float(cmd))
