// Kernels over panels: the decoding of blocks of any size. Include once, after mx_decode.h and
// grid_cast.h.

// The float32 scales of a panel's columns, computed again for each row of blocks.
class DecodeScales {
    const GridPanel& panel_;
    const GridScales& scales_;
    int64_t end_ = 0;  // the row that follows those whose scales are known
    alignas(64) float columns_[kPanelCols];

    float value(int64_t at) const {
        return scales_.e8m0 == nullptr ? scales_.blocks.values[at]
                                       : e8m0_value<float, int32_t>(scales_.e8m0[at]);
    }

public:
    DecodeScales(const GridPanel& panel, const GridScales& scales)
        : panel_(panel), scales_(scales) {}
    const float* of_row(int64_t r) {
        const GridBlocks& blocks = scales_.blocks;
        if (r < end_) return columns_;
        const int64_t row = row_of_blocks(panel_, blocks, r);
        end_ = end_of_blocks(panel_, blocks, row);
        over_blocks(panel_, blocks.cols, [&](int64_t block, int64_t first, int64_t last) {
            const float scale = value(row * blocks.stride + block);
            for (int64_t col = first; col < last; ++col) columns_[col] = scale;
        });
        return columns_;
    }
};

template <class Format, class Out>
void grid_decode_typed(const GridPanel& panel, const GridScales& scales, Out* out, Dtype dtype) {
    DecodeScales columns(panel, scales);
    const auto* data = static_cast<const uint8_t*>(panel.src);
    for (int64_t r = 0; r < panel.rows; ++r, data += panel.stride, out += panel.stride) {
        const float* factors = columns.of_row(r);
        int64_t col = 0;
        for (; col + kLanes <= panel.cols; col += kLanes)
            decode_vector<Format>(load_data(data + col), load<f32v>(factors + col), out + col,
                                  dtype);
        if (col == panel.cols) continue;
        const auto count = static_cast<size_t>(panel.cols - col);
        uint8_t last[kLanes] = {};
        float last_factors[kLanes] = {};
        Out results[kLanes];
        memcpy(last, data + col, count);
        memcpy(last_factors, factors + col, count * sizeof(float));
        decode_vector<Format>(load_data(last), load<f32v>(last_factors), results, dtype);
        memcpy(out + col, results, count * sizeof(Out));
    }
}

void grid_decode_run(const GridPanel& panel, Stored element, const GridScales& scales, void* out,
                     Dtype dtype) {
    with_format(element, [&](auto format) {
        if (dtype == Dtype::float32)
            grid_decode_typed<decltype(format)>(panel, scales, static_cast<uint32_t*>(out), dtype);
        else
            grid_decode_typed<decltype(format)>(panel, scales, static_cast<uint16_t*>(out), dtype);
    });
}
