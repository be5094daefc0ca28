// The operations on many tensors. Threads take chunks of all tensors, so that neither one large
// tensor nor many small ones leave a thread without work. Chunks write to different addresses.
// Their results are combined in a fixed order, or by a maximum, which depends on no order.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <vector>

#include "../numerics.h"
#include "kernels.h"
#include "parallel.h"

namespace ottava {
namespace {

constexpr int64_t kChunk = 8 * kUnit;  // elements of a chunk, about

struct Chunk {
    int64_t job;
    int64_t begin, end;  // elements, or panels
};

// Each thread takes the next chunk when it has finished one, because chunks differ in size and
// threads in speed.
template <class Body>
void over_chunks(const std::vector<Chunk>& chunks, int64_t elements, int threads,
                 const Body& body) {
    std::atomic<size_t> next{0};
    const auto run = [&](int64_t, int64_t, int) {
        for (size_t i = next++; i < chunks.size(); i = next++) body(chunks[i], i);
    };
    in_parallel(static_cast<int64_t>(chunks.size()), elements, threads, run);
}

void add_chunks(std::vector<Chunk>& chunks, int64_t job, int64_t count, int64_t each) {
    for (int64_t begin = 0; begin < count; begin += each)
        chunks.push_back({job, begin, std::min(begin + each, count)});
}

float rounded(float x, Dtype nominal) {
    if (nominal == Dtype::float32) return x;
    return nominal == Dtype::bfloat16 ? widen_bfloat16(to_bfloat16(x)) : widen_half(to_half(x));
}

// Casts one chunk of a tensor. Elements that are neither in float32 nor in their nominal dtype are
// widened first.
void cast_chunk(const Kernels& kernels, const MultiCastJob& job, int64_t begin, int64_t end,
                float scale, bool stream) {
    const MultiSource& from = job.source;
    const uint8_t* src = advance(from.src, begin, from.dtype);
    uint8_t* out = job.out + begin;
    if (from.dtype == Dtype::float32) {
        kernels.cast_rounded(src, from.nominal, end - begin, scale, out, job.format, stream);
        return;
    }
    if (from.nominal == from.dtype || from.nominal == Dtype::float32) {
        kernels.cast(src, from.dtype, end - begin, scale, out, job.format, stream);
        return;
    }
    float values[kUnit];
    for (int64_t at = begin; at < end; at += kUnit) {
        const int64_t count = std::min(kUnit, end - at);
        for (int64_t i = 0; i < count; ++i) {
            uint16_t pattern;
            memcpy(&pattern, advance(from.src, at + i, from.dtype), sizeof(pattern));
            values[i] =
                from.dtype == Dtype::bfloat16 ? widen_bfloat16(pattern) : widen_half(pattern);
        }
        kernels.cast_rounded(values, from.nominal, count, scale, job.out + at, job.format, false);
    }
}

struct Rectangle {
    int64_t row, col, rows, cols;

    Rectangle within(const Rectangle& other) const {
        const int64_t top = std::max(row, other.row), left = std::max(col, other.col);
        return {top, left, std::min(row + rows, other.row + other.rows) - top,
                std::min(col + cols, other.col + other.cols) - left};
    }
    bool empty() const { return rows <= 0 || cols <= 0; }
};

// A shard as rectangles, and the cells of its matrix in which it has elements. A cell is a
// rectangle of kPanelCols columns, and has whole blocks where the blocks' sizes allow it. The
// amaxes of such blocks then depend on no other cell.
class Cells {
    const GridShard& shard_;
    std::vector<Rectangle> parts_;  // the end of a row, whole rows, the beginning of a row
    int64_t height_, first_row_ = 0, first_col_ = 0, across_ = 0;

public:
    int64_t count = 0, each = 0;  // cells, and how many of them make a chunk

    Cells(const GridShard& shard, std::initializer_list<GridBlock> blocks)
        : shard_(shard), height_(kMxBlock) {
        const int64_t n = shard.source.count, cols = shard.cols;
        for (const GridBlock& block : blocks)
            if (block.rows == 0 || kMxBlock % block.rows != 0) height_ = 4 * kMxBlock;
        if (n == 0) return;
        const int64_t last = shard.start + n - 1, row = shard.start / cols,
                      col = shard.start % cols;
        const int64_t last_row = last / cols, end = last % cols + 1;
        if (row == last_row) {
            parts_ = {{row, col, 1, n}};
        } else {
            const int64_t whole = row + (col != 0), whole_end = last_row + (end == cols);
            for (const Rectangle& part : {Rectangle{row, col, whole - row, cols - col},
                                          Rectangle{whole, 0, whole_end - whole, cols},
                                          Rectangle{whole_end, 0, last_row + 1 - whole_end, end}})
                if (!part.empty()) parts_.push_back(part);
        }
        first_row_ = row / height_;
        first_col_ = row == last_row ? col / kPanelCols : 0;
        across_ = (row == last_row ? end - 1 : cols - 1) / kPanelCols + 1 - first_col_;
        count = (last_row / height_ + 1 - first_row_) * across_;
        const int64_t high = std::min(height_, last_row + 1 - row),
                      wide = std::min(cols, kPanelCols);
        each = std::max<int64_t>(1, kChunk / (high * wide));
    }

    Rectangle cell(int64_t i) const {
        const Rectangle all{0, 0, shard_.rows, shard_.cols};
        const int64_t row = (first_row_ + i / across_) * height_,
                      col = (first_col_ + i % across_) * kPanelCols;
        return Rectangle{row, col, height_, kPanelCols}.within(all);
    }

    // Whether the blocks of a cell have no elements in other cells.
    bool has_whole(const GridBlock& block) const {
        const bool rows = block.rows == 0 ? shard_.rows <= height_ : height_ % block.rows == 0;
        return rows && (block.cols == 0 ? shard_.cols <= kPanelCols : kPanelCols % block.cols == 0);
    }

    // Calls body(rectangle, its first element in the shard) for each rectangle of the shard in a
    // cell.
    template <class Body>
    void over(const Rectangle& cell, const Body& body) const {
        for (const Rectangle& part : parts_) {
            const Rectangle overlap = part.within(cell);
            if (!overlap.empty())
                body(overlap, overlap.row * shard_.cols + overlap.col - shard_.start);
        }
    }
};

// Calls body(job, number of the job, cells, cell) for every cell of every shard.
template <class Job, class Blocks, class Body>
void over_cells(const Job* jobs, int64_t count, int threads, const Blocks& cells_of,
                const Body& body) {
    std::vector<Chunk> chunks;
    int64_t elements = 0;
    for (int64_t i = 0; i < count; ++i) {
        const Cells cells = cells_of(jobs[i]);
        add_chunks(chunks, i, cells.count, cells.each);
        elements += jobs[i].shard.source.count;
    }
    over_chunks(chunks, elements, threads, [&](const Chunk& chunk, size_t) {
        const Job& job = jobs[chunk.job];
        const Cells cells = cells_of(job);
        for (int64_t i = chunk.begin; i < chunk.end; ++i)
            body(job, chunk.job, cells, cells.cell(i));
    });
}

// One number for each block that has elements in a cell.
class CellBlocks {
    GridBlock block_;
    int64_t first_row_, first_col_, down_, across_, all_across_;

public:
    std::vector<float> values;

    CellBlocks(const GridShard& shard, const GridBlock& block, const Rectangle& cell)
        : block_{block.rows == 0 ? shard.rows : block.rows,
                 block.cols == 0 ? shard.cols : block.cols},
          first_row_(cell.row / block_.rows),
          first_col_(cell.col / block_.cols),
          down_((cell.row + cell.rows - 1) / block_.rows + 1 - first_row_),
          across_((cell.col + cell.cols - 1) / block_.cols + 1 - first_col_),
          all_across_(grid_blocks(shard.cols, block.cols)),
          values(static_cast<size_t>(down_ * across_ + kGridLanes)) {}

    GridBlocks blocks() { return {block_.rows, block_.cols, values.data(), across_}; }
    int64_t row() const { return first_row_ * block_.rows; }
    int64_t col() const { return first_col_ * block_.cols; }
    bool begins_with(const CellBlocks& other) const {
        return row() == other.row() && col() == other.col();
    }
    bool negative() const {
        int32_t signs = 0;
        for (const float value : values) signs |= bits_as<int32_t>(value);
        return signs < 0;
    }

    // Calls body(number of the first block in the whole matrix, address of its value, number of
    // blocks) for each row of blocks.
    template <class Body>
    void over_rows(const Body& body) {
        for (int64_t i = 0; i < down_; ++i)
            body((first_row_ + i) * all_across_ + first_col_, values.data() + i * across_, across_);
    }

    GridPanel panel(const void* src, int64_t stride, const Rectangle& at) const {
        return {src,     stride,  at.row - row(),          at.col - col(),
                at.rows, at.cols, at.rows > 1 ? stride : 0};
    }
};

// Raises a value atomically, because several cells may have elements of the block.
void raise(float* to, float value) {
    float current;
    __atomic_load(to, &current, __ATOMIC_RELAXED);
    while (value > current && !__atomic_compare_exchange(to, &current, &value, true,
                                                         __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
}

bool rounds(const MultiSource& source) {
    return source.nominal != Dtype::float32 && source.nominal != source.dtype;
}

void put_amaxes(const Cells& cells, const MultiSource& source, const GridBlock& block,
                CellBlocks& amaxes, float* out) {
    // Rounding keeps the order of magnitudes, so the largest may be rounded last.
    if (rounds(source))
        active_kernels().round_to(amaxes.values.data(), Dtype::float32,
                                  static_cast<int64_t>(amaxes.values.size()), source.nominal,
                                  amaxes.values.data());
    const bool own = cells.has_whole(block);
    amaxes.over_rows([&](int64_t at, const float* from, int64_t count) {
        if (own) memcpy(out + at, from, static_cast<size_t>(count) * sizeof(float));
        for (int64_t k = 0; !own && k < count; ++k) raise(out + at + k, from[k]);
    });
}

// The multipliers of a cell's blocks.
void get_multipliers(const GridCastSide& side, bool e8m0, CellBlocks& to) {
    to.over_rows([&](int64_t at, float* values, int64_t count) {
        if (e8m0)
            active_kernels().e8m0_multipliers(static_cast<const uint8_t*>(side.scales) + at, count,
                                              values);
        else
            memcpy(values, static_cast<const float*>(side.scales) + at,
                   static_cast<size_t>(count) * sizeof(float));
    });
}

}  // namespace

void multi_amax(const MultiSource* sources, int64_t count, float* out, int threads) {
    const Kernels& kernels = active_kernels();
    std::vector<Chunk> chunks;
    int64_t elements = 0;
    for (int64_t i = 0; i < count; ++i) {
        add_chunks(chunks, i, sources[i].count, kChunk);
        elements += sources[i].count;
    }
    std::vector<float> partial(chunks.size());
    over_chunks(chunks, elements, threads, [&](const Chunk& chunk, size_t i) {
        const MultiSource& from = sources[chunk.job];
        partial[i] = kernels.amax(advance(from.src, chunk.begin, from.dtype), from.dtype,
                                  chunk.end - chunk.begin);
    });
    std::fill(out, out + count, 0.0f);
    for (size_t i = 0; i < chunks.size(); ++i)
        out[chunks[i].job] = std::max(out[chunks[i].job], partial[i]);
    // Rounding keeps the order of magnitudes, so that the largest may be rounded last.
    for (int64_t i = 0; i < count; ++i) out[i] = rounded(out[i], sources[i].nominal);
}

void multi_cast(const MultiCastJob* casts, int64_t count, const float* scales, int threads) {
    const Kernels& kernels = active_kernels();
    std::vector<Chunk> chunks;
    int64_t elements = 0;
    for (int64_t i = 0; i < count; ++i) {
        add_chunks(chunks, i, casts[i].source.count, kChunk);
        elements += casts[i].source.count;
    }
    const bool stream = elements >= kStreamBytes;
    over_chunks(chunks, elements, threads, [&](const Chunk& chunk, size_t) {
        cast_chunk(kernels, casts[chunk.job], chunk.begin, chunk.end, scales[chunk.job], stream);
    });
}

void grid_multi_amax(const GridMultiAmax* jobs, int64_t count, float* out, int threads) {
    const Kernels& kernels = active_kernels();
    std::vector<float*> places;
    for (int64_t i = 0; i < count; ++i) {
        places.push_back(out);
        out += grid_amax_count(jobs[i]);
    }
    const auto cells_of = [](const GridMultiAmax& job) {
        return Cells(job.shard, {job.by_row, job.square ? job.by_row : job.by_column});
    };
    const auto find = [&](const GridMultiAmax& job, int64_t number, const Cells& cells,
                          const Rectangle& cell) {
        const MultiSource& source = job.shard.source;
        CellBlocks rows(job.shard, job.by_row, cell), columns(job.shard, job.by_column, cell);
        const bool at_once = !job.square && rows.begins_with(columns);
        cells.over(cell, [&](const Rectangle& overlap, int64_t first) {
            const void* src = advance(source.src, first, source.dtype);
            const GridBlocks both[] = {rows.blocks(), columns.blocks()};
            kernels.grid_amax(rows.panel(src, job.shard.cols, overlap), source.dtype, both,
                              at_once ? 2 : 1, false);
            if (!at_once && !job.square)
                kernels.grid_amax(columns.panel(src, job.shard.cols, overlap), source.dtype,
                                  both + 1, 1, false);
        });
        float* const to = places[static_cast<size_t>(number)];
        put_amaxes(cells, source, job.by_row, rows, to);
        if (!job.square)
            put_amaxes(cells, source, job.by_column, columns,
                       to + grid_size(job.shard, job.by_row));
    };
    over_cells(jobs, count, threads, cells_of, find);
}

void grid_multi_cast(const GridMultiCast* jobs, int64_t count, int threads) {
    const Kernels& kernels = active_kernels();
    int64_t bytes = 0;
    for (int64_t i = 0; i < count; ++i)
        bytes += jobs[i].shard.source.count *
                 ((jobs[i].by_row.data != nullptr) + (jobs[i].by_column.data != nullptr));
    const bool stream = bytes >= kStreamBytes;
    const auto cells_of = [](const GridMultiCast& job) {
        return Cells(job.shard, {job.by_row.block, job.by_column.block});
    };
    const auto cast = [&](const GridMultiCast& job, int64_t, const Cells& cells,
                          const Rectangle& cell) {
        const MultiSource& source = job.shard.source;
        struct Side {
            CellBlocks multipliers;
            uint8_t* data;
            bool positive;
        };
        std::vector<Side> sides;
        for (const GridCastSide* side : {&job.by_row, &job.by_column}) {
            if (side->data == nullptr) continue;
            sides.push_back({CellBlocks(job.shard, side->block, cell), side->data, true});
            get_multipliers(*side, job.e8m0, sides.back().multipliers);
            sides.back().positive = job.e8m0 || !sides.back().multipliers.negative();
        }
        // Rounded elements are cast a few rows at a time, so that they stay in the caches.
        constexpr int64_t kRoundedRows = 4;
        const bool rounded = rounds(source);
        std::vector<float> values(rounded ? static_cast<size_t>(kRoundedRows * kPanelCols) : 0);
        cells.over(cell, [&](Rectangle overlap, int64_t first) {
            const int64_t end = overlap.row + overlap.rows,
                          step = rounded ? kRoundedRows : overlap.rows;
            for (; overlap.row < end; overlap.row += step, first += step * job.shard.cols) {
                overlap.rows = std::min(step, end - overlap.row);
                const void* src = advance(source.src, first, source.dtype);
                for (int64_t r = 0; rounded && r < overlap.rows; ++r)
                    kernels.round_to(advance(source.src, first + r * job.shard.cols, source.dtype),
                                     source.dtype, overlap.cols, source.nominal,
                                     values.data() + r * kPanelCols);
                for (Side& side : sides) {
                    GridPanel panel = side.multipliers.panel(src, job.shard.cols, overlap);
                    if (rounded)
                        panel.src = values.data(), panel.stride = kPanelCols, panel.ahead = 0;
                    GridOut to{};
                    to.rows = side.data + first;
                    to.stride = job.shard.cols;
                    to.stream = stream;
                    kernels.grid_cast(panel, rounded ? Dtype::float32 : source.dtype,
                                      side.multipliers.blocks(), side.positive, job.element, to);
                }
            }
        });
    };
    over_cells(jobs, count, threads, cells_of, cast);
}

}  // namespace ottava
