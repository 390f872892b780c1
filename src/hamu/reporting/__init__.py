"""Pictures of what happened."""

from hamu.reporting.plots import plot_comparison, plot_frontiers, plot_trajectories

__all__ = ["plot_comparison", "plot_frontiers", "plot_trajectories"]
