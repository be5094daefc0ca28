// numerics.h on two and on eight elements at a time, with the GPU's own conversions where it has
// them.
//
// These conversions give the same bytes: the result of a function here does not depend on the way
// it is computed. Words hold two 16-bit elements or four data, the first in the low bits.
#pragma once

#include <cstdint>

#include "../dtypes.h"
#include "../numerics.h"
#include "access.h"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#define OTTAVA_CONVERTS_FP8
#endif

namespace ottava::cuda {

constexpr int kGroup = 8;  // elements that a thread reads, casts and writes at once

OTTAVA_DEVICE uint32_t larger(uint32_t a, uint32_t b) {
    return a > b ? a : b;
}

// Data of two elements: that of `a` in the low byte, that of `b` in the next.
template <class Format>
OTTAVA_DEVICE uint32_t encode_pair(float a, float b) {
#if defined(OTTAVA_CONVERTS_FP8)
    uint16_t data;
    if (Format::mantissa == 3)
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(data) : "f"(b), "f"(a));
    else
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(data) : "f"(b), "f"(a));
    return data;
#else
    return static_cast<uint32_t>(encode<Format, float, int32_t>(a)) |
           (static_cast<uint32_t>(encode<Format, float, int32_t>(b)) << 8);
#endif
}

// The values of the data in the two low bytes; their signs are ignored.
template <class Format>
OTTAVA_DEVICE void widen_pair(uint32_t data, float& a, float& b) {
#if defined(OTTAVA_CONVERTS_FP8)
    uint32_t halves;
    const uint16_t magnitudes = static_cast<uint16_t>(data & 0x7f7f);
    if (Format::mantissa == 3)
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(magnitudes));
    else
        asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(halves) : "h"(magnitudes));
    asm("{.reg .b16 lo, hi; mov.b32 {lo, hi}, %2; cvt.f32.f16 %0, lo; cvt.f32.f16 %1, hi;}"
        : "=f"(a), "=f"(b)
        : "r"(halves));
#else
    a = widen<Format, float, int32_t>(static_cast<int32_t>(data & 0x7f));
    b = widen<Format, float, int32_t>(static_cast<int32_t>((data >> 8) & 0x7f));
#endif
}

// Elements as they lie in memory. A group has `words` words. `observe` raises the largest magnitude
// so far, a bit pattern in one word.

struct Float32 {
    static constexpr int words = kGroup, bytes = 4;
    static OTTAVA_DEVICE float at(const uint32_t* w, int i) { return bits_as<float>(w[i]); }
    static OTTAVA_DEVICE uint32_t load(const void* from, int64_t i) {
        return static_cast<const uint32_t*>(from)[i];
    }
    static OTTAVA_DEVICE void put(uint32_t* w, int i, uint32_t element) { w[i] = element; }
    static OTTAVA_DEVICE float widen(uint32_t element) { return bits_as<float>(element); }
    // NaN is ignored, also in the functions below.
    static OTTAVA_DEVICE uint32_t observe(uint32_t best, uint32_t word) {
#if defined(__CUDA_ARCH__)
        // fmaxf of a number and a NaN is the number.
        return bits_as<uint32_t>(fmaxf(bits_as<float>(best), fabsf(bits_as<float>(word))));
#else
        const uint32_t magnitude = word & kMagnitude;
        return larger(best, magnitude > static_cast<uint32_t>(kInfinity) ? 0 : magnitude);
#endif
    }
    static OTTAVA_DEVICE float largest(uint32_t best) { return bits_as<float>(best); }
    static OTTAVA_DEVICE uint32_t merge(uint32_t a, uint32_t b) { return larger(a, b); }
};

// Two elements in a word, whose magnitudes are compared side by side.
template <class Element>
struct Sixteen {
    static constexpr int words = kGroup / 2, bytes = 2;
    static OTTAVA_DEVICE float at(const uint32_t* w, int i) {
        return Element::widen(i % 2 ? w[i / 2] >> 16 : w[i / 2] & 0xffff);
    }
    static OTTAVA_DEVICE uint32_t load(const void* from, int64_t i) {
        return static_cast<const uint16_t*>(from)[i];
    }
    static OTTAVA_DEVICE void put(uint32_t* w, int i, uint32_t element) {
        w[i / 2] = i % 2 ? w[i / 2] | (element << 16) : element;
    }
    static OTTAVA_DEVICE uint32_t observe(uint32_t best, uint32_t word) {
#if defined(__CUDA_ARCH__)
        // The maximum of a number and a NaN is the number, and `best` is a number.
        return Element::maximum(best, word & 0x7fff7fffu);
#else
        return merge(best, numbers(word));
#endif
    }
    static OTTAVA_DEVICE uint32_t merge(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
        return Element::maximum(a, b);
#else
        return larger(a & 0xffff, b & 0xffff) | larger(a & 0xffff0000u, b & 0xffff0000u);
#endif
    }
    // The larger of the two.
    static OTTAVA_DEVICE float largest(uint32_t best) {
        return Element::widen(larger(best & 0xffff, best >> 16));
    }

private:
    static OTTAVA_DEVICE uint32_t numbers(uint32_t word) {
        const uint32_t low = word & 0x7fff, high = (word >> 16) & 0x7fff;
        return (low > Element::infinity ? 0 : low) | ((high > Element::infinity ? 0 : high) << 16);
    }
};

struct BFloat16 : Sixteen<BFloat16> {
    static constexpr uint32_t infinity = 0x7f80;
    static OTTAVA_DEVICE float widen(uint32_t element) { return bits_as<float>(element << 16); }
#if defined(__CUDACC__)
    static OTTAVA_DEVICE uint32_t maximum(uint32_t a, uint32_t b) {
        uint32_t larger;
        asm("max.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
        return larger;
    }
#endif
};

struct Float16 : Sixteen<Float16> {
    static constexpr uint32_t infinity = 0x7c00;
    static OTTAVA_DEVICE float widen(uint32_t element) {
#if defined(__CUDA_ARCH__)
        float value;
        asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<uint16_t>(element)));
        return value;
#else
        return widen_half(static_cast<uint16_t>(element));
#endif
    }
#if defined(__CUDACC__)
    static OTTAVA_DEVICE uint32_t maximum(uint32_t a, uint32_t b) {
        uint32_t larger;
        asm("max.f16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
        return larger;
    }
#endif
};

// Eight elements of a row.
template <class Source>
struct Group {
    uint32_t w[Source::words];

    OTTAVA_DEVICE float at(int i) const { return Source::at(w, i); }
    OTTAVA_DEVICE uint32_t observe(uint32_t best) const {
        for (int k = 0; k < Source::words; ++k) best = Source::observe(best, w[k]);
        return best;
    }
};

// Loads a whole group from element number `i` on, at a 16-byte address.
template <class Source, bool Kept = false>
OTTAVA_DEVICE Group<Source> load_whole(const void* from, int64_t i) {
    Group<Source> group;
    const Words4* at =
        reinterpret_cast<const Words4*>(static_cast<const uint8_t*>(from) + i * Source::bytes);
#pragma unroll
    for (int k = 0; k < Source::words / 4; ++k) {
        const Words4 four = Kept ? load_kept(at + k) : load_once(at + k);
#pragma unroll
        for (int n = 0; n < 4; ++n) group.w[4 * k + n] = four.w[n];
    }
    return group;
}

// Loads a group at an edge, with wide loads if `wide`, which requires 16-byte addresses of whole
// groups. Elements beyond `count` are zero.
template <class Source>
OTTAVA_DEVICE Group<Source> load_group(const void* from, int64_t i, int64_t count, bool wide) {
    if (wide && count >= kGroup) return load_whole<Source>(from, i);
    Group<Source> group;
#pragma unroll
    for (int k = 0; k < kGroup; ++k)
        Source::put(group.w, k, k < count ? Source::load(from, i + k) : 0);
    return group;
}

// The data of eight elements, times `scale`.
template <class Format, class Source>
OTTAVA_DEVICE Words2 encode_group(const Group<Source>& group, float scale) {
    Words2 data;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int i = 4 * half;
        const uint32_t low =
            encode_pair<Format>(multiply(group.at(i), scale), multiply(group.at(i + 1), scale));
        const uint32_t high =
            encode_pair<Format>(multiply(group.at(i + 2), scale), multiply(group.at(i + 3), scale));
        data.w[half] = low | (high << 16);
    }
    return data;
}

// The data of eight elements, each times its own factor.
template <class Format>
OTTAVA_DEVICE Words2 encode_each(const float (&elements)[kGroup], const float (&factors)[kGroup]) {
    Words2 data;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        uint32_t pairs[2];
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            const int i = 4 * half + 2 * n;
            pairs[n] = encode_pair<Format>(multiply(elements[i], factors[i]),
                                           multiply(elements[i + 1], factors[i + 1]));
        }
        data.w[half] = pairs[0] | (pairs[1] << 16);
    }
    return data;
}

// The code of one element as it lies in memory.
template <class Format, class Source>
OTTAVA_DEVICE uint8_t encode_one(uint32_t element, float scale) {
    return static_cast<uint8_t>(encode_pair<Format>(multiply(Source::widen(element), scale), 0.0f));
}

OTTAVA_DEVICE void store_whole(uint8_t* to, int64_t i, const Words2& data) {
    store_once(reinterpret_cast<Words2*>(to + i), data);
}

// Stores eight data from byte number `i` on; fewer near the end.
OTTAVA_DEVICE void store_data(uint8_t* to, int64_t i, int64_t count, bool wide,
                              const Words2& data) {
    if (wide && count >= kGroup) return store_whole(to, i, data);
#pragma unroll
    for (int k = 0; k < kGroup; ++k)
        if (k < count) to[i + k] = static_cast<uint8_t>(data.w[k / 4] >> (8 * (k % 4)));
}

// Loads eight data, which are zero beyond `count`.
OTTAVA_DEVICE Words2 load_data(const uint8_t* from, int64_t i, int64_t count, bool wide) {
    if (wide && count >= kGroup) return load_once(reinterpret_cast<const Words2*>(from + i));
    Words2 data = {{0, 0}};
#pragma unroll
    for (int k = 0; k < kGroup; ++k)
        if (k < count) data.w[k / 4] |= static_cast<uint32_t>(from[i + k]) << (8 * (k % 4));
    return data;
}

template <class Body>
void with_source(Dtype dtype, const Body& body) {
    switch (dtype) {
        case Dtype::float32:
            return body(Float32{});
        case Dtype::bfloat16:
            return body(BFloat16{});
        default:
            return body(Float16{});
    }
}

template <class Body>
void with_format(Fp8 format, const Body& body) {
    if (format == Fp8::e4m3) return body(E4M3{});
    return body(E5M2{});
}

inline int element_bytes(Dtype dtype) {
    return dtype == Dtype::float32 ? 4 : 2;
}

}  // namespace ottava::cuda
