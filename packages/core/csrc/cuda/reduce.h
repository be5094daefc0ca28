// The largest of what the threads of a warp or a block hold, and of what blocks have left in
// memory.
#pragma once

#include <cstdint>

#include "arithmetic.h"

namespace ottava::cuda {

// Bit patterns of floats that are not negative: their order is that of the values. Every lane gets
// the result.
template <class Thread>
OTTAVA_DEVICE uint32_t largest_of_warp(const Thread& thread, uint32_t value) {
#pragma unroll
    for (int mask = kWarp / 2; mask > 0; mask /= 2)
        value = larger(value, thread.exchange(value, mask));
    return value;
}

// Of kCount values that each lane has, a power of two, the largest of kCount lanes side by side:
// the lane r of them gets that of number r. At each step half of the values go to the lane across,
// so that there are kCount - 1 exchanges for all.
template <int kCount, class Thread>
OTTAVA_DEVICE uint32_t largest_of_each(const Thread& thread, const uint32_t (&values)[kCount]) {
    if constexpr (kCount == 1) {
        return values[0];
    } else {
        constexpr int kHalf = kCount / 2;
        const bool upper = (thread.lane() & kHalf) != 0;
        uint32_t left[kHalf];
#pragma unroll
        for (int i = 0; i < kHalf; ++i) {
            const uint32_t kept = upper ? values[i + kHalf] : values[i],
                           given = upper ? values[i] : values[i + kHalf];
            left[i] = larger(kept, thread.exchange(given, kHalf));
        }
        return largest_of_each(thread, left);
    }
}

template <int kThreads>
struct BlockLargest {
    static constexpr int kWarps = kThreads / kWarp;
    uint32_t of_warps[kWarps];

    // Every thread gets the result. The next use of the same memory is after another barrier.
    template <class Thread>
    OTTAVA_DEVICE uint32_t operator()(const Thread& thread, uint32_t value) {
        value = largest_of_warp(thread, value);
        if (thread.lane() == 0) of_warps[thread.warp()] = value;
        thread.barrier();
        uint32_t largest = of_warps[0];
#pragma unroll
        for (int k = 1; k < kWarps; ++k) largest = larger(largest, of_warps[k]);
        return largest;
    }
};

// An amax is left by each of a number of blocks, for all the blocks of a later launch to combine:
// no counter or result has to be cleared before, and nothing depends on the order in which blocks
// end.
constexpr int kMaxPartials = 512;

// The largest of those that a thread of a block of a later launch looks at, all of them at once.
template <int kThreads, class Thread>
OTTAVA_DEVICE uint32_t largest_part(const Thread& thread, const float* partial, int count) {
    static_assert(kMaxPartials % kThreads == 0, "every thread looks at as many");
    uint32_t seen = 0;
#pragma unroll
    for (int k = 0; k < kMaxPartials / kThreads; ++k) {
        const int i = thread.index() + k * kThreads;
        if (i < count) seen = larger(seen, bits_as<uint32_t>(partial[i]));
    }
    return seen;
}

}  // namespace ottava::cuda
