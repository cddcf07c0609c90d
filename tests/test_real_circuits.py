"""Circuits in a real language model: SmolLM2-135M, 123,211 edges (`make test-real`)."""

import pytest
import torch

from oa_utils import tasks
from oa_utils.masked import MaskedModel
from oa_utils.models import load_model
from oa_utils.search import eap_ig, gap, ugs

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def masked() -> MaskedModel:
    return MaskedModel(load_model("smollm2-135m"))


def test_all_edges_kept_is_the_model_and_all_ablated_by_cf_is_the_model_on_the_counterfactual(masked):
    task, model = tasks.ioi(masked.model, 4), masked.model
    fill, full = masked.activations(task.counterfactual), model(task.tokens, task.last)
    assert len(masked.graph) == 123_211
    for mask, tokens in ((torch.ones(1, 123_211), task.tokens), (torch.zeros(1, 123_211), task.counterfactual)):
        torch.testing.assert_close(masked(task.tokens, task.last, mask, fill), model(tokens, task.last), rtol=0, atol=5e-3)
    assert full.isfinite().all()


def test_ugs_trains_masks_and_constants(masked):
    task = tasks.ioi(masked.model, 8)
    circuit = ugs(masked, task, "optimal", lam=1e-3, steps=3, prompts=2, masks=2)
    theta = torch.tensor(circuit.history["theta"])
    assert len(circuit.history["loss"]) == 3 and theta.std() > 0 and theta.isfinite().all()


def test_a_tenth_of_the_edges_by_eap_ig_beats_as_many_at_random(masked):
    task, n = tasks.ioi(masked.model, 16), 12_000
    found = eap_ig(masked, task, "counterfactual", n_edges=n, path="masks", points=2)
    noise = torch.rand(len(masked.graph), generator=torch.Generator().manual_seed(0))
    other = type(found)(masked.graph, noise <= noise.kthvalue(n).values, "random")
    assert found.n_edges <= n and gap(masked, task, found).mean < 0.5 * gap(masked, task, other).mean
