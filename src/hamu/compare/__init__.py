"""Several methods and settings on one problem: the runs of a comparison, running them, and what has come out."""

from hamu.compare.children import Children
from hamu.compare.grid import Cell, cells
from hamu.compare.rows import Comparison
from hamu.compare.runs import Plan, Runs

__all__ = ["Cell", "Children", "Comparison", "Plan", "Runs", "cells"]
