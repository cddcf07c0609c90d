"""What does it cost to ablate every component, against as many full forwards?

A random model of GPT-2-small's shape, 16 prompts of 20 tokens, all 156 components, mean ablation.
Both sides compute logits at last positions only. The full forwards run once with 16 prompts each,
and once with as many copies in a forward as our passes hold; the faster of the two is the measure.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch  # noqa: E402
from transformers import GPT2Config, GPT2LMHeadModel  # noqa: E402

from oa_utils import components, machine, models, sites  # noqa: E402
from oa_utils.tasks import Task  # noqa: E402

BAR = 0.6


def random_task(model: models.Model, n: int, length: int) -> Task:
    rng = torch.Generator().manual_seed(0)
    tokens = torch.randint(2, model.d_vocab, (2, n, length), generator=rng)
    tokens[..., 0] = model.bos
    answers = tokens[1, :, 1:3]
    last = torch.full((n,), length - 1)
    part = torch.where(torch.arange(n) < n // 2, 0, 2)  # train and test
    texts = ("",) * n
    return Task("random", tokens[0], last, answers[:, :1], answers[:, 1:], part, texts, tokens[1])


def gpt2_small() -> models.Model:
    config = GPT2Config(n_positions=64, bos_token_id=0, eos_token_id=0)
    return models.wrap(GPT2LMHeadModel(config), device="cpu")


def seconds(call) -> float:
    """Of the processor where one thread works, which does not count what others take; else of the
    clock."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    began = clock()
    call()
    return clock() - began


def forwards(model: models.Model, task: Task, copies: int, total: int) -> float:
    """Time of `total` copies of the task in full forwards of `copies` copies each, from one that is
    timed."""
    tokens = task.tokens.repeat(copies, 1)
    last = task.last.repeat(copies)
    with torch.no_grad():
        return seconds(lambda: model(tokens, last)) * total / copies


def all_components(model: models.Model, task: Task, names: list[str]) -> None:
    """Every component under mean ablation, means and clean streams counted, nothing stored."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["OA_STORE"] = folder
        components.component_gaps(model, task, names, "mean")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    model = gpt2_small()
    task = random_task(model, 32, 20)
    names = sites.all_components(model)
    copies = max(1, machine.PASS_TOKENS // task.test.tokens.numel())
    ours = []
    single = []
    stacked = []
    for _ in range(repeats):
        ours.append(seconds(lambda: all_components(model, task, names)))
        each = [forwards(model, task.test, 1, len(names)) for _ in range(5)]
        single.append(statistics.median(each))
        stacked.append(forwards(model, task.test, copies, len(names)))
    mine, one_by_one, together = map(statistics.median, (ours, single, stacked))
    print(
        f"{len(names)} components {mine:.1f} s; {len(names)} full forwards {one_by_one:.1f} s one "
        f"by one, {together:.1f} s stacked"
    )
    print(f"ratio {mine / min(one_by_one, together):.2f}, bar {BAR}")


if __name__ == "__main__":
    main()
