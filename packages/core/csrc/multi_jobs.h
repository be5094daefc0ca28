// The jobs of the operations on many tensors, as both backends take them. Only plain types, and nothing inline with
// external linkage (see numerics.h).
#pragma once

#include <cstdint>

#include "dtypes.h"

namespace ottava {

// A tensor among many. An element counts as its value rounded to `nominal`, to nearest even, and read as float32.
struct MultiSource {
    const void* src;
    Dtype dtype, nominal;
    int64_t count;
};

struct MultiCastJob {
    MultiSource source;
    Fp8 format;
    uint8_t* out;
};

// A shard of a matrix [rows, cols]: its elements from `start` on, in row-major order.
struct MxMultiAmax {
    MultiSource source;
    int64_t rows, cols, start;
    bool square;
};

struct MxMultiCast {
    MultiSource source;
    int64_t rows, cols, start;
    Fp8 format;
    const uint8_t* row_scales;     // of the whole matrix; optional, with row_data
    uint8_t* row_data;            // of the shard
    const uint8_t* column_scales;  // optional, with column_data
    uint8_t* column_data;
};

// One tensor's slots of scaling state: `scale` [slots], `history` [length, slots] whose first row collects.
struct HistorySlots {
    float* scale;
    float* history;
    int64_t slots;
};

// How many amaxes a matrix has in all: along rows and along columns, or square ones.
static inline int64_t mx_amax_count(int64_t rows, int64_t cols, bool square) {
    constexpr int64_t block = 32;
    const int64_t across = cols / block + (cols % block != 0), down = rows / block + (rows % block != 0);
    return square ? down * across : rows * across + down * cols;
}

}  // namespace ottava
