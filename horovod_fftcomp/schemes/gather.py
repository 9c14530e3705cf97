"""One allgather of payloads, decoded and summed on every rank: the scheme of most recipes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from horovod_fftcomp import wire
from horovod_fftcomp.backends import Array, backend_for, load_backend
from horovod_fftcomp.codec import Codec
from horovod_fftcomp.errors import PayloadError
from horovod_fftcomp.schemes import MEASURE_EVERY, Context, Energy, Exchange, Outcome, Round, Tensor
from horovod_fftcomp.wire import Header


@dataclass(frozen=True)
class Gather:
    """Send each tensor's payload to all ranks; with ``error_feedback`` carry on what it leaves.

    For every tensor: sent + residual == gradient + previous residual, to one float32 rounding.
    The residual of a transform stays in the spectrum, where it is exact without an inverse.
    Source: Seide et al. 2014; Karimireddy et al. 2019.
    """

    codec: Codec
    error_feedback: bool = True
    rounds = ("allgather",)

    def exchange(
        self,
        tensors: Sequence[Tensor],
        grads: Sequence[Array | None],
        state: Mapping[str, Mapping[str, Array]],
        context: Context,
    ) -> Exchange:
        """Sum ``grads`` over all ranks; see ``Scheme.exchange``."""
        measure = context.step % MEASURE_EVERY == 0
        carried = state.get("residual", {})
        message, residuals, energies = self._encode(tensors, grads, carried, measure)
        gathered = yield Round("allgather", message)
        payloads = list(wire.split_payloads(gathered))
        expected = context.world_size * len(tensors)
        if len(payloads) != expected:
            raise PayloadError(f"{len(payloads)} payloads arrived, {expected} were expected")
        headers = [header for header, _ in payloads]
        finite = all(header.finite for header in headers)
        sums = list(self._decode(tensors, payloads))
        if finite and self.codec.may_overflow(headers):
            finite = all(np.isfinite(total).all() for total in sums)
        new_state = {"residual": residuals} if self.error_feedback else {}
        return Outcome(sums, new_state, finite, energies)

    def _encode(
        self,
        tensors: Sequence[Tensor],
        grads: Sequence[Array | None],
        carried: Mapping[str, Array],
        measure: bool,
    ) -> tuple[Array, dict[str, Array], dict[str, Energy]]:
        """Return (the bucket's message, the new residuals, the energies if measured)."""
        slots = np.cumsum([0] + [self.sent_nbytes(tensor) for tensor in tensors])
        message = load_backend("cpu").empty(slots[-1], np.uint8)
        message.fill(0)
        residuals: dict[str, Array] = {}
        energies: dict[str, Energy] = {}
        for tensor, grad, begin, end in zip(tensors, grads, slots, slots[1:], strict=False):
            out, residual = message[begin:end], carried.get(tensor.name)
            if grad is None:
                zeros = np.zeros(math.prod(tensor.shape), np.float32)
                self._encode_one(tensor, zeros, None, out, measure=False)
                left, energy = residual, None
            else:
                left, energy = self._encode_one(tensor, grad, residual, out, measure)
            if left is not None:
                residuals[tensor.name] = left
            if energy is not None:
                energies[tensor.name] = energy
        return message, residuals, energies

    def _encode_one(
        self, tensor: Tensor, grad: Array, residual: Array | None, out: Array, measure: bool
    ) -> tuple[Array | None, Energy | None]:
        """Write a tensor's payload into ``out``; return (what it leaves, the energies)."""
        kernels = backend_for(grad)
        keep = self.error_feedback or measure
        coeffs = self.codec.coeffs_of(grad, tensor.shape, kernels, residual, own=keep)
        wanted = self.codec.energy(coeffs.array, tensor.shape) if measure else 0.0
        encoded = self.codec.encode_coeffs(
            coeffs, tensor.shape, kernels=kernels, keep_residual=keep, out=out
        )
        if not measure or encoded.residual is None:
            return encoded.residual, None
        left = self.codec.energy(encoded.residual, tensor.shape)
        return encoded.residual, Energy(float(np.dot(grad, grad)), wanted, left)

    def _decode(
        self, tensors: Sequence[Tensor], payloads: Sequence[tuple[Header, Array]]
    ) -> Iterator[Array]:
        for place, tensor in enumerate(tensors):
            headers, bodies = zip(*payloads[place :: len(tensors)], strict=True)
            try:
                yield self.codec.decode_sum(bodies, headers=headers).reshape(-1)
            except PayloadError as error:
                raise PayloadError(f"tensor {tensor.name!r}: {error} (payload = rank)") from error

    def sent_nbytes(self, tensor: Tensor) -> int:
        """Return the bytes that a rank hands to collectives for ``tensor`` in each step."""
        return wire.align(self.codec.plan(tensor.shape).payload_nbytes)

    def state_format(self, tensor: Tensor) -> str:
        """Return what a state has to agree in to be this scheme's; see ``Scheme``."""
        return f"residual of {list(tensor.shape)} by {self.codec.transform!r}"

    def state_arrays(self, tensor: Tensor) -> Mapping[str, tuple[np.dtype, int]]:
        """Return (dtype, elements) of the residual's coefficients; see ``Scheme``."""
        if not self.error_feedback:
            return {}
        return {"residual": self.codec.coeffs_format(tensor.shape)}

    def residual(self, state: Mapping[str, Mapping[str, Array]], tensor: Tensor) -> Array:
        """Return what is not sent yet of ``tensor``, float32 in its shape."""
        carried = state.get("residual", {}).get(tensor.name)
        if carried is None:
            return np.zeros(tensor.shape, np.float32)
        numel = math.prod(tensor.shape)
        elements = self.codec.transform.inverse(carried, numel, backend_for(carried))
        return elements.reshape(tensor.shape).copy()  # without a transform it is the state itself
