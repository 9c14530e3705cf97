"""Comparison of GPU results with the CPU's, with tolerances; differences are described in words.

Each function returns the first difference, or None where there is none.
"""

from __future__ import annotations

import numpy as np

from horovod_fftcomp.types import Array

# Tolerances as shares of the largest magnitude. A transform adds in another order than the CPU's;
# so does a matrix product, which users may let PyTorch compute in TF32, of 11 bits.
TRANSFORMED, MULTIPLIED = 1e-5, 0.01


def peak_of(*arrays: Array | None) -> float:
    """Return the largest magnitude of any component; None counts as 0."""
    given = [array.view(np.float32) for array in arrays if array is not None]
    return max((float(np.abs(array).max(initial=0)) for array in given), default=0.0)


def of_arrays(what: str, found: Array, expected: Array, limit: float | None = None) -> str | None:
    """Compare arrays: bit by bit, or, with ``limit``, their float32 components within it."""
    if found.nbytes != expected.nbytes:
        return f"{what} has {found.nbytes} bytes, the CPU's has {expected.nbytes}"
    found = found.view(expected.dtype)
    if limit is not None:
        found, expected = found.view(np.float32), expected.view(np.float32)
        wrong = ~(np.abs(found - expected) <= limit)
    else:
        bits = np.dtype(f"u{expected.itemsize}")
        wrong = found.view(bits) != expected.view(bits)
    if not wrong.any():
        return None
    place = int(wrong.argmax())
    unit = "byte" if expected.dtype == np.uint8 else "element"
    return f"{unit} {place} of {what} is {found[place]}, the CPU's is {expected[place]}"


def of_finite(what: str, found: Array, expected: Array, limit: float | None = None) -> str | None:
    """Compare floating-point arrays; if both are not finite their values are not compared."""
    ours, theirs = np.isfinite(found).all(), np.isfinite(expected).all()
    if ours != theirs:
        words = [" is finite", " is not finite"]
        return f"{what}{words[not ours]}, the CPU's{words[not theirs]}"
    return of_arrays(what, found, expected, limit) if theirs else None


def of_norms(what: str, found: Array, expected: Array, limit: float) -> str | None:
    """Compare the norm of the difference with ``limit`` times the norm of ``expected``."""
    norm = float(np.linalg.norm(expected.astype(np.float64)))
    difference = float(np.linalg.norm(found.astype(np.float64) - expected))
    if difference <= limit * norm:
        return None
    return f"{what} differs from the CPU's by {difference / (norm or 1):.3g} of its norm"
