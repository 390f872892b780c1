"""Tables on the screen."""

from __future__ import annotations

from rich import box
from rich.table import Table


def plain_table(*columns: str, right: tuple[int, ...] = ()) -> Table:
    """A table with a line under its head and nothing else."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number in right else "left")
    return table
