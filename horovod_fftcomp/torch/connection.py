"""How the ranks of one compressor meet: the handshake, each step's roll call, agreements."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import numpy as np

from horovod_fftcomp.errors import UnsupportedError
from horovod_fftcomp.schemes import Round
from horovod_fftcomp.torch import agreement
from horovod_fftcomp.torch.rounds import PendingRound

# Compressors of this process whose handshake is not over. Hooks of several may come first in
# another order on another rank, so none of them may then wait for long; ranks that begin
# together answer in milliseconds.
_unconnected: weakref.WeakSet[Connection] = weakref.WeakSet()
_GREETING_S = 2.0


class Connection:
    """One compressor's link to its like on the other ranks of ``process_set``.

    ``name``: that of the compressor, with which all its operations begin.
    """

    def __init__(self, name: str, process_set: hvd.ProcessSet, timeout_s: float) -> None:
        self._name = name
        self._set = process_set
        self._timeout_s = timeout_s
        self._handshake: agreement.Handshake | None = None
        self._roll_call: PendingRound | None = None
        self._agreements = itertools.count()
        self.is_up = False
        self.reset()

    def reset(self) -> None:
        """Forget a roll call under way, and compare configurations again."""
        self._handshake, self._roll_call = None, None
        self.is_up = False
        _unconnected.add(self)

    def connect(self, facts: Callable[[], dict[str, Any]], compression: object) -> None:
        """Compare ``facts()`` with the other ranks'; raise ConfigMismatchError if they differ.

        The first gradient waits, so that ranks that differ stop before they exchange anything.
        ``compression``: what the optimizer whose hook is calling was given.
        """
        if self._handshake is None:
            optimizers = agreement.process_set_of_optimizer(compression)
            name = f"{self._name}.handshake"
            self._handshake = agreement.Handshake(facts(), name, self._set, optimizers)
            is_alone = len(_unconnected) <= 1
            patience_s = 0.0 if is_alone else _GREETING_S
        else:
            is_alone, patience_s = False, 0.0
        if is_alone or self._handshake.is_done(patience_s):
            self._hear()

    def _hear(self) -> None:
        assert self._handshake is not None
        self._handshake.compare(self._timeout_s)
        self.is_up, self._handshake = True, None
        _unconnected.discard(self)

    def call_roll(self) -> None:
        """Ask whether all ranks have begun this step: an allgather without one crashes Horovod.

        A rank that has left by ``hvd.join`` takes part in allreduces alone, with zeros.
        """
        ones = Round("allreduce", np.ones(1, np.float32))
        self._roll_call = PendingRound(ones, f"{self._name}.present", self._set)

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
        if present[0] != self._set.size():
            raise UnsupportedError(
                "a rank has called hvd.join(), under which Horovod exchanges nothing but "
                "allreduces. Give all ranks the same number of batches (DistributedSampler with "
                "drop_last=True), or use Compression.none with replica_check='off'"
            )

    def gather(self, thing: object) -> list[Any]:
        """Return the ``thing`` of every rank, in rank order; all have to call it alike."""
        name = f"{self._name}.agreement.{next(self._agreements)}"
        return agreement.gather_objects(thing, name, self._set, self._timeout_s)

    def recount(self) -> None:
        """Count agreements from 0 again, as ranks do that are new after an elastic reset."""
        self._agreements = itertools.count()
