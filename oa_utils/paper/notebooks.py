"""Run notebooks from top to bottom: `python -m oa_utils.paper.notebooks notebooks/*.ipynb`.

`OA_MODEL` and `OA_BUDGET` say on which model and at which budget. The default run on `tiny` is
written back into the notebook; runs of other models or budgets go to `figures/<model>/notebooks/`,
and test runs are not kept. With `FRESH=1` all that is stored for the model, and for models that one
of the notebooks brings, is first moved aside, so that everything is computed; a second start
without it goes on where the first one was.
"""

import argparse
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError
from nbformat import NotebookNode
from tqdm import tqdm

from oa_utils import machine, sources, store
from oa_utils.paper import costs, publishing

OWN_MODELS = {"10_ground_truth_circuits": "known"}  # notebooks that bring models, and their name
FRESH_MARK = "fresh"  # a file in a model's folder of the store, from a FRESH start to a whole run


class NotebookFailed(RuntimeError):
    """A cell raised an error; the message says which, and where the notebook is that shows it."""


def resolve(model: str) -> str:
    """A model's folder as an absolute path, since a kernel works in its notebook's folder."""
    folder = Path(model).expanduser()
    if model not in sources.NAMES and folder.is_dir():
        return str(folder.resolve())
    return model


def name_of(model: str) -> str:
    """The name that `load_model` gives a model: that of its folder, or the one it is called by."""
    where = Path(resolve(model))
    return where.name if where.is_absolute() else model


def without_messages(notebook: NotebookNode) -> None:
    """Takes away what was said to whoever waited, bars and warnings: it names paths of the machine
    and depends on what was stored."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [each for each in cell.outputs if each.get("name") != "stderr"]


def execute(
    path: Path,
    model: str,
    budget: str,
    environment: dict[str, str] | None = None,
    fresh: bool = False,
) -> NotebookNode:
    """The notebook with the outputs of a run in a kernel of its own; the file stays as it is. What
    it stands on is listed in the store, see `publishing.publish`; `fresh` says that the store is
    empty."""
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
    variables = {
        "OA_QUIET": "1",
        **os.environ,
        "OA_MODEL": resolve(model),
        "OA_BUDGET": machine.budget(budget),
        **(environment or {}),
    }
    for name in ("OA_STORE", "OA_FIGURES"):
        if variables.get(name):
            variables[name] = str(Path(variables[name]).resolve())
    client = NotebookClient(
        notebook,
        timeout=None,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
        extra_arguments=["--log-level=40"],
        record_timing=False,
    )
    is_kept = budget != "test" and not environment
    named = publishing.list_name(path.stem, budget)
    listing = publishing.listing(name_of(model), named) if is_kept else nullcontext()
    clock = costs.Clock(name_of(model), path.stem, budget, [cell.source for cell in code])
    if is_kept and (left := clock.left()) and left > 60:
        tqdm.write(f"{path.stem}: about {machine.duration(left)}, less what is stored")
    with listing as used, costs.told(clock, path.stem) as bar:
        if used:
            variables["OA_USED"] = str(used.resolve())

        def count(**_: Any) -> None:
            clock.cell_done()
            bar.update()

        client.on_cell_executed = count
        try:
            client.execute(env=variables)
        except CellExecutionError as error:
            failed = store.folder("default") / "failed" / path.name
            store.write_bytes(failed, nbformat.writes(notebook).encode())
            message = f"{path.stem} failed, see {failed}\n{error.ename}: {error.evalue}"
            raise NotebookFailed(message) from None
        except DeadKernelError:
            raise NotebookFailed(
                f"{path.stem} failed: its kernel died, most likely for want of memory; what was "
                "stored is kept, OA_JOBS=1 takes less"
            ) from None
    if is_kept:
        clock.save(fresh)
    without_messages(notebook)
    notebook.metadata.pop("widgets", None)
    notebook.metadata.get("language_info", {}).pop("version", None)
    return notebook


def target(path: Path, model: str, budget: str) -> Path | None:
    """Where the executed notebook belongs."""
    if budget == "test":
        return None
    if model == "tiny" and budget == "default":
        return path
    folder = path.parent.parent / "figures" / store.slug(name_of(model)) / "notebooks"
    return folder / (path.name if budget == "default" else f"{path.stem}.{budget}.ipynb")


def move_aside(model_name: str, budget: str) -> Path | None:
    """Puts a model's stored results where no run finds them; they are not deleted."""
    name = store.slug(model_name)
    results = store.folder(budget) / name
    if not results.exists():
        return None
    aside = store.folder(budget) / "aside"
    aside.mkdir(exist_ok=True)
    numbers = [int(old.name.rpartition("-")[2]) for old in aside.glob(f"{name}-*")]
    return results.rename(aside / f"{name}-{max(numbers, default=0) + 1}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m oa_utils.paper.notebooks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("notebooks", nargs="+", type=Path)
    paths = parser.parse_args(arguments).notebooks
    model = os.environ.get("OA_MODEL") or "tiny"
    try:
        budget = machine.budget()
    except ValueError as error:
        parser.error(str(error))
    fresh = os.environ.get("FRESH") == "1"
    brought = [OWN_MODELS[path.stem] for path in paths if path.stem in OWN_MODELS]
    names = list(dict.fromkeys([name_of(model), *brought]))
    marks = [store.folder(budget) / store.slug(name) / FRESH_MARK for name in names]
    if fresh:
        if any(mark.exists() for mark in marks):
            print("an earlier FRESH run did not end; start without FRESH to go on")
        for name, mark in zip(names, marks, strict=True):
            moved = move_aside(name, budget)
            where = f"were moved to {moved}" if moved else "there are none"
            print(f"stored results of {name}: {where}")
            store.write_bytes(mark, b"")
    failed = 0
    for path in map(Path.resolve, paths):
        start = time.monotonic()
        try:
            notebook = execute(path, model, budget, fresh=fresh and path == paths[0].resolve())
        except NotebookFailed as error:
            print(error)
            failed += 1
            continue
        place = target(path, model, budget)
        if place:
            store.write_bytes(place, nbformat.writes(notebook).encode())
        print(f"{path.stem}: {machine.duration(time.monotonic() - start)}", flush=True)
    if failed:
        sys.exit(f"{failed} of {len(paths)} notebooks failed")
    for mark in marks:
        mark.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
