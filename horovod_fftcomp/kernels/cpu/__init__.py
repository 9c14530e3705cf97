"""CPU kernels, compiled by Numba.

They release the GIL and split large arrays among ``threads``. Each is compiled once, for one
combination of types, and cached on disk, so that ranks that start together write the same files.
"""

# ruff: noqa: F401 (the kernels of this backend)

from horovod_fftcomp.kernels.cpu.adaptive import bin_winners, draw_chosen, sums_below, take_chosen
from horovod_fftcomp.kernels.cpu.bucket import encode_tensor, sum_payloads
from horovod_fftcomp.kernels.cpu.buffer_pool import empty
from horovod_fftcomp.kernels.cpu.coded_levels import add_coded, encode_coded
from horovod_fftcomp.kernels.cpu.common_index import (
    pack_bits,
    sum_sparse,
    unpack_bits,
)
from horovod_fftcomp.kernels.cpu.count_sketch import estimate, sketch
from horovod_fftcomp.kernels.cpu.dense import moments
from horovod_fftcomp.kernels.cpu.float16 import from_float16, to_float16
from horovod_fftcomp.kernels.cpu.lowrank import low_rank, orthonormal
from horovod_fftcomp.kernels.cpu.momentum import momentum_accumulate, zero_at
from horovod_fftcomp.kernels.cpu.positions import (
    pack_bitmap,
    pack_offsets,
    positions_of,
    unpack_bitmap,
    unpack_offsets,
)
from horovod_fftcomp.kernels.cpu.signs import majority_sign
from horovod_fftcomp.kernels.cpu.sparse import (
    add_residual,
    count_above,
    max_abs_bits,
    select_quantize_pack,
    sum_values,
    topk_threshold,
)
from horovod_fftcomp.kernels.cpu.transforms import forward_blocks, inverse_blocks, sum_blocks
