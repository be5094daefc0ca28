// What the host side of the backend knows of CUDA: streams, errors, the current device.
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

inline void check(cudaError_t status, const char* what) {
    if (status == cudaSuccess) return;
    throw LaunchError(std::string(what) + ": " + cudaGetErrorString(status));
}

// The device of the tensors is the current one inside, whatever it is outside.
class OnDevice {
    int previous_ = 0;
    bool changed_ = false;

   public:
    explicit OnDevice(int device) {
        check(cudaGetDevice(&previous_), "the current device is unknown");
        if (previous_ == device) return;
        check(cudaSetDevice(device), "the device cannot be used");
        changed_ = true;
    }
    ~OnDevice() {
        if (changed_) cudaSetDevice(previous_);
    }
    OnDevice(const OnDevice&) = delete;
    OnDevice& operator=(const OnDevice&) = delete;
};

}  // namespace ottava::cuda

#endif
