// The conversion of Python's objects that describe layouts of levels_jobs.h, in the bindings of the
// backends.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "addresses.h"
#include "levels_jobs.h"

namespace ottava {

// Lanes and positions.
using LevelsBlockTuple = std::tuple<int64_t, int64_t>;
// Addresses of data, scales and amaxes; 0 where they are left out.
using LevelsTuple = std::tuple<Address, Address, Address>;

inline LevelsBlock levels_block_of(const LevelsBlockTuple& block) {
    return {std::get<0>(block), std::get<1>(block)};
}

inline void check_levels(bool right, const char* what) {
    if (!right) throw std::invalid_argument(what);
}

// The layout of the attributes of a NativeLevels in kernels/levels.py.
inline LevelsLayout levels_layout_of(const pybind11::object& from) {
    LevelsLayout to{};
    const auto number = [&](const char* name) { return from.attr(name).cast<int>(); };
    to.element = static_cast<LevelElement>(number("element"));
    to.scale = static_cast<LevelScale>(number("scale"));
    to.rounding = number("rounding");
    to.epsilon = from.attr("epsilon").cast<float>();
    to.finite_as_input = from.attr("finite_as_input").cast<bool>();
    to.block = levels_block_of(from.attr("block").cast<LevelsBlockTuple>());
    to.area = levels_block_of(from.attr("area").cast<LevelsBlockTuple>());
    to.second = static_cast<SecondLevel>(number("second"));
    to.top = from.attr("top").cast<float>();
    const auto candidates = from.attr("candidates").cast<std::vector<float>>();
    to.squares = from.attr("squares").cast<bool>();
    to.stochastic = from.attr("stochastic").cast<bool>();
    to.rotation = number("rotation");
    const auto signs = from.attr("signs").cast<std::tuple<uint64_t, uint64_t>>();
    to.signs[0] = std::get<0>(signs), to.signs[1] = std::get<1>(signs);
    const auto rotated = from.attr("rotated").cast<std::tuple<bool, bool>>();
    to.rotated[0] = std::get<0>(rotated), to.rotated[1] = std::get<1>(rotated);
    to.turned = from.attr("turned").cast<bool>();
    check_levels(number("element") >= 0 && number("element") < kLevelElements,
                 "an unknown element");
    check_levels(number("scale") >= 0 && number("scale") < 4, "an unknown format of scales");
    check_levels(number("second") >= 0 && number("second") < 3, "an unknown second level");
    check_levels(candidates.size() <= kMostCandidates, "too many candidates");
    check_levels(to.rotation >= 0 && to.rotation <= kStripPositions,
                 "a rotation of too many elements");
    check_levels(to.rotation == 0 || to.rotation % 16 == 0, "a rotation that is no multiple of 16");
    std::copy(candidates.begin(), candidates.end(), to.candidates);
    to.candidate_count = static_cast<int>(candidates.size());
    return to;
}

// Quantizing computes in strips, which have whole blocks.
inline void check_strips(const LevelsLayout& layout) {
    const int64_t positions = layout.block.positions, lanes = layout.block.lanes;
    check_levels(positions >= 16 && positions % 16 == 0 && kStripPositions % positions == 0,
                 "blocks do not end where strips end");
    check_levels(lanes >= 1 && layout.area.lanes >= 1 && layout.area.positions >= 1,
                 "an empty block");
    if (layout.candidate_count == 0) return;
    const int64_t side = layout.area.lanes;
    if (side == layout.area.positions)
        check_levels(side >= positions && kStripPositions % side == 0,
                     "squares of candidates do not end where strips end");
    else
        check_levels(kStripLanes % lanes == 0, "blocks of candidates do not end where strips end");
}

inline LevelsResults levels_results_of(const LevelsTuple& results) {
    const auto& [data, scales, amaxes] = results;
    return {at<uint8_t>(data), at<void>(scales), at<float>(amaxes)};
}

}  // namespace ottava
