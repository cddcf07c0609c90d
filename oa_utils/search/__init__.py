"""Circuit discovery: one file for each algorithm, the loop that the trained ones share, and how
circuits are judged: gaps, sweeps, random circuits."""

from oa_utils.search.acdc import acdc
from oa_utils.search.eap import eap, eap_ig
from oa_utils.search.edge_pruning import edge_pruning
from oa_utils.search.gaps import gap
from oa_utils.search.hcgs import hcgs
from oa_utils.search.random_circuits import against_random, random_circuits
from oa_utils.search.sweeps import sweep, sweep_circuit
from oa_utils.search.ugs import ugs
