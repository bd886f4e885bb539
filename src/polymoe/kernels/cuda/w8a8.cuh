// Products of e4m3 weights, with scales for 128 x 128, and e4m3 rows, with scales for 128 columns, by the matrix units' own
// e4m3 products (wgmma), for many rows.
//
// The matrix units add such products with 14 bits, so sums of 128 columns are multiplied by both scales and added in
// float32. h then is a little off before it is rounded, which for single tokens shows (docs/measured.md, "Right to 6e-3");
// with few rows fp8.cuh is as fast, and has exact sums.
//
// One block a multiprocessor walks over (item, 256 rows of weights) tiles. An item is one expert with up to MOST of the
// rows that chose it. Four warps keep a ring of weights, x and scales in shared memory filled; two warpgroups take turns
// at the matrix units. The order of weights, layouts/hopper_bytes.py, is that of float16 products, two codes a register:
// two such registers are one of four codes, of other columns than usual. So x and h have their columns in that order
// (in_pairs).
//
// Rows of x are gathered from wherever they are. h comes in tiles, as w4a8.cuh describes them.
#pragma once
#include "fp8_blocks.cuh"
#include "w4a8.cuh"

namespace polymoe {
namespace w8a8 {

using namespace fp8;

// Of `write_h`.
struct Pairs {
    static constexpr bool kRowScales = false;
    static constexpr int kSecondHalf = 2, kPair = 4;
};

// A stage: 128 columns of the tile's weights, of x, and for each two rows of x four scales: both rows' times the weights'
// first, then times their second.
template <int MOST>
struct Stage {
    static constexpr int kX = kTileBytes, kScales = kX + MOST * 128;
    static constexpr int kBytes = (kScales + MOST * 8 + 1023) / 1024 * 1024;
};

// All of K for the groups of this warpgroup and the item's rows, one chain of products of 128 columns after the other.
template <int MOST, int MATRIX>
struct Multiply {
    using Shape = Stage<MOST>;
    // Where K is short, so that a tile is soon done, one warpgroup's results are better written while the other multiplies.
    static constexpr bool kTurns = MATRIX != kDown;
    static constexpr int kWidest = 96;  // product, since its sums and what they are added to have to be in registers
    float (&acc)[kGroups][MOST / 2];
    Ring& ring;
    Turns& turns;
    uint32_t lane_weights, lane_scales;
    uint32_t a[4][4];

    __device__ __forceinline__ Multiply(float (&acc)[kGroups][MOST / 2], Ring& ring, Turns& turns)
        : acc(acc), ring(ring), turns(turns) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warpgroup = warp / 4;
        lane_weights = kept(warpgroup * kGroups * kGroupBytes + warp % 4 * 2048 + lane * 16);
        lane_scales = kept(Shape::kScales + lane % 4 * 16 + (MATRIX == kDown ? warpgroup * 8 : 0));
    }

    // The codes of a group: 32 columns after the other, rows g and g + 8.
    __device__ __forceinline__ void load(uint32_t stage, int m) {
#pragma unroll
        for (int part = 0; part < 4; ++part) {
            const uint4 v = load_shared_16(stage + lane_weights + m * kGroupBytes + part * 512);
            a[part][0] = bytes_of(make_uint2(v.x, v.y), 0x5410), a[part][1] = bytes_of(make_uint2(v.x, v.y), 0x7632);
            a[part][2] = bytes_of(make_uint2(v.z, v.w), 0x5410), a[part][3] = bytes_of(make_uint2(v.z, v.w), 0x7632);
#pragma unroll
            for (int i = 0; i < 4; ++i) made_here(a[part][i]);
        }
    }

    // 128 columns of a group by N rows of x from FIRST on, and the sums times both scales added up.
    template <int N, int FIRST>
    __device__ __forceinline__ void chain(float (&acc)[MOST / 2], uint32_t stage) {
        const uint32_t x = in_units(stage) + (Shape::kX + FIRST * 128) / 16;
        float sum[N / 2];
        if (kTurns) turns.wait();
        products_fence();
        Product<N>::set_e4m3(sum, a[0], describe_units(x));
#pragma unroll
        for (int part = 1; part < 4; ++part) Product<N>::add_e4m3(sum, a[part], describe_units(x + part * 2));
        products_commit();
        products_wait<0>();
        if (kTurns) turns.pass_on();
#pragma unroll
        for (int n = 0; n < N / 8; ++n) {
            float scales[4];
            const uint32_t from = stage + lane_scales + (FIRST / 8 + n) * 64;
            if (MATRIX == kDown) {
                const uint2 v = load_shared_8(from);
                scales[0] = scales[2] = __uint_as_float(v.x), scales[1] = scales[3] = __uint_as_float(v.y);
            } else {
                const uint4 v = load_shared_16(from);
                scales[0] = __uint_as_float(v.x), scales[1] = __uint_as_float(v.y);
                scales[2] = __uint_as_float(v.z), scales[3] = __uint_as_float(v.w);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float& to = acc[FIRST / 2 + 4 * n + i];
                made_here(sum[4 * n + i]);
                to = fmaf(sum[4 * n + i], scales[i], to);
            }
        }
    }

    template <int ROWS>
    __device__ __forceinline__ void run(int blocks) {
        constexpr int N = ROWS <= kWidest ? ROWS : ROWS / 2;
#pragma unroll
        for (int m = 0; m < kGroups; ++m) {
#pragma unroll
            for (int i = 0; i < ROWS / 2; ++i) acc[m][i] = 0.0f;
        }
        for (int left = blocks; left > 0; --left) {
            const uint32_t stage = ring.wait();
            if (MATRIX != kDown) shared_for_copies_and_products();  // x is what threads have copied
#pragma unroll
            for (int m = 0; m < kGroups; ++m) {
                load(stage, m);
                chain<N, 0>(acc[m], stage);
                if constexpr (N < ROWS) chain<N, N>(acc[m], stage);
            }
            __syncwarp();  // not needed, but without it the assembler is two registers short
            barrier_arrive(ring.empty + 8 * ring.slot);
            ring.next();
        }
    }

    // In products of N rows or, where the item has more, of the next of MORE.
    template <int N, int... MORE>
    __device__ __forceinline__ void run_narrowest(int blocks, int rows) {
        if constexpr (sizeof...(MORE) > 0) {
            if (rows > N) return run_narrowest<MORE...>(blocks, rows);
        }
        run<N>(blocks);
    }
};

// Four warps: all that a stage needs, 128 columns of the tiles after the other. One thread moves weights, and h where x is
// h; otherwise eight lanes have a row of x, 16 columns each, and the next row kAtOnce further on. Scales of two rows are in
// one thread's hands, on their way to registers while a stage is not free yet.
template <int MOST, int MATRIX>
struct Bring {
    using Shape = Stage<MOST>;
    static constexpr int kBringers = 4, kAtOnce = kBringers * 4, kTimes = (MOST + kAtOnce - 1) / kAtOnce;
    static_assert(MOST / 2 <= kBringers * 32 && kAtOnce % 8 == 0);
    static constexpr int kArrivals = 1 + (MATRIX == kDown ? 1 : 2) * kBringers * 32;  // copies', scales', x's
    const GemmArgs& args;
    Ring& ring;
    const int thread, first, piece;  // of the item's rows; of a row's 128 columns
    const uint32_t place;            // of the first row's piece in a stage
    uint32_t from[kTimes];           // the rows' pieces, in units of 16 bytes
    const uint8_t* x;                // of the item, where it is h
    const float *scales, *second_scales;
    WeightScales of_weights;
    float scale[2], weights[2];

    __device__ __forceinline__ Bring(const GemmArgs& args, Ring& ring, int thread)
        : args(args), ring(ring), thread(thread), first(thread / 8), piece(thread % 8),
          place(kept(Shape::kX + first * 128 + (piece ^ (first % 8)) * 16)) {}

    // Of a row of x, in units of 16 bytes; of the last one where the item has no such row.
    __device__ __forceinline__ uint32_t source(int4 item, int row) const {
        const uint32_t units = row_bytes(args.columns) / 16;
        return args.order[item.y + min(row, item.z - 1)] / args.slots * units;
    }

    __device__ __forceinline__ void find(int4 item, int tile) {
        of_weights = WeightScales::of<MATRIX>(args, item.x, tile);
        const uint4* all = reinterpret_cast<const uint4*>(args.x);
        if constexpr (MATRIX == kDown) {
            const int padded = padded_rows(item.z), blocks = args.columns / 128;
            x = reinterpret_cast<const uint8_t*>(all) + static_cast<long long>(item.w) * blocks * 132;
            scales = reinterpret_cast<const float*>(x + blocks * padded * 128) + min(2 * thread, padded - 2);
        } else {
#pragma unroll
            for (int i = 0; i < kTimes; ++i) from[i] = source(item, first + i * kAtOnce) + piece;
            scales = reinterpret_cast<const float*>(all + source(item, 2 * thread) + args.columns / 16);
            second_scales = reinterpret_cast<const float*>(all + source(item, 2 * thread + 1) + args.columns / 16);
        }
    }

    __device__ __forceinline__ void fetch_scales(int4 item, int block) {
        if (2 * thread >= item.z) return;
        if constexpr (MATRIX == kDown) {
            const float2 v = *reinterpret_cast<const float2*>(scales + block * padded_rows(item.z));
            scale[0] = v.x, scale[1] = v.y;
        } else {
            scale[0] = scales[block], scale[1] = second_scales[block];
        }
        weights[0] = of_weights.first[block], weights[1] = of_weights.second[block];
    }

    __device__ __forceinline__ void put_scales(int4 item, uint32_t stage) {
        if (2 * thread >= item.z) return;
        const float products[4] = {scale[0] * weights[0], scale[1] * weights[0], scale[0] * weights[1],
                                   scale[1] * weights[1]};
        store_shared_16(stage + Shape::kScales + thread * 16,
                        make_uint4(__float_as_uint(products[0]), __float_as_uint(products[1]),
                                   __float_as_uint(products[2]), __float_as_uint(products[3])));
    }

    // What the copy engine moves: all of this by one thread.
    __device__ __forceinline__ void move(int4 item, const uint8_t* codes, uint32_t bytes, int block, uint32_t stage,
                                         uint32_t barrier) {
        const uint32_t x_bytes = MATRIX == kDown ? padded_rows(item.z) * 128 : 0;
        barrier_arrive_expect(barrier, bytes + x_bytes);
        copy_bulk_once(stage, codes, bytes, barrier);
        if (MATRIX == kDown) copy_bulk(stage + Shape::kX, x + block * x_bytes, x_bytes, barrier);
    }

    __device__ __forceinline__ void run(int total, int tiles) {
        const int blocks = args.columns / 128;
        for (int at = blockIdx.x; at < total; at += gridDim.x) {
            const int index = at / tiles, tile = at - index * tiles;
            const int4 item = args.items[index];
            const uint32_t bytes = min(kTileBytes, args.rows * 128 - tile * kTileBytes);
            const uint8_t* codes = args.codes + item.x * args.codes_expert + 256LL * tile * args.columns;
            find(item, tile);
            fetch_scales(item, 0);
#pragma unroll 1
            for (int block = 0; block < blocks; ++block) {
                const uint32_t barrier = ring.full + 8 * ring.slot, stage = ring.data + ring.slot * ring.stage_bytes;
                barrier_wait(ring.empty + 8 * ring.slot, ring.parity);
                if (thread == 0) move(item, codes, bytes, block, stage, barrier);
                codes += bytes;
                if constexpr (MATRIX != kDown) {
                    const uint4* columns = reinterpret_cast<const uint4*>(args.x) + block * 8;
#pragma unroll
                    for (int i = 0; i < kTimes; ++i) {
                        if (first + i * kAtOnce < item.z) copy_16(stage + place + i * kAtOnce * 128, columns + from[i]);
                    }
                    barrier_arrive_with_copies(barrier);
                }
                put_scales(item, stage);
                barrier_arrive(barrier);
                if (block + 1 < blocks) fetch_scales(item, block + 1);
                ring.next();
            }
        }
    }
};

}  // namespace w8a8

// Tiles of 256 rows of weights by up to MOST rows of x, in products of as many or, if that is enough, one of the smaller
// WIDTHS.
template <int MATRIX, int MOST, int... WIDTHS>
__device__ __forceinline__ void w8a8_gemm(const GemmArgs& args) {
    using namespace w8a8;
    extern __shared__ __align__(1024) uint8_t memory[];
    __shared__ __align__(8) uint64_t barriers[2 * kMostStages], turns_of[kWarpgroups];
    __shared__ float largest[3 * MOST];
    const int warp = of_warp(threadIdx.x / 32);
    Ring ring = ring_at(args, memory, barriers, w8a8::Stage<MOST>::kBytes);
    if (threadIdx.x == 0) {
        init_barriers(args, ring, w8a8::Bring<MOST, MATRIX>::kArrivals, kWarps * 32);
        for (int i = 0; i < kWarpgroups; ++i) barrier_init(shared_address(&turns_of[i]), 4);
        barrier_init_visible();
    }
    for (int i = threadIdx.x; i < 3 * MOST; i += blockDim.x) largest[i] = 0.0f;
    __syncthreads();
    // Items were complete before the kernel in front of `down` let it start; x was not.
    if (MATRIX != kDown) {
        wait_for_previous_kernel();
        let_next_kernel_start();
    }
    const int tiles = (args.rows + 255) / 256, total = of_warp(*args.count) * tiles;

    if (warp >= kWarps) {
        fewer_registers<40>();
        ring.parity = 1;
        if (MATRIX == kDown) {
            wait_for_previous_kernel();
            let_next_kernel_start();
        }
        w8a8::Bring<MOST, MATRIX>(args, ring, threadIdx.x - kWarps * 32).run(total, tiles);
        return;
    }
    more_registers<232>();
    ring.parity = 0;
    const int warpgroup = warp / 4, groups = args.rows / 64;
    Turns turns{shared_address(&turns_of[warpgroup]), shared_address(&turns_of[1 - warpgroup]), warpgroup == 0};
    float acc[kGroups][MOST / 2];
    int turn = 0;
    for (int at = blockIdx.x; at < total; at += gridDim.x) {
        const int index = at / tiles, tile = at - index * tiles;
        int4 item = args.items[index];
        item.x = of_warp(item.x), item.y = of_warp(item.y), item.z = of_warp(item.z), item.w = of_warp(item.w);
        w8a8::Multiply<MOST, MATRIX>(acc, ring, turns).template run_narrowest<WIDTHS..., MOST>(args.columns / 128, item.z);
        if constexpr (MATRIX == kGated) {
            write_h<kWarpgroups, kGroups, MOST, Pairs>(args, acc, item, tile * 4, nullptr, largest, turn);
            if (++turn == 3) turn = 0;
        } else {
#pragma unroll
            for (int m = 0; m < kGroups; ++m) {
                const int group = (tile * kWarpgroups + warpgroup) * kGroups + m;
                if (group < groups) write_y<MOST, 4>(args, acc[m], item, group);
            }
        }
    }
}

}  // namespace polymoe

#define POLYMOE_W8A8(NAME, MATRIX, ...)                                        \
    extern "C" __global__ void __launch_bounds__(polymoe::fp8::kThreads, 1)    \
        NAME(const __grid_constant__ polymoe::GemmArgs args) {                 \
        polymoe::w8a8_gemm<polymoe::MATRIX, __VA_ARGS__>(args);                \
    }

// By the most rows of x of an item. The same numbers stand in launch_fp8.py.
#define POLYMOE_W8A8_SIZES(KIND, MATRIX) POLYMOE_W8A8(w8a8_##KIND##_160, MATRIX, 160, 32, 64, 80, 96, 112, 128)
