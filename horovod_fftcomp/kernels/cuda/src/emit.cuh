// Bodies of sparse payloads: quantized values and positions of chosen coefficients; residuals.

// The cells of a range float, or a step and the most of them; see quantizers.py.
struct Coding {
    u32 kind, bits, shift, base, levels;
};

__device__ __forceinline__ Coding coding_of(const Tensor& tensor, u32 peak) {
    Coding coding = {tensor.kind, tensor.bits, tensor.shift, tensor.step, tensor.most};
    if (tensor.kind != RANGE) return coding;
    coding.levels = 0;
    coding.base = 1u << (23 - tensor.shift);  // never decode to a denormal
    if (peak < MIN_NORMAL_BITS) return coding;
    u32 top = min((peak + (1u << (tensor.shift - 1))) >> tensor.shift,
                  LARGEST_FINITE_BITS >> tensor.shift);
    u32 half = 1u << (tensor.bits - 1);
    if (top + 2 > coding.base + half) coding.base = top + 2 - half;
    coding.levels = top + 1 > coding.base ? top + 1 - coding.base : 0;
    return coding;
}

__device__ __forceinline__ u32 encode_value(const Coding& coding, float value) {
    u32 pattern = __float_as_uint(value), absolute = pattern & ABS;
    if (coding.kind == FLOAT32) return pattern;
    if (coding.kind == BFLOAT16) {
        u32 rounded = (absolute + 0x7fffu + (absolute >> 16 & 1)) & 0x7fff0000u;
        return ((pattern & SIGN) | min(rounded, 0x7f7f0000u)) >> 16;
    }
    if (coding.kind == STEPS) {
        double steps = widened(__uint_as_float(absolute)) / widened(__uint_as_float(coding.base));
        u32 level = steps < double(coding.levels) ? max(u32(steps), 1u) : coding.levels;
        return 2 * (level - 1) + is_negative(value);
    }
    u32 cell = (absolute + (1u << (coding.shift - 1))) >> coding.shift;
    u32 level = cell < coding.base ? 0 : min(cell - coding.base + 1, coding.levels);
    return level && pattern & SIGN ? coding.levels + level : level;
}

__device__ __forceinline__ float decode_value(const Coding& coding, u32 code) {
    if (coding.kind == FLOAT32) return __uint_as_float(code);
    if (coding.kind == BFLOAT16) return __uint_as_float(code << 16);
    if (coding.kind == STEPS) {
        float size = mul_rn(float((code >> 1) + 1), __uint_as_float(coding.base));
        return code & 1 ? negated(size) : size;
    }
    if (code == 0) return 0.0f;
    u32 sign = code > coding.levels ? SIGN : 0;
    u32 level = sign ? code - coding.levels : code;
    return __uint_as_float((coding.base + level - 1) << coding.shift | sign);
}

// Writes `bits` bits of `code` at a bit of a stream that begins as zeros, at a whole word.
__device__ __forceinline__ void put_bits(u32* stream, u64 at, u32 code, u32 bits) {
    u32 shift = u32(at % 32);
    atomicOr(&stream[at / 32], code << shift);
    if (shift + bits > 32) atomicOr(&stream[at / 32 + 1], code >> (32 - shift));
}

// Writes the codes of coefficient number `rank`; atomics cost more than shifts.
template <u32 C>
__device__ __forceinline__ void put_codes(u32* stream, u64 rank, const u32* codes, u32 bits) {
    if (C == 2 && 2 * bits <= 32) {
        put_bits(stream, 2 * rank * bits, codes[0] | codes[C - 1] << bits, 2 * bits);
    } else {
#pragma unroll
        for (u32 c = 0; c < C; c++) put_bits(stream, (C * rank + c) * bits, codes[c], bits);
    }
}

// The fifth launch: a thread for each word of the masks. `chosen` becomes the bitmap.
template <u32 C>
__global__ void __launch_bounds__(WORDS_OF_REALS / C, 2 * RESIDENT)
    emit(const Tensor* __restrict__ tensors, const u32* __restrict__ tile_tensor,
         Found* __restrict__ all_found, const u32* __restrict__ above,
         const u32* __restrict__ equal, const TileCounts* __restrict__ tiles,
         u32* __restrict__ chosen) {
    SHARED_MEMORY(memory);
    u32* sums = reinterpret_cast<u32*>(memory);  // 33
    const Tensor tensor = tensors[tile_tensor[blockIdx.x]];
    const Found* found = all_found + tile_tensor[blockIdx.x];
    if (found->peak > LARGEST_FINITE_BITS) return;
    u64 word = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    u32 own = above[word], ties = equal[word], total;
    u32 before = block_exclusive_sum(__popc(ties), sums, total);
    __syncthreads();
    for (u32 room = tiles[blockIdx.x].ties; ties && before < room; before++) {
        own |= ties & (0u - ties);
        ties &= ties - 1;
    }
    chosen[word] = own;
    u64 rank = tiles[blockIdx.x].first_rank + block_exclusive_sum(__popc(own), sums, total);
    u64 tile_begin = u64(blockIdx.x - tensor.first_tile) * (TILE / C);
    u64 begin = tile_begin + 32 * threadIdx.x;
    bool stands_for = tensor.layout == RAW && tensor.how & CHOSEN;  // codes; zeros elsewhere
    if (tensor.layout == RAW && !stands_for) {  // of a threshold that so many are above: send all
        rank = begin;
        own = begin >= tensor.n ? 0 : ALL_LANES >> (32 - u32(min(u64(32), tensor.n - begin)));
    }
    u32* positions = reinterpret_cast<u32*>(tensor.payload + tensor.positions_offset);
    if (tensor.layout == BITMAP && begin < tensor.n) positions[begin / 32] = own;
    u64 n_blocks = (tensor.n + (1ull << tensor.low_bits) - 1) >> tensor.low_bits;
    u64 offsets_bit = (tensor.k + n_blocks + 7) / 8 * 8;
    Coding coding = coding_of(tensor, found->peak);
    u32* values = reinterpret_cast<u32*>(tensor.payload + tensor.values_offset);
    for (; own; own &= own - 1, rank++) {
        u64 place = begin + __popc((own & (0u - own)) - 1);
        if (tensor.layout == OFFSETS) {
            put_bits(positions, (place >> tensor.low_bits) + rank, 1, 1);
            u32 low = u32(place) & ((1u << tensor.low_bits) - 1);
            put_bits(positions, offsets_bit + rank * tensor.low_bits, low, tensor.low_bits);
        }
        float* coeff = tensor.coeffs + C * place;
        if (C == 1 && tensor.moved && tensor.how & MASKING) tensor.moved[place] = 0.0f;
        u32 codes[C];
#pragma unroll
        for (u32 c = 0; c < C; c++) {
            u32 least = tensor.how & CHOSEN ? tensor.threshold : 0;  // draws send small ones as more
            u32 size = max(magnitude(coeff[c]), least);
            codes[c] =
                encode_value(coding, __uint_as_float(size | (__float_as_uint(coeff[c]) & SIGN)));
            float sent = decode_value(coding, codes[c]);
            if (stands_for) values[place] = __float_as_uint(sent);
            if (tensor.keep == UNSENT) coeff[c] = sub_rn(coeff[c], sent);
        }
        if (!stands_for) put_codes<C>(values, rank, codes, coding.bits);
    }
}

// Writes tensors that travel as they are: elements in float32, and their peak.
__global__ void __launch_bounds__(THREADS, RESIDENT)
    copy_raw(const Tensor* __restrict__ tensors, const u32* __restrict__ tile_tensor,
             Found* __restrict__ all_found) {
    const Tensor tensor = tensors[tile_tensor[blockIdx.x]];
    u64 begin = u64(blockIdx.x - tensor.first_tile) * TILE;
    u32 n = u32(min(u64(TILE), tensor.numel - begin)), peak = 0;
    float* out = reinterpret_cast<float*>(tensor.payload + tensor.values_offset) + begin;
    for (u32 i = threadIdx.x; i < n; i += THREADS) {
        float element = tensor.grad[begin + i];
        out[i] = element;
        peak = max(peak, magnitude(element));
    }
#pragma unroll
    for (u32 by = 16; by; by /= 2) peak = max(peak, __shfl_xor_sync(ALL_LANES, peak, by));
    if (threadIdx.x % 32 == 0) atomicMax(&all_found[tile_tensor[blockIdx.x]].peak, peak);
}
