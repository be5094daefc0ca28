// Kernels over runs of elements: the parts of an amax, and the cast.
#pragma once

#include <cstdint>

#include "scaling.h"

namespace ottava::cuda {

// What of a tensor the second-level cache is taken to hold after it was read: the last bytes, which
// a cast that follows reads first.
constexpr int64_t kCachedBytes = 32 << 20;

struct NoShared {};

// So many blocks that those of a whole grid (kMaxPartials) run at once on 128 multiprocessors;
// Ada's have room for fewer threads.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 890
constexpr int kAmaxBlocks = 3;
#else
constexpr int kAmaxBlocks = 4;
#endif

// One partial amax for each block, of groups that lie a grid apart.
template <class Source>
struct PartialAmax {
    static constexpr int kThreads = 512, kBlocksPerMultiprocessor = kAmaxBlocks, kUnroll = 4;
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
        const uint32_t seen = wide ? of_groups(thread) : of_elements(thread);
        const uint32_t largest = shared(thread, bits_as<uint32_t>(Source::largest(seen)));
        if (thread.index() == 0) partial[thread.block()] = bits_as<float>(largest);
    }

private:
    template <class Thread>
    OTTAVA_DEVICE uint32_t of_groups(const Thread& thread) const {
        uint32_t seen = 0;
        const int64_t step = thread.blocks() * kThreads * kGroup;
        const int64_t kept = count - kCachedBytes / Source::bytes,
                      round = (kUnroll - 1) * step + kGroup;
        int64_t i = (thread.block() * kThreads + thread.index()) * kGroup;
        for (; i + round <= kept; i += kUnroll * step) seen = observed<false>(seen, i, step);
        for (; i + round <= count; i += kUnroll * step) seen = observed<true>(seen, i, step);
        for (; i + kGroup <= count; i += step)
            seen = load_whole<Source, true>(src, i).observe(seen);
        for (; i < count; ++i) seen = Source::observe(seen, Source::load(src, i));
        return seen;
    }

    // All loads of a round are under way before the first is looked at.
    template <bool Kept>
    OTTAVA_DEVICE uint32_t observed(uint32_t seen, int64_t i, int64_t step) const {
        Group<Source> groups[kUnroll];
#pragma unroll
        for (int k = 0; k < kUnroll; ++k) groups[k] = load_whole<Source, Kept>(src, i + k * step);
#pragma unroll
        for (int k = 0; k < kUnroll; ++k) seen = groups[k].observe(seen);
        return seen;
    }

    template <class Thread>
    OTTAVA_DEVICE uint32_t of_elements(const Thread& thread) const {
        uint32_t seen = 0;
        const int64_t step = thread.blocks() * kThreads;
#pragma unroll 4
        for (int64_t i = thread.block() * kThreads + thread.index(); i < count; i += step)
            seen = Source::observe(seen, Source::load(src, i));
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
        const uint32_t largest = shared(thread, largest_part<kThreads>(thread, partial, count));
        if (thread.index() == 0) *amax = bits_as<float>(largest);
    }
};

// Data of a run, which are only looked at when `out` is null. The last chunks are cast first: they
// are what the caches hold after an amax.
template <class Source, class Format, class Scaling>
struct Cast {
    static constexpr int kThreads = 256, kBlocksPerMultiprocessor = 4, kUnroll = 4, kRounds = 2;
    static constexpr int64_t kRound = int64_t{kThreads} * kGroup * kUnroll,
                             kChunk = kRound * kRounds;
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
        int64_t at = (thread.blocks() - 1 - thread.block()) * kChunk;
        const int64_t end = at + kChunk < count ? at + kChunk : count;
        // The first loads are under way while the scale is waited for.
        Group<Source> read[kUnroll];
        bool whole = load(read, at, thread);
        const float scale = scaling.template get<Format, kThreads>(thread, shared);
        uint32_t seen = 0;
        int clamped = 0;
#pragma unroll 1
        while (true) {
            if (whole)
                groups(read, at + thread.index() * kGroup, scale, seen, clamped);
            else
                elements(at + thread.index(), at + kRound < count ? at + kRound : count, scale,
                         seen, clamped);
            at += kRound;
            if (at >= end) break;
            whole = load(read, at, thread);
        }
        scaling.template leave<kThreads>(thread, shared, Source::largest(seen), clamped);
    }

private:
    // Whether a round is whole: then it is loaded.
    template <class Thread>
    OTTAVA_DEVICE bool load(Group<Source> (&read)[kUnroll], int64_t at,
                            const Thread& thread) const {
        if (!wide || at + kRound > count) return false;
        const int64_t first = at + thread.index() * kGroup;
#pragma unroll
        for (int k = 0; k < kUnroll; ++k)
            read[k] = load_whole<Source>(src, first + k * kThreads * kGroup);
        return true;
    }

    OTTAVA_DEVICE void groups(const Group<Source> (&read)[kUnroll], int64_t first, float scale,
                              uint32_t& seen, int& clamped) const {
        uint32_t here = 0;
#pragma unroll
        for (int k = 0; k < kUnroll; ++k) {
            here = read[k].observe(here);
            if (out != nullptr)
                store_whole(out, first + k * kThreads * kGroup,
                            encode_group<Format>(read[k], scale));
        }
        seen = Source::merge(seen, here);
        if (!scaling.counts() || !clamps<Format>(Source::largest(here), scale)) return;
#pragma unroll 1
        for (int k = 0; k < kUnroll; ++k)
            clamped +=
                clamped_of<Format, Source>(src, first + k * kThreads * kGroup, kGroup, scale);
    }

    OTTAVA_DEVICE void elements(int64_t first, int64_t end, float scale, uint32_t& seen,
                                int& clamped) const {
#pragma unroll 1
        for (int64_t i = first; i < end; i += kThreads) {
            const uint32_t element = Source::load(src, i);
            const float value = Source::widen(element);
            seen = Source::observe(seen, element);
            if (scaling.counts() && beyond<Format>(value, scale)) ++clamped;
            if (out != nullptr) out[i] = encode_one<Format, Source>(element, scale);
        }
    }
};

}  // namespace ottava::cuda
