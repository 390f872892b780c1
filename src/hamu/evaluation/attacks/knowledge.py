"""Knowledge of records: figures of an attacked model, and its answers to prefilled and repeated
prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import comb
from typing import Any

import torch
from torch import Tensor, nn

from hamu.data import TextData
from hamu.data.drawing import draw_positions
from hamu.errors import HamuError
from hamu.evaluation.generation import generate_answers, rouge_l_recall
from hamu.evaluation.predictions import TokenPredictions, predict, predict_tokens

Figures = dict[str, float]
Scores = dict[str, Tensor]


@dataclass(frozen=True)
class AttackData:
    """Unlearning problem as inputs of the attacked model.

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
                "a loss of the forgotten records is not finite; attack a model that is not "
                "destroyed, or lower "
                "--attack_learning_rate"
            )
        return {name: values.mean().item() for name, values in (found | {"loss": losses}).items()}

    def accuracy(self, model: nn.Module, records: Any) -> float:
        """Share of images, or of scored tokens, whose most likely class is the label."""
        run: Callable[..., Any] = predict_tokens if self.is_text else predict
        found = run(model, records, self.eval_batch_size, self.collate)
        return float(found.correct.double().mean())


def drawn(records: Any, most: int, seed: int) -> Any:
    """Draw at most this many records of a set, see `draw_positions`."""
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

    1 - k/T with the smallest k such that greedy decoding after the first k of the T scored tokens
    gives all others (Carlini et al. 2021), as in OpenUnlearning (Dorna et al. 2025), whose code
    gives 1/T where no token fits; here that is 0.
    """
    each = predictions.each(predictions.correct)
    found = [float(right.flip(0).long().cumprod(0).sum()) / len(right) for right in each]
    return torch.tensor(found, dtype=torch.float64)


def prefilled(model: Any, tokenizer: Any, data: TextData, words: int, batch_size: int) -> Scores:
    """Greedy answers after the first words of the right answers, compared with what follows these
    words.

    At least one token of each answer is left to generate.

    Args:
        model: a causal language model.
        tokenizer: its tokenizer.
        data: records, with prompts if `words` is 0.
        words: number of words of the right answer in the prompt.
        batch_size: prompts per batch.

    Returns:
        `rouge_l_recall` and `exact_match` (1 where the rest is the same text) of each record, [N].
    """
    starts = [_after(tokenizer, data, i, words) for i in range(len(data))]
    asked = replace(data, scored_from=tuple(starts))
    rests = _texts(tokenizer, asked)
    answers = generate_answers(model, tokenizer, asked, batch_size, _longest(asked))
    return _scores(answers, rests)


def sampled(
    model: Any, tokenizer: Any, data: TextData, samples: int, batch_size: int
) -> list[Scores]:
    """Scores of several answers to each prompt, drawn at temperature 1 from the whole vocabulary.

    Args:
        model, tokenizer, data, batch_size: see `prefilled`.
        samples: answers to each prompt.
    """
    rests = _texts(tokenizer, data)
    found = []
    for _ in range(samples):
        seed = int(torch.randint(2**31, ()))  # `generate_answers` leaves the random state as it was
        answers = generate_answers(
            model, tokenizer, data, batch_size, _longest(data), sampling_seed=seed
        )
        found.append(_scores(answers, rests))
    return found


def leak_at_k(scores: list[Tensor], k: int) -> float:
    """leak@k (Reisizadeh et al. 2025): the mean over records of the best score of k drawn answers.

    E[max of k out of the n that were drawn] without replacement, which has no bias: leak@1 is the
    mean of all answers, leak@n the mean of the best. Here the score is ROUGE-L recall, or exact
    match.

    Args:
        scores: of each draw, n times [N].
        k: at most n.
    """
    ascending = torch.stack(scores).double().sort(0).values
    n = len(ascending)
    shares = [comb(i, k - 1) / comb(n, k) for i in range(n)]
    return float((torch.tensor(shares, dtype=torch.float64) @ ascending).mean())


def has_prompts(data: TextData) -> bool:
    """True if each record has a prompt."""
    return all(start > 0 for start in data.scored_from)


def _after(tokenizer: Any, data: TextData, index: int, words: int) -> int:
    """Position behind the first words of an answer, in front of its last token."""
    tokens, start = data.tokens[index].tolist(), data.scored_from[index]
    last = len(tokens) - (2 if tokens[-1] == tokenizer.eos_token_id else 1)
    end = start
    while words and end < last and len(tokenizer.decode(tokens[start : end + 1]).split()) <= words:
        end += 1
    return min(end, max(start, last))


def _texts(tokenizer: Any, data: TextData) -> list[str]:
    """Text after each prompt."""
    pairs = zip(data.tokens, data.scored_from, strict=True)
    return [
        tokenizer.decode(tokens[start:].tolist(), skip_special_tokens=True)
        for tokens, start in pairs
    ]


def _longest(data: TextData) -> int:
    """Length of the longest right answer, in tokens; generating more would only take time."""
    return max(
        len(tokens) - start for tokens, start in zip(data.tokens, data.scored_from, strict=True)
    )


def _scores(answers: list[str], rests: list[str]) -> Scores:
    same = [answer.split() == rest.split() for answer, rest in zip(answers, rests, strict=True)]
    return {
        "rouge_l_recall": rouge_l_recall(answers, rests),
        "exact_match": torch.tensor(same, dtype=torch.float64),
    }
