"""State of all ranks in one piece, and how it is dealt out when their number changes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

FORMAT = 1
# The kinds of state that belong to a rank; all others are the same on all of them.
PER_RANK = ("residual", "velocity")


def gathered(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the per-rank states, in rank order, as one."""
    return {"version": FORMAT, "world_size": len(states), "ranks": list(states)}


def part_of(saved: dict[str, Any], rank: int, world_size: int) -> dict[str, Any]:
    """Return what ``rank`` of ``world_size`` has to load of a saved state.

    ``saved``: what one rank saved, for the same rank of as many; or all ranks' ``gathered``
    states, for any number of ranks. With fewer ranks than before, rank r takes the sums over the
    old ranks r, r + world_size, ...; with more, the new ranks begin without. So the sum of all
    residuals stays what it was. What is the same on all ranks new ones have as well.

    Raises ValueError for a state that cannot serve.
    """
    if saved.get("version") != FORMAT:
        raise ValueError(f"state_dict version is {saved.get('version')!r}, expected {FORMAT}")
    if "ranks" not in saved:
        if (saved["rank"], saved["world_size"]) != (rank, world_size):
            raise ValueError(
                f"this state is of rank {saved['rank']} of {saved['world_size']}, but this is "
                f"rank {rank} of {world_size}; save gathered_state_dict() to resume with another "
                "number of ranks"
            )
        return saved
    parts = saved["ranks"][rank::world_size]
    merged: dict[str, dict[str, Any]] = {}
    for each in saved["ranks"]:  # where nodes have leaders, no rank has all of it
        for kind, arrays in common(each["state"]).items():
            merged[kind] = {**arrays, **merged.get(kind, {})}
    for part in parts:
        for kind in PER_RANK:
            if kind not in part["state"]:
                continue
            into = merged.setdefault(kind, {})
            for name, array in part["state"][kind].items():
                into[name] = into[name] + array if name in into else array
    here = {"rank": rank, "world_size": world_size, "state": merged}
    return {**saved["ranks"][0], **here}


def common(state: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return what of a rank's state is the same on all ranks."""
    return {kind: arrays for kind, arrays in state.items() if kind not in PER_RANK}
