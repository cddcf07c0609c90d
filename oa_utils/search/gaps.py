"""How good a circuit is: its gap Δ under any ablation, by one protocol for every method."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from oa_utils import machine, metrics, stats, store
from oa_utils.circuits import Circuit
from oa_utils.fills import ABLATIONS, Constants, EdgeFill, edge_constants, edge_fill, find_ablation
from oa_utils.masked import MaskedModel
from oa_utils.search.shared import (
    EVALUATION_BATCH,
    Training,
    add_gradients,
    batch_of,
    check_search,
    check_start,
    in_parts,
    largest_rate,
    named_start,
    scaled_rate,
    suited,
    whole,
)
from oa_utils.store import Snapshots, at_least, frozen, with_settings
from oa_utils.tasks import Task

VERSION = 3
FAMILIES = ("shared", "position")  # of the constants of a circuit


@dataclass(frozen=True)
class GapSettings:
    steps: int = 400  # of Adam, for the constants of `optimal`
    # falls to a tenth; None: as in the paper, more for fewer steps, less for many layers
    lr: float | None = None
    batch: int = 8  # train prompts in a step
    look_every: int | Sequence[int] = 100  # steps between two looks, or the steps of all looks
    look_prompts: int = 256  # train prompts looked at; the best constants seen there are kept
    draws: int = 4  # derangements of `resample`, averaged for each prompt
    metric: str = "kl"  # or `label`, `logit_diff`: what the answers lose
    family: str = "shared"  # one constant for all positions; `position`: one for each
    seed: int = 0

    def __post_init__(self):
        object.__setattr__(self, "look_every", frozen(self.look_every))
        whole(0, steps=self.steps)
        whole(1, batch=self.batch, draws=self.draws, look_prompts=self.look_prompts)
        at_least(0, lr=self.lr or 0)
        looks = self.look_every if isinstance(self.look_every, tuple) else (self.look_every,)
        for step in looks:
            whole(1, look_every=step)
        if self.metric not in metrics.METRICS:
            raise ValueError(f"metric is one of {', '.join(metrics.METRICS)}, not {self.metric!r}")
        if self.family not in FAMILIES:
            raise ValueError(f"family is one of {', '.join(FAMILIES)}, not {self.family!r}")

    @property
    def rate(self) -> float:
        """The paper trains 10,000 steps at 0.002."""
        return self.lr if self.lr is not None else scaled_rate(0.002, 10_000, self.steps, 0.05)

    def suited(self, n_layers: int) -> GapSettings:
        """With a rate that a model of so many layers can take, where none is given."""
        return suited(self, "lr", self.rate, largest_rate(n_layers))

    @property
    def looks(self) -> set[int]:
        """The steps at which the train part is looked at, besides the start."""
        if isinstance(self.look_every, int):
            return {*range(self.look_every, self.steps, self.look_every), self.steps}
        return {*self.look_every, self.steps}


@dataclass(frozen=True, eq=False)
class Gap:
    """Δ over test prompts, in nats; `circuit.with_gap(gap).save(path)` keeps it with the edges."""

    mean: float
    se: float
    n: int
    each: Float[Tensor, " n"]
    constants: Constants | None = None  # those that `optimal` trained
    curve: Sequence[Sequence[float]] = ()  # (step, gap of train prompts) while they trained
    train: float | None = None  # the gap of train prompts with the constants that were kept

    def __float__(self) -> float:
        return self.mean

    def __repr__(self) -> str:
        train = "" if self.train is None else f", {self.train:.4g} on train prompts"
        return f"Gap({self.mean:.4g} ± {self.se:.2g} nats, n = {self.n}{train})"


@torch.no_grad()
def measure(
    masked: MaskedModel,
    part: Task,
    mask: Tensor,
    fill: EdgeFill,
    full: Float[Tensor, "n vocab"],
    metric: str = "kl",
) -> Float[Tensor, " n"]:
    """KL(full ‖ masked) of each prompt under one mask, taken as it is; or another metric."""

    def distance(span: slice) -> Float[Tensor, " b"]:
        rows = torch.arange(len(part))[span]
        logp = masked(*batch_of(part, rows), mask.float()[None], fill(rows), skip_dead=True)
        prompts = part[rows]
        return metrics.distance(metric, full[span], logp, prompts.right, prompts.wrong).cpu()

    n, length = part.tokens.shape
    return torch.cat(list(in_parts(masked, n, length, distance, EVALUATION_BATCH)))


def shuffled(n: int, batch: int, step: int, seed: int) -> Int[Tensor, " b"]:
    """The rows of a step: all of n are used before one comes again, in an order by pass."""
    steps = max(1, n // batch)
    order = torch.randperm(n, generator=machine.generator(seed + 1009 * (step // steps)))
    return order[step % steps * batch :][:batch]


class ConstantsTrainer(Training):
    """Constants for one circuit: the best that any look at train prompts saw, the start first."""

    def __init__(
        self,
        masked: MaskedModel,
        task: Task,
        mask: Tensor,
        ablation: str,
        settings: GapSettings,
        snapshots: Snapshots,
        start: Constants | None = None,
    ):
        super().__init__(masked, task, settings, snapshots)
        self.mask = mask
        self.seen = min(settings.look_prompts, len(self.part))
        if start is None:
            by_position = settings.family == "position"
            rule = ABLATIONS["mean"] if by_position else find_ablation(ablation)
            start = edge_constants(masked, task, rule)
        self.constants = Constants(*(x.clone().requires_grad_() for x in start))
        self.parameters = self.constants._asdict()
        # Adam's usual long memory would let the steep start slow all later steps
        self.optimiser = torch.optim.Adam(self.constants, lr=settings.rate, betas=(0.5, 0.9))
        self.best = self.constants.clone()
        self.curve: list[list[float]] = []  # [step, gap]

    @property
    def least(self) -> float:
        """The gap of the best constants."""
        return min((value for _, value in self.curve), default=math.inf)

    def state(self) -> dict[str, Any]:
        return super().state() | {"curve": self.curve, "best": list(self.best)}

    def resume(self) -> dict[str, Any] | None:
        state = super().resume()
        if state is not None:
            self.curve = state["curve"]
            self.best = Constants(*state["best"])
        return state

    def look(self) -> float:
        """The gap of the first train prompts; returns the seconds that it took."""
        began = time.perf_counter()
        part = self.part[: self.seen]
        each = measure(
            self.masked, part, self.mask, lambda rows: self.constants, self.full[: self.seen]
        )
        now = each.mean().item()
        if now <= self.least:
            self.best = self.constants.clone()
        self.curve.append([self.step, now])
        return time.perf_counter() - began

    def advance(self) -> None:
        settings = self.settings
        rows = shuffled(len(self.part), settings.batch, self.step, settings.seed)
        falling = 1 - 0.9 * self.step / settings.steps
        self.optimiser.param_groups[0]["lr"] = settings.rate * falling
        self.optimiser.zero_grad()

        def loss(span: slice) -> Float[Tensor, ""]:
            some = rows[span]
            tokens = batch_of(self.part, some)
            logp = self.masked(*tokens, self.mask.float()[None], self.constants, skip_dead=True)
            return stats.kl(self.full[some], logp).sum() / len(rows)

        length = self.part.tokens.shape[1]
        add_gradients(self.masked, len(rows), length, loss, self.constants)
        self.optimiser.step()
        self.step += 1

    def run(self) -> None:
        self.resume()
        settings = self.settings
        look_seconds = self.look() if not self.curve else 0.0
        began = self.step
        bar = machine.progress(total=settings.steps, desc="constants of a circuit")
        bar.update(began)
        while self.step < settings.steps:
            start = time.perf_counter()
            self.advance()
            bar.update()
            if self.step == began + 3:  # the first ones warm up
                self.announce(time.perf_counter() - start, look_seconds)
            if self.step in settings.looks:
                look_seconds = self.look()
                bar.set_postfix(KL=f"{self.curve[-1][1]:.3g}")
            self.snapshots.save_when_due(self.state)
        bar.close()

    def announce(self, step_seconds: float, look_seconds: float) -> None:
        """What is left to do, where it takes more than some seconds."""
        steps = self.settings.steps - self.step
        looks = sum(step > self.step for step in self.settings.looks)
        each = step_seconds + look_seconds * looks / max(1, steps)
        if each * steps > 10:
            machine.announce(f"constants of a circuit: {machine.estimate(each, steps)}")


@with_settings
def gap(
    masked: MaskedModel,
    task: Task,
    circuit: Circuit,
    ablation: str = "counterfactual",
    *,
    start: Constants | None = None,
    settings: GapSettings,
) -> Gap:
    """Δ of a circuit on the test part; settings as in `GapSettings`, the same protocol for every
    method.

    Under `optimal`, constants (one for each vertex) are trained afresh on the train part to the
    least KL, starting from the means, or from `start` (`circuit.constants` are those that a search
    under OA trained along: a head start that other circuits do not have).
    `circuit.with_gap(gap(...)).save(path)` keeps what was measured.
    """
    check_search(masked, task, ablation)
    metrics.check_metric(settings.metric, task)
    rule = find_ablation(ablation)
    check_start(start, ablation)
    model = masked.model
    circuit.check(model)
    if circuit.graph != masked.graph:
        raise ValueError(
            f"this circuit is of {circuit.graph}, the masked model of {masked.graph}; make "
            f"MaskedModel(model, level={circuit.graph.level!r})"
        )
    if rule.trained:
        settings = settings.suited(model.n_layers)

    def compute(snapshots: Snapshots) -> tuple[dict, dict[str, Tensor]]:
        numbers = {"method": circuit.method, "n_edges": circuit.n_edges, "curve": []}
        tensors = {}
        if rule.trained:
            trainer = ConstantsTrainer(
                masked, task, circuit.mask, ablation, settings, snapshots, start
            )
            trainer.run()
            fills = [lambda rows: trainer.best]
            tensors = dict(trainer.best._asdict())
            numbers |= {"curve": trainer.curve, "train": trainer.least}
        else:
            draws = settings.draws if rule.random else 1
            seeds = range(settings.seed * draws, (settings.seed + 1) * draws)
            fills = [edge_fill(masked, task, rule, "test", seed) for seed in seeds]
        test = task.test
        full = test.log_probs(model)
        draws = [measure(masked, test, circuit.mask, fill, full, settings.metric) for fill in fills]
        each = torch.stack(draws).mean(0)
        if not each.isfinite().all():
            raise RuntimeError(f"the gap of {circuit} under {ablation} is not finite")
        mean, se = stats.mean_se(each)
        return numbers | {"gap": mean, "se": se, "n": len(each)}, {"each": each, **tensors}

    result = store.run(
        "circuit_gaps",
        settings,
        compute,
        model=model,
        task=task,
        inputs={"circuit": store.fingerprint(circuit.mask), "ablation": str(ablation)}
        | masked.run_inputs
        | named_start(start),
        version=VERSION,
        key=f"{circuit.method}_{circuit.n_edges}-edges_{ablation}",
    )
    numbers = result.numbers
    constants = None
    if rule.trained:
        constants = Constants(*(result.tensors[name] for name in Constants._fields))
    return Gap(
        numbers["gap"],
        numbers["se"],
        numbers["n"],
        result.tensors["each"],
        constants,
        numbers["curve"],
        numbers.get("train"),
    )
