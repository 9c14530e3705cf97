// Headers of payloads. The host knows all fields except the scale, the grid and the flag for
// non-finite values. The checksum is linear: each of these 65 bits, if set, XORs a known word
// into it.

constexpr u32 FLAGS_OFFSET = 5, SCALE_OFFSET = 32, GRID_OFFSET = 36, CRC_OFFSET = 40;  // see wire.py
constexpr u32 NOT_FINITE = 1, NAN_BITS = 0x7fc00000u;

struct Header {
    u8* payload;
    const u8* start;          // as wire.py writes it for scale 0 and a finite gradient
    const u32* crc_of_values;  // how each bit of the scale, the grid and then the flag changes the
                               // checksum; null if `start` is all of the header
    u64 nbytes;
};
static_assert(sizeof(Header) == 32, "structs.py describes headers with the same layout");

// Returns what bit `lane` of the scale and of the grid change of the checksum.
__device__ __forceinline__ u32 change_of_bits(const u32* table, u32 lane, u32 scale, u32 grid) {
    return (scale >> lane & 1 ? table[lane] : 0) ^ (grid >> lane & 1 ? table[32 + lane] : 0);
}

// One warp for each tensor. `not_finite`: one word for each; and the peak begins anew. A payload that
// would have overflowed gets a wrong checksum, so that all ranks find it corrupt.
__global__ void __launch_bounds__(32)
    write_header(const Header* __restrict__ headers, Found* all_found, u32* not_finite) {
    const Header header = headers[blockIdx.x];
    Found* found = all_found + blockIdx.x;
    u32 lane = threadIdx.x;
    for (u64 i = lane; i < header.nbytes; i += 32) header.payload[i] = header.start[i];
    u32 peak = found->peak;
    bool finite = peak <= LARGEST_FINITE_BITS;
    u32 scale = finite ? peak : NAN_BITS;
    bool changes = header.crc_of_values != nullptr;
    u32 grid = finite ? found->grid : 0;
    u32 change = changes ? change_of_bits(header.crc_of_values, lane, scale, grid) : 0;
    if (lane == 0 && changes && !finite) change ^= header.crc_of_values[64];
#pragma unroll
    for (u32 by = 16; by; by /= 2) change ^= __shfl_xor_sync(ALL_LANES, change, by);
    __syncwarp();
    if (lane == 0) {
        u32* words = reinterpret_cast<u32*>(header.payload);
        if (changes) words[SCALE_OFFSET / 4] = scale, words[GRID_OFFSET / 4] = grid;
        words[CRC_OFFSET / 4] ^= found->overflow ? ~change : change;
        if (changes && !finite) header.payload[FLAGS_OFFSET] |= NOT_FINITE;
        not_finite[blockIdx.x] = !finite;
        found->peak = found->grid = found->overflow = 0;
    }
}
