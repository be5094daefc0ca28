// Multipliers that the kernels over panels share, and the scales of MX blocks. Include once, after
// cast.h.

// The largest of 32 magnitudes.
template <class V>
OTTAVA_INLINE auto largest_lane(V v) {
#if defined(__AVX512BW__)
    if constexpr (sizeof(v[0]) == 4) {
        return static_cast<uint32_t>(_mm512_reduce_max_epi32(bits_as<__m512i>(v)));
    } else {
        const __m512i x = bits_as<__m512i>(v);
        const __m256i half =
            _mm256_max_epu16(_mm512_castsi512_si256(x), _mm512_extracti64x4_epi64(x, 1));
        const __m128i part =
            _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
        const __m128i smallest = _mm_minpos_epu16(_mm_xor_si128(part, _mm_set1_epi32(-1)));
        return static_cast<uint16_t>(~_mm_cvtsi128_si32(smallest));
    }
#else
#if defined(__AVX2__)
    if constexpr (sizeof(v[0]) == 2) {
        const __m256i x = bits_as<__m256i>(v);
        const __m128i part =
            _mm_max_epu16(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
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

// The multipliers of one line of data: one for each half of it.
struct RowMultipliers {
    float halves[2];
    OTTAVA_INLINE f32v arranged(int element) const {
        return broadcast(halves[element / (kLine / 2)]);
    }
    OTTAVA_INLINE f32v in_order(int element) const { return arranged(element); }
};

// The multipliers of one line of data: one for each column.
struct ColumnMultipliers {
    const float* columns;
    const float* arranged_columns;
    OTTAVA_INLINE f32v arranged(int element) const {
        return load<f32v>(arranged_columns + element);
    }
    OTTAVA_INLINE f32v in_order(int element) const { return load<f32v>(columns + element); }
};

// The multipliers of each line of a row.
struct RowLines {
    const float* halves;  // one more than there are
    OTTAVA_INLINE RowMultipliers at(int64_t line) const {
        return {{halves[line / kMxBlock], halves[line / kMxBlock + 1]}};
    }
};
struct ColumnLines {
    const float* columns;
    const float* arranged;
    OTTAVA_INLINE ColumnMultipliers at(int64_t line) const {
        return {columns + line, arranged + line};
    }
};

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
    uint8_t codes[kLanes];
    memcpy(rest, amax + i, static_cast<size_t>(n - i) * sizeof(float));
    scales(rest, codes);
    memcpy(exponents + i, codes, static_cast<size_t>(n - i));
}

// The sign of an amax is ignored.
void mx_scales_run(const float* amax, int64_t n, Fp8 format, bool floor, uint8_t* exponents) {
    if (format == Fp8::e4m3) return mx_scales_format<E4M3>(amax, n, floor, exponents);
    return mx_scales_format<E5M2>(amax, n, floor, exponents);
}
