// Ahead of a call of experts in host memory: which expert lies in which slot on the GPU, and copies of those that lie
// in none. Both kernels have fixed grids and addresses, so CUDA graphs capture them.
#include <cstdint>

#include "entry.cuh"
#include "expert_ids.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/memory.cuh"

namespace polymoe {

constexpr int kMostExperts = 1024, kMostParts = 16;
constexpr int kAtOnce = 8;  // 16-byte loads of a thread that are on their way together
constexpr int kCopyThreads = 512, kChunkBytes = kCopyThreads * kAtOnce * 16;

struct PlaceExpertsArgs {
    const void* ids;               // [rows]
    int* slot_ids;                 // [rows]: first_expert + slot, or -1
    int* slot_of_expert;           // [experts], or -1
    int* expert_of_slot;           // [slots], or -1
    int* misses;                   // [1 + 2 * slots]: how many; expert and slot of each
    long long* last_use;           // [slots]: the last step that needed it; 0: none
    long long* counters;           // step, hits, misses
    int* wave_of_expert;           // [experts], or -1: written by wave 0, read by the others
    int* waves;                    // the last placed, and the last that the call needs
    unsigned long long condition;  // of a loop in a graph: whether the call needs further waves; or 0
    int rows, first_expert, experts, slots;
    int long_ids, wave;  // wave: -1 for the one after the last placed
};

// One CTA. Of slots that this wave does not need, the missing experts get those used least recently, in order of id;
// ties go by slot. A call that needs more experts than there are slots has several waves, each of at most as many: the
// first takes those that are in slots, then missing ones in order of id, and each of the others the next ones.
__device__ __forceinline__ void place_experts(const PlaceExpertsArgs& args) {
    __shared__ int slots[kMostExperts];       // of each expert; -2: not needed
    __shared__ int missing[kMostExperts];     // experts, in order
    __shared__ long long used[kMostExperts];  // last use of each slot; -1: needed now
    __shared__ int hits, found;
    const int thread = threadIdx.x, threads = blockDim.x;
    for (int e = thread; e < args.experts; e += threads) slots[e] = -2;
    if (thread == 0) hits = found = 0;
    grid_dependency_wait();
    const int wave = args.wave < 0 ? args.waves[0] + 1 : args.wave;
    for (int s = thread; s < args.slots; s += threads) used[s] = args.last_use[s];
    const long long step = args.counters[0] + 1;
    __syncthreads();
    for (int row = thread; row < args.rows; row += threads) {
        const long long id = expert_id(args, row) - args.first_expert;
        if (id < 0 || id >= args.experts || (wave && args.wave_of_expert[id] != wave)) continue;
        slots[id] = args.slot_of_expert[id];  // all that write write the same
    }
    __syncthreads();
    for (int e = thread; e < args.experts; e += threads) {
        if (slots[e] >= 0) {
            used[slots[e]] = -1;
            atomicAdd(&hits, 1);
        } else if (slots[e] == -1) {
            int before = 0;
            for (int other = 0; other < e; ++other) before += slots[other] == -1;
            missing[before] = e;
            atomicAdd(&found, 1);
        }
    }
    __syncthreads();
    const int room = args.slots - hits, misses = min(found, room);
    if (!wave) {
        for (int e = thread; e < args.experts; e += threads) args.wave_of_expert[e] = slots[e] >= 0 ? 0 : -1;
        __syncthreads();
        for (int i = thread; i < found; i += threads) {
            args.wave_of_expert[missing[i]] = i < room ? 0 : 1 + (i - room) / args.slots;
        }
    }
    if (misses) {
        for (int s = thread; s < args.slots; s += threads) {
            if (used[s] < 0) continue;
            int before = 0;
            for (int other = 0; other < args.slots; ++other) {
                before += used[other] >= 0 && (used[other] < used[s] || (used[other] == used[s] && other < s));
            }
            if (before >= misses) continue;
            const int expert = missing[before], evicted = args.expert_of_slot[s];
            if (evicted >= 0) args.slot_of_expert[evicted] = -1;
            args.expert_of_slot[s] = expert;
            args.slot_of_expert[expert] = slots[expert] = s;
            args.misses[1 + 2 * before] = expert, args.misses[2 + 2 * before] = s;
        }
        __syncthreads();
    }
    for (int e = thread; e < args.experts; e += threads) {
        if (slots[e] >= 0) args.last_use[slots[e]] = step;
    }
    for (int row = thread; row < args.rows; row += threads) {
        const long long id = expert_id(args, row) - args.first_expert;
        args.slot_ids[row] = id >= 0 && id < args.experts && slots[id] >= 0 ? args.first_expert + slots[id] : -1;
    }
    if (thread == 0) {
        args.misses[0] = misses;
        args.counters[0] = step, args.counters[1] += hits, args.counters[2] += misses;
        const int last = wave ? args.waves[1] : (found - misses + args.slots - 1) / args.slots;
        args.waves[0] = wave, args.waves[1] = last;
        if (args.condition) cudaGraphSetConditional(args.condition, wave < last);
    }
}

struct FetchExpertsArgs {
    const int* misses;                // as PlaceExpertsArgs
    const uint8_t* from[kMostParts];  // in host memory, [experts, bytes]
    uint8_t* to[kMostParts];          // [slots, bytes]
    long long bytes[kMostParts];
    int parts;
};

// Copies by chunks that CTAs take in turn.
__device__ __forceinline__ void fetch_experts(const FetchExpertsArgs& args) {
    grid_dependency_wait();
    const int misses = args.misses[0];
    if (!misses) return;
    int chunks = 0;  // of an expert
    for (int part = 0; part < args.parts; ++part) {
        chunks += static_cast<int>((args.bytes[part] + kChunkBytes - 1) / kChunkBytes);
    }
    for (int number = blockIdx.x; number < misses * chunks; number += gridDim.x) {
        const int miss = number / chunks;
        int part = 0;
        long long start = static_cast<long long>(number % chunks) * kChunkBytes;
        for (;; ++part) {
            const long long whole = (args.bytes[part] + kChunkBytes - 1) / kChunkBytes * kChunkBytes;
            if (start < whole) break;
            start -= whole;
        }
        const long long size = args.bytes[part], left = size - start;
        const uint8_t* from = args.from[part] + args.misses[1 + 2 * miss] * size + start;
        uint8_t* to = args.to[part] + args.misses[2 + 2 * miss] * size + start;
        const int bytes = left < kChunkBytes ? static_cast<int>(left) : kChunkBytes;
        if (size % 16) {  // vectors, such as one scale for an expert
            for (int i = threadIdx.x; i < bytes; i += blockDim.x) to[i] = from[i];
            continue;
        }
        uint4 v[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const int at = (i * kCopyThreads + threadIdx.x) * 16;
            v[i] = ld_global_v4_if(at < bytes, from + at);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const int at = (i * kCopyThreads + threadIdx.x) * 16;
            if (at < bytes) *reinterpret_cast<uint4*>(to + at) = v[i];
        }
    }
}

}  // namespace polymoe

POLYMOE_KERNEL(place_experts, PlaceExpertsArgs, (512), polymoe::place_experts)
POLYMOE_KERNEL(fetch_experts, FetchExpertsArgs, (polymoe::kCopyThreads), polymoe::fetch_experts)
