"""Encoder of a bucket on the device: all of its tensors into one message."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from horovod_fftcomp import wire
from horovod_fftcomp.codec.dense import DenseCodec
from horovod_fftcomp.codec.methods.dither import Dither
from horovod_fftcomp.codec.quantizers import LARGEST_FINITE_BITS
from horovod_fftcomp.codec.sparse import Codec
from horovod_fftcomp.codec.sparsifiers import Threshold
from horovod_fftcomp.kernels.cuda import Device, source, structs
from horovod_fftcomp.kernels.cuda.coded import CodedGroup
from horovod_fftcomp.kernels.cuda.dense import ElementGroup
from horovod_fftcomp.kernels.cuda.sparse import CountedGroup, TopKGroup
from horovod_fftcomp.kernels.cuda.structs import GroupPlan
from horovod_fftcomp.kernels.cuda.tile_group import Sums, TileGroup
from horovod_fftcomp.kernels.ops import Codecs
from horovod_fftcomp.types import Array, Arrays, Shape
from horovod_fftcomp.wire.header import header_and_changes
from horovod_fftcomp.wire.positions import Layout


class DeviceMessage(NamedTuple):
    """Result of ``Encoder.encode``; arrays are on the device.

    ``message``: uint8. ``not_finite``: for each tensor 1 if it is not finite, uint32.
    ``squares``: with ``measure``, a function that waits for the device and returns for each tensor,
    by its number, the sums of squares of the gradient, of gradient plus residual, and of the new
    residual. ``left``: under a threshold, a function that
    waits and returns the sum of squares of all new residuals.
    """

    message: Any
    not_finite: Any
    squares: Callable[[], dict[int, tuple[float, float, float]]] | None
    left: Callable[[], float] | None


class Velocities(NamedTuple):
    """Momentum applied to gradients before they are encoded, for codecs without a transform.

    Arithmetic: ``momentum_accumulate`` of ``kernels.cpu``. ``old``: velocities, None for zeros.
    ``new``: arrays for the new velocities, None for a tensor without momentum in this step.
    ``factors``: addresses of factors of the gradients, uint64, 0 for none. ``masking``: new
    velocities become 0 where an element is sent, unless all of the tensor is.
    """

    old: Arrays
    new: Sequence[Any]
    factors: Array | int
    momentum: float
    nesterov: bool
    masking: bool


class Encoder:
    """Encodes the tensors of a bucket into one message, each by its codec.

    Codecs are all ``Codec``, with adaptive sparsifiers of one kind if any, or all ``DenseCodec``.

    ``message_nbytes``: of all payloads, each at a multiple of 16; ``offsets``: of the payloads.
    ``coeffs_formats``: (dtype, elements) of each tensor's coefficients; None for a RAW tensor,
    which has no residual. Codecs with sizes that depend on the values are not mixed with others:
    sizes are then those of the last message, and each ``encode`` waits for the device to count
    the elements to send.
    """

    def __init__(self, device: Device, codecs: Codecs, shapes: Sequence[Shape]) -> None:
        self._device, self._codecs, self._shapes = device, codecs, shapes
        self._counts = not all(codec.has_fixed_size for codec in codecs)
        self._of_elements = all(isinstance(codec, DenseCodec) for codec in codecs)
        plans = [codec.plan(shape, 0) for codec, shape in zip(codecs, shapes, strict=True)]
        self.coeffs_formats = [
            None if plan.layout is Layout.RAW else codec.coeffs_format(shape)
            for plan, codec, shape in zip(plans, codecs, shapes, strict=True)
        ]
        self.rows = np.zeros(len(plans), structs.TENSOR)
        for row, plan, codec in zip(self.rows, plans, codecs, strict=True):
            structs.enter_plan(row, plan, codec)
            row["bins_per_block"] = codec.transform.bins_per_block
            if isinstance(codec, Codec) and isinstance(codec.sparsifier, Threshold):
                row["threshold"] = np.float32(codec.sparsifier.value).view(np.uint32)
        self._gains = [structs.gain_of_squares(codec.transform) for codec in codecs]
        groups = structs.grouped(plans, codecs, self.rows)
        self._groups = [self._group(group, plans) for group in groups]
        names = {name for group in self._groups for name in group.names}
        names.add("write_header")
        self._kernels = device.functions(source(), sorted(names))
        self._found = device.zeros(max(1, len(plans) * structs.FOUND_NBYTES), np.uint8)
        self._headers = np.zeros(len(plans), structs.HEADER)
        self._uploads = structs.Uploads(device)
        self._lay_out(plans)
        if not self._counts:
            pairs = zip(plans, codecs, strict=True)
            tables = [header_and_changes(plan, codec.fingerprint) for plan, codec in pairs]
            self._kept = [[device.upload(part) for part in pair] for pair in tables]
            for row, pair in zip(self._headers, self._kept, strict=True):
                row["start"], row["crc_of_values"] = map(device.address, pair)

    def _group(self, group: GroupPlan, plans: Sequence[wire.Plan]) -> TileGroup:
        if group.transform is None:
            return TileGroup(self._device, group)
        if self._of_elements:
            codecs = [codec for codec in self._codecs if isinstance(codec, DenseCodec)]
            is_coded = isinstance(codecs[0].method, Dither)
            kind = CodedGroup if is_coded else ElementGroup
            return kind(self._device, group, plans, codecs)
        if self._counts:
            return CountedGroup(self._device, group, plans, self._codecs, self.rows)
        return TopKGroup(self._device, group)

    def _lay_out(self, plans: Sequence[wire.Plan]) -> None:
        """Enter the sizes of payloads and their offsets in a message."""
        nbytes = [wire.align(plan.payload_nbytes) for plan in plans]
        self.offsets = (np.cumsum([0, *nbytes])[:-1]).tolist()
        self.message_nbytes = sum(nbytes)
        for row, plan, codec in zip(self.rows, plans, self._codecs, strict=True):
            structs.enter_plan(row, plan, codec)
        self._headers["nbytes"] = [plan.header_nbytes for plan in plans]

    def encode(
        self,
        grads: Arrays,
        residuals: Arrays,
        coeffs: Arrays,
        measure: bool = False,
        keys: Sequence[int] | None = None,
        velocities: Velocities | None = None,
        decay: float = 1.0,
        keeps_sent: bool = False,
    ) -> DeviceMessage:
        """Launch the encoding of gradients into a message.

        ``grads``: float32. ``residuals``: coefficients to add, or None. ``coeffs``: arrays that
        become the new residuals, or None to discard them: gradient plus residual less what is
        sent. For a tensor that is not finite they, and its payload's body, are meaningless.
        ``measure``: sum the squares of the tensors with new residuals. ``keys``: 64-bit keys of
        random numbers; see ``DenseCodec.key_at``. ``decay`` multiplies the residuals. With
        ``keeps_sent``, for sign methods only, nothing is subtracted.
        """
        self.rows["decay"] = np.float32(decay).view(np.uint32)
        self._keep = structs.EVERYTHING if keeps_sent else structs.UNSENT
        if keys is not None:
            self.rows["key"] = keys
        self._enter_velocities(velocities)
        try:
            return self._encode(self._point_at(grads, residuals, coeffs), measure)
        except BaseException:  # e.g. out of memory: the next encoding needs its scratch cleared
            self._device.clear(self._found)
            raise

    def _enter_velocities(self, velocities: Velocities | None) -> None:
        """Enter the addresses of velocities and the options of the momentum."""
        if velocities is None:
            self.rows["moved"] = 0
            return
        self.rows["momentum"] = np.float32(velocities.momentum).view(np.uint32)
        for row, old, new in zip(self.rows, velocities.old, velocities.new, strict=True):
            row["velocity"] = 0 if old is None else self._device.address(old)
            row["moved"] = 0 if new is None else self._device.address(new)
            masks = velocities.masking and row["layout"] != Layout.ALL
            row["how"] = structs.NESTEROV * velocities.nesterov + structs.MASKING * masks
        self.rows["factor"] = velocities.factors

    def _encode(self, scratch: list[Any], measure: bool) -> DeviceMessage:
        device, kernels, found = self._device, self._kernels, self._found
        totals = device.zeros(max(1, 2 * len(self.rows)), np.uint32) if self._counts else None
        message = None if self._counts else self._new_message()
        rows = self._uploads.of("tensors", self.rows)
        before = [group.choose(kernels, rows, found, measure, totals) for group in self._groups]
        starts = None  # kept, as all scratch, until all is launched; the stream keeps the order
        if message is None:
            starts = self._count(device.fetch(totals)().view(np.uint32))
            message = self._new_message()
            rows = self._uploads.of("tensors", self.rows)
        sums = [
            group.write(kernels, rows, found, squares)
            for group, squares in zip(self._groups, before, strict=True)
        ]
        not_finite = device.zeros(max(1, len(self.rows)), np.uint32)
        if len(self.rows):
            headers = self._uploads.of("headers", self._headers)
            kernels["write_header"](len(self.rows), 32, [headers, found, not_finite], 0)
        del scratch, starts
        measured = (self.rows["keep"] != 0) & (self.rows["layout"] != Layout.RAW)
        squares = partial(self._squares, sums, measured) if measure else None
        left = None
        if any(group.always_measures for group in self._groups if isinstance(group, TopKGroup)):
            left = partial(_sum_of_last_rows, sums)
        return DeviceMessage(message, not_finite, squares, left)

    def _point_at(self, grads: Arrays, residuals: Arrays, coeffs: Arrays) -> list[Any]:
        """Enter the addresses of arrays; return those allocated for discarded coefficients."""
        device, scratch = self._device, []
        for number, (row, form) in enumerate(zip(self.rows, self.coeffs_formats, strict=True)):
            row["grad"] = device.address(grads[number])
            residual, kept = residuals[number], coeffs[number]
            row["residual"] = 0 if residual is None else device.address(residual)
            row["keep"] = structs.NOTHING if kept is None else self._keep
            if kept is None and form is not None and not self._of_elements:
                dtype, n = form
                kept = device.empty(max(1, n), dtype)
                scratch.append(kept)
            row["coeffs"] = 0 if kept is None else device.address(kept)
        return scratch

    def _new_message(self) -> Any:
        message = self._device.zeros(max(1, self.message_nbytes), np.uint8)
        self.rows["payload"] = self._device.address(message) + np.array(self.offsets, np.uint64)
        self._headers["payload"] = self.rows["payload"]
        return message

    def _count(self, totals: Array) -> Any:
        """Lay out a message from ``totals``; return its headers, on the device.

        ``totals``: for each tensor the number of elements sent and the peak's bits.
        """
        headers, plans = [], []
        for number, (codec, shape) in enumerate(zip(self._codecs, self._shapes, strict=True)):
            k, peak = totals[2 * number : 2 * number + 2]
            finite = bool(peak <= LARGEST_FINITE_BITS)
            plans.append(codec.plan(shape, int(k) if finite else 0))
            header = np.zeros(plans[-1].header_nbytes, np.uint8)
            scale = self._scale(number, float(peak.view(np.float32))) if finite else math.nan
            assert isinstance(codec, Codec)
            key = int(self.rows[number]["threshold"]) - 1
            options = scale, finite, codec.grid(plans[-1], key, int(peak)) if finite else 0
            wire.write_header(header, plans[-1], codec.fingerprint, "float32", *options)
            headers.append(header)
        self._lay_out(plans)
        starts = self._device.upload(np.concatenate(headers))
        ends = np.cumsum([0, *(header.size for header in headers)], dtype=np.uint64)
        self._headers["start"] = self._device.address(starts) + ends[:-1]
        return starts

    def _scale(self, number: int, peak: float) -> float:
        """Return the scale of a finite tensor, 0 for zeros; enter the coding that depends on it."""
        for group in self._groups:
            if isinstance(group, CountedGroup) and number in group.members and peak:
                scale, codec = group.scale(number, peak), self._codecs[number]
                if isinstance(codec, Codec) and codec.quantizer is None:
                    structs.enter_coding(self.rows[number], codec.coding(scale))
                return scale
        return peak

    def _squares(self, sums: Sequence[Sums], kept: Array) -> dict[int, tuple[float, float, float]]:
        """Return the squares of tensors with new residuals; see ``DeviceMessage``. Waits."""
        measured = {}
        for group, of_tiles in zip(self._groups, sums, strict=True):
            for number, squares in group.by_tensor(of_tiles()).items():
                if kept[number]:
                    gradient, compensated, residual = squares
                    gain = self._gains[number]
                    measured[number] = (gradient, gain * compensated, gain * residual)
        return measured


def _sum_of_last_rows(sums: Sequence[Sums]) -> float:
    return float(sum(of_tiles()[-1].sum() for of_tiles in sums))
