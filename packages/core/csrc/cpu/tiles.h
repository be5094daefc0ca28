// Kernels over tiles: cast and transpose, transpose. Include once, after cast.h.
//
// The scratch holds a tile as pieces of 16 bytes, the data of 16 neighbouring columns of one row.
// Pieces are laid out so that one vector load takes the rows i, i + 16, i + 32, ... of one column
// group: the 16x16 byte transposes then run in all 16-byte parts of the vector at once, and each
// result is a contiguous run of one output row.

constexpr int64_t kParts = OTTAVA_VECTOR_BYTES / 16;
constexpr int64_t kRowGroup =
    OTTAVA_VECTOR_BYTES;  // rows that one vector of a transposed column covers
constexpr int64_t kGroupBytes = 16 * kTileRows;  // a column group: 16 columns of the tile

struct Scratch {
    alignas(64) uint8_t bytes[kTileRows * kTileCols];
    OTTAVA_INLINE uint8_t* piece(int64_t row, int64_t group) {
        const int64_t inside = row % kRowGroup;
        return bytes + group * kGroupBytes + (row - inside) * 16 +
               ((inside % 16) * kParts + inside / 16) * 16;
    }
};

// The bytes of a and b alternating, within each 16-byte part, from its low or its high half.
template <bool High>
OTTAVA_INLINE u8v interleave(u8v a, u8v b) {
#if defined(__AVX512BW__)
    const __m512i x = bits_as<__m512i>(a), y = bits_as<__m512i>(b);
    return bits_as<u8v>(High ? _mm512_unpackhi_epi8(x, y) : _mm512_unpacklo_epi8(x, y));
#elif defined(__AVX2__)
    const __m256i x = bits_as<__m256i>(a), y = bits_as<__m256i>(b);
    return bits_as<u8v>(High ? _mm256_unpackhi_epi8(x, y) : _mm256_unpacklo_epi8(x, y));
#else
    constexpr int i = High ? 8 : 0;
    return __builtin_shufflevector(a, b, i, i + 16, i + 1, i + 17, i + 2, i + 18, i + 3, i + 19,
                                   i + 4, i + 20, i + 5, i + 21, i + 6, i + 22, i + 7, i + 23);
#endif
}

// A perfect shuffle of sixteen rows. Each round moves one bit of the row number into the column
// number and one back, so that four rounds transpose.
OTTAVA_INLINE void transpose_round(const u8v* in, u8v* out) {
    for (int k = 0; k < 8; ++k) {
        out[2 * k] = interleave<false>(in[k], in[k + 8]);
        out[2 * k + 1] = interleave<true>(in[k], in[k + 8]);
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

// Copies `count` bytes of a scratch line to any address.
template <bool Stream>
OTTAVA_INLINE void put_line(uint8_t* to, const uint8_t* from, int64_t count) {
    int64_t i = 0;
    for (; i + OTTAVA_VECTOR_BYTES <= count; i += OTTAVA_VECTOR_BYTES)
        put<Stream>(to + i, load<u8v>(from + i));
    if (i < count) memcpy(to + i, from + i, static_cast<size_t>(count - i));
}

template <bool Stream>
void write_transposed(const Tile& tile, const Scratch& scratch) {
    for (int64_t col = 0; col < tile.cols; col += 16) {
        const int64_t columns = tile.cols - col < 16 ? tile.cols - col : 16;
        const uint8_t* group = scratch.bytes + (col / 16) * kGroupBytes;
        uint8_t* out = tile.out_t + col * tile.out_t_stride;
        u8v part[16];
        if (kRowGroup == kTileRows && tile.rows == kTileRows && columns == 16) {
            transpose16(group, part);
            for (int k = 0; k < 16; ++k) put<Stream>(out + k * tile.out_t_stride, part[k]);
            continue;
        }
        alignas(64) uint8_t lines[16][kTileRows];
        for (int64_t row = 0; row < tile.rows; row += kRowGroup) {
            transpose16(group + row * 16, part);
            for (int k = 0; k < 16; ++k) store(&lines[k][row], part[k]);
        }
        for (int64_t k = 0; k < columns; ++k)
            put_line<Stream>(out + k * tile.out_t_stride, lines[k], tile.rows);
    }
}

// Whether whole lines can be streamed: every output row starts at a line.
OTTAVA_INLINE bool aligned(const uint8_t* base, int64_t stride) {
    return ((reinterpret_cast<uintptr_t>(base) | static_cast<uintptr_t>(stride)) & (kLine - 1)) ==
           0;
}

template <class Fill>
OTTAVA_INLINE void tile_with(const Tile& tile, const Fill& fill) {
    Scratch scratch;
    const bool turned = tile.out_t != nullptr;
    const bool stream_rows = tile.stream && aligned(tile.out, tile.out_stride) &&
                             aligned(tile.out_again, tile.out_stride);
    for (int64_t row = 0; row < tile.rows; ++row) {
        uint8_t* out = tile.out == nullptr ? nullptr : tile.out + row * tile.out_stride;
        uint8_t* again =
            tile.out_again == nullptr ? nullptr : tile.out_again + row * tile.out_stride;
        const auto put_to = [&](uint8_t* to, const Line& line) {
            if (stream_rows)
                line.template put_to<true>(to);
            else
                line.template put_to<false>(to);
        };
        // The rows of a tile are far apart in memory, which the hardware's prefetch does not
        // follow.
        const int64_t next = row + 1 < tile.rows ? row + 1 : row;
        const auto in_row = fill.begin(row);
        int64_t col = 0;
        for (; col + kLine <= tile.cols; col += kLine) {
            fill.prefetch(next, col);
            const Line line = fill.line(row, col, in_row);
            if (turned)
                for (int k = 0; k < 4; ++k) store(scratch.piece(row, col / 16 + k), line.piece(k));
            if (out != nullptr) put_to(out + col, line);
            if (again != nullptr) put_to(again + col, line);
        }
        for (; col < tile.cols; col += 16) {
            const int64_t count = tile.cols - col < 16 ? tile.cols - col : 16;
            uint8_t piece[16];
            fill.partial(row, col, count, piece, in_row);
            if (turned) memcpy(scratch.piece(row, col / 16), piece, static_cast<size_t>(count));
            if (out != nullptr) memcpy(out + col, piece, static_cast<size_t>(count));
            if (again != nullptr) memcpy(again + col, piece, static_cast<size_t>(count));
        }
    }
    // Rows of the last group that the tile lacks are transposed too, into lines that are not
    // written.
    if (turned && tile.stream && aligned(tile.out_t, tile.out_t_stride))
        write_transposed<true>(tile, scratch);
    else if (turned)
        write_transposed<false>(tile, scratch);
    if (tile.stream) finish_streaming();
}

template <class Element, class Format, class Observer>
struct CastFill {
    const typename Element::storage* src;
    int64_t stride;
    const LineCast<Element, Format> cast64;
    Observer* observer;
    OTTAVA_INLINE int begin(int64_t) const { return 0; }
    OTTAVA_INLINE void prefetch(int64_t row, int64_t col) const {
        constexpr int64_t step = kLine / sizeof(*src);
        for (int64_t k = 0; k < kLine; k += step) __builtin_prefetch(src + row * stride + col + k);
    }
    OTTAVA_INLINE Line line(int64_t row, int64_t col, int) const {
        observer->line(src + row * stride + col);
        return cast64(src + row * stride + col);
    }
    OTTAVA_INLINE void partial(int64_t row, int64_t col, int64_t n, uint8_t* out, int) const {
        observer->some(src + row * stride + col, n);
        cast_partial<Element, Format>(src + row * stride + col, n, cast64.factor, out);
    }
};

struct CopyFill {
    const uint8_t* src;
    int64_t stride;
    OTTAVA_INLINE int begin(int64_t) const { return 0; }
    OTTAVA_INLINE void prefetch(int64_t row, int64_t col) const {
        __builtin_prefetch(src + row * stride + col);
    }
    OTTAVA_INLINE Line line(int64_t row, int64_t col, int) const {
        return load<Line>(src + row * stride + col);
    }
    OTTAVA_INLINE void partial(int64_t row, int64_t col, int64_t n, uint8_t* out, int) const {
        memcpy(out, src + row * stride + col, static_cast<size_t>(n));
    }
};

template <class Element, class Format, class Observer>
float cast_tile_typed(const Tile& tile, float scale) {
    const auto* src = static_cast<const typename Element::storage*>(tile.src);
    Observer observer;
    tile_with(tile, CastFill<Element, Format, Observer>{
                        src, tile.src_stride, LineCast<Element, Format>(scale), &observer});
    return observer.value();
}

template <template <class> class Observer, class Format>
float cast_tile_format(const Tile& tile, Dtype dtype, float scale) {
    switch (dtype) {
        case Dtype::float32:
            return cast_tile_typed<Float32, Format, Observer<Float32>>(tile, scale);
        case Dtype::bfloat16:
            return cast_tile_typed<BFloat16, Format, Observer<BFloat16>>(tile, scale);
        default:
            return cast_tile_typed<Float16, Format, Observer<Float16>>(tile, scale);
    }
}

template <template <class> class Observer>
float cast_tile(const Tile& tile, Dtype dtype, float scale, Fp8 format) {
    if (format == Fp8::e4m3) return cast_tile_format<Observer, E4M3>(tile, dtype, scale);
    return cast_tile_format<Observer, E5M2>(tile, dtype, scale);
}

void transpose_tile(const Tile& tile) {
    tile_with(tile, CopyFill{static_cast<const uint8_t*>(tile.src), tile.src_stride});
}
