// Kernels over tiles: cast and transpose, transpose. Include once, after runs.h.
//
// The scratch holds a tile as pieces of 16 bytes, the codes of 16 neighbouring columns of one row. Pieces are laid
// out so that one vector load takes the rows i, i + 16, i + 32, ... of one column group: the 16x16 byte transposes
// then run in all 16-byte parts of the vector at once, and each result is a contiguous run of one output row.

constexpr int64_t kParts = OTTAVA_VECTOR_BYTES / 16;
constexpr int64_t kRowGroup = OTTAVA_VECTOR_BYTES;  // rows that one vector of a transposed column covers
constexpr int64_t kGroupBytes = 16 * kTileRows;     // a column group: 16 columns of the tile

struct Scratch {
    alignas(64) uint8_t bytes[kTileRows * kTileCols];
    OTTAVA_INLINE uint8_t* piece(int64_t row, int64_t group) {
        const int64_t inside = row % kRowGroup;
        return bytes + group * kGroupBytes + (row - inside) * 16 + ((inside % 16) * kParts + inside / 16) * 16;
    }
};

// Interleaves units of `Unit` bytes of a and b within each 16-byte part, from its low or its high half.
template <int Unit, bool High>
OTTAVA_INLINE u8v interleave(u8v a, u8v b) {
#if defined(__AVX512BW__)
    const __m512i x = bits_as<__m512i>(a), y = bits_as<__m512i>(b);
    if constexpr (Unit == 1) return bits_as<u8v>(High ? _mm512_unpackhi_epi8(x, y) : _mm512_unpacklo_epi8(x, y));
    if constexpr (Unit == 2) return bits_as<u8v>(High ? _mm512_unpackhi_epi16(x, y) : _mm512_unpacklo_epi16(x, y));
    if constexpr (Unit == 4) return bits_as<u8v>(High ? _mm512_unpackhi_epi32(x, y) : _mm512_unpacklo_epi32(x, y));
    return bits_as<u8v>(High ? _mm512_unpackhi_epi64(x, y) : _mm512_unpacklo_epi64(x, y));
#elif defined(__AVX2__)
    const __m256i x = bits_as<__m256i>(a), y = bits_as<__m256i>(b);
    if constexpr (Unit == 1) return bits_as<u8v>(High ? _mm256_unpackhi_epi8(x, y) : _mm256_unpacklo_epi8(x, y));
    if constexpr (Unit == 2) return bits_as<u8v>(High ? _mm256_unpackhi_epi16(x, y) : _mm256_unpacklo_epi16(x, y));
    if constexpr (Unit == 4) return bits_as<u8v>(High ? _mm256_unpackhi_epi32(x, y) : _mm256_unpacklo_epi32(x, y));
    return bits_as<u8v>(High ? _mm256_unpackhi_epi64(x, y) : _mm256_unpacklo_epi64(x, y));
#else
    constexpr int from = High ? 8 : 0;
    if constexpr (Unit == 1)
        return __builtin_shufflevector(a, b, from, from + 16, from + 1, from + 17, from + 2, from + 18, from + 3,
                                       from + 19, from + 4, from + 20, from + 5, from + 21, from + 6, from + 22,
                                       from + 7, from + 23);
    if constexpr (Unit == 2)
        return __builtin_shufflevector(a, b, from, from + 1, from + 16, from + 17, from + 2, from + 3, from + 18,
                                       from + 19, from + 4, from + 5, from + 20, from + 21, from + 6, from + 7,
                                       from + 22, from + 23);
    if constexpr (Unit == 4)
        return __builtin_shufflevector(a, b, from, from + 1, from + 2, from + 3, from + 16, from + 17, from + 18,
                                       from + 19, from + 4, from + 5, from + 6, from + 7, from + 20, from + 21,
                                       from + 22, from + 23);
    return __builtin_shufflevector(a, b, from, from + 1, from + 2, from + 3, from + 4, from + 5, from + 6, from + 7,
                                   from + 16, from + 17, from + 18, from + 19, from + 20, from + 21, from + 22,
                                   from + 23);
#endif
}

// One round of the transpose: rows k and k + 8 become rows 2k and 2k + 1. Four rounds of units 1, 2, 4, 8 with this
// order would need other pairs each time; interleaving single bytes four times needs the same pairs.
OTTAVA_INLINE void transpose_round(const u8v* in, u8v* out) {
    for (int k = 0; k < 8; ++k) {
        out[2 * k] = interleave<1, false>(in[k], in[k + 8]);
        out[2 * k + 1] = interleave<1, true>(in[k], in[k + 8]);
    }
}

OTTAVA_INLINE void transpose16(const uint8_t* pieces, u8v* columns) {
    u8v other[16];
    for (int k = 0; k < 16; ++k) columns[k] = load<u8v>(pieces + k * OTTAVA_VECTOR_BYTES);
    transpose_round(columns, other);
    transpose_round(other, columns);
    transpose_round(columns, other);
    transpose_round(other, columns);
}

// `count` bytes of a scratch line to any address.
template <bool Stream>
OTTAVA_INLINE void put_line(uint8_t* to, const uint8_t* from, int64_t count) {
    int64_t i = 0;
    for (; i + OTTAVA_VECTOR_BYTES <= count; i += OTTAVA_VECTOR_BYTES) put<Stream>(to + i, load<u8v>(from + i));
    if (i < count) memcpy(to + i, from + i, static_cast<size_t>(count - i));
}

template <bool Stream>
void write_transposed(const Tile& tile, const Scratch& scratch) {
    for (int64_t col = 0; col < tile.cols; col += 16) {
        const int64_t columns = tile.cols - col < 16 ? tile.cols - col : 16;
        alignas(64) uint8_t lines[16][kTileRows];
        const uint8_t* group = scratch.bytes + (col / 16) * kGroupBytes;
        for (int64_t row = 0; row < tile.rows; row += kRowGroup) {
            u8v part[16];
            transpose16(group + row * 16, part);
            for (int k = 0; k < 16; ++k) store(&lines[k][row], part[k]);
        }
        for (int64_t k = 0; k < columns; ++k)
            put_line<Stream>(tile.out_t + (col + k) * tile.out_t_stride, lines[k], tile.rows);
    }
}

// Whole lines can be streamed when every output row starts on one.
OTTAVA_INLINE bool aligned(const uint8_t* base, int64_t stride) {
    return ((reinterpret_cast<uintptr_t>(base) | static_cast<uintptr_t>(stride)) & (kLine - 1)) == 0;
}

template <class Fill>
OTTAVA_INLINE void tile_with(const Tile& tile, Fill fill) {
    Scratch scratch;
    const bool stream_rows = tile.stream && tile.out != nullptr && aligned(tile.out, tile.out_stride);
    const bool stream_columns = tile.stream && aligned(tile.out_t, tile.out_t_stride);
    const int64_t whole = tile.cols / 16 * 16;
    for (int64_t row = 0; row < tile.rows; ++row) {
        uint8_t* out = tile.out == nullptr ? nullptr : tile.out + row * tile.out_stride;
        for (int64_t col = 0; col < whole; col += 16) {
            const u8x16 codes = fill.whole(row, col);
            store(scratch.piece(row, col / 16), codes);
            if (out == nullptr) continue;
            if (stream_rows)
                put<true>(out + col, codes);
            else
                store(out + col, codes);
        }
        if (whole == tile.cols) continue;
        uint8_t* piece = scratch.piece(row, whole / 16);
        fill.partial(row, whole, tile.cols - whole, piece);
        if (out != nullptr) memcpy(out + whole, piece, static_cast<size_t>(tile.cols - whole));
    }
    // The rows of the last group that the tile does not have are transposed too, into lines that are not written.
    if (stream_columns)
        write_transposed<true>(tile, scratch);
    else
        write_transposed<false>(tile, scratch);
    if (tile.stream) finish_streaming();
}

template <class Element, class Format>
struct CastFill {
    const typename Element::storage* src;
    int64_t stride;
    f32v scale;
    OTTAVA_INLINE u8x16 whole(int64_t row, int64_t col) const {
        return cast16<Element, Format>(src + row * stride + col, scale);
    }
    OTTAVA_INLINE void partial(int64_t row, int64_t col, int64_t n, uint8_t* out) const {
        cast_partial<Element, Format>(src + row * stride + col, n, scale, out);
    }
};

struct CopyFill {
    const uint8_t* src;
    int64_t stride;
    OTTAVA_INLINE u8x16 whole(int64_t row, int64_t col) const { return load<u8x16>(src + row * stride + col); }
    OTTAVA_INLINE void partial(int64_t row, int64_t col, int64_t n, uint8_t* out) const {
        memcpy(out, src + row * stride + col, static_cast<size_t>(n));
    }
};

template <class Element, class Format>
void cast_tile_typed(const Tile& tile, float scale) {
    const auto* src = static_cast<const typename Element::storage*>(tile.src);
    tile_with(tile, CastFill<Element, Format>{src, tile.src_stride, broadcast(scale)});
}

template <class Format>
void cast_tile_format(const Tile& tile, Dtype dtype, float scale) {
    switch (dtype) {
        case Dtype::float32:
            return cast_tile_typed<Float32, Format>(tile, scale);
        case Dtype::bfloat16:
            return cast_tile_typed<BFloat16, Format>(tile, scale);
        default:
            return cast_tile_typed<Float16, Format>(tile, scale);
    }
}

void cast_tile(const Tile& tile, Dtype dtype, float scale, Fp8 format) {
    if (format == Fp8::e4m3) return cast_tile_format<E4M3>(tile, dtype, scale);
    return cast_tile_format<E5M2>(tile, dtype, scale);
}

void transpose_tile(const Tile& tile) {
    tile_with(tile, CopyFill{static_cast<const uint8_t*>(tile.src), tile.src_stride});
}
