"""Attacks on an unlearned model: fine-tuning, quantization, prefilled and repeated prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from math import comb
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, RandomSampler

from hamu.core.forward import predict_logits
from hamu.core.objectives import CrossEntropy, Scored
from hamu.data import TextData
from hamu.data.forget_sets import draw_positions
from hamu.errors import HamuError
from hamu.evaluation import attack_results as known
from hamu.evaluation.answers import generate_answers, rouge_l_recall
from hamu.evaluation.attack_results import AttackResult, AttackSettings, Kind, Outcome
from hamu.evaluation.memorization import exact_memorization, extraction_strength
from hamu.evaluation.predictions import predict, predict_tokens

Figures = dict[str, float]
Advance = Callable[[int], None]
_BITS = (0, 8, 4)  # 0: as saved
_BLOCK = 64  # weights per NF4 scale


@dataclass(frozen=True)
class AttackData:
    """Unlearning problem as inputs of the attacked model."""

    retain: Any  # `ImageData` or `TextData`
    forget: Any
    collate: Callable[[Any], Mapping[str, Tensor]]  # makes a batch from a list of items
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
        return run(model, records, self.eval_batch_size, self.collate)

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
        model: the unlearned model. Its trainable parameters are fine-tuned: of a model with an
            adapter, only the adapter.
        data: the problem, as inputs of all of these models.
        settings: of the attacks; by default those that relearn.
        original: the model before unlearning; texts need it for the verdict.
        retain_model: a model retrained without the forget set.
        seed: of the first of the repeated runs.

    Raises:
        HamuError: if an attack is unknown, or a loss is not finite.
    """
    models = {known.UNLEARNED: model, known.ORIGINAL: original, known.RETRAINED: retain_model}
    given = ((role, one, data) for role, one in models.items() if one is not None)
    return attack_all(given, settings or AttackSettings(), seed)


def attack_all(
    models: Iterable[tuple[str, nn.Module, AttackData]],
    settings: AttackSettings,
    seed: int,
    advance: Advance = lambda steps: None,
) -> AttackResult:
    """Attack each model, given by role and with its inputs, the unlearned one among them.

    `advance` is called with the number of steps done, see `AttackSettings.work`.
    """
    outcomes: dict[str, dict[str, Outcome]] = {}
    for role, model, data in models:
        names, skipped = settings.names(data.kind), _skipped(data, settings)
        if known.QUANTIZE in names:
            check_can_quantize()
        for name in names:
            if name in skipped:
                advance(settings.work((name,), data.kind))
                continue
            try:
                if name in known.RELEARNING:
                    found = _relearned(model, data, settings, name, seed, advance)
                else:
                    with _seeded(model, seed):
                        found = _asked(model, data, settings, name, seed)
                    advance(1)
            except HamuError as error:
                raise HamuError(f"{name} on the {role} model: {error}") from error
            outcomes.setdefault(name, {})[role] = found
    total, kind = len(data.forget), data.kind
    records = {
        "forget": total,
        "measured": min(total, settings.value("attack_records", kind)),
        "relearned": settings.relearned(total, kind) if known.RELEARN_FEW in outcomes else 0,
    }
    return AttackResult(kind, outcomes, records, skipped, asdict(settings))


def _skipped(data: AttackData, settings: AttackSettings) -> dict[str, str]:
    """Reason for each attack that these data do not allow."""
    found, names = {}, settings.names(data.kind)
    if known.RELEARN_FEW in names and len(data.forget) < 2:
        why = "it needs two forgotten records, one to relearn and one to look at"
        found[known.RELEARN_FEW] = why
    if known.RELEARN_UNRELATED in names and not data.unrelated:
        found[known.RELEARN_UNRELATED] = (
            "all unrelated texts are among those to retain or forget; name others with "
            "--unrelated_data"
        )
    if known.SAMPLE in names and not _has_prompts(data.forget):
        found[known.SAMPLE] = "plain text has no prompt to answer"
    return found


def _relearned(
    model: nn.Module,
    data: AttackData,
    settings: AttackSettings,
    name: str,
    seed: int,
    advance: Advance,
) -> Outcome:
    """Curves of fine-tuning, one for each seed."""
    most, points = settings.value("attack_records", data.kind), settings.points(data.kind)
    retain, is_text = _drawn(data.retain, most, seed), data.kind == "text"
    # an adapter takes a larger rate than a whole model
    usual = 3e-4 if is_text and not hasattr(model, "peft_config") else 1e-3
    rate = settings.attack_learning_rate or usual
    optimizer = torch.optim.AdamW if is_text else torch.optim.Adam
    shared = {id(p): p for p in model.parameters() if not p.requires_grad}
    runs, accuracies = [], []
    for number in range(seed, seed + settings.attack_seeds):
        batches, looked_at = _items(data, settings, name, number)
        records = _drawn(looked_at, most, number)
        copied = deepcopy(model, dict(shared))
        trained = [p for p in copied.parameters() if p.requires_grad]
        measured = []
        with _seeded(copied, number):
            for step in _fine_tune(copied, batches, optimizer(trained, lr=rate)):
                if step in points:
                    measured.append(data.measure(copied, records))
                advance(step > 0)
            accuracies.append(data.predict(copied, retain).correct.double().mean().item())
        runs.append(measured)
    return _outcome(points, list(zip(*runs, strict=True)), tuple(accuracies))


def _items(
    data: AttackData, settings: AttackSettings, name: str, seed: int
) -> tuple[Iterator[Mapping[str, Tensor]], Any]:
    """Batches of all steps of a fine-tuning, and the forgotten records to measure."""
    size, steps = (settings.value(f"attack_{n}", data.kind) for n in ("batch_size", "steps"))

    def batches(records: Any, size: int) -> Iterator[list[Any]]:
        """Records in as many rounds as it takes, each reshuffled."""
        generator = torch.Generator().manual_seed(seed)
        order = RandomSampler(records, num_samples=size * steps, generator=generator)
        for rows in BatchSampler(order, size, drop_last=False):
            yield [records[i] for i in rows]

    if name != known.RELEARN_FEW:
        source = data.unrelated if name == known.RELEARN_UNRELATED else data.retain
        return map(data.collate, batches(source, size)), data.forget
    order = torch.randperm(len(data.forget), generator=torch.Generator().manual_seed(seed))
    count = settings.relearned(len(data.forget), data.kind)
    few, others = data.forget.select(order[:count]), data.forget.select(order[count:])
    of_few = size // 2 if data.kind == "text" else count
    of_retain = size - of_few if data.kind == "text" else size  # images: on top of a whole batch
    both = zip(batches(data.retain, of_retain), batches(few, of_few), strict=True)
    return (data.collate(one + other) for one, other in both), others


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
        if not loss.isfinite():
            raise HamuError(
                f"the loss of step {step} is {loss.item()}; expected a finite one: lower "
                f"--attack_learning_rate"
            )
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        yield step


@contextmanager
def _seeded(model: nn.Module, seed: int) -> Iterator[None]:
    """Run with a seed; restore the random state."""
    device = next(model.parameters()).device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def _asked(
    model: nn.Module, data: AttackData, settings: AttackSettings, name: str, seed: int
) -> Outcome:
    """Outcome of an attack that does not train."""
    if name == known.QUANTIZE:
        records = _drawn(data.forget, settings.value("attack_records", data.kind), seed)
        models = (quantized(model, bits) if bits else model for bits in _BITS)
        return _outcome(_BITS, [[data.measure(one, records)] for one in models])
    records = _drawn(data.forget, settings.attack_answers, seed)
    if name == known.PREFILL:
        words = settings.prefill_words
        at: tuple[int, ...] = (0, words) if _has_prompts(records) else (words,)
        values = [prefilled(model, data, records, count).mean().item() for count in at]
    else:
        at = tuple(sorted({1, settings.attack_samples}))
        scores = sampled(model, data, records, settings.attack_samples)
        values = [leak_at_k(scores, k) for k in at]
    return _outcome(at, [[{"rouge_l_recall": value}] for value in values])


def _outcome(
    at: tuple[int, ...], rows: list[Sequence[Figures]], accuracies: tuple[float, ...] = ()
) -> Outcome:
    """Outcome of the figures of each strength and seed."""
    figures = {name: tuple(tuple(one[name] for one in row) for row in rows) for name in rows[0][0]}
    return Outcome(at, figures, accuracies)


def _drawn(records: Any, most: int, seed: int) -> Any:
    """At most this many records of a set, see `draw_positions`."""
    positions = draw_positions(len(records), most, seed)
    return records if positions is None else records.select(positions)


def prefilled(model: Any, data: AttackData, records: TextData, words: int) -> Tensor:
    """ROUGE-L of greedy answers after the first words of the right ones, but for the last token."""
    pairs = zip(records.tokens, records.scored_from, strict=True)
    starts = [_after(data.tokenizer, tokens.tolist(), start, words) for tokens, start in pairs]
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
    return all(start > 0 for start in data.scored_from)


def _after(tokenizer: Any, tokens: list[int], start: int, words: int) -> int:
    """Position behind the first words of an answer, in front of its last token."""
    last = len(tokens) - (2 if tokens[-1] == tokenizer.eos_token_id else 1)
    end = start
    while words and end < last and len(tokenizer.decode(tokens[start : end + 1]).split()) <= words:
        end += 1
    return min(end, max(start, last))


def _answered(model: Any, data: AttackData, records: TextData, seed: int | None = None) -> Tensor:
    """ROUGE-L of answers (greedy without a seed), no longer than the longest right one, [N]."""
    pairs = zip(records.tokens, records.scored_from, strict=True)
    rests = [tokens[start:].tolist() for tokens, start in pairs]
    texts = [data.tokenizer.decode(rest, skip_special_tokens=True) for rest in rests]
    size, longest = data.eval_batch_size, max(map(len, rests))
    answers = generate_answers(model, data.tokenizer, records, size, longest, sampling_seed=seed)
    return rouge_l_recall(answers, texts)


def check_can_quantize() -> Any:
    """Import the functions of bitsandbytes; an error if it is not installed."""
    try:
        from bitsandbytes import functional
    except ImportError as error:
        raise HamuError(
            "the attack quantize needs bitsandbytes, which is not installed; pip install "
            "'hamu[quantize]', or leave quantize out of --attacks"
        ) from error
    return functional


def quantized(model: nn.Module, bits: int) -> nn.Module:
    """Copy a model with rounded linear and convolutional weights, except a language model's head.

    8 bits: a scale for each output channel, as LLM.int8() (Dettmers et al. 2022); 4 bits: NF4 in
    blocks of 64 (Dettmers et al. 2023), as Dorna et al. 2025. Weights keep their dtype.
    """
    functional, model = check_can_quantize(), deepcopy(model)
    of_model: Any = getattr(model, "get_output_embeddings", lambda: None)
    head = getattr(of_model(), "weight", None)
    layers = [m for m in model.modules() if isinstance(m, nn.Linear | nn.modules.conv._ConvNd)]
    weights = {id(layer.weight): layer.weight for layer in layers if layer.weight is not head}
    with torch.no_grad():
        for weight in weights.values():
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
