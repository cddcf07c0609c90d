import json
import logging
import math
import os
import runpy
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import joblib
import numpy as np
import pytest
import torch

from oa_utils import files, runs

MODEL = SimpleNamespace(name="org/tiny model", fingerprint="m0")
TASK = SimpleNamespace(fingerprint="t0")


@dataclass(frozen=True)
class Settings:
    lam: float = 1e-3
    steps: int = 5
    seed: int = 0


@dataclass(frozen=True)
class Lookalike:
    lam: float = 1e-3
    steps: int = 5
    seed: int = 0


class Counter:
    """A computation that knows how often it was called."""

    def __init__(self, numbers=None, tensors=None):
        self.calls, self.numbers, self.tensors = 0, numbers or {"gap": 0.5}, tensors

    def __call__(self, snapshots):
        self.calls += 1
        return (self.numbers, self.tensors) if self.tensors else self.numbers


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    for name in ("FRESH", "OA_BUDGET", "OA_JOBS", "OA_QUIET"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OA_STORE", str(tmp_path / "store"))
    monkeypatch.setattr(files, "REPO", tmp_path / "repo")
    return tmp_path


def run(compute, settings=None, **kwargs):
    return runs.run("ex", settings or Settings(), compute, **{"model": MODEL, "task": TASK, **kwargs})


def strict(path):
    def fail(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(path.read_text(), parse_constant=fail)


# where and how much


def test_store_is_in_the_repo_unless_told_otherwise_and_temporary_for_tests(place, monkeypatch):
    assert runs.store() == place / "store"
    monkeypatch.delenv("OA_STORE")
    assert runs.store() == place / "repo" / ".oa"
    monkeypatch.setenv("OA_BUDGET", "test")
    assert place not in runs.store().parents and runs.store() == runs.store()


def test_unknown_budget_names_the_options(monkeypatch):
    assert runs.budget() == "default"
    monkeypatch.setenv("OA_BUDGET", "huge")
    with pytest.raises(ValueError, match="huge.*test, default, paper"):
        runs.budget()


# one result


def test_a_stored_result_is_loaded_not_computed_and_equals_the_computed_one():
    compute = Counter({"gap": 0.1 + 0.2, "rows": [{"layer": 0, "gap": 1.5}]}, {"c": torch.arange(3.0)})
    first, second = run(compute), run(compute)
    assert compute.calls == 1
    assert first.numbers == second.numbers == compute.numbers
    assert torch.equal(second.tensors["c"], torch.arange(3.0))
    assert second.frame().to_dict("records") == [{"layer": 0, "gap": 1.5}]
    assert second.settings == {"lam": 1e-3, "steps": 5, "seed": 0}


@pytest.mark.parametrize(
    "change",
    [
        {"settings": Settings(lam=2e-3)},
        {"settings": Lookalike()},
        {"model": SimpleNamespace(name=MODEL.name, fingerprint="m1")},
        {"task": SimpleNamespace(fingerprint="t1")},
        {"task": None},
        {"version": 2},
    ],
)
def test_whatever_can_change_the_numbers_changes_the_file(change):
    compute = Counter()
    assert run(compute).path != run(compute, **change).path
    assert compute.calls == 2


def test_names_are_readable_and_stay_inside_the_store(place):
    path = run(Counter(), Settings(lam=0.5)).path
    assert path.parent == place / "store" / "org-tiny-model" / "ex"
    assert path.name.startswith("lam=0.5-") and len(path.stem) == len("lam=0.5-") + 12
    assert run(Counter(), key="../a b").path.name.startswith("a-b-")
    assert runs.run("ex", Settings(), Counter()).path.parent == place / "store" / "none" / "ex"


def test_record_says_how_it_was_made():
    record = strict(run(Counter(tensors={"c": torch.ones(2)}), Settings(seed=3), key="k").path)
    assert (record["experiment"], record["key"], record["seed"], record["version"]) == ("ex", "k", 3, 1)
    assert (record["model"], record["model_fingerprint"], record["task_fingerprint"]) == (MODEL.name, "m0", "t0")
    assert record["versions"].keys() == {"python", "torch", "transformers", "transformer_lens", "numpy"}
    assert record["versions"]["torch"] == torch.__version__
    assert record["threads"] == torch.get_num_threads() and record["budget"] == "default"
    assert record["seconds"] >= 0 and len(record["tensors"]) == 64


def test_json_is_strict_and_the_round_trip_exact():
    numbers = {
        "odd": [math.nan, math.inf, -math.inf, -0.0, 1e-320, 0.1],
        "words": ["NaN", "\\NaN", "-Infinity", "\\x", "", "nan", "größer"],
        "numpy": np.array([[1.5, np.nan]], dtype=np.float32),
        "torch": torch.tensor([1, 2]),
        "scalar": np.float64(2.5),
        "flag": torch.tensor(True),
        "deep": {"a": (1, None, {"b": np.int64(7)})},
        3: "key",
    }
    result = run(Counter(numbers))
    strict(result.path)
    back = result.numbers
    assert math.isnan(back["odd"][0]) and back["odd"][1:3] == [math.inf, -math.inf]
    assert back["odd"][4:] == [1e-320, 0.1] and math.copysign(1, back["odd"][3]) == -1
    assert back["words"] == numbers["words"]
    assert back["numpy"][0][0] == 1.5 and math.isnan(back["numpy"][0][1])
    assert (back["torch"], back["scalar"], back["flag"], back["3"]) == ([1, 2], 2.5, True, "key")
    assert back["deep"] == {"a": [1, None, {"b": 7}]}


def test_what_json_cannot_hold_is_refused_and_leaves_no_result():
    with pytest.raises(TypeError, match="set"):
        run(Counter({"a": {1, 2}}))
    compute = Counter()
    run(compute)
    assert compute.calls == 1


def test_writing_leaves_no_temporary_file_and_keeps_the_old_one_when_it_fails(place, monkeypatch):
    path = place / "a" / "x.json"
    runs.write_bytes(path, b"older")
    with path.open("rb") as reader:
        runs.write_bytes(path, b"old")
        assert reader.read() == b"older"

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        runs.write_bytes(path, b"new")
    assert [p.name for p in path.parent.iterdir()] == ["x.json"] and path.read_bytes() == b"old"


# files that must not be used


def truncate(path):
    path.write_bytes(path.read_bytes()[:-30])


def tamper(path):
    path.write_text(path.read_text().replace('"gap": 0.5', '"gap": 0.4'))


def foreign(path):
    path.write_text('{"gap": 0.5}')


def not_json(path):
    path.write_bytes(b"\x80\x04\x95\xff")


def bare_nan(path):
    path.write_text(path.read_text().replace("0.5", "NaN"))


def other_run(path):
    path.write_bytes(run(Counter(), Settings(lam=9.0)).path.read_bytes())


def other_tensors(path):
    path.with_suffix(".safetensors").write_bytes(runs._to_bytes({"c": torch.zeros(2)}))


def no_tensors(path):
    path.with_suffix(".safetensors").unlink()


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (truncate, "not whole"),
        (tamper, "changed"),
        (foreign, "foreign"),
        (not_json, "not whole"),
        (bare_nan, "not whole"),
        (other_run, "another run"),
        (other_tensors, r"safetensors is not the one"),
        (no_tensors, r"safetensors is missing"),
    ],
)
def test_a_damaged_file_is_reported_and_computed_again(damage, why):
    compute = Counter(tensors={"c": torch.ones(2)})
    path = run(compute).path
    damage(path)
    with pytest.warns(UserWarning, match=f"{path.stem}.*{why}"):
        result = run(compute)
    assert compute.calls == 2 and result.numbers == {"gap": 0.5} and torch.equal(result.tensors["c"], torch.ones(2))
    run(compute)
    assert compute.calls == 2


def test_a_test_result_does_not_stand_for_a_real_one(monkeypatch):
    compute = Counter()
    monkeypatch.setenv("OA_BUDGET", "test")
    run(compute)
    monkeypatch.delenv("OA_BUDGET")
    assert json.loads(run(compute).path.read_text())["budget"] == "default" and compute.calls == 2


# FRESH


def test_fresh_ignores_what_was_there_before_but_not_what_this_process_wrote(monkeypatch):
    compute = Counter()
    path = run(compute).path
    monkeypatch.setenv("FRESH", "1")
    run(compute)
    assert compute.calls == 1
    os.utime(path, (files.STARTED - 5, files.STARTED - 5))
    run(compute)
    run(compute)
    assert compute.calls == 2
    monkeypatch.setenv("FRESH", "0")
    os.utime(path, (0, 0))
    run(compute)
    assert compute.calls == 2


def test_fresh_may_name_a_moment_that_several_processes_share(monkeypatch):
    compute = Counter()
    path = run(compute).path
    os.utime(path, (files.STARTED - 5, files.STARTED - 5))
    monkeypatch.setenv("FRESH", str(files.STARTED - 10))
    run(compute)
    assert compute.calls == 1


# snapshots

WALK = """
import sys, time
from dataclasses import dataclass
import torch
from oa_utils import files, runs

@dataclass(frozen=True)
class Settings:
    steps: int = 60
    seed: int = 0

def walk(log, pause):
    def compute(snapshots):
        rng = runs.generator(0)
        x, start, total = torch.zeros(4), 0, 0.0
        if state := snapshots.load():
            numbers, tensors = state
            start, total, x = numbers["step"], numbers["total"], tensors["x"]
            rng.set_state(tensors["rng"])
        for step in range(start, 60):
            x = 0.9 * x + torch.randn(4, generator=rng)
            total += float(x.sum()) / 3
            with open(log, "a") as file:
                file.write(f"{step}\\n")
            if snapshots.due(0):
                snapshots.save({"step": step + 1, "total": total}, {"x": x, "rng": runs.rng_state(rng)})
            time.sleep(pause)
        return {"total": total, "x": x}, {"x": x}
    return runs.run("walk", Settings(), compute)

if __name__ == "__main__":
    walk(sys.argv[1], float(sys.argv[2]))
"""


def test_a_killed_run_goes_on_from_its_snapshot_and_ends_with_the_same_numbers(place):
    script, log, root = place / "walk.py", place / "log", Path(runs.__file__).parent.parent
    script.write_text(WALK)

    def start(pause):
        env = {**os.environ, "OA_STORE": str(place / "killed"), "PYTHONPATH": str(root)}
        return subprocess.Popen([sys.executable, str(script), str(log), str(pause)], env=env)

    def steps(path=log):
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    killed, deadline = start(0.05), time.time() + 300
    while len(steps()) < 10 and time.time() < deadline:
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    before = len(steps())
    assert 10 <= before < 60
    folder = place / "killed" / "none" / "walk"
    assert not list(folder.glob("*.json")) and len(list(folder.glob("*.snapshot"))) == 1

    assert start(0).wait(timeout=300) == 0
    again = steps()[before:]
    assert again[0] >= before - 1 and again[-1] == 59
    assert not list(folder.glob("*.snapshot"))

    whole = runpy.run_path(str(script))["walk"](place / "whole.log", 0)
    assert steps(place / "whole.log") == list(range(60))
    resumed = runs.read_json(folder / whole.path.name)
    assert resumed["numbers"] == whole.numbers
    assert resumed["tensors"] == runs.read_json(whole.path)["tensors"]
    assert resumed["seconds"] > 0.05 * (before - 1)


def snapshots(place, identity="a"):
    return runs.Snapshots(place / "s.snapshot", identity)


def test_a_snapshot_holds_numbers_and_tensors_in_one_file(place):
    assert snapshots(place).load() is None
    shared = torch.arange(6.0)
    snapshots(place).save(
        {"best": math.inf, "step": 3}, {"x": shared[:3], "y": shared.view(2, 3).T, "e": torch.zeros(0)}
    )
    assert [p.name for p in place.iterdir()] == ["s.snapshot"]
    numbers, tensors = snapshots(place).load()
    assert numbers == {"best": math.inf, "step": 3} and torch.equal(tensors["y"], shared.view(2, 3).T)
    tensors["x"] += 1
    snapshots(place).save({"step": 4})
    assert snapshots(place).load() == ({"step": 4}, {})


@pytest.mark.parametrize("damage", ["cut", "flip", "number", "foreign", "empty", "identity"])
def test_a_damaged_snapshot_is_reported_and_not_used(place, damage):
    snapshots(place).save({"step": 12345}, {"x": torch.arange(100.0)})
    path = place / "s.snapshot"
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[-3] ^= 1
    changed = {"cut": data[:-7], "number": data.replace(b"12345", b"12346"), "foreign": b"x" * 50, "empty": b""}
    path.write_bytes(changed.get(damage, data))
    with pytest.warns(UserWarning, match="s.snapshot.*starting anew"):
        assert snapshots(place, "b" if damage == "identity" else "a").load() is None


def test_seconds_are_summed_over_sessions_and_due_waits(place):
    first = snapshots(place)
    first.began -= 100
    assert not first.due() and first.due(0)
    first.saved -= 30
    assert first.due()
    first.save({})
    assert not first.due()
    second = snapshots(place)
    second.load()
    assert 100 <= second.seconds() < 110


def test_a_computation_that_fails_keeps_its_snapshot_and_one_that_ends_removes_it(place):
    def fails(snapshots):
        snapshots.save({"step": 1})
        raise KeyError("boom")

    with pytest.raises(KeyError):
        run(fails)
    result = run(lambda snapshots: {"found": snapshots.load()[0]["step"]})
    assert result.numbers == {"found": 1}
    assert {p.suffix for p in result.path.parent.iterdir()} == {".json"}


def test_fresh_ignores_old_snapshots(place, monkeypatch):
    snapshots(place).save({"step": 1})
    os.utime(place / "s.snapshot", (0, 0))
    assert snapshots(place).load()
    monkeypatch.setenv("FRESH", "1")
    assert snapshots(place).load() is None


# work


def test_parallel_keeps_the_order_and_shares_cores_and_store(place, monkeypatch):
    monkeypatch.setenv("OA_JOBS", "2")
    assert runs.parallel(abs, [-1, 2]) == [1, 2]
    monkeypatch.setenv("OA_BUDGET", "test")
    monkeypatch.setenv("OA_STORE", str(place / "other"))
    before = torch.get_num_threads()

    def work(i):
        time.sleep(0.05 * (3 - i))
        return i, os.getpid(), torch.get_num_threads(), runs.store(), runs.budget(), runs.quiet()

    out = runs.parallel(work, range(4))
    assert [o[0] for o in out] == [0, 1, 2, 3] and os.getpid() not in {o[1] for o in out}
    assert all(o[2] == max(1, min(before, joblib.cpu_count() // 2)) for o in out)
    assert {o[3:] for o in out} == {(place / "other", "test", True)}
    assert torch.get_num_threads() == before


def test_under_fresh_caller_and_workers_load_what_the_other_wrote(monkeypatch):
    monkeypatch.setenv("OA_JOBS", "2")
    monkeypatch.setenv("FRESH", "1")

    def work(lam):
        files.STARTED = time.time() + 60  # a worker that starts late
        return runs.run("ex", Settings(lam=lam), lambda _: {"by": "worker"}).numbers["by"]

    runs.run("ex", Settings(lam=1.0), lambda _: {"by": "caller"})
    assert runs.parallel(work, [1.0, 2.0]) == ["caller", "worker"]
    assert runs.run("ex", Settings(lam=2.0), lambda _: {"by": "caller"}).numbers["by"] == "worker"


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_workers_error_reaches_the_caller_with_its_item(monkeypatch, jobs):
    monkeypatch.setenv("OA_JOBS", jobs)

    def work(item):
        return 1 / (item - 2)

    with pytest.raises(RuntimeError, match="^2 failed: ZeroDivisionError"):
        runs.parallel(work, [0, 1, 2, 3])


def test_parallel_runs_under_dask():
    distributed = pytest.importorskip("distributed")
    with (
        distributed.LocalCluster(n_workers=1, threads_per_worker=2, processes=False, dashboard_address=None) as cluster,
        distributed.Client(cluster),
        joblib.parallel_config(backend="dask"),
    ):
        seen = runs.parallel(lambda i: (i, distributed.get_worker().name), range(5))
        assert [i for i, _ in seen] == list(range(5))
        with pytest.raises(RuntimeError, match="^3 failed: ZeroDivisionError"):
            runs.parallel(lambda i: 1 / (i - 3), range(5))


def test_estimates_read_like_sentences():
    assert runs.estimate(1 / 3, 600, 1.2e9) == "about 3 min 20 s (600 steps of 0.33 s), 1.2 GB"
    assert runs.estimate(0.01, 50) == "about 0.5 s (50 steps of 0.01 s)"
    assert runs.estimate(75, 1000) == "about 20 h 50 min (1,000 steps of 1 min 15 s)"


def test_micro_batch_fits_and_is_never_zero(monkeypatch):
    assert runs.micro_batch(100, 10, 365) == 36
    assert runs.micro_batch(20, 10, 365) == 20
    assert runs.micro_batch(20, 1000, 365) == 1
    free = runs._free_bytes()
    assert runs.micro_batch(10**9, 1e6) == pytest.approx(free / 2 / 1e6, rel=0.2)
    monkeypatch.setattr(runs, "psutil", None)
    assert runs._free_bytes() == pytest.approx(free, rel=0.2)


def test_announce_goes_to_the_log_or_to_stderr_never_to_stdout(monkeypatch, capsys, caplog):
    with caplog.at_level(logging.INFO, "oa_utils"):
        runs.announce("about 3 min")
    assert caplog.messages == ["about 3 min"]
    monkeypatch.setattr(runs, "quiet", lambda: False)
    runs.announce("about 4 min")
    out, err = capsys.readouterr()
    assert (out, err.strip()) == ("", "about 4 min")
    assert list(runs.progress(range(3), desc="x")) == [0, 1, 2]


# what is published


def test_publish_copies_finished_tables_but_no_tests_no_wrecks_and_no_tensors(place, monkeypatch):
    table = run(Counter(tensors={"c": torch.ones(2)}), Settings(lam=1.0))
    runs.run("curves", Settings(), lambda _: {"a": [1, 2]}, model=MODEL)
    foreign(run(Counter(), Settings(lam=3.0)).path)
    other = runs.run("ex", Settings(), Counter(), model=SimpleNamespace(name="other", fingerprint="o"))
    monkeypatch.setenv("OA_BUDGET", "test")
    run(Counter(), Settings(lam=4.0))
    monkeypatch.delenv("OA_BUDGET")
    with pytest.warns(UserWarning, match=r"lam=3.0.*not published"):
        runs.publish(MODEL.name)
    folder = place / "repo" / "data" / "results"
    names = {path.name for path in folder.rglob("*") if path.is_file()}
    assert names == {table.path.name}
    with pytest.warns(UserWarning):
        runs.publish()
    assert (folder / "other" / "ex" / other.path.name).read_bytes() == other.path.read_bytes()


def test_results_are_one_table_of_rows_with_their_settings(capsys):
    table = [{"layer": 0, "seed": 7, "gap": math.nan}, {"layer": 1, "seed": 8, "gap": 2.0}]
    run(Counter({"rows": table}), Settings(lam=1.0))
    newer = run(Counter({"rows": table}), Settings(lam=2.0), version=2)
    runs.main(["publish", "--model", MODEL.name])
    assert "2 files published" in capsys.readouterr().out
    frame = runs.results(MODEL.name, "ex")
    assert list(frame.columns) == ["file", "lam", "steps", "settings.seed", "layer", "seed", "gap"]
    assert frame.lam.tolist() == [2.0, 2.0] and frame.seed.tolist() == [7, 8] and frame["settings.seed"].eq(0).all()
    assert set(frame.file) == {newer.path.name} and frame.gap.isna().tolist() == [True, False]


def test_results_without_rows_are_one_row_a_file():
    for lam in (1.0, 2.0):
        run(Counter({"gap": lam / 10, "curve": [1, 2]}), Settings(lam=lam))
    runs.publish()
    frame = runs.results(MODEL.name, "ex").sort_values("lam")
    assert frame[["lam", "gap"]].values.tolist() == [[1.0, 0.1], [2.0, 0.2]] and "curve" not in frame


def test_missing_results_name_those_that_are_there(place):
    run(Counter())
    runs.publish()
    with pytest.raises(FileNotFoundError, match="there are: org-tiny-model/ex"):
        runs.results(MODEL.name, "nothing")


def test_a_published_file_that_was_changed_is_refused():
    run(Counter())
    tamper(runs.publish()[0])
    with pytest.raises(runs.BadFile, match="changed"):
        runs.results(MODEL.name, "ex")
