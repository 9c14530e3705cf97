// Entropy code of bitmaps, see wire/rans.py: chunks of 4096 bytes, each in four interleaved streams
// of rANS. Four neighbouring lanes of a warp hold a chunk's four states; chunks are independent.

constexpr u32 CHUNK = 4096, LANES = 4, CHUNKS_OF_WARP = 32 / LANES;
constexpr u32 PRECISION = 12, SLOTS = 1u << PRECISION;
constexpr u64 LOWEST_STATE = 1ull << 31;
constexpr u32 MOST_WORDS = CHUNK * PRECISION / 32 + LANES;  // of a chunk
constexpr u32 TURN = 8;  // steps in a row; what comes after them is loaded beside them
constexpr u32 AHEAD = TURN * LANES;  // words that they take at most

// The positions of one tensor, in the code and as a bitmap.
struct Coded {
    u8* bitmap;         // whole words; encoding reads it, decoding writes it
    u8* coded;          // lengths of the chunks, uint16, from the next whole word on the chunks
    const u64* slots;   // decoding: of each of 4096 slots symbol, frequency and place, uint32
    const u64* pushes;  // encoding: of each byte reciprocal; then bias, frequency and shift
    u32* words;         // scratch, MOST_WORDS for each chunk
    u64* states;        // scratch, LANES for each chunk
    u32* lengths;       // scratch, words of each chunk; then where its states begin
    u64 n_symbols;
    u64 nbytes;      // of `coded`
    u32 first_warp;  // of the launch
    u32 n_warps, n_chunks;
    u32 tensor;  // whose code this is
};
static_assert(sizeof(Coded) == 88, "structs.py describes codes with the same layout");

__device__ __forceinline__ u32* words_of(const Coded& code) {
    return reinterpret_cast<u32*>(code.coded + (2ull * code.n_chunks + 3) / 4 * 4);
}

// From the chunks' lengths to where they begin, and the table of lengths in front. One warp.
__device__ __forceinline__ void place_chunks(const Coded& code) {
    volatile u32* lengths = code.lengths;
    u16* table = reinterpret_cast<u16*>(code.coded);
    u32 before = 0;
    for (u32 begin = 0; begin < code.n_chunks; begin += 32) {
        u32 chunk = begin + threadIdx.x, length = 0;
        if (chunk < code.n_chunks) length = lengths[chunk];
        u32 taken = chunk < code.n_chunks ? length + 2 * LANES : 0;
        u32 up_to = warp_inclusive_sum(taken);
        if (chunk < code.n_chunks) {
            table[chunk] = u16(length);
            lengths[chunk] = before + up_to - taken;
        }
        before += __shfl_sync(ALL_LANES, up_to, 31);
    }
}

// Returns how many turns the longest of a warp's chunks takes, of `length` bytes each.
__device__ __forceinline__ u32 turns_of(u32 length) {
#pragma unroll
    for (u32 by = 16; by; by /= 2) length = max(length, __shfl_xor_sync(ALL_LANES, length, by));
    return (length + TURN * LANES - 1) / (TURN * LANES);
}

// All symbols have one part of the tables.
struct OnePart {
    __device__ __forceinline__ u32 operator[](u32) const { return 0; }
};

// Encodes a chunk of each four lanes of a warp, from the last byte to the first. `pushes`: of bytes,
// for each of `parts`; `symbols`: four in a word; `words`: MOST_WORDS, which become full from the
// end; returns how many stay free. `state`: of the lane, the lowest before.
template <class Parts>
__device__ __forceinline__ u32 encode_group(const u64* pushes, const u32* symbols, u32 length,
                                            u32* words, u64& state, const Parts& parts) {
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

// Encodes eight chunks by each warp into scratch.
__global__ void __launch_bounds__(32)
    encode_chunks(const Coded* __restrict__ codes, const u32* __restrict__ warp_code,
                  Found* all_found) {
    SHARED_MEMORY(memory);
    u64* pushes = reinterpret_cast<u64*>(memory);  // two for each byte
    u32* flag = reinterpret_cast<u32*>(pushes + 512);
    const Coded code = codes[warp_code[blockIdx.x]];
    Found* found = all_found + code.tensor;
    if (found->peak > LARGEST_FINITE_BITS) return;
#pragma unroll
    for (u32 i = 0; i < 512; i += 32) pushes[i + threadIdx.x] = code.pushes[i + threadIdx.x];
    __syncwarp();
    u32 group = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    u32 chunk = (blockIdx.x - code.first_warp) * CHUNKS_OF_WARP + group;
    bool exists = chunk < code.n_chunks;
    u64 begin = u64(chunk) * CHUNK;
    u32 length = exists ? u32(min(u64(CHUNK), code.n_symbols - begin)) : 0;
    u32* words = code.words + u64(exists ? chunk : 0) * MOST_WORDS;
    u64 state = LOWEST_STATE;
    u32 free = encode_group(pushes, reinterpret_cast<const u32*>(code.bitmap + begin), length,
                            words, state, OnePart());
    if (exists) {
        code.states[u64(chunk) * LANES + lane] = state;
        if (lane == 0) code.lengths[chunk] = MOST_WORDS - free;
    }
    if (is_last(&found->ticket, code.n_warps, flag)) place_chunks(code);
}

// Copies a chunk's states and words to their place; a block for each chunk.
__global__ void __launch_bounds__(128)
    copy_chunks(const Coded* __restrict__ codes, const u32* __restrict__ chunk_code,
                const u32* __restrict__ chunk_number, Found* all_found) {
    const Coded code = codes[chunk_code[blockIdx.x]];
    Found* found = all_found + code.tensor;
    if (found->peak > LARGEST_FINITE_BITS) return;
    u32 chunk = chunk_number[blockIdx.x];
    u32 length = reinterpret_cast<const u16*>(code.coded)[chunk];
    u32* out = words_of(code) + code.lengths[chunk];
    if (reinterpret_cast<u8*>(out + 2 * LANES + length) > code.coded + code.nbytes) {
        found->overflow = 1;
        return;
    }
    const u32* states = reinterpret_cast<const u32*>(code.states + u64(chunk) * LANES);
    const u32* words = code.words + u64(chunk) * MOST_WORDS + (MOST_WORDS - length);
    if (threadIdx.x < 2 * LANES) out[threadIdx.x] = states[threadIdx.x];
    for (u32 i = threadIdx.x; i < length; i += blockDim.x) out[2 * LANES + i] = words[i];
}

// What decoding keeps in shared memory.
struct DecodedBeside {
    u32 slots[SLOTS];
    u32 words[CHUNKS_OF_WARP][2 * AHEAD];  // of each chunk those that come next, by number
    u32 flag, unused[3];
};
static_assert(sizeof(DecodedBeside) == 18448, "tables.py has its size");

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

// Decodes eight chunks by each warp of one message; false where a chunk does not end as it began.
// Lengths and places are those of `find_chunks`.
__device__ __forceinline__ bool decode_bitmap(const Coded& code, u32 chunk, u32 group,
                                              DecodedBeside& beside) {
    const u32* slots = reinterpret_cast<const u32*>(code.slots);
#pragma unroll 8
    for (u32 i = threadIdx.x; i < SLOTS; i += 32) beside.slots[i] = slots[i];
    bool exists = chunk < code.n_chunks;
    u64 begin = u64(chunk) * CHUNK;
    u32 length = exists ? u32(min(u64(CHUNK), code.n_symbols - begin)) : 0;
    const u32* words = words_of(code) + (exists ? code.lengths[chunk] : 0);
    u32 n_words = exists ? reinterpret_cast<const u16*>(code.coded)[chunk] : 0;
    return decode_group(beside.slots, words, n_words, length, code.bitmap + begin,
                        beside.words[group], OnePart());
}
