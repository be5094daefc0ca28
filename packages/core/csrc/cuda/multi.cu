// Operations on runs of elements of many tensors, and on the state of delayed scaling.
#include "multi.h"

#include <algorithm>

#include "launch.h"
#include "operations.h"
#include "update.h"

namespace ottava::cuda {

void multi_amax(const MultiSource* sources, int64_t count, float* out, Stream stream) {
    with_each_source([&](auto source, Dtype dtype) {
        typedef MultiAmax<decltype(source)> Kernel;
        JobLaunches<Kernel> launches(stream);
        launches->out = out;
        for (int64_t i = 0; i < count; ++i) {
            const MultiSource& from = sources[i];
            if (from.dtype != dtype) continue;
            const AmaxJob job{from.src, from.count, static_cast<int32_t>(i), from.nominal};
            launches.add(job, Kernel::Work::blocks_for(from.count));
        }
        launches.finish();
    });
}

void multi_cast(const MultiCastJob* casts, int64_t count, const float* scales, Stream stream) {
    with_each_source([&](auto source, Dtype dtype) {
        with_each_format([&](auto target, Fp8 format) {
            typedef MultiCast<decltype(source), decltype(target)> Kernel;
            JobLaunches<Kernel> launches(stream);
            launches->scales = scales;
            for (int64_t i = 0; i < count; ++i) {
                const MultiSource& from = casts[i].source;
                if (from.dtype != dtype || casts[i].format != format) continue;
                const CastJob job{from.src, from.count, casts[i].out, static_cast<int32_t>(i),
                                  from.nominal};
                launches.add(job, Kernel::Work::blocks_for(from.count));
            }
            launches.finish();
        });
    });
}

void update_scales(const HistorySlots* tensors, int64_t count, int64_t length, const float* maxima,
                   bool most_recent, const float* last, Stream stream) {
    UpdateScales kernel;
    kernel.length = length;
    kernel.last = last;
    kernel.most_recent = most_recent;
    kernel.jobs.count = 0;
    int64_t used = 0;
    const auto finish = [&] {
        launch(kernel, used, stream);
        if (kernel.last != nullptr) kernel.last += used;
        kernel.jobs.count = 0;
        used = 0;
    };
    for (int64_t i = 0; i < count; ++i) {
        const HistorySlots& tensor = tensors[i];
        for (int64_t slot = 0; slot < tensor.slots;) {
            if (used == UpdateScales::kMaxima || kernel.jobs.full()) finish();
            const int64_t some = std::min(tensor.slots - slot, UpdateScales::kMaxima - used);
            kernel.jobs.put({tensor.scale + slot, tensor.history + slot, tensor.slots}, used);
            std::copy(maxima, maxima + some, kernel.maxima + used);
            maxima += some;
            used += some;
            slot += some;
        }
    }
    finish();
}

}  // namespace ottava::cuda
