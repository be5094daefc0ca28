// From the struct of a kernel to a launch (see thread.h).
#pragma once

#include <cstdint>
#include <string>

#include "stream.h"
#include "thread.h"

#if !defined(OTTAVA_SEQUENTIAL)

namespace ottava::cuda {

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kBlocksPerMultiprocessor)
    grid(const __grid_constant__ Kernel kernel) {
    __shared__ typename Kernel::Shared shared;
    kernel(Thread{}, shared);
}

// Without blocks there is nothing to do, and a launch would be an error.
template <class Kernel>
void launch(const Kernel& kernel, int64_t blocks, Stream stream) {
    if (blocks <= 0) return;
    if (blocks > INT32_MAX) throw LaunchError("a grid of " + std::to_string(blocks) + " blocks is too large");
    grid<Kernel><<<static_cast<unsigned>(blocks), Kernel::kThreads, 0, stream>>>(kernel);
    check(cudaGetLastError(), "a kernel could not be launched");
}

}  // namespace ottava::cuda

#endif
