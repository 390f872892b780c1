"""Goals: the loss that each record of the forget set must reach before it counts as forgotten; and
the reasons for which a run stops.

In:  the losses of the forget records, and those that the goal compares them with: of records never
     trained on, or of the same records under a retain model.
Out: `Targets`, three losses for each record, and a `Standing`, the count of forgotten records.

No mean decides: one record with a loss of 20 does not pay for ten with a loss of 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from hamu.core.objectives import log_odds, loss_at
from hamu.data import TextRecords
from hamu.errors import HamuError, counted, unknown
from hamu.evaluation.predictions import Predictions, TokenPredictions, splits_alike

Kind = Literal["unseen", "retrained", "erased", "loss"]
AnyPredictions = Predictions | TokenPredictions
Found = Mapping[str, AnyPredictions]  # by set
LEVEL = 0.05  # of every band: records never trained on fall below it this often
NOTHING_TELLS = (
    "nothing tells when a record is forgotten; give --test_data (records never trained on), "
    "--retain_model, or --target_forget_loss"
)
OTHER_TOKENS = (
    "the retain model splits the forget records into other tokens, or reads fewer, whose losses do "
    "not compare; train it with this model as its --tokenizer, or lower --max_length"
)
_ERASED_OF_TEXTS = "the goal erased is for classifiers; of texts choose unseen, retrained or a loss"
_ENOUGH = 20  # unseen records; with fewer the lowest 5 % of them is none
_CHANCES_AT_ONCE, _ROUNDING = 1 << 22, 1e-8  # of all ranks; of their sums
_LEAST = 1e-12  # loss, whose log-odds are finite
_MARGIN = 0.1  # log-odds that a run aims beyond a limit, or that a record may fall short of a model
MEANINGS = {  # condition that the forgotten records meet
    "unseen": "those whose losses are at least as high as those of records never trained on, as "
    "far as chance (5 %) lets that be told",
    "retrained": "those with at least the loss that they have under the retain model, to 0.1 in "
    "log-odds",
    "erased": "those taken for another class than their own",
    "loss": "those with at least this loss",
}
BASES = {kind: "predictions" if kind == "erased" else "losses" for kind in MEANINGS}
_COMPARED = {
    "unseen by original model": ", compared with the original model's losses on the test data",
    "unseen by this model": ", compared with its own losses on the test data (--original_model: "
    "with the original's)",
    "retrained by retain model": ", compared with the retain model's losses on them",
}
StopKind = Literal[
    "all steps",  # nothing ended it before
    "criterion",  # the stopping criterion is met; in a run by goal: no demand is free
    "target",  # the forget loss of a step has reached its target
    "no forgetting",  # the forget loss of a step was too low
    "retain loss",  # the retain loss of a step was too high
    "infeasible",  # the constraint could not be met
    "skips",  # too many steps in a row could not be taken
    "no small step",  # no step was small enough to keep its promise
    "goal",  # a run by goal has reached it
    "budget",  # what it may cost is spent, or every further step costs more than is left of it
    "other",
]


@dataclass(frozen=True)
class StopReason:
    """End of a run: its kind, and the reason as it goes on from "because"."""

    kind: StopKind
    text: str


ALL_DONE = StopReason("all steps", "all its steps are done")  # of a run that nothing ended before
BY_A_CALLBACK = StopReason("other", "a callback ended it")


@dataclass(frozen=True)
class Targets:
    """Losses that a goal sets for n records, [n] float64 each.

    Attributes:
        least: from here on a record counts as forgotten.
        aim: the loss that a run raises it to, the T_i of the bounded objective.
        most: above it a record stands out again, and is lowered; inf where nothing is too much.
    """

    least: Tensor
    aim: Tensor
    most: Tensor

    @property
    def limits(self) -> Tensor:
        """Aim and most, [n, 2], as the bounded objective takes them."""
        return torch.stack([self.aim, self.most], dim=1)


@dataclass(frozen=True)
class Standing:
    """Standing of the records of a forget set against a goal.

    Attributes:
        losses: of each record, [n] float64.
        targets: see `Targets`.
        forgotten: [n] bool.
        retain_loss: mean loss on the retain records measured with them; NaN if none were.
        retain_error: by which its rise may differ from that of all retain records.
    """

    losses: Tensor
    targets: Targets
    forgotten: Tensor
    retain_loss: float = math.nan
    retain_error: float = 0.0

    @cached_property
    def count(self) -> int:
        """Number of forgotten records."""
        return int(self.forgotten.sum())

    @property
    def share(self) -> float:
        """Share of the records that are forgotten."""
        return self.count / len(self.losses)

    @cached_property
    def missing(self) -> float:
        """Mean distance to the aim in log-odds over all records; 0 for forgotten ones."""
        return self._gap(self.targets.aim).clamp(min=0).mean().item()

    @cached_property
    def too_high(self) -> Tensor:
        """Records that stand out above their target, [n] bool."""
        return self.losses > self.targets.most

    @property
    def is_finite(self) -> bool:
        """True if no loss is NaN, and the retain loss is a number."""
        return not bool(self.losses.isnan().any()) and math.isfinite(self.retain_loss)

    def _gap(self, wanted: Tensor) -> Tensor:
        gap = log_odds(wanted) - log_odds(self.losses.clamp(min=_LEAST))
        return gap.masked_fill(self.forgotten, -math.inf)

    def figures(self, rows: Sequence[int] | Tensor | None = None) -> dict[str, Any]:
        """The standing as JSON holds it: counts, quantiles of the losses, the ten worst records by
        their row in the source, or in the set where `rows` are not known.
        """
        rows = range(len(self.losses)) if rows is None else rows
        furthest = self._gap(self.targets.least).argsort(descending=True)[:10].tolist()
        away = [i for i in furthest if not self.forgotten[i]]
        losses, least = self.losses.tolist(), self.targets.least.tolist()
        shares = {"min": 0.0, "q25": 0.25, "median": 0.5, "q75": 0.75, "max": 1.0}
        quantiles = quantiles_of(self.losses, [*shares.values()])
        return {
            "records": len(self.losses),
            "forgotten": self.count,
            "too_high": int(self.too_high.sum()),
            "loss_quantiles": dict(zip(shares, quantiles, strict=True)),
            "worst": [{"row": int(rows[i]), "loss": losses[i], "target": least[i]} for i in away],
        }


@dataclass(frozen=True)
class Goal:
    """Meaning of forgotten in a run.

    Args:
        kind: "unseen": the losses of the forget records are at least those of records never
            trained on, class by class for images: the i-th smallest of n reaches the i-th smallest
            of n such records, as far as chance (5 %) lets that be told. "retrained": each record
            has the loss that it has under a retain model, to 0.1 in log-odds. "erased": no record
            is recognised, for classifiers. "loss": each record has at least this loss.
        share: of the records that must be forgotten.
        loss: of kind "loss".
        reference: of "unseen" the original model's predictions of unseen records, of "retrained"
            the retain model's of the forget records; see `against`.
        gone: forget records of classes that no retain record has, if known.
    """

    kind: Kind
    share: float = 0.95
    loss: float | None = None
    reference: AnyPredictions | None = field(default=None, repr=False)
    gone: int = 0

    def against(self, original: Found | None, retain_model: Found | None) -> Goal:
        """Return the goal with its reference, if it is among these predictions."""
        found = {"unseen": (original, "test"), "retrained": (retain_model, "forget")}
        model, name = found.get(self.kind, (None, ""))
        return self if model is None else replace(self, reference=model[name])

    def standing(
        self, forget: AnyPredictions, retain_loss: float = math.nan, retain_error: float = 0.0
    ) -> Standing:
        """Standing of a model by its predictions of the forget set.

        Raises:
            HamuError: if "erased" is asked of a language model, or the retain model predicts other
                records.
        """
        losses = record_losses(forget)
        targets = self._targets(forget, losses)
        forgotten = losses.clamp(min=_LEAST) >= targets.least
        if self.kind == "erased" and isinstance(forget, Predictions):
            forgotten = ~forget.correct & ~losses.isnan()
        return Standing(losses, targets, forgotten, retain_loss, retain_error)

    def figures(
        self, after: Standing, rows: Sequence[int] | Tensor | None = None, **more: Any
    ) -> dict[str, Any]:
        """The goal and a standing at the end as JSON holds them, and what else is known."""
        own: dict[str, Any] = {"kind": self.kind, "share": self.share, "loss": self.loss}
        own |= {"budget": None, "reached": after.share >= self.share, "lasting": None}
        own |= {"sampled_from": None, "doubts": []}
        return own | more | {"after": after.figures(rows)}

    def _targets(self, forget: AnyPredictions, losses: Tensor) -> Targets:
        never = torch.full_like(losses, math.inf)
        if self.kind == "loss":
            least = torch.full_like(losses, float(self.loss or 0.0))
            return Targets(least, loss_at(log_odds(least) + _MARGIN), never)
        if self.kind == "erased":
            if not isinstance(forget, Predictions):
                raise HamuError(_ERASED_OF_TEXTS)
            # with p at most 1/(eK) another class is more likely, whatever the others are
            least = torch.full_like(losses, 1.0 + math.log(forget.logits.shape[1]))
            return Targets(least, least, never)
        assert self.reference is not None
        if self.kind == "unseen":
            return _unseen(forget, self.reference)
        aim = record_losses(self.reference).clamp(min=_LEAST)
        if len(aim) != len(losses):
            raise HamuError(
                f"the retain model predicts {len(aim)} forget records, the model {len(losses)}; "
                f"both need the same"
            )
        return Targets(*(loss_at(log_odds(aim) + by) for by in (-_MARGIN, 0.0, 1.0)))


def _unseen(forget: AnyPredictions, unseen: AnyPredictions) -> Targets:
    """Targets by rank, see `_bands`.

    Images are compared within their class, or with all unseen images where it has none.
    """
    losses, others = record_losses(forget), record_losses(unseen)
    if isinstance(forget, Predictions) and isinstance(unseen, Predictions):
        ours, theirs = forget.labels, unseen.labels
    else:
        ours, theirs = torch.zeros(len(losses)), torch.zeros(len(others))
    targets = losses.new_empty(3, len(losses))
    for label in sorted(set(ours.tolist())):
        members, among = (ours == label).nonzero().flatten(), others[theirs == label]
        among = among if len(among) else others
        ranks = losses[members].argsort(stable=True).argsort()
        bands = _bands(len(members), len(among))[:, ranks]
        targets[:, members] = among.sort().values.clamp(min=_LEAST)[bands]
    return Targets(*targets)


@cache
def _bands(number: int, unseen: int) -> Tensor:
    """Positions of least, aim and most among the sorted unseen losses, by rank, [3, n].

    If n forget records and m unseen ones are drawn alike, the number of unseen losses below the
    i-th smallest of the n is BetaBinomial(m; i, n + 1 - i): the i-th lies below `least` and above
    `most` with a probability of at most 5 %, unless that is the smallest or largest of all m.
    """
    counts = torch.arange(number + unseen + 1, device="cpu")
    logs, at, found = counts.double().add(1.0).lgamma(), counts[: unseen + 1], []  # of factorials
    for ranks in counts[:number].split(max(1, _CHANCES_AT_ONCE // len(at))):
        i = ranks[:, None]  # from 0
        before = logs[at + i] - logs[at] - logs[i]
        after = logs[unseen - at + number - 1 - i] - logs[unseen - at] - logs[number - 1 - i]
        ways = logs[number + unseen] - logs[number] - logs[unseen]
        up_to = (before + after - ways).exp().cumsum(1)
        found.append(torch.stack([(up_to < q - _ROUNDING).sum(1) for q in (LEVEL, 0.5)]))
    least, aim = torch.cat(found, 1).clamp(min=1) - 1
    return torch.stack([least, aim, unseen - 1 - least.flip(0)])


def record_losses(predictions: AnyPredictions) -> Tensor:
    """Loss of each record, [n] float64: of an image, or the mean over a text's scored tokens."""
    return predictions.losses if isinstance(predictions, Predictions) else predictions.record_losses


def quantiles_of(losses: Tensor, shares: Sequence[float]) -> list[float]:
    """Quantiles of losses [n] float64; interpolation beside an infinite one would give NaN."""
    at = torch.tensor(shares, dtype=torch.float64)
    linear, lower = (losses.quantile(at, interpolation=how) for how in ("linear", "lower"))
    return linear.where(~linear.isnan(), lower).tolist()


def check_goal_settings(goal: str | None, loss: float | None, share: float) -> None:
    """Check --goal, --target_forget_loss and --target_share."""
    if goal is not None and goal not in get_args(Kind):
        raise unknown("goal", goal, get_args(Kind))
    if goal not in (None, "loss") and loss is not None:
        raise HamuError(f"target_forget_loss is of the goal loss, not {goal}; leave one out")
    if goal == "loss" and loss is None:
        raise HamuError("the goal loss needs --target_forget_loss, the loss of each record")
    if loss is not None and not 0 < loss < math.inf:
        raise HamuError(f"target_forget_loss {loss} must be a positive number")
    if not 0 < share <= 1:
        raise HamuError(f"target_share {share} must be a share in (0, 1]")


def check_goal_has(
    kind: str | None, *, has_retain_model: bool, is_text: bool, has_test: bool = True
) -> None:
    """Check that there is what a goal compares with, and that it is one of this kind of data."""
    lacks = {
        "unseen": "" if has_test else "records that were never trained on; give --test_data",
        "retrained": "" if has_retain_model else "a retain model; give --retain_model",
    }.get(str(kind))
    if lacks:
        raise HamuError(f"the goal {kind} compares with {lacks}, or another --goal")
    if kind == "erased" and is_text:
        raise HamuError(_ERASED_OF_TEXTS)


def choose_goal(
    sets: Mapping[str, Any], asked: Any, *, has_retain_model: bool, is_needed: bool = False
) -> Goal | None:
    """The goal named, or what follows from the data; None if nothing tells what forgotten means.

    `asked` has the options goal, target_forget_loss and target_share.

    Raises:
        HamuError: if the goal lacks what it compares with, or `is_needed` and there is none.
    """
    kind, loss, has_test = asked.goal, asked.target_forget_loss, sets.get("test") is not None
    retain, forget = sets["retain"], sets["forget"]
    if kind is None and loss is not None:
        kind = "loss"
    elif kind is None and whole_classes(retain, forget, is_needed):
        kind = "erased"
    elif kind is None:
        kind = "unseen" if has_test else "retrained" if has_retain_model else None
    if kind is None:
        if is_needed:
            raise HamuError(NOTHING_TELLS)
        return None
    has = {"has_test": has_test, "has_retain_model": has_retain_model}
    check_goal_has(kind, **has, is_text=is_text(forget))
    return Goal(kind, asked.target_share, loss, gone=int(_is_of_gone_class(retain, forget).sum()))


def is_text(data: Any) -> bool:
    """True if the records of a data set are texts, as they are read or in tokens."""
    return isinstance(data, TextRecords) or _has(data, "input_ids")


def _has(data: Any, column: str) -> bool:
    """True if the records have this column; a collator may take them in any form."""
    return isinstance(data[0], Mapping) and column in data[0]


def whole_classes(retain: Any, forget: Any, may_read: bool) -> bool:
    """True if the forget records are images of classes that no retain record is of.

    Without a tensor `labels` each record is read, if it may be, until one shares a class.
    """
    known = _is_of_gone_class(retain, forget)
    if len(known):
        return bool(known.all())
    if not may_read or is_text(forget) or not _has(forget, "labels"):
        return False
    labels = {int(forget[i]["labels"]) for i in range(len(forget))}
    return all(int(retain[i]["labels"]) not in labels for i in range(len(retain)))


def _is_of_gone_class(retain: Any, forget: Any) -> Tensor:
    """True for each forget record of a class that no retain record has; empty if not known."""
    kept, gone = (getattr(data, "labels", None) for data in (retain, forget))
    if isinstance(kept, Tensor) and isinstance(gone, Tensor):
        return ~torch.isin(gone, kept)
    return torch.empty(0, dtype=torch.bool)


def doubts(goal: Goal, forget: AnyPredictions, own_test: AnyPredictions | None = None) -> list[str]:
    """Sentences on a goal that can hardly tell: few unseen records, gone classes, other tokens, or
    a model whose own unseen losses (`own_test`) have risen too.
    """
    test = goal.reference
    if goal.kind == "retrained" and not splits_alike(forget, test):
        return [OTHER_TOKENS]
    if goal.kind != "unseen" or test is None:
        return []
    if goal.gone:
        many = f"no retain record has the class of {goal.gone:,} of them"
        return [f"{many}, which a model without it would not know; --goal retrained tells"]
    counts, of = [len(record_losses(test))], ""
    if isinstance(forget, Predictions) and isinstance(test, Predictions):
        own = [int((test.labels == label).sum()) for label in {*forget.labels.tolist()}]
        counts, of = [one or len(test.labels) for one in own], " of a class"
    if min(counts) >= _ENOUGH:
        own_goal = replace(goal, reference=test if own_test is None else own_test)
        count, of_its_own = (one.standing(forget).count for one in (goal, own_goal))
        risen = "by this model's own losses on the test data, which rose too"
        return [f"{risen}, {of_its_own:,} are"] if of_its_own < 0.5 * count else []
    records = counted(min(counts), "unseen records")
    few = f"the goal unseen compares with {records}{of}, which can hardly tell"
    return [f"{few}; give --test_data with at least {_ENOUGH}{of}"]


def goal_report(
    goal: Goal,
    predictions: Found,
    rows: Sequence[int] | Tensor | None = None,
    *,
    original: Found | None,
    retain_model: Found | None,
) -> dict[str, Any]:
    """Standing of a model, in the shape of a run's goal; compares with itself by default."""
    goal = goal.against(original or predictions, retain_model)
    standing = goal.standing(predictions["forget"])
    unseen = "this model" if original is None else "original model"
    by = {"unseen": unseen, "retrained": "retain model"}
    more: dict[str, Any] = {"reference": by.get(goal.kind)}
    more["doubts"] = doubts(goal, predictions["forget"], predictions.get("test"))
    return goal.figures(standing, rows, **more)


def goal_name(goal: Mapping[str, Any]) -> str:
    """Name of a goal: "unseen", or "a loss of 2"."""
    return f"a loss of {goal['loss']:g}" if goal["kind"] == "loss" else str(goal["kind"])


def forgotten_words(goal: Mapping[str, Any]) -> str:
    """Count in a few words: "19 of 20 records are forgotten by the goal unseen"."""
    count, records, high = (goal["after"][name] for name in ("forgotten", "records", "too_high"))
    are, whole = "is" if count == 1 else "are", goal.get("sampled_from")
    sample = f", drawn from {whole:,}," if whole else ""
    doubt = "".join(f" ({one})" for one in goal.get("doubts", ()))
    return (
        f"{count:,} of {records:,} records{sample} {are} forgotten by the goal {goal_name(goal)}"
        f"{above_in_words(high, records)}{doubt}"
    )


def above_in_words(high: int, records: int) -> str:
    """Count of the records that stand out above a goal, "" if it is no more than chance brings."""
    return (
        f", {high:,} of them with losses that stand out above it" if high > LEVEL * records else ""
    )


def share_in_words(share: float) -> str:
    """A share as it was given: "95%", or "99.9%"."""
    return f"{100 * share:.6g}%"


def has_share(goal: Mapping[str, Any]) -> bool:
    """True if as many records are forgotten after the run as the goal asks for."""
    after = goal["after"]
    return bool(after["forgotten"] / after["records"] >= goal["share"])


def goal_lines(goal: Mapping[str, Any]) -> list[str]:
    """Sentences for the screen: count, quantiles of the losses, records furthest from the goal."""
    after, compared = goal["after"], _COMPARED.get(f"{goal['kind']} by {goal['reference']}", "")
    reached = "reached" if goal["reached"] else "not reached"
    names = {"min": "lowest", "q25": "25 %", "median": "median", "q75": "75 %", "max": "highest"}
    losses = [f"{word} {after['loss_quantiles'][name]:.3g}" for name, word in names.items()]
    lines = [
        f"{forgotten_words(goal)}{compared}; {share_in_words(goal['share'])} wanted: {reached}",
        f"losses of the forget records: {', '.join(losses)}",
    ]
    if after["worst"]:
        worst = ", ".join(f"{one['loss']:.3g} of {one['target']:.3g}" for one in after["worst"])
        lines.append(f"furthest from being forgotten (loss of what is enough): {worst}")
    return lines
