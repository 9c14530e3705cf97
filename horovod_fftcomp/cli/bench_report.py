"""Report of ``bench``: tables, lines of text and JSON values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from horovod_fftcomp.cli.arguments import RecipeChoice
from horovod_fftcomp.cli.console import Table
from horovod_fftcomp.tools.bench import Measurement, added


class Result(NamedTuple):
    """Measurements of one tensor, or of all tensors of a file: of recipes and of any peers."""

    title: str
    ours: list[Measurement]
    peers: list[Measurement]


def total(results: Sequence[Result], title: str) -> Result:
    """Return the sum over several tensors."""
    rows = ([*zip(*(result[n] for result in results), strict=True)] for n in (1, 2))
    return Result(title, *([*map(added, own)] for own in rows))


def table(result: Result) -> Table:
    """Return the table of one tensor or file."""
    first = result.ours[0]
    speed = 4 * first.numel / first.memcpy_s / 1e9
    columns = (
        "encode\nms (x)", "with EF\nms (x)", "decode 2\nms (x)", "GB/s", "ratio",
        "bits/pos.\n(entropy)", "rel. error\n(with EF)", "kept\nenergy",
    )  # fmt: skip
    title = f"{result.title}: 1 memcpy = {_short(1e3 * first.memcpy_s)} ms = {_short(speed)} GB/s"
    table = Table("compression", columns, title)
    for rows in (result.ours, result.peers):
        for one in rows:
            table.add_row(*_cells(one), end_section=one is rows[-1])
    return table


def _cells(one: Measurement) -> list[str]:
    def time(seconds: float | None) -> str:
        if seconds is None:
            return "-"
        return f"{_short(1e3 * seconds)} ({_short(seconds / one.memcpy_s)})"

    def pair(first: float | None, second: float | None, form: str) -> str:
        if first is None:
            return "-"
        return f"{first:{form}}" + ("" if second is None else f" ({second:{form}})")

    return [
        one.label,
        time(one.encode_s),
        time(one.feedback_s),
        time(one.decode_s),
        _short(4 * one.numel / (one.feedback_s or one.encode_s) / 1e9),
        _short(one.ratio),
        pair(one.bits_per_position, one.entropy_per_position, ".2f"),
        pair(one.relative_error, one.feedback_relative_error, ".2g"),
        f"{one.kept_energy:.3f}",
    ]


def _short(number: float) -> str:
    """Return ``number`` to three digits, without an exponent, which would be hard to compare."""
    rounded = float(f"{number:.3g}")
    digits = max(0, 2 - math.floor(math.log10(rounded))) if rounded > 0 else 0
    return f"{number:.{min(digits, 3)}f}"


def as_json(result: Result, choices: Sequence[RecipeChoice]) -> dict[str, object]:
    """Return every number of ``result`` as JSON values."""
    ours = [
        {"recipe": choice.name, "options": choice.options} | one.as_row()
        for choice, one in zip(choices, result.ours, strict=True)
    ]
    theirs = {"peers": [peer.as_row() for peer in result.peers]} if result.peers else {}
    return {"title": result.title, "recipes": ours, **theirs}
