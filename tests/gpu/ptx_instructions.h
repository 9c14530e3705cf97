// The instructions of PTX as C++ functions: for `add.s32 %r1, %r2, 5;` ptx.py writes
// `ptx_add_s32(r1, r2, 5);`. See NVIDIA's "PTX ISA", chapter "Instruction Set".
//
// Registers hold bits, so all operands are unsigned; each function reads them as the type in its
// name. An instruction that is not here does not compile, so none is guessed.
#pragma once
#include "cuda_emulator.h"

#include <type_traits>

#define PTX static inline __attribute__((always_inline)) void

typedef uint8_t u8, b8;
typedef uint16_t u16, b16;
typedef uint32_t u32, b32;
typedef uint64_t u64, b64;
typedef int16_t s16;
typedef int32_t s32;
typedef int64_t s64;
typedef float f32;
typedef double f64;
typedef bool pred;

// The register that holds a T; there is none of 8 bits.
template <class T>
using Register =
    std::conditional_t<sizeof(T) == 8, u64, std::conditional_t<sizeof(T) == 4, u32, u16>>;

template <class T>
T value_of(u64 bits) {
    return emulator::value_of<T>(bits);
}
template <class T>
Register<T> bits_of(T value) {
    return Register<T>(emulator::bits_of(value));
}
static inline f32 flushed(f32 x) { return std::fpclassify(x) == FP_SUBNORMAL ? x * 0 : x; }

#define tid_x (threadIdx.x)
#define ntid_x (blockDim.x)
#define ctaid_x (blockIdx.x)
#define nctaid_x (gridDim.x)

// Instructions with one, two or three operands of one type: `result` is an expression of them.
#define UNARY(name, T, result)                           \
    PTX ptx_##name##_##T(Register<T>& d, Register<T> x) { \
        T a = value_of<T>(x);                            \
        d = bits_of<T>(result);                          \
    }
#define BINARY(name, T, result)                                         \
    PTX ptx_##name##_##T(Register<T>& d, Register<T> x, Register<T> y) { \
        T a = value_of<T>(x), b = value_of<T>(y);                       \
        d = bits_of<T>(result);                                         \
    }
#define TERNARY(name, T, result)                                                       \
    PTX ptx_##name##_##T(Register<T>& d, Register<T> x, Register<T> y, Register<T> z) { \
        T a = value_of<T>(x), b = value_of<T>(y), c = value_of<T>(z);                  \
        d = bits_of<T>(result);                                                        \
    }
#define SHIFT(name, T, result)                                  \
    PTX ptx_##name##_##T(Register<T>& d, Register<T> x, u32 n) { \
        constexpr u32 width = 8 * sizeof(T);                    \
        T a = value_of<T>(x);                                   \
        d = bits_of<T>(result);                                 \
    }
#define COMPARE(name, T, result)                                     \
    PTX ptx_setp_##name##_##T(bool& d, Register<T> x, Register<T> y) { \
        T a = value_of<T>(x), b = value_of<T>(y);                    \
        d = result;                                                  \
    }

#define SIGNED(form, name, result) \
    form(name, s16, result) form(name, s32, result) form(name, s64, result)
#define UNSIGNED(form, name, result) \
    form(name, u16, result) form(name, u32, result) form(name, u64, result)
#define INTEGERS(form, name, result) SIGNED(form, name, result) UNSIGNED(form, name, result)
#define BITS(form, name, result) \
    form(name, b16, result) form(name, b32, result) form(name, b64, result)
#define FLOATS(form, name, result) form(name, f32, result) form(name, f64, result)

template <class T>
T divisor(T b) {
    if (b == 0) emulator::fail("division by zero, whose result is unspecified");
    return b;
}

INTEGERS(BINARY, add, a + b)
INTEGERS(BINARY, sub, a - b)
INTEGERS(BINARY, mul_lo, a * b)
INTEGERS(TERNARY, mad_lo, a * b + c)
INTEGERS(BINARY, min, std::min(a, b))
INTEGERS(BINARY, max, std::max(a, b))
UNSIGNED(BINARY, div, a / divisor(b))
UNSIGNED(BINARY, rem, a % divisor(b))
SIGNED(UNARY, neg, -a)
BITS(BINARY, and, a & b)
BITS(BINARY, or, a | b)
BITS(BINARY, xor, a ^ b)
BITS(UNARY, not, ~a)
UNARY(popc, b32, __builtin_popcount(a))
BITS(SHIFT, shl, n < width ? a << n : 0)
BITS(SHIFT, shr, n < width ? a >> n : 0)
UNSIGNED(SHIFT, shr, n < width ? a >> n : 0)
SIGNED(SHIFT, shr, a >> std::min(n, width - 1))

FLOATS(BINARY, add_rn, a + b)
FLOATS(BINARY, sub_rn, a - b)
FLOATS(BINARY, mul_rn, a * b)
FLOATS(BINARY, div_rn, a / b)
FLOATS(UNARY, sqrt_rn, std::sqrt(a))
FLOATS(TERNARY, fma_rn, std::fma(a, b, c))
UNARY(neg_ftz, f32, -flushed(a))
UNARY(abs_ftz, f32, std::fabs(flushed(a)))

INTEGERS(COMPARE, eq, a == b)
INTEGERS(COMPARE, ne, a != b)
INTEGERS(COMPARE, lt, a < b)
INTEGERS(COMPARE, le, a <= b)
INTEGERS(COMPARE, gt, a > b)
INTEGERS(COMPARE, ge, a >= b)
BITS(COMPARE, eq, a == b)
BITS(COMPARE, ne, a != b)
// Of floats, the first six are false if one is NaN, and those with a `u` are true.
FLOATS(COMPARE, eq, a == b)
FLOATS(COMPARE, ne, a < b || a > b)
FLOATS(COMPARE, lt, a < b)
FLOATS(COMPARE, le, a <= b)
FLOATS(COMPARE, gt, a > b)
FLOATS(COMPARE, ge, a >= b)
FLOATS(COMPARE, equ, !(a < b || a > b))
FLOATS(COMPARE, neu, a != b)
FLOATS(COMPARE, ltu, !(a >= b))
FLOATS(COMPARE, leu, !(a > b))
FLOATS(COMPARE, gtu, !(a <= b))
FLOATS(COMPARE, geu, !(a < b))
COMPARE(equ_ftz, f32, !(flushed(a) < flushed(b) || flushed(a) > flushed(b)))

PTX ptx_and_pred(bool& d, bool a, bool b) { d = a && b; }
PTX ptx_or_pred(bool& d, bool a, bool b) { d = a || b; }
PTX ptx_xor_pred(bool& d, bool a, bool b) { d = a != b; }
PTX ptx_not_pred(bool& d, bool a) { d = !a; }
PTX ptx_mov_pred(bool& d, bool a) { d = a; }

#define MOVE(unused, T, result)                              \
    PTX ptx_mov_##T(Register<T>& d, Register<T> a) { d = a; } \
    PTX ptx_selp_##T(Register<T>& d, Register<T> a, Register<T> b, bool p) { d = p ? a : b; }
INTEGERS(MOVE, , )
BITS(MOVE, , )
FLOATS(MOVE, , )

// Half registers of one: `mov.b64 {%r1, %r2}, %rd1` and `mov.b64 %rd1, {%r1, %r2}`.
static const struct Ignored {
    template <class T>
    void operator=(T) const {}
} ignored;
template <class Low, class High>
PTX ptx_mov_b32_to_parts(Low& low, High& high, u32 whole) {
    low = u16(whole);
    high = u16(whole >> 16);
}
template <class Low, class High>
PTX ptx_mov_b64_to_parts(Low& low, High& high, u64 whole) {
    low = u32(whole);
    high = u32(whole >> 32);
}
PTX ptx_mov_b64_of_parts(u64& whole, u32 low, u32 high) { whole = u64(high) << 32 | low; }

// Products of double width, and their upper halves.
#define WIDE(T, Double)                                                           \
    PTX ptx_mul_wide_##T(Register<Double>& d, Register<T> x, Register<T> y) {      \
        d = bits_of<Double>(Double(value_of<T>(x)) * Double(value_of<T>(y)));     \
    }
WIDE(u16, u32)
WIDE(u32, u64)
WIDE(s16, s32)
WIDE(s32, s64)
PTX ptx_mul_hi_u32(u32& d, u32 a, u32 b) { d = u32(u64(a) * b >> 32); }
PTX ptx_mul_hi_u64(u64& d, u64 a, u64 b) { d = u64((unsigned __int128)a * b >> 64); }

// Inserts the lowest bits of a in b.
template <class T>
T inserted(T a, T b, u32 position, u32 length) {
    constexpr u32 width = 8 * sizeof(T);
    position &= 255;
    length &= 255;
    if (position >= width || length == 0) return b;
    T mask = (length < width ? (T(1) << length) - 1 : ~T(0)) << position;
    return (a << position & mask) | (b & ~mask);
}
PTX ptx_bfi_b32(u32& d, u32 a, u32 b, u32 c, u32 e) { d = inserted(a, b, c, e); }
PTX ptx_bfi_b64(u64& d, u64 a, u64 b, u32 c, u32 e) { d = inserted(a, b, c, e); }
// Chooses four bytes of eight; the highest bit of a choice stands for the byte's sign, repeated.
PTX ptx_prmt_b32(u32& d, u32 a, u32 b, u32 choices) {
    u64 bytes = u64(b) << 32 | a;
    u32 made = 0;
    for (u32 i = 0; i < 4; i++) {
        u32 choice = choices >> 4 * i & 15;
        u8 byte = u8(bytes >> 8 * (choice & 7));
        if (choice & 8) byte = byte & 0x80 ? 0xff : 0;
        made |= u32(byte) << 8 * i;
    }
    d = made;
}
PTX ptx_shf_l_wrap_b32(u32& d, u32 low, u32 high, u32 n) {
    d = u32((u64(high) << 32 | low) << (n & 31) >> 32);
}

// Conversions: a register may be wider than the type it is read as.
#define CONVERT(name, To, From)                                            \
    PTX ptx_cvt_##name##To##_##From(Register<To>& d, Register<From> x) {    \
        d = bits_of<To>(To(value_of<From>(x)));                            \
    }
CONVERT(, u16, u32)
CONVERT(, u16, u64)
CONVERT(, u32, u16)
CONVERT(, u32, u64)
CONVERT(, u64, u8)
CONVERT(, u64, u16)
CONVERT(, u64, u32)
CONVERT(rn_, f32, u16)
CONVERT(rn_, f32, s32)
CONVERT(rn_, f32, u32)
CONVERT(rn_, f64, u32)
CONVERT(rn_, f64, u64)
CONVERT(rn_, f32, f64)
CONVERT(, f64, f32)
PTX ptx_cvt_ftz_f64_f32(u64& d, u32 a) { d = bits_of<f64>(flushed(value_of<f32>(a))); }
// Towards zero, within the range of u32. `nan`: what NaN becomes.
static inline u32 truncated(f64 a, u32 nan) {
    if (a != a) return nan;
    return a <= 0 ? 0 : a >= 4294967295.0 ? 0xffffffffu : u32(a);
}
PTX ptx_cvt_rzi_u32_f32(u32& d, u32 a) { d = truncated(value_of<f32>(a), 0); }
PTX ptx_cvt_rzi_u32_f64(u32& d, u64 a) { d = truncated(value_of<f64>(a), 0x80000000u); }

// Memory. Addresses of shared memory begin at 0, and have 32 bits; all others are the host's.
constexpr u32 memory = 0;
struct Generic {
    static unsigned char* at(u64 address, size_t) {
        return reinterpret_cast<unsigned char*>(address);
    }
};
struct Shared {
    static unsigned char* at(u32 address, size_t nbytes) {
        if (u64(address) + nbytes > emulator::block->shared_nbytes)
            emulator::fail("an address beyond the end of shared memory");
        return emulator::shared_memory() + address;
    }
};
template <class Space, class Word>
unsigned char* place(u64 address, size_t n) {
    if (address % (n * sizeof(Word))) emulator::fail("misaligned address");
    return Space::at(address, n * sizeof(Word));
}
template <class Word, class D>
void read(D& d, const unsigned char* from) {
    Word word;
    memcpy(&word, from, sizeof word);
    d = word;
}
template <class Space, class Word, class D>
void load(D& a, u64 address) {
    read<Word>(a, place<Space, Word>(address, 1));
}
template <class Space, class Word, class D>
void load(D& a, D& b, u64 address) {
    const unsigned char* from = place<Space, Word>(address, 2);
    read<Word>(a, from);
    read<Word>(b, from + sizeof(Word));
}
template <class Space, class Word, class D>
void load(D& a, D& b, D& c, D& d, u64 address) {
    const unsigned char* from = place<Space, Word>(address, 4);
    read<Word>(a, from);
    read<Word>(b, from + sizeof(Word));
    read<Word>(c, from + 2 * sizeof(Word));
    read<Word>(d, from + 3 * sizeof(Word));
}
template <class Space, class Word, class... S>
void store(u64 address, S... values) {
    const Word words[] = {Word(values)...};
    memcpy(place<Space, Word>(address, sizeof...(S)), words, sizeof words);
}
#define MEMORY_AT(space_and_type, Space, Word)    \
    template <class... A>                         \
    PTX ptx_ld_##space_and_type(A&&... operands) { \
        load<Space, Word>(operands...);           \
    }                                             \
    template <class... A>                         \
    PTX ptx_st_##space_and_type(A... operands) {  \
        store<Space, Word>(operands...);          \
    }
#define MEMORY(T, Word)                   \
    MEMORY_AT(T, Generic, Word)           \
    MEMORY_AT(v2_##T, Generic, Word)      \
    MEMORY_AT(v4_##T, Generic, Word)      \
    MEMORY_AT(shared_##T, Shared, Word)   \
    MEMORY_AT(shared_v2_##T, Shared, Word) \
    MEMORY_AT(shared_v4_##T, Shared, Word)
MEMORY(b8, u8)
MEMORY(u8, u8)
MEMORY(b16, u16)
MEMORY(u16, u16)
MEMORY(b32, u32)
MEMORY(u32, u32)
MEMORY(f32, u32)
MEMORY(b64, u64)
MEMORY(u64, u64)
MEMORY(f64, u64)

// Parameters are operands themselves, where PTX has their addresses.
PTX ptx_ld_param_u32(u32& d, u64 value) { d = u32(value); }
PTX ptx_ld_param_b32(u32& d, u64 value) { d = u32(value); }
PTX ptx_ld_param_u64(u64& d, u64 value) { d = value; }
PTX ptx_ld_param_b64(u64& d, u64 value) { d = value; }
PTX ptx_ld_param_f64(u64& d, u64 value) { d = value; }

PTX ptx_cvta_to_global_u64(u64& d, u64 a) { d = a; }
PTX ptx_cvta_shared_u64(u64& d, u64 a) { d = reinterpret_cast<u64>(emulator::shared_memory()) + a; }

#define ATOMIC(op, T, function)                                                        \
    PTX ptx_atom_##op##_##T(u32& d, u64 address, u32 a) {                               \
        d = function(reinterpret_cast<u32*>(place<Generic, u32>(address, 1)), a);       \
    }                                                                                  \
    PTX ptx_atom_shared_##op##_##T(u32& d, u64 address, u32 a) {                        \
        d = function(reinterpret_cast<u32*>(place<Shared, u32>(address, 1)), a);        \
    }
ATOMIC(add, u32, atomicAdd)
ATOMIC(max, u32, atomicMax)
ATOMIC(or, b32, atomicOr)
PTX ptx_membar_gl() { __threadfence(); }

// What threads do together. Lanes of a warp have to come to the same instruction.
#define ptx_bar_sync(number)                                         \
    do {                                                             \
        static_assert(number == 0, "only the first barrier is known"); \
        emulator::wait_for_block(EMULATOR_SITE);                     \
    } while (0)
#define ptx_bar_warp_sync(mask) ((void)emulator::exchange(mask, 0, EMULATOR_SITE))
#define ptx_vote_sync_ballot_b32(d, p, mask) (d = emulator::ballot(mask, p, EMULATOR_SITE))

enum Shuffle { UP, DOWN, BFLY, IDX };
// `clamp`: the last lane that may be read, and from bit 8 on which bits of a lane are its segment.
static inline u32 shuffle(Shuffle mode, bool& in_range, u32 a, int b, u32 clamp, u32 mask,
                          emulator::Site site) {
    const uint64_t* slots = emulator::exchange(mask, a, site);
    int lane = int(emulator::lane()), segment = int(clamp >> 8 & 31);
    int least = lane & segment, most = least | (int(clamp & 31) & ~segment);
    b &= 31;
    int source = mode == UP     ? lane - b
                 : mode == DOWN ? lane + b
                 : mode == BFLY ? lane ^ b
                                : least | (b & ~segment);
    in_range = mode == UP ? source >= most : source <= most;
    if (!in_range) source = lane;
    if (!(mask >> source & 1)) emulator::fail("shuffle: the lane it reads is not in the mask");
    return u32(emulator::slot(slots, unsigned(source)));
}
#define SHUFFLE(mode, d, p, a, b, clamp, mask) \
    (d = shuffle(mode, p, a, b, clamp, mask, EMULATOR_SITE))
#define ptx_shfl_sync_up_b32(...) SHUFFLE(UP, __VA_ARGS__)
#define ptx_shfl_sync_down_b32(...) SHUFFLE(DOWN, __VA_ARGS__)
#define ptx_shfl_sync_bfly_b32(...) SHUFFLE(BFLY, __VA_ARGS__)
#define ptx_shfl_sync_idx_b32(...) SHUFFLE(IDX, __VA_ARGS__)
