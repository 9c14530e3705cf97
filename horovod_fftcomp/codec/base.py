"""Base class of codecs: checks of arrays and headers, encoding, and sums of payloads.

The bodies of payloads are encoded and decoded in ``sparse`` and ``dense``.
"""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from horovod_fftcomp import wire
from horovod_fftcomp.codec.backend import cpu_kernels
from horovod_fftcomp.codec.methods.base import Encoding
from horovod_fftcomp.codec.quantizers import LARGEST_FINITE_BITS, pattern_of
from horovod_fftcomp.codec.transforms import Identity, Transform
from horovod_fftcomp.errors import PayloadError
from horovod_fftcomp.types import Array, Coefficients, Kernels, Shape, refuse_others
from horovod_fftcomp.wire import counter_rng
from horovod_fftcomp.wire.counter_rng import NO_RNG_KEY, RngKey
from horovod_fftcomp.wire.header import Header, Plan
from horovod_fftcomp.wire.positions import Layout
from horovod_fftcomp.wire.spec import spec_of

# Every step encodes the same tensors, a few thousand in large models.
_PLANS_CACHED = 1 << 14

# An aligned payload and its header, which its codec can have written, with the plan of both.
Checked = tuple[Array, Plan, Header]


class EncodedTensor(NamedTuple):
    """Result of ``encode_coeffs``: a payload, uint8, and the residual, None if none is kept."""

    payload: Array
    residual: Array | None


class Written(NamedTuple):
    """Payload whose body is written, its plan, and the header's scale and grid.

    ``is_complete``: whether all of the tensor is sent as it is, so that it has no residual.
    """

    payload: Array
    plan: Plan
    scale: float
    is_complete: bool
    grid: int = 0


def check_state(kind: str, array: Array | None, expected: tuple[np.dtype, int]) -> None:
    """Raise ValueError unless ``array`` is None or has the ``expected`` (dtype, elements).

    Kernels do not check sizes and would read beyond a smaller array.
    """
    if array is not None and (array.dtype, array.size) != expected:
        found, wanted = f"{array.dtype} of {array.size} elements", f"{expected[0]} of {expected[1]}"
        raise ValueError(f"the {kind} is {found}, expected {wanted}")


class PayloadCodec(abc.ABC):
    """Base class of codecs, which turn arrays into payloads and back.

    Subclasses are frozen dataclasses of options. They implement ``_plan``, ``_coeffs_of``,
    ``_write``, and ``_add`` or ``_sum``. ``seed``: of random numbers.
    """

    transform: Transform
    seed: int

    def spec(self) -> str:
        """Return the specification: the stages with their options; see ``spec_of``."""
        return spec_of(self)

    @functools.cached_property
    def fingerprint(self) -> int:
        """64-bit hash of the specification; a field of every header."""
        return wire.fnv1a(f"{wire.VERSION}:{self.spec()}")

    def payload_nbytes(self, shape: int | Sequence[int]) -> int:
        """Return the size in bytes of the payload of any array of ``shape``, header included.

        Raises ValueError if the size depends on the values, as under a threshold.
        """
        dims = (shape,) if isinstance(shape, (int, np.integer)) else shape
        return self.plan(tuple(int(dim) for dim in dims)).payload_nbytes

    def expected_nbytes(self, shape: Shape) -> int:
        """Return ``payload_nbytes``, or a forecast if the size depends on the values."""
        return self.payload_nbytes(shape)

    def at_loss_scale(self, scale: float) -> Self:
        """Return the codec for gradients multiplied by the loss scale ``scale``."""
        return self

    @property
    @abc.abstractmethod
    def has_fixed_size(self) -> bool:
        """Whether a payload's size depends on the shape alone."""

    def plan(self, shape: Shape, k: int | None = None) -> Plan:
        """Return the layout and the sizes for a tensor of ``shape``.

        ``k``: the header's field of this name, if the sizes depend on the values.
        """
        if self.has_fixed_size:
            return _fixed_plan(self, shape)
        if k is None:
            raise ValueError("the size of a payload of this recipe depends on the values")
        return self._plan(shape, k)

    @abc.abstractmethod
    def _plan(self, shape: Shape, k: int | None) -> Plan:
        """Return the layout and the sizes; ``k`` is None if sizes are fixed."""

    @property
    @abc.abstractmethod
    def draws(self) -> bool:
        """Whether random numbers are used."""

    def key_at(self, rng_key: RngKey) -> int:
        """Return the 64-bit key of the random numbers at ``rng_key``."""
        return counter_rng.draw(self.seed, rng_key.step, rng_key.name, rng_key.rank)

    def coeffs_format(self, shape: Shape) -> tuple[np.dtype, int]:
        """Return (dtype, elements) of the residual of a tensor of ``shape``: coefficients."""
        kind = np.complex64 if self.transform.reals_per_bin == 2 else np.float32
        return np.dtype(kind), self.transform.n_bins(math.prod(shape))

    def energy(self, coeffs: Array | None, shape: Shape) -> float:
        """Return the sum of squares of the gradient with these coefficients."""
        is_raw = self.has_fixed_size and self.plan(shape).layout is Layout.RAW
        return (Identity() if is_raw else self.transform).energy(coeffs)

    def may_overflow(self, headers: Sequence[Header]) -> bool:
        """Return whether a sum of payloads with these headers could overflow float32."""
        return sum(header.scale for header in headers) * self.transform.gain > 2.0**127

    def coeffs_of(
        self,
        flat: Array,
        shape: Shape,
        kernels: Kernels,
        residual: Array | None = None,
        own: bool = True,
    ) -> Coefficients:
        """Return the coefficients of a flat float32 gradient, plus those of ``residual``.

        ``own``: a new array; else it may be ``flat`` itself. The coefficients of a RAW tensor are
        its elements. Raises ValueError if the residual has another dtype or size than
        ``coeffs_format``.
        """
        if residual is not None:
            check_state("residual", residual, self.coeffs_format(shape))
        return self._coeffs_of(flat, shape, kernels, residual, own)

    @abc.abstractmethod
    def _coeffs_of(
        self, flat: Array, shape: Shape, kernels: Kernels, residual: Array | None, own: bool
    ) -> Coefficients:
        """Return the coefficients plus those of ``residual``, which has been checked."""

    def encode_coeffs(
        self,
        coeffs: Coefficients,
        shape: Shape,
        dtype: str = "float32",
        *,
        kernels: Kernels,
        keep_residual: bool = True,
        rng_key: RngKey = NO_RNG_KEY,
    ) -> EncodedTensor:
        """Return the payload of ``coeffs`` and, with ``keep_residual``, the residual.

        The residual is the array of ``coeffs`` itself: the sent values are subtracted in place.
        It is None for a tensor all of which is sent as it is, and for non-finite coefficients.
        ``rng_key`` seeds random numbers.
        """
        key = self.key_at(rng_key) if self.draws else 0
        how = Encoding(shape, key, kernels, keep_residual, rng_key.step)
        finite = coeffs.peak <= LARGEST_FINITE_BITS
        written = self._write(coeffs, how) if finite else None
        if written is None:
            plan = self.plan(shape, 0)
            payload = np.zeros(plan.payload_nbytes, np.uint8)
            wire.write_header(payload, plan, self.fingerprint, dtype, math.nan, False)
            return EncodedTensor(payload, None)
        payload, plan, scale, is_complete, grid = written
        wire.write_header(payload, plan, self.fingerprint, dtype, scale, True, grid)
        return EncodedTensor(payload, coeffs.array if keep_residual and not is_complete else None)

    @abc.abstractmethod
    def _write(self, coeffs: Coefficients, how: Encoding) -> Written | None:
        """Write the body of the payload; None if a value is not finite.

        The peak of ``coeffs`` is finite or unknown. See ``encode_coeffs``.
        """

    def encode(
        self, x: Array, step: int = 0, name: str = "", rank: int = 0, kernels: Kernels | None = None
    ) -> Array:
        """Return the payload of ``x``, uint8 1-D.

        ``x``: any shape; float16, bfloat16 (``ml_dtypes``), float32 or float64. ``step``,
        ``name`` and ``rank`` seed random choices. If ``x`` has NaN or Inf, the payload is flagged
        and decodes to NaN everywhere. Raises TypeError, with the name, for other dtypes.
        """
        refuse_others(x)
        x = np.asarray(x)
        flat = _as_flat_float32(x, name)
        rng_key, dtype = RngKey(step, name, rank), x.dtype.name
        if kernels is None and self.has_fixed_size:
            key = self.key_at(rng_key) if self.draws else 0
            payload = cpu_kernels().encode_tensor(self, flat, x.shape, key)
            if payload is not None:
                return self._with_dtype(payload, dtype, wire.read_header(payload))
        options: dict[str, Any] = {"kernels": kernels or cpu_kernels(), "rng_key": rng_key}
        coeffs = self.coeffs_of(flat, x.shape, options["kernels"], own=False)
        return self.encode_coeffs(coeffs, x.shape, dtype, keep_residual=False, **options).payload

    def _with_dtype(self, payload: Array, dtype: str, header: Header) -> Array:
        """Return a payload whose header has this dtype, the same one if it has it already."""
        if header.dtype == dtype:
            return payload
        payload, plan = payload.copy(), self.plan(header.shape, header.k)
        options = header.scale, header.finite, header.grid
        wire.write_header(payload, plan, self.fingerprint, dtype, *options)
        return payload

    def decode(self, payload: Array, kernels: Kernels | None = None) -> Array:
        """Return the array that ``payload`` encodes, in its original shape and dtype.

        Values that rounding made too large for the dtype become its largest finite value.
        Raises PayloadError for bytes that this codec did not write, and if the inverse transform
        overflows, which values near the largest float32 can cause.
        """
        header = _header_of(payload)
        total = self.decode_sum([payload], kernels, [header])
        if header.finite and np.isnan(total).any():
            raise PayloadError("body: the values overflow in the inverse transform")
        return _cast_back(total, header.dtype)

    def decode_sum(
        self,
        payloads: Sequence[Array],
        kernels: Kernels | None = None,
        headers: Sequence[Header] | None = None,
    ) -> Array:
        """Return the sum of the decoded ``payloads``, float32, in the order given.

        Coefficients are added first and transformed back once. If one payload encodes non-finite
        values, every element of the sum is NaN. ``headers``: of the payloads, if they have been
        read already. Raises ValueError without payloads, PayloadError for bytes that this codec did
        not write and for payloads of different shapes.
        """
        if not payloads:
            raise ValueError("payloads must not be empty: the shape of the sum would be unknown")
        if headers is None:
            headers = [_header_of(payload) for payload in payloads]
        plans = [self.checked_plan(*pair) for pair in zip(payloads, headers, strict=True)]
        shape = headers[0].shape
        for number, header in enumerate(headers):
            if header.shape != shape:
                raise PayloadError(
                    f"payload {number}: header field 'shape' is {header.shape}, "
                    f"expected {shape} as in payload 0"
                )
        if not all(header.finite for header in headers):
            return np.full(shape, np.nan, np.float32)
        if kernels is None and self.has_fixed_size:
            pairs = zip(payloads, headers, strict=True)
            same = [self._with_dtype(payload, "float32", header) for payload, header in pairs]
            found = cpu_kernels().sum_payloads(self, same, shape)
            if found is not None:
                return found
        kernels = kernels or cpu_kernels()
        checked = list(zip(map(aligned, payloads), plans, headers, strict=True))
        return self._sum(checked, kernels.empty(plans[0].numel), kernels).reshape(shape)

    def _sum(self, checked: Sequence[Checked], total: Array, kernels: Kernels) -> Array:
        """Write the sum of checked payloads, all finite, to ``total``, flat float32; return it."""
        total.fill(0)
        for number, (payload, plan, header) in enumerate(checked):
            try:
                with np.errstate(over="ignore", invalid="ignore"):  # the flags of sums tell
                    self._add(total, payload, plan, header, kernels)
            except ValueError as error:
                raise PayloadError(f"payload {number}: body: {error}") from error
        return total

    def _add(
        self, total: Array, payload: Array, plan: Plan, header: Header, kernels: Kernels
    ) -> None:
        """Add a RAW payload to ``total``; ValueError if a value exceeds the header's scale."""
        values = payload[plan.values_offset :].view(np.float32)
        if kernels.max_abs_bits(values) > pattern_of(header.scale):
            raise ValueError("a value lies beyond the scale")
        total += values

    def checked_plan(self, payload: Array, header: Header) -> Plan:
        """Return the plan of a payload; PayloadError for a header that this codec never writes."""
        if header.fingerprint != self.fingerprint:
            raise PayloadError(
                f"header field 'fingerprint' is {header.fingerprint:016x}, expected "
                f"{self.fingerprint:016x}; run the same recipe and options on all ranks "
                f"(here: {self!r})"
            )
        if not self.has_fixed_size and header.k > math.prod(header.shape):
            n = math.prod(header.shape)
            raise PayloadError(f"header field 'k' is {header.k}, expected at most numel, {n}")
        if not self.has_fixed_size and header.layout == Layout.RAW:
            plan = wire.raw_plan(header.shape)  # its k counts all elements, not the chosen ones
        else:
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


@functools.lru_cache(_PLANS_CACHED)
def _fixed_plan(codec: PayloadCodec, shape: Shape) -> Plan:
    return codec._plan(shape, None)


def _header_of(payload: Array) -> Header:
    if not isinstance(payload, np.ndarray) or payload.dtype != np.uint8 or payload.ndim != 1:
        raise TypeError(
            "a payload must be a 1-D uint8 array, got "
            f"{getattr(payload, 'dtype', type(payload).__name__)}; "
            "convert bytes by np.frombuffer(data, np.uint8)"
        )
    return wire.read_header(payload)


def _as_flat_float32(x: Array, name: str) -> Array:
    """Return ``x`` as float32, 1-D, in C order; copies only if necessary."""
    if x.dtype.name not in wire.DTYPES:
        raise TypeError(
            f"tensor {name!r} has dtype {x.dtype}, expected one of {', '.join(wire.DTYPES)}; "
            "cast it or do not compress it"
        )
    with np.errstate(over="ignore"):  # a float64 beyond float32 becomes Inf and is flagged
        return np.require(x, np.float32, ["C", "A", "W"]).reshape(-1)  # as kernels are compiled for


def _cast_back(total: Array, dtype: str) -> Array:
    """Return ``total`` in ``dtype``, saturating: finite values stay finite."""
    if dtype == "bfloat16":
        import ml_dtypes  # optional, for bfloat16 alone

        target = np.dtype(ml_dtypes.bfloat16)
        limit = np.float32(ml_dtypes.finfo(target).max)
    else:
        target = np.dtype(dtype)
        limit = np.float32(min(np.finfo(target).max, np.finfo(np.float32).max))
    return np.clip(total, -limit, limit, out=total).astype(target, copy=False)


def aligned(payload: Array) -> Array:
    """Return ``payload``, copied unless it is contiguous, writable and 8-byte aligned."""
    if payload.ctypes.data % 8 == 0 and payload.strides == (1,) and payload.flags.writeable:
        return payload
    return payload.copy()
