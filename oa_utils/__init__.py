"""Optimal ablation for interpretability: the hooks, searches, tracing and lenses behind the notebooks."""

from oa_utils import claims, elicitation, faithfulness, lenses, plots, runs, stats, tasks
from oa_utils.ablation import Subspace, all_components
from oa_utils.circuits import Circuit, draw
from oa_utils.components import ComponentSettings, component_gaps, component_values, optimal_constants, train_constants
from oa_utils.fills import Activations, Constants
from oa_utils.graph import Edge, Graph
from oa_utils.labelled import labelled_sets
from oa_utils.masked import MaskedModel
from oa_utils.models import Model, load_model
from oa_utils.prompt_map import trace_prompt
from oa_utils.runs import results
from oa_utils.search import acdc, eap, eap_ig, edge_pruning, gap, hcgs, random_circuits, sweep, ugs
from oa_utils.tasks import Task
from oa_utils.texts import contexts, facts
from oa_utils.tracing import TraceSettings, trace

__all__ = [
    "Activations", "Circuit", "ComponentSettings", "Constants", "Edge", "Graph", "MaskedModel", "Model", "Subspace", "Task",
    "TraceSettings", "acdc", "all_components", "claims", "component_gaps", "component_values", "contexts", "draw", "eap",
    "eap_ig", "edge_pruning", "elicitation", "facts", "faithfulness", "gap", "hcgs", "labelled_sets", "lenses", "load_model",
    "optimal_constants", "plots", "random_circuits", "results", "runs", "stats", "sweep", "tasks", "trace", "trace_prompt",
    "train_constants", "ugs",
]  # fmt: skip
