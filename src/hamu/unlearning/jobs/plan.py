"""Dry run of train and unlearn: parameters, steps, memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from hamu.core.objectives import build_objective
from hamu.errors import HamuError
from hamu.models import shapes
from hamu.unlearning.jobs.options import DataOptions
from hamu.unlearning.jobs.settings import Settings
from hamu.unlearning.jobs.tasks import Task, TextTask, choose_task
from hamu.unlearning.trainer import UnlearnConfig
from hamu.unlearning.trainer.config import checkpoints_activations


@dataclass(frozen=True)
class RunPlan:
    """Result of a dry run."""

    rows: tuple[tuple[str, str], ...]  # names and sizes, in words
    note: str  # the assumptions of the estimate, and the ways to need less


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
    if model not in shapes.KNOWN:  # which is no adapter, and needs no look at the hub
        task.settle_adapter()
    sets = _sets(task)
    sizes = _of_texts(task, sets, is_new) if isinstance(task, TextTask) else _of_images(task, sets)
    parameters, trained, memory, note = sizes
    per_step = args.per_device_train_batch_size * args.gradient_accumulation_steps
    epoch = math.ceil(len(next(iter(sets.values()))) / per_step)
    steps = args.max_steps if args.max_steps > 0 else math.ceil(epoch * args.num_train_epochs)
    rows = [("parameters", f"{parameters:,}")]
    rows.append(("trained", f"{trained:,} ({trained / parameters:.2%})"))
    for name, one in sets.items():
        stated = " (stated)" if isinstance(one, range) else ""
        rows.append((f"{name} {task.noun}", f"{len(one):,}{stated}"))
    rows.append((f"{task.noun}{' of each side' * unlearns} in a step", f"{per_step:,}"))
    rows.append(("steps", f"{steps:,} ({epoch:,} an epoch)"))
    for name, size in (memory | {"sum, on each device": sum(memory.values())}).items():
        written = f"{size:.2f} GB" if size >= 1 else f"{1000 * size:.1f} MB"
        rows.append((f"memory: {name}", written))
    smaller = "Smaller: --per_device_train_batch_size with --gradient_accumulation_steps"
    return RunPlan(tuple(rows), f"Activations are those of {note} {smaller}.")


def _sets(task: Task) -> dict[str, Any]:
    """The records that a run goes through, by set.

    They are a range where their numbers are stated and the data are not here.
    """
    counts = {"retain": task.data.expected_retain, "forget": task.data.expected_forget}
    stated = {name: range(count) for name, count in counts.items() if count is not None}
    sources = task.data_sources()
    is_here = sources and all(s == task.bundled or Path(s).exists() for s in sources)
    unlearns, without_forget = isinstance(task.args, UnlearnConfig), task.run.without_forget
    sets: dict[str, Any] = stated
    if is_here or len(stated) < len(counts):
        if not unlearns and not without_forget:
            return {"training": task.train_and_test()[0]}
        sets = task.problem().sets()
    if unlearns:
        return {"retain": sets["retain"], "forget": sets["forget"]}
    everything = range(sum(map(len, sets.values())))
    return {"training": sets["retain"] if without_forget else everything}


_Sizes = tuple[int, int, dict[str, float], str]  # parameters, trained ones, GB by part, a note


def _of_texts(task: TextTask, sets: dict[str, Any], is_new: bool) -> _Sizes:
    """From the configuration alone; a new model is made, as its vocabulary follows from records."""
    args, run, longest = task.args, task.run, task.data.max_length
    if is_new:
        shape = shapes.shape_of(task.new_model(task.built_in, sets["training"]))
    else:
        shape = shapes.model_shape(
            str(run.model),
            task.adapter(),
            run.model_dtype,
            base_model=run.base_model,
            trust_remote_code=run.trust_remote_code,
        )
    length = min(longest, shape.longest or longest)
    memory = shapes.estimate_memory(
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


def _of_images(task: Any, sets: dict[str, Any]) -> _Sizes:
    """From the model itself, new or loaded, and a forward pass of one image."""
    args, source, batch = task.args, task.run.model, task.args.per_device_train_batch_size
    is_loaded = isinstance(args, UnlearnConfig)
    first = next(iter(sets.values()))
    model = task.start_model(source) if is_loaded else task.new_model(source, first)
    image = task.fitted(model, *sets.values(), None)[0][0]["pixel_values"]
    every = list(model.parameters())
    trained = [p for p in every if p.requires_grad]
    nbytes = sum(p.nbytes for p in trained)
    frozen = sum(p.nbytes for p in every) - nbytes
    memory = shapes.memory_of_weights(nbytes, frozen, **_copies(args))
    kept = batch * shapes.kept_for_backward(model, {"pixel_values": image[None]})
    counts = [sum(p.numel() for p in some) for some in (every, trained)]
    return counts[0], counts[1], memory | {"activations": kept / 1e9}, f"{batch} images."


def _copies(args: Any) -> dict[str, Any]:
    """Settings that decide how often the weights are held."""
    objectives = args.objectives().values() if isinstance(args, UnlearnConfig) else ()
    names = [name for name in objectives if name]
    return {
        "optimizer": str(args.optim),
        "sides": len(names) or 1,
        "keeps_original": any(build_objective(name).needs_original for name in names),
    }
