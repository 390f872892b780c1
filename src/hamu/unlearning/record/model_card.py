"""README.md of a saved model, for people and for the hub: how it was made and what was measured, never contents."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

import hamu
from hamu.models.loading import is_adapter
from hamu.unlearning.goal_report import forgotten_words
from hamu.unlearning.record.inputs import short_name

_FIGURES = ("loss", "accuracy", "probability")
_TEMPLATE = """---
{{ card_data }}
---

# {{ title }}

{{ origin }}
{% if measured %}

## Measured

| records | {{ columns | join(" | ") }} |
|---|{{ "---|" * columns | length }}
{% for name, values in measured.items() -%}
| {{ name }} | {{ values | join(" | ") }} |
{% endfor -%}
{% endif %}
{% if forgotten %}

{{ forgotten }} This is approximate unlearning, without a certificate that the influence of these records is gone;
`record.md` of the run says what was measured and what that proves.
{% endif %}

Made with hamu {{ version }}.
"""


def write_model_card(
    folder: Path,
    *,
    base: str | None,
    method: str | None = None,
    forget_records: int | None = None,
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
    name = None if base is None else short_name(base)
    on_hub = base is not None and base.startswith("hub:")
    found = ModelCardData(
        library_name="peft" if is_adapter(folder) else "transformers",
        base_model=name.removeprefix("hub:") if name and on_hub else None,
        tags=["hamu", *(["machine-unlearning", method] if method else [])],
    )
    made = f"from `{name}`" if name else "from nothing"
    origin = f"Trained {made}."
    if method:
        origin = f"{forget_records or 0:,} records were unlearned {made} by the method `{method}`."
    columns = {
        f"{figure} {role}".strip(): (role, figure)
        for figure in _FIGURES
        for role, report in (reports or {}).items()
        if any(figure in one for one in _sets(report).values())
    }
    sets = dict.fromkeys(name for report in (reports or {}).values() for name in _sets(report))
    card = ModelCard.from_template(
        found,
        template_str=_TEMPLATE,
        title="Unlearned model" if method else "Trained model",
        origin=origin,
        columns=list(columns),
        measured={
            name: [_figure(_sets(reports[role]).get(name, {}).get(figure)) for role, figure in columns.values()]
            for name in sets
        } if reports else {},
        forgotten=f"{forgotten_words(goal)}." if goal else "Nothing told when a record counts as forgotten." * bool(method),
        version=hamu.__version__,
    )  # fmt: skip
    path = folder / "README.md"
    path.write_text(str(card), encoding="utf-8")
    return path


def _sets(report: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    names = ("train", "retain", "forget", "test")
    return {name: report[name] for name in names if isinstance(report.get(name), Mapping)}


def _figure(value: float | None) -> str:
    return "-" if value is None else json.dumps(float(f"{value:.4g}"))
