"""Where commands print."""

from __future__ import annotations

import os
import sys

from rich.console import Console

_WIDTH_OF_FILES = 120


def make_console(is_terminal: bool | None = None) -> Console:
    """Return standard output, as wide as the terminal; files and pipes have room for tables.

    ``is_terminal``: None to find out. A launcher may offer ranks a terminal that nobody sees.
    """
    if is_terminal is None:
        is_terminal = sys.stdout.isatty()
    width = None if is_terminal or "COLUMNS" in os.environ else _WIDTH_OF_FILES
    return Console(width=width, force_terminal=is_terminal, highlight=False)
