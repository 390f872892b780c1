"""Sections on a classifier: accuracy by class, confusion, embeddings and single images."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

from hamu.evaluation import Predictions, principal_axes
from hamu.report.charts import (
    AFTER,
    BEFORE,
    COLOR_OF_SET,
    Chart,
    Picture,
    Section,
    axis,
    bars,
    counted,
    heat,
    plane,
    series,
)
from hamu.report.records import ROLES, ImageObservations

_MOST_CLASSES = 30
_SHOWN = 12
_LARGEST = 96  # pixels of a picture


def class_accuracy(evaluation: Mapping[str, Any], contents: bool) -> Chart | None:
    """Accuracy by class before and after, on the test set if there is one."""
    after = evaluation["after"]
    name = next((n for n in ("test", "retain") if "per_class_accuracy" in after.get(n, {})), None)
    if name is None:
        return None
    both = [evaluation[role][name]["per_class_accuracy"] for role in ROLES]
    every = list(dict.fromkeys([*both[0], *both[1]]))
    change = {key: both[1].get(key, 0.0) - both[0].get(key, 0.0) for key in every}
    shown, some = every, ""
    if len(every) > _MOST_CLASSES:
        shown = sorted(every, key=lambda key: -abs(change[key]))[:_MOST_CLASSES]
        some = f" Of {len(every)} classes the {_MOST_CLASSES} that changed most."
    names = {key: key if contents else f"class {n}" for n, key in enumerate(every, 1)}
    worst = min(every, key=change.__getitem__)
    fall = "That of no class has fallen."
    if change[worst] < 0:
        shares = (
            f"{one.get(worst, 0.0):.1%} {role}" for role, one in zip(ROLES, both, strict=True)
        )
        fall = f"The largest fall is that of {names[worst]}: {', '.join(shares)}."
    values = {
        role: (color, [found.get(key) for key in shown])
        for role, color, found in zip(ROLES, (BEFORE, AFTER), both, strict=True)
    }
    return Chart(
        f"Accuracy by class, {name} set",
        f"Share of the {name} images of each class that are told right.{some} {fall}",
        bars([names[key] for key in shown], values),
    )


def images_section(found: ImageObservations, contents: bool) -> Section:
    """Confusion, embeddings, and the images that changed most and least."""
    charts = [_confusion(found, role, contents) for role in ROLES]
    missing = []
    if found.embeddings:
        charts += _embedding(found)
    else:
        missing.append(f"the picture of embeddings: {found.no_embedding}")
    if not contents:
        missing.append("images and names of classes: --contents shows them")
    images = counted(sum(found.counts.values()), "images")
    intro = f"Both models on {images}, predicted anew for this report."
    pictures = _changed(found) if contents else {}
    return Section("Images", intro, charts, pictures=pictures, missing=missing)


def _confusion(found: ImageObservations, role: str, contents: bool) -> Chart:
    """Confusion matrix: true classes by predicted ones, as shares of the row."""
    sets = ["test"] if "test" in found.counts else ["retain", "forget"]
    predictions = [found.predictions[role][name] for name in sets]
    labels = np.concatenate([one.labels.numpy() for one in predictions])
    taken = np.concatenate([one.logits.argmax(-1).numpy() for one in predictions])
    # each image of a set that is sampled more thinly stands for more
    weights = [found.sizes[name] / found.counts[name] for name in sets]
    stands_for = np.repeat(weights, [found.counts[name] for name in sets])
    names = _names(found.classes, max(one.logits.shape[1] for one in predictions), contents)
    counts = np.zeros((len(names), len(names)))
    np.add.at(counts, (labels, taken), stands_for)
    of_row = counts.sum(1, keepdims=True)
    shares = np.divide(counts, of_row, out=np.full_like(counts, np.nan), where=of_row > 0)
    kept, some = np.arange(len(names)), ""
    if len(names) > _MOST_CLASSES:
        wrong = counts.sum(1) - counts.diagonal()
        kept = np.sort(np.argsort(-wrong, kind="stable")[:_MOST_CLASSES])
        some = f" Of {len(names)} classes the {_MOST_CLASSES} with most mistakes."
    right = float(counts.diagonal().sum() / max(1.0, counts.sum()))
    by_size = "" if np.ptp(stands_for) < 1e-9 else ", each set counted by its size"
    off = np.where(np.isfinite(shares), shares, 0.0) * (1 - np.eye(len(shares)))
    row, column = divmod(int(off.argmax()), len(off))
    if off[row, column] > 0:
        some += f" Most often confused: {names[row]} taken for {names[column]} ({off[row, column]:.1%})."
    shown = [names[k] for k in kept]
    return Chart(
        f"Confusion {role}",
        f"Rows: what an image of the {' and '.join(sets)} set is; columns: what the model {role} "
        "takes it for, as a "
        f"share of the row; {right:.1%} of {len(labels):,} images are told right{by_size}.{some}",
        heat(
            shown, shown, shares[np.ix_(kept, kept)], limits=(0.0, 1.0), scale="Blues", numbers=len(kept) <= 12,
            hover="%{y} taken for %{x}: %{z:.1%}", height=430, x="taken for",
        ),
    )  # fmt: skip


def _names(classes: Sequence[str], width: int, contents: bool) -> list[str]:
    """Names of a model's outputs: the classes of the data, and outputs beyond them."""
    named = list(classes) if contents else [f"class {n + 1}" for n in range(len(classes))]
    return named + [f"output {n + 1}" for n in range(len(named), width)]


def _embedding(found: ImageObservations) -> list[Chart]:
    """Embeddings of each model, both on the same two principal axes."""
    groups = [(role, name) for role in ROLES for name in found.embeddings[role]]
    flat, share = principal_axes([found.embeddings[role][name] for role, name in groups])
    at = dict(zip(groups, flat, strict=True))
    both = np.concatenate([points.numpy() for points in flat])
    margin = 0.05 * np.ptp(both, axis=0)
    margin[margin == 0] = 1.0
    limits = np.stack([both.min(0) - margin, both.max(0) + margin], 1).tolist()
    charts = []
    for role, sets in found.embeddings.items():
        means = {name: vectors.double().mean(0) for name, vectors in sets.items()}
        distance = (means["forget"] - means["retain"]).norm()
        clouds = [
            series(name, xs, ys, COLOR_OF_SET[name], mode="markers", opacity=0.6)
            for name in sets
            for xs, ys in [at[role, name].T.numpy()]
        ]
        x, y = axis("first axis", limits[0]), axis("second axis", limits[1])
        charts.append(Chart(
            f"Embedding {role}",
            f"What goes into the model's last layer, {role} unlearning, along the two axes on "
            "which both models' "
            f"embeddings vary most ({share:.0%} of the variance); a point per image. The means of "
            "forget and retain "
            f"images are {distance:.3g} apart.",
            plane(clouds, x, y, nearest=True, square=True),
        ))  # fmt: skip
    return charts


def most_and_least_changed(
    predictions: Mapping[str, Mapping[str, Predictions]],
) -> dict[str, list[int]]:
    """Positions of the forget images whose right class changed most and least in probability.

    Args:
        predictions: by role and set.
    """
    right = [_right(predictions[role]["forget"]) for role in ROLES]
    order = np.argsort(-np.abs(right[1] - right[0]), kind="stable")
    count = min(_SHOWN, len(order))
    return {
        "changed most": order[:count].tolist(),
        "changed least": order[count:][::-1][:count].tolist(),
    }


def _changed(found: ImageObservations) -> dict[str, list[Picture]]:
    """The images that changed most and least, with probabilities and predicted class."""
    right = [_right(found.predictions[role]["forget"]) for role in ROLES]
    after = found.predictions["after"]["forget"]
    names = _names(found.classes, after.logits.shape[1], contents=True)
    guesses = after.logits.argmax(-1).tolist()
    shown = {}
    for title, places in most_and_least_changed(found.predictions).items():
        data = found.pictures[title]
        shown[f"Forget images that {title}"] = [
            Picture(
                _uri(data.pixels[k].numpy()),
                f"{names[int(data.labels[k])]}, row {int(data.rows[k])} of its source",
                [names[int(data.labels[k])], f"{right[0][n]:.0%} → {right[1][n]:.0%}",
                 f"taken for {names[guesses[n]]}"],
            )
            for k, n in enumerate(places)
        ]  # fmt: skip
    return {title: pictures for title, pictures in shown.items() if pictures}


def _right(predictions: Predictions) -> np.ndarray:
    """Probability of the right class, [N]."""
    return predictions.losses.neg().exp().numpy()


def _uri(pixels: np.ndarray) -> str:
    """Image [C, H, W] as a PNG within the page."""
    values = pixels.transpose(1, 2, 0)
    image = Image.fromarray(values[:, :, 0] if values.shape[2] == 1 else values[:, :, :3])
    image.thumbnail((_LARGEST, _LARGEST))
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
