"""Jobs of several ranks: their launch, the reports of the ranks, and the rank of this process.

A rank reports by lines of JSON in its output, which reach the launching process from any host and
through any launcher.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

RANK_VARIABLES = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
_SIZE_VARIABLES = (
    "HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS",
)  # fmt: skip
# What MPI and Slurm tell a rank; a process without it is none. Settings for all jobs are not of it.
_OF_A_RANK = re.compile(
    "PMI|OMPI_(?!ALLOW|MCA_)|OMPI_MCA_(orte|ess|pmix|shmem|initial)|SLURM_(PROCID|STEP_NUM_TASKS)"
)
# How launchers are told the number of ranks; env starts one, as a rank of a job does.
_NUMBER = {
    "torchrun": ("--no-python", "--nproc-per-node", "{}"), "srun": ("-n", "{}"), "env": (),
}  # fmt: skip
_MARK = "fftcomp-report "
# Launchers that prefix each line with the rank split longer writes into pieces of 4 KiB. The pause
# lets them read one line before the next. A line that is split nevertheless is known by its length:
# the rank then counts as one without a report.
_PIECE, _PAUSE_S = 1000, 0.02
# For processes of a launcher that has ended: by then it has passed on what ranks wrote.
_LEFT_BEHIND_S = 2.0
GRACE_S = 20.0  # for ranks to end, once all have reported or been signalled
_LAST_WORDS_S = 3.0  # between SIGTERM and the end of a rank; horovodrun kills it after 5


def is_torchrun() -> bool:
    """Return whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def launched_rank() -> int | None:
    """Return the rank that a launcher gave this process; None without a launcher."""
    if is_torchrun():  # Slurm may have started it
        return _first_of(["RANK"])
    is_step = int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1  # not so in a batch script
    return _first_of([*RANK_VARIABLES, *["SLURM_PROCID"] * is_step])


def launched_size() -> int:
    """Return the number of ranks that a launcher has started; 1 without a launcher."""
    return _first_of(["WORLD_SIZE"] if is_torchrun() else _SIZE_VARIABLES) or 1


def tell_torchrun(command: str, status: int, why: str) -> None:
    """Let the report with which torchrun ends say why this rank ends with an exit status."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        told = f"none, as nothing has crashed: {command} ends with status {status}: {why}"
        message = {"message": told, "extraInfo": {"timestamp": int(time.time())}}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": message}), encoding="utf-8")


def _first_of(names: Sequence[str]) -> int | None:
    return next((int(os.environ[name]) for name in names if name in os.environ), None)


def may_start_again() -> bool:
    """Return whether the ranks of this job may start other processes that meet as they have.

    MPI, unlike torchrun and Horovod's Gloo, takes one process of each rank.
    """
    return is_torchrun() or "HOROVOD_GLOO_RENDEZVOUS_ADDR" in os.environ


def leave_job() -> None:
    """Forget the rank that MPI or Slurm gave this process, so that it may start jobs itself."""
    for name in filter(_OF_A_RANK.match, list(os.environ)):
        del os.environ[name]


def report(values: Mapping[str, Any]) -> None:
    """Print the report of this rank for ``launch``: JSON values, "rank" among them."""
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
    """Call ``say`` before SIGTERM ends this process; launchers end ranks by SIGTERM.

    It is called in a thread, since the main thread may be waiting for other ranks outside Python. A
    handler that the process has set, or sets meanwhile, has precedence; forked children have none.
    """
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    mask, sigterm = signal.pthread_sigmask, {signal.SIGTERM}

    def handler(number: int, frame: object) -> None:
        """Do nothing: the thread is woken by any signal that has a handler."""

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
    """Collects the lines of ``report`` into reports; unreadable lines are ignored."""

    def __init__(self) -> None:
        self._pieces: dict[int, dict[int, str]] = {}
        self.whole: dict[int, dict[str, Any]] = {}

    def take(self, line: str) -> None:
        """Add a line, without its mark."""
        with contextlib.suppress(ValueError):
            *numbers, piece = line.rstrip("\n").split(" ", 3)
            rank, number, count = map(int, numbers)
            if number < count and len(piece) != _PIECE:
                return  # cut by a launcher
            pieces = self._pieces.setdefault(rank, {})
            pieces[number] = piece
            if len(pieces) == count:
                self.whole[rank] = json.loads("".join(pieces[n] for n in sorted(pieces)))


def default_launcher() -> list[str]:
    """Return ``horovodrun``, or without Horovod torchrun, of this environment or else of PATH."""
    has_horovod, has_torch = map(importlib.util.find_spec, ("horovod", "torch"))
    name, *options = (
        ["torchrun", "--standalone"] if has_torch and not has_horovod else ["horovodrun"]
    )
    beside = Path(sys.executable).parent / name
    return [str(beside) if beside.exists() else shutil.which(name) or name, *options]


def starts(launcher: Sequence[str], n_ranks: int) -> list[str]:
    """Return the command with which a launcher starts ``n_ranks`` ranks of what follows it."""
    number = _NUMBER.get(Path(launcher[0]).name, ("-np", "{}"))
    return [*launcher, *(part.format(n_ranks) for part in number)]


class Ended(NamedTuple):
    """Result of a job: exit status of the launcher, reports of its ranks in rank order."""

    code: int
    reports: list[dict[str, Any]]


def launch(
    launcher: Sequence[str], n_ranks: int, command: Sequence[str], line: Callable[[str], None]
) -> Ended:
    """Run ``command`` on ``n_ranks`` ranks; return their reports. ``launcher``: see ``starts``.

    ``line`` is called with every other line of output. After all ranks have reported, they have 20
    seconds to end. No process of the job is left when this returns or raises. Raises
    FileNotFoundError if there is no such launcher.
    """
    process = subprocess.Popen(
        [*starts(launcher, n_ranks), *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        # horovodrun imports TensorFlow, which would log its build before a job of any framework.
        env={"TF_CPP_MIN_LOG_LEVEL": "1", **os.environ},
        start_new_session=True,  # one signal ends the launcher with all that it has started here
    )
    assert process.stdout is not None
    reports = _Reports()
    patience = threading.Timer(GRACE_S, _end, (process,))
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
    """Make SIGTERM and SIGHUP raise SystemExit, so that the job is ended before this process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = {which: signal.signal(which, leave) for which in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for which, handler in before.items():
            signal.signal(which, handler)


def _sweep(process: subprocess.Popen[str]) -> None:
    """Kill processes that outlive their launcher, which would keep its output open."""
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
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            continue


def _kill(process: subprocess.Popen[str], which: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # all of the group have ended
        os.killpg(process.pid, which)
