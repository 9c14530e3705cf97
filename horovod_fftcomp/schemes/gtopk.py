"""Global top-k: the k largest after merging all ranks' top-k lists in a tree (Shi et al. 2019)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from horovod_fftcomp import wire
from horovod_fftcomp.codec.backend import cpu_kernels
from horovod_fftcomp.codec.quantizers import Float32
from horovod_fftcomp.codec.sparse import Codec
from horovod_fftcomp.codec.sparsifiers import TopK
from horovod_fftcomp.codec.transforms import Identity
from horovod_fftcomp.errors import PayloadError
from horovod_fftcomp.kernels.host.payloads import part_of
from horovod_fftcomp.kernels.ops import Feedback, Flags, Ops
from horovod_fftcomp.kernels.plans import BucketPlan, split
from horovod_fftcomp.schemes import Context, Exchange, Grads, Outcome, Round, received
from horovod_fftcomp.schemes.meter import Meter
from horovod_fftcomp.schemes.state import LowPass, low_passed, new_state
from horovod_fftcomp.types import Array, OldState, Tensor, Tensors
from horovod_fftcomp.wire.header import Header


class Entries(NamedTuple):
    """Sparse elements of a tensor: ``places`` (indices), int64, ascending; ``values``, float32."""

    places: Array
    values: Array


def merge(a: Entries, b: Entries, k: int) -> Entries:
    """Return the ``k`` largest in magnitude of the sum of both; of ties the lower index."""
    places = np.concatenate([a.places, b.places])
    order = np.argsort(places, kind="stable")
    places, values = places[order], np.concatenate([a.values, b.values])[order]
    again = np.flatnonzero(places[1:] == places[:-1])  # twice at the most
    with np.errstate(over="ignore", invalid="ignore"):
        values[again] += values[again + 1]
    places, values = np.delete(places, again + 1), np.delete(values, again + 1)
    chosen = largest(values, min(k, places.size))
    return Entries(places[chosen], values[chosen])


def largest(values: Array, k: int) -> Array:
    """Return the indices of the ``k`` largest magnitudes, int64, ascending; of ties the lower."""
    kernels = cpu_kernels()
    ranked = kernels.topk_threshold(values, k, 1)
    bitmap, _ = kernels.select_quantize_pack(ranked, 1, Float32().coding(0.0), False)
    return kernels.positions_of(bitmap)[:k]


def merge_all(lists: Sequence[Entries], k: int) -> Entries:
    """Return the lists merged in a binary tree: neighbours first, then their results."""
    while len(lists) > 1:
        merged = [merge(a, b, k) for a, b in zip(lists[::2], lists[1::2], strict=False)]
        lists = merged + list(lists[len(merged) * 2 :])
    return lists[0]


@dataclass(frozen=True)
class TopKLists(LowPass):
    """Base of schemes that gather a top-k payload of each tensor, with float32 values.

    ``density``: of these payloads.
    """

    density: float = 0.01
    error_feedback: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "density", TopK(self.density).density)

    @functools.cached_property
    def codec(self) -> Codec:
        """Codec of a rank's own payloads."""
        return Codec(Identity(), TopK(self.density), Float32())


@dataclass(frozen=True)
class GTopK(TopKLists):
    """Allreduce of the values at k common positions: the top-k of all ranks' merged top-k lists.

    A list is a top-k payload with float32 values. The lists are allgathered, and each rank merges
    them all. They only select the positions; the values there are then summed over all ranks, so
    that no value dropped by a merge is lost. If a list would not be smaller than the tensor, it
    holds the whole tensor.

    Differs from Shi et al.: there an entry that one merge drops, while another branch keeps its
    position, is neither summed nor kept in the residual. The number of ranks is arbitrary here.
    """

    spec_name = "GTopK"
    rounds = ("allgather", "allreduce")

    def exchange(
        self, tensors: Tensors, grads: Grads, state: OldState, context: Context
    ) -> Exchange:
        """Sum ``grads`` over all ranks; see ``Scheme.exchange``."""
        ops, meter, old = context.ops, Meter(context, tensors), state if self.error_feedback else {}
        coder = ops.coder([self.codec] * len(tensors), tensors, context.world_size)
        at, feedback = (context.step, context.rank), Feedback(keeps_sent=True)
        encoded = coder.encode(grads, old, at, feedback, False)
        gathered = yield Round("allgather", encoded.message)
        chosen = self._chosen(tensors, gathered, context.world_size)
        whole, offsets = encoded.residuals, BucketPlan([len(own.places) for own in chosen]).offsets
        message = ops.zeros(offsets[-1])
        own_lists = wire.split_payloads(encoded.message)
        for array, (header, _), (places, _), share in zip(
            whole, own_lists, chosen, split(message, offsets), strict=True
        ):
            if array is not None:
                share[:] = array[places] if header.finite else np.nan
        reduced = split((yield Round("allreduce", message)), offsets)
        sums, finite = self._scattered(ops, tensors, chosen, reduced)
        meter.before(grads, whole)
        left = [
            None if array is None else _without(array, places)
            for array, (places, _) in zip(whole, chosen, strict=True)
        ]
        meter.after(left)
        left = low_passed(ops, tensors, old, left, self.beta)
        new = new_state(tensors, grads, old, {"residual": left} if self.error_feedback else {})
        return Outcome(sums, new, Flags(finite), meter.measured())

    def _chosen(self, tensors: Tensors, gathered: Array, n_ranks: int) -> list[Entries]:
        """Return each tensor's merged list from the gathered messages of all ranks.

        Its values are NaN, at arbitrary indices, if one of a tensor's lists is not finite.
        """
        payloads, count = list(wire.split_payloads(gathered)), len(tensors)
        if len(payloads) != n_ranks * count:
            raise PayloadError(f"{len(payloads)} lists arrived, {n_ranks * count} were expected")
        return [
            self._merged(tensor, payloads[number::count]) for number, tensor in enumerate(tensors)
        ]

    def _merged(self, tensor: Tensor, lists: Sequence[tuple[Header, Array]]) -> Entries:
        k, entries = self.codec.plan(tensor.shape).k, []
        for header, payload in lists:
            part = part_of(self.codec, tensor, header, payload)
            if part is None:
                return Entries(np.arange(k), np.full(k, np.nan, np.float32))
            places = cpu_kernels().positions_of(part.bitmap)
            entries.append(Entries(places, part.packed.view(np.float32)))
        return merge_all(entries, k)

    def _scattered(
        self, ops: Ops, tensors: Tensors, chosen: Sequence[Entries], reduced: Sequence[Array]
    ) -> tuple[list[Array], bool]:
        """Return (the sums, NaN if they are not finite; whether all are finite)."""
        sums, all_finite = [], True
        for tensor, (places, listed), values in zip(tensors, chosen, reduced, strict=True):
            total = ops.zeros(tensor.numel)
            finite = ops.flags_of(values).finite and not np.isnan(listed).any()
            if finite:
                total[places] = values
            else:
                total.fill(np.nan)
            all_finite = all_finite and finite
            sums.append(total)
        return sums, all_finite

    def sent_nbytes(self, tensor: Tensor) -> int:
        """Return the bytes of ``tensor`` that a rank sends to collectives in each step."""
        plan = self.codec.plan(tensor.shape)
        return wire.align(plan.payload_nbytes) + 4 * plan.k

    def received_nbytes(self, tensor: Tensor, world_size: int) -> float:
        """Return the bytes of ``tensor`` that a rank receives from others; see ``Scheme``."""
        values = 4 * self.codec.plan(tensor.shape).k
        lists = received("allgather", self.sent_nbytes(tensor) - values, world_size)
        return lists + received("allreduce", values, world_size)


def _without(array: Array, places: Array) -> Array:
    """Return ``array`` with zeros at ``places``; one that is sent completely is not written to."""
    if places.size == array.size:  # it may be the gradient itself
        return np.zeros_like(array)
    array[places] = 0
    return array
