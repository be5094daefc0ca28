// The operations on many tensors: threads take chunks of all of them, so that neither one large tensor nor many small ones
// leave a thread without work. Chunks write to places of their own, and what they find is combined in a fixed order.
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
static_assert(kChunk >= kMxBlock * kPanelCols, "a panel is at most a chunk");

struct Chunk {
    int64_t job;
    int64_t begin, end;  // elements, or panels
};

// Each thread takes the next chunk when it has done one: chunks differ in size, and threads in speed.
template <class Body>
void over_chunks(const std::vector<Chunk>& chunks, int64_t elements, int threads, const Body& body) {
    std::atomic<size_t> next{0};
    const auto run = [&](int64_t, int64_t, int) {
        for (size_t i = next++; i < chunks.size(); i = next++) body(chunks[i], i);
    };
    in_parallel(static_cast<int64_t>(chunks.size()), elements, threads, run);
}

void add_chunks(std::vector<Chunk>& chunks, int64_t job, int64_t count, int64_t each) {
    for (int64_t begin = 0; begin < count; begin += each) chunks.push_back({job, begin, std::min(begin + each, count)});
}

float rounded(float x, Dtype nominal) {
    if (nominal == Dtype::float32) return x;
    return nominal == Dtype::bfloat16 ? widen_bfloat16(to_bfloat16(x)) : widen_half(to_half(x));
}

// One chunk of a tensor, cast. What is neither in float32 nor in its nominal dtype is widened first.
void cast_chunk(const Kernels& kernels, const MultiCastJob& job, int64_t begin, int64_t end, float scale, bool stream) {
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
            values[i] = from.dtype == Dtype::bfloat16 ? widen_bfloat16(pattern) : widen_half(pattern);
        }
        kernels.cast_rounded(values, from.nominal, count, scale, job.out + at, job.format, false);
    }
}

// The panels in which a shard may have elements: rows of blocks, and across them panels of columns.
struct Panels {
    int64_t first_block, first_panel, across, count;
    int64_t each;  // panels that make a chunk

    Panels(int64_t cols, int64_t start, int64_t elements) {
        const int64_t last = start + elements - 1, first_row = start / cols, last_row = last / cols;
        first_block = first_row / kMxBlock;
        first_panel = 0;
        across = ceil_div(cols, kPanelCols);
        if (first_row == last_row) {
            first_panel = start % cols / kPanelCols;
            across = last % cols / kPanelCols + 1 - first_panel;
        }
        count = (last_row / kMxBlock + 1 - first_block) * across;
        const int64_t height = std::min(kMxBlock, last_row + 1 - first_row);
        each = std::max<int64_t>(1, kChunk / (height * std::min(cols, kPanelCols)));
    }

    template <class Job>
    MxShard panel(const Job& job, int64_t i) const {
        MxShard shard{};
        shard.src = job.source.src;
        shard.start = job.start;
        shard.count = job.source.count;
        shard.stride = job.cols;
        shard.row = (first_block + i / across) * kMxBlock;
        shard.rows = std::min(kMxBlock, job.rows - shard.row);
        shard.col = (first_panel + i % across) * kPanelCols;
        shard.cols = std::min(kPanelCols, job.cols - shard.col);
        return shard;
    }
};

// Calls body(job, number of the job, panel) for every panel of every shard.
template <class Job, class Body>
void over_panels(const Job* jobs, int64_t count, int threads, const Body& body) {
    std::vector<Chunk> chunks;
    int64_t elements = 0;
    for (int64_t i = 0; i < count; ++i) {
        const int64_t n = jobs[i].source.count;
        if (n == 0) continue;
        const Panels panels(jobs[i].cols, jobs[i].start, n);
        add_chunks(chunks, i, panels.count, panels.each);
        elements += n;
    }
    over_chunks(chunks, elements, threads, [&](const Chunk& chunk, size_t) {
        const Job& job = jobs[chunk.job];
        const Panels panels(job.cols, job.start, job.source.count);
        for (int64_t i = chunk.begin; i < chunk.end; ++i) body(job, chunk.job, panels.panel(job, i));
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
        partial[i] = kernels.amax(advance(from.src, chunk.begin, from.dtype), from.dtype, chunk.end - chunk.begin);
    });
    std::fill(out, out + count, 0.0f);
    for (size_t i = 0; i < chunks.size(); ++i) out[chunks[i].job] = std::max(out[chunks[i].job], partial[i]);
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

void mx_multi_amax(const MxMultiAmax* shards, int64_t count, float* out, int threads) {
    const Kernels& kernels = active_kernels();
    std::vector<float*> places;
    for (int64_t i = 0; i < count; ++i) {
        places.push_back(out);
        out += mx_amax_count(shards[i].rows, shards[i].cols, shards[i].square);
    }
    over_panels(shards, count, threads, [&](const MxMultiAmax& job, int64_t number, const MxShard& shard) {
        const int64_t across = ceil_div(job.cols, kMxBlock), block = shard.row / kMxBlock;
        float* rows = places[static_cast<size_t>(number)];
        MxShardAmax to{};
        to.row_blocks = rows + (job.square ? block : shard.row) * across + shard.col / kMxBlock;
        to.row_block_stride = across;
        if (!job.square) to.columns = rows + job.rows * across + block * job.cols + shard.col;
        kernels.mx_shard_amax(shard, job.source.dtype, job.source.nominal, to);
    });
}

void mx_multi_cast(const MxMultiCast* shards, int64_t count, int threads) {
    const Kernels& kernels = active_kernels();
    int64_t bytes = 0;
    for (int64_t i = 0; i < count; ++i)
        bytes += shards[i].source.count * ((shards[i].row_data != nullptr) + (shards[i].column_data != nullptr));
    const bool stream = bytes >= kStreamBytes;
    over_panels(shards, count, threads, [&](const MxMultiCast& job, int64_t, const MxShard& shard) {
        const int64_t across = ceil_div(job.cols, kMxBlock);
        MxShardCast to{};
        if (job.row_data != nullptr) {
            to.row_scales = job.row_scales + shard.row * across + shard.col / kMxBlock;
            to.row_scale_stride = across;
            to.row_data = job.row_data;
        }
        if (job.column_data != nullptr) {
            to.column_scales = job.column_scales + shard.row / kMxBlock * job.cols + shard.col;
            to.column_data = job.column_data;
        }
        to.stream = stream;
        kernels.mx_shard_cast(shard, job.source.dtype, job.source.nominal, job.format, to);
    });
}

}  // namespace ottava
