// The functions of the module `ottava._cpu` for layouts of levels_jobs.h, over raw addresses.
#include "bindings_levels.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "addresses.h"
#include "cpu/levels_kernels.h"

namespace py = pybind11;

namespace ottava {

namespace {

// Lanes and positions.
typedef std::tuple<int64_t, int64_t> BlockTuple;
// Addresses of data, scales and amaxes; 0 where they are left out.
typedef std::tuple<Address, Address, Address> ResultsTuple;

LevelsBlock block_of(const BlockTuple& block) {
    return {std::get<0>(block), std::get<1>(block)};
}

void check(bool right, const char* what) {
    if (!right) throw std::invalid_argument(what);
}

// The layout of the attributes of a NativeLevels in kernels/levels.py.
LevelsLayout layout_of(const py::object& from) {
    LevelsLayout to{};
    const auto number = [&](const char* name) { return from.attr(name).cast<int>(); };
    to.element = static_cast<LevelElement>(number("element"));
    to.scale = static_cast<LevelScale>(number("scale"));
    to.rounding = number("rounding");
    to.epsilon = from.attr("epsilon").cast<float>();
    to.finite_as_input = from.attr("finite_as_input").cast<bool>();
    to.block = block_of(from.attr("block").cast<BlockTuple>());
    to.area = block_of(from.attr("area").cast<BlockTuple>());
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
    check(number("element") >= 0 && number("element") < kLevelElements, "an unknown element");
    check(number("scale") >= 0 && number("scale") < 4, "an unknown format of scales");
    check(number("second") >= 0 && number("second") < 3, "an unknown second level");
    check(candidates.size() <= kMostCandidates, "too many candidates");
    check(to.rotation >= 0 && to.rotation <= kStripPositions, "a rotation of too many elements");
    check(to.rotation == 0 || to.rotation % 16 == 0, "a rotation that is no multiple of 16");
    std::copy(candidates.begin(), candidates.end(), to.candidates);
    to.candidate_count = static_cast<int>(candidates.size());
    return to;
}

// Quantizing computes in strips, which have whole blocks.
void check_strips(const LevelsLayout& layout) {
    const int64_t positions = layout.block.positions, lanes = layout.block.lanes;
    check(positions >= 16 && positions % 16 == 0 && kStripPositions % positions == 0,
          "blocks do not end where strips end");
    check(lanes >= 1 && layout.area.lanes >= 1 && layout.area.positions >= 1, "an empty block");
    check(layout.candidate_count == 0 || kStripLanes % lanes == 0,
          "blocks of candidates do not end where strips end");
}

void quantize(const LevelsLayout& layout, Address src, int dtype, int64_t rows, int64_t cols,
              uint64_t seed, const ResultsTuple& by_row, const ResultsTuple& by_column,
              int threads) {
    LevelsResults results[2];
    const ResultsTuple* tuples[2] = {&by_row, &by_column};
    for (int d = 0; d < 2; ++d) {
        const auto& [data, scales, amaxes] = *tuples[d];
        results[d] = {at<uint8_t>(data), at<void>(scales), at<float>(amaxes)};
    }
    check_strips(layout);
    levels_quantize(layout, at<const void>(src), dtype_of(dtype), size_of(rows), size_of(cols),
                    seed, results, std::max(threads, 1));
}

void decode(const LevelsLayout& layout, Address data, int64_t rows, int64_t cols, Address scales,
            int64_t block_rows, int64_t block_cols, Address amaxes, bool by_column, Address out,
            int dtype, int threads) {
    const LevelsData from{at<const uint8_t>(data), size_of(rows),
                          size_of(cols),           at<const void>(scales),
                          size_of(block_rows),     size_of(block_cols),
                          at<const float>(amaxes), by_column};
    levels_decode(layout, from, at<void>(out), dtype_of(dtype), std::max(threads, 1));
}

}  // namespace

void bind_levels(py::module_& m) {
    using Unlocked = py::call_guard<py::gil_scoped_release>;
    py::class_<LevelsLayout>(m, "LevelsPlan").def(py::init(&layout_of));
    m.def("levels_quantize", &quantize, Unlocked());
    m.def("levels_decode", &decode, Unlocked());
}

}  // namespace ottava
