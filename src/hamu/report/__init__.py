"""Show runs: pictures saved as files, and the report, one HTML file."""

from hamu.report.pictures import plot_comparison, plot_frontiers, plot_trajectories

__all__ = ["plot_comparison", "plot_frontiers", "plot_trajectories"]
