// The kernels of one instruction set for layouts of levels_jobs.h, as a table.
//
// Each levels_*.cpp includes this file once, as isa_*.cpp include isa.h. Before that it defines
// OTTAVA_LEVELS, the table's name in C++.
#include <cstring>
#include <type_traits>

#include "../levels.h"
#include "levels_kernels.h"

namespace ottava {
namespace {
#include "simd.h"
#include "rounding.h"
template <class V>
OTTAVA_INLINE V larger(V a, V b) {
    return a > b ? a : b;
}
#include "levels_strip.h"
}  // namespace

const LevelsKernels OTTAVA_LEVELS = {levels_quantize_run, levels_amax_run, levels_errors_run,
                                     levels_decode_run};

}  // namespace ottava
