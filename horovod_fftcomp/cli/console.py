"""Console, tables and files of the commands and examples."""

from __future__ import annotations

import itertools
import json
import os
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import Progress, ProgressColumn, Task
from rich.table import Table as RichTable
from rich.text import Text

from horovod_fftcomp.tools.run.launcher import is_torchrun, launched_rank

_WIDTH_OF_FILES = 120
_WIDTH_OF_RANKS = 64  # launchers put a prefix before each line, up to 16 characters long
_PROSE = 24  # columns of wider cells may become as narrow: these are broken at spaces


def make_console(quiet: bool = False) -> Console:
    """Return a console on standard output: as wide as COLUMNS, else as the terminal.

    Without a terminal it has 120 columns; a rank of a job, whose terminal is not the user's, 64
    under a launcher that puts a prefix before each line, as all do but torchrun.
    """
    launched = launched_rank() is not None and not is_torchrun()
    width: int | None = _WIDTH_OF_RANKS if launched else _WIDTH_OF_FILES
    if "COLUMNS" in os.environ or (not launched and any(map(os.isatty, (0, 1, 2)))):
        width = None
    is_terminal = not launched and sys.stdout.isatty()
    as_it_is: dict[str, Any] = dict.fromkeys(("highlight", "markup", "emoji"), False)
    return Console(width=width, force_terminal=is_terminal, quiet=quiet, **as_it_is)


def progress_bar(*columns: str | ProgressColumn) -> Progress:
    """Return a progress bar on standard error, which shows nothing unless that is a terminal."""
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


class Stages:
    """Progress bar of stages that take known shares of the time, with the time left."""

    def __init__(self, shares: float) -> None:
        self.bar = progress_bar(*Progress.get_default_columns()[:-1], _TimeLeft())
        self.bar.add_task("", total=shares, share=0.0, done_s=0.0)

    def begin(self, what: str, share: float) -> None:
        """End the stage before and begin one."""
        [task] = self.bar.tasks
        text, ended, now_s = f"measuring {what}", task.fields["share"], task.elapsed
        self.bar.update(task.id, description=text, advance=ended, share=share, done_s=now_s)
        self.bar.refresh()  # a short stage is seen too


class _TimeLeft(ProgressColumn):
    """Time left at the speed of the stages that have ended; empty before and beyond it."""

    def render(self, task: Task) -> Text:
        if not task.completed:
            return Text()
        expected_s = task.fields["done_s"] / task.completed * (task.total or 0.0)
        left_s = expected_s - (task.elapsed or 0.0)
        return Text(f"about {left_s:.0f} s left" if left_s > 0 else "")


class Table:
    """Table that continues in further blocks, each with the first column, if it is too wide.

    Cells of prose are broken at spaces, within words that are too long for a line, numbers nowhere.
    """

    def __init__(self, first: str, columns: Iterable[str], title: str = "") -> None:
        self.heads = [first, *columns]
        self.title = title
        self.rows: list[list[Text]] = []
        self._ends: list[bool] = []

    def add_row(self, *cells: str | Text, end_section: bool = False) -> None:
        """Add a row of as many cells as there are columns; ``end_section``: a line follows it."""
        self.rows.append([Text(cell) if isinstance(cell, str) else cell for cell in cells])
        self._ends.append(end_section)

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        if self.title:
            yield Text(self.title, "italic")
        rest = range(1, len(self.heads))
        while rest:
            widths = itertools.accumulate(2 + min(self._width(n), _PROSE) for n in (0, *rest))
            fitting = max(1, sum(width <= options.max_width + 2 for width in widths) - 1)
            yield self._block((0, *rest[:fitting]), options.max_width)
            rest = rest[fitting:]
            yield from [Text()] if rest else []

    def _texts(self, column: int) -> list[str]:
        return [self.heads[column], *(row[column].plain for row in self.rows)]

    def _width(self, column: int) -> int:
        return max(len(line) for text in self._texts(column) for line in text.split("\n"))

    def _longest(self, column: int) -> int:
        return max(map(len, " ".join(self._texts(column)).split()), default=0)

    def _block(self, columns: Sequence[int], max_width: int) -> RichTable:
        table = RichTable(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
        table.pad_edge = False
        room = max_width + 2 - sum(2 + min(self._width(column), _PROSE) for column in columns)
        for column in columns:
            is_prose = (width := self._width(column)) > _PROSE
            is_number = any(text[:1].isdigit() for text in self._texts(column)[1:])
            table.add_column(
                Text(self.heads[column]),
                justify="right" if column and is_number and not is_prose else "left",
                width=None if is_prose else width,
                min_width=min(_PROSE + max(0, room), self._longest(column)) if is_prose else None,
                overflow="fold",
            )
        for row, ends in zip(self.rows, self._ends, strict=True):
            table.add_row(*(row[column] for column in columns), end_section=ends)
        return table


def in_lines(text: str, width: int) -> str:
    """Return ``text`` in lines of at most ``width`` columns; words are never broken."""
    wrapper = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
    return "\n".join(map(wrapper.fill, text.splitlines()))


def to_paste(command: str, width: int) -> str:
    """Return a command for a shell, or a call in Python, in lines of at most ``width``."""
    return "    " + in_lines(command, width - 6).replace("\n", " \\\n      ")


def write_json(path: Path, content: object) -> None:
    """Write JSON values to a file."""
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def in_ms(seconds: float | None) -> str:
    """Return milliseconds with one digit after the point; "-" for None."""
    return "-" if seconds is None else f"{1e3 * seconds:.1f}"
