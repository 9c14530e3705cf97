// Entropy-coded levels: see codec/methods/coded_qsgd.py, which defines the bytes, and
// wire/coded_levels.py. A block for each chunk, whose bytes depend on no other chunk's.

constexpr u32 CODED = 2 * CHUNK;  // values of a chunk: two for each symbol
constexpr u32 GRIDS = 93, BINS = 64, DIGITS = 15, MIDDLE = 7;
constexpr u32 MOST_BUCKETS = CODED / 64, CHUNK_HEAD = 2;  // buckets of a chunk; words before codes

// How one tensor's levels are coded, beside its row in the other tables.
struct LevelsForm {
    const int* costs;      // of a value in each bin, on each grid: [BINS][GRIDS]
    const float* factors;  // of each grid: levels to the scale; their inverses; powers of 2^(-1/8)
    const u64* pushes;     // of both tables, as Coded has them
    const u32* slots;
    u32 bucket_bits, first_wide;  // the first grid with the second table
    u32 narrow, wide;             // the highest level of either table
    u32 first_chunk, n_chunks;
    u32 chunk_words, room;  // of all chunks but the last: words, and those for levels
    int limit;              // of the mean cost
    u32 last_room;
    int last_limit;
    u32 unused;
};
static_assert(sizeof(LevelsForm) == 80, "structs.py describes forms with the same layout");

// One chunk of a tensor.
struct LevelsChunk {
    u64 begin, first_word;  // of its values; in a body
    u32 n, width, n_buckets;
    u32 room, states;  // where the states begin
    int limit;

    __device__ __forceinline__ LevelsChunk(const LevelsForm& form, u64 numel) {
        u32 chunk = blockIdx.x - form.first_chunk;
        bool last = chunk + 1 == form.n_chunks;
        begin = u64(chunk) * CODED;
        first_word = u64(chunk) * form.chunk_words;
        n = u32(min(u64(CODED), numel - begin));
        width = (n + 1) / 2;
        n_buckets = ((n - 1) >> form.bucket_bits) + 1;
        room = last ? form.last_room : form.room;
        limit = last ? form.last_limit : form.limit;
        states = CHUNK_HEAD + (n_buckets + 3) / 4;
    }
};

__device__ __forceinline__ float highest_of(const LevelsForm& form, u32 table) {
    return float(table ? form.wide : form.narrow);
}

// The scale or step of a bucket, 0 where it would be below 2^-126.
__device__ __forceinline__ float step_of(const LevelsForm& form, float unit, u32 code) {
    u32 whole = magnitude(mul_rn(unit, form.factors[2 * GRIDS + code % 8])), less = code / 8 << 23;
    return __uint_as_float(whole >= less + MIN_NORMAL_BITS ? whole - less : 0);
}

__device__ __forceinline__ float ratio_of(float x, float scale) {
    return __float_as_uint(scale) ? div_rn(__uint_as_float(magnitude(x)), scale) : 0.0f;
}

// What encoding a chunk keeps in shared memory.
struct LevelsBeside {
    float values[CODED];
    u32 symbols[CHUNK / 4];
    u32 words[MOST_WORDS];  // from the end
    u32 maxima[MOST_BUCKETS];
    float scales[MOST_BUCKETS];
    u8 codes[MOST_BUCKETS];
    int counts[BINS];
    u64 states[LANES];
    u32 peak, chosen, used, unused;
};
static_assert(sizeof(LevelsBeside) == 44480, "structs.py has its size");

// Scales of buckets and the bins of all values, from the values; false if one is not finite.
__device__ __forceinline__ bool find_scales(const LevelsForm& form, const LevelsChunk& chunk,
                                            LevelsBeside& beside) {
    u32 lane = threadIdx.x % 32, bits = form.bucket_bits;
    if (threadIdx.x < BINS) beside.counts[threadIdx.x] = threadIdx.x ? 0 : chunk.n % 2;
    if (threadIdx.x == 0) beside.peak = beside.chosen = 0;
    __syncthreads();
    for (u32 b = threadIdx.x / 32; b < chunk.n_buckets; b += WARPS) {
        u32 end = min((b + 1) << bits, chunk.n), most = 0;
        for (u32 i = (b << bits) + lane; i < end; i += 32)
            most = max(most, magnitude(beside.values[i]));
#pragma unroll
        for (u32 by = 16; by; by /= 2) most = max(most, __shfl_xor_sync(ALL_LANES, most, by));
        if (lane) continue;
        beside.maxima[b] = most;
        atomicMax(&beside.peak, most);
    }
    __syncthreads();
    if (beside.peak > LARGEST_FINITE_BITS) return false;
    float peak = __uint_as_float(beside.peak);
    if (threadIdx.x < chunk.n_buckets) {
        u32 most = beside.maxima[threadIdx.x], code = most >= MIN_NORMAL_BITS ? 0 : 255;
        for (u32 k = 0; k < 8; k++) {
            u32 top = __float_as_uint(mul_rn(peak, form.factors[2 * GRIDS + k]));
            if (top >= most) code = max(code, (top - most) / MIN_NORMAL_BITS * 8 + k);
        }
        beside.codes[threadIdx.x] = u8(min(code, 255u));
        beside.scales[threadIdx.x] = step_of(form, peak, min(code, 255u));
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < chunk.n; i += THREADS) {
        float ratio = ratio_of(beside.values[i], beside.scales[i >> bits]);
        atomicAdd(&beside.counts[min(truncated(mul_rn(ratio, float(BINS))), BINS - 1)], 1);
    }
    return true;
}

// The finest grid below `end` with which levels should fit, plus 1; 0: none. A thread for each.
__device__ __forceinline__ u32 fitting_grid(const LevelsForm& form, const LevelsChunk& chunk,
                                            LevelsBeside& beside, u32 end) {
    u32 grid = threadIdx.x;
    __syncthreads();
    if (grid < end) {
        int cost = 0;
#pragma unroll 4
        for (u32 b = 0; b < BINS; b++) cost += form.costs[b * GRIDS + grid] * beside.counts[b];
        float unit = mul_rn(__uint_as_float(beside.peak), form.factors[GRIDS + grid]);
        float top = mul_rn(unit, highest_of(form, grid >= form.first_wide));
        bool exists = magnitude(unit) >= MIN_NORMAL_BITS && magnitude(top) <= LARGEST_FINITE_BITS;
        if (cost <= chunk.limit && exists) atomicMax(&beside.chosen, grid + 1);
    }
    __syncthreads();
    u32 found = beside.chosen;
    __syncthreads();
    if (threadIdx.x == 0) beside.chosen = 0;
    return found;
}

// Draws the levels on a grid, writes them as symbols and these in the entropy code.
__device__ __forceinline__ void encode_levels(const LevelsForm& form, const LevelsChunk& chunk,
                                              LevelsBeside& beside, u64 key, u32 grid) {
    const Draws first(key, chunk.begin / TILE), second(key, chunk.begin / TILE + 1);
    for (u32 j = threadIdx.x; j < chunk.width; j += THREADS) {
        u32 digits[2] = {MIDDLE, MIDDLE};
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            u32 i = j + half * chunk.width;
            if (i >= chunk.n) continue;
            float x = beside.values[i], scale = beside.scales[i >> form.bucket_bits];
            float place = mul_rn(ratio_of(x, scale), form.factors[grid]);
            u32 level = truncated(place), draw = i < TILE ? first[i] : second[i - TILE];
            float above = sub_rn(place, float(level));
            level += __float_as_uint(uniform(draw)) < __float_as_uint(above);
            digits[half] = is_negative(x) ? MIDDLE - level : MIDDLE + level;
        }
        reinterpret_cast<u8*>(beside.symbols)[j] = u8(digits[0] + DIGITS * digits[1]);
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        u64 state = LOWEST_STATE;
        const u64* pushes = form.pushes + 512 * (grid >= form.first_wide);
        u32 length = threadIdx.x < LANES ? chunk.width : 0;
        u32 free = encode_group(pushes, beside.symbols, length, beside.words, state);
        if (threadIdx.x < LANES) beside.states[threadIdx.x] = state;
        if (threadIdx.x == 0) beside.used = MOST_WORDS - free;
    }
    __syncthreads();
}

__device__ __forceinline__ float level_at(const u8* symbols, u32 i, u32 width) {
    u32 digit = i < width ? symbols[i] % DIGITS : symbols[i - width] / DIGITS;
    return float(int(digit) - int(MIDDLE));
}

// Writes the chunks of payloads; takes off what they stand for where the rest is kept.
__global__ void __launch_bounds__(THREADS, 3)
    write_coded(const Tensor* __restrict__ tensors, const u32* __restrict__ chunk_tensor,
                const LevelsForm* __restrict__ forms, u32 held, Found* all_found) {
    SHARED_MEMORY(memory);
    LevelsBeside& beside = *reinterpret_cast<LevelsBeside*>(memory);
    u32 number = chunk_tensor[blockIdx.x];
    const Tensor tensor = tensors[number];
    const LevelsForm form = forms[number];
    const LevelsChunk chunk(form, tensor.numel);
    const Wanted wanted(tensor, held);
#pragma unroll 4
    for (u32 i = threadIdx.x; i < chunk.n; i += THREADS) beside.values[i] = wanted[chunk.begin + i];
    if (!find_scales(form, chunk, beside)) {
        if (threadIdx.x == 0) atomicMax(&all_found[number].peak, NAN_BITS);
        return;
    }
    u32 grid = GRIDS + 1;  // here the number of a grid plus 1
    do {
        grid = fitting_grid(form, chunk, beside, grid - 1);
        if (grid) encode_levels(form, chunk, beside, tensor.key, grid - 1);
    } while (grid && beside.used > chunk.room);
    float unit = grid ? mul_rn(__uint_as_float(beside.peak), form.factors[GRIDS + grid - 1]) : 0.0f;
    for (u32 i = threadIdx.x; tensor.keep && i < chunk.n; i += THREADS) {
        float step = grid ? step_of(form, unit, beside.codes[i >> form.bucket_bits]) : 0.0f;
        float level = grid ? level_at(reinterpret_cast<u8*>(beside.symbols), i, chunk.width) : 0.0f;
        tensor.coeffs[chunk.begin + i] = sub_rn(beside.values[i], mul_rn(step, level));
    }
    if (!grid) return;
    u32* body = reinterpret_cast<u32*>(tensor.payload + tensor.values_offset) + chunk.first_word;
    u32 table = grid > form.first_wide, used = beside.used, *states = body + chunk.states;
    u8* codes = reinterpret_cast<u8*>(body + CHUNK_HEAD);
    if (threadIdx.x < chunk.n_buckets) codes[threadIdx.x] = beside.codes[threadIdx.x];
    if (threadIdx.x < 2 * LANES)
        states[threadIdx.x] = u32(beside.states[threadIdx.x / 2] >> 32 * (threadIdx.x % 2));
    for (u32 i = threadIdx.x; i < used; i += THREADS)
        states[2 * LANES + i] = beside.words[MOST_WORDS - used + i];
    if (threadIdx.x) return;
    body[0] = __float_as_uint(unit);
    body[1] = used + (table << 16);
    float top = mul_rn(unit, highest_of(form, table));
    atomicMax(&all_found[number].peak, __float_as_uint(top));
}

// What the sum of a chunk keeps in shared memory, of each payload.
struct LevelsSum {
    u8 symbols[AT_ONCE][CHUNK];
    u32 next[AT_ONCE][2 * AHEAD];
    float steps[AT_ONCE][MOST_BUCKETS];
    u32 valid, unused;  // a bit for each
};
static_assert(sizeof(LevelsSum) == 38920, "structs.py has its size");
static_assert(AT_ONCE == CHUNKS_OF_WARP, "a warp decodes the payloads that are summed at a time");

// Decodes a chunk of as many payloads as four lanes of a warp each can; notes which are valid.
__device__ __forceinline__ void decode_levels(const LevelsForm& form, const LevelsChunk& chunk,
                                              const u32* body, u32 scale, LevelsSum& beside) {
    u32 of_rank = threadIdx.x / LANES, table = body ? body[1] >> 16 : 0;
    u32 unit = body ? body[0] : 0, n_words = body ? body[1] & 0xffff : 0;
    float top = mul_rn(__uint_as_float(unit), highest_of(form, table));
    bool fits = table < 2 && n_words <= chunk.room && unit <= SIGN && magnitude(top) <= scale;
    bool coded = body && fits && (unit || body[1]);
    const u32* words = coded ? body + chunk.states : form.slots;
    fits = decode_group(form.slots + SLOTS * (table % 2), words, coded ? n_words : 0,
                        coded ? chunk.width : 0, beside.symbols[of_rank], beside.next[of_rank]) &&
           fits;
    u32 whose = __ballot_sync(ALL_LANES, fits) >> (of_rank * LANES) & 0xfu;
    if (threadIdx.x % LANES == 0 && whose == 0xfu) atomicOr(&beside.valid, 1u << of_rank);
}

// The sum of the levels of all ranks.
__global__ void __launch_bounds__(THREADS, 3)
    sum_coded(const Messages* __restrict__ messages_at, const Arriving* __restrict__ tensors,
              Payload* payloads, const u32* __restrict__ chunk_tensor,
              const LevelsForm* __restrict__ forms, u32* not_finite) {
    const Messages messages = *messages_at;
    SHARED_MEMORY(memory);
    LevelsSum& beside = *reinterpret_cast<LevelsSum*>(memory);
    u32 number = chunk_tensor[blockIdx.x];
    const Arriving tensor = tensors[number];
    const LevelsForm form = forms[number];
    const LevelsChunk chunk(form, tensor.numel);
    bool finite = true;
    for (u32 rank = 0; rank < messages.n_ranks; rank += AT_ONCE) {
        Batch batch(messages, tensor, number, payloads, rank);
        auto body_of = [&](u32 r) {
            const u8* body = payload_of(messages, tensor, rank + r) + tensor.values_offset;
            return reinterpret_cast<const u32*>(body) + chunk.first_word;
        };
        if (threadIdx.x == 0) beside.valid = 0;
        __syncthreads();
        if (threadIdx.x < 32) {
            u32 r = threadIdx.x / LANES;
            bool arrived = batch.arrived >> r & 1;
            u32 scale = arrived ? payloads[(rank + r) * messages.n_tensors + number].scale : 0;
            decode_levels(form, chunk, arrived ? body_of(r) : nullptr, scale, beside);
        }
        for (u32 i = threadIdx.x; i < batch.n * MOST_BUCKETS; i += THREADS) {
            u32 b = i % MOST_BUCKETS, r = i / MOST_BUCKETS;
            if (b >= chunk.n_buckets) continue;
            const u32* body = body_of(r);
            u32 code = reinterpret_cast<const u8*>(body + CHUNK_HEAD)[b];
            beside.steps[r][b] = step_of(form, __uint_as_float(body[0]), code);
        }
        __syncthreads();
        for (u32 r = 0; r < batch.n; r++) batch.check(r, beside.valid >> r & 1);
        for (u32 i = threadIdx.x; i < chunk.n; i += THREADS) {
            float sum = rank ? tensor.sum[chunk.begin + i] : 0.0f;
            for (u32 r = 0; r < batch.n; r++) {
                float level = level_at(beside.symbols[r], i, chunk.width);
                sum = add_rn(sum, mul_rn(beside.steps[r][i >> form.bucket_bits], level));
            }
            if (!batch.store(tensor.sum + chunk.begin + i, sum)) finite = false;
        }
        __syncthreads();  // all have read what the next payloads are decoded to
    }
    if (!finite) atomicOr(&not_finite[number], 1u);
}
