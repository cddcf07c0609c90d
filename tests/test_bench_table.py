"""The README's table of costs comes from benchmarks/*.json: nothing is measured here. That the
README is current is part of `test_the_readme_is_current`."""

import json
import sys
from pathlib import Path

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


def test_peers_that_could_not_be_run_are_named(monkeypatch):
    files = {name: table.load(name) for name in table.OWN}
    peers = {"rows": [], "left_out": {"another": "no such package"}}
    monkeypatch.setattr(table, "load", lambda name: files.get(name, peers))
    assert "another could not be run: no such package" in table.markdown()
