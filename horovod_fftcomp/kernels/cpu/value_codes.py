"""CPU conversion of values to codes and back, and of codes to bit streams and back.

All functions work on buffers of one group, which fit into a cache and whose sizes are multiples of
64 values.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from horovod_fftcomp.codec.quantizers import (
    BFLOAT16,
    LARGEST_BFLOAT16_BITS,
    RANGE,
    STEPS,
    fitted_grid,
    key_exponent,
    range_coding,
)
from horovod_fftcomp.kernels.cpu import vector_values
from horovod_fftcomp.kernels.cpu.arrays import as_float32
from horovod_fftcomp.kernels.cpu.inlining import allocating, inlined

STEP = 64  # values that a codelet processes
PADDING = STEP // 2 + 2  # 64-bit words after a stream's end, for the rest of a step

for _function in (key_exponent, fitted_grid, range_coding):
    register_jitable(_function)


@allocating
def float_of(bits):
    """Return the float32 with this bit pattern."""
    pattern = np.empty(1, np.int32)
    pattern[0] = np.int32(bits)
    return as_float32(pattern)[0]


@inlined
def fill_coding(kind, bits, peak, grid, coding):
    """Write the ``Coding`` of values of magnitude at most ``peak``, float32 bits, to int64 ``[7]``.

    As ``coding`` of the quantizers. ``grid``: the header's field of this name.
    """
    coding[0], coding[1] = kind, bits
    coding[2:6] = 0
    coding[6] = peak
    if kind == BFLOAT16:
        coding[6] = min((peak + 0x8000) & 0x7FFF0000, LARGEST_BFLOAT16_BITS)
    elif kind == RANGE:
        step, base, levels, zero, largest = range_coding(bits, peak, grid)
        coding[2], coding[3], coding[4], coding[5], coding[6] = step, base, levels, zero, largest


@inlined
def encode(values, n, coding, codes):
    """Write the codes of ``n`` float32 values, int32; subtract the decoded values from these."""
    at, to = np.int64(values.ctypes.data), np.int64(codes.ctypes.data)
    options = np.int64(coding.ctypes.data)
    if coding[0] == STEPS:
        _encode_steps(values, n, coding, codes)
        return
    for i in range(0, 4 * n, 4 * STEP):
        if coding[0] == RANGE:
            vector_values.encode_range(at + i, to + i, options)
        elif coding[0] == BFLOAT16:
            vector_values.encode_bfloat16(at + i, to + i)
        else:
            vector_values.encode_float32(at + i, to + i)


@inlined
def decode(codes, n, coding, values):
    """Write the float32 values of ``n`` codes, int32; return the largest code or magnitude."""
    at, to = np.int64(codes.ctypes.data), np.int64(values.ctypes.data)
    options = np.int64(coding.ctypes.data)
    codes[n : (n + STEP - 1) // STEP * STEP] = 0
    if coding[0] == STEPS:
        return _decode_steps(codes, n, coding, values)
    largest = np.int64(0)
    for i in range(0, 4 * n, 4 * STEP):
        if coding[0] == RANGE:
            top = vector_values.decode_range(at + i, to + i, options)
        elif coding[0] == BFLOAT16:
            top = vector_values.decode_bfloat16(at + i, to + i)
        else:
            top = vector_values.decode_float32(at + i, to + i)
        largest = max(largest, top)
    return largest


@inlined
def _encode_steps(values, n, coding, codes):
    """Return the encoding of values as multiples of ``step``, 1 to ``most`` of either sign."""
    step, most = float_of(coding[3]), np.float64(coding[4])
    for i in range(n):
        x = values[i]
        ratio = np.float64(abs(x)) / np.float64(step)
        level = np.int32(max(min(ratio, most), 1.0))
        size = np.float32(np.float32(level) * step)
        negative = x < np.float32(0)
        codes[i] = np.int32(2 * (level - 1) + negative)
        values[i] = x + size if negative else x - size


@inlined
def _decode_steps(codes, n, coding, values):
    step, largest = float_of(coding[3]), np.int32(0)
    for i in range(n):
        code = codes[i]
        size = np.float32(np.float32((code >> 1) + 1) * step)
        values[i] = -size if code & 1 else size
        largest = max(largest, code)
    return np.int64(largest)


@inlined
def write_bits(codes, n, bits, stream, bit):
    """Append ``n`` codes of at most 16 or of 32 bits at ``bit``; return the bit after the last.

    ``stream``: 64-bit words. Up to ``PADDING`` words after the end are overwritten, and the
    codes after the ``n``-th up to a multiple of ``STEP``.
    """
    if bits == 8 or bits == 16 or bits == 32:
        at, to = np.int64(codes.ctypes.data), np.int64(stream.ctypes.data) + (bit >> 3)
        for i in range(0, n, STEP):
            if bits == 8:
                vector_values.narrow_to_bytes(at + 4 * i, to + i)
            elif bits == 16:
                vector_values.narrow_to_shorts(at + 4 * i, to + 2 * i)
            else:
                vector_values.copy_64(at + 4 * i, to + 4 * i)
    else:
        at, filled = bit >> 6, bit & 63
        window = stream[at] if filled else np.uint64(0)
        b, step = np.uint64(bits), 8 if bits < 8 else 4  # codes that 64 bits hold
        codes[n : (n + step - 1) // step * step] = 0
        first = np.int64(codes.ctypes.data)
        for i in range(0, n, step):
            if step == 8:
                some = vector_values.pack_8(first + 4 * i, bits)
            else:
                low = np.uint64(codes[i]) | (np.uint64(codes[i + 1]) << b)
                high = np.uint64(codes[i + 2]) | (np.uint64(codes[i + 3]) << b)
                some = low | (high << (b + b))
            window |= some << np.uint64(filled)
            filled += step * bits
            if filled >= 64:
                stream[at] = window
                at += 1
                filled -= 64
                window = some >> np.uint64(step * bits - filled)
        stream[at] = window
    return bit + n * bits


@inlined
def read_bits(stream, bit, n, bits, codes):
    """Write the ``n`` codes that begin at ``bit`` of a stream of 64-bit words, as int32."""
    if bits == 8 or bits == 16 or bits == 32:
        at, to = np.int64(stream.ctypes.data) + (bit >> 3), np.int64(codes.ctypes.data)
        for i in range(0, n, STEP):
            if bits == 8:
                vector_values.widen_bytes(at + i, to + 4 * i)
            elif bits == 16:
                vector_values.widen_shorts(at + 2 * i, to + 4 * i)
            else:
                vector_values.copy_64(at + 4 * i, to + 4 * i)
    elif bits < 8:  # eight codes take whole bytes
        at, to = np.int64(stream.ctypes.data) + (bit >> 3), np.int64(codes.ctypes.data)
        for i in range(0, n, 8):
            vector_values.unpack_8(at, bit & 7, bits, to + 4 * i)
            at += bits
    else:
        mask, b = np.uint64((1 << bits) - 1), np.uint64(bits)
        for i in range(0, n, 4):  # 64 bits hold four codes
            low = np.uint64(bit & 63)
            word = stream[bit >> 6] >> low
            word |= (stream[(bit >> 6) + 1] << np.uint64(1)) << (np.uint64(63) - low)
            codes[i] = np.int32(word & mask)
            codes[i + 1] = np.int32((word >> b) & mask)
            codes[i + 2] = np.int32((word >> (b + b)) & mask)
            codes[i + 3] = np.int32((word >> (b + b + b)) & mask)
            bit += 4 * bits
