// The scheduler of the fibers, and how a kernel is launched from outside; see cuda_emulator.h.
#include "cuda_emulator.h"

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>

#if !defined(__x86_64__)
#error "the switch between fibers is written for x86-64 alone"
#endif

namespace emulator {

thread_local Block* block;
thread_local Fiber* fiber;

namespace {

constexpr size_t STACK_NBYTES = 64 << 10;
constexpr unsigned MOST_THREADS = 1024, MOST_SHARED_NBYTES = 48 << 10;
enum Order { FORWARD, BACKWARD, SHUFFLED };

// Stacks of the largest block. Kept from launch to launch: mapped anew, their page faults take most
// of the time of tests. Fibers may find in them what others left.
struct Stacks {
    char* begin = static_cast<char*>(mmap(nullptr, STACK_NBYTES * MOST_THREADS,
                                          PROT_READ | PROT_WRITE,
                                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    ~Stacks() { munmap(begin, STACK_NBYTES * MOST_THREADS); }
};
thread_local Stacks stacks;

int order = FORWARD;
uint32_t seed = 1;
char message[256];

}  // namespace

// Saves what System V has a callee save, changes stacks, restores.
extern "C" void emulator_switch(void** from, void* to);
asm(R"(.text
.globl emulator_switch
.hidden emulator_switch
emulator_switch:
    pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
    ret
)");

// What threads do before a synchronisation happens before what they do after it; nothing else does.
EMULATOR_ITSELF static void release(char* here) {
#ifdef __SANITIZE_THREAD__
    __tsan_release(here);
#else
    (void)here;
#endif
}
EMULATOR_ITSELF static void acquire(char* here) {
#ifdef __SANITIZE_THREAD__
    __tsan_acquire(here);
#else
    (void)here;
#endif
}
EMULATOR_ITSELF static void tell_race_detector(void* which) {
#ifdef __SANITIZE_THREAD__
    __tsan_switch_to_fiber(which, 1);  // 1: the switch itself orders nothing
#else
    (void)which;
#endif
}

EMULATOR_ITSELF static void leave() {
    tell_race_detector(block->scheduler_race_detector);
    emulator_switch(&fiber->stack_pointer, block->scheduler_stack);
}
EMULATOR_ITSELF static void enter(Fiber& next) {
    fiber = &next;
    tell_race_detector(next.race_detector);
    emulator_switch(&block->scheduler_stack, next.stack_pointer);
}

EMULATOR_ITSELF static void begin() { acquire(&block->began); }
EMULATOR_ITSELF static void end() {
    release(&block->ended);
    fiber->state = State::done;
}
EMULATOR_ITSELF static void run_fiber() {
    begin();
    block->entry(block->arguments);
    end();
    leave();
    abort();
}

void fail(const char* what) {
    snprintf(message, sizeof message, "%s (block %u, thread %u)", what, block->index.x,
             fiber->number);
    block->error = message;
    fiber->state = State::done;
    leave();
    abort();
}

void wait_for_block(Site site) {
    char* released = &block->released[block->barriers & 1];
    fiber->state = State::in_block;
    fiber->site = site;
    release(released);
    leave();
    acquire(released);
}

const uint64_t* exchange(unsigned mask, uint64_t value, Site site) {
    Warp& warp = block->warps[fiber->warp];
    if (!(mask >> fiber->lane & 1)) fail("warp operation: the calling lane is not in its mask");
    if (warp.arrived == 0) {
        warp.mask = mask;
        warp.site = site;
    }
    if (warp.mask != mask) fail("warp operation: lanes disagree on the mask");
    if (warp.site != site) fail("warp operation: lanes of a warp meet at different calls");
    unsigned generation = warp.generation & 1;
    uint64_t* slots = warp.slots[generation];
    slots[fiber->lane] = value;
    warp.arrived |= 1u << fiber->lane;
    release(&warp.released[generation]);
    if (warp.arrived == mask) {
        warp.arrived = 0;
        warp.generation++;
        unsigned end = std::min(32 * fiber->warp + 32, unsigned(block->fibers.size()));
        for (unsigned i = 32 * fiber->warp; i < end; i++)
            if (block->fibers[i].state == State::in_warp) block->fibers[i].state = State::ready;
    } else {
        fiber->state = State::in_warp;
        leave();
    }
    acquire(&warp.released[generation]);
    return slots;
}

namespace {

struct Shuffler {
    uint32_t state;

    EMULATOR_ITSELF std::vector<unsigned> numbers(size_t size) {
        std::vector<unsigned> made(size);
        for (unsigned i = 0; i < size; i++)
            made[i] = order == BACKWARD ? unsigned(size) - 1 - i : i;
        return made;
    }
    EMULATOR_ITSELF void arrange(std::vector<unsigned>& numbers) {
        if (order != SHUFFLED) return;
        for (unsigned i = unsigned(numbers.size()) - 1; i > 0; i--) {
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            std::swap(numbers[i], numbers[state % (i + 1)]);
        }
    }
};

#ifdef __SANITIZE_THREAD__
std::vector<void*> race_detectors;  // of the threads of a block, by number
#endif

EMULATOR_ITSELF void make_fibers(Block& b) {
    for (unsigned i = 0; i < b.size.x; i++) {
        void** top = reinterpret_cast<void**>(b.stacks + (i + 1) * STACK_NBYTES);
        *--top = nullptr;
        *--top = reinterpret_cast<void*>(run_fiber);
        void* race_detector = nullptr;
#ifdef __SANITIZE_THREAD__
        // Made once: each maps megabytes, and blocks are in order, one after the other, anyway.
        if (race_detectors.size() == i) race_detectors.push_back(__tsan_create_fiber(0));
        race_detector = race_detectors[i];
#endif
        b.fibers[i] = {i, i % 32, i / 32, State::ready, nullptr, top - 6, race_detector};
    }
    for (Warp& warp : b.warps) warp.arrived = warp.generation = 0;
}

// Tells what is wrong where all threads wait; nullptr if they all have come to one barrier.
EMULATOR_ITSELF const char* stuck(Block& b) {
    unsigned at_barrier = 0, gone = 0;
    Site site = nullptr;
    bool mixed = false;
    for (Fiber& f : b.fibers) {
        gone += f.state == State::done;
        if (f.state != State::in_block) continue;
        mixed |= at_barrier++ && f.site != site;
        site = f.site;
    }
    unsigned in_warp = b.size.x - at_barrier - gone;
    if (in_warp)
        snprintf(message, sizeof message, "deadlock: %u threads wait for a warp operation (block %u)",
                 in_warp, b.index.x);
    else if (gone)
        snprintf(message, sizeof message, "%u of %u threads never come to a barrier (block %u)",
                 gone, b.size.x, b.index.x);
    else if (mixed)
        snprintf(message, sizeof message, "threads wait at different barriers (block %u)",
                 b.index.x);
    else
        return nullptr;
    return message;
}

EMULATOR_ITSELF void run_block(Block& b, Shuffler& shuffler) {
    make_fibers(b);
    acquire(&b.ended);
    memset(b.shared, 0xFF, b.shared_nbytes);
    release(&b.began);
    auto warps = shuffler.numbers(b.warps.size()), lanes = shuffler.numbers(32);
    while (true) {
        shuffler.arrange(warps);
        for (unsigned w : warps)
            for (bool any = true; any;) {
                any = false;
                shuffler.arrange(lanes);
                for (unsigned l : lanes) {
                    unsigned i = 32 * w + l;
                    if (i >= b.size.x || b.fibers[i].state != State::ready) continue;
                    enter(b.fibers[i]);
                    if (b.error) return;
                    any = true;
                }
            }
        bool done = true;
        for (Fiber& f : b.fibers) done &= f.state == State::done;
        if (done) return;
        if ((b.error = stuck(b))) return;
        b.barriers++;
        for (Fiber& f : b.fibers) f.state = State::ready;
    }
}

}  // namespace

EMULATOR_ITSELF int launch(void (*entry)(void*), void* arguments, unsigned grid, unsigned threads,
                           unsigned shared_nbytes) {
    message[0] = 0;
    const char* refused = grid == 0 || threads == 0 ? "a grid or block of size zero"
                          : threads > MOST_THREADS  ? "more than 1024 threads in a block"
                          : shared_nbytes > MOST_SHARED_NBYTES
                              ? "more than 48 KiB of shared memory"
                              : nullptr;
    if (refused) {
        snprintf(message, sizeof message, "launch: %s", refused);
        return 1;
    }
    // Shared memory ends where reading kills.
    size_t page = size_t(sysconf(_SC_PAGESIZE)), room = (shared_nbytes + page - 1) / page * page;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS;
    char* memory =
        static_cast<char*>(mmap(nullptr, room + page, PROT_READ | PROT_WRITE, flags, -1, 0));
    if (memory == MAP_FAILED || stacks.begin == MAP_FAILED) abort();
    mprotect(memory + room, page, PROT_NONE);
    Block b{};
    b.size = {threads, 1, 1};
    b.grid = {grid, 1, 1};
    b.fibers.resize(threads);
    b.warps.resize((threads + 31) / 32);
    b.shared_nbytes = (shared_nbytes + 15) / 16 * 16;
    b.shared = reinterpret_cast<unsigned char*>(memory + room - b.shared_nbytes);
    b.stacks = stacks.begin;
    b.entry = entry;
    b.arguments = arguments;
#ifdef __SANITIZE_THREAD__
    b.scheduler_race_detector = __tsan_get_current_fiber();
#endif
    block = &b;
    Shuffler shuffler{seed};
    for (unsigned i = 0; i < grid && !b.error; i++) {
        b.index = {order == BACKWARD ? grid - 1 - i : i, 0, 0};
        run_block(b, shuffler);
    }
    acquire(&b.ended);
#ifdef __SANITIZE_THREAD__
    if (b.error) race_detectors.clear();  // they are in the middle of functions
#endif
    munmap(memory, room + page);
    return b.error != nullptr;
}

template <class... A>
struct Call {
    void (*kernel)(A...);
    void** arguments;
};
template <class... A, size_t... I>
void call(Call<A...>& what, std::index_sequence<I...>) {
    what.kernel(*static_cast<A*>(what.arguments[I])...);
}
template <class... A>
int launch_kernel(void (*kernel)(A...), void** arguments, unsigned grid, unsigned threads,
                  unsigned shared_nbytes) {
    Call<A...> what{kernel, arguments};
    auto entry = [](void* it) {
        call(*static_cast<Call<A...>*>(it), std::index_sequence_for<A...>{});
    };
    return launch(entry, &what, grid, threads, shared_nbytes);
}
template <class... A>
int sizes_of(void (*)(A...), int* sizes) {
    int all[] = {int(sizeof(A))...};
    std::copy(std::begin(all), std::end(all), sizes);
    return sizeof...(A);
}

}  // namespace emulator

extern "C" void emulator_schedule(int order, uint32_t seed) {
    emulator::order = order;
    emulator::seed = seed;
}
extern "C" const char* emulator_error() { return emulator::message; }

// A launch and the sizes of the arguments, for each instance of a kernel that EXPORTS names.
#define EXPORT(number, ...)                                                                \
    extern "C" int launch_##number(void** arguments, unsigned grid, unsigned threads,      \
                                   unsigned shared_nbytes) {                               \
        return emulator::launch_kernel(&__VA_ARGS__, arguments, grid, threads, shared_nbytes); \
    }                                                                                      \
    extern "C" int sizes_##number(int* sizes) { return emulator::sizes_of(&__VA_ARGS__, sizes); }
#include KERNELS
#include EXPORTS
