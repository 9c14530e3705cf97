"""SparCML: sparse allreduce by merging top-k payloads pairwise (Renggli et al., SC 2019)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from horovod_fftcomp import wire
from horovod_fftcomp.codec.backend import cpu_kernels
from horovod_fftcomp.codec.quantizers import LARGEST_FINITE_BITS, Float32
from horovod_fftcomp.codec.sparse import Codec
from horovod_fftcomp.codec.sparsifiers import LEAST_THRESHOLD, Threshold
from horovod_fftcomp.codec.transforms import Identity
from horovod_fftcomp.errors import PayloadError
from horovod_fftcomp.kernels.host.payloads import joined, part_of, summed
from horovod_fftcomp.kernels.ops import Feedback, Flags
from horovod_fftcomp.schemes import Context, Exchange, Grads, Outcome, Round
from horovod_fftcomp.schemes.allgather import Allgather
from horovod_fftcomp.schemes.gtopk import TopKLists
from horovod_fftcomp.schemes.meter import measured_by
from horovod_fftcomp.schemes.state import low_passed, new_state
from horovod_fftcomp.schemes.state_array import StateArrays
from horovod_fftcomp.types import Array, Body, OldState, Tensor, Tensors
from horovod_fftcomp.wire import positions
from horovod_fftcomp.wire.header import Header
from horovod_fftcomp.wire.positions import Layout

# The codec of sums of payloads: any number of values, or the dense tensor where that is smaller.
SUMS = Codec(Identity(), Threshold(LEAST_THRESHOLD), Float32())


def merge_all(messages: Sequence[Array], merge: Callable[[Array, Array], Array]) -> Array:
    """Return all ranks' messages merged into one, in the order of recursive doubling.

    Messages of ranks from the largest power of two on are first merged into those of the first
    ranks; then neighbours are merged, then their results, and so on.
    """
    pairs = 1 << (len(messages).bit_length() - 1)
    late = messages[pairs:]
    merged = [merge(a, b) for a, b in zip(messages, late, strict=False)]
    merged += messages[len(late) : pairs]
    while len(merged) > 1:
        merged = [merge(a, b) for a, b in zip(merged[::2], merged[1::2], strict=True)]
    return merged[0]


def merge(codec: Codec, tensors: Tensors, a: Array, b: Array) -> Array:
    """Return the message of the sum of two messages; the order of the two does not matter.

    A message has a payload for each of ``tensors``, made by ``codec`` or a sum of such. Raises
    PayloadError for bytes that are no such message.
    """
    mine, theirs = list(wire.split_payloads(a)), list(wire.split_payloads(b))
    for message in (mine, theirs):
        if len(message) != len(tensors):
            raise PayloadError(f"{len(message)} payloads arrived, {len(tensors)} were expected")
    return joined(
        [
            _sum(tensor.shape, *(part_of(_codec_of(codec, p[0]), tensor, *p) for p in (x, y)))
            for tensor, x, y in zip(tensors, mine, theirs, strict=True)
        ]
    )


def _codec_of(codec: Codec, header: Header) -> Codec:
    return SUMS if header.fingerprint == SUMS.fingerprint else codec


def _sum(shape: tuple[int, ...], a: Body | None, b: Body | None) -> Array:
    """Return the payload of the sum of two bodies; not finite if one of them is None."""
    kernels, n = cpu_kernels(), math.prod(shape)
    if a is None or b is None:
        return _payload(shape, positions.first_ones(n, 0), np.full(1, np.nan, np.float32))
    bitmap = a.bitmap | b.bitmap
    if SUMS.plan(shape, int(np.bitwise_count(bitmap).sum())).layout is Layout.RAW:
        return _payload(
            shape, positions.first_ones(n, n), kernels.sum_values([a, b], kernels.empty(n))
        )
    return _payload(shape, bitmap, kernels.sum_sparse(a, b))


def _payload(shape: tuple[int, ...], bitmap: Array, values: Array) -> Array:
    """Return the payload of float32 ``values`` at the positions of ``bitmap``."""
    kernels = cpu_kernels()
    peak = kernels.max_abs_bits(values)
    finite = peak <= LARGEST_FINITE_BITS
    plan = SUMS.plan(shape, values.size if finite else 0)
    payload = np.zeros(plan.payload_nbytes, np.uint8)
    if finite:
        packed = positions.pack(bitmap, plan.positions, kernels)
        payload[plan.header_nbytes : plan.header_nbytes + packed.size] = packed
        payload[plan.values_offset :] = values.view(np.uint8)
    scale = float(np.uint32(peak).view(np.float32)) if finite else math.nan
    wire.write_header(payload, plan, SUMS.fingerprint, "float32", scale, finite)
    return payload


@dataclass(frozen=True)
class SparCml(TopKLists):
    """Sum of all ranks' top-k payloads, merged pairwise in the order of recursive doubling.

    Selection, first payloads and residuals are those of top-k with float32 values. A network that
    can exchange in pairs (``mpi``) sends sums from then on: the union of both positions, or the
    dense tensor where that takes fewer bytes. Elsewhere payloads are allgathered and every rank
    merges them, with the same result to the last bit.

    Differs from Renggli et al.: positions are packed as in any payload (there 32 bits each), so
    that sums become dense later; the number of ranks need not be a power of two. A GPU allgathers
    and adds in rank order.
    """

    spec_name = "SparCml"
    rounds = ("allgather",)

    @property
    def _topk(self) -> Allgather:
        return Allgather(self.codec, self.error_feedback, beta=self.beta)

    def exchange(
        self, tensors: Tensors, grads: Grads, state: OldState, context: Context
    ) -> Exchange:
        """Sum ``grads`` over all ranks; see ``Scheme.exchange``."""
        if context.device is not None:
            return (yield from self._topk.exchange(tensors, grads, state, context))
        codec, feedback = self.codec, Feedback(self.error_feedback)
        coder = context.ops.coder([codec] * len(tensors), tensors, context.world_size)
        at = (context.step, context.rank)
        encoded = coder.encode(grads, state, at, feedback, context.measures)
        fold = partial(merge, codec, tensors)
        arrived = yield Round("allgather", encoded.message, merge=fold)
        if wire.read_header(arrived).fingerprint != SUMS.fingerprint:
            expected = context.world_size * encoded.message.size
            if arrived.size != expected:
                raise PayloadError(
                    f"{arrived.size} bytes of payloads arrived, {expected} were expected"
                )
            arrived = merge_all(np.split(arrived, context.world_size), fold)
        writers = [_codec_of(codec, header) for header, _ in wire.split_payloads(arrived)]
        sums, _, finite = summed(writers, tensors, arrived, 1)
        residuals = low_passed(context.ops, tensors, state, encoded.residuals, self.beta)
        new = {"residual": residuals} if self.error_feedback else {}
        kept = new_state(tensors, grads, state, new)
        return Outcome(sums, kept, Flags(finite), measured_by(tensors, encoded.squares))

    def runs_on_device(self, tensors: Tensors) -> bool:
        """Return whether a GPU can compute this step's exchange; see ``Scheme``."""
        return self._topk.runs_on_device(tensors)

    def sent_nbytes(self, tensor: Tensor) -> int:
        """Return the bytes of ``tensor`` that a rank sends to collectives in each step."""
        return self._topk.sent_nbytes(tensor)

    def state_arrays(self, tensor: Tensor, state: OldState) -> StateArrays:
        """Return the residual; see ``Scheme``."""
        return self._topk.state_arrays(tensor, state)
