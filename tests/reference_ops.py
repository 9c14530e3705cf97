"""Ops in plain NumPy, tensor by tensor: what the ops of the host and of a GPU have to compute."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from horovod_fftcomp import PayloadError, wire
from horovod_fftcomp.codec.base import check_state
from horovod_fftcomp.codec.methods.sums import moments, ordered_sum
from horovod_fftcomp.kernels import cpu
from horovod_fftcomp.kernels.host import ops as host
from horovod_fftcomp.kernels.ops import EncodedBucket, Flags, Summed
from horovod_fftcomp.kernels.plans import LeftFactors, split
from horovod_fftcomp.wire import positions
from horovod_fftcomp.wire.counter_rng import RngKey
from horovod_fftcomp.wire.positions import Layout
from tests import reference

FLOAT32 = np.dtype(np.float32)
# The transforms of the two backends differ in the last bits: test_transforms has their bounds.
TRANSFORMS = "forward_blocks inverse_blocks sum_blocks".split()
KERNELS = SimpleNamespace(
    **vars(reference) | {name: getattr(cpu, name) for name in TRANSFORMS},
    **dict.fromkeys(("encode_tensor", "sum_payloads"), lambda *_: None),  # one by one
)


def use_reference(monkeypatch):
    """Let schemes on the host compute with ``ReferenceOps`` and the kernels of the reference."""
    monkeypatch.setattr(host, "HOST", ReferenceOps())
    monkeypatch.setitem(sys.modules, "horovod_fftcomp.kernels.cpu", KERNELS)


def is_finite(array):
    return bool(np.isfinite(array).all())


def energy_of(array):
    return 0.0 if array is None else float(np.square(array, dtype=np.float64).sum())


def positions_of(selection, n, step, name):
    """Return the positions, int64, that a random sparsifier draws in a tensor of ``n`` elements."""
    [(factor, first)] = selection.progressions([n], step, [name])
    # In unsigned 64 bits a product is exact below 2**64: n up to 2**32, density up to 1.
    positions = np.arange(selection.count(n), dtype=np.uint64)
    positions = (positions * np.uint64(factor) + np.uint64(first)) % np.uint64(max(1, n))
    return positions.view(np.int64)


def parts_of(array, numels):
    return np.split(array, np.cumsum(numels)[:-1])


class ReferenceCoder:
    """See ``Coder``."""

    def __init__(self, codecs, tensors, n_ranks):
        self.codecs, self.tensors, self.n_ranks = codecs, tensors, n_ranks

    def encode(self, grads, state, at, feedback, measure):
        payloads, residuals, velocities, squares = [], [], [], {}
        for number, (codec, tensor, grad) in enumerate(
            zip(self.codecs, self.tensors, grads, strict=True)
        ):
            old = [state.get(kind, {}).get(tensor.name) for kind in ("residual", "velocity")]
            coeffs, moved = self._coeffs(codec, tensor, grad, *old, feedback)
            whole = coeffs.array.copy()
            payload, left = codec.encode_coeffs(
                coeffs, tensor.shape, kernels=KERNELS, rng_key=RngKey(at[0], tensor.name, at[1])
            )
            payloads.append(payload)
            if moved is not None and feedback.momentum.masking:
                self._mask(codec, tensor, payload, moved)
            if measure and grad is not None and is_finite(whole):
                sums = (codec.energy(array, tensor.shape) for array in (whole, left))
                squares[number] = (energy_of(grad), *sums) if left is not None else None
                if left is None and feedback.momentum is not None:
                    squares[number] = (energy_of(grad), energy_of(whole), 0.0)
            kept = whole if feedback.keeps_sent else left
            if kept is None and feedback.beta < 1 and not codec.has_fixed_size:
                kept = np.zeros_like(whole)  # nothing is left of values that are all sent
            residuals.append(kept if feedback.keep and grad is not None else None)
            velocities.append(moved)
        squares = {number: sums for number, sums in squares.items() if sums is not None}
        padded = [bytes(payload).ljust(wire.align(payload.size), b"\0") for payload in payloads]
        message = np.frombuffer(b"".join(padded), np.uint8)
        return EncodedBucket(message, residuals, velocities, (lambda: squares) if measure else None)

    def _coeffs(self, codec, tensor, grad, residual, velocity, feedback):
        """Return the coefficients of gradient plus residual, and the new velocity or None."""
        n, momentum = math.prod(tensor.shape), feedback.momentum
        if grad is None:
            return codec.coeffs_of(np.zeros(n, np.float32), tensor.shape, KERNELS), None
        if momentum is None:
            if residual is not None:
                decayed = residual.view(np.float32) * np.float32(feedback.decay)
                residual = decayed.view(residual.dtype)
            return codec.coeffs_of(grad.copy(), tensor.shape, KERNELS, residual), None
        for kind, array in (("velocity", velocity), ("residual", residual)):
            check_state(kind, array, (FLOAT32, n))
        plan = codec.plan(tensor.shape)
        k = 0 if plan.layout in (Layout.RAW, Layout.ALL) else plan.k
        return accelerated(grad, velocity, residual, momentum, k)

    def _mask(self, codec, tensor, payload, velocity):
        plan, header = codec.plan(tensor.shape), wire.read_header(payload)
        if header.finite and plan.layout not in (Layout.RAW, Layout.ALL):
            packed = payload[plan.header_nbytes : plan.header_nbytes + plan.positions.nbytes]
            reference.zero_at(velocity, positions.unpack(packed, plan.positions, reference))

    def decode_sum(self, gathered, sign, into=None):
        payloads, sums, finite = list(wire.split_payloads(gathered)), [], True
        for number, (codec, tensor) in enumerate(zip(self.codecs, self.tensors, strict=True)):
            headers, bodies = zip(*payloads[number :: len(self.tensors)], strict=True)
            assert len(headers) == self.n_ranks
            assert {header.shape for header in headers} == {tensor.shape}
            total = codec.decode_sum(bodies).reshape(-1)  # by ``KERNELS``: see ``use_reference``
            finite = finite and is_finite(total)
            if sign:
                reference.majority_sign(total, self.n_ranks)
            sums.append(total)
        return Summed(sums, Flags(finite), lambda: payloads)


def accelerated(grad, velocity, residual, momentum, k):
    factor = 1.0
    if momentum.largest_norm is not None and grad.size:
        square = ordered_sum(moments(grad)[2])
        if not square <= momentum.largest_norm**2:
            factor = momentum.largest_norm / math.sqrt(square)
    options = (momentum.decay, momentum.nesterov, momentum.gain * factor)
    coeffs, new = reference.momentum_accumulate(grad, velocity, residual, *options)
    return reference.topk_threshold(coeffs.array, k, 1), new


class Bucket(NamedTuple):
    """Arrays of an exchange at common positions; ``new``, ``energies``: filled in later."""

    plan: object
    grads: list
    residuals: list
    new: list
    energies: list


class ReferenceOps:
    """See ``Ops``."""

    device = None

    def empty(self, n, dtype=np.float32):
        return np.full(n, 77, dtype)

    def zeros(self, n, dtype=np.float32):
        return np.zeros(n, dtype)

    def put(self, array):
        return array

    get = put

    def checked(self, kind, array, numel):
        check_state(kind, array, (FLOAT32, numel))
        return array

    def join(self, parts, numels, dtype=np.float32):
        zeros = (np.zeros(numel, dtype) for numel in numels)
        pairs = zip(parts, zeros, strict=True)
        return np.concatenate([zero if part is None else part for part, zero in pairs])

    rejoin = join

    def sum_rows(self, values, own, numels, place):
        n = sum(numels)
        total, *others = np.insert(values, place * n, self.join(own, numels)).reshape(-1, max(n, 1))
        total = total.copy()
        for row in others:
            with np.errstate(over="ignore", invalid="ignore"):
                total += row
        return total

    def squares(self, arrays):
        found = [energy_of(array) for array in arrays]
        return lambda: found

    def flags_of(self, values):
        return Flags(is_finite(values))

    def both(self, a, b):
        return Flags(a.finite and b.finite)

    def to_half(self, values, largest, limit):
        if reference.max_abs_bits(values) > largest:
            return np.full(values.size, np.nan, np.float16)
        return reference.to_float16(values, limit)

    def from_half(self, values):
        return reference.from_float16(values)

    def coder(self, codecs, tensors, n_ranks):
        return ReferenceCoder(codecs, tensors, n_ranks)

    def accumulate(self, plan, grads, velocities, residuals, momentum):
        whole, moved = [], []
        for numel, grad, *old in zip(plan.numels, grads, velocities, residuals, strict=True):
            coeffs, new = (None, None) if grad is None else accelerated(grad, *old, momentum, 0)
            whole.append(np.zeros(numel, np.float32) if grad is None else coeffs.array)
            moved.append(new)
        return np.concatenate(whole), moved

    def mix(self, old, new, beta):
        rest, mixed = np.float32(1 - beta), list(new)
        for number, (before, after) in enumerate(zip(old, new, strict=True)):
            if after is not None:
                reals = after.view(np.float32)
                kept = np.zeros_like(reals) if before is None else before.view(np.float32)
                whole = rest * kept + np.float32(beta) * reals
                mixed[number] = (whole + np.float32(0)).view(after.dtype)  # 0 for -0
        return mixed

    def cleared(self, array):
        del array

    def compensate(self, plan, grads, residuals):
        message, whole = np.full(plan.firsts[-1], 77, np.float32), []
        shares = split(message, plan.firsts)
        for matrix, grad, residual, share in zip(
            plan.matrices, grads, residuals, shares, strict=True
        ):
            total = None if grad is None else reference.add_residual(grad, residual, 0).array
            if total is None or not is_finite(total):
                share.fill(0 if total is None else np.nan)
                total = None
            elif not matrix.rank:
                share[:], total = total, share
            whole.append(total)
        return whole, message

    def project(self, plan, whole, right, message):
        parts = zip(plan.matrices, whole, right, split(message, plan.firsts), strict=True)
        for (rows, columns, rank), array, factor, share in parts:
            if array is not None and rank:
                product = array.reshape(rows, columns) @ factor.reshape(columns, rank)
                share[:] = product.reshape(-1)

    def orthonormalize(self, plan, first):
        parts = split(first, plan.firsts)
        bad = [not is_finite(part) for part in parts]
        values = [
            reference.orthonormal(part.reshape(m.rows, m.rank)) if m.rank and not wrong else None
            for m, part, wrong in zip(plan.matrices, parts, bad, strict=True)
        ]
        return LeftFactors(values, bad)

    def project_back(self, plan, whole, left):
        message = np.zeros(plan.seconds[-1], np.float32)
        parts = zip(plan.matrices, whole, *left, split(message, plan.seconds), strict=True)
        for (rows, columns, _), array, factor, wrong, share in parts:
            if wrong:
                share.fill(np.nan)
            elif array is not None and factor is not None:
                share[:] = (array.reshape(rows, columns).T @ factor).reshape(-1)
        return message

    def subtract_product(self, plan, whole, left, own):
        parts = zip(plan.matrices, whole, left.values, split(own, plan.seconds), strict=True)
        for (rows, columns, rank), array, factor, share in parts:
            if array is not None and factor is not None:
                minuend = array.reshape(rows, columns)
                reference.low_rank(factor, share.reshape(columns, rank), minuend)
        pairs = zip(plan.matrices, whole, strict=True)
        return [array if matrix.rank else None for matrix, array in pairs]

    def product(self, plan, left, first, second):
        sums, shares = [], zip(split(first, plan.firsts), split(second, plan.seconds), strict=True)
        for matrix, factor, wrong, (dense, right) in zip(plan.matrices, *left, shares, strict=True):
            if wrong or not is_finite(right):
                sums.append(np.full(matrix.rows * matrix.columns, np.nan, np.float32))
            elif matrix.rank:
                right = right.reshape(matrix.columns, matrix.rank)
                sums.append(reference.low_rank(factor, right, None).reshape(-1))
            else:
                sums.append(dense)
        return sums, Flags(all(map(is_finite, sums)))

    def nonzero_columns(self, plan, second, right):
        found = []
        for m, share, old in zip(plan.matrices, split(second, plan.seconds), right, strict=True):
            new = None
            if old is not None:
                new, old = (array.reshape(m.columns, m.rank) for array in (share, old))
                peaks = np.abs(new).max(0)
                with np.errstate(divide="ignore", invalid="ignore"):
                    exponents = np.clip(np.floor(np.log2(peaks.astype(float))), -127, 126)
                scaled = new * np.exp2(-np.nan_to_num(exponents))
                new = np.where(peaks == 0, old, scaled).astype(np.float32).reshape(-1)
            found.append(new)
        return found

    def common_index(self, plan, grads, residuals, measures):
        del measures
        for kind, arrays in (("gradient", grads), ("residual", residuals)):
            for array, numel in zip(arrays, plan.numels, strict=True):
                check_state(kind, array, (FLOAT32, numel))
        return Bucket(plan, grads, residuals, [], [])

    def _winners(self, bucket):
        """Return the offset of the largest element of each chunk of the bucket, uint32."""
        zeros = (np.zeros(n, np.float32) for n in bucket.plan.numels)
        parts = zip(bucket.grads, bucket.residuals, zeros, strict=True)
        pairs = [(zero, None) if grad is None else (grad, old) for grad, old, zero in parts]
        found = [reference.chunk_winners(*pair, bucket.plan.chunk) for pair in pairs]
        return np.concatenate(found)

    def _located(self, plan, offsets):
        return np.concatenate(
            [
                np.arange(own.size) * plan.chunk + own
                for own in parts_of(offsets.astype(np.int64), plan.counts)
            ]
        )

    def winners(self, bucket, begin, end, nbytes):
        packed = reference.pack_bits(self._winners(bucket)[begin:end], bucket.plan.bits)
        return np.concatenate([packed, np.zeros(nbytes - packed.size, np.uint8)])

    def locate(self, bucket, gathered, step):
        plan, slices = bucket.plan, bucket.plan.slices(step)
        offsets = np.zeros(plan.total, np.uint32)
        for rank, message in enumerate(gathered.reshape(plan.n_ranks, -1)):
            begin, end = slices.chunks_of(rank, plan.total)
            used = message[: ((end - begin) * plan.bits + 7) // 8]
            offsets[begin:end] = reference.unpack_bits(used, end - begin, plan.bits)
        found = self._located(plan, offsets)
        if (found >= np.repeat(plan.numels, plan.counts)).any():
            raise PayloadError("an offset lies beyond the end of its chunk")
        return found

    def count_common(self, bucket, positions, begin, end):
        alike = self._located(bucket.plan, self._winners(bucket)) == positions
        alike[begin:end] = False
        return lambda: int(alike.sum())

    def sketch(self, bucket, signs):
        parts, slots = [], np.diff(bucket.plan.row_begins)
        for grad, old, n, slot in zip(
            bucket.grads, bucket.residuals, bucket.plan.numels, slots, strict=True
        ):
            if grad is None or n < signs.size:
                parts.append(np.zeros(slot, np.float32))
                continue
            whole = (grad if old is None else grad + old)[: slot * signs.size]
            terms = whole.reshape(slot, -1) * signs
            while terms.shape[1] > 1:
                half = terms.shape[1] // 2
                terms = terms[:, :half] + terms[:, half:]
            parts.append(terms[:, 0])
        wanted = [own for own in (*bucket.grads, *bucket.residuals) if own is not None]
        is_finite = all(np.isfinite(own).all() for own in wanted)
        return np.concatenate(parts) if is_finite else np.full(sum(slots), np.nan, np.float32)

    def largest_rows(self, bucket, sums, length):
        plan, parts = bucket.plan, []
        shares = parts_of(reference.magnitude_bits(sums), np.diff(plan.row_begins))
        for n, count, keys in zip(plan.numels, plan.counts, shares, strict=True):
            if count == n:
                parts.append(np.arange(n))
                continue
            best = np.argsort(-keys.astype(np.int64), kind="stable")[: count // length]
            in_rows = np.sort(best)[:, None] * length + np.arange(length)
            parts += [in_rows.reshape(-1), np.arange(n - n % length, n)]
        return np.concatenate(parts)

    def draw(self, plan, progressions):
        parts = zip(progressions, plan.counts, plan.numels, strict=True)
        return np.concatenate(
            [np.array([(a * j + c) % n for j in range(k)], np.int64) for (a, c), k, n in parts]
        )

    def low_pass(self, bucket):
        for grad, old in zip(bucket.grads, bucket.residuals, strict=True):
            keeps = bucket.plan.keeps and grad is not None
            bucket.new.append(reference.low_pass(grad, old, bucket.plan.beta)[0] if keeps else None)
        return bucket.new

    def take(self, bucket, positions, halves):
        plan, values, wholes = bucket.plan, [], []
        places, beta = parts_of(positions, plan.counts), np.float32(plan.beta)
        for at, (grad, own) in enumerate(zip(bucket.grads, places, strict=True)):
            zeros = np.zeros(plan.numels[at], np.float32)
            whole = zeros if grad is None else grad
            if grad is not None and bucket.residuals[at] is not None:
                whole = grad + bucket.residuals[at]
            share = whole[own] if is_finite(whole) else np.full(own.size, np.nan, np.float32)
            values.append(share * plan.gains[at] if plan.unbiased and grad is not None else share)
            wholes.append(whole)
        message = np.concatenate(values)
        sent = message
        if halves is not None:
            message = self.to_half(message, *halves)
            sent = self.from_half(message)
        parts = zip(bucket.grads, wholes, places, values, parts_of(sent, plan.counts), strict=True)
        for at, (grad, whole, own, value, arrives) in enumerate(parts):
            unsent, old = whole.copy(), bucket.residuals[at]
            unsent[own] -= arrives
            sums = map(energy_of, (grad, whole, unsent))
            is_out = grad is None or np.isnan(arrives).any()
            bucket.energies.append(None if is_out else tuple(sums))
            if bucket.new[at] is not None:
                rest = 0 if old is None else np.float32(1 - plan.beta) * old[own]
                bucket.new[at][own] = beta * (value - arrives) + rest
        return message

    def index_energies(self, bucket):
        return lambda: {n: sums for n, sums in enumerate(bucket.energies) if sums is not None}

    def scatter_sum(self, bucket, received, sources):
        plan = bucket.plan
        sums, finite = [np.zeros(n, np.float32) for n in plan.numels], True
        messages = [parts_of(m, plan.counts) for m in received.reshape(len(sources), -1)]
        places = [parts_of(own, plan.counts) for own in sources]
        for at, total in enumerate(sums):
            if not all(is_finite(message[at]) for message in messages):
                total.fill(np.nan)
                finite = False
                continue
            for message, own in zip(messages, places, strict=True):
                total[own[at]] += message[at]
        return sums, Flags(finite)
