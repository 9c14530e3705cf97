"""Diagnosis of stalls: which rank is late, computed from the ranks' progress reports.

Pure functions. Every rank of a compressor takes part in every step, so a rank that has begun a
step can only wait for ranks that have not: their positions are enough to find the late ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from horovod_fftcomp.errors import list_ranks, listed

_SHOWN_RANKS, _SHOWN_NAMES = 8, 4
# Seconds after which ranks that wait for each other in different calls are reported: by then no
# answer can still be under way.
CLASH_S = 4.0


def no_answer(what: str, timeout_s: float) -> str:
    """Return the error message for an exchange in which some rank does not take part."""
    return (
        f"{what} got no answer from all ranks in {timeout_s:.0f} s: a rank has died, runs without "
        "this compressor, skips this exchange, or made its compressors in another order. Look at "
        "the other ranks' output; if one is only slow, raise timeout_s"
    )


class Progress(NamedTuple):
    """Progress of one rank.

    ``step``: number of the last step that it began, from 0. ``handed`` and ``returned``: number of
    gradients that it passed to the compressor and of sums that it got back in that step.
    ``inside``: whether the step is under way; ``busy``: whether this rank is encoding or decoding.
    ``call``: name of a call between steps in which all ranks have to take part, such as
    ``set_density()``. ``doing``: description of what is under way.
    """

    step: int
    handed: int
    returned: int
    inside: bool
    busy: bool = False
    call: str = ""
    doing: str = ""


class Status(NamedTuple):
    """Status that a rank sends to the first rank: its progress and the seconds since it changed.

    ``waits``: whether its main thread is inside Horovod or this package; ``where``: the line that
    its main thread is at. ``missing``: numbers of the tensors without a gradient yet, as
    ``ranges``.
    """

    progress: Progress
    quiet_s: float
    waits: bool = False
    where: str = ""
    missing: str = ""

    @staticmethod
    def unpack(values: Any) -> Status:
        """Return the report that JSON has made lists of; ValueError or TypeError for others."""
        progress, quiet_s, waits, where, missing = values
        return Status(Progress(*progress), float(quiet_s), bool(waits), str(where), str(missing))

    @property
    def is_waiting(self) -> bool:
        """Whether this rank needs others to continue."""
        progress = self.progress
        return (progress.inside or bool(progress.call)) and not progress.busy

    @property
    def may_have_ended(self) -> bool:
        """Whether it has all sums of its gradients, as in a step that Horovod exchanges alone.

        TensorFlow does not tell the end of such a step, so nothing follows from its age.
        """
        return 0 < self.progress.handed <= self.progress.returned

    @property
    def position(self) -> tuple[int, int, int, bool]:
        """Sort key: step, gradients, sums, whether it waits; smaller for ranks behind."""
        waits = self.waits and not self.progress.busy and not self.may_have_ended
        return (*self.progress[:3], bool(self.progress.call) or waits)


def diagnose(
    reports: Mapping[int, Status],
    silent: Sequence[int],
    unheard: Sequence[int],
    names: Sequence[str],
    timeout_s: float,
) -> str:
    """Return a message that explains why the ranks wait; "" if none has waited ``timeout_s``.

    ``reports``: by rank, without the ``silent`` ranks, which have stopped reporting, and the
    ``unheard`` ones, which never reported. ``names``: names of all tensors. Ranks that wait for
    each other in different calls are reported after ``CLASH_S`` seconds already.
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
        return ""  # each rank may be busy by itself
    longest = max(report.quiet_s for report in waiting.values())
    calls = {report.progress.call for report in waiting.values() if report.progress.call}
    doing = min(calls) if calls else f"step {first.progress.step}"
    parts = [f"no progress for {longest:.0f} s in {doing}."]
    parts += [_late_rank(rank, reports.get(rank), first.progress) for rank in late[:_SHOWN_RANKS]]
    if not late:
        parts.append(
            "All ranks wait in the same place: the network is stuck, or too slow for this limit."
        )
    others = [rank for rank in sorted(reports) if reports[rank].is_waiting and rank not in late]
    if late and others:
        awaited = _awaited(reports, late, first, names)
        parts.append(f"{list_ranks(others).capitalize()} {_wait(others)} for {awaited}.")
    return " ".join(parts)


def _clash(reports: Mapping[int, Status]) -> str:
    """Return a message on ranks that wait for each other in different calls; "" if none do."""
    quiet = {rank: r for rank, r in reports.items() if r.is_waiting and r.quiet_s >= CLASH_S}
    callers = [rank for rank, report in quiet.items() if report.progress.call]
    if not callers:
        return ""
    caller = quiet[callers[0]].progress
    call = caller.call
    inside = [rank for rank, r in quiet.items() if r.progress.inside and not r.progress.call]
    training = [rank for rank in inside if quiet[rank].progress[:2] > caller[:2]]
    if not training:
        return ""
    return (
        f"{list_ranks(callers).capitalize()} {_wait(callers)} in {call} for all ranks, but "
        f"{list_ranks(training)} did not call it and began step {quiet[training[0]].progress.step} "
        f"instead. Call {call} on every rank, between the same two steps."
    )


def _late_rank(rank: int, report: Status | None, first: Progress) -> str:
    """Return a sentence on the position of a late rank."""
    if report is None:
        return (
            f"Rank {rank} is late: it does not answer at all; its process has been stopped or "
            "killed, its host cannot be reached (by UDP), or its interpreter is blocked by a call "
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
        f"Rank {rank} is late: it has submitted {handed} of its gradients of step "
        f"{progress.step} and received {progress.returned} of the sums.{place}"
    )


def _awaited(
    reports: Mapping[int, Status], late: Sequence[int], first: Status, names: Sequence[str]
) -> str:
    """Return what the other ranks wait for: tensors, or a call."""
    if first.progress.call:
        return f"it in {first.progress.call}"
    inside = [reports[rank] for rank in late if rank in reports and reports[rank].progress.inside]
    begun = [report for report in inside if report.progress.step == first.progress.step]
    missing: Iterable[int] = range(len(names))
    if begun and len(begun) == len(late):
        missing = sorted({n for report in begun for n in expanded(report.missing)})
    known = [repr(names[number]) for number in missing if number < len(names)]
    if not known:
        return f"the sums of step {first.progress.step}"
    return f"gradients of {listed(known, _SHOWN_NAMES)}"


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
    """Return the numbers that ``ranges`` wrote as text.

    >>> expanded(ranges([0, 1, 2, 5]))
    [0, 1, 2, 5]
    """
    numbers: list[int] = []
    for run in filter(None, text.split(",")):
        begin, _, end = run.partition("-")
        numbers.extend(range(int(begin), int(end or begin) + 1))
    return numbers


def _wait(ranks: Sequence[int]) -> str:
    return "waits" if len(ranks) == 1 else "wait"
