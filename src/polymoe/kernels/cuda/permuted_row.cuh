// Rows in expert order. An expanded row is a token and one of its experts: token * top_k + slot. Permuted rows are the
// expanded rows of local experts, sorted by expert.
#pragma once
#include "sizes.cuh"

namespace polymoe {

// In permuted tiles a work tile's rows are padded.
__host__ __device__ constexpr int padded_rows(int rows) { return (rows + kTileRows - 1) / kTileRows * kTileRows; }

// Where an expanded row is: its permuted row, or -1 where no local expert has it; the first row of its work tile, where
// rows are padded; its number in the work tile; and the work tile's rows, padded.
struct __align__(16) PermutedRow {
    int permuted_row, tile_row, row, padded_rows;
};

}  // namespace polymoe
