"""Codec: an array to bytes and back, by a transform, a sparsifier and a quantizer.

Owns the order of the stages and the checks at the door; knows no byte's place (``wire``) and no
arithmetic (``backends``).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import numpy as np

from horovod_fftcomp import positions, wire
from horovod_fftcomp.backends import Array, Coefficients, Part, backend_for, load_backend
from horovod_fftcomp.errors import PayloadError
from horovod_fftcomp.positions import Layout
from horovod_fftcomp.quantizers import LARGEST_FINITE_BITS, Float32, Quantizer
from horovod_fftcomp.sparsifiers import Threshold, TopK
from horovod_fftcomp.transforms import Transform
from horovod_fftcomp.wire import Header, Plan

# The same few thousand tensors come back every step.
_PLANS_CACHED = 1 << 14


class Encoded(NamedTuple):
    """What ``Codec.encode_coeffs`` returns."""

    payload: Array
    residual: Array | None


@dataclass(frozen=True)
class Codec:
    """Turn arrays into payloads: ``transform``, then ``sparsifier``, then ``quantizer``.

    Holds parameters and no data; equal codecs on all ranks make payloads that fit together.
    Every method takes NumPy arrays and leaves them unchanged. ``backend`` ("reference" or "cpu")
    overrides the choice by the array's type; it is there for tests.

    >>> import numpy as np, horovod_fftcomp as hfc
    >>> codec = hfc.get_codec("topk", density=0.25)
    >>> payload = codec.encode(np.array([1.0, -4.0, 2.0, 3.0], np.float32))
    >>> codec.decode(payload)
    array([ 0., -4.,  0.,  0.], dtype=float32)
    """

    transform: Transform
    sparsifier: TopK | Threshold
    quantizer: Quantizer

    @functools.cached_property
    def fingerprint(self) -> int:
        """64-bit hash of the stages and their options; travels in every header."""
        return wire.fnv1a(f"{wire.VERSION}:{self!r}")

    def payload_nbytes(self, shape: int | Sequence[int]) -> int:
        """Return the size in bytes of the payload of any array of ``shape``, header included.

        Raises ValueError under a threshold, which leaves the size to the values.
        """
        dims = (shape,) if isinstance(shape, (int, np.integer)) else shape
        return self.plan(tuple(int(dim) for dim in dims)).payload_nbytes

    @property
    def has_fixed_size(self) -> bool:
        """Whether a payload's size depends on the shape alone."""
        return isinstance(self.sparsifier, TopK)

    def plan(self, shape: tuple[int, ...], k: int | None = None) -> Plan:
        """Return the layout and the sizes for a tensor of ``shape``.

        ``k``: how many coefficients are sent, where that depends on the values.
        """
        if isinstance(self.sparsifier, TopK):
            return _plan(self, shape)
        if k is None:
            raise ValueError("the size of a payload under a threshold depends on the values")
        return wire.make_plan(shape, math.prod(shape), k, self.quantizer.bits)

    def encode(self, x: Array, step: int = 0, name: str = "", backend: str | None = None) -> Array:
        """Return the payload of ``x``, uint8 1-D.

        ``x``: any shape; float16, bfloat16 (``ml_dtypes``), float32 or float64. ``step`` and
        ``name`` seed random choices and appear in errors. NaN or Inf inside is legal: the
        payload says so and decodes to NaN everywhere. Raises TypeError for other dtypes.
        """
        del step  # nothing random in the stages so far
        kernels = _kernels(backend, x)
        x = np.asarray(x)
        flat = _as_flat_float32(x, name)
        coeffs = self.coeffs_of(flat, x.shape, kernels, own=False)
        return self.encode_coeffs(
            coeffs, x.shape, x.dtype.name, kernels=kernels, keep_residual=False
        ).payload

    def coeffs_of(
        self,
        flat: Array,
        shape: tuple[int, ...],
        kernels: ModuleType,
        residual: Array | None = None,
        own: bool = True,
    ) -> Coefficients:
        """Return the coefficients of a flat float32 gradient, plus ``residual``'s.

        In a new array; unless ``own`` maybe in ``flat`` itself. Those of a tensor that travels as
        it is are its elements. A residual always lies in the transform's domain, since only other
        tensors leave one; a changed density may bring both together. Raises ValueError if it has
        another dtype or size.
        """
        if residual is not None:
            found, expected = (residual.dtype, residual.size), self.coeffs_format(shape)
            if found != expected:  # kernels would read beyond its end
                raise ValueError(f"the residual is (dtype, elements) {found}, expected {expected}")
        if isinstance(self.sparsifier, Threshold):
            key = int(np.float32(self.sparsifier.value).view(np.uint32)) - 1
            coeffs = self.transform.forward(flat, residual, 0, kernels, own)
            return coeffs._replace(key=key, ties=0)
        plan = self.plan(shape)
        if plan.layout is not Layout.RAW:
            k = 0 if plan.layout is Layout.ALL else plan.k
            return self.transform.forward(flat, residual, k, kernels, own)
        if residual is not None:
            residual = self.transform.inverse(residual, plan.numel, kernels)
        return kernels.rank(flat, 0, 1) if residual is None else kernels.add(flat, residual, 0)

    def coeffs_format(self, shape: tuple[int, ...]) -> tuple[np.dtype, int]:
        """Return (dtype, elements) of the coefficients that a tensor of ``shape`` leaves unsent."""
        kind = np.complex64 if self.transform.reals_per_bin == 2 else np.float32
        return np.dtype(kind), self.transform.n_bins(math.prod(shape))

    def energy(self, coeffs: Array, shape: tuple[int, ...]) -> float:
        """Return the sum of squares of the gradient with these coefficients."""
        if self.has_fixed_size and self.plan(shape).layout is Layout.RAW:
            return float(np.dot(coeffs, coeffs))
        return self.transform.energy(coeffs)

    def encode_coeffs(
        self,
        coeffs: Coefficients,
        shape: tuple[int, ...],
        dtype: str = "float32",
        *,
        kernels: ModuleType,
        keep_residual: bool = True,
        out: Array | None = None,
    ) -> Encoded:
        """Return the payload of ``coeffs`` and, if asked for, what it leaves unsent.

        With ``keep_residual`` the array of ``coeffs`` itself becomes the residual: the sent values
        are subtracted in place. None is left by a tensor that travels as it is, all of which is
        sent, and by non-finite coefficients. The payload is written to the front of ``out``,
        zeros uint8, where that is given.
        """
        array, peak = coeffs.array, coeffs.peak
        k = None
        if not self.has_fixed_size:
            finite = peak <= LARGEST_FINITE_BITS
            k = kernels.count_above(array, coeffs.key) if finite else 0
        plan = self.plan(shape, k)
        if out is None:
            out = np.zeros(plan.payload_nbytes, np.uint8)
        payload = out[: plan.payload_nbytes]
        if peak > LARGEST_FINITE_BITS:
            wire.write_header(payload, plan, self.fingerprint, dtype, math.nan, False)
            return Encoded(payload, None)
        scale = float(np.uint32(peak).view(np.float32))
        is_raw = plan.layout is Layout.RAW
        if is_raw:
            payload[plan.values_offset :] = array.view(np.uint8)
        else:
            self._write_body(payload, plan, coeffs, scale, kernels, keep_residual)
        wire.write_header(payload, plan, self.fingerprint, dtype, scale, True)
        return Encoded(payload, array if keep_residual and not is_raw else None)

    def _write_body(
        self,
        payload: Array,
        plan: Plan,
        coeffs: Coefficients,
        scale: float,
        kernels: ModuleType,
        keep_residual: bool,
    ) -> None:
        """Quantize what is chosen and write positions and values."""
        coding = self.quantizer.coding(scale)
        bitmap, values = kernels.take(coeffs, self.transform.bins_per_block, coding, keep_residual)
        packed = positions.pack(bitmap, plan.positions, kernels)
        payload[plan.header_nbytes : plan.header_nbytes + plan.positions.nbytes] = packed
        payload[plan.values_offset :] = values

    def decode(self, payload: Array, backend: str | None = None) -> Array:
        """Return the array that ``payload`` stands for, in the shape and dtype encoded.

        A value that rounding made too large for the dtype becomes its largest finite one.
        Raises PayloadError for bytes that this codec did not write, and where a transform of
        values near float32's largest overflows.
        """
        header = _header_of(payload)
        total = self.decode_sum([payload], backend, [header])
        if header.finite and np.isnan(total).any():
            raise PayloadError("body: the values overflow in the inverse transform")
        return _cast_back(total, header.dtype)

    def decode_sum(
        self,
        payloads: Sequence[Array],
        backend: str | None = None,
        headers: Sequence[Header] | None = None,
    ) -> Array:
        """Return the sum of the decoded ``payloads``, float32, in the order given.

        Coefficients are added and transformed back once, however many payloads there are. If
        one was made of non-finite values, every element of the sum is NaN. ``headers``: those of
        the payloads where they have been read already.
        """
        if not payloads:
            raise ValueError("payloads must not be empty: the shape of the sum would be unknown")
        kernels = _kernels(backend, payloads[0])
        if headers is None:
            headers = [_header_of(payload) for payload in payloads]
        plans = [self._checked(*pair) for pair in zip(payloads, headers, strict=True)]
        shape = headers[0].shape
        for number, header in enumerate(headers):
            if header.shape != shape:
                raise PayloadError(
                    f"payload {number}: header field 'shape' is {header.shape}, "
                    f"expected {shape} as in payload 0"
                )
        numel = plans[0].numel
        if not all(header.finite for header in headers):
            return np.full(shape, np.nan, np.float32)
        if all(plan.layout is Layout.RAW for plan in plans):
            return self._sum_raw(payloads, headers, plans[0], kernels).reshape(shape)
        parts = []
        whole = zip(payloads, plans, headers, strict=True)
        for number, (payload, plan, header) in enumerate(whole):
            try:
                parts.append(self._part(_aligned(payload), plan, header, kernels))
            except ValueError as error:
                raise PayloadError(f"payload {number}: body: {error}") from error
        try:
            return self.transform.sum(parts, numel, kernels).reshape(shape)
        except ValueError as error:
            raise PayloadError(f"body: {error}") from error

    def _part(self, payload: Array, plan: Plan, header: Header, kernels: ModuleType) -> Part:
        """Return the body of a payload; ValueError if its positions cannot be."""
        if plan.layout is Layout.RAW:  # beside others that chose less under the same threshold
            values = payload[plan.values_offset :]
            everywhere = positions.first_ones(plan.numel, plan.numel)
            return Part(everywhere, values, Float32().coding(header.scale))
        end = plan.header_nbytes + plan.positions.nbytes
        bitmap = positions.unpack(payload[plan.header_nbytes : end], plan.positions, kernels)
        coding = self.quantizer.coding(header.scale)
        return Part(bitmap, payload[plan.values_offset :], coding)

    def _sum_raw(
        self, payloads: Sequence[Array], headers: Sequence[Header], plan: Plan, kernels: ModuleType
    ) -> Array:
        """Return the sum of tensors that travelled as they are."""
        total = np.zeros(plan.numel, np.float32)
        for number, (payload, header) in enumerate(zip(payloads, headers, strict=True)):
            values = _aligned(payload)[plan.values_offset :].view(np.float32)
            if kernels.peak_bits(values) > int(np.float32(header.scale).view(np.uint32)):
                raise PayloadError(f"payload {number}: body: a value lies beyond the scale")
            total += values
        return total

    def may_overflow(self, headers: Sequence[Header]) -> bool:
        """Tell whether a sum of payloads with these headers could exceed float32."""
        return sum(header.scale for header in headers) * self.transform.gain > 2.0**127

    def _checked(self, payload: Array, header: Header) -> Plan:
        """Return the plan of a payload; PayloadError unless this codec wrote this header."""
        if header.fingerprint != self.fingerprint:
            raise PayloadError(
                f"header field 'fingerprint' is {header.fingerprint:016x}, expected "
                f"{self.fingerprint:016x}; run the same recipe and options on all ranks "
                f"(here: {self!r})"
            )
        if not self.has_fixed_size and header.k > math.prod(header.shape):
            raise PayloadError(f"header field 'k' is {header.k}, more than there are elements")
        plan = self.plan(header.shape, header.k)
        for field, found, expected in (
            ("k", header.k, plan.k),
            ("layout", header.layout, plan.layout),
            ("payload length", header.payload_nbytes, plan.payload_nbytes),
            ("payload length", len(payload), plan.payload_nbytes),
        ):
            if found != expected:
                raise PayloadError(f"header field {field!r} is {found}, expected {expected}")
        return plan


def _header_of(payload: Array) -> Header:
    if not isinstance(payload, np.ndarray) or payload.dtype != np.uint8 or payload.ndim != 1:
        raise TypeError(
            "a payload is a 1-D uint8 array (of bytes: np.frombuffer(data, np.uint8)); got "
            f"{getattr(payload, 'dtype', type(payload).__name__)}"
        )
    return wire.read_header(payload)


@functools.lru_cache(_PLANS_CACHED)
def _plan(codec: Codec, shape: tuple[int, ...]) -> Plan:
    assert isinstance(codec.sparsifier, TopK)
    n_bins = codec.transform.n_bins(math.prod(shape))
    bits_per_bin = codec.transform.reals_per_bin * codec.quantizer.bits
    return wire.make_plan(shape, n_bins, codec.sparsifier.count(n_bins), bits_per_bin)


def _kernels(backend: str | None, array: object) -> ModuleType:
    return backend_for(array) if backend is None else load_backend(backend)


def _as_flat_float32(x: Array, name: str) -> Array:
    """Return ``x`` in C order as float32 1-D, without a copy where it is that already."""
    if x.dtype.name not in wire.DTYPES:
        raise TypeError(
            f"tensor {name!r} has dtype {x.dtype}; "
            f"a codec takes {', '.join(wire.DTYPES)}: cast it or leave it uncompressed"
        )
    with np.errstate(over="ignore"):  # a float64 beyond float32 becomes Inf and is flagged
        return np.require(x, np.float32, ["C", "A", "W"]).reshape(-1)  # as kernels are compiled for


def _cast_back(total: Array, dtype: str) -> Array:
    """Return ``total`` in ``dtype``, saturating: what was finite stays finite."""
    if dtype == "bfloat16":
        import ml_dtypes  # only whoever encoded bfloat16 needs it

        target = np.dtype(ml_dtypes.bfloat16)
        limit = np.float32(ml_dtypes.finfo(target).max)
    else:
        target = np.dtype(dtype)
        limit = np.float32(min(np.finfo(target).max, np.finfo(np.float32).max))
    return np.clip(total, -limit, limit, out=total).astype(target, copy=False)


def _aligned(payload: Array) -> Array:
    """Return ``payload``, or a copy that kernels take: writable, at a place for 64-bit words."""
    if payload.ctypes.data % 8 == 0 and payload.strides == (1,) and payload.flags.writeable:
        return payload
    return payload.copy()
