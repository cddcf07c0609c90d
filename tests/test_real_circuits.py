"""Circuits in a real language model: SmolLM2-135M, 123,211 edges (`make test-real`)."""

import pytest
import torch

from oa_utils import tasks
from oa_utils.circuits import Circuit
from oa_utils.masked import MaskedModel
from oa_utils.models import load_model
from oa_utils.search import eap_ig, gap, ugs

pytestmark = pytest.mark.real
N_EDGES = 123_211


@pytest.fixture(scope="module")
def masked() -> MaskedModel:
    return MaskedModel(load_model("smollm2-135m"))


def test_all_edges_kept_is_the_model_and_all_ablated_is_the_model_on_the_counterfactual(masked):
    model = masked.model
    task = tasks.ioi(model, 4)
    fill = masked.activations(task.counterfactual)
    assert len(masked.graph) == N_EDGES
    for alpha, tokens in ((1.0, task.tokens), (0.0, task.counterfactual)):
        mask = torch.full((1, N_EDGES), alpha)
        logp = masked(task.tokens, task.last, mask, fill)
        assert logp.isfinite().all()
        torch.testing.assert_close(logp, model(tokens, task.last), rtol=0, atol=5e-3)


def test_ugs_trains_masks_and_constants(masked):
    task = tasks.ioi(masked.model, 8)
    circuit = ugs(masked, task, "optimal", lam=1e-3, steps=3, prompts=2, masks=2)
    theta = torch.tensor(circuit.history["theta"])
    assert len(circuit.history["loss"]) == 3
    assert theta.std() > 0
    assert theta.isfinite().all()


def test_a_tenth_of_the_edges_by_eap_ig_beats_as_many_at_random(masked):
    task = tasks.ioi(masked.model, 16)
    n = 12_000
    scored = eap_ig(masked, task, "counterfactual", n_edges=n, path="masks", points=2)
    noise = torch.rand(N_EDGES, generator=torch.Generator().manual_seed(0))
    drawn = Circuit(masked.graph, noise <= noise.kthvalue(n).values, "random")
    assert scored.n_edges <= n
    assert gap(masked, task, scored).mean < 0.5 * gap(masked, task, drawn).mean
