"""HAMU: hardness-aware multi-objective machine unlearning for PyTorch.

Importing this package loads torch and nothing heavier; the trainer arrives when it is first asked for.
"""

from typing import TYPE_CHECKING, Any

from hamu.errors import HamuError
from hamu.gram import PairGram
from hamu.guard import StepGuard, StepTaken
from hamu.methods import HamuQ, HamuU, Method, StoppingRule, Weights, build_method
from hamu.pair_step import PairStep
from hamu.paired import PairedGradients

if TYPE_CHECKING:
    from hamu.training import UnlearnConfig, UnlearnTrainer

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
    "build_method",
]


def __getattr__(name: str) -> Any:
    if name in ("UnlearnConfig", "UnlearnTrainer"):
        import hamu.training

        return getattr(hamu.training, name)
    raise AttributeError(f"module 'hamu' has no attribute {name!r}")
