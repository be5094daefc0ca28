// The arithmetic of one element and of one scale, shared by every compiled backend.
//
// Header only, host and device. Each function template works on a scalar (`float` with `int32_t`)
// and, on the host, on a GCC/Clang vector of them: one text is the kernel, the oracle of the
// kernel's tests, and the device code, which is what makes the backends agree bit for bit. All of
// it is branch free.
//
// Everything here has internal linkage: the CPU files are compiled for different instruction sets,
// and a function that the linker merged between them would run AVX-512 code on a machine without
// it.
//
// Compile with -ffp-contract=off and without fast-math. No step makes or reads a float32 subnormal
// except where the caller's own values, or the scale of a block, are subnormal.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define OTTAVA_HD static __host__ __device__ __forceinline__
#else
#define OTTAVA_HD static inline __attribute__((always_inline, unused))
#endif

namespace ottava {

constexpr int32_t kMagnitude = 0x7fffffff;
constexpr int32_t kInfinity = 0x7f800000;
constexpr int32_t kQuietNan = 0x7fc00000;
constexpr int32_t kLargestFinite = 0x7f7fffff;

// A small float format as constants. Larger magnitudes are clamped to `limit`, a bit pattern of
// float32. It is the largest value of the saturating FP8 formats; for float16 it is the first power
// of two beyond the largest value, whose code is that of infinity. `width` counts the sign, which
// is the highest bit.
struct E4M3 {
    static constexpr int mantissa = 3, bias = 7, width = 8;
    static constexpr bool has_inf = false, has_nan = true;
    static constexpr int32_t limit = 0x43e00000;
    static constexpr float maximum = 448.0f;
    static constexpr int32_t nan_code = 0x7f;
};

struct E5M2 {
    static constexpr int mantissa = 2, bias = 15, width = 8;
    static constexpr bool has_inf = true, has_nan = true;
    static constexpr int32_t limit = 0x47600000;
    static constexpr float maximum = 57344.0f;
    static constexpr int32_t nan_code = 0x7f;
};

// Formats without NaN, which becomes the largest number.
struct E2M1 {
    static constexpr int mantissa = 1, bias = 1, width = 4;
    static constexpr bool has_inf = false, has_nan = false;
    static constexpr int32_t limit = 0x40c00000;
    static constexpr float maximum = 6.0f;
    static constexpr int32_t nan_code = 0x7;
};

struct E2M3 {
    static constexpr int mantissa = 3, bias = 1, width = 6;
    static constexpr bool has_inf = false, has_nan = false;
    static constexpr int32_t limit = 0x40f00000;
    static constexpr float maximum = 7.5f;
    static constexpr int32_t nan_code = 0x1f;
};

struct E3M2 {
    static constexpr int mantissa = 2, bias = 3, width = 6;
    static constexpr bool has_inf = false, has_nan = false;
    static constexpr int32_t limit = 0x41e00000;
    static constexpr float maximum = 28.0f;
    static constexpr int32_t nan_code = 0x1f;
};

// Scales, which have no sign: it would be a ninth bit.
struct UE5M3 {
    static constexpr int mantissa = 3, bias = 15, width = 9;
    static constexpr bool has_inf = false, has_nan = true;
    static constexpr int32_t limit = 0x47e00000;
    static constexpr float maximum = 114688.0f;
    static constexpr int32_t nan_code = 0xff;
};

// An integer format as constants: multiples of 2^-fraction in two's complement. `limit` and `least`
// are the magnitudes of the largest and the least number, bit patterns of float32, and `mantissa`
// the bits after the first one of the largest.
//
// Whole numbers from -127 to 127; -128 is NaN.
struct Int8 {
    static constexpr int fraction = 0, mantissa = 6, width = 8;
    static constexpr int32_t limit = 0x42fe0000, least = limit;
    static constexpr float maximum = 127.0f;
    static constexpr bool has_nan = true;
    static constexpr int32_t nan_code = 0x80;
};

// Whole numbers from -7 to 7; -8 is NaN.
struct Int4 {
    static constexpr int fraction = 0, mantissa = 2, width = 4;
    static constexpr int32_t limit = 0x40e00000, least = limit;
    static constexpr float maximum = 7.0f;
    static constexpr bool has_nan = true;
    static constexpr int32_t nan_code = 0x8;
};

// The INT8 of MX, from -2 to 127/64. NaN becomes the largest number.
struct MxInt8 {
    static constexpr int fraction = 6, mantissa = 6, width = 8;
    static constexpr int32_t limit = 0x3ffe0000, least = 0x40000000;
    static constexpr float maximum = 1.984375f;
    static constexpr bool has_nan = false;
    static constexpr int32_t nan_code = 0x7f;
};

// The same from -127/64 on.
struct MxInt8Symmetric {
    static constexpr int fraction = 6, mantissa = 6, width = 8;
    static constexpr int32_t limit = 0x3ffe0000, least = limit;
    static constexpr float maximum = 1.984375f;
    static constexpr bool has_nan = false;
    static constexpr int32_t nan_code = 0x7f;
};

template <class Format>
constexpr bool is_integer = false;
template <>
constexpr bool is_integer<Int8> = true;
template <>
constexpr bool is_integer<Int4> = true;
template <>
constexpr bool is_integer<MxInt8> = true;
template <>
constexpr bool is_integer<MxInt8Symmetric> = true;

struct Half {
    static constexpr int mantissa = 10, bias = 15, width = 16;
    static constexpr bool has_inf = true, has_nan = true;
    static constexpr int32_t limit = 0x47800000;  // 65536
    static constexpr int32_t nan_code = 0x7e00;
};

template <class To, class From>
OTTAVA_HD To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From), "same size");
    To to;
    memcpy(&to, &from, sizeof(To));
    return to;
}

// float32 -> code of `Format` in the low bits, rounded to nearest even. Magnitudes beyond `limit`
// become `limit`, NaN becomes the positive `nan_code`, and zero keeps its sign.
//
// Adding a power of two 23 - mantissa binades above |x| leaves |x| rounded in the low bits of the
// sum, done by the adder itself. Below the smallest normal that power stays the same, so that the
// sum is rounded as a subnormal. The mantissa of the addend also carries the exponent field of the
// code, so that the sum's low bits are the whole code.
template <class Format, class F, class I>
OTTAVA_HD I encode(F x) {
    constexpr int shift = 23 - Format::mantissa;
    constexpr int32_t min_normal = (127 + 1 - Format::bias) << 23;
    constexpr int32_t sign_bit = 1 << (Format::width - 1);
    const I bits = bits_as<I>(x);
    const I magnitude = bits & kMagnitude;
    const I limit = I{} + Format::limit;
    const I clamped = magnitude < limit ? magnitude : limit;
    const I exponent = clamped & kInfinity;
    const I lowest = I{} + min_normal;
    const I binade = exponent > lowest ? exponent : lowest;
    const I addend = binade + (binade >> shift) + ((shift << 23) - (min_normal >> shift));
    const I sum = bits_as<I>(bits_as<F>(clamped) + bits_as<F>(addend));
    const I code = (sum & (sign_bit - 1)) | ((bits >> (32 - Format::width)) & sign_bit);
    const I nan = I{} + Format::nan_code;
    return magnitude > kInfinity ? nan : code;
}

// Code of `Format` -> float32, exact. NaN becomes the canonical NaN with the code's sign.
template <class Format, class F, class I>
OTTAVA_HD F widen(I code) {
    constexpr int shift = 23 - Format::mantissa;
    constexpr int32_t min_normal = (127 + 1 - Format::bias) << 23;
    constexpr int32_t sign_bit = 1 << (Format::width - 1);
    constexpr int32_t top = (sign_bit - 1) << shift;  // all ones
    constexpr int32_t infinity =
        Format::has_inf ? (top & kInfinity) : kInfinity;  // in the small exponent
    const I magnitude = (code & (sign_bit - 1)) << shift;
    const I rebiased = magnitude + ((127 - Format::bias) << 23);
    // A subnormal is read as if normal in the lowest binade, whose implicit one is then taken off
    // again.
    const I zero = I{};
    const I borrowed = magnitude < (1 << 23) ? zero + min_normal : zero;
    const I lifted = magnitude < (1 << 23) ? rebiased + (1 << 23) : rebiased;
    I value = bits_as<I>(bits_as<F>(lifted) - bits_as<F>(borrowed));
    if (Format::has_inf) {
        value = magnitude == infinity ? zero + kInfinity : value;
        value = magnitude > infinity ? zero + kQuietNan : value;
    } else if (Format::has_nan) {
        value = magnitude == top ? zero + kQuietNan : value;
    }
    return bits_as<F>(value | ((code & sign_bit) << (32 - Format::width)));
}

// Adding 1.5 * 2^23, whose last bit counts ones, leaves the rounded number in the low bits of the
// sum.
constexpr int32_t kOnes = 0x4b400000;

// A value of magnitude at most `limit`, or `least` if it is negative.
template <class Format, class F, class I>
OTTAVA_HD I clamped_integer(F x) {
    const I bits = bits_as<I>(x), zero = I{};
    const I magnitude = bits & kMagnitude, sign = bits ^ magnitude;
    const I limit = sign < 0 ? zero + Format::least : zero + Format::limit;
    return (magnitude < limit ? magnitude : limit) | sign;
}

template <class Format, class F, class I>
OTTAVA_HD I encode_integer(F x) {
    constexpr int32_t ones = kOnes - (Format::fraction << 23);
    constexpr int32_t mask = (1 << Format::width) - 1;
    const I magnitude = bits_as<I>(x) & kMagnitude, zero = I{};
    const F clamped = bits_as<F>(clamped_integer<Format, F, I>(x));
    const I code = bits_as<I>(clamped + bits_as<F>(zero + ones)) & mask;
    const I nan = zero + Format::nan_code;
    return magnitude > kInfinity ? nan : code;
}

template <class Format, class F, class I>
OTTAVA_HD F widen_integer(I code) {
    constexpr int32_t sign = 1 << (Format::width - 1);
    const I low = code & (2 * sign - 1), nan = I{} + kQuietNan;
    const I ones = I{} + (kOnes - (Format::fraction << 23));
    const F value = bits_as<F>(ones + ((low ^ sign) - sign)) - bits_as<F>(ones);
    if (!Format::has_nan) return value;
    return bits_as<F>(low == Format::nan_code ? nan : bits_as<I>(value));
}

// The byte of an element of any format, in the low bits.
template <class Format, class F, class I>
OTTAVA_HD I encode_element(F x) {
    if constexpr (is_integer<Format>)
        return encode_integer<Format, F, I>(x);
    else
        return encode<Format, F, I>(x);
}

// float32 -> bfloat16 in the low 16 bits, rounded to nearest even; NaN becomes 0x7fc0.
template <class F, class I>
OTTAVA_HD I encode_bfloat16(F x) {
    const I bits = bits_as<I>(x);
    const I magnitude = bits & kMagnitude;
    const I finite = magnitude > kInfinity ? I{} + kInfinity
                                           : magnitude;  // the addition below must not overflow
    const I rounded = ((finite + 0x7fff + ((finite >> 16) & 1)) >> 16) | ((bits >> 16) & 0x8000);
    const I nan = I{} + (kQuietNan >> 16);
    return magnitude > kInfinity ? nan : rounded;
}

OTTAVA_HD float widen_bfloat16(uint16_t code) {
    return bits_as<float>(static_cast<uint32_t>(code) << 16);
}
OTTAVA_HD float widen_half(uint16_t code) {
    return widen<Half, float, int32_t>(code);
}
OTTAVA_HD uint16_t to_bfloat16(float x) {
    return static_cast<uint16_t>(encode_bfloat16<float, int32_t>(x));
}
OTTAVA_HD uint16_t to_half(float x) {
    return static_cast<uint16_t>(encode<Half, float, int32_t>(x));
}

// On the device the compiler must not fuse the product with a following addition.
OTTAVA_HD float multiply(float a, float b) {
#if defined(__CUDA_ARCH__)
    return __fmul_rn(a, b);
#else
    return a * b;
#endif
}

OTTAVA_HD float divide(float a, float b) {
#if defined(__CUDA_ARCH__)
    return __fdiv_rn(a, b);
#else
    return a / b;
#endif
}

// The quotient of vectors, on the host.
template <class F>
OTTAVA_HD F divide(F a, F b) {
    return a / b;
}

// float32(code) * scale_inv. The sign of the code is put on last, also on NaN, so that the result
// is the same on machines whose invalid operations give NaNs of different signs.
template <class Format>
OTTAVA_HD float dequantize_element(uint8_t code, float scale_inv) {
    const float value = multiply(widen<Format, float, int32_t>(code & 0x7f), scale_inv);
    const int32_t bits = bits_as<int32_t>(value);
    const int32_t clean = (bits & kMagnitude) > kInfinity ? kQuietNan : bits;
    return bits_as<float>(static_cast<uint32_t>(clean) ^
                          (static_cast<uint32_t>(code & 0x80) << 24));
}

// The value of a byte without its sign, and the sign as the top bit, which is put on last. An
// integer's value has its sign already, and its top bit is zero.
template <class Format, class F, class I>
OTTAVA_HD F element_value(I code) {
    if constexpr (is_integer<Format>)
        return widen_integer<Format, F, I>(code);
    else
        return widen<Format, F, I>(code & 0x7f);
}

template <class Format, class I>
OTTAVA_HD I element_sign(I code) {
    return is_integer<Format> ? I{} : (code & 0x80) << 24;
}

// dequantize_element in 16 bits, rounded from the float32 result.
template <class Format>
OTTAVA_HD uint16_t dequantize_bfloat16(uint8_t code, float scale_inv) {
    const uint16_t magnitude = to_bfloat16(dequantize_element<Format>(code & 0x7f, scale_inv));
    return static_cast<uint16_t>(magnitude ^ ((code & 0x80) << 8));
}

template <class Format>
OTTAVA_HD uint16_t dequantize_half(uint8_t code, float scale_inv) {
    const uint16_t magnitude = to_half(dequantize_element<Format>(code & 0x7f, scale_inv));
    return static_cast<uint16_t>(magnitude ^ ((code & 0x80) << 8));
}

template <class Format>
OTTAVA_HD float format_max() {
    return bits_as<float>(Format::limit);
}

// E8M0, the scale of an MX block: 2^(code - 127), 255 is NaN.
constexpr int32_t kE8m0Nan = 255;
constexpr int32_t kE8m0Max = 254;
constexpr int32_t kTwoToMinus127 =
    0x00400000;  // the one power of two of E8M0 that is a float32 subnormal

// The rounding of the exponent of a block's scale: `up`, which clamps no element, `floor`, the rule
// of the OCP specification, which may clamp the largest elements of a block, `even`, which rounds
// the amax as elements are rounded before, or `nearest`, of the logarithm.
enum class ScaleRounding : int { up = 0, floor = 1, even = 2, nearest = 3 };

// The code of a ratio amax / max, whose exponent goes up for mantissas above `normal`, or above
// `subnormal` if it is 0. Code 0 stands for 2^-127 and not for zero.
template <class F, class I>
OTTAVA_HD I e8m0_rounded(F ratio, int32_t normal, int32_t subnormal) {
    const I bits = bits_as<I>(ratio), zero = I{}, one = zero + 1;
    const I exponent = bits >> 23, mantissa = bits & 0x7fffff;
    const I reached = exponent > 0 ? zero + normal : zero + subnormal;
    const I code = exponent + (mantissa > reached ? one : zero);
    const I capped = code > kE8m0Max ? zero + kE8m0Max : code;
    return bits > kInfinity ? zero + kE8m0Nan : capped;
}

// The code of amax / max with its exponent rounded up. amax is not negative.
template <class Format, class F, class I>
OTTAVA_HD I e8m0_up(F amax) {
    constexpr float inverse = 1.0f / Format::maximum;
    return e8m0_rounded<F, I>(amax * inverse, 0, kTwoToMinus127);
}

// The mantissa of the largest number below the square root of two, and the largest subnormal number
// below 2^-126.5.
constexpr int32_t kRootOfTwo = 0x3504f3, kRootBelowNormal = 0x5a8279;

// The code of amax / max with its logarithm rounded to nearest.
template <class Format, class F, class I>
OTTAVA_HD I e8m0_nearest(F amax) {
    constexpr float inverse = 1.0f / Format::maximum;
    return e8m0_rounded<F, I>(amax * inverse, kRootOfTwo, kRootBelowNormal);
}

// The code of the largest power of two that is not above amax, over the largest one of `Format`.
// The bits of amax are raised before.
template <class Format, class F, class I>
OTTAVA_HD I e8m0_floor(F amax, int32_t raised = 0) {
    constexpr int32_t largest = (Format::limit >> 23) - 127;
    const I bits = bits_as<I>(amax), zero = I{};
    const I power = ((bits + raised) >> 23) - largest;
    const I shifted = power < kE8m0Max ? power : zero + kE8m0Max;
    const I code = shifted > 0 ? shifted : zero;
    const I capped = bits == kInfinity ? zero + kE8m0Max : code;
    return bits > kInfinity ? zero + kE8m0Nan : capped;
}

// The same of the amax rounded to the precision of `Format`: half a unit in the last place is
// added.
template <class Format, class F, class I>
OTTAVA_HD I e8m0_even(F amax) {
    return e8m0_floor<Format, F, I>(amax, 1 << (22 - Format::mantissa));
}

// 2^(127 - code), exactly: the multiplier of a block's elements when they are quantized.
template <class F, class I>
OTTAVA_HD F e8m0_multiplier(I code) {
    const I zero = I{};
    const I normal = ((kE8m0Max - code) & 0xff)
                     << 23;  // of 255 nothing is shifted that is negative
    const I positive = code == kE8m0Max ? zero + kTwoToMinus127 : normal;
    return bits_as<F>(code > kE8m0Max ? zero + kQuietNan : positive);
}

// 2^(code - 127), exactly: the multiplier of a block's elements when they are decoded.
template <class F, class I>
OTTAVA_HD F e8m0_value(I code) {
    const I zero = I{};
    const I positive = code == 0 ? zero + kTwoToMinus127 : code << 23;
    return bits_as<F>(code > kE8m0Max ? zero + kQuietNan : positive);
}

struct Scale {
    float scale;      // multiplies when quantizing
    float scale_inv;  // multiplies when dequantizing: 1 / scale, correctly rounded
};

// The rule by which the scale of a block follows from its amax and the format's maximum. An amax
// below `epsilon` counts as `epsilon`, and an infinite scale becomes `largest`.
struct ScaleRule {
    bool e8m0;   // E8M0, of which only `floor` is a choice (see ScaleRounding)
    bool floor;  // to a power of two
    float epsilon, largest;
};

template <class F, class I>
OTTAVA_HD F scale_of(F amax, float maximum, const ScaleRule& rule) {
    const F least = F{} + rule.epsilon, raised = amax < least ? least : amax;
    const I magnitude = bits_as<I>(raised) & kMagnitude, one = bits_as<I>(F{} + 1.0f);
    const I ratio = bits_as<I>(divide(F{} + maximum, raised));
    const I finite = (ratio & kMagnitude) == kInfinity ? bits_as<I>(F{} + rule.largest) : ratio;
    const I rounded = finite & (rule.floor ? static_cast<int32_t>(0xff800000u) : -1);
    const I ordinary = magnitude < kInfinity ? rounded : one;
    return bits_as<F>(magnitude == 0 ? one : ordinary);
}

OTTAVA_HD Scale scale_from_amax(float amax, float fp8_max, float epsilon, bool force_pow_2) {
    const ScaleRule rule{false, force_pow_2, epsilon, bits_as<float>(kLargestFinite)};
    const float scale = scale_of<float, int32_t>(amax, fp8_max, rule);
    return Scale{scale, divide(1.0f, scale)};
}

// `maximum` is the format's, already reduced by the margin. Where an amax gives no scale, the
// previous scale stays.
OTTAVA_HD float scale_from_history(float amax, float maximum, float previous) {
    const int32_t pattern = bits_as<int32_t>(amax);
    if (pattern <= 0 || pattern >= kInfinity) return previous;
    const float scale = divide(maximum, amax);
    return (bits_as<int32_t>(scale) & kMagnitude) == kInfinity ? bits_as<float>(kLargestFinite)
                                                               : scale;
}

}  // namespace ottava
