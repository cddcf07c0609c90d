"""The README's table of costs comes from benchmarks/*.json: nothing is measured here. That the
README is current is part of `test_the_readme_is_current`."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

from benchmarks import table  # noqa: E402

FILES = sorted((ROOT / "benchmarks").glob("*.json"))


def test_every_benchmark_has_left_a_file():
    assert {file.stem for file in FILES} >= set(table.OWN)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_file_says_sizes_versions_and_ratios_of_its_own_seconds(file):
    stored = json.loads(file.read_text("utf-8"))
    assert stored["sizes"] and stored["versions"]["torch"] and stored["rows"]
    for line in stored["rows"]:
        assert line["ratio"] == pytest.approx(line["ours"] / line["base"], rel=1e-3)


def test_a_missed_goal_is_marked():
    line = {"what": "a", "ours": 2.0, "against": "b", "base": 1.0, "ratio": 2.0, "goal": 1.6}
    assert "≤ 1.6 ✗" in table.as_row(line)
    assert "≤ 1.6 ✓" in table.as_row(line | {"ratio": 1.5})


SOME_PEERS = """
import json, sys
from pathlib import Path
path = Path(sys.argv[1])
sys.path.insert(0, str(path.parent / "peers"))
import run, timing
stored = json.loads(path.read_text("utf-8"))
about_run = {name: stored[name] for name in timing.about_run({})}
rows, left_out = run.kept(path, ["tuned-lens"], about_run)
assert rows == [row for row in stored["rows"] if row["peer"] != "tuned-lens"] and len(rows) > 1
assert run.kept(path, list(run.PEERS), about_run) == ([], {})
timing.Path = lambda name: Path("nowhere")  # a system that does not tell
memory = timing.memory_of(lambda: None)
assert 0.05 < memory["peak_gb"] < 50 and memory["net_gb"] == 0, memory
run.kept(path, ["tuned-lens"], {**about_run, "processor": "another"})
"""


def test_asked_for_one_peer_the_rows_of_others_stay_if_they_can_be_compared():
    call = [sys.executable, "-c", SOME_PEERS, str(ROOT / "benchmarks" / "peers.json")]
    done = subprocess.run(call, capture_output=True, text=True)
    assert done.stderr.strip() == "peers.json was measured with other processor: run all peers"


def test_asked_for_some_searches_the_budgets_of_others_stay():
    spec = importlib.util.spec_from_file_location("budgets", ROOT / "scripts" / "budgets.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    stored = pd.read_csv(ROOT / "benchmarks" / "budgets.csv")
    pairs = ["optimal:ugs", "counterfactual:hcgs"]
    rows = [("ugs", "optimal", 9.0, 0.0, 0.0), ("hcgs", "counterfactual", 9.0, 0.0, 0.0)]
    table = script.merged(stored, pd.DataFrame(rows, columns=stored.columns), pairs)
    assert table[table.edges == 9].method.tolist() == ["hcgs", "ugs"]
    assert table.iloc[-1].ablation == "optimal"
    others = stored[~script.names(stored).isin(pairs)]
    assert table[table.edges != 9].values.tolist() == others.values.tolist()


def test_peers_that_could_not_be_run_are_named(monkeypatch):
    files = {name: table.load(name) for name in table.OWN}
    peers = {"rows": [], "left_out": {"another": "no such package"}}
    monkeypatch.setattr(table, "load", lambda name: files.get(name, peers))
    assert "another could not be run: no such package" in table.markdown()
