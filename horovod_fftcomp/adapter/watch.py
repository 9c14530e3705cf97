"""Watches over a training's progress: says which rank is late, and ends a job that stands still.

One daemon thread of each process looks at its compressors four times a second, and once a second
sends a datagram (UDP) with what it sees to the first rank, which alone judges and tells all. That
goes on beside Horovod's collectives and needs none of them, so it works while these wait for a rank
that sleeps, loops or has left. Training threads are never slowed: they are only looked at.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hmac
import json
import os
import secrets
import select
import socket
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import CodeType
from typing import Any, Protocol

from horovod_fftcomp.adapter.stalls import CLASH_S, Progress, Report, diagnose, ranges
from horovod_fftcomp.engine.overlap import no_answer

_LOOK_S, _TELL_S = 0.25, 1.0
_RANKS_A_SECOND = 64  # more would keep the first rank's thread busy
_MOST_NBYTES = 1400  # fits one packet of Ethernet
_NOTICE_S = 8.0  # in which ranks that begin together have met
_MARGIN_S = 6.0  # that the first rank has to tell what it found, before a rank speaks for itself
# Launchers drop what a rank writes just before another one ends the job. A courtesy to the reader:
# whatever is lost, all ranks end, and those that miss the message raise Horovod's own error.
_LAST_WORDS_S = 3.0
# How long a wait may outlast ``timeout_s``: by then the watch has ended it.
_BACKSTOP_S = _MARGIN_S + 2 * _LAST_WORDS_S
# Where a rank's process or host has been stopped, Horovod's shutdown waits for it for ever. And if
# two looks lie further apart than the second, the process, or all of the job, was suspended.
_SHUTDOWN_S, _SUSPENDED_S = 20.0, 5.0
# Two threads in Horovod's shutdown at once hang; Horovod calls it when the interpreter exits.
_shutting_down = threading.Lock()

_ADVICE = (
    " Give all ranks the same number of batches (PyTorch: DistributedSampler with drop_last=True, "
    "TensorFlow: drop_remainder=True), and let all of them make the same calls. If a rank is only "
    "slow, raise timeout_s, now {timeout_s:.0f} s; on_timeout='warn' goes on waiting."
)


class Watched(Protocol):
    """The course of an adapter's steps, as far as it is watched."""

    def progress(self) -> Progress:
        """Return how far this rank is; called from another thread than the training's."""
        ...

    def missing(self) -> Sequence[int]:
        """Return the numbers of the tensors that are not handed in yet in this step."""
        ...

    def may_wait(self, running: Collection[CodeType]) -> bool:
        """Return False if none of the functions that threads are in can belong to a step."""
        ...


class Watch:
    """Watches over one compressor's steps on this rank.

    ``name`` of the compressor, the same on all ranks, and ``recipe`` are for messages. After
    ``timeout_s`` seconds in which a rank waits for others in vain, every rank writes to stderr who
    is late. If ``ends``, ``shutdown`` then ends Horovod, which fails all that waits, and
    ``verdict`` has the message.
    """

    def __init__(
        self, name: str, recipe: str, timeout_s: float, ends: bool, shutdown: Callable[[], None]
    ) -> None:
        self.name, self.timeout_s, self.ends = name, timeout_s, ends
        self.verdict = ""
        self._label = f"compressor {name.rpartition('.')[2]} ({recipe})"
        self._shutdown = shutdown
        self._names: Sequence[str] = ()
        self._steps: Callable[[], Watched | None] = lambda: None
        self._call = ""
        self._difference: Callable[[], str] = str  # returns ""
        self._seen: tuple[Progress, str] | None = None
        self._since = self._looked_at = time.monotonic()  # the last change; the last look
        self._next_s = self._end_at = 0.0
        self._noticed = False
        self._spoke_at = -float("inf")
        self._rank, self._n_ranks = 0, 0  # 0: the ranks have not met
        self._ranks: Sequence[int] = ()  # their numbers among all of Horovod's
        self._token = b""
        self._hubs: list[tuple[str, int]] = []  # addresses at which the first rank may answer
        self._heard_at = 0.0  # when it did
        self._reports: dict[int, tuple[float, Report]] = {}  # of the first rank: when, and what
        self._peers: dict[int, tuple[str, int]] = {}
        self._told = (0, "")  # number and text of the last message to all

    def follow(self, steps: Watched, names: Sequence[str]) -> None:
        """Look at the progress of ``steps``, which are not kept alive; ``names`` of the tensors."""
        self._steps, self._names = weakref.ref(steps), names

    def compare(self, difference: Callable[[], str]) -> None:
        """Ask ``difference``, while the ranks have not met, for the reason in words; "" if none."""
        self._difference = difference

    def start(self) -> dict[str, Any]:
        """Begin to look; return what the other ranks have to know to report to this one.

        Where the system grants no socket, that is nothing, and nobody watches.
        """
        try:
            return _Post.started(self).address
        except OSError:
            return {}

    def join_ranks(self, first: Mapping[str, Any], rank: int, ranks: Sequence[int]) -> None:
        """Report to the rank whose ``start`` returned ``first`` from now on.

        ``rank``: this one's place among ``ranks``.
        """
        if not first:
            return
        now = time.monotonic()
        self._token = bytes.fromhex(first["token"])
        self._hubs = [(host, first["port"]) for host in first["hosts"]]
        self._rank, self._ranks, self._since, self._heard_at = rank, list(ranks), now, now
        self._reports, self._peers, self._told = {}, {}, (0, "")
        self._n_ranks = len(ranks)  # last: the watching thread looks at it first

    def leave(self) -> None:
        """Report to nobody until the ranks meet again."""
        if self.verdict:
            await_shutdown()
        self._n_ranks, self.verdict, self._end_at, self._noticed = 0, "", 0.0, False

    @property
    def limit_s(self) -> float:
        """How long a wait of the training thread may take before it gives up by itself."""
        if not self.ends:
            return threading.TIMEOUT_MAX
        margin_s = _BACKSTOP_S if self._n_ranks else 0.0
        return min(self.timeout_s + margin_s, threading.TIMEOUT_MAX)

    def calls(self, call: str) -> None:
        """Note a call in which this rank waits for all others; "" when it has returned."""
        self._call = call

    def look(self, post: _Post) -> None:
        """Notice progress, report it, and act on what is known; called by the watching thread."""
        steps = self._steps()
        now = time.monotonic()
        if (gap_s := now - self._looked_at) > _SUSPENDED_S:
            self._since += gap_s
            self._reports = {rank: (now, report) for rank, (_, report) in self._reports.items()}
        self._looked_at = now
        progress = Progress(0, 0, 0, False) if steps is None else steps.progress()
        if self._call:
            progress = progress._replace(call=self._call)
        if (seen := (progress, self._call)) != self._seen:
            self._seen, self._since = seen, now
        quiet_s = now - self._since
        if self._end_at and now >= self._end_at:
            self._end(progress)
        if now < self._next_s:
            return
        self._next_s = now + max(_TELL_S, self._n_ranks / _RANKS_A_SECOND)
        report = _report(steps, progress, quiet_s)
        if self._n_ranks and self._rank == 0:
            self._heard_at = now
            self._reports[0] = (now, report)
            self._judge(post, now)
        elif self._n_ranks:
            values = {"to": self.name, "rank": self._rank, "report": report.pack()}
            for hub in self._hubs:
                post.send(self._token, values, hub)
        self._speak_for_itself(report, now)

    def take(self, post: _Post, token: bytes, values: Mapping[str, Any], sender: Any) -> None:
        """Take a datagram for this compressor; what is not from one of its ranks is ignored."""
        if not self._n_ranks or not hmac.compare_digest(token, self._token):
            return
        now = time.monotonic()
        if "report" in values and self._rank == 0:
            rank = int(values["rank"])
            if not 0 < rank < self._n_ranks:
                return
            self._reports[rank] = (now, Report.unpack(values["report"]))
            self._peers[rank] = sender
            post.send(self._token, self._message(), sender)
        elif "told" in values and self._rank != 0:
            self._heard_at, self._hubs = now, [sender]
            number, text = int(values["told"]), str(values["text"])
            if number > self._told[0]:
                self._told = (number, text)
                self._speak(text, now)

    def _message(self) -> dict[str, Any]:
        number, text = self._told
        return {"to": self.name, "told": number, "text": text}

    def _judge(self, post: _Post, now: float) -> None:
        """Tell all ranks what keeps them from going on, if something does."""
        if self.verdict or now - self._spoke_at < self.timeout_s:
            return
        age_s = 3 * (self._next_s - now) + 2
        ages = {self._ranks[rank]: now - at for rank, (at, _) in self._reports.items()}
        found = {self._ranks[rank]: report for rank, (_, report) in self._reports.items()}
        silent = [rank for rank, age in ages.items() if age > age_s and found.pop(rank)]
        unheard = [rank for rank in self._ranks if rank not in ages]
        text = diagnose(found, silent, unheard, self._names, self.timeout_s)
        if not text:
            return
        text = text.encode()[: _MOST_NBYTES // 2].decode(errors="ignore")
        self._told = (self._told[0] + 1, text)
        for peer in self._peers.values():
            post.send(self._token, self._message(), peer)
        self._speak(text, now)

    def _speak_for_itself(self, report: Report, now: float) -> None:
        """Speak where the first rank does not: before the ranks have met, or if it is gone."""
        if not report.is_waiting or self.verdict:
            return
        doing, quiet_s = report.progress.call or report.progress.doing, report.quiet_s
        if self._n_ranks == 0 and not self._noticed and _NOTICE_S <= quiet_s < self.timeout_s:
            self._noticed = True
            self._write(
                f"{self._label} has waited for {quiet_s:.0f} s in {doing} for an answer of all "
                f"ranks, and goes on for {self.timeout_s:.0f} s. A rank may be slow to begin; else "
                "it has no compressor, made its compressors in another order, or did not make this "
                "call"
            )
        if now - self._spoke_at < self.timeout_s:
            return
        if self._n_ranks == 0 and quiet_s >= CLASH_S and (difference := self._difference()):
            self._speak(difference, now)
        elif self._n_ranks == 0 and quiet_s >= self.timeout_s + _TELL_S:
            self._speak(no_answer(f"{self._label}: {doing!r}", self.timeout_s), now)
        elif now - self._heard_at >= _MARGIN_S and quiet_s >= self.timeout_s + _MARGIN_S:
            self._speak(
                f"no progress for {quiet_s:.0f} s in {doing}. Which rank is late is not known: the "
                f"first one was heard last {now - self._heard_at:.0f} s ago (by UDP). It may have "
                "been stopped, its host may be unreachable, or UDP does not pass between hosts.",
                now,
            )

    def _speak(self, text: str, now: float) -> None:
        """Write to stderr, and have the job end soon if that is wanted."""
        self._spoke_at = now
        if text.startswith("no progress"):
            text += _ADVICE.format(timeout_s=self.timeout_s)
        if self._label not in text:
            text = f"{self._label}: {text}"
        if self.ends:
            self.verdict, self._end_at = text, now + _LAST_WORDS_S
        self._write(f"ConfigMismatchError: {text}" if self.ends else text)

    def give_up(self, error: Exception) -> None:
        """Say that this watch has failed: nobody looks after its steps from now on."""
        self._n_ranks = 0
        self._write(f"{self._label}: hangs are no longer found, since the watch failed: {error!r}")

    def _write(self, text: str) -> None:
        rank = f" on rank {self._ranks[self._rank]}" if self._n_ranks else ""
        with contextlib.suppress(OSError, ValueError, AttributeError):  # stderr may be closed
            # One write, so that no line of another rank comes in between.
            sys.stderr.write(f"horovod_fftcomp{rank}: {text}\n")
            sys.stderr.flush()

    def _end(self, progress: Progress) -> None:
        """Shut Horovod down, so that all that waits on this rank fails."""
        self._end_at = 0.0
        if not (progress.inside or progress.call):
            return
        ending = threading.Thread(target=self._shut_down, name="fftcomp-end", daemon=True)
        ending.start()
        ending.join(_SHUTDOWN_S)
        if ending.is_alive():
            self._write(f"Horovod does not end within {_SHUTDOWN_S:.0f} s: this process is ended")
            os._exit(1)

    def _shut_down(self) -> None:
        with _shutting_down:
            self._shutdown()


class _Post:
    """The socket and the thread of this process, for all its watches."""

    _present: _Post | None = None
    _lock = threading.Lock()

    def __init__(self) -> None:
        self._token = secrets.token_bytes(16)
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(("", 0))
        self._poll = select.poll()  # which takes numbers of 1024 and above, as ``select`` does not
        self._poll.register(self._socket, select.POLLIN)
        self._watches: weakref.WeakValueDictionary[str, Watch] = weakref.WeakValueDictionary()
        self._stops = threading.Event()
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="fftcomp-watch", daemon=True)
        atexit.register(self._stop)  # later than Horovod's, so it is called first
        self._thread.start()

    @classmethod
    def started(cls, watch: Watch) -> _Post:
        """Return this process's, which looks after ``watch`` from now on."""
        with cls._lock:
            if cls._present is None or cls._present._process != os.getpid():
                cls._present = cls()
            cls._present._watches[watch.name] = watch
            return cls._present

    @property
    def address(self) -> dict[str, Any]:
        """Where this process can be reached, as JSON values."""
        return {
            "hosts": ["127.0.0.1", *_own_addresses()][:8],
            "port": self._socket.getsockname()[1],
            "token": self._token.hex(),
        }

    def send(self, token: bytes, values: Mapping[str, Any], to: tuple[str, int]) -> None:
        """Send a datagram; what cannot be sent is lost, as others may be: they are repeated."""
        with contextlib.suppress(OSError):
            self._socket.sendto(token + json.dumps(values, ensure_ascii=False).encode(), to)

    def _run(self) -> None:
        while not self._stops.is_set():
            self._poll.poll(1000 * _LOOK_S)
            self._receive()
            self._look()

    def _look(self) -> None:
        with self._lock:
            watches = list(self._watches.values())
        for watch in watches:
            try:
                watch.look(self)
            except Exception as error:  # whatever it is, the other watches go on
                del self._watches[watch.name]
                watch.give_up(error)

    def _receive(self) -> None:
        while True:
            try:
                data, sender = self._socket.recvfrom(2 * _MOST_NBYTES)
            except OSError:
                return  # nothing more is there
            try:
                values = json.loads(data[16:])
                if (watch := self._watches.get(values["to"])) is not None:
                    watch.take(self, data[:16], values, sender)
            except Exception:  # a stranger's, whatever it may be
                continue

    def _stop(self) -> None:
        self._stops.set()
        self._thread.join(2 * _LOOK_S)
        await_shutdown()


def await_shutdown() -> None:
    """Wait until Horovod's shutdown by a watch is over, if one is under way."""
    if _shutting_down.acquire(timeout=_SHUTDOWN_S + _LAST_WORDS_S):
        _shutting_down.release()


def _own_addresses() -> list[str]:
    """Return this host's IPv4 addresses but the loopback's."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name[:15].encode())
            try:
                answer = fcntl.ioctl(asking.fileno(), 0x8915, request)  # SIOCGIFADDR
            except OSError:
                continue  # an interface without an address
            found.append(socket.inet_ntoa(answer[20:24]))
    return [address for address in found if not address.startswith("127.")]


def _report(steps: Watched | None, progress: Progress, quiet_s: float) -> Report:
    """Return this rank's report; where nothing stands still, without what costs time."""
    if quiet_s < _TELL_S or steps is None:
        return Report(progress, quiet_s)
    threads = innermost_frames()
    if progress.inside and not steps.may_wait({code for code, _ in threads.values()}):
        progress = progress._replace(inside=False)
    waits, where = _main_thread_at(threads)
    return Report(progress, quiet_s, waits, where, ranges(steps.missing()))


def innermost_frames() -> dict[int, tuple[CodeType, int]]:
    """Return the code and the line that each thread is at, by its number.

    What is below a thread's innermost frame is not looked at: other threads may run meanwhile, and
    CPython 3.11 then crashes on frames that are gone. ``faulthandler`` crashes on threads that are
    just being made.
    """
    frames = sys._current_frames()
    return {thread: (frame.f_code, frame.f_lineno) for thread, frame in frames.items()}


_OWN = str(Path(__file__).parents[1])


def _main_thread_at(threads: Mapping[int, tuple[CodeType, int]]) -> tuple[bool, str]:
    """Return whether the main thread is inside Horovod or this package, and its place."""
    main = threading.main_thread().ident
    if main is None or main not in threads:
        return False, ""
    code, line = threads[main]
    horovod = getattr(sys.modules.get("horovod"), "__path__", ["/horovod/"])
    waits = code.co_filename.startswith((_OWN, *horovod))
    return waits, f"{os.path.basename(code.co_filename)}:{line} in {code.co_name}"
