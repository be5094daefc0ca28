// The operations on layouts of levels_jobs.h: the amaxes that blocks do not find themselves, and
// the division of a matrix into strips. There is no arithmetic on elements here.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "../levels.h"
#include "../levels_directions.h"
#include "kernels.h"
#include "levels_kernels.h"
#include "parallel.h"

namespace ottava {
namespace {

constexpr int64_t kTile = kStripPositions;

// Raises a number that is not negative, which other threads may raise at the same time. The bits of
// such numbers are ordered as the numbers are.
void raise_to(float* to, float value) {
    auto* bits = reinterpret_cast<int32_t*>(to);
    const auto next = bits_as<int32_t>(value);
    int32_t current = __atomic_load_n(bits, __ATOMIC_RELAXED);
    while (next > current && !__atomic_compare_exchange_n(bits, &current, next, true,
                                                          __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
}

void nothing(const LevelsStrip&) {}

class LevelsQuantization {
    const LevelsLayout& layout_;
    const void* const src_;
    const Dtype dtype_;
    const int64_t rows_, cols_;
    const uint64_t seed_;
    const int threads_;
    const LevelsKernels& kernels_ = *active_kernels().levels;
    LevelsDirection directions_[2];
    bool wanted_[2];
    std::vector<float> second_[2], areas_[2], factors_;

    // Calls body(direction, strip) for the strips of all wanted directions, tile by tile,
    // so that both directions read a tile while it is in the caches. Before that it calls
    // begin_tile(tile) for the place of a tile in the matrix.
    template <class Begin, class Body>
    void over_strips(const bool (&wanted)[2], const Begin& begin_tile, const Body& body) const {
        const int64_t down = ceil_div(rows_, kTile), across = ceil_div(cols_, kTile);
        const auto start = [&](int64_t i, int64_t* first) {
            first[0] = i / across * kTile, first[1] = i % across * kTile;
        };
        const auto tile = [&](int64_t i, int64_t next) {
            int64_t first[2], then[2];
            start(i, first), start(next, then);
            // The direction that comes first reads the next tile into the caches.
            int64_t ahead = (then[0] - first[0]) * cols_ + then[1] - first[1];
            const int64_t size[2] = {std::min(kTile, rows_ - first[0]),
                                     std::min(kTile, cols_ - first[1])};
            begin_tile(LevelsStrip{first[0], first[1], size[0], size[1], 0});
            for (int d = 0; d < 2; ++d) {
                for (int64_t lane = 0; wanted[d] && lane < size[d]; lane += kStripLanes)
                    body(d, LevelsStrip{first[d] + lane, first[1 - d],
                                        std::min(kStripLanes, size[d] - lane), size[1 - d], ahead});
                if (wanted[d]) ahead = 0;
            }
        };
        in_parallel(down * across, rows_ * cols_, threads_, [&](int64_t begin, int64_t end, int) {
            for (int64_t i = begin; i < end; ++i) tile(i, std::min(i + 1, end - 1));
        });
    }

    // The amaxes of areas of several lanes, which strips do not find.
    void find_areas() {
        const LevelsBlock& area = layout_.area;
        if (area.lanes == 1) return;
        const bool same = has_squares(layout_);
        for (int d = 0; d < 2; ++d) {
            // The rows of squares choose for both directions.
            if (!wanted_[d] && !same) continue;
            const int64_t high = d == 0 ? area.lanes : area.positions;
            const int64_t wide = d == 0 ? area.positions : area.lanes;
            const int64_t across = ceil_div(cols_, wide);
            std::vector<float>& amaxes = areas_[same ? 0 : d];
            if (amaxes.empty()) {
                amaxes.resize(static_cast<size_t>(ceil_div(rows_, high) * across));
                grid_amax(src_, dtype_, rows_, cols_, high, wide, amaxes.data(), threads_);
            }
            directions_[d].amaxes = amaxes.data();
        }
    }

    // The amaxes of the second level of lanes, or of the tensor, that strips find.
    void find_second_in_strips() {
        bool wanted[2];
        for (int d = 0; d < 2; ++d) wanted[d] = wanted_[d] && second_[d].empty();
        if (!wanted[0] && !wanted[1]) return;
        const bool of_lanes = layout_.second == SecondLevel::row;
        for (int d = 0; d < 2; ++d)
            if (wanted[d])
                second_[d].assign(of_lanes ? static_cast<size_t>(directions_[d].lanes) : 1, 0.0f);
        over_strips(wanted, nothing, [&](int d, const LevelsStrip& strip) {
            float amaxes[kStripLanes];
            kernels_.amax(layout_, directions_[d], strip, amaxes);
            float* to = second_[d].data();
            if (!of_lanes) return raise_to(to, *std::max_element(amaxes, amaxes + kStripLanes));
            for (int64_t lane = 0; lane < strip.lanes; ++lane)
                raise_to(to + strip.lane + lane, amaxes[lane]);
        });
    }

    void find_second(const LevelsResults* results) {
        if (layout_.second == SecondLevel::none) return;
        if (layout_.second == SecondLevel::tensor) {
            float of_values = -1.0f;
            for (int d = 0; d < 2; ++d) {
                if (!wanted_[d] || directions_[d].rotated) continue;
                if (of_values < 0.0f) of_values = amax_of_values();
                second_[d].assign(1, of_values);
            }
        }
        find_second_in_strips();
        for (int d = 0; d < 2; ++d) {
            if (!wanted_[d]) continue;
            // An infinite amax counts as the largest float32.
            for (float& amax : second_[d]) amax = std::min(amax, bits_as<float>(kLargestFinite));
            directions_[d].second = second_[d].data();
            if (results[d].amaxes != nullptr)
                std::copy(second_[d].begin(), second_[d].end(), results[d].amaxes);
        }
    }

    // Both directions of squares take the candidates that the rows of the tensor choose.
    void choose_in_tile(const LevelsStrip& tile) {
        alignas(64) float errors[kMostCandidates * kTile / 16 * kTile] = {};
        const int64_t side = layout_.area.lanes, areas = kTile / side;
        for (int64_t lane = 0; lane < tile.lanes; lane += kStripLanes)
            kernels_.errors(
                layout_, directions_[0],
                LevelsStrip{tile.lane + lane, tile.position,
                            std::min(kStripLanes, tile.lanes - lane), tile.positions, 0},
                errors + lane);
        for (int64_t lane = 0; lane < tile.lanes; lane += side)
            for (int64_t area = 0; area * side < tile.positions; ++area)
                factors_[static_cast<size_t>((tile.lane + lane) / side * ceil_div(cols_, side) +
                                             tile.position / side + area)] =
                    least_of_candidates(errors + area * kTile + lane, areas * kTile, side);
    }

    // The factor of the candidate with the least error, the first of equal ones. Candidates have
    // errors of `rows` rows, `step` numbers after each other, which are summed by halves.
    float least_of_candidates(float* errors, int64_t step, int64_t rows) const {
        int best = 0;
        for (int n = 0; n < layout_.candidate_count; ++n) {
            float* of = errors + n * step;
            for (int64_t half = rows / 2; half > 0; half /= 2)
                for (int64_t i = 0; i < half; ++i) of[i] += of[i + half];
            if (of[0] < errors[best * step]) best = n;
        }
        return layout_.candidates[best];
    }

    void prepare_choices() {
        if (layout_.candidate_count == 0 || !has_squares(layout_)) return;
        factors_.resize(areas_[0].size());
        for (LevelsDirection& direction : directions_) direction.factors = factors_.data();
        // Squares have at most one amax of the second level, which both directions share.
        for (const auto& second : second_)
            if (!second.empty()) directions_[0].second = second.data();
    }

    float amax_of_values() const {
        float largest = 0.0f;
        const std::vector<float>& areas = areas_[areas_[0].empty() ? 1 : 0];
        if (!areas.empty()) return *std::max_element(areas.begin(), areas.end());
        amax(src_, dtype_, rows_ * cols_, &largest, threads_);
        return largest;
    }

public:
    LevelsQuantization(const LevelsLayout& layout, const void* src, Dtype dtype, int64_t rows,
                       int64_t cols, uint64_t seed, int64_t first_row, const LevelsResults* results,
                       int threads)
        : layout_(layout),
          src_(src),
          dtype_(dtype),
          rows_(rows),
          cols_(cols),
          seed_(seed),
          threads_(threads) {
        for (int d = 0; d < 2; ++d) {
            wanted_[d] = results[d].data != nullptr;
            directions_[d] =
                levels_direction(layout, src, dtype, rows, cols, first_row, d == 1, results[d]);
        }
    }

    void run(const LevelsResults* results) {
        find_areas();
        find_second(results);
        prepare_choices();
        const auto quantize = [&](int d, const LevelsStrip& strip) {
            kernels_.quantize(layout_, directions_[d], strip, seed_);
        };
        if (factors_.empty())
            over_strips(wanted_, nothing, quantize);
        else
            over_strips(wanted_, [&](const LevelsStrip& tile) { choose_in_tile(tile); }, quantize);
    }
};

template <class Body>
void with_number(LevelScale scale, const Body& body) {
    if (scale == LevelScale::e4m3)
        body(E4M3());
    else
        body(UE5M3());
}

std::vector<float> numbers_of(LevelElement element) {
    float codes[256];
    numbers_of_codes(element, codes);
    std::vector<float> values;
    for (int byte = 0; byte < 256; ++byte) {
        if (elements_per_byte(element) == 2)
            values.insert(values.end(), {codes[byte & 0xf], codes[byte >> 4]});
        else
            values.push_back(codes[byte]);
    }
    return values;
}

// The numbers of a row of stored scales.
void scale_values(LevelScale scale, const void* scales, int64_t first, int64_t count, float* out) {
    if (scale == LevelScale::float32) {
        memcpy(out, static_cast<const float*>(scales) + first,
               static_cast<size_t>(count) * sizeof(float));
        return;
    }
    const uint8_t* codes = static_cast<const uint8_t*>(scales) + first;
    if (scale == LevelScale::e8m0) {
        for (int64_t i = 0; i < count; ++i) out[i] = e8m0_value<float, int32_t>(codes[i]);
        return;
    }
    with_number(scale, [&](auto number) {
        for (int64_t i = 0; i < count; ++i)
            out[i] = widen<decltype(number), float, int32_t>(codes[i]);
    });
}

}  // namespace

void levels_quantize(const LevelsLayout& layout, const void* src, Dtype dtype, int64_t rows,
                     int64_t cols, uint64_t seed, int64_t first_row, const LevelsResults* results,
                     int threads) {
    LevelsQuantization(layout, src, dtype, rows, cols, seed, first_row, results, threads)
        .run(results);
}

void levels_decode(const LevelsLayout& layout, const LevelsData& from, void* out, Dtype dtype,
                   int threads) {
    const LevelsKernels& kernels = *active_kernels().levels;
    const std::vector<float> values = numbers_of(layout.element);
    const int per_byte = elements_per_byte(layout.element);
    const int64_t high = from.block_rows == 0 ? std::max<int64_t>(from.rows, 1) : from.block_rows;
    const int64_t wide = from.block_cols == 0 ? std::max<int64_t>(from.cols, 1) : from.block_cols;
    const int64_t across = ceil_div(from.cols, wide);
    const auto count = static_cast<size_t>(from.cols);
    const bool one_factor = layout.second != SecondLevel::row;
    std::vector<float> columns;
    if (from.amaxes != nullptr && !one_factor && from.by_column) {
        for (size_t i = 0; i < count; ++i) columns.push_back(from.amaxes[i] / layout.top);
    }
    in_parallel(from.rows, from.rows * from.cols, threads, [&](int64_t begin, int64_t end, int) {
        std::vector<float> of_blocks(static_cast<size_t>(across)), scales(count);
        for (int64_t row = begin; row < end; ++row) {
            LevelsRun run{from.data + row * (from.cols / per_byte),
                          from.cols,
                          values.data(),
                          per_byte,
                          from.scales == nullptr ? nullptr : scales.data(),
                          columns.empty() ? nullptr : columns.data(),
                          1.0f};
            if (from.amaxes != nullptr && columns.empty())
                run.factor = from.amaxes[one_factor ? 0 : row] / layout.top;
            if (from.scales != nullptr && (row == begin || row % high == 0)) {
                scale_values(layout.scale, from.scales, row / high * across, across,
                             of_blocks.data());
                for (int64_t col = 0; col < from.cols; col += wide)
                    std::fill(scales.begin() + col,
                              scales.begin() + std::min(col + wide, from.cols),
                              of_blocks[static_cast<size_t>(col / wide)]);
            }
            kernels.decode(run,
                           static_cast<uint8_t*>(out) +
                               static_cast<size_t>(row * from.cols) * element_bytes(dtype),
                           dtype);
        }
    });
}

}  // namespace ottava
