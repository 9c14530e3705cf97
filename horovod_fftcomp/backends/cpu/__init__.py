"""The kernels on a CPU, by Numba; same names, arguments and bytes as ``reference``.

They release the GIL and share out large arrays to ``threads``. Each is compiled once, for one
combination of types, and cached on disk, so that ranks which start together write the same files.
"""

from horovod_fftcomp.backends.cpu.halves import from_float16, to_float16
from horovod_fftcomp.backends.cpu.memory import empty
from horovod_fftcomp.backends.cpu.positions import (
    pack_bitmap,
    pack_entropy,
    pack_offsets,
    unpack_bitmap,
    unpack_entropy,
    unpack_offsets,
)
from horovod_fftcomp.backends.cpu.shared import (
    chunk_winners,
    low_pass,
    pack_bits,
    positions_of,
    unpack_bits,
)
from horovod_fftcomp.backends.cpu.transforms import (
    dct_blocks,
    idct_blocks,
    idct_sum,
    irfft_blocks,
    irfft_sum,
    rfft_blocks,
)
from horovod_fftcomp.backends.cpu.values import add, count_above, peak_bits, rank, sum_values, take

__all__ = [
    "add",
    "chunk_winners",
    "count_above",
    "dct_blocks",
    "empty",
    "from_float16",
    "idct_blocks",
    "idct_sum",
    "irfft_blocks",
    "irfft_sum",
    "low_pass",
    "pack_bitmap",
    "pack_bits",
    "pack_entropy",
    "pack_offsets",
    "peak_bits",
    "positions_of",
    "rank",
    "rfft_blocks",
    "sum_values",
    "take",
    "to_float16",
    "unpack_bitmap",
    "unpack_bits",
    "unpack_entropy",
    "unpack_offsets",
]
