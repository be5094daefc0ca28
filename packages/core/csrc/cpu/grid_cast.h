// Kernels over panels: the scales of blocks of any size, and the cast with them. Include once,
// after grid_amax.h and tiles.h.

template <class Format>
OTTAVA_INLINE void grid_scales_format(const float* amax, int64_t n, const ScaleRule rule,
                                      float* multipliers, void* scales) {
    if (rule.e8m0) {
        for (int64_t i = 0; i < n; i += kLanes) {
            const f32v x = load<f32v>(amax + i);
            const i32v code =
                rule.floor ? e8m0_floor<Format, f32v, i32v>(x) : e8m0_up<Format, f32v, i32v>(x);
            store(multipliers + i, e8m0_multiplier<f32v, i32v>(code));
            store_data(static_cast<uint8_t*>(scales) + i, code);
        }
        return;
    }
    for (int64_t i = 0; i < n; i += kLanes) {
        const f32v scale = scale_of<f32v, i32v>(load<f32v>(amax + i), Format::maximum, rule);
        store(multipliers + i, scale);
        store(static_cast<float*>(scales) + i, broadcast(1.0f) / scale);
    }
}

// The multipliers of a panel's lines, where blocks end where half-lines end.
class HalvesOfRow {
    const GridPanel& panel_;
    const GridBlocks& blocks_;
    const int64_t first_;  // block of a row
    int64_t end_ = 0;      // the row that follows those whose multipliers are known
    RowLines known_{};
    // For each half-line, and for the one that follows the last: its block, counted from `first_`,
    // and the multiplier of the block.
    uint16_t index_[kHalves + 1];
    float values_[kHalves + 1];

public:
    HalvesOfRow(const GridPanel& panel, const GridBlocks& blocks)
        : panel_(panel), blocks_(blocks), first_(panel.col / blocks.cols) {
        over_blocks(panel, blocks.cols, [&](int64_t block, int64_t first, int64_t last) {
            for (int64_t half = first / kHalf; half <= (last + kHalf - 1) / kHalf; ++half)
                index_[half] = static_cast<uint16_t>(block - first_);
        });
    }
    // Rows are requested in their order.
    OTTAVA_INLINE RowLines begin(int64_t r) {
        if (r < end_) return known_;
        const int64_t row = row_of_blocks(panel_, blocks_, r);
        const float* values = blocks_.values + row * blocks_.stride + first_;
        end_ = end_of_blocks(panel_, blocks_, row);
        if (blocks_.cols == kHalf) return known_ = {values};
        known_ = {values_};
        for (int64_t half = 0; half <= (panel_.cols + kHalf - 1) / kHalf; ++half)
            values_[half] = values[index_[half]];
        return known_;
    }
};

// The multipliers of a panel's lines, where blocks end anywhere: one for each column, computed
// again for each row of blocks.
template <class Arrange>
class EachOfRow {
    const GridPanel& panel_;
    const GridBlocks& blocks_;
    int64_t end_ = 0;
    ColumnLines known_{};
    alignas(64) float in_order_[kPanelCols];
    alignas(64) float arranged_[kPanelCols];

public:
    EachOfRow(const GridPanel& panel, const GridBlocks& blocks) : panel_(panel), blocks_(blocks) {}
    OTTAVA_INLINE ColumnLines begin(int64_t r) {
        if (r < end_) return known_;
        const int64_t row = row_of_blocks(panel_, blocks_, r);
        const float* values = blocks_.values + row * blocks_.stride;
        end_ = end_of_blocks(panel_, blocks_, row);
        known_ = {in_order_, Arrange::arranges ? arranged_ : in_order_};
        if (!Arrange::arranges && blocks_.cols == 1)
            return known_ = {values + panel_.col, values + panel_.col};
        if (blocks_.cols == 1)
            memcpy(in_order_, values + panel_.col,
                   static_cast<size_t>(panel_.cols) * sizeof(float));
        else
            over_blocks(panel_, blocks_.cols, [&](int64_t block, int64_t first, int64_t last) {
                for (int64_t col = first; col < last; ++col) in_order_[col] = values[block];
            });
        int64_t end = panel_.cols;
        for (; end % kLine != 0; ++end) in_order_[end] = 1.0f;
        for (int64_t col = 0; Arrange::arranges && col < end; col += kLine)
            Arrange::arrange(in_order_ + col, arranged_ + col);
        return known_;
    }
};

// The multipliers of a panel's lines, where blocks of one row end where half-lines end, and the
// panel has all of their elements. A row's scales are computed just before the row is cast, and the
// cast then reads the row from the first-level cache.
template <class Element, class Format>
class FoundByRow {
    PanelAmax<Element> amax_;
    HalvesOfRow halves_;
    const GridPanel& panel_;
    const GridRows& rows_;

public:
    FoundByRow(const GridPanel& panel, const GridRows& rows)
        : amax_(panel, rows.amaxes, rows.count, false),
          halves_(panel, rows.multipliers),
          panel_(panel),
          rows_(rows) {}
    OTTAVA_INLINE RowLines begin(int64_t r) {
        amax_.observe_row(r);
        const int64_t at = (panel_.row + r) * rows_.multipliers.stride;
        const int64_t size = rows_.rule->e8m0 ? 1 : sizeof(float);
        grid_scales_format<Format>(rows_.amaxes[0].values + at, rows_.multipliers.stride,
                                   *rows_.rule, rows_.multipliers.values + at,
                                   rows_.scales + at * size);
        return halves_.begin(r);
    }
};

template <class Element, class Format, class Multipliers>
struct GridFill {
    const typename Element::storage* src;
    int64_t stride, first;  // of the panel's rows
    int64_t ahead;
    const LineCast<Element, Format> cast64;
    Multipliers* multipliers;
    bool positive;

    const typename Element::storage* at(int64_t row, int64_t col) const {
        return src + (first + row) * stride + col;
    }

    OTTAVA_INLINE auto begin(int64_t row) const { return multipliers->begin(first + row); }
    OTTAVA_INLINE void prefetch(int64_t, int64_t) const {}
    template <class Lines>
    OTTAVA_INLINE Line line(int64_t row, int64_t col, const Lines& lines) const {
        constexpr int64_t step = kLine / sizeof(*src);
        if (ahead != 0)
            for (int64_t k = 0; k < kLine; k += step)
                __builtin_prefetch(at(row, col + k) + ahead, 0, 2);
        const auto factors = lines.at(col);
        if (__builtin_expect(!positive, 0)) return cast64.generic(at(row, col), factors);
        return cast64.scaled(at(row, col), factors);
    }
    // Casts fewer than 16 elements through buffers, so that no byte outside the run is touched.
    template <class Lines>
    OTTAVA_INLINE void partial(int64_t row, int64_t col, int64_t n, uint8_t* out,
                               const Lines& lines) const {
        typename Element::storage in[16] = {};
        memcpy(in, at(row, col), static_cast<size_t>(n) * sizeof(in[0]));
        const int64_t line = col / kLine * kLine;
        const u8x16 bytes =
            cast16<Element, Format>(in, lines.at(line), static_cast<int>(col - line));
        memcpy(out, &bytes, static_cast<size_t>(n));
    }
};

template <class Element, class Format, class Multipliers>
void grid_cast_with(const GridPanel& panel, Multipliers&& multipliers, bool positive,
                    const GridOut& to) {
    const auto* src = static_cast<const typename Element::storage*>(panel.src);
    const int64_t height = to.columns == nullptr ? panel.rows : kTileRows;
    for (int64_t row = 0; row < panel.rows; row += height) {
        Tile tile{};
        tile.rows = panel.rows - row < height ? panel.rows - row : height;
        tile.cols = panel.cols;
        tile.out = to.rows == nullptr ? nullptr : to.rows + row * to.stride;
        tile.out_again = to.rows_again == nullptr ? nullptr : to.rows_again + row * to.stride;
        tile.out_stride = to.stride;
        tile.out_t = to.columns == nullptr ? nullptr : to.columns + row;
        tile.out_t_stride = to.columns_stride;
        tile.stream = to.stream;
        const LineCast<Element, Format> cast64(1.0f);
        tile_with(tile, GridFill<Element, Format, Multipliers>{src, panel.stride, row, panel.ahead,
                                                               cast64, &multipliers, positive});
    }
}

template <class Element, class Format>
void grid_cast_typed(const GridPanel& panel, const GridBlocks& blocks, bool positive,
                     const GridOut& to) {
    if (ends_with_halves(panel, blocks.cols))
        grid_cast_with<Element, Format>(panel, HalvesOfRow(panel, blocks), positive, to);
    else
        grid_cast_with<Element, Format>(panel, EachOfRow<LineCast<Element, Format>>(panel, blocks),
                                        positive, to);
}

// Calls run(format) with the type of an element format.
template <class Run>
OTTAVA_INLINE void with_format(Stored element, const Run& run) {
    switch (element) {
        case Stored::e4m3:
            return run(E4M3());
        case Stored::e5m2:
            return run(E5M2());
        default:
            return run(Int8());
    }
}

void grid_scales_run(const float* amax, int64_t n, Stored element, const ScaleRule& rule,
                     float* multipliers, void* scales) {
    with_format(element, [&](auto format) {
        grid_scales_format<decltype(format)>(amax, n, rule, multipliers, scales);
    });
}

// Calls run(source, format) with the types of a dtype and an element format.
template <class Run>
OTTAVA_INLINE void with_types(Dtype dtype, Stored element, const Run& run) {
    with_format(element, [&](auto format) {
        switch (dtype) {
            case Dtype::float32:
                return run(Float32(), format);
            case Dtype::bfloat16:
                return run(BFloat16(), format);
            default:
                return run(Float16(), format);
        }
    });
}

void grid_cast_run(const GridPanel& panel, Dtype dtype, const GridBlocks& blocks, bool positive,
                   Stored element, const GridOut& to) {
    with_types(dtype, element, [&](auto source, auto format) {
        grid_cast_typed<decltype(source), decltype(format)>(panel, blocks, positive, to);
    });
}

void grid_rows_run(const GridPanel& panel, Dtype dtype, const GridRows& rows, Stored element,
                   const GridOut& to) {
    with_types(dtype, element, [&](auto source, auto format) {
        typedef decltype(source) Element;
        typedef decltype(format) Format;
        grid_cast_with<Element, Format>(panel, FoundByRow<Element, Format>(panel, rows), true, to);
    });
}
