"""Block FFT and DCT: oracles of methods 1.2, 1.3 and 1.9."""

from __future__ import annotations

import numpy as np
import pytest

from horovod_fftcomp import get_codec
from horovod_fftcomp.codec.transforms import BLOCK_LENGTHS, BlockDCT, BlockFFT, Identity
from tests.backends import BACKENDS, load_backend
from tests.loops import each

TRANSFORMS = [Identity()] + [t(n) for t in (BlockFFT, BlockDCT) for n in BLOCK_LENGTHS]


@each("backend", BACKENDS)
@each("numel", [0, 1, 63, 256, 1000, 5000, 40_000])
@each("transform", TRANSFORMS)
def test_inverse_returns_the_gradient(transform, numel, backend):
    kernels = load_backend(backend)
    x = np.random.default_rng(numel).standard_normal(numel).astype(np.float32)
    coeffs, peak, _, ties = transform.forward(x, None, 0, kernels)[:4]
    assert (peak, ties) == (kernels.max_abs_bits(coeffs), coeffs.size)
    with_residual = transform.forward(x, coeffs, 0, kernels).array
    assert with_residual.tobytes() == (coeffs + coeffs).tobytes()
    assert coeffs.size == transform.n_bins(numel)
    assert coeffs.view(np.float32).size == coeffs.size * transform.reals_per_bin
    back = transform.inverse(coeffs, numel, kernels)
    assert back.dtype == np.float32
    np.testing.assert_allclose(back, x, atol=4e-6)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_energy_is_that_of_the_gradient(transform):
    x = np.random.default_rng(0).standard_normal(4096 * 3).astype(np.float32)
    coeffs = transform.forward(x, None, 0, load_backend("cpu")).array
    assert transform.energy(coeffs) == pytest.approx(float(x @ x), rel=1e-5)


@pytest.mark.parametrize("transform", TRANSFORMS[1:])
def test_backends_agree_to_a_float32_tolerance(transform):
    x = np.random.default_rng(1).standard_normal(transform.block * 5).astype(np.float32)
    spectra = [transform.forward(x, None, 0, load_backend(name)).array for name in BACKENDS]
    error = np.linalg.norm(spectra[0] - spectra[1]) / np.linalg.norm(spectra[0])
    assert error < 1e-6


@pytest.mark.parametrize("backend", BACKENDS)
def test_fft_bins_are_the_half_spectrum_over_the_length(backend):
    x = np.random.default_rng(2).standard_normal(256).astype(np.float32)
    bins = BlockFFT(256).forward(x, None, 0, load_backend(backend)).array
    full = np.fft.rfft(x.astype(np.float64)) / 256
    np.testing.assert_allclose(bins[1:], full[1:-1], atol=1e-7)
    np.testing.assert_allclose(bins[0], full[0].real + 1j * full[-1].real, atol=1e-7)


@each("transform", [BlockFFT(256), BlockDCT(256)])
@each("backend", BACKENDS)
def test_no_coefficient_exceeds_the_largest_element(transform, backend):
    x = np.full(256, 3e38, np.float32)
    for sign in (np.ones(256), np.sign(np.cos(np.arange(256) * 0.7))):
        wave = (x * sign).astype(np.float32)
        coeffs = transform.forward(wave, None, 0, load_backend(backend)).array
        assert np.abs(coeffs.view(np.float32)).max() <= 3e38 * (1 + 1e-6)


@pytest.mark.parametrize("recipe", ["fft", "dct"])
def test_a_constant_block_is_one_coefficient(recipe):
    codec = get_codec(recipe, density=1 / 128, bits=32, block=256)
    x = np.full(256 * 8, 0.75, np.float32)
    np.testing.assert_allclose(codec.decode(codec.encode(x)), x, rtol=1e-6)


def test_a_tone_on_a_bin_is_one_coefficient():
    codec = get_codec("fft", density=1 / 128, bits=32, block=256)
    x = np.cos(2 * np.pi * 9 * np.arange(256) / 256 + 0.3).astype(np.float32)
    np.testing.assert_allclose(codec.decode(codec.encode(x)), x, atol=1e-6)


def test_a_delta_loses_exactly_the_energy_of_the_bins_left_out():
    codec = get_codec("fft", density=0.25, bits=32, block=256)
    x = np.zeros(256, np.float32)
    x[17] = 1
    error = x - codec.decode(codec.encode(x))
    # The spectrum is flat, DC and Nyquist weigh half an interior bin: 32 interior bins are kept.
    assert float(error @ error) == pytest.approx(1 - 32 * 2 / 256, abs=1e-5)


@pytest.mark.parametrize("density", [0.01, 0.15, 0.5])
def test_the_kept_bins_are_the_best_there_are(density):
    """No other choice of k bins leaves less energy: key order equals energy order (1.2)."""
    x = np.random.default_rng(5).standard_normal(2560).astype(np.float32)
    codec = get_codec("fft", density=density, bits=32, block=256)
    error = x - codec.decode(codec.encode(x))
    full = np.fft.rfft(x.reshape(-1, 256).astype(np.float64), axis=1)
    energy = 2 * np.abs(full[:, 1:-1]) ** 2 / 256
    ends = (full[:, 0].real ** 2 + full[:, -1].real ** 2) / 256
    bins = np.sort(np.concatenate([energy.ravel(), ends]))
    k = codec.plan((2560,)).k
    assert float(error @ error) == pytest.approx(bins[: len(bins) - k].sum(), rel=1e-4)


def test_fft_keeps_more_of_neighbours_that_agree_and_less_of_heavy_tails():
    rng = np.random.default_rng(7)
    noise = rng.standard_normal(65536)
    smooth = np.empty(65536)
    smooth[0] = noise[0]
    for i in range(1, 65536):
        smooth[i] = 0.9 * smooth[i - 1] + noise[i]
    heavy = rng.laplace(size=65536)
    left = {}
    for name, x in (("smooth", smooth), ("heavy", heavy)):
        x = x.astype(np.float32)
        for recipe in ("topk", "fft"):
            codec = get_codec(recipe, density=0.1, bits=32)
            left[name, recipe] = float(((x - codec.decode(codec.encode(x))) ** 2).sum())
    assert left["smooth", "fft"] < left["smooth", "topk"]
    assert left["heavy", "topk"] < left["heavy", "fft"]


@each("block", [0, 1, 63, 100, 8192])
@each("recipe", ["fft", "dct"])
def test_other_block_lengths_are_refused(recipe, block):
    with pytest.raises(ValueError, match="block must be one of 64, 128"):
        get_codec(recipe, block=block)


@each("block", [256.5, None])
@each("recipe", ["fft", "dct"])
def test_block_lengths_that_are_no_whole_number_are_refused(recipe, block):
    with pytest.raises(TypeError, match="block must be a whole number"):
        get_codec(recipe, block=block)


def test_every_offered_block_length_works():
    for block in BLOCK_LENGTHS:
        for recipe in ("fft", "dct"):
            codec = get_codec(recipe, block=block, density=1.0, bits=32)
            x = np.random.default_rng(block).standard_normal(9000).astype(np.float32)
            np.testing.assert_allclose(codec.decode(codec.encode(x)), x, atol=1e-5)
