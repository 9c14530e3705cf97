"""Interface of element-wise methods: they send every element in a few bits.

A method encodes finite values as the body of a payload and adds decoded bodies to a sum. It holds
options alone; the rest of the payload is in ``dense``, the packing of integers in ``wire.radix``.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import numpy as np

from horovod_fftcomp.types import Array, Kernels, Shape


class Sent(NamedTuple):
    """Result of ``Method.encode``: whether all values are finite, and the header's scale."""

    finite: bool
    scale: float


NOT_FINITE = Sent(False, math.nan)


class Method(Protocol):
    """Interface of dense methods, which are frozen dataclasses of options."""

    def body_nbytes(self, shape: Shape) -> int:
        """Return the size of the body of any tensor of ``shape``, a multiple of 4."""
        ...

    def encode(
        self, values: Array, shape: Shape, body: Array, key: int, kernels: Kernels, keep: bool
    ) -> Sent:
        """Encode ``values`` into ``body``, uint8; with ``keep`` subtract what is sent from them.

        ``values``: float32, flat, at least one. ``key``: 64-bit key of random choices.
        """
        ...

    def add(self, total: Array, shape: Shape, body: Array, scale: float, kernels: Kernels) -> None:
        """Add the decoded ``body`` to ``total``; ValueError for bytes ``encode`` never writes."""
        ...


def checked_scales(scales: Array, scale: float) -> Array:
    """Return float32 ``scales``; ValueError unless all are in [0, scale]."""
    if not ((scales >= 0) & (scales <= np.float32(scale))).all():
        raise ValueError(f"a norm or mean is not in [0, {scale}], the range that the header gives")
    return scales


def array_of(scale: float) -> Array:
    """Return ``scale`` as a float32 array of one element."""
    return np.array([scale], np.float32)


def float_of(bits: int) -> float:
    """Return the float32 with these bits."""
    return float(np.uint32(bits).view(np.float32))
