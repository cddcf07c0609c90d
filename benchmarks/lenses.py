"""What does a training step of a lens cost, for all layers side by side?

1. OCA against the tuned lens, readings given: bar 1.2 × the ratio of their arithmetic (`step_cost`:
   the unembedding of every layer, and for OCA n(n+1)/2 MLP passes more). Random models of
   GPT-2-small's shape, with `--smollm2` of SmolLM2's.
2. Our tuned-lens step against the package `tuned-lens` 0.2.0 on the same random weights, tokens and
   layers, the model's forward included, every position read by both: bar 1. The package lives in a
   venv of its own (`--peer` names its python; without it one is made in the user's cache), and this
   file, run by that python with `--time-peer`, times it.
"""

import argparse
import json
import statistics
import subprocess
import tempfile
import time
import venv
from functools import partial

import torch

SLACK = 1.2
SHAPE = {"n_layer": 12, "n_head": 12, "n_embd": 768, "vocab_size": 50257, "n_positions": 64}
PEER = ("tuned-lens==0.2.0", "transformers<5")


def seconds(call) -> float:
    """Of the processor where one thread works, which does not count what others take; else of the
    clock."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    began = clock()
    call()
    return clock() - began


def random_gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**SHAPE, bos_token_id=0, eos_token_id=0))
    return model.eval().requires_grad_(False)


def random_tokens(n: int, length: int) -> torch.Tensor:
    return torch.randint(2, 49152, (n, length), generator=torch.Generator().manual_seed(0))


def steps(model, batch: int, repeats: int) -> float:
    """OCA step over tuned step, taken in turns."""
    from oa_utils import lenses

    data = lenses.read(model, random_tokens(batch, 8))
    spent = {"tuned": [], "oca": []}
    trainers = {kind: lenses.TRAINERS[kind](model, data) for kind in spent}
    raws = {kind: first_raw(trainer) for kind, trainer in trainers.items()}

    def step(trainer, raw, optimiser) -> None:
        trainer.losses(raw, data.resid, range(model.n_layers), train=True)
        optimiser.step()

    for _ in range(repeats + 1):
        for kind, trainer in trainers.items():
            optimiser = torch.optim.Adam(raws[kind].values())
            spent[kind].append(seconds(partial(step, trainer, raws[kind], optimiser)))
    tuned = statistics.median(spent["tuned"][1:])
    oca = statistics.median(spent["oca"][1:])
    print(f"{batch} contexts, {model.n_layers} layers: tuned {tuned:.2f} s, OCA {oca:.2f} s")
    return oca / tuned


def first_raw(trainer) -> dict[str, torch.Tensor]:
    from oa_utils import lenses

    start = next(iter(trainer.starts(lenses.LensSettings()).values()))
    return {name: value.requires_grad_() for name, value in start.items()}


def our_step(model, tokens: torch.Tensor, trainer, raw, optimiser) -> None:
    """Forward, all positions of all contexts as rows, one step of the tuned lens."""
    from einops import rearrange

    from oa_utils.models import recording

    kept, keep = recording("resid")
    with torch.no_grad():
        end = model.run(model.embed(tokens), edit=keep)
    resid = torch.stack([*kept["resid"].values(), end])
    optimiser.zero_grad()
    rows = rearrange(resid, "layer b pos d -> layer (b pos) d")
    trainer.losses(raw, rows, range(model.n_layers), train=True)
    optimiser.step()


def peer_step(model, tokens: torch.Tensor, lens, optimiser) -> None:
    """The package's own training step: layer by layer, backward at once."""
    with torch.no_grad():
        out = model(tokens, output_hidden_states=True)
    final = out.logits.float().log_softmax(-1)
    optimiser.zero_grad()
    for i, hidden in enumerate(out.hidden_states[:-1]):
        logp = lens(hidden, idx=i).log_softmax(-1)
        torch.sum(final.exp() * (final - logp), dim=-1).mean().backward()
    optimiser.step()


def time_peer(batch: int, length: int, repeats: int) -> None:
    from tuned_lens import TunedLens

    model = random_gpt2()
    tokens = random_tokens(batch, length)
    lens = TunedLens.from_model(model)
    for parameter in lens.unembed.parameters():
        parameter.requires_grad_(False)
    trained = [parameter for parameter in lens.parameters() if parameter.requires_grad]
    optimiser = torch.optim.Adam(trained, lr=1e-3)
    step = partial(peer_step, model, tokens, lens, optimiser)
    print(json.dumps([seconds(step) for _ in range(repeats + 1)][1:]))


def peer_python() -> str | None:
    """A python that has the package; None, with the reason, where it cannot be had."""
    from oa_utils.store import cache_folder

    folder = cache_folder() / "tuned-lens"
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        print(f"installing {PEER[0]} into {folder} (once)")
        venv.create(folder, with_pip=True)
        torch_here = f"torch=={torch.__version__.split('+')[0]}"
        asked = [python, "-m", "pip", "install", "--quiet", torch_here, *PEER]
        done = subprocess.run(asked, capture_output=True, text=True)
        if done.returncode:
            reason = done.stderr.strip().splitlines()[-1]
            print(f"skipped: {PEER[0]} cannot be installed here: {reason}")
            return None
        (folder / "ready").touch()
    return str(python)


def against_peer(python: str, batch: int, length: int, repeats: int) -> float | None:
    from oa_utils import lenses, models

    model = models.wrap(random_gpt2(), device="cpu")
    tokens = random_tokens(batch, length)
    trainer = lenses.LinearTrainer(model, lenses.read(model, tokens))
    raw = first_raw(trainer)
    optimiser = torch.optim.Adam(raw.values(), lr=1e-3)
    step = partial(our_step, model, tokens, trainer, raw, optimiser)
    ours = statistics.median([seconds(step) for _ in range(repeats + 1)][1:])
    options = ["--repeats", str(repeats), "--threads", str(torch.get_num_threads())]
    asked = [python, __file__, "--time-peer", *options]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(asked, capture_output=True, text=True, cwd=folder)
    if done.returncode:
        print(f"skipped: the peer failed: {done.stderr.strip().splitlines()[-1]}")
        return None
    theirs = statistics.median(json.loads(done.stdout.strip().splitlines()[-1]))
    print(
        f"tuned lens, forward included, {batch} × {length} tokens: "
        f"ours {ours:.2f} s, tuned-lens {theirs:.2f} s"
    )
    return ours / theirs


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smollm2", action="store_true", help="also a model of SmolLM2's shape")
    parser.add_argument("--peer", help="a python that has tuned-lens")
    parser.add_argument("--time-peer", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.time_peer:
        time_peer(4, 16, args.repeats)
        return
    from components import gpt2, smollm2

    from oa_utils.paper.lenses import step_cost

    random_models = [gpt2(12, 12, 768, 50257)]
    if args.smollm2:
        random_models.append(smollm2())
    for model in random_models:
        least = step_cost(model, "oca") / step_cost(model, "tuned")
        ratio = steps(model, 64, args.repeats)
        print(f"OCA / tuned {ratio:.2f}, arithmetic {least:.2f}, bar {SLACK * least:.2f}")
    python = args.peer or peer_python()
    if python:
        ratio = against_peer(python, 4, 16, args.repeats)
        if ratio is not None:
            print(f"ours / tuned-lens {ratio:.2f}, bar 1")


if __name__ == "__main__":
    main()
