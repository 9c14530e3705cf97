"""Finds out which rank keeps the others waiting, from what the ranks report of themselves. Pure.

Every rank of a compressor has to take part in every step. A rank that has begun a step while
another has not can only wait for it, so ranks' positions alone tell who is late.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

_SHOWN_RANKS, _SHOWN_NAMES = 8, 4
# Two waits that can never end together are told this early: no answer can still be on its way.
CLASH_S = 4.0


class Progress(NamedTuple):
    """How far one rank is.

    ``step``: the step that it began last, counted from 0. ``handed`` and ``returned``: how many of
    its gradients were taken and how many sums given back. ``inside``: whether the step is under
    way; ``busy``: whether this rank itself encodes or decodes. ``call``: a call outside of steps in
    which all ranks have to take part, such as ``set_density()``. ``doing``: what is under way, in
    words.
    """

    step: int
    handed: int
    returned: int
    inside: bool
    busy: bool = False
    call: str = ""
    doing: str = ""


class Report(NamedTuple):
    """What one rank tells the first one: its progress, and since when nothing has changed.

    ``waits``: whether its main thread is inside Horovod or this package; ``where``: the line that
    its main thread is at. ``missing``: numbers of tensors not handed in, as ranges.
    """

    progress: Progress
    quiet_s: float
    waits: bool = False
    where: str = ""
    missing: str = ""

    def pack(self) -> list[Any]:
        """Return the report as JSON values."""
        return [list(self.progress), *self[1:]]

    @staticmethod
    def unpack(values: Any) -> Report:
        """Return what ``pack`` made; ValueError or TypeError for anything else."""
        progress, quiet_s, waits, where, missing = values
        return Report(Progress(*progress), float(quiet_s), bool(waits), str(where), str(missing))

    @property
    def is_waiting(self) -> bool:
        """Whether others are needed before this rank can go on."""
        progress = self.progress
        return (progress.inside or bool(progress.call)) and not progress.busy

    @property
    def position(self) -> tuple[int, int, int, bool]:
        """Steps, gradients and sums so far, and whether it waits: smaller on a rank behind."""
        waits = self.waits and not self.progress.busy
        return (*self.progress[:3], bool(self.progress.call) or waits)


def diagnose(
    reports: Mapping[int, Report],
    silent: Sequence[int],
    unheard: Sequence[int],
    names: Sequence[str],
    timeout_s: float,
) -> str:
    """Return what keeps the ranks from going on, in words; "" if nothing does, or not long enough.

    ``reports`` by rank; not among those are ``silent`` ranks, which have stopped reporting, and
    ``unheard`` ones, which never did. ``names``: all tensors'.
    """
    if clash := _clash(reports):
        return clash
    waiting = {rank: r for rank, r in reports.items() if r.is_waiting and r.quiet_s >= timeout_s}
    if not waiting:
        return ""
    first = max(reports.values(), key=lambda report: report.position)
    least = min(report.position for report in reports.values())
    behind = [r for r in sorted(reports) if reports[r].position == least != first.position]
    late = sorted({*silent, *behind}) or sorted(unheard)
    if not behind and all(r.progress.returned >= r.progress.handed for r in waiting.values()):
        return ""  # each may be busy with something of its own
    longest = max(report.quiet_s for report in waiting.values())
    parts = [f"no progress for {longest:.0f} s in {_what(first, waiting)}."]
    parts += [_described(rank, reports.get(rank), first.progress) for rank in late[:_SHOWN_RANKS]]
    if not late:
        parts.append(
            "All ranks wait in the same place: the network is stuck, or too slow for this limit."
        )
    others = [rank for rank in sorted(reports) if reports[rank].is_waiting and rank not in late]
    if late and others:
        wanted = _wanted(reports, late, first, names)
        parts.append(f"{_ranks(others).capitalize()} {_wait(others)} for {wanted}.")
    return " ".join(parts)


def _clash(reports: Mapping[int, Report]) -> str:
    """Return the message on ranks that wait for each other in different places, if there are."""
    quiet = {rank: r for rank, r in reports.items() if r.is_waiting and r.quiet_s >= CLASH_S}
    callers = [rank for rank, report in quiet.items() if report.progress.call]
    if not callers:
        return ""
    caller = quiet[callers[0]].progress
    call = caller.call
    training = [
        rank
        for rank, report in quiet.items()
        if not report.progress.call and report.progress.inside and report.progress[:2] > caller[:2]
    ]
    if not training:
        return ""
    return (
        f"{_ranks(callers).capitalize()} {_wait(callers)} in {call} for all ranks, but "
        f"{_ranks(training)} did not call it and began step {quiet[training[0]].progress.step} "
        "instead. "
        f"Call {call} on every rank, between the same two steps."
    )


def _what(first: Report, waiting: Mapping[int, Report]) -> str:
    """Return what the ranks are in the midst of."""
    calls = {report.progress.call for report in waiting.values() if report.progress.call}
    return min(calls) if calls else f"step {first.progress.step}"


def _described(rank: int, report: Report | None, first: Progress) -> str:
    """Return what is known of a rank that is late."""
    if report is None:
        return (
            f"Rank {rank} is late: it does not answer at all; its process has been stopped or "
            "killed, its host cannot be reached (by UDP), or its interpreter is held by a call "
            "that never returns."
        )
    progress = report.progress
    place = f" Its main thread is at {report.where}." if report.where else ""
    if first.call and not progress.call:
        return f"Rank {rank} is late: it has not called {first.call}.{place}"
    if not progress.inside or progress.step < first.step:
        return f"Rank {rank} is late: it has not begun step {first.step}.{place}"
    handed = "all" if not report.missing else str(progress.handed)
    return (
        f"Rank {rank} is late: it has handed in {handed} of its gradients of step "
        f"{progress.step} and taken back {progress.returned}.{place}"
    )


def _wanted(
    reports: Mapping[int, Report], late: Sequence[int], first: Report, names: Sequence[str]
) -> str:
    """Return which tensors are waited for."""
    if first.progress.call:
        return f"it in {first.progress.call}"
    begun = [
        reports[rank]
        for rank in late
        if rank in reports
        and reports[rank].progress.inside
        and reports[rank].progress.step == first.progress.step
    ]
    missing: Iterable[int] = range(len(names))
    if begun and len(begun) == len(late):
        missing = sorted({n for report in begun for n in expanded(report.missing)})
    listed = [repr(names[number]) for number in missing if number < len(names)]
    if not listed:
        return f"the sums of step {first.progress.step}"
    more = f" and {len(listed) - _SHOWN_NAMES} more" if len(listed) > _SHOWN_NAMES else ""
    return f"gradients of {', '.join(listed[:_SHOWN_NAMES])}{more}"


def ranges(numbers: Iterable[int], most: int = 200) -> str:
    """Return ascending numbers as text of at most ``most`` characters: ``0-37,40``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = ",".join(f"{a}-{b}" if b > a else f"{a}" for a, b in runs)
    return text if len(text) <= most else text[:most].rpartition(",")[0]


def expanded(text: str) -> list[int]:
    """Return the numbers of ``ranges``.

    >>> expanded(ranges([0, 1, 2, 5]))
    [0, 1, 2, 5]
    """
    numbers: list[int] = []
    for run in filter(None, text.split(",")):
        begin, _, end = run.partition("-")
        numbers.extend(range(int(begin), int(end or begin) + 1))
    return numbers


def _ranks(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - _SHOWN_RANKS} more" if len(ranks) > _SHOWN_RANKS else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:_SHOWN_RANKS]))}{more}"


def _wait(ranks: Sequence[int]) -> str:
    return "waits" if len(ranks) == 1 else "wait"
