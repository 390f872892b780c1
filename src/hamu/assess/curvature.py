"""How far first order can be trusted: the largest eigenvalue of a loss's Hessian (paper, App. B.1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from hamu.assess.vectors import flat, shaped
from hamu.errors import HamuError

LossOfBatch = Callable[[Any], Tensor]
ProductByParameter = Callable[
    [Sequence[Tensor]], list[Tensor]
]  # H·v of a tensor like each parameter


@dataclass(frozen=True)
class Curvature:
    """The ends of a Hessian's spectrum.

    Attributes:
        largest: eigenvalue, as far as Lanczos found it (it lies inside the true range).
        smallest: likewise.
        residual: ‖Hv - λv‖ of the largest; the true spectrum has an eigenvalue within this distance of it.
    """

    largest: float
    smallest: float
    residual: float

    def error_ratio(self, learning_rate: float) -> float:
        """½η|λ|_max: the second-order term of a gradient step over its first-order one, at most (App. B.1)."""
        return 0.5 * learning_rate * self.size

    def trusted_rate(self, error_ratio: float) -> float:
        """The learning rate at which `error_ratio` has this value; infinite without any curvature."""
        return 2.0 * error_ratio / self.size if self.size > 0 else float("inf")

    @property
    def size(self) -> float:
        """|λ|_max: λ_max, unless the Hessian bends down more than up."""
        return max(abs(self.largest), abs(self.smallest))


class Hessian:
    """H of the sum of some batches' losses, by a second backward pass through each batch.

    Where there is one batch its graph is kept from product to product: it is there while a product is computed in any
    case, and what it took to make it, a third of the whole, is then paid once. It goes with this object.

    Args:
        loss_of_batch: a batch's part of the loss, 0-dim, with a graph to the parameters.
        batches: the data.
        parameters: the parameters that H is taken over.
    """

    def __init__(
        self, loss_of_batch: LossOfBatch, batches: Sequence[Any], parameters: Sequence[Tensor]
    ) -> None:
        self.parameters = parameters
        self._loss_of_batch, self._batches = loss_of_batch, batches
        self._kept: Sequence[Tensor] | None = None

    def product(self, vector: Sequence[Tensor]) -> list[Tensor]:
        """H·v of a tensor like each parameter."""
        total = [torch.zeros_like(p) for p in self.parameters]
        keep = len(self._batches) == 1
        for batch in self._batches:
            grads = self._gradients(batch) if self._kept is None else self._kept
            self._kept = grads if keep else None
            inner = torch.stack([(g * v).sum() for g, v in zip(grads, vector, strict=True)]).sum()
            if (
                inner.requires_grad
            ):  # a loss that is linear in the parameters has no second derivative
                parts = torch.autograd.grad(
                    inner, self.parameters, retain_graph=keep, materialize_grads=True
                )
                torch._foreach_add_(total, [part.detach() for part in parts])
        return total

    def _gradients(self, batch: Any) -> Sequence[Tensor]:
        """Of a batch's loss, with the graph that a second backward pass needs."""
        with sdpa_kernel(
            SDPBackend.MATH
        ):  # the fused kernels of attention have no second derivative
            return torch.autograd.grad(
                self._loss_of_batch(batch),
                self.parameters,
                create_graph=True,
                materialize_grads=True,
            )


def lanczos(
    product: ProductByParameter,
    parameters: Sequence[Tensor],
    *,
    steps: int = 30,
    tolerance: float = 1e-3,
    seed: int = 0,
) -> Curvature:
    """The ends of the Hessian's spectrum by Lanczos' iteration, every new direction made orthogonal to all before.

    Args:
        product: H·v of a tensor like each parameter; see `Hessian.product`.
        parameters: what H is taken over.
        steps: products at most; each direction is kept, as large as the parameters.
        tolerance: enough once the residual of the largest eigenvalue is this share of it.
        seed: seed of the first direction.

    Raises:
        HamuError: if a product is not finite.
    """
    generator = torch.Generator().manual_seed(seed)
    size = sum(p.numel() for p in parameters)
    first = parameters[0]
    direction = torch.randn(size, generator=generator, dtype=torch.float64).to(
        first.device, first.dtype
    )
    direction /= direction.norm()
    basis: list[Tensor] = []
    diagonal: list[float] = []
    off_diagonal: list[float] = []
    for _ in range(min(steps, size)):
        basis.append(direction)
        hv = flat(product(shaped(direction, parameters)), parameters).to(first.dtype)
        diagonal.append(hv.dot(direction).item())
        if not torch.isfinite(hv).all():
            raise HamuError(
                "the Hessian is not finite: the loss has infinite slopes at these weights; assess without curvature, "
                "--curvature_samples 0"
            )
        for _twice in range(
            2
        ):  # once leaves rounding errors that grow into false copies of the same eigenvalue
            for known in basis:
                hv -= known.dot(hv) * known
        beta = hv.norm().item()
        values, vectors = torch.linalg.eigh(_tridiagonal(diagonal, off_diagonal))
        residual = abs(beta * vectors[-1, -1].item())
        if (
            residual <= tolerance * abs(values[-1].item())
            or beta <= 1e-12 * abs(values).max().item()
        ):
            break
        off_diagonal.append(beta)
        direction = hv / beta
    return Curvature(values[-1].item(), values[0].item(), residual)


def _tridiagonal(diagonal: list[float], off_diagonal: list[float]) -> Tensor:
    matrix = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    off = torch.tensor(off_diagonal, dtype=torch.float64)
    return matrix + torch.diag(off, 1) + torch.diag(off, -1) if off_diagonal else matrix
