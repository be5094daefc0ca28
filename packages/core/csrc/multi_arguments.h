// The conversion of Python's lists of tensors to jobs, in the bindings of both backends. Each job
// is checked before anything is computed.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "addresses.h"
#include "grid_jobs.h"

namespace ottava {

// A tensor among many: its address, dtype and number of elements, and the dtype that its elements
// are rounded to.
using Source = std::tuple<Address, int, int64_t, int>;
// A cast: the source, the format, and the address of its data.
using CastArguments = std::tuple<Source, int, Address>;
// A shard: rows and columns of its matrix, and the element that it starts with.
using Place = std::tuple<int64_t, int64_t, int64_t>;
// Rows and columns of a block; 0 stands for all.
using Block = std::tuple<int64_t, int64_t>;
// The amaxes of a shard: the blocks of rows and of columns, and whether both are the same.
using GridAmaxArguments = std::tuple<Source, Place, Block, Block, bool>;
// A cast of a shard: the element format, whether scales are bytes of E8M0, and for rows and columns
// the blocks and the addresses of scales and data.
using CastSide = std::tuple<Block, Address, Address>;
using GridCastArguments = std::tuple<Source, Place, int, bool, CastSide, CastSide>;
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

inline GridShard shard_of(const Source& source, const Place& place) {
    const auto& [rows, cols, start] = place;
    const MultiSource tensor = source_of(source);
    if (size_of(start) > size_of(rows) * size_of(cols) - tensor.count)
        throw std::invalid_argument("a shard is not within its matrix");
    return {tensor, rows, cols, start};
}

inline GridBlock block_of(const Block& block) {
    return {size_of(std::get<0>(block)), size_of(std::get<1>(block))};
}

inline GridMultiAmax grid_amax_of(const GridAmaxArguments& arguments) {
    const auto& [source, place, by_row, by_column, square] = arguments;
    return {shard_of(source, place), block_of(by_row), block_of(by_column), square};
}

inline GridCastSide cast_side_of(const CastSide& side) {
    const auto& [block, scales, data] = side;
    return {block_of(block), at<const void>(scales), at<uint8_t>(data)};
}

inline GridMultiCast grid_cast_of(const GridCastArguments& arguments) {
    const auto& [source, place, element, e8m0, by_row, by_column] = arguments;
    return {shard_of(source, place), stored_of(element), e8m0, cast_side_of(by_row),
            cast_side_of(by_column)};
}

inline HistorySlots slots_of(const SlotArguments& arguments) {
    const auto& [scale, history, count] = arguments;
    return {at<float>(scale), at<float>(history), size_of(count)};
}

// The output must have room for exactly the amaxes of the jobs.
inline void check_amaxes(const std::vector<GridMultiAmax>& jobs, int64_t total) {
    int64_t needed = 0;
    for (const GridMultiAmax& job : jobs) needed += grid_amax_count(job);
    if (needed != total)
        throw std::invalid_argument("place for " + std::to_string(total) + " of " +
                                    std::to_string(needed) + " amaxes");
}

// There must be one maximum for each slot.
inline void check_maxima(const std::vector<HistorySlots>& tensors,
                         const std::vector<float>& maxima) {
    int64_t slots = 0;
    for (const HistorySlots& tensor : tensors) slots += tensor.slots;
    if (slots != count_of(maxima))
        throw std::invalid_argument(std::to_string(maxima.size()) + " maxima for " +
                                    std::to_string(slots) + " slots");
}

}  // namespace ottava
