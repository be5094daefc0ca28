// The kernels for AVX-512 F, BW, VL and DQ.
#include <immintrin.h>

#include <cstring>

#include "../numerics.h"
#include "kernels.h"

namespace ottava {
namespace {
#include "simd.h"
#include "runs.h"
#include "tiles.h"
}  // namespace

const Kernels kAvx512 = {"avx512",     amax_run,     cast_run,     cast_tile,
                         transpose_tile, decode16_run, decode32_run, epilogue_run};

}  // namespace ottava
