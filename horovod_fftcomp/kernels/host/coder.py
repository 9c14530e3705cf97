"""Coder of a bucket on the host."""

from __future__ import annotations

import functools
import math
import operator
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from horovod_fftcomp import wire
from horovod_fftcomp.codec.base import check_state
from horovod_fftcomp.codec.methods.dither import Dither
from horovod_fftcomp.codec.methods.signs import SignMethod, bit_of_zero
from horovod_fftcomp.codec.quantizers import LARGEST_FINITE_BITS
from horovod_fftcomp.codec.transforms import energy_of
from horovod_fftcomp.kernels import cpu, threads
from horovod_fftcomp.kernels.cpu.bucket import BucketCodec
from horovod_fftcomp.kernels.cpu.buffer_pool import zeros
from horovod_fftcomp.kernels.host.momentum import add_momentum, mask_velocity
from horovod_fftcomp.kernels.host.payloads import BucketSum, joined, sum_of, summed
from horovod_fftcomp.kernels.ops import (
    Codecs,
    EncodedBucket,
    Feedback,
    Flags,
    Into,
    Momentum,
    Summed,
)
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

    Where payloads have a fixed size, ``BucketCodec`` encodes and sums all tensors that it has
    kernels for; the others are taken one after another.
    """

    def __init__(self, codecs: Codecs, tensors: Tensors, n_ranks: int) -> None:
        self._codecs, self._tensors, self._n_ranks = codecs, tensors, n_ranks
        self._is_fixed = all(codec.has_fixed_size for codec in codecs)
        self._members: list[int] = []
        self._others: Sequence[int] = range(len(tensors))
        if not self._is_fixed:
            return
        self._bucket = BucketCodec(codecs, [tensor.shape for tensor in tensors])
        self._members, self._slices = self._bucket.members, self._bucket.slices
        among = set(self._members)
        self._others = [number for number in self._others if number not in among]
        self._gains = np.array([codecs[n].transform.gain for n in self._members], np.float64)
        own = [(codecs[number], tensors[number].name) for number in self._members]
        self._names = counter_rng.named((getattr(codec, "seed", 0), name) for codec, name in own)
        methods = [getattr(codec, "method", None) for codec, _ in own]
        self._signs = [at for at, method in enumerate(methods) if isinstance(method, SignMethod)]
        self._dithers = [at for at, method in enumerate(methods) if isinstance(method, Dither)]

    def encode(
        self, grads: Arrays, state: OldState, at: tuple[int, int], feedback: Feedback, measure: bool
    ) -> EncodedBucket:
        """Return the message of gradients plus residuals, and the new state."""
        message = zeros(self._bucket.message_nbytes, np.uint8) if self._is_fixed else None
        done = self._encode_others(message, grads, state, at, feedback, measure)
        if message is not None and self._members:
            done |= self._encode_members(message, grads, state, at, feedback, measure)
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

    def _encode_others(
        self, message: Array | None, grads: Arrays, state: OldState, *options: Any
    ) -> dict[int, _One]:
        """Encode the other tensors, several at a time, into ``message`` if there is one."""

        def encode(number: int) -> _One:
            one = self._encode(number, grads[number], state, *options)
            if message is not None:
                message[self._slices[number]] = one.payload
            return one

        ones = threads.each(encode, [(n,) for n in self._others]) if self._others else []
        return dict(zip(self._others, ones, strict=True))

    def _encode_members(
        self,
        message: Array,
        grads: Arrays,
        state: OldState,
        at: tuple[int, int],
        feedback: Feedback,
        measure: bool,
    ) -> dict[int, _One]:
        """Encode the bucket's members into ``message``; return their new states by number."""
        own = [grads[number] for number in self._members]
        residuals = self._residuals(state.get("residual", {}))
        moved: Arrays = [None] * len(own)
        if feedback.momentum is not None:
            own, moved = self._moved(own, residuals, state.get("velocity", {}), feedback.momentum)
            residuals = [None] * len(own)
        keys = self._keys(*at) if self._bucket.draws else None
        wanted: Arrays = []
        encode = functools.partial(self._bucket.encode, own, residuals, decay=feedback.decay)
        if measure:  # the coefficients that are sent below; this message is thrown away
            wanted = encode(np.zeros_like(message), keys, keeps_sent=True).residuals
        keep = feedback.keep or measure
        encoded = encode(message, keys, keep=keep, keeps_sent=feedback.keeps_sent)
        done = {}
        for place, number in enumerate(self._members):
            residual, velocity, squares = encoded.residuals[place], moved[place], None
            payload = message[self._slices[number]]
            finite = encoded.peaks[place] <= LARGEST_FINITE_BITS
            if feedback.momentum is not None and velocity is not None and residual is not None:
                plan = self._codecs[number].plan(self._tensors[number].shape)
                mask_velocity(feedback.momentum, plan, payload, velocity)
            is_sent = residual is None and velocity is not None and finite  # all of it
            if measure and not feedback.keeps_sent and (residual is not None or is_sent):
                energy, shape = self._codecs[number].energy, self._tensors[number].shape
                before = energy(wanted[place], shape), energy(residual, shape)
                squares = energy_of(grads[number]), *before
            kept = residual if feedback.keep else None
            done[number] = _One(payload, kept, velocity, squares)
        return done

    def _residuals(self, old: Mapping[str, Array]) -> list[Array | None]:
        """Return the members' residuals; those of tensors that are now sent as they are, too."""
        found = [old.get(self._tensors[number].name) for number in self._members]
        for place in self._bucket.raw:
            if (residual := found[place]) is not None:
                number = self._members[place]
                codec, shape = self._codecs[number], self._tensors[number].shape
                check_state("residual", residual, codec.coeffs_format(shape))
                found[place] = codec.transform.inverse(residual, math.prod(shape), cpu)
        return found

    def _moved(
        self, grads: Arrays, residuals: Arrays, old: Mapping[str, Array], momentum: Momentum
    ) -> tuple[list[Array | None], list[Array | None]]:
        """Return each member's residual plus velocity, and its new velocity."""
        sums: list[Array | None] = [None] * len(grads)
        moved: list[Array | None] = [None] * len(grads)
        for place, number in enumerate(self._members):
            grad = grads[place]
            if grad is not None:
                velocity = old.get(self._tensors[number].name)
                coeffs, moved[place] = add_momentum(grad, residuals[place], velocity, momentum)
                sums[place] = coeffs.array
        return sums, moved

    def _keys(self, step: int, rank: int) -> Array:
        """Return the members' keys of random numbers, uint64; see ``key_at`` of the codecs."""
        keys = counter_rng.draws(self._names, step, rank)
        if self._signs:
            keys[self._signs] = bit_of_zero(step, rank)
        if self._dithers:
            high = counter_rng.draws(self._names, step, 0)[self._dithers] & ~np.uint64(0xFFFFFFFF)
            keys[self._dithers] = high | np.uint64(counter_rng.spaced(rank))
        return keys

    def _encode(
        self,
        number: int,
        grad: Array | None,
        state: OldState,
        at: tuple[int, int],
        feedback: Feedback,
        measure: bool,
    ) -> _One:
        """Encode one tensor."""
        assert feedback.momentum is None  # whose codecs have kernels of buckets
        codec, (name, shape) = self._codecs[number], self._tensors[number]
        residual, keep = state.get("residual", {}).get(name), feedback.keep or measure
        if grad is None:
            grad, keep, measure = np.zeros(math.prod(shape), np.float32), False, False
            coeffs = codec.coeffs_of(grad, shape, cpu, own=False)
        else:
            if residual is not None and feedback.decay < 1:
                residual = residual * np.float32(feedback.decay)
            coeffs = codec.coeffs_of(grad, shape, cpu, residual, keep)
        wanted = codec.energy(coeffs.array, shape) if measure else 0.0
        subtract, key = keep and not feedback.keeps_sent, RngKey(at[0], name, at[1])
        payload, new = codec.encode_coeffs(
            coeffs, shape, kernels=cpu, keep_residual=subtract, rng_key=key
        )
        if keep and feedback.keeps_sent:
            return _One(payload, coeffs.array)
        squares = None
        if measure and new is not None:
            squares = (energy_of(grad), wanted, codec.energy(new, shape))
        if new is None and feedback.beta < 1 and not codec.has_fixed_size:
            new = np.zeros_like(coeffs.array)  # as a GPU, which does not know that all is sent
        return _One(payload, new if keep and feedback.keep else None, None, squares)

    def decode_sum(self, gathered: Array, sign: bool, into: Into | None = None) -> Summed:
        """Return the sums of all ranks' messages; PayloadError for corrupt bytes."""
        found = None
        if self._members:
            found = self._fixed_sums(gathered, None if sign or self._others else into)
        if found is None:  # sizes vary, or a payload is not finite or corrupt
            found = summed(self._codecs, self._tensors, gathered, self._n_ranks)
        sums, _, finite = found
        for total in sums if sign else ():
            cpu.majority_sign(total, self._n_ranks)
        return Summed(sums, Flags(finite), lambda: list(wire.split_payloads(gathered)))

    def _fixed_sums(self, gathered: Array, into: Into | None) -> BucketSum | None:
        """Return the sums of payloads that are all finite and as long as expected, else None."""
        there = () if into is None else ([into.arrays[n] for n in self._members], into.factor)
        found = self._bucket.sum(gathered, self._n_ranks, *there)
        totals = [total for total in found.totals if total is not None]
        if len(totals) < len(self._members):
            return None
        sums = dict(zip(self._members, totals, strict=True))
        scales = dict(zip(self._members, found.scales.tolist(), strict=True))
        high = found.scales.sum(1, np.float64) * self._gains > _OVERFLOWS
        finite = all(np.isfinite(totals[place]).all() for place in np.flatnonzero(high))
        begins = range(0, gathered.size, self._bucket.message_nbytes)
        for number in self._others:
            here = self._slices[number]
            payloads = [gathered[b + here.start : b + here.stop] for b in begins]
            headers = [wire.read_header(payload) for payload in payloads]
            one = sum_of(self._codecs[number], self._tensors[number], payloads, headers)
            sums[number], scales[number] = one.total, one.scales
            finite = finite and one.finite
        order = range(len(self._tensors))
        return BucketSum([sums[n] for n in order], [scales[n] for n in order], bool(finite))


class HostCoderOps:
    """Ops that encode and decode payloads, with a cache of coders."""

    def __init__(self) -> None:
        self.coders: dict[tuple, list[tuple[Codecs, HostCoder]]] = {}
        self._lock = threading.Lock()

    def coder(self, codecs: Codecs, tensors: Tensors, n_ranks: int) -> HostCoder:
        """Return the coder of a bucket, cached for its last few lists of codecs."""
        key = (tuple(tensors), n_ranks, threads.get_num_threads())
        with self._lock:
            recent = self.coders.pop(key, [])
            found = next((pair for pair in recent if _are_same(pair[0], codecs)), None)
            if found is None:
                found = (codecs, HostCoder(codecs, tensors, n_ranks))
            others = [pair for pair in recent if pair is not found]
            self.coders[key] = [found, *others[: _MOST_CODECS - 1]]  # this bucket goes last
            if len(self.coders) > _MOST_BUCKETS:
                del self.coders[next(iter(self.coders))]
        return found[1]


def _are_same(a: Codecs, b: Codecs) -> bool:
    """Return whether codecs are the same objects: comparing their options takes longer."""
    return len(a) == len(b) and all(map(operator.is_, a, b))
