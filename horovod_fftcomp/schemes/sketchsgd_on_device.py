"""SketchedSGD on a GPU: the device makes and queries sketches, the host selects the largest."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from horovod_fftcomp import wire
from horovod_fftcomp.codec.backend import load_backend
from horovod_fftcomp.codec.quantizers import LARGEST_FINITE_BITS, Float32
from horovod_fftcomp.codec.sparse import Codec
from horovod_fftcomp.codec.sparsifiers import TopK
from horovod_fftcomp.codec.transforms import Identity
from horovod_fftcomp.errors import PayloadError
from horovod_fftcomp.kernels.cuda import Device, on_host
from horovod_fftcomp.schemes import Context, OldState, OnDevice, Outcome, Round, Tensor
from horovod_fftcomp.schemes.allgather import part_of
from horovod_fftcomp.schemes.device_rows import BucketRows, ExchangeRows, cached, on_each, state_of
from horovod_fftcomp.schemes.gtopk import largest
from horovod_fftcomp.schemes.momentum_on_device import clip_factors
from horovod_fftcomp.types import Array

if TYPE_CHECKING:
    from horovod_fftcomp.schemes.sketchsgd import SketchSgd


class _Bucket(BucketRows):
    """Descriptor table of a bucket.

    ``firsts``, ``seconds``: offsets of the tensors in the first and the second message, with the
    end. ``found``: by number, for each sketched tensor, the codec of its largest estimates.
    """

    def __init__(self, device: Device, tensors: Sequence[Tensor], scheme: SketchSgd) -> None:
        from horovod_fftcomp.kernels.cuda.encoder import Encoder  # only with a GPU

        names = ["accumulate", "sketch", "write_sketch", "check_sketch", f"estimate<{scheme.rows}>"]
        super().__init__(device, "SKETCH", tensors, names)
        self.plans = [scheme.plan(tensor) for tensor in tensors]
        sizes = [plan.first_numel(scheme.rows) for plan in self.plans]
        self.firsts = np.cumsum([0, *sizes])
        self.seconds = np.cumsum([0, *(plan.second_numel for plan in self.plans)])
        self.rows["first_n"], self.rows["rows"] = sizes, scheme.rows
        self.rows["columns"] = [plan.columns for plan in self.plans]
        correction = scheme.correction
        self.rows["momentum"] = np.float32(correction.momentum).view(np.uint32)
        self.rows["how"] = self.tables.NESTEROV * correction.nesterov
        groups = self.owners("group", sizes, self.tables.THREADS)
        self._n_groups, self._groups = groups.size, device.upload(groups)
        # Plus a half, so that rounding the density down does not lose a candidate.
        self.found = {
            number: Codec(Identity(), TopK((plan.candidates + 0.5) / plan.numel), Float32())
            for number, plan in enumerate(self.plans)
            if plan.columns
        }
        shapes = [tensors[number].shape for number in self.found]
        self.encoder = Encoder(device, list(self.found.values()), shapes)

    def on_groups(self, name: str, table: Any, *arguments: Any) -> None:
        """Launch a kernel over all elements of the first round."""
        self.launch(name, self._n_groups, [table, self._groups, *arguments])


class _Exchange(ExchangeRows):
    def __init__(
        self,
        scheme: SketchSgd,
        tensors: Sequence[Tensor],
        grads: Sequence[Any],
        state: OldState,
        context: Context,
    ) -> None:
        assert context.device is not None
        self.bucket = cached(_Bucket, context.device, tensors, scheme)
        super().__init__(self.bucket, tensors, grads, state.get("residual", {}), context)
        self._scheme, velocities = scheme, state.get("velocity", {})
        self._whole, self._moved = (
            self.new(field, self.takes_part) for field in ("whole", "moved")
        )
        self.point_at_old("velocity", velocities)
        self.rows["factor"] = clip_factors(scheme.correction, tensors, grads, context)
        # A tensor sent dense may have a residual from an earlier density, which is sent with it and
        # restored if the step is dropped.
        keeps = self.rows["columns"] + self.rows["residual"] > 0
        left = [w if stays else None for w, stays in zip(self._whole, keeps, strict=True)]
        self.state = {
            "velocity": state_of(tensors, grads, velocities, self._moved),
            "residual": state_of(tensors, grads, state.get("residual", {}), left),
        }

    def sketch(self) -> Any:
        """Return the message of the first round."""
        bucket, device = self.bucket, self.device
        hashes = [self._scheme.hashes(tensor, self.context) for tensor in self.tensors]
        self.rows["hashes"] = self.address(device.upload(np.concatenate(hashes).reshape(-1)))
        self.rows["hashes"] += np.arange(len(hashes), dtype=np.uint64) * np.uint64(hashes[0].nbytes)
        sums = device.zeros(max(1, int(bucket.firsts[-1])), np.uint64)
        self.rows["columns_at"] = self.address(sums) + 8 * bucket.firsts[:-1]
        message = device.empty(max(1, int(bucket.firsts[-1])))[: int(bucket.firsts[-1])]
        self._enter_first(message)
        peaks = device.zeros(len(self.rows), np.uint32)
        table = bucket.uploads.of("own", self.rows)
        bucket.on_tiles("accumulate", table, peaks)
        if self.measures:
            self.square(True, "whole")
            self.square(False, "whole")
        bucket.on_tiles("sketch", table, peaks)
        bucket.on_groups("write_sketch", table, peaks)
        return message

    def _enter_first(self, array: Any) -> None:
        firsts = self.bucket.firsts
        if len(array) != firsts[-1]:
            raise PayloadError(f"{len(array)} values arrived, {firsts[-1]} were expected")
        self.rows["first"] = self.address(array) + 4 * firsts[:-1]

    def look_up(self, received: Any) -> Any:
        """Return the message of the second round; waits for the indices of the candidates."""
        bucket, device = self.bucket, self.device
        self._first = received
        self._enter_first(received)
        estimates = {number: device.empty(bucket.plans[number].numel) for number in bucket.found}
        for number, array in estimates.items():
            self.rows[number]["estimates"] = device.address(array)
        self._bad = device.zeros(len(self.rows), np.uint32)
        table = bucket.uploads.of("arrived", self.rows)
        bucket.on_groups("check_sketch", table, self._bad)
        bucket.on_tiles(f"estimate<{self._scheme.rows}>", table)
        wanted, nothing = list(estimates.values()), [None] * len(estimates)
        payloads = on_host(bucket.encoder.encode(wanted, nothing, nothing).message, device)
        self._places = dict(self._candidates(payloads))
        message = device.zeros(int(bucket.seconds[-1]))
        launch = on_each(device, "take_places", "fill_sum", "put_places")
        for number, places in self._places.items():
            whole, begin = self._whole[number], int(bucket.seconds[number])
            if whole is not None:
                n, flag = places.size, self._bad[number : number + 1]
                there = device.upload(places.astype(np.uint32))
                out = message[begin : begin + n]
                launch("take_places", n, whole, np.uint64(n), there, flag, out)
        self._launch = launch
        return message

    def _candidates(self, payloads: Array) -> Iterator[tuple[int, Array]]:
        """Yield the number of each sketched tensor and its candidates' indices, ascending."""
        split = wire.split_payloads(payloads[: self.bucket.encoder.message_nbytes])
        for (number, codec), (header, payload) in zip(
            self.bucket.found.items(), split, strict=True
        ):
            k = self.bucket.plans[number].candidates
            part = part_of(codec, self.tensors[number], header, payload)
            if part is None:  # the sketch was not finite
                yield number, np.arange(k)
                continue
            places = load_backend("cpu").positions_of(part.bitmap)
            yield number, places[largest(part.packed.view(np.float32), min(k, places.size))]

    def sum(self, received: Any) -> list[Any]:
        """Return the sums, and clear the sent values; waits for the candidates' values."""
        device, seconds = self.device, self.bucket.seconds
        if len(received) != seconds[-1]:
            raise PayloadError(f"{len(received)} values arrived, {seconds[-1]} were expected")
        bad, values = device.fetch(self._bad), on_host(received, device)
        words = bad().view(np.uint32).copy()
        shares = np.split(values, seconds[1:-1])
        for number, share in enumerate(shares):
            words[number] |= load_backend("cpu").max_abs_bits(share) > LARGEST_FINITE_BITS
        self.flags = device.upload(words)
        sums = [device.empty(max(1, n))[:n] for n in self.rows["n"].tolist()]
        for number, (total, share) in enumerate(zip(sums, shares, strict=True)):
            self._sum_one(number, total, share, bool(words[number]))
        return sums

    def _sum_one(self, number: int, total: Any, share: Array, bad: bool) -> None:
        device, launch, n = self.device, self._launch, int(self.rows[number]["n"])
        flag, size = self.flags[number : number + 1], np.uint64(n)
        if number not in self._places:
            first = self._first[int(self.bucket.firsts[number]) :][:n]
            launch("take_places", n, first, size, np.uint64(0), flag, total)
            return
        launch("fill_sum", n, total, size, flag)
        if bad:
            return
        best = largest(share, self.bucket.plans[number].k)
        places = device.upload(self._places[number][best].astype(np.uint32))
        ones = (device.upload(share[best]), np.uint64(best.size), places, flag)
        left = np.uint64(0) if self._whole[number] is None else self._whole[number]
        launch("put_places", best.size, *ones, total, left)
        if self._scheme.correction.masking and self._moved[number] is not None:
            nothing = (device.zeros(best.size), *ones[1:])
            launch("put_places", best.size, *nothing, self._moved[number], np.uint64(0))

    def clear_sent(self) -> None:
        """Clear the residuals of tensors that were sent dense, and measure all residuals."""
        for whole, plan in zip(self._whole, self.bucket.plans, strict=True):
            if whole is not None and not plan.columns:
                self.device.clear(whole)
        if self.measures:
            self.square(False, "whole")


def sketchsgd_on_device(
    scheme: SketchSgd,
    tensors: Sequence[Tensor],
    grads: Sequence[Any],
    state: OldState,
    context: Context,
) -> Generator[Round, Any, Outcome]:
    """Exchange sketches and values; see ``SketchSgd.exchange``. Waits for both to arrive."""
    exchange = _Exchange(scheme, tensors, grads, state, context)
    first = yield Round("allreduce", exchange.sketch())
    sums = exchange.sum((yield Round("allreduce", exchange.look_up(first))))
    exchange.clear_sent()
    measured = exchange.energies() if exchange.measures else None
    flags = OnDevice(exchange.flags, exchange.flags[:0])
    return Outcome(sums, exchange.state, True, measured, flags)
