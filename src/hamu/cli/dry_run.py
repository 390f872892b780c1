"""`--dry_run`: what a run on text would be, without weights: parameters, steps, memory."""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path

from rich.console import Console

from hamu.cli.options import DataOptions, RunOptions
from hamu.cli.tables import plain_table
from hamu.cli.tasks import Task, choose_task
from hamu.cli.text_task import TextTask
from hamu.errors import HamuError
from hamu.models.language import TINY, AdapterSettings
from hamu.models.shapes import KNOWN, estimate_memory, model_shape
from hamu.objectives import build_objective
from hamu.training import TrainConfig, UnlearnConfig
from hamu.training.config import checkpoints_activations


def show_plan(console: Console, data: DataOptions, run: RunOptions, args: TrainConfig, given: Collection[str]) -> int:
    """Resolve the settings as the run would and print what they come to; no weights are loaded, nothing is written.

    Args:
        console: where to.
        data, run, args: the options of the run.
        given: the names of those that were given.

    Raises:
        HamuError: if the model's configuration or the number of records cannot be known.
    """
    if run.model is None or run.model == TINY:
        raise HamuError("a dry run needs --model, a folder or hub:OWNER/NAME, whose configuration can be read")
    task = TextTask(data, run, console) if data.data is None else choose_task(data, run, console)
    task.fill_in(args, given)
    if run.model not in KNOWN:  # which is no adapter, and needs no look at the hub
        task.settle_adapter(given)
    adapter = AdapterSettings(run.lora_rank, run.lora_alpha, run.lora_dropout, run.lora_targets) if run.lora else None
    shape = model_shape(
        run.model,
        adapter,
        run.model_dtype,
        base_model=run.base_model,
        trust_remote_code=run.trust_remote_code,
    )
    length = min(data.max_length, shape.longest or data.max_length)
    is_unlearning = isinstance(args, UnlearnConfig)
    records = _records(task, is_unlearning)
    per_step = args.per_device_train_batch_size * args.gradient_accumulation_steps
    epoch = math.ceil(next(iter(records.values()))[0] / per_step)
    steps = args.max_steps if args.max_steps > 0 else math.ceil(epoch * args.num_train_epochs)
    sides, keeps_original = 1, False
    if isinstance(args, UnlearnConfig):
        objectives = [build_objective(name) for name in args.objectives().values() if name is not None]
        sides = len(objectives)
        keeps_original = any(objective.needs_original for objective in objectives)
    memory = estimate_memory(
        shape,
        tokens=args.per_device_train_batch_size * length,
        optimizer=str(args.optim),
        sides=sides,
        keeps_original=keeps_original,
        checkpointing=checkpoints_activations(args),
    )
    table = plain_table("what", "how much", right=(1,))
    table.add_row("parameters", f"{shape.parameters:,}")
    table.add_row("trained", f"{shape.trainable:,} ({shape.trainable / shape.parameters:.2%})")
    for name, (count, known) in records.items():
        table.add_row(f"{name} records", f"{count:,}{known}")
    table.add_row("records of each side in a step" if is_unlearning else "records in a step", f"{per_step:,}")
    table.add_row("steps", f"{steps:,} ({epoch:,} an epoch)")
    for name, size in memory.items():
        table.add_row(f"memory: {name}", f"{size:.2f} GB")
    table.add_row("memory: sum, on each device", f"{sum(memory.values()):.1f} GB")
    console.print(table)
    console.print(
        f"Activations and logits are those of records of {length} tokens each, the longest allowed. Smaller: "
        f"--per_device_train_batch_size with --gradient_accumulation_steps, --gradient_checkpointing, --max_length."
    )
    return 0


def _records(task: Task, is_unlearning: bool) -> dict[str, tuple[int, str]]:
    """How many records each set has that a run goes through, and whether that is only stated.

    They are counted where the data are here, or of the hub and nothing is stated.
    """
    data = task.data_options
    sources = task.data_sources()
    here = bool(sources) and all(name == task.bundled or Path(name).exists() for name in sources)
    if not here and data.expected_retain is not None and data.expected_forget is not None:
        retain, forget, known = data.expected_retain, data.expected_forget, " (stated)"
    elif is_unlearning or task.run_options.without_forget:
        problem = task.problem()
        retain, forget, known = len(problem.retain), len(problem.forget), ""
    else:
        retain, forget, known = len(task.train_and_test()[0]), 0, ""
    if is_unlearning:
        return {"retain": (retain, known), "forget": (forget, known)}
    return {"training": (retain if task.run_options.without_forget else retain + forget, known)}
