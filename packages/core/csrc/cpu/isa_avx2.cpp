// The kernels for AVX2 with F16C.
#include <immintrin.h>

#define OTTAVA_KERNELS kAvx2
#define OTTAVA_LEVELS kLevelsAvx2
#define OTTAVA_ISA "avx2"
#include "isa.h"
