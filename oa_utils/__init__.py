"""Optimal ablation for interpretability: the method behind the notebooks.

Read it in an evening: models · tasks, texts, labelled · sites, fills, training · components ·
graph, buffer, masked, circuits, search · tracing · lenses, faithfulness, elicitation; beside them
stats, store, machine, plots. The second evening is `oa_utils.paper`: what the paper says, and the
studies behind its figures.
"""

from oa_utils import lenses, plots, stats, tasks
from oa_utils.ablate import ablate
from oa_utils.circuits import Circuit
from oa_utils.components import component_gaps, optimal_constants
from oa_utils.fills import Ablation, Constants
from oa_utils.graph import Edge, Graph
from oa_utils.labelled import labelled_sets
from oa_utils.machine import choose
from oa_utils.masked import MaskedModel
from oa_utils.models import load_model
from oa_utils.search import (
    acdc,
    against_random,
    eap,
    eap_ig,
    edge_pruning,
    gap,
    hcgs,
    random_circuits,
    sweep,
    ugs,
)
from oa_utils.sites import Subspace, all_components
from oa_utils.store import results
from oa_utils.supports import supports
from oa_utils.tasks import Task
from oa_utils.texts import contexts, facts
from oa_utils.tracing import trace, trace_prompt

__all__ = [
    "Ablation",
    "Circuit",
    "Constants",
    "Edge",
    "Graph",
    "MaskedModel",
    "Subspace",
    "Task",
    "ablate",
    "acdc",
    "against_random",
    "all_components",
    "choose",
    "component_gaps",
    "contexts",
    "eap",
    "eap_ig",
    "edge_pruning",
    "facts",
    "gap",
    "hcgs",
    "labelled_sets",
    "lenses",
    "load_model",
    "optimal_constants",
    "plots",
    "random_circuits",
    "results",
    "stats",
    "supports",
    "sweep",
    "tasks",
    "trace",
    "trace_prompt",
    "ugs",
]
