"""Dithered levels: unbiased, spaced between ranks, in a size that is known before the data."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import horovod_fftcomp as hfc
from horovod_fftcomp import PayloadError, get_codec
from horovod_fftcomp.kernels import cpu, threads
from horovod_fftcomp.wire import coded_levels
from horovod_fftcomp.wire.coded_levels import (
    BINS,
    BINS_OF_SCALE,
    CHUNK,
    KEY_WORDS,
    PARTS,
    RATIOS,
    CodedLevels,
)
from horovod_fftcomp.wire.counter_rng import spaced
from tests import reference
from tests.backends import BACKENDS, given

FORM = CodedLevels(20, 128)
_HEADER = 48


def _embedding(rng: np.random.Generator, n: int) -> np.ndarray:
    """Return gradients of rows of 64, of which 9 in 10 are zeros."""
    rows = rng.standard_normal((-(-n // 64), 64))
    rows[rng.random(len(rows)) < 0.9] = 0
    return rows.reshape(-1)[:n]


# The square of the error over that of values, at most this number times that of ``qsgd(levels=2,
# bucket=128)``, which sends 11.8 times fewer bytes than float32.
DISTRIBUTIONS: dict[str, tuple[Callable[[np.random.Generator, int], np.ndarray], float]] = {
    "normal": (lambda rng, n: rng.standard_normal(n), 0.9),
    "Laplace": (lambda rng, n: rng.laplace(size=n), 0.5),
    "Student": (lambda rng, n: rng.standard_t(3, n), 0.4),
    "embedding": (_embedding, 0.4),
    "uniform": (lambda rng, n: rng.uniform(-1, 1, n), 2.1),
}


def _values(name: str, n: int) -> np.ndarray:
    return DISTRIBUTIONS[name][0](np.random.default_rng(0), n).astype(np.float32)


def _error(x: np.ndarray, recipe: str, **options: object) -> float:
    codec = get_codec(recipe, **options)
    return float(((codec.decode(codec.encode(x)) - x) ** 2).sum() / (x**2).sum())


def _heads(payload: np.ndarray, form: CodedLevels, n: int) -> np.ndarray:
    """Return the two words that each chunk of a payload begins with."""
    body = payload[_HEADER:].view(np.uint32)
    return np.stack([body[form.words_before(at) :][:2] for at in range(0, n, CHUNK)])


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_error_beside_that_of_stochastic_rounding(name):
    x = _values(name, 40 * CHUNK + 1000)
    rounding = _error(x, "qsgd", levels=2, bucket=128)
    assert _error(x, "dither", ratio=20, bucket=128) < DISTRIBUTIONS[name][1] * rounding


@pytest.mark.parametrize("ratio", RATIOS)
def test_the_ratio_is_kept(ratio):
    for n in (10**6, 10**5):
        assert 4 * n / get_codec("dither", ratio=ratio).payload_nbytes(n) >= 0.97 * ratio


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("ratio", [16, 30, 100])
def test_chunks_are_nearly_full(name, ratio):
    x, form = _values(name, 40 * CHUNK), CodedLevels(ratio, 128)
    heads = _heads(get_codec("dither", ratio=ratio, bucket=128).encode(x), form, x.size)
    used = (heads[:, 1] & 0xFFFF) / form.room(CHUNK)
    assert heads[:, 0].all()
    assert used.max() <= 1
    assert used.mean() > (0.7 if name == "embedding" else 0.86)  # it has all the levels there are


@pytest.mark.parametrize("ratio", RATIOS)
def test_frequencies_and_costs(ratio):
    form = CodedLevels(ratio, 256)
    for table, highest in enumerate(form.highest):
        for part in range(PARTS):
            freqs = np.array(coded_levels.frequencies(form, table, part)[:225]).reshape(15, 15)
            assert freqs.sum() == 4096
            assert freqs.max() < 4096  # the decoder's tables have 12 bits for one
            assert (freqs == freqs.T).all()
            assert (freqs > 0).sum() == (2 * highest + 1) ** 2
    costs = coded_levels.costs(form)
    for table, end in enumerate(form.ends):
        assert (np.diff(costs[table : 2 * end : 2, :60], axis=1) >= -1).all()  # larger: no cheaper
        assert not costs[2 * end + table :: 2].any()
    # The coarsest grid always fits: the mean square of a bucket is at most that of its scale, so
    # its costliest values have two magnitudes, one up to the scale and one from there on.
    below, above = costs[0][: BINS_OF_SCALE + 1], costs[0][BINS_OF_SCALE:]
    squares = (np.arange(BINS) / BINS_OF_SCALE) ** 2
    room = 1 - squares[: BINS_OF_SCALE + 1, None]
    share = room / np.maximum(squares[BINS_OF_SCALE:] - 1 + room, 1e-9)
    mean = below[:, None] * (1 - share) + above * share
    assert max(mean.max(), below.max()) * CHUNK < form.limit(CHUNK)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_mean_over_steps_is_the_value(backend):
    x = _values("normal", 300)
    codec = get_codec("dither", ratio=30, bucket=128)
    n = 30 if backend == "reference" else 3000
    draws = [codec.decode(codec.encode(x, step, **given(backend))) for step in range(n)]
    deviation = np.std(draws, 0) / n**0.5
    assert abs((np.mean(draws, 0) - x) / deviation).max() < 4.5


@pytest.mark.parametrize(("ranks", "gain"), [(2, 1.8), (4, 3.5), (8, 7)])
def test_errors_of_ranks_cancel(ranks, gain):
    """With equal gradients the mean has p^2 times less error; without spacing, p times less."""
    x = _values("normal", 8 * CHUNK)
    codec = get_codec("dither", ratio=40)
    errors = [codec.decode(codec.encode(x, 3, "w", rank=rank)) - x for rank in range(ranks)]
    alone = np.mean(np.square(errors))
    assert np.mean(np.square(np.mean(errors, 0))) < alone / ranks / gain


def test_spaced_numbers():
    for n in (1, 2, 4, 64):
        found = sorted(spaced(rank) for rank in range(n))
        assert found == [i * (1 << 32) // n for i in range(n)]


def test_grids_do_not_depend_on_dithers():
    x = _values("Student", 3 * CHUNK)
    codec = get_codec("dither", ratio=20, bucket=128)
    units = {_heads(codec.encode(x, step), FORM, x.size)[:, 0].tobytes() for step in range(20)}
    assert len(units) == 1


@pytest.mark.parametrize("n", [200, CHUNK, 9 * CHUNK + 77])
@pytest.mark.parametrize("ratio", [16, 60])
def test_levels_that_do_not_fit_are_those_of_a_coarser_grid(n, ratio, monkeypatch):
    """All backends take the same one. Where no grid fits, zeros are sent."""
    form, values = CodedLevels(ratio, 128), _values("normal", n)
    rooms = {m: form.room(m) for m in (CHUNK, n % CHUNK)}
    monkeypatch.setattr(CodedLevels, "room", lambda self, m: rooms[m])
    for slack, fits in ((-(1 << 20), True), (1 << 20, False)):  # all grids are tried, or none
        monkeypatch.setattr(CodedLevels, "slack", lambda self, m, slack=slack: slack)
        body = np.frombuffer(_encoded(form, values), np.uint32)[KEY_WORDS:]
        finest = np.abs(values[:CHUNK]).max() * coded_levels.STEPS_OF_GRIDS[-1] / 6
        assert (body[:1].view(np.float32)[0] > finest) == fits
        assert body.any() == fits


KERNELS = {
    "reference": (reference.encode_coded, reference.add_coded),
    "cpu": (cpu.encode_coded, cpu.add_coded),
}


def _encoded(form: CodedLevels, values: np.ndarray) -> bytes:
    """Return the body, which is the same from all backends, and decodes to what is subtracted."""
    bodies = set()
    for encode, add in KERNELS.values():
        left, body = values.copy(), np.zeros(form.words_before(values.size), np.uint32)
        total, key = np.zeros_like(values), 5 << 32 | spaced(1)
        add(total, form, body, encode(left, form, body, key, True))
        np.testing.assert_allclose(left + total, values, rtol=1e-5, atol=1e-5)
        bodies.add((body.tobytes(), left.tobytes()))
    assert len(bodies) == 1
    return bodies.pop()[0]


SCALES = {
    "tiny": lambda rng, n: rng.standard_normal(n) * 1e-38,
    "denormal": lambda rng, n: rng.standard_normal(n) * 1e-41,
    "of all sizes": lambda rng, n: rng.standard_normal(n) * 2.0 ** rng.integers(-120, 120, n),
    "a spike": lambda rng, n: rng.standard_normal(n) * np.where(np.arange(n), 1, 1e6),
    "zeros": lambda rng, n: np.zeros(n),
}


@pytest.mark.parametrize("name", SCALES)
@pytest.mark.parametrize("ratio", [16, 100])
def test_values_of_any_scale_are_the_same_from_all_backends(name, ratio):
    for n in (1, 300, CHUNK + 77):
        values = SCALES[name](np.random.default_rng(0), n).astype(np.float32)
        for bucket in (128, 1024):
            form = CodedLevels(ratio, bucket)
            bodies = {}
            for backend in BACKENDS:
                (encode, add), body = KERNELS[backend], np.zeros(form.words_before(n), np.uint32)
                scale = encode(values.copy(), form, body, 9 << 32, False)
                total = np.zeros_like(values)
                add(total, form, body, scale)
                bodies[body.tobytes(), total.tobytes(), scale] = backend
            assert len(bodies) == 1, bodies.values()


@pytest.mark.parametrize("backend", BACKENDS)
def test_numbers_beyond_float32_are_those_of_a_bad_gradient(backend):
    """Its levels would stand for more than a float32 holds: zeros in its place would be silent."""
    (encode, _), form = KERNELS[backend], CodedLevels(20, 128)
    body = np.zeros(form.words_before(300), np.uint32)
    scale = encode(np.full(300, 3e38, np.float32), form, body, 1, False)
    assert np.isnan(scale)
    codec = get_codec("dither")
    assert np.isfinite(codec.decode(codec.encode(np.full(2000, 1e30, np.float32)))).all()


def test_bytes_do_not_depend_on_the_number_of_threads(monkeypatch):
    x = _values("Laplace", 20 * CHUNK + 5)
    codec = get_codec("dither", ratio=20, bucket=128)
    found = []
    for n_threads in (1, 3):
        monkeypatch.setattr(threads, "chosen_threads", n_threads)
        payload = codec.encode(x)
        found.append((payload.tobytes(), codec.decode(payload).tobytes()))
    assert found[0] == found[1]


def test_buckets_of_zeros_stay_zeros():
    """So rows of an embedding that no rank uses do not move, if they are whole buckets."""
    x = np.zeros(2 * CHUNK, np.float32)
    x[CHUNK : CHUNK + 256] = 1.0
    codec = get_codec("dither", ratio=30, bucket=256)
    decoded = codec.decode(codec.encode(x))
    assert decoded[CHUNK : CHUNK + 256].all()
    assert not np.delete(decoded, np.arange(CHUNK, CHUNK + 256)).any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_bodies_that_are_never_written_are_refused(backend):
    codec, x = get_codec("dither", ratio=20, bucket=128), _values("normal", 3 * CHUNK)
    good = codec.encode(x)
    at = _HEADER + 4 * FORM.words_before(CHUNK)  # the second chunk
    states = at + 4 * (FORM.chunk_words(CHUNK) - FORM.room(CHUNK) - coded_levels.STATE_WORDS)
    n_words = int(good[at + 4 : at + 8].view(np.uint32)[0]) & 0xFFFF
    for place, word, reason in (
        (at, 0x7FC00000, "unit"),
        (at, 0xBF800000, "unit"),
        (at, 0x7F000000, "unit"),
        (at + 4, 2 << 16, "words"),
        (at + 4, FORM.room(CHUNK) + 1, "words"),
        (at + 4, n_words - 1, "states"),
        (at + 4, n_words + 1, "states"),
        (states, 0, "states"),
        (states + 4, 0xFFFFFFFF, "states"),
        (_HEADER, 1 << 20, "states"),  # other dithers
    ):
        damaged = good.copy()
        damaged[place : place + 4].view(np.uint32)[:] = word
        told = reason if backend == "reference" else "chunk"  # compiled calls tell no reason
        with pytest.raises(PayloadError, match=f"body.*{told}"):
            codec.decode(damaged, **given(backend))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ratio": 7}, "ratio must be one of 16, 20, 30, 40, 60, 80, 100, 160; got 7"),
        ({"bucket": 100}, "bucket must be one of 128, 256, 512, 1024; got 100"),
    ],
)
def test_options_that_cannot_be_coded(options, message):
    with pytest.raises(ValueError, match=message):
        get_codec("dither", **options)


def test_simulated_ranks_have_spaced_dithers():
    """A reduction by ranks goes through the same keys as a job's."""
    x = _values("normal", CHUNK)
    [step] = hfc.simulate("dither", np.stack([[x] * 4]), ratio=40)
    error = np.mean(np.square(step.average - x)) / np.mean(np.square(x))
    assert error < 0.12  # 1.2 / 16; independent dithers: 1.2 / 4


@pytest.mark.parametrize("exchange", ["gather", "sharded"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_sums_are_unbiased(exchange, ranks):
    """Were both rounds of a shard dithered alike, the sum would shrink by a tenth or more."""
    x = _values("normal", 4096)
    steps = hfc.simulate("dither", [np.stack([x] * ranks)] * 200, ratio=30, exchange=exchange)
    found = [step.average @ x / (x @ x) for step in steps]
    assert abs(np.mean(found) - 1) < 0.005
    assert np.std(found) < 0.03


def test_ranks_share_what_steps_and_names_do_not():
    codec = get_codec("dither", ratio=100)
    zero = np.zeros(CHUNK, np.float32)
    zero[0] = 1e-3  # so that all others are minus the dither, times a step
    zero[1:] = 1e-9
    places = [(0, "a", 0), (0, "a", 1), (1, "a", 0), (0, "b", 0), (1 << 63, "a", 0)]
    dithers = [codec.decode(codec.encode(zero, s, n, rank=r))[300:] for s, n, r in places]
    related = np.abs(np.corrcoef(np.stack(dithers)))[0, 1:]
    assert related[0] > 0.3  # half a level apart
    assert related[1:].max() < 0.08
