// The arithmetic of layouts with small elements: rounding at random, the value of a rounded
// element, scales of two levels, Philox and the Hadamard transform. As numerics.h: header only,
// host and device, a scalar or a vector, branch free, internal linkage.
#pragma once

#include <type_traits>

#include "levels_jobs.h"
#include "numerics.h"

// Before a loop that is unrolled, on the device wholly: what it indexes stays in registers there.
#if defined(__CUDACC__)
#define OTTAVA_UNROLL(count) _Pragma("unroll")
#else
#define OTTAVA_PRAGMA(text) _Pragma(#text)
#define OTTAVA_UNROLL(count) OTTAVA_PRAGMA(GCC unroll count)
#endif

namespace ottava {

// The number of blocks that a size has.
OTTAVA_HD int64_t levels_count(int64_t size, int64_t block) {
    return (size + block - 1) / block;
}

// The whole part of numbers as integers, and integers as numbers.
template <class To, class From>
OTTAVA_HD To converted(From from) {
#if !defined(__CUDACC__)
    if constexpr (!std::is_arithmetic_v<From>)
        return __builtin_convertvector(from, To);
    else
#endif
        return static_cast<To>(from);
}

// -- elements --

// Calls body(format) with the format of an element.
#if defined(__CUDACC__)
// On the host for a function of the host, on the device for one of the device.
#pragma nv_exec_check_disable
#endif
template <class Body>
OTTAVA_HD void with_level_element(LevelElement element, const Body& body) {
    switch (element) {
        case LevelElement::e4m3:
            return body(E4M3());
        case LevelElement::e5m2:
            return body(E5M2());
        case LevelElement::int8:
            return body(Int8());
        case LevelElement::e2m1:
            return body(E2M1());
        case LevelElement::e2m3:
            return body(E2M3());
        case LevelElement::e3m2:
            return body(E3M2());
        case LevelElement::int4:
            return body(Int4());
        case LevelElement::mxint8:
            return body(MxInt8());
        default:
            return body(MxInt8Symmetric());
    }
}

// The power of two whose unit in the last place is that of `Format` at the magnitude, as the bits
// of its binade, and the magnitude clamped to the format's.
template <class Format, class F, class I>
OTTAVA_HD I binade_of(I magnitude, I& clamped) {
    constexpr int32_t min_normal = (127 + 1 - Format::bias) << 23;
    const I limit = I{} + Format::limit, lowest = I{} + min_normal;
    clamped = magnitude < limit ? magnitude : limit;
    const I exponent = clamped & kInfinity;
    return exponent > lowest ? exponent : lowest;
}

// The number that a value becomes as an element, without the code; any number for NaN.
template <class Format, class F, class I>
OTTAVA_HD F rounded_element(F x) {
    const I bits = bits_as<I>(x);
    if constexpr (is_integer<Format>) {
        const F ones = bits_as<F>(I{} + (kOnes - (Format::fraction << 23)));
        return (bits_as<F>(clamped_integer<Format, F, I>(x)) + ones) - ones;
    } else {
        const I magnitude = bits & kMagnitude;
        I clamped;
        const I binade = binade_of<Format, F, I>(magnitude, clamped);
        const F addend = bits_as<F>(binade + ((23 - Format::mantissa) << 23));
        const F value = (bits_as<F>(clamped) + addend) - addend;
        return bits_as<F>(bits_as<I>(value) | (bits ^ magnitude));
    }
}

// -1 where a random word says that a number of units >= 0, of which `below` is the whole part, goes
// up, else 0: where the word is less than floor((units - below) * 2^32).
template <class F, class I, class U>
OTTAVA_HD I goes_up(F units, I below, U random) {
    const F scaled = (units - converted<F>(below)) * 4294967296.0f;
    // Integers have a sign. Half of the range is taken off both sides of the comparison: of a
    // number in the upper half before it is converted, which is exact, and of another one after
    // that.
    const F half = F{} + 2147483648.0f;
    const I zero = I{}, least = zero + INT32_MIN;
    const auto upper = scaled >= half;
    const I threshold = converted<I>(upper ? scaled - half : scaled) ^ (upper ? zero : least);
    return (bits_as<I>(random) ^ least) < threshold ? zero - 1 : zero;
}

// encode_element with one random word for each value, which is rounded to one of its neighbours in
// proportion to the distances.
template <class Format, class F, class I, class U>
OTTAVA_HD I encode_at_random(F x, U random) {
    const I bits = bits_as<I>(x), zero = I{};
    const I magnitude = bits & kMagnitude, sign = bits ^ magnitude;
    constexpr int32_t mask = (1 << Format::width) - 1;
    I code;
    if constexpr (is_integer<Format>) {
        const I clamped = clamped_integer<Format, F, I>(x) & kMagnitude;
        const F units = bits_as<F>(clamped) * static_cast<float>(1 << Format::fraction);
        const I below = converted<I>(units);
        const I number = below - goes_up<F, I, U>(units, below, random);
        code = (sign < 0 ? -number : number) & mask;
    } else {
        constexpr int shift = 23 - Format::mantissa;
        constexpr int32_t min_normal = (127 + 1 - Format::bias) << 23;
        I clamped;
        const I binade = binade_of<Format, F, I>(magnitude, clamped);
        // Divided by the unit in the last place, 2^(exponent - mantissa). No step leaves the range.
        const I inverse = ((127 + Format::mantissa) << 23) - (binade - (127 << 23));
        const F units = bits_as<F>(clamped) * bits_as<F>(inverse);
        const I below = converted<I>(units);
        const I up = goes_up<F, I, U>(units, below, random);
        code = ((binade - min_normal) >> shift) + below - up;
        code = code | ((bits >> (32 - Format::width)) & (1 << (Format::width - 1)));
    }
    return magnitude > kInfinity ? zero + Format::nan_code : code;
}

// -- scales of two levels --

// x, at most the largest float32; NaN stays.
template <class F>
OTTAVA_HD F finite_of(F x) {
    const F largest = F{} + 3.40282347e38f;
    return x > largest ? largest : x;
}

// The multiplier of the second level for its amax: `top` is what the amax becomes.
template <class F>
OTTAVA_HD F second_scale(F amax, float top) {
    return finite_of<F>(divide(F{} + top, amax));
}

// The multiplier of the elements of a block with this code, for 1 / the second level's.
template <class Number, class F, class I>
OTTAVA_HD F level_multiplier(I code, F second_inverse) {
    return finite_of<F>(divide(F{} + 1.0f, widen<Number, F, I>(code) * second_inverse));
}

// -- scales of blocks --

// The scale of a block: the byte or the bits that are stored, what multiplies its elements, and
// what multiplies them when they are decoded.
template <class F, class I>
struct BlockScale {
    I stored;
    F multiplier, value;
};

// The second level of a block: its amax, its scale, and 1 / scale; 0, 1 and 1 without one.
template <class F>
struct SecondScale {
    F amax, scale, inverse;
};

template <class Format, class F, class I>
OTTAVA_HD I e8m0_code(F amax, int rounding) {
    switch (static_cast<ScaleRounding>(rounding)) {
        case ScaleRounding::up:
            return e8m0_up<Format, F, I>(amax);
        case ScaleRounding::floor:
            return e8m0_floor<Format, F, I>(amax);
        case ScaleRounding::even:
            return e8m0_even<Format, F, I>(amax);
        default:
            return e8m0_nearest<Format, F, I>(amax);
    }
}

// Without the factor of a candidate the second level is divided by the largest element first.
template <class Number, class F, class I>
OTTAVA_HD BlockScale<F, I> level_scale(F amax, float maximum, const F* factor,
                                       const SecondScale<F>& second) {
    const F finite = finite_of<F>(amax), largest = F{} + maximum;
    const F scaled = factor == nullptr ? finite * (second.scale * (1.0f / maximum))
                                       : divide(finite, largest) * second.scale * *factor;
    const I code = encode<Number, F, I>(scaled);
    return {code, level_multiplier<Number, F, I>(code, second.inverse), widen<Number, F, I>(code)};
}

// The scale of a block with this amax, times the factor of a candidate if there is one. `largest`
// is what an infinite float32 scale becomes.
template <class Format, class F, class I>
OTTAVA_HD BlockScale<F, I> block_scale(const LevelsLayout& layout, float largest, F amax,
                                       const F* factor, const SecondScale<F>& second) {
    if (layout.scale == LevelScale::e4m3)
        return level_scale<E4M3, F, I>(amax, Format::maximum, factor, second);
    if (layout.scale == LevelScale::ue5m3)
        return level_scale<UE5M3, F, I>(amax, Format::maximum, factor, second);
    if (factor != nullptr) amax = amax * *factor;
    if (layout.scale == LevelScale::e8m0) {
        const I code = e8m0_code<Format, F, I>(amax, layout.rounding);
        return {code, e8m0_multiplier<F, I>(code), e8m0_value<F, I>(code)};
    }
    const ScaleRule rule{false, layout.rounding != 0, layout.epsilon, largest};
    const F scale = scale_of<F, I>(amax, Format::maximum, rule);
    const F inverse = divide(F{} + 1.0f, scale);
    return {bits_as<I>(inverse), scale, inverse};
}

// The error of an element with the scale of a candidate.
template <class Format, class F, class I>
OTTAVA_HD F candidate_error(const LevelsLayout& layout, F x, const BlockScale<F, I>& scale,
                            F second_amax) {
    F value = rounded_element<Format, F, I>(x * scale.multiplier) * scale.value;
    if (layout.second != SecondLevel::none) value = divide(value * second_amax, F{} + layout.top);
    const F error = bits_as<F>(bits_as<I>(value - x) & kMagnitude);
    return layout.squares ? error * error : error;
}

// -- random words: Philox4x32-10 --

constexpr uint32_t kPhiloxMultiplier0 = 0xd2511f53u, kPhiloxMultiplier1 = 0xcd9e8d57u;
constexpr uint32_t kPhiloxKey0 = 0x9e3779b9u, kPhiloxKey1 = 0xbb67ae85u;
constexpr int kPhiloxRounds = 10;

// The keys of the rounds. They are scalars, because GCC 12 miscompiles a loop that fills an array
// with vectors wider than the machine's.
struct PhiloxKeys {
    uint64_t of_round[kPhiloxRounds][2];
};

OTTAVA_HD PhiloxKeys philox_keys(uint64_t seed) {
    PhiloxKeys keys;
    uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < kPhiloxRounds; ++round) {
        keys.of_round[round][0] = key0, keys.of_round[round][1] = key1;
        key0 += kPhiloxKey0, key1 += kPhiloxKey1;
    }
    return keys;
}

// Turns counters of four words into four random words each, in place. A word is the low half of 64
// bits, and the high half may be anything. Multiply::of gives the 64 bits of products of low
// halves.
template <class Multiply, int count, class W>
OTTAVA_HD void philox(W (&words)[4][count], const PhiloxKeys& keys) {
    const W multiplier0 = W{} + uint64_t{kPhiloxMultiplier0};
    const W multiplier1 = W{} + uint64_t{kPhiloxMultiplier1};
    OTTAVA_UNROLL(10)
    for (int round = 0; round < kPhiloxRounds; ++round) {
        OTTAVA_UNROLL(2)
        for (int i = 0; i < count; ++i) {
            const W product0 = Multiply::of(words[0][i], multiplier0);
            const W product1 = Multiply::of(words[2][i], multiplier1);
            words[0][i] = (product1 >> 32) ^ words[1][i] ^ (W{} + keys.of_round[round][0]);
            words[2][i] = (product0 >> 32) ^ words[3][i] ^ (W{} + keys.of_round[round][1]);
            words[1][i] = product1;
            words[3][i] = product0;
        }
    }
}

struct MultiplyWords {
    OTTAVA_HD uint64_t of(uint64_t a, uint64_t b) { return (a & 0xffffffffu) * b; }
};

// The four random words of places 4 * block to 4 * block + 3.
OTTAVA_HD void random_block(uint64_t seed, uint64_t block, uint32_t stream, uint32_t* out) {
    uint64_t words[4][1] = {{block}, {block >> 32}, {stream}, {0}};
    philox<MultiplyWords, 1, uint64_t>(words, philox_keys(seed));
    for (int k = 0; k < 4; ++k) out[k] = static_cast<uint32_t>(words[k][0]);
}

// -- the Hadamard transform --

// 1 / sqrt(size), as float32.
OTTAVA_HD float rotation_factor(int size) {
    switch (size) {
        case 16:
            return 0.25f;
        case 32:
            return 0.176776695296636881f;
        case 64:
            return 0.125f;
        default:
            return 0.0883883476483184406f;
    }
}

// The stages of the butterfly with strides from `stride` to count / 2, in place.
template <int stride, int count, class F>
OTTAVA_HD void butterfly(F (&x)[count]) {
    OTTAVA_UNROLL(16)
    for (int pair = 0; pair < count / 2; ++pair) {
        const int i = pair / stride * 2 * stride + pair % stride;
        const F sum = x[i] + x[i + stride];
        x[i + stride] = x[i] - x[i + stride];
        x[i] = sum;
    }
    if constexpr (2 * stride < count) butterfly<2 * stride, count, F>(x);
}

}  // namespace ottava
