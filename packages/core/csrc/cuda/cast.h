// Kernels over runs of elements: the parts of an amax, and the cast.
#pragma once

#include <cstdint>

#include "scaling.h"

namespace ottava::cuda {

// What of a tensor the second-level cache is taken to hold after it was read: the last bytes, which a cast that follows
// reads first.
constexpr int64_t kCachedBytes = 32 << 20;

struct NoShared {};

// One partial amax for each block, of groups that lie a grid apart.
template <class Source>
struct PartialAmax {
    static constexpr int kThreads = 512, kBlocksPerMultiprocessor = 3, kUnroll = 4;
    typedef BlockLargest<kThreads> Shared;
    const void* src;
    int64_t count;
    bool wide;
    float* partial;

    static int blocks_for(int64_t count) {
        const int64_t wanted = ceil_div(count, int64_t{kThreads} * kGroup * kUnroll);
        return static_cast<int>(wanted < 1 ? 1 : wanted > kMaxPartials ? kMaxPartials : wanted);
    }

    template <class Thread>
    OTTAVA_DEVICE void operator()(const Thread& thread, Shared& shared) const {
        uint32_t seen = 0;
        const int64_t step = thread.blocks() * kThreads * kGroup;
        int64_t i = (thread.block() * kThreads + thread.index()) * kGroup;
        const int64_t kept = count - kCachedBytes / Source::bytes;
        // All loads of a round are under way before the first is looked at.
        for (; i + (kUnroll - 1) * step + kGroup <= kept; i += kUnroll * step) seen = round<false>(seen, i, step);
        for (; i + (kUnroll - 1) * step + kGroup <= count; i += kUnroll * step) seen = round<true>(seen, i, step);
        for (; i < count; i += step) seen = load_group<Source, true>(src, i, count - i, wide).observe(seen);
        const uint32_t largest = shared(thread, bits_as<uint32_t>(Source::largest(seen)));
        if (thread.index() == 0) partial[thread.block()] = bits_as<float>(largest);
    }

   private:
    template <bool Kept>
    OTTAVA_DEVICE uint32_t round(uint32_t seen, int64_t i, int64_t step) const {
        Group<Source> groups[kUnroll];
#pragma unroll
        for (int k = 0; k < kUnroll; ++k) groups[k] = load_group<Source, Kept>(src, i + k * step, kGroup, wide);
#pragma unroll
        for (int k = 0; k < kUnroll; ++k) seen = groups[k].observe(seen);
        return seen;
    }
};

// The scale of a tensor from partial amaxes, by one block that casts nothing.
struct FinishAmax {
    static constexpr int kThreads = 256, kBlocksPerMultiprocessor = 1;
    typedef BlockLargest<kThreads> Shared;
    const float* partial;
    int count;
    float* amax;

    template <class Thread>
    OTTAVA_DEVICE void operator()(const Thread& thread, Shared& shared) const {
        uint32_t seen = 0;
        for (int i = thread.index(); i < count; i += kThreads) seen = larger(seen, bits_as<uint32_t>(partial[i]));
        const uint32_t largest = shared(thread, seen);
        if (thread.index() == 0) *amax = bits_as<float>(largest);
    }
};

// Codes of a run. The last chunks are cast first: they are what the caches hold after an amax.
template <class Source, class Format, class Scaling>
struct Cast {
    static constexpr int kThreads = 256, kBlocksPerMultiprocessor = 4, kUnroll = 4, kRounds = 2;
    static constexpr int64_t kRound = int64_t{kThreads} * kGroup * kUnroll, kChunk = kRound * kRounds;
    typedef typename Scaling::template Shared<kThreads> Shared;
    const void* src;
    int64_t count;
    bool wide;
    uint8_t* out;
    Scaling scaling;

    // One block at least: it leaves the scale.
    static int64_t blocks_for(int64_t count) { return count == 0 ? 1 : ceil_div(count, kChunk); }

    template <class Thread>
    OTTAVA_DEVICE void operator()(const Thread& thread, Shared& shared) const {
        const float scale = scaling.template get<Format, kThreads>(thread, shared);
        const int64_t begin = (thread.blocks() - 1 - thread.block()) * kChunk;
        uint32_t seen = 0;
        int clamped = 0;
#pragma unroll 1
        for (int64_t at = begin; at < begin + kChunk && at < count; at += kRound) {
            const int64_t first = at + thread.index() * kGroup;
            Group<Source> groups[kUnroll];
#pragma unroll
            for (int k = 0; k < kUnroll; ++k) {
                const int64_t i = first + k * kThreads * kGroup;
                groups[k] = load_group<Source>(src, i, count - i, wide);
            }
#pragma unroll
            for (int k = 0; k < kUnroll; ++k) {
                const int64_t i = first + k * kThreads * kGroup;
                const uint32_t here = groups[k].observe(0);
                seen = Source::merge(seen, here);
                if (scaling.counts() && clamps<Format>(Source::largest(here), scale))
                    clamped += clamped_of<Format>(groups[k], scale);
                store_codes(out, i, count - i, wide, encode_group<Format>(groups[k], scale));
            }
        }
        scaling.template leave<kThreads>(thread, shared, Source::largest(seen), clamped);
    }
};

}  // namespace ottava::cuda
