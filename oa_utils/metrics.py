"""How far an ablated prediction is from the full one: KL, or what the right answers lose."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from oa_utils import stats
from oa_utils.tasks import Task

NEEDS = {"kl": (), "label": ("right",), "logit_diff": ("right", "wrong")}  # answers of each prompt
METRICS = tuple(NEEDS)


def check_metric(metric: str, task: Task) -> None:
    """Refuses a metric that there is not, or that needs answers which a task does not name."""
    if metric not in METRICS:
        raise ValueError(f"metric {metric!r}: it is one of {', '.join(METRICS)}")
    for answers in NEEDS[metric]:
        if not (getattr(task, answers) >= 0).any(-1).all():
            raise ValueError(
                f"metric '{metric}' needs {answers} answers, and task '{task.name}' does not name "
                "them for every prompt"
            )


def distance(
    metric: str,
    full: Float[Tensor, "b vocab"],
    ablated: Float[Tensor, "*copies b vocab"],
    right: Int[Tensor, "b k"],
    wrong: Int[Tensor, "b j"],
) -> Float[Tensor, "*copies b"]:
    """KL(full ‖ ablated); or by how much log P(right), or log P(right) − log P(wrong), falls."""
    if metric == "kl":
        return stats.kl(full, ablated)
    lost = log_mass(full, right) - log_mass(ablated, right)
    if metric == "logit_diff":
        lost = lost - (log_mass(full, wrong) - log_mass(ablated, wrong))
    return lost


def log_mass(
    logp: Float[Tensor, "*copies b vocab"], ids: Int[Tensor, "b k"]
) -> Float[Tensor, "*copies b"]:
    """Log-probability of each row's ids together; −1 pads."""
    ids = ids.to(logp.device)
    picked = logp.gather(-1, ids.clamp(min=0).expand(*logp.shape[:-1], -1))
    return picked.masked_fill(ids < 0, -torch.inf).logsumexp(-1)
