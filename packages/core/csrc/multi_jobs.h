// The jobs of the operations on many tensors, as both backends take them. Only plain types, and
// nothing inline with external linkage (see numerics.h).
#pragma once

#include <cstdint>

#include "dtypes.h"

namespace ottava {

// A tensor among many. An element counts as its value rounded to `nominal`, to nearest even, and
// read as float32.
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

// One tensor's slots of scaling state: `scale` [slots], `history` [length, slots] whose first row
// collects.
struct HistorySlots {
    float* scale;
    float* history;
    int64_t slots;
};

}  // namespace ottava
