"""What all searches share: checks before any work, batches that fit into memory, and circuits that
are stored."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from oa_utils import machine, store
from oa_utils.circuits import Circuit
from oa_utils.fills import Constants, find_ablation
from oa_utils.graph import Graph
from oa_utils.machine import Value
from oa_utils.masked import MaskedModel
from oa_utils.models import Model
from oa_utils.tasks import Task

LEVELS = ("edge", "vertex")
EVALUATION_BATCH = 64  # prompts measured at once
Settings = TypeVar("Settings")


class Method(NamedTuple):
    """A search that `sweep` knows; its file declares it in METHODS, by name."""

    search: Callable[..., Circuit]
    aim: str  # what says how large a circuit becomes: lam or n_edges
    trains: bool  # constants train along; the others' circuits found under CF are measured under OA
    check: Callable[..., None] | None = None  # refuses arguments, before any work
    version: int = 1  # of its algorithm, as in the names of its own runs


def masked_of(model: Model, level: str) -> MaskedModel:
    """A worker's masked model, made once for the weights that it has."""
    return _masked_of(model, model.fingerprint, level)


@lru_cache(maxsize=2)
def _masked_of(model: Model, fingerprint: str, level: str) -> MaskedModel:
    return MaskedModel(model, level)


def scaled_rate(rate: float, its_steps: int, steps: int, most: float) -> float:
    """A learning rate made for so many steps, as much larger for a run as it is shorter, up to a
    bound."""
    return max(rate, min(most, rate * its_steps / max(1, steps)))


def largest_rate(n_layers: int) -> float:
    """Of constants of a model of so many layers: all of them step together, so the more there are,
    the shorter their steps must be (measured on 30 layers, see benchmarks/README.md)."""
    return 0.375 / n_layers


def suited(settings: Settings, name: str, rate: float, most: float) -> Settings:
    """The settings with `most` as the rate of that name, where none is given and the one that they
    would take is larger."""
    is_given = getattr(settings, name) is not None
    return settings if is_given or rate <= most else replace(settings, **{name: most})


def whole(least: int, **values: Any) -> None:
    """Refuses settings that are no whole numbers from `least` on."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name} must be a whole number, at least {least}, got {value!r}")


def check_search(masked: MaskedModel, task: Task, ablation: str, fixed: str = "") -> None:
    """Refuses what cannot be searched, before anything is computed; a `fixed` method trains no
    constants along."""
    if not isinstance(masked, MaskedModel):
        raise TypeError(
            f"a search takes a masked model, oa.MaskedModel(model), not {type(masked).__name__}"
        )
    masked.check_current()
    task.check(masked.model)
    rule = find_ablation(ablation)
    rule.check(task, edges=True)
    if fixed and rule.trained:
        raise ValueError(
            f"{fixed} cannot search under '{ablation}': the best constants depend on the circuit, "
            "and it would have to train them anew for every candidate. Search under "
            "'counterfactual' (or 'mean') and evaluate the circuit with gap(..., "
            "ablation='optimal'), as the paper does; or use ugs or hcgs, which train constants "
            "along"
        )


def check_start(constants: Constants | None, ablation: str) -> None:
    if constants is not None and not find_ablation(ablation).trained:
        raise ValueError(f"constants to start from are for 'optimal': {ablation!r} trains none")


def named_start(constants: Constants | None) -> dict[str, str]:
    """What constants to start from add to a run's name."""
    return {} if constants is None else {"start": store.fingerprint(list(constants))}


def check_price(lam: float | str, level: str) -> None:
    if isinstance(lam, str) or not lam >= 0:
        raise ValueError(
            f"lam is the price of one edge in nats and must be a number from 0 on, got {lam!r}"
        )
    if level not in LEVELS:
        whole = '; whole layers are searched in MaskedModel(model, level="layer")'
        hint = whole if level == "layer" else ""
        raise ValueError(f"level is one of {', '.join(LEVELS)}, not {level!r}{hint}")


def check_size(n_edges: float, graph: Graph) -> None:
    if not isinstance(n_edges, int) or not 0 <= n_edges <= len(graph):
        raise ValueError(
            f"n_edges must be a whole number from 0 to {len(graph)}, the edges of this model, "
            f"got {n_edges!r}"
        )


def batch_of(part: Task, rows: Int[Tensor, " b"]) -> tuple[Int[Tensor, "b pos"], Int[Tensor, " b"]]:
    """Tokens of these prompts, cut behind the longest, and their last positions."""
    last = part.last[rows]
    return part.tokens[rows, : int(last.max()) + 1], last


def in_parts(
    masked: MaskedModel,
    n: int,
    length: int,
    compute: Callable[[slice], Value],
    most: int | None = None,
    desc: str = "",
) -> Iterable[Value]:
    """compute(span) of n examples of so many tokens, as many at once as fit into memory and at
    most `most`; with a bar where it has a name."""
    size = min(most or n, machine.micro_batch(n, masked.example_bytes(length)))
    parts = machine.in_spans(n, size, compute)
    return machine.progress(parts, total=-(-n // size), desc=desc) if desc else parts


def add_gradients(
    masked: MaskedModel,
    n: int,
    length: int,
    loss: Callable[[slice], Float[Tensor, ""]],
    inputs: Sequence[Tensor],
) -> float:
    """The sum of the losses of n examples of so many tokens, with its gradients added at the
    inputs."""

    def slope(span: slice) -> tuple[float, tuple[Tensor | None, ...]]:
        value = loss(span)
        return value.item(), torch.autograd.grad(value, inputs, allow_unused=True)

    total = 0.0
    for value, gradients in in_parts(masked, n, length, slope):
        total += value
        machine.accumulate(inputs, gradients)
    return total


class Training:
    """Steps of an optimiser on a task's train part, which can stop and go on at any of them."""

    parameters: dict[str, Tensor]  # by name: they and the optimiser are set by who trains
    optimiser: torch.optim.Optimizer

    def __init__(self, masked: MaskedModel, task: Task, settings: Any, snapshots: store.Snapshots):
        self.masked = masked
        self.settings = settings
        self.snapshots = snapshots
        self.part = task.train
        self.full = self.part.log_probs(masked.model)
        self.step = 0

    def state(self) -> dict[str, Any]:
        """What a snapshot holds."""
        return {
            "step": self.step,
            "parameters": {name: value.detach() for name, value in self.parameters.items()},
            "optimiser": self.optimiser.state_dict(),
        }

    def resume(self) -> dict[str, Any] | None:
        """Goes on from the last snapshot, if there is one, and hands it back."""
        state = self.snapshots.load()
        if state is not None:
            self.step = state["step"]
            for name, value in self.parameters.items():
                value.data.copy_(state["parameters"][name])
            self.optimiser.load_state_dict(state["optimiser"])
        return state


def as_circuit(
    masked: MaskedModel,
    mask: Tensor,
    method: str,
    settings: Any,
    history: dict,
    constants: Constants | None = None,
) -> Circuit:
    options = asdict(settings)
    ablation = str(options.pop("ablation"))
    seed = options.pop("seed")
    return Circuit(
        masked.graph,
        mask,
        method,
        ablation,
        options,
        seed,
        history,
        model=masked.model.name,
        fingerprint=masked.model.fingerprint,
        constants=constants,
    )


def stored_circuit(
    method: str,
    masked: MaskedModel,
    task: Task,
    settings: Any,
    compute: Callable[[store.Snapshots], tuple[dict, dict[str, Tensor]]],
    version: int,
    aim: str,
    start: Constants | None = None,
) -> Circuit:
    """The circuit that `compute` found, now or earlier: `edges` and `history` of its numbers, final
    θ of its tensors."""
    key = f"{settings.ablation}_{settings.level}_{aim}_seed={settings.seed}"
    result = store.run(
        f"search_{method}",
        settings,
        compute,
        model=masked.model,
        task=task,
        inputs=masked.run_inputs | named_start(start),
        version=version,
        key=key,
    )
    history = result.numbers["history"] | {"seconds": result.seconds}
    if "theta" in result.tensors:
        history["theta"] = result.tensors["theta"].tolist()
    mask = edge_mask(masked.graph, result.numbers["edges"])
    parts = [result.tensors[name] for name in Constants._fields if name in result.tensors]
    constants = Constants(*parts) if parts else None
    return as_circuit(masked, mask, method, settings, history, constants)


def edge_mask(graph: Graph, edges: list[int]) -> Bool[Tensor, " n_edges"]:
    """True at the edges of these numbers."""
    mask = torch.zeros(len(graph), dtype=torch.bool)
    mask[edges] = True
    return mask


def kept_edges(graph: Graph, mask: Tensor) -> dict[str, Any]:
    """The edges of a mask that do not dangle, as numbers that can be stored."""
    kept = graph.prune_dangling(mask).nonzero()[:, 0].tolist()
    return {"n_edges": len(kept), "edges": kept}
