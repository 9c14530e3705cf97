// Momentum before a dense sum, and gradient clipping before any momentum (`accelerate` applies both);
// see schemes/momentum.py.

// What each gradient is multiplied by, so that its norm is at most `most`; a warp for each tensor.
// NaN where a value is. `parts`: one for each tile.
__global__ void __launch_bounds__(32)
    clip_factors(const Tensor* __restrict__ tensors, const Part* __restrict__ parts, double most,
                 float* factors) {
    const Tensor tensor = tensors[blockIdx.x];
    double square = row_sums(parts + tensor.first_tile, tensor.n_tiles, true).second;
    if (threadIdx.x == 0)
        factors[blockIdx.x] = square <= most * most ? 1.0f : narrowed(most / sqrt(square));
}

// One tensor of a dense step with momentum, as the host describes it.
struct DenseMomentum {
    const float* grad;      // null of a frozen tensor
    const float* residual;  // null: zeros
    const float* velocity;  // null: zeros
    float* moved;           // the new velocity
    const float* factor;    // of the gradient; null: 1
    float* whole;           // residual plus velocity
    u64 n;
    u32 first_tile, n_tiles;
    u32 momentum, how;      // bits of the factor; of enum How
};
static_assert(sizeof(DenseMomentum) == 72, "structs.py describes the same layout");

// Residual plus velocity, and the new velocity.
__global__ void __launch_bounds__(THREADS, RESIDENT)
    accumulate(const DenseMomentum* __restrict__ parts, const u32* __restrict__ tile_part) {
    const DenseMomentum part = parts[tile_part[blockIdx.x]];
    if (!part.grad) return;
    Tensor momentum = {};
    momentum.residual = part.residual;
    momentum.velocity = part.velocity;
    momentum.moved = part.moved;
    momentum.factor = part.factor;
    momentum.momentum = part.momentum;
    momentum.how = part.how;
    u64 begin = u64(blockIdx.x - part.first_tile) * TILE;
    u64 end = min(begin + TILE, part.n);
    for (u64 i = begin + threadIdx.x; i < end; i += THREADS) {
        float value = accelerate(momentum, i, part.grad[i]);
        part.whole[i] = part.residual ? add_rn(part.residual[i], value) : value;
    }
}
