// Tiles of 128 rows and columns whose data are to be written transposed.
//
// A thread holds eight rows of a group of columns. It transposes them in registers, four by four
// bytes, and writes to shared memory, for each of its columns, the data of its rows as one pair of
// words. A column of the tile lies there as 16 pairs in the order `pair ^ (column / 8)`. Threads
// that write at once differ in column / 8, and threads that read at once differ in pair, so no two
// of them conflict in a bank.
#pragma once

#include <cstdint>

#include "arithmetic.h"

namespace ottava::cuda {

constexpr int kTile = 128;  // rows, and columns
constexpr int kTileThreads = kTile / kGroup * (kTile / kGroup);
constexpr int kTilePairs = kTile / kGroup;  // in a column

// The number of tiles that a multiprocessor casts at once. A GPU without conversions of its own
// needs more registers for each tile.
#if defined(__CUDA_ARCH__) && !defined(OTTAVA_CONVERTS_FP8)
template <class Source>
constexpr int kCastTiles = 2;
#else
template <class Source>
constexpr int kCastTiles = Source::bytes == 4 ? 2 : 3;
#endif

struct alignas(16) TileData {
    Words2 pairs[kTile * kTilePairs];
};

// Transposes four by four bytes: the words of the result are columns, those of the argument are
// rows.
OTTAVA_DEVICE void turn(const uint32_t (&rows)[4], uint32_t (&columns)[4]) {
    const uint32_t low01 = pick_bytes(rows[0], rows[1], 0x5140),
                   high01 = pick_bytes(rows[0], rows[1], 0x7362);
    const uint32_t low23 = pick_bytes(rows[2], rows[3], 0x5140),
                   high23 = pick_bytes(rows[2], rows[3], 0x7362);
    columns[0] = pick_bytes(low01, low23, 0x5410);
    columns[1] = pick_bytes(low01, low23, 0x7632);
    columns[2] = pick_bytes(high01, high23, 0x5410);
    columns[3] = pick_bytes(high01, high23, 0x7632);
}

// The place of a thread in its tile: a group of columns and eight rows.
struct TilePlace {
    int across, down;
    template <class Thread>
    OTTAVA_DEVICE explicit TilePlace(const Thread& thread)
        : across(thread.index() % kTilePairs), down(thread.index() / kTilePairs) {}
};

// A matrix that is read by tiles.
struct TileSource {
    const void* src;
    bool wide;  // addresses of whole groups, those of rows of data too
    int64_t rows, cols;
    int64_t across;  // tiles
};

// A thread's eight rows of one tile of it.
struct TileRows {
    int64_t tile_row, tile_col;  // the tile's first
    int64_t row, col, count;     // the thread's first, and the columns from there on
    bool wide, whole;            // of most tiles nothing is outside
    int64_t rows, cols;

    template <class Thread>
    OTTAVA_DEVICE TileRows(const Thread& thread, const TileSource& from, int64_t number)
        : tile_row(number / from.across * kTile),
          tile_col(number % from.across * kTile),
          wide(from.wide),
          rows(from.rows),
          cols(from.cols) {
        const TilePlace place(thread);
        row = tile_row + place.down * kGroup;
        col = tile_col + place.across * kGroup;
        count = cols - col;
        whole = wide && tile_row + kTile <= rows && tile_col + kTile <= cols;
    }

    template <class Source>
    OTTAVA_DEVICE void load(const void* src, Group<Source> (&groups)[kGroup]) const {
        if (whole) {
#pragma unroll
            for (int k = 0; k < kGroup; ++k)
                groups[k] = load_whole<Source>(src, (row + k) * cols + col);
            return;
        }
#pragma unroll
        for (int k = 0; k < kGroup; ++k)
            groups[k] =
                load_group<Source>(src, (row + k) * cols + col, row + k < rows ? count : 0, wide);
    }

    // Stores the data of one row, and of all rows.
    OTTAVA_DEVICE void put(uint8_t* out, int k, const Words2& data) const {
        if (whole) return store_whole(out, (row + k) * cols + col, data);
        if (row + k < rows) store_data(out, (row + k) * cols + col, count, wide, data);
    }
    OTTAVA_DEVICE void put_all(uint8_t* out, const Words2 (&data)[kGroup]) const {
        if (whole) {
#pragma unroll
            for (int k = 0; k < kGroup; ++k) put(out, k, data[k]);
            return;
        }
#pragma unroll
        for (int k = 0; k < kGroup; ++k) put(out, k, data[k]);
    }
};

// The data of a thread's eight rows.
template <class Thread>
OTTAVA_DEVICE void put_turned(const Thread& thread, const Words2 (&data)[kGroup], TileData& tile) {
    const TilePlace place(thread);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        uint32_t upper[4], lower[4];
        const uint32_t first[4] = {data[0].w[half], data[1].w[half], data[2].w[half],
                                   data[3].w[half]};
        const uint32_t second[4] = {data[4].w[half], data[5].w[half], data[6].w[half],
                                    data[7].w[half]};
        turn(first, upper);
        turn(second, lower);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const int column = place.across * kGroup + 4 * half + k;
            tile.pairs[column * kTilePairs + (place.down ^ place.across)] = {{upper[k], lower[k]}};
        }
    }
}

// The transposed matrix, `rows` columns wide, in which the columns of a tile are rows.
struct TurnedOut {
    uint8_t* out;
    int64_t rows, cols;
    bool wide;  // 16-byte addresses, and rows a multiple of 16
};

// Writes the tile to the transposed matrix; called after a barrier.
template <class Thread>
OTTAVA_DEVICE void write_turned(const Thread& thread, const TileData& tile, const TurnedOut& to,
                                int64_t row, int64_t col) {
    const int height = static_cast<int>(to.rows - row < kTile ? to.rows - row : kTile);
    const int width = static_cast<int>(to.cols - col < kTile ? to.cols - col : kTile);
    if (to.wide) {
        constexpr int kQuads = kTilePairs / 2;  // of pairs, 16 bytes each
        const int quad = thread.index() % kQuads;
#pragma unroll
        for (int k = 0; k < kTile; k += kTileThreads / kQuads) {
            const int column = k + thread.index() / kQuads, order = column / kGroup;
            if (column >= width || quad * 16 >= height) continue;
            const Words2* at = tile.pairs + column * kTilePairs + 2 * (quad ^ (order / 2));
            const Words4 four = *reinterpret_cast<const Words4*>(at);
            const bool swapped = order % 2 != 0;
            const Words4 sixteen = {
                {swapped ? four.w[2] : four.w[0], swapped ? four.w[3] : four.w[1],
                 swapped ? four.w[0] : four.w[2], swapped ? four.w[1] : four.w[3]}};
            store_once(
                reinterpret_cast<Words4*>(to.out + (col + column) * to.rows + row + quad * 16),
                sixteen);
        }
        return;
    }
    // Bytes are written one by one, in the order of the addresses.
    for (int column = thread.warp(); column < width; column += kTileThreads / kWarp) {
        const uint8_t* bytes = reinterpret_cast<const uint8_t*>(tile.pairs + column * kTilePairs);
        uint8_t* line = to.out + (col + column) * to.rows + row;
        for (int r = thread.lane(); r < height; r += kWarp)
            line[r] = bytes[((r / kGroup) ^ (column / kGroup)) * kGroup + r % kGroup];
    }
}

// The number of tiles of a matrix, of which the last come first (see Cast).
struct Tiles {
    int64_t across, count;
    Tiles(int64_t rows, int64_t cols)
        : across(ceil_div(cols, kTile)), count(across * ceil_div(rows, kTile)) {}
};

}  // namespace ottava::cuda
