"""`--dry_run`: what a run on text would be, without weights: parameters, steps, memory."""

from __future__ import annotations

import math

from rich.console import Console

from hamu.cli.options import DataOptions, RunOptions
from hamu.cli.tables import plain_table
from hamu.cli.tasks import choose_task
from hamu.errors import HamuError
from hamu.models.language import TINY, AdapterSettings
from hamu.models.shapes import estimate_memory, model_shape
from hamu.objectives import build_objective
from hamu.training import TrainConfig, UnlearnConfig
from hamu.training.config import checkpoints_activations


def show_plan(console: Console, data: DataOptions, run: RunOptions, args: TrainConfig) -> int:
    """Resolve the settings and print what they come to; no weights are loaded, nothing is written.

    Raises:
        HamuError: if the model's configuration or the number of records cannot be known.
    """
    if run.model is None or run.model == TINY:
        raise HamuError("a dry run needs --model, a folder or hub:OWNER/NAME, whose configuration can be read")
    adapter = AdapterSettings(run.lora_rank, run.lora_alpha, run.lora_dropout, run.lora_targets) if run.lora else None
    shape = model_shape(run.model, adapter, run.model_dtype, trust_remote_code=run.trust_remote_code)
    retain, forget, known = _records(data, run, console)
    per_step = args.per_device_train_batch_size * args.gradient_accumulation_steps
    is_unlearning = isinstance(args, UnlearnConfig)
    epoch = math.ceil((retain if is_unlearning or run.without_forget else retain + forget) / per_step)
    steps = args.max_steps if args.max_steps > 0 else math.ceil(epoch * args.num_train_epochs)
    sides, keeps_original = 1, False
    if isinstance(args, UnlearnConfig):
        method = args.build_method()
        sides = method.uses_retain + method.uses_forget
        names = (
            method.retain_objective,
            method.forget_objective and (args.forget_objective or method.forget_objective),
        )
        keeps_original = any(build_objective(name).needs_original for name in names if name)
    memory = estimate_memory(
        shape,
        tokens=args.per_device_train_batch_size * data.max_length,
        optimizer=str(args.optim),
        sides=sides,
        keeps_original=keeps_original,
        checkpointing=checkpoints_activations(args),
    )
    table = plain_table("what", "how much", right=(1,))
    table.add_row("parameters", f"{shape.parameters:,}")
    table.add_row("trained", f"{shape.trainable:,} ({shape.trainable / shape.parameters:.2%})")
    table.add_row("retain records", f"{retain:,}{known}")
    table.add_row("forget records", f"{forget:,}{known}")
    table.add_row("records of each side in a step" if is_unlearning else "records in a step", f"{per_step:,}")
    table.add_row("steps", f"{steps:,} ({epoch:,} an epoch)")
    for name, size in memory.items():
        table.add_row(f"memory: {name}", f"{size:.2f} GB")
    table.add_row("memory: sum, on each device", f"{sum(memory.values()):.1f} GB")
    console.print(table)
    console.print(
        f"Activations and logits are those of records of {data.max_length} tokens each, the longest allowed. Smaller: "
        f"--per_device_train_batch_size with --gradient_accumulation_steps, --gradient_checkpointing, --max_length."
    )
    return 0


def _records(data: DataOptions, run: RunOptions, console: Console) -> tuple[int, int, str]:
    """How many records are retained and forgotten: counted where they are here, else as the settings state."""
    if data.expected_retain is not None and data.expected_forget is not None:
        return data.expected_retain, data.expected_forget, " (stated)"
    problem = choose_task(data, run, console).problem()
    return len(problem.retain), len(problem.forget), ""
