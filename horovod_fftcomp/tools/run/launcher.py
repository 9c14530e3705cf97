"""Jobs of several ranks: the launcher's traces in a rank, and a launch whose ranks report.

A rank reports by lines of JSON in its output, which reach whoever launched it from any host and
over any launcher.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

_RANK = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
_MARK = "fftcomp-report "
# Launchers that put the rank before each line cut what comes at once into pieces of 4 KiB. The
# pause lets them read one line before the next. Where it is too short and a line is cut, its length
# tells: the rank then counts as one without a report, and nothing wrong is read.
_PIECE, _PAUSE_S = 1000, 0.02
# That what a launcher has started may outlive it. By then it has passed on what ranks wrote; those
# that are killed here have lost their launcher.
_LEFT_BEHIND_S = 2.0
_GRACE_S = 20.0  # that ranks have to end after all of them have reported, or were told to
_LAST_WORDS_S = 3.0  # that a rank has before it ends by SIGTERM; horovodrun kills it after 5


def launched_rank() -> int | None:
    """Return the rank that a launcher gave this process; None without a launcher."""
    return next((int(os.environ[name]) for name in _RANK if name in os.environ), None)


def report(values: Mapping[str, Any]) -> None:
    """Print JSON values for ``launch``; they have to contain "rank"."""
    text = json.dumps(values)
    pieces = [text[begin : begin + _PIECE] for begin in range(0, len(text), _PIECE)]
    for number, piece in enumerate(pieces, 1):
        if number > 1:
            time.sleep(_PAUSE_S)
        # One write, so that no line of another rank comes in between.
        sys.stdout.write(f"{_MARK}{values['rank']} {number} {len(pieces)} {piece}\n")
        sys.stdout.flush()


@contextlib.contextmanager
def last_words(say: Callable[[], None]) -> Iterator[None]:
    """Call ``say`` before SIGTERM ends this process, as launchers end ranks.

    In a thread, since the main one may wait for other ranks where no Python code runs. A handler
    that the process has, or sets meanwhile, counts in its place; forked children have none.
    """
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    mask, sigterm = signal.pthread_sigmask, {signal.SIGTERM}

    def handler(number: int, frame: object) -> None:
        """Leave it to the thread, which is woken whenever a signal has a handler."""

    def is_ours() -> bool:
        return signal.getsignal(signal.SIGTERM) is handler

    def forget() -> None:
        if is_ours():
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        mask(signal.SIG_UNBLOCK, sigterm)

    def listen() -> None:
        while number := os.read(woken, 1):
            if number[0] == signal.SIGTERM and is_ours():
                timer = threading.Timer(_LAST_WORDS_S, os._exit, (128 + signal.SIGTERM,))
                timer.daemon = True
                timer.start()
                say()
                os._exit(128 + signal.SIGTERM)

    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGTERM, handler)
    signal.set_wakeup_fd(wake)
    os.register_at_fork(
        before=lambda: mask(signal.SIG_BLOCK, sigterm),  # until a child has forgotten
        after_in_parent=lambda: mask(signal.SIG_UNBLOCK, sigterm),
        after_in_child=forget,
    )
    threading.Thread(target=listen, name="fftcomp-last-words", daemon=True).start()
    try:
        yield
    finally:
        forget()
        os.close(wake)


class _Reports:
    """Puts the lines of ``report`` together; what cannot be read is no report."""

    def __init__(self) -> None:
        self._pieces: dict[int, dict[int, str]] = {}
        self.whole: dict[int, dict[str, Any]] = {}

    def take(self, line: str) -> None:
        """Take what follows on the mark."""
        try:
            rank, number, count, piece = line.rstrip("\n").split(" ", 3)
            if int(number) < int(count) and len(piece) != _PIECE:
                return  # cut by a launcher
            pieces = self._pieces.setdefault(int(rank), {})
            pieces[int(number)] = piece
            if len(pieces) == int(count):
                found = json.loads("".join(pieces[number] for number in sorted(pieces)))
                self.whole[int(rank)] = found
        except ValueError:
            return


def default_launcher() -> list[str]:
    """Return ``horovodrun`` of this Python's environment, else the one on PATH."""
    beside = Path(sys.executable).parent / "horovodrun"
    return [str(beside) if beside.exists() else shutil.which("horovodrun") or "horovodrun"]


class Ended(NamedTuple):
    """Exit status of a launcher, and the reports of its ranks in rank order."""

    code: int
    reports: list[dict[str, Any]]


def launch(
    launcher: Sequence[str], n_ranks: int, command: Sequence[str], line: Callable[[str], None]
) -> Ended:
    """Run ``command`` on ``n_ranks`` ranks and return what they have reported.

    ``line`` gets the other lines of output. When all ranks have reported, they have 20 seconds to
    end. Whatever happens, no process of the job is left when this returns or raises.
    Raises FileNotFoundError if there is no such launcher.
    """
    process = subprocess.Popen(
        [*launcher, "-np", str(n_ranks), *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # one signal ends the launcher with all that it has started here
    )
    assert process.stdout is not None
    reports = _Reports()
    patience = threading.Timer(_GRACE_S, _end, (process,))
    patience.daemon = True
    threading.Thread(target=_sweep, args=(process,), daemon=True).start()
    try:
        with _signals_raise():
            for text in process.stdout:
                _, mark, values = text.partition(_MARK)
                if not mark:
                    line(text)
                    continue
                reports.take(values)
                if len(reports.whole) == n_ranks and patience.ident is None:
                    patience.start()
            code = process.wait()
    finally:
        patience.cancel()
        try:
            _end(process)
        finally:  # a second Ctrl-C does not wait
            _kill(process, signal.SIGKILL)
        process.stdout.close()
    return Ended(code, [reports.whole[rank] for rank in sorted(reports.whole)])


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end this process as an exception does, so that the job ends first."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: object) -> None:
        del frame
        raise SystemExit(128 + number)

    before = {which: signal.signal(which, leave) for which in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for which, handler in before.items():
            signal.signal(which, handler)


def _sweep(process: subprocess.Popen[str]) -> None:
    """End what a launcher has left behind, which else would keep its output open."""
    process.wait()
    time.sleep(_LEFT_BEHIND_S)
    _kill(process, signal.SIGKILL)


def _end(process: subprocess.Popen[str]) -> None:
    """End a launcher and its ranks."""
    for which in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            break
        _kill(process, which)
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            continue


def _kill(process: subprocess.Popen[str], which: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # all of the group have ended
        os.killpg(process.pid, which)
