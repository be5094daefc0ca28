// The largest of the values of a warp's or a block's threads, and of partial results that blocks
// wrote to memory.
#pragma once

#include <cstdint>

#include "arithmetic.h"

namespace ottava::cuda {

// Values are bit patterns of floats that are not negative, whose order is that of the floats. Every
// lane gets the result.
template <class Thread>
OTTAVA_DEVICE uint32_t largest_of_warp(const Thread& thread, uint32_t value) {
#pragma unroll
    for (int mask = kWarp / 2; mask > 0; mask /= 2)
        value = larger(value, thread.exchange(value, mask));
    return value;
}

// Each lane has kCount values, a power of two. Of each kCount lanes side by side, lane r gets the
// largest of their values with number r. At each step half of the values go to the lane across, so
// that kCount - 1 exchanges suffice.
template <int kCount, class Thread>
OTTAVA_DEVICE uint32_t largest_of_each(const Thread& thread, const uint32_t (&values)[kCount]) {
    if constexpr (kCount == 1) {
        return values[0];
    } else {
        constexpr int kHalf = kCount / 2;
        const bool upper = (thread.lane() & kHalf) != 0;
        uint32_t rest[kHalf];
#pragma unroll
        for (int i = 0; i < kHalf; ++i) {
            const uint32_t own = upper ? values[i + kHalf] : values[i],
                           sent = upper ? values[i] : values[i + kHalf];
            rest[i] = larger(own, thread.exchange(sent, kHalf));
        }
        return largest_of_each(thread, rest);
    }
}

template <int kThreads>
struct BlockLargest {
    static constexpr int kWarps = kThreads / kWarp;
    uint32_t of_warps[kWarps];

    // Every thread gets the result. The memory may be used again after another barrier.
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

// Each of a number of blocks writes a partial amax, and all blocks of a later launch combine these.
// No counter or result has to be cleared before, and nothing depends on the order in which blocks
// end.
constexpr int kMaxPartials = 512;

// The largest of the partial amaxes that one thread of a later launch reads, all of them at once.
template <int kThreads, class Thread>
OTTAVA_DEVICE uint32_t largest_part(const Thread& thread, const float* partial, int count) {
    static_assert(kMaxPartials % kThreads == 0, "every thread looks at as many");
    uint32_t best = 0;
#pragma unroll
    for (int k = 0; k < kMaxPartials / kThreads; ++k) {
        const int i = thread.index() + k * kThreads;
        if (i < count) best = larger(best, bits_as<uint32_t>(partial[i]));
    }
    return best;
}

}  // namespace ottava::cuda
