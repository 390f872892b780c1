"""Evaluation: losses, accuracy, membership inference, TOFU's figures, attacks."""

from hamu.evaluation.answers import (
    forget_quality,
    generate_answers,
    rouge_l,
    tofu_report,
)
from hamu.evaluation.attacks import (
    AttackData,
    AttackResult,
    AttackSettings,
    attack,
    lasts,
    robustness,
    sentence,
)
from hamu.evaluation.gains import Gains, hypervolume, pareto_optimal
from hamu.evaluation.membership import (
    gradient_scores,
    membership_inference,
    privleak,
    rmia_scores,
    text_membership,
    ulira_scores,
)
from hamu.evaluation.memorization import (
    exact_memorization,
    extraction_strength,
    gibberish,
    knowmem,
    verbmem,
)
from hamu.evaluation.predictions import Predictions, TokenPredictions, predict, predict_tokens
from hamu.evaluation.reports import (
    Metric,
    build_metrics,
    classifier_report,
    open_unlearning,
    text_report,
)

__all__ = ["AttackData", "AttackResult", "AttackSettings", "attack", "lasts", "robustness"]
__all__ += ["exact_memorization", "extraction_strength", "gibberish", "gradient_scores", "knowmem"]
__all__ += ["open_unlearning", "rmia_scores", "ulira_scores", "verbmem"]
__all__ += ["Gains", "Metric", "Predictions", "TokenPredictions", "build_metrics"]
__all__ += ["classifier_report", "forget_quality", "generate_answers", "hypervolume"]
__all__ += ["membership_inference", "pareto_optimal", "predict", "predict_tokens", "privleak"]
__all__ += ["rouge_l", "sentence", "text_membership", "text_report", "tofu_report"]
