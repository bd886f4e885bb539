// Enough of CUDA to run the kernels on a CPU, one CTA at a time: each CUDA thread is a coroutine, copies land late and
// in any order, and what they are to overwrite is poisoned at once; asynchronous MMAs read their operands as late as
// they may. Included ahead of the kernels' sources; the files in ptx/ stand in for theirs.
#pragma once
#include <csetjmp>
#include <cstdarg>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __constant__ static
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))

using std::max;
using std::min;

struct int4 {
    int x, y, z, w;
};
struct uint2 {
    uint32_t x, y;
};
struct uint4 {
    uint32_t x, y, z, w;
};
struct float2 {
    float x, y;
};
struct float4 {
    float x, y, z, w;
};
struct ushort4 {
    uint16_t x, y, z, w;
};
struct Index {
    int x, y;
};
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace emulator {

constexpr int kStack = 96 * 1024;
constexpr uint32_t kStart = 1024 + 128;  // where dynamic shared memory begins: no multiple of 1024

struct Product {
    float* d;
    const uint32_t* a;     // registers; or null, and then
    uint64_t shared_a, b;  // descriptors of shared memory
    int n;
    bool e4m3 = false, fresh = false;  // what is multiplied; whether d is set instead of added to
    bool float16 = false;              // otherwise bfloat16
};

struct Copy {
    uint8_t* to;
    const uint8_t* from;
    uint32_t bytes, barrier;
    std::vector<Copy> parts;  // which land together; or this one lands alone
};

struct Thread {
    Index index;
    int number;
    bool done = false, started = false;
    jmp_buf at;
    ucontext_t context;
    std::vector<char> stack;
    std::vector<Product> open;                 // products of no group yet
    std::vector<std::vector<Product>> groups;  // under way, the first one first
    std::vector<Copy> copies;                  // that no barrier waits for yet
};

// Lanes of a warp, or threads of a barrier, that meet.
struct Meeting {
    int arrived = 0;
    long generation = 0;
    void* with[1024];
};

struct Barrier {
    uint32_t address;
    int arrivals, pending;
    long bytes;
    uint32_t phase;
};

struct Range {
    const uint8_t* start;
    long size;
};

struct Block {
    std::vector<Thread> threads;
    Thread* now = nullptr;
    jmp_buf scheduler;
    void (*call)(void*, const void*);  // calls the kernel with its arguments
    void* kernel;
    const void* args;
    Meeting warps[32], named[16];
    std::vector<Barrier> barriers;
    std::vector<Copy> copies;
    Index block, grid;
    int size, shared_bytes;
    bool moved, waited, copied;
    char error[256];
    std::vector<Range> ranges;  // of global memory: copies stay inside
};

inline Block here;

[[noreturn]] inline void fail(const char* format, ...) {
    va_list list;
    va_start(list, format);
    vsnprintf(here.error, sizeof here.error, format, list);
    va_end(list);
    _longjmp(here.scheduler, 2);
}

// Until something holds that others bring about.
template <class Condition>
void wait_until(Condition condition) {
    while (!condition()) {
        if (!_setjmp(here.now->at)) _longjmp(here.scheduler, 1);
    }
    here.moved = true;
}

// All `count` meet; the last one does `work` with what each has brought.
template <class Work>
void meet(Meeting& meeting, int place, int count, void* brought, Work work) {
    const long generation = meeting.generation;
    meeting.with[place] = brought;
    here.moved = true;
    if (++meeting.arrived == count) {
        meeting.arrived = 0, ++meeting.generation;
        work(meeting.with);
    } else {
        wait_until([&] { return meeting.generation != generation; });
    }
}

template <class Work>
void meet_warp(void* brought, Work work) {
    const int lanes = min(32, here.size);
    meet(here.warps[here.now->number / 32], here.now->number % 32, lanes, brought, work);
}

inline void enter() {
    here.call(here.kernel, here.args);
    here.now->done = here.moved = true;
    _longjmp(here.scheduler, 1);
}

inline void check_barrier(Barrier& barrier) {
    if (barrier.pending == 0 && barrier.bytes == 0) barrier.pending = barrier.arrivals, ++barrier.phase;
}

inline Barrier& barrier_at(uint32_t address) {
    for (Barrier& barrier : here.barriers) {
        if (barrier.address == address) return barrier;
    }
    fail("a barrier that was never made");
}

inline void land(size_t which) {
    const Copy copy = std::move(here.copies[which]);
    here.copies.erase(here.copies.begin() + which);
    for (const Copy& part : copy.parts) memcpy(part.to, part.from, part.bytes);
    if (copy.parts.empty()) memcpy(copy.to, copy.from, copy.bytes);
    Barrier& barrier = barrier_at(copy.barrier);
    barrier.bytes -= copy.bytes;
    if (barrier.bytes < 0) fail("more bytes came than a barrier expects");
    check_barrier(barrier);
}

inline bool run_block() {
    for (auto& t : here.threads) t.done = t.started = false, t.open.clear(), t.groups.clear(), t.copies.clear();
    for (auto& meeting : here.warps) meeting.arrived = 0;
    for (auto& meeting : here.named) meeting.arrived = 0;
    here.barriers.clear(), here.copies.clear();
    here.waited = here.copied = false;
    // Between _setjmp and _longjmp nothing here but volatile and static values counts.
    static size_t next, turn;
    static bool backwards;
    static int idle;
    next = turn = 0, backwards = false, idle = 0, here.moved = false;
    const int how = _setjmp(here.scheduler);
    if (how == 2) return false;
    while (true) {
        if (next == here.threads.size()) {  // a turn is over
            if (!here.copies.empty() && (random() % 3 == 0 || !here.moved)) {
                for (size_t count = 1 + here.copies.size() / 16; count > 0; --count) {
                    land(random() % here.copies.size());
                }
                here.moved = true;
            }
            idle = here.moved ? 0 : idle + 1;
            bool all = true;
            for (auto& t : here.threads) all = all && t.done;
            if (all) break;
            if (idle > 3) {
                snprintf(here.error, sizeof here.error, "all threads wait");
                return false;
            }
            here.moved = false, next = 0, ++turn, backwards = random() % 2;
        }
        Thread& t = here.threads[backwards ? here.threads.size() - 1 - next : next];
        ++next;
        if (t.done) continue;
        here.now = &t;
        if (t.started) _longjmp(t.at, 1);
        t.started = true;
        getcontext(&t.context);
        t.context.uc_stack.ss_sp = t.stack.data(), t.context.uc_stack.ss_size = kStack, t.context.uc_link = nullptr;
        makecontext(&t.context, enter, 0);
        setcontext(&t.context);
    }
    bool waited_for = true;
    for (auto& t : here.threads) waited_for = waited_for && t.copies.empty();
    if (!waited_for)
        snprintf(here.error, sizeof here.error, "a copy that no barrier waits for");
    else if (!here.copies.empty())
        snprintf(here.error, sizeof here.error, "a copy is under way at the end");
    else if (!here.waited && (here.block.x == 0 || here.copied || here.barriers.empty()))  // others may have no work
        snprintf(here.error, sizeof here.error, "ends without having waited for the kernel before");
    else
        return true;
    return false;
}

inline float bfloat16(uint32_t bits) {
    bits <<= 16;
    float v;
    memcpy(&v, &bits, 4);
    return v;
}

inline uint16_t to_bits(float v) {
    uint32_t bits;
    memcpy(&bits, &v, 4);
    if ((bits & 0x7FFFFFFF) > 0x7F800000) return 0x7FFF;
    return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

struct E4M3 {
    float values[256];
    E4M3() {
        for (int code = 0; code < 256; ++code) {
            const int exponent = code >> 3 & 15, mantissa = code & 7;
            const float v = exponent ? ldexpf(8 + mantissa, exponent - 10) : ldexpf(mantissa, -9);
            values[code] = (code & 0x7F) == 0x7F ? NAN : code & 0x80 ? -v : v;
        }
    }
};
inline const E4M3 kE4m3;
inline float from_e4m3(uint8_t code) { return kE4m3.values[code]; }

// To the nearest, of two to the even code; above 448 to 448.
inline uint8_t to_e4m3(float v) {
    const uint8_t sign = std::signbit(v) ? 0x80 : 0;
    if (v != v) return sign | 0x7F;
    const float magnitude = fminf(fabsf(v), 448.0f);
    int exponent = 0;
    if (magnitude < 0.015625f)
        exponent = -5;
    else
        frexpf(magnitude, &exponent);        // below 2^-6 there is no smaller exponent
    const int step = max(exponent - 4, -9);  // of the last bit of the mantissa
    const int units = static_cast<int>(nearbyintf(ldexpf(magnitude, -step)));
    return sign | static_cast<uint8_t>(units + (step + 9) * 8);
}

inline float half(uint32_t pair, int which) { return bfloat16(pair >> 16 * which & 0xFFFF); }

inline float float16(uint16_t bits) {
    _Float16 v;
    memcpy(&v, &bits, 2);
    return static_cast<float>(v);
}

// Whether e4m3 products are added as Hopper's tensor cores do.
inline bool coarse = false;

// Of zeros and of subnormal numbers -126.
inline int exponent_of(float v) {
    uint32_t bits;
    memcpy(&bits, &v, 4);
    return max(static_cast<int>(bits >> 23 & 0xFF), 1) - 127;
}

inline double power_of_two(int exponent) {
    const uint64_t bits = static_cast<uint64_t>(exponent + 1023) << 52;
    double v;
    memcpy(&v, &bits, 8);
    return v;
}

inline int first_bit(long units) { return 63 - __builtin_clzl(labs(units)); }

// 32 products and the sum so far, all at once: each is cut off 13 bits behind the largest one's first bit, and so is
// the new sum. An H200's sums of 128 columns equal these to the bit in 0.87 of cases.
inline float add_coarsely(float sum, const float (&products)[32]) {
    constexpr int kBits = 13;
    float largest = fabsf(sum), plain = sum;
    for (float p : products) largest = fabsf(p) > largest ? fabsf(p) : largest, plain += p;
    if (largest == 0.0f || plain != plain) return plain;
    const int unit = ilogbf(largest) - kBits;
    const double scale = power_of_two(-unit);
    long units = static_cast<long>(sum * scale);
    for (float p : products) units += static_cast<long>(p * scale);
    if (units == 0) return 0.0f;
    const int cut = max(0, first_bit(units) - kBits);
    return static_cast<float>(static_cast<double>(units / (1L << cut)) * power_of_two(unit + cut));
}

// Whether products of bfloat16 are added as tensor cores do.
inline bool aligned = false;

// Products and the sum so far, all at once, by the rule that MMA-Sim found (arXiv 2511.10909): the largest exponent is
// that of the sum or of a product, which is the sum of its factors' exponents; every term is cut off some bits behind
// it, and the exact sum of these is cut off to float32.
template <int COUNT, int BITS>
inline float add_at_once(float sum, const float* a, const float* b) {
    double plain = sum;
    int largest = exponent_of(sum);
    for (int k = 0; k < COUNT; ++k) {
        plain += static_cast<double>(a[k]) * b[k];
        largest = max(largest, exponent_of(a[k]) + exponent_of(b[k]));
    }
    if (plain != plain || std::isinf(plain)) return static_cast<float>(plain);
    const double scale = power_of_two(BITS - largest);
    long units = static_cast<long>(sum * scale);
    for (int k = 0; k < COUNT; ++k) units += static_cast<long>(static_cast<double>(a[k]) * b[k] * scale);
    if (units == 0) return 0.0f;
    const int unit = largest - BITS;
    const int cut = min(40, max(0, max(first_bit(units) - 23, -149 - unit)));  // there are fewer than 40 bits
    return static_cast<float>(static_cast<double>(units / (1L << cut)) * power_of_two(unit + cut));
}

// 16 products, from Hopper on.
inline float add_aligned(float sum, const float* a, const float* b) { return add_at_once<16, 25>(sum, a, b); }

// Where emulated kernels spend their time.
__attribute__((optimize("O3"), noinline)) inline void add_multiples(float* sums, const float* values, float by, int n) {
    for (int i = 0; i < n; ++i) sums[i] += by * values[i];
}

// What an m16nNk16 product (or one of more columns) of a warp makes of a[row][k] and b[k][n]. Operands are read once.
template <class A, class B>
void product(float* (&d)[32], int n, A a, B b, int columns = 16, bool fresh = false) {
    static float rows[16][32], values[32][256], sums[256];
    for (int row = 0; row < 16; ++row) {
        for (int k = 0; k < columns; ++k) rows[row][k] = a(row, k);
    }
    for (int k = 0; k < columns; ++k) {
        for (int column = 0; column < n; ++column) values[k][column] = b(k, column);
    }
    for (int row = 0; row < 16; ++row) {
        auto at = [&](int column) -> float& {
            return d[row % 8 * 4 + column % 8 / 2][column / 8 * 4 + row / 8 * 2 + column % 2];
        };
        for (int column = 0; column < n; ++column) sums[column] = fresh ? 0.0f : at(column);
        if (coarse && columns == 32) {
            float products[32];
            for (int column = 0; column < n; ++column) {
                for (int k = 0; k < 32; ++k) products[k] = rows[row][k] * values[k][column];
                sums[column] = add_coarsely(sums[column], products);
            }
        } else if (aligned && columns == 16) {
            float column_of_b[16];
            for (int column = 0; column < n; ++column) {
                for (int k = 0; k < 16; ++k) column_of_b[k] = values[k][column];
                sums[column] = add_aligned(sums[column], rows[row], column_of_b);
            }
        } else {
            for (int k = 0; k < columns; ++k) add_multiples(sums, values[k], rows[row][k], n);
        }
        for (int column = 0; column < n; ++column) at(column) = sums[column];
    }
}

// Where the A operand's element is among the lanes' registers.
inline float of_registers(const uint32_t* (&a)[32], int row, int k, bool e4m3 = false, bool of_float16 = false) {
    if (e4m3) return from_e4m3(a[row % 8 * 4 + k % 16 / 4][row / 8 + k / 16 * 2] >> 8 * (k % 4));
    const uint32_t pair = a[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2];
    return of_float16 ? float16(pair >> 16 * (k % 2) & 0xFFFF) : half(pair, k % 2);
}

}  // namespace emulator

#define threadIdx (emulator::here.now->index)
#define blockIdx (emulator::here.block)
#define gridDim (emulator::here.grid)
#define blockDim (Index{emulator::here.size, 1})

inline void __syncthreads() {
    emulator::meet(emulator::here.named[0], emulator::here.now->number, emulator::here.size, nullptr, [](void**) {});
}
inline void __syncwarp() {
    emulator::meet_warp(nullptr, [](void**) {});
}

template <class Work>
inline int of_lanes(int value, Work work) {
    struct Brought {
        int in, out;
    } mine{value, 0};
    emulator::meet_warp(&mine, [&](void** with) {
        for (int lane = 0; lane < 32; ++lane) {
            static_cast<Brought*>(with[lane])->out =
                work(lane, [&](int other) { return static_cast<Brought*>(with[other])->in; });
        }
    });
    return mine.out;
}
inline int __shfl_up_sync(uint32_t, int value, int step) {
    return of_lanes(value, [=](int lane, auto of) { return of(lane >= step ? lane - step : lane); });
}
inline int __shfl_sync(uint32_t mask, int value, int from) {
    if (mask == 1u) return value;  // the first lane's own
    struct Brought {
        int in, from, out;
    } mine{value, from, 0};
    emulator::meet_warp(&mine, [](void** with) {
        for (int lane = 0; lane < 32; ++lane) {
            auto* b = static_cast<Brought*>(with[lane]);
            b->out = static_cast<Brought*>(with[b->from & 31])->in;
        }
    });
    return mine.out;
}
inline float __shfl_sync(uint32_t mask, float value, int from) {
    int bits;
    memcpy(&bits, &value, 4);
    bits = __shfl_sync(mask, bits, from);
    memcpy(&value, &bits, 4);
    return value;
}
inline unsigned long long __shfl_sync(uint32_t mask, unsigned long long value, int from) {
    const auto low = static_cast<uint32_t>(__shfl_sync(mask, static_cast<int>(value), from));
    const auto high = static_cast<uint32_t>(__shfl_sync(mask, static_cast<int>(value >> 32), from));
    return static_cast<unsigned long long>(high) << 32 | low;
}
inline uint32_t __shfl_xor_sync(uint32_t, uint32_t value, int mask) {
    return of_lanes(static_cast<int>(value), [=](int lane, auto of) { return of(lane ^ mask); });
}
inline float __shfl_xor_sync(uint32_t, float value, int mask) {
    struct Brought {
        float in, out;
        int mask;
    } mine{value, 0.0f, mask};
    emulator::meet_warp(&mine, [](void** with) {
        for (int lane = 0; lane < 32; ++lane) {
            auto* b = static_cast<Brought*>(with[lane]);
            b->out = static_cast<Brought*>(with[lane ^ b->mask])->in;
        }
    });
    return mine.out;
}
inline uint32_t __match_any_sync(uint32_t, int value) {
    return of_lanes(value, [](int lane, auto of) {
        int same = 0;
        for (int other = 0; other < 32; ++other) same |= (of(other) == of(lane)) << other;
        return same;
    });
}
inline uint32_t __ballot_sync(uint32_t, bool value) {
    return of_lanes(value, [](int, auto of) {
        int set = 0;
        for (int lane = 0; lane < 32; ++lane) set |= (of(lane) != 0) << lane;
        return set;
    });
}
inline int __popc(uint32_t v) { return __builtin_popcount(v); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline int __ffs(uint32_t v) { return __builtin_ffs(v); }
inline uint32_t __funnelshift_l(uint32_t low, uint32_t high, int by) {
    return static_cast<uint32_t>((static_cast<uint64_t>(high) << 32 | low) << by >> 32);
}
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, int by) {
    return static_cast<uint32_t>((static_cast<uint64_t>(high) << 32 | low) >> by);
}
inline int __clz(int v) { return __builtin_clz(v); }
inline float __uint_as_float(uint32_t bits) {
    float v;
    memcpy(&v, &bits, 4);
    return v;
}
inline uint32_t __float_as_uint(float v) {
    uint32_t bits;
    memcpy(&bits, &v, 4);
    return bits;
}
inline float __int_as_float(int bits) { return __uint_as_float(bits); }
inline float __expf(float v) { return expf(v); }
inline int atomicAdd(int* at, int value) {
    const int before = *at;
    *at += value;
    return before;
}

// A condition's handle is its address.
inline void cudaGraphSetConditional(unsigned long long handle, unsigned value) {
    *reinterpret_cast<unsigned*>(handle) = value;
}

inline uint32_t atomicMax(uint32_t* at, uint32_t value) {
    const uint32_t before = *at;
    if (value > before) *at = value;
    return before;
}
namespace polymoe {
inline __align__(1024) uint8_t memory[228 * 1024];
}

#define POLYMOE_CALL(ARGS)                                                                           \
    extern "C" void call_##ARGS(void* kernel, const void* args) {                                    \
        reinterpret_cast<void (*)(polymoe::ARGS)>(kernel)(*static_cast<const polymoe::ARGS*>(args)); \
    }                                                                                                \
    extern "C" int size_of_##ARGS() { return sizeof(polymoe::ARGS); }

extern "C" void set_sums(int coarse, int aligned) { emulator::coarse = coarse, emulator::aligned = aligned; }

// The whole grid, block after block. Nothing, or what went wrong.
extern "C" const char* emulate(void (*call)(void*, const void*), void* kernel, const void* args, int grid_x, int grid_y,
                               int threads, int shared_bytes, int seed, const long* ranges, int count) {
    auto& here = emulator::here;
    if (static_cast<int>(here.threads.size()) != threads) {
        here.threads = std::vector<emulator::Thread>(threads);
        for (int i = 0; i < threads; ++i) {
            here.threads[i].index = {i, 0}, here.threads[i].number = i;
            here.threads[i].stack.resize(emulator::kStack);
        }
    }
    here.call = call, here.kernel = kernel, here.args = args;
    srandom(seed);
    here.grid = {grid_x, grid_y}, here.size = threads, here.shared_bytes = shared_bytes;
    here.ranges.clear();
    for (int i = 0; i < count; ++i)
        here.ranges.push_back({reinterpret_cast<const uint8_t*>(ranges[2 * i]), ranges[2 * i + 1]});
    for (int y = 0; y < grid_y; ++y) {
        for (int x = 0; x < grid_x; ++x) {
            here.block = {x, y};
            memset(polymoe::memory, 0xFF, sizeof polymoe::memory);
            if (!emulator::run_block()) return here.error;
        }
    }
    return nullptr;
}
