"""Around the optimizer's step: figures, the promise checked, the step corrected, the trust region.

A check repeats the passes of the step at the weights after it, with the same random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import IntervalStrategy

from hamu.core.distributed import all_reduced, world_size
from hamu.core.forward import rounds_to_tf32, without_autocast, without_tf32
from hamu.core.gram import SIDES
from hamu.core.guard import StepGuard
from hamu.core.pair import PairedGradients, PairStep
from hamu.unlearning.trainer.config import UnlearnConfig
from hamu.unlearning.trainer.promise import PromiseRecord, StepOutcome, TrustRegion

_Key = TypeVar("_Key", bound=Hashable)
_FLOAT32 = torch.finfo(torch.float32).eps
_LOOKED_AT = 256  # predictions of a batch, for the spread of its logits
_ROUGH = 3.0  # in units of which examples/rounding.py finds 0.3 to 3 as the deviation, mostly 0.7
_THRESHOLDS = ("direct_threshold", "stop_threshold")
_DEMANDS = ("demand", "clipped_demand", "free_limit", "max_demand")


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
    """Remember the passes of one step, and repeat them in the model's own precision.

    `total` sums the loss of a side's batch under the model as it is, as the backward pass does; the
    passes draw their random numbers on the device.
    """

    def __init__(
        self, model: nn.Module, total: Callable[..., Tensor], device: torch.device
    ) -> None:
        self._model, self._total, self._device = model, total, device
        precisions = [torch.finfo(p.dtype).eps for p in model.parameters() if p.is_floating_point()]
        # a model that is stored in fewer digits than bfloat16's computes in those
        self._eps = min(max(precisions), torch.finfo(torch.bfloat16).eps)
        self._passes: list[_Pass] = []
        self._spreads: list[Tensor] = []

    def __len__(self) -> int:
        return len(self._passes)

    @property
    def sides(self) -> tuple[str, ...]:
        """Sides of the remembered passes."""
        return tuple(dict.fromkeys(one.side for one in self._passes))

    def remember(
        self,
        side: str,
        batch: Mapping[str, Tensor],
        weight: float,
        count: Tensor | int,
        **more: Tensor | None,
    ) -> None:
        """Note a pass that is about to be made, of the images or scored tokens of its step."""
        self._passes.append(_Pass(side, batch, weight, count, _random_state(self._device), more))

    def forget_all(self) -> None:
        """Forget the passes: the step is over, or will not be measured."""
        self._passes = []

    def see(self, logits: Tensor) -> None:
        """Note the spread of a batch's logits, [N, K], which says how far its loss is rounded."""
        is_rough = self._eps > _FLOAT32  # some of the model computes in half precision
        if is_rough and not torch.is_grad_enabled():
            some = logits[:_LOOKED_AT]
            self._spreads.append(some[some.isfinite()].float().std())  # a masked token's is -inf

    @property
    def are_exacter(self) -> bool:
        """True if a GPU computes the repeated passes in more digits than those of the step."""
        return rounds_to_tf32(self._model)

    @torch.no_grad()
    def losses(self) -> dict[str, Tensor]:
        """By side, the losses of the step's batches at the present weights, by its masks, 0-dim."""
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
        """Rounding of the difference of two losses of a model in half precision.

        Each logit is off by half a last digit, independently; a mean over n by 1/√n of that.
        """
        if not self._spreads:
            return 0.0
        counts = [torch.as_tensor(one.count, dtype=torch.float64).cpu() for one in self._passes]
        spread = torch.stack(self._spreads).double().square().max()
        self._spreads.clear()
        # over all processes, which must judge a step alike
        spread = (all_reduced(spread) / world_size()).sqrt().cpu()
        return _ROUGH * self._eps * (spread / torch.stack(counts).min().sqrt()).item()


def _random_state(device: torch.device) -> list[Tensor]:
    of_gpu = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return [torch.get_rng_state(), *of_gpu]


def _set_random_state(states: list[Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)


@contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    """Put back running statistics that a pass in training mode would move."""
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


class Monitor:
    """Watch the steps of a run; for the arguments see `RepeatedPasses` and `UnlearnTrainer`.

    Attributes:
        passes: of the step at hand, where it will be measured.
        record: sum of the steps checked so far.
        figures: of the last step, for the log.
        trust: the trust region, None without.
    """

    def __init__(
        self,
        pair: PairedGradients,
        args: UnlearnConfig,
        total: Callable[..., Tensor],
        model: nn.Module,
        sides: Sequence[str] = SIDES,
    ) -> None:
        self._pair, self._args, self._sides = pair, args, sides
        self._device = pair.parameters[0].device
        self.passes = RepeatedPasses(model, total, self._device)
        self._guard: StepGuard | None = None
        self._guarded: tuple[str, ...] = ()
        self._rates: list[float] = []
        self.record = PromiseRecord()
        self.figures: dict[str, float] = {}
        self._moved = False
        self.trust = TrustRegion(args.trust_region_growth) if args.trust_region else None

    def is_due(self, step: int, logged_every: float) -> bool:
        """True if what this step does (the run's first is 1) will be measured."""
        if self.trust is not None:
            return True
        every = self._args.check_steps
        if every is None:
            is_logged = self._args.logging_strategy == IntervalStrategy.STEPS
            every = max(1, int(logged_every)) if is_logged else 0
        return every > 0 and step % every == 0

    def keep(self, optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
        """Sides whose gradients `combine` is to keep for the step to come."""
        is_plain = is_plain_descent(optimizer, self._pair.parameters)
        can_keep = self._pair.can_keep
        if not can_keep and not is_plain:
            self.passes.forget_all()  # only both gradients would tell what became of g*
        corrects = self._args.correct_steps
        sees = bool(self.passes) and (corrects or not is_plain) and can_keep
        if not (corrects or sees or self.trust is not None):
            self._guard = None
            return ()
        sides = self.passes.sides if sees else ()
        if self._guard is None or sides != self._guarded:
            self._guarded = sides
            self._guard = StepGuard(self._pair, optimizer, correct_steps=corrects, keep=sides)
        return self._guard.keep

    def before(
        self, step: PairStep, optimizer: torch.optim.Optimizer, losses: Mapping[str, Tensor]
    ) -> None:
        """Prepare for a step that will be taken, just before the optimizer takes it."""
        self.figures = {}
        self._rates = [group["lr"] for group in optimizer.param_groups]
        if self.trust is not None:
            for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
                group["lr"] = rate * self.trust.scale
        self._step, self._optimizer = step, optimizer
        if self.passes:
            is_rounded = self._args.bf16 or self._args.fp16 or self.passes.are_exacter
            self._before = self._summed(self.passes.losses() if is_rounded else losses)
        if self._guard is not None:
            self._guard.before(step)

    def after(self) -> bool:
        """Measure just after the step; return True if it was undone for realising nothing."""
        guard, trust, undone = self._guard, self.trust, False
        if guard is not None:
            guard.after()
            if guard.taken.corrected is not None:
                self.figures["corrected_share"] = guard.taken.corrected.double().mean().item()
        if self.passes:
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
        self._moved = not undone
        return undone

    def skip(self) -> None:
        """Note that the step is not taken at all."""
        self.passes.forget_all()
        self.figures, self._moved = {}, False

    @property
    def lengths(self) -> Tensor | None:
        """‖Δw_i‖ of the last step by block, [L]; None if it was not taken, or not measured."""
        if not self._moved:
            return None
        if self._guard is not None:
            return self._guard.taken.lengths
        if is_plain_descent(self._optimizer, self._pair.parameters):
            return self._rates[0] * self._step.combined_sq.sqrt()
        return None

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint, as JSON holds it."""
        scale = None if self.trust is None else self.trust.scale
        return {"record": self.record.state_dict(), "trust_scale": scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.record.load_state_dict(state["record"])
        if self.trust is not None and state["trust_scale"] is not None:
            self.trust.scale = state["trust_scale"]

    def _step_outcome(self) -> StepOutcome:
        """Promise and outcome of the step, in one transfer."""
        constraint = self._step.weights.constraint
        constrained = None if constraint is None else constraint.constrained
        after = self._summed(self.passes.losses())
        promised, length, demand = self._first_order(tuple(after), constrained)
        norms: dict[str, Tensor] = dict(zip(SIDES, self._step.gradient_norms, strict=True))
        tensors: dict[tuple[str, str], Tensor] = {("length", ""): length, ("demand", ""): demand}
        for side, loss in after.items():
            tensors["promised", side] = promised[side]
            tensors["realised", side] = loss - self._before[side]
            tensors["norm", side] = norms[side]
            tensors["loss", side] = loss
        read = read_at_once(tensors)
        # the losses are float32 means: below a few of their last digits nothing can be told
        largest = max(1e-3, *(abs(read["loss", side]) for side in after))
        return StepOutcome(
            promised={side: read["promised", side] for side in after},
            realised={side: read["realised", side] for side in after},
            reach={side: read["norm", side] * read["length", ""] for side in after},
            constrained=constrained,
            demand=read["demand", ""],
            noise=8 * _FLOAT32 * largest + self.passes.roughness(),
        )

    def _first_order(
        self, sides: tuple[str, ...], constrained: str | None
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """g·Δw by side, ‖Δw‖, and the demand on the constrained side's loss, 0 without; all 0-dim.

        As the guard measured them on the weights, where it did; else by the Gram of a step of plain
        descent.
        """
        step, guard, none = self._step, self._guard, torch.zeros(())
        rate = float(self._optimizer.param_groups[0]["lr"])
        clip: dict[str, Tensor] = dict(zip(SIDES, step.clip, strict=True))
        constraint = step.weights.constraint
        demand = none if constraint is None else rate * constraint.clipped_demand
        if guard is not None and set(sides) <= set(guard.keep):
            taken = guard.taken
            promised = {side: getattr(taken, f"{side}_change") for side in sides}
            length = taken.length
            demand = demand if taken.demand is None else taken.demand.sum()
        else:
            changes = {side: getattr(step, f"promised_{side}_change") for side in sides}
            promised = {side: rate * change / clip[side] for side, change in changes.items()}
            length = rate * step.combined_sq.sum().sqrt()
        return promised, length, none if constrained is None else demand / clip[constrained]

    def _summed(self, losses: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Sum over all processes; with split pairing each has one side's."""
        none = torch.zeros((), device=self._device)
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
    """True if the step of all these is -η g*, so that its promise needs no look at the weights."""
    inner = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
    groups = inner.param_groups
    stepped = {id(p) for group in groups for p in group["params"]}
    if type(inner) is not torch.optim.SGD or not all(id(p) in stepped for p in parameters):
        return False
    others = ("momentum", "weight_decay", "maximize")
    is_bare = not any(group[name] for group in groups for name in others)
    return is_bare and all(group["lr"] == groups[0]["lr"] for group in groups)


def read_at_once(tensors: Mapping[_Key, Tensor]) -> dict[_Key, Any]:
    """Read tensors of one shape as numbers; those on the device come in one transfer."""
    found: dict[_Key, Any] = {}
    for on_host in (True, False):
        there = {k: v for k, v in tensors.items() if (v.device.type == "cpu") is on_host}
        if there:
            device = next(iter(there.values())).device
            values = torch.stack([v.detach().to(device, torch.float64) for v in there.values()])
            found |= dict(zip(there, values.tolist(), strict=True))
    return {key: found[key] for key in tensors}


def step_figures(
    step: PairStep | None, losses: Mapping[str, Tensor], sides: Sequence[str]
) -> dict[str, float]:
    """Figures of a step by name; the losses alone, 0-dim by side, if the run ended before it."""
    tensors = {f"{side}_loss": losses[side] for side in sides}
    if step is not None:
        norms: dict[str, Tensor] = dict(zip(SIDES, step.gradient_norms, strict=True))
        tensors |= {f"{side}_norm": norms[side] for side in sides}
        if len(sides) == 2:
            tensors |= {"kappa": step.kappa, "cos": step.cos}
        changes = [f"promised_{side}_change" for side in ("retain", "forget")]
        tensors |= {name: getattr(step, name) for name in changes}
        constraint, direct_share = step.weights.constraint, step.direct_share
        if constraint is not None and direct_share is not None:
            tensors |= {name: getattr(constraint, name) for name in (*_THRESHOLDS, *_DEMANDS)}
            tensors |= {"direct_share": direct_share, "criterion_met": constraint.criterion_met}
    return read_at_once(tensors)


def layer_figures(
    step: PairStep | None, lengths: Tensor | None, sides: Sequence[str]
) -> dict[str, list[float] | None]:
    """cosθ_i and ‖Δw_i‖, [L], of a step by block; None for what is not known."""
    found: dict[str, list[float] | None] = {"cos": None, "change": None}
    if step is not None:
        cos = step.gram.cos if len(sides) == 2 else None
        known = {"cos": cos, "change": lengths}
        found |= read_at_once({name: v for name, v in known.items() if v is not None})
    return found
