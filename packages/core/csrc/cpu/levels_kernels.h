// The kernels of one instruction set for layouts of levels_jobs.h, and the operations that are
// built on them. As kernels.h: only plain types, and nothing inline with external linkage.
#pragma once

#include <cstdint>

#include "../levels_jobs.h"

namespace ottava {

// A part of a direction: its first lane and position, and how many the matrix has there.
struct LevelsStrip {
    int64_t lane, position, lanes, positions;
    int64_t ahead;  // elements from here to what is read from memory later
};

// A run of stored elements of one row.
struct LevelsRun {
    const uint8_t* data;
    int64_t count;        // of elements, even if two share a byte
    const float* values;  // of every code, or of every byte's two codes
    int per_byte;
    const float* scales;  // of every element, or null
    const float* second;  // a factor of every element, or null
    float factor;         // of all elements, if there is no `second`; 1 without a second level
};

struct LevelsKernels {
    void (*quantize)(const LevelsLayout& layout, const LevelsDirection& direction,
                     const LevelsStrip& strip, uint64_t seed);
    // The amaxes of the lanes, after a rotation.
    void (*amax)(const LevelsLayout& layout, const LevelsDirection& direction,
                 const LevelsStrip& strip, float* out);
    // The errors of each candidate in each area of the strip: the sums of its lanes. There are
    // kStripPositions numbers between areas, and between the candidates of the last area and the
    // first one.
    void (*errors)(const LevelsLayout& layout, const LevelsDirection& direction,
                   const LevelsStrip& strip, float* out);
    void (*decode)(const LevelsRun& run, void* out, Dtype dtype);
};

extern const LevelsKernels kLevelsPortable;
#if defined(OTTAVA_X86)
extern const LevelsKernels kLevelsAvx2;
extern const LevelsKernels kLevelsAvx512;
#endif
#if defined(OTTAVA_NEON)
extern const LevelsKernels kLevelsNeon;
#endif

// Operations (levels.cpp).

// Rows and columns of a matrix that is not empty. If the layout is stochastic, `seed` counts, and
// `first_row`, the row of a larger matrix that is the first one of this.
void levels_quantize(const LevelsLayout& layout, const void* src, Dtype dtype, int64_t rows,
                     int64_t cols, uint64_t seed, int64_t first_row, const LevelsResults* results,
                     int threads);
void levels_decode(const LevelsLayout& layout, const LevelsData& from, void* out, Dtype dtype,
                   int threads);

}  // namespace ottava
