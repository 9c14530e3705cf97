// Gather and scatter of values at positions chosen by the host: one thread for each position, or
// for each element of a tensor. `bad`: a word, not 0 if the tensor is not finite on some rank.

// `places`: null of all that there are.
__global__ void __launch_bounds__(THREADS)
    take_places(const float* __restrict__ values, u64 n, const u32* __restrict__ places,
                const u32* __restrict__ bad, float* __restrict__ out) {
    u64 i = u64(blockIdx.x) * THREADS + threadIdx.x;
    if (i < n) out[i] = *bad ? __uint_as_float(NAN_BITS) : values[places ? places[i] : i];
}

// Zeros, or NaN.
__global__ void __launch_bounds__(THREADS)
    fill_sum(float* __restrict__ sum, u64 n, const u32* __restrict__ bad) {
    u64 i = u64(blockIdx.x) * THREADS + threadIdx.x;
    if (i < n) sum[i] = *bad ? __uint_as_float(NAN_BITS) : 0.0f;
}

// Writes sums to their places, and takes off what is left there; `left`: null if nothing is.
__global__ void __launch_bounds__(THREADS)
    put_places(const float* __restrict__ values, u64 n, const u32* __restrict__ places,
               const u32* __restrict__ bad, float* __restrict__ sum, float* __restrict__ left) {
    u64 i = u64(blockIdx.x) * THREADS + threadIdx.x;
    if (i >= n || *bad) return;
    sum[places[i]] = values[i];
    if (left) left[places[i]] = 0.0f;
}
