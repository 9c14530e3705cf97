// Conversion to and from float16, for sums in float16; see schemes/dense.py.

constexpr u32 HALF_NAN = 0x7e00;

// Rounded to nearest, ties to even; not beyond 65504, and finite.
__device__ __forceinline__ u16 half_of(float x) {
    u32 size = magnitude(x), sign = __float_as_uint(x) >> 16 & 0x8000;
    if (size < 0x38800000u)  // below 2^-14 steps are 2^-24, as those of 0.5
        return u16(sign | (__float_as_uint(add_rn(__uint_as_float(size), 0.5f)) - 0x3f000000u));
    size += 0xfffu + (size >> 13 & 1);
    return u16(sign | (size - 0x38000000u) >> 13);
}

__device__ __forceinline__ float float_of(u16 half) {
    u32 size = half & 0x7fffu, pattern = (size << 13) + (size < 0x7c00u ? 0x38000000u : 0x70000000u);
    float value = size < 0x400u ? mul_rn(float(size), 0x1p-24f) : __uint_as_float(pattern);
    return half >> 15 ? negated(value) : value;
}

// Raises a flag if a magnitude lies beyond one with these bits; one thread for each value.
__global__ void __launch_bounds__(THREADS)
    find_beyond(const float* __restrict__ values, u64 n, u32 largest, u32* flag) {
    u64 i = u64(blockIdx.x) * THREADS + threadIdx.x;
    if (i < n && magnitude(values[i]) > largest) atomicOr(flag, 1u);
}

// Writes values as float16, clipped to `limit`; NaN alone where the flag is raised.
__global__ void __launch_bounds__(THREADS)
    write_halves(const float* __restrict__ values, u64 n, u32 limit, const u32* __restrict__ flag,
                 u16* halves) {
    u64 i = u64(blockIdx.x) * THREADS + threadIdx.x;
    if (i >= n) return;
    u32 pattern = __float_as_uint(values[i]), size = min(pattern & ABS, limit);
    halves[i] = *flag ? u16(HALF_NAN) : half_of(__uint_as_float((pattern & SIGN) | size));
}

__global__ void __launch_bounds__(THREADS)
    read_halves(const u16* __restrict__ halves, u64 n, float* values) {
    u64 i = u64(blockIdx.x) * THREADS + threadIdx.x;
    if (i < n) values[i] = float_of(halves[i]);
}
