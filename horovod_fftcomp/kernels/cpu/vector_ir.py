"""Vector code (LLVM IR) for the kernels: 64-bit masks, conversions, FFTs of eight blocks at a time.

Numba kernels call these codelets with addresses, as int64. Additions and multiplications are never
contracted or reordered, so every machine computes the same bits, whatever its vector width. The
straight-line code of small transforms is generated, after Frigo, PLDI 1999.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

LANES = 8
VECTOR_NBYTES = 4 * LANES
COMPLEX_NBYTES = 2 * VECTOR_NBYTES  # of eight complex values: real parts, then imaginary parts
_FLOAT, _I8, _I32, _I64 = ir.FloatType(), ir.IntType(8), ir.IntType(32), ir.IntType(64)
_FLOATS, _INTS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_I32, LANES)
_DOUBLES = ir.VectorType(ir.DoubleType(), LANES)
_SHORTS = ir.VectorType(ir.IntType(16), LANES)
_BYTES = ir.VectorType(_I8, LANES)
_LONGS = ir.VectorType(_I64, LANES)
_HALF = ir.VectorType(_FLOAT, LANES // 2)


class _Emitter:
    """Emits vector instructions at the position of an LLVM builder."""

    def __init__(self, builder: ir.IRBuilder) -> None:
        self.builder = builder

    def at(self, address: ir.Value, offset: int = 0, stride=None, times: int = 0) -> ir.Value:
        """Return ``address + stride * times + offset``."""
        if times:
            address = self.builder.add(address, self.builder.mul(stride, ir.Constant(_I64, times)))
        return self.builder.add(address, ir.Constant(_I64, offset)) if offset else address

    def load_as(self, kind: ir.Type, address: ir.Value, align: int = 4) -> ir.Value:
        return self.builder.load(self.builder.inttoptr(address, kind.as_pointer()), align=align)

    def store_as(self, kind: ir.Type, value: ir.Value, address: ir.Value, align: int = 4) -> None:
        self.builder.store(value, self.builder.inttoptr(address, kind.as_pointer()), align=align)

    def ints(self, number: int) -> ir.Value:
        return ir.Constant(_INTS, [number] * LANES)

    def spread(self, scalar: ir.Value) -> ir.Value:
        """Return a vector with a number in every lane."""
        empty = ir.Constant(ir.VectorType(scalar.type, LANES), ir.Undefined)
        first = self.builder.insert_element(empty, scalar, ir.Constant(_I32, 0))
        return self.builder.shuffle_vector(first, empty, self.ints(0))

    def broadcast_int(self, address: ir.Value) -> ir.Value:
        """Return a vector with the lower half of the int64 at ``address`` in every lane."""
        return self.spread(self.builder.trunc(self.load_as(_I64, address), _I32))

    def load_shorts(self, address: ir.Value) -> ir.Value:
        """Return eight 16-bit integers, widened with zeros."""
        return self.builder.zext(self.load_as(_SHORTS, address, 2), _INTS)

    def store_shorts(self, value: ir.Value, address: ir.Value) -> None:
        """Write the lower halves of eight integers."""
        self.store_as(_SHORTS, self.builder.trunc(value, _SHORTS), address, 2)

    def widest(self, value: ir.Value) -> ir.Value:
        """Return the largest of eight non-negative integers, as int64."""
        size = LANES
        while size > 1:
            size //= 2
            picks = ir.Constant(_INTS, [i ^ size for i in range(LANES)])
            other = self.builder.shuffle_vector(value, value, picks)
            value = self.builder.select(self.builder.icmp_signed(">", value, other), value, other)
        first = self.builder.extract_element(value, ir.Constant(_I32, 0))
        return self.builder.zext(first, _I64)

    def load(self, address: ir.Value) -> _Real:
        return _Real(self, self.load_as(_FLOATS, address))

    def store(self, value: _Real, address: ir.Value) -> None:
        self.store_as(_FLOATS, value.vector, address)

    def broadcast(self, address: ir.Value) -> _Real:
        """Return a vector with the float at ``address`` in every lane."""
        return _Real(self, self.spread(self.load_as(_FLOAT, address)))

    def constant(self, number: float) -> _Real:
        return _Real(self, ir.Constant(_FLOATS, [float(np.float32(number))] * LANES))

    def shuffle(self, a: _Real, b: _Real, picks: Sequence[int]) -> _Real:
        mask = ir.Constant(_INTS, list(picks))
        return _Real(self, self.builder.shuffle_vector(a.vector, b.vector, mask))

    def load_complex(self, address: ir.Value) -> _Complex:
        return _Complex(self.load(address), self.load(self.at(address, VECTOR_NBYTES)))

    def store_complex(self, value: _Complex, address: ir.Value) -> None:
        self.store(value.re, address)
        self.store(value.im, self.at(address, VECTOR_NBYTES))

    def broadcast_complex(self, address: ir.Value) -> _Complex:
        return _Complex(self.broadcast(address), self.broadcast(self.at(address, 4)))

    def _transpose_halves(self, rows: list[_Real]) -> list[_Real]:
        """Transpose the two 4 x 4 matrices in each half of rows 0-3 and of rows 4-7."""
        low, high = (0, 8, 1, 9, 4, 12, 5, 13), (2, 10, 3, 11, 6, 14, 7, 15)
        left, right = (0, 1, 8, 9, 4, 5, 12, 13), (2, 3, 10, 11, 6, 7, 14, 15)
        out = []
        for a, b, c, d in (rows[:4], rows[4:]):
            for pick in (low, high):
                ab, cd = self.shuffle(a, b, pick), self.shuffle(c, d, pick)
                out += [self.shuffle(ab, cd, left), self.shuffle(ab, cd, right)]
        return out

    def transposed(self, rows: list[_Real]) -> list[_Real]:
        """Return the columns of an 8 x 8 matrix."""
        out = self._transpose_halves(rows)
        low, high = (0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)
        return [self.shuffle(out[i], out[i + 4], pick) for pick in (low, high) for i in range(4)]

    def load_transposed(self, address: ir.Value, row_nbytes: ir.Value) -> list[_Real]:
        """Return the columns of an 8 x 8 matrix in memory; half rows are combined while loading."""
        starts = [self.at(address, 0, row_nbytes, i) for i in range(LANES)]
        every = ir.Constant(_INTS, list(range(LANES)))
        rows = []
        for offset in (0, VECTOR_NBYTES // 2):
            for i in range(4):
                low, high = (
                    self.load_as(_HALF, self.at(starts[row], offset)) for row in (i, i + 4)
                )
                rows.append(_Real(self, self.builder.shuffle_vector(low, high, every)))
        return self._transpose_halves(rows)


class _Real:
    """Vector of floats with arithmetic operators."""

    def __init__(self, emitter: _Emitter, vector: ir.Value) -> None:
        self.emitter, self.vector = emitter, vector

    def __add__(self, other: _Real) -> _Real:
        return _Real(self.emitter, self.emitter.builder.fadd(self.vector, other.vector))

    def __sub__(self, other: _Real) -> _Real:
        return _Real(self.emitter, self.emitter.builder.fsub(self.vector, other.vector))

    def __mul__(self, other: _Real) -> _Real:
        return _Real(self.emitter, self.emitter.builder.fmul(self.vector, other.vector))

    def __neg__(self) -> _Real:
        return _Real(self.emitter, self.emitter.builder.fneg(self.vector))


class _Complex:
    """Vector of complex numbers, as real and imaginary parts, with arithmetic operators."""

    def __init__(self, re: _Real, im: _Real) -> None:
        self.re, self.im = re, im

    def __add__(self, other: _Complex) -> _Complex:
        return _Complex(self.re + other.re, self.im + other.im)

    def __sub__(self, other: _Complex) -> _Complex:
        return _Complex(self.re - other.re, self.im - other.im)

    def __mul__(self, other: _Complex) -> _Complex:
        return _Complex(
            self.re * other.re - self.im * other.im, self.re * other.im + self.im * other.re
        )

    def scaled(self, factor: _Real) -> _Complex:
        return _Complex(self.re * factor, self.im * factor)

    def conj(self) -> _Complex:
        return _Complex(self.re, -self.im)

    def turned(self, k: int, n: int) -> _Complex:
        """Return the value times exp(-2 pi i k / n)."""
        if k == 0:
            return self
        if 4 * k == n:
            return _Complex(self.im, -self.re)
        constant = self.re.emitter.constant
        if 8 * k == n:
            return _Complex(self.re + self.im, self.im - self.re).scaled(constant(math.sqrt(0.5)))
        angle = -2 * math.pi * k / n
        return self * _Complex(constant(math.cos(angle)), constant(math.sin(angle)))


def _dft(z: list[_Complex]) -> list[_Complex]:
    """Return the discrete Fourier transform of 1, 2, 4, 8 or 16 values."""
    n = len(z)
    if n == 1:
        return z
    if n == 2:
        return [z[0] + z[1], z[0] - z[1]]
    if n == 4:
        a, b, c, d = z[0] + z[2], z[0] - z[2], z[1] + z[3], z[1] - z[3]
        return [a + c, b + d.turned(1, 4), a - c, b - d.turned(1, 4)]
    columns = n // 4
    inner = [_dft(z[column::columns]) for column in range(columns)]
    out = list(z)
    for row in range(4):
        out[row::4] = _dft(
            [inner[column][row].turned(column * row, n) for column in range(columns)]
        )
    return out


def _codelet(body: Callable, n_args: int, result=types.void) -> Callable:
    """Return a function for Numba, with int64 arguments, whose code ``body`` emits."""

    def codegen(context, builder, signature, args):
        value = body(_Emitter(builder), *args)
        return context.get_dummy_value() if value is None else value

    # Numba inspects the signature of this function, so it needs explicit arguments.
    names = ", ".join(f"a{i}" for i in range(n_args))
    source = f"def {body.__name__}(context, {names}):\n    return result(*arguments), codegen\n"
    space = {"result": result, "arguments": [types.int64] * n_args, "codegen": codegen}
    exec(source, space)
    return intrinsic(space[body.__name__])


def _butterfly(radix: int, with_twiddles: bool) -> Callable:
    def body(emit, src, src_stride, dst, dst_stride, twiddles):
        z = _dft([emit.load_complex(emit.at(src, 0, src_stride, j)) for j in range(radix)])
        for k, value in enumerate(z):
            if with_twiddles and k:
                value = value * emit.broadcast_complex(emit.at(twiddles, 8 * (k - 1)))
            emit.store_complex(value, emit.at(dst, 0, dst_stride, k))

    body.__name__ = f"butterfly_{radix}" + "_twiddled" * with_twiddles
    return _codelet(body, 5)


twiddled_4 = _butterfly(4, True)
butterfly_8, twiddled_8 = _butterfly(8, False), _butterfly(8, True)
butterfly_16, twiddled_16 = _butterfly(16, False), _butterfly(16, True)


def _gather(emit, src, row_nbytes, even, even_stride, odd, odd_stride, scale):
    """Load eight values of eight rows; store those of each column together, times a scale."""
    factor = emit.broadcast(scale)
    for i, column in enumerate(emit.load_transposed(src, row_nbytes)):
        start, stride = (odd, odd_stride) if i % 2 else (even, even_stride)
        emit.store(column * factor, emit.at(start, 0, stride, i // 2))


def _scatter(negative: Sequence[int]) -> Callable:
    def body(emit, even, even_stride, odd, odd_stride, dst, row_nbytes):
        columns = []
        for i in range(LANES):
            start, stride = (odd, odd_stride) if i % 2 else (even, even_stride)
            column = emit.load(emit.at(start, 0, stride, i // 2))
            columns.append(-column if i in negative else column)
        for i, row in enumerate(emit.transposed(columns)):
            emit.store(row, emit.at(dst, 0, row_nbytes, i))

    return _codelet(body, 6)


def _scatter_coeffs(with_addend: bool) -> Callable:
    def body(emit, src, dst, addend, row_nbytes, peak):
        builder = emit.builder
        columns = [emit.load(emit.at(src, VECTOR_NBYTES * i)) for i in range(LANES)]
        magnitude = emit.ints(0x7FFFFFFF)
        largest = emit.load_as(_INTS, peak)
        for i, row in enumerate(emit.transposed(columns)):
            if with_addend:
                row = row + emit.load(emit.at(addend, 0, row_nbytes, i))
            emit.store(row, emit.at(dst, 0, row_nbytes, i))
            bits = builder.and_(builder.bitcast(row.vector, _INTS), magnitude)
            largest = builder.select(builder.icmp_signed(">", bits, largest), bits, largest)
        emit.store_as(_INTS, largest, peak)

    return _codelet(body, 5)


gather = _codelet(_gather, 7)
# The inverse is computed by conjugates, so imaginary parts, the odd samples, are negated; a DCT's
# samples are in another order.
scatter_fft, scatter_dct = _scatter((1, 3, 5, 7)), _scatter((2, 6, 1, 5))
scatter_coeffs, scatter_coeffs_add = _scatter_coeffs(False), _scatter_coeffs(True)


def _split(conjugate: bool) -> Callable:
    """Make a codelet from a complex FFT of pairs to the real FFT, for bins k and N - k.

    ``conjugate``: for the inverse, from the real FFT to the conjugate of the complex FFT.
    """

    def body(emit, low, high, twiddle):
        a, b = emit.load_complex(low), emit.load_complex(high).conj()
        even, odd = a + b, (a - b) * emit.broadcast_complex(twiddle)
        first, second = even + odd, even - odd
        emit.store_complex(first.conj() if conjugate else first, low)
        emit.store_complex(second if conjugate else second.conj(), high)

    return _codelet(body, 3)


def _split_ends(factor: float, conjugate: bool) -> Callable:
    """Make a codelet as ``_split`` for bin 0, (DC, Nyquist), and bin N / 2, which are not pairs."""

    def body(emit, zero, middle):
        z, scale = emit.load_complex(zero), emit.constant(factor)
        imag = z.im - z.re if conjugate else z.re - z.im
        emit.store_complex(_Complex(z.re + z.im, imag).scaled(scale), zero)
        z = emit.load_complex(middle).scaled(emit.constant(2))
        emit.store_complex(z if conjugate else z.conj(), middle)

    return _codelet(body, 2)


split, split_back = _split(False), _split(True)
split_ends, split_ends_back = _split_ends(2, False), _split_ends(1, True)


def _rotate(emit, bin_, turn, low, high):
    """Rotate bin k of a real FFT to the DCT's coefficients k and L - k."""
    value = emit.load_complex(bin_) * emit.broadcast_complex(turn)
    emit.store(value.re, low)
    emit.store(-value.im, high)


def _rotate_back(emit, bin_, turn, low, high):
    value = _Complex(emit.load(low), -emit.load(high))
    emit.store_complex(value * emit.broadcast_complex(turn), bin_)


rotate, rotate_back = _codelet(_rotate, 4), _codelet(_rotate_back, 4)


def _copy(emit, src, dst):
    emit.store(emit.load(src), dst)


copy = _codelet(_copy, 2)


def _prefetch(emit, address):
    """Prefetch the four cache lines at ``address``."""
    byte = _I8.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, _I32, _I32, _I32])
    prefetch = emit.builder.module.declare_intrinsic("llvm.prefetch.p0", (), kind)
    read, keep, data = (ir.Constant(_I32, number) for number in (0, 3, 1))
    for line in range(4):
        pointer = emit.builder.inttoptr(emit.at(address, 64 * line), byte)
        emit.builder.call(prefetch, [pointer, read, keep, data])


prefetch = _codelet(_prefetch, 1)


def _mask_above(emit, keys, threshold):
    """Return a mask of the 64 int32 at ``keys``: ones where they are above the threshold."""
    builder = emit.builder
    limits = emit.spread(builder.trunc(threshold, _I32))
    mask = ir.Constant(_I64, 0)
    for part in range(64 // LANES):
        values = emit.load_as(_INTS, emit.at(keys, VECTOR_NBYTES * part))
        bits = builder.bitcast(builder.icmp_signed(">", values, limits), ir.IntType(LANES))
        shift = ir.Constant(_I64, LANES * part)
        mask = builder.or_(mask, builder.shl(builder.zext(bits, _I64), shift))
    return mask


def _sum_with_keys(with_addend: bool) -> Callable:
    """Make a codelet that adds 64 reals and writes the sums and their magnitudes' bits as keys.

    ``peak``, eight int32 in memory, is updated to the largest magnitudes.
    """

    def body(emit, a, b, out, keys, peak):
        builder = emit.builder
        magnitude = emit.ints(0x7FFFFFFF)
        largest = emit.load_as(_INTS, peak)
        for part in range(64 // LANES):
            offset = VECTOR_NBYTES * part
            total = emit.load(emit.at(a, offset))
            if with_addend:
                total = total + emit.load(emit.at(b, offset))
            emit.store(total, emit.at(out, offset))
            bits = builder.and_(builder.bitcast(total.vector, _INTS), magnitude)
            emit.store_as(_INTS, bits, emit.at(keys, offset))
            largest = builder.select(builder.icmp_signed(">", bits, largest), bits, largest)
        emit.store_as(_INTS, largest, peak)

    return _codelet(body, 5)


copy_with_keys, sum_with_keys = _sum_with_keys(False), _sum_with_keys(True)


def _magnitude(emit, bits):
    return emit.builder.and_(bits, emit.ints(0x7FFFFFFF))


def _encode(write: Callable, n_options: int) -> Callable:
    """Make a codelet that writes the codes of 64 float32 values and subtracts the decoded values.

    ``write(emit, bits, *options)`` returns (codes, bits of the decoded values); options are the
    int64 after the kind in a coding.
    """

    def body(emit, values, codes, *coding):
        options = [emit.broadcast_int(emit.at(coding[0], 8 * i)) for i in range(1, 1 + n_options)]
        for part in range(64 // LANES):
            at = emit.at(values, VECTOR_NBYTES * part)
            value = emit.load(at)
            code, sent = write(emit, emit.builder.bitcast(value.vector, _INTS), *options)
            emit.store_as(_INTS, code, emit.at(codes, VECTOR_NBYTES * part))
            emit.store(value - _Real(emit, emit.builder.bitcast(sent, _FLOATS)), at)

    body.__name__ = write.__name__
    return _codelet(body, 3 if n_options else 2)


def _decode(read: Callable, n_options: int) -> Callable:
    """Make a codelet that writes the values of 64 codes and returns the largest code or magnitude.

    ``read(emit, codes, *options)`` returns (bits of the values, the codes or magnitudes).
    """

    def body(emit, codes, values, *coding):
        options = [emit.broadcast_int(emit.at(coding[0], 8 * i)) for i in range(1, 1 + n_options)]
        largest = emit.ints(0)
        for part in range(64 // LANES):
            code = emit.load_as(_INTS, emit.at(codes, VECTOR_NBYTES * part))
            bits, size = read(emit, code, *options)
            emit.store_as(_INTS, bits, emit.at(values, VECTOR_NBYTES * part))
            bigger = emit.builder.icmp_signed(">", size, largest)
            largest = emit.builder.select(bigger, size, largest)
        return emit.widest(largest)

    body.__name__ = read.__name__
    return _codelet(body, 3 if n_options else 2, types.int64)


def _encode_range(emit, bits, _, step, base, levels, zero):
    b = emit.builder
    nothing, one = emit.ints(0), emit.ints(1)
    above = b.add(_magnitude(emit, bits), b.sub(b.lshr(step, one), base))
    # (above + 1/2) / step is no whole number, and further from one than the rounding error.
    inverse = b.fdiv(ir.Constant(_DOUBLES, [1.0] * LANES), b.sitofp(step, _DOUBLES))
    middle = b.fadd(b.sitofp(above, _DOUBLES), ir.Constant(_DOUBLES, [0.5] * LANES))
    level = b.fptosi(b.fmul(middle, inverse), _INTS)
    level = b.select(b.icmp_signed("<", above, nothing), b.neg(zero), level)
    most = b.sub(levels, one)
    level = b.select(b.icmp_signed("<", level, most), level, most)
    some = b.icmp_signed(">=", level, nothing)
    sign = b.and_(bits, emit.ints(-(1 << 31)))
    sent = b.or_(b.add(b.mul(level, step), base), sign)
    offset = b.select(b.icmp_signed("<", bits, nothing), levels, nothing)
    code = b.add(b.add(level, zero), offset)
    return b.select(some, code, nothing), b.select(some, sent, nothing)


def _decode_range(emit, codes, _, step, base, levels, zero):
    b = emit.builder
    nothing = emit.ints(0)
    is_negative = b.icmp_signed(">=", codes, b.add(levels, zero))
    level = b.sub(b.sub(codes, b.select(is_negative, levels, nothing)), zero)
    sign = b.select(is_negative, emit.ints(-(1 << 31)), nothing)
    pattern = b.or_(b.add(b.mul(level, step), base), sign)
    return b.select(b.icmp_signed(">=", level, nothing), pattern, nothing), codes


def _encode_bfloat16(emit, bits):
    """Round to nearest even, never to infinity."""
    b = emit.builder
    magnitude = _magnitude(emit, bits)
    odd = b.and_(b.lshr(magnitude, emit.ints(16)), emit.ints(1))
    rounded = b.add(b.add(magnitude, emit.ints(0x7FFF)), odd)
    limit = emit.ints(0x7F7F0000)
    rounded = b.select(b.icmp_signed("<", rounded, limit), rounded, limit)
    sent = b.or_(rounded, b.and_(bits, emit.ints(-(1 << 31))))
    sent = b.and_(sent, emit.ints(-(1 << 16)))
    return b.lshr(sent, emit.ints(16)), sent


def _decode_bfloat16(emit, codes):
    bits = emit.builder.shl(codes, emit.ints(16))
    return bits, _magnitude(emit, bits)


def _encode_float32(emit, bits):
    return bits, bits


def _decode_float32(emit, codes):
    return codes, _magnitude(emit, codes)


encode_range, decode_range = _encode(_encode_range, 5), _decode(_decode_range, 5)
encode_bfloat16, decode_bfloat16 = _encode(_encode_bfloat16, 0), _decode(_decode_bfloat16, 0)
encode_float32, decode_float32 = _encode(_encode_float32, 0), _decode(_decode_float32, 0)


def _resize(source: ir.VectorType, target: ir.VectorType) -> Callable:
    """Make a codelet that copies 64 integers between widths."""
    from_nbytes, to_nbytes = (kind.element.width // 8 for kind in (source, target))

    def body(emit, src, dst):
        resize = emit.builder.zext if to_nbytes > from_nbytes else emit.builder.trunc
        for part in range(64 // LANES):
            value = emit.load_as(source, emit.at(src, from_nbytes * LANES * part), from_nbytes)
            value = value if source is target else resize(value, target)
            emit.store_as(target, value, emit.at(dst, to_nbytes * LANES * part), to_nbytes)

    return _codelet(body, 2)


def _add_64(emit, src, dst):
    """Add 64 floats at ``src`` to those at ``dst``."""
    for part in range(64 // LANES):
        at = emit.at(dst, VECTOR_NBYTES * part)
        emit.store(emit.load(at) + emit.load(emit.at(src, VECTOR_NBYTES * part)), at)


add_64 = _codelet(_add_64, 2)
copy_64 = _resize(_INTS, _INTS)
widen_bytes, narrow_to_bytes = _resize(_BYTES, _INTS), _resize(_INTS, _BYTES)
widen_shorts, narrow_to_shorts = _resize(_SHORTS, _INTS), _resize(_INTS, _SHORTS)


def _multiples(emit, number):
    """Return 0, 1, ... 7 times a number."""
    return emit.builder.mul(emit.spread(number), ir.Constant(_LONGS, list(range(LANES))))


def _pack_8(emit, codes, bits):
    """Return eight int32 codes of at most 8 bits as one bit stream of 64 bits."""
    builder = emit.builder
    wide = builder.zext(emit.load_as(_INTS, codes), _LONGS)
    placed = builder.shl(wide, _multiples(emit, bits))
    kind = ir.FunctionType(_I64, [_LONGS])
    joined = builder.module.declare_intrinsic("llvm.vector.reduce.or.v8i64", (), kind)
    return builder.call(joined, [placed])


def _unpack_8(emit, address, shift, bits, codes):
    """Write the eight codes, of at most 7 bits, that begin ``shift`` bits after ``address``."""
    builder = emit.builder
    one = ir.Constant(_I64, 1)
    word = builder.lshr(emit.load_as(_I64, address, 1), shift)
    mask = builder.sub(builder.shl(one, bits), one)
    apart = builder.lshr(emit.spread(word), _multiples(emit, bits))
    every = builder.and_(apart, emit.spread(mask))
    emit.store_as(_INTS, builder.trunc(every, _INTS), codes)


pack_8, unpack_8 = _codelet(_pack_8, 2, types.uint64), _codelet(_unpack_8, 4)


def _to_float16(emit, src, dst, limit):
    """Write 64 float32 as float16, rounded to nearest even and clipped to +-limit."""
    builder = emit.builder
    most = builder.bitcast(emit.broadcast(limit).vector, _INTS)
    for part in range(64 // LANES):
        bits = emit.load_as(_INTS, emit.at(src, VECTOR_NBYTES * part))
        magnitude = _magnitude(emit, bits)
        within = builder.icmp_signed("<", magnitude, most)
        magnitude = builder.select(within, magnitude, most)
        odd = builder.and_(builder.lshr(magnitude, emit.ints(13)), emit.ints(1))
        rounded = builder.add(builder.add(magnitude, emit.ints(0xFFF)), odd)
        normal = builder.lshr(builder.sub(rounded, emit.ints(0x38000000)), emit.ints(13))
        # In [0.5, 1) the spacing of float32 is 2^-24, as that of float16 below 2^-14.
        shifted = _Real(emit, builder.bitcast(magnitude, _FLOATS)) + emit.constant(0.5)
        small = builder.sub(builder.bitcast(shifted.vector, _INTS), emit.ints(0x3F000000))
        is_small = builder.icmp_signed("<", magnitude, emit.ints(0x38800000))
        half = builder.select(is_small, small, normal)
        sign = builder.and_(builder.lshr(bits, emit.ints(16)), emit.ints(0x8000))
        emit.store_shorts(builder.or_(half, sign), emit.at(dst, 2 * LANES * part))


def _from_float16(emit, src, dst):
    """Write 64 float16 as float32."""
    builder = emit.builder
    for part in range(64 // LANES):
        wide = emit.load_shorts(emit.at(src, 2 * LANES * part))
        magnitude = builder.shl(builder.and_(wide, emit.ints(0x7FFF)), emit.ints(13))
        sign = builder.shl(builder.and_(wide, emit.ints(0x8000)), emit.ints(16))
        # The factor 2^112 corrects the exponent's bias, and makes subnormal float16 normal.
        scaled = _Real(emit, builder.bitcast(magnitude, _FLOATS)) * emit.constant(2.0**112)
        infinite = builder.icmp_signed(">", magnitude, emit.ints(0x0F7FFFFF))
        special = builder.or_(magnitude, emit.ints(0x7F800000))
        value = builder.select(infinite, special, builder.bitcast(scaled.vector, _INTS))
        emit.store_as(_INTS, builder.or_(value, sign), emit.at(dst, VECTOR_NBYTES * part))


to_float16, from_float16 = _codelet(_to_float16, 3), _codelet(_from_float16, 2)


def _packed_8(emit, start, mask, unit):
    """Yield the addresses of eight units behind ``start`` that are packed by the ones of a mask.

    That of a zero is the next one's.
    """
    for lane in range(LANES):
        below = emit.builder.and_(mask, ir.Constant(_I64, (1 << lane) - 1))
        yield emit.at(start, 0, emit.builder.ctpop(below), unit.width // 8)


def _collect_8(width: int) -> Callable:
    """Make a codelet that packs those of eight units of reals whose bits are ones in ``mask``.

    Up to eight units are written.
    """
    unit = ir.IntType(32 * width)

    def body(emit, reals, values, mask):
        # Each one after a zero overwrites what was written for that.
        for lane, address in enumerate(_packed_8(emit, values, mask, unit)):
            value = emit.load_as(unit, emit.at(reals, 4 * width * lane))
            emit.store_as(unit, value, address)

    return _codelet(body, 3)


def _put_back_8(width: int, adds: bool) -> Callable:
    """Make a codelet that writes packed units over eight units of reals, or adds them to those."""
    unit = ir.IntType(32 * width)
    units, reals_type = ir.VectorType(unit, LANES), ir.VectorType(_FLOAT, width * LANES)

    def body(emit, values, reals, mask):
        builder = emit.builder
        packed = ir.Constant(units, ir.Undefined)
        for lane, address in enumerate(_packed_8(emit, values, mask, unit)):
            value = emit.load_as(unit, address)
            packed = builder.insert_element(packed, value, ir.Constant(_I32, lane))
        ones = builder.bitcast(builder.trunc(mask, _I8), ir.VectorType(ir.IntType(1), LANES))
        if adds:
            zeros = ir.Constant(units, [0] * LANES)
            chosen = builder.bitcast(builder.select(ones, packed, zeros), reals_type)
            total = builder.fadd(emit.load_as(reals_type, reals), chosen)
            emit.store_as(reals_type, total, reals)
        else:
            merged = builder.select(ones, packed, emit.load_as(units, reals))
            builder.fence("acq_rel", "singlethread")  # no store under a mask: slow on some CPUs
            emit.store_as(units, merged, reals)

    return _codelet(body, 3)


collect_8, collect_pairs_8 = _collect_8(1), _collect_8(2)
put_8, put_pairs_8 = _put_back_8(1, False), _put_back_8(2, False)
add_8, add_pairs_8 = _put_back_8(1, True), _put_back_8(2, True)


def _trailing_zeros(emit, word):
    return emit.builder.cttz(word, ir.Constant(ir.IntType(1), 0))


def _count_ones(emit, word):
    return emit.builder.ctpop(word)


def _high_product(emit, a, b):
    """Return the upper 64 bits of the product of two unsigned integers."""
    wide = ir.IntType(128)
    product = emit.builder.mul(emit.builder.zext(a, wide), emit.builder.zext(b, wide))
    return emit.builder.trunc(emit.builder.lshr(product, ir.Constant(wide, 64)), _I64)


mask_above = _codelet(_mask_above, 2, types.uint64)
trailing_zeros = _codelet(_trailing_zeros, 1, types.int64)
count_ones = _codelet(_count_ones, 1, types.int64)
high_product = _codelet(_high_product, 2, types.uint64)
