"""What became of a classifier, class by class and image by image."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from hamu.evaluation import Predictions, principal_axes
from hamu.report.elements import (
    AFTER,
    BEFORE,
    COLOR_OF_SET,
    Chart,
    Picture,
    Section,
    counted,
    shorts,
)
from hamu.report.observations import ROLES, ImageObservations

_MOST_CLASSES = 30
_SHOWN = 12
_LARGEST = 96  # pixels of a picture


def class_accuracy(evaluation: Mapping[str, Any], contents: bool) -> Chart | None:
    """Accuracy by class before and after, from the evaluations of a run; of its test set if it has one."""
    before, after = evaluation["before"], evaluation["after"]
    name = next((n for n in ("test", "retain") if "per_class_accuracy" in after.get(n, {})), None)
    if name is None:
        return None
    both = [one[name]["per_class_accuracy"] for one in (before, after)]
    everywhere = list(dict.fromkeys([*both[0], *both[1]]))
    change = {key: both[1].get(key, 0.0) - both[0].get(key, 0.0) for key in everywhere}
    shown = everywhere
    if len(everywhere) > _MOST_CLASSES:
        shown = sorted(everywhere, key=lambda key: -abs(change[key]))[:_MOST_CLASSES]
    names = {key: key if contents else f"class {n}" for n, key in enumerate(everywhere, 1)}
    worst = min(everywhere, key=change.__getitem__)
    fall = (
        f"The largest fall is that of {names[worst]}: {both[0].get(worst, 0.0):.1%} before, "
        f"{both[1].get(worst, 0.0):.1%} after."
        if change[worst] < 0
        else "That of no class has fallen."
    )
    some = (
        f" Of {len(everywhere)} classes the {_MOST_CLASSES} that changed most."
        if shown is not everywhere
        else ""
    )
    return Chart(
        f"Accuracy by class, {name} set",
        f"Share of the {name} images of each class that are told right.{some} {fall}",
        {
            "kind": "bars",
            "categories": [names[key] for key in shown],
            "series": [
                {"name": role, "color": color, "values": shorts(found.get(key) for key in shown)}
                for role, color, found in zip(ROLES, (BEFORE, AFTER), both, strict=True)
            ],
            "high": 1,
            "percent": True,
        },
    )


def images_section(found: ImageObservations, contents: bool) -> Section:
    """Confusion, embedding, and the images that changed most and least."""
    charts = [_confusion(found, role, contents) for role in ROLES]
    missing = []
    if found.embeddings:
        charts += _embedding(found)
    else:
        missing.append(f"the picture of embeddings: {found.no_embedding}")
    pictures = _changed(found) if contents else {}
    if not contents:
        missing.append("images and names of classes: --contents shows them")
    images = sum(found.counts.values())
    intro = f"Both models on {counted(images, 'images')}, predicted anew for this report."
    return Section("Images", intro, charts, pictures=pictures, missing=missing)


def _confusion(found: ImageObservations, role: str, contents: bool) -> Chart:
    """A confusion matrix: rows are what an image is, columns what it is taken for, as shares of the row."""
    sets = ["test"] if "test" in found.counts else ["retain", "forget"]
    predictions = [found.predictions[role][name] for name in sets]
    labels, taken = (
        np.concatenate(parts) for parts in zip(*map(_labels_and_guesses, predictions), strict=True)
    )
    # of a larger set a smaller share may have been predicted, so that each of its images stands for more
    stands_for = np.repeat(
        [found.sizes[name] / found.counts[name] for name in sets],
        [found.counts[name] for name in sets],
    )
    width = max(one.logits.shape[1] for one in predictions)
    names = _names(found.classes, width, contents)
    counts = np.zeros((len(names), len(names)))
    np.add.at(counts, (labels, taken), stands_for)
    of_row = counts.sum(1, keepdims=True)
    shares = np.divide(counts, of_row, out=np.full_like(counts, np.nan), where=of_row > 0)
    kept = np.arange(len(names))
    some = ""
    if len(names) > _MOST_CLASSES:
        wrong = counts.sum(1) - counts.diagonal()
        kept = np.sort(np.argsort(-wrong, kind="stable")[:_MOST_CLASSES])
        some = f" Of {len(names)} classes the {_MOST_CLASSES} with most mistakes."
    values = [shorts(row) for row in shares[np.ix_(kept, kept)]]
    right = float(counts.diagonal().sum() / max(1.0, counts.sum()))
    shown = [names[k] for k in kept]
    by_size = "" if np.ptp(stands_for) < 1e-9 else ", each set counted by its size"
    return Chart(
        f"Confusion {role}",
        f"Rows: what an image of the {' and '.join(sets)} set is; columns: what the model {role} takes it for, as a "
        f"share of the row; {right:.1%} of {len(labels):,} images are told right{by_size}.{some}"
        f"{_worst(shares, names)}",
        {
            "kind": "heat", "rows": shown, "columns": shown, "values": values,
            "scale": "sequential", "low": 0.0, "high": 1.0, "percent": True, "numbers": len(kept) <= 12, "square": True,
            "xlabel": "taken for",
        },
    )  # fmt: skip


def _worst(shares: np.ndarray, names: Sequence[str]) -> str:
    off = np.where(np.isfinite(shares), shares, 0.0) * (1 - np.eye(len(shares)))
    row, column = divmod(int(off.argmax()), off.shape[1])
    share = off[row, column]
    return (
        f" Most often confused: {names[row]} taken for {names[column]} ({share:.1%})."
        if share > 0
        else ""
    )


def _labels_and_guesses(predictions: Predictions) -> tuple[np.ndarray, np.ndarray]:
    return predictions.labels.numpy(), predictions.logits.argmax(-1).numpy()


def _names(classes: Sequence[str], width: int, contents: bool) -> list[str]:
    """The names of what a model can take an image for: the classes of the data, and outputs beyond them."""
    named = list(classes) if contents else [f"class {n + 1}" for n in range(len(classes))]
    return named + [f"output {n + 1}" for n in range(len(named), width)]


def _embedding(found: ImageObservations) -> list[Chart]:
    """A chart of the embeddings of each model, both on the same two axes."""
    groups = [(role, name) for role in ROLES for name in found.embeddings[role]]
    flat, share = principal_axes([found.embeddings[role][name] for role, name in groups])
    both = np.concatenate([points.numpy() for points in flat])
    limits = [_padded(both[:, axis]) for axis in (0, 1)]
    at = dict(zip(groups, flat, strict=True))
    return [
        Chart(
            f"Embedding {role}",
            f"What goes into the model's last layer, {role} unlearning, along the two axes on which both models' "
            f"embeddings vary most ({share:.0%} of the variance); a point per image. {_spread(found, role)}",
            {
                "kind": "xy",
                "x": {"label": "first axis", "limits": limits[0]},
                "y": {"label": "second axis", "limits": limits[1]},
                "series": [_cloud(name, at[role, name]) for name in found.embeddings[role]],
                "nearest": True,
                "square": True,
            },
        )
        for role in ROLES
    ]


def _cloud(name: str, points: Tensor) -> dict[str, Any]:
    xs, ys = points.T.tolist()
    looks = {"color": COLOR_OF_SET[name], "mode": "points", "small": True}
    return {"name": name, "x": shorts(xs), "y": shorts(ys), **looks}


def _spread(found: ImageObservations, role: str) -> str:
    """How far the forget images are from the retain images, in words."""
    means = {name: vectors.double().mean(0) for name, vectors in found.embeddings[role].items()}
    distance = (means["forget"] - means["retain"]).norm()
    return f"The means of forget and retain images are {distance:.3g} apart."


def _padded(values: np.ndarray) -> tuple[float, float]:
    low, high = float(values.min()), float(values.max())
    margin = 0.05 * (high - low) or 1.0
    return low - margin, high + margin


def most_and_least_changed(
    predictions: Mapping[str, Mapping[str, Predictions]],
) -> dict[str, list[int]]:
    """Positions of the forget images of whose right class the probability changed most and least, by how they did.

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
    """The images that changed most and least, each with what became of it."""
    right = [_right(found.predictions[role]["forget"]) for role in ROLES]
    after = found.predictions["after"]["forget"]
    names, guesses = (
        _names(found.classes, after.logits.shape[1], contents=True),
        _labels_and_guesses(after)[1],
    )
    shown: dict[str, list[Picture]] = {}
    for title, places in most_and_least_changed(found.predictions).items():
        data = found.pictures[title]
        for k, n in enumerate(places):
            name = names[int(data.labels[k])]
            lines = [
                name,
                f"{right[0][n]:.0%} → {right[1][n]:.0%}",
                f"taken for {names[guesses[n]]}",
            ]
            picture = Picture(
                _uri(data.pixels[k].numpy()),
                f"{name}, row {int(data.rows[k])} of its source",
                lines,
            )
            shown.setdefault(f"Forget images that {title}", []).append(picture)
    return shown


def _right(predictions: Predictions) -> np.ndarray:
    """The probability of the right class, [N]."""
    return predictions.losses.neg().exp().numpy()


def _uri(pixels: np.ndarray) -> str:
    """An image [C, H, W] as a PNG within the page."""
    from PIL import Image

    values = pixels.transpose(1, 2, 0)
    image = Image.fromarray(values[:, :, 0] if values.shape[2] == 1 else values[:, :, :3])
    image.thumbnail((_LARGEST, _LARGEST))
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
