// Tiles of 128 rows and columns whose data are to be written transposed.
//
// A thread holds eight rows of a group of columns. It turns them around in registers, four by four bytes, and leaves in
// shared memory, for each of its columns, the data of its rows as one pair of words. A column of the tile lies there as 16
// pairs in the order `pair ^ (column / 8)`: threads that write at once differ in column / 8, threads that read at once in
// pair, and so neither meet in a bank.
#pragma once

#include <cstdint>

#include "arithmetic.h"

namespace ottava::cuda {

constexpr int kTile = 128;                    // rows, and columns
constexpr int kTileThreads = kTile / kGroup * (kTile / kGroup);
constexpr int kTilePairs = kTile / kGroup;    // in a column

struct alignas(16) TileData {
    Words2 pairs[kTile * kTilePairs];
};

// Words whose bytes are the columns of four rows, from words whose bytes are rows.
OTTAVA_DEVICE void turn(const uint32_t (&rows)[4], uint32_t (&columns)[4]) {
    const uint32_t low01 = pick_bytes(rows[0], rows[1], 0x5140), high01 = pick_bytes(rows[0], rows[1], 0x7362);
    const uint32_t low23 = pick_bytes(rows[2], rows[3], 0x5140), high23 = pick_bytes(rows[2], rows[3], 0x7362);
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

// The data of a thread's eight rows.
template <class Thread>
OTTAVA_DEVICE void put_turned(const Thread& thread, const Words2 (&data)[kGroup], TileData& tile) {
    const TilePlace place(thread);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        uint32_t upper[4], lower[4];
        const uint32_t first[4] = {data[0].w[half], data[1].w[half], data[2].w[half], data[3].w[half]};
        const uint32_t second[4] = {data[4].w[half], data[5].w[half], data[6].w[half], data[7].w[half]};
        turn(first, upper);
        turn(second, lower);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const int column = place.across * kGroup + 4 * half + k;
            tile.pairs[column * kTilePairs + (place.down ^ place.across)] = {{upper[k], lower[k]}};
        }
    }
}

// Where the columns of the tile at `row`, `col` go: rows of a matrix of `rows` columns.
struct TurnedOut {
    uint8_t* out;
    int64_t rows, cols;
    bool wide;  // 16-byte addresses, and rows a multiple of 16
};

// After a barrier.
template <class Thread>
OTTAVA_DEVICE void write_turned(const Thread& thread, const TileData& tile, const TurnedOut& to, int64_t row, int64_t col) {
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
            const Words4 sixteen = {{swapped ? four.w[2] : four.w[0], swapped ? four.w[3] : four.w[1],
                                     swapped ? four.w[0] : four.w[2], swapped ? four.w[1] : four.w[3]}};
            store_once(reinterpret_cast<Words4*>(to.out + (col + column) * to.rows + row + quad * 16), sixteen);
        }
        return;
    }
    // Byte by byte, in the order of the addresses.
    for (int column = thread.warp(); column < width; column += kTileThreads / kWarp) {
        const uint8_t* bytes = reinterpret_cast<const uint8_t*>(tile.pairs + column * kTilePairs);
        uint8_t* line = to.out + (col + column) * to.rows + row;
        for (int r = thread.lane(); r < height; r += kWarp)
            line[r] = bytes[((r / kGroup) ^ (column / kGroup)) * kGroup + r % kGroup];
    }
}

// The tiles of a matrix, the last ones first (see Cast).
struct Tiles {
    int64_t across, count;
    Tiles(int64_t rows, int64_t cols) : across(ceil_div(cols, kTile)), count(across * ceil_div(rows, kTile)) {}
};

}  // namespace ottava::cuda
