"""The unlearning problems of the experiments: data, models and forget sets, as options of the commands."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

from hamu.cli import main as hamu

TRAIN_CIFAR = (
    "--model resnet20 --optim adamw_torch --learning_rate 2e-3 --lr_scheduler_type linear "
    "--per_device_train_batch_size 125 --bf16"
)
TRAIN_TOFU = (
    "--model tiny-llama --optim adamw_torch --learning_rate 2e-3 --lr_scheduler_type cosine --warmup_steps 200 "
    "--max_grad_norm 1.0 --num_train_epochs 12 --per_device_train_batch_size 16 "
    "--train_sampling_strategy group_by_length"
)
TRAIN_DIGITS = (
    "--model resnet8 --optim adamw_torch --learning_rate 3e-3 --lr_scheduler_type linear --num_train_epochs 12 "
    "--per_device_train_batch_size 64"
)


@dataclass(frozen=True)
class Problem:
    """One forget set of one data set.

    Attributes:
        name: in tables, and of folders.
        data: options that name the data.
        train: options that train a model on them.
        forget: options that name the forget set.
        original: folder of the model that all its problems share.
    """

    name: str
    data: tuple[str, ...]
    train: tuple[str, ...]
    forget: tuple[str, ...]
    original: str
    extra: tuple[str, ...] = field(default=())


def rows_file(work: Path, name: str, rows: list[int]) -> str:
    """A file of row numbers."""
    path = work / f"{name}.txt"
    path.write_text("\n".join(map(str, rows)) + "\n")
    return str(path)


def some_rows(work: Path, name: str, total: int, number: int) -> str:
    """A file of rows drawn at random."""
    return rows_file(
        work, f"{name}-rows-{number}", sorted(random.Random(7).sample(range(total), number))
    )


def digits(work: Path) -> list[Problem]:
    """The bundled digits."""

    def problem(name: str, *forget: str) -> Problem:
        return Problem(name, ("--data", "digits"), tuple(TRAIN_DIGITS.split()), forget, "digits")

    return [
        problem("digits, 20 rows", "--forget_rows", some_rows(work, "digits", 1438, 20)),
        problem("digits, 100 rows", "--forget_rows", some_rows(work, "digits", 1438, 100)),
        problem("digits, class 3", "--forget_class", "3"),
        problem("digits, class 3, ρ = 0.5", "--forget_class", "3", "--rho", "0.5"),
    ]


def cifar(work: Path, source: Path, epochs: int = 10) -> list[Problem]:
    """CIFAR-10, all of it; six epochs give a training accuracy of 90 %, ten one of 97 %."""
    data = ("--data", "train.parquet", "--test_data", "test.parquet", "--data_dir", str(source))

    def problem(name: str, *forget: str) -> Problem:
        train = (*TRAIN_CIFAR.split(), "--num_train_epochs", str(epochs))
        return Problem(name, data, train, forget, f"cifar-{epochs}-epochs")

    return [
        problem("CIFAR-10, 20 rows", "--forget_rows", rows_file(work, "cifar-20", list(range(20)))),
        problem(
            "CIFAR-10, 100 rows", "--forget_rows", rows_file(work, "cifar-100", list(range(100)))
        ),
        problem("CIFAR-10, class airplane", "--forget_class", "0"),
        problem("CIFAR-10, class airplane, ρ = 0.5", "--forget_class", "0", "--rho", "0.5"),
    ]


def tofu(work: Path, source: Path) -> list[Problem]:
    """TOFU on the tiny Llama."""
    data = (
        "--data",
        "full.json",
        "--test_data",
        "holdout10.json",
        "--data_dir",
        str(source),
        "--max_length",
        "256",
    )
    extra = ("--per_device_train_batch_size", "16", "--per_device_eval_batch_size", "32")
    ten = ("--forget_data", "forget10.json")
    single = ("--forget_rows", rows_file(work, "tofu-20", list(range(0, 4000, 200))))
    return [
        Problem("TOFU, forget10", data, tuple(TRAIN_TOFU.split()), ten, "tofu", extra),
        Problem("TOFU, 20 records", data, tuple(TRAIN_TOFU.split()), single, "tofu", extra),
    ]


def problems(
    work: Path, names: list[str], cifar_dir: str | None, tofu_dir: str | None
) -> list[Problem]:
    """The problems of some data sets."""
    work.mkdir(parents=True, exist_ok=True)
    found: list[Problem] = []
    for name in names:
        if name == "digits":
            found += digits(work)
        elif name == "cifar":
            found += cifar(work, Path(str(cifar_dir)))
        else:
            found += tofu(work, Path(str(tofu_dir)))
    return found


def run(*words: str) -> None:
    """Run a command of hamu; what is wrong ends the experiment."""
    if hamu(list(words)):
        raise SystemExit(f"hamu {' '.join(words)} failed")


def original(problem: Problem, work: Path) -> str:
    """The model that all problems of a data set start from; trained once."""
    folder = work / problem.original
    if not (folder / "model").exists():
        run("train", *_without_recipe_data(problem), "--output_dir", str(folder), "--overwrite")
    return str(folder / "model")


def retrained(problem: Problem, work: Path) -> str:
    """A model trained without the forget set; trained once."""
    folder = work / f"{slug(problem.name)}-retrained"
    if not (folder / "model").exists():
        tokenizer = (
            ("--tokenizer", original(problem, work)) if problem.original.startswith("tofu") else ()
        )
        run("train", *problem.train, *problem.data, *problem.forget, *tokenizer, "--without_forget",
            "--output_dir", str(folder), "--overwrite")  # fmt: skip
    return str(folder / "model")


def _without_recipe_data(problem: Problem) -> tuple[str, ...]:
    return (*problem.train, *problem.data)


def slug(name: str) -> str:
    """A folder's name from a problem's."""
    return (
        "".join(c if c.isalnum() else "-" for c in name.lower().replace("ρ", "rho"))
        .replace("--", "-")
        .strip("-")
    )
