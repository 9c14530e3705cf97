"""Payloads of a bucket's tensors on a GPU: tables for the kernels in ``cuda``, and their launches.

Nothing here waits for the device. A device is whoever owns arrays and compiles kernels: CuPy's in
``cupy_device``, an emulator in the tests.
"""

from __future__ import annotations

import functools
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from horovod_fftcomp import wire
from horovod_fftcomp.codec import Codec
from horovod_fftcomp.positions import Layout
from horovod_fftcomp.quantizers import BFLOAT16, FLOAT32, RANGE, BFloat16, RangeFloat
from horovod_fftcomp.transforms import BlockDCT, Identity, Transform
from horovod_fftcomp.wire import Plan

SOURCES = ("common.cuh", "select.cuh", "transform.cuh", "emit.cuh", "header.cuh")
_FOLDER = Path(__file__).parent / "cuda"

# As in cuda/common.cuh.
TILE = 4096
THREADS = 256
_RADIX, _SECOND = 2048, 1024
_WORDS = TILE // 32
_TENSOR = np.dtype(
    [
        *[(name, "u8") for name in ("grad", "residual", "coeffs", "payload")],
        *[(name, "u8") for name in ("numel", "n", "k", "positions_offset", "values_offset")],
        *[(name, "u4") for name in ("first_tile", "n_tiles", "layout", "low_bits", "kind")],
        *[(name, "u4") for name in ("bits", "shift", "bins_per_block", "keep", "unused")],
    ]
)
_FOUND_NBYTES = 32 + 4 * _RADIX
_TILE_COUNTS_NBYTES = 16
_HEADER = np.dtype([("payload", "u8"), ("start", "u8"), ("crc_of_scale", "u8"), ("nbytes", "u8")])
_SUMS_NBYTES = 4 * 36
_POINTS_NBYTES = 8 * (TILE // 2 + TILE // 32)

Launch = Callable[[int, int, Sequence[Any], int], None]  # grid, threads, arguments, shared bytes


class Device(Protocol):
    """Arrays of one device and kernels on its current stream."""

    def empty(self, n: int, dtype: type = np.float32) -> Any:
        """Return ``n`` elements with any contents, 1-D, at a multiple of 256 bytes."""
        ...

    def zeros(self, n: int, dtype: type = np.float32) -> Any:
        """Return ``n`` zeros, 1-D, at a multiple of 256 bytes."""
        ...

    def upload(self, array: np.ndarray) -> Any:
        """Return a copy of a host's array on the device, 1-D."""
        ...

    def address(self, array: Any) -> int:
        """Return the device address of an array's first element."""
        ...

    def functions(self, source: str, names: Sequence[str]) -> Mapping[str, Launch]:
        """Return the kernels of ``source`` with these name expressions, compiled."""
        ...


class Job(NamedTuple):
    """One tensor to encode: float32 ``grad``; ``residual`` and ``coeffs`` in the transform's domain.

    ``residual`` may be None; ``coeffs`` becomes what is left unsent, or holds any contents
    without ``keep``. ``payload``: where it goes, zeros.
    """

    codec: Codec
    shape: tuple[int, ...]
    grad: Any
    residual: Any
    coeffs: Any
    payload: Any
    keep: bool


def source() -> str:
    """Return the text of all kernels."""
    return "".join((_FOLDER / name).read_text(encoding="utf-8") for name in SOURCES)


class Encoder:
    """Encodes tensors by codecs that share ``transform``, on one device."""

    def __init__(self, device: Device, transform: Transform) -> None:
        self._device, self._transform = device, transform
        self._forward, self._tables = "add_residual", []
        if not isinstance(transform, Identity):
            is_cosine = isinstance(transform, BlockDCT)
            self._forward = f"forward<{transform.block}, {str(is_cosine).lower()}>"
            self._tables = [device.upload(roots(transform.block)) , device.upload(cosines(transform.block))]
        reals = transform.reals_per_bin
        self._steps = {step: f"{step}<{reals}>" for step in ("mark", "narrow", "settle", "emit")}
        names = [self._forward, *self._steps.values(), "write_header"]
        self._kernels = device.functions(source(), names)

    def encode(self, jobs: Sequence[Job]) -> Any:
        """Write the payloads; return a uint32 for each job, on the device: 1 if it is not finite.

        The residual and payload body of one that is not finite mean nothing.
        """
        device = self._device
        table, tile_tensor = self._table(jobs)
        n_tiles = tile_tensor.size
        found = device.zeros(len(jobs) * _FOUND_NBYTES, np.uint8)
        not_finite = device.zeros(len(jobs), np.uint32)
        tensors, tiles = device.upload(table.view(np.uint8)), device.upload(tile_tensor)
        common = [tensors, tiles, found]
        n_words = _WORDS // self._transform.reals_per_bin  # of a tile
        words = [device.empty(n_tiles * n_words, np.uint32) for _ in range(3)]
        above, equal, chosen = words
        counts = device.empty(n_tiles * _TILE_COUNTS_NBYTES, np.uint8)
        first, second = 4 * _RADIX + _SUMS_NBYTES, 4 * _SECOND + _SUMS_NBYTES
        if self._tables:
            first += _POINTS_NBYTES
        self._run(self._forward, n_tiles, THREADS, [*common, *self._tables], first)
        masks = [*common, above, equal]
        self._run(self._steps["mark"], n_tiles, THREADS, masks, second)
        self._run(self._steps["narrow"], n_tiles, n_words, masks, second)
        self._run(self._steps["settle"], n_tiles, n_words, [*masks, counts], _SUMS_NBYTES)
        self._run(self._steps["emit"], n_tiles, n_words, [*masks, counts, chosen], _SUMS_NBYTES)
        headers = self._headers(jobs)
        self._run("write_header", len(jobs), 32, [headers, found, not_finite], 0)
        return not_finite

    def _run(self, name: str, grid: int, threads: int, arguments: list, shared: int) -> None:
        self._kernels[name](grid, threads, arguments, shared)

    def _table(self, jobs: Sequence[Job]) -> tuple[np.ndarray, np.ndarray]:
        """Return the tensors as kernels know them, and the number of each tile's tensor."""
        table = np.zeros(len(jobs), _TENSOR)
        owners: list[int] = []
        for number, job in enumerate(jobs):
            plan = job.codec.plan(job.shape)
            reals = job.codec.transform.reals_per_bin
            n_tiles = -(-plan.n_bins * reals // TILE)
            row = table[number]
            address = self._device.address
            row["grad"], row["coeffs"] = address(job.grad), address(job.coeffs)
            row["residual"] = 0 if job.residual is None else address(job.residual)
            row["payload"] = address(job.payload)
            row["numel"], row["n"], row["k"] = plan.numel, plan.n_bins, plan.k
            row["positions_offset"], row["values_offset"] = plan.header_nbytes, plan.values_offset
            row["first_tile"], row["n_tiles"] = len(owners), n_tiles
            row["layout"], row["low_bits"] = plan.layout, plan.positions.low_bits
            row["kind"], row["bits"], row["shift"] = _coding_fields(job.codec)
            row["bins_per_block"] = job.codec.transform.bins_per_block
            row["keep"] = job.keep
            owners += [number] * n_tiles
        return table, np.array(owners, np.uint32)

    def _headers(self, jobs: Sequence[Job]) -> Any:
        rows = np.zeros(len(jobs), _HEADER)
        for row, job in zip(rows, jobs, strict=True):
            start, crc_of_scale = self._header(job.codec, job.shape)
            row["payload"] = self._device.address(job.payload)
            row["start"] = self._device.address(start)
            row["crc_of_scale"] = self._device.address(crc_of_scale)
            row["nbytes"] = start.size
        return self._device.upload(rows.view(np.uint8))

    @functools.cache  # noqa: B019  an encoder lives as long as its process
    def _header(self, codec: Codec, shape: tuple[int, ...]) -> tuple[Any, Any]:
        """Return a header of scale 0, and what each bit of the scale does to its checksum."""
        start, changes = header_and_changes(codec.plan(shape), codec.fingerprint)
        return self._device.upload(start), self._device.upload(changes)


def roots(block: int) -> np.ndarray:
    """Return exp(-2 pi i j / block) for j below ``block``, complex64, rounded once."""
    return np.exp(-2j * np.pi * np.arange(block) / block).astype(np.complex64)


def cosines(block: int) -> np.ndarray:
    """Return sqrt(2) exp(i pi k / (2 block)) for k below block / 2, complex64, rounded once."""
    angles = np.pi * np.arange(block // 2) / (2 * block)
    return (np.sqrt(2) * np.exp(1j * angles)).astype(np.complex64)


def _coding_fields(codec: Codec) -> tuple[int, int, int]:
    """Return kind, bits and, of a range float, by how much its cells shift."""
    quantizer = codec.quantizer
    if isinstance(quantizer, RangeFloat):
        return RANGE, quantizer.bits, quantizer.grid(-1.0, 1.0).shift
    return BFLOAT16 if isinstance(quantizer, BFloat16) else FLOAT32, quantizer.bits, 0


def header_and_changes(plan: Plan, fingerprint: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a header of scale 0, uint8, and what its checksum changes by, uint32 ``[33]``.

    CRC-32 is linear: setting bits of the scale or the flag of non-finite values (the last) XORs
    into the checksum what the same bits alone would, whatever else the header holds.
    """
    start = np.zeros(plan.header_nbytes, np.uint8)
    wire.write_header(start, plan, fingerprint, "float32", 0.0, True)
    blank = zlib.crc32(bytes(start.size))
    changes = []
    for bit in range(33):
        only = bytearray(start.size)
        if bit < 32:
            struct.pack_into("<I", only, wire.SCALE_OFFSET, 1 << bit)
        else:
            only[wire.FLAGS_OFFSET] = 1
        changes.append(zlib.crc32(only) ^ blank)
    return start, np.array(changes, np.uint32)


__all__ = ["Device", "Encoder", "Job", "Layout", "source"]
