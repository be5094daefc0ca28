// The codes by which Python names an element dtype and an FP8 format.
#pragma once

namespace ottava {

enum class Dtype : int { float32 = 0, bfloat16 = 1, float16 = 2 };
enum class Fp8 : int { e4m3 = 0, e5m2 = 1 };

}  // namespace ottava
