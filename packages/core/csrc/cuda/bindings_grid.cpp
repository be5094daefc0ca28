// The operations on grids of scales, and the last step of a product.
#include <cstdint>
#include <tuple>

#include "../grid_arguments.h"
#include "../numerics.h"
#include "bindings.h"
#include "operations.h"

namespace ottava::cuda {
namespace {

void bound_scale_from_amax(Address amax, int64_t n, int format, bool floor, Address exponents,
                           int device, Address stream) {
    const OnDevice guard(device);
    mx_scales_from_amax(at<const float>(amax), size_of(n), fp8_of(format), floor,
                        at<uint8_t>(exponents), stream_of(stream));
}

void bound_grid_quantize(Address src, int dtype, int64_t rows, int64_t cols, int format, bool e8m0,
                         bool floor, float epsilon, float largest, const SideArguments& row_side,
                         const SideArguments& column_side, Address scratch, int device,
                         Address stream) {
    const ScaleRule rule{e8m0, floor, epsilon, largest};
    const GridSide by_row = side_of(row_side), by_column = side_of(column_side);
    const OnDevice guard(device);
    grid_quantize(at<const void>(src), dtype_of(dtype), size_of(rows), size_of(cols),
                  fp8_of(format), rule, by_row, by_column, at<float>(scratch), stream_of(stream));
}

void bound_grid_decode(Address data, int format, int64_t rows, int64_t cols, Address scales,
                       bool e8m0, int64_t block_rows, int64_t block_cols, Address out, int dtype,
                       int device, Address stream) {
    const OnDevice guard(device);
    grid_decode(at<const uint8_t>(data), fp8_of(format), size_of(rows), size_of(cols),
                at<const void>(scales), e8m0, size_of(block_rows), size_of(block_cols),
                at<void>(out), dtype_of(dtype), stream_of(stream));
}

// scale_a, scale_b, bias (0 where absent) and the bias's dtype.
typedef std::tuple<Address, Address, Address, int> Last;

Finish finish_of(const Last& last) {
    const auto& [a, b, bias, dtype] = last;
    return {at<const float>(a), at<const float>(b), at<const void>(bias), dtype_of(dtype)};
}

void bound_epilogue32(Address acc, int64_t rows, int64_t cols, const Last& last, Address out,
                      int dtype, int device, Address stream) {
    const OnDevice guard(device);
    finish_float32(at<const float>(acc), size_of(rows), size_of(cols), finish_of(last),
                   at<void>(out), dtype_of(dtype), stream_of(stream));
}

}  // namespace

void bind_grid(py::module_& m) {
    m.def("mx_scale_from_amax", &bound_scale_from_amax);
    m.def("grid_quantize", &bound_grid_quantize);
    m.def("grid_decode", &bound_grid_decode);
    m.def("epilogue32", &bound_epilogue32);
}

}  // namespace ottava::cuda
