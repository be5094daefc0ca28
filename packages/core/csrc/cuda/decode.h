// Kernels from data back to high precision.
#pragma once

#include <cstdint>

#include "arithmetic.h"

namespace ottava::cuda {

// The bits of a product of magnitudes, in which every NaN becomes the same NaN.
OTTAVA_DEVICE uint32_t clean(float product) {
    const uint32_t bits = bits_as<uint32_t>(product) & kMagnitude;
    return bits > static_cast<uint32_t>(kInfinity) ? static_cast<uint32_t>(kQuietNan) : bits;
}

// Stores eight magnitudes with the signs of eight data, from element number `i` of a result on.
template <class Target>
struct DecodedStore;

template <>
struct DecodedStore<Float32> {
    static OTTAVA_DEVICE void put(void* out, int64_t i, int64_t count, bool wide,
                                  const uint32_t (&bits)[kGroup], const Words2& data) {
        uint32_t* to = static_cast<uint32_t*>(out) + i;
        Words4 fours[2];
#pragma unroll
        for (int k = 0; k < kGroup; ++k)
            fours[k / 4].w[k % 4] = bits[k] | ((data.w[k / 4] << (24 - 8 * (k % 4))) & 0x80000000u);
        if (wide && count >= kGroup) {
            store_once(reinterpret_cast<Words4*>(to), fours[0]);
            store_once(reinterpret_cast<Words4*>(to) + 1, fours[1]);
            return;
        }
#pragma unroll
        for (int k = 0; k < kGroup; ++k)
            if (k < count) to[k] = fours[k / 4].w[k % 4];
    }
};

// Results are rounded to 16 bits, and the sign is put on last.
template <class Narrow>
struct NarrowStore {
    static OTTAVA_DEVICE void put(void* out, int64_t i, int64_t count, bool wide,
                                  const uint32_t (&bits)[kGroup], const Words2& data) {
        uint16_t* to = static_cast<uint16_t*>(out) + i;
        Words4 four;
#pragma unroll
        for (int k = 0; k < kGroup; k += 2) {
            const uint32_t code = data.w[k / 4] >> (8 * (k % 4));
            const uint32_t signs = ((code & 0x80) << 8) | ((code & 0x8000) << 16);
            four.w[k / 2] = Narrow::pair(bits[k], bits[k + 1]) | signs;
        }
        if (wide && count >= kGroup) return store_once(reinterpret_cast<Words4*>(to), four);
#pragma unroll
        for (int k = 0; k < kGroup; ++k)
            if (k < count) to[k] = static_cast<uint16_t>(four.w[k / 2] >> (16 * (k % 2)));
    }
};

// Rounds two magnitudes. The GPU's conversions give another NaN than numerics.h.
struct NarrowToBFloat16 {
    static OTTAVA_DEVICE uint32_t pair(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
        uint32_t both;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;"
            : "=r"(both)
            : "f"(bits_as<float>(b)), "f"(bits_as<float>(a)));
        if (a > static_cast<uint32_t>(kInfinity)) both = (both & 0xffff0000u) | (kQuietNan >> 16);
        if (b > static_cast<uint32_t>(kInfinity)) both = (both & 0xffffu) | kQuietNan;
        return both;
#else
        return to_bfloat16(bits_as<float>(a)) |
               (static_cast<uint32_t>(to_bfloat16(bits_as<float>(b))) << 16);
#endif
    }
};

struct NarrowToHalf {
    static OTTAVA_DEVICE uint32_t pair(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
        uint32_t both;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;"
            : "=r"(both)
            : "f"(bits_as<float>(b)), "f"(bits_as<float>(a)));
        if (a > static_cast<uint32_t>(kInfinity)) both = (both & 0xffff0000u) | Half::nan_code;
        if (b > static_cast<uint32_t>(kInfinity)) both = (both & 0xffffu) | (Half::nan_code << 16);
        return both;
#else
        return to_half(bits_as<float>(a)) |
               (static_cast<uint32_t>(to_half(bits_as<float>(b))) << 16);
#endif
    }
};

template <>
struct DecodedStore<BFloat16> : NarrowStore<NarrowToBFloat16> {};
template <>
struct DecodedStore<Float16> : NarrowStore<NarrowToHalf> {};

// Decodes a run of data with one scale.
template <class Format, class Target>
struct Decode {
    static constexpr int kThreads = 256, kBlocksPerMultiprocessor = 4, kUnroll = 4;
    static constexpr int64_t kChunk = int64_t{kThreads} * kGroup * kUnroll;
    struct Shared {};
    const uint8_t* src;
    int64_t count;
    const float* scale_inv;  // optional
    void* out;
    bool wide;

    template <class Thread>
    OTTAVA_DEVICE void operator()(const Thread& thread, Shared&) const {
        const float factor = scale_inv == nullptr ? 1.0f : *scale_inv;
        // A negative scale inverts all signs, which are put on last.
        const uint32_t turned = bits_as<uint32_t>(factor) >> 31 != 0 ? 0x80808080u : 0u;
        const int64_t first = thread.block() * kChunk + thread.index() * kGroup;
        Words2 data[kUnroll];
#pragma unroll
        for (int k = 0; k < kUnroll; ++k) {
            const int64_t i = first + k * kThreads * kGroup;
            data[k] = load_data(src, i, count - i, wide);
        }
#pragma unroll
        for (int k = 0; k < kUnroll; ++k) {
            const int64_t i = first + k * kThreads * kGroup;
            uint32_t bits[kGroup];
#pragma unroll
            for (int n = 0; n < kGroup; n += 2) {
                float a, b;
                widen_pair<Format>(data[k].w[n / 4] >> (8 * (n % 4)), a, b);
                bits[n] = clean(multiply(a, factor));
                bits[n + 1] = clean(multiply(b, factor));
            }
            const Words2 signs{{data[k].w[0] ^ turned, data[k].w[1] ^ turned}};
            DecodedStore<Target>::put(out, i, count - i, wide, bits, signs);
        }
    }
};

}  // namespace ottava::cuda
