"""What does it cost to ablate every component, against as many full forwards?

A random model of GPT-2-small's shape, 16 prompts of 20 tokens, all 156 components, mean ablation. Both sides compute
logits at last positions only. The full forwards run once with 16 prompts each, and once with as many copies in a forward
as our passes hold; the faster of the two is the measure. `--small` takes a model of 6 layers, 4 heads and d 128 and adds
the time of every ablation of every component; `--smollm2` a random model of SmolLM2's shape and one OA step.
"""

import argparse
import statistics
import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from oa_utils import ablation, components, models, runs
from oa_utils.tasks import Task

BAR = 0.6


def random_task(model: models.Model, n: int, length: int) -> Task:
    rng = torch.Generator().manual_seed(0)
    tokens = torch.randint(2, model.d_vocab, (2, n, length), generator=rng)
    tokens[..., 0] = model.bos
    right = tokens[1, :, 1:3]
    last, half = torch.full((n,), length - 1), torch.arange(n) < n // 2
    return Task("random", tokens[0], last, right[:, :1], right[:, 1:], half, ("",) * n, tokens[1])


def gpt2(layers: int, heads: int, width: int, vocab: int) -> models.Model:
    shape = {"n_layer": layers, "n_head": heads, "n_embd": width, "vocab_size": vocab, "n_positions": 64}
    return models.wrap(GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0)), device="cpu")


def smollm2() -> models.Model:
    shape = {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}
    config = LlamaConfig(**shape, intermediate_size=1536, vocab_size=49152, bos_token_id=0, eos_token_id=0)
    return models.wrap(LlamaForCausalLM(config), device="cpu")


def seconds(call) -> float:
    """Of the processor where one thread works, which does not count what others take; else of the clock."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    began = clock()
    call()
    return clock() - began


def forwards(model: models.Model, task: Task, copies: int, total: int) -> float:
    """Time of `total` copies of the task in full forwards of `copies` copies each, from one that is timed."""
    tokens, last = task.tokens.repeat(copies, 1), task.last.repeat(copies)
    with torch.no_grad():
        return seconds(lambda: model(tokens, last)) * total / copies


def bench(model: models.Model, n: int, length: int, repeats: int) -> tuple[float, list[float]]:
    """Seconds of all components under mean ablation (means and clean streams counted), and of full forwards."""
    task, names = random_task(model, 2 * n, length), ablation.all_components(model)
    copies = max(1, runs.PASS_TOKENS // (n * length))
    ours, plain, stacked = [], [], []
    for _ in range(repeats):
        ours.append(seconds(lambda: components.component_values(model, task, names, ["mean"], store=False)))
        plain.append(statistics.median(forwards(model, task.test, 1, len(names)) for _ in range(5)))
        stacked.append(forwards(model, task.test, copies, len(names)))
    return statistics.median(ours), [statistics.median(plain), statistics.median(stacked)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--smollm2", action="store_true")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    if args.small:
        model = gpt2(6, 4, 128, 1042)
        task, names = random_task(model, 256, 20), ablation.all_components(model)
        for name in ablation.ABLATIONS:
            spent = seconds(lambda name=name: components.component_values(model, task, names, [name], store=False))
            print(f"{name:15s} {spent:6.1f} s")
    elif args.smollm2:
        model = smollm2()
        task, settings = random_task(model, 16, 18), components.ComponentSettings(steps=1, batch=0, check=9)
        forward = statistics.median(forwards(model, task.train, 1, 1) for _ in range(3)) / len(task.train)
        for layer in (0, 15, 29):
            names = [f"a{layer}.h{h}" for h in range(9)] + [f"m{layer}"]
            work = components.Bench(model, task, names, "optimal", "position", "kl", "test", settings, False)
            [group] = work.groups()
            fill = work.fills("zero", "", "train", group)[0]
            work.full("train"), work.stream("train").block(layer, torch.arange(1))
            with torch.no_grad():
                look = seconds(lambda b=work, g=group, f=fill: list(b.passes("train", g, f, "kl")))
            whole = seconds(lambda b=work, g=group: b.train(g, "position", "kl", ["mean"]))
            print(f"layer {layer}: a look {look:.1f} s, a step {whole - 2 * look:.1f} s, 10 components x 8 prompts")
        print(f"one prompt through the whole model: {forward:.3f} s")
    else:
        ours, full = bench(gpt2(12, 12, 768, 50257), 16, 20, args.repeats)
        print(f"156 components {ours:.1f} s; 156 full forwards {full[0]:.1f} s one by one, {full[1]:.1f} s stacked")
        print(f"ratio {ours / min(full):.2f}, bar {BAR}")


if __name__ == "__main__":
    main()
