// The conversion of Python's integers in the bindings of both backends: addresses, codes of dtypes
// and formats, sizes.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "dtypes.h"

namespace ottava {

using Address = uintptr_t;

template <class T>
T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

inline Dtype dtype_of(int code) {
    if (code < 0 || code > 2)
        throw std::invalid_argument("element dtype code " + std::to_string(code) +
                                    " is unknown: 0 is float32, 1 bfloat16, 2 float16");
    return static_cast<Dtype>(code);
}

inline Fp8 fp8_of(int code) {
    if (code < 0 || code > 1)
        throw std::invalid_argument("FP8 format code " + std::to_string(code) +
                                    " is unknown: 0 is E4M3, 1 E5M2");
    return static_cast<Fp8>(code);
}

inline Stored stored_of(int code) {
    if (code != 0 && code != 1 && code != 3)
        throw std::invalid_argument("element format code " + std::to_string(code) +
                                    " is unknown: 0 is E4M3, 1 E5M2, 3 INT8");
    return static_cast<Stored>(code);
}

// A negative size is a caller's mistake.
inline int64_t size_of(int64_t n) {
    if (n < 0) throw std::invalid_argument("a size is negative: " + std::to_string(n));
    return n;
}

}  // namespace ottava
