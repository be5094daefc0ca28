// One thread of a kernel: its place in the grid, and its operations together with other threads.
//
// A kernel is a struct: its members are the arguments, `Shared` the shared memory of a block,
// `kThreads` the size of one, and `operator()(thread, shared)` the work of a thread. nvcc makes a
// grid of it (launch.h). A C++ compiler makes a loop over the same grid in which the threads of a
// block take turns (tests/core/csrc/sequential.h): the same text, with its indices, its tiles and
// its edges, runs where there is no GPU.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define OTTAVA_DEVICE __device__ __forceinline__
#else
#define OTTAVA_DEVICE inline
#endif

namespace ottava::cuda {

constexpr int kWarp = 32;

#if defined(__CUDACC__)

// Stateless: every member is an instruction or a special register.
struct Thread {
    OTTAVA_DEVICE int index() const { return static_cast<int>(threadIdx.x); }
    OTTAVA_DEVICE int64_t block() const { return blockIdx.x; }
    OTTAVA_DEVICE int64_t blocks() const { return gridDim.x; }
    OTTAVA_DEVICE int lane() const { return index() % kWarp; }
    OTTAVA_DEVICE int warp() const { return index() / kWarp; }

    // Waits for all threads of the block.
    OTTAVA_DEVICE void barrier() const { __syncthreads(); }
    // The value of the lane whose number differs in the bits of `mask`; called by all lanes of the
    // warp.
    OTTAVA_DEVICE uint32_t exchange(uint32_t value, int mask) const {
        return __shfl_xor_sync(0xffffffffu, value, mask);
    }

    // Most values are not larger than the current one, and then nothing is written.
    OTTAVA_DEVICE void raise(int32_t* to, int32_t value) const {
        if (value > *static_cast<volatile int32_t*>(to)) atomicMax(to, value);
    }
    OTTAVA_DEVICE void add(int64_t* to, int64_t value) const {
        atomicAdd(reinterpret_cast<unsigned long long*>(to),
                  static_cast<unsigned long long>(value));
    }
};

#endif

}  // namespace ottava::cuda

#if defined(OTTAVA_SEQUENTIAL)
#include "sequential.h"
#endif
