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

from horovod_fftcomp import entropy, wire
from horovod_fftcomp.backends.cpu.positions import decoder_table, encoder_table
from horovod_fftcomp.codec import Codec
from horovod_fftcomp.positions import Layout, unary_bits
from horovod_fftcomp.quantizers import BFLOAT16, FLOAT32, RANGE, BFloat16, RangeFloat
from horovod_fftcomp.transforms import BlockDCT, Identity, Transform
from horovod_fftcomp.wire import Plan

SOURCES = (
    "common.cuh", "select.cuh", "transform.cuh", "emit.cuh", "entropy.cuh", "header.cuh",
    "decode.cuh",
)  # fmt: skip
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
_CHUNKS_OF_WARP, _MOST_WORDS = 8, 1540
_CODED = np.dtype(
    [
        *[(name, "u8") for name in ("bitmap", "coded", "slots", "pushes", "words", "states")],
        *[(name, "u8") for name in ("lengths", "n_symbols", "nbytes")],
        *[(name, "u4") for name in ("first_warp", "n_warps", "n_chunks", "tensor")],
    ]
)
_ARRIVING = np.dtype(
    [
        *[(name, "u8") for name in ("sum", "start", "crc_of_scale", "slots", "bitmaps", "ranks")],
        *[(name, "u8") for name in ("unary", "chunks", "payload_offset", "numel", "n", "k")],
        *[(name, "u8") for name in ("positions_offset", "values_offset", "positions_nbytes")],
        *[(name, "u4") for name in ("header_nbytes", "first_tile", "n_tiles", "first_unary")],
        *[(name, "u4") for name in ("n_unary", "first_warp", "n_warps", "n_chunks", "layout")],
        *[(name, "u4") for name in ("low_bits", "kind", "bits", "shift", "unused")],
    ]
)
_MESSAGES = np.dtype([("bytes", "u8"), ("nbytes", "u8"), ("n_ranks", "u4"), ("n_tensors", "u4")])
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
            self._tables = [
                device.upload(roots(transform.block)),
                device.upload(cosines(transform.block)),
            ]
        reals = transform.reals_per_bin
        self._steps = {step: f"{step}<{reals}>" for step in ("mark", "narrow", "settle", "emit")}
        names = [
            self._forward,
            *self._steps.values(),
            "write_header",
            "encode_chunks",
            "copy_chunks",
        ]
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
        self._code_positions(jobs, table, found, chosen, n_words)
        headers = self._headers(jobs)
        self._run("write_header", len(jobs), 32, [headers, found, not_finite], 0)
        return not_finite

    def _code_positions(
        self, jobs: Sequence[Job], table: np.ndarray, found: Any, chosen: Any, n_words: int
    ) -> None:
        """Write the positions of those tensors whose layout is the entropy code."""
        device, address = self._device, self._device.address
        coded = [number for number, row in enumerate(table) if row["layout"] == Layout.ENTROPY]
        if not coded:
            return
        rows = np.zeros(len(coded), _CODED)
        warps, chunk_code, chunk_number = [], [], []
        for place, number in enumerate(coded):
            row, tensor = rows[place], table[number]
            n, k = int(tensor["n"]), int(tensor["k"])
            n_chunks = entropy.n_chunks(n)
            n_warps = -(-n_chunks // _CHUNKS_OF_WARP)
            row["bitmap"] = address(chosen) + 4 * n_words * int(tensor["first_tile"])
            row["coded"] = int(tensor["payload"]) + int(tensor["positions_offset"])
            row["pushes"] = address(self._pushes(n, k))
            row["n_symbols"], row["n_chunks"] = (n + 7) // 8, n_chunks
            row["first_warp"], row["n_warps"], row["tensor"] = len(warps), n_warps, number
            warps += [place] * n_warps
            chunk_code += [place] * n_chunks
            chunk_number += range(n_chunks)
        before = np.cumsum(rows["n_chunks"], dtype=np.uint64) - rows["n_chunks"]
        words = device.empty(len(chunk_code) * _MOST_WORDS, np.uint32)
        states = device.empty(len(chunk_code) * entropy.LANES, np.uint64)
        lengths = device.empty(len(chunk_code), np.uint32)
        rows["words"] = address(words) + 4 * _MOST_WORDS * before
        rows["states"] = address(states) + 8 * entropy.LANES * before
        rows["lengths"] = address(lengths) + 4 * before
        codes = device.upload(rows.view(np.uint8))
        owners = [device.upload(np.array(numbers, np.uint32)) for numbers in
                  (warps, chunk_code, chunk_number)]  # fmt: skip
        self._run("encode_chunks", len(warps), 32, [codes, owners[0], found], _SUMS_NBYTES)
        self._run("copy_chunks", len(chunk_code), 128, [codes, *owners[1:], found], 0)

    @functools.cache  # noqa: B019  an encoder lives as long as its process
    def _pushes(self, n: int, k: int) -> Any:
        """Return each byte's reciprocal, and its bias, frequency and shift in one word."""
        frequencies, reciprocals, shifts, biases = encoder_table(entropy.frequencies(n, k))
        table = np.empty((256, 2), np.uint64)
        table[:, 0] = reciprocals
        table[:, 1] = biases | frequencies << np.uint64(16) | shifts << np.uint64(32)
        return self._device.upload(table)

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
            start, crc_of_scale = header_tables(self._device, job.codec, job.shape)
            row["payload"] = self._device.address(job.payload)
            row["start"] = self._device.address(start)
            row["crc_of_scale"] = self._device.address(crc_of_scale)
            row["nbytes"] = start.size
        return self._device.upload(rows.view(np.uint8))


class Arrival(NamedTuple):
    """One tensor to decode: where its payload begins in a message, and where its sum goes."""

    codec: Codec
    shape: tuple[int, ...]
    offset: int
    sum: Any


class Decoder:
    """Sums payloads by codecs that share ``transform``, on one device."""

    def __init__(self, device: Device, transform: Transform) -> None:
        self._device, self._transform = device, transform
        block, domain = 64, 0
        if not isinstance(transform, Identity):
            block, domain = transform.block, 2 if isinstance(transform, BlockDCT) else 1
        self._tables = [device.upload(roots(block)), device.upload(cosines(block))]
        reals = transform.reals_per_bin
        steps = ("place_offsets", "decode_chunks", "count_values")
        self._steps = {step: f"{step}<{reals}>" for step in steps}
        self._sum = f"sum_payloads<{block}, {domain}>"
        names = ["read_headers", "count_unary", "find_chunks", *self._steps.values(), self._sum]
        self._kernels = device.functions(source(), names)

    def decode(self, arrivals: Sequence[Arrival], gathered: Any, n_ranks: int) -> tuple[Any, Any]:
        """Write the sums over ``n_ranks`` messages of equal length in ``gathered``, uint8.

        Returns, on the device: for each arrival 1 if its sum is not finite, uint32; for each
        rank and arrival (scale, status, 0, 0), uint32. NaN is the sum of what is not sound.
        """
        device, address = self._device, self._device.address
        n_words = _WORDS // self._transform.reals_per_bin
        rows = np.zeros(len(arrivals), _ARRIVING)
        tiles, unary, warps = [], [], []
        for number, (row, arrival) in enumerate(zip(rows, arrivals, strict=True)):
            plan = arrival.codec.plan(arrival.shape)
            how = plan.positions
            start, crc_of_scale = header_tables(self._device, arrival.codec, arrival.shape)
            row["sum"], row["payload_offset"] = address(arrival.sum), arrival.offset
            row["start"], row["crc_of_scale"] = address(start), address(crc_of_scale)
            row["numel"], row["n"], row["k"] = plan.numel, plan.n_bins, plan.k
            row["positions_offset"], row["values_offset"] = plan.header_nbytes, plan.values_offset
            row["positions_nbytes"], row["header_nbytes"] = how.nbytes, plan.header_nbytes
            row["layout"], row["low_bits"] = plan.layout, how.low_bits
            row["kind"], row["bits"], row["shift"] = _coding_fields(arrival.codec)
            row["first_tile"] = len(tiles)
            row["n_tiles"] = -(-plan.n_bins * self._transform.reals_per_bin // TILE)
            tiles += [number] * int(row["n_tiles"])
            if plan.layout is Layout.OFFSETS:
                n_bits = unary_bits(how.n, how.k, how.low_bits)
                row["first_unary"], row["n_unary"] = len(unary), -(-n_bits // (32 * _WORDS))
                unary += [number] * int(row["n_unary"])
            if plan.layout is Layout.ENTROPY:
                row["slots"] = address(self._slots(how.n, how.k))
                row["n_chunks"] = entropy.n_chunks(how.n)
                row["first_warp"] = len(warps)
                row["n_warps"] = -(-int(row["n_chunks"]) // _CHUNKS_OF_WARP)
                warps += [number] * int(row["n_warps"])
        scratch = []
        for field, per, counts in (
            ("bitmaps", n_words, rows["n_tiles"]),
            ("ranks", 1, rows["n_tiles"]),
            ("unary", 1, rows["n_unary"]),
            ("chunks", 1, rows["n_chunks"]),
        ):
            sizes = np.uint64(n_ranks * per) * counts.astype(np.uint64)
            scratch.append(device.zeros(max(1, int(sizes.sum())), np.uint32))
            rows[field] = address(scratch[-1]) + 4 * (np.cumsum(sizes) - sizes)
        messages = np.zeros(1, _MESSAGES)
        messages["bytes"], messages["nbytes"] = address(gathered), gathered.size // n_ranks
        messages["n_ranks"], messages["n_tensors"] = n_ranks, len(arrivals)
        common = [device.upload(messages.view(np.uint8)), device.upload(rows.view(np.uint8))]
        found = device.zeros(4 * n_ranks * len(arrivals), np.uint32)
        not_finite = device.zeros(len(arrivals), np.uint32)
        common.append(found)

        def run(name: str, owners: list[int], threads: int) -> None:
            arguments = [
                *common,
                device.upload(np.array(owners, np.uint32)),
                np.uint32(len(owners)),
            ]
            grid = n_ranks * len(owners)
            self._kernels[name](grid, threads, arguments, _SUMS_NBYTES)

        self._kernels["read_headers"](n_ranks * len(arrivals), 32, common, 0)
        if unary:
            run("count_unary", unary, _WORDS)
            run(self._steps["place_offsets"], unary, _WORDS)
        if warps:
            self._kernels["find_chunks"](n_ranks * len(arrivals), 32, common, 0)
            run(self._steps["decode_chunks"], warps, 32)
        run(self._steps["count_values"], tiles, n_words)
        owners = device.upload(np.array(tiles, np.uint32))
        arguments = [*common, owners, not_finite, *self._tables]
        self._kernels[self._sum](len(tiles), THREADS, arguments, _POINTS_NBYTES + _SUMS_NBYTES)
        return not_finite, found

    @functools.cache  # noqa: B019  a decoder lives as long as its process
    def _slots(self, n: int, k: int) -> Any:
        return self._device.upload(decoder_table(entropy.frequencies(n, k)))


@functools.cache
def header_tables(device: Device, codec: Codec, shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Return ``header_and_changes`` on the device."""
    start, changes = header_and_changes(codec.plan(shape), codec.fingerprint)
    return device.upload(start), device.upload(changes)


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
