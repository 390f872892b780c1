"""Private methods of transformers' Trainer that this package overrides; each exists since transformers 5.3.

transformers promises nothing of them. So the import fails where one is missing, instead of a run
that takes other steps than it should.
"""

from __future__ import annotations

from transformers import Trainer, __version__

OVERRIDDEN = (
    "_clip_grad_norm",  # each side is clipped on its own
    "_determine_best_metric",  # the best state must be one that is saved
    "_evaluate",  # a resumed run does not evaluate its start again
    "_get_grad_norm",  # from the Gram
    "_get_num_items_in_batch",  # a count for each side
    "_get_output_dir",  # checkpoints are staged
    "_get_train_sampler",  # the paired data shuffle
    "_init_training_state",  # the best checkpoint of a folder that was moved
    "_load_best_model",
    "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",  # sharded optimizer states
    "_load_rng_state",
    "_maybe_log_save_evaluate",  # a checkpoint is the last thing that a step does
    "_run_epoch",  # not after the end of a run
    "_save_checkpoint",  # whole or not there
    "_save_optimizer_and_scheduler",
)

_missing = [name for name in OVERRIDDEN if not hasattr(Trainer, name)]
if _missing:
    raise ImportError(
        f"transformers {__version__} lacks Trainer.{_missing[0]}, which hamu overrides; "
        f'pip install "transformers>=5.3,<6"'
    )
