"""Codes on a CPU: dense values to codes and back, and codes to streams of bits and back.

All work on a group's buffers, which lie in a cache and have room for whole steps of 64.
"""

from __future__ import annotations

import numpy as np

from horovod_fftcomp.backends.cpu import codelets
from horovod_fftcomp.backends.cpu.jit import inlined
from horovod_fftcomp.quantizers import BFLOAT16, RANGE

STEP = 64  # values that a codelet takes
ROOM = STEP // 2 + 2  # words that a stream has to have beyond its end, for the rest of a step


@inlined
def encode(values, n, coding, codes):
    """Write the codes of ``n`` float32 values, int32; subtract from these what the codes mean."""
    at, to = np.int64(values.ctypes.data), np.int64(codes.ctypes.data)
    options = np.int64(coding.ctypes.data)
    for i in range(0, 4 * n, 4 * STEP):
        if coding[0] == RANGE:
            codelets.encode_range(at + i, to + i, options)
        elif coding[0] == BFLOAT16:
            codelets.encode_bfloat16(at + i, to + i)
        else:
            codelets.encode_float32(at + i, to + i)


@inlined
def decode(codes, n, coding, values):
    """Write the float32 values of ``n`` codes, int32; return the largest code, or magnitude."""
    at, to = np.int64(codes.ctypes.data), np.int64(values.ctypes.data)
    options = np.int64(coding.ctypes.data)
    codes[n : (n + STEP - 1) // STEP * STEP] = 0
    largest = np.int64(0)
    for i in range(0, 4 * n, 4 * STEP):
        if coding[0] == RANGE:
            top = codelets.decode_range(at + i, to + i, options)
        elif coding[0] == BFLOAT16:
            top = codelets.decode_bfloat16(at + i, to + i)
        else:
            top = codelets.decode_float32(at + i, to + i)
        largest = max(largest, top)
    return largest


@inlined
def write_bits(codes, n, bits, stream, bit):
    """Append ``n`` codes to a stream of 64-bit words at ``bit``; return where they end.

    What follows the end is overwritten.
    """
    if bits == 8 or bits == 16 or bits == 32:
        at, to = np.int64(codes.ctypes.data), np.int64(stream.ctypes.data) + (bit >> 3)
        for i in range(0, n, STEP):
            if bits == 8:
                codelets.narrow_to_bytes(at + 4 * i, to + i)
            elif bits == 16:
                codelets.narrow_to_shorts(at + 4 * i, to + 2 * i)
            else:
                codelets.copy_64(at + 4 * i, to + 4 * i)
    else:
        at, filled = bit >> 6, bit & 63
        window = stream[at] if filled else np.uint64(0)
        for i in range(n):
            code = np.uint64(codes[i])
            window |= code << np.uint64(filled)
            filled += bits
            if filled >= 64:
                stream[at] = window
                at += 1
                filled -= 64
                window = code >> np.uint64(bits - filled)
        stream[at] = window
    return bit + n * bits


@inlined
def read_bits(stream, bit, n, bits, codes):
    """Write the ``n`` codes of a stream of 64-bit words that begin at ``bit``, as int32."""
    if bits == 8 or bits == 16 or bits == 32:
        at, to = np.int64(stream.ctypes.data) + (bit >> 3), np.int64(codes.ctypes.data)
        for i in range(0, n, STEP):
            if bits == 8:
                codelets.widen_bytes(at + i, to + 4 * i)
            elif bits == 16:
                codelets.widen_shorts(at + 2 * i, to + 4 * i)
            else:
                codelets.copy_64(at + 4 * i, to + 4 * i)
    else:
        mask = np.uint64((1 << bits) - 1)
        for i in range(n):
            low = np.uint64(bit & 63)
            word = stream[bit >> 6] >> low
            word |= (stream[(bit >> 6) + 1] << np.uint64(1)) << (np.uint64(63) - low)
            codes[i] = np.int32(word & mask)
            bit += bits
