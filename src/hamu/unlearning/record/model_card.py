"""README.md of a saved model: how it was made and what was measured, never contents."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

import hamu
from hamu.data.sources import HUB, is_of_hub
from hamu.models.storage import is_adapter
from hamu.unlearning.goal_report import forgotten_words
from hamu.unlearning.record.inputs import short_name
from hamu.unlearning.record.record import FIGURES

_SETS = ("train", "retain", "forget", "test")


def write_model_card(
    folder: Path,
    *,
    base: str | None,
    method: str | None = None,
    forget_records: int = 0,
    reports: Mapping[str, Mapping[str, Any]] | None = None,
    goal: Mapping[str, Any] | None = None,
) -> None:
    """Write README.md into the folder of a saved model.

    `base` is the model that it was made from, None for one from nothing; `reports` are the figures
    of each set by column, such as "before" and "after"; `goal` is that of evaluation.json.
    """
    measured = {
        (figure, role): {
            name: report[name][figure] for name in _SETS if figure in report.get(name, {})
        }
        for figure in FIGURES
        for role, report in (reports or {}).items()
    }
    columns = {head: values for head, values in measured.items() if values}
    card = ModelCard.from_template(
        ModelCardData(
            library_name="peft" if is_adapter(folder) else "transformers",
            base_model=base.removeprefix(HUB) if base and is_of_hub(base) else None,
            tags=["hamu", *(["machine-unlearning", method] if method else [])],
        ),
        template_path=str(Path(__file__).with_name("model_card.md.j2")),
        made="from nothing" if base is None else f"from `{short_name(base)}`",
        method=method,
        records=forget_records,
        columns=columns,
        sets=[name for name in _SETS if any(name in values for values in columns.values())],
        forgotten=goal and forgotten_words(goal),
        version=hamu.__version__,
    )
    (folder / "README.md").write_text(str(card), encoding="utf-8")
