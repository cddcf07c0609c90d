"""Notebooks 01, 02, 04 and 11 on a task of one's own: prompts and answers, no counterfactuals, no
wrong answers."""

import json
import re
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import pandas as pd
import pytest

import oa_utils as oa
from oa_utils import tasks
from oa_utils.models import load_model
from oa_utils.paper import costs
from oa_utils.supports import Supports

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
OWN = {  # where each notebook makes its task
    "01_single_components": (r"task = oa\.tasks\.ioi\([^\n]*\)", "task = own(model)"),
    "02_circuits_ioi": (r"task = oa\.tasks\.ioi\([^\n]*\)", "task = own(model)"),
    "04_random_circuits": (r"tasks = \[make\([^\n]*\]", "tasks = [own(model)]"),
}


def own(model):
    """The texts of IOI as a user would bring them."""
    known = tasks.ioi(model, 24, seed=3)
    answers = [f" {text}" for text in model.decode(known.answers)]
    return tasks.Task.from_text(model, list(known.prompts), answers, name="mine")


def code_cells(name: str) -> list[str]:
    book = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text())
    return ["".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "code"]


@pytest.fixture
def at_test_budget(monkeypatch, tmp_path):
    """A notebook's cells run where it is, and what they draw goes to a folder of their own."""
    monkeypatch.setenv("OA_BUDGET", "test")
    monkeypatch.setenv("OA_MODEL", "tiny")
    monkeypatch.setenv("OA_FIGURES", str(tmp_path))
    monkeypatch.chdir(NOTEBOOKS)
    matplotlib.use("Agg")


def run(name: str, pattern: str, replacement: str) -> dict:
    """All names of a notebook after its code ran, one place of it changed."""
    space = {"own": own, "display": print}
    source, n = re.subn(pattern, lambda match: replacement, "\n".join(code_cells(name)))
    assert n == 1
    exec(compile(source, name, "exec"), space)
    plt.close("all")
    return space


@pytest.mark.parametrize("name", OWN)
def test_the_cells_run_on_a_task_without_counterfactuals(name, at_test_budget, tmp_path):
    listed = run(name, *OWN[name])["listed"]
    assert not any("counterfactual" in claim.id or "manual" in claim.id for claim in listed)
    assert any(tmp_path.rglob("*.png"))


def run_on_file(folder: Path) -> dict:
    """Notebook 11 on a file of prompts and answers."""
    task = own(load_model("tiny"))
    answers = load_model("tiny").decode(task.answers)
    table = pd.DataFrame({"prompt": task.prompts, "answer": [f" {text}" for text in answers]})
    table.to_csv(folder / "mine.csv", index=False)
    return run("11_your_own_task", r'FILE = ""', f"FILE = {str(folder / 'mine.csv')!r}")


def test_the_cells_of_notebook_11_run_on_a_file_without_wrong_answers(
    at_test_budget, tmp_path, capsys
):
    space = run_on_file(tmp_path)
    assert space["task"].name == "mine"
    assert not space["scored"] and space["curves"] == {}
    assert "names no wrong answers" in capsys.readouterr().out
    assert {claim.id for claim in space["listed"]} >= {"own.ranked", "own.hooks"}
    assert "own.eap" not in {claim.id for claim in space["listed"]}
    assert set(space["fronts"].method) == {"ugs", "hcgs", "eap_ig_masks"}
    written = json.loads((space["folder"] / "circuit.mib.json").read_text())
    scores = {info["score"] for info in written["edges"].values()}
    assert len(scores) > 2, "scores are θ, not only 0 and 1"


def test_notebook_11_searches_vertices_where_edges_take_too_long(
    at_test_budget, tmp_path, monkeypatch
):
    monkeypatch.setattr(costs, "speed", lambda: 1e6)
    space = run_on_file(tmp_path)
    assert space["level"] == "vertex"
    assert set(space["fronts"].level) >= {"vertex"}
    assert space["leaving"] > 1
    assert min(space["grid"]["lam"]) > max(space["prices"])


def test_notebook_11_searches_layers_where_edges_have_no_exact_form(
    at_test_budget, tmp_path, monkeypatch
):
    monkeypatch.setattr(oa, "supports", lambda model: Supports(layers=True))
    space = run_on_file(tmp_path)
    assert space["masked"].graph.level == "layer"
    assert space["circuit"].graph.level == "layer"
    assert not (space["folder"] / "circuit.mib.json").exists()


def test_the_task_has_neither_counterfactuals_nor_wrong_answers():
    task = own(load_model("tiny"))
    assert task.counterfactual is None
    assert (task.wrong < 0).all()
