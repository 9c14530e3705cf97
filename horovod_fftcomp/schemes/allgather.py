"""Allgather of payloads, decoded and summed on every rank: the scheme of most recipes."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from horovod_fftcomp import wire
from horovod_fftcomp.codec.adaptive import AdaptiveCodec
from horovod_fftcomp.codec.backend import backend_for, load_backend
from horovod_fftcomp.codec.base import aligned
from horovod_fftcomp.codec.dense import DenseCodec
from horovod_fftcomp.codec.sparse import Codec
from horovod_fftcomp.errors import PayloadError
from horovod_fftcomp.kernels.ops import Flags
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
from horovod_fftcomp.schemes.allgather_on_device import gather_on_device, serves
from horovod_fftcomp.types import Array, Body
from horovod_fftcomp.wire.counter_rng import RngKey
from horovod_fftcomp.wire.header import Header
from horovod_fftcomp.wire.spec import spec_of

Payload = tuple[Header, Array]
AnyCodec = Codec | DenseCodec | AdaptiveCodec


class Gathered(NamedTuple):
    """Outcome of a gather and the payloads: one for each tensor of rank 0, then of rank 1, ..."""

    outcome: Outcome
    payloads: list[Payload]


def gather(
    codecs: Sequence[AnyCodec],
    tensors: Sequence[Tensor],
    grads: Grads,
    carried: Mapping[str, Array],
    context: Context,
    error_feedback: bool,
    momentum: bool = False,
) -> Generator[Round, Array, Gathered]:
    """Allgather the payloads of a bucket's tensors and sum them; one codec for each tensor.

    ``codecs``: the same on all ranks. ``carried``: the residuals by name. With ``error_feedback``
    the outcome's state has the new residuals; with ``momentum`` as well they are gradient plus
    ``carried``, sent values included, and nothing is measured.
    """
    encoded = encode(codecs, tensors, grads, carried, context, error_feedback, momentum)
    gathered = yield Round("allgather", encoded.message)
    sums, finite, payloads = summed(codecs, tensors, gathered, context.world_size)
    state = {"residual": encoded.residuals} if error_feedback else {}
    measured = measured_on_host(encoded.energies)
    return Gathered(Outcome(sums, state, Flags(finite), measured), payloads)


def summed(
    codecs: Sequence[AnyCodec], tensors: Sequence[Tensor], gathered: Array, world_size: int
) -> tuple[list[Array], bool, list[Payload]]:
    """Decode all ranks' messages; return (sums over ranks, whether all is finite, payloads)."""
    payloads = list(wire.split_payloads(gathered))
    expected = world_size * len(tensors)
    if len(payloads) != expected:
        raise PayloadError(f"{len(payloads)} payloads arrived, {expected} were expected")
    finite = all(header.finite for header, _ in payloads)
    sums = list(_decode(codecs, tensors, payloads))
    if finite:
        for number, codec in enumerate(codecs):
            headers = [header for header, _ in payloads[number :: len(codecs)]]
            if codec.may_overflow(headers) and not np.isfinite(sums[number]).all():
                finite = False
    return sums, finite, payloads


class Encoded(NamedTuple):
    """One rank's message, its new residuals and the energies that were measured."""

    message: Array
    residuals: dict[str, Array]
    energies: dict[str, Energy]


def encode(
    codecs: Sequence[AnyCodec],
    tensors: Sequence[Tensor],
    grads: Grads,
    carried: Mapping[str, Array],
    context: Context,
    error_feedback: bool,
    momentum: bool,
) -> Encoded:
    """Return the bucket's message, the new residuals, and the energies in steps that measure."""
    measure = context.step % MEASURE_EVERY == 0
    residuals: dict[str, Array] = {}
    energies: dict[str, Energy] = {}
    message, outs = outputs_for(codecs, tensors)
    payloads = []
    for codec, tensor, grad, out in zip(codecs, tensors, grads, outs, strict=True):
        residual = carried.get(tensor.name)
        rng_key = RngKey(context.step, tensor.name, context.rank)
        energy: Energy | None = None
        if grad is None:
            zeros = np.zeros(math.prod(tensor.shape), np.float32)
            payload, _, _ = _encode_one(codec, tensor, zeros, None, out, rng_key, False, False)
            new = residual
        elif momentum:
            payload, new = _encode_momentum(codec, tensor, grad, residual, out, rng_key)
        else:
            payload, new, energy = _encode_one(
                codec, tensor, grad, residual, out, rng_key, error_feedback, measure
            )
        payloads.append(payload)
        if new is not None:
            residuals[tensor.name] = new
        if energy is not None:
            energies[tensor.name] = energy
    return Encoded(joined(payloads) if message is None else message, residuals, energies)


def part_of(codec: Codec, tensor: Tensor, header: Header, payload: Array) -> Body | None:
    """Return a payload's values, float32, and their positions; None if it is not finite.

    ``codec``: one that sends values in float32. PayloadError for a payload that it did not write.
    """
    kernels = load_backend("cpu")
    try:
        if header.shape != tensor.shape:
            raise PayloadError(f"header field 'shape' is {header.shape}, expected {tensor.shape}")
        plan = codec.checked_plan(payload, header)
        if not header.finite:
            return None
        part = codec.part(aligned(payload), plan, header, kernels)
        if kernels.max_abs_bits(part.packed.view(np.float32)) > part.coding.largest:
            raise PayloadError("body: a value lies beyond the scale")
    except (PayloadError, ValueError) as error:
        raise PayloadError(f"tensor {tensor.name!r}: {error}") from error
    return part


def outputs_for(
    codecs: Sequence[AnyCodec], tensors: Sequence[Tensor]
) -> tuple[Array | None, Sequence[Array | None]]:
    """Return (a message of zeros, a view of it for each payload); None where sizes vary."""
    if not all(codec.has_fixed_size for codec in codecs):
        return None, [None] * len(codecs)
    sizes = [
        wire.align(codec.payload_nbytes(tensor.shape))
        for codec, tensor in zip(codecs, tensors, strict=True)
    ]
    message = load_backend("cpu").empty(sum(sizes), np.uint8)
    message.fill(0)
    return message, np.split(message, np.cumsum(sizes)[:-1])


def joined(payloads: Sequence[Array]) -> Array:
    """Return the payloads in one message, each at an aligned offset."""
    ends = np.cumsum([wire.align(payload.size) for payload in payloads])
    message = load_backend("cpu").empty(int(ends[-1]), np.uint8)
    for payload, end in zip(payloads, ends, strict=True):
        begin = end - wire.align(payload.size)
        message[begin : begin + payload.size] = payload
        message[begin + payload.size : end] = 0
    return message


def _encode_momentum(
    codec: AnyCodec,
    tensor: Tensor,
    grad: Array,
    velocity: Array | None,
    out: Array | None,
    rng_key: RngKey,
) -> tuple[Array, Array]:
    """Return (the payload of gradient plus velocity, that sum)."""
    kernels = backend_for(grad)
    coeffs = codec.coeffs_of(grad, tensor.shape, kernels, velocity)
    payload, _ = codec.encode_coeffs(
        coeffs, tensor.shape, kernels=kernels, keep_residual=False, out=out, rng_key=rng_key
    )
    return payload, coeffs.array


def _encode_one(
    codec: AnyCodec,
    tensor: Tensor,
    grad: Array,
    residual: Array | None,
    out: Array | None,
    rng_key: RngKey,
    error_feedback: bool,
    measure: bool,
) -> tuple[Array, Array | None, Energy | None]:
    """Return (a tensor's payload, in ``out`` if given; the new residual; the energies)."""
    kernels = backend_for(grad)
    keep = error_feedback or measure
    coeffs = codec.coeffs_of(grad, tensor.shape, kernels, residual, own=keep)
    wanted = codec.energy(coeffs.array, tensor.shape) if measure else 0.0
    encoded = codec.encode_coeffs(
        coeffs, tensor.shape, kernels=kernels, keep_residual=keep, out=out, rng_key=rng_key
    )
    if not measure or encoded.residual is None:
        return encoded.payload, encoded.residual, None
    left = codec.energy(encoded.residual, tensor.shape)
    energy = Energy(float(np.dot(grad, grad)), wanted, left)
    return encoded.payload, encoded.residual, energy


def _decode(
    codecs: Sequence[AnyCodec], tensors: Sequence[Tensor], payloads: Sequence[Payload]
) -> Iterator[Array]:
    for number, (codec, tensor) in enumerate(zip(codecs, tensors, strict=True)):
        headers, bodies = zip(*payloads[number :: len(tensors)], strict=True)
        try:
            yield codec.decode_sum(bodies, headers=headers).reshape(-1)
        except PayloadError as error:
            raise PayloadError(f"tensor {tensor.name!r}: {error} (payload = rank)") from error


def _scaled(array: Array, factor: float) -> Array:
    reals = array.view(np.float32)
    out = load_backend("cpu").empty(reals.size)
    return np.multiply(reals, np.float32(factor), out=out).view(array.dtype)


@dataclass(frozen=True)
class Allgather(Scheme):
    """Allgather of one payload per tensor, summed on every rank, with optional error feedback.

    With ``error_feedback``, for every tensor: sent + residual == gradient + previous residual, to
    one float32 rounding. A codec with a transform keeps its residual as coefficients, which is
    exact and needs no inverse transform. Source: Seide et al. 2014; Karimireddy et al. 2019.

    ``decay`` below 1 turns the residual into a momentum: sent + residual == gradient + decay *
    previous residual. ``sign`` replaces each sum by its sign times the number of ranks, so that the
    mean is the sign. Source: Peng et al. 2024 (DeMo). With ``sign="vote"`` the sign of 0 is 1
    (Bernstein et al. 2019), unless all ranks sent only zeros.

    With ``momentum`` sent values stay in the residual: residual == gradient + decay * previous
    residual (Signum).
    """

    spec_name = "Gather"
    codec: AnyCodec
    error_feedback: bool = True
    decay: float = 1.0
    sign: bool | str = False
    momentum: bool = False
    rounds = ("allgather",)

    def __post_init__(self) -> None:
        if not 0.0 < self.decay <= 1.0:
            raise ValueError(f"decay must lie in (0, 1], got {self.decay!r}; 1 means no decay")
        object.__setattr__(self, "decay", float(self.decay))

    def own_momentum(self) -> float:
        """Return the decay of the scheme's own momentum; see ``Scheme``."""
        return self.decay if self.decay < 1 or self.momentum else 0.0

    def exchange(
        self, tensors: Sequence[Tensor], grads: Grads, state: OldState, context: Context
    ) -> Exchange:
        """Sum ``grads`` over all ranks; see ``Scheme.exchange``."""
        codec, carried = self.codec.at_loss_scale(context.loss_scale), state.get("residual", {})
        if context.device is not None:
            return (
                yield from gather_on_device(
                    [codec] * len(tensors),
                    tensors,
                    grads,
                    state,
                    context,
                    self.error_feedback,
                    decay=self.decay,
                    keeps_sent=self.momentum,
                    sign=self.sign,
                )
            )
        frozen = {t.name for t, grad in zip(tensors, grads, strict=True) if grad is None}
        if self.decay < 1:
            carried = {
                name: array if name in frozen else _scaled(array, self.decay)
                for name, array in carried.items()
            }
        gathered = yield from gather(
            [codec] * len(tensors),
            tensors,
            grads,
            carried,
            context,
            self.error_feedback,
            self.momentum,
        )
        if not self.sign:
            return gathered.outcome
        self._keep_signs(gathered, context.world_size)
        # Votes have no relative error, so their energies are dropped.
        return gathered.outcome if self.sign is True else gathered.outcome._replace(measured=None)

    def _keep_signs(self, gathered: Gathered, world_size: int) -> None:
        """Replace each sum by its sign times the number of ranks, in place."""
        sums = gathered.outcome.sums
        for number, total in enumerate(sums):
            votes = gathered.payloads[number :: len(sums)]
            voted = self.sign == "vote" and any(header.scale for header, _ in votes)
            load_backend("cpu").majority_sign(total, world_size, world_size if voted else 0)

    def fits_differences(self) -> bool:
        """Return whether differences of weights may be sent; see ``Scheme``."""
        return not self.sign and self.decay == 1.0

    def runs_on_device(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether a GPU can compute this step's exchange; see ``Scheme``."""
        return serves(self.codec, tensors, of_signs=self.momentum)

    def sent_nbytes(self, tensor: Tensor) -> int:
        """Return the bytes of ``tensor`` in each step; an estimate where sizes depend on values."""
        return wire.align(self.codec.expected_nbytes(tensor.shape))

    def state_format(self, tensor: Tensor) -> str:
        """Return the state's shape and domain in words; see ``Scheme.state_format``."""
        return f"residual of {list(tensor.shape)} by {spec_of(self.codec.transform)}"

    def state_arrays(self, tensor: Tensor, state: OldState) -> Mapping[str, tuple[np.dtype, int]]:
        """Return (dtype, elements) of the residual's coefficients; see ``Scheme``."""
        del state
        if not self.error_feedback:
            return {}
        return {"residual": self.codec.coeffs_format(tensor.shape)}

    def elements(self, residual: Array, state: OldState, tensor: Tensor) -> Array:
        """Return a tensor's residual by element; see ``Scheme``."""
        del state
        numel = math.prod(tensor.shape)
        return self.codec.transform.inverse(residual, numel, backend_for(residual))
