"""Before the run: hardness, price, the range of first order, and the records in conflict."""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

from hamu.assess.assessment import (
    Assessment,
    assess_model,
    check_settings,
    measure_hardness,
    plain_answer,
)
from hamu.assess.curvature import Curvature, SecondOrder, second_order
from hamu.assess.gradients import Conflicts
from hamu.assess.hardness import (
    REGIMES,
    BlockHardness,
    Frontier,
    Hardness,
    Intervals,
    VariantIntervals,
    Verdict,
    frontier,
)

__all__ = ["REGIMES", "Assessment", "BlockHardness", "Conflicts", "Curvature", "Frontier"]
__all__ += ["Hardness", "Intervals", "SecondOrder", "VariantIntervals", "Verdict"]
__all__ += ["assess_model", "check_settings", "frontier", "measure_hardness", "plain_answer"]
__all__ += ["second_order"]


class _Room(ModuleType):
    """Module that can be called as the job `hamu.assess(...)`, which has its name."""

    def __call__(self, **options: Any) -> Any:
        return import_module("hamu.unlearning.jobs").assess(**options)


sys.modules[__name__].__class__ = _Room
