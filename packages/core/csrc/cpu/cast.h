// Kernels over contiguous runs: cast. Include once, after amax.h.
//
// The unit is a line of 64 data, which a streaming store needs. Every instruction set has the same
// generic line, except AVX-512, for which cast_avx512.h has another one.

// The multipliers of elements: for the vector that begins with the given element of a line, in the
// order of the elements, and in the order in which a line's cast arranges them. This class has one
// scale in every lane. Those of mx.h are positive or NaN.
struct Factor {
    f32v lanes;
    bool positive;  // not zero or NaN either: a product then has the sign of the element
    explicit Factor(float scale) : lanes(broadcast(scale)), positive(scale > 0.0f) {}
    OTTAVA_INLINE f32v in_order(int) const { return lanes; }
    OTTAVA_INLINE f32v arranged(int) const { return lanes; }
};

// Casts 16 elements, the first of which is the given element of a line.
template <class Element, class Format, class Multipliers>
OTTAVA_INLINE u8x16 cast16(const typename Element::storage* src, const Multipliers& multipliers,
                           int element = 0) {
    i32v data[16 / kLanes];
    for (int k = 0; k < 16 / kLanes; ++k)
        data[k] = encode_element<Format, f32v, i32v>(Element::load_floats(src + k * kLanes) *
                                                     multipliers.in_order(element + k * kLanes));
    return narrow8(data);
}

// Casts fewer than 16 elements through buffers, so that no byte outside the run is touched.
template <class Element, class Format>
void cast_partial(const typename Element::storage* src, int64_t n, const Factor& factor,
                  uint8_t* out) {
    typename Element::storage in[16] = {};
    memcpy(in, src, static_cast<size_t>(n) * sizeof(in[0]));
    const u8x16 data = cast16<Element, Format>(in, factor);
    memcpy(out, &data, static_cast<size_t>(n));
}

#if defined(__AVX512BW__)
#include "cast_avx512.h"
#else
// A line of 64 data, as four pieces.
struct Line {
    u8x16 pieces[4];
    OTTAVA_INLINE u8x16 piece(int k) const { return pieces[k]; }
    template <bool Stream>
    OTTAVA_INLINE void put_to(uint8_t* out) const {
        for (int k = 0; k < 4; ++k) put<Stream>(out + 16 * k, pieces[k]);
    }
};

template <class Element, class Format>
struct LineCast {
    const Factor factor;
    explicit LineCast(float scale) : factor(scale) {}
    OTTAVA_INLINE Line operator()(const typename Element::storage* src) const {
        return scaled(src, factor);
    }
    template <class Multipliers>
    static OTTAVA_INLINE Line scaled(const typename Element::storage* src,
                                     const Multipliers& multipliers) {
        return generic(src, multipliers);
    }
    // Casts with multipliers of any sign.
    template <class Multipliers>
    static OTTAVA_INLINE Line generic(const typename Element::storage* src,
                                      const Multipliers& multipliers) {
        Line line;
        for (int k = 0; k < 4; ++k)
            line.pieces[k] = cast16<Element, Format>(src + 16 * k, multipliers, 16 * k);
        return line;
    }
    // Whether `scaled` takes the multipliers of a line in another order than that of its elements.
    static constexpr bool arranges = false;
    static OTTAVA_INLINE void arrange(const float*, float*) {}
};
#endif

template <class Element, class Format, bool Stream, class Observer>
void cast_aligned(const typename Element::storage* src, int64_t n,
                  const LineCast<Element, Format>& cast64, uint8_t* out, Observer& observer) {
    Observer own = observer;  // a copy that stays in registers
    int64_t i = 0;
    for (; i + kLine <= n; i += kLine) {
        cast64(src + i).template put_to<Stream>(out + i);
        own.line(src + i);
    }
    own.some(src + i, n - i);
    for (; i + 16 <= n; i += 16) store(out + i, cast16<Element, Format>(src + i, cast64.factor));
    if (i < n) cast_partial<Element, Format>(src + i, n - i, cast64.factor, out + i);
    observer = own;
}

template <class Element, class Format, class Observer>
float cast_typed(const void* from, int64_t n, float scale, uint8_t* out, bool stream) {
    const auto* src = static_cast<const typename Element::storage*>(from);
    const LineCast<Element, Format> cast64(scale);
    Observer observer;
    if (!stream) {
        cast_aligned<Element, Format, false>(src, n, cast64, out, observer);
        return observer.value();
    }
    int64_t head = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(out) & (kLine - 1));
    head = head < n ? head : n;
    cast_aligned<Element, Format, false>(src, head, cast64, out, observer);
    cast_aligned<Element, Format, true>(src + head, n - head, cast64, out + head, observer);
    finish_streaming();
    return observer.value();
}

template <template <class> class Observer, class Format>
float cast_format(const void* src, Dtype dtype, int64_t n, float scale, uint8_t* out, bool stream) {
    switch (dtype) {
        case Dtype::float32:
            return cast_typed<Float32, Format, Observer<Float32>>(src, n, scale, out, stream);
        case Dtype::bfloat16:
            return cast_typed<BFloat16, Format, Observer<BFloat16>>(src, n, scale, out, stream);
        default:
            return cast_typed<Float16, Format, Observer<Float16>>(src, n, scale, out, stream);
    }
}

template <template <class> class Observer>
float cast_run(const void* src, Dtype dtype, int64_t n, float scale, uint8_t* out, Fp8 format,
               bool stream) {
    if (format == Fp8::e4m3) return cast_format<Observer, E4M3>(src, dtype, n, scale, out, stream);
    return cast_format<Observer, E5M2>(src, dtype, n, scale, out, stream);
}
