"""Measuring a model: losses, accuracy, membership inference, the distance to a retain model, what was gained; TOFU."""

from hamu.evaluation.classifier import classifier_report
from hamu.evaluation.embedding import embed, principal_axes
from hamu.evaluation.gains import Gains, hypervolume_reference
from hamu.evaluation.generation import generate_answers, rouge_l_recall
from hamu.evaluation.language import text_report
from hamu.evaluation.likelihood import (
    forget_quality,
    model_utility,
    normalized_probabilities,
    probabilities,
    truth_ratio_scores,
    truth_ratios,
)
from hamu.evaluation.membership import (
    AttackScores,
    MembershipInference,
    loss_attack,
    membership_inference,
)
from hamu.evaluation.metrics import Metric, build_metrics, further_figures, metric_classes
from hamu.evaluation.pareto import hypervolume, pareto_optimal
from hamu.evaluation.predictions import Predictions, TokenPredictions, predict, predict_tokens
from hamu.evaluation.text_membership import (
    membership_scores,
    min_k_scores,
    privleak,
    text_membership,
)
from hamu.evaluation.tofu import TofuSets, tofu_report

__all__ = [
    "AttackScores",
    "Gains",
    "MembershipInference",
    "Metric",
    "Predictions",
    "TofuSets",
    "TokenPredictions",
    "build_metrics",
    "classifier_report",
    "embed",
    "forget_quality",
    "further_figures",
    "generate_answers",
    "hypervolume",
    "hypervolume_reference",
    "loss_attack",
    "membership_inference",
    "membership_scores",
    "metric_classes",
    "min_k_scores",
    "model_utility",
    "normalized_probabilities",
    "pareto_optimal",
    "predict",
    "predict_tokens",
    "principal_axes",
    "privleak",
    "probabilities",
    "rouge_l_recall",
    "text_membership",
    "text_report",
    "tofu_report",
    "truth_ratio_scores",
    "truth_ratios",
]
