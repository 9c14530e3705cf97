"""Connection of a compressor's ranks: handshake, barrier of each step, gathered objects."""

from __future__ import annotations

import itertools
import os
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from horovod_fftcomp.adapter import handshake
from horovod_fftcomp.adapter.threads import ThreadRound
from horovod_fftcomp.adapter.watch import Watch
from horovod_fftcomp.engine.overlap import Inline, Pending, Send
from horovod_fftcomp.errors import ConfigMismatchError, UnsupportedError
from horovod_fftcomp.schemes import Round
from horovod_fftcomp.types import Array

# Compressors of this process whose handshake has not ended. The first hooks of several compressors
# may run in different orders on different ranks, so a handshake must not wait long while there are
# several; ranks that start together answer in milliseconds. The wait only improves the error: where
# the ranks differ, our message names the difference before Horovod raises one about shapes. However
# short it is, no bucket is exchanged before the handshake has ended, since ``open`` waits for it.
_unconnected: weakref.WeakSet[Connection] = weakref.WeakSet()
_GREETING_S = 2.0


@dataclass
class _CompressorCounts:
    """Numbers of compressors that this process has made, and used per ranks of a process set."""

    made: int = 0
    used: Counter[tuple[int, ...]] = field(default_factory=Counter)


_counts = _CompressorCounts()

JOINED = (
    "a rank has called hvd.join(), after which Horovod supports allreduces only. Give all "
    "ranks the same number of batches (PyTorch: DistributedSampler with drop_last=True, "
    "TensorFlow: drop_remainder=True or steps_per_epoch), or use Compression.none with "
    "replica_check='off'"
)


class _WatchedRound:
    """Pending round whose wait is limited by the watch and raises the error that it found."""

    def __init__(self, pending: Pending, watch: Watch) -> None:
        self._pending, self._watch = pending, watch
        self.is_done = pending.is_done

    def wait(self, timeout_s: float) -> Array:
        """Return the output. Raises ConfigMismatchError if the watch has ended the job."""
        try:
            return self._pending.wait(max(timeout_s, self._watch.limit_s))
        except Exception:
            self._watch.check()
            raise


class Connection:
    """Connection of one compressor to the same compressor on the other ranks of ``process_set``.

    ``name``: name of the compressor, the prefix of its operations' names. Steps after another
    handshake use other names, so they are never matched with operations of a dropped step that are
    still pending on some or all ranks. ``watch`` limits how long ranks wait for each other.
    ``groups`` returns the process sets, by their ranks, for rounds among a part of the ranks; all
    ranks call it once, after the handshake. ``by_order``: whether operations are matched by their
    order, not by their names, which then say more.
    """

    def __init__(
        self,
        send: Send,
        name: str,
        process_set: Any,
        watch: Watch,
        groups: Callable[[], Mapping[tuple[int, ...], Any]] = dict,
        by_order: bool = False,
    ) -> None:
        self.watch, self._by_order = watch, by_order
        self._start = send
        self._make_groups = groups
        self._groups: Mapping[tuple[int, ...], Any] = {}
        self._name = name
        self._number = int(name.rpartition(".")[2])
        _counts.made = max(_counts.made, self._number + 1)
        self._is_used = False
        self._epoch = 0  # number of handshakes since ``recount``, part of names of operations
        self.n_handshakes = 0  # since the start
        self._set = process_set
        self._timeout_s = watch.timeout_s
        self._handshake: handshake.Handshake | None = None
        self._barrier: Pending | None = None
        self._agreements = itertools.cycle(range(2))  # they block, so two names are enough
        self.is_up = False
        self.reset()

    def reset(self) -> None:
        """Drop a pending barrier; the next step starts with a new handshake."""
        self._handshake, self._barrier = None, None
        self.is_up = False
        self.watch.disconnect()
        _unconnected.add(self)

    def connect(self, facts: Callable[[], dict[str, Any]], optimizers: Any | None) -> None:
        """Start the handshake at the first call; finish it as soon as all ranks have answered.

        The first gradient waits for it, so that ranks that differ stop before they exchange
        anything; ``facts()`` is compared. ``optimizers``: the process set of the optimizer, if it
        is known. Raises ConfigMismatchError if the ranks differ.
        """
        if self._handshake is None:
            self._epoch += 1
            self.start_handshake(self.send, facts, optimizers)
            is_alone = len(_unconnected) <= 1
            patience_s = 0.0 if is_alone else _GREETING_S
        else:
            is_alone, patience_s = False, 0.0
        assert self._handshake is not None
        if is_alone or self._handshake.is_done(patience_s):
            self._finish_handshake()

    def send(self, round_: Round, name: str, process_set: Any) -> Pending:
        """Start a round of the present step, or of a call between two steps; see ``Send``."""
        if round_.among is not None:
            if not round_.among:  # this rank does not take part
                nothing = Inline().submit(lambda: round_.data[:0])
                return ThreadRound(nothing, name)
            process_set = self._groups[round_.among]
        name = f"{name}.{self._epoch}" if self._epoch else name
        try:
            return _WatchedRound(self._start(round_, name, process_set), self.watch)
        except ConfigMismatchError:
            self.watch.check()
            raise

    def start_handshake(
        self, send: Send, facts: Callable[[], dict[str, Any]], optimizers: Any | None
    ) -> None:
        """Start to compare ``facts()`` over ``send``, without waiting; ``open`` finishes it."""
        name = f"{self._name}.handshake"
        self._compare_number(self._set if optimizers is None else optimizers)
        self.n_handshakes += 1
        sent = {**facts(), handshake.ADDRESS: self.watch.start()}
        self._handshake = handshake.Handshake(send, sent, name, self._set, optimizers)

    def _compare_number(self, process_set: Any) -> None:
        """Start, at the first use, to compare this compressor's number between ranks.

        If the numbers differ, the handshakes have different names and wait forever; the watch reads
        this comparison and reports the reason. Elastic jobs do not compare: their new ranks have
        used no compressor yet.
        """
        if self._is_used or os.environ.get("HOROVOD_ELASTIC", "0") == "1":
            return
        self._is_used = True
        ranks = tuple(process_set.ranks)  # Horovod gives the id of a removed set to another one
        name = f"fftcomp.use.{_counts.used[ranks]}"
        _counts.used[ranks] += 1
        counts = self._number, _counts.made
        self.watch.compare(handshake.Numbers(self._start, *counts, name, process_set).difference)

    def _finish_handshake(self) -> None:
        assert self._handshake is not None
        with self.watch.calling("the first exchange of all ranks"):
            first = self._handshake.compare(self._timeout_s)
            self.watch.join_ranks(first, self._set.rank(), self._set.ranks)
            self._groups = self._groups or self._make_groups()
        self.is_up, self._handshake = True, None
        _unconnected.discard(self)

    def barrier(self) -> None:
        """Start an allreduce that counts the ranks which have begun this step; ``open`` reads it.

        A rank that called ``hvd.join`` takes part in allreduces only, with zeros; an allgather
        without it would crash Horovod.
        """
        ones = Round("allreduce", np.ones(1, np.float32))
        self._barrier = self.send(ones, f"{self._name}.present", self._set)

    def can_open(self) -> bool:
        """Return whether ``open`` would return without waiting."""
        return self.is_up and (self._barrier is None or self._barrier.is_done())

    def open(self) -> None:
        """Wait for handshake and barrier; UnsupportedError if a rank has called ``hvd.join``."""
        if not self.is_up:
            self._finish_handshake()
        if self._barrier is None:
            return
        present = self._barrier.wait(self._timeout_s)
        self._barrier = None
        if present[0] != handshake.size_of(self._set):
            raise UnsupportedError(JOINED)

    def leave_together(self) -> None:
        """Wait until all ranks have ended their step, if some rounds are among a part of the ranks.

        A rank that ended its process before that would shut Horovod down for the others.
        """
        if self._groups:
            ones = Round("allreduce", np.ones(1, np.float32))
            self.send(ones, f"{self._name}.parted", self._set).wait(self._timeout_s)

    def gather(self, call: str, value: object) -> list[Any]:
        """Return the ``value`` of every rank, in rank order; all have to make this ``call``."""
        self.watch.check()
        self._compare_number(self._set)
        which = call if self._by_order else next(self._agreements)
        name = f"{self._name}.agreement.{which}"
        self.watch.start()
        with self.watch.calling(call):
            gathered = handshake.gather_objects(
                self.send, (call, value), name, self._set, self._timeout_s
            )
        handshake.compare_facts([{"call": made} for made, _ in gathered])
        return [given for _, given in gathered]

    def recount(self) -> None:
        """Reset the counts in names, as after an elastic reset new ranks start with 0."""
        self.watch.disconnect()
        self._epoch = 0
        self._agreements = itertools.cycle(range(2))
