"""Settings of the attacks: names, defaults and their check."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hamu.errors import HamuError

RELEARN_RETAIN, RELEARN_FEW = "relearn-retain", "relearn-few"
RELEARN_UNRELATED, QUANTIZE = "relearn-unrelated", "quantize"
PREFILL, SAMPLE = "prefill", "sample"
RELEARNING = (RELEARN_RETAIN, RELEARN_FEW, RELEARN_UNRELATED)
OF_IMAGES = (RELEARN_RETAIN, RELEARN_FEW, QUANTIZE)
OF_TEXTS = (*RELEARNING, QUANTIZE, PREFILL, SAMPLE)
_BY_DEFAULT = {False: OF_IMAGES[:2], True: RELEARNING}  # by whether the records are texts
_POINTS = (0, 5, 10, 20, 40, 80)
_AT_LEAST_ONE = (
    "attack_steps", "attack_seeds", "attack_batch_size", "attack_records", "relearned_records",
    "prefill_words", "attack_samples", "attack_answers",
)  # fmt: skip


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class AttackSettings:
    """The attacks and their strength."""

    attacks: str = _option(
        "",
        "Attacks, with commas: relearn-retain, relearn-few, quantize; for texts also "
        "relearn-unrelated, "
        "prefill, sample. By default `hamu attack` runs those that relearn, `hamu evaluate` none.",
    )
    attack_steps: int | None = _option(
        None, "Steps of fine-tuning; by default 80 for images, 40 for texts."
    )
    attack_seeds: int = _option(3, "Repeat each fine-tuning with this many seeds.")
    attack_learning_rate: float | None = _option(
        None,
        "By default 1e-3 for images (Adam), 3e-4 for texts (AdamW), 1e-3 for an adapter (AdamW).",
    )
    attack_batch_size: int | None = _option(
        None, "Records a step of fine-tuning; by default 64 images or 16 texts."
    )
    attack_records: int | None = _option(
        None,
        "Measure at most this many records of a set, drawn by seed; by default 300 images or "
        "100 texts.",
    )
    relearned_records: int | None = _option(
        None, "Forgotten records that relearn-few trains on; by default 10 images or 40 texts."
    )
    unrelated_data: str | None = _option(
        None, "Text: data of relearn-unrelated; by default the bundled miniature."
    )
    prefill_words: int = _option(3, "Text: words of the right answer that prefill gives.")
    attack_samples: int = _option(
        8, "Text: answers that sample draws for each record, the k of leak@k."
    )
    attack_answers: int = _option(
        20, "Text: prefill and sample ask for this many forgotten records."
    )

    def __post_init__(self) -> None:
        """Check ranges.

        Raises:
            HamuError: if a value is out of range.
        """
        for name in _AT_LEAST_ONE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise HamuError(f"{name} {value} must be at least 1")
        rate = self.attack_learning_rate
        if rate is not None and not 0 < rate <= 1:
            raise HamuError(f"attack_learning_rate {rate} must be above 0 and at most 1")

    def names(self, *, is_text: bool) -> tuple[str, ...]:
        """The attacks to run.

        Raises:
            HamuError: if one is unknown, or not for such records.
        """
        given = tuple(dict.fromkeys(one.strip() for one in self.attacks.split(",") if one.strip()))
        known = OF_TEXTS if is_text else OF_IMAGES
        for name in given:
            if name not in known:
                records = "texts" if is_text else "images"
                raise HamuError(
                    f"attack {name!r} is not for {records}; choose from {', '.join(known)}"
                )
        return given or _BY_DEFAULT[is_text]

    def steps(self, *, is_text: bool) -> int:
        """Steps of fine-tuning."""
        return self.attack_steps or (40 if is_text else 80)

    def points(self, *, is_text: bool) -> tuple[int, ...]:
        """The steps after which a fine-tuned copy is measured."""
        last = self.steps(is_text=is_text)
        return (*(point for point in _POINTS if point < last), last)

    def measured(self, *, is_text: bool) -> int:
        """The most records of a set that are measured."""
        return self.attack_records or (100 if is_text else 300)

    def learning_rate(self, *, is_text: bool, is_adapter: bool) -> float:
        """The learning rate of fine-tuning; an adapter takes a larger one than a whole model."""
        if self.attack_learning_rate is not None:
            return self.attack_learning_rate
        return 3e-4 if is_text and not is_adapter else 1e-3

    def batch_size(self, *, is_text: bool) -> int:
        """Records a step."""
        return self.attack_batch_size or (16 if is_text else 64)

    def relearned(self, forgotten: int, *, is_text: bool) -> int:
        """Number of forgotten records that relearn-few trains on: at most half of them."""
        return min(self.relearned_records or (40 if is_text else 10), forgotten // 2)

    def work(self, names: tuple[str, ...], *, is_text: bool) -> int:
        """Steps of fine-tuning for one model; an attack without any counts as one."""
        fine_tuning = self.steps(is_text=is_text) * self.attack_seeds
        return sum(fine_tuning if name in RELEARNING else 1 for name in names)
