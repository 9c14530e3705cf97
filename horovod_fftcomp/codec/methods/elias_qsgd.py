"""QSGD with its levels in the Elias gamma code."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from horovod_fftcomp.codec.methods.qsgd import QSGD
from horovod_fftcomp.types import Array, Kernels, Shape


@dataclass(frozen=True)
class EliasQSGD(QSGD):
    """QSGD with levels in the Elias gamma code, which is short if most of them are 0.

    A level l is sent as l + 1 in the gamma code, then a sign bit unless l is 0. The decoded values
    are those of QSGD. (Alistarh et al. 2017; Elias 1975.)
    """

    spec_name = "EliasQSGD"
    cuda = None

    def packed(self, body: Array, shape: Shape, kernels: Kernels) -> Array:
        """Return ``body`` as ``encode`` wrote it, with its levels in the gamma code, uint8."""
        split = 4 * self._n_buckets(shape)
        radix = 2 * self.levels + 1
        codes = kernels.unpack_words(body[split:].view(np.uint32), math.prod(shape), radix)
        stream = kernels.pack_gamma(codes, self.levels)
        return np.concatenate([body[:split], stream.view(np.uint8)])

    def add(self, total: Array, shape: Shape, body: Array, scale: float, kernels: Kernels) -> None:
        """Add norms times levels; see ``Method``."""
        split = 4 * self._n_buckets(shape)
        if body.size < split:
            raise ValueError(f"the norms take {split} bytes, but the body has {body.size}")
        codes = kernels.unpack_gamma(body[split:].view(np.uint32), total.size, self.levels)
        words = kernels.pack_words(codes, 2 * self.levels + 1)
        fixed = np.concatenate([body[:split], words.view(np.uint8)])
        super().add(total, shape, fixed, scale, kernels)


def pack_gamma(codes: Array, half: int) -> Array:
    """Return ``codes`` - ``half``, from -half to half, in the Elias gamma code, uint32 words.

    A number of magnitude l is coded as v = l + 1: N zeros, a one, the N lowest bits of v, lowest
    first, N = floor(log2(v)); then, unless l is 0, a one if it is negative, else a zero. Bit b of
    the stream is bit b mod 32 of word b // 32.
    """
    numbers = codes.astype(np.int64) - half
    v = np.abs(numbers) + 1
    length = np.frexp(v.astype(np.float64))[1] - 1
    bits = 2 * length + 1
    whole = (1 << length) | (v - (1 << length)) << (length + 1) | (numbers < 0) * (1 << bits)
    bits += numbers != 0
    starts = np.cumsum(bits) - bits
    flags = np.zeros(-(-int(bits.sum()) // 32) * 32, np.uint8)
    for b in range(int(bits.max(initial=0))):
        here = b < bits
        flags[starts[here] + b] = whole[here] >> b & 1
    return np.packbits(flags, bitorder="little").view(np.uint32)


def unpack_gamma(words: Array, n: int, half: int) -> Array:
    """Return the ``n`` codes that ``pack_gamma`` packed, uint32; ValueError for corrupt words."""
    flags = np.unpackbits(words.view(np.uint8), bitorder="little").tolist()
    codes, at = np.empty(n, np.uint32), 0
    try:
        for i in range(n):
            one = flags.index(1, at, at + 24)
            length, at = one - at, one + 1
            level = (1 << length) - 1 + sum(flags[at + b] << b for b in range(length))
            at += length
            if level > half:
                raise ValueError(f"a level is {level}, expected at most {half}")
            codes[i] = half - level if level and flags[at] else half + level
            at += level > 0
    except IndexError:
        raise ValueError("the levels are cut short") from None
    if words.size != -(-at // 32):
        raise ValueError(f"the levels take {-(-at // 32)} words, got {words.size}")
    return codes
