"""Vector code (LLVM IR) for the kernels: its basis, and FFTs of eight blocks at a time.

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
FLOAT, I8, I32, I64 = ir.FloatType(), ir.IntType(8), ir.IntType(32), ir.IntType(64)
FLOATS, INTS = ir.VectorType(FLOAT, LANES), ir.VectorType(I32, LANES)
_HALF = ir.VectorType(FLOAT, LANES // 2)


class _Emitter:
    """Emits vector instructions at the position of an LLVM builder."""

    def __init__(self, builder: ir.IRBuilder) -> None:
        self.builder = builder

    def at(self, address: ir.Value, offset: int = 0, stride=None, times: int = 0) -> ir.Value:
        """Return ``address + stride * times + offset``."""
        if times:
            address = self.builder.add(address, self.builder.mul(stride, ir.Constant(I64, times)))
        return self.builder.add(address, ir.Constant(I64, offset)) if offset else address

    def load_as(self, kind: ir.Type, address: ir.Value, align: int = 4) -> ir.Value:
        return self.builder.load(self.builder.inttoptr(address, kind.as_pointer()), align=align)

    def store_as(self, kind: ir.Type, value: ir.Value, address: ir.Value, align: int = 4) -> None:
        self.builder.store(value, self.builder.inttoptr(address, kind.as_pointer()), align=align)

    def ints(self, number: int) -> ir.Value:
        return ir.Constant(INTS, [number] * LANES)

    def spread(self, scalar: ir.Value, lanes: int = LANES) -> ir.Value:
        """Return a vector with a number in every lane."""
        empty = ir.Constant(ir.VectorType(scalar.type, lanes), ir.Undefined)
        first = self.builder.insert_element(empty, scalar, ir.Constant(I32, 0))
        picks = ir.Constant(ir.VectorType(I32, lanes), [0] * lanes)
        return self.builder.shuffle_vector(first, empty, picks)

    def broadcast_int(self, address: ir.Value) -> ir.Value:
        """Return a vector with the lower half of the int64 at ``address`` in every lane."""
        return self.spread(self.builder.trunc(self.load_as(I64, address), I32))

    def widest(self, value: ir.Value) -> ir.Value:
        """Return the largest of eight non-negative integers, as int64."""
        size = LANES
        while size > 1:
            size //= 2
            picks = ir.Constant(INTS, [i ^ size for i in range(LANES)])
            other = self.builder.shuffle_vector(value, value, picks)
            value = self.builder.select(self.builder.icmp_signed(">", value, other), value, other)
        first = self.builder.extract_element(value, ir.Constant(I32, 0))
        return self.builder.zext(first, I64)

    def load(self, address: ir.Value) -> Real:
        return Real(self, self.load_as(FLOATS, address))

    def store(self, value: Real, address: ir.Value) -> None:
        self.store_as(FLOATS, value.vector, address)

    def broadcast(self, address: ir.Value) -> Real:
        """Return a vector with the float at ``address`` in every lane."""
        return Real(self, self.spread(self.load_as(FLOAT, address)))

    def constant(self, number: float) -> Real:
        return Real(self, ir.Constant(FLOATS, [float(np.float32(number))] * LANES))

    def shuffle(self, a: Real, b: Real, picks: Sequence[int]) -> Real:
        mask = ir.Constant(INTS, list(picks))
        return Real(self, self.builder.shuffle_vector(a.vector, b.vector, mask))

    def load_complex(self, address: ir.Value) -> _Complex:
        return _Complex(self.load(address), self.load(self.at(address, VECTOR_NBYTES)))

    def store_complex(self, value: _Complex, address: ir.Value) -> None:
        self.store(value.re, address)
        self.store(value.im, self.at(address, VECTOR_NBYTES))

    def broadcast_complex(self, address: ir.Value) -> _Complex:
        return _Complex(self.broadcast(address), self.broadcast(self.at(address, 4)))

    def _transpose_halves(self, rows: list[Real]) -> list[Real]:
        """Transpose the two 4 x 4 matrices in each half of rows 0-3 and of rows 4-7."""
        low, high = (0, 8, 1, 9, 4, 12, 5, 13), (2, 10, 3, 11, 6, 14, 7, 15)
        left, right = (0, 1, 8, 9, 4, 5, 12, 13), (2, 3, 10, 11, 6, 7, 14, 15)
        out = []
        for a, b, c, d in (rows[:4], rows[4:]):
            for pick in (low, high):
                ab, cd = self.shuffle(a, b, pick), self.shuffle(c, d, pick)
                out += [self.shuffle(ab, cd, left), self.shuffle(ab, cd, right)]
        return out

    def transposed(self, rows: list[Real]) -> list[Real]:
        """Return the columns of an 8 x 8 matrix."""
        out = self._transpose_halves(rows)
        low, high = (0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)
        return [self.shuffle(out[i], out[i + 4], pick) for pick in (low, high) for i in range(4)]

    def load_transposed(self, address: ir.Value, row_nbytes: ir.Value) -> list[Real]:
        """Return the columns of an 8 x 8 matrix in memory; half rows are combined while loading."""
        starts = [self.at(address, 0, row_nbytes, i) for i in range(LANES)]
        every = ir.Constant(INTS, list(range(LANES)))
        rows = []
        for offset in (0, VECTOR_NBYTES // 2):
            for i in range(4):
                low, high = (
                    self.load_as(_HALF, self.at(starts[row], offset)) for row in (i, i + 4)
                )
                rows.append(Real(self, self.builder.shuffle_vector(low, high, every)))
        return self._transpose_halves(rows)


class Real:
    """Vector of floats with arithmetic operators."""

    def __init__(self, emitter: _Emitter, vector: ir.Value) -> None:
        self.emitter, self.vector = emitter, vector

    def __add__(self, other: Real) -> Real:
        return Real(self.emitter, self.emitter.builder.fadd(self.vector, other.vector))

    def __sub__(self, other: Real) -> Real:
        return Real(self.emitter, self.emitter.builder.fsub(self.vector, other.vector))

    def __mul__(self, other: Real) -> Real:
        return Real(self.emitter, self.emitter.builder.fmul(self.vector, other.vector))

    def __neg__(self) -> Real:
        return Real(self.emitter, self.emitter.builder.fneg(self.vector))


class _Complex:
    """Vector of complex numbers, as real and imaginary parts, with arithmetic operators."""

    def __init__(self, re: Real, im: Real) -> None:
        self.re, self.im = re, im

    def __add__(self, other: _Complex) -> _Complex:
        return _Complex(self.re + other.re, self.im + other.im)

    def __sub__(self, other: _Complex) -> _Complex:
        return _Complex(self.re - other.re, self.im - other.im)

    def __mul__(self, other: _Complex) -> _Complex:
        return _Complex(
            self.re * other.re - self.im * other.im, self.re * other.im + self.im * other.re
        )

    def scaled(self, factor: Real) -> _Complex:
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


def codelet(body: Callable, n_args: int, result=types.void) -> Callable:
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
    return codelet(body, 5)


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

    return codelet(body, 6)


def _scatter_coeffs(with_addend: bool) -> Callable:
    def body(emit, src, dst, addend, row_nbytes, peak):
        builder = emit.builder
        columns = [emit.load(emit.at(src, VECTOR_NBYTES * i)) for i in range(LANES)]
        magnitude = emit.ints(0x7FFFFFFF)
        largest = emit.load_as(INTS, peak)
        for i, row in enumerate(emit.transposed(columns)):
            if with_addend:
                row = row + emit.load(emit.at(addend, 0, row_nbytes, i))
            emit.store(row, emit.at(dst, 0, row_nbytes, i))
            bits = builder.and_(builder.bitcast(row.vector, INTS), magnitude)
            largest = builder.select(builder.icmp_signed(">", bits, largest), bits, largest)
        emit.store_as(INTS, largest, peak)

    return codelet(body, 5)


gather = codelet(_gather, 7)
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

    return codelet(body, 3)


def _split_ends(factor: float, conjugate: bool) -> Callable:
    """Make a codelet as ``_split`` for bin 0, (DC, Nyquist), and bin N / 2, which are not pairs."""

    def body(emit, zero, middle):
        z, scale = emit.load_complex(zero), emit.constant(factor)
        imag = z.im - z.re if conjugate else z.re - z.im
        emit.store_complex(_Complex(z.re + z.im, imag).scaled(scale), zero)
        z = emit.load_complex(middle).scaled(emit.constant(2))
        emit.store_complex(z if conjugate else z.conj(), middle)

    return codelet(body, 2)


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


rotate, rotate_back = codelet(_rotate, 4), codelet(_rotate_back, 4)


def _copy(emit, src, dst):
    emit.store(emit.load(src), dst)


copy = codelet(_copy, 2)


def _prefetch(emit, address):
    """Prefetch the four cache lines at ``address``."""
    byte = I8.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, I32, I32, I32])
    prefetch = emit.builder.module.declare_intrinsic("llvm.prefetch.p0", (), kind)
    read, keep, data = (ir.Constant(I32, number) for number in (0, 3, 1))
    for line in range(4):
        pointer = emit.builder.inttoptr(emit.at(address, 64 * line), byte)
        emit.builder.call(prefetch, [pointer, read, keep, data])


prefetch = codelet(_prefetch, 1)
