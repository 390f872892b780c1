"""Predictions of a model over a data set, the source of every figure in this room."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

from hamu.core.distributed import rank, world_size
from hamu.core.forward import evaluating, predict_logits
from hamu.core.objectives import IGNORED, Scored
from hamu.data import TextData, batch_of, collate
from hamu.errors import HamuError

Collate = Callable[[Any], Mapping[str, Tensor]]
Columns = tuple[Tensor, ...]
_PASS = 8192  # padded tokens of a forward pass at most, unless a single text has more
_CHUNK = 1 << 23  # logits that are worked on at once, each in some five float32 copies


@dataclass(frozen=True)
class Predictions:
    """Logits of a classifier and labels of N samples, on the CPU."""

    logits: Tensor  # [N, K], float32
    labels: Tensor  # [N], int64

    @cached_property
    def losses(self) -> Tensor:
        """Cross-entropy of each sample, [N] float64."""
        return nn.functional.cross_entropy(self.logits.double(), self.labels, reduction="none")

    @cached_property
    def correct(self) -> Tensor:
        """True where the most likely class is the label, [N] bool; False where a logit is NaN."""
        return _most_likely(self.logits) == self.labels

    @cached_property
    def log_probabilities(self) -> Tensor:
        """Log p, [N, K] float64."""
        return self.logits.double().log_softmax(-1)


@dataclass(frozen=True)
class TokenPredictions:
    """Predictions of a language model for the N scored tokens of some records, on the CPU."""

    losses: Tensor  # -log p of each token, [N] float64
    correct: Tensor  # [N] bool, True where the token is the most likely one
    expected: Tensor  # Σ_v p_v·log p_v over the vocabulary, [N] float64 (for Min-K%++)
    spread: Tensor  # standard deviation of log p_v under p, [N] float64 (for Min-K%++)
    record: Tensor  # of each token, [N] int64, ascending
    records: int  # their number

    @cached_property
    def lengths(self) -> Tensor:
        """Number of scored tokens of each record, [records]."""
        return torch.bincount(self.record, minlength=self.records)

    @cached_property
    def record_losses(self) -> Tensor:
        """Mean -log p per token of each record (NLL), [records] float64."""
        sums = self.losses.new_zeros(self.records).index_add_(0, self.record, self.losses)
        return sums / self.lengths

    def each(self, values: Tensor) -> Columns:
        """Split token values, [N], into one tensor per record."""
        return torch.split(values, self.lengths.tolist())


def splits_alike(ours: Any, theirs: Any) -> bool:
    """False if two models take the same texts, or their predictions, for other tokens: losses of
    tokens do not compare then.
    """
    kinds = TokenPredictions | TextData
    both = [one.lengths for one in (ours, theirs) if isinstance(one, kinds)]
    return len(both) < 2 or torch.equal(*both)


def probabilities(predictions: TokenPredictions) -> Tensor:
    """exp(-NLL) of each record, [records] float64, NLL the mean -log p per scored token (TOFU)."""
    return torch.exp(-predictions.record_losses)


def predict(
    model: nn.Module,
    data: Dataset[Any],
    batch_size: int,
    collate: Collate = collate,
    *,
    shared: bool = False,
) -> Predictions:
    """Predict every image of a data set in evaluation mode; see `predict_logits`.

    `data` gives items with labels, or batches of them through `__getitems__`; `collate` makes a
    batch of items. If `shared`, all processes share the work, and each must call it. A HamuError
    if the data set is empty or a label is no class.
    """
    lengths = [0] * len(data)  # type: ignore[arg-type]
    logits, labels, _ = _predicted(model, data, lengths, batch_size, collate, _columns, shared)
    classes, is_whole = logits.shape[1], not labels.is_floating_point() and labels.ndim == 1
    wrong = labels[(labels < 0) | (labels >= classes)] if is_whole else labels
    if wrong.numel():
        raise HamuError(
            f"a label is {wrong[0].tolist()}; a classifier of {classes} classes needs one whole "
            f"number from 0 to {classes - 1} for each image"
        )
    return Predictions(logits, labels)


def predict_tokens(
    model: nn.Module,
    data: Dataset[Any],
    batch_size: int,
    collate: Collate = collate,
    *,
    shared: bool = False,
) -> TokenPredictions:
    """Predict the scored tokens of every text of a data set in evaluation mode.

    Computes only the logits of scored tokens, if the model names its output layer
    (`get_output_embeddings`). `data` gives items with input_ids and labels, e.g. `TextData`;
    `collate` pads a list of them. A pass has `batch_size` texts of similar length, or less than
    8,192 tokens. For the rest see `predict`.
    """
    texts = [data[i] for i in range(len(data))]  # type: ignore[arg-type]
    lengths = [len(item["input_ids"]) for item in texts]
    found = _predicted(model, texts, lengths, batch_size, collate, _token_columns, shared)
    losses, correct, expected, spread, record = found
    return TokenPredictions(losses, correct, expected, spread, record, len(texts))


@torch.no_grad()
def embed(model: nn.Module, data: Dataset[Any], batch_size: int) -> Tensor:
    """Input of the classifier's last linear layer, [N, D] float32 on the CPU; see `predict`.

    A HamuError if there is no such layer, or its input is no finite vector per image.
    """
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if not layers:
        raise HamuError("the model has no linear layer whose input could be shown")
    found: list[Tensor] = []
    with layers[-1].register_forward_pre_hook(lambda _, x: found.append(x[0].float().cpu())):
        predict(model, data, batch_size)
    vectors = torch.cat(found)
    if vectors.ndim != 2 or len(vectors) != len(data):  # type: ignore[arg-type]
        raise HamuError("the model's last linear layer takes more than one vector per image")
    if not vectors.isfinite().all():
        raise HamuError("what goes into the model's last linear layer is not finite")
    return vectors


def principal_axes(vectors: Sequence[Tensor]) -> tuple[list[Tensor], float]:
    """Project groups of vectors, [N_i, D] each, onto their two common principal components.

    Returns each group, [N_i, 2], and the share of the variance. A missing axis is 0.
    """
    both = torch.cat(list(vectors)).double()
    centred = both - both.mean(0)
    _, spread, axes = torch.linalg.svd(centred, full_matrices=False)
    share = float(spread[:2].square().sum() / spread.square().sum().clamp(min=1e-300))
    shown = centred @ axes[:2].T
    shown = nn.functional.pad(shown, (0, 2 - shown.shape[1]))
    return list(torch.split(shown, [len(group) for group in vectors])), share


@torch.no_grad()
def _predicted(
    model: nn.Module,
    data: Any,
    lengths: Sequence[int],
    batch_size: int,
    collate: Collate,
    measure: Callable[[nn.Module, Mapping[str, Tensor]], Columns],
    shared: bool,
) -> Columns:
    """Columns of all batches in the data's order, the last of them the record of each row."""
    if not lengths:
        raise HamuError("the data set is empty: it has no record to predict")
    # processes take a record each, in turns; in a last turn that has too few, some repeat one, as
    # a sharded model needs the same passes on each
    world, place = (world_size(), rank()) if shared else (1, 0)
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    turns = [order[start : start + world] for start in range(0, len(order), world)]
    device, found = next(model.parameters()).device, []
    start = 0
    with evaluating(model):
        while start < len(turns):  # the longest first
            most = min(batch_size, _PASS // max(1, lengths[turns[start][0]]))
            batch = turns[start : start + max(1, most)]
            start += len(batch)
            rows = [turn[place % len(turn)] for turn in batch]
            columns = batch_of(data, rows, collate).items()
            inputs = {k: value.to(device) for k, value in columns if isinstance(value, Tensor)}
            *figures, row = (column.cpu() for column in measure(model, inputs))
            found.append((*figures, torch.tensor(rows)[row]))
    joined = _joined(found)
    if place >= len(turns[-1]):
        joined = tuple(column[joined[-1] != rows[-1]] for column in joined)
    if world > 1:
        everyone: list[Any] = [None] * world
        dist.all_gather_object(everyone, joined)
        joined = _joined(everyone)
    back = joined[-1].argsort(stable=True)
    return tuple(column[back] for column in joined)


def _joined(parts: Sequence[Columns]) -> Columns:
    return tuple(map(torch.cat, zip(*parts, strict=True)))


def _columns(model: nn.Module, batch: Mapping[str, Tensor]) -> Columns:
    labels = batch["labels"]
    return predict_logits(model, batch).float(), labels, torch.arange(len(labels))


def _token_columns(model: nn.Module, batch: Mapping[str, Tensor]) -> Columns:
    """Losses, correct, expected and spread of `TokenPredictions`, and the batch row of each."""
    scored, figures = _scored(model, batch), []
    tokens = scored.logits.shape[1]
    wrong = scored.labels[(scored.labels < 0) | (scored.labels >= tokens)]  # a GPU's gather aborts
    if wrong.numel():
        raise HamuError(
            f"a label is {wrong[0].item()}; a model of {tokens} tokens needs one from 0 to "
            f"{tokens - 1} for each token, or -100 for none"
        )
    step = max(1, _CHUNK // tokens)
    parts = (torch.split(of, step) for of in (scored.logits, scored.labels))
    for logits, labels in zip(*parts, strict=True):
        log_p = logits.float().log_softmax(-1)
        p = log_p.exp()
        known = log_p.masked_fill(p == 0, 0.0)  # a masked token adds nothing to the moments
        expected = (p * known).sum(-1)
        spread = (p * (known - expected[:, None]).square()).sum(-1).sqrt()
        losses, right = -log_p.gather(1, labels[:, None])[:, 0], _most_likely(logits) == labels
        figures.append((losses.double(), right, expected.double(), spread.double()))
    return (*_joined(figures), scored.record)


def _scored(model: nn.Module, batch: Mapping[str, Tensor]) -> Scored:
    """Run a model whose output layer gets only the places before scored tokens, if it can."""
    labels, narrowed = batch["labels"], []
    row, place = (labels[:, 1:] != IGNORED).nonzero(as_tuple=True)

    def narrow(_: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not given or given[0].shape[:2] != labels.shape:
            return None
        narrowed.append(True)
        hidden = given[0]  # may lie on another device than the labels
        return (hidden[row.to(hidden.device), place.to(hidden.device)][None], *given[1:])

    head = getattr(model, "get_output_embeddings", lambda: None)() or nn.Identity()
    with head.register_forward_pre_hook(narrow):
        logits = predict_logits(model, batch)
    if not narrowed:
        return Scored.of(logits, labels)
    return Scored(logits[0], labels[:, 1:][row, place].to(logits.device), row, len(labels))


def _most_likely(logits: Tensor) -> Tensor:
    """Class of the highest logit, [N]; -1 where a logit is NaN, which argmax calls the highest."""
    return logits.argmax(-1).masked_fill(logits.isnan().any(-1), -1)
