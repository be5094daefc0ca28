// Kernels over panels: the quantization of MX blocks, along rows and columns in one pass. Include once, after cast.h.
//
// A panel is one row of blocks, narrow enough to stay in the second-level cache. Its rows are read once from memory: for
// each, the largest magnitudes of its blocks, their scales, the cast along the row, all while the row is in the first
// cache; those of the columns are collected by the way. Then the columns' scales are known and the panel is cast again.

// The largest of 32 magnitudes.
template <class V>
OTTAVA_INLINE auto largest_lane(V v) {
#if defined(__AVX512BW__)
    if constexpr (sizeof(v[0]) == 4) {
        return static_cast<uint32_t>(_mm512_reduce_max_epi32(bits_as<__m512i>(v)));
    } else {
        const __m512i x = bits_as<__m512i>(v);
        const __m256i half = _mm256_max_epu16(_mm512_castsi512_si256(x), _mm512_extracti64x4_epi64(x, 1));
        const __m128i part = _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
        const __m128i smallest = _mm_minpos_epu16(_mm_xor_si128(part, _mm_set1_epi32(-1)));
        return static_cast<uint16_t>(~_mm_cvtsi128_si32(smallest));
    }
#else
#if defined(__AVX2__)
    if constexpr (sizeof(v[0]) == 2) {
        const __m256i x = bits_as<__m256i>(v);
        const __m128i part = _mm_max_epu16(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
        const __m128i smallest = _mm_minpos_epu16(_mm_xor_si128(part, _mm_set1_epi32(-1)));
        return static_cast<uint16_t>(~_mm_cvtsi128_si32(smallest));
    }
#endif
    typedef std::conditional_t<sizeof(v[0]) == 4, uint32_t, uint16_t> Storage;
    constexpr int count = sizeof(V) / sizeof(Storage);
    Storage lanes[count], result = 0;
    store(lanes, v);
    for (int k = 0; k < count; ++k) result = lanes[k] > result ? lanes[k] : result;
    return result;
#endif
}

// What is known of a panel while it is worked on.
template <class Element>
struct PanelState {
    typedef typename Element::storage Storage;
    static constexpr int64_t kBlocks = kPanelCols / kMxBlock;
    alignas(64) Storage columns[kPanelCols] = {};             // the largest magnitudes: of the columns,
    alignas(64) Storage blocks[kBlocks] = {};                 // of the blocks of a row, or of square blocks
    alignas(64) float row_multipliers[kBlocks] = {};
    alignas(64) float multipliers[kPanelCols] = {};           // of the columns, in order
    alignas(64) float arranged[kPanelCols] = {};              // and as a line's cast wants them
    alignas(64) uint8_t exponents[kPanelCols] = {};
};

// The multipliers of one line of data: one for each block of the row.
struct RowMultipliers {
    const float* blocks;
    OTTAVA_INLINE f32v arranged(int element) const { return broadcast(blocks[element / kMxBlock]); }
    OTTAVA_INLINE f32v in_order(int element) const { return arranged(element); }
};

// One for each column.
struct ColumnMultipliers {
    const float* columns;
    const float* arranged_columns;
    OTTAVA_INLINE f32v arranged(int element) const { return load<f32v>(arranged_columns + element); }
    OTTAVA_INLINE f32v in_order(int element) const { return load<f32v>(columns + element); }
};

// A line of elements: raises `columns` (unless null) and `blocks`, two of them, to its magnitudes; NaN is ignored.
template <class Element>
OTTAVA_INLINE void observe(const typename Element::storage* src, typename Element::storage* columns,
                           typename Element::storage* blocks) {
    typedef typename Element::integers V;
    typedef typename Element::storage Storage;
    constexpr int64_t count = sizeof(V) / sizeof(Storage);
    constexpr Storage magnitude = static_cast<Storage>(~Storage{0}) >> 1;
    const V infinity = V{} + Element::infinity;
    for (int64_t half = 0; half < kLine; half += kMxBlock) {
        V best = V{};
        for (int64_t k = half; k < half + kMxBlock; k += count) {
            V x = load<V>(src + k) & (V{} + static_cast<decltype(Element::infinity)>(magnitude));
            x = x > infinity ? V{} : x;
            if (columns != nullptr) store(columns + k, larger(load<V>(columns + k), x));
            best = larger(best, x);
        }
        const Storage seen = largest_lane(best);
        Storage& block = blocks[half / kMxBlock];
        block = seen > block ? seen : block;
    }
}

// Exponents and multipliers of `count` scales, rounded up to whole vectors.
template <class Element, class Format>
OTTAVA_INLINE void scales_of(const typename Element::storage* amaxes, int64_t count, bool floor, uint8_t* exponents,
                             float* multipliers) {
    for (int64_t i = 0; i < count; i += kLanes) {
        const f32v amax = Element::load_floats(amaxes + i);
        const i32v code = floor ? e8m0_floor<Format, f32v, i32v>(amax) : e8m0_up<Format, f32v, i32v>(amax);
        store(multipliers + i, e8m0_multiplier<f32v, i32v>(code));
        store_data(exponents + i, code);
    }
}

template <class Format>
void mx_scales_format(const float* amax, int64_t n, bool floor, uint8_t* exponents) {
    const auto scales = [=](const float* from, uint8_t* to) {
        const f32v x = bits_as<f32v>(load<i32v>(from) & kMagnitude);
        store_data(to, floor ? e8m0_floor<Format, f32v, i32v>(x) : e8m0_up<Format, f32v, i32v>(x));
    };
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) scales(amax + i, exponents + i);
    if (i == n) return;
    float rest[kLanes] = {};
    uint8_t found[kLanes];
    memcpy(rest, amax + i, static_cast<size_t>(n - i) * sizeof(float));
    scales(rest, found);
    memcpy(exponents + i, found, static_cast<size_t>(n - i));
}

// The sign of an amax does not count.
void mx_scales_run(const float* amax, int64_t n, Fp8 format, bool floor, uint8_t* exponents) {
    if (format == Fp8::e4m3) return mx_scales_format<E4M3>(amax, n, floor, exponents);
    return mx_scales_format<E5M2>(amax, n, floor, exponents);
}

template <class Element, class Format>
class PanelCast {
    typedef typename Element::storage Storage;
    const MxPanel& panel_;
    PanelState<Element> state_;
    const LineCast<Element, Format> cast_;
    const int64_t whole_, blocks_;  // columns in whole lines; blocks of a row

    const Storage* row(int64_t r) const { return static_cast<const Storage*>(panel_.src) + r * panel_.stride; }

    // The elements of the last line, which are fewer, followed by zeros.
    struct Rest {
        Storage elements[kLine] = {};
        Rest(const Storage* from, int64_t count) { memcpy(elements, from, static_cast<size_t>(count) * sizeof(Storage)); }
    };

    void observe_row(int64_t r, Storage* columns) {
        const Storage* src = row(r);
        const Storage* next = r + 1 < panel_.rows ? row(r + 1) : src;
        constexpr int64_t step = kLine / sizeof(Storage);
        for (int64_t col = 0; col < whole_; col += kLine) {
            for (int64_t k = 0; k < kLine; k += step) __builtin_prefetch(next + col + k);
            observe<Element>(src + col, columns == nullptr ? nullptr : columns + col, state_.blocks + col / kMxBlock);
        }
        if (whole_ == panel_.cols) return;
        const Rest rest(src + whole_, panel_.cols - whole_);
        observe<Element>(rest.elements, columns == nullptr ? nullptr : columns + whole_,
                         state_.blocks + whole_ / kMxBlock);
    }

    template <bool Stream, class Multipliers>
    void cast_row(int64_t r, uint8_t* first, uint8_t* second, const Multipliers& multipliers_at) const {
        const Storage* src = row(r);
        for (int64_t col = 0; col < whole_; col += kLine) {
            const Line line = cast_.scaled(src + col, multipliers_at(col));
            if (first != nullptr) line.template put_to<Stream>(first + r * panel_.stride + col);
            if (second != nullptr) line.template put_to<Stream>(second + r * panel_.stride + col);
        }
        const int64_t count = panel_.cols - whole_;
        if (count == 0) return;
        const Rest rest(src + whole_, count);
        alignas(64) uint8_t data[kLine];
        cast_.scaled(rest.elements, multipliers_at(whole_)).template put_to<false>(data);
        if (first != nullptr) memcpy(first + r * panel_.stride + whole_, data, static_cast<size_t>(count));
        if (second != nullptr) memcpy(second + r * panel_.stride + whole_, data, static_cast<size_t>(count));
    }

    template <class Multipliers>
    void cast_row_to(int64_t r, uint8_t* first, uint8_t* second, const Multipliers& multipliers_at) const {
        if (panel_.stream)
            cast_row<true>(r, first, second, multipliers_at);
        else
            cast_row<false>(r, first, second, multipliers_at);
    }

    void scales_of_blocks() {
        scales_of<Element, Format>(state_.blocks, blocks_, panel_.floor, state_.exponents, state_.row_multipliers);
        memset(state_.blocks, 0, sizeof(state_.blocks));
    }

    RowMultipliers row_multipliers_at(int64_t col) const { return {state_.row_multipliers + col / kMxBlock}; }

    void put_row_scales(int64_t r) const {
        memcpy(panel_.row_scales + r * panel_.row_scale_stride, state_.exponents, static_cast<size_t>(blocks_));
    }

    void squares() {
        for (int64_t r = 0; r < panel_.rows; ++r) observe_row(r, nullptr);
        scales_of_blocks();
        for (int64_t r = 0; r < panel_.rows; ++r) {
            cast_row_to(r, panel_.row_data, panel_.column_data, [&](int64_t col) { return row_multipliers_at(col); });
            if (panel_.row_data != nullptr) put_row_scales(r);
        }
        if (panel_.column_data == nullptr) return;
        for (int64_t block = 0; block < blocks_; ++block) {
            const int64_t col = block * kMxBlock, count = panel_.cols - col < kMxBlock ? panel_.cols - col : kMxBlock;
            memset(panel_.column_scales + col, state_.exponents[block], static_cast<size_t>(count));
        }
    }

    void rows_and_columns() {
        Storage* columns = panel_.column_data == nullptr ? nullptr : state_.columns;
        for (int64_t r = 0; r < panel_.rows; ++r) {
            observe_row(r, columns);
            if (panel_.row_data == nullptr) continue;
            scales_of_blocks();
            cast_row_to(r, panel_.row_data, nullptr, [&](int64_t col) { return row_multipliers_at(col); });
            put_row_scales(r);
        }
        if (columns == nullptr) return;
        scales_of<Element, Format>(columns, panel_.cols, panel_.floor, state_.exponents, state_.multipliers);
        memcpy(panel_.column_scales, state_.exponents, static_cast<size_t>(panel_.cols));
        for (int64_t col = 0; col < panel_.cols; col += kLine)
            LineCast<Element, Format>::arrange(state_.multipliers + col, state_.arranged + col);
        for (int64_t r = 0; r < panel_.rows; ++r)
            cast_row_to(r, panel_.column_data, nullptr, [&](int64_t col) {
                return ColumnMultipliers{state_.multipliers + col, state_.arranged + col};
            });
    }

   public:
    explicit PanelCast(const MxPanel& panel)
        : panel_(panel),
          cast_(1.0f),
          whole_(panel.cols / kLine * kLine),
          blocks_((panel.cols + kMxBlock - 1) / kMxBlock) {}

    void run() {
        if (panel_.square)
            squares();
        else
            rows_and_columns();
        if (panel_.stream) finish_streaming();
    }
};

template <class Format>
void mx_quantize_format(const MxPanel& panel, Dtype dtype) {
    switch (dtype) {
        case Dtype::float32:
            return PanelCast<Float32, Format>(panel).run();
        case Dtype::bfloat16:
            return PanelCast<BFloat16, Format>(panel).run();
        default:
            return PanelCast<Float16, Format>(panel).run();
    }
}

void mx_quantize_panel(const MxPanel& panel, Dtype dtype, Fp8 format) {
    if (format == Fp8::e4m3) return mx_quantize_format<E4M3>(panel, dtype);
    return mx_quantize_format<E5M2>(panel, dtype);
}
