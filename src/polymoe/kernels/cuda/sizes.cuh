// Generated from sizes.py by scripts/build-kernels; do not edit.
#pragma once

namespace polymoe {

constexpr int kMaxStages = 16;
constexpr int kTileRows = 8;
constexpr int kE4m3BlockK = 128;
constexpr int kE4m3RowBytes = 132;
constexpr int kMmaConsumerWarps = 16;
constexpr int kMmaProducerWarps = 2;
constexpr int kMmaStageBlocks = 8;
#ifdef POLYMOE_SM80
constexpr int kCopyWarps = 3;
#endif

struct Mxfp4Sizes {
    static constexpr int kScaleBytes = 128, kScaleBlocks = 1;
};

struct Nvfp4Sizes {
    static constexpr int kScaleBytes = 256, kScaleBlocks = 1;
};

struct Int4G32Sizes {
    static constexpr int kScaleBytes = 256, kScaleBlocks = 1;
};

struct Int4G128Sizes {
    static constexpr int kScaleBytes = 128, kScaleBlocks = 2;
};

}  // namespace polymoe
