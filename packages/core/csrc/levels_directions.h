// What the backends' hosts compute alike: the directions of a matrix, and the numbers of codes.
#pragma once

#include <cstdint>

#include "levels.h"

namespace ottava {

// Whether both directions of a layout have the same scales.
static inline bool has_squares(const LevelsLayout& layout) {
    return layout.area.lanes == layout.area.positions;
}

// What an infinite float32 scale becomes.
static inline float largest_scale(const LevelsLayout& layout, Dtype dtype) {
    if (!layout.finite_as_input || dtype == Dtype::float32) return bits_as<float>(kLargestFinite);
    return dtype == Dtype::float16 ? 65504.0f : bits_as<float>(0x7f7f0000);
}

// A direction without its amaxes and factors. `first_row` is the row of a larger matrix that is the
// first one of this.
static inline LevelsDirection levels_direction(const LevelsLayout& layout, const void* src,
                                               Dtype dtype, int64_t rows, int64_t cols,
                                               int64_t first_row, bool columnwise,
                                               const LevelsResults& results) {
    LevelsDirection to{};
    to.src = src, to.dtype = dtype, to.columnwise = columnwise;
    to.lanes = columnwise ? cols : rows, to.positions = columnwise ? rows : cols;
    to.rotated = layout.rotation != 0 && layout.rotated[columnwise];
    to.stored =
        to.rotated ? levels_count(to.positions, layout.rotation) * layout.rotation : to.positions;
    to.lane_step = columnwise ? 1 : cols, to.position_step = columnwise ? cols : 1;
    to.largest = largest_scale(layout, dtype);
    // Both directions of squares are rounded alike.
    to.stream = columnwise && !has_squares(layout) ? 1 : 0;
    to.place_lane_step = columnwise ? 1 : to.stored;
    to.place_position_step = to.position_step;
    const int64_t row_step = columnwise ? to.place_position_step : to.place_lane_step;
    to.first_place = static_cast<uint64_t>(first_row) * static_cast<uint64_t>(row_step);
    const int64_t across = levels_count(to.stored, layout.block.positions);
    const int64_t down = levels_count(to.lanes, layout.block.lanes);
    to.data = results.data, to.scales = results.scales;
    to.by_position = columnwise && !layout.turned;
    to.data_step =
        to.by_position ? cols : levels_count(to.stored, elements_per_byte(layout.element));
    to.scale_lane_step = to.by_position ? 1 : across;
    to.scale_position_step = to.by_position ? down : 1;
    // Areas are numbered along the rows of the matrix.
    const int64_t wide = columnwise ? layout.area.lanes : layout.area.positions;
    to.area_lane_step = columnwise ? 1 : levels_count(cols, wide);
    to.area_position_step = columnwise ? levels_count(cols, wide) : 1;
    return to;
}

// The number that each byte is as an element.
static inline void numbers_of_codes(LevelElement element, float (&out)[256]) {
    with_level_element(element, [&](auto format) {
        typedef decltype(format) Format;
        for (int32_t code = 0; code < 256; ++code) {
            if constexpr (is_integer<Format>)
                out[code] = widen_integer<Format, float, int32_t>(code);
            else
                out[code] = widen<Format, float, int32_t>(code);
        }
    });
}

}  // namespace ottava
