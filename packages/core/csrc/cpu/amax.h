// Kernel over a contiguous run: amax. Include once, after simd.h.

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
