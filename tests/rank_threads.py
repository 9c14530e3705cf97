"""Runs the ranks of a job as threads of this process, one at a time.

A rank keeps the turn until it waits for another one or sleeps, so a run has the same order each
time, and what belongs to a process can be exchanged between two turns: the warning filters, random
numbers, and the globals of the package that count or collect compressors.
"""

from __future__ import annotations

import atexit
import inspect
import os
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch

from horovod_fftcomp.adapter import connection, watch

_really_sleep = time.sleep
_really_init = threading.Thread.__init__
_PATIENCE_S, _PATIENCE_POLLS = 30.0, 1000  # a worker may compile a kernel meanwhile

_AT_MOST_S = 600.0

# What each rank has of its own, with the value that it begins with.
_OWN: Sequence[tuple[Any, str, Callable[[], Any]]] = (
    (warnings, "filters", lambda: warnings.filters[:]),
    (warnings, "showwarning", lambda: warnings.showwarning),
    (warnings, "_showwarnmsg_impl", lambda: warnings._showwarnmsg_impl),
    (connection, "unconnected", weakref.WeakSet),
    (connection, "counters", Counter),
    (watch.Post, "present_post", lambda: None),
)


class WouldHangError(AssertionError):
    """All ranks wait; Horovod would wait for ever."""


class Stopped(BaseException):
    """Another rank has failed."""


class _Wait(NamedTuple):
    is_over: Callable[[], bool]
    what: Callable[[], str]


class Ranks:
    """The threads of one job; a context, in which ``run`` may be called once.

    ``patience_s``: how long ranks may look in vain for something, all of them, before they fail.
    """

    def __init__(self, size: int, patience_s: float = _PATIENCE_S) -> None:
        self.size, self._patience_s = size, patience_s
        self._changed = threading.Condition()
        self._turn: int | None = None
        self._waits: dict[int, _Wait] = {}
        self._asleep: set[int] = set()
        self._looking: dict[int, str] = {}  # in vain, each for one thing after the other
        self._looked, self._looks_since = 0, 0.0
        self._alive = set(range(size))
        self._failed: dict[int, BaseException] = {}
        self._hangs = ""
        self._loaded: int | None = None
        self._states: list[list[Any]] = []
        self.patches: list[list[RankPatch]] = [[] for _ in range(size)]
        self._tables: dict[tuple[Any, str], dict[int, Any]] = {}
        self._patched = pytest.MonkeyPatch()

    def __enter__(self) -> Ranks:
        ranks = self

        def init(thread: threading.Thread, *arguments: Any, **options: Any) -> None:
            _really_init(thread, *arguments, **options)
            thread.rank = ranks.current()  # type: ignore[attr-defined]

        def sleep(seconds: float) -> None:
            ranks.sleep(seconds)

        self._patched.setattr(threading.Thread, "__init__", init)
        self._patched.setattr(time, "sleep", sleep)
        self._patched.setattr(pytest, "MonkeyPatch", lambda: RankPatch(ranks))
        pytest.MonkeyPatch.context = lambda: RankPatch.of(ranks)  # type: ignore[attr-defined]
        self._outside = self._snapshot()
        self._states = [
            [*(begin() for _, _, begin in _OWN), torch.get_rng_state()] for _ in range(self.size)
        ]
        return self

    def __exit__(self, *error: object) -> None:
        self._load(None)
        for state in self._states:
            if (post := state[len(_OWN) - 1]) is not None:
                _end(post)
        self._patched.undo()

    def current(self) -> int | None:
        """Return the rank to which the calling thread belongs; None outside."""
        # ``current_thread`` would make an object for a thread that Python did not start.
        return getattr(threading._active.get(threading.get_ident()), "rank", None)

    def run(self, work: Callable[[int], None]) -> None:
        """Call ``work`` with each rank in a thread of its own; raise the first rank's error."""
        threads = []
        for rank in range(self.size):
            options = {"args": (rank, work), "name": f"rank {rank}", "daemon": True}
            thread = threading.Thread(target=self._run, **options)
            thread.rank = rank  # type: ignore[attr-defined]
            threads.append(thread)
            thread.start()
        with self._changed:
            self._turn = 0
            self._changed.notify_all()
        self._join(threads)
        if self._failed:
            (first, error), *others = self._failed.items()
            if isinstance(error, pytest.skip.Exception):
                raise error
            error.add_note(f"raised on rank {first} of {self.size}")
            for rank, other in others:
                shown = "".join(traceback.format_exception_only(other))
                error.add_note(f"raised on rank {rank}: {shown}")
            raise error

    def _join(self, threads: Sequence[threading.Thread]) -> None:
        limit = time.monotonic() + _AT_MOST_S
        try:
            for thread in threads:
                thread.join(max(0.0, limit - time.monotonic()))
                if thread.is_alive():  # it waits for something else than Horovod
                    stack = traceback.format_stack(sys._current_frames()[thread.ident])
                    where = "".join(stack)
                    raise WouldHangError(f"{thread.name} does not end:\n{where}")
        except BaseException as error:  # a Ctrl-C too
            with self._changed:
                self._failed[-1] = error
                self._pass_turn(0)
            raise

    def _run(self, rank: int, work: Callable[[int], None]) -> None:
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._turn == rank)
            self._load(rank)
            self._check()
            work(rank)
        except Stopped:
            pass
        except BaseException as error:
            self._failed[rank] = error
        finally:
            with self._changed:
                self._alive.discard(rank)
                self.progressed()
                self._pass_turn(rank)

    # For the core: how ranks wait for each other.

    def wait(self, is_over: Callable[[], bool], what: Callable[[], str]) -> None:
        """Let other ranks run until ``is_over()``; ``what`` says for what this one waits."""
        if not is_over():
            self._yield(_Wait(is_over, what))

    def look(self, what: str) -> None:
        """Let other ranks run, after this one has looked in vain for ``what``."""
        rank = self.current()
        if rank is None:
            return
        self._looking[rank] = what
        if len(self._looking) == 1:
            self._looked, self._looks_since = 0, time.monotonic()
        self._looked += 1
        is_late = time.monotonic() - self._looks_since > self._patience_s
        if is_late and self._looked > _PATIENCE_POLLS and self._nobody_else():
            self._hang()
        self._yield(None)

    def progressed(self) -> None:
        """Note that a rank has done something for which others may have waited."""
        self._looking.clear()

    def sleep(self, seconds: float) -> None:
        """Sleep while other ranks run; threads that are no rank's own sleep as ever."""
        rank = self.current()
        if rank is None or threading.current_thread().name != f"rank {rank}":
            _really_sleep(seconds)
            return
        with self._changed:
            self._asleep.add(rank)
            self._pass_turn(rank)
        _really_sleep(seconds)
        with self._changed:
            self._asleep.discard(rank)
            if self._turn is None:
                self._turn = rank
            self._changed.wait_for(lambda: self._turn == rank)
        self._load(rank)
        self._check()

    def _nobody_else(self) -> bool:
        waiting = {rank for rank, wait in self._waits.items() if not wait.is_over()}
        return self._alive <= waiting | set(self._looking)

    def _yield(self, wait: _Wait | None) -> None:
        rank = self.current()
        assert rank is not None
        with self._changed:
            if wait is not None:
                self._waits[rank] = wait
            self._pass_turn(rank)
            self._changed.wait_for(lambda: self._turn == rank)
            self._waits.pop(rank, None)
        self._load(rank)
        self._check()

    def _pass_turn(self, rank: int) -> None:
        """Give the turn to the next rank that can run; nobody can: the job hangs."""
        order = [(rank + i) % self.size for i in range(1, self.size + 1)]
        stopped = bool(self._failed or self._hangs)
        for other in order:
            if other not in self._alive or other in self._asleep:
                continue
            wait = self._waits.get(other)
            if stopped or wait is None or wait.is_over():
                self._turn = other
                break
        else:
            self._turn = None
            if self._alive and not self._asleep:
                self._hang()
                self._turn = min(self._alive)
        self._changed.notify_all()

    def _hang(self) -> None:
        told = []
        for rank in range(self.size):
            if rank not in self._alive:
                told.append(f"rank {rank} has ended")
            elif rank in self._waits:
                told.append(f"rank {rank} waits for {self._waits[rank].what()}")
            else:
                told.append(f"rank {rank} looks for {self._looking.get(rank, 'nothing')}")
        self._hangs = "Horovod would hang: " + "; ".join(told)

    def _check(self) -> None:
        if self._failed:
            raise Stopped
        if self._hangs:
            raise WouldHangError(self._hangs)

    # What a process has once and each rank needs for itself.

    def _snapshot(self) -> list[Any]:
        return [*(getattr(owner, name) for owner, name, _ in _OWN), torch.get_rng_state()]

    def _load(self, rank: int | None) -> None:
        """Put a rank's own globals in place; None: those from before the job."""
        if rank == self._loaded:
            return
        if self._loaded is not None:
            self._states[self._loaded] = self._snapshot()
            for patch in reversed(self.patches[self._loaded]):
                patch.swap()
        state = self._outside if rank is None else self._states[rank]
        for (owner, name, _), value in zip(_OWN, state, strict=False):
            setattr(owner, name, value)
        warnings._filters_mutated()  # type: ignore[attr-defined]
        torch.set_rng_state(state[-1])
        if rank is not None:
            for patch in self.patches[rank]:
                patch.swap()
        self._loaded = rank

    def dispatch(self, target: Any, name: str, value: Any) -> dict[int, Any]:
        """Have calls of ``target.name`` go to the caller's rank's value; return all values.

        In this way a rank's worker thread finds them too, whosever turn it is.
        """
        table = self._tables.get((target, name))
        if table is None:
            table = self._tables[target, name] = {}
            plain, inside = getattr(target, name), threading.local()

            def call(*arguments: Any, **options: Any) -> Any:
                changed = table.get(self.current())  # type: ignore[arg-type]
                if changed is None or getattr(inside, "now", False):
                    return plain(*arguments, **options)
                inside.now = True  # what it replaces is, as it saw it, this function
                try:
                    return changed(*arguments, **options)
                finally:
                    inside.now = False

            self._patched.setattr(target, name, call)
        return table


def _end(post: watch.Post) -> None:
    """End the thread of a process's watches, and close its socket: there may be hundreds."""
    atexit.unregister(post.stop)
    post.stops.set()
    post.send(bytes(16), {}, ("127.0.0.1", post.address["port"]))  # it waits for one
    post.thread.join()
    post.socket.close()


class RankPatch:
    """pytest's monkeypatch for one rank: the others do not see what it changes."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self._rank = ranks, ranks.current()
        self._undo: list[Callable[[], None]] = []
        self._swapped: list[tuple[Callable[[], Any], Callable[[Any], None], list[Any]]] = []
        assert self._rank is not None
        ranks.patches[self._rank].append(self)

    @classmethod
    def of(cls, ranks: Ranks) -> RankPatch:
        return cls(ranks)

    def __enter__(self) -> RankPatch:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()

    def context(self) -> RankPatch:
        return RankPatch(self._ranks)

    def setattr(self, target: Any, name: str, value: Any) -> None:
        is_shared = inspect.ismodule(target) or inspect.isclass(target)
        if is_shared and callable(value):
            table = self._ranks.dispatch(target, name, value)
            table[self._rank] = value
            self._undo.append(lambda: table.pop(self._rank, None))
        elif is_shared:
            self._swap(lambda: getattr(target, name), lambda v: setattr(target, name, v), value)
        else:
            before = getattr(target, name)
            setattr(target, name, value)
            self._undo.append(lambda: setattr(target, name, before))

    def setitem(self, mapping: Any, name: str, value: Any) -> None:
        self._swap(lambda: mapping.get(name), lambda v: _put(mapping, name, v), value)

    def delenv(self, name: str) -> None:
        self._swap(lambda: os.environ.get(name), lambda v: _put(os.environ, name, v), None)

    def _swap(self, read: Callable[[], Any], write: Callable[[Any], None], value: Any) -> None:
        self._swapped.append((read, write, [read()]))
        write(value)

    def swap(self) -> None:
        """Exchange the values in force and those kept: at the begin and the end of a turn."""
        for read, write, kept in self._swapped:
            now, before = read(), kept.pop()
            kept.append(now)
            write(before)

    def undo(self) -> None:
        self.swap()
        self._swapped.clear()
        while self._undo:
            self._undo.pop()()


def _put(mapping: Any, name: str, value: Any) -> None:
    """Set an item, or remove it if the value is None."""
    if value is None:
        mapping.pop(name, None)
    else:
        mapping[name] = value
