"""Connection of a compressor's ranks: handshake, barrier of each step, gathered objects."""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from horovod_fftcomp.adapter import handshake
from horovod_fftcomp.adapter.settings import Settings, is_elastic
from horovod_fftcomp.adapter.threads import ThreadRound
from horovod_fftcomp.adapter.watch import Watch
from horovod_fftcomp.engine.overlap import Inline, Pending, Send
from horovod_fftcomp.errors import ConfigMismatchError, UnsupportedError
from horovod_fftcomp.schemes import Round
from horovod_fftcomp.schemes.hierarchical import Ranks
from horovod_fftcomp.types import Array

# Compressors of this process whose handshake has not ended. The first hooks of several compressors
# may run in different orders on different ranks, so a handshake must not wait long while there are
# several; ranks that start together answer in milliseconds. The wait only improves the error: where
# the ranks differ, our message names the difference before Horovod raises one about shapes. However
# short it is, no bucket is exchanged before the handshake has ended, since ``open`` waits for it.
unconnected: weakref.WeakSet[Connection] = weakref.WeakSet()
GREETING_S = 2.0


# Compressors of this process: how many were made, and how many are used by these ranks.
counters: Counter[str | Ranks] = Counter()

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

    ``name``: prefix of its operations' names, with the compressor's number. Every rank makes its
    compressors in the same order, so equal numbers denote the same compressor. ``facts()``: what
    the handshake compares. Steps after another handshake use other names, so they are never matched
    with operations of a dropped step that are still pending on some or all ranks; where names do
    not count, the header of a step tells. ``watch`` limits how long ranks wait for each other;
    ``shutdown`` ends all waits. ``groups`` returns the process sets, by their ranks, for rounds
    among a part of the ranks; all ranks call it once, after the handshake. ``by_order``: whether
    operations are matched by their order, not by their names, which then say more.
    """

    def __init__(
        self,
        send: Send,
        facts: Callable[[], dict[str, Any]],
        settings: Settings,
        recipe: str,
        process_set: Any,
        shutdown: Callable[[], None],
        groups: Callable[[], Mapping[Ranks, Any]],
        by_order: bool,
    ) -> None:
        self._start, self._facts, self._make_groups = send, facts, groups
        self._by_order = by_order
        self._groups: Mapping[Ranks, Any] = {}
        self._number = counters["made"]
        counters["made"] += 1
        self.name = f"fftcomp.{self._number}"
        self._timeout_s, ends = settings.timeout_s, settings.on_timeout == "raise"
        self.watch = Watch(self.name, recipe, self._timeout_s, ends, shutdown)
        self._is_used = False
        self._epoch = 0  # number of handshakes since ``recount``, part of names of operations
        self.n_handshakes = 0  # since the start
        self.process_set = process_set
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
        unconnected.add(self)

    def connect(self, optimizers: Any | None = None) -> None:
        """Start the handshake at the first call; finish it as soon as all ranks have answered.

        The first gradient waits for it, so that ranks that differ stop before they exchange
        anything. ``optimizers``: the process set of the optimizer, if it
        is known. Raises ConfigMismatchError if the ranks differ.
        """
        if is_first := self._handshake is None:
            self._epoch += 1
            self.start_handshake(self.send, optimizers)
        assert self._handshake is not None
        is_alone = is_first and len(unconnected) <= 1
        if is_alone or self._handshake.is_done(GREETING_S if is_first else 0.0):
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

    def start_handshake(self, send: Send, optimizers: Any | None) -> None:
        """Start to compare the facts over ``send``, without waiting; ``open`` finishes it."""
        name = f"{self.name}.handshake"
        self._compare_number(self.process_set if optimizers is None else optimizers)
        self.n_handshakes += 1
        sent = {**self._facts(), handshake.ADDRESS: self.watch.start()}
        self._handshake = handshake.Handshake(send, sent, name, self.process_set, optimizers)

    def _compare_number(self, process_set: Any) -> None:
        """Start, at the first use, to compare this compressor's number between ranks.

        If the numbers differ, the handshakes have different names and wait forever; the watch reads
        this comparison and reports the reason. Elastic jobs do not compare: their new ranks have
        used no compressor yet.
        """
        if self._is_used or is_elastic():
            return
        self._is_used = True
        ranks = tuple(process_set.ranks)  # Horovod gives the id of a removed set to another one
        name = f"fftcomp.use.{counters[ranks]}"
        counters[ranks] += 1
        counts = self._number, counters["made"]
        self.watch.compare(handshake.Numbers(self._start, *counts, name, process_set).difference)

    def _finish_handshake(self) -> None:
        assert self._handshake is not None
        with self.watch.calling("the first exchange of all ranks"):
            first = self._handshake.compare(self._timeout_s)
            self.watch.join_ranks(first, self.process_set.rank(), self.process_set.ranks)
            self._groups = self._groups or self._make_groups()
        self.is_up, self._handshake = True, None
        unconnected.discard(self)

    def barrier(self) -> None:
        """Start an allreduce that counts the ranks which have begun this step; ``open`` reads it.

        A rank that called ``hvd.join`` takes part in allreduces only, with zeros; an allgather
        without it would crash Horovod.
        """
        ones = Round("allreduce", np.ones(1, np.float32))
        self._barrier = self.send(ones, f"{self.name}.present", self.process_set)

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
        if present[0] != handshake.size_of(self.process_set):
            raise UnsupportedError(JOINED)

    def leave_together(self) -> None:
        """Wait until all ranks have ended their step, if some rounds are among a part of the ranks.

        A rank that ended its process before that would shut Horovod down for the others.
        """
        if self._groups:
            ones = Round("allreduce", np.ones(1, np.float32))
            self.send(ones, f"{self.name}.parted", self.process_set).wait(self._timeout_s)

    def gather(self, call: str, value: object) -> list[Any]:
        """Return the ``value`` of every rank, in rank order; all have to make this ``call``."""
        self.watch.check()
        self._compare_number(self.process_set)
        which = call if self._by_order else next(self._agreements)
        name = f"{self.name}.agreement.{which}"
        self.watch.start()
        with self.watch.calling(call):
            gathered = handshake.gather_objects(
                self.send, (call, value), name, self.process_set, self._timeout_s
            )
        handshake.compare_facts([{"call": made} for made, _ in gathered])
        return [given for _, given in gathered]

    def recount(self) -> None:
        """Reset the counts in names, as after an elastic reset new ranks start with 0."""
        self.watch.disconnect()
        self._epoch = 0
        self._agreements = itertools.cycle(range(2))
