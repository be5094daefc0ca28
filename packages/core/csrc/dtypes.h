// The codes by which Python names an element dtype and an element format.
#pragma once

namespace ottava {

enum class Dtype : int { float32 = 0, bfloat16 = 1, float16 = 2 };
enum class Fp8 : int { e4m3 = 0, e5m2 = 1 };
// The element formats of a matrix on a grid of scales. The first two are those of Fp8.
enum class Stored : int { e4m3 = 0, e5m2 = 1, int8 = 3 };

}  // namespace ottava
