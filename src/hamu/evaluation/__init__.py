"""Evaluation of a model: losses, accuracy, membership inference, distance to a retain model, gains,
TOFU.
"""

from hamu.evaluation.gains import Gains, hypervolume, hypervolume_reference, pareto_optimal
from hamu.evaluation.generation import generate_answers, rouge_l_recall
from hamu.evaluation.membership import (
    AttackScores,
    MembershipInference,
    loss_attack,
    membership_inference,
    membership_scores,
    min_k_scores,
    privleak,
    text_membership,
)
from hamu.evaluation.predictions import (
    Predictions,
    TokenPredictions,
    embed,
    predict,
    predict_tokens,
    principal_axes,
    probabilities,
)
from hamu.evaluation.reports import (
    Metric,
    build_metrics,
    classifier_report,
    further_figures,
    metric_classes,
    text_report,
)
from hamu.evaluation.tofu import (
    TofuSets,
    forget_quality,
    model_utility,
    normalized_probabilities,
    tofu_report,
    truth_ratio_scores,
    truth_ratios,
)

__all__ = [
    "AttackScores", "Gains", "MembershipInference", "Metric", "Predictions", "TofuSets",
    "TokenPredictions", "build_metrics", "classifier_report", "embed", "forget_quality",
    "further_figures", "generate_answers", "hypervolume", "hypervolume_reference", "loss_attack",
    "membership_inference", "membership_scores", "metric_classes", "min_k_scores", "model_utility",
    "normalized_probabilities", "pareto_optimal", "predict", "predict_tokens", "principal_axes",
    "privleak", "probabilities", "rouge_l_recall", "text_membership", "text_report", "tofu_report",
    "truth_ratio_scores", "truth_ratios",
]  # fmt: skip
