// Float32 elements that count as rounded to a narrower dtype, and their cast. Include once, after
// cast.h.

// The value of `x` in bfloat16, to nearest even. NaN stays.
OTTAVA_INLINE f32v rounded_bfloat16(f32v x) {
#if defined(__AVX512BW__)
    const __m512i from = bits_as<__m512i>(x);
    const __mmask16 odd = _mm512_test_epi32_mask(from, _mm512_set1_epi32(0x10000));
    const __m512i half =
        _mm512_mask_blend_epi32(odd, _mm512_set1_epi32(0x7fff), _mm512_set1_epi32(0x8000));
    const __mmask16 number = _mm512_cmp_ps_mask(bits_as<__m512>(x), bits_as<__m512>(x), _CMP_ORD_Q);
    const __m512i sum = _mm512_add_epi32(from, half);
    return bits_as<f32v>(_mm512_mask_and_epi32(from, number, sum, _mm512_set1_epi32(-0x10000)));
#else
    const u32v bits = bits_as<u32v>(x);
    const u32v rounded = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u;
    return x != x ? x : bits_as<f32v>(rounded);
#endif
}

OTTAVA_INLINE f32v rounded_half(f32v x) {
#if defined(__AVX512BW__)
    return bits_as<f32v>(
        _mm512_cvtph_ps(_mm512_cvtps_ph(bits_as<__m512>(x), _MM_FROUND_TO_NEAREST_INT)));
#elif defined(__AVX2__)
    return bits_as<f32v>(
        _mm256_cvtph_ps(_mm256_cvtps_ph(bits_as<__m256>(x), _MM_FROUND_TO_NEAREST_INT)));
#elif defined(OTTAVA_NEON)
    return vcvt_f32_f16(vcvt_f16_f32(bits_as<float32x4_t>(x)));
#else
    return ottava::widen<Half, f32v, i32v>(encode<Half, f32v, i32v>(x));
#endif
}

template <class Round>
struct RoundedFloat32 {
    typedef uint32_t storage;
    typedef i32v integers;
    static constexpr int32_t infinity = kInfinity;
    static OTTAVA_INLINE f32v load_floats(const storage* from) { return Round()(load<f32v>(from)); }
};

struct ToFloat32 {
    OTTAVA_INLINE f32v operator()(f32v x) const { return x; }
};
struct ToBFloat16 {
    OTTAVA_INLINE f32v operator()(f32v x) const { return rounded_bfloat16(x); }
};
struct ToFloat16 {
    OTTAVA_INLINE f32v operator()(f32v x) const { return rounded_half(x); }
};

// Calls run(round) with the rounding to `nominal`.
template <class Run>
OTTAVA_INLINE void with_rounding(Dtype nominal, const Run& run) {
    switch (nominal) {
        case Dtype::float32:
            return run(ToFloat32());
        case Dtype::bfloat16:
            return run(ToBFloat16());
        default:
            return run(ToFloat16());
    }
}

void cast_rounded_run(const void* src, Dtype nominal, int64_t n, float scale, uint8_t* out,
                      Fp8 format, bool stream) {
    with_rounding(nominal, [&](auto round) {
        typedef RoundedFloat32<decltype(round)> Element;
        if (format == Fp8::e4m3)
            cast_typed<Element, E4M3, Unobserved<Element>>(src, n, scale, out, stream);
        else
            cast_typed<Element, E5M2, Unobserved<Element>>(src, n, scale, out, stream);
    });
}

template <class Source>
void round_to_typed(const void* from, int64_t n, Dtype nominal, float* out) {
    const auto* src = static_cast<const typename Source::storage*>(from);
    with_rounding(nominal, [&](auto round) {
        int64_t i = 0;
        for (; i + kLanes <= n; i += kLanes) store(out + i, round(Source::load_floats(src + i)));
        if (i == n) return;
        typename Source::storage rest[kLanes] = {};
        float values[kLanes];
        memcpy(rest, src + i, static_cast<size_t>(n - i) * sizeof(rest[0]));
        store(values, round(Source::load_floats(rest)));
        memcpy(out + i, values, static_cast<size_t>(n - i) * sizeof(float));
    });
}

void round_to_run(const void* src, Dtype dtype, int64_t n, Dtype nominal, float* out) {
    switch (dtype) {
        case Dtype::float32:
            return round_to_typed<Float32>(src, n, nominal, out);
        case Dtype::bfloat16:
            return round_to_typed<BFloat16>(src, n, nominal, out);
        default:
            return round_to_typed<Float16>(src, n, nominal, out);
    }
}
