"""How many products with the Hessian an assessment may compute, over how many records, given what they may cost."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hamu.assess.gradients import FULL_BATCH

# What a product with the Hessian costs for a record, in forward and backward passes, and one more through the same
# graph (docs/results/assess_cost.md).
_PRODUCT, _NEXT_PRODUCT = 3.3, 2.3
LANCZOS, SOLVER = (
    12,
    10,
)  # products at most for the spectrum, and for each of the solver's two solutions
_FEWEST_PRODUCTS = 4  # of Lanczos' iteration that tell anything of a largest eigenvalue


@dataclass(frozen=True)
class HessianBudget:
    """How many products with the Hessian may be computed, over how many records.

    Attributes:
        samples: records that the Hessian is taken over, 0 for none.
        batch_size: of the passes of the assessment.
        lanczos_steps: products at most for the spectrum.
        most_cost: what all of them may cost, in records of a forward and backward pass.
    """

    samples: int
    batch_size: int
    lanczos_steps: int
    most_cost: float = math.inf

    @classmethod
    def asked_or_affordable(
        cls, asked: int | None, budget: float, records: int, batch_size: int
    ) -> HessianBudget:
        """Over as many records as are asked for, whatever that costs; where nothing is, over as many as pay for it.

        Args:
            asked: records that the Hessian is to be taken over, 0 for none; None for as many as are affordable.
            budget: what all products may cost then, in records of a forward and backward pass.
            records: those that there are.
            batch_size: of the passes of the assessment.
        """
        if asked is None:
            return cls.affordable(budget, records, batch_size)
        return cls(min(asked, records), batch_size, LANCZOS)

    @classmethod
    def affordable(cls, budget: float, records: int, batch_size: int) -> HessianBudget:
        """Over as many records as pay for all; where they pay for too few products over a single one, none."""
        single = cls(1, batch_size, LANCZOS, budget)
        products = LANCZOS + 2 * SOLVER
        samples = int(budget / single.cost(products))
        if samples > single.size:
            samples = max(single.size, int(budget / (products * _PRODUCT)))
        samples = min(max(1, samples), records)
        fitting = int((budget / samples - _PRODUCT) / _NEXT_PRODUCT) + 1
        if fitting < _FEWEST_PRODUCTS:
            return cls(0, batch_size, 0, budget)
        return cls(samples, batch_size, min(LANCZOS, fitting), budget)

    @property
    def size(self) -> int:
        """Records of a batch."""
        return min(
            self.batch_size, FULL_BATCH
        )  # a second derivative keeps several times the activations

    def cost(self, products: int) -> float:
        """Of so many, in records of a forward and backward pass."""
        following = _NEXT_PRODUCT if self.samples <= self.size else _PRODUCT
        return self.samples * (_PRODUCT + (products - 1) * following) if products else 0.0

    def solver_steps_left(self, done: int) -> int:
        """Products at most for each of the two solutions, of what is left after so many."""
        if math.isinf(self.most_cost):
            return SOLVER
        step = self.cost(done + 2) - self.cost(done)
        return max(0, min(SOLVER, int((self.most_cost - self.cost(done)) / step)))
