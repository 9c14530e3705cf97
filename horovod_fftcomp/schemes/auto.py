"""Auto: per tensor, the transform and bit width of least error at a given compression ratio."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from horovod_fftcomp import wire
from horovod_fftcomp.codec.backend import load_backend
from horovod_fftcomp.codec.quantizers import LARGEST_FINITE_BITS, RangeFloat
from horovod_fftcomp.codec.sparse import Codec
from horovod_fftcomp.codec.sparsifiers import TopK
from horovod_fftcomp.codec.transforms import BlockDCT, BlockFFT, Identity, Transform
from horovod_fftcomp.kernels.ops import Feedback
from horovod_fftcomp.schemes import Context, Exchange, Grads, Round, on_the_host
from horovod_fftcomp.schemes.allgather import gather, serves
from horovod_fftcomp.schemes.shards import SHARD_RESIDUAL, fold
from horovod_fftcomp.schemes.state import LowPass
from horovod_fftcomp.types import Array, OldState, Tensor, Tensors
from horovod_fftcomp.wire.spec import spec_of

TRANSFORMS: tuple[Transform, ...] = (
    Identity(), BlockFFT(64), BlockFFT(256), BlockDCT(64), BlockDCT(256),
)  # fmt: skip
BITS = (3, 4, 5, 6, 8)
# A choice is 1 + index in this list. 2 is Identity with 4 bits.
CANDIDATES = tuple((transform, bits) for transform in TRANSFORMS for bits in BITS)
FIRST_CHOICE = 2
_SAMPLE = 1 << 16  # elements of a tensor that candidates are tried on
_PIECE = 1 << 12  # consecutive ones of them, so that blocks stay blocks
_WORTH_CHANGING = 0.99  # of the present choice's error
# The best candidate of a single gradient may have a quarter more error on later gradients, so the
# errors of this many steps are summed over all ranks: benchmarks/auto_choice.py.
TRIAL_STEPS = 4


@dataclass(frozen=True)
class Auto(LowPass):
    """Send each tensor in 1 / ``ratio`` of its bytes by the candidate with the least error.

    A candidate is a transform and a bit width. In the first ``TRIAL_STEPS`` of every ``every``
    steps all ranks try all candidates on a sample of each gradient and allreduce the relative
    errors; the candidate of the least sum is used until the next trial, and residuals are
    transformed to its domain.
    """

    spec_name = "Auto"
    ratio: float = 50.0
    every: int = 2000
    # No option any more, but the specification, which ranks and states compare, has it.
    gbit_per_s: None = field(default=None, init=False, repr=False)
    error_feedback: bool = True
    tries: bool = False
    begins: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.ratio <= 10_000:
            raise ValueError(f"ratio must lie in [1, 10000], got {self.ratio!r}")
        if type(self.every) is not int or self.every < 1:
            raise ValueError(f"every must be a whole number of steps from 1, got {self.every!r}")
        object.__setattr__(self, "ratio", float(self.ratio))

    @property
    def rounds(self) -> tuple[str, ...]:
        """The collectives of an exchange."""
        return ("allreduce", "allgather") if self.tries else ("allgather",)

    def possible_rounds(self) -> frozenset[tuple[str, ...]]:
        """Return every list of collectives that an exchange may have; see ``Scheme``."""
        trials = [("allreduce",), ()] if self.every > TRIAL_STEPS else [("allreduce",)]
        return frozenset((*trial, "allgather") for trial in trials)

    def at(self, step: int) -> Auto:
        """Return the scheme to run at a step, counted from the first compressed one."""
        place = step % self.every
        return replace(self, tries=place < TRIAL_STEPS, begins=place == 0)

    def exchange(
        self, tensors: Tensors, grads: Grads, state: OldState, context: Context
    ) -> Exchange:
        """Sum ``grads`` over all ranks; see ``Scheme.exchange``."""
        chosen = [_chosen(state, tensor) for tensor in tensors]
        trials = dict(state.get("trials", {}))
        if self.tries:
            context, grads, state = on_the_host(context, grads, state)
            own = [self._tried(t, grad) for t, grad in zip(tensors, grads, strict=True)]
            summed = yield Round("allreduce", np.concatenate(own))
            for tensor, new in zip(tensors, np.split(summed, len(tensors)), strict=True):
                before = None if self.begins else trials.get(tensor.name)
                trials[tensor.name] = new.copy() if before is None else before + new
            decided = self._decided(tensors, chosen, trials)
            for tensor, present, choice in zip(tensors, chosen, decided, strict=True):
                state = self._moved(state, tensor, present, choice)
            chosen = decided
        choices = {t.name: np.array([c], np.uint8) for t, c in zip(tensors, chosen, strict=True)}
        codecs = [self.codec(t.shape, c) for t, c in zip(tensors, chosen, strict=True)]
        feedback = Feedback(self.error_feedback, beta=self.beta)
        outcome, *_ = yield from gather(codecs, tensors, grads, state, context, feedback)
        return outcome._replace(state={**outcome.state, "choice": choices, "trials": trials})

    def runs_on_device(self, tensors: Tensors) -> bool:
        """Return whether a GPU can compute the exchange for every choice; see ``Scheme``.

        In trials this scheme itself copies arrays to the host.
        """
        return all(_are_served(t.shape, self.ratio) for t in tensors)

    def samples(self, shape: tuple[int, ...]) -> list[Codec]:
        """Return codecs of a few candidates that cover all transforms and all bit widths."""
        return [self.codec(shape, c) for c in range(1, len(CANDIDATES) + 1, len(BITS) + 1)]

    def codec(self, shape: tuple[int, ...], choice: int) -> Codec:
        """Return the codec of a choice for tensors of ``shape``, at the largest density."""
        transform, bits = CANDIDATES[choice - 1]
        return _codec(transform, bits, shape, self.ratio)

    def codec_of(self, tensor: Tensor, state: OldState) -> Codec:
        """Return the codec of the present choice of a tensor."""
        return self.codec(tensor.shape, _chosen(state, tensor))

    def _moved(self, state: OldState, tensor: Tensor, old: int, new: int) -> OldState:
        """Return the state with the residual of ``tensor`` in the domain of another choice."""
        codec, after = (self.codec(tensor.shape, choice) for choice in (old, new))
        if tensor.name in state.get(SHARD_RESIDUAL, {}) and codec != after:
            state = fold(state, tensor, codec.coeffs_format(tensor.shape))
        residual = state.get("residual", {}).get(tensor.name)
        if residual is None or codec.transform == after.transform:
            return state
        kernels, numel = load_backend("cpu"), math.prod(tensor.shape)
        elements = codec.transform.inverse(residual, numel, kernels)
        moved = after.transform.forward(elements, None, 0, kernels).array
        return {**state, "residual": {**state["residual"], tensor.name: moved}}

    def _tried(self, tensor: Tensor, grad: Array | None) -> Array:
        """Return each candidate's relative squared error, as many zeros, and a 1.

        Float32, ``[2 * len(CANDIDATES) + 1]``; the 1 counts trials in the sum over ranks. The
        zeros had times once, and keep the format of messages and saved states. The errors of a
        frozen tensor are zeros, so its choice stays.
        """
        tried = np.zeros(2 * len(CANDIDATES) + 1, np.float32)
        lost, tried[-1] = tried[: len(CANDIDATES)], 1
        if grad is not None and grad.size:
            part = _sample_of(grad)
            energy = float(np.square(part, dtype=np.float64).sum()) or 1.0
            for number in range(len(CANDIDATES)):
                codec = self.codec(tensor.shape, number + 1)
                coeffs = codec.coeffs_of(part, part.shape, load_backend("cpu"))
                encoded = codec.encode_coeffs(coeffs, part.shape, kernels=load_backend("cpu"))
                if coeffs.peak > LARGEST_FINITE_BITS:
                    lost[number] = np.nan
                elif encoded.residual is not None:
                    lost[number] = codec.energy(encoded.residual, part.shape) / energy
        return tried

    def _decided(
        self, tensors: Tensors, chosen: Sequence[int], trials: Mapping[str, Array]
    ) -> list[int]:
        """Return the best choice of each tensor from all trials; the same on all ranks."""
        decided = []
        for tensor, present in zip(tensors, chosen, strict=True):
            lost = trials[tensor.name][: len(CANDIDATES)]
            best = 1 + int(np.argmin(lost))
            is_better = lost[best - 1] < _WORTH_CHANGING * lost[present - 1]  # not if one is NaN
            decided.append(best if is_better else present)
        return decided

    def sent_nbytes(self, tensor: Tensor) -> int:
        """Return the payload bytes of ``tensor`` in each step, for the first choice."""
        return wire.align(self.first_codec(tensor).payload_nbytes(tensor.shape))

    def first_codec(self, tensor: Tensor) -> Codec:
        """Return the codec of a tensor before the first trial has been decided."""
        return self.codec(tensor.shape, FIRST_CHOICE)

    def state_format(self, tensor: Tensor) -> str:
        """Return the state's shape and domain in words; see ``Scheme.state_format``."""
        return f"residual of {list(tensor.shape)} by a choice of auto"

    def state_arrays(self, tensor: Tensor, state: OldState) -> Mapping[str, tuple[np.dtype, int]]:
        """Return (dtype, elements) of choice, trials and residual; see ``Scheme``."""
        arrays: dict[str, tuple[np.dtype, int]] = {
            "choice": (np.dtype(np.uint8), 1),
            "trials": (np.dtype(np.float32), 2 * len(CANDIDATES) + 1),
        }
        if self.error_feedback:
            arrays["residual"] = self.codec_of(tensor, state).coeffs_format(tensor.shape)
        return arrays

    def elements(self, residual: Array, state: OldState, tensor: Tensor) -> Array:
        """Return a tensor's residual by element; see ``Scheme``."""
        transform = self.codec_of(tensor, state).transform
        return transform.inverse(residual, math.prod(tensor.shape), load_backend("cpu"))

    def choice_of(self, state: OldState, tensor: Tensor) -> str:
        """Return the present choice of a tensor in words."""
        transform, bits = CANDIDATES[_chosen(state, tensor) - 1]
        return f"{spec_of(transform)}, {bits} bits"


def _chosen(state: OldState, tensor: Tensor) -> int:
    choice = state.get("choice", {}).get(tensor.name)
    if choice is None:
        return FIRST_CHOICE
    if choice[0] > len(CANDIDATES):
        raise ValueError(
            f"the saved choice of {tensor.name!r} is {choice[0]}; auto has 0 to {len(CANDIDATES)}"
        )
    # 0: sent dense, which an option of earlier versions could choose; any residual is by element.
    return int(choice[0]) or FIRST_CHOICE


def _sample_of(flat: Array) -> Array:
    """Return a sample of ``_SAMPLE`` elements in evenly spread pieces; all of a small tensor."""
    if flat.size <= 2 * _SAMPLE:
        return flat
    n_pieces = _SAMPLE // _PIECE
    begins = np.arange(n_pieces) * (flat.size // n_pieces) // _PIECE * _PIECE
    return np.concatenate([flat[begin : begin + _PIECE] for begin in begins])


@functools.lru_cache(1 << 14)
def _codec(transform: Transform, bits: int, shape: tuple[int, ...], ratio: float) -> Codec:
    """Return the codec of the largest density whose payload is at most 1 / ratio of the tensor."""
    n, allowed = transform.n_bins(math.prod(shape)), 4 * math.prod(shape) / ratio
    width = transform.reals_per_bin * bits
    low, high = 1, max(1, n)
    while low < high:
        k = (low + high + 1) // 2
        if wire.make_plan(shape, n, k, width).payload_nbytes <= allowed:
            low = k
        else:
            high = k - 1
    return Codec(transform, TopK(low / max(1, n)), RangeFloat(bits))


@functools.lru_cache(1 << 14)
def _are_served(shape: tuple[int, ...], ratio: float) -> bool:
    """Return whether a GPU can compute the exchange of a tensor by every candidate."""
    codecs = [_codec(transform, bits, shape, ratio) for transform, bits in CANDIDATES]
    return all(serves(codec, [Tensor("", shape)]) for codec in codecs)
