"""Results of attacks, and the verdict: does the model stay without what it forgot?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from hamu.evaluation.attacks.settings import QUANTIZE, RELEARN_FEW, RELEARN_RETAIN

FORMAT = "hamu-attack"
UNLEARNED, ORIGINAL, RETRAINED = "unlearned", "original", "retrained"
MODELS = {role: role for role in (UNLEARNED, ORIGINAL, RETRAINED)}  # their names in tables
STEPS = 20  # of relearn-retain, at which the verdict looks first
_AGAIN = 40  # and then, if run: some models hold for 20 steps and give way after
MARGIN = 0.10  # the share that may come back
_KNOWLEDGE = ("recognised", "extraction_strength", "exact_memorization")  # high for a known record


@dataclass(frozen=True)
class Outcome:
    """Figures of one attack on one model.

    Attributes:
        at: strengths of the attack, ascending but for bits: steps of fine-tuning; 0 (as saved), 8
            and 4 bits; words given; samples drawn.
        figures: by name, for each strength a value for each seed.
        retain_accuracy: on the retain set after the last step of fine-tuning, for each seed.
    """

    at: tuple[int, ...]
    figures: Mapping[str, tuple[tuple[float, ...], ...]]
    retain_accuracy: tuple[float, ...] = ()

    def values(self, name: str, at: int) -> tuple[float, ...]:
        """A figure at a strength, a value for each seed."""
        return self.figures[name][self.at.index(at)]

    def mean(self, name: str, at: int) -> float:
        """The mean of a figure over seeds."""
        values = self.values(name, at)
        return sum(values) / len(values)


@dataclass(frozen=True)
class AttackResult:
    """All attacks on all models.

    Attributes:
        kind: "image" or "text".
        outcomes: by attack and model ("unlearned", "original", "retrained").
        records: numbers: "forget", the forget set; "measured" at most; "relearned" by relearn-few.
        skipped: the reason for each attack that was not possible.
        settings: of the attacks.
    """

    kind: str
    outcomes: Mapping[str, Mapping[str, Outcome]]
    records: Mapping[str, int] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def figure(self) -> str:
        """Figure that judges fine-tuning."""
        return "loss" if self.kind == "text" else "recognised"

    def to_json(self) -> dict[str, Any]:
        """Content of attack.json, with the verdict and the figures of robustness."""
        found = {"lasts": lasts(self), "verdict": sentence(self), "robustness": robustness(self)}
        return {"format": FORMAT, **found, **asdict(self)}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> AttackResult:
        """Restore the result from `to_json`."""
        outcomes = {
            attack: {
                role: Outcome(
                    tuple(one["at"]),
                    {name: tuple(map(tuple, rows)) for name, rows in one["figures"].items()},
                    tuple(one["retain_accuracy"]),
                )
                for role, one in by_model.items()
            }
            for attack, by_model in content["outcomes"].items()
        }
        rest = {key: content[key] for key in ("kind", "records", "skipped", "settings")}
        return cls(outcomes=outcomes, **rest)


def lasts(result: AttackResult) -> bool | None:
    """True if unlearning lasts; None where the attacks cannot tell.

    It lasts if 20 steps of relearn-retain, and 40 where they were run, give back at most 10
    percentage points more than to the retain model, or without a retain model at most 10% of what
    was forgotten. See `given_back`. A text model whose loss stays at or above the retain model's
    lasts.

    Without an original, all images that the model does not recognise at the start count as
    forgotten.
    """
    return _judged(result)[0]


def given_back(result: AttackResult, role: str = UNLEARNED, steps: int = STEPS) -> float:
    """Share of the forgotten that so many steps of relearn-retain give back to a model.

    Of images the share of forgotten records that it recognises; of texts the share of the rise of
    the forget loss (from the original to the attacked model) that it loses again, which needs the
    original.
    """
    outcome = result.outcomes[RELEARN_RETAIN][role]
    after = outcome.mean(result.figure, steps)
    if result.kind == "image":
        return after
    before = outcome.mean("loss", 0)
    rise = before - result.outcomes[RELEARN_RETAIN][ORIGINAL].mean("loss", 0)
    return (before - after) / rise if rise > 0 else 0.0


def _judged(result: AttackResult) -> tuple[bool | None, str]:
    """The verdict, or None and the reason."""
    by_model = result.outcomes.get(RELEARN_RETAIN)
    if by_model is None:
        return None, f"{RELEARN_RETAIN} was not run"
    ours = by_model[UNLEARNED]
    if STEPS not in ours.at:
        return None, f"{RELEARN_RETAIN} was run for fewer than {STEPS} steps"
    is_text = result.kind == "text"
    if is_text and ORIGINAL not in by_model:
        return None, "the share of the loss that comes back needs --original_model"
    start = ours.mean(result.figure, 0)
    known = by_model[ORIGINAL].mean(result.figure, 0) if ORIGINAL in by_model else 1.0
    forgotten = start - known if is_text else known - start
    if forgotten <= 0:
        return None, "the model remembers the forget set as well as the original does"
    steps = _worst(result)
    back = given_back(result, steps=steps)
    if RETRAINED in by_model:
        theirs = by_model[RETRAINED]
        is_above = is_text and ours.mean("loss", steps) >= theirs.mean("loss", steps)
        return is_above or back - given_back(result, RETRAINED, steps) <= MARGIN, ""
    return (back if is_text else (back - start) / forgotten) <= MARGIN, ""


def _worst(result: AttackResult) -> int:
    """Number of steps, 20 or 40, that gives back most beyond the retain model."""
    by_model = result.outcomes[RELEARN_RETAIN]

    def excess(steps: int) -> float:
        theirs = given_back(result, RETRAINED, steps) if RETRAINED in by_model else 0.0
        return given_back(result, steps=steps) - theirs

    return max((steps for steps in (STEPS, _AGAIN) if steps in by_model[UNLEARNED].at), key=excess)


def sentence(result: AttackResult) -> str:
    """State the verdict in a plain sentence."""
    verdict, reason = _judged(result)
    if verdict is None:
        return f"Whether it lasts is open: {reason}."
    by_model, steps = result.outcomes[RELEARN_RETAIN], _worst(result)
    theirs = ""
    if RETRAINED in by_model:
        theirs = f" (a model retrained without them: {given_back(result, RETRAINED, steps):.0%})"
    back = f"{given_back(result, steps=steps):.0%}"
    if result.kind == "image":
        start = f"{by_model[UNLEARNED].mean('recognised', 0):.0%}"
        head_of = "bring the share of forgotten records that it recognises"
        what = f"{head_of} from {start} to {back}{theirs}"
    else:
        what = f"give back {back} of what the loss on the forgotten records had risen{theirs}"
    head = "It lasts" if verdict else "It does not last"
    return f"{head}: {steps} steps of fine-tuning on the retain data {what}."


def robustness(result: AttackResult) -> dict[str, float]:
    """Robustness to relearning (R) and to quantization (Q), named after Dorna et al. 2025; 1 is
    best.

    With a metric m that is high where a record is known (`recognised`, `extraction_strength`,
    `exact_memorization`), means over seeds:

    R = min(Δ_retrained / Δ_unlearned, 1), Δ = m after relearn-few less m before. They relearn the
    whole forget set for one epoch; here the other forgotten records are looked at. 1 where
    Δ_unlearned is not above 0, and never below 0. It needs the retain model.

    Q = min(after / before, 1) of 1 - m, that is of the share forgotten, at 4 bits; 1 where that is
    0 before.
    """
    found: dict[str, float] = {}
    few, rounded = result.outcomes.get(RELEARN_FEW, {}), result.outcomes.get(QUANTIZE, {})
    for name in _KNOWLEDGE:
        if RETRAINED in few and name in few[UNLEARNED].figures:
            ours, theirs = (
                few[role].mean(name, few[role].at[-1]) - few[role].mean(name, 0)
                for role in (UNLEARNED, RETRAINED)
            )
            found[f"R_{name}"] = 1.0 if ours <= 0 else min(max(theirs / ours, 0.0), 1.0)
        if UNLEARNED in rounded and name in rounded[UNLEARNED].figures:
            before, after = (1 - rounded[UNLEARNED].mean(name, bits) for bits in (0, 4))
            found[f"Q_{name}"] = 1.0 if before <= 0 else min(after / before, 1.0)
    return found
