"""Headers of payloads in kernels: a header of scale 0 and the changes of its checksum are given.

See ``header_and_changes`` of the CUDA tables, which makes both.
"""

from __future__ import annotations

import numpy as np

from horovod_fftcomp import wire
from horovod_fftcomp.codec.quantizers import LARGEST_FINITE_BITS
from horovod_fftcomp.kernels.cpu.jit import inlined

NAN_BITS = 0x7FC00000
_SCALE_WORD = wire.SCALE_OFFSET // 8  # the scale and, behind it, the checksum
_FLAGS_WORD, _FLAG_SHIFT = wire.FLAGS_OFFSET // 8, wire.FLAGS_OFFSET % 8 * 8


@inlined
def checksum_and_scale(start, changes, scale_bits, flag):
    """Return the header's word with the checksum and the scale; see ``header_and_changes``."""
    crc = start[_SCALE_WORD] >> np.uint64(32)
    for bit in range(32):
        if (scale_bits >> bit) & 1:
            crc ^= np.uint64(changes[bit])
    if flag:
        crc ^= np.uint64(changes[32])
    return (crc << np.uint64(32)) | np.uint64(scale_bits)


@inlined
def write_header(payload, start, changes, scale_bits, flag):
    """Write the header of a payload, uint8: ``start`` with another scale or flag."""
    words = payload[: 8 * start.size].view(np.uint64)
    for i in range(start.size):
        words[i] = start[i]
    words[_FLAGS_WORD] |= np.uint64(flag) << np.uint64(_FLAG_SHIFT)
    words[_SCALE_WORD] = checksum_and_scale(start, changes, scale_bits, flag)


@inlined
def scale_of(payload, start, changes):
    """Return the bits of the scale of a payload; -1 for another header than this, or not finite."""
    words = payload[: 8 * start.size].view(np.uint64)
    scale_bits = np.int64(words[_SCALE_WORD] & np.uint64(0xFFFFFFFF))
    same = scale_bits <= LARGEST_FINITE_BITS
    for i in range(start.size):
        same &= i == _SCALE_WORD or words[i] == start[i]
    same &= words[_SCALE_WORD] == checksum_and_scale(start, changes, scale_bits, 0)
    return scale_bits if same else np.int64(-1)
