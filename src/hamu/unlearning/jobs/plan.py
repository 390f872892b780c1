"""Dry run of train and unlearn: parameters, steps, memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from hamu.core.objectives import build_objective
from hamu.errors import HamuError
from hamu.models.language import AdapterSettings
from hamu.models.shapes import (
    KNOWN,
    ModelShape,
    estimate_memory,
    kept_for_backward,
    memory_of_weights,
    model_shape,
    shape_of,
)
from hamu.unlearning.jobs.image_task import ImageTask
from hamu.unlearning.jobs.options import DataOptions, RunOptions
from hamu.unlearning.jobs.problem import choose_task
from hamu.unlearning.jobs.task import Task
from hamu.unlearning.jobs.text_task import TextTask
from hamu.unlearning.trainer import TrainConfig, UnlearnConfig
from hamu.unlearning.trainer.config import checkpoints_activations


@dataclass(frozen=True)
class _Size:
    """The size of a model and of a run with it.

    Attributes:
        parameters, trained: how many.
        memory: in GB, by what it is for.
        note: what the estimate assumes, and how to need less.
    """

    parameters: int
    trained: int
    memory: Mapping[str, float]
    note: str


@dataclass(frozen=True)
class RunPlan:
    """Result of a dry run.

    Attributes:
        rows: names and sizes, in words.
        note: what the estimate assumes, and how to need less.
    """

    rows: tuple[tuple[str, str], ...]
    note: str


def plan(
    data: DataOptions,
    run: RunOptions,
    args: TrainConfig,
    given: Mapping[str, Any],
    console: Console,
) -> RunPlan:
    """Parameters, steps and memory of a run; nothing is trained or written.

    Raises:
        HamuError: if the model's configuration or the number of records cannot be known.
    """
    is_unlearning = isinstance(args, UnlearnConfig)
    task = TextTask(data, run, console) if data.data is None else choose_task(data, run, console)
    is_new = not is_unlearning and task.is_built_in(str(run.model))
    if run.model is None or (is_unlearning and task.is_built_in(run.model)):
        raise HamuError(
            "a dry run needs --model, a folder or hub:OWNER/NAME, whose configuration can be read"
        )
    task.classes_of = None if is_new else run.model
    task.fill_in(args, given)
    if run.model not in KNOWN:  # which is no adapter, and needs no look at the hub
        task.settle_adapter(given)
    sets = _sets(task, is_unlearning)
    size = (
        _of_images(task, sets, args)
        if isinstance(task, ImageTask)
        else _of_texts(task, sets, args, is_new)
    )
    per_step = args.per_device_train_batch_size * args.gradient_accumulation_steps
    epoch = math.ceil(len(next(iter(sets.values()))) / per_step)
    steps = args.max_steps if args.max_steps > 0 else math.ceil(epoch * args.num_train_epochs)
    rows = [
        ("parameters", f"{size.parameters:,}"),
        ("trained", f"{size.trained:,} ({size.trained / size.parameters:.2%})"),
    ]
    for name, records in sets.items():
        stated = " (stated)" if isinstance(records, range) else ""
        rows.append((f"{name} {task.noun}", f"{len(records):,}{stated}"))
    of_each = " of each side" if is_unlearning else ""
    rows.append((f"{task.noun}{of_each} in a step", f"{per_step:,}"))
    rows.append(("steps", f"{steps:,} ({epoch:,} an epoch)"))
    rows += [(f"memory: {name}", _written(gigabytes)) for name, gigabytes in size.memory.items()]
    rows.append(("memory: sum, on each device", _written(sum(size.memory.values()))))
    return RunPlan(tuple(rows), size.note)


def _written(gigabytes: float) -> str:
    return f"{gigabytes:.2f} GB" if gigabytes >= 1 else f"{1000 * gigabytes:.1f} MB"


def _of_texts(task: Any, sets: Mapping[str, Any], args: TrainConfig, is_new: bool) -> _Size:
    """From the configuration alone; a new model is made, as its vocabulary follows from the records."""
    shape = (
        shape_of(task.new_model(task.built_in, sets["training"]))
        if is_new
        else _shape(task.run_options)
    )
    longest = task.data_options.max_length
    length = min(longest, shape.longest or longest)
    memory = estimate_memory(
        shape,
        tokens=args.per_device_train_batch_size * length,
        **_settings(args),
        checkpointing=checkpoints_activations(args),
    )
    note = (
        f"Activations and logits are those of records of {length} tokens each, the longest allowed. Smaller: "
        f"--per_device_train_batch_size with --gradient_accumulation_steps, --gradient_checkpointing, --max_length."
    )
    return _Size(shape.parameters, shape.trainable, memory, note)


def _shape(run: RunOptions) -> ModelShape:
    adapter = (
        AdapterSettings(run.lora_rank, run.lora_alpha, run.lora_dropout, run.lora_targets)
        if run.lora
        else None
    )
    return model_shape(
        str(run.model),
        adapter,
        run.model_dtype,
        base_model=run.base_model,
        trust_remote_code=run.trust_remote_code,
    )


def _of_images(task: Any, sets: Mapping[str, Any], args: TrainConfig) -> _Size:
    """From the model itself, new or loaded, and a forward pass of one image."""
    source, unlearns = task.run_options.model, isinstance(args, UnlearnConfig)
    model = (
        task.start_model(source) if unlearns else task.new_model(source, next(iter(sets.values())))
    )
    image = task.fitted(model, *sets.values(), None)[0][0]["pixel_values"]
    trained = [p for p in model.parameters() if p.requires_grad]
    frozen = [p for p in model.parameters() if not p.requires_grad]
    memory = memory_of_weights(
        sum(p.nbytes for p in trained), sum(p.nbytes for p in frozen), **_settings(args)
    )
    kept = args.per_device_train_batch_size * kept_for_backward(
        model, {"pixel_values": image[None]}
    )
    note = (
        f"Activations are those of {args.per_device_train_batch_size} images. Smaller: "
        f"--per_device_train_batch_size with --gradient_accumulation_steps."
    )
    counts = [sum(p.numel() for p in some) for some in (trained, frozen)]
    return _Size(sum(counts), counts[0], memory | {"activations": kept / 1e9}, note)


def _settings(args: TrainConfig) -> dict[str, Any]:
    """Settings that decide how often the weights are held."""
    names = (
        [name for name in args.objectives().values() if name]
        if isinstance(args, UnlearnConfig)
        else []
    )
    keeps_original = any(build_objective(name).needs_original for name in names)
    return {
        "optimizer": str(args.optim),
        "sides": len(names) or 1,
        "keeps_original": keeps_original,
    }


def _sets(task: Task[Any, Any, Any], is_unlearning: bool) -> dict[str, Any]:
    """The records that a run goes through, by set; a range, if it is only stated how many they are.

    They are read where the data are here, or of the hub and nothing is stated.
    """
    data = task.data_options
    sources = task.data_sources()
    here = bool(sources) and all(name == task.bundled or Path(name).exists() for name in sources)
    retain: Any
    forget: Any
    if not here and data.expected_retain is not None and data.expected_forget is not None:
        retain, forget = range(data.expected_retain), range(data.expected_forget)
        everything: Any = range(data.expected_retain + data.expected_forget)
    elif is_unlearning or task.run_options.without_forget:
        problem = task.problem()
        retain, forget, everything = problem.retain, problem.forget, None
    else:
        return {"training": task.train_and_test()[0]}
    if is_unlearning:
        return {"retain": retain, "forget": forget}
    return {"training": retain if task.run_options.without_forget else everything}
