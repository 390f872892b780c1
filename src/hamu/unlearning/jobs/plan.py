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


def plan(settings: Settings, console: Console) -> RunPlan:
    """Parameters, steps and memory of a run; nothing is trained or written."""
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
    sizes = _of_texts(task, sets, is_new) if isinstance(task, TextTask) else _of_images(task, sets)
    parameters, trained, memory, note = sizes
    per_step = args.per_device_train_batch_size * args.gradient_accumulation_steps
    epoch = math.ceil(len(next(iter(sets.values()))) / per_step)
    steps = args.max_steps if args.max_steps > 0 else math.ceil(epoch * args.num_train_epochs)
    rows = [
        ("parameters", f"{parameters:,}"),
        ("trained", f"{trained:,} ({trained / parameters:.2%})"),
        *(
            (f"{name} {task.noun}", f"{len(one):,}{' (stated)' * isinstance(one, range)}")
            for name, one in sets.items()
        ),
        (f"{task.noun}{' of each side' * unlearns} in a step", f"{per_step:,}"),
        ("steps", f"{steps:,} ({epoch:,} an epoch)"),
    ]
    for name, size in (memory | {"sum, on each device": sum(memory.values())}).items():
        written = f"{size:.2f} GB" if size >= 1 else f"{1000 * size:.1f} MB"
        rows.append((f"memory: {name}", written))
    smaller = "Smaller: --per_device_train_batch_size with --gradient_accumulation_steps"
    return RunPlan(tuple(rows), f"Activations are those of {note} {smaller}.")


def _of_texts(
    task: TextTask, sets: Mapping[str, Any], is_new: bool
) -> tuple[int, int, dict[str, float], str]:
    """From the configuration alone; a new model is made, as its vocabulary follows from records."""
    args, run, longest = task.args, task.run, task.data.max_length
    if is_new:
        shape = shape_of(task.new_model(task.built_in, sets["training"]))
    else:
        shape = model_shape(
            str(run.model),
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
        f"records of {length} tokens each, the longest allowed; --max_length and "
        f"--gradient_checkpointing need less."
    )
    return shape.parameters, shape.trainable, memory, note


def _of_images(task: Any, sets: Mapping[str, Any]) -> tuple[int, int, dict[str, float], str]:
    """From the model itself, new or loaded, and a forward pass of one image."""
    args, source, batch = task.args, task.run.model, task.args.per_device_train_batch_size
    is_loaded = isinstance(args, UnlearnConfig)
    first = next(iter(sets.values()))
    model = task.start_model(source) if is_loaded else task.new_model(source, first)
    image = task.fitted(model, *sets.values(), None)[0][0]["pixel_values"]
    every = list(model.parameters())
    trained = [p for p in every if p.requires_grad]
    nbytes = sum(p.nbytes for p in trained)
    memory = memory_of_weights(nbytes, sum(p.nbytes for p in every) - nbytes, **_copies(args))
    kept = batch * kept_for_backward(model, {"pixel_values": image[None]})
    counts = [sum(p.numel() for p in some) for some in (every, trained)]
    return counts[0], counts[1], memory | {"activations": kept / 1e9}, f"{batch} images."


def _copies(args: TrainConfig) -> dict[str, Any]:
    """Settings that decide how often the weights are held."""
    objectives = args.objectives().values() if isinstance(args, UnlearnConfig) else ()
    names = [name for name in objectives if name]
    return {
        "optimizer": str(args.optim),
        "sides": len(names) or 1,
        "keeps_original": any(build_objective(name).needs_original for name in names),
    }


def _sets(task: Any, unlearns: bool) -> dict[str, Any]:
    """The records that a run goes through, by set; a range, if only their number is stated."""
    stated, without_forget = task.stated(), task.run.without_forget
    if stated is None and not unlearns and not without_forget:
        return {"training": task.train_and_test()[0]}
    sets = task.problem().sets() if stated is None else stated
    if unlearns:
        return {"retain": sets["retain"], "forget": sets["forget"]}
    everything = range(sum(map(len, sets.values())))
    return {"training": sets["retain"] if without_forget else everything}
