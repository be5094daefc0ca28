// Kernels over contiguous runs: amax, and the number of elements that saturate. Include once, after
// simd.h.

template <class V>
OTTAVA_INLINE V larger(V a, V b) {
    return a > b ? a : b;
}

// The largest magnitude so far, as a bit pattern of the element type, because bit patterns are
// ordered as magnitudes are.
template <class Element>
class Largest {
    typedef typename Element::integers V;
    typedef typename Element::storage Storage;
    static constexpr int64_t kCount = sizeof(V) / sizeof(Storage);
    V best_[4] = {V{}, V{}, V{}, V{}};

    OTTAVA_INLINE void take(V& into, V x) const {
        constexpr Storage magnitude = static_cast<Storage>(~Storage{0}) >> 1;
        const V infinity = V{} + Element::infinity;
        x &= V{} + static_cast<decltype(Element::infinity)>(magnitude);
        into = larger(into, x > infinity ? V{} : x);
    }

public:
    // Observes kLine elements.
    OTTAVA_INLINE void line(const Storage* src) {
        for (int64_t k = 0; k < kLine / kCount; ++k) take(best_[k % 4], load<V>(src + k * kCount));
    }
    OTTAVA_INLINE void some(const Storage* src, int64_t n) {
        int64_t i = 0;
        for (; i + kCount <= n; i += kCount) take(best_[0], load<V>(src + i));
        if (i == n) return;
        Storage rest[kCount] = {};
        memcpy(rest, src + i, static_cast<size_t>(n - i) * sizeof(Storage));
        take(best_[1], load<V>(rest));
    }
    float value() const {
        Storage lanes[kCount], result = 0;
        store(lanes, larger(larger(best_[0], best_[1]), larger(best_[2], best_[3])));
        for (int64_t k = 0; k < kCount; ++k) result = lanes[k] > result ? lanes[k] : result;
        return Element::widen(result);
    }
};

// The observer of a cast that needs no amax.
template <class Element>
struct Unobserved {
    OTTAVA_INLINE void line(const typename Element::storage*) {}
    OTTAVA_INLINE void some(const typename Element::storage*, int64_t) {}
    float value() const { return 0.0f; }
};

template <class Element>
float amax_typed(const void* from, int64_t n) {
    const auto* src = static_cast<const typename Element::storage*>(from);
    Largest<Element> largest;
    int64_t i = 0;
    for (; i + kLine <= n; i += kLine) largest.line(src + i);
    largest.some(src + i, n - i);
    return largest.value();
}

float amax_run(const void* src, Dtype dtype, int64_t n) {
    switch (dtype) {
        case Dtype::float32:
            return amax_typed<Float32>(src, n);
        case Dtype::bfloat16:
            return amax_typed<BFloat16>(src, n);
        default:
            return amax_typed<Float16>(src, n);
    }
}

// The number of elements that a cast with `scale` clamps: those beyond `limit` in magnitude. NaN
// does not count.
template <class Element>
int64_t saturated_typed(const void* from, int64_t n, float scale, float limit) {
    const auto* src = static_cast<const typename Element::storage*>(from);
    const f32v factor = broadcast(scale), top = broadcast(limit);
    int64_t count = 0, i = 0;
    while (i + kLanes <= n) {
        i32v clamped = {};
        for (int64_t last = i + (int64_t{1} << 30) * kLanes; i + kLanes <= n && i < last;
             i += kLanes) {
            const f32v x = Element::load_floats(src + i) * factor;
            // A comparison that holds is -1.
            clamped -= (x > top) | (x < -top);
        }
        for (int k = 0; k < kLanes; ++k) count += clamped[k];
    }
    typename Element::storage rest[kLanes] = {};
    memcpy(rest, src + i, static_cast<size_t>(n - i) * sizeof(rest[0]));
    const f32v x = Element::load_floats(rest) * factor;
    // Zeros fill the rest. An infinite scale turns them into NaN, which does not count.
    const i32v clamped = (x > top) | (x < -top);
    for (int k = 0; k < n - i; ++k) count -= clamped[k];
    return count;
}

int64_t saturated_run(const void* src, Dtype dtype, int64_t n, float scale, float limit) {
    switch (dtype) {
        case Dtype::float32:
            return saturated_typed<Float32>(src, n, scale, limit);
        case Dtype::bfloat16:
            return saturated_typed<BFloat16>(src, n, scale, limit);
        default:
            return saturated_typed<Float16>(src, n, scale, limit);
    }
}
