"""A sweep of twelve small circuits on a Dask cluster of two workers on this machine, against the
same sweep in one process: are the numbers the same, and what does the cluster cost?

Wall-clock seconds, since the work is in other processes. The overhead is what the cluster's time is
above half of the single process's time, and above all of it: on a busy machine the former says
little.
"""

import os
import tempfile
import time

import joblib
import timing
from distributed import Client, LocalCluster

import oa_utils as oa
from oa_utils.masked import MaskedModel

WORKERS = 2
SMALL = {"steps": 20, "prompts": 2, "masks": 6}
PRICES = (3e-2, 1e-2, 3e-3, 1e-3, 3e-4, 1e-4)


def run_sweep(masked: MaskedModel, task) -> tuple[float, object]:
    """Seconds and table of the sweep, in a store of its own."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["OA_STORE"] = folder
        began = time.perf_counter()
        table = oa.sweep(
            masked,
            task,
            ["ugs"],
            ["counterfactual"],
            {"lam": PRICES},
            seeds=(0, 1),
            options={"ugs": SMALL},
        )
        spent = time.perf_counter() - began
    os.environ["OA_STORE"] = timing.STORE.name
    return spent, table


def main() -> None:
    timing.options(__doc__, repeats=1).parse_args()
    masked = MaskedModel(oa.load_model("tiny", device="cpu"))
    task = oa.tasks.ioi(masked.model, 32, seed=0)
    os.environ["OA_JOBS"] = "1"
    alone, expected = run_sweep(masked, task)
    began = time.perf_counter()
    with (
        LocalCluster(n_workers=WORKERS, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster) as client,
        joblib.parallel_config(backend="dask"),
    ):
        client.wait_for_workers(WORKERS)
        start_seconds = time.perf_counter() - began
        first, _ = run_sweep(masked, task)  # workers import the library and load the model
        there, table = run_sweep(masked, task)
    is_same = table.equals(expected)
    what = f"a sweep of {len(table)} circuits under Dask, {WORKERS} workers (tiny)"
    more = {
        "same_numbers": is_same,
        "start_s": start_seconds,
        "first_s": first,
        "overhead_s": there - alone / WORKERS,
        "clock": "wall",
    }
    rows = [timing.row(what, there, alone, "the same in one process", **more)]
    sizes = {"circuits": len(table), **SMALL, "workers": WORKERS, "cores": os.cpu_count()}
    timing.write("spread", rows, sizes)
    if not is_same:
        raise SystemExit("the numbers under Dask are not those of one process")


if __name__ == "__main__":
    main()
