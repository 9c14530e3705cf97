"""Where commands print."""

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
    """Return standard output, as wide as the terminal; files and pipes have room for tables.

    ``is_terminal``: None to find out. A launcher may offer ranks a terminal that nobody sees.
    """
    if is_terminal is None:
        is_terminal = sys.stdout.isatty()
    width = None if is_terminal or "COLUMNS" in os.environ else _WIDTH_OF_FILES
    return Console(width=width, force_terminal=is_terminal, highlight=False)


def make_table(first: str, columns: Iterable[str], title: str = "") -> Table:
    """Return a table of numbers without rows: a column of names, called ``first``, and others."""
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
