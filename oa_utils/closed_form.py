"""Optimal constants in closed form, to second order.

Where a component changes little, KL(full ‖ ablated) is half the square of how the log-probabilities
change, token by token, each by its probability; and they change linearly with what is put in the
component's place. So the constant that loses least solves a ridge regression. A forward and a few
backward passes of each prompt serve all components of a layer at once, where training takes dozens
for each of them. Where a component changes much, this is a place to start from.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from oa_utils import machine
from oa_utils.fills import TaskValues
from oa_utils.models import Model, exact
from oa_utils.sites import BlockValues, Site

VERSION = 1
SCORES = 8  # tokens that stand for all: the likeliest ones, and one drawn from the others
MOST = 512  # train prompts
MOST_BYTES = 1e9  # of the slopes of a component as wide as the stream: fewer prompts otherwise
RIDGES = (0.1, 1.0, 10.0, 100.0)  # in units of the mean square of a row
HELD = 4  # every so many prompts one is held out, to choose among ridges


class Slopes(NamedTuple):
    """The weighted log-probabilities of a prompt's tokens, to first order: they change by `offset`
    if the start is put in a component's place, and by row · move more where a constant moves."""

    rows: Float[Tensor, "n score P dim"]
    offset: Float[Tensor, "n score"]


def together(
    model: Model,
    block: BlockValues,
    sites: Sequence[Site],
    fill: Callable[[Site, Tensor], Tensor],
    last: Int[Tensor, " b"],
) -> Float[Tensor, "b vocab"]:
    """Log-probabilities with all of these components of a block replaced at once."""
    change = {"before": 0, "between": 0, "behind": 0}
    for site in sites:
        moved = block.replaced(site, fill(site, block.value(site)))
        change[site.stage] = change[site.stage] + moved - getattr(block, site.stage)
    if sites[0].stage == "before":
        return model.finish(block.before + change["before"], block.layer, last)
    stream = block.behind
    if any(site.stage == "between" for site in sites):
        entered = block.between + change["between"]
        stream = entered + block.block.mlp(entered)
    return model.finish(stream + change["behind"], block.layer + 1, last)


def weights_of(
    logp: Float[Tensor, "b vocab"], scores: int, u: Float[Tensor, " b"]
) -> tuple[Int[Tensor, "b score"], Float[Tensor, "b score"]]:
    """Tokens whose squared, weighted changes add up to KL's, on average over `u`, uniform draws:
    the likeliest as they are, and one of the others for all of these."""
    p = logp.detach().exp()
    few = min(scores, p.shape[1]) - 1
    likely, tokens = p.topk(few)
    others = p.scatter(1, tokens, 0.0).cumsum(1)
    total = others[:, -1:]
    drawn = (others < u[:, None].to(p) * total).sum(1, keepdim=True).clamp(max=p.shape[1] - 1)
    return torch.cat([tokens, drawn], 1), torch.cat([likely, total], 1).sqrt()


def slopes(
    values: TaskValues,
    sites: Sequence[Site],
    starts: dict[str, Float[Tensor, "P dim"]],
    family: str,
    scores: int,
    seed: int = 0,
) -> dict[str, Slopes]:
    """Of components of one layer, over the first train prompts, MOST or as many as fit."""
    model = values.model
    layer = sites[0].layer
    prompts = values.prompts("train")
    scores = min(scores, model.d_vocab)
    n_rows = max(len(start) for start in starts.values())
    fitting = int(MOST_BYTES // (4 * scores * n_rows * model.d_model))
    n = max(1, min(MOST, len(prompts), fitting))
    draws = torch.rand(n, generator=machine.generator(seed))
    found = {
        site.name: Slopes(torch.zeros(n, scores, *starts[site.name].shape), torch.zeros(n, scores))
        for site in sites
    }
    [order] = prompts.chunks(n, torch.arange(n))

    def of_some(span: slice) -> None:
        rows = order[span]
        with torch.no_grad():  # what is computed on the way to the components
            block = prompts.block(layer, rows)
            for site in sites:
                block.value(site)
                getattr(block, site.stage)
        size = len(rows)
        device = block.before.device
        moves = {
            name: torch.zeros(size, *start.shape, device=device, requires_grad=True)
            for name, start in starts.items()
        }
        shares = {
            name: torch.zeros(size, 1, 1, device=device, requires_grad=True) for name in starts
        }

        def fill(site: Site, value: Tensor) -> Tensor:
            start = starts[site.name]
            at = values.rows_at(family, "train", rows, value.shape[1], len(start)).expand(size, -1)
            start = start.to(value)[at]
            move = moves[site.name][torch.arange(size)[:, None], at]
            return value + move + shares[site.name] * (start - value)

        logp = together(model, block, sites, fill, prompts.last[rows])
        tokens, weights = weights_of(logp, scores, draws[rows])
        leaves = [*moves.values(), *shares.values()]
        for i in range(scores):
            score = (weights[:, i] * logp.gather(1, tokens[:, i : i + 1])[:, 0]).sum()
            gradients = torch.autograd.grad(score, leaves, retain_graph=i < scores - 1)
            for j, name in enumerate(starts):
                found[name].rows[rows, i] = gradients[j].float().cpu()
                found[name].offset[rows, i] = gradients[len(starts) + j].flatten().float().cpu()

    size = machine.micro_batch(
        n, model.graph_bytes(prompts.tokens.shape[1], layer) + 12 * model.d_vocab
    )
    for _ in machine.in_spans(n, size, of_some):
        pass
    return found


def ridge(
    rows: Float[Tensor, "n D"], target: Float[Tensor, " n"], level: float
) -> Float[Tensor, " D"]:
    """The x with the least |rows x − target|² + level · mean |row|² · |x|²."""
    n, width = rows.shape
    added = level * rows.square().sum().item() / n
    primal = width <= n
    square = exact(rows.T @ rows if primal else rows @ rows.T)
    square.diagonal().add_(max(added, 1e-30))
    right = exact(rows.T @ target if primal else target)
    solved = torch.cholesky_solve(right[:, None], torch.linalg.cholesky(square))[:, 0]
    return solved.to(rows) if primal else rows.T @ solved.to(rows)


def solve(found: Slopes, spread: Float[Tensor, " dim"]) -> Float[Tensor, "P dim"]:
    """How far the best constant is from the start, in a ridge that held-out prompts choose; rows
    count in units of the component's spread."""
    n, scores, n_rows, _ = found.rows.shape
    rows = (found.rows * spread).flatten(2)
    target = -found.offset
    held = torch.arange(n) % HELD == HELD - 1

    def loss(level: float) -> float:
        x = ridge(rows[~held].flatten(0, 1), target[~held].flatten(), level)
        return (rows[held] @ x - target[held]).square().sum().item()

    level = min(RIDGES, key=loss) if held.any() else RIDGES[-1]
    x = ridge(rows.flatten(0, 1), target.flatten(), level)
    return x.unflatten(0, (n_rows, -1)) * spread


def constants(
    values: TaskValues, sites: Sequence[Site], family: str, seed: int = 0
) -> dict[str, Float[Tensor, "P dim"]]:
    """The constants that lose least to second order, of components of one layer, by name."""
    means = values.means(sites, family=family)
    starts = {site.name: means[site.name].rows(family) for site in sites}
    found = slopes(values, sites, starts, family, SCORES, seed)
    return {
        name: start + solve(found[name], means[name].std.cpu().clamp(min=1e-6)).to(start)
        for name, start in starts.items()
    }
