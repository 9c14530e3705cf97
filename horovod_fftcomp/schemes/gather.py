"""One allgather of payloads, decoded and summed on every rank: the scheme of most recipes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType

import numpy as np

from horovod_fftcomp import wire
from horovod_fftcomp.backends import Array, backend_for
from horovod_fftcomp.codec import Codec
from horovod_fftcomp.errors import PayloadError
from horovod_fftcomp.schemes import Context, Exchange, Outcome, Round, Tensor

# The relative error takes a pass before and one after; every 50th step they cost nothing.
MEASURE_EVERY = 50


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
        grads: Sequence[Array],
        state: Mapping[str, Mapping[str, Array]],
        context: Context,
    ) -> Exchange:
        """Sum ``grads`` over all ranks; see ``Scheme.exchange``."""
        message, residuals, energy = self._encode(
            tensors, grads, state.get("residual", {}), context.step % MEASURE_EVERY == 0
        )
        gathered = yield Round("allgather", message)
        payloads = list(wire.split_payloads(gathered))
        expected = context.world_size * len(tensors)
        if len(payloads) != expected:
            raise PayloadError(f"{len(payloads)} payloads arrived, {expected} were expected")
        headers = [wire.read_header(payload) for payload in payloads]
        finite = all(header.finite for header in headers)
        sums = list(self._decode(tensors, payloads))
        if finite and self.codec.may_overflow(headers):
            finite = all(np.isfinite(total).all() for total in sums)
        new_state = {"residual": residuals} if self.error_feedback else {}
        return Outcome(sums, new_state, finite, energy)

    def _encode(
        self,
        tensors: Sequence[Tensor],
        grads: Sequence[Array],
        residuals: Mapping[str, Array],
        measure: bool,
    ) -> tuple[Array, dict[str, Array], tuple[float, float] | None]:
        """Return (the bucket's message, the new residuals, the energies if measured)."""
        plans = [self.codec.plan(tensor.shape) for tensor in tensors]
        slots = np.cumsum([0] + [wire.align(plan.payload_nbytes) for plan in plans])
        message = np.zeros(slots[-1], np.uint8)
        left: dict[str, Array] = {}
        wanted_energy = left_energy = 0.0
        keep = self.error_feedback or measure
        for tensor, plan, grad, begin in zip(tensors, plans, grads, slots, strict=False):
            kernels = backend_for(grad)
            coeffs = self._compensated(tensor, grad, residuals.get(tensor.name), kernels)
            energy = _energy(self.codec, plan, coeffs) if measure else 0.0
            if keep and coeffs is grad:
                coeffs = grad.copy()  # it becomes the residual; the gradient is not ours
            encoded = self.codec.encode_coeffs(
                coeffs,
                tensor.shape,
                kernels=kernels,
                keep_residual=keep,
                out=message[begin : begin + plan.payload_nbytes],
            )
            if encoded.residual is not None:
                left[tensor.name] = encoded.residual
                wanted_energy += energy
                left_energy += _energy(self.codec, plan, encoded.residual) if measure else 0.0
        return message, left, (wanted_energy, left_energy) if measure else None

    def _compensated(
        self, tensor: Tensor, grad: Array, residual: Array | None, kernels: ModuleType
    ) -> Array:
        """Return the coefficients of ``grad`` plus what earlier steps left over."""
        coeffs = self.codec.coeffs_of(grad, tensor.shape, kernels)
        return coeffs if residual is None else coeffs + residual

    def _decode(self, tensors: Sequence[Tensor], payloads: Sequence[Array]) -> Iterator[Array]:
        for place, tensor in enumerate(tensors):
            try:
                yield self.codec.decode_sum(payloads[place :: len(tensors)]).reshape(-1)
            except PayloadError as error:
                raise PayloadError(f"tensor {tensor.name!r}: {error} (payload = rank)") from error

    def sent_nbytes(self, tensor: Tensor) -> int:
        """Return the bytes that a rank hands to collectives for ``tensor`` in each step."""
        return wire.align(self.codec.plan(tensor.shape).payload_nbytes)

    def residual(self, state: Mapping[str, Mapping[str, Array]], tensor: Tensor) -> Array:
        """Return what is not sent yet of ``tensor``, float32 in its shape."""
        carried = state.get("residual", {}).get(tensor.name)
        plan = self.codec.plan(tensor.shape)
        if carried is None:
            return np.zeros(tensor.shape, np.float32)
        if plan.layout is not wire.Layout.RAW:
            carried = self.codec.transform.inverse(carried, plan.numel, backend_for(carried))
        return carried.reshape(tensor.shape)


def _energy(codec: Codec, plan: wire.Plan, coeffs: Array) -> float:
    """Return the sum of squares of the gradient with these coefficients."""
    if plan.layout is wire.Layout.RAW:
        return float(np.dot(coeffs, coeffs))
    return codec.transform.energy(coeffs)
