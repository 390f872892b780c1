"""The forward passes of a step, made again at other weights: what a step did to the losses of its own batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hamu.core.distributed import all_reduced, world_size
from hamu.core.forward import rounds_to_tf32, without_autocast, without_tf32

_LOOKED_AT = 256  # predictions of a batch, for the spread of its logits
_ROUGH = 3.0  # in units of which examples/rounding.py finds 0.3 to 3 as the deviation, mostly 0.7


@dataclass(frozen=True)
class _Pass:
    """One forward and backward pass of a step, as far as it takes to repeat the forward."""

    side: str
    batch: Mapping[str, Tensor]
    weight: float
    count: Tensor | int
    random_state: list[Tensor]
    more: Mapping[str, Tensor | None]


class RepeatedPasses:
    """Remembers the passes of one step, and repeats them in the model's own precision.

    Args:
        model: repeated passes leave its buffers as they are.
        total: the summed loss of a side's batch under the model as it is, as the backward pass takes it.
        device: where the passes draw their random numbers.
    """

    def __init__(
        self, model: nn.Module, total: Callable[..., Tensor], device: torch.device
    ) -> None:
        self._model, self._total, self._device = model, total, device
        precisions = [torch.finfo(p.dtype).eps for p in model.parameters() if p.is_floating_point()]
        self._eps = min(
            max(precisions), torch.finfo(torch.bfloat16).eps
        )  # what is stored in less computes in that
        self._passes: list[_Pass] = []
        self._spreads: list[Tensor] = []

    def __len__(self) -> int:
        return len(self._passes)

    @property
    def sides(self) -> tuple[str, ...]:
        """The sides of which a pass is remembered."""
        return tuple(dict.fromkeys(one.side for one in self._passes))

    def remember(
        self,
        side: str,
        batch: Mapping[str, Tensor],
        weight: float,
        count: Tensor | int,
        **more: Tensor | None,
    ) -> None:
        """Take note of a pass that is about to be made.

        Args:
            side: of the pass.
            batch: what it is made of.
            weight: 0 for a batch that is there for its shape alone, else 1.
            count: of the images or scored tokens of the whole step, by which the loss is divided.
            more: what else the total takes, as the limits of a bounded objective.
        """
        self._passes.append(_Pass(side, batch, weight, count, _random_state(self._device), more))

    def forget_all(self) -> None:
        """Forget the passes: the step is over, or will not be measured."""
        self._passes = []

    def see(self, logits: Tensor) -> None:
        """Look at what the loss of a batch is taken of, [N, K]: how far it spreads says how far it is rounded."""
        if self._is_rough and not torch.is_grad_enabled():
            some = logits[:_LOOKED_AT]
            self._spreads.append(some[some.isfinite()].float().std())  # a masked token's is -inf

    @property
    def _is_rough(self) -> bool:
        """Whether some of the model computes in half precision, with or without autocast."""
        return self._eps > torch.finfo(torch.float32).eps

    @property
    def are_exacter(self) -> bool:
        """Whether a GPU computes the repeated passes in more digits than those of the step."""
        return rounds_to_tf32(self._model)

    @torch.no_grad()
    def losses(self) -> dict[str, Tensor]:
        """By side, the losses of the step's own batches at the weights as they are, by the same masks, 0-dim."""
        losses: dict[str, Tensor] = {}
        now = _random_state(self._device)
        exact = without_tf32() if self.are_exacter else nullcontext()
        with exact, without_autocast(self._model), _buffers_kept(self._model):
            for one in self._passes:
                _set_random_state(one.random_state, self._device)
                part = self._total(one.side, one.batch, **one.more) * one.weight / one.count
                losses[one.side] = losses.get(one.side, 0.0) + part
        _set_random_state(now, self._device)
        return losses

    def roughness(self) -> float:
        """What rounding does to the difference of two losses of a model in half precision: each logit is off by up to
        half a last digit, independently, so that a mean over n scored tokens or images is off by 1/√n of that.
        """
        if not self._spreads:
            return 0.0
        counts = [torch.as_tensor(one.count, dtype=torch.float64).cpu() for one in self._passes]
        spread = torch.stack(self._spreads).double().square().max()
        self._spreads.clear()
        spread = (
            (all_reduced(spread) / world_size()).sqrt().cpu()
        )  # all processes must judge a step alike
        return _ROUGH * self._eps * (spread / torch.stack(counts).min().sqrt()).item()


def _random_state(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


def _set_random_state(states: list[Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)


@contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    """Running statistics that a pass in training mode would move are put back."""
    moving = [
        (buffer, buffer.clone())
        for module in model.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training
        for buffer in module.buffers()
    ]
    try:
        yield
    finally:
        for buffer, value in moving:
            buffer.copy_(value)
