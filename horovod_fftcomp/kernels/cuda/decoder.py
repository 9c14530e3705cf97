"""Decoder of a bucket on the device: the sum of all ranks' messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from horovod_fftcomp import wire
from horovod_fftcomp.codec.dense import DenseCodec
from horovod_fftcomp.codec.methods.dither import Dither
from horovod_fftcomp.codec.quantizers import Float32
from horovod_fftcomp.codec.sparse import Codec
from horovod_fftcomp.codec.sparsifiers import TopK
from horovod_fftcomp.codec.transforms import Identity
from horovod_fftcomp.errors import PayloadError
from horovod_fftcomp.kernels.cuda import Device, source, structs
from horovod_fftcomp.kernels.cuda.coded import CodedSums
from horovod_fftcomp.kernels.cuda.dense import ElementSums
from horovod_fftcomp.kernels.cuda.encoder import Encoder
from horovod_fftcomp.kernels.cuda.structs import THREADS, WORDS, GroupPlan
from horovod_fftcomp.kernels.ops import Codecs
from horovod_fftcomp.types import Arrays, Shape
from horovod_fftcomp.wire.header import Plan, header_and_changes
from horovod_fftcomp.wire.positions import Layout, Positions, unary_bits

SOUND, NOT_FINITE, CORRUPT = range(3)
_UNCOMPRESSED = Codec(Identity(), TopK(1.0), Float32())


class Decoder:
    """Sums the messages of ``n_ranks`` encoders with the codecs and shapes of ``encoder``."""

    def __init__(
        self,
        device: Device,
        codecs: Codecs,
        shapes: Sequence[Shape],
        encoder: Encoder,
        n_ranks: int,
    ) -> None:
        self._nbytes = n_ranks * encoder.message_nbytes
        plans = [codec.plan(shape) for codec, shape in zip(codecs, shapes, strict=True)]
        self._bodies = _Bodies(device, plans, codecs, encoder.offsets, n_ranks, len(plans))
        self._bodies.expect_headers(plans, codecs, encoder.message_nbytes)

    def decode(self, gathered: Any, sums: Arrays, sign: bool = False) -> tuple[Any, Any]:
        """Write the sums of the messages in ``gathered``, uint8, one of each rank, in rank order.

        ``sign``: replace each sum by its sign times the number of ranks; see ``Allgather``.

        Returns, on the device: for each tensor 1 if its sum is not finite, uint32; for each rank
        and tensor four words, of which the first is the scale's bits and the second SOUND,
        NOT_FINITE or CORRUPT. The sum with a payload that is not SOUND is NaN. Raises PayloadError
        for messages of another total length.
        """
        if len(gathered) != self._nbytes and len(sums):
            raise PayloadError(f"{len(gathered)} bytes arrived, {self._nbytes} were expected")
        return self._bodies.sum(gathered, sums, sign=sign)


class ThresholdDecoder:
    """Decoder of payloads whose sizes depend on the values; ``decode`` waits to read the headers.

    Otherwise as ``Decoder``; a bad header raises PayloadError in ``decode``.
    """

    def __init__(
        self, device: Device, codecs: Codecs, shapes: Sequence[Shape], n_ranks: int
    ) -> None:
        self._device, self._codecs, self._shapes = device, codecs, shapes
        self._n_ranks = n_ranks

    def decode(self, gathered: Any, sums: Arrays, sign: bool = False) -> tuple[Any, Any]:
        """Write the sums of all ranks' payloads to ``sums``; waits to read the headers."""
        arrived = list(wire.split_payloads(self._device.fetch(gathered)()))
        n_ranks, count = self._n_ranks, len(self._shapes)
        if len(arrived) != n_ranks * count:
            raise PayloadError(f"{len(arrived)} payloads arrived, {n_ranks * count} were expected")
        plans, codecs = [], list(self._codecs) * n_ranks
        found = np.zeros((len(arrived), 4), np.uint32)
        for number, (header, payload) in enumerate(arrived):
            plan = codecs[number].checked_plan(payload, header)
            shape = self._shapes[number % count]
            if header.shape != shape:
                who = f"tensor {number % count} of rank {number // count}"
                field = f"header field 'shape' is {header.shape}, expected {shape}"
                raise PayloadError(f"{who}: {field}")
            if plan.layout is Layout.RAW:  # decoded as if all elements were above the threshold
                everything = Positions(Layout.ALL, plan.numel, plan.numel, 0, 0)
                plan = replace(plan, positions=everything)
                codecs[number] = _UNCOMPRESSED
            plans.append(plan)
            found[number, 0] = np.float32(header.scale).view(np.uint32)
            found[number, 1] = SOUND if header.finite else NOT_FINITE
        nbytes = [wire.align(len(payload)) for _, payload in arrived]
        offsets = np.cumsum([0, *nbytes])[:-1].tolist()
        bodies = _Bodies(self._device, plans, codecs, offsets, n_ranks, count)
        bodies.enter_scales(codecs, [header for header, _ in arrived])
        return bodies.sum(gathered, sums, found, sign)


class _Bodies:
    """Payloads of ``n_tensors`` tensors and ``n_ranks`` ranks in one buffer, and their sums.

    ``plans``, ``codecs`` and ``offsets`` are either those of one message, the same for all ranks,
    or those of rank 0, then those of rank 1, and so on.
    """

    def __init__(
        self,
        device: Device,
        plans: Sequence[Plan],
        codecs: Codecs,
        offsets: Sequence[int],
        n_ranks: int,
        n_tensors: int,
    ) -> None:
        self._device, self._n_ranks, self._n_tensors = device, n_ranks, n_tensors
        apart = n_ranks if len(plans) > n_tensors else 1  # ranks that have rows of their own
        self._apart = apart
        self._uploads = structs.Uploads(device)
        self._messages = np.zeros(1, structs.MESSAGES)
        self._messages["n_ranks"], self._messages["n_tensors"] = n_ranks, n_tensors
        self._messages["rows_apart"] = n_tensors if apart > 1 else 0
        self._rows = np.zeros(len(plans), structs.ARRIVING)
        self._kept: list[Any] = []
        for row, plan, codec, offset in zip(self._rows, plans, codecs, offsets, strict=True):
            structs.enter_plan(row, plan, codec)
            row["payload_offset"], row["header_nbytes"] = offset, plan.header_nbytes
        groups = structs.grouped(plans, codecs, self._rows)
        of_elements = [codec for codec in codecs if isinstance(codec, DenseCodec)]  # all or none
        self._groups = [
            (CodedSums if isinstance(of_elements[0].method, Dither) else ElementSums)(
                device, g, plans, of_elements
            )
            if of_elements and g.transform is not None
            else _GroupSums(device, g, plans, self._rows, n_ranks // apart, apart)
            for g in groups
        ]
        names = {name for group in self._groups for name in group.names} | {
            "read_headers",
            "majority_sign",
        }
        self._kernels = device.functions(source(), sorted(names))

    def expect_headers(self, plans: Sequence[Plan], codecs: Codecs, message_nbytes: int) -> None:
        """Set the headers that the device expects: those of ``plans``, in messages of this size."""
        self._messages["nbytes"] = message_nbytes
        for row, plan, codec in zip(self._rows, plans, codecs, strict=True):
            start, changes = header_and_changes(plan, codec.fingerprint)
            row["start"], row["crc_of_values"] = self._keep(start), self._keep(changes)

    def enter_scales(self, codecs: Codecs, headers: Sequence[wire.Header]) -> None:
        """Enter adaptive sparsifiers' encodings of values, which the header's scale determines."""
        for row, codec, header in zip(self._rows, codecs, headers, strict=True):
            if isinstance(codec, Codec) and codec.quantizer is None and header.finite:
                structs.enter_coding(row, codec.coding(header.scale))

    def _keep(self, array: np.ndarray) -> int:
        self._kept.append(self._device.upload(array))
        return self._device.address(self._kept[-1])

    def sum(
        self, gathered: Any, sums: Arrays, found: np.ndarray | None = None, sign: bool = False
    ) -> tuple[Any, Any]:
        """Sum the payloads; see ``Decoder.decode``. ``found``: the headers' words if known."""
        device, count = self._device, self._n_tensors
        not_finite = device.zeros(max(1, count), np.uint32)
        if found is None:
            payloads = device.zeros(max(1, 4 * self._n_ranks * count), np.uint32)
        else:
            payloads = device.upload(found)
        if not count:
            return not_finite, payloads
        for row, total in zip(self._rows, sums, strict=False):
            row["sum"] = device.address(total)
        self._messages["bytes"] = device.address(gathered)
        messages = self._uploads.of("messages", self._messages)
        common = [messages, self._uploads.of("tensors", self._rows), payloads]
        if found is None:
            self._kernels["read_headers"](self._n_ranks * count, 32, common, 0)
        for group in self._groups:
            group.decode(self._kernels, common, not_finite)
            if sign:
                arguments = [*common[:2], group.owners]
                self._kernels["majority_sign"](group.n_tiles // self._apart, THREADS, arguments, 0)
        return not_finite, payloads


class _GroupSums:
    """Sums of the payloads of one group over all ranks: launches and scratch memory."""

    def __init__(
        self,
        device: Device,
        group: GroupPlan,
        plans: Sequence[Plan],
        rows: Any,
        n_ranks: int,
        apart: int,
    ) -> None:
        self._device, self._n_ranks, self._apart = device, n_ranks, apart
        self.n_tiles = group.owners.size
        self.owners = device.upload(group.owners)
        self._is_raw = group.transform is None
        if group.transform is None:
            self.names = ["sum_raw"]
            return
        reals = group.transform.reals_per_bin
        block, domain = structs.block_and_domain(group.transform)
        self._n_words = WORDS // reals
        self._tables = [device.upload(t) for t in (structs.roots(block), structs.cosines(block))]
        self._sum, self._count = f"sum_payloads<{block}, {domain}>", f"count_values<{reals}>"
        self._offsets = f"count_offsets<{reals}>"
        self.names = ["count_unary", self._sum, self._count, self._offsets]
        self._kept: list[Any] = []
        unary = self._enter_offsets(group, plans, rows)
        self._n_unary = len(unary)
        self._unary = device.upload(np.array(unary or [0], np.uint32))
        placed = [m for m in group.members if rows["layout"][m] != Layout.OFFSETS]
        n_groups = (rows["n_tiles"][placed] + np.uint32(structs.WARPS - 1)) // structs.WARPS
        rows["first_group"][placed] = np.cumsum(n_groups) - n_groups
        self._n_groups = int(n_groups.sum())
        owners = np.repeat(np.array(placed, np.uint32), n_groups)
        self._tile_groups = device.upload(owners if placed else np.zeros(1, np.uint32))
        self._make_scratch(group, rows)

    def _enter_offsets(self, group: GroupPlan, plans: Sequence[Plan], rows: Any) -> list[int]:
        """Enter the layout of offsets; return the tensor of each tile of bits."""
        unary: list[int] = []
        for number in group.members:
            row, how = rows[number], plans[number].positions
            if how.layout is Layout.OFFSETS:
                n_bits = unary_bits(how.n, how.k, how.low_bits)
                row["first_unary"], row["n_unary"] = len(unary), -(-n_bits // (32 * WORDS))
                unary += [number] * int(row["n_unary"])
        return unary

    def _make_scratch(self, group: GroupPlan, rows: Any) -> None:
        """Allocate the bitmaps and counts of all ranks and enter their addresses."""
        described = rows[group.members]
        tiles = described["n_tiles"].astype(np.uint64)
        by_offsets = described["layout"] == Layout.OFFSETS
        for field, counts in (
            ("bitmaps", tiles * ~by_offsets * np.uint64(self._n_words)),
            ("ranks", tiles * ~by_offsets),
            ("starts", tiles * by_offsets * np.uint64(structs.START_NBYTES // 4)),
            ("unary", described["n_unary"]),
        ):
            sizes = np.uint64(self._n_ranks) * counts
            # Zeros, since no kernel writes bitmaps beyond their last byte.
            scratch = self._device.zeros(max(1, int(sizes.sum())), np.uint32)
            self._kept.append(scratch)
            first_words = np.cumsum(sizes) - sizes
            rows[field][group.members] = (
                np.uint64(self._device.address(scratch)) + np.uint64(4) * first_words
            )

    def decode(self, kernels: Any, common: list[Any], not_finite: Any) -> None:
        """Launch the kernels that decode and sum payloads whose headers have been read."""
        if self._is_raw:
            kernels["sum_raw"](self.n_tiles, THREADS, [*common, self.owners, not_finite], 0)
            return
        per_rank, shared = self._n_ranks, structs.SUMS_NBYTES
        if self._n_unary:
            arguments = [*common, self._unary, np.uint32(self._n_unary)]
            for name in ("count_unary", self._offsets):
                kernels[name](per_rank * self._n_unary, WORDS, arguments, shared)
        if self._n_groups:
            arguments = [*common, self._tile_groups, np.uint32(self._n_groups)]
            kernels[self._count](per_rank * self._n_groups, THREADS, arguments, shared)
        arguments = [*common, self.owners, not_finite, *self._tables]
        shared = structs.POINTS_NBYTES + structs.RANK_TILES_NBYTES
        kernels[self._sum](self.n_tiles // self._apart, THREADS, arguments, shared)
