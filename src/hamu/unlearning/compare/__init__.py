"""Several methods and settings on one problem: the runs of a comparison, running them, and what has come out."""

from hamu.unlearning.compare.children import Children
from hamu.unlearning.compare.grid import Cell, cells
from hamu.unlearning.compare.rows import Comparison
from hamu.unlearning.compare.runs import Plan, Runs

__all__ = ["Cell", "Children", "Comparison", "Plan", "Runs", "cells"]
