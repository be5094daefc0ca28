// The kernels of levels_isa.h for 64-bit ARM.
#include <arm_neon.h>

#define OTTAVA_LEVELS kLevelsNeon
#include "levels_isa.h"
