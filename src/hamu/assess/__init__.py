"""Before the run: how hard it is, what it costs, how far first order holds, which records are in conflict."""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

from hamu.assess.answer import plain_answer
from hamu.assess.assessment import Assessment, Conflicts, assess
from hamu.assess.curvature import Curvature, Hessian, lanczos
from hamu.assess.frontier import Frontier, frontier
from hamu.assess.hardness import REGIMES, BlockHardness, Hardness, measure_hardness
from hamu.assess.influence import influences, share_of_top
from hamu.assess.intervals import Intervals, VariantIntervals, bootstrap
from hamu.assess.second_order import SecondOrder, conjugate_gradients, second_order
from hamu.assess.verdict import CAN_IMPROVE, MUST_HURT, WILL_COST, Verdict, judge

__all__ = [
    "CAN_IMPROVE",
    "MUST_HURT",
    "REGIMES",
    "WILL_COST",
    "Assessment",
    "BlockHardness",
    "Conflicts",
    "Curvature",
    "Frontier",
    "Hardness",
    "Hessian",
    "Intervals",
    "SecondOrder",
    "VariantIntervals",
    "Verdict",
    "assess",
    "bootstrap",
    "conjugate_gradients",
    "frontier",
    "influences",
    "judge",
    "lanczos",
    "measure_hardness",
    "plain_answer",
    "second_order",
    "share_of_top",
]


class _Room(ModuleType):
    """Module that can be called as the job `hamu.assess(...)`, which has its name."""

    def __call__(self, **options: Any) -> Any:
        return import_module("hamu.unlearning.jobs").assess(**options)


sys.modules[__name__].__class__ = _Room
