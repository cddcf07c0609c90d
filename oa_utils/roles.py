"""What the heads of a circuit look at."""

from collections.abc import Iterable

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from oa_utils.models import Model
from oa_utils.tasks import Task


@torch.no_grad()
def patterns(model: Model, tokens: Int[Tensor, "batch pos"]) -> list[Float[Tensor, "batch head pos pos"]]:
    """The attention of every layer."""
    found, at = [], torch.arange(tokens.shape[1], device=model.device)
    turn = model.rotation(at[None])

    def keep(site: str, i: int, value: Tensor) -> Tensor:
        if site == "resid":
            q, k = (model.rotate(model.layers[i].heads(model.layers[i].ln1(value), slot), turn) for slot in "qk")
            scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT / model.d_head**0.5
            found.append(scores.masked_fill(at[:, None] < at, -torch.inf).softmax(-1).cpu())
        return value

    model.run(model.embed(tokens.to(model.device)), edit=keep)
    return found


def head_roles(model: Model, task: Task, heads: Iterable[str]) -> pd.DataFrame:
    """Mean attention of each head along patterns that name its role; NaN where the task has no such tokens."""
    prompts = task.test
    tokens, last, n = prompts.tokens, prompts.last, torch.arange(len(prompts))
    first = lambda hit: torch.where(hit.any(1), hit.int().argmax(1), -1)  # noqa: E731
    right, wrong = (tokens == ids[:, :1] for ids in (prompts.right, prompts.wrong))
    s1, s2 = first(wrong), torch.where(wrong.sum(1) > 1, tokens.shape[1] - 1 - wrong.flip(1).int().argmax(1), -1)
    changed = first(tokens != prompts.counterfactual) if prompts.counterfactual is not None else torch.full_like(s1, -1)
    pairs = {"last → answer": (last, first(right)), "last → repeat": (last, s2), "repeat → first": (s2, s1),
             "repeat → after first": (s2, torch.where(s1 >= 0, s1 + 1, -1)), "last → changed": (last, changed)}  # fmt: skip
    pattern = patterns(model, tokens)
    rows = []
    for head in heads:
        layer, h = (int(x[1:]) for x in head.split("."))
        a, row = pattern[layer][:, h], {"head": head}
        for name, (at, to) in pairs.items():
            ok = (at >= 0) & (to >= 0) & (to <= at)
            row[name] = a[n[ok], at[ok], to[ok]].mean().item() if ok.any() else np.nan
        row["previous token"] = a.diagonal(-1, 1, 2)[:, 1:].mean().item()
        row["first token"] = a[n, last, 0].mean().item()
        rows.append(row)
    return pd.DataFrame(rows).set_index("head")
