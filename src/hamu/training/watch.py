"""What surrounds the optimizer's step: the promise checked, the guarantee, the trust region."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hamu.distributed import processes, summed
from hamu.gram import SIDES
from hamu.guard import StepGuard
from hamu.modes import without_autocast
from hamu.paired import PairedGradients, PairStep
from hamu.training.config import UnlearnConfig
from hamu.training.length_search import TRIALS, LengthSearch
from hamu.training.promise import Outcome, PromiseRecord
from hamu.training.trust_region import TrustRegion

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


class StepWatch:
    """Watches the steps of a run.

    Args:
        pair: whose gradients are stepped on.
        args: check_steps, guarantee, trust_region.
        total: the summed loss of a side's batch under the model as it is, as the backward pass takes it.
        model: repeated passes leave its buffers as they are.
        sides: of the method.

    Attributes:
        record: what was checked so far.
        figures: of the last step, for the log.
        trust: the trust region, None without.
        search: what each step's length is to be, in a run by goal; its trust region counts where nothing fits.
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
        self._pair, self._args, self._total, self._model = pair, args, total, model
        self._autocast = args.bf16 or args.fp16
        precisions = [torch.finfo(p.dtype).eps for p in model.parameters() if p.is_floating_point()]
        self._eps = min(max(precisions), torch.finfo(torch.bfloat16).eps)  # what is stored in less computes in that
        self._spreads: list[Tensor] = []
        self._guard: StepGuard | None = None
        self._guarded: tuple[str, ...] = ()
        self._passes: list[_Pass] = []
        self._rates: list[float] = []
        self.record = PromiseRecord()
        self.figures: dict[str, float] = {}
        self._moved = False
        self.trust = TrustRegion(args.trust_region_growth) if args.trust_region else None
        self.search: LengthSearch | None = None

    def is_due(self, step: int, logged_every: float) -> bool:
        """Whether what this step does (the run's first is 1) will be measured."""
        args = self._args
        if self.trust is not None:
            return True
        if args.check_steps is not None:
            return args.check_steps > 0 and step % args.check_steps == 0
        return str(args.logging_strategy.value) == "steps" and step % max(1, int(logged_every)) == 0

    def remember(self, side: str, batch: Mapping[str, Tensor], weight: float, count: Tensor | int) -> None:
        """Take note of a pass that is about to be made in a step that will be measured."""
        self._passes.append(_Pass(side, batch, weight, count, _random_state(self._pair.parameters[0].device)))

    def see(self, logits: Tensor) -> None:
        """Look at what the loss of a batch is taken of, [N, K]: how far it spreads says how far it is rounded."""
        if self._is_rough and not torch.is_grad_enabled():
            some = logits[:_LOOKED_AT]
            self._spreads.append(some[some.isfinite()].float().std())  # a masked token's is -inf

    @property
    def _is_rough(self) -> bool:
        """Whether some of the model computes in half precision, with or without autocast."""
        return self._eps > torch.finfo(torch.float32).eps

    def keep(self, optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
        """What `combine` is to keep for the step to come."""
        if not self._pair.can_keep and not self._is_plain(optimizer):
            self._passes = []  # what became of g* could only be told with both gradients here
        guard = self._guard_for(optimizer)
        return () if guard is None else guard.keep

    def _guard_for(self, optimizer: torch.optim.Optimizer) -> StepGuard | None:
        """A guard, if this step needs one: to correct it, to undo it, or to see what an optimizer made of g*."""
        exact = self._args.guarantee == "exact"
        sees = bool(self._passes) and (exact or not self._is_plain(optimizer)) and self._pair.can_keep
        if not (exact or sees or self.trust is not None):
            self._guard = None
            return None
        sides = tuple(dict.fromkeys(p.side for p in self._passes)) if sees else ()
        if self._guard is None or sides != self._guarded:
            self._guarded = sides
            guarantee = "exact" if exact else "first_order"
            self._guard = StepGuard(self._pair, optimizer, guarantee=guarantee, keep=sides)  # type: ignore[arg-type]
        return self._guard

    def before(self, step: PairStep, optimizer: torch.optim.Optimizer, losses: Mapping[str, Tensor]) -> None:
        """Just before the optimizer steps."""
        self.figures = {}
        self._rates = [group["lr"] for group in optimizer.param_groups]
        if self.trust is not None:
            for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
                group["lr"] = rate * self.trust.scale
        self._step, self._optimizer = step, optimizer
        self._before = self._measure() if self._passes and self._autocast else dict(losses)
        if self._passes:
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
        if taken and self._passes:
            outcome = self._outcome()
            if trust is not None and guard is not None:
                outcome, fits = self._of_fitting_length(outcome, trust, guard)
                self.figures["trust_scale"] = scale = trust.scale
                undone = not (fits or not outcome.is_told or trust.update(outcome.trust))
                if undone:
                    guard.undo()
                elif self.search is not None:
                    self.search.take(outcome, scale)
            self._note(outcome)
            if not undone:
                self.record.add(outcome)
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate
        if guard is not None:
            guard.release()
        self._passes = []
        self._moved = taken and not undone
        return undone

    def _of_fitting_length(self, outcome: Outcome, trust: TrustRegion, guard: StepGuard) -> tuple[Outcome, bool]:
        """What the step did once it is as long as the goal wants it, and whether it fits then."""
        if self.search is None:
            return outcome, False
        most = trust.most
        for _ in range(TRIALS):
            factor = self.search.factor(outcome, trust.scale, most)
            if factor == 1:
                break
            if factor < 1:
                most = trust.scale  # what was too long is not tried again
            guard.stretch(factor)
            for group in self._optimizer.param_groups:
                group["lr"] *= factor
            trust.scale *= factor
            outcome = self._outcome()
        return outcome, self.search.fits(outcome, trust.scale)

    def _is_plain(self, optimizer: torch.optim.Optimizer) -> bool:
        return is_plain_descent(optimizer, self._pair.parameters)

    def skip(self) -> None:
        """The step is not taken at all."""
        self._passes = []
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
        return self._rates[0] * self._step.combined_sq.sqrt() if self._is_plain(self._optimizer) else None

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs."""
        return {"record": self.record.state_dict(), "trust": None if self.trust is None else self.trust.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.record.load_state_dict(state["record"])
        if self.trust is not None and state["trust"] is not None:
            self.trust.load_state_dict(state["trust"])

    def _outcome(self) -> Outcome:
        step, guard = self._step, self._guard
        after = self._summed(self._measure())
        constraint = step.weights.constraint
        rate = float(self._optimizer.param_groups[0]["lr"])
        demanded = None
        sides = list(after)
        norms = dict(zip(SIDES, step.gradient_norms, strict=True))
        clip = dict(zip(SIDES, step.clip, strict=True))
        if guard is not None and set(sides) <= set(guard.keep):
            promised = {side: getattr(guard.taken, f"{side}_change") for side in sides}
            length = guard.taken.length
            demanded = guard.taken.demand
        else:
            promised = {side: rate * getattr(step, f"promised_{side}_change") / clip[side] for side in sides}
            length = rate * step.combined_sq.sum().sqrt()
        constrained = None if constraint is None else "retain" if constraint.swapped else "forget"
        if constraint is None:
            demand = torch.zeros(())
        else:
            whole = rate * constraint.granted if demanded is None else demanded.sum()
            demand = whole.cpu() / clip[str(constrained)].cpu()
        values = [
            *(promised[side] for side in sides),
            *(after[side] - self._before[side] for side in sides),
            *(norms[side] for side in sides),
            *(after[side] for side in sides),
            length,
            demand,
        ]
        read = torch.stack([v.detach().double().cpu() for v in values]).tolist()
        count = len(sides)
        first, change, norm, loss = (read[i * count : (i + 1) * count] for i in range(4))
        # the losses are float32 means: below a few of their last digits nothing can be told
        noise = 8 * torch.finfo(torch.float32).eps * max(1e-3, *map(abs, loss)) + self._roughness()
        return Outcome(
            dict(zip(sides, first, strict=True)),
            dict(zip(sides, change, strict=True)),
            {side: n * read[-2] for side, n in zip(sides, norm, strict=True)},
            constrained,
            read[-1],
            noise,
        )

    def _roughness(self) -> float:
        """What rounding does to the difference of two losses of a model in half precision: each logit is off by up to
        half a last digit, independently, so that a mean over n scored tokens or images is off by 1/√n of that.
        """
        if not self._spreads:
            return 0.0
        counts = [torch.as_tensor(one.count, dtype=torch.float64).cpu() for one in self._passes]
        spread = torch.stack(self._spreads).double().square().max()
        self._spreads.clear()
        spread = (summed(spread) / processes()).sqrt().cpu()  # all processes must judge a step alike
        return _ROUGH * self._eps * (spread / torch.stack(counts).min().sqrt()).item()

    def _summed(self, losses: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Over all processes; with split pairing each has one side's."""
        none = torch.zeros((), device=self._pair.parameters[0].device)
        return {side: summed(losses.get(side, none).double()) for side in self._sides}

    def _note(self, outcome: Outcome) -> None:
        for side, promised in outcome.promised.items():
            self.figures[f"first_order_{side}_change"] = promised
            self.figures[f"realised_{side}_change"] = outcome.realised[side]
        self.figures["rounding"] = outcome.noise
        if outcome.kept is not None:
            self.figures["promise_kept"] = float(outcome.kept)
        self.figures["trust"] = outcome.trust if math.isfinite(outcome.trust) else -math.inf

    @torch.no_grad()
    def _measure(self) -> dict[str, Tensor]:
        """The losses of the step's own batches at the weights as they are, in full precision, by the same masks."""
        losses: dict[str, Tensor] = {}
        device = self._pair.parameters[0].device
        now = _random_state(device)
        with without_autocast(self._model), _buffers_kept(self._model):
            for one in self._passes:
                _set_random_state(one.random_state, device)
                part = self._total(one.side, one.batch) * one.weight / one.count
                losses[one.side] = losses.get(one.side, 0.0) + part
        _set_random_state(now, device)
        return losses


def is_plain_descent(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> bool:
    """Whether the step of all these is -η g* and nothing else: what was promised needs no look at the weights then."""
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
