// Matrices on grids of scales: every operation against the scalar arithmetic of numerics.h, block
// by block.
#include "subjects.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "checking.h"

namespace {

const Stored kElements[] = {Stored::e4m3, Stored::e5m2, Stored::int8};
const float kLargest = bits_as<float>(kLargestFinite);

// What run(format) returns, for the format of `element`.
template <class Run>
auto with_format(Stored element, const Run& run) {
    if (element == Stored::e4m3) return run(E4M3());
    return element == Stored::e5m2 ? run(E5M2()) : run(Int8());
}

uint8_t encoded(Stored element, float x) {
    return with_format(element, [=](auto format) {
        return static_cast<uint8_t>(encode_element<decltype(format), float, int32_t>(x));
    });
}

// The multiplier of a block's elements, and the bits of its scale as it is stored.
struct Made {
    float multiplier;
    uint32_t stored;
};

Made made_of(Stored element, float amax, const ScaleRule& rule) {
    return with_format(element, [&](auto format) {
        typedef decltype(format) Format;
        if (!rule.e8m0) {
            const float scale = scale_of<float, int32_t>(amax, Format::maximum, rule);
            return Made{scale, bits_as<uint32_t>(1.0f / scale)};
        }
        const int32_t code = rule.floor ? e8m0_floor<Format, float, int32_t>(amax)
                                        : e8m0_up<Format, float, int32_t>(amax);
        return Made{e8m0_multiplier<float, int32_t>(code), static_cast<uint32_t>(code)};
    });
}

// Blocks of a number of elements, 0 being all of them.
struct Blocks {
    int64_t rows, cols, block_rows, block_cols;
    int64_t down() const { return block_rows == 0 ? 1 : (rows + block_rows - 1) / block_rows; }
    int64_t across() const { return block_cols == 0 ? 1 : (cols + block_cols - 1) / block_cols; }
    int64_t count() const { return down() * across(); }
    int64_t of(int64_t row, int64_t col) const {
        return (block_rows == 0 ? 0 : row / block_rows) * across() +
               (block_cols == 0 ? 0 : col / block_cols);
    }
};

std::vector<float> amaxes_of(const Elements& src, const Blocks& blocks) {
    std::vector<float> amaxes(static_cast<size_t>(blocks.count()));
    for (int64_t i = 0; i < blocks.rows; ++i)
        for (int64_t j = 0; j < blocks.cols; ++j) {
            float& amax = amaxes[static_cast<size_t>(blocks.of(i, j))];
            const float magnitude = std::fabs(src.get(i * blocks.cols + j));
            if (magnitude > amax) amax = magnitude;  // false for a NaN
        }
    return amaxes;
}

// Any bits; one in eight is a NaN, an infinity or a zero.
void fill(Elements& src, std::mt19937& random) {
    const uint32_t special[] = {0x7fc00000u, 0xff800000u, 0x80000000u, 0x7f800000u};
    for (int64_t i = 0; i < src.count; ++i) {
        const auto any = static_cast<uint32_t>(random());
        const uint32_t bits = any % 8 == 0 ? special[any / 8 % 4] : static_cast<uint32_t>(random());
        src.set(i, src.dtype == Dtype::float32 ? bits : bits >> 16);
    }
}

struct SideSize {
    int64_t block_rows, block_cols, shared_rows, shared_cols;
    bool turned;
};

struct SideCheck {
    SideSize size;
    Blocks blocks, shared;
    Buffer<uint8_t> data, scales;

    SideCheck(const SideSize& size, int64_t rows, int64_t cols, bool e8m0, size_t offset)
        : size(size),
          blocks{rows, cols, size.block_rows, size.block_cols},
          shared{rows, cols, size.shared_rows, size.shared_cols},
          data(rows * cols, offset),
          scales(blocks.count() * (e8m0 ? 1 : 4), e8m0 ? offset : 0) {}

    GridSide side() const {
        return {size.block_rows, size.block_cols, size.shared_rows, size.shared_cols,
                size.turned,     data.address(),  scales.address()};
    }

    void compare(const std::string& label, const Elements& src, Stored element,
                 const ScaleRule& rule) const {
        std::vector<Made> made;
        for (const float amax : amaxes_of(src, shared))
            made.push_back(made_of(element, amax, rule));
        const int64_t rows = blocks.rows, cols = blocks.cols;
        const std::string of_data = label + " data", of_scale = label + " scale";
        for (int64_t i = 0; i < rows; ++i)
            for (int64_t j = 0; j < cols; ++j) {
                const Made& of = made[static_cast<size_t>(shared.of(i, j))];
                const auto place = static_cast<size_t>(size.turned ? j * rows + i : i * cols + j);
                check(of_data, i * cols + j, data.get(place),
                      encoded(element, multiply(src.get(i * cols + j), of.multiplier)));
                const int64_t block = blocks.of(i, j), across = blocks.across();
                const auto scale = static_cast<size_t>(
                    size.turned ? block % across * blocks.down() + block / across : block);
                uint32_t stored = scales.get(rule.e8m0 ? scale : 0);
                if (!rule.e8m0) std::memcpy(&stored, scales.address() + 4 * scale, 4);
                check(of_scale, block, stored, of.stored);
            }
    }
};

const SideSize kPairs[][2] = {
    {{1, 32, 1, 32, false}, {32, 1, 32, 1, false}},
    {{1, 32, 32, 32, false}, {32, 1, 32, 32, true}},
    {{1, 128, 1, 128, false}, {128, 1, 128, 1, true}},
    {{128, 128, 128, 128, false}, {128, 128, 128, 128, true}},
    {{1, 0, 1, 0, false}, {0, 1, 0, 1, true}},
    {{8, 64, 8, 64, true}, {64, 8, 64, 8, false}},
    {{3, 5, 6, 15, false}, {5, 3, 0, 0, true}},
};
const int64_t kShapes[][2] = {{0, 0},    {0, 3},    {1, 1},    {31, 33},   {33, 64},
                              {65, 129}, {2, 1100}, {130, 40}, {129, 1030}};

void test_quantize(Dtype dtype, Stored element, const ScaleRule& rule, size_t offset) {
    for (const auto& shape : kShapes) {
        const int64_t rows = shape[0], cols = shape[1];
        Elements src(dtype, rows * cols, offset);
        std::mt19937 random(static_cast<unsigned>(rows * 131 + cols));
        fill(src, random);
        for (const auto& pair : kPairs)
            for (const int directions : {1, 2, 3}) {
                if (directions != 3 && rows * cols > 10000) continue;
                const std::string label = name("grid_quantize", dtype, Fp8::e4m3) + " element " +
                                          std::to_string(static_cast<int>(element)) + " " +
                                          std::to_string(rows) + "x" + std::to_string(cols) +
                                          " blocks " + std::to_string(pair[0].block_rows) + "x" +
                                          std::to_string(pair[0].block_cols);
                std::vector<SideCheck> checks;
                std::vector<GridSide> sides;
                for (int k = 0; k < 2; ++k)
                    if (directions & (1 << k))
                        checks.emplace_back(pair[k], rows, cols, rule.e8m0, offset);
                for (const SideCheck& each : checks) sides.push_back(each.side());
                grid_quantize(src.raw.address(), dtype, rows, cols, element, rule, sides.data(),
                              static_cast<int>(sides.size()), 1 + directions % 2);
                for (const SideCheck& each : checks) each.compare(label, src, element, rule);
            }
    }
}

// Amaxes, the cast with multipliers of any sign, and the decoding of what it makes.
void test_parts(Dtype dtype, Stored element, int64_t rows, int64_t cols, size_t offset) {
    std::mt19937 random(static_cast<unsigned>(rows * 7 + cols));
    Elements src(dtype, rows * cols, offset);
    fill(src, random);
    for (const auto& pair : kPairs) {
        const Blocks blocks{rows, cols, pair[1].block_rows, pair[1].block_cols};
        const auto count = static_cast<size_t>(blocks.count());
        const std::string label = name("grid parts", dtype, Fp8::e4m3);
        const std::string of_amax = label + " amax", of_cast = label + " cast",
                          of_decode = label + " decode";
        Buffer<float> amaxes(blocks.count()), multipliers(blocks.count());
        grid_amax(src.raw.address(), dtype, rows, cols, blocks.block_rows, blocks.block_cols,
                  amaxes.data(), 2);
        const std::vector<float> expected = amaxes_of(src, blocks);
        for (size_t k = 0; k < count; ++k) {
            const uint32_t got = bits_as<uint32_t>(amaxes.get(k));
            check(of_amax, static_cast<long long>(k), got, bits_as<uint32_t>(expected[k]));
            multipliers.set(k, std::ldexp(random() % 2 == 0 ? 1.25f : -1.25f,
                                          static_cast<int>(random() % 40) - 20));
        }
        Buffer<uint8_t> data(rows * cols, offset);
        grid_cast(src.raw.address(), dtype, rows, cols, multipliers.data(), blocks.block_rows,
                  blocks.block_cols, element, pair[1].turned, data.address(), 2);
        Elements out(dtype, rows * cols, offset);
        if (!pair[1].turned)
            grid_decode(data.address(), element, rows, cols, multipliers.data(), false,
                        blocks.block_rows, blocks.block_cols, out.raw.address(), dtype, 2);
        for (int64_t i = 0; i < rows; ++i)
            for (int64_t j = 0; j < cols; ++j) {
                const float factor = multipliers.get(static_cast<size_t>(blocks.of(i, j)));
                const uint8_t code =
                    data.get(static_cast<size_t>(pair[1].turned ? j * rows + i : i * cols + j));
                check(of_cast, i * cols + j, code,
                      encoded(element, multiply(src.get(i * cols + j), factor)));
                if (pair[1].turned) continue;
                const float value = with_format(element, [=](auto format) {
                    typedef decltype(format) Format;
                    const float magnitude =
                        multiply(element_value<Format, float, int32_t>(code), factor);
                    return element_sign<Format, int32_t>(code) != 0 ? -magnitude : magnitude;
                });
                const float got = out.get(i * cols + j);
                const float wanted = dtype == Dtype::float32    ? value
                                     : dtype == Dtype::bfloat16 ? widen_bfloat16(to_bfloat16(value))
                                                                : widen_half(to_half(value));
                if (std::isnan(wanted) && std::isnan(got)) continue;
                check(of_decode, i * cols + j, bits_as<uint32_t>(got), bits_as<uint32_t>(wanted));
            }
    }
}

}  // namespace

void test_grid_numerics() {
    for (int code = 0; code < 256; ++code) {
        const float value = widen_int8<float, int32_t>(code);
        const bool right = code == 0x80 ? std::isnan(value)
                                        : value == static_cast<float>(static_cast<int8_t>(code));
        if (!right) report("int8 value", code, value, code);
    }
    for (int twice = -600; twice <= 600; ++twice)
        for (const float towards : {-kLargest, static_cast<float>(twice) / 2, kLargest}) {
            const float x = std::nextafter(static_cast<float>(twice) / 2, towards);
            const double nearest =
                std::clamp(std::nearbyint(static_cast<double>(x)), -127.0, 127.0);
            check("int8 code", twice, static_cast<uint64_t>(encode_int8<float, int32_t>(x)),
                  static_cast<uint8_t>(static_cast<int8_t>(nearest)));
        }
    const float infinity = std::numeric_limits<float>::infinity();
    check("int8 infinity", 0, static_cast<uint64_t>(encode_int8<float, int32_t>(infinity)), 127);
    check("int8 infinity", 1, static_cast<uint64_t>(encode_int8<float, int32_t>(-infinity)), 129);
    check("int8 NaN", 0, static_cast<uint64_t>(encode_int8<float, int32_t>(std::nanf(""))), 0x80);
    const auto scale = [](float amax, const ScaleRule& rule) {
        return scale_of<float, int32_t>(amax, 448.0f, rule);
    };
    const struct {
        float amax;
        ScaleRule rule;
        float scale;
    } cases[] = {
        {3.0f, {false, false, 0.0f, kLargest}, 448.0f / 3.0f},
        {3.0f, {false, true, 0.0f, kLargest}, 128.0f},
        {0.0f, {false, false, 0.0f, kLargest}, 1.0f},
        {0.0f, {false, false, 7.0f, kLargest}, 64.0f},
        {infinity, {false, false, 0.0f, kLargest}, 1.0f},
        {1e-44f, {false, true, 0.0f, 3000.0f}, 2048.0f},
    };
    for (const auto& each : cases) {
        const float got = scale(each.amax, each.rule);
        if (got != each.scale) report("scale of an amax", 0, got, each.scale);
    }
}

void test_grids() {
    const ScaleRule rules[] = {{false, false, 1e-3f, kLargest},
                               {false, true, 0.0f, 3e38f},
                               {true, false, 0.0f, 0.0f},
                               {true, true, 0.0f, 0.0f}};
    for (const Dtype dtype : kDtypes)
        for (const Stored element : kElements) {
            for (const auto& shape : kShapes)
                for (const size_t offset : {size_t{0}, size_t{1}})
                    test_parts(dtype, element, shape[0], shape[1], offset);
            for (const ScaleRule& rule : rules)
                test_quantize(dtype, element, rule, rule.floor ? 1 : 0);
        }
}
