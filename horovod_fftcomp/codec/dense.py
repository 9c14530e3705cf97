"""Dense codec: every element is sent, in a few bits, without positions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from horovod_fftcomp import wire
from horovod_fftcomp.codec.base import PayloadCodec, Written
from horovod_fftcomp.codec.methods.base import Encoding, Method
from horovod_fftcomp.codec.quantizers import LARGEST_FINITE_BITS, float_of
from horovod_fftcomp.codec.transforms import Identity
from horovod_fftcomp.types import Array, Coefficients, Kernels, Shape
from horovod_fftcomp.wire import counter_rng
from horovod_fftcomp.wire.counter_rng import RngKey
from horovod_fftcomp.wire.header import Header, Plan
from horovod_fftcomp.wire.positions import Layout

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

    def _plan(self, shape: Shape, k: int | None) -> Plan:
        """Return the plan of the method's body; see ``PayloadCodec``."""
        return wire.dense_plan(shape, self.method.body_nbytes(shape))

    def _coeffs_of(
        self, flat: Array, shape: Shape, kernels: Kernels, residual: Array | None, own: bool
    ) -> Coefficients:
        """Return the elements, the residual's included; see ``PayloadCodec``."""
        if residual is None and own is False:
            return Coefficients(flat, _UNKNOWN, 0, flat.size)
        return Identity().forward(flat, residual, 0, kernels, own)

    @property
    def draws(self) -> bool:
        """Whether random numbers are used."""
        return self.method.draws

    def key_at(self, rng_key: RngKey) -> int:
        """Return the method's key; see ``Method``."""
        return self.method.key_at(self.seed, rng_key)

    def _write(self, coeffs: Coefficients, how: Encoding) -> Written | None:
        """Write the method's body; see ``PayloadCodec``."""
        plan, array = self.plan(how.shape), coeffs.array
        payload = np.zeros(plan.payload_nbytes, np.uint8)
        body = payload[plan.values_offset :]
        scale: float | None
        if is_raw := plan.layout is Layout.RAW:
            body[:] = array.view(np.uint8)
            peak = how.kernels.max_abs_bits(array)
            scale = float_of(peak) if peak <= LARGEST_FINITE_BITS else None
        else:
            scale = self.method.encode(array, body, how)
        return None if scale is None else Written(payload, plan, scale, is_raw)

    def _add(
        self, total: Array, payload: Array, plan: Plan, header: Header, kernels: Kernels
    ) -> None:
        """Add a decoded payload to ``total``; see ``PayloadCodec``."""
        if plan.layout is Layout.RAW:
            super()._add(total, payload, plan, header, kernels)
        else:
            body = payload[plan.values_offset :]
            self.method.add(total, header.shape, body, header.scale, kernels)
