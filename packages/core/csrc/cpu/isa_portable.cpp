// The kernels for any machine: the baseline of the architecture.
#if defined(OTTAVA_X86)
#include <immintrin.h>
#elif defined(OTTAVA_NEON)
#include <arm_neon.h>
#endif

#define OTTAVA_KERNELS kPortable
#define OTTAVA_LEVELS kLevelsPortable
#define OTTAVA_ISA "portable"
#include "isa.h"
