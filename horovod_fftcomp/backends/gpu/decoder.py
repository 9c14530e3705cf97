"""Sums the messages of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from horovod_fftcomp import entropy
from horovod_fftcomp.backends.entropy_tables import decoder_table
from horovod_fftcomp.backends.gpu import Device, source, tables
from horovod_fftcomp.backends.gpu.encoder import Encoder
from horovod_fftcomp.backends.gpu.tables import THREADS, WORDS, Group
from horovod_fftcomp.codec import Codec
from horovod_fftcomp.positions import Layout, unary_bits
from horovod_fftcomp.wire import Plan

SOUND, NOT_FINITE, CORRUPT = range(3)


class Decoder:
    """Sums what ``n_ranks`` encoders of the same codecs and shapes have sent.

    ``offsets``: where payloads begin in a message of ``message_nbytes``; see ``Encoder``.
    """

    def __init__(
        self,
        device: Device,
        codecs: Sequence[Codec],
        shapes: Sequence[tuple[int, ...]],
        encoder: Encoder,
        n_ranks: int,
    ) -> None:
        self._device, self._n_ranks = device, n_ranks
        self._nbytes = encoder.message_nbytes
        plans = [codec.plan(shape) for codec, shape in zip(codecs, shapes, strict=True)]
        self._rows = np.zeros(len(plans), tables.ARRIVING)
        self._kept: list[Any] = []
        for row, plan, codec, offset in zip(
            self._rows, plans, codecs, encoder.offsets, strict=True
        ):
            tables.enter_plan(row, plan, codec)
            start, changes = tables.header_and_changes(plan, codec.fingerprint)
            row["start"], row["crc_of_scale"] = self._keep(start), self._keep(changes)
            row["payload_offset"], row["header_nbytes"] = offset, plan.header_nbytes
            row["positions_nbytes"] = plan.positions.nbytes
        groups = tables.grouped(plans, list(codecs), self._rows)
        self._groups = [_GroupOnDevice(device, g, plans, self._rows, n_ranks) for g in groups]
        names = {name for group in self._groups for name in group.names} | {"read_headers"}
        self._kernels = device.functions(source(), sorted(names))

    def _keep(self, array: np.ndarray) -> int:
        self._kept.append(self._device.upload(array))
        return self._device.address(self._kept[-1])

    def decode(self, gathered: Any, sums: Sequence[Any]) -> tuple[Any, Any]:
        """Write the sums of the messages in ``gathered``, uint8, one of each rank, in rank order.

        Returns, on the device: for each tensor 1 if its sum is not finite, uint32; for each rank
        and tensor four words, of which the first is the scale's bits and the second SOUND,
        NOT_FINITE or CORRUPT. Of a payload that is not sound, or finite, the sum is NaN.
        """
        device, count = self._device, len(self._rows)
        not_finite = device.zeros(max(1, count), np.uint32)
        found = device.zeros(max(1, 4 * self._n_ranks * count), np.uint32)
        if not count:
            return not_finite, found
        for row, total in zip(self._rows, sums, strict=True):
            row["sum"] = device.address(total)
        messages = np.zeros(1, tables.MESSAGES)
        messages["bytes"], messages["nbytes"] = device.address(gathered), self._nbytes
        messages["n_ranks"], messages["n_tensors"] = self._n_ranks, count
        tables_ = [device.upload(table.view(np.uint8)) for table in (messages, self._rows)]
        common = [*tables_, found]
        self._kernels["read_headers"](self._n_ranks * count, 32, common, 0)
        for group in self._groups:
            group.clear()
            group.decode(self._kernels, common, not_finite)
        return not_finite, found


class _GroupOnDevice:
    """A group's kernels and scratch memory."""

    def __init__(
        self, device: Device, group: Group, plans: Sequence[Plan], rows: Any, n_ranks: int
    ) -> None:
        self._device, self._n_ranks = device, n_ranks
        self._n_tiles = group.owners.size
        self._owners = device.upload(group.owners)
        self._is_raw = group.transform is None
        if group.transform is None:
            self.names = ["sum_raw"]
            return
        reals = group.transform.reals_per_bin
        block, domain = tables.block_and_domain(group.transform)
        self._n_words = WORDS // reals
        self._tables = [device.upload(t) for t in (tables.roots(block), tables.cosines(block))]
        self._sum, self._count = f"sum_payloads<{block}, {domain}>", f"count_values<{reals}>"
        self._place, self._decode = f"place_offsets<{reals}>", f"decode_chunks<{reals}>"
        self.names = ["count_unary", "find_chunks", self._sum, self._count]
        self.names += [self._place, self._decode]
        self._kept: list[Any] = []
        unary, warps = self._enter_positions(group, plans, rows)
        self._n_unary, self._n_warps, self._n_tensors = len(unary), len(warps), len(rows)
        self._unary = device.upload(np.array(unary or [0], np.uint32))
        self._warps = device.upload(np.array(warps or [0], np.uint32))
        self._make_scratch(group, rows)

    def _enter_positions(
        self, group: Group, plans: Sequence[Plan], rows: Any
    ) -> tuple[list[int], list[int]]:
        """Enter what positions need; return the tensor of each tile of bits, of each warp."""
        unary: list[int] = []
        warps: list[int] = []
        for number in group.members:
            row, how = rows[number], plans[number].positions
            if how.layout is Layout.OFFSETS:
                n_bits = unary_bits(how.n, how.k, how.low_bits)
                row["first_unary"], row["n_unary"] = len(unary), -(-n_bits // (32 * WORDS))
                unary += [number] * int(row["n_unary"])
            if how.layout is Layout.ENTROPY:
                slots = self._device.upload(decoder_table(entropy.frequencies(how.n, how.k)))
                self._kept.append(slots)
                row["slots"] = self._device.address(slots)
                row["n_chunks"], row["first_warp"] = entropy.n_chunks(how.n), len(warps)
                row["n_warps"] = -(-int(row["n_chunks"]) // tables.CHUNKS_OF_WARP)
                warps += [number] * int(row["n_warps"])
        return unary, warps

    def _make_scratch(self, group: Group, rows: Any) -> None:
        """Enter where each tensor's bitmaps and counts of all ranks lie."""
        for field, each, counts in (
            ("bitmaps", self._n_words, "n_tiles"),
            ("ranks", 1, "n_tiles"),
            ("unary", 1, "n_unary"),
            ("chunks", 1, "n_chunks"),
        ):
            sizes = np.uint64(self._n_ranks * each) * rows[counts][group.members].astype(np.uint64)
            scratch = self._device.empty(max(1, int(sizes.sum())), np.uint32)
            self._kept.append(scratch)
            begins = np.cumsum(sizes) - sizes
            rows[field][group.members] = (
                np.uint64(self._device.address(scratch)) + np.uint64(4) * begins
            )
            if field == "bitmaps":
                self._bitmaps = scratch

    def clear(self) -> None:
        """Clear the bitmaps, of which positions as they come set parts."""
        if not self._is_raw and (self._n_unary or self._n_warps):
            self._device.clear(self._bitmaps)

    def decode(self, kernels: Any, common: list[Any], not_finite: Any) -> None:
        """Launch everything from headers that are read to sums."""
        if self._is_raw:
            kernels["sum_raw"](self._n_tiles, THREADS, [*common, self._owners, not_finite], 0)
            return
        per_rank, shared = self._n_ranks, tables.SUMS_NBYTES
        if self._n_unary:
            arguments = [*common, self._unary, np.uint32(self._n_unary)]
            for name in ("count_unary", self._place):
                kernels[name](per_rank * self._n_unary, WORDS, arguments, shared)
        if self._n_warps:
            kernels["find_chunks"](per_rank * self._n_tensors, 32, common, shared)
            arguments = [*common, self._warps, np.uint32(self._n_warps)]
            kernels[self._decode](per_rank * self._n_warps, 32, arguments, shared)
        arguments = [*common, self._owners, np.uint32(self._n_tiles)]
        kernels[self._count](per_rank * self._n_tiles, self._n_words, arguments, shared)
        arguments = [*common, self._owners, not_finite, *self._tables]
        kernels[self._sum](self._n_tiles, THREADS, arguments, tables.POINTS_NBYTES + shared)
