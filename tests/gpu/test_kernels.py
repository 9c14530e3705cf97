"""The kernels in the emulator: the CPU's bytes, in every schedule, whatever arrives."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from horovod_fftcomp import Codec, PayloadError
from horovod_fftcomp.codec.dense import DenseCodec
from horovod_fftcomp.codec.quantizers import LARGEST_FINITE_BITS, Float32, RangeFloat
from horovod_fftcomp.codec.sparsifiers import RandomK, TopK
from horovod_fftcomp.codec.transforms import BLOCK_LENGTHS, BlockDCT, BlockFFT, Identity
from horovod_fftcomp.kernels import cuda
from horovod_fftcomp.kernels.cuda import structs
from horovod_fftcomp.kernels.cuda.decoder import CORRUPT, NOT_FINITE, SOUND
from horovod_fftcomp.kernels.cuda.encoder import Encoder
from horovod_fftcomp.kernels.cuda.hashes import hashes_on_device
from horovod_fftcomp.wire.counter_rng import RngKey
from horovod_fftcomp.wire.header import DTYPES, read_header
from horovod_fftcomp.wire.positions import Layout, unary_bits
from tests.backends import load_backend
from tests.contracts import CASES, CODECS, HOST_ONLY, is_adaptive, make_codec, overflows, plan_of
from tests.gpu.emulator import BACKWARD, FORWARD, SHUFFLED, Emulator, decoder_for
from tests.loops import each
from tests.reference_hash import hash_bytes_reference
from tests.reference_ops import positions_of

pytestmark = pytest.mark.sampled

SCHEDULES = (FORWARD, BACKWARD, SHUFFLED)
KEYS = [key for key, (recipe, _) in CODECS.items() if recipe not in HOST_ONLY]
ELEMENTS = [key for key in KEYS if isinstance(make_codec(key), DenseCodec)]
ELEMENTS = [key for key in ELEMENTS if make_codec(key).method.cuda is not None]
SPARSE = [key for key in KEYS if isinstance(make_codec(key), Codec)]
CHOSEN = [key for key in KEYS if is_adaptive(make_codec(key))]
SERVED = SPARSE + ELEMENTS
FIXED = [key for key in SERVED if make_codec(key).has_fixed_size]
PLAIN = [key for key in SERVED if isinstance(make_codec(key).transform, Identity)]
TRANSFORMING = [key for key in FIXED if key not in PLAIN]
CPU = load_backend("cpu")


def flat_cases() -> dict[str, np.ndarray]:
    """Return the table's cases as a device would hold them: flat, float32."""
    cases = {name: np.ascontiguousarray(make(), np.float32).reshape(-1)
             for name, make in CASES.items()}  # fmt: skip
    several_tiles = np.random.default_rng(4).standard_t(3, 40_000).astype(np.float32)
    bad = several_tiles.copy()
    bad[30_000] = np.nan
    infinite = np.ones(5000, np.float32)
    infinite[7] = -np.inf
    return cases | {"several-tiles": several_tiles, "nan": bad, "inf": infinite}


GRADS = flat_cases()


def place_of(number: int) -> RngKey:
    """Return where a test encodes its ``number``-th tensor."""
    return RngKey(3, str(number), 1)


def keys_of(codec: Codec | DenseCodec, count: int) -> list[int] | None:
    """Return what the draws of so many tensors follow from."""
    if not codec.draws:
        return None
    return [codec.key_at(place_of(number)) for number in range(count)]


def meant(codec: Codec | DenseCodec, payload: np.ndarray) -> bytes:
    """Return what of a payload means something: of values that are not finite the header alone."""
    if isinstance(codec, DenseCodec) and not read_header(payload).finite:
        return payload[: plan_of(codec, payload).header_nbytes].tobytes()
    return payload.tobytes()


class Encoded:
    """What an encoder made of some gradients."""

    def __init__(
        self,
        codec: Codec,
        grads: list[np.ndarray],
        residuals: list[np.ndarray | None] | None = None,
        schedule: int = FORWARD,
        keep: bool = True,
        measure: bool = False,
    ) -> None:
        device = Emulator(schedule, 5)
        shapes = [grad.shape for grad in grads]
        self.encoder = Encoder(device, [codec] * len(grads), shapes)
        self.coeffs = [
            None if form is None or not keep else device.empty(form[1], form[0])
            for form in self.encoder.coeffs_formats
        ]
        old = [None if r is None else device.upload(r) for r in residuals or [None] * len(grads)]
        on_device = [device.upload(grad) for grad in grads]
        keys = keys_of(codec, len(grads))
        made = self.encoder.encode(on_device, old, self.coeffs, measure, keys)
        self.squares = made.squares
        self.not_finite = made.not_finite
        self.message = made.message[: self.encoder.message_nbytes]
        self.payloads = [
            self.message[begin:][: read_header(self.message[begin:]).payload_nbytes]
            for begin in self.encoder.offsets
        ]


def a_residual(codec: Codec, grad: np.ndarray) -> np.ndarray | None:
    """Return coefficients of the gradient's size, which do not overflow with it."""
    plan = codec.plan(grad.shape, 0)
    peak = np.abs(grad).max(initial=0)
    if plan.layout is Layout.RAW or not peak < 1e37:
        return None
    values = np.random.default_rng(6).standard_normal((plan.n_bins, 2)).astype(np.float32) * peak
    is_complex = codec.transform.reals_per_bin == 2
    return values.view(np.complex64)[:, 0] if is_complex else np.ascontiguousarray(values[:, 0])


@each("schedule", SCHEDULES)
@pytest.mark.parametrize("key", PLAIN)
def test_payloads_and_residuals_are_the_cpus(key, schedule):
    codec = make_codec(key)
    names = list(GRADS)
    grads = [GRADS[name] for name in names]
    residuals = [a_residual(codec, grad) if i % 2 else None for i, grad in enumerate(grads)]
    made = Encoded(codec, grads, residuals, schedule)
    for i, name in enumerate(names):
        coeffs = codec.coeffs_of(grads[i], grads[i].shape, CPU, residuals[i])
        options = {"kernels": CPU, "rng_key": place_of(i)}
        expected = codec.encode_coeffs(coeffs, grads[i].shape, **options)
        bad = name in ("nan", "inf") or overflows(codec, grads[i])
        assert bool(made.not_finite[i]) == bad, name
        assert meant(codec, made.payloads[i]) == meant(codec, expected.payload), name
        if expected.residual is not None and expected.residual.size:
            assert made.coeffs[i].tobytes() == expected.residual.tobytes(), name


@each("shape", [(33, 31), (2000, 3), (3, 6, 1500), (1, 5000), (2, 280_000)])
@pytest.mark.parametrize("key", ELEMENTS)
def test_shapes_and_measurements_leave_the_cpus_bytes(key, shape):
    """Rows within a tile, rows of more than 64 tiles; with residuals and without."""
    codec, rng = make_codec(key), np.random.default_rng(11)
    flat = rng.standard_t(3, shape).astype(np.float32)
    residual = a_residual(codec, flat)
    for keep, measure, old in ((True, True, residual), (False, True, None), (False, False, None)):
        grads, residuals = [flat, flat[:1]], [old, None]
        made = Encoded(codec, grads, residuals, SHUFFLED, keep, measure)
        for number, grad in enumerate(grads):
            coeffs = codec.coeffs_of(grad.reshape(-1), grad.shape, CPU, residuals[number])
            wanted = float(np.dot(coeffs.array, coeffs.array))
            expected = codec.encode_coeffs(
                coeffs,
                grad.shape,
                kernels=CPU,
                keep_residual=keep,
                rng_key=place_of(number),
            )
            assert made.payloads[number].tobytes() == expected.payload.tobytes()
            left = expected.residual
            if keep and left is not None:  # nothing is left of a few values, sent as they are
                assert made.coeffs[number].tobytes() == left.tobytes()
                squares = (float(np.dot(grad.ravel(), grad.ravel())), wanted, left @ left)
                assert made.squares()[number] == pytest.approx(squares, rel=1e-4)


TRANSFORMS = [kind(block) for kind in (BlockFFT, BlockDCT) for block in BLOCK_LENGTHS]


@pytest.mark.parametrize("transform", TRANSFORMS, ids=repr)
def test_transforms_agree_with_the_reference(transform):
    codec = Codec(transform, TopK(1e-9), Float32())  # sends one coefficient and leaves the others
    grads = [grad for grad in GRADS.values() if np.isfinite(grad).all()]
    made = Encoded(codec, grads)
    for grad, left in zip(grads, made.coeffs, strict=True):
        if left is None:
            continue
        exact = transform.forward(grad, None, 0, load_backend("reference")).array
        error = np.where(left == 0, 0, left - exact)
        assert np.abs(error).max() <= 1e-6 * np.abs(exact).max() + 1e-42
        assert (left == 0).sum() <= 1 + (np.abs(exact) < 1e-6 * np.abs(exact).max() + 1e-42).sum()


@pytest.mark.parametrize("key", TRANSFORMING)
def test_from_given_coefficients_on_every_byte_is_the_cpus(key):
    codec = make_codec(key)
    grads, exact, expected = [], [], []
    for grad in GRADS.values():
        if np.isfinite(grad).all() and codec.plan(grad.shape).layout is not Layout.RAW:
            coeffs = codec.transform.forward(grad, None, 0, load_backend("reference")).array
            grads.append(np.zeros_like(grad))
            exact.append(coeffs.copy())
            ranked = codec.coeffs_of(grads[-1], grad.shape, CPU, coeffs)
            expected.append(codec.encode_coeffs(ranked, grad.shape, kernels=CPU))
    made = Encoded(codec, grads, exact)
    for payload, left, cpus in zip(made.payloads, made.coeffs, expected, strict=True):
        assert payload.tobytes() == cpus.payload.tobytes()
        np.testing.assert_array_equal(left, cpus.residual)  # but for the sign of a zero


@pytest.mark.parametrize("key", TRANSFORMING)
def test_no_byte_depends_on_the_schedule(key):
    codec, grads = make_codec(key), [GRADS[name] for name in ("several-tiles", "odd-matrix")]
    first, *others = [Encoded(codec, grads, schedule=schedule) for schedule in SCHEDULES]
    for other in others:
        assert other.message.tobytes() == first.message.tobytes()


def decoded(
    codec: Codec, messages: list[np.ndarray], encoder: Encoder, shapes: list, schedule: int
) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Return (sums, not_finite, status of each rank and tensor)."""
    device = Emulator(schedule, 5)
    decoder = decoder_for(device, codec, shapes, encoder, len(messages))
    sums = [device.empty(int(np.prod(shape))) for shape in shapes]
    gathered = device.upload(np.concatenate(messages))
    not_finite, found = decoder.decode(gathered, sums)
    return sums, not_finite, found.reshape(len(messages), -1, 4)[:, : len(shapes), 1]


@each("schedule", SCHEDULES)
@pytest.mark.parametrize("key", SERVED)
def test_sums_are_the_cpus(key, schedule):
    codec = make_codec(key)
    rng = np.random.default_rng(7)
    shapes = [(40_000,), (33, 31), (4096,), (1,), (300,), (1500, 5)]
    n_ranks = 10 if key in (*ELEMENTS, "topk", "fft") else 3  # more than are summed at a time
    made = [
        Encoded(codec, [rng.standard_t(3, shape).astype(np.float32) for shape in shapes])
        for _ in range(n_ranks)
    ]
    messages = [one.message for one in made]
    sums, not_finite, status = decoded(codec, messages, made[0].encoder, shapes, schedule)
    assert not not_finite.any()
    assert (status == SOUND).all()
    for i, total in enumerate(sums):
        expected = codec.decode_sum([one.payloads[i] for one in made]).reshape(-1)
        if key in PLAIN:
            assert total.tobytes() == expected.tobytes()
        else:
            error = np.linalg.norm(total - expected) / np.linalg.norm(expected)
            assert error < 1e-6


@pytest.mark.parametrize("transform", TRANSFORMS, ids=repr)
def test_sums_of_each_transform_are_the_cpus(transform):
    codec, rng = Codec(transform, TopK(0.1), RangeFloat(6)), np.random.default_rng(13)
    shapes = [(10_000,), (70, 71)]
    made = [
        Encoded(codec, [rng.standard_t(3, shape).astype(np.float32) for shape in shapes])
        for _ in range(2)
    ]
    messages = [one.message for one in made]
    sums, not_finite, status = decoded(codec, messages, made[0].encoder, shapes, SHUFFLED)
    assert not not_finite.any()
    assert (status == SOUND).all()
    for i, total in enumerate(sums):
        expected = codec.decode_sum([one.payloads[i] for one in made]).reshape(-1)
        assert np.linalg.norm(total - expected) < 1e-6 * np.linalg.norm(expected)


@each("schedule", SCHEDULES)
@pytest.mark.parametrize("transform", [Identity(), BlockFFT(256)], ids=repr)
def test_nearly_all_values_may_lie_in_one_tile(transform, schedule):
    """More than are listed at a time, beside tiles that have none."""
    codec, shape = Codec(transform, TopK(0.01), RangeFloat(6)), (200_000,)
    rng, grads = np.random.default_rng(10), []
    for begin in (0, 50_000, 150_000, 150_000, *[196_000] * 6):
        grads.append(np.zeros(shape, np.float32))
        grads[-1][begin : begin + 4000] = rng.standard_t(3, 4000)
    made = [Encoded(codec, [grad]) for grad in grads]
    assert plan_of(codec, made[0].payloads[0]).layout is Layout.OFFSETS
    (total,), not_finite, status = decoded(
        codec, [one.message for one in made], made[0].encoder, [shape], schedule
    )
    assert (not_finite[0], *status.reshape(-1)) == (0, *[SOUND] * len(made))
    expected = codec.decode_sum([one.payloads[0] for one in made])
    np.testing.assert_allclose(total, expected, rtol=1e-5, atol=1e-5)


@each("schedule", SCHEDULES)
def test_positions_may_travel_differently_from_each_rank(schedule):
    codec, shape, rng = make_codec("threshold"), (30_000,), np.random.default_rng(11)
    scales = (0.6, 3.0, 1.6, 0.6, 1e3, 0.6, 3.0, 0.0, 0.6, 3.0)
    made = [
        Encoded(codec, [scale * rng.standard_normal(shape).astype(np.float32)]) for scale in scales
    ]
    layouts = {plan_of(codec, one.payloads[0]).layout for one in made}
    assert layouts == set(Layout)
    (total,), not_finite, status = decoded(
        codec, [one.message for one in made], made[0].encoder, [shape], schedule
    )
    assert (not_finite[0], *status.reshape(-1)) == (0, *[SOUND] * len(made))
    expected = codec.decode_sum([one.payloads[0] for one in made])
    assert total.tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    "key", ["topk", "topk-bitmap", "fft", "dct", "threshold", *CHOSEN, *ELEMENTS]
)
def test_a_rank_that_is_not_finite_makes_that_sum_nan_alone(key):
    codec = make_codec(key)
    shapes = [(5000,), (6000,)]
    good = [np.ones(5000, np.float32), np.arange(6000, dtype=np.float32)]
    made = [Encoded(codec, good), Encoded(codec, [GRADS["nan"][:5000] * np.nan, good[1]])]
    sums, not_finite, status = decoded(
        codec, [one.message for one in made], made[0].encoder, shapes, FORWARD
    )
    assert np.isnan(sums[0]).all()
    assert np.isfinite(sums[1]).all()
    assert not_finite.tolist() == [1, 0]
    assert status.tolist() == [[SOUND, SOUND], [NOT_FINITE, SOUND]]


@pytest.mark.parametrize(
    "key",
    [
        "topk",
        "topk-bitmap",
        "topk-all",
        "fft",
        "threshold-6-bits",
        *CHOSEN,
        *ELEMENTS,
    ],
)
def test_corrupt_bytes_never_pass_as_a_sum_of_others(key):
    """Any byte that changes is found, unless it makes another payload that could have been sent."""
    codec = make_codec(key)
    shape = (50, 100)
    rng = np.random.default_rng(8)
    made = Encoded(codec, [rng.standard_normal(shape).astype(np.float32)])
    plan = plan_of(codec, made.payloads[0])
    places = [*range(plan.header_nbytes),
              *rng.integers(plan.header_nbytes, plan.payload_nbytes, 120)]  # fmt: skip
    for place in places:
        message = made.message.copy()
        message[place] ^= 1 << rng.integers(8)
        try:
            sums, not_finite, status = decoded(codec, [message], made.encoder, [shape], FORWARD)
        except PayloadError:  # of a header that says how long its payload is
            assert place < plan.header_nbytes
            assert not codec.has_fixed_size
            continue
        try:
            expected = codec.decode(message[: plan.payload_nbytes]).reshape(-1)
        except PayloadError:
            assert status[0, 0] == CORRUPT, place
            assert not_finite[0] == 1
            assert np.isnan(sums[0]).any()
        else:
            assert status[0, 0] == SOUND, place
            np.testing.assert_allclose(sums[0], expected, rtol=1e-5, atol=1e-6)


def test_ones_in_what_pads_unary_counts_are_corrupt():
    codec, shape = make_codec("topk"), (5003,)
    made = Encoded(codec, [np.random.default_rng(12).standard_normal(shape).astype(np.float32)])
    plan = plan_of(codec, made.payloads[0])
    n_bits = unary_bits(plan.positions.n, plan.positions.k, plan.positions.low_bits)
    assert n_bits % 8
    made.message[plan.header_nbytes + n_bits // 8] |= 0x80
    with pytest.raises(PayloadError):
        codec.decode(made.message[: plan.payload_nbytes])
    (total,), _, status = decoded(codec, [made.message], made.encoder, [shape], FORWARD)
    assert status.tolist() == [[CORRUPT]]
    assert np.isnan(total).all()


def test_headers_are_read_by_the_cpu():
    made = Encoded(make_codec("fft"), [GRADS["several-tiles"]])
    header = read_header(made.payloads[0])
    assert header.dtype in DTYPES
    assert header.shape == GRADS["several-tiles"].shape


def test_tables_of_twiddles_are_the_same_everywhere():
    """Other ones would let the ranks of a job drift apart."""
    import zlib

    from horovod_fftcomp.kernels.cuda import structs

    whole = b"".join(
        t(b).tobytes() for b in (64, 256, 4096) for t in (structs.roots, structs.cosines)
    )
    assert f"{zlib.crc32(whole):08x}" == "caf4feb4"


@each("schedule", SCHEDULES)
def test_hashes_are_the_cpus(schedule):
    device, rng = Emulator(schedule, 5), np.random.default_rng(9)
    sizes = (0, 1, 7, 8, 9, 511, 512, 513, 1031, 20_000)
    arrays = [rng.integers(0, 256, size).astype(np.uint8) for size in sizes]
    found = hashes_on_device(device, [device.upload(array) for array in arrays]).view(np.uint64)
    assert found.tolist() == [hash_bytes_reference(array) for array in arrays]


def test_positions_lie_beyond_2_to_the_31():
    n, device, selection = (1 << 32) - 5, Emulator(), RandomK(1e-7)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE, new in Python 3.13
    try:  # of which only the pages are there that are touched
        grad, total = (np.frombuffer(mmap.mmap(-1, 4 * n, flags), np.float32) for _ in "ab")
    except OSError:
        pytest.skip("this machine promises no memory that it does not have")
    k, positions = selection.count(n), positions_of(selection, n, 3, "w")
    assert positions.max() > 1 << 31
    grad[positions] = values = np.arange(1, k + 1, dtype=np.float32)
    share, row = device.empty(k), np.zeros(1, structs.SHARED)
    [(row["factor"], row["first"])] = selection.progressions([n], 3, ["w"])
    row["n"], row["k"], row["n_groups"] = n, k, -(-k // structs.THREADS)
    row["grad"], row["sum"], row["share"] = map(device.address, (grad, total, share))
    kernels = device.functions(cuda.source(), ["take_shares", "add_shares"])
    table, owners = device.upload(row.view(np.uint8)), device.zeros(row["n_groups"][0], np.uint32)
    for name, more in (("take_shares", 2), ("add_shares", 1)):
        flat = [table, owners, np.uint32(0), *(device.zeros(4, np.uint32) for _ in range(more))]
        kernels[name](owners.size, structs.THREADS, flat, 0)
    np.testing.assert_array_equal(share, values)
    np.testing.assert_array_equal(total[positions], values)


def test_halves_are_those_of_the_cpu():
    device, every = Emulator(), np.arange(1 << 16, dtype=np.uint16)
    kernels = device.functions(cuda.source(), ["find_beyond", "write_halves", "read_halves"])

    def launch(name, values, *more):
        kernels[name](-(-values.size // 256), 256, [values, np.uint64(values.size), *more], 0)

    wide = device.empty(every.size)
    launch("read_halves", device.upload(every), wide)
    assert wide.tobytes() == CPU.from_float16(every.view(np.float16)).tobytes()
    finite = np.sort(wide[np.isfinite(wide)])
    between = finite[:-1] + np.diff(finite) / 2
    beyond = np.float32([7e4, -1e30, 3.4e38, 100, -99.99, 1e-30, 1e-45, -0.0])
    values = np.concatenate([finite, between, np.nextafter(between, np.float32(1e9)), beyond])
    for limit in (np.float32(65504), np.float32(100)):
        for largest, raised in ((LARGEST_FINITE_BITS, 0), (int(limit.view(np.uint32)), 1)):
            flag, halves = device.zeros(1, np.uint32), device.empty(values.size, np.float16)
            launch("find_beyond", device.upload(values), np.uint32(largest), flag)
            assert flag[0] == raised
            launch("write_halves", device.upload(values), limit.view(np.uint32), flag, halves)
            expected = CPU.to_float16(values, float(limit))
            expected = np.full_like(expected, np.nan) if raised else expected
            assert halves.tobytes() == expected.tobytes()
