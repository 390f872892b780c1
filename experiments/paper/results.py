"""The result of an experiment as its JSON file holds it: made, or made anew from the figures of an earlier one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.paper.experiment import Claim, Experiment, Figures
from hamu.errors import HamuError
from hamu.files import plain


def result_of(one: Experiment, figures: Figures) -> dict[str, Any]:
    """The figures of an experiment with all that is said of them, as JSON holds it."""
    figures = plain(figures)
    claims: list[Claim] = one.claims(figures)
    named = {
        "name": one.name,
        "reference": one.reference,
        "title": one.title,
        "task": one.task,
        "about": one.about,
    }
    trained: Figures = {"scale": None, "start": None, "runs": {}, "failed": {}, "measured": None}
    found: dict[str, Any] = plain(
        named
        | trained
        | {
            "claims": [claim.as_json() for claim in claims],
            "table": one.table(figures),
            "figures": figures,
        }
    )
    return found


def refreshed_result(one: Experiment, result: Mapping[str, Any]) -> dict[str, Any]:
    """An earlier result, with what this version says of its figures.

    Raises:
        HamuError: if its figures are not those that this version makes.
    """
    try:
        kept = {key: result[key] for key in ("scale", "start", "runs", "failed")}
        return result_of(one, result["figures"]) | kept | {"measured": result.get("measured")}
    except (KeyError, TypeError, IndexError) as error:
        raise HamuError(
            f"{one.name}.json has other figures than this version makes ({type(error).__name__}: {error}); make them "
            f"anew without --redraw"
        ) from error
