"""The steering of a run by goal (`--auto`).

The demand is set anew in every step: the largest whose price, for what is still to be forgotten, three quarters of
what is left of the budget pay. A search on the step's own batches sets its length. What is measured on the data
decides: what pays is carried on further, of what costs more than the budget as much is kept as the budget pays for, and
the next steps are more careful.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import TrainerCallback

from hamu.ends import End
from hamu.errors import HamuError
from hamu.gram import SIDES, PairGram
from hamu.methods import HamuQ, StoppingRule, Weights
from hamu.pair_step import PairStep
from hamu.paired import PairedGradients
from hamu.training.data_search import HALVINGS, DataSearch
from hamu.training.goal import Goal, Standing
from hamu.training.line_search import LineSearch
from hamu.training.trust_region import TrustRegion
from hamu.training.unseen import Change

MOST_GROWTH = 2.0**12  # how far the learning rate at the start may be left
# of what is possible; at 0.75 two thirds of the radius still go to the retain loss, and 0.98 would leave a fifth of it
_SHARES = tuple(round(0.05 * k, 2) for k in range(1, 16))
_PAID_AT_ONCE = 0.75  # of what is left of the budget
_MEMORY = 0.8  # of the mean over steps of the Gram
_LEAST_SHARE = 0.05
_PATIENCE = 6  # times in a row that a state was taken back
_SPENT = 0.9  # of the budget, from where on it counts as spent
_LEAST_MISSING = 0.1  # of what was missing when it was last measured, whatever the steps since seem to have gained
_INTERVAL = 10.0  # steps between two measurements, at most; 1 at the start
_GOOD_STATE = "steering.safetensors"  # in a checkpoint


class Steering(TrainerCallback):
    """Sets the demand of each step, measures, takes back what cost too much, and ends the run.

    Args:
        pair: whose method's constraint is set.
        goal: where to.
        measure: how the model stands; called every few steps.
        end: called once, with the end of the run.
        search: sets the length of each step; is aimed before each, and learns from what is measured.
        trust: the trust region of the steps, which is widened and narrowed by what is measured; None without.
    """

    def __init__(
        self,
        pair: PairedGradients,
        goal: Goal,
        measure: Callable[[], Standing],
        end: Callable[[End], None],
        *,
        search: LineSearch,
        trust: TrustRegion | None = None,
    ) -> None:
        self._pair, self._goal, self._measure, self._end = pair, goal, measure, end
        self.search, self._trust = search, trust
        self._mean: list[Tensor] | None = None
        self._eps = 0.0
        self._start = self._now = Standing(math.nan, math.nan, math.nan)  # until the run begins
        self._share = self._cap = 1.0
        self._taken_back = 0
        self._least_price = 0.0  # retain loss per 1 of forget loss; until a demand is chosen
        self._interval = 1.0
        self._due = _Due()
        self._move = DataSearch(pair.parameters, self._look_along)
        self.history: list[dict[str, float]] = []
        self.ended = False
        self._final_measurement_done = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure where the run starts from, unless it is resumed, and keep that state."""
        if state.global_step:
            return
        self._start = self._now = self._measure()
        for side, loss in (("forget", self._now.forget_loss), ("retain", self._now.retain_loss)):
            if not math.isfinite(loss):
                raise HamuError(
                    f"the loss on the {side} set is {loss} at the start, and no goal can be told by it; leave out the "
                    f"records whose loss is not finite"
                )
        self._move.keep()
        if self._goal.reached(self._now):
            self._finish(End("goal", f"the goal is reached at the start: {self._words(self._now)}"))

    def plan_from(self, step: PairStep, rate: float) -> None:
        """After a step was weighed: learn from its Gram, aim its length, and set the demand of the next."""
        self.search.taken = {side: Change() for side in SIDES}
        self._share = self._method.constraint
        self._eps = step.gram.eps
        values, own = _unclipped(step)
        if not all(torch.isfinite(v).all() for v in values):
            return
        old = self._mean or values
        self._mean = [_MEMORY * m + (1 - _MEMORY) * v for m, v in zip(old, values, strict=True)]
        missing = self._goal.missing(self._now)
        gained, paid = self.search.on_data(self._due.taken)
        self.search.aim(
            max(missing - gained, _LEAST_MISSING * missing),
            _PAID_AT_ONCE * max(0.0, self._left - max(0.0, paid)),
            {side: -rate * value for side, value in own.items()},
        )
        self._set_demand()

    def _set_demand(self) -> None:
        """Set the demand of the next step; end the run where the least of it has a price and none may be paid."""
        if self._mean is None:
            return
        share, self._least_price = self._choose()
        if self._goal.max_retain_increase <= 0 and self._least_price > 0:
            self._finish(End("criterion", self._must_hurt))
        self._pair.method = replace(self._method, constraint=share)

    @property
    def _left(self) -> float:
        """The retain loss that is left of the budget."""
        return max(0.0, self._goal.max_retain_increase - (self._now.retain_loss - self._start.retain_loss))

    @property
    def _method(self) -> HamuQ:
        method = self._pair.method
        assert isinstance(method, HamuQ)
        return method

    def _choose(self) -> tuple[float, float]:
        """The largest share of what is possible that the budget pays for, or else the least; and the price of the least
        by the batches' own word, which says too little rather than too much.
        """
        assert self._mean is not None
        gram = PairGram(*self._mean, eps=self._eps)
        clip = gram.clip_factors(self._pair.max_grad_norm)
        gram = gram.scaled(*clip)
        left, missing = self._left, self._goal.missing(self._now)
        chosen, least_price = _LEAST_SHARE, 0.0
        seen = {side: 1.0 - self.search.unseen[side].noise for side in SIDES}
        for share in _SHARES:
            weights = HamuQ(share, "relative", stopping=StoppingRule("off")).weigh(gram)
            shown, real = (_price(gram, weights, clip, parts) for parts in (dict.fromkeys(SIDES, 1.0), seen))
            if share == _LEAST_SHARE:
                least_price = shown
            if share <= self._cap and max(0.0, real) * missing <= _PAID_AT_ONCE * left:
                chosen = share
        return chosen, least_price

    @torch.no_grad()
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure when it is due; keep the state, or take it back."""
        self._due.add(self.search.taken)
        last = state.global_step >= state.max_steps or control.should_training_stop or self.ended
        gained, paid = self.search.on_data(self._due.taken)
        due = (
            self._due.steps >= self._interval
            or gained >= 0.2 * self._goal.missing(self._now)
            or paid >= 0.25 * self._left > 0
        )
        if self._final_measurement_done or not (last or due):
            return
        self._final_measurement_done = last
        now = self._look(state.global_step)
        self._learn(now, 1.0)
        self._accept_or_take_back(now)
        self._due = _Due()
        self._set_demand()

    def _learn(self, now: Standing, kept: float) -> None:
        """What the data see of what was done since the last time, of which this share is kept."""
        changes = {side: change.stretched(kept) for side, change in self._due.taken.items()}
        seen = {"forget": now.forget_loss - self._now.forget_loss, "retain": now.retain_loss - self._now.retain_loss}
        self.search.learn(changes, seen)

    def _accept_or_take_back(self, now: Standing) -> None:
        """Go on with what was done as far as that pays, or keep as much of it as the budget pays for, or nothing."""
        if self._is_paid(now):
            found = self._move.farther(self._now, now, self._is_worth, self._goal.reached)
            if found.length > 1:
                self._be_bold(found.length)
            self._keep(found.standing)
            return
        kept = self._move.nearer(lambda s: self._is_paid(s) and s.forget_loss > self._now.forget_loss)
        self._be_careful(0.5**HALVINGS if kept is None else kept.length)
        if kept is not None:
            self._taken_back = 0
            self._accept(kept.standing)
            return
        self._taken_back += 1
        if self._taken_back >= _PATIENCE:
            self._finish(self._too_dear())

    def _too_dear(self) -> End:
        """The end after steps that were taken back: of the budget, or of what still fits into it."""
        budget, left, where = self._goal.max_retain_increase, self._left, self._words(self._now)
        if left <= (1.0 - _SPENT) * budget:
            why = f"{_PATIENCE} times in a row further steps raised the retain loss by more than {budget:g}"
            return End("budget", f"the budget is spent: {why} and were taken back; {where}")
        why = (
            f"every further step costs more than the {left:.3g} that are left of the budget of {budget:g}: {_PATIENCE} "
            f"times in a row they were taken back; {where}"
        )
        return End("criterion", f"{self._must_hurt}, and {why}") if self._least_price > 0 else End("budget", why)

    @property
    def _must_hurt(self) -> str:
        """What the criterion says where even the least demand has a price."""
        price = self._least_price
        costs = "gains no forget loss" if math.isinf(price) else f"costs {price:.3g} retain loss per 1 of forget loss"
        return (
            f"the criterion says that every further step must hurt: even a demand of {_LEAST_SHARE:.0%} of what is "
            f"possible {costs}"
        )

    def _look_along(self, length: float) -> Standing:
        """Measure at this share of what was done since the last time, and learn from that."""
        now = self._look(self.history[-1]["step"], length)
        self._learn(now, length)
        return now

    def _look(self, step: int, length: float = 1.0) -> Standing:
        now = self._measure()
        self.history.append({"step": step, **vars(now), "demand": self._method.constraint, "length": length})
        return now

    def _is_paid(self, now: Standing) -> bool:
        """Whether the budget covers what this state costs."""
        increase = now.retain_loss - self._start.retain_loss
        finite = math.isfinite(now.forget_loss) and math.isfinite(increase)
        return finite and increase <= max(self._goal.max_retain_increase, 0.0) + 1e-12

    def _is_worth(self, now: Standing) -> bool:
        """Whether a state costs no more of what is left of the budget than its share of what is missing."""
        gained, paid = now.forget_loss - self._now.forget_loss, now.retain_loss - self._now.retain_loss
        share = min(1.0, gained / self._goal.missing(self._now))
        return self._is_paid(now) and paid <= _PAID_AT_ONCE * self._left * share

    def _be_bold(self, length: float) -> None:
        """Allow longer steps, after some that paid when they were carried on to this many times their length."""
        if self._trust is not None:
            self._trust.scale *= length
            self._trust.most = min(MOST_GROWTH, max(self._trust.most, 2.0 * self._trust.scale))

    def _be_careful(self, kept: float) -> None:
        """Demand less and measure sooner, after steps of which only this share could be kept."""
        self._cap = max(_LEAST_SHARE, 0.6 * self._share)
        self._interval = max(1.0, 0.5 * self._interval)
        if self._trust is not None:
            self._trust.scale *= kept
            self._trust.most = 2.0 * self._trust.scale

    def _keep(self, now: Standing) -> None:
        if now.forget_loss > self._now.forget_loss:
            self._taken_back = 0
            self._cap = min(1.0, 1.3 * self._cap)
            self._interval = min(_INTERVAL, 1.5 * self._interval)
            if self._trust is not None:
                self._trust.most = min(MOST_GROWTH, 2.0 * self._trust.most)
        self._accept(now)

    def _accept(self, now: Standing) -> None:
        self._now = now
        self._move.keep()
        if self._goal.reached(now):
            self._finish(End("goal", f"the goal is reached: {self._words(now)}"))

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of it, as JSON holds it; the good state is in a file of its own."""
        return {
            "start": vars(self._start),
            "now": vars(self._now),
            "mean": None if self._mean is None else [m.tolist() for m in self._mean],
            "eps": self._eps,
            "cap": self._cap,
            "taken_back": self._taken_back,
            "least_price": self._least_price,
            "interval": self._interval,
            "due": {
                "steps": self._due.steps,
                "taken": {side: vars(change) for side, change in self._due.taken.items()},
            },
            "search": self.search.state_dict(),
            "history": self.history,
            "ended": self.ended,
            "settled": self._final_measurement_done,
            "constraint": self._method.constraint,
            "most": None if self._trust is None else self._trust.most,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._start, self._now = Standing(**state["start"]), Standing(**state["now"])
        self._mean = state["mean"] and [torch.tensor(m, dtype=torch.float64) for m in state["mean"]]
        self._eps, self._cap = state["eps"], state["cap"]
        self._least_price, self._taken_back, self._interval = (
            state[name] for name in ("least_price", "taken_back", "interval")
        )
        self._due.steps = state["due"]["steps"]
        self._due.taken = {side: Change(**change) for side, change in state["due"]["taken"].items()}
        self.search.load_state_dict(state["search"])
        self.history, self.ended, self._final_measurement_done = state["history"], state["ended"], state["settled"]
        self._pair.method = replace(self._method, constraint=state["constraint"])
        if self._trust is not None:
            self._trust.most = state["most"]

    def save_good_state(self, folder: Path) -> None:
        """Write the state that the run would go back to, by parameter, into a checkpoint."""
        named = zip(self._pair.names, self._move.good, strict=True)
        save_file({name: good.cpu().contiguous() for name, good in named}, folder / _GOOD_STATE)

    def load_good_state(self, folder: Path) -> None:
        """Restore what `save_good_state` has written; a checkpoint of a run without a goal has none."""
        if (folder / _GOOD_STATE).is_file():
            tensors = load_file(folder / _GOOD_STATE)
            named = zip(self._pair.names, self._pair.parameters, strict=True)
            self._move.good = [tensors[name].to(p).clone() for name, p in named]

    @property
    def goal_sentence(self) -> str:
        """Where the run ended, in words."""
        how = "reached" if self._goal.reached(self._now) else "not reached"
        return f"the goal is {how}: {self._words(self._now)}"

    def _words(self, now: Standing) -> str:
        return (
            f"forget loss {now.forget_loss:.4g}, forget accuracy {now.forget_accuracy:.1%}, retain loss "
            f"{now.retain_loss - self._start.retain_loss:+.4g}"
        )

    def _finish(self, end: End) -> None:
        if not self.ended:
            self.ended = True
            self._end(end)


class _Due:
    """What was done since the losses were last measured."""

    def __init__(self) -> None:
        self.steps, self.taken = 0, {side: Change() for side in SIDES}

    def add(self, taken: dict[str, Change]) -> None:
        self.steps += 1
        self.taken = {side: self.taken[side] + taken[side] for side in SIDES}


def _unclipped(step: PairStep) -> tuple[list[Tensor], dict[str, float]]:
    """The Gram of the gradients as they were before clipping, three times [L] on the host, and by side a_i ‖g_i‖²
    summed over the blocks, of the losses as they are; one transfer.
    """
    gram, (retain, forget) = step.gram, step.clip
    blocks = [gram.retain_sq / retain**2, gram.forget_sq / forget**2, gram.dot / (retain * forget)]
    own = [(step.weights.retain * gram.retain_sq).sum() / retain, (step.weights.forget * gram.forget_sq).sum() / forget]
    read = torch.cat([*blocks, torch.stack(own)]).detach().cpu()
    return list(read[: -len(SIDES)].chunk(3)), dict(zip(SIDES, read[-len(SIDES) :].tolist(), strict=True))


def _price(gram: PairGram, weights: Weights, clip: tuple[Tensor, Tensor], seen: Mapping[str, float]) -> float:
    """Retain loss per 1 of forget loss, to first order, if the data see these shares, by side, of what batches do for
    themselves; infinite where no forget loss is gained.
    """
    a, b = weights.retain, weights.forget
    forget = -(a * gram.dot + seen["forget"] * b * gram.forget_sq).sum() / clip[1]
    retain = -(seen["retain"] * a * gram.retain_sq + b * gram.dot).sum() / clip[0]
    return (retain / forget).item() if forget > 0 else math.inf
