// The kernels of levels_isa.h for any machine: the baseline of the architecture.
#if defined(OTTAVA_X86)
#include <immintrin.h>
#elif defined(OTTAVA_NEON)
#include <arm_neon.h>
#endif

#define OTTAVA_LEVELS kLevelsPortable
#include "levels_isa.h"
