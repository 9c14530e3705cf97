"""Global top-k: the k largest after merging all ranks' top-k lists in a tree (Shi et al. 2019)."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from horovod_fftcomp import wire
from horovod_fftcomp.codec.backend import load_backend
from horovod_fftcomp.codec.base import check_state
from horovod_fftcomp.codec.quantizers import LARGEST_FINITE_BITS, Float32
from horovod_fftcomp.codec.sparse import Codec
from horovod_fftcomp.codec.sparsifiers import TopK
from horovod_fftcomp.codec.transforms import Identity
from horovod_fftcomp.errors import PayloadError
from horovod_fftcomp.kernels.host.payloads import outputs_for, part_of
from horovod_fftcomp.kernels.ops import Flags, energy_of
from horovod_fftcomp.schemes import (
    MEASURE_EVERY,
    Context,
    Energy,
    Exchange,
    Grads,
    OldState,
    Outcome,
    Round,
    Scheme,
    Tensor,
    measured_on_host,
)
from horovod_fftcomp.types import Array
from horovod_fftcomp.wire.header import Header
from horovod_fftcomp.wire.positions import Layout


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
    kernels = load_backend("cpu")
    ranked = kernels.topk_threshold(values, k, 1)
    bitmap, _ = kernels.select_quantize_pack(ranked, 1, Float32().coding(0.0), False)
    return kernels.positions_of(bitmap)[:k]


def merge_all(lists: Sequence[Entries], k: int) -> Entries:
    """Return the lists merged in a binary tree: neighbours first, then their results."""
    while len(lists) > 1:
        merged = [merge(a, b, k) for a, b in zip(lists[::2], lists[1::2], strict=False)]
        lists = merged + list(lists[len(merged) * 2 :])
    return lists[0]


class _Local(NamedTuple):
    """A rank's gradient plus residual of one tensor (None if frozen), and whether it is finite."""

    whole: Array | None
    finite: bool


@dataclass(frozen=True)
class GTopK(Scheme):
    """Allreduce of the values at k common positions: the top-k of all ranks' merged top-k lists.

    A list is a top-k payload with float32 values. The lists are allgathered, and each rank merges
    them all. They only select the positions; the values there are then summed over all ranks, so
    that no value dropped by a merge is lost. If a list would not be smaller than the tensor, it
    holds the whole tensor.

    Differs from Shi et al.: there an entry that one merge drops, while another branch keeps its
    position, is neither summed nor kept in the residual. The number of ranks is arbitrary here.
    """

    spec_name = "GTopK"
    density: float
    error_feedback: bool = True
    rounds = ("allgather", "allreduce")

    def __post_init__(self) -> None:
        object.__setattr__(self, "density", TopK(self.density).density)

    def exchange(
        self, tensors: Sequence[Tensor], grads: Grads, state: OldState, context: Context
    ) -> Exchange:
        """Sum ``grads`` over all ranks; see ``Scheme.exchange``."""
        carried = state.get("residual", {}) if self.error_feedback else {}
        numels = [math.prod(tensor.shape) for tensor in tensors]
        message, outs = outputs_for([self.codec] * len(tensors), tensors)
        assert message is not None
        local = [
            self._list(tensor, grad, carried, out)
            for tensor, grad, out in zip(tensors, grads, outs, strict=True)
        ]
        gathered = yield Round("allgather", message)
        chosen = self._chosen(tensors, gathered, context.world_size)
        ends = np.cumsum([places.size for places, _ in chosen])
        values = _at(local, chosen, ends)
        reduced = np.split((yield Round("allreduce", values)), ends[:-1])
        sums, finite = self._scattered(numels, chosen, reduced)
        measures = context.step % MEASURE_EVERY == 0 and finite
        residuals, energies = dict(carried), {}
        for tensor, grad, (whole, _), (places, _) in zip(
            tensors, grads, local, chosen, strict=True
        ):
            if whole is not None and grad is not None:
                wanted = energy_of(whole) if measures else 0.0
                whole[places] = 0
                residuals[tensor.name] = whole
                if measures:
                    energies[tensor.name] = Energy(energy_of(grad), wanted, energy_of(whole))
        kept = {"residual": residuals} if self.error_feedback else {}
        return Outcome(sums, kept, Flags(finite), measured_on_host(energies))

    @functools.cached_property
    def codec(self) -> Codec:
        """Codec of the top-k lists."""
        return Codec(Identity(), TopK(self.density), Float32())

    def _list(
        self, tensor: Tensor, grad: Array | None, carried: Mapping[str, Array], out: Array | None
    ) -> _Local:
        """Write a tensor's list to the beginning of ``out``."""
        kernels, shape, plan = load_backend("cpu"), tensor.shape, self.codec.plan(tensor.shape)
        values = np.zeros(plan.numel, np.float32) if grad is None else grad
        residual = None if grad is None else carried.get(tensor.name)
        check_state("residual", residual, (np.dtype(np.float32), plan.numel))
        everything = plan.layout in (Layout.RAW, Layout.ALL)
        coeffs = kernels.add_residual(
            values, residual, 0 if everything else plan.k
        )  # always a new array
        self.codec.encode_coeffs(coeffs, shape, kernels=kernels, keep_residual=False, out=out)
        finite = coeffs.peak <= LARGEST_FINITE_BITS
        return _Local(None if grad is None else coeffs.array, finite)

    def _chosen(self, tensors: Sequence[Tensor], gathered: Array, n_ranks: int) -> list[Entries]:
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
            places = load_backend("cpu").positions_of(part.bitmap)
            entries.append(Entries(places, part.packed.view(np.float32)))
        return merge_all(entries, k)

    def _scattered(
        self, numels: Sequence[int], chosen: Sequence[Entries], reduced: Sequence[Array]
    ) -> tuple[list[Array], bool]:
        """Return (the sums at the chosen indices, whether everything is finite)."""
        kernels, sums, all_finite = load_backend("cpu"), [], True
        for n, (places, listed), values in zip(numels, chosen, reduced, strict=True):
            total = kernels.empty(n)
            bad = kernels.max_abs_bits(values) > LARGEST_FINITE_BITS or np.isnan(listed).any()
            total.fill(np.nan if bad else 0)
            if not bad:
                total[places] = values
            all_finite = all_finite and not bad
            sums.append(total)
        return sums, all_finite

    def sent_nbytes(self, tensor: Tensor) -> int:
        """Return the bytes of ``tensor`` that a rank sends to collectives in each step."""
        plan = self.codec.plan(tensor.shape)
        return wire.align(plan.payload_nbytes) + 4 * plan.k


def _at(local: Sequence[_Local], chosen: Sequence[Entries], ends: Array) -> Array:
    """Return a rank's values at the chosen indices of all tensors."""
    values = load_backend("cpu").empty(int(ends[-1]))
    slices = np.split(values, ends[:-1])
    for (whole, finite), (places, _), out in zip(local, chosen, slices, strict=True):
        if whole is None:
            out.fill(0)
        else:
            out[:] = whole[places] if finite else np.nan
    return values
