// Declarations that all kernels use: descriptor tables of a bucket's tensors, sums over a block.
//
// A launch processes all tensors of a bucket. They are cut into tiles; block b works on tile b of
// tensor `tile_tensor[b]`. Files include nothing: the loader concatenates them, and an emulator on
// a CPU puts its own declarations before them. Arithmetic that affects bytes is written with
// functions that round once and never contract, so all machines write the same bytes.
#ifdef __CUDACC__
#define SHARED_MEMORY(name) extern __shared__ __align__(16) unsigned char name[]
#else
#define SHARED_MEMORY(name) unsigned char* name = emulator::shared_memory()
#endif

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr u32 ALL_LANES = 0xffffffffu;
constexpr u32 TILE = 4096;     // floats of a tile: as many reals, or half as many complex bins
constexpr u32 THREADS = 256;   // of a block that reads all of a tile
constexpr u32 WARPS = THREADS / 32;
constexpr u32 RESIDENT = 4;    // such blocks at least on a processor: 64 registers for a thread
constexpr u32 BATCH = 8;       // loads of a thread that are under way before it stores
constexpr u32 RADIX_BITS = 11, RADIX = 1u << RADIX_BITS;  // of the first digit of a key
constexpr u32 LARGEST_FINITE_BITS = 0x7f7fffffu, INFINITY_BITS = 0x7f800000u;
constexpr u32 MIN_NORMAL_BITS = 0x00800000u;
constexpr u32 ABS = 0x7fffffffu, SIGN = 0x80000000u;

enum Kind : u32 { RANGE, FLOAT32, BFLOAT16, STEPS };
enum Layout : u32 { RAW, ALL, BITMAP, OFFSETS };
enum How : u32 { NESTEROV = 1, MASKING = 2, CHOSEN = 4 };  // of a momentum; of chosen.cuh
enum Keep : u32 { NOTHING, UNSENT, EVERYTHING };  // of gradient plus residual, in coeffs

// One tensor as the host describes it. Eight-byte fields come first; `tables.py` has the same.
struct Tensor {
    const float* grad;      // flat
    const float* residual;  // coefficients as floats; null if there is none
    float* coeffs;          // gradient plus residual as coefficients; then what is left unsent
    u8* payload;            // zeros; 16-byte aligned
    u64 numel;              // of grad
    u64 n;                  // coefficients: reals or complex bins; below 2^32
    u64 k;                  // of them to send
    u64 positions_offset;   // of the parts of the payload, in bytes
    u64 values_offset;
    u64 key;                // of what is drawn in this step
    const float* velocity;  // of a momentum before compression; null: zeros
    float* moved;           // the new one; null if there is no momentum
    const float* factor;    // of the gradient, before a momentum; null: 1
    u32* maxima;            // of bins, as float bits; null if there are none
    u32 first_tile, n_tiles;
    u32 layout, low_bits;  // of the positions
    u32 kind, bits;         // of the values
    u32 bins_per_block;     // of a complex transform, whose bin 0 counts half; else 1
    u32 keep;               // of enum Keep
    u32 threshold;          // bits of the least magnitude to send, where k depends on that
    u32 momentum, how;      // bits of the factor; of enum How
    u32 decay;              // bits of what the residual is multiplied by
    u32 step, most;         // bits of the unit of STEPS, and how many there may be
    u32 bin, unused;        // elements that share one of the maxima
};
static_assert(sizeof(Tensor) == 176, "structs.py describes tensors with the same layout");

// What the kernels find out of one tensor. Zeros before the first launch; they clear it themselves.
struct Found {
    u32 peak;      // bits of the largest |component|
    u32 ticket;    // tiles that are done with the present launch
    u32 exponent;  // by which complex keys are scaled down, as float bits of 2^-exponent; 0: by none
    u32 prefix;    // the upper digits of the k-th largest key, as far as they are known
    u32 need;      // of the coefficients with this prefix so many are among the k largest
    u32 grid;      // of the header
    u32 overflow;  // not 0 where more was chosen than the payload has room for
    u32 unused;
    u32 counts[RADIX];
};

// What 32 words of bit masks, a row of a tile, pass on from one launch to the next.
struct RowCounts {
    u32 above, equal;  // coefficients whose key is larger than the k-th largest, or equal to it
    u32 first_rank;    // how many are chosen in the tensor's rows before
    u32 ties;          // of those equal to it that are still to be chosen
};

// Arithmetic that rounds once, in every compilation: some loaders flush denormal numbers to zero by
// a flag that the compiler's own functions obey.
#ifdef __CUDACC__
#define ROUNDED_ONCE(name, instruction)                                              \
    __device__ __forceinline__ float name(float a, float b) {                        \
        float result;                                                                \
        asm(instruction " %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));             \
        return result;                                                               \
    }
ROUNDED_ONCE(add_rn, "add.rn.f32")
ROUNDED_ONCE(sub_rn, "sub.rn.f32")
ROUNDED_ONCE(mul_rn, "mul.rn.f32")
__device__ __forceinline__ float fma_rn(float a, float b, float c) {
    float result;
    asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(result) : "f"(a), "f"(b), "f"(c));
    return result;
}
__device__ __forceinline__ double widened(float x) {
    double result;
    asm("cvt.f64.f32 %0, %1;" : "=d"(result) : "f"(x));
    return result;
}
// For sm_100 NVRTC 13 makes of an operator here an instruction that flushes denormal numbers.
__device__ __forceinline__ float negated(float x) {
    u32 result;
    asm("xor.b32 %0, %1, %2;" : "=r"(result) : "r"(__float_as_uint(x)), "r"(SIGN));
    return __uint_as_float(result);
}
#else
inline double widened(float x) { return x; }
inline float add_rn(float a, float b) { return __fadd_rn(a, b); }
inline float sub_rn(float a, float b) { return __fsub_rn(a, b); }
inline float mul_rn(float a, float b) { return __fmul_rn(a, b); }
inline float fma_rn(float a, float b, float c) { return __fmaf_rn(a, b, c); }
inline float negated(float x) { return __uint_as_float(__float_as_uint(x) ^ SIGN); }
#endif

__device__ __forceinline__ u32 magnitude(float x) { return __float_as_uint(x) & ABS; }
__device__ __forceinline__ bool is_negative(float x) { return __float_as_uint(x) > SIGN; }

// A coefficient plus what is carried on of the last step's; nothing may be.
__device__ __forceinline__ float plus_residual(const Tensor& tensor, float coeff, float residual) {
    return tensor.residual ? add_rn(coeff, mul_rn(__uint_as_float(tensor.decay), residual)) : coeff;
}
__device__ __forceinline__ float with_residual(const Tensor& tensor, u64 place, float coeff) {
    return plus_residual(tensor, coeff, tensor.residual ? tensor.residual[place] : 0.0f);
}

__device__ __forceinline__ u32 warp_inclusive_sum(u32 value) {
    u32 lane = threadIdx.x % 32;
#pragma unroll
    for (u32 by = 1; by < 32; by *= 2) {
        u32 below = __shfl_up_sync(ALL_LANES, value, by);
        if (lane >= by) value += below;
    }
    return value;
}

// Returns the sum of the values of all threads before this one; `total` becomes that of all.
// `sums`: 33 words of shared memory that no thread uses until all have returned and synchronised.
__device__ __forceinline__ u32 block_exclusive_sum(u32 value, u32* sums, u32& total) {
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, n_warps = blockDim.x / 32;
    u32 inclusive = warp_inclusive_sum(value);
    if (lane == 31) sums[warp] = inclusive;
    __syncthreads();
    if (warp == 0) {
        u32 of_warp = lane < n_warps ? sums[lane] : 0;
        u32 up_to = warp_inclusive_sum(of_warp);
        __syncwarp();
        if (lane < n_warps) sums[lane] = up_to - of_warp;
        if (lane == 31) sums[32] = up_to;
    }
    __syncthreads();
    total = sums[32];
    return sums[warp] + inclusive - value;
}

// What each thread of a block has of `n` things, one after the other.
struct Run {
    u32 begin, end;
};
__device__ __forceinline__ Run run_of(u32 n) {
    u32 each = (n + blockDim.x - 1) / blockDim.x, begin = min(each * threadIdx.x, n);
    return {begin, min(begin + each, n)};
}

// The tiles that a block works on, one after the other. `starts`: of each block and of one more.
__device__ __forceinline__ Run tiles_of_block(const u32* starts) {
    return {starts[blockIdx.x], starts[blockIdx.x + 1]};
}

// What another block may be about to change; atomic where a race detector looks.
__device__ __forceinline__ u32 latest(u32* word) {
#ifdef __CUDACC__
    return *static_cast<volatile u32*>(word);
#else
    return atomicOr(word, 0u);
#endif
}

// Tells all threads of a block whether it takes the last of `n` tickets, which then begin anew. Then
// all that the others have written is visible to it. `flag`: a word of shared memory; `own`: how many
// the block takes.
__device__ __forceinline__ bool is_last(u32* ticket, u32 n, u32* flag, u32 own = 1) {
    __syncthreads();
    if (threadIdx.x == 0) {  // its fences order what the barriers join: the whole block's accesses
        __threadfence();
        *flag = atomicAdd(ticket, own) == n - own;
        if (*flag) *ticket = 0;
        __threadfence();
    }
    __syncthreads();
    return *flag != 0;
}
