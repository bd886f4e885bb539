// Weights of 4 or 8 bits and bfloat16 rows by mma.sync, for few rows an expert, where time is the reading of weights.
//
// One persistent CTA per SM walks over its share of the tiles (a work tile by BLOCK_N rows of weights). One producer
// warp keeps a pipeline of weights full, across tiles and experts; another one loads the work tiles' rows of x; sixteen
// consumer warps dequantize and multiply. A work tile has up to 8 rows.
//
// With one team, all warps compute one tile of 64 rows of weights, with K split between eight. Where a stage has all of
// K, several teams of warps have tiles of their own, for which they need neither each other nor partial sums: with a
// short K, a tile of the first kind is little more than its exchange of sums.
//
// Where shared memory has room, whole rows of x lie beside the pipeline and are loaded once for all tiles of a work
// tile. With POLYMOE_X_IN_STAGES and one team a stage holds the columns of x that its weights multiply, so that 99 KB
// are enough for any K; a row of x is then loaded once for each tile. Sums are the same, in the same order.
//
// Ordered kernels have the sums of w4a16_wgmma, so that a call's tokens do not show in its results: one accumulator
// adds K in order. There several teams have tiles of their own for any K, with 16 rows of weights for each warp, and x
// in stages. They are also faster where there are tiles for all teams: nothing is exchanged.
//
// Up to 32 expanded rows are sorted by every CTA, so that there is no launch for that.
#pragma once
#include "../dequant/scales.cuh"
#include "../epilogue/f32_rows.cuh"
#include "../pipeline.cuh"
#include "../ptx/async_copy.cuh"
#include "../ptx/compiler.cuh"
#include "../ptx/ldmatrix.cuh"
#include "../ptx/mbarrier.cuh"
#include "../ptx/mma.cuh"
#include "../sizes.cuh"
#include "few_rows.cuh"
#include "schedule.cuh"

namespace polymoe {
namespace w4a16_mma {

#ifdef POLYMOE_X_IN_STAGES
constexpr bool kXInStages = true;
#else
constexpr bool kXInStages = false;
#endif

constexpr int kWarps = kMmaConsumerWarps + kMmaProducerWarps;
constexpr int kStageCodes = kMmaStageBlocks * 2048;

// Whether a team has a warp for each 16 rows of weights, and its tiles several stages.
template <int BLOCK_N, int TEAMS>
constexpr bool kInRounds = kMmaConsumerWarps / TEAMS == BLOCK_N / 16;

template <class F>
constexpr int kStageBytes = kStageCodes + kMmaStageBlocks / F::kScaleBlocks * F::kScaleBytes;

// Dequantized weights of tiles of 16 rows times x, of which b is.
template <class F, int TILES>
__device__ __forceinline__ void mma_words(float (&acc)[TILES][4], const uint4 (&words)[TILES],
                                          const typename F::Scales (&scales)[TILES],
                                          const uint32_t (&b)[kBlockColumns<F> / 32][4]) {
#pragma unroll
    for (int step = 0; step < kBlockColumns<F> / 16; ++step) {
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            const uint32_t word[4] = {words[tile].x, words[tile].y, words[tile].z, words[tile].w};
            uint32_t a[4];
            dequantize<F>(a, word + step * kStepWords<F>, F::scale(scales[tile], step));
            mma_m16n8k16(acc[tile], a, b[step / 2][step % 2 * 2], b[step / 2][step % 2 * 2 + 1]);
        }
    }
}

// A block's columns of two tiles of 16 rows of weights, for 8 rows of x. All loads come first, since volatile
// assembly stays in order, and the stage is released as soon as they are made.
template <class F>
__device__ __forceinline__ void mma_block(float (&acc)[2][4], uint32_t codes, uint32_t scales, uint32_t x,
                                          uint32_t empty, bool leader) {
    uint32_t b[kBlockColumns<F> / 32][4], scale_words[2][kScaleWords<F>];
    const uint4 words[2] = {ld_shared_v4(codes), ld_shared_v4(codes + 512)};
    load_scale_words<F>(scale_words, scales);
#pragma unroll
    for (int i = 0; i < kBlockColumns<F> / 32; ++i) ldmatrix_x4(b[i], x + i * 64);
    __syncwarp();
    if (leader) mbarrier_arrive(empty);
    const typename F::Scales decoded[2] = {F::scales(scale_words[0]), F::scales(scale_words[1])};
    mma_words<F>(acc, words, decoded, b);
}

// The k_tail, fewer columns than a block, in steps of 16.
template <class F, int TILES>
__device__ __forceinline__ void mma_k_tail(float (&acc)[TILES][4], uint32_t codes, uint32_t scales, uint32_t x,
                                           int steps, int tiles) {
#pragma unroll
    for (int step = 0; step < kBlockColumns<F> / 16 - 1; ++step) {
        if (step == steps) break;
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            if (tile < tiles) {
                const typename F::Scales tile_scales = load_scales<F>(scales + tile * kTileScaleBytes<F>);
                uint32_t a[4], words[kStepWords<F>];
#pragma unroll
                for (int i = 0; i < kStepWords<F>; ++i) {
                    words[i] = ld_shared(codes + (tile * steps + step) * 128 * kStepWords<F> + i * 4);
                }
                dequantize<F>(a, words, F::scale(tile_scales, step));
                uint32_t b0, b1;
                ldmatrix_x2(b0, b1, x + step * 32);
                mma_m16n8k16(acc[tile], a, b0, b1);
            }
        }
    }
}

// Where the results of rows 2t and 2t + 1 of a work tile go: to these rows, or nowhere if negative.
template <int PART>
struct OutRows {
    int row[2];

    __device__ __forceinline__ OutRows(const int* permuted_to_expanded, WorkTile tile, int lane) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int m = 2 * (lane % 4) + i, permuted = tile.row + m;
            row[i] = m >= tile.rows ? -1 : PART == kDown ? permuted_to_expanded[permuted] : permuted;
        }
    }
};

// Writes 16 rows of weights by 8 rows of x. h goes to permuted rows, y to expanded rows. ORDERED: as w4a16_wgmma
// computes them, which also rounds y to bfloat16.
template <class F, int PART, bool ORDERED>
__device__ __forceinline__ void store(const GemmArgs& args, const int* permuted_to_expanded, const float* c,
                                      const ExpertScales<F, PART>& scales, const OutRows<PART>& to, int tile16) {
    using Out = std::conditional_t<PART == kDown, float, uint16_t>;
    float weights[2] = {1.0f, 1.0f};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        if (PART == kDown || !args.router_weights || to.row[i] < 0) continue;
        weights[i] = args.router_weights[permuted_to_expanded[to.row[i]]];
    }
    float sums[4] = {c[0], c[1], c[2], c[3]}, low_scale = scales.low, high_scale = scales.high;
    if (!ORDERED && PART != kDown) {  // rounded before router weights multiply, unlike in other kernels
#pragma unroll
        for (int i = 0; i < 2; ++i) sums[i] *= low_scale, sums[2 + i] *= high_scale;
        low_scale = high_scale = 1.0f;
    }
    const WeightRows<PART, kHalves> rows(args, scales.expert, tile16, low_scale, high_scale);
    store_rows<Out, ORDERED ? kFast : kExact, ORDERED>(args, rows, sums, to.row, weights);
}

// A CTA's shared memory and its share of the tiles.
template <class F, int PART, int BLOCK_N, int TEAMS, bool ORDERED>
struct Cta {
    static constexpr int kBlocks = BLOCK_N / 64, kStageK = kMmaStageBlocks / kBlocks;  // along N and K, in a stage
    static constexpr int kColumns = kBlockColumns<F>, kXBytes = kColumns * 2;          // of a block, and of a row of x
    static constexpr int kTeamWarps = kMmaConsumerWarps / TEAMS;
    static constexpr bool kRounds = kInRounds<BLOCK_N, TEAMS>;
    static constexpr bool kXBeside = !kRounds && (TEAMS > 1 || !kXInStages);
    static constexpr int kScaleBytes = F::kScaleBytes, kStageScales = kStageK / F::kScaleBlocks * kScaleBytes;
    static constexpr int kTailLane = 16 - 4 * kStepWords<F>;  // a lane's codes of a block, less those of 16 columns
    static constexpr int kSums = TEAMS > 1 ? 0 : kMmaConsumerWarps * 2 * 512;  // bytes of partial sums
    static_assert(TEAMS == 1 || kRounds ? BLOCK_N == 64 : kTeamWarps == 2 * kBlocks);

    const FewRowsArgs& args;
    uint8_t* memory;
    const WorkTile* work_tiles;             // in global memory, or in shared memory where this CTA sorted the rows
    const int* permuted_to_expanded;        // the same
    uint32_t full, empty, x_full, x_empty;  // mbarriers
    uint32_t x_start, stages_start;         // behind the partial sums
    int stride, stage_bytes;                // of a row of x
    int tiles16, n_tiles, tile_stages, begin, end;

    __device__ __forceinline__ Cta(const FewRowsArgs& args, uint8_t* memory, uint64_t* barriers,
                                   const SortedRows& sorted)
        : args(args), memory(memory) {
        work_tiles = args.ids ? sorted.work_tiles : args.work_tiles;
        permuted_to_expanded = args.ids ? sorted.permuted_to_expanded : args.permuted_to_expanded;
        full = opaque(smem_address(barriers)), empty = full + 8 * kMaxStages;
        x_full = full + 16 * kMaxStages, x_empty = x_full + 16;
        stride = (kXBeside ? args.k : kStageK * kColumns) * 2 + 16;  // rows start 4 banks apart
        stage_bytes = kStageBytes<F> + (kXBeside ? 0 : args.block_m * stride);
        x_start = smem_address(memory) + kSums;
        stages_start = (x_start + args.x_buffers * args.block_m * stride + 127) / 128 * 128;
    }

    __device__ __forceinline__ void init_barriers() const {
        for (int i = 0; i < args.stages; ++i) {
            mbarrier_init(full + 8 * i, kXBeside ? 1 : 2);
            mbarrier_init(empty + 8 * i, kTeamWarps);
        }
        for (int i = 0; i < 2; ++i) {
            mbarrier_init(x_full + 8 * i, 1);
            mbarrier_init(x_empty + 8 * i, kMmaConsumerWarps);
        }
        mbarrier_init_fence();
    }

    // Once work tiles are known.
    __device__ __forceinline__ void take_share(int count) {
        const int n_blocks = (args.n / 16 + 3) / 4, k_blocks = (args.k + kColumns - 1) / kColumns;
        tiles16 = args.n / 16, n_tiles = (n_blocks + kBlocks - 1) / kBlocks;
        tile_stages = (k_blocks + kStageK - 1) / kStageK;
        const long long total = static_cast<long long>(count) * n_tiles;
        begin = static_cast<int>(total * blockIdx.x / gridDim.x);
        end = static_cast<int>(total * (blockIdx.x + 1) / gridDim.x);
    }

    // Tiles of 16 rows in a block of 64 rows of weights; none if negative.
    __device__ __forceinline__ int width(int block) const { return min(4, tiles16 - 4 * block); }

    __device__ __forceinline__ void advance(int& stage, uint32_t& parity, int by = 1) const {
        stage += by;
        if (stage >= args.stages) stage -= args.stages, parity ^= 1;
    }

    // One lane.
    __device__ __forceinline__ void produce_weights() const {
        const int row_scales = scale_blocks<F>(args.k);
        int stage = 0;
        uint32_t parity = 1;
        for (int i_tile = begin; i_tile < end; ++i_tile) {
            const int index = i_tile / n_tiles, n_block = (i_tile - index * n_tiles) * kBlocks;
            const long long expert = work_tiles[index].expert;
            const uint8_t* codes =
                args.codes + expert * args.codes_stride + static_cast<long long>(kColumnBytes<F>) * n_block * args.k;
            const uint8_t* scales =
                args.scales + expert * args.scales_stride + static_cast<long long>(n_block) * row_scales * kScaleBytes;
            for (int s = 0; s < tile_stages; ++s) {
                const uint32_t barrier = full + 8 * stage, to = stages_start + stage * stage_bytes;
                const int first_scale = s * kStageK / F::kScaleBlocks;
                const int scale_bytes = min(kStageK / F::kScaleBlocks, row_scales - first_scale) * kScaleBytes;
                mbarrier_wait(empty + 8 * stage, parity);
                uint32_t bytes = 0;
#pragma unroll
                for (int i = 0; i < kBlocks; ++i) {
                    const int tiles = width(n_block + i);
                    if (tiles <= 0) break;
                    bytes +=
                        min(kStageK * tiles * 512, tiles * (kColumnBytes<F> / 4) * args.k - s * kStageK * tiles * 512);
                    bytes += scale_bytes;
                }
                mbarrier_arrive_expect_tx(barrier, bytes);
#pragma unroll
                for (int i = 0; i < kBlocks; ++i) {
                    const int tiles = width(n_block + i), done = s * kStageK * tiles * 512;
                    if (tiles <= 0) break;
                    bulk_copy_g2s_evict_first(
                        to + i * kStageK * 2048, codes + static_cast<long long>(kColumnBytes<F>) * i * args.k + done,
                        min(kStageK * tiles * 512, tiles * (kColumnBytes<F> / 4) * args.k - done), barrier);
                    bulk_copy_g2s_evict_first(to + kStageCodes + i * kStageScales,
                                              scales + (i * row_scales + first_scale) * kScaleBytes, scale_bytes,
                                              barrier);
                }
                advance(stage, parity);
            }
        }
    }

    // One warp.
    __device__ __forceinline__ void produce_x(int lane) const {
        int buffer = 0;  // or stage
        uint32_t parity = 1;
        // Where a CTA has no tile, multiply_parts waits for no x: a copy would write when the CTA has ended, into
        // shared memory that may be another's. (multiply_tiles waits for it.)
        const bool unread = kXBeside && TEAMS == 1 && begin >= end;
        for (int index = begin / n_tiles; index * n_tiles < end && !unread; ++index) {
            const WorkTile tile = work_tiles[index];
            const int row = tile.row + min(lane, tile.rows - 1);
            const long long from = args.top_k ? permuted_to_expanded[row] / args.top_k : row;
            if (!kXBeside) {
                const int tiles = min(end, (index + 1) * n_tiles) - max(begin, index * n_tiles);
                int column = 0;
                for (int i = 0; i < tiles * tile_stages; ++i) {
                    const int bytes = min(kStageK * kColumns, args.k - column) * 2;
                    const uint32_t barrier = full + 8 * buffer;
                    if (lane == 0) {
                        mbarrier_wait(empty + 8 * buffer, parity);
                        mbarrier_arrive_expect_tx(barrier, tile.rows * bytes);
                    }
                    __syncwarp();
                    if (lane < tile.rows) {
                        bulk_copy_g2s(stages_start + buffer * stage_bytes + kStageBytes<F> + lane * stride,
                                      args.x + from * args.k + column, bytes, barrier);
                    }
                    column += kStageK * kColumns;
                    if (column >= args.k) column = 0;
                    if (++buffer == args.stages) buffer = 0, parity ^= 1;
                }
                continue;
            }
            const uint32_t barrier = x_full + 8 * buffer;
            if (lane == 0) {
                mbarrier_wait(x_empty + 8 * buffer, parity);
                mbarrier_arrive_expect_tx(barrier, tile.rows * args.k * 2);
            }
            __syncwarp();
            if (lane < tile.rows) {
                bulk_copy_g2s(x_start + (buffer * args.block_m + lane) * stride, args.x + from * args.k, args.k * 2,
                              barrier);
            }
            if (++buffer == args.x_buffers) buffer = 0, parity ^= 1;
        }
    }

    // Stages go round the teams, each of which has a tile of its own in every round.
    __device__ __forceinline__ void produce_weights_in_rounds() const {
        const int row_scales = scale_blocks<F>(args.k);
        int stage = 0;
        uint32_t parity = 1;
        for (int first = begin; first < end; first += TEAMS) {
            const int tiles_of_round = min(TEAMS, end - first);
            for (int s = 0; s < tile_stages; ++s) {
                const int first_scale = s * kStageK / F::kScaleBlocks;
                const int scale_bytes = min(kStageK / F::kScaleBlocks, row_scales - first_scale) * kScaleBytes;
                for (int team = 0; team < tiles_of_round; ++team) {
                    const int index = (first + team) / n_tiles, n_block = first + team - index * n_tiles;
                    const long long expert = work_tiles[index].expert;
                    const int tiles = width(n_block), done = s * kStageK * tiles * 512;
                    const int bytes = min(kStageK * tiles * 512, tiles * (kColumnBytes<F> / 4) * args.k - done);
                    const uint32_t barrier = full + 8 * (stage + team),
                                   to = stages_start + (stage + team) * stage_bytes;
                    mbarrier_wait(empty + 8 * (stage + team), parity);
                    mbarrier_arrive_expect_tx(barrier, bytes + scale_bytes);
                    const uint8_t* codes = args.codes + expert * args.codes_stride +
                                           static_cast<long long>(kColumnBytes<F>) * n_block * args.k;
                    bulk_copy_g2s_evict_first(to, codes + done, bytes, barrier);
                    bulk_copy_g2s_evict_first(
                        to + kStageCodes,
                        args.scales + expert * args.scales_stride +
                            (static_cast<long long>(n_block) * row_scales + first_scale) * kScaleBytes,
                        scale_bytes, barrier);
                }
                advance(stage, parity, TEAMS);
            }
        }
    }

    // One warp: eight lanes for the rows of each team's tile.
    __device__ __forceinline__ void produce_x_in_rounds(int lane) const {
        static_assert(TEAMS * 8 == 32);
        const int team = lane / 8;
        int stage = 0;
        uint32_t parity = 1;
        for (int first = begin; first < end; first += TEAMS) {
            const bool mine = first + team < end;
            const WorkTile tile = work_tiles[min(first + team, end - 1) / n_tiles];
            const int row = tile.row + min(lane % 8, tile.rows - 1);
            const long long from = args.top_k ? permuted_to_expanded[row] / args.top_k : row;
            for (int column = 0; column < args.k; column += kStageK * kColumns) {
                const int bytes = min(kStageK * kColumns, args.k - column) * 2;
                const uint32_t barrier = full + 8 * (stage + team);
                if (mine && lane % 8 == 0) {
                    mbarrier_wait(empty + 8 * (stage + team), parity);
                    mbarrier_arrive_expect_tx(barrier, tile.rows * bytes);
                }
                __syncwarp();
                if (mine && lane % 8 < tile.rows) {
                    const uint32_t to = stages_start + (stage + team) * stage_bytes + kStageBytes<F>;
                    bulk_copy_g2s(to + lane % 8 * stride, args.x + from * args.k + column, bytes, barrier);
                }
                advance(stage, parity, TEAMS);
            }
        }
    }

    // Where a lane's rows of x begin.
    __device__ __forceinline__ uint32_t lane_x(int lane) const {
        return (kXBeside ? x_start : stages_start + kStageBytes<F>)+lane % 8 * stride + lane / 8 * 16;
    }

    // Of this value, which nothing uses, no instruction is left. Without it ptxas orders the others in a way that was
    // never timed.
    __device__ __forceinline__ void keep_measured_schedule(int lane) const {
        opaque((min(lane % 8 + 8, args.block_m - 1) - lane % 8) * stride);
    }

    // All warps on one tile: eight of them share two tiles of 16 rows of weights, with every eighth block each.
    __device__ __forceinline__ void multiply_parts(int warp, int lane) const {
        const int half = warp / kStageK, part = warp % kStageK;
        const int whole_blocks = args.k / kColumns, k_tail = args.k % kColumns / 16;
        const int my_blocks = (whole_blocks - part + kStageK - 1) / kStageK;  // whole blocks along K that this warp has
        const uint32_t x_lane = lane_x(lane) + part * kXBytes;
        keep_measured_schedule(lane);
        const uint32_t x_buffer_bytes = opaque(args.block_m * stride);
        const uint32_t codes_lane = opaque(stages_start + half * 1024 + lane * 16);
        const uint32_t scales_lane = opaque(stages_start + kStageCodes + part / F::kScaleBlocks * kScaleBytes +
                                            lane / 4 * 4 * kTileScaleBytes<F> + half * 2 * kTileScaleBytes<F>);
        const bool leader = opaque(lane) == 0;
        int stage = 0, buffer = 0, index = begin / n_tiles, n_tile = begin - index * n_tiles;
        uint32_t parity = 0, x_parity = 0;
        bool new_x = true;
        for (int i_tile = begin; i_tile < end; ++i_tile) {
            const int tiles = width(n_tile), blocks = 2 * half < tiles ? my_blocks : 0;
            if (new_x && kXBeside) mbarrier_wait(x_full + 8 * buffer, x_parity);
            new_x = n_tile == n_tiles - 1 || i_tile == end - 1;  // after this, the work tile's last tile here
            uint32_t x = x_lane + buffer * x_buffer_bytes;
            const uint32_t codes_part = opaque(codes_lane + part * tiles * 512);
            float acc[2][4] = {};
            int s = 0;
            // Beyond the last tile this reads other bytes of the stage, and computes what nobody reads.
            for (; s < blocks; ++s) {
                mbarrier_wait(full + 8 * stage, parity);
                if (!kXBeside) x = x_lane + stage * stage_bytes;
                mma_block<F>(acc, codes_part + stage * stage_bytes, scales_lane + stage * stage_bytes, x,
                             empty + 8 * stage, leader);
                if (kXBeside) x += kStageK * kXBytes;
                advance(stage, parity);
            }
            for (; s < tile_stages; ++s) {
                mbarrier_wait(full + 8 * stage, parity);
                if (s * kStageK + part == whole_blocks && k_tail && 2 * half < tiles) {
                    if (!kXBeside) x = x_lane + stage * stage_bytes;
                    const uint32_t codes =
                        codes_lane + stage * stage_bytes + part * tiles * 512 - half * 1024 - lane * kTailLane;
                    mma_k_tail<F>(acc, codes + half * k_tail * 256 * kStepWords<F>, scales_lane + stage * stage_bytes,
                                  x, k_tail, tiles - 2 * half);
                }
                __syncwarp();
                if (leader) mbarrier_arrive(empty + 8 * stage);
                advance(stage, parity);
            }
            if (new_x && kXBeside) {
                if (leader) mbarrier_arrive(x_empty + 8 * buffer);
                if (++buffer == args.x_buffers) buffer = 0, x_parity ^= 1;
            }
            // Partial sums of the parts of K, added in order by some of the warps, from tile to tile by other ones.
            float4* partial = reinterpret_cast<float4*>(memory) + lane;
            constexpr int kPieces = 32 / kStageK;  // 16 rows of weights by 8 rows of x each
            named_barrier_sync(1, kMmaConsumerWarps * 32);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float* c = acc[i];
                partial[(part * kPieces + (half * 2 + i)) * 32] = make_float4(c[0], c[1], c[2], c[3]);
            }
            named_barrier_sync(2, kMmaConsumerWarps * 32);
            for (int piece = (warp + i_tile * kPieces) % kMmaConsumerWarps; piece < kPieces;
                 piece += kMmaConsumerWarps) {
                const int tile16 = n_tile * 4 + piece;
                if (tile16 >= tiles16) break;
                float4 sum = partial[piece * 32];
#pragma unroll
                for (int p = 1; p < kStageK; ++p) {
                    const float4 more = partial[(p * kPieces + piece) * 32];
                    sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
                }
                const float c[4] = {sum.x, sum.y, sum.z, sum.w};
                const WorkTile tile = work_tiles[index];
                store<F, PART, ORDERED>(args, permuted_to_expanded, c, ExpertScales<F, PART>(args, tile.expert),
                                        OutRows<PART>(permuted_to_expanded, tile, lane), tile16);
            }
            if (++n_tile == n_tiles) n_tile = 0, ++index;
        }
    }

    // A warp's 32 rows of weights by a stage's columns: `blocks` whole ones, and the k_tail.
    __device__ __forceinline__ void multiply_stage(float (&acc)[2][4], uint32_t codes, uint32_t scales, uint32_t x,
                                                   uint32_t barrier, bool leader, int blocks, int k_tail, int half,
                                                   int tiles, int lane) const {
        if (blocks == kStageK) {
#pragma unroll 4  // as many as registers allow
            for (int i = 0; i < kStageK; ++i) {
                mma_block<F>(acc, codes + i * tiles * 512, scales + i / F::kScaleBlocks * kScaleBytes, x + i * kXBytes,
                             barrier, leader && i == kStageK - 1);
            }
            return;
        }
#pragma unroll 1
        for (int i = 0; i < blocks; ++i) {
            mma_block<F>(acc, codes, scales + i / F::kScaleBlocks * kScaleBytes, x, barrier, false);
            codes += tiles * 512, x += kXBytes;
        }
        if (k_tail) {
            mma_k_tail<F>(acc, codes - half * 1024 - lane * kTailLane + half * k_tail * 256 * kStepWords<F>,
                          scales + blocks / F::kScaleBlocks * kScaleBytes, x, k_tail, tiles - 2 * half);
        }
        __syncwarp();
        if (leader) mbarrier_arrive(barrier);
    }

    // Each team with every TEAMS-th tile: 32 rows of weights and all of K for each warp. A tile is one stage, and their
    // number a multiple of the teams, so that a team waits for no stage of another.
    __device__ __forceinline__ void multiply_tiles(int warp, int lane) const {
        const int team = warp / kTeamWarps, inner = warp % kTeamWarps / 2, half = warp % 2;
        const int whole_blocks = args.k / kColumns, k_tail = args.k % kColumns / 16;
        const uint32_t x_lane = lane_x(lane);
        keep_measured_schedule(lane);
        const uint32_t codes_lane = opaque(stages_start + inner * kStageK * 2048 + half * 1024 + lane * 16);
        const uint32_t scales_lane = opaque(stages_start + kStageCodes + inner * kStageScales +
                                            lane / 4 * 4 * kTileScaleBytes<F> + half * 2 * kTileScaleBytes<F>);
        const bool leader = opaque(lane) == 0;
        int stage = team, buffer = 0, i_tile = begin + team;
        uint32_t parity = 0, x_parity = 0;
        for (int index = begin / n_tiles; index * n_tiles < end; ++index) {
            const WorkTile work_tile = uniform_tile(work_tiles[index]);
            const ExpertScales<F, PART> expert_scales(args, work_tile.expert);
            const OutRows<PART> rows(permuted_to_expanded, work_tile, lane);
            const uint32_t x = x_lane + buffer * args.block_m * stride;
            mbarrier_wait(x_full + 8 * buffer, x_parity);
            for (const int last = min(end, (index + 1) * n_tiles); i_tile < last; i_tile += TEAMS) {
                const int n_block = (i_tile - index * n_tiles) * kBlocks + inner, tiles = width(n_block);
                const bool present = 2 * half < tiles;
                const uint32_t codes = codes_lane + stage * stage_bytes, scales = scales_lane + stage * stage_bytes;
                float acc[2][4] = {};
                mbarrier_wait(full + 8 * stage, parity);
                multiply_stage(acc, codes, scales, x, empty + 8 * stage, leader, present ? whole_blocks : 0,
                               present ? k_tail : 0, half, tiles, lane);
                advance(stage, parity, TEAMS);
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int tile16 = n_block * 4 + half * 2 + i;
                    if (tile16 >= tiles16) break;
                    store<F, PART, ORDERED>(args, permuted_to_expanded, acc[i], expert_scales, rows, tile16);
                }
            }
            __syncwarp();
            if (leader) mbarrier_arrive(x_empty + 8 * buffer);
            if (++buffer == args.x_buffers) buffer = 0, x_parity ^= 1;
        }
    }

    // Each team with every TEAMS-th tile: 16 rows of weights for each warp, and K in order.
    __device__ __forceinline__ void multiply_in_order(int warp, int lane) const {
        const int team = warp / kTeamWarps, tile = warp % kTeamWarps, k_tail = args.k % kColumns / 16;
        const uint32_t x_lane = opaque(lane_x(lane)), codes_lane = opaque(stages_start + tile * 512 + lane * 16);
        const uint32_t scales_lane = opaque(stages_start + kStageCodes + (lane / 4 * 4 + tile) * kTileScaleBytes<F>);
        int stage = team;
        uint32_t parity = 0;
        for (int i_tile = begin + team; i_tile < end; i_tile += TEAMS) {
            const int index = i_tile / n_tiles, n_block = i_tile - index * n_tiles, tiles = width(n_block);
            float acc[1][4] = {};
            int left = args.k / kColumns;  // whole blocks
            for (int s = 0; s < tile_stages; ++s) {
                const int offset = stage * stage_bytes, blocks = min(kStageK, left);
                mbarrier_wait(full + 8 * stage, parity);
                if (tile < tiles) {
                    uint32_t codes = codes_lane + offset, scales = scales_lane + offset, x = x_lane + offset;
                    if (blocks == kStageK) {
#pragma unroll
                        for (int i = 0; i < kStageK; ++i) {
                            mma_tile(acc, codes, scales + i / F::kScaleBlocks * kScaleBytes, x + i * kXBytes);
                            codes += tiles * 512;
                        }
                    } else {
#pragma unroll 1
                        for (int i = 0; i < blocks; ++i) {
                            mma_tile(acc, codes, scales + i / F::kScaleBlocks * kScaleBytes, x);
                            codes += tiles * 512, x += kXBytes;
                        }
                        if (k_tail) {
                            const int to_tail = tile * k_tail * 128 * kStepWords<F> - tile * 512 - lane * kTailLane;
                            mma_k_tail<F>(acc, codes + to_tail, scales + blocks / F::kScaleBlocks * kScaleBytes, x,
                                          k_tail, 1);
                        }
                    }
                }
                __syncwarp();
                if (lane == 0) mbarrier_arrive(empty + 8 * stage);
                advance(stage, parity, TEAMS);
                left -= blocks;
            }
            if (tile < tiles) {
                const WorkTile work_tile = work_tiles[index];
                store<F, PART, ORDERED>(args, permuted_to_expanded, acc[0],
                                        ExpertScales<F, PART>(args, work_tile.expert),
                                        OutRows<PART>(permuted_to_expanded, work_tile, lane), n_block * 4 + tile);
            }
        }
    }

    // A block's columns of a tile of 16 rows of weights, for 8 rows of x.
    __device__ __forceinline__ void mma_tile(float (&acc)[1][4], uint32_t codes, uint32_t scales, uint32_t x) const {
        const uint4 words[1] = {ld_shared_v4(codes)};
        const typename F::Scales decoded[1] = {load_scales<F>(scales)};
        uint32_t b[kColumns / 32][4];
#pragma unroll
        for (int i = 0; i < kColumns / 32; ++i) ldmatrix_x4(b[i], x + i * 64);
        mma_words<F>(acc, words, decoded, b);
    }
};

}  // namespace w4a16_mma

template <class F, int PART, int BLOCK_N, int TEAMS, int STAGE_BYTES, bool ORDERED = false>
__device__ __forceinline__ void w4a16_mma_gemm(const FewRowsArgs& args) {
    using namespace w4a16_mma;
    static_assert(kStageBytes<F> == STAGE_BYTES);
    extern __shared__ __align__(128) uint8_t memory[];
    __shared__ __align__(8) uint64_t barriers[2 * kMaxStages + 4];
    __shared__ SortedRows sorted;
    Cta<F, PART, BLOCK_N, TEAMS, ORDERED> cta(args, memory, barriers, sorted);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    if (threadIdx.x == 0) cta.init_barriers();
    // For `down`, ids and work tiles were complete before the kernel ahead of it let it start; x was not.
    if (args.ids && warp == kMmaConsumerWarps) {
        if (PART != kDown) grid_dependency_wait();
        sorted.sort(args);
    }
    __syncthreads();
    begin_launch<PART>();
    cta.take_share(args.ids ? sorted.num_tiles : args.tiles->work_tiles);
    constexpr bool kRounds = kInRounds<BLOCK_N, TEAMS>;
    if (warp == kMmaConsumerWarps) {
        if constexpr (kRounds) {
            if (lane == 0) cta.produce_weights_in_rounds();
        } else {
            if (lane == 0) cta.produce_weights();
        }
    } else if (warp == kMmaConsumerWarps + 1) {
        begin_x<PART>();
        if constexpr (kRounds) {
            cta.produce_x_in_rounds(lane);
        } else {
            cta.produce_x(lane);
        }
    } else if constexpr (kRounds) {
        cta.multiply_in_order(warp, lane);
    } else if constexpr (TEAMS == 1) {
        cta.multiply_parts(warp, lane);
    } else {
        cta.multiply_tiles(warp, lane);
    }
}

}  // namespace polymoe
