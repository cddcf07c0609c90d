"""Run notebooks from top to bottom: `python -m oa_utils.notebooks notebooks/00_quickstart.ipynb …`.

The default run on `tiny` is written back into the notebook; runs of other models or budgets go to
`figures/<model>/notebooks/`, and test runs are not kept.
"""

import argparse
import os
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

ROOT = Path(__file__).parent.parent


def target(path: Path, model: str, budget: str) -> Path | None:
    """Where the executed notebook belongs."""
    if budget == "test":
        return None
    if (model, budget) == ("tiny", "default"):
        return path
    folder = ROOT / "figures" / Path(model).name / "notebooks"
    return folder / (path.name if budget == "default" else f"{path.stem}.{budget}.ipynb")


def execute(path: Path, model: str, budget: str, report=lambda text: None) -> bool:
    """Run one notebook in a kernel of this environment; what it printed until an error is kept beside the store."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
    cells = [i for i, c in enumerate(notebook.cells) if c.cell_type == "code"]
    start = time.time()

    def show(cell, cell_index, **_):
        if cell_index in cells:
            report(f"\r{path.stem}: cell {cells.index(cell_index) + 1}/{len(cells)}, {time.time() - start:.0f} s ")

    where, silent = {"metadata": {"path": str(path.parent)}}, ["--log-level=40"]
    client = NotebookClient(notebook, timeout=None, kernel_name="python3", resources=where, extra_arguments=silent)
    client.record_timing = False
    client.on_cell_execute = show
    try:
        client.execute()
    except CellExecutionError as error:
        failed = ROOT / ".oa" / "failed" / path.name
        failed.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(notebook, failed)
        report(f"\r{path.stem}: failed, see {failed.relative_to(ROOT)}\n{error.ename}: {error.evalue}\n")
        return False
    notebook.metadata.pop("widgets", None)
    notebook.metadata.get("language_info", {}).pop("version", None)
    if place := target(path, model, budget):
        place.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(notebook, place)
    report(f"\r{path.stem}: {len(cells)} cells in {time.time() - start:.0f} s\n")
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="+", type=Path)
    args = parser.parse_args()
    model, budget = os.environ.get("OA_MODEL", "tiny"), os.environ.get("OA_BUDGET", "default")
    os.environ.setdefault("OA_QUIET", "1")

    def report(text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()

    done = [execute(path.resolve(), model, budget, report) for path in args.notebooks]
    if not all(done):
        sys.exit(f"{done.count(False)} of {len(done)} notebooks failed")


if __name__ == "__main__":
    main()
