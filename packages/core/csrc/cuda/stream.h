// Streams and errors of CUDA, for the host side of the backend.
#pragma once

#if defined(OTTAVA_SEQUENTIAL)

#include "sequential.h"

#else

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace ottava::cuda {

typedef cudaStream_t Stream;

// The error about a launch or a call of the runtime that failed; the message says which one, and
// why.
struct LaunchError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// The remedy for an error, where one is known.
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

// Clears the error, so that the next call of the runtime does not report it.
inline void check(cudaError_t status, const char* what) {
    if (status == cudaSuccess) return;
    cudaGetLastError();
    throw LaunchError(std::string(what) + ": " + cudaGetErrorString(status) + remedy(status));
}

}  // namespace ottava::cuda

#endif
