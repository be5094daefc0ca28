// The operations on layouts of levels_jobs.h.
#include <cstdint>

#include "../levels_arguments.h"
#include "bindings.h"
#include "operations.h"

namespace ottava::cuda {
namespace {

int64_t bound_levels_scratch(const LevelsLayout& layout, int64_t rows, int64_t cols) {
    return levels_scratch(layout, size_of(rows), size_of(cols));
}

void bound_levels_quantize(const LevelsLayout& layout, Address src, int dtype, int64_t rows,
                           int64_t cols, Address seed, int64_t first_row, const LevelsTuple& by_row,
                           const LevelsTuple& by_column, Address scratch, int device,
                           Address stream) {
    check_strips(layout);
    check_levels(!layout.stochastic || seed != 0, "a stochastic layout without a seed");
    const LevelsResults results[] = {levels_results_of(by_row), levels_results_of(by_column)};
    const OnDevice guard(device);
    levels_quantize(layout, at<const void>(src), dtype_of(dtype), size_of(rows), size_of(cols),
                    at<const int64_t>(seed), size_of(first_row), results, at<float>(scratch),
                    stream_of(stream));
}

void bound_levels_decode(const LevelsLayout& layout, Address data, int64_t rows, int64_t cols,
                         Address scales, int64_t block_rows, int64_t block_cols, Address amaxes,
                         bool by_column, Address out, int dtype, int device, Address stream) {
    const LevelsData from{at<const uint8_t>(data), size_of(rows),
                          size_of(cols),           at<const void>(scales),
                          size_of(block_rows),     size_of(block_cols),
                          at<const float>(amaxes), by_column};
    const OnDevice guard(device);
    levels_decode(layout, from, at<void>(out), dtype_of(dtype), stream_of(stream));
}

}  // namespace

void bind_levels(py::module_& m) {
    // The module of the CPU's kernels may have a class of this layout as well.
    py::class_<LevelsLayout>(m, "LevelsPlan", py::module_local()).def(py::init(&levels_layout_of));
    m.def("levels_scratch", &bound_levels_scratch);
    m.def("levels_quantize", &bound_levels_quantize);
    m.def("levels_decode", &bound_levels_decode);
}

}  // namespace ottava::cuda
