// Dense methods, which send every element in a few bits: see codec/methods, and
// wire/radix.py for the packing. Sums are in the CPU's order: see `lane_sums` and `_sums_of_rows`.

enum Method : u32 { MEANS, MAGNITUDE, VOTES, CLIPPED, OCTAVES, PEAKS, NORMS };

// How one tensor's elements are sent, beside its row in the other tables.
struct Elements {
    double clip;      // CLIPPED: to so many standard deviations; 0: never
    u64 length;       // elements of a row, which has sums of its own
    u64 first_part;   // of the sums of parts
    u32 first_row, n_rows;
    u32 method;
    u32 top, radix, digits;  // the largest number; digits of a word
    u32 bucket_bits;         // 2^this elements have a scale of their own; 12: all have one
    u32 unused;
};
static_assert(sizeof(Elements) == 56, "structs.py describes elements with the same layout");

// Sums of the elements that a row has in a tile: of those from 0 up and those below, or of all and
// of their squares.
struct Part {
    double first, second;
    u32 count;  // how many are below 0, or the largest magnitude
    u32 unused;
};
static_assert(sizeof(Part) == 24, "tables.py knows the size");

constexpr u32 WORD_THREADS = 128;  // of a block that reads bits: a word for each
constexpr u32 AT_ONCE = 8;         // payloads that a thread sums at a time
constexpr u32 ONE_BITS = 0x3f800000u;

// As in common.cuh, beyond what a flag may flush to zero.
#ifdef __CUDACC__
ROUNDED_ONCE(div_rn, "div.rn.f32")
__device__ __forceinline__ float narrowed(double x) {
    float result;
    asm("cvt.rn.f32.f64 %0, %1;" : "=f"(result) : "d"(x));
    return result;
}
__device__ __forceinline__ u32 truncated(float x) {
    u32 result;
    asm("cvt.rzi.u32.f32 %0, %1;" : "=r"(result) : "f"(x));
    return result;
}
#else
inline float div_rn(float a, float b) { return a / b; }
inline float narrowed(double x) { return float(x); }
inline u32 truncated(float x) { return u32(x); }
#endif

// What is to be sent of each element; `held`: coefficients that are kept have it already.
struct Wanted {
    const float* first;
    const float* second;  // to be added; null: nothing
    float decay;

    __device__ __forceinline__ Wanted(const Tensor& tensor, u32 held) {
        bool summed = held && tensor.keep;
        first = summed ? tensor.coeffs : tensor.grad;
        second = summed ? nullptr : tensor.residual;
        decay = __uint_as_float(tensor.decay);
    }
    __device__ __forceinline__ float operator[](u64 i) const {
        return second ? add_rn(first[i], mul_rn(decay, second[i])) : first[i];
    }
};

// Writes gradient plus residual where coefficients are kept, for whoever measures them.
__global__ void __launch_bounds__(THREADS)
    add_elements(const Tensor* __restrict__ tensors, const u32* __restrict__ tile_tensor) {
    const Tensor tensor = tensors[tile_tensor[blockIdx.x]];
    if (!tensor.keep) return;
    u64 begin = u64(blockIdx.x - tensor.first_tile) * TILE;
    u64 end = min(begin + TILE, tensor.numel);
    const Wanted wanted(tensor, 0);
    for (u64 i = begin + threadIdx.x; i < end; i += THREADS) tensor.coeffs[i] = wanted[i];
}

// One warp's sums of the elements from `begin` on: 64 partial sums, two in each lane.
template <bool MOMENTS, class Values>
__device__ __forceinline__ Part sums_between(const Values& values, u64 begin, u64 end) {
    double first[2] = {0, 0}, second[2] = {0, 0};
    u32 count = 0;
#pragma unroll 4
    for (u64 i = begin + threadIdx.x % 32; i < end; i += 64) {
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            u64 at = i + 32 * half;
            float x = at < end ? values[at] : 0.0f;
            double wide = widened(x);
            bool negative = is_negative(x);
            first[half] += MOMENTS || !negative ? wide : 0;
            second[half] += MOMENTS ? wide * wide : negative ? wide : 0;
            count = MOMENTS ? max(count, magnitude(x)) : count + negative;
        }
    }
    Part part = {first[0] + first[1], second[0] + second[1], count, 0};
#pragma unroll
    for (u32 by = 16; by; by /= 2) {
        part.first += __shfl_xor_sync(ALL_LANES, part.first, by);
        part.second += __shfl_xor_sync(ALL_LANES, part.second, by);
        u32 other = __shfl_xor_sync(ALL_LANES, part.count, by);
        part.count = MOMENTS ? max(part.count, other) : part.count + other;
    }
    return part;
}

// A warp for each tile: the sums of what each row has in it.
template <bool MOMENTS>
__global__ void __launch_bounds__(32)
    sum_parts(const Tensor* __restrict__ tensors, const u32* __restrict__ tile_tensor,
              const Elements* __restrict__ elements, u32 held, Part* parts) {
    const Tensor tensor = tensors[tile_tensor[blockIdx.x]];
    const Elements how = elements[tile_tensor[blockIdx.x]];
    u64 tile = blockIdx.x - tensor.first_tile, begin = tile * TILE;
    u64 end = min(begin + TILE, tensor.numel), stop;
    const Wanted wanted(tensor, held);
    for (u64 row = begin / how.length; begin < end; row++, begin = stop) {
        stop = min(end, (row + 1) * how.length);
        Part part = sums_between<MOMENTS>(wanted, begin, stop);
        if (threadIdx.x == 0) parts[how.first_part + tile + row] = part;
    }
}

// The sums of a row's parts, by one warp: in 64 partial sums, then these from first to last.
__device__ __forceinline__ Part row_sums(const Part* parts, u32 n, bool largest) {
    double first[2] = {0, 0}, second[2] = {0, 0};
    u32 count = 0;
#pragma unroll 2
    for (u32 i = threadIdx.x; i < n; i += 64) {
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            if (i + 32 * half >= n) continue;
            const Part part = parts[i + 32 * half];
            first[half] += part.first;
            second[half] += part.second;
            count = largest ? max(count, part.count) : count + part.count;
        }
    }
    Part sum = {0, 0, 0, 0};
    for (u32 half = 0; half < 2; half++)
        for (u32 lane = 0; lane < min(32u, n); lane++) {
            sum.first += __shfl_sync(ALL_LANES, half ? first[1] : first[0], lane);
            sum.second += __shfl_sync(ALL_LANES, half ? second[1] : second[0], lane);
        }
#pragma unroll
    for (u32 by = 16; by; by /= 2) {
        u32 other = __shfl_xor_sync(ALL_LANES, count, by);
        count = largest ? max(count, other) : count + other;
    }
    sum.count = count;
    return sum;
}

// The one scale of values with these moments; see `TernGrad`.
__device__ __forceinline__ float clipped_scale(const Part& sum, u64 n, double clip) {
    float peak = __uint_as_float(sum.count);
    double mean = sum.first / double(n), square = sum.second / double(n);
    double variance = square - mean * mean;
    if (!(clip > 0 && variance > 1e-12 * square)) return peak;
    double most = clip * sqrt(variance), wide = widened(peak);
    float scale = narrowed(most < wide ? most : wide);
    return magnitude(scale) ? scale : peak;
}

// A warp for each row: its means, or the tensor's scale, which is the peak from then on. Not finite
// if a value is not.
__global__ void __launch_bounds__(32)
    settle_rows(const Tensor* __restrict__ tensors, const u32* __restrict__ row_tensor,
                const Elements* __restrict__ elements, const Part* __restrict__ parts,
                Found* all_found) {
    u32 number = row_tensor[blockIdx.x];
    const Tensor tensor = tensors[number];
    const Elements how = elements[number];
    u64 row = blockIdx.x - how.first_row, begin = row * how.length;
    u64 tile = begin / TILE, last = (begin + how.length - 1) / TILE;
    const Part* own = parts + how.first_part + tile + row;
    Part sum = row_sums(own, u32(last - tile + 1), how.method >= CLIPPED);
    if (threadIdx.x) return;
    bool finite = sum.first - sum.first == 0 && sum.second - sum.second == 0;
    u32 scale = NAN_BITS;
    if (how.method == MEANS && finite) {
        u64 above = how.length - sum.count;
        float up = narrowed(sum.first / double(max(above, u64(1))));
        float down = narrowed(sum.second / double(max(sum.count, 1u)));
        float* sides = reinterpret_cast<float*>(tensor.payload + tensor.values_offset) + 2 * row;
        sides[0] = up;
        sides[1] = down;
        scale = max(magnitude(up), magnitude(down));
    } else if (how.method == MAGNITUDE && finite) {
        scale = __float_as_uint(narrowed((sum.first - sum.second) / double(tensor.numel)));
    } else if (how.method == VOTES && finite) {
        scale = sum.first != 0 || sum.second != 0 ? ONE_BITS : 0;
    } else if (how.method == CLIPPED && sum.count <= LARGEST_FINITE_BITS) {
        scale = __float_as_uint(clipped_scale(sum, tensor.numel, how.clip));
    } else if (how.method == OCTAVES && sum.count <= LARGEST_FINITE_BITS) {
        scale = max(1u, min((sum.count + (MIN_NORMAL_BITS - 1)) >> 23, 254u)) << 23;
    }
    atomicMax(&all_found[number].peak, scale);
}

// Which rows the elements of a tile belong to.
struct Rows {
    u64 first, rest;  // the first one, and how many elements belong to it
    u32 length;       // of the others

    __device__ __forceinline__ Rows(const Elements& how, u64 begin) {
        first = begin / how.length;
        rest = (first + 1) * how.length - begin;
        length = u32(min(how.length, u64(TILE)));  // elements of a tile lie no farther apart
    }
    // Counted from the first.
    __device__ __forceinline__ u32 operator[](u32 i) const {
        return i < rest ? 0 : 1 + (i - u32(rest)) / length;
    }
};

// What a row's values from 0 up and those below stand for.
__device__ __forceinline__ float2 sides_of(const Elements& how, const u8* body, u64 row, u32 scale) {
    float one = __uint_as_float(scale);
    if (how.method != MEANS) return make_float2(one, negated(one));
    return reinterpret_cast<const float2*>(body)[row];
}

// The bits of a tile, a thread for each word; takes off what they stand for where the rest is kept.
__global__ void __launch_bounds__(WORD_THREADS)
    write_signs(const Tensor* __restrict__ tensors, const u32* __restrict__ tile_tensor,
                const Elements* __restrict__ elements, u32 held,
                const Found* __restrict__ all_found) {
    u32 number = tile_tensor[blockIdx.x], peak = all_found[number].peak;
    const Tensor tensor = tensors[number];
    const Elements how = elements[number];
    u64 tile = blockIdx.x - tensor.first_tile, begin = tile * TILE;
    u32 n = u32(min(u64(TILE), tensor.numel - begin)), width = (n + 31) / 32;
    if (peak > LARGEST_FINITE_BITS || threadIdx.x >= width) return;
    u8* body = tensor.payload + tensor.values_offset;
    const Rows rows(how, begin);
    const Wanted wanted(tensor, held);
    bool zeros_down = how.method == VOTES && tensor.key;  // see `SignMethod.key_at`
    u32 word = 0;
    for (u32 from = 0; from < 32; from += 8) {
        float x[8];  // all are loaded before anything is stored, which might be in their place
#pragma unroll
        for (u32 b = 0; b < 8; b++) {
            u32 i = (from + b) * width + threadIdx.x;
            x[b] = i < n ? wanted[begin + i] : 0.0f;
        }
#pragma unroll
        for (u32 b = 0; b < 8; b++) {
            u32 i = (from + b) * width + threadIdx.x;
            bool negative = is_negative(x[b]) || (zeros_down && i < n && !magnitude(x[b]));
            word |= u32(negative) << (from + b);
            if (i >= n || !tensor.keep) continue;
            float2 both = sides_of(how, body, rows.first + rows[i], peak);
            float sent = negative ? both.y : both.x;
            tensor.coeffs[begin + i] = tensor.keep == EVERYTHING ? x[b] : sub_rn(x[b], sent);
        }
    }
    u32* words = reinterpret_cast<u32*>(body + (how.method == MEANS ? 8ull * how.n_rows : 0));
    words[tile * WORD_THREADS + threadIdx.x] = word;
}

// The payloads of some ranks, one after another, that a thread sums at a time.
struct Batch {
    u32 from, n;
    u32 arrived;  // which of them are sound so far, a bit for each
    const u8* bodies[AT_ONCE];
    u32 scales[AT_ONCE], words[AT_ONCE];
    Payload* payloads;  // the first of them; the others lie `stride` apart
    u32 stride;

    __device__ __forceinline__ Batch(const Messages& messages, const Arriving& tensor, u32 number,
                                     Payload* all, u32 rank) {
        from = rank;
        n = min(AT_ONCE, messages.n_ranks - rank);
        arrived = 0;
        stride = messages.n_tensors;
        payloads = all + rank * stride + number;
#pragma unroll
        for (u32 r = 0; r < AT_ONCE; r++) {
            if (r >= n) break;
            volatile Payload* payload = payloads + r * stride;
            bodies[r] = payload_of(messages, tensor, rank + r) + tensor.values_offset;
            scales[r] = payload->scale;
            arrived |= u32(payload->status == SOUND) << r;
        }
    }
    __device__ __forceinline__ void check(u32 r, bool fits) {
        if (fits || !(arrived >> r & 1)) return;
        note_corrupt(payloads + r * stride);
        arrived ^= 1u << r;
    }
    // Stores a sum; NaN where a payload is not sound. False if it is not finite.
    __device__ __forceinline__ bool store(float* place, float sum) const {
        if (arrived != (1u << n) - 1) sum = __uint_as_float(NAN_BITS);
        *place = sum;
        return magnitude(sum) <= LARGEST_FINITE_BITS;
    }
};

// The sum of bits of all ranks; a thread for each word.
__global__ void __launch_bounds__(WORD_THREADS)
    sum_signs(const Messages* __restrict__ messages_at, const Arriving* __restrict__ tensors,
              Payload* payloads, const u32* __restrict__ tile_tensor,
              const Elements* __restrict__ elements, u32* not_finite) {
    const Messages messages = *messages_at;
    u32 number = tile_tensor[blockIdx.x];
    const Arriving tensor = tensors[number];
    const Elements how = elements[number];
    u64 tile = blockIdx.x - tensor.first_tile, begin = tile * TILE;
    u32 n = u32(min(u64(TILE), tensor.numel - begin)), width = (n + 31) / 32;
    if (threadIdx.x >= width) return;
    const Rows rows(how, begin);
    u64 words = how.method == MEANS ? 2ull * how.n_rows : 0;
    bool finite = true;
    for (u32 rank = 0; rank < messages.n_ranks; rank += AT_ONCE) {
        Batch batch(messages, tensor, number, payloads, rank);
#pragma unroll
        for (u32 r = 0; r < AT_ONCE; r++) {
            if (r >= batch.n) break;
            const u32* body = reinterpret_cast<const u32*>(batch.bodies[r]);
            batch.words[r] = body[words + tile * WORD_THREADS + threadIdx.x];
        }
        for (u32 i = threadIdx.x; i < n; i += width) {
            float sum = rank ? tensor.sum[begin + i] : 0.0f;
            u64 row = rows.first + rows[i];
#pragma unroll
            for (u32 r = 0; r < AT_ONCE; r++) {
                if (r >= batch.n) break;
                float2 both = sides_of(how, batch.bodies[r], row, batch.scales[r]);
                u32 scale = batch.scales[r];
                bool is_vote = how.method != VOTES || scale == 0 || scale == ONE_BITS;
                batch.check(r, is_vote && max(magnitude(both.x), magnitude(both.y)) <= scale);
                sum = add_rn(sum, batch.words[r] & 1 ? both.y : both.x);
                batch.words[r] >>= 1;
            }
            if (!batch.store(tensor.sum + begin + i, sum)) finite = false;
        }
    }
    if (!finite) atomicOr(&not_finite[number], 1u);
}

// The numbers that a group of 4096 is rounded by; see `random_words` of wire/counter_rng.py.
struct Draws {
    u32 low, high;

    __device__ __forceinline__ Draws(u64 key, u64 group) {
        u64 z = key + group + 0x9E3779B97F4A7C15ull;
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
        z = (z ^ z >> 27) * 0x94D049BB133111EBull;
        z ^= z >> 31;
        low = u32(z);
        high = u32(z >> 32);
    }
    __device__ __forceinline__ u32 operator[](u32 i) const {
        u32 x = i + low;
        x = ((x ^ x >> 16) * 0x7FEB352Du) ^ high;
        x = (x ^ x >> 15) * 0x846CA68Bu;
        return x ^ x >> 16;
    }
};

// From [0, 1).
__device__ __forceinline__ float uniform(u32 random) {
    return mul_rn(float(random >> 8), 0x1p-24f);
}

// The number of the neighbour on the grid that a draw chooses; comparisons by patterns, which
// nothing flushes. Where `top` is odd, 0 is no point of the grid.
__device__ __forceinline__ u32 level_of(float x, float scale, u32 top, float draw) {
    u32 middle = top / 2, odd = top % 2;
    bool nothing = __float_as_uint(scale) == 0;
    if (nothing && !odd) return middle;
    u32 ratio = nothing ? 0 : min(magnitude(div_rn(x, scale)), ONE_BITS);
    float half = mul_rn(float(top), 0.5f), place = mul_rn(__uint_as_float(ratio), half);
    if (odd) place = is_negative(x) ? sub_rn(half, place) : add_rn(half, place);
    u32 level = truncated(place);
    level += __float_as_uint(draw) < __float_as_uint(sub_rn(place, float(level)));
    if (odd) return min(level, top);
    return is_negative(x) ? middle - level : middle + level;
}

// The share of the scale that a number stands for.
__device__ __forceinline__ float share_of(u32 number, u32 top) {
    return div_rn(float(int(2 * number) - int(top)), float(top));
}

// The powers of two below the scale, itself one; see codec/methods/natural.py.
struct Octaves {
    u32 base, last;  // the biased exponent of the lowest; the level of the highest

    __device__ __forceinline__ explicit Octaves(u32 scale) {
        u32 top = scale >> 23;
        base = top > 127 ? top - 126 : 1;
        last = top - base + 1;
    }
    __device__ __forceinline__ u32 code_of(float x, u32 random) const {
        u32 pattern = magnitude(x), level;
        if (pattern < base << 23) {
            float share = div_rn(__uint_as_float(pattern), __uint_as_float(base << 23));
            level = __float_as_uint(uniform(random)) < __float_as_uint(share);
        } else {
            level = min(((pattern + (random >> 9)) >> 23) - (base - 1), last);
        }
        return is_negative(x) && level ? level + 127 : level;
    }
    __device__ __forceinline__ float value_of(u32 code) const {
        u32 level = code > 127 ? code - 127 : code;
        return __uint_as_float(level ? (level + base - 1) << 23 | (code > 127 ? SIGN : 0) : 0);
    }
    __device__ __forceinline__ bool fits(u32 scale, u32 code) const {
        bool is_power = scale >= MIN_NORMAL_BITS && !(scale & (MIN_NORMAL_BITS - 1));
        return is_power && code <= 254 && (code > 127 ? code - 127 : code) <= last;
    }
};

// One warp's scale of a bucket, 0 where it would be below 2^-126; not finite if a value is not.
__device__ __forceinline__ u32 scale_of(const float* values, u32 begin, u32 end, bool norm) {
    Part sum = sums_between<true>(values, begin, end);
    u32 scale = sum.count;
    if (norm && scale <= LARGEST_FINITE_BITS) {
        double most = widened(__uint_as_float(LARGEST_FINITE_BITS)), root = sqrt(sum.second);
        scale = __float_as_uint(narrowed(root < most ? root : most));
    }
    return scale < MIN_NORMAL_BITS ? 0 : scale;
}

// The words of a tile, after the scales of its buckets where it has them.
__global__ void __launch_bounds__(THREADS, RESIDENT)
    write_levels(const Tensor* __restrict__ tensors, const u32* __restrict__ tile_tensor,
                 const Elements* __restrict__ elements, u32 held, Found* all_found) {
    SHARED_MEMORY(memory);
    float* values = reinterpret_cast<float*>(memory);  // TILE
    u32* scales = reinterpret_cast<u32*>(values + TILE);  // 64, then the largest
    u32 number = tile_tensor[blockIdx.x];
    Found* found = all_found + number;
    const Tensor tensor = tensors[number];
    const Elements how = elements[number];
    u64 tile = blockIdx.x - tensor.first_tile, begin = tile * TILE;
    u32 n = u32(min(u64(TILE), tensor.numel - begin)), bucket = 1u << how.bucket_bits;
    u8* body = tensor.payload + tensor.values_offset;
    if (how.method < PEAKS && found->peak > LARGEST_FINITE_BITS) return;
    const Wanted wanted(tensor, held);
#pragma unroll 8
    for (u32 i = threadIdx.x; i < TILE; i += THREADS) values[i] = i < n ? wanted[begin + i] : 0.0f;
    if (threadIdx.x == 0) {
        scales[0] = found->peak;
        scales[64] = 0;
    }
    __syncthreads();
    if (how.method >= PEAKS) {
        u32* sent = reinterpret_cast<u32*>(body) + (begin >> how.bucket_bits);
        for (u32 at = threadIdx.x / 32; at << how.bucket_bits < n; at += THREADS / 32) {
            u32 from = at << how.bucket_bits, end = min(from + bucket, n);
            u32 scale = scale_of(values, from, end, how.method == NORMS);
            if (threadIdx.x % 32) continue;
            scales[at] = sent[at] = scale;
            atomicMax(&scales[64], scale > LARGEST_FINITE_BITS ? NAN_BITS : scale);
        }
        body += 4 * ((tensor.numel + bucket - 1) >> how.bucket_bits);
        __syncthreads();
        if (threadIdx.x == 0) atomicMax(&found->peak, scales[64]);
    }
    u32 width = (n + how.digits - 1) / how.digits, most = (TILE + how.digits - 1) / how.digits;
    u32* words = reinterpret_cast<u32*>(body) + tile * most;
    const Draws draws(tensor.key, tile);
    const Octaves octaves(scales[0]);
    for (u32 j = threadIdx.x; j < width; j += THREADS) {
        u32 word = 0;
        for (u32 b = how.digits; b-- > 0;) {
            u32 i = b * width + j, level = 0;
            if (i < n) {
                float x = values[i], sent;
                if (how.method == OCTAVES) {
                    level = octaves.code_of(x, draws[i]);
                    sent = octaves.value_of(level);
                } else {
                    float scale = __uint_as_float(scales[i >> how.bucket_bits]);
                    level = level_of(x, scale, how.top, uniform(draws[i]));
                    sent = mul_rn(scale, share_of(level, how.top));
                }
                if (tensor.keep) tensor.coeffs[begin + i] = sub_rn(x, sent);
            }
            word = word * how.radix + level;
        }
        words[j] = word;
    }
}

// The sum of levels of all ranks; a thread for each word.
__global__ void __launch_bounds__(THREADS, 3)
    sum_levels(const Messages* __restrict__ messages_at, const Arriving* __restrict__ tensors,
               Payload* payloads, const u32* __restrict__ tile_tensor,
               const Elements* __restrict__ elements, u32* not_finite) {
    const Messages messages = *messages_at;
    SHARED_MEMORY(memory);
    float* shares = reinterpret_cast<float*>(memory);  // top + 1
    u32 number = tile_tensor[blockIdx.x];
    const Arriving tensor = tensors[number];
    const Elements how = elements[number];
    bool of_octaves = how.method == OCTAVES;
    for (u32 i = threadIdx.x; !of_octaves && i <= how.top; i += THREADS)
        shares[i] = share_of(i, how.top);
    __syncthreads();
    u64 tile = blockIdx.x - tensor.first_tile, begin = tile * TILE;
    u32 n = u32(min(u64(TILE), tensor.numel - begin)), reciprocal = ALL_LANES / how.radix;
    u32 width = (n + how.digits - 1) / how.digits, most = (TILE + how.digits - 1) / how.digits;
    u64 n_scales = how.method < PEAKS ? 0 : ((tensor.numel - 1) >> how.bucket_bits) + 1;
    bool finite = true;
    for (u32 j = threadIdx.x; j < width; j += THREADS)
        for (u32 rank = 0; rank < messages.n_ranks; rank += AT_ONCE) {
            Batch batch(messages, tensor, number, payloads, rank);
#pragma unroll
            for (u32 r = 0; r < AT_ONCE; r++) {
                if (r >= batch.n) break;
                const u32* body = reinterpret_cast<const u32*>(batch.bodies[r]);
                batch.words[r] = body[n_scales + tile * most + j];
            }
            for (u32 i = j, b = 1; i < n && b <= how.digits; i += width, b++) {
                float sum = rank ? tensor.sum[begin + i] : 0.0f;
#pragma unroll
                for (u32 r = 0; r < AT_ONCE; r++) {
                    if (r >= batch.n) break;
                    u32 word = batch.words[r], scale = batch.scales[r];
                    u32 rest = b < how.digits ? u32(u64(word) * reciprocal >> 32) : 0;
                    u32 level = word - rest * how.radix;
                    if (b < how.digits && level >= how.radix) {  // the quotient is one too small
                        level -= how.radix;
                        rest++;
                    }
                    batch.words[r] = rest;
                    if (n_scales)
                        scale = reinterpret_cast<const u32*>(
                            batch.bodies[r])[(begin + i) >> how.bucket_bits];
                    if (of_octaves) {
                        const Octaves octaves(scale);
                        batch.check(r, octaves.fits(scale, level));
                        sum = add_rn(sum, octaves.value_of(level));
                        continue;
                    }
                    bool fits = scale <= batch.scales[r] || scale == SIGN;  // which is -0
                    batch.check(r, fits && level <= how.top);
                    float share = shares[min(level, how.top)];
                    sum = add_rn(sum, mul_rn(__uint_as_float(scale), share));
                }
                if (!batch.store(tensor.sum + begin + i, sum)) finite = false;
            }
        }
    if (!finite) atomicOr(&not_finite[number], 1u);
}
