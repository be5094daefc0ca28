// Lines of a product once more, in float64: those that values enter which float32 does not hold (see kernels/mx_ops.py).
//
// It is launched after every product of MX blocks and hardly ever has anything to do: then its few blocks have looked at two
// words and are gone. When it has, it is simple rather than fast.
#pragma once

#include <cstdint>

#include "mx_decode.h"
#include "reduce.h"

namespace ottava::cuda {

// 2^exponent.
OTTAVA_DEVICE double power_of_two(int exponent) { return bits_as<double>(static_cast<uint64_t>(exponent + 1023) << 52); }

// Where a matrix is kept, and its elements in float64, which holds them all.
struct Matrix64 {
    const void* values;
    const uint8_t* scales;  // of MX blocks, in the format `format`; null: the values are dense, of the dtype `dtype`
    Fp8 format;
    Dtype dtype;
    bool columnwise, transposed;
    int64_t rows, cols;  // as stored

    OTTAVA_DEVICE double at(int64_t row, int64_t col) const {
        const int64_t r = transposed ? col : row, c = transposed ? row : col, i = r * cols + c;
        if (scales == nullptr) return dense(i);
        const int64_t block = columnwise ? r / kMxBlock * cols + c : r * mx_blocks(cols) + c / kMxBlock;
        const int32_t scale = scales[block];
        const int32_t code = static_cast<const uint8_t*>(values)[i];
        const float element = format == Fp8::e4m3 ? widen<E4M3, float, int32_t>(code) : widen<E5M2, float, int32_t>(code);
        if (scale == kE8m0Nan) return bits_as<float>(kQuietNan);
        return element * power_of_two(scale - 127);
    }

   private:
    OTTAVA_DEVICE double dense(int64_t i) const {
        if (dtype == Dtype::float32) return static_cast<const float*>(values)[i];
        const uint16_t element = static_cast<const uint16_t*>(values)[i];
        return dtype == Dtype::bfloat16 ? BFloat16::widen(element) : Float16::widen(element);
    }
};

// Finite, not zero, and no normal float32.
OTTAVA_DEVICE bool outside_float32(double value) {
    const double magnitude = value < 0 ? -value : value;
    return magnitude > 0 && magnitude <= bits_as<double>(INT64_C(0x7fefffffffffffff)) &&
           (magnitude < bits_as<float>(1 << 23) || magnitude > bits_as<float>(kLargestFinite));
}

struct MxExactLines {
    static constexpr int kThreads = 256, kBlocksPerMultiprocessor = 2, kMaxBlocks = 528;
    struct Shared {
        double line[kThreads];
        BlockLargest<kThreads> largest;
    };
    Matrix64 a, b;  // [rows, inner] and [inner, cols]
    int64_t rows, cols, inner;
    const float* scale_a;  // optional, as is scale_b
    const float* scale_b;
    const void* bias;  // optional
    Dtype bias_dtype;
    const int32_t* flags;
    void* out;
    Dtype out_dtype;

    template <class Thread>
    OTTAVA_DEVICE void operator()(const Thread& thread, Shared& shared) const {
        const int32_t left = flags[0], right = flags[1];
        if ((left | right) == 0) return;
        if (scale_a != nullptr || scale_b != nullptr) return lines<true>(thread, shared, true);
        if ((left & kMxBeyond) != 0) lines<true>(thread, shared, false);
        if ((right & kMxBeyond) != 0) lines<false>(thread, shared, false);
    }

   private:
    // The element number `k` of a row of the left matrix, or of a column of the right one.
    template <bool kRows>
    OTTAVA_DEVICE double along(int64_t line, int64_t k) const {
        return kRows ? a.at(line, k) : b.at(k, line);
    }

    // All of them, or those that have such values. An element that two lines have is the same number in both.
    template <bool kRows, class Thread>
    OTTAVA_DEVICE void lines(const Thread& thread, Shared& shared, bool all) const {
        const int64_t count = kRows ? rows : cols;
#pragma unroll 1
        for (int64_t line = thread.block(); line < count; line += thread.blocks()) {
            if (all || concerned<kRows>(thread, shared, line)) compute<kRows>(thread, shared, line);
        }
    }

    template <bool kRows, class Thread>
    OTTAVA_DEVICE bool concerned(const Thread& thread, Shared& shared, int64_t line) const {
        uint32_t found = 0;
#pragma unroll 1
        for (int64_t k = thread.index(); k < inner && found == 0; k += kThreads) found = outside_float32(along<kRows>(line, k));
        thread.barrier();  // all have read what was found in the line before
        return shared.largest(thread, found) != 0;
    }

    template <bool kRows, class Thread>
    OTTAVA_DEVICE void compute(const Thread& thread, Shared& shared, int64_t line) const {
        const int64_t count = kRows ? cols : rows;
#pragma unroll 1
        for (int64_t first = 0; first < count; first += kThreads) {
            const int64_t other = first + thread.index();
            double sum = 0;
#pragma unroll 1
            for (int64_t from = 0; from < inner; from += kThreads) {
                const int64_t k = from + thread.index();
                thread.barrier();
                if (k < inner) shared.line[thread.index()] = along<kRows>(line, k);
                thread.barrier();
                if (other >= count) continue;
                const int length = inner - from < kThreads ? static_cast<int>(inner - from) : kThreads;
#pragma unroll 1
                for (int n = 0; n < length; ++n) sum += shared.line[n] * along<!kRows>(other, from + n);
            }
            if (other < count) put(kRows ? line : other, kRows ? other : line, sum);
        }
    }

    OTTAVA_DEVICE void put(int64_t row, int64_t col, double value) const {
        if (scale_a != nullptr) value *= *scale_a;
        if (scale_b != nullptr) value *= *scale_b;
        if (bias != nullptr) value += Matrix64{bias, nullptr, Fp8::e4m3, bias_dtype, false, false, 1, cols}.at(0, col);
        const int64_t i = row * cols + col;
        const float rounded = static_cast<float>(value);
        if (out_dtype == Dtype::bfloat16)
            static_cast<uint16_t*>(out)[i] = to_bfloat16(rounded);
        else if (out_dtype == Dtype::float16)
            static_cast<uint16_t*>(out)[i] = to_half(rounded);
        else
            static_cast<float*>(out)[i] = rounded;
    }
};

}  // namespace ottava::cuda
