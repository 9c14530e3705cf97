// Low-rank schemes (schemes/powersgd.py): gradient plus residual, orthonormalization of columns,
// and products of two factors. Where all ranks must compute the same bits, sums are in the CPU's
// order.

// One tensor as the host describes it, a matrix in row-major order; with rank 0 it travels as it is.
struct LowRank {
    const float* grad;      // null of a frozen tensor
    const float* residual;  // null if there is none
    float* whole;           // gradient plus residual, then what is left; of rank 0 what is sent
    const float* first;     // sums over ranks: M Q, [rows, rank]; of rank 0 all of the tensor
    const float* second;    // M^T P, [columns, rank]: the sum, or this rank's own
    const float* right;     // Q, from which this step began
    float* left;            // P: `first` with orthonormal columns
    float* factor;          // the next step's Q
    double* scratch;        // [rank, rows]
    float* sum;
    u64 n, rows, columns;
    u32 first_tile, n_tiles;
    u32 rank, unused;
};
static_assert(sizeof(LowRank) == 120, "structs.py describes matrices with the same layout");

// Gradient plus residual.
__global__ void __launch_bounds__(THREADS, RESIDENT)
    take_whole(const LowRank* __restrict__ parts, const u32* __restrict__ tile_part) {
    const LowRank part = parts[tile_part[blockIdx.x]];
    if (!part.grad) return;
    u64 begin = u64(blockIdx.x - part.first_tile) * TILE;
    u64 end = min(begin + TILE, part.n);
    for (u64 i = begin + threadIdx.x; i < end; i += THREADS)
        part.whole[i] = part.residual ? add_rn(part.grad[i], part.residual[i]) : part.grad[i];
}

// Raises a tensor's flag where what came of it is not finite; a block for each tensor.
__global__ void __launch_bounds__(THREADS)
    check_factors(const LowRank* __restrict__ parts, u32 of_second, u32* not_finite) {
    const LowRank part = parts[blockIdx.x];
    const float* values = of_second ? part.second : part.first;
    u64 n = part.rank ? (of_second ? part.columns : part.rows) * part.rank : part.n;
    if (of_second && !part.rank) return;
    bool bad = false;
    for (u64 i = threadIdx.x; i < n; i += THREADS) bad |= magnitude(values[i]) > LARGEST_FINITE_BITS;
    if (bad) atomicOr(&not_finite[blockIdx.x], 1u);
}

// The sum of products of two columns, the same for all threads of the block. `lanes`: THREADS doubles.
__device__ double lane_dot(const double* a, const double* b, u64 n, double* lanes) {
    double sum = 0;
    for (u64 i = threadIdx.x; i < n; i += THREADS) sum += a[i] * b[i];
    lanes[threadIdx.x] = sum;
    __syncthreads();
    for (u32 half = THREADS / 2; half; half /= 2) {
        if (threadIdx.x < half) lanes[threadIdx.x] += lanes[threadIdx.x + half];
        __syncthreads();
    }
    sum = lanes[0];
    __syncthreads();  // all have read it
    return sum;
}

// Makes columns orthonormal, by Gram and Schmidt, twice; a block for each tensor. A thread meets the
// same rows of all columns, so that sums alone need barriers.
__global__ void __launch_bounds__(THREADS) orthonormalize(const LowRank* __restrict__ parts) {
    SHARED_MEMORY(memory);
    double* lanes = reinterpret_cast<double*>(memory);
    const LowRank part = parts[blockIdx.x];
    u64 n = part.rows;
    for (u32 k = 0; k < part.rank; k++) {
        double* column = part.scratch + k * n;
        for (u64 i = threadIdx.x; i < n; i += THREADS)
            column[i] = widened(part.first[i * part.rank + k]);
        double before = sqrt(lane_dot(column, column, n, lanes));
        for (u32 j = 0; j < 2 * k; j++) {
            const double* other = part.scratch + (j % k) * n;
            double share = lane_dot(column, other, n, lanes);
            for (u64 i = threadIdx.x; i < n; i += THREADS) column[i] -= share * other[i];
        }
        double norm = sqrt(lane_dot(column, column, n, lanes));
        bool is_left = norm > 1e-10 * before;
        for (u64 i = threadIdx.x; i < n; i += THREADS) {
            column[i] = is_left ? column[i] / norm : 0.0;
            part.left[i * part.rank + k] = narrowed(column[i]);
        }
    }
}

// Calls `use` with each place of a tile and the product of the factors there.
template <typename Use>
__device__ __forceinline__ void for_each_product(const LowRank& part, Use use) {
    u64 begin = u64(blockIdx.x - part.first_tile) * TILE, end = min(begin + TILE, part.n);
    u64 place = begin + threadIdx.x, row = place / part.columns, column = place % part.columns;
    u64 rows_on = THREADS / part.columns, columns_on = THREADS % part.columns;
    for (; place < end; place += THREADS) {
        float sum = 0;
        for (u32 k = 0; k < part.rank; k++)
            sum = add_rn(sum, mul_rn(part.left[row * part.rank + k], part.second[column * part.rank + k]));
        use(place, sum);
        row += rows_on;
        column += columns_on;
        if (column >= part.columns) {
            column -= part.columns;
            row++;
        }
    }
}

// What this rank's own factors leave of the whole.
__global__ void __launch_bounds__(THREADS, RESIDENT)
    subtract_products(const LowRank* __restrict__ parts, const u32* __restrict__ tile_part) {
    const LowRank part = parts[tile_part[blockIdx.x]];
    if (!part.whole) return;
    for_each_product(part, [&](u64 place, float product) {
        part.whole[place] = sub_rn(part.whole[place], product);
    });
}

// The sums over ranks; NaN where a flag is raised. Raises a flag of `overflown` where a product of
// finite factors is not finite.
__global__ void __launch_bounds__(THREADS, RESIDENT)
    sum_products(const LowRank* __restrict__ parts, const u32* __restrict__ tile_part,
                 const u32* __restrict__ not_finite, u32* overflown) {
    u32 number = tile_part[blockIdx.x];
    const LowRank part = parts[number];
    u64 begin = u64(blockIdx.x - part.first_tile) * TILE, end = min(begin + TILE, part.n);
    if (not_finite[number] || !part.rank) {
        for (u64 i = begin + threadIdx.x; i < end; i += THREADS)
            part.sum[i] = not_finite[number] ? __uint_as_float(NAN_BITS) : part.first[i];
        return;
    }
    bool bad = false;
    for_each_product(part, [&](u64 place, float product) {
        part.sum[place] = product;
        bad |= magnitude(product) > LARGEST_FINITE_BITS;
    });
    if (bad) atomicOr(&overflown[number], 1u);
}

// The next step's start; a block for each tensor. Each column is multiplied by a power of two, which
// makes its peak 1 to 4. One of zeros would stay so, and keeps what it was.
__global__ void __launch_bounds__(THREADS) keep_factors(const LowRank* __restrict__ parts) {
    SHARED_MEMORY(memory);
    u32* lanes = reinterpret_cast<u32*>(memory);
    const LowRank part = parts[blockIdx.x];
    for (u32 k = 0; k < part.rank; k++) {
        u32 peak = 0;
        if (threadIdx.x == 0) lanes[0] = 0;
        for (u64 j = threadIdx.x; j < part.columns; j += THREADS)
            peak = max(peak, magnitude(part.second[j * part.rank + k]));
        __syncthreads();
        atomicMax(&lanes[0], peak);
        __syncthreads();
        peak = lanes[0];
        const float* from = peak ? part.second : part.right;
        float scale = peak ? __uint_as_float((254 - min(peak >> 23, 253u)) << 23) : 1.0f;
        for (u64 j = threadIdx.x; j < part.columns; j += THREADS)
            part.factor[j * part.rank + k] = mul_rn(scale, from[j * part.rank + k]);
        __syncthreads();  // all have read the peak
    }
}
