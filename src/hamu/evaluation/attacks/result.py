"""Results of attacks: curves, and how they are kept as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

FORMAT = "hamu-attack"
UNLEARNED, ORIGINAL, RETRAINED = "unlearned", "original", "retrained"
MODELS = {
    UNLEARNED: "unlearned",
    ORIGINAL: "original",
    RETRAINED: "retrained",
}  # as tables have them


@dataclass(frozen=True)
class Outcome:
    """Figures of one attack on one model.

    Attributes:
        at: strengths of the attack, ascending but for bits: steps of fine-tuning; 0 (as saved), 8 and 4 bits;
            words given; samples drawn.
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
        records: how many are in the forget set, are measured at most, and are relearned by relearn-few.
        skipped: attacks that were not possible, and why.
        settings: by which they ran.
    """

    kind: str
    outcomes: Mapping[str, Mapping[str, Outcome]]
    records: Mapping[str, int] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def figure(self) -> str:
        """The figure by which fine-tuning is judged."""
        return "loss" if self.kind == "text" else "recognised"

    def to_json(self) -> dict[str, Any]:
        """The result as JSON has it, with the verdict and the figures of robustness."""
        from hamu.evaluation.attacks.lasting import lasts, robustness, sentence

        found = {"lasts": lasts(self), "verdict": sentence(self), "robustness": robustness(self)}
        return {"format": FORMAT, **found, **asdict(self)}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> AttackResult:
        """The result that `to_json` wrote."""
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
