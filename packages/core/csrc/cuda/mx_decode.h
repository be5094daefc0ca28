// From MX blocks back to high precision.
#pragma once

#include <cstdint>

#include "decode.h"
#include "mx_scales.h"
#include "strip.h"

namespace ottava::cuda {

// What the decoding tells of a matrix (see kernels/mx_ops.py).
constexpr int32_t kMxBeyond = 1;  // an element other than zero that is no normal float32
constexpr int32_t kMxFar = 2;     // a scale below 2^-63 or above 2^63, but for that of zeros

// All elements of a block whose scale is not far are normal float32 values: none of them has to be looked at.
OTTAVA_DEVICE bool mx_near(uint32_t scale) { return scale - 64 <= 190 - 64; }

template <class Format, class Target>
struct MxDecode {
    static constexpr int kThreads = Strip::kThreads, kBlocksPerMultiprocessor = 4;
    struct Shared {};
    const uint8_t* codes;
    const uint8_t* scales;
    bool columnwise;
    int64_t rows, cols;
    uint32_t across;
    void* out;
    bool wide, wide_scales;
    int32_t* flag;  // optional

    template <class Thread>
    OTTAVA_DEVICE void operator()(const Thread& thread, Shared&) const {
        const Strip at(thread, rows, across);
        // Of most threads nothing is outside.
        int32_t found = wide && at.height == Strip::kEach && cols - at.col >= kGroup ? strip<true>(at) : strip<false>(at);
        if (flag == nullptr) return;
#pragma unroll
        for (int mask = kWarp / 2; mask > 0; mask /= 2) found |= static_cast<int32_t>(thread.exchange(found, mask));
        // Few find anything that others have not told already.
        if (thread.lane() == 0 && (found & ~*static_cast<volatile int32_t*>(flag)) != 0) thread.set_bits(flag, found);
    }

   private:
    // A thread's rows; returns what it finds.
    template <bool kWhole>
    OTTAVA_DEVICE int32_t strip(const Strip& at) const {
        const int64_t first = at.row * cols + at.col;
        const bool whole = kWhole || wide;
        const int64_t left = kWhole ? int64_t{kGroup} : cols - at.col;
        int64_t count[Strip::kEach];
        Words2 eight[Strip::kEach];
#pragma unroll
        for (int k = 0; k < Strip::kEach; ++k) {
            count[k] = kWhole || k < at.height ? left : 0;
            eight[k] = load_codes(codes, first + k * cols, count[k], whole);
        }
        float factors[kGroup];
        int32_t found = 0;
        bool near = true;
        if (columnwise) {
            const Words2 own = load_codes(scales, at.row / kMxBlock * cols + at.col, count[0], wide_scales);
#pragma unroll
            for (int n = 0; n < kGroup; ++n)
                factors[n] = power(n < count[0] ? (own.w[n / 4] >> (8 * (n % 4))) & 0xff : kNone, near, found);
        }
        const int64_t blocks = mx_blocks(cols), block = at.row * blocks + at.col / kMxBlock;
#pragma unroll
        for (int k = 0; k < Strip::kEach; ++k) {
            if (!columnwise) {
                near = true;
                const float factor = power(count[k] > 0 ? scales[block + k * blocks] : kNone, near, found);
#pragma unroll
                for (int n = 0; n < kGroup; ++n) factors[n] = factor;
            }
            decode(eight[k], factors, first + k * cols, count[k], whole, near, found);
        }
        return found;
    }

    static constexpr uint32_t kNone = 127;  // of elements that there are not

    static OTTAVA_DEVICE float power(uint32_t scale, bool& near, int32_t& found) {
        if (!mx_near(scale)) {
            near = false;
            if (scale != 0) found |= kMxFar;
        }
        return e8m0_value<float, int32_t>(static_cast<int32_t>(scale));
    }

    OTTAVA_DEVICE void decode(const Words2& eight, const float (&factors)[kGroup], int64_t i, int64_t count, bool whole,
                              bool near, int32_t& found) const {
        float elements[kGroup];
        uint32_t bits[kGroup];
#pragma unroll
        for (int n = 0; n < kGroup; n += 2)
            widen_pair<Format>(eight.w[n / 4] >> (8 * (n % 4)), elements[n], elements[n + 1]);
#pragma unroll
        for (int n = 0; n < kGroup; ++n) bits[n] = clean(multiply(elements[n], factors[n]));
        if (!near) {
#pragma unroll
            for (int n = 0; n < kGroup; ++n)
                if (beyond(bits_as<uint32_t>(elements[n]), bits[n])) found |= kMxBeyond;
        }
        DecodedStore<Target>::put(out, i, count, whole, bits, eight);
    }

    // Magnitudes of an element and of its value.
    static OTTAVA_DEVICE bool beyond(uint32_t element, uint32_t value) {
        return element != 0 && element < static_cast<uint32_t>(kInfinity) &&
               (value < 1u << 23 || value == static_cast<uint32_t>(kInfinity));
    }
};

}  // namespace ottava::cuda
