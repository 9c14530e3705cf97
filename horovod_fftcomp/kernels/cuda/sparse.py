"""Sparse codecs on the device: launches that choose and write coefficients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np

from horovod_fftcomp.codec.adaptive import AdaComp, Adaptive, Strom, Wangni
from horovod_fftcomp.codec.quantizers import pattern_of
from horovod_fftcomp.codec.sparse import Codec
from horovod_fftcomp.codec.transforms import Transform
from horovod_fftcomp.kernels.cuda import Device, structs
from horovod_fftcomp.kernels.cuda.structs import THREADS, TILE, WORDS, GroupPlan
from horovod_fftcomp.kernels.cuda.tile_group import Sums, TileGroup
from horovod_fftcomp.kernels.ops import Codecs
from horovod_fftcomp.types import Array
from horovod_fftcomp.wire.header import Plan

# As in src/chosen.cuh.
_SELECTIONS = ("above", "winners", "drawn")
_ABOVE, _WINNERS, _DRAWN = range(3)


class TopKGroup(TileGroup):
    """Group of tensors with a fixed number of coefficients sent.

    ``always_measures``: the squares of residuals are summed even if ``measure`` is false.
    """

    always_measures = False

    def __init__(self, device: Device, group: GroupPlan) -> None:
        assert group.transform is not None
        reals = group.transform.reals_per_bin
        super().__init__(device, group, reals)
        self._tables: list[Any] = []
        self._names = self._launches(group.transform)
        self.names += self._names
        self.n_words = WORDS // reals
        masks = [device.zeros(self.n_tiles * self.n_words, np.uint32) for _ in range(2)]
        self._above, self._equal = masks  # ``_equal`` stays 0 without a k
        n_rows = self.n_tiles * self.n_words // 32
        self._counts = device.empty(n_rows * structs.ROW_COUNTS_NBYTES, np.uint8)
        self._starts: tuple[int, Any] | None = None  # see ``_blocks``

    def _launches(self, transform: Transform) -> list[str]:
        """Return the names of the kernels from gradients to payloads, in order."""
        block, domain = structs.block_and_domain(transform)
        first = "add_residual"
        if domain:
            first = f"forward<{block}, {str(domain == 2).lower()}>"
            both = (structs.roots(block), structs.cosines(block))
            self._tables = [self.device.upload(table) for table in both]
        reals = transform.reals_per_bin
        return [first, *(f"narrow<{reals}, {digit}>" for digit in (1, 2, 3)), f"emit<{reals}>"]

    def choose(self, kernels: Any, rows: Any, found: Any, measure: bool, totals: Any) -> list[Sums]:
        """Launch the transform and the top-k selection; see ``TileGroup``."""
        common = [rows, self.owners, found]
        first, *narrow = (kernels[name] for name in self._names[:-1])
        shared = structs.TALLY_NBYTES + (structs.POINTS_NBYTES if self._tables else 0)
        grid, starts = self._blocks()
        n, more = (self.n_tiles, self._tables) if self._tables else (grid, [starts])
        first(n, THREADS, [*common, *more], shared)
        squares = [self.squared(kernels, rows, of) for of in ((1, 0) if measure else ())]
        masks = [*common, self._above, self._equal, self._counts, starts]
        for kernel in narrow:
            kernel(grid, THREADS, masks, structs.DIGITS_NBYTES)
        return squares

    def _blocks(self) -> tuple[int, Any]:
        """Return as many blocks as run at the same time, and the first tile of each."""
        if self._starts is None:
            n = min(self.n_tiles, structs.RESIDENT * self.device.n_processors)
            starts = structs.starts_of_blocks(self._owners_on_host, n)
            self._starts = n, self.device.upload(starts)
        return self._starts

    def write(self, kernels: Any, rows: Any, found: Any, before: list[Sums]) -> Sums:
        """Launch the kernel that writes values and positions."""
        masks = [rows, self.owners, found, self._above, self._equal, self._counts]
        kernels[self._names[-1]](self.n_tiles, self.n_words, masks, 0)
        if not before and not self.always_measures:
            return lambda: np.zeros((3, 0))
        sums = [*before, self.squared(kernels, rows, 0)]
        return lambda: np.stack([fetch() for fetch in sums])


class CountedGroup(TopKGroup):
    """Group of tensors whose number of sent elements depends on the values.

    They are encoded under a threshold or by adaptive sparsifiers of one kind. ``rows``: the TENSOR
    rows of the bucket, which the encoder updates; limits that depend on the values are entered
    there.
    """

    def __init__(
        self, device: Device, group: GroupPlan, plans: Sequence[Plan], codecs: Codecs, rows: Array
    ) -> None:
        self._methods = {
            number: codec.sparsifier
            for number in group.members
            if isinstance(codec := codecs[number], Codec) and isinstance(codec.sparsifier, Adaptive)
        }
        self.always_measures = not self._methods
        kinds = [method.cuda for method in self._methods.values()]
        self._choice = _SELECTIONS.index(kinds[0]) if kinds else _ABOVE
        super().__init__(device, group)
        self._rows, self._bins = rows, dict[int, slice]()
        end = 0
        for number, method in self._methods.items():
            rows[number]["how"] = structs.CHOSEN
            if isinstance(method, Strom):
                rows[number]["threshold"] = pattern_of(method.threshold)
            if isinstance(method, AdaComp):
                numel = plans[number].numel
                length = min(method.length(plans[number].shape), numel)
                self._bins[number] = slice(end, end := end + -(-numel // length))
                rows[number]["bin"] = length
        self._maxima = device.zeros(max(1, end), np.uint32)
        for number, bins in self._bins.items():
            rows[number]["maxima"] = device.address(self._maxima) + 4 * bins.start
        self._limits = np.zeros(len(rows), np.float32)
        self._statistics: Callable[[], Array] = lambda: self._limits

    def _launches(self, transform: Transform) -> list[str]:
        del transform  # of reals alone
        before = {_ABOVE: [], _WINNERS: ["add_up"], _DRAWN: ["add_up", "sums_below"]}
        return [*before[self._choice], f"choose<{self._choice}>", "emit<1>"]

    def choose(self, kernels: Any, rows: Any, found: Any, measure: bool, totals: Any) -> list[Sums]:
        """Launch the choice and the count of elements; see ``TileGroup``.

        For Wangni's method it waits for the sums from which the limits are computed.
        """
        common, device = [rows, self.owners, found], self.device
        if self._choice != _ABOVE:
            device.clear(self._maxima)
            kernels["add_up"](self.n_tiles, THREADS, common, 0)
        limits = self._found_limits(kernels) if self._choice == _DRAWN else self._maxima
        arguments = [*common, self._above, self._counts, totals, limits]
        kernels[self._names[-2]](self.n_tiles, THREADS, arguments, structs.SUMS_NBYTES)
        if self._choice == _WINNERS:
            self._statistics = cache(device.fetch(self._maxima))  # waits once
        return [self.squared(kernels, rows, of) for of in ((1, 0) if measure else ())]

    def _found_limits(self, kernels: Any) -> Any:
        for number, method in self._methods.items():
            assert isinstance(method, Wangni)
            n, coeffs = int(self._rows[number]["n"]), self._rows[number]["coeffs"]
            below = partial(self._sums_below, kernels["sums_below"], coeffs, n)
            self._limits[number] = method.limit(n, below)
            self._rows[number]["threshold"] = pattern_of(self._limits[number])
        return self.device.upload(self._limits.view(np.uint32))

    def _sums_below(
        self, kernel: Any, coeffs: np.uint64, n: int, limit: float
    ) -> tuple[int, Array]:
        """Return ``sums_below`` of ``kernels.cpu`` of a tensor; waits for the device."""
        n_tiles = -(-n // TILE)
        parts = self.device.empty(n_tiles * structs.PART.itemsize, np.uint8)
        kernel(n_tiles, 32, [coeffs, np.uint64(n), np.uint32(pattern_of(limit)), parts], 0)
        fetched = self.device.fetch(parts)().view(structs.PART)
        return int(fetched["count"].sum(dtype=np.int64)), fetched["first"].copy()

    def scale(self, number: int, peak: float) -> float:
        """Return the scale of a tensor's payload; ``peak``: its largest magnitude, above 0."""
        if (method := self._methods.get(number)) is None:  # under a threshold
            return peak
        statistics = self._statistics().view(np.float32)
        return method.scale(peak, statistics[self._bins.get(number, slice(number, number + 1))])
