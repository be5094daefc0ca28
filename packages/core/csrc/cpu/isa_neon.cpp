// The kernels for 64-bit ARM.
#include <arm_neon.h>

#define OTTAVA_KERNELS kNeon
#define OTTAVA_LEVELS kLevelsNeon
#define OTTAVA_ISA "neon"
#include "isa.h"
