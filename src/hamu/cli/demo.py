"""`hamu demo`: the whole story on bundled data: train, assess, unlearn with every method, compare.

The original model is trained briefly, as long as it still has something to learn, like the
paper's; then every method starts from it with the same learning rate, batches and number of epochs.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any, ClassVar

import torch
from rich.console import Console
from rich.text import Text
from transformers import set_seed

from hamu.assess import measure_hardness
from hamu.core.methods import method_classes
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
from hamu.errors import HamuError
from hamu.evaluation import generate_answers, membership_inference
from hamu.evaluation.membership import AttackScores, min_k_scores
from hamu.files import SUMMARY, TRAJECTORIES
from hamu.models import new_classifier
from hamu.models.language import new_language_model, new_tokenizer
from hamu.report import plot_trajectories
from hamu.report.tables import plain_table
from hamu.unlearning.jobs.progress import ProgressBar, task_bar
from hamu.unlearning.run_folder import RunFolder
from hamu.unlearning.trainer import TrainConfig, UnlearnConfig, UnlearnTrainer, train_original
from hamu.unlearning.trainer.trainer import quiet_trainer

ABOUT_GOALS = """\
`hamu unlearn` ends when 95% of the records are forgotten, or where its budget
does: --max_retain_increase, by default 0.02. --lasting guards against
fine-tuning that would bring them back."""
_TRAIN = {"learning_rate": 3e-3, "lr_scheduler_type": "linear", "optim": "adamw_torch"}
_UNLEARN = {
    "num_train_epochs": 5,
    # half of what the gradients allow: an absolute demand becomes infeasible as the retain
    # gradient shrinks
    "constraint": 0.5,
    "constraint_mode": "relative",
    "stopping": "off",  # the table names the step where the criterion would have stopped
}
_ACCURACIES = ("forget_accuracy", "retain_accuracy", "test_accuracy")
_FORGET, _RHO = 3, 0.25  # the digit, and the share that is replaced by others
_LENGTH = 96  # tokens of a text
_SHOWN = 2  # answers of each set


class Scenario:
    """Problem of a demo.

    Attributes:
        similarity: the difference between the rows of the hardness table.
        train_settings, unlearn_settings: for `TrainConfig` and `UnlearnConfig`.
        next: what to try next.
        intro, question, title: of the steps of the demo, and of its picture.
        problem: to unlearn.
        problems: problems of different hardness, by name.
        collate: makes a batch.
    """

    similarity: ClassVar[str]
    train_settings: ClassVar[dict[str, Any]]
    unlearn_settings: ClassVar[dict[str, Any]]
    next: ClassVar[str]
    intro: str
    question: str
    title: str
    problem: UnlearningData[Any]
    problems: dict[str, UnlearningData[Any]]
    collate: Callable[[Any], Mapping[str, Any]]

    def new_model(self) -> tuple[Any, Any]:
        """A new model, and the data to train it on."""
        raise NotImplementedError

    def membership_auc(self, trainer: UnlearnTrainer) -> float | None:
        """AUC of telling the forget set from data never trained on; 0.5 is ideal."""
        raise NotImplementedError

    def finish(self, console: Console, original: Any, unlearned: Mapping[str, Any]) -> None:
        """Show something of the models themselves, if there is something to show."""
        return


class Digits(Scenario):
    """scikit-learn's digits, 8x8 pixels."""

    similarity = "rho"
    train_settings: ClassVar[dict[str, Any]] = {
        **_TRAIN,
        "num_train_epochs": 2,
        "per_device_train_batch_size": 64,
    }
    unlearn_settings: ClassVar[dict[str, Any]] = {
        **_UNLEARN,
        "learning_rate": 5e-3,
        "per_device_train_batch_size": 128,
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
        self._seed = seed
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
        found: Any = trainer.predictions
        inference = membership_inference(found["forget"], found["test"], self._seed)
        return None if inference is None else inference.auc


class FictitiousAuthors(Scenario):
    """240 questions about 40 authors who do not exist; those of four are to be forgotten."""

    similarity = "retain data"
    train_settings: ClassVar[dict[str, Any]] = {
        **_TRAIN,
        "max_grad_norm": 1.0,
        # until the loss is near 0.25: a model that knows all by heart has no gradients left
        "num_train_epochs": 14,
        "per_device_train_batch_size": 16,
    }
    unlearn_settings: ClassVar[dict[str, Any]] = {
        **_UNLEARN,
        "learning_rate": 2e-2,
        "per_device_train_batch_size": 24,
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
    intro = "Train a small Llama from nothing on 240 questions about authors who do not exist."
    question = "How hard is it to forget four authors?"
    title = "Forgetting four fictitious authors: a marker per epoch"

    def __init__(self, seed: int) -> None:
        self._train, test = read_text("miniature"), read_text("miniature", "test")
        self._tokenizer = new_tokenizer((r.prompt + r.answer for r in self._train.records), 1024)
        self.collate = TextCollator()
        authors = list(dict.fromkeys(str(r.fields["author"]) for r in self._train.records))[:4]
        rows = [row for author in authors for row in matching(self._train, f"author={author}")]
        texts = forget_rows(self._train, test, rows)
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

    def new_model(self) -> tuple[Any, Any]:
        """A new Llama of half a million parameters, and the questions to train it on."""
        model = new_language_model(self._tokenizer, hidden=128, layers=2, max_length=_LENGTH)
        return model, self._encoded(self._train)

    def membership_auc(self, trainer: UnlearnTrainer) -> float | None:
        """The AUC of Min-K%."""
        found: Any = trainer.predictions
        return AttackScores(*(min_k_scores(found[name]) for name in ("forget", "test"))).auc

    def finish(self, console: Console, original: Any, unlearned: Mapping[str, Any]) -> None:
        """Show the answers before unlearning and after it by HAMU-Q."""
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


def demo(console: Console, task: str, output_dir: str, seed: int, overwrite: bool) -> None:
    """Train, assess, unlearn with every method; print one table, save the picture and figures."""
    scenarios: dict[str, Callable[[int], Scenario]] = {"image": Digits, "text": FictitiousAuthors}
    if task not in scenarios:
        raise HamuError(f"task {task!r} is unknown; choose image or text")
    folder = RunFolder(output_dir, overwrite=overwrite)
    begin = time.perf_counter()
    TrainConfig(output_dir=output_dir, seed=seed)  # refuses a seed out of range
    scenario = scenarios[task](seed)
    console.print(f"1. {scenario.intro}")
    set_seed(seed)
    original, train = scenario.new_model()
    config = TrainConfig(
        output_dir=output_dir, seed=seed, disable_tqdm=True, **scenario.train_settings
    )
    with ProgressBar(console, "train") as bar:
        train_original(original, train, config, scenario.collate, [bar])

    console.print(f"2. {scenario.question} The more alike forget and retain data, the harder.")
    hardness = _assess(original, scenario, console)

    problem, settings = scenario.problem, scenario.unlearn_settings
    console.print(
        f"3. Forget {len(problem.forget)} records ({problem.forget_name}) with every method from "
        f"the same start: {settings['num_train_epochs']} epochs, SGD, learning rate "
        f"{settings['learning_rate']:g}."
    )
    results, models = {}, {}
    with task_bar(console) as bar:
        for name in bar.track(list(method_classes()), description="unlearn"):
            set_seed(seed)
            args = UnlearnConfig(
                output_dir=output_dir, method=name, seed=seed, check_steps=0, **settings
            )
            models[name] = copy.deepcopy(original)
            results[name] = _unlearned(models[name], scenario, args)
    seconds = time.perf_counter() - begin
    summary = {"task": task, "seed": seed, "settings": settings, "hardness": hardness}
    summary |= {"methods": results, "seconds": round(seconds, 1)}
    path = folder.path / TRAJECTORIES
    with folder:
        # the summary first: it shows whose folder this is
        folder.write_json(SUMMARY, summary)
        ways = {name: result["trajectory"] for name, result in results.items()}
        plot_trajectories(ways, path, scenario.title)
    console.print(_table(results))
    console.print(
        "ΔL_f: rise of the forget loss. -ΔL_r: fall of the retain loss. Both should be positive.\n"
        "AUC: membership inference on the forget set; 0.5 is ideal.\n"
        "stop at: the step at which the stopping criterion was first met; not enforced here.\n"
    )
    scenario.finish(console, original, models)
    figures = folder.path / SUMMARY
    console.print(f"The picture is in {path}, all figures in {figures} ({seconds:.0f} s).\n")
    console.print(scenario.next)


def _assess(model: Any, scenario: Scenario, console: Console) -> dict[str, dict[str, Any]]:
    table = plain_table(scenario.similarity, "κ", "cosθ", "κ2", "regime", right=(1, 2, 3))
    found = {}
    for name, problem in scenario.problems.items():
        hard = measure_hardness(model, problem.retain, problem.forget, collate=scenario.collate)
        found[name] = asdict(hard)
        figures = (f"{hard.kappa:+.4f}", f"{hard.cos:+.3f}", f"{hard.stop_threshold:.4f}")
        table.add_row(name, *figures, hard.regime)
    console.print(table)
    return found


def _unlearned(model: Any, scenario: Scenario, args: UnlearnConfig) -> dict[str, Any]:
    """The figures of one method."""
    trainer = quiet_trainer(model, scenario.problem, args, [], scenario.collate)
    trainer.train()
    if trainer.evaluated_step != trainer.state.global_step:
        trainer.evaluate()
    history = trainer.state.log_history
    log = [entry for entry in history if "eval_forget_gain" in entry]
    gains = ("forget_gain", "retain_gain", *_ACCURACIES)
    return {name: log[-1][f"eval_{name}"] for name in gains} | {
        "membership_auc": scenario.membership_auc(trainer),
        "steps": trainer.steps_taken,
        "criterion_met_at_step": next((e["step"] for e in history if e.get("criterion_met")), None),
        "trajectory": [(entry["eval_retain_gain"], entry["eval_forget_gain"]) for entry in log],
    }


def _table(results: dict[str, dict[str, Any]]) -> Any:
    heads = ("ΔL_f", "-ΔL_r", "forget acc", "retain acc", "test acc", "AUC", "stop at")
    table = plain_table("method", *heads, right=tuple(range(1, 8)))
    for name, row in results.items():
        both = row["forget_gain"] > 0 and row["retain_gain"] > 0
        table.add_row(
            Text(name, "bold" if both else ""),
            f"{row['forget_gain']:+.3f}",
            f"{row['retain_gain']:+.4f}",
            *(f"{row[key]:.1%}" for key in _ACCURACIES),
            "-" if row["membership_auc"] is None else f"{row['membership_auc']:.3f}",
            str(row["criterion_met_at_step"] or "-"),
        )
    return table
