"""Beyond one constant (paper, appendix D.3): estimates of a component's value of constrained form.

What is left when a component may keep a subspace, may choose among k prototypes, or is computed by
a linear map from the stream? Each is a hypothesis about what the component does, tested as OA tests
"nothing": by the gap that the best estimate of that form leaves. All of it trains on the train part
and is measured on the test part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from oa_utils import machine, stats, store
from oa_utils.ablate import CircuitRun, Columns
from oa_utils.circuits import Circuit
from oa_utils.components import ComponentSettings, Experiment
from oa_utils.fills import Constants
from oa_utils.models import Model, column
from oa_utils.sites import BlockValues, Site, Subspace, find
from oa_utils.store import Snapshots
from oa_utils.tasks import Task
from oa_utils.training import Pass, collect, fit

VERSION = 1
BASES = ("pca", "causal", "random")
ROUNDS = 3  # of training prototypes, dead ones being seeded anew between them
KMEANS_STEPS = 20
EDGE_BATCH = 8  # prompts that run at once with a constant for each edge


# ---- subspaces


@torch.no_grad()
def values_of(experiment: Experiment, site: Site, part: str) -> Float[Tensor, "n dim"]:
    """A component's value at each prompt's last position."""
    prompts = experiment.values.prompts(part)
    values = torch.empty(len(prompts), site.dim)

    def put_down(rows: Int[Tensor, " b"]) -> None:
        value = prompts.block(site.layer, rows).value(site)
        values[rows] = column(value, prompts.last[rows])[:, 0].float().cpu()

    for _ in prompts.in_passes(put_down):
        pass
    return values


def slopes_of(experiment: Experiment, site: Site) -> Float[Tensor, "n dim"]:
    """How KL to the full model begins to change with the value, prompt by prompt, halfway to the
    mean (at the value itself KL has no slope)."""
    mean = values_of(experiment, site, "train").mean(0)
    shift = torch.zeros(len(experiment.values.part("train")), site.dim, requires_grad=True)

    def fill(layer: int, rows: Int[Tensor, " b"]) -> Callable:
        return lambda site, value: (value + mean.to(value)) / 2 + shift[rows, None].to(value)

    for _, _, value in experiment.losses("train", [site], fill, "kl"):
        value.sum().backward()
    return shift.grad


def basis(
    model: Model, task: Task, component: str, kind: str, seed: int = 0
) -> Float[Tensor, "dim dim"]:
    """Orthonormal rows, the most important first: directions of most variance (`pca`), of steepest
    loss (`causal`), or any (`random`)."""
    if kind not in BASES:
        raise ValueError(f"a basis is one of {', '.join(BASES)}, not {kind!r}")
    site = find(component, model)
    if kind == "random":
        rows = torch.randn(site.dim, site.dim, generator=machine.generator(seed))
    else:
        experiment = Experiment(model, task, "kl", ComponentSettings(seed=seed))
        rows = slopes_of(experiment, site) if kind == "causal" else None
        rows = values_of(experiment, site, "train") if rows is None else rows
        rows = rows - rows.mean(0) if kind == "pca" else rows
    return torch.linalg.svd(rows.double()).Vh.float()


def only(component: str, rows: Float[Tensor, "dim dim"], kept: int) -> Subspace:
    """All of a component but its first `kept` directions: what is ablated when it keeps these."""
    if not 0 <= kept < len(rows):
        raise ValueError(f"kept is from 0 to {len(rows) - 1}, got {kept}")
    return Subspace(component, rows[kept:])


# ---- prototypes


class Prototypes(NamedTuple):
    values: Float[Tensor, "k dim"]
    train: Float[Tensor, "k n"]  # the gap of each train prompt under each of them
    test: Float[Tensor, "k m"]
    chosen: Int[Tensor, " m"]  # for each test prompt, the one that its value is nearest to

    @property
    def best(self) -> Float[Tensor, " m"]:
        """Gaps of test prompts, each under the prototype that suits it best: flatters itself."""
        return self.test.amin(0)

    @property
    def by_rule(self) -> Float[Tensor, " m"]:
        """Gaps of test prompts under the prototype that the rule picks without looking."""
        return self.test.gather(0, self.chosen[None])[0]


def kmeans(points: Float[Tensor, "n dim"], k: int, rng: torch.Generator) -> Float[Tensor, "k dim"]:
    """Centres of k clusters, seeded far from each other."""
    centres = points[torch.randint(len(points), (1,), generator=rng)]
    while len(centres) < k:
        near = torch.cdist(points, centres).amin(1).square() + 1e-12
        centres = torch.cat([centres, points[torch.multinomial(near, 1, generator=rng)]])
    for _ in range(KMEANS_STEPS):
        nearest = torch.cdist(points, centres).argmin(1)
        for j in nearest.unique():
            centres[j] = points[nearest == j].mean(0)
    return centres


def prototypes(
    model: Model, task: Task, component: str, most: int, settings: ComponentSettings
) -> list[Prototypes]:
    """The best k constants, each prompt under the one that suits it, for k = 1 … most; none is
    worse on the train part than those of one less."""
    experiment = Experiment(model, task, "kl", settings)
    site = find(component, model)

    def compute(_: Snapshots) -> tuple[dict, dict[str, Tensor]]:
        tensors = {}
        found: list[Prototypes] = []
        for k in machine.progress(range(1, most + 1), desc=f"prototypes of {component}"):
            found.append(_prototypes(experiment, site, k, found[-1] if found else None))
            tensors |= {f"{name}.{k}": value for name, value in found[-1]._asdict().items()}
        rows = [
            {"k": k, "best": p.best.mean().item(), "by_rule": p.by_rule.mean().item()}
            for k, p in enumerate(found, 1)
        ]
        return {"rows": rows}, tensors

    result = store.run(
        "prototypes",
        settings,
        compute,
        model=model,
        task=task,
        inputs={"component": site.name, "most": most},
        version=VERSION,
        key=f"{site.name}_k={most}",
    )
    return [
        Prototypes(*(result.tensors[f"{name}.{k}"] for name in Prototypes._fields))
        for k in range(1, most + 1)
    ]


def _prototypes(experiment: Experiment, site: Site, k: int, fewer: Prototypes | None) -> Prototypes:
    settings = experiment.settings
    values = values_of(experiment, site, "train")
    starts = [kmeans(values, k, machine.generator(settings.seed + i)) for i in range(2)]
    if fewer is not None:  # and one more, for the prompt that is worst off
        worst = fewer.train.amin(0).argmax()
        starts.append(torch.cat([fewer.values, values[worst][None]]))
    scale = max(values.std(0).square().mean().sqrt().item(), 1e-6)

    def losses(constants: Sequence[Tensor], which: Any, rows: Any) -> Iterator[Pass]:
        for _, chunk, value in _under_each(experiment, site, constants[0], "train", rows):
            yield slice(0, 1), chunk, value.amin(0, keepdim=True)

    n = len(experiment.values.part("train"))
    for _ in range(ROUNDS):
        [best] = fit([[start] for start in starts], [scale], losses, n, settings).constants
        train = _table(experiment, site, best, "train")
        used = train.argmin(0).bincount(minlength=k)
        if (used > 0).all():
            break
        seeded = best.clone()
        seeded[used == 0] = values[train.amin(0).topk(int((used == 0).sum())).indices]
        starts = [best, seeded]
    own = train.argmin(0)
    centres = torch.stack([values[own == j].mean(0) for j in range(k)])
    centres = torch.where(centres.isfinite(), centres, torch.inf)
    chosen = torch.cdist(values_of(experiment, site, "test"), centres).nan_to_num(torch.inf)
    return Prototypes(best, train, _table(experiment, site, best, "test"), chosen.argmin(1))


def _under_each(
    experiment: Experiment,
    site: Site,
    constants: Float[Tensor, "k dim"],
    part: str,
    rows: Int[Tensor, " b"] | None = None,
) -> Iterator[tuple[slice, Int[Tensor, " b"], Float[Tensor, "k b"]]]:
    """Losses of prompts under each of k constants, all k in one pass."""
    copies = [replace(site, name=f"{site.name}#{j}") for j in range(len(constants))]
    table = {copy.name: constant[None] for copy, constant in zip(copies, constants, strict=True)}
    fill = experiment.values.constant_fill(table, "shared", part)
    for which, chunk, value in experiment.losses(part, copies, fill, "kl", rows):
        if which != slice(0, len(copies)):
            raise RuntimeError(f"{len(copies)} prototypes do not fit into one pass")
        yield which, chunk, value


@torch.no_grad()
def _table(
    experiment: Experiment, site: Site, constants: Float[Tensor, "k dim"], part: str
) -> Float[Tensor, "k n"]:
    n = len(experiment.values.part(part))
    passes = partial(_under_each, experiment, site, constants, part)
    return collect(passes, len(constants), n)


# ---- a linear map from the stream


class Mapped(NamedTuple):
    gap: Float[Tensor, " m"]  # of test prompts, the value computed by the map
    bound: Float[Tensor, " b"]  # of a few test prompts, their own best values in the subspace
    mapped: Float[Tensor, " b"]  # the same prompts, by the map


def linear_estimate(
    model: Model,
    task: Task,
    component: str,
    rows: Float[Tensor, "dim dim"],
    dims: int,
    settings: ComponentSettings,
    few: int = 16,
) -> Mapped:
    """The component's value computed from the stream that it reads, at the same position, by a
    linear map into the span of the first `dims` rows (around its mean); and, on a few prompts, what
    values in that span could do at best (each trained by itself)."""
    experiment = Experiment(model, task, "kl", settings)
    site = find(component, model)
    span = rows[:dims]

    def compute(snapshots: Snapshots) -> tuple[dict, dict[str, Tensor]]:
        start, mean = _least_squares(experiment, site, span)
        train = len(experiment.values.part("train"))

        def losses(weights: Sequence[Tensor], which: Any, rows: Any) -> Iterator[Pass]:
            fill = _map_fill(experiment, site, weights[0], span, mean, "train")
            return experiment.losses("train", [site], fill, "kl", rows)

        zero = torch.zeros_like(start)
        scale = start.square().mean().sqrt().item() + 1e-9
        [weights] = fit([[start], [zero]], [scale], losses, train, settings, snapshots).constants
        with torch.no_grad():
            fill = _map_fill(experiment, site, weights, span, mean, "test")
            n = len(experiment.values.part("test"))
            gap = collect(partial(experiment.losses, "test", [site], fill, "kl"), 1, n)[0]
        bound = _bound(experiment, site, span, mean, min(few, n))
        numbers = {"gap": gap.mean().item(), "bound": bound.mean().item()}
        return numbers, {"gap": gap, "bound": bound, "mapped": gap[: len(bound)].clone()}

    result = store.run(
        "linear_estimates",
        settings,
        compute,
        model=model,
        task=task,
        inputs={"component": site.name, "span": store.fingerprint(span), "few": few},
        version=VERSION,
        key=f"{site.name}_{dims}d",
    )
    return Mapped(*(result.tensors[name] for name in Mapped._fields))


def _read(block: BlockValues, site: Site) -> Float[Tensor, "b pos d"]:
    """The stream that a component reads, normalised as it reads it."""
    if site.value in ("hidden", "mlp"):
        return block.block.ln2(block.read_by_mlp)
    return block.block.ln1(block.before)


@torch.no_grad()
def _least_squares(
    experiment: Experiment, site: Site, span: Float[Tensor, "k dim"]
) -> tuple[Float[Tensor, "d k"], Float[Tensor, " dim"]]:
    """The map that is nearest to the component's own value in the span, and its mean."""
    prompts = experiment.values.prompts("train")
    read = []
    value = []
    for rows in prompts.chunks(prompts.pass_rows):
        block = prompts.block(site.layer, rows)
        length = block.before.shape[1]
        inside = torch.arange(length, device=prompts.last.device) <= prompts.last[rows, None]
        inside[:, 0] = False
        read.append(_read(block, site)[inside].float())
        value.append(block.value(site)[inside].float())
    x = torch.cat(read)
    y = torch.cat(value)
    mean = y.mean(0)
    ridge = 1e-3 * x.square().mean() * len(x) * torch.eye(x.shape[1], device=x.device)
    target = (y - mean) @ span.to(y).T
    return torch.linalg.solve(x.T @ x + ridge, x.T @ target), mean


def _map_fill(
    experiment: Experiment,
    site: Site,
    weights: Float[Tensor, "d k"],
    span: Float[Tensor, "k dim"],
    mean: Float[Tensor, " dim"],
    part: str,
) -> Callable:
    prompts = experiment.values.prompts(part)

    def fill(layer: int, rows: Int[Tensor, " b"]) -> Callable:
        with torch.no_grad():
            read = _read(prompts.block(layer, rows), site).float()
        return lambda site, value: mean + read @ weights @ span.to(read)

    return fill


def _bound(
    experiment: Experiment,
    site: Site,
    span: Float[Tensor, "k dim"],
    mean: Float[Tensor, " dim"],
    few: int,
) -> Float[Tensor, " few"]:
    """Gaps of the first test prompts, each with its own values in the span, one for each position,
    trained from the projection of the true ones."""
    prompts = experiment.values.prompts("test")
    rows = torch.arange(few)
    with torch.no_grad():
        value = prompts.block(site.layer, rows).value(site).float()
        start = (value - mean) @ span.to(value).T
    scale = start.square().mean().sqrt().item() + 1e-9

    def losses(values: Sequence[Tensor], which: Any, chosen: Any) -> Iterator[Pass]:
        def fill(layer: int, at: Int[Tensor, " b"]) -> Callable:
            return lambda site, value: mean + values[0][at, : value.shape[1]] @ span.to(value)

        return experiment.losses("test", [site], fill, "kl", rows if chosen is None else chosen)

    settings = replace(experiment.settings, batch=0)
    best = fit([[start]], [scale], losses, few, settings).constants
    with torch.no_grad():
        return collect(partial(losses, best, [0]), 1, few)[0]


# ---- a constant for each edge


class EdgeRun(CircuitRun):
    """A circuit in which every reader has its own constant: the sum of those of its ablated edges,
    since nothing tells them apart."""

    def __init__(self, model: Model, circuit: Circuit, fill: Constants):
        super().__init__(model, circuit, fill, Columns())
        self.shifts = {
            reader: torch.zeros(*kept.shape[:-1], model.d_model, device=model.device)
            for reader, kept in self.kept.items()
        }
        self.ablated = {
            reader: (kept == 0).any(-1, keepdim=True) for reader, kept in self.kept.items()
        }

    def read(self, reader: str) -> Float[Tensor, "batch pos *slots d"]:
        x = super().read(reader)
        behind_first = (self.positions > 0).reshape(-1, *[1] * (x.ndim - 2))
        return x + self.shifts[reader] * self.ablated[reader] * behind_first

    def log_probs(
        self, tokens: Int[Tensor, "batch pos"], last: Int[Tensor, " batch"]
    ) -> Float[Tensor, "batch vocab"]:
        """The circuit's forward, without the bridge."""
        embed = self.model.embed(tokens)
        self.begin(embed)
        heads = embed.new_empty(*embed.shape[:2], self.model.n_heads, self.model.d_head)
        for layer in range(self.model.n_layers):
            self.attention_of(layer)(heads)
            self.mlp_of(layer)(embed)
        return self.model.log_probs(column(self.end(embed), last.to(embed.device))[:, 0])


class EdgeConstants(NamedTuple):
    gap: Float[Tensor, " m"]  # of test prompts, with a constant for each ablated edge
    train: float  # the mean over train prompts
    n_vertex: int  # numbers trained with a constant for each vertex
    n_edge: int  # and with one for each edge, those that enter one reader taken together


def edge_constants(
    model: Model, task: Task, circuit: Circuit, start: Constants, settings: ComponentSettings
) -> EdgeConstants:
    """A circuit with a constant for each ablated edge, trained from those of vertices."""

    def compute(snapshots: Snapshots) -> tuple[dict, dict[str, Tensor]]:
        run = EdgeRun(model, circuit, start)
        shapes = {reader: shift.shape for reader, shift in run.shifts.items()}
        flat = torch.cat([shift.flatten() for shift in run.shifts.values()])
        full = {part: getattr(task, part).log_probs(model) for part in ("train", "test")}

        def losses(part: str, shift: Tensor, rows: Int[Tensor, " b"] | None) -> Iterator[Pass]:
            prompts = getattr(task, part)
            rows = torch.arange(len(prompts)) if rows is None else rows
            run.shifts = {
                reader: piece.view(shapes[reader])
                for reader, piece in zip(
                    shapes, shift.split([shape.numel() for shape in shapes.values()]), strict=True
                )
            }
            for some in rows.split(EDGE_BATCH):
                logp = run.log_probs(prompts.tokens[some], prompts.last[some])
                yield slice(0, 1), some, stats.kl(full[part][some], logp)[None]

        def train(values: Sequence[Tensor], which: Any, rows: Any) -> Iterator[Pass]:
            return losses("train", values[0], rows)

        scale = start.embed.std().item()
        n = len(task.train)
        fitted = fit([[flat]], [scale], train, n, settings, snapshots)
        with torch.no_grad():
            passes = partial(losses, "test", fitted.constants[0])
            gap = collect(passes, 1, len(task.test))[0]
        n_edge = sum(int(ablated.sum()) * model.d_model for ablated in run.ablated.values())
        return {"gap": gap.mean().item(), "n_edge": n_edge, "curve": fitted.curves[0]}, {"gap": gap}

    result = store.run(
        "edge_constants",
        settings,
        compute,
        model=model,
        task=task,
        inputs={"circuit": store.fingerprint(circuit.mask), "start": store.fingerprint(*start)},
        version=VERSION,
        key=f"{circuit.n_edges}-edges",
    )
    n_vertex = sum(part.numel() for part in start)
    numbers = result.numbers
    train = min(value for _, value in numbers["curve"])
    return EdgeConstants(result.tensors["gap"], train, n_vertex, numbers["n_edge"])
