"""Stall detection: reports which rank is late, and ends a job that makes no progress.

A daemon thread of each process polls its compressors four times a second and sends a UDP datagram
with their progress to the first rank once a second. The first rank alone diagnoses a stall and
announces it to all. This needs none of Horovod's collectives, so it works while they wait for a
rank that sleeps, loops or has ended. Training threads are only observed, never slowed.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType
from typing import Any, Protocol

from horovod_fftcomp.adapter.stalls import CLASH_S, Progress, Status, diagnose, no_answer, ranges
from horovod_fftcomp.errors import ConfigMismatchError

LOOK_S, TELL_S = 0.25, 1.0
_RANKS_PER_S = 64  # more would keep the first rank's thread busy
_MOST_NBYTES = 1400  # fits one packet of Ethernet
NOTICE_S = 8.0  # ranks that start together have finished the handshake by then
_MARGIN_S = 6.0  # time for the first rank's announcement, before a rank writes one of its own
# Launchers drop what a rank writes just before another one ends the job, so a rank waits this long
# after its message. Only the message may get lost: all ranks end in any case, and those without it
# raise Horovod's own error.
_FLUSH_S = 3.0
# Seconds by which a wait may exceed ``timeout_s``: by then the watch has ended the job.
_BACKSTOP_S = _MARGIN_S + 2 * _FLUSH_S
# Horovod's shutdown waits forever for a rank whose process or host has been stopped. And if two
# polls are further apart than _SUSPENDED_S, the process or the whole job was suspended.
_SHUTDOWN_S, _SUSPENDED_S = 20.0, 5.0
# Two concurrent calls of Horovod's shutdown hang; Horovod calls it when the interpreter exits.
_shutting_down = threading.Lock()

_ADVICE = (
    " Give all ranks the same number of batches (PyTorch: DistributedSampler with drop_last=True, "
    "TensorFlow: drop_remainder=True), and make the same calls on all of them. If a rank is only "
    "slow, raise timeout_s, now {timeout_s:.0f} s; on_timeout='warn' goes on waiting."
)


def write_line(text: str, rank: int | None = None) -> None:
    """Write a line of this package to stderr; ``rank``: of this process, if it is known."""
    where = "" if rank is None else f" on rank {rank}"
    with contextlib.suppress(OSError, ValueError, AttributeError):  # stderr may be closed
        # One write, so that lines of other ranks are not mixed in.
        sys.stderr.write(f"horovod_fftcomp{where}: {text}\n")
        sys.stderr.flush()


class Watched(Protocol):
    """Interface of a step driver to the watch."""

    def progress(self) -> Progress:
        """Return this rank's progress; called in the watch's thread."""

    def missing(self) -> Sequence[int]:
        """Return the numbers of the tensors without a gradient yet in this step."""

    def may_wait(self, running: Collection[CodeType]) -> bool:
        """Return False if no thread can be in a step; ``running``: code objects they are in."""


class Watch:
    """Stall detection of one compressor on this rank.

    ``name``: name of the compressor, the same on all ranks; ``recipe``: for messages. When a rank
    has waited ``timeout_s`` seconds for others without progress, every rank writes to stderr which
    rank is late. If ``ends``, ``failure`` is then set to the message and ``shutdown`` shuts Horovod
    down, which makes all waiting operations fail.
    """

    def __init__(
        self, name: str, recipe: str, timeout_s: float, ends: bool, shutdown: Callable[[], None]
    ) -> None:
        self.name, self.timeout_s, self.ends = name, timeout_s, ends
        self.failure = ""
        self._label = f"compressor {name.rpartition('.')[2]} ({recipe})"
        self._shutdown = shutdown
        self._names: Sequence[str] = ()
        self._steps: Callable[[], Watched | None] = lambda: None
        self._call = ""
        self._difference: Callable[[], str] = str  # returns ""
        self._seen: Progress | None = None
        self._since = self._looked_at = time.monotonic()  # the last change; the last look
        self._next_s = self._end_at = 0.0
        self._wrote_notice = False
        self.announced_at = -float("inf")
        self._rank, self._n_ranks = 0, 0  # 0 ranks: the handshake has not ended
        self._ranks: Sequence[int] = ()  # their global ranks in Horovod
        self._token = b""
        self._first_addresses: list[tuple[str, int]] = []  # where the first rank may answer
        self.heard_at = 0.0  # when the first rank last answered
        self._reports: dict[int, tuple[float, Status]] = {}  # on the first rank: time and report
        self._peers: dict[int, tuple[str, int]] = {}
        self._announcement = (0, "")  # number and text of the last one

    def follow(self, steps: Watched, names: Sequence[str]) -> None:
        """Observe ``steps``, held by a weak reference; ``names``: names of the tensors."""
        self._steps, self._names = weakref.ref(steps), names

    def compare(self, difference: Callable[[], str]) -> None:
        """Use ``difference()`` to explain a handshake that does not end; "" if it cannot."""
        self._difference = difference

    def start(self) -> dict[str, Any]:
        """Start polling; return the address to which other ranks send their reports.

        If the system provides no socket, it is empty and stalls are not detected.
        """
        try:
            return Post.started(self).address
        except OSError:
            return {}

    def join_ranks(self, first: Mapping[str, Any], rank: int, ranks: Sequence[int]) -> None:
        """Start reporting to the first rank, whose ``start`` returned ``first``.

        ``rank``: index of this rank in ``ranks``, the global ranks.
        """
        self._difference = str  # the ranks have answered
        if not first:
            return
        now = time.monotonic()
        self._token = bytes.fromhex(first["token"])
        self._first_addresses = [(host, first["port"]) for host in first["hosts"]]
        self._rank, self._ranks, self._since, self.heard_at = rank, list(ranks), now, now
        self._reports, self._peers, self._announcement = {}, {}, (0, "")
        self._n_ranks = len(ranks)  # last, since the watch's thread tests it first

    def check(self) -> None:
        """Raise ConfigMismatchError if this watch has ended the job."""
        if self.failure:
            await_shutdown()
            raise ConfigMismatchError(self.failure)

    def disconnect(self) -> None:
        """Stop reporting until ``join_ranks`` is called again."""
        if self.failure:
            await_shutdown()
        self._n_ranks, self.failure, self._end_at, self._wrote_notice = 0, "", 0.0, False

    @property
    def limit_s(self) -> float:
        """Longest wait of the training thread in seconds, in case the watch does not end it."""
        if not self.ends:
            return threading.TIMEOUT_MAX
        margin_s = _BACKSTOP_S if self._n_ranks else 0.0
        return min(self.timeout_s + margin_s, threading.TIMEOUT_MAX)

    @contextlib.contextmanager
    def calling(self, call: str) -> Iterator[None]:
        """Record, in a ``with`` block, the call in which this rank waits for all others."""
        self._call = call
        try:
            yield
        finally:
            self._call = ""

    def poll(self, post: Post) -> None:
        """Poll the progress, report it and act on stalls; called in the watch's thread."""
        steps = self._steps()
        now = time.monotonic()
        if (gap_s := now - self._looked_at) > _SUSPENDED_S:
            self._since += gap_s
            self._reports = {rank: (now, report) for rank, (_, report) in self._reports.items()}
        self._looked_at = now
        progress = Progress(0, 0, 0, False) if steps is None else steps.progress()
        if self._call:
            progress = progress._replace(call=self._call)
        if progress != self._seen:
            self._seen, self._since = progress, now
        quiet_s = now - self._since
        if self._end_at and now >= self._end_at:
            self._end(progress)
        if now < self._next_s:
            return
        self._next_s = now + max(TELL_S, self._n_ranks / _RANKS_PER_S)
        report = _report(steps, progress, quiet_s)
        if self._n_ranks and self._rank == 0:
            self.heard_at = now
            self._reports[0] = (now, report)
            self._diagnose(post, now)
        elif self._n_ranks:
            values = {"to": self.name, "rank": self._rank, "report": report}
            for address in self._first_addresses:
                post.send(self._token, values, address)
        self.announce_alone(report, now)

    def receive(self, post: Post, token: bytes, values: Mapping[str, Any], sender: Any) -> None:
        """Handle a datagram for this compressor; ignore it unless one of its ranks sent it."""
        if not self._n_ranks or not hmac.compare_digest(token, self._token):
            return
        now = time.monotonic()
        if "report" in values and self._rank == 0:
            rank = int(values["rank"])
            if not 0 < rank < self._n_ranks:
                return
            self._reports[rank] = (now, Status.unpack(values["report"]))
            self._peers[rank] = sender
            post.send(self._token, self._message(), sender)
        elif "told" in values and self._rank != 0:
            self.heard_at, self._first_addresses = now, [sender]
            number, text = int(values["told"]), str(values["text"])
            if number > self._announcement[0]:
                self._announcement = (number, text)
                self._announce(text, now)

    def _message(self) -> dict[str, Any]:
        return {"to": self.name, "told": self._announcement[0], "text": self._announcement[1]}

    def _diagnose(self, post: Post, now: float) -> None:
        """Announce to all ranks why they wait, if they have waited too long."""
        if self.failure or now - self.announced_at < self.timeout_s:
            return
        age_s = 3 * (self._next_s - now) + 2
        ages = {self._ranks[rank]: now - at for rank, (at, _) in self._reports.items()}
        reports = {self._ranks[rank]: report for rank, (_, report) in self._reports.items()}
        silent = [rank for rank, age in ages.items() if age > age_s and reports.pop(rank)]
        unheard = [rank for rank in self._ranks if rank not in ages]
        text = diagnose(reports, silent, unheard, self._names, self.timeout_s)
        if not text:
            return
        text = text.encode()[: _MOST_NBYTES // 2].decode(errors="ignore")
        self._announcement = (self._announcement[0] + 1, text)
        for peer in self._peers.values():
            post.send(self._token, self._message(), peer)
        self._announce(text, now)

    def announce_alone(self, report: Status, now: float) -> None:
        """Announce a stall without the first rank: before the handshake ends, or if it is gone."""
        if not report.is_waiting or self.failure:
            return
        call, quiet_s = report.progress.call, report.quiet_s
        if report.may_have_ended and not call:
            return
        doing = call or report.progress.doing
        if self._n_ranks == 0 and not self._wrote_notice and NOTICE_S <= quiet_s < self.timeout_s:
            self._wrote_notice = True
            self._write(
                f"{self._label} has waited {quiet_s:.0f} s in {doing} for an answer of all ranks, "
                f"and will wait up to {self.timeout_s:.0f} s. A rank may be slow to start; "
                "otherwise it has no compressor, made its compressors in another order, or did not "
                "make this call"
            )
        if now - self.announced_at < self.timeout_s:
            return
        if self._n_ranks == 0 and quiet_s >= CLASH_S and (difference := self._difference()):
            self._announce(difference, now)
        elif self._n_ranks == 0 and quiet_s >= self.timeout_s + TELL_S:
            self._announce(no_answer(f"{self._label}: {doing!r}", self.timeout_s), now)
        elif now - self.heard_at >= _MARGIN_S and quiet_s >= self.timeout_s + _MARGIN_S:
            self._announce(
                f"no progress for {quiet_s:.0f} s in {doing}. Which rank is late is not known: the "
                f"first rank last answered {now - self.heard_at:.0f} s ago (by UDP). It may have "
                "been stopped, its host may be unreachable, or UDP may be blocked between hosts.",
                now,
            )

    def _announce(self, text: str, now: float) -> None:
        """Write ``text`` to stderr, and schedule the end of the job if ``ends``."""
        self.announced_at = now
        if text.startswith("no progress"):
            text += _ADVICE.format(timeout_s=self.timeout_s)
        if self._label not in text:
            text = f"{self._label}: {text}"
        if self.ends:
            self.failure, self._end_at = text, now + _FLUSH_S
        self._write(f"ConfigMismatchError: {text}" if self.ends else text)

    def give_up(self, error: Exception) -> None:
        """Report that this watch has failed and detects no stalls from now on."""
        self._n_ranks = 0
        self._write(f"{self._label}: stalls are no longer detected, as the watch failed: {error!r}")

    def _write(self, text: str) -> None:
        write_line(text, self._ranks[self._rank] if self._n_ranks else None)

    def _end(self, progress: Progress) -> None:
        """Shut Horovod down, so that all waiting operations of this rank fail."""
        self._end_at = 0.0
        if not (progress.inside or progress.call):
            return
        ending = threading.Thread(target=self._shut_down, name="fftcomp-end", daemon=True)
        ending.start()
        ending.join(_SHUTDOWN_S)
        if ending.is_alive():
            self._write(f"Horovod's shutdown took over {_SHUTDOWN_S:.0f} s: ending this process")
            os._exit(1)

    def _shut_down(self) -> None:
        with _shutting_down:
            self._shutdown()


class Post:
    """UDP socket and polling thread of this process, shared by all its watches."""

    present_post: Post | None = None
    _lock = threading.Lock()

    def __init__(self) -> None:
        self._token = secrets.token_bytes(16)
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.setblocking(False)
        self.socket.bind(("", 0))
        self._poll = select.poll()  # ``select`` takes no descriptors from 1024
        self._poll.register(self.socket, select.POLLIN)
        self._watches: weakref.WeakValueDictionary[str, Watch] = weakref.WeakValueDictionary()
        self.stops = threading.Event()
        self._process = os.getpid()
        self.thread = threading.Thread(target=self._run, name="fftcomp-watch", daemon=True)
        atexit.register(self.stop)  # registered after Horovod's, so called before it
        self.thread.start()

    @classmethod
    def started(cls, watch: Watch) -> Post:
        """Return this process's instance, which polls ``watch`` from now on."""
        with cls._lock:
            if cls.present_post is None or cls.present_post._process != os.getpid():
                cls.present_post = cls()
            cls.present_post._watches[watch.name] = watch
            return cls.present_post

    @property
    def address(self) -> dict[str, Any]:
        """Address of this process as JSON values: hosts, port and token."""
        return {
            "hosts": ["127.0.0.1", *_own_addresses()][:8],
            "port": self.socket.getsockname()[1],
            "token": self._token.hex(),
        }

    def send(self, token: bytes, values: Mapping[str, Any], to: tuple[str, int]) -> None:
        """Send a datagram. Errors are ignored: datagrams may get lost anyway and are repeated."""
        with contextlib.suppress(OSError):
            self.socket.sendto(token + json.dumps(values, ensure_ascii=False).encode(), to)

    def _run(self) -> None:
        while not self.stops.is_set():
            self._poll.poll(1000 * LOOK_S)
            self._receive()
            self._look()

    def _look(self) -> None:
        with self._lock:
            watches = list(self._watches.values())
        for watch in watches:
            try:
                watch.poll(self)
            except Exception as error:  # any error: the other watches continue
                del self._watches[watch.name]
                watch.give_up(error)

    def _receive(self) -> None:
        while True:
            try:
                data, sender = self.socket.recvfrom(2 * _MOST_NBYTES)
            except OSError:
                return  # no more datagrams
            try:
                values = json.loads(data[16:])
                if (watch := self._watches.get(values["to"])) is not None:
                    watch.receive(self, data[:16], values, sender)
            except Exception:  # malformed: not one of ours
                continue

    def stop(self) -> None:
        """End the thread; called when the interpreter exits."""
        self.stops.set()
        self.thread.join(2 * LOOK_S)
        await_shutdown()


def await_shutdown() -> None:
    """Wait until a shutdown of Horovod by a watch has ended, if one is under way."""
    if _shutting_down.acquire(timeout=_SHUTDOWN_S + _FLUSH_S):
        _shutting_down.release()


def _own_addresses() -> list[str]:
    """Return this host's IPv4 addresses without the loopback ones."""
    addresses = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name[:15].encode())
            with contextlib.suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(asking.fileno(), 0x8915, request)  # SIOCGIFADDR
                addresses.append(socket.inet_ntoa(answer[20:24]))
    return [address for address in addresses if not address.startswith("127.")]


def _report(steps: Watched | None, progress: Progress, quiet_s: float) -> Status:
    """Return this rank's report; while there is progress, without the costly parts."""
    if quiet_s < TELL_S or steps is None:
        return Status(progress, quiet_s)
    threads = innermost_frames()
    if progress.inside and not steps.may_wait({code for code, _ in threads.values()}):
        progress = progress._replace(inside=False)
    return Status(progress, quiet_s, *_main_thread_at(threads), ranges(steps.missing()))


def innermost_frames() -> dict[int, tuple[CodeType, int]]:
    """Return the code object and the line that each thread is at, by thread id.

    Only innermost frames are read: other threads run meanwhile, and CPython 3.11 crashes on outer
    frames that have ended. ``faulthandler`` crashes on threads that are being created. No garbage
    is collected meanwhile: CPython 3.11 then holds a lock that each new thread takes, and a
    callback that lets other threads run would wait for them for ever.
    """
    if collects := gc.isenabled():
        gc.disable()
    try:
        frames = sys._current_frames()
    finally:
        if collects:
            gc.enable()
    return {thread: (frame.f_code, frame.f_lineno) for thread, frame in frames.items()}


def _main_thread_at(threads: Mapping[int, tuple[CodeType, int]]) -> tuple[bool, str]:
    """Return whether the main thread is inside Horovod or this package, and its line."""
    if (main := threads.get(threading.main_thread().ident or 0)) is None:
        return False, ""
    code, line = main
    horovod = getattr(sys.modules.get("horovod"), "__path__", ["/horovod/"])
    waits = code.co_filename.startswith((str(Path(__file__).parents[1]), *horovod))
    return waits, f"{os.path.basename(code.co_filename)}:{line} in {code.co_name}"
