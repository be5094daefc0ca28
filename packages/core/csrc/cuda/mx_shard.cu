// Operations on the shards of matrices in MX blocks.
#include "mx_shard.h"

#include "launch.h"
#include "operations.h"

namespace ottava::cuda {
namespace {

int64_t blocks_of(int64_t size) {
    return ceil_div(size, kWarp);
}

ShardPanels panels_of(const GridShard& job, const PanelRange& range) {
    const int64_t row = range.block * kShardRows;
    const int64_t offset = row * job.cols + range.col - job.start;
    return {job.source.src,
            job.source.count,
            offset,
            job.cols,
            job.rows - row,
            job.cols - range.col,
            static_cast<int32_t>(range.across),
            job.source.nominal};
}

}  // namespace

void mx_multi_amax(const GridMultiAmax* shards, int64_t count, float* out, Stream stream) {
    with_each_source([&](auto source, Dtype dtype) {
        typedef ShardAmax<decltype(source)> Kernel;
        JobLaunches<Kernel> launches(stream);
        float* rows = out;
        for (int64_t i = 0; i < count; ++i) {
            const GridShard& job = shards[i].shard;
            const bool square = shards[i].square;
            float* const columns = square ? nullptr : rows + job.rows * blocks_of(job.cols);
            if (job.source.dtype == dtype && job.source.count > 0) {
                const PanelRange range(job.cols, job.start, job.source.count);
                const int64_t line = square ? range.block : range.block * kShardRows;
                float* const first = rows + line * blocks_of(job.cols) + range.col / kWarp;
                float* const below =
                    square ? nullptr : columns + range.block * job.cols + range.col;
                launches.add(ShardAmaxJob{panels_of(job, range), first, below},
                             range.across * range.down);
            }
            rows += grid_amax_count(shards[i]);
        }
        launches.finish();
    });
}

void mx_multi_cast(const GridMultiCast* shards, int64_t count, Stream stream) {
    with_each_source([&](auto source, Dtype dtype) {
        with_each_format([&](auto target, Fp8 format) {
            typedef ShardCast<decltype(source), decltype(target)> Kernel;
            JobLaunches<Kernel> launches(stream);
            for (int64_t i = 0; i < count; ++i) {
                const GridShard& job = shards[i].shard;
                const GridCastSide &row = shards[i].by_row, &column = shards[i].by_column;
                const bool has_output = row.data != nullptr || column.data != nullptr;
                const bool now =
                    job.source.dtype == dtype && shards[i].element == static_cast<Stored>(format);
                if (!now || job.source.count == 0 || !has_output) continue;
                const PanelRange range(job.cols, job.start, job.source.count);
                const int64_t across = blocks_of(job.cols);
                ShardCastJob cast_job{panels_of(job, range), nullptr, row.data, nullptr,
                                      column.data};
                if (row.data != nullptr)
                    cast_job.row_scales = static_cast<const uint8_t*>(row.scales) +
                                          range.block * kShardRows * across + range.col / kWarp;
                if (column.data != nullptr)
                    cast_job.column_scales = static_cast<const uint8_t*>(column.scales) +
                                             range.block * job.cols + range.col;
                launches.add(cast_job, range.across * range.down);
            }
            launches.finish();
        });
    });
}

}  // namespace ottava::cuda
