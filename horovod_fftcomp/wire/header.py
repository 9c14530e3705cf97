"""Byte layout of payloads: sizes, offsets and the header. See docs/wire-format.md."""

from __future__ import annotations

import functools
import math
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from horovod_fftcomp.errors import PayloadError
from horovod_fftcomp.types import Array
from horovod_fftcomp.wire import positions
from horovod_fftcomp.wire.positions import Layout, Positions

VERSION = 4
MAGIC = b"HFC"
ALIGNMENT = 16  # bytes, of a payload within a message, so that kernels read whole words
DTYPES = ("float16", "bfloat16", "float32", "float64")

# magic, version, dtype, flags, ndim, layout | fingerprint, k, payload bytes | scale, grid, CRC-32
_FIXED = struct.Struct("<3sBBBBBQQQfII")
_CRC_OFFSET = _FIXED.size - 4
SCALE_OFFSET, FLAGS_OFFSET = _FIXED.size - 12, 5
_NOT_FINITE, _CORRUPT = 1, 2  # flags
_MAX_DIMS = 64


@dataclass(frozen=True)
class Plan:
    """Layout and sizes of one tensor's payload: a function of shape and options alone.

    If the number of values depends on the data, it is a function of that number as well.
    """

    shape: tuple[int, ...]
    numel: int
    positions: Positions
    header_nbytes: int
    values_offset: int
    payload_nbytes: int

    @property
    def layout(self) -> Layout:
        """Encoding of the positions."""
        return self.positions.layout

    @property
    def n_bins(self) -> int:
        """Number of coefficients from which the values were chosen."""
        return self.positions.n

    @property
    def k(self) -> int:
        """Number of values sent."""
        return self.positions.k


class Header(NamedTuple):
    """The decoded header of a payload."""

    dtype: str
    finite: bool
    layout: int
    fingerprint: int
    shape: tuple[int, ...]
    k: int
    payload_nbytes: int
    scale: float
    grid: int


def align(nbytes: int, to: int = ALIGNMENT) -> int:
    """Return ``nbytes`` rounded up to a multiple of ``to``."""
    return -(-nbytes // to) * to


def fnv1a(text: str) -> int:
    """Return the 64-bit FNV-1a hash of ``text`` as UTF-8."""
    digest = 0xCBF29CE484222325
    for byte in text.encode():
        digest = ((digest ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return digest


def make_plan(shape: tuple[int, ...], n_bins: int, k: int, bits_per_bin: int) -> Plan:
    """Return the smallest plan for ``k`` of ``n_bins`` coefficients of a tensor of ``shape``.

    ``bits_per_bin``: of a coefficient's code. If no layout is smaller than the tensor in float32,
    returns ``raw_plan(shape)``.
    """
    numel = math.prod(shape)
    header = align(_FIXED.size + len(_encode_dims(shape)))
    chosen = positions.cheapest(n_bins, k)
    values_offset = header + align(chosen.nbytes, 8)
    payload = values_offset + (k * bits_per_bin + 7) // 8
    if payload - header >= 4 * numel:
        return raw_plan(shape)
    return Plan(shape, numel, chosen, header, values_offset, payload)


def raw_plan(shape: tuple[int, ...]) -> Plan:
    """Return the plan that sends a tensor of ``shape`` uncompressed, in float32."""
    numel = math.prod(shape)
    header = align(_FIXED.size + len(_encode_dims(shape)))
    chosen = Positions(Layout.RAW, numel, numel, 0, 0)
    return Plan(shape, numel, chosen, header, header, header + 4 * numel)


def dense_plan(shape: tuple[int, ...], body_nbytes: int) -> Plan:
    """Return the plan of a payload without positions, with a body of ``body_nbytes``.

    If the body would be longer than the tensor in float32, returns ``raw_plan(shape)``.
    """
    raw = raw_plan(shape)
    if body_nbytes > 4 * raw.numel or not raw.numel:
        return raw
    everything = Positions(Layout.ALL, raw.numel, raw.numel, 0, 0)
    header = raw.header_nbytes
    return Plan(shape, raw.numel, everything, header, header, header + body_nbytes)


def write_header(
    payload: Array,
    plan: Plan,
    fingerprint: int,
    dtype: str,
    scale: float,
    finite: bool,
    grid: int = 0,
) -> None:
    """Write the header of ``plan`` to the first bytes of ``payload``, uint8.

    ``grid``: of the values; see ``quantizers.fitted_grid``.
    """
    dims = _encode_dims(plan.shape)
    kinds = DTYPES.index(dtype), 0 if finite else _NOT_FINITE, len(plan.shape), plan.layout
    sizes = plan.k, plan.payload_nbytes
    fixed = _FIXED.pack(MAGIC, VERSION, *kinds, fingerprint, *sizes, scale, grid, 0)
    header = bytearray((fixed + dims).ljust(plan.header_nbytes, b"\0"))
    struct.pack_into("<I", header, _CRC_OFFSET, zlib.crc32(header))
    payload[: plan.header_nbytes] = np.frombuffer(header, np.uint8)


def mark_corrupt(payload: Array) -> None:
    """Set a flag in a payload that is not finite: what it was made from was corrupt.

    ``read_header`` raises PayloadError for it, on every rank.
    """
    payload[FLAGS_OFFSET] |= _CORRUPT


@functools.lru_cache(1 << 14)  # buckets change, their tensors do not
def header_and_changes(plan: Plan, fingerprint: int) -> tuple[Array, Array]:
    """Return a header of scale 0, uint8, and the changes of its checksum by bit, uint32 ``[65]``.

    CRC-32 is linear: a set bit of the scale, then of the grid, or (the last) of the flag for
    non-finite values, XORs a word into the checksum that does not depend on the rest of the header.
    """
    start = np.zeros(plan.header_nbytes, np.uint8)
    write_header(start, plan, fingerprint, "float32", 0.0, True)
    blank = zlib.crc32(bytes(start.size))
    changes = []
    for bit in range(65):
        alone = bytearray(start.size)
        if bit < 64:
            struct.pack_into("<Q", alone, SCALE_OFFSET, 1 << bit)
        else:
            alone[FLAGS_OFFSET] = 1
        changes.append(zlib.crc32(alone) ^ blank)
    return start, np.array(changes, np.uint32)


def read_header(payload: Array) -> Header:
    """Return the header at the start of ``payload``, uint8 1-D, after checking every field.

    ``payload`` may be longer than the payload that the header describes. Raises PayloadError for
    bytes that are no header, or a corrupt one.
    """
    if len(payload) < _FIXED.size:
        raise PayloadError(
            f"header is cut short: {len(payload)} bytes, at least {_FIXED.size} expected"
        )
    start = payload[: _FIXED.size + 10 * _MAX_DIMS].tobytes()
    fields = _FIXED.unpack_from(start)
    magic, version, dtype, flags, ndim, layout, fingerprint, k, nbytes, scale, grid, crc = fields
    if magic != MAGIC:
        raise PayloadError(f"header field 'magic' is {magic!r}, expected {MAGIC!r}: not a payload")
    if version != VERSION:
        raise PayloadError(
            f"header field 'version' is {version}, expected {VERSION}; "
            "install the same horovod_fftcomp on all ranks"
        )
    if flags == _NOT_FINITE | _CORRUPT:
        raise PayloadError("the rank that owns this shard has received a corrupt payload")
    shape, end = _decode_dims(start, ndim)
    header = bytearray(start[: align(end)])
    header[_CRC_OFFSET : _CRC_OFFSET + 4] = bytes(4)
    if len(header) < align(end) or zlib.crc32(header) != crc:
        raise PayloadError("header field 'checksum' does not match: the payload is corrupt")
    for name, found, bad in (
        ("dtype", dtype, dtype >= len(DTYPES)),
        ("flags", flags, flags > _NOT_FINITE),
        ("layout", layout, layout > max(Layout)),
        ("k", k, k > 2 * math.prod(shape) + 8192),  # a transform pads to whole blocks
        ("scale", scale, flags == 0 and not 0 <= scale < math.inf),
        ("payload length", nbytes, nbytes < len(header)),
    ):
        if bad:
            raise PayloadError(f"header field {name!r} is {found}, which is out of range")
    finite = flags & _NOT_FINITE == 0
    return Header(DTYPES[dtype], finite, layout, fingerprint, shape, k, nbytes, scale, grid)


def split_payloads(gathered: Array) -> Iterator[tuple[Header, Array]]:
    """Yield (header, bytes) of each payload in a buffer.

    Payloads start at multiples of ``ALIGNMENT``. Raises PayloadError as ``read_header``, and for a
    payload that is longer than the buffer.
    """
    offset = 0
    while offset < len(gathered):
        header = read_header(gathered[offset:])
        nbytes = header.payload_nbytes
        if offset + nbytes > len(gathered):
            raise PayloadError(
                f"header field 'payload length' is {nbytes}, "
                f"but {len(gathered) - offset} bytes are left"
            )
        yield header, gathered[offset : offset + nbytes]
        offset += align(nbytes)


def _encode_dims(shape: tuple[int, ...]) -> bytes:
    """Return the dimensions as variable-length integers: 7 bits a byte, low bits first."""
    if len(shape) > _MAX_DIMS:
        raise ValueError(f"the tensor has {len(shape)} dimensions, expected at most {_MAX_DIMS}")
    out = bytearray()
    for dim in shape:
        while dim > 0x7F:
            out.append(dim & 0x7F | 0x80)
            dim >>= 7
        out.append(dim)
    return bytes(out)


def _decode_dims(header: bytes, ndim: int) -> tuple[tuple[int, ...], int]:
    """Return (shape, end of the dimensions in ``header``)."""
    if ndim > _MAX_DIMS:
        raise PayloadError(f"header field 'ndim' is {ndim}, expected at most {_MAX_DIMS}")
    shape, offset = [], _FIXED.size
    for _ in range(ndim):
        dim, shift = 0, 0
        while True:
            if offset >= len(header) or shift > 63:
                raise PayloadError("header field 'shape' is cut short or too large")
            byte = header[offset]
            offset += 1
            dim |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        shape.append(dim)
    if math.prod(max(dim, 1) for dim in shape) >= 1 << 60:
        raise PayloadError(f"header field 'shape' is {tuple(shape)}: expected below 2**60 elements")
    return tuple(shape), offset
