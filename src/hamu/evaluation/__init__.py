"""Evaluation: losses, accuracy, membership inference, TOFU's figures, attacks."""

from hamu.evaluation.attack_results import (
    AttackResult,
    AttackSettings,
    Outcome,
    lasts,
    robustness,
    sentence,
)
from hamu.evaluation.attacks import AttackData, attack, attack_model
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

__all__ = ["AttackData", "AttackResult", "AttackSettings", "Outcome", "attack", "attack_model"]
__all__ += ["lasts", "robustness", "sentence"]
__all__ += ["Gains", "hypervolume", "hypervolume_reference", "pareto_optimal"]
__all__ += ["generate_answers", "rouge_l_recall"]
__all__ += ["AttackScores", "MembershipInference", "loss_attack", "membership_inference"]
__all__ += ["membership_scores", "min_k_scores", "privleak", "text_membership"]
__all__ += ["Predictions", "TokenPredictions", "embed", "predict", "predict_tokens"]
__all__ += ["principal_axes", "probabilities"]
__all__ += ["Metric", "build_metrics", "classifier_report", "further_figures", "text_report"]
__all__ += ["TofuSets", "forget_quality", "model_utility", "normalized_probabilities"]
__all__ += ["tofu_report", "truth_ratio_scores", "truth_ratios"]
