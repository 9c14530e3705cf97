"""Entropy code (rANS) of bytes.

Source: asymmetric numeral systems, Duda 2013; interleaved streams: Giesen 2014.

Symbols come in chunks of at most ``CHUNK_SYMBOLS``. A chunk becomes ``LANES`` final states, uint64,
and words, uint32. Symbol i belongs to lane i mod ``LANES``; all lanes share the words, in the order
in which a decoder reads them.
"""

from __future__ import annotations

PRECISION = 12  # frequencies add up to 2^PRECISION; the decoder's table then fits the L1 cache
LANES = 4
CHUNK_SYMBOLS = 4096
LOWEST_STATE = 1 << 31


def cost(frequency: int, fraction: int) -> int:
    """Return what a symbol of this frequency costs, in bits / ``fraction``, rounded up."""
    return PRECISION * fraction - ((frequency**fraction).bit_length() - 1)
