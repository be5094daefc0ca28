// The kernels of levels_isa.h for AVX2.
#include <immintrin.h>

#define OTTAVA_LEVELS kLevelsAvx2
#include "levels_isa.h"
