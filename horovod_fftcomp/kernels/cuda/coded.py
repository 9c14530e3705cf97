"""Dithered levels on the device: launches that encode gradients and sum payloads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from horovod_fftcomp.codec.dense import DenseCodec
from horovod_fftcomp.codec.methods.dither import Dither
from horovod_fftcomp.kernels.cuda import Device, structs
from horovod_fftcomp.kernels.cuda.structs import THREADS, GroupPlan
from horovod_fftcomp.kernels.cuda.tile_group import Sums, TileGroup
from horovod_fftcomp.kernels.rans_tables import decoder_table, pushes
from horovod_fftcomp.types import Array
from horovod_fftcomp.wire import coded_levels
from horovod_fftcomp.wire.coded_levels import CHUNK, CodedLevels
from horovod_fftcomp.wire.header import Plan


class _Forms:
    """The LEVELS_FORM rows of a bucket on the device, and the tensor of each chunk."""

    def __init__(
        self, device: Device, group: GroupPlan, plans: Sequence[Plan], codecs: Sequence[DenseCodec]
    ) -> None:
        rows = np.zeros(len(plans), structs.LEVELS_FORM)
        owners: list[int] = []
        self._kept: dict[CodedLevels, list[Any]] = {}
        for number in group.members:
            method, row = codecs[number].method, rows[number]
            assert isinstance(method, Dither)
            form, n = method.form(), plans[number].numel
            if form not in self._kept:
                self._kept[form] = [device.upload(table) for table in _tables(form)]
            addresses = map(device.address, self._kept[form])
            row["costs"], row["factors"], row["pushes"], row["slots"] = addresses
            row["bucket_bits"] = form.bucket.bit_length() - 1
            row["normal"], row["tails"] = form.highest
            row["end_normal"], row["end_tails"] = form.ends
            row["first_chunk"], row["n_chunks"] = len(owners), -(-n // CHUNK)
            row["chunk_words"] = form.chunk_words(CHUNK)
            sizes = ("room", "limit", CHUNK), ("last_room", "last_limit", (n - 1) % CHUNK + 1)
            for room, limit, size in sizes:
                row[room] = form.room(size)
                row[limit] = np.int32(form.limit(size)).view(np.uint32)
            owners += [number] * int(row["n_chunks"])
        self.n_chunks, self.owners = len(owners), device.upload(np.array(owners, np.uint32))
        self.rows = device.upload(rows.view(np.uint8))


def _tables(form: CodedLevels) -> list[Array]:
    """Return the arrays that a row points to, in their order there."""
    frequencies = [
        coded_levels.frequencies(form, table, part)
        for table in (0, 1)
        for part in range(coded_levels.PARTS)
    ]
    factors = coded_levels.LEVELS_OF_GRIDS, coded_levels.STEPS_OF_GRIDS, coded_levels.EIGHTHS
    return [
        coded_levels.costs(form).T.copy().view(np.uint32),
        np.concatenate(factors),
        np.concatenate([pushes(table) for table in frequencies]),
        np.concatenate([decoder_table(table) for table in frequencies]),
    ]


class CodedGroup(TileGroup):
    """Group of tensors whose levels are entropy-coded."""

    def __init__(
        self, device: Device, group: GroupPlan, plans: Sequence[Plan], codecs: Sequence[DenseCodec]
    ) -> None:
        super().__init__(device, group)
        self._forms = _Forms(device, group, plans, codecs)
        self.names += ["add_elements", "write_coded"]

    def choose(self, kernels: Any, rows: Any, found: Any, measure: bool, totals: Any) -> list[Sums]:
        """Launch what is measured before anything is encoded; see ``TileGroup``."""
        return self.measured(kernels, rows) if measure else []

    def write(self, kernels: Any, rows: Any, found: Any, before: list[Sums]) -> Sums:
        """Launch the kernel that writes the bodies of payloads; see ``TileGroup``."""
        forms = self._forms
        arguments = [rows, forms.owners, forms.rows, np.uint32(bool(before)), found]
        kernels["write_coded"](forms.n_chunks, THREADS, arguments, structs.CODED_NBYTES)
        return self.completed(kernels, rows, before)


class CodedSums:
    """Sums of all ranks' payloads of a group whose levels are entropy-coded."""

    names = ("sum_coded",)

    def __init__(
        self, device: Device, group: GroupPlan, plans: Sequence[Plan], codecs: Sequence[DenseCodec]
    ) -> None:
        self.n_tiles, self.owners = group.owners.size, device.upload(group.owners)
        self._forms = _Forms(device, group, plans, codecs)

    def decode(self, kernels: Any, common: list[Any], not_finite: Any) -> None:
        """Launch the kernel that decodes and sums payloads whose headers have been read."""
        arguments = [*common, self._forms.owners, self._forms.rows, not_finite]
        shared = structs.CODED_SUM_NBYTES
        kernels["sum_coded"](self._forms.n_chunks, THREADS, arguments, shared)
