// Kernels over shards of matrices: the amaxes of MX blocks, and the cast with known scales.
//
// A block works on a panel of 32 rows by 128 columns, and a thread on one of its columns. So a warp
// reads a row's block at once, and a thread has a whole block of its column.
#pragma once

#include <cstdint>

#include "jobs.h"
#include "reduce.h"
#include "rounded.h"

namespace ottava::cuda {

constexpr int kShardRows = 32, kShardCols = 128;  // of a panel
static_assert(kShardRows == kWarp, "a lane for each row");

// A shard, from the first panel on that has elements of it.
struct ShardPanels {
    const void* src;
    int64_t count;   // elements at hand
    int64_t offset;  // of the panel's first element, from the first at hand; negative where that is
                     // not in the shard
    int64_t stride;  // columns of the matrix
    int64_t rows, cols;  // from the panel on
    int32_t across;      // panels side by side
    Dtype nominal;
};

OTTAVA_DEVICE int64_t row_blocks(const ShardPanels& shard) {
    return (shard.stride + kWarp - 1) / kWarp;
}

// The place of the panels in the matrix and their number, which the host computes.
struct PanelRange {
    int64_t block, col;  // of the first panel: the number of its row of blocks, and its column
    int64_t across = 0, down = 0;

    PanelRange(int64_t cols, int64_t start, int64_t count) : block(0), col(0) {
        if (count == 0) return;
        const int64_t last = start + count - 1, first_row = start / cols, last_row = last / cols;
        block = first_row / kShardRows;
        down = last_row / kShardRows + 1 - block;
        across = ceil_div(cols, kShardCols);
        if (first_row != last_row) return;
        col = start % cols / kShardCols * kShardCols;
        across = last % cols / kShardCols + 1 - col / kShardCols;
    }
};

// One panel as a thread sees it.
struct ShardPlace {
    int64_t row, col;       // from the shard's first panel on: of this panel, and of this thread
    int64_t index;          // of the thread's first element in the shard
    bool inside;            // whether the matrix has this column
    uint32_t rows_at_hand;  // a bit for each row whose element is at hand

    template <class Thread>
    OTTAVA_DEVICE ShardPlace(const Thread& thread, const ShardPanels& shard, uint32_t panel) {
        const uint32_t down = panel / static_cast<uint32_t>(shard.across),
                       right = panel - down * shard.across;
        row = static_cast<int64_t>(down) * kShardRows;
        col = static_cast<int64_t>(right) * kShardCols + thread.index();
        index = shard.offset + row * shard.stride + col;
        inside = col < shard.cols;
        const int64_t last = index + (kShardRows - 1) * shard.stride;
        rows_at_hand = inside && index >= 0 && last < shard.count ? ~0u : 0;
        if (!inside || rows_at_hand != 0) return;
        // The thread is at an edge of the shard. Rows below the matrix are beyond the shard as
        // well.
        int64_t at = index;
#pragma unroll 1
        for (uint32_t bit = 1; bit != 0; bit <<= 1, at += shard.stride)
            if (at >= 0 && at < shard.count) rows_at_hand |= bit;
    }

    // Loads the elements of kRows rows from `from` on; those outside of the shard are zero.
    template <class Source, int kRows>
    OTTAVA_DEVICE void load(const ShardPanels& shard, int from, uint32_t (&elements)[kRows]) const {
        int64_t at = index + from * shard.stride;
        const uint32_t rows = rows_at_hand >> from;
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            elements[r] = ((rows >> r) & 1) != 0 ? Source::load(shard.src, at) : 0;
            at += shard.stride;
        }
    }
};

struct ShardAmaxJob {
    ShardPanels shard;
    float* rows;     // the amaxes of the panel's first row of blocks, or of squares
    float* columns;  // null for squares
};

// Blocks without elements in the shard get 0, as blocks outside of all panels do.
template <class Source>
struct ShardAmax {
    static constexpr int kThreads = kShardCols, kBlocksPerMultiprocessor = 8;
    struct Shared {};
    Jobs<ShardAmaxJob> jobs;

    template <class Thread>
    OTTAVA_DEVICE void operator()(const Thread& thread, Shared&) const {
        const int number = jobs.of(thread.block());
        const ShardAmaxJob& job = jobs.all[number];
        const ShardPlace place(thread, job.shard,
                               static_cast<uint32_t>(thread.block() - jobs.begins[number]));
        uint32_t best[kShardRows];
        place.load<Source>(job.shard, 0, best);
        uint32_t column = 0;
#pragma unroll
        for (int r = 0; r < kShardRows; ++r) {
            best[r] = Source::observe(0, best[r]);
            column = larger(column, best[r]);
        }
        const int64_t blocks = row_blocks(job.shard), line = place.row / kShardRows;
        const int64_t block = place.col / kWarp;
        // If any column of the warp is within the matrix, the first one is.
        const bool some = place.col - thread.lane() < job.shard.cols;
        if (job.columns == nullptr) {
            const uint32_t square = largest_of_warp(thread, column);
            if (some && thread.lane() == 0)
                job.rows[line * blocks + block] = value(square, job.shard.nominal);
            return;
        }
        if (place.inside)
            job.columns[line * job.shard.stride + place.col] = value(column, job.shard.nominal);
        const int64_t row = place.row + thread.lane();
        const uint32_t mine = largest_of_each(thread, best);
        if (some && row < job.shard.rows)
            job.rows[row * blocks + block] = value(mine, job.shard.nominal);
    }

private:
    static OTTAVA_DEVICE float value(uint32_t best, Dtype nominal) {
        return rounded(Source::largest(best), nominal);
    }
};

struct ShardCastJob {
    ShardPanels shard;
    const uint8_t* row_scales;  // of the panel's first row of blocks
    uint8_t* row_data;          // of the shard; null leaves out the direction, as below
    const uint8_t* column_scales;
    uint8_t* column_data;
};

template <class Source, class Format>
struct ShardCast {
    static constexpr int kThreads = kShardCols, kBlocksPerMultiprocessor = 9;
    static constexpr int kAtOnce = 8;  // rows
    struct Shared {
        alignas(16) float rows[kThreads / kWarp]
                              [kShardRows];  // multipliers, of the blocks of each warp
    };
    Jobs<ShardCastJob> jobs;

    template <class Thread>
    OTTAVA_DEVICE void operator()(const Thread& thread, Shared& shared) const {
        // The last panels come first, as in MultiCast.
        const int64_t panel = thread.blocks() - 1 - thread.block();
        const int number = jobs.of(panel);
        const ShardCastJob& job = jobs.all[number];
        const ShardPlace place(thread, job.shard,
                               static_cast<uint32_t>(panel - jobs.begins[number]));
        float column = 0.0f;
        if (job.column_data != nullptr && place.inside)
            column = multiplier(
                job.column_scales[place.row / kShardRows * job.shard.stride + place.col]);
        // Each lane loads the scale of one row of the warp's block.
        const int64_t blocks = row_blocks(job.shard), row = place.row + thread.lane();
        const bool has = row < job.shard.rows && place.col - thread.lane() < job.shard.cols &&
                         job.row_data != nullptr;
        shared.rows[thread.warp()][thread.lane()] =
            has ? multiplier(job.row_scales[row * blocks + place.col / kWarp]) : 0.0f;
        thread.barrier();
        with_rounding<Source>(job.shard.nominal, [&](auto rounding) {
            cast<decltype(rounding)>(thread, job, place, column, shared);
        });
    }

private:
    static OTTAVA_DEVICE float multiplier(uint8_t scale) {
        return e8m0_multiplier<float, int32_t>(scale);
    }

    template <class Rounding, class Thread>
    static OTTAVA_DEVICE void cast(const Thread& thread, const ShardCastJob& job,
                                   const ShardPlace& place, float column, const Shared& shared) {
        // Both directions are computed, and written where they are requested, so that there are no
        // branches between the loads.
        uint8_t *const row_data = job.row_data, *const column_data = job.column_data;
        const uint32_t by_row = row_data == nullptr ? 0 : place.rows_at_hand;
        const uint32_t by_column = column_data == nullptr ? 0 : place.rows_at_hand;
        const int64_t stride = job.shard.stride;
        int64_t at = place.index;
#pragma unroll 1
        for (int from = 0; from < kShardRows; from += kAtOnce) {
            uint32_t elements[kAtOnce];
            place.load<Source>(job.shard, from, elements);
#pragma unroll
            for (int r = 0; r < kAtOnce; r += 2) {
                float a = Source::widen(elements[r]), b = Source::widen(elements[r + 1]);
                Rounding::pair(a, b);
                const float* rows = shared.rows[thread.warp()] + from + r;
                const uint32_t in_row =
                    encode_pair<Format>(multiply(a, rows[0]), multiply(b, rows[1]));
                put(in_row, by_row >> (from + r), row_data, at, stride);
                const uint32_t in_column =
                    encode_pair<Format>(multiply(a, column), multiply(b, column));
                put(in_column, by_column >> (from + r), column_data, at, stride);
                at += 2 * stride;
            }
        }
    }

    static OTTAVA_DEVICE void put(uint32_t data, uint32_t rows, uint8_t* to, int64_t at,
                                  int64_t stride) {
        if ((rows & 1) != 0) to[at] = static_cast<uint8_t>(data);
        if ((rows & 2) != 0) to[at + stride] = static_cast<uint8_t>(data >> 8);
    }
};

}  // namespace ottava::cuda
