// Elements that count as rounded to another dtype, to nearest even, before any other operation.
#pragma once

#include <cstdint>
#include <type_traits>

#include "arithmetic.h"

namespace ottava::cuda {

// The next two functions turn NaN into NaN of any bits, because no code depends on the bits.

struct Unrounded {
    static OTTAVA_DEVICE void pair(float&, float&) {}
};

struct ToBFloat16 {
    static OTTAVA_DEVICE void pair(float& a, float& b) {
#if defined(__CUDA_ARCH__)
        uint32_t both;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(b), "f"(a));
        a = bits_as<float>(both << 16);
        b = bits_as<float>(both & 0xffff0000u);
#else
        a = widen_bfloat16(to_bfloat16(a));
        b = widen_bfloat16(to_bfloat16(b));
#endif
    }
};

struct ToFloat16 {
    static OTTAVA_DEVICE void pair(float& a, float& b) {
#if defined(__CUDA_ARCH__)
        uint32_t both;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(b), "f"(a));
        asm("{.reg .b16 lo, hi; mov.b32 {lo, hi}, %2; cvt.f32.f16 %0, lo; cvt.f32.f16 %1, hi;}"
            : "=f"(a), "=f"(b)
            : "r"(both));
#else
        a = widen_half(to_half(a));
        b = widen_half(to_half(b));
#endif
    }
};

// Calls body(rounding) for elements of `Source`, without a rounding where their values are values
// of `nominal`.
template <class Source, class Body>
OTTAVA_DEVICE void with_rounding(Dtype nominal, const Body& body) {
    if (nominal == Dtype::bfloat16 && !std::is_same<Source, BFloat16>::value)
        return body(ToBFloat16{});
    if (nominal == Dtype::float16 && !std::is_same<Source, Float16>::value)
        return body(ToFloat16{});
    body(Unrounded{});
}

// Rounds one value. Rounding keeps the order of magnitudes, so the largest may be rounded last.
OTTAVA_DEVICE float rounded(float value, Dtype nominal) {
    float unused = 0.0f;
    if (nominal == Dtype::bfloat16) ToBFloat16::pair(value, unused);
    if (nominal == Dtype::float16) ToFloat16::pair(value, unused);
    return value;
}

}  // namespace ottava::cuda
