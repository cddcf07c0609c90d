"""Optimal constants in closed form, to second order.

Where a component changes little, KL(full ‖ ablated) is half the square of how the log-probabilities
change, token by token, each by its probability; and they change linearly with what is put in the
component's place. So the constant that loses least solves a ridge regression. A forward and a few
backward passes of each prompt serve all components of a layer at once, where training takes dozens
for each of them. Where a component changes much, this is a place to start from.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from oa_utils import machine
from oa_utils.fills import PositionMeans, TaskValues
from oa_utils.models import Model, exact
from oa_utils.sites import BlockValues, Site

VERSION = 1
SCORES = 8  # tokens that stand for all: the likeliest ones, and one drawn from the others
MOST = 512  # train prompts
MOST_BYTES = machine.MEMORY / 3  # of the regressions that are made side by side
RIDGES = (0.1, 1.0, 10.0, 100.0)  # in units of the mean square of a row
HELD = 4  # every so many prompts one is held out, to choose among ridges


class Regression(NamedTuple):
    """How weighted log-probabilities change, to first order: by `offset` if the start is put in a
    component's place, and by row · move more if the constant moves from there. Half the sum of
    their squares is a prompt's KL."""

    rows: Float[Tensor, "n score P dim"]
    offset: Float[Tensor, "n score"]


# ---- how the prediction changes with the components' values


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
    if any(site.stage == "between" for site in sites):
        entered = block.between + change["between"]
        stream = entered + block.block.mlp(entered)
    else:
        stream = block.behind
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
    model: Model,
    block: BlockValues,
    sites: Sequence[Site],
    last: Int[Tensor, " b"],
    scores: int,
    u: Float[Tensor, " b"],
) -> list[Float[Tensor, "b score pos _"]]:
    """How the weighted log-probabilities change with the value of each component."""
    with torch.no_grad():  # what is computed on the way to the components
        values = {site.name: block.value(site).float() for site in sites}
        for site in sites:
            getattr(block, site.stage)
    leaves = {name: value.detach().clone().requires_grad_() for name, value in values.items()}
    logp = together(model, block, sites, lambda site, value: leaves[site.name], last)
    logp = logp.clamp(min=torch.finfo(logp.dtype).min)  # -inf times a weight of 0 is no number
    tokens, weights = weights_of(logp, scores, u)
    weighted = (weights * logp.gather(1, tokens)).sum(0)
    inputs = list(leaves.values())
    by_score = [torch.autograd.grad(score, inputs, retain_graph=True) for score in weighted]
    return [torch.stack(of_site, dim=1) for of_site in zip(*by_score, strict=True)]


# ---- the regression


def by_row(
    slope: Float[Tensor, "b score pos dim"], at: Int[Tensor, "b pos"], n_rows: int
) -> Float[Tensor, "b score P dim"]:
    """Slopes for constants: those of all positions that take the same row, added up."""
    total = slope.new_zeros(*slope.shape[:2], n_rows, slope.shape[-1])
    examples = torch.arange(len(slope), device=slope.device)
    for place in range(slope.shape[2]):
        total[examples, :, at[:, place]] += slope[:, :, place]
    return total


def regressions(
    values: TaskValues,
    sites: Sequence[Site],
    starts: dict[str, Float[Tensor, "P dim"]],
    family: str,
    chosen: Int[Tensor, " chosen"],
    scores: int,
    seed: int = 0,
) -> dict[str, Regression]:
    """Of components of one layer, by name, over the train prompts that are chosen."""
    model = values.model
    layer = sites[0].layer
    prompts = values.prompts("train")
    draws = torch.rand(len(prompts), generator=machine.generator(seed + 1))
    answer = {
        site.name: Regression(
            torch.zeros(len(chosen), scores, *starts[site.name].shape),
            torch.zeros(len(chosen), scores),
        )
        for site in sites
    }
    [order] = prompts.chunks(len(chosen), chosen)

    def of_some(span: slice) -> None:
        rows = order[span]
        block = prompts.block(layer, rows)
        place = torch.searchsorted(chosen, rows)
        by_site = slopes(model, block, sites, prompts.last[rows], scores, draws[rows])
        for site, slope in zip(sites, by_site, strict=True):
            start = starts[site.name].to(slope)
            length = slope.shape[2]
            at = values.rows_at(family, "train", rows, length, len(start)).to(slope.device)
            at = at.expand(len(rows), -1)
            change = (start[at] - block.value(site).float())[:, None]
            regression = answer[site.name]
            regression.rows[place] = by_row(slope, at, len(start)).cpu()
            regression.offset[place] = (slope * change).sum((2, 3)).cpu()

    length = prompts.tokens.shape[1]
    width = sum(site.dim for site in sites)
    bytes_each = model.graph_bytes(length, layer) + 32 * model.d_vocab
    bytes_each += 4 * (scores + 2) * length * width
    size = machine.micro_batch(min(len(chosen), prompts.pass_rows), bytes_each)
    for _ in machine.in_spans(len(chosen), size, of_some):
        pass
    return answer


def some_prompts(
    model: Model, n: int, n_rows: int, scores: int, seed: int = 0
) -> Int[Tensor, " chosen"]:
    """Numbers of at most MOST of n prompts, drawn at random, in order; fewer where the regression
    of a component as wide as the stream would not fit: the same for all components."""
    fitting = int(MOST_BYTES // (4 * scores * n_rows * model.d_model))
    few = max(1, min(n, MOST, fitting))
    return torch.randperm(n, generator=machine.generator(seed))[:few].sort().values


def ridge(
    rows: Float[Tensor, "n D"], target: Float[Tensor, " n"], levels: Sequence[float]
) -> list[Float[Tensor, " D"]]:
    """For each level, the x with the least |rows x − target|² + level · mean |row|² · |x|²."""
    n, width = rows.shape
    primal = width <= n
    square = exact(rows.T @ rows if primal else rows @ rows.T)
    right = exact(rows.T @ target if primal else target)[:, None]
    unit = max(rows.square().sum().item() / n, 1e-30)
    answers = []
    for level in levels:
        added = torch.full((len(square),), level * unit, dtype=square.dtype, device=square.device)
        factor = torch.linalg.cholesky(square + added.diag())
        solved = torch.cholesky_solve(right, factor)[:, 0].to(rows)
        answers.append(solved if primal else rows.T @ solved)
    return answers


def solve(regression: Regression, spread: Float[Tensor, " dim"]) -> Float[Tensor, "P dim"]:
    """How far the best constant is from the start, with the ridge that is best on held-out prompts;
    moves count in units of the component's spread. Where a slope is no number: nowhere."""
    n, _, n_rows, _ = regression.rows.shape
    rows = (regression.rows * spread).flatten(2)
    target = -regression.offset
    if not (rows.isfinite().all() and target.isfinite().all()):
        return torch.zeros_like(regression.rows[0, 0])
    held = torch.arange(n) % HELD == HELD - 1
    level = RIDGES[-1]
    if held.any():
        tried = ridge(rows[~held].flatten(0, 1), target[~held].flatten(), RIDGES)
        losses = [(rows[held] @ x - target[held]).square().sum().item() for x in tried]
        level = RIDGES[losses.index(min(losses))]
    [best] = ridge(rows.flatten(0, 1), target.flatten(), [level])
    return best.unflatten(0, (n_rows, -1)) * spread


def side_by_side(
    sites: Sequence[Site], n_rows: int, n: int, scores: int
) -> Iterator[tuple[Site, ...]]:
    """Components in turn, as many at once as have regressions that fit into memory."""
    some: list[Site] = []
    for site in sites:
        width = sum(other.dim for other in some) + site.dim
        if some and 4 * n * scores * n_rows * width > MOST_BYTES:
            yield tuple(some)
            some = []
        some.append(site)
    yield tuple(some)


def constants(
    values: TaskValues,
    sites: Sequence[Site],
    family: str,
    means: dict[str, PositionMeans],
    seed: int = 0,
) -> dict[str, Float[Tensor, "P dim"]]:
    """The constants that lose least to second order, of components of one layer, by name; `means`
    are the components' over the train prompts, in the family's order."""
    model = values.model
    scores = min(SCORES, model.d_vocab)
    starts = {site.name: means[site.name].rows(family) for site in sites}
    n_rows = max(len(start) for start in starts.values())
    chosen = some_prompts(model, len(values.part("train")), n_rows, scores, seed)
    best = {}
    for some in side_by_side(sites, n_rows, len(chosen), scores):
        regressed = regressions(values, some, starts, family, chosen, scores, seed)
        for site in some:
            spread = means[site.name].std.cpu().clamp(min=1e-6)
            move = solve(regressed.pop(site.name), spread)
            best[site.name] = starts[site.name] + move.to(starts[site.name])
    return best
