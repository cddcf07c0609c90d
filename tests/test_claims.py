import math
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from oa_utils import claims, files, runs
from oa_utils.claims import Claim

MEDIAN = Claim("single.median_ratio.mean", "OA is a third of mean", 0.33, 0.305, 0.29, 0.32, True, source="r.json")
RANK = Claim("single.spearman.mean", "ranks agree with CF", 0.825, measured=math.nan, note="not on this model")


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    for name in ("OA_BUDGET", "OA_MODEL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OA_STORE", str(tmp_path / "store"))
    monkeypatch.setattr(files, "REPO", tmp_path / "repo")
    return tmp_path


@pytest.fixture
def recomputed(monkeypatch):
    """A function that measures claims `single.*` again."""
    module = ModuleType("oa_fake_experiment")
    module.again = lambda model_name, id: {"tiny": 0.31}[model_name] if id == MEDIAN.id else math.nan
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(claims.RECOMPUTE, "single", f"{module.__name__}:again")


def publish(*items, model="tiny", experiment="single"):
    path = claims.record(items, model, experiment)
    runs.publish()
    return path


def test_claims_come_back_as_they_were_recorded(place):
    path = publish(MEDIAN, RANK, model=SimpleNamespace(name="tiny"))
    assert path == place / "store" / "tiny" / "claims" / "single.json"
    back, rank = claims.published("tiny")
    assert back == claims.replace(MEDIAN, model="tiny")
    assert math.isnan(rank.measured) and rank.holds is None and rank.note == RANK.note
    assert runs.results("tiny", "claims").id.tolist() == [MEDIAN.id, RANK.id]


def test_recording_again_replaces_and_other_experiments_stay():
    publish(MEDIAN, RANK)
    publish(Claim("circuits.ugs", "UGS wins", holds=np.bool_(True)), experiment="circuits")
    publish(claims.replace(MEDIAN, measured=0.4))
    publish(MEDIAN, model="gpt2")
    frame = claims.table()
    assert sorted(zip(frame.model, frame.id, strict=True)) == [
        ("gpt2", MEDIAN.id),
        ("tiny", "circuits.ugs"),
        ("tiny", MEDIAN.id),
    ]
    assert claims.table("tiny").set_index("id").measured[MEDIAN.id] == 0.4
    assert claims.published("tiny")[0].holds is True


def test_claims_of_a_test_budget_are_not_published(monkeypatch):
    monkeypatch.setenv("OA_BUDGET", "test")
    publish(MEDIAN)
    assert claims.table().empty and "holds" in claims.table()


def test_claims_recorded_twice_or_for_another_model_are_refused():
    with pytest.raises(ValueError, match=f"twice: {MEDIAN.id}"):
        claims.record([MEDIAN, RANK, MEDIAN], "tiny", "single")
    with pytest.raises(ValueError, match="another model than tiny"):
        claims.record([claims.replace(MEDIAN, model="gpt2")], "tiny", "single")


def test_show_says_what_holds():
    long = Claim(
        "c.long", "a sentence of the paper " * 9, holds=np.bool_(False), measured=1234.5678, low=1000.0, high=2e3
    )
    frame = claims.show([MEDIAN, RANK, long])
    assert list(frame.columns) == ["claim", "the paper", "here [low, high]", "holds", "note"]
    assert frame.holds.tolist() == ["✓", "–", "✗"]
    assert frame["the paper"][0] == "OA is a third of mean (0.33)"
    assert frame["here [low, high]"].tolist() == ["0.305 [0.29, 0.32]", "–", "1.23e+03 [1e+03, 2e+03]"]
    assert long.paper.strip() in frame._repr_html_()
    assert "note" not in claims.show([MEDIAN]) and claims.show([]).empty


def test_command_prints_the_table(capsys):
    claims.main([])
    assert "no claims are published yet" in capsys.readouterr().out
    publish(MEDIAN)
    publish(MEDIAN, model="gpt2")
    claims.main([])
    assert capsys.readouterr().out.count("0.305 [0.29, 0.32]") == 2
    claims.main(["--model", "tiny"])
    assert capsys.readouterr().out.count(MEDIAN.id) == 1


def test_command_recomputes_one_claim(capsys, recomputed):
    publish(MEDIAN)
    claims.main([MEDIAN.id, "--model", "tiny"])
    out = capsys.readouterr().out.split()
    assert out[out.index("stored") + 1] == "0.305"
    assert out[out.index("recomputed") + 1] == "0.31"
    assert float(out[out.index("difference") + 1]) == pytest.approx(0.005)


def test_an_unknown_id_names_the_nearest(capsys, recomputed):
    publish(MEDIAN, RANK)
    with pytest.raises(SystemExit) as stop:
        claims.main(["single.medan_ratio.mean"])
    assert stop.value.code == 2
    assert f"nearest: {MEDIAN.id}" in capsys.readouterr().err


def test_a_claim_nobody_can_recompute_says_so(capsys, monkeypatch):
    monkeypatch.delitem(claims.RECOMPUTE, "single")
    publish(MEDIAN)
    with pytest.raises(SystemExit):
        claims.main([MEDIAN.id])
    assert "no function recomputes claims single.*" in capsys.readouterr().err
