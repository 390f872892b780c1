"""Curvature of the retain loss (paper, App. B.1) and the second-order condition (App. B.5).

With Q demanded of the forget loss to first order and the retain loss taken to second, the least
retain change over all steps, of any length, is F = ½((Q+C)²/A - B), where A = g_f'H⁻¹g_f,
B = g_r'H⁻¹g_r, C = g_r'H⁻¹g_f. It is positive, and collateral forgetting unavoidable, where
Q + C > √(AB), if H, the retain loss's Hessian, is positive definite. A network's is not: H + δI
takes its place, with a stated damping δ; the result then holds for that problem, in which the
retain loss rises more steeply.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from hamu.assess.gradients import FULL_BATCH, flat
from hamu.errors import HamuError

# Cost of a product with the Hessian for a record, in forward and backward passes, and of the next
# through the same graph (docs/results/costs.md).
_PRODUCT, _NEXT_PRODUCT = 3.3, 2.3
# products at most for the spectrum, and for each of the solver's two solutions
LANCZOS, SOLVER = 12, 10
_SETTLED = 0.1  # the largest residual that decides the condition

Product = Callable[[Tensor], Tensor]  # H·v of a flat vector, [P]


@dataclass(frozen=True)
class Curvature:
    """The largest and smallest eigenvalue of a Hessian, by Lanczos (inside the true range).

    `residual` is ‖Hv - λv‖ of the largest: the true spectrum has an eigenvalue that near.
    """

    largest: float
    smallest: float
    residual: float

    def error_ratio(self, learning_rate: float) -> float:
        """½η|λ|_max bounds second order over first order of a gradient step (App. B.1)."""
        return 0.5 * learning_rate * self.size

    def trusted_rate(self, error_ratio: float) -> float:
        """The learning rate at which `error_ratio` has this value; infinite without curvature."""
        return 2.0 * error_ratio / self.size if self.size > 0 else math.inf

    @property
    def size(self) -> float:
        """|λ|_max: λ_max, unless the Hessian bends down more than up."""
        return max(abs(self.largest), abs(self.smallest))


class Hessian:
    """H of the sum of some batches' losses, by a second backward pass through each batch.

    `loss_of_batch` gives a batch's part of the loss. The graph of a single batch is kept from
    product to product, which saves a third of each; freed with this object.
    """

    def __init__(
        self,
        loss_of_batch: Callable[[Any], Tensor],
        batches: Sequence[Any],
        parameters: Sequence[Tensor],
    ) -> None:
        self.parameters = parameters
        self._loss_of_batch, self._batches = loss_of_batch, batches
        self._kept: Sequence[Tensor] | None = None

    def product(self, vector: Tensor) -> Tensor:
        """H·v of a flat vector, [P]."""
        parts = torch.split(vector, [p.numel() for p in self.parameters])
        vectors = [v.view_as(p).to(p.dtype) for v, p in zip(parts, self.parameters, strict=True)]
        total = [torch.zeros_like(p) for p in self.parameters]
        keep = len(self._batches) == 1
        for batch in self._batches:
            grads = self._gradients(batch) if self._kept is None else self._kept
            self._kept = grads if keep else None
            inner = torch.stack([(g * v).sum() for g, v in zip(grads, vectors, strict=True)]).sum()
            if inner.requires_grad:  # a linear loss has no second derivative
                found = torch.autograd.grad(
                    inner, self.parameters, retain_graph=keep, materialize_grads=True
                )
                torch._foreach_add_(total, [part.detach() for part in found])
        return flat(total, self.parameters)

    def _gradients(self, batch: Any) -> Sequence[Tensor]:
        """Of a batch's loss, with the graph that a second backward pass needs."""
        with sdpa_kernel(SDPBackend.MATH):  # fused attention has no second derivative
            loss = self._loss_of_batch(batch)
            return torch.autograd.grad(
                loss, self.parameters, create_graph=True, materialize_grads=True
            )


def lanczos(
    product: Product,
    parameters: Sequence[Tensor],
    *,
    steps: int = 30,
    tolerance: float = 1e-3,
    seed: int = 0,
) -> Curvature:
    """The ends of a Hessian's spectrum by Lanczos' iteration with full orthogonalization.

    Args:
        product: H·v, see `Hessian.product`.
        parameters: the arguments of H.
        steps: products at most; keeps each direction, as large as the parameters.
        tolerance: enough once the residual of the largest eigenvalue is this share of it.
        seed: seed of the first direction.

    Raises:
        HamuError: if a product is not finite.
    """
    from scipy.linalg import eigh_tridiagonal

    generator = torch.Generator().manual_seed(seed)
    size = sum(p.numel() for p in parameters)
    first = parameters[0]
    direction = torch.randn(size, generator=generator, dtype=torch.float64)
    direction = direction.to(first.device, first.dtype)
    direction /= direction.norm()
    basis: list[Tensor] = []
    diagonal: list[float] = []
    off_diagonal: list[float] = []
    for _ in range(min(steps, size)):
        basis.append(direction)
        hv = product(direction).to(first.dtype)
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
        settled = residual <= tolerance * abs(values[-1])
        if settled or beta <= 1e-12 * abs(values).max():
            break
        off_diagonal.append(beta)
        direction = hv / beta
    return Curvature(float(values[-1]), float(values[0]), residual)


@dataclass(frozen=True)
class SecondOrder:
    """The second-order condition for one demand.

    Attributes:
        demand: Q, in loss.
        kappa: κ = g_r·g_f of the gradients as they are, not clipped.
        spherical_threshold: ‖g_r‖‖g_f‖ - λQ with λ the largest eigenvalue (Ineq. for H = λI).
        spherical_unavoidable: κ lies above it.
        positive_definite: of H, by Lanczos' eigenvalues and the solver's directions.
        damping: δ, 0 where H is positive definite by a margin.
        unavoidable: Q + C > √(AB) (and Q + C > 0), for H + δI; None if undecided.
        least_retain_change: F, in loss; None likewise.
        undecided: the reason in words; empty if decided.
        bound_threshold: the κ above which it is unavoidable by Lemma B.1, from the spectrum's ends.
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
    product: Product,
    retain: Tensor,
    forget: Tensor,
    spectrum: Curvature,
    demand: float,
    *,
    steps: int = SOLVER,
) -> SecondOrder:
    """The condition, with H⁻¹g by conjugate gradients.

    With the residual r = g - (H+δI)x and μ the smallest eigenvalue of H + δI, g'x falls short of
    g'(H+δI)⁻¹g by at most ‖r‖²/μ; the condition is decided only if it holds for any shortfall
    within that bound. As Lanczos' μ lies inside the true spectrum, ‖r‖ above 0.1 ‖g‖ decides
    nothing.

    Args:
        product: H·v for a flat vector v, [P].
        retain, forget: g_r and g_f, [P].
        spectrum: the ends of H's spectrum.
        demand: Q, in loss.
        steps: products with H at most for each of the two solutions.
    """
    kappa = retain.dot(forget).item()
    norms = (retain.norm() * forget.norm()).item()
    spherical = norms - spectrum.largest * demand
    margin = 1e-3 * spectrum.largest
    damped_by = max(-2.0 * spectrum.smallest, 0.0) + 10 * margin
    damping = 0.0 if spectrum.smallest > margin else damped_by

    def damped(v: Tensor) -> Tensor:
        return product(v) + damping * v

    of_forget, of_retain = (conjugate_gradients(damped, g, steps=steps) for g in (forget, retain))
    residual = max(of_forget.relative_residual, of_retain.relative_residual)
    # the largest eigenvalue of (H+δI)⁻¹ belongs to the smallest of H
    small, large = (1 / max(end + damping, 1e-100) for end in (spectrum.largest, spectrum.smallest))
    unavoidable: bool | None = None
    least: float | None = None
    negative, undecided = of_forget.negative or of_retain.negative, ""
    if negative:
        undecided = "there is a direction of negative curvature"
    else:
        a, b = forget.dot(of_forget.x).item(), retain.dot(of_retain.x).item()
        # off by r_r'(H+δI)⁻¹r_f, as a by r_f'…r_f
        c = (retain.dot(of_forget.x) + of_retain.x.dot(of_forget.residual)).item()
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
            undecided = f"the solver left a residual of {residual:.2g} after {steps} products"
    return SecondOrder(
        demand=demand,
        kappa=kappa,
        spherical_threshold=spherical,
        spherical_unavoidable=kappa > spherical,
        positive_definite=spectrum.smallest > 0 and not negative,
        damping=damping,
        unavoidable=unavoidable,
        least_retain_change=least,
        undecided=undecided,
        bound_threshold=((2 * large - small) * norms - demand) / small,
        residual=residual,
    )


@dataclass(frozen=True)
class Solution:
    """Approximate solution x of A·x = g, with g - Ax; `negative` if some pᵀAp ≤ 0."""

    x: Tensor
    residual: Tensor
    relative_residual: float
    negative: bool


def conjugate_gradients(
    product: Product, g: Tensor, *, steps: int = 50, tolerance: float = 1e-2
) -> Solution:
    """Solve A·x = g for a positive definite A, given A·v (Hestenes and Stiefel 1952).

    Stops after so many steps, or once ‖g - Ax‖ is the tolerance's share of ‖g‖.
    """
    x, residual, p = torch.zeros_like(g), g.clone(), g.clone()
    square = g_square = g.dot(g)
    negative = False
    for _ in range(steps):
        if square <= tolerance**2 * g_square:
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


@dataclass(frozen=True)
class HessianCost:
    """Cost of products with a Hessian of `samples` records, in records of a pass both ways."""

    samples: int
    batch_size: int

    @classmethod
    def affordable(
        cls, budget: float, records: int, batch_size: int, asked: int | None = None
    ) -> HessianCost:
        """As many of the records as asked for, else as pay for all products, if any do."""
        if asked is not None:
            return cls(min(asked, records), batch_size)
        products = LANCZOS + 2 * SOLVER
        one = cls(1, batch_size)
        samples = int(budget / one.of(products))
        if samples > one.size:  # several batches, whose graphs are not kept
            samples = max(one.size, int(budget / (products * _PRODUCT)))
        return cls(min(samples, records), batch_size)

    @property
    def size(self) -> int:
        """Records of a batch; a second derivative keeps several times the activations."""
        return min(self.batch_size, FULL_BATCH)

    def of(self, products: int) -> float:
        """The cost of so many products."""
        following = _NEXT_PRODUCT if self.samples <= self.size else _PRODUCT
        return self.samples * (_PRODUCT + (products - 1) * following) if products else 0.0
