// The operations on many tensors, and on the state of delayed scaling.
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"
#include "operations.h"

namespace ottava::cuda {
namespace {

// A tensor among many: its address, dtype and number of elements, and the dtype that its elements are rounded to.
using Source = std::tuple<Address, int, int64_t, int>;
// A shard: rows and columns of its matrix, and the element that it starts with.
using Place = std::tuple<int64_t, int64_t, int64_t>;

MultiSource source_of(const Source& source) {
    const auto& [address, dtype, count, nominal] = source;
    return {at<const void>(address), dtype_of(dtype), dtype_of(nominal), size_of(count)};
}

void check_place(const Place& place, int64_t count) {
    const auto& [rows, cols, start] = place;
    if (size_of(start) > size_of(rows) * size_of(cols) - count)
        throw std::invalid_argument("a shard is not within its matrix");
}

Stream stream_of(Address stream) { return reinterpret_cast<Stream>(stream); }

void multi_amax_of(const std::vector<Source>& tensors, Address out, int device, Address stream) {
    std::vector<MultiSource> jobs;
    jobs.reserve(tensors.size());
    for (const Source& source : tensors) jobs.push_back(source_of(source));
    const OnDevice guard(device);
    multi_amax(jobs.data(), static_cast<int64_t>(jobs.size()), at<float>(out), stream_of(stream));
}

// One entry a tensor: the source, the format, and the address of its codes.
void multi_cast_of(const std::vector<std::tuple<Source, int, Address>>& tensors, Address scales, int device,
                   Address stream) {
    std::vector<MultiCastJob> jobs;
    jobs.reserve(tensors.size());
    for (const auto& [source, format, out] : tensors)
        jobs.push_back({source_of(source), fp8_of(format), at<uint8_t>(out)});
    const OnDevice guard(device);
    multi_cast(jobs.data(), static_cast<int64_t>(jobs.size()), at<const float>(scales), stream_of(stream));
}

void mx_multi_amax_of(const std::vector<std::tuple<Source, Place, bool>>& shards, Address out, int64_t total,
                      int device, Address stream) {
    std::vector<MxMultiAmax> jobs;
    jobs.reserve(shards.size());
    int64_t needed = 0;
    for (const auto& [source, place, square] : shards) {
        const auto& [rows, cols, start] = place;
        jobs.push_back({source_of(source), rows, cols, start, square});
        check_place(place, jobs.back().source.count);
        needed += mx_amax_count(rows, cols, square);
    }
    if (needed != total)
        throw std::invalid_argument("place for " + std::to_string(total) + " of " + std::to_string(needed) + " amaxes");
    const OnDevice guard(device);
    mx_multi_amax(jobs.data(), static_cast<int64_t>(jobs.size()), at<float>(out), stream_of(stream));
}

// One entry a shard: the format, and for rows and columns the addresses of scales and codes.
void mx_multi_cast_of(
    const std::vector<std::tuple<Source, Place, int, std::pair<Address, Address>, std::pair<Address, Address>>>& shards,
    int device, Address stream) {
    std::vector<MxMultiCast> jobs;
    jobs.reserve(shards.size());
    for (const auto& [source, place, format, by_row, by_column] : shards) {
        const auto& [rows, cols, start] = place;
        jobs.push_back({source_of(source), rows, cols, start, fp8_of(format), at<const uint8_t>(by_row.first),
                        at<uint8_t>(by_row.second), at<const uint8_t>(by_column.first), at<uint8_t>(by_column.second)});
        check_place(place, jobs.back().source.count);
    }
    const OnDevice guard(device);
    mx_multi_cast(jobs.data(), static_cast<int64_t>(jobs.size()), stream_of(stream));
}

// One entry a tensor: the addresses of its scale and its history, and the number of its slots.
void update_scales_of(const std::vector<std::tuple<Address, Address, int64_t>>& tensors, int64_t length,
                      const std::vector<float>& maxima, bool most_recent, Address last, int device, Address stream) {
    std::vector<HistorySlots> slots;
    slots.reserve(tensors.size());
    int64_t total = 0;
    for (const auto& [scale, history, count] : tensors) {
        slots.push_back({at<float>(scale), at<float>(history), size_of(count)});
        total += count;
    }
    if (total != static_cast<int64_t>(maxima.size()))
        throw std::invalid_argument(std::to_string(maxima.size()) + " maxima for " + std::to_string(total) + " slots");
    const OnDevice guard(device);
    update_scales(slots.data(), static_cast<int64_t>(slots.size()), size_of(length), maxima.data(), most_recent,
                  at<const float>(last), stream_of(stream));
}

}  // namespace

void bind_multi(py::module_& m) {
    m.def("multi_amax", &multi_amax_of);
    m.def("multi_cast", &multi_cast_of);
    m.def("mx_multi_amax", &mx_multi_amax_of);
    m.def("mx_multi_cast", &mx_multi_cast_of);
    m.def("update_scales", &update_scales_of);
}

}  // namespace ottava::cuda
