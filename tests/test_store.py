import inspect
import json
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

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toy_runs import MODEL, TESTED, Counter, Settings, among_real_ones, run

from oa_utils import store

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    for name in ("OA_BUDGET", "OA_JOBS", "OA_QUIET"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OA_STORE", str(tmp_path / "store"))
    monkeypatch.setattr(store, "repository", lambda: tmp_path / "repo")
    return tmp_path


def strict(path):
    def fail(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(path.read_text(), parse_constant=fail)


# ---- where things are


def test_the_store_is_in_the_repository_unless_told_otherwise_and_temporary_for_tests(
    place, monkeypatch
):
    assert store.folder("default") == place / "store"
    assert store.folder("test") == place / "store" / "test"
    monkeypatch.delenv("OA_STORE")
    assert store.folder("default") == store.folder("paper") == place / "repo" / ".oa"
    assert place not in store.folder("test").parents
    assert store.folder("test") == store.folder("test")
    monkeypatch.setenv("OA_BUDGET", "test")
    assert store.folder() == store.folder("test") != store.folder("default")


def test_without_a_repository_the_store_is_in_the_users_cache(place, monkeypatch):
    monkeypatch.delenv("OA_STORE")
    monkeypatch.delenv("OA_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))
    monkeypatch.setattr(store, "repository", lambda: None)
    assert store.folder("default") == place / "cache" / "optimal-ablation" / "store"
    assert store.data_folder() == Path(store.__file__).parent / "data"


def test_a_name_of_a_file_is_short_plain_and_never_a_path():
    assert store.slug("../a b/ü") == "a-b"
    assert store.slug("lam=0.5_x") == "lam=0.5_x"
    assert store.slug("///") == "none"
    assert len(store.slug("x" * 500)) == 80


# ---- one result


def test_a_stored_result_is_loaded_not_computed_and_equals_the_computed_one():
    numbers = {"gap": 0.1 + 0.2, "rows": [{"layer": 0, "gap": 1.5}]}
    compute = Counter(numbers, {"c": torch.arange(3.0)})
    first = run(compute)
    second = run(compute)
    assert compute.calls == 1
    assert first.numbers == second.numbers == compute.numbers
    assert torch.equal(first.tensors["c"], torch.arange(3.0))
    assert torch.equal(second.tensors["c"], torch.arange(3.0))
    assert second.frame().to_dict("records") == [{"layer": 0, "gap": 1.5}]


@pytest.mark.parametrize(
    "change",
    [
        {"settings": Settings(lam=2e-3)},
        {"inputs": {"components": ["a0"]}},
        {"model": SimpleNamespace(name=MODEL.name, fingerprint="m1", budget="default")},
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
    assert path.name.startswith("lam=0.5-")
    assert len(path.stem) == len("lam=0.5-") + 12
    assert run(Counter(), key="../a b").path.name.startswith("a-b-")
    assert run(Counter()).path.name.startswith("default-")


def test_a_run_without_settings_has_a_name_too():
    compute = Counter()
    for _ in range(2):
        result = store.run("ex", None, compute, model=MODEL, inputs={"layer": 3})
    assert compute.calls == 1
    assert result.path.name.startswith("default-")


def test_record_says_how_it_was_made():
    compute = Counter(tensors={"c": torch.ones(2)})
    result = run(compute, Settings(seed=3), key="k", inputs={"kind": "mlp"})
    record = strict(result.path)
    assert record["experiment"] == "ex"
    assert record["key"] == "k"
    assert record["seed"] == 3
    assert record["version"] == 1
    assert record["inputs"] == {"kind": "mlp"}
    assert record["model"] == MODEL.name
    assert record["task"] == "ioi"
    assert (record["model_fingerprint"], record["task_fingerprint"]) == ("m0", "t0")
    packages = {"python", "torch", "transformers", "transformer_lens", "numpy"}
    assert record["versions"].keys() == packages
    assert record["versions"]["torch"] == torch.__version__
    assert record["threads"] == torch.get_num_threads()
    assert record["budget"] == "default"
    assert record["seconds"] >= 0
    assert (result.path.parent / record["tensors"]).exists()
    assert len(record["tensors_sha256"]) == 64


def test_json_is_strict_and_the_round_trip_exact():
    numbers = {
        "odd": [math.nan, math.inf, -math.inf, -0.0, 1e-320, 0.1],
        "words": ["NaN", "\\NaN", "-Infinity", "\\x", "", "nan", "größer"],
        "numpy": np.array([[1.5, np.nan]], dtype=np.float32),
        "torch": torch.tensor([1, 2]),
        "scalar": np.float64(2.5),
        "flag": torch.tensor(True),
        "deep": {"a": (1, None, {"b": np.int64(7)})},
        "3": "key",
    }
    result = run(Counter(numbers))
    strict(result.path)
    back = result.numbers
    assert math.isnan(back["odd"][0])
    assert back["odd"][1:3] == [math.inf, -math.inf]
    assert back["odd"][4:] == [1e-320, 0.1]
    assert math.copysign(1, back["odd"][3]) == -1
    assert back["words"] == numbers["words"]
    assert back["numpy"][0][0] == 1.5
    assert math.isnan(back["numpy"][0][1])
    assert (back["torch"], back["scalar"], back["flag"]) == ([1, 2], 2.5, True)
    assert back["deep"] == {"a": [1, None, {"b": 7}]}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(json_values)
def test_whatever_json_can_say_comes_back_as_it_was(value):
    text = json.dumps(store.plain(value), allow_nan=False)
    assert store.unplain(json.loads(text)) == value


def test_what_json_cannot_hold_is_refused_and_leaves_no_result():
    with pytest.raises(TypeError, match="set"):
        run(Counter({"a": {1, 2}}))
    compute = Counter()
    run(compute)
    assert compute.calls == 1


def test_writing_leaves_no_temporary_file_and_keeps_the_old_one_when_it_fails(place, monkeypatch):
    path = place / "a" / "x.json"
    store.write_bytes(path, b"older")
    with path.open("rb") as reader:
        store.write_bytes(path, b"old")
        assert reader.read() == b"older"

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        store.write_bytes(path, b"new")
    assert [p.name for p in path.parent.iterdir()] == ["x.json"]
    assert path.read_bytes() == b"old"


def full_disk(monkeypatch, name, times=math.inf):
    """A writer of the store that finds the disk full so many times; returns its calls."""
    write = getattr(store, name)
    calls = []

    def full(*given):
        calls.append(given)
        if len(calls) <= times:
            raise OSError("disk full")
        return write(*given)

    monkeypatch.setattr(store, name, full)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    return calls


def test_a_full_disk_loses_neither_the_result_nor_the_snapshot(monkeypatch):
    def compute(snapshots):
        snapshots.save({"step": 7})
        calls.extend(full_disk(monkeypatch, "write_record"))
        return {"gap": 0.5}

    calls = []
    with pytest.warns(UserWarning) as warned:
        result = run(compute)
    assert result.numbers == {"gap": 0.5}
    assert not result.path.exists()
    assert result.path.with_suffix(".snapshot").exists()
    said = [str(warning.message) for warning in warned]
    assert all(str(result.path) in text for text in said)
    assert ["disk full" in text for text in said] == [True, True, True, False]
    assert said[-1].endswith("is not stored: the result is in memory only")


def test_a_result_that_could_not_be_written_once_is_written_again(monkeypatch):
    calls = full_disk(monkeypatch, "write_record", times=1)
    with pytest.warns(UserWarning) as warned:
        result = run(Counter(tensors={"c": torch.ones(2)}))
    assert len(calls) == 2
    assert [f"{result.path} could not be written" in str(each.message) for each in warned] == [True]
    stored = run(Counter({"gap": 0.25}))
    assert stored.numbers == result.numbers == {"gap": 0.5}
    assert torch.equal(stored.tensors["c"], torch.ones(2))


def test_a_snapshot_that_cannot_be_written_stops_nothing(monkeypatch):
    def compute(snapshots):
        for step in range(3):
            snapshots.save({"step": step})
        return {"step": step}

    calls = full_disk(monkeypatch, "write_sealed")
    with pytest.warns(UserWarning, match="no snapshot could be written .disk full.: going on"):
        result = run(compute)
    assert len(calls) == 3
    assert result.numbers == {"step": 2} == store.read_record(result.path)["numbers"]
    assert not result.path.with_suffix(".snapshot").exists()


# ---- names of inputs


def test_a_fingerprint_sees_values_shape_type_and_order():
    x = torch.arange(6.0)
    versions = [
        (x,),
        (x + 1,),
        (x.view(2, 3),),
        (x.double(),),
        (x, "a"),
        ("a", x),
        ("a", "b"),
        ("ab",),
        (torch.tensor(1.0),),
        (torch.zeros(0),),
        ({"a": [1, 2.5]},),
    ]
    assert len({store.fingerprint(*parts) for parts in versions}) == len(versions)
    assert store.fingerprint(x.view(2, 3).T) == store.fingerprint(x.view(2, 3).T.contiguous())
    assert store.fingerprint({"b": 1, "a": 2}) == store.fingerprint({"a": 2, "b": 1})


# ---- settings as keywords


@dataclass(frozen=True)
class TraceSettings:
    kind: str = "mlp"
    steps: int = 50

    def __post_init__(self):
        store.at_least(1, steps=self.steps)


@store.with_settings
def trace(model: str, window: int = 3, settings: TraceSettings = TraceSettings()) -> tuple:  # noqa: B008
    """Docs."""
    return model, window, settings


def test_a_function_with_settings_takes_their_fields_and_shows_them():
    assert trace("m") == ("m", 3, TraceSettings())
    assert trace("m", 4, kind="attn") == ("m", 4, TraceSettings("attn"))
    assert trace(model="m", steps=2, window=1) == ("m", 1, TraceSettings(steps=2))
    assert list(inspect.signature(trace).parameters) == ["model", "window", "kind", "steps"]
    assert trace.__doc__ == "Docs."
    with pytest.raises(TypeError, match="unexpected keyword argument 'step'"):
        trace("m", step=2)
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        trace("m", steps=0)


def test_not_a_number_is_never_at_least_anything():
    with pytest.raises(ValueError, match="lam must be at least 0, got nan"):
        store.at_least(0, lam=math.nan)


def test_frozen_makes_sequences_hashable():
    assert store.frozen([1, [2, range(2)], "ab"]) == (1, (2, (0, 1)), "ab")


# ---- files that must not be used


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


def deep(path):
    path.write_text("[" * 100_000)


def folder(path):
    path.unlink()
    path.mkdir()
    (path / "x").touch()


def other_run(path):
    path.write_bytes(run(Counter(), Settings(lam=9.0)).path.read_bytes())


def tensors_of(path):
    return path.with_name(json.loads(path.read_text())["tensors"])


def other_tensors(path):
    tensors_of(path).write_bytes(store._to_bytes({"c": torch.zeros(2)}))


def no_tensors(path):
    tensors_of(path).unlink()


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (truncate, "not whole"),
        (tamper, "changed"),
        (foreign, "foreign"),
        (not_json, "not whole"),
        (bare_nan, "not whole"),
        (deep, "foreign"),
        (other_run, "another run"),
        (other_tensors, "safetensors is not the one"),
        (no_tensors, "safetensors is not a file"),
    ],
)
def test_a_damaged_file_is_reported_and_computed_again(damage, why):
    compute = Counter(tensors={"c": torch.ones(2)})
    path = run(compute).path
    damage(path)
    with pytest.warns(UserWarning, match=f"{path.stem}.*{why}"):
        result = run(compute)
    assert compute.calls == 2
    assert result.numbers == {"gap": 0.5}
    assert torch.equal(result.tensors["c"], torch.ones(2))
    run(compute)
    assert compute.calls == 2


def test_a_folder_where_a_result_belongs_costs_the_stored_file_only(monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda _: None)
    compute = Counter()
    folder(run(compute).path)
    with pytest.warns(UserWarning, match="is not a file|could not be written|in memory only"):
        assert run(compute).numbers == {"gap": 0.5}


def test_a_test_result_does_not_stand_for_a_real_one():
    compute = Counter()
    path = among_real_ones(run(compute, model=TESTED).path)
    assert run(compute).path == path
    assert compute.calls == 2
    assert json.loads(path.read_text())["budget"] == "default"
    run(compute, model=TESTED)
    assert compute.calls == 2


# ---- snapshots

WALK = """
import sys, time
from dataclasses import dataclass
from types import SimpleNamespace
import torch
from oa_utils import machine, store

@dataclass(frozen=True)
class Settings:
    steps: int = 60
    seed: int = 0

def walk(log, pause):
    def compute(snapshots):
        rng = machine.generator(0)
        x = torch.zeros(4, requires_grad=True)
        optimiser = torch.optim.Adam([x])
        start = 0
        total = 0.0
        state = snapshots.load()
        if state:
            start = state["step"]
            total = state["total"]
            rng.set_state(state["rng"])
            x.data = state["x"]
            optimiser.load_state_dict(state["optimiser"])
        for step in range(start, 60):
            ((x - torch.randn(4, generator=rng)) ** 2).sum().backward()
            optimiser.step()
            optimiser.zero_grad()
            total += float(x.detach().sum()) / 3
            with open(log, "a") as file:
                file.write(f"{step}\\n")
            snapshots.save({"step": step + 1, "total": total, "x": x, "rng": rng.get_state(),
                            "optimiser": optimiser.state_dict()})
            time.sleep(pause)
        return {"total": total, "x": x}, {"x": x}
    model = SimpleNamespace(name="none", fingerprint="f", budget="default")
    return store.run("walk", Settings(), compute, model=model)

if __name__ == "__main__":
    walk(sys.argv[1], float(sys.argv[2]))
"""


def test_a_killed_run_goes_on_from_its_snapshot_and_ends_with_the_same_numbers(place):
    script = place / "walk.py"
    log = place / "log"
    script.write_text(WALK)

    def start(pause):
        environment = {**os.environ, "OA_STORE": str(place / "killed"), "PYTHONPATH": str(ROOT)}
        command = [sys.executable, str(script), str(log), str(pause)]
        return subprocess.Popen(command, env=environment)

    def steps(path=log):
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    killed = start(0.05)
    deadline = time.time() + 300
    while len(steps()) < 10 and time.time() < deadline:
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    before = len(steps())
    assert 10 <= before < 60
    results = place / "killed" / "none" / "walk"
    assert not list(results.glob("*.json"))
    assert len(list(results.glob("*.snapshot"))) == 1

    assert start(0).wait(timeout=300) == 0
    again = steps()[before:]
    assert again[0] >= before - 1
    assert again[-1] == 59
    assert not list(results.glob("*.snapshot"))

    whole = runpy.run_path(str(script))["walk"](place / "whole.log", 0)
    assert steps(place / "whole.log") == list(range(60))
    resumed = store.read_record(results / whole.path.name)
    assert resumed["numbers"] == whole.numbers
    assert resumed["tensors_sha256"] == store.read_record(whole.path)["tensors_sha256"]
    assert resumed["seconds"] > 0.05 * (before - 1)


def snapshots(place, identity="a"):
    return store.Snapshots(place / "s.snapshot", identity)


def test_a_snapshot_holds_a_nested_state_in_one_file(place):
    assert snapshots(place).load() is None
    shared = torch.arange(6.0)
    state = {
        "best": math.inf,
        "words": ["NaN", None, True],
        "optimiser": {"state": {0: {"step": torch.tensor(3.0), "m": shared[:3]}}, 1: "int key"},
        "list": [shared.view(2, 3).T, [torch.zeros(0)]],
        "list/0": torch.ones(1),
        "tensor": {"dict": 1},
    }
    snapshots(place).save(state)
    assert [p.name for p in place.iterdir()] == ["s.snapshot"]
    back = snapshots(place).load()
    assert back["best"] == math.inf
    assert back["words"] == ["NaN", None, True]
    assert back["optimiser"]["state"][0]["step"] == 3
    assert torch.equal(back["optimiser"]["state"][0]["m"], shared[:3])
    assert back["optimiser"][1] == "int key"
    assert torch.equal(back["list"][0], shared.view(2, 3).T)
    assert back["list"][1][0].shape == (0,)
    assert torch.equal(back["list/0"], torch.ones(1))
    assert back["tensor"] == {"dict": 1}
    back["optimiser"]["state"][0]["m"] += 1
    snapshots(place).save({"step": 4})
    assert snapshots(place).load() == {"step": 4}


def test_an_optimiser_goes_on_from_its_state_as_if_nothing_had_happened(place):
    def walk(x, optimiser, steps):
        for _ in range(steps):
            optimiser.zero_grad()
            (x**2).sum().backward()
            optimiser.step()

    x = torch.tensor([1.0, -2.0], requires_grad=True)
    optimiser = torch.optim.AdamW([{"params": [x], "lr": 0.1}], betas=(0.8, 0.9))
    walk(x, optimiser, 3)
    snapshots(place).save({"x": x, "optimiser": optimiser.state_dict()})
    walk(x, optimiser, 3)
    state = snapshots(place).load()
    y = state["x"].requires_grad_()
    other = torch.optim.AdamW([y])
    other.load_state_dict(state["optimiser"])
    walk(y, other, 3)
    assert torch.equal(x, y)


@pytest.mark.parametrize("damage", ["cut", "flip", "number", "foreign", "empty", "identity"])
def test_a_damaged_snapshot_is_reported_and_not_used(place, damage):
    snapshots(place).save({"step": 12345, "x": torch.arange(100.0)})
    path = place / "s.snapshot"
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[-3] ^= 1
    changed = {
        "cut": data[:-7],
        "number": data.replace(b"12345", b"12346"),
        "foreign": b"x" * 50,
        "empty": b"",
    }
    path.write_bytes(changed.get(damage, data))
    with pytest.warns(UserWarning, match="s.snapshot.*starting anew"):
        assert snapshots(place, "b" if damage == "identity" else "a").load() is None


def test_seconds_are_summed_over_sessions_and_due_waits(place):
    first = snapshots(place)
    first.began -= 100
    assert not first.due()
    first.saved -= 30
    assert first.due()
    first.save({})
    assert not first.due()
    second = snapshots(place)
    second.load()
    assert 100 <= second.seconds() < 110


def test_a_state_is_made_only_when_it_is_saved(place):
    calls = []

    def state():
        calls.append(1)
        return {"step": 1}

    first = snapshots(place)
    first.save_when_due(state)
    assert not calls
    first.saved -= 30
    first.save_when_due(state)
    first.save_when_due(state)
    assert len(calls) == 1
    assert snapshots(place).load() == {"step": 1}


def test_a_computation_that_fails_keeps_its_snapshot_and_one_that_ends_removes_it():
    def fails(snapshots):
        snapshots.save({"step": 1})
        raise KeyError("boom")

    with pytest.raises(KeyError):
        run(fails)
    result = run(lambda snapshots: {"step": snapshots.load()["step"]})
    assert result.numbers == {"step": 1}
    assert {p.suffix for p in result.path.parent.iterdir()} == {".json"}


# ---- what is published


def published(result):
    """A result where published ones are; returns its copy."""
    path = store.published() / "/".join(result.path.parts[-3:])
    store.write_bytes(path, result.path.read_bytes())
    return path


def test_results_are_one_table_of_rows_with_their_settings_and_inputs():
    table = [{"layer": 0, "seed": 7, "gap": math.nan}, {"layer": 1, "seed": 8, "gap": 2.0}]
    published(run(Counter({"rows": table}), Settings(lam=1.0)))
    newer = run(Counter({"rows": table}), Settings(lam=2.0), version=2, inputs={"kind": "mlp"})
    published(newer)
    frame = store.results(MODEL.name, "ex")
    columns = ["file", "fingerprint", "task", "kind", "lam", "steps", "settings.seed"]
    assert list(frame.columns) == [*columns, "layer", "seed", "gap"]
    assert frame.lam.tolist() == [2.0, 2.0]
    assert frame.seed.tolist() == [7, 8]
    assert frame["settings.seed"].eq(0).all()
    assert frame.kind.eq("mlp").all()
    assert set(frame.file) == {newer.path.name}
    assert frame.gap.isna().tolist() == [True, False]


def test_results_without_rows_are_one_row_a_file():
    for lam in (1.0, 2.0):
        published(run(Counter({"gap": lam / 10, "curve": [1, 2]}), Settings(lam=lam)))
    frame = store.results(MODEL.name, "ex").sort_values("lam")
    assert frame[["lam", "gap"]].values.tolist() == [[1.0, 0.1], [2.0, 0.2]]
    assert "curve" not in frame


def test_results_of_two_models_of_one_name_are_not_mixed_unawares():
    other = SimpleNamespace(name=MODEL.name, fingerprint="m1", budget="default")
    for model in (MODEL, other):
        published(run(Counter(), model=model))
    with pytest.raises(ValueError, match="2 models of that name"):
        store.results(MODEL.name, "ex")
    assert set(store.results(MODEL.name, "ex", mixed=True).fingerprint) == {"m0", "m1"}


def test_missing_results_name_those_that_are_there():
    published(run(Counter()))
    with pytest.raises(FileNotFoundError, match="there are: org-tiny-model/ex"):
        store.results(MODEL.name, "nothing")


def test_a_published_file_that_was_changed_is_refused():
    tamper(published(run(Counter())))
    with pytest.raises(store.BadFile, match="changed"):
        store.results(MODEL.name, "ex")
