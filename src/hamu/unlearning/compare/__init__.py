"""Several methods and settings on one problem: the runs of a comparison and their figures."""

from hamu.unlearning.compare.children import Children
from hamu.unlearning.compare.rows import Comparison
from hamu.unlearning.compare.runs import Cell, Plan, Runs, cells

__all__ = ["Cell", "Children", "Comparison", "Plan", "Runs", "cells"]
