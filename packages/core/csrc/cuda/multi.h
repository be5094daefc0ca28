// Kernels over runs of elements of many tensors: their amaxes, and their casts with a scale for
// each.
#pragma once

#include <cstdint>

#include "jobs.h"
#include "reduce.h"
#include "rounded.h"

namespace ottava::cuda {

// The part of a tensor that one block works on. The block loads many elements at once, and
// positions within the part have 32 bits.
template <int kThreadCount, int kRounds>
struct Chunk {
    static constexpr int kUnroll = 4, kSingles = 16;
    static constexpr int kRound = kThreadCount * kGroup * kUnroll;  // elements, of wide loads
    static constexpr int kSize = kRound * kRounds;
    static_assert(kRound % (kThreadCount * kSingles) == 0, "rounds of both kinds");

    static int64_t blocks_for(int64_t count) { return ceil_div(count, kSize); }
    static OTTAVA_DEVICE int size_at(int64_t begin, int64_t count) {
        return static_cast<int>(count - begin < kSize ? count - begin : kSize);
    }

    static constexpr int kStep = kThreadCount * kGroup;  // from one group of a thread to the next

    // Calls by_groups(groups, at) with whole groups of wide loads; group number k begins at `at + k
    // * kStep`. Where there are no whole groups, or addresses do not allow wide loads, calls
    // by_elements(elements, at) with elements that lie kThreadCount apart, so that a warp reads and
    // writes adjacent elements. Elements beyond the end are zero.
    template <class Source, bool Kept, class Thread, class ByGroups, class ByElements>
    static OTTAVA_DEVICE void over(const Thread& thread, const void* src, int size, bool wide,
                                   const ByGroups& by_groups, const ByElements& by_elements) {
        int position = 0;
        if (wide) {
#pragma unroll 1
            for (; position + kRound <= size; position += kRound) {
                const int at = position + thread.index() * kGroup;
                Group<Source> groups[kUnroll];
#pragma unroll
                for (int k = 0; k < kUnroll; ++k)
                    groups[k] = load_whole<Source, Kept>(src, at + k * kStep);
                by_groups(groups, at);
            }
        }
#pragma unroll 1
        for (int at = position + thread.index(); at < size; at += kThreadCount * kSingles) {
            uint32_t elements[kSingles];
#pragma unroll
            for (int k = 0; k < kSingles; ++k)
                elements[k] =
                    at + k * kThreadCount < size ? Source::load(src, at + k * kThreadCount) : 0;
            by_elements(elements, at);
        }
    }
};

template <class Source>
OTTAVA_DEVICE const uint8_t* advance(const void* src, int64_t elements) {
    return static_cast<const uint8_t*>(src) + elements * Source::bytes;
}

OTTAVA_DEVICE bool allows_wide(const void* address, int bytes) {
    return reinterpret_cast<uintptr_t>(address) % bytes == 0;
}

struct AmaxJob {
    const void* src;
    int64_t count;
    int32_t number;  // of the tensor
    Dtype nominal;
};

// Raises `out`, which holds zeros.
template <class Source>
struct MultiAmax {
    static constexpr int kThreads = 256, kBlocksPerMultiprocessor = 4;
    typedef Chunk<kThreads, 4> Work;
    typedef BlockLargest<kThreads> Shared;
    float* out;
    Jobs<AmaxJob> jobs;

    template <class Thread>
    OTTAVA_DEVICE void operator()(const Thread& thread, Shared& shared) const {
        const int number = jobs.of(thread.block());
        const AmaxJob& job = jobs.all[number];
        const int64_t begin = (thread.block() - jobs.begins[number]) * Work::kSize;
        const void* src = advance<Source>(job.src, begin);
        const int size = Work::size_at(begin, job.count);
        uint32_t best = 0;
        // The elements are read again for the cast, so they may stay in the caches.
        Work::template over<Source, true>(
            thread, src, size, allows_wide(src, 16),
            [&](const auto& groups, int) {
#pragma unroll
                for (int k = 0; k < Work::kUnroll; ++k) best = groups[k].observe(best);
            },
            [&](const auto& elements, int) {
#pragma unroll
                for (int k = 0; k < Work::kSingles; ++k) best = Source::observe(best, elements[k]);
            });
        const uint32_t largest = shared(thread, bits_as<uint32_t>(Source::largest(best)));
        if (thread.index() != 0) return;
        const float value = rounded(bits_as<float>(largest), job.nominal);
        thread.raise(reinterpret_cast<int32_t*>(out + job.number), bits_as<int32_t>(value));
    }
};

struct CastJob {
    const void* src;
    int64_t count;
    uint8_t* out;
    int32_t number;
    Dtype nominal;
};

template <class Source, class Format>
struct MultiCast {
    static constexpr int kThreads = 256, kBlocksPerMultiprocessor = 4;
    typedef Chunk<kThreads, 2> Work;
    struct Shared {};
    const float* scales;
    Jobs<CastJob> jobs;

    // The last blocks of the grid come first: an amax has read their elements last, so the caches
    // may hold them.
    template <class Thread>
    OTTAVA_DEVICE void operator()(const Thread& thread, Shared&) const {
        const int64_t block = thread.blocks() - 1 - thread.block();
        const int number = jobs.of(block);
        const CastJob& job = jobs.all[number];
        const int64_t begin = (block - jobs.begins[number]) * Work::kSize;
        const void* src = advance<Source>(job.src, begin);
        uint8_t* out = job.out + begin;
        const int size = Work::size_at(begin, job.count);
        const float scale = scales[job.number];
        const bool wide = allows_wide(src, 16) && allows_wide(out, kGroup);
        with_rounding<Source>(job.nominal, [&](auto rounding) {
            typedef decltype(rounding) Rounding;
            Work::template over<Source, false>(
                thread, src, size, wide,
                [&](const auto& groups, int at) {
#pragma unroll
                    for (int k = 0; k < Work::kUnroll; ++k)
                        store_whole(out, at + k * Work::kStep,
                                    encode_eight<Rounding>(groups[k], scale));
                },
                [&](const auto& elements, int at) {
#pragma unroll
                    for (int k = 0; k < Work::kSingles; k += 2) {
                        const float a = Source::widen(elements[k]),
                                    b = Source::widen(elements[k + 1]);
                        const uint32_t data = encode_two<Rounding>(a, b, scale);
                        const int first = at + k * kThreads, second = first + kThreads;
                        if (first < size) out[first] = static_cast<uint8_t>(data);
                        if (second < size) out[second] = static_cast<uint8_t>(data >> 8);
                    }
                });
        });
    }

private:
    template <class Rounding>
    static OTTAVA_DEVICE uint32_t encode_two(float a, float b, float scale) {
        Rounding::pair(a, b);
        return encode_pair<Format>(multiply(a, scale), multiply(b, scale));
    }

    template <class Rounding>
    static OTTAVA_DEVICE Words2 encode_eight(const Group<Source>& group, float scale) {
        Words2 data;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int i = 4 * half;
            const uint32_t low = encode_two<Rounding>(group.at(i), group.at(i + 1), scale);
            const uint32_t high = encode_two<Rounding>(group.at(i + 2), group.at(i + 3), scale);
            data.w[half] = low | (high << 16);
        }
        return data;
    }
};

}  // namespace ottava::cuda
