// The scales of MX blocks.
#pragma once

#include <cstdint>

#include "arithmetic.h"

namespace ottava::cuda {

constexpr int kMxBlock = 32;

// The number of blocks along a row of `cols` elements.
OTTAVA_DEVICE int64_t mx_blocks(int64_t cols) {
    return (cols + kMxBlock - 1) / kMxBlock;
}

// The code of a scale. `amax` is not negative.
template <class Format>
OTTAVA_DEVICE uint32_t block_scale(float amax, bool floor) {
    return static_cast<uint32_t>(floor ? e8m0_floor<Format, float, int32_t>(amax)
                                       : e8m0_up<Format, float, int32_t>(amax));
}

// e8m0_multiplier of the code of a block that is not NaN: the only multiplier that is not a normal
// number is 2^-127.
OTTAVA_DEVICE float block_factor(uint32_t code) {
    return bits_as<float>(larger((kE8m0Max - code) << 23, static_cast<uint32_t>(kTwoToMinus127)));
}

// The exponents of amaxes, whose signs are ignored.
template <class Format>
struct MxScaleOfAmax {
    static constexpr int kThreads = 256, kBlocksPerMultiprocessor = 4;
    static constexpr int64_t kChunk = int64_t{kThreads} * kGroup;
    struct Shared {};
    const float* amax;
    int64_t count;
    bool wide, floor;
    uint8_t* exponents;

    template <class Thread>
    OTTAVA_DEVICE void operator()(const Thread& thread, Shared&) const {
        const int64_t i = thread.block() * kChunk + thread.index() * kGroup;
        const Group<Float32> group = load_group<Float32>(amax, i, count - i, wide);
        Words2 codes = {{0, 0}};
#pragma unroll
        for (int k = 0; k < kGroup; ++k) {
            const float magnitude = bits_as<float>(group.w[k] & kMagnitude);
            codes.w[k / 4] |= block_scale<Format>(magnitude, floor) << (8 * (k % 4));
        }
        store_data(exponents, i, count - i, wide, codes);
    }
};

}  // namespace ottava::cuda
