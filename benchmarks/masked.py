"""Time and memory of the edge-masked model against its bars (GPT-2-small shape, random weights, 20
tokens).

python benchmarks/masked.py [--threads 2] [--repeats 7] [--clock wall] [--plain]

Plain = forward and backward of the Hugging Face model on the same batch, weight gradients on,
logits at last positions only. Every ratio comes from one process that runs both sides in turn
(median of the ratios' parts); memory is the peak of a fresh process that runs nothing but the
masked side. On a busy machine use `--threads 1 --clock cpu`.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

# name: what, examples, share of edges, spread over all heads, against, bar, bar of memory in GB
CASES = {
    "step": ("one UGS step, 12 examples", 12, 1.0, True, "plain", 3.0, 3.0),
    "step60": (
        "one UGS step, 60 examples in micro-batches of 12",
        60,
        1.0,
        True,
        "step of 12",
        5.5,
        6.0,
    ),
    "found5": ("skip_dead, a circuit of 5 % of the edges", 12, 0.05, False, "plain", 1.5, 3.0),
    "found1": ("skip_dead, a circuit of 1 % of the edges", 12, 0.01, False, "plain", 1.1, 3.0),
    "spread5": ("skip_dead, 5 % of the edges, drawn evenly", 12, 0.05, True, "plain", 1.5, 3.0),
    "spread1": ("skip_dead, 1 % of the edges, drawn evenly", 12, 0.01, True, "plain", 1.1, 3.0),
    "apart5": (
        "skip_dead, 5 % drawn evenly for each mask by itself",
        12,
        0.05,
        None,
        "plain",
        1.5,
        3.0,
    ),
    "apart1": (
        "skip_dead, 1 % drawn evenly for each mask by itself",
        12,
        0.01,
        None,
        "plain",
        1.1,
        3.0,
    ),
}


def draw_masks(graph, n: int, share: float, spread: bool | None):
    """Masks with `share` of the edges left after pruning; one that a search found keeps half the
    edges of few heads."""
    import torch

    shape = (n if spread is None else 1, len(graph))
    noise, alpha = torch.rand(shape), (3 * torch.rand(n, len(graph)) - 0.2).clamp(0, 1)
    heads, order = (
        torch.tensor([graph.is_head(v) for v in graph.vertices]),
        torch.rand(graph.n_vertices),
    )

    def masks(size: float):
        if spread is not False:
            return graph.prune_dangling((noise < size) * alpha)
        chosen = ~heads | (order < size)
        return graph.prune_dangling(((noise < 0.5) & chosen[graph.src] & chosen[graph.dst]) * alpha)

    low, high = 0.0, 1.0
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if (masks(middle) > 0).float().mean() < share else (low, middle)
    return masks(high)


def run(name: str, threads: int, repeats: int, clock: str, plain: bool, memory_only: bool) -> dict:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from oa_utils import masked as masked_module
    from oa_utils.fills import Constants
    from oa_utils.masked import MaskedModel
    from oa_utils.models import wrap

    if plain:  # the masked model with its plain buffer
        from plain_buffer import PlainBuffer

        masked_module.WriterBuffer = PlainBuffer

    _, n, share, spread, against, *_ = CASES[name]
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    now = time.perf_counter if clock == "wall" else time.process_time
    masked = MaskedModel(wrap(GPT2LMHeadModel(GPT2Config()), device="cpu"))
    graph = masked.graph
    tokens, last = torch.randint(0, 50256, (n, 20)), torch.full((n,), 19)
    tokens[:, 0] = masked.model.bos
    theta = torch.ones(len(graph), requires_grad=True)
    fill = Constants(
        *(torch.zeros(s, requires_grad=True) for s in ((768,), (12, 12, 64), (12, 768)))
    )
    optimiser = torch.optim.Adam([theta, *fill])
    given = None if share == 1 else draw_masks(graph, n, share, spread)

    def loss(logp):
        return -logp[:, 0].mean()

    def step(n: int = n) -> None:
        optimiser.zero_grad()
        for rows in torch.arange(n).split(12):
            p = theta.sigmoid()
            if given is None:
                window = (p * (1 - p)).detach()
                p = p * window + (p * (1 - window)).detach()
                mask = (0.5 + (p - torch.rand(len(rows), len(graph))) / window).clamp(0, 1)
            else:
                mask = given[rows] * (1 + p - p.detach())
            logp = masked(tokens[rows], last[rows], mask, fill, skip_dead=given is not None)
            loss(logp).backward()
        optimiser.step()

    if memory_only:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        before = pages * resource.getpagesize() / 1e9  # the model and the libraries
        for _ in range(3):
            step()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
        return {"gigabytes": peak, "net": peak - before}
    if against == "plain":
        hf = GPT2LMHeadModel(GPT2Config()).eval()

        def base() -> None:
            hidden = hf.transformer(tokens).last_hidden_state[torch.arange(n), last]
            loss(hf.lm_head(hidden).log_softmax(-1)).backward()
            hf.zero_grad()
    else:

        def base() -> None:
            step(12)

    times: dict[str, list[float]] = {"base": [], "own": []}
    for i in range(repeats + 1):
        for key, what in (("base", base), ("own", step)):
            start = now()
            what()
            if i:  # the first round warms up
                times[key].append(now() - start)
    base_s, own_s = (statistics.median(times[key]) for key in ("base", "own"))
    kept = 1.0 if given is None else (given > 0).float().mean().item()
    return {"base": base_s, "own": own_s, "ratio": own_s / base_s, "kept": kept}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", default=list(CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--plain", action="store_true", help="with the plain form of the buffer")
    parser.add_argument("--inner", choices=["time", "memory"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    settings = options.threads, options.repeats, options.clock, options.plain
    if options.inner:
        print(json.dumps(run(options.cases[0], *settings, options.inner == "memory")))
        return
    print(f"{options.threads} threads, median of {options.repeats}, {options.clock} clock")
    columns = (
        f"{'edges':>6} {'base s':>7} {'own s':>7} {'ratio':>6} {'bar':>4} {'GB':>5} {'bar':>4} "
        f"{'net':>5}"
    )
    print(f"{'case':<52} {columns}")
    for name in options.cases:
        what, *_, bar, bar_memory = CASES[name]
        found = {}
        for inner in ("time", "memory"):
            command = [sys.executable, __file__, name, "--inner", inner, "--clock", options.clock]
            command += ["--threads", str(options.threads), "--repeats", str(options.repeats)]
            command += ["--plain"] if options.plain else []
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found |= json.loads(done.stdout.splitlines()[-1])
        slow = "" if found["ratio"] <= bar else " !"
        large = "" if found["gigabytes"] < bar_memory else " !"
        times = f"{found['base']:7.3f} {found['own']:7.3f} {found['ratio']:6.2f} {bar:4.1f}{slow}"
        memory = f"{found['gigabytes']:5.2f} {bar_memory:4.1f}{large} {found['net']:5.2f}"
        print(f"{what:<52} {found['kept']:6.1%} {times} {memory}", flush=True)


if __name__ == "__main__":
    main()
