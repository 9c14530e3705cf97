"""Report of ``horovod-fftcomp run --compare``: a table, and below it what it means."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Any

from horovod_fftcomp.cli.console import Table, make_console
from horovod_fftcomp.tools import environment
from horovod_fftcomp.tools.run.differences import Estimate, Jobs, difference, mean

DIFFER = "PARAMETERS DIFFER"
TIMES = ("encode", "wait", "decode")
_COLUMNS = (  # those that no row has are left out
    "ms a step", "time vs", "speed-up", "ranks", "MB sent", "ratio", "metric", "metric vs",
    *(f"{what} ms" for what in TIMES),
)  # fmt: skip
_UNSEEN = "no difference seen"

_Rows = Sequence[dict[str, Any]]


def print_comparison(rows: _Rows) -> None:
    """Print a table of the compressions, and below it failures and what the figures mean."""
    in_order = sorted(rows, key=itemgetter("place"))
    groups = [list(jobs) for _, jobs in itertools.groupby(in_order, itemgetter("place"))]
    none = next((jobs for jobs in groups if jobs[0]["recipe"].partition("(")[0] == "none"), None)
    times = [_by_round(jobs, _log_times) for jobs in groups]
    cells = [_cells(jobs, none or groups[0], none is not None, times) for jobs in groups]
    heads = [head for head in _COLUMNS if any(head in own for own in cells)]
    base = "vs none" if none else "vs the first"
    table = Table("compression", [head.replace("vs", base) for head in heads])
    for jobs, own in zip(groups, cells, strict=True):
        table.add_row(jobs[0]["recipe"], *(own.get(head, "-") for head in heads))
    console = make_console()
    console.print(table)
    for line in itertools.chain(_failed(rows), _meaning(groups, none), _load(rows)):
        console.print(line)


def _cells(jobs: _Rows, base: _Rows, is_none: bool, times: Sequence[Jobs]) -> dict[str, str]:
    """Return what is known of a compression, by ``_COLUMNS``; ``is_none``: the base is none.

    ``times``: those of all compressions, which tell how much jobs vary.
    """
    wrong = {row["trouble"] for row in jobs} - {""}
    cells = {"ranks": DIFFER if wrong == {DIFFER} else "failed" if wrong else "equal bits"}
    whole = _whole(jobs)
    found = [row["ranks"][0] for row in whole if row["ranks"] and row["ranks"][0].get("steps")]
    figures = {
        "ms a step": (".1f", [1e3 * one["step_s"] for one in found if one["step_s"]]),
        "MB sent": (".3f", [one["sent_nbytes"] / 1e6 for one in found]),
        "ratio": (".1f", [one["dense_nbytes"] / max(1, one["sent_nbytes"]) for one in found]),
        "metric": (".4g", [row["metric"] for row in whole if "metric" in row]),
    }
    figures |= {f"{what} ms": (".1f", [1e3 * one[f"{what}_s"] for one in found]) for what in TIMES}
    cells |= {key: _shown(mean(own), form) for key, (form, own) in figures.items() if own}
    if jobs is base:
        return cells | {"speed-up": "1"} if is_none and found else cells
    time = difference(_by_round(base, _log_times), _by_round(jobs, _log_times), times)
    if time is not None:
        ratio, half = math.exp(time.value), time.half and math.sinh(time.half)
        percent = Estimate(100 * (ratio - 1), half and 100 * ratio * half)
        cells["time vs"] = _UNSEEN if time.holds_zero else _shown(percent, "+.1f", " %")
        if is_none:
            cells["speed-up"] = _shown(Estimate(1 / ratio, half and half / ratio), ".2f")
    if (metric := difference(_by_round(base, _metric), _by_round(jobs, _metric))) is not None:
        unseen = f"{_UNSEEN},{_half(metric)}"
        cells["metric vs"] = unseen if metric.holds_zero else _shown(metric, "+.3g")
    return cells


def _whole(jobs: _Rows) -> _Rows:
    """Return the jobs that did not fail, or all if there are none."""
    return [row for row in jobs if not row["trouble"]] or jobs


def _by_round(jobs: _Rows, values: Callable[[dict[str, Any]], list[float]]) -> Jobs:
    """Return the values of each job that has some, by its round."""
    return {row["repeat"]: own for row in _whole(jobs) if (own := values(row))}


def _log_times(row: dict[str, Any]) -> list[float]:
    """Return logarithms, for a job on a busier machine is slower by a factor."""
    return [math.log(seconds) for one in row["ranks"][:1] for seconds in one.get("blocks_s", ())]


def _metric(row: dict[str, Any]) -> list[float]:
    return [row["metric"]] if "metric" in row else []


def _shown(estimate: Estimate, form: str, unit: str = "") -> str:
    return f"{estimate.value:{form}}{unit}{_half(estimate, unit)}"


def _half(estimate: Estimate, unit: str = "") -> str:
    half = estimate.half
    return "" if half is None else f" ±{half:{'.0f' if half >= 1 else '.1g'}}{unit}"


def _failed(rows: _Rows) -> Iterator[str]:
    for row in rows:
        if row["trouble"]:
            job = f", repeat {row['repeat']}" if row["repeat"] else ""
            yield f"{row['recipe']}{job}: {row['trouble']}."


def _meaning(groups: Sequence[_Rows], none: _Rows | None) -> Iterator[str]:
    yield "Of the first rank: median step time, means of bytes and other times."
    if not none:
        yield f"No speed-up: that is over none. Differences are from {groups[0][0]['recipe']}."
    if not any(row["repeat"] for jobs in groups for row in jobs):
        yield "One job of each: no ±, and what is noise is not known; --repeat 3 tells."
        return
    yield f"±: half of a 95 % interval; {_UNSEEN}: that of the difference holds 0."
    metrics = [[row["metric"] for row in jobs if "metric" in row] for jobs in groups]
    if any(len(own) > 1 and len(set(own)) == 1 for own in metrics):
        yield "Repeats have equal metrics: with --seed {repeat}, say, ± would tell of other seeds."


def _load(rows: _Rows) -> Iterator[str]:
    loads, cores = [row["load"] for row in rows], environment.n_cores()
    told = f"kept {sum(loads) / len(loads):.1f} of this machine's {cores} cores busy"
    yield f"Other processes {told}, {max(loads):.1f} during one of the jobs."
    if max(loads) > environment.MOST_LOAD * cores:
        yield "Warning: that is over a quarter of the cores; compare when they have no other work."
