"""Table 1: what an epoch costs by each method, in time and memory."""

from __future__ import annotations

import gc
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import TrainerCallback

from experiments.paper.common import METHODS, OURS
from experiments.paper.experiment import IMAGE_STEPS, Claim, Figures, Measured, Scale
from hamu.data import UnlearningData, forget_class, read_images
from hamu.models import load_classifier
from hamu.report.pictures import STYLES, new_figure, save_figure
from hamu.unlearning.trainer import UnlearnConfig, UnlearnTrainer
from hamu.unlearning.trainer.logs import silence

_TURNS = 15
_LEVEL = 0.95
_LIMIT = 1.05  # of HAMU over GDiff
_PAPER = {  # seconds per epoch, GB
    "ft": (0.879, 7.65), "ga": (0.884, 7.65), "gdiff": (0.868, 7.65), "kl": (1.067, 8.87), "scrub": (1.064, 8.87),
    "hamu-q": (0.976, 7.65), "hamu-u": (0.994, 7.65),
}  # fmt: skip
_OF_DATA = ("image_size", "num_channels", "image_column", "label_column")
_OF_STEPS = (
    "bf16", "use_cpu", "per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate", "seed",
    "constraint", "constraint_mode", "on_infeasible", "stopping", "shuffle",
)  # fmt: skip


class Cost(Measured):
    """Table 1: time and peak memory of an epoch."""

    name = "table-1"
    reference = "Table 1 (App. G.1)"
    title = "Time per epoch and peak memory of all methods"
    task = "image"
    takes = ("data", "forget_class", "model", *_OF_DATA, *_OF_STEPS)
    about = (
        "In each of 15 turns (--epochs) of one process every method runs an epoch; only steps are "
        "timed. Medians of the ratios within a turn, with 95% intervals. Memory: peak, resident on a CPU."
    )

    def measure(self, settings: Mapping[str, Any], scale: Scale) -> Figures:
        """Give the seconds of each turn, and peak memory, by method."""
        problem = _problem(settings)
        seconds: dict[str, list[float]] = {method: [] for method in METHODS}
        memory: dict[str, float | None] = dict.fromkeys(METHODS)
        on_gpu = torch.cuda.is_available() and not settings.get("use_cpu")
        for turn in range(max(1, round(scale.epochs or _TURNS)) + 1):
            start = turn % len(METHODS)
            for method in (*METHODS[start:], *METHODS[:start]):
                _reset_peak(on_gpu)
                took = _epoch(method, settings, problem)
                if turn:  # the first warms caches up
                    seconds[method].append(took)
                    memory[method] = max(
                        filter(None, (memory[method], _peak(on_gpu))), default=None
                    )
        ratios = {method: median(_over_gdiff(seconds, method)) for method in METHODS}
        return {
            "seconds": {method: median(times) for method, times in seconds.items()},
            "turns": seconds,
            "over_gdiff": ratios,
            "memory": memory,
            "paper": {
                method: dict(zip(("seconds", "memory"), row, strict=True))
                for method, row in _PAPER.items()
            },
        }

    def claims(self, figures: Figures) -> list[Claim]:
        """Compare HAMU with GDiff in time and memory, and KL and SCRUB with GDiff in time."""
        claims = []
        for method in OURS:
            ratios, paper = (
                _over_gdiff(figures["turns"], method),
                _PAPER[method][0] / _PAPER["gdiff"][0],
            )
            claims.append(
                Claim(
                    f"{method} takes at most {_LIMIT} times as long as gdiff",
                    _written(ratios), _at_most(ratios, _LIMIT), round(paper, 2),
                    "An epoch of so few and short steps is dominated by what does not depend on the size of a batch.",
                )
            )  # fmt: skip
        memory = figures["memory"]
        known = all(memory[m] is not None for m in METHODS)
        for method in OURS:
            claims.append(
                Claim(
                    f"{method} needs no more memory than gdiff (to 1%)",
                    memory[method] / memory["gdiff"] if known else None,
                    memory[method] <= 1.01 * memory["gdiff"] if known else None,
                    1.0,
                    "Resident memory of a process on a CPU also says what the allocator keeps.",
                )
            )
        for method in ("kl", "scrub"):
            ratios, paper = (
                _over_gdiff(figures["turns"], method),
                _PAPER[method][0] / _PAPER["gdiff"][0],
            )
            shorter = _at_most(ratios, 1.0)
            claims.append(
                Claim(
                    f"{method} takes longer than gdiff",
                    _written(ratios), None if shorter is None else not shorter, round(paper, 2),
                    "Its forward pass of the original model costs little beside the rest of a step.",
                )
            )  # fmt: skip
        return claims

    def table(self, figures: Figures) -> list[list[str]]:
        """List our figures with the paper's in brackets, and the interval of the ratio."""
        lines = [
            [
                "method",
                "s per epoch",
                "over gdiff",
                "95% interval",
                "peak memory, GB",
            ]
        ]
        for method in METHODS:
            paper, held = _PAPER[method], figures["memory"][method]
            ratios = _over_gdiff(figures["turns"], method)
            lines.append([
                method,
                f"{figures['seconds'][method]:.3g} ({paper[0]:.3f})",
                f"{figures['over_gdiff'][method]:.3f} ({paper[0] / _PAPER['gdiff'][0]:.3f})",
                _span(median_interval(ratios)),
                f"{'-' if held is None else f'{held:.2f}'} ({paper[1]:.2f})",
            ])  # fmt: skip
        return lines

    def draw(self, figures: Figures, path: Path) -> None:
        """Draw bars over GDiff with a line from the lowest turn to the highest, the paper's as a mark."""
        figure = new_figure(7, 3.6)
        axes = figure.subplots()
        colors = [STYLES[method][0] for method in METHODS]
        axes.bar(
            METHODS,
            [figures["over_gdiff"][m] for m in METHODS],
            color=colors,
            width=0.6,
            label="ours",
        )
        paper = [_PAPER[m][0] / _PAPER["gdiff"][0] for m in METHODS]
        turns = [_over_gdiff(figures["turns"], m) for m in METHODS]
        axes.vlines(METHODS, [min(t) for t in turns], [max(t) for t in turns], color="0.4", linewidth=1,
                    label=f"lowest to highest of {len(turns[0])} turns")  # fmt: skip
        axes.plot(
            METHODS, paper, "_", color="0.2", markersize=24, markeredgewidth=2, label="the paper's"
        )
        axes.axhline(1, color="0.7", linewidth=0.8, zorder=0)
        axes.set_ylabel("time per epoch over gdiff")
        axes.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside upper center", ncols=3, frameon=False)
        save_figure(figure, path)


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """An interval that covers the median in 95% of cases whatever the values are drawn from; None of too few of them.

    It lies between the k-th lowest and the k-th highest value: it misses the median only if fewer than k of n values
    are on one side of it, each with a chance of one half, so that it covers with 1 - 2·P(B < k), B ~ Bin(n, ½).
    """
    count, missed, found = len(values), 0.0, None
    for k, (low, high) in enumerate(
        zip(sorted(values), sorted(values, reverse=True), strict=True), 1
    ):
        missed += math.comb(count, k - 1) / 2**count
        if 1 - 2 * missed < _LEVEL:
            break
        found = low, high
    return found


def _over_gdiff(turns: Mapping[str, Sequence[float]], method: str) -> list[float]:
    """The time of each turn over that of gdiff in the same turn."""
    return [own / other for own, other in zip(turns[method], turns["gdiff"], strict=True)]


def _at_most(ratios: Sequence[float], bound: float) -> bool | None:
    """True if their median is at most this; None if its interval has values on both sides."""
    interval = median_interval(ratios)
    if interval is None or interval[0] <= bound < interval[1]:
        return None
    return interval[1] <= bound


def _written(ratios: Sequence[float]) -> str:
    """A median with what it rests on."""
    turns, interval = (
        f"{len(ratios)} {'turn' if len(ratios) == 1 else 'turns'}",
        median_interval(ratios),
    )
    if interval is None:
        return f"{median(ratios):.3f}, {_span((min(ratios), max(ratios)))}: {turns}, too few for an interval"
    return f"{median(ratios):.3f} ({_span(interval)})"


def _span(ends: tuple[float, float] | None) -> str:
    return "-" if ends is None else f"{ends[0]:.3f} to {ends[1]:.3f}"


class _Timer(TrainerCallback):
    """Seconds from the first step's beginning to the last one's end."""

    begin, end = 0.0, 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note when the first step begins."""
        self.begin = self.begin or time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note when the last step so far ends."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.end = time.perf_counter()


def _problem(settings: Mapping[str, Any]) -> UnlearningData[Any]:
    """The problem with ρ = 0, in the form that the model takes."""
    options = {key: settings[key] for key in _OF_DATA if key in settings}
    data = read_images(str(settings["data"]), **options)
    config = load_classifier(str(settings["model"])).config
    data = data.normalized(config.image_mean, config.image_std)
    return forget_class(data, None, str(settings["forget_class"]))


def _epoch(method: str, settings: Mapping[str, Any], problem: UnlearningData[Any]) -> float:
    """Seconds that the steps of one epoch take."""
    timer = _Timer()
    with TemporaryDirectory(prefix="hamu-") as folder:
        args = UnlearnConfig(
            output_dir=folder,
            method=method,
            max_steps=IMAGE_STEPS,
            eval_strategy="no",
            eval_on_start=False,
            check_steps=0,
            logging_steps=10 * IMAGE_STEPS,
            **{name: settings[name] for name in _OF_STEPS if name in settings},
        )
        trainer = UnlearnTrainer(
            load_classifier(str(settings["model"])), args, retain_dataset=problem.retain, forget_dataset=problem.forget,
            callbacks=[timer],
        )  # fmt: skip
        silence(trainer)
        trainer.train()
    return timer.end - timer.begin


def _reset_peak(on_gpu: bool) -> None:
    gc.collect()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    elif sys.platform == "linux":
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM of this process


def _peak(on_gpu: bool) -> float | None:
    """GB since the last reset; None where it is not told."""
    if on_gpu:
        return torch.cuda.max_memory_allocated() / 1e9
    if sys.platform != "linux":
        return None
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    held = next((line.split()[1] for line in lines if line.startswith("VmHWM")), None)
    return None if held is None else int(held) * 1024 / 1e9
