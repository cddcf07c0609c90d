"""Known models: their circuits are what they are said to be, and which searches find them."""

from functools import cache

import pytest
import torch

from oa_utils.circuits import Circuit
from oa_utils.graph import Edge
from oa_utils.known import PROGRAMS, Known, known
from oa_utils.masked import MaskedModel
from oa_utils.search import acdc, eap, eap_ig, gap, hcgs, ugs

SMALL = {"n_layers": 2, "n_heads": 4, "n": 64, "seed": 5}
QUICK = {"steps": 60, "lr": 0.3, "prompts": 8, "masks": 8, "lr_constants": 0.01}
DECOY_SAFE = ("resample", "counterfactual")


@cache
def small(name: str, noise: float = 0.0) -> tuple[Known, MaskedModel]:
    written = known(name, noise=noise, **SMALL)
    return written, MaskedModel(written.model)


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_runs(name):
    written, _ = small(name)
    assert written.task.accuracy(written.model) == 1
    assert written.task.score(written.model) > 0.85


def test_the_norms_do_nothing():
    written, _ = small("copy")
    x = 3 * torch.randn(4, written.model.d_model, generator=torch.Generator().manual_seed(0))
    for layer in written.model.layers:
        assert torch.allclose(layer.ln1(x), x, rtol=1e-4)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_true_circuit_is_the_model(name):
    """Without noise nothing but the circuit matters, whatever flows along all other edges."""
    written, masked = small(name)
    ways = DECOY_SAFE if name == "decoy" else ("zero", "mean", "resample", "counterfactual")
    for way in ways:
        assert float(gap(masked, written.task, written.circuits[-1], way)) < 1e-4
    training = {"steps": 120 if name == "decoy" else 5, "lr": 0.02, "batch": 16}
    oa = gap(masked, written.task, written.circuits[-1], "optimal", **training)
    assert float(oa) < (0.1 if name == "decoy" else 1e-4)


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_true_edge_is_needed(name):
    written, masked = small(name)
    true = written.circuits[0]
    for edge in true.edges:
        without = [other for other in true.edges if other != edge]
        circuit = Circuit.from_edges(written.model, without)
        assert float(gap(masked, written.task, circuit, "counterfactual")) > 0.3
        few = {"steps": 5, "lr": 0.02, "batch": 32}
        assert float(gap(masked, written.task, circuit, "optimal", **few)) > 0.3


def test_one_twin_is_enough_for_constants_but_not_for_other_prompts():
    written, masked = small("twins")
    one, other, both = written.circuits
    assert both.n_edges == one.n_edges + 2 == other.n_edges + 2
    for circuit in (one, other):
        assert float(gap(masked, written.task, circuit, "mean")) < 0.02
        assert float(gap(masked, written.task, circuit, "counterfactual")) > 0.1


def test_the_mean_of_the_decoy_breaks_the_model():
    written, masked = small("decoy")
    true = written.circuits[0]
    with_decoy = Circuit.from_edges(written.model, [*true.edges, *written.decoys])
    assert float(gap(masked, written.task, true, "mean")) > 0.3
    assert float(gap(masked, written.task, with_decoy, "mean")) < 1e-4


def test_agreement_counts_edges_against_the_nearest_circuit():
    written, _ = small("twins")
    one, _, both = written.circuits
    assert (
        written.agreement(one)
        == written.agreement(both)
        == dict.fromkeys(("precision", "recall", "f1"), 1.0)
    )
    plain, _ = small("copy")
    true = plain.circuits[0]
    more = Circuit.from_edges(plain.model, [*true.edges, Edge("embed", "out")])
    assert plain.agreement(more) == {"precision": 2 / 3, "recall": 1.0, "f1": 0.8}


def test_auroc_counts_pairs():
    written, _ = small("copy")
    mask = written.circuits[0].mask
    assert written.auroc(mask.float()) == 1
    assert written.auroc(-mask.float()) == 0
    assert written.auroc(torch.zeros(len(mask))) == 0.5


def test_seeds_hide_the_circuit_elsewhere():
    one = known("induction", seed=0)
    same = known("induction", seed=0)
    other = known("induction", seed=1)
    assert one.model.fingerprint == same.model.fingerprint != other.model.fingerprint
    assert one.task.fingerprint == same.task.fingerprint != other.task.fingerprint
    assert one.circuits[0].edges == same.circuits[0].edges != other.circuits[0].edges


# ---- perfect recoveries, among idle parts with noise

WAYS = ("zero", "mean", "resample", "counterfactual")
EXACT = [
    *((acdc, way, name) for name in ("copy", "induction", "duplicate", "twins") for way in WAYS),
    *((acdc, way, "decoy") for way in DECOY_SAFE),
    *((eap, "counterfactual", name) for name in ("copy", "induction")),
    *((eap_ig, "counterfactual", name) for name in ("copy", "induction", "duplicate")),
    *((hcgs, way, "induction") for way in ("counterfactual", "optimal")),
    *((ugs, way, "induction") for way in ("mean", "counterfactual", "optimal")),
    (ugs, "optimal", "duplicate"),
    (ugs, "optimal", "twins"),
]


@pytest.mark.parametrize("search, ablation, name", EXACT)
def test_found_exactly(search, ablation, name):
    written, masked = small(name, 0.005)
    options = {"lam": 0.02} if search in (acdc, ugs, hcgs) else {"n_edges": written.n_edges}
    options |= QUICK if search in (ugs, hcgs) else {}
    circuit = search(masked, written.task, ablation, **options)
    assert written.agreement(circuit)["f1"] == 1


@pytest.mark.parametrize("way", ["zero", "mean"])
def test_the_decoy_is_taken_under_constants_that_are_not_trained(way):
    written, masked = small("decoy", 0.005)
    circuit = acdc(masked, written.task, way, lam=0.02)
    assert set(written.decoys) <= set(circuit.edges)
    assert written.agreement(circuit)["recall"] == 1
