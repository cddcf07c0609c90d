"""The fast buffer of the masked model against its plain form: one einsum a read, gradients by
autograd."""

import pytest
import torch
from plain_buffer import PlainBuffer

from oa_utils import buffer
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


def some_forward(masked, seed):
    """Log-probabilities under a random mask, and the mask."""
    rng = torch.Generator().manual_seed(seed)
    model = masked.model
    tokens = torch.randint(2, model.d_vocab, (5, 9), generator=rng)
    tokens[:, 0] = model.bos
    alpha = torch.rand(5, len(masked.graph), generator=rng).requires_grad_()
    return masked(tokens, LAST, alpha, masked.activations(tokens.flip(0))), alpha


def test_forwards_that_wait_for_their_backward_share_no_memory(model):
    masked = MaskedModel(model)
    alone = []
    for seed in (1, 2):
        logp, alpha = some_forward(masked, seed)
        logp.sum().backward()
        alone.append(alpha.grad)
    (first, alpha1), (second, alpha2) = some_forward(masked, 1), some_forward(masked, 2)
    first.sum().backward()
    del first
    with torch.no_grad():
        some_forward(masked, 3)
    second.sum().backward()
    assert torch.equal(alpha1.grad, alone[0])
    assert torch.equal(alpha2.grad, alone[1])


def test_a_forward_uses_the_memory_of_the_last_one(model):
    masked = MaskedModel(model)
    places = []
    for grad in (False, False, False, True, True, True):
        with torch.set_grad_enabled(grad):
            logp, _ = some_forward(masked, 1)
            if grad:
                logp.sum().backward()
        del logp
        [(block, wanted)] = masked._waiting
        places.append((block.data_ptr(), wanted <= len(block)))
    assert places[1] == places[2] and places[1][1]  # the first one said how much it takes
    assert places[4] == places[5] and places[4][1]


def test_more_memory_than_may_wait_is_given_back(model, monkeypatch):
    monkeypatch.setattr(buffer, "MOST_KEPT", 1)
    masked = MaskedModel(model)
    some_forward(masked, 1)
    assert not masked._waiting
