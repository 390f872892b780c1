"""The controller of a run by goal: sets demand and rate, measures records, keeps a good state.

It minimises the retain loss under the constraint that a share of the forget records reach their
targets, with HAMU-Q on the bounded objective as the engine:

    repeat
        k steps of HAMU-Q with demand φ at rate η
        take the mean of the weights over them (Polyak averaging; not in a lasting run)
        measure every forget record and some retain records
        keep the state if it is within the budget and has the most records forgotten so far, or as
            many and less missing (once the share is reached: with fewer too high; a lasting run:
            any that has the share, for the longer it has run, the better it lasts); by all retain
            records where some cannot tell, to three standard errors, if it is within the budget,
            as often as half of the time allows; else it is not kept
        end if the share is reached within the budget, by all retain records too, and at most a
            tenth is too high (a lasting run: if it is reached after fine-tuning a copy, in two
            cycles in a row within the budget, however high)
        the budget is exceeded           ->  φ halved: the steps repair the retain loss. If φ was
            above a fifth (φ a tenth then; not in a lasting run), or the loss still rises at the
            least φ (η halved): back to the best state, unless half of what that misses is done (a
            lasting run: even then)
        half of it is left, no progress  ->  φ up by a quarter (a lasting run: also with progress,
            but not after a cycle that passed)
        far beyond it, or NaN            ->  back to the best state; φ lowered so, and η halved
        more and more records too high   ->  η down by a quarter; as well if more is missing than
            before (a lasting run: only if the share was reached, and is lost again)
        no progress                      ->  η up by a quarter (not lasting yet: by a half; not
            after a cycle that passed)

Large demands reach an easy goal in few steps. A hard one needs small demands: the cost of large
ones shows late, because of momentum, and takes long to repair.

It ends with the state kept last: of all that were measured within the budget, the start included,
the one that has the most records forgotten, or with the share the fewest too high; in a lasting
run, the latest that has the share, if one has. It ends: k steps have a bound, and so has their
number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from hamu.core.gram import SIDES
from hamu.core.methods import HamuQ
from hamu.core.pair import PairStep
from hamu.data.forget_sets import rows_of
from hamu.errors import HamuError
from hamu.unlearning import goals
from hamu.unlearning.goals import ALL_DONE, BY_A_CALLBACK, LEVEL, Goal, Standing, StopReason

if TYPE_CHECKING:
    from hamu.unlearning.goal_run import GoalRun

LEAST_DEMAND, _SLOW_DEMAND, MOST_DEMAND = 0.05, 0.1, 0.8  # shares of what is possible
_FAR, _FAR_LOSS = 5.0, 0.1  # times the budget, at least this: beyond, a run goes back
_RATE = 0.004  # of the typical size of a trained weight, as the first rate
_RATE_OF_A_NEW_ADAPTER = 5e-4  # whose weights have no size yet
_WARM_UP = 20  # steps
_MOST_GROWTH, _LEAST_GROWTH = 8.0, 1 / 16  # of the rate
_TOO_HIGH = 2 * LEVEL  # of the records: twice what chance explains
_PROGRESS = 0.9  # of what was missing may still be missing at the next measurement
_WORTH_REPAIR = 0.5  # of what the best state misses, at most
_REHEARSALS = 2  # in a row that a lasting run has to stand
_REHEARSED = "forgotten_after_fine_tuning"
# Measurements (rehearsals) without a better state or less missing, before a run gives up
_PATIENCE, _PATIENCE_IF_LASTING = 30, 12
_AS_LOW = {"unseen": "the test data have", "retrained": "the retain model has"}
_SAVED = (
    *("rate", "history", "ended", "reached", "start_loss", "steps_of_best", "_first_rate", "_free"),
    *("_best_count", "_best_cost", "_best_missing", "_records", "_least_missing", "_last_missing"),
    *("_last_cost", "_idle", "_lasted", "_last_too_high", "_in_mean", "_beyond", "_good", "_mean"),
    *("_best_too_high", "_checked_at", "updates_of_best", "_undone"),
)


class Controller(TrainerCallback):
    """Controls a run by goal; see above.

    Args:
        work: what is controlled.
        goal: what forgotten means, and for how many records.
        budget: how far the retain loss may rise, in nats.
        every: steps between two measurements.
    """

    def __init__(self, work: GoalRun, goal: Goal, budget: float, every: int) -> None:
        self._work, self._goal, self.budget, self.every = work, goal, budget, every
        self._first_demand = self._method.constraint
        self._patience = _PATIENCE if work.lookahead is None else _PATIENCE_IF_LASTING
        self._start_anew()

    def _start_anew(self) -> None:
        self._work.pair.method = replace(self._method, constraint=self._first_demand)
        self.history: list[dict[str, Any]] = []  # an entry for each measurement
        self.ended = self.reached = False  # reached: ahead too, if it looks ahead
        self.rate = self.rate_of_step = self._first_rate = 0.0
        self.start_loss = math.nan  # the budget counts from it
        self._best_count, self._best_cost, self._records, self._best_too_high = -1, math.inf, 0, 0
        self._best_missing = self._least_missing = self._last_missing = self._last_cost = math.inf
        self._idle = self._lasted = self._last_too_high = self._checked_at = 0
        self.steps_of_best = self.updates_of_best = 0  # taken until then, and left in its weights
        self._undone = 0  # steps taken that the weights have lost by going back
        self._beyond = 0.0  # rise over all retain records less that of the measured, last known
        self._free: list[bool] = []
        self._good: list[Tensor] = []
        self._mean: list[Tensor] = []  # of the weights since the last measurement
        self._in_mean = 0  # steps
        self._constraint: Any = None
        self._optimizer: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure the start, unless the run is resumed, and end there if the goal is reached."""
        if state.global_step:
            return
        self._start_anew()
        self.rate = self._first_rate = first_rate(self._work.pair.parameters)
        self._check_retain_model()
        now = self._work.stand()
        if not (now.is_finite and self._goal_is_finite(now)):
            raise self._not_finite(now.retain_loss)
        self.start_loss = now.retain_loss
        self._keep(now)
        self._note(now, 0)
        self._work.focus(now)
        self.reached = self._is_there(now)
        if self.reached and not self._stands_out(now):
            words = f"the goal is reached at the start: {self._words()}"
            if (low := _AS_LOW.get(self._goal.kind)) is not None:
                words += f"; before any step that says only that {low} losses as low"
            more = "a higher" if self._goal.kind == "loss" else "--goal loss"
            self._finish("goal", f"{words}; {more} --target_forget_loss asks for more")
        elif self._work.lookahead is not None:
            self._rehearse()  # what it takes from the start model tells nothing

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse a run whose start has a retain loss that is not finite, among all records."""
        start = kwargs["metrics"].get("eval_retain_loss", 0.0)
        if not (state.global_step or math.isfinite(start) or math.isnan(self.start_loss)):
            raise self._not_finite(start)

    def _not_finite(self, retain_loss: float) -> HamuError:
        return HamuError(
            f"the model's losses are not finite at the start (retain loss {retain_loss}); "
            f"{self._way_out()}"
        )

    def _check_retain_model(self) -> None:
        """Refuse a retain model that has no finite loss for a record to compare with."""
        reference = getattr(self._work.goal, "reference", None)
        if self._goal.kind != "retrained" or reference is None:
            return
        is_broken = ~goals.record_losses(reference).isfinite()
        if is_broken.any():
            rows = rows_of(self._work.trainer.evaluations.sets["forget"])[is_broken].tolist()
            raise HamuError(
                f"the retain model's losses are not finite for forget rows, first "
                f"{', '.join(map(str, rows[:3]))}; leave these out, or give another retain model"
            )

    def _goal_is_finite(self, now: Standing) -> bool:
        """True if no unseen loss is NaN, and none that is infinite is a target."""
        reference = getattr(self._work.goal, "reference", None)
        if self._goal.kind != "unseen" or reference is None:
            return True
        has_nan = goals.record_losses(reference).isnan().any()
        return bool(now.targets.aim.isfinite().all() & ~has_nan)

    def _way_out(self) -> str:
        """Name up to three records whose loss is not finite, by side and row, or the model."""
        looks, found = self._work.trainer.evaluations, []
        for side in (*SIDES, "test") if self._goal.kind == "unseen" else SIDES:
            data, losses = looks.sets[side], goals.record_losses(looks.predict(looks.sets[side]))
            is_broken = losses.isnan() if side == "forget" else ~losses.isfinite()
            if is_broken.all():
                return (
                    f"no {side} record has a finite one: the model is damaged, start from another"
                )
            found += [f"{side} row {row}" for row in rows_of(data)[is_broken].tolist()]
        return f"leave out the records whose loss is not finite, first {', '.join(found[:3])}"

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Set the rate of the step; it rises over the first ones, which Adam takes in full."""
        self.rate_of_step = self.rate * min(1.0, (state.global_step + 1) / _WARM_UP)
        self._optimizer = kwargs["optimizer"]
        for group in self._optimizer.param_groups:
            group["lr"] = self.rate_of_step

    def figures(self) -> dict[str, float]:
        """Rate of the step, and what was measured last, for its log."""
        last = self.history[-1]
        return {
            "learning_rate": self.rate_of_step,
            "forgotten_share": last["forgotten"] / last["records"],
            "retain_rise": _cost_of(last),
        }

    def note(self, step: PairStep) -> None:
        """Keep the step's constraint, which is read when the run is measured next."""
        self._constraint = step.weights.constraint

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure where that is due, and set what follows from it."""
        if self._work.lookahead is None and not self.ended:
            self._average()
        all_done = state.global_step >= state.max_steps
        last = all_done or control.should_training_stop
        is_due = last or state.global_step % self.every == 0 or self._can_rehearse
        if self.ended or not is_due:
            return
        self._measure(state.global_step)
        if not self.ended and last:
            self._end(all_done)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Finish a run that a callback ended after its step, as when it is evaluated."""
        if not self.ended and not self._work.trainer.was_interrupted:
            self._measure(state.global_step)
            if not self.ended:
                self._end(all_done=False)

    def _measure(self, step: int) -> None:
        """Measure the mean of the weights, and set what follows from it."""
        self._take_mean()
        now = self._work.stand()
        self._note(now, step)
        if self._adapt(now):
            now = self._work.stand()
        self._last_missing, self._last_too_high = now.missing, int(now.too_high.sum())
        self._work.focus(now)
        if not self.ended and self._idle >= self._patience:
            self._give_up()

    @property
    def _can_rehearse(self) -> bool:
        """True if a lasting run is at the end of a cycle, where it rehearses fine-tuning."""
        ahead = self._work.lookahead
        return ahead is not None and ahead.at_the_end_of_a_retain_cycle

    def _adapt(self, now: Standing) -> bool:
        """Keep the state, and set demand and rate; return True if the run went back."""
        cost = now.retain_loss - self.start_loss + self._beyond
        error = now.retain_error
        may_be_within = now.is_finite and cost - error <= self.budget
        self._idle += self._work.lookahead is None or self._can_rehearse
        is_there = may_be_within and self._is_there(now)
        is_done = is_there and not self._stands_out(now)
        is_kept = is_done or (may_be_within and self._is_better(now))
        step: int = self._work.trainer.state.global_step
        may_measure_all = step >= self._checked_at + self._work.steps_between_all
        is_due = abs(cost - self.budget) <= error and may_measure_all
        if is_kept and (is_done or (is_there and not self.reached) or is_due):
            cost, error = self._checked_cost(cost), 0.0
        within = now.is_finite and cost <= self.budget
        if self._can_rehearse and not within:
            self._lasted = 0
        if is_kept and within and cost + error <= self.budget:
            is_lower = self.reached and int(now.too_high.sum()) < self._best_too_high
            self._idle = 0 if is_lower or now.count > self._best_count else self._idle
            self._keep(now)
            self.reached = is_there or self.reached
        if within and is_done:
            self._finish("goal", self.goal_sentence)
            return False
        if within and now.missing < 0.95 * self._least_missing:
            self._least_missing, self._idle = now.missing, 0
        is_least = self._method.constraint <= LEAST_DEMAND
        no_repair = is_least and cost > max(self.budget, self._last_cost)
        is_far = not now.is_finite or cost > max(_FAR * self.budget, _FAR_LOSS)
        is_lasting = self._work.lookahead is not None
        was_fast = not is_lasting and self._method.constraint > 2 * _SLOW_DEMAND
        is_dear = no_repair or (was_fast and cost > self.budget)
        is_worth_repair = not is_lasting and now.missing <= _WORTH_REPAIR * self._best_missing
        wants_more = not self._lasted if is_lasting else self._stalls(now)
        goes_back = is_far or (is_dear and not is_worth_repair)
        if goes_back or cost > self.budget:
            slower = _SLOW_DEMAND / self._method.constraint if was_fast and goes_back else 0.5
            self._change(demand=slower, rate=0.5 if is_far or no_repair else 1.0)
        if goes_back:
            self._lasted = 0
            self._go_back()
            cost = self._best_cost
        elif cost < 0.5 * self.budget and wants_more:
            self._change(demand=1.25)
        if within and self._steps_are_too_large(now):
            self._change(rate=0.75)
        elif not self._lasted:  # what has lasted once is rehearsed again as it is
            self._speed_up(now, within, cost)
        self._last_cost = cost
        if self._constraint is not None:
            known = self._free[1 - self._patience :]
            self._free = [*known, bool(self._constraint.some_demand_is_free)]
        return goes_back

    def _stalls(self, now: Standing) -> bool:
        return now.missing > _PROGRESS * self._last_missing

    def _speed_up(self, now: Standing, within: bool, cost: float) -> None:
        if within and self._stalls(now):
            self._change(rate=1.25)
        elif self._can_rehearse and cost < 0.5 * self.budget:
            self._change(rate=1.5)

    def _is_better(self, now: Standing) -> bool:
        if now.share >= self._goal.share and self._work.lookahead is not None:
            return True  # the longer it has run, the better it lasts
        if now.share >= self._goal.share and self.reached:
            return int(now.too_high.sum()) < self._best_too_high
        is_as_good = now.count == self._best_count
        return now.count > self._best_count or (is_as_good and now.missing < self._best_missing)

    def _stands_out(self, now: Standing) -> bool:
        """True if twice as many as chance explains are too high, and may be lowered."""
        most = _TOO_HIGH * len(now.losses)
        return self._work.lookahead is None and int(now.too_high.sum()) > most

    def _is_there(self, now: Standing) -> bool:
        """True if enough records are forgotten, and with look-ahead stay so after fine-tuning."""
        has_share = now.share >= self._goal.share
        if self._work.lookahead is None:
            return has_share
        if not self._can_rehearse:
            return False
        is_passed = has_share and self._rehearse() / len(now.losses) >= self._goal.share
        self._lasted = self._lasted + 1 if is_passed else 0
        return self._lasted >= _REHEARSALS

    def _rehearse(self) -> int:
        """Count what stays forgotten in a rehearsal, as the last measurement's."""
        least = min(standing.count for standing in self._work.rehearse())
        self.history[-1][_REHEARSED] = least
        return least

    def _checked_cost(self, cost: float) -> float:
        """Cost by all retain records, which corrects later ones by some."""
        self._checked_at = self._work.trainer.state.global_step
        rise = self._work.retain_rise()
        if rise is None:
            return cost
        if math.isfinite(rise):  # else of this state alone
            self._beyond += rise - cost
        self.history[-1]["retain_rise"] = rise
        return rise

    def _steps_are_too_large(self, now: Standing) -> bool:
        """True if more is missing, or too high, than before; if a lasting run loses its share."""
        if self._work.lookahead is not None:
            return self._best_count / len(now.losses) >= self._goal.share > now.share
        too_high = int(now.too_high.sum())
        is_lost = now.missing > self._last_missing / _PROGRESS
        return is_lost or too_high > max(_TOO_HIGH * len(now.losses), self._last_too_high)

    @property
    def _parameters(self) -> list[Tensor]:
        return [*self._work.pair.parameters]

    @property
    def _method(self) -> HamuQ:
        method = self._work.pair.method
        assert isinstance(method, HamuQ)
        return method

    def _change(self, demand: float = 1.0, rate: float = 1.0) -> None:
        wanted = min(MOST_DEMAND, max(LEAST_DEMAND, demand * self._method.constraint))
        self._work.pair.method = replace(self._method, constraint=wanted)
        most, least = _MOST_GROWTH * self._first_rate, _LEAST_GROWTH * self._first_rate
        self.rate = min(most, max(least, rate * self.rate))

    @torch.no_grad()
    def _average(self) -> None:
        self._in_mean += 1
        kinds = [torch.promote_types(p.dtype, torch.float32) for p in self._parameters]
        wide = [p.detach().to(kind) for p, kind in zip(self._parameters, kinds, strict=True)]
        self._mean = self._mean or [torch.zeros_like(p) for p in wide]
        torch._foreach_lerp_(self._mean, wide, 1 / self._in_mean)

    @torch.no_grad()
    def _take_mean(self) -> None:
        """Replace the weights by their mean since the last measurement.

        The noise of the last batches would move a whole class of records over a target and back.
        """
        if self._mean:
            torch._foreach_copy_(self._parameters, self._mean)
            self._mean, self._in_mean = [], 0

    @torch.no_grad()
    def _keep(self, now: Standing) -> None:
        self._good = self._good or [torch.empty_like(p) for p in self._parameters]
        torch._foreach_copy_(self._good, self._parameters)
        self._best_count, self._best_missing = now.count, now.missing
        self._best_too_high = int(now.too_high.sum())
        self._records = len(now.losses)
        self.steps_of_best = self._work.trainer.steps_taken
        self.updates_of_best = self.steps_of_best - self._undone
        self._best_cost = now.retain_loss - self.start_loss + self._beyond

    @torch.no_grad()
    def _go_back(self) -> None:
        """Restore the kept state, without what optimizer and point ahead remember of another."""
        torch._foreach_copy_(self._parameters, self._good)
        self._undone = self._work.trainer.steps_taken - self.updates_of_best
        if self._optimizer is not None:
            self._optimizer.state.clear()
        if self._work.lookahead is not None:
            self._work.lookahead.restart()

    def _settle(self) -> None:
        """Go back to the kept state, and take its cost by all retain records, not by some."""
        self._go_back()
        rise = self._work.retain_rise()
        if rise is not None:
            self._beyond += rise - self._best_cost
            self._best_cost = rise

    def _give_up(self) -> None:
        self._settle()
        counted = "measurements" if self._work.lookahead is None else "cycles on retain data"
        many = f"{self._patience} {counted} in a row"
        if self.reached:
            self._finish("goal", f"{self.goal_sentence}; {many} lowered no more of these")
            return
        has_share = self._best_count / self._records >= self._goal.share
        lasts = self._work.lookahead is not None and has_share  # and what is kept is the latest
        better = "that lasts" if lasts else "better"
        what = f"{many} brought nothing {better}; {self.goal_sentence}"
        if self._free and not any(self._free):
            never = f"in the last {len(self._free)} measurements no demand was free, however small"
            self._finish("criterion", f"any demand has a price: {never}; {what}")
        else:
            found = "no state that lasts" if lasts else "no better state"
            budget = f"{found} was found within the budget (retain loss {self.budget:+g})"
            self._finish("budget", f"{budget}: {what}; --max_retain_increase allows more")

    def _end(self, all_done: bool) -> None:
        """Finish with the last step, or where the trainer or another callback ended the run."""
        self._settle()
        stop = self._work.trainer.stop
        if stop == ALL_DONE and not all_done:
            stop = BY_A_CALLBACK
        more = "; --max_steps allows more" if stop == ALL_DONE and not self.reached else ""
        self._finish(stop.kind, f"{stop.text}; {self.goal_sentence}{more}")

    def _finish(self, kind: Any, text: str) -> None:
        self._go_back()
        self.ended = True
        self._work.trainer.end_run(StopReason(kind, text))

    def _note(self, now: Standing, step: int) -> None:
        figures = {key: value for key, value in now.figures().items() if key != "worst"}
        own = {"step": step, "retain_loss": now.retain_loss, "rate": self.rate}
        own["retain_error"] = now.retain_error
        own["estimated_rise"] = now.retain_loss - self.start_loss + self._beyond
        self.history.append(own | {"demand": self._method.constraint} | figures)

    @property
    def goal_sentence(self) -> str:
        """Standing of the kept state, in words; if it misses the goal, what more would cost."""
        if self.reached:
            return f"the goal is reached: {self._words()}"
        return f"the goal is not reached: {self._words()}{self._too_dear()}"

    @property
    def doubts(self) -> list[str]:
        """Reason for which rehearsals cannot tell: the model before passes them as well."""
        start = next((entry[_REHEARSED] for entry in self.history if _REHEARSED in entry), 0)
        if not start or start / self._records < self._goal.share:
            return []
        same = f"the rehearsed fine-tuning makes the model before forget {start:,} of them too"
        return [f"{same}, so whether this lasts is open"]

    def _too_dear(self) -> str:
        """Name the state beyond the budget that came nearest to the goal, the cheapest of such."""
        if self._work.lookahead is not None:
            return ""
        wanted = math.ceil(self._goal.share * self._records - 1e-9)  # 0.55 · 100 is above 55
        dear = [entry for entry in self.history if self.budget < _cost_of(entry) < math.inf]
        key = lambda entry: (min(entry["forgotten"], wanted), -_cost_of(entry))  # noqa: E731
        near = max(dear, key=key, default={"forgotten": 0})
        if near["forgotten"] <= self._best_count:
            return ""
        is_exact = "retain_rise" in near or not near.get("retain_error", 1.0)
        cost = f"{'' if is_exact else 'about '}{_cost_of(near):+.4f}"
        return f"; {near['forgotten']:,} were at step {near['step']:,}, for {cost}"

    def _words(self) -> str:
        lasting = ""
        if self._work.lookahead is not None:
            start, *later = (entry for entry in self.history if _REHEARSED in entry)
            each = [f"{one[_REHEARSED]:,} at step {one['step']:,}" for one in later]
            found = f"found {', '.join(each[-_REHEARSALS:])}" if each else "not rehearsed yet"
            lasting = f", also after fine-tuning, {_REHEARSALS} times in a row; {found}"
            lasting += f"; of the model before {start[_REHEARSED]:,}"
        return (
            f"{self._best_count:,} of {self._records:,} records are forgotten "
            f"(goal {self._goal.kind}, {goals.share_in_words(self._goal.share)} wanted{lasting})"
            f"{goals.above_in_words(self._best_too_high, self._records)}, "
            f"retain loss {self._best_cost:+.4f} of {self.budget:+g} allowed"
        )

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint: with the kept state, and the mean of the weights so far."""
        demand = {"demand": self._method.constraint}
        return {name: getattr(self, name) for name in _SAVED} | demand

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        for name in _SAVED:
            setattr(self, name, state[name])
        for tensors in (self._good, self._mean):
            tensors[:] = [t.to(p.device) for t, p in zip(tensors, self._parameters, strict=False)]
        self._work.pair.method = replace(self._method, constraint=state["demand"])


def _cost_of(entry: Mapping[str, Any]) -> float:
    """Rise of the retain loss, of all retain records where they were measured."""
    return float(entry.get("retain_rise", entry["estimated_rise"]))


def first_rate(parameters: Sequence[Tensor]) -> float:
    """Rate at which a step of Adam moves a weight by a small share of a matrix weight's size."""
    chosen = [p for p in parameters if p.dim() > 1] or parameters
    each = torch._foreach_norm([p.detach() for p in chosen], dtype=torch.float64)
    norms = torch.stack([norm.to(each[0].device) for norm in each]).tolist()
    if not all(norms):  # the second factors of a new adapter are zero
        return _RATE_OF_A_NEW_ADAPTER
    return _RATE * math.hypot(*norms) / math.sqrt(sum(p.numel() for p in chosen))
