"""What a step of UGS costs against a plain forward and backward, and how that grows.

GPT-2-small's shape, random weights. A step is the search's own (`Trainer.advance`): masks drawn and
pruned, the masked model forward and backward, Adam. `--plain-buffer` takes the buffer in its plain
form, to see what the fast one buys.
"""

import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import timing
import torch

from oa_utils import masked as masked_module
from oa_utils.fills import Constants
from oa_utils.masked import MaskedModel
from oa_utils.models import wrap
from oa_utils.search.loop import Trainer
from oa_utils.search.ugs import UGSSettings, Uniform
from oa_utils.store import Snapshots

GOAL = 1.6  # times the plain pass
PLAIN = "plain forward and backward"
BATCHES = (3, 6, 12, 24)
LENGTHS = (10, 20, 40)
LAYERS = (3, 6, 12)
SHARES = (1.0, 0.3, 0.05, 0.01)


@cache
def gpt2(n_layers: int = 12):
    """The Hugging Face model, and the masked model of the same weights."""
    hf = timing.random_gpt2(n_layer=n_layers)
    return hf, MaskedModel(wrap(timing.random_gpt2(n_layer=n_layers), device="cpu"))


def ugs_step(masked: MaskedModel, n: int, length: int) -> Callable[[], float]:
    """A step on n prompts, one mask each, under optimal ablation."""
    settings = UGSSettings(prompts=n, masks=1)
    task = timing.random_task(masked.model, n, length)
    sampler = Uniform(masked.graph, settings)
    snapshots = Snapshots(Path(timing.STORE.name) / "snapshots", "bench")
    return Trainer(masked, task, settings, sampler, snapshots).advance


def tokens_of(masked: MaskedModel, n: int, length: int) -> torch.Tensor:
    return timing.random_task(masked.model, n, length).train.tokens


def draw_mask(graph, share: float, few_heads: bool) -> torch.Tensor:
    """A mask with `share` of the edges left after pruning: drawn evenly, or half the edges among
    few heads, as searches find them."""
    rng = torch.Generator().manual_seed(0)
    noise = torch.rand(1, len(graph), generator=rng)
    order = torch.rand(graph.n_vertices, generator=rng)
    is_head = torch.tensor([graph.is_head(vertex) for vertex in graph.vertices])

    def pruned(size: float) -> torch.Tensor:
        if not few_heads:
            return graph.prune_dangling(noise < size)
        chosen = ~is_head | (order < size)
        return graph.prune_dangling((noise < 0.5) & chosen[graph.src] & chosen[graph.dst])

    low = 0.0
    high = 1.0
    for _ in range(12):
        middle = (low + high) / 2
        if pruned(middle).float().mean() < share:
            low = middle
        else:
            high = middle
    return pruned(high).float()


def masked_pass(masked: MaskedModel, mask: torch.Tensor) -> Callable[[], None]:
    """Forward and backward to α and constants, dead vertices skipped."""
    model = masked.model
    tokens = tokens_of(masked, timing.PROMPTS, timing.LENGTH)
    last = torch.full((len(tokens),), timing.LENGTH - 1)
    shapes = ((model.d_model,), (model.n_layers, model.n_heads, model.d_head))
    shapes += ((model.n_layers, model.d_model),)
    fill = Constants(*(torch.zeros(shape, requires_grad=True) for shape in shapes))
    alpha = mask.expand(len(tokens), -1).clone().requires_grad_()

    def run() -> None:
        logp = masked(tokens, last, alpha, fill, skip_dead=True)
        torch.autograd.grad(-logp[:, 0].mean(), [alpha, *fill])

    return run


def growth(name: str, sizes: tuple[int, ...], repeats: int, make: Callable) -> list[dict]:
    """A row for each size, and one with the exponents of both sides."""
    rows = []
    for size in sizes:
        spent = timing.in_turn(make(size), repeats)
        line = timing.row(f"UGS step, {size} {name}", spent["ours"], spent["plain"], PLAIN)
        rows.append(line | {"by": name, "size": size})
    powers = {
        side: timing.exponent(sizes, [line[side] for line in rows]) for side in ("ours", "base")
    }
    return [line | {"exponents": powers} for line in rows]


def measure(repeats: int) -> list[dict]:
    hf, masked = gpt2()
    n, length = timing.PROMPTS, timing.LENGTH

    def sides(n: int = n, length: int = length, n_layers: int = 12) -> dict[str, Callable]:
        hf, masked = gpt2(n_layers)
        plain = timing.plain_pass(hf, tokens_of(masked, n, length))
        return {"plain": plain, "ours": ugs_step(masked, n, length)}

    memory = timing.in_fresh_process(__file__, "--memory")
    spent = timing.in_turn(sides(), 3 * repeats)
    rows = [timing.row("UGS step", spent["ours"], spent["plain"], PLAIN, GOAL, **memory)]
    plain = timing.plain_pass(hf, tokens_of(masked, n, length))
    for few_heads in (False, True):
        for share in SHARES[2:] if few_heads else SHARES:
            mask = draw_mask(masked.graph, share, few_heads)
            spent = timing.in_turn({"plain": plain, "ours": masked_pass(masked, mask)}, repeats)
            how = "among few heads" if few_heads else "drawn evenly"
            what = f"masked forward and backward, {share:.0%} of the edges {how}"
            line = timing.row(what, spent["ours"], spent["plain"], PLAIN)
            rows.append(line | {"by": f"edges {how}", "size": mask.mean().item()})
    rows += growth("prompts", BATCHES, repeats, lambda n: sides(n=n))
    rows += growth("tokens", LENGTHS, repeats, lambda length: sides(length=length))
    rows += growth("layers", LAYERS, repeats, lambda n_layers: sides(n_layers=n_layers))
    return rows


def main() -> None:
    parser = timing.options(__doc__, repeats=3)
    parser.add_argument("--memory", action="store_true", help="a step's peak, in this process")
    parser.add_argument("--plain-buffer", action="store_true", help="the plain form of the buffer")
    parser.add_argument("--step", action="store_true", help="the step alone; writes nothing")
    given = parser.parse_args()
    if given.plain_buffer:
        sys.path.append(str(timing.FOLDER.parent / "tests"))
        from plain_buffer import PlainBuffer

        masked_module.WriterBuffer = PlainBuffer
    if given.memory:
        step = ugs_step(MaskedModel(wrap(timing.random_gpt2(), device="cpu")), 12, 20)
        print(json.dumps(timing.memory_of(step)))
        return
    if given.step:
        hf, masked = gpt2()
        plain = timing.plain_pass(hf, tokens_of(masked, 12, 20))
        spent = timing.in_turn({"plain": plain, "ours": ugs_step(masked, 12, 20)}, given.repeats)
        timing.row("UGS step", spent["ours"], spent["plain"], PLAIN, GOAL)
        return
    sizes = {"prompts": timing.PROMPTS, "tokens": timing.LENGTH, **timing.SMALL}
    timing.write("masked", measure(given.repeats), sizes | {"repeats": given.repeats})


if __name__ == "__main__":
    main()
