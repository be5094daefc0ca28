// The quantization into layouts of levels_jobs.h, with the arithmetic of levels.h.
//
// A block of threads computes a tile of 32 lanes and 128 positions of one direction, in shared
// memory by position. A warp has a chunk of 16 positions, and each of its threads one lane, so that
// one thread sums the errors of a lane in their order. What a choice of a format decides is inside
// the kernels, of which there is one for all formats.
#pragma once

#include <cstdint>

#include "../levels.h"
#include "reduce.h"
#include "rounded.h"

namespace ottava::cuda {

constexpr int kLevelThreads = 256, kLevelLanes = kWarp, kChunk = 16;
constexpr int kChunks = kLevelThreads / kWarp, kLevelPositions = kChunks * kChunk;
static_assert(kLevelPositions == kStripPositions, "blocks and rotations end where tiles end");
static_assert(kLevelLanes % kStripLanes == 0, "blocks of candidates end where tiles end");

// Numbers by position and lane. A row more spreads positions over the banks of the memory.
typedef float LevelValues[kLevelPositions][kLevelLanes + 1];

// Where a tile lies in its direction.
struct LevelTile {
    int64_t lane, position;

    // Of tile number `block`, where tiles follow each other along positions.
    OTTAVA_DEVICE LevelTile(const LevelsDirection& direction, int64_t block, int64_t height) {
        const int64_t across = levels_count(direction.stored, kLevelPositions);
        lane = block / across * height, position = block % across * kLevelPositions;
    }
};

inline int64_t level_tiles(const LevelsDirection& direction, int64_t height) {
    return levels_count(direction.lanes, height) * levels_count(direction.stored, kLevelPositions);
}

// Loads a tile; what lies outside of the matrix is zero. Groups of eight elements lie along rows.
template <class Source, class Thread>
OTTAVA_DEVICE void load_level_groups(const Thread& thread, const LevelsDirection& from,
                                     const LevelTile& tile, bool wide, LevelValues& to) {
    const bool turned = from.columnwise;
    const int across = (turned ? kLevelLanes : kLevelPositions) / kGroup;
    const int64_t cols = turned ? from.lanes : from.positions;
    const int64_t rows = turned ? from.positions : from.lanes;
#pragma unroll
    for (int k = 0; k < kLevelLanes * kLevelPositions / kGroup; k += kLevelThreads) {
        const int group = k + thread.index(), down = group / across;
        const int right = group % across * kGroup;
        const int64_t row = (turned ? tile.position : tile.lane) + down;
        const int64_t col = (turned ? tile.lane : tile.position) + right;
        const int64_t count = row < rows ? cols - col : 0;
        const Group<Source> eight = load_group<Source>(from.src, row * cols + col, count, wide);
#pragma unroll
        for (int n = 0; n < kGroup; ++n) {
            if (turned)
                to[down][right + n] = eight.at(n);
            else
                to[right + n][down] = eight.at(n);
        }
    }
}

template <class Thread>
OTTAVA_DEVICE void load_level_tile(const Thread& thread, const LevelsDirection& from,
                                   const LevelTile& tile, bool wide, LevelValues& to) {
    switch (from.dtype) {
        case Dtype::float32:
            load_level_groups<Float32>(thread, from, tile, wide, to);
            break;
        case Dtype::bfloat16:
            load_level_groups<BFloat16>(thread, from, tile, wide, to);
            break;
        default:
            load_level_groups<Float16>(thread, from, tile, wide, to);
    }
    thread.barrier();
}

// Rotates groups of positions. Strides up to 8 are done in registers.
template <class Thread>
OTTAVA_DEVICE void rotate_level_tile(const Thread& thread, const LevelsLayout& layout, Dtype dtype,
                                     LevelValues& values) {
    const int size = layout.rotation, lane = thread.lane(), first = thread.warp() * kChunk;
    const float factor = rotation_factor(size);
    const auto finish = [&](float sum) { return rounded(multiply(sum, factor), dtype); };
    const int place = first & (size - 1);
    const auto signs = static_cast<uint32_t>(layout.signs[place / 64] >> (place % 64));
    float x[kChunk];
#pragma unroll
    for (int p = 0; p < kChunk; ++p)
        x[p] = bits_as<float>(bits_as<uint32_t>(values[first + p][lane]) ^ (signs >> p & 1) << 31);
    butterfly<1>(x);
#pragma unroll
    for (int p = 0; p < kChunk; ++p) values[first + p][lane] = size == kChunk ? finish(x[p]) : x[p];
    for (int stride = kChunk; stride < size; stride *= 2) {
        thread.barrier();
        const bool last = 2 * stride == size;
        // Half of the chunks are the first of two.
        for (int p = 0; p < kChunk && (first & stride) == 0; ++p) {
            float& a = values[first + p][lane];
            float& b = values[first + p + stride][lane];
            const float sum = a + b, difference = a - b;
            a = last ? finish(sum) : sum;
            b = last ? finish(difference) : difference;
        }
    }
    thread.barrier();
}

// The largest magnitude of a thread's chunk, in which NaN counts as 0.
template <class Thread>
OTTAVA_DEVICE float chunk_amax(const Thread& thread, const LevelValues& values) {
    uint32_t best = 0;
#pragma unroll
    for (int p = 0; p < kChunk; ++p)
        best = Float32::observe(
            best, bits_as<uint32_t>(values[thread.warp() * kChunk + p][thread.lane()]));
    return bits_as<float>(best);
}

OTTAVA_DEVICE int64_t area_of(const LevelsLayout& layout, const LevelsDirection& direction,
                              int64_t lane, int64_t position) {
    return lane / layout.area.lanes * direction.area_lane_step +
           position / layout.area.positions * direction.area_position_step;
}

// The second level of a lane.
OTTAVA_DEVICE SecondScale<float> second_of(const LevelsLayout& layout,
                                           const LevelsDirection& direction, int64_t lane) {
    if (layout.second == SecondLevel::none || lane >= direction.lanes) return {0.0f, 1.0f, 1.0f};
    const float amax = direction.second[layout.second == SecondLevel::row ? lane : 0];
    const float scale = second_scale<float>(amax, layout.top);
    return {amax, scale, divide(1.0f, scale)};
}

// -- amaxes --

// Raises the amaxes of areas and of the second level, each of which is optional, from zeros.
struct LevelAmaxes {
    static constexpr int kThreads = kLevelThreads, kBlocksPerMultiprocessor = 4;
    struct Shared {
        LevelValues values;
        BlockLargest<kThreads> largest;
    };
    LevelsLayout layout;
    LevelsDirection direction;
    bool wide;
    float* areas;
    float* second;

    template <class Thread>
    OTTAVA_DEVICE void operator()(const Thread& thread, Shared& shared) const {
        const LevelTile tile(direction, thread.block(), kLevelLanes);
        load_level_tile(thread, direction, tile, wide, shared.values);
        if (direction.rotated) rotate_level_tile(thread, layout, direction.dtype, shared.values);
        const float amax = chunk_amax(thread, shared.values);
        const int64_t lane = tile.lane + thread.lane();
        const int64_t position = tile.position + thread.warp() * kChunk;
        const bool inside = lane < direction.lanes && position < direction.stored;
        if (areas != nullptr && inside)
            raise(thread, areas + area_of(layout, direction, lane, position), amax);
        if (second == nullptr) return;
        // An infinite amax counts as the largest float32.
        const float finite = finite_of<float>(amax);
        if (layout.second == SecondLevel::row) {
            if (inside) raise(thread, second + lane, finite);
            return;
        }
        const uint32_t largest = shared.largest(thread, bits_as<uint32_t>(finite));
        if (thread.index() == 0) raise(thread, second, bits_as<float>(largest));
    }

private:
    template <class Thread>
    static OTTAVA_DEVICE void raise(const Thread& thread, float* to, float value) {
        thread.raise(reinterpret_cast<int32_t*>(to), bits_as<int32_t>(value));
    }
};

// -- candidates --

// The scale of a candidate, and the error of `count` positions of a lane from `first` on, in order.
struct TriedCandidate {
    BlockScale<float, int32_t> scale;
    float error;
};

OTTAVA_DEVICE TriedCandidate try_candidate(const LevelsLayout& layout, float largest, int number,
                                           float amax, const SecondScale<float>& second,
                                           const LevelValues& values, int first, int count,
                                           int lane) {
    TriedCandidate tried{};
    with_level_element(layout.element, [&](auto format) {
        typedef decltype(format) Format;
        tried.scale = block_scale<Format, float, int32_t>(layout, largest, amax,
                                                          layout.candidates + number, second);
#pragma unroll 1
        for (int p = first; p < first + count; ++p)
            tried.error += candidate_error<Format, float, int32_t>(layout, values[p][lane],
                                                                   tried.scale, second.amax);
    });
    return tried;
}

// The factors of the candidates that squares choose. The rows of the tensor choose, so that both
// directions have the same. A block of threads has `height` lanes, which are whole squares.
struct ChooseLevels {
    static constexpr int kThreads = kLevelThreads, kBlocksPerMultiprocessor = 4;
    // Of squares of 16, which are the most: eight beside each other in each of 32 lanes.
    static constexpr int kSums = kMostCandidates * kChunks * kLevelLanes;
    struct Shared {
        LevelValues values;
        float sums[kSums];  // of the lanes, by candidate and area
    };
    LevelsLayout layout;
    LevelsDirection direction;
    bool wide;
    float* factors;

    static int64_t height_of(int64_t side) { return side > kLevelLanes ? side : kLevelLanes; }

    template <class Thread>
    OTTAVA_DEVICE void operator()(const Thread& thread, Shared& shared) const {
        const int side = static_cast<int>(layout.area.lanes), areas = kLevelPositions / side;
        const int height = side > kLevelLanes ? side : kLevelLanes;
        const LevelTile all(direction, thread.block(), height);
        for (int below = 0; below < height; below += kLevelLanes) {
            LevelTile tile = all;
            tile.lane += below;
            load_level_tile(thread, direction, tile, wide, shared.values);
            if (thread.warp() < areas) sum_lane(thread, shared, tile, below, side, height);
            thread.barrier();
        }
        for (int square = thread.index(); square < areas * (height / side); square += kThreads)
            choose(shared, all, square % areas, square / areas * side, side, height);
    }

private:
    // The errors of all candidates in a lane of an area.
    template <class Thread>
    OTTAVA_DEVICE void sum_lane(const Thread& thread, Shared& shared, const LevelTile& tile,
                                int below, int side, int height) const {
        const int area = thread.warp(), lane = thread.lane();
        const int64_t row = tile.lane + lane, position = tile.position + area * side;
        const bool inside = row < direction.lanes && position < direction.stored;
        const float amax =
            inside ? direction.amaxes[area_of(layout, direction, row, position)] : 0.0f;
        const SecondScale<float> second = second_of(layout, direction, row);
#pragma unroll 1
        for (int n = 0; n < layout.candidate_count; ++n)
            shared.sums[(n * (kLevelPositions / side) + area) * height + below + lane] =
                try_candidate(layout, direction.largest, n, amax, second, shared.values,
                              area * side, side, lane)
                    .error;
    }

    // Sums of lanes are summed by halves. Of equal candidates the first is chosen.
    OTTAVA_DEVICE void choose(Shared& shared, const LevelTile& all, int area, int lane, int side,
                              int height) const {
        const int64_t row = all.lane + lane, position = all.position + area * side;
        if (row >= direction.lanes || position >= direction.stored) return;
        float least = 0.0f, factor = 0.0f;
#pragma unroll 1
        for (int n = 0; n < layout.candidate_count; ++n) {
            float* sums = shared.sums + (n * (kLevelPositions / side) + area) * height + lane;
#pragma unroll 1
            for (int half = side / 2; half > 0; half /= 2)
                for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
            if (n > 0 && !(sums[0] < least)) continue;
            least = sums[0], factor = layout.candidates[n];
        }
        factors[area_of(layout, direction, row, position)] = factor;
    }
};

// -- quantization --

// The random word of a place.
OTTAVA_DEVICE uint32_t random_word(uint64_t seed, uint64_t place, uint32_t stream) {
    uint32_t words[4];
    random_block(seed, place / 4, stream, words);
    const uint32_t low = place & 1 ? words[1] : words[0], high = place & 1 ? words[3] : words[2];
    return place & 2 ? high : low;
}

// Those of four places at this distance.
OTTAVA_DEVICE void random_words(uint64_t seed, uint64_t place, uint64_t step, uint32_t stream,
                                uint32_t (&words)[4]) {
    if (step == 1 && place % 4 == 0) return random_block(seed, place / 4, stream, words);
#pragma unroll
    for (int k = 0; k < 4; ++k)
        words[k] = random_word(seed, place + static_cast<uint64_t>(k) * step, stream);
}

// The codes of four elements, in a byte each.
template <class Format>
OTTAVA_DEVICE uint32_t encode_four(const float (&x)[4], bool at_random,
                                   const uint32_t (&words)[4]) {
    uint32_t codes = 0;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        const int32_t code =
            at_random ? encode_at_random<Format, float, int32_t, uint32_t>(x[k], words[k])
                      : encode_element<Format, float, int32_t>(x[k]);
        codes |= static_cast<uint32_t>(code & 0xff) << (8 * k);
    }
    return codes;
}

struct QuantizeLevels {
    static constexpr int kThreads = kLevelThreads, kBlocksPerMultiprocessor = 4;
    struct Shared {
        LevelValues values;
        float amaxes[kChunks][kLevelLanes];  // of chunks
        float multipliers[kChunks][kLevelLanes];
        uint32_t codes[kLevelLanes][kLevelPositions / 4 + 1];
    };
    LevelsLayout layout;
    LevelsDirection direction;
    bool wide, wide_data, packed;
    const int64_t* seed;
    float* second;  // optional: the amaxes of the second level, as a result

    template <class Thread>
    OTTAVA_DEVICE void operator()(const Thread& thread, Shared& shared) const {
        const LevelTile tile(direction, thread.block(), kLevelLanes);
        load_level_tile(thread, direction, tile, wide, shared.values);
        if (direction.rotated) rotate_level_tile(thread, layout, direction.dtype, shared.values);
        const int64_t lane = tile.lane + thread.lane();
        find_scales(thread, shared, tile);
        if (second != nullptr && tile.position == 0 && thread.warp() == 0) write_second(lane);
        encode(thread, shared, tile);
        if (direction.by_position) return;
        thread.barrier();
        write_lanes(thread, shared, tile);
    }

private:
    OTTAVA_DEVICE void write_second(int64_t lane) const {
        const int64_t count = layout.second == SecondLevel::row ? direction.lanes : 1;
        if (lane < count) second[lane] = direction.second[lane];
    }

    // Leaves the multipliers of all chunks in shared memory, and writes the scales.
    template <class Thread>
    OTTAVA_DEVICE void find_scales(const Thread& thread, Shared& shared,
                                   const LevelTile& tile) const {
        const int chunk = thread.warp(), inner = thread.lane();
        const int chunks = static_cast<int>(layout.block.positions) / kChunk;
        if (direction.amaxes == nullptr) {
            shared.amaxes[chunk][inner] = chunk_amax(thread, shared.values);
            thread.barrier();
        }
        // The first warp of a block does it for all.
        if (chunk % chunks == 0) {
            const int64_t lane = tile.lane + inner, position = tile.position + chunk * kChunk;
            const bool inside = lane < direction.lanes && position < direction.stored;
            const int64_t area = inside ? area_of(layout, direction, lane, position) : 0;
            float amax = direction.amaxes == nullptr ? 0.0f : direction.amaxes[area];
            for (int k = 0; k < chunks && direction.amaxes == nullptr; ++k)
                amax = bits_as<float>(larger(bits_as<uint32_t>(amax),
                                             bits_as<uint32_t>(shared.amaxes[chunk + k][inner])));
            const BlockScale<float, int32_t> scale =
                scale_of_block(thread, shared, amax,
                               direction.factors == nullptr ? nullptr : direction.factors + area,
                               second_of(layout, direction, lane));
            for (int k = 0; k < chunks; ++k)
                shared.multipliers[chunk + k][inner] = scale.multiplier;
            if (inside && lane % layout.block.lanes == 0)
                write_scale(lane / layout.block.lanes, position / layout.block.positions, scale);
        }
        thread.barrier();
    }

    template <class Thread>
    OTTAVA_DEVICE BlockScale<float, int32_t> scale_of_block(
        const Thread& thread, const Shared& shared, float amax, const float* factor,
        const SecondScale<float>& second_level) const {
        BlockScale<float, int32_t> scale{};
        if (factor == nullptr && layout.candidate_count > 0)
            return chosen_scale(thread, shared, amax, second_level);
        with_level_element(layout.element, [&](auto format) {
            scale = block_scale<decltype(format), float, int32_t>(layout, direction.largest, amax,
                                                                  factor, second_level);
        });
        return scale;
    }

    // The scale of the candidate with the least error, the first of equal ones. The lanes of a
    // block lie side by side in a warp, and are summed by halves.
    template <class Thread>
    OTTAVA_DEVICE BlockScale<float, int32_t> chosen_scale(
        const Thread& thread, const Shared& shared, float amax,
        const SecondScale<float>& second_level) const {
        BlockScale<float, int32_t> best{};
        float least = 0.0f;
#pragma unroll 1
        for (int n = 0; n < layout.candidate_count; ++n) {
            const TriedCandidate tried = try_candidate(
                layout, direction.largest, n, amax, second_level, shared.values,
                thread.warp() * kChunk, static_cast<int>(layout.block.positions), thread.lane());
            float error = tried.error;
            for (int half = static_cast<int>(layout.block.lanes) / 2; half > 0; half /= 2)
                error += bits_as<float>(thread.exchange(bits_as<uint32_t>(error), half));
            if (n > 0 && !(error < least)) continue;
            least = error, best = tried.scale;
        }
        return best;
    }

    OTTAVA_DEVICE void write_scale(int64_t lane, int64_t position,
                                   const BlockScale<float, int32_t>& scale) const {
        const int64_t i =
            lane * direction.scale_lane_step + position * direction.scale_position_step;
        if (layout.scale == LevelScale::float32)
            static_cast<int32_t*>(direction.scales)[i] = scale.stored;
        else
            static_cast<uint8_t*>(direction.scales)[i] = static_cast<uint8_t>(scale.stored);
    }

    // Writes codes by position, or leaves them in shared memory by lane.
    template <class Thread>
    OTTAVA_DEVICE void encode(const Thread& thread, Shared& shared, const LevelTile& tile) const {
        const int inner = thread.lane(), first = thread.warp() * kChunk;
        const int64_t lane = tile.lane + inner;
        const float multiplier = shared.multipliers[thread.warp()][inner];
        uint32_t word = 0;
#pragma unroll 1
        for (int p = first; p < first + kChunk; p += 4) {
            float x[4];
            uint32_t words[4] = {}, codes = 0;
#pragma unroll
            for (int k = 0; k < 4; ++k) x[k] = multiply(shared.values[p + k][inner], multiplier);
            if (layout.stochastic)
                random_words(static_cast<uint64_t>(*seed), place_of(lane, tile.position + p),
                             static_cast<uint64_t>(direction.place_position_step), direction.stream,
                             words);
            with_level_element(layout.element, [&](auto format) {
                codes = encode_four<decltype(format)>(x, layout.stochastic, words);
            });
            if (direction.by_position)
                write_positions(lane, tile.position + p, codes);
            else if (!packed)
                shared.codes[inner][p / 4] = codes;
            else
                word = word >> 16 | pack(codes) << 16;
            // A word has eight codes of four bits.
            if (packed && p % 8 == 4) shared.codes[inner][p / 8] = word;
        }
    }

    OTTAVA_DEVICE uint64_t place_of(int64_t lane, int64_t position) const {
        return direction.first_place +
               static_cast<uint64_t>(lane * direction.place_lane_step +
                                     position * direction.place_position_step);
    }

    // Two codes in a byte, four in the low half of a word.
    static OTTAVA_DEVICE uint32_t pack(uint32_t codes) {
        return (codes & 0xf) | (codes >> 4 & 0xf0) | (codes >> 8 & 0xf00) | (codes >> 12 & 0xf000);
    }

    OTTAVA_DEVICE void write_positions(int64_t lane, int64_t position, uint32_t codes) const {
        if (lane >= direction.lanes) return;
#pragma unroll
        for (int k = 0; k < 4; ++k)
            if (position + k < direction.stored)
                direction.data[(position + k) * direction.data_step + lane] =
                    static_cast<uint8_t>(codes >> (8 * k));
    }

    // Writes the codes of lanes from shared memory, each with a warp.
    template <class Thread>
    OTTAVA_DEVICE void write_lanes(const Thread& thread, const Shared& shared,
                                   const LevelTile& tile) const {
        const int per_byte = packed ? 2 : 1;
        const int64_t rest = levels_count(direction.stored - tile.position, per_byte);
        const int count =
            rest < kLevelPositions / per_byte ? static_cast<int>(rest) : kLevelPositions / per_byte;
        for (int inner = thread.warp(); inner < kLevelLanes; inner += kChunks) {
            const int64_t lane = tile.lane + inner;
            if (lane >= direction.lanes) break;
            const uint32_t* from = shared.codes[inner];
            uint8_t* to = direction.data + lane * direction.data_step + tile.position / per_byte;
            const int words = wide_data ? count / 4 : 0;
            if (thread.lane() < words)
                reinterpret_cast<uint32_t*>(to)[thread.lane()] = from[thread.lane()];
            for (int i = 4 * words + thread.lane(); i < count; i += kWarp)
                to[i] = static_cast<uint8_t>(from[i / 4] >> (8 * (i % 4)));
        }
    }
};

// -- decoding --

// Elements of any format by the numbers of their codes, in runs of eight.
template <class Target>
struct DecodeLevels {
    static constexpr int kThreads = kLevelThreads, kBlocksPerMultiprocessor = 4;
    static constexpr int64_t kRun = kGroup, kEach = kRun * kThreads;
    struct Shared {
        float numbers[256];
    };
    LevelsData from;
    LevelScale scale;
    bool packed;
    float top;
    void* out;
    bool by_row, by_column;  // whether amaxes of the second level are those of rows or columns
    float numbers[256];      // of codes

    template <class Thread>
    OTTAVA_DEVICE void operator()(const Thread& thread, Shared& shared) const {
        static_assert(kThreads == 256, "a thread for each code");
        shared.numbers[thread.index()] = numbers[thread.index()];
        thread.barrier();
        const int64_t count = from.rows * from.cols;
        const int64_t first = thread.block() * kEach + thread.index() * kRun;
        if (first >= count) return;
        int64_t row = first / from.cols, col = first % from.cols;
        float factor = factor_of(row, col), value = scale_value(row, col);
        for (int64_t i = first; i < first + kRun && i < count; ++i) {
            float x = multiply(shared.numbers[code_of(i)], value);
            put(i, multiply(x, factor));
            if (++col == from.cols) col = 0, ++row;
            if (i + 1 == count) break;
            if (col == 0 || by_column) factor = factor_of(row, col);
            if (col == 0 || (from.block_cols != 0 && col % from.block_cols == 0))
                value = scale_value(row, col);
        }
    }

private:
    OTTAVA_DEVICE int code_of(int64_t i) const {
        if (!packed) return from.data[i];
        return from.data[i / 2] >> (i % 2 * 4) & 0xf;
    }

    OTTAVA_DEVICE float factor_of(int64_t row, int64_t col) const {
        if (from.amaxes == nullptr) return 1.0f;
        const int64_t number = by_column ? col : by_row ? row : 0;
        return divide(from.amaxes[number], top);
    }

    OTTAVA_DEVICE float scale_value(int64_t row, int64_t col) const {
        if (from.scales == nullptr) return 1.0f;
        const int64_t down = from.block_rows == 0 ? 0 : row / from.block_rows;
        const int64_t right = from.block_cols == 0 ? 0 : col / from.block_cols;
        const int64_t across = from.block_cols == 0 ? 1 : levels_count(from.cols, from.block_cols);
        const int64_t i = down * across + right;
        if (scale == LevelScale::float32) return static_cast<const float*>(from.scales)[i];
        const int32_t code = static_cast<const uint8_t*>(from.scales)[i];
        if (scale == LevelScale::e8m0) return e8m0_value<float, int32_t>(code);
        if (scale == LevelScale::e4m3) return widen<E4M3, float, int32_t>(code);
        return widen<UE5M3, float, int32_t>(code);
    }

    OTTAVA_DEVICE void put(int64_t i, float value) const;
};

template <>
OTTAVA_DEVICE void DecodeLevels<Float32>::put(int64_t i, float value) const {
    // Which NaN a product is differs between machines.
    static_cast<float*>(out)[i] = value == value ? value : bits_as<float>(kQuietNan);
}
template <>
OTTAVA_DEVICE void DecodeLevels<BFloat16>::put(int64_t i, float value) const {
    static_cast<uint16_t*>(out)[i] = to_bfloat16(value);
}
template <>
OTTAVA_DEVICE void DecodeLevels<Float16>::put(int64_t i, float value) const {
    static_cast<uint16_t*>(out)[i] = to_half(value);
}

}  // namespace ottava::cuda
