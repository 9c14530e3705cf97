// Bodies of sparse payloads: quantized values and positions of chosen coefficients; residuals.

// The grid of a range float, or a step and the most of them; see quantizers.py. `grid`: of RANGE the
// step between magnitudes' patterns; the sign: code 0 is zero.
struct Coding {
    u32 kind, bits, grid, base, levels;
};

// Returns the header's grid of values; as fitted_grid of quantizers.py.
template <u32 C>
__device__ __forceinline__ u32 fitted_grid(u32 bits, u32 key, u32 peak) {
    long long low = key, exponent = scaling_for(peak) ? 127 - int(scaling_for(peak) >> 23) : 0;
    if (C == 2) low = (key >> 1) + (127 + 2 * exponent - bits) * (1 << 22);
    u32 parts = 2 * ((1u << (bits - 1)) - (C - 1)) - 1;
    u32 apart = low < peak ? u32(2 * (peak - low)) : 0;
    u32 step = max(apart / parts + (apart % parts != 0), 1u), widest = 1u << min(23u, 27 - bits);
    u32 coarsest = C == 2 ? 4 * widest / 5 : bits < 4 ? 1u << 24 : max(widest, 1u << 21);
    bool fits = key >= MIN_NORMAL_BITS && step <= coarsest;
    return fits ? step | (C == 2 ? SIGN : 0) : widest | SIGN;
}

// `unit`, `most`: of STEPS.
__device__ __forceinline__ Coding coding_of(u32 kind, u32 bits, u32 unit, u32 most, u32 peak,
                                            u32 grid) {
    if (kind != RANGE) return {kind, bits, 0, unit, most};
    u32 step = max(grid & ABS, 1u), zero = peak < MIN_NORMAL_BITS ? 1 : grid >> 31, top = peak;
    if (zero && step == 1u << min(23u, 27 - bits))
        top = min((peak + step / 2) / step, LARGEST_FINITE_BITS / step) * step;
    u32 room = min(top, peak) < MIN_NORMAL_BITS ? 0 : (top - MIN_NORMAL_BITS) / step + 1;
    u32 levels = min((1u << (bits - 1)) - zero, room);  // no code for a denormal
    return {kind, bits, step | zero << 31, top + step - levels * step, levels};
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
    u32 step = coding.grid & ABS, zero = coding.grid >> 31;
    int above = int(absolute - coding.base + step / 2);
    int level = above < 0 ? -int(zero) : int(u32(above) / step);
    level = min(level, int(coding.levels) - 1);
    return level < 0 ? 0 : level + zero + (pattern & SIGN ? coding.levels : 0);
}

__device__ __forceinline__ float decode_value(const Coding& coding, u32 code) {
    if (coding.kind == FLOAT32) return __uint_as_float(code);
    if (coding.kind == BFLOAT16) return __uint_as_float(code << 16);
    if (coding.kind == STEPS) {
        float size = mul_rn(float((code >> 1) + 1), __uint_as_float(coding.base));
        return code & 1 ? negated(size) : size;
    }
    u32 zero = coding.grid >> 31, sign = code >= coding.levels + zero ? SIGN : 0;
    u32 level = sign ? code - coding.levels : code;
    if (level < zero) return 0.0f;
    return __uint_as_float((coding.base + (level - zero) * (coding.grid & ABS)) | sign);
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

// Writes the chosen coefficients of a word of the bitmap. `chosen`: the word; `begin`: of its first
// coefficient; `rank`: how many are chosen before.
template <u32 C>
__device__ __forceinline__ void emit_word(const Tensor& tensor, Found* found, const Coding& coding,
                                          u32 chosen, u32 begin, u32 rank) {
    u32 inside = begin >= tensor.n ? 0 : ALL_LANES >> (32 - min(32u, u32(tensor.n) - begin));
    u32 room = u32(tensor.layout == RAW ? tensor.n : tensor.k);  // of the payload
    chosen &= inside;
    bool stands_for = tensor.layout == RAW && tensor.how & CHOSEN;  // codes; zeros elsewhere
    if (tensor.layout == RAW && !stands_for) {  // of a threshold that so many are above: send all
        rank = begin;
        chosen = inside;
    }
    if (chosen && u64(rank) + __popc(chosen) > room) found->overflow = 1;  // never, unless kernels err
    u32* positions = reinterpret_cast<u32*>(tensor.payload + tensor.positions_offset);
    if (tensor.layout == BITMAP && begin < tensor.n) positions[begin / 32] = chosen;
    u64 n_blocks = (tensor.n + (1ull << tensor.low_bits) - 1) >> tensor.low_bits;
    u64 offsets_bit = (tensor.k + n_blocks + 7) / 8 * 8;
    u32* values = reinterpret_cast<u32*>(tensor.payload + tensor.values_offset);
    for (; chosen && rank < room; chosen &= chosen - 1, rank++) {
        u32 place = begin + __popc((chosen & (0u - chosen)) - 1);
        if (tensor.layout == OFFSETS) {
            put_bits(positions, u64(place >> tensor.low_bits) + rank, 1, 1);
            u32 low = place & ((1u << tensor.low_bits) - 1);
            put_bits(positions, offsets_bit + u64(rank) * tensor.low_bits, low, tensor.low_bits);
        }
        float* coeff = tensor.coeffs + u64(C) * place;
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

// Writes the chosen coefficients of a row, a warp's work.
template <u32 C>
__device__ __forceinline__ void emit_row(const Tensor& tensor, Found* found, const Coding& coding,
                                         u32 row, const u32* __restrict__ above,
                                         const u32* __restrict__ equal, RowCounts counts) {
    u64 word = 32ull * row + threadIdx.x % 32;
    u32 own = above[word], ties = equal[word], n_ties = __popc(ties);
    for (u32 before = warp_inclusive_sum(n_ties) - n_ties; ties && before < counts.ties; before++) {
        own |= ties & (0u - ties);
        ties &= ties - 1;
    }
    u32 rank = counts.first_rank + warp_inclusive_sum(__popc(own)) - __popc(own);
    u32 begin = 32 * u32(word) - tensor.first_tile * (TILE / C);  // of a tensor, below 2^32
    emit_word<C>(tensor, found, coding, own, begin, rank);
}

// The fifth launch: values, positions and residuals of a tile.
template <u32 C>
__global__ void __launch_bounds__(WORDS_OF_REALS / C, 2 * RESIDENT)
    emit(const Tensor* __restrict__ tensors, const u32* __restrict__ tile_tensor,
         Found* all_found, const u32* __restrict__ above,
         const u32* __restrict__ equal, const RowCounts* __restrict__ rows) {
    const Tensor tensor = tensors[tile_tensor[blockIdx.x]];
    Found* found = all_found + tile_tensor[blockIdx.x];
    u32 row = ROWS_OF_REALS / C * blockIdx.x + threadIdx.x / 32, peak = found->peak;
    if (peak > LARGEST_FINITE_BITS) return;
    u32 key = tensor.layout == ALL ? 0 : found->prefix;
    if (tensor.threshold) key = tensor.threshold - 1;
    u32 grid = tensor.kind == RANGE ? fitted_grid<C>(tensor.bits, key, peak) : 0;
    if (threadIdx.x == 0 && blockIdx.x == tensor.first_tile) found->grid = grid;
    const Coding coding =
        coding_of(tensor.kind, tensor.bits, tensor.step, tensor.most, peak, grid);
    emit_row<C>(tensor, found, coding, row, above, equal, rows[row]);
}

// Writes tensors that travel as they are: elements in float32, and their peak.
__global__ void __launch_bounds__(THREADS, RESIDENT)
    copy_raw(const Tensor* __restrict__ tensors, const u32* __restrict__ tile_tensor,
             Found* all_found) {
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
