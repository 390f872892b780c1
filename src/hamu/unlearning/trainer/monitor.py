"""Around the optimizer's step: the promise checked by repeated passes, the step corrected, the trust region."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import IntervalStrategy

from hamu.core.distributed import all_reduced, world_size
from hamu.core.forward import rounds_to_tf32, without_autocast, without_tf32
from hamu.core.gram import SIDES
from hamu.core.guard import StepGuard
from hamu.core.pair import PairedGradients, PairStep
from hamu.unlearning.trainer.config import UnlearnConfig
from hamu.unlearning.trainer.promise import (
    PromiseRecord,
    StepOutcome,
    TrustRegion,
    read_at_once,
)

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
        """True if some of the model computes in half precision, with or without autocast."""
        return self._eps > torch.finfo(torch.float32).eps

    @property
    def are_exacter(self) -> bool:
        """True if a GPU computes the repeated passes in more digits than those of the step."""
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


@dataclass(frozen=True)
class _FirstOrder:
    """A step as it is to first order, all 0-dim.

    Attributes:
        promised: by side, g·Δw.
        length: ‖Δw‖.
        demand: of the change that was demanded of the constrained side's loss, 0 without.
    """

    promised: dict[str, Tensor]
    length: Tensor
    demand: Tensor


class Monitor:
    """Watches the steps of a run.

    Args:
        pair: whose gradients are stepped on.
        args: check_steps, correct_steps, trust_region.
        total: the summed loss of a side's batch under the model as it is, as the backward pass takes it.
        model: what is unlearned from.
        sides: of the method.

    Attributes:
        passes: of the step at hand, where it will be measured.
        record: what was checked so far.
        figures: of the last step, for the log.
        trust: the trust region, None without.
    """

    def __init__(
        self,
        pair: PairedGradients,
        args: UnlearnConfig,
        total: Callable[[str, Mapping[str, Tensor]], Tensor],
        model: nn.Module,
        sides: Sequence[str] = SIDES,
    ) -> None:
        self._sides = sides
        self._pair, self._args = pair, args
        self._autocast = args.bf16 or args.fp16
        self.passes = RepeatedPasses(model, total, pair.parameters[0].device)
        self._guard: StepGuard | None = None
        self._guarded: tuple[str, ...] = ()
        self._rates: list[float] = []
        self.record = PromiseRecord()
        self.figures: dict[str, float] = {}
        self._moved = False
        self.trust = TrustRegion(args.trust_region_growth) if args.trust_region else None

    def is_due(self, step: int, logged_every: float) -> bool:
        """True if what this step does (the run's first is 1) will be measured."""
        args = self._args
        if self.trust is not None:
            return True
        if args.check_steps is not None:
            return args.check_steps > 0 and step % args.check_steps == 0
        return (
            args.logging_strategy == IntervalStrategy.STEPS
            and step % max(1, int(logged_every)) == 0
        )

    def keep(self, optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
        """What `combine` is to keep for the step to come."""
        if not self._pair.can_keep and not self._is_plain(optimizer):
            self.passes.forget_all()  # what became of g* could only be told with both gradients here
        guard = self._guard_for(optimizer)
        return () if guard is None else guard.keep

    def _guard_for(self, optimizer: torch.optim.Optimizer) -> StepGuard | None:
        """A guard, if this step needs one: to correct it, to undo it, or to see what an optimizer made of g*."""
        exact = self._args.correct_steps
        sees = (
            bool(self.passes) and (exact or not self._is_plain(optimizer)) and self._pair.can_keep
        )
        if not (exact or sees or self.trust is not None):
            self._guard = None
            return None
        sides = self.passes.sides if sees else ()
        if self._guard is None or sides != self._guarded:
            self._guarded = sides
            self._guard = StepGuard(self._pair, optimizer, correct_steps=exact, keep=sides)
        return self._guard

    def before(
        self, step: PairStep, optimizer: torch.optim.Optimizer, losses: Mapping[str, Tensor]
    ) -> None:
        """Just before the optimizer steps."""
        self.figures = {}
        self._rates = [group["lr"] for group in optimizer.param_groups]
        if self.trust is not None:
            for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
                group["lr"] = rate * self.trust.scale
        self._step, self._optimizer = step, optimizer
        again = self.passes and (self._autocast or self.passes.are_exacter)
        self._before = self.passes.losses() if again else dict(losses)
        if self.passes:
            self._before = self._summed(self._before)
        if self._guard is not None:
            self._guard.before(step)

    def after(self) -> bool:
        """Just after; returns whether the step was undone, because it brought nothing of what it promised."""
        step, guard, trust = self._step, self._guard, self.trust
        taken = step.decision == "step"
        if guard is not None and taken:
            guard.after()
            if guard.taken.corrected is not None:
                self.figures["corrected_share"] = guard.taken.corrected.double().mean().item()
        undone = False
        if taken and self.passes:
            outcome = self._step_outcome()
            if trust is not None and guard is not None:
                self.figures["trust_scale"] = trust.scale
                undone = outcome.is_told and not trust.update(outcome.trust)
                if undone:
                    guard.undo()
            self._note(outcome)
            if not undone:
                self.record.add(outcome)
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate
        if guard is not None:
            guard.release()
        self.passes.forget_all()
        self._moved = taken and not undone
        return undone

    def _is_plain(self, optimizer: torch.optim.Optimizer) -> bool:
        return is_plain_descent(optimizer, self._pair.parameters)

    def skip(self) -> None:
        """The step is not taken at all."""
        self.passes.forget_all()
        self.figures, self._moved = {}, False

    @property
    def lengths(self) -> Tensor | None:
        """‖Δw_i‖ of the last step by block, [L]; None if it was not taken, or if only a look at the weights would tell,
        and this step was not looked at.
        """
        if not self._moved:
            return None
        if self._guard is not None:
            return self._guard.taken.lengths
        return (
            self._rates[0] * self._step.combined_sq.sqrt()
            if self._is_plain(self._optimizer)
            else None
        )

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs."""
        return {
            "record": self.record.state_dict(),
            "trust": None if self.trust is None else self.trust.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.record.load_state_dict(state["record"])
        if self.trust is not None and state["trust"] is not None:
            self.trust.load_state_dict(state["trust"])

    def _step_outcome(self) -> StepOutcome:
        """What the step promised, and did: all of it in one transfer."""
        step = self._step
        after = self._summed(self.passes.losses())
        sides, constraint = list(after), step.weights.constraint
        clip: dict[str, Tensor] = dict(zip(SIDES, step.clip, strict=True))
        constrained = None if constraint is None else constraint.constrained
        first_order = self._first_order(sides, clip, constrained)
        norms: dict[str, Tensor] = dict(zip(SIDES, step.gradient_norms, strict=True))
        tensors: dict[str | tuple[str, str], Tensor] = {
            "length": first_order.length,
            "demand": first_order.demand,
        }
        for side in sides:
            tensors["promised", side] = first_order.promised[side]
            tensors["realised", side] = after[side] - self._before[side]
            tensors["norm", side] = norms[side]
            tensors["loss", side] = after[side]
        read = dict(zip(tensors, read_at_once(list(tensors.values())), strict=True))
        # the losses are float32 means: below a few of their last digits nothing can be told
        largest = max(1e-3, *(abs(read["loss", side]) for side in sides))
        return StepOutcome(
            promised={side: read["promised", side] for side in sides},
            realised={side: read["realised", side] for side in sides},
            reach={side: read["norm", side] * read["length"] for side in sides},
            constrained=constrained,
            demand=read["demand"],
            noise=8 * torch.finfo(torch.float32).eps * largest + self.passes.roughness(),
        )

    def _first_order(
        self, sides: Sequence[str], clip: Mapping[str, Tensor], constrained: str | None
    ) -> _FirstOrder:
        """As the guard measured it on the weights, where it did; else as the Gram says of a step of plain descent."""
        step, guard = self._step, self._guard
        rate = float(self._optimizer.param_groups[0]["lr"])
        demand = (
            None
            if step.weights.constraint is None
            else rate * step.weights.constraint.clipped_demand
        )
        if guard is not None and set(sides) <= set(guard.keep):
            taken = guard.taken
            promised = {side: getattr(taken, f"{side}_change") for side in sides}
            length = taken.length
            demand = demand if taken.demand is None else taken.demand.sum()
        else:
            promised = {
                side: rate * getattr(step, f"promised_{side}_change") / clip[side] for side in sides
            }
            length = rate * step.combined_sq.sum().sqrt()
        if demand is None or constrained is None:
            return _FirstOrder(promised, length, torch.zeros(()))
        return _FirstOrder(promised, length, demand / clip[constrained])

    def _summed(self, losses: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Over all processes; with split pairing each has one side's."""
        none = torch.zeros((), device=self._pair.parameters[0].device)
        return {side: all_reduced(losses.get(side, none).double()) for side in self._sides}

    def _note(self, outcome: StepOutcome) -> None:
        for side, promised in outcome.promised.items():
            self.figures[f"first_order_{side}_change"] = promised
            self.figures[f"realised_{side}_change"] = outcome.realised[side]
        self.figures["rounding"] = outcome.noise
        if outcome.kept is not None:
            self.figures["promise_kept"] = float(outcome.kept)
        self.figures["trust"] = outcome.trust if math.isfinite(outcome.trust) else -math.inf


def is_plain_descent(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> bool:
    """True if the step of all these is -η g* and nothing else: what was promised needs no look at the weights then."""
    inner = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
    stepped = {id(p) for group in inner.param_groups for p in group["params"]}
    if not all(id(p) in stepped for p in parameters):
        return False
    return type(inner) is torch.optim.SGD and all(
        not group["momentum"]
        and not group["weight_decay"]
        and not group["maximize"]
        and group["lr"] == inner.param_groups[0]["lr"]
        for group in inner.param_groups
    )
