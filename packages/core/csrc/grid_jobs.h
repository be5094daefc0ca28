// The quantizations and the shards on grids of scales, as both backends take them. Only plain
// types, and nothing inline with external linkage (see numerics.h). A block has rows * columns
// elements, and 0 stands for all rows or columns. Blocks at the edges may have fewer elements.
#pragma once

#include <cstdint>

#include "dtypes.h"
#include "multi_jobs.h"

namespace ottava {

// One quantization of a matrix. Blocks of one shared block have equal scales; a shared block is
// made of whole blocks.
struct GridSide {
    int64_t block_rows, block_cols;
    int64_t shared_rows, shared_cols;
    bool turned;  // data and scales are stored as the transposed matrix's
    uint8_t* data;
    void* scales;  // float32 or bytes, one for each block
};

// A shard of a matrix [rows, cols]: its elements from `start` on, in row-major order.
struct GridShard {
    MultiSource source;
    int64_t rows, cols, start;
};

struct GridBlock {
    int64_t rows, cols;
};

// The amaxes of the blocks of rows, and those of the blocks of columns unless both are the same.
struct GridMultiAmax {
    GridShard shard;
    GridBlock by_row, by_column;
    bool square;
};

struct GridCastSide {
    GridBlock block;
    const void* scales;  // what the elements of each block of the whole matrix are multiplied by
    uint8_t* data;       // of the shard; null leaves out the side
};

struct GridMultiCast {
    GridShard shard;
    Stored element;
    bool e8m0;  // scales are bytes of E8M0, otherwise float32
    GridCastSide by_row, by_column;
};

// The number of blocks of `n` elements, and of a matrix.
static inline int64_t grid_blocks(int64_t n, int64_t block) {
    return block == 0 ? 1 : n / block + (n % block != 0);
}
static inline int64_t grid_size(const GridShard& shard, const GridBlock& block) {
    return grid_blocks(shard.rows, block.rows) * grid_blocks(shard.cols, block.cols);
}

// The number of all amaxes of a matrix.
static inline int64_t grid_amax_count(const GridMultiAmax& job) {
    return grid_size(job.shard, job.by_row) +
           (job.square ? 0 : grid_size(job.shard, job.by_column));
}

}  // namespace ottava
