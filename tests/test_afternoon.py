"""A stranger's afternoon, from the README alone: own prompts in a CSV file, an own model in a
folder, an own text file; nothing that is committed changes."""

import random
import shutil
import subprocess

import pandas as pd
import pytest
import torch

import oa_utils as oa
from oa_utils import language
from oa_utils.paper import claims
from oa_utils.store import data_folder, repository

QUICK = {"steps": 2, "batch": 8}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("afternoon") / "mine"
    shutil.copytree(data_folder() / "models" / "tiny", folder)
    return oa.load_model(folder, budget="test")


@pytest.fixture(scope="module")
def task(model, tmp_path_factory):
    """60 prompts of three lengths."""
    path = tmp_path_factory.mktemp("prompts") / "classes.csv"
    pd.read_csv(data_folder() / "examples" / "labels.csv", dtype=str).head(60).to_csv(
        path, index=False
    )
    task = oa.Task.from_csv(model, path)
    assert len(task) == 60
    assert len(task.last.unique()) == 3
    return task


def committed() -> str:
    """What git sees of changes in committed files; empty outside of a checkout."""
    call = ["git", "status", "--short", "--untracked-files=no"]
    done = subprocess.run(call, cwd=repository(), capture_output=True, text=True)
    return done.stdout


def test_components_circuits_and_random_circuits(model, task, tmp_path, monkeypatch):
    monkeypatch.setenv("OA_FIGURES", str(tmp_path / "figures"))
    before = committed()
    gaps = oa.component_gaps(
        model, task, ["a0.h1", "m0"], ["mean", "optimal"], "shared", look_every=1, **QUICK
    )
    assert (gaps.gap >= -1e-6).all()
    masked = oa.MaskedModel(model)
    asked = (["ugs"], ["optimal"], {"lam": [0.02]})
    options = {"ugs": {"steps": 2, "prompts": 2, "masks": 2}}
    table = oa.sweep(masked, task, *asked, options=options, gap_options=QUICK)
    circuit = oa.random_circuits(masked, 100, n=1)[0]
    row = table.assign(
        edges=[circuit.mask.nonzero()[:, 0].tolist()], n_edges=circuit.n_edges, ablation="mean"
    )
    against = oa.against_random(masked, task, row, n=2)
    assert against.kind.tolist() == ["found", "random", "random"]
    again = oa.sweep(masked, task, *asked, options=options, gap_options=QUICK)
    pd.testing.assert_frame_equal(table, again)
    variant = claims.variant(model, 0, task)
    assert variant == "classes"
    path = oa.plots.save(oa.plots.draw(circuit).figure, "circuit", model, "", variant)
    assert path.parent == oa.plots.folder(model.budget) / "mine" / "own" / "classes"
    assert path.is_relative_to(tmp_path / "figures")
    assert committed() == before


def test_a_map_of_one_prompt_and_facts_of_ones_own(model):
    fact = language.facts()[0]
    prompt = language.fact_prompt(random.Random(0), fact, new=False)
    table = oa.trace_prompt(model, prompt, fact["subject"], draws=1, layers=[0, 3])
    assert len(table)
    known = pd.DataFrame(
        {
            "prompt": [language.fact_prompt(random.Random(0), f, new=False) for f in facts_of(8)],
            "subject": [f["subject"] for f in facts_of(8)],
            "answer": [f["answer"] for f in facts_of(8)],
        }
    )
    facts = oa.facts(model, table=known)
    assert not facts.of_paper
    assert 0 < len(facts) <= 8


def facts_of(n):
    return [f for f in language.facts() if language.fact_prompt(random.Random(0), f, new=False)][:n]


def test_a_lens_on_an_own_text_file(model, tmp_path):
    rng = random.Random(0)
    path = tmp_path / "mine.txt"
    path.write_text("\n\n".join(language.plain_text(rng) for _ in range(300)))
    contexts = oa.contexts(model, 24, 12, dataset=path)
    lens = oa.lenses.train(model, contexts, "mean")
    resid = model.run(model.embed(contexts[:2]), 0, 3)[:, -1]
    logp = lens.log_probs(resid, 3)
    assert torch.allclose(logp.exp().sum(-1), torch.ones(2), atol=1e-4)
