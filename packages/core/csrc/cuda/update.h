// The scales of the next step of delayed scaling, for all slots of all tensors, with one block for
// each slot.
#pragma once

#include <cstdint>

#include "jobs.h"
#include "reduce.h"

namespace ottava::cuda {

// The slots of one tensor: their scales, and their columns of its history.
struct SlotsJob {
    float* scale;
    float* history;
    int64_t stride;  // of the history's rows
};

struct UpdateScales {
    static constexpr int kThreads = 128, kBlocksPerMultiprocessor = 4;
    static constexpr int kRows = 8;  // of a column that a thread moves at once
    static constexpr int kMaxima = kTableBytes / 3 / sizeof(float);
    static constexpr int kTensors = jobs_in<SlotsJob>(kTableBytes - kMaxima * sizeof(float));
    typedef BlockLargest<kThreads> Shared;
    int64_t length;
    const float* last;  // optional
    bool most_recent;
    float maxima[kMaxima];
    Jobs<SlotsJob, kTensors> jobs;

    // The bits of a value that counts towards an amax. NaN and values that are not positive do not
    // count.
    static OTTAVA_DEVICE uint32_t positive(float amax) {
        return amax > 0.0f ? bits_as<uint32_t>(amax) : 0;
    }

    template <class Thread>
    OTTAVA_DEVICE void operator()(const Thread& thread, Shared& shared) const {
        const int number = jobs.of(thread.block());
        const SlotsJob& job = jobs.all[number];
        const int slot = static_cast<int>(thread.block()) - jobs.begins[number];
        float* column = job.history + slot;
        const float collected = last == nullptr ? column[0] : last[thread.block()];
        if (collected == 0.0f)
            return;  // the whole block: nothing is written before all have read this
        uint32_t largest = positive(collected);
        // The column moves up by one row, several rows at a time. No row is written before it was
        // read.
#pragma unroll 1
        for (int64_t first = 1; first < length; first += kThreads * kRows) {
            float older[kRows];
#pragma unroll
            for (int k = 0; k < kRows; ++k) {
                const int64_t row = first + k * kThreads + thread.index();
                older[k] = row < length ? column[row * job.stride] : 0.0f;
                if (!most_recent) largest = larger(largest, positive(older[k]));
            }
            thread.barrier();
#pragma unroll
            for (int k = 0; k < kRows; ++k) {
                const int64_t row = first + k * kThreads + thread.index();
                if (row < length) column[(row - 1) * job.stride] = older[k];
            }
        }
        largest = shared(thread, largest);
        if (thread.index() != 0) return;
        column[(length - 1) * job.stride] = collected;
        column[0] = 0.0f;
        const float amax = collected == collected ? bits_as<float>(largest) : collected;
        job.scale[slot] = scale_from_history(amax, maxima[thread.block()], job.scale[slot]);
    }
};

}  // namespace ottava::cuda
