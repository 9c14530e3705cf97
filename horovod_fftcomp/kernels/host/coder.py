"""Coder of a bucket on the host."""

from __future__ import annotations

import math
import operator
import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from horovod_fftcomp import wire
from horovod_fftcomp.codec.methods.signs import SignMethod, bit_of_zero
from horovod_fftcomp.codec.quantizers import LARGEST_FINITE_BITS
from horovod_fftcomp.codec.sparse import Codec
from horovod_fftcomp.codec.transforms import Own, energy_of
from horovod_fftcomp.kernels import cpu
from horovod_fftcomp.kernels.cpu.bucket import BucketCodec
from horovod_fftcomp.kernels.cpu.buffer_pool import in_a_row, zeros
from horovod_fftcomp.kernels.host.momentum import add_momentum, mask_velocity
from horovod_fftcomp.kernels.host.payloads import BucketSum, joined, sum_of, summed
from horovod_fftcomp.kernels.ops import Codecs, EncodedBucket, Feedback, Flags, Summed
from horovod_fftcomp.types import Array, Arrays, OldState, Tensors
from horovod_fftcomp.wire import counter_rng
from horovod_fftcomp.wire.counter_rng import RngKey

Squares = tuple[float, float, float]
_MOST_BUCKETS, _MOST_CODECS = 1024, 4  # of cached coders
_OVERFLOWS = 2.0**127  # see ``may_overflow`` of the codecs


class _One(NamedTuple):
    """Payload and new state of one tensor; ``squares``: see ``EncodedBucket``."""

    payload: Array
    residual: Array | None = None
    velocity: Array | None = None
    squares: Squares | None = None


class HostCoder:
    """Coder of a bucket's payloads on the host; several threads may use one.

    Small tensors with payloads of fixed size are encoded and summed by one call, see
    ``BucketCodec``; the others by a call each.
    """

    def __init__(self, codecs: Codecs, tensors: Tensors, n_ranks: int) -> None:
        self._codecs, self._tensors, self._n_ranks = codecs, tensors, n_ranks
        self._is_fixed = all(codec.has_fixed_size for codec in codecs)
        if not self._is_fixed:
            return
        self._small = BucketCodec(codecs, [tensor.shape for tensor in tensors])
        self._members, self._slices = self._small.members, self._small.slices
        among = set(self._members)
        self._large = [number for number in range(len(tensors)) if number not in among]
        self._gains = np.array([codecs[n].transform.gain for n in self._members], np.float64)
        own = [(codecs[number], tensors[number].name) for number in self._members]
        self._names = counter_rng.named((getattr(codec, "seed", 0), name) for codec, name in own)
        methods = [getattr(codec, "method", None) for codec, _ in own]
        self._signs = [at for at, method in enumerate(methods) if isinstance(method, SignMethod)]

    def encode(
        self, grads: Arrays, state: OldState, at: tuple[int, int], feedback: Feedback, measure: bool
    ) -> EncodedBucket:
        """Return the message of gradients plus residuals, and the new state."""
        done: dict[int, _One] = {}
        message = zeros(self._small.message_nbytes, np.uint8) if self._is_fixed else None
        numbers: Sequence[int] = range(len(self._tensors))
        if message is not None and self._members and feedback.momentum is None and not measure:
            done, numbers = self._encode_small(message, grads, state, at, feedback), self._large
        rooms = self._room(numbers, feedback) if numbers else []
        for number, own in zip(numbers, rooms, strict=True):
            out = None if message is None else message[self._slices[number]]
            one = self._encode(number, grads[number], state, out, at, feedback, measure, own)
            done[number] = one
        ones = [done[number] for number in range(len(self._tensors))]
        if message is None:
            message = joined([one.payload for one in ones])
        squares = {n: one.squares for n, one in done.items() if one.squares is not None}
        return EncodedBucket(
            message,
            [one.residual for one in ones],
            [one.velocity for one in ones],
            (lambda: squares) if measure else None,
        )

    def _room(self, numbers: Sequence[int], feedback: Feedback) -> list[Own]:
        """Return where to write each tensor's coefficients, which become its residual.

        One behind the other in memory: those of a tensor's pieces are joined without a copy.
        """
        if len(numbers) < 2 or not feedback.keep or feedback.momentum is not None:
            return [True] * len(numbers)
        forms = [self._codecs[n].coeffs_format(self._tensors[n].shape) for n in numbers]
        writes = [isinstance(self._codecs[n], Codec) for n in numbers]
        sizes = [n * kind.itemsize // 4 for kind, n in forms]
        reals = in_a_row([size * used for size, used in zip(sizes, writes, strict=True)])
        pairs = zip(reals, forms, writes, strict=True)
        return [array.view(kind) if used else True for array, (kind, _), used in pairs]

    def _encode_small(
        self,
        message: Array,
        grads: Arrays,
        state: OldState,
        at: tuple[int, int],
        feedback: Feedback,
    ) -> dict[int, _One]:
        """Encode all small tensors into ``message``; return their new states by number."""
        old, tensors = state.get("residual", {}), self._tensors
        own = [grads[number] for number in self._members]
        residuals = [old.get(tensors[number].name) for number in self._members]
        keys = counter_rng.draws(self._names, *at) if self._small.draws else None
        if keys is not None and self._signs:
            keys[self._signs] = bit_of_zero(*at)
        options = keys, feedback.keep, feedback.decay, feedback.keeps_sent
        encoded = self._small.encode(own, residuals, message, *options)
        pairs = zip(self._members, encoded.residuals, strict=True)
        return {number: _One(message, residual) for number, residual in pairs}

    def _encode(
        self,
        number: int,
        grad: Array | None,
        state: OldState,
        out: Array | None,
        at: tuple[int, int],
        feedback: Feedback,
        measure: bool,
        own: Own,
    ) -> _One:
        """Encode one tensor, into ``out`` if given; ``own``: as for ``coeffs_of`` of codecs."""
        codec, (name, shape) = self._codecs[number], self._tensors[number]
        residual, velocity = (state.get(k, {}).get(name) for k in ("residual", "velocity"))
        keep, momentum, moved = feedback.keep or measure, feedback.momentum, None
        if grad is None:
            grad, keep, measure = np.zeros(math.prod(shape), np.float32), False, False
            coeffs = codec.coeffs_of(grad, shape, cpu, own=False)
        elif momentum is not None:
            coeffs, moved = add_momentum(codec.plan(shape), grad, residual, velocity, momentum)
        else:
            if residual is not None and feedback.decay < 1:
                residual = _scaled(residual, feedback.decay)
            coeffs = codec.coeffs_of(grad, shape, cpu, residual, keep and own)
        wanted = codec.energy(coeffs.array, shape) if measure else 0.0
        subtract, key = keep and not feedback.keeps_sent, RngKey(at[0], name, at[1])
        payload, new = codec.encode_coeffs(
            coeffs, shape, kernels=cpu, keep_residual=subtract, out=out, rng_key=key
        )
        if keep and feedback.keeps_sent:
            return _One(payload, coeffs.array)
        if moved is not None and new is not None and momentum is not None:
            mask_velocity(momentum, codec.plan(shape), payload, moved)
        squares = None
        if measure and new is not None:
            squares = (energy_of(grad), wanted, codec.energy(new, shape))
        elif measure and moved is not None and coeffs.peak <= LARGEST_FINITE_BITS:
            squares = (energy_of(grad), wanted, 0.0)  # all is sent
        if new is None and feedback.beta < 1 and not codec.has_fixed_size:
            new = np.zeros_like(coeffs.array)  # as a GPU, which does not know that all is sent
        return _One(payload, new if keep and feedback.keep else None, moved, squares)

    def decode_sum(self, gathered: Array, sign: bool) -> Summed:
        """Return the sums of all ranks' messages; PayloadError for corrupt bytes."""
        found = None
        if self._is_fixed and self._members:
            found = self._fixed_sums(gathered)
        if found is None:  # sizes vary, or a payload is not finite or corrupt
            sums, _, finite = summed(self._codecs, self._tensors, gathered, self._n_ranks)
        else:
            sums, _, finite = found
        for total in sums if sign else ():
            cpu.majority_sign(total, self._n_ranks)
        return Summed(sums, Flags(finite), lambda: list(wire.split_payloads(gathered)))

    def _fixed_sums(self, gathered: Array) -> BucketSum | None:
        """Return the sums of payloads that are all finite and as long as expected, else None."""
        small = self._small.sum(gathered, self._n_ranks)
        totals = [total for total in small.totals if total is not None]
        if len(totals) < len(self._members):
            return None
        sums = dict(zip(self._members, totals, strict=True))
        scales = dict(zip(self._members, small.scales.tolist(), strict=True))
        high = small.scales.sum(1, np.float64) * self._gains > _OVERFLOWS
        finite = all(np.isfinite(totals[place]).all() for place in np.flatnonzero(high))
        begins = range(0, gathered.size, self._small.message_nbytes)
        sizes = [math.prod(self._tensors[number].shape) for number in self._large]
        for number, out in zip(self._large, in_a_row(sizes) if sizes else [], strict=True):
            here = self._slices[number]
            payloads = [gathered[b + here.start : b + here.stop] for b in begins]
            headers = [wire.read_header(payload) for payload in payloads]
            one = sum_of(self._codecs[number], self._tensors[number], payloads, headers, out)
            sums[number], scales[number] = one.total, one.scales
            finite = finite and one.finite
        order = range(len(self._tensors))
        return BucketSum([sums[n] for n in order], [scales[n] for n in order], bool(finite))


def _scaled(array: Array, factor: float) -> Array:
    reals = array.view(np.float32)
    out = cpu.empty(reals.size)
    return np.multiply(reals, np.float32(factor), out=out).view(array.dtype)


class HostCoderOps:
    """Ops that encode and decode payloads, with a cache of coders."""

    def __init__(self) -> None:
        self._coders: dict[tuple, list[tuple[Codecs, HostCoder]]] = {}
        self._lock = threading.Lock()

    def coder(self, codecs: Codecs, tensors: Tensors, n_ranks: int) -> HostCoder:
        """Return the coder of a bucket, cached for its last few lists of codecs."""
        key = (tuple(tensors), n_ranks)
        with self._lock:
            recent = self._coders.pop(key, [])
            found = next((pair for pair in recent if _are_same(pair[0], codecs)), None)
            if found is None:
                found = (codecs, HostCoder(codecs, tensors, n_ranks))
            others = [pair for pair in recent if pair is not found]
            self._coders[key] = [found, *others[: _MOST_CODECS - 1]]  # this bucket goes last
            if len(self._coders) > _MOST_BUCKETS:
                del self._coders[next(iter(self._coders))]
        return found[1]


def _are_same(a: Codecs, b: Codecs) -> bool:
    """Return whether codecs are the same objects: comparing their options takes longer."""
    return len(a) == len(b) and all(map(operator.is_, a, b))
