"""Pictures of what happened."""

from hamu.reporting.plots import plot_frontiers, plot_trajectories

__all__ = ["plot_frontiers", "plot_trajectories"]
