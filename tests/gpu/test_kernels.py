"""The kernels in the emulator: the CPU's bytes, in every schedule, whatever arrives."""

from __future__ import annotations

import numpy as np
import pytest

from horovod_fftcomp import Codec, PayloadError
from horovod_fftcomp.backends import gpu, load_backend
from horovod_fftcomp.backends.gpu.decoder import CORRUPT, NOT_FINITE, SOUND, Decoder
from horovod_fftcomp.backends.gpu.encoder import Encoder
from horovod_fftcomp.positions import Layout
from horovod_fftcomp.quantizers import Float32
from horovod_fftcomp.sparsifiers import Threshold, TopK
from horovod_fftcomp.transforms import BLOCK_LENGTHS, BlockDCT, BlockFFT, Identity
from horovod_fftcomp.wire import DTYPES, read_header
from tests.contracts import CASES, CODECS, make_codec
from tests.gpu.emulator import BACKWARD, FORWARD, SHUFFLED, Emulator

SCHEDULES = (FORWARD, BACKWARD, SHUFFLED)
FIXED = [key for key in CODECS if not isinstance(make_codec(key).sparsifier, Threshold)]
PLAIN = [key for key in FIXED if isinstance(make_codec(key).transform, Identity)]
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


class Encoded:
    """What an encoder made of some gradients."""

    def __init__(
        self,
        codec: Codec,
        grads: list[np.ndarray],
        residuals: list[np.ndarray | None] | None = None,
        schedule: int = FORWARD,
        keep: bool = True,
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
        made = self.encoder.encode(on_device, old, self.coeffs)
        self.not_finite = made.not_finite
        self.message = made.message[: self.encoder.message_nbytes]
        self.payloads = [
            self.message[begin : begin + codec.plan(shape).payload_nbytes]
            for begin, shape in zip(self.encoder.offsets, shapes, strict=True)
        ]


def a_residual(codec: Codec, grad: np.ndarray) -> np.ndarray | None:
    """Return coefficients of the gradient's size, which do not overflow with it."""
    plan = codec.plan(grad.shape)
    peak = np.abs(grad).max(initial=0)
    if plan.layout is Layout.RAW or not peak < 1e37:
        return None
    values = np.random.default_rng(6).standard_normal((plan.n_bins, 2)).astype(np.float32) * peak
    is_complex = codec.transform.reals_per_bin == 2
    return values.view(np.complex64)[:, 0] if is_complex else np.ascontiguousarray(values[:, 0])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("key", PLAIN)
def test_payloads_and_residuals_are_the_cpus(key, schedule):
    codec = make_codec(key)
    names = list(GRADS)
    grads = [GRADS[name] for name in names]
    residuals = [a_residual(codec, grad) if i % 2 else None for i, grad in enumerate(grads)]
    made = Encoded(codec, grads, residuals, schedule)
    for i, name in enumerate(names):
        coeffs = codec.coeffs_of(grads[i], grads[i].shape, CPU, residuals[i])
        expected = codec.encode_coeffs(coeffs, grads[i].shape, kernels=CPU)
        assert made.payloads[i].tobytes() == expected.payload.tobytes(), name
        assert bool(made.not_finite[i]) == (name in ("nan", "inf")), name
        if expected.residual is not None:
            assert made.coeffs[i].tobytes() == expected.residual.tobytes(), name


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
    decoder = Decoder(device, [codec] * len(shapes), shapes, encoder, len(messages))
    sums = [device.empty(int(np.prod(shape))) for shape in shapes]
    gathered = device.upload(np.concatenate(messages))
    not_finite, found = decoder.decode(gathered, sums)
    return sums, not_finite, found.reshape(len(messages), -1, 4)[:, : len(shapes), 1]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("key", FIXED)
def test_sums_are_the_cpus(key, schedule):
    codec = make_codec(key)
    rng = np.random.default_rng(7)
    shapes = [(40_000,), (33, 31), (4096,), (1,), (300,)]
    made = [
        Encoded(codec, [rng.standard_t(3, shape).astype(np.float32) for shape in shapes])
        for _ in range(3)
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


@pytest.mark.parametrize("key", ["topk", "topk-entropy", "topk-bitmap", "fft", "dct"])
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


@pytest.mark.parametrize("key", ["topk", "topk-entropy", "topk-bitmap", "topk-all", "fft"])
def test_corrupt_bytes_never_pass_as_a_sum_of_others(key):
    """Any byte that changes is found, unless it makes another payload that could have been sent."""
    codec = make_codec(key)
    shape = (5000,)
    rng = np.random.default_rng(8)
    made = Encoded(codec, [rng.standard_normal(shape).astype(np.float32)])
    plan = codec.plan(shape)
    places = [*range(plan.header_nbytes),
              *rng.integers(plan.header_nbytes, plan.payload_nbytes, 120)]  # fmt: skip
    for place in places:
        message = made.message.copy()
        message[place] ^= 1 << rng.integers(8)
        sums, not_finite, status = decoded(codec, [message], made.encoder, [shape], FORWARD)
        try:
            expected = codec.decode(message[: plan.payload_nbytes])
        except PayloadError:
            assert status[0, 0] == CORRUPT, place
            assert not_finite[0] == 1
            assert np.isnan(sums[0]).any()
        else:
            assert status[0, 0] == SOUND, place
            np.testing.assert_allclose(sums[0], expected, rtol=1e-5, atol=1e-6)


def test_headers_are_read_by_the_cpu():
    made = Encoded(make_codec("fft"), [GRADS["several-tiles"]])
    header = read_header(made.payloads[0])
    assert header.dtype in DTYPES
    assert header.shape == GRADS["several-tiles"].shape


def test_tables_of_twiddles_are_the_same_everywhere():
    """Other ones would let the ranks of a job drift apart."""
    import zlib

    from horovod_fftcomp.backends.gpu import tables

    whole = b"".join(
        t(b).tobytes() for b in (64, 256, 4096) for t in (tables.roots, tables.cosines)
    )
    assert f"{zlib.crc32(whole):08x}" == "caf4feb4"


def test_every_kernel_that_is_used_is_known():
    device = Emulator()
    for key in FIXED:
        codec = make_codec(key)
        encoder = Encoder(device, [codec], [(5000,)])
        decoder = Decoder(device, [codec], [(5000,)], encoder, 2)
        assert set(encoder._kernels) | set(decoder._kernels) <= set(gpu.NAMES)
