import dataclasses
import logging
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import joblib
import pytest
import torch
from conftest import tokens_of
from toys import dense_model, make_task

from oa_utils import machine, store


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    for name in ("OA_BUDGET", "OA_JOBS", "OA_QUIET"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


# ---- how much to spend


def test_unknown_budget_names_the_options(monkeypatch):
    assert machine.budget() == "default"
    assert machine.budget("paper") == "paper"
    with pytest.raises(ValueError, match="large.*test, default, paper"):
        machine.budget("large")
    monkeypatch.setenv("OA_BUDGET", "huge")
    with pytest.raises(ValueError, match="huge.*test, default, paper"):
        machine.budget()
    assert machine.budget("test") == "test"


@pytest.mark.parametrize(
    ("budget", "size", "expected"),
    [
        ("test", 1_000, 1),
        ("test", 10**9, 1),
        ("default", 9_999_999, 2),
        ("default", 10_000_000, 3),
        ("paper", 1_000, 4),
        ("paper", 10**9, 4),
    ],
)
def test_choose_goes_by_the_models_budget_and_size(monkeypatch, budget, size, expected):
    monkeypatch.setenv("OA_BUDGET", "default")
    model = SimpleNamespace(budget=budget, n_parameters=size)
    assert machine.choose(model, test=1, small=2, default=3, paper=4) == expected


def test_choose_knows_the_bundled_model(tiny):
    model = SimpleNamespace(budget="default", n_parameters=tiny.n_parameters)
    assert machine.choose(model, test="t", small="s", default="d", paper="p") == "s"


# ---- how much fits at once


def test_micro_batch_fits_and_is_never_zero():
    assert machine.micro_batch(100, 10, 365) == 36
    assert machine.micro_batch(20, 10, 365) == 20
    assert machine.micro_batch(20, 1000, 365) == 1


def test_micro_batch_does_not_depend_on_the_day():
    assert machine.micro_batch(10**9, 1e6) == machine.MEMORY // 1e6


def test_a_pass_has_at_least_one_row_and_more_on_an_accelerator():
    cpu = SimpleNamespace(device=torch.device("cpu"))
    other = SimpleNamespace(device=torch.device("meta"))
    assert machine.rows_in_a_pass(cpu, machine.PASS_TOKENS // 4) == 4
    assert machine.rows_in_a_pass(cpu, 10 * machine.PASS_TOKENS) == 1
    assert machine.rows_in_a_pass(other, 16) > machine.rows_in_a_pass(cpu, 16)


def refusing(most, compute):
    """Stands in for a machine that has memory for so many items at once."""

    def limited(span):
        if span.stop - span.start > most:
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")
        return compute(span)

    return limited


def test_where_memory_is_refused_spans_are_halved_and_numbers_stay(gpt2):
    from oa_utils.fills import Constants
    from oa_utils.masked import MaskedModel

    masked = MaskedModel(gpt2)
    tokens = tokens_of(gpt2, n=13)
    last = torch.full((13,), tokens.shape[1] - 1)
    mask = torch.rand(13, len(masked.graph), generator=machine.generator(0)).requires_grad_()
    zeros = Constants(torch.zeros(32), torch.zeros(3, 4, 8), torch.zeros(3, 32))

    def loss_and_slope(span):
        logp = masked(tokens[span], last[span], mask[span], zeros)
        loss = -logp[:, 5].sum() / len(tokens)
        return loss.item(), torch.autograd.grad(loss, mask)[0]

    loss, slope = next(machine.in_spans(13, 13, loss_and_slope))
    for most in (12, 4, 1):
        parts = list(machine.in_spans(13, 13, refusing(most, loss_and_slope)))
        assert len(parts) >= 13 / most
        assert sum(part[0] for part in parts) == pytest.approx(loss, abs=1e-6)
        torch.testing.assert_close(sum(part[1] for part in parts), slope, atol=1e-6, rtol=0)


def test_searches_and_gaps_stay_where_memory_is_refused(tmp_path, monkeypatch):
    import oa_utils as oa
    from oa_utils.search.estimators import estimator_errors

    masked = dense_model()
    task = make_task(masked.model, n=16)
    call = type(masked).__call__

    def limited(self, tokens, *rest, **options):
        if len(tokens) > 5:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return call(self, tokens, *rest, **options)

    found = []
    for memory in ("much", "little"):
        monkeypatch.setenv("OA_STORE", str(tmp_path / memory))
        if memory == "little":
            monkeypatch.setattr(type(masked), "__call__", limited)
        circuit = oa.ugs(masked, task, "optimal", lam=1e-2, steps=2, prompts=3, masks=4)
        gap = oa.gap(masked, task, circuit, "optimal", steps=3)
        by_acdc = oa.acdc(masked, task, lam=1e-2, prompts=8).history["loss"]
        by_eap = oa.eap(masked, task, n_edges=5).history["scores"]
        theta = torch.full((len(masked.graph),), 0.5)
        slopes = estimator_errors(masked, task, theta, [0, 1], estimates=2, masks=8, draws=8)
        found.append(
            torch.tensor(
                [*circuit.history["loss"], float(gap), *by_acdc, *by_eap, *slopes.true, *slopes.rms]
            )
        )
    torch.testing.assert_close(*found, atol=1e-6, rtol=0)


def refuse_more_rows_than(most, monkeypatch):
    """Blocks and unembedding of any model find no memory for more rows than these."""
    from oa_utils.models import Model

    refused = []
    for name in ("block", "log_probs"):
        call = getattr(Model, name)

        def limited(self, *args, call=call, **options):
            rows = next(len(x) for x in args if isinstance(x, torch.Tensor))
            if rows > most:
                refused.append(rows)
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
            return call(self, *args, **options)

        monkeypatch.setattr(Model, name, limited)
    return refused


def component_numbers(model, task):
    import oa_utils as oa
    from oa_utils import estimates
    from oa_utils.components import ComponentSettings

    training = {"steps": 3, "look_every": 2, "batch": 8}
    ways = ["optimal", "mean", "counterfactual"]
    gaps = oa.component_gaps(model, task, ablations=ways, families="shared", **training)
    settings = ComponentSettings(**training)
    prototypes = estimates.prototypes(model, task, "a0.h1", 2, settings)
    return [*gaps.gap, *prototypes[1].by_rule]


def tracing_numbers(model, task):
    import oa_utils as oa
    from oa_utils.tracing import spread

    spans = torch.stack([torch.ones(len(task)), 1 + task.last.clamp(max=2)], 1).long()
    facts = dataclasses.replace(task, subject=spans)
    options = {"steps": 3, "look_every": 2, "batch": 8, "draws": 2}
    options["sigma"] = spread(model, task.tokens)
    table = oa.trace(model, facts, ["attn", "mlp"], ["last", "subject"], [1], **options)
    return [*table.p_patched, *table.p_corrupt]


def lens_numbers(model, task):
    from oa_utils import lenses

    tokens = tokens_of(model, n=48)
    data = lenses.read(model, tokens)
    training = {"steps": 3, "look_every": 2, "batch": 16}
    trained = [lenses.train(model, data, kind, **training) for kind in ("oca", "tuned")]
    return [value for lens in trained for value in lens.losses(data).flatten().tolist()]


@pytest.mark.parametrize(
    ("numbers", "most"), [(component_numbers, 9), (tracing_numbers, 5), (lens_numbers, 5)]
)
def test_components_tracing_and_lenses_stay_where_memory_is_refused(
    numbers, most, tmp_path, monkeypatch
):
    model = dense_model().model
    task = make_task(model, n=32)
    monkeypatch.setenv("OA_STORE", str(tmp_path / "much"))
    expected = numbers(model, task)
    monkeypatch.setenv("OA_STORE", str(tmp_path / "little"))
    refused = refuse_more_rows_than(most, monkeypatch)
    found = numbers(model, task)
    assert refused
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), atol=1e-6, rtol=0)


def test_spans_cover_everything_in_order_and_other_errors_pass():
    seen = []
    list(machine.in_spans(10, 4, refusing(3, seen.append)))
    assert [i for span in seen for i in range(10)[span]] == list(range(10))
    with pytest.raises(RuntimeError, match="can't allocate"):
        list(machine.in_spans(3, 3, refusing(0, seen.append)))
    with pytest.raises(RuntimeError, match="^else$"):
        list(machine.in_spans(3, 3, lambda span: (_ for _ in ()).throw(RuntimeError("else"))))


def test_little_memory_means_fewer_workers_not_other_passes(tmp_path, monkeypatch):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(machine, "CONTROL_GROUP", (limit, tmp_path / "none"))
    monkeypatch.setattr(joblib, "cpu_count", lambda: 64)
    limit.write_text("max")
    at_most = machine.memory()
    limit.write_text(str(int(2.5 * machine.WORKER)))
    assert machine.memory() < at_most and machine.jobs() == 2
    limit.write_text("1000000")
    assert machine.jobs() == 1
    assert machine.micro_batch(10**6, 1e6) == 1500


def test_the_same_seed_gives_the_same_draws():
    first, again, other = (torch.rand(3, generator=machine.generator(s)) for s in (5, 5, 6))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


# ---- what whoever waits is told


def test_estimates_read_like_sentences():
    assert machine.estimate(1 / 3, 600) == "about 3 min 20 s (600 steps of 0.33 s)"
    assert machine.estimate(0.01, 50, "layers") == "about 0.5 s (50 layers of 0.01 s)"
    assert machine.estimate(75, 1000) == "about 20 h 50 min (1,000 steps of 1 min 15 s)"


def test_announce_goes_to_the_log_or_to_stderr_never_to_stdout(monkeypatch, capsys, caplog):
    with caplog.at_level(logging.INFO, "oa_utils"):
        machine.announce("about 3 min")
    assert caplog.messages == ["about 3 min"]
    monkeypatch.setattr(machine, "quiet", lambda: False)
    machine.announce("about 4 min")
    out, err = capsys.readouterr()
    assert (out, err.strip()) == ("", "about 4 min")
    assert list(machine.progress(range(3), desc="x")) == [0, 1, 2]


# ---- what runs side by side


def test_parallel_keeps_the_order_and_shares_cores_and_store(place, monkeypatch):
    monkeypatch.setenv("OA_JOBS", "2")
    assert machine.parallel(abs, [-1, 2]) == [1, 2]
    monkeypatch.setenv("OA_BUDGET", "test")
    monkeypatch.setenv("OA_STORE", str(place / "other"))
    before = torch.get_num_threads()

    def work(i):
        time.sleep(0.05 * (3 - i))
        settings = (store.folder(), machine.budget(), machine.quiet())
        return i, os.getpid(), torch.get_num_threads(), settings

    order, processes, threads, settings = zip(*machine.parallel(work, range(4)), strict=True)
    assert order == (0, 1, 2, 3)
    assert os.getpid() not in processes
    assert set(threads) == {max(1, min(before, joblib.cpu_count() // 2))}
    assert set(settings) == {(place / "other" / "test", "test", True)}
    assert torch.get_num_threads() == before


def test_a_worker_that_lives_on_forgets_the_settings_of_an_earlier_call(monkeypatch):
    monkeypatch.setenv("OA_JOBS", "2")
    monkeypatch.setenv("OA_FIGURES", "earlier")

    def figures(_):
        return os.getpid(), os.environ.get("OA_FIGURES")

    workers, before = zip(*machine.parallel(figures, range(4)), strict=True)
    assert os.getpid() not in workers and set(before) == {"earlier"}
    monkeypatch.delenv("OA_FIGURES")
    assert {figures for _, figures in machine.parallel(figures, range(4))} == {None}


def test_a_process_of_another_host_with_the_callers_number_is_a_worker(monkeypatch):
    monkeypatch.delenv("OA_GIVEN", raising=False)
    monkeypatch.setenv("OA_QUIET", "")
    monkeypatch.setenv("OA_STORE", "here")
    elsewhere = ("elsewhere", os.getpid())
    given = {"OA_STORE": "given"}
    assert machine._in_worker(lambda _: os.environ["OA_STORE"], 0, elsewhere, given, 1) == "given"


def test_a_single_process_is_this_one(monkeypatch):
    monkeypatch.setenv("OA_JOBS", "1")
    assert machine.parallel(lambda _: os.getpid(), [1, 2]) == [os.getpid()] * 2


def test_jobs_are_told_by_joblib_then_the_environment_then_the_budget(monkeypatch):
    assert machine.jobs() == joblib.cpu_count()
    monkeypatch.setenv("OA_BUDGET", "test")
    assert machine.jobs() == 1
    monkeypatch.setenv("OA_JOBS", "3")
    assert machine.jobs() == 3
    with joblib.parallel_config(n_jobs=2):
        assert machine.jobs() == 2


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_workers_error_reaches_the_caller_with_its_item(monkeypatch, jobs):
    monkeypatch.setenv("OA_JOBS", jobs)

    def work(item):
        return 1 / (item - 2)

    with pytest.raises(RuntimeError, match="^2 failed: ZeroDivisionError"):
        machine.parallel(work, [0, 1, 2, 3])


LONG = """
import os, sys, time
from pathlib import Path
from oa_utils import machine

def work(i):
    Path(sys.argv[1], str(os.getpid())).touch()
    time.sleep(120)

if __name__ == "__main__":
    machine.parallel(work, range(2))
"""


def test_workers_end_with_their_parent(tmp_path, monkeypatch):
    (tmp_path / "long.py").write_text(LONG)
    pids = tmp_path / "pids"
    pids.mkdir()
    monkeypatch.setenv("OA_JOBS", "2")
    parent = subprocess.Popen([sys.executable, tmp_path / "long.py", pids])
    try:
        wait_until(lambda: len(list(pids.iterdir())) == 2, 60)
    finally:
        parent.kill()
        parent.wait()
    workers = [int(path.name) for path in pids.iterdir()]
    wait_until(lambda: not any(runs(pid) for pid in workers), 10)


def wait_until(true, seconds):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.1)


def runs(pid):
    """Whether a process is there and not just waiting to be taken note of."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except FileNotFoundError:
        return False


def test_parallel_runs_under_dask():
    distributed = pytest.importorskip("distributed")
    with (
        distributed.LocalCluster(
            n_workers=1, threads_per_worker=2, processes=False, dashboard_address=None
        ) as cluster,
        distributed.Client(cluster),
        joblib.parallel_config(backend="dask"),
    ):
        seen = machine.parallel(lambda i: (i, distributed.get_worker().name), range(5))
        assert [i for i, _ in seen] == list(range(5))
        with pytest.raises(RuntimeError, match="^3 failed: ZeroDivisionError"):
            machine.parallel(lambda i: 1 / (i - 3), range(5))


def test_a_call_has_the_threads_it_is_given_and_the_caller_keeps_its_own():
    before = torch.get_num_threads()
    here = (socket.gethostname(), os.getpid())
    given = machine._in_worker(lambda _: torch.get_num_threads(), 0, here, {}, before + 1)
    assert given == before + 1
    assert torch.get_num_threads() == before


def test_where_nobody_knows_the_memory_every_core_works(monkeypatch):
    monkeypatch.setattr(machine, "memory", lambda: float("inf"))
    monkeypatch.setattr(joblib, "cpu_count", lambda: 4)
    assert machine.jobs() == 4
