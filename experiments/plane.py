"""Every method in the plane of both gradients, at the length of the retain gradient: docs/images/plane.png.

    python -m experiments plane

Directions and weights are computed by the library; the line is HAMU-Q's, over all demands.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from matplotlib.lines import Line2D

from hamu import HamuQ, PairGram, build_method
from hamu.core.methods import TABLE, Weights
from hamu.report.pictures import STYLES, new_figure, save_figure

_FORGET_NORM = 1.25  # where the retain gradient has length 1
_DEGREES = (50, 75, 110)
_AS_GDIFF = ("kl", "scrub", "npo", "simnpo")  # its weights, with other objectives
_NOT_HERE = (*_AS_GDIFF, "hamu-u", "gru-ema", "pdu")  # a demand of its own, or a memory


def main(argv: list[str]) -> None:
    """Draw the picture."""
    figure = new_figure(13.5, 4.4)
    panels = figure.subplots(1, len(_DEGREES))
    names = [name for name in TABLE if name not in _NOT_HERE]
    for axes, degrees in zip(panels, _DEGREES, strict=True):
        gram = _gram(degrees)
        demands = np.linspace(1e-3, 1, 400)
        line = [_changes(gram, HamuQ(φ, "relative", stopping="off").weigh(gram)) for φ in demands]
        axes.plot(*zip(*line, strict=True), color=STYLES["hamu-q"][0], linewidth=6, alpha=0.25)
        for name in names:
            method = build_method(name, constraint_mode="relative", stopping="off")
            color, marker = STYLES[name]
            axes.plot(*_changes(gram, method.weigh(gram)), marker, color=color, ms=9, mec="white")
        axes.axhline(0, color="0.8", linewidth=0.8, zorder=0)
        axes.axvline(0, color="0.8", linewidth=0.8, zorder=0)
        axes.set(title=f"θ = {degrees}°", xlabel="rise of the forget loss, at one step length")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("change of the retain loss")
    marks = [Line2D([], [], color=STYLES[n][0], marker=STYLES[n][1], ls="") for n in names]
    figure.legend(marks, names, loc="outside right center", frameon=False)
    save_figure(figure, Path(__file__).parents[1] / "docs/images/plane.png")


def _gram(degrees: float) -> PairGram:
    r, f, cos = 1.0, _FORGET_NORM, math.cos(math.radians(degrees))
    retain_sq, forget_sq, dot = torch.tensor([[r * r], [f * f], [r * f * cos]]).double()
    return PairGram(retain_sq, forget_sq, dot)


def _changes(gram: PairGram, weights: Weights) -> tuple[float, float]:
    """First-order changes of the forget and the retain loss by a step as long as g_r."""
    retain, forget = gram.changes(weights.retain, weights.forget)
    length = (-(weights.retain * retain + weights.forget * forget)).sqrt()
    return float(forget / length), float(retain / length)
