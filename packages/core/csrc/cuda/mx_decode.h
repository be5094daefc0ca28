// From MX blocks back to high precision.
#pragma once

#include <cstdint>

#include "decode.h"
#include "mx_scales.h"
#include "strip.h"

namespace ottava::cuda {

template <class Format, class Target>
struct MxDecode {
    static constexpr int kThreads = Strip::kThreads, kBlocksPerMultiprocessor = 4;
    struct Shared {};
    const uint8_t* data;
    const uint8_t* scales;
    bool columnwise;
    int64_t rows, cols;
    uint32_t across;
    void* out;
    bool wide, wide_scales;

    template <class Thread>
    OTTAVA_DEVICE void operator()(const Thread& thread, Shared&) const {
        const Strip at(thread, rows, across);
        // Of most threads nothing is outside.
        if (wide && at.height == Strip::kEach && cols - at.col >= kGroup)
            strip<true>(at);
        else
            strip<false>(at);
    }

   private:
    // A thread's rows.
    template <bool kWhole>
    OTTAVA_DEVICE void strip(const Strip& at) const {
        const int64_t first = at.row * cols + at.col;
        const bool whole = kWhole || wide;
        const int64_t left = kWhole ? int64_t{kGroup} : cols - at.col;
        int64_t count[Strip::kEach];
        Words2 eight[Strip::kEach];
#pragma unroll
        for (int k = 0; k < Strip::kEach; ++k) {
            count[k] = kWhole || k < at.height ? left : 0;
            eight[k] = load_data(data, first + k * cols, count[k], whole);
        }
        float factors[kGroup];
        if (columnwise) {
            const Words2 own = load_data(scales, at.row / kMxBlock * cols + at.col, count[0], wide_scales);
#pragma unroll
            for (int n = 0; n < kGroup; ++n)
                factors[n] = power(n < count[0] ? (own.w[n / 4] >> (8 * (n % 4))) & 0xff : kNone);
        }
        const int64_t blocks = mx_blocks(cols), block = at.row * blocks + at.col / kMxBlock;
#pragma unroll
        for (int k = 0; k < Strip::kEach; ++k) {
            if (!columnwise) {
                const float factor = power(count[k] > 0 ? scales[block + k * blocks] : kNone);
#pragma unroll
                for (int n = 0; n < kGroup; ++n) factors[n] = factor;
            }
            decode(eight[k], factors, first + k * cols, count[k], whole);
        }
    }

    static constexpr uint32_t kNone = 127;  // of elements that there are not

    static OTTAVA_DEVICE float power(uint32_t scale) { return e8m0_value<float, int32_t>(static_cast<int32_t>(scale)); }

    OTTAVA_DEVICE void decode(const Words2& eight, const float (&factors)[kGroup], int64_t i, int64_t count,
                              bool whole) const {
        float elements[kGroup];
        uint32_t bits[kGroup];
#pragma unroll
        for (int n = 0; n < kGroup; n += 2)
            widen_pair<Format>(eight.w[n / 4] >> (8 * (n % 4)), elements[n], elements[n + 1]);
#pragma unroll
        for (int n = 0; n < kGroup; ++n) bits[n] = clean(multiply(elements[n], factors[n]));
        DecodedStore<Target>::put(out, i, count, whole, bits, eight);
    }
};

}  // namespace ottava::cuda
