"""Exact k, ties to the lower index, keys that neither overflow nor underflow."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from horovod_fftcomp import get_codec
from horovod_fftcomp.codec.sparsifiers import TopK
from horovod_fftcomp.kernels import threads
from horovod_fftcomp.kernels.cpu import topk
from horovod_fftcomp.kernels.cpu.bucket import BucketCodec
from horovod_fftcomp.kernels.cpu.jit import kernel_of
from horovod_fftcomp.kernels.cpu.topk import (
    FEW_SAMPLES,
    GROUP,
    key_scale,
)
from tests.backends import BACKENDS, load_backend
from tests.contracts import positions_chosen
from tests.reference import key_exponent, max_abs_bits, topk_threshold

kth_of_few, sample = kernel_of(topk.kth_of_few), kernel_of(topk.sample_of)


@pytest.mark.parametrize(
    ("density", "n", "k"),
    [(0.01, 0, 0), (0.01, 1, 1), (0.01, 99, 1), (0.1, 30, 3), (0.15, 128, 19), (1.0, 7, 7),
     (0.29, 100, 29), (1e-9, 10**6, 1), (0.001, 11_173_962, 11_173)],
)  # fmt: skip
def test_count(density, n, k):
    assert TopK(density).count(n) == k


@pytest.mark.parametrize("density", [0, 0.0, -0.1, 1.0001, 2, float("nan"), True])
def test_other_densities_are_refused(density):
    with pytest.raises(ValueError, match=r"density must lie in \(0, 1\]"):
        TopK(density)


@pytest.mark.parametrize("backend", BACKENDS)
def test_ties_go_to_the_lower_index(backend):
    kernels = load_backend(backend)
    x = np.array([1, -2, 2, 1, -2, 0], np.float32)
    for k, expected in [(1, [1]), (2, [1, 2]), (3, [1, 2, 4]), (4, [0, 1, 2, 4]), (6, range(6))]:
        assert positions_chosen(kernels, x, k) == list(expected)


@given(
    npst.arrays(np.float32, st.integers(1, 300), elements=st.floats(-100, 100, width=32)),
    st.data(),
)
def test_backends_choose_the_same_positions(x, data):
    k = data.draw(st.integers(1, x.size))
    chosen = [positions_chosen(load_backend(name), x, k) for name in BACKENDS]
    assert chosen[0] == chosen[1]
    assert len(chosen[0]) == k
    if k < x.size:
        rest = np.delete(np.abs(x), chosen[0])
        assert np.abs(x[chosen[0]]).min() >= rest.max()


@pytest.mark.parametrize("backend", BACKENDS)
def test_bin_zero_counts_half(backend):
    kernels = load_backend(backend)
    spectrum = np.zeros(8, np.complex64)
    spectrum[0], spectrum[3], spectrum[4] = 1.2, 1j, 1.2  # blocks of 4 bins: 0 and 4 are ends
    assert positions_chosen(kernels, spectrum, 1, 4) == [3]
    assert positions_chosen(kernels, spectrum, 2, 4) == [0, 3]


@pytest.mark.parametrize("scale", [1e-37, 1e-20, 1.0, 1e18, 1e25, 1e38])
@pytest.mark.parametrize("backend", BACKENDS)
def test_spectra_of_any_scale_choose_the_same_bins(backend, scale):
    kernels = load_backend(backend)
    x = np.random.default_rng(0).uniform(-1, 1, 2048).astype(np.float32)
    spectrum = x.view(np.complex64)
    expected = positions_chosen(kernels, spectrum, 100, 128)
    scaled = (x * np.float32(scale)).view(np.complex64)
    assert positions_chosen(kernels, scaled, 100, 128) == expected


@pytest.mark.parametrize("density", [0.001, 0.01, 0.2, 0.7])
def test_contraction_and_order_of_top_k(density):
    x = np.random.default_rng(1).standard_t(2, 10_000).astype(np.float32)
    codec = get_codec("topk", density=density, bits=32)
    y = codec.decode(codec.encode(x))
    sent = y != 0
    assert sent.sum() == codec.plan(x.shape).k
    assert (y[sent] == x[sent]).all()
    assert np.abs(x[sent]).min() >= np.abs(x[~sent]).max()
    assert ((x - y) ** 2).sum() <= (1 - density) * (x**2).sum()


def _keys_of_every_kind(n: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(11)
    normal = rng.standard_normal(n).astype(np.float32)
    mostly_zero = np.where(rng.random(n) < 0.02, normal, np.float32(0))
    rows = normal * np.repeat(np.geomspace(1e-6, 1, 100), -(-n // 100))[:n].astype(np.float32)
    return {
        "normal": normal,
        "heavy-tailed": rng.standard_t(1.2, n).astype(np.float32),
        "mostly zero": mostly_zero,
        "all zero": np.zeros(n, np.float32),
        "few values": rng.integers(-3, 4, n).astype(np.float32),
        "rows of unequal scale": rows,
        "ascending": np.arange(n, dtype=np.float32),
        "periodic": np.tile(np.float32([9, 1, 1, 1, 1, 1, 1]), -(-n // 7))[:n],
    }


@pytest.fixture(params=[1, 3], ids="{} threads".format)
def n_threads(request, monkeypatch):
    """Let kernels share out their work, on any machine."""
    monkeypatch.setattr(threads, "get_num_threads", lambda: request.param)


@pytest.mark.usefixtures("n_threads")
@pytest.mark.parametrize("kind", _keys_of_every_kind(1))
def test_large_tensors_choose_as_the_reference_does(kind):
    """Beyond a sample's size, with every number of threads, whatever the keys' distribution."""
    n = 150_000
    x = _keys_of_every_kind(n)[kind]
    for values, bins in ((x, 1), (x.view(np.complex64), 128)):
        for k in (1, 2, n // 1000, n // 100, n // 7, n // 2 - 1):
            found = [load_backend(name).topk_threshold(values, k, bins)[1:] for name in BACKENDS]
            assert found[0] == found[1]
            both = [positions_chosen(load_backend(name), values, k, bins) for name in BACKENDS]
            assert both[0] == both[1]


@pytest.mark.parametrize("kind", _keys_of_every_kind(1))
def test_small_tensors_of_a_bucket_choose_as_the_reference_does(kind):
    """Below and beyond a sample's size, whole groups of keys and others."""
    for n in (2, 300, 510, 512, 1024, 1026, 4096, 4100, 32_768, 70_002):
        x, found = _keys_of_every_kind(n)[kind], np.empty(-(-n // GROUP) * GROUP, np.int32)
        for values, bins in ((x, 1), (x.view(np.complex64), 32)):
            exponent = key_exponent(max_abs_bits(x)) if bins > 1 else 0
            options = (bins > 1, bins, key_scale(exponent))
            for k in sorted(
                {1, -(-values.size // 100), -(-values.size // 3), values.size - 1} - {0}
            ):
                chosen = kth_of_few(x, values.size, k, options, found)
                assert chosen == topk_threshold(values, k, bins)[2:4]


@pytest.mark.parametrize("n", [4100, 16_500])
def test_a_sample_that_misleads_costs_time_alone(n):
    options, places = (False, 1, np.float32(1)), np.arange(n, dtype=np.int32)
    n_samples = min(FEW_SAMPLES, n // 512 * 64)
    sampled = sample(places.view(np.float32), n, *options, np.empty(n_samples, np.int32))
    x = np.linspace(0.1, 1, n, dtype=np.float32)
    x[sampled] += 9  # all of the sample lies above all the rest
    found = np.empty(-(-n // GROUP) * GROUP, np.int32)
    for k in (n_samples + 1, n // 2, n - 1):
        assert kth_of_few(x, n, k, options, found) == topk_threshold(x, k, 1)[2:4]


@pytest.mark.parametrize("kind", [*_keys_of_every_kind(1), "blocks", "few nonzero"])
@pytest.mark.parametrize(
    ("recipe", "options"),
    [("topk", {"density": 0.001}), ("topk", {"density": 0.4}), ("fft", {"density": 0.01}),
     ("fft", {"density": 0.4, "block": 64}), ("dct", {"block": 4096})],
    ids=str,
)  # fmt: skip
def test_keys_counted_on_the_way_choose_what_is_ranked_afterwards(recipe, options, kind):
    """One thread ranks a tensor when it is written; pieces of several count keys on the way."""
    n = 600_007 if options != {"block": 4096} else 2_097_153  # 64 blocks are sampled
    more = {
        "blocks": np.where(
            np.arange(n) < n // 3, np.float32(5), np.float32(1)
        ),  # misleads a sample
        "few nonzero": np.where(np.arange(n) % 50_000 == 3, np.float32(2), np.float32(0)),
    }
    x, codec, found = {**_keys_of_every_kind(n), **more}[kind], get_codec(recipe, **options), []
    before = threads.get_num_threads()
    try:
        for count in (1, 2, 5):
            threads.set_num_threads(count)
            table = BucketCodec([codec], [(n,)])
            message = np.zeros(table.message_nbytes, np.uint8)
            residual = x[::-1].copy() if recipe == "topk" else None
            (left,) = table.encode([x], [residual], message).residuals
            (total,) = table.sum(message, 1).totals
            found.append((message.tobytes(), left.tobytes(), total.tobytes()))
    finally:
        threads.set_num_threads(before)
    assert found[0] == found[1] == found[2]
