"""Report of ``horovod-fftcomp run --compare``: a table, and below it what went wrong."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import Any

from rich.text import Text

from horovod_fftcomp.cli.console import Table, in_ms, make_console

DIFFER = "PARAMETERS DIFFER"
TIMES = ("encode", "wait", "decode")
_COLUMNS = (
    "ms a step", "speed-up", "MB sent", "ratio", "metric", "encode ms", "wait ms", "decode ms",
    "ranks",
)  # fmt: skip


def print_comparison(rows: Sequence[dict[str, Any]]) -> None:
    """Print a table of the compressions, and below it the failures of their jobs."""
    has_metric, first_s = any("metric" in row for row in rows), None
    names = [name for name in _COLUMNS if has_metric or name != "metric"]
    table = Table("compression", names)
    for (_, label), jobs in itertools.groupby(rows, lambda row: (row["place"], row["recipe"])):
        group = list(jobs)
        wrong = {row["trouble"] for row in group} - {""}
        ranks = DIFFER if wrong == {DIFFER} else "failed" if wrong else "equal bits"
        group = [row for row in group if not row["trouble"]] or group  # means are of whole jobs
        found = [row["ranks"][0] for row in group if row["ranks"] and row["ranks"][0].get("steps")]
        metric = [_mean([row["metric"] for row in group if "metric" in row], ".4g")] * has_metric
        if not found:
            table.add_row(label, *["-"] * 4, *metric, *["-"] * 3, ranks)
            continue
        steps_s = [one["step_s"] for one in found if one["step_s"]]
        step_s = statistics.fmean(steps_s) if steps_s else None
        sent = statistics.fmean(one["sent_nbytes"] for one in found)
        first_s = first_s or step_s
        table.add_row(
            label,
            _mean([1e3 * taken_s for taken_s in steps_s], ".1f"),
            f"{first_s / step_s:.2f}" if first_s and step_s else "-",
            f"{sent / 1e6:.3f}",
            f"{found[0]['dense_nbytes'] / sent:.1f}",
            *metric,
            *(in_ms(statistics.fmean(one[f"{what}_s"] for one in found)) for what in TIMES),
            ranks,
        )
    console = make_console()
    console.print(table)
    for row in rows:
        if row["trouble"]:
            job = f", repeat {row['repeat']}" if row.get("repeat") else ""
            console.print(Text(f"{row['recipe']}{job}: {row['trouble']}."))
    console.print(Text("Of the first rank: median step time, means of bytes and other times."))
    if any(row.get("repeat") for row in rows):
        console.print(Text("Of several jobs: mean ± standard deviation."))


def _mean(values: Sequence[float], form: str) -> str:
    """Return the mean, and of several values their standard deviation; "-" for none."""
    if not values:
        return "-"
    spread = ""
    if len(values) > 1:  # ``statistics.stdev`` takes finite values only
        finite = all(map(math.isfinite, values))
        spread = f" ±{statistics.stdev(values) if finite else math.nan:.2g}"
    return f"{statistics.fmean(values):{form}}{spread}"
