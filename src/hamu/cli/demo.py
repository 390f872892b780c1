"""`hamu demo`: the whole story on bundled data: train, assess, unlearn with every method, compare.

The original model is trained briefly, as long as it still has something to learn, like the
paper's; then every method starts from it with the same learning rate, batches and number of epochs.
"""

import copy
import os
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console
from transformers import set_seed

from hamu.assess import measure_hardness
from hamu.core.methods import method_classes
from hamu.data import UnlearningData, collate
from hamu.errors import HamuError
from hamu.evaluation.gains import trajectory_of
from hamu.files import SUMMARY, TRAJECTORIES
from hamu.models.language import new_language_model, new_tokenizer
from hamu.report.pictures import plot_trajectories
from hamu.report.tables import CAPTION, Fitted, plain_table
from hamu.unlearning.compare.runs import Comparison, model_figures
from hamu.unlearning.jobs.settings import settings_of
from hamu.unlearning.jobs.tasks import choose_task
from hamu.unlearning.run_folder import RunFolder
from hamu.unlearning.trainer import TrainConfig, UnlearnConfig, train_original
from hamu.unlearning.trainer.logs import ProgressBar, silent, task_bar
from hamu.unlearning.trainer.trainer import quiet_trainer

NEXT = {
    "image": """\
What next, on your own images (a subfolder per class; .parquet, .npz, hub:OWNER/NAME):
  hamu train    --data IMAGES/ --model resnet20 --output_dir runs/original
  hamu unlearn  --data IMAGES/ --model runs/original/model \\
                --forget_class NAME --output_dir runs/unlearned
  hamu evaluate --data IMAGES/ --model runs/unlearned/model \\
                --forget_class NAME --output_dir runs/check
To forget single images: --forget_rows 3,17,25, and --test_data with images that
the model never saw. --lasting guards against fine-tuning that would bring them
back. Language models: `hamu demo --task text`.""",
    "text": """\
What next, on your own records (JSON lines with question and answer, or text):
  hamu unlearn  --data RECORDS.jsonl --forget_data GONE.jsonl \\
                --test_data UNSEEN.jsonl --model MODEL/ --lora \\
                --output_dir runs/unlearned
  hamu evaluate --data RECORDS.jsonl --forget_data GONE.jsonl \\
                --test_data UNSEEN.jsonl --model runs/unlearned/model \\
                --original_model MODEL/ --output_dir runs/check
UNSEEN.jsonl has records that the model was never trained on. To name those to
forget otherwise: --forget_rows 3,17,25 or --forget_filter "user_id=4711".
`--dry_run` says beforehand what a run needs.""",
}
_FIRST, _EACH = ",".join(map(str, range(24))), ",".join(map(str, range(0, 144, 6)))
# The model in words, options of the problem, and of problems of other hardness by their names.
PROBLEMS: dict[str, tuple[str, dict[str, Any], dict[str, dict[str, Any]]]] = {
    "image": (
        "a ResNet-8 on handwritten digits (scikit-learn's, 8x8 pixels)",
        {"data": "digits", "forget_class": "3", "rho": 0.25},
        {f"class 3 at ρ = {rho:g}": {"rho": rho} for rho in (0, 0.5, 1)},
    ),
    "text": (
        "a small Llama from nothing on 240 questions about 40 authors who do not exist",
        {"data": "miniature", "task": "text", "max_length": 96, "forget_rows": _FIRST},
        {"four authors": {}, "a question on each of 24 authors": {"forget_rows": _EACH}},
    ),
}
_ADAM = {"learning_rate": 3e-3, "lr_scheduler_type": "linear", "optim": "adamw_torch"}
TRAIN: dict[str, dict[str, Any]] = {
    "image": _ADAM | {"num_train_epochs": 2, "per_device_train_batch_size": 64},
    # until the loss is near 0.25: a model that knows all by heart has no gradients left
    "text": _ADAM
    | {"num_train_epochs": 14, "per_device_train_batch_size": 16, "max_grad_norm": 1.0},
}
# Half of what the gradients allow: an absolute demand becomes infeasible as the retain gradient
# shrinks.
_HALF = {"constraint": 0.5, "constraint_mode": "relative", "stopping": "off", "num_train_epochs": 5}
UNLEARN: dict[str, dict[str, Any]] = {
    "image": _HALF | {"learning_rate": 5e-3, "per_device_train_batch_size": 128},
    "text": _HALF | {"learning_rate": 2e-2, "per_device_train_batch_size": 24},
}
_SHOWN = 2  # answers of each set


class Scenario:
    """Bundled data, "image" or "text", the model to train on them, and problems to unlearn."""

    def __init__(self, kind: str, seed: int) -> None:
        self.kind, self._seed = kind, seed
        self.task = self._task()
        self.train = self.task.train_and_test()[0]

    def _task(self, **options: Any) -> Any:
        options = {**PROBLEMS[self.kind][1], "seed": self._seed, **options}
        return choose_task(settings_of("unlearn", options), silent())

    def new_model(self) -> tuple[Any, Any]:
        """A new model, and the data to train it on in its form."""
        if self.kind == "image":
            model = self.task.new_model("resnet8", self.train)
        else:
            words = (record.prompt + record.answer for record in self.train.records)
            tokens = self.task.tokenizer = new_tokenizer(words, 1024)
            longest = self.task.data.max_length
            model = new_language_model(tokens, hidden=128, layers=2, max_length=longest)
        return model, self.task.fitted(model, self.train, None)[0]

    def problem(self, model: Any, **options: Any) -> UnlearningData[Any]:
        """The problem, with other options than its own if so asked, in the model's form."""
        problem: UnlearningData[Any] = self._task(**options).problem()
        return self.task.fitted_problem(model, problem)  # type: ignore[no-any-return]

    def answers(self, models: Mapping[str, Any]) -> Any:
        """A table of the models' answers to some prompts of each set."""
        table = plain_table("", "question", *models)
        for name in ("forget", "retain"):
            texts = self.task.problem().sets()[name]
            texts = texts.select(range(len(texts) - _SHOWN, len(texts)))
            answers = [self.task.answers_of(model, texts) for model in models.values()]
            for record, *said in zip(texts.records, *answers, strict=True):
                table.add_row(name, str(record.fields["question"]), *said)
        return table


def demo(
    task: str = "image",
    output_dir: str = "runs/demo",
    seed: int = 42,
    overwrite: bool = False,
    *,
    console: Console,
) -> None:
    """Train, assess, unlearn with every method; print one table, save the picture and figures.

    Args:
        task: image (digits) or text (fictitious authors).
        output_dir: where the results go.
        seed: seed of everything.
        overwrite: replace an earlier demo in --output_dir.
        console: shows all of it.
    """
    if task not in PROBLEMS:
        raise HamuError(f"task {task!r} is unknown; choose image or text")
    folder, begin = RunFolder(output_dir, overwrite=overwrite), time.perf_counter()
    common: dict[str, Any] = {"output_dir": output_dir, "seed": seed}
    config = TrainConfig(**common, disable_tqdm=True, **TRAIN[task])
    scenario, settings = Scenario(task, seed), UNLEARN[task]
    console.print(f"1. Train {PROBLEMS[task][0]}.")
    set_seed(seed)
    if "OMP_NUM_THREADS" not in os.environ:  # several of so small a model wait for each other
        torch.set_num_threads(1)
    original, train = scenario.new_model()
    with ProgressBar(console, "train") as bar:
        train_original(original, train, config, [bar])

    console.print("2. How hard is it to forget? The more alike forget and retain data, the harder.")
    hardness = _assess(original, scenario, console)

    problem = scenario.problem(original)
    console.print(
        f"3. Forget {len(problem.forget)} records ({problem.forget_name}) with every method from "
        f"the same start: {settings['num_train_epochs']} epochs, SGD, learning rate "
        f"{settings['learning_rate']:g}."
    )
    results, models = {}, {}
    with task_bar(console) as bars:
        for name in bars.track(list(method_classes()), description="unlearn"):
            set_seed(seed)
            args = UnlearnConfig(**common, method=name, check_steps=0, **settings)
            models[name] = copy.deepcopy(original)
            results[name] = _unlearned(models[name], problem, scenario.task, args)
    seconds, path = time.perf_counter() - begin, folder.path / TRAJECTORIES
    summary = {"task": task, "seed": seed, "settings": settings, "hardness": hardness}
    with folder:
        # the summary first: it shows whose folder this is
        summary |= {"methods": results, "seconds": round(seconds, 1)}
        figures = folder.write_json(SUMMARY, summary)
        ways = {name: result["trajectory"] for name, result in results.items()}
        plot_trajectories(ways, path, f"Forgetting {problem.forget_name}: a marker per epoch")
    shown = Comparison(tuple(results.values()), None).shown
    console.print(Fitted(shown), crop=False)
    console.print(f"{CAPTION}\n")
    if task == "text":
        console.print(scenario.answers({"before": original, "after hamu-q": models["hamu-q"]}))
    console.print(f"The picture is in {path}, all figures in {figures} ({seconds:.0f} s).\n")
    console.print(NEXT[task])


def _assess(model: Any, scenario: Scenario, console: Console) -> dict[str, dict[str, Any]]:
    table = plain_table("forget", "κ", "cosθ", "κ2", "regime", right=(1, 2, 3))
    found = {}
    for name, options in PROBLEMS[scenario.kind][2].items():
        problem = scenario.problem(model, **options)
        hard = measure_hardness(model, problem.retain, problem.forget, collate=collate)
        found[name] = asdict(hard)
        figures = (f"{hard.kappa:+.4f}", f"{hard.cos:+.3f}", f"{hard.stop_threshold:.4f}")
        table.add_row(name, *figures, hard.regime)
    console.print(table)
    return found


def _unlearned(
    model: Any, problem: UnlearningData[Any], task: Any, args: UnlearnConfig
) -> dict[str, Any]:
    """The row of one method in a comparison, and its trajectory."""
    trainer = quiet_trainer(model, problem, args, [])
    trainer.train()
    if not trainer.predictions:
        trainer.evaluate()
    history = trainer.history()
    points = trajectory_of(history["trajectory"])
    evaluation = history | {"after": task.report(trainer.predictions, problem, None)}
    return model_figures(evaluation, "after") | {
        "method": args.method,
        "forget_gain": points[-1].forget,
        "retain_gain": points[-1].retain,
        "joint_gain": points[-1].joint,
        "steps": trainer.steps_taken,
        "ended": trainer.stop.kind,
        "failed": "",
        "trajectory": points,
    }
