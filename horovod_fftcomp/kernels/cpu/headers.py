"""Headers of payloads in kernels: a header of scale 0 and the changes of its checksum are given.

See ``wire.header.header_and_changes``, which makes both.
"""

from __future__ import annotations

import numpy as np

from horovod_fftcomp import wire
from horovod_fftcomp.codec.quantizers import LARGEST_FINITE_BITS
from horovod_fftcomp.kernels.cpu.arrays import as_uint64
from horovod_fftcomp.kernels.cpu.inlining import inlined

NAN_BITS = 0x7FC00000
_VALUES_WORD = wire.SCALE_OFFSET // 8  # the scale and, above it, the grid
_CRC_WORD = _VALUES_WORD + 1  # the checksum and, above it, dimensions
_FLAGS_WORD, _FLAG_SHIFT = wire.FLAGS_OFFSET // 8, wire.FLAGS_OFFSET % 8 * 8


@inlined
def _changed_checksum(start, changes, values, flag):
    """Return the header's word with the checksum; see ``header_and_changes``."""
    change = np.uint64(changes[64]) if flag else np.uint64(0)
    for bit in range(64):
        if (values >> np.uint64(bit)) & np.uint64(1):
            change ^= np.uint64(changes[bit])
    return start[_CRC_WORD] ^ change


@inlined
def write_header(payload, start, changes, scale_bits, grid, flag):
    """Write the header of a payload, uint8: ``start`` with another scale, grid or flag."""
    words = as_uint64(payload[: 8 * start.size])
    for i in range(start.size):
        words[i] = start[i]
    values = np.uint64(scale_bits) | np.uint64(grid) << np.uint64(32)
    words[_FLAGS_WORD] |= np.uint64(flag) << np.uint64(_FLAG_SHIFT)
    words[_VALUES_WORD] = values
    words[_CRC_WORD] = _changed_checksum(start, changes, values, flag)


@inlined
def scale_and_grid(payload, start, changes):
    """Return the bits of the scale of a payload, and its grid.

    The scale is -1 for another header than this, or not finite.
    """
    words = as_uint64(payload[: 8 * start.size])
    values = words[_VALUES_WORD]
    scale_bits = np.int64(values & np.uint64(0xFFFFFFFF))
    same = scale_bits <= LARGEST_FINITE_BITS
    for i in range(start.size):
        same &= i == _VALUES_WORD or i == _CRC_WORD or words[i] == start[i]
    same &= words[_CRC_WORD] == _changed_checksum(start, changes, values, 0)
    return scale_bits if same else np.int64(-1), np.int64(values >> np.uint64(32))
