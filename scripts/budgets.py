"""Is what each search spends enough? Δ at three sizes with the budget of notebook 02 and with twice
as much, on the validation part of IOI: `python scripts/budgets.py [ablation:method ...]` writes
`benchmarks/budgets.csv` (half an hour on two cores for all of them; what is stored is not run
again); with names it replaces their rows alone.

The column `seconds` is what one search at its budget takes by the clock (not processor time), alone
on the machine, at the price or size in the middle; it is run once more for that."""

import os
import sys
import tempfile
import time
from collections.abc import Sequence

import pandas as pd

import oa_utils as oa
from oa_utils import store
from oa_utils.paper import circuits
from oa_utils.search.sweeps import METHODS, Wanted

PAIRS = [
    *[f"counterfactual:{name}" for name in ("ugs", "hcgs", "acdc", "edge_pruning")],
    *[f"counterfactual:{name}" for name in ("eap_ig", "eap_ig_masks")],
    *[f"optimal:{name}" for name in ("ugs", "hcgs")],
]
DIGITS = {"edges": 4, "moved": 4, "error": 4, "seconds": 1}


def merged(stored: pd.DataFrame, new: pd.DataFrame, pairs: Sequence[str]) -> pd.DataFrame:
    """The stored rows with those of some pairs in place of what they had, in the order of PAIRS."""
    kept = stored[~names(stored).isin(pairs)]
    table = pd.concat([kept, new], ignore_index=True)
    order = names(table).map({pair: i for i, pair in enumerate(PAIRS)})
    return table.loc[order.sort_values(kind="stable").index]


def names(table: pd.DataFrame) -> pd.Series:
    return table.ablation + ":" + table.method


def seconds_of_one(
    masked: oa.MaskedModel, task: oa.Task, study: circuits.Study, ablation: str, method: str
) -> float:
    """What one search takes by the clock, in an empty store: what is stored is only loaded."""
    values = study.grid(masked.graph, task)[method, ablation][:3]
    wanted = Wanted(method, ablation, values[len(values) // 2], seed=0)
    before = os.environ.get("OA_STORE")
    with tempfile.TemporaryDirectory(prefix="oa-budgets-") as folder:
        os.environ["OA_STORE"] = folder
        began = time.perf_counter()
        METHODS[method].search(masked, task, **wanted.arguments(study.options))
        seconds = time.perf_counter() - began
    del os.environ["OA_STORE"]
    if before is not None:
        os.environ["OA_STORE"] = before
    return seconds


def main() -> None:
    model = oa.load_model("tiny")
    masked = oa.MaskedModel(model)
    study = circuits.study(model, "ioi")
    task = oa.tasks.ioi(model, n=study.n)
    chosen = task.for_choosing()
    tables = []
    pairs = sys.argv[1:] or PAIRS
    for pair in pairs:
        ablation, method = pair.split(":")
        table = circuits.budget_check(masked, task, study, ablation, [method])
        seconds = seconds_of_one(masked, chosen, study, ablation, method)
        tables.append(table.assign(seconds=seconds))
        print(tables[-1].round(3).to_string(), flush=True)
    path = store.repository() / "benchmarks" / "budgets.csv"
    merged(pd.read_csv(path), pd.concat(tables).round(DIGITS), pairs).to_csv(path, index=False)


if __name__ == "__main__":
    main()
