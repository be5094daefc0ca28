// The operations of the CUDA backend: those of cpu/kernels.h on a stream, without a word to the host. Pointers are the
// device's. Scratch memory comes from the caller, who owns all allocation. A null pointer leaves out what is optional.
#pragma once

#include <cstdint>

#include "../dtypes.h"
#include "stream.h"

namespace ottava::cuda {

// Floats of scratch memory that an amax and a quantization need.
constexpr int64_t kScratchFloats = 512;

void amax(const void* src, Dtype dtype, int64_t n, float* scratch, float* out, Stream stream);
void scales_from_amax(const float* amax, int64_t n, float fp8_max, float epsilon, bool force_pow_2, float* scale,
                      float* scale_inv, Stream stream);
// With a known scale. Without `out_t`, rows and columns are one run.
struct Observed {
    float* amax;          // optional: raised to the largest magnitude
    int64_t* saturated;   // optional: raised by the number of clamped elements
    float* scale_inv;     // optional
};
void cast(const void* src, Dtype dtype, int64_t rows, int64_t cols, const float* scale, const Observed& observed,
          uint8_t* out,    // optional, with out_t
          uint8_t* out_t,  // optional
          Fp8 format, Stream stream);
// amax, scale and cast, in two launches.
void quantize(const void* src, Dtype dtype, int64_t rows, int64_t cols, float epsilon, bool force_pow_2, float* scratch,
              float* amax, float* scale,       // optional
              float* scale_inv, uint8_t* out,  // out is optional, with out_t
              uint8_t* out_t,                  // optional
              Fp8 format, Stream stream);
void transpose(const uint8_t* src, int64_t rows, int64_t cols, uint8_t* out, Stream stream);
void decode(const uint8_t* src, Fp8 format, int64_t n,
            const float* scale_inv,  // optional
            void* out, Dtype dtype, Stream stream);

}  // namespace ottava::cuda
