"""Types that all layers share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray
Shape = tuple[int, ...]
Kernels = ModuleType  # a backend
Arrays = Sequence[Array | None]  # NumPy's or a device's, one for each tensor; None for none
OldState = Mapping[str, Mapping[str, Array]]  # by kind and name: of the last step, read-only


class Tensor(NamedTuple):
    """Name and shape of a tensor, the same on all ranks."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


Tensors = Sequence[Tensor]


class Choice(NamedTuple):
    """How a tensor is compressed, in words, and the bytes that a rank sends for it in a step."""

    words: str
    sent_nbytes: int


class Coefficients(NamedTuple):
    """Coefficients of gradient plus residual, with the threshold of those to send.

    ``array``: float32 or complex64, 1-D. ``peak``: float32 bits of the largest |component|.
    ``key`` and ``ties``: to be sent are the coefficients whose selection keys are above ``key``
    and the first ``ties`` of those equal to it. ``grad``: the gradient without the residual, for
    codecs that need it.
    """

    array: Array
    peak: int
    key: int
    ties: int
    grad: Array | None = None


class Coding(NamedTuple):
    """Encoding of the values of one payload: a quantizer's parameters as kernels take them.

    ``kind``: RANGE, FLOAT32, BFLOAT16 or STEPS. ``bits``: of a code. For RANGE the ``levels``
    magnitudes with a code are ``step`` apart as float32 patterns, ``base`` is the lowest; with
    ``zero`` 1, code 0 is zero. Codes of negative values are ``levels`` above those of positive
    ones. For STEPS ``base`` is the bit pattern of the step and ``levels`` the most steps.
    ``largest``: the largest valid code, or for FLOAT32 and BFLOAT16 the bit pattern of the largest
    valid magnitude; a payload with a larger one is corrupt.
    """

    kind: int
    bits: int
    step: int
    base: int
    levels: int
    zero: int
    largest: int


class Body(NamedTuple):
    """Positions and values of a payload.

    ``bitmap``: uint64 ``[ceil(n / 64)]``, ones at the positions. ``packed``: the codes of the
    values there, uint8. ``coding``: their encoding.
    """

    bitmap: Array
    packed: Array
    coding: Coding


def refuse_others(array: Any) -> None:
    """Raise TypeError unless ``array`` is NumPy's, and for a masked one: the mask would be lost."""
    if not isinstance(array, (np.ndarray, np.generic)):
        raise TypeError(
            f"expected a NumPy array, got {type(array).__module__}.{type(array).__name__}; "
            "convert a CPU torch tensor by tensor.detach().numpy()"
        )
    refuse_masked(array)


def refuse_masked(array: Any) -> None:
    """Raise TypeError for a masked array, whose mask would be ignored."""
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(
            "a masked array is not supported: its mask would be ignored, and masked values sent; "
            "give array.filled(0)"
        )
