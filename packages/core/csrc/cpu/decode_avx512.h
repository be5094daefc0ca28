// The decoding tables for AVX-512, which lie in registers and are looked up by permutations.
// decode.h includes this file.

template <class Out>
class Table;

// 128 entries of 16 bits in four registers. A permutation reaches 64 of them, and bit 6 of the code
// chooses between two permutations.
template <>
class Table<uint16_t> {
    __m512i part_[4];

public:
    explicit Table(const uint16_t* entries) {
        for (int k = 0; k < 4; ++k) part_[k] = load<__m512i>(entries + 32 * k);
    }
    OTTAVA_INLINE __m512i operator()(const uint8_t* src) const {
        const __m512i data = _mm512_cvtepu8_epi16(load<__m256i>(src));
        const __m512i low = _mm512_permutex2var_epi16(part_[0], data, part_[1]);
        const __m512i high = _mm512_permutex2var_epi16(part_[2], data, part_[3]);
        const __m512i sign =
            _mm512_and_si512(_mm512_slli_epi16(data, 8), _mm512_set1_epi16(-0x8000));
        const __mmask32 bit6 = _mm512_test_epi16_mask(data, _mm512_set1_epi16(0x40));
        return _mm512_xor_si512(_mm512_mask_blend_epi16(bit6, low, high), sign);
    }
};

// 128 entries of 32 bits in eight registers. A permutation reaches 32 of them, and bits 5 and 6 of
// the code choose among four permutations.
template <>
class Table<uint32_t> {
    __m512i part_[8];

public:
    explicit Table(const uint32_t* entries) {
        for (int k = 0; k < 8; ++k) part_[k] = load<__m512i>(entries + 16 * k);
    }
    OTTAVA_INLINE __m512i operator()(const uint8_t* src) const {
        const __m512i data = _mm512_cvtepu8_epi32(load<__m128i>(src));
        const __mmask16 bit5 = _mm512_test_epi32_mask(data, _mm512_set1_epi32(0x20));
        const __mmask16 bit6 = _mm512_test_epi32_mask(data, _mm512_set1_epi32(0x40));
        const __m512i low =
            _mm512_mask_blend_epi32(bit5, _mm512_permutex2var_epi32(part_[0], data, part_[1]),
                                    _mm512_permutex2var_epi32(part_[2], data, part_[3]));
        const __m512i high =
            _mm512_mask_blend_epi32(bit5, _mm512_permutex2var_epi32(part_[4], data, part_[5]),
                                    _mm512_permutex2var_epi32(part_[6], data, part_[7]));
        const __m512i sign = _mm512_slli_epi32(_mm512_srli_epi32(data, 7), 31);
        return _mm512_xor_si512(_mm512_mask_blend_epi32(bit6, low, high), sign);
    }
};

template <bool Stream, class Out>
void decode_aligned(const uint8_t* src, int64_t n, const Table<Out>& table, Out* out) {
    constexpr int64_t lanes = kLine / sizeof(Out);
    int64_t i = 0;
    for (; i + lanes <= n; i += lanes) put<Stream>(out + i, table(src + i));
    if (i == n) return;
    uint8_t rest[lanes] = {};
    memcpy(rest, src + i, static_cast<size_t>(n - i));
    const __m512i values = table(rest);
    memcpy(out + i, &values, static_cast<size_t>(n - i) * sizeof(Out));
}

template <class Out>
void decode_typed(const uint8_t* src, int64_t n, const Out* entries, Out* out, bool stream) {
    const Table<Out> table(entries);
    const auto misaligned = reinterpret_cast<uintptr_t>(out) & (kLine - 1);
    if (!stream || misaligned % sizeof(Out) != 0) return decode_aligned<false>(src, n, table, out);
    int64_t head = misaligned == 0 ? 0 : static_cast<int64_t>((kLine - misaligned) / sizeof(Out));
    head = head < n ? head : n;
    decode_aligned<false>(src, head, table, out);
    decode_aligned<true>(src + head, n - head, table, out + head);
    finish_streaming();
}
