"""Circuit discovery: one file for each algorithm, what they share in `common`, gaps and sweeps in `evaluate`."""

from oa_utils.search.acdc import acdc
from oa_utils.search.eap import eap, eap_ig, eap_scores
from oa_utils.search.edge_pruning import edge_pruning
from oa_utils.search.evaluate import Gap, GapSettings, gap, random_circuits, sweep
from oa_utils.search.filling import fill_for
from oa_utils.search.hcgs import hcgs
from oa_utils.search.ugs import ugs

__all__ = ["acdc", "eap", "eap_ig", "eap_scores", "edge_pruning", "fill_for", "Gap", "GapSettings", "gap", "hcgs",
           "random_circuits", "sweep", "ugs"]  # fmt: skip
