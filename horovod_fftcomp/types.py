"""Types that all layers share."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

Array = np.ndarray
Shape = tuple[int, ...]


class Signs(NamedTuple):
    """What ``encode_signs`` finds: the words, and what the means of both sides follow from."""

    words: Array
    sums: Array
    counts: Array


class Coefficients(NamedTuple):
    """A tensor's coefficients: of gradient plus residual, in an array of their own.

    ``array``: float32 or complex64, 1-D. ``peak``: bits of the largest |component|. ``key`` and
    ``ties``: what is to be sent are the coefficients whose keys are above ``key`` and the first
    ``ties`` of those equal to it. ``grad``: the gradient alone, of a codec that asks for it.
    ``signs``: if they were found in the same pass.
    """

    array: Array
    peak: int
    key: int
    ties: int
    grad: Array | None = None
    signs: Signs | None = None


class Coding(NamedTuple):
    """How the values of one payload are written: what kernels need to know of a quantizer.

    ``kind``: RANGE, FLOAT32, BFLOAT16 or STEPS; then ``bits`` of a code; then, of RANGE alone, the
    fields of its ``RangeGrid``; of STEPS the step's bit pattern as ``base`` and the most steps of
    either sign. ``largest``: no code, or of FLOAT32 and BFLOAT16 no magnitude's bit pattern, is
    larger in a payload that is not corrupt.
    """

    kind: int
    bits: int
    shift: int
    base: int
    positives: int
    negatives: int
    largest: int


class Body(NamedTuple):
    """A payload's body: bitmap, uint64 ``[ceil(n / 64)]``; packed codes, uint8; their coding."""

    bitmap: Array
    packed: Array
    coding: Coding
