"""Made-up runs and observations for the tests of reports, with names that are code."""

import json
from dataclasses import replace

import numpy as np
import torch
from run_files import write_rows
from small_models import token_predictions

from hamu.data import ImageData, TextRecord, TextRecords
from hamu.evaluation import Predictions
from hamu.report.run import (
    ImageObservations,
    TextObservations,
    answered,
    most_and_least_changed,
    read_run,
)

NASTY = (
    "</script><script>window.broken = 1</script>"
    "<img src=x onerror='window.broken = 1'>{{ 7*7 }}\u2028"
)
BLOCKS = [f"layers.{n}.weight" for n in range(6)]
SIDES, ROLES = ("forget", "retain", "test"), ("before", "after")


def evaluation(steps, names=("a", "b")):
    trajectory = [
        {"step": step, "eval_forget_gain": share, "eval_retain_gain": share / 9}
        | {"eval_forget_loss": 0.1 + share, "eval_retain_loss": 1 - share / 9}
        for step, share in ((0, 0.0), (steps // 2, 0.5), (steps, 1.0))
    ]
    ratio = {"retain": 1.0, "forget": 0.9}
    found = {
        "trajectory": trajectory, "goal": None,
        "steps_taken": steps - 1, "steps_in_model": steps - 1, "steps_skipped": 1,
        "ended": f"the criterion is met {NASTY}", "ended_kind": "criterion",
        "promise": {"checked": steps, "undone": 0, "judged": steps, "clamped": 0, "kept": 0.5, "median_ratio": ratio},
    }  # fmt: skip
    inference = {"accuracy": 0.6, "auc": 0.55, "samples": 9}
    means = {"before": (0.1, 1.0, 1.0), "after": (0.1 + 1.0, 1 - 1 / 9, 1.0)}
    for role, accuracy in (("before", 1.0), ("after", 0.5)):
        classes = {"per_class_accuracy": dict(zip(names, (accuracy, 1.0), strict=True))}
        found[role] = {"membership_inference": inference}
        for side, loss in zip(SIDES, means[role], strict=True):
            found[role][side] = {"loss": loss, "accuracy": accuracy, "samples": 9} | classes
    return found


def standing(forgotten):
    """Standing of 20 forget records with losses of 0.1, 0.2 and so on."""
    losses = [round(0.1 * n, 1) for n in range(1, 21)]
    levels = np.quantile(losses, (0, 0.25, 0.5, 0.75, 1)).tolist()
    worst = losses[: 20 - forgotten][:10]
    return {
        "records": 20, "forgotten": forgotten, "too_high": 0,
        "loss_quantiles": dict(zip(("min", "q25", "median", "q75", "max"), levels, strict=True)),
        "worst": [{"row": 77, "loss": x, "target": x + 0.125} for x in worst],
    }  # fmt: skip


def goal(before, after, *, budget=None, reached=True):
    """The goal of a run, as evaluation.json holds it."""
    found = {"kind": "unseen", "share": 0.95, "loss": None, "budget": budget, "lasting": False}
    return found | {"before": standing(before), "after": standing(after), "reached": reached}


def step_line(step, steps):
    share = step / steps
    found = {"step": step, "taken": 1.0, "retain_loss": 1 - share / 2, "forget_loss": 0.1 + share}
    found |= {"kappa": share - 0.5, "direct_threshold": -0.3, "stop_threshold": 0.4}
    found |= {"demand": 0.5, "free_limit": 1 - share, "max_demand": 1.0, "direct_share": 1 - share}
    found |= {"first_order_retain_change": -0.1, "realised_retain_change": -0.09}
    return found | {"first_order_forget_change": share, "realised_forget_change": 0.9 * share}


def write_run(folder, steps=20, *, finished=True, names=("a", "b"), blocks=BLOCKS):
    """The folder of a run, as far as a report reads it."""
    folder.mkdir(parents=True)
    config = "method: hamu-q\ndata: gone.npz\nforget_class: a\nmodel: gone\n"
    (folder / "config.yaml").write_text(config)
    write_rows(folder / "steps.jsonl", (step_line(step, steps) for step in range(1, steps + 1)))
    lines = [{"step": 0, "blocks": list(blocks)}]
    for step in range(1, steps + 1, max(1, steps // 500)):
        values = [round((step / steps + k / len(blocks)) % 1, 3) for k in range(len(blocks))]
        change = None if step == 1 else [0.01 + v for v in values]
        lines.append({"step": step, "cos": values, "change": change})
    write_rows(folder / "layers.jsonl", lines)
    if finished:
        (folder / "evaluation.json").write_text(json.dumps(evaluation(steps, names)))
    return folder


def example_run(tmp_path, name="run", observed=None, **settings):
    return replace(read_run(write_run(tmp_path / name, **settings)), observed=observed)


def image_observations(names=("a", "b"), count=40):
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    rows = torch.arange(count)
    pixels = (draw(count, 3, 8, 8).sigmoid() * 255).to(torch.uint8)
    data = ImageData(pixels, rows % len(names), tuple(names), NASTY, rows)
    predictions = {
        role: {name: Predictions(draw(count, len(names)), data.labels) for name in SIDES}
        for role in ROLES
    }
    embeddings = {role: {name: draw(count, 5) for name in SIDES} for role in ROLES}
    sizes = dict.fromkeys(SIDES, count)
    shown = most_and_least_changed(predictions)
    pictures = {title: data.select(places) for title, places in shown.items()}
    return ImageObservations(predictions, sizes, names, pictures, embeddings)


def text_observations(count=30):
    record = TextRecord(f"Who is {NASTY}?", f" It is {NASTY}", {})
    texts = {n: TextRecords((record,) * count, NASTY, torch.arange(count)) for n in SIDES}
    losses = torch.rand(2, 3, count, 3, generator=torch.Generator().manual_seed(0)).tolist()
    predictions = {
        role: dict(zip(SIDES, map(token_predictions, sets), strict=True))
        for role, sets in zip(ROLES, losses, strict=True)
    }
    answers = {role: [f"{role} {NASTY}"] * 2 for role in ROLES}
    shown = {name: answered(texts[name].select([0, 1]), answers) for name in ("forget", "retain")}
    return TextObservations(predictions, texts, shown)
