"""The fast buffer of the masked model against its plain form: one einsum a read, gradients by
autograd."""

import pytest
import torch
from plain_buffer import PlainBuffer

from oa_utils import masked as masked_module
from oa_utils.fills import Constants
from oa_utils.masked import MaskedModel

LAST = torch.tensor([8, 7, 3, 8, 5])


def value_and_gradients(masked, mask, fill, **options):
    alpha = mask.clone().requires_grad_()
    constants = Constants(*(part.clone().requires_grad_() for part in fill))
    tokens = torch.arange(5 * 9).reshape(5, 9) % (masked.model.d_vocab - 2) + 2
    tokens[:, 0] = masked.model.bos
    logp = masked(tokens, LAST, alpha, constants, **options)
    weight = torch.linspace(-1, 1, logp.numel()).view_as(logp).sin()
    (logp * weight).sum().backward()
    return [logp.detach(), alpha.grad, *(part.grad for part in constants)]


@pytest.mark.parametrize("rows", [None, 1, 4, 9])
@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("skip_dead", [False, True])
def test_the_buffer_is_its_plain_form(model, monkeypatch, rows, batch, everywhere, skip_dead):
    masked = MaskedModel(model)
    rng = torch.Generator().manual_seed(0)
    mask = (3 * torch.rand(batch, len(masked.graph), generator=rng) - 1).clamp(0, 1)
    lead = () if rows is None else (rows,)
    shapes = [(model.d_model,), (model.n_layers, model.n_heads, model.d_head)]
    shapes.append((model.n_layers, model.d_model))
    fill = Constants(*(torch.randn(*lead, *shape, generator=rng) for shape in shapes))
    options = {"constants_everywhere": everywhere, "skip_dead": skip_dead}
    fast = value_and_gradients(masked, mask, fill, **options)
    monkeypatch.setattr(masked_module, "WriterBuffer", PlainBuffer)
    plain = value_and_gradients(masked, mask, fill, **options)
    for i, (one, other) in enumerate(zip(fast, plain, strict=True)):
        if i == 1 and skip_dead:  # gradients of α = 0 may be lost where vertices are dead
            one, other = one * (mask > 0), other * (mask > 0)
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
