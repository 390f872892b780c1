"""Before the run: hardness, price, the range of first order, and the records in conflict."""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

from hamu.assess.alignment import Conflicts, gradient_alignment, share_of_top
from hamu.assess.assessment import (
    ERROR_RATIO,
    Assessment,
    assess_model,
    check_settings,
    plain_answer,
)
from hamu.assess.curvature import (
    Curvature,
    Hessian,
    SecondOrder,
    conjugate_gradients,
    lanczos,
    second_order,
)
from hamu.assess.frontier import (
    CAN_IMPROVE,
    MUST_HURT,
    WILL_COST,
    Frontier,
    Verdict,
    frontier,
    judge,
)
from hamu.assess.gradients import AssessedModel
from hamu.assess.hardness import (
    REGIMES,
    BlockHardness,
    Hardness,
    Intervals,
    VariantIntervals,
    bootstrap,
    measure_hardness,
)

__all__ = [
    "CAN_IMPROVE",
    "ERROR_RATIO",
    "MUST_HURT",
    "REGIMES",
    "WILL_COST",
    "AssessedModel",
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
    "assess_model",
    "bootstrap",
    "check_settings",
    "conjugate_gradients",
    "frontier",
    "gradient_alignment",
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
