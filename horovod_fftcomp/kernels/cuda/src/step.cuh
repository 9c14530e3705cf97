// The end of a step: decides whether it is committed or undone. The host reads the result in the
// next step, so it does not wait. And sums of several ranks' values.

// What lasts from step to step.
struct Ledger {
    u32 skipped;  // steps that did not count
    u32 corrupt;  // payloads that were not what a peer can have written
};
static_assert(sizeof(Ledger) == 8, "structs.py describes the ledger with the same layout");

// Notes whether a step counts. `flags`: not 0 where something is not finite; one thread for each.
__global__ void __launch_bounds__(THREADS)
    judge(const u32* __restrict__ flags, u32 n, u32* verdict) {
    u32 i = blockIdx.x * THREADS + threadIdx.x;
    if (i < n && flags[i]) atomicOr(verdict, 1u);
}

// Counts corrupt payloads; one thread for each.
__global__ void __launch_bounds__(THREADS)
    count_corrupt(const Payload* __restrict__ payloads, u32 n, Ledger* ledger) {
    u32 i = blockIdx.x * THREADS + threadIdx.x;
    if (i < n && payloads[i].status == CORRUPT) atomicAdd(&ledger->corrupt, 1u);
}

// Closes a step; one thread.
__global__ void count_step(const u32* __restrict__ verdict, Ledger* ledger) {
    if (*verdict) ledger->skipped++;
}

// An array of the state, as words: before the step and after it.
struct Change {
    const u32* old;  // 0: zeros
    u32* now;
    u64 n;
    u32 first_tile, n_tiles;
};
static_assert(sizeof(Change) == 32, "structs.py describes CHANGE with the same layout");

// Where the step does not count, replaces the new state by the old one.
__global__ void __launch_bounds__(THREADS)
    select_state(const Change* __restrict__ changes, const u32* __restrict__ tile_change,
                 const u32* __restrict__ verdict) {
    if (!*verdict) return;
    const Change change = changes[tile_change[blockIdx.x]];
    u64 begin = u64(blockIdx.x - change.first_tile) * TILE;
    u64 end = min(begin + TILE, change.n);
    for (u64 i = begin + threadIdx.x; i < end; i += THREADS)
        change.now[i] = change.old ? change.old[i] : 0u;
}

// The sum of squares of each tile, of gradients or of coefficients; in a fixed order. A complex
// bin counts twice, since it stands for its mirror image too, but for the first of a block.
template <u32 C>
__global__ void __launch_bounds__(THREADS)
    square(const Tensor* __restrict__ tensors, const u32* __restrict__ tile_tensor,
           u32 of_gradient, double* sums) {
    SHARED_MEMORY(memory);
    double* parts = reinterpret_cast<double*>(memory);
    const Tensor tensor = tensors[tile_tensor[blockIdx.x]];
    u64 begin = u64(blockIdx.x - tensor.first_tile) * TILE;
    u64 end = min(begin + TILE, of_gradient ? tensor.numel : C * tensor.n);
    const float* values = of_gradient ? tensor.grad : tensor.coeffs;
    if (!values) end = 0;  // nothing is kept
    double sum = 0;
    for (u64 i = begin + threadIdx.x; i < end; i += THREADS) {
        double value = values[i];
        bool twice = C == 2 && !of_gradient && i / 2 % tensor.bins_per_block != 0;
        sum += (twice ? 2 : 1) * (value * value);
    }
    parts[threadIdx.x] = sum;
    __syncthreads();
    for (u32 half = THREADS / 2; half; half /= 2) {
        if (threadIdx.x < half) parts[threadIdx.x] += parts[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0) sums[blockIdx.x] = parts[0];
}

// Sums rows of n values in their order; one thread for each sum.
__global__ void __launch_bounds__(THREADS)
    sum_rows(const float* __restrict__ values, u64 n, u32 n_rows, float* sums) {
    u64 i = u64(blockIdx.x) * THREADS + threadIdx.x;
    if (i >= n) return;
    float total = values[i];
    for (u32 row = 1; row < n_rows; ++row) total = add_rn(total, values[row * n + i]);
    sums[i] = total;
}
