"""Figures of what a model still knows of some records, and the data of an attack."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hamu.data import TextData
from hamu.data.forget_sets import draw_positions
from hamu.errors import HamuError
from hamu.evaluation.predictions import TokenPredictions, predict, predict_tokens

Figures = dict[str, float]


@dataclass(frozen=True)
class AttackData:
    """An unlearning problem in the form that the attacked model takes.

    Attributes:
        retain, forget: `ImageData` or `TextData`.
        collate: makes a batch from a list of items.
        eval_batch_size: records per forward pass of a measurement.
        unrelated: texts that neither set holds, for relearn-unrelated; None if there are none.
        tokenizer: of a language model, for prefill and sample.
    """

    retain: Any
    forget: Any
    collate: Callable[[Any], Mapping[str, Tensor]]
    eval_batch_size: int = 64
    unrelated: Any = None
    tokenizer: Any = None

    @property
    def is_text(self) -> bool:
        """True if the records are texts."""
        return isinstance(self.forget, TextData)

    def measure(self, model: nn.Module, records: Any) -> Figures:
        """Knowledge of some records, as means over records.

        Returns:
            `loss`; of images `recognised`, the share whose most likely class is the label; of texts
            `extraction_strength` and `exact_memorization`.

        Raises:
            HamuError: if a loss is not finite.
        """
        if self.is_text:
            tokens = predict_tokens(model, records, self.eval_batch_size, self.collate)
            losses = tokens.record_losses
            found = {
                "extraction_strength": extraction_strength(tokens),
                "exact_memorization": exact_memorization(tokens),
            }
        else:
            images = predict(model, records, self.eval_batch_size, self.collate)
            losses, found = images.losses, {"recognised": images.correct.double()}
        if not losses.isfinite().all():
            raise HamuError(
                "a loss of the forgotten records is not finite; attack a model that is not destroyed, or lower "
                "--attack_learning_rate"
            )
        return {name: values.mean().item() for name, values in (found | {"loss": losses}).items()}

    def accuracy(self, model: nn.Module, records: Any) -> float:
        """Share of images, or of scored tokens, whose most likely class is the label."""
        run = predict_tokens if self.is_text else predict
        return (
            run(model, records, self.eval_batch_size, self.collate).correct.double().mean().item()
        )


def drawn(records: Any, most: int, seed: int) -> Any:
    """At most this many records of a set, see `draw_positions`."""
    positions = draw_positions(len(records), most, seed)
    return records if positions is None else records.select(positions)


def exact_memorization(predictions: TokenPredictions) -> Tensor:
    """Exact memorization (EM) of each record, [records] float64.

    (1/T) Σ_t 1[argmax p(· | x, y_<t) = y_t] over the T scored tokens (Tirumala et al. 2022), as in
    OpenUnlearning (Dorna et al. 2025). The end-of-sequence token is scored too.
    """
    return torch.stack([right.double().mean() for right in predictions.each(predictions.correct)])


def extraction_strength(predictions: TokenPredictions) -> Tensor:
    """Extraction strength (ES) of each record, [records] float64.

    1 - k/T with the smallest k such that greedy decoding after the first k of the T scored tokens gives all
    others (Carlini et al. 2021), as in OpenUnlearning (Dorna et al. 2025), whose code gives
    1/T where no token fits; here that is 0.
    """

    def strength(right: Tensor) -> float:
        return float(right.flip(0).long().cumprod(0).sum()) / len(right)

    each = [strength(right) for right in predictions.each(predictions.correct)]
    return torch.tensor(each, dtype=torch.float64)
