"""Answers of a language model: generation, ROUGE-L recall, TOFU's figures (Maini et al. 2024)."""

import math
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby, takewhile
from statistics import harmonic_mean
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hamu.core.forward import evaluating, seeded
from hamu.data import TextData, TextRecords, encode
from hamu.data.forget_sets import subset
from hamu.errors import HamuError
from hamu.evaluation.predictions import TokenPredictions, predict_tokens, probabilities
from hamu.models.language import longest_text

MAX_NEW_TOKENS = 200  # TOFU's limit is 200 tokens with the prompt
_ALONE = ("recurrent_gemma", "rwkv", "xlstm")  # types that read padding, whatever the mask says


@torch.no_grad()
def generate_answers(
    model: Any,
    tokenizer: Any,
    data: TextData,
    batch_size: int = 64,
    max_new_tokens: int = MAX_NEW_TOKENS,
    *,
    sampling_seed: int | None = None,
) -> list[str]:
    """Answer each prompt with the most likely token at every step, until an end token.

    Neither the other prompts of a batch nor the right answers change an answer, but drawn ones
    depend on the batch size. Of the model's own generation settings only its end tokens count.

    Args:
        data: records encoded with loss_on="answer".
        max_new_tokens: the longest answer, shorter where the model's context ends before.
        sampling_seed: draws each token, at temperature 1 from the whole vocabulary.

    Raises:
        HamuError: if a record has no prompt.
    """
    prompts = [data.prompt(i) for i in range(len(data))]
    lengths = [len(prompt) for prompt in prompts]
    if 0 in lengths:
        row = data.rows[lengths.index(0)].item()
        raise HamuError(
            f"row {row} of {data.texts.source} has no prompt to answer; give questions, not plain "
            f"text"
        )
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    named = named if isinstance(named, list) else [named]  # a chat model has several
    ends = sorted({tokenizer.eos_token_id, *named, *data.ends} - {None})
    pad = ends[0] if ends else 0  # a tokenizer's own may have no embedding in the model
    longest = longest_text(model) or math.inf
    room = [int(min(max_new_tokens, max(1, longest - n))) for n in lengths]
    # router losses, which a model may add to its own loss, do not fit the tokens of a generation
    has_routers = getattr(model.config, "output_router_logits", False)
    more = {"output_router_logits": False} if has_routers else {}
    answers, is_greedy = [""] * len(prompts), sampling_seed is None
    size = 1 if model.config.model_type in _ALONE else batch_size
    with evaluating(model), seeded(model, sampling_seed), _settings(model, is_greedy=is_greedy):
        for places in _batches(lengths, room, size):
            ids = _pad_left([prompts[i] for i in places], pad)
            mask = _pad_left([torch.ones_like(prompts[i]) for i in places], 0)
            generated = model.generate(
                input_ids=ids.to(model.device),
                attention_mask=mask.to(model.device),
                max_new_tokens=room[places[0]],
                use_cache=True,
                pad_token_id=pad,
                eos_token_id=ends or None,
                **more,
            )
            rows = generated[:, ids.shape[1] :].tolist()
            written = [list(takewhile(lambda token: token not in ends, row)) for row in rows]
            texts = tokenizer.batch_decode(written, skip_special_tokens=True)
            for place, text in zip(places, texts, strict=True):
                answers[place] = text.strip()
    return answers


@contextmanager
def _settings(model: Any, *, is_greedy: bool) -> Iterator[None]:
    """Replace the model's own generation settings, which fill in whatever a call leaves open."""
    from transformers import GenerationConfig

    drawn = {} if is_greedy else {"top_k": 0, "top_p": 1.0, "temperature": 1.0}
    is_adapter = hasattr(model, "get_base_model")  # its settings are those of its base
    inner = model.get_base_model() if is_adapter else model
    kept = inner.generation_config
    inner.generation_config = GenerationConfig(do_sample=not is_greedy, **drawn)
    try:
        yield
    finally:
        inner.generation_config = kept


def _batches(lengths: Sequence[int], room: Sequence[int], size: int) -> Iterator[list[int]]:
    """Positions of prompts of similar length with room for the same number of tokens."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    for _, group in groupby(order, key=room.__getitem__):  # falls with the length
        places = list(group)
        yield from (places[start : start + size] for start in range(0, len(places), size))


def _pad_left(sequences: list[Tensor], value: int) -> Tensor:
    return pad_sequence(sequences, batch_first=True, padding_value=value, padding_side="left")


def rouge_l(answers: Sequence[str], references: Sequence[str], figure: str = "recall") -> Tensor:
    """ROUGE-L of each answer, [N] float64 (Lin 2004), as in TOFU (Maini et al. 2024).

    Its tokenizer reads only Latin letters without accents; references of mostly other letters are
    split by Unicode words, and scripts without spaces into characters. For a reference without a
    word it is 1 if the answer is equal, else 0. `figure` is recall, precision, or fmeasure for F1.
    """
    from rouge_score.rouge_scorer import RougeScorer

    latin = RougeScorer(["rougeL"], use_stemmer=True)
    other = RougeScorer(["rougeL"], tokenizer=SimpleNamespace(tokenize=words_of))

    def scored(answer: str, reference: str) -> float:
        signs = [sign for sign in reference if sign.isalnum()]
        if not signs:
            return float(answer == reference)
        is_latin = 2 * sum(sign.isascii() for sign in signs) >= len(signs)
        found = (latin if is_latin else other).score(reference, answer)["rougeL"]
        return float(getattr(found, figure))

    pairs = zip(answers, references, strict=True)
    found = [scored(answer.strip(), reference.strip()) for answer, reference in pairs]
    return torch.tensor(found, dtype=torch.float64)


def words_of(text: str) -> list[str]:
    """Words of letters and digits in any script; each character where there are no spaces."""
    parts: list[str] = []
    for word in re.findall(r"[^\W_]+", unicodedata.normalize("NFC", text).casefold()):
        is_wide = any(unicodedata.east_asian_width(sign) in "WF" for sign in word)
        parts += word if is_wide else [word]
    return parts


PARAPHRASED, PERTURBED = "paraphrased_answer", "perturbed_answer"
_TERMS = ("probability", "rouge", "truth_ratio")
_OUTSIDE_SETS = ("real_authors", "world_facts")  # pre-training knowledge, judged among options


def normalized_probabilities(
    answer: TokenPredictions, wrong: TokenPredictions, owner: Tensor
) -> Tensor:
    """P / (p + Σ_j p_j) of each record, float64; `owner` is the record of each wrong answer j."""
    odds = torch.exp(answer.record_losses[owner] - wrong.record_losses)  # p_j/p, never 0/0
    return 1.0 / (1.0 + odds.new_zeros(answer.records).index_add_(0, owner, odds))


def truth_ratios(
    paraphrase: TokenPredictions, perturbed: TokenPredictions, owner: Tensor
) -> Tensor:
    """R = exp(-mean_j NLL(perturbed_j)) / exp(-NLL(paraphrase)) of each record, float64."""
    losses = perturbed.record_losses
    sums = losses.new_zeros(paraphrase.records).index_add_(0, owner, losses)
    return torch.exp(paraphrase.record_losses - sums / owner.bincount(minlength=len(sums)))


def truth_ratio_scores(ratios: Tensor, for_forget: bool) -> Tensor:
    """min(R, 1/R) for the forget set, best where R is 1; otherwise max(0, 1 - R), best where 0."""
    return torch.minimum(ratios, 1.0 / ratios) if for_forget else (1.0 - ratios).clamp(min=0.0)


def forget_quality(ours: Sequence[float] | Tensor, reference: Sequence[float] | Tensor) -> float:
    """p-value of a two-sample Kolmogorov-Smirnov test between truth ratios R on the forget set.

    `reference` are those under a retain model. TOFU calls p > 0.05 good.
    """
    from scipy.stats import ks_2samp

    return float(ks_2samp(ours, reference).pvalue)


def tofu_report(
    model: Any,
    tokenizer: Any,
    sets: Mapping[str, TextRecords],
    batch_size: int = 64,
    max_length: int = 512,
    most: int | None = None,
    seed: int = 42,
    max_new_tokens: int = MAX_NEW_TOKENS,
) -> dict[str, Any]:
    """Figures of TOFU, ready for JSON, by the formulas of docs/metrics.md.

    A set without paraphrased answers takes the answers themselves; a figure is None if it needs a
    set that is missing.

    Args:
        sets: questions and answers by name: "forget", "retain", "real_authors" (who exist) and
            "world_facts", as far as they are there. Each record has the field `perturbed_answer`
            (wrong answers), and maybe `paraphrased_answer`.
        max_length: cuts longer records at their end.
        most, seed: generate for this many records of each set at most, drawn by the seed; 0
            generates no answers, which take most of the time.
        max_new_tokens: the longest generated answer, see `generate_answers`.

    Raises:
        HamuError: if a record has no perturbed answer, or only some have a paraphrased one.
    """
    report: dict[str, Any] = {}
    for name, texts in sets.items():
        figures = _likelihoods(model, tokenizer, name, texts, batch_size, max_length)
        report[name] = figures | {"generated": 0, "rouge": None}
        if most != 0:
            asked = subset(texts, most, seed)
            data = encode(asked, tokenizer, max_length)
            answers = generate_answers(model, tokenizer, data, batch_size, max_new_tokens)
            rouge = rouge_l(answers, [record.answer for record in asked.records])
            report[name] |= {"generated": len(asked), "rouge": rouge.mean().item()}
    nine = [report.get(n, {}).get(key) for n in ("retain", *_OUTSIDE_SETS) for key in _TERMS]
    return report | {
        "model_utility": None if None in nine else harmonic_mean(nine),
        "model_utility_probability": nine[0],
    }


def _likelihoods(
    model: Any, tokenizer: Any, name: str, texts: TextRecords, batch_size: int, max_length: int
) -> dict[str, Any]:
    def predicted(records: TextRecords) -> TokenPredictions:
        return predict_tokens(model, encode(records, tokenizer, max_length), batch_size)

    perturbed = texts.answering(PERTURBED)
    owner = torch.unique_consecutive(perturbed.rows, return_inverse=True)[1]
    answer, wrong = predicted(texts), predicted(perturbed)
    right = answer
    if any(record.fields.get(PARAPHRASED) for record in texts.records):
        paraphrases = texts.answering(PARAPHRASED)
        if len(paraphrases) != len(texts):
            raise HamuError(
                f"{texts.source} has {len(paraphrases)} paraphrased answers for {len(texts)} "
                f"records; give one each"
            )
        right = predicted(paraphrases)
    ratios = truth_ratios(right, wrong, owner)
    is_outside = name in _OUTSIDE_SETS
    p = normalized_probabilities(answer, wrong, owner) if is_outside else probabilities(answer)
    figures: dict[str, Any] = {
        "records": len(texts),
        "probability": p.mean().item(),
        "truth_ratio": truth_ratio_scores(ratios, for_forget=name == "forget").mean().item(),
    }
    return figures | ({"truth_ratios": ratios.tolist()} if name == "forget" else {})
