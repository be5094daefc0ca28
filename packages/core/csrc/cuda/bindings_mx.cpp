// The operations on MX blocks, and the last step of a product.
#include <cstdint>
#include <tuple>

#include "bindings.h"
#include "operations.h"

namespace ottava::cuda {
namespace {

Stream stream_of(Address stream) { return reinterpret_cast<Stream>(stream); }

// Data and scales, 0 where the direction is not wanted.
typedef std::tuple<Address, Address> Pair;

MxData data_of(const Pair& pair) { return {at<uint8_t>(std::get<0>(pair)), at<uint8_t>(std::get<1>(pair))}; }

void bound_scale_from_amax(Address amax, int64_t n, int format, bool floor, Address exponents, int device,
                           Address stream) {
    const OnDevice guard(device);
    mx_scales_from_amax(at<const float>(amax), size_of(n), fp8_of(format), floor, at<uint8_t>(exponents),
                        stream_of(stream));
}

void bound_quantize(Address src, int dtype, int64_t rows, int64_t cols, int format, bool square, bool floor,
                    const Pair& by_row, const Pair& by_column, int device, Address stream) {
    const OnDevice guard(device);
    mx_quantize(at<const void>(src), dtype_of(dtype), size_of(rows), size_of(cols), fp8_of(format), square, floor,
                data_of(by_row), data_of(by_column), stream_of(stream));
}

void bound_decode(Address data, Address scales, int format, int64_t rows, int64_t cols, bool columnwise, Address out,
                  int dtype, int device, Address stream) {
    const OnDevice guard(device);
    mx_decode(at<const uint8_t>(data), at<const uint8_t>(scales), fp8_of(format), size_of(rows), size_of(cols),
              columnwise, at<void>(out), dtype_of(dtype), stream_of(stream));
}

// scale_a, scale_b, bias (0 where absent) and the bias's dtype.
typedef std::tuple<Address, Address, Address, int> Last;

Finish finish_of(const Last& last) {
    const auto& [a, b, bias, dtype] = last;
    return {at<const float>(a), at<const float>(b), at<const void>(bias), dtype_of(dtype)};
}

void bound_epilogue32(Address acc, int64_t rows, int64_t cols, const Last& last, Address out, int dtype, int device,
                      Address stream) {
    const OnDevice guard(device);
    finish_float32(at<const float>(acc), size_of(rows), size_of(cols), finish_of(last), at<void>(out), dtype_of(dtype),
                   stream_of(stream));
}

}  // namespace

void bind_mx(py::module_& m) {
    m.def("mx_scale_from_amax", &bound_scale_from_amax);
    m.def("mx_quantize", &bound_quantize);
    m.def("mx_decode", &bound_decode);
    m.def("epilogue32", &bound_epilogue32);
}

}  // namespace ottava::cuda
