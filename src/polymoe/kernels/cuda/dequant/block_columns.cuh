#pragma once

namespace polymoe {

// Columns of a block of weights of format F: 64 rows by so many are 2 KiB of codes. 64 for 4 bits, 32 for 8 bits.
template <class F>
constexpr int kBlockColumns = 64;

// Words of codes that a lane has for 16 columns, and blocks in 64 columns.
template <class F>
constexpr int kStepWords = 64 / kBlockColumns<F>;

// Bytes of a column of 64 rows.
template <class F>
constexpr int kColumnBytes = 2048 / kBlockColumns<F>;

}  // namespace polymoe
