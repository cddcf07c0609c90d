"""Our side of every comparison, on the exported model; numbers are held to the peers' where the
graphs agree. `transformer_lens_side` is a peer that lives in our own venv."""

import sys
from pathlib import Path

import numpy as np
import torch
from common import arguments, load_batch, load_gpt2, medians, report, save
from einops import rearrange

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from oa_utils import lenses  # noqa: E402
from oa_utils.masked import MaskedModel  # noqa: E402
from oa_utils.models import recording, wrap  # noqa: E402


def by_reader(masked: MaskedModel, values: torch.Tensor) -> dict[str, torch.Tensor]:
    """Values of edges [n_edges] as auto-circuit keeps them: by hook, [head writer] or [writer]."""
    attn, mlp, out = masked.graph.blocks(values)
    n_layers = masked.graph.n_layers
    hooks = {}
    for i in range(n_layers):
        for slot, block in zip("qkv", attn[i], strict=True):
            hooks[f"blocks.{i}.hook_{slot}_input"] = block
        hooks[f"blocks.{i}.hook_mlp_in"] = mlp[i]
    return hooks | {f"blocks.{n_layers - 1}.hook_resid_post": out}


def random_mask(masked: MaskedModel) -> torch.Tensor:
    """Half of the edges kept, the same every time."""
    return torch.rand(len(masked.graph), generator=torch.Generator().manual_seed(0)).round()


def answer_difference(logp: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """log P(right) − log P(wrong) of each prompt."""
    return logp.gather(1, batch["right"])[:, 0] - logp.gather(1, batch["wrong"])[:, 0]


def edge_scores(
    masked: MaskedModel, batch: dict[str, torch.Tensor], prompt: str, fill: str
) -> torch.Tensor:
    """EAP: the gradient of the mean answer difference by every α, all edges kept."""
    tokens = batch[prompt]
    last = torch.full((len(tokens),), tokens.shape[1] - 1)
    mask = torch.ones(1, len(masked.graph), requires_grad=True)
    logp = masked(tokens, last, mask, masked.activations(batch[fill]))
    return torch.autograd.grad(answer_difference(logp, batch).mean(), mask)[0][0]


def edges(folder: Path, repeats: int, masked: MaskedModel) -> dict[str, float]:
    """A masked forward, and the gradient by all masks."""
    batch = load_batch(folder)
    tokens = batch["tokens"]
    last = torch.full((len(tokens),), tokens.shape[1] - 1)
    mask = random_mask(masked)
    fill = masked.activations(batch["counterfactual"])

    @torch.no_grad()
    def forward() -> torch.Tensor:
        return masked(tokens, last, mask, fill)

    forward_seconds, logp = medians(forward, repeats)
    save(folder, "ours_logp", logp=logp)
    both = (masked, batch, "tokens", "counterfactual")
    gradient_seconds, scores = medians(lambda: edge_scores(*both), repeats)
    save(folder, "ours_scores", **by_reader(masked, scores))
    return {"forward": forward_seconds, "gradient": gradient_seconds}


def tuned_step(folder: Path, repeats: int, model) -> dict[str, float]:
    """A training step of the tuned lens from the identity, forward included, all positions."""
    tokens = load_batch(folder)["tokens"]
    layers = range(model.n_layers)
    trainer = lenses.LinearTrainer(model, lenses.read(model, tokens))
    start = trainer.starts(lenses.LensSettings(start="identity"))["identity"]
    raw = {name: value.requires_grad_() for name, value in start.items()}
    optimiser = torch.optim.Adam(raw.values(), lr=1e-3)

    def streams() -> torch.Tensor:
        kept, keep = recording("resid")
        with torch.no_grad():
            end = model.run(model.embed(tokens), edit=keep)
        resid = torch.stack([*kept["resid"].values(), end])
        return rearrange(resid, "layer b pos d -> layer (b pos) d")

    def step() -> None:
        optimiser.zero_grad()
        trainer.losses(raw, streams(), layers, train=True)
        optimiser.step()

    with torch.no_grad():
        losses = trainer.losses(raw, streams(), layers).mean(1)
    save(folder, "ours_losses", losses=losses)
    spent, _ = medians(step, repeats)
    return {"step": spent}


def main() -> None:
    folder, repeats = arguments()
    masked = MaskedModel(wrap(load_gpt2(folder), device="cpu"))
    which = sys.argv[3]
    if which == "masks":
        np.savez(folder / "masks.npz", **by_reader(masked, random_mask(masked)))
        report({})
    elif which == "edges":
        report(edges(folder, repeats, masked), n_edges=len(masked.graph))
    else:
        report(tuned_step(folder, repeats, masked.model))


if __name__ == "__main__":
    main()
