// What the kernels' tests share: the report of differences, and buffers exactly as large as the
// kernels may use.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>

#include "cpu/kernels.h"
#include "numerics.h"

using namespace ottava;

inline long failures = 0;

inline void report(const std::string& what, long long where, double got, double expected) {
    if (++failures <= 20)
        std::printf("FAILED %s at %lld: got %.9g, expected %.9g\n", what.c_str(), where, got,
                    expected);
}

inline void check(const std::string& what, long long where, uint64_t got, uint64_t expected) {
    if (got != expected)
        report(what, where, static_cast<double>(got), static_cast<double>(expected));
}

// `count` elements at `offset` bytes into an allocation that ends with the last of them.
template <class T>
class Buffer {
    std::unique_ptr<uint8_t[]> bytes_;
    size_t offset_, count_;

public:
    explicit Buffer(int64_t count, size_t offset = 0)
        : bytes_(new uint8_t[offset + static_cast<size_t>(count) * sizeof(T)]()),
          offset_(offset),
          count_(static_cast<size_t>(count)) {}
    // The address may not suit T: kernels take any.
    uint8_t* address() const { return bytes_.get() + offset_; }
    T* data() const { return reinterpret_cast<T*>(address()); }
    T get(size_t i) const {
        T value;
        std::memcpy(&value, address() + i * sizeof(T), sizeof(T));
        return value;
    }
    void set(size_t i, T value) { std::memcpy(address() + i * sizeof(T), &value, sizeof(T)); }
    size_t size() const { return count_; }
};

const Dtype kDtypes[] = {Dtype::float32, Dtype::bfloat16, Dtype::float16};
const Fp8 kFormats[] = {Fp8::e4m3, Fp8::e5m2};
const char* const kDtypeNames[] = {"float32", "bfloat16", "float16"};
const char* const kFormatNames[] = {"e4m3", "e5m2"};

inline std::string name(const char* operation, Dtype dtype, Fp8 format) {
    return std::string(active_kernels().name) + " " + operation + " " +
           kDtypeNames[static_cast<int>(dtype)] + " " + kFormatNames[static_cast<int>(format)];
}

// Elements of any dtype as bit patterns; only the low bytes of a pattern count.
struct Elements {
    Dtype dtype;
    Buffer<uint8_t> raw;
    int64_t count;
    Elements(Dtype dtype, int64_t count, size_t offset = 0)
        : dtype(dtype), raw(count * (dtype == Dtype::float32 ? 4 : 2), offset), count(count) {}
    void set(int64_t i, uint32_t pattern) {
        const auto narrow = static_cast<uint16_t>(pattern);
        if (dtype == Dtype::float32)
            std::memcpy(raw.address() + 4 * i, &pattern, 4);
        else
            std::memcpy(raw.address() + 2 * i, &narrow, 2);
    }
    uint32_t pattern(int64_t i) const {
        uint32_t wide;
        uint16_t narrow;
        if (dtype == Dtype::float32) {
            std::memcpy(&wide, raw.address() + 4 * i, 4);
            return wide;
        }
        std::memcpy(&narrow, raw.address() + 2 * i, 2);
        return narrow;
    }
    float get(int64_t i) const {
        const uint32_t bits = pattern(i);
        if (dtype == Dtype::float32) return bits_as<float>(bits);
        const auto narrow = static_cast<uint16_t>(bits);
        return dtype == Dtype::bfloat16 ? widen_bfloat16(narrow) : widen_half(narrow);
    }
};
