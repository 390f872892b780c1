"""HAMU-Q and HAMU-U: the closed form of the paper's constrained problems, per block.

Both solve one problem: among all steps of length R_i that change the constrained loss by at least
Q_i, find the best for the objective. With g_o the objective's gradient, g_c the constrained
gradient, all divided by the learning rate η (g* = -Δw/η, r = R/η, q = Q/η), block i gets

    φ = q_i / (r_i ‖g_c‖)      the demanded share of the block's reach
    direct     cosθ ≤ -φ :  g* = (r/‖g_o‖) g_o
    rectified  otherwise :  g* = (r/‖g_o‖) p·g_o - (r/‖g_c‖) (φ + p·cosθ) g_c,  p = √(1-φ²)/sinθ

HAMU-Q has g_o = g_r, g_c = g_f (Problem 1, Proposition 4.3); HAMU-U has g_o = -g_f, g_c = -g_r
(App. B.6).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from numbers import Real
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from hamu.core.gram import PairGram, Side
from hamu.core.methods import listed
from hamu.core.methods.base import (
    ConstraintStatus,
    Criterion,
    Method,
    OnInfeasible,
    StoppingRule,
    Weights,
    ratio,
)
from hamu.errors import HamuError, unknown

ConstraintMode = Literal["absolute", "relative"]
_FLOAT64_EPS = torch.finfo(torch.float64).eps
_UNBOUNDED = 1e300  # finite, so that times a demand of 0 it is 0
_FEASIBLE_SLACK = 1e-12  # rounding of a sum of shares is not infeasibility


@dataclass(frozen=True)
class _Hamu(Method):
    """Settings of both variants, documented at `HamuQ`, and the closed form."""

    constraint: float = 0.5
    constraint_mode: ConstraintMode = "absolute"
    distribution: Literal["norm_product", "uniform"] | tuple[float, ...] = "norm_product"
    radius: Literal["gradient"] | float = "gradient"
    on_infeasible: OnInfeasible = "stop"
    stopping: StoppingRule | Criterion = "aggregate"

    def __post_init__(self) -> None:
        for name, kind in (("constraint_mode", ConstraintMode), ("on_infeasible", OnInfeasible)):
            if getattr(self, name) not in get_args(kind):
                raise unknown(name, getattr(self, name), get_args(kind))
        constraint, radius, shares = self.constraint, self.radius, self.distribution
        if not 0 < _number(constraint) < math.inf:
            raise HamuError(
                f"constraint {constraint!r} must be a positive number: the loss change to demand "
                f"per unit of learning rate (the paper uses 0.5)"
            )
        if self.constraint_mode == "relative" and constraint > 1:
            raise HamuError(
                f"a relative constraint is a share of what is possible, in (0, 1]; got {constraint}"
            )
        if radius != "gradient" and not 0 < _number(radius) < math.inf:
            raise HamuError(f'radius {radius!r} must be positive (R/η), or "gradient"')
        if not isinstance(shares, str):
            object.__setattr__(self, "distribution", _checked_shares(shares))
        elif shares not in (ways := ("norm_product", "uniform")):
            raise unknown("distribution", shares, (*ways, "one share per block"))
        _ = self.stopping_rule  # checks the criterion's name now, not at the first step

    @property
    def stopping_rule(self) -> StoppingRule:
        """The rule behind `stopping`."""
        rule = self.stopping
        return rule if isinstance(rule, StoppingRule) else StoppingRule(rule)

    constrained: ClassVar[Side]

    def weigh(self, gram: PairGram) -> Weights:
        """The closed form above, for all blocks at once; see `Method.weigh`."""
        given, is_swapped = gram, self.constrained == "retain"
        if is_swapped:  # from here on g_r and g_f stand for g_o and g_c
            gram = replace(gram, retain_sq=gram.forget_sq, forget_sq=gram.retain_sq)
        radius = gram.retain_norm
        if not isinstance(self.radius, str):
            radius = torch.full_like(radius, self.radius)
        reach = radius * gram.forget_norm
        demand, max_demand = self._distribute(reach)
        fraction = (demand / reach).masked_fill(demand == 0, 0.0)
        objective, constrained, direct = self._step(gram, radius, fraction)
        weights = (constrained.neg(), objective.neg()) if is_swapped else (objective, constrained)

        margin, criterion = self.stopping_rule.margin, self.stopping_rule.criterion
        # The criterion follows from κ > κ2 ≥ 0; while κ ≤ 0 a feasible demand costs nothing (B.4).
        of_any = criterion == "any"
        conflict = conflicting = (gram.cos > 0).any() if of_any else gram.dot.sum() > 0
        if criterion in ("aggregate", "off"):
            # The sum includes the sines of opposed blocks, which are no limit, and a step that
            # gains on both sides can meet it; so the criterion also requires a price.
            if margin:
                objective, constrained, _ = self._step(gram, radius, fraction * (1.0 + margin))
            conflict = conflicting & (objective @ gram.retain_sq + constrained @ gram.dot < 0)
        clipped_demand = torch.minimum(demand, reach)
        free_limit = self._free_limit(gram, radius, reach, clipped_demand)
        within = (fraction <= 1.0 + _FEASIBLE_SLACK).all()
        status = ConstraintStatus(
            fraction=fraction,
            direct=direct,
            demand=demand.sum(),
            clipped_demand=clipped_demand.sum(),
            max_demand=max_demand,
            free_limit=torch.where(conflicting, free_limit, max_demand),
            conflict=conflict,
            feasible=within & (max_demand > 0),  # a share of nothing promises nothing
            gram=given,
            radius=radius,
            constrained=self.constrained,
            margin=margin,
        )
        return Weights(*weights, status)

    def _step(
        self, gram: PairGram, radius: Tensor, fraction: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Weights of g_o and g_c, and the direct blocks, [L] each, for min(φ, 1)."""
        phi = fraction.clamp(max=1.0)
        cos, sin = gram.cos, gram.sin
        direct = (cos <= -phi) | (gram.forget_norm == 0)
        # A collinear block's perpendicular is rounding noise, which must not be normalised into a
        # full step: only the part along g_c stays, which meets the demand. Elsewhere the
        # small term in the root covers rounding of the Gram and keeps the step within its radius.
        perpendicular = ((1.0 - phi) * (1.0 + phi) / (sin * sin + 8 * _FLOAT64_EPS)).sqrt()
        perpendicular = perpendicular.masked_fill(gram.collinear, 0.0)

        objective = perpendicular.masked_fill(direct, 1.0)
        if not isinstance(self.radius, str):
            objective = ratio(radius, gram.retain_norm) * objective
        along = torch.addcmul(phi, perpendicular, cos)
        constrained = (ratio(radius, gram.forget_norm) * along).neg()
        return objective, constrained.masked_fill(direct, 0.0), direct

    def _distribute(self, reach: Tensor) -> tuple[Tensor, Tensor]:
        """q_i, the demand on each block, [L]; and the largest demand so divided, 0-dim."""
        if not isinstance(self.distribution, str):
            shares = reach.new_tensor(self.distribution)
            if shares.shape != reach.shape:
                raise HamuError(
                    f"the constraint has {shares.numel()} shares, but there are {reach.numel()} "
                    f"blocks; give one each"
                )
        elif self.distribution == "uniform":
            shares = (reach > 0).to(reach.dtype)
        else:
            shares = reach
        whole = shares.sum()
        max_demand = whole
        if shares is not reach:  # the block that reaches its limit first
            limits = (reach * whole / shares).masked_fill(shares == 0, math.inf)
            max_demand = limits.min().masked_fill(whole == 0, 0.0)
        # without any reach (a zero gradient) the demand stays whole, on every block: infeasible
        total = self.constraint * (max_demand if self.constraint_mode == "relative" else 1.0)
        return torch.where(whole > 0, total * shares / whole, total / shares.numel()), max_demand

    def _free_limit(
        self, gram: PairGram, radius: Tensor, reach: Tensor, clipped_demand: Tensor
    ) -> Tensor:
        """Largest demand without a cost, by the stopping criterion, where κ > 0; 0-dim."""
        criterion = self.stopping_rule.criterion
        if criterion == "global":
            whole = gram.total()
            return (radius * radius).sum().sqrt() * whole.forget_norm[0] * whole.sin[0]
        if criterion == "any":
            free = torch.where(gram.cos > 0, reach * gram.sin, reach)
            unbounded = torch.full_like(clipped_demand, _UNBOUNDED)
            tightest = torch.where(clipped_demand > 0, free / clipped_demand, unbounded).min()
            return tightest * clipped_demand.sum()
        return (reach * gram.sin).sum()


def _checked_shares(values: Iterable[float]) -> tuple[float, ...]:
    values = values.tolist() if isinstance(values, Tensor) else values
    shares = tuple(values) if isinstance(values, Iterable) else ()
    if not (all(0 <= _number(one) < math.inf for one in shares) and sum(shares) > 0):
        raise HamuError(
            "the shares of the constraint must be finite, non-negative and not all zero"
        )
    return shares


def _number(value: object) -> float:
    """Value of a number; NaN for anything else, a bool too."""
    return float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan


@listed("hamu-q")
@dataclass(frozen=True)
class HamuQ(_Hamu):
    """HAMU-Q: raise the forget loss by at least Q per step at the least retain cost (Alg. 1).

    Args:
        constraint: the rise of the forget loss demanded of every step. In mode "absolute" it is
            Q/η, in loss per unit of learning rate (the paper's Q = 0.5η is 0.5); in mode "relative"
            it is φ in (0, 1], the share of the largest rise that the gradients allow, feasible
            wherever they allow any.
        constraint_mode: "absolute" (the paper) or "relative".
        distribution: division of the demand over blocks: "norm_product" in proportion to each
            block's reach, ‖g_r,i‖‖g_f,i‖ (the paper, Sec. 5.1); "uniform" in equal parts over the
            blocks with any reach (neither gradient zero; with a number as radius, the forget
            gradient not zero); or one non-negative share per block, normalised to sum to 1.
        radius: "gradient" for R_i = η‖g_r,i‖ (the paper), or a number R/η for every block.
        on_infeasible: action on a demand beyond the radius: "stop" the run (the paper), "clamp" the
            demand to the possible, or "skip" the step.
        stopping: name of a criterion, or a `StoppingRule`.

    Raises:
        HamuError: if a value is out of range.
    """

    constrained: ClassVar[Side] = "forget"


@listed("hamu-u")
@dataclass(frozen=True)
class HamuU(_Hamu):
    """HAMU-U: lower the retain loss by at least U per step, forget as much as possible (Alg. 2).

    Args:
        constraint: the fall of the retain loss demanded of every step. In mode "absolute" it is
            U/η, in loss per unit of learning rate; in mode "relative" it is φ in (0, 1], the share
            of the largest fall that the gradients allow.
        radius: "gradient" for R_i = η‖g_f,i‖ (the paper, App. B.6), or a number R/η for every
            block.
        constraint_mode, distribution, on_infeasible, stopping: as of `HamuQ`, with both sides
            exchanged.

    Raises:
        HamuError: if a value is out of range.
    """

    constrained: ClassVar[Side] = "retain"
