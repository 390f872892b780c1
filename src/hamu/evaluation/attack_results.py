"""Settings and results of attacks, and the verdict: does a model stay without what it forgot?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any, Literal

from hamu.errors import HamuError

Kind = Literal["image", "text"]
UNLEARNED, ORIGINAL, RETRAINED = "unlearned", "original", "retrained"  # models
RELEARN_RETAIN, RELEARN_FEW = "relearn-retain", "relearn-few"
RELEARN_UNRELATED, QUANTIZE = "relearn-unrelated", "quantize"
PREFILL, SAMPLE = "prefill", "sample"
RELEARNING = (RELEARN_RETAIN, RELEARN_FEW, RELEARN_UNRELATED)
_ATTACKS: dict[Kind, tuple[str, ...]] = {
    "image": (RELEARN_RETAIN, RELEARN_FEW, QUANTIZE),
    "text": (*RELEARNING, QUANTIZE, PREFILL, SAMPLE),
}
_DEFAULTS = {  # for images and for texts
    "attack_steps": (80, 40),
    "attack_batch_size": (64, 16),
    "attack_records": (300, 100),
    "relearned_records": (10, 40),
}
_POINTS = (0, 5, 10, 20, 40, 80)
_JUDGED = (20, 40)  # steps of relearn-retain; some models hold for 20 and give way after
_MARGIN = 0.10  # the share that may come back
_KNOWLEDGE = ("recognised", "extraction_strength", "exact_memorization")  # high for a known record


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class AttackSettings:
    """The attacks and their strength.

    Raises:
        HamuError: if a value is out of range.
    """

    attacks: str = _option(
        "",
        "Attacks, with commas: relearn-retain, relearn-few, quantize; for texts also "
        "relearn-unrelated, prefill, sample. By default `hamu attack` runs those that relearn, "
        "`hamu evaluate` and `hamu compare --at` none.",
    )
    attack_steps: int | None = _option(None, "Fine-tuning: steps; by default 80, for texts 40.")
    attack_seeds: int = _option(3, "Fine-tuning: repeat with this many seeds.")
    attack_learning_rate: float | None = _option(
        None, "Fine-tuning: by default 1e-3 (Adam); for texts 3e-4, an adapter 1e-3 (AdamW)."
    )
    attack_batch_size: int | None = _option(
        None, "Fine-tuning: records a step; by default 64, for texts 16."
    )
    attack_records: int | None = _option(
        None, "Measure this many records of a set at most; by default 300, for texts 100."
    )
    relearned_records: int | None = _option(
        None, "Forgotten records that relearn-few trains on; by default 10, for texts 40."
    )
    unrelated_data: str | None = _option(
        None, "Text: data of relearn-unrelated; by default the bundled miniature."
    )
    prefill_words: int = _option(3, "Text: words of the right answer that prefill gives.")
    attack_samples: int = _option(8, "Text: answers of sample to each record, the k of leak@k.")
    attack_answers: int = _option(20, "Text: forgotten records for prefill and sample.")

    def __post_init__(self) -> None:
        rate = self.attack_learning_rate
        if rate is not None and not 0 < rate <= 1:
            raise HamuError(f"attack_learning_rate {rate} must be above 0 and at most 1")
        for name, value in vars(self).items():
            if isinstance(value, int) and value < 1:
                raise HamuError(f"{name} {value} must be at least 1")

    def names(self, kind: Kind) -> tuple[str, ...]:
        """The attacks to run on such records; an error if one is not for them."""
        given = tuple(dict.fromkeys(one.strip() for one in self.attacks.split(",") if one.strip()))
        for name in given:
            if name not in _ATTACKS[kind]:
                known = ", ".join(_ATTACKS[kind])
                raise HamuError(f"attack {name!r} is not for {kind}s; choose from {known}")
        return given or tuple(name for name in _ATTACKS[kind] if name in RELEARNING)

    def value(self, name: str, kind: Kind) -> int:
        """An option, or its default for such records."""
        given: int | None = getattr(self, name)
        return _DEFAULTS[name][kind == "text"] if given is None else given

    def points(self, kind: Kind) -> tuple[int, ...]:
        """The steps after which a fine-tuned copy is measured."""
        last = self.value("attack_steps", kind)
        return (*(point for point in _POINTS if point < last), last)

    def relearned(self, forgotten: int, kind: Kind) -> int:
        """Number of forgotten records that relearn-few trains on: at most half of them."""
        return min(self.value("relearned_records", kind), forgotten // 2)

    def work(self, names: tuple[str, ...], kind: Kind) -> int:
        """Steps of fine-tuning for one model; an attack without any counts as one."""
        fine_tuning = self.value("attack_steps", kind) * self.attack_seeds
        return sum(fine_tuning if name in RELEARNING else 1 for name in names)


@dataclass(frozen=True)
class Outcome:
    """Figures of one attack on one model."""

    at: tuple[int, ...]  # strengths: steps, words, samples; 0 (as saved), 8 and 4 bits
    figures: Mapping[str, tuple[tuple[float, ...], ...]]  # by name; of each strength and seed
    retain_accuracy: tuple[float, ...] = ()  # after the last step of fine-tuning, by seed

    def mean(self, name: str, at: int) -> float:
        """The mean over seeds of a figure at a strength."""
        return fmean(self.figures[name][self.at.index(at)])


@dataclass(frozen=True)
class AttackResult:
    """All attacks on all models."""

    kind: Kind
    outcomes: Mapping[str, Mapping[str, Outcome]]  # by attack and model
    records: Mapping[str, int] = field(default_factory=dict)  # forget, measured, relearned
    skipped: Mapping[str, str] = field(default_factory=dict)  # reason for each impossible attack
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def figure(self) -> str:
        """Figure that judges fine-tuning."""
        return "loss" if self.kind == "text" else "recognised"

    def to_json(self) -> dict[str, Any]:
        """Content of attack.json, with the verdict and the figures of robustness."""
        found = {"lasts": lasts(self), "verdict": sentence(self), "robustness": robustness(self)}
        return {"format": "hamu-attack", **found, **asdict(self)}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> AttackResult:
        """Restore the result from `to_json`."""
        outcomes = {
            attack: {
                role: Outcome(tuple(one["at"]), one["figures"], tuple(one["retain_accuracy"]))
                for role, one in by_model.items()
            }
            for attack, by_model in content["outcomes"].items()
        }
        rest = {key: content[key] for key in ("kind", "records", "skipped", "settings")}
        return cls(outcomes=outcomes, **rest)


def lasts(result: AttackResult) -> bool | None:
    """True if unlearning lasts by the rule of docs/attack.md; None where the attacks cannot tell.

    A text model whose loss stays at or above the retain model's lasts. Without an original, all
    that is not recognised at the start counts as forgotten.
    """
    return _judged(result)[0]


def _given_back(result: AttackResult, role: str, steps: int) -> float:
    """Share of the forgotten that relearn-retain gives back to a model, see `lasts`."""
    by_model = result.outcomes[RELEARN_RETAIN]
    after = by_model[role].mean(result.figure, steps)
    if result.kind == "image":
        return after
    before = by_model[role].mean("loss", 0)
    rise = before - by_model[ORIGINAL].mean("loss", 0)
    return (before - after) / rise if rise > 0 else 0.0


def _judged(result: AttackResult) -> tuple[bool | None, str, int]:
    """The verdict, or None and the reason, and the steps with the most excess."""
    by_model, is_text = result.outcomes.get(RELEARN_RETAIN), result.kind == "text"
    if by_model is None or _JUDGED[0] not in by_model[UNLEARNED].at:
        return None, f"{RELEARN_RETAIN} was not run for {_JUDGED[0]} steps", 0
    if is_text and ORIGINAL not in by_model:
        return None, "the share of the loss that comes back needs --original_model", 0
    ours, retrained = by_model[UNLEARNED], by_model.get(RETRAINED)
    start = ours.mean(result.figure, 0)
    known = by_model[ORIGINAL].mean(result.figure, 0) if ORIGINAL in by_model else 1.0
    forgotten = start - known if is_text else known - start
    if forgotten <= 0:
        return None, "the model remembers the forget set as well as the original does", 0

    def excess(steps: int) -> float:
        theirs = _given_back(result, RETRAINED, steps) if retrained else 0.0
        return _given_back(result, UNLEARNED, steps) - theirs

    worst = max((steps for steps in _JUDGED if steps in ours.at), key=excess)
    back = excess(worst)
    if retrained is None:
        back = back if is_text else (back - start) / forgotten
    elif is_text and ours.mean("loss", worst) >= retrained.mean("loss", worst):
        back = 0.0
    return back <= _MARGIN, "", worst


def sentence(result: AttackResult) -> str:
    """The verdict of `lasts` as a sentence."""
    verdict, reason, steps = _judged(result)
    if verdict is None:
        return f"Whether it lasts is open: {reason}."
    by_model, theirs = result.outcomes[RELEARN_RETAIN], ""
    if RETRAINED in by_model:
        theirs = f" (a model retrained without them: {_given_back(result, RETRAINED, steps):.0%})"
    back = f"{_given_back(result, UNLEARNED, steps):.0%}"
    what = f"give back {back} of what the loss on the forgotten records had risen"
    if result.kind == "image":
        start = f"{by_model[UNLEARNED].mean('recognised', 0):.0%}"
        what = f"bring the share of forgotten records that it recognises from {start} to {back}"
    head = "It lasts" if verdict else "It does not last"
    return f"{head}: {steps} steps of fine-tuning on the retain data {what}{theirs}."


def robustness(result: AttackResult) -> dict[str, float]:
    """Robustness to relearning (R) and to quantization (Q), after Dorna et al. 2025; 1 is best.

    R = min(Δ_retrained / Δ_unlearned, 1), Δ the rise of a metric of knowledge by relearn-few on the
    forgotten records that were not relearned; Q = min(after / before, 1) of the share forgotten, at
    4 bits. Both are 1 where the model has nothing to lose.
    """
    found: dict[str, float] = {}
    few, rounded = (result.outcomes.get(attack, {}) for attack in (RELEARN_FEW, QUANTIZE))
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
