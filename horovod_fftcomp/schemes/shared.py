"""One allreduce of the values at positions that all ranks draw alike: no position is sent."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from horovod_fftcomp.backends import Array, load_backend
from horovod_fftcomp.quantizers import LARGEST_FINITE_BITS
from horovod_fftcomp.schemes import MEASURE_EVERY, Context, Energy, Exchange, Outcome, Round, Tensor
from horovod_fftcomp.sparsifiers import RandomBlock, RandomK


@dataclass(frozen=True)
class Shared:
    """Send the values at ``selection``'s positions; with ``error_feedback`` carry on the others.

    The bytes that a rank sends and receives do not grow with the number of ranks. ``unbiased``
    scales what is sent by n/k, so that its mean over all draws is the gradient. Under error
    feedback that would make residuals grow, so it is refused.
    """

    selection: RandomBlock | RandomK
    error_feedback: bool = True
    unbiased: bool = False
    rounds = ("allreduce",)

    def __post_init__(self) -> None:
        if self.unbiased and self.error_feedback:
            raise ValueError(
                "unbiased=True scales what is sent by n/k, which error feedback would take back "
                "and overshoot; give error_feedback=False with it"
            )

    def exchange(
        self,
        tensors: Sequence[Tensor],
        grads: Sequence[Array | None],
        state: Mapping[str, Mapping[str, Array]],
        context: Context,
    ) -> Exchange:
        """Sum ``grads`` over all ranks; see ``Scheme.exchange``."""
        kernels = load_backend("cpu")
        numels = [math.prod(tensor.shape) for tensor in tensors]
        chosen = [
            self.selection.positions(numel, context.step, tensor.name)
            for tensor, numel in zip(tensors, numels, strict=True)
        ]
        ends = np.cumsum([positions.size for positions in chosen])
        message = kernels.empty(int(ends[-1]))
        shares = np.split(message, ends[:-1])
        carried = state.get("residual", {})
        residuals: dict[str, Array] = {}
        energies: dict[str, Energy] = {}
        measure = context.step % MEASURE_EVERY == 0
        for tensor, grad, positions, share in zip(tensors, grads, chosen, shares, strict=True):
            left, energy = self._encode(grad, carried.get(tensor.name), positions, share, measure)
            if left is not None:
                residuals[tensor.name] = left
            if energy is not None:
                energies[tensor.name] = energy
        reduced = yield Round("allreduce", message)
        sums, finite = [], True
        shares = np.split(reduced, ends[:-1])
        for numel, positions, share in zip(numels, chosen, shares, strict=True):
            total = kernels.empty(numel)
            if kernels.peak_bits(share) <= LARGEST_FINITE_BITS:
                total.fill(0)
                total[positions] = share
            else:
                total.fill(np.nan)  # everywhere, so that nobody takes a step with the rest
                finite = False
            sums.append(total)
        new_state = {"residual": residuals} if self.error_feedback else {}
        return Outcome(sums, new_state, finite, energies)

    def _encode(
        self,
        grad: Array | None,
        residual: Array | None,
        positions: Array,
        share: Array,
        measure: bool,
    ) -> tuple[Array | None, Energy | None]:
        """Write a tensor's values into ``share``; return (what they leave, the energies)."""
        kernels = load_backend("cpu")
        if grad is None:
            share.fill(0)
            return residual, None
        if self.error_feedback:
            values, peak = kernels.add(grad, residual, 0)[:2]
        else:
            values, peak = grad, kernels.peak_bits(grad)
        np.take(values, positions, out=share)
        if peak > LARGEST_FINITE_BITS:
            share.fill(np.nan)  # what is bad may lie where nothing is sent
            return None, None
        energy = self._energy(grad, values, share) if measure else None
        if self.unbiased:
            share *= np.float32(values.size / max(1, positions.size))
        if not self.error_feedback:
            return None, energy
        values[positions] = 0
        return values, energy

    def _energy(self, grad: Array, values: Array, share: Array) -> Energy:
        wanted, sent = float(np.dot(values, values)), float(np.dot(share, share))
        excess = values.size / max(1, share.size) - 1 if self.unbiased else 0.0
        left = max(0.0, wanted - sent) + excess**2 * sent  # rounding may leave less than nothing
        return Energy(float(np.dot(grad, grad)), wanted, left)

    def sent_nbytes(self, tensor: Tensor) -> int:
        """Return the bytes that a rank hands to collectives for ``tensor`` in each step."""
        return 4 * self.selection.count(math.prod(tensor.shape))

    def state_format(self, tensor: Tensor) -> str:
        """Return what a state has to agree in to be this scheme's; see ``Scheme``."""
        return f"residual of {list(tensor.shape)} by element"

    def state_arrays(self, tensor: Tensor) -> Mapping[str, tuple[np.dtype, int]]:
        """Return (dtype, elements) of the residual; see ``Scheme``."""
        if not self.error_feedback:
            return {}
        return {"residual": (np.dtype(np.float32), math.prod(tensor.shape))}

    def residual(self, state: Mapping[str, Mapping[str, Array]], tensor: Tensor) -> Array:
        """Return what is not sent yet of ``tensor``, float32 in its shape."""
        carried = state.get("residual", {}).get(tensor.name)
        if carried is None:
            return np.zeros(tensor.shape, np.float32)
        return carried.reshape(tensor.shape).copy()
