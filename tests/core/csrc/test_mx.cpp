// MX blocks, from the rules.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "definitions.h"
#include "subjects.h"

namespace {

// The E8M0 code of a block: a rounded product with its exponent rounded up, or OCP's difference of
// exponents.
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

struct MxResult {
    std::vector<uint8_t> row_data, row_scales, column_data, column_scales;
};

MxResult mx_defined(const Elements& src, int64_t rows, int64_t cols, Fp8 format, bool square,
                    bool floor) {
    const int64_t across = (cols + 31) / 32, down = (rows + 31) / 32;
    std::vector<float> row_amax(rows * across), column_amax(down * cols),
        square_amax(down * across);
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
                square ? square_amax[i / 32 * across + k] : row_amax[i * across + k], format,
                floor)));
    for (int64_t k = 0; k < down; ++k)
        for (int64_t j = 0; j < cols; ++j)
            result.column_scales.push_back(static_cast<uint8_t>(mx_defined_scale(
                square ? square_amax[k * across + j / 32] : column_amax[k * cols + j], format,
                floor)));
    for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = 0; j < cols; ++j) {
            const float x = src.get(i * cols + j);
            result.row_data.push_back(
                mx_defined_code(x, result.row_scales[i * across + j / 32], format));
            result.column_data.push_back(
                mx_defined_code(x, result.column_scales[i / 32 * cols + j], format));
        }
    return result;
}

// Squares of very different magnitudes; one in four has zeros, NaN, infinities, subnormals and the
// largest values.
void fill_blocks(Elements& src, int64_t rows, int64_t cols, std::mt19937& random) {
    std::normal_distribution<float> normal;
    const bool half = src.dtype == Dtype::float16;
    const uint32_t infinity = half ? 0x7c00 : 0x7f80;
    const uint32_t special[] = {0x0000,          0x8000,      infinity, infinity | 0x8000,
                                infinity | 0x40, 0xffff,      0x0001,   0x8001,
                                0x0040,          infinity - 1};
    struct Square {
        int exponent;
        bool special;
    };
    std::vector<Square> squares(static_cast<size_t>(((rows + 31) / 32) * ((cols + 31) / 32)));
    for (Square& square : squares) {
        const auto any = static_cast<uint32_t>(random());
        square.exponent =
            half ? static_cast<int>(any % 28) - 18 : static_cast<int>(any % 250) - 135;
        square.special = any >> 30 == 0;
    }
    for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = 0; j < cols; ++j) {
            const Square& square =
                squares[static_cast<size_t>(i / 32 * ((cols + 31) / 32) + j / 32)];
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

// Every choice of directions into buffers that end with their last byte, each at an offset of its
// own.
void test_mx_quantize(Dtype dtype, Fp8 format, int64_t rows, int64_t cols, size_t offset,
                      bool square, bool floor) {
    const int64_t n = rows * cols, row_scales = rows * ((cols + 31) / 32),
                  column_scales = ((rows + 31) / 32) * cols;
    const std::string shape = std::to_string(rows) + "x" + std::to_string(cols);
    const std::string label = name("mx_quantize", dtype, format) + " " + shape +
                              (square ? " square" : "") + (floor ? " floor" : "");
    Elements src(dtype, n, offset);
    std::mt19937 random(static_cast<unsigned>(rows * 131 + cols));
    fill_blocks(src, rows, cols, random);
    // The same for all instruction sets.
    static std::map<std::string, MxResult> known;
    const std::string key = label.substr(label.find(' '));
    if (known.find(key) == known.end())
        known[key] = mx_defined(src, rows, cols, format, square, floor);
    const MxResult& expected = known[key];
    const auto compare = [&](const char* part, const Buffer<uint8_t>& got,
                             const std::vector<uint8_t>& values) {
        if (got.size() != values.size()) report(label + part + " size", 0, 0, 1);
        if (values.empty() || std::memcmp(got.address(), values.data(), values.size()) == 0) return;
        for (size_t i = 0; i < values.size(); ++i)
            check(label + part, static_cast<long long>(i), got.get(i), values[i]);
    };
    for (const int threads : {1, 3})
        for (const int directions : {1, 2, 3}) {
            const bool by_row = directions & 1, by_column = directions & 2;
            Buffer<uint8_t> row_data(n, offset), row_blocks(row_scales, 3 * offset),
                column_data(n, 5 * offset), column_blocks(column_scales, 7 * offset);
            mx_quantize(src.raw.address(), dtype, rows, cols, format, square, floor,
                        by_row ? row_data.data() : nullptr, by_row ? row_blocks.data() : nullptr,
                        by_column ? column_data.data() : nullptr,
                        by_column ? column_blocks.data() : nullptr, threads);
            if (by_row) compare(" row data", row_data, expected.row_data);
            if (by_row) compare(" row scales", row_blocks, expected.row_scales);
            if (by_column) compare(" column data", column_data, expected.column_data);
            if (by_column) compare(" column scales", column_blocks, expected.column_scales);
        }
}

struct MxDecoded {
    bool nan;
    uint32_t pattern;
};

MxDecoded mx_defined_decode(uint8_t code, uint8_t scale, Fp8 format, Dtype dtype) {
    const std::vector<double>& elements = mx_elements(format);
    const Wide& wide = kWide[static_cast<int>(dtype)];
    const auto magnitude = static_cast<size_t>(code & 0x7f);
    const bool infinite = format == Fp8::e5m2 && magnitude == 0x7c,
               finite = magnitude < elements.size();
    if (scale == 255 || (!finite && !infinite)) return {true, 0};
    const double exact = std::ldexp(infinite ? HUGE_VAL : elements[magnitude], scale - 127);
    const uint32_t pattern = wide_pattern(exact, wide),
                   sign = dtype == Dtype::float32 ? 1u << 31 : 1u << 15;
    return {false, code & 0x80 ? pattern | sign : pattern};
}

void test_mx_decode(Dtype dtype, Fp8 format, int64_t rows, int64_t cols, size_t offset) {
    static std::map<int, std::vector<MxDecoded>> known;  // by format and dtype
    std::vector<MxDecoded>& table = known[static_cast<int>(format) * 8 + static_cast<int>(dtype)];
    if (table.empty())
        for (int scale = 0; scale < 256; ++scale)
            for (int code = 0; code < 256; ++code)
                table.push_back(mx_defined_decode(static_cast<uint8_t>(code),
                                                  static_cast<uint8_t>(scale), format, dtype));
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
                Buffer<uint8_t> scales(columnwise ? ((rows + 31) / 32) * cols : rows * across,
                                       3 * offset);
                for (size_t i = 0; i < data.size(); ++i)
                    data.set(i, static_cast<uint8_t>(random()));
                for (size_t i = 0; i < scales.size(); ++i)
                    scales.set(i, static_cast<uint8_t>(any_scale ? random() : 110 + random() % 40));
                Elements out(dtype, n, 5 * offset);
                mx_decode(data.data(), scales.data(), format, rows, cols, columnwise,
                          out.raw.address(), dtype, threads);
                for (int64_t i = 0; i < n; ++i) {
                    const int64_t row = i / cols, col = i % cols;
                    const uint8_t scale =
                        scales.get(columnwise ? row / 32 * cols + col : row * across + col / 32);
                    const MxDecoded& expected = table[scale * 256u + data.get(i)];
                    const uint32_t got = out.pattern(i),
                                   magnitude = got & (infinity | (infinity - 1));
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
        for (const uint32_t mantissa :
             {0u, 1u, 2u, 0x3fffffu, 0x400000u, 0x400001u, 0x600000u, 0x7ffffeu, 0x7fffffu})
            patterns.push_back(exponent << 23 | mantissa);
    for (int exponent = -149; exponent < 128; ++exponent)
        for (const double fraction :
             {1.0, 1.75, 2 / 1.75}) {  // a maximum is 1.75 times a power of two
            const uint32_t pattern =
                bits_as<uint32_t>(static_cast<float>(std::ldexp(fraction, exponent)));
            for (uint32_t step = 0; step < 7; ++step)
                patterns.push_back(pattern + step - std::min(pattern, 3u));
        }
    for (int i = 0; i < 20000; ++i) {
        patterns.push_back(static_cast<uint32_t>(random()) >> 1);
        patterns.push_back(static_cast<uint32_t>(random()) %
                           (24u << 23));  // whose products may be subnormal
    }
    const std::string label = std::string(active_kernels().name) + " mx_scales_from_amax " +
                              kFormatNames[static_cast<int>(format)];
    for (const bool floor : {false, true}) {
        const auto compare = [&](size_t begin, size_t count, size_t offset) {
            Buffer<float> amax(static_cast<int64_t>(count), 4 * offset);
            Buffer<uint8_t> data(static_cast<int64_t>(count), offset);
            for (size_t i = 0; i < count; ++i) amax.set(i, bits_as<float>(patterns[begin + i]));
            mx_scales_from_amax(amax.data(), static_cast<int64_t>(count), format, floor,
                                data.data(), 2);
            for (size_t i = 0; i < count; ++i)
                check(label + (floor ? " floor" : " up"), patterns[begin + i], data.get(i),
                      static_cast<uint64_t>(mx_defined_scale(amax.get(i), format, floor)));
        };
        compare(0, patterns.size(), 0);
        for (size_t count = 0; count < 70; ++count) compare(count * 31, count, count % 4);
    }
}

}  // namespace

void test_mx() {
    const int64_t shapes[][2] = {{0, 0},    {0, 5},    {3, 0},    {1, 1},     {1, 31},   {31, 1},
                                 {1, 97},   {97, 1},   {2, 15},   {15, 17},   {16, 33},  {31, 32},
                                 {32, 31},  {32, 32},  {33, 33},  {33, 64},   {64, 47},  {65, 129},
                                 {3, 1023}, {5, 1024}, {2, 1025}, {34, 1057}, {1, 2050}, {300, 7}};
    for (const Fp8 format : kFormats) {
        test_mx_scales(format);
        for (const Dtype dtype : kDtypes) {
            for (const auto& shape : shapes)
                for (const size_t offset : {size_t{0}, size_t{1}}) {
                    test_mx_decode(dtype, format, shape[0], shape[1], offset);
                    for (const bool square : {false, true})
                        for (const bool floor : {false, true})
                            test_mx_quantize(dtype, format, shape[0], shape[1], offset, square,
                                             floor);
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
