"""Console and tables of the commands and examples."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.padding import Padding
from rich.progress import Progress, ProgressColumn, Task
from rich.table import Table as RichTable
from rich.text import Text

from horovod_fftcomp.tools.run.launcher import launched_rank

_WIDTH_OF_FILES = 120
_WIDTH_OF_RANKS = 64  # launchers put a prefix before each line, up to 16 characters long
_PROSE = 24  # cells of more columns are broken at spaces, and get at least this width


def make_console(quiet: bool = False) -> Console:
    """Return a console on standard output: as wide as COLUMNS, else as the terminal.

    Without a terminal it has 120 columns; a rank of a job, whose terminal is not the user's, 64.
    """
    launched = launched_rank() is not None
    width: int | None = _WIDTH_OF_RANKS if launched else _WIDTH_OF_FILES
    if "COLUMNS" in os.environ or (not launched and any(map(os.isatty, (0, 1, 2)))):
        width = None
    is_terminal = not launched and sys.stdout.isatty()
    return Console(width=width, force_terminal=is_terminal, quiet=quiet, highlight=False)


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


class _TimeLeft(ProgressColumn):
    """Time left at the speed of the stages that have ended; empty before and beyond it."""

    def render(self, task: Task) -> Text:
        if not task.completed:
            return Text()
        expected_s = task.fields["done_s"] / task.completed * (task.total or 0.0)
        left_s = expected_s - (task.elapsed or 0.0)
        return Text(f"about {left_s:.0f} s left" if left_s > 0 else "")


class Table:
    """Table of which no character is lost on a console of any width.

    Cells of prose are broken at spaces. If the table is wider than the console, its columns of
    numbers continue in further blocks, each with the first column; a table that has a column of
    prose becomes lines instead, an entry for each row.
    """

    def __init__(self, first: str, columns: Iterable[str], title: str = "") -> None:
        self.heads = [first, *columns]
        self.title = title
        self.rows: list[list[Text]] = []
        self._last_of_sections: set[int] = set()

    def add_row(self, *cells: str | Text, end_section: bool = False) -> None:
        """Add a row of as many cells as there are columns; ``end_section``: a line follows it."""
        self.rows.append([Text(cell) if isinstance(cell, str) else cell for cell in cells])
        if end_section:
            self._last_of_sections.add(len(self.rows) - 1)

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        if self.title:
            yield Text(self.title, "italic")
        yield from self._blocks(options.max_width) or self._entries()

    def _blocks(self, width: int) -> list[RenderableType]:
        """Return the table in as few blocks as fit; none if it has to become lines."""
        blocks: list[RenderableType] = []
        rest = list(range(1, len(self.heads)))
        has_prose = any(map(self._is_prose, rest))
        while rest or not blocks:
            sizes = [len(rest)] if has_prose else range(len(rest), 0, -1)
            fits = ((n, self._fitted([0, *rest[:n]], width)) for n in sizes)
            n, widths = next((found for found in fits if found[1]), (0, []))
            if not widths:
                return []
            blocks += [Text()] if blocks else []
            blocks.append(self._drawn([0, *rest[:n]], widths))
            rest = rest[n:]
        return blocks

    def _texts(self, column: int) -> list[str]:
        return [self.heads[column], *(row[column].plain for row in self.rows)]

    def _width(self, column: int) -> int:
        return max(len(line) for text in self._texts(column) for line in text.split("\n"))

    def _is_prose(self, column: int) -> bool:
        return self._width(column) > _PROSE

    def _fitted(self, columns: Sequence[int], width: int) -> list[int]:
        """Return the widths of ``columns`` if they fit, the widest reduced; else an empty list."""
        full = [self._width(column) for column in columns]
        words = [max(map(len, " ".join(self._texts(column)).split(" "))) for column in columns]
        least = [min(w, max(word, _PROSE)) for w, word in zip(full, words, strict=True)]
        room = width - 2 * (len(columns) - 1)

        def capped(cap: int) -> list[int]:
            return [min(most, max(low, cap)) for most, low in zip(full, least, strict=True)]

        return next((capped(cap) for cap in range(width, -1, -1) if sum(capped(cap)) <= room), [])

    def _drawn(self, columns: Sequence[int], widths: Sequence[int]) -> RichTable:
        table = RichTable(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
        table.pad_edge = False
        for column, width in zip(columns, widths, strict=True):
            is_number = any(text[:1].isdigit() for text in self._texts(column)[1:])
            is_left = column == 0 or self._is_prose(column) or not is_number
            justify: Literal["left", "right"] = "left" if is_left else "right"
            table.add_column(Text(self.heads[column]), width=width, justify=justify)
        for number, row in enumerate(self.rows):
            ends = number in self._last_of_sections
            table.add_row(*(row[column] for column in columns), end_section=ends)
        return table

    def _entries(self) -> Iterator[RenderableType]:
        """Yield the rows as lines: the name, then a line of each prose and one of all else."""
        heads = [" ".join(head.split()) for head in self.heads]
        for row in self.rows:
            cells = [(column, cell) for column, cell in enumerate(row) if column and cell]
            unnamed = (cell for column, cell in cells if not heads[column])
            yield Text("  ").join([Text.assemble(row[0], style="bold"), *unnamed])
            lines: list[str] = []
            rest: list[str] = []
            for column, cell in cells:
                told = f"{heads[column]}: {cell}"
                if heads[column]:
                    (lines if self._is_prose(column) else rest).append(told)
            lines += ["; ".join(rest)] if rest else []
            yield from (Padding.indent(Text(line), 2) for line in lines)


def to_paste(command: str, width: int) -> str:
    """Return a command for a shell, or a call in Python, in lines of at most ``width``."""
    lines = textwrap.wrap(command, width - 6, break_long_words=False, break_on_hyphens=False)
    return "    " + " \\\n      ".join(lines)


def in_ms(seconds: float | None) -> str:
    """Return milliseconds with one digit after the point; "-" for None."""
    return "-" if seconds is None else f"{1e3 * seconds:.1f}"
