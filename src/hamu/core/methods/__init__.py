"""The methods: from a `PairGram` to `Weights`. One class per method, one line per class in the registry."""

from hamu.core.methods.base import ConstraintStatus, Method, Weights
from hamu.core.methods.hamu import HamuQ, HamuU
from hamu.core.methods.registry import build_method, method_classes
from hamu.core.methods.stopping import StoppingMemory, StoppingRule

__all__ = [
    "ConstraintStatus",
    "HamuQ",
    "HamuU",
    "Method",
    "StoppingMemory",
    "StoppingRule",
    "Weights",
    "build_method",
    "method_classes",
]
