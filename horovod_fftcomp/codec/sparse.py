"""Sparse codec: a transform, a sparsifier and a quantizer.

Owns the order of the stages. The byte layout is in ``wire``, the arithmetic in ``kernels``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from horovod_fftcomp import wire
from horovod_fftcomp.codec.adaptive import NOTHING, Adaptive
from horovod_fftcomp.codec.base import Checked, PayloadCodec, Written
from horovod_fftcomp.codec.methods.base import Encoding
from horovod_fftcomp.codec.quantizers import Float32, Quantizer, RangeFloat, float_of, pattern_of
from horovod_fftcomp.codec.sparsifiers import Threshold, TopK
from horovod_fftcomp.codec.transforms import Identity, Transform
from horovod_fftcomp.errors import PayloadError
from horovod_fftcomp.types import Array, Body, Coding, Coefficients, Kernels, Shape
from horovod_fftcomp.wire import counter_rng, positions
from horovod_fftcomp.wire.header import Header, Plan
from horovod_fftcomp.wire.positions import Layout


@dataclass(frozen=True)
class Codec(PayloadCodec):
    """Sparse codec: applies ``transform``, then ``sparsifier``, then ``quantizer``.

    An adaptive sparsifier decides by the values how many elements it sends, and encodes them, too:
    it takes no quantizer and no transform. ``seed``: of its random numbers, as in ``DenseCodec``.
    Holds options and no data; payloads of equal codecs can be summed. ``encode`` and ``decode``
    take NumPy arrays and leave them unchanged. ``kernels``: others than ``kernels.cpu``, for tests.

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

    def _plan(self, shape: Shape, k: int | None) -> Plan:
        """Return the smallest plan; see ``PayloadCodec``."""
        n_bins = self.transform.n_bins(math.prod(shape))
        if isinstance(self.sparsifier, TopK):
            k = self.sparsifier.count(n_bins)
        assert k is not None
        bits_per_bin = self.transform.reals_per_bin * self._encoding.bits
        return wire.make_plan(shape, n_bins, k, bits_per_bin)

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

    def _coeffs_of(
        self, flat: Array, shape: Shape, kernels: Kernels, residual: Array | None, own: bool
    ) -> Coefficients:
        """Return coefficients, the residual's included; see ``PayloadCodec``.

        ``residual`` is always in the transform's domain, since a RAW tensor has none; after a
        change of density a RAW tensor may get one, which is transformed back.
        """
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
        return Identity().forward(flat, residual, 0, kernels, own=False)

    @property
    def _encoding(self) -> Quantizer | Adaptive:
        """Stage that encodes values: the quantizer, or the sparsifier if that is adaptive."""
        if isinstance(self.sparsifier, Adaptive):
            return self.sparsifier
        assert self.quantizer is not None
        return self.quantizer

    def coding(self, scale: float, grid: int = 0) -> Coding:
        """Return the encoding of the values in a payload of this scale and grid."""
        if isinstance(self.quantizer, RangeFloat):
            return self.quantizer.coding(scale, grid)
        return self._encoding.coding(scale)

    def grid(self, plan: Plan, key: int, peak: int) -> int:
        """Return the grid of a payload, 0 without range floats; see ``quantizers.fitted_grid``."""
        if plan.layout is Layout.RAW or not isinstance(self.quantizer, RangeFloat):
            return 0
        return self.quantizer.grid(key, peak, self.transform.reals_per_bin == 2)

    @property
    def draws(self) -> bool:
        """Whether random numbers are used."""
        return isinstance(self.sparsifier, Adaptive) and self.sparsifier.draws

    def _write(self, coeffs: Coefficients, how: Encoding) -> Written | None:
        """Select and write coefficients; see ``PayloadCodec``."""
        if isinstance(self.sparsifier, Adaptive):
            return self._write_adaptive(self.sparsifier, coeffs, how)
        k, array, kernels = None, coeffs.array, how.kernels
        if not self.has_fixed_size:
            k = kernels.count_above(array, coeffs.key)
        plan, scale = self.plan(how.shape, k), float_of(coeffs.peak)
        payload = np.zeros(plan.payload_nbytes, np.uint8)
        is_raw = plan.layout is Layout.RAW
        grid = self.grid(plan, coeffs.key, coeffs.peak)
        if is_raw:
            payload[plan.values_offset :] = array.view(np.uint8)
        else:
            bitmap, codes = kernels.select_quantize_pack(
                coeffs, self.transform.bins_per_block, self.coding(scale, grid), how.keep
            )
            _write_body(payload, plan, bitmap, codes, kernels)
        return Written(payload, plan, scale, is_raw, grid)

    def _write_adaptive(self, sparsifier: Adaptive, coeffs: Coefficients, how: Encoding) -> Written:
        """Write the elements that an adaptive sparsifier chooses, and nothing else.

        If positions and codes are no smaller than the tensor, the values that they decode to are
        written as float32, so that the result depends on the choice alone.
        """
        choice = sparsifier.choose(coeffs, how) if coeffs.peak else NOTHING
        k, bitmap, codes, scale = choice
        plan = self.plan(how.shape, k)
        payload = np.zeros(plan.payload_nbytes, np.uint8)
        if plan.layout is not Layout.RAW:
            _write_body(payload, plan, bitmap, codes, how.kernels)
        elif k:
            body = Body(bitmap, codes, self.coding(scale))
            sent = how.kernels.sum_values([body], how.kernels.empty(plan.numel))
            payload[plan.values_offset :] = sent.view(np.uint8)
        return Written(payload, plan, scale, False)

    def _sum(self, checked: Sequence[Checked], total: Array, kernels: Kernels) -> Array:
        """Add the coefficients of all payloads and transform back once; see ``PayloadCodec``."""
        if all(plan.layout is Layout.RAW for _, plan, _ in checked):
            return super()._sum(checked, total, kernels)
        parts = []
        for number, (payload, plan, header) in enumerate(checked):
            try:
                parts.append(self.part(payload, plan, header, kernels))
            except ValueError as error:
                raise PayloadError(f"payload {number}: body: {error}") from error
        try:
            return self.transform.sum(parts, total, kernels)
        except ValueError as error:
            raise PayloadError(f"body: {error}") from error

    def part(self, payload: Array, plan: Plan, header: Header, kernels: Kernels) -> Body:
        """Return the body of a payload; ValueError for corrupt positions."""
        if plan.layout is Layout.RAW:  # other ranks sent fewer values and are not RAW
            values = payload[plan.values_offset :]
            everywhere = positions.first_ones(plan.numel, plan.numel)
            return Body(everywhere, values, Float32().coding(header.scale))
        end = plan.header_nbytes + plan.positions.nbytes
        bitmap = positions.unpack(payload[plan.header_nbytes : end], plan.positions, kernels)
        return Body(bitmap, payload[plan.values_offset :], self.coding(header.scale, header.grid))


def _write_body(payload: Array, plan: Plan, bitmap: Array, codes: Array, kernels: Kernels) -> None:
    """Write the positions of the bitmap's ones, and the packed codes of the values there."""
    packed = positions.pack(bitmap, plan.positions, kernels)
    payload[plan.header_nbytes : plan.header_nbytes + plan.positions.nbytes] = packed
    payload[plan.values_offset :] = codes


@functools.lru_cache(64)
def _at_loss_scale(codec: Codec, scale: float) -> Codec:
    """Return the scaled codec, cached: its fingerprint costs more than encoding a small tensor."""
    assert not isinstance(codec.sparsifier, TopK)
    return replace(codec, sparsifier=codec.sparsifier.scaled(scale))
