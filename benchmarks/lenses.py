"""What a training step of a lens costs, for all layers side by side, against its arithmetic.

The arithmetic (`step_cost`): both kinds unembed every layer; the tuned lens adds a matrix for each,
OCA n(n+1)/2 MLP passes. A step is held against plain matrix products of as many multiply-adds
(three times the forward's: values, and gradients to inputs and, of the tuned lens, to weights).
"""

from functools import partial

import timing
import torch

from oa_utils import lenses
from oa_utils.models import wrap
from oa_utils.paper.lenses import step_cost

CONTEXTS = 64
LENGTH = 8


def first_raw(trainer: lenses.Trainer) -> dict[str, torch.Tensor]:
    start = next(iter(trainer.starts(lenses.LensSettings()).values()))
    return {name: value.requires_grad_() for name, value in start.items()}


def training_step(model, kind: str, data: lenses.Readings):
    trainer = lenses.TRAINERS[kind](model, data)
    raw = first_raw(trainer)
    optimiser = torch.optim.Adam(raw.values())

    def step() -> None:
        optimiser.zero_grad()
        trainer.losses(raw, data.resid, range(model.n_layers), train=True)
        optimiser.step()

    return step


def products(model, kind: str) -> None:
    """Matrix products of a step's forward and of its gradients to inputs, nothing else: every
    layer's unembedding, and the tuned lens's maps or OCA's MLPs."""
    n = model.n_layers
    d = model.d_model
    rows = torch.ones(CONTEXTS, d)
    unembedding = torch.ones(d, model.d_vocab)
    wide = torch.ones(d, 2 * model.d_mlp)
    square = torch.ones(d, d)
    for _ in range(n):
        rows @ unembedding
        torch.ones(CONTEXTS, model.d_vocab) @ unembedding.T
    if kind == "tuned":
        for _ in range(3 * n):  # forward, to inputs, to weights
            rows @ square
        return
    for layer in range(n):  # the later MLPs of all layers so far, side by side
        many = torch.ones((layer + 1) * CONTEXTS, d)
        many @ wide
        torch.ones((layer + 1) * CONTEXTS, 2 * model.d_mlp) @ wide.T


def main() -> None:
    repeats = timing.options(__doc__, repeats=3).parse_args().repeats
    model = wrap(timing.random_gpt2(), device="cpu")
    rng = torch.Generator().manual_seed(0)
    tokens = torch.randint(2, model.d_vocab, (CONTEXTS, LENGTH), generator=rng)
    data = lenses.read(model, tokens)
    calls = {}
    for kind in ("tuned", "oca"):
        calls[kind] = training_step(model, kind, data)
        calls[f"{kind} products"] = partial(products, model, kind)
    spent = timing.in_turn(calls, repeats)
    names = {"tuned": "tuned lens, a training step", "oca": "OCA lens, a training step"}
    rows = [
        timing.row(what, spent[kind], spent[f"{kind} products"], "its matrix products alone")
        for kind, what in names.items()
    ]
    arithmetic = step_cost(model, "oca") / step_cost(model, "tuned")
    against = f"a step of the tuned lens (arithmetic: {arithmetic:.2f} ×)"
    rows.append(timing.row("OCA lens, a training step", spent["oca"], spent["tuned"], against))
    sizes = {"contexts": CONTEXTS, "layers": model.n_layers, **timing.SMALL}
    timing.write("lenses", rows, sizes | {"repeats": repeats})


if __name__ == "__main__":
    main()
