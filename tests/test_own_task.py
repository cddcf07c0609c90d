"""Notebooks 01, 02 and 04 on a task of one's own: prompts and answers, no counterfactuals, no
wrong answers."""

import json
import re
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import pytest

from oa_utils import tasks
from oa_utils.models import load_model

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


@pytest.mark.parametrize("name", OWN)
def test_the_cells_run_on_a_task_without_counterfactuals(name, monkeypatch, tmp_path):
    monkeypatch.setenv("OA_BUDGET", "test")
    monkeypatch.setenv("OA_MODEL", "tiny")
    monkeypatch.setenv("OA_FIGURES", str(tmp_path))
    monkeypatch.chdir(NOTEBOOKS)
    matplotlib.use("Agg")
    shown = []
    space = {"own": own, "display": shown.append}
    pattern, replacement = OWN[name]
    source = "\n".join(code_cells(name))
    source, n = re.subn(pattern, replacement, source)
    assert n == 1
    exec(compile(source, name, "exec"), space)
    plt.close("all")
    listed = space["listed"]
    assert not any("counterfactual" in claim.id or "manual" in claim.id for claim in listed)
    assert any(tmp_path.rglob("*.png"))


def test_the_task_has_neither_counterfactuals_nor_wrong_answers():
    task = own(load_model("tiny"))
    assert task.counterfactual is None
    assert (task.wrong < 0).all()
