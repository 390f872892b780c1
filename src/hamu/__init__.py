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

_HOMES = {
    "core.gram": ("PairGram",),
    "core.guard": ("StepGuard", "StepTaken"),
    "core.methods": ("HamuQ", "HamuU", "Method", "StoppingRule", "Weights", "build_method"),
    "core.pair": ("PairedGradients", "PairStep"),
    "errors": ("HamuError",),
    "unlearning.jobs": ("attack", "compare", "evaluate", "train", "unlearn", "verify"),
    "unlearning.trainer": ("UnlearnConfig", "UnlearnTrainer"),
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
    for home, names in _HOMES.items():
        if name in names:
            return globals().setdefault(name, getattr(import_module(f"hamu.{home}"), name))
    raise AttributeError(f"module 'hamu' has no attribute {name!r}")
