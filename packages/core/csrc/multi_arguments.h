// What the bindings of both backends make of Python's lists of tensors: jobs, each checked before anything is done.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "addresses.h"
#include "multi_jobs.h"

namespace ottava {

// A tensor among many: its address, dtype and number of elements, and the dtype that its elements are rounded to.
using Source = std::tuple<Address, int, int64_t, int>;
// A cast: the source, the format, and the address of its data.
using CastArguments = std::tuple<Source, int, Address>;
// A shard: rows and columns of its matrix, and the element that it starts with.
using Place = std::tuple<int64_t, int64_t, int64_t>;
// The amaxes of a shard, and whether its blocks are square.
using MxAmaxArguments = std::tuple<Source, Place, bool>;
// A cast of a shard: the format, and for rows and columns the addresses of scales and data.
using MxCastArguments = std::tuple<Source, Place, int, std::pair<Address, Address>, std::pair<Address, Address>>;
// A tensor's slots: the addresses of its scale and its history, and their number.
using SlotArguments = std::tuple<Address, Address, int64_t>;

template <class Job>
int64_t count_of(const std::vector<Job>& jobs) {
    return static_cast<int64_t>(jobs.size());
}

// One job for each of the arguments.
template <class Arguments, class Make>
auto jobs_of(const std::vector<Arguments>& all, const Make& make) {
    std::vector<decltype(make(all[0]))> jobs;
    jobs.reserve(all.size());
    for (const Arguments& one : all) jobs.push_back(make(one));
    return jobs;
}

inline MultiSource source_of(const Source& source) {
    const auto& [address, dtype, count, nominal] = source;
    return {at<const void>(address), dtype_of(dtype), dtype_of(nominal), size_of(count)};
}

inline MultiCastJob cast_of(const CastArguments& arguments) {
    const auto& [source, format, out] = arguments;
    return {source_of(source), fp8_of(format), at<uint8_t>(out)};
}

inline MultiSource shard_of(const Source& source, const Place& place) {
    const auto& [rows, cols, start] = place;
    const MultiSource shard = source_of(source);
    if (size_of(start) > size_of(rows) * size_of(cols) - shard.count)
        throw std::invalid_argument("a shard is not within its matrix");
    return shard;
}

inline MxMultiAmax mx_amax_of(const MxAmaxArguments& arguments) {
    const auto& [source, place, square] = arguments;
    const auto& [rows, cols, start] = place;
    return {shard_of(source, place), rows, cols, start, square};
}

inline MxMultiCast mx_cast_of(const MxCastArguments& arguments) {
    const auto& [source, place, format, by_row, by_column] = arguments;
    const auto& [rows, cols, start] = place;
    return {shard_of(source, place),
            rows,
            cols,
            start,
            fp8_of(format),
            at<const uint8_t>(by_row.first),
            at<uint8_t>(by_row.second),
            at<const uint8_t>(by_column.first),
            at<uint8_t>(by_column.second)};
}

inline HistorySlots slots_of(const SlotArguments& arguments) {
    const auto& [scale, history, count] = arguments;
    return {at<float>(scale), at<float>(history), size_of(count)};
}

// There must be place for exactly the amaxes that the jobs have.
inline void check_amaxes(const std::vector<MxMultiAmax>& jobs, int64_t total) {
    int64_t needed = 0;
    for (const MxMultiAmax& job : jobs) needed += mx_amax_count(job.rows, job.cols, job.square);
    if (needed != total)
        throw std::invalid_argument("place for " + std::to_string(total) + " of " + std::to_string(needed) + " amaxes");
}

// There must be one maximum for each slot.
inline void check_maxima(const std::vector<HistorySlots>& tensors, const std::vector<float>& maxima) {
    int64_t slots = 0;
    for (const HistorySlots& tensor : tensors) slots += tensor.slots;
    if (slots != count_of(maxima))
        throw std::invalid_argument(std::to_string(maxima.size()) + " maxima for " + std::to_string(slots) + " slots");
}

}  // namespace ottava
