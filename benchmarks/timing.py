"""What every benchmark shares: the clock, models and tasks of random weights and words, and the
file that holds what was measured.

Seconds are those of the processor on one thread, which do not count what other processes take. The
sides of a ratio run in turn in one process, and the medians are compared.
"""

import os
import tempfile

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["OA_QUIET"] = "1"
STORE = tempfile.TemporaryDirectory(prefix="oa-bench-")  # nothing that is stored is taken for work
os.environ["OA_STORE"] = STORE.name

import argparse  # noqa: E402
import importlib.metadata  # noqa: E402
import json  # noqa: E402
import math  # noqa: E402
import platform  # noqa: E402
import resource  # noqa: E402
import statistics  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable, Mapping, Sequence  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402

torch.set_num_threads(1)
FOLDER = Path(__file__).resolve().parent
SMALL = {"n_layer": 12, "n_head": 12, "n_embd": 768, "vocab_size": 50257, "n_positions": 64}
PROMPTS = 12
LENGTH = 20
PACKAGES = ("torch", "transformers", "transformer-lens")


# ---- the clock


def seconds(call: Callable[[], Any]) -> float:
    """Of the processor, for one call."""
    began = time.process_time()
    call()
    return time.process_time() - began


def in_turn(
    calls: Mapping[str, Callable[[], Any]], repeats: int, warm_up: bool = True
) -> dict[str, float]:
    """The median seconds of each call, all of them run in turn; a first round warms up."""
    spent: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(repeats + warm_up):
        for name, call in calls.items():
            once = seconds(call)
            if i >= warm_up:
                spent[name].append(once)
    return {name: statistics.median(each) for name, each in spent.items()}


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """The power of the size with which a cost grows: the slope of logarithms, by least squares."""
    x = [math.log(size) for size in sizes]
    y = [math.log(cost) for cost in costs]
    return statistics.linear_regression(x, y).slope


def memory_of(call: Callable[[], Any]) -> dict[str, float]:
    """The peak of this process in GB after some calls, and how much of it they brought; for a
    process that runs nothing else."""
    before = memory_now()
    for _ in range(3):
        call()
    peak = memory_peak()
    return {"peak_gb": peak, "net_gb": peak - before}


def memory_now() -> float:
    """GB that this process has; where the system does not tell (macOS), the most it ever had."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return memory_peak()
    return pages * resource.getpagesize() / 1e9


def memory_peak() -> float:
    """The most GB that this process ever had; macOS counts bytes, others kilobytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def in_fresh_process(file: str, *arguments: str, python: str = sys.executable) -> dict[str, Any]:
    """What a benchmark prints as its last line, run by itself."""
    call = [python, file, *arguments]
    done = subprocess.run(call, capture_output=True, text=True)
    if done.returncode:
        last_words = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise RuntimeError(f"{' '.join(map(str, call))} failed:\n{last_words}")
    return json.loads(done.stdout.strip().splitlines()[-1])


# ---- models and tasks


def random_gpt2(**changes: int):
    """A Hugging Face model of GPT-2-small's shape, frozen, with the same weights every time."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(**(SMALL | changes), bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config).eval().requires_grad_(False)


def random_task(model: Any, n: int, length: int = LENGTH, subject: bool = False):
    """n train and n test prompts of random tokens, with counterfactuals, answers, and subjects."""
    from oa_utils.tasks import Task

    rng = torch.Generator().manual_seed(0)
    tokens = torch.randint(2, model.d_vocab, (2, 2 * n, length), generator=rng)
    tokens[..., 0] = model.bos
    answers = tokens[1, :, 1:3]
    return Task(
        name="random",
        tokens=tokens[0],
        last=torch.full((2 * n,), length - 1),
        right=answers[:, :1],
        wrong=answers[:, 1:],
        part=torch.where(torch.arange(2 * n) < n, 0, 2),
        prompts=("",) * 2 * n,
        counterfactual=tokens[1],
        subject=torch.tensor([[length // 4, length // 4 + 2]] * 2 * n) if subject else None,
        relation=("",) * 2 * n if subject else (),
    )


def plain_pass(hf: Any, tokens: torch.Tensor) -> Callable[[], None]:
    """Forward and backward of the model as Hugging Face has it: weights frozen, gradient to the
    embeddings, logits at last positions only. No step that needs a gradient can be cheaper."""

    def run() -> None:
        embedded = hf.transformer.wte(tokens).requires_grad_()
        hidden = hf.transformer(inputs_embeds=embedded).last_hidden_state[:, -1]
        (-hf.lm_head(hidden).log_softmax(-1)[:, 0].mean()).backward()

    return run


@torch.no_grad()
def plain_forward(hf: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Log-probabilities at last positions, by Hugging Face's own forward."""
    hidden = hf.transformer(tokens).last_hidden_state[:, -1]
    return hf.lm_head(hidden).log_softmax(-1)


# ---- what was measured


def row(
    what: str, ours: float, base: float, against: str, goal: float | None = None, **more: Any
) -> dict[str, Any]:
    """One line of a table: seconds of ours, seconds of what it is held against, and their ratio."""
    ratio = ours / base
    print(f"{what}: {ours:.3g} s, {against} {base:.3g} s, ratio {ratio:.3f}", flush=True)
    line = {"what": what, "ours": ours, "base": base, "against": against, "ratio": ratio}
    return line | ({} if goal is None else {"goal": goal}) | more


def about_run(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """What seconds depend on, beside what is measured."""
    versions = {package: importlib.metadata.version(package) for package in PACKAGES}
    return {
        "sizes": dict(sizes),
        "versions": {"python": platform.python_version(), **versions},
        "processor": processor(),
        "clock": "seconds of the processor, one thread",
    }


def write(name: str, rows: list[dict[str, Any]], sizes: Mapping[str, Any], **more: Any) -> None:
    """benchmarks/<name>.json: the rows, with sizes and versions."""
    whole = {**about_run(sizes), **more, "rows": rounded(rows)}
    text = json.dumps(whole, indent=1, ensure_ascii=False)
    (FOLDER / f"{name}.json").write_text(text + "\n", "utf-8")


def processor() -> str:
    """What the system calls its processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def rounded(value: Any) -> Any:
    """Numbers with four digits: more would be noise."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, list) else value


def options(doc: str, repeats: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=repeats)
    return parser
