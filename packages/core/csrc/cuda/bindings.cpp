// The module `ottava._cuda`: the operations of operations.h over raw addresses of the device, on a
// stream. It needs no libtorch. No function of CUDA is called before the first operation, so the
// module can be imported where there is no driver.
#include "bindings.h"

#include <cstdint>
#include <string>

#include "operations.h"

namespace {

using namespace ottava;
using ottava::cuda::OnDevice;
using ottava::cuda::stream_of;

void amax(Address src, int dtype, int64_t n, Address scratch, Address out, int device,
          Address stream) {
    const OnDevice guard(device);
    cuda::amax(at<const void>(src), dtype_of(dtype), size_of(n), at<float>(scratch), at<float>(out),
               stream_of(stream));
}

void scale_from_amax(Address amax, int64_t n, float fp8_max, float epsilon, bool force_pow_2,
                     Address scale, Address scale_inv, int device, Address stream) {
    const OnDevice guard(device);
    cuda::scales_from_amax(at<const float>(amax), size_of(n), fp8_max, epsilon, force_pow_2,
                           at<float>(scale), at<float>(scale_inv), stream_of(stream));
}

void cast(Address src, int dtype, int64_t rows, int64_t cols, Address scale, Address amax,
          Address saturated, Address scale_inv, Address out, Address out_t, int format, int device,
          Address stream) {
    const OnDevice guard(device);
    const cuda::Observed observed{at<float>(amax), at<int64_t>(saturated), at<float>(scale_inv)};
    cuda::cast(at<const void>(src), dtype_of(dtype), size_of(rows), size_of(cols),
               at<const float>(scale), observed, at<uint8_t>(out), at<uint8_t>(out_t),
               fp8_of(format), stream_of(stream));
}

void quantize(Address src, int dtype, int64_t rows, int64_t cols, float epsilon, bool force_pow_2,
              Address scratch, Address amax, Address scale, Address scale_inv, Address out,
              Address out_t, int format, int device, Address stream) {
    const OnDevice guard(device);
    cuda::quantize(at<const void>(src), dtype_of(dtype), size_of(rows), size_of(cols), epsilon,
                   force_pow_2, at<float>(scratch), at<float>(amax), at<float>(scale),
                   at<float>(scale_inv), at<uint8_t>(out), at<uint8_t>(out_t), fp8_of(format),
                   stream_of(stream));
}

void transpose(Address src, int64_t rows, int64_t cols, Address out, int device, Address stream) {
    const OnDevice guard(device);
    cuda::transpose(at<const uint8_t>(src), size_of(rows), size_of(cols), at<uint8_t>(out),
                    stream_of(stream));
}

void decode(Address src, int format, int64_t n, Address scale_inv, Address out, int dtype,
            int device, Address stream) {
    const OnDevice guard(device);
    cuda::decode(at<const uint8_t>(src), fp8_of(format), size_of(n), at<const float>(scale_inv),
                 at<void>(out), dtype_of(dtype), stream_of(stream));
}

}  // namespace

PYBIND11_MODULE(OTTAVA_CUDA_MODULE, m) {
    m.doc() =
        "FP8 kernels for NVIDIA GPUs over raw addresses; ottava.kernels is the interface to use.";
    // The failure is raised as ottava's own error class, which exists by the time that a kernel
    // runs.
    py::register_exception_translator([](std::exception_ptr error) {
        try {
            if (error) std::rethrow_exception(error);
        } catch (const cuda::LaunchError& failed) {
            const py::object backend_error =
                py::module_::import("ottava.errors").attr("BackendError");
            PyErr_SetString(backend_error.ptr(), failed.what());
        }
    });
    m.attr("scratch_floats") = cuda::kScratchFloats;
    m.attr("targets") = std::string(OTTAVA_CUDA_TARGETS);
    m.def("amax", &amax);
    m.def("scale_from_amax", &scale_from_amax);
    m.def("cast", &cast);
    m.def("quantize", &quantize);
    m.def("transpose", &transpose);
    m.def("decode", &decode);
    cuda::bind_grid(m);
    cuda::bind_levels(m);
    cuda::bind_multi(m);
}
