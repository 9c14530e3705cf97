// CUDA as a kernel sees it, on a CPU: each CUDA thread is a fiber, each block runs in one OS thread.
//
// Between two synchronisations a fiber runs alone, so a missing one is no rare event: it gives
// another order in at least one of the schedules. What a device does not promise is not given:
// lanes of a warp are not in step, shared memory begins as NaN and ends at a page that kills.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>
#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
#define EMULATOR_ITSELF __attribute__((no_sanitize("thread"), noinline))
#else
#define EMULATOR_ITSELF
#endif

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __restrict__ __restrict

struct uint3 {
    unsigned x, y, z;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
    return {x, y, z, w};
}
using std::max;
using std::min;
using std::sqrt;

namespace emulator {

enum class State { ready, in_warp, in_block, done };
using Site = const void*;  // of a call, so that fibers that meet at different ones are noticed

struct Fiber {
    unsigned number, lane, warp;
    State state;
    Site site;
    void* stack_pointer;
    void* race_detector;
};

// The rendezvous of a warp. Results of one generation may be read while the next one gathers.
struct Warp {
    unsigned arrived, mask, generation;
    uint64_t slots[2][32];
    Site site;
    char released[2];  // what the race detector synchronises on, by generation
};

struct Block {
    uint3 index, size, grid;
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    unsigned char* shared;
    size_t shared_nbytes;
    char* stacks;
    void* scheduler_stack;
    void* scheduler_race_detector;
    void (*entry)(void*);
    void* arguments;
    const char* error;
    unsigned barriers;
    char released[2], began, ended;
};

extern thread_local Block* block;
extern thread_local Fiber* fiber;

EMULATOR_ITSELF void wait_for_block(Site site);
EMULATOR_ITSELF const uint64_t* exchange(unsigned mask, uint64_t value, Site site);
[[noreturn]] void fail(const char* message);

EMULATOR_ITSELF static inline uint3 thread_index() { return {fiber->number, 0, 0}; }
EMULATOR_ITSELF static inline uint3 block_index() { return block->index; }
EMULATOR_ITSELF static inline uint3 block_size() { return block->size; }
EMULATOR_ITSELF static inline uint3 grid_size() { return block->grid; }
EMULATOR_ITSELF static inline unsigned lane() { return fiber->lane; }
EMULATOR_ITSELF static inline unsigned char* shared_memory() { return block->shared; }
EMULATOR_ITSELF static inline uint64_t slot(const uint64_t* slots, unsigned i) { return slots[i]; }

template <class T>
uint64_t bits_of(T value) {
    static_assert(sizeof(T) <= 8);
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    return bits;
}
template <class T>
T value_of(uint64_t bits) {
    T value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
template <class T>
T from_lane(unsigned mask, T value, unsigned source, Site site) {
    const uint64_t* slots = exchange(mask, bits_of(value), site);
    if (source < 32 && !(mask >> source & 1)) fail("shuffle: the lane it reads is not in the mask");
    return source < 32 ? value_of<T>(slot(slots, source)) : value;
}
static inline unsigned ballot(unsigned mask, bool predicate, Site site) {
    const uint64_t* slots = exchange(mask, predicate, site);
    unsigned found = 0;
    for (unsigned i = 0; i < 32; i++)
        if (mask >> i & 1) found |= unsigned(slot(slots, i)) << i;
    return found;
}
template <class Combine>
unsigned reduce(unsigned mask, unsigned value, Combine combine, Site site) {
    const uint64_t* slots = exchange(mask, value, site);
    unsigned found = value;
    for (unsigned i = 0; i < 32; i++)
        if (mask >> i & 1) found = combine(found, unsigned(slot(slots, i)));
    return found;
}

}  // namespace emulator

#define threadIdx (emulator::thread_index())
#define blockIdx (emulator::block_index())
#define blockDim (emulator::block_size())
#define gridDim (emulator::grid_size())
#define EMULATOR_SITE ([]() -> emulator::Site { static char here; return &here; }())
#define __syncthreads() emulator::wait_for_block(EMULATOR_SITE)
#define __syncwarp() ((void)emulator::exchange(~0u, 0, EMULATOR_SITE))
#define __shfl_sync(mask, value, from) emulator::from_lane(mask, value, (from) & 31u, EMULATOR_SITE)
#define __shfl_up_sync(mask, value, by) \
    emulator::from_lane(mask, value, emulator::lane() - unsigned(by), EMULATOR_SITE)
#define __shfl_down_sync(mask, value, by) \
    emulator::from_lane(mask, value, emulator::lane() + unsigned(by), EMULATOR_SITE)
#define __shfl_xor_sync(mask, value, by) \
    emulator::from_lane(mask, value, emulator::lane() ^ unsigned(by), EMULATOR_SITE)
#define __ballot_sync(mask, predicate) emulator::ballot(mask, (predicate) != 0, EMULATOR_SITE)

static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
static inline unsigned __float_as_uint(float x) { return unsigned(emulator::bits_of(x)); }
static inline float __uint_as_float(unsigned x) { return emulator::value_of<float>(x); }
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
template <class T>
T __ldg(const T* place) {
    return *place;
}
template <class T>
T atomicAdd(T* place, T value) {
    return __atomic_fetch_add(place, value, __ATOMIC_RELAXED);
}
template <class T>
T atomicOr(T* place, T value) {
    return __atomic_fetch_or(place, value, __ATOMIC_RELAXED);
}
template <class T>
T atomicMax(T* place, T value) {
    T found = __atomic_load_n(place, __ATOMIC_RELAXED);
    while (found < value && !__atomic_compare_exchange_n(place, &found, value, true,
                                                         __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
    return found;
}
static inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
