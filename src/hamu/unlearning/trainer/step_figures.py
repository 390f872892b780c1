"""What the log says of a step: its losses, norms and hardness, what was demanded and promised; layer by layer too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hamu.core.gram import SIDES
from hamu.core.pair_step import PairStep


def read_at_once(values: Sequence[Tensor]) -> list[float]:
    """Tensors of one shape as numbers; whatever of them lies on the device comes in one transfer, and nothing goes."""
    found: dict[int, float] = {}
    for on_host in (True, False):
        there = [
            (place, v) for place, v in enumerate(values) if (v.device.type == "cpu") is on_host
        ]
        if there:
            device = there[0][1].device
            read = torch.stack([v.detach().to(device, torch.float64) for _, v in there]).tolist()
            found |= dict(zip((place for place, _ in there), read, strict=True))
    return [found[place] for place in range(len(values))]


def step_figures(
    step: PairStep | None, losses: Mapping[str, Tensor], sides: Sequence[str]
) -> dict[str, float]:
    """The figures of a step by name.

    Args:
        step: what was found and decided; None if the run ended before, which leaves the losses.
        losses: by side, 0-dim.
        sides: those that the method uses.
    """
    tensors = {f"{side}_loss": losses[side] for side in sides}
    if step is not None:
        tensors |= _found(step, sides)
    return dict(zip(tensors, read_at_once(list(tensors.values())), strict=True))


def _found(step: PairStep, sides: Sequence[str]) -> dict[str, Tensor]:
    norms = step.gradient_norms
    tensors = {f"{side}_norm": norms[SIDES.index(side)] for side in sides}
    if len(sides) == 2:
        tensors |= {"kappa": step.kappa, "cos": step.cos}
    tensors |= {
        "promised_retain_change": step.promised_retain_change,
        "promised_forget_change": step.promised_forget_change,
    }
    constraint, direct_share = step.weights.constraint, step.direct_share
    if constraint is not None and direct_share is not None:
        tensors |= {
            "direct_threshold": constraint.direct_threshold,
            "stop_threshold": constraint.stop_threshold,
            "demand": constraint.demand,
            "clipped_demand": constraint.clipped_demand,
            "free_limit": constraint.free_limit,
            "max_demand": constraint.max_demand,
            "direct_share": direct_share,
            "criterion_met": constraint.criterion_met,
        }
    return tensors


def layer_figures(
    step: PairStep | None, lengths: Tensor | None, sides: Sequence[str]
) -> dict[str, list[float] | None]:
    """cosθ_i and ‖Δw_i‖ of a step by block; None for what is not known.

    Args:
        step: None if there was none.
        lengths: ‖Δw_i‖, [L], if they are known.
        sides: those that the method uses.
    """
    if step is None:
        return {"cos": None, "change": None}
    known = {"cos": step.gram.cos if len(sides) == 2 else None, "change": lengths}
    there = {name: values for name, values in known.items() if values is not None}
    if not there:
        return dict.fromkeys(known)
    return dict.fromkeys(known) | dict(zip(there, read_at_once(list(there.values())), strict=True))
