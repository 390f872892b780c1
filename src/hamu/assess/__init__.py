"""Before the run: how hard it is, what it costs, how far first order holds, which records are in conflict."""

from hamu.assess.curvature import Curvature, curvature, hessian_product
from hamu.assess.frontier import Frontier, frontier
from hamu.assess.hardness import REGIMES, Hardness, measure_hardness
from hamu.assess.influence import influences, share_of_top

__all__ = [
    "REGIMES",
    "Curvature",
    "Frontier",
    "Hardness",
    "curvature",
    "frontier",
    "hessian_product",
    "influences",
    "measure_hardness",
    "share_of_top",
]
