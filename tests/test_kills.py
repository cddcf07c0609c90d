"""Runs that are killed again and again end with the very numbers of one that was not.

Children are forked after everything is imported; each life of a run ends with SIGKILL at a chosen
snapshot, half of the time before the new one has replaced the old.
"""

import dataclasses
import os
import signal
from collections.abc import Callable

import pytest
import torch
from toys import dense_model, make_task

import oa_utils as oa
from oa_utils import store


def a_search():
    masked = dense_model()
    oa.ugs(masked, make_task(masked.model), "optimal", lam=1e-2, steps=130, prompts=1, masks=2)


def acdc():
    masked = dense_model()
    oa.acdc(masked, make_task(masked.model), lam=1e-2, prompts=8, guess=4)


def gap():
    masked = dense_model()
    circuit = oa.Circuit(masked.graph, torch.arange(len(masked.graph)) % 2, "half")
    oa.gap(masked, make_task(masked.model), circuit, "optimal", steps=12, look_every=3)


def components():
    model = dense_model().model
    oa.component_gaps(model, make_task(model), ["a1.h0", "m0"], ["optimal"], steps=12, look_every=3)


def tracing():
    model = dense_model().model
    task = make_task(model)
    facts = dataclasses.replace(task, subject=torch.tensor([[1, 3]] * len(task)))
    oa.trace(model, facts, window=1, layers=[0, 1], steps=12, look_every=3)


def lens():
    model = dense_model().model
    tokens = make_task(model, n=200).tokens
    oa.lenses.train(model, tokens, "oca", steps=12, look_every=3, batch=64)


def in_a_child(work: Callable[[], None], place: str, kill_at: int = 0) -> int:
    """The signal that ended the child, or 0: it is killed at its `kill_at`-th snapshot."""
    pid = os.fork()
    if pid:
        _, status = os.waitpid(pid, 0)
        return status
    try:  # a child never comes back to pytest
        os.environ["OA_STORE"] = place
        write = store.write_sealed
        left = [kill_at]

        def write_and_die(path, head, tensors):
            left[0] -= 1
            if left[0] == 0 and kill_at % 2:
                os.kill(os.getpid(), signal.SIGKILL)
            write(path, head, tensors)
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        store.write_sealed = write_and_die
        store.Snapshots.due = lambda self: True
        work()
        os._exit(0)
    finally:
        os._exit(1)


def outcome(place):
    """All that a store holds, but for seconds."""
    records = {path.relative_to(place): store.read_record(path) for path in place.rglob("*.json")}
    return {name: {**record, "seconds": 0} for name, record in records.items()}


@pytest.mark.parametrize(
    "work, kills",
    [
        (a_search, [2, 3, 4, 1]),
        (acdc, [2, 3, 2]),
        (gap, [2, 3, 1, 4]),
        (components, [2, 3, 1]),
        (tracing, [2, 3, 2]),
        (lens, [2, 3, 2]),
    ],
)
def test_a_run_that_is_killed_again_and_again_ends_with_the_same_numbers(work, kills, tmp_path):
    dense_model()
    torch.set_num_threads(1)
    assert in_a_child(work, str(tmp_path / "whole")) == 0
    for kill_at in kills:
        assert in_a_child(work, str(tmp_path / "killed"), kill_at) == signal.SIGKILL
        assert list((tmp_path / "killed").rglob("*.snapshot"))
    assert in_a_child(work, str(tmp_path / "killed")) == 0
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "whole") != {}
    assert not list((tmp_path / "killed").rglob("*.snapshot"))
