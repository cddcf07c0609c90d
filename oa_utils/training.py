"""Constants that lose least: many trained side by side, each on its own, by the same rule in every
experiment."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from oa_utils import machine, stats
from oa_utils.store import Snapshots

NOISE = 1e-7  # a smaller gain is rounding
# so often a constant that gains nothing goes on from its best with a third of the step, then stops
CUTS = 2

# losses(constants, which, rows) yields, pass by pass, the losses of constants `which` on prompts
# `rows` (None: all) as (which of `which`, rows, [constant row]).
Pass = tuple[slice, Int[Tensor, " rows"], Float[Tensor, "constants rows"]]
Losses = Callable[[Sequence[Tensor], Sequence[int], Tensor | None], Iterator[Pass]]
Passes = Callable[[Tensor | None], Iterator[Pass]]  # the same of prompts `rows` (None: all)
Curve = list[list[float]]  # [step, mean loss over all prompts] at each look


@runtime_checkable
class FitSettings(Protocol):
    """What the settings of an experiment say about the training of its constants."""

    steps: int  # of Adam at most
    lr: float  # Adam's first step, in units of each constant's scale
    batch: int  # prompts in a step; 0 takes all
    look_every: int  # steps between two looks at all prompts, where the best so far are kept
    tol: float  # a look that gains less than this share, and less than its error, cuts the step
    seed: int


class Fitted(NamedTuple):
    constants: list[Tensor]
    curves: list[Curve]  # of each constant
    starts: list[int]  # which candidate each one started from


@dataclass
class _State:
    """Where a training is: everything that a snapshot needs."""

    step: int
    best: list[Tensor]  # the best constants that any look saw
    losses: Float[Tensor, "constants n"]  # theirs, prompt by prompt
    live: list[Tensor]
    curves: list[Curve]
    cuts: list[int]
    starts: list[int]


def collect(passes: Passes, n_constants: int, n: int) -> Float[Tensor, "constants n"]:
    """The values of n prompts in one table; where memory is refused, of half of them at a time."""
    values = torch.empty(n_constants, n)

    def put_down(span: slice) -> None:
        everything = span == slice(0, n)
        for which, rows, value in passes(None if everything else torch.arange(n)[span]):
            values[which, rows] = value.float().cpu()

    for _ in machine.in_spans(n, n, put_down):
        pass
    return values


def fit(
    candidates: Sequence[Sequence[Tensor]],
    scales: Sequence[float],
    losses: Losses,
    n: int,
    settings: FitSettings,
    snapshots: Snapshots | None = None,
) -> Fitted:
    """Constants with the least mean loss over n prompts. `candidates[i]` are one start for every
    constant; each begins from the best of its starts. The best that any look at all prompts saw is
    kept, so no candidate is better."""

    @torch.no_grad()
    def look(constants: Sequence[Tensor], which: Sequence[int]) -> Float[Tensor, "constants n"]:
        return collect(partial(losses, constants, which), len(which), n)

    everything = list(range(len(scales)))
    rng = machine.generator(settings.seed)
    saved = snapshots.load() if snapshots else None
    state = _State(**saved["state"]) if saved else _start(candidates, everything, look)
    for constant in state.live:
        constant.requires_grad_()
    groups = [
        {"params": [constant], "lr": settings.lr * scale}
        for constant, scale in zip(state.live, scales, strict=True)
    ]
    optimiser = torch.optim.Adam(groups, eps=1e-12)
    if saved:
        optimiser.load_state_dict(saved["optimiser"])
        rng.set_state(saved["rng"])

    def slopes(rows: Tensor, which: list[int], span: slice) -> list[tuple[Tensor | None, ...]]:
        """Gradients of the mean loss, pass by pass; None for constants that do not enter."""
        passes = losses(state.live, which, rows[span])
        means = (value.sum() / len(rows) for _, _, value in passes)
        return [torch.autograd.grad(x, state.live, allow_unused=True) for x in means]

    active = [i for i in everything if state.cuts[i] <= CUTS]
    while state.step < settings.steps and active:
        state.step += 1
        rows = torch.randperm(n, generator=rng)[: settings.batch or n]
        optimiser.zero_grad()
        parts = machine.in_spans(len(rows), len(rows), partial(slopes, rows, active))
        for gradients in chain.from_iterable(parts):
            machine.accumulate(state.live, gradients)
        optimiser.step()
        if state.step % settings.look_every == 0 or state.step == settings.steps:
            _compare(state, active, look(state.live, active), optimiser, settings.tol)
            active = [i for i in active if state.cuts[i] <= CUTS]
        if snapshots:
            snapshots.save_when_due(
                lambda: {
                    "state": vars(state),
                    "optimiser": optimiser.state_dict(),
                    "rng": rng.get_state(),
                }
            )
    return Fitted(state.best, state.curves, state.starts)


def _start(candidates: Sequence[Sequence[Tensor]], which: list[int], look: Callable) -> _State:
    """Every constant at the best of its candidates."""
    tried = torch.stack(
        [look(constants, which) for constants in candidates]
    )  # [candidate constant n]
    means = tried.mean(-1)
    starts = means.masked_fill(means.isnan(), torch.inf).argmin(0).tolist()
    best = [candidates[starts[i]][i].detach().clone() for i in which]
    losses = torch.stack([tried[starts[i], i] for i in which])
    curves = [[[0, values.mean().item()]] for values in losses]
    live = [constant.clone() for constant in best]
    return _State(0, best, losses, live, curves, [0] * len(best), starts)


def _compare(
    state: _State,
    active: list[int],
    values: Float[Tensor, "active n"],
    optimiser: torch.optim.Optimizer,
    tol: float,
) -> None:
    """Keeps what is better than before; what gains nothing goes back to its best with a smaller
    step."""
    for i, now in zip(active, values, strict=True):
        state.curves[i].append([state.step, now.mean().item()])
        gain, error = stats.mean_se(state.losses[i] - now)
        enough = tol * state.losses[i].mean().abs()
        idle = not gain >= enough and not gain > error  # also where the loss is no number
        if gain > NOISE:
            state.best[i] = state.live[i].detach().clone()
            state.losses[i] = now
        if idle:
            state.cuts[i] += 1
            optimiser.param_groups[i]["lr"] /= 3
            state.live[i].data.copy_(state.best[i])
