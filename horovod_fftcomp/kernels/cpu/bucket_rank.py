"""The k-th largest key of a tensor in pieces: from a sample, counts and few keys of each piece."""

from __future__ import annotations

import numpy as np

from horovod_fftcomp.codec.quantizers import LARGEST_FINITE_BITS, key_exponent
from horovod_fftcomp.kernels.cpu.arrays import as_float32, copy_into
from horovod_fftcomp.kernels.cpu.inlining import allocating, inlined
from horovod_fftcomp.kernels.cpu.topk import (
    FEW_SAMPLES,
    GROUP,
    SAMPLES,
    below,
    count_groups,
    drawn,
    fill_keys,
    keys_above,
    kth_by_bits,
    kth_of_few,
    limits_among,
)
from horovod_fftcomp.kernels.cpu.transforms import forward_tile
from horovod_fftcomp.kernels.cpu.value_codes import float_of
from horovod_fftcomp.kernels.cpu.vector_ir import LANES
from horovod_fftcomp.wire.positions import Layout

_ALL, _RAW = int(Layout.ALL), int(Layout.RAW)
_SAMPLED = 1 << 21  # reals of a tensor in one piece above which keys are counted on the way
# Of transforms: reals of a sample, in at least so many blocks where a tensor has eight times them.
_SAMPLED_REALS, _LEAST_BLOCKS = 1 << 17, 64
_SPREAD = 3  # coefficients of a block are correlated: a sample of blocks varies more than its size

# What a piece tells the others: bits of its peak; the limits of the k-th key, both 0 if keys were
# not counted; how many keys lie above and between them, and how many of these were kept; the k-th
# key, and how many equal ones are sent; bits of codes; the header's grid.
_FIELDS = "peak low high above between kept key ties bits grid"
TALLY = np.dtype([(name, np.int64) for name in _FIELDS.split()])


def room_of(reals: int, parts: int) -> int:
    """Return how many keys a piece has room for: a small tensor's, else those near the k-th."""
    if parts > 1 or reals > _SAMPLED:
        return reals // 512 * 64 + 2 * SAMPLES
    return -(-reals // GROUP) * GROUP


@inlined
def block_of(transform):
    """Return (block of a transform, 0 for none; whether coefficients are complex numbers)."""
    if transform is None:
        return 0, False
    return transform[1], not transform[0]


@inlined
def _sample(grad, addend, decay, keys):
    """Write the keys of some elements, from all over the tensor; return their number."""
    count = min(SAMPLES, max(FEW_SAMPLES, grad.size // 4096 * 64))
    stretch, random = grad.size // count, np.uint64(0)
    for i in range(count):
        random = drawn(random)
        at = i * stretch + below(random, stretch)
        as_float32(keys)[i] = grad[at] + addend[at] * decay if addend.size else grad[at]
        keys[i] &= np.int32(0x7FFFFFFF)
    return count


@inlined
def _sample_blocks(grad, addend, decay, transform, tiles, keys):
    """Write the keys of the coefficients of some blocks; return their number."""
    is_dct, length = transform[0], transform[1]
    tile, n_blocks = LANES * length, grad.size // length
    rest, more = tiles[2 * tile : 3 * tile], tiles[3 * tile : 4 * tile]
    last, random = tiles[4 * tile : 5 * tile], np.uint64(0)
    count = max(1, min(max(_LEAST_BLOCKS, _SAMPLED_REALS // length), n_blocks // 8) // LANES)
    stretch, size = n_blocks // (count * LANES), tile if is_dct else tile // 2
    for t in range(count):
        for lane in range(LANES):
            random = drawn(random)
            at = ((t * LANES + lane) * stretch + below(random, stretch)) * length
            copy_into(rest[lane * length : (lane + 1) * length], grad[at : at + length])
            if addend.size:
                for i in range(length):
                    more[lane * length + i] = addend[at + i] * decay
        forward_tile(rest, more if addend.size else more[:0], last, *transform, tiles[: 2 * tile])
        here, bins = keys[t * size : (t + 1) * size], length if is_dct else length // 2
        fill_keys(last, not is_dct, bins, np.float32(1), here)
    return count * size


@allocating
def limits_of(piece, row, grad, residual, decay, transform, tiles):
    """Return limits of the k-th key, both 0 where keys need not be counted on the way."""
    is_small = piece.parts == 1 and row.reals <= _SAMPLED
    if is_small or row.layout == _ALL or row.layout == _RAW:
        return np.int64(0), np.int64(0)
    keys = np.empty(max(_SAMPLED_REALS, _LEAST_BLOCKS * block_of(transform)[0]), np.int32)
    if transform is None:
        n, apart = _sample(grad, residual, decay, keys), 1
    else:
        n, apart = _sample_blocks(grad, residual, decay, transform, tiles, keys), _SPREAD
    low, high = limits_among(keys[:n], row.k, row.n, apart)
    return max(low, 1), high  # keys of 0, of which there may be many, are counted as the rest


@inlined
def options_of(peak, transform):
    """Return whether coefficients are complex, bins of a block, and the scale of their keys."""
    block, is_complex = block_of(transform)
    scale = float_of((127 - key_exponent(peak)) << 23) if is_complex else np.float32(1)
    return is_complex, max(block, 1) // (2 if is_complex else 1), scale


@inlined
def peak_of(q, pieces, tallies):
    """Return the bits of the peak of a piece's tensor."""
    peak = np.int64(0)
    for p in range(pieces[q].first, pieces[q].first + pieces[q].parts):
        peak = max(peak, tallies[p].peak)
    return peak


@allocating
def rank(q, pieces, row, coeffs, transform, keys, tallies):
    """Write the k-th largest key of a tensor, and how many ties of it each piece sends.

    ``q``: the first piece. ``keys``: those that pieces kept; scratch memory for a small tensor.
    """
    peak, tally = peak_of(q, pieces, tallies), tallies[q]
    if peak > LARGEST_FINITE_BITS or row.layout == _RAW or row.layout == _ALL:
        return
    options, is_counted = options_of(peak, transform), tally.high > 0
    own, width = tallies[q : q + pieces[q].parts], 2 if options[0] else 1
    above, between, kept = own.above.sum(), own.between.sum(), own.kept.sum()
    # Of use are keys that were counted as they are, of which some are above the limits.
    need, is_known = row.k - above, is_counted and options[2] == 1 and above < row.k
    are_zeros = is_known and need > between and tally.low == 1
    are_kept = is_known and need <= between and kept == between
    key, ties = np.int64(0), need - between
    if are_kept:
        key, ties = _kth_kept(q, pieces, need, kept, keys, tallies)
    elif not are_zeros:
        n_keys = (row.n + GROUP - 1) // GROUP * GROUP
        room = np.empty(n_keys, np.int32) if is_counted else keys
        key, ties = kth_of_few(coeffs, row.n, row.k, options, room)
    for p in range(q, q + own.size):
        tallies[p].key, tallies[p].ties, piece = key, max(0, ties), pieces[p]
        if are_zeros:
            n_bins = (piece.end - piece.begin) // width
            ties -= n_bins - tallies[p].above - tallies[p].between
        elif are_kept:
            for at in range(piece.found, piece.found + tallies[p].kept):
                ties -= np.int64(keys[at]) == key
        elif p + 1 < q + own.size:
            part = coeffs[piece.begin : piece.end]
            ties -= count_groups(part, *options, key, key, keys[:0])[1]


@allocating
def _kth_kept(q, pieces, need, kept, keys, tallies):
    """Return the ``need``-th largest of the keys that all pieces kept, and the number of ties."""
    joined, at = np.empty((kept + 63) // 64 * 64, np.int32), np.int64(0)
    for p in range(q, q + pieces[q].parts):
        n, begin = tallies[p].kept, pieces[p].found
        copy_into(joined[at : at + n], keys[begin : begin + n])
        at += n
    joined[kept:] = np.int32(-2)  # below every key
    key = kth_by_bits(joined, need, tallies[q].low, tallies[q].high, 0)
    return key, need - keys_above(joined, key)
