// The division of work between threads, which operations.cpp, grid.cpp and multi.cpp share.
// Everything has internal linkage, as in numerics.h.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#if defined(_OPENMP)
#include <omp.h>
#endif

#include "kernels.h"

namespace ottava {
namespace {

// Elements: the granularity of the division, a multiple of a cache line.
constexpr int64_t kUnit = 4096;
// With fewer elements for each, a thread costs more than it saves.
constexpr int64_t kElementsPerThread = 32768;
// Larger results would only evict the contents of the caches, so they are streamed.
constexpr int64_t kStreamBytes = 4 << 20;

inline int64_t ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

inline size_t element_bytes(Dtype dtype) {
    return dtype == Dtype::float32 ? 4 : 2;
}

inline const uint8_t* advance(const void* base, int64_t elements, Dtype dtype) {
    return static_cast<const uint8_t*>(base) + static_cast<size_t>(elements) * element_bytes(dtype);
}

// Calls body(begin, end, thread) on consecutive parts of [0, count), one for each thread. With one
// thread OpenMP is not entered at all, so that the call is safe in a forked process.
template <class Body>
void in_parallel(int64_t count, int64_t elements, int threads, const Body& body) {
    const int64_t team_limit =
        std::min<int64_t>({threads, count, ceil_div(elements, kElementsPerThread)});
    if (count <= 0) return;
#if defined(_OPENMP)
    if (team_limit > 1) {
#pragma omp parallel num_threads(static_cast<int>(team_limit))
        {
            const int64_t team = omp_get_num_threads(), self = omp_get_thread_num();
            body(count * self / team, count * (self + 1) / team, static_cast<int>(self));
        }
        return;
    }
#endif
    body(int64_t{0}, count, 0);
}

}  // namespace
}  // namespace ottava
