"""Dry run of train and unlearn: parameters, steps, memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from hamu.core.objectives import build_objective
from hamu.errors import HamuError
from hamu.models.shapes import (
    KNOWN,
    estimate_memory,
    kept_for_backward,
    memory_of_weights,
    model_shape,
    shape_of,
)
from hamu.unlearning.jobs.kinds import TextTask, choose_task
from hamu.unlearning.jobs.options import DataOptions
from hamu.unlearning.jobs.settings import Settings
from hamu.unlearning.jobs.task import Task
from hamu.unlearning.trainer import TrainConfig, UnlearnConfig
from hamu.unlearning.trainer.config import checkpoints_activations


@dataclass(frozen=True)
class RunPlan:
    """Result of a dry run.

    Attributes:
        rows: names and sizes, in words.
        note: the assumptions of the estimate, and the ways to need less.
    """

    rows: tuple[tuple[str, str], ...]
    note: str


# parameters, those that are trained, memory in GB by purpose, and the note of a plan
_Size = tuple[int, int, Mapping[str, float], str]


def plan(settings: Settings, console: Console) -> RunPlan:
    """Parameters, steps and memory of a run; nothing is trained or written.

    Raises:
        HamuError: if the model's configuration or the number of records cannot be known.
    """
    has_data = settings.of(DataOptions).data is not None
    task = choose_task(settings, console) if has_data else TextTask(settings, console)
    args, model = task.args, str(task.run.model)
    unlearns = isinstance(args, UnlearnConfig)
    is_new = not unlearns and task.is_built_in(model)
    if task.run.model is None or (unlearns and task.is_built_in(model)):
        raise HamuError(
            "a dry run needs --model, a folder or hub:OWNER/NAME, whose configuration can be read"
        )
    task.classes_of = None if is_new else model
    if model not in KNOWN:  # which is no adapter, and needs no look at the hub
        task.settle_adapter()
    sets = _sets(task, unlearns)
    is_text = isinstance(task, TextTask)
    parameters, trained, memory, note = (
        _of_texts(task, sets, is_new) if is_text else _of_images(task, sets, unlearns)
    )
    per_step = args.per_device_train_batch_size * args.gradient_accumulation_steps
    epoch = math.ceil(len(next(iter(sets.values()))) / per_step)
    steps = args.max_steps if args.max_steps > 0 else math.ceil(epoch * args.num_train_epochs)
    rows = [
        ("parameters", f"{parameters:,}"),
        ("trained", f"{trained:,} ({trained / parameters:.2%})"),
    ]
    for name, records in sets.items():
        stated = " (stated)" if isinstance(records, range) else ""
        rows.append((f"{name} {task.noun}", f"{len(records):,}{stated}"))
    of_each = " of each side" if unlearns else ""
    rows.append((f"{task.noun}{of_each} in a step", f"{per_step:,}"))
    rows.append(("steps", f"{steps:,} ({epoch:,} an epoch)"))
    rows += [(f"memory: {name}", _written(gigabytes)) for name, gigabytes in memory.items()]
    rows.append(("memory: sum, on each device", _written(sum(memory.values()))))
    return RunPlan(tuple(rows), note)


def _written(gigabytes: float) -> str:
    return f"{gigabytes:.2f} GB" if gigabytes >= 1 else f"{1000 * gigabytes:.1f} MB"


def _of_texts(task: Any, sets: Mapping[str, Any], is_new: bool) -> _Size:
    """From the configuration alone; a new model is made, as its vocabulary follows from records."""
    args, run, longest = task.args, task.run, task.data.max_length
    if is_new:
        shape = shape_of(task.new_model(task.built_in, sets["training"]))
    else:
        shape = model_shape(
            run.model,
            task.adapter(),
            run.model_dtype,
            base_model=run.base_model,
            trust_remote_code=run.trust_remote_code,
        )
    length = min(longest, shape.longest or longest)
    memory = estimate_memory(
        shape,
        tokens=args.per_device_train_batch_size * length,
        **_copies(args),
        checkpointing=checkpoints_activations(args),
    )
    note = (
        f"Activations and logits are those of records of {length} tokens each, the longest "
        f"allowed. Smaller: --per_device_train_batch_size with --gradient_accumulation_steps, "
        f"--gradient_checkpointing, --max_length."
    )
    return shape.parameters, shape.trainable, memory, note


def _of_images(task: Any, sets: Mapping[str, Any], unlearns: bool) -> _Size:
    """From the model itself, new or loaded, and a forward pass of one image."""
    source, batch = task.run.model, task.args.per_device_train_batch_size
    first = next(iter(sets.values()))
    model = task.start_model(source) if unlearns else task.new_model(source, first)
    image = task.fitted(model, *sets.values(), None)[0][0]["pixel_values"]
    trained = [p for p in model.parameters() if p.requires_grad]
    frozen = [p for p in model.parameters() if not p.requires_grad]
    nbytes = (sum(p.nbytes for p in some) for some in (trained, frozen))
    memory = memory_of_weights(*nbytes, **_copies(task.args))
    kept = batch * kept_for_backward(model, {"pixel_values": image[None]})
    note = (
        f"Activations are those of {batch} images. Smaller: --per_device_train_batch_size with "
        f"--gradient_accumulation_steps."
    )
    counts = [sum(p.numel() for p in some) for some in (trained, frozen)]
    return sum(counts), counts[0], memory | {"activations": kept / 1e9}, note


def _copies(args: TrainConfig) -> dict[str, Any]:
    """Settings that decide how often the weights are held."""
    objectives = args.objectives().values() if isinstance(args, UnlearnConfig) else ()
    names = [name for name in objectives if name]
    return {
        "optimizer": str(args.optim),
        "sides": len(names) or 1,
        "keeps_original": any(build_objective(name).needs_original for name in names),
    }


def _sets(task: Task, unlearns: bool) -> dict[str, Any]:
    """The records that a run goes through, by set; a range, if only their number is stated.

    They are read where the data are here, or of the hub and nothing is stated.
    """
    data, without_forget = task.data, task.run.without_forget
    retain: Any
    forget: Any
    is_stated = data.expected_retain is not None and data.expected_forget is not None
    if is_stated and not task.is_here():
        retain, forget = range(data.expected_retain or 0), range(data.expected_forget or 0)
        everything = range(len(retain) + len(forget))
    elif unlearns or without_forget:
        problem = task.problem()
        retain, forget, everything = problem.retain, problem.forget, range(0)
    else:
        return {"training": task.train_and_test()[0]}
    if unlearns:
        return {"retain": retain, "forget": forget}
    return {"training": retain if without_forget else everything}
