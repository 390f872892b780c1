"""Attacks on an unlearned model, the original and the retain model: fine-tuning, quantization,
prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from hamu.core.forward import predict_logits
from hamu.core.objectives import CrossEntropy, Scored
from hamu.errors import HamuError
from hamu.evaluation.attacks.knowledge import (
    AttackData,
    Figures,
    drawn,
    has_prompts,
    leak_at_k,
    prefilled,
    sampled,
)
from hamu.evaluation.attacks.result import (
    ORIGINAL,
    RETRAINED,
    UNLEARNED,
    AttackResult,
    Outcome,
)
from hamu.evaluation.attacks.settings import (
    PREFILL,
    QUANTIZE,
    RELEARN_FEW,
    RELEARN_UNRELATED,
    RELEARNING,
    SAMPLE,
    AttackSettings,
)

Advance = Callable[[int], None]
BITS = (8, 4)
_BLOCK = 64  # weights per NF4 scale


def attack(
    model: nn.Module,
    data: AttackData,
    settings: AttackSettings | None = None,
    *,
    original: nn.Module | None = None,
    retain_model: nn.Module | None = None,
    seed: int = 42,
) -> AttackResult:
    """Attack an unlearned model, and others in the same way for comparison. All models stay
    unchanged.

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
    settings = settings or AttackSettings()
    models = {UNLEARNED: model, ORIGINAL: original, RETRAINED: retain_model}
    found = {
        role: attack_model(one, data, settings, seed=seed, role=role)
        for role, one in models.items()
        if one is not None
    }
    return collected(found, data, settings)


def attack_model(
    model: nn.Module,
    data: AttackData,
    settings: AttackSettings,
    *,
    seed: int = 42,
    role: str = UNLEARNED,
    advance: Advance = lambda steps: None,
) -> dict[str, Outcome]:
    """Attack one model; see `attack`.

    Args:
        model, data, settings, seed: see there.
        role: of the model, for messages.
        advance: called with the number of steps done, see `AttackSettings.work`.

    Returns:
        The outcomes of the possible attacks, by attack.
    """
    names = settings.names(is_text=data.is_text)
    skipped = skipped_attacks(data, settings)
    if QUANTIZE in names:
        check_can_quantize()
    found = {}
    for name in names:
        if name in skipped:
            advance(settings.work((name,), is_text=data.is_text))
            continue
        try:
            if name in RELEARNING:
                found[name] = _relearned(model, data, settings, name, seed, advance)
            else:
                with _unchanged(model, seed):
                    found[name] = _ASKED[name](model, data, settings, seed)
                advance(1)
        except HamuError as error:
            raise HamuError(f"{name} on the {role} model: {error}") from error
    return found


def collected(
    found: Mapping[str, Mapping[str, Outcome]], data: AttackData, settings: AttackSettings
) -> AttackResult:
    """Collect the outcomes of each model into a result.

    Args:
        found: by model and attack; the unlearned model's are among them.
        data: of any of the models.
        settings: of the attacks.
    """
    outcomes = {
        name: {role: by_attack[name] for role, by_attack in found.items()}
        for name in found[UNLEARNED]
    }
    total = len(data.forget)
    records = {
        "forget": total,
        "measured": min(total, settings.measured(is_text=data.is_text)),
        "relearned": settings.relearned(total, is_text=data.is_text)
        if RELEARN_FEW in outcomes
        else 0,
    }
    kind = "text" if data.is_text else "image"
    skipped = skipped_attacks(data, settings)
    return AttackResult(kind, outcomes, records, skipped, asdict(settings))


def skipped_attacks(data: AttackData, settings: AttackSettings) -> dict[str, str]:
    """Reason for each attack that these data do not allow."""
    found = {}
    names = settings.names(is_text=data.is_text)
    if RELEARN_FEW in names and len(data.forget) < 2:
        found[RELEARN_FEW] = "it needs two forgotten records, one to relearn and one to look at"
    if RELEARN_UNRELATED in names and not data.unrelated:
        found[RELEARN_UNRELATED] = (
            "all unrelated texts are among those to retain or forget; name others with "
            "--unrelated_data"
        )
    if SAMPLE in names and not has_prompts(data.forget):
        found[SAMPLE] = "plain text has no prompt to answer"
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
    runs, accuracies = [], []
    retain = drawn(data.retain, settings.measured(is_text=data.is_text), seed)
    rate = settings.learning_rate(is_text=data.is_text, is_adapter=hasattr(model, "peft_config"))
    kind = torch.optim.AdamW if data.is_text else torch.optim.Adam
    for number in range(seed, seed + settings.attack_seeds):
        items, looked_at = _items(data, settings, name, number)
        records = drawn(looked_at, settings.measured(is_text=data.is_text), number)
        with _unchanged(model, number):
            optimizer = kind([p for p in model.parameters() if p.requires_grad], lr=rate)
            measure = lambda records=records: data.measure(model, records)  # noqa: E731
            runs.append(
                _fine_tune(
                    model, items, measure, settings.points(is_text=data.is_text), optimizer, advance
                )
            )
            accuracies.append(data.accuracy(model, retain))
    return _outcome(
        settings.points(is_text=data.is_text), list(zip(*runs, strict=True)), tuple(accuracies)
    )


def _items(
    data: AttackData, settings: AttackSettings, name: str, seed: int
) -> tuple[Iterator[Mapping[str, Tensor]], Any]:
    """Batches of a fine-tuning, and the forgotten records to measure."""
    size = settings.batch_size(is_text=data.is_text)
    if name != RELEARN_FEW:
        source = data.unrelated if name == RELEARN_UNRELATED else data.retain
        return (data.collate(batch) for batch in _batches(source, size, seed)), data.forget
    order = torch.randperm(len(data.forget), generator=torch.Generator().manual_seed(seed))
    count = settings.relearned(len(data.forget), is_text=data.is_text)
    few = data.forget.select(order[:count])
    of_few = size // 2 if data.is_text else count
    of_retain = size - of_few if data.is_text else size  # images: on top of a whole batch
    both = zip(_batches(data.retain, of_retain, seed), _batches(few, of_few, seed), strict=True)
    return (data.collate(one + other) for one, other in both), data.forget.select(order[count:])


def _quantized(model: nn.Module, data: AttackData, settings: AttackSettings, seed: int) -> Outcome:
    records = drawn(data.forget, settings.measured(is_text=data.is_text), seed)
    found = [data.measure(model, records)]
    for bits in BITS:
        with quantized(model, bits):
            found.append(data.measure(model, records))
    return _outcome((0, *BITS), [[one] for one in found])


def _prefilled(model: nn.Module, data: AttackData, settings: AttackSettings, seed: int) -> Outcome:
    records = drawn(data.forget, settings.attack_answers, seed)
    words = (0, settings.prefill_words) if has_prompts(records) else (settings.prefill_words,)
    scores = [
        prefilled(model, data.tokenizer, records, count, data.eval_batch_size) for count in words
    ]
    return _outcome(words, [[{k: v.mean().item() for k, v in one.items()}] for one in scores])


def _sampled(model: nn.Module, data: AttackData, settings: AttackSettings, seed: int) -> Outcome:
    records = drawn(data.forget, settings.attack_answers, seed)
    count = settings.attack_samples
    scores = sampled(model, data.tokenizer, records, count, data.eval_batch_size)
    ks = tuple(sorted({1, count}))
    return _outcome(
        ks, [[{name: leak_at_k([s[name] for s in scores], k) for name in scores[0]}] for k in ks]
    )


_ASKED = {QUANTIZE: _quantized, PREFILL: _prefilled, SAMPLE: _sampled}


def _outcome(at: tuple[int, ...], rows: list[Any], accuracies: tuple[float, ...] = ()) -> Outcome:
    """Figures of each strength and seed, by name."""
    names: Figures = rows[0][0]
    figures = {name: tuple(tuple(one[name] for one in row) for row in rows) for name in names}
    return Outcome(at, figures, accuracies)


@contextmanager
def _unchanged(model: nn.Module, seed: int) -> Iterator[None]:
    """Run with a seed, then restore trainable parameters, buffers, gradients, modes and the random
    state.
    """
    modes = [(module, module.training) for module in model.modules()]
    trained = [p for p in model.parameters() if p.requires_grad]
    kept = [(tensor, tensor.detach().clone()) for tensor in (*trained, *model.buffers())]
    grads = [(p, p.grad) for p in trained]
    device = next(model.parameters()).device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        for p in trained:
            p.grad = None
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, was in kept:
                    tensor.copy_(was)
            for p, grad in grads:
                p.grad = grad
            for module, training in modes:
                module.training = training


def _batches(records: Any, size: int, seed: int) -> Iterator[list[Any]]:
    """Batches of records in endless rounds, each reshuffled."""
    generator = torch.Generator().manual_seed(seed)
    order: list[int] = []
    while True:
        while len(order) < size:
            order += torch.randperm(len(records), generator=generator).tolist()
        yield [records[i] for i in order[:size]]
        order = order[size:]


def _fine_tune(
    model: nn.Module,
    items: Iterator[Mapping[str, Tensor]],
    measure: Callable[[], Figures],
    points: Sequence[int],
    optimizer: torch.optim.Optimizer,
    advance: Callable[[int], None],
) -> list[Figures]:
    """Minimise the cross-entropy in training mode; measure at points, ascending numbers of steps
    from 0.
    """
    device = next(model.parameters()).device
    found = [measure()]
    for step in range(1, points[-1] + 1):
        model.train()
        batch = {key: value.to(device) for key, value in next(items).items()}
        scored = Scored.of(predict_logits(model, batch), batch["labels"])
        loss = CrossEntropy().total(scored, None) / len(scored.labels)
        if not loss.isfinite():
            raise HamuError(
                f"the loss of step {step} is {loss.item()}; expected a finite one: lower "
                f"--attack_learning_rate"
            )
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        advance(1)
        if step in points:
            found.append(measure())
    return found


def check_can_quantize() -> Any:
    """Import the functions of bitsandbytes.

    Raises:
        HamuError: if it is not installed.
    """
    try:
        from bitsandbytes import functional
    except ImportError as error:
        raise HamuError(
            "the attack quantize needs bitsandbytes, which is not installed; pip install "
            "'hamu[quantize]', or "
            "leave quantize out of --attacks"
        ) from error
    return functional


@contextmanager
def quantized(model: nn.Module, bits: int) -> Iterator[None]:
    """Round the weights of linear and convolutional layers temporarily, except a language model's
    head.

    8 bits: one scale for each output channel, as LLM.int8() has for weights (Dettmers et al. 2022).
    4 bits: NF4 in blocks of 64 (Dettmers et al. 2023), the setting of Dorna et al. 2025. The
    rounded weights keep their dtype; activations are not rounded.

    Args:
        model: any module.
        bits: 8 or 4.

    Raises:
        HamuError: if bitsandbytes is not installed.
    """
    functional = check_can_quantize()
    of_model: Any = getattr(model, "get_output_embeddings", lambda: None)
    head = getattr(of_model(), "weight", None)
    layers = [m for m in model.modules() if isinstance(m, nn.Linear | nn.modules.conv._ConvNd)]
    weights = {id(layer.weight): layer.weight for layer in layers if layer.weight is not head}
    kept = [(weight, weight.detach().clone()) for weight in weights.values()]
    with torch.no_grad():
        try:
            for weight in weights.values():
                weight.copy_(_rounded(functional, weight.flatten(1), bits).view_as(weight))
            yield
        finally:
            for weight, was in kept:
                weight.copy_(was)


def _rounded(functional: Any, weight: Tensor, bits: int) -> Tensor:
    """Round a matrix [out, in]."""
    if bits == 8:
        values, scales, _ = functional.int8_vectorwise_quant(weight.half().contiguous())
        found = functional.int8_vectorwise_dequant(values, scales)
    else:
        # flat, as the blocks run over rows: on some CPUs its kernel mixes up blocks of several rows
        codes, state = functional.quantize_4bit(
            weight.reshape(1, -1).contiguous(), blocksize=_BLOCK, quant_type="nf4"
        )
        found = functional.dequantize_4bit(codes, state).view_as(weight)
    return torch.as_tensor(found).to(weight.dtype)
