// Many tensors in one launch. The table of tensors is an argument of the kernel, by value, so
// nothing is allocated or copied for it, and a CUDA graph that captures the launch keeps the table.
#pragma once

#include <cstddef>
#include <cstdint>

#include "arithmetic.h"
#include "launch.h"

namespace ottava::cuda {

// The arguments of a kernel may take 32764 bytes since CUDA 12.1, and took at most 4096 bytes
// before.
#if defined(CUDART_VERSION) && CUDART_VERSION < 12010
constexpr size_t kTableBytes = 3840;
#else
constexpr size_t kTableBytes = 24 << 10;
#endif

// Jobs, each of which has as many blocks of the grid as it needs. The numbers of their first blocks
// lie in an array of their own, because every block searches it.
template <class Job>
constexpr int jobs_in(size_t bytes) {
    return static_cast<int>(bytes / (sizeof(Job) + sizeof(int32_t)));
}
template <class Job, int kCapacity = jobs_in<Job>(kTableBytes)>
struct Jobs {
    static_assert(kCapacity > 0, "room for a job");
    int32_t count;
    int32_t begins[kCapacity];
    Job all[kCapacity];

    // The number of the job that `block` belongs to.
    OTTAVA_DEVICE int of(int64_t block) const {
        int first = 0, end = count;
        while (end - first > 1) {
            const int middle = (first + end) / 2;
            if (begins[middle] <= block)
                first = middle;
            else
                end = middle;
        }
        return first;
    }

    bool full() const { return count == kCapacity; }
    void put(const Job& job, int64_t begin) {
        begins[count] = static_cast<int32_t>(begin);
        all[count++] = job;
    }
};

// Fills the table `jobs` of a kernel, and launches it whenever no more of them fit.
template <class Kernel>
class JobLaunches {
    static_assert(sizeof(Kernel) <= kTableBytes + 256, "a table and a few arguments");
    Kernel kernel_;
    int64_t blocks_ = 0;
    Stream stream_;

public:
    explicit JobLaunches(Stream stream) : stream_(stream) { kernel_.jobs.count = 0; }
    JobLaunches(const JobLaunches&) = delete;
    JobLaunches& operator=(const JobLaunches&) = delete;

    // Gives access to the other arguments.
    Kernel* operator->() { return &kernel_; }

    template <class Job>
    void add(const Job& job, int64_t blocks) {
        if (blocks <= 0) return;
        if (kernel_.jobs.full() || blocks_ > INT32_MAX - blocks) finish();
        kernel_.jobs.put(job, blocks_);
        blocks_ += blocks;
    }

    // Launches the kernel for the remaining jobs.
    void finish() {
        launch(kernel_, blocks_, stream_);
        kernel_.jobs.count = 0;
        blocks_ = 0;
    }
};

// Calls body(source, dtype) for each dtype, or body(format, fp8) for each format, because jobs that
// differ in these are launched separately.
template <class Body>
void with_each_source(const Body& body) {
    for (Dtype dtype : {Dtype::float32, Dtype::bfloat16, Dtype::float16})
        with_source(dtype, [&](auto source) { body(source, dtype); });
}
template <class Body>
void with_each_format(const Body& body) {
    for (Fp8 format : {Fp8::e4m3, Fp8::e5m2})
        with_format(format, [&](auto target) { body(target, format); });
}

}  // namespace ottava::cuda
