// The kernels of one instruction set, as a table.
//
// Each isa_*.cpp includes this file once. Before that it includes its intrinsics, and defines
// OTTAVA_KERNELS, the table's name in C++, OTTAVA_LEVELS, that of the table of levels_isa.h, and
// OTTAVA_ISA, its name for users.
#include <cstring>
#include <type_traits>

#include "../numerics.h"
#include "kernels.h"
#include "levels_kernels.h"

namespace ottava {
namespace {
#include "simd.h"
#include "amax.h"
#include "cast.h"
#include "decode.h"
#include "tiles.h"
#include "mx.h"
#include "mx_decode.h"
#include "rounding.h"
#include "rounded.h"
#include "grid_amax.h"
#include "grid_cast.h"
#include "grid_decode.h"
#include "epilogue.h"
#include "history.h"
}  // namespace

const Kernels OTTAVA_KERNELS = {OTTAVA_ISA,           amax_run,          saturated_run,
                                cast_run<Unobserved>, cast_run<Largest>, cast_tile<Unobserved>,
                                cast_tile<Largest>,   transpose_tile,    decode16_run,
                                decode32_run,         mx_scales_run,     mx_decode_run,
                                cast_rounded_run,     round_to_run,      e8m0_multipliers_run,
                                grid_amax_run,        grid_scales_run,   grid_cast_run,
                                grid_rows_run,        grid_decode_run,   epilogue_run,
                                history_run,          &OTTAVA_LEVELS};

}  // namespace ottava
