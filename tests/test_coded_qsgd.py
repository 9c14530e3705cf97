"""Entropy-coded levels: the error for what they take, what fits, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from horovod_fftcomp import PayloadError, get_codec
from horovod_fftcomp.codec.backend import BACKENDS, load_backend
from horovod_fftcomp.kernels import threads
from horovod_fftcomp.wire import coded_levels
from horovod_fftcomp.wire.coded_levels import CHUNK, LEVELS, CodedLevels

FORM = CodedLevels(2, 128)
_HEADER = 48


def _embedding(rng: np.random.Generator, n: int) -> np.ndarray:
    """Return gradients of rows of 64, of which 9 in 10 are zeros."""
    rows = rng.standard_normal((-(-n // 64), 64))
    rows[rng.random(len(rows)) < 0.9] = 0
    return rows.reshape(-1)[:n]


# The square of the error over that of values: at most that of ``qsgd(levels=2, bucket=128)`` times
# this number. Without tails, as many levels take more bits.
DISTRIBUTIONS: dict[str, tuple[Callable[[np.random.Generator, int], np.ndarray], float]] = {
    "normal": (lambda rng, n: rng.standard_normal(n), 1.03),
    "Laplace": (lambda rng, n: rng.laplace(size=n), 0.6),
    "Student": (lambda rng, n: rng.standard_t(3, n), 0.5),
    "embedding": (_embedding, 0.15),
    "uniform": (lambda rng, n: rng.uniform(-1, 1, n), 2.5),
}


def _values(name: str, n: int) -> np.ndarray:
    return DISTRIBUTIONS[name][0](np.random.default_rng(0), n).astype(np.float32)


def _error(x: np.ndarray, **options: object) -> float:
    codec = get_codec("qsgd", **options)
    return float(((codec.decode(codec.encode(x)) - x) ** 2).sum() / (x**2).sum())


def _heads(payload: np.ndarray, form: CodedLevels, n: int) -> np.ndarray:
    """Return the two words that each chunk of a payload begins with."""
    body = payload[_HEADER:].view(np.uint32)
    return np.stack([body[form.body_words(at) :][:2] for at in range(0, n, CHUNK)])


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_error_at_a_third_fewer_bytes(name):
    x = _values(name, 40 * CHUNK + 1000)
    shared = {"levels": 2, "bucket": 128}
    sizes = [
        get_codec("qsgd", **shared, coded=coded).payload_nbytes(x.size) for coded in (False, True)
    ]
    assert sizes[1] < 0.72 * sizes[0]
    assert _error(x, **shared, coded=True) < DISTRIBUTIONS[name][1] * _error(x, **shared)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("levels", LEVELS)
def test_chunks_are_nearly_full(name, levels):
    x, form = _values(name, 40 * CHUNK), CodedLevels(levels, 128)
    payload = get_codec("qsgd", levels=levels, bucket=128, coded=True).encode(x)
    heads = _heads(payload, form, x.size)
    used = (heads[:, 1] & 0xFFFF) / form.room(CHUNK)
    assert heads[:, 0].all()
    assert used.max() <= 1
    assert used.mean() > (0.4 if name == "embedding" else 0.94)  # it has all the levels there are


@pytest.mark.parametrize("levels", LEVELS)
def test_frequencies_and_costs(levels):
    for table in (0, 1):
        freqs = np.array(coded_levels.frequencies(levels, table)[:225], float).reshape(15, 15)
        assert freqs.sum() == 4096
        assert (freqs == freqs.T).all()
        assert (freqs == freqs[::-1, ::-1]).all()
        assert (freqs > 0).sum() == (2 * CodedLevels(levels, 64).highest[table] + 1) ** 2
    costs = coded_levels.costs(CodedLevels(levels, 64))
    assert (np.diff(costs, axis=1) >= -1).all()  # larger values never cost less
    assert costs[0].max() * CHUNK < 256 * 32 * CodedLevels(levels, 64).room(CHUNK)


def test_grids_do_not_depend_on_draws():
    x = _values("Student", 3 * CHUNK)
    codec = get_codec("qsgd", levels=2, bucket=128, coded=True)
    units = {_heads(codec.encode(x, step), FORM, x.size)[:, 0].tobytes() for step in range(20)}
    assert len(units) == 1


@pytest.mark.parametrize("n", [200, CHUNK, 9 * CHUNK + 77])
@pytest.mark.parametrize("levels", LEVELS)
def test_levels_that_do_not_fit_are_drawn_from_a_coarser_grid(n, levels, monkeypatch):
    """All backends take the same one. Where no grid fits, zeros are sent."""
    form, values = CodedLevels(levels, 128), _values("normal", n)
    rooms = {m: form.room(m) for m in (CHUNK, n % CHUNK)}
    monkeypatch.setattr(CodedLevels, "room", lambda self, m: rooms[m])
    for slack, fits in ((-(1 << 20), True), (1 << 20, False)):  # all grids are tried, or none
        monkeypatch.setattr(CodedLevels, "slack", lambda self, m, slack=slack: slack)
        body = np.frombuffer(_encoded(form, values), np.uint32)
        finest = np.abs(values[:CHUNK]).max() * coded_levels.STEPS_OF_GRIDS[-1]
        assert (body[:1].view(np.float32)[0] > finest) == fits
        assert body.any() == fits


def _encoded(form: CodedLevels, values: np.ndarray) -> bytes:
    """Return the body, which is the same from all backends, and decodes to what is subtracted."""
    bodies = set()
    for kernels in map(load_backend, BACKENDS):
        left, body = values.copy(), np.zeros(form.body_words(values.size), np.uint32)
        total = np.zeros_like(values)
        kernels.add_coded(total, form, body, kernels.encode_coded(left, form, body, 5, True))
        np.testing.assert_allclose(left + total, values, rtol=1e-5, atol=1e-5)
        bodies.add((body.tobytes(), left.tobytes()))
    assert len(bodies) == 1
    return bodies.pop()[0]


def test_bytes_do_not_depend_on_the_number_of_threads(monkeypatch):
    x = _values("Laplace", 20 * CHUNK + 5)
    codec = get_codec("qsgd", levels=2, bucket=64, coded=True)
    found = []
    for n_threads in (1, 3):
        monkeypatch.setattr(threads, "_num_threads", n_threads)
        payload = codec.encode(x)
        found.append((payload.tobytes(), codec.decode(payload).tobytes()))
    assert found[0] == found[1]


def test_the_mean_is_exact_over_many_magnitudes():
    """A bucket far below the largest value has a scale of its own, down to 2^-31 of that."""
    x = np.zeros(CHUNK, np.float32)
    x[::128] = 2.0 ** -np.arange(0, 32, 0.5)
    codec = get_codec("qsgd", levels=2, bucket=128, coded=True)
    draws = [codec.decode(codec.encode(x, step)) for step in range(300)]
    np.testing.assert_allclose(np.mean(draws, 0)[::128], x[::128], rtol=0.05)
    assert not np.delete(draws[0], np.arange(0, CHUNK, 128)).any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_bodies_that_are_never_written_are_refused(backend):
    codec, x = get_codec("qsgd", levels=2, bucket=128, coded=True), _values("normal", 3 * CHUNK)
    good = codec.encode(x)
    at = _HEADER + 4 * FORM.chunk_words(CHUNK)  # the second chunk
    states = at + 4 * (FORM.chunk_words(CHUNK) - FORM.room(CHUNK) - coded_levels.STATE_WORDS)
    n_words = int(good[at + 4 : at + 8].view(np.uint32)[0])
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
    ):
        damaged = good.copy()
        damaged[place : place + 4].view(np.uint32)[:] = word
        with pytest.raises(PayloadError, match=f"body.*{reason}"):
            codec.decode(damaged, backend=backend)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "levels must be one of 1, 2, 3 with coded=True; got 7"),
        ({"levels": 4}, "levels must be one of 1, 2, 3 with coded=True; got 4"),
        ({"levels": 2, "bucket": 100}, "bucket must be one of 64, .* got 100"),
        ({"levels": 2, "norm": "l2"}, "norm must be max with coded=True; got 'l2'"),
        ({"levels": 1, "error_feedback": True}, "error_feedback=True makes the residuals"),
    ],
)
def test_options_that_cannot_be_coded(options, message):
    with pytest.raises(ValueError, match=message):
        get_codec("qsgd", coded=True, **options)
