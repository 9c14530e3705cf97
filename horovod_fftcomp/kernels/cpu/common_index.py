"""CPU kernels of schemes whose ranks use common positions or merge sparse vectors."""

from __future__ import annotations

import numpy as np

from horovod_fftcomp.codec.quantizers import LARGEST_FINITE_BITS
from horovod_fftcomp.kernels import threads
from horovod_fftcomp.kernels.cpu.addresses import view_at
from horovod_fftcomp.kernels.cpu.arrays import as_int32, copy_into
from horovod_fftcomp.kernels.cpu.buffer_pool import empty
from horovod_fftcomp.kernels.cpu.inlining import inlined
from horovod_fftcomp.kernels.cpu.jit import kernel
from horovod_fftcomp.kernels.cpu.positions import as_words, run_count_bits
from horovod_fftcomp.kernels.cpu.sparse import peak_bits
from horovod_fftcomp.kernels.cpu.value_codes import PADDING, read_bits, write_bits
from horovod_fftcomp.kernels.cpu.vector_values import trailing_zeros
from horovod_fftcomp.types import Array, Body

_GROUP = 4096  # values that are processed at a time, in the L1 cache
_LEAST_WORDS = 1 << 13
_MAGNITUDE = np.int32(0x7FFFFFFF)
_LARGEST_FINITE = np.int32(LARGEST_FINITE_BITS)


@inlined
def _owners(begins, begin, end):
    """Return the tensors to which items ``begin`` to ``end`` of a bucket belong."""
    first = np.searchsorted(begins, begin, side="right") - 1
    return range(first, np.searchsorted(begins, end, side="left"))


@kernel
def filter_residuals(arrays, starts, begin, end, beta, peaks):
    """Write new residuals of elements ``begin`` to ``end`` of a bucket, as if nothing is sent.

    ``arrays``: for each tensor the addresses of its gradient, old and new residual, 0 for none.
    ``peaks``: int32, becomes the bits of the largest |gradient + old residual| of each tensor.
    """
    sums = np.zeros(_GROUP, np.float32)
    for number in _owners(starts, begin, end):
        at = max(begin, starts[number])
        first, n = at - starts[number], min(end, starts[number + 1]) - at
        grad, old, new = arrays[0, number], arrays[1, number], arrays[2, number]
        if n > 0 and grad != 0:
            x = view_at(grad + 4 * first, n, sums)
            y = view_at(old + 4 * first, n if old != 0 else 0, sums)
            z = view_at(new + 4 * first, n if new != 0 else 0, sums)
            peaks[number] = max(peaks[number], _low_pass(x, y, beta, z, sums))


@inlined
def _low_pass(a, b, beta, out, sums):
    """Write b + beta * a; return the bits of the largest |a + b|."""
    keys = as_int32(sums)
    peak = np.int32(0)
    for begin in range(0, a.size, _GROUP):
        end = min(begin + _GROUP, a.size)
        x, z = a[begin:end], out[begin:end]  # from index 0, else the loops are not vectorized
        if b.size:
            y = b[begin:end]
            for i in range(x.size):
                sums[i] = x[i] + y[i]
            for i in range(z.size):
                z[i] = y[i] + beta * x[i]
        else:
            for i in range(x.size):
                sums[i] = x[i]
            for i in range(z.size):
                z[i] = beta * x[i]
        for i in range(x.size):
            peak = max(peak, keys[i] & _MAGNITUDE)
    return peak


@kernel
def choose_winners(arrays, numels, begins, begin, end, chunk, winners):
    """Write the offset of the largest |gradient + residual| of chunks ``begin`` to ``end``.

    The first of equal ones wins. ``begins``: number of chunks before each tensor.
    """
    sums = np.empty(chunk, np.float32)
    for number in _owners(begins, begin, end):
        at, stop = max(begin, begins[number]), min(end, begins[number + 1])
        first = (at - begins[number]) * chunk
        n = min(numels[number], (stop - begins[number]) * chunk) - first
        grad, old = arrays[0, number], arrays[1, number]
        out = winners[at - begin : stop - begin]
        if grad == 0:
            out[:] = 0
        else:
            x = view_at(grad + 4 * first, n, sums)
            y = view_at(old + 4 * first, n if old != 0 else 0, sums)
            _choose_winners(x, y, chunk, sums, out)


@inlined
def _choose_winners(a, b, chunk, sums, winners):
    keys = as_int32(sums)
    for number in range(winners.size):
        begin = number * chunk
        end = min(begin + chunk, a.size)
        n = end - begin
        x = a[begin:end]
        if b.size:
            y = b[begin:end]
            for i in range(n):
                sums[i] = x[i] + y[i]
        else:
            for i in range(n):
                sums[i] = x[i]
        top = np.int32(0)
        for i in range(n):  # without the index of the maximum, so that it is vectorized
            keys[i] &= _MAGNITUDE
            top = max(top, keys[i])
        i = 0
        while keys[i] != top:
            i += 1
        winners[number] = i


@kernel
def locate_winners(offsets, numels, begins, chunk, positions):
    """Write the positions of offsets in chunks; return the first chunk with a wrong one, or -1."""
    wrong = -1
    for number in range(numels.size):
        first = 0
        for at in range(begins[number], begins[number + 1]):
            positions[at] = first + offsets[at]
            if wrong < 0 and offsets[at] >= min(chunk, numels[number] - first):
                wrong = at
            first += chunk
    return wrong


@kernel
def sum_rows(arrays, numels, begins, signs, sums, begin, end):
    """Write the sums ``begin`` to ``end`` of rows of gradient + residual, times signs.

    ``sums``: zeros. ``begins``: number of sums before each tensor.
    """
    length = signs.size
    terms = np.empty(length, np.float32)
    for number in _owners(begins, begin, end):
        grad, old = arrays[0, number], arrays[1, number]
        first, stop = max(begin, begins[number]), min(end, begins[number + 1])
        for row in range(first, stop if grad != 0 and numels[number] >= length else first):
            at = 4 * length * (row - begins[number])
            x = view_at(grad + at, length, terms)
            y = view_at(old + at, length if old != 0 else 0, terms)
            for i in range(length):
                terms[i] = x[i] * signs[i]
            for i in range(y.size):
                terms[i] += y[i] * signs[i]
            n = length
            while n > 1:
                n //= 2
                for i in range(n):
                    terms[i] += terms[n + i]
            sums[row] = terms[0]


@kernel
def locate_rows(sums, numels, row_begins, begins, length, positions):
    """Write the positions of each tensor's largest rows and after its last row, or of all of it.

    ``row_begins``, ``begins``: number of sums and of positions before each tensor.
    """
    keys = as_int32(sums) & _MAGNITUDE
    for number in range(numels.size):
        n, at, end = numels[number], begins[number], begins[number + 1]
        tail = n if end - at == n else n % length
        k = (end - at - tail) // length
        own = keys[row_begins[number] : row_begins[number + 1]]
        last = own.size - max(1, k)
        limit = np.partition(own, last)[last]
        ties = k - (own > limit).sum()
        for row in range(own.size):
            if own[row] > limit or (own[row] == limit and ties > 0):
                ties -= own[row] == limit
                positions[at : at + length] = np.arange(row * length, (row + 1) * length)
                at += length
        positions[at:end] = np.arange(n - tail, n)


@kernel
def locate_drawn(factors, firsts, numels, begins, positions):
    """Write the positions (factor * j + first) mod n of each tensor, for j from 0 on."""
    for number in range(numels.size):
        position, n = firsts[number], numels[number]
        for at in range(begins[number], begins[number + 1]):
            positions[at] = position
            position += factors[number]
            if position >= n:
                position -= n


@kernel
def take_values(arrays, numels, begins, positions, gains, peaks, values, begin, end):
    """Write the values ``begin`` to ``end`` of a message: gradient plus residual, times a gain.

    NaN for a tensor that is not finite, as it may not be at these positions; 0 without a gradient.
    """
    for number in _owners(begins, begin, end):
        first, stop = max(begin, begins[number]), min(end, begins[number + 1])
        n = numels[number]
        if arrays[0, number] == 0:
            values[first:stop] = 0
        elif peaks[number] > _LARGEST_FINITE:
            values[first:stop] = np.nan
        else:
            grad = view_at(arrays[0, number], n, values)
            old = view_at(arrays[1, number], n if arrays[1, number] != 0 else 0, values)
            for at in range(first, stop):
                value = grad[positions[at]]
                if old.size:
                    value += old[positions[at]]
                if gains.size:
                    value *= gains[number]
                values[at] = value


@kernel
def settle_residuals(arrays, numels, begins, positions, values, sent, beta, rest, begin, end):
    """Correct the new residuals at the positions of values ``begin`` to ``end``.

    ``sent``: the values after rounding. ``rest``: 1 - beta.
    """
    for number in _owners(begins, begin, end):
        first, stop = max(begin, begins[number]), min(end, begins[number + 1])
        n, has_old = numels[number], arrays[1, number] != 0
        if arrays[2, number] != 0:
            old = view_at(arrays[1, number], n if has_old else 0, values)
            new = view_at(arrays[2, number], n, values)
            for at in range(first, stop):
                unsent = beta * (values[at] - sent[at])
                if has_old:
                    unsent += rest * old[positions[at]]
                new[positions[at]] = unsent


@kernel
def find_not_finite(values, begins, found, begin, end):
    """Set the byte of each tensor of whose values ``begin`` to ``end`` one is not finite."""
    keys = as_int32(values)
    for number in _owners(begins, begin, end):
        first, stop = max(begin, begins[number]), min(end, begins[number + 1])
        if peak_bits(keys[first:stop]) > _LARGEST_FINITE:
            found[number] = 1


@kernel
def clear_sums(sums, starts, not_finite, like, begin, end):
    """Fill elements ``begin`` to ``end`` of a bucket's sums with 0, or NaN where not finite.

    ``sums``: the addresses of each tensor's sum.
    """
    for number in _owners(starts, begin, end):
        first, stop = max(begin, starts[number]), min(end, starts[number + 1])
        out = view_at(sums[number] + 4 * (first - starts[number]), stop - first, like)
        if not_finite[number]:
            out[:] = np.nan
        else:
            out[:] = 0  # compiled to memset


@kernel
def add_values(sums, numels, begins, positions, values, not_finite, begin, end):
    """Add values ``begin`` to ``end`` of a message at their positions to the sums."""
    for number in _owners(begins, begin, end):
        if not not_finite[number]:
            out = view_at(sums[number], numels[number], values)
            for at in range(max(begin, begins[number]), min(end, begins[number + 1])):
                out[positions[at]] += values[at]


def pack_bits(codes: Array, bits: int) -> Array:
    """Return uint32 codes packed into ``bits`` bits each, uint8."""
    stream = np.empty(codes.size * bits // 64 + PADDING, np.uint64)
    _pack_bits(codes.view(np.int32), bits, stream)
    return stream.view(np.uint8)[: (codes.size * bits + 7) // 8]


@kernel
def _pack_bits(codes, bits, stream):
    group = np.empty(_GROUP, np.int32)
    bit = np.int64(0)
    for begin in range(0, codes.size, _GROUP):
        n = min(_GROUP, codes.size - begin)
        copy_into(group[:n], codes[begin : begin + n])
        bit = write_bits(group, n, bits, stream, bit)


def unpack_bits(packed: Array, count: int, bits: int) -> Array:
    """Return the ``count`` codes that ``pack_bits`` packed, uint32."""
    stream = as_words(packed[: (count * bits + 7) // 8], count * bits // 64 + PADDING)
    codes = np.empty(count, np.uint32)
    _unpack_bits(stream, bits, codes.view(np.int32))
    return codes


@kernel
def _unpack_bits(stream, bits, codes):
    group = np.empty(_GROUP, np.int32)
    for begin in range(0, codes.size, _GROUP):
        n = min(_GROUP, codes.size - begin)
        read_bits(stream, np.int64(begin) * bits, n, bits, group)
        copy_into(codes[begin : begin + n], group)


def sum_sparse(a: Body, b: Body) -> Array:
    """Return the float32 values of the sum of two sparse vectors, at the union of positions."""
    bitmaps, values = (a.bitmap, b.bitmap), empty(run_count_bits(a.bitmap | b.bitmap))
    # One value more: the kernel reads the next value of both before it knows which it needs.
    x, y = (np.append(part.packed.view(np.float32), np.float32(0)) for part in (a, b))

    def work(begin: int, end: int) -> None:
        i, j = (run_count_bits(words[:begin]) for words in bitmaps)
        at = run_count_bits(a.bitmap[:begin] | b.bitmap[:begin])
        _merge(a.bitmap[begin:end], x[i:], b.bitmap[begin:end], y[j:], values[at:])

    threads.each(work, threads.ranges(a.bitmap.size, _LEAST_WORDS))
    return values


@kernel
def _merge(a, x, b, y, values):
    i = j = at = np.int64(0)
    for word in range(a.size):
        in_a, in_b = np.int64(a[word]), np.int64(b[word])
        union = in_a | in_b
        while union != 0:
            bit = trailing_zeros(union)
            union &= union - 1
            # No branch: it could not be predicted which of the two has a value here.
            has_a, has_b = (in_a >> bit) & 1, (in_b >> bit) & 1
            total = np.float32(0) + np.float32(has_a) * x[i]
            values[at] = total + np.float32(has_b) * y[j]
            i += has_a
            j += has_b
            at += 1
