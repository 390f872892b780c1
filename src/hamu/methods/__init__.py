"""The methods: from a `PairGram` to `Weights`. One class per method, one line per class in the registry."""

from hamu.methods.base import ConstraintStatus, Method, Weights
from hamu.methods.hamu import HamuQ, HamuU
from hamu.methods.registry import build_method, method_classes
from hamu.methods.stopping import StoppingMemory, StoppingRule

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
