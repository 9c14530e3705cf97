"""Ops of the host on values at common positions: one compiled call per stage for a bucket."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from horovod_fftcomp.codec.quantizers import LARGEST_FINITE_BITS
from horovod_fftcomp.codec.transforms import energy_of
from horovod_fftcomp.errors import PayloadError
from horovod_fftcomp.kernels import cpu, threads
from horovod_fftcomp.kernels.cpu import common_index as kernels
from horovod_fftcomp.kernels.cpu.addresses import addresses_of
from horovod_fftcomp.kernels.host.common import HostCommonOps
from horovod_fftcomp.kernels.index_plan import IndexPlan
from horovod_fftcomp.kernels.ops import Deferred, Flags
from horovod_fftcomp.types import Array, Arrays

_LEAST_VALUES = 1 << 15  # per thread, at least
_FLOAT32 = np.dtype(np.float32)
_GRAD, _OLD, _NEW = range(3)  # rows of ``_Exchange.addresses``


class _Exchange:
    """One exchange: its arrays, their addresses and the peak of each tensor.

    ``addresses``: int64, of each tensor's gradient, old and new residual; 0 for none.
    """

    def __init__(self, plan: IndexPlan, grads: Arrays, residuals: Arrays, measures: bool) -> None:
        self.plan, self.measures, self.energies = plan, measures, dict[int, tuple]()
        self.grads = _checked(plan, grads, "gradient")
        self.residuals = _checked(plan, residuals, "residual")
        self.addresses = np.zeros((3, len(plan.numels)), np.int64)
        self.peaks = np.zeros(len(plan.numels), np.int32)
        addresses_of(self.grads, self.addresses[_GRAD])
        addresses_of(self.residuals, self.addresses[_OLD])
        self.numels = np.diff(plan.starts)


def _checked(plan: IndexPlan, arrays: Arrays, kind: str) -> list[Array | None]:
    """Return contiguous arrays; ValueError for a wrong size, which kernels would overrun."""
    for at, (array, n) in enumerate(zip(arrays, plan.numels, strict=True)):
        if array is not None and (array.dtype != _FLOAT32 or array.size != n):
            raise ValueError(
                f"tensor {plan.names[at]!r}: the {kind} is (dtype, elements) "
                f"{(array.dtype, array.size)}, expected {(_FLOAT32, n)}"
            )
    return [None if array is None else np.ascontiguousarray(array) for array in arrays]


def _each(work: Callable[[int, int], object], n_items: int, least: int = _LEAST_VALUES) -> None:
    threads.each(work, threads.ranges(n_items, max(1, least)))


class HostCommonIndexOps(HostCommonOps):
    """Ops of schemes whose ranks send values at the same positions.

    Positions are those in each tensor, int64, of all tensors one after another.
    """

    def common_index(
        self, plan: IndexPlan, grads: Arrays, residuals: Arrays, measures: bool
    ) -> _Exchange:
        """Return a bucket's gradients and residuals, checked, with their addresses."""
        return _Exchange(plan, grads, residuals, measures)

    def draw(self, plan: IndexPlan, progressions: Sequence[tuple[int, int]]) -> Array:
        """Return the positions (a j + c) mod n for j below k of each tensor, int64."""
        factors, firsts = np.array(progressions, np.int64).reshape(-1, 2).T.copy()
        positions = np.empty(plan.total, np.int64)
        kernels.locate_drawn(factors, firsts, np.diff(plan.starts), plan.begins, positions)
        return positions

    def winners(self, bucket: _Exchange, begin: int, end: int, nbytes: int) -> Array:
        """Return the packed offset of the largest |gradient + residual| in each chunk, uint8."""
        message, bits = np.zeros(nbytes, np.uint8), bucket.plan.bits
        if bits:
            packed = cpu.pack_bits(self._winners(bucket, begin, end), bits)
            message[: packed.size] = packed
        return message

    def _winners(self, bucket: _Exchange, begin: int, end: int) -> Array:
        """Return the offsets, uint32, of the winners of chunks ``begin`` to ``end``."""
        plan, found = bucket.plan, np.empty(end - begin, np.uint32)

        def work(first: int, last: int) -> None:
            own = (begin + first, begin + last, plan.chunk, found[first:last])
            kernels.choose_winners(bucket.addresses, bucket.numels, plan.begins, *own)

        _each(work, found.size, _LEAST_VALUES // plan.chunk)
        return found

    def locate(self, bucket: _Exchange, gathered: Array, step: int) -> Array:
        """Return the positions that all ranks' packed offsets denote, int64."""
        plan, slices = bucket.plan, bucket.plan.slices(step)
        offsets, positions = np.zeros(plan.total, np.uint32), np.empty(plan.total, np.int64)
        if plan.bits:
            for rank, message in enumerate(gathered.reshape(plan.n_ranks, -1)):
                begin, end = slices.chunks_of(rank, plan.total)
                used = ((end - begin) * plan.bits + 7) // 8
                offsets[begin:end] = cpu.unpack_bits(message[:used], end - begin, plan.bits)
        wrong = kernels.locate_winners(offsets, bucket.numels, plan.begins, plan.chunk, positions)
        if wrong >= 0:
            name = plan.names[np.searchsorted(plan.begins, wrong, "right") - 1]
            raise PayloadError(
                f"tensor {name!r}: rank {slices.leader_of(wrong)}'s positions: an offset lies "
                "beyond the end of its chunk"
            )
        return positions

    def count_common(self, bucket: _Exchange, positions: Array, begin: int, end: int) -> Deferred:
        """Return a function that returns how many positions this rank selects itself."""
        plan, own = bucket.plan, np.empty(bucket.plan.total, np.int64)
        found = self._winners(bucket, 0, plan.total)
        kernels.locate_winners(found, bucket.numels, plan.begins, plan.chunk, own)
        alike = own == positions
        alike[begin:end] = False
        common = int(alike.sum())
        return lambda: common

    def sketch(self, bucket: _Exchange, signs: Array) -> Array:
        """Return the sum of each row of gradient + residual, with ``signs``; NaN if not finite."""
        sums = self.zeros(int(bucket.plan.row_begins[-1]))
        table = bucket.addresses, bucket.numels, bucket.plan.row_begins, signs, sums
        _each(partial(kernels.sum_rows, *table), sums.size, _LEAST_VALUES // signs.size)
        if (bucket.peaks > LARGEST_FINITE_BITS).any():
            sums[:] = np.nan
        return sums

    def largest_rows(self, bucket: _Exchange, sums: Array, length: int) -> Array:
        """Return the positions of the rows with the largest |sum|, int64."""
        plan, positions = bucket.plan, np.empty(bucket.plan.total, np.int64)
        table = bucket.numels, plan.row_begins, plan.begins, length
        kernels.locate_rows(np.ascontiguousarray(sums, np.float32), *table, positions)
        return positions

    def low_pass(self, bucket: _Exchange) -> list[Array | None]:
        """Return residual + beta * gradient of each tensor, and find the peak of each tensor."""
        plan = bucket.plan
        new = [
            None if grad is None or not plan.keeps else cpu.empty(grad.size)
            for grad in bucket.grads
        ]
        addresses_of(new, bucket.addresses[_NEW])
        beta = np.float32(plan.beta)

        def work(begin: int, end: int) -> Array:
            peaks = np.zeros_like(bucket.peaks)
            kernels.filter_residuals(bucket.addresses, plan.starts, begin, end, beta, peaks)
            return peaks

        parts = threads.each(work, threads.ranges(int(plan.starts[-1]), _LEAST_VALUES))
        bucket.peaks = np.max(parts, axis=0)
        return new

    def take(self, bucket: _Exchange, positions: Array, halves: tuple[int, float] | None) -> Array:
        """Return gradient + residual at the positions, and correct the new residuals there."""
        plan, table = bucket.plan, (bucket.addresses, bucket.numels, bucket.plan.begins)
        values = self.empty(plan.total)
        written = positions, plan.gains, bucket.peaks, values
        _each(partial(kernels.take_values, *table, *written), plan.total)
        message = values if halves is None else self.to_half(values, *halves)
        sent = values if halves is None else self.from_half(message)
        if plan.keeps:
            filters = np.float32(plan.beta), np.float32(1 - plan.beta)
            read = positions, values, sent, *filters
            _each(partial(kernels.settle_residuals, *table, *read), plan.total)
        if bucket.measures:
            found = ((at, _energies(bucket, at, positions, sent)) for at in range(len(table[1])))
            bucket.energies = {at: energies for at, energies in found if energies is not None}
        return message

    def index_energies(self, bucket: _Exchange) -> Callable[[], Mapping[int, tuple]]:
        """Return a function that returns the energies by a tensor's number."""
        energies = bucket.energies
        return lambda: energies

    def scatter_sum(
        self, bucket: _Exchange, received: Array, sources: Sequence[Array]
    ) -> tuple[list[Array], Flags]:
        """Add the received values at their positions; return the sums and their flags."""
        plan, received = bucket.plan, np.ascontiguousarray(received, np.float32)
        messages = received.reshape(len(sources), -1)
        sums, addresses = [cpu.empty(n) for n in plan.numels], np.empty_like(bucket.numels)
        addresses_of(sums, addresses)
        not_finite = np.zeros(len(sums), np.uint8)

        for message in messages:
            found = message, plan.begins, not_finite
            _each(partial(kernels.find_not_finite, *found), plan.total)
        cleared = addresses, plan.starts, not_finite, received
        _each(partial(kernels.clear_sums, *cleared), int(plan.starts[-1]))
        for message, positions in zip(messages, sources, strict=True):
            added = addresses, bucket.numels, plan.begins, positions, message, not_finite
            _each(partial(kernels.add_values, *added), plan.total)
        return sums, Flags(not not_finite.any())


def _energies(bucket: _Exchange, at: int, positions: Array, sent: Array) -> tuple | None:
    """Return the energies of a tensor; None for a frozen one and one that is not finite."""
    here = slice(*bucket.plan.begins[at : at + 2].tolist())
    grad, arrives = bucket.grads[at], sent[here]
    if grad is None or np.isnan(arrives).any():
        return None
    wanted = cpu.add_residual(grad, bucket.residuals[at], 0).array
    total, due = energy_of(wanted), wanted[positions[here]]
    # Rounding may make the difference negative.
    left = max(0.0, total - energy_of(due)) + energy_of(due - arrives)
    return energy_of(grad), total, left
