// The layouts with small elements, two levels of scales, rotation or choices, as the backends take
// them. Only plain types, and nothing inline with external linkage (see numerics.h).
//
// Each direction is described by lanes and positions. Positions run along the dimension that a
// product sums over: of rowwise data a lane is a row, of columnwise data a column.
#pragma once

#include <cstdint>

#include "dtypes.h"

namespace ottava {

// The formats of elements and of scales, and what has a second level, by the numbers that Python
// gives them.
enum class LevelElement : int { e4m3, e5m2, int8, e2m1, e2m3, e3m2, int4, mxint8, mxint8s };
enum class LevelScale : int { float32, e8m0, e4m3, ue5m3 };
enum class SecondLevel : int { none, tensor, row };

constexpr int kLevelElements = 9;
constexpr int kMostCandidates = 8;
// Kernels compute strips of so many positions, in which blocks and groups of a rotation end. The
// lanes of candidates' blocks end in strips of so many lanes.
constexpr int64_t kStripPositions = 128, kStripLanes = 16;

// Lanes and positions of a rectangle.
struct LevelsBlock {
    int64_t lanes, positions;
};

struct LevelsLayout {
    LevelElement element;
    LevelScale scale;
    int rounding;          // of float32 scales 1 for a power of two, of E8M0 scales a ScaleRounding
    float epsilon;         // of float32 scales
    bool finite_as_input;  // of float32 scales
    LevelsBlock block, area;  // with one stored scale, and with one amax
    SecondLevel second;
    float top;  // what the amax of the second level becomes
    int candidate_count;
    float candidates[kMostCandidates];
    bool squares;  // of errors
    bool stochastic;
    int rotation;       // elements of a group, or 0
    uint64_t signs[2];  // of a group, as bits
    bool rotated[2];    // rows, columns
    bool turned;        // columns are stored as the transpose
};

// The results of one direction; those of a direction that is left out have no data.
struct LevelsResults {
    uint8_t* data;
    void* scales;
    float* amaxes;  // of the second level, or null
};

// What is decoded: a matrix of stored elements.
struct LevelsData {
    const uint8_t* data;
    int64_t rows, cols;  // in elements
    const void* scales;  // or null
    int64_t block_rows, block_cols;
    const float* amaxes;  // of the second level, or null
    bool by_column;       // amaxes are those of columns
};

// One direction of a matrix, with the addresses of all its results.
struct LevelsDirection {
    const void* src;
    Dtype dtype;
    int64_t lanes, positions;
    int64_t stored;                    // positions with results: the padding of a rotation, too
    int64_t lane_step, position_step;  // in elements, one of which is 1
    bool columnwise;
    bool rotated;
    float largest;    // what an infinite float32 scale becomes
    uint32_t stream;  // of random words
    // The places that random words depend on: of the first element, and from one to the next.
    uint64_t first_place;
    int64_t place_lane_step, place_position_step;
    const float* second;   // the amaxes of the second level, or null
    const float* amaxes;   // of areas, or null: each block finds its own
    const float* factors;  // of the areas' candidates, or null
    int64_t area_lane_step, area_position_step;
    uint8_t* data;
    int64_t data_step;  // of lanes, or of positions if data are stored by position
    bool by_position;
    void* scales;
    int64_t scale_lane_step, scale_position_step;
};

constexpr int elements_per_byte(LevelElement element) {
    return element == LevelElement::e2m1 || element == LevelElement::int4 ? 2 : 1;
}

}  // namespace ottava
