"""Sparse codec: a transform, a sparsifier and a quantizer.

Owns the order of the stages. The byte layout is in ``wire``, the arithmetic in ``kernels``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType

import numpy as np

from horovod_fftcomp import wire
from horovod_fftcomp.codec.adaptive import Adaptive
from horovod_fftcomp.codec.base import Encoded, PayloadCodec, aligned
from horovod_fftcomp.codec.quantizers import (
    LARGEST_FINITE_BITS,
    Float32,
    Quantizer,
    float_of,
    pattern_of,
)
from horovod_fftcomp.codec.sparsifiers import Threshold, TopK
from horovod_fftcomp.codec.transforms import Identity, Transform
from horovod_fftcomp.errors import PayloadError
from horovod_fftcomp.types import Array, Body, Coding, Coefficients, Shape
from horovod_fftcomp.wire import counter_rng, positions
from horovod_fftcomp.wire.counter_rng import NO_RNG_KEY, RngKey
from horovod_fftcomp.wire.header import Header, Plan
from horovod_fftcomp.wire.positions import Layout

# Every step encodes the same tensors, a few thousand in large models.
_PLANS_CACHED = 1 << 14


@dataclass(frozen=True)
class Codec(PayloadCodec):
    """Sparse codec: applies ``transform``, then ``sparsifier``, then ``quantizer``.

    An adaptive sparsifier decides by the values how many elements it sends, and encodes them, too:
    it takes no quantizer and no transform. ``seed``: of its random numbers, as in ``DenseCodec``.
    Holds options and no data; payloads of equal codecs can be summed. ``encode`` and ``decode``
    take NumPy arrays and leave them unchanged. ``backend`` ("reference" or "cpu") overrides the
    choice of kernels by the array's type, for tests.

    >>> import numpy as np, horovod_fftcomp as hfc
    >>> codec = hfc.get_codec("topk", density=0.25)
    >>> payload = codec.encode(np.array([1.0, -4.0, 2.0, 3.0], np.float32))
    >>> codec.decode(payload)
    array([ 0., -4.,  0.,  0.], dtype=float32)
    """

    transform: Transform
    sparsifier: TopK | Threshold | Adaptive
    quantizer: Quantizer | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        counter_rng.check_seed(self.seed)
        adaptive = isinstance(self.sparsifier, Adaptive)
        if adaptive is not (self.quantizer is None) or (adaptive and self.transform != Identity()):
            raise ValueError(
                "an adaptive sparsifier takes Identity() and no quantizer, another one takes a "
                f"quantizer; got {self.transform!r}, {self.sparsifier!r}, {self.quantizer!r}"
            )

    def spec_parts(self) -> tuple[str, dict[str, object]]:
        """Return the name and the fields for the specification; see ``spec_of``."""
        if self.quantizer is None:
            return "ChosenCodec", {"method": self.sparsifier, "seed": self.seed}
        stages = {"sparsifier": self.sparsifier, "quantizer": self.quantizer}
        return "Codec", {"transform": self.transform, **stages}

    @property
    def has_fixed_size(self) -> bool:
        """Whether a payload's size depends on the shape alone."""
        return isinstance(self.sparsifier, TopK)

    def plan(self, shape: Shape, k: int | None = None) -> Plan:
        """Return the layout and the sizes for a tensor of ``shape``.

        ``k``: the number of coefficients sent, if it depends on the values.
        """
        if isinstance(self.sparsifier, TopK):
            return _plan(self, shape)
        if k is None:
            raise ValueError("the size of a payload of this recipe depends on the values")
        return wire.make_plan(shape, math.prod(shape), k, self._encoding.bits)

    def expected_nbytes(self, shape: Shape) -> int:
        """Return ``payload_nbytes``, or that of as many elements as the sparsifier expects."""
        if not isinstance(self.sparsifier, Adaptive):
            return self.payload_nbytes(shape)
        return self.plan(shape, self.sparsifier.expected_count(shape)).payload_nbytes

    def at_loss_scale(self, scale: float) -> Codec:
        """Return the codec for gradients multiplied by the loss scale ``scale``."""
        if scale == 1 or isinstance(self.sparsifier, TopK):
            return self
        return _at_loss_scale(self, scale)

    def coeffs_of(
        self,
        flat: Array,
        shape: Shape,
        kernels: ModuleType,
        residual: Array | None = None,
        own: bool = True,
    ) -> Coefficients:
        """Return the coefficients of a flat float32 gradient, plus those of ``residual``.

        The array is new; without ``own`` it may be ``flat`` itself. The coefficients of a RAW
        tensor are its elements. ``residual`` is always in the transform's domain, since a RAW
        tensor has none; after a change of density a RAW tensor may get one, which is transformed
        back. Raises ValueError if it has another dtype or size than ``coeffs_format``.
        """
        self._check_residual(residual, shape)
        if not isinstance(self.sparsifier, TopK):
            coeffs = self.transform.forward(flat, residual, 0, kernels, own)
            if isinstance(self.sparsifier, Adaptive):
                return coeffs._replace(grad=flat)
            return coeffs._replace(key=pattern_of(self.sparsifier.value) - 1, ties=0)
        plan = self.plan(shape)
        if plan.layout is not Layout.RAW:
            k = 0 if plan.layout is Layout.ALL else plan.k
            return self.transform.forward(flat, residual, k, kernels, own)
        if residual is not None:
            residual = self.transform.inverse(residual, plan.numel, kernels)
        return (
            kernels.topk_threshold(flat, 0, 1)
            if residual is None
            else kernels.add_residual(flat, residual, 0)
        )

    @property
    def _encoding(self) -> Quantizer | Adaptive:
        """Stage that encodes values: the quantizer, or the sparsifier if that is adaptive."""
        if isinstance(self.sparsifier, Adaptive):
            return self.sparsifier
        assert self.quantizer is not None
        return self.quantizer

    def coding(self, scale: float) -> Coding:
        """Return the encoding of the values in a payload of this scale."""
        return self._encoding.coding(scale)

    @property
    def draws(self) -> bool:
        """Whether random numbers are used."""
        return isinstance(self.sparsifier, Adaptive) and self.sparsifier.draws

    def key_at(self, rng_key: RngKey) -> int:
        """Return the 64-bit key of the sparsifier's random numbers at ``rng_key``."""
        return counter_rng.draw(self.seed, rng_key.step, rng_key.name, rng_key.rank)

    def energy(self, coeffs: Array, shape: Shape) -> float:
        """Return the sum of squares of the gradient with these coefficients."""
        if self.has_fixed_size and self.plan(shape).layout is Layout.RAW:
            return float(np.dot(coeffs, coeffs))
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

        The residual is the array of ``coeffs`` itself: the sent values are subtracted in place.
        It is None for a RAW tensor, all of which is sent, and for non-finite coefficients. If
        ``out`` is given, uint8 zeros, the payload is written to its first bytes. ``rng_key`` seeds
        an adaptive sparsifier's random numbers. What that chooses is all that is sent: if its
        positions and codes are no smaller than the tensor, the values that they decode to are sent
        as float32, and the residual is kept.
        """
        finite, sparsifier = coeffs.peak <= LARGEST_FINITE_BITS, self.sparsifier
        k, scale, choice = 0, math.nan, None
        if finite:
            scale = float_of(coeffs.peak)
        if finite and isinstance(sparsifier, Threshold):
            k = kernels.count_above(coeffs.array, coeffs.key)
        elif finite and coeffs.peak and isinstance(sparsifier, Adaptive):
            key = self.key_at(rng_key) if sparsifier.draws else 0
            choice = sparsifier.choose(coeffs, shape, key, kernels, keep_residual)
            k, scale = choice.k, choice.scale
        plan = self.plan(shape, k)
        if out is None:
            out = np.zeros(plan.payload_nbytes, np.uint8)
        payload = out[: plan.payload_nbytes]
        is_raw = plan.layout is Layout.RAW
        if finite and is_raw:
            values = coeffs.array
            if choice is not None:
                body = Body(choice.bitmap, choice.codes, self.coding(scale))
                values = kernels.sum_values([body], plan.numel, False)
            payload[plan.values_offset :] = values.view(np.uint8)
        elif finite and plan.k:
            if choice is not None:
                bitmap, codes = choice.bitmap, choice.codes
            else:
                bitmap, codes = kernels.select_quantize_pack(
                    coeffs, self.transform.bins_per_block, self.coding(scale), keep_residual
                )
            packed = positions.pack(bitmap, plan.positions, kernels)
            payload[plan.header_nbytes : plan.header_nbytes + plan.positions.nbytes] = packed
            payload[plan.values_offset :] = codes
        wire.write_header(payload, plan, self.fingerprint, dtype, scale, finite)
        keeps = finite and keep_residual and (not is_raw or isinstance(sparsifier, Adaptive))
        return Encoded(payload, coeffs.array if keeps else None)

    def coeffs_format(self, shape: Shape) -> tuple[np.dtype, int]:
        """Return (dtype, elements) of the residual of a tensor of ``shape``: coefficients."""
        kind = np.complex64 if self.transform.reals_per_bin == 2 else np.float32
        return np.dtype(kind), self.transform.n_bins(math.prod(shape))

    def _sum(
        self,
        payloads: Sequence[Array],
        plans: Sequence[Plan],
        headers: Sequence[Header],
        kernels: ModuleType,
    ) -> Array:
        """Add the coefficients of all payloads and transform back once."""
        parts = []
        whole = zip(payloads, plans, headers, strict=True)
        for number, (payload, plan, header) in enumerate(whole):
            try:
                parts.append(self.part(aligned(payload), plan, header, kernels))
            except ValueError as error:
                raise PayloadError(f"payload {number}: body: {error}") from error
        try:
            return self.transform.sum(parts, plans[0].numel, kernels)
        except ValueError as error:
            raise PayloadError(f"body: {error}") from error

    def part(self, payload: Array, plan: Plan, header: Header, kernels: ModuleType) -> Body:
        """Return the body of a payload; ValueError for corrupt positions."""
        if plan.layout is Layout.RAW:  # other ranks sent fewer values and are not RAW
            values = payload[plan.values_offset :]
            everywhere = positions.first_ones(plan.numel, plan.numel)
            return Body(everywhere, values, Float32().coding(header.scale))
        end = plan.header_nbytes + plan.positions.nbytes
        bitmap = positions.unpack(payload[plan.header_nbytes : end], plan.positions, kernels)
        return Body(bitmap, payload[plan.values_offset :], self.coding(header.scale))

    def may_overflow(self, headers: Sequence[Header]) -> bool:
        """Return whether a sum of payloads with these headers could overflow float32."""
        return sum(header.scale for header in headers) * self.transform.gain > 2.0**127


@functools.lru_cache(64)
def _at_loss_scale(codec: Codec, scale: float) -> Codec:
    """Return the scaled codec, cached: its fingerprint costs more than encoding a small tensor."""
    assert not isinstance(codec.sparsifier, TopK)
    return replace(codec, sparsifier=codec.sparsifier.scaled(scale))


@functools.lru_cache(_PLANS_CACHED)
def _plan(codec: Codec, shape: Shape) -> Plan:
    assert isinstance(codec.sparsifier, TopK)
    n_bins = codec.transform.n_bins(math.prod(shape))
    bits_per_bin = codec.transform.reals_per_bin * codec._encoding.bits
    return wire.make_plan(shape, n_bins, codec.sparsifier.count(n_bins), bits_per_bin)
