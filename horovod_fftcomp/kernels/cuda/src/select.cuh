// Exact top-k selection in each tensor, ties by position: a radix select from the top digit, 11 +
// 10 + 10 bits of a 31-bit key. Only the first digit is counted over all coefficients; from then
// on bit masks mark the coefficients above the selected digit and those equal to it.

constexpr u32 SECOND_BITS = 10, SECOND = 1u << SECOND_BITS;
constexpr u32 WORDS_OF_REALS = TILE / 32;

// Returns what a coefficient is ranked by. C floats: a real by magnitude, a complex bin by the
// energy that it stands for, after an exact scaling that keeps squares in range.
template <u32 C>
__device__ __forceinline__ u32 key_of(const float* coeff, u64 place, u32 bins_per_block,
                                      u32 scaling) {
    if (C == 1) return magnitude(coeff[0]);
    float re = coeff[0], im = coeff[C - 1];
    if (scaling) {
        re = mul_rn(re, __uint_as_float(scaling));
        im = mul_rn(im, __uint_as_float(scaling));
    }
    float energy = add_rn(mul_rn(re, re), mul_rn(im, im));
    if ((place & (bins_per_block - 1)) == 0) energy = mul_rn(energy, 0.5f);
    return magnitude(energy);  // a NaN may have a sign
}

// Returns the bits of 2^-exponent for components of this peak; 0 where squares need no scaling.
__device__ __forceinline__ u32 scaling_for(u32 peak) {
    int exponent = int(peak >> 23) - 127;
    if (exponent >= -40 && exponent < 60) return 0;
    exponent = min(max(exponent, -126), 126);
    return u32(127 - exponent) << 23;
}

// Finds the digit of the `found->need`-th largest among `n_digits` counts and makes it part of the
// prefix; clears the counts. All threads of a block; `sums`: 33 words of shared memory.
__device__ __forceinline__ void choose_digit(Found* found, u32 n_digits, u32* sums) {
    volatile u32* counts = found->counts;
    u32 need = found->need, own = n_digits / blockDim.x, mine = 0, total;
    u32 top = n_digits - 1 - threadIdx.x * own;  // digits fall from thread to thread
    for (u32 i = 0; i < own; i++) mine += counts[top - i];
    u32 before = block_exclusive_sum(mine, sums, total);
    __syncthreads();  // all have read `need`
    for (u32 i = 0; i < own; i++) {
        u32 count = counts[top - i];
        counts[top - i] = 0;
        if (before < need && need <= before + count) {
            found->prefix = found->prefix * n_digits + (top - i);
            found->need = need - before;
        }
        before += count;
    }
    __syncthreads();
}

// Ends the first launch: from the peak and the counts of first digits follows where the k-th
// largest key lies. `digits`: RADIX words of shared memory, `sums`: 33.
template <u32 C>
__device__ void choose_first_digit(const Tensor& tensor, Found* found, u32* digits, u32* sums) {
    u32 scaling = C == 2 ? scaling_for(found->peak) : 0;
    if (scaling && found->peak <= LARGEST_FINITE_BITS) {
        // So seldom that one block may count again: gradients below 2^-40 or above 2^60.
        for (u32 i = threadIdx.x; i < RADIX; i += blockDim.x) digits[i] = 0;
        __syncthreads();
        for (u64 i = threadIdx.x; i < tensor.n; i += blockDim.x) {
            u32 key = key_of<C>(tensor.coeffs + C * i, i, tensor.bins_per_block, scaling);
            atomicAdd(&digits[key >> (31 - RADIX_BITS)], 1u);
        }
        __syncthreads();
        for (u32 i = threadIdx.x; i < RADIX; i += blockDim.x) found->counts[i] = digits[i];
    }
    if (threadIdx.x == 0) {
        found->exponent = scaling;
        found->prefix = 0;
        found->need = u32(tensor.k);
    }
    __syncthreads();
    choose_digit(found, RADIX, sums);
}

__device__ __forceinline__ void flush_counts(Found* found, const u32* digits, u32 n_digits) {
    for (u32 i = threadIdx.x; i < n_digits; i += blockDim.x)
        if (digits[i]) atomicAdd(&found->counts[i], digits[i]);
}

// What the first launch counts of a tile: it makes coefficients, of gradient plus residual.
struct Tally {
    u32* digits;  // RADIX words of shared memory
    u32* sums;    // 33, a flag, and the peak
    u32 peak;     // of this thread
};

__device__ __forceinline__ Tally begin_tally(unsigned char* memory) {
    Tally tally = {reinterpret_cast<u32*>(memory), reinterpret_cast<u32*>(memory) + RADIX, 0};
    for (u32 i = threadIdx.x; i < RADIX; i += blockDim.x) tally.digits[i] = 0;
    if (threadIdx.x == 0) tally.sums[34] = 0;
    return tally;  // the caller synchronises before it tallies
}

// Adds the residual to a coefficient, C floats, and stores and counts it.
template <u32 C>
__device__ __forceinline__ void tally_coeff(const Tensor& tensor, u64 place, const float* coeff,
                                            const float* residual, Tally& tally) {
    float sum[C];
#pragma unroll
    for (u32 c = 0; c < C; c++) {
        sum[c] = plus_residual(tensor, coeff[c], residual[c]);
        tensor.coeffs[C * place + c] = sum[c];
        tally.peak = max(tally.peak, magnitude(sum[c]));
    }
    u32 key = key_of<C>(sum, place, tensor.bins_per_block, 0);
    atomicAdd(&tally.digits[key >> (31 - RADIX_BITS)], 1u);
}

template <u32 C>
__device__ __forceinline__ void end_tally(const Tensor& tensor, Found* found, Tally& tally) {
    atomicMax(&tally.sums[34], tally.peak);
    __syncthreads();
    flush_counts(found, tally.digits, RADIX);
    if (threadIdx.x == 0) atomicMax(&found->peak, tally.sums[34]);
    if (is_last(&found->ticket, tensor.n_tiles, &tally.sums[33]))
        choose_first_digit<C>(tensor, found, tally.digits, tally.sums);
}

// Returns what a velocity adds to what is not sent yet; the velocity moves on.
__device__ __forceinline__ float accelerate(const Tensor& tensor, u64 place, float gradient) {
    float velocity = tensor.velocity ? tensor.velocity[place] : 0.0f;
    float momentum = __uint_as_float(tensor.momentum);
    if (tensor.factor) gradient = mul_rn(*tensor.factor, gradient);
    bool nesterov = tensor.how & NESTEROV;
    float moved = nesterov ? mul_rn(momentum, add_rn(velocity, gradient))
                           : add_rn(mul_rn(momentum, velocity), gradient);
    tensor.moved[place] = moved;
    float added = nesterov ? add_rn(moved, gradient) : moved;
    return tensor.residual ? added : add_rn(0.0f, added);  // of -0 that is 0
}

// The first launch where no transform is made.
__global__ void __launch_bounds__(THREADS, RESIDENT)
    add_residual(const Tensor* __restrict__ tensors, const u32* __restrict__ tile_tensor,
                 Found* all_found) {
    SHARED_MEMORY(memory);
    const Tensor tensor = tensors[tile_tensor[blockIdx.x]];
    Tally tally = begin_tally(memory);
    __syncthreads();
    u64 begin = u64(blockIdx.x - tensor.first_tile) * TILE;
    u32 n = u32(min(u64(TILE), tensor.n - begin));
    for (u32 first = threadIdx.x; first < n; first += BATCH * THREADS) {
        float values[BATCH], residuals[BATCH];
#pragma unroll
        for (u32 own = 0; own < BATCH; own++) {
            u64 i = begin + first + own * THREADS;
            bool inside = first + own * THREADS < n;
            values[own] = inside ? tensor.grad[i] : 0.0f;
            residuals[own] = inside && tensor.residual ? tensor.residual[i] : 0.0f;
        }
#pragma unroll
        for (u32 own = 0; own < BATCH && first + own * THREADS < n; own++) {
            u64 i = begin + first + own * THREADS;
            if (tensor.moved) values[own] = accelerate(tensor, i, values[own]);
            tally_coeff<1>(tensor, i, &values[own], &residuals[own], tally);
        }
    }
    end_tally<1>(tensor, all_found + tile_tensor[blockIdx.x], tally);
}

// The second launch: which coefficients are above the prefix, which share it, and the next digits
// of those. `above`, `shared`: a bit for each coefficient, 128 words a tile (64 of complex bins).
template <u32 C>
__global__ void __launch_bounds__(THREADS, RESIDENT)
    mark(const Tensor* __restrict__ tensors, const u32* __restrict__ tile_tensor,
         Found* all_found, u32* above, u32* shared) {
    SHARED_MEMORY(memory);
    u32* digits = reinterpret_cast<u32*>(memory);  // SECOND
    u32* sums = digits + SECOND;                   // 33
    const Tensor tensor = tensors[tile_tensor[blockIdx.x]];
    Found* found = all_found + tile_tensor[blockIdx.x];
    if (found->peak > LARGEST_FINITE_BITS) return;
    for (u32 i = threadIdx.x; i < SECOND; i += THREADS) digits[i] = 0;
    __syncthreads();
    u32 prefix = found->prefix, scaling = found->exponent;
    u64 begin = u64(blockIdx.x - tensor.first_tile) * (TILE / C);
    for (u32 begin_of_batch = 0; begin_of_batch < TILE / C; begin_of_batch += BATCH * THREADS) {
        u32 keys[BATCH];
#pragma unroll
        for (u32 own = 0; own < BATCH; own++) {
            u64 place = begin + begin_of_batch + own * THREADS + threadIdx.x;
            keys[own] = 0;
            if (place < tensor.n)
                keys[own] =
                    key_of<C>(tensor.coeffs + C * place, place, tensor.bins_per_block, scaling);
        }
#pragma unroll
        for (u32 own = 0; own < BATCH; own++) {
            u32 i = begin_of_batch + own * THREADS + threadIdx.x, key = keys[own];
            bool inside = begin + i < tensor.n;
            u32 first = key >> (31 - RADIX_BITS);
            u32 above_word = __ballot_sync(ALL_LANES, inside && first > prefix);
            u32 shared_word = __ballot_sync(ALL_LANES, inside && first == prefix);
            if (inside && first == prefix)
                atomicAdd(&digits[key >> SECOND_BITS & (SECOND - 1)], 1u);
            if (threadIdx.x % 32 == 0) {
                u64 word = u64(blockIdx.x) * (WORDS_OF_REALS / C) + i / 32;
                above[word] = above_word;
                shared[word] = shared_word;
            }
        }
    }
    __syncthreads();
    flush_counts(found, digits, SECOND);
    if (is_last(&found->ticket, tensor.n_tiles, &sums[33])) choose_digit(found, SECOND, sums);
}

// The third launch: as the second, of those alone that share the first two digits.
template <u32 C>
__global__ void __launch_bounds__(WORDS_OF_REALS / C, 2 * RESIDENT)
    narrow(const Tensor* __restrict__ tensors, const u32* __restrict__ tile_tensor,
           Found* all_found, u32* above, u32* shared) {
    SHARED_MEMORY(memory);
    u32* digits = reinterpret_cast<u32*>(memory);  // SECOND
    u32* sums = digits + SECOND;                   // 33
    const Tensor tensor = tensors[tile_tensor[blockIdx.x]];
    Found* found = all_found + tile_tensor[blockIdx.x];
    if (found->peak > LARGEST_FINITE_BITS) return;
    for (u32 i = threadIdx.x; i < SECOND; i += blockDim.x) digits[i] = 0;
    __syncthreads();
    u32 second = found->prefix % SECOND, scaling = found->exponent;
    u64 word = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    u64 begin = u64(blockIdx.x - tensor.first_tile) * (TILE / C) + 32 * threadIdx.x;
    u32 more_above = 0, still_shared = 0;
    for (u32 left = shared[word]; left; left &= left - 1) {
        u32 bit = left & (0u - left);
        u64 place = begin + __popc(bit - 1);
        u32 key = key_of<C>(tensor.coeffs + C * place, place, tensor.bins_per_block, scaling);
        u32 digit = key >> SECOND_BITS & (SECOND - 1);
        if (digit > second) more_above |= bit;
        if (digit == second) {
            still_shared |= bit;
            atomicAdd(&digits[key & (SECOND - 1)], 1u);
        }
    }
    if (more_above) above[word] |= more_above;
    shared[word] = still_shared;
    __syncthreads();
    flush_counts(found, digits, SECOND);
    if (is_last(&found->ticket, tensor.n_tiles, &sums[33])) choose_digit(found, SECOND, sums);
}

// From each tile's counts to where its chosen coefficients stand among all of the tensor's. Returns
// how many they are.
__device__ u32 rank_tiles(const Tensor& tensor, const Found* found, TileCounts* tiles, u32* sums) {
    volatile TileCounts* all = tiles + tensor.first_tile;
    Run run = run_of(tensor.n_tiles);
    u32 above = 0, equal = 0, n_above, n_equal, need = found->need;
#pragma unroll 8
    for (u32 i = run.begin; i < run.end; i++) {
        above += all[i].above;
        equal += all[i].equal;
    }
    above = block_exclusive_sum(above, sums, n_above);
    __syncthreads();
    equal = block_exclusive_sum(equal, sums, n_equal);
    for (u32 begin = run.begin; begin < run.end; begin += BATCH) {
        u32 own_above[BATCH], own_equal[BATCH];
#pragma unroll
        for (u32 i = 0; i < BATCH; i++) {
            own_above[i] = begin + i < run.end ? all[begin + i].above : 0;
            own_equal[i] = begin + i < run.end ? all[begin + i].equal : 0;
        }
#pragma unroll
        for (u32 i = 0; i < BATCH && begin + i < run.end; i++) {
            all[begin + i].ties = need - min(need, equal);
            all[begin + i].first_rank = above + min(need, equal);
            above += own_above[i];
            equal += own_equal[i];
        }
    }
    return n_above + min(need, n_equal);
}

// The fourth launch: the last digit decides. `shared` becomes those equal to the k-th largest key.
template <u32 C>
__global__ void __launch_bounds__(WORDS_OF_REALS / C, 2 * RESIDENT)
    settle(const Tensor* __restrict__ tensors, const u32* __restrict__ tile_tensor,
           Found* all_found, u32* above, u32* shared, TileCounts* tiles) {
    SHARED_MEMORY(memory);
    u32* sums = reinterpret_cast<u32*>(memory);  // 33
    const Tensor tensor = tensors[tile_tensor[blockIdx.x]];
    Found* found = all_found + tile_tensor[blockIdx.x];
    if (found->peak > LARGEST_FINITE_BITS) return;
    u32 third = found->prefix % SECOND, scaling = found->exponent;
    u64 word = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    u64 begin = u64(blockIdx.x - tensor.first_tile) * (TILE / C) + 32 * threadIdx.x;
    u32 more_above = 0, equal = 0;
    for (u32 left = shared[word]; left; left &= left - 1) {
        u32 bit = left & (0u - left);
        u64 place = begin + __popc(bit - 1);
        u32 key = key_of<C>(tensor.coeffs + C * place, place, tensor.bins_per_block, scaling);
        u32 digit = key & (SECOND - 1);
        if (digit > third) more_above |= bit;
        if (digit == third) equal |= bit;
    }
    u32 all_above = above[word] | more_above;
    above[word] = all_above;
    shared[word] = equal;
    u32 n_above, n_equal;
    block_exclusive_sum(__popc(all_above), sums, n_above);
    __syncthreads();
    block_exclusive_sum(__popc(equal), sums, n_equal);
    if (threadIdx.x == 0) {
        tiles[blockIdx.x].above = n_above;
        tiles[blockIdx.x].equal = n_equal;
    }
    __syncthreads();
    if (is_last(&found->ticket, tensor.n_tiles, &sums[33])) rank_tiles(tensor, found, tiles, sums);
}
