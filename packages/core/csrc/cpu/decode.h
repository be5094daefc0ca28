// Kernels over contiguous runs: decode and epilogue. Include once, after simd.h.

// A decode is a look-up: the caller computes the 128 results of the positive codes, and the sign is the top bit.
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

void decode16_run(const uint8_t* src, int64_t n, const uint16_t* table, uint16_t* out, bool stream) {
    decode_typed(src, n, table, out, stream);
}

void decode32_run(const uint8_t* src, int64_t n, const uint32_t* table, uint32_t* out, bool stream) {
    decode_typed(src, n, table, out, stream);
}

OTTAVA_INLINE void epilogue_block(uint16_t* acc, f32v scale, const float* bias) {
    f32v x = BFloat16::load_floats(acc) * scale;
    if (bias != nullptr) x = x + load<f32v>(bias);
    store_narrow16(acc, bits_as<u32v>(encode_bfloat16<f32v, i32v>(x)));
}

void epilogue_run(uint16_t* acc, int64_t n, float factor, const float* bias) {
    const f32v scale = broadcast(factor);
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) epilogue_block(acc + i, scale, bias == nullptr ? bias : bias + i);
    if (i == n) return;
    uint16_t rest[kLanes] = {};
    float bias_rest[kLanes] = {};
    memcpy(rest, acc + i, static_cast<size_t>(n - i) * sizeof(rest[0]));
    if (bias != nullptr) memcpy(bias_rest, bias + i, static_cast<size_t>(n - i) * sizeof(bias_rest[0]));
    epilogue_block(rest, scale, bias == nullptr ? nullptr : bias_rest);
    memcpy(acc + i, rest, static_cast<size_t>(n - i) * sizeof(rest[0]));
}
