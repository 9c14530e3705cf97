"""Vector code (LLVM IR) for values: keys, codes and bit streams, float16, words of 64 bits."""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir
from numba import types

from horovod_fftcomp.kernels.cpu.vector_ir import (
    FLOAT,
    FLOATS,
    I8,
    I32,
    I64,
    INTS,
    LANES,
    VECTOR_NBYTES,
    Real,
    codelet,
)

_DOUBLES = ir.VectorType(ir.DoubleType(), LANES)
_SHORTS = ir.VectorType(ir.IntType(16), LANES)
_BYTES = ir.VectorType(I8, LANES)
_LONGS = ir.VectorType(I64, LANES)


def _mask_above(emit, keys, threshold):
    """Return a mask of the 64 int32 at ``keys``: ones where they are above the threshold."""
    builder = emit.builder
    limits = emit.spread(builder.trunc(threshold, I32), 64)
    values = emit.load_as(ir.VectorType(I32, 64), keys)
    return builder.bitcast(builder.icmp_signed(">", values, limits), I64)


def _sum_with_keys(with_addend: bool) -> Callable:
    """Make a codelet that adds 64 reals and writes the sums and their magnitudes' bits as keys.

    ``peak``, eight int32 in memory, is updated to the largest magnitudes.
    """

    def body(emit, a, b, out, keys, peak):
        builder = emit.builder
        magnitude = emit.ints(0x7FFFFFFF)
        largest = emit.load_as(INTS, peak)
        for part in range(64 // LANES):
            offset = VECTOR_NBYTES * part
            total = emit.load(emit.at(a, offset))
            if with_addend:
                total = total + emit.load(emit.at(b, offset))
            emit.store(total, emit.at(out, offset))
            bits = builder.and_(builder.bitcast(total.vector, INTS), magnitude)
            emit.store_as(INTS, bits, emit.at(keys, offset))
            largest = builder.select(builder.icmp_signed(">", bits, largest), bits, largest)
        emit.store_as(INTS, largest, peak)

    return codelet(body, 5)


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
            code, sent = write(emit, emit.builder.bitcast(value.vector, INTS), *options)
            emit.store_as(INTS, code, emit.at(codes, VECTOR_NBYTES * part))
            emit.store(value - Real(emit, emit.builder.bitcast(sent, FLOATS)), at)

    body.__name__ = write.__name__
    return codelet(body, 3 if n_options else 2)


def _decode(read: Callable, n_options: int) -> Callable:
    """Make a codelet that writes the values of 64 codes and returns the largest code or magnitude.

    ``read(emit, codes, *options)`` returns (bits of the values, the codes or magnitudes).
    """

    def body(emit, codes, values, *coding):
        options = [emit.broadcast_int(emit.at(coding[0], 8 * i)) for i in range(1, 1 + n_options)]
        largest = emit.ints(0)
        for part in range(64 // LANES):
            code = emit.load_as(INTS, emit.at(codes, VECTOR_NBYTES * part))
            bits, size = read(emit, code, *options)
            emit.store_as(INTS, bits, emit.at(values, VECTOR_NBYTES * part))
            bigger = emit.builder.icmp_signed(">", size, largest)
            largest = emit.builder.select(bigger, size, largest)
        return emit.widest(largest)

    body.__name__ = read.__name__
    return codelet(body, 3 if n_options else 2, types.int64)


def _encode_range(emit, bits, _, step, base, levels, zero):
    b = emit.builder
    nothing, one = emit.ints(0), emit.ints(1)
    above = b.add(_magnitude(emit, bits), b.sub(b.lshr(step, one), base))
    # (above + 1/2) / step is no whole number, and further from one than the rounding error.
    inverse = b.fdiv(ir.Constant(_DOUBLES, [1.0] * LANES), b.sitofp(step, _DOUBLES))
    middle = b.fadd(b.sitofp(above, _DOUBLES), ir.Constant(_DOUBLES, [0.5] * LANES))
    level = b.fptosi(b.fmul(middle, inverse), INTS)
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

    return codelet(body, 2)


def _add_64(emit, src, dst):
    """Add 64 floats at ``src`` to those at ``dst``."""
    for part in range(64 // LANES):
        at = emit.at(dst, VECTOR_NBYTES * part)
        emit.store(emit.load(at) + emit.load(emit.at(src, VECTOR_NBYTES * part)), at)


add_64 = codelet(_add_64, 2)
copy_64 = _resize(INTS, INTS)
widen_bytes, narrow_to_bytes = _resize(_BYTES, INTS), _resize(INTS, _BYTES)
widen_shorts, narrow_to_shorts = _resize(_SHORTS, INTS), _resize(INTS, _SHORTS)


def _multiples(emit, number):
    """Return 0, 1, ... 7 times a number."""
    return emit.builder.mul(emit.spread(number), ir.Constant(_LONGS, list(range(LANES))))


def _pack_8(emit, codes, bits):
    """Return eight int32 codes of at most 8 bits as one bit stream of 64 bits."""
    builder = emit.builder
    wide = builder.zext(emit.load_as(INTS, codes), _LONGS)
    placed = builder.shl(wide, _multiples(emit, bits))
    kind = ir.FunctionType(I64, [_LONGS])
    joined = builder.module.declare_intrinsic("llvm.vector.reduce.or.v8i64", (), kind)
    return builder.call(joined, [placed])


def _unpack_8(emit, address, shift, bits, codes):
    """Write the eight codes, of at most 7 bits, that begin ``shift`` bits after ``address``."""
    builder = emit.builder
    one = ir.Constant(I64, 1)
    word = builder.lshr(emit.load_as(I64, address, 1), shift)
    mask = builder.sub(builder.shl(one, bits), one)
    apart = builder.lshr(emit.spread(word), _multiples(emit, bits))
    every = builder.and_(apart, emit.spread(mask))
    emit.store_as(INTS, builder.trunc(every, INTS), codes)


pack_8, unpack_8 = codelet(_pack_8, 2, types.uint64), codelet(_unpack_8, 4)


def _to_float16(emit, src, dst, limit):
    """Write 64 float32 as float16, rounded to nearest even and clipped to +-limit."""
    builder = emit.builder
    most = builder.bitcast(emit.broadcast(limit).vector, INTS)
    for part in range(64 // LANES):
        bits = emit.load_as(INTS, emit.at(src, VECTOR_NBYTES * part))
        magnitude = _magnitude(emit, bits)
        within = builder.icmp_signed("<", magnitude, most)
        magnitude = builder.select(within, magnitude, most)
        odd = builder.and_(builder.lshr(magnitude, emit.ints(13)), emit.ints(1))
        rounded = builder.add(builder.add(magnitude, emit.ints(0xFFF)), odd)
        normal = builder.lshr(builder.sub(rounded, emit.ints(0x38000000)), emit.ints(13))
        # In [0.5, 1) the spacing of float32 is 2^-24, as that of float16 below 2^-14.
        shifted = Real(emit, builder.bitcast(magnitude, FLOATS)) + emit.constant(0.5)
        small = builder.sub(builder.bitcast(shifted.vector, INTS), emit.ints(0x3F000000))
        is_small = builder.icmp_signed("<", magnitude, emit.ints(0x38800000))
        half = builder.select(is_small, small, normal)
        sign = builder.and_(builder.lshr(bits, emit.ints(16)), emit.ints(0x8000))
        halves = builder.trunc(builder.or_(half, sign), _SHORTS)
        emit.store_as(_SHORTS, halves, emit.at(dst, 2 * LANES * part), 2)


def _from_float16(emit, src, dst):
    """Write 64 float16 as float32."""
    builder = emit.builder
    for part in range(64 // LANES):
        wide = builder.zext(emit.load_as(_SHORTS, emit.at(src, 2 * LANES * part), 2), INTS)
        magnitude = builder.shl(builder.and_(wide, emit.ints(0x7FFF)), emit.ints(13))
        sign = builder.shl(builder.and_(wide, emit.ints(0x8000)), emit.ints(16))
        # The factor 2^112 corrects the exponent's bias, and makes subnormal float16 normal.
        scaled = Real(emit, builder.bitcast(magnitude, FLOATS)) * emit.constant(2.0**112)
        infinite = builder.icmp_signed(">", magnitude, emit.ints(0x0F7FFFFF))
        special = builder.or_(magnitude, emit.ints(0x7F800000))
        value = builder.select(infinite, special, builder.bitcast(scaled.vector, INTS))
        emit.store_as(INTS, builder.or_(value, sign), emit.at(dst, VECTOR_NBYTES * part))


to_float16, from_float16 = codelet(_to_float16, 3), codelet(_from_float16, 2)


def _packed_8(emit, start, mask, unit):
    """Yield the address of each of eight units among those packed behind ``start``.

    Packed are the units whose bits in ``mask`` are ones; of another, the address is the next one's.
    """
    for lane in range(LANES):
        below = emit.builder.and_(mask, ir.Constant(I64, (1 << lane) - 1))
        yield emit.at(start, 0, emit.builder.ctpop(below), unit.width // 8)


def _collect_8(width: int) -> Callable:
    """Make a codelet that packs those of eight units of ``width`` reals whose bits are ones.

    The memory of all eight is written to.
    """
    unit = ir.IntType(32 * width)

    def body(emit, reals, values, mask):
        # Each one after a zero overwrites what was written for that.
        for lane, address in enumerate(_packed_8(emit, values, mask, unit)):
            value = emit.load_as(unit, emit.at(reals, 4 * width * lane))
            emit.store_as(unit, value, address)

    return codelet(body, 3)


def _put_back_8(width: int, adds: bool) -> Callable:
    """Make a codelet that writes packed units over eight units of reals, or adds them to those."""
    unit = ir.IntType(32 * width)
    units, reals_type = ir.VectorType(unit, LANES), ir.VectorType(FLOAT, width * LANES)

    def body(emit, values, reals, mask):
        builder = emit.builder
        packed = ir.Constant(units, ir.Undefined)
        for lane, address in enumerate(_packed_8(emit, values, mask, unit)):
            value = emit.load_as(unit, address)
            packed = builder.insert_element(packed, value, ir.Constant(I32, lane))
        ones = builder.bitcast(builder.trunc(mask, I8), ir.VectorType(ir.IntType(1), LANES))
        if adds:
            zeros = ir.Constant(units, [0] * LANES)
            chosen = builder.bitcast(builder.select(ones, packed, zeros), reals_type)
            total = builder.fadd(emit.load_as(reals_type, reals), chosen)
            emit.store_as(reals_type, total, reals)
        else:
            merged = builder.select(ones, packed, emit.load_as(units, reals))
            builder.fence("acq_rel", "singlethread")  # no store under a mask: slow on some CPUs
            emit.store_as(units, merged, reals)

    return codelet(body, 3)


collect_8, collect_pairs_8 = _collect_8(1), _collect_8(2)
put_8, put_pairs_8 = _put_back_8(1, False), _put_back_8(2, False)
add_8, add_pairs_8 = _put_back_8(1, True), _put_back_8(2, True)


def _places_8(emit, word, first, places):
    """Write ``first`` plus the places of the eight lowest ones of a word, int32; return the rest.

    Of fewer ones, what follows their places is undefined.
    """
    builder = emit.builder
    for lane in range(LANES):
        place = builder.add(first, _trailing_zeros(emit, word))
        emit.store_as(I32, builder.trunc(place, I32), emit.at(places, 4 * lane))
        word = builder.and_(word, builder.sub(word, ir.Constant(I64, 1)))
    return word


def _trailing_zeros(emit, word):
    return emit.builder.cttz(word, ir.Constant(ir.IntType(1), 0))


def _count_ones(emit, word):
    return emit.builder.ctpop(word)


def _high_product(emit, a, b):
    """Return the upper 64 bits of the product of two unsigned integers."""
    wide = ir.IntType(128)
    product = emit.builder.mul(emit.builder.zext(a, wide), emit.builder.zext(b, wide))
    return emit.builder.trunc(emit.builder.lshr(product, ir.Constant(wide, 64)), I64)


mask_above = codelet(_mask_above, 2, types.uint64)
places_8 = codelet(_places_8, 3, types.int64)
trailing_zeros = codelet(_trailing_zeros, 1, types.int64)
count_ones = codelet(_count_ones, 1, types.int64)
high_product = codelet(_high_product, 2, types.uint64)
