"""Messages of payloads on the host: one payload for each tensor of a bucket, at aligned offsets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from horovod_fftcomp import wire
from horovod_fftcomp.codec.backend import cpu_kernels
from horovod_fftcomp.codec.base import aligned
from horovod_fftcomp.codec.sparse import Codec
from horovod_fftcomp.errors import PayloadError
from horovod_fftcomp.kernels import threads
from horovod_fftcomp.kernels.ops import AnyCodec, Codecs
from horovod_fftcomp.types import Array, Body, Tensor, Tensors
from horovod_fftcomp.wire.header import Header


def joined(payloads: Sequence[Array]) -> Array:
    """Return the payloads in one message, each at an aligned offset."""
    ends = np.cumsum([wire.align(payload.size) for payload in payloads])
    message = cpu_kernels().empty(int(ends[-1]), np.uint8)
    for payload, end in zip(payloads, ends, strict=True):
        begin = end - wire.align(payload.size)
        message[begin : begin + payload.size] = payload
        message[begin + payload.size : end] = 0
    return message


class TensorSum(NamedTuple):
    """Sum of a tensor's payloads, flat float32, their scales, and whether all is finite."""

    total: Array
    scales: Sequence[float]
    finite: bool


class BucketSum(NamedTuple):
    """The same of all tensors of a bucket; ``finite``: of all."""

    totals: list[Array]
    scales: list[Sequence[float]]
    finite: bool


def sum_of(
    codec: AnyCodec,
    tensor: Tensor,
    payloads: Sequence[Array],
    headers: Sequence[Header],
) -> TensorSum:
    """Decode a tensor's payloads, one of each rank, and sum them; PayloadError if corrupt."""
    try:
        for header in headers:
            if header.shape != tensor.shape:
                raise PayloadError(
                    f"header field 'shape' is {header.shape}, expected {tensor.shape}"
                )
        total = codec.decode_sum(payloads, headers=headers).reshape(-1)
    except PayloadError as error:
        raise PayloadError(f"tensor {tensor.name!r}: {error} (payload = rank)") from error
    finite = all(header.finite for header in headers)
    if finite and codec.may_overflow(headers):
        finite = bool(np.isfinite(total).all())
    return TensorSum(total, [header.scale for header in headers], finite)


def summed(codecs: Codecs, tensors: Tensors, gathered: Array, world_size: int) -> BucketSum:
    """Decode all ranks' messages and sum them; PayloadError if they are not of these codecs."""
    payloads = list(wire.split_payloads(gathered))
    expected = world_size * len(tensors)
    if len(payloads) != expected:
        raise PayloadError(f"{len(payloads)} payloads arrived, {expected} were expected")

    def work(number: int) -> TensorSum:
        headers, bodies = zip(*payloads[number :: len(tensors)], strict=True)
        return sum_of(codecs[number], tensors[number], bodies, headers)

    sums = threads.each(work, [(number,) for number in range(len(tensors))])
    finite = all(one.finite for one in sums)
    return BucketSum([one.total for one in sums], [one.scales for one in sums], finite)


def part_of(codec: Codec, tensor: Tensor, header: Header, payload: Array) -> Body | None:
    """Return a payload's values, float32, and their positions; None if it is not finite.

    ``codec``: one that sends values in float32. PayloadError for a payload that it did not write.
    """
    cpu = cpu_kernels()
    try:
        if header.shape != tensor.shape:
            raise PayloadError(f"header field 'shape' is {header.shape}, expected {tensor.shape}")
        plan = codec.checked_plan(payload, header)
        if not header.finite:
            return None
        part = codec.part(aligned(payload), plan, header, cpu)
        if cpu.max_abs_bits(part.packed.view(np.float32)) > part.coding.largest:
            raise PayloadError("body: a value lies beyond the scale")
    except (PayloadError, ValueError) as error:
        raise PayloadError(f"tensor {tensor.name!r}: {error}") from error
    return part
