"""Auto: the transforms, bit widths and densities of least error at a given compression ratio."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from horovod_fftcomp import wire
from horovod_fftcomp.codec.backend import cpu_kernels
from horovod_fftcomp.codec.quantizers import RangeFloat, decode_range, encode_range, pattern_of
from horovod_fftcomp.codec.sparse import Codec
from horovod_fftcomp.codec.sparsifiers import TopK
from horovod_fftcomp.codec.transforms import BlockDCT, BlockFFT, Identity, Transform, energy_of
from horovod_fftcomp.errors import check_whole
from horovod_fftcomp.kernels.ops import Feedback
from horovod_fftcomp.schemes import TRIAL_STEPS, Context, Exchange, Grads, Round, Tuner
from horovod_fftcomp.schemes.allgather import gather, serves
from horovod_fftcomp.schemes.shards import SHARD_RESIDUAL, fold
from horovod_fftcomp.schemes.state import LowPass, on_the_host
from horovod_fftcomp.schemes.state_array import UINT8, StateArray, StateArrays, coefficients
from horovod_fftcomp.types import Array, Choice, Coding, OldState, Tensor, Tensors
from horovod_fftcomp.wire.positions import Layout
from horovod_fftcomp.wire.spec import spec_of

TRANSFORMS: tuple[Transform, ...] = (
    Identity(), BlockFFT(64), BlockFFT(256), BlockDCT(64), BlockDCT(256),
)  # fmt: skip
# A choice is 1 + index in this list, in saved states too. 2 is Identity with 4 bits.
CANDIDATES = (
    *((transform, bits) for transform in TRANSFORMS for bits in (3, 4, 5, 6, 8)),
    *((transform, 2) for transform in TRANSFORMS),
)
FIRST_CHOICE = 2
# No FFT, as earlier versions chose: none of them lost less than a DCT. By transform.
TRIED = tuple(
    [1 + n for n, (transform, _) in enumerate(CANDIDATES) if transform == tried]
    for tried in TRANSFORMS
    if not isinstance(tried, BlockFFT)
)
_ORDER = [choice for choices in TRIED for choice in choices]
# Bytes that a tensor may get, as a share of what it would get if all were compressed alike.
SHARES = tuple(2.0 ** (n / 2) for n in range(-6, 7))
EVEN = SHARES.index(1.0)
_SAMPLE = 1 << 16  # elements of a tensor that candidates are tried on
_PIECE = 1 << 12  # consecutive ones of them, so that blocks stay blocks
_ROUNDED = 256  # of the coefficients sent, whose rounding is looked at
_WORTH_CHANGING = 0.99  # of the present choice's error
_N_TRIALS = len(_ORDER) * len(SHARES)
_OLD_TRIALS = 51  # of versions without shares


class _Point(NamedTuple):
    """Bytes of a tensor's payload, its weighted error, and by what share and choice."""

    nbytes: int
    error: float
    share: int
    choice: int


@dataclass(frozen=True)
class Auto(LowPass):
    """Send all tensors in 1 / ``ratio`` of their bytes, so that the sum of errors is least.

    A candidate is a transform and a bit width; a share of the bytes gives it a density. In the
    first ``TRIAL_STEPS`` of every ``every`` steps all ranks estimate the errors of all candidates
    with all shares on a sample of each gradient, and allreduce them. After each of these steps the
    bytes are given to the tensors where they save most. Residuals are transformed to the domain of
    a new choice. Source of the allocation: Markov et al., MLSys 2024 (L-GreCo).
    """

    spec_name = "Auto"
    ratio: float = 50.0
    every: int = 2000
    error_feedback: bool = True
    # Number of the present series of trials, from 1; 0 between two. No option.
    series: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.ratio <= 10_000:
            raise ValueError(f"ratio must lie in [1, 10000], got {self.ratio!r}")
        check_whole("every", self.every, 1)
        object.__setattr__(self, "ratio", float(self.ratio))

    @property
    def rounds(self) -> tuple[str, ...]:
        """The collectives of an exchange."""
        return ("allreduce", "allgather") if self.series else ("allgather",)

    def at(self, step: int) -> Auto:
        """Return the scheme to run at a step, counted from the first compressed one."""
        number, place = divmod(step, self.every)
        series = number + 1 if place < TRIAL_STEPS else 0
        return self if series == self.series else replace(self, series=series)

    def exchange(
        self, tensors: Tensors, grads: Grads, state: OldState, context: Context
    ) -> Exchange:
        """Sum ``grads`` over all ranks; see ``Scheme.exchange``."""
        trials = dict(state.get("errors", {}))
        if self.series:
            context, grads, state = on_the_host(context, grads, state)
            own = [self._tried(t, grad, context) for t, grad in zip(tensors, grads, strict=True)]
            summed = yield Round("allreduce", np.concatenate(own))
            for tensor, new in zip(tensors, np.split(summed, len(tensors)), strict=True):
                errors, before = np.append(new, np.float32(self.series)), trials.get(tensor.name)
                if before is not None and before[-1] == self.series:
                    errors[:-1] += before[:-1]
                trials[tensor.name] = errors
        codecs = [self.codec_of(tensor, state) for tensor in tensors]
        feedback = Feedback(self.error_feedback, beta=self.beta)
        outcome, *_ = yield from gather(codecs, tensors, grads, state, context, feedback)
        kept = {kind: dict(state.get(kind, {})) for kind in ("choice", "share")}
        return outcome._replace(state={**outcome.state, **kept, "errors": trials})

    @property
    def tuner(self) -> Tuner:
        """Chooses after each step with trials; see ``Scheme``."""
        return Tuner(self, self.series > 0, self._with_choices, self._choice)

    def _with_choices(self, parts: Sequence[tuple[Tensors, OldState]]) -> list[OldState]:
        """Return new states with the choices of least total error; see ``Tuner``."""
        known = [
            [tensor for tensor in tensors if tensor.name in state.get("errors", {})]
            for tensors, state in parts
        ]
        pairs = [(t, state) for ts, (_, state) in zip(known, parts, strict=True) for t in ts]
        budget = int(sum(4 * tensor.numel for tensor, _ in pairs) / self.ratio)
        points = iter(allocated([self._curve(*pair) for pair in pairs], budget))
        states = []
        for tensors, (_, state) in zip(known, parts, strict=True):
            for tensor, point in zip(tensors, points, strict=False):
                state = self.moved_to(state, tensor, point)
            states.append(state)
        return states

    def _curve(self, tensor: Tensor, state: OldState) -> list[_Point]:
        """Return the point of least error for each share of the bytes, by ascending bytes.

        Where there are no errors to compare it is the present choice.
        """
        *tried, count, _ = state["errors"][tensor.name].astype(np.float64)
        errors = np.reshape(tried, (len(_ORDER), len(SHARES))) * (tensor.numel / count)
        present, points = _chosen(state, tensor), []
        if not errors.any():
            nbytes = wire.align(self.codec_of(tensor, state).payload_nbytes(tensor.shape))
            return [_Point(nbytes, 0.0, _share(state, tensor), present)]
        for share, lost in enumerate(errors.T):
            choice = _ORDER[int(np.argmin(lost))]
            error = float(lost.min())
            if present in _ORDER and error >= _WORTH_CHANGING * lost[_ORDER.index(present)]:
                choice, error = present, float(lost[_ORDER.index(present)])
            nbytes = wire.align(
                self.codec(tensor.shape, choice, share).payload_nbytes(tensor.shape)
            )
            points.append(_Point(nbytes, error, share, choice))
        return points

    def runs_on_device(self, tensors: Tensors) -> bool:
        """Return whether a GPU can compute the exchange for every choice; see ``Scheme``.

        In trials this scheme itself copies arrays to the host.
        """
        return all(_are_served(t.shape, self.ratio) for t in tensors)

    def samples(self, shape: tuple[int, ...], share: int = EVEN) -> list[Codec]:
        """Return codecs of a few candidates that cover all transforms and all bit widths."""
        return [self.codec(shape, choice, share) for choice in (1, 7, 13, 19, 25, 26)]

    def codec(self, shape: tuple[int, ...], choice: int = FIRST_CHOICE, share: int = EVEN) -> Codec:
        """Return the codec of a choice for tensors of ``shape``, with a share of the bytes."""
        transform, bits = CANDIDATES[choice - 1]
        return _codec(transform, bits, shape, self.ratio / SHARES[share])

    def codec_of(self, tensor: Tensor, state: OldState) -> Codec:
        """Return the codec of the present choice of a tensor."""
        return self.codec(tensor.shape, _chosen(state, tensor), _share(state, tensor))

    def moved_to(self, state: OldState, tensor: Tensor, to: _Point) -> OldState:
        """Return the state with another choice, and the residual of ``tensor`` in its domain."""
        codec, after = self.codec_of(tensor, state), self.codec(tensor.shape, to.choice, to.share)
        if tensor.name in state.get(SHARD_RESIDUAL, {}) and codec != after:
            state = fold(state, tensor, *codec.coeffs_format(tensor.shape))
        new = {"choice": np.array([to.choice], np.uint8), "share": np.array([to.share], np.uint8)}
        residual = state.get("residual", {}).get(tensor.name)
        if residual is not None and codec.transform != after.transform:
            kernels, numel = cpu_kernels(), tensor.numel
            elements = codec.transform.inverse(residual, numel, kernels)
            new["residual"] = after.transform.forward(elements, None, 0, kernels).array
        changed = {kind: {**state.get(kind, {}), tensor.name: new[kind]} for kind in new}
        return {**state, **changed}

    def _tried(self, tensor: Tensor, grad: Array | None, context: Context) -> Array:
        """Return the error of each candidate by share, for this rank's gradient, and a 1.

        Float32, ``[_N_TRIALS + 1]``. An error is the share of the squares that is lost, times the
        root mean square: between the squared error and what Adam makes of it, the relative error.
        The 1 counts trials in the sum over ranks. Errors are 0 for a frozen tensor, for a sample of
        zeros, and for a gradient with NaN or Inf, whose step is dropped.
        """
        tried = np.zeros(_N_TRIALS + 1, np.float32)
        tried[-1] = 1
        size = energy_of(grad) / tensor.numel if grad is not None and grad.size else 0.0
        if not 0 < size < math.inf:
            return tried
        assert grad is not None
        part, lost = sample_of(grad, context.step), np.ones((len(TRIED), _N_TRIALS // len(TRIED)))
        if not part.any():
            return tried
        for row, choices in zip(lost, TRIED, strict=True):
            transform = CANDIDATES[choices[0] - 1][0]
            coeffs = np.abs(transform.forward(part, None, 0, cpu_kernels()).array)
            sizes = np.sort(coeffs)[::-1]
            sums = np.cumsum(np.square(sizes, dtype=np.float64))
            if sums[-1] > 0:  # else a transform has lost all values, as they are denormal
                pairs = itertools.product(choices, range(len(SHARES)))
                codecs = [self.codec(tensor.shape, *pair) for pair in pairs]
                row[:] = _lost(codecs, tensor.shape, sizes, sums)
        tried[:-1] = lost.reshape(-1) * (math.sqrt(size) / context.loss_scale)
        return tried

    def sent_nbytes(self, tensor: Tensor) -> int:
        """Return the payload bytes of ``tensor`` in each step, for the first choice."""
        return wire.align(self.codec(tensor.shape).payload_nbytes(tensor.shape))

    def share_nbytes(self, tensor: Tensor, state: OldState, world_size: int) -> float:
        """Return the payload bytes of ``tensor`` for the present choice; see ``Scheme``."""
        return self._choice(state, tensor).sent_nbytes

    def state_arrays(self, tensor: Tensor, state: OldState) -> StateArrays:
        """Return choice, share, errors and residual; see ``Scheme``."""
        words = f"residual of {list(tensor.shape)} by a choice of auto"
        residual = coefficients(self.codec_of(tensor, state), tensor, self.error_feedback)
        return {
            "choice": StateArray(1, dtype=UINT8),
            "share": StateArray(1, dtype=UINT8),
            "errors": StateArray(_N_TRIALS + 2),
            "trials": StateArray(_OLD_TRIALS),  # accepted, and not kept
            "residual": residual._replace(words=words),
        }

    def _choice(self, state: OldState, tensor: Tensor) -> Choice:
        """Return the present choice for a tensor; see ``Tuner``."""
        transform, bits = CANDIDATES[_chosen(state, tensor) - 1]
        codec = self.codec_of(tensor, state)
        density = _top_k(codec).density
        words = f"{spec_of(transform)}, {bits} bits, density {density:.2g}"
        return Choice(words, wire.align(codec.payload_nbytes(tensor.shape)))


def _chosen(state: OldState, tensor: Tensor) -> int:
    # 0: sent dense, which an option of earlier versions could choose; any residual is by element.
    return _saved("choice", state, tensor, FIRST_CHOICE, len(CANDIDATES)) or FIRST_CHOICE


def _share(state: OldState, tensor: Tensor) -> int:
    return _saved("share", state, tensor, EVEN, len(SHARES) - 1)


def _saved(kind: str, state: OldState, tensor: Tensor, first: int, most: int) -> int:
    saved = state.get(kind, {}).get(tensor.name)
    if saved is None:
        return first
    if saved[0] > most:
        raise ValueError(f"the saved {kind} of {tensor.name!r} is {saved[0]}; auto has 0 to {most}")
    return int(saved[0])


def _top_k(codec: Codec) -> TopK:
    assert isinstance(codec.sparsifier, TopK)
    return codec.sparsifier


def _lost(codecs: Sequence[Codec], shape: tuple[int, ...], sizes: Array, sums: Array) -> Array:
    """Return the relative squared errors of codecs, estimated from a sample of a tensor.

    ``sizes``: magnitudes of the sample's coefficients, descending. ``sums``: of their squares. Of
    what would be sent, evenly spread values are rounded.
    """
    layouts = [codec.plan(shape).layout for codec in codecs]
    counts = np.array([_top_k(codec).count(sizes.size) for codec in codecs])
    sent = sizes[np.outer(counts - 1, np.linspace(0, 1, _ROUNDED)).astype(np.int64)]
    codings = []
    for codec, layout, (first, *_, last) in zip(codecs, layouts, sent, strict=True):
        assert isinstance(codec.quantizer, RangeFloat)
        key = 0 if layout is Layout.ALL else pattern_of(last)
        grid = codec.quantizer.grid(key, pattern_of(first), False)
        codings.append(codec.quantizer.coding(float(first), grid))
    columns = (np.array(field)[:, None] for field in zip(*codings, strict=True))
    coding = Coding._make(columns)
    arrived = decode_range(encode_range(sent, coding), coding)
    rounding = np.square(sent - arrived, dtype=np.float64).mean(1) * counts
    is_exact = np.array([layout is Layout.RAW for layout in layouts])
    return np.where(is_exact, 0, (sums[-1] - sums[counts - 1] + rounding) / sums[-1])


def allocated(curves: Sequence[Sequence[_Point]], budget: int) -> list[_Point]:
    """Return a point of each curve: the least sum of errors found within ``budget`` bytes.

    All begin with the fewest bytes; then the steps along the lower convex hulls that save the most
    error by byte are taken as long as bytes are left. What is left then goes to the first curves
    that can use it. Equal on all ranks, since the curves are.
    """
    hulls = [_hull(curve) for curve in curves]
    points = [hull[0] for hull in hulls]
    left = budget - sum(point.nbytes for point in points)
    steps = [
        (_slope(*pair), number, *pair)
        for number, hull in enumerate(hulls)
        for pair in itertools.pairwise(hull)
    ]
    for _, number, here, there in sorted(steps, key=operator.itemgetter(0), reverse=True):
        if points[number] is here and there.nbytes - here.nbytes <= left:
            points[number], left = there, left - there.nbytes + here.nbytes
    for number, here in enumerate(points):
        fitting = [point for point in curves[number] if point.nbytes - here.nbytes <= left]
        points[number] = min([here, *fitting], key=operator.attrgetter("error"))
        left -= points[number].nbytes - here.nbytes
    return points


def _hull(curve: Sequence[_Point]) -> list[_Point]:
    """Return the lower convex hull of a curve: fewer errors with more bytes, by falling slopes."""
    hull: list[_Point] = []
    for point in sorted(curve):
        if hull and point.error >= hull[-1].error:
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-1], point):
            hull.pop()
        hull.append(point)
    return hull


def _slope(here: _Point, there: _Point) -> float:
    return (here.error - there.error) / max(1, there.nbytes - here.nbytes)


def sample_of(flat: Array, step: int) -> Array:
    """Return a sample of about ``_SAMPLE`` elements in evenly spread pieces, others in each step.

    A small tensor is returned whole.
    """
    if flat.size <= 2 * _SAMPLE:
        return flat
    stride = flat.size // (_SAMPLE // _PIECE)
    begins = np.arange(step * _PIECE % stride, flat.size, stride) // _PIECE * _PIECE
    return np.concatenate([flat[begin : begin + _PIECE] for begin in begins])


@functools.lru_cache(1 << 16)  # more than 200 shapes have candidates and shares
def _codec(transform: Transform, bits: int, shape: tuple[int, ...], ratio: float) -> Codec:
    """Return the codec of the largest density that needs at most 1 / ratio of a tensor's bytes."""
    n, allowed = transform.n_bins(math.prod(shape)), 4 * math.prod(shape) / ratio
    width = transform.reals_per_bin * bits
    low, high = 1, max(1, n)
    while low < high:
        k = (low + high + 1) // 2
        if wire.align(wire.make_plan(shape, n, k, width).payload_nbytes) <= allowed:
            low = k
        else:
            high = k - 1
    return Codec(transform, TopK(low / max(1, n)), RangeFloat(bits))


@functools.lru_cache(1 << 14)
def _are_served(shape: tuple[int, ...], ratio: float) -> bool:
    """Return whether a GPU can compute the exchange of a tensor by every candidate."""
    options = itertools.product(CANDIDATES, (ratio, ratio / SHARES[-1]))
    codecs = (_codec(*candidate, shape, allowed) for candidate, allowed in options)
    return all(serves(codec, [Tensor("", shape)]) for codec in codecs)
