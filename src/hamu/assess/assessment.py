"""Assessment of a model and its data, before a run."""

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property, reduce
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from hamu.assess import hardness as hard
from hamu.assess.curvature import (
    LANCZOS,
    Curvature,
    SecondOrder,
    affordable_samples,
    at_least_float32,
    hessian_product,
    lanczos,
    product_cost,
    second_order,
)
from hamu.assess.gradients import (
    FULL_BATCH,
    AssessedModel,
    Conflicts,
    PartedGram,
    gradient_alignment,
    kept_parts,
    parted_gradient,
)
from hamu.core.forward import evaluating, without_tf32
from hamu.core.gram import SIDES, Blocks, PairGram, check_max_norm
from hamu.core.methods import HamuQ, HamuU
from hamu.core.objectives import CrossEntropy, count_predictions
from hamu.errors import HamuError, counted, percent

ERROR_RATIO = 0.1  # the share of first order up to which second order is negligible
_FORWARD = 1 / 3  # the cost of a forward pass, in forward and backward passes
_SURE = 0.9  # of the resamples


@dataclass(frozen=True)
class Assessment:
    """The figures of an unlearning problem before the first step."""

    method: HamuQ | HamuU  # with the constraint of the regime and the verdict
    records: dict[str, int]  # of each side
    measured_records: dict[str, int]  # those of them in the gradients
    gradient_norms: tuple[float, float]  # ‖g_r‖ and ‖g_f‖ before clipping
    clip: tuple[float, float]  # factors of both
    gram: PairGram  # of the clipped gradients
    noise_scales: dict[str, float | None]  # of each side, in records; None if unknown
    step_length: float  # ‖Δw‖ over η‖g_r‖ at most: clipping, and ‖g_f‖/‖g_r‖ for HAMU-U
    hamu_q: hard.Hardness  # with κ1 and κ2
    hamu_u: hard.Hardness  # with κ3 and κ4
    intervals: hard.Intervals | None  # None with too few records or too little memory
    block_names: list[str]
    block_hardness: dict[str, hard.BlockHardness]  # by variant
    frontiers: dict[str, hard.Frontier]  # by variant
    learning_rate: float  # of the run to come
    curvature: Curvature | None  # the retain loss's; None if not requested, or for too few records
    curvature_samples: int  # retain records of the curvature
    second_order: SecondOrder | None  # None likewise
    conflicts: dict[str, Conflicts]  # by side; empty if not requested
    epochs: float  # the cost, in forward and backward passes over all records of both sides

    @cached_property
    def verdict(self) -> hard.Verdict:
        """Decision on whether to start."""
        scales, rate = (1 / self.clip[0], 1 / self.clip[1]), self.trusted_rate(ERROR_RATIO)
        found = self.frontiers[self.method.name]
        return hard.judge(found, self.method, self.gram, scales, rate)

    @property
    def hardness(self) -> hard.Hardness:
        """Hardness for the method of the run."""
        return self.hamu_q if self.method.constrained == "forget" else self.hamu_u

    @property
    def blocks(self) -> hard.BlockHardness:
        """Hardness of each block for the method of the run."""
        return self.block_hardness[self.method.name]

    @property
    def agreement(self) -> float | None:
        """Share of resamples with the regime of the run; None without intervals."""
        if self.intervals is None:
            return None
        regimes = self.intervals.variants[self.method.name].regimes
        return float(regimes[0, hard.REGIMES.index(self.hardness.regime)])

    @property
    def worthwhile_batch(self) -> int | None:
        """Largest batch worth its price, in records: the larger noise scale, if both are known
        (McCandlish et al. 2018, Sec. 2.2).
        """
        scales = [math.inf if one is None else one for one in self.noise_scales.values()]
        most = max(self.records.values())
        return None if math.inf in scales else max(1, min(math.ceil(max(scales)), most))

    @property
    def error_ratio(self) -> float | None:
        """½η|λ|_max of a step of the run (App. B.1), its second over its largest first-order retain
        change: ½|λ|‖Δw‖²/(‖g_r‖‖Δw‖).
        """
        of, rate = self.curvature, self.learning_rate * self.step_length
        return None if of is None else 0.5 * rate * of.size

    def trusted_rate(self, error_ratio: float) -> float | None:
        """Learning rate at which `error_ratio` has this value, infinite without curvature."""
        if self.curvature is None:
            return None
        size = self.curvature.size * self.step_length
        return 2.0 * error_ratio / size if size > 0 else math.inf

    def record(self) -> dict[str, Any]:
        """Everything but the records' own contents, as JSON holds it."""
        intervals, bent = self.intervals, self.curvature
        curvature = bent and {
            "largest_eigenvalue": bent.largest,
            "smallest_eigenvalue": bent.smallest,
            "residual": bent.residual,
            "samples": self.curvature_samples,
            "error_ratio": self.error_ratio,
            "learning_rate_of_1_percent": self.trusted_rate(0.01) if bent.size else None,
            "learning_rate_of_10_percent": self.trusted_rate(0.1) if bent.size else None,
        }
        whole = None if intervals is None else intervals.row(0)
        if whole is not None:
            whole["regimes"] = whole[self.method.name]["regimes"]
            whole |= {key: getattr(intervals, key) for key in ("level", "replicates", "parts")}
        return {
            "loss": CrossEntropy.name,
            "method": self.method.name,
            "constraint": self.method.constraint,
            "constraint_mode": self.method.constraint_mode,
            "verdict": asdict(self.verdict),
            "records": self.records,
            "gradient_norms": dict(zip(SIDES, self.gradient_norms, strict=True)),
            "clip_factors": dict(zip(SIDES, self.clip, strict=True)),
            "noise_scales": self.noise_scales,
            "worthwhile_batch": self.worthwhile_batch,
            "hamu-q": asdict(self.hamu_q),
            "hamu-u": asdict(self.hamu_u),
            "intervals": whole,
            "frontiers": {
                name: {k: v.tolist() if isinstance(v, Tensor) else v for k, v in vars(one).items()}
                for name, one in self.frontiers.items()
            },
            "learning_rate": self.learning_rate,
            "curvature": curvature,
            "second_order": self.second_order and asdict(self.second_order),
            "conflicts": {
                side: {"records": len(of.values), "top_tenth_share": of.top_share, "top": of.top()}
                for side, of in self.conflicts.items()
            },
            "blocks": [self._block_record(number) for number in range(len(self.block_names))],
            "epochs_of_passes": self.epochs,
        }

    def _block_record(self, number: int) -> dict[str, Any]:
        """A block's hardness, with both variants' thresholds and regimes, and intervals if any."""
        found: dict[str, Any] = {"name": self.block_names[number]}
        for name, hardness in self.block_hardness.items():
            found[name] = {key: value[number].item() for key, value in vars(hardness).items()}
            found[name]["regime"] = hard.REGIMES[found[name]["regime"]]
        found |= {key: found[self.method.name][key] for key in ("kappa", "cos", "regime")}
        return found | {"intervals": self.intervals and self.intervals.row(1 + number)}


def check_settings(
    learning_rate: float,
    max_grad_norm: float | None,
    batch_size: int,
    most_batches: int | None,
    curvature_samples: int | None,
    bootstrap_memory: float,
) -> None:
    """Check the numbers that `assess_model` takes; a HamuError if one is out of range."""
    check_max_norm(max_grad_norm)
    for name, value, kind, least, expected in (
        ("learning_rate", learning_rate, Real, 1e-300, "a positive number: that of the run"),
        ("bootstrap_memory", bootstrap_memory, Real, 0, "a number of GB, 0 or more"),
        ("batch_size", batch_size, Integral, 1, "a whole number from 1 on"),
        ("most_batches (--assess_batches)", most_batches, Integral, 1, "a whole number from 1 on"),
        ("curvature_samples", curvature_samples, Integral, 0, "a whole number from 0 on"),
    ):
        if value is not None and not (isinstance(value, kind) and least <= value < math.inf):
            raise HamuError(f"{name} {value!r} must be {expected}")


def assess_model(
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
    """Assess an unlearning problem by cross-entropies; leaves model and data unchanged.

    The defaults cost at most three epochs' worth of passes: one forward and backward pass over all
    records, two forward passes for the records in conflict, and at most one epoch's worth for the
    curvature, which fewer than 299 records cannot pay for (docs/results/costs.md).

    Args:
        model: the model before unlearning.
        retain, forget: the two sets.
        collate: makes a batch of `batch_size` records at most.
        method: the HAMU method of the run; by default HAMU-Q with half of the feasible demand.
        learning_rate, max_grad_norm, blocks: of the run to come.
        most_batches: measure this many random batches of each side; by default all records.
        curvature_samples: retain records for the curvature, 0 for none; by default as many as one
            epoch pays for.
        bootstrap_memory: GB for the parts of the gradients that give the intervals.
        conflicts: find the records in conflict.
        seed: seed of every draw.
        progress: receives (done, total) in records of a forward and backward pass.

    Raises:
        HamuError: if a setting is out of range, a set is empty, nothing is trainable, or a gradient
            is not finite.
    """
    numbers = (batch_size, most_batches, curvature_samples, bootstrap_memory)
    check_settings(learning_rate, max_grad_norm, *numbers)
    method = HamuQ(0.5, constraint_mode="relative") if method is None else method
    if not isinstance(method, HamuQ | HamuU):
        name = getattr(method, "name", method)
        raise HamuError(
            f"method {name!r} has no constraint to assess; give HamuQ(...) or HamuU(...)"
        )
    assessed = AssessedModel(model, retain, forget, collate, batch_size, blocks, seed, progress)
    records, most = assessed.records, (most_batches or math.inf) * batch_size
    used = {side: int(min(count, most)) for side, count in records.items()}
    one_pass = sum(used.values())
    paid = affordable_samples(one_pass, batch_size)
    samples = min(paid if curvature_samples is None else curvature_samples, records["retain"])
    cost = product_cost(samples, batch_size)
    assessed.expected = one_pass * (1 + 2 * _FORWARD * conflicts) + cost
    with evaluating(model), without_tf32():  # no pass leaves a gradient behind
        parts = kept_parts(assessed, used, bootstrap_memory)
        sides = {side: parted_gradient(assessed, side, parts[side], used[side]) for side in SIDES}
        parted = PartedGram.of(assessed, sides["retain"], sides["forget"], used)
        gradients: dict[str, list[Tensor]] = {
            side: [reduce(torch.add, grads) for grads in zip(*kept, strict=True)]
            for side, (kept, _) in sides.items()
        }
        del sides
        found = _first_order(assessed, parted, method, max_grad_norm)
        found["noise_scales"] = {s: parted.noise_scale(s, used[s]) for s in SIDES}
        demand = learning_rate * found.pop("clipped_demand") / found["clip"][1]
        if samples:
            found |= _second_order(assessed, gradients, demand, samples)
        for side, other in (SIDES[::-1], SIDES) if conflicts else ():
            found["conflicts"][side] = _conflicts(assessed, side, gradients[other], used[side])
    return Assessment(
        method=method,
        records=records,
        measured_records=used,
        block_names=assessed.block_names,
        learning_rate=learning_rate,
        curvature_samples=samples if found["curvature"] else 0,
        epochs=assessed.finish() / sum(records.values()),
        **found,
    )


def measure_hardness(
    model: nn.Module,
    retain: Dataset[Any],
    forget: Dataset[Any],
    *,
    collate: Callable[[Any], Mapping[str, Tensor]],
    batch_size: int = 500,
) -> hard.Hardness:
    """Measure the hardness alone: one pass over all data of each side, in evaluation mode.

    Clips each side's mean gradient to a norm of 1; the thresholds are those of HAMU-Q at a demand
    of half of the feasible limit. For arguments and errors see `assess_model`.
    """
    how: dict[str, Any] = {"collate": collate, "batch_size": batch_size, "conflicts": False}
    how |= {"curvature_samples": 0, "bootstrap_memory": 0}
    return assess_model(model, retain, forget, **how).hamu_q


def _first_order(
    assessed: AssessedModel, parted: PartedGram, method: HamuQ | HamuU, max_norm: float | None
) -> dict[str, Any]:
    """The figures of an `Assessment` that follow from the gradients."""
    raw = parted.gram()
    for side, square in zip(SIDES, (raw.retain_sq, raw.forget_sq), strict=True):
        if not square.sum() > 0:
            raise HamuError(
                f"the {side} records measured are too few: their mean gradient is no longer than "
                f"its noise; raise --assess_batches, or leave it out"
            )
    clip = raw.clip_factors(max_norm)
    gram = raw.scaled(*clip)
    variants = hard.variants_of(method)
    statuses = {name: hard.constraint_status(gram, one) for name, one in variants.items()}
    retain_norm, forget_norm = raw.retain_sq.sum().sqrt(), raw.forget_sq.sum().sqrt()
    return {
        "gradient_norms": (retain_norm.item(), forget_norm.item()),
        "clip": (clip[0].item(), clip[1].item()),
        "gram": gram,
        "step_length": (statuses[method.name].radius.square().sum().sqrt() / retain_norm).item(),
        "hamu_q": hard.Hardness.at(statuses[HamuQ.name]),
        "hamu_u": hard.Hardness.at(statuses[HamuU.name]),
        "intervals": hard.bootstrap(parted, method, max_norm, seed=assessed.seed),
        "block_hardness": {name: hard.BlockHardness.at(one) for name, one in statuses.items()},
        "frontiers": {name: hard.frontier(gram, one) for name, one in variants.items()},
        "clipped_demand": statuses[HamuQ.name].clipped_demand.item(),
        "curvature": None,
        "second_order": None,
        "conflicts": {},
    }


def _second_order(
    assessed: AssessedModel, gradients: Mapping[str, list[Tensor]], demand: float, samples: int
) -> dict[str, Any]:
    """Spectrum of the retain Hessian and the second-order condition, if they fit in memory."""
    positions, parameters = assessed.positions("retain", samples), assessed.parameters
    size = min(assessed.batch_size, FULL_BATCH)
    batches = list(assessed.batches("retain", positions, size))
    count, done = sum(int(count_predictions(batch["labels"])) for batch in batches), 0
    of_hessian = hessian_product(
        lambda batch: assessed.total(assessed.score(batch)) / count, batches, parameters
    )

    def product(vector: Tensor) -> Tensor:
        nonlocal done
        found = of_hessian(vector)
        before, after = (product_cost(samples, size, done + n) for n in (0, 1))
        assessed.advance(after - before)
        done += 1
        return found

    try:
        spectrum = lanczos(product, parameters, steps=LANCZOS, tolerance=1e-2, seed=assessed.seed)
        form = parameters[0].device, at_least_float32(*parameters)
        g_r, g_f = (torch.cat([g.flatten().to(*form) for g in gradients[side]]) for side in SIDES)
        condition = second_order(product, g_r, g_f, spectrum, demand)
    except torch.OutOfMemoryError:
        warnings.warn(
            f"the curvature is left out: its {LANCZOS} directions, each as large as the trained "
            f"weights, do not fit in the device's memory",
            stacklevel=3,
        )
        return {}
    return {"curvature": spectrum, "second_order": condition}


def _conflicts(assessed: AssessedModel, side: str, gradient: list[Tensor], most: int) -> Conflicts:
    """So many records of a side against the other side's gradient."""
    positions = assessed.positions(side, most)
    known = getattr(assessed.data[side], "rows", None)
    rows = torch.arange(assessed.records[side]) if known is None else torch.as_tensor(known)

    def losses() -> Tensor:
        found, predictions = [], 0
        for batch in assessed.batches(side, positions):
            scored = assessed.score(batch)
            logits = scored.logits.double()
            each = nn.functional.cross_entropy(logits, scored.labels, reduction="none")
            found.append(scored.per_record(each).cpu())
            predictions += len(scored.labels)
            assessed.advance(_FORWARD * scored.records)
        values = torch.cat(found)
        return values * (len(values) / max(1, predictions))

    weights = [p for p in assessed.model.parameters() if p.is_floating_point()]
    values = gradient_alignment(losses, assessed.parameters, gradient, weights)
    return Conflicts(values, rows[positions])


def plain_answer(found: Assessment) -> str:
    """Answer in one sentence how hard it will be and whether to start, with basis and doubts."""
    counts, agree, ratio = found.measured_records, found.agreement, found.error_ratio
    notes = [
        f"measured on {counts['retain']:,} retain and "
        f"{counted(counts['forget'], 'forget records')} before any step, to first order"
    ]
    if found.intervals is None and counts != found.records:
        notes.append("with the noise of this sample, which makes it look easier than it is")
    if agree is not None and agree < _SURE:
        notes.append(f"other records may say otherwise: {percent(agree)} of resamples agree")
    if ratio is not None and ratio > ERROR_RATIO:
        notes.append(
            f"at learning rate {found.learning_rate:g} second order may be {ratio:.0%} of it"
        )
    return f"{found.verdict.answer} ({'; '.join(notes)})."
