// Strips of 32 rows and 256 columns, one for each block of threads. Each warp has four of the rows,
// and each lane a group of columns. So the scale or bias of a column is read once for four rows,
// and a strip has the rows of one row of MX blocks.
#pragma once

#include <cstdint>

#include "arithmetic.h"

namespace ottava::cuda {

struct Strip {
    static constexpr int kThreads = 256, kRows = 32, kCols = kWarp * kGroup,
                         kEach = kRows * kWarp / kThreads;
    int64_t row, col;  // a thread's first
    int height;        // how many of its rows there are

    template <class Thread>
    OTTAVA_DEVICE Strip(const Thread& thread, int64_t rows, uint32_t across) {
        const uint32_t block = static_cast<uint32_t>(thread.block());
        row = int64_t{block / across} * kRows + thread.warp() * kEach;
        col = int64_t{block % across} * kCols + thread.lane() * kGroup;
        height = rows - row < kEach ? static_cast<int>(rows - row) : kEach;
    }
};

// The number of blocks of threads, beside each other and in all.
struct Grid {
    int64_t across, count;
    Grid(int64_t rows, int64_t cols, int tile_rows, int tile_cols)
        : across(ceil_div(cols, tile_cols)), count(across * ceil_div(rows, tile_rows)) {}
};

}  // namespace ottava::cuda
