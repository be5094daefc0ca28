// The decoding on grids of scales, with blocks of 1, 32, 128 or all rows, and of 1, 32, 128 or all
// columns.
#pragma once

#include <cstddef>
#include <cstdint>

#include "decode.h"
#include "strip.h"

namespace ottava::cuda {

// The stored types of scales: the value of one scale, and those of eight columns from number `i`
// on.
struct PowerScale {
    typedef uint8_t Stored;
    static constexpr size_t alignment = 8;   // of wide loads
    static constexpr bool negative = false;  // whether any can be
    static OTTAVA_DEVICE float value(Stored scale) { return e8m0_value<float, int32_t>(scale); }
    static OTTAVA_DEVICE void load(const Stored* from, int64_t i, int64_t count, bool wide,
                                   float (&eight)[kGroup]) {
        const Words2 own = load_data(from, i, count, wide);
#pragma unroll
        for (int n = 0; n < kGroup; ++n) eight[n] = value((own.w[n / 4] >> (8 * (n % 4))) & 0xff);
    }
};
struct FloatScale {
    typedef float Stored;
    static constexpr size_t alignment = 16;
    static constexpr bool negative = true;
    static OTTAVA_DEVICE float value(Stored scale) { return scale; }
    static OTTAVA_DEVICE void load(const Stored* from, int64_t i, int64_t count, bool wide,
                                   float (&eight)[kGroup]) {
        const Group<Float32> own = load_group<Float32>(from, i, count, wide);
#pragma unroll
        for (int n = 0; n < kGroup; ++n) eight[n] = own.at(n);
    }
};

template <class Scale>
struct DecodeScales {
    const typename Scale::Stored* scales;
    int64_t stride;            // of their rows
    int row_shift, col_shift;  // rows and columns of a block, as powers of two
    bool wide;

    // The scales of a group of columns, each of which has its own.
    OTTAVA_DEVICE void of_columns(int64_t row, int64_t col, int64_t count,
                                  float (&eight)[kGroup]) const {
        Scale::load(scales, (row >> row_shift) * stride + col, count, wide, eight);
    }
    OTTAVA_DEVICE float of_group(int64_t row, int64_t col) const {
        return Scale::value(scales[(row >> row_shift) * stride + (col >> col_shift)]);
    }
};

template <class Format, class Target, class Scale>
struct GridDecode {
    static constexpr int kThreads = Strip::kThreads, kBlocksPerMultiprocessor = 4;
    struct Shared {};
    const uint8_t* data;
    DecodeScales<Scale> from;
    int64_t rows, cols;
    uint32_t across;
    void* out;
    bool wide;

    template <class Thread>
    OTTAVA_DEVICE void operator()(const Thread& thread, Shared&) const {
        const Strip at(thread, rows, across);
        // Most threads have no element outside of the matrix.
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
        const int64_t rest = kWhole ? int64_t{kGroup} : cols - at.col;
        int64_t count[Strip::kEach];
        Words2 eight[Strip::kEach];
#pragma unroll
        for (int k = 0; k < Strip::kEach; ++k) {
            count[k] = kWhole || k < at.height ? rest : 0;
            eight[k] = load_data(data, first + k * cols, count[k], whole);
        }
        // Where columns have their own scales, blocks have whole strips of rows. Otherwise a group
        // has one scale.
        const bool each = from.col_shift == 0;
        float factors[kGroup];
        if (each) from.of_columns(at.row, at.col, count[0], factors);
#pragma unroll
        for (int k = 0; k < Strip::kEach; ++k) {
            if (!each) {
                const float factor = count[k] > 0 ? from.of_group(at.row + k, at.col) : 1.0f;
#pragma unroll
                for (int n = 0; n < kGroup; ++n) factors[n] = factor;
            }
            decode(eight[k], factors, first + k * cols, count[k], whole);
        }
    }

    OTTAVA_DEVICE void decode(const Words2& eight, const float (&factors)[kGroup], int64_t i,
                              int64_t count, bool whole) const {
        float elements[kGroup];
        uint32_t bits[kGroup];
        Words2 signs = eight;
#pragma unroll
        for (int n = 0; n < kGroup; n += 2)
            widen_pair<Format>(eight.w[n / 4] >> (8 * (n % 4)), elements[n], elements[n + 1]);
#pragma unroll
        for (int n = 0; n < kGroup; ++n) {
            const float product = multiply(elements[n], factors[n]);
            bits[n] = clean(product);
            if (!Scale::negative || bits[n] > static_cast<uint32_t>(kInfinity)) continue;
            signs.w[n / 4] ^= bits_as<uint32_t>(product) >> 31 << (8 * (n % 4) + 7);
        }
        DecodedStore<Target>::put(out, i, count, whole, bits, signs);
    }
};

}  // namespace ottava::cuda
