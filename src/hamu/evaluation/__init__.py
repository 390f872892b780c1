"""Measuring a model: losses, accuracy, membership inference, and the distance to a retain model."""

from hamu.evaluation.classifier import classifier_report
from hamu.evaluation.membership import MembershipInference, membership_inference
from hamu.evaluation.predictions import Predictions, predict

__all__ = [
    "MembershipInference",
    "Predictions",
    "classifier_report",
    "membership_inference",
    "predict",
]
