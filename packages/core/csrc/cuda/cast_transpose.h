// Kernels over tiles: the cast with its transpose, and the transpose of data.
#pragma once

#include <cstdint>

#include "scaling.h"
#include "tile.h"

namespace ottava::cuda {

// How many tiles a multiprocessor casts at once. Without conversions of its own it needs more registers for each.
#if defined(__CUDA_ARCH__) && !defined(OTTAVA_CONVERTS_FP8)
constexpr int kCastTiles = 2;
#else
constexpr int kCastTiles = 3;
#endif

// Data of a matrix and of its transpose, which is all that is written when `out` is null.
template <class Source, class Format, class Scaling>
struct CastTranspose {
    static constexpr int kThreads = kTileThreads, kBlocksPerMultiprocessor = Source::bytes == 4 ? 2 : kCastTiles;
    struct Shared {
        TileData tile;
        typename Scaling::template Shared<kThreads> scaling;
    };
    const void* src;
    bool wide;
    uint8_t* out;
    TurnedOut turned;
    int64_t across;
    Scaling scaling;

    template <class Thread>
    OTTAVA_DEVICE void operator()(const Thread& thread, Shared& shared) const {
        const int64_t number = thread.blocks() - 1 - thread.block();
        const int64_t tile_row = number / across * kTile, tile_col = number % across * kTile;
        const TilePlace place(thread);
        const int64_t row = tile_row + place.down * kGroup, col = tile_col + place.across * kGroup;
        const int64_t count = turned.cols - col;
        // Of most tiles nothing is outside.
        const bool whole = wide && tile_row + kTile <= turned.rows && tile_col + kTile <= turned.cols;
        Group<Source> groups[kGroup];
        if (whole) {
#pragma unroll
            for (int k = 0; k < kGroup; ++k) groups[k] = load_whole<Source>(src, (row + k) * turned.cols + col);
        } else {
#pragma unroll
            for (int k = 0; k < kGroup; ++k) {
                const bool inside = row + k < turned.rows;
                groups[k] = load_group<Source>(src, (row + k) * turned.cols + col, inside ? count : 0, wide);
            }
        }
        const float scale = scaling.template get<Format, kThreads>(thread, shared.scaling);
        uint32_t seen = 0;
        Words2 data[kGroup];
#pragma unroll
        for (int k = 0; k < kGroup; ++k) {
            seen = groups[k].observe(seen);
            data[k] = encode_group<Format>(groups[k], scale);
        }
        int clamped = 0;
        if (scaling.counts() && clamps<Format>(Source::largest(seen), scale)) {
            const int64_t inside = count < kGroup ? count : kGroup;
#pragma unroll 1
            for (int64_t r = row; r < row + kGroup && r < turned.rows; ++r)
                clamped += clamped_of<Format, Source>(src, r * turned.cols + col, inside, scale);
        }
        if (out != nullptr && whole) {
#pragma unroll
            for (int k = 0; k < kGroup; ++k) store_whole(out, (row + k) * turned.cols + col, data[k]);
        } else if (out != nullptr) {
#pragma unroll
            for (int k = 0; k < kGroup; ++k)
                if (row + k < turned.rows) store_data(out, (row + k) * turned.cols + col, count, wide, data[k]);
        }
        put_turned(thread, data, shared.tile);
        thread.barrier();
        write_turned(thread, shared.tile, turned, tile_row, tile_col);
        scaling.template leave<kThreads>(thread, shared.scaling, Source::largest(seen), clamped);
    }
};

struct Transpose {
    static constexpr int kThreads = kTileThreads, kBlocksPerMultiprocessor = 4;
    typedef TileData Shared;
    const uint8_t* src;
    bool wide;
    TurnedOut turned;
    int64_t across;

    template <class Thread>
    OTTAVA_DEVICE void operator()(const Thread& thread, Shared& tile) const {
        const int64_t tile_row = thread.block() / across * kTile, tile_col = thread.block() % across * kTile;
        const TilePlace place(thread);
        const int64_t row = tile_row + place.down * kGroup, col = tile_col + place.across * kGroup;
        const int64_t count = turned.cols - col;
        Words2 data[kGroup];
#pragma unroll
        for (int k = 0; k < kGroup; ++k) {
            const int64_t first = (row + k) * turned.cols + col, inside = row + k < turned.rows ? count : 0;
            data[k] = load_data(src, first, inside, wide);
        }
        put_turned(thread, data, tile);
        thread.barrier();
        write_turned(thread, tile, turned, tile_row, tile_col);
    }
};

}  // namespace ottava::cuda
