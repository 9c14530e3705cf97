"""Descriptor tables of CUDA launches: a row for each tensor, laid out as the structs in ``src``."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from horovod_fftcomp.codec.quantizers import Float32
from horovod_fftcomp.codec.sparse import Codec
from horovod_fftcomp.codec.transforms import BlockDCT, Identity, Transform
from horovod_fftcomp.kernels.cuda import Device
from horovod_fftcomp.kernels.ops import AnyCodec, Codecs
from horovod_fftcomp.types import Array, Coding
from horovod_fftcomp.wire.header import Plan
from horovod_fftcomp.wire.positions import Layout

# As in src/common.cuh.
TILE, THREADS = 4096, 256
WARPS = THREADS // 32
RESIDENT = 4  # blocks at a time on a processor of a GPU
WORDS = TILE // 32  # of a tile's bit mask, of reals
FOUND_NBYTES, ROW_COUNTS_NBYTES, START_NBYTES = 32 + 4 * 2048, 16, 12
NESTEROV, MASKING, CHOSEN = 1, 2, 4
NOTHING, UNSENT, EVERYTHING = range(3)  # the part of gradient plus residual that is kept
# Shared memory, in bytes.
SUMS_NBYTES = 4 * 40
SQUARES_NBYTES = 8 * THREADS
POINTS_NBYTES = 8 * (TILE // 2 + TILE // 32)
_KEPT_COPIES = 4  # of a table: arrays of the steps before last are free again
LEVELS_NBYTES = 4 * (TILE + 65)
CODED_NBYTES, CODED_SUM_NBYTES = 48008, 36968
RANK_TILES_NBYTES = 16 + 13696
TALLY_NBYTES, DIGITS_NBYTES = 4 * 2048 + SUMS_NBYTES, 4 * 1024 + SUMS_NBYTES


def _struct(pointers_and_sizes: str, words: str) -> np.dtype:
    """Return the dtype of a struct: 8-byte fields first, then 4-byte ones."""
    return np.dtype(
        [(name, "u8") for name in pointers_and_sizes.split()]
        + [(name, "u4") for name in words.split()]
    )


TENSOR = _struct(
    "grad residual coeffs payload numel n k positions_offset values_offset key velocity moved "
    "factor maxima",
    "first_tile n_tiles layout low_bits kind bits bins_per_block keep threshold momentum how "
    "decay step most bin unused",
)
HEADER = _struct("payload start crc_of_values nbytes", "")
ARRIVING = _struct(
    "sum start crc_of_values bitmaps ranks starts unary payload_offset numel n k "
    "positions_offset values_offset",
    "header_nbytes first_tile n_tiles first_unary n_unary layout low_bits kind bits step largest "
    "first_group",
)
SHARED = _struct(
    "grad residual left wanted share sum own chosen n k factor first",
    "first_tile n_tiles first_group n_groups chunk bits beta rest gain message_words n_ranks "
    "unused",
)
LOW_RANK = _struct(
    "grad residual whole first second right left factor scratch sum n rows columns",
    "first_tile n_tiles rank unused",
)
DENSE_MOMENTUM = _struct(
    "grad residual velocity moved factor whole n", "first_tile n_tiles momentum how"
)
ELEMENTS = _struct(
    "clip length first_part", "first_row n_rows method top radix digits bucket_bits unused"
)
LEVELS_FORM = _struct(
    "costs factors pushes slots",
    "bucket_bits normal tails end_normal end_tails first_chunk n_chunks chunk_words room limit "
    "last_room last_limit",
)
PART = np.dtype([("first", "f8"), ("second", "f8"), ("count", "u4"), ("unused", "u4")])
HASHED = _struct("bytes nbytes", "")
CHANGE = _struct("old new n", "first_tile n_tiles")
LEDGER = _struct("", "skipped corrupt")
MESSAGES = _struct("bytes nbytes", "n_ranks n_tensors rows_apart unused")


class Uploads:
    """Copies of tables on a device, by name; a table is uploaded only if its contents are new.

    The last few copies of each are kept: a training alternates between a few arrays, for example
    for residuals, so tables with the same addresses recur.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._held: dict[object, dict[bytes, Any]] = {}

    def of(self, name: object, rows: Array) -> Any:
        """Return the copy of a table, uint8; it must not be written to."""
        held, wanted = self._held.setdefault(name, {}), rows.tobytes()
        if wanted not in held:
            if len(held) == _KEPT_COPIES:
                del held[next(iter(held))]
            held[wanted] = self._device.upload(rows.view(np.uint8))
        return held[wanted]


class GroupPlan(NamedTuple):
    """Tensors of a bucket that are processed by the same launches: those with one transform.

    ``transform``: None for RAW tensors. ``owners``: the tensor of each tile.
    """

    transform: Transform | None
    members: list[int]
    owners: Array


def enter_tiles(rows: Array, sizes: Sequence[int] | Array) -> Array:
    """Enter the tiles of each row, of ``sizes`` elements; return the row of each tile, uint32."""
    tile = np.uint64(TILE)
    counts = (np.asarray(sizes, np.uint64) + tile - np.uint64(1)) // tile
    rows["n_tiles"], rows["first_tile"] = counts, np.cumsum(counts) - counts
    return np.repeat(np.arange(len(rows), dtype=np.uint32), counts.astype(np.int64))


def starts_of_blocks(owners: Array, n_blocks: int) -> Array:
    """Return the first tile of each block, and the end, uint32: blocks with about equal work.

    To begin with another tensor counts as three tiles more.
    """
    work = np.cumsum(1 + 3 * (np.diff(owners, prepend=owners[:1] + 1) != 0))
    shares = np.arange(n_blocks + 1) * work[-1] // n_blocks
    return np.searchsorted(work, shares, side="right").astype(np.uint32)


def grouped(plans: Sequence[Plan], codecs: Codecs, rows: Array) -> list[GroupPlan]:
    """Return the groups of a bucket; enter in ``rows`` the tiles of each tensor in its group."""
    by_transform: dict[Transform | None, list[int]] = {}
    for number, (plan, codec) in enumerate(zip(plans, codecs, strict=True)):
        if plan.numel:
            key = None if plan.layout is Layout.RAW else codec.transform
            by_transform.setdefault(key, []).append(number)
    groups = []
    for transform, members in by_transform.items():
        owners: list[int] = []
        for number in members:
            plan = plans[number]
            floats = plan.numel if transform is None else plan.n_bins * transform.reals_per_bin
            rows[number]["first_tile"], rows[number]["n_tiles"] = len(owners), -(-floats // TILE)
            owners += [number] * int(rows[number]["n_tiles"])
        groups.append(GroupPlan(transform, members, np.array(owners, np.uint32)))
    return groups


def enter_plan(row: np.void, plan: Plan, codec: AnyCodec) -> None:
    """Enter in a row what a tensor's plan and codec determine, for encoders and decoders."""
    if plan.n_bins >= 1 << 32:
        raise ValueError(f"a tensor has {plan.n_bins} coefficients, a GPU takes fewer than 2^32")
    row["numel"], row["n"], row["k"] = plan.numel, plan.n_bins, plan.k
    row["positions_offset"], row["values_offset"] = plan.header_nbytes, plan.values_offset
    row["layout"], row["low_bits"] = plan.layout, plan.positions.low_bits
    if not isinstance(codec, Codec) or codec.quantizer is None:
        return
    quantizer = Float32() if plan.layout is Layout.RAW else codec.quantizer
    row["kind"], row["bits"], *_ = quantizer.coding(1.0)


def enter_coding(row: np.void, coding: Coding) -> None:
    """Enter the encoding of a payload's values, if it depends on the payload's scale."""
    row["kind"], row["bits"], row["step"] = coding.kind, coding.bits, coding.base
    if "most" in (row.dtype.names or ()):
        row["most"] = coding.levels
    else:
        row["largest"] = coding.largest


@functools.cache
def roots(block: int) -> Array:
    """Return exp(-2 pi i j / block) for j below ``block``, complex64, rounded once."""
    return np.exp(-2j * np.pi * np.arange(block) / block).astype(np.complex64)


@functools.cache
def cosines(block: int) -> Array:
    """Return sqrt(2) exp(i pi k / (2 block)) for k below block / 2, complex64, rounded once."""
    angles = np.pi * np.arange(block // 2) / (2 * block)
    return (np.sqrt(2) * np.exp(1j * angles)).astype(np.complex64)


def block_and_domain(transform: Transform) -> tuple[int, int]:
    """Return a kernel's template arguments: block length, and 0, 1 or 2: elements, FFT, DCT."""
    if isinstance(transform, Identity):
        return 64, 0
    return transform.block, 2 if isinstance(transform, BlockDCT) else 1


def gain_of_squares(transform: Transform) -> int:
    """Return the factor from squares of coefficients to squares of elements."""
    return 1 if isinstance(transform, Identity) else transform.block
