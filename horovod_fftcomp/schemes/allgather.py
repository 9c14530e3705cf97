"""One allgather of payloads, decoded and summed on every rank: the scheme of most recipes."""

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
)
from horovod_fftcomp.schemes.allgather_on_device import gather_on_device, serves
from horovod_fftcomp.types import Array, Body
from horovod_fftcomp.wire.counter_rng import RngKey
from horovod_fftcomp.wire.header import Header
from horovod_fftcomp.wire.spec import spec_of

Payload = tuple[Header, Array]
AnyCodec = Codec | DenseCodec | AdaptiveCodec


class Gathered(NamedTuple):
    """What a gather ends in, and the payloads: rank 0's, one for each tensor, then rank 1's, ..."""

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
    """Exchange payloads, those of each tensor by a codec of its own, the same on all ranks.

    ``carried``: the residuals; with ``error_feedback`` the outcome's state has the new ones. With
    ``momentum`` as well these are what the payloads were made of, and nothing is measured.
    """
    own = encode(codecs, tensors, grads, carried, context, error_feedback, momentum)
    gathered = yield Round("allgather", own.message)
    sums, finite, payloads = summed(codecs, tensors, gathered, context.world_size)
    state = {"residual": own.residuals} if error_feedback else {}
    return Gathered(Outcome(sums, state, finite, own.energies), payloads)


def summed(
    codecs: Sequence[AnyCodec], tensors: Sequence[Tensor], gathered: Array, world_size: int
) -> tuple[list[Array], bool, list[Payload]]:
    """Return (the sums over ranks; whether all is finite; the payloads) of all ranks' messages."""
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


class Own(NamedTuple):
    """What a rank contributes, and what that leaves."""

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
) -> Own:
    """Return the bucket's message, the new residuals, and the energies if they are measured."""
    measure = context.step % MEASURE_EVERY == 0
    residuals: dict[str, Array] = {}
    energies: dict[str, Energy] = {}
    message, rooms = rooms_for(codecs, tensors)
    payloads = []
    for codec, tensor, grad, room in zip(codecs, tensors, grads, rooms, strict=True):
        residual = carried.get(tensor.name)
        rng_key = RngKey(context.step, tensor.name, context.rank)
        energy: Energy | None = None
        if grad is None:
            zeros = np.zeros(math.prod(tensor.shape), np.float32)
            payload, _, _ = _encode_one(codec, tensor, zeros, None, room, rng_key, False, False)
            left = residual
        elif momentum:
            payload, left = _encode_momentum(codec, tensor, grad, residual, room, rng_key)
        else:
            payload, left, energy = _encode_one(
                codec, tensor, grad, residual, room, rng_key, error_feedback, measure
            )
        payloads.append(payload)
        if left is not None:
            residuals[tensor.name] = left
        if energy is not None:
            energies[tensor.name] = energy
    return Own(joined(payloads) if message is None else message, residuals, energies)


def part_of(codec: Codec, tensor: Tensor, header: Header, payload: Array) -> Body | None:
    """Return a payload's values, float32, and their places; None if it is not finite.

    ``codec``: sends values in float32. PayloadError for what it has not written.
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


def rooms_for(
    codecs: Sequence[AnyCodec], tensors: Sequence[Tensor]
) -> tuple[Array | None, Sequence[Array | None]]:
    """Return (a message of zeros, each payload's room in it); None where values decide sizes."""
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
    """Return one payload after the other, each from an aligned place on."""
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
    """Return (a tensor's payload, in ``out`` if given; what it leaves; the energies)."""
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
    """Send each tensor's payload to all ranks; with ``error_feedback`` carry on what it leaves.

    For every tensor: sent + residual == gradient + previous residual, to one float32 rounding.
    The residual of a transform stays in the spectrum, where it is exact without an inverse.
    Source: Seide et al. 2014; Karimireddy et al. 2019.

    ``decay`` below 1 makes a momentum of the residual: sent + residual == gradient + decay *
    previous residual. With ``sign`` all that arrives is the sign of each sum, times the number of
    ranks, so that the mean is the sign. Source: Peng et al. 2024 (DeMo). "vote" makes the sign of a
    sum of 0 a 1 (Bernstein et al. 2019) unless all ranks sent zeros alone.

    With ``momentum`` what is sent stays in the residual: residual == gradient + decay * previous
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
            raise ValueError(f"decay must lie in (0, 1], got {self.decay!r}; 1 forgets nothing")
        object.__setattr__(self, "decay", float(self.decay))

    def own_momentum(self) -> float:
        """Return the decay of the momentum that the scheme keeps itself; see ``Scheme``."""
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
        # Nothing is owed of what votes do not tell.
        return gathered.outcome if self.sign is True else gathered.outcome._replace(energies={})

    def _keep_signs(self, gathered: Gathered, world_size: int) -> None:
        """Leave of each sum its sign, times the number of ranks."""
        sums = gathered.outcome.sums
        for number, total in enumerate(sums):
            votes = gathered.payloads[number :: len(sums)]
            voted = self.sign == "vote" and any(header.scale for header, _ in votes)
            load_backend("cpu").majority_sign(total, world_size, world_size if voted else 0)

    def fits_differences(self) -> bool:
        """Tell whether differences of weights may be sent; see ``Scheme``."""
        return not self.sign and self.decay == 1.0

    def runs_on_device(self, tensors: Sequence[Tensor]) -> bool:
        """Tell whether a GPU can compute this step's exchange; see ``Scheme``."""
        return serves(self.codec, tensors, of_signs=self.momentum)

    def sent_nbytes(self, tensor: Tensor) -> int:
        """Return the bytes of ``tensor`` in each step, or to expect where values decide."""
        return wire.align(self.codec.expected_nbytes(tensor.shape))

    def state_format(self, tensor: Tensor) -> str:
        """Return what a state has to agree in to be this scheme's; see ``Scheme``."""
        return f"residual of {list(tensor.shape)} by {spec_of(self.codec.transform)}"

    def state_arrays(self, tensor: Tensor, state: OldState) -> Mapping[str, tuple[np.dtype, int]]:
        """Return (dtype, elements) of the residual's coefficients; see ``Scheme``."""
        del state
        if not self.error_feedback:
            return {}
        return {"residual": self.codec.coeffs_format(tensor.shape)}

    def elements(self, residual: Array, state: OldState, tensor: Tensor) -> Array:
        """Return the elements of a tensor's residual; see ``Scheme``."""
        del state
        numel = math.prod(tensor.shape)
        return self.codec.transform.inverse(residual, numel, backend_for(residual))
