"""README.md of a saved model: how it was made and what was measured, never contents."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

import hamu
from hamu.models.storage import is_adapter
from hamu.unlearning.goal_report import forgotten_words
from hamu.unlearning.record.inputs import short_name

_FIGURES = ("loss", "accuracy", "probability")
_SETS = ("train", "retain", "forget", "test")


def write_model_card(
    folder: Path,
    *,
    base: str | None,
    method: str | None = None,
    forget_records: int = 0,
    reports: Mapping[str, Mapping[str, Any]] | None = None,
    goal: Mapping[str, Any] | None = None,
) -> Path:
    """Write README.md into the folder of a saved model.

    Args:
        folder: of the model.
        base: name or folder of the model that it was made from; None for one trained from nothing.
        method: of unlearning; None for a model that was trained.
        forget_records: number of records that were to be forgotten.
        reports: by column, such as "before" and "after", the figures of each set.
        goal: of evaluation.json, None without.

    Returns:
        The file.
    """
    made = "from nothing" if base is None else f"from `{short_name(base)}`"
    title, origin, forgotten = "Trained model", f"Trained {made}.", ""
    if method:
        title = "Unlearned model"
        origin = f"{forget_records:,} records were unlearned {made} by the method `{method}`."
        forgotten = "Nothing told when a record counts as forgotten."
        if goal is not None:
            forgotten = f"{forgotten_words(goal)}."
    measured = reports or {}
    columns = [
        (figure, role)
        for figure in _FIGURES
        for role, report in measured.items()
        if any(figure in report.get(name, {}) for name in _SETS)
    ]
    rows = {
        name: [measured[role].get(name, {}).get(figure) for figure, role in columns]
        for name in _SETS
        if any(report.get(name) for report in measured.values())
    }
    on_hub = base is not None and base.startswith("hub:")
    card = ModelCard.from_template(
        ModelCardData(
            library_name="peft" if is_adapter(folder) else "transformers",
            base_model=base.removeprefix("hub:") if base and on_hub else None,
            tags=["hamu", *(["machine-unlearning", method] if method else [])],
        ),
        template_path=str(Path(__file__).with_name("model_card.md.j2")),
        title=title,
        origin=origin,
        columns=columns,
        rows=rows,
        forgotten=forgotten,
        version=hamu.__version__,
    )
    path = folder / "README.md"
    path.write_text(str(card), encoding="utf-8")
    return path
