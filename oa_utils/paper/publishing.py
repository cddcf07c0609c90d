"""Which results notebooks stand on, and their way to the repository and back.

A notebook's run lists what it used (`listing`); `publish` copies the tables among it to
`data/results`, and what notebooks under way have finished to `data/underway`, from where `restore`
puts it into the store of another machine.

Lists lie in the store, in the folder `used` of a model: `<notebook>.txt` of a notebook's last whole
run, `<notebook>~….new` of a run that goes on or was stopped, `<notebook>.new` of those that
`restore` took up.
"""

import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from oa_utils import store

PARTS = ("search_", "circuit_gaps", "facts")  # runs whose numbers stand in other runs' tables
USED = "used"  # folder of lists: which results each notebook stands on
SMALL_TENSORS = 256_000  # bytes of a result's tensors that are published with it, at most
SAVED_TENSORS = 4_000_000  # the same of a run that a notebook under way needs to go on


# ---- which results notebooks stand on


def list_name(stem: str, budget: str) -> str:
    """What a notebook is called in the names of its lists: by its budget too where that is not the
    default one."""
    return stem if budget == "default" else f"{stem}.{budget}"


@contextmanager
def listing(model_name: str, notebook: str) -> Iterator[Path]:
    """A file, for `OA_USED`, in which one run of a notebook lists what it stands on.

    Where the run ends well, this is what the notebook stands on, and lists of runs that were
    stopped before go. Where it does not, its list stays for `publish`.
    """
    place = store.folder("default") / store.slug(model_name) / USED
    place.mkdir(parents=True, exist_ok=True)
    handle, path = tempfile.mkstemp(dir=place, prefix=f"{notebook}~", suffix=".new")
    list_file = Path(path)
    with os.fdopen(handle) as file:
        yield list_file
        names = set(file.read().split())  # even if another run of the notebook removed the file
    if list_file.exists():
        names |= _listed(list_file)
    _write_list(place / f"{notebook}.txt", names)
    for used in place.glob("*.new"):
        if _notebook(used) == notebook:
            with suppress(OSError):  # another process was faster
                used.unlink()


def _notebook(used: Path) -> str:
    """Whose list a file is."""
    return used.stem.partition("~")[0]


def _listed(used: Path) -> set[str]:
    return set(used.read_text().split())


def _write_list(used: Path, names: set[str]) -> None:
    store.write_bytes(used, "".join(f"{name}\n" for name in sorted(names)).encode())


def _unfinished(place: Path) -> dict[str, set[str]]:
    """By notebook, what its runs that have not ended well used, all of them together."""
    names: dict[str, set[str]] = {}
    for used in place.glob("*.new"):
        names.setdefault(_notebook(used), set()).update(_listed(used))
    return {notebook: names[notebook] for notebook in sorted(names) if names[notebook]}


# ---- to the repository and back


def underway() -> Path:
    """Finished runs of notebooks that are not: no results yet, but what another machine needs to
    go on."""
    return store.data_folder() / "underway"


def publish(model_name: str) -> list[Path]:
    """Copies the tables that a model's notebooks stand on to `data/results`, with their tensors
    where these are small; parts of other tables stay in the store.

    Only what `make notebooks` ran to the end counts, so no cut run and no test gets in. Published
    files that no notebook stands on any more are removed. Of notebooks under way, finished runs
    go to `data/underway`, from where `restore` takes them, until the notebook is done. Notebooks
    that this store knows nothing of keep what they have.
    """
    place = store.folder("default") / store.slug(model_name) / USED
    finished = sorted(place.glob("*.txt"))
    unfinished = _unfinished(place)
    if not finished and not unfinished:
        raise FileNotFoundError(
            f"no notebook was run on '{model_name}' with this store: "
            f"`make notebooks MODEL={model_name}` first"
        )
    copied = [path for used in finished for path in _publish_used(used, model_name)]
    there = store.published() / store.slug(model_name)
    current = {name for used in there.glob(f"{USED}/*.txt") for name in _listed(used)}
    _remove_unused(there, current)
    saved = underway() / store.slug(model_name) / USED
    for used in finished:
        (saved / f"{used.stem}.new").unlink(missing_ok=True)
    for notebook, names in unfinished.items():
        target = saved / f"{notebook}.new"
        _write_list(target, names | (_listed(target) if target.exists() else set()))
    for name in sorted(set().union(*unfinished.values())):
        if not _is_whole(store.published() / name) and (store.folder("default") / name).is_file():
            copied += _copy_result(store.folder("default") / name, underway() / name, SAVED_TENSORS)
    needed = {name for used in underway().glob(f"*/{USED}/*.new") for name in _listed(used)}
    _remove_unused(underway(), {name for name in needed if not _is_whole(store.published() / name)})
    return list(dict.fromkeys(copied))


def _publish_used(used: Path, model_name: str) -> list[Path]:
    """Publishes the tables that one notebook stands on, the list of them and what they cost."""
    copied = []
    names = set()
    for name in sorted(_listed(used)):
        source = store.folder("default") / name
        if source.parent.name.startswith(PARTS):
            continue
        try:
            record = store.read_record(source)
        except store.BadFile as error:
            warnings.warn(f"{error}: not published", stacklevel=2)
            record = {"budget": "test"}
        if record["budget"] != "test" and any(store.table_rows(record["numbers"])):
            names.add(name)
            copied += _copy_result(source, store.published() / name, SMALL_TENSORS)
        elif (store.published() / name).exists():
            names.add(name)  # the store has nothing better
    lists = store.published() / store.slug(model_name) / USED
    _write_list(lists / used.name, names)
    budget = "" if used.stem.endswith(".paper") else ".default"
    for costs in used.parent.glob(f"{used.stem}{budget}.costs"):  # see costs.py
        store.write_bytes(lists / costs.name, store.read_bytes(costs))
    return copied


def _remove_unused(place: Path, current: set[str]) -> None:
    """Takes away the results below a folder that are not among the current ones, and tensors whose
    result is gone."""
    for old in place.rglob("*.json"):
        if "/".join(old.parts[-3:]) not in current:
            old.unlink()
    for beside in place.rglob("*.safetensors"):
        if not beside.with_suffix("").with_suffix(".json").exists():
            beside.unlink()


def _is_whole(path: Path) -> bool:
    """Whether a result is there, with its tensors if it has any."""
    if not path.exists():
        return False
    tensors = store.read_record(path).get("tensors")
    return not tensors or path.with_name(tensors).is_file()


def _copy_result(source: Path, target: Path, most: int) -> list[Path]:
    """A result's JSON, and its tensors beside it where they have `most` bytes or fewer; returns
    what was written."""
    names = [source.name]
    tensors = store.read_record(source).get("tensors")
    if tensors and source.with_name(tensors).stat().st_size <= most:
        names.append(tensors)
    for name in names:
        store.write_bytes(target.with_name(name), store.read_bytes(source.with_name(name)))
    return [target.with_name(name) for name in names]


def restore(model_name: str) -> list[Path]:
    """Puts what is published for a model, and what notebooks under way had finished, into the
    store, so that notebooks go on from there instead of computing it again; what the store has
    stays, results whose tensors were too large to publish are left out."""
    restored = []
    lists = sorted((underway() / store.slug(model_name) / USED).glob("*.new"))
    names = {store.slug(name.partition("/")[0]) for used in lists for name in _listed(used)}
    models = sorted({store.slug(model_name), *names})  # a notebook may bring models of its own
    places = [root / model for root in (store.published(), underway()) for model in models]
    for source in sorted(path for place in places for path in place.glob("*/*.json")):
        target = store.folder("default") / "/".join(source.parts[-3:])
        if _is_whole(source) and not target.exists():
            restored += _copy_result(source, target, SAVED_TENSORS)
    for used in lists:  # so that the next `publish` saves them again
        target = store.folder("default") / store.slug(model_name) / USED / used.name
        if not target.exists() and not target.with_suffix(".txt").exists():
            store.write_bytes(target, store.read_bytes(used))
    if not restored and not any(place.is_dir() for place in places):
        there = sorted(path.name for path in store.published().glob("*") if path.is_dir())
        raise FileNotFoundError(
            f"nothing is published for '{model_name}'; there is: {', '.join(there) or 'nothing'}"
        )
    return restored
