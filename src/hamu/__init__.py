"""HAMU: hardness-aware multi-objective machine unlearning for PyTorch.

Importing this package loads nothing heavy; each name arrives when it is first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hamu.core.gram import PairGram
    from hamu.core.guard import StepGuard, StepTaken
    from hamu.core.methods import HamuQ, HamuU, Method, StoppingRule, Weights, build_method
    from hamu.core.pair import PairedGradients, PairStep
    from hamu.errors import HamuError
    from hamu.unlearning.jobs import (
        assess,
        attack,
        compare,
        evaluate,
        report,
        train,
        unlearn,
        verify,
    )
    from hamu.unlearning.trainer import UnlearnConfig, UnlearnTrainer

_JOBS = ("attack", "compare", "evaluate", "train", "unlearn", "verify")
_HOMES = {
    "PairGram": "core.gram",
    "StepGuard": "core.guard",
    "StepTaken": "core.guard",
    "PairedGradients": "core.pair",
    "PairStep": "core.pair",
    "HamuError": "errors",
    "UnlearnConfig": "unlearning.trainer",
    "UnlearnTrainer": "unlearning.trainer",
    **dict.fromkeys(
        ("HamuQ", "HamuU", "Method", "StoppingRule", "Weights", "build_method"), "core.methods"
    ),
    **dict.fromkeys(_JOBS, "unlearning.jobs"),
}

__version__ = "0.1.0"
__all__ = [
    "HamuError",
    "HamuQ",
    "HamuU",
    "Method",
    "PairGram",
    "PairStep",
    "PairedGradients",
    "StepGuard",
    "StepTaken",
    "StoppingRule",
    "UnlearnConfig",
    "UnlearnTrainer",
    "Weights",
    "assess",
    "attack",
    "build_method",
    "compare",
    "evaluate",
    "report",
    "train",
    "unlearn",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in ("assess", "report"):  # rooms that can be called, see there
        return import_module(f"hamu.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'hamu' has no attribute {name!r}")
    found = getattr(import_module(f"hamu.{_HOMES[name]}"), name)
    globals()[name] = found
    return found
