"""The whole assessment of a model and its data, before a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from hamu.assess.assessed_model import AssessedModel, count_records
from hamu.assess.curvature import Curvature, Hessian, lanczos
from hamu.assess.frontier import Frontier, frontier
from hamu.assess.gradients import (
    FEWEST_PARTS,
    PartedGram,
    affordable_parts,
    count_parts,
    parted_gradient,
)
from hamu.assess.hardness import (
    REGIMES,
    BlockHardness,
    Hardness,
    clipped,
    constraint_status,
    variants_of,
)
from hamu.assess.hessian_budget import LANCZOS, SOLVER, HessianBudget
from hamu.assess.influence import influences, share_of_top
from hamu.assess.intervals import Intervals, bootstrap
from hamu.assess.second_order import SecondOrder, second_order
from hamu.assess.settings import check_settings
from hamu.assess.vectors import flat, shaped
from hamu.assess.verdict import ERROR_RATIO, Verdict, judge
from hamu.core.gram import Blocks, PairGram
from hamu.core.methods import HamuQ, HamuU
from hamu.core.objectives import CrossEntropy, count_predictions
from hamu.errors import HamuError

_FORWARD = 1 / 3  # what a forward pass costs, in forward and backward passes
_LISTED = 20


@dataclass(frozen=True)
class Conflicts:
    """The records of one side by how their loss changes along the other side's gradient.

    Attributes:
        values: ∇L(z)·g of each record that was looked at; their mean is κ (not clipped).
        rows: the record of each: its row in the source if the data set knows it, else its position in the set.
        top_share: the part of all that is in conflict (above 0) that the top tenth of the records makes up.
    """

    values: Tensor
    rows: Tensor
    top_share: float

    def top(self, count: int = _LISTED) -> list[dict[str, float]]:
        """The records in the hardest conflict, worst first."""
        order = self.values.argsort(descending=True)[:count]
        return [
            {"row": self.rows[i].item(), "value": self.values[i].item()} for i in order.tolist()
        ]


@dataclass(frozen=True)
class Assessment:
    """What is known before the first step.

    Attributes:
        method: the HAMU method and the constraint that the regime and the verdict are for.
        records: the number of records of each side.
        measured_records: how many of them the gradients were measured on.
        gradient_norms: ‖g_r‖ and ‖g_f‖ before clipping.
        clip: the factors by which clipping shortens them.
        step_length: ‖Δw‖ over η‖g_r‖, at most: clipping's factor for HAMU-Q, more for HAMU-U where ‖g_f‖ is larger.
        hamu_q: the hardness for HAMU-Q (κ1 and κ2).
        hamu_u: the hardness for HAMU-U (κ3 and κ4).
        intervals: of κ, cosθ, the thresholds and the regime; None with too few records, or where memory did not allow
            it.
        block_names: of each block.
        block_hardness: the hardness of each, by variant.
        frontiers: by variant.
        learning_rate: of the run to come.
        curvature: the retain loss's; None if it was not asked for, or the records are too few to pay for it.
        curvature_samples: retain records that it was measured on.
        second_order: the second-order condition; None likewise.
        conflicts: by side; empty if they were not asked for.
        verdict: whether to start.
        epochs: what all this cost, in forward and backward passes over all records of both sides.
    """

    method: HamuQ | HamuU
    records: dict[str, int]
    measured_records: dict[str, int]
    gradient_norms: tuple[float, float]
    clip: tuple[float, float]
    step_length: float
    hamu_q: Hardness
    hamu_u: Hardness
    intervals: Intervals | None
    block_names: list[str]
    block_hardness: dict[str, BlockHardness]
    frontiers: dict[str, Frontier]
    learning_rate: float
    curvature: Curvature | None
    curvature_samples: int
    second_order: SecondOrder | None
    conflicts: dict[str, Conflicts]
    verdict: Verdict
    epochs: float

    @property
    def hardness(self) -> Hardness:
        """For the method that will be run."""
        return self.hamu_q if self.method.constrained == "forget" else self.hamu_u

    @property
    def blocks(self) -> BlockHardness:
        """The hardness of each block for the method that will be run."""
        return self.block_hardness[self.method.name]

    @property
    def error_ratio(self) -> float | None:
        """½ηλ_max of a step at the learning rate of the run to come: the second-order part of the retain change over
        the most that a step of this length can change to first order, ½λ‖Δw‖²/(‖g_r‖‖Δw‖).
        """
        return (
            None
            if self.curvature is None
            else self.curvature.error_ratio(self.learning_rate * self.step_length)
        )

    def trusted_rate(self, error_ratio: float) -> float | None:
        """The learning rate at which `error_ratio` has this value."""
        return (
            None
            if self.curvature is None
            else self.curvature.trusted_rate(error_ratio) / self.step_length
        )

    def record(self) -> dict[str, Any]:
        """Everything but the records' own contents, as JSON holds it."""
        blocks: list[dict[str, Any]] = []
        rows = zip(
            self.block_names, self.blocks.kappa, self.blocks.cos, self.blocks.regime, strict=True
        )
        for number, (name, kappa, cos, regime) in enumerate(rows):
            blocks.append(
                {
                    "name": name,
                    "kappa": kappa.item(),
                    "cos": cos.item(),
                    "regime": REGIMES[int(regime)],
                }
            )
            if self.intervals is not None:
                blocks[-1]["kappa_interval"] = self.intervals.block_kappa[number].tolist()
                blocks[-1]["cos_interval"] = self.intervals.block_cos[number].tolist()
            blocks[-1] |= {
                variant: self._block_record(variant, number) for variant in self.block_hardness
            }
        intervals = self.intervals and {
            key: getattr(self.intervals, key)
            for key in ("level", "replicates", "parts", "kappa", "cos", "regimes")
        } | {
            name: {
                key: getattr(found, key)
                for key in ("direct_threshold", "stop_threshold", "regimes")
            }
            for name, found in self.intervals.variants.items()
        }
        return {
            "loss": CrossEntropy.name,
            "method": self.method.name,
            "constraint": self.method.constraint,
            "constraint_mode": self.method.constraint_mode,
            "verdict": asdict(self.verdict),
            "records": self.records,
            "gradient_norms": dict(zip(("retain", "forget"), self.gradient_norms, strict=True)),
            "clip_factors": dict(zip(("retain", "forget"), self.clip, strict=True)),
            "hamu-q": asdict(self.hamu_q),
            "hamu-u": asdict(self.hamu_u),
            "intervals": intervals,
            "frontiers": {name: _frontier_record(found) for name, found in self.frontiers.items()},
            "learning_rate": self.learning_rate,
            "curvature": self.curvature
            and {
                "largest_eigenvalue": self.curvature.largest,
                "smallest_eigenvalue": self.curvature.smallest,
                "residual": self.curvature.residual,
                "samples": self.curvature_samples,
                "error_ratio": self.error_ratio,
                "learning_rate_of_1_percent": _finite(self.trusted_rate(0.01)),
                "learning_rate_of_10_percent": _finite(self.trusted_rate(0.1)),
            },
            "second_order": self.second_order and asdict(self.second_order),
            "conflicts": {
                side: {
                    "records": len(found.values),
                    "top_tenth_share": found.top_share,
                    "top": found.top(),
                }
                for side, found in self.conflicts.items()
            },
            "blocks": blocks,
            "epochs_of_passes": self.epochs,
        }

    def _block_record(self, variant: str, number: int) -> dict[str, Any]:
        """A block's thresholds and regime for a variant, with intervals where there are some."""
        hardness = self.block_hardness[variant]
        found: dict[str, Any] = {
            "direct_threshold": hardness.direct_threshold[number].item(),
            "stop_threshold": hardness.stop_threshold[number].item(),
            "regime": REGIMES[int(hardness.regime[number])],
        }
        if self.intervals is None:
            return found
        sure = self.intervals.variants[variant]
        return found | {
            "direct_threshold_interval": sure.block_direct_threshold[number].tolist(),
            "stop_threshold_interval": sure.block_stop_threshold[number].tolist(),
            "regimes": dict(zip(REGIMES, sure.block_regimes[number].tolist(), strict=True)),
        }


def assess(
    model: nn.Module,
    retain: Dataset[Any],
    forget: Dataset[Any],
    *,
    collate: Callable[[Any], Mapping[str, Tensor]],
    method: HamuQ | HamuU | None = None,
    learning_rate: float = 1e-4,
    max_grad_norm: float | None = 1.0,
    blocks: Blocks = "tensor",
    batch_size: int = 500,
    most_batches: int | None = None,
    curvature_samples: int | None = None,
    bootstrap_memory: float = 2.0,
    conflicts: bool = True,
    seed: int = 42,
    progress: Callable[[float, float], None] | None = None,
) -> Assessment:
    """Assess an unlearning problem; model and data are left as they are.

    Losses are cross-entropies on both sides, whatever objectives the run to come has: hardness, curvature and conflicts
    are of these.

    At the defaults it costs at most three epochs' worth of passes: one forward and backward pass over all records, two
    forward passes for the records in conflict, and at most one epoch's worth for the curvature. Data that do not pay
    for a few products with the Hessian of a single record have their curvature not measured. By the clock it costs more
    where passes are so short that it is not the records that take the time (docs/results/assess_cost.md).

    Args:
        model: the model before unlearning.
        retain, forget: the two sets.
        collate: makes a batch of what a data set gives.
        method: the HAMU method that will be run; by default HAMU-Q with half of what is possible.
        learning_rate, max_grad_norm, blocks: of the run to come.
        batch_size: records per pass.
        most_batches: look at this many random batches of each side; by default at all records.
        curvature_samples: retain records for the curvature, 0 for none; by default as many as one epoch pays for, which
            ends the products with the Hessian too.
        bootstrap_memory: GB that may be taken to keep parts of the gradients for the intervals.
        conflicts: whether to look for the records in conflict.
        seed: seed of every draw.
        progress: told (done, total) in records of a forward and backward pass.

    Raises:
        HamuError: if a setting is out of range, a set is empty, nothing is trainable, or a gradient is not finite.
    """
    check_settings(
        learning_rate=learning_rate,
        max_grad_norm=max_grad_norm,
        batch_size=batch_size,
        most_batches=most_batches,
        curvature_samples=curvature_samples,
        bootstrap_memory=bootstrap_memory,
    )
    method = HamuQ(0.5, constraint_mode="relative") if method is None else method
    if not isinstance(method, HamuQ | HamuU):
        name = getattr(method, "name", method)
        raise HamuError(
            f"method {name!r} has no constraint that could be assessed; give HamuQ(...) or HamuU(...)"
        )
    records = count_records(retain, forget)
    most = None if most_batches is None else most_batches * batch_size
    used = {side: count if most is None else min(count, most) for side, count in records.items()}
    one_pass = sum(used.values())
    budget = HessianBudget.asked_or_affordable(
        curvature_samples, one_pass, records["retain"], batch_size
    )
    cost = _Cost(
        one_pass * (1 + 2 * _FORWARD * conflicts) + budget.cost(LANCZOS + 2 * SOLVER), progress
    )
    assessed = AssessedModel(model, retain, forget, collate, batch_size, blocks, seed, cost.add)
    step = _Step(method, learning_rate, max_grad_norm)
    with assessed.untouched():
        measured = _measure(assessed, step, used, budget, bootstrap_memory, conflicts)
    cost.finish()
    return _judge(assessed, step, measured, epochs=cost.done / sum(records.values()))


class _Cost:
    """What was done so far and will be in all, in records of a forward and backward pass."""

    def __init__(self, total: float, progress: Callable[[float, float], None] | None) -> None:
        self.total, self.done = total, 0.0
        self._progress = progress

    def add(self, cost: float) -> None:
        self.done += cost
        if self._progress is not None:
            self._progress(min(self.done, self.total), self.total)

    def finish(self) -> None:
        if self._progress is not None:
            self._progress(self.total, self.total)


@dataclass(frozen=True)
class _Step:
    """What determines a step of the run to come, beside the gradients."""

    method: HamuQ | HamuU
    learning_rate: float
    max_grad_norm: float | None

    def demand(self, gram: PairGram) -> float:
        """Q in loss: what it is to raise the forget loss by, from the Gram before clipping."""
        status = constraint_status(
            clipped(gram, self.max_grad_norm), variants_of(self.method)[HamuQ.name]
        )
        _, forget_clip = self.clip(gram)
        return self.learning_rate * status.clipped_demand.item() / forget_clip

    def clip(self, gram: PairGram) -> tuple[float, float]:
        """The factors by which clipping shortens the gradients."""
        retain, forget = gram.clip_factors(self.max_grad_norm)
        return retain.item(), forget.item()


@dataclass(frozen=True)
class _Measurements:
    """Results of the passes over the data; `records` of each side were in them."""

    records: Mapping[str, int]
    parted: PartedGram
    curvature: Curvature | None
    curvature_samples: int
    second_order: SecondOrder | None
    conflicts: dict[str, Conflicts]


def _measure(
    assessed: AssessedModel,
    step: _Step,
    used: Mapping[str, int],
    budget: HessianBudget,
    bootstrap_memory: float,
    conflicts: bool,
) -> _Measurements:
    """All passes over the data: gradients, curvature, the records in conflict; of so many records of each side."""
    gradients, parted = _gradients(assessed, bootstrap_memory, used)
    spectrum, condition = None, None
    if budget.samples:
        spectrum, condition = _second_order(assessed, gradients, step.demand(parted.gram()), budget)
    conflict_records = {}
    if conflicts:
        for side, other in (("forget", "retain"), ("retain", "forget")):
            conflict_records[side] = _conflicts(assessed, side, gradients[other], used[side])
    return _Measurements(used, parted, spectrum, budget.samples, condition, conflict_records)


def _judge(
    assessed: AssessedModel, step: _Step, measured: _Measurements, epochs: float
) -> Assessment:
    """What follows from the measurements, without another pass."""
    method, spectrum = step.method, measured.curvature
    raw = measured.parted.gram()
    gram, clip = clipped(raw, step.max_grad_norm), step.clip(raw)
    variants = variants_of(method)
    statuses = {name: constraint_status(gram, variant) for name, variant in variants.items()}
    frontiers = {name: frontier(gram, variant) for name, variant in variants.items()}
    retain_norm, forget_norm = raw.retain_sq.sum().sqrt(), raw.forget_sq.sum().sqrt()
    length = (constraint_status(gram, method).radius.square().sum().sqrt() / retain_norm).item()
    rate = None if spectrum is None else spectrum.trusted_rate(ERROR_RATIO) / length
    return Assessment(
        method=method,
        records=assessed.records,
        measured_records=dict(measured.records),
        gradient_norms=(retain_norm.item(), forget_norm.item()),
        clip=clip,
        step_length=length,
        hamu_q=Hardness.at(statuses[HamuQ.name]),
        hamu_u=Hardness.at(statuses[HamuU.name]),
        intervals=bootstrap(measured.parted, method, step.max_grad_norm, seed=assessed.seed),
        block_names=assessed.block_names,
        block_hardness={name: BlockHardness.at(status) for name, status in statuses.items()},
        frontiers=frontiers,
        learning_rate=step.learning_rate,
        curvature=spectrum,
        curvature_samples=measured.curvature_samples,
        second_order=measured.second_order,
        conflicts=measured.conflicts,
        verdict=judge(frontiers[method.name], method, (1 / clip[0], 1 / clip[1]), rate),
        epochs=epochs,
    )


def _gradients(
    assessed: AssessedModel, memory: float, used: Mapping[str, int]
) -> tuple[dict[str, list[Tensor | None]], PartedGram]:
    """The mean gradient of each side, and the products of the parts that so many GB have room for."""
    affordable = affordable_parts(assessed.parameters, memory)
    if min(used.values()) < FEWEST_PARTS:  # there will be no intervals
        affordable = 1
    sides = {
        side: parted_gradient(
            assessed, side, count_parts(count, assessed.batch_size, affordable), count
        )
        for side, count in used.items()
    }
    parted = PartedGram.of(assessed, sides["retain"], sides["forget"])
    return {side: gradient.total() for side, gradient in sides.items()}, parted


def _second_order(
    assessed: AssessedModel,
    gradients: Mapping[str, list[Tensor | None]],
    demand: float,
    budget: HessianBudget,
) -> tuple[Curvature, SecondOrder]:
    """The spectrum of the retain Hessian on some records, and the second-order condition with it."""
    batches = list(
        assessed.batches("retain", assessed.positions("retain", budget.samples), budget.size)
    )
    count = sum(int(count_predictions(batch["labels"])) for batch in batches)
    hessian = Hessian(
        lambda batch: assessed.total(assessed.score(batch)) / count, batches, assessed.parameters
    )
    done = 0

    def product(vector: Sequence[Tensor]) -> list[Tensor]:
        nonlocal done
        found = hessian.product(vector)
        assessed.advance(budget.cost(done + 1) - budget.cost(done))
        done += 1
        return found

    def flat_product(vector: Tensor) -> Tensor:
        return flat(product(shaped(vector, assessed.parameters)), assessed.parameters)

    spectrum = lanczos(
        product, assessed.parameters, steps=budget.lanczos_steps, tolerance=1e-2, seed=assessed.seed
    )
    g_r, g_f = (flat(gradients[side], assessed.parameters) for side in ("retain", "forget"))
    return spectrum, second_order(
        flat_product, g_r, g_f, spectrum, demand, steps=budget.solver_steps_left(done)
    )


def _conflicts(
    assessed: AssessedModel, side: str, gradient: list[Tensor | None], most: int
) -> Conflicts:
    """So many records of a side against the other side's gradient."""
    positions = assessed.positions(side, most)
    data = assessed.data(side)
    known = getattr(data, "rows", None)
    rows = torch.arange(len(data)) if known is None else torch.as_tensor(known)  # type: ignore[arg-type]

    def losses() -> Tensor:
        found, predictions = [], 0
        for batch in assessed.batches(side, positions):
            scored = assessed.score(batch)
            each = nn.functional.cross_entropy(
                scored.logits.double(), scored.labels, reduction="none"
            )
            found.append(scored.per_record(each).cpu())
            predictions += len(scored.labels)
            assessed.advance(_FORWARD * scored.records)
        values = torch.cat(found)
        return values * (len(values) / max(1, predictions))

    precision = max(
        torch.finfo(p.dtype).eps for p in assessed.model.parameters() if p.is_floating_point()
    )
    values = influences(losses, assessed.parameters, gradient, precision)
    return Conflicts(values, rows[positions], share_of_top(values))


def _frontier_record(found: Frontier) -> dict[str, Any]:
    return {
        key: value.tolist() if isinstance(value, Tensor) else value
        for key, value in ((name, getattr(found, name)) for name in Frontier.__dataclass_fields__)
    }


def _finite(value: float | None) -> float | None:
    return None if value is None or math.isinf(value) else value
