"""The promise of a step against its outcome: checked, corrected, and steered by a trust region.

A check repeats the forward passes of a step at the weights after it, with the same random numbers.
`CheckSchedule` decides which steps are checked.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from transformers import IntervalStrategy, TrainerCallback

from hamu.core.distributed import all_reduced, is_sharded, world_size
from hamu.core.forward import restored, rounds_to_tf32, without_autocast, without_tf32
from hamu.core.gram import SIDES
from hamu.core.guard import StepGuard
from hamu.core.pair import PairedGradients, PairStep, on_host
from hamu.errors import counted, percent
from hamu.unlearning.trainer.config import UnlearnConfig

KEPT = 0.95  # of the demand
_SHRINK_BELOW, _GROW_ABOVE, _LEAP_ABOVE = 0.25, 0.75, 0.95  # realised over promised
LEAST_SCALE = 2.0**-20  # where a run cannot go on
_GOOD = {"forget": 1.0, "retain": -1.0}  # sign of a change of loss that is wanted
_FLOAT32 = torch.finfo(torch.float32).eps
_SHARE = 0.05  # of a run's time that checks and log take, unless it names their number
_LEAST = 0.01  # of it for the checks, however long the log takes
_LOOKED_AT = 256  # predictions of a batch, for the spread of its logits
_ROUGH = 3.0  # in units of which examples/rounding.py finds 0.3 to 3 as the deviation, mostly 0.7
_OF_A_CONSTRAINT = (
    *("direct_threshold", "stop_threshold", "criterion_met"),
    *("demand", "clipped_demand", "free_limit", "max_demand"),
)


@dataclass(frozen=True)
class StepOutcome:
    """One step, in loss, by side; a side that the method does not use is not there.

    Attributes:
        promised: first-order change, g·Δw.
        realised: the change of the loss of the step's own batches.
        reach: ‖g‖‖Δw‖, the most that a step of this length can change to first order.
        constrained: the side with a demand, None for methods without a constraint.
        demand: what was demanded of it, 0 without.
        noise: changes below this are rounding.
        clamped: whether more was demanded than is possible, and `demand` is less.
    """

    promised: dict[str, float]
    realised: dict[str, float]
    reach: dict[str, float]
    constrained: str | None
    demand: float
    noise: float
    clamped: bool = False

    def ratio(self, side: str) -> float | None:
        """Realised over promised; None where what was promised is rounding."""
        promised = self.promised[side]
        return self.realised[side] / promised if abs(promised) > self.noise else None

    @property
    def kept(self) -> bool | None:
        """True if 95% of the demand was realised, within rounding; None without such a demand."""
        if self.constrained is None or self.demand <= self.noise:
            return None
        realised = _GOOD[self.constrained] * self.realised[self.constrained]
        return realised + self.noise >= KEPT * self.demand

    @property
    def is_told(self) -> bool:
        """True if anything is more than rounding: what was promised, or what came instead."""
        return any(self._is_above_rounding(side) for side in self.promised)

    @property
    def trust(self) -> float:
        """Trust in the first-order model: 1 if exact, 0 or less if the step brought nothing.

        The worse side counts. For the constrained side it is realised over promised; what the other
        misses is measured by its own promise or, if that is more, by what it would have been
        promised with the same angle between gradient and step.
        """
        found = [1.0]
        for side, promised in self.promised.items():
            missing = _GOOD[side] * (promised - self.realised[side])
            if math.isnan(missing):
                return math.nan
            if self._is_above_rounding(side):
                found.append(1.0 - missing / max(self._scale(side), self.noise))
        return min(found)

    def _is_above_rounding(self, side: str) -> bool:
        off = abs(self.realised[side] - self.promised[side])
        return math.isnan(off) or max(self._scale(side), off) > self.noise

    def _scale(self, side: str) -> float:
        used = 1.0  # of what a step of this length could change
        if self.constrained is not None:
            reach = self.reach[self.constrained]
            used = abs(self.promised[self.constrained]) / reach if reach > 0 else 0.0
        return max(abs(self.promised[side]), used * self.reach[side])


@dataclass
class PromiseRecord:
    """Sum of the steps that were checked."""

    checked: int = 0
    undone: int = 0  # of these by the trust region; the rest counts them nowhere
    kept: list[bool] = field(default_factory=list)  # of each with a demand above rounding
    clamped: int = 0  # of these
    ratios: dict[str, list[float]] = field(default_factory=lambda: {"retain": [], "forget": []})

    def add(self, outcome: StepOutcome, *, is_undone: bool = False) -> None:
        """Add what one step promised and did."""
        self.checked += 1
        self.undone += is_undone
        if is_undone:
            return
        for side in outcome.promised:
            ratio = outcome.ratio(side)
            if ratio is not None and math.isfinite(ratio):
                self.ratios[side].append(ratio)
        if outcome.kept is not None:
            self.kept.append(outcome.kept)
            self.clamped += outcome.clamped

    def summary(self) -> dict[str, Any] | None:
        """Counts of steps checked, undone, judged, clamped; share that kept the demand; ratios."""
        if not self.checked:
            return None
        return {
            "checked": self.checked,
            "undone": self.undone,
            "judged": len(self.kept),
            "clamped": self.clamped,
            "kept": sum(self.kept) / len(self.kept) if self.kept else None,
            "median_ratio": {side: median(found) for side, found in self.ratios.items() if found},
        }


def kept_in_words(summary: dict[str, Any]) -> str:
    """Begin a sentence with the share of checked steps that realised their demand."""
    steps = f"of {counted(summary['checked'], 'checked steps')}"
    if summary["undone"]:
        steps += f" ({summary['undone']:,} undone)"
    if summary["kept"] is None:
        return f"{steps} none that stayed had a demand above rounding"
    clamped = summary["clamped"]
    cut = f" ({counted(clamped, 'times')} cut to what is possible)" if clamped else ""
    kept = f"{percent(summary['kept'])} realised at least {KEPT:.0%} of it{cut}"
    return f"{steps} {summary['judged']:,} had a demand above rounding, of which {kept}"


def next_scale(scale: float, trust: float, most: float) -> float:
    """Factor on the learning rate, and with it on radius and demand, after a step.

    It is halved where less than a quarter of what was promised was realised, doubled over three
    quarters, and quadrupled where all but 5% was; from `LEAST_SCALE` to `most`.
    """
    if not trust >= _SHRINK_BELOW:  # NaN too
        return max(0.5 * scale, LEAST_SCALE)
    return min((4.0 if trust > _LEAP_ABOVE else 2.0 if trust > _GROW_ABOVE else 1.0) * scale, most)


class RepeatedPasses:
    """Forward passes of one step, repeated with their random numbers in the model's precision."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._gpus = sorted({p.device.index for p in model.parameters() if p.is_cuda})
        precisions = [torch.finfo(p.dtype).eps for p in model.parameters() if p.is_floating_point()]
        # a model that is stored in fewer digits than bfloat16's computes in those
        self._eps = min(max(precisions), torch.finfo(torch.bfloat16).eps)
        self._passes: list[tuple[str, Callable[[], Tensor], Any, list[Tensor]]] = []
        self._spreads: list[Tensor] = []

    def __len__(self) -> int:
        return len(self._passes)

    def remember(self, side: str, loss: Callable[[], Tensor], count: Tensor | int) -> None:
        """Note a pass to come: its part of a side's loss, a mean over `count` records or tokens."""
        of_gpus = [torch.cuda.get_rng_state(gpu) for gpu in self._gpus]
        self._passes.append((side, loss, count, [torch.get_rng_state(), *of_gpus]))

    def clear(self) -> None:
        """Forget the passes: the step is over, or will not be measured."""
        self._passes = []

    def see(self, logits: Tensor) -> None:
        """Note the spread of a batch's logits, [N, K], which says how far its loss is rounded."""
        if self._eps > _FLOAT32 and not torch.is_grad_enabled():  # some of it in half precision
            some = logits[:_LOOKED_AT]
            self._spreads.append(some[some.isfinite()].float().std())  # a masked token's is -inf

    @torch.no_grad()
    def losses(self) -> dict[str, Tensor]:
        """By side, the losses of the step's batches at the present weights, by its masks, 0-dim."""
        losses: dict[str, Tensor] = {}
        exact = without_tf32() if rounds_to_tf32(self._model) else nullcontext()
        kept = torch.random.fork_rng(self._gpus)
        with kept, exact, without_autocast(self._model), restored(self._model.buffers()):
            for side, loss, _, (of_host, *of_gpus) in self._passes:
                torch.set_rng_state(of_host)
                for gpu, state in zip(self._gpus, of_gpus, strict=True):
                    torch.cuda.set_rng_state(state, gpu)
                losses[side] = losses.get(side, 0.0) + loss()
        if is_sharded(self._model):
            from hamu.core.distributed.sharded import reshard

            reshard(self._model)
        return losses

    def roughness(self) -> float:
        """Rounding of the difference of two losses of a model in half precision.

        Each logit is off by half a last digit, independently; a mean over n by 1/√n of that.
        """
        if not self._spreads:
            return 0.0
        fewest = min(float(count) for *_, count, _ in self._passes)
        spread = torch.stack(self._spreads).double().square().max()
        self._spreads.clear()
        # over all processes, which must judge a step alike
        return _ROUGH * self._eps * (all_reduced(spread) / world_size() / fewest).sqrt().item()


class CheckSchedule:
    """Steps to check: every n-th, or of the logged ones in 5 % of a run's time with the log.

    Of these the first is checked, and the next one once 5 % of the time that has passed is more
    than log and checks so far have taken and one more will; judged at each check, by all processes.
    """

    def __init__(self, every: int | None, device: torch.device) -> None:
        self._every, self._device = every, device
        self._step = self._next = self._start = 0  # at hand, of the next check, before the first
        self._since = self._took = self._took_before = self._logged = 0.0  # seconds

    def is_due(self, step: int, logged_every: float) -> bool:
        """True if this step (the run's first is 1) is checked."""
        if self._every is not None:
            return self._every > 0 and step % self._every == 0
        if not self._since:  # the first step of this process
            self._since, self._start = time.perf_counter(), step - 1
        self._step = step
        return step >= self._next and step % max(1, int(logged_every)) == 0

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add the time of a part of a check, without that of what the device still has to do."""
        self._synchronize()
        begin = time.perf_counter()
        yield
        self._synchronize()
        self._took += time.perf_counter() - begin

    @contextmanager
    def logged(self) -> Iterator[None]:
        """Add the time of an entry of the log, since the first step."""
        begin = time.perf_counter()
        yield
        if self._since:
            self._logged += time.perf_counter() - begin

    def checked(self) -> None:
        """Set when the next check is due, after that of the step at hand."""
        if self._every is None:
            passed = time.perf_counter() - self._since - self._took
            expected = 2 * self._took - self._took_before  # if one more takes as long as the last
            device = self._device if world_size() > 1 else "cpu"
            times = all_reduced(torch.tensor([expected, passed, self._logged], device=device))
            expected, passed, logged = times.tolist()
            passed = max(passed, 1e-9)
            share = max(_LEAST, _SHARE - logged / passed)
            of_a_step = passed / (self._step - self._start)
            steps = math.ceil(expected * (1 / share - 1) / of_a_step)
            self._next = max(self._step + 1, self._start + steps)
            self._took_before = self._took

    def _synchronize(self) -> None:
        if self._every is None and self._device.type in ("cuda", "xpu"):
            getattr(torch, self._device.type).synchronize()


class StepWatch(TrainerCallback):
    """Watch a run; `on_undone` takes a step that was undone, True if no smaller one is left."""

    def __init__(
        self,
        pair: PairedGradients,
        args: UnlearnConfig,
        model: nn.Module,
        sides: Sequence[str],
        on_undone: Callable[[bool], object],
    ) -> None:
        self._pair, self._args, self._sides, self._on_undone = pair, args, sides, on_undone
        self._model, self._device = model, pair.parameters[0].device
        self._guard: StepGuard | None = None
        self.begin()

    def begin(self) -> None:
        """Begin a run: nothing is checked yet."""
        args = self._args
        self.passes = RepeatedPasses(self._model)  # of a step that is checked
        self.step: PairStep | None = None  # at hand; None if the run ended before it
        self.figures: dict[str, float] = {}  # of its check
        self.record = PromiseRecord()
        self.scale = 1.0 if args.trust_region else None  # on the rate of the step to come
        is_logged = args.logging_strategy == IntervalStrategy.STEPS
        every = args.check_steps if is_logged else args.check_steps or 0
        self.schedule = CheckSchedule(1 if args.trust_region else every, self._device)

    def keep(self, optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
        """Sides whose gradients `combine` is to keep for the step to come."""
        is_plain = is_plain_descent(optimizer, self._pair.parameters)
        is_plain &= not self._pair.method.retain_decay  # whose promises are for a mean of gradients
        can_keep, corrects = self._pair.can_keep, self._args.correct_steps
        if not can_keep and not is_plain:
            self.passes.clear()  # only both gradients would tell what became of g*
        measures = bool(self.passes) and (corrects or not is_plain) and can_keep
        self._guard = None
        if corrects or measures or self.scale is not None:
            sides = tuple(self._sides) if measures else ()
            self._guard = StepGuard(self._pair, optimizer, correct_steps=corrects, keep=sides)
        return () if self._guard is None else self._guard.keep

    def take(self, step: PairStep | None, losses: Mapping[str, Tensor], scaler: Any = None) -> None:
        """Take the step at hand, None if the run ends, and its losses; the optimizer comes next."""
        self.step, self._losses, self._scaler, self.figures = step, losses, scaler, {}
        if not self.is_taken:
            self.passes.clear()

    @property
    def is_taken(self) -> bool:
        """True if the step at hand moves the weights."""
        return self.step is not None and self.step.decision == "step"

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Prepare for the optimizer to move the weights."""
        # the loss scaler would take a step that was not taken for an overflow, and lower its scale
        step, scaler = self.step, self._scaler
        innocent = step is None or (step.decision != "step" and step.finite)
        is_scaled = scaler is not None and scaler.is_enabled()
        self._scaling = scaler.state_dict() if innocent and is_scaled else None
        if step is None or not self.is_taken:
            return
        self._optimizer = optimizer
        self._rates = [group["lr"] for group in optimizer.param_groups]
        if self.scale is not None:
            for group in optimizer.param_groups:
                group["lr"] *= self.scale
        with self.schedule.timed() if self.passes else nullcontext():
            if self.passes:
                is_rounded = self._args.bf16 or self._args.fp16 or rounds_to_tf32(self._model)
                self._before = self._summed(self.passes.losses() if is_rounded else self._losses)
            if self._guard is not None:
                self._guard.before(step)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure what the optimizer did; undo a step that realised nothing of its promise."""
        if self._scaling is not None:
            self._scaler.load_state_dict(self._scaling)
        if self.step is None or not self.is_taken:
            return
        is_undone = False
        with self.schedule.timed() if self.passes else nullcontext():
            corrected = None if self._guard is None else self._guard.after().corrected
            if corrected is not None:
                self.figures["corrected_share"] = corrected.double().mean().item()
            if self.passes:
                is_undone = self._judge(self.step)
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate
        if self._guard is not None:
            self._guard.release()
        if self.passes:
            self.schedule.checked()
        self.passes.clear()
        if is_undone:
            self.step = replace(self.step, decision="skip", reason="it did not do what it promised")
            self._on_undone(self.scale is not None and self.scale <= LEAST_SCALE)

    def _judge(self, step: PairStep) -> bool:
        """Compare promise and outcome; return True if the trust region undid the step."""
        outcome, is_undone = self._outcome(step), False
        if self.scale is not None and self._guard is not None:
            self.figures["trust_scale"] = self.scale
            if outcome.is_told:
                most = float(self._args.trust_region_growth)
                self.scale = next_scale(self.scale, outcome.trust, most)
                is_undone = not outcome.trust > 0
            if is_undone:
                self._guard.undo()
        for side, promised in outcome.promised.items():
            self.figures[f"first_order_{side}_change"] = promised
            self.figures[f"realised_{side}_change"] = outcome.realised[side]
        self.figures["rounding"] = outcome.noise
        if outcome.kept is not None:
            self.figures["promise_kept"] = float(outcome.kept)
        self.figures["trust"] = outcome.trust if math.isfinite(outcome.trust) else -math.inf
        self.record.add(outcome, is_undone=is_undone)
        return is_undone

    def _outcome(self, step: PairStep) -> StepOutcome:
        """Promise and outcome of the step, in one transfer."""
        constraint = step.weights.constraint
        clip: dict[str, Tensor] = dict(zip(SIDES, step.clip, strict=True))
        norms: dict[str, Tensor] = dict(zip(SIDES, step.gradient_norms, strict=True))
        after = self._summed(self.passes.losses())
        changes, length, demand = self._first_order(step, clip)
        constrained = None if constraint is None else constraint.constrained
        realised = {f"{side} realised": loss - self._before[side] for side, loss in after.items()}
        read = read_at_once(after | realised)  # all else is on the host
        # the losses are float32 means: below a few of their last digits nothing can be told
        largest = max(1e-3, *(abs(read[side]) for side in after))
        return StepOutcome(
            promised={side: changes[side].item() for side in after},
            realised={side: read[f"{side} realised"] for side in after},
            reach={side: (norms[side] * length).item() for side in after},
            constrained=constrained,
            demand=0.0 if constrained is None else (demand / clip[constrained]).item(),
            noise=8 * _FLOAT32 * largest + self.passes.roughness(),
            clamped=constraint is not None and bool((constraint.fraction > 1).any()),
        )

    def _first_order(
        self, step: PairStep, clip: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """g·Δw by side, ‖Δw‖, and the demand on the clipped loss: measured, or of plain descent."""
        rate, constraint = float(self._optimizer.param_groups[0]["lr"]), step.weights.constraint
        demand = torch.zeros(()) if constraint is None else rate * constraint.clipped_demand
        if self._guard is not None and set(self._sides) <= set(self._guard.keep):
            taken = self._guard.taken
            changes = {side: getattr(taken, f"{side}_change") for side in self._sides}
            return changes, taken.length, demand if taken.demand is None else taken.demand.sum()
        changes = {side: getattr(step, f"promised_{side}_change") for side in self._sides}
        changes = {side: rate * change / clip[side] for side, change in changes.items()}
        return changes, rate * step.combined_sq.sum().sqrt(), demand

    def _summed(self, losses: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Sum over all processes; with split pairing each has one side's."""
        none = torch.zeros((), device=self._device)
        return {side: all_reduced(losses.get(side, none).double()) for side in self._sides}

    def step_figures(self) -> dict[str, float]:
        """Figures of the step, in one transfer, and of its check; losses alone if the run ended."""
        step, sides = self.step, self._sides
        if step is None or step.losses is None:
            losses = self._summed(self._losses)
        else:  # read with the step's decision
            losses = dict(zip(SIDES, step.losses, strict=True))
        tensors = {f"{side}_loss": losses[side] for side in sides}
        if step is not None:
            norms: dict[str, Tensor] = dict(zip(SIDES, step.gradient_norms, strict=True))
            tensors |= {f"{side}_norm": norms[side] for side in sides}
            if len(sides) == 2:
                tensors |= {"kappa": step.kappa, "cos": step.cos}
            changes = [f"promised_{side}_change" for side in ("retain", "forget")]
            tensors |= {name: getattr(step, name) for name in changes}
            constraint = step.weights.constraint
            if constraint is not None:
                tensors |= {name: getattr(constraint, name) for name in _OF_A_CONSTRAINT}
                tensors["direct_share"] = constraint.direct.double().mean()
        return read_at_once(tensors) | self.figures

    def block_figures(self) -> dict[str, list[float] | None]:
        """cosθ_i and ‖Δw_i‖ of the step by block, [L]; None for what is not known."""
        step, tensors = self.step, {}
        if step is not None and len(self._sides) == 2:
            tensors["cos"] = step.gram.cos
        if step is not None and self.is_taken:
            if self._guard is not None:
                tensors["change"] = self._guard.taken.lengths
            elif is_plain_descent(self._optimizer, self._pair.parameters):
                tensors["change"] = self._rates[0] * step.combined_sq.sqrt()
        return {"cos": None, "change": None} | read_at_once(tensors)

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint."""
        return {"record": asdict(self.record), "scale": self.scale}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.record = PromiseRecord(**state["record"])
        if None not in (self.scale, state["scale"]):  # the settings decide whether there is one
            self.scale = state["scale"]


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


def read_at_once(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Read tensors as numbers; those on the device come in one transfer."""
    there = {key: t for key, t in tensors.items() if t.device.type != "cpu"}
    found = {**tensors, **(on_host(there) if there else {})}
    return {key: t.double().tolist() for key, t in found.items()}
