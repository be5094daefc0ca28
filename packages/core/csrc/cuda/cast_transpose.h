// Kernels over tiles: the cast with its transpose, and the transpose of data.
#pragma once

#include <cstdint>

#include "scaling.h"
#include "tile.h"

namespace ottava::cuda {

// The data of a matrix and of its transpose; if `out` is null, only the transpose is written.
template <class Source, class Format, class Scaling>
struct CastTranspose {
    static constexpr int kThreads = kTileThreads, kBlocksPerMultiprocessor = kCastTiles<Source>;
    struct Shared {
        TileData tile;
        typename Scaling::template Shared<kThreads> scaling;
    };
    TileSource from;
    uint8_t* out;
    TurnedOut turned;
    Scaling scaling;

    template <class Thread>
    OTTAVA_DEVICE void operator()(const Thread& thread, Shared& shared) const {
        const TileRows tile(thread, from, thread.blocks() - 1 - thread.block());
        Group<Source> groups[kGroup];
        tile.load(from.src, groups);
        const float scale = scaling.template get<Format, kThreads>(thread, shared.scaling);
        uint32_t best = 0;
        Words2 data[kGroup];
#pragma unroll
        for (int k = 0; k < kGroup; ++k) {
            best = groups[k].observe(best);
            data[k] = encode_group<Format>(groups[k], scale);
        }
        int clamped = 0;
        if (scaling.counts() && clamps<Format>(Source::largest(best), scale)) {
            const int64_t inside = tile.count < kGroup ? tile.count : kGroup;
#pragma unroll 1
            for (int64_t r = tile.row; r < tile.row + kGroup && r < tile.rows; ++r)
                clamped +=
                    clamped_of<Format, Source>(from.src, r * tile.cols + tile.col, inside, scale);
        }
        if (out != nullptr) tile.put_all(out, data);
        put_turned(thread, data, shared.tile);
        thread.barrier();
        write_turned(thread, shared.tile, turned, tile.tile_row, tile.tile_col);
        scaling.template leave<kThreads>(thread, shared.scaling, Source::largest(best), clamped);
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
        const int64_t tile_row = thread.block() / across * kTile,
                      tile_col = thread.block() % across * kTile;
        const TilePlace place(thread);
        const int64_t row = tile_row + place.down * kGroup, col = tile_col + place.across * kGroup;
        const int64_t count = turned.cols - col;
        Words2 data[kGroup];
#pragma unroll
        for (int k = 0; k < kGroup; ++k) {
            const int64_t first = (row + k) * turned.cols + col,
                          inside = row + k < turned.rows ? count : 0;
            data[k] = load_data(src, first, inside, wide);
        }
        put_turned(thread, data, tile);
        thread.barrier();
        write_turned(thread, tile, turned, tile_row, tile_col);
    }
};

}  // namespace ottava::cuda
