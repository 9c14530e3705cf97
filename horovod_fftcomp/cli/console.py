"""Console and tables of the commands."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

_WIDTH_OF_FILES = 120


def make_console(is_terminal: bool | None = None) -> Console:
    """Return a console on standard output: as wide as the terminal, else 120 columns.

    ``is_terminal``: None to find out. Under a launcher a rank's terminal is not the user's.
    """
    if is_terminal is None:
        is_terminal = sys.stdout.isatty()
    width = None if is_terminal or "COLUMNS" in os.environ else _WIDTH_OF_FILES
    return Console(width=width, force_terminal=is_terminal, highlight=False)


def make_table(first: str, columns: Iterable[str], title: str = "") -> Table:
    """Return an empty table: a column of names, headed ``first``, and right-aligned columns."""
    table = Table(
        title=Text(title) if title else None,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    table.add_column(first, min_width=10, overflow="fold")  # options may be long
    for column in columns:
        table.add_column(column, justify="right", overflow="fold")
    return table


def in_ms(seconds: float | None) -> str:
    """Return milliseconds with one digit after the point; "-" for None."""
    return "-" if seconds is None else f"{1e3 * seconds:.1f}"
