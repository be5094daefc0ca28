// What the kernels' tests compare with: the formats from their definition, on doubles, which hold
// every value exactly.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "checking.h"

inline uint8_t scalar_cast(float x, float scale, Fp8 format) {
    return format == Fp8::e4m3 ? quantize_element<E4M3>(x, scale)
                               : quantize_element<E5M2>(x, scale);
}

// The value of a positive code, from the definition: exponent and mantissa fields of a small
// format.
inline double defined_value(int code, int mantissa, int bias) {
    const int exponent = code >> mantissa, fraction = code & ((1 << mantissa) - 1);
    const double unit = std::ldexp(1.0, -mantissa);
    return exponent == 0 ? std::ldexp(fraction * unit, 1 - bias)
                         : std::ldexp(1 + fraction * unit, exponent - bias);
}

// Nearest of the positive data up to `largest`, ties to the even one, by search: no bit tricks.
inline int defined_code(double magnitude, const std::vector<double>& values) {
    const auto high = static_cast<size_t>(
        std::lower_bound(values.begin(), values.end(), magnitude) - values.begin());
    if (high == values.size()) return static_cast<int>(high) - 1;
    if (high == 0) return 0;
    const double above = values[high] - magnitude, below = magnitude - values[high - 1];
    if (above != below) return static_cast<int>(above < below ? high : high - 1);
    return static_cast<int>(high % 2 == 0 ? high : high - 1);
}

inline const std::vector<double>& mx_elements(Fp8 format) {
    static const auto of = [](int data, int mantissa, int bias) {
        std::vector<double> values;
        for (int code = 0; code < data; ++code)
            values.push_back(defined_value(code, mantissa, bias));
        return values;
    };
    static const std::vector<double> e4m3 = of(0x7f, 3, 7), e5m2 = of(0x7c, 2, 15);
    return format == Fp8::e4m3 ? e4m3 : e5m2;
}

// The code of an element of an MX block.
inline uint8_t mx_defined_code(float x, int scale, Fp8 format) {
    if (std::isnan(x)) return 0x7f;
    const auto product = static_cast<float>(std::ldexp(static_cast<double>(x), 127 - scale));
    const int code = defined_code(std::fabs(static_cast<double>(product)), mx_elements(format));
    return static_cast<uint8_t>(code | (std::signbit(x) ? 0x80 : 0));
}

// Explicit mantissa bits, smallest and largest exponent of what blocks are decoded to.
struct Wide {
    int mantissa, lowest, highest;
};
constexpr Wide kWide[] = {{23, -126, 127}, {7, -126, 127}, {10, -14, 15}};

// The pattern of the nearest value, to even on a tie; infinity beyond the largest.
inline uint32_t wide_pattern(double magnitude, const Wide& wide) {
    const auto infinity = static_cast<uint32_t>(wide.highest - wide.lowest + 2) << wide.mantissa;
    if (std::isinf(magnitude)) return infinity;
    if (magnitude == 0) return 0;
    int exponent;
    std::frexp(magnitude, &exponent);
    exponent = std::max(exponent - 1, wide.lowest);
    const double steps = std::nearbyint(std::ldexp(magnitude, wide.mantissa - exponent));
    if (exponent > wide.highest) return infinity;
    return std::min((static_cast<uint32_t>(exponent - wide.lowest) << wide.mantissa) +
                        static_cast<uint32_t>(steps),
                    infinity);
}
