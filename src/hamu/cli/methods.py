"""`hamu methods`: the table of methods."""

from __future__ import annotations

from rich.console import Console

from hamu.cli.tables import plain_table
from hamu.core.methods import method_rows
from hamu.errors import HamuError


def run(argv: list[str], console: Console) -> int:
    """Print the methods and what they are made of."""
    if argv and argv != ["--help"] and argv != ["-h"]:
        raise HamuError(f"methods takes no options; got {' '.join(argv)}")
    table = plain_table("method", "retain objective", "forget objective", "what it does", "source")
    for row in method_rows():
        retain, forget = row.retain_objective or "-", row.forget_objective or "-"
        table.add_row(row.name, retain, forget, row.summary, row.source)
    console.print(table)
    console.print(
        "The retain objective is lowered, the forget objective raised. Choose one with --method."
    )
    return 0
