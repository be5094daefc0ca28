// The quantization on grids whose blocks are 1 x 128, 128 x 128, or whole rows and columns, by the
// tiles of tile.h. A tile contains whole blocks of the first two kinds, and one reading of it
// serves both directions.
//
// The threads of a tile write the largest magnitudes of their rows and columns to shared memory.
// Each thread then computes the scale of one row or one column, and reads the scales of its own
// eight rows and columns. The amaxes of whole rows and columns come from an earlier launch, which
// raises them from zeros.
#pragma once

#include <cstdint>

#include "reduce.h"
#include "tile.h"

namespace ottava::cuda {

// Blocks of 1 x 128 (128 x 1), of 128 x 128, and of 1 x all (all x 1).
struct LineBlocks {
    static constexpr bool square = false, whole = false;
};
struct SquareBlocks {
    static constexpr bool square = true, whole = false;
};
struct WholeLines {
    static constexpr bool square = false, whole = true;
};

// The largest magnitudes of a tile's rows, and of its columns within each warp's rows.
template <class Source>
struct TileAmaxes {
    uint32_t rows[kTile];
    Group<Source> columns[kTileThreads / kWarp][kTilePairs];

    template <class Thread>
    OTTAVA_DEVICE void leave(const Thread& thread, const Group<Source> (&groups)[kGroup]) {
        const TilePlace place(thread);
        uint32_t best[kGroup];
        Group<Source> below = {};
#pragma unroll
        for (int k = 0; k < kGroup; ++k) {
            best[k] = bits_as<uint32_t>(Source::largest(groups[k].observe(0)));
#pragma unroll
            for (int n = 0; n < Source::words; ++n)
                below.w[n] = Source::observe(below.w[n], groups[k].w[n]);
        }
        // A warp has two times eight rows, and sixteen lanes side by side share eight rows.
        uint32_t row = largest_of_each(thread, best);
        row = larger(row, thread.exchange(row, kGroup));
        if (place.across < kGroup) rows[place.down * kGroup + place.across] = row;
#pragma unroll
        for (int n = 0; n < Source::words; ++n)
            below.w[n] = Source::merge(below.w[n], thread.exchange(below.w[n], kTilePairs));
        if (thread.lane() < kTilePairs) columns[thread.warp()][place.across] = below;
    }

    // The amax of row number `line`, or of a column if `line` is beyond the rows; called after a
    // barrier.
    OTTAVA_DEVICE float of(int line) const {
        if (line < kTile) return bits_as<float>(rows[line]);
        const int column = line - kTile;
        uint32_t largest = 0;
#pragma unroll
        for (int k = 0; k < kTileThreads / kWarp; ++k)
            largest =
                larger(largest, bits_as<uint32_t>(columns[k][column / kGroup].at(column % kGroup)));
        return bits_as<float>(largest);
    }
};

static_assert(kTileThreads == 2 * kTile, "a thread for each row and each column");

// The amaxes of whole rows and columns, each of which is optional. Their memory holds zeros or
// larger values.
template <class Source>
struct LineAmaxes {
    static constexpr int kThreads = kTileThreads, kBlocksPerMultiprocessor = kCastTiles<Source>;
    typedef TileAmaxes<Source> Shared;
    TileSource from;
    float* rows;
    float* columns;

    template <class Thread>
    OTTAVA_DEVICE void operator()(const Thread& thread, Shared& shared) const {
        const TileRows tile(thread, from, thread.block());
        Group<Source> groups[kGroup];
        tile.load(from.src, groups);
        shared.leave(thread, groups);
        thread.barrier();
        const bool of_row = thread.index() < kTile;
        const int64_t line =
            of_row ? tile.tile_row + thread.index() : tile.tile_col + thread.index() - kTile;
        float* const to = of_row ? rows : columns;
        if (to == nullptr || line >= (of_row ? tile.rows : tile.cols)) return;
        thread.raise(reinterpret_cast<int32_t*>(to + line),
                     bits_as<int32_t>(shared.of(thread.index())));
    }
};

// The addresses of the results of a direction. The scale of block row i and block column j is at
// `scales[i * down + j * right]`.
struct GridResult {
    uint8_t* data;  // null leaves out the direction
    float* scales;
    int64_t down, right;
    const float* amaxes;  // of whole rows or columns
};

template <class Source, class Format, class Blocks>
struct GridQuantize {
    static constexpr int kThreads = kTileThreads;
    // With amaxes and scales of lines, each block needs more registers.
    static constexpr int kBlocksPerMultiprocessor =
        Blocks::square || Blocks::whole ? kCastTiles<Source> : 2;
    struct Shared {
        // The two are used one after the other.
        union {
            TileData tile;
            TileAmaxes<Source> amaxes;
        };
        alignas(16) float factors[2 * kTile];  // of rows, of columns
        BlockLargest<kThreads> largest;
    };
    TileSource from;
    ScaleRule rule;
    GridResult by_row, by_column;
    TurnedOut turned;  // of the data by column, if they are stored as the transpose's

    template <class Thread>
    OTTAVA_DEVICE void operator()(const Thread& thread, Shared& shared) const {
        // The last tiles come first, because the caches hold them after a launch for amaxes.
        const TileRows tile(thread, from, thread.blocks() - 1 - thread.block());
        Group<Source> groups[kGroup];
        tile.load(from.src, groups);
        if (Blocks::square)
            find_square(thread, shared, tile, groups);
        else
            find_lines(thread, shared, tile, groups);
        thread.barrier();
        const TilePlace place(thread);
        const float* const row_factors = shared.factors + place.down * kGroup;
        float column_factors[kGroup];
#pragma unroll
        for (int k = 0; k < kGroup; ++k)
            column_factors[k] = shared.factors[kTile + place.across * kGroup + k];
        const bool turns = turned.out != nullptr;
        Words2 data[kGroup];
#pragma unroll
        for (int k = 0; k < kGroup; ++k) {
            if (by_row.data != nullptr)
                tile.put(by_row.data, k, encode_group<Format>(groups[k], row_factors[k]));
            if (by_column.data == nullptr) continue;
            float elements[kGroup];
#pragma unroll
            for (int n = 0; n < kGroup; ++n) elements[n] = groups[k].at(n);
            data[k] = encode_each<Format>(elements, column_factors);
            if (!turns) tile.put(by_column.data, k, data[k]);
        }
        if (!turns) return;
        put_turned(thread, data, shared.tile);
        thread.barrier();
        write_turned(thread, shared.tile, turned, tile.tile_row, tile.tile_col);
    }

private:
    OTTAVA_DEVICE float scale(float amax) const {
        return scale_of<float, int32_t>(amax, Format::maximum, rule);
    }

    static OTTAVA_DEVICE void put_scale(const GridResult& to, int64_t i, int64_t j, float scale) {
        if (to.data != nullptr) to.scales[i * to.down + j * to.right] = divide(1.0f, scale);
    }

    template <class Thread>
    OTTAVA_DEVICE void find_square(const Thread& thread, Shared& shared, const TileRows& tile,
                                   const Group<Source> (&groups)[kGroup]) const {
        uint32_t best = 0;
#pragma unroll
        for (int k = 0; k < kGroup; ++k) best = groups[k].observe(best);
        const float factor =
            scale(bits_as<float>(shared.largest(thread, bits_as<uint32_t>(Source::largest(best)))));
        shared.factors[thread.index()] = factor;
        if (thread.index() != 0) return;
        put_scale(by_row, tile.tile_row / kTile, tile.tile_col / kTile, factor);
        put_scale(by_column, tile.tile_row / kTile, tile.tile_col / kTile, factor);
    }

    // Each thread computes the scale of one row or column.
    template <class Thread>
    OTTAVA_DEVICE void find_lines(const Thread& thread, Shared& shared, const TileRows& tile,
                                  const Group<Source> (&groups)[kGroup]) const {
        if (!Blocks::whole) {
            shared.amaxes.leave(thread, groups);
            thread.barrier();
        }
        const int index = thread.index();
        const bool of_row = index < kTile;
        const GridResult& to = of_row ? by_row : by_column;
        const int64_t line = of_row ? tile.tile_row + index : tile.tile_col + index - kTile;
        const bool is_inside = to.data != nullptr && line < (of_row ? tile.rows : tile.cols);
        float amax = 0.0f;
        if (!Blocks::whole)
            amax = shared.amaxes.of(index);
        else if (is_inside)
            amax = to.amaxes[line];
        const float factor = scale(amax);
        shared.factors[index] = factor;
        const int64_t other = (of_row ? tile.tile_col : tile.tile_row) / kTile;
        if (!is_inside || (Blocks::whole && other != 0))
            return;  // the first tile leaves what all of them have
        if (of_row)
            put_scale(to, line, other, factor);
        else
            put_scale(to, other, line, factor);
    }
};

}  // namespace ottava::cuda
