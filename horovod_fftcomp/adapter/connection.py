"""How the ranks of one compressor meet: the handshake, each step's roll call, agreements."""

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
from horovod_fftcomp.adapter.process_sets import size_of
from horovod_fftcomp.adapter.watch import Watch, await_shutdown
from horovod_fftcomp.engine.overlap import Pending, Send
from horovod_fftcomp.errors import ConfigMismatchError, UnsupportedError
from horovod_fftcomp.schemes import Round
from horovod_fftcomp.types import Array

# Compressors of this process whose handshake is not over. Hooks of several may come first in
# another order on another rank, so none of them may then wait for long; ranks that begin
# together answer in milliseconds. The wait is a courtesy to ranks that differ: the message that
# names the difference then comes before an error of Horovod's about shapes. However short it is, no
# bucket is exchanged before the handshake has ended, for which ``open`` waits.
_unconnected: weakref.WeakSet[Connection] = weakref.WeakSet()
_GREETING_S = 2.0


@dataclass
class _Counts:
    """How many compressors this process has made, and used in each process set, by its number."""

    made: int = 0
    used: Counter[int] = field(default_factory=Counter)


_counts = _Counts()

JOINED = (
    "a rank has called hvd.join(), under which Horovod exchanges nothing but allreduces. Give all "
    "ranks the same number of batches (PyTorch: DistributedSampler with drop_last=True, "
    "TensorFlow: drop_remainder=True or steps_per_epoch), or use Compression.none with "
    "replica_check='off'"
)


class _NoPart:
    """A round in which this rank has no part."""

    def __init__(self, round_: Round) -> None:
        self._nothing = round_.data[:0]

    def is_done(self) -> bool:
        """Tell that there is nothing to wait for."""
        return True

    def wait(self, timeout_s: float) -> Array:
        """Return no data."""
        del timeout_s
        return self._nothing


class _Watched:
    """A round that is waited for as long as the watch allows, and fails with what it has found."""

    def __init__(self, pending: Pending, watch: Watch) -> None:
        self._pending, self._watch = pending, watch
        self.is_done = pending.is_done

    def wait(self, timeout_s: float) -> Array:
        """Return the output; ConfigMismatchError if the watch has ended the job."""
        try:
            return self._pending.wait(max(timeout_s, self._watch.limit_s))
        except Exception:
            _check(self._watch)
            raise


def _check(watch: Watch) -> None:
    """Raise ConfigMismatchError if the watch has ended the job."""
    if watch.verdict:
        await_shutdown()
        raise ConfigMismatchError(watch.verdict)


class Connection:
    """One compressor's link to its like on the other ranks of ``process_set``.

    ``name``: that of the compressor, with which all its operations begin. Steps that begin after
    another handshake use other names, so nothing that a dropped step has left on its way, on some
    ranks or on all, can meet them. ``watch`` says how long ranks wait for each other. ``groups``
    makes the process sets, by their ranks, of rounds among some ranks alone; it is called once, by
    all ranks, when they have greeted each other.
    """

    def __init__(
        self,
        send: Send,
        name: str,
        process_set: Any,
        watch: Watch,
        groups: Callable[[], Mapping[tuple[int, ...], Any]] = dict,
    ) -> None:
        self.watch = watch
        self._start = send
        self._make_groups = groups
        self._groups: Mapping[tuple[int, ...], Any] = {}
        self._name = name
        self._number = int(name.rpartition(".")[2])
        _counts.made = max(_counts.made, self._number + 1)
        self._is_used = False
        self._epoch = 0  # how many handshakes this rank has begun
        self.greetings = 0  # so many as well, however ranks are counted
        self._set = process_set
        self._timeout_s = watch.timeout_s
        self._handshake: handshake.Handshake | None = None
        self._roll_call: Pending | None = None
        self._agreements = itertools.cycle(range(2))  # they block: more names are not needed
        self.is_up = False
        self.reset()

    def reset(self) -> None:
        """Forget a roll call under way, and compare configurations again."""
        self._handshake, self._roll_call = None, None
        self.is_up = False
        self.watch.leave()
        _unconnected.add(self)

    def connect(self, facts: Callable[[], dict[str, Any]], optimizers: Any | None) -> None:
        """Compare ``facts()`` with the other ranks'; raise ConfigMismatchError if they differ.

        The first gradient waits, so that ranks that differ stop before they exchange anything.
        ``optimizers``: the process set of the optimizer that is served, if it is known.
        """
        if self._handshake is None:
            self._epoch += 1
            self.greet(self.send, facts, optimizers)
            is_alone = len(_unconnected) <= 1
            patience_s = 0.0 if is_alone else _GREETING_S
        else:
            is_alone, patience_s = False, 0.0
        assert self._handshake is not None
        if is_alone or self._handshake.is_done(patience_s):
            self._hear()

    def send(self, round_: Round, name: str, process_set: Any) -> Pending:
        """Start a round of the present step, or of an agreement between two; see ``Send``."""
        if round_.among is not None:
            if not round_.among:
                return _NoPart(round_)
            process_set = self._groups[round_.among]
        name = f"{name}.{self._epoch}" if self._epoch else name
        return _Watched(self._start(round_, name, process_set), self.watch)

    def check(self) -> None:
        """Raise ConfigMismatchError if the watch has ended the job."""
        _check(self.watch)

    def greet(
        self, send: Send, facts: Callable[[], dict[str, Any]], optimizers: Any | None
    ) -> None:
        """Begin to compare ``facts()`` by ``send``, without a wait; ``open`` ends it."""
        name = f"{self._name}.handshake"
        self._tell_number(self._set if optimizers is None else optimizers)
        self.greetings += 1
        told = {**facts(), handshake.ADDRESS: self.watch.start()}
        self._handshake = handshake.Handshake(send, told, name, self._set, optimizers)

    def _tell_number(self, process_set: Any) -> None:
        """Compare, at the first use, the number of this compressor with those of the other ranks'.

        Where they differ, the handshakes have different names and wait for ever: the watch looks at
        this comparison, and says why. Ranks that are new to an elastic job have used none.
        """
        if self._is_used or os.environ.get("HOROVOD_ELASTIC", "0") == "1":
            return
        self._is_used = True
        set_number = process_set.process_set_id
        name = f"fftcomp.use.{_counts.used[set_number]}"
        _counts.used[set_number] += 1
        counts = self._number, _counts.made
        self.watch.compare(handshake.Numbers(self._start, *counts, name, process_set).difference)

    def _hear(self) -> None:
        assert self._handshake is not None
        self.watch.calls("the first exchange of all ranks")
        try:
            first = self._handshake.compare(self._timeout_s)
        finally:
            self.watch.calls("")
        self.watch.join_ranks(first, self._set.rank(), self._set.ranks)
        self._groups = self._groups or self._make_groups()
        self.is_up, self._handshake = True, None
        _unconnected.discard(self)

    def barrier(self) -> None:
        """Ask whether all ranks have begun this step: an allgather without one crashes Horovod.

        A rank that has left by ``hvd.join`` takes part in allreduces alone, with zeros.
        """
        ones = Round("allreduce", np.ones(1, np.float32))
        self._roll_call = self.send(ones, f"{self._name}.present", self._set)

    def may_open(self) -> bool:
        """Tell whether ``open`` would return without a wait."""
        return self.is_up and (self._roll_call is None or self._roll_call.is_done())

    def open(self) -> None:
        """Wait until this step's exchanges may begin; UnsupportedError if a rank has left."""
        if not self.is_up:
            self._hear()
        if self._roll_call is None:
            return
        present = self._roll_call.wait(self._timeout_s)
        self._roll_call = None
        if present[0] != size_of(self._set):
            raise UnsupportedError(JOINED)

    def leave_together(self) -> None:
        """Wait, where some ranks exchange without the others, until all have ended their step.

        A rank that leaves the job before would take Horovod from those that have not.
        """
        if self._groups:
            ones = Round("allreduce", np.ones(1, np.float32))
            self.send(ones, f"{self._name}.parted", self._set).wait(self._timeout_s)

    def gather(self, call: str, thing: object) -> list[Any]:
        """Return the ``thing`` of every rank, in rank order; all have to make this ``call``."""
        self.check()
        self._tell_number(self._set)
        name = f"{self._name}.agreement.{next(self._agreements)}"
        self.watch.start()
        self.watch.calls(call)
        try:
            found = handshake.gather_objects(
                self.send, (call, thing), name, self._set, self._timeout_s
            )
        finally:
            self.watch.calls("")
        handshake.compare_facts([{"call": made} for made, _ in found])
        return [one for _, one in found]

    def recount(self) -> None:
        """Count from 0 again, as ranks do that are new after an elastic reset."""
        self.watch.leave()
        self._epoch = 0
        self._agreements = itertools.cycle(range(2))
