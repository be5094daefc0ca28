// Kernels over contiguous runs: decode. Include once, after simd.h.

// A decode is a look-up: the caller computes the 128 results of the positive data, and the sign is
// the top bit.
#if defined(__AVX512BW__)
#include "decode_avx512.h"
#else
template <class Out>
void decode_typed(const uint8_t* src, int64_t n, const Out* table, Out* out, bool) {
    Out full[256];
    for (int code = 0; code < 128; ++code) {
        full[code] = table[code];
        full[code + 128] = static_cast<Out>(table[code] ^ (Out{1} << (8 * sizeof(Out) - 1)));
    }
    for (int64_t i = 0; i < n; ++i) store(out + i, full[src[i]]);
}
#endif

void decode16_run(const uint8_t* src, int64_t n, const uint16_t* table, uint16_t* out,
                  bool stream) {
    decode_typed(src, n, table, out, stream);
}

void decode32_run(const uint8_t* src, int64_t n, const uint32_t* table, uint32_t* out,
                  bool stream) {
    decode_typed(src, n, table, out, stream);
}
