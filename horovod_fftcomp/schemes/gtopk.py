"""The global k largest of all ranks' k largest, found by a tree of merges (Shi et al. 2019)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from horovod_fftcomp import positions
from horovod_fftcomp.backends import Array, load_backend
from horovod_fftcomp.errors import PayloadError
from horovod_fftcomp.payloads import check_state
from horovod_fftcomp.positions import Positions
from horovod_fftcomp.quantizers import LARGEST_FINITE_BITS, Float32
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
from horovod_fftcomp.sparsifiers import TopK
from horovod_fftcomp.wire import align


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
    ranked = kernels.rank(values, k, 1)
    bitmap, _ = kernels.take(ranked, 1, Float32().coding(0.0), False)
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

    Lists decide where, and a sum over all ranks brings the values there: nothing that a merge drops
    is lost. Each rank merges all lists, which a network of gathers brings to all.

    Differs from Shi et al.: there an entry that one merge drops while another branch brings its
    place on is neither summed nor carried on; any number of ranks will do.
    """

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
        slots = np.cumsum([0, *(self._list_nbytes(n) for n in numels)])
        message = np.zeros(slots[-1], np.uint8)
        own = [
            self._list(tensor, grad, carried, message[begin:])
            for tensor, grad, begin in zip(tensors, grads, slots, strict=False)
        ]
        gathered = yield Round("allgather", message)
        if gathered.size != context.world_size * message.size:
            what = f"{gathered.size} bytes of lists arrived"
            raise PayloadError(f"{what}, {context.world_size * message.size} were expected")
        lists = gathered.reshape(context.world_size, message.size)
        chosen = [
            self._merged(tensor, lists[:, begin:])
            for tensor, begin in zip(tensors, slots, strict=False)
        ]
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

    def _layout(self, n: int) -> Positions:
        return positions.cheapest(n, TopK(self.density).count(n))

    def _list_nbytes(self, n: int) -> int:
        layout = self._layout(n)
        return align(layout.nbytes) + align(4 * layout.k)

    def _list(
        self, tensor: Tensor, grad: Array | None, carried: Mapping[str, Array], room: Array
    ) -> _Own:
        """Write a tensor's list to the front of ``room``."""
        kernels, n = load_backend("cpu"), math.prod(tensor.shape)
        layout, residual = self._layout(n), carried.get(tensor.name)
        check_state("residual", residual, (np.dtype(np.float32), n))
        bitmap, begin = positions.first_ones(n, layout.k), align(layout.nbytes)
        values = room[begin : begin + 4 * layout.k].view(np.float32)
        coeffs, finite = None, True
        if grad is not None:
            coeffs = kernels.add(grad, residual, layout.k)
            finite = coeffs.peak <= LARGEST_FINITE_BITS
            if finite:
                bitmap, packed = kernels.take(coeffs, 1, Float32().coding(0.0), False)
                values[:] = packed[: 4 * layout.k].view(np.float32)
            else:
                values[:] = np.nan
        room[: layout.nbytes] = positions.pack(bitmap, layout, kernels)
        return _Own(None if coeffs is None else coeffs.array, finite)

    def _merged(self, tensor: Tensor, lists: Array) -> Entries:
        """Return the entries that a tree of merges leaves of a tensor's lists, ``[ranks, bytes]``.

        All of them NaN if a rank's are.
        """
        kernels, n = load_backend("cpu"), math.prod(tensor.shape)
        layout = self._layout(n)
        begin, entries = align(layout.nbytes), []
        for rank, message in enumerate(lists):
            try:
                bitmap = positions.unpack(message[: layout.nbytes].copy(), layout, kernels)
            except ValueError as error:
                who = f"tensor {tensor.name!r}: rank {rank}'s positions"
                raise PayloadError(f"{who}: {error}") from error
            values = message[begin : begin + 4 * layout.k].copy().view(np.float32)
            entries.append(Entries(kernels.positions_of(bitmap), values))
        if any(kernels.peak_bits(part.values) > LARGEST_FINITE_BITS for part in entries):
            return Entries(entries[0].places, np.full(layout.k, np.nan, np.float32))
        return merge_all(entries, layout.k)

    def _scattered(
        self, numels: Sequence[int], chosen: Sequence[Entries], reduced: Sequence[Array]
    ) -> tuple[list[Array], bool]:
        """Return (the sums at the chosen places; whether everything is finite)."""
        kernels, sums, all_finite = load_backend("cpu"), [], True
        for n, (places, listed), values in zip(numels, chosen, reduced, strict=True):
            total = kernels.empty(n)
            bad = kernels.peak_bits(values) > LARGEST_FINITE_BITS or np.isnan(listed).any()
            total.fill(np.nan if bad else 0)
            if not bad:
                total[places] = values
            all_finite = all_finite and not bad
            sums.append(total)
        return sums, all_finite

    def sent_nbytes(self, tensor: Tensor) -> int:
        """Return the bytes that a rank hands to collectives for ``tensor`` in each step."""
        n = math.prod(tensor.shape)
        return self._list_nbytes(n) + 4 * self._layout(n).k


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
