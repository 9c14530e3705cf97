"""Handshake of a compressor's ranks: blocking exchanges that compare what every rank runs.

If the ranks differed, the job would hang (names of collectives that do not match) or train wrongly.
The message has a fixed size, so that ranks with different versions of this package can read it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from horovod_fftcomp import wire
from horovod_fftcomp.engine import checkpoint
from horovod_fftcomp.engine.overlap import Pending, Send
from horovod_fftcomp.errors import ConfigMismatchError
from horovod_fftcomp.schemes import Round
from horovod_fftcomp.types import Array
from horovod_fftcomp.version import __version__

MESSAGE_NBYTES = 2048
_SHOWN = 250  # characters of a fact
ADDRESS = "address"  # a fact that is told, not compared


def pack(facts: Mapping[str, object]) -> Array:
    """Return ``facts`` (JSON values) as a uint8 message of ``MESSAGE_NBYTES`` bytes.

    Of a long text the beginning goes, and the hash of all of it.
    """
    text = json.dumps({key: _shortened(value) for key, value in facts.items()}).encode()
    if len(text) > MESSAGE_NBYTES:
        raise ValueError(f"the facts take {len(text)} bytes, {MESSAGE_NBYTES} are there")
    return np.frombuffer(text.ljust(MESSAGE_NBYTES), np.uint8).copy()


def _shortened(value: object) -> object:
    if isinstance(value, str) and len(value) > _SHOWN:
        return f"{value[:_SHOWN]}... (hash {wire.fnv1a(value):x})"
    return value


def compare(gathered: Array) -> None:
    """Raise ConfigMismatchError if the gathered messages differ; the same text on all ranks."""
    compare_facts(unpack(gathered))


def unpack(gathered: Array) -> list[dict[str, Any]]:
    """Return the facts of each rank, of the gathered messages."""
    return [json.loads(m.tobytes()) for m in gathered.reshape(-1, MESSAGE_NBYTES)]


def compare_facts(facts: Sequence[Mapping[str, object]]) -> None:
    """Raise ConfigMismatchError if the ranks' facts differ, naming values and ranks.

    If recipes differ, facts that some ranks do not have are options of the others: left out.
    """
    differences = []
    recipes = {rank_facts.get("recipe") for rank_facts in facts}
    for key in dict.fromkeys(key for rank_facts in facts for key in rank_facts):
        if len(recipes) > 1 and any(key not in rank_facts for rank_facts in facts):
            continue
        ranks_by_value: dict[str, list[int]] = {}
        for rank, rank_facts in enumerate(facts):
            ranks_by_value.setdefault(str(rank_facts.get(key, "absent")), []).append(rank)
        if len(ranks_by_value) > 1:
            parts = [f"{value} on {_ranks(ranks)}" for value, ranks in ranks_by_value.items()]
            differences.append(f"{key} is " + " but ".join(parts))
    if not differences:
        return
    raise ConfigMismatchError(
        "the ranks of this job compress differently: "
        + "; ".join(differences)
        + ". Start every rank with the same script, arguments and package versions."
    )


def differing_numbers(told: Sequence[Mapping[str, Any]]) -> str:
    """Return in words that the ranks have made other numbers of compressors; "" if they have not.

    ``told``: of each rank the ``number`` of the compressor that it uses now, and how many it has
    ``made``. Where all have made as many, or use the same one, it is "": hooks of several
    optimizers may run in another order, and a compressor may be unused on some ranks.
    """
    ranks_by_counts: dict[tuple[int, int], list[int]] = {}
    for rank, counts in enumerate(told):
        ranks_by_counts.setdefault((counts["made"], counts["number"]), []).append(rank)
    if any(len(set(values)) < 2 for values in zip(*ranks_by_counts, strict=True)):
        return ""
    parts = [
        f"{_ranks(ranks)} made {made} and {'uses' if len(ranks) == 1 else 'use'} number {number}"
        for (made, number), ranks in ranks_by_counts.items()
    ]
    return (
        f"the ranks made different numbers of compressors: {', but '.join(parts)}, counted from 0. "
        "Compressors of different numbers never exchange anything. Make the same compressors in "
        "the same order on every rank, those that are not used included."
    )


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (" and more" if len(ranks) > 8 else "")
    return ("rank " if len(ranks) == 1 else "ranks ") + shown


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
        message = Round("allgather", pack({**versions, **facts}))
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
        facts = unpack(self._pending.wait(timeout_s))
        addresses = [told.pop(ADDRESS, {}) for told in facts]
        compare_facts(facts)
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
        told = pack({"number": number, "made": made})
        self._pending: Pending | None = send(Round("allgather", told), name, process_set)
        self._difference = ""

    def difference(self) -> str:
        """Return what is wrong, if that is known, without a wait; see ``differing_numbers``."""
        if self._pending is not None and self._pending.is_done():
            told, self._pending = unpack(self._pending.wait(0.0)), None
            self._difference = differing_numbers(told)
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
