"""Recomputes a GPU's exchange on the CPU from the same inputs, and compares the results."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from horovod_fftcomp import wire
from horovod_fftcomp.codec.backend import load_backend
from horovod_fftcomp.codec.sparse import Codec
from horovod_fftcomp.codec.transforms import Identity
from horovod_fftcomp.engine import differences
from horovod_fftcomp.errors import PayloadError
from horovod_fftcomp.kernels.cuda import Device
from horovod_fftcomp.kernels.host.payloads import joined
from horovod_fftcomp.schemes import Context, Exchange, Outcome, Scheme, State
from horovod_fftcomp.schemes.allgather import Allgather
from horovod_fftcomp.schemes.auto import Auto
from horovod_fftcomp.schemes.dgc import Dgc
from horovod_fftcomp.schemes.hard_threshold import HardThreshold
from horovod_fftcomp.schemes.powersgd import PowerSgd
from horovod_fftcomp.schemes.sparcml import SparCml
from horovod_fftcomp.schemes.state import low_passed
from horovod_fftcomp.schemes.wrapper import Wrapper
from horovod_fftcomp.types import Array, OldState, Tensor, Tensors

# Schemes whose payload of a tensor depends on no other tensor.
_SEPARABLE = (Allgather, HardThreshold, Auto, Dgc, SparCml)

Copy = Callable[[], Array]


def _copy(array: Any, device: Device) -> Copy:
    """Start copying an array, NumPy's or the device's, to the host."""
    if isinstance(array, np.ndarray):
        copied = np.array(array)
        return lambda: copied
    return device.fetch(array)


@dataclass
class Seen:
    """Recorded inputs and outputs of an exchange on a device, for ``tensors``, and its messages.

    ``position``: index of the only tensor among the ``n_tensors`` of the messages; None if all of
    them are recorded.
    """

    scheme: Scheme
    context: Context
    tensors: list[Tensor]
    position: int | None
    n_tensors: int
    grads: list[Copy | None]
    state: dict[str, dict[str, Copy]]
    sent: list[Copy] = field(default_factory=list)
    came: list[Copy] = field(default_factory=list)
    sums: list[Copy] = field(default_factory=list)
    new_state: dict[str, dict[str, Copy]] = field(default_factory=dict)


def followed(scheme: Scheme, position: int, note: Callable[[Seen | None], None]) -> Scheme:
    """Return a scheme that runs ``scheme`` on a device and passes a record of it to ``note``.

    ``position``: index in the bucket of the tensor to record. ``note`` gets None for a step that
    the scheme itself ran on the host.
    """
    if isinstance(scheme, Wrapper):
        return replace(scheme, scheme=followed(scheme.scheme, position, note))  # type: ignore
    return _Followed(scheme, position, note)


@dataclass(frozen=True)
class _Followed(Wrapper):
    scheme: Scheme
    position: int
    note: Callable[[Seen | None], None]

    def exchange(self, tensors: Tensors, grads: Any, state: OldState, context: Context) -> Exchange:
        """Sum ``grads`` over all ranks; see ``Scheme.exchange``."""
        device = context.device
        assert device is not None
        at = min(self.position, len(tensors) - 1)  # joined tensors are one
        is_alone = isinstance(self.scheme, _SEPARABLE)
        part = slice(at, at + 1) if is_alone else slice(None)
        names = {tensor.name for tensor in tensors[part]}
        seen = Seen(
            self.scheme,
            context._replace(device=None),
            list(tensors[part]),
            at if is_alone else None,
            len(tensors),
            [None if grad is None else _copy(grad, device) for grad in grads[part]],
            _copies(state, names, device),
        )
        exchange = self.scheme.exchange(tensors, grads, state, context)
        try:
            round_ = next(exchange)
            while True:
                seen.sent.append(_copy(round_.data, device))
                output = yield round_
                seen.came.append(_copy(output, device))
                round_ = exchange.send(output)
        except StopIteration as stop:
            outcome: Outcome = stop.value
        seen.sums = [_copy(total, device) for total in outcome.sums[part]]
        seen.new_state = _copies(outcome.state, names, device)
        self.note(None if outcome.flags.not_finite is None else seen)
        return outcome


def _copies(state: OldState, names: Container[str], device: Device) -> dict[str, dict[str, Copy]]:
    return {
        kind: {name: _copy(array, device) for name, array in arrays.items() if name in names}
        for kind, arrays in state.items()
    }


class Difference(NamedTuple):
    """A difference between GPU and CPU: the tensor or tensors, and a description."""

    tensors: str
    what: str


class Twin:
    """The CPU's computation of the exchange ``seen``, with the messages that the GPU received.

    ``is_finite``: whether the exchange was finite, known after the comparison. If not, only headers
    are compared.
    """

    def __init__(self, seen: Seen) -> None:
        self._seen, self._tensors = seen, seen.tensors
        self._grads = [None if grad is None else grad() for grad in seen.grads]
        self._state = _read(seen.state)
        self._scheme = _alike(seen.scheme, self._tensors[0], self._state)
        codec = self._scheme.codec if isinstance(self._scheme, Allgather) else None
        transforms = isinstance(codec, Codec) and not isinstance(codec.transform, Identity)
        self._codec = codec if transforms and isinstance(codec, Codec) else None
        self._positions: list[tuple[Array, Array]] = []  # compared once ``is_finite`` is known
        self.is_finite = True

    def first_difference(self) -> Difference | None:
        """Return the first difference that exceeds the tolerance, or None."""
        return next(self._differences(), None)

    def _differences(self) -> Iterator[Difference]:
        scheme: Any = self._scheme
        if self._codec is not None:
            scheme = replace(scheme, sign=False)  # a rounding may change a sign
        exchange = scheme.exchange(self._tensors, self._grads, self._state, self._seen.context)
        try:
            round_ = next(exchange)
            for number, (sent, came) in enumerate(
                zip(self._seen.sent, self._seen.came, strict=True)
            ):
                yield from self._in_message(number, self._part(sent()), round_.data)
                round_ = exchange.send(self._part(came()).view(round_.data.dtype))
        except StopIteration as stop:
            outcome: Outcome = stop.value
        except PayloadError as error:
            yield Difference(self._names, f"a message cannot be read: {error}")
            return
        self.is_finite = outcome.flags.finite
        for tensor, sum_, expected in zip(
            self._tensors, self._seen.sums, outcome.sums, strict=True
        ):
            if text := self._in_sum(sum_(), expected):
                yield Difference(repr(tensor.name), text)
        if self.is_finite:
            yield from self._in_state(outcome.state)

    @property
    def _names(self) -> str:
        names = [repr(tensor.name) for tensor in self._tensors]
        return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"

    def _part(self, message: Array) -> Array:
        """Return the payloads of the recorded tensor, or the whole message."""
        if self._seen.position is None:
            return message
        payloads = [payload for _, payload in wire.split_payloads(message)]
        if not payloads or len(payloads) % self._seen.n_tensors:
            raise PayloadError(f"{len(payloads)} payloads are of {self._seen.n_tensors} tensors")
        return joined(payloads[self._seen.position :: self._seen.n_tensors])

    def _in_message(self, number: int, found: Array, expected: Array) -> Iterator[Difference]:
        if expected.dtype == np.uint8 and isinstance(self._scheme, _SEPARABLE):
            payloads = zip(wire.split_payloads(found), wire.split_payloads(expected), strict=False)
            for tensor, ((_, ours), (_, theirs)) in zip(self._tensors, payloads, strict=False):
                if text := self._in_payload(ours, theirs):
                    yield Difference(repr(tensor.name), text)
        elif expected.dtype == np.uint8:  # positions are arbitrary where values are not finite
            self._positions.append((found, expected))
        elif number == 0 or np.isfinite(expected).all():  # else the received values were not finite
            limit = None
            if isinstance(self._scheme, PowerSgd):
                factors = self._state.get("factor", {}) if number == 0 else {}
                largest = max(map(differences.peak_of, factors.values()), default=1.0)
                scale = max(differences.peak_of(expected), self._peak() * largest)
                limit = differences.MULTIPLIED * scale
            what = f"its message in round {number}"
            if text := differences.of_finite(what, found, expected, limit):
                yield Difference(self._names, text)

    def _in_payload(self, found: Array, expected: Array) -> str | None:
        codec, (grad, *_), tensor = self._codec, self._grads, self._tensors[0]
        if codec is None or grad is None:
            return differences.of_payloads(found, expected)
        assert isinstance(self._scheme, Allgather)
        carried = self._state.get("residual", {}).get(tensor.name)
        if carried is not None and self._scheme.decay < 1:
            reals = carried.view(np.float32) * np.float32(self._scheme.decay)
            carried = reals.view(carried.dtype)
        wanted = codec.coeffs_of(grad, tensor.shape, load_backend("cpu"), carried).array
        left = _read(self._seen.new_state).get("residual", {}).get(tensor.name)
        limit = differences.transform_limit(wanted, carried)
        try:
            return differences.of_spectra(codec, found, expected, wanted, left, self._kept, limit)
        except ValueError as error:  # invalid codes or positions
            return f"its payload cannot be read: {error}"

    def _kept(self, unsent: Array) -> Array:
        """Return the residual of the first tensor's coefficients that were not sent."""
        assert isinstance(self._scheme, Allgather)
        tensors, ops = self._tensors[:1], self._seen.context.ops
        [kept] = low_passed(ops, tensors, self._state, [unsent], self._scheme.beta)
        return kept

    def _in_sum(self, found: Array, expected: Array) -> str | None:
        limit = None
        if self._codec is not None:
            limit = differences.transform_limit(expected)
            if getattr(self._scheme, "sign", False):
                signs = np.sign(expected) * np.float32(self._seen.context.world_size)
                expected = np.where(np.abs(expected) <= limit, found, signs)
        return differences.of_finite("its sum", found, expected, limit)

    def _in_state(self, state: State) -> Iterator[Difference]:
        for found, expected in self._positions:
            if text := differences.of_arrays("its positions", found, expected):
                yield Difference(self._names, text)
        there = _read(self._seen.new_state)
        for kind, arrays in state.items():
            limit = None
            if kind == "residual" and isinstance(self._scheme, PowerSgd):
                limit = differences.MULTIPLIED * self._peak()
            if kind == "residual" and self._codec is not None and self._grads[0] is not None:
                continue  # was compared together with the payload
            for name, expected in arrays.items():
                array = there.get(kind, {}).get(name, expected[:0])
                if text := differences.of_arrays(f"its {kind}", array, expected, limit):
                    yield Difference(repr(name), text)

    def _peak(self) -> float:
        """Return the largest magnitude in gradients and residuals."""
        return differences.peak_of(*self._grads, *self._state.get("residual", {}).values())


def _read(copies: dict[str, dict[str, Copy]]) -> dict[str, dict[str, Array]]:
    return {
        kind: {name: copy() for name, copy in of_kind.items()} for kind, of_kind in copies.items()
    }


def _alike(scheme: Scheme, tensor: Tensor, state: OldState) -> Scheme:
    """Return the scheme that gives the results of ``scheme`` on a GPU when run on the host."""
    if isinstance(scheme, Auto):
        return Allgather(scheme.codec_of(tensor, state), scheme.error_feedback, beta=scheme.beta)
    if isinstance(scheme, SparCml):
        return Allgather(scheme.codec, scheme.error_feedback, beta=scheme.beta)
    return scheme
