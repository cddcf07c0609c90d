"""Estimates of constrained form: each hypothesis is tested where its answer is known."""

import pytest
import torch

from oa_utils import components, estimates, tasks
from oa_utils.circuits import Circuit
from oa_utils.components import ComponentSettings
from oa_utils.masked import MaskedModel
from oa_utils.search import gap

QUICK = ComponentSettings(steps=20, batch=8, look_every=5)


@pytest.fixture(scope="module")
def task(tiny):
    return tasks.ioi(tiny, 40)


def test_prototypes_never_get_worse_with_one_more_and_all_are_used(tiny, task):
    found = estimates.prototypes(tiny, task, "a4.h1", 4, QUICK)
    gaps = [p.train.amin(0).mean().item() for p in found]
    assert gaps == sorted(gaps, reverse=True)
    for k, p in enumerate(found, 1):
        assert p.values.shape == (k, tiny.d_head)
        assert len(p.train.argmin(0).unique()) == k
        assert (p.by_rule >= p.best).all()


def test_one_prototype_is_the_optimal_constant(tiny, task):
    [one] = estimates.prototypes(tiny, task, "a4.h1", 1, QUICK)
    constant, how = components.optimal_constants(
        tiny, task, "a4.h1", family="shared", steps=20, batch=8, look_every=5
    )["a4.h1"]
    trained = min(value for _, value in how["curve"])
    assert one.train.mean().item() == pytest.approx(trained, rel=0.2)
    assert torch.equal(one.best, one.by_rule)


def test_a_component_that_classifies_needs_as_many_prototypes_as_it_has_classes(tiny, task):
    """Prompts of two kinds only: two prototypes, each the value of its kind, leave nothing."""
    twice = task[[0, 1]]
    rows = torch.arange(len(task)) % 2
    same = tasks.Task(
        "two",
        twice.tokens[rows],
        twice.last[rows],
        twice.right[rows],
        twice.wrong[rows],
        task.part,
        tuple(str(i) for i in range(len(task))),
    )
    settings = ComponentSettings(steps=40, batch=4, look_every=10)
    one, two = estimates.prototypes(tiny, same, "a4.h1", 2, settings)
    assert two.by_rule.mean() < 0.5 * one.by_rule.mean()


@pytest.mark.parametrize("kind", estimates.BASES)
def test_bases_are_orthonormal_and_keeping_more_costs_less(tiny, task, kind):
    rows = estimates.basis(tiny, task, "a4.h1", kind)
    assert torch.allclose(rows @ rows.T, torch.eye(len(rows)), atol=1e-5)
    parts = [estimates.only("a4.h1", rows, kept) for kept in (0, 8, 31)]
    table = components.component_gaps(
        tiny, task, parts, "optimal", "shared", steps=20, batch=8, look_every=5, part="train"
    )
    assert table.gap.iloc[0] >= table.gap.iloc[2] - 1e-4
    assert table.gap.iloc[2] < 0.2 * table.gap.iloc[0]


def test_the_causal_basis_keeps_more_in_few_dimensions_than_a_random_one(tiny, task):
    gaps = {}
    for kind in ("causal", "random"):
        rows = estimates.basis(tiny, task, "a4.h1", kind)
        part = estimates.only("a4.h1", rows, 4)
        table = components.component_gaps(
            tiny, task, part, "optimal", "shared", steps=20, batch=8, look_every=5
        )
        gaps[kind] = table.gap.iloc[0]
    assert gaps["causal"] < gaps["random"]


def test_an_mlp_mapped_into_all_its_dimensions_beats_its_constant(tiny, task):
    rows = estimates.basis(tiny, task, "m0", "pca")
    mapped = estimates.linear_estimate(tiny, task, "m0", rows, len(rows), QUICK, few=4)
    none = estimates.linear_estimate(tiny, task, "m0", rows, 1, QUICK, few=4)
    assert mapped.gap.mean() < none.gap.mean()
    assert mapped.bound.mean() < 1e-4  # its own value is in the span
    assert mapped.bound.mean() <= mapped.mapped.mean()


def test_constants_of_edges_start_from_those_of_vertices_and_lose_less(tiny, task):
    masked = MaskedModel(tiny)
    torch.manual_seed(0)
    circuit = Circuit(masked.graph, torch.rand(len(masked.graph)) < 0.6, "random")
    delta = gap(masked, task, circuit, "optimal", steps=10, batch=8)
    run = estimates.EdgeRun(tiny, circuit, delta.constants)
    test = task.test
    start = run.log_probs(test.tokens, test.last)
    engine = masked(test.tokens, test.last, circuit.mask.float(), delta.constants)
    assert torch.allclose(start, engine, atol=1e-4)
    settings = ComponentSettings(steps=10, batch=8, look_every=5, lr=0.02)
    edges = estimates.edge_constants(tiny, task, circuit, delta.constants, settings)
    assert edges.train < delta.train
    assert edges.n_edge > edges.n_vertex


def test_what_does_not_exist_is_refused(tiny, task):
    with pytest.raises(ValueError, match="a basis is one of"):
        estimates.basis(tiny, task, "a4.h1", "fourier")
    with pytest.raises(ValueError, match="kept is from 0 to 31"):
        estimates.only("a4.h1", torch.eye(32), 32)
