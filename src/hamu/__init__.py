"""HAMU: hardness-aware multi-objective machine unlearning for PyTorch.

`import hamu` loads nothing; each public name loads its module on first use. The core needs torch
alone.
"""

import importlib
from typing import TYPE_CHECKING, Any

from hamu.errors import HamuError

if TYPE_CHECKING:
    from hamu.core.gram import PairGram
    from hamu.core.guard import StepGuard, StepTaken
    from hamu.core.methods import build_method
    from hamu.core.methods.base import Method, StoppingRule, Weights
    from hamu.core.methods.hamu import HamuQ, HamuU
    from hamu.core.pair import PairedGradients
    from hamu.core.pair_step import PairStep
    from hamu.unlearning.trainer import UnlearnConfig, UnlearnTrainer

__version__ = "0.1.0"
_MODULES = {  # of each public name that is loaded on first use
    "HamuQ": "hamu.core.methods.hamu",
    "HamuU": "hamu.core.methods.hamu",
    "Method": "hamu.core.methods.base",
    "PairGram": "hamu.core.gram",
    "PairStep": "hamu.core.pair_step",
    "PairedGradients": "hamu.core.pair",
    "StepGuard": "hamu.core.guard",
    "StepTaken": "hamu.core.guard",
    "StoppingRule": "hamu.core.methods.base",
    "UnlearnConfig": "hamu.unlearning.trainer",
    "UnlearnTrainer": "hamu.unlearning.trainer",
    "Weights": "hamu.core.methods.base",
    "build_method": "hamu.core.methods",
}
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
    if name not in _MODULES:
        raise AttributeError(f"module 'hamu' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
    return value
