"""`PairStep`: the result of one combine of two gradients."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from hamu.core.gram import PairGram
from hamu.core.methods.base import Weights

Decision = Literal["step", "skip", "stop"]
Cause = Literal["", "not finite", "infeasible", "out of range", "criterion"]


@dataclass(frozen=True)
class PairStep:
    """Result of one combine. Tensors stay on the device; reading one synchronises.

    Attributes:
        gram: Gram of the clipped gradients, [L].
        weights: the method's weights for the clipped gradients, [L], with its constraint's status.
        clip: 0-dim clipping factors of the retain and the forget gradient.
        decision: "step" if `.grad` holds g*; "skip" or "stop" if `.grad` is None, so that no
            optimizer moves.
        reason: for a skip or a stop, as a sentence; else empty.
        kept: by side, the gradients that `combine` kept, as collected: scaled by a `GradScaler`,
            not clipped.
        unscale: factor that removes that scale.
        finite: whether both gradients were finite; a `GradScaler` must hear of it if not.
        cause: the reason as a keyword.
    """

    gram: PairGram
    weights: Weights
    clip: tuple[Tensor, Tensor]
    decision: Decision
    reason: str = ""
    kept: dict[str, list[Tensor | None]] = field(default_factory=dict)
    unscale: float = 1.0
    finite: bool = True
    cause: Cause = ""

    def __repr__(self) -> str:
        """Decision, gradients with weights, predicted changes, in three lines; one transfer."""
        a, b = self.weights.retain, self.weights.forget
        changes = (self.promised_retain_change, self.promised_forget_change)
        figures = (*self.gradient_norms, self.cos, a.min(), a.max(), b.min(), b.max(), *changes)
        retain, forget, cos, a0, a1, b0, b1, of_retain, of_forget = torch.stack(figures).tolist()
        return (
            f"PairStep: {self.decision}{self.reason and f', {self.reason}'}\n"
            f"  ‖g_r‖ {retain:.4g}, ‖g_f‖ {forget:.4g}, cosθ {cos:+.4f}; "
            f"weights in {len(a):,} blocks: retain {a0:.4g} to {a1:.4g}, forget {b0:.4g} "
            f"to {b1:.4g}\n"
            f"  predicted per unit of learning rate: retain loss {of_retain:+.4g}, "
            f"forget loss {of_forget:+.4g}"
        )

    @property
    def should_stop(self) -> bool:
        """True if the run should end before this step."""
        return self.decision == "stop"

    @property
    def kappa(self) -> Tensor:
        """κ = g_r·g_f over the whole model, 0-dim (Theorem 4.1)."""
        return self.gram.dot.sum()

    @property
    def cos(self) -> Tensor:
        """cosθ between the whole model's gradients, 0-dim."""
        return self.gram.total().cos[0]

    @property
    def gradient_norms(self) -> tuple[Tensor, Tensor]:
        """‖g_r‖ and ‖g_f‖ of the whole model before clipping, 0-dim."""
        retain, forget = (sq.sum().sqrt() for sq in (self.gram.retain_sq, self.gram.forget_sq))
        return retain / self.clip[0], forget / self.clip[1]

    @property
    def combined_sq(self) -> Tensor:
        """‖g*_i‖² of each block, [L]: from the Gram, without a pass over the gradients."""
        gram, a, b = self.gram, self.weights.retain, self.weights.forget
        return (a * a * gram.retain_sq + 2 * a * b * gram.dot + b * b * gram.forget_sq).clamp(min=0)

    @property
    def promised_retain_change(self) -> Tensor:
        """First-order change of the clipped retain objective, g_r·Δw/η = F_r*/η, 0-dim."""
        return self.gram.changes(self.weights.retain, self.weights.forget)[0]

    @property
    def promised_forget_change(self) -> Tensor:
        """First-order change of the clipped forget objective, g_f·Δw/η, 0-dim."""
        return self.gram.changes(self.weights.retain, self.weights.forget)[1]

    @property
    def direct_share(self) -> Tensor | None:
        """Share of blocks on the direct branch, 0-dim; None for methods without branches."""
        constraint = self.weights.constraint
        return None if constraint is None else constraint.direct.double().mean()

    @property
    def regime(self) -> Tensor | None:
        """Whole model's regime (Fig. 1), 0-dim, see `regime_at`; None without a constraint."""
        constraint = self.weights.constraint
        return None if constraint is None else constraint.regime
