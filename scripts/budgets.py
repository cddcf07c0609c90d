"""Is what each search spends enough? Δ at three sizes with the budget of notebook 02 and with twice
as much, on the validation part of IOI: `python scripts/budgets.py [ablation:method ...]` writes
`benchmarks/budgets.csv` (half an hour on two cores for all of them; what is stored is not run
again)."""

import sys

import pandas as pd

import oa_utils as oa
from oa_utils import store
from oa_utils.paper import circuits

PAIRS = [
    *[f"counterfactual:{name}" for name in ("ugs", "hcgs", "acdc", "edge_pruning")],
    *[f"counterfactual:{name}" for name in ("eap_ig", "eap_ig_masks")],
    *[f"optimal:{name}" for name in ("ugs", "hcgs")],
]


def main() -> None:
    model = oa.load_model("tiny")
    masked = oa.MaskedModel(model)
    study = circuits.study(model, "ioi")
    task = oa.tasks.ioi(model, n=study.n)
    tables = []
    for pair in sys.argv[1:] or PAIRS:
        ablation, method = pair.split(":")
        tables.append(circuits.budget_check(masked, task, study, ablation, [method]))
        print(tables[-1].round(3).to_string(), flush=True)
    path = store.repository() / "benchmarks" / "budgets.csv"
    pd.concat(tables).round(4).to_csv(path, index=False)


if __name__ == "__main__":
    main()
