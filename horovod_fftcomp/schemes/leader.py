"""Positions that one rank chooses for all of them and broadcasts packed; each step another rank.

Source: Chen et al., NeurIPS 2020 (ScaleCom), as cyclic local top-k.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from horovod_fftcomp import positions
from horovod_fftcomp.backends import Array, load_backend
from horovod_fftcomp.errors import PayloadError
from horovod_fftcomp.positions import Positions
from horovod_fftcomp.quantizers import LARGEST_FINITE_BITS, Float32
from horovod_fftcomp.schemes import MEASURE_EVERY, Context, Round, Similarity, Tensor
from horovod_fftcomp.sparsifiers import TopK
from horovod_fftcomp.wire import align

_LARGEST_CHUNK = 1 << 16


@dataclass(frozen=True)
class ChunkWinners(TopK):
    """The largest of each 1 / density consecutive elements: no threshold is searched for.

    Of equal magnitudes the lower index wins. The last chunk may be shorter and sends one as well.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunk > _LARGEST_CHUNK:
            raise ValueError(
                f"density={self.density!r} chooses one of {self.chunk} elements; at most "
                f'{_LARGEST_CHUNK} can be: give selector="exact" with it'
            )

    @property
    def chunk(self) -> int:
        """The elements of a chunk."""
        return round(1 / self.density)

    def count(self, n: int) -> int:
        """Return how many of ``n`` elements are chosen."""
        return -(-n // self.chunk)

    @property
    def _bits(self) -> int:
        return (self.chunk - 1).bit_length()

    def nbytes(self, n: int) -> int:
        """Return the bytes that these positions take."""
        return (self.count(n) * self._bits + 7) // 8

    def choose(self, grad: Array, residual: Array | None) -> Array:
        """Return the packed positions, uint8, of what is largest in ``grad + residual``.

        Legal positions, any, where there is NaN or Inf inside.
        """
        if self._bits == 0:
            return np.empty(0, np.uint8)
        kernels = load_backend("cpu")
        return kernels.pack_bits(kernels.chunk_winners(grad, residual, self.chunk), self._bits)

    def positions(self, packed: Array, n: int) -> Array:
        """Return the positions, int64, ascending; ValueError for bytes that are none."""
        found = np.arange(0, n, self.chunk, dtype=np.int64)
        if self._bits:
            found += load_backend("cpu").unpack_bits(packed, found.size, self._bits)
            ends = np.arange(1, found.size + 1) * self.chunk
            if (found >= np.minimum(ends, n)).any():
                raise ValueError("an offset lies beyond its chunk")
        return found


@dataclass(frozen=True)
class Largest(TopK):
    """The ``density`` share of all elements that is largest, as ``topk`` chooses it."""

    def nbytes(self, n: int) -> int:
        """Return the bytes that these positions take."""
        return self._layout(n).nbytes

    def _layout(self, n: int) -> Positions:
        return positions.cheapest(n, self.count(n))

    def choose(self, grad: Array, residual: Array | None) -> Array:
        """Return the packed positions, uint8, of what is largest in ``grad + residual``.

        Legal positions, any, where there is NaN or Inf inside.
        """
        kernels, k = load_backend("cpu"), self.count(grad.size)
        coeffs = kernels.add(grad, residual, k)
        if coeffs.peak > LARGEST_FINITE_BITS:
            bitmap = positions.first_ones(grad.size, k)
        else:
            bitmap, _ = kernels.take(coeffs, 1, Float32().coding(0.0), False)
        return positions.pack(bitmap, self._layout(grad.size), kernels)

    def positions(self, packed: Array, n: int) -> Array:
        """Return the positions, int64, ascending; ValueError for bytes that are none."""
        kernels = load_backend("cpu")
        return kernels.positions_of(positions.unpack(packed, self._layout(n), kernels))


Selector = ChunkWinners | Largest


class Choice(NamedTuple):
    """Positions of each tensor, and how many of them this rank would have chosen as well."""

    positions: list[Array]
    similarity: Similarity | None


def follow_the_leader(
    selector: Selector,
    tensors: Sequence[Tensor],
    grads: Sequence[Array | None],
    residuals: Mapping[str, Array],
    context: Context,
) -> Generator[Round, Array, Choice]:
    """Broadcast what the leader of this step chooses; the leader is rank step mod world size.

    When it is time to measure, every other rank chooses as well, to tell how similar its choice is.
    """
    measure = context.step % MEASURE_EVERY == 0
    leader = context.step % context.world_size
    numels = [math.prod(tensor.shape) for tensor in tensors]
    slots = np.cumsum([0] + [align(selector.nbytes(n)) for n in numels])
    own = np.zeros(slots[-1], np.uint8)
    leads = leader == context.rank
    if leads or measure:
        for tensor, grad, n, begin in zip(tensors, grads, numels, slots, strict=False):
            residual = residuals.get(tensor.name)
            if grad is None:  # frozen: it sends zeros, so any positions do
                grad, residual = np.zeros(n, np.float32), None
            own[begin : begin + selector.nbytes(n)] = selector.choose(grad, residual)
    chosen = yield Round("broadcast", own, leader)
    found = []
    for tensor, n, begin in zip(tensors, numels, slots, strict=False):
        try:
            found.append(selector.positions(chosen[begin : begin + selector.nbytes(n)], n))
        except ValueError as error:
            who = f"tensor {tensor.name!r}: rank {leader}'s positions"
            raise PayloadError(f"{who}: {error}") from error
    similarity = None
    if measure and not leads:
        ours = [
            selector.positions(own[begin : begin + selector.nbytes(n)], n)
            for n, begin in zip(numels, slots, strict=False)
        ]
        common = sum(np.intersect1d(*both, True).size for both in zip(ours, found, strict=True))
        similarity = Similarity(common, sum(part.size for part in found))
    return Choice(found, similarity)
