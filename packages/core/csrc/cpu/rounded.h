// Float32 elements that count as rounded to a narrower dtype, and their cast. Include once, after
// cast.h.

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
