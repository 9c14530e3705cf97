"""Transforms: linear maps between a flat gradient and its coefficients.

A transform holds options and computes lengths; the arithmetic is in ``kernels``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar

import numpy as np

from horovod_fftcomp.errors import check_choice
from horovod_fftcomp.types import Array, Body, Coefficients

BLOCK_LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)


def energy_of(values: Array | None) -> float:
    """Return the sum of squares, in float64, of float32 or complex64 ``values``; 0 for None."""
    if values is None:
        return 0.0
    reals = values.reshape(-1).view(np.float32)
    return float(np.einsum("i,i", reals, reals, dtype=np.float64))


@dataclass(frozen=True)
class Identity:
    """Identity transform: the coefficients are the elements of the gradient."""

    spec_name = "Identity"
    reals_per_bin = 1
    bins_per_block = 1
    gain = 1  # the largest element that coefficients of magnitude at most 1 can produce

    def n_bins(self, numel: int) -> int:
        """Return the number of coefficients of ``numel`` elements."""
        return numel

    def forward(
        self, flat: Array, residual: Array | None, k: int, kernels: ModuleType, own: bool = True
    ) -> Coefficients:
        """Return ``flat`` plus ``residual``, with the threshold of the ``k`` largest; 0: of all.

        ``own``: a new array; else it may be ``flat`` itself.
        """
        if residual is None and own is False:
            return kernels.topk_threshold(flat, k, 1)
        return kernels.add_residual(flat, residual, k)

    def inverse(self, coeffs: Array, numel: int, kernels: ModuleType) -> Array:
        """Return ``coeffs`` itself, float32 ``[numel]``."""
        return coeffs

    def sum(self, parts: Sequence[Body], total: Array, kernels: ModuleType) -> Array:
        """Write the sum of the gradients of payload bodies to ``total``, float32; return it."""
        return kernels.sum_values(parts, total)

    def energy(self, coeffs: Array | None) -> float:
        """Return the sum of squares of the gradient with these coefficients."""
        return energy_of(coeffs)


@dataclass(frozen=True)
class _Blocks:
    """Base class of transforms of consecutive blocks of ``block`` elements."""

    block: int = 256
    is_dct: ClassVar[bool]

    def __post_init__(self) -> None:
        check_choice(f"{type(self).__name__}.block", self.block, BLOCK_LENGTHS)

    @property
    def bins_per_block(self) -> int:
        """Number of coefficients in a block."""
        return self.block

    @property
    def gain(self) -> int:
        """Upper bound on the elements that components of magnitude at most 1 can produce."""
        return 2 * self.block

    def n_bins(self, numel: int) -> int:
        """Return the number of coefficients of ``numel`` elements."""
        return -(-numel // self.block) * self.bins_per_block

    def forward(
        self, flat: Array, residual: Array | None, k: int, kernels: ModuleType, own: bool = True
    ) -> Coefficients:
        """Return the coefficients of all blocks plus ``residual``, a new array.

        With the threshold of the ``k`` largest; 0: of all.
        """
        return kernels.forward_blocks(flat, self.block, residual, k, self.is_dct)

    def inverse(self, coeffs: Array, numel: int, kernels: ModuleType) -> Array:
        """Return the first ``numel`` elements of the blocks with these coefficients, float32."""
        return kernels.inverse_blocks(coeffs, self.block, numel, self.is_dct)

    def sum(self, parts: Sequence[Body], total: Array, kernels: ModuleType) -> Array:
        """Write the sum of the gradients of payload bodies to ``total``, float32; return it."""
        return kernels.sum_blocks(parts, self.block, total, self.is_dct)


@dataclass(frozen=True)
class BlockFFT(_Blocks):
    """Real FFT of consecutive blocks, as L/2 packed complex bins each (Wang et al., HPDC 2020).

    The last block is padded with zeros. Bin 0 is (DC, Nyquist). Scaled by 1/L, so the largest
    coefficient never exceeds the largest element.
    """

    spec_name = "BlockFFT"
    is_dct = False
    reals_per_bin = 2

    @property
    def bins_per_block(self) -> int:
        """Number of complex bins in a block."""
        return self.block // 2

    def energy(self, coeffs: Array | None) -> float:
        """Return the sum of squares of the gradient with these spectra (Parseval)."""
        ends = None if coeffs is None else np.ascontiguousarray(coeffs[:: self.bins_per_block])
        return (2 * energy_of(coeffs) - energy_of(ends)) * self.block


@dataclass(frozen=True)
class BlockDCT(_Blocks):
    """DCT-II of consecutive blocks, L real coefficients each; the last block padded with zeros.

    The orthonormal DCT divided by sqrt(L), so the largest coefficient never exceeds the largest
    element.
    """

    spec_name = "BlockDCT"
    is_dct = True
    reals_per_bin = 1

    def energy(self, coeffs: Array | None) -> float:
        """Return the sum of squares of the gradient with these DCTs."""
        return energy_of(coeffs) * self.block


Transform = Identity | BlockFFT | BlockDCT
