"""When forgetting must hurt to second order, whatever the step (paper, App. B.5).

With Q demanded of the forget loss to first order and the retain loss taken to second, the least retain change over all
steps, of any length, is F = ½((Q+C)²/A - B), where A = g_f'H⁻¹g_f, B = g_r'H⁻¹g_r, C = g_r'H⁻¹g_f. It is positive,
and collateral forgetting unavoidable, where Q + C > √(AB). All of it assumes that H, the retain loss's Hessian, is
positive definite. A network's is not: then H + δI takes its place, with a damping δ that is stated, and what is shown
is shown for that problem, in which the retain loss rises more steeply than it does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hamu.assess.curvature import Curvature

_SETTLED = 0.1  # the largest residual with which anything is said: by then all that matters of the spectrum was met

FlatProduct = Callable[[Tensor], Tensor]  # H·v of a flat vector


@dataclass(frozen=True)
class SecondOrder:
    """The second-order condition for one demand.

    Attributes:
        demand: Q, in loss.
        kappa: κ = g_r·g_f of the gradients as they are, not clipped.
        spherical_threshold: ‖g_r‖‖g_f‖ - λQ with λ the largest eigenvalue (Ineq. for H = λI).
        spherical_unavoidable: κ lies above it.
        positive_definite: whether H seemed so, by the eigenvalues that Lanczos found and the solver's directions.
        damping: δ, 0 where H is positive definite by a margin.
        unavoidable: Q + C > √(AB) (and Q + C > 0), for H + δI; None if it cannot be told.
        least_retain_change: F, in loss; None likewise.
        undecided: why it cannot be told, in words; empty if it can.
        bound_threshold: what κ must exceed to make it unavoidable by Lemma B.1 alone, from the spectrum's ends.
        residual: the larger ‖(H+δI)x - g‖/‖g‖ of the two solutions.
    """

    demand: float
    kappa: float
    spherical_threshold: float
    spherical_unavoidable: bool
    positive_definite: bool
    damping: float
    unavoidable: bool | None
    least_retain_change: float | None
    undecided: str
    bound_threshold: float
    residual: float


def second_order(
    product: FlatProduct,
    retain: Tensor,
    forget: Tensor,
    spectrum: Curvature,
    demand: float,
    *,
    steps: int = 10,
) -> SecondOrder:
    """The condition, with H⁻¹g by conjugate gradients.

    What they do not reach within their steps is bounded: with the residual r = g - (H+δI)x and μ the smallest
    eigenvalue of H + δI, g'x falls short of g'(H+δI)⁻¹g by at most ‖r‖²/μ, and a verdict is given only if it holds
    however much of it is missing. As the μ that is known lies inside the true spectrum, ‖r‖ above 0.1 ‖g‖ decides
    nothing.

    Args:
        product: H·v for a flat vector v, [P].
        retain, forget: g_r and g_f, [P].
        spectrum: the ends of H's spectrum.
        demand: Q, in loss.
        steps: products with H at most, for each of the two solutions; with 0 the sphere and Lemma B.1 alone are told.
    """
    kappa = retain.dot(forget).item()
    norms = (retain.norm() * forget.norm()).item()
    spherical = norms - spectrum.largest * demand
    definite = spectrum.smallest > 0
    margin = 1e-3 * spectrum.largest
    damping = (
        0.0 if spectrum.smallest > margin else max(-2.0 * spectrum.smallest, 0.0) + 10 * margin
    )

    def damped(v: Tensor) -> Tensor:
        return product(v) + damping * v

    solutions = [conjugate_gradients(damped, g, steps=steps) for g in (forget, retain)]
    of_forget, of_retain = solutions
    residual = max(found.relative_residual for found in solutions)
    # the largest eigenvalue of (H+δI)⁻¹ belongs to the smallest of H
    small, large = (1 / max(end + damping, 1e-100) for end in (spectrum.largest, spectrum.smallest))
    bound = ((2 * large - small) * norms - demand) / small
    unavoidable: bool | None = None
    least: float | None = None
    undecided = ""
    if any(found.negative for found in solutions):
        definite, undecided = False, "there is a direction of negative curvature"
    else:
        a, b = forget.dot(of_forget.x).item(), retain.dot(of_retain.x).item()
        c = (
            retain.dot(of_forget.x) + of_retain.x.dot(of_forget.residual)
        ).item()  # off by r_r'(H+δI)⁻¹r_f, as a by r_f'…r_f
        missing_a, missing_b = (
            found.residual.dot(found.residual).item() * large for found in (of_forget, of_retain)
        )
        missing_c = math.sqrt(missing_a * missing_b)
        above = demand + c - missing_c > math.sqrt((a + missing_a) * (b + missing_b))
        below = demand + c + missing_c <= math.sqrt(max(a * b, 0.0))
        if residual <= _SETTLED and (above or below):
            unavoidable = above
            # where it does not bind, the best step for the retain loss alone forgets enough
            least = 0.5 * ((demand + c) ** 2 / a - b) if demand + c > 0 else -0.5 * b
        else:
            undecided = (
                f"the solver left a residual of {residual:.2g} after {steps} products"
                if steps
                else "so few records pay for no product of the solver; --curvature_samples N takes N whatever they cost"
            )
    return SecondOrder(
        demand,
        kappa,
        spherical,
        kappa > spherical,
        definite,
        damping,
        unavoidable,
        least,
        undecided,
        bound,
        residual,
    )


@dataclass(frozen=True)
class Solution:
    """Of A·x = g.

    Attributes:
        x: as far as it was found, [P].
        residual: g - Ax, [P].
        relative_residual: ‖g - Ax‖/‖g‖, 0 for g = 0.
        negative: whether a direction p with pᵀAp ≤ 0 was met, so that A is not positive definite.
    """

    x: Tensor
    residual: Tensor
    relative_residual: float
    negative: bool


def conjugate_gradients(
    product: FlatProduct, g: Tensor, *, steps: int = 50, tolerance: float = 1e-2
) -> Solution:
    """Solve A·x = g for a positive definite A (Hestenes and Stiefel 1952).

    Args:
        product: A·v.
        g: the right-hand side, flat.
        steps: products with A at most.
        tolerance: enough once ‖g - Ax‖ is this share of ‖g‖.

    Returns:
        The `Solution`.
    """
    x = torch.zeros_like(g)
    residual = g.clone()
    p = residual.clone()
    square, g_square = residual.dot(residual), g.dot(g)
    for _ in range(steps):
        if square <= tolerance**2 * g_square:
            break
        a_p = product(p)
        p_a_p = p.dot(a_p)
        if p_a_p <= 0:
            return Solution(x, residual, (square / g_square).sqrt().item(), True)
        step = square / p_a_p
        x = x + step * p
        residual = residual - step * a_p
        square, last = residual.dot(residual), square
        p = residual + (square / last) * p
    return Solution(x, residual, (square / g_square).sqrt().item() if g_square > 0 else 0.0, False)
