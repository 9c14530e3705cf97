"""Global top-k on a GPU: the device makes and sums lists, the host merges them."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from horovod_fftcomp.codec.quantizers import LARGEST_FINITE_BITS
from horovod_fftcomp.errors import PayloadError
from horovod_fftcomp.kernels.cuda import Device, on_device, on_host
from horovod_fftcomp.schemes import (
    MEASURE_EVERY,
    Context,
    Energy,
    Measured,
    OnDevice,
    Outcome,
    Round,
    Tensor,
)
from horovod_fftcomp.schemes.device_rows import on_each, placed, state_of
from horovod_fftcomp.schemes.wrapper import numels_of

if TYPE_CHECKING:
    from horovod_fftcomp.kernels.cuda.encoder import Encoded, Encoder
    from horovod_fftcomp.schemes.gtopk import Entries, GTopK

_KERNELS = ("find_beyond", "take_places", "fill_sum", "put_places")


class _Exchange:
    """One exchange of a bucket on a GPU.

    ``wholes``: gradient plus residual of each tensor that is not frozen; in the end the new
    residual. ``bad``: for each tensor a word that is nonzero if its sum is not finite.
    """

    def __init__(
        self,
        scheme: GTopK,
        tensors: Sequence[Tensor],
        grads: Sequence[Any],
        carried: Mapping[str, Any],
        device: Device,
    ) -> None:
        self.device, self._tensors, self._numels = device, tensors, numels_of(tensors)
        self._encoder = _encoder(device, scheme, tensors)
        self._launch = on_each(device, *_KERNELS)
        there = [grad is not None for grad in grads]
        self._grads = placed(grads, self._numels, device)
        self._old = [
            on_device(carried[tensor.name], device) if part and tensor.name in carried else None
            for tensor, part in zip(tensors, there, strict=True)
        ]
        self.wholes = [
            device.empty(max(1, n))[:n] if part else None
            for n, part in zip(self._numels, there, strict=True)
        ]

    def encode(self, measure: bool) -> Encoded:
        """Launch the encoding of the lists."""
        grads, old = self._grads, self._old
        return self._encoder.encode(grads, old, self.wholes, measure, keeps_sent=True)

    def take(self, chosen: Sequence[Entries]) -> Any:
        """Return this rank's values at the chosen indices of all tensors."""
        ends = np.cumsum([entries.places.size for entries in chosen]).tolist()
        self._parts = [slice(end - c.places.size, end) for end, c in zip(ends, chosen, strict=True)]
        self._places = self.device.upload(np.concatenate([c.places for c in chosen]).astype("u4"))
        bad = np.array([np.isnan(entries.values).any() for entries in chosen], np.uint32)
        self.bad = self.device.upload(bad)
        message = self.device.zeros(ends[-1])  # zeros for frozen tensors
        for whole, places, flag, part in self._each():
            if whole is not None:
                n = part.stop - part.start
                self._launch("take_places", n, whole, np.uint64(n), places, flag, message[part])
        self._message = message
        return message

    def _each(self) -> Iterator[tuple[Any, Any, Any, slice]]:
        """Yield each tensor's whole, its indices, its word of ``bad`` and its slice of messages."""
        for number, (whole, part) in enumerate(zip(self.wholes, self._parts, strict=True)):
            yield whole, self._places[part], self.bad[number : number + 1], part

    def sum(self, reduced: Any) -> list[Any]:
        """Return the sums, and clear the sent values in the residuals."""
        if len(reduced) != (expected := len(self._message)):
            raise PayloadError(f"{len(reduced)} values arrived, {expected} were expected")
        sums = [self.device.empty(max(1, n))[:n] for n in self._numels]
        beyond = np.uint32(LARGEST_FINITE_BITS)
        for total, numel, (whole, places, flag, part) in zip(
            sums, self._numels, self._each(), strict=True
        ):
            n, values = np.uint64(part.stop - part.start), reduced[part]
            left = np.uint64(0) if whole is None else whole
            self._launch("find_beyond", int(n), values, n, beyond, flag)
            self._launch("fill_sum", numel, total, np.uint64(numel), flag)
            self._launch("put_places", int(n), values, n, places, flag, total, left)
        return sums

    def measured(self, encoded: Encoded) -> Callable[[], Measured]:
        """Return a function that waits for the measurements and keeps no large array alive."""
        assert encoded.squares is not None
        sent = [self.device.fetch(self._message[part]) for part in self._parts]
        return partial(_measured, encoded.squares, sent, self._tensors)


def gtopk_on_device(
    scheme: GTopK,
    tensors: Sequence[Tensor],
    grads: Sequence[Any],
    carried: Mapping[str, Any],
    context: Context,
) -> Generator[Round, Any, Outcome]:
    """Exchange lists and sums; see ``GTopK.exchange``. Waits for all ranks' lists."""
    device = context.device
    assert device is not None
    exchange = _Exchange(scheme, tensors, grads, carried, device)
    encoded = exchange.encode(measure := context.step % MEASURE_EVERY == 0)
    gathered = on_host((yield Round("allgather", encoded.message)), device)
    message = exchange.take(scheme.chosen(tensors, gathered, context.world_size))
    sums = exchange.sum((yield Round("allreduce", message)))
    measured = exchange.measured(encoded) if measure else None
    flags = OnDevice(exchange.bad, device.zeros(0, np.uint32))
    if not scheme.error_feedback:
        return Outcome(sums, {}, True, measured, flags)
    state = {"residual": state_of(tensors, grads, carried, exchange.wholes)}
    return Outcome(sums, state, True, measured, flags)


def _encoder(device: Device, scheme: GTopK, tensors: Sequence[Tensor]) -> Encoder:
    from horovod_fftcomp.kernels.cuda.encoder import Encoder  # imported only where there is a GPU

    key = ("lists", tuple(tensors))
    if key not in device.cache or device.cache[key][0] != scheme.codec:
        shapes = [tensor.shape for tensor in tensors]
        device.cache[key] = (scheme.codec, Encoder(device, [scheme.codec] * len(shapes), shapes))
    return device.cache[key][1]


def _measured(
    squares: Callable[[], dict[int, tuple[float, float, float]]],
    sent: Sequence[Callable[[], np.ndarray]],
    tensors: Sequence[Tensor],
) -> Measured:
    """Wait for the measurements."""
    energies = {}
    for number, (gradient, wanted, _) in squares().items():
        gone = math.fsum(np.square(sent[number](), dtype=np.float64))
        energies[tensors[number].name] = Energy(gradient, wanted, max(0.0, wanted - gone))
    return Measured(energies)
