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

// A launch without blocks would be an error.
template <class Kernel>
void launch(const Kernel& kernel, int64_t blocks, Stream stream) {
    if (blocks <= 0) return;
    if (blocks > INT32_MAX)
        throw LaunchError("a grid of " + std::to_string(blocks) + " blocks is too large");
    // The last error is not asked, because it may be that of another library's call.
    void* arguments[] = {const_cast<Kernel*>(&kernel)};
    const auto entry = reinterpret_cast<const void*>(&grid<Kernel>);
    check(cudaLaunchKernel(entry, dim3(static_cast<unsigned>(blocks)), dim3(Kernel::kThreads),
                           arguments, 0, stream),
          "a kernel could not be launched");
}

}  // namespace ottava::cuda

#endif
