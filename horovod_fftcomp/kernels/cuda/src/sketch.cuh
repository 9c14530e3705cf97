// Count sketches: sums of elements in hashed columns, and the estimates of elements from them.
// Columns are summed in whole multiples of a power of two, so that the order does not matter.

// One tensor as the host describes it; with 0 columns it travels as it is.
struct Sketch {
    const float* grad;      // null of a frozen tensor
    const float* residual;  // null: zeros
    const float* velocity;  // null: zeros
    float* moved;           // the new velocity
    const float* factor;    // of the gradient; null: 1
    float* whole;           // what is to be sent; in the end what is left
    const u64* hashes;      // [rows, 2]: factor and addend
    u64* columns_at;        // [rows, columns]: sums, as 64 bits with a sign; zeros before
    float* first;           // of the first round: what is sent, then what has come
    float* estimates;       // n
    u64 n, first_n;         // below 2^32; floats of the first round
    u32 first_tile, n_tiles;    // of n
    u32 first_group, n_groups;  // of first_n
    u32 rows, columns;
    u32 momentum, how;      // bits of the factor; of enum How
};
static_assert(sizeof(Sketch) == 128, "structs.py describes sketches with the same layout");

// Returns the hash of an element: bit 0 is the sign, the others tell the column.
__device__ __forceinline__ u64 hash_of(const Sketch& part, u32 row, u64 i) {
    return (part.hashes[2 * row] * i + part.hashes[2 * row + 1]) >> 32;
}

__device__ __forceinline__ u64 place_of(const Sketch& part, u32 row, u64 hash) {
    return u64(row) * part.columns + (((hash >> 1) * part.columns) >> 31);
}

// Bits after the point of the sums; see `sketch_bits`.
__device__ __forceinline__ int bits_of_sums(const Sketch& part, u32 peak) {
    int exponent = int(max(peak >> 23, 1u)) - 127, length = 0;
    for (u64 most = part.n - 1; most; most >>= 1) length++;
    return 61 - length - exponent;
}

// What is to be sent, its peak, and the velocity.
__global__ void __launch_bounds__(THREADS, RESIDENT)
    accumulate(const Sketch* __restrict__ parts, const u32* __restrict__ tile_part,
               u32* __restrict__ peaks) {
    const Sketch part = parts[tile_part[blockIdx.x]];
    if (!part.grad) return;
    Tensor momentum = {};
    momentum.residual = part.residual;
    momentum.velocity = part.velocity;
    momentum.moved = part.moved;
    momentum.factor = part.factor;
    momentum.momentum = part.momentum;
    momentum.how = part.how;
    u64 begin = u64(blockIdx.x - part.first_tile) * TILE;
    u64 end = min(begin + TILE, part.n);
    u32 peak = 0;
    for (u64 i = begin + threadIdx.x; i < end; i += THREADS) {
        float value = accelerate(momentum, i, part.grad[i]);
        if (part.residual) value = add_rn(part.residual[i], value);
        part.whole[i] = value;
        peak = max(peak, magnitude(value));
    }
#pragma unroll
    for (u32 by = 16; by; by /= 2) peak = max(peak, __shfl_xor_sync(ALL_LANES, peak, by));
    if (threadIdx.x % 32 == 0) atomicMax(&peaks[tile_part[blockIdx.x]], peak);
}

__global__ void __launch_bounds__(THREADS, RESIDENT)
    sketch(const Sketch* __restrict__ parts, const u32* __restrict__ tile_part,
           const u32* __restrict__ peaks) {
    const Sketch part = parts[tile_part[blockIdx.x]];
    u32 peak = peaks[tile_part[blockIdx.x]];
    if (!part.grad || !part.columns || peak > LARGEST_FINITE_BITS) return;
    int bits = bits_of_sums(part, peak);
    u64 begin = u64(blockIdx.x - part.first_tile) * TILE;
    u64 end = min(begin + TILE, part.n);
    for (u64 i = begin + threadIdx.x; i < end; i += THREADS) {
        long long steps = (long long)(rint(ldexp(widened(part.whole[i]), bits)));
        for (u32 row = 0; row < part.rows; row++) {
            u64 hash = hash_of(part, row, i);
            atomicAdd(&part.columns_at[place_of(part, row, hash)], u64(hash & 1 ? -steps : steps));
        }
    }
}

// This rank's message: sums as float32, or all of a tensor; NaN of one that is not finite, zeros of
// a frozen one. A thread for each float.
__global__ void __launch_bounds__(THREADS)
    write_sketch(const Sketch* __restrict__ parts, const u32* __restrict__ group_part,
                 const u32* __restrict__ peaks) {
    const Sketch part = parts[group_part[blockIdx.x]];
    u32 peak = peaks[group_part[blockIdx.x]];
    u64 i = u64(blockIdx.x - part.first_group) * THREADS + threadIdx.x;
    if (i >= part.first_n) return;
    float value = 0.0f;
    if (part.grad && part.columns) {
        double sum = double((long long)(part.columns_at[i]));
        value = narrowed(ldexp(sum, -bits_of_sums(part, peak)));
    } else if (part.grad) {
        value = part.whole[i];
    }
    part.first[i] = peak > LARGEST_FINITE_BITS ? __uint_as_float(NAN_BITS) : value;
}

// Whether what has come is finite: a word for each tensor, zeros before.
__global__ void __launch_bounds__(THREADS)
    check_sketch(const Sketch* __restrict__ parts, const u32* __restrict__ group_part,
                 u32* __restrict__ bad) {
    const Sketch part = parts[group_part[blockIdx.x]];
    u64 i = u64(blockIdx.x - part.first_group) * THREADS + threadIdx.x;
    if (i < part.first_n && magnitude(part.first[i]) > LARGEST_FINITE_BITS)
        atomicOr(&bad[group_part[blockIdx.x]], 1u);
}

// A finite float's order among others, by integers, which nothing flushes.
__device__ __forceinline__ int order_of(float x) {
    int size = int(magnitude(x));
    return __float_as_uint(x) & SIGN ? -size : size;
}

// The median over rows of what the columns of each element have.
template <u32 ROWS>
__global__ void __launch_bounds__(THREADS)
    estimate(const Sketch* __restrict__ parts, const u32* __restrict__ tile_part) {
    const Sketch part = parts[tile_part[blockIdx.x]];
    if (!part.columns) return;
    u64 begin = u64(blockIdx.x - part.first_tile) * TILE;
    u64 end = min(begin + TILE, part.n);
    for (u64 i = begin + threadIdx.x; i < end; i += THREADS) {
        float found[ROWS];
#pragma unroll
        for (u32 row = 0; row < ROWS; row++) {
            u64 hash = hash_of(part, row, i);
            float value = part.first[place_of(part, row, hash)];
            found[row] = hash & 1 ? negated(value) : value;
        }
#pragma unroll
        for (u32 turn = 0; turn < ROWS; turn++) {  // neighbours change places until in order
#pragma unroll
            for (u32 row = turn % 2; row + 1 < ROWS; row += 2) {
                float a = found[row], b = found[row + 1];
                bool less = order_of(a) < order_of(b);
                found[row] = less ? a : b;
                found[row + 1] = less ? b : a;
            }
        }
        part.estimates[i] = found[ROWS / 2];
    }
}
