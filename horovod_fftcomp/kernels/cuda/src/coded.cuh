// Dithered levels: see codec/methods/dither.py, which defines the bytes, and
// wire/coded_levels.py. A block for each chunk, whose bytes depend on no other chunk's.

constexpr u32 CODED = 2 * CHUNK;  // values of a chunk: two for each symbol
constexpr u32 GRIDS = 114, CHOICES = 2 * GRIDS, BINS = 64, BINS_OF_SCALE = 10;
constexpr u32 DIGITS = 15, MIDDLE = 7, PARTS = 8, NO_SCALE = 255;
constexpr u32 MOST_BUCKETS = CODED / 128, CHUNK_HEAD = 2;  // buckets of a chunk; words before codes
constexpr u32 KEY_WORDS = 2, DITHER_BITS = 20, DITHER_HALF = 1u << (DITHER_BITS - 1);
static_assert(CHOICES <= THREADS, "a thread has the cost of a choice");

// How one tensor's levels are coded, beside its row in the other tables.
struct LevelsForm {
    const int* costs;      // of a value in each bin, for each choice: [BINS][CHOICES]
    const float* factors;  // of each grid: levels to the scale; their inverses; powers of 2^(-1/8)
    // Of both sets of tables, each part, and
    const u64* pushes;     // each byte: reciprocal; then bias, frequency and shift
    const u32* slots;      // each of 4096 slots: symbol, frequency and place
    u32 bucket_bits;
    u32 normal, tails;          // the highest level of either set of tables
    u32 end_normal, end_tails;  // the first grid that is too fine for it
    u32 first_chunk, n_chunks;
    u32 chunk_words, room;  // of all chunks but the last: words, and those for levels
    int limit;              // of the mean cost
    u32 last_room;
    int last_limit;
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
        first_word = KEY_WORDS + u64(chunk) * form.chunk_words;
        n = u32(min(u64(CODED), numel - begin));
        width = (n + 1) / 2;
        n_buckets = ((n - 1) >> form.bucket_bits) + 1;
        room = last ? form.last_room : form.room;
        limit = last ? form.last_limit : form.limit;
        states = CHUNK_HEAD + (n_buckets + 3) / 4;
    }
};

__device__ __forceinline__ float highest_of(const LevelsForm& form, u32 table) {
    return float(table ? form.tails : form.normal);
}

// The scale or step of a bucket, 0 where it would be below 2^-126.
__device__ __forceinline__ float step_of(const LevelsForm& form, float unit, u32 code) {
    u32 whole = magnitude(mul_rn(unit, form.factors[2 * GRIDS + code % 8])), less = code / 8 << 23;
    bool exists = code != NO_SCALE && whole >= less + MIN_NORMAL_BITS;
    return __uint_as_float(exists ? whole - less : 0);
}

__device__ __forceinline__ float ratio_of(float x, float scale) {
    return __float_as_uint(scale) ? div_rn(x, scale) : 0.0f;
}

// A number from the middle of a unit, of 20 bits, that the two values of a symbol share.
struct Dither {
    float sign, size;  // size: in levels, below 1/2
    u32 part;

    __device__ __forceinline__ explicit Dither(u32 random) {
        u32 number = random >> (32 - DITHER_BITS);
        bool below = number < DITHER_HALF;
        u32 above = below ? DITHER_HALF - 1 - number : number - DITHER_HALF;
        sign = below ? -1.0f : 1.0f;
        size = mul_rn(add_rn(float(above), 0.5f), 0x1p-20f);
        part = above / (DITHER_HALF / PARTS);
    }
    // What a level stands for, in steps.
    __device__ __forceinline__ float value(float level) const {
        return mul_rn(sign, sub_rn(level, size));
    }
};

// The dithers of a chunk. Of the key, the lower half is added to what is drawn with the upper one.
struct Dithers {
    Draws draws;
    u32 offset;

    __device__ __forceinline__ Dithers(u64 key, u64 chunk)
        : draws(key >> 32, chunk), offset(u32(key)) {}
    __device__ __forceinline__ Dither at(u32 i) const { return Dither(draws[i] + offset); }
    __device__ __forceinline__ u32 operator[](u32 i) const { return at(i).part; }
};

// What encoding a chunk keeps in shared memory.
struct LevelsBeside {
    float values[CODED];
    u32 symbols[CHUNK / 4];
    u8 parts[CHUNK];  // of dithers
    u32 words[MOST_WORDS];  // from the end
    u32 eighths[MOST_BUCKETS];
    float scales[MOST_BUCKETS];
    u8 codes[MOST_BUCKETS];
    int counts[BINS];
    u64 states[LANES];
    u32 most, peak, chosen, used;
    float scale, unused;
};
static_assert(sizeof(LevelsBeside) == 48008, "structs.py has its size");

// A bucket's scale in eighths above 2^-127, 0 for zeros, from its largest magnitude and a sum of
// squares of whole numbers.
__device__ __forceinline__ u32 eighths_of(u32 most, u32 squares, u32 n) {
    u32 exponent = most >> 23, largest = ((most & 0x7fffffu) | MIN_NORMAL_BITS) / 8192 + 1;
    u32 square = max(squares / n, largest * largest / 35) + 1;  // below 2^23: exact as a float
    u32 pattern = __float_as_uint(float(square)), mantissa = pattern % (1 << 23) / 2 | 1 << 22;
    u32 power = (pattern >> 23) - 127, above = 0;
    // 2^(22 + k / 4), rounded down
    const u32 quarters[4] = {4194304, 4987896, 5931641, 7053950};
#pragma unroll
    for (u32 k = 0; k < 4; k++) above += mantissa > quarters[k];
    int eighths = int(4 * power + above) + 8 * (int(exponent) - 10);
    return exponent ? u32(min(max(eighths, 8), 8 * 255 - 1)) : 0;
}

// A magnitude as a whole number: 2^10 to 2^11 if it has the `exponent` of the largest.
__device__ __forceinline__ u32 whole_of(u32 bits, u32 exponent) {
    u32 own = bits >> 23, whole = bits & 0x7fffffu;
    whole = own ? whole | MIN_NORMAL_BITS : whole << 1;
    return whole >> min(exponent - own + 13, 31u);
}

// Scales of buckets and the bins of all values, from the values; false if one is not finite.
__device__ __forceinline__ bool find_scales(const LevelsForm& form, const LevelsChunk& chunk,
                                            LevelsBeside& beside) {
    u32 lane = threadIdx.x % 32, bits = form.bucket_bits;
    if (threadIdx.x < BINS) beside.counts[threadIdx.x] = threadIdx.x ? 0 : chunk.n % 2;
    if (threadIdx.x == 0) beside.most = beside.peak = beside.chosen = 0;
    __syncthreads();
    for (u32 b = threadIdx.x / 32; b < chunk.n_buckets; b += WARPS) {
        u32 begin = b << bits, end = min((b + 1) << bits, chunk.n), most = 0, squares = 0;
        for (u32 i = begin + lane; i < end; i += 32) most = max(most, magnitude(beside.values[i]));
#pragma unroll
        for (u32 by = 16; by; by /= 2) most = max(most, __shfl_xor_sync(ALL_LANES, most, by));
        for (u32 i = begin + lane; i < end; i += 32) {
            u32 whole = whole_of(magnitude(beside.values[i]), most >> 23);
            squares += whole * whole;
        }
#pragma unroll
        for (u32 by = 16; by; by /= 2) squares += __shfl_xor_sync(ALL_LANES, squares, by);
        if (lane) continue;
        u32 eighths = eighths_of(most, squares, end - begin);
        beside.eighths[b] = eighths;
        atomicMax(&beside.most, most);
        atomicMax(&beside.peak, eighths);
    }
    __syncthreads();
    if (beside.most > LARGEST_FINITE_BITS) return false;
    u32 peak = beside.peak, up = (peak + 7) / 8;
    u32 pattern = __float_as_uint(form.factors[2 * GRIDS + 8 * up - peak]) + (up << 23);
    float scale = __uint_as_float(pattern - (127u << 23));
    if (threadIdx.x < chunk.n_buckets) {
        u32 own = beside.eighths[threadIdx.x], code = own ? min(peak - own, NO_SCALE) : NO_SCALE;
        beside.codes[threadIdx.x] = u8(code);
        beside.scales[threadIdx.x] = step_of(form, scale, code);
    }
    if (threadIdx.x == 0) beside.scale = scale;
    __syncthreads();
    for (u32 i = threadIdx.x; i < chunk.n; i += THREADS) {
        u32 ratio = magnitude(ratio_of(beside.values[i], beside.scales[i >> bits]));
        u32 bin = truncated(mul_rn(__uint_as_float(ratio), float(BINS_OF_SCALE)));
        atomicAdd(&beside.counts[min(bin, BINS - 1)], 1);
    }
    return true;
}

// The finest choice below `end` with which levels should fit, plus 1; 0: none. A thread for each.
__device__ __forceinline__ u32 fitting_choice(const LevelsForm& form, const LevelsChunk& chunk,
                                              LevelsBeside& beside, u32 end) {
    u32 choice = threadIdx.x;
    bool exists = choice / 2 < (choice % 2 ? form.end_tails : form.end_normal);
    __syncthreads();
    if (choice < end && exists) {
        int cost = 0;
#pragma unroll 4
        for (u32 b = 0; b < BINS; b++) cost += form.costs[b * CHOICES + choice] * beside.counts[b];
        float unit = mul_rn(beside.scale, form.factors[GRIDS + choice / 2]);
        if (cost <= chunk.limit && magnitude(unit) >= MIN_NORMAL_BITS)
            atomicMax(&beside.chosen, choice + 1);
    }
    __syncthreads();
    u32 found = beside.chosen;
    __syncthreads();
    if (threadIdx.x == 0) beside.chosen = 0;
    return found;
}

// Finds the levels of a choice, writes them as symbols and these in the entropy code.
__device__ __forceinline__ void encode_levels(const LevelsForm& form, const LevelsChunk& chunk,
                                              LevelsBeside& beside, u64 key, u32 choice) {
    const Dithers dithers(key, chunk.begin / CODED);
    for (u32 j = threadIdx.x; j < chunk.width; j += THREADS) {
        const Dither dither = dithers.at(j);
        u32 digits[2] = {MIDDLE, MIDDLE};
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            u32 i = j + half * chunk.width;
            if (i >= chunk.n) continue;
            float ratio = ratio_of(beside.values[i], beside.scales[i >> form.bucket_bits]);
            float place = mul_rn(mul_rn(ratio, dither.sign), form.factors[choice / 2]);
            digits[half] = truncated(add_rn(place, add_rn(dither.size, MIDDLE + 1.5f))) - 1;
        }
        reinterpret_cast<u8*>(beside.symbols)[j] = u8(digits[0] + DIGITS * digits[1]);
        beside.parts[j] = u8(dither.part);
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        u64 state = LOWEST_STATE;
        const u64* pushes = form.pushes + 512 * PARTS * (choice % 2);
        u32 length = threadIdx.x < LANES ? chunk.width : 0;
        u32 free = encode_group(pushes, beside.symbols, length, beside.words, state, beside.parts);
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
    u32 choice = CHOICES + 1;  // here the number of a choice plus 1
    do {
        choice = fitting_choice(form, chunk, beside, choice - 1);
        if (choice) encode_levels(form, chunk, beside, tensor.key, choice - 1);
    } while (choice && beside.used > chunk.room);
    float unit = choice ? mul_rn(beside.scale, form.factors[GRIDS + (choice - 1) / 2]) : 0.0f;
    const Dithers dithers(tensor.key, chunk.begin / CODED);
    for (u32 i = threadIdx.x; tensor.keep && i < chunk.n; i += THREADS) {
        float step = choice ? step_of(form, unit, beside.codes[i >> form.bucket_bits]) : 0.0f;
        float level = level_at(reinterpret_cast<u8*>(beside.symbols), i, chunk.width);
        float sent = choice ? mul_rn(step, dithers.at(i % chunk.width).value(level)) : 0.0f;
        tensor.coeffs[chunk.begin + i] = sub_rn(beside.values[i], sent);
    }
    u32* words = reinterpret_cast<u32*>(tensor.payload + tensor.values_offset);
    if (chunk.begin == 0 && threadIdx.x < KEY_WORDS)
        words[threadIdx.x] = u32(tensor.key >> 32 * threadIdx.x);
    if (!choice) return;
    u32* body = words + chunk.first_word;
    u32 table = (choice - 1) % 2, used = beside.used, *states = body + chunk.states;
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
    Dithers dithers[AT_ONCE];
    u32 valid, unused;  // a bit for each
};
static_assert(sizeof(LevelsSum) == 36968, "structs.py has its size");
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
    const u32* slots = form.slots + SLOTS * PARTS * (table % 2);
    const u32* key = body ? body - chunk.first_word : form.slots;
    const Dithers dithers(key[0] | u64(key[1]) << 32, chunk.begin / CODED);
    if (threadIdx.x % LANES == 0) beside.dithers[of_rank] = dithers;
    fits = decode_group(slots, words, coded ? n_words : 0, coded ? chunk.width : 0,
                        beside.symbols[of_rank], beside.next[of_rank], dithers) &&
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
                float steps = beside.dithers[r].at(i % chunk.width).value(level);
                sum = add_rn(sum, mul_rn(beside.steps[r][i >> form.bucket_bits], steps));
            }
            if (!batch.store(tensor.sum + chunk.begin + i, sum)) finite = false;
        }
        __syncthreads();  // all have read what the next payloads are decoded to
    }
    if (!finite) atomicOr(&not_finite[number], 1u);
}
