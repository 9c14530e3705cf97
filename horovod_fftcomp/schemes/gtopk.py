"""The global k largest of all ranks' k largest, found by a tree of merges (Shi et al. 2019)."""

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
    energy_of,
)
from horovod_fftcomp.schemes.allgather import part_of, rooms_for
from horovod_fftcomp.schemes.allgather_on_device import serves
from horovod_fftcomp.schemes.gtopk_on_device import gtopk_on_device
from horovod_fftcomp.types import Array
from horovod_fftcomp.wire.header import Header
from horovod_fftcomp.wire.positions import Layout


class Entries(NamedTuple):
    """Elements of a tensor: ``places``, int64, ascending; ``values``, float32."""

    places: Array
    values: Array


def merge(a: Entries, b: Entries, k: int) -> Entries:
    """Return the ``k`` largest in magnitude of the sum of both; ties: the lower place."""
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
    """Return where the ``k`` largest magnitudes are, int64, ascending; ties: the lower place."""
    kernels = load_backend("cpu")
    ranked = kernels.topk_threshold(values, k, 1)
    bitmap, _ = kernels.select_quantize_pack(ranked, 1, Float32().coding(0.0), False)
    return kernels.positions_of(bitmap)[:k]


def merge_all(lists: Sequence[Entries], k: int) -> Entries:
    """Return what a tree of merges leaves: neighbours first, then their results, and so on."""
    while len(lists) > 1:
        merged = [merge(a, b, k) for a, b in zip(lists[::2], lists[1::2], strict=False)]
        lists = merged + list(lists[len(merged) * 2 :])
    return lists[0]


class _Own(NamedTuple):
    """What a rank would send of a tensor, all of it, and whether that is finite."""

    whole: Array | None
    finite: bool


@dataclass(frozen=True)
class GTopK(Scheme):
    """Sum the same k elements on all ranks: the largest of a tree of merged Top-k lists.

    A list is a payload of Top-k with float32 values. Lists decide where, and a sum over all ranks
    brings the values there: nothing that a merge drops is lost. Each rank merges all lists, which a
    network of gathers brings to all. A tensor that a list would not make smaller is all of
    its list.

    Differs from Shi et al.: there an entry that one merge drops while another branch brings its
    place on is neither summed nor carried on; any number of ranks will do.
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
        if context.device is not None:
            return (yield from gtopk_on_device(self, tensors, grads, carried, context))
        numels = [math.prod(tensor.shape) for tensor in tensors]
        message, rooms = rooms_for([self.codec] * len(tensors), tensors)
        assert message is not None
        own = [
            self._list(tensor, grad, carried, room)
            for tensor, grad, room in zip(tensors, grads, rooms, strict=True)
        ]
        gathered = yield Round("allgather", message)
        chosen = self.chosen(tensors, gathered, context.world_size)
        ends = np.cumsum([places.size for places, _ in chosen])
        values = _at(own, chosen, ends)
        reduced = np.split((yield Round("allreduce", values)), ends[:-1])
        sums, finite = self._scattered(numels, chosen, reduced)
        measures = context.step % MEASURE_EVERY == 0 and finite
        residuals, energies = dict(carried), {}
        for tensor, grad, (whole, _), (places, _) in zip(tensors, grads, own, chosen, strict=True):
            if whole is not None and grad is not None:
                wanted = energy_of(whole) if measures else 0.0
                whole[places] = 0
                residuals[tensor.name] = whole
                if measures:
                    energies[tensor.name] = Energy(energy_of(grad), wanted, energy_of(whole))
        kept = {"residual": residuals} if self.error_feedback else {}
        return Outcome(sums, kept, finite, energies)

    @functools.cached_property
    def codec(self) -> Codec:
        """That of a list."""
        return Codec(Identity(), TopK(self.density), Float32())

    def runs_on_device(self, tensors: Sequence[Tensor]) -> bool:
        """Tell whether a GPU can compute this step's exchange; see ``Scheme``."""
        return serves(self.codec, tensors)

    def _list(
        self, tensor: Tensor, grad: Array | None, carried: Mapping[str, Array], room: Array | None
    ) -> _Own:
        """Write a tensor's list to the front of ``room``."""
        kernels, shape, plan = load_backend("cpu"), tensor.shape, self.codec.plan(tensor.shape)
        values = np.zeros(plan.numel, np.float32) if grad is None else grad
        residual = None if grad is None else carried.get(tensor.name)
        check_state("residual", residual, (np.dtype(np.float32), plan.numel))
        everything = plan.layout in (Layout.RAW, Layout.ALL)
        coeffs = kernels.add_residual(
            values, residual, 0 if everything else plan.k
        )  # always a new array
        self.codec.encode_coeffs(coeffs, shape, kernels=kernels, keep_residual=False, out=room)
        finite = coeffs.peak <= LARGEST_FINITE_BITS
        return _Own(None if grad is None else coeffs.array, finite)

    def chosen(self, tensors: Sequence[Tensor], gathered: Array, n_ranks: int) -> list[Entries]:
        """Return what a tree of merges leaves of each tensor's lists in the messages of all ranks.

        NaN at any places if one of a tensor's lists is not finite.
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
        """Return (the sums at the chosen places; whether everything is finite)."""
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
        """Return the bytes that a rank hands to collectives for ``tensor`` in each step."""
        plan = self.codec.plan(tensor.shape)
        return wire.align(plan.payload_nbytes) + 4 * plan.k


def _at(own: Sequence[_Own], chosen: Sequence[Entries], ends: Array) -> Array:
    """Return the values that a rank has at the chosen places of all tensors."""
    values = load_backend("cpu").empty(int(ends[-1]))
    shares = np.split(values, ends[:-1])
    for (whole, finite), (places, _), share in zip(own, chosen, shares, strict=True):
        if whole is None:
            share.fill(0)
        else:
            share[:] = whole[places] if finite else np.nan
    return values
