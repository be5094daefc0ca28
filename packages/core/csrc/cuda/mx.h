// The quantization of MX blocks along rows, along columns, or both, in one pass over the matrix.
//
// A warp has 32 rows and 64 columns: two blocks in each row, one in each column. A lane reads eight
// rows of eight columns once and holds them in registers, so that four lanes side by side have the
// blocks of eight rows, and four lanes below each other have those of eight columns. These lanes
// share the work of their scales: they exchange largest magnitudes, each lane computes two scales,
// and the scales are exchanged again. No element goes through shared memory. Only the scales of the
// rows do, two bytes from each warp, so that each row of the block of threads writes them at once.
#pragma once

#include <cstdint>

#include "mx_scales.h"

namespace ottava::cuda {

// The addresses of the results of a direction.
struct MxResult {
    uint8_t* data;
    uint8_t* scales;
    bool wide_scales;
};

// Stores eight data from byte number `i` on; fewer near the end. At an edge a loop stores them one
// after the other, because that takes few of the registers that hold the elements.
OTTAVA_DEVICE void put_data(uint8_t* to, int64_t i, int64_t count, bool wide, const Words2& data) {
    if (wide && count >= kGroup) return store_whole(to, i, data);
    const int bytes = count < kGroup ? static_cast<int>(count) : kGroup;
    uint64_t rest = data.w[0] | static_cast<uint64_t>(data.w[1]) << 32;
#pragma unroll 1
    for (int k = 0; k < bytes; ++k, rest >>= 8) to[i + k] = static_cast<uint8_t>(rest);
}

// Where a conversion takes many instructions, those of several rows must not be mixed, because
// there are too few registers for that.
OTTAVA_DEVICE void keep_apart() {
#if defined(__CUDA_ARCH__) && !defined(OTTAVA_CONVERTS_FP8)
    __syncwarp();
#endif
}

template <class Source, class Format, bool kByRow, bool kByColumn>
struct MxQuantize {
    static constexpr int kThreads = 256, kBlocksPerMultiprocessor = Source::bytes == 2 ? 3 : 2;
    static constexpr int kLanesAcross = 8, kRows = kMxBlock, kWarpCols = kLanesAcross * kGroup;
    static constexpr int kCols = kWarpCols * kThreads / kWarp, kScales = kCols / kMxBlock;
    struct alignas(16) Shared {
        uint8_t row_scales[kRows][kScales];
    };
    const void* src;
    bool wide;  // all data too
    bool square, floor;
    int64_t rows, cols;
    uint32_t across;  // blocks of threads
    MxResult by_row, by_column;

    template <class Thread>
    OTTAVA_DEVICE void operator()(const Thread& thread, Shared& shared) const {
        const uint32_t block = static_cast<uint32_t>(thread.block());
        const int64_t tile_row = int64_t{block / across} * kRows,
                      tile_col = int64_t{block % across} * kCols;
        const int64_t warp_col = tile_col + thread.warp() * kWarpCols;
        const int down = thread.lane() / kLanesAcross * kGroup;
        const int64_t row = tile_row + down, col = warp_col + thread.lane() % kLanesAcross * kGroup;
        const int64_t rest = rows - row;
        const Place place{row * cols + col, cols - col,
                          rest < kGroup ? static_cast<int>(rest) : kGroup, down,
                          tile_row / kMxBlock * cols + col};
        // Most warps have no element outside of the matrix.
        if (wide && tile_row + kRows <= rows && warp_col + kWarpCols <= cols)
            quantize<true>(thread, shared, place);
        else
            quantize<false>(thread, shared, place);
        if (!kByRow) return;
        thread.barrier();
        put_row_scales(thread, shared, tile_row, tile_col);
    }

private:
    struct Place {
        int64_t first, count;  // a lane's first element, and the columns from there on
        int height, down;      // how many rows it has, and which is the first of those of the tile
        int64_t column_scale;
    };

    template <bool kWhole, class Thread>
    OTTAVA_DEVICE void quantize(const Thread& thread, Shared& shared, const Place& place) const {
        Group<Source> groups[kGroup];
#pragma unroll
        for (int k = 0; k < kGroup; ++k) {
            const int64_t i = place.first + k * cols;
            groups[k] = kWhole
                            ? load_whole<Source>(src, i)
                            : load_group<Source>(src, i, k < place.height ? place.count : 0, wide);
        }
        // Both directions are observed at once, so that no magnitude has to stay in a register.
        uint32_t best[kGroup] = {};
        Group<Source> seen_below = {};
#pragma unroll
        for (int k = 0; k < kGroup; ++k) {
#pragma unroll
            for (int n = 0; n < Source::words; ++n) {
                best[k] = Source::observe(best[k], groups[k].w[n]);
                seen_below.w[n] = Source::observe(seen_below.w[n], groups[k].w[n]);
            }
        }
        Words2 row_scales = {}, column_scales = {};
        if (kByRow) {
            row_scales = exchanged(thread, folded(best), 2, 1);
            stage(thread, shared, place.down, row_scales);
        }
        float column_factors[kGroup] = {};
        if (kByColumn) {
            column_scales = exchanged(thread, seen_below, 2 * kLanesAcross, kLanesAcross);
#pragma unroll
            for (int k = 0; k < kGroup; ++k) column_factors[k] = factor(column_scales, k);
            if (thread.lane() < kLanesAcross)  // those that have the first rows
                put_data(by_column.scales, place.column_scale, place.count, by_column.wide_scales,
                         column_scales);
        }
#pragma unroll
        for (int k = 0; k < kGroup; ++k) {
            float elements[kGroup], row_factors[kGroup];
#pragma unroll
            for (int n = 0; n < kGroup; ++n)
                elements[n] = groups[k].at(n), row_factors[n] = factor(row_scales, k);
            if (kByRow)
                put<kWhole>(by_row.data, place, k, encode_each<Format>(elements, row_factors));
            if (kByColumn)
                put<kWhole>(by_column.data, place, k,
                            encode_each<Format>(elements, column_factors));
            keep_apart();
        }
    }

    // The largest magnitudes of eight rows, as a group of eight elements.
    static OTTAVA_DEVICE Group<Source> folded(const uint32_t (&best)[kGroup]) {
        Group<Source> largest;
#pragma unroll
        for (int k = 0; k < Source::words; ++k) {
            if (Source::words == kGroup) {
                largest.w[k] = best[k];
            } else {  // two elements to a word: those of two rows beside each other
                const uint32_t upper = best[2 * k % kGroup], lower = best[(2 * k + 1) % kGroup];
                largest.w[k] = Source::merge(pick_bytes(upper, lower, 0x5410),
                                             pick_bytes(upper, lower, 0x7632));
            }
        }
        return largest;
    }

    // The bytes of eight scales, from the magnitudes of the four lanes whose numbers differ in the
    // bits of `first` and `second`.
    template <class Thread>
    OTTAVA_DEVICE Words2 exchanged(const Thread& thread, const Group<Source>& largest, int first,
                                   int second) const {
        constexpr int kHalf = Source::words / 2, kQuarter = Source::words / 4;
        if (square) return of_square(thread, largest);
        const bool upper = (thread.lane() & first) != 0, odd = (thread.lane() & second) != 0;
        uint32_t half[kHalf];
#pragma unroll
        for (int k = 0; k < kHalf; ++k) {
            const uint32_t low = largest.w[k], high = largest.w[k + kHalf];
            half[k] = Source::merge(upper ? high : low, thread.exchange(upper ? low : high, first));
        }
        uint32_t two[kQuarter];
#pragma unroll
        for (int k = 0; k < kQuarter; ++k) {
            const uint32_t low = half[k], high = half[k + kQuarter];
            two[k] = Source::merge(odd ? high : low, thread.exchange(odd ? low : high, second));
        }
        const uint32_t own = code(Source::at(two, 0)) | (code(Source::at(two, 1)) << 8);
        const uint32_t beside = thread.exchange(own, second);
        const uint32_t four = odd ? beside | (own << 16) : own | (beside << 16);
        const uint32_t others = thread.exchange(four, first);
        return {{upper ? others : four, upper ? four : others}};
    }

    // One scale for 32 rows and columns.
    template <class Thread>
    OTTAVA_DEVICE Words2 of_square(const Thread& thread, const Group<Source>& largest) const {
        uint32_t best = largest.w[0];
#pragma unroll
        for (int k = 1; k < Source::words; ++k) best = Source::merge(best, largest.w[k]);
        constexpr int kMasks[] = {1, 2, kLanesAcross, 2 * kLanesAcross};
#pragma unroll
        for (int k = 0; k < 4; ++k) best = Source::merge(best, thread.exchange(best, kMasks[k]));
        const uint32_t four = code(Source::largest(best)) * 0x01010101u;
        return {{four, four}};
    }

    OTTAVA_DEVICE uint32_t code(float amax) const { return block_scale<Format>(amax, floor); }

    static OTTAVA_DEVICE float factor(const Words2& scales, int k) {
        return block_factor((scales.w[k / 4] >> (8 * (k % 4))) & 0xff);
    }

    template <bool kWhole>
    OTTAVA_DEVICE void put(uint8_t* to, const Place& place, int k, const Words2& data) const {
        const int64_t i = place.first + k * cols;
        if (kWhole) return store_whole(to, i, data);
        if (k < place.height) put_data(to, i, place.count, wide, data);
    }

    // Each of the four lanes that have the scales of eight rows writes two of them.
    template <class Thread>
    OTTAVA_DEVICE void stage(const Thread& thread, Shared& shared, int down,
                             const Words2& scales) const {
        constexpr int kLanes = kMxBlock / kGroup;
        const int lane = thread.lane() % kLanes, block = thread.lane() % kLanesAcross / kLanes;
        const uint32_t two = (lane < 2 ? scales.w[0] : scales.w[1]) >> (16 * (lane % 2));
        uint8_t* to =
            &shared.row_scales[down + 2 * lane][thread.warp() * (kLanesAcross / kLanes) + block];
        to[0] = static_cast<uint8_t>(two);
        to[kScales] = static_cast<uint8_t>(two >> 8);
    }

    template <class Thread>
    OTTAVA_DEVICE void put_row_scales(const Thread& thread, const Shared& shared, int64_t tile_row,
                                      int64_t tile_col) const {
        const int64_t blocks = mx_blocks(cols), first = tile_col / kMxBlock;
        const int height = rows - tile_row < kRows ? static_cast<int>(rows - tile_row) : kRows;
        if (by_row.wide_scales) {
            const int r = thread.index();
            if (r >= height) return;
            const Words4 sixteen = *reinterpret_cast<const Words4*>(shared.row_scales[r]);
            store_once(reinterpret_cast<Words4*>(by_row.scales + (tile_row + r) * blocks + first),
                       sixteen);
            return;
        }
        for (int i = thread.index(); i < height * kScales; i += kThreads) {
            const int r = i / kScales, k = i % kScales;
            if (first + k < blocks)
                by_row.scales[(tile_row + r) * blocks + first + k] = shared.row_scales[r][k];
        }
    }
};

}  // namespace ottava::cuda
