// Every kernel of every instruction set that this machine has, against the scalar arithmetic of numerics.h, and that
// arithmetic against an oracle written here from the definition of the formats.
//
// All buffers are exactly as large as the kernels may use and end where the allocation ends, so that under the
// address sanitizer one byte too far is a failure. Exits with 1 after printing what differed.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "checking.h"
#include "test_grid.h"

namespace {

uint8_t scalar_cast(float x, float scale, Fp8 format) {
    return format == Fp8::e4m3 ? quantize_element<E4M3>(x, scale) : quantize_element<E5M2>(x, scale);
}

template <class Format>
uint32_t scalar_decode(uint8_t code, float scale_inv, Dtype dtype) {
    if (dtype == Dtype::float32) return bits_as<uint32_t>(dequantize_element<Format>(code, scale_inv));
    return dtype == Dtype::bfloat16 ? dequantize_bfloat16<Format>(code, scale_inv)
                                    : dequantize_half<Format>(code, scale_inv);
}

// The value of a positive code, from the definition: exponent and mantissa fields of a small format.
double defined_value(int code, int mantissa, int bias) {
    const int exponent = code >> mantissa, fraction = code & ((1 << mantissa) - 1);
    const double unit = std::ldexp(1.0, -mantissa);
    return exponent == 0 ? std::ldexp(fraction * unit, 1 - bias) : std::ldexp(1 + fraction * unit, exponent - bias);
}

// Nearest of the positive data up to `largest`, ties to the even one, by search: no bit tricks.
int defined_code(double magnitude, const std::vector<double>& values) {
    const auto high = static_cast<size_t>(std::lower_bound(values.begin(), values.end(), magnitude) - values.begin());
    if (high == values.size()) return static_cast<int>(high) - 1;
    if (high == 0) return 0;
    const double above = values[high] - magnitude, below = magnitude - values[high - 1];
    if (above != below) return static_cast<int>(above < below ? high : high - 1);
    return static_cast<int>(high % 2 == 0 ? high : high - 1);
}

// numerics.h itself: all bfloat16 and float16 values, all data, and the midpoints with their float32 neighbours.
template <class Format>
void test_numerics(const char* format, int data) {
    std::vector<double> values;
    for (int code = 0; code < data; ++code) {
        values.push_back(defined_value(code, Format::mantissa, Format::bias));
        const float widened = widen<Format, float, int32_t>(code);
        if (widened != values.back()) report(std::string(format) + " value", code, widened, values.back());
    }
    const auto compare = [&](float x) {
        const int got = encode<Format, float, int32_t>(x);
        int expected = 0x7f;
        if (!std::isnan(x))
            expected = defined_code(std::fabs(static_cast<double>(x)), values) | (std::signbit(x) ? 0x80 : 0);
        if (got != expected) report(std::string(format) + " code", bits_as<int32_t>(x), got, expected);
    };
    for (uint32_t pattern = 0; pattern < 65536; ++pattern) {
        compare(widen_bfloat16(static_cast<uint16_t>(pattern)));
        compare(widen_half(static_cast<uint16_t>(pattern)));
    }
    for (size_t i = 0; i + 1 < values.size(); ++i)
        for (const double exact : {values[i], (values[i] + values[i + 1]) / 2}) {
            const auto x = static_cast<float>(exact);
            for (const float y : {x, std::nextafter(x, 1e30f), std::nextafter(x, 0.0f)}) {
                compare(y);
                compare(-y);
            }
        }
}

void test_scales() {
    const float inf = std::numeric_limits<float>::infinity(), largest = std::numeric_limits<float>::max();
    struct Case {
        float amax, epsilon;
        bool pow2;
        float scale;
    };
    const Case cases[] = {
        {0.0f, 0.0f, false, 1.0f},      {inf, 0.0f, false, 1.0f},         {std::nanf(""), 0.0f, false, 1.0f},
        {3.0f, 0.0f, false, 448 / 3.0f}, {3.0f, 0.0f, true, 128.0f},       {0.5f, 2.0f, false, 224.0f},
        {0.0f, 2.0f, false, 224.0f},    {1e-45f, 0.0f, false, largest},   {1e-45f, 0.0f, true, std::ldexp(1.0f, 127)},
    };
    for (const Case& c : cases) {
        const Scale got = scale_from_amax(c.amax, 448.0f, c.epsilon, c.pow2);
        if (got.scale != c.scale) report("scale of amax", bits_as<int32_t>(c.amax), got.scale, c.scale);
        if (got.scale_inv != 1.0f / c.scale) report("scale_inv", bits_as<int32_t>(c.amax), got.scale_inv, 1 / c.scale);
    }
}

// Every 16-bit pattern, or a large sample of float32 ones, through cast, under scales ordinary and not.
void test_cast(Dtype dtype, Fp8 format) {
    const bool wide = dtype == Dtype::float32;
    Elements src(dtype, wide ? 1 << 18 : 65536, wide ? 0 : 2);
    std::mt19937 random(7);
    for (int64_t i = 0; i < src.count; ++i) {
        // Half of the sample stays within the range of the formats.
        const uint32_t any = static_cast<uint32_t>(random());
        src.set(i, !wide ? static_cast<uint32_t>(i) : i % 2 == 0 ? any : (any & 0x8fffffffu) | 0x38000000u);
    }
    const float scales[] = {1.0f, 0.37f, 448.0f, 1e-6f, 1e30f, -2.0f, 0.0f, std::nanf(""), INFINITY};
    Buffer<uint8_t> out(src.count);
    const std::string label = name("cast", dtype, format);
    for (const float scale : scales) {
        cast(src.raw.address(), dtype, 1, src.count, &scale, nullptr, nullptr, nullptr, out.data(), nullptr, format, 2);
        for (int64_t i = 0; i < src.count; ++i)
            check(label, i, out.get(i), scalar_cast(src.get(i), scale, format));
    }
}

void fill(Elements& src, std::mt19937& random) {
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < src.count; ++i) {
        const float x = normal(random) * 5;
        src.set(i, src.dtype == Dtype::float32    ? bits_as<uint32_t>(x)
                   : src.dtype == Dtype::bfloat16 ? to_bfloat16(x)
                                                  : to_half(x));
    }
    if (src.count > 2) src.set(src.count / 2, src.dtype == Dtype::float16 ? 0xfe00 : 0xffffffffu);  // a NaN
}

// amax, quantize, cast and transpose of a matrix that starts anywhere.
void test_shape(Dtype dtype, Fp8 format, int64_t rows, int64_t cols, size_t offset) {
    std::mt19937 random(static_cast<unsigned>(rows * 31 + cols));
    const int64_t n = rows * cols;
    Elements src(dtype, n, offset);
    fill(src, random);
    float expected_amax = 0;
    for (int64_t i = 0; i < n; ++i)
        if (std::fabs(src.get(i)) > expected_amax) expected_amax = std::fabs(src.get(i));
    const float fp8_max = format == Fp8::e4m3 ? 448.0f : 57344.0f;
    const Scale expected = scale_from_amax(expected_amax, fp8_max, 0.0f, false);
    const std::string label = name("quantize", dtype, format) + " " + std::to_string(rows) + "x" +
                              std::to_string(cols) + "+" + std::to_string(offset);
    const std::string parts[] = {label + " out", label + " out only", label + " out_t", label + " out_t only",
                                 label + " transpose"};
    for (const int threads : {1, 3}) {
        float seen = -1, scale = -1, scale_inv = -1;
        Buffer<uint8_t> out(n, offset), out_t(n, offset), again(n), only_t(n), only(n);
        quantize(src.raw.address(), dtype, rows, cols, 0.0f, false, &seen, &scale, &scale_inv, out.data(), out_t.data(),
                 format, threads);
        check(label + " amax", 0, bits_as<uint32_t>(seen), bits_as<uint32_t>(expected_amax));
        check(label + " scale", 0, bits_as<uint32_t>(scale), bits_as<uint32_t>(expected.scale));
        check(label + " scale_inv", 0, bits_as<uint32_t>(scale_inv), bits_as<uint32_t>(expected.scale_inv));
        quantize(src.raw.address(), dtype, rows, cols, 0.0f, false, nullptr, nullptr, &scale_inv, only.data(), nullptr,
                 format, threads);
        cast(src.raw.address(), dtype, rows, cols, &expected.scale, nullptr, nullptr, nullptr, nullptr, only_t.data(),
             format, threads);
        transpose(out.data(), rows, cols, again.data(), threads);
        for (int64_t row = 0; row < rows; ++row)
            for (int64_t col = 0; col < cols; ++col) {
                const int64_t i = row * cols + col, j = col * rows + row;
                const uint8_t code = scalar_cast(src.get(i), expected.scale, format);
                check(parts[0], i, out.get(i), code);
                check(parts[1], i, only.get(i), code);
                check(parts[2], j, out_t.get(j), code);
                check(parts[3], j, only_t.get(j), code);
                check(parts[4], j, again.get(j), code);
            }
    }
}

// The cast that records: data, transpose, amax and the count of what is beyond the format, from one call.
void test_recording(Dtype dtype, Fp8 format, int64_t rows, int64_t cols, size_t offset) {
    std::mt19937 random(static_cast<unsigned>(rows * 31 + cols));
    const int64_t n = rows * cols;
    Elements src(dtype, n, offset);
    fill(src, random);
    const float fp8_max = format == Fp8::e4m3 ? 448.0f : 57344.0f;
    const std::string label = name("cast_amax", dtype, format) + " " + std::to_string(rows) + "x" +
                              std::to_string(cols) + "+" + std::to_string(offset);
    const std::string only_label = label + " out only", transposed_label = label + " out_t";
    for (const float scale : {1.0f, fp8_max / 7, -3.0f * fp8_max, 0.0f, INFINITY, std::nanf("")})
        for (const int threads : {1, 3}) {
            float amax = 0.25f, expected_amax = 0.25f, scale_inv = -1;
            int64_t saturated = 5, expected_saturated = 5;
            Buffer<uint8_t> out(n, offset), only(n, offset), out_t(n, offset);
            cast(src.raw.address(), dtype, rows, cols, &scale, &amax, &saturated, &scale_inv, out.data(),
                      out_t.data(), format, threads);
            float again = 0;
            cast(src.raw.address(), dtype, rows, cols, &scale, &again, nullptr, &scale_inv, only.data(), nullptr,
                      format, threads);
            for (int64_t row = 0; row < rows; ++row)
                for (int64_t col = 0; col < cols; ++col) {
                    const int64_t i = row * cols + col;
                    const float x = src.get(i);
                    const uint8_t code = scalar_cast(x, scale, format);
                    check(label, i, out.get(i), code);
                    check(only_label, i, only.get(i), code);
                    check(transposed_label, i, out_t.get(col * rows + row), code);
                    if (std::fabs(x) > expected_amax) expected_amax = std::fabs(x);
                    if (std::fabs(x * scale) > fp8_max) ++expected_saturated;
                }
            check(label + " amax", 0, bits_as<uint32_t>(amax), bits_as<uint32_t>(expected_amax));
            check(label + " amax again", 0, again <= amax, 1);
            check(label + " saturated", 0, saturated, expected_saturated);
            const float inverse = 1.0f / scale;
            if (!std::isnan(inverse))
                check(label + " scale_inv", 0, bits_as<uint32_t>(scale_inv), bits_as<uint32_t>(inverse));
        }
}

// Two tensors of different numbers of slots, with and without amaxes from elsewhere.
void test_update() {
    const float maxima[] = {448.0f, 448.0f, 57344.0f, 448.0f};
    for (const bool most_recent : {false, true})
        for (const bool elsewhere : {false, true}) {
            float scale[] = {1.0f, 9.0f, 1.0f}, other_scale[] = {1.0f};
            float history[] = {2.0f, 0.0f, INFINITY, 8.0f, 5.0f, 1.0f, 1.0f, 6.0f, 3.0f};
            float other_history[] = {1e-45f, 0.0f, 0.0f};
            const float last[] = {2.0f, 0.0f, INFINITY, 1e-45f};
            if (elsewhere) history[0] = other_history[0] = 77.0f;
            const HistorySlots tensors[] = {{scale, history, 3}, {other_scale, other_history, 1}};
            update_scales(tensors, 2, 3, maxima, most_recent, elsewhere ? last : nullptr);
            const float expected_scale[] = {448.0f / (most_recent ? 2.0f : 8.0f), 9.0f, 1.0f};
            const float expected_history[] = {0.0f, 0.0f, 0.0f, 1.0f, 5.0f, 3.0f, 2.0f, 6.0f, INFINITY};
            for (int i = 0; i < 3; ++i) check("update scale", i, bits_as<uint32_t>(scale[i]), bits_as<uint32_t>(expected_scale[i]));
            for (int i = 0; i < 9; ++i)
                check("update history", i, bits_as<uint32_t>(history[i]), bits_as<uint32_t>(expected_history[i]));
            check("update largest scale", 0, bits_as<uint32_t>(other_scale[0]), bits_as<uint32_t>(std::numeric_limits<float>::max()));
        }
}

void test_decode(Dtype dtype, Fp8 format) {
    const std::string label = name("decode", dtype, format);
    for (const int64_t n : {int64_t{0}, int64_t{1}, int64_t{15}, int64_t{33}, int64_t{256}, int64_t{70001}})
        for (const size_t offset : {size_t{0}, size_t{3}, size_t{4}})
            for (const float scale : {1.0f, 0.123f, 1e38f, 1e-38f, INFINITY, std::nanf(""), -3.0f}) {
                Buffer<uint8_t> src(n, offset);
                for (int64_t i = 0; i < n; ++i) src.set(i, static_cast<uint8_t>(i));
                Elements out(dtype, n, offset);
                decode(src.data(), format, n, &scale, out.raw.address(), dtype, 2);
                for (int64_t i = 0; i < n; ++i) {
                    const auto code = static_cast<uint8_t>(i);
                    check(label, i, out.pattern(i),
                          format == Fp8::e4m3 ? scalar_decode<E4M3>(code, scale, dtype)
                                              : scalar_decode<E5M2>(code, scale, dtype));
                }
            }
}

void test_amax(Dtype dtype) {
    const uint32_t infinity = dtype == Dtype::float32 ? 0x7f800000 : dtype == Dtype::bfloat16 ? 0x7f80 : 0x7c00;
    std::mt19937 random(11);
    for (int64_t n = 0; n < 300; ++n) {
        Elements src(dtype, n, static_cast<size_t>(n % 5));
        uint32_t best = 0;
        const uint32_t mask = dtype == Dtype::float32 ? 0x7fffffff : 0x7fff;
        for (int64_t i = 0; i < n; ++i) {
            const auto pattern = static_cast<uint32_t>(random());
            src.set(i, pattern);
            if ((pattern & mask) <= infinity && (pattern & mask) > best) best = pattern & mask;
        }
        float got = -1;
        amax(src.raw.address(), dtype, n, &got, 2);
        Elements expected(dtype, 1);
        expected.set(0, best);
        check(name("amax", dtype, Fp8::e4m3), n, bits_as<uint32_t>(got), bits_as<uint32_t>(expected.get(0)));
    }
}

// MX blocks, from the rules: frexp and ldexp on doubles, which hold every value exactly.

const std::vector<double>& mx_elements(Fp8 format) {
    static const auto of = [](int data, int mantissa, int bias) {
        std::vector<double> values;
        for (int code = 0; code < data; ++code) values.push_back(defined_value(code, mantissa, bias));
        return values;
    };
    static const std::vector<double> e4m3 = of(0x7f, 3, 7), e5m2 = of(0x7c, 2, 15);
    return format == Fp8::e4m3 ? e4m3 : e5m2;
}

// The E8M0 code of a block: a rounded product with its exponent rounded up, or OCP's difference of exponents.
int mx_defined_scale(float amax, Fp8 format, bool floor) {
    if (std::isnan(amax)) return 255;
    if (std::isinf(amax)) return 254;
    if (amax == 0) return 0;
    int exponent;
    if (floor) {
        std::frexp(static_cast<double>(amax), &exponent);  // amax = [1/2, 1) * 2^exponent
        return std::clamp(exponent - 1 - (format == Fp8::e4m3 ? 8 : 15), -127, 127) + 127;
    }
    const auto inverse = static_cast<float>(1.0 / mx_elements(format).back());
    const auto product = static_cast<float>(static_cast<double>(amax) * inverse);
    if (product == 0) return 0;
    const double fraction = std::frexp(static_cast<double>(product), &exponent);
    return std::clamp((fraction == 0.5 ? exponent - 1 : exponent) + 127, 0, 254);
}

uint8_t mx_defined_code(float x, int scale, Fp8 format) {
    if (std::isnan(x)) return 0x7f;
    const auto product = static_cast<float>(std::ldexp(static_cast<double>(x), 127 - scale));
    const int code = defined_code(std::fabs(static_cast<double>(product)), mx_elements(format));
    return static_cast<uint8_t>(code | (std::signbit(x) ? 0x80 : 0));
}

struct MxResult {
    std::vector<uint8_t> row_data, row_scales, column_data, column_scales;
};

MxResult mx_defined(const Elements& src, int64_t rows, int64_t cols, Fp8 format, bool square, bool floor) {
    const int64_t across = (cols + 31) / 32, down = (rows + 31) / 32;
    std::vector<float> row_amax(rows * across), column_amax(down * cols), square_amax(down * across);
    for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = 0; j < cols; ++j) {
            const float magnitude = std::fabs(src.get(i * cols + j));
            for (float* amax : {&row_amax[i * across + j / 32], &column_amax[i / 32 * cols + j],
                                &square_amax[i / 32 * across + j / 32]})
                if (magnitude > *amax) *amax = magnitude;  // false for a NaN
        }
    MxResult result;
    for (int64_t i = 0; i < rows; ++i)
        for (int64_t k = 0; k < across; ++k)
            result.row_scales.push_back(static_cast<uint8_t>(mx_defined_scale(
                square ? square_amax[i / 32 * across + k] : row_amax[i * across + k], format, floor)));
    for (int64_t k = 0; k < down; ++k)
        for (int64_t j = 0; j < cols; ++j)
            result.column_scales.push_back(static_cast<uint8_t>(mx_defined_scale(
                square ? square_amax[k * across + j / 32] : column_amax[k * cols + j], format, floor)));
    for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = 0; j < cols; ++j) {
            const float x = src.get(i * cols + j);
            result.row_data.push_back(mx_defined_code(x, result.row_scales[i * across + j / 32], format));
            result.column_data.push_back(mx_defined_code(x, result.column_scales[i / 32 * cols + j], format));
        }
    return result;
}

// Squares of very different magnitudes; one in four has zeros, NaN, infinities, subnormals and the largest values.
void fill_blocks(Elements& src, int64_t rows, int64_t cols, std::mt19937& random) {
    std::normal_distribution<float> normal;
    const bool half = src.dtype == Dtype::float16;
    const uint32_t infinity = half ? 0x7c00 : 0x7f80;
    const uint32_t special[] = {0x0000, 0x8000, infinity, infinity | 0x8000, infinity | 0x40,
                                0xffff, 0x0001, 0x8001,   0x0040,            infinity - 1};
    struct Square {
        int exponent;
        bool special;
    };
    std::vector<Square> squares(static_cast<size_t>(((rows + 31) / 32) * ((cols + 31) / 32)));
    for (Square& square : squares) {
        const auto any = static_cast<uint32_t>(random());
        square.exponent = half ? static_cast<int>(any % 28) - 18 : static_cast<int>(any % 250) - 135;
        square.special = any >> 30 == 0;
    }
    for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = 0; j < cols; ++j) {
            const Square& square = squares[static_cast<size_t>(i / 32 * ((cols + 31) / 32) + j / 32)];
            const auto any = static_cast<uint32_t>(random());
            const float x = std::ldexp(normal(random), square.exponent + static_cast<int>(any % 7));
            uint32_t pattern = src.dtype == Dtype::float32    ? bits_as<uint32_t>(x)
                               : src.dtype == Dtype::bfloat16 ? to_bfloat16(x)
                                                              : to_half(x);
            if (square.special && any >> 28 == 0) {
                pattern = special[(any >> 8) % 10];
                if (src.dtype == Dtype::float32) pattern = pattern << 16 | (pattern & 1);
            }
            src.set(i * cols + j, pattern);
        }
}

// Every choice of directions into buffers that end with their last byte, each at an offset of its own.
void test_mx_quantize(Dtype dtype, Fp8 format, int64_t rows, int64_t cols, size_t offset, bool square, bool floor) {
    const int64_t n = rows * cols, row_scales = rows * ((cols + 31) / 32), column_scales = ((rows + 31) / 32) * cols;
    const std::string shape = std::to_string(rows) + "x" + std::to_string(cols);
    const std::string label =
        name("mx_quantize", dtype, format) + " " + shape + (square ? " square" : "") + (floor ? " floor" : "");
    Elements src(dtype, n, offset);
    std::mt19937 random(static_cast<unsigned>(rows * 131 + cols));
    fill_blocks(src, rows, cols, random);
    // The same for all instruction sets.
    static std::map<std::string, MxResult> known;
    const std::string key = label.substr(label.find(' '));
    if (known.find(key) == known.end()) known[key] = mx_defined(src, rows, cols, format, square, floor);
    const MxResult& expected = known[key];
    const auto compare = [&](const char* part, const Buffer<uint8_t>& got, const std::vector<uint8_t>& values) {
        if (got.size() != values.size()) report(label + part + " size", 0, 0, 1);
        if (values.empty() || std::memcmp(got.address(), values.data(), values.size()) == 0) return;
        for (size_t i = 0; i < values.size(); ++i)
            check(label + part, static_cast<long long>(i), got.get(i), values[i]);
    };
    for (const int threads : {1, 3})
        for (const int directions : {1, 2, 3}) {
            const bool by_row = directions & 1, by_column = directions & 2;
            Buffer<uint8_t> row_data(n, offset), row_blocks(row_scales, 3 * offset), column_data(n, 5 * offset),
                column_blocks(column_scales, 7 * offset);
            mx_quantize(src.raw.address(), dtype, rows, cols, format, square, floor,
                        by_row ? row_data.data() : nullptr, by_row ? row_blocks.data() : nullptr,
                        by_column ? column_data.data() : nullptr, by_column ? column_blocks.data() : nullptr, threads);
            if (by_row) compare(" row data", row_data, expected.row_data);
            if (by_row) compare(" row scales", row_blocks, expected.row_scales);
            if (by_column) compare(" column data", column_data, expected.column_data);
            if (by_column) compare(" column scales", column_blocks, expected.column_scales);
        }
}

// Explicit mantissa bits, smallest and largest exponent of what blocks are decoded to.
struct Wide {
    int mantissa, lowest, highest;
};
const Wide kWide[] = {{23, -126, 127}, {7, -126, 127}, {10, -14, 15}};

// The pattern of the nearest value, to even on a tie; infinity beyond the largest.
uint32_t wide_pattern(double magnitude, const Wide& wide) {
    const auto infinity = static_cast<uint32_t>(wide.highest - wide.lowest + 2) << wide.mantissa;
    if (std::isinf(magnitude)) return infinity;
    if (magnitude == 0) return 0;
    int exponent;
    std::frexp(magnitude, &exponent);
    exponent = std::max(exponent - 1, wide.lowest);
    const double steps = std::nearbyint(std::ldexp(magnitude, wide.mantissa - exponent));
    if (exponent > wide.highest) return infinity;
    return std::min((static_cast<uint32_t>(exponent - wide.lowest) << wide.mantissa) + static_cast<uint32_t>(steps),
                    infinity);
}

struct MxDecoded {
    bool nan;
    uint32_t pattern;
};

MxDecoded mx_defined_decode(uint8_t code, uint8_t scale, Fp8 format, Dtype dtype) {
    const std::vector<double>& elements = mx_elements(format);
    const Wide& wide = kWide[static_cast<int>(dtype)];
    const auto magnitude = static_cast<size_t>(code & 0x7f);
    const bool infinite = format == Fp8::e5m2 && magnitude == 0x7c, finite = magnitude < elements.size();
    if (scale == 255 || (!finite && !infinite)) return {true, 0};
    const double exact = std::ldexp(infinite ? HUGE_VAL : elements[magnitude], scale - 127);
    const uint32_t pattern = wide_pattern(exact, wide), sign = dtype == Dtype::float32 ? 1u << 31 : 1u << 15;
    return {false, code & 0x80 ? pattern | sign : pattern};
}

void test_mx_decode(Dtype dtype, Fp8 format, int64_t rows, int64_t cols, size_t offset) {
    static std::map<int, std::vector<MxDecoded>> known;  // by format and dtype
    std::vector<MxDecoded>& table = known[static_cast<int>(format) * 8 + static_cast<int>(dtype)];
    if (table.empty())
        for (int scale = 0; scale < 256; ++scale)
            for (int code = 0; code < 256; ++code)
                table.push_back(
                    mx_defined_decode(static_cast<uint8_t>(code), static_cast<uint8_t>(scale), format, dtype));
    const int64_t n = rows * cols, across = (cols + 31) / 32;
    const std::string label =
        name("mx_decode", dtype, format) + " " + std::to_string(rows) + "x" + std::to_string(cols);
    const Wide& wide = kWide[static_cast<int>(dtype)];
    const auto infinity = static_cast<uint32_t>(wide.highest - wide.lowest + 2) << wide.mantissa;
    for (const bool columnwise : {false, true})
        for (const bool any_scale : {false, true})
            for (const int threads : {1, 3}) {
                std::mt19937 random(static_cast<unsigned>(rows * 7 + cols));
                Buffer<uint8_t> data(n, offset);
                Buffer<uint8_t> scales(columnwise ? ((rows + 31) / 32) * cols : rows * across, 3 * offset);
                for (size_t i = 0; i < data.size(); ++i) data.set(i, static_cast<uint8_t>(random()));
                for (size_t i = 0; i < scales.size(); ++i)
                    scales.set(i, static_cast<uint8_t>(any_scale ? random() : 110 + random() % 40));
                Elements out(dtype, n, 5 * offset);
                mx_decode(data.data(), scales.data(), format, rows, cols, columnwise, out.raw.address(), dtype,
                          threads);
                for (int64_t i = 0; i < n; ++i) {
                    const int64_t row = i / cols, col = i % cols;
                    const uint8_t scale = scales.get(columnwise ? row / 32 * cols + col : row * across + col / 32);
                    const MxDecoded& expected = table[scale * 256u + data.get(i)];
                    const uint32_t got = out.pattern(i), magnitude = got & (infinity | (infinity - 1));
                    if (expected.nan)
                        check(label + " NaN", i, magnitude > infinity, 1);
                    else if (got != expected.pattern)
                        check(label, i, got, expected.pattern);
                }
            }
}

void test_mx_scales(Fp8 format) {
    std::vector<uint32_t> patterns;
    std::mt19937 random(5);
    for (uint32_t exponent = 0; exponent < 256; ++exponent)
        for (const uint32_t mantissa : {0u, 1u, 2u, 0x3fffffu, 0x400000u, 0x400001u, 0x600000u, 0x7ffffeu, 0x7fffffu})
            patterns.push_back(exponent << 23 | mantissa);
    for (int exponent = -149; exponent < 128; ++exponent)
        for (const double fraction : {1.0, 1.75, 2 / 1.75}) {  // a maximum is 1.75 times a power of two
            const uint32_t pattern = bits_as<uint32_t>(static_cast<float>(std::ldexp(fraction, exponent)));
            for (uint32_t step = 0; step < 7; ++step) patterns.push_back(pattern + step - std::min(pattern, 3u));
        }
    for (int i = 0; i < 20000; ++i) {
        patterns.push_back(static_cast<uint32_t>(random()) >> 1);
        patterns.push_back(static_cast<uint32_t>(random()) % (24u << 23));  // whose products may be subnormal
    }
    const std::string label = std::string(active_kernels().name) + " mx_scales_from_amax " +
                              kFormatNames[static_cast<int>(format)];
    for (const bool floor : {false, true}) {
        const auto compare = [&](size_t begin, size_t count, size_t offset) {
            Buffer<float> amax(static_cast<int64_t>(count), 4 * offset);
            Buffer<uint8_t> data(static_cast<int64_t>(count), offset);
            for (size_t i = 0; i < count; ++i) amax.set(i, bits_as<float>(patterns[begin + i]));
            mx_scales_from_amax(amax.data(), static_cast<int64_t>(count), format, floor, exponents.data(), 2);
            for (size_t i = 0; i < count; ++i)
                check(label + (floor ? " floor" : " up"), patterns[begin + i], data.get(i),
                      static_cast<uint64_t>(mx_defined_scale(amax.get(i), format, floor)));
        };
        compare(0, patterns.size(), 0);
        for (size_t count = 0; count < 70; ++count) compare(count * 31, count, count % 4);
    }
}

void test_mx() {
    const int64_t shapes[][2] = {{0, 0},   {0, 5},    {3, 0},    {1, 1},    {1, 31},  {31, 1},  {1, 97},   {97, 1},
                                 {2, 15},  {15, 17},  {16, 33},  {31, 32},  {32, 31}, {32, 32}, {33, 33},  {33, 64},
                                 {64, 47}, {65, 129}, {3, 1023}, {5, 1024}, {2, 1025}, {34, 1057}, {1, 2050},
                                 {300, 7}};
    for (const Fp8 format : kFormats) {
        test_mx_scales(format);
        for (const Dtype dtype : kDtypes) {
            for (const auto& shape : shapes)
                for (const size_t offset : {size_t{0}, size_t{1}}) {
                    test_mx_decode(dtype, format, shape[0], shape[1], offset);
                    for (const bool square : {false, true})
                        for (const bool floor : {false, true})
                            test_mx_quantize(dtype, format, shape[0], shape[1], offset, square, floor);
                }
            test_mx_decode(dtype, format, 256, 2048, 0);
        }
    }
    // Large enough for the streaming stores, aligned and not.
    test_mx_quantize(Dtype::bfloat16, Fp8::e4m3, 64, 65536, 0, false, false);
    test_mx_quantize(Dtype::bfloat16, Fp8::e5m2, 2049, 2111, 1, true, false);
    test_mx_decode(Dtype::bfloat16, Fp8::e4m3, 64, 65536, 0);
    test_mx_decode(Dtype::float32, Fp8::e5m2, 1025, 2111, 1);
}

// Many tensors in one call. Each has elements at hand that begin anywhere, and results that begin anywhere else.

// What an element counts as: the nearest value of `nominal`, from the definition.
float defined_rounding(float x, Dtype nominal) {
    if (std::isnan(x)) return x;
    const uint32_t pattern = wide_pattern(std::fabs(static_cast<double>(x)), kWide[static_cast<int>(nominal)]);
    const auto narrow = static_cast<uint16_t>(pattern);
    const float magnitude = nominal == Dtype::float32    ? bits_as<float>(pattern)
                            : nominal == Dtype::bfloat16 ? widen_bfloat16(narrow)
                                                         : widen_half(narrow);
    return std::copysign(magnitude, x);
}

// Values of all magnitudes, NaN and infinities, and neighbours of the midpoints of 16-bit dtypes.
void fill_hard(Elements& src, std::mt19937& random) {
    for (int64_t i = 0; i < src.count; ++i) {
        const auto any = static_cast<uint32_t>(random());
        const uint32_t step = static_cast<uint32_t>(random()) % 3 - 1, choice = static_cast<uint32_t>(random()) % 8;
        src.set(i, choice < 2 ? any : choice < 4 ? (any & 0xffff8000u) + step : (any & 0x8fffe000u) + 0x36001000u + step);
    }
}

struct Shard {
    int64_t rows, cols, start, count;
    bool square;
};

// Shards of plain tensors are matrices of one row.
const Shard kShards[] = {
    {0, 0, 0, 0, false},        {1, 1, 0, 1, false},         {1, 1, 1, 0, true},        {3, 5, 4, 7, false},
    {3, 5, 4, 7, true},         {33, 31, 0, 1023, false},    {33, 33, 40, 900, true},   {64, 64, 64, 64, false},
    {70, 97, 500, 1, false},    {70, 97, 96, 3000, false},   {70, 97, 3100, 3690, true}, {5, 1024, 1000, 2100, false},
    {40, 1100, 1, 43998, false}, {40, 1100, 1099, 2, true},   {2, 3000, 2047, 2, false}, {1, 5000, 1030, 3000, false},
    {4000, 1, 17, 3001, false}, {200, 600, 33333, 66667, true}};

struct MultiTest {
    std::vector<Elements> sources;
    std::vector<Shard> shards;
    std::vector<std::vector<float>> values;
    Dtype dtype, nominal;

    MultiTest(Dtype dtype, Dtype nominal) : dtype(dtype), nominal(nominal) {
        std::mt19937 random(17);
        for (const Shard& shard : kShards) {
            shards.push_back(shard);
            sources.emplace_back(dtype, shard.count, sources.size() % 5);
            fill_hard(sources.back(), random);
            values.emplace_back();
            for (int64_t i = 0; i < shard.count; ++i)
                values.back().push_back(defined_rounding(sources.back().get(i), nominal));
        }
    }
    MultiSource source(size_t i) const { return {sources[i].raw.address(), dtype, nominal, shards[i].count}; }
    std::string label(const char* operation, Fp8 format) const {
        return name(operation, dtype, format) + " as " + kDtypeNames[static_cast<int>(nominal)];
    }
    std::vector<Buffer<uint8_t>> results(size_t first) const {
        std::vector<Buffer<uint8_t>> buffers;
        for (size_t i = 0; i < shards.size(); ++i) buffers.emplace_back(shards[i].count, (first + i) % 67);
        return buffers;
    }
};

void test_multi(const MultiTest& test, Fp8 format) {
    const auto count = static_cast<int64_t>(test.shards.size());
    const std::string cast_label = test.label("multi_cast", format), amax_label = test.label("multi_amax", format);
    for (const int threads : {1, 3}) {
        std::vector<MultiSource> sources;
        std::vector<MultiCastJob> casts;
        std::vector<Buffer<uint8_t>> outs = test.results(1);
        Buffer<float> amaxes(count), scales(count);
        for (size_t i = 0; i < outs.size(); ++i) {
            sources.push_back(test.source(i));
            casts.push_back({test.source(i), format, outs[i].data()});
            scales.set(i, i == 9 ? -2.0f : i == 11 ? 0.0f : i == 12 ? std::nanf("") : std::ldexp(0.7f, static_cast<int>(i)));
        }
        multi_amax(sources.data(), count, amaxes.data(), threads);
        multi_cast(casts.data(), count, scales.data(), threads);
        for (size_t i = 0; i < outs.size(); ++i) {
            float expected = 0;
            for (size_t j = 0; j < test.values[i].size(); ++j) {
                const float x = test.values[i][j];
                if (std::fabs(x) > expected) expected = std::fabs(x);
                check(cast_label, static_cast<long long>(i * 1000000 + j), outs[i].get(j),
                      scalar_cast(x, scales.get(i), format));
            }
            check(amax_label, static_cast<long long>(i), bits_as<uint32_t>(amaxes.get(i)), bits_as<uint32_t>(expected));
        }
    }
}

void test_mx_multi_amax(const MultiTest& test) {
    std::vector<MxMultiAmax> jobs;
    std::vector<float> expected;
    for (size_t i = 0; i < test.shards.size(); ++i) {
        const Shard& s = test.shards[i];
        jobs.push_back({test.source(i), s.rows, s.cols, s.start, s.square});
        const int64_t across = (s.cols + 31) / 32, down = (s.rows + 31) / 32;
        std::vector<float> by_row(s.rows * across), by_column(down * s.cols), squares(down * across);
        for (int64_t k = 0; k < s.count; ++k) {
            const int64_t row = (s.start + k) / s.cols, col = (s.start + k) % s.cols;
            const float x = std::fabs(test.values[i][static_cast<size_t>(k)]);
            for (float* amax : {&by_row[row * across + col / 32], &by_column[row / 32 * s.cols + col],
                                &squares[row / 32 * across + col / 32]})
                if (x > *amax) *amax = x;
        }
        for (const auto* part : {&by_row, &by_column, &squares})
            if ((part == &squares) == s.square) expected.insert(expected.end(), part->begin(), part->end());
    }
    const std::string label = test.label("mx_multi_amax", Fp8::e4m3);
    for (const int threads : {1, 3}) {
        Buffer<float> out(static_cast<int64_t>(expected.size()));
        mx_multi_amax(jobs.data(), static_cast<int64_t>(jobs.size()), out.data(), threads);
        for (size_t i = 0; i < expected.size(); ++i)
            check(label, static_cast<long long>(i), bits_as<uint32_t>(out.get(i)), bits_as<uint32_t>(expected[i]));
    }
}

void test_mx_multi_cast(const MultiTest& test, Fp8 format) {
    std::mt19937 random(23);
    std::vector<Buffer<uint8_t>> row_scales, column_scales;
    for (const Shard& s : test.shards) {
        row_scales.emplace_back(s.rows * ((s.cols + 31) / 32), row_scales.size() % 3);
        column_scales.emplace_back((s.rows + 31) / 32 * s.cols, row_scales.size() % 7);
        for (Buffer<uint8_t>* scales : {&row_scales.back(), &column_scales.back()})
            for (size_t i = 0; i < scales->size(); ++i)
                scales->set(i, static_cast<uint8_t>(random() % 3 == 0 ? random() : 100 + random() % 40));
    }
    const std::string row_label = test.label("mx_multi_cast rows", format);
    const std::string column_label = test.label("mx_multi_cast columns", format);
    std::vector<std::vector<uint8_t>> by_row, by_column;
    for (size_t i = 0; i < test.shards.size(); ++i) {
        const Shard& s = test.shards[i];
        by_row.emplace_back();
        by_column.emplace_back();
        for (size_t k = 0; k < test.values[i].size(); ++k) {
            const int64_t at = s.start + static_cast<int64_t>(k), row = at / s.cols, col = at % s.cols;
            const auto code = [&](int scale) {
                return scale == 255 ? uint8_t{0x7f} : mx_defined_code(test.values[i][k], scale, format);
            };
            by_row.back().push_back(code(row_scales[i].get(row * ((s.cols + 31) / 32) + col / 32)));
            by_column.back().push_back(code(column_scales[i].get(row / 32 * s.cols + col)));
        }
    }
    for (const int threads : {1, 3})
        for (const size_t turn : {0, 1, 2}) {  // a third has no rows, another no columns
            std::vector<Buffer<uint8_t>> row_data = test.results(1), column_data = test.results(30);
            std::vector<MxMultiCast> jobs;
            for (size_t i = 0; i < test.shards.size(); ++i) {
                const Shard& s = test.shards[i];
                jobs.push_back({test.source(i), s.rows, s.cols, s.start, format, row_scales[i].data(),
                                (i + turn) % 3 == 0 ? nullptr : row_data[i].data(), column_scales[i].data(),
                                (i + turn) % 3 == 1 ? nullptr : column_data[i].data()});
            }
            mx_multi_cast(jobs.data(), static_cast<int64_t>(jobs.size()), threads);
            for (size_t i = 0; i < jobs.size(); ++i)
                for (size_t k = 0; k < by_row[i].size(); ++k) {
                    const auto where = static_cast<long long>(i * 1000000 + k);
                    check(row_label, where, row_data[i].get(k), jobs[i].row_data == nullptr ? 0 : by_row[i][k]);
                    check(column_label, where, column_data[i].get(k),
                          jobs[i].column_data == nullptr ? 0 : by_column[i][k]);
                }
        }
}

// Results beyond the caches, in both directions together, of a matrix of which a part is at hand.
void test_mx_multi_cast_streaming(size_t offset) {
    const int64_t rows = 1200, cols = 2112, start = offset == 0 ? 0 : 2000, count = rows * cols - start;
    Elements src(Dtype::float32, count, offset);
    std::mt19937 random(3);
    fill_hard(src, random);
    Buffer<uint8_t> row_scales(rows * 66, 1), column_scales(38 * cols, 1), out(count, offset), out_t(count, offset);
    for (size_t i = 0; i < row_scales.size(); ++i) row_scales.set(i, static_cast<uint8_t>(100 + i % 50));
    for (size_t i = 0; i < column_scales.size(); ++i) column_scales.set(i, static_cast<uint8_t>(100 + i % 47));
    const MxMultiCast job{{src.raw.address(), Dtype::float32, Dtype::bfloat16, count}, rows, cols, start, Fp8::e4m3,
                          row_scales.data(), out.data(), column_scales.data(), out_t.data()};
    mx_multi_cast(&job, 1, 3);
    const std::string label = std::string(active_kernels().name) + " mx_multi_cast streaming";
    for (int64_t i = 0; i < count; ++i) {
        const int64_t row = (start + i) / cols, col = (start + i) % cols;
        const float x = widen_bfloat16(to_bfloat16(src.get(i)));
        const auto multiplier = [](int code) { return e8m0_multiplier<float, int32_t>(code); };
        check(label, i, out.get(i), scalar_cast(x, multiplier(row_scales.get(row * 66 + col / 32)), Fp8::e4m3));
        check(label, i, out_t.get(i), scalar_cast(x, multiplier(column_scales.get(row / 32 * cols + col)), Fp8::e4m3));
    }
}

void test_many() {
    for (const Dtype dtype : kDtypes)
        for (const Dtype nominal : kDtypes) {
            const MultiTest test(dtype, nominal);
            test_mx_multi_amax(test);
            for (const Fp8 format : kFormats) {
                test_multi(test, format);
                test_mx_multi_cast(test, format);
            }
        }
    test_mx_multi_cast_streaming(0);
    test_mx_multi_cast_streaming(1);
}

void test_kernels() {
    for (const Dtype dtype : kDtypes) {
        test_amax(dtype);
        for (const Fp8 format : kFormats) {
            test_cast(dtype, format);
            test_decode(dtype, format);
            const int64_t shapes[][2] = {{0, 0},   {0, 7},    {7, 0},     {1, 1},     {1, 70},     {70, 1},  {3, 5},
                                         {16, 16}, {17, 15},  {63, 65},   {64, 64},   {64, 1024},  {65, 80}, {129, 1030},
                                         {5, 3000}, {3000, 5}, {200, 333}};
            for (const auto& shape : shapes)
                for (const size_t offset : {size_t{0}, size_t{1}}) {
                    test_shape(dtype, format, shape[0], shape[1], offset);
                    test_recording(dtype, format, shape[0], shape[1], offset);
                }
        }
    }
    // Large enough for the streaming stores, aligned and not.
    test_shape(Dtype::bfloat16, Fp8::e4m3, 2048, 2112, 0);
    test_shape(Dtype::bfloat16, Fp8::e5m2, 2049, 2111, 1);
    test_recording(Dtype::bfloat16, Fp8::e4m3, 2048, 2112, 0);
    test_recording(Dtype::bfloat16, Fp8::e5m2, 2049, 2111, 1);
    test_mx();
    test_many();
    test_grids();
}

}  // namespace

int main() {
    test_numerics<E4M3>("e4m3", 0x7f);
    test_numerics<E5M2>("e5m2", 0x7c);
    test_scales();
    test_update();
    test_grid_numerics();
    const Kernels* available[8];
    const int count = available_kernels(available, 8);
    for (int i = 0; i < count; ++i) {
        if (!set_active_kernels(available[i]->name)) report("set_active_kernels", i, 0, 1);
        test_kernels();
        std::printf("%s: done\n", available[i]->name);
    }
    if (set_active_kernels("no such set")) report("set_active_kernels of an unknown name", 0, 1, 0);
    std::printf(failures == 0 ? "all kernels agree\n" : "%ld differences\n", failures);
    return failures == 0 ? 0 : 1;
}
