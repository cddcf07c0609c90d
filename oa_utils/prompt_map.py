"""Causal tracing of one prompt: the token × layer map that users of ROME know."""

import pandas as pd
import torch
from torch import Tensor

from oa_utils.models import Model
from oa_utils.tasks import Task
from oa_utils.texts import subject_span
from oa_utils.tracing import Prompts, TraceSettings, check, spread, window_of


@torch.no_grad()
def trace_prompt(model: Model, prompt: str | Task, subject: str = "", kind="resid", window=1, layers=None, sigma=None,
                 constant: Tensor | None = None, settings: TraceSettings | None = None) -> pd.DataFrame:  # fmt: skip
    """Probability of the answer when one (token, layer) is restored: a row for each token, a column for each layer.

    The prompt is a text with its subject, or a task of one fact. `resid` restores the stream that enters a layer, `attn`
    and `mlp` what a window of layers writes. The subject is corrupted by noise, or by a `constant` [d] in its place.
    `.attrs` holds answer, p_clean and p_corrupt.
    """
    s, layers = settings or TraceSettings(), tuple(range(model.n_layers) if layers is None else layers)
    if isinstance(prompt, str):
        blank, span = torch.full((1, 1), -1), torch.tensor([subject_span(model, prompt, subject)])
        prompt = Task("prompt", *model.pad([model.encode(prompt)]), blank, blank, blank[0] > 0, (prompt,), subject=span)
    check(model, prompt, {"kind": [kind] * (kind != "resid"), "window": [window]}, layers)
    if len(prompt) > 1:
        raise ValueError(f"one fact at a time, as facts[[0]]: the task has {len(prompt)}")
    prompts, rows = Prompts(model, prompt, kind), torch.zeros(1 if constant is not None else s.draws, dtype=torch.int64)
    if constant is None:
        std = s.noise * (spread(model) if sigma is None else sigma).to(model.device, model.dtype)
    change = prompts.noise(rows, range(s.draws), std, s.seed) if constant is None else prompts.constant(rows, [constant])
    where = torch.eye(1 + change.shape[2], dtype=torch.bool, device=model.device)[:, None, 1:]  # copy 0 restores nothing
    windows = [[range(0)] + [window_of(layer, window, model.n_layers)] * change.shape[2] for layer in layers]
    p = torch.stack([prompts.probabilities(rows, change, w, where).mean(1) for w in windows], 1).cpu()  # [1+copy layer]
    p, tokens = torch.cat([p[1:2].expand(prompt.subject[0, 0], -1), p[2:]]), prompt.tokens[0, : prompt.last[0] + 1]
    table = pd.DataFrame(p.numpy(), pd.Index(model.decode(tokens), name="token"), pd.Index(layers, name="layer"))
    *_, p_clean, target = prompts.clean(rows[:1])
    table.attrs = {"answer": model.decode(target)[0], "p_clean": p_clean.item(), "p_corrupt": p[0, 0].item()}
    return table
