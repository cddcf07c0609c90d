from dataclasses import replace

import pandas as pd
import pytest
import torch
from toys import dense_model, make_task

from oa_utils import ranking
from oa_utils.circuits import Circuit
from oa_utils.search import eap_ig, gap


def done_task(masked):
    """A task that the model does: what it finds likeliest is right, what it finds least likely
    wrong."""
    task = make_task(masked.model)
    order = task.log_probs(masked.model).argsort(-1)
    return replace(task, right=order[:, -1:], wrong=order[:, :1])


def test_areas_of_a_curve_worked_out_by_hand():
    curve = pd.DataFrame({"share": [0.0, 0.5, 1.0], "faithfulness": [0.0, 1.2, 1.0]})
    cpr, cmd = ranking.areas(curve)
    assert cpr == pytest.approx(0.5 * 0.6 + 0.5 * 1.1)
    assert cmd == pytest.approx(0.5 * 0.6 + 0.5 * 0.1)


def test_the_curve_ends_at_the_whole_model_and_is_the_gap_of_the_ranked_circuits():
    masked = dense_model()
    task = done_task(masked)
    torch.manual_seed(0)
    scores = torch.randn(len(masked.graph))
    curve = ranking.faithfulness_curve(masked, task, scores, shares=(0.3, 1.0))
    assert curve.faithfulness.iloc[-1] == pytest.approx(1, abs=1e-5)
    top = torch.zeros(len(scores))
    top[scores.topk(int(0.3 * len(scores))).indices] = 1
    circuit = Circuit(masked.graph, top, "ranked")
    nothing = Circuit(masked.graph, 0 * top, "ranked")
    lost, everything = (
        gap(masked, task, c, "counterfactual", metric="logit_diff").mean for c in (circuit, nothing)
    )
    assert curve.faithfulness[0] == pytest.approx(1 - lost / everything, abs=1e-6)
    assert curve.n_edges[0] == circuit.n_edges


def test_a_good_ranking_has_the_larger_area():
    masked = dense_model()
    task = done_task(masked)
    scores = torch.tensor(
        eap_ig(masked, task, n_edges=5, ablation="counterfactual").history["scores"]
    )
    shares = (0.02, 0.1, 0.3, 0.6, 1.0)
    good, bad = (
        ranking.areas(ranking.faithfulness_curve(masked, task, s, shares=shares))
        for s in (scores, -scores)
    )
    assert good.cpr > bad.cpr + 0.1


@pytest.mark.parametrize("scores", [torch.zeros(3), "nan"])
def test_scores_that_rank_nothing_are_refused(scores):
    masked = dense_model()
    if isinstance(scores, str):
        scores = torch.full((len(masked.graph),), torch.nan)
    with pytest.raises(ValueError, match="one for each edge"):
        ranking.faithfulness_curve(masked, make_task(masked.model), scores)


def test_a_task_that_the_model_does_not_do_is_refused_with_what_is_wrong():
    masked = dense_model()
    done = done_task(masked)
    task = replace(done, right=done.wrong, wrong=done.right)
    scores = torch.ones(len(masked.graph))
    with pytest.raises(ValueError, match="no more than two standard errors.*does not do the task"):
        ranking.faithfulness_curve(masked, task, scores)
