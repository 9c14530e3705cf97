"""A codec of positions and codes whose elements a method chooses: how many, the values decide."""

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
    """Turn arrays into payloads of what ``method`` chooses of them.

    Has the methods of ``Codec``; ``seed`` is that of ``DenseCodec``. Where positions and codes
    would be no smaller than the tensor, it is what they stand for that travels as float32, so that
    the choice alone decides what arrives.

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
        """Return the layout and the sizes for a tensor of ``shape``, ``k`` of it to be sent."""
        if k is None:
            raise ValueError("the size of a payload of chosen elements depends on the values")
        return wire.make_plan(shape, math.prod(shape), k, self.method.bits)

    def expected_nbytes(self, shape: Shape) -> int:
        """Return the size of a payload of as many elements as the method expects."""
        return self.plan(shape, self.method.expected_count(shape)).payload_nbytes

    def at_loss_scale(self, scale: float) -> AdaptiveCodec:
        """Return the codec of gradients that a loss scale has multiplied."""
        return self if scale == 1 else _at_loss_scale(self, scale)

    def key_at(self, rng_key: RngKey) -> int:
        """Return the 64 bits that all draws of an encoding at ``place`` follow from."""
        return counter_rng.draw(self.seed, rng_key.step, rng_key.name, rng_key.rank)

    def coding(self, scale: float) -> Coding:
        """Return how values are written in a payload of this scale."""
        return self.method.coding(scale)

    def coeffs_of(
        self,
        flat: Array,
        shape: Shape,
        kernels: ModuleType,
        residual: Array | None = None,
        own: bool = True,
    ) -> Coefficients:
        """Return the elements of a flat float32 gradient, plus ``residual``'s, beside itself.

        In a new array; unless ``own`` maybe in ``flat`` itself. Raises ValueError if the residual
        has another dtype or size.
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
        """Return the payload of ``coeffs`` and, if asked for, what it leaves unsent.

        As ``Codec.encode_coeffs``; ``place`` seeds what the method draws.
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
            part = Body(choice.bitmap, choice.codes, self.coding(scale))
            sent = kernels.sum_values([part], plan.numel, False)
            payload[plan.values_offset :] = sent.view(np.uint8)
        elif choice is not None:
            self._write_body(payload, plan, choice.bitmap, choice.codes, kernels)
        fields = (scale, True) if finite else (math.nan, False)
        wire.write_header(payload, plan, self.fingerprint, dtype, *fields)
        return Encoded(payload, coeffs.array if keep_residual and finite else None)


@functools.lru_cache(64)
def _at_loss_scale(codec: AdaptiveCodec, scale: float) -> AdaptiveCodec:
    """Return a codec that is kept, since its fingerprint takes longer than a small tensor."""
    return replace(codec, method=codec.method.at_loss_scale(scale))
