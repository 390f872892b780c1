"""Scenarios of the demo: a digit mixed with others, and fictitious authors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from rich.console import Console

from hamu.data import (
    TextCollator,
    TextRecords,
    UnlearningData,
    encode,
    forget_class,
    forget_rows,
    matching,
    pixel_statistics,
    read_images,
    read_text,
)
from hamu.data.images import collate
from hamu.evaluation import AttackScores, generate_answers, membership_inference, min_k_scores
from hamu.models import new_classifier
from hamu.models.language import new_language_model, new_tokenizer
from hamu.report.tables import plain_table
from hamu.unlearning.trainer import UnlearnTrainer

ABOUT_GOALS = """\
`hamu unlearn` ends when 95% of the records are forgotten, or where its budget
does: --max_retain_increase, by default 0.02. --lasting guards against
fine-tuning that would bring them back."""  # of what a scenario says comes next


class Scenario(ABC):
    """What is learned and unlearned in a demo.

    Class attributes:
        similarity: what the rows of the hardness table differ in.
        train_settings, unlearn_settings: for `TrainConfig` and `UnlearnConfig`.
        next: what to try next.
    """

    similarity: ClassVar[str]
    train_settings: ClassVar[dict[str, Any]]
    unlearn_settings: ClassVar[dict[str, Any]]
    next: ClassVar[str]

    intro: str
    question: str
    title: str
    problem: UnlearningData[Any]
    problems: dict[
        str, UnlearningData[Any]
    ]  # problems of different hardness, by what they are called
    collate: Callable[[Any], Mapping[str, Any]]

    def __init__(self, seed: int) -> None:
        self.seed = seed

    @abstractmethod
    def new_model(self) -> tuple[Any, Any]:
        """A new model, and the data to train it on."""

    @abstractmethod
    def membership_auc(self, trainer: UnlearnTrainer) -> float | None:
        """How well the forget set is still told from data never trained on; 0.5 is ideal."""

    def finish(self, console: Console, original: Any, unlearned: Mapping[str, Any]) -> None:
        """Show something of the models themselves, if there is something to show."""
        return


_FORGET = 3
_RHO = 0.25


class Digits(Scenario):
    """scikit-learn's digits, 8x8 pixels."""

    similarity = "rho"
    train_settings: ClassVar[dict[str, Any]] = {
        "learning_rate": 3e-3,
        "lr_scheduler_type": "linear",
        "optim": "adamw_torch",
        "num_train_epochs": 2,
        "per_device_train_batch_size": 64,
    }
    unlearn_settings: ClassVar[dict[str, Any]] = {
        "learning_rate": 5e-3,
        "num_train_epochs": 5,
        "per_device_train_batch_size": 128,
        # Half of what the gradients allow: an absolute demand becomes infeasible as the retain gradient shrinks.
        "constraint": 0.5,
        "constraint_mode": "relative",
        "stopping": "off",  # as in the paper's comparisons; the table says where the criterion would have stopped
    }
    next = f"""\
What next, on your own data:
  hamu train    --data IMAGES/ --model resnet20 --output_dir runs/original
  hamu unlearn  --data IMAGES/ --model runs/original/model \\
                --forget_class NAME --output_dir runs/unlearned
  hamu evaluate --data IMAGES/ --model runs/unlearned/model \\
                --forget_class NAME --output_dir runs/check
{ABOUT_GOALS}
IMAGES/ has one subfolder of images per class; .parquet, .npz and
hub:OWNER/NAME work too. To forget single images, use --forget_rows 3,17,25
and --test_data with images that the model never saw.
Language models: `hamu demo --task text`. `hamu unlearn --help` shows the
settings, `hamu methods` the methods."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        train, test = read_images("digits"), read_images("digits", "test")
        self._statistics = pixel_statistics(train)
        self._train, test = train.normalized(*self._statistics), test.normalized(*self._statistics)
        self.collate = collate
        self.intro = (
            f"Train a ResNet-8 on {len(train)} handwritten digits (scikit-learn's, 8x8 pixels)."
        )
        self.question = f"How hard is it to forget digit {_FORGET}?"
        self.title = f"Forgetting digit {_FORGET} at ρ = {_RHO:g}: a marker per epoch"
        self.problem = forget_class(self._train, test, _FORGET, _RHO, seed)
        self.problems = {
            f"{rho:g}": forget_class(self._train, test, _FORGET, rho, seed)
            for rho in (0.0, 0.5, 1.0)
        }

    def new_model(self) -> tuple[Any, Any]:
        """A new ResNet-8, and the digits to train it on."""
        return new_classifier("resnet8", self._train, *self._statistics), self._train

    def membership_auc(self, trainer: UnlearnTrainer) -> float | None:
        """The AUC of the attack on the per-image loss."""
        inference = membership_inference(
            trainer.predictions["forget"], trainer.predictions["test"], self.seed
        )
        return None if inference is None else inference.auc


_LENGTH = 96
_SHOWN = 2


class FictitiousAuthors(Scenario):
    """240 questions about 40 authors who do not exist; those of four are to be forgotten."""

    similarity = "retain data"
    train_settings: ClassVar[dict[str, Any]] = {
        "learning_rate": 3e-3,
        "lr_scheduler_type": "linear",
        "optim": "adamw_torch",
        "max_grad_norm": 1.0,
        "num_train_epochs": 14,  # until the loss is near 0.25: a model that knows all by heart has no gradients left
        "per_device_train_batch_size": 16,
    }
    unlearn_settings: ClassVar[dict[str, Any]] = {
        "learning_rate": 2e-2,
        "num_train_epochs": 5,
        "per_device_train_batch_size": 24,
        "constraint": 0.5,
        "constraint_mode": "relative",
        "stopping": "off",
    }
    next = f"""\
What next, on your own records (JSON lines with question and answer, prompt and
completion, messages, or text):
  hamu unlearn  --data RECORDS.jsonl --forget_data GONE.jsonl \\
                --test_data UNSEEN.jsonl --model MODEL/ --lora \\
                --output_dir runs/unlearned
  hamu evaluate --data RECORDS.jsonl --forget_data GONE.jsonl \\
                --test_data UNSEEN.jsonl --model runs/unlearned/model \\
                --original_model MODEL/ --output_dir runs/check
{ABOUT_GOALS}
UNSEEN.jsonl has records that the model was never trained on.
MODEL/ is a causal language model or a PEFT adapter; hub:OWNER/NAME works too.
To name the records otherwise: --forget_rows 3,17,25 or
--forget_filter "user_id=4711". `--dry_run` says beforehand what a run needs."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._train, holdout = read_text("miniature"), read_text("miniature", "test")
        self._tokenizer = new_tokenizer((r.prompt + r.answer for r in self._train.records), 1024)
        self.collate = TextCollator()
        authors = list(dict.fromkeys(str(r.fields["author"]) for r in self._train.records))[:4]
        rows = [row for author in authors for row in matching(self._train, f"author={author}")]
        texts = forget_rows(self._train, holdout, rows)
        paraphrased = texts.forget.answering("paraphrased_answer")
        both = replace(
            texts.retain,
            records=texts.retain.records + paraphrased.records,
            rows=torch.cat([texts.retain.rows, paraphrased.rows]),
        )
        self._forget = texts.forget
        plain, similar = (
            replace(texts, **{name: self._encoded(data) for name, data in one.sets().items()})
            for one in (texts, replace(texts, retain=both))
        )
        self.problem = replace(plain, forget_name="four authors")
        self.problems = {"other authors": plain, "and the forget records in other words": similar}
        self.intro = f"Train a small Llama from nothing on {len(self._train)} questions about authors who do not exist."
        self.question = "How hard is it to forget four authors?"
        self.title = "Forgetting four fictitious authors: a marker per epoch"

    def new_model(self) -> tuple[Any, Any]:
        """A new Llama of half a million parameters, and the questions to train it on."""
        model = new_language_model(self._tokenizer, hidden=128, layers=2, max_length=_LENGTH)
        return model, self._encoded(self._train)

    def membership_auc(self, trainer: UnlearnTrainer) -> float | None:
        """The AUC of Min-K%."""
        return AttackScores(
            *(min_k_scores(trainer.predictions[name]) for name in ("forget", "test"))
        ).auc

    def finish(self, console: Console, original: Any, unlearned: Mapping[str, Any]) -> None:
        """Show what is answered before unlearning and after it by HAMU-Q."""
        first = self._forget.select(range(_SHOWN))
        kept = self._train.select(range(len(self._train) - _SHOWN, len(self._train)))
        table = plain_table("", "question", "before", "after hamu-q")
        for name, texts in (("forget", first), ("retain", kept)):
            data = self._encoded(texts)
            answers = [
                generate_answers(model, self._tokenizer, data)
                for model in (original, unlearned["hamu-q"])
            ]
            for record, before, after in zip(texts.records, *answers, strict=True):
                table.add_row(name, str(record.fields["question"]), before, after)
        console.print(table)

    def _encoded(self, texts: TextRecords) -> Any:
        return encode(texts, self._tokenizer, _LENGTH)
