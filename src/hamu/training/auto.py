"""`--auto`: unlearning by goal. The user says what must go and what may be paid; the rest follows from measurements.

Learning rate from the curvature, constraint from the frontier, radius by the trust region. On the way the demand is set
anew in every step: the largest whose price, for what is still to be forgotten, half of what is left of the budget pays.
What is measured on the data decides: a state that costs more than the budget is taken back, and the next steps are
more careful.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from hamu.assess import Assessment
from hamu.errors import HamuError
from hamu.gram import PairGram
from hamu.methods import HamuQ, StoppingRule
from hamu.paired import PairedGradients, PairStep
from hamu.training.config import UnlearnConfig
from hamu.training.trust_region import TrustRegion

AUTO_GROWTH = 2.0**12  # the trust region finds how far the first learning rate may be left
_FIRST_ERROR_RATIO = 0.5
# the settings that a run by goal finds by itself
TUNED = (
    "learning_rate", "constraint", "constraint_mode", "stopping", "lr_scheduler_type", "trust_region",
    "trust_region_growth",
)  # fmt: skip
_SHARES = (*(round(0.05 * k, 2) for k in range(1, 20)), 0.98)
_PAID_AT_ONCE = 0.5  # of what is left of the budget
_MEMORY = 0.8  # of the mean over steps of the Gram
_LEAST_SHARE = 0.05
_PATIENCE = 6  # times in a row that a state was taken back
_INTERVAL = 10.0  # steps between two measurements, at most


def tuned(args: UnlearnConfig, found: Assessment) -> UnlearnConfig:
    """The settings of a run by goal: learning rate and first constraint from the assessment, the trust region on.

    Raises:
        HamuError: if the curvature was not measured.
    """
    rate = found.trusted_rate(_FIRST_ERROR_RATIO)
    if rate is None:
        raise HamuError("auto needs the curvature for the learning rate; assess with curvature_samples above 0")
    args.learning_rate = rate if math.isfinite(rate) else args.learning_rate
    args.method, args.constraint_mode, args.constraint = "hamu-q", "relative", max(0.05, found.verdict.constraint)
    args.stopping, args.lr_scheduler_type = "off", "constant"  # the steering decides when to stop
    args.trust_region, args.trust_region_growth = True, AUTO_GROWTH
    return args


@dataclass(frozen=True)
class Standing:
    """How a model stands: mean losses on (a sample of) the forget and the retain set, and the forget accuracy."""

    forget_loss: float
    retain_loss: float
    forget_accuracy: float


@dataclass(frozen=True)
class Goal:
    """What must be reached, and at what price.

    Args:
        forget_loss: at least this, None for any.
        forget_accuracy: at most this, None for any; where both are given, both.
        max_retain_increase: how far the retain loss may rise.
    """

    forget_loss: float | None
    forget_accuracy: float | None
    max_retain_increase: float

    @classmethod
    def of(cls, args: UnlearnConfig) -> Goal:
        """The goal that the settings name."""
        assert args.max_retain_increase is not None
        return cls(args.target_forget_loss, args.target_forget_accuracy, args.max_retain_increase)

    def reached(self, now: Standing) -> bool:
        """Whether the run is done."""
        if self.forget_loss is not None and now.forget_loss < self.forget_loss:
            return False
        return self.forget_accuracy is None or now.forget_accuracy <= self.forget_accuracy

    def missing(self, now: Standing) -> float:
        """The forget loss that is still to be gained; of an accuracy, what it is likely to take."""
        missing = [0.0]
        if self.forget_loss is not None:
            missing.append(self.forget_loss - now.forget_loss)
        if self.forget_accuracy is not None and now.forget_accuracy > self.forget_accuracy:
            missing.append(max(0.1, -math.log(max(self.forget_accuracy, 0.01)) - now.forget_loss))
        return max(missing)


class Steering(TrainerCallback):
    """Sets the demand of each step, measures, takes back what cost too much, and ends the run.

    Args:
        pair: whose method's constraint is set.
        goal: where to.
        measure: how the model stands; called every few steps.
        end: called once with the reason.
    """

    def __init__(
        self, pair: PairedGradients, goal: Goal, measure: Callable[[], Standing], end: Callable[[str], None]
    ) -> None:
        self._pair, self._goal, self._measure, self._end = pair, goal, measure, end
        self.trust: TrustRegion | None = None
        self._mean: list[Tensor] | None = None
        self._eps = 0.0
        self._start = self._now = Standing(math.nan, math.nan, math.nan)  # until the run begins
        self._cap = 1.0
        self._taken_back = 0
        self._interval = _INTERVAL
        self._due = _Due()
        self.history: list[dict[str, float]] = []
        self.ended = False
        self._settled = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Where the run starts from, unless it is resumed."""
        if state.global_step:
            return
        self._start = self._now = self._measure()
        self._good = [p.detach().clone() for p in self._pair.parameters]
        if self._goal.reached(self._now):
            self._finish(f"the goal is reached at the start: {self._words(self._now)}")

    def demand(self, step: PairStep, rate: float) -> None:
        """After a step was weighed: learn from its Gram, and set the demand of the next."""
        clip = [factor.cpu() for factor in step.clip]
        raw = [step.gram.retain_sq / step.clip[0] ** 2, step.gram.forget_sq / step.clip[1] ** 2]
        values = [v.detach().cpu() for v in (*raw, step.gram.dot / (step.clip[0] * step.clip[1]))]
        self._eps = step.gram.eps
        if not all(torch.isfinite(v).all() for v in values):
            return
        old = self._mean or values
        self._mean = [_MEMORY * m + (1 - _MEMORY) * v for m, v in zip(old, values, strict=True)]
        if step.decision == "step":
            scale = rate * (1.0 if self.trust is None else self.trust.scale)
            self._due.add(
                scale * step.promised_forget_change.item() / clip[1].item(),
                scale * max(0.0, step.promised_retain_change.item()) / clip[0].item(),
            )
        share, price = self._choose()
        if self._goal.max_retain_increase <= 0 and price > 0:
            self._finish(
                f"the criterion says that every further step must hurt: even a demand of {_LEAST_SHARE:.0%} of what is "
                f"possible costs {price:.3g} retain loss per 1 of forget loss"
            )
        self._pair.method = replace(self._method, constraint=share)

    @property
    def _method(self) -> HamuQ:
        method = self._pair.method
        assert isinstance(method, HamuQ)
        return method

    def _choose(self) -> tuple[float, float]:
        """The largest share of what is possible that the budget pays for, and its price; the least if it pays none."""
        assert self._mean is not None
        gram = PairGram(*self._mean, eps=self._eps)
        clip = gram.clip_factors(self._pair.max_grad_norm)
        gram = gram.scaled(*clip)
        left = max(0.0, self._goal.max_retain_increase - (self._now.retain_loss - self._start.retain_loss))
        missing = self._goal.missing(self._now)
        chosen, at = _LEAST_SHARE, 0.0
        for share in _SHARES:
            weights = HamuQ(share, "relative", stopping=StoppingRule("off")).weigh(gram)
            a, b = weights.retain, weights.forget
            retain = -(a * gram.retain_sq + b * gram.dot).sum() / clip[0]
            forget = -(a * gram.dot + b * gram.forget_sq).sum() / clip[1]
            price = (retain / forget).item() if forget > 0 else math.inf
            if share == _LEAST_SHARE:
                at = price
            if share <= self._cap and max(0.0, price) * missing <= _PAID_AT_ONCE * left:
                chosen, at = share, price
        return chosen, at

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure when it is due; keep the state, or take it back."""
        left = self._goal.max_retain_increase - (self._now.retain_loss - self._start.retain_loss)
        last = state.global_step >= state.max_steps or control.should_training_stop or self.ended
        if self._settled or not (last or self._due.now(self._interval, self._goal.missing(self._now), left)):
            return
        self._due = _Due()
        self._settled = last
        now = self._measure()
        increase = now.retain_loss - self._start.retain_loss
        self.history.append({"step": state.global_step, **vars(now), "demand": self._method.constraint})
        finite = math.isfinite(now.forget_loss) and math.isfinite(increase)
        if finite and increase <= max(self._goal.max_retain_increase, 0.0) + 1e-12:
            self._keep(now)
            return
        with torch.no_grad():
            torch._foreach_copy_(list[Tensor](self._pair.parameters), self._good)
        self._taken_back += 1
        self._cap = max(_LEAST_SHARE, 0.6 * self._method.constraint)
        self._interval = max(1.0, 0.5 * self._interval)
        if self.trust is not None:
            self.trust.scale *= 0.25
            self.trust.most = 2.0 * self.trust.scale
        if self._taken_back >= _PATIENCE:
            self._finish(
                f"the budget is spent: {_PATIENCE} times in a row further steps raised the retain loss by more than "
                f"{self._goal.max_retain_increase:g} and were taken back; {self._words(self._now)}"
            )

    def _keep(self, now: Standing) -> None:
        if now.forget_loss > self._now.forget_loss:
            self._taken_back = 0
            self._cap = min(1.0, 1.3 * self._cap)
            self._interval = min(_INTERVAL, 1.5 * self._interval)
            if self.trust is not None:
                self.trust.most = min(AUTO_GROWTH, 2.0 * self.trust.most)
        self._now = now
        with torch.no_grad():
            torch._foreach_copy_(self._good, list[Tensor](self._pair.parameters))
        if self._goal.reached(now):
            self._finish(f"the goal is reached: {self._words(now)}")

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint; see also `tensors`."""
        return {
            "start": vars(self._start),
            "now": vars(self._now),
            "mean": None if self._mean is None else [m.tolist() for m in self._mean],
            "eps": self._eps,
            "cap": self._cap,
            "taken_back": self._taken_back,
            "interval": self._interval,
            "due": vars(self._due),
            "history": self.history,
            "ended": self.ended,
            "settled": self._settled,
            "constraint": self._method.constraint,
            "most": None if self.trust is None else self.trust.most,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._start, self._now = Standing(**state["start"]), Standing(**state["now"])
        self._mean = state["mean"] and [torch.tensor(m, dtype=torch.float64) for m in state["mean"]]
        self._eps, self._cap = state["eps"], state["cap"]
        self._taken_back, self._interval = state["taken_back"], state["interval"]
        vars(self._due).update(state["due"])
        self.history, self.ended, self._settled = state["history"], state["ended"], state["settled"]
        self._pair.method = replace(self._method, constraint=state["constraint"])
        if self.trust is not None:
            self.trust.most = state["most"]

    def tensors(self) -> dict[str, Tensor]:
        """The good state, by parameter, for a checkpoint."""
        return {name: good.cpu().contiguous() for name, good in zip(self._pair.names, self._good, strict=True)}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Restore what `tensors` returned."""
        named = zip(self._pair.names, self._pair.parameters, strict=True)
        self._good = [tensors[name].to(p).clone() for name, p in named]

    @property
    def outcome(self) -> str:
        """Where the run ended, in words."""
        how = "reached" if self._goal.reached(self._now) else "not reached"
        return f"the goal is {how}: {self._words(self._now)}"

    def _words(self, now: Standing) -> str:
        return (
            f"forget loss {now.forget_loss:.4g}, forget accuracy {now.forget_accuracy:.1%}, retain loss "
            f"{now.retain_loss - self._start.retain_loss:+.4g}"
        )

    def _finish(self, reason: str) -> None:
        if not self.ended:
            self.ended = True
            self._end(reason)


class _Due:
    """When to measure: once what was promised since the last time matters, or after some steps."""

    def __init__(self) -> None:
        self._steps, self._gained, self._paid = 0, 0.0, 0.0

    def add(self, gained: float, paid: float) -> None:
        self._steps += 1
        self._gained += gained
        self._paid += paid

    def now(self, interval: float, missing: float, left: float) -> bool:
        return self._steps >= interval or self._gained >= 0.2 * missing or self._paid >= 0.25 * max(left, 0.0) > 0
