"""The trainer of constants: it finds the known optimum, loses nothing, stops, and goes on after a
stop."""

from dataclasses import dataclass
from functools import partial

import pytest
import torch

from oa_utils.store import Snapshots
from oa_utils.training import collect, fit

N = 400


@dataclass(frozen=True)
class Settings:
    steps: int = 300
    lr: float = 0.1
    batch: int = 32
    look_every: int = 20
    tol: float = 0.01
    seed: int = 0


def toy():
    """Squared loss of a model that is linear in its component, with weights drawn apart from the
    component's values; the second component has the same weights for all prompts."""
    rng = torch.Generator().manual_seed(0)
    values = torch.randn(N, 3, generator=rng) + torch.tensor([1.0, -2.0, 0.5])
    matrices = torch.randn(N, 5, 3, generator=rng)

    def losses(constants, which, rows):
        rows = torch.arange(N) if rows is None else rows
        for place, i in enumerate(which):
            moved = constants[i][0] - values[rows]
            out = torch.einsum("nij,nj->ni", matrices[rows], moved) if i == 0 else moved
            yield slice(place, place + 1), rows, out.square().sum(-1)[None]

    return values, losses


def test_for_a_linear_model_with_squared_loss_the_mean_is_optimal():
    values, losses = toy()
    start = [torch.zeros(1, 3), torch.full((1, 3), 4.0)]
    settings = Settings(steps=400, batch=0, lr=0.1, tol=1e-5)
    fitted = fit([start], [1.0, 1.0], losses, N, settings)
    drawn_apart, same_for_all = (constant[0] for constant in fitted.constants)
    assert torch.allclose(same_for_all, values.mean(0), atol=2e-3)
    assert torch.allclose(drawn_apart, values.mean(0), atol=0.15), "up to the sample"
    steps, gaps = zip(*fitted.curves[0], strict=True)
    assert steps[:3] == (0, 20, 40)
    assert gaps[0] > gaps[-1]


def test_no_step_size_makes_a_constant_worse_than_its_best_start():
    values, losses = toy()
    mean = values.mean(0)[None]
    starts = [[torch.zeros(1, 3)] * 2, [mean] * 2, [torch.full((1, 3), 9.0)] * 2]
    for lr in (1e-4, 0.1, 1e4):
        settings = Settings(steps=40, look_every=5, lr=lr, batch=16)
        fitted = fit(starts, [1.0, 1.0], losses, N, settings)
        assert fitted.starts == [1, 1]
        after = collect(partial(losses, fitted.constants, [0, 1]), 2, N).mean(1)
        before = collect(partial(losses, [mean, mean], [0, 1]), 2, N).mean(1)
        assert (after <= before).all()


def test_training_stops_when_nothing_is_gained():
    _, losses = toy()
    settings = Settings(steps=5000, look_every=20, batch=0)
    fitted = fit([[torch.zeros(1, 3)] * 2], [1.0, 1.0], losses, N, settings)
    assert all(curve[-1][0] < 1000 for curve in fitted.curves)


def test_each_constant_trains_as_if_it_were_alone():
    _, losses = toy()
    settings = Settings(steps=60, batch=0)
    both = fit([[torch.zeros(1, 3)] * 2], [1.0, 3.0], losses, N, settings)

    def second_alone(constants, which, rows):
        return losses([None, *constants], [1 + i for i in which], rows)

    alone = fit([[torch.zeros(1, 3)]], [3.0], second_alone, N, settings)
    torch.testing.assert_close(alone.constants[0], both.constants[1])
    assert alone.curves[0] == both.curves[1]


@pytest.mark.parametrize("killed_at", [3, 30, 75])
def test_killed_and_resumed_training_ends_bit_by_bit_the_same(tmp_path, monkeypatch, killed_at):
    """Also behind looks that cut the step of one constant, or ended it."""
    _, losses = toy()
    settings = Settings(steps=80, look_every=5, lr=0.3)
    starts = [[torch.zeros(1, 3)] * 2, [torch.ones(1, 3)] * 2]
    scales = [0.03, 1.0]
    whole = fit(starts, scales, losses, N, settings)
    ends = [curve[-1][0] for curve in whole.curves]
    assert ends[1] < 75 < ends[0] == 80, "one of the two has stopped before"

    monkeypatch.setattr(Snapshots, "due", lambda self: True)
    steps = []

    def killed(constants, which, rows):
        if rows is not None:
            steps.append(1)
        if len(steps) == killed_at:
            raise KeyboardInterrupt
        return losses(constants, which, rows)

    path = tmp_path / "state"
    with pytest.raises(KeyboardInterrupt):
        fit(starts, scales, killed, N, settings, Snapshots(path, "identity"))
    resumed = fit(starts, scales, killed, N, settings, Snapshots(path, "identity"))
    assert len(steps) == 80 + 1, "no step but the killed one was computed twice"
    assert resumed.curves == whole.curves
    assert resumed.starts == whole.starts
    for one, other in zip(resumed.constants, whole.constants, strict=True):
        assert torch.equal(one, other)


def test_resumed_training_remembers_how_good_its_best_was(tmp_path, monkeypatch):
    """Steps so large that every look is worse than the start: killed behind the first look, it must
    not take a later one for the best."""
    values, losses = toy()
    mean = values.mean(0)[None]
    starts = [[mean, mean]]
    settings = Settings(steps=12, look_every=3, lr=50.0, tol=0.0)
    whole = fit(starts, [1.0, 1.0], losses, N, settings)
    assert all(torch.equal(constant, mean) for constant in whole.constants), "no look was better"
    monkeypatch.setattr(Snapshots, "due", lambda self: True)
    steps = []

    def killed(constants, which, rows):
        steps.extend([] if rows is None else [1])
        if len(steps) == 5:
            raise KeyboardInterrupt
        return losses(constants, which, rows)

    path = tmp_path / "state"
    with pytest.raises(KeyboardInterrupt):
        fit(starts, [1.0, 1.0], killed, N, settings, Snapshots(path, "identity"))
    resumed = fit(starts, [1.0, 1.0], losses, N, settings, Snapshots(path, "identity"))
    for one, other in zip(resumed.constants, whole.constants, strict=True):
        assert torch.equal(one, other)
    assert resumed.curves == whole.curves


def test_a_start_whose_loss_is_no_number_is_not_taken_and_training_on_it_stops():
    _, losses = toy()

    def broken_above_five(constants, which, rows):
        for place, some, value in losses(constants, which, rows):
            broken = (constants[which[place.start]] > 5).any()
            yield place, some, torch.where(broken, torch.nan, value)

    starts = [[torch.full((1, 3), 9.0)] * 2, [torch.zeros(1, 3)] * 2]
    fitted = fit(starts, [1.0, 1.0], broken_above_five, N, Settings(steps=0))
    assert fitted.starts == [1, 1]
    lost = fit(starts[:1], [1.0, 1.0], broken_above_five, N, Settings(steps=5000))
    assert all(curve[-1][0] <= 60 for curve in lost.curves), "three looks"


def test_losses_below_zero_also_stop_when_nothing_is_gained():
    _, losses = toy()

    def lower(constants, which, rows):
        for place, some, value in losses(constants, which, rows):
            yield place, some, value - 100

    settings = Settings(steps=5000, look_every=20, batch=0)
    fitted = fit([[torch.zeros(1, 3)] * 2], [1.0, 1.0], lower, N, settings)
    assert all(curve[-1][1] < 0 for curve in fitted.curves)
    assert all(curve[-1][0] < 1000 for curve in fitted.curves)
