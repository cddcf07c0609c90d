"""What the heads of a circuit look at."""

from collections.abc import Iterable

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from oa_utils.models import Model, recording, rotate
from oa_utils.tasks import Task


@torch.no_grad()
def patterns(
    model: Model, tokens: Int[Tensor, "batch pos"]
) -> list[Float[Tensor, "batch head pos pos"]]:
    """The attention of every layer: what would be read if each place held its own unit vector."""
    kept, record = recording("resid", "k")
    model.run(model.embed(tokens), edit=record)
    length = tokens.shape[1]
    positions = torch.arange(length, device=model.device)[None]
    units = torch.eye(length, dtype=model.dtype, device=model.device)
    weights = []
    for i, block in enumerate(model.layers):
        q = rotate(block.heads(block.ln1(kept["resid"][i]), "q"), block.rotary(positions))
        k = kept["k"][i]
        weights.append(block.attend(q, k, units.expand(*k.shape[:2], -1, -1)).cpu())
    return weights


def first_place(hit: Bool[Tensor, "n pos"]) -> Int[Tensor, " n"]:
    """The first place that is hit in each row, or −1."""
    return torch.where(hit.any(1), hit.int().argmax(1), -1)


def last_of_several(hit: Bool[Tensor, "n pos"]) -> Int[Tensor, " n"]:
    """The last place that is hit in each row with more than one, or −1."""
    last = hit.shape[1] - 1 - hit.flip(1).int().argmax(1)
    return torch.where(hit.sum(1) > 1, last, -1)


def head_roles(model: Model, task: Task, heads: Iterable[str]) -> pd.DataFrame:
    """Mean attention of each head along patterns that name its role; NaN where the task has no
    such tokens."""
    prompts = task.test
    tokens = prompts.tokens
    last = prompts.last
    is_right = tokens == prompts.right[:, :1]
    is_wrong = tokens == prompts.wrong[:, :1]
    first = first_place(is_wrong)
    again = last_of_several(is_wrong)
    changed = torch.full_like(first, -1)
    if prompts.counterfactual is not None:
        changed = first_place(tokens != prompts.counterfactual)
    looks = {  # from where, to where
        "last → answer": (last, first_place(is_right)),
        "last → repeat": (last, again),
        "repeat → first": (again, first),
        "repeat → after first": (again, torch.where(first >= 0, first + 1, -1)),
        "last → changed": (last, changed),
    }
    weights = patterns(model, tokens)
    rows = torch.arange(len(prompts))
    inside = torch.arange(2, tokens.shape[1]) <= last[:, None]  # what follows is padding
    table = []
    for head in heads:
        layer, number = (int(part[1:]) for part in head.split("."))
        attention = weights[layer][:, number]
        row = {"head": head}
        for name, (at, to) in looks.items():
            there = (at >= 0) & (to >= 0) & (to <= at)
            seen = attention[rows[there], at[there], to[there]]
            row[name] = seen.mean().item() if there.any() else np.nan
        before = attention.diagonal(-1, 1, 2)[:, 1:]  # of queries from position 2 on
        row["previous token"] = before[inside].mean().item() if inside.any() else np.nan
        row["first token"] = attention[rows, last, 0].mean().item()
        table.append(row)
    columns = ["head", *looks, "previous token", "first token"]
    return pd.DataFrame(table, columns=columns).set_index("head")
