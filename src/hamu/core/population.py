"""`Population`: running estimates of the Gram of the expected gradients, from those of batches.

The formulas are in docs/theory.md, *Small batches*. Products of the gradients of *different* steps
are free of the noise of batches (McCandlish et al. 2018, App. A). No gradient is kept for them, but
a sample of each tensor's entries, evenly spaced. In embeddings the rows of a few tokens hold most
of the gradient; of these all entries are added up, with random signs, in a few sums (count sketch,
Charikar et al. 2002). The expected gradient moves with the weights; its latest value is the end of
a line through the samples of all steps (Brown 1963, double exponential smoothing). A ridge (Hoerl
and Kennard 1970) shrinks the slope by half where steps span the first of `_SETTLING` half-lives; of
less ridge, the second, the estimate lags less, and takes over where headrooms differ for certain
(after Lepski 1991). Each side keeps its weighted mean in `GROUPS` parts, the k-th of steps k,
k + GROUPS, ...; products of different parts contain only products of different steps. Of equal
parts as much is left out as whole passes leave of the noise (Cochran 1977).
"""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from functools import lru_cache
from itertools import count
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

from hamu.core.gram import PairGram
from hamu.core.methods.base import ConstraintStatus, Method

GROUPS = 4
SAMPLED = 512  # entries of a large tensor, about; 128 put the headroom off by 0.05
# A matrix of so many columns, and so many times as many rows, is taken for an embedding; those of
# adapters have fewer columns.
_COLUMNS, _TALL = 64, 6
# Sums over the entries of one. Their products are off by 1/√4093 of the norms' product; prime, so
# that rows, which resemble each other, do not meet in step.
SUMMED = 4093
FEWEST = 6  # steps before an estimate is used
_SETTLING = 0.4, 0.1  # half-lives
_CERTAIN = 5.0  # standard errors of the difference
# Standard errors added to the headroom: of many estimates the lowest decides
_CAUTION, _CAUTION_IN_DOUBT = 0.5, 2.0
_DOUBTFUL = 0.2  # standard error of the headroom
_ROUNDING = 1e-9  # of a pass, and of a cosine
_PER_HALF_LIFE = 16  # estimates in a half-life: they delay a stop by half their distance
_ANEW = 64  # steps, at most, until times are counted anew, for float32's digits and range


@dataclass(frozen=True)
class PopulationStatus:
    """Standing of the constraint for the expected gradients, on the host.

    Attributes:
        headroom: `free_limit` over `clipped_demand`; infinite without a demand.
        error: standard error of the headroom, without that of the sampled entries; infinite with
            it.
        kappa: κ of the expected gradients, clipped like those of a batch.
        cos: cosθ between them; NaN where their norms are lost in noise.
        regime: index of the regime, see `regime_at`.
        conflict, demand, clipped_demand, free_limit, some_demand_is_free: see `ConstraintStatus`.
        retain_noise, forget_noise: variance of the batch's gradient over the squared norm of its
            expectation, tr Σ/(n‖E g‖²): the noise scale (McCandlish et al. 2018) in batches. Of
            steps of different sizes n is their mean.
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

    def confidence(self, margin: float = 0.0) -> float:
        """Probability that the headroom is below 1 + margin, by Student's t for `GROUPS`."""
        gap = 1.0 + margin - self.headroom
        if not self.error:
            return float(gap > 0)
        t = gap / self.error / math.sqrt(3.0)
        return 0.5 + (t / (1.0 + t * t) + math.atan(t)) / math.pi


def judged(headroom: float, error: float) -> float:
    """Headroom with a part of its error, and more than that of a large one."""
    return headroom + (_CAUTION if error <= _DOUBTFUL else _CAUTION_IN_DOUBT) * error


_KINDS = tuple(get_type_hints(PopulationStatus).values())
_READ = tuple(one.name for one in fields(PopulationStatus))[4:10]  # of a `ConstraintStatus`


class Population:
    """Running estimates for one model, in steps that count half after `half_life` further ones.

    Sides are drawn in passes of so many `steps_per_pass`, or independently (infinitely many).
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        block_of: Sequence[int],
        blocks: int,
        half_life: float,
        steps_per_pass: Sequence[float] = (math.inf, math.inf),
    ) -> None:
        self._decay = 0.5 ** (1.0 / half_life)
        self._every = max(1, round(half_life / _PER_HALF_LIFE))
        self._ridges = [(s * half_life) ** 3 / 12.0 for s in _SETTLING]  # Σ(t - mean t)² of steps
        samples = [_sample_of(p) for p in parameters]
        self._whole = [n for n, one in enumerate(samples) if one is None]
        # the Gram is measured before, its last tensors are in the cache
        self._large = {n: one for n, one in reversed([*enumerate(samples)]) if one is not None}
        order = (*self._whole, *self._large)  # of the entries
        # shapes, and the order of entries in memory, without any
        self._shapes = [torch.empty_like(p, device="meta") for p in parameters]
        entries = {n: one.entries for n, one in self._large.items()}
        self._counts = [entries.get(n, parameters[n].numel()) for n in order]
        # on the host, whatever torch's default device is
        self._block_of = torch.tensor([block_of[n] for n in order], device="cpu")
        scales = [self._large[n].scale if n in self._large else 1.0 for n in order]
        self._scales = torch.tensor(scales, dtype=torch.float64, device="cpu")
        self._kept = torch.cat([torch.ones(1, GROUPS), 1.0 - torch.eye(GROUPS)]).double().cpu()
        # sums over steps of decay^age · (1, time) · sample, and of decay^age · (1, time, time²),
        # with times and ages from the last time that they began anew
        self._sums = torch.zeros(2, 2, GROUPS, sum(self._counts), dtype=torch.float32)
        self._weights = torch.zeros(GROUPS, 3, dtype=torch.float64)
        # of decay^age · (1, time) · squared norm
        self._squares = torch.zeros(2, 2 * blocks, dtype=torch.float64)
        self._anew = min(_ANEW, math.ceil(half_life))
        times = torch.arange(1, self._anew + 1, dtype=torch.float64)
        powers = torch.stack([torch.ones_like(times), times, times * times], 1)
        self._powers = powers * (self._decay**-times)[:, None]
        self._passes = [_Passes(steps) for steps in (*steps_per_pass, 1.0)]
        self._steps = 0
        self.status: PopulationStatus | None = None
        self.to(parameters[0].device)

    def to(self, device: torch.device) -> None:
        """Move to the model's device."""
        for name in ("_sums", "_weights", "_squares", "_powers"):  # a step adds to these
            setattr(self, name, getattr(self, name).to(device))
        self._drawn = self._sums.new_empty(2, sum(self._counts))  # of the latest step
        self._places = []  # of whole tensors
        for row in self._drawn:
            shapes = [self._shapes[n] for n in self._whole]
            parts = zip(torch.split(row, self._counts), shapes, strict=False)
            self._places.append([part.as_strided(s.shape, s.stride()) for part, s in parts])

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickle, in which the views of `_places` have left their memory."""
        vars(self).update(state)
        self.to(self._sums.device)

    def add(
        self,
        retain: Sequence[Tensor | None],
        forget: Sequence[Tensor | None],
        gram: PairGram,
        unscale: Tensor | None,
        share: float = 1.0,
    ) -> None:
        """Add the gradients of a step of this share of a full one's records, whose Gram is `gram`;
        those not finite count nothing.
        """
        squares = torch.cat([gram.retain_sq, gram.forget_sq])
        is_finite = squares.sum().isfinite()
        group, time = self._steps % GROUPS, self._steps % self._anew + 1
        powers = factors = self._powers[time - 1] * is_finite
        if share != 1.0:
            powers = factors = powers * share
        self._weights[group].add_(powers)
        if unscale is not None:
            squares, factors = squares * unscale * unscale, powers * unscale
        self._squares.addr_(powers[:2], squares.nan_to_num_(0.0, 0.0, 0.0))
        for grads, row, places in zip((retain, forget), self._drawn, self._places, strict=True):
            self._draw(grads, row, places)
        drawn = self._drawn.nan_to_num_(0.0, 0.0, 0.0)  # times a factor of 0
        self._sums[:, :, group].addcmul_(factors[:2, None, None].to(drawn.dtype), drawn)
        weight = self._decay**-time
        *sides, steps = self._passes
        for passes in sides:
            passes.add(share, time, weight)
        steps.add(1.0, time, weight * math.sqrt(share))  # whose squares are variances
        self._steps += 1
        if time == self._anew:
            self._start_anew(time)

    def _start_anew(self, time: int) -> None:
        """Count times and ages from the latest step on."""
        faded = self._decay**time
        for sums in (self._sums, self._squares):
            sums[1].sub_(sums[0], alpha=time)
            sums.mul_(faded)
        self._weights = torch.stack(_shifted(self._weights.unbind(1), time), 1) * faded
        for passes in self._passes:
            passes.start_anew(time, faded)

    @property
    def is_due(self) -> bool:
        """True if the last step added is one of those that are followed by an estimate."""
        return self._steps >= FEWEST and self._steps % self._every == 0

    def sums(self, agree: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Sums that an estimate needs on the host, where the rest of it is done.

        `agree` makes them equal on all processes.
        """
        lines = self.lines(self._weights)
        ends = [torch.addcmul(a * self._sums[0], b, self._sums[1]) for a, b in lines]
        squares = self._squares.view(2, 2, -1)
        together = torch.stack(ends).flatten(1, 2)
        return {"ends": agree(together), "weights": self._weights, "squares": squares}

    def grams(self, ends: Tensor, weights: Tensor, line: Tensor) -> tuple[PairGram, Tensor]:
        """Gram from all parts and from all but one, [L, 1 + GROUPS]; and the plain dot, [L].

        The Gram's dot is the root of the estimate of the squared one, for an angle without bias.
        """
        parts = torch.split(ends.double(), self._counts, 1)  # whose squares may underflow
        by_tensor = torch.stack([one @ one.T for one in parts])
        products = by_tensor.new_zeros(self._squares.shape[1] // 2, *by_tensor.shape[1:])
        products.index_add_(0, self._block_of, by_tensor * self._scales[:, None, None])
        r, f = slice(GROUPS), slice(GROUPS, None)
        kept = self._kept
        weights = kept * (weights[:, :2] @ line)
        all_pairs = weights.sum(1).square()
        pairs = all_pairs - weights.square().sum(1)  # of different parts
        noise = self._noise_left(line)

        def summed(matrix: Tensor) -> tuple[Tensor, Tensor]:
            """Sums of kept columns, [..., L, J, GROUPS], and of all that is kept, [..., L, J]."""
            columns = (kept @ matrix) * kept
            return columns, columns.sum(-1)

        def freed(whole: Tensor, same: Tensor, noise: Tensor) -> Tensor:
            """Mean of all products, less what is left of the noise in those of equal parts."""
            mean = whole / all_pairs
            return mean - noise * (mean - (whole - same) / pairs)

        across = products[:, r, f]
        columns, whole = summed(across)
        rows, _ = summed(across.transpose(1, 2))
        _, each = summed(across.square())
        same_forget, same_retain = columns.square().sum(2), rows.square().sum(2)
        dot_sq = freed(
            freed(whole.square(), same_retain, noise[0]),
            freed(same_forget, each, noise[0]),
            noise[1],
        )
        own = torch.stack([products[:, r, r], products[:, f, f]])
        same = own.diagonal(dim1=2, dim2=3) @ kept.T
        squares = freed(summed(own)[1], same, noise[:, None, None]).clamp(min=0.0)
        retain_sq, forget_sq = squares.unbind()
        dot_sq = torch.minimum(dot_sq.clamp(min=0.0), retain_sq * forget_sq)
        dot = whole / all_pairs
        return PairGram(retain_sq, forget_sq, dot_sq.sqrt().copysign(whole)), dot[:, 0]

    def lines(self, weights: Tensor) -> list[Tensor]:
        """Multiples of sums and of those times time that give the end of a line, [2], by ridge."""
        time, found = self._steps % self._anew, []
        ones, times, squares = _shifted(weights.sum(0).unbind(), time)
        for ridge in self._ridges:
            wider = squares + ridge * self._decay**-time
            both = torch.stack([wider + time * times, -times])
            found.append(both / (ones * wider - times * times))
        return found

    def _noise_left(self, line: Tensor) -> Tensor:
        """Share of the noise of independent draws that the mean of each side has, [2]."""
        start, slope = line.tolist()
        weights = start * start, 2.0 * start * slope, slope * slope
        retain, forget, steps = (
            sum(map(operator.mul, weights, passes.moments())) for passes in self._passes
        )
        lengths = (passes.steps for passes in self._passes)
        shares = (1.0 - own / next(lengths) / steps for own in (retain, forget))
        return line.new_tensor([min(max(share, 0.0), 1.0) for share in shares])

    def judge(
        self,
        sums: Mapping[str, Tensor],
        method: Method,
        max_norm: float | None,
        memory: Tensor | None = None,
    ) -> PopulationStatus | None:
        """Status from `sums` on the host, and a method's memory; None without a new estimate."""
        if not self.is_due:
            return None

        def standing(gram: PairGram) -> ConstraintStatus:
            clipped = gram.scaled(*gram.clip_factors(max_norm))
            given = replace(clipped, losses=sums.get("losses"), memory=memory)
            status = method.weigh(given).constraint
            assert status is not None
            return status

        lines, both = self.lines(sums["weights"]), []
        for ends, line in zip(sums["ends"], lines, strict=True):
            grams, dot = self.grams(ends, sums["weights"], line)
            # from all parts, and from all but one
            gram, *fewer = map(PairGram, grams.retain_sq.T, grams.forget_sq.T, grams.dot.T)
            status, *others = map(standing, (gram, *fewer))
            both.append((gram, dot, status, [one.headroom for one in (status, *others)]))
        gap, *of_fewer = map(operator.sub, both[1][-1], both[0][-1])
        is_certain = abs(gap) > _CERTAIN * _jackknife_error(of_fewer)
        line, (gram, dot, status, (headroom, *of_others)) = lines[is_certain], both[is_certain]
        if math.isnan(status.clipped_demand.item()):  # too few steps were finite
            return None
        clip = gram.clip_factors(max_norm)
        norms = torch.stack([gram.retain_sq, gram.forget_sq]).sum(1)
        squares = torch.einsum("m,msl->s", line, sums["squares"])
        kappa, noise = dot.sum(), (squares / norms - 1.0).clamp(min=0.0)
        cos = kappa / norms.prod().sqrt()
        cos = cos.masked_fill(cos.abs() > 1.0 + _ROUNDING, math.nan).clamp(-1.0, 1.0)
        own = kappa * clip[0] * clip[1], cos
        error = _jackknife_error(of_others) * math.sqrt(self._noise_left(line).max().item())
        error = error if math.isfinite(headroom) else math.inf
        values = (*own, *(getattr(status, name) for name in _READ), *noise)
        self.status = _status_of(headroom, error, *(value.item() for value in values))
        return self.status

    def _draw(self, grads: Sequence[Tensor | None], row: Tensor, places: list[Tensor]) -> None:
        """Copy the sampled entries of one side to its row, [entries]."""
        whole = [(place, grads[n]) for place, n in zip(places, self._whole, strict=True)]
        if absent := [place for place, g in whole if g is None]:
            torch._foreach_zero_(absent)
        if present := [(place, g) for place, g in whole if g is not None]:
            torch._foreach_copy_([place for place, _ in present], [g for _, g in present])
        parts: list[Tensor] = []
        for n, sample in self._large.items():
            g, like = grads[n], self._shapes[n]
            if g is None:
                parts.append(row.new_zeros(sample.entries))
                continue
            if g.stride() != like.stride():  # entries are counted as they lie in memory
                g = torch.empty_like(like, device=g.device, dtype=g.dtype).copy_(g)
            parts.append(sample.taken(g).to(row.device))
        if parts:
            torch.cat(parts, out=row[-sum(self._counts[len(places) :]) :])

    def state_dict(self) -> dict[str, Tensor]:
        """Running means, number of steps and latest status, as tensors."""
        status = [] if self.status is None else list(astuple(self.status))
        return {name: own.clone() for name, own in self._tensors().items()} | {
            "steps": torch.tensor(self._steps),
            "passes": torch.tensor([p.values for p in self._passes], dtype=torch.float64),
            "status": torch.tensor(status, dtype=torch.float64),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned."""
        for name, own in self._tensors().items():
            own.copy_(state[name])
        self._steps = int(state["steps"])
        for passes, values in zip(self._passes, state["passes"].tolist(), strict=True):
            passes.values = values
        values = state["status"].tolist()
        self.status = _status_of(*values) if values else None

    def _tensors(self) -> dict[str, Tensor]:
        return {"sums": self._sums, "weights": self._weights, "squares": self._squares}


class _Spaced(NamedTuple):
    """Entries of a tensor as they lie in memory, so many apart; each stands for `scale` of them."""

    entries: int
    apart: int
    scale: float

    @classmethod
    def of(cls, parameter: Tensor) -> "_Spaced":
        """About `SAMPLED` of them, a prime apart that divides no dimension, so that no row, column
        or place of a kernel is left out.
        """
        size = parameter.numel()
        numbers = (n for n in count(max(5, size // SAMPLED)) if size % n)
        apart = next(n for n in numbers if all(n % d for d in range(2, math.isqrt(n) + 1)))
        entries = (size - 1) // apart + 1
        return cls(entries, apart, size / entries)

    def taken(self, tensor: Tensor) -> Tensor:
        return tensor.as_strided((self.entries,), (self.apart,), tensor.storage_offset())


class _Summed(NamedTuple):
    """Sums of every `entries`-th entry of a tensor as they lie in memory, with random signs."""

    entries: int
    scale: float = 1.0

    def taken(self, tensor: Tensor) -> Tensor:
        """These sums, [entries], in the tensor's precision."""
        number, left = divmod(tensor.numel(), self.entries)
        shape, strides, start = (self.entries, number), (1, self.entries), tensor.storage_offset()
        signs = _signs(number + 1, tensor.device, tensor.dtype)
        with torch.autocast(tensor.device.type, enabled=False):  # would compute in half precision
            sums = tensor.as_strided(shape, strides, start) @ signs[:-1]
        rest = tensor.as_strided((left,), (1,), start + number * self.entries)
        sums[:left] += rest * signs[-1]
        return sums


@lru_cache(maxsize=16)
def _signs(number: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Random signs, always the same, whose sum is about √number: right for equal entries too."""
    signs = torch.ones(number, device="cpu")
    signs[round((number + math.sqrt(number)) / 2) :] = -1
    order = torch.randperm(number, generator=torch.Generator().manual_seed(0), device="cpu")
    return signs[order].to(device, dtype)


def _sample_of(parameter: Tensor) -> _Spaced | _Summed | None:
    """Choose the sample of a tensor; None for a small one, of which all entries are taken."""
    shape = parameter.shape
    if len(shape) == 2 and shape[1] >= _COLUMNS and shape[0] > _TALL * shape[1]:
        return None if parameter.numel() < 3 * SUMMED else _Summed(SUMMED)
    return None if parameter.numel() < 3 * SAMPLED else _Spaced.of(parameter)


class _Passes:
    """Squared weights of the passes through the records of one side, as moments of time."""

    def __init__(self, steps: float) -> None:
        self.steps = steps
        # of the pass under way its steps, and sums of weights and of these times time; moments of
        # the others
        self.values = [0.0] * 6

    def add(self, share: float, time: int, weight: float) -> None:
        """Add a step, or a share of one, which may reach into the next pass."""
        left = self.steps - self.values[0]
        first = min(share, left)
        self._extend(first, time, weight)
        if left <= share + _ROUNDING:
            self.values = [0.0, 0.0, 0.0, *self.moments()]
            self._extend(share - first, time, weight)

    def _extend(self, share: float, time: int, weight: float) -> None:
        more = share, share * weight, share * weight * time
        self.values[:3] = map(operator.add, self.values, more)

    def start_anew(self, time: int, faded: float) -> None:
        """Count times from `time` on, with weights times `faded`."""
        begun, ones, times, *closed = self.values
        squares = (value * faded for value in _shifted(closed, time))
        own = (value * faded for value in (ones, times - time * ones, *squares))
        self.values = [begun, *own]

    def moments(self) -> list[float]:
        """Sums over passes of c², c·d and d²: c sums weights, d weights times time."""
        _, ones, times, *closed = self.values
        new = ones * ones, ones * times, times * times
        return [old + one for old, one in zip(closed, new, strict=True)]


def _shifted(moments: Sequence[Any], time: int) -> tuple[Any, Any, Any]:
    """Moments of time that counts from `time` on."""
    ones, times, squares = moments
    return ones, times - time * ones, squares - 2.0 * time * times + time * time * ones


def _status_of(*values: float) -> PopulationStatus:
    return PopulationStatus(*(kind(value) for kind, value in zip(_KINDS, values, strict=True)))


def _jackknife_error(values: Sequence[float]) -> float:
    """Standard error from estimates that leave out one group each (Efron and Tibshirani 1993)."""
    if not all(map(math.isfinite, values)):
        return math.inf
    mean = sum(values) / len(values)
    return math.sqrt((len(values) - 1) / len(values) * sum((v - mean) ** 2 for v in values))
