// E4M3 weights, and rows of x that are rounded to E4M3 in the kernel, both converted to float16 for mma.sync: for few
// rows an expert, where time is the reading of weights and the launches around it.
//
// One persistent CTA per SM walks over its share of the units (a work tile by 32 rows of weights). Each of its sixteen
// warps copies blocks of 32 rows by 128 columns of weights (4 KB) into a pipeline of its own, and multiplies. Warps
// share a unit, with K split between them, as far as K has blocks for them: even one token then has work for every SM.
//
// Ordered kernels have the sums of w8a8_f16.cuh, so that a call's tokens do not show in its results. There, warps that
// share a unit exchange the sums of a block each, round by round, and two of them add these in the order of K.
//
// Each warp has the same columns of every unit. It rounds those of a work tile's x once, to where its lanes load their
// B operands from: x takes neither a launch that rounds it nor a barrier. h is stored as float32, and rounded as x is.
// Scales are as in w8a8_f16.cuh: sums of 128 columns are multiplied by both (kBlock128), or those of all columns
// (kChannel). For the latter, warps that share a unit first exchange the maxima of their columns.
//
// Up to 32 expanded rows are sorted by every warp on its own, so that there is no launch for that either. What the
// first blocks need beside weights is loaded ahead of them: behind them it would wait until most of them are there.
#pragma once
#include "../dequant/e4m3.cuh"
#include "../e4m3_scale.cuh"
#include "../epilogue/f32_rows.cuh"
#include "../pipeline.cuh"
#include "../ptx/compiler.cuh"
#include "../ptx/ldmatrix.cuh"
#include "../ptx/mma.cuh"
#include "../ptx/memory.cuh"
#include "few_rows.cuh"
#include "schedule.cuh"

namespace polymoe {

struct RoundingArgs : FewRowsArgs {
    int x_dtype;  // 0 bfloat16, 1 float16, 2 float32, 3 E4M3: rows of w8::row_bytes(k), codes and behind them scales
    const float* input_scales;  // [E]: of all rows of an expert's x (kChannel); or null
};

namespace w8a8_mma {

constexpr int kWarps = 16, kUnit = 32, kBlockBytes = kUnit * kE4m3BlockK, kStages = 4;
constexpr int kRows = 8;                            // of a work tile
constexpr int kXBytes = kRows * (kE4m3BlockK + 4);  // of 128 columns: codes and the rows' scales
constexpr int kSums = kWarps * kUnit * kRows;       // partial sums of the warps
constexpr uint32_t kAll = 0xFFFFFFFFu;

// What ordered kernels' warps exchange in a round: the sums of a block each and, behind those, what they are multiplied
// by (kBlock128), which is the same for all lanes 4g + t of a t.
constexpr int kSumsBytes = kWarps * 1024, kExchangeBytes = kSumsBytes + kWarps * 64;

__device__ __forceinline__ void st_shared_f4(uint32_t to, float a, float b, float c, float d) {
    st_shared_v4(to, make_uint4(__float_as_uint(a), __float_as_uint(b), __float_as_uint(c), __float_as_uint(d)));
}

__device__ __forceinline__ float4 ld_shared_f4(uint32_t from) {
    const uint4 v = ld_shared_v4(from);
    return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
}

// A work tile's expert, how many rows it has, and the expanded row number lane / 4 of these, or -1.
struct Rows {
    int expert, count, row;
};

// The work tiles, of which there are `count`.
struct WorkTiles {
    const RoundingArgs& args;
    int expert, tile;  // of the expanded row number `lane`, where work tiles follow from ids
    int count;

    __device__ __forceinline__ explicit WorkTiles(const RoundingArgs& args) : args(args) {
        if (!args.ids) {
            count = warp_uniform(args.tiles->work_tiles);
            return;
        }
        const int lane = threadIdx.x % 32;
        expert = local_expert(args, lane);
        const uint32_t peers = __match_any_sync(kAll, expert), up_to_here = kAll >> (31 - lane);
        const bool first = expert >= 0 && __popc(peers & up_to_here) % kRows == 1;  // of its work tile
        const uint32_t firsts = __ballot_sync(kAll, first);
        const int mine = 31 - __clz(static_cast<int>(firsts & peers & up_to_here | 1u));
        tile = expert >= 0 ? __popc(firsts & (kAll >> (31 - mine))) - 1 : -1;
        count = __popc(firsts);
    }

    __device__ __forceinline__ int expert_of(int index) const {
        if (!args.ids) return warp_uniform(args.work_tiles[index].expert);
        return __shfl_sync(kAll, expert, __ffs(__ballot_sync(kAll, tile == index)) - 1);
    }

    __device__ __forceinline__ Rows operator[](int index) const {
        const int g = threadIdx.x % 32 / 4;
        if (!args.ids) {
            const WorkTile of = args.work_tiles[index];
            return {of.expert, of.rows, g < of.rows ? args.permuted_to_expanded[of.row + g] : -1};
        }
        uint32_t left = __ballot_sync(kAll, tile == index);
        const int first = __ffs(left) - 1, count = __popc(left);
        for (int i = 0; i < g; ++i) left &= left - 1;
        return {__shfl_sync(kAll, expert, first), count, __ffs(left) - 1};
    }
};

// What this warp has of the CTA's work: every so many units from `begin` on, and of their blocks of 128 columns every
// so many from `k_warp` on.
struct WarpWork {
    int units, k_blocks;  // of a work tile
    int k_warps, k_warp;  // warps that share a unit, and which of them this one is
    int groups, group;    // of such warps
    int begin, end;

    __device__ __forceinline__ WarpWork(const GemmArgs& args, int tiles) {
        const int warp = warp_uniform(threadIdx.x / 32);
        units = args.n / kUnit, k_blocks = args.k / kE4m3BlockK;
        const int bits = min(4, 31 - __clz(k_blocks));
        k_warps = 1 << bits, k_warp = warp & (k_warps - 1);
        groups = kWarps >> bits, group = warp >> bits;
        const uint32_t total = tiles * units, share = total / gridDim.x, more = total % gridDim.x;
        begin = share * blockIdx.x + min(static_cast<uint32_t>(blockIdx.x), more);
        end = begin + share + (blockIdx.x < more), begin += group;
    }
};

// The weights of the warp's blocks, on their way to its pipeline.
struct Weights {
    const GemmArgs& args;
    const WorkTiles& tiles;
    const WarpWork& work;
    int unit, k_block;
    const uint8_t* from;  // the next block
    int step;             // from one of the warp's blocks to the next, in bytes

    __device__ __forceinline__ Weights(const GemmArgs& args, const WorkTiles& tiles, const WarpWork& work)
        : args(args), tiles(tiles), work(work), unit(work.begin) {
        find();
    }

    __device__ __forceinline__ void find() {
        k_block = work.k_warp;
        if (unit >= work.end) return;
        const int index = unit / work.units, row = (unit - index * work.units) * kUnit, tile = row / 256;
        const int block_bytes = min(256, args.n - tile * 256) * kE4m3BlockK;  // of all rows of the layout's tile
        from = args.codes + tiles.expert_of(index) * args.codes_stride + 256LL * tile * args.k +
               static_cast<long long>(k_block) * block_bytes + row % 256 * kE4m3BlockK;
        step = block_bytes * work.k_warps;
    }

    // Copies the next block, if there is one.
    __device__ __forceinline__ void copy(uint32_t stage, uint32_t barrier) {
        if (unit >= work.end) return;
        if (threadIdx.x % 32 == 0) {
            mbarrier_arrive_expect_tx(barrier, kBlockBytes);
            bulk_copy_g2s_evict_first(stage, from, kBlockBytes, barrier);
        }
        k_block += work.k_warps, from += step;
        if (k_block >= work.k_blocks) {
            unit += work.groups;
            find();
        }
    }
};

// The weights' scales of a unit. kBlock128: of the warp's blocks; lane i has that of its block i for rows g of tiles,
// lane 16 + i for rows g + 8. kChannel: of the unit's rows, one a lane.
template <Scales SCALES, int PART>
__device__ __forceinline__ float weight_scales(const GemmArgs& args, const WorkTiles& tiles, const WarpWork& work,
                                               int unit) {
    if (unit >= work.end) return 0.0f;
    const int index = unit / work.units, row = (unit - index * work.units) * kUnit, lane = threadIdx.x % 32;
    if constexpr (SCALES == kChannel) {
        return reinterpret_cast<const float*>(args.scales + tiles.expert_of(index) * args.scales_stride)[row + lane];
    } else {
        const w8::WeightScales scales = w8::WeightScales::of<PART>(args, tiles.expert_of(index), row / 256);
        const float* from = (PART == kDown ? row / 128 % 2 : lane / 16) ? scales.second : scales.first;
        const int k_block = work.k_warp + lane % 16 * work.k_warps;
        return k_block < work.k_blocks ? from[k_block] : 0.0f;
    }
}

__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) v = fmaxf(v, __shfl_xor_sync(kAll, v, lanes));
    return v;
}

// As the function without a template, mostly without a division.
template <bool ORDERED>
__device__ __forceinline__ float scale_of(float amax) {
    // A quotient that is subnormal may be halfway between two numbers, where exact_divide would round it twice.
    const bool tiny = ORDERED && amax > 0.0f && amax < 1e-36f;
    const float scale = tiny ? amax / 448.0f : exact_divide(amax, 448.0f, 1.0f / 448.0f);
    return scale == 0.0f ? 1.0f : scale;
}

// Four columns per lane of some of the warp's blocks of a row of x.
template <Scales SCALES, int PART, bool ORDERED>
struct Columns {
    static constexpr int kAtOnce = 4;
    uint4 raw[kAtOnce];
    float scale[kAtOnce];  // of E4M3

    __device__ __forceinline__ void fetch(const RoundingArgs& args, const WarpWork& work, int row, int k_block) {
        const int dtype = PART == kDown ? 2 : args.x_dtype, lane = threadIdx.x % 32;
        const long long from = args.top_k ? row / args.top_k : row;
        const uint8_t* x = reinterpret_cast<const uint8_t*>(args.x) + from * (dtype == 2   ? args.k * 4
                                                                              : dtype == 3 ? w8::row_bytes(args.k)
                                                                                           : args.k * 2);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const int block = k_block + i * work.k_warps, column = block * kE4m3BlockK + lane * 4;
            if (block >= work.k_blocks) break;
            if (dtype == 2) {
                raw[i] = *reinterpret_cast<const uint4*>(x + column * 4);
            } else if (dtype == 3) {
                raw[i].x = *reinterpret_cast<const uint32_t*>(x + column);
                scale[i] = reinterpret_cast<const float*>(x + args.k)[SCALES == kChannel ? 0 : block];
            } else {
                const uint2 v = *reinterpret_cast<const uint2*>(x + column * 2);
                raw[i].x = v.x, raw[i].y = v.y;
            }
        }
    }

    // The four columns of a block, in float32.
    __device__ __forceinline__ void values(int i, int dtype, float (&v)[4]) const {
        const uint32_t words[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const uint16_t bits = static_cast<uint16_t>(words[j / 2] >> 16 * (j % 2));
            v[j] = dtype == 2 ? __uint_as_float(words[j]) : dtype == 0 ? bf16_to_f32(bits) : f16_to_f32(bits);
        }
    }

    // The largest magnitude of this lane's columns.
    __device__ __forceinline__ float amax(const RoundingArgs& args, const WarpWork& work, int k_block) const {
        float most = 0.0f;
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            if (k_block + i * work.k_warps >= work.k_blocks) break;
            float v[4];
            values(i, PART == kDown ? 2 : args.x_dtype, v);
            most = fmaxf(most, fmaxf(fmaxf(fabsf(v[0]), fabsf(v[1])), fmaxf(fabsf(v[2]), fabsf(v[3]))));
        }
        return most;
    }

    // Rounds them as row `g` of the work tile, and stores codes and scales at `to`, where the first block begins. The
    // lane 4g + t has, for each 16 columns, columns 4t to 4t + 3 in one of eight words. `row_scale` is the row's scale
    // (kChannel, unless x is E4M3).
    __device__ __forceinline__ void store(const RoundingArgs& args, const WarpWork& work, int g, int k_block,
                                          uint32_t to, float row_scale) {
        const int dtype = PART == kDown ? 2 : args.x_dtype, lane = threadIdx.x % 32;
        const int step = lane / 4;  // of 16 columns
        to += step / 4 * 512 + step % 4 * 4 + g * 64 + lane % 4 * 16;
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            if (k_block + i * work.k_warps >= work.k_blocks) break;
            uint32_t codes = raw[i].x;
            float by = scale[i];
            if (dtype != 3) {
                float v[4];
                values(i, dtype, v);
                if constexpr (SCALES == kChannel) {
                    by = row_scale;
                } else {
                    by = scale_of<ORDERED>(
                        warp_max(fmaxf(fmaxf(fabsf(v[0]), fabsf(v[1])), fmaxf(fabsf(v[2]), fabsf(v[3])))));
                }
                const float inverse = inverse_of(by);
#pragma unroll
                for (int j = 0; j < 4; ++j) v[j] = exact_divide(v[j], by, inverse);
                codes = pack_e4m3x2(v[0], v[1]) | pack_e4m3x2(v[2], v[3]) << 16;
            }
            const uint32_t block = to + i * work.k_warps * kXBytes;
            st_shared(block, codes);
            if (lane == 0) st_shared(block - g * 64 + 1024 + g * 4, __float_as_uint(by));
        }
    }
};

// Sums of a block's 128 columns for two tiles of 16 rows of weights.
__device__ __forceinline__ void mma_block(float (&sums)[2][4], uint32_t stage, uint32_t x) {
    const int lane = threadIdx.x % 32, piece = w8::lane_piece();
    const uint4 first = ld_shared_v4(x + lane * 16), last = ld_shared_v4(x + 512 + lane * 16);
    const uint32_t codes[8] = {first.x, first.y, first.z, first.w, last.x, last.y, last.z, last.w};
#pragma unroll
    for (int part = 0; part < 4; ++part) {
        uint32_t b[2][2];
#pragma unroll
        for (int step = 0; step < 2; ++step) {
            b[step][0] = e4m3x2_to_f16x2_low(codes[2 * part + step]);
            b[step][1] = e4m3x2_to_f16x2_high(codes[2 * part + step]);
        }
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
            uint32_t words[4];
            ldmatrix_x4(words, stage + (piece ^ part * w8::kPartBytes) + tile * w8::kTile16Bytes);
#pragma unroll
            for (int step = 0; step < 2; ++step) {
                const uint32_t low = words[2 * step], high = words[2 * step + 1];  // rows g and g + 8
                const uint32_t a[4] = {e4m3x2_to_f16x2_low(low), e4m3x2_to_f16x2_low(high), e4m3x2_to_f16x2_high(low),
                                       e4m3x2_to_f16x2_high(high)};
                mma_m16n8k16_f16(sums[tile], a, b[step]);
            }
        }
    }
}

// Adds a lane's sums of `blocks` blocks in order: `from` the first, and `by` what its sums are multiplied by.
template <Scales SCALES>
__device__ __forceinline__ void add_blocks(float (&sum)[4], uint32_t from, uint32_t by, int blocks) {
    constexpr int kAtOnce = SCALES == kChannel ? 4 : 2;
#pragma unroll 1
    for (; blocks > 0; blocks -= kAtOnce, from += kAtOnce * 1024, by += kAtOnce * 64) {
        float4 more[kAtOnce], scale[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            if (i >= blocks) continue;
            more[i] = ld_shared_f4(from + i * 1024);
            if (SCALES == kBlock128) scale[i] = ld_shared_f4(by + i * 64);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            if (i >= blocks) continue;
            if constexpr (SCALES == kChannel) {
                sum[0] += more[i].x, sum[1] += more[i].y, sum[2] += more[i].z, sum[3] += more[i].w;
            } else {
                sum[0] = fmaf(more[i].x, scale[i].x, sum[0]), sum[1] = fmaf(more[i].y, scale[i].y, sum[1]);
                sum[2] = fmaf(more[i].z, scale[i].z, sum[2]), sum[3] = fmaf(more[i].w, scale[i].w, sum[3]);
            }
        }
    }
}

// A warp, with a pipeline and an x of its own.
template <Scales SCALES, int PART, bool ORDERED>
struct Warp {
    using XColumns = Columns<SCALES, PART, ORDERED>;
    static constexpr int kExchange = ORDERED ? kExchangeBytes : kSums * 4;
    const RoundingArgs& args;
    const int warp, lane;
    const uint32_t full, stages, exchanges;  // mbarriers; stages; two buffers of sums, of all warps
    float* maxima;                           // [kWarps, kRows], of all warps (kChannel)
    const WorkTiles tiles;
    const WarpWork work;
    const uint32_t x_start;  // of the group's rounded x
    XColumns columns;
    Rows x;
    int now;       // the work tile whose x is here, or on its way
    bool fetched;  // the first columns of the first work tile
    int rows[2];   // of out
    int stage, buffer, turn;
    uint32_t parity;

    __device__ __forceinline__ Warp(const RoundingArgs& args, uint32_t memory, uint32_t full, float* maxima)
        : args(args),
          warp(warp_uniform(threadIdx.x / 32)),
          lane(threadIdx.x % 32),
          full(full),
          stages(memory + warp * args.stages * kBlockBytes),
          exchanges(memory + args.stages * kWarps * kBlockBytes),
          maxima(maxima),
          tiles(args),
          work(args, tiles.count),
          x_start(exchanges + 2 * kExchange + work.group * work.k_blocks * kXBytes),
          x{},
          now(-1),
          fetched(PART != kDown),
          rows{},
          stage(0),
          buffer(0),
          turn(0),
          parity(0) {}

    // Of the warps that share a unit.
    __device__ __forceinline__ void meet() const {
        if (work.k_warps > 1) {
            named_barrier_sync(1 + work.group, work.k_warps * 32);
        } else {
            __syncwarp();
        }
    }

    // kChannel: the scale of row lane % 8 of x: a given one, or that of the maximum of all warps that share a unit.
    __device__ __forceinline__ float row_scale() {
        if (args.input_scales) return args.input_scales[x.expert];
        if (PART != kDown && args.x_dtype == 3) return 0.0f;  // x has it
#pragma unroll 1
        for (int g = 0; g < x.count; ++g) {
            const int row = __shfl_sync(kAll, x.row, g * 4);
            float most = 0.0f;
#pragma unroll 1
            for (int k_block = work.k_warp; k_block < work.k_blocks; k_block += XColumns::kAtOnce * work.k_warps) {
                if (!fetched) columns.fetch(args, work, row, k_block);
                fetched = false;
                most = fmaxf(most, columns.amax(args, work, k_block));
            }
            most = warp_max(most);
            if (lane == 0) maxima[warp * kRows + g] = most;
        }
        meet();
        float most = 0.0f;
        for (int i = 0; i < work.k_warps; ++i) {
            most = fmaxf(most, maxima[(warp - work.k_warp + i) * kRows + lane % kRows]);
        }
        return scale_of<ORDERED>(most);
    }

    // x of the work tile number `index`.
    __device__ __forceinline__ void round_x(int index) {
        __syncwarp();  // all lanes have read the scales of the x before
        if (!fetched) x = tiles[index];
        now = index;
        rows[0] = __shfl_sync(kAll, x.row, lane % 4 * 8), rows[1] = __shfl_sync(kAll, x.row, lane % 4 * 8 + 4);
        const float of_row = SCALES == kChannel ? row_scale() : 0.0f;
#pragma unroll 1
        for (int g = 0; g < x.count; ++g) {
            const int row = __shfl_sync(kAll, x.row, g * 4);
            const float scale = __shfl_sync(kAll, of_row, g);
#pragma unroll 1
            for (int k_block = work.k_warp; k_block < work.k_blocks; k_block += XColumns::kAtOnce * work.k_warps) {
                if (!fetched) columns.fetch(args, work, row, k_block);
                fetched = false;
                columns.store(args, work, g, k_block, x_start + k_block * kXBytes, scale);
            }
        }
        __syncwarp();
    }

    // Adds the next block's products with x to `sums`, and copies another block in its place.
    __device__ __forceinline__ void multiply(float (&sums)[2][4], uint32_t x_block, Weights& weights) {
        mbarrier_wait(full + 8 * stage, parity);
        mma_block(sums, stages + stage * kBlockBytes, x_block);
        __syncwarp();
        weights.copy(stages + stage * kBlockBytes, full + 8 * stage);
        if (++stage == args.stages) stage = 0, parity ^= 1;
    }

    // The scales of rows 2t and 2t + 1 of x, of a block at `x_block`.
    __device__ __forceinline__ float2 x_scales(uint32_t x_block) const {
        const uint2 v = ld_shared_v2(x_block + 1024 + lane % 4 * 8);
        return make_float2(__uint_as_float(v.x), __uint_as_float(v.y));
    }

    // kChannel: a tile's sums times the scales. They are rounded before biases are added, as in w8a8_f16.cuh.
    __device__ __forceinline__ void scale_tile(float (&sums)[4], float scales, int tile) const {
        const float2 of_x = x_scales(x_start + work.k_warp * kXBytes);
        float by[2] = {of_x.x, of_x.y};
        const float low = __shfl_sync(kAll, scales, tile * 16 + lane / 4);
        const float high = __shfl_sync(kAll, scales, tile * 16 + 8 + lane / 4);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (PART != kDown && args.router_weights && rows[i] >= 0) by[i] *= args.router_weights[rows[i]];
            sums[i] = __fmul_rn(sums[i], by[i] * low), sums[2 + i] = __fmul_rn(sums[2 + i], by[i] * high);
        }
    }

    // Ordered: adds the sums of a round's blocks, of which `first` is the first, for a tile.
    __device__ __forceinline__ void add_round(float (&sum)[4], uint32_t exchange, int tile, int first) const {
        const int warp_of_first = warp - work.k_warp;
        add_blocks<SCALES>(sum, exchange + warp_of_first * 1024 + tile * 512 + lane * 16,
                           exchange + kSumsBytes + warp_of_first * 64 + lane % 4 * 16,
                           min(work.k_warps, work.k_blocks - first));
    }

    // A block of each of the warps that share the unit is a round. Each warp adds its own blocks; ordered, warps
    // exchange the sums of every round. There are two buffers for that: who writes to one has met, at the other one,
    // those that read what was in it. `scales`: of weight_scales.
    __device__ __forceinline__ void multiply_unit(int of_tile, float scales, Weights& weights) {
        // Two of the warps have the sums of a tile each, from unit to unit other ones; or one has both.
        const int own_tile = (work.k_warp - 2 * turn++) & (work.k_warps - 1);
        const uint32_t to = warp * 1024 + lane * 16;
        float acc[2][4] = {}, sum[4] = {};
        int i_block = 0, first = 0;
        uint32_t exchange;
#pragma unroll 1
        for (;; first += work.k_warps, ++i_block) {
            exchange = exchanges + buffer * kExchange;
            const int k_block = first + work.k_warp;
            if (k_block < work.k_blocks) {
                const uint32_t x_block = x_start + k_block * kXBytes;
                float by[4];
                if constexpr (SCALES == kBlock128) {
                    const float low = __shfl_sync(kAll, scales, i_block),
                                high = __shfl_sync(kAll, scales, 16 + i_block);
                    const float2 of_x = x_scales(x_block);
                    by[0] = low * of_x.x, by[1] = low * of_x.y, by[2] = high * of_x.x, by[3] = high * of_x.y;
                    if (ORDERED && lane < 4) {
                        st_shared_f4(exchange + kSumsBytes + warp * 64 + lane * 16, by[0], by[1], by[2], by[3]);
                    }
                }
                if constexpr (ORDERED || SCALES == kBlock128) {
                    float c[2][4] = {};
                    multiply(c, x_block, weights);
#pragma unroll
                    for (int tile = 0; tile < 2; ++tile) {
                        if constexpr (ORDERED) {
                            st_shared_f4(exchange + to + tile * 512, c[tile][0], c[tile][1], c[tile][2], c[tile][3]);
                        } else {
#pragma unroll
                            for (int i = 0; i < 4; ++i) acc[tile][i] = fmaf(c[tile][i], by[i], acc[tile][i]);
                        }
                    }
                } else {
                    multiply(acc, x_block, weights);
                }
            }
            if (ORDERED) meet();
            if (first + work.k_warps >= work.k_blocks) break;
            if (ORDERED && own_tile < 2) add_round(sum, exchange, own_tile, first);
            if (ORDERED) buffer ^= 1;
        }
        if constexpr (!ORDERED) {
#pragma unroll
            for (int tile = 0; tile < 2; ++tile) {
                if (SCALES == kChannel) scale_tile(acc[tile], scales, tile);
                st_shared_f4(exchange + to + tile * 512, acc[tile][0], acc[tile][1], acc[tile][2], acc[tile][3]);
            }
            meet();
        }
        buffer ^= 1;
#pragma unroll 1
        for (int tile = own_tile; tile < 2; tile += work.k_warps) {
            if constexpr (ORDERED) {
                add_round(sum, exchange, tile, first);
                if (SCALES == kChannel) scale_tile(sum, scales, tile);
            } else {
#pragma unroll
                for (int i = 0; i < kWarps; ++i) {
                    if (i >= work.k_warps) break;
                    const float4 more = ld_shared_f4(exchange + to + (i - work.k_warp) * 1024 + tile * 512);
                    sum[0] += more.x, sum[1] += more.y, sum[2] += more.z, sum[3] += more.w;
                }
            }
            // Ordered, y is rounded to bfloat16, as w8a8_f16.cuh stores it.
            const WeightRows<PART, kNeighbours> weight_rows(args, x.expert, of_tile * 2 + tile);
            store_rows<float, kFast, ORDERED>(args, weight_rows, sum, rows, {1.0f, 1.0f});
#pragma unroll
            for (int i = 0; i < 4; ++i) sum[i] = 0.0f;
        }
    }

    __device__ __forceinline__ void run() {
        float next_scales = weight_scales<SCALES, PART>(args, tiles, work, work.begin);
        if (PART != kDown && work.begin < work.end) {
            now = work.begin / work.units, x = tiles[now];
            columns.fetch(args, work, warp_uniform(x.row), work.k_warp);
        }
        Weights weights(args, tiles, work);
        for (int i = 0; i < args.stages; ++i) weights.copy(stages + i * kBlockBytes, full + 8 * i);
        begin_x<PART>();
        for (int unit = work.begin; unit < work.end; unit += work.groups) {
            const int index = unit / work.units;
            if (index != now || fetched) round_x(index);
            const float scales = next_scales;
            next_scales = weight_scales<SCALES, PART>(args, tiles, work, unit + work.groups);
            multiply_unit(unit - index * work.units, scales, weights);
        }
    }
};

}  // namespace w8a8_mma

template <Scales SCALES, int PART, int WARPS, int STAGE_BYTES, bool ORDERED = false>
__device__ __forceinline__ void w8a8_mma_gemm(const RoundingArgs& args) {
    using namespace w8a8_mma;
    static_assert(WARPS == kWarps && STAGE_BYTES == kWarps * kBlockBytes);
    extern __shared__ __align__(128) uint8_t memory[];
    __shared__ __align__(8) uint64_t barriers[kWarps * kStages];
    __shared__ float maxima[SCALES == kChannel ? kWarps * kRows : 1];
    const uint32_t full = smem_address(&barriers[warp_uniform(threadIdx.x / 32) * kStages]);
    if (threadIdx.x % 32 == 0) {
        for (int i = 0; i < args.stages; ++i) mbarrier_init(full + 8 * i, 1);
        mbarrier_init_fence();
    }
    __syncwarp();
    begin_launch<PART>();
    Warp<SCALES, PART, ORDERED>(args, smem_address(memory), full, maxima).run();
}

}  // namespace polymoe
