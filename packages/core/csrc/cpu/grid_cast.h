// Kernels over panels: the scales of blocks of any size, and the cast with them. Include once, after grid_amax.h and
// tiles.h.

template <class Format>
void grid_scales_format(const float* amax, int64_t n, const ScaleRule& rule, float* multipliers, void* scales) {
    for (int64_t i = 0; i < n; i += kLanes) {
        const f32v x = load<f32v>(amax + i);
        if (rule.e8m0) {
            const i32v code = rule.floor ? e8m0_floor<Format, f32v, i32v>(x) : e8m0_up<Format, f32v, i32v>(x);
            store(multipliers + i, e8m0_multiplier<f32v, i32v>(code));
            store_codes(static_cast<uint8_t*>(scales) + i, code);
        } else {
            const f32v scale = scale_of<f32v, i32v>(x, Format::maximum, rule);
            store(multipliers + i, scale);
            store(static_cast<float*>(scales) + i, broadcast(1.0f) / scale);
        }
    }
}

// The multipliers of a panel's lines, where blocks end with half-lines.
class HalvesOfRow {
    const GridPanel& panel_;
    const GridBlocks& blocks_;
    const float* row_ = nullptr;
    uint16_t index_[kHalves + 1];  // the blocks of half-lines, counted from the panel's first

   public:
    HalvesOfRow(const GridPanel& panel, const GridBlocks& blocks) : panel_(panel), blocks_(blocks) {
        const int64_t first_block = panel.col / blocks.cols;
        over_blocks(panel, blocks.cols, [&](int64_t block, int64_t first, int64_t last) {
            // The half-line that follows the last one may be asked for.
            for (int64_t half = first / kHalf; half <= (last + kHalf - 1) / kHalf; ++half)
                index_[half] = static_cast<uint16_t>(block - first_block);
        });
    }
    OTTAVA_INLINE void begin(int64_t r) {
        row_ = blocks_.values + (panel_.row + r) / blocks_.rows * blocks_.stride + panel_.col / blocks_.cols;
    }
    OTTAVA_INLINE RowMultipliers at(int64_t line) const {
        return {{row_[index_[line / kHalf]], row_[index_[line / kHalf + 1]]}};
    }
};

// Where they end anywhere: one for each column, made anew for each row of blocks.
template <class Arrange>
class EachOfRow {
    const GridPanel& panel_;
    const GridBlocks& blocks_;
    int64_t known_ = -1;
    alignas(64) float in_order_[kPanelCols];
    alignas(64) float arranged_[kPanelCols];

   public:
    EachOfRow(const GridPanel& panel, const GridBlocks& blocks) : panel_(panel), blocks_(blocks) {}
    OTTAVA_INLINE void begin(int64_t r) {
        const int64_t row = (panel_.row + r) / blocks_.rows;
        if (row == known_) return;
        known_ = row;
        const float* values = blocks_.values + row * blocks_.stride;
        int64_t end = 0;
        over_blocks(panel_, blocks_.cols, [&](int64_t block, int64_t first, int64_t last) {
            for (int64_t col = first; col < last; ++col) in_order_[col] = values[block];
            end = last;
        });
        for (; end % kLine != 0; ++end) in_order_[end] = 1.0f;
        for (int64_t col = 0; col < end; col += kLine) Arrange::arrange(in_order_ + col, arranged_ + col);
    }
    OTTAVA_INLINE ColumnMultipliers at(int64_t line) const { return {in_order_ + line, arranged_ + line}; }
};

template <class Element, class Format, class Multipliers>
struct GridFill {
    const typename Element::storage* src;
    int64_t stride, first;  // of the panel's rows
    const LineCast<Element, Format> cast64;
    Multipliers* multipliers;
    bool positive;

    const typename Element::storage* at(int64_t row, int64_t col) const { return src + (first + row) * stride + col; }

    OTTAVA_INLINE void begin(int64_t row) const { multipliers->begin(first + row); }
    OTTAVA_INLINE void prefetch(int64_t row, int64_t col) const {
        constexpr int64_t step = kLine / sizeof(*src);
        for (int64_t k = 0; k < kLine; k += step) __builtin_prefetch(at(row, col + k));
    }
    OTTAVA_INLINE Line line(int64_t row, int64_t col) const {
        const auto factors = multipliers->at(col);
        if (__builtin_expect(!positive, 0)) return cast64.generic(at(row, col), factors);
        return cast64.scaled(at(row, col), factors);
    }
    // Fewer than 16 elements, through buffers: no byte outside the run is touched.
    OTTAVA_INLINE void partial(int64_t row, int64_t col, int64_t n, uint8_t* out) const {
        typename Element::storage in[16] = {};
        memcpy(in, at(row, col), static_cast<size_t>(n) * sizeof(in[0]));
        const int64_t line = col / kLine * kLine;
        const u8x16 bytes = cast16<Element, Format>(in, multipliers->at(line), static_cast<int>(col - line));
        memcpy(out, &bytes, static_cast<size_t>(n));
    }
};

template <class Element, class Format, class Multipliers>
void grid_cast_with(const GridPanel& panel, const GridBlocks& blocks, bool positive, const GridOut& to) {
    Multipliers multipliers(panel, blocks);
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
        tile_with(tile, GridFill<Element, Format, Multipliers>{src, panel.stride, row, LineCast<Element, Format>(1.0f),
                                                               &multipliers, positive});
    }
}

template <class Element, class Format>
void grid_cast_typed(const GridPanel& panel, const GridBlocks& blocks, bool positive, const GridOut& to) {
    if (ends_with_halves(panel, blocks.cols))
        grid_cast_with<Element, Format, HalvesOfRow>(panel, blocks, positive, to);
    else
        grid_cast_with<Element, Format, EachOfRow<LineCast<Element, Format>>>(panel, blocks, positive, to);
}

// What run(format) returns, for the format of `element`.
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

void grid_scales_run(const float* amax, int64_t n, Stored element, const ScaleRule& rule, float* multipliers,
                     void* scales) {
    with_format(element, [&](auto format) {
        grid_scales_format<decltype(format)>(amax, n, rule, multipliers, scales);
    });
}

void grid_cast_run(const GridPanel& panel, Dtype dtype, const GridBlocks& blocks, bool positive, Stored element,
                   const GridOut& to) {
    with_format(element, [&](auto format) {
        typedef decltype(format) Format;
        if (dtype == Dtype::float32)
            grid_cast_typed<Float32, Format>(panel, blocks, positive, to);
        else if (dtype == Dtype::bfloat16)
            grid_cast_typed<BFloat16, Format>(panel, blocks, positive, to);
        else
            grid_cast_typed<Float16, Format>(panel, blocks, positive, to);
    });
}
