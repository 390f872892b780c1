"""Attacks on an unlearned model, and the verdict: does it stay without what it forgot?

Fine-tuning, quantization, prefilled and repeated prompts.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import takewhile
from math import comb
from statistics import fmean
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, RandomSampler, Subset

from hamu.core.forward import predict_logits, seeded
from hamu.core.objectives import CrossEntropy, Scored
from hamu.data import TextData, collate, encode
from hamu.data.forget_sets import subset
from hamu.errors import HamuError, percent, reading
from hamu.evaluation.answers import generate_answers, rouge_l, words_of
from hamu.evaluation.memorization import exact_memorization, extraction_strength
from hamu.evaluation.predictions import predict, predict_tokens
from hamu.models.storage import merged

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
_AT_LEAST, _AT_MOST = 20, 40  # steps of relearn-retain: models hold for 20 and give way after
_MARGIN = 0.10  # the share that may come back
_LEAST_RISE = 0.1  # nats; a share of less is noise
_UNMOVED = 0.002  # of a text model's loss: fine-tuning that does anything changes more
_KNOWLEDGE = ("recognised", "extraction_strength", "exact_memorization")  # high for a known record
Figures = dict[str, float]
_BITS: tuple[int, ...] = (0, 8, 4)  # 0: as saved
_BLOCK = 64  # weights per NF4 scale


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
        """The attacks to run on such records; an error if one is not for them, or cannot be run."""
        given = tuple(dict.fromkeys(one.strip() for one in self.attacks.split(",") if one.strip()))
        for name in given:
            if name not in _ATTACKS[kind]:
                known = ", ".join(_ATTACKS[kind])
                raise HamuError(f"attack {name!r} is not for {kind}s; choose from {known}")
        if QUANTIZE in given:
            check_can_quantize()
        names = given or tuple(name for name in _ATTACKS[kind] if name in RELEARNING)
        if kind == "text" and RELEARN_FEW in names and self.attack_batch_size == 1:
            raise HamuError(
                "attack_batch_size 1 leaves relearn-few no room for retain records beside the "
                "forgotten ones; give at least 2, or other --attacks"
            )
        return names

    def value(self, name: str, kind: Kind) -> int:
        """An option, or its default for such records."""
        given: int | None = getattr(self, name)
        return _DEFAULTS[name][kind == "text"] if given is None else given

    def relearned(self, forgotten: int, kind: Kind) -> int:
        """Number of forgotten records that relearn-few trains on: at most half of them."""
        return min(self.value("relearned_records", kind), forgotten // 2)

    def measured(self, name: str, forgotten: int, kind: Kind) -> int:
        """Number of forgotten records that an attack measures."""
        most, left = self.value("attack_records", kind), forgotten
        if name in (PREFILL, SAMPLE):
            most = self.attack_answers
        if name == RELEARN_FEW:
            left -= self.relearned(forgotten, kind)
        return min(most, left)

    def work(self, names: tuple[str, ...], kind: Kind) -> int:
        """Steps of fine-tuning for one model; an attack without any counts as one."""
        fine_tuning = self.value("attack_steps", kind) * self.attack_seeds
        return sum(fine_tuning if name in RELEARNING else 1 for name in names)


@dataclass(frozen=True)
class Outcome:
    """Figures of one attack on one model."""

    at: Sequence[int]  # strengths: steps, words, samples; 0 (as saved), 8 and 4 bits
    figures: Mapping[str, Sequence[Sequence[float]]]  # by name; of each strength and seed
    retain_accuracy: Sequence[float] = ()  # after the last step of fine-tuning, by seed
    learning_rate: float | None = None  # of fine-tuning

    def mean(self, name: str, at: int) -> float:
        """Mean over seeds of a figure at a strength."""
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
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """Restore the result from `to_json`."""
        outcomes = {
            attack: {role: Outcome(**one) for role, one in by_model.items()}
            for attack, by_model in content["outcomes"].items()
        }
        return cls(**{f.name: content[f.name] for f in fields(cls)} | {"outcomes": outcomes})


def lasts(result: AttackResult) -> bool | None:
    """True if unlearning lasts by the rule of docs/attack.md; None where the attacks cannot tell.

    A text model whose loss stays at or above the retain model's lasts; it is open where unlearning
    raised the loss by less than 0.1 nats or fine-tuning moves none by 0.2 %, or where less than 10
    points of the images were forgotten, but for a retain model that recognises about as many.
    Without an original, all that is not recognised at the start counts as forgotten.
    """
    return _judged(result)[0]


def _given_back(result: AttackResult, role: str, steps: int) -> float:
    """Share given back by relearn-retain; of texts beyond the fall of the original's loss."""
    by_model = result.outcomes[RELEARN_RETAIN]
    start, after = (by_model[role].mean(result.figure, at) for at in (0, steps))
    if result.kind == "image":
        return after
    known, general = (by_model[ORIGINAL].mean("loss", at) for at in (0, steps))
    rise, fall = start - known, start - after - max(0.0, known - general)
    return fall / rise if rise >= _LEAST_RISE else 0.0


def _judged(result: AttackResult) -> tuple[bool | None, str, int]:
    """The verdict, or None and the reason, and the steps with the most excess."""
    by_model, is_text = result.outcomes.get(RELEARN_RETAIN), result.kind == "text"
    if by_model is None or max(by_model[UNLEARNED].at) < _AT_LEAST:
        return None, f"{RELEARN_RETAIN} was not run for {_AT_LEAST} steps", 0
    if is_text and ORIGINAL not in by_model:
        return None, "the share of the loss that comes back needs --original_model", 0
    ours, retrained = by_model[UNLEARNED], by_model.get(RETRAINED)
    start = ours.mean(result.figure, 0)
    known = by_model[ORIGINAL].mean(result.figure, 0) if ORIGINAL in by_model else 1.0
    forgotten = start - known if is_text else known - start
    if too_little := _too_little(is_text, by_model, start, forgotten):
        return None, too_little, 0
    if is_text and all(map(_is_unmoved, by_model.values())):
        return None, "fine-tuning left all losses as they were; raise --attack_learning_rate", 0

    def excess(steps: int, role: str = UNLEARNED) -> float:
        back = _given_back(result, role, steps)
        if retrained is None:
            return back if is_text else (back - start) / forgotten
        if is_text and ours.mean("loss", steps) >= retrained.mean("loss", steps):
            return 0.0
        more = back - max(0.0, _given_back(result, RETRAINED, steps))
        # of images that were never gone, as those that a model generalises to, none comes back
        return min(more, back - start) if not is_text and role == UNLEARNED else more

    most = _MARGIN + 1e-9
    judged = [steps for steps in reversed(ours.at) if 0 < steps <= _AT_MOST]
    worst = max(judged, key=excess)
    if excess(worst) > most:
        return False, "", worst
    if not is_text and ORIGINAL in by_model:  # it would pass where an attack cannot tell
        judged = [steps for steps in judged if excess(steps, ORIGINAL) > most]
        if max(judged, default=0) < _AT_LEAST:
            return None, _original_passes(by_model), 0
    return True, "", max(judged, key=excess)


def _is_unmoved(outcome: Outcome) -> bool:
    start = outcome.mean("loss", 0)
    return all(abs(outcome.mean("loss", n) - start) < _UNMOVED * start for n in outcome.at)


def _too_little(
    is_text: bool, by_model: Mapping[str, Outcome], start: float, forgotten: float
) -> str:
    """Reason for which too little was forgotten to come back; "" if enough was."""
    retrained, few = by_model.get(RETRAINED), not is_text and forgotten < _MARGIN
    still = f"the model recognises {percent(start)} of the records before the attack"
    if few and retrained is None:
        return f"{still}, as one that never saw them may; give --retain_model"
    if forgotten <= 0:
        alike = "does as well on the forget set as the original does"
        return f"the model {alike if ORIGINAL in by_model else 'recognises all of the forget set'}"
    if few and retrained is not None:
        ours, judged = by_model[UNLEARNED], [n for n in retrained.at if n <= _AT_MOST]
        both = [(ours.mean("recognised", n), retrained.mean("recognised", n), n) for n in judged]
        most, theirs, steps = max(both, key=lambda one: (one[0] - one[1], -one[2]))
        if most - theirs > _MARGIN:
            later = f"after {steps} steps the model recognises {percent(most)} of the records"
            told = later if steps else still
            return f"{told}, the retain model {percent(theirs)}: too few were forgotten to tell"
    if is_text and forgotten < _LEAST_RISE:
        rise = f"the loss on the forgotten records had risen by {forgotten:.2g} nats alone"
        return f"{rise}; a share needs {_LEAST_RISE}"
    return ""


def _original_passes(by_model: Mapping[str, Outcome]) -> str:
    shares = {role: one.mean("recognised", _AT_LEAST) for role, one in by_model.items()}
    left = percent(shares[ORIGINAL])
    if RETRAINED in shares:
        theirs = f"the retrained model {percent(shares[RETRAINED])}"
        return f"after {_AT_LEAST} steps the original recognises {left} of them, {theirs}"
    known = percent(by_model[ORIGINAL].mean("recognised", 0))
    return f"the same steps take them from the original too, from {known} to {left} in {_AT_LEAST}"


def sentence(result: AttackResult) -> str:
    """The verdict of `lasts` as a sentence."""
    verdict, reason, steps = _judged(result)
    if verdict is None:
        return f"Whether it lasts is open: {reason}."

    def given_back(role: str) -> str:
        return percent(min(max(0.0, _given_back(result, role, steps)), 1.0))

    by_model, back, theirs = result.outcomes[RELEARN_RETAIN], given_back(UNLEARNED), ""
    if RETRAINED in by_model:
        theirs = f" (a model retrained without them: {given_back(RETRAINED)})"
    risen = "of what the loss on the forgotten records had risen"
    what = f"give back {back} {risen}, beyond what they give the original"
    if result.kind == "image":
        start = by_model[UNLEARNED].mean("recognised", 0)
        what = "bring the share of forgotten records that it recognises"
        what += f" from {percent(start)} to {back}"
        if ORIGINAL in by_model and not theirs:
            forgotten = by_model[ORIGINAL].mean("recognised", 0) - start
            more = _given_back(result, UNLEARNED, steps) - start  # or all, and others as well
            share = min(max(0.0, more / forgotten), 1.0)
            theirs = f", {percent(share)} of the {percent(forgotten)} forgotten"
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


@dataclass(frozen=True)
class AttackData:
    """Unlearning problem as inputs of the attacked model."""

    retain: Any  # `ImageData` or `TextData`
    forget: Any
    eval_batch_size: int = 64  # records per forward pass
    unrelated: Any = None  # texts that neither set holds, for relearn-unrelated
    tokenizer: Any = None  # of a language model, for prefill and sample

    @property
    def kind(self) -> Kind:
        """Kind of the records."""
        return "text" if isinstance(self.forget, TextData) else "image"

    def predict(self, model: nn.Module, records: Any) -> Any:
        """`Predictions` or `TokenPredictions` of some records."""
        run: Callable[..., Any] = predict_tokens if self.kind == "text" else predict
        return run(model, records, self.eval_batch_size)

    def measure(self, model: nn.Module, records: Any) -> Figures:
        """Means over records: `loss`; of images `recognised`, of texts the two figures below."""
        found = self.predict(model, records)
        if self.kind == "text":
            values = {
                "extraction_strength": extraction_strength(found),
                "exact_memorization": exact_memorization(found),
                "loss": found.record_losses,
            }
        else:
            values = {"recognised": found.correct.double(), "loss": found.losses}
        if not values["loss"].isfinite().all():
            raise HamuError(
                "a loss of the forgotten records is not finite; attack a model that is not "
                "destroyed, or lower --attack_learning_rate"
            )
        return {name: each.mean().item() for name, each in values.items()}


def attack(
    model: nn.Module,
    data: AttackData,
    settings: AttackSettings | None = None,
    *,
    original: nn.Module | None = None,
    retain_model: nn.Module | None = None,
    seed: int = 42,
) -> AttackResult:
    """Attack an unlearned model, and others in the same way; all stay unchanged.

    Args:
        model: the unlearned model; its trainable parameters are fine-tuned.
        data: the problem, as inputs of all of these models.
        settings: by default the attacks that relearn.
        original: the model before unlearning; texts need it for the verdict.
        retain_model: a model retrained without the forget set.
        seed: seed of the first of the repeated runs.

    Raises:
        HamuError: if an attack is unknown, or a loss is not finite.
    """
    models = {UNLEARNED: model, ORIGINAL: original, RETRAINED: retain_model}
    given = ((role, one, data) for role, one in models.items() if one is not None)
    *_, result = attack_each(given, settings or AttackSettings(), seed)
    return result


def attack_each(
    models: Iterable[tuple[str, nn.Module, AttackData]],
    settings: AttackSettings,
    seed: int,
    advance: Callable[[int], None] = lambda steps: None,
) -> Iterator[AttackResult]:
    """Attack models, given by role and with their inputs, the unlearned one first.

    Gives the result so far after each; `advance` is called with the number of steps done, see
    `AttackSettings.work`.
    """
    outcomes: dict[str, dict[str, Outcome]] = {}
    for role, model, data in models:
        kind, attacker = data.kind, _Attacker(model, data, settings, seed, advance)
        skipped = attacker.skipped()
        for name in settings.names(kind):
            if name in skipped:
                advance(settings.work((name,), kind))
                continue
            try:
                run = attacker.relearned if name in RELEARNING else attacker.asked
                outcomes.setdefault(name, {})[role] = run(name)
            except HamuError as error:
                raise HamuError(f"{name} on the {role} model: {error}") from error
        total, differing = len(data.forget), len({*_contents(data.forget)})
        records = {
            "forget": total,
            "measured": max((settings.measured(one, total, kind) for one in outcomes), default=0),
            "relearned": settings.relearned(differing, kind) if RELEARN_FEW in outcomes else 0,
        }
        yield AttackResult(kind, outcomes, records, skipped, asdict(settings))


@dataclass(frozen=True)
class _Attacker:
    model: nn.Module
    data: AttackData
    settings: AttackSettings
    seed: int
    advance: Callable[[int], None]

    def skipped(self) -> dict[str, str]:
        data, found = self.data, {}
        if len({*_contents(data.forget)}) < 2:
            two = "it needs two forgotten records that differ"
            found[RELEARN_FEW] = f"{two}, one to relearn and one to look at"
        if not data.unrelated:
            found[RELEARN_UNRELATED] = (
                "there are no unrelated texts, or all are among those to retain or forget; name "
                "others with --unrelated_data"
            )
        if data.kind == "text" and not _has_prompts(data.forget):
            found[SAMPLE] = "plain text has no prompt to answer"
        layers = (one.weight for one in self.model.modules() if isinstance(one, nn.Linear))
        if stored := {weight.dtype for weight in layers if not weight.is_floating_point()}:
            dtype = str(stored.pop()).removeprefix("torch.")
            found[QUANTIZE] = f"weights stored as {dtype} cannot be rounded again"
        asked = self.settings.names(data.kind)
        if PREFILL in asked and not len(self._asked_about(PREFILL)):
            found[PREFILL] = "no forgotten record has a prompt, or a second token"
        return {name: why for name, why in found.items() if name in asked}

    def relearned(self, name: str) -> Outcome:
        data, settings, model = self.data, self.settings, self.model
        most, last = (settings.value(f"attack_{n}", data.kind) for n in ("records", "steps"))
        points = (*(point for point in _POINTS if point < last), last)
        retain, is_text = subset(data.retain, most, self.seed), data.kind == "text"
        # an adapter takes a larger rate than a whole model
        usual = 3e-4 if is_text and not hasattr(model, "peft_config") else 1e-3
        rate = settings.attack_learning_rate or usual
        optimizer = torch.optim.AdamW if is_text else torch.optim.Adam
        shared = {id(p): p for p in model.parameters() if not p.requires_grad}
        runs, accuracies = [], []
        for seed in range(self.seed, self.seed + settings.attack_seeds):
            batches, looked_at = self.batches(name, seed)
            records = subset(looked_at, most, seed)
            copied = deepcopy(model, dict(shared))
            trained = [p for p in copied.parameters() if p.requires_grad]
            measured = []
            with seeded(copied, seed):
                for step in _fine_tune(copied, batches, optimizer(trained, lr=rate)):
                    if step in points:
                        measured.append(data.measure(copied, records))
                    self.advance(step > 0)
                accuracies.append(data.predict(copied, retain).correct.double().mean().item())
            runs.append(measured)
        found = _outcome(points, list(zip(*runs, strict=True)), accuracies)
        return replace(found, learning_rate=rate)

    def batches(self, name: str, seed: int) -> tuple[Iterator[Mapping[str, Tensor]], Any]:
        """Batches of all steps of a fine-tuning, and the forgotten records to measure."""
        data, settings, is_text = self.data, self.settings, self.data.kind == "text"
        size, steps = (settings.value(f"attack_{n}", data.kind) for n in ("batch_size", "steps"))

        def drawn(records: Any, size: int) -> Iterator[list[Any]]:
            generator = torch.Generator().manual_seed(seed)
            order = RandomSampler(records, num_samples=size * steps, generator=generator)
            for rows in BatchSampler(order, size, drop_last=False):
                yield [records[i] for i in rows]

        if name != RELEARN_FEW:
            source = data.unrelated if name == RELEARN_UNRELATED else data.retain
            return map(collate, drawn(source, size)), data.forget
        contents, generator = _contents(data.forget), torch.Generator().manual_seed(seed)
        order = torch.randperm(len(contents), generator=generator).tolist()
        firsts = {contents[i]: i for i in reversed(order)}  # of equal records the first
        count = settings.relearned(len(firsts), data.kind)
        chosen = [i for i in order if firsts[contents[i]] == i][:count]
        known = {contents[i] for i in chosen}
        unseen = [i for i in order if contents[i] not in known]
        few, others = (_selected(data.forget, rows) for rows in (chosen, unseen))
        of_few = size // 2 if is_text else count
        of_retain = size - of_few if is_text else size  # images: on top of a whole batch
        both = zip(drawn(data.retain, of_retain), drawn(few, of_few), strict=True)
        return (collate(one + other) for one, other in both), others

    def _asked_about(self, name: str) -> Any:
        """Forgotten records that an attack without fine-tuning measures."""
        data, settings = self.data, self.settings
        most = settings.measured(name, len(data.forget), data.kind)
        records = subset(data.forget, most, self.seed)
        if name == QUANTIZE:
            return records
        # answers begin behind the prompt, even where the loss is of all
        records = encode(records.texts, data.tokenizer, max(map(len, records.tokens)))
        if name != PREFILL:
            return records
        starts = _starts(data.tokenizer, records, settings.prefill_words)
        rows = [n for n, start in enumerate(starts) if start]  # others have one token alone
        return records.select(torch.tensor(rows, dtype=torch.int64))

    def asked(self, name: str) -> Outcome:
        data, settings, model = self.data, self.settings, self.model
        is_rounding, records = name == QUANTIZE, self._asked_about(name)
        with seeded(model, self.seed):
            if is_rounding:
                at = _BITS
                models = (quantized(model, bits) if bits else model for bits in at)
                found = [data.measure(one, records) for one in models]
            elif name == PREFILL:
                at = (0,) * _has_prompts(records) + (settings.prefill_words,)
                recalls = (prefilled(model, data, records, words) for words in at)
                found = [{"rouge_l_recall": recall.mean().item()} for recall in recalls]
            else:
                at = tuple(sorted({1, settings.attack_samples}))
                scores = sampled(model, data, records, settings.attack_samples)
                found = [{"rouge_l_recall": leak_at_k(scores, k)} for k in at]
        self.advance(1)
        return _outcome(at, [[one] for one in found])


def _contents(data: Any) -> Sequence[Any]:
    """Something equal for equal records, of texts but for case or punctuation."""
    if isinstance(data, TextData):
        return data.texts.digests(loosely=True)
    return data.digests() if hasattr(data, "digests") else range(len(data))


def _selected(data: Any, rows: list[int]) -> Any:
    return data.select(torch.tensor(rows)) if hasattr(data, "select") else Subset(data, rows)


def _outcome(
    at: Sequence[int], rows: Sequence[Sequence[Figures]], accuracies: Sequence[float] = ()
) -> Outcome:
    figures = {name: tuple(tuple(one[name] for one in row) for row in rows) for name in rows[0][0]}
    return Outcome(at, figures, tuple(accuracies))


def _fine_tune(
    model: nn.Module, batches: Iterator[Mapping[str, Tensor]], optimizer: torch.optim.Optimizer
) -> Iterator[int]:
    """Minimise the cross-entropy in training mode; yields 0, then the number of each step."""
    device = next(model.parameters()).device
    yield 0
    for step, batch in enumerate(batches, 1):
        model.train()
        inputs = {key: value.to(device) for key, value in batch.items()}
        scored = Scored.of(predict_logits(model, inputs), inputs["labels"])
        loss = CrossEntropy().total(scored, None) / len(scored.labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield step


def prefilled(model: Any, data: AttackData, records: TextData, words: int) -> Tensor:
    """ROUGE-L of greedy answers after the first words of the right ones, but for the last token."""
    starts = _starts(data.tokenizer, records, words)
    return _answered(model, data, replace(records, scored_from=tuple(starts)))


def sampled(model: Any, data: AttackData, records: TextData, samples: int) -> list[Tensor]:
    """ROUGE-L, as of `prefilled`, of answers drawn at temperature 1 from the whole vocabulary."""
    # drawn here, as `generate_answers` leaves the random state as it was
    seeds = [int(torch.randint(2**31, ())) for _ in range(samples)]
    return [_answered(model, data, records, seed) for seed in seeds]


def leak_at_k(scores: list[Tensor], k: int) -> float:
    """leak@k (Reisizadeh et al. 2025): the mean over records of the best score of k drawn answers.

    E[max of k out of the n draws], [N] each, without replacement, which has no bias.
    """
    ascending = torch.stack(scores).double().sort(0).values
    n = len(ascending)
    shares = [comb(i, k - 1) / comb(n, k) for i in range(n)]
    return float((torch.tensor(shares, dtype=torch.float64) @ ascending).mean())


def _has_prompts(data: TextData) -> bool:
    return all(record.prompt or record.messages for record in data.texts.records)


def _starts(tokenizer: Any, records: TextData, words: int) -> list[int]:
    pairs = zip(records.tokens, records.scored_from, strict=True)
    return [_after(tokenizer, one.tolist(), start, words, records.ends) for one, start in pairs]


def _after(tokenizer: Any, tokens: list[int], start: int, words: int, ends: Collection[int]) -> int:
    """Position behind the first words of an answer, in front of its last token."""
    last = max(start, len(tokens) - (2 if tokens[-1] in ends else 1))
    ways = range(start + 1, last + 1) if words else ()
    said = takewhile(lambda end: len(words_of(tokenizer.decode(tokens[start:end]))) <= words, ways)
    return max(said, default=start)


def _answered(model: Any, data: AttackData, records: TextData, seed: int | None = None) -> Tensor:
    """ROUGE-L of answers (greedy without a seed), no longer than the longest right one, [N]."""
    pairs = zip(records.tokens, records.scored_from, strict=True)
    rests = [tokens[start:].tolist() for tokens, start in pairs]
    texts = [data.tokenizer.decode(rest, skip_special_tokens=True) for rest in rests]
    size, longest = data.eval_batch_size, max(map(len, rests))
    answers = generate_answers(model, data.tokenizer, records, size, longest, sampling_seed=seed)
    return rouge_l(answers, texts)


def check_can_quantize() -> Any:
    """Import the functions of bitsandbytes; an error if it is not installed."""
    remedy = "; pip install 'hamu[quantize]', or leave quantize out of --attacks"
    with reading("the attack quantize needs bitsandbytes", remedy):
        from bitsandbytes import functional

        return functional


def quantized(model: nn.Module, bits: int) -> nn.Module:
    """Copy a model with rounded weights of linear and convolutional layers, and of experts.

    A language model's head keeps its weight. 8 bits: a scale for each output channel, as LLM.int8()
    (Dettmers et al. 2022); 4 bits: NF4 in blocks of 64 (Dettmers et al. 2023), as Dorna et al.
    2025. Weights keep their dtype. An adapter is merged first, in float32: rounded by itself, its
    small update of the weights would stay.

    Raises:
        HamuError: if weights are stored in fewer bits already, or there is none to round.
    """
    functional, model = check_can_quantize(), deepcopy(model)
    if hasattr(model, "peft_config") and not getattr(model, "is_loaded_in_4bit", False):
        model = merged(model)
    with torch.no_grad():
        for weight in _rounded_weights(model):
            if bits == 8:
                values = functional.int8_vectorwise_quant(weight.flatten(1).half().contiguous())
                found = functional.int8_vectorwise_dequant(*values[:2])
            else:
                # flat, as the blocks run over rows: on some CPUs its kernel mixes up several rows
                values = weight.reshape(1, -1).contiguous()
                codes = functional.quantize_4bit(values, blocksize=_BLOCK, quant_type="nf4")
                found = functional.dequantize_4bit(*codes)
            weight.copy_(found.view_as(weight))
    return model


def _rounded_weights(model: nn.Module) -> list[Tensor]:
    """Each weight once, with the output channels first."""
    of_model: Any = getattr(model, "get_output_embeddings", lambda: None)
    head = getattr(of_model(), "weight", None)
    found: dict[int, Tensor] = {}
    for module in model.modules():
        for key, weight in module.named_parameters(recurse=False):
            is_layer = key == "weight" and isinstance(module, nn.Linear | nn.modules.conv._ConvNd)
            is_transposed = key == "weight" and type(module).__name__ == "Conv1D"  # as in GPT-2
            is_fused = weight.dim() == 3 and type(module).__name__.endswith("Experts")
            if weight is head or not (is_layer or is_transposed or is_fused):
                continue
            rows = weight.flatten(0, 1) if is_fused else weight
            found[id(weight)] = rows.T if is_transposed else rows
    if not found:
        kind = type(model).__name__
        raise HamuError(f"{kind} has no linear or convolutional layer; leave quantize out")
    return list(found.values())
