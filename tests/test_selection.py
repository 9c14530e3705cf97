"""Exact k, ties to the lower index, keys that neither overflow nor underflow."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from horovod_fftcomp import get_codec
from horovod_fftcomp.backends import BACKENDS, load_backend
from horovod_fftcomp.sparsifiers import TopK, key_exponent


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
        assert kernels.select_top_k(x, k, 1, 0).tolist() == list(expected)


@given(
    npst.arrays(np.float32, st.integers(0, 300), elements=st.floats(-100, 100, width=32)),
    st.data(),
)
def test_backends_choose_the_same_positions(x, data):
    k = data.draw(st.integers(0, x.size))
    chosen = [load_backend(name).select_top_k(x, k, 1, 0).tolist() for name in BACKENDS]
    assert chosen[0] == chosen[1]
    assert len(chosen[0]) == k
    if 0 < k < x.size:
        rest = np.delete(np.abs(x), chosen[0])
        assert np.abs(x[chosen[0]]).min() >= rest.max()


@pytest.mark.parametrize("backend", BACKENDS)
def test_bin_zero_counts_half(backend):
    kernels = load_backend(backend)
    spectrum = np.zeros(8, np.complex64)
    spectrum[0], spectrum[3], spectrum[4] = 1.2, 1j, 1.2  # blocks of 4 bins: 0 and 4 are ends
    assert kernels.select_top_k(spectrum, 1, 4, 0).tolist() == [3]
    assert kernels.select_top_k(spectrum, 2, 4, 0).tolist() == [0, 3]


@pytest.mark.parametrize("scale", [1e-37, 1e-20, 1.0, 1e18, 1e25, 1e38])
@pytest.mark.parametrize("backend", BACKENDS)
def test_spectra_of_any_scale_choose_the_same_bins(backend, scale):
    kernels = load_backend(backend)
    x = np.random.default_rng(0).uniform(-1, 1, 2048).astype(np.float32)
    spectrum = x.view(np.complex64)
    expected = kernels.select_top_k(spectrum, 100, 128, 0)
    scaled = (x * np.float32(scale)).view(np.complex64)
    exponent = key_exponent(kernels.peak_bits(scaled))
    assert kernels.select_top_k(scaled, 100, 128, exponent).tolist() == expected.tolist()


@pytest.mark.parametrize("density", [0.001, 0.01, 0.2, 0.7])
def test_contraction_and_order_of_top_k(density):
    x = np.random.default_rng(1).standard_t(2, 10_000).astype(np.float32)
    codec = get_codec("topk", density=density)
    y = codec.decode(codec.encode(x))
    sent = y != 0
    assert sent.sum() == codec.plan(x.shape).k
    assert (y[sent] == x[sent]).all()
    assert np.abs(x[sent]).min() >= np.abs(x[~sent]).max()
    assert ((x - y) ** 2).sum() <= (1 - density) * (x**2).sum()
