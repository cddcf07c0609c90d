"""What the methods cost against what they could not do without: full forwards, forward and backward
passes.

GPT-2-small's shape, random weights and prompts; UGS and ACDC are run to the same size on `tiny`,
whose circuits are real.
"""

import math
from functools import partial
from pathlib import Path

import masked as masked_benchmark
import timing
import torch

import oa_utils as oa
from oa_utils import components, machine, sites
from oa_utils.masked import MaskedModel
from oa_utils.models import wrap
from oa_utils.search.acdc import ACDCSettings, Backwards
from oa_utils.search.eap import EAPSettings, Scores
from oa_utils.search.ugs import UGSSettings
from oa_utils.store import Snapshots
from oa_utils.tracing import Prompts, window_of

SWEPT = 8  # prompts of the component sweep
EDGES = 200  # drawn at random, for ACDC
POINTS = 5  # of EAP-IG
WINDOW = 5  # layers that OAT restores
PRICES = {"acdc": 1e-3, "ugs": (1e-3, 3e-3)}  # λ, on tiny


class SomeEdges(Backwards):
    """ACDC that decides about some edges only, in its own order."""

    def __init__(self, *arguments, n: int = EDGES):
        super().__init__(*arguments)
        chosen = torch.randperm(len(self.graph), generator=machine.generator(0))[:n]
        self.chosen = chosen.sort(descending=True).values

    def units(self) -> list[torch.Tensor]:
        return list(self.chosen[:, None])


def component_sweep(hf, model) -> list[dict]:
    """Every component under mean ablation, means and clean streams counted, against the faster of
    full forwards one by one and many copies in one; with and without the passes from which a run
    tells its cost before it starts."""
    task = timing.random_task(model, SWEPT)
    names = sites.all_components(model)
    tokens = task.test.tokens
    copies = max(1, machine.PASS_TOKENS // tokens.numel())
    telling: list[float] = []
    tell_cost = components.Experiment.tell_cost

    def timed(experiment, jobs) -> None:
        telling.append(timing.seconds(lambda: tell_cost(experiment, jobs)))

    components.Experiment.tell_cost = timed
    ours = timing.seconds(lambda: components.component_gaps(model, task, names, "mean"))
    components.Experiment.tell_cost = tell_cost
    calls = {
        "one": partial(timing.plain_forward, hf, tokens),
        "stacked": partial(timing.plain_forward, hf, tokens.repeat(copies, 1)),
    }
    spent = timing.in_turn(calls, 3)
    base = len(names) * min(spent["one"], spent["stacked"] / copies)
    what = f"mean ablation of all {len(names)} components"
    against = "one full forward a component"
    return [
        timing.row(what, ours, base, against, prompts=SWEPT),
        timing.row(
            f"{what}, its cost not told before", ours - sum(telling), base, against, prompts=SWEPT
        ),
    ]


def some_of_acdc(hf, masked: MaskedModel, repeats: int) -> list[dict]:
    """ACDC's decisions about some edges, with all others kept, against a full forward for each; and
    what UGS takes against ACDC about all edges, as far as these and a step of UGS tell."""
    settings = ACDCSettings(prompts=SWEPT)
    task = timing.random_task(masked.model, SWEPT)
    search = SomeEdges(masked, task, settings)
    path = Path(timing.STORE.name) / "acdc"
    decide = timing.seconds(lambda: search.run(Snapshots(path, "bench")))
    calls = {
        "one": partial(timing.plain_forward, hf, task.train.tokens),
        "step": masked_benchmark.ugs_step(masked, timing.PROMPTS, timing.LENGTH),
    }
    spent = timing.in_turn(calls, repeats)
    ugs = UGSSettings()
    n_edges = len(masked.graph)
    every_edge = decide * n_edges / EDGES
    all_steps = spent["step"] * ugs.steps * ugs.prompts * ugs.masks / timing.PROMPTS
    what = f"UGS, {ugs.steps} steps of {ugs.prompts * ugs.masks} masks (estimated from one step)"
    against = f"ACDC, all {n_edges:,} edges (estimated from {EDGES}; at most)"
    return [
        timing.row(
            f"ACDC, {EDGES} random edges",
            decide,
            EDGES * spent["one"],
            "one full forward an edge",
            prompts=SWEPT,
        ),
        timing.row(what, all_steps, every_edge, against),
    ]


def attribution(hf, masked: MaskedModel, repeats: int) -> list[dict]:
    """EAP and EAP-IG from the start (full model, fill, gradients) against forward and backward."""
    task = timing.random_task(masked.model, timing.PROMPTS)
    plain = timing.plain_pass(hf, task.train.tokens)

    def score(points: int, path: str) -> None:
        Scores(masked, task, EAPSettings(points=points, path=path)).mean()

    calls = {
        "plain": plain,
        "eap": partial(score, 1, "inputs"),
        "inputs": partial(score, POINTS, "inputs"),
        "masks": partial(score, POINTS, "masks"),
    }
    spent = timing.in_turn(calls, repeats)
    base = spent["plain"]
    many = f"{POINTS} × plain forward and backward"
    return [
        timing.row("EAP, all edges", spent["eap"], base, masked_benchmark.PLAIN),
        timing.row("EAP-IG along inputs", spent["inputs"], POINTS * base, many),
        timing.row("EAP-IG along masks", spent["masks"], POINTS * base, many),
    ]


def tracing(hf, model, repeats: int) -> list[dict]:
    """OAT of all layers side by side, without and with gradients, against a pass for each."""
    task = timing.random_task(model, timing.PROMPTS, subject=True)
    prompts = Prompts(model, task.test, "mlp")
    windows = [window_of(layer, WINDOW, model.n_layers) for layer in range(model.n_layers)]
    mean = prompts.subjects().mean(0)
    constants = [mean.clone().requires_grad_() for _ in windows]
    change = partial(prompts.constant, constants=constants)

    def step() -> None:
        for _, _, p in prompts.passes(change, windows, "last"):
            (p[0] - p[1:]).relu().sum().backward()

    calls = {
        "forward": partial(timing.plain_forward, hf, task.test.tokens),
        "plain": timing.plain_pass(hf, task.test.tokens),
        "measure": lambda: prompts.measure(change, windows, "last"),
        "step": step,
    }
    spent = timing.in_turn(calls, repeats)
    n = model.n_layers
    return [
        timing.row("OAT, all layers", spent["measure"], n * spent["forward"], "a forward a layer"),
        timing.row(
            "OAT, a training step of all layers",
            spent["step"],
            n * spent["plain"],
            "a plain forward and backward a layer",
        ),
    ]


def to_one_size() -> dict:
    """UGS and ACDC under counterfactual ablation on tiny, at prices that give about one size: the
    UGS run whose size is nearest to ACDC's."""
    masked = MaskedModel(oa.load_model("tiny", device="cpu"))
    task = oa.tasks.ioi(masked.model, 128, seed=0)
    runs = []
    for method, prices in (("acdc", [PRICES["acdc"]]), ("ugs", PRICES["ugs"])):
        search = getattr(oa, method)
        for lam in prices:
            circuits = []
            call = partial(search, masked, task, ablation="counterfactual", lam=lam)
            spent = timing.seconds(lambda call=call, circuits=circuits: circuits.append(call()))
            n_edges = circuits[0].n_edges
            gap = oa.gap(masked, task, circuits[0], ablation="counterfactual").mean
            runs.append({"method": method, "lam": lam, "n_edges": n_edges, "gap": gap, "s": spent})
    acdc = runs[0]
    ugs = min(runs[1:], key=lambda run: abs(math.log(max(1, run["n_edges"]) / acdc["n_edges"])))
    what = f"UGS to {ugs['n_edges']} edges (tiny, IOI)"
    against = f"ACDC to {acdc['n_edges']}"
    return timing.row(what, ugs["s"], acdc["s"], against, runs=runs)


def main() -> None:
    repeats = timing.options(__doc__, repeats=3).parse_args().repeats
    hf, masked = masked_benchmark.gpt2()
    model = masked.model
    rows = component_sweep(hf, model) + some_of_acdc(hf, masked, repeats)
    rows += attribution(hf, masked, repeats)
    rows += tracing(hf, wrap(timing.random_gpt2(), device="cpu"), repeats)
    rows.append(to_one_size())
    sizes = {"prompts": timing.PROMPTS, "tokens": timing.LENGTH, **timing.SMALL}
    timing.write("methods", rows, sizes | {"repeats": repeats})


if __name__ == "__main__":
    main()
