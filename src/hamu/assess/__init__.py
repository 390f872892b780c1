"""Before the run: hardness, price, the range of first order, and the records in conflict."""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

from hamu.assess.assessment import Assessment, assess_model, check_settings, plain_answer
from hamu.assess.curvature import (
    Curvature,
    Hessian,
    SecondOrder,
    conjugate_gradients,
    lanczos,
    second_order,
)
from hamu.assess.gradients import AssessedModel, Conflicts, gradient_alignment
from hamu.assess.hardness import (
    REGIMES,
    BlockHardness,
    Frontier,
    Hardness,
    Intervals,
    VariantIntervals,
    Verdict,
    bootstrap,
    frontier,
    judge,
    measure_hardness,
)

__all__ = ["Assessment", "assess_model", "check_settings", "plain_answer"]
__all__ += ["Curvature", "Hessian", "SecondOrder", "conjugate_gradients", "lanczos", "second_order"]
__all__ += ["Frontier", "Verdict", "frontier", "judge"]
__all__ += ["AssessedModel", "Conflicts", "gradient_alignment"]
__all__ += ["REGIMES", "BlockHardness", "Hardness", "Intervals", "VariantIntervals", "bootstrap"]
__all__ += ["measure_hardness"]


class _Room(ModuleType):
    """Module that can be called as the job `hamu.assess(...)`, which has its name."""

    def __call__(self, **options: Any) -> Any:
        return import_module("hamu.unlearning.jobs").assess(**options)


sys.modules[__name__].__class__ = _Room
