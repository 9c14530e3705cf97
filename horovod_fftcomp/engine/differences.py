"""Comparison of GPU results with the CPU's, with tolerances; differences are described in words.

Each function returns the first difference, or None where there is none.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from horovod_fftcomp import wire
from horovod_fftcomp.codec.backend import load_backend
from horovod_fftcomp.codec.base import aligned
from horovod_fftcomp.codec.sparse import Codec
from horovod_fftcomp.kernels.reference import decode_values, encode_values
from horovod_fftcomp.types import Array, Coding
from horovod_fftcomp.wire.header import Header

# Tolerances as shares of the largest magnitude. A transform adds in another order than the CPU's;
# so does a matrix product, which users may let PyTorch compute in TF32, of 11 bits.
TRANSFORMED, MULTIPLIED = 1e-5, 0.01
_LEAST = float(np.finfo(np.float32).tiny)  # float32 is no more precise below


def transform_limit(*arrays: Array | None) -> float:
    """Return the tolerance of coefficients, or of their sums, that are as large as ``arrays``."""
    return TRANSFORMED * max(peak_of(*arrays), _LEAST)


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


def of_headers(found: Header, expected: Header, limit: float = 0.0) -> str | None:
    """Compare headers field by field; the scale may differ by ``limit``, and then the grid."""
    if not expected.finite or abs(found.scale - expected.scale) <= limit:
        found = found._replace(scale=expected.scale)
    if limit:  # other coefficients may have another grid
        found = found._replace(grid=expected.grid)
    for field, ours, theirs in zip(Header._fields, found, expected, strict=True):
        if ours is not theirs and ours != theirs:
            return f"header field {field!r} is {ours}, the CPU's is {theirs}"
    return None


def of_payloads(found: Array, expected: Array) -> str | None:
    """Compare payloads byte by byte; only their headers if the values are not finite."""
    ours, theirs = wire.read_header(found), wire.read_header(expected)
    text = of_headers(ours, theirs)
    return text if text or not theirs.finite else of_arrays("its payload", found, expected)


def of_spectra(
    codec: Codec,
    found: Array,
    expected: Array,
    wanted: Array,
    left: Array | None,
    kept: Callable[[Array], Array],
    limit: float,
) -> str | None:
    """Compare payloads of two sets of coefficients that differ by up to ``limit``.

    ``wanted``: the CPU's coefficients (gradient plus residual); ``left``: the GPU's new residual,
    or None. ``kept`` returns the residual of what was not sent.
    """
    ours, theirs = wire.read_header(found), wire.read_header(expected)
    text = of_headers(ours, theirs, limit)
    if text or not theirs.finite:
        return text
    kernels = load_backend("cpu")
    mine, cpus = (
        codec.part(aligned(payload), codec.checked_plan(payload, header), header, kernels)
        for payload, header in ((found, ours), (expected, theirs))
    )
    sizes = _sizes(wanted, codec.transform.bins_per_block)
    chosen = kernels.positions_of(mine.bitmap)
    least = sizes[kernels.positions_of(cpus.bitmap)].min(initial=np.inf)
    if text := _of_choices(sizes, chosen, least, 3 * limit):
        return text
    sent, other = (kernels.sum_values([part], np.empty_like(wanted)) for part in (mine, cpus))
    odd = chosen[sent[chosen] != other[chosen]]
    text = _of_values(sent, wanted, odd, mine.coding, limit)
    if text or left is None:
        return text
    return of_arrays("its residual", left, kept(wanted - sent), limit)


def _sizes(coeffs: Array, bins_per_block: int) -> Array:
    """Return the magnitudes by which coefficients are ranked, float32: see ``selection_keys``."""
    sizes = np.abs(coeffs)
    if np.iscomplexobj(coeffs):
        sizes[::bins_per_block] *= np.float32(0.5**0.5)
    return sizes


def _of_choices(sizes: Array, chosen: Array, least: float, limit: float) -> str | None:
    """Check that the chosen coefficients are those of at least ``least``, within ``limit``."""
    unsent = sizes.copy()
    unsent[chosen] = 0
    sent = sizes[chosen]
    if sent.min(initial=np.inf) >= least - limit and unsent.max(initial=0) <= least + limit:
        return None
    too_small = bool((sent < least - limit).any())
    place = int(chosen[sent.argmin()] if too_small else unsent.argmax())
    return (
        f"coefficient {place} of magnitude {sizes[place]} is {'' if too_small else 'not '}sent, "
        f"the CPU's is {'not ' if too_small else ''}sent: the smallest that it sends is {least}"
    )


def _of_values(
    sent: Array, wanted: Array, chosen: Array, coding: Coding, limit: float
) -> str | None:
    """Check that sent values lie between the codes of the coefficient minus and plus ``limit``.

    Rounding is monotone, and the boundary between two codes may lie between the CPU's and the GPU's
    coefficient.
    """
    exact, values = (array[chosen].view(np.float32) for array in (wanted, sent))
    low, written, high = (
        decode_values(encode_values(exact + np.float32(shift), coding), coding)
        for shift in (-limit, 0, limit)
    )
    wrong = ~((values >= low) & (values <= high))
    if not wrong.any():
        return None
    place = int(wrong.argmax())
    return (
        f"coefficient {chosen[place * chosen.size // values.size]} is sent as {values[place]}, "
        f"the CPU's is sent as {written[place]}, for a value of {exact[place]}"
    )
