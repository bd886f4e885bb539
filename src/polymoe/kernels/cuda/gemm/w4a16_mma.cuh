// 4-bit weights and bfloat16 rows by mma.sync, for few rows an expert, where time is the reading of weights.
//
// One persistent CTA per SM walks over its share of the tiles (a work tile by BLOCK_N rows of weights). One producer
// warp keeps a pipeline of weights full, across tiles and experts; another one loads the work tiles' rows of x; sixteen
// consumer warps dequantize and multiply, with K split between PARTS of them. A work tile has up to 8 * M_BLOCKS rows.
//
// Where shared memory has room, whole rows of x lie beside the pipeline and are loaded once for all tiles of a work
// tile. With POLYMOE_X_IN_STAGES a stage holds the columns of x that its weights multiply, so that 99 KB are enough for
// any K; a row of x is then loaded once for each tile. Sums are the same, in the same order.
#pragma once
#include "../dequant/scales.cuh"
#include "../epilogue.cuh"
#include "../ptx/compiler.cuh"
#include "../ptx/griddepcontrol.cuh"
#include "../ptx/mma.cuh"

namespace polymoe {
namespace w4a16_mma {

#ifdef POLYMOE_X_IN_STAGES
constexpr bool kXInStages = true;
#else
constexpr bool kXInStages = false;
#endif

constexpr int kWarps = kMmaConsumerWarps + kMmaProducerWarps;
constexpr int kStageCodes = kMmaStageBlocks * 2048;

template <class F>
constexpr int kStageBytes = kStageCodes + kMmaStageBlocks / F::kScaleBlocks * F::kScaleBytes;

// Dequantized weights times x. `scale_words` belong to the two tiles of 16 rows, b to x.
template <class F, int M, int M_BLOCKS>
__device__ __forceinline__ void mma_words(float (&acc)[2][M_BLOCKS][4], const uint4 (&words)[2],
                                          const uint32_t (&scale_words)[2][2], const uint32_t (&b)[M][2][4], F) {
    const typename F::Scales scales[2] = {F::scales(scale_words[0]), F::scales(scale_words[1])};
#pragma unroll
    for (int step = 0; step < 4; ++step) {
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
            const uint32_t word[4] = {words[tile].x, words[tile].y, words[tile].z, words[tile].w};
            uint32_t a[4];
            dequantize<F>(a, word[step], F::scale(scales[tile], step));
#pragma unroll
            for (int m = 0; m < M; ++m) {
                mma_m16n8k16(acc[tile][m], a, b[m][step / 2][step % 2 * 2], b[m][step / 2][step % 2 * 2 + 1]);
            }
        }
    }
}

// The same with fewer instructions for int4 and 8 rows of x: codes are used as they are cheapest to make, 136 too
// large, and the accumulator starts at -136 times the sum of x, which the tensor cores compute too. Sums over a group
// of columns are multiplied by the group's scale. Not in kernels for more rows, where a row's result must not depend on
// how many other rows its work tile has.
template <int GROUP>
__device__ __forceinline__ void mma_words(float (&acc)[2][1][4], const uint4 (&words)[2],
                                          const uint32_t (&scale_words)[2][2], const uint32_t (&b)[1][2][4],
                                          Int4<GROUP>) {
    constexpr int kSteps = GROUP == 32 ? 2 : 4;  // of 16 columns that share a scale
    const uint32_t minus_136[4] = {kMinus136, kMinus136, kMinus136, kMinus136};
#pragma unroll
    for (int first = 0; first < 4; first += kSteps) {
        float zero[4] = {};
#pragma unroll
        for (int step = first; step < first + kSteps; ++step) {
            mma_m16n8k16(zero, minus_136, b[0][step / 2][step % 2 * 2], b[0][step / 2][step % 2 * 2 + 1]);
        }
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
            const uint32_t word[4] = {words[tile].x, words[tile].y, words[tile].z, words[tile].w};
            float sum[4];
#pragma unroll
            for (int step = first; step < first + kSteps; ++step) {
                uint32_t a[4];
                dequant_int4_plus_136(a, word[step]);
                mma_m16n8k16(sum, step == first ? zero : sum, a, b[0][step / 2][step % 2 * 2],
                             b[0][step / 2][step % 2 * 2 + 1]);
            }
            const uint32_t scales = Int4<GROUP>::scale(Int4<GROUP>::scales(scale_words[tile]), first);
            const float low = __uint_as_float(scales << 16), high = __uint_as_float(scales & 0xFFFF0000u);
#pragma unroll
            for (int i = 0; i < 4; ++i) acc[tile][0][i] = fmaf(sum[i], i < 2 ? low : high, acc[tile][0][i]);
        }
    }
}

// 64 columns of two tiles of 16 rows of weights, for 8 * M rows of x. All loads come first, since volatile assembly
// stays in order, and the stage is released as soon as they are made.
template <class F, int M, int M_BLOCKS>
__device__ __forceinline__ void mma_block(float (&acc)[2][M_BLOCKS][4], uint32_t codes, uint32_t scales, uint32_t x,
                                          uint32_t x_eight_rows, uint32_t empty, bool leader) {
    uint32_t b[M][2][4], scale_words[2][2];
    const uint4 words[2] = {ld_shared_v4(codes), ld_shared_v4(codes + 512)};
    load_scale_words<F>(scale_words, scales);
#pragma unroll
    for (int m = 0; m < M; ++m) {
        ldmatrix_x4(b[m][0], x + m * x_eight_rows);
        ldmatrix_x4(b[m][1], x + m * x_eight_rows + 64);
    }
    __syncwarp();
    if (leader) mbarrier_arrive(empty);
    mma_words(acc, words, scale_words, b, F());
}

// The k_tail, fewer than 64 columns, in steps of 16.
template <class F, int M_BLOCKS>
__device__ __forceinline__ void mma_k_tail(float (&acc)[2][M_BLOCKS][4], uint32_t codes, uint32_t scales, uint32_t x,
                                           uint32_t x_eight_rows, int steps, int tiles) {
#pragma unroll
    for (int step = 0; step < 3; ++step) {
        if (step == steps) break;
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
            if (tile < tiles) {
                const typename F::Scales tile_scales = load_scales<F>(scales + tile * kTileScaleBytes<F>);
                uint32_t a[4];
                dequantize<F>(a, ld_shared(codes + (tile * steps + step) * 128), F::scale(tile_scales, step));
#pragma unroll
                for (int m = 0; m < M_BLOCKS; ++m) {
                    uint32_t b0, b1;
                    ldmatrix_x2(b0, b1, x + m * x_eight_rows + step * 32);
                    mma_m16n8k16(acc[tile][m], a, b0, b1);
                }
            }
        }
    }
}

// Writes 16 rows of weights by 8 rows of x from m0 on. h goes to permuted rows, y to expanded rows.
template <class F, int PART>
__device__ __forceinline__ void store(const GemmArgs& args, float4 c, WorkTile tile, int tile16, int m0, int lane) {
    const int g = lane / 4;
    const float low_scale = acc_scale<F>(args.expert_scale, tile.expert);
    const float high_scale = PART == kGateUp ? acc_scale<F>(args.up_expert_scale, tile.expert) : low_scale;
    const float low[2] = {c.x * low_scale, c.y * low_scale}, high[2] = {c.z * high_scale, c.w * high_scale};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int m = m0 + 2 * (lane % 4) + i;
        if (m >= tile.rows) break;
        const int row = tile.row + m;
        if (PART == kDown) {
            const int n = tile16 * 16 + g;
            const long long bias = static_cast<long long>(tile.expert) * args.n + n;
            float* out =
                static_cast<float*>(args.out) + static_cast<long long>(args.permuted_to_expanded[row]) * args.n + n;
            out[0] = low[i] + load_bias(args.bias, args.bias_dtype, bias);
            out[8] = high[i] + load_bias(args.bias, args.bias_dtype, bias + 8);
        } else {
            const float weight = args.router_weights ? args.router_weights[args.permuted_to_expanded[row]] : 1.0f;
            if (PART == kGateUp) {
                const int width = args.n / 2, n = tile16 * 8 + g;
                const long long bias = static_cast<long long>(tile.expert) * width + n;
                const float gate = low[i] * weight + load_bias(args.bias, args.bias_dtype, bias);
                const float up = high[i] * weight + load_bias(args.up_bias, args.bias_dtype, bias);
                static_cast<uint16_t*>(args.out)[static_cast<long long>(row) * width + n] =
                    f32_to_bf16(gated_activation(args, gate, up));
            } else {
                const int n = tile16 * 16 + g;
                const long long bias = static_cast<long long>(tile.expert) * args.n + n;
                uint16_t* out = static_cast<uint16_t*>(args.out) + static_cast<long long>(row) * args.n + n;
                const float a = fmaxf(low[i] * weight + load_bias(args.bias, args.bias_dtype, bias), 0.0f);
                const float b = fmaxf(high[i] * weight + load_bias(args.bias, args.bias_dtype, bias + 8), 0.0f);
                out[0] = f32_to_bf16(a * a);
                out[8] = f32_to_bf16(b * b);
            }
        }
    }
}

}  // namespace w4a16_mma

// PARTS warps share two tiles of 16 rows of weights along K; 16 / PARTS pairs of tiles are computed at once: BLOCK_N
// rows.
template <class F, int PART, int M_BLOCKS, int BLOCK_N, int STAGE_BYTES>
__device__ __forceinline__ void w4a16_mma_gemm(const GemmArgs& args) {
    using namespace w4a16_mma;
    static_assert(kStageBytes<F> == STAGE_BYTES);
    extern __shared__ __align__(128) uint8_t memory[];
    __shared__ __align__(8) uint64_t full[2 * kMaxStages], x_full[2], x_empty[2];
    constexpr int PARTS = 512 / BLOCK_N;
    constexpr int kBlocks = kMmaStageBlocks / PARTS;               // of 64 rows in a tile
    constexpr int kSums = kMmaConsumerWarps * 2 * M_BLOCKS * 512;  // bytes of partial sums
    const uint32_t x_start = smem_address(memory) + kSums;
    const int stride = (kXInStages ? PARTS * 64 : args.k) * 2 + 16;  // of a row of x: rows start 4 banks apart
    const int stage_bytes = kStageBytes<F> + (kXInStages ? args.block_m * stride : 0);
    const uint32_t stages_start = (x_start + args.x_buffers * args.block_m * stride + 127) / 128 * 128;
    const uint32_t full_start = opaque(smem_address(full)), empty_start = full_start + 8 * kMaxStages;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    if (threadIdx.x == 0) {
        for (int i = 0; i < args.stages; ++i) {
            mbarrier_init(full_start + 8 * i, kXInStages ? kMmaProducerWarps : 1);
            mbarrier_init(empty_start + 8 * i, kMmaConsumerWarps);
        }
        for (int i = 0; i < 2; ++i) {
            mbarrier_init(smem_address(&x_full[i]), 1);
            mbarrier_init(smem_address(&x_empty[i]), kMmaConsumerWarps);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
    // For `down`, work tiles were complete before the kernel ahead of it let it start; x was not.
    if (PART != kDown) {
        grid_dependency_wait();
        launch_dependents();
    }

    constexpr int kScaleBytes = F::kScaleBytes;
    const int tiles16 = args.n / 16, n_blocks = (tiles16 + 3) / 4, n_tiles = (n_blocks + kBlocks - 1) / kBlocks;
    const int k_blocks = (args.k + 63) / 64, tile_stages = (k_blocks + PARTS - 1) / PARTS;
    const int row_scales = scale_blocks<F>(args.k);
    const long long total = static_cast<long long>(*args.num_tiles) * n_tiles;
    const int begin = static_cast<int>(total * blockIdx.x / gridDim.x);
    const int end = static_cast<int>(total * (blockIdx.x + 1) / gridDim.x);

    if (warp == kMmaConsumerWarps) {  // producer of weights
        if (lane == 0) {
            int stage = 0;
            uint32_t parity = 1;
            for (int i_tile = begin; i_tile < end; ++i_tile) {
                const int index = i_tile / n_tiles, n_block = (i_tile - index * n_tiles) * kBlocks;
                const long long expert = args.work_tiles[index].expert;
                const uint8_t* codes = args.codes + expert * args.codes_stride + 32LL * n_block * args.k;
                const uint8_t* scales = args.scales + expert * args.scales_stride +
                                        static_cast<long long>(n_block) * row_scales * kScaleBytes;
                for (int s = 0; s < tile_stages; ++s) {
                    const uint32_t barrier = full_start + 8 * stage, to = stages_start + stage * stage_bytes;
                    const int first_scale = s * PARTS / F::kScaleBlocks;
                    const int scale_bytes = min(PARTS / F::kScaleBlocks, row_scales - first_scale) * kScaleBytes;
                    mbarrier_wait(empty_start + 8 * stage, parity);
                    uint32_t bytes = 0;
#pragma unroll
                    for (int i = 0; i < kBlocks; ++i) {
                        const int width = min(4, tiles16 - 4 * (n_block + i));
                        if (width <= 0) break;
                        bytes += min(PARTS * width * 512, width * 8 * args.k - s * PARTS * width * 512);
                        bytes += scale_bytes;
                    }
                    mbarrier_arrive_expect_tx(barrier, bytes);
#pragma unroll
                    for (int i = 0; i < kBlocks; ++i) {
                        const int width = min(4, tiles16 - 4 * (n_block + i)), done = s * PARTS * width * 512;
                        if (width <= 0) break;
                        bulk_copy_g2s_evict_first(to + i * PARTS * 2048, codes + 32LL * i * args.k + done,
                                                  min(PARTS * width * 512, width * 8 * args.k - done), barrier);
                        bulk_copy_g2s_evict_first(to + kStageCodes + i * PARTS / F::kScaleBlocks * kScaleBytes,
                                                  scales + (i * row_scales + first_scale) * kScaleBytes, scale_bytes,
                                                  barrier);
                    }
                    if (++stage == args.stages) stage = 0, parity ^= 1;
                }
            }
        }
    } else if (warp == kMmaConsumerWarps + 1) {  // producer of x
        if (PART == kDown) {
            grid_dependency_wait();
            launch_dependents();
        }
        int buffer = 0;  // or stage
        uint32_t parity = 1;
        for (int index = begin / n_tiles; index * n_tiles < end; ++index) {
            const WorkTile tile = args.work_tiles[index];
            if (kXInStages) {
                const int row = tile.row + min(lane, tile.rows - 1);
                const long long from = args.top_k ? args.permuted_to_expanded[row] / args.top_k : row;
                const int tiles = min(end, (index + 1) * n_tiles) - max(begin, index * n_tiles);
                int column = 0;
                for (int i = 0; i < tiles * tile_stages; ++i) {
                    const int bytes = min(PARTS * 64, args.k - column) * 2;
                    const uint32_t barrier = full_start + 8 * buffer;
                    if (lane == 0) {
                        mbarrier_wait(empty_start + 8 * buffer, parity);
                        mbarrier_arrive_expect_tx(barrier, tile.rows * bytes);
                    }
                    __syncwarp();
                    if (lane < tile.rows) {
                        bulk_copy_g2s(stages_start + buffer * stage_bytes + kStageBytes<F> + lane * stride,
                                      args.x + from * args.k + column, bytes, barrier);
                    }
                    column += PARTS * 64;
                    if (column >= args.k) column = 0;
                    if (++buffer == args.stages) buffer = 0, parity ^= 1;
                }
                continue;
            }
            const uint32_t barrier = smem_address(&x_full[buffer]);
            if (lane == 0) {
                mbarrier_wait(smem_address(&x_empty[buffer]), parity);
                mbarrier_arrive_expect_tx(barrier, tile.rows * args.k * 2);
            }
            __syncwarp();
            if (lane < tile.rows) {
                const int row = tile.row + lane;
                const long long from = args.top_k ? args.permuted_to_expanded[row] / args.top_k : row;
                bulk_copy_g2s(x_start + (buffer * args.block_m + lane) * stride, args.x + from * args.k, args.k * 2,
                              barrier);
            }
            if (++buffer == args.x_buffers) buffer = 0, parity ^= 1;
        }
    } else {
        const int pair = warp / PARTS, part = warp % PARTS;
        const int inner = pair / 2, half = pair % 2;  // block of 64 rows in the tile, and which 32 of its rows
        const int whole_blocks = args.k / 64, k_tail = args.k % 64 / 16;
        const int my_blocks = (whole_blocks - part + PARTS - 1) / PARTS;  // whole blocks along K that this warp has
        const uint32_t x_lane =
            (kXInStages ? stages_start + kStageBytes<F> : x_start) + lane % 8 * stride + lane / 8 * 16 + part * 128;
        const uint32_t x_buffer_bytes = opaque(args.block_m * stride);
        // From a row to the eighth after it, or to the last one that there is room for.
        const uint32_t x_eight_rows = opaque((min(lane % 8 + 8, args.block_m - 1) - lane % 8) * stride);
        const uint32_t codes_lane = opaque(stages_start + inner * PARTS * 2048 + half * 1024 + lane * 16);
        const uint32_t scales_lane =
            opaque(stages_start + kStageCodes + (inner * PARTS + part) / F::kScaleBlocks * kScaleBytes +
                   lane / 4 * 4 * kTileScaleBytes<F> + half * 2 * kTileScaleBytes<F>);
        const bool leader = opaque(lane) == 0;
        int stage = 0, buffer = 0, index = begin / n_tiles, n_tile = begin - index * n_tiles;
        uint32_t parity = 0, x_parity = 0;
        bool new_x = true, few = true;
        for (int i_tile = begin; i_tile < end; ++i_tile) {
            const int width = min(4, tiles16 - 4 * (n_tile * kBlocks + inner));  // tiles of 16 rows; none if negative
            const int blocks = 2 * half < width ? my_blocks : 0;
            if (new_x) {
                if (!kXInStages) mbarrier_wait(smem_address(&x_full[buffer]), x_parity);
                few = M_BLOCKS == 1 || args.work_tiles[index].rows <= 8;
            }
            new_x = n_tile == n_tiles - 1 || i_tile == end - 1;  // after this, the work tile's last tile here
            uint32_t x = x_lane + buffer * x_buffer_bytes;
            const uint32_t codes_part = opaque(codes_lane + part * width * 512);
            float acc[2][M_BLOCKS][4] = {};
            int s = 0;
            // Beyond the last tile this reads other bytes of the stage, and computes what nobody reads.
            if (few) {
                for (; s < blocks; ++s) {
                    mbarrier_wait(full_start + 8 * stage, parity);
                    if (kXInStages) x = x_lane + stage * stage_bytes;
                    mma_block<F, 1>(acc, codes_part + stage * stage_bytes, scales_lane + stage * stage_bytes, x,
                                    x_eight_rows, empty_start + 8 * stage, leader);
                    if (!kXInStages) x += PARTS * 128;
                    if (++stage == args.stages) stage = 0, parity ^= 1;
                }
            } else {
                for (; s < blocks; ++s) {
                    mbarrier_wait(full_start + 8 * stage, parity);
                    if (kXInStages) x = x_lane + stage * stage_bytes;
                    mma_block<F, M_BLOCKS>(acc, codes_part + stage * stage_bytes, scales_lane + stage * stage_bytes, x,
                                           x_eight_rows, empty_start + 8 * stage, leader);
                    if (!kXInStages) x += PARTS * 128;
                    if (++stage == args.stages) stage = 0, parity ^= 1;
                }
            }
            for (; s < tile_stages; ++s) {
                mbarrier_wait(full_start + 8 * stage, parity);
                if (s * PARTS + part == whole_blocks && k_tail && 2 * half < width) {
                    if (kXInStages) x = x_lane + stage * stage_bytes;
                    const uint32_t codes =
                        codes_lane + stage * stage_bytes + part * width * 512 - half * 1024 - lane * 12;
                    mma_k_tail<F>(acc, codes + half * k_tail * 256, scales_lane + stage * stage_bytes, x, x_eight_rows,
                                  k_tail, width - 2 * half);
                }
                __syncwarp();
                if (leader) mbarrier_arrive(empty_start + 8 * stage);
                if (++stage == args.stages) stage = 0, parity ^= 1;
            }
            if (new_x && !kXInStages) {
                if (leader) mbarrier_arrive(smem_address(&x_empty[buffer]));
                if (++buffer == args.x_buffers) buffer = 0, x_parity ^= 1;
            }
            // Partial sums of the parts of K, added in order by some of the warps, from tile to tile by other ones.
            float4* partial = reinterpret_cast<float4*>(memory) + lane;
            constexpr int kPieces = 32 / PARTS * M_BLOCKS;  // 16 rows of weights by 8 rows of x each
            named_barrier_sync(1, kMmaConsumerWarps * 32);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
#pragma unroll
                for (int m = 0; m < M_BLOCKS; ++m) {
                    const float* c = acc[i][m];
                    partial[(part * kPieces + (pair * 2 + i) * M_BLOCKS + m) * 32] =
                        make_float4(c[0], c[1], c[2], c[3]);
                }
            }
            named_barrier_sync(2, kMmaConsumerWarps * 32);
            for (int piece = (warp + i_tile * kPieces) % kMmaConsumerWarps; piece < kPieces;
                 piece += kMmaConsumerWarps) {
                const int tile16 = n_tile * kBlocks * 4 + piece / M_BLOCKS;
                if (tile16 >= tiles16) break;
                float4 sum = partial[piece * 32];
#pragma unroll
                for (int p = 1; p < PARTS; ++p) {
                    const float4 more = partial[(p * kPieces + piece) * 32];
                    sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
                }
                store<F, PART>(args, sum, args.work_tiles[index], tile16, piece % M_BLOCKS * 8, lane);
            }
            if (++n_tile == n_tiles) n_tile = 0, ++index;
        }
    }
}

}  // namespace polymoe
