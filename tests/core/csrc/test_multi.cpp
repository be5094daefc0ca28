// Many tensors in one call. Each has elements at hand that begin anywhere, and results that begin
// anywhere else.
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

// What an element counts as: the nearest value of `nominal`, from the definition.
float defined_rounding(float x, Dtype nominal) {
    if (std::isnan(x)) return x;
    const uint32_t pattern =
        wide_pattern(std::fabs(static_cast<double>(x)), kWide[static_cast<int>(nominal)]);
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
        const uint32_t step = static_cast<uint32_t>(random()) % 3 - 1,
                       choice = static_cast<uint32_t>(random()) % 8;
        src.set(i, choice < 2   ? any
                   : choice < 4 ? (any & 0xffff8000u) + step
                                : (any & 0x8fffe000u) + 0x36001000u + step);
    }
}

struct Shard {
    int64_t rows, cols, start, count;
    bool square;
};

// Shards of plain tensors are matrices of one row.
const Shard kShards[] = {
    {0, 0, 0, 0, false},          {1, 1, 0, 1, false},        {1, 1, 1, 0, true},
    {3, 5, 4, 7, false},          {3, 5, 4, 7, true},         {33, 31, 0, 1023, false},
    {33, 33, 40, 900, true},      {64, 64, 64, 64, false},    {70, 97, 500, 1, false},
    {70, 97, 96, 3000, false},    {70, 97, 3100, 3690, true}, {5, 1024, 1000, 2100, false},
    {40, 1100, 1, 43998, false},  {40, 1100, 1099, 2, true},  {2, 3000, 2047, 2, false},
    {1, 5000, 1030, 3000, false}, {4000, 1, 17, 3001, false}, {200, 600, 33333, 66667, true}};

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
    MultiSource source(size_t i) const {
        return {sources[i].raw.address(), dtype, nominal, shards[i].count};
    }
    std::string label(const char* operation, Fp8 format) const {
        return name(operation, dtype, format) + " as " + kDtypeNames[static_cast<int>(nominal)];
    }
    std::vector<Buffer<uint8_t>> results(size_t first) const {
        std::vector<Buffer<uint8_t>> buffers;
        for (size_t i = 0; i < shards.size(); ++i)
            buffers.emplace_back(shards[i].count, (first + i) % 67);
        return buffers;
    }
};

void test_multi(const MultiTest& test, Fp8 format) {
    const auto count = static_cast<int64_t>(test.shards.size());
    const std::string cast_label = test.label("multi_cast", format),
                      amax_label = test.label("multi_amax", format);
    for (const int threads : {1, 3}) {
        std::vector<MultiSource> sources;
        std::vector<MultiCastJob> casts;
        std::vector<Buffer<uint8_t>> outs = test.results(1);
        Buffer<float> amaxes(count), scales(count);
        for (size_t i = 0; i < outs.size(); ++i) {
            sources.push_back(test.source(i));
            casts.push_back({test.source(i), format, outs[i].data()});
            scales.set(i, i == 9    ? -2.0f
                          : i == 11 ? 0.0f
                          : i == 12 ? std::nanf("")
                                    : std::ldexp(0.7f, static_cast<int>(i)));
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
            check(amax_label, static_cast<long long>(i), bits_as<uint32_t>(amaxes.get(i)),
                  bits_as<uint32_t>(expected));
        }
    }
}

// Blocks of rows and of columns, as sizes along the row and across it, 0 being all; squares have
// the first twice.
struct Blocks {
    int64_t along, across;
    bool e8m0;

    GridBlock by_row() const { return {across, along}; }
    GridBlock by_column() const { return {along, across}; }
    GridBlock square() const { return {along, along}; }
};
const Blocks kBlocks[] = {
    {32, 1, true}, {128, 1, false}, {0, 1, false}, {5, 3, false}, {64, 8, true}};

GridShard grid_shard(const MultiTest& test, size_t i) {
    const Shard& s = test.shards[i];
    return {test.source(i), s.rows, s.cols, s.start};
}

// The number of an element's block.
int64_t block_of(const Shard& s, int64_t element, const GridBlock& block) {
    const int64_t row = (s.start + element) / s.cols, col = (s.start + element) % s.cols;
    return (block.rows == 0 ? 0 : row / block.rows) * grid_blocks(s.cols, block.cols) +
           (block.cols == 0 ? 0 : col / block.cols);
}

void test_grid_multi_amax(const MultiTest& test, const Blocks& blocks) {
    std::vector<GridMultiAmax> jobs;
    std::vector<float> expected;
    for (size_t i = 0; i < test.shards.size(); ++i) {
        const Shard& s = test.shards[i];
        const GridShard shard = grid_shard(test, i);
        const GridBlock rows = s.square ? blocks.square() : blocks.by_row();
        jobs.push_back({shard, rows, blocks.by_column(), s.square});
        for (const GridBlock& block : {rows, blocks.by_column()}) {
            if (s.square && block.rows != block.cols) continue;
            std::vector<float> amaxes(static_cast<size_t>(grid_size(shard, block)));
            for (int64_t k = 0; k < s.count; ++k) {
                const float x = std::fabs(test.values[i][static_cast<size_t>(k)]);
                float& amax = amaxes[static_cast<size_t>(block_of(s, k, block))];
                if (x > amax) amax = x;
            }
            expected.insert(expected.end(), amaxes.begin(), amaxes.end());
        }
    }
    const std::string label =
        test.label("grid_multi_amax", Fp8::e4m3) + " " + std::to_string(blocks.along);
    for (const int threads : {1, 3}) {
        Buffer<float> out(static_cast<int64_t>(expected.size()));
        grid_multi_amax(jobs.data(), static_cast<int64_t>(jobs.size()), out.data(), threads);
        for (size_t i = 0; i < expected.size(); ++i)
            check(label, static_cast<long long>(i), bits_as<uint32_t>(out.get(i)),
                  bits_as<uint32_t>(expected[i]));
    }
}

// What the elements of all blocks of one direction are multiplied by, as it is given, and the data
// that this makes.
struct Multipliers {
    const Blocks& blocks;
    GridBlock block;
    std::vector<Buffer<uint8_t>> given;
    std::vector<std::vector<uint8_t>> data;

    Multipliers(const MultiTest& test, Fp8 format, const Blocks& blocks, const GridBlock& block,
                unsigned seed)
        : blocks(blocks), block(block) {
        std::mt19937 random(seed);
        for (size_t i = 0; i < test.shards.size(); ++i) {
            const Shard& s = test.shards[i];
            const int64_t count = grid_size(grid_shard(test, i), block);
            given.emplace_back(blocks.e8m0 ? count : 4 * count, blocks.e8m0 ? i % 3 : i % 3 * 4);
            std::vector<float> factors;
            for (int64_t k = 0; k < count; ++k) {
                const auto code =
                    static_cast<uint8_t>(random() % 3 == 0 ? random() : 100 + random() % 40);
                factors.push_back(blocks.e8m0 ? static_cast<float>(code)
                                              : std::ldexp(0.7f, code - 127));
                if (!blocks.e8m0 && random() % 50 == 0)
                    factors.back() = i % 2 == 0 ? -2.0f : std::nanf("");
                if (blocks.e8m0)
                    given.back().set(static_cast<size_t>(k), code);
                else
                    std::memcpy(given.back().address() + 4 * k, &factors.back(), 4);
            }
            data.emplace_back();
            for (size_t k = 0; k < test.values[i].size(); ++k) {
                const float factor =
                    factors[static_cast<size_t>(block_of(s, static_cast<int64_t>(k), block))];
                const float x = test.values[i][k];
                data.back().push_back(!blocks.e8m0 ? scalar_cast(x, factor, format)
                                      : factor == 255.0f
                                          ? uint8_t{0x7f}
                                          : mx_defined_code(x, static_cast<int>(factor), format));
            }
        }
    }
    GridCastSide side(size_t i, uint8_t* to) const { return {block, given[i].address(), to}; }
};

void test_grid_multi_cast(const MultiTest& test, Fp8 format, const Blocks& blocks) {
    const Multipliers row(test, format, blocks, blocks.by_row(), 23),
        column(test, format, blocks, blocks.by_column(), 24);
    const std::string label =
        test.label("grid_multi_cast", format) + " " + std::to_string(blocks.along);
    const size_t turns = &blocks == kBlocks ? 3 : 1;
    for (const int threads : {1, 3})
        for (size_t turn = 0; turn < turns; ++turn) {  // a third has no rows, another no columns
            std::vector<Buffer<uint8_t>> row_data = test.results(1), column_data = test.results(30);
            std::vector<GridMultiCast> jobs;
            for (size_t i = 0; i < test.shards.size(); ++i)
                jobs.push_back(
                    {grid_shard(test, i), static_cast<Stored>(format), blocks.e8m0,
                     row.side(i, (i + turn) % 3 == 0 ? nullptr : row_data[i].data()),
                     column.side(i, (i + turn) % 3 == 1 ? nullptr : column_data[i].data())});
            grid_multi_cast(jobs.data(), static_cast<int64_t>(jobs.size()), threads);
            for (size_t i = 0; i < jobs.size(); ++i)
                for (size_t k = 0; k < row.data[i].size(); ++k) {
                    const auto where = static_cast<long long>(i * 1000000 + k);
                    check(label + " rows", where, row_data[i].get(k),
                          jobs[i].by_row.data == nullptr ? 0 : row.data[i][k]);
                    check(label + " columns", where, column_data[i].get(k),
                          jobs[i].by_column.data == nullptr ? 0 : column.data[i][k]);
                }
        }
}

// Results beyond the caches, in both directions together, of a matrix of which a part is at hand.
void test_streaming(size_t offset) {
    const int64_t rows = 1200, cols = 2112, start = offset == 0 ? 0 : 2000,
                  count = rows * cols - start;
    Elements src(Dtype::float32, count, offset);
    std::mt19937 random(3);
    fill_hard(src, random);
    Buffer<uint8_t> row_scales(rows * 66, 1), column_scales(38 * cols, 1), out(count, offset),
        out_t(count, offset);
    for (size_t i = 0; i < row_scales.size(); ++i)
        row_scales.set(i, static_cast<uint8_t>(100 + i % 50));
    for (size_t i = 0; i < column_scales.size(); ++i)
        column_scales.set(i, static_cast<uint8_t>(100 + i % 47));
    const GridShard shard{
        {src.raw.address(), Dtype::float32, Dtype::bfloat16, count}, rows, cols, start};
    const GridMultiCast job{shard,
                            Stored::e4m3,
                            true,
                            {{1, 32}, row_scales.data(), out.data()},
                            {{32, 1}, column_scales.data(), out_t.data()}};
    grid_multi_cast(&job, 1, 3);
    const std::string label = std::string(active_kernels().name) + " grid_multi_cast streaming";
    for (int64_t i = 0; i < count; ++i) {
        const int64_t row = (start + i) / cols, col = (start + i) % cols;
        const float x = widen_bfloat16(to_bfloat16(src.get(i)));
        const auto multiplier = [](int code) { return e8m0_multiplier<float, int32_t>(code); };
        check(label, i, out.get(i),
              scalar_cast(x, multiplier(row_scales.get(row * 66 + col / 32)), Fp8::e4m3));
        check(label, i, out_t.get(i),
              scalar_cast(x, multiplier(column_scales.get(row / 32 * cols + col)), Fp8::e4m3));
    }
}

}  // namespace

void test_many() {
    for (const Dtype dtype : kDtypes)
        for (const Dtype nominal : kDtypes) {
            const MultiTest test(dtype, nominal);
            for (const Blocks& blocks : kBlocks) {
                test_grid_multi_amax(test, blocks);
                test_grid_multi_cast(test, blocks.along % 3 == 2 ? Fp8::e4m3 : Fp8::e5m2, blocks);
            }
            for (const Fp8 format : kFormats) test_multi(test, format);
        }
    test_streaming(0);
    test_streaming(1);
}
