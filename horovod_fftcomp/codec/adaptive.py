"""Adaptive codec: a method chooses which elements are sent; their number depends on the values."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from types import ModuleType

import numpy as np

from horovod_fftcomp import wire
from horovod_fftcomp.codec.adaptive_methods import Chooser
from horovod_fftcomp.codec.base import Encoded
from horovod_fftcomp.codec.quantizers import LARGEST_FINITE_BITS
from horovod_fftcomp.codec.sparse import PositionsCodec
from horovod_fftcomp.codec.transforms import Identity
from horovod_fftcomp.types import Array, Body, Coding, Coefficients, Shape
from horovod_fftcomp.wire import counter_rng
from horovod_fftcomp.wire.counter_rng import NO_RNG_KEY, RngKey
from horovod_fftcomp.wire.header import Plan
from horovod_fftcomp.wire.positions import Layout


@dataclass(frozen=True)
class AdaptiveCodec(PositionsCodec):
    """Adaptive codec: sends positions and codes of the elements that ``method`` chooses.

    Has the methods of ``Codec``; ``seed`` is that of ``DenseCodec``. If positions and codes are no
    smaller than the tensor, the values that they decode to are sent as float32, so that the result
    depends on the choice alone.

    >>> import numpy as np, horovod_fftcomp as hfc
    >>> codec = hfc.get_codec("strom", threshold=1.5)
    >>> codec.decode(codec.encode(np.array([1.0, -4.0, 2.0, 3.0], np.float32)))
    array([ 0. , -1.5,  1.5,  1.5], dtype=float32)
    """

    spec_name = "ChosenCodec"
    method: Chooser
    seed: int = 0
    transform = Identity()
    has_fixed_size = False

    def __post_init__(self) -> None:
        counter_rng.check_seed(self.seed)

    def plan(self, shape: Shape, k: int | None = None) -> Plan:
        """Return the layout and the sizes for a tensor of ``shape`` with ``k`` elements sent."""
        if k is None:
            raise ValueError("the size of a payload of this recipe depends on the values")
        return wire.make_plan(shape, math.prod(shape), k, self.method.bits)

    def expected_nbytes(self, shape: Shape) -> int:
        """Return the size of a payload with as many elements as the method expects to send."""
        return self.plan(shape, self.method.expected_count(shape)).payload_nbytes

    def at_loss_scale(self, scale: float) -> AdaptiveCodec:
        """Return the codec for gradients multiplied by the loss scale ``scale``."""
        return self if scale == 1 else _at_loss_scale(self, scale)

    def key_at(self, rng_key: RngKey) -> int:
        """Return the 64-bit key of the method's random numbers at ``rng_key``."""
        return counter_rng.draw(self.seed, rng_key.step, rng_key.name, rng_key.rank)

    def coding(self, scale: float) -> Coding:
        """Return the encoding of the values in a payload of this scale."""
        return self.method.coding(scale)

    def coeffs_of(
        self,
        flat: Array,
        shape: Shape,
        kernels: ModuleType,
        residual: Array | None = None,
        own: bool = True,
    ) -> Coefficients:
        """Return a flat float32 gradient plus ``residual``, and the gradient itself as ``grad``.

        The array of the sum is new; without ``own`` it may be ``flat`` itself. Raises ValueError if
        the residual has another dtype or size.
        """
        self._check_residual(residual, shape)
        return self.transform.forward(flat, residual, 0, kernels, own)._replace(grad=flat)

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
        finite, scale = coeffs.peak <= LARGEST_FINITE_BITS, 0.0
        if finite and coeffs.peak:
            key = self.key_at(rng_key)
            choice = self.method.choose(coeffs, shape, key, kernels, keep_residual)
            scale, plan = choice.scale, self.plan(shape, choice.k)
        else:
            choice, plan = None, self.plan(shape, 0)
        if out is None:
            out = np.zeros(plan.payload_nbytes, np.uint8)
        payload = out[: plan.payload_nbytes]
        if choice is not None and plan.layout is Layout.RAW:
            body = Body(choice.bitmap, choice.codes, self.coding(scale))
            sent = kernels.sum_values([body], plan.numel, False)
            payload[plan.values_offset :] = sent.view(np.uint8)
        elif choice is not None:
            self._write_body(payload, plan, choice.bitmap, choice.codes, kernels)
        fields = (scale, True) if finite else (math.nan, False)
        wire.write_header(payload, plan, self.fingerprint, dtype, *fields)
        return Encoded(payload, coeffs.array if keep_residual and finite else None)


@functools.lru_cache(64)
def _at_loss_scale(codec: AdaptiveCodec, scale: float) -> AdaptiveCodec:
    """Return the scaled codec, cached: its fingerprint costs more than encoding a small tensor."""
    return replace(codec, method=codec.method.at_loss_scale(scale))
