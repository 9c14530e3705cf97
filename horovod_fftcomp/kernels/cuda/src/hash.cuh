// Hashes of tensors that should be equal on all ranks; see monitor/parameter_hash.py. Each lane is
// a serial chain, so one block of lanes hashes a tensor; loads run ahead of the chains.

constexpr u32 LANES_OF_HASH = 64;
constexpr u64 WORD_PRIME = 0xC2B2AE3D27D4EB4Full, HASH_PRIME = 0x9E3779B185EBCA87ull;

struct Hashed {
    const u8* bytes;  // 8-byte aligned
    u64 nbytes;
};
static_assert(sizeof(Hashed) == 16, "structs.py describes hashed arrays with the same layout");

__device__ __forceinline__ u64 taken_in(u64 hash, u64 word) {
    u64 mixed = hash + word * WORD_PRIME;
    return (mixed << 31 | mixed >> 33) * HASH_PRIME;
}

// A block of a thread for each lane; `hashes`: one for each array.
__global__ void __launch_bounds__(LANES_OF_HASH)
    hash_bytes(const Hashed* __restrict__ arrays, u64* hashes) {
    SHARED_MEMORY(memory);
    u64* lanes = reinterpret_cast<u64*>(memory);
    const Hashed array = arrays[blockIdx.x];
    const u64* words = reinterpret_cast<const u64*>(array.bytes);
    u64 n_whole = array.nbytes / (8 * LANES_OF_HASH) * LANES_OF_HASH;
    u64 own = (threadIdx.x + 1) * HASH_PRIME;
#pragma unroll 8
    for (u64 i = threadIdx.x; i < n_whole; i += LANES_OF_HASH) own = taken_in(own, words[i]);
    lanes[threadIdx.x] = own;
    __syncthreads();
    if (threadIdx.x) return;
    u64 hash = 0;
    for (u32 lane = 0; lane < LANES_OF_HASH; lane++) hash = taken_in(hash, lanes[lane]);
    for (u64 at = 8 * n_whole; at < array.nbytes; at += 8) {
        u64 word = 0;
        for (u32 i = 0; i < 8 && at + i < array.nbytes; i++)
            word |= u64(array.bytes[at + i]) << (8 * i);
        hash = taken_in(hash, word);
    }
    hashes[blockIdx.x] = taken_in(hash, array.nbytes);
}
