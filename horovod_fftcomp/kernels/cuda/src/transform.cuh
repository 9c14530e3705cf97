// FFTs and DCTs of blocks of L elements, as many as fit into a tile. A real transform is computed
// by a complex one of half the length, M, in shared memory: Stockham passes of radix 8, then 4 or
// 2. Twiddle factors come from tables, so that every machine computes the same bits.

constexpr u32 POINTS = TILE / 2;  // complex ones of a tile

// Where a point lies in shared memory: a gap after each 16, against bank conflicts.
__device__ __forceinline__ u32 slot(u32 point) { return point + point / 16; }
constexpr u32 POINTS_NBYTES = 8 * (POINTS + POINTS / 16);

__device__ __forceinline__ float2 plus(float2 a, float2 b) {
    return make_float2(add_rn(a.x, b.x), add_rn(a.y, b.y));
}
__device__ __forceinline__ float2 minus(float2 a, float2 b) {
    return make_float2(sub_rn(a.x, b.x), sub_rn(a.y, b.y));
}
__device__ __forceinline__ float2 times(float2 a, float2 b) {
    return make_float2(fma_rn(a.x, b.x, negated(mul_rn(a.y, b.y))),
                       fma_rn(a.x, b.y, mul_rn(a.y, b.x)));
}
__device__ __forceinline__ float2 conjugate(float2 a) { return make_float2(a.x, negated(a.y)); }
// By -i, or by i for the inverse.
template <bool INVERSE>
__device__ __forceinline__ float2 turned(float2 a) {
    return INVERSE ? make_float2(negated(a.y), a.x) : make_float2(a.y, negated(a.x));
}

template <bool INVERSE>
__device__ __forceinline__ void butterfly2(float2& a, float2& b) {
    float2 sum = plus(a, b);
    b = minus(a, b);
    a = sum;
}
template <bool INVERSE>
__device__ __forceinline__ void butterfly4(float2& a, float2& b, float2& c, float2& d) {
    butterfly2<INVERSE>(a, c);
    butterfly2<INVERSE>(b, d);
    d = turned<INVERSE>(d);
    butterfly2<INVERSE>(a, b);
    butterfly2<INVERSE>(c, d);
    float2 second = c;  // results in the order 0, 2, 1, 3
    c = b;
    b = second;
}
template <bool INVERSE>
__device__ __forceinline__ void butterfly8(float2* v) {
    constexpr float HALF_ROOT = 0.70710678118654752f;
#pragma unroll
    for (u32 i = 0; i < 4; i++) butterfly2<INVERSE>(v[i], v[i + 4]);
    // The odd half turns by an eighth for each step.
    float2 t = turned<INVERSE>(v[5]);
    v[5] = make_float2(mul_rn(HALF_ROOT, add_rn(v[5].x, t.x)),
                       mul_rn(HALF_ROOT, add_rn(v[5].y, t.y)));
    v[6] = turned<INVERSE>(v[6]);
    t = turned<INVERSE>(v[7]);
    v[7] = make_float2(mul_rn(HALF_ROOT, sub_rn(t.x, v[7].x)),
                       mul_rn(HALF_ROOT, sub_rn(t.y, v[7].y)));
    butterfly4<INVERSE>(v[0], v[1], v[2], v[3]);
    butterfly4<INVERSE>(v[4], v[5], v[6], v[7]);
    float2 odd[4] = {v[4], v[5], v[6], v[7]};
    float2 even[4] = {v[0], v[1], v[2], v[3]};
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        v[2 * i] = even[i];
        v[2 * i + 1] = odd[i];
    }
}

// One Stockham pass over all blocks of a tile: transforms of length DONE become R times as long.
// `roots`: exp(-2 pi i j / (2 M)) for j below 2 M.
template <u32 M, u32 DONE, u32 R, bool INVERSE>
__device__ __forceinline__ void pass(float2* points, const float2* __restrict__ roots) {
    constexpr u32 OWN = POINTS / R / THREADS, STRIDE = M / R;
    float2 v[OWN][R];
#pragma unroll
    for (u32 own = 0; own < OWN; own++) {
        u32 number = threadIdx.x + own * THREADS;
        u32 j = number % STRIDE, begin = number / STRIDE * M + j, k = j % DONE;
#pragma unroll
        for (u32 r = 0; r < R; r++) v[own][r] = points[slot(begin + r * STRIDE)];
        if (DONE > 1) {
#pragma unroll
            for (u32 r = 1; r < R; r++) {
                float2 root = roots[k * r * (2 * M / (DONE * R))];
                v[own][r] = times(v[own][r], INVERSE ? conjugate(root) : root);
            }
        }
        if (R == 8) butterfly8<INVERSE>(v[own]);
        if (R == 4) butterfly4<INVERSE>(v[own][0], v[own][1], v[own][2 % R], v[own][3 % R]);
        if (R == 2) butterfly2<INVERSE>(v[own][0], v[own][1]);
    }
    __syncthreads();
#pragma unroll
    for (u32 own = 0; own < OWN; own++) {
        u32 number = threadIdx.x + own * THREADS;
        u32 j = number % STRIDE, k = j % DONE;
        u32 begin = number / STRIDE * M + (j - k) * R + k;
#pragma unroll
        for (u32 r = 0; r < R; r++) points[slot(begin + r * DONE)] = v[own][r];
    }
    __syncthreads();
}

template <u32 M, u32 DONE, bool INVERSE>
__device__ __forceinline__ void all_passes(float2* points, const float2* __restrict__ roots) {
    if constexpr (DONE < M) {
        constexpr u32 R = M / DONE >= 8 ? 8 : M / DONE;
        pass<M, DONE, R, INVERSE>(points, roots);
        all_passes<M, DONE * R, INVERSE>(points, roots);
    }
}

// Returns bin k of a real transform, of its block's complex one at `points`; bin 0: (DC, Nyquist).
template <u32 M>
__device__ __forceinline__ float2 real_bin(const float2* points, u32 bin,
                                           const float2* __restrict__ roots) {
    u32 k = bin % M, begin = bin - k;
    float2 z = points[slot(bin)], mirror = conjugate(points[slot(begin + (M - k) % M)]);
    if (k == 0) return make_float2(add_rn(z.x, z.y), sub_rn(z.x, z.y));
    float2 even = plus(z, mirror), odd = turned<false>(minus(z, mirror));
    float2 sum = plus(even, times(odd, roots[k]));
    return make_float2(mul_rn(0.5f, sum.x), mul_rn(0.5f, sum.y));
}

// Where element i of a block of L goes before a DCT: even ones ascending, odd ones descending.
template <u32 L>
__device__ __forceinline__ u32 dct_place(u32 i) {
    return i % 2 ? L - 1 - i / 2 : i / 2;
}

// The first launch: coefficients of gradient plus residual. `cosines`: sqrt(2) (cos, sin) of
// pi k / (2 L) for k below M; a DCT's alone.
template <u32 L, bool COSINE>
__global__ void __launch_bounds__(THREADS, COSINE ? 3 : RESIDENT)
    forward(const Tensor* __restrict__ tensors, const u32* __restrict__ tile_tensor,
            Found* all_found, const float2* __restrict__ roots,
            const float2* __restrict__ cosines) {
    constexpr u32 M = L / 2;
    SHARED_MEMORY(memory);
    float2* points = reinterpret_cast<float2*>(memory);
    const Tensor tensor = tensors[tile_tensor[blockIdx.x]];
    Tally tally = begin_tally(memory + POINTS_NBYTES);
    u64 begin = u64(blockIdx.x - tensor.first_tile) * TILE;
    // Scaled before the transform, every coefficient stays below the largest element.
#pragma unroll 1
    for (u32 first = threadIdx.x; first < TILE; first += BATCH * THREADS) {
        float elements[BATCH];
#pragma unroll
        for (u32 own = 0; own < BATCH; own++) {
            u64 i = begin + first + own * THREADS;
            elements[own] = i < tensor.numel ? tensor.grad[i] : 0.0f;
        }
#pragma unroll
        for (u32 own = 0; own < BATCH; own++) {
            u32 i = first + own * THREADS, place = COSINE ? i / L * L + dct_place<L>(i % L) : i;
            reinterpret_cast<float*>(points + slot(place / 2))[place % 2] =
                mul_rn(elements[own], 1.0f / L);
        }
    }
    __syncthreads();
    all_passes<M, 1, false>(points, roots);
    constexpr u32 OWN = POINTS / THREADS;
    if constexpr (!COSINE) {
        u32 n = u32(min(u64(POINTS), tensor.n - begin / 2));
#pragma unroll 1
        for (u32 first = threadIdx.x; first < n; first += BATCH * THREADS) {
            float residuals[BATCH][2];
#pragma unroll
            for (u32 own = 0; own < BATCH; own++) {
                u32 i = first + own * THREADS;
                bool carried = i < n && tensor.residual;
                residuals[own][0] = carried ? tensor.residual[begin + 2 * i] : 0.0f;
                residuals[own][1] = carried ? tensor.residual[begin + 2 * i + 1] : 0.0f;
            }
#pragma unroll
            for (u32 own = 0; own < BATCH; own++) {
                u32 i = first + own * THREADS;
                if (i >= n) break;
                float2 bin = real_bin<M>(points, i, roots);
                float coeff[2] = {bin.x, bin.y};
                tally_coeff<2>(tensor, begin / 2 + i, coeff, residuals[own], tally);
            }
        }
        end_tally<2>(tensor, all_found + tile_tensor[blockIdx.x], tally, 1);
    } else {
        float* coeffs = reinterpret_cast<float*>(memory);
        float2 bins[OWN];
#pragma unroll
        for (u32 own = 0; own < OWN; own++)
            bins[own] = real_bin<M>(points, threadIdx.x + own * THREADS, roots);
        __syncthreads();
#pragma unroll
        for (u32 own = 0; own < OWN; own++) {
            u32 bin = threadIdx.x + own * THREADS, k = bin % M, first = bin / M * L;
            float2 z = bins[own], w = cosines[k];
            if (k == 0) {
                coeffs[first] = z.x;
                coeffs[first + M] = z.y;
            } else {
                coeffs[first + k] = fma_rn(z.x, w.x, mul_rn(z.y, w.y));
                coeffs[first + L - k] = fma_rn(z.x, w.y, negated(mul_rn(z.y, w.x)));
            }
        }
        __syncthreads();
        u32 n = u32(min(u64(TILE), tensor.n - begin));
#pragma unroll
        for (u32 first = threadIdx.x; first < TILE; first += BATCH * THREADS) {
            float residuals[BATCH];
#pragma unroll
            for (u32 own = 0; own < BATCH; own++) {
                u32 i = first + own * THREADS;
                residuals[own] = i < n && tensor.residual ? tensor.residual[begin + i] : 0.0f;
            }
#pragma unroll
            for (u32 own = 0; own < BATCH; own++) {
                u32 i = first + own * THREADS;
                if (i < n) tally_coeff<1>(tensor, begin + i, coeffs + i, &residuals[own], tally);
            }
        }
        end_tally<1>(tensor, all_found + tile_tensor[blockIdx.x], tally, 1);
    }
}
