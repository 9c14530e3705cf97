"""Sparse codec: a transform, a sparsifier and a quantizer.

Owns the order of the stages. The byte layout is in ``wire``, the arithmetic in ``kernels``.
"""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType

import numpy as np

from horovod_fftcomp import wire
from horovod_fftcomp.codec.base import Encoded, PayloadCodec, aligned
from horovod_fftcomp.codec.quantizers import LARGEST_FINITE_BITS, Float32, Quantizer
from horovod_fftcomp.codec.sparsifiers import Threshold, TopK
from horovod_fftcomp.codec.transforms import Transform
from horovod_fftcomp.errors import PayloadError
from horovod_fftcomp.types import Array, Body, Coding, Coefficients, Shape
from horovod_fftcomp.wire import positions
from horovod_fftcomp.wire.counter_rng import NO_RNG_KEY, RngKey
from horovod_fftcomp.wire.header import Header, Plan
from horovod_fftcomp.wire.positions import Layout

# Every step encodes the same tensors, a few thousand in large models.
_PLANS_CACHED = 1 << 14


class PositionsCodec(PayloadCodec):
    """Base class of codecs that send positions of coefficients and a code for each value."""

    transform: Transform

    @abc.abstractmethod
    def coding(self, scale: float) -> Coding:
        """Return the encoding of the values in a payload of this scale."""

    def coeffs_format(self, shape: Shape) -> tuple[np.dtype, int]:
        """Return (dtype, elements) of the residual of a tensor of ``shape``: coefficients."""
        kind = np.complex64 if self.transform.reals_per_bin == 2 else np.float32
        return np.dtype(kind), self.transform.n_bins(math.prod(shape))

    def energy(self, coeffs: Array, shape: Shape) -> float:
        """Return the sum of squares of the gradient with these coefficients."""
        del shape
        return self.transform.energy(coeffs)

    def _write_body(
        self, payload: Array, plan: Plan, bitmap: Array, codes: Array, kernels: ModuleType
    ) -> None:
        """Write the positions of the bitmap's ones, and the packed codes of the values there."""
        packed = positions.pack(bitmap, plan.positions, kernels)
        payload[plan.header_nbytes : plan.header_nbytes + plan.positions.nbytes] = packed
        payload[plan.values_offset :] = codes

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


@dataclass(frozen=True)
class Codec(PositionsCodec):
    """Sparse codec: applies ``transform``, then ``sparsifier``, then ``quantizer``.

    Holds options and no data; payloads of equal codecs can be summed. ``encode`` and ``decode``
    take NumPy arrays and leave them unchanged. ``backend`` ("reference" or "cpu") overrides the
    choice of kernels by the array's type, for tests.

    >>> import numpy as np, horovod_fftcomp as hfc
    >>> codec = hfc.get_codec("topk", density=0.25)
    >>> payload = codec.encode(np.array([1.0, -4.0, 2.0, 3.0], np.float32))
    >>> codec.decode(payload)
    array([ 0., -4.,  0.,  0.], dtype=float32)
    """

    spec_name = "Codec"
    transform: Transform
    sparsifier: TopK | Threshold
    quantizer: Quantizer

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
            raise ValueError("the size of a payload under a threshold depends on the values")
        return wire.make_plan(shape, math.prod(shape), k, self.quantizer.bits)

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
        return (
            kernels.topk_threshold(flat, 0, 1)
            if residual is None
            else kernels.add_residual(flat, residual, 0)
        )

    def coding(self, scale: float) -> Coding:
        """Return the encoding of the values in a payload of this scale."""
        return self.quantizer.coding(scale)

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
        ``out`` is given, uint8 zeros, the payload is written to its first bytes.
        """
        del rng_key  # nothing is drawn
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
            bitmap, codes = kernels.select_quantize_pack(
                coeffs, self.transform.bins_per_block, self.coding(scale), keep_residual
            )
            self._write_body(payload, plan, bitmap, codes, kernels)
        wire.write_header(payload, plan, self.fingerprint, dtype, scale, True)
        return Encoded(payload, array if keep_residual and not is_raw else None)


@functools.lru_cache(64)
def _at_loss_scale(codec: Codec, scale: float) -> Codec:
    """Return the scaled codec, cached: its fingerprint costs more than encoding a small tensor."""
    assert isinstance(codec.sparsifier, Threshold)
    return replace(codec, sparsifier=codec.sparsifier.scaled(scale))


@functools.lru_cache(_PLANS_CACHED)
def _plan(codec: Codec, shape: Shape) -> Plan:
    assert isinstance(codec.sparsifier, TopK)
    n_bins = codec.transform.n_bins(math.prod(shape))
    bits_per_bin = codec.transform.reals_per_bin * codec.quantizer.bits
    return wire.make_plan(shape, n_bins, codec.sparsifier.count(n_bins), bits_per_bin)
