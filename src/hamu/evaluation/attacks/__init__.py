"""Attacks on an unlearned model: does what was forgotten come back?"""

from hamu.evaluation.attacks.attacker import attack, attack_model, collected, skipped_attacks
from hamu.evaluation.attacks.knowledge import AttackData, exact_memorization, extraction_strength
from hamu.evaluation.attacks.result import (
    AttackResult,
    Outcome,
    given_back,
    lasts,
    robustness,
    sentence,
)
from hamu.evaluation.attacks.settings import AttackSettings

__all__ = [
    "AttackData",
    "AttackResult",
    "AttackSettings",
    "Outcome",
    "attack",
    "attack_model",
    "collected",
    "exact_memorization",
    "extraction_strength",
    "given_back",
    "lasts",
    "robustness",
    "sentence",
    "skipped_attacks",
]
