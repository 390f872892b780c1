"""TrainingArguments that have no place on the command line, and why.

A command writes into its output folder alone, and reaches the network for nothing but names that begin with "hub:" and
the trackers of --report_to.
"""

from __future__ import annotations

from hamu.errors import HamuError

_NAMES_BY_REASON = {
    "nothing is sent anywhere; publish the folder that a run leaves by other means": (
        "push_to_hub", "hub_token", "hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push",
        "hub_revision",
    ),
    "logs lie in the output folder": ("logging_dir",),
    "--shard and --pairing share models and batches between the processes of torchrun": (
        "deepspeed", "fsdp", "fsdp_config", "accelerator_config", "parallelism_config",
    ),
    "a run goes on in its own folder; give --resume and its --output_dir": ("resume_from_checkpoint",),
    "a resumed run restores all of its state": ("ignore_data_skip", "restore_callback_states_from_checkpoint"),
    "checkpoints are to go on from": ("save_only_model",),
    "a signal saves a checkpoint in any case": ("enable_jit_checkpoint",),
    "the size of a step belongs to a run; choose --per_device_train_batch_size": ("auto_find_batch_size",),
    "records are as long as their tokens": ("length_column_name",),
    "the collators choose the columns": ("remove_unused_columns", "label_names", "include_for_metrics"),
    "losses are taken of the logits, which it leaves out": ("use_liger_kernel", "liger_kernel_config"),
    "what a step promises holds for the loss without noise": ("neftune_noise_alpha",),
    "a command prints what matters; --debug alone shows where an error comes from": (
        "debug", "log_level", "log_level_replica",
    ),
    "figures are taken of whole sets": ("batch_eval_metrics",),
    "no command looks at it": ("do_train", "do_eval", "do_predict", "local_rank"),
}  # fmt: skip
_REFUSED = {name: reason for reason, names in _NAMES_BY_REASON.items() for name in names}


def has_a_place(name: str) -> bool:
    """Whether the command line has this option of TrainingArguments."""
    return name not in _REFUSED


def check_has_a_place(name: str, where: str) -> None:
    """Check an option by its name.

    Args:
        name: of the option.
        where: what names it, for the message.

    Raises:
        HamuError: if it has no place; the message says why.
    """
    if name in _REFUSED:
        raise HamuError(f"{where} has {name}, which has no place here: {_REFUSED[name]}")
