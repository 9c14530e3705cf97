"""What the ranks of one compressor agree on, by blocking exchanges outside the hot path."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from horovod_fftcomp import wire
from horovod_fftcomp.adapter import handshake
from horovod_fftcomp.engine import checkpoint
from horovod_fftcomp.engine.overlap import Pending, Send
from horovod_fftcomp.errors import ConfigMismatchError
from horovod_fftcomp.schemes import Round
from horovod_fftcomp.version import __version__

ADDRESS = "address"  # a fact that is told, not compared


class Handshake:
    """The comparison of all ranks' ``facts``, under way.

    ``own``: the compressor's process set; ``optimizers``: that of the optimizer, if known.
    """

    def __init__(
        self, send: Send, facts: dict[str, Any], name: str, own: Any, optimizers: Any | None
    ) -> None:
        versions = {
            "horovod_fftcomp": __version__,
            "wire format": wire.VERSION,
            "process set": describe(own),
        }
        self._own, self._meeting = own, own if optimizers is None else optimizers
        message = Round("allgather", handshake.pack({**versions, **facts}))
        self._pending = send(message, name, self._meeting)

    def is_done(self, patience_s: float = 0.0) -> bool:
        """Tell whether all ranks' facts are there, or come within ``patience_s`` seconds."""
        limit = time.monotonic() + patience_s
        while not self._pending.is_done() and time.monotonic() < limit:
            time.sleep(0.001)
        return self._pending.is_done()

    def compare(self, timeout_s: float) -> dict[str, Any]:
        """Raise ConfigMismatchError, the same on all ranks, if they differ.

        Returns the address that the first rank has told.
        """
        facts = handshake.unpack(self._pending.wait(timeout_s))
        addresses = [told.pop(ADDRESS, {}) for told in facts]
        handshake.compare_facts(facts)
        own, meeting = describe(self._own), describe(self._meeting)
        if own != meeting:
            raise ConfigMismatchError(
                f"the compressor's process set is {own}, but that of its DistributedOptimizer is "
                f"{meeting}; give process_set= the same value in both"
            )
        return addresses[0]


class Numbers:
    """The comparison of which compressor each rank uses at its first, second, ... use of one.

    ``number``: that of the compressor that this rank begins to use; ``made``: how many it has made;
    ``name``: of the exchange, which does not depend on them, so ranks with other numbers meet.
    """

    def __init__(self, send: Send, number: int, made: int, name: str, process_set: Any) -> None:
        told = handshake.pack({"number": number, "made": made})
        self._pending: Pending | None = send(Round("allgather", told), name, process_set)
        self._difference = ""

    def difference(self) -> str:
        """Return what is wrong, if that is known, without a wait; see ``differing_numbers``."""
        if self._pending is not None and self._pending.is_done():
            told, self._pending = handshake.unpack(self._pending.wait(0.0)), None
            self._difference = handshake.differing_numbers(told)
        return self._difference


def gather_objects(
    send: Send, thing: object, name: str, process_set: Any, timeout_s: float
) -> list[Any]:
    """Return the ``thing`` of every rank, in rank order: values that ``checkpoint.pack`` takes.

    Horovod's own ``allgather_object`` knows no process sets.
    """
    data = np.frombuffer(checkpoint.pack(thing), np.uint8)
    message = np.concatenate([np.array([data.size], np.int64).view(np.uint8), data])
    gathered = send(Round("allgather", message), name, process_set).wait(timeout_s)
    things: list[Any] = []
    offset = 0
    while offset < gathered.size:
        begin = offset + 8
        offset = begin + int(gathered[offset:begin].copy().view(np.int64)[0])
        things.append(checkpoint.unpack(gathered[begin:offset].tobytes()))
    return things


def describe(process_set: Any) -> str:
    """Return the ranks of a process set in a text of bounded length."""
    ranks = process_set.ranks
    if process_set.process_set_id == 0 or ranks is None:
        return "global"
    listed = str(list(ranks))
    return listed if len(listed) < 100 else f"{len(ranks)} ranks ({wire.fnv1a(listed):x})"
