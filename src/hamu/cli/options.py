"""From flags, a recipe and a YAML file to dataclasses: flags win over --config, which wins over --recipe."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn

from transformers import HfArgumentParser, IntervalStrategy, SchedulerType, TrainingArguments
from transformers.trainer_utils import SaveStrategy
from transformers.training_args import OptimizerNames

from hamu.cli.config_files import read_config, read_files, recipes, settings_of
from hamu.cli.refused import check_has_a_place, has_a_place
from hamu.data.text_readers import QUESTION_TEMPLATE
from hamu.errors import HamuError, first_line
from hamu.record.inputs import INPUTS, read_inputs
from hamu.record.settings import recorded
from hamu.training import TrainConfig, UnlearnConfig
from hamu.training.config import own_options

_READS = {"train": "training set", "unlearn": "forget set"}  # by which the runs of a command are known
_NOT_TAKEN = {  # by commands whose dataclasses have it nevertheless
    "unlearn": {"without_forget"}, "assess": {"without_forget", "dry_run", "auto"},
    "compare": {"without_forget", "dry_run", "auto", "method"}, "evaluate": {"without_forget"},
}  # fmt: skip
OF_AN_ADAPTER = ("lora_rank", "lora_alpha", "lora_dropout", "lora_targets")
_NOT_OF_A_RUN = ("resume", "overwrite", "trust_remote_code")  # how a command was called
# what a run may be resumed with although it was begun with something else: none of it changes a result
_MAY_CHANGE = {
    "resume", "output_dir", "trust_remote_code", "shard", "pairing", "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "per_device_eval_batch_size", "save_strategy", "save_steps", "save_total_limit", "keep", "report_to",
    "dataloader_num_workers",
}  # fmt: skip
_CHOICES: dict[str, type[Enum]] = {
    "eval_strategy": IntervalStrategy, "logging_strategy": IntervalStrategy, "save_strategy": SaveStrategy,
    "lr_scheduler_type": SchedulerType, "optim": OptimizerNames,
}  # fmt: skip
# TrainingArguments that matter here, shown by --help; the rest is behind --help-all.
_SHOWN = {
    "num_train_epochs", "max_steps", "learning_rate", "optim", "lr_scheduler_type", "warmup_steps", "weight_decay",
    "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps", "max_grad_norm",
    "seed", "bf16", "fp16", "use_cpu", "eval_strategy", "eval_steps", "logging_steps", "save_strategy", "save_steps",
    "save_total_limit", "load_best_model_at_end", "metric_for_best_model", "report_to", "channels_last",
    "gradient_checkpointing",
}  # fmt: skip


@dataclass
class DataOptions:
    """Where the data are, and which of them to forget."""

    data: str | None = field(
        default=None,
        metadata={
            "help": "Training data: a file (images: .parquet, .npz; text: .jsonl, .json, .csv, .parquet), a folder, "
            "hub:OWNER/NAME, or bundled: digits (images), miniature (text)."
        },
    )
    task: str = field(
        default="auto",
        metadata={
            "help": "image, text, or auto: text if --data is JSON, CSV, parquet with columns of text, or a folder with "
            "such a file as train, or if --prompt_column or --answer_column is given; image otherwise."
        },
    )
    test_data: str | None = field(
        default=None, metadata={"help": "Data never trained on; by default the test split of --data, if it has one."}
    )
    data_dir: str | None = field(default=None, metadata={"help": "Folder that the paths of the data are relative to."})
    forget_class: str | None = field(default=None, metadata={"help": "Forget this class (name or number)."})
    rho: float = field(
        default=0.0,
        metadata={
            "help": "Similarity mixing ratio of --forget_class: this share of the forget set is drawn from "
            "everything else (paper, App. E.1)."
        },
    )
    forget_rows: str | None = field(
        default=None, metadata={"help": "Forget these rows of --data: 3,17,25 or a file of row numbers."}
    )
    forget_data: str | None = field(default=None, metadata={"help": "Forget the records of this second data set."})
    forget_filter: str | None = field(
        default=None,
        metadata={"help": "Text: forget the records with COLUMN=VALUE, COLUMN!=VALUE or COLUMN~REGEX."},
    )
    forget_seed: int = field(default=42, metadata={"help": "Seed of the draw of --forget_class."})
    image_size: int | None = field(default=None, metadata={"help": "Resize images to this many pixels squared."})
    num_channels: int | None = field(default=None, metadata={"help": "Convert images to 1 (grey) or 3 (RGB) channels."})
    image_column: str | None = field(default=None, metadata={"help": "Name of the image column, if not a usual one."})
    label_column: str | None = field(default=None, metadata={"help": "Name of the label column, if not a usual one."})
    prompt_column: str | None = field(default=None, metadata={"help": "Text: name of the column of questions."})
    answer_column: str | None = field(default=None, metadata={"help": "Text: name of the column of answers."})
    question_template: str = field(
        default=QUESTION_TEMPLATE, metadata={"help": "Text: how a question becomes a prompt; {question} stands for it."}
    )
    answer_prefix: str = field(default=" ", metadata={"help": "Text: what stands between a question and its answer."})
    loss_on: str = field(default="answer", metadata={"help": "Text: what the loss is taken of: answer, or all."})
    expected_retain: int | None = field(
        default=None, metadata={"help": "Text: how many records stay, for a --dry_run without the data."}
    )
    expected_forget: int | None = field(default=None, metadata={"help": "Text: how many are forgotten, likewise."})
    max_length: int = field(default=512, metadata={"help": "Text: cut longer records, in tokens."})


@dataclass
class RunOptions:
    """The model and the output."""

    model: str | None = field(
        default=None,
        metadata={
            "help": "A folder written by `hamu train` or save_pretrained (a PEFT adapter too), or hub:OWNER/NAME; for "
            "train also resnet20 or tiny-llama, which are new."
        },
    )
    trust_remote_code: bool = field(
        default=False,
        metadata={"help": "Run the code that comes with a model, which can do anything; taken as a flag only."},
    )
    base_model: str | None = field(
        default=None, metadata={"help": "Text: where an adapter's base model is, if not where the adapter says."}
    )
    tokenizer: str | None = field(
        default=None,
        metadata={
            "help": "Text: use the tokenizer of this model: for a tiny-llama, so that their losses compare; for saved "
            "models, in place of their own."
        },
    )
    model_dtype: str = field(
        default="float32", metadata={"help": "Text: load the model in float32, bfloat16, float16, or auto (its own)."}
    )
    lora: bool = field(
        default=False, metadata={"help": "Text: train a LoRA adapter alone: that of --model, or a new one."}
    )
    lora_rank: int = field(default=8, metadata={"help": "Rank of the new adapter."})
    lora_alpha: float = field(default=16.0, metadata={"help": "Scale of the new adapter, over its rank."})
    lora_dropout: float = field(default=0.0, metadata={"help": "Dropout of the new adapter."})
    lora_targets: str = field(
        default="", metadata={"help": "Layers to adapt, such as q_proj,v_proj; by default what PEFT knows."}
    )
    merge: bool = field(default=False, metadata={"help": "Save the adapter merged into its model too, in merged/."})
    dry_run: bool = field(
        default=False,
        metadata={"help": "Text: only resolve the settings, count parameters and steps, estimate memory."},
    )
    retain_model: str | None = field(
        default=None, metadata={"help": "A model retrained without the forget set, to compare with."}
    )
    without_forget: bool = field(default=False, metadata={"help": "Train on the retain set alone: the retain model."})
    overwrite: bool = field(default=False, metadata={"help": "Replace an earlier run in --output_dir."})


@dataclass
class ResumeOptions:
    """Going on with a run."""

    resume: bool = field(
        default=False,
        metadata={"help": "Go on with the run in --output_dir, by its own settings, from its newest checkpoint."},
    )


@dataclass
class EvaluateOptions:
    """What `hamu evaluate` measures of a language model beyond its losses."""

    generate: int = field(
        default=200, metadata={"help": "Text: let the model answer so many prompts of each set, greedily; 0 for none."}
    )
    original_model: str | None = field(
        default=None, metadata={"help": "Text: the model before unlearning, whose answers are shown beside."}
    )
    forget_perturbed: str | None = field(
        default=None,
        metadata={"help": "TOFU: forget records with paraphrased_answer and perturbed_answer, for the truth ratio."},
    )
    retain_perturbed: str | None = field(default=None, metadata={"help": "TOFU: retain records with the same."})
    real_authors: str | None = field(default=None, metadata={"help": "TOFU: real authors, with perturbed_answer."})
    world_facts: str | None = field(default=None, metadata={"help": "TOFU: world facts, with perturbed_answer."})


@dataclass
class AssessOptions:
    """What `hamu assess` looks at."""

    assess_batches: int | None = field(
        default=None, metadata={"help": "Look at so many random batches of each side; by default at all records."}
    )
    curvature_samples: int | None = field(
        default=None,
        metadata={"help": "Retain records for the curvature, 0 for none; by default as many as one epoch pays for."},
    )
    conflicts: bool = field(default=True, metadata={"help": "Look for the records that are in conflict."})
    bootstrap_memory: float = field(
        default=2.0, metadata={"help": "GB that may be taken to keep parts of the gradients, for the intervals."}
    )


@dataclass
class CompareOptions:
    """What `hamu compare` combines."""

    methods: list[str] | None = field(default=None, metadata={"help": "Methods; by default all that there are."})
    constraints: list[float] | None = field(
        default=None, metadata={"help": "Values of --constraint, for methods that have one; by default that one alone."}
    )
    learning_rates: list[float] | None = field(
        default=None, metadata={"help": "Values of --learning_rate; by default that one alone."}
    )
    seeds: list[int] | None = field(default=None, metadata={"help": "Values of --seed; by default that one alone."})
    jobs: int = field(default=1, metadata={"help": "Run so many at a time, each in a process of its own."})


class Parser(HfArgumentParser):
    """An argument parser whose mistakes are HamuErrors, and whose texts can be written to any file."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of leaving the program."""
        raise HamuError(f"{message}; {self.prog} --help lists the options")

    def format_help(self) -> str:
        """The layout of all commands: what is named first, then every option."""
        named = [action for action in self._actions if not action.option_strings]
        usage = " ".join(["usage:", self.prog, *(f"{_called(action)} ..." if action.nargs else _called(action)
                                                 for action in named)])  # fmt: skip
        actions = [action for action in self._actions if action.dest != "help"]
        about = (self.description or "").strip()
        return "\n".join([f"{usage} [--flag value ...]\n\n{about}\n", *map(_described, actions)]) + "\n"

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Check the texts too, wherever they come from."""
        found, rest = super().parse_known_args(args, namespace)
        for name, value in vars(found).items():
            if isinstance(value, str) and any(c == "\0" or "\ud800" <= c <= "\udfff" for c in value):
                raise HamuError(f"{name} {value!r} has a character that no name or text may have; leave it out")
        return found, rest

    @staticmethod
    def _parse_dataclass_field(parser: argparse.ArgumentParser, field: dataclasses.Field[Any]) -> None:
        if has_a_place(field.name):
            HfArgumentParser._parse_dataclass_field(parser, field)


def parse(command: str, description: str, argv: list[str], *types: type) -> tuple[Any, ...]:
    """Read the options of one command.

    Args:
        command: its name, which is also the section of a YAML file that is for it alone.
        description: one line for --help.
        argv: the flags.
        types: the dataclasses to fill.

    Returns:
        One instance of each type, and the resolved settings that differ from the defaults.

    Raises:
        HamuError: if a flag or key is unknown, or a value does not fit.
    """
    files = Parser((), prog=f"hamu {command}", add_help=False, allow_abbrev=False)
    files.add_argument("--recipe")
    files.add_argument("--config")
    named, rest = files.parse_known_args(argv)
    resumed = _resumed(command, rest) if ResumeOptions in types else None
    parser = _parser(command, description, types)
    if "--help-all" in rest or "--help" in rest or "-h" in rest:
        _print_help(command, parser, everything="--help-all" in rest)
    known = {action.dest for action in parser._actions}
    for word in rest:
        if word.startswith("--"):
            check_has_a_place(word[2:].partition("=")[0].replace("-", "_"), "the command")
    settings: dict[str, Any] = {}
    for name, text in read_files(named) if resumed is None else [resumed]:
        settings |= settings_of(name, text, command, known, _every_key())
    settings = {key: value for key, value in settings.items() if value is not None}
    listed = _listed(parser, settings)
    for action in parser._actions:
        action.default = settings.get(action.dest, action.default)
        action.required = False
    values = vars(parser.parse_args([*listed, *rest]))
    was = {} if resumed is None else vars(parser.parse_args(listed))
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    given = vars(parser.parse_args(rest))
    if resumed is not None:
        _check_same(resumed[0], {key: was[key] for key in settings}, given, named)
    resolved = {key: values[key] for key in (*settings, *given) if key not in _NOT_OF_A_RUN}
    _check_choices(values)
    built = []
    for cls in types:
        names = {f.name for f in dataclasses.fields(cls) if f.init}
        try:
            built.append(cls(**{key: value for key, value in values.items() if key in names}))
        except HamuError:
            raise
        except (ValueError, TypeError, ImportError, RuntimeError, KeyError) as error:
            raise HamuError(f"the settings do not fit together: {first_line(error)}") from error
    return (*built, resolved)


def _check_choices(values: dict[str, Any]) -> None:
    """What transformers would refuse without the name of the option."""
    for name, kind in _CHOICES.items():
        choices = [str(one.value) for one in kind]
        value = getattr(values.get(name), "value", values.get(name))
        if value is not None and value not in choices:
            close = difflib.get_close_matches(str(value), choices, 1)
            hint = f"did you mean {close[0]}?" if close else f"choose one of {', '.join(choices)}"
            raise HamuError(f"{name} {value!r} is unknown; {hint}")


def _listed(parser: Parser, settings: dict[str, Any]) -> list[str]:
    """The settings that take several values, as flags; a file has them as lists or with commas."""
    actions = [action for action in parser._actions if action.nargs == "+" and action.dest in settings]
    return [word for action in actions for word in (f"--{action.dest}", *settings[action.dest].split(","))]


def _resumed(command: str, rest: list[str]) -> tuple[str, str] | None:
    """Name and content of the settings of the run that is to go on, None for a new run."""
    asked = Parser((ResumeOptions,), prog=f"hamu {command}", add_help=False, allow_abbrev=False)
    asked.add_argument("--output_dir", "--output-dir", default=f"runs/{command}")
    found = asked.parse_known_args(rest)[0]
    if not found.resume:
        return None
    path = Path(os.path.expanduser(found.output_dir)) / "config.yaml"
    if not path.is_file():
        raise HamuError(f"there is no run to resume in {path.parent}: it has no {path.name}; start it without --resume")
    for other, of_it in _READS.items():
        if other != command and (path.parent / INPUTS).is_file() and of_it in read_inputs(path.parent):
            raise HamuError(f"{path.parent} holds a run of hamu {other}; resume it by that")
    return str(path), read_config(path)


def _check_same(name: str, settings: dict[str, Any], given: dict[str, Any], files: argparse.Namespace) -> None:
    if files.recipe or files.config:
        raise HamuError(f"a run is resumed by its own settings, {name}; leave out --recipe and --config")
    for key, value in given.items():
        if key in _MAY_CHANGE or (key in settings and settings[key] == value):
            continue
        if key in settings:
            raise HamuError(
                f"the run of {name} has {key} {settings[key]}; leave out --{key} {value}, or start a new run"
            )
        raise HamuError(f"the run of {name} was started without --{key}; leave out --{key} {value}, or start a new run")


def recorded_settings(data: DataOptions, run: RunOptions, args: UnlearnConfig, given: Iterable[str]) -> dict[str, Any]:
    """The settings of a run in the form that its record holds."""
    names = {*own_options(type(args)), *_SHOWN}
    own = {**vars(data), **vars(run), **{name: getattr(args, name) for name in names}}
    if not run.lora:
        own |= dict.fromkeys(OF_AN_ADAPTER)  # they had no effect
    return recorded(own, {name: getattr(args, name) for name in given if name not in own})


def every_option(config: Path) -> dict[str, Any]:
    """The value of every option of `hamu unlearn` by a config.yaml, given or not: what makes two runs the same.

    Raises:
        HamuError: as `parse`.
    """
    data, run, args, _ = parse("unlearn", "", ["--config", str(config)], DataOptions, RunOptions, UnlearnConfig)
    return {**vars(data), **vars(run), **{f.name: getattr(args, f.name) for f in dataclasses.fields(args)}}


def _parser(command: str, description: str, types: tuple[type, ...]) -> Parser:
    parser = Parser(prog=f"hamu {command}", description=description, allow_abbrev=False, add_help=False)
    for cls in types:
        parser._add_dataclass_arguments(cls)
    for action in parser._actions:
        if action.dest == "output_dir":
            action.default = f"runs/{command}"
    return parser


def _called(action: argparse.Action) -> str:
    """What is named without a flag."""
    return action.metavar if isinstance(action.metavar, str) else action.dest


def _described(action: argparse.Action) -> str:
    """An option, its default, and below what it is."""
    name = f"--{action.dest}" if action.option_strings else _called(action)
    value = f" {action.metavar}" if action.option_strings and isinstance(action.metavar, str) else ""
    shown = str(action.default).replace("\n", "\\n")
    default = "" if action.default in (None, argparse.SUPPRESS, False, []) else f" [{shown}]"
    return f"  {name}{value}{default}\n        {' '.join((action.help or '').split())}"


def _print_help(command: str, parser: Parser, everything: bool) -> NoReturn:
    inherited = {f.name for f in dataclasses.fields(TrainingArguments)} - _SHOWN - {"output_dir"}
    print(f"usage: {parser.prog} [--recipe NAME] [--config FILE.yaml] [--flag value ...]\n\n{parser.description}\n")
    print("  --recipe NAME\n        Start from a bundled recipe: " + ", ".join(recipes()) + ".")
    print("  --config FILE.yaml\n        Read settings from a file; flags win over it.")
    for action in parser._actions:
        flag = max(action.option_strings, key=len)
        hidden = action.dest in inherited and not everything
        if not (hidden or flag.startswith("--no_") or action.dest in _NOT_TAKEN.get(command, ())):
            print(_described(action))
    if not everything:
        print("\n--help-all shows the other training arguments too.")
    sys.exit(0)


def _every_key() -> dict[str, set[str]]:
    """The settings of each command; what a command has of its own stands in its own section alone."""
    own: dict[str, tuple[type, ...]] = {
        "train": (TrainConfig,),
        "assess": (AssessOptions, UnlearnConfig),
        "unlearn": (UnlearnConfig,),
        "compare": (CompareOptions, UnlearnConfig),
        "evaluate": (EvaluateOptions, TrainConfig),
    }
    shared = (DataOptions, RunOptions)
    keys = {name: {f.name for cls in (*shared, *types) for f in dataclasses.fields(cls)} for name, types in own.items()}
    return {name: found - _NOT_TAKEN.get(name, set()) for name, found in keys.items()}
