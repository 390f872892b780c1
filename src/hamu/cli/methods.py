"""`hamu methods`: the table of methods."""

from __future__ import annotations

from rich.console import Console

from hamu.core.methods import method_classes
from hamu.errors import HamuError
from hamu.report.tables import plain_table


def run(argv: list[str], console: Console) -> int:
    """Print the methods and what they are made of."""
    if argv and argv != ["--help"] and argv != ["-h"]:
        raise HamuError(f"methods takes no options; got {' '.join(argv)}")
    table = plain_table("method", "retain objective", "forget objective", "what it does", "source")
    for name, cls in method_classes().items():
        table.add_row(
            name, cls.retain_objective or "-", cls.forget_objective or "-", cls.summary, cls.source
        )
    console.print(table)
    console.print(
        "The retain objective is lowered, the forget objective raised. Choose one with --method."
    )
    return 0
