"""The baselines of the paper (App. D), each a row of weights for the same pair of gradients.

`retain_objective` and `forget_objective` name the losses whose gradients are g_r and g_f; the forget objective is
always one to be raised, so its weight is negative.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from hamu.core.gram import PairGram
from hamu.core.methods.base import Method, Weights


def _constant(gram: PairGram, retain: float, forget: float) -> Weights:
    return Weights(torch.full_like(gram.dot, retain), torch.full_like(gram.dot, forget))


class FineTune(Method):
    """FT: descend on the retain loss alone."""

    name = "ft"
    summary = "fine-tune on the retain data"
    source = "HAMU, App. D"
    forget_objective = None

    def weigh(self, gram: PairGram) -> Weights:
        return _constant(gram, 1.0, 0.0)


class GradientAscent(Method):
    """GA: ascend on the forget loss alone."""

    name = "ga"
    summary = "gradient ascent on the forget data"
    source = "Jang et al. 2023"
    retain_objective = None

    def weigh(self, gram: PairGram) -> Weights:
        return _constant(gram, 0.0, -1.0)


class GradientDifference(Method):
    """GDiff: the mean of descent on the retain loss and ascent on the forget loss."""

    name = "gdiff"
    summary = "mean of retain descent and forget ascent"
    source = "Liu et al. 2022"

    def weigh(self, gram: PairGram) -> Weights:
        return _constant(gram, 0.5, -0.5)


class KLMinimization(GradientDifference):
    """KL: ascend on the forget loss, stay near the original model's predictions on the retain data."""

    name = "kl"
    summary = "forget ascent, retain predictions kept by KL to the original"
    source = "Maini et al. 2024"
    retain_objective: ClassVar[str | None] = "kl_to_original"


class Scrub(GradientDifference):
    """SCRUB: leave the original's predictions on the forget data, keep them (and the labels) on the retain data."""

    name = "scrub"
    summary = "leave the original's predictions on forget, keep them on retain"
    source = "Kurmanji et al. 2023"
    retain_objective: ClassVar[str | None] = "scrub_retain"
    forget_objective: ClassVar[str | None] = "kl_to_original"


class ConflictAverse(Method):
    """CAGrad: the update within c‖g_0‖ of the mean g_0 of both descents whose worse improvement is largest, c = 0.4.

    It is d = g_0 + c‖g_0‖·g_w/‖g_w‖, where g_w = w·g_r - (1-w)·g_f minimises g_w·g_0 + c‖g_0‖‖g_w‖ over w in [0, 1].
    That convex problem in one number is solved on a grid, refined once, to 1e-6, over the whole model.
    """

    name = "cagrad"
    summary = "near the mean of both descents, the best for the worse of the two"
    source = "Liu et al. 2021"
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


class NegativePreferenceOptimization(GradientDifference):
    """NPO with a retain loss (NPO-RT): the mean of retain descent and of NPO's bounded forgetting."""

    name = "npo"
    summary = "mean of retain descent and negative preference optimization"
    source = "Zhang et al. 2024"
    forget_objective: ClassVar[str | None] = "npo"


class SimpleNegativePreferenceOptimization(GradientDifference):
    """SimNPO with a retain loss: as NPO, without the original model and normalised by length."""

    name = "simnpo"
    summary = "mean of retain descent and length-normalised NPO, without the original"
    source = "Fan et al. 2024"
    forget_objective: ClassVar[str | None] = "simnpo"


def _conflict_over_square(gram: PairGram, square: Tensor) -> Tensor:
    """The projection coefficient κ/‖g‖² where the descent directions g_r and -g_f conflict (κ > 0), else 0.

    Both methods below are defined over the whole model, so every block gets the whole model's coefficient.
    """
    kappa, square = gram.dot.sum(), square.sum()
    coefficient = torch.where((kappa > 0) & (square > 0), kappa / square, torch.zeros_like(kappa))
    return coefficient.expand_as(gram.dot)


class GradientRectified(Method):
    """GRU: -g_f, made orthogonal to g_r when the two conflict."""

    name = "gru"
    summary = "forget ascent made orthogonal to the retain gradient on conflict"
    source = "Wang et al. 2025"

    def weigh(self, gram: PairGram) -> Weights:
        return Weights(_conflict_over_square(gram, gram.retain_sq), torch.full_like(gram.dot, -1.0))


class ProjectConflicting(Method):
    """PCGrad: the mean of g_r and -g_f, each projected off the other when they conflict."""

    name = "pcgrad"
    summary = "mean of both descents, each projected off the other on conflict"
    source = "Yu et al. 2020"

    def weigh(self, gram: PairGram) -> Weights:
        retain = 1.0 + _conflict_over_square(gram, gram.retain_sq)
        forget = 1.0 + _conflict_over_square(gram, gram.forget_sq)
        return Weights(0.5 * retain, -0.5 * forget)
