"""An assessed model and the mean gradients of both its sides, in parts for the bootstrap."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from hamu.core.forward import predict_logits, restored
from hamu.core.gram import (
    SIDES,
    WIDENED,
    Blocks,
    PairGram,
    combine_dtype,
    group_blocks,
    trainable_parameters,
)
from hamu.core.objectives import CrossEntropy, Scored
from hamu.data import batch_of
from hamu.errors import HamuError

FEWEST_PARTS = 8  # with fewer, a 95% interval covers some 80% of the truths
_MOST_PARTS = 16
Parts = tuple[list[list[Tensor]], Tensor]
FULL_BATCH = 128  # records; a larger batch costs hardly less for each of them


def norm(tensors: Sequence[Tensor], order: float = 2.0) -> float:
    """Norm of all entries in float64, read from the device once."""
    pieces = [p for t in tensors if t.numel() for p in torch.split(t.reshape(-1), WIDENED)]
    norms = torch._foreach_norm(pieces, order, dtype=torch.float64)
    together = torch.stack([n.to(norms[0].device) for n in norms])
    return float(torch.linalg.vector_norm(together, order).item())


class AssessedModel:
    """Model with the data to assess it on; losses are cross-entropies.

    `progress` receives what is done, and expected, in records of a forward and backward pass.
    """

    def __init__(
        self,
        model: nn.Module,
        retain: Dataset[Any],
        forget: Dataset[Any],
        collate: Callable[[Any], Mapping[str, Tensor]],
        batch_size: int = 500,
        blocks: Blocks = "tensor",
        seed: int = 42,
        progress: Callable[[float, float], None] | None = None,
    ) -> None:
        self.model, self._collate, self.batch_size = model, collate, batch_size
        self.seed, self._progress = seed, progress or (lambda done, expected: None)
        self._done, self.expected = 0.0, math.inf
        self.data = {"retain": retain, "forget": forget}
        self.records = {side: len(data) for side, data in self.data.items()}  # type: ignore[arg-type]
        for side, count in self.records.items():
            if not count:
                raise HamuError(f"the {side} set is empty; there is nothing to assess")
        named = trainable_parameters(model)
        self.parameters: list[Tensor] = [p for _, p in named]
        self.block_names, self.block_of = group_blocks([name for name, _ in named], blocks)

    def advance(self, cost: float) -> None:
        """Count a pass, in records of a forward and backward pass."""
        self._done += cost
        self._progress(min(self._done, self.expected), self.expected)

    def finish(self) -> float:
        """Report the end; returns the cost of all passes."""
        self._progress(self.expected, self.expected)
        return self._done

    def positions(self, side: str, most: int | None = None) -> Tensor:
        """Records of a side in random order, at most this many."""
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randperm(self.records[side], generator=generator)[:most]

    def batches(
        self, side: str, positions: Tensor | None = None, size: int | None = None
    ) -> Iterator[dict[str, Tensor]]:
        """Batches of a side, or of these records in this order, on the model's device."""
        device, data = self.parameters[0].device, self.data[side]
        rows = torch.arange(self.records[side]) if positions is None else positions
        for some in rows.split(size or self.batch_size):
            batch = batch_of(data, some.tolist(), self._collate)
            yield {key: value.to(device) for key, value in batch.items()}

    def score(self, batch: Mapping[str, Tensor]) -> Scored:
        """Predictions for a batch; a HamuError if a label is none of the model's."""
        scored = Scored.of(predict_logits(self.model, batch), batch["labels"])
        known = scored.logits.shape[1]
        wrong = (scored.labels < 0) | (scored.labels >= known)
        if wrong.any():
            raise HamuError(
                f"label {scored.labels[wrong][0].item()} does not fit the model, which predicts "
                f"{known} labels; correct it, or leave its record out"
            )
        return scored

    def total(self, scored: Scored) -> Tensor:
        """Loss of these predictions, summed."""
        return CrossEntropy().total(scored, None)

    def gradient(self, side: str, positions: Tensor) -> tuple[list[Tensor], int]:
        """Gradient of the summed loss of some records, at least float32, and their scores."""
        sums = [torch.zeros_like(p, dtype=combine_dtype(p)) for p in self.parameters]
        batches, count = math.ceil(len(positions) / self.batch_size), 0
        even = math.ceil(len(positions) / batches)  # no batch is much smaller than the others
        for batch in self.batches(side, positions, even):
            scored = self.score(batch)
            loss = self.total(scored)
            grads = torch.autograd.grad(loss, self.parameters, materialize_grads=True)
            for known, grad in zip(sums, grads, strict=True):
                known.add_(grad)
            count += len(scored.labels)
            self.advance(float(scored.records))
        return sums, count


def parted_gradient(
    assessed: AssessedModel, side: str, parts: int, most: int | None = None
) -> Parts:
    """Gradient of a side's mean loss, or that of `most` random records, in m parts that add up.

    Returns the parts, and their shares of the predictions, [m] float64.
    """
    positions = assessed.positions(side, most)
    chunks = positions.tensor_split(min(parts, len(positions)))
    kept, counts = zip(*(assessed.gradient(side, chunk) for chunk in chunks), strict=True)
    if not sum(counts):
        raise HamuError(f"the {side} set has nothing that is scored; give records with an answer")
    every = [g for grads in kept for g in grads]
    torch._foreach_div_(every, float(sum(counts)))
    extent = norm(every, math.inf)
    if not math.isfinite(extent):
        raise HamuError(
            f"the gradient of the {side} loss is not finite; look for broken records or weights"
        )
    if not extent:
        raise HamuError(
            f"the gradient of the {side} loss is zero: it reaches no trainable parameter, "
            f"or the loss is stationary"
        )
    return list(kept), torch.tensor(counts, dtype=torch.float64) / sum(counts)


def kept_parts(assessed: AssessedModel, used: Mapping[str, int], memory: float) -> dict[str, int]:
    """Parts of each side's gradient that fit into so many GB, at most one per full batch of the
    `used` records, but as many as intervals need; 1 if too few for these.
    """
    size = sum(p.numel() * combine_dtype(p).itemsize for p in assessed.parameters)
    most = min(_MOST_PARTS, math.floor(memory * 1e9 / (2 * size)))
    if min(most, *used.values()) < FEWEST_PARTS:
        return dict.fromkeys(used, 1)
    full = min(assessed.batch_size, FULL_BATCH)
    return {s: min(most, max(FEWEST_PARTS, math.ceil(n / full))) for s, n in used.items()}


class PartedGram(NamedTuple):
    """Dot products of all parts of both sides per block: the Gram of any reweighting of the parts.

    The noise of a sample lengthens its gradient, on average by ‖g‖² - ‖E g‖² = tr Σ/n, of which
    the shares `unmeasured` are taken off.
    """

    products: Tensor  # [L, m_r + m_f, m_r + m_f] float64
    shares: tuple[Tensor, ...]  # of the predictions, [m_r] and [m_f]
    eps: float
    unmeasured: tuple[float, ...] = (0.0, 0.0)  # share of each side's records in no part

    @classmethod
    def of(
        cls,
        assessed: AssessedModel,
        retain: Parts,
        forget: Parts,
        used: Mapping[str, int] | None = None,
    ) -> Self:
        """Multiply a piece of a parameter at a time; reads the device once.

        `used` has the number of records that the parts of each side are of; by default all.
        """
        parts, parameters = [*retain[0], *forget[0]], assessed.parameters
        device, rows = parameters[0].device, len(parts)
        size = len(assessed.block_names), rows, rows
        products = torch.zeros(size, dtype=torch.float64, device=device)
        for index, block in enumerate(assessed.block_of):
            most = max(1, WIDENED // rows)
            pieces = (torch.split(part[index].reshape(-1), most) for part in parts)
            for piece in zip(*pieces, strict=True):
                wide = torch.stack(piece).double()
                products[block] += (wide @ wide.T).to(device)
        eps = max(torch.finfo(combine_dtype(p)).eps for p in parameters)
        known = assessed.records
        left = tuple(1.0 - (used or known)[side] / known[side] for side in SIDES)
        return cls(products.cpu(), (retain[1], forget[1]), eps, left)

    def gram(self, *counts: Tensor) -> PairGram:
        """The Gram of the mean gradients with each part this often ([m_r], [m_f]); default once."""
        pairs = zip(counts or map(torch.ones_like, self.shares), self.shares, strict=True)
        r, f = (n.to(share) / (n * share).sum() for n, share in pairs)
        m = len(r)
        of_r = torch.einsum("i,lij->lj", r, self.products[:, :m])
        of_f = torch.einsum("i,lij->lj", f, self.products[:, m:, m:])
        squares = [of_r[:, :m] @ r, of_f @ f]
        for place, share in enumerate(self.unmeasured):
            if share:  # parts that are drawn again add as much noise once more
                n = len(self.shares[place])
                again = (n - 1) / n if counts else 0.0
                squares[place] = squares[place] - (share + again) * self.noise(SIDES[place])
        retain, forget = (square.clamp(min=0) for square in squares)
        dot = of_r[:, m:] @ f
        if any(self.unmeasured):  # noise taken off the squares alone can leave cosines above 1
            limit = (retain * forget).sqrt()
            dot = dot.clamp(-limit, limit)
        return PairGram(retain, forget, dot, self.eps)

    def noise(self, side: str) -> Tensor:
        """Noise tr Σ/n in ‖g‖² of each block, [L]; 0 if there is one part.

        Σ‖h_k‖²/s_k - ‖g‖² over m parts h_k of share s_k is (m - 1) tr Σ/n in expectation.
        """
        place, m = SIDES.index(side), len(self.shares[0])
        shares, own = self.shares[place], (slice(m), slice(m, None))[place]
        products = self.products[:, own, own]
        scored = shares > 0  # of a part without predictions nothing is known
        parted = (products.diagonal(dim1=1, dim2=2) / shares)[:, scored].sum(1)
        return (parted - products.sum((1, 2))) / max(1, int(scored.sum()) - 1)

    def noise_scale(self, side: str, measured: int) -> float | None:
        """Records in a batch whose gradient has as much noise as mean, tr Σ/‖E g‖², if known.

        McCandlish et al. (2018), Eq. 2.9, from the parts of `measured` records.
        """
        gram, place = self.gram(), SIDES.index(side)
        if len(self.shares[place]) < 2:
            return None
        expected = (gram.retain_sq, gram.forget_sq)[place].sum()
        noise = self.noise(side).sum().clamp(min=0)
        return (noise * measured / expected).item() if expected > 0 else None


@dataclass(frozen=True)
class Conflicts:
    """Records of one side by how their loss changes along the other side's gradient; NaN for one
    whose loss is not finite, which counts nothing.
    """

    values: Tensor  # ∇L(z)·g of each record, unclipped, [N]
    rows: Tensor  # of each, in the source if the data set has `rows`, else in the set

    @property
    def top_share(self) -> float:
        """Part of all conflict (Σ∇L(z)·g above zero) in the top tenth of the records."""
        known = self.values[self.values.isfinite()]
        positive = known.clamp(min=0.0).sort(descending=True).values
        whole, tenth = positive.sum(), max(1, int(0.1 * len(positive)))
        return (positive[:tenth].sum() / whole).item() if whole > 0 else 0.0

    def top(self, count: int = 20) -> list[dict[str, float]]:
        """Records in the hardest conflict, worst first."""
        known = self.values.nan_to_num(-math.inf, math.inf).argsort(descending=True)
        order = known[self.values[known].isfinite()][:count]
        pairs = zip(self.rows[order].tolist(), self.values[order].tolist(), strict=True)
        return [{"row": row, "value": value} for row, value in pairs]


@torch.no_grad()
def gradient_alignment(
    losses: Callable[[], Tensor],
    parameters: Sequence[Tensor],
    gradient: Sequence[Tensor],
    weights: Sequence[Tensor],
) -> Tensor:
    """∇L(z)·g of every record z, by two forward passes with the weights moved ±ε along g.

    `losses` computes [N] float64 at the current weights, which come back bit for bit; `weights` are
    all of the model, as a step in proportion to a small adapter alone would be lost in rounding.
    """
    eps = max(torch.finfo(w.dtype).eps for w in weights)
    # the third root of eps would balance rounding against a third derivative of like size; a
    # trained network bends far more, and one of many weights when a loss changes by a nat
    slope = norm(gradient)
    epsilon = eps**0.5 * min(max(norm(weights), eps) / 64, 4.0 / slope) / slope
    moved = []
    for sign in (1.0, -1.0):
        with restored(parameters):
            for p, g in zip(parameters, gradient, strict=True):
                p.add_(g.to(p.dtype), alpha=sign * epsilon)
            moved.append(losses())
    return moved[0].sub(moved[1]).div(2.0 * epsilon)
