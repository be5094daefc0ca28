// Kernels over elements with one scale, against the scalar arithmetic of numerics.h, and that
// arithmetic against the definition of the formats.
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

template <class Format>
uint32_t scalar_decode(uint8_t code, float scale_inv, Dtype dtype) {
    if (dtype == Dtype::float32)
        return bits_as<uint32_t>(dequantize_element<Format>(code, scale_inv));
    return dtype == Dtype::bfloat16 ? dequantize_bfloat16<Format>(code, scale_inv)
                                    : dequantize_half<Format>(code, scale_inv);
}

// numerics.h itself: all bfloat16 and float16 values, all data, and the midpoints with their
// float32 neighbours.
template <class Format>
void test_numerics(const char* format, int data) {
    std::vector<double> values;
    for (int code = 0; code < data; ++code) {
        values.push_back(defined_value(code, Format::mantissa, Format::bias));
        const float widened = widen<Format, float, int32_t>(code);
        if (widened != values.back())
            report(std::string(format) + " value", code, widened, values.back());
    }
    const auto compare = [&](float x) {
        const int got = encode<Format, float, int32_t>(x);
        int expected = 0x7f;
        if (!std::isnan(x))
            expected = defined_code(std::fabs(static_cast<double>(x)), values) |
                       (std::signbit(x) ? 0x80 : 0);
        if (got != expected)
            report(std::string(format) + " code", bits_as<int32_t>(x), got, expected);
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
    const float inf = std::numeric_limits<float>::infinity(),
                largest = std::numeric_limits<float>::max();
    struct Case {
        float amax, epsilon;
        bool pow2;
        float scale;
    };
    const Case cases[] = {
        {0.0f, 0.0f, false, 1.0f},
        {inf, 0.0f, false, 1.0f},
        {std::nanf(""), 0.0f, false, 1.0f},
        {3.0f, 0.0f, false, 448 / 3.0f},
        {3.0f, 0.0f, true, 128.0f},
        {0.5f, 2.0f, false, 224.0f},
        {0.0f, 2.0f, false, 224.0f},
        {1e-45f, 0.0f, false, largest},
        {1e-45f, 0.0f, true, std::ldexp(1.0f, 127)},
    };
    for (const Case& c : cases) {
        const Scale got = scale_from_amax(c.amax, 448.0f, c.epsilon, c.pow2);
        if (got.scale != c.scale)
            report("scale of amax", bits_as<int32_t>(c.amax), got.scale, c.scale);
        if (got.scale_inv != 1.0f / c.scale)
            report("scale_inv", bits_as<int32_t>(c.amax), got.scale_inv, 1 / c.scale);
    }
}

// Every 16-bit pattern, or a large sample of float32 ones, through cast, under scales ordinary and
// not.
void test_cast(Dtype dtype, Fp8 format) {
    const bool wide = dtype == Dtype::float32;
    Elements src(dtype, wide ? 1 << 18 : 65536, wide ? 0 : 2);
    std::mt19937 random(7);
    for (int64_t i = 0; i < src.count; ++i) {
        // Half of the sample stays within the range of the formats.
        const uint32_t any = static_cast<uint32_t>(random());
        src.set(i, !wide        ? static_cast<uint32_t>(i)
                   : i % 2 == 0 ? any
                                : (any & 0x8fffffffu) | 0x38000000u);
    }
    const float scales[] = {1.0f,  0.37f, 448.0f,        1e-6f,   1e30f,
                            -2.0f, 0.0f,  std::nanf(""), INFINITY};
    Buffer<uint8_t> out(src.count);
    const std::string label = name("cast", dtype, format);
    for (const float scale : scales) {
        cast(src.raw.address(), dtype, 1, src.count, &scale, nullptr, nullptr, nullptr, out.data(),
             nullptr, format, 2);
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
    if (src.count > 2)
        src.set(src.count / 2, src.dtype == Dtype::float16 ? 0xfe00 : 0xffffffffu);  // a NaN
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
    const std::string parts[] = {label + " out", label + " out only", label + " out_t",
                                 label + " out_t only", label + " transpose"};
    for (const int threads : {1, 3}) {
        float seen = -1, scale = -1, scale_inv = -1;
        Buffer<uint8_t> out(n, offset), out_t(n, offset), again(n), only_t(n), only(n);
        quantize(src.raw.address(), dtype, rows, cols, 0.0f, false, &seen, &scale, &scale_inv,
                 out.data(), out_t.data(), format, threads);
        check(label + " amax", 0, bits_as<uint32_t>(seen), bits_as<uint32_t>(expected_amax));
        check(label + " scale", 0, bits_as<uint32_t>(scale), bits_as<uint32_t>(expected.scale));
        check(label + " scale_inv", 0, bits_as<uint32_t>(scale_inv),
              bits_as<uint32_t>(expected.scale_inv));
        quantize(src.raw.address(), dtype, rows, cols, 0.0f, false, nullptr, nullptr, &scale_inv,
                 only.data(), nullptr, format, threads);
        cast(src.raw.address(), dtype, rows, cols, &expected.scale, nullptr, nullptr, nullptr,
             nullptr, only_t.data(), format, threads);
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

// The cast that records: data, transpose, amax and the count of what is beyond the format, from one
// call.
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
            cast(src.raw.address(), dtype, rows, cols, &scale, &amax, &saturated, &scale_inv,
                 out.data(), out_t.data(), format, threads);
            float again = 0;
            cast(src.raw.address(), dtype, rows, cols, &scale, &again, nullptr, &scale_inv,
                 only.data(), nullptr, format, threads);
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
                check(label + " scale_inv", 0, bits_as<uint32_t>(scale_inv),
                      bits_as<uint32_t>(inverse));
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
            const float expected_history[] = {0.0f, 0.0f, 0.0f, 1.0f,    5.0f,
                                              3.0f, 2.0f, 6.0f, INFINITY};
            for (int i = 0; i < 3; ++i)
                check("update scale", i, bits_as<uint32_t>(scale[i]),
                      bits_as<uint32_t>(expected_scale[i]));
            for (int i = 0; i < 9; ++i)
                check("update history", i, bits_as<uint32_t>(history[i]),
                      bits_as<uint32_t>(expected_history[i]));
            check("update largest scale", 0, bits_as<uint32_t>(other_scale[0]),
                  bits_as<uint32_t>(std::numeric_limits<float>::max()));
        }
}

// Histories of any length and number of slots, in memory that ends with them, against one slot
// after the other.
void test_histories() {
    std::mt19937 random(5);
    std::uniform_real_distribution<float> amax(0.5f, 400.0f);
    for (const size_t slots : {1, 2, 3, 4, 7, 30})
        for (const size_t length : {1, 2, 16, 17, 18, 33, 49, 50, 1024}) {
            const size_t size = slots * length;
            Buffer<float> history(static_cast<int64_t>(size)), scale(static_cast<int64_t>(slots));
            const std::vector<float> maxima(slots, 448.0f);
            std::vector<float> expected(size), scales(slots, 3.0f);
            for (size_t i = 0; i < size; ++i)
                history.set(i, expected[i] = random() % 9 == 0 ? 0.0f : amax(random));
            for (size_t slot = 0; slot < slots; ++slot) {
                scale.set(slot, 3.0f);
                const float seen = expected[slot];
                if (seen == 0.0f) continue;
                float largest = seen;
                for (size_t i = slot + slots; i < size; i += slots) {
                    largest = std::max(largest, expected[i]);
                    expected[i - slots] = expected[i];
                }
                expected[size - slots + slot] = seen;
                expected[slot] = 0.0f;
                scales[slot] = 448.0f / largest;
            }
            const HistorySlots tensor{scale.data(), history.data(), static_cast<int64_t>(slots)};
            update_scales(&tensor, 1, static_cast<int64_t>(length), maxima.data(), false, nullptr);
            for (size_t i = 0; i < size; ++i)
                check("history", static_cast<int64_t>(i), bits_as<uint32_t>(history.get(i)),
                      bits_as<uint32_t>(expected[i]));
            for (size_t i = 0; i < slots; ++i)
                check("its scale", static_cast<int64_t>(i), bits_as<uint32_t>(scale.get(i)),
                      bits_as<uint32_t>(scales[i]));
        }
}

void test_decode(Dtype dtype, Fp8 format) {
    const std::string label = name("decode", dtype, format);
    for (const int64_t n :
         {int64_t{0}, int64_t{1}, int64_t{15}, int64_t{33}, int64_t{256}, int64_t{70001}})
        for (const size_t offset : {size_t{0}, size_t{3}, size_t{4}})
            for (const float scale :
                 {1.0f, 0.123f, 1e38f, 1e-38f, INFINITY, std::nanf(""), -3.0f}) {
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
    const uint32_t infinity = dtype == Dtype::float32    ? 0x7f800000
                              : dtype == Dtype::bfloat16 ? 0x7f80
                                                         : 0x7c00;
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
        check(name("amax", dtype, Fp8::e4m3), n, bits_as<uint32_t>(got),
              bits_as<uint32_t>(expected.get(0)));
    }
}

}  // namespace

void test_element_numerics() {
    test_numerics<E4M3>("e4m3", 0x7f);
    test_numerics<E5M2>("e5m2", 0x7c);
    test_scales();
    test_update();
}

void test_elements() {
    test_histories();
    for (const Dtype dtype : kDtypes) {
        test_amax(dtype);
        for (const Fp8 format : kFormats) {
            test_cast(dtype, format);
            test_decode(dtype, format);
            const int64_t shapes[][2] = {{0, 0},    {0, 7},     {7, 0},   {1, 1},      {1, 70},
                                         {70, 1},   {3, 5},     {16, 16}, {17, 15},    {63, 65},
                                         {64, 64},  {64, 1024}, {65, 80}, {129, 1030}, {5, 3000},
                                         {3000, 5}, {200, 333}};
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
}
