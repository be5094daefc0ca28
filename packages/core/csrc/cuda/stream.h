// What the host side of the backend knows of CUDA: streams and errors.
#pragma once

#if defined(OTTAVA_SEQUENTIAL)

#include "sequential.h"

#else

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace ottava::cuda {

typedef cudaStream_t Stream;

// A launch or a call of the runtime that failed; the message says which, and why.
struct LaunchError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// What to do about an error, where that is known.
inline const char* remedy(cudaError_t status) {
    switch (status) {
        case cudaErrorInsufficientDriver:
            return " (update the driver, or build ottava with an older CUDA toolkit)";
        case cudaErrorNoKernelImageForDevice:
        case cudaErrorInvalidDeviceFunction:
        case cudaErrorUnsupportedPtxVersion:
            return " (`ottava doctor` says what GPUs this build has code for)";
        default:
            return "";
    }
}

// Leaves no error behind for the next one who asks.
inline void check(cudaError_t status, const char* what) {
    if (status == cudaSuccess) return;
    cudaGetLastError();
    throw LaunchError(std::string(what) + ": " + cudaGetErrorString(status) + remedy(status));
}

}  // namespace ottava::cuda

#endif
