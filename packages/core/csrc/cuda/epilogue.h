// The last step of a product: scales and bias in float32, and one rounding.
#pragma once

#include <cstdint>

#include "decode.h"
#include "strip.h"

namespace ottava::cuda {

// The addition is not fused with the product before it.
OTTAVA_DEVICE float add(float a, float b) {
#if defined(__CUDA_ARCH__)
    return __fadd_rn(a, b);
#else
    return a + b;
#endif
}

struct Bias {
    const void* values;  // one for each column; optional
    Dtype dtype;
    bool wide;

    OTTAVA_DEVICE void load(int64_t col, int64_t count, float (&eight)[kGroup]) const {
        if (dtype == Dtype::float32) return load_as<Float32>(col, count, eight);
        if (dtype == Dtype::bfloat16) return load_as<BFloat16>(col, count, eight);
        load_as<Float16>(col, count, eight);
    }

private:
    template <class Source>
    OTTAVA_DEVICE void load_as(int64_t col, int64_t count, float (&eight)[kGroup]) const {
        const Group<Source> group = load_group<Source>(values, col, count, wide);
#pragma unroll
        for (int k = 0; k < kGroup; ++k) eight[k] = group.at(k);
    }
};

// The product of two optional factors.
struct Factors {
    const float* a;
    const float* b;
    OTTAVA_DEVICE float get() const {
        return multiply(a == nullptr ? 1.0f : *a, b == nullptr ? 1.0f : *b);
    }
};

template <class Target>
struct Epilogue {
    static constexpr int kThreads = Strip::kThreads, kBlocksPerMultiprocessor = 3;
    struct Shared {};
    const float* acc;
    int64_t rows, cols;
    uint32_t across;
    bool wide;  // `out` too
    Factors scale;
    Bias bias;
    void* out;

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
    template <bool kWhole>
    OTTAVA_DEVICE void strip(const Strip& at) const {
        const int64_t first = at.row * cols + at.col;
        const bool whole = kWhole || wide;
        const int64_t rest = kWhole ? int64_t{kGroup} : cols - at.col;
        Group<Float32> groups[Strip::kEach];
#pragma unroll
        for (int k = 0; k < Strip::kEach; ++k)
            groups[k] = load_group<Float32>(acc, first + k * cols,
                                            kWhole || k < at.height ? rest : 0, whole);
        const float factor = scale.get();
        float added[kGroup];
        const bool biased = bias.values != nullptr;
        if (biased) bias.load(at.col, rest, added);
#pragma unroll
        for (int k = 0; k < Strip::kEach; ++k) {
            uint32_t magnitudes[kGroup];
            Words2 signs = {{0, 0}};
#pragma unroll
            for (int n = 0; n < kGroup; ++n) {
                const float product = multiply(groups[k].at(n), factor);
                const uint32_t bits = bits_as<uint32_t>(biased ? add(product, added[n]) : product);
                magnitudes[n] = clean(bits_as<float>(bits));
                // NaN has no sign.
                const uint32_t sign =
                    magnitudes[n] > static_cast<uint32_t>(kInfinity) ? 0 : bits >> 31;
                signs.w[n / 4] |= sign << (8 * (n % 4) + 7);
            }
            const int64_t count = kWhole || k < at.height ? rest : 0;
            DecodedStore<Target>::put(out, first + k * cols, count, whole, magnitudes, signs);
        }
    }
};

}  // namespace ottava::cuda
