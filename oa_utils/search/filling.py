"""Which values flow along ablated edges: the fill of any prompts under any ablation."""

from collections.abc import Callable

import torch
from jaxtyping import Int
from torch import Tensor

from oa_utils import ablation as ab
from oa_utils.fills import Activations, Constants
from oa_utils.masked import MaskedModel
from oa_utils.tasks import Task

KEEP = 5e8  # bytes of counterfactual activations that are kept and not computed anew in every step
Fills = Callable[..., Constants | Activations]  # fill(rows, rng): of these prompts; resampling draws partners anew by rng


def constants_for(masked: MaskedModel, task: Task, ablation: str) -> Constants:
    """Constants from the train part: for `zero`, `mean`, `cf_mean`, and those that training of `optimal` starts from."""
    key = "constants", task.fingerprint, ablation
    if key not in masked.kept:
        masked.kept[key] = _constants(masked, task, ablation)
    return masked.kept[key]


def _constants(masked: MaskedModel, task: Task, ablation: str) -> Constants:
    model, train = masked.model, task.train
    embed = ab.Site("embed", "embed", "pre", 0, slice(0, model.d_model))  # token and position, as the graph's vertex
    sites = [embed, *(ab.parse(f"{kind}{i}", model) for kind in "am" for i in range(model.n_layers))]
    if ablation == "zero":
        rows = {site.name: ab.zero(site, model) for site in sites}
    else:
        tokens = train.need_counterfactual() if ablation == "cf_mean" else train.tokens
        means = ab.means(model, tokens, train.last, sites)
        rows = {name: found.rows("shared" if ablation == "optimal" else "position") for name, found in means.items()}
    heads, mlps = (torch.stack([rows[f"{kind}{i}"] for i in range(model.n_layers)], 1) for kind in "am")  # [P layer _]
    found = Constants(rows["embed"], heads.unflatten(-1, (model.n_heads, model.d_head)), mlps)
    return Constants(*(part[0] for part in found)) if ablation == "optimal" else found


def fill_for(masked: MaskedModel, task: Task, ablation: str, part: str = "train", seed: int = 0) -> Fills:
    """A function that gives the fill of rows of a part; constants always come from the train part."""
    prompts = getattr(task, part)

    def activations(tokens: Int[Tensor, "b pos"], rows: Int[Tensor, " b"]) -> Activations:
        return masked.activations(tokens[:, : int(prompts.last[rows].max()) + 1])

    if ablation == "counterfactual":
        tokens, key = prompts.need_counterfactual(), ("counterfactual", task.fingerprint, part)
        if masked.activation_bytes(tokens.shape[1]) * len(prompts) > KEEP:
            return lambda rows, rng=None: activations(tokens[rows], rows)
        if key not in masked.kept:
            masked.kept[key] = masked.activations(tokens)
        every = masked.kept[key]
        return lambda rows, rng=None: every.rows(rows).cut(int(prompts.last[rows].max()) + 1)
    if ablation == "resample":
        fixed, n = prompts.partners(seed), len(prompts)

        def resample(rows: Int[Tensor, " b"], rng: torch.Generator | None = None) -> Activations:
            partners = fixed[rows] if rng is None else (rows + torch.randint(1, n, rows.shape, generator=rng)) % n
            both, order = prompts[torch.cat([rows, partners])], torch.arange(2 * len(rows))
            return activations(both.resampled(order.roll(len(rows)))[: len(rows)], rows)

        return resample
    constants = constants_for(masked, task, ablation)
    return lambda rows, rng=None: constants
