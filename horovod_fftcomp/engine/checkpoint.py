"""Gathered state of all ranks, its redistribution to another number of ranks, and as bytes."""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from horovod_fftcomp.schemes import Scheme
from horovod_fftcomp.types import Array, OldState, Tensor

FORMAT = 1
# The kinds of state that differ between ranks; all others are the same on all ranks.
PER_RANK = ("residual", "velocity", "shard_residual", "shard_begin")
FIRST_MOMENT = "first moment"  # begins the format of a velocity that is a mean


def gathered(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the states of all ranks, in rank order, as one state_dict."""
    return {"version": FORMAT, "world_size": len(states), "ranks": list(states)}


def part_of(saved: dict[str, Any], rank: int, world_size: int) -> dict[str, Any]:
    """Return the part of a saved state that ``rank`` of ``world_size`` ranks loads.

    ``saved``: the state of one rank, for the same rank and world size; or the ``gathered`` states
    of all ranks, for any world size. With fewer ranks than before, rank r gets the sums over the
    old ranks r, r + world_size, ...; with more, new ranks start without residuals. So the sum of
    all residuals is preserved, and the mean of first moments. State that is the same on all ranks
    is copied to new ones.

    Raises ValueError for another format version, rank or world size.
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
    for each in saved["ranks"]:  # with ``Hierarchical`` no rank has all of it
        for kind, arrays in common(each["state"]).items():
            merged[kind] = {**arrays, **merged.get(kind, {})}
    for part in parts:
        for kind in PER_RANK:
            if kind not in part["state"]:
                continue
            into = merged.setdefault(kind, {})
            for name, array in part["state"][kind].items():
                into[name] = into[name] + array if name in into else array
    formats, moments = saved["ranks"][0].get("formats", {}), merged.get("velocity", {})
    for name, array in moments.items():
        if formats.get(name, "").startswith(FIRST_MOMENT):
            moments[name] = array * np.float32(world_size / len(saved["ranks"]))
    here = {"rank": rank, "world_size": world_size, "state": merged}
    return {**saved["ranks"][0], **here}


def check_shard(saved: dict[str, Any], shard: str) -> None:
    """Raise ValueError unless a saved state is of ``shard``: "shard 0 of 2", "" for no shards."""
    found = saved.get("ranks", [saved])[0].get("shard", "")
    if found != shard:
        whole = "whole tensors (DDP or Horovod)"
        raise ValueError(
            f"this state is of {found or whole}, but this compressor is of {shard or whole}; "
            "residuals of FSDP shards fit no other shards and no whole tensors. Load a state that "
            "was saved by the same rank of a job that shards alike, or begin without residuals"
        )


def check_arrays(tensor: Tensor, state: OldState, scheme: Scheme) -> None:
    """Raise ValueError for an array of a tensor's state that its scheme does not accept."""
    for kind, arrays in state.items():
        if tensor.name not in arrays:
            continue
        array, known = arrays[tensor.name], scheme.state_arrays(tensor, state).get(kind)
        if known is None or not known.is_kept:
            raise ValueError(f"the recipe of {tensor.name!r} has no {kind}, but the state does")
        if (array.dtype, array.shape) != (known.dtype, (known.numel,)):
            raise ValueError(
                f"the {kind} of {tensor.name!r} is {array.dtype} of shape {list(array.shape)}, "
                f"expected {known.dtype} of [{known.numel}]; was the file cut or converted?"
            )


def common(state: OldState) -> OldState:
    """Return the part of a rank's state that is the same on all ranks."""
    return {kind: arrays for kind, arrays in state.items() if kind not in PER_RANK}


_TREE, _NUMBER = "state.json", "__array__"
# Errors of NumPy, zipfile and json for bytes that are not a state, or not any more.
_DAMAGED = (ValueError, KeyError, OSError, EOFError, TypeError, RuntimeError, MemoryError)


def pack(state: Any) -> bytes:
    """Return ``state`` as an ``.npz`` file: its arrays, and the rest as JSON; nothing is pickled.

    ``state``: JSON values, NumPy arrays of numbers, and dicts (with string keys) and lists of
    these; tuples come back as lists. TypeError for anything else.
    """
    arrays: list[Array] = []

    def numbered(value: Any) -> Any:
        if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
            arrays.append(value)
            return {_NUMBER: len(arrays) - 1}
        if isinstance(value, np.generic):
            return value.item()
        raise TypeError(f"a {type(value).__name__} cannot be part of a state: {value!r}")

    _check_keys(state)
    tree = np.frombuffer(json.dumps(state, default=numbered).encode(), np.uint8)
    named: dict[str, Any] = {_TREE: tree, **{str(n): array for n, array in enumerate(arrays)}}
    file = io.BytesIO()
    np.savez(file, **named)
    return file.getvalue()


def _check_keys(value: Any) -> None:
    """Raise TypeError for a key that is not a string: JSON would convert it to one."""
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"keys of a state must be strings, got {key!r}")
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for part in value:
            _check_keys(part)


def unpack(data: bytes) -> Any:
    """Return what ``pack`` made bytes of; ValueError for other bytes, none of which is executed."""
    if data[:1] == b"\x80":
        raise ValueError(
            "this state is a pickle, as development versions of horovod_fftcomp 0.1.0 wrote it; it "
            "was not read, since reading a pickle may run any code. Leave compression= out of the "
            "tf.train.Checkpoint to begin without residuals, or, if you trust the file, load its "
            "state once by compression.load_state_dict(pickle.loads(data)), data = "
            "tf.train.load_checkpoint(path).get_tensor('compression/.ATTRIBUTES/py_state')"
        )
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:

            def placed(value: dict[str, Any]) -> Any:
                number = value.get(_NUMBER) if len(value) == 1 else None
                return arrays[str(number)] if type(number) is int else value

            return json.loads(arrays[_TREE].tobytes(), object_hook=placed)
    except (*_DAMAGED, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"these bytes are no state of a compressor: {error}") from error
