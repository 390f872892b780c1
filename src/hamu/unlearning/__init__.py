"""The job itself: what must be forgotten, how a run gets there, and how it lasts."""

from hamu.unlearning.goals import Goal, Standing, Targets

__all__ = ["Goal", "Standing", "Targets"]
