"""Base class of element-wise methods: they send every element in a few bits.

A method encodes finite values as the body of a payload and adds decoded bodies to a sum. It holds
options alone; the rest of the payload is in ``dense``, the packing of integers in ``wire.radix``.
"""

from __future__ import annotations

import abc
from typing import ClassVar, NamedTuple

import numpy as np

from horovod_fftcomp.types import Array, Kernels, Shape
from horovod_fftcomp.wire import counter_rng
from horovod_fftcomp.wire.counter_rng import RngKey
from horovod_fftcomp.wire.radix import GIVEN, Levels


class Encoding(NamedTuple):
    """Arguments of ``Method.encode`` and ``Adaptive.choose`` beside the arrays.

    ``key``: 64-bit key of random numbers. ``keep``: whether what is sent is subtracted from the
    values. ``step``: number of the step, the same on all ranks.
    """

    shape: Shape
    key: int
    kernels: Kernels
    keep: bool
    step: int = 0


class CudaMethod(NamedTuple):
    """Description of a method for kernels of whole buckets, CUDA's and the CPU's.

    ``kind``: what a payload's scales are, as in ``kernels.cuda.dense``; "coded" for entropy-coded
    levels. ``grid``: of methods that are not of signs. ``clip``: standard deviations to which
    values are clipped; 0: no clipping.
    """

    kind: str
    grid: Levels = Levels(0, 0, GIVEN, 0)
    clip: float = 0.0


class Method(abc.ABC):
    """Base class of element-wise methods, which are frozen dataclasses of options.

    Its traits are read by recipes, schemes, CUDA kernels and tests. ``error_feedback``: whether its
    recipe has error feedback by default. ``draws``: whether it uses the key of ``key_at``.
    ``unbiased``: whether the mean over keys is the value. A subclass inherits a method's traits.
    """

    error_feedback: ClassVar[bool] = False
    draws: ClassVar[bool] = False
    unbiased: ClassVar[bool] = False

    @property
    def is_noisy(self) -> bool:
        """Whether a GPT's loss under Adam rose by more than 2 % on four ranks, though unbiased."""
        return False

    @property
    def contraction(self) -> bool:
        """Whether residuals of normally distributed gradients do not grow."""
        return False

    @property
    def cuda(self) -> CudaMethod | None:
        """Description for the kernels of whole buckets, on a GPU or the CPU.

        None: NumPy computes the method, on the host, tensor by tensor.
        """
        return None

    def key_at(self, seed: int, rng_key: RngKey) -> int:
        """Return the 64-bit key of the random numbers, one that no other rank or step has."""
        return counter_rng.draw(seed, rng_key.step, rng_key.name, rng_key.rank)

    @abc.abstractmethod
    def body_nbytes(self, shape: Shape) -> int:
        """Return the size of the body of any tensor of ``shape``, a multiple of 4."""

    @abc.abstractmethod
    def encode(self, values: Array, body: Array, how: Encoding) -> float | None:
        """Encode ``values``, float32, flat, at least one, into ``body``, uint8.

        Returns the header's scale, a finite float32 of 0 or more, or None if a value is not finite.
        """

    @abc.abstractmethod
    def add(self, total: Array, shape: Shape, body: Array, scale: float, kernels: Kernels) -> None:
        """Add the decoded ``body`` to ``total``; ValueError for bytes ``encode`` never writes."""


def checked_scales(scales: Array, scale: float) -> Array:
    """Return float32 ``scales``; ValueError unless all are in [0, scale]."""
    if not ((scales >= 0) & (scales <= np.float32(scale))).all():
        raise ValueError(f"a norm or mean is not in [0, {scale}], the range that the header gives")
    return scales
