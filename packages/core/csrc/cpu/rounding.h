// float32 vectors rounded to narrower dtypes. Include once, after simd.h.

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
