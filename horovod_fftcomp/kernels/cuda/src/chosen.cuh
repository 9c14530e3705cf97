// Selection of elements whose number depends on the values: by a threshold, by bins or at random;
// see codec/adaptive.py.

enum Choice : u32 { ABOVE, WINNERS, DRAWN };

// The first launch but of a threshold: gradient plus residual, its peak, and the maxima of bins,
// which are zeros before.
__global__ void __launch_bounds__(THREADS, RESIDENT)
    add_up(const Tensor* __restrict__ tensors, const u32* __restrict__ tile_tensor,
           Found* all_found) {
    const Tensor tensor = tensors[tile_tensor[blockIdx.x]];
    u64 begin = u64(blockIdx.x - tensor.first_tile) * TILE;
    u32 peak = 0, lane = threadIdx.x % 32;
    for (u32 i = threadIdx.x; i < TILE; i += THREADS) {
        u64 place = begin + i;
        u32 size = 0;
        if (place < tensor.n) {
            float sum = with_residual(tensor, place, tensor.grad[place]);
            tensor.coeffs[place] = sum;
            size = magnitude(sum);
        }
        peak = max(peak, size);
        if (!tensor.maxima) continue;
        // A warp's lanes are in one bin or in a few: each bin's first lane brings the largest.
        u32 bin = u32(place / tensor.bin);
#pragma unroll
        for (u32 by = 1; by < 32; by *= 2) {
            u32 other = __shfl_down_sync(ALL_LANES, size, by);
            u32 other_bin = __shfl_down_sync(ALL_LANES, bin, by);
            if (lane + by < 32 && other_bin == bin) size = max(size, other);
        }
        u32 before = __shfl_up_sync(ALL_LANES, bin, 1);
        if (place < tensor.n && (lane == 0 || before != bin)) atomicMax(&tensor.maxima[bin], size);
    }
#pragma unroll
    for (u32 by = 16; by; by /= 2) peak = max(peak, __shfl_xor_sync(ALL_LANES, peak, by));
    if (lane == 0) atomicMax(&all_found[tile_tensor[blockIdx.x]].peak, peak);
}

// Magnitudes below a limit; those of at least that much become -1.
struct Below {
    const float* values;
    u32 limit;

    __device__ __forceinline__ float operator[](u64 i) const {
        u32 size = magnitude(values[i]);
        return size < limit ? __uint_as_float(size) : -1.0f;
    }
};

// A warp for each tile of one tensor: the sum of what is below the limit, and the count of the rest.
__global__ void __launch_bounds__(32)
    sums_below(const float* __restrict__ values, u64 n, u32 limit, Part* parts) {
    u64 begin = u64(blockIdx.x) * TILE;
    const Below below = {values, limit};
    Part part = sums_between<false>(below, begin, min(begin + TILE, n));
    if (threadIdx.x == 0) parts[blockIdx.x] = part;
}

// The last launch before `emit`: a bit for each element, and how many are chosen. `limits`: of draws,
// for each tensor what is drawn for certain. `totals`: for each tensor how many are chosen, and the
// bits of the peak. A threshold has had no launch before.
template <u32 CHOICE>
__global__ void __launch_bounds__(THREADS, RESIDENT)
    choose(const Tensor* __restrict__ tensors, const u32* __restrict__ tile_tensor,
           Found* all_found, u32* above, RowCounts* rows, u32* totals,
           const u32* __restrict__ limits) {
    SHARED_MEMORY(memory);
    u32* sums = reinterpret_cast<u32*>(memory);  // 33, a flag, the peak, and the rows' counts
    u32 number = tile_tensor[blockIdx.x];
    const Tensor tensor = tensors[number];
    Found* found = all_found + number;
    if (threadIdx.x <= ROWS_OF_REALS) sums[34 + threadIdx.x] = 0;
    __syncthreads();
    u64 tile = blockIdx.x - tensor.first_tile, begin = tile * TILE;
    const Draws draws(tensor.key, tile);
    double factor = CHOICE == DRAWN ? 4294967296.0 / widened(__uint_as_float(limits[number])) : 0;
    u32 peak = 0;
    for (u32 i = threadIdx.x; i < TILE; i += THREADS) {
        u64 place = begin + i;
        bool chosen = false;
        if (place < tensor.n && CHOICE == ABOVE) {
            float sum = with_residual(tensor, place, tensor.grad[place]);
            tensor.coeffs[place] = sum;
            peak = max(peak, magnitude(sum));
            chosen = magnitude(sum) >= tensor.threshold;
        } else if (place < tensor.n && CHOICE == WINNERS) {
            u32 limit = tensor.maxima[place / tensor.bin];
            chosen = limit && magnitude(add_rn(tensor.coeffs[place], tensor.grad[place])) >= limit;
        } else if (place < tensor.n) {
            float size = __uint_as_float(magnitude(tensor.coeffs[place]));
            chosen = double(draws[i]) < widened(size) * factor;
        }
        u32 word = __ballot_sync(ALL_LANES, chosen);
        if (threadIdx.x % 32 == 0) {
            above[u64(blockIdx.x) * WORDS_OF_REALS + i / 32] = word;
            atomicAdd(&sums[35 + i / 1024], u32(__popc(word)));
        }
    }
    atomicMax(&sums[34], peak);
    __syncthreads();
    if (threadIdx.x < ROWS_OF_REALS) {
        RowCounts* row = rows + blockIdx.x * ROWS_OF_REALS + threadIdx.x;
        row->above = sums[35 + threadIdx.x];
        row->equal = 0;
    }
    if (threadIdx.x == 0) atomicMax(&found->peak, sums[34]);
    if (!is_last(&found->ticket, tensor.n_tiles, &sums[33])) return;
    if (threadIdx.x == 0) found->need = 0;  // no ties
    __syncthreads();
    RowCounts* first = rows + ROWS_OF_REALS * tensor.first_tile;
    u32 k = rank_rows(found, first, ROWS_OF_REALS * tensor.n_tiles, sums);
    if (threadIdx.x == 0) {
        totals[2 * number] = k;
        totals[2 * number + 1] = atomicMax(&found->peak, 0u);
    }
}
