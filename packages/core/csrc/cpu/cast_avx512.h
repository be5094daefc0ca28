// The line of data for AVX-512: the arithmetic of `encode` in about half as many instructions.
// cast.h includes this file.
//
// - `range` clamps |x| and clears the sign at once;
// - the addend of `encode` depends only on the exponent, so that a permutation looks it up;
// - signs are taken from the elements, 64 at a time, and put on last;
// - NaNs are rare: a line that has one is cast by the generic code.

struct Line {
    __m512i data;
    OTTAVA_INLINE u8x16 piece(int k) const {
        switch (k) {
            case 0:
                return bits_as<u8x16>(_mm512_castsi512_si128(data));
            case 1:
                return bits_as<u8x16>(_mm512_extracti32x4_epi32(data, 1));
            case 2:
                return bits_as<u8x16>(_mm512_extracti32x4_epi32(data, 2));
            default:
                return bits_as<u8x16>(_mm512_extracti32x4_epi32(data, 3));
        }
    }
    template <bool Stream>
    OTTAVA_INLINE void put_to(uint8_t* out) const {
        put<Stream>(out, data);
    }
};

template <class Format>
class Encoder {
    // There are fewer exponent fields between the smallest normal and the limit than entries. Their
    // low bits, which are the index, are therefore distinct.
    static constexpr int kShift = 23 - Format::mantissa;
    static constexpr int32_t kMinNormal = (127 + 1 - Format::bias) << 23;
    static constexpr int kEntries = Format::mantissa == 3 ? 16 : 32;
    static_assert((Format::limit >> 23) - (kMinNormal >> 23) < kEntries,
                  "the exponents fit the table");
    __m512 table_[kEntries / 16];

public:
    Encoder() {
        alignas(64) int32_t entries[kEntries] = {};
        for (int32_t field = kMinNormal >> 23; field <= Format::limit >> 23; ++field) {
            const int32_t binade = field << 23;
            entries[field % kEntries] =
                binade + (binade >> kShift) + ((kShift << 23) - (kMinNormal >> kShift));
        }
        for (int k = 0; k < kEntries / 16; ++k) table_[k] = load<__m512>(entries + 16 * k);
    }

    // The code without its sign, in the low seven bits of each lane; the other bits are undefined.
    // x is not NaN.
    OTTAVA_INLINE __m512i operator()(__m512 x) const {
        constexpr int smaller_magnitude_unsigned = 0x0a;
        const __m512 limit = _mm512_castsi512_ps(_mm512_set1_epi32(Format::limit));
        const __m512 clamped = _mm512_range_ps(x, limit, smaller_magnitude_unsigned);
        const __m512i binade =
            _mm512_max_epi32(_mm512_castps_si512(clamped), _mm512_set1_epi32(kMinNormal));
        const __m512i index = _mm512_srli_epi32(binade, 23);
        __m512 addend;
        if constexpr (kEntries == 16)
            addend = _mm512_permutexvar_ps(index, table_[0]);
        else
            addend = _mm512_permutex2var_ps(table_[0], index, table_[1]);
        return _mm512_castps_si512(_mm512_add_ps(clamped, addend));
    }
};

// Rounds to nearest even, whatever the thread's rounding mode is. NaN may become anything.
template <>
class Encoder<Int8> {
public:
    OTTAVA_INLINE __m512i operator()(__m512 x) const {
        const __m512 limit = _mm512_set1_ps(Int8::maximum);
        const __m512 clamped =
            _mm512_max_ps(_mm512_min_ps(x, limit), _mm512_sub_ps(_mm512_setzero_ps(), limit));
        return _mm512_cvt_roundps_epi32(clamped, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    }
};

// The order by which `permutex2var_epi16` takes the even or the odd 16-bit parts of two vectors.
OTTAVA_INLINE __m512i every_second_word(int first) {
    alignas(64) uint16_t order[32];
    for (int k = 0; k < 32; ++k) order[k] = static_cast<uint16_t>(2 * k + first);
    return load<__m512i>(order);
}

// Undoes the interleaving that the pack instructions make of the two vectors' 16-byte parts.
OTTAVA_INLINE __m512i in_order(__m512i packed) {
    return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), packed);
}

// Takes bits of a where the mask has ones, and bits of b elsewhere.
OTTAVA_INLINE __m512i select(__m512i mask, __m512i a, __m512i b) {
    return _mm512_ternarylogic_epi64(mask, a, b, 0xca);
}

// Packs 64 data from the low bytes of four vectors.
OTTAVA_INLINE __m512i pack_bytes(const __m512i* sums) {
    const __m512i even = every_second_word(0), low = _mm512_set1_epi16(0xff);
    const __m512i a = _mm512_and_si512(_mm512_permutex2var_epi16(sums[0], even, sums[1]), low);
    const __m512i b = _mm512_and_si512(_mm512_permutex2var_epi16(sums[2], even, sums[3]), low);
    return _mm512_packus_epi16(a, b);
}

// As `pack_bytes`, with signs from the top bits of words. Saturation to bytes keeps the signs, and
// the other bits are dropped.
OTTAVA_INLINE __m512i pack_line(const __m512i* sums, __m512i first, __m512i second) {
    return in_order(
        select(_mm512_set1_epi8(0x7f), pack_bytes(sums), _mm512_packs_epi16(first, second)));
}

template <class Element, class Format>
struct LineCast {
    const Factor factor;
    const Encoder<Format> encoder{};
    explicit LineCast(float scale) : factor(scale) {}

    OTTAVA_INLINE Line operator()(const typename Element::storage* src) const {
        if (__builtin_expect(!factor.positive, 0)) return generic(src, factor);
        return scaled(src, factor);
    }

    // Casts with multipliers that are positive or NaN.
    template <class Multipliers>
    OTTAVA_INLINE Line scaled(const typename Element::storage* src,
                              const Multipliers& multipliers) const {
        __m512 x[4];
        if constexpr (std::is_same<Element, BFloat16>::value) {
            // Even elements in x[0] and x[2], odd ones in x[1] and x[3]: cheaper than widening in
            // order.
            const __m512i high = _mm512_set1_epi32(-0x10000);
            for (int k = 0; k < 2; ++k) {
                const __m512i words = load<__m512i>(src + 32 * k);
                x[2 * k] = _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
                x[2 * k + 1] = _mm512_castsi512_ps(_mm512_and_si512(words, high));
            }
        } else {
            for (int k = 0; k < 4; ++k) x[k] = bits_as<__m512>(Element::load_floats(src + 16 * k));
        }
        for (int k = 0; k < 4; ++k)
            x[k] = _mm512_mul_ps(x[k], bits_as<__m512>(multipliers.arranged(16 * k)));
        const __mmask16 nan = static_cast<__mmask16>(_mm512_cmp_ps_mask(x[0], x[1], _CMP_UNORD_Q) |
                                                     _mm512_cmp_ps_mask(x[2], x[3], _CMP_UNORD_Q));
        if (__builtin_expect(nan != 0, 0)) return generic(src, multipliers);
        __m512i sums[4];
        for (int k = 0; k < 4; ++k) sums[k] = encoder(x[k]);
        if constexpr (std::is_same<Element, BFloat16>::value) {
            const __m512i first = load<__m512i>(src), second = load<__m512i>(src + 32);
            const __m512i low = _mm512_set1_epi32(0xff);
            const __m512i a = select(low, sums[0], _mm512_slli_epi32(sums[1], 8));
            const __m512i b = select(low, sums[2], _mm512_slli_epi32(sums[3], 8));
            const __m512i data = _mm512_permutex2var_epi16(a, every_second_word(0), b);
            if constexpr (is_integer<Format>) return Line{data};
            return Line{
                select(_mm512_set1_epi8(0x7f), data, in_order(_mm512_packs_epi16(first, second)))};
        } else if constexpr (is_integer<Format>) {
            return Line{in_order(pack_bytes(sums))};
        } else if constexpr (sizeof(*src) == 2) {
            return Line{pack_line(sums, load<__m512i>(src), load<__m512i>(src + 32))};
        } else {
            const __m512i odd = every_second_word(1);
            const __m512i first =
                _mm512_permutex2var_epi16(load<__m512i>(src), odd, load<__m512i>(src + 16));
            const __m512i second =
                _mm512_permutex2var_epi16(load<__m512i>(src + 32), odd, load<__m512i>(src + 48));
            return Line{pack_line(sums, first, second)};
        }
    }

    // The multipliers of a line's elements, as `scaled` takes them. Whether `scaled` takes the
    // multipliers of a line in another order than that of its elements, and the function that
    // brings them into that order.
    static constexpr bool arranges = std::is_same<Element, BFloat16>::value;
    static OTTAVA_INLINE void arrange(const float* in_order, float* arranged) {
        const __m512i even =
            _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
        for (int k = 0; k < kLine; k += 32) {
            const __m512 first = load<__m512>(in_order + k),
                         second = load<__m512>(in_order + k + 16);
            store(arranged + k, _mm512_permutex2var_ps(first, even, second));
            store(arranged + k + 16, _mm512_permutex2var_ps(first, odd, second));
        }
    }

    // Casts with multipliers of any sign.
    template <class Multipliers>
    static __attribute__((noinline)) Line generic(const typename Element::storage* src,
                                                  Multipliers multipliers) {
        alignas(64) uint8_t data[64];
        for (int k = 0; k < 4; ++k)
            store(data + 16 * k, cast16<Element, Format>(src + 16 * k, multipliers, 16 * k));
        return Line{load<__m512i>(data)};
    }
};
