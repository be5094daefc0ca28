// Every operation with every instruction set of this machine: the portable one's bytes, in memory
// that is exactly as large as the kernels may use.
//
// The Python tests compare all of them with an oracle. This program is for the sanitizers: each
// buffer ends where its allocation ends, so one byte too far is a failure. Addresses suit no type
// but bytes. Exits with 1 after printing which calls differed.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/levels_kernels.h"
#include "numerics.h"

using namespace ottava;

namespace {

typedef std::vector<uint8_t> Bytes;

// Bytes at an offset into an allocation that ends with the last of them.
class Memory {
    size_t offset_, size_;
    std::unique_ptr<uint8_t[]> room_;

public:
    explicit Memory(int64_t size, size_t offset = 0)
        : offset_(offset),
          size_(static_cast<size_t>(size)),
          room_(new uint8_t[offset + static_cast<size_t>(size)]()) {}
    uint8_t* data() const { return room_.get() + offset_; }
    template <class T>
    T* as() const {
        return reinterpret_cast<T*>(data());
    }
    void append_to(Bytes& bytes) const { bytes.insert(bytes.end(), data(), data() + size_); }
};

const Dtype kDtypes[] = {Dtype::float32, Dtype::bfloat16, Dtype::float16};
const Fp8 kFormats[] = {Fp8::e4m3, Fp8::e5m2};
const Stored kElements[] = {Stored::e4m3, Stored::e5m2, Stored::int8};
const float kLargest = bits_as<float>(kLargestFinite);

struct Shape {
    int64_t rows, cols;
    size_t offset;
    int64_t count() const { return rows * cols; }
};
const Shape kShapes[] = {{0, 7, 0},  {1, 1, 1},    {7, 33, 2},    {64, 64, 0},
                         {33, 1, 3}, {70, 150, 1}, {3, 1100, 16}, {129, 257, 5}};

int64_t size_of(Dtype dtype) {
    return dtype == Dtype::float32 ? 4 : 2;
}

// Elements of any bits, of which every eighth is a NaN, an infinity or a zero; or those near one.
Memory elements(Dtype dtype, int64_t count, size_t offset, bool near_one = false) {
    const uint32_t special[] = {0x7fc00000u, 0xff800000u, 0x80000000u, 0x7f800000u};
    Memory memory(count * size_of(dtype), offset);
    for (int64_t i = 0; i < count; ++i) {
        // The upper half of a product with an odd number is as good as random.
        const auto any = static_cast<uint32_t>((i + count) * 0x9e3779b97f4a7c15ll >> 32);
        // Half of the others are near one.
        const uint32_t ordinary =
            any % 2 == 0 && !near_one ? any : (any & 0x8fffffffu) | 0x38000000u;
        const uint32_t bits = any % 8 == 0 && !near_one ? special[any / 8 % 4] : ordinary;
        const auto half = static_cast<uint16_t>(bits >> 16);
        if (dtype == Dtype::float32)
            std::memcpy(memory.data() + 4 * i, &bits, 4);
        else
            std::memcpy(memory.data() + 2 * i, &half, 2);
    }
    return memory;
}

Memory any_bytes(int64_t count, size_t offset = 0) {
    Memory memory(count, offset);
    for (int64_t i = 0; i < count; ++i) memory.data()[i] = static_cast<uint8_t>(i * 37 + i / 256);
    return memory;
}

// float32 values of many magnitudes, at a multiple of four bytes.
Memory floats(int64_t count, float sign = 1) {
    Memory memory(4 * count);
    for (int64_t i = 0; i < count; ++i)
        memory.as<float>()[i] = sign * std::ldexp(0.7f, static_cast<int>(i * 7 % 40) - 20);
    return memory;
}

// The calls: each returns its results, one after the other.
struct Call {
    std::string name;
    std::function<Bytes(int threads)> run;
};

template <class... Results>
Bytes joined(const Results&... results) {
    Bytes bytes;
    (results.append_to(bytes), ...);
    return bytes;
}

Bytes run_quantize(Dtype dtype, Fp8 format, const Shape& s, int threads) {
    const Memory src = elements(dtype, s.count(), s.offset), scalars(12);
    const Memory out(s.count(), s.offset), out_t(s.count(), s.offset), again(s.count(), 1);
    float* numbers = scalars.as<float>();
    quantize(src.data(), dtype, s.rows, s.cols, 0.0f, false, numbers, numbers + 1, numbers + 2,
             out.data(), out_t.data(), format, threads);
    transpose(out.data(), s.rows, s.cols, again.data(), threads);
    float largest = 0;
    amax(src.data(), dtype, s.count(), &largest, threads);
    Bytes bytes = joined(scalars, out, out_t, again);
    bytes.push_back(std::memcmp(&largest, numbers, 4) == 0);
    return bytes;
}

Bytes run_cast(Dtype dtype, Fp8 format, const Shape& s, float scale, int threads) {
    const Memory src = elements(dtype, s.count(), s.offset), scalars(8), count(8);
    const Memory out(s.count(), s.offset), out_t(s.count(), s.offset), only(s.count());
    cast(src.data(), dtype, s.rows, s.cols, &scale, scalars.as<float>(), count.as<int64_t>(),
         scalars.as<float>() + 1, out.data(), out_t.data(), format, threads);
    float inverse = 0;
    cast(src.data(), dtype, s.rows, s.cols, &scale, nullptr, nullptr, &inverse, only.data(),
         nullptr, format, threads);
    return joined(scalars, count, out, out_t, only);
}

Bytes run_decode(Dtype dtype, Fp8 format, const Shape& s, int threads) {
    const Memory src = any_bytes(s.count(), s.offset), out(s.count() * size_of(dtype), s.offset);
    const float scale = 0.37f;
    decode(src.data(), format, s.count(), &scale, out.data(), dtype, threads);
    return joined(out);
}

struct Grid {
    int64_t rows, cols, shared_rows, shared_cols;
    bool e8m0, floor, turned;
};
const Grid kGrids[] = {
    {1, 32, 1, 32, true, false, false},   {1, 32, 32, 32, true, true, false},
    {1, 128, 1, 128, false, true, true},  {128, 128, 128, 128, false, false, true},
    {1, 0, 1, 0, false, false, false},    {0, 0, 0, 0, false, false, false},
    {3, 5, 15, 15, false, true, false},   {8, 64, 8, 64, false, false, false},
    {300, 3, 300, 3, false, false, true},
};

int64_t scales_of(const Grid& grid, int64_t rows, int64_t cols) {
    return grid_blocks(rows, grid.rows) * grid_blocks(cols, grid.cols) * (grid.e8m0 ? 1 : 4);
}

Bytes run_grid(Dtype dtype, Stored element, const Shape& s, const Grid& grid, int threads) {
    const Memory src = elements(dtype, s.count(), s.offset);
    const Grid turned = {grid.cols, grid.rows,  grid.shared_cols, grid.shared_rows,
                         grid.e8m0, grid.floor, grid.turned};
    const Memory data(s.count(), s.offset), column_data(s.count(), 1);
    const Memory scales(scales_of(grid, s.rows, s.cols));
    const Memory column_scales(scales_of(turned, s.rows, s.cols));
    const GridSide sides[] = {{grid.rows, grid.cols, grid.shared_rows, grid.shared_cols, false,
                               data.data(), scales.data()},
                              {turned.rows, turned.cols, turned.shared_rows, turned.shared_cols,
                               grid.turned, column_data.data(), column_scales.data()}};
    const ScaleRule rule = {grid.e8m0, grid.floor, 0.0f, kLargest};
    grid_quantize(src.data(), dtype, s.rows, s.cols, element, rule, sides, 2, threads);
    const Memory out(s.count() * size_of(dtype), s.offset);
    grid_decode(data.data(), element, s.rows, s.cols, scales.data(), grid.e8m0, grid.rows,
                grid.cols, out.data(), dtype, threads);
    const int64_t blocks =
        scales_of({grid.rows, grid.cols, 0, 0, false, false, false}, s.rows, s.cols);
    const Memory amaxes(blocks), cast_data(s.count(), s.offset), factors = floats(blocks / 4, -1);
    grid_amax(src.data(), dtype, s.rows, s.cols, grid.rows, grid.cols, amaxes.as<float>(), threads);
    grid_cast(src.data(), dtype, s.rows, s.cols, factors.as<float>(), grid.rows, grid.cols, element,
              grid.turned, cast_data.data(), threads);
    return joined(data, scales, column_data, column_scales, out, amaxes, cast_data);
}

Bytes run_mx_scales(Fp8 format, bool floor, int threads) {
    const Memory src = elements(Dtype::float32, 5003, 4), out(5003);
    mx_scales_from_amax(src.as<float>(), 5003, format, floor, out.data(), threads);
    return joined(out);
}

// Shards that begin anywhere in matrices of any size; a third has no rows, another no columns.
Bytes run_shards(Dtype dtype, Dtype nominal, const Grid& grid, int threads) {
    const int64_t table[][4] = {{0, 0, 0, 0},       {1, 1, 0, 1},        {3, 5, 4, 7},
                                {33, 31, 0, 1023},  {70, 97, 96, 3000},  {40, 1100, 1099, 2},
                                {2, 3000, 2047, 2}, {4000, 1, 17, 3001}, {200, 600, 33333, 66667}};
    std::vector<Memory> sources, scales, results;
    std::vector<MultiSource> inputs;
    std::vector<GridMultiAmax> amax_jobs;
    std::vector<GridMultiCast> jobs;
    std::vector<MultiCastJob> casts;
    const GridBlock by_row = {grid.rows, grid.cols}, by_column = {grid.cols, grid.rows};
    int64_t amaxes = 0;
    for (const auto& [rows, cols, start, count] : table) {
        const size_t i = sources.size();
        sources.push_back(elements(dtype, count, i % 5));
        inputs.push_back({sources.back().data(), dtype, nominal, count});
        const GridShard shard = {inputs.back(), rows, cols, start};
        amax_jobs.push_back({shard, by_row, by_column, grid.rows == grid.cols});
        amaxes += grid_amax_count(amax_jobs.back());
        GridCastSide sides[2];
        for (int side = 0; side < 2; ++side) {
            const GridBlock block = side == 0 ? by_row : by_column;
            const int64_t blocks = grid_size(shard, block);
            scales.push_back(grid.e8m0 ? any_bytes(blocks) : floats(blocks));
            results.emplace_back(count, (i + 1) % 67);
            sides[side] = {block, scales.back().data(),
                           i % 3 == static_cast<size_t>(side) ? nullptr : results.back().data()};
        }
        jobs.push_back({shard, Stored::e4m3, grid.e8m0, sides[0], sides[1]});
        results.emplace_back(count, i);
        casts.push_back({inputs.back(), Fp8::e5m2, results.back().data()});
    }
    const auto count = static_cast<int64_t>(jobs.size());
    const Memory seen(4 * amaxes), whole(4 * count), factors = floats(count, -1);
    grid_multi_amax(amax_jobs.data(), count, seen.as<float>(), threads);
    grid_multi_cast(jobs.data(), count, threads);
    multi_amax(inputs.data(), count, whole.as<float>(), threads);
    multi_cast(casts.data(), count, factors.as<float>(), threads);
    Bytes bytes = joined(seen, whole);
    for (const Memory& result : results) result.append_to(bytes);
    return bytes;
}

// Elements, scales (1 is E8M0), lanes and positions of a block, the second level, candidates,
// rotation, and whether rounding is random and columns are transposed.
struct Levels {
    LevelElement element;
    LevelScale scale;
    int64_t lanes, positions;
    SecondLevel second;
    int candidates, rotation;
    bool stochastic, turned;
};
const Levels kLevels[] = {
    {LevelElement::e2m1, LevelScale::e4m3, 1, 16, SecondLevel::tensor, 0, 0, false, true},
    {LevelElement::e2m1, LevelScale::e4m3, 1, 16, SecondLevel::row, 0, 16, true, true},
    {LevelElement::e2m1, LevelScale::e4m3, 16, 16, SecondLevel::tensor, 2, 0, false, true},
    {LevelElement::e2m1, LevelScale::e4m3, 16, 16, SecondLevel::tensor, 0, 0, true, true},
    {LevelElement::int4, LevelScale::float32, 24, 128, SecondLevel::none, 0, 0, true, true},
    {LevelElement::e2m3, LevelScale::e8m0, 1, 32, SecondLevel::none, 3, 0, false, false},
    {LevelElement::mxint8, LevelScale::ue5m3, 1, 32, SecondLevel::tensor, 0, 128, true, true},
};

LevelsLayout layout_of(const Levels& from) {
    LevelsLayout to{};
    to.element = from.element, to.scale = from.scale;
    to.block = to.area = {from.lanes, from.positions};
    to.second = from.second, to.top = 2688.0f;
    to.candidate_count = from.candidates;
    for (int i = 0; i < from.candidates; ++i)
        to.candidates[i] = 1.0f + 0.5f * static_cast<float>(i);
    to.stochastic = from.stochastic, to.rotation = from.rotation, to.signs[0] = 0xa7e8;
    to.rotated[0] = to.rotated[1] = from.rotation != 0;
    to.turned = from.turned;
    return to;
}

int64_t rounded_up(int64_t n, int64_t step) {
    return (n + step - 1) / step * step;
}

Bytes run_levels(Dtype dtype, const Levels& levels, const Shape& s, int threads) {
    const LevelsLayout layout = layout_of(levels);
    const Memory src = elements(dtype, s.count(), s.offset);
    const int64_t per_byte = elements_per_byte(levels.element);
    LevelsResults results[2];
    std::vector<Memory> memory;
    const int64_t lanes[2] = {s.rows, s.cols}, positions[2] = {s.cols, s.rows};
    int64_t widths[2];
    for (int d = 0; d < 2; ++d) {
        const int64_t stored = rounded_up(positions[d], levels.rotation == 0 ? 1 : levels.rotation);
        const int64_t blocks =
            grid_blocks(lanes[d], levels.lanes) * grid_blocks(stored, levels.positions);
        widths[d] = rounded_up(stored, per_byte) / per_byte;
        memory.emplace_back(lanes[d] * widths[d], s.offset);
        memory.emplace_back(blocks * (levels.scale == LevelScale::float32 ? 4 : 1));
        memory.emplace_back(4 * (levels.second == SecondLevel::row ? lanes[d] : 1));
        const auto made = memory.end() - 3;
        results[d] = {made[0].data(), made[1].data(), made[2].as<float>()};
    }
    levels_quantize(layout, src.data(), dtype, s.rows, s.cols, 0x123456789abcdefu, 0, results,
                    threads);
    const int64_t width = widths[0] * per_byte;
    const Memory out(s.rows * width * size_of(dtype), s.offset);
    const float* amaxes = levels.second == SecondLevel::none ? nullptr : results[0].amaxes;
    const LevelsData from = {results[0].data, s.rows,           width,  results[0].scales,
                             levels.lanes,    levels.positions, amaxes, false};
    levels_decode(layout, from, out.data(), dtype, threads);
    Bytes bytes = joined(out);
    for (const Memory& result : memory) result.append_to(bytes);
    return bytes;
}

Bytes run_updates(int64_t slots, int64_t length) {
    const Memory scale = floats(slots), history = floats(slots * length);
    const std::vector<float> maxima(static_cast<size_t>(slots), 448.0f);
    history.as<float>()[0] = 0;
    const HistorySlots tensor = {scale.as<float>(), history.as<float>(), slots};
    update_scales(&tensor, 1, length, maxima.data(), false, nullptr);
    return joined(scale, history);
}

// Which NaN a sum is differs between instruction sets, so there is none.
Bytes run_epilogue(Dtype dtype, Dtype bias_dtype, const Shape& s, int threads) {
    const Memory sums = floats(s.count()), bias = elements(bias_dtype, s.cols, 2, true);
    const Memory out(s.count() * size_of(dtype), s.offset), wide(4 * s.count());
    const float scale = 0.3f;
    epilogue32(sums.as<float>(), s.rows, s.cols, &scale, nullptr, bias.data(), bias_dtype,
               out.data(), dtype, threads);
    repeat32(bias.data(), bias_dtype, s.rows, s.cols, wide.as<float>(), threads);
    return joined(out, wide);
}

std::vector<Call> all_calls() {
    std::vector<Call> calls;
    const auto add = [&](const std::string& name, std::function<Bytes(int)> run) {
        calls.push_back({name + " " + std::to_string(calls.size()), std::move(run)});
    };
    // What is larger than the caches is written around them.
    const Shape large[] = {{2049, 2113, 1}};
    std::vector<Shape> shapes(std::begin(kShapes), std::end(kShapes));
    shapes.insert(shapes.end(), std::begin(large), std::end(large));
    for (const Dtype dtype : kDtypes) {
        for (const Shape& s : shapes)
            for (const Fp8 format : kFormats) {
                if (s.rows == 2049 && (dtype == Dtype::float16 || format == Fp8::e5m2)) continue;
                add("quantize", [=](int n) { return run_quantize(dtype, format, s, n); });
                add("decode", [=](int n) { return run_decode(dtype, format, s, n); });
                for (const float scale : {0.37f, -300.0f, 0.0f, INFINITY})
                    add("cast", [=](int n) { return run_cast(dtype, format, s, scale, n); });
            }
        for (const Stored element : kElements)
            for (const Grid& grid : kGrids)
                for (const Shape& s : shapes)
                    if (s.rows < 2049 || (dtype == Dtype::bfloat16 && element == Stored::e4m3 &&
                                          grid.shared_rows == 1))
                        add("grid", [=](int n) { return run_grid(dtype, element, s, grid, n); });
        for (const Levels& levels : kLevels)
            for (const Shape& s : kShapes)
                if (s.count() > 0)
                    add("levels", [=](int n) { return run_levels(dtype, levels, s, n); });
        for (const Dtype other : kDtypes) {
            for (const Grid& grid : kGrids)
                add("shards", [=](int n) { return run_shards(dtype, other, grid, n); });
            for (const Shape& s : kShapes)
                add("epilogue", [=](int n) { return run_epilogue(dtype, other, s, n); });
        }
    }
    for (const Fp8 format : kFormats)
        for (const bool floor : {false, true})
            add("mx_scales", [=](int n) { return run_mx_scales(format, floor, n); });
    for (const int64_t slots : {1, 2, 3, 7, 30})
        for (const int64_t length : {1, 2, 16, 17, 33, 50, 1024})
            add("update_scales", [=](int) { return run_updates(slots, length); });
    return calls;
}

// The FNV-1a hash of all results so far, which two machines can compare.
void add_to_digest(uint64_t& digest, const Bytes& bytes) {
    for (const uint8_t byte : bytes) digest = (digest ^ byte) * 0x100000001b3ull;
}

}  // namespace

int main() {
    const Kernels* available[8];
    const int count = available_kernels(available, 8);
    long failures = 0;
    uint64_t digest = 0xcbf29ce484222325ull;
    for (const Call& call : all_calls()) {
        if (!set_active_kernels("portable")) return 2;
        const Bytes expected = call.run(1);
        add_to_digest(digest, expected);
        for (int i = 0; i < count; ++i)
            for (const int threads : {1, 3}) {
                set_active_kernels(available[i]->name);
                if (call.run(threads) == expected) continue;
                std::printf("FAILED %s with %d threads of %s\n", call.name.c_str(), threads,
                            available[i]->name);
                ++failures;
            }
    }
    if (set_active_kernels("no such set")) ++failures;
    std::printf(failures == 0 ? "all kernels agree\n" : "%ld differences\n", failures);
    std::printf("digest of the bytes: %016llx\n", static_cast<unsigned long long>(digest));
    return failures == 0 ? 0 : 1;
}
