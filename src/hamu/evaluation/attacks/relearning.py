"""Fine-tuning of a model that is as it was afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hamu.core.forward import predict_logits
from hamu.core.objectives import CrossEntropy, Scored
from hamu.errors import HamuError
from hamu.evaluation.attacks.probes import Figures


@contextmanager
def unchanged(model: nn.Module, seed: int) -> Iterator[None]:
    """Run with a seed, then restore trainable parameters, buffers, gradients, modes and the random state.

    Of an adapter that is a copy of the adapter alone.
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


def batches(records: Any, size: int, seed: int) -> Iterator[list[Any]]:
    """Lists of records, round and round, reshuffled each round."""
    generator = torch.Generator().manual_seed(seed)
    order: list[int] = []
    while True:
        while len(order) < size:
            order += torch.randperm(len(records), generator=generator).tolist()
        yield [records[i] for i in order[:size]]
        order = order[size:]


def fine_tune(
    model: nn.Module,
    items: Iterator[Mapping[str, Tensor]],
    measure: Callable[[], Figures],
    points: Sequence[int],
    optimizer: torch.optim.Optimizer,
    advance: Callable[[int], None],
) -> list[Figures]:
    """Minimise the cross-entropy in training mode, and measure at each point.

    Args:
        model: changed; see `unchanged`.
        items: the batches.
        measure: called at each point.
        points: numbers of steps, ascending, 0 first.
        optimizer: of the model's trainable parameters.
        advance: called with 1 after each step.

    Raises:
        HamuError: if a loss is not finite.
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
                f"the loss of step {step} is {loss.item()}; expected a finite one: lower --attack_learning_rate"
            )
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        advance(1)
        if step in points:
            found.append(measure())
    return found
