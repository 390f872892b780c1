"""Other methods, each a rule of weights for the same pair of gradients; references.md has sources.

A forget objective is always to be raised, so its weight is negative; the two descents are along g_r
and -g_f, and κ = g_r·g_f > 0 is a conflict between them.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hamu.core.gram import PairGram
from hamu.core.methods import listed
from hamu.core.methods.base import Method, Weights, ratio
from hamu.errors import HamuError


class _Fixed(Method):
    """The same weights at every step."""

    weights: ClassVar[tuple[float, float]]

    def weigh(self, gram: PairGram) -> Weights:
        retain, forget = self.weights
        return Weights(torch.full_like(gram.dot, retain), torch.full_like(gram.dot, forget))


@dataclass(frozen=True)
class _Mixed(Method):
    """The forget gradient with its weight, the retain gradient with the rest."""

    forget_weight: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.forget_weight < 1:
            raise HamuError(f"forget_weight {self.forget_weight} must be between 0 and 1")

    def weigh(self, gram: PairGram) -> Weights:
        forget = torch.full_like(gram.dot, -self.forget_weight)
        return Weights(1.0 + forget, forget)


def _named(name: str, base: type[Method], **attributes: Any) -> None:
    """List a class that differs from its base in name alone; here, where pickle looks for it."""
    globals()[name] = listed(name)(type(name, (base,), attributes | {"__module__": __name__}))


for _name, _weights in {"ft": (1.0, 0.0), "ga": (0.0, -1.0)}.items():
    _named(_name, _Fixed, weights=_weights)
for _name in ("gdiff", "kl", "scrub", "npo", "simnpo"):  # which differ in their objectives
    _named(_name, _Mixed)


@listed("cagrad")
class ConflictAverse(Method):
    """CAGrad: within c‖g_0‖ of the mean g_0 of both descents, the best for the worse; c = 0.4.

    The update is d = g_0 + c‖g_0‖·g_w/‖g_w‖, where g_w = w·g_r - (1-w)·g_f minimises
    g_w·g_0 + c‖g_0‖‖g_w‖ over w in [0, 1]. A grid, refined once, solves that convex problem of the
    whole model to 1e-6.
    """

    c: ClassVar[float] = 0.4

    def weigh(self, gram: PairGram) -> Weights:
        whole = gram.total()
        retain_sq, forget_sq, product = whole.retain_sq, whole.forget_sq, -whole.dot
        reach = self.c * 0.5 * (retain_sq + forget_sq + 2.0 * product).clamp(min=0.0).sqrt()

        def norm(w: Tensor) -> Tensor:
            square = w * w * retain_sq + 2.0 * w * (1.0 - w) * product + (1.0 - w) ** 2 * forget_sq
            return square.clamp(min=0.0).sqrt()

        grid = torch.linspace(0.0, 1.0, 1001, dtype=gram.dot.dtype, device=gram.dot.device)
        w = grid
        for width in (1.0, 2e-3):
            value = 0.5 * (w * retain_sq + product + (1.0 - w) * forget_sq) + reach * norm(w)
            best = w.gather(0, value.argmin(0, keepdim=True))
            w = (best + width * 1e-3 * (2.0 * grid - 1.0)).clamp(0.0, 1.0)
        scale = ratio(reach, norm(best))
        return _of_the_whole(gram, 0.5 + scale * best, -(0.5 + scale * (1.0 - best)))


@listed("gru")
class GradientRectified(Method):
    """GRU: -g_f, made orthogonal to g_r when the two conflict."""

    def weigh(self, gram: PairGram) -> Weights:
        whole = gram.total()
        return _of_the_whole(gram, _projection(whole, whole.retain_sq), -torch.ones_like(whole.dot))


@listed("gru-ema")
class GradientRectifiedByMean(GradientRectified):
    """GRU as released: the mean m ← 0.8 g_r + 0.2 m in place of g_r."""

    retain_decay = 0.2


@listed("pdu")
class PrimalDual(Method):
    """PDU: g* = λ g_r - g_f; the dual variable rises while the retain loss is above its limit.

    λ ← max(0, λ + s (L_r - ε)) after each step, from λ = 1 with s = 1; ε is 1.1 times the retain
    loss of the first step. The release starts from λ = 50 to 100 as it clips neither gradient.
    """

    first_memory = (1.0, -1.0)  # λ and ε; below 0 it is not known yet
    dual_step: ClassVar[float] = 1.0
    tolerance: ClassVar[float] = 0.1

    def weigh(self, gram: PairGram) -> Weights:
        assert gram.losses is not None
        assert gram.memory is not None
        loss, (multiplier, limit) = gram.losses[0], gram.memory.unbind()
        limit = torch.where(limit < 0, (1.0 + self.tolerance) * loss, limit)
        after = (multiplier + self.dual_step * (loss - limit)).clamp(min=0.0)
        retain, forget = multiplier.expand_as(gram.dot), torch.full_like(gram.dot, -1.0)
        return Weights(retain, forget, memory=torch.stack([after, limit]))


@listed("pcgrad")
class ProjectConflicting(Method):
    """PCGrad: the mean of g_r and -g_f, each projected off the other when they conflict."""

    def weigh(self, gram: PairGram) -> Weights:
        whole = gram.total()
        retain = 1.0 + _projection(whole, whole.retain_sq)
        forget = 1.0 + _projection(whole, whole.forget_sq)
        return _of_the_whole(gram, 0.5 * retain, -0.5 * forget)


@listed("pcgrad-one-sided")
class ProjectForgetting(Method):
    """One-sided PCGrad, per block: g_r plus -g_f, the latter projected off g_r on conflict."""

    def weigh(self, gram: PairGram) -> Weights:
        return Weights(1.0 + _projection(gram, gram.retain_sq), -torch.ones_like(gram.dot))


@listed("falcon")
class Falcon(Method):
    """FALCON, per block: 1.2 g_r + 0.8 (-g_f off g_r) on conflict, else 1.9 g_r - 0.1 g_f.

    The combination of gradients alone, without FALCON's choice of layers and its forget loss.
    """

    def weigh(self, gram: PairGram) -> Weights:
        conflict = gram.dot > 0
        projected = 1.2 + 0.8 * _projection(gram, gram.retain_sq)
        fixed = torch.full_like(gram.dot, -0.1).masked_fill(conflict, -0.8)
        return Weights(torch.where(conflict, projected, 1.9), fixed)


@listed("blur")
class BiLevel(Method):
    """BLUR: g_r made orthogonal to g_f, plus γ of forget ascent, γ = 1.

    The forget loss rises by γ‖g_f‖² per unit of learning rate, neither more nor less.
    """

    gamma: ClassVar[float] = 1.0

    def weigh(self, gram: PairGram) -> Weights:
        whole = gram.total()
        forget = self.gamma + ratio(whole.dot, whole.forget_sq)
        return _of_the_whole(gram, torch.ones_like(forget), -forget)


@listed("ngdiff")
class NormalizedDifference(Method):
    """NGDiff: both descents of the whole model, each divided by its norm.

    Without the publication's automatic learning rate.
    """

    def weigh(self, gram: PairGram) -> Weights:
        return _of_the_whole(gram, *_unit(gram.total()))


@listed("munba")
class NashBargaining(Method):
    """MUNBa: the Nash bargaining solution of both descents, NGDiff's direction at length √2.

    The weights α solve (GᵀG)α = 1/α for G = (g_r, -g_f). Where g_r and g_f are parallel there is
    nothing to agree on, and no step.
    """

    def weigh(self, gram: PairGram) -> Weights:
        whole = gram.total()
        scale = (1.0 - whole.cos).rsqrt().masked_fill(whole.collinear & (whole.dot > 0), 0.0)
        retain, forget = _unit(whole)
        return _of_the_whole(gram, scale * retain, scale * forget)


@listed("mgda")
class MultipleGradientDescent(Method):
    """MGDA: the shortest vector between g_r and -g_f; it serves both sides alike, or is 0."""

    def weigh(self, gram: PairGram) -> Weights:
        whole = gram.total()
        both_sq = whole.retain_sq + whole.forget_sq + 2.0 * whole.dot  # ‖g_r + g_f‖²
        retain = ((whole.forget_sq + whole.dot) / both_sq).masked_fill(both_sq <= 0, 0.5)
        retain = retain.clamp(0.0, 1.0)
        return _of_the_whole(gram, retain, retain - 1.0)


def _projection(gram: PairGram, square: Tensor) -> Tensor:
    """Coefficient κ/‖g‖² that projects the other descent off g where κ > 0, else 0, [L]."""
    return ratio(gram.dot.clamp(min=0.0), square)


def _unit(gram: PairGram) -> tuple[Tensor, Tensor]:
    """Weights that make each descent a unit vector; 0 for a gradient of 0."""
    one = torch.ones_like(gram.dot)
    return ratio(one, gram.retain_norm), -ratio(one, gram.forget_norm)


def _of_the_whole(gram: PairGram, retain: Tensor, forget: Tensor) -> Weights:
    """The same weights, [1] each, for every block."""
    return Weights(retain.expand_as(gram.dot), forget.expand_as(gram.dot))
