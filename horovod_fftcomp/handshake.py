"""The first message of a compressor: do all ranks run the same thing? Pure; calls no network.

A difference would otherwise hang a job (names that do not match) or train it wrong. The message
has one size for ever, so that even different versions of this package can read each other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np

from horovod_fftcomp.backends import Array
from horovod_fftcomp.errors import ConfigMismatchError

MESSAGE_NBYTES = 2048


def pack(facts: Mapping[str, object]) -> Array:
    """Return ``facts`` (JSON values) as a uint8 message of ``MESSAGE_NBYTES`` bytes."""
    text = json.dumps(facts).encode()
    if len(text) > MESSAGE_NBYTES:
        raise ValueError(f"the facts take {len(text)} bytes, {MESSAGE_NBYTES} are there")
    return np.frombuffer(text.ljust(MESSAGE_NBYTES), np.uint8).copy()


def compare(gathered: Array) -> None:
    """Raise ConfigMismatchError if the gathered messages differ; the same text on all ranks."""
    messages = [message.tobytes() for message in gathered.reshape(-1, MESSAGE_NBYTES)]
    if len(set(messages)) == 1:
        return
    facts = [json.loads(message) for message in messages]
    differences = []
    for key in dict.fromkeys(key for rank_facts in facts for key in rank_facts):
        ranks_by_value: dict[str, list[int]] = {}
        for rank, rank_facts in enumerate(facts):
            ranks_by_value.setdefault(str(rank_facts.get(key, "absent")), []).append(rank)
        if len(ranks_by_value) > 1:
            parts = [f"{value} on {_ranks(ranks)}" for value, ranks in ranks_by_value.items()]
            differences.append(f"{key} is " + " but ".join(parts))
    raise ConfigMismatchError(
        "the ranks of this job compress differently: "
        + "; ".join(differences)
        + ". Start every rank with the same script, arguments and package versions."
    )


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (" and more" if len(ranks) > 8 else "")
    return ("rank " if len(ranks) == 1 else "ranks ") + shown
