"""Encoding and sums of all tensors of a bucket, by a compiled call for each thread and stage."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from horovod_fftcomp import wire
from horovod_fftcomp.codec.base import PayloadCodec, aligned
from horovod_fftcomp.codec.dense import DenseCodec
from horovod_fftcomp.codec.quantizers import LARGEST_FINITE_BITS
from horovod_fftcomp.kernels import threads
from horovod_fftcomp.kernels.cpu.addresses import addresses
from horovod_fftcomp.kernels.cpu.bucket_groups import Group, SparseGroup, groups_of
from horovod_fftcomp.kernels.cpu.buffer_pool import ALIGNMENT, empty
from horovod_fftcomp.types import Array, Arrays, Shape
from horovod_fftcomp.wire.positions import Layout

Format = tuple[np.dtype, int]  # of an array: its dtype and its number of elements

_FLOAT32 = np.dtype(np.float32)
_ALIGNED_FLOATS = ALIGNMENT // 4


class Encoded(NamedTuple):
    """Residuals and peaks of an encoded bucket, in the order of the members.

    ``residuals``: float32 or complex64, views of one array; None for a tensor without gradient
    or, unless residuals contain what was sent, with one that is not finite or is sent as it is.
    ``peaks``: int64, above ``LARGEST_FINITE_BITS`` for a tensor that is not finite.
    """

    residuals: list[Array | None]
    peaks: Array


class Sums(NamedTuple):
    """Sums over ranks, in the order of the members.

    ``totals``: float32, views of one array or the arrays given; None where a payload is not as
    expected, for example not finite, so that ``decode_sum`` has to decode or reject it. ``scales``:
    of the payloads of the others, float32 ``[members, ranks]``.
    """

    totals: list[Array | None]
    scales: Array


class BucketCodec:
    """Codecs of the tensors of a bucket, with tables of all that shapes determine.

    Payloads of fixed size, one of each tensor, lie in a message of ``message_nbytes`` at
    ``slices``. ``members``: the indices of the tensors that are encoded and summed here. ``draws``:
    whether any of these uses random numbers; ``raw``: which of them are sent as they are. Bytes and
    sums are those of the codecs themselves. The tables are made for ``threads.get_num_threads()``.
    """

    def __init__(self, codecs: Sequence[PayloadCodec], shapes: Sequence[Shape]) -> None:
        sizes = [codec.payload_nbytes(shape) for codec, shape in zip(codecs, shapes, strict=True)]
        ends = list(itertools.accumulate(map(wire.align, sizes), initial=0))
        self.message_nbytes = ends[-1]
        self.slices = [slice(a, a + size) for a, size in zip(ends[:-1], sizes, strict=True)]
        self.members: list[int] = []
        groups = groups_of(codecs, shapes)
        for _, members in groups:
            self.members += members
        own = [(codecs[number], shapes[number]) for number in self.members]
        raw = [codec.plan(shape).layout is Layout.RAW for codec, shape in own]
        self.raw = [number for number, is_raw in enumerate(raw) if is_raw]
        self._sizes = [(_FLOAT32, math.prod(shape)) for _, shape in own]
        self._formats = [
            size if is_raw else codec.coeffs_format(shape)
            for (codec, shape), size, is_raw in zip(own, self._sizes, raw, strict=True)
        ]
        self._offsets = np.array([ends[number] for number in self.members], np.int64)
        self._kept, self._totals = _Arena(self._formats), _Arena(self._sizes)
        self._groups: list[tuple[slice, Group]] = []
        for kind, members in groups:
            first = self._groups[-1][0].stop if self._groups else 0
            here = slice(first, first + len(members))
            self._groups.append((here, kind(own[here], self._kept.firsts[here])))
        self.draws = any(isinstance(codec, DenseCodec) and codec.method.draws for codec, _ in own)
        cut = [group for _, group in self._groups if group.is_cut]
        self._needs_sums = any(isinstance(group, SparseGroup) for group in cut)
        self._is_cut = bool(cut)
        self._zeros = np.zeros(max((size for _, size in self._sizes), default=0), np.float32)

    def encode(
        self,
        grads: Arrays,
        residuals: Arrays,
        message: Array,
        keys: Array | None = None,
        keep: bool = True,
        decay: float = 1.0,
        keeps_sent: bool = False,
    ) -> Encoded:
        """Write the members' payloads into ``message``, uint8 zeros.

        ``grads``: flat float32; None is sent as zeros, without its residual. ``residuals``: as of
        the codecs, None for zeros; multiplied by ``decay`` first. ``keys``: the codecs' ``key_at``,
        uint64; None if no codec draws. ``keep``: return the new residuals; with ``keeps_sent``,
        too, and they contain what was sent. Raises ValueError for an array of another dtype or
        size.
        """
        frozen = [number for number, grad in enumerate(grads) if grad is None]
        if frozen:
            grads, residuals = list(grads), list(residuals)
            for number in frozen:
                grads[number] = self._zeros[: self._sizes[number][1]]
                residuals[number] = None
        if message.size != self.message_nbytes:
            raise ValueError(f"message has {message.size} bytes, expected {self.message_nbytes}")
        if keys is None and self.draws:
            raise ValueError("keys are None, but a codec of this bucket draws random numbers")
        at = addresses("gradient", grads, self._sizes)
        old = addresses("residual", residuals, self._formats)
        keep |= keeps_sent
        is_used = keep or self._needs_sums or (self._is_cut and old.any())
        kept = self._kept.new() if is_used else None
        start = 0 if kept is None else kept.ctypes.data
        peaks = np.empty(len(self.members), np.int64)
        numbers = np.zeros(len(self.members), np.uint64) if keys is None else keys
        options = np.float32(decay), keep and not keeps_sent
        for here, group in self._groups:
            columns = at[here], old[here], self._offsets[here], numbers[here], peaks[here]
            group.encode(columns, start, message, *options)
        if kept is None or not keep:
            return Encoded([None] * len(peaks), peaks)
        views, lost = self._kept.views(kept), frozen
        if not keeps_sent:
            lost = [*frozen, *self.raw, *np.flatnonzero(peaks > LARGEST_FINITE_BITS).tolist()]
        for number in lost:
            views[number] = None
        return Encoded(views, peaks)

    def sum(self, gathered: Array, n_ranks: int, into: Arrays = (), factor: float = 1.0) -> Sums:
        """Return the sums of the payloads in all ranks' messages, one after another.

        ``gathered``: uint8. ``into``: float32 arrays for the totals, which are multiplied by
        ``factor``; without any they lie in a new one. A tensor whose payload has another header
        than this codec's, or a corrupt body, has no total; see ``Sums``.
        """
        scales = np.zeros((len(self.members), n_ranks), np.int64)
        if gathered.size != n_ranks * self.message_nbytes:
            return Sums([None] * len(self.members), scales.astype(np.float32))
        gathered = aligned(gathered)
        if into:
            views, totals = list(into), addresses("sum", into, self._sizes)
        else:
            array = self._totals.new()
            views, totals = self._totals.views(array), 4 * self._totals.firsts + array.ctypes.data
        bad = np.zeros(len(self.members), np.uint8)
        for here, group in self._groups:
            columns = self._offsets[here], scales[here], bad[here]
            messages = gathered, n_ranks, self.message_nbytes
            group.sum(columns, totals[here], factor, *messages)
        for number in np.flatnonzero(bad).tolist():
            views[number] = None
        return Sums(views, scales.astype(np.int32).view(np.float32))


class _Arena:
    """Layout of the arrays of all members in one: each begins at a cache line."""

    def __init__(self, formats: Sequence[Format]) -> None:
        """Lay out arrays of ``formats``: (dtype, elements), float32 or complex64."""
        self.firsts = np.zeros(len(formats), np.int64)
        self._views: list[tuple[bool, slice]] = []
        self._size = 0
        for number, (kind, size) in enumerate(formats):
            width = kind.itemsize // 4
            self.firsts[number] = self._size
            here = slice(self._size // width, self._size // width + size)
            self._views.append((width == 2, here))
            self._size += -(-size * width // _ALIGNED_FLOATS) * _ALIGNED_FLOATS

    def new(self) -> Array:
        """Return an uninitialized array for all members, float32."""
        array = empty(self._size + _ALIGNED_FLOATS)
        first = -array.ctypes.data % ALIGNMENT // 4
        return array[first : first + self._size]

    def views(self, array: Array) -> list[Array | None]:
        """Return the members' arrays, views of ``array``."""
        pairs = array.view(np.complex64)
        return [(pairs if is_complex else array)[here] for is_complex, here in self._views]


def encode_tensor(codec: PayloadCodec, flat: Array, shape: Shape, key: int) -> Array | None:
    """Return the payload of a tensor, flat float32; None without kernels for this codec."""
    table = table_of(codec, shape, threads.get_num_threads())
    if not table.members:
        return None
    message = np.zeros(table.message_nbytes, np.uint8)
    table.encode([flat], [None], message, np.array([key], np.uint64), keep=False)
    return message[table.slices[0]]


def sum_payloads(codec: PayloadCodec, payloads: Sequence[Array], shape: Shape) -> Array | None:
    """Return the sum of payloads of float32; None if one is corrupt, or without kernels for it."""
    table = table_of(codec, shape, threads.get_num_threads())
    if not table.members:
        return None
    gathered = np.zeros((len(payloads), table.message_nbytes), np.uint8)
    for row, payload in zip(gathered, payloads, strict=True):
        row[: payload.size] = payload
    (total,) = table.sum(gathered.reshape(-1), len(payloads)).totals
    return None if total is None else total.reshape(shape)


@functools.lru_cache(64)
def table_of(codec: PayloadCodec, shape: Shape, n_threads: int) -> BucketCodec:
    """Return the bucket codec of one tensor for ``n_threads``, cached."""
    return BucketCodec([codec], [shape])
