// The module `ottava._cpu`: the operations of cpu/kernels.h over raw pointers. No libtorch: the
// Python side passes addresses, sizes and codes, and owns every check on tensors. Only codes, sizes
// and thread counts are checked here. operands.cpp has the few operations that take tensors, by
// DLPack.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/levels_kernels.h"
#include "grid_arguments.h"
#include "levels_arguments.h"
#include "multi_arguments.h"
#include "numerics.h"
#include "operands.h"

namespace py = pybind11;

namespace {

using ottava::Address;
using ottava::at;
using ottava::dtype_of;
using ottava::fp8_of;
using ottava::size_of;
using ottava::stored_of;

// A thread count below one is a caller's mistake.
int threads_of(int threads) {
    if (threads < 1)
        throw std::invalid_argument("threads must be at least 1, not " + std::to_string(threads));
    return threads;
}

void amax(Address src, int dtype, int64_t n, Address out, int threads) {
    ottava::amax(at<const void>(src), dtype_of(dtype), size_of(n), at<float>(out),
                 threads_of(threads));
}

void scale_from_amax(Address amax, int64_t n, float fp8_max, float epsilon, bool force_pow_2,
                     Address scale, Address scale_inv) {
    ottava::scales_from_amax(at<const float>(amax), size_of(n), fp8_max, epsilon, force_pow_2,
                             at<float>(scale), at<float>(scale_inv));
}

void quantize(Address src, int dtype, int64_t rows, int64_t cols, float epsilon, bool force_pow_2,
              Address amax, Address scale, Address scale_inv, Address out, Address out_t,
              int format, int threads) {
    ottava::quantize(at<const void>(src), dtype_of(dtype), size_of(rows), size_of(cols), epsilon,
                     force_pow_2, at<float>(amax), at<float>(scale), at<float>(scale_inv),
                     at<uint8_t>(out), at<uint8_t>(out_t), fp8_of(format), threads_of(threads));
}

void cast(Address src, int dtype, int64_t rows, int64_t cols, Address scale, Address amax,
          Address saturated, Address scale_inv, Address out, Address out_t, int format,
          int threads) {
    ottava::cast(at<const void>(src), dtype_of(dtype), size_of(rows), size_of(cols),
                 at<const float>(scale), at<float>(amax), at<int64_t>(saturated),
                 at<float>(scale_inv), at<uint8_t>(out), at<uint8_t>(out_t), fp8_of(format),
                 threads_of(threads));
}

void update_scales(const std::vector<ottava::SlotArguments>& tensors, int64_t length,
                   const std::vector<float>& maxima, bool most_recent, Address last) {
    const auto slots = ottava::jobs_of(tensors, ottava::slots_of);
    ottava::check_maxima(slots, maxima);
    ottava::update_scales(slots.data(), ottava::count_of(slots), size_of(length), maxima.data(),
                          most_recent, at<const float>(last));
}

void transpose(Address src, int64_t rows, int64_t cols, Address out, int threads) {
    ottava::transpose(at<const uint8_t>(src), size_of(rows), size_of(cols), at<uint8_t>(out),
                      threads_of(threads));
}

void decode(Address src, int format, int64_t n, Address scale_inv, Address out, int dtype,
            int threads) {
    ottava::decode(at<const uint8_t>(src), fp8_of(format), size_of(n), at<const float>(scale_inv),
                   at<void>(out), dtype_of(dtype), threads_of(threads));
}

// scale_a, scale_b, bias (0 where absent) and the bias's dtype.
typedef std::tuple<Address, Address, Address, int> Last;

void epilogue32(Address sums, int64_t rows, int64_t cols, const Last& last, Address out, int dtype,
                int threads) {
    const auto& [scale_a, scale_b, bias, bias_dtype] = last;
    ottava::epilogue32(at<const float>(sums), size_of(rows), size_of(cols),
                       at<const float>(scale_a), at<const float>(scale_b), at<const void>(bias),
                       dtype_of(bias_dtype), at<void>(out), dtype_of(dtype), threads_of(threads));
}

void mx_scale_from_amax(Address amax, int64_t n, int format, bool floor, Address exponents,
                        int threads) {
    ottava::mx_scales_from_amax(at<const float>(amax), size_of(n), fp8_of(format), floor,
                                at<uint8_t>(exponents), threads_of(threads));
}

void grid_quantize(Address src, int dtype, int64_t rows, int64_t cols, int element, bool e8m0,
                   bool floor, float epsilon, float largest, const ottava::SideArguments& row_side,
                   const ottava::SideArguments& column_side, int threads) {
    std::vector<ottava::GridSide> sides;
    for (const ottava::SideArguments* side : {&row_side, &column_side})
        if (const ottava::GridSide grid_side = ottava::side_of(*side); grid_side.data != nullptr)
            sides.push_back(grid_side);
    const ottava::ScaleRule rule{e8m0, floor, epsilon, largest};
    ottava::grid_quantize(at<const void>(src), dtype_of(dtype), size_of(rows), size_of(cols),
                          stored_of(element), rule, sides.data(), static_cast<int>(sides.size()),
                          threads_of(threads));
}

void grid_amax(Address src, int dtype, int64_t rows, int64_t cols, int64_t block_rows,
               int64_t block_cols, Address out, int threads) {
    ottava::grid_amax(at<const void>(src), dtype_of(dtype), size_of(rows), size_of(cols),
                      size_of(block_rows), size_of(block_cols), at<float>(out),
                      threads_of(threads));
}

void grid_cast(Address src, int dtype, int64_t rows, int64_t cols, Address multipliers,
               int64_t block_rows, int64_t block_cols, int element, bool turned, Address out,
               int threads) {
    ottava::grid_cast(at<const void>(src), dtype_of(dtype), size_of(rows), size_of(cols),
                      at<const float>(multipliers), size_of(block_rows), size_of(block_cols),
                      stored_of(element), turned, at<uint8_t>(out), threads_of(threads));
}

void grid_decode(Address data, int element, int64_t rows, int64_t cols, Address scales, bool e8m0,
                 int64_t block_rows, int64_t block_cols, Address out, int dtype, int threads) {
    ottava::grid_decode(at<const uint8_t>(data), stored_of(element), size_of(rows), size_of(cols),
                        at<const void>(scales), e8m0, size_of(block_rows), size_of(block_cols),
                        at<void>(out), dtype_of(dtype), threads_of(threads));
}

void levels_quantize(const ottava::LevelsLayout& layout, Address src, int dtype, int64_t rows,
                     int64_t cols, uint64_t seed, int64_t first_row,
                     const ottava::LevelsTuple& by_row, const ottava::LevelsTuple& by_column,
                     int threads) {
    const ottava::LevelsResults results[] = {ottava::levels_results_of(by_row),
                                             ottava::levels_results_of(by_column)};
    ottava::check_strips(layout);
    ottava::levels_quantize(layout, at<const void>(src), dtype_of(dtype), size_of(rows),
                            size_of(cols), seed, size_of(first_row), results, threads_of(threads));
}

void levels_decode(const ottava::LevelsLayout& layout, Address data, int64_t rows, int64_t cols,
                   Address scales, int64_t block_rows, int64_t block_cols, Address amaxes,
                   bool by_column, Address out, int dtype, int threads) {
    const ottava::LevelsData from{at<const uint8_t>(data), size_of(rows),
                                  size_of(cols),           at<const void>(scales),
                                  size_of(block_rows),     size_of(block_cols),
                                  at<const float>(amaxes), by_column};
    ottava::levels_decode(layout, from, at<void>(out), dtype_of(dtype), threads_of(threads));
}

void multi_amax(const std::vector<ottava::Source>& tensors, Address out, int threads) {
    const auto jobs = ottava::jobs_of(tensors, ottava::source_of);
    ottava::multi_amax(jobs.data(), ottava::count_of(jobs), at<float>(out), threads_of(threads));
}

void multi_cast(const std::vector<ottava::CastArguments>& tensors, Address scales, int threads) {
    const auto jobs = ottava::jobs_of(tensors, ottava::cast_of);
    ottava::multi_cast(jobs.data(), ottava::count_of(jobs), at<const float>(scales),
                       threads_of(threads));
}

void grid_multi_amax(const std::vector<ottava::GridAmaxArguments>& shards, Address out,
                     int64_t total, int threads) {
    const auto jobs = ottava::jobs_of(shards, ottava::grid_amax_of);
    ottava::check_amaxes(jobs, total);
    ottava::grid_multi_amax(jobs.data(), ottava::count_of(jobs), at<float>(out),
                            threads_of(threads));
}

void grid_multi_cast(const std::vector<ottava::GridCastArguments>& shards, int threads) {
    const auto jobs = ottava::jobs_of(shards, ottava::grid_cast_of);
    ottava::grid_multi_cast(jobs.data(), ottava::count_of(jobs), threads_of(threads));
}

std::vector<std::string> available_isas() {
    const ottava::Kernels* available[8];
    const int count = ottava::available_kernels(available, 8);
    std::vector<std::string> names;
    for (int i = 0; i < count; ++i) names.emplace_back(available[i]->name);
    return names;
}

void set_isa(const std::string& name) {
    if (ottava::set_active_kernels(name.c_str())) return;
    std::string names;
    for (const std::string& other : available_isas()) names += (names.empty() ? "" : ", ") + other;
    throw std::invalid_argument("instruction set '" + name +
                                "' is not available here; these are: " + names);
}

}  // namespace

PYBIND11_MODULE(_cpu, m) {
    using Unlocked = py::call_guard<py::gil_scoped_release>;
    m.doc() = "FP8 kernels for CPUs over raw addresses; ottava.kernels is the interface to use.";
    m.def("amax", &amax, Unlocked());
    m.def("scale_from_amax", &scale_from_amax, Unlocked());
    m.def("cast", &cast, Unlocked());
    m.def("quantize", &quantize, Unlocked());
    m.def("update_scales", &update_scales, Unlocked());
    m.def("transpose", &transpose, Unlocked());
    m.def("decode", &decode, Unlocked());
    m.def("epilogue32", &epilogue32, Unlocked());
    m.def("mx_scale_from_amax", &mx_scale_from_amax, Unlocked());
    m.def("grid_quantize", &grid_quantize, Unlocked());
    m.def("grid_amax", &grid_amax, Unlocked());
    m.def("grid_cast", &grid_cast, Unlocked());
    m.def("grid_decode", &grid_decode, Unlocked());
    m.def("multi_amax", &multi_amax, Unlocked());
    m.def("multi_cast", &multi_cast, Unlocked());
    m.def("grid_multi_amax", &grid_multi_amax, Unlocked());
    m.def("grid_multi_cast", &grid_multi_cast, Unlocked());
    py::class_<ottava::LevelsLayout>(m, "LevelsPlan", py::module_local())
        .def(py::init(&ottava::levels_layout_of));
    m.def("levels_quantize", &levels_quantize, Unlocked());
    m.def("levels_decode", &levels_decode, Unlocked());
    ottava::bind_operands(m);
    // The reason why the build has no CUDA kernels; empty if it has them.
    m.attr("without_cuda") = std::string(OTTAVA_WITHOUT_CUDA);
    m.def("isa", [] { return std::string(ottava::active_kernels().name); });
    m.def("available_isas", &available_isas);
    m.def("set_isa", &set_isa);
}
