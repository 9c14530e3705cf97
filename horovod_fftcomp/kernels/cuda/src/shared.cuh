// Values at positions common to all ranks (schemes/common_index.py): drawn from a shared seed, or
// the largest of each chunk on the rank that leads there. Their sums need no payload; the
// positions of a step are computed where they are used.

constexpr u32 GROUP = THREADS;  // positions of a block

// One tensor as the host describes it.
struct Shared {
    const float* grad;      // n
    const float* residual;  // n; null if there is none
    float* left;            // n: what the step leaves unsent; null if nothing is kept
    float* wanted;          // n: gradient plus residual, less what is sent; null if not measured
    float* share;           // k: its part of a message
    float* sum;             // n
    u32* own;               // this rank's choice: offsets in chunks, packed; zeros before
    const u32* chosen;      // those that count: a message of each rank
    u64 n, k;               // below 2^32
    u64 factor, first;      // of drawn positions; else chunks of a part, and of tensors before
    u32 first_tile, n_tiles;    // of n
    u32 first_group, n_groups;  // of k
    u32 chunk, bits;        // elements of a chunk, 0 where positions are drawn; of an offset
    u32 beta, rest, gain;   // as float bits: the low-pass filter, 1 less it, and n/k; gain 0: none
    u32 message_words;      // of a rank's offsets
    u32 n_ranks, unused;
};
static_assert(sizeof(Shared) == 144, "structs.py describes shared values with the same layout");

// Returns the offset of the winner in a tensor's chunk. `turn`: rank `r` leads in part `r + turn`.
__device__ __forceinline__ u32 offset_of(const Shared& part, u64 j, u32 turn) {
    if (!part.bits) return 0;
    u64 chunk = part.first + j;
    u32 leader = u32((chunk / part.factor + part.n_ranks - turn) % part.n_ranks);
    const u32* packed = part.chosen + u64(leader) * part.message_words;
    return get_bits(packed, chunk % part.factor * part.bits, part.bits);
}

// Returns a place inside of the tensor, whatever has arrived.
__device__ __forceinline__ u64 position_of(const Shared& part, u64 j, u32 turn) {
    if (part.chunk == 0) return (part.factor * j + part.first) % part.n;
    return min(j * part.chunk + offset_of(part, j, turn), part.n - 1);
}

__device__ __forceinline__ float with_residual(const Shared& part, u64 place) {
    float value = part.grad[place];
    return part.residual ? add_rn(value, part.residual[place]) : value;
}

// The largest of each chunk from `first` to `last` of the bucket's, ties by position; a warp for one
// chunk after another.
__global__ void __launch_bounds__(THREADS)
    choose_winners(const Shared* __restrict__ parts, const u32* __restrict__ group_part, u64 first,
                   u64 last) {
    const Shared part = parts[group_part[blockIdx.x]];
    u32 lane = threadIdx.x % 32;
    u64 begin = u64(blockIdx.x - part.first_group) * GROUP + threadIdx.x / 32 * 32;
    u64 end = min(begin + 32, part.k);
    for (u64 j = begin; j < end; j++) {
        u64 chunk = part.first + j;
        if (chunk < first || chunk >= last) continue;
        u32 n = u32(min(u64(part.chunk), part.n - j * part.chunk)), best = 0, at = ALL_LANES;
        for (u32 i = lane; i < n; i += 32) {
            u32 key = magnitude(with_residual(part, j * part.chunk + i));
            if (at == ALL_LANES || key > best) {
                best = key;
                at = i;
            }
        }
#pragma unroll
        for (u32 by = 16; by; by /= 2) {
            u32 other = __shfl_xor_sync(ALL_LANES, best, by);
            u32 there = __shfl_xor_sync(ALL_LANES, at, by);
            if (other > best || (other == best && there < at)) {
                best = other;
                at = there;
            }
        }
        if (lane == 0 && part.bits)
            put_bits(part.own, (chunk - first) * part.bits, at, part.bits);
    }
}

// In how many chunks, but for those from `first` to `last`, this rank's choice is the leader's.
__global__ void __launch_bounds__(THREADS)
    count_common(const Shared* __restrict__ parts, const u32* __restrict__ group_part, u64 first,
                 u64 last, u32 turn, u32* common) {
    const Shared part = parts[group_part[blockIdx.x]];
    u64 j = u64(blockIdx.x - part.first_group) * GROUP + threadIdx.x, chunk = part.first + j;
    bool same = j < part.k && (chunk < first || chunk >= last);
    if (same && part.bits)
        same = get_bits(part.own, chunk * part.bits, part.bits) == offset_of(part, j, turn);
    u32 found = __popc(__ballot_sync(ALL_LANES, same));
    if (threadIdx.x % 32 == 0) atomicAdd(common, found);
}

// What would be left if nothing were sent, through the filter; each tensor's peak, zeros before.
__global__ void __launch_bounds__(THREADS, RESIDENT)
    filter_low(const Shared* __restrict__ parts, const u32* __restrict__ tile_part, u32* peaks) {
    const Shared part = parts[tile_part[blockIdx.x]];
    u64 begin = u64(blockIdx.x - part.first_tile) * TILE;
    u32 n = u32(min(u64(TILE), part.n - begin)), peak = 0;
    for (u32 i = threadIdx.x; i < n; i += THREADS) {
        float value = with_residual(part, begin + i);
        peak = max(peak, magnitude(value));
        if (part.wanted) part.wanted[begin + i] = value;
        if (!part.left) continue;
        float passed = mul_rn(__uint_as_float(part.beta), part.grad[begin + i]);
        part.left[begin + i] = part.residual ? add_rn(part.residual[begin + i], passed) : passed;
    }
#pragma unroll
    for (u32 by = 16; by; by /= 2) peak = max(peak, __shfl_xor_sync(ALL_LANES, peak, by));
    if (threadIdx.x % 32 == 0) atomicMax(&peaks[tile_part[blockIdx.x]], peak);
}

// The values to send, NaN where the tensor is not finite; takes them off what is left. An offset
// beyond its chunk is noted as a corrupt payload.
__global__ void __launch_bounds__(THREADS)
    take_shares(const Shared* __restrict__ parts, const u32* __restrict__ group_part, u32 turn,
                const u32* __restrict__ peaks, Payload* payloads) {
    u32 number = group_part[blockIdx.x];
    const Shared part = parts[number];
    u64 j = u64(blockIdx.x - part.first_group) * GROUP + threadIdx.x;
    if (j >= part.k) return;
    u64 place = position_of(part, j, turn);
    u64 room = part.n - j * part.chunk;
    bool corrupt = part.chunk && offset_of(part, j, turn) >= min(u64(part.chunk), room);
    part.share[j] = __uint_as_float(NAN_BITS);
    if (corrupt) note_corrupt(payloads + number);
    if (corrupt || peaks[number] > LARGEST_FINITE_BITS) return;
    float value = with_residual(part, place);
    if (part.gain) value = mul_rn(value, __uint_as_float(part.gain));
    part.share[j] = value;
    if (part.wanted) part.wanted[place] = sub_rn(part.wanted[place], value);
    if (!part.left) return;
    float held = part.residual ? part.residual[place] : 0.0f;
    part.left[place] = add_rn(0.0f, mul_rn(__uint_as_float(part.rest), held));
}

// Raises a tensor's flag where a share that came is not finite.
__global__ void __launch_bounds__(THREADS)
    check_shares(const Shared* __restrict__ parts, const u32* __restrict__ group_part,
                 u32* not_finite) {
    const Shared part = parts[group_part[blockIdx.x]];
    u64 j = u64(blockIdx.x - part.first_group) * GROUP + threadIdx.x;
    bool bad = j < part.k && magnitude(part.share[j]) > LARGEST_FINITE_BITS;
    if (bad) atomicOr(&not_finite[group_part[blockIdx.x]], 1u);
}

// Sums before anything is added; NaN everywhere where a flag is raised, so that nobody takes a step
// with the rest.
__global__ void __launch_bounds__(THREADS, RESIDENT)
    clear_sums(const Shared* __restrict__ parts, const u32* __restrict__ tile_part,
               const u32* __restrict__ not_finite) {
    const Shared part = parts[tile_part[blockIdx.x]];
    u64 begin = u64(blockIdx.x - part.first_tile) * TILE;
    u32 n = u32(min(u64(TILE), part.n - begin));
    float value = not_finite[tile_part[blockIdx.x]] ? __uint_as_float(NAN_BITS) : 0.0f;
    for (u32 i = threadIdx.x; i < n; i += THREADS) part.sum[begin + i] = value;
}

// Adds the shares of one message, in which no position comes twice.
__global__ void __launch_bounds__(THREADS)
    add_shares(const Shared* __restrict__ parts, const u32* __restrict__ group_part, u32 turn,
               const u32* __restrict__ not_finite) {
    const Shared part = parts[group_part[blockIdx.x]];
    u64 j = u64(blockIdx.x - part.first_group) * GROUP + threadIdx.x;
    if (j >= part.k || not_finite[group_part[blockIdx.x]]) return;
    u64 place = position_of(part, j, turn);
    part.sum[place] = add_rn(part.sum[place], part.share[j]);
}
