"""Base class and kernels of the methods that send the sign of each value, one bit."""

from __future__ import annotations

import math

import numpy as np

from horovod_fftcomp.codec.methods.base import Encoding, Method
from horovod_fftcomp.codec.methods.sums import lane_sums
from horovod_fftcomp.types import Array, Shape
from horovod_fftcomp.wire import counter_rng
from horovod_fftcomp.wire.counter_rng import RngKey
from horovod_fftcomp.wire.radix import GROUP, count_words, pack_words, unpack_words


class SignMethod(Method):
    """Base class of methods that send the sign of each value, one bit."""

    def row_length(self, shape: Shape) -> int:
        """Return the number of consecutive elements (a row) that share a scale or means."""
        return max(1, math.prod(shape))

    def body_nbytes(self, shape: Shape) -> int:
        """Return the size of the packed signs; see ``Method``."""
        return 4 * count_words(math.prod(shape), 2)

    def key_at(self, seed: int, rng_key: RngKey) -> int:
        """Return 1 if 0 is sent as a value below 0; see ``bit_of_zero``."""
        return bit_of_zero(rng_key.step, rng_key.rank)

    def _write_signs(self, values: Array, words: Array, how: Encoding) -> tuple[Array, Array]:
        """Write the packed signs; return sums and counts of each piece, see ``encode_signs``."""
        starts = self.pieces(values.size, self.row_length(how.shape))
        return encode_signs(values, starts, words.view(np.uint32), bool(how.key))

    def pieces(self, n: int, length: int) -> Array:
        """Return the starts of all rows and groups, and the end, int64, ascending."""
        groups = np.arange(0, n, GROUP, dtype=np.int64)
        if length >= n:
            return np.append(groups, n)
        rows = np.arange(0, n, length, dtype=np.int64)
        return np.append(np.union1d(groups, rows), n)


def bit_of_zero(step: int, rank: int) -> int:
    """Return the bit by which a rank sends a value of 0 in a step: 1, as of values below 0, or 0.

    For methods of votes: of neighbouring ranks one sends 1; a random bit of the step says which.
    """
    return (counter_rng.mix(step) + rank) & 1


def encode_signs(
    values: Array, starts: Array, words: Array, zeros_down: bool = False
) -> tuple[Array, Array]:
    """Write the signs of ``values`` as packed bits; return sums and counts for their means.

    ``words``: uint32, a bit for each value, 1 below 0, with ``zeros_down`` also for 0. ``starts``:
    int64, the starts of pieces of ``values``, each inside one group, and the end. Returns (float64
    ``[pieces, 2]``, sums of the values from 0 up and of those below, not finite if a value is not;
    int64 ``[pieces]``, how many bits are 1).
    """
    negative = values <= 0 if zeros_down else values < 0
    words[:] = pack_words(negative.astype(np.uint32), 2)
    sums, counts = np.zeros((starts.size - 1, 2)), np.zeros(starts.size - 1, np.int64)
    with np.errstate(invalid="ignore", over="ignore"):
        wide = values.astype(np.float64)
        for piece in range(starts.size - 1):
            here = slice(starts[piece], starts[piece + 1])
            down = negative[here]
            sums[piece] = [
                lane_sums(np.where(down == side, wide[here], 0), GROUP).sum()
                for side in (False, True)
            ]
            counts[piece] = np.count_nonzero(down)
    return sums, counts


def subtract_signs(values: Array, sides: Array, length: int, zeros_down: bool = False) -> None:
    """Subtract from each value what its sign decodes to, in place.

    ``sides``: float32 ``[rows, 2]``: what bits of 0 and of 1 decode to, in each row of ``length``
    values; see ``encode_signs``.
    """
    negative = values <= 0 if zeros_down else values < 0
    values -= sides[np.arange(values.size) // length, negative.astype(np.intp)]


def add_signs(total: Array, words: Array, sides: Array, length: int) -> None:
    """Add the values that the bits of ``encode_signs`` decode to; see ``subtract_signs``."""
    bits = unpack_words(words, total.size, 2).astype(np.intp)
    total += sides[np.arange(total.size) // length, bits]


def majority_sign(values: Array, many: float) -> None:
    """Replace values by ``many`` times their signs, in place; 0 stays 0, and NaN is kept."""
    values[:] = np.float32(many) * np.sign(values)
