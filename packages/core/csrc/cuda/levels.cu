// Operations on layouts of levels_jobs.h: quantization and decoding.
#include "levels.h"

#include "../levels_directions.h"
#include "launch.h"
#include "operations.h"

namespace ottava::cuda {
namespace {

// The parts of the scratch memory, in floats: the amaxes of areas and of the second level of each
// direction, and the factors of squares.
struct LevelScratch {
    int64_t areas[2], second[2], factors;

    LevelScratch(const LevelsLayout& layout, int64_t rows, int64_t cols) {
        const LevelsBlock& area = layout.area;
        const bool has_areas = area.lanes > 1, squares = has_squares(layout);
        for (int d = 0; d < 2; ++d) {
            const int64_t lanes = d == 0 ? rows : cols, positions = d == 0 ? cols : rows;
            const int64_t count = ceil_div(lanes, area.lanes) * ceil_div(positions, area.positions);
            areas[d] = has_areas && (d == 0 || !squares) ? count : 0;
            second[d] = layout.second == SecondLevel::none ? 0 : 1;
            if (layout.second == SecondLevel::row) second[d] = lanes;
        }
        factors = squares && layout.candidate_count > 0 ? areas[0] : 0;
    }
    int64_t total() const { return areas[0] + areas[1] + second[0] + second[1] + factors; }
};

class LevelsQuantization {
    const LevelsLayout& layout_;
    const int64_t* const seed_;
    const LevelsResults* const results_;
    const Stream stream_;
    const bool squares_, wide_;
    LevelsDirection directions_[2];
    bool wanted_[2];
    float *areas_[2], *second_[2], *factors_;

    // The amaxes of areas of several lanes, and of the second level, come from earlier launches.
    // Both directions of squares share the first ones, and directions that are not rotated the amax
    // of the tensor.
    void find_amaxes(int d) {
        LevelsDirection& direction = directions_[d];
        const LevelsDirection& rows = directions_[0];
        const bool after_rows = d == 1 && wanted_[0];
        float *areas = nullptr, *second = nullptr;
        if (layout_.area.lanes > 1) {
            float* const all = areas_[squares_ ? 0 : d];
            if (!(after_rows && squares_)) areas = all;
            direction.amaxes = all;
        }
        if (layout_.second != SecondLevel::none) {
            const bool alike = !direction.rotated && !rows.rotated;
            const bool shared = after_rows && alike && layout_.second == SecondLevel::tensor;
            if (!shared) second = second_[d];
            direction.second = shared ? rows.second : second;
        }
        if (areas == nullptr && second == nullptr) return;
        launch(LevelAmaxes{layout_, direction, wide_, areas, second},
               level_tiles(direction, kLevelLanes), stream_);
    }

    // The candidates of squares. The rows of the tensor choose for both directions.
    void choose() {
        if (!squares_ || layout_.candidate_count == 0) return;
        const LevelsDirection& any = directions_[wanted_[0] ? 0 : 1];
        LevelsDirection rows = directions_[0];
        rows.second = any.second, rows.amaxes = any.amaxes;
        const int64_t height = ChooseLevels::height_of(layout_.area.lanes);
        launch(ChooseLevels{layout_, rows, wide_, factors_}, level_tiles(rows, height), stream_);
        for (LevelsDirection& direction : directions_) direction.factors = factors_;
    }

public:
    LevelsQuantization(const LevelsLayout& layout, const void* src, Dtype dtype, int64_t rows,
                       int64_t cols, const int64_t* seed, int64_t first_row,
                       const LevelsResults* results, float* scratch, Stream stream)
        : layout_(layout),
          seed_(seed),
          results_(results),
          stream_(stream),
          squares_(has_squares(layout)),
          wide_(cols % kGroup == 0 && aligned(src, 16)) {
        const LevelScratch parts(layout, rows, cols);
        areas_[0] = scratch, areas_[1] = areas_[0] + parts.areas[0];
        second_[0] = areas_[1] + parts.areas[1], second_[1] = second_[0] + parts.second[0];
        factors_ = second_[1] + parts.second[1];
        for (int d = 0; d < 2; ++d) {
            wanted_[d] = results[d].data != nullptr;
            directions_[d] =
                levels_direction(layout, src, dtype, rows, cols, first_row, d == 1, results[d]);
        }
    }

    void run() {
        for (int d = 0; d < 2; ++d)
            if (wanted_[d]) find_amaxes(d);
        choose();
        for (int d = 0; d < 2; ++d) {
            if (!wanted_[d]) continue;
            const LevelsDirection& direction = directions_[d];
            const bool wide_data = aligned(direction.data, 4) && direction.data_step % 4 == 0;
            const bool packed = elements_per_byte(layout_.element) == 2;
            launch(QuantizeLevels{layout_, direction, wide_, wide_data, packed, seed_,
                                  results_[d].amaxes},
                   level_tiles(direction, kLevelLanes), stream_);
        }
    }
};

}  // namespace

int64_t levels_scratch(const LevelsLayout& layout, int64_t rows, int64_t cols) {
    return LevelScratch(layout, rows, cols).total();
}

void levels_quantize(const LevelsLayout& layout, const void* src, Dtype dtype, int64_t rows,
                     int64_t cols, const int64_t* seed, int64_t first_row,
                     const LevelsResults* results, float* scratch, Stream stream) {
    if (rows * cols == 0) return;
    LevelsQuantization(layout, src, dtype, rows, cols, seed, first_row, results, scratch, stream)
        .run();
}

void levels_decode(const LevelsLayout& layout, const LevelsData& from, void* out, Dtype dtype,
                   Stream stream) {
    const bool of_lanes = layout.second == SecondLevel::row;
    with_source(dtype, [&](auto target) {
        typedef DecodeLevels<decltype(target)> Kernel;
        Kernel kernel{from, layout.scale, elements_per_byte(layout.element) == 2, layout.top, out};
        kernel.by_column = of_lanes && from.by_column;
        kernel.by_row = of_lanes && !from.by_column;
        numbers_of_codes(layout.element, kernel.numbers);
        launch(kernel, ceil_div(from.rows * from.cols, Kernel::kEach), stream);
    });
}

}  // namespace ottava::cuda
