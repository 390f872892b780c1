"""The lines of Figure 8 from the runs that are finished, while `hamu reproduce figure-8` is still at the others.

    python examples/fit_of_runs.py runs/all/work/runs --output docs/results/figure-8-all.json

Of each variant and kind of blocks whose runs are all there: the gains by constraint, and the line through the origin.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from hamu.paper.constraints import CONSTRAINTS, line_through_origin
from hamu.reporting.trajectories import gains_of

KINDS = {"model": "global"}  # by the setting `blocks`; without it they are layer-wise
GAINED = {"hamu-q": "forget", "hamu-u": "retain"}  # the side of which a change is demanded


def gains_in(folder: Path) -> dict[str, dict[float, float]]:
    """By kind and constraint."""
    found: dict[str, dict[float, float]] = {}
    for record in sorted(folder.glob("*/record.json")):
        settings = yaml.safe_load((record.parent / "config.yaml").read_text())
        if settings["method"] in GAINED and settings.get("constraint") in CONSTRAINTS:
            kind = f"{settings['method']} {KINDS.get(settings.get('blocks', ''), 'layer-wise')}"
            evaluation = json.loads((record.parent / "evaluation.json").read_text())
            gain = getattr(gains_of(evaluation), GAINED[settings["method"]])
            found.setdefault(kind, {})[settings["constraint"]] = gain
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    lines: dict[str, Any] = {}
    for kind, gains in gains_in(args.runs).items():
        if gains.keys() == set(CONSTRAINTS):
            ordered = [gains[c] for c in CONSTRAINTS]
            lines[kind] = {"gain": ordered, **line_through_origin(CONSTRAINTS, ordered)}
        else:
            Console().print(f"{kind}: {len(gains)} of {len(CONSTRAINTS)} runs are finished")
    for kind, line in lines.items():
        Console().print(f"{kind}: R² {line['r_squared']:.4f}, uncentred {line['r_squared_uncentred']:.4f}")
    if args.output:
        args.output.write_text(json.dumps({"constraint": list(CONSTRAINTS), "lines": lines}, indent=2) + "\n")


if __name__ == "__main__":
    main()
