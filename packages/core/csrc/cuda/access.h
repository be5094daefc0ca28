// Loads and stores: wide ones where addresses allow it, and a choice whether a result stays in the
// caches.
#pragma once

#include <cstdint>
#include <cstring>

#include "thread.h"

namespace ottava::cuda {

constexpr int64_t ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

inline bool aligned(const void* address, size_t bytes) {
    return reinterpret_cast<uintptr_t>(address) % bytes == 0;
}

struct alignas(16) Words4 {
    uint32_t w[4];
};
struct alignas(8) Words2 {
    uint32_t w[2];
};

#if defined(__CUDACC__)

// Data that is read once leaves the caches first.
OTTAVA_DEVICE Words4 load_once(const Words4* from) {
    const uint4 v = __ldcs(reinterpret_cast<const uint4*>(from));
    return {{v.x, v.y, v.z, v.w}};
}
OTTAVA_DEVICE Words2 load_once(const Words2* from) {
    const uint2 v = __ldcs(reinterpret_cast<const uint2*>(from));
    return {{v.x, v.y}};
}
OTTAVA_DEVICE Words4 load_kept(const Words4* from) {
    const uint4 v = __ldg(reinterpret_cast<const uint4*>(from));
    return {{v.x, v.y, v.z, v.w}};
}
OTTAVA_DEVICE void store_once(Words4* to, const Words4& v) {
    __stcs(reinterpret_cast<uint4*>(to), make_uint4(v.w[0], v.w[1], v.w[2], v.w[3]));
}
OTTAVA_DEVICE void store_once(Words2* to, const Words2& v) {
    __stcs(reinterpret_cast<uint2*>(to), make_uint2(v.w[0], v.w[1]));
}
// For each half byte n of `selector`, byte n of the eight bytes of `a` and `b`.
OTTAVA_DEVICE uint32_t pick_bytes(uint32_t a, uint32_t b, uint32_t selector) {
    return __byte_perm(a, b, selector);
}

#else

// Addresses that a GPU would refuse are refused here too.
template <class V>
OTTAVA_DEVICE V load_once(const V* from) {
    require_aligned(from, alignof(V));
    V v;
    memcpy(&v, from, sizeof(V));
    return v;
}
template <class V>
OTTAVA_DEVICE V load_kept(const V* from) {
    return load_once(from);
}
template <class V>
OTTAVA_DEVICE void store_once(V* to, const V& v) {
    require_aligned(to, alignof(V));
    memcpy(to, &v, sizeof(V));
}
OTTAVA_DEVICE uint32_t pick_bytes(uint32_t a, uint32_t b, uint32_t selector) {
    const uint64_t both = (static_cast<uint64_t>(b) << 32) | a;
    uint32_t picked = 0;
    for (int k = 0; k < 4; ++k)
        picked |= static_cast<uint32_t>((both >> (8 * ((selector >> (4 * k)) & 7))) & 0xff)
                  << (8 * k);
    return picked;
}

#endif

}  // namespace ottava::cuda
