"""Curvature of the retain loss (paper, App. B.1) and the second-order condition (App. B.5).

With Q demanded of the forget loss to first order and the retain loss taken to second, the least
retain change over all steps, of any length, is F = ½((Q+C)²/A - B), where A = g_f'H⁻¹g_f,
B = g_r'H⁻¹g_r, C = g_r'H⁻¹g_f. It is positive, and collateral forgetting unavoidable, where
Q + C > √(AB), if H, the retain loss's Hessian, is positive definite. A network's is not: H + δI
takes its place, with a stated damping δ; the result then holds for that problem, in which the
retain loss rises more steeply.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from hamu.assess.gradients import FULL_BATCH
from hamu.errors import HamuError

# Cost of a product with the Hessian for a record, in forward and backward passes, and of the next
# through the same graph (docs/results/costs.md).
_PRODUCT, _NEXT_PRODUCT = 3.3, 2.3
# products at most for the spectrum, and for each of the solver's two solutions
LANCZOS, SOLVER = 12, 10
_FEWEST = 4  # records
_SETTLED = 0.1  # the largest residual that decides the condition

Product = Callable[[Tensor], Tensor]  # H·v of a flat vector, [P]


@dataclass(frozen=True)
class Curvature:
    """Largest eigenvalue of a Hessian, and a bound of the smallest from above, by Lanczos."""

    largest: float
    smallest: float
    residual: float  # ‖Hv - λv‖ of the largest: the true spectrum has an eigenvalue that near

    @property
    def size(self) -> float:
        """|λ|_max: λ_max, unless the Hessian bends down more than up."""
        return max(abs(self.largest), abs(self.smallest))


def hessian_product(
    loss_of_batch: Callable[[Any], Tensor], batches: Sequence[Any], parameters: Sequence[Tensor]
) -> Product:
    """H·v of the sum of some batches' losses, in float32 at least.

    `loss_of_batch` gives a batch's part of the loss. The graph of a single batch is kept from
    product to product, which saves a third of each.
    """
    kept: Sequence[Tensor] | None = None
    is_single = len(batches) == 1
    how: dict[str, Any] = {"inputs": parameters, "materialize_grads": True}

    def product(vector: Tensor) -> Tensor:
        nonlocal kept
        parts = torch.split(vector, [p.numel() for p in parameters])
        vectors = [v.view_as(p).to(p) for v, p in zip(parts, parameters, strict=True)]
        total = [torch.zeros_like(p, dtype=at_least_float32(p)) for p in parameters]
        for batch in batches:
            with sdpa_kernel(SDPBackend.MATH):  # fused attention has no second derivative
                grads = kept or torch.autograd.grad(loss_of_batch(batch), create_graph=True, **how)
            kept = grads if is_single else None
            products = [
                (g * v).sum().to(vector.device) for g, v in zip(grads, vectors, strict=True)
            ]
            inner = torch.stack(products).sum()
            found = torch.autograd.grad(inner, retain_graph=is_single, **how)
            for known, grad in zip(total, found, strict=True):
                known.add_(grad)
        return torch.cat([t.flatten().to(vector.device) for t in total])

    return product


def at_least_float32(*tensors: Tensor) -> torch.dtype:
    """The widest of their types and float32: vectors of other precision lose their angles."""
    return reduce(torch.promote_types, (t.dtype for t in tensors), torch.float32)


def lanczos(
    product: Product,
    parameters: Sequence[Tensor],
    *,
    steps: int = 30,
    tolerance: float = 1e-3,
    seed: int = 0,
) -> Curvature:
    """Find a Hessian's largest eigenvalue by Lanczos' iteration with full orthogonalization.

    Ends once its residual is the tolerance's share of it; keeps a direction [P] for each step.
    """
    from scipy.linalg import eigh_tridiagonal

    generator = torch.Generator().manual_seed(seed)
    size = sum(p.numel() for p in parameters)
    direction = torch.randn(size, generator=generator, dtype=torch.float64)
    direction = direction.to(parameters[0].device, at_least_float32(*parameters))
    direction /= direction.norm()
    basis: list[Tensor] = []
    diagonal: list[float] = []
    off_diagonal: list[float] = []
    for _ in range(min(steps, size)):
        basis.append(direction)
        hv = product(direction).to(direction.dtype)
        diagonal.append(hv.dot(direction).item())
        if not torch.isfinite(hv).all():
            raise HamuError(
                "the Hessian is not finite: the loss has infinite slopes at these weights; "
                "assess without curvature, --curvature_samples 0"
            )
        # once leaves rounding errors that grow into false copies of an eigenvalue
        for known in [*basis, *basis]:
            hv -= known.dot(hv) * known
        beta = hv.norm().item()
        values, vectors = eigh_tridiagonal(diagonal, off_diagonal)
        residual = abs(beta * float(vectors[-1, -1]))
        if residual <= tolerance * abs(values[-1]) or beta <= 1e-12 * abs(values).max():
            break
        off_diagonal.append(beta)
        direction = hv / beta
    return Curvature(float(values[-1]), float(values[0]), residual)


@dataclass(frozen=True)
class SecondOrder:
    """Second-order condition for one demand, of gradients as they are, not clipped."""

    demand: float  # Q, in loss
    kappa: float  # g_r·g_f
    positive_definite: bool  # H, by Lanczos' eigenvalues and the solver's directions
    damping: float  # δ, 0 where H is positive definite by a margin
    unavoidable: bool | None  # Q + C > √(AB) (and Q + C > 0), for H + δI; None if undecided
    least_retain_change: float | None  # F, in loss; None likewise
    undecided: str  # the reason in words; empty if decided
    residual: float  # the larger ‖(H+δI)x - g‖/‖g‖ of the two solutions


def second_order(
    product: Product,
    retain: Tensor,
    forget: Tensor,
    spectrum: Curvature,
    demand: float,
    *,
    steps: int = SOLVER,
) -> SecondOrder:
    """Evaluate the condition, with H⁻¹g by conjugate gradients.

    With the residual r = g - (H+δI)x and μ the smallest eigenvalue of H + δI, g'x falls short of
    g'(H+δI)⁻¹g by at most ‖r‖²/μ; the condition is decided only if it holds for any shortfall
    within that bound. As Lanczos' μ lies inside the true spectrum, ‖r‖ above 0.1 ‖g‖ decides
    nothing.

    `retain` and `forget` are g_r and g_f, [P], `demand` is Q in loss; each of the two solutions
    takes at most so many products with H.
    """
    kappa = retain.dot(forget).item()
    margin, smallest = 1e-3 * spectrum.largest, spectrum.smallest
    damping = 0.0 if smallest > margin else max(-2.0 * smallest, 0.0) + 10 * margin

    def damped(v: Tensor) -> Tensor:
        return product(v) + damping * v

    x_f, x_r = (conjugate_gradients(damped, g, steps) for g in (forget, retain))
    residual = max(x_f.relative_residual, x_r.relative_residual)
    large = 1 / max(smallest + damping, 1e-100)  # the largest eigenvalue of (H+δI)⁻¹
    unavoidable, least, undecided = None, None, ""
    if x_f.negative or x_r.negative:
        undecided = "there is a direction of negative curvature"
    else:
        a, b = forget.dot(x_f.x).item(), retain.dot(x_r.x).item()
        # off by r_r'(H+δI)⁻¹r_f, as a by r_f'…r_f
        c = demand + (retain.dot(x_f.x) + x_r.x.dot(x_f.residual)).item()
        missing_a, missing_b = (x.residual.dot(x.residual).item() * large for x in (x_f, x_r))
        missing_c = math.sqrt(missing_a * missing_b)
        above = c - missing_c > math.sqrt((a + missing_a) * (b + missing_b))
        below = c + missing_c <= math.sqrt(max(a * b, 0.0))
        if residual <= _SETTLED and (above or below):
            # where it does not bind, the best step for the retain loss alone forgets enough
            unavoidable, least = above, 0.5 * (c**2 / a - b) if c > 0 else -0.5 * b
        else:
            undecided = f"the solver left a residual of {residual:.2g} after {steps} products"
    return SecondOrder(
        demand=demand,
        kappa=kappa,
        positive_definite=smallest > 0 and not (x_f.negative or x_r.negative),
        damping=damping,
        unavoidable=unavoidable,
        least_retain_change=least,
        undecided=undecided,
        residual=residual,
    )


class Solution(NamedTuple):
    """Approximate solution of A·x = g."""

    x: Tensor
    residual: Tensor  # g - Ax
    relative_residual: float
    negative: bool  # some pᵀAp ≤ 0


def conjugate_gradients(product: Product, g: Tensor, steps: int) -> Solution:
    """Solve A·x = g for a positive definite A, given A·v (Hestenes and Stiefel 1952).

    Stops after so many steps, or once ‖g - Ax‖ is a hundredth of ‖g‖.
    """
    x, residual, p = torch.zeros_like(g), g.clone(), g.clone()
    square = g_square = g.dot(g)
    negative = False
    for _ in range(steps):
        if square <= 1e-2**2 * g_square:
            break
        a_p = product(p)
        p_a_p = p.dot(a_p)
        negative = bool(p_a_p <= 0)
        if negative:
            break
        step = square / p_a_p
        x = x + step * p
        residual = residual - step * a_p
        square, last = residual.dot(residual), square
        p = residual + (square / last) * p
    relative = (square / g_square).sqrt().item() if g_square > 0 else 0.0
    return Solution(x, residual, relative, negative)


def product_cost(samples: int, batch_size: int, products: int = LANCZOS + 2 * SOLVER) -> float:
    """Cost of products with a Hessian of some records, in records of a pass both ways."""
    following = _NEXT_PRODUCT if samples <= min(batch_size, FULL_BATCH) else _PRODUCT
    return samples * (_PRODUCT + (products - 1) * following) if products else 0.0


def affordable_samples(budget: float, batch_size: int) -> int:
    """Records for the Hessian that pay for all products; none below four, which tell too little."""
    size, samples = min(batch_size, FULL_BATCH), int(budget / product_cost(1, batch_size))
    if samples > size:  # several batches, whose graphs are not kept
        samples = max(size, int(budget / ((LANCZOS + 2 * SOLVER) * _PRODUCT)))
    return samples if samples >= _FEWEST else 0
