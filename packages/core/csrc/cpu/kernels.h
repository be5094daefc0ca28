// The kernels that one instruction set provides, and the operations that are built on them.
//
// A `Kernels` table holds serial functions over runs and tiles; `operations.cpp` divides the work
// between threads. Only plain types cross this border, and nothing inline with external linkage is
// declared here (see numerics.h).
#pragma once

#include <cstdint>

#include "../dtypes.h"
#include "../grid_jobs.h"

namespace ottava {

struct LevelsKernels;
struct ScaleRule;

// A tile is cast or copied into a scratch that stays in the caches, and is written transposed from
// there.
constexpr int64_t kTileRows = 64;
constexpr int64_t kTileCols = 1024;

// One rectangle of a row-major matrix, at most kTileRows by kTileCols, with the place of its
// results.
struct Tile {
    const void* src;     // first element of the rectangle
    int64_t src_stride;  // in elements
    int64_t rows, cols;  // of the rectangle
    uint8_t* out;        // its rows, or null
    uint8_t* out_again;  // its rows once more, or null
    int64_t out_stride;
    uint8_t* out_t;  // its columns, or null: then it may have any number of rows
    int64_t out_t_stride;
    bool stream;  // write around the caches: the results are larger than they are
};

// Panels are at most this wide, and begin at the boundary of an MX block.
constexpr int64_t kMxBlock = 32;
constexpr int64_t kPanelCols = 1024;

// A rectangle of a row-major matrix, at most kPanelCols columns wide.
struct GridPanel {
    const void* src;   // its first element
    int64_t stride;    // of the matrix, in elements
    int64_t row, col;  // of its first element, counted from the first block's of a GridBlocks
    int64_t rows, cols;
    int64_t ahead;  // elements from here to what is read from memory next; 0 if that is not known
};

// One number for each block of a matrix.
struct GridBlocks {
    int64_t rows, cols;  // of a block, in elements
    float* values;
    int64_t stride;  // of the values
};

// The grid of a panel whose scales are computed row by row: blocks of one row that end where
// half-lines end, and whose elements all lie in the panel. The same reading may raise the amaxes of
// another grid.
struct GridRows {
    const GridBlocks* amaxes;  // of the first grid, and of the other one if `count` is 2
    int count;
    GridBlocks multipliers;  // of the first; the same stride
    uint8_t* scales;         // as they are stored; the same stride
    const ScaleRule* rule;
};

// The addresses of the results of a panel's cast; null leaves a result out.
struct GridOut {
    uint8_t* rows;
    uint8_t* rows_again;
    int64_t stride;  // of both
    uint8_t* columns;
    int64_t columns_stride;
    bool stream;
};

// The scales of a panel's blocks, of which a GridBlocks has the geometry: E8M0, or float32.
struct GridScales {
    GridBlocks blocks;
    const uint8_t* e8m0;  // or null; the same stride
};

// Arrays of values have room for this many more values, because the kernels work on whole vectors.
constexpr int64_t kGridLanes = 16;

// Rows of a matrix in MX blocks: kMxBlock data of a row, or of a column. The addresses of data and
// scales are those of the whole matrix.
struct MxRows {
    const uint8_t* data;
    const uint8_t* scales;
    int64_t cols, begin, end;
    bool columnwise;
};

struct Kernels {
    const char* name;
    float (*amax)(const void* src, Dtype dtype, int64_t n);
    int64_t (*saturated)(const void* src, Dtype dtype, int64_t n, float scale, float limit);
    // The casts that observe return the amax of their source, and the others return zero.
    float (*cast)(const void* src, Dtype dtype, int64_t n, float scale, uint8_t* out, Fp8 format,
                  bool stream);
    float (*cast_amax)(const void* src, Dtype dtype, int64_t n, float scale, uint8_t* out,
                       Fp8 format, bool stream);
    float (*cast_tile)(const Tile& tile, Dtype dtype, float scale, Fp8 format);
    float (*cast_tile_amax)(const Tile& tile, Dtype dtype, float scale, Fp8 format);
    void (*transpose_tile)(const Tile& tile);
    // `table` holds the result of every code from 0 to 127; the sign is the top bit of a result.
    void (*decode16)(const uint8_t* src, int64_t n, const uint16_t* table, uint16_t* out,
                     bool stream);
    void (*decode32)(const uint8_t* src, int64_t n, const uint32_t* table, uint32_t* out,
                     bool stream);
    void (*mx_scales)(const float* amax, int64_t n, Fp8 format, bool floor, uint8_t* exponents);
    // `table` is that of decode16, for a scale of one.
    void (*mx_decode)(const MxRows& rows, Fp8 format, const uint16_t* table, void* out, Dtype dtype,
                      bool stream);
    // Elements count as rounded to `nominal`, because the shards of weights may hold values in
    // float32.
    void (*cast_rounded)(const void* src, Dtype nominal, int64_t n, float scale, uint8_t* out,
                         Fp8 format, bool stream);
    // Converts elements of any dtype to float32 values that are rounded to `nominal`.
    void (*round_to)(const void* src, Dtype dtype, int64_t n, Dtype nominal, float* out);
    // The multipliers of elements that belong to E8M0 scales.
    void (*e8m0_multipliers)(const uint8_t* scales, int64_t n, float* out);
    // Raises the values of one or two grids to the amaxes of a panel's blocks. With `atomic`, other
    // threads may raise them at the same time.
    void (*grid_amax)(const GridPanel& panel, Dtype dtype, const GridBlocks* grids, int count,
                      bool atomic);
    // Scales as they are stored, float32 or bytes, and the multipliers of elements. All arrays have
    // room for whole vectors: n rounded up to kGridLanes.
    void (*grid_scales)(const float* amax, int64_t n, Stored element, const ScaleRule& rule,
                        float* multipliers, void* scales);
    // `positive` says that no multiplier is negative. The value that follows the last one may be
    // read.
    void (*grid_cast)(const GridPanel& panel, Dtype dtype, const GridBlocks& multipliers,
                      bool positive, Stored element, const GridOut& to);
    // Amaxes, scales and cast of one grid, in one reading of each row.
    void (*grid_rows)(const GridPanel& panel, Dtype dtype, const GridRows& rows, Stored element,
                      const GridOut& to);
    void (*grid_decode)(const GridPanel& panel, Stored element, const GridScales& scales, void* out,
                        Dtype dtype);
    // The last step of one row of a product; `bias` may be null. `out` may be the sums.
    void (*epilogue)(const float* sums, int64_t n, float factor, const float* bias, void* out,
                     Dtype dtype);
    // Moves the columns of a history up by one row; see history.h.
    void (*history)(float* history, int64_t slots, int64_t n, const uint32_t* moves, float* largest,
                    int64_t width);
    const LevelsKernels* levels;  // see levels_kernels.h
};

extern const Kernels kPortable;
#if defined(OTTAVA_X86)
extern const Kernels kAvx2;
extern const Kernels kAvx512;
#endif
#if defined(OTTAVA_NEON)
extern const Kernels kNeon;
#endif

// The tables that this machine can run, best first. Returns how many were written, at most
// `capacity`.
int available_kernels(const Kernels** out, int capacity);
const Kernels& active_kernels();
bool set_active_kernels(const char* name);

// Operations. A null pointer leaves out what the comment calls optional; `threads` is an upper
// bound.
void amax(const void* src, Dtype dtype, int64_t n, float* out, int threads);
void scales_from_amax(const float* amax, int64_t n, float fp8_max, float epsilon, bool force_pow_2,
                      float* scale, float* scale_inv);
void quantize(const void* src, Dtype dtype, int64_t rows, int64_t cols, float epsilon,
              bool force_pow_2,
              float* amax_out,                 // optional
              float* scale,                    // optional
              float* scale_inv, uint8_t* out,  // out is optional
              uint8_t* out_t,                  // optional
              Fp8 format, int threads);
// A cast with a known scale, whose results are all optional. `amax` is raised to the largest
// magnitude of the source, in the same pass. `saturated` grows by the number of clamped elements.
// The source is read again only if there are any.
void cast(const void* src, Dtype dtype, int64_t rows, int64_t cols, const float* scale, float* amax,
          int64_t* saturated, float* scale_inv, uint8_t* out, uint8_t* out_t, Fp8 format,
          int threads);
// The scales of the next step, for every slot in which the first row of its history is not zero
// (see numerics.h). `maxima` holds what an amax is scaled to, one for each slot of all tensors.
void update_scales(
    const HistorySlots* tensors, int64_t count, int64_t length, const float* maxima,
    bool most_recent,
    const float* last);  // optional: the first rows to use instead, one after the other
void transpose(const uint8_t* src, int64_t rows, int64_t cols, uint8_t* out, int threads);
void decode(const uint8_t* src, Fp8 format, int64_t n,
            const float* scale_inv,  // optional
            void* out, Dtype dtype, int threads);
// Writes the same row `rows` times, in float32.
void repeat32(const void* row, Dtype dtype, int64_t rows, int64_t cols, float* out, int threads);
// The last step of a product: `sums * (scale_a * scale_b) + bias` in float32, rounded once. `out`
// may be the sums.
void epilogue32(const float* sums, int64_t rows, int64_t cols, const float* scale_a,
                const float* scale_b,                // optional
                const void* bias, Dtype bias_dtype,  // one for each column; optional
                void* out, Dtype dtype, int threads);
void mx_scales_from_amax(const float* amax, int64_t n, Fp8 format, bool floor, uint8_t* exponents,
                         int threads);
void mx_decode(const uint8_t* data, const uint8_t* scales, Fp8 format, int64_t rows, int64_t cols,
               bool columnwise, void* out, Dtype dtype, int threads);

// Grids (grid.cpp). A block has block_rows * block_cols elements, and 0 stands for all rows or
// columns. Blocks at the edges may have fewer elements.

void grid_quantize(const void* src, Dtype dtype, int64_t rows, int64_t cols, Stored element,
                   const ScaleRule& rule, const GridSide* sides, int count,
                   int threads);  // one or two
void grid_amax(const void* src, Dtype dtype, int64_t rows, int64_t cols, int64_t block_rows,
               int64_t block_cols, float* out, int threads);
void grid_cast(const void* src, Dtype dtype, int64_t rows, int64_t cols, const float* multipliers,
               int64_t block_rows, int64_t block_cols, Stored element, bool turned, uint8_t* out,
               int threads);
void grid_decode(const uint8_t* data, Stored element, int64_t rows, int64_t cols,
                 const void* scales, bool e8m0, int64_t block_rows, int64_t block_cols, void* out,
                 Dtype dtype, int threads);

// Operations on many tensors in one call (multi.cpp). Threads share the work of all the tensors.

void multi_amax(const MultiSource* sources, int64_t count, float* out, int threads);
void multi_cast(const MultiCastJob* casts, int64_t count, const float* scales, int threads);
// `out` holds the amaxes of all matrices one after the other, and zeros when called.
void grid_multi_amax(const GridMultiAmax* shards, int64_t count, float* out, int threads);
void grid_multi_cast(const GridMultiCast* shards, int64_t count, int threads);

}  // namespace ottava
