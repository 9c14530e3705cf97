"""Buckets: the bytes, residuals and sums are those of one tensor after another."""

from __future__ import annotations

import numpy as np
import pytest

from horovod_fftcomp import PayloadError, get_codec, wire
from horovod_fftcomp.codec.dense import DenseCodec
from horovod_fftcomp.codec.methods.dither import Dither
from horovod_fftcomp.codec.quantizers import (
    BFLOAT16,
    FLOAT32,
    LARGEST_FINITE_BITS,
    RANGE,
    BFloat16,
    Float32,
    RangeFloat,
)
from horovod_fftcomp.codec.sparse import Codec
from horovod_fftcomp.kernels import threads
from horovod_fftcomp.kernels.cpu.bucket import BucketCodec, Encoded
from horovod_fftcomp.kernels.cpu.pieces import CUT, pieces_of
from horovod_fftcomp.wire import counter_rng
from horovod_fftcomp.wire.counter_rng import RngKey
from horovod_fftcomp.wire.positions import Layout
from tests.backends import load_backend

from .contracts import CODECS, make_codec
from .loops import each

FIXED = [key for key in CODECS if make_codec(key).has_fixed_size]
SHAPES = [
    *((1,), (63,), (64,), (65,), (1000,), (4096,), (4097,), (0,), (3, 0), ()),
    *((33, 31), (8, 16, 3, 3), (64, 64), (9, 129), (2, 30_000)),
]
LARGE = (200, 513)
KERNELS, REFERENCE = map(load_backend, ("cpu", "reference"))
# Every bit pattern is the body of some array.
ACCEPTS_EVERY_BODY = {"efsignsgd", "signsgd", "dorefa", "dorefa-1"}
VALUES = (
    *("normal", "normal", "zeros", "ties", "denormal", "minus zeros", "spike", "huge", "tiny"),
    *("nan", "inf", "frozen"),
)


def values_of(kind: str, n: int, rng: np.random.Generator) -> np.ndarray | None:
    """Return a gradient of ``n`` elements; None if it is frozen."""
    values = rng.standard_normal(n).astype(np.float32)
    if kind in ("nan", "inf") and n:
        values[rng.integers(n)] = np.nan if kind == "nan" else -np.inf
    fixed = {
        "zeros": lambda: np.zeros(n, np.float32),
        "ties": lambda: rng.integers(-2, 3, n).astype(np.float32),
        "denormal": lambda: np.full(n, 1e-41, np.float32),
        "minus zeros": lambda: np.full(n, -0.0, np.float32),
        "mostly zeros": lambda: np.where(rng.random(n) < 0.002, values, np.float32(0)),
        "spike": lambda: np.eye(1, n, n // 2, dtype=np.float32)[0],
        "huge": lambda: rng.uniform(-1e38, 1e38, n).astype(np.float32),
        "tiny": lambda: values * np.float32(1e-37),
        "frozen": lambda: None,
    }
    return fixed.get(kind, lambda: values)()


class Bucket:
    """A bucket's members with their offsets in a message."""

    def __init__(self, key: str, shapes: list[tuple[int, ...]]) -> None:
        self.codec = make_codec(key)
        self.table = BucketCodec([self.codec] * len(shapes), shapes)
        self.shapes = [shapes[number] for number in self.table.members]
        self.offsets = [self.table.slices[number].start for number in self.table.members]
        self.nbytes = self.table.message_nbytes

    def grads(self, seed: int, kinds: tuple[str, ...] = VALUES) -> list[np.ndarray | None]:
        rng = np.random.default_rng(seed)
        return [
            values_of(kinds[(seed + number) % len(kinds)], int(np.prod(shape)), rng)
            for number, shape in enumerate(self.shapes)
        ]

    def keys(self, step: int) -> np.ndarray | None:
        if not isinstance(self.codec, DenseCodec):
            return None
        keys = [self.codec.key_at(RngKey(step, str(n), 0)) for n in range(len(self.shapes))]
        return np.array(keys, np.uint64)

    def encode(self, grads, residuals, step=0, **options) -> tuple[np.ndarray, Encoded]:
        message = np.zeros(self.nbytes, np.uint8)
        encoded = self.table.encode(grads, residuals, message, self.keys(step), **options)
        return message, encoded

    def sum_each(self, gathered: np.ndarray, n_ranks: int) -> list[np.ndarray]:
        """Return the sums of the payloads, from one tensor after another."""
        sums = []
        for offset, shape in zip(self.offsets, self.shapes, strict=True):
            nbytes = self.codec.payload_nbytes(shape)
            starts = [rank * self.nbytes + offset for rank in range(n_ranks)]
            payloads = [gathered[start : start + nbytes] for start in starts]
            sums.append(self.codec.decode_sum(payloads, KERNELS).reshape(-1))
        return sums


def assert_same(found: list, wanted: list) -> None:
    assert len(found) == len(wanted)
    for number, (a, b) in enumerate(zip(found, wanted, strict=True)):
        assert (a is None) == (b is None), number
        if a is not None:
            assert a.dtype == b.dtype
            assert a.tobytes() == b.tobytes(), number


def _tie(shape):
    """Return values of whose sum, float32, the order decides: half way between two numbers."""
    values = np.zeros(shape, np.float32)
    values[:, ::4096] = 2.0**-29
    values[:, :2] = 2.0**24, 1
    return values.ravel()


@pytest.mark.parametrize("key", ["onebit", "onebit-column", "efsignsgd", "terngrad"])
def test_sums_of_many_groups_are_taken_in_the_order_of_the_codec(key):
    shape = (2, 1 << 19) if key == "onebit-column" else (1, 1 << 20)
    grad = _tie(shape)
    if key == "terngrad":  # its variance cancels
        noise = np.random.default_rng(0).standard_normal(grad.size)
        grad = (1 + 1e-5 * noise).astype(np.float32)
    before = threads.get_num_threads()
    try:
        threads.set_num_threads(1)
        bucket = Bucket(key, [shape])
        message, _ = bucket.encode([grad], [None], step=3)
        rng_key, coeffs = RngKey(3, "0", 0), bucket.codec.coeffs_of(grad, shape, KERNELS)
        payload, _ = bucket.codec.encode_coeffs(coeffs, shape, kernels=REFERENCE, rng_key=rng_key)
        assert message[: payload.size].tobytes() == payload.tobytes()
    finally:
        threads.set_num_threads(before)


@pytest.mark.parametrize("key", FIXED)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_large_tensors_are_as_by_themselves(key, count):
    # More than 64 groups in a row of signs, and in all.
    shapes = [(3, 300_001), (100,), (1 << 19,)]
    if isinstance(make_codec(key), Codec):
        shapes.append((3, 1 << 20))  # so large that keys are sampled where a tensor is in one piece
    elif isinstance(make_codec(key).method, Dither):
        shapes = [(1 << 17,), (100,), (60_001,)]  # the reference takes long
    before = threads.get_num_threads()
    try:
        threads.set_num_threads(count)
        bucket = Bucket(key, shapes)
        order = [shapes.index(shape) for shape in bucket.shapes]
        for kinds in (("normal", "ties"), ("mostly zeros", "tiny")):
            grads = bucket.grads(3, kinds)
            _, first = bucket.encode(grads, [None] * len(grads), step=2)
            old = [None if array is None else array.copy() for array in first.residuals]
            message, encoded = bucket.encode(grads, first.residuals, step=3)
            for place, (grad, at) in enumerate(zip(grads, bucket.offsets, strict=True)):
                shape, rng_key = bucket.shapes[place], RngKey(3, str(place), 0)
                coeffs = bucket.codec.coeffs_of(grad, shape, KERNELS, old[place])
                payload, residual = bucket.codec.encode_coeffs(
                    coeffs, shape, kernels=REFERENCE, rng_key=rng_key
                )
                assert message[at : at + payload.size].tobytes() == payload.tobytes(), order[place]
                assert_same([encoded.residuals[place]], [residual])
            found = bucket.table.sum(np.concatenate([message, message]), 2)
            assert_same(found.totals, bucket.sum_each(np.concatenate([message, message]), 2))
    finally:
        threads.set_num_threads(before)


@each("key", ["topk", "fft", "qsgd", "dither"])
def test_a_large_tensor_that_is_not_finite_is_known_to_all_its_pieces(key):
    before = threads.get_num_threads()
    try:
        threads.set_num_threads(3)
        bucket = Bucket(key, [(1 << 20,)])
        for place in (5, (1 << 20) - 5):
            grad = np.ones(1 << 20, np.float32)
            grad[place] = np.nan
            message, encoded = bucket.encode([grad], [None])
            wanted = bucket.codec.encode(grad)
            assert message[: wanted.size].tobytes() == wanted.tobytes()
            assert encoded.residuals == [None]
    finally:
        threads.set_num_threads(before)


def test_a_table_has_all_tensors():
    codec, raw = get_codec("topk"), get_codec("topk", density=1.0, bits=32)
    codecs = [codec, raw, codec, codec, codec]
    shapes = [(64, 64), (64, 64), LARGE, (0,), (5000,)]
    assert codec.plan((0,)).layout is Layout.RAW
    assert sorted(BucketCodec(codecs, shapes).members) == [0, 1, 2, 3, 4]
    assert BucketCodec([], []).members == []


@each("count", [1, 2, 3, 8])
@each(
    "reals", [[10], [1 << 20], [0, 1 << 17, 0], [1 << 19, 40, 1 << 20], [4096] * 50, [1 << 21] * 3]
)
def test_pieces_cover_every_tensor_once_and_every_thread_has_some(count, reals):
    before = threads.get_num_threads()
    try:
        threads.set_num_threads(count)
        pieces = pieces_of(reals)
    finally:
        threads.set_num_threads(before)
    table = pieces.table
    for member, size in enumerate(reals):
        own = table[table["member"] == member]
        assert own["begin"].tolist() == [0, *own["end"][:-1].tolist()]
        assert own["end"][-1] == size
        assert not (own["begin"] % CUT).any()
        assert set(own["parts"]) == {len(own)}
        assert set(own["first"]) == {table["member"].tolist().index(member)}
    ends = [end for _, end in pieces.ranges]
    assert [0, *ends[:-1]] == [first for first, _ in pieces.ranges]
    assert ends[-1] == len(table)
    assert len(pieces.ranges) <= count
    if sum(reals) >= count << 18:
        assert len(pieces.ranges) == count


def test_codecs_of_different_kinds_share_a_bucket():
    keys = [key for key in FIXED if make_codec(key).plan((40, 50)).layout is not Layout.RAW]
    codecs = [make_codec(key) for key in keys]
    table = BucketCodec(codecs, [(40, 50)] * len(codecs))
    assert sorted(table.members) == list(range(len(codecs)))
    rng = np.random.default_rng(0)
    grads = [rng.standard_normal(2000).astype(np.float32) for _ in codecs]
    own = [codecs[number] for number in table.members]
    offsets = [table.slices[number].start for number in table.members]
    message = np.zeros(table.message_nbytes, np.uint8)
    ours = [grads[number] for number in table.members]
    numbers = [codec.key_at(RngKey()) if isinstance(codec, DenseCodec) else 0 for codec in own]
    table.encode(ours, [None] * len(own), message, np.array(numbers, np.uint64))
    sums = table.sum(message, 1).totals
    for codec, grad, offset, total in zip(own, ours, offsets, sums, strict=True):
        wanted = codec.encode(grad.reshape(40, 50))
        assert message[offset : offset + wanted.size].tobytes() == wanted.tobytes()
        assert total.tobytes() == codec.decode_sum([wanted], KERNELS).tobytes()


@each("key", ["topk", "fft-10-bits", "qsgd", "onebit", "natural", "terngrad", "dither"])
@each("options", [{}, {"decay": 0.9}, {"keeps_sent": True}, {"keep": False}])
def test_many_threads_compute_what_one_does(key, options):
    bucket = Bucket(key, [(64, 64), (100,), (2, 300_000), (256,)] * 3)
    grads, none = bucket.grads(0, ("normal", "ties", "nan", "frozen")), [None] * 12
    before = threads.get_num_threads()
    results = []
    try:
        for count in (1, 3):
            threads.set_num_threads(count)
            made = Bucket(key, [(64, 64), (100,), (2, 300_000), (256,)] * 3)
            old = made.encode(made.grads(1, ("normal",)), none)[1].residuals
            message, encoded = made.encode(grads, old, **options)
            sums = made.table.sum(message, 1).totals
            results.append((message.tobytes(), encoded.residuals, sums))
    finally:
        threads.set_num_threads(before)
    assert results[0][0] == results[1][0]
    for one, many in zip(results[0][1:], results[1][1:], strict=True):
        assert_same(many, one)


@each("key", FIXED)
def test_a_decayed_residual_is_that_of_the_scaled_array(key):
    bucket = Bucket(key, SHAPES)
    none = [None] * len(bucket.shapes)
    _, first = bucket.encode(bucket.grads(0), none)
    scaled = [
        None if old is None else (old.view(np.float32) * np.float32(0.9)).view(old.dtype)
        for old in first.residuals
    ]
    grads = bucket.grads(1)
    message, encoded = bucket.encode(grads, first.residuals, decay=0.9)
    wanted, left = bucket.encode(grads, scaled)
    assert message.tobytes() == wanted.tobytes()
    assert_same(encoded.residuals, left.residuals)


@each("key", ["signsgd", "topk", "fft", "qsgd"])
def test_a_momentum_keeps_what_was_sent(key):
    bucket = Bucket(key, SHAPES)
    grads, none = bucket.grads(0), [None] * len(bucket.shapes)
    message, encoded = bucket.encode(grads, none, keeps_sent=True)
    assert message.tobytes() == bucket.encode(grads, none)[0].tobytes()
    for grad, kept, shape in zip(grads, encoded.residuals, bucket.shapes, strict=True):
        if grad is None:
            assert kept is None
        else:
            wanted = bucket.codec.coeffs_of(grad, shape, KERNELS).array
            np.testing.assert_array_equal(kept, wanted)


@each("key", FIXED)
def test_sums_go_where_they_are_wanted_times_a_factor(key):
    bucket = Bucket(key, [(40, 50), (3,), (70, 65), (1, 9000)])
    grads = bucket.grads(0, ("normal",))
    gathered = np.concatenate(
        [bucket.encode(grads, [None] * len(grads), step)[0] for step in (0, 1, 2)]
    )
    plain, third = bucket.table.sum(gathered, 3).totals, np.float32(1 / 3)
    found = bucket.table.sum(gathered, 3, grads, 1 / 3).totals  # over the gradients themselves
    for total, grad, expected in zip(found, grads, plain, strict=True):
        assert total is grad
        assert grad.tobytes() == (expected * third).tobytes()


@each("key", FIXED)
def test_what_is_not_as_expected_has_no_total(key):
    bucket = Bucket(key, [(64, 64), (8000,), (4097,)])
    grads, none = bucket.grads(0, ("normal",)), [None] * len(bucket.shapes)
    message, _ = bucket.encode(grads, none)
    wanted = bucket.sum_each(message, 1)
    rng = np.random.default_rng(5)
    for at in range(bucket.codec.plan((8000,)).header_nbytes):
        damaged = message.copy()
        damaged[bucket.offsets[1] + at] ^= 1 << rng.integers(8)
        found = bucket.table.sum(damaged, 1).totals
        assert found[1] is None, at
        assert_same([found[0], found[2]], [wanted[0], wanted[2]])


@each("key", FIXED)
def test_a_damaged_body_has_the_total_that_the_codec_decodes_or_none(key):
    bucket = Bucket(key, [(64, 64)])
    message, _ = bucket.encode(bucket.grads(0, ("normal",)), [None])
    plan, rng, rejected = bucket.codec.plan((64, 64)), np.random.default_rng(6), 0
    for number in range(60):
        damaged = message.copy()
        whole = damaged[: plan.payload_nbytes]
        body = whole[plan.header_nbytes :]
        if number % 2:
            body[:] = rng.integers(0, 256, body.size)
        else:
            body[rng.integers(body.size)] ^= 1 << rng.integers(8)
        with np.errstate(over="ignore", invalid="ignore"):
            (found,) = bucket.table.sum(damaged, 1).totals
            try:
                wanted = bucket.codec.decode_sum([damaged[: plan.payload_nbytes]], KERNELS).reshape(
                    -1
                )
            except PayloadError:
                wanted, rejected = None, rejected + 1
        assert_same([found], [wanted])
    assert bool(rejected) == (key not in ACCEPTS_EVERY_BODY)


@each("key", FIXED)
@each("scale", [0.0, 1e-39, 0.4, 1.0, 2.0**20, 3e38])
def test_a_payload_with_another_scale_has_the_total_that_the_codec_decodes_or_none(key, scale):
    bucket = Bucket(key, [(64, 64)])
    message, _ = bucket.encode(bucket.grads(0, ("normal",)), [None])
    plan = bucket.codec.plan((64, 64))
    wire.write_header(message, plan, bucket.codec.fingerprint, "float32", scale, True)
    with np.errstate(over="ignore", invalid="ignore"):
        found = bucket.table.sum(message, 1).totals
        try:
            wanted = bucket.sum_each(message, 1)
        except PayloadError:
            wanted = [None]
    assert_same(found, wanted)


@each("dtype", ["float16", "float64"])
def test_a_payload_of_another_dtype_is_for_the_codec_to_decode(dtype):
    bucket = Bucket("topk", [(64, 64)])
    message, _ = bucket.encode(bucket.grads(0, ("normal",)), [None])
    plan = bucket.codec.plan((64, 64))
    wire.write_header(message, plan, bucket.codec.fingerprint, dtype, 4.0, True)
    found = bucket.table.sum(message, 1).totals
    assert found == [None]


def test_keys_of_many_names_are_those_of_each():
    pairs = [(0, "a.weight"), (7, "b"), (2**64 - 1, "gewicht-\u00e4")]
    found = counter_rng.draws(counter_rng.named(pairs), 12, 3)
    assert found.dtype == np.uint64
    assert found.tolist() == [counter_rng.draw(seed, 12, name, 3) for seed, name in pairs]


def test_a_misaligned_buffer_has_the_same_sums():
    bucket = Bucket("topk", SHAPES)
    message, _ = bucket.encode(bucket.grads(0, ("normal",)), [None] * len(bucket.shapes))
    shifted = np.zeros(message.size + 1, np.uint8)[1:]
    shifted[:] = message
    shifted.flags.writeable = False
    found = bucket.table.sum(shifted, 1).totals
    assert_same(found, bucket.sum_each(message, 1))


def test_a_buffer_of_another_size_has_no_totals():
    bucket = Bucket("topk", SHAPES)
    message, _ = bucket.encode(bucket.grads(0, ("normal",)), [None] * len(bucket.shapes))
    found = bucket.table.sum(message[:-1], 1)
    assert found.totals == [None] * len(bucket.shapes)
    assert found.scales.shape == (len(bucket.shapes), 1)


def test_arrays_of_another_size_or_type_are_refused():
    bucket = Bucket("topk", [(64, 64)])
    grad = np.zeros(4096, np.float32)
    for wrong in (grad[:-1], grad.astype(np.float64)):
        with pytest.raises(ValueError, match="the gradient is float"):
            bucket.encode([wrong], [None])
        with pytest.raises(ValueError, match="the residual is float"):
            bucket.encode([grad], [wrong])
    with pytest.raises(ValueError, match="expected contiguous"):
        bucket.encode([np.zeros(8192, np.float32)[::2]], [None])
    for nbytes in (0, bucket.nbytes - 8, bucket.nbytes + 8):
        with pytest.raises(ValueError, match=f"message has {nbytes} bytes, expected"):
            bucket.table.encode([grad], [None], np.zeros(nbytes, np.uint8))


def test_a_bucket_that_draws_random_numbers_needs_keys():
    bucket = Bucket("qsgd", [(64, 64)])
    grads = bucket.grads(0, ("normal",))
    with pytest.raises(ValueError, match="keys are None"):
        bucket.table.encode(grads, [None], np.zeros(bucket.nbytes, np.uint8))


def test_a_read_only_gradient_is_encoded():
    bucket = Bucket("topk", [(64, 64)])
    grad = np.random.default_rng(0).standard_normal(4096).astype(np.float32)
    wanted, _ = bucket.encode([grad], [None])
    grad.flags.writeable = False
    assert bucket.encode([grad], [None])[0].tobytes() == wanted.tobytes()


def test_large_residuals_are_aligned_to_cache_lines():
    bucket = Bucket("topk", [(64, 64), (1001,), (65,)] * 100)
    grads = bucket.grads(0, ("normal",))
    _, encoded = bucket.encode(grads, [None] * len(grads))
    assert {kept.ctypes.data % 64 for kept in encoded.residuals} == {0}


@each("quantizer", [RangeFloat(2), RangeFloat(5), RangeFloat(16), Float32(), BFloat16()])
def test_a_compiled_coding_is_that_of_the_quantizer(quantizer):
    from horovod_fftcomp.kernels.cpu.jit import kernel_of
    from horovod_fftcomp.kernels.cpu.value_codes import fill_coding

    kind = {RangeFloat: RANGE, Float32: FLOAT32, BFloat16: BFLOAT16}[type(quantizer)]
    rng = np.random.default_rng(0)
    edges = [0, 1, 0x007FFFFF, 0x00800000, 0x00800001, 0x3F800000, 0x7F7F8000, LARGEST_FINITE_BITS]
    fill, coding = kernel_of(fill_coding), np.empty(7, np.int64)
    for peak in [*edges, *rng.integers(LARGEST_FINITE_BITS, size=500).tolist()]:
        scale = float(np.uint32(peak).view(np.float32))
        for grid in (0, 1, 77, 1 << 19, 1 << 31, (1 << 31) + 999, (1 << 32) - 1):
            fill(kind, quantizer.bits, peak, grid, coding)
            both = (scale, grid) if kind == RANGE else (scale,)
            assert tuple(coding.tolist()) == quantizer.coding(*both), hex(peak)
