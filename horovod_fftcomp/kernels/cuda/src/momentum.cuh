// Gradient clipping before the momentum, which `accelerate` applies; see schemes/momentum.py.

// What each gradient is multiplied by, so that its norm is at most `most`; a warp for each tensor.
// NaN where a value is. `parts`: one for each tile.
__global__ void __launch_bounds__(32)
    clip_factors(const Tensor* __restrict__ tensors, const Part* __restrict__ parts, double most,
                 float* __restrict__ factors) {
    const Tensor tensor = tensors[blockIdx.x];
    double square = row_sums(parts + tensor.first_tile, tensor.n_tiles, true).second;
    if (threadIdx.x == 0)
        factors[blockIdx.x] = square <= most * most ? 1.0f : narrowed(most / sqrt(square));
}
