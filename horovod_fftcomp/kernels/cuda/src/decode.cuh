// Decoding of the payloads of all ranks, and the sums of the gradients. Received bytes are not
// trusted: a corrupt payload makes the sum of its tensor NaN and is reported to the host.

enum Status : u32 { SOUND, NOT_FINITE_THERE, CORRUPT };

// The values of a tile whose positions travel as offsets. Complements, so that zeros are none.
struct Start {
    u32 count;
    u32 not_first;  // of the values before
    u32 not_begin;  // of the bit of the unary counts that stands for the first
};

// One tensor as it arrives: the same of all ranks, whose messages lie one after another; or of one
// rank, where what it sends depends on its values.
struct Arriving {
    float* sum;           // numel
    const u8* start;      // the header for scale 0 and a finite gradient
    const u32* crc_of_values;
    u32* bitmaps;         // scratch: whole tiles of words for each rank, zeros; none for OFFSETS
    u32* ranks;           // scratch: for each rank and tile the values before the tile
    Start* starts;        // scratch: for each rank and tile, of OFFSETS instead of those two
    u32* unary;           // scratch: for each rank and 32 words of unary counts the ones before
    u64 payload_offset;   // in a message
    u64 numel, n, k;
    u64 positions_offset, values_offset;
    u32 header_nbytes;
    u32 first_tile, n_tiles;
    u32 first_unary, n_unary;  // blocks of words of unary counts
    u32 layout, low_bits;
    u32 kind, bits;
    u32 step, largest;        // of STEPS: bits of the unit, and no code is larger
    u32 first_group;  // blocks of as many tiles as warps
};
static_assert(sizeof(Arriving) == 152, "structs.py describes arriving tensors with the same layout");

// What is found out of a payload. Zeros before the first launch.
struct Payload {
    u32 scale, status, ticket, count;
};

struct Messages {
    const u8* bytes;
    u64 nbytes;  // of one rank's
    u32 n_ranks, n_tensors;
    u32 rows_apart;  // 0: one row for a tensor of all ranks; else n_tensors, and offsets are whole
    u32 unused;
};
static_assert(sizeof(Messages) == 32, "structs.py describes messages with the same layout");

// Where a rank's part lies in what belongs to a row: rows of single ranks have one part.
__device__ __forceinline__ u32 part_of(const Messages& messages, u32 rank) {
    return messages.rows_apart ? 0 : rank;
}

__device__ __forceinline__ const u8* payload_of(const Messages& messages, const Arriving& tensor,
                                                u32 rank) {
    return messages.bytes + part_of(messages, rank) * messages.nbytes + tensor.payload_offset;
}

// Returns `bits` bits from a bit of a stream on that begins at a whole word.
__device__ __forceinline__ u32 get_bits(const u32* stream, u64 at, u32 bits) {
    u32 shift = u32(at % 32);
    u32 found = stream[at / 32] >> shift;
    if (shift + bits > 32) found |= stream[at / 32 + 1] << (32 - shift);
    return bits == 32 ? found : found & ((1u << bits) - 1);
}

// Tells all threads of a block alike whether a payload is sound so far: another block may be about
// to note that it is not. `flag`: a word of shared memory.
__device__ __forceinline__ bool is_sound(Payload* payload, u32* flag) {
    if (threadIdx.x == 0) *flag = latest(&payload->status);
    __syncthreads();
    bool sound = *flag == SOUND;
    __syncthreads();
    return sound;
}

__device__ __forceinline__ void note_corrupt(Payload* payload) {
    atomicMax(&payload->status, u32(CORRUPT));
}

// Positions that travel as offsets: unary counts for each 2^low_bits places, in whole bytes, then
// the low bits of each position.
struct Offsets {
    const u32* stream;
    u64 n_bits;   // of unary counts
    u64 offsets;  // where the first offset begins
};
__device__ __forceinline__ Offsets offsets_of(const Messages& messages, const Arriving& tensor,
                                              u32 rank) {
    u64 n_bits = tensor.k + ((tensor.n + (1ull << tensor.low_bits) - 1) >> tensor.low_bits);
    const u8* packed = payload_of(messages, tensor, rank) + tensor.positions_offset;
    return {reinterpret_cast<const u32*>(packed), n_bits, (n_bits + 7) / 8 * 8};
}

// Returns the bits of a stream from `at` on, at most 32; none from `end` on.
__device__ __forceinline__ u32 bits_before(const u32* stream, u64 at, u64 end) {
    return at < end ? get_bits(stream, at, u32(min(u64(32), end - at))) : 0;
}

// Compares every header with what it has to be. A warp for each tensor of each rank.
__global__ void __launch_bounds__(32)
    read_headers(const Messages* __restrict__ messages_at, const Arriving* __restrict__ tensors,
                 Payload* payloads) {
    const Messages messages = *messages_at;
    u32 number = blockIdx.x % messages.n_tensors, lane = threadIdx.x;
    const Arriving tensor = tensors[number];
    const u8* header = payload_of(messages, tensor, blockIdx.x / messages.n_tensors);
    bool differs = false;
    for (u32 i = lane; i < tensor.header_nbytes; i += 32) {
        bool free = i >= SCALE_OFFSET && i < CRC_OFFSET + 4;
        u32 change = header[i] ^ tensor.start[i];
        differs = differs || (!free && change > (i == FLAGS_OFFSET ? NOT_FINITE : 0));
    }
    const u32* words = reinterpret_cast<const u32*>(header);
    u32 scale = words[SCALE_OFFSET / 4];
    bool finite = header[FLAGS_OFFSET] == 0;
    u32 change = change_of_bits(tensor.crc_of_values, lane, scale, words[GRID_OFFSET / 4]);
    if (lane == 0) {
        if (!finite) change ^= tensor.crc_of_values[64];
        change ^= words[CRC_OFFSET / 4];
        change ^= reinterpret_cast<const u32*>(tensor.start)[CRC_OFFSET / 4];
    }
#pragma unroll
    for (u32 by = 16; by; by /= 2) change ^= __shfl_xor_sync(ALL_LANES, change, by);
    u32 wrong = __ballot_sync(ALL_LANES, differs);
    if (lane == 0) {
        bool sound = change == 0 && wrong == 0 && !(finite && scale > LARGEST_FINITE_BITS);
        payloads[blockIdx.x].scale = scale;
        payloads[blockIdx.x].status = !sound ? CORRUPT : finite ? SOUND : NOT_FINITE_THERE;
    }
}

// Turns counts into the sums of those before; notes a payload with another sum than k. All threads.
__device__ __forceinline__ void sum_counts(u32* counts, u32 n, u64 k, Payload* payload, u32* sums) {
    volatile u32* all = counts;
    Run run = run_of(n);
    u32 own = 0, total;
#pragma unroll 8
    for (u32 i = run.begin; i < run.end; i++) own += all[i];
    u32 before = block_exclusive_sum(own, sums, total);
    for (u32 begin = run.begin; begin < run.end; begin += BATCH) {
        u32 counted[BATCH];
#pragma unroll
        for (u32 i = 0; i < BATCH; i++) counted[i] = begin + i < run.end ? all[begin + i] : 0;
#pragma unroll
        for (u32 i = 0; i < BATCH && begin + i < run.end; i++) {
            all[begin + i] = before;
            before += counted[i];
        }
    }
    if (threadIdx.x == 0 && total != k) note_corrupt(payload);
}

// How many ones there are in each 128 words of the unary counts, then how many before them.
// `block_tensor`: whose the blocks are, `n_blocks` for each rank; so in the next launches.
__global__ void __launch_bounds__(WORDS_OF_REALS, 2 * RESIDENT)
    count_unary(const Messages* __restrict__ messages_at, const Arriving* __restrict__ tensors,
                Payload* payloads, const u32* __restrict__ block_tensor, u32 n_blocks) {
    const Messages messages = *messages_at;
    SHARED_MEMORY(memory);
    u32* sums = reinterpret_cast<u32*>(memory);
    u32 rank = blockIdx.x / n_blocks, block = blockIdx.x % n_blocks, number = block_tensor[block];
    const Arriving tensor = tensors[number];
    Payload* payload = payloads + rank * messages.n_tensors + number;
    if (!is_sound(payload, &sums[33])) return;
    Offsets from = offsets_of(messages, tensor, rank);
    u64 at = 32 * (u64(block - tensor.first_unary) * WORDS_OF_REALS + threadIdx.x);
    u32 count = __popc(bits_before(from.stream, at, from.n_bits)), total;
    bool padded = at == 0 && bits_before(from.stream, from.n_bits, from.offsets);
    if (padded) note_corrupt(payload);  // ones in what pads whole bytes
    block_exclusive_sum(count, sums, total);
    u32 n_threads = tensor.n_unary * WORDS_OF_REALS;
    for (u32 tile = u32(at / 32); tile < tensor.n_tiles; tile += n_threads)
        tensor.starts[u64(rank) * tensor.n_tiles + tile] = {};
    u32* counts = tensor.unary + u64(rank) * tensor.n_unary;
    if (threadIdx.x == 0) counts[block - tensor.first_unary] = total;
    if (is_last(&payload->ticket, tensor.n_unary, &sums[33]))
        sum_counts(counts, tensor.n_unary, tensor.k, payload, sums);
}

// Counts the values of each tile and finds the first, of positions that travel as offsets.
template <u32 C>
__global__ void __launch_bounds__(WORDS_OF_REALS, 2 * RESIDENT)
    count_offsets(const Messages* __restrict__ messages_at, const Arriving* __restrict__ tensors,
                  Payload* payloads, const u32* __restrict__ block_tensor, u32 n_blocks) {
    const Messages messages = *messages_at;
    SHARED_MEMORY(memory);
    u32* sums = reinterpret_cast<u32*>(memory);
    u32 rank = blockIdx.x / n_blocks, block = blockIdx.x % n_blocks, number = block_tensor[block];
    const Arriving tensor = tensors[number];
    Payload* payload = payloads + rank * messages.n_tensors + number;
    if (!is_sound(payload, &sums[33])) return;
    Offsets from = offsets_of(messages, tensor, rank);
    u32 own = block - tensor.first_unary, low_bits = tensor.low_bits, total;
    u64 at = 32 * (u64(own) * WORDS_OF_REALS + threadIdx.x);
    u32 ones = bits_before(from.stream, at, from.n_bits);
    u64 i = tensor.unary[u64(rank) * tensor.n_unary + own] +
            block_exclusive_sum(__popc(ones), sums, total);
    Start* starts = tensor.starts + u64(rank) * tensor.n_tiles;
    // A one after a one is a place in the same 2^low_bits; the offsets there ascend.
    u32 after = ones && at ? get_bits(from.stream, at - 1, 1) : 0;
    u32 joined = ones & (ones << 1 | after), before = 0, tile = 0, count = 0;
    if (joined & 1) before = get_bits(from.stream, from.offsets + (i - 1) * low_bits, low_bits);
    bool sound = true;
    while (ones) {
        u32 offsets[BATCH], n = min(BATCH, u32(__popc(ones)));
#pragma unroll
        for (u32 j = 0; j < BATCH; j++) {
            u64 there = from.offsets + (i + j) * low_bits;
            offsets[j] = j < n ? get_bits(from.stream, there, low_bits) : 0;
        }
#pragma unroll
        for (u32 j = 0; j < BATCH && ones; j++, ones &= ones - 1) {
            u32 lowest = ones & (0u - ones);
            u64 bit = at + __popc(lowest - 1), place = (bit - (i + j)) << low_bits | offsets[j];
            sound = sound && place < tensor.n && !(joined & lowest && offsets[j] <= before);
            before = offsets[j];
            u32 own_tile = u32(place / (TILE / C));
            if (sound && (count == 0 || own_tile != tile)) {
                if (count) atomicAdd(&starts[tile].count, count);
                atomicMax(&starts[own_tile].not_first, ~u32(i + j));
                atomicMax(&starts[own_tile].not_begin, ~u32(bit));
                tile = own_tile;
                count = 0;
            }
            count += sound;
        }
        i += n;
    }
    if (count) atomicAdd(&starts[tile].count, count);
    if (!sound) note_corrupt(payload);
}

// Returns the word of a bitmap that begins at bit `begin`, as it travels; `inside` of its bits are of
// the tensor.
__device__ __forceinline__ u32 arrived_bits(const Messages& messages, const Arriving& tensor,
                                            u32 rank, u64 begin, u32 inside) {
    if (tensor.layout == ALL) return tensor.k && inside ? ALL_LANES >> (32 - inside) : 0;
    const u8* packed = payload_of(messages, tensor, rank) + tensor.positions_offset;
    // Whole bytes travel; what pads them to words is nobody's.
    u32 held = inside == 0 ? 0 : u32(min(u64(32), (tensor.n + 7) / 8 * 8 - begin));
    return held ? get_bits(reinterpret_cast<const u32*>(packed), begin, held) : 0;
}

// Counts the values of each tile, then those before it; bitmaps that travel as such are copied. A
// warp for each tile; `group_tensor`: whose the blocks are, `n_groups` for each rank.
template <u32 C>
__global__ void __launch_bounds__(THREADS, RESIDENT)
    count_values(const Messages* __restrict__ messages_at, const Arriving* __restrict__ tensors,
                 Payload* payloads, const u32* __restrict__ group_tensor, u32 n_groups) {
    constexpr u32 WORDS = WORDS_OF_REALS / C, OWN = WORDS / 32;
    const Messages messages = *messages_at;
    SHARED_MEMORY(memory);
    u32* sums = reinterpret_cast<u32*>(memory);
    u32 rank = blockIdx.x / n_groups, group = blockIdx.x % n_groups, number = group_tensor[group];
    const Arriving tensor = tensors[number];
    Payload* payload = payloads + rank * messages.n_tensors + number;
    if (!is_sound(payload, &sums[33])) return;
    u32 tile = (group - tensor.first_group) * WARPS + threadIdx.x / 32, count = 0;
    u32* bitmap = tensor.bitmaps + u64(rank) * tensor.n_tiles * WORDS;
#pragma unroll
    for (u32 own = 0; own < OWN && tile < tensor.n_tiles; own++) {
        u64 word = u64(tile) * WORDS + own * 32 + threadIdx.x % 32, begin = 32 * word;
        u32 inside = begin >= tensor.n ? 0 : u32(min(u64(32), tensor.n - begin));
        u32 ones = arrived_bits(messages, tensor, rank, begin, inside);
        u32 beyond = inside == 32 ? 0 : ones >> inside << inside;
        if (beyond) note_corrupt(payload);
        ones ^= beyond;
        bitmap[word] = ones;
        count += __popc(ones);
    }
    count = warp_inclusive_sum(count);
    u32* ranks = tensor.ranks + u64(rank) * tensor.n_tiles;
    if (threadIdx.x % 32 == 31 && tile < tensor.n_tiles) ranks[tile] = count;
    if (is_last(&payload->ticket, (tensor.n_tiles + WARPS - 1) / WARPS, &sums[33]))
        sum_counts(ranks, tensor.n_tiles, tensor.k, payload, sums);
}

// Where float i of a tile lies in shared memory.
__device__ __forceinline__ u32 float_slot(u32 i) { return 2 * slot(i / 2) + i % 2; }

// What one rank has for a tile: how its values are written, and where. In shared memory.
struct RankTile {
    const u32* values;
    Payload* payload;
    Coding coding;
    u32 begin;     // bits of `values` before the tile's
    u32 largest;   // no code is larger, or no magnitude
    u32 n_listed;  // the tile's, or NO_LIST
};
constexpr u32 HELD = 160;    // words of values that are copied there, if they are no more
constexpr u32 LISTED = 512;  // values whose places are listed, if they are no more
constexpr u32 NO_LIST = ALL_LANES;

// Which places of a tile have values. `before`: how many of them stand before those of a word.
template <u32 C>
union Places {
    struct {
        u32 words[WORDS_OF_REALS / C];
        u16 before[WORDS_OF_REALS / C];
    } bits;
    u16 list[LISTED];
};

// The same of as many ranks as there are warps.
template <u32 C>
struct RankTiles {
    RankTile of[WARPS];
    u32 held[WARPS][HELD];
    Places<C> places[WARPS];
};
static_assert(sizeof(RankTiles<1>) == 13696 && sizeof(RankTiles<2>) == 13696,
              "tables.py has their size");

__device__ __forceinline__ u32 largest_code(const Arriving& tensor, const Coding& coding,
                                            u32 scale) {
    if (coding.kind == RANGE) return 2 * coding.levels + (coding.grid >> 31) - 1;
    if (coding.kind == STEPS) return tensor.largest;
    if (coding.kind == FLOAT32) return scale;
    return min((scale + 0x8000u) & 0x7fff0000u, 0x7f7f0000u);
}

// Finds the `count` places of a tile that travel as offsets, by one warp: lists them, or sets their
// bits.
template <u32 C>
__device__ __forceinline__ void find_places(const Offsets& from, u32 low_bits, const Start& start,
                                            Places<C>& places) {
    u32 lane = threadIdx.x % 32, n = 0, count = start.count, first = ~start.not_first;
    u64 begin = ~start.not_begin;
    auto place_of = [&](u64 bit, u32 i) {
        u64 number = u64(first) + i;
        u32 offset = get_bits(from.stream, from.offsets + number * low_bits, low_bits);
        return u32(((bit - number) << low_bits | offset) % (TILE / C));
    };
    for (u32 i = lane; count > LISTED && i < WORDS_OF_REALS / C; i += 32) places.bits.words[i] = 0;
    __syncwarp();
    for (u64 at = begin; n < count && at < from.n_bits;) {
        u32 words = bits_before(from.stream, at + 32 * lane, from.n_bits);
        for (u32 i = 0; i < 32 && n < count; i++, at += 32) {
            u32 ones = __shfl_sync(ALL_LANES, words, i);
            u32 own = n + __popc(ones & ((1u << lane) - 1));
            n += __popc(ones);
            if (!(ones >> lane & 1) || own >= count) continue;
            if (count <= LISTED) {
                places.list[own] = u16(at + lane - begin);
            } else {
                u32 place = place_of(at + lane, own);
                atomicOr(&places.bits.words[place / 32], 1u << place % 32);
            }
        }
    }
    __syncwarp();
    for (u32 i = lane; count <= LISTED && i < count; i += 32)
        places.list[i] = u16(place_of(begin + places.list[i], i));
}

// Reads what a rank has for a tile, by one warp. False of a payload that is not sound: then it has
// nothing.
template <u32 C>
__device__ __forceinline__ bool read_part(const Messages& messages, const Arriving& tensor,
                                          Payload* payload, u32 rank, u32 tile,
                                          RankTiles<C>& parts) {
    constexpr u32 WORDS = WORDS_OF_REALS / C, OWN = WORDS / 32;
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, words[OWN], before = 0, count = 0;
    Places<C>& places = parts.places[warp];
    bool sound = __shfl_sync(ALL_LANES, lane ? 0 : latest(&payload->status), 0) == SOUND;
    bool by_offsets = tensor.layout == OFFSETS;
    u64 there = u64(part_of(messages, rank)) * tensor.n_tiles + tile;
    u32 first = sound && !by_offsets ? tensor.ranks[there] : 0, scale = payload->scale;
    if (by_offsets && sound) {
        const Start start = tensor.starts[there];
        count = start.count;
        first = ~start.not_first;
        if (count) find_places(offsets_of(messages, tensor, rank), tensor.low_bits, start, places);
        __syncwarp();
    }
    if (!by_offsets || count > LISTED) {
        const u32* bitmap = by_offsets ? places.bits.words : tensor.bitmaps + there * WORDS;
#pragma unroll
        for (u32 own = 0; own < OWN; own++) {
            words[own] = sound ? bitmap[OWN * lane + own] : 0;
            before += __popc(words[own]);
        }
        u32 up_to = warp_inclusive_sum(before);
        count = __shfl_sync(ALL_LANES, up_to, 31);
        before = up_to - before;
#pragma unroll
        for (u32 own = 0; own < OWN; own++) {
            u32 word = OWN * lane + own;
            if (count > LISTED) {
                places.bits.words[word] = words[own];
                places.bits.before[word] = u16(before);
                before += __popc(words[own]);
            } else {
                for (u32 ones = words[own]; ones; ones &= ones - 1)
                    places.list[before++] = u16(32 * word + __popc((ones & (0u - ones)) - 1));
            }
        }
    }
    if (!count) {
        if (lane == 0) parts.of[warp].n_listed = 0;
        return sound;
    }
    RankTile part = {};
    part.payload = payload;
    const u8* message = payload_of(messages, tensor, rank);
    u32 grid = reinterpret_cast<const u32*>(message)[GRID_OFFSET / 4];
    part.coding = coding_of(tensor.kind, tensor.bits, tensor.step, 0, scale, grid);
    part.largest = largest_code(tensor, part.coding, scale);
    part.n_listed = count > LISTED ? NO_LIST : count;
    u64 begin = u64(C) * first * part.coding.bits;
    part.values = reinterpret_cast<const u32*>(message + tensor.values_offset) + begin / 32;
    part.begin = u32(begin % 32);
    u32 n_words = (part.begin + C * count * part.coding.bits + 31) / 32;
    if (n_words <= HELD) {
        for (u32 i = lane; i < n_words; i += 32) parts.held[warp][i] = part.values[i];
        part.values = parts.held[warp];
    }
    if (lane == 0) parts.of[warp] = part;
    return sound;
}

// Adds the value of a tile's place; false, and a note, where no payload can have it. `number`: values
// of the tile before.
template <u32 C>
__device__ __forceinline__ bool add_value(const RankTile& part, const Coding& coding, u32 number,
                                          u32 place, float* sum) {
    bool of_codes = coding.kind == RANGE || coding.kind == STEPS, sound = true;
    u32 at = part.begin + C * number * coding.bits;
#pragma unroll
    for (u32 c = 0; c < C; c++, at += coding.bits) {
        u32 code = get_bits(part.values, at, coding.bits);
        float value = decode_value(coding, code);
        sound = sound && (of_codes ? code : magnitude(value)) <= part.largest;
        float* total = &sum[float_slot(C * place + c)];
        *total = add_rn(*total, value);
    }
    if (!sound) note_corrupt(part.payload);
    return sound;
}

// Adds a tile's values of all ranks, in their order, to zeros in shared memory; false where one
// of the payloads is not sound. Of many values in a tile a thread has the same places of all ranks.
// `rows`: the tensor's first.
template <u32 C>
__device__ __forceinline__ bool add_values(const Messages& messages, const Arriving* rows,
                                           Payload* payloads, u32 number, u32 tile, float* sum,
                                           u32* flag, RankTiles<C>& parts) {
    constexpr u32 OWN = TILE / C / THREADS;  // bits of a thread
    u32 word = threadIdx.x * OWN / 32, shift = threadIdx.x * OWN % 32;
    bool sound = true;
    for (u32 i = threadIdx.x; i < TILE; i += THREADS) sum[float_slot(i)] = 0.0f;
    if (threadIdx.x == 0) *flag = 0;
    for (u32 begin = 0; begin < messages.n_ranks; begin += WARPS) {
        __syncthreads();
        u32 n = min(WARPS, messages.n_ranks - begin), rank = begin + threadIdx.x / 32;
        if (rank < messages.n_ranks) {
            Payload* payload = payloads + rank * messages.n_tensors + number;
            const Arriving& tensor = rows[rank * messages.rows_apart];
            if (!read_part<C>(messages, tensor, payload, rank, tile, parts)) sound = false;
        }
        __syncthreads();
        for (u32 i = 0; i < n; i++) {
            const RankTile& part = parts.of[i];
            const Places<C>& places = parts.places[i];
            const Coding coding = part.coding;
            u32 n_listed = part.n_listed;
            // Other threads have had these places of the rank before.
            if (i && (n_listed != NO_LIST || parts.of[i - 1].n_listed != NO_LIST)) __syncthreads();
            if (n_listed != NO_LIST) {
                for (u32 j = threadIdx.x; j < n_listed; j += THREADS)
                    sound &= add_value<C>(part, coding, j, places.list[j], sum);
                continue;
            }
            u32 of_word = places.bits.words[word];
            u32 ones = of_word >> shift & ((1u << OWN) - 1);
            u32 j = places.bits.before[word] + __popc(of_word & ((1u << shift) - 1));
            for (; ones; ones &= ones - 1, j++) {
                u32 place = threadIdx.x * OWN + __popc((ones & (0u - ones)) - 1);
                sound &= add_value<C>(part, coding, j, place, sum);
            }
        }
    }
    if (!sound) atomicOr(flag, 1u);
    __syncthreads();
    return *flag == 0;
}

enum Domain : u32 { ELEMENTS, SPECTRA, COSINES };

// The sum of a tile's values and its inverse transform. `not_finite`: a word for each tensor,
// zeros before; becomes 1 where a payload is not sound or the sum is not finite.
template <u32 L, u32 DOMAIN>
__global__ void __launch_bounds__(THREADS, DOMAIN == COSINES ? 3 : RESIDENT)
    sum_payloads(const Messages* __restrict__ messages_at, const Arriving* __restrict__ tensors,
                 Payload* payloads, const u32* __restrict__ tile_tensor,
                 u32* not_finite, const float2* __restrict__ roots,
                 const float2* __restrict__ cosines) {
    Messages messages = *messages_at;
    if (DOMAIN != ELEMENTS) messages.rows_apart = 0;  // known while compiling: fewer registers
    constexpr u32 C = DOMAIN == SPECTRA ? 2 : 1, M = L / 2, OWN = POINTS / THREADS;
    SHARED_MEMORY(memory);
    float2* points = reinterpret_cast<float2*>(memory);
    float* floats = reinterpret_cast<float*>(memory);
    u32* flag = reinterpret_cast<u32*>(memory + POINTS_NBYTES);
    RankTiles<C>& parts = *reinterpret_cast<RankTiles<C>*>(memory + POINTS_NBYTES + 16);
    u32 number = tile_tensor[blockIdx.x];
    const Arriving tensor = tensors[number];
    u32 own_tile = blockIdx.x - tensor.first_tile;
    const Arriving* rows = tensors + number;
    bool sound = add_values<C>(messages, rows, payloads, number, own_tile, floats, flag, parts);
    if constexpr (DOMAIN != ELEMENTS) {
        float2 z[OWN];
#pragma unroll
        for (u32 own = 0; own < OWN; own++) {
            u32 bin = threadIdx.x + own * THREADS, k = bin % M, first = bin - k;
            float2 x, mirror;
            if (DOMAIN == SPECTRA) {
                x = points[slot(bin)];
                mirror = conjugate(points[slot(first + (M - k) % M)]);
            } else {
                // Bins k and M - k of the real transform, from two coefficients each.
                u32 of = first / M * L, m = M - k;
                float a = floats[float_slot(of + k)], b = floats[float_slot(of + (L - k) % L)];
                float2 w = cosines[k];
                x = make_float2(mul_rn(0.5f, fma_rn(a, w.x, mul_rn(b, w.y))),
                                mul_rn(0.5f, fma_rn(a, w.y, negated(mul_rn(b, w.x)))));
                float c = floats[float_slot(of + m)], d = floats[float_slot(of + L - m)];
                float2 v = cosines[m % M];
                mirror = make_float2(mul_rn(0.5f, fma_rn(c, v.x, mul_rn(d, v.y))),
                                     negated(mul_rn(0.5f, fma_rn(c, v.y, negated(mul_rn(d, v.x))))));
                if (k == 0) x = make_float2(a, c);
            }
            float2 odd = turned<true>(times(minus(x, mirror), conjugate(roots[k])));
            z[own] = plus(plus(x, mirror), odd);
            if (k == 0) z[own] = make_float2(add_rn(x.x, x.y), sub_rn(x.x, x.y));
        }
        __syncthreads();
#pragma unroll
        for (u32 own = 0; own < OWN; own++) points[slot(threadIdx.x + own * THREADS)] = z[own];
        __syncthreads();
        all_passes<M, 1, true>(points, roots);
    }
    bool finite = sound;
    u64 begin = u64(own_tile) * TILE;
    for (u32 i = threadIdx.x; i < TILE; i += THREADS) {
        u32 place = DOMAIN == COSINES ? i / L * L + dct_place<L>(i % L) : i;
        float element = sound ? floats[float_slot(place)] : __uint_as_float(NAN_BITS);
        if (begin + i >= tensor.numel) break;
        finite = finite && magnitude(element) <= LARGEST_FINITE_BITS;
        tensor.sum[begin + i] = element;
    }
    if (!finite) atomicOr(&not_finite[number], 1u);
}

// The sum of tensors that travel as they are.
__global__ void __launch_bounds__(THREADS, RESIDENT)
    sum_raw(const Messages* __restrict__ messages_at, const Arriving* __restrict__ tensors,
            Payload* payloads, const u32* __restrict__ tile_tensor, u32* not_finite) {
    const Messages messages = *messages_at;
    u32 number = tile_tensor[blockIdx.x];
    const Arriving tensor = tensors[number];
    u64 begin = u64(blockIdx.x - tensor.first_tile) * TILE;
    u32 n = u32(min(u64(TILE), tensor.numel - begin));
    bool finite = true;
    for (u32 i = threadIdx.x; i < n; i += THREADS) {
        float sum = 0.0f;
        for (u32 rank = 0; rank < messages.n_ranks; rank++) {
            Payload* payload = payloads + rank * messages.n_tensors + number;
            const float* values = reinterpret_cast<const float*>(
                payload_of(messages, tensor, rank) + tensor.values_offset);
            bool sound = latest(&payload->status) == SOUND;
            if (sound && magnitude(values[begin + i]) > payload->scale) {
                note_corrupt(payload);
                sound = false;
            }
            sum = add_rn(sum, sound ? values[begin + i] : __uint_as_float(NAN_BITS));
        }
        finite = finite && magnitude(sum) <= LARGEST_FINITE_BITS;
        tensor.sum[begin + i] = sum;
    }
    if (!finite) atomicOr(&not_finite[number], 1u);
}

// Leaves of each sum its sign, times the number of ranks; 0 of a 0.
__global__ void __launch_bounds__(THREADS)
    majority_sign(const Messages* __restrict__ messages_at, const Arriving* __restrict__ tensors,
                  const u32* __restrict__ tile_tensor) {
    const Messages messages = *messages_at;
    const Arriving tensor = tensors[tile_tensor[blockIdx.x]];
    float many = float(messages.n_ranks);
    u64 begin = u64(blockIdx.x - tensor.first_tile) * TILE, end = min(begin + TILE, tensor.numel);
    for (u64 i = begin + threadIdx.x; i < end; i += THREADS) {
        float sum = tensor.sum[i];
        float sign = !magnitude(sum) ? 0.0f : is_negative(sum) ? negated(many) : many;
        tensor.sum[i] = magnitude(sum) > INFINITY_BITS ? sum : sign;  // NaN stays
    }
}
