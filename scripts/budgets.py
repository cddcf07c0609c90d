"""Is what each search spends enough? Δ at three sizes with the budget of notebook 02 and with twice
as much, on the validation part of IOI: `python scripts/budgets.py [ablation:method ...]` writes
`benchmarks/budgets.csv` (half an hour on two cores for all of them; what is stored is not run
again); with names it replaces their rows alone."""

import sys
from collections.abc import Sequence

import pandas as pd

import oa_utils as oa
from oa_utils import store
from oa_utils.paper import circuits

PAIRS = [
    *[f"counterfactual:{name}" for name in ("ugs", "hcgs", "acdc", "edge_pruning")],
    *[f"counterfactual:{name}" for name in ("eap_ig", "eap_ig_masks")],
    *[f"optimal:{name}" for name in ("ugs", "hcgs")],
]


def merged(stored: pd.DataFrame, new: pd.DataFrame, pairs: Sequence[str]) -> pd.DataFrame:
    """The stored rows with those of some pairs in place of what they had, in the order of PAIRS."""
    kept = stored[~names(stored).isin(pairs)]
    table = pd.concat([kept, new], ignore_index=True)
    order = names(table).map({pair: i for i, pair in enumerate(PAIRS)})
    return table.loc[order.sort_values(kind="stable").index]


def names(table: pd.DataFrame) -> pd.Series:
    return table.ablation + ":" + table.method


def main() -> None:
    model = oa.load_model("tiny")
    masked = oa.MaskedModel(model)
    study = circuits.study(model, "ioi")
    task = oa.tasks.ioi(model, n=study.n)
    tables = []
    pairs = sys.argv[1:] or PAIRS
    for pair in pairs:
        ablation, method = pair.split(":")
        tables.append(circuits.budget_check(masked, task, study, ablation, [method]))
        print(tables[-1].round(3).to_string(), flush=True)
    path = store.repository() / "benchmarks" / "budgets.csv"
    merged(pd.read_csv(path), pd.concat(tables).round(4), pairs).to_csv(path, index=False)


if __name__ == "__main__":
    main()
