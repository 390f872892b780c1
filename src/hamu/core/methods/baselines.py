"""Baselines of the paper (App. D), each a rule of weights for the same pair of gradients.

A forget objective is always to be raised, so its weight is negative.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from hamu.core.gram import PairGram
from hamu.core.methods import listed
from hamu.core.methods.base import Method, Weights


class _Fixed(Method):
    """The same weights at every step; ½ and -½ unless a subclass says otherwise."""

    weights: ClassVar[tuple[float, float]] = (0.5, -0.5)

    def weigh(self, gram: PairGram) -> Weights:
        retain, forget = self.weights
        return Weights(torch.full_like(gram.dot, retain), torch.full_like(gram.dot, forget))


@listed("ft")
class FineTune(_Fixed):
    """FT: descend on the retain loss alone."""

    weights = (1.0, 0.0)


@listed("ga")
class GradientAscent(_Fixed):
    """GA: ascend on the forget loss alone."""

    weights = (0.0, -1.0)


@listed("gdiff")
class GradientDifference(_Fixed):
    """GDiff: the mean of descent on the retain loss and ascent on the forget loss."""


@listed("kl")
class KLMinimization(_Fixed):
    """KL: ascend on the forget loss, stay near the original's predictions on the retain data."""


@listed("scrub")
class Scrub(_Fixed):
    """SCRUB: leave the original's predictions on forget data, keep them (and labels) on retain."""


@listed("npo")
class NegativePreference(_Fixed):
    """NPO with a retain loss (NPO-RT): the mean of retain descent and NPO's bounded forgetting."""


@listed("simnpo")
class SimpleNegativePreference(_Fixed):
    """SimNPO with a retain loss: NPO without the original model, normalised by length."""


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
        scale = reach / norm(best)
        scale = torch.where(torch.isfinite(scale), scale, torch.zeros_like(scale))
        return Weights(
            (0.5 + scale * best).expand_as(gram.dot).clone(),
            -(0.5 + scale * (1.0 - best)).expand_as(gram.dot).clone(),
        )


@listed("gru")
class GradientRectified(Method):
    """GRU: -g_f, made orthogonal to g_r when the two conflict."""

    def weigh(self, gram: PairGram) -> Weights:
        return Weights(_conflict_over_square(gram, gram.retain_sq), torch.full_like(gram.dot, -1.0))


@listed("pcgrad")
class ProjectConflicting(Method):
    """PCGrad: the mean of g_r and -g_f, each projected off the other when they conflict."""

    def weigh(self, gram: PairGram) -> Weights:
        retain = 1.0 + _conflict_over_square(gram, gram.retain_sq)
        forget = 1.0 + _conflict_over_square(gram, gram.forget_sq)
        return Weights(0.5 * retain, -0.5 * forget)


def _conflict_over_square(gram: PairGram, square: Tensor) -> Tensor:
    """Projection coefficient κ/‖g‖² of the whole model where κ > 0, else 0, [L]."""
    kappa, square = gram.dot.sum(), square.sum()
    coefficient = torch.where((kappa > 0) & (square > 0), kappa / square, torch.zeros_like(kappa))
    return coefficient.expand_as(gram.dot)
