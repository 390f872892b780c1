"""HAMU: hardness-aware multi-objective machine unlearning for PyTorch.

Importing this package loads torch and nothing heavier; the trainer arrives when it is first asked for.
"""

from typing import TYPE_CHECKING, Any

from hamu.core.gram import PairGram
from hamu.core.guard import StepGuard, StepTaken
from hamu.core.methods import HamuQ, HamuU, Method, StoppingRule, Weights, build_method
from hamu.core.pair import PairedGradients
from hamu.core.pair_step import PairStep
from hamu.errors import HamuError

if TYPE_CHECKING:
    from hamu.unlearning.trainer import UnlearnConfig, UnlearnTrainer

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
        import hamu.unlearning.trainer

        return getattr(hamu.unlearning.trainer, name)
    raise AttributeError(f"module 'hamu' has no attribute {name!r}")
