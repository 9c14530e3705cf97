"""Where commands print."""

from __future__ import annotations

import os
import sys

from rich.console import Console

_WIDTH_OF_FILES = 120


def make_console() -> Console:
    """Return standard output, as wide as the terminal; files and pipes have room for tables."""
    is_free = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(width=_WIDTH_OF_FILES if is_free else None, highlight=False)
