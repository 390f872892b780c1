"""Figures of a language model under the keys of OpenUnlearning (Dorna et al. 2025)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_OF_SETS = {"retain": "retain", "real_authors": "ra", "world_facts": "wf"}
_ATTACKS = {
    "mia_loss": "loss",
    "mia_zlib": "zlib",
    "mia_min_k": "min_k_40",
    "mia_min_k_plus_plus": "min_k_plus_plus_40",
}
_METRICS = {
    name: name
    for name in ("extraction_strength", "exact_memorization", "mia_gradnorm", "mia_reference")
} | {
    "forget_Q_A_ROUGE": "forget_rouge",
    "retain_Q_A_ROUGE": "retain_rouge",
    "forget_knowmem_ROUGE": "forget_knowmem",
    "retain_knowmem_ROUGE": "retain_knowmem",
    "forget_verbmem_ROUGE": "forget_verbmem",
}


def open_unlearning(report: Mapping[str, Any]) -> dict[str, float]:
    """Figures of a report with the keys and units of OpenUnlearning's summary files.

    Its attacks take k = 40%, its PrivLeak is in percent, its gibberish figure is the clean share;
    TOFU's own sets take the place of the run's. A figure that was not measured has no key.

    Args:
        report: evaluation.json of a language model.
    """
    metrics, tofu = report["metrics"], report.get("tofu", {})
    found = {f"{side}_Q_A_Prob": report[side]["probability"] for side in ("forget", "retain")}
    found |= {key: metrics.get(name) for key, name in _METRICS.items()}
    inference = report["membership_inference"] or {}
    found |= {key: inference.get(name) for key, name in _ATTACKS.items()}
    leak, noise = report.get("privleak"), metrics.get("gibberish")
    found["privleak"] = None if leak is None else 100 * leak
    found["forget_Q_A_gibberish"] = None if noise is None else 1 - noise
    for name, short in {"forget": "forget", **_OF_SETS}.items():
        one = tofu.get(name, {})
        ratio = "forget_truth_ratio" if name == "forget" else f"{short}_Truth_Ratio"
        probability = "Prob" if name in ("forget", "retain") else "Prob_normalised"
        own = {
            f"{short}_Q_A_{probability}": one.get("probability"),
            f"{short}_Q_A_ROUGE": one.get("rouge"),
            ratio: one.get("truth_ratio"),
        }
        found |= {key: value for key, value in own.items() if value is not None}
    found |= {key: tofu.get(key) for key in ("forget_quality", "model_utility")}
    return {key: value for key, value in found.items() if value is not None}
