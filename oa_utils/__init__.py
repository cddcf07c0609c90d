"""Optimal ablation for interpretability: the hooks, searches, tracing and lenses behind the notebooks."""
