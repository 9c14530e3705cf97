"""Dense codec: every element is sent, in a few bits, without positions."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import numpy as np

from horovod_fftcomp import wire
from horovod_fftcomp.codec.base import Encoded, PayloadCodec, aligned
from horovod_fftcomp.codec.methods.base import Encoding, Method
from horovod_fftcomp.codec.methods.signs import SignMethod
from horovod_fftcomp.codec.quantizers import LARGEST_FINITE_BITS
from horovod_fftcomp.codec.transforms import Identity
from horovod_fftcomp.errors import PayloadError
from horovod_fftcomp.types import Array, Coefficients, Shape
from horovod_fftcomp.wire import counter_rng
from horovod_fftcomp.wire.counter_rng import NO_RNG_KEY, RngKey
from horovod_fftcomp.wire.header import Header, Plan
from horovod_fftcomp.wire.positions import Layout

_PLANS_CACHED = 1 << 14  # as in ``sparse``
_UNKNOWN = -1  # peak not computed: the method computes it while it encodes


@dataclass(frozen=True)
class DenseCodec(PayloadCodec):
    """Dense codec: quantizes every element by ``method``.

    Has the methods of ``Codec``. Random numbers are a function of ``seed``, step, name and rank:
    they differ between ranks, so that rounding errors do not add up.

    >>> import numpy as np, horovod_fftcomp as hfc
    >>> codec = hfc.get_codec("efsignsgd")
    >>> codec.decode(codec.encode(np.array([1.0, -4.0, 2.0, 3.0], np.float32)))
    array([ 2.5, -2.5,  2.5,  2.5], dtype=float32)
    """

    spec_name = "ElementCodec"
    method: Method
    seed: int = 0
    transform = Identity()
    has_fixed_size = True

    def __post_init__(self) -> None:
        counter_rng.check_seed(self.seed)

    def plan(self, shape: Shape, k: int | None = None) -> Plan:
        """Return the layout and the sizes for a tensor of ``shape``; see ``PayloadCodec``."""
        del k
        return _plan(self, shape)

    def coeffs_of(
        self,
        flat: Array,
        shape: Shape,
        kernels: ModuleType,
        residual: Array | None = None,
        own: bool = True,
    ) -> Coefficients:
        """Return the elements of a flat float32 gradient, plus those of ``residual``.

        The array is new; without ``own`` it may be ``flat`` itself. Raises ValueError if the
        residual has another dtype or size.
        """
        self._check_residual(residual, shape)
        if residual is None and not own:
            return Coefficients(flat, _UNKNOWN, 0, flat.size)
        if isinstance(self.method, SignMethod) and residual is not None:
            return self.method.add_residual(flat, residual, shape, kernels)
        return kernels.add_residual(flat, residual, 0)

    def coeffs_format(self, shape: Shape) -> tuple[np.dtype, int]:
        """Return (dtype, elements) of the residual of a tensor of ``shape``."""
        return np.dtype(np.float32), math.prod(shape)

    @property
    def draws(self) -> bool:
        """Whether random numbers are used."""
        return self.method.draws

    def key_at(self, rng_key: RngKey) -> int:
        """Return the 64-bit key of the method's random numbers at ``rng_key``."""
        return counter_rng.draw(self.seed, rng_key.step, rng_key.name, rng_key.rank)

    def energy(self, coeffs: Array, shape: Shape) -> float:
        """Return the sum of squares of the gradient with these elements."""
        del shape
        return self.transform.energy(coeffs)

    def encode_coeffs(
        self,
        coeffs: Coefficients,
        shape: Shape,
        dtype: str = "float32",
        *,
        kernels: ModuleType,
        keep_residual: bool = True,
        out: Array | None = None,
        rng_key: RngKey = NO_RNG_KEY,
    ) -> Encoded:
        """Return the payload of ``coeffs`` and, with ``keep_residual``, the residual.

        As ``Codec.encode_coeffs``; ``rng_key`` seeds the method's random numbers.
        """
        key = self.key_at(rng_key) if self.draws else 0
        plan, array, peak = self.plan(shape), coeffs.array, coeffs.peak
        if out is None:
            out = np.zeros(plan.payload_nbytes, np.uint8)
        payload = out[: plan.payload_nbytes]
        body = payload[plan.values_offset :]
        is_raw = plan.layout is Layout.RAW
        if is_raw:
            peak = kernels.max_abs_bits(array)
            scale = float(np.uint32(peak).view(np.float32)) if peak <= LARGEST_FINITE_BITS else None
            body[:] = array.view(np.uint8)
        elif peak > LARGEST_FINITE_BITS:
            scale = None
        else:
            how = Encoding(shape, key, kernels, keep_residual, coeffs.signs)
            scale = self.method.encode(array, body, how)
        if scale is None:
            body[:] = 0
            wire.write_header(payload, plan, self.fingerprint, dtype, math.nan, False)
            return Encoded(payload, None)
        wire.write_header(payload, plan, self.fingerprint, dtype, scale, True)
        return Encoded(payload, array if keep_residual and not is_raw else None)

    def _sum(
        self,
        payloads: Sequence[Array],
        plans: Sequence[Plan],
        headers: Sequence[Header],
        kernels: ModuleType,
    ) -> Array:
        total = kernels.empty(plans[0].numel)
        total.fill(0)
        for number, (payload, plan, header) in enumerate(
            zip(payloads, plans, headers, strict=True)
        ):
            body = aligned(payload)[plan.values_offset :]
            try:
                self.method.add(total, header.shape, body, header.scale, kernels)
            except ValueError as error:
                raise PayloadError(f"payload {number}: body: {error}") from error
        return total

    def may_overflow(self, headers: Sequence[Header]) -> bool:
        """Return whether a sum of payloads with these headers could overflow float32."""
        return sum(header.scale for header in headers) > 2.0**127


@functools.lru_cache(_PLANS_CACHED)
def _plan(codec: DenseCodec, shape: Shape) -> Plan:
    return wire.dense_plan(shape, codec.method.body_nbytes(shape))
