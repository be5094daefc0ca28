// Kernels over contiguous runs: amax, cast, decode, epilogue. Include once, after simd.h.

template <class V>
OTTAVA_INLINE V larger(V a, V b) {
    return a > b ? a : b;
}

// The largest magnitude as the bit pattern of the element type: order of magnitudes is order of patterns.
template <class Element>
typename Element::storage amax_pattern(const typename Element::storage* src, int64_t n) {
    typedef typename Element::integers V;
    typedef typename Element::storage Storage;
    constexpr int64_t lanes = sizeof(V) / sizeof(Storage);
    constexpr Storage magnitude_mask = static_cast<Storage>(~Storage{0}) >> 1;
    const V mask = V{} + static_cast<decltype(Element::infinity)>(magnitude_mask);
    const V infinity = V{} + Element::infinity;
    const V zero = V{};
    V best[4] = {zero, zero, zero, zero};
    const auto take = [&](V& into, V x) {
        x &= mask;
        into = larger(into, x > infinity ? zero : x);
    };
    int64_t i = 0;
    for (; i + 4 * lanes <= n; i += 4 * lanes)
        for (int k = 0; k < 4; ++k) take(best[k], load<V>(src + i + k * lanes));
    for (; i + lanes <= n; i += lanes) take(best[0], load<V>(src + i));
    Storage rest[lanes] = {};
    if (i < n) {
        memcpy(rest, src + i, static_cast<size_t>(n - i) * sizeof(Storage));
        take(best[1], load<V>(rest));
    }
    store(rest, larger(larger(best[0], best[1]), larger(best[2], best[3])));
    Storage result = 0;
    for (int64_t k = 0; k < lanes; ++k) result = rest[k] > result ? rest[k] : result;
    return result;
}

float amax_run(const void* src, Dtype dtype, int64_t n) {
    switch (dtype) {
        case Dtype::float32:
            return Float32::widen(amax_pattern<Float32>(static_cast<const uint32_t*>(src), n));
        case Dtype::bfloat16:
            return BFloat16::widen(amax_pattern<BFloat16>(static_cast<const uint16_t*>(src), n));
        default:
            return Float16::widen(amax_pattern<Float16>(static_cast<const uint16_t*>(src), n));
    }
}

template <class Element, class Format>
OTTAVA_INLINE u8x16 cast16(const typename Element::storage* src, f32v scale) {
    i32v codes[16 / kLanes];
    for (int k = 0; k < 16 / kLanes; ++k)
        codes[k] = encode<Format, f32v, i32v>(Element::load_floats(src + k * kLanes) * scale);
    return narrow8(codes);
}

// Fewer than 16 elements, through buffers: no byte outside the run is touched.
template <class Element, class Format>
void cast_partial(const typename Element::storage* src, int64_t n, f32v scale, uint8_t* out) {
    typename Element::storage in[16] = {};
    memcpy(in, src, static_cast<size_t>(n) * sizeof(in[0]));
    const u8x16 codes = cast16<Element, Format>(in, scale);
    memcpy(out, &codes, static_cast<size_t>(n));
}

template <class Element, class Format, bool Stream>
void cast_aligned(const typename Element::storage* src, int64_t n, f32v scale, uint8_t* out) {
    int64_t i = 0;
    for (; i + kLine <= n; i += kLine)
        for (int k = 0; k < 4; ++k) put<Stream>(out + i + 16 * k, cast16<Element, Format>(src + i + 16 * k, scale));
    for (; i + 16 <= n; i += 16) store(out + i, cast16<Element, Format>(src + i, scale));
    if (i < n) cast_partial<Element, Format>(src + i, n - i, scale, out + i);
}

template <class Element, class Format>
void cast_typed(const void* from, int64_t n, float factor, uint8_t* out, bool stream) {
    const auto* src = static_cast<const typename Element::storage*>(from);
    const f32v scale = broadcast(factor);
    if (!stream) return cast_aligned<Element, Format, false>(src, n, scale, out);
    int64_t head = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(out) & (kLine - 1));
    head = head < n ? head : n;
    cast_aligned<Element, Format, false>(src, head, scale, out);
    cast_aligned<Element, Format, true>(src + head, n - head, scale, out + head);
    finish_streaming();
}

template <class Format>
void cast_format(const void* src, Dtype dtype, int64_t n, float scale, uint8_t* out, bool stream) {
    switch (dtype) {
        case Dtype::float32:
            return cast_typed<Float32, Format>(src, n, scale, out, stream);
        case Dtype::bfloat16:
            return cast_typed<BFloat16, Format>(src, n, scale, out, stream);
        default:
            return cast_typed<Float16, Format>(src, n, scale, out, stream);
    }
}

void cast_run(const void* src, Dtype dtype, int64_t n, float scale, uint8_t* out, Fp8 format, bool stream) {
    if (format == Fp8::e4m3) return cast_format<E4M3>(src, dtype, n, scale, out, stream);
    return cast_format<E5M2>(src, dtype, n, scale, out, stream);
}

template <class Out>
OTTAVA_INLINE Out look_up(const Out* table, uint8_t code) {
    return static_cast<Out>(table[code & 0x7f] ^ (static_cast<Out>(code & 0x80) << (8 * sizeof(Out) - 8)));
}

void decode32_run(const uint8_t* src, int64_t n, const uint32_t* table, uint32_t* out, bool) {
    uint32_t full[256];
    for (int code = 0; code < 256; ++code) full[code] = look_up(table, static_cast<uint8_t>(code));
    for (int64_t i = 0; i < n; ++i) store(out + i, full[src[i]]);
}

#if defined(__AVX512BW__)
// The table in four registers: two permutations of 64 entries each, chosen between by bit 6 of the code.
struct Table16 {
    __m512i part[4];
    explicit Table16(const uint16_t* table) {
        for (int k = 0; k < 4; ++k) part[k] = load<__m512i>(table + 32 * k);
    }
    OTTAVA_INLINE __m512i operator()(__m256i codes) const {
        const __m512i index = _mm512_cvtepu8_epi16(codes);
        const __m512i low = _mm512_permutex2var_epi16(part[0], index, part[1]);
        const __m512i high = _mm512_permutex2var_epi16(part[2], index, part[3]);
        const __m512i sign = _mm512_and_si512(_mm512_slli_epi16(index, 8), _mm512_set1_epi16(-0x8000));
        const __mmask32 upper = _mm512_test_epi16_mask(index, _mm512_set1_epi16(0x40));
        return _mm512_xor_si512(_mm512_mask_blend_epi16(upper, low, high), sign);
    }
};

template <bool Stream>
void decode16_aligned(const uint8_t* src, int64_t n, const Table16& table, uint16_t* out) {
    int64_t i = 0;
    for (; i + 32 <= n; i += 32) put<Stream>(out + i, table(load<__m256i>(src + i)));
    if (i == n) return;
    uint8_t in[32] = {};
    memcpy(in, src + i, static_cast<size_t>(n - i));
    const __m512i values = table(load<__m256i>(in));
    memcpy(out + i, &values, static_cast<size_t>(n - i) * 2);
}

void decode16_run(const uint8_t* src, int64_t n, const uint16_t* entries, uint16_t* out, bool stream) {
    const Table16 table(entries);
    const auto misaligned = reinterpret_cast<uintptr_t>(out) & (kLine - 1);
    if (!stream || misaligned % 2 != 0) return decode16_aligned<false>(src, n, table, out);
    int64_t head = misaligned == 0 ? 0 : static_cast<int64_t>(kLine - misaligned) / 2;
    head = head < n ? head : n;
    decode16_aligned<false>(src, head, table, out);
    decode16_aligned<true>(src + head, n - head, table, out + head);
    finish_streaming();
}
#else
void decode16_run(const uint8_t* src, int64_t n, const uint16_t* table, uint16_t* out, bool) {
    uint16_t full[256];
    for (int code = 0; code < 256; ++code) full[code] = look_up(table, static_cast<uint8_t>(code));
    for (int64_t i = 0; i < n; ++i) store(out + i, full[src[i]]);
}
#endif

OTTAVA_INLINE void epilogue_block(uint16_t* acc, f32v scale, const float* bias) {
    f32v x = BFloat16::load_floats(acc) * scale;
    if (bias != nullptr) x = x + load<f32v>(bias);
    store_narrow16(acc, bits_as<u32v>(encode_bfloat16<f32v, i32v>(x)));
}

void epilogue_run(uint16_t* acc, int64_t n, float factor, const float* bias) {
    const f32v scale = broadcast(factor);
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) epilogue_block(acc + i, scale, bias == nullptr ? bias : bias + i);
    if (i == n) return;
    uint16_t rest[kLanes] = {};
    float bias_rest[kLanes] = {};
    memcpy(rest, acc + i, static_cast<size_t>(n - i) * sizeof(rest[0]));
    if (bias != nullptr) memcpy(bias_rest, bias + i, static_cast<size_t>(n - i) * sizeof(bias_rest[0]));
    epilogue_block(rest, scale, bias == nullptr ? nullptr : bias_rest);
    memcpy(acc + i, rest, static_cast<size_t>(n - i) * sizeof(rest[0]));
}
