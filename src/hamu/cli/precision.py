"""In which precision the models of a run are evaluated: all of them in the same."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from hamu.unlearning.trainer import TrainConfig


def evaluates_in_half(args: TrainConfig) -> bool:
    """Whether evaluations run under autocast, as training does."""
    return (args.bf16 or args.fp16) and not getattr(args, "full_precision_eval", False)


def evaluation_precision(args: TrainConfig) -> AbstractContextManager[None]:
    """What a model is asked in; one that was trained has autocast in its forward already, and says the same."""
    half = torch.float16 if args.fp16 else torch.bfloat16
    return torch.autocast(args.device.type, dtype=half, enabled=evaluates_in_half(args))
