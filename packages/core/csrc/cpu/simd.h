// The vector vocabulary of the kernels, for the instruction set of the including file.
//
// Arithmetic is written with the compiler's vector types. Widening loads, narrowing and streaming
// stores, which those types express badly, are intrinsics, chosen by the instruction set that the
// file is compiled for. Include once, inside the file's anonymous namespace.

#if defined(__AVX512BW__)
#define OTTAVA_VECTOR_BYTES 64
#elif defined(__AVX2__)
#define OTTAVA_VECTOR_BYTES 32
#else
#define OTTAVA_VECTOR_BYTES 16
#endif

typedef float f32v __attribute__((vector_size(OTTAVA_VECTOR_BYTES)));
typedef int32_t i32v __attribute__((vector_size(OTTAVA_VECTOR_BYTES)));
typedef uint32_t u32v __attribute__((vector_size(OTTAVA_VECTOR_BYTES)));
typedef int16_t i16v __attribute__((vector_size(OTTAVA_VECTOR_BYTES)));
typedef uint8_t u8v __attribute__((vector_size(OTTAVA_VECTOR_BYTES)));
typedef uint8_t u8x16 __attribute__((vector_size(16)));
typedef uint16_t u16half __attribute__((vector_size(OTTAVA_VECTOR_BYTES / 2)));

constexpr int kLanes = OTTAVA_VECTOR_BYTES / 4;  // float32 lanes
constexpr int64_t kLine = 64;                    // bytes of a cache line

#define OTTAVA_INLINE inline __attribute__((always_inline))

template <class V>
OTTAVA_INLINE V load(const void* from) {
    V v;
    memcpy(&v, from, sizeof(V));
    return v;
}

template <class V>
OTTAVA_INLINE void store(void* to, V v) {
    memcpy(to, &v, sizeof(V));
}

// With Stream the store goes past the caches, and `to` is aligned to the vector. Otherwise it is an
// ordinary store to any address.
template <bool Stream, class V>
OTTAVA_INLINE void put(void* to, V v) {
#if defined(OTTAVA_X86)
    if constexpr (Stream && sizeof(V) == 16) {
        _mm_stream_si128(reinterpret_cast<__m128i*>(to), bits_as<__m128i>(v));
        return;
    }
#if defined(__AVX2__)
    if constexpr (Stream && sizeof(V) == 32) {
        _mm256_stream_si256(reinterpret_cast<__m256i*>(to), bits_as<__m256i>(v));
        return;
    }
#endif
#if defined(__AVX512BW__)
    if constexpr (Stream && sizeof(V) == 64) {
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to), bits_as<__m512i>(v));
        return;
    }
#endif
#endif
    store(to, v);
}

// Streamed stores are not ordered with the release that ends a parallel region.
OTTAVA_INLINE void finish_streaming() {
#if defined(OTTAVA_X86)
    _mm_sfence();
#endif
}

// Subtracting zero keeps every x, also -0, and costs nothing.
OTTAVA_INLINE f32v broadcast(float x) {
    return x - f32v{};
}

// Loads kLanes 16-bit elements, zero extended.
OTTAVA_INLINE u32v load_wide16(const void* from) {
#if defined(__AVX512BW__)
    return bits_as<u32v>(_mm512_cvtepu16_epi32(load<__m256i>(from)));
#elif defined(__AVX2__)
    return bits_as<u32v>(_mm256_cvtepu16_epi32(load<__m128i>(from)));
#else
    return __builtin_convertvector(load<u16half>(from), u32v);
#endif
}

OTTAVA_INLINE void store_narrow16(void* to, u32v v) {
#if defined(__AVX512BW__)
    store(to, _mm512_cvtepi32_epi16(bits_as<__m512i>(v)));
#elif defined(__AVX2__)
    const __m256i packed = _mm256_packus_epi32(bits_as<__m256i>(v), bits_as<__m256i>(v));
    store(to, _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08)));
#else
    store(to, __builtin_convertvector(v, u16half));
#endif
}

// Packs 16 data from the low bytes of 16 / kLanes vectors.
OTTAVA_INLINE u8x16 narrow8(const i32v* data) {
#if defined(__AVX512BW__)
    return bits_as<u8x16>(_mm512_cvtepi32_epi8(bits_as<__m512i>(data[0])));
#elif defined(__AVX2__)
    const __m256i words = _mm256_packus_epi32(bits_as<__m256i>(data[0]), bits_as<__m256i>(data[1]));
    const __m256i ordered = _mm256_permute4x64_epi64(words, 0xd8);
    return bits_as<u8x16>(
        _mm_packus_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1)));
#elif defined(OTTAVA_X86)
    // SSE2 packs with signed saturation only. The first step is exact, because data fit in a byte.
    const __m128i low = _mm_packs_epi32(bits_as<__m128i>(data[0]), bits_as<__m128i>(data[1]));
    const __m128i high = _mm_packs_epi32(bits_as<__m128i>(data[2]), bits_as<__m128i>(data[3]));
    return bits_as<u8x16>(_mm_packus_epi16(low, high));
#else
    typedef uint8_t u8x4 __attribute__((vector_size(4)));
    const u8x4 parts[4] = {
        __builtin_convertvector(data[0], u8x4), __builtin_convertvector(data[1], u8x4),
        __builtin_convertvector(data[2], u8x4), __builtin_convertvector(data[3], u8x4)};
    return load<u8x16>(parts);
#endif
}

// Stores kLanes data, the low bytes of a vector's lanes, to any address.
OTTAVA_INLINE void store_data(uint8_t* to, i32v data) {
#if defined(__AVX512BW__)
    store(to, _mm512_cvtepi32_epi8(bits_as<__m512i>(data)));
#elif defined(__AVX2__)
    const __m256i words = _mm256_permute4x64_epi64(
        _mm256_packus_epi32(bits_as<__m256i>(data), bits_as<__m256i>(data)), 0xd8);
    const __m128i low = _mm256_castsi256_si128(words);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packus_epi16(low, low));
#else
    typedef uint8_t u8x4 __attribute__((vector_size(4)));
    store(to, __builtin_convertvector(data, u8x4));
#endif
}

// The element types: each says how kLanes of its elements become float32, and beyond which pattern
// a magnitude is NaN.
struct Float32 {
    typedef uint32_t storage;
    typedef i32v integers;
    static constexpr int32_t infinity = kInfinity;
    static OTTAVA_INLINE f32v load_floats(const storage* from) { return load<f32v>(from); }
    static OTTAVA_INLINE float widen(uint32_t code) { return bits_as<float>(code); }
};

struct BFloat16 {
    typedef uint16_t storage;
    typedef i16v integers;
    static constexpr int16_t infinity = kInfinity >> 16;
    static OTTAVA_INLINE f32v load_floats(const storage* from) {
        return bits_as<f32v>(load_wide16(from) << 16);
    }
    static OTTAVA_INLINE float widen(uint16_t code) { return widen_bfloat16(code); }
};

struct Float16 {
    typedef uint16_t storage;
    typedef i16v integers;
    static constexpr int16_t infinity = 0x7c00;
    static OTTAVA_INLINE f32v load_floats(const storage* from) {
#if defined(__AVX512BW__)
        return bits_as<f32v>(_mm512_cvtph_ps(load<__m256i>(from)));
#elif defined(__AVX2__)
        return bits_as<f32v>(_mm256_cvtph_ps(load<__m128i>(from)));
#elif defined(OTTAVA_NEON)
        return vcvt_f32_f16(vreinterpret_f16_u16(load<uint16x4_t>(from)));
#else
        return ottava::widen<Half, f32v, i32v>(bits_as<i32v>(load_wide16(from)));
#endif
    }
    static OTTAVA_INLINE float widen(uint16_t code) { return widen_half(code); }
};
