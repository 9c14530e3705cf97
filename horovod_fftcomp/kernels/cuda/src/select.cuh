// Exact top-k selection in each tensor, ties by position: a radix select from the top digit, 11 +
// 10 + 10 bits of a 31-bit key. Only the first digit is counted over all coefficients; from then
// on bit masks mark the coefficients above the selected digit and those equal to it.

constexpr u32 SECOND_BITS = 10, SECOND = 1u << SECOND_BITS;
constexpr u32 WORDS_OF_REALS = TILE / 32, ROWS_OF_REALS = WORDS_OF_REALS / 32;

// Returns what a coefficient is ranked by. C floats: a real by magnitude, a complex bin by the
// energy that it stands for, after an exact scaling that keeps squares in range.
template <u32 C>
__device__ __forceinline__ u32 key_of(const float* coeff, u32 place, u32 bins_per_block,
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
            u32 key = key_of<C>(tensor.coeffs + C * i, u32(i), tensor.bins_per_block, scaling);
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
    u32 key = key_of<C>(sum, u32(place), tensor.bins_per_block, 0);
    atomicAdd(&tally.digits[key >> (31 - RADIX_BITS)], 1u);
}

// Ends what a block has tallied: `n_own` tiles of a tensor. All threads.
template <u32 C>
__device__ __forceinline__ void end_tally(const Tensor& tensor, Found* found, Tally& tally,
                                          u32 n_own) {
    atomicMax(&tally.sums[34], tally.peak);
    __syncthreads();
    flush_counts(found, tally.digits, RADIX);
    if (threadIdx.x == 0) atomicMax(&found->peak, tally.sums[34]);
    if (is_last(&found->ticket, tensor.n_tiles, &tally.sums[33], n_own))
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
                 Found* all_found, const u32* __restrict__ starts) {
    SHARED_MEMORY(memory);
    Run run = tiles_of_block(starts);
    for (u32 tile = run.begin, next; tile < run.end; tile = next) {
        const Tensor& tensor = tensors[tile_tensor[tile]];
        next = min(run.end, tensor.first_tile + tensor.n_tiles);
        Tally tally = begin_tally(memory);
        __syncthreads();
        u64 end = min(u64(next - tensor.first_tile) * TILE, tensor.n);
        u64 first = u64(tile - tensor.first_tile) * TILE + threadIdx.x;
        for (; first < end; first += BATCH * THREADS) {
            float values[BATCH], residuals[BATCH];
#pragma unroll
            for (u32 own = 0; own < BATCH; own++) {
                u64 i = first + own * THREADS;
                values[own] = i < end ? tensor.grad[i] : 0.0f;
                residuals[own] = i < end && tensor.residual ? tensor.residual[i] : 0.0f;
            }
#pragma unroll
            for (u32 own = 0; own < BATCH && first + own * THREADS < end; own++) {
                u64 i = first + own * THREADS;
                if (tensor.moved) values[own] = accelerate(tensor, i, values[own]);
                tally_coeff<1>(tensor, i, &values[own], &residuals[own], tally);
            }
        }
        end_tally<1>(tensor, all_found + tile_tensor[tile], tally, next - tile);
    }
}

// Marks the coefficients of a tile and counts the next digits of those that share the prefix.
template <u32 C>
__device__ __forceinline__ void mark_tile(const Tensor& tensor, u32 tile, u32 prefix, u32 scaling,
                                          u32* digits, u32* above, u32* shared) {
    u32 lane = threadIdx.x % 32;
    u32 begin = (tile - tensor.first_tile) * (TILE / C), n = min(TILE / C, u32(tensor.n) - begin);
    const float* coeffs = tensor.coeffs + u64(C) * begin;
    for (u32 word = threadIdx.x / 32 * BATCH; word < WORDS_OF_REALS / C; word += BATCH * WARPS) {
        u32 keys[BATCH], above_word = 0, shared_word = 0, first = 32 * word + lane;
#pragma unroll
        for (u32 own = 0; own < BATCH; own++) {
            u32 i = first + 32 * own;
            keys[own] = 0;
            if (i < n)
                keys[own] = key_of<C>(coeffs + C * i, begin + i, tensor.bins_per_block, scaling);
        }
#pragma unroll
        for (u32 own = 0; own < BATCH; own++) {
            u32 digit = keys[own] >> (31 - RADIX_BITS);
            bool inside = first + 32 * own < n, same = inside && digit == prefix;
            u32 larger = __ballot_sync(ALL_LANES, inside && digit > prefix);
            u32 equal = __ballot_sync(ALL_LANES, same);
            if (same) atomicAdd(&digits[keys[own] >> SECOND_BITS & (SECOND - 1)], 1u);
            if (lane == own) above_word = larger, shared_word = equal;
        }
        if (lane < BATCH) {
            u64 at = u64(tile) * (WORDS_OF_REALS / C) + word + lane;
            above[at] = above_word;
            shared[at] = shared_word;
        }
    }
}

// Marks by the next digit those coefficients of a row that share the prefix, a warp's work.
// `digit`: the selected one; LAST: of all, which ends with the row's counts.
template <u32 C, bool LAST>
__device__ __forceinline__ void narrow_row(const Tensor& tensor, u32 row, u32 digit, u32 scaling,
                                           u32* digits, u32* above, u32* shared, RowCounts* rows) {
    u64 word = 32ull * row + threadIdx.x % 32;
    u32 begin = 32 * u32(word) - tensor.first_tile * (TILE / C);  // of a tensor, below 2^32
    u32 larger = above[word], same = shared[word], before = same;
    for (u32 left = same; left; left &= left - 1) {
        u32 bit = left & (0u - left);
        u32 place = begin + __popc(bit - 1);
        u32 key = key_of<C>(tensor.coeffs + u64(C) * place, place, tensor.bins_per_block, scaling);
        u32 found = (LAST ? key : key >> SECOND_BITS) & (SECOND - 1);
        if (found > digit) larger |= bit;
        if (found != digit) same ^= bit;
        if (found == digit && !LAST) atomicAdd(&digits[key & (SECOND - 1)], 1u);
    }
    if (before) {
        above[word] = larger;
        shared[word] = same;
    }
    if (!LAST) return;
    u32 n_above = warp_inclusive_sum(__popc(larger)), n_equal = warp_inclusive_sum(__popc(same));
    if (threadIdx.x % 32 == 31) {
        rows[row].above = n_above;
        rows[row].equal = n_equal;
    }
}

// From the counts of rows to where their chosen coefficients stand among all of the tensor's.
// Returns how many those are. `rows`: the first of `n`.
__device__ u32 rank_rows(const Found* found, RowCounts* rows, u32 n, u32* sums) {
    u32 need = found->need, above = 0, equal = 0;  // of the rows before
    for (u32 begin = 0; begin < n; begin += BATCH * blockDim.x) {
        u32 first = begin + BATCH * threadIdx.x, n_above = 0, n_equal = 0, all_above, all_equal;
        u64 counts[BATCH];  // both, as other blocks have written them
#pragma unroll
        for (u32 i = 0; i < BATCH; i++) {
            counts[i] = first + i < n ? *reinterpret_cast<volatile u64*>(rows + first + i) : 0;
            n_above += u32(counts[i]);
            n_equal += u32(counts[i] >> 32);
        }
        n_above = above + block_exclusive_sum(n_above, sums, all_above);
        __syncthreads();
        n_equal = equal + block_exclusive_sum(n_equal, sums, all_equal);
        __syncthreads();
#pragma unroll
        for (u32 i = 0; i < BATCH && first + i < n; i++) {
            rows[first + i].ties = need - min(need, n_equal);
            rows[first + i].first_rank = n_above + min(need, n_equal);
            n_above += u32(counts[i]);
            n_equal += u32(counts[i] >> 32);
        }
        above += all_above;
        equal += all_equal;
    }
    return above + min(need, equal);
}

// The launches after the first: a digit decides about the coefficients that share the prefix, and
// the next digits of those that have it too are counted; after the third, the last, `shared` are
// those equal to the k-th largest key. `above`, `shared`: a bit for each coefficient, 128 words a
// tile (64 of complex bins); `rows`: of the third.
template <u32 C, u32 DIGIT>
__global__ void __launch_bounds__(THREADS, RESIDENT)
    narrow(const Tensor* __restrict__ tensors, const u32* __restrict__ tile_tensor,
           Found* all_found, u32* above, u32* shared, RowCounts* rows,
           const u32* __restrict__ starts) {
    constexpr u32 ROWS = ROWS_OF_REALS / C;
    SHARED_MEMORY(memory);
    u32* digits = reinterpret_cast<u32*>(memory);  // SECOND
    u32* sums = digits + SECOND;                   // 33
    Run run = tiles_of_block(starts);
    for (u32 begin = run.begin, next; begin < run.end; begin = next) {
        const Tensor& tensor = tensors[tile_tensor[begin]];
        Found* found = all_found + tile_tensor[begin];
        next = min(run.end, tensor.first_tile + tensor.n_tiles);
        if (found->peak > LARGEST_FINITE_BITS) continue;
        for (u32 i = threadIdx.x; DIGIT < 3 && i < SECOND; i += THREADS) digits[i] = 0;
        __syncthreads();
        u32 prefix = found->prefix, scaling = found->exponent;
        for (u32 tile = begin; DIGIT == 1 && tile < next; tile++)
            mark_tile<C>(tensor, tile, prefix, scaling, digits, above, shared);
        for (u32 row = ROWS * begin + threadIdx.x / 32; DIGIT > 1 && row < ROWS * next; row += WARPS)
            narrow_row<C, DIGIT == 3>(tensor, row, prefix % SECOND, scaling, digits, above, shared,
                                      rows);
        __syncthreads();
        if (DIGIT < 3) flush_counts(found, digits, SECOND);
        if (!is_last(&found->ticket, tensor.n_tiles, &sums[33], next - begin)) continue;
        if (DIGIT < 3) choose_digit(found, SECOND, sums);
        if (DIGIT == 3) rank_rows(found, rows + ROWS * tensor.first_tile, ROWS * tensor.n_tiles, sums);
    }
}
