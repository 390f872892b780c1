"""What the models before and after say about the data: measured again for a report, as far as both can be reached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from hamu.data import ImageData, TextRecords
from hamu.evaluation import Predictions, TokenPredictions
from hamu.report.answers import AnsweredRecord

ROLES = ("before", "after")


@dataclass(frozen=True)
class ImageObservations:
    """What the two models of a run, both classifiers, say of its images.

    Attributes:
        predictions: by role ("before", "after") and set ("retain", "forget", "test").
        counts: how many images of each set were predicted.
        sizes: how many each set has.
        classes: their names in the data; a model may have more outputs.
        pictures: the forget images that are shown, by `hamu.report.images.most_and_least_changed`.
        embeddings: by role and set, [N, D]; empty where there is none.
        no_embedding: why.
        seed: of the run.
    """

    predictions: Mapping[str, Mapping[str, Predictions]]
    counts: Mapping[str, int]
    sizes: Mapping[str, int]
    classes: Sequence[str]
    pictures: Mapping[str, ImageData]
    embeddings: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    no_embedding: str = ""
    seed: int = 42


@dataclass(frozen=True)
class TextObservations:
    """What the two models of a run, both language models, say of its texts.

    Attributes:
        predictions: by role and set.
        texts: the records of each set that were predicted, in that order.
        answers: by set, some prompts with the answers before and after; empty if they were not to be generated.
        no_answers: why there are none.
    """

    predictions: Mapping[str, Mapping[str, TokenPredictions]]
    texts: Mapping[str, TextRecords]
    answers: Mapping[str, Sequence[AnsweredRecord]] = field(default_factory=dict)
    no_answers: str = ""


Observations = ImageObservations | TextObservations
