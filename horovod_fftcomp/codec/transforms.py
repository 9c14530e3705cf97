"""Linear maps between a flat gradient and its coefficients.

A transform knows lengths and options; the arithmetic of a block lies in ``kernels``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import numpy as np

from horovod_fftcomp.types import Array, Body, Coefficients

BLOCK_LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)


@dataclass(frozen=True)
class Identity:
    """Leave the gradient as it is: a coefficient is an element."""

    spec_name = "Identity"
    reals_per_bin = 1
    bins_per_block = 1
    gain = 1  # the largest element that coefficients of at most 1 can make

    def n_bins(self, numel: int) -> int:
        """Return the number of coefficients of ``numel`` elements."""
        return numel

    def forward(
        self, flat: Array, residual: Array | None, k: int, kernels: ModuleType, own: bool = True
    ) -> Coefficients:
        """Return ``flat`` plus ``residual``, ``k`` of them to be sent; 0: all.

        Unless ``own`` the array may be ``flat`` itself.
        """
        if residual is None and not own:
            return kernels.topk_threshold(flat, k, 1)
        return kernels.add_residual(flat, residual, k)

    def inverse(self, coeffs: Array, numel: int, kernels: ModuleType) -> Array:
        """Return ``coeffs`` itself, float32 ``[numel]``."""
        del kernels, numel
        return coeffs

    def sum(self, parts: Sequence[Body], numel: int, kernels: ModuleType) -> Array:
        """Return the ``numel`` elements of the sum of payloads' bodies, float32."""
        return kernels.sum_values(parts, numel, False)

    def energy(self, coeffs: Array) -> float:
        """Return the sum of squares of the gradient whose coefficients are given."""
        return float(np.dot(coeffs, coeffs))


@dataclass(frozen=True)
class _Blocks:
    """What transforms of consecutive blocks have in common."""

    block: int = 256

    def __post_init__(self) -> None:
        if type(self.block) is not int or self.block not in BLOCK_LENGTHS:
            raise ValueError(
                f"{type(self).__name__}.block must be one of "
                f"{', '.join(map(str, BLOCK_LENGTHS))}; got {self.block!r}"
            )

    @property
    def bins_per_block(self) -> int:
        """Coefficients in a block."""
        return self.block

    @property
    def gain(self) -> int:
        """A bound on the largest element that components of at most 1 can make."""
        return 2 * self.block

    def n_bins(self, numel: int) -> int:
        """Return the number of coefficients of ``numel`` elements."""
        return -(-numel // self.block) * self.bins_per_block


@dataclass(frozen=True)
class BlockFFT(_Blocks):
    """Real FFT of consecutive blocks, as L/2 packed complex bins each (Wang et al., HPDC 2020).

    The last block is padded with zeros. Bin 0 is (DC, Nyquist). Scaled by 1/L, so the largest
    coefficient never exceeds the largest element.
    """

    spec_name = "BlockFFT"
    reals_per_bin = 2

    @property
    def bins_per_block(self) -> int:
        """Complex bins in a block."""
        return self.block // 2

    def forward(
        self, flat: Array, residual: Array | None, k: int, kernels: ModuleType, own: bool = True
    ) -> Coefficients:
        """Return the spectra of all blocks plus ``residual``, ``k`` bins to be sent; 0: all."""
        del own  # it always is
        return kernels.rfft_blocks(flat, self.block, residual, k)

    def inverse(self, coeffs: Array, numel: int, kernels: ModuleType) -> Array:
        """Return the first ``numel`` elements of the blocks with these spectra, float32."""
        return kernels.irfft_blocks(coeffs, self.block, numel)

    def sum(self, parts: Sequence[Body], numel: int, kernels: ModuleType) -> Array:
        """Return the ``numel`` elements of the sum of payloads' bodies, float32."""
        return kernels.irfft_sum(parts, self.block, numel)

    def energy(self, coeffs: Array) -> float:
        """Return the sum of squares of the gradient whose spectra are given (Parseval)."""
        ends = coeffs[:: self.bins_per_block]
        total = 2 * np.vdot(coeffs, coeffs).real - np.vdot(ends, ends).real
        return float(total) * self.block


@dataclass(frozen=True)
class BlockDCT(_Blocks):
    """DCT-II of consecutive blocks, L real coefficients each; the last block padded with zeros.

    Orthonormal divided by sqrt(L), so the largest coefficient never exceeds the largest element.
    """

    spec_name = "BlockDCT"
    reals_per_bin = 1

    def forward(
        self, flat: Array, residual: Array | None, k: int, kernels: ModuleType, own: bool = True
    ) -> Coefficients:
        """Return the coefficients of all blocks plus ``residual``, ``k`` to be sent; 0: all."""
        del own  # it always is
        return kernels.dct_blocks(flat, self.block, residual, k)

    def inverse(self, coeffs: Array, numel: int, kernels: ModuleType) -> Array:
        """Return the first ``numel`` elements of the blocks with these DCTs, float32."""
        return kernels.idct_blocks(coeffs, self.block, numel)

    def sum(self, parts: Sequence[Body], numel: int, kernels: ModuleType) -> Array:
        """Return the ``numel`` elements of the sum of payloads' bodies, float32."""
        return kernels.idct_sum(parts, self.block, numel)

    def energy(self, coeffs: Array) -> float:
        """Return the sum of squares of the gradient whose DCTs are given."""
        return float(np.dot(coeffs, coeffs)) * self.block


Transform = Identity | BlockFFT | BlockDCT
