// The conversion of Python's tuples that describe a grid of scales, in the bindings of both
// backends.
#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <variant>

#include "addresses.h"
#include "grid_jobs.h"

namespace ottava {

// Rows and columns of a block and of a shared block, whether the side is turned, addresses of data
// and scales.
using SideTuple = std::tuple<int64_t, int64_t, int64_t, int64_t, bool, Address, Address>;
// None and () leave a side out.
using SideArguments = std::optional<std::variant<std::tuple<>, SideTuple>>;

inline void check_shared(int64_t block, int64_t shared, const char* of) {
    if (size_of(shared) == 0 || (size_of(block) != 0 && shared % block == 0)) return;
    throw std::invalid_argument(
        "a shared block must be made of whole blocks: " + std::to_string(shared) + " " + of +
        " are none of " + std::to_string(block));
}

// The side of the arguments; a side that is left out has no data.
inline GridSide side_of(const SideArguments& side) {
    if (!side.has_value() || side->index() == 0) return {};
    const auto& [rows, cols, shared_rows, shared_cols, turned, data, scales] = std::get<1>(*side);
    check_shared(rows, shared_rows, "rows");
    check_shared(cols, shared_cols, "columns");
    return {rows, cols, shared_rows, shared_cols, turned, at<uint8_t>(data), at<void>(scales)};
}

}  // namespace ottava
