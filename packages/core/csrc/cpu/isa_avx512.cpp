// The kernels for AVX-512 F, BW, VL and DQ.
#include <immintrin.h>

#define OTTAVA_KERNELS kAvx512
#define OTTAVA_LEVELS kLevelsAvx512
#define OTTAVA_ISA "avx512"
#include "isa.h"
