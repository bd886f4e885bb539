// Copies of 32-bit words whose bits are moved, between views of any strides: how layouts of 4-bit weights pack and
// unpack.
#include <cstdint>

#include "entry.cuh"
#include "ptx/griddepcontrol.cuh"

namespace polymoe {

constexpr int kWordDims = 7, kWordBits = 32;

struct MoveBitsArgs {
    const uint8_t* from;
    uint8_t* to;
    long long from_strides[kWordDims + 2];  // in bytes; the last two are those of [2, 2] bytes of a word
    long long to_strides[kWordDims + 2];
    int sizes[kWordDims];
    int from_words, to_words;   // whether the bytes of a word are one aligned word
    int turns;                  // how many of the following there are
    int by[kWordBits];          // bits to the left that a word is rotated by
    uint32_t masks[kWordBits];  // bits of the result that are in place then
};

__device__ __forceinline__ uint32_t word_at(const uint8_t* at, const long long* strides, bool whole) {
    if (whole) return *reinterpret_cast<const uint32_t*>(at);
    const uint32_t low = at[0] | at[strides[1]] << 8;
    return low | (at[strides[0]] | at[strides[0] + strides[1]] << 8) << 16;
}

// A thread has one place in the last five dimensions, and a number of places in the first two.
__device__ __forceinline__ void move_bits(const MoveBitsArgs& args) {
    const uint8_t* from = args.from;
    uint8_t* to = args.to;
    unsigned place = blockIdx.x * blockDim.x + threadIdx.x;
#pragma unroll
    for (int d = kWordDims - 1; d > 1; --d) {
        const unsigned size = args.sizes[d], i = place % size;
        place /= size;
        from += i * args.from_strides[d], to += i * args.to_strides[d];
    }
    if (place) return;
    grid_dependency_wait();
    const long long* to_bytes = args.to_strides + kWordDims;
    const unsigned rows = args.sizes[0] * args.sizes[1], columns = args.sizes[1];
    for (unsigned outer = blockIdx.y; outer < rows; outer += gridDim.y) {
        const unsigned i = outer / columns, j = outer % columns;
        const uint32_t word = word_at(from + i * args.from_strides[0] + j * args.from_strides[1],
                                      args.from_strides + kWordDims, args.from_words);
        uint32_t moved = 0;
        for (int turn = 0; turn < args.turns; ++turn) {
            moved |= __funnelshift_l(word, word, args.by[turn]) & args.masks[turn];
        }
        uint8_t* at = to + i * args.to_strides[0] + j * args.to_strides[1];
        if (args.to_words) {
            *reinterpret_cast<uint32_t*>(at) = moved;
        } else {
            at[0] = moved, at[to_bytes[1]] = moved >> 8;
            at[to_bytes[0]] = moved >> 16, at[to_bytes[0] + to_bytes[1]] = moved >> 24;
        }
    }
}

}  // namespace polymoe

POLYMOE_KERNEL(move_bits, MoveBitsArgs, (512), polymoe::move_bits)
