"""Encodes a bucket's tensors into one message."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from horovod_fftcomp import entropy, wire
from horovod_fftcomp.backends import Array
from horovod_fftcomp.backends.entropy_tables import encoder_table
from horovod_fftcomp.backends.gpu import Device, source, tables
from horovod_fftcomp.backends.gpu.tables import THREADS, WORDS, Group
from horovod_fftcomp.codec import Codec
from horovod_fftcomp.positions import Layout


class Encoded(NamedTuple):
    """What ``Encoder.encode`` returns; arrays are the device's.

    ``message``: uint8. ``not_finite``: for each tensor 1 if it is not finite, uint32. ``restore``
    takes the verdict on the step, uint32 ``[1]``, and brings the new coefficients back to the old
    ones if it is not 0. ``squares``: if they were asked for, a function that waits for the device
    and returns for each tensor, by its number, the sums of squares of gradient, of gradient plus
    residual, and of what is left.
    """

    message: Any
    not_finite: Any
    restore: Callable[[Any], None]
    squares: Callable[[], dict[int, tuple[float, float, float]]] | None


_STEPS = ("mark", "narrow", "settle", "emit")


class Encoder:
    """Encodes tensors of given shapes, each by its codec, in their order.

    ``message_nbytes``: of all payloads, each at a multiple of 16; ``offsets``: where they begin.
    ``coeffs_formats``: (dtype, elements) of each tensor's coefficients; None for one that travels
    as it is and leaves nothing unsent.
    """

    def __init__(
        self, device: Device, codecs: Sequence[Codec], shapes: Sequence[tuple[int, ...]]
    ) -> None:
        self._device = device
        plans = [codec.plan(shape) for codec, shape in zip(codecs, shapes, strict=True)]
        nbytes = [wire.align(plan.payload_nbytes) for plan in plans]
        self.offsets = [sum(nbytes[:number]) for number in range(len(nbytes))]
        self.message_nbytes = sum(nbytes)
        self.coeffs_formats = [
            None if plan.layout is Layout.RAW else codec.coeffs_format(shape)
            for plan, codec, shape in zip(plans, codecs, shapes, strict=True)
        ]
        self._rows = np.zeros(len(plans), tables.TENSOR)
        for row, plan, codec in zip(self._rows, plans, codecs, strict=True):
            tables.enter_plan(row, plan, codec)
            row["bins_per_block"] = codec.transform.bins_per_block
        self._gains = [tables.gain_of_squares(codec.transform) for codec in codecs]
        self._groups = [
            _GroupOnDevice(device, group)
            for group in tables.grouped(plans, list(codecs), self._rows)
        ]
        names = {name for group in self._groups for name in group.names}
        names |= {"write_header", "encode_chunks", "copy_chunks"}
        self._kernels = device.functions(source(), sorted(names))
        self._found = device.zeros(max(1, len(plans) * tables.FOUND_NBYTES), np.uint8)
        self._headers = np.zeros(len(plans), tables.HEADER)
        self._kept = [self._header_tables(*pair) for pair in zip(plans, codecs, strict=True)]
        for row, (start, crc_of_scale) in zip(self._headers, self._kept, strict=True):
            row["start"], row["crc_of_scale"] = device.address(start), device.address(crc_of_scale)
            row["nbytes"] = len(start)
        self._codes = _Codes(device, self._rows, self._groups)

    def _header_tables(self, plan: wire.Plan, codec: Codec) -> tuple[Any, Any]:
        start, changes = tables.header_and_changes(plan, codec.fingerprint)
        return self._device.upload(start), self._device.upload(changes)

    def encode(
        self,
        grads: Sequence[Any],
        residuals: Sequence[Any],
        coeffs: Sequence[Any],
        measure: bool = False,
    ) -> Encoded:
        """Launch everything from gradients to a message.

        ``grads``: float32. ``residuals``: coefficients to add, or None. ``coeffs``: where those of
        gradient plus residual go, or None to throw them away; what is sent is then subtracted
        from them. Neither they nor the body of a payload mean anything if it is not finite.
        ``measure``: sum the squares of the tensors whose coefficients are kept.
        """
        try:
            return self._encode(grads, residuals, coeffs, measure)
        except BaseException:  # out of memory, midway: the next encoding finds its scratch as new
            self._device.clear(self._found)
            raise

    def _encode(
        self, grads: Sequence[Any], residuals: Sequence[Any], coeffs: Sequence[Any], measure: bool
    ) -> Encoded:
        device = self._device
        message = device.zeros(max(1, self.message_nbytes), np.uint8)
        scratch = []  # lives until all is launched; the stream keeps the order
        base = device.address(message)
        for number, row in enumerate(self._rows):
            row["grad"] = device.address(grads[number])
            residual, kept = residuals[number], coeffs[number]
            row["residual"] = 0 if residual is None else device.address(residual)
            row["keep"] = kept is not None
            form = self.coeffs_formats[number]
            if kept is None and form is not None:
                dtype, n = form
                kept = device.empty(max(1, n), dtype)
                scratch.append(kept)
            row["coeffs"] = 0 if kept is None else device.address(kept)
            row["payload"] = base + self.offsets[number]
        self._headers["payload"] = self._rows["payload"]
        rows = device.upload(self._rows.view(np.uint8))
        sums = [group.encode(self._kernels, rows, self._found, measure) for group in self._groups]
        self._codes.encode(self._kernels, self._rows, self._found)
        not_finite = device.zeros(max(1, len(self._rows)), np.uint32)
        if len(self._rows):
            headers = device.upload(self._headers.view(np.uint8))
            arguments = [headers, self._found, not_finite]
            self._kernels["write_header"](len(self._rows), 32, arguments, 0)
        squares = partial(self._squares, sums, self._rows["keep"] != 0) if measure else None
        return Encoded(
            message, not_finite, partial(self._restore, rows, (residuals, coeffs)), squares
        )

    def _restore(self, rows: Any, pointed_at: Any, verdict: Any) -> None:
        """Launch what undoes an encoding where the verdict is not 0; see ``Encoded``."""
        del pointed_at  # by the rows: had to live until now
        for group in self._groups:
            group.restore(self._kernels, rows, verdict)

    def _squares(
        self, sums: Sequence[Callable[[], np.ndarray]], kept: Array
    ) -> dict[int, tuple[float, float, float]]:
        found = {}
        for group, of_tiles in zip(self._groups, sums, strict=True):
            for number, squares in group.by_tensor(of_tiles()).items():
                if kept[number]:
                    gradient, wanted, left = squares
                    gain = self._gains[number]
                    found[number] = (gradient, gain * wanted, gain * left)
        return found


class _GroupOnDevice:
    """A group's kernels and scratch memory."""

    def __init__(self, device: Device, group: Group) -> None:
        self._device = device
        self.members, self._owners_on_host = group.members, group.owners
        self._n_tiles = group.owners.size
        self._owners = device.upload(group.owners)
        self._is_raw = group.transform is None
        self._tables: list[Any] = []
        if group.transform is None:
            self.names = ["copy_raw"]
            return
        reals = group.transform.reals_per_bin
        block, domain = tables.block_and_domain(group.transform)
        first = "add_residual"
        if domain:
            first = f"forward<{block}, {str(domain == 2).lower()}>"
            self._tables = [device.upload(t) for t in (tables.roots(block), tables.cosines(block))]
        self._names = [first, *(f"{step}<{reals}>" for step in _STEPS)]
        self._restore, self._square = f"restore<{reals}>", f"square<{reals}>"
        self.names = [*self._names, self._restore, self._square]
        self.n_words = WORDS // reals
        masks = [device.empty(self._n_tiles * self.n_words, np.uint32) for _ in range(3)]
        self._above, self._equal, self.chosen = masks
        self._counts = device.empty(self._n_tiles * tables.TILE_COUNTS_NBYTES, np.uint8)

    def encode(
        self, kernels: Any, rows: Any, found: Any, measure: bool
    ) -> Callable[[], np.ndarray]:
        """Launch everything from gradients to values and to positions but for entropy codes.

        Returns what waits for the sums of squares, float64 ``[3, tiles]`` if they are measured.
        """
        common = [rows, self._owners, found]
        if self._is_raw:
            kernels["copy_raw"](self._n_tiles, THREADS, common, 0)
            return lambda: np.zeros((3, self._n_tiles))
        first, mark, narrow, settle, emit = (kernels[name] for name in self._names)
        masks = [*common, self._above, self._equal]
        shared = tables.TALLY_NBYTES + (tables.POINTS_NBYTES if self._tables else 0)
        first(self._n_tiles, THREADS, [*common, *self._tables], shared)
        if measure:
            before = [self._squared(kernels, rows, of_gradient) for of_gradient in (1, 0)]
        mark(self._n_tiles, THREADS, masks, tables.DIGITS_NBYTES)
        narrow(self._n_tiles, self.n_words, masks, tables.DIGITS_NBYTES)
        settle(self._n_tiles, self.n_words, [*masks, self._counts], tables.SUMS_NBYTES)
        written = [*masks, self._counts, self.chosen]
        emit(self._n_tiles, self.n_words, written, tables.SUMS_NBYTES)
        if not measure:
            return lambda: np.zeros((3, 0))
        sums = [*before, self._squared(kernels, rows, 0)]
        return lambda: np.stack([fetch() for fetch in sums])

    def _squared(self, kernels: Any, rows: Any, of_gradient: int) -> Callable[[], np.ndarray]:
        sums = self._device.empty(self._n_tiles, np.float64)
        arguments = [rows, self._owners, np.uint32(of_gradient), sums]
        kernels[self._square](self._n_tiles, THREADS, arguments, tables.SQUARES_NBYTES)
        return self._device.fetch(sums)

    def restore(self, kernels: Any, rows: Any, verdict: Any) -> None:
        """Launch what brings old coefficients back if the verdict is not 0."""
        if not self._is_raw:
            kernels[self._restore](self._n_tiles, THREADS, [rows, self._owners, verdict], 0)

    def by_tensor(self, of_tiles: np.ndarray) -> dict[int, tuple[float, float, float]]:
        """Return three sums for each tensor, of ``[3, tiles]``."""
        if self._is_raw:
            return {}
        n = max(self.members) + 1
        sums = [np.bincount(self._owners_on_host, part, n) for part in of_tiles]
        return {m: (float(sums[0][m]), float(sums[1][m]), float(sums[2][m])) for m in self.members}


class _Codes:
    """The tensors whose positions travel in the entropy code."""

    def __init__(self, device: Device, rows: Array, groups: Sequence[_GroupOnDevice]) -> None:
        self._device = device
        coded = [
            (number, group)
            for group in groups
            for number in group.members
            if rows[number]["layout"] == Layout.ENTROPY
        ]
        self._rows = np.zeros(len(coded), tables.CODED)
        warps: list[int] = []
        chunks: list[tuple[int, int]] = []
        self._kept: list[Any] = []
        for place, (row, (number, group)) in enumerate(zip(self._rows, coded, strict=True)):
            n, k = int(rows[number]["n"]), int(rows[number]["k"])
            n_chunks = entropy.n_chunks(n)
            pushes = device.upload(_pushes(n, k))
            self._kept.append(pushes)
            row["pushes"], row["tensor"] = device.address(pushes), number
            first_word = group.n_words * int(rows[number]["first_tile"])
            row["bitmap"] = device.address(group.chosen) + 4 * first_word
            row["n_symbols"], row["n_chunks"] = (n + 7) // 8, n_chunks
            row["first_warp"] = len(warps)
            row["n_warps"] = -(-n_chunks // tables.CHUNKS_OF_WARP)
            warps += [place] * int(row["n_warps"])
            chunks += [(place, chunk) for chunk in range(n_chunks)]
        if not coded:
            return
        before = np.cumsum(self._rows["n_chunks"], dtype=np.uint64) - self._rows["n_chunks"]
        for field, dtype, each in (
            ("words", np.uint32, tables.MOST_WORDS),
            ("states", np.uint64, entropy.LANES),
            ("lengths", np.uint32, 1),
        ):
            scratch = device.empty(len(chunks) * each, dtype)
            self._kept.append(scratch)
            nbytes = np.uint64(np.dtype(dtype).itemsize * each)
            self._rows[field] = np.uint64(device.address(scratch)) + nbytes * before
        self._n_warps, self._n_chunks = len(warps), len(chunks)
        self._warps = device.upload(np.array(warps, np.uint32))
        self._chunks = [device.upload(column) for column in np.array(chunks, np.uint32).T.copy()]

    def encode(self, kernels: Any, rows: Array, found: Any) -> None:
        """Launch what codes the bitmaps of what is chosen."""
        if not len(self._rows):
            return
        tensors = rows[self._rows["tensor"]]
        self._rows["coded"] = tensors["payload"] + tensors["positions_offset"]
        codes = self._device.upload(self._rows.view(np.uint8))
        arguments = [codes, self._warps, found]
        kernels["encode_chunks"](self._n_warps, 32, arguments, tables.SUMS_NBYTES)
        kernels["copy_chunks"](self._n_chunks, 128, [codes, *self._chunks, found], 0)


def _pushes(n: int, k: int) -> Array:
    """Return each byte's reciprocal, and its bias, frequency and shift in one word; uint64."""
    frequencies, reciprocals, shifts, biases = encoder_table(entropy.frequencies(n, k))
    packed = biases | frequencies << np.uint64(16) | shifts << np.uint64(32)
    return np.stack([reciprocals, packed], 1)
