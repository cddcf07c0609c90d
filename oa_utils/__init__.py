"""Optimal ablation for interpretability: the hooks, searches, tracing and lenses behind the notebooks."""

from oa_utils import claims, plots, runs, stats, tasks
from oa_utils.ablation import Subspace, all_components
from oa_utils.components import ComponentSettings, component_gaps, component_values, optimal_constants, train_constants
from oa_utils.models import Model, load_model
from oa_utils.runs import results
from oa_utils.tasks import Task

__all__ = [
    "ComponentSettings", "Model", "Subspace", "Task", "all_components", "claims", "component_gaps", "component_values",
    "load_model", "optimal_constants", "plots", "results", "runs", "stats", "tasks", "train_constants",
]  # fmt: skip
