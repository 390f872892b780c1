"""`Population`: running estimates of the Gram of the expected gradients, from those of batches.

The gradient of a batch is the expected gradient plus noise, and the noise enters both squared
norms: E‖g‖² = ‖E g‖² + tr Σ/n (McCandlish et al. 2018, App. A). It is independent from batch to
batch, so products of the gradients of *different* steps are free of it: g_s·g_t estimates ‖E g‖²
without bias where the weights move little in between, for a batch of one record too.

No gradient is kept for that, but a sample of each tensor's entries, chosen once at random: each
side has running means of it over `GROUPS` groups of steps, the k-th over steps k, k + GROUPS, ...
Products of means of different groups contain only products of different steps:

    ‖E g_r‖²        mean of A_k·A_l over k ≠ l            A_k, B_m: group means of g_r and g_f
    E g_r·E g_f     mean of A_k·B_m                       both batches are drawn independently
    (E g_r·E g_f)²  mean of (A_k·B_m)(A_l·B_n) over k ≠ l, m ≠ n

The last is needed for the angle, as the square of an estimate is too large by its variance.
Leaving out one group at a time (the jackknife) gives the standard error of what follows from them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any, get_type_hints

import torch
from torch import Tensor

from hamu.core.gram import PairGram
from hamu.core.methods.base import Method

GROUPS = 4
SAMPLED = 128  # entries of a tensor; twice as many changed no stop by more than a step
FEWEST = 16  # steps before an estimate is used, at least; and half a half-life
_DOUBTFUL = 0.3  # standard error of the headroom beyond which nothing is concluded
_PER_HALF_LIFE = 8  # estimates in a half-life: it changes little from one step to the next


@dataclass(frozen=True)
class PopulationStatus:
    """Standing of the constraint for the expected gradients, on the host.

    Attributes:
        headroom: `free_limit` over `clipped_demand`; infinite without a demand.
        error: standard error of the headroom.
        kappa: κ of the expected gradients, clipped like those of a batch.
        cos: cosθ between them.
        regime: index of the regime, see `regime_at`.
        conflict, demand, clipped_demand, free_limit, some_demand_is_free: see `ConstraintStatus`.
        retain_noise, forget_noise: variance of the batch's gradient over the squared norm of its
            expectation, tr Σ/(n‖E g‖²): the noise scale (McCandlish et al. 2018) in batches.
    """

    headroom: float
    error: float
    kappa: float
    cos: float
    regime: int
    conflict: bool
    demand: float
    clipped_demand: float
    free_limit: float
    some_demand_is_free: bool
    retain_noise: float
    forget_noise: float

    @property
    def judged(self) -> float:
        """Headroom that the criterion judges, see `judged`."""
        return judged(self.headroom, self.error)

    def confidence(self, margin: float = 0.0) -> float:
        """Probability that the headroom is below 1 + margin, were its errors normal."""
        gap = 1.0 + margin - self.headroom
        if not self.error:
            return float(gap > 0)
        return 0.5 * math.erfc(-gap / self.error / math.sqrt(2.0))


def judged(headroom: float, error: float) -> float:
    """Estimate of the headroom, infinite where its error leaves it open."""
    return headroom if error <= _DOUBTFUL else math.inf


_READ = tuple(one.name for one in fields(PopulationStatus))[2:]  # as `figures` has them


class Population:
    """Running estimates for one model, in steps that count half after `half_life` further ones."""

    def __init__(
        self, parameters: Sequence[Tensor], block_of: Sequence[int], blocks: int, half_life: float
    ) -> None:
        self._decay = 0.5 ** (1.0 / half_life)
        self._every = max(1, round(half_life / _PER_HALF_LIFE))
        self._fewest = max(FEWEST, half_life / 2)
        counts = torch.tensor([min(p.numel(), SAMPLED) for p in parameters])
        generator = torch.Generator().manual_seed(0)
        drawn = [_positions(p.numel(), generator) for p in parameters]
        self._positions = {torch.device("cpu"): drawn}
        present = torch.arange(SAMPLED) < counts[:, None]
        scale = torch.tensor([p.numel() for p in parameters]) / counts
        self._roots = scale.sqrt()[:, None] * present  # [T, SAMPLED]
        self._block_of = torch.tensor(block_of)
        self._kept = torch.cat([torch.ones(1, GROUPS), 1.0 - torch.eye(GROUPS)]).double()
        self._sums = torch.zeros(len(counts), 2, GROUPS, SAMPLED)
        self._weights = torch.zeros(GROUPS, dtype=torch.float64)
        self._squares = torch.zeros(2, blocks, dtype=torch.float64)
        self._steps = 0
        self.status: PopulationStatus | None = None
        self.to(parameters[0].device)

    def to(self, device: torch.device) -> None:
        """Move to the model's device."""
        for name in ("_roots", "_block_of", "_kept", "_sums", "_weights", "_squares"):
            setattr(self, name, getattr(self, name).to(device))
        self._at(device)

    def add(
        self,
        retain: Sequence[Tensor | None],
        forget: Sequence[Tensor | None],
        gram: PairGram,
        unscale: Tensor | None,
    ) -> None:
        """Add the gradients of a step, whose Gram is `gram`; those not finite count nothing."""
        drawn = torch.stack([self._drawn(side) for side in (retain, forget)], 1)
        squares = torch.stack([gram.retain_sq, gram.forget_sq])
        if unscale is not None:
            drawn, squares = drawn * unscale.float(), squares * unscale * unscale
        is_finite = gram.is_finite()
        decay = torch.where(is_finite, self._decay, 1.0)
        new = 1.0 - decay
        group = self._steps % GROUPS
        self._sums *= decay.float()
        self._sums[:, :, group] += torch.where(is_finite, drawn, 0.0) * new.float()
        self._weights *= decay
        self._weights[group] += new
        self._squares *= decay
        self._squares += torch.where(is_finite, squares, 0.0) * new
        self._steps += 1

    @property
    def is_due(self) -> bool:
        """True if the last step added is one of those that are followed by an estimate."""
        return self._steps >= self._fewest and self._steps % self._every == 0

    def grams(self, agree: Callable[[Tensor], Tensor]) -> tuple[PairGram, Tensor]:
        """Gram from all groups and from all but one, [L, 1 + GROUPS]; and the plain dot, [L].

        The Gram's dot is the root of the estimate of the squared one, for an angle without bias.
        `agree` makes sums equal on all processes.
        """
        rows = self._sums.flatten(1, 2).double()
        by_tensor = rows @ rows.transpose(1, 2)
        products = by_tensor.new_zeros(self._squares.shape[1], *by_tensor.shape[1:])
        products.index_put_((self._block_of,), by_tensor, accumulate=True)
        products = agree(products)
        r, f = slice(GROUPS), slice(GROUPS, None)
        kept = self._kept
        weights = kept * self._weights
        ones = weights.sum(1)
        pairs = ones.square() - weights.square().sum(1)  # of different groups

        def summed(matrix: Tensor) -> tuple[Tensor, Tensor]:
            """Sums of the kept columns, [L, J, GROUPS], and of all that is kept, [L, J]."""
            columns = (kept @ matrix) * kept
            return columns, columns.sum(2)

        def squared(own: Tensor) -> Tensor:
            same = own.diagonal(dim1=1, dim2=2) @ kept.T
            return ((summed(own)[1] - same) / pairs).clamp(min=0.0)

        across = products[:, r, f]
        columns, whole = summed(across)
        lines, _ = summed(across.transpose(1, 2))
        _, each = summed(across.square())
        dot_sq = whole.square() - columns.square().sum(2) - lines.square().sum(2) + each
        retain_sq, forget_sq = squared(products[:, r, r]), squared(products[:, f, f])
        dot_sq = torch.minimum((dot_sq / pairs.square()).clamp(min=0.0), retain_sq * forget_sq)
        dot = whole / ones.square()
        return PairGram(retain_sq, forget_sq, dot_sq.sqrt().copysign(whole)), dot[:, 0]

    def figures(
        self, method: Method, max_norm: float | None, agree: Callable[[Tensor], Tensor]
    ) -> dict[str, Tensor]:
        """Figures of the estimate for the host, for `judge`; nothing between two estimates."""
        if not self.is_due:
            return {}
        grams, dot = self.grams(agree)
        gram = PairGram(grams.retain_sq[:, 0], grams.forget_sq[:, 0], grams.dot[:, 0])
        clip = gram.clip_factors(max_norm)
        status = method.weigh(gram.scaled(*clip)).constraint
        assert status is not None
        reach = grams.retain_norm * grams.forget_norm
        norms = torch.stack([gram.retain_sq, gram.forget_sq]).sum(1)
        kappa, noise = dot.sum(), self._squares.sum(1) / self._weights.sum() / norms - 1.0
        found = {name: getattr(status, name) for name in _READ if hasattr(status, name)} | {
            "kappa": kappa * clip[0] * clip[1],
            "cos": kappa / norms.prod().sqrt(),
            "retain_noise": noise[0],
            "forget_noise": noise[1],
            "reach": status.max_demand,
            "sines": (reach * grams.sin).sum(0) / reach.sum(0),
        }
        return {f"population {name}": value for name, value in found.items()}

    def judge(self, read: Mapping[str, Any]) -> PopulationStatus | None:
        """Status from `figures` on the host; None if there is no new estimate."""
        if not self.is_due:
            return None
        found = {name: read[f"population {name}"] for name in _READ}
        demand, headroom, error = found["clipped_demand"], math.inf, math.inf
        if demand > 0:
            headroom = found["free_limit"] / demand
            error = _jackknife_error(read["population sines"][1:])
            error *= read["population reach"] / demand
        self.status = _status_of(headroom, error, *found.values())
        return self.status

    def _drawn(self, grads: Sequence[Tensor | None]) -> Tensor:
        """Sampled entries of a side by tensor, scaled to its size, [T, SAMPLED]."""
        none = self._roots[0]  # of a gradient that is not there
        rows = [
            torch.zeros_like(none) if g is None else torch.take(g, self._at(g.device)[number])
            for number, g in enumerate(grads)
        ]
        rows = [row if row.device == none.device else row.to(none.device) for row in rows]
        return torch.stack(rows).to(none.dtype) * self._roots

    def _at(self, device: torch.device) -> list[Tensor]:
        if device not in self._positions:
            drawn = self._positions[torch.device("cpu")]
            self._positions[device] = [positions.to(device) for positions in drawn]
        return self._positions[device]

    def state_dict(self) -> dict[str, Tensor]:
        """Running means, number of steps and latest status, as tensors."""
        status = [] if self.status is None else list(astuple(self.status))
        return self._tensors() | {
            "steps": torch.tensor(self._steps),
            "status": torch.tensor(status, dtype=torch.float64),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned."""
        for name, own in self._tensors().items():
            own.copy_(state[name])
        self._steps = int(state["steps"])
        values = state["status"].tolist()
        self.status = _status_of(*values) if values else None

    def _tensors(self) -> dict[str, Tensor]:
        return {"sums": self._sums, "weights": self._weights, "squares": self._squares}


def _status_of(*values: float) -> PopulationStatus:
    kinds = get_type_hints(PopulationStatus).values()
    return PopulationStatus(*(kind(value) for kind, value in zip(kinds, values, strict=True)))


def _positions(count: int, generator: torch.Generator) -> Tensor:
    """Flat positions of a tensor's sample, padded with the first; all of a small tensor."""
    if count <= SAMPLED:
        return torch.cat([torch.arange(count), torch.zeros(SAMPLED - count, dtype=torch.int64)])
    return torch.randint(count, (SAMPLED,), generator=generator)


def _jackknife_error(values: Sequence[float]) -> float:
    """Standard error from estimates that leave out one group each (Efron and Tibshirani 1993)."""
    if not all(map(math.isfinite, values)):
        return math.inf
    mean = sum(values) / len(values)
    return math.sqrt((len(values) - 1) / len(values) * sum((v - mean) ** 2 for v in values))
