"""Handshake of a compressor's ranks, which compares what every rank runs; gathered objects.

If the ranks differed, the job would hang (names of collectives that do not match) or train wrongly.
The message has a fixed size, so that ranks with different versions of this package can read it.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from horovod_fftcomp import wire
from horovod_fftcomp.engine import checkpoint
from horovod_fftcomp.engine.overlap import Pending, Send
from horovod_fftcomp.errors import ConfigMismatchError, list_ranks
from horovod_fftcomp.schemes import Round
from horovod_fftcomp.types import Array
from horovod_fftcomp.wire.version import __version__

MESSAGE_NBYTES = 2048
_SHOWN = 250  # characters sent of a fact
ADDRESS = "address"  # key of a fact that is sent but not compared


def pack(facts: Mapping[str, object]) -> Array:
    """Return ``facts`` (JSON values) as a uint8 message of ``MESSAGE_NBYTES`` bytes.

    A text above 250 characters is replaced by its beginning and the hash of the whole. ValueError
    if the facts are too long all the same.
    """
    text = json.dumps({key: _shortened(value) for key, value in facts.items()}).encode()
    if len(text) > MESSAGE_NBYTES:
        raise ValueError(f"the facts take {len(text)} bytes, but a message has {MESSAGE_NBYTES}")
    return np.frombuffer(text.ljust(MESSAGE_NBYTES), np.uint8).copy()


def _shortened(value: object) -> object:
    if isinstance(value, str) and len(value) > _SHOWN:
        return f"{value[:_SHOWN]}... (hash {wire.fnv1a(value):x})"
    return value


def compare(gathered: Array) -> None:
    """Raise ConfigMismatchError, with the same text on all ranks, if the messages differ."""
    compare_facts(unpack(gathered))


def unpack(gathered: Array) -> list[dict[str, Any]]:
    """Return the facts of each rank from the gathered messages."""
    return [json.loads(m.tobytes()) for m in gathered.reshape(-1, MESSAGE_NBYTES)]


def compare_facts(facts: Sequence[Mapping[str, object]]) -> None:
    """Raise ConfigMismatchError if the ranks' facts differ; the error names values and ranks.

    If the recipes differ, facts that only some ranks have are options of their recipe and are not
    compared.
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
            parts = [f"{value} on {list_ranks(ranks)}" for value, ranks in ranks_by_value.items()]
            differences.append(f"{key} is " + " but ".join(parts))
    if not differences:
        return
    raise ConfigMismatchError(
        "the ranks of this job compress differently: "
        + "; ".join(differences)
        + ". Start every rank with the same script, arguments and package versions."
    )


def differing_numbers(counts_by_rank: Sequence[Mapping[str, Any]]) -> str:
    """Return an error message if the ranks made different numbers of compressors, else "".

    ``counts_by_rank``: for each rank the ``number`` of the compressor that it uses now and the
    count of compressors that it has ``made``. The result is also "" if all ranks made equally many,
    or all use the same one: hooks of several optimizers may run in different orders, and some ranks
    may leave a compressor unused.
    """
    ranks_by_counts: dict[tuple[int, int], list[int]] = {}
    for rank, counts in enumerate(counts_by_rank):
        ranks_by_counts.setdefault((counts["made"], counts["number"]), []).append(rank)
    if any(len(set(values)) < 2 for values in zip(*ranks_by_counts, strict=True)):
        return ""
    parts = [
        f"{list_ranks(ranks)} made {made} and use{'s' * (len(ranks) == 1)} number {number}"
        for (made, number), ranks in ranks_by_counts.items()
    ]
    return (
        f"the ranks made different numbers of compressors: {', but '.join(parts)}, counted from 0. "
        "Compressors of different numbers never exchange anything. Make the same compressors in "
        "the same order on every rank, those that are not used included."
    )


class Handshake:
    """Asynchronous comparison of all ranks' ``facts``, started when it is made.

    ``own``: the compressor's process set; ``optimizers``: that of the optimizer, if known, in which
    the messages are gathered.
    """

    def __init__(
        self, send: Send, facts: dict[str, Any], name: str, own: Any, optimizers: Any | None
    ) -> None:
        versions = {"horovod_fftcomp": __version__, "wire format": wire.VERSION}
        self._own, self._optimizers = own, own if optimizers is None else optimizers
        message = Round("allgather", pack({**versions, "process set": describe(own), **facts}))
        self._pending = send(message, name, self._optimizers)

    def is_done(self, patience_s: float = 0.0) -> bool:
        """Return whether all ranks' facts have arrived; wait up to ``patience_s`` seconds."""
        limit = time.monotonic() + patience_s
        while not self._pending.is_done() and time.monotonic() < limit:
            time.sleep(0.001)
        return self._pending.is_done()

    def compare(self, timeout_s: float) -> dict[str, Any]:
        """Compare the facts and return the first rank's address.

        Raises ConfigMismatchError, with the same text on all ranks, if they differ.
        """
        facts = unpack(self._pending.wait(timeout_s))
        addresses = [rank_facts.pop(ADDRESS, {}) for rank_facts in facts]
        compare_facts(facts)
        own, optimizers = describe(self._own), describe(self._optimizers)
        if own != optimizers:
            raise ConfigMismatchError(
                f"the compressor's process set is {own}, but that of its DistributedOptimizer is "
                f"{optimizers}; give process_set= the same value in both"
            )
        return addresses[0]


class Numbers:
    """Asynchronous comparison of the numbers of the compressors that the ranks start to use.

    ``number``: number of this rank's compressor; ``made``: count of compressors that this rank has
    made; ``name``: name of the exchange. The name depends on neither, so that ranks with different
    numbers still exchange them.
    """

    def __init__(self, send: Send, number: int, made: int, name: str, process_set: Any) -> None:
        message = pack({"number": number, "made": made})
        self._pending: Pending | None = send(Round("allgather", message), name, process_set)
        self._difference = ""

    def difference(self) -> str:
        """Return ``differing_numbers`` of the ranks without waiting; "" until all have answered."""
        if self._pending is not None and self._pending.is_done():
            pending, self._pending = self._pending, None  # an error is the handshake's to report
            with contextlib.suppress(Exception):
                self._difference = differing_numbers(unpack(pending.wait(0.0)))
        return self._difference


def gather_objects(
    send: Send, value: object, name: str, process_set: Any, timeout_s: float
) -> list[Any]:
    """Return the ``value`` of every rank, in rank order; ``checkpoint.pack`` serializes it.

    Horovod's own ``allgather_object`` takes no process set.
    """
    data = np.frombuffer(checkpoint.pack(value), np.uint8)
    message = np.concatenate([np.array([data.size], np.int64).view(np.uint8), data])
    gathered = send(Round("allgather", message), name, process_set).wait(timeout_s)
    values: list[Any] = []
    offset = 0
    while offset < gathered.size:
        begin = offset + 8
        offset = begin + int(gathered[offset:begin].copy().view(np.int64)[0])
        values.append(checkpoint.unpack(gathered[begin:offset].tobytes()))
    return values


def size_of(process_set: Any) -> int:
    """Return the number of ranks, without waiting.

    Horovod's own ``size()`` takes a lock that its background thread holds during exchanges.
    """
    return len(process_set.ranks)


def describe(process_set: Any) -> str:
    """Return the ranks of a process set as a text of bounded length."""
    ranks = process_set.ranks
    if process_set.process_set_id == 0 or ranks is None:
        return "global"
    listed = str(list(ranks))
    return listed if len(listed) < 100 else f"{len(ranks)} ranks ({wire.fnv1a(listed):x})"
