"""Runs and observations that were never made, for the tests of reports: of any length, with names that are code."""

import json

import numpy as np
import torch

from hamu.data import ImageData, TextRecord, TextRecords
from hamu.evaluation import Predictions, TokenPredictions
from hamu.report.images import most_and_least_changed
from hamu.report.records import ImageObservations, TextObservations, answered
from hamu.report.run import read_run

NASTY = "</script><script>window.broken = 1</script><img src=x onerror='window.broken = 1'>{{ 7*7 }}\u2028"
BLOCKS = [f"layers.{n}.weight" for n in range(6)]


def report_of(loss, accuracy, figures=("accuracy",), names=("a", "b")):
    one = {"loss": loss, "accuracy": accuracy, "samples": 9}
    if "probability" in figures:
        return one | {"probability": 0.25, "records": 9}
    return one | {"per_class_accuracy": dict(zip(names, (accuracy, 1.0), strict=True))}


def evaluation(steps, names=("a", "b"), figures=("accuracy",)):
    sides = ("forget", "retain", "test")
    entries = [
        {"step": step, "eval_forget_gain": share, "eval_retain_gain": share / 9, "eval_forget_loss": 0.1 + share,
         "eval_retain_loss": 1 - share / 9}
        for step, share in ((0, 0.0), (steps // 2, 0.5), (steps, 1.0))
    ]  # fmt: skip
    inference = {"accuracy": 0.6, "auc": 0.55, "samples": 9}
    losses = {"before": (0.1, 1.0, 1.0), "after": (0.1 + 1.0, 1 - 1 / 9, 1.0)}
    reports = {
        role: {
            side: report_of(loss, accuracy, figures, names)
            for side, loss in zip(sides, losses[role], strict=True)
        }
        | {"membership_inference": inference}
        for role, accuracy in (("before", 1.0), ("after", 0.5))
    }
    return reports | {
        "trajectory": entries,
        "steps_taken": steps - 1, "steps_skipped": 1, "ended": f"the criterion is met {NASTY}",
        "ended_kind": "criterion", "controller": None, "goal": None,
        "promise": {"checked": steps, "judged": steps, "kept": 0.5, "median_ratio": {"retain": 1.0, "forget": 0.9}},
    }  # fmt: skip


def standing(forgotten, records=20):
    """How a forget set stands whose records have losses of 0.1, 0.2 and so on, and need 0.1 less or more."""
    losses = [round(0.1 * n, 1) for n in range(1, records + 1)]
    missing = losses[: records - forgotten]
    return {
        "records": records, "forgotten": forgotten, "too_high": 0,
        "loss_quantiles": dict(zip(("min", "q25", "median", "q75", "max"), np.quantile(losses, (0, 0.25, 0.5, 0.75, 1)),
                                   strict=True)),
        "worst": [{"position": 77 + n, "loss": x, "target": x + 0.125} for n, x in enumerate(missing[:10])],
    }  # fmt: skip


def goal(before, after, *, records=20, budget=None, **more):
    """The goal of a run, as evaluation.json holds it."""
    found = {"kind": "unseen", "share": 0.95, "loss": None, "budget": budget, "reached": after >= 0.95 * records,
             "lasting": False}  # fmt: skip
    return found | {"before": standing(before, records), "after": standing(after, records)} | more


def step_line(step, steps):
    share = step / steps
    return {
        "step": step, "taken": 1.0, "retain_loss": 1 - share / 2, "forget_loss": 0.1 + share, "kappa": share - 0.5,
        "cos": share - 0.5, "direct_threshold": -0.3, "stop_threshold": 0.4, "demand": 0.5, "free_limit": 1 - share,
        "max_demand": 1.0, "direct_share": 1 - share, "first_order_retain_change": -0.1, "realised_retain_change": -0.09,
        "first_order_forget_change": share, "realised_forget_change": 0.9 * share, "promise_kept": 1.0,
    }  # fmt: skip


def write_run(
    folder, steps=20, *, finished=True, names=("a", "b"), blocks=BLOCKS, figures=("accuracy",)
):
    """The folder of a run, as far as a report reads it."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(
        "method: hamu-q\ndata: gone.npz\nforget_class: a\nmodel: gone\n"
    )
    with open(folder / "steps.jsonl", "w") as log:
        for step in range(1, steps + 1):
            log.write(json.dumps(step_line(step, steps)) + "\n")
    shown = range(1, steps + 1, max(1, steps // 500))
    lines = [{"step": 0, "blocks": list(blocks)}]
    for number, step in enumerate(shown):
        values = [round((step / steps + k / len(blocks)) % 1, 3) for k in range(len(blocks))]
        change = None if step == 1 else [0.01 + v for v in values]
        lines.append({"step": step, "number": number, "cos": values, "change": change})
    (folder / "layers.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    if finished:
        (folder / "evaluation.json").write_text(json.dumps(evaluation(steps, names, figures)))
    return folder


def example_run(tmp_path, name="run", **settings):
    return read_run(write_run(tmp_path / name, **settings))


def images(count, names, channels=3, size=8):
    generator = torch.Generator().manual_seed(count)
    pixels = torch.randint(
        0, 256, (count, channels, size, size), generator=generator, dtype=torch.uint8
    )
    return ImageData(
        pixels, torch.arange(count) % len(names), tuple(names), NASTY, torch.arange(count)
    )


def image_observations(names=("a", "b"), count=40, channels=3):
    sets = {name: images(count, names, channels) for name in ("retain", "forget", "test")}
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    predictions = {
        role: {
            name: Predictions(draw(count, len(names)), data.labels) for name, data in sets.items()
        }
        for role in ("before", "after")
    }
    embeddings = {role: {name: draw(count, 5) for name in sets} for role in predictions}
    counts = dict.fromkeys(sets, count)
    pictures = {
        title: sets["forget"].select(places)
        for title, places in most_and_least_changed(predictions).items()
    }
    return ImageObservations(predictions, counts, counts, names, pictures, embeddings)


def text_observations(count=30):
    record = TextRecord(f"Who is {NASTY}?", f" It is {NASTY}", {})
    texts = {
        n: TextRecords((record,) * count, NASTY, torch.arange(count))
        for n in ("retain", "forget", "test")
    }
    generator = torch.Generator().manual_seed(0)

    def predicted():
        losses = torch.rand(3 * count, dtype=torch.float64, generator=generator)
        record = torch.arange(count).repeat_interleave(3)
        return TokenPredictions(losses, losses < 0.5, -losses, losses + 0.1, record, count)

    predictions = {role: {name: predicted() for name in texts} for role in ("before", "after")}
    answers = {role: [f"{role} {NASTY}"] * 2 for role in predictions}
    shown = {name: answered(texts[name].select([0, 1]), answers) for name in ("forget", "retain")}
    return TextObservations(predictions, texts, shown)


def spikes(steps=100_000):
    """A series whose one highest and one lowest value a mean would lose."""
    values = np.zeros(steps)
    values[steps // 3], values[steps // 2] = 7.0, -5.0
    return values
