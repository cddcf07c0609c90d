"""tuned-lens 0.2.0 on the exported model: the package's own training step (layer by layer, backward
at once), forward included. Run by the python of its own venv."""

import torch
from common import arguments, load_batch, load_gpt2, medians, report, save
from tuned_lens import TunedLens


def main() -> None:
    folder, repeats = arguments()
    tokens = load_batch(folder)["tokens"]
    model = load_gpt2(folder)
    lens = TunedLens.from_model(model)
    for parameter in lens.unembed.parameters():
        parameter.requires_grad_(False)
    trained = [parameter for parameter in lens.parameters() if parameter.requires_grad]
    optimiser = torch.optim.Adam(trained, lr=1e-3)

    def losses(backward: bool) -> torch.Tensor:
        """Mean KL of each layer over all positions."""
        with torch.no_grad():
            out = model(tokens, output_hidden_states=True)
            final = out.logits.float().log_softmax(-1)
        each = []
        for i, hidden in enumerate(out.hidden_states[:-1]):
            logp = lens(hidden, idx=i).log_softmax(-1)
            loss = torch.sum(final.exp() * (final - logp), dim=-1).mean()
            if backward:
                loss.backward()
            each.append(loss.detach())
        return torch.stack(each)

    def step() -> None:
        optimiser.zero_grad()
        losses(backward=True)
        optimiser.step()

    with torch.no_grad():
        save(folder, "tuned_lens_losses", losses=losses(backward=False))
    spent, _ = medians(step, repeats)
    report({"step": spent})


if __name__ == "__main__":
    main()
