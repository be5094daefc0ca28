// The quantizations and the shards on grids of scales, as both backends take them. Only plain types, and nothing inline
// with external linkage (see numerics.h). A block has rows * columns elements, 0 being all; those at edges may have fewer.
#pragma once

#include <cstdint>

#include "dtypes.h"
#include "multi_jobs.h"

namespace ottava {

// One quantization of a matrix. Blocks of one shared block have equal scales; a shared block is made of whole blocks.
struct GridSide {
    int64_t block_rows, block_cols;
    int64_t shared_rows, shared_cols;
    bool turned;   // data and scales are stored as the transposed matrix's
    uint8_t* data;
    void* scales;  // float32 or bytes, one for each block
};

}  // namespace ottava
