// The operations of the CUDA backend: those of cpu/kernels.h on a stream, without a copy to the
// host. Pointers are the device's. The caller allocates all memory, also scratch memory. A null
// pointer leaves out an optional result.
#pragma once

#include <cstdint>

#include "../dtypes.h"
#include "../grid_jobs.h"
#include "../levels_jobs.h"
#include "stream.h"

namespace ottava {
struct ScaleRule;
}

namespace ottava::cuda {

// The number of floats of scratch memory for an amax and for a quantization.
constexpr int64_t kScratchFloats = 512;

void amax(const void* src, Dtype dtype, int64_t n, float* scratch, float* out, Stream stream);
void scales_from_amax(const float* amax, int64_t n, float fp8_max, float epsilon, bool force_pow_2,
                      float* scale, float* scale_inv, Stream stream);
// A cast with a known scale. Without `out_t`, rows and columns are one run.
struct Observed {
    float* amax;         // optional: raised to the largest magnitude
    int64_t* saturated;  // optional: raised by the number of clamped elements
    float* scale_inv;    // optional
};
void cast(const void* src, Dtype dtype, int64_t rows, int64_t cols, const float* scale,
          const Observed& observed,
          uint8_t* out,    // optional, with out_t
          uint8_t* out_t,  // optional
          Fp8 format, Stream stream);
// amax, scale and cast, in two launches.
void quantize(const void* src, Dtype dtype, int64_t rows, int64_t cols, float epsilon,
              bool force_pow_2, float* scratch, float* amax, float* scale,  // optional
              float* scale_inv, uint8_t* out,  // out is optional, with out_t
              uint8_t* out_t,                  // optional
              Fp8 format, Stream stream);
void transpose(const uint8_t* src, int64_t rows, int64_t cols, uint8_t* out, Stream stream);
void decode(const uint8_t* src, Fp8 format, int64_t n,
            const float* scale_inv,  // optional
            void* out, Dtype dtype, Stream stream);

// MX blocks, as in kernels/mx.py.

void mx_scales_from_amax(const float* amax, int64_t n, Fp8 format, bool floor, uint8_t* exponents,
                         Stream stream);
struct MxData {
    uint8_t* data;  // null: the direction is not wanted
    uint8_t* scales;
};
void mx_quantize(const void* src, Dtype dtype, int64_t rows, int64_t cols, Fp8 format, bool square,
                 bool floor, const MxData& by_row, const MxData& by_column, Stream stream);

// Grids of scales: MX blocks, and blocks of 1 x 128, 128 x 128 and 1 x all elements with float32
// scales, in both directions.

void grid_quantize(const void* src, Dtype dtype, int64_t rows, int64_t cols, Fp8 format,
                   const ScaleRule& rule, const GridSide& by_row,
                   const GridSide& by_column,  // without data: the direction is not wanted
                   float* scratch,  // for whole rows and columns as many zeros as there are of both
                   Stream stream);
void grid_decode(const uint8_t* data, Fp8 format, int64_t rows, int64_t cols, const void* scales,
                 bool e8m0, int64_t block_rows, int64_t block_cols, void* out, Dtype dtype,
                 Stream stream);

// Layouts of levels_jobs.h.

// The number of floats of scratch memory that a quantization needs.
int64_t levels_scratch(const LevelsLayout& layout, int64_t rows, int64_t cols);
void levels_quantize(const LevelsLayout& layout, const void* src, Dtype dtype, int64_t rows,
                     int64_t cols,
                     const int64_t* seed,  // of a stochastic layout, as the next one
                     int64_t first_row,    // of a larger matrix, which is the first of this
                     const LevelsResults* results,
                     float* scratch,  // zeros
                     Stream stream);
void levels_decode(const LevelsLayout& layout, const LevelsData& from, void* out, Dtype dtype,
                   Stream stream);

// The last step of a product.

struct Finish {
    const float* scale_a;  // optional, as is scale_b
    const float* scale_b;
    const void* bias;  // optional, one for each column
    Dtype bias_dtype;
};
void finish_float32(const float* acc, int64_t rows, int64_t cols, const Finish& finish, void* out,
                    Dtype dtype, Stream stream);

// Operations on many tensors (multi.cu, mx_shard.cu). One launch serves all tensors that have one
// dtype and one format, as far as they fit its table.

// `out` holds zeros when called.
void multi_amax(const MultiSource* sources, int64_t count, float* out, Stream stream);
void multi_cast(const MultiCastJob* casts, int64_t count, const float* scales, Stream stream);
// The amaxes of MX blocks. `out` holds the amaxes of all matrices one after the other, and zeros
// when called.
void mx_multi_amax(const GridMultiAmax* shards, int64_t count, float* out, Stream stream);
void mx_multi_cast(const GridMultiCast* shards, int64_t count, Stream stream);
// `maxima` are in the host's memory.
void update_scales(
    const HistorySlots* tensors, int64_t count, int64_t length, const float* maxima,
    bool most_recent,
    const float* last,  // optional: the first rows to use instead, one after the other
    Stream stream);

}  // namespace ottava::cuda
