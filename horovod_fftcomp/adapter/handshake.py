"""The first message of a compressor: do all ranks run the same thing? Pure; calls no network.

A difference would otherwise hang a job (names that do not match) or train it wrong. The message
has one size for ever, so that even different versions of this package can read each other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from horovod_fftcomp.errors import ConfigMismatchError
from horovod_fftcomp.types import Array
from horovod_fftcomp.wire.header import fnv1a

MESSAGE_NBYTES = 2048
_SHOWN = 250  # characters of a fact


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
        return f"{value[:_SHOWN]}... (hash {fnv1a(value):x})"
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
