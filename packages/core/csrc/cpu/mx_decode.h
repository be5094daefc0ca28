// Kernels over contiguous runs: the decoding of MX blocks. Include once, after decode.h.

// Loads kLanes data, or their scales, as 32-bit integers.
OTTAVA_INLINE i32v load_data(const uint8_t* from) {
#if defined(__AVX512BW__)
    return bits_as<i32v>(_mm512_cvtepu8_epi32(load<__m128i>(from)));
#elif defined(__AVX2__)
    return bits_as<i32v>(
        _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
    typedef uint8_t u8x4 __attribute__((vector_size(4)));
    return __builtin_convertvector(load<u8x4>(from), i32v);
#endif
}

void e8m0_multipliers_run(const uint8_t* scales, int64_t n, float* out) {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes)
        store(out + i, e8m0_multiplier<f32v, i32v>(load_data(scales + i)));
    if (i == n) return;
    uint8_t rest[kLanes] = {};
    float values[kLanes];
    memcpy(rest, scales + i, static_cast<size_t>(n - i));
    store(values, e8m0_multiplier<f32v, i32v>(load_data(rest)));
    memcpy(out + i, values, static_cast<size_t>(n - i) * sizeof(float));
}

// Decodes kLanes data. The sign is put on last, as in dequantize_element.
template <class Format, class Out>
OTTAVA_INLINE void decode_vector(i32v code, f32v scale, Out* out, Dtype dtype) {
    const f32v product = element_value<Format, f32v, i32v>(code) * scale;
    const i32v bits = bits_as<i32v>(product), sign = element_sign<Format, i32v>(code);
    const i32v clean = (bits & kMagnitude) > kInfinity ? i32v{} + kQuietNan : bits;
    if constexpr (sizeof(Out) == 4) {
        store(out, clean ^ sign);
    } else {
        const f32v value = bits_as<f32v>(clean);
        const i32v narrow = dtype == Dtype::bfloat16 ? encode_bfloat16<f32v, i32v>(value)
                                                     : encode<Half, f32v, i32v>(value);
        store_narrow16(out, bits_as<u32v>(narrow) ^ (bits_as<u32v>(sign) >> 16));
    }
}

// Decodes `count` data of at most one block, which need not fill a vector.
template <class Format, class Out>
OTTAVA_INLINE void mx_decode_block(const uint8_t* data, const uint8_t* scales, bool scale_each,
                                   int64_t count, Out* out, Dtype dtype) {
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
        const i32v scale = scale_each ? load_data(scales + i) : i32v{} + scales[0];
        decode_vector<Format>(load_data(data + i), e8m0_value<f32v, i32v>(scale), out + i, dtype);
    }
    if (i == count) return;
    uint8_t last[kLanes] = {}, last_scales[kLanes] = {};
    Out results[kLanes];
    memcpy(last, data + i, static_cast<size_t>(count - i));
    if (scale_each) memcpy(last_scales, scales + i, static_cast<size_t>(count - i));
    const i32v scale = scale_each ? load_data(last_scales) : i32v{} + scales[0];
    decode_vector<Format>(load_data(last), e8m0_value<f32v, i32v>(scale), results, dtype);
    memcpy(out + i, results, static_cast<size_t>(count - i) * sizeof(Out));
}

#if defined(__AVX512BW__)
// Decodes a block to bfloat16 or float32. Where every result is normal, decoding adds to the
// exponents of the table's entries.
template <class Format>
class FastBlock {
    // The scales with which all of the format's finite elements are normal bfloat16 values.
    static constexpr int kLow = Format::mantissa == 3 ? 127 - 126 + 9 : 127 - 126 + 16;
    static constexpr int kHigh = 127 + 127 - ((Format::limit >> 23) - 127);
    const Table<uint16_t> table_;

    static OTTAVA_INLINE __m512i widened(__m256i x) {
        return _mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16);
    }

public:
    explicit FastBlock(const uint16_t* table) : table_(table) {}
    template <bool Stream, class Out>
    OTTAVA_INLINE bool operator()(const uint8_t* data, const uint8_t* scales, bool scale_each,
                                  Out* out) const {
        __m512i shift;
        if (scale_each) {
            const __m256i each = load<__m256i>(scales);
            const __m256i above = _mm256_sub_epi8(each, _mm256_set1_epi8(kLow));
            if (_mm256_cmpgt_epu8_mask(above, _mm256_set1_epi8(kHigh - kLow)) != 0) return false;
            shift = _mm512_cvtepu8_epi16(each);
        } else {
            if (scales[0] < kLow || scales[0] > kHigh) return false;
            shift = _mm512_set1_epi16(scales[0]);
        }
        shift = _mm512_slli_epi16(_mm512_sub_epi16(shift, _mm512_set1_epi16(127)), 7);
        const __m512i value = table_(data);
        const __m512i magnitude = _mm512_and_si512(value, _mm512_set1_epi16(0x7fff));
        // The entry is neither zero nor infinity nor NaN: magnitude - 1 < 0x7f7f.
        const __mmask32 finite =
            _mm512_cmplt_epu16_mask(_mm512_sub_epi16(magnitude, _mm512_set1_epi16(1)),
                                    _mm512_set1_epi16(kInfinity / 65536 - 1));
        const __m512i result = _mm512_mask_add_epi16(value, finite, value, shift);
        if constexpr (sizeof(Out) == 2) {
            put<Stream>(out, result);
        } else {
            put<Stream>(out, widened(_mm512_castsi512_si256(result)));
            put<Stream>(out + kMxBlock / 2, widened(_mm512_extracti64x4_epi64(result, 1)));
        }
        return true;
    }
};
#endif

template <class Format, class Out>
void mx_decode_typed(const MxRows& rows, const uint16_t* table, Out* out, Dtype dtype,
                     bool stream) {
    const int64_t per_block = rows.columnwise ? kMxBlock : 1;
#if defined(__AVX512BW__)
    const FastBlock<Format> fast(table);
    const bool exact = dtype != Dtype::float16;
#else
    (void)table, (void)stream;
#endif
    for (int64_t row = rows.begin; row < rows.end; ++row) {
        const uint8_t* data = rows.data + row * rows.cols;
        const uint8_t* scales =
            rows.scales + (rows.columnwise ? row / kMxBlock * rows.cols
                                           : row * ((rows.cols + kMxBlock - 1) / kMxBlock));
        Out* const to = out + row * rows.cols;
#if defined(__AVX512BW__)
        const bool streams = stream && (reinterpret_cast<uintptr_t>(to) & (kLine - 1)) == 0;
#endif
        for (int64_t i = 0; i < rows.cols; i += kMxBlock, scales += per_block) {
            const int64_t count = rows.cols - i < kMxBlock ? rows.cols - i : kMxBlock;
#if defined(__AVX512BW__)
            if (exact && count == kMxBlock &&
                (streams
                     ? fast.template operator()<true>(data + i, scales, rows.columnwise, to + i)
                     : fast.template operator()<false>(data + i, scales, rows.columnwise, to + i)))
                continue;
#endif
            mx_decode_block<Format>(data + i, scales, rows.columnwise, count, to + i, dtype);
        }
    }
#if defined(__AVX512BW__)
    if (stream) finish_streaming();
#endif
}

void mx_decode_run(const MxRows& rows, Fp8 format, const uint16_t* table, void* out, Dtype dtype,
                   bool stream) {
    auto* const wide = static_cast<uint32_t*>(out);
    auto* const narrow = static_cast<uint16_t*>(out);
    if (format == Fp8::e4m3)
        dtype == Dtype::float32 ? mx_decode_typed<E4M3>(rows, table, wide, dtype, stream)
                                : mx_decode_typed<E4M3>(rows, table, narrow, dtype, stream);
    else
        dtype == Dtype::float32 ? mx_decode_typed<E5M2>(rows, table, wide, dtype, stream)
                                : mx_decode_typed<E5M2>(rows, table, narrow, dtype, stream);
}
