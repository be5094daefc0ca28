// The operations on many tensors, and on the state of delayed scaling.
#include "../multi_arguments.h"
#include "bindings.h"
#include "operations.h"

namespace ottava::cuda {
namespace {

void multi_amax_of(const std::vector<Source>& tensors, Address out, int device, Address stream) {
    const auto jobs = jobs_of(tensors, source_of);
    const OnDevice guard(device);
    multi_amax(jobs.data(), count_of(jobs), at<float>(out), stream_of(stream));
}

void multi_cast_of(const std::vector<CastArguments>& tensors, Address scales, int device,
                   Address stream) {
    const auto jobs = jobs_of(tensors, cast_of);
    const OnDevice guard(device);
    multi_cast(jobs.data(), count_of(jobs), at<const float>(scales), stream_of(stream));
}

void grid_multi_amax_of(const std::vector<GridAmaxArguments>& shards, Address out, int64_t total,
                        int device, Address stream) {
    const auto jobs = jobs_of(shards, grid_amax_of);
    check_amaxes(jobs, total);
    const OnDevice guard(device);
    mx_multi_amax(jobs.data(), count_of(jobs), at<float>(out), stream_of(stream));
}

void grid_multi_cast_of(const std::vector<GridCastArguments>& shards, int device, Address stream) {
    const auto jobs = jobs_of(shards, grid_cast_of);
    const OnDevice guard(device);
    mx_multi_cast(jobs.data(), count_of(jobs), stream_of(stream));
}

void update_scales_of(const std::vector<SlotArguments>& tensors, int64_t length,
                      const std::vector<float>& maxima, bool most_recent, Address last, int device,
                      Address stream) {
    const auto slots = jobs_of(tensors, slots_of);
    check_maxima(slots, maxima);
    const OnDevice guard(device);
    update_scales(slots.data(), count_of(slots), size_of(length), maxima.data(), most_recent,
                  at<const float>(last), stream_of(stream));
}

}  // namespace

void bind_multi(py::module_& m) {
    m.def("multi_amax", &multi_amax_of);
    m.def("multi_cast", &multi_cast_of);
    m.def("grid_multi_amax", &grid_multi_amax_of);
    m.def("grid_multi_cast", &grid_multi_cast_of);
    m.def("update_scales", &update_scales_of);
}

}  // namespace ottava::cuda
