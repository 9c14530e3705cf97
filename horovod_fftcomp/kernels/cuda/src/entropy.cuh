// Entropy code of bytes, see wire/rans.py: chunks of 4096 bytes, each in four interleaved streams of
// rANS. Four neighbouring lanes of a warp hold a chunk's four states; chunks are independent.

constexpr u32 CHUNK = 4096, LANES = 4, CHUNKS_OF_WARP = 32 / LANES;
constexpr u32 PRECISION = 12, SLOTS = 1u << PRECISION;
constexpr u64 LOWEST_STATE = 1ull << 31;
constexpr u32 MOST_WORDS = CHUNK * PRECISION / 32 + LANES;  // of a chunk
constexpr u32 TURN = 8;  // steps in a row; what comes after them is loaded beside them
constexpr u32 AHEAD = TURN * LANES;  // words that they take at most

// Returns how many turns the longest of a warp's chunks takes, of `length` bytes each.
__device__ __forceinline__ u32 turns_of(u32 length) {
#pragma unroll
    for (u32 by = 16; by; by /= 2) length = max(length, __shfl_xor_sync(ALL_LANES, length, by));
    return (length + TURN * LANES - 1) / (TURN * LANES);
}

// Encodes a chunk of each four lanes of a warp, from the last byte to the first. `pushes`: of bytes,
// for each of `parts`; `symbols`: four in a word; `words`: MOST_WORDS, which become full from the
// end; returns how many stay free. `state`: of the lane, the lowest before.
__device__ __forceinline__ u32 encode_group(const u64* pushes, const u32* symbols, u32 length,
                                            u32* words, u64& state, const u8* parts) {
    u32 group = threadIdx.x % 32 / LANES, lane = threadIdx.x % LANES;
    u32 free = MOST_WORDS, masks[TURN], coming[TURN], turn = turns_of(length);
#pragma unroll
    for (u32 i = 0; i < TURN; i++) {
        u32 step = turn * TURN - TURN + i;
        coming[i] = turn && step * LANES < length ? symbols[step] : 0;
    }
    while (turn-- > 0) {
#pragma unroll
        for (u32 i = 0; i < TURN; i++) {
            u32 step = turn * TURN - TURN + i;
            masks[i] = coming[i];
            coming[i] = turn && step * LANES < length ? symbols[step] : 0;
        }
#pragma unroll
        for (u32 i = TURN; i-- > 0;) {
            u32 place = (turn * TURN + i) * LANES + lane;
            bool taken = place < length;
            u32 part = taken ? parts[place] : 0;
            u32 symbol = (masks[i] >> (8 * lane) & 0xffu) | part << 8;
            u64 reciprocal = pushes[2 * symbol], rest = pushes[2 * symbol + 1];
            u32 bias = u32(rest) & 0xffffu, frequency = u32(rest >> 16) & 0xffffu;
            bool full = taken && state >= u64(frequency) << (63 - PRECISION);
            u32 whose = __ballot_sync(ALL_LANES, full) >> (group * LANES) & 0xfu;
            if (full) {
                words[free - 1 - __popc(whose >> (lane + 1))] = u32(state);
                state >>= 32;
            }
            free -= __popc(whose);
            u64 quotient = __umul64hi(state, reciprocal) >> (rest >> 32);
            if (taken) state = state + bias + quotient * (SLOTS - frequency);
        }
    }
    return free;
}

// Decodes a chunk of each four lanes of a warp; false where it does not end as it began. `words`: of
// the chunk, its states first; `next`: 2 * AHEAD words of shared memory; `slots`: of each part.
template <class Parts>
__device__ __forceinline__ bool decode_group(const u32* slots, const u32* words, u32 n_words,
                                             u32 length, u8* symbols, u32* next,
                                             const Parts& parts) {
    u32 group = threadIdx.x % 32 / LANES, lane = threadIdx.x % LANES, at = 0;
    u64 state = LOWEST_STATE;
    if (length) state = words[2 * lane] | u64(words[2 * lane + 1]) << 32;
    words += 2 * LANES;
    u32 held = 2 * AHEAD;  // the words before are in `next`, or were
    for (u32 i = lane; i < held; i += LANES) next[i] = i < n_words ? words[i] : 0;
    __syncwarp();
    u32 n_turns = turns_of(length);
    for (u32 turn = 0; turn < n_turns; turn++) {
        u32 coming[TURN];
#pragma unroll
        for (u32 i = 0; i < TURN; i++) {
            u32 number = held + LANES * i + lane;
            coming[i] = number < n_words ? words[number] : 0;
        }
#pragma unroll
        for (u32 step = 0; step < TURN; step++) {
            u32 i = (turn * TURN + step) * LANES + lane;
            bool taken = i < length;
            u32 entry = slots[(u32(state) & (SLOTS - 1)) | parts[i] << PRECISION];
            if (taken) {
                symbols[i] = u8(entry & 0xffu);
                state = u64(entry >> 8 & 0xfffu) * (state >> PRECISION) + (entry >> 20);
            }
            bool low = taken && state < LOWEST_STATE;
            u32 whose = __ballot_sync(ALL_LANES, low) >> (group * LANES) & 0xfu;
            u32 own = at + __popc(whose & ((1u << lane) - 1));
            if (low) state = state << 32 | next[own % (2 * AHEAD)];
            at += __popc(whose);
        }
        __syncwarp();  // all have read
        if (held - at <= AHEAD) {
#pragma unroll
            for (u32 i = 0; i < TURN; i++) next[(held + LANES * i + lane) % (2 * AHEAD)] = coming[i];
            held += AHEAD;
        }
        __syncwarp();
    }
    return at == n_words && state == LOWEST_STATE;
}
