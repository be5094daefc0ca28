// The source of a cast's scale, and the statistics that a cast writes: an argument of the cast
// kernels.
#pragma once

#include <cstdint>

#include "reduce.h"

namespace ottava::cuda {

// A scale that is known. Raises `amax` to the largest magnitude and `saturated` by the number of
// elements beyond the format's maximum; both are optional, and so is scale_inv.
struct KnownScale {
    const float* scale;
    float* amax;
    int64_t* saturated;
    float* scale_inv;

    template <int kThreads>
    struct Shared {
        BlockLargest<kThreads> largest;
    };

    template <class Format, int kThreads, class Thread>
    OTTAVA_DEVICE float get(const Thread& thread, Shared<kThreads>&) const {
        const float factor = *scale;
        if (scale_inv != nullptr && thread.block() == 0 && thread.index() == 0)
            *scale_inv = divide(1.0f, factor);
        return factor;
    }

    OTTAVA_DEVICE bool counts() const { return saturated != nullptr; }

    // Adds the largest magnitude of this thread's elements, and the number of those that were
    // clamped.
    template <int kThreads, class Thread>
    OTTAVA_DEVICE void leave(const Thread& thread, Shared<kThreads>& shared, float best,
                             int clamped) const {
        if (clamped != 0) thread.add(saturated, clamped);
        if (amax == nullptr) return;
        const uint32_t largest = shared.largest(thread, bits_as<uint32_t>(best));
        if (thread.index() == 0)
            thread.raise(reinterpret_cast<int32_t*>(amax), static_cast<int32_t>(largest));
    }
};

// The scale that follows from the tensor's own amax. Each of `count` blocks of the launch before
// wrote a partial amax.
struct CurrentScale {
    const float* partial;
    int count;
    float epsilon;
    bool force_pow_2;
    float* amax;  // optional, as is scale
    float* scale;
    float* scale_inv;

    template <int kThreads>
    struct Shared {
        BlockLargest<kThreads> largest;
    };

    template <class Format, int kThreads, class Thread>
    OTTAVA_DEVICE float get(const Thread& thread, Shared<kThreads>& shared) const {
        const float largest =
            bits_as<float>(shared.largest(thread, largest_part<kThreads>(thread, partial, count)));
        const Scale result = scale_from_amax(largest, format_max<Format>(), epsilon, force_pow_2);
        if (thread.block() == 0 && thread.index() == 0) {
            if (amax != nullptr) *amax = largest;
            if (scale != nullptr) *scale = result.scale;
            *scale_inv = result.scale_inv;
        }
        return result.scale;
    }

    OTTAVA_DEVICE bool counts() const { return false; }

    template <int kThreads, class Thread>
    OTTAVA_DEVICE void leave(const Thread&, Shared<kThreads>&, float, int) const {}
};

// Whether a cast clamps an element. NaN is not clamped.
template <class Format>
OTTAVA_DEVICE bool beyond(float x, float scale) {
    const uint32_t magnitude = bits_as<uint32_t>(multiply(x, scale)) & kMagnitude;
    return magnitude > static_cast<uint32_t>(Format::limit) &&
           magnitude <= static_cast<uint32_t>(kInfinity);
}

// The number of a group's elements that a cast clamps. They are read again, because few groups have
// any, and no registers are held for them.
template <class Format, class Source>
OTTAVA_DEVICE int clamped_of(const void* src, int64_t first, int64_t count, float scale) {
    int clamped = 0;
#pragma unroll 1
    for (int64_t i = first; i < first + count; ++i)
        clamped += beyond<Format>(Source::widen(Source::load(src, i)), scale);
    return clamped;
}

// Whether a cast may clamp elements of which `best` is the largest: products keep the order of
// magnitudes.
template <class Format>
OTTAVA_DEVICE bool clamps(float best, float scale) {
    const uint32_t magnitude = bits_as<uint32_t>(multiply(best, scale)) & kMagnitude;
    return magnitude > static_cast<uint32_t>(Format::limit);
}

}  // namespace ottava::cuda
