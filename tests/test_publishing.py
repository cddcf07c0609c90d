"""What notebooks stand on: how it is listed, published, restored, begun anew and compared."""

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from conftest import script_of
from toy_runs import MODEL, TESTED, Counter, Settings, among_real_ones, run

from oa_utils import store
from oa_utils.paper import notebooks, publishing

compare_stores = script_of("compare_stores")


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    for name in ("OA_BUDGET", "OA_MODEL", "FRESH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OA_STORE", str(tmp_path / "store"))
    monkeypatch.setattr(store, "repository", lambda: tmp_path / "repo")
    return tmp_path


def foreign(path):
    path.write_text('{"gap": 0.5}')


# ---- to the repository and back


def other_model(name):
    return SimpleNamespace(name=name, fingerprint=name, budget="default")


@pytest.fixture
def listed(place, monkeypatch):
    """What runs now is what a notebook stands on."""

    def start(model=MODEL.name, notebook="01"):
        used = place / "store" / store.slug(model) / publishing.USED / f"{notebook}.txt"
        store.write_bytes(used, b"")
        monkeypatch.setenv("OA_USED", str(used))

    start()
    return start


def test_publish_copies_finished_tables_but_no_tests_no_wrecks_and_no_parts(place, listed):
    table = run(Counter(tensors={"c": torch.ones(2)}), Settings(lam=1.0))
    store.run("curves", Settings(), lambda _: {"a": [1, 2]}, model=MODEL)
    store.run("search_ugs", Settings(), Counter(), model=MODEL)
    foreign(run(Counter(), Settings(lam=3.0)).path)
    among_real_ones(run(Counter(), Settings(lam=4.0), model=TESTED).path)
    listed("other")
    other = store.run("ex", Settings(), Counter(), model=other_model("other"))
    with pytest.warns(UserWarning, match=r"lam=3.0.*not published"):
        publishing.publish(MODEL.name)
    results = place / "repo" / "data" / "results"
    assert {path.name for path in results.rglob("*.json")} == {table.path.name}
    publishing.publish("other")
    assert (results / "other" / "ex" / other.path.name).read_bytes() == other.path.read_bytes()


def test_small_tensors_are_published_with_their_table_and_go_with_it(place, listed, monkeypatch):
    run(Counter(tensors={"c": torch.ones(2)}), Settings(lam=1.0))
    monkeypatch.setattr(publishing, "SMALL_TENSORS", 200)
    run(Counter(tensors={"c": torch.ones(1000)}), Settings(lam=2.0))
    published = publishing.publish(MODEL.name)
    assert sorted(path.suffix for path in published) == [".json", ".json", ".safetensors"]
    shutil.rmtree(place / "store")
    listed()
    run(Counter(), Settings(lam=3.0))
    assert publishing.publish(MODEL.name) == list((place / "repo/data/results").rglob("lam=*"))


def test_a_restored_result_is_not_computed_again_unless_its_tensors_were_too_large(
    place, listed, monkeypatch
):
    whole = {"c": torch.arange(2.0)}
    run(Counter(tensors=whole), Settings(lam=1.0))
    run(Counter(), Settings(lam=2.0))
    monkeypatch.setattr(publishing, "SMALL_TENSORS", 200)
    run(Counter(tensors={"c": torch.ones(1000)}), Settings(lam=3.0))
    publishing.publish(MODEL.name)
    shutil.rmtree(place / "store")
    listed()
    assert len(publishing.restore(MODEL.name)) == 3
    assert publishing.restore(MODEL.name) == []
    counters = {lam: Counter() for lam in (1.0, 2.0, 3.0)}
    results = {lam: run(counter, Settings(lam=lam)) for lam, counter in counters.items()}
    assert [counter.calls for counter in counters.values()] == [0, 0, 1]
    assert torch.equal(results[1.0].tensors["c"], whole["c"])
    with pytest.raises(FileNotFoundError, match="nothing is published for 'nobody'"):
        publishing.restore("nobody")


class Stopped(Exception):
    pass


def run_notebook(notebook, *lams, stop=False, experiment="search_ugs"):
    """A notebook that asks for some runs, of a kind that is part of others' tables; returns how
    many of them were computed."""
    tensors = {"theta": torch.arange(3.0)}
    counters = [Counter(tensors=tensors) for _ in lams]
    with suppress(Stopped), publishing.listing(MODEL.name, notebook) as used:
        with patch.dict(os.environ, {"OA_USED": str(used)}):
            for lam, counter in zip(lams, counters, strict=True):
                result = store.run(experiment, Settings(lam=lam), counter, model=MODEL)
                assert torch.equal(result.tensors["theta"], tensors["theta"])
        if stop:
            raise Stopped
    return sum(counter.calls for counter in counters)


def saved(place):
    """Prices of the runs that are under way in the repository."""
    records = map(store.read_record, (place / "repo/data/underway").rglob("*.json"))
    return sorted(record["settings"]["lam"] for record in records)


def test_a_notebook_under_way_goes_on_from_its_finished_runs_on_another_machine(place):
    run_notebook("02", 1.0, 2.0, stop=True)
    publishing.publish(MODEL.name)
    assert not list((place / "repo/data/results").rglob("*.json"))
    shutil.rmtree(place / "store")
    assert len(publishing.restore(MODEL.name)) == 4
    saved_again = publishing.publish(MODEL.name)  # what was restored is not lost by the next save
    assert len(saved_again) == 4
    assert run_notebook("02", 1.0, 2.0, 3.0) == 1
    publishing.publish(MODEL.name)
    assert saved(place) == []  # the notebook is done


def test_what_any_stopped_run_of_a_notebook_used_stays_saved_until_one_ends_well(place):
    run_notebook("02", 1.0, 2.0, stop=True)
    publishing.publish(MODEL.name)
    run_notebook("02", 1.0, stop=True)  # started again and stopped early
    publishing.publish(MODEL.name)
    assert saved(place) == [1.0, 2.0]
    shutil.rmtree(place / "store")  # a machine that never restored
    run_notebook("02", 3.0, stop=True)
    publishing.publish(MODEL.name)
    assert saved(place) == [1.0, 2.0, 3.0]


def test_notebooks_that_a_store_does_not_know_keep_what_they_have_saved(place):
    run_notebook("02", 1.0, stop=True)
    publishing.publish(MODEL.name)
    shutil.rmtree(place / "store")
    run_notebook("03", 2.0)
    publishing.publish(MODEL.name)
    assert saved(place) == [1.0]


def test_a_run_that_ends_lists_all_it_used_even_if_another_ended_meanwhile(place):
    used = place / "store" / store.slug(MODEL.name) / publishing.USED
    with publishing.listing(MODEL.name, "02") as slow:
        slow.write_text("a\n")
        with publishing.listing(MODEL.name, "02") as quick:
            quick.write_text("a\nb\n")
        slow.write_text("c\n")
    assert (used / "02.txt").read_text() == "a\nc\n"
    assert [path.name for path in used.iterdir()] == ["02.txt"]


def test_a_run_under_way_is_saved_if_only_its_numbers_are_published(place, monkeypatch):
    monkeypatch.setattr(publishing, "SMALL_TENSORS", 0)
    run_notebook("02", 1.0, experiment="ex")
    publishing.publish(MODEL.name)
    assert [p.suffix for p in (place / "repo/data/results").rglob("lam=*")] == [".json"]
    run_notebook("03", 1.0, stop=True, experiment="ex")
    publishing.publish(MODEL.name)
    assert saved(place) == [1.0]
    assert list((place / "repo/data/underway").rglob("*.safetensors"))


def test_runs_of_models_that_a_notebook_brings_are_saved_and_restored_with_it(place):
    other = other_model("known")
    with suppress(Stopped), publishing.listing(MODEL.name, "10") as used:
        with patch.dict(os.environ, {"OA_USED": str(used)}):
            store.run("search_ugs", Settings(lam=1.0), Counter(), model=other)
        raise Stopped
    publishing.publish(MODEL.name)
    shutil.rmtree(place / "store")
    [restored] = publishing.restore(MODEL.name)
    assert restored.parts[-3] == "known"


def test_the_published_copy_stays_where_the_store_has_none_that_is_usable(place, listed):
    good = run(Counter(), Settings(lam=1.0)).path
    lost = run(Counter(), Settings(lam=2.0)).path
    tested = run(Counter(), Settings(lam=3.0)).path
    publishing.publish(MODEL.name)
    foreign(lost)
    run(Counter(), Settings(lam=3.0), model=TESTED)
    tested.unlink()
    among_real_ones(store.folder("test") / "/".join(tested.parts[-3:]))
    with pytest.warns(UserWarning, match=r"lam=2.0.*not published"):
        publishing.publish(MODEL.name)
    names = {path.name for path in (place / "repo/data/results").rglob("*.json")}
    assert names == {good.name, lost.name, tested.name}


def test_what_no_notebook_stands_on_is_not_published(listed, monkeypatch):
    table = run(Counter(), Settings(lam=1.0))
    monkeypatch.delenv("OA_USED")
    run(Counter(), Settings(lam=2.0))  # a cut run by hand
    assert [path.name for path in publishing.publish(MODEL.name)] == [table.path.name]
    with pytest.raises(FileNotFoundError, match="no notebook was run on 'nobody'"):
        publishing.publish("nobody")


def test_a_notebook_that_runs_anew_replaces_what_it_stood_on_and_leaves_the_others(place, listed):
    old = run(Counter(), Settings(lam=1.0))
    listed(notebook="02")
    kept = store.run("kept", Settings(), Counter(), model=MODEL)
    publishing.publish(MODEL.name)
    shutil.rmtree(place / "store")  # another machine, where only one notebook runs
    listed()
    new = run(Counter(), Settings(lam=2.0))
    publishing.publish(MODEL.name)
    names = {path.name for path in (place / "repo" / "data" / "results").rglob("*.json")}
    assert names == {new.path.name, kept.path.name}
    assert old.path.name not in names


def test_a_loaded_result_counts_as_much_as_a_computed_one(listed):
    table = run(Counter())
    listed(notebook="02")
    run(Counter())
    assert [path.name for path in publishing.publish(MODEL.name)] == [table.path.name]


# ---- what is begun anew


@pytest.fixture
def start(place, monkeypatch):
    """`make notebooks` of one notebook, which stores a result and then does something else."""
    path = place / "repo" / "notebooks" / "05_x.ipynb"
    path.parent.mkdir(parents=True)

    def start(fresh=False, then=lambda: None):
        def execute(*_, **__):
            model = SimpleNamespace(name="tiny", fingerprint="f", budget="default")
            store.run("ex", Settings(), Counter(), model=model)
            then()
            return notebooks.nbformat.v4.new_notebook()

        monkeypatch.setattr(notebooks, "execute", execute)
        monkeypatch.setenv("FRESH", "1" if fresh else "")
        notebooks.main([str(path)])

    return start


def interrupted():
    raise KeyboardInterrupt


def failing():
    raise notebooks.NotebookFailed("05_x failed")


UNENDED = "an earlier FRESH run did not end; start without FRESH to go on"


@pytest.mark.parametrize("then", [interrupted, failing])
def test_a_second_fresh_start_says_that_the_first_one_did_not_end(start, then, place, capsys):
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        start(fresh=True, then=then)
    assert UNENDED not in capsys.readouterr().out
    start(fresh=True)
    out = capsys.readouterr().out
    assert out.index(UNENDED) < out.index("were moved to")
    assert len(list((place / "store" / "aside").iterdir())) == 1
    start(fresh=True)
    assert UNENDED not in capsys.readouterr().out


def test_a_fresh_run_that_was_gone_on_with_to_its_end_has_ended(start, capsys):
    with pytest.raises(KeyboardInterrupt):
        start(fresh=True, then=interrupted)
    start()
    start(fresh=True)
    assert UNENDED not in capsys.readouterr().out


# ---- two runs of the same


@pytest.fixture
def two_stores(place, monkeypatch):
    """Two stores of the same two runs, which took their time."""
    stores = [place / "one", place / "two"]
    for seconds, folder in enumerate(stores):
        monkeypatch.setenv("OA_STORE", str(folder))
        with patch.object(store.Snapshots, "seconds", lambda self, seconds=seconds: seconds):
            run(Counter(), Settings(lam=1.0))
            run(Counter(tensors={"c": torch.ones(2)}), Settings(lam=2.0))
        store.write_bytes(folder / publishing.USED / "x.json", f"{seconds}".encode())
    return [str(folder) for folder in stores]


def test_stores_of_two_runs_are_the_same_but_for_times(two_stores, capsys):
    compare_stores.main(two_stores)
    assert capsys.readouterr().out.startswith("the same 2 results")


def add_one(folder):
    run(Counter(), Settings(lam=3.0))  # the last store that was chosen


def change_tensors(folder):
    [path] = folder.rglob("*.safetensors")
    path.write_bytes(store._to_bytes({"c": torch.zeros(2)}))


def lose_one(folder):
    next(folder.rglob("lam=1.0*")).unlink()


def rewrite(folder):
    path = next(folder.rglob("lam=1.0*"))
    store.write_record(path, {**store.read_record(path), "numbers": {"gap": 0.6}})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (add_one, "lam=3.0.*only in .*two"),
        (lose_one, "lam=1.0.*only in .*one"),
        (change_tensors, "lam=2.0.*: tensors_sha256"),
        (rewrite, "lam=1.0.*: numbers"),
    ],
)
def test_stores_that_differ_say_where(two_stores, change, words, capsys):
    change(Path(two_stores[1]))
    with pytest.raises(SystemExit) as ended:
        compare_stores.main(two_stores)
    assert ended.value.code == 1
    [line] = capsys.readouterr().out.splitlines()
    assert re.search(words, line), line


def test_an_empty_store_is_not_the_same_as_another(two_stores, place):
    (place / "none").mkdir()
    with pytest.raises(SystemExit, match="no results in .*none"):
        compare_stores.main([two_stores[0], str(place / "none")])
