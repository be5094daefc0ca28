// The kernels of levels_isa.h for AVX-512 F, BW, VL and DQ.
#include <immintrin.h>

#define OTTAVA_LEVELS kLevelsAvx512
#include "levels_isa.h"
