import json
import math
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import nbformat
import numpy as np
import pandas as pd
import pytest
import torch

from oa_utils import store
from oa_utils.paper import claims, costs, notebooks, publishing
from oa_utils.paper.claims import Claim
from oa_utils.tasks import Task

ROOT = Path(__file__).parent.parent
TINY = SimpleNamespace(name="tiny", budget="default")
OTHER = SimpleNamespace(name="gpt2", budget="default")
MEDIAN = Claim(
    "single.median_ratio.mean",
    "OA is a third of mean",
    paper_value=0.33,
    measured=0.305,
    low=0.29,
    high=0.32,
    rule="< 0.5",
    source="r.json",
)
RANK = Claim(
    "single.spearman.mean",
    "ranks agree with CF",
    paper_value=0.825,
    measured=math.nan,
    note="not on this model",
)
EXPERIMENT = "single_components"


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    for name in ("OA_BUDGET", "OA_MODEL", "FRESH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OA_STORE", str(tmp_path / "store"))
    monkeypatch.setattr(store, "repository", lambda: tmp_path / "repo")
    return tmp_path


def publish(*items, model=TINY, experiment=EXPERIMENT):
    """Claims recorded by a notebook that ran to the end, and published."""
    used = store.folder("default") / model.name / publishing.USED / f"{experiment}.txt"
    store.write_bytes(used, b"")
    with patch.dict(os.environ, {"OA_USED": str(used)}):
        path = claims.record(items, model, experiment)
    publishing.publish(model.name)
    return path


# ---- recorded and published


def test_claims_come_back_as_they_were_recorded(place):
    path = publish(MEDIAN, RANK)
    assert path == place / "store" / "tiny" / "claims" / f"{EXPERIMENT}.json"
    back, rank = claims.published("tiny")
    assert back == replace(MEDIAN, model="tiny")
    assert math.isnan(rank.measured)
    assert rank.holds is None
    assert rank.note == RANK.note
    assert store.results("tiny", "claims").id.tolist() == [MEDIAN.id, RANK.id]


def test_recording_again_replaces_and_other_experiments_stay():
    publish(MEDIAN, RANK)
    ugs = Claim("circuits.ugs", "UGS wins", None, 0.5, 0.4, 0.6, "< 1")
    publish(ugs, experiment="circuits_ioi")
    publish(replace(MEDIAN, measured=0.4))
    publish(MEDIAN, model=OTHER)
    assert sorted((claim.model, claim.id) for claim in claims.published()) == [
        ("gpt2", MEDIAN.id),
        ("tiny", "circuits.ugs"),
        ("tiny", MEDIAN.id),
    ]
    assert claims.published("tiny")[0].measured == 0.4
    assert [claim.id for claim in claims.published("tiny")] == [MEDIAN.id, "circuits.ugs"]
    assert claims.published("tiny")[1].holds is True


def test_claims_of_a_test_budget_are_not_published():
    publish(MEDIAN, model=SimpleNamespace(name="tiny", budget="test"))
    assert not claims.published()


def test_claims_recorded_twice_are_refused():
    with pytest.raises(ValueError, match=f"twice: {MEDIAN.id}"):
        claims.record([MEDIAN, RANK, MEDIAN], TINY, EXPERIMENT)


# ---- shown in a notebook

LONG = Claim(
    "c.long",
    "a sentence of the paper " * 9,
    rule="< 1000",
    measured=1234.5678,
    low=1000,
    high=np.float32(2e3),
)


def test_show_says_what_holds():
    frame = claims.show(iter([MEDIAN, RANK, LONG]))
    names = ["claim", "statement (paper)", "holds if", "here [low, high]", "note"]
    assert list(frame.columns) == names
    assert frame["holds if"].tolist() == ["< 0.5", "", "< 1000"]
    assert frame["statement (paper)"][0] == "OA is a third of mean (0.33)"
    numbers = ["✓ 0.305 [0.29, 0.32]", "?", "✗ 1.23e+03 [1e+03, 2e+03]"]
    assert frame["here [low, high]"].tolist() == numbers


@pytest.mark.parametrize("shown", [[LONG], [LONG, RANK]])
def test_a_notebook_shows_whole_sentences_with_and_without_notes(shown):
    frame = claims.show(shown)
    assert ("note" in frame) == (len(shown) == 2)
    assert LONG.paper.strip() in frame._repr_html_()
    assert LONG.paper.strip() in frame.drop(columns="holds if")._repr_html_()
    assert LONG.paper.strip() not in pd.DataFrame(frame)._repr_html_()


def test_no_claims_are_an_empty_table():
    assert claims.show([]).empty


def test_other_models_published_numbers_stand_beside():
    publish(replace(MEDIAN, measured=0.4, low=0.3, high=0.6), model=OTHER)
    publish(MEDIAN)
    frame = claims.show([MEDIAN], TINY)
    assert frame["published: gpt2"].tolist() == ["? 0.4 [0.3, 0.6]"]
    assert "published: tiny" not in frame


# ---- verdicts


@pytest.mark.parametrize(
    ("rule", "low", "high", "holds"),
    [
        ("< 1", 0.5, 0.9, True),
        ("< 1", 0.5, 1.0, None),
        ("< 1", 1.0, 1.5, False),
        ("<= 1", 1.0, 1.0, True),
        ("> -3", -2, 4, True),
        ("> -3", -4, -3, False),
        (">= -3", -4, -3, None),
        ("in [-0.1, 0.1]", -0.05, 0.1, True),
        ("in [-0.1, 0.1]", -0.05, 0.2, None),
        ("in [-0.1, 0.1]", -0.5, 0.5, None),
        ("in [-0.1, 0.1]", 0.11, 0.2, False),
        ("in [-0.1, 0.1]", -0.3, -0.2, False),
        ("< 1", math.nan, 0.5, None),
        ("< 1", None, None, None),
        ("", 0.1, 0.2, None),
    ],
)
def test_a_verdict_comes_from_the_interval_and_the_rule(rule, low, high, holds):
    claim = Claim("c", "words", None, 0.0, low, high, rule)
    assert claim.holds is holds
    assert claims._claims_of(publish(claim))[0].holds is holds


def test_a_number_without_randomness_is_its_own_interval():
    assert Claim("c", "no violation", measured=0, rule="<= 0", exact=True).holds is True
    assert Claim("c", "no violation", measured=1, rule="<= 0", exact=True).holds is False
    assert Claim("c", "no violation", measured=0, rule="<= 0").holds is None


def test_a_rule_that_cannot_be_read_is_refused():
    with pytest.raises(ValueError, match="rule 'much lower'"):
        Claim("c", "words", rule="much lower")


def test_a_claim_that_rests_on_one_seed_says_so():
    frame = claims.show([replace(MEDIAN, seeds=1), replace(MEDIAN, seeds=3)])
    assert frame.note.tolist() == ["one seed", ""]


def test_a_ratio_of_means_has_an_interval_over_prompts_drawn_together():
    rng = np.random.default_rng(0)
    one = rng.uniform(1, 2, 400)
    claim = claims.ratio_claim("c", "half", [one, 3 * one], [2 * one, 6 * one], "< 0.6", note="n")
    assert (claim.measured, claim.low, claim.high) == pytest.approx((0.5, 0.5, 0.5))
    assert claim.holds is True
    apart = claims.ratio_claim("c", "half", [one], [2 * rng.uniform(1, 2, 400)], "< 0.5")
    assert apart.low < 0.5 < apart.high
    assert apart.holds is None


# ---- runs that are not the committed one


def test_only_the_papers_tasks_at_the_usual_seed_and_budget_are_the_committed_run(place):
    empty = torch.zeros(0, 1, dtype=torch.int64)
    own = Task("capitals of countries", empty, empty[:, 0], empty, empty, empty[:, 0], ())
    ioi = replace(own, name="ioi", of_paper=True)
    expensive = SimpleNamespace(name="tiny", budget="paper")
    assert claims.variant(TINY, 0, ioi) == ""
    assert claims.variant(TINY, 3, ioi) == "seed=3"
    assert claims.variant(TINY, 0, own, ioi) == "capitals-of-countries"
    assert claims.variant(expensive, 0, ioi) == "paper"
    assert claims.record([MEDIAN], TINY, EXPERIMENT, "capitals") is None
    assert not (place / "store").exists()
    path = claims.record([MEDIAN], expensive, EXPERIMENT, "paper")
    assert path == place / "store" / "tiny.paper" / "claims" / f"{EXPERIMENT}.json"


# ---- in a terminal


def test_the_list_counts_by_chapter_and_fits_the_terminal(capsys, monkeypatch):
    claims.main([])
    assert "no claims are published for any model" in capsys.readouterr().out
    publish(LONG, RANK, experiment="circuits_ioi")
    publish(MEDIAN, RANK)
    publish(MEDIAN, model=OTHER)
    monkeypatch.setenv("COLUMNS", "60")
    claims.main([])
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert max(map(len, lines)) <= 60
    assert "0.1 of them would be wrong by chance" in " ".join(out.split())
    assert lines[0] == "single_components · gpt2 · 1 ✓, 0 ✗, 0 ?"
    assert "circuits_ioi · tiny · 0 ✓, 1 ✗, 1 ?" in lines
    assert lines.index("circuits_ioi · tiny · 0 ✓, 1 ✗, 1 ?") > 5
    assert "5 claims: 2 ✓, 1 ✗, 2 ?" in lines
    assert out.count("0.305 [0.29, 0.32]") == 2
    assert " ".join(LONG.paper.split()) in " ".join(out.split())
    claims.main(["--model", "tiny"])
    assert capsys.readouterr().out.count(MEDIAN.id) == 1


def test_the_table_for_the_readme_has_a_column_for_each_model():
    publish(replace(MEDIAN, note="a | b"), RANK)
    publish(replace(MEDIAN, measured=0.4, low=0.3, high=0.6), model=OTHER)
    lines = claims.markdown({}).splitlines()
    assert lines[0] == "| claim | statement | holds if | paper | gpt2 | tiny | remark |"
    widths = {line.replace("\\|", "").count("|") for line in lines if line.startswith("|")}
    assert widths == {8}
    assert "(notebooks/01_single_components.ipynb)" in lines[2]
    assert "| ? 0.4 [0.3, 0.6] | ✓ 0.305 [0.29, 0.32] | tiny: a \\| b |" in lines[3]
    assert "1 verdicts come from 95 % intervals" in lines[-1]


def test_numbers_and_rules_are_written_as_people_write_them():
    claim = replace(MEDIAN, measured=-0.00879, low=-0.02, high=1e-7, rule="<= 0.7291666666666666")
    assert claim.cell == "✓ −0.00879 [−0.02, 1e−07]"
    assert claim.condition == "≤ 0.729"
    assert replace(MEDIAN, rule="in [-0.1, 2]").condition == "in [−0.1, 2]"
    assert replace(MEDIAN, measured=None, low=None, high=None).cell == ""


def test_remarks_say_whose_they_are_where_they_differ():
    publish(replace(MEDIAN, note="10 edges"))
    publish(replace(MEDIAN, note="99 edges"), model=OTHER)
    assert "| gpt2: 99 edges; tiny: 10 edges |" in claims.markdown({})
    publish(replace(MEDIAN, note="99 edges"))
    assert "| 99 edges |" in claims.markdown({})


def test_headlines_are_plain_words_with_the_papers_number_and_counts_by_model():
    publish(MEDIAN, RANK)
    publish(replace(MEDIAN, measured=0.4, low=0.3, high=0.6), model=OTHER)
    lines = claims.headlines({MEDIAN.id: "OA is small"}).splitlines()
    assert lines[0] == "| claim (the paper's number, GPT-2) | gpt2 | tiny |"
    assert lines[2] == "| OA is small (0.33) | ? 0.4 [0.3, 0.6] | ✓ 0.305 [0.29, 0.32] |"
    assert lines[-1].endswith("Of all claims: gpt2: 0 ✓, 0 ✗, 1 ?; tiny: 1 ✓, 0 ✗, 1 ?.")
    with pytest.raises(LookupError, match="no such claims are published: single.nothing"):
        claims.headlines({"single.nothing": "nothing"})


def test_the_readme_is_current():
    call = [sys.executable, str(ROOT / "scripts" / "readme.py"), "--check"]
    done = subprocess.run(call, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


# ---- measured anew

AGAIN = f"""
import os
from types import SimpleNamespace
from oa_utils import store
from oa_utils.paper.claims import Claim, record
model = SimpleNamespace(name=os.environ["OA_MODEL"], budget=os.environ["OA_BUDGET"])
assert not store.folder(model.budget).exists() or not list(store.folder(model.budget).iterdir())
record([Claim({MEDIAN.id!r}, "again", measured=0.31)], model, {EXPERIMENT!r})
"""


def write_notebook(path, *sources):
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    return path


@pytest.fixture
def notebook(place):
    """One that records another number for the claim than the one that was published."""
    name = f"{claims.NOTEBOOKS[EXPERIMENT]}.ipynb"
    return write_notebook(place / "repo" / "notebooks" / name, AGAIN)


def test_one_claim_is_measured_anew_by_its_notebook_in_an_empty_store(capsys, notebook, place):
    publish(MEDIAN, RANK)
    kept = (place / "store" / "tiny" / "claims" / f"{EXPERIMENT}.json").read_bytes()
    before = notebook.read_bytes()
    claims.main([MEDIAN.id, "--model", "tiny"])
    words = capsys.readouterr().out.split()
    assert words[words.index("paper") + 1] == "0.33"
    assert words[words.index("stored") + 1] == "0.305"
    assert "holds" in words
    assert "undecided" in words  # the notebook records no interval
    assert words[words.index("recomputed") + 1] == "0.31"
    assert float(words[words.index("difference") + 1]) == pytest.approx(0.005)
    assert notebook.read_bytes() == before
    assert (place / "store" / "tiny" / "claims" / f"{EXPERIMENT}.json").read_bytes() == kept


def test_a_claim_that_its_notebook_no_longer_records_says_so(capsys, notebook):
    publish(MEDIAN, RANK)
    with pytest.raises(SystemExit):
        claims.main([RANK.id])
    assert f"no longer records the claim {RANK.id}" in capsys.readouterr().err


def test_an_unknown_id_names_the_nearest(capsys):
    publish(MEDIAN, RANK)
    with pytest.raises(SystemExit) as stop:
        claims.main(["single.medan_ratio.mean"])
    assert stop.value.code == 2
    assert f"nearest: {MEDIAN.id}" in capsys.readouterr().err


def test_a_claim_without_a_notebook_says_so(capsys, monkeypatch):
    publish(MEDIAN, experiment="elsewhere")
    with pytest.raises(SystemExit):
        claims.main([MEDIAN.id])
    assert "no notebook records elsewhere" in capsys.readouterr().err
    data = store.data_folder()
    monkeypatch.setattr(store, "data_folder", lambda: data)
    monkeypatch.setattr(store, "repository", lambda: None)
    with pytest.raises(SystemExit):
        claims.main([MEDIAN.id])
    assert "in the repository only" in capsys.readouterr().err


def test_every_notebook_records_its_claims_under_the_name_that_is_known():
    recorded = {}
    for path in sorted((ROOT / "notebooks").glob("[0-9]*.ipynb")):
        cells = json.loads(path.read_text())["cells"]
        code = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")
        for name in re.findall(r"claims\.record\([^)]*,\s*model,\s*\"(\w+)\"[,)]", code):
            recorded[name] = path.stem
    assert recorded == claims.NOTEBOOKS


# ---- the runner of notebooks


def run_notebooks(path, monkeypatch, **environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    notebooks.main([str(path)])


def test_the_default_run_on_tiny_is_written_back_and_others_are_not(place, monkeypatch):
    path = write_notebook(place / "repo" / "notebooks" / "05_x.ipynb", "import os", "6 * 7")
    before = path.read_bytes()
    run_notebooks(path, monkeypatch, OA_BUDGET="test")
    assert path.read_bytes() == before
    run_notebooks(path, monkeypatch, OA_BUDGET="paper")
    assert path.read_bytes() == before
    paper = place / "repo" / "figures" / "tiny" / "notebooks" / "05_x.paper.ipynb"
    assert "42" in str(nbformat.read(paper, 4).cells[1].outputs)
    run_notebooks(path, monkeypatch, OA_BUDGET="default")
    executed = nbformat.read(path, 4)
    assert "42" in str(executed.cells[1].outputs)
    assert not any("execution" in cell.metadata for cell in executed.cells)
    once = path.read_bytes()
    run_notebooks(path, monkeypatch)
    assert path.read_bytes() == once


def test_a_failed_notebook_is_kept_aside_with_its_error_and_the_others_run(
    place, monkeypatch, capsys
):
    bad = write_notebook(place / "repo" / "notebooks" / "05_x.ipynb", "1 / 0")
    good = write_notebook(place / "repo" / "notebooks" / "06_x.ipynb", "6 * 7")
    before = bad.read_bytes()
    with pytest.raises(SystemExit, match="1 of 2 notebooks failed"):
        notebooks.main([str(bad), str(good)])
    assert "ZeroDivisionError" in capsys.readouterr().out
    assert bad.read_bytes() == before
    assert "ZeroDivisionError" in (place / "store" / "failed" / "05_x.ipynb").read_text()
    assert "42" in str(nbformat.read(good, 4).cells[0].outputs)


def test_messages_to_whoever_waits_are_not_kept(place, monkeypatch):
    code = "import sys, warnings; warnings.warn('slow'); print('a bar', file=sys.stderr); print(42)"
    path = write_notebook(place / "repo" / "notebooks" / "05_x.ipynb", code)
    run_notebooks(path, monkeypatch)
    [output] = nbformat.read(path, 4).cells[0].outputs
    assert (output.name, output.text) == ("stdout", "42\n")


def test_a_kernel_that_dies_stops_its_notebook_only(place, monkeypatch, capsys):
    dies = write_notebook(place / "repo" / "notebooks" / "05_x.ipynb", "import os; os._exit(9)")
    good = write_notebook(place / "repo" / "notebooks" / "06_x.ipynb", "6 * 7")
    with pytest.raises(SystemExit, match="1 of 2 notebooks failed"):
        notebooks.main([str(dies), str(good)])
    assert "05_x failed: its kernel died" in capsys.readouterr().out
    assert "42" in str(nbformat.read(good, 4).cells[0].outputs)


def test_a_relative_folder_of_a_model_is_resolved_before_the_kernel_starts(place, monkeypatch):
    (place / "mine" / "net").mkdir(parents=True)
    monkeypatch.chdir(place)
    path = write_notebook(
        place / "repo" / "notebooks" / "05_x.ipynb", "import os; print(os.environ['OA_MODEL'])"
    )
    run_notebooks(path, monkeypatch, OA_MODEL="mine/net")
    executed = place / "repo" / "figures" / "net" / "notebooks" / "05_x.ipynb"
    assert str(place / "mine" / "net") in executed.read_text()
    (place / "tiny").mkdir()
    assert notebooks.resolve("tiny") == "tiny"
    assert notebooks.name_of("org/net") == "org/net"


def test_a_wrong_budget_is_refused_before_anything_starts(place, monkeypatch, capsys):
    monkeypatch.setattr(notebooks, "NotebookClient", None)
    path = write_notebook(place / "repo" / "notebooks" / "05_x.ipynb", "1")
    with pytest.raises(SystemExit) as stop:
        run_notebooks(path, monkeypatch, OA_BUDGET="huge", FRESH="1")
    assert stop.value.code == 2
    assert "'huge' is not one of test, default, paper" in capsys.readouterr().err


def test_fresh_moves_what_is_stored_aside_once(place, monkeypatch):
    path = write_notebook(place / "repo" / "notebooks" / "05_x.ipynb", "1")
    other = claims.record([MEDIAN], OTHER, EXPERIMENT)
    for n in (1, 2):
        stored = claims.record([MEDIAN], TINY, EXPERIMENT)
        run_notebooks(path, monkeypatch, FRESH="1")
        assert not stored.exists()
        aside = place / "store" / "aside" / f"tiny-{n}" / "claims" / stored.name
        assert aside.exists()
    assert other.exists()
    stored = claims.record([MEDIAN], TINY, EXPERIMENT)
    run_notebooks(path, monkeypatch, FRESH="")
    assert stored.exists()
    run_notebooks(path, monkeypatch, FRESH="1", OA_MODEL="unknown")
    assert stored.exists()


def test_fresh_also_moves_models_that_a_notebook_brings(place, monkeypatch):
    name = next(iter(notebooks.OWN_MODELS))
    path = write_notebook(place / "repo" / "notebooks" / f"{name}.ipynb", "1")
    brought = claims.record([MEDIAN], SimpleNamespace(name="known", budget="default"), EXPERIMENT)
    run_notebooks(path, monkeypatch, FRESH="1")
    assert not brought.exists()
    assert (ROOT / "notebooks" / f"{name}.ipynb").exists()


RECORDS = f"""
import os
from types import SimpleNamespace
from oa_utils.paper.claims import Claim, record
model = SimpleNamespace(name="tiny", budget=os.environ["OA_BUDGET"])
record([Claim({MEDIAN.id!r}, "said", measured=0.3)], model, {EXPERIMENT!r})
"""


def test_a_run_at_the_papers_budget_leaves_what_the_default_run_published(place, monkeypatch):
    path = write_notebook(place / "repo" / "notebooks" / "05_x.ipynb", RECORDS)
    run_notebooks(path, monkeypatch, OA_BUDGET="default")
    publishing.publish("tiny")
    run_notebooks(path, monkeypatch, OA_BUDGET="paper")
    publishing.publish("tiny")
    assert {model for _, model in claims.chapters()} == {"tiny", "tiny.paper"}
    results = place / "repo" / "data" / "results" / "tiny"
    assert (results / "claims" / f"{EXPERIMENT}.json").exists()
    lists = {"05_x.txt", "05_x.paper.txt", "05_x.default.costs", "05_x.paper.costs"}
    assert {path.name for path in (results / publishing.USED).iterdir()} == lists


def test_a_run_that_fails_leaves_a_list_and_one_that_ends_well_removes_it(place, monkeypatch):
    path = write_notebook(place / "repo" / "notebooks" / "05_x.ipynb", RECORDS, "1 / 0")
    with pytest.raises(SystemExit):
        run_notebooks(path, monkeypatch)
    [left] = (place / "store" / "tiny" / publishing.USED).glob("*.new")
    assert left.read_text() == f"tiny/claims/{EXPERIMENT}.json\n"
    write_notebook(path, RECORDS)
    run_notebooks(path, monkeypatch)
    names = {path.name for path in left.parent.iterdir()}
    assert names == {"05_x.txt", "05_x.default.costs"}


def test_a_test_run_does_not_touch_the_claims_of_a_store_of_ones_own(place):
    real = claims.record([MEDIAN], TINY, EXPERIMENT)
    before = real.read_bytes()
    claims.record([RANK], SimpleNamespace(name="tiny", budget="test"), EXPERIMENT)
    assert real.read_bytes() == before


# ---- what notebooks cost


def test_a_second_run_knows_what_the_first_one_cost(place, monkeypatch, capsys):
    path = write_notebook(
        place / "repo" / "notebooks" / "05_x.ipynb", "import time", "time.sleep(1)"
    )
    code = [cell.source for cell in nbformat.read(path, 4).cells]
    assert costs.Clock("tiny", "05_x", "default", code).left() is None
    run_notebooks(path, monkeypatch, OA_BUDGET="default")
    again = costs.Clock("tiny", "05_x", "default", code)
    again.cell_done()
    assert 0.5 < again.left() < 5  # one second, by the speed of a machine that others use too
    assert costs.Clock("tiny", "05_x", "paper", code).left() is None


def test_a_cell_that_was_loaded_costs_what_computing_it_did(place):
    clock = costs.Clock("tiny", "05_x", "default", ["a", "b"])
    clock.taken = [100.0, 1.0]
    clock.save()
    again = costs.Clock("tiny", "05_x", "default", ["a", "b", "new"])
    again.taken = [0.1, 0.1, 0.1]
    again.save()
    kept = store.read_json(again.path)
    seconds = [kept["cells"][cell] * again.speed / kept["speed"] for cell in again.cells]
    assert seconds[0] == pytest.approx(100 * again.speed / clock.speed, rel=0.01)
    assert seconds[2] == pytest.approx(0.1)
    again.save(fresh=True)
    assert set(store.read_json(again.path)["cells"].values()) == {0.1}


def test_costs_of_another_machine_are_scaled_by_its_speed(place, monkeypatch):
    clock = costs.Clock("tiny", "05_x", "default", ["a"])
    clock.taken = [60.0]
    clock.save()
    half_as_fast = 2 * clock.speed
    [seconds] = costs.known("tiny", "05_x", "default", half_as_fast).values()
    assert seconds == pytest.approx(120)


def test_costs_are_published_with_the_notebook_and_serve_where_the_store_has_none(place):
    clock = costs.Clock("tiny", EXPERIMENT, "default", ["a"])
    clock.taken = [60.0]
    clock.save()
    publish(MEDIAN)
    shutil.rmtree(place / "store")
    [seconds] = costs.known("tiny", EXPERIMENT, "default", clock.speed).values()
    assert seconds == pytest.approx(60)
    publishing.restore("tiny")  # they are no results
